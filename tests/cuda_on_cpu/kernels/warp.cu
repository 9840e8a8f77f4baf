// warp.cu: every collective once; the results are compared with NumPy's.
#include "gpu.cuh"

// out int[NUM_RESULTS][64]
KERNEL(64) collectives(int* out, const int* x) {
  const int v = x[threadIdx.x];
  int i = 0;
  const auto put = [&](int result) { out[64 * i++ + threadIdx.x] = result; };
  put(__shfl_sync(ALL_LANES, v, 5));
  put(__shfl_sync(ALL_LANES, v, 37));
  put(__shfl_sync(ALL_LANES, v, 3, 8));
  put(__shfl_xor_sync(ALL_LANES, v, 16));
  put(__shfl_xor_sync(ALL_LANES, v, 5, 8));
  put(__shfl_xor_sync(ALL_LANES, v, 8, 8));
  put(__shfl_up_sync(ALL_LANES, v, 3));
  put(__shfl_up_sync(ALL_LANES, v, 3, 16));
  put(__shfl_down_sync(ALL_LANES, v, 3));
  put(__shfl_down_sync(ALL_LANES, v, 3, 16));
  put(__ballot_sync(ALL_LANES, v > 0));
  put(__any_sync(ALL_LANES, v == 3));
  put(__all_sync(ALL_LANES, v < 8));
  put(__match_any_sync(ALL_LANES, v));
  put(__reduce_add_sync(ALL_LANES, v));
  put(__reduce_min_sync(ALL_LANES, v));
  put(__reduce_max_sync(ALL_LANES, v));
  put(__reduce_min_sync(ALL_LANES, static_cast<unsigned>(v)));
  put(__reduce_max_sync(ALL_LANES, static_cast<unsigned>(v)));
  put(__reduce_and_sync(ALL_LANES, v));
  put(__reduce_or_sync(ALL_LANES, v));
  put(__reduce_xor_sync(ALL_LANES, v));
  put(__syncthreads_count(v > 0));
  put(__syncthreads_or(v == 3));
  put(__syncthreads_and(v < 8));
}

// Halves of a warp come to the same shuffle with masks of their own, and in another order.
KERNEL(32) halves(int* out) {
  const int half = threadIdx.x / 16;
  const unsigned mask = half ? 0xffff0000u : 0x0000ffffu;
  int sum = threadIdx.x;
  for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(mask, sum, distance);
  out[threadIdx.x] = sum;
}

// Lane 0 is with lane 3 when lane 1 comes for it, and lane 1 with lane 0 when lane 2 comes.
KERNEL(32) masks_in_turn(int* out) {
  const int lane = threadIdx.x;
  int x = lane;
  if (lane == 0 || lane == 3) x += __shfl_xor_sync(9, x, 3);
  if (lane == 0 || lane == 1) x += __shfl_xor_sync(3, x, 1);
  if (lane == 1 || lane == 2) x += __shfl_xor_sync(6, x, 3);
  out[lane] = x;
}

// Numbers of 8 bytes.
KERNEL(32) wide(int64_t* out, const int64_t* x) {
  out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, x[threadIdx.x], 1);
}

// out[i] = what the atomic function i leaves and what the last thread got
KERNEL(64) atomics(int* out, unsigned* bits, float* sum, uint64_t* wide) {
  const int i = threadIdx.x;
  atomicAdd(&out[0], i);
  atomicSub(&out[1], i);
  atomicMin(&out[2], -i);
  atomicMax(&out[3], i);
  atomicCAS(&out[4], i, i + 1);
  atomicExch(&out[5], 7);
  atomicAnd(&bits[0], ~(1u << i % 32));
  atomicOr(&bits[1], 1u << i % 32);
  atomicXor(&bits[2], 1u << i % 32);
  atomicAdd(sum, 0.5f);
  atomicMax(wide, static_cast<uint64_t>(i) << 32);
}
