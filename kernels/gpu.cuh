// gpu.cuh: what every kernel includes, and all that it includes: types, conversions, 16-byte accesses, reductions over
// a warp and a block, and each PTX instruction that CUDA C++ has no name for, in a function of its own.
//
// NVRTC and nvcc read it for a GPU; it needs no toolkit header. g++ reads it for the tests, where
// tests/cuda_on_cpu stands in for CUDA's built-ins and has a host twin of each PTX function.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#elif defined(__CUDACC__)
#include <stdint.h>
#endif

#define DEVICE __device__ __forceinline__
// KERNEL(THREADS) name(...): a kernel by its plain name, compiled for blocks of THREADS; launch.py reads its text.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

#if !defined(CUDA_ON_CPU)
#define SHARED_ARRAY(T, name, extents) __shared__ __align__(16) T name extents  // SHARED_ARRAY(float, sums, [4][32]);
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

constexpr int WARP = 32;                     // threads
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY __int_as_float(0xff800000)

struct __align__(2) bf16 { uint16_t bits; };
struct __align__(2) f16 { uint16_t bits; };

// ---- PTX ------------------------------------------------------------------------------------------------------------
#if defined(CUDA_ON_CPU)
#include "ptx.h"
#else
DEVICE float exp2_approx(float x) {  // 2 ulp; subnormal results are 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DEVICE float f16_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Start copying 16 bytes to shared memory, past L1. If !valid they become 0, and `global` is any mapped address.
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's committed groups are in flight. Others see the bytes after a barrier.
template <int PENDING>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane 8 i + j gives the address of row j of matrix i.
DEVICE void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]
DEVICE void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// ---- Elements, one by one, in pairs, and by 16 bytes ----------------------------------------------------------------
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
DEVICE float to_float(f16 x) { return f16_to_float(x.bits); }

template <class T>
struct Element;  // T from float; of a 16-bit T also two at a time: a pair in one word, the first in its low half

template <>
struct Element<float> {
  static DEVICE float from(float x) { return x; }
};

template <>
struct Element<bf16> {
  static DEVICE uint32_t pair(float low, float high) { return pack_bf16(low, high); }
  static DEVICE bf16 from(float x) { return {static_cast<uint16_t>(pack_bf16(x, 0.0f))}; }
  static DEVICE float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static DEVICE float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  static DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_bf16(c, a, b0, b1);
  }
};

template <>
struct Element<f16> {
  static DEVICE uint32_t pair(float low, float high) { return pack_f16(low, high); }
  static DEVICE f16 from(float x) { return {static_cast<uint16_t>(pack_f16(x, 0.0f))}; }
  static DEVICE float low(uint32_t pair) { return f16_to_float(static_cast<uint16_t>(pair)); }
  static DEVICE float high(uint32_t pair) { return f16_to_float(static_cast<uint16_t>(pair >> 16)); }
  static DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_f16(c, a, b0, b1);
  }
};

template <class T>
constexpr int PER_16_BYTES = 16 / sizeof(T);  // elements

DEVICE uint4 load16(const void* p) { return __ldg(static_cast<const uint4*>(p)); }  // of what no thread writes
DEVICE uint4 read16(const void* p) { return *static_cast<const uint4*>(p); }  // also of what this thread writes later
DEVICE void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

#if defined(ELEMENT)
using T = ELEMENT;  // the type that a kernel is compiled for: bf16, f16 or float
#endif

// Elements of 16 bytes as floats, and back.
template <class T>
DEVICE void unpack16(float (&f)[PER_16_BYTES<T>], uint4 v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(T) == 4) {
      f[i] = __uint_as_float(words[i]);
    } else {
      f[2 * i] = Element<T>::low(words[i]);
      f[2 * i + 1] = Element<T>::high(words[i]);
    }
  }
}

template <class T>
DEVICE uint4 pack16(const float (&f)[PER_16_BYTES<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(f[i]);
    } else {
      words[i] = Element<T>::pair(f[2 * i], f[2 * i + 1]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// ---- Reductions, in a fixed order -----------------------------------------------------------------------------------
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
  return x;
}

// Sum over a block of SIZE threads, a multiple of 32; every thread gets it.
template <int SIZE>
DEVICE float block_sum(float x) {
  SHARED_ARRAY(float, sums, [SIZE / WARP]);
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < SIZE / WARP; w++) total += sums[w];
  __syncthreads();  // sums may be used again from here
  return total;
}
