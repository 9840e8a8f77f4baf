// races.cu: kernels whose barrier is missing with -D BUG=1. "// here: name" marks the line that check must name.
#include "gpu.cuh"

#if BUG
#define UNLESS_BUG(statement)
#else
#define UNLESS_BUG(statement) statement
#endif

KERNEL(64) read_before_barrier(int* out) {
  SHARED_ARRAY(int, s, [64]);
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = threadIdx.x;  // here: read_before_barrier
  UNLESS_BUG(__syncthreads();)
  out[threadIdx.x] = s[63 - threadIdx.x];  // here: other of read_before_barrier
}

KERNEL(64) write_before_barrier(int* out) {
  SHARED_ARRAY(int, s, [64]);
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  const int x = s[63 - threadIdx.x];  // here: write_before_barrier
  UNLESS_BUG(__syncthreads();)
  s[threadIdx.x] = x;  // here: other of write_before_barrier
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

KERNEL(64) in_dynamic_shared(int* out) {
  DYNAMIC_SHARED(shared);
  int* s = reinterpret_cast<int*>(shared);
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = threadIdx.x;  // here: in_dynamic_shared
  UNLESS_BUG(__syncthreads();)
  out[threadIdx.x] = s[63 - threadIdx.x];  // here: other of in_dynamic_shared
}

KERNEL(64) within_warp(int* out) {
  SHARED_ARRAY(int, s, [64]);
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = threadIdx.x;  // here: within_warp
  UNLESS_BUG(__syncwarp();)
  out[threadIdx.x] = s[threadIdx.x ^ 1];  // here: other of within_warp
}

// A shuffle puts no memory in order, and a __syncwarp none of other warps.
KERNEL(64) across_warps(int* out) {
  SHARED_ARRAY(int, s, [64]);
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = __shfl_xor_sync(ALL_LANES, static_cast<int>(threadIdx.x), 1);  // here: across_warps
#if BUG
  __syncwarp();
#else
  __syncthreads();
#endif
  out[threadIdx.x] = s[threadIdx.x ^ 32];  // here: other of across_warps
}

// All read what one then writes, who is in order with his own warp only.
KERNEL(64) one_of_many_readers(int* out) {
  SHARED_ARRAY(int, s, [1]);
  if (threadIdx.x == 0) s[0] = 7;
  __syncthreads();
  out[threadIdx.x] = s[0];  // here: one_of_many_readers
  __syncwarp();
  UNLESS_BUG(__syncthreads();)
  if (threadIdx.x == 0) s[0] = 8;  // here: other of one_of_many_readers
}

// In pairs: lanes 0 and 1, then 1 and 2 synchronise, so lane 2 may read what lane 0 wrote.
KERNEL(64) in_a_chain(int* out) {
  SHARED_ARRAY(int, s, [1]);
  const int lane = threadIdx.x;
  if (lane == 0) s[0] = 7;  // here: in_a_chain
  if (lane < 2) __syncwarp(3);
  if (lane == 1 || lane == 2) UNLESS_BUG(__syncwarp(6));
  if (lane == 2) out[0] = s[0];  // here: other of in_a_chain
}

KERNEL(64) between_blocks(int* out) {
#if BUG
  const int i = threadIdx.x;
#else
  const int i = blockIdx.x * 64 + threadIdx.x;
#endif
  out[i] = blockIdx.x;  // here: between_blocks
}

KERNEL(64) neighbouring_blocks(int* out) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  int before = i - 1;
#if BUG
  if (threadIdx.x == 0 && i > 0) before = out[i - 1];  // here: neighbouring_blocks
#endif
  out[i] = before;  // here: other of neighbouring_blocks
}

KERNEL(64) atomics(int* out) {
  atomicAdd(out, 1);  // here: atomics
  atomicMax(out + 1, static_cast<int>(threadIdx.x));
  UNLESS_BUG(__syncthreads();)
  if (threadIdx.x == 63) out[2] = out[0];  // here: other of atomics
}

KERNEL(64) uninitialised(int* out) {
  SHARED_ARRAY(int, s, [64]);
#if BUG
  if (threadIdx.x != 40) s[threadIdx.x] = 1;
#else
  s[threadIdx.x] = 1;
#endif
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];  // here: uninitialised
}

// Shared memory is another block's no more.
KERNEL(64) of_block_before(int* out) {
  SHARED_ARRAY(int, s, [64]);
#if BUG
  if (blockIdx.x == 0) s[threadIdx.x] = 5;
#else
  s[threadIdx.x] = 5;
#endif
  out[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];  // here: of_block_before
}
