// numbers.h: CUDA's functions of numbers: bits, casts, and arithmetic with a stated rounding. What C has (fmaxf,
// copysignf, ...) is taken from there. The fast ones of a GPU (rsqrtf, __fdividef) have some ulp of error that these
// do not have.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#include "vectors.h"

// ---- Of C's functions those that a GPU has for float; to include <cmath> takes a fifth of a kernel's compilation ----
#define OF_ONE(name) extern "C" float name(float) noexcept;
#define OF_TWO(name) extern "C" float name(float, float) noexcept;
OF_ONE(sqrtf)
OF_ONE(exp2f)
OF_ONE(fabsf)
OF_ONE(floorf)
OF_ONE(ceilf)
OF_ONE(truncf)
OF_ONE(rintf)
OF_TWO(fmaxf)
OF_TWO(fminf)
OF_TWO(copysignf)
extern "C" float fmaf(float, float, float) noexcept;
extern "C" int abs(int) noexcept;
inline float abs(float x) { return fabsf(x); }

template <class Float>
inline bool isnan(Float x) {
  return __builtin_isnan(x);
}
template <class Float>
inline bool isinf(Float x) {
  return __builtin_isinf(x);
}
template <class Float>
inline bool isfinite(Float x) {
  return __builtin_isfinite(x);
}
template <class Float>
inline bool signbit(Float x) {
  return __builtin_signbit(x);
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

namespace cuda_on_cpu {

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// A rounded float as an integer: the nearest that there is, and 0 for NaN.
template <class Integer>
inline Integer to_integer(float x) {
  using Limits = std::numeric_limits<Integer>;
  if (x != x) return 0;
  if (x >= static_cast<float>(Limits::max())) return Limits::max();
  if (x <= static_cast<float>(Limits::min())) return Limits::min();
  return static_cast<Integer>(x);
}

}  // namespace cuda_on_cpu

// ---- Bits -----------------------------------------------------------------------------------------------------------
inline int __float_as_int(float x) { return cuda_on_cpu::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bit_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (static_cast<uint64_t>(high) << 32 | low) >> (shift & 31);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned select = selector >> 4 * i;
    const unsigned byte = bytes >> 8 * (select & 7) & 255;
    result |= (select & 8 ? (byte >> 7) * 255 : byte) << 8 * i;  // bit 3: the sign, eight times
  }
  return result;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
}

// ---- Rounding -------------------------------------------------------------------------------------------------------
inline float __fmul_rn(float a, float b) { return cuda_on_cpu::opaque(a * b); }
inline double __dmul_rn(double a, double b) { return cuda_on_cpu::opaque(a * b); }
inline float __fadd_rn(float a, float b) { return cuda_on_cpu::opaque(a) + cuda_on_cpu::opaque(b); }
inline float __fsub_rn(float a, float b) { return cuda_on_cpu::opaque(a) - cuda_on_cpu::opaque(b); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return cuda_on_cpu::to_integer<int>(rintf(x)); }
inline int __float2int_rz(float x) { return cuda_on_cpu::to_integer<int>(truncf(x)); }
inline int __float2int_rd(float x) { return cuda_on_cpu::to_integer<int>(floorf(x)); }
inline int __float2int_ru(float x) { return cuda_on_cpu::to_integer<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return cuda_on_cpu::to_integer<unsigned>(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return cuda_on_cpu::to_integer<unsigned>(truncf(x)); }

// ---- The fast ones --------------------------------------------------------------------------------------------------
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float a, float b) {
  const bool is_huge = fabsf(b) > 0x1p126f && !isinf(b);  // there the reciprocal is flushed to 0
  return is_huge ? a * copysignf(0.0f, b) : a / b;
}
