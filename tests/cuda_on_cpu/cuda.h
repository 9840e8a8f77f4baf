// cuda.h: what a kernel sees in place of CUDA's built-ins. build.py includes it in front of the kernel's source.
#pragma once
#define CUDA_ON_CPU 1
#include <cstdio>
#include <utility>

#include "numbers.h"
#include "runtime.h"

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ static const
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))  // behind the standard headers, which use the word
#define UNWATCHED __attribute__((no_sanitize("thread")))
#define __shared__ _Pragma("GCC error \"declare shared memory by SHARED_ARRAY or DYNAMIC_SHARED of gpu.cuh\"")

#define SHARED_ARRAY(T, name, extents)                                                    \
  using name##_type = T extents;                                                          \
  static cuda_on_cpu::SharedArray name##_array(#name, sizeof(name##_type), sizeof(T));    \
  name##_type& name = *static_cast<name##_type*>(cuda_on_cpu::storage_of(name##_array))
#define DYNAMIC_SHARED(name) unsigned char* const name = cuda_on_cpu::dynamic_shared()

#define threadIdx (cuda_on_cpu::thread_index())
#define blockIdx (cuda_on_cpu::block_index())
#define blockDim (cuda_on_cpu::block_dim())
#define gridDim (cuda_on_cpu::grid_dim())
#define warpSize 32

#undef assert
#define assert(condition) ((condition) ? static_cast<void>(0) : cuda_on_cpu::trap("assert(" #condition ")"))
inline void __trap() { cuda_on_cpu::trap("__trap()"); }

// ---- Barriers and warps ---------------------------------------------------------------------------------------------
inline void __syncthreads(SITE) { cuda_on_cpu::barrier(cuda_on_cpu::Vote::NONE, 0, site); }
inline int __syncthreads_or(int p, SITE) { return cuda_on_cpu::barrier(cuda_on_cpu::Vote::OR, p, site); }
inline int __syncthreads_and(int p, SITE) { return cuda_on_cpu::barrier(cuda_on_cpu::Vote::AND, p, site); }
inline int __syncthreads_count(int p, SITE) { return cuda_on_cpu::barrier(cuda_on_cpu::Vote::COUNT, p, site); }

#define COLLECTIVE(Result, op, value) \
  static_cast<Result>(cuda_on_cpu::collective(cuda_on_cpu::Op::op, mask, value, 0, site))
inline void __syncwarp(unsigned mask = 0xffffffffu, SITE) { COLLECTIVE(void, SYNC_WARP, 0); }
inline unsigned __ballot_sync(unsigned mask, int p, SITE) { return COLLECTIVE(unsigned, BALLOT, p != 0); }
inline int __any_sync(unsigned mask, int p, SITE) { return COLLECTIVE(int, ANY, p != 0); }
inline int __all_sync(unsigned mask, int p, SITE) { return COLLECTIVE(int, ALL, p != 0); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned x, SITE) { return COLLECTIVE(unsigned, REDUCE_AND, x); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned x, SITE) { return COLLECTIVE(unsigned, REDUCE_OR, x); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned x, SITE) { return COLLECTIVE(unsigned, REDUCE_XOR, x); }
// int or unsigned: as 64 bits both compare as they should
template <class T>
inline T __reduce_add_sync(unsigned mask, T x, SITE) {
  return COLLECTIVE(T, REDUCE_ADD, static_cast<int64_t>(x));
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T x, SITE) {
  return COLLECTIVE(T, REDUCE_MIN, static_cast<int64_t>(x));
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T x, SITE) {
  return COLLECTIVE(T, REDUCE_MAX, static_cast<int64_t>(x));
}

namespace cuda_on_cpu {

template <class T>
inline uint64_t to_bits(T x) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles numbers of 4 or 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &x, sizeof x);
  return bits;
}

template <class T>
inline T shuffle(unsigned mask, T x, int source, Site site) {
  const uint64_t bits = collective(Op::SHUFFLE, mask, to_bits(x), source, site);
  T result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

inline int lane() { return thread_index().x % 32; }

}  // namespace cuda_on_cpu

template <class T>
inline unsigned __match_any_sync(unsigned mask, T x, SITE) {
  return COLLECTIVE(unsigned, MATCH_ANY, cuda_on_cpu::to_bits(x));
}

// Of groups of `width` lanes: from behind its own group a lane gets its own value.
template <class T>
inline T __shfl_sync(unsigned mask, T x, int source, int width = 32, SITE) {
  const int lane = cuda_on_cpu::lane();
  return cuda_on_cpu::shuffle(mask, x, (lane & -width) | (source & (width - 1)), site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int distance, int width = 32, SITE) {
  const int lane = cuda_on_cpu::lane(), source = lane ^ distance;
  return cuda_on_cpu::shuffle(mask, x, source > (lane | (width - 1)) ? lane : source, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned distance, int width = 32, SITE) {
  const int lane = cuda_on_cpu::lane(), source = lane + static_cast<int>(distance);
  return cuda_on_cpu::shuffle(mask, x, source > (lane | (width - 1)) ? lane : source, site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned distance, int width = 32, SITE) {
  const int lane = cuda_on_cpu::lane(), source = lane - static_cast<int>(distance);
  return cuda_on_cpu::shuffle(mask, x, source < (lane & -width) ? lane : source, site);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------
// Caches are not emulated.
template <class T>
inline T __ldg(const T* p) {
  return *p;
}

namespace cuda_on_cpu {

// The only access that is seen is the atomic one.
template <class T, class Change>
UNWATCHED __attribute__((noinline)) T atomic(T* p, Change change) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA has atomics of 4 and 8 bytes");
  observe_atomic(p, sizeof(T), __builtin_return_address(0));
  const T old = *p;
  *p = change(old);
  return old;
}

template <class T>
using Same = std::common_type_t<T>;  // a parameter whose type another one decides

}  // namespace cuda_on_cpu

#define ATOMIC(name, change)                                   \
  template <class T>                                           \
  inline T name(T* p, cuda_on_cpu::Same<T> x) {                \
    return cuda_on_cpu::atomic(p, [x](T old) -> T { return change; }); \
  }
ATOMIC(atomicAdd, old + x)
ATOMIC(atomicSub, old - x)
ATOMIC(atomicMin, x < old ? x : old)
ATOMIC(atomicMax, old < x ? x : old)
ATOMIC(atomicAnd, old & x)
ATOMIC(atomicOr, old | x)
ATOMIC(atomicXor, old ^ x)
ATOMIC(atomicExch, (static_cast<void>(old), x))
template <class T>
inline T atomicCAS(T* p, cuda_on_cpu::Same<T> expected, cuda_on_cpu::Same<T> x) {
  return cuda_on_cpu::atomic(p, [expected, x](T old) -> T { return old == expected ? x : old; });
}

// ---- The way in: EXPORT_KERNEL(name, threads of a block), which build.py writes behind the source -------------------
namespace cuda_on_cpu {

template <class T>
constexpr ParameterType parameter_type() {
  if constexpr (std::is_pointer_v<T>) {
    using Element = std::remove_pointer_t<T>;
    constexpr bool is_const = std::is_const_v<Element>;
    if constexpr (std::is_void_v<Element>) {
      return {'P', is_const, 0, ' '};
    } else {
      constexpr bool is_vector = sizeof(Element) > 8;  // of elements of any size
      constexpr char kind = std::is_floating_point_v<Element> ? 'f' : std::is_integral_v<Element> ? 'i' : ' ';
      return {'P', is_const, is_vector ? 0 : sizeof(Element), kind};
    }
  } else {
    return {std::is_same_v<T, int> ? 'i' : std::is_same_v<T, int64_t> ? 'q' : std::is_same_v<T, float> ? 'f' : '?',
            false, 0, ' '};
  }
}

template <auto function>
struct PackedCall;

// Calls a kernel with parameters as the driver takes them: each at a multiple of its size.
template <class... P, void (*function)(P...)>
struct PackedCall<function> {
  static constexpr ParameterType types[] = {parameter_type<P>()..., {}};

  static constexpr size_t offset_of(size_t parameter) {
    constexpr size_t sizes[] = {sizeof(P)..., 1};
    size_t offset = 0;
    for (size_t i = 0;; i++) {
      offset = (offset + sizes[i] - 1) / sizes[i] * sizes[i];
      if (i == parameter) return offset;
      offset += sizes[i];
    }
  }

  template <class T>
  UNWATCHED static T read(const unsigned char* at) {
    T x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
  }

  template <size_t... I>
  UNWATCHED static void unpack(const unsigned char* packed, std::index_sequence<I...>) {
    function(read<P>(packed + offset_of(I))...);
  }

  static void call(const unsigned char* packed) { unpack(packed, std::index_sequence_for<P...>()); }

  static constexpr Kernel describe(const char* name, unsigned threads) {
    return {name, threads, sizeof...(P), types, offset_of(sizeof...(P)), call};
  }
};

}  // namespace cuda_on_cpu

#define EXPORT_KERNEL(name, threads) \
  EXPORT const cuda_on_cpu::Kernel name##_kernel = cuda_on_cpu::PackedCall<&name>::describe(#name, threads);
