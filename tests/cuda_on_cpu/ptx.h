// ptx.h: host twins of gpu.cuh's PTX functions, by the PTX ISA. gpu.cuh includes it.
#pragma once
#include "numbers.h"
#include "runtime.h"

inline float exp2_approx(float x) { return x < -126.0f ? 0.0f : exp2f(x); }  // .ftz: no subnormal result

// To 16 bits, to the nearest, ties to even; every NaN becomes 0x7fff.
inline uint32_t bf16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t f16_bits(float x) {
  const uint32_t sign = __float_as_uint(x) >> 16 & 0x8000, bits = __float_as_uint(x) & 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (bits >= 0x38800000) return sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  return sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000);  // 0.5f has the subnormals' ulp, 2^-24
}
inline uint32_t pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline uint32_t pack_f16(float low, float high) { return f16_bits(low) | f16_bits(high) << 16; }

inline float f16_to_float(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  if (magnitude > 0x0f800000) return __uint_as_float(sign | magnitude | 0x7fc00000);   // NaN, quiet
  if (magnitude == 0x0f800000) return __uint_as_float(sign | 0x7f800000);              // infinity
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude) * 0x1p112f));  // subnormals too
}

inline void copy_async(void* shared, const void* global, bool valid) {
  cuda_on_cpu::start_copy(shared, global, valid);
}
inline void commit_copies() { cuda_on_cpu::commit_copies(); }
template <int PENDING>
inline void wait_copies() {
  cuda_on_cpu::wait_copies(PENDING);
}

inline void load_matrices(uint32_t (&r)[4], const void* row, SITE) {
  cuda_on_cpu::matrix_collective(cuda_on_cpu::Op::LOAD_MATRICES, row, nullptr, r, site);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row, SITE) {
  cuda_on_cpu::matrix_collective(cuda_on_cpu::Op::LOAD_MATRICES_TRANSPOSED, row, nullptr, r, site);
}
inline void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SITE) {
  const uint32_t b[2] = {b0, b1};
  cuda_on_cpu::matrix_collective(cuda_on_cpu::Op::MULTIPLY_BF16, a, b, c, site);
}
inline void multiply_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SITE) {
  const uint32_t b[2] = {b0, b1};
  cuda_on_cpu::matrix_collective(cuda_on_cpu::Op::MULTIPLY_F16, a, b, c, site);
}
