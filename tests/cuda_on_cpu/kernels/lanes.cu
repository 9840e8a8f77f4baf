// lanes.cu: collectives that lanes do not all come to, or come to otherwise, with -D BUG=1.
#include "gpu.cuh"

#if !defined(BUG)
#error "lanes.cu needs -D BUG"
#endif

KERNEL(64) wrong_mask(float* out) {
  const unsigned mask = BUG ? 0x0000ffffu : ALL_LANES;
  out[threadIdx.x] = __shfl_xor_sync(mask, static_cast<float>(threadIdx.x), 1);  // here: wrong_mask
}

KERNEL(64) in_divergent_if(float* out, int n) {
  float x = threadIdx.x;
#if BUG
  if (threadIdx.x < n) x += __shfl_xor_sync(ALL_LANES, x, 1);  // here: in_divergent_if
#else
  const float other = __shfl_xor_sync(ALL_LANES, x, 1);
  if (threadIdx.x < n) x += other;
#endif
  out[threadIdx.x] = x;
}

// Half of each warp comes to one shuffle, half to the other.
KERNEL(64) at_two_places(float* out) {
  float x = threadIdx.x;
#if BUG
  if (threadIdx.x % 2 == 0) {
    x += __shfl_xor_sync(ALL_LANES, x, 2);  // here: at_two_places
  } else {
    x -= __shfl_xor_sync(ALL_LANES, x, 2);
  }
#else
  const float other = __shfl_xor_sync(ALL_LANES, x, 2);
  x = threadIdx.x % 2 == 0 ? x + other : x - other;
#endif
  out[threadIdx.x] = x;
}

KERNEL(64) of_exited_lane(float* out) {
  if (threadIdx.x >= 48) return;
  out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, static_cast<float>(threadIdx.x), BUG ? 16 : 8);  // here: of_exited_lane
}

KERNEL(64) matrix_without_lane(float* out) {
  float c[4] = {};
  const uint32_t a[4] = {};
#if BUG
  if (threadIdx.x == 40) return;
#endif
  multiply_bf16(c, a, 0, 0);  // here: matrix_without_lane
  out[threadIdx.x] = c[0];
}

KERNEL(64) barrier_in_divergent_if(float* out, int n) {
  out[threadIdx.x] = 1.0f;
  if (!BUG || threadIdx.x < n) __syncthreads();  // here: barrier_in_divergent_if
}

KERNEL(64) two_barriers(float* out) {
#if BUG
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();  // here: two_barriers
  }
#else
  __syncthreads();
#endif
  out[threadIdx.x] = 1.0f;
}

// Warp 0 waits for all lanes of its warp, of which half wait for the other warp.
KERNEL(64) each_for_the_other(float* out) {
#if BUG
  if (threadIdx.x < 16) __syncwarp();  // here: each_for_the_other
#else
  __syncwarp();
#endif
  __syncthreads();  // here: the_other
  out[threadIdx.x] = 1.0f;
}
