// copies.cu: a tile of 32 numbers copied through shared memory in two stages, with a fault for each -D BUG of its own.
#include "gpu.cuh"

#define NONE 0
#define WAIT_TOO_LAX 1
#define NO_BARRIER_AFTER_WAIT 2
#define OVERWRITTEN_TOO_EARLY 3
#define NEVER_WAITED 4
#define NO_COMMIT 5
#define MISALIGNED 6
#define WRITTEN_UNDER_WAY 7
#define STAGE_PAST_END 8
#define TO_GLOBAL 9
#define LAST_UNCOMMITTED 10

#if !defined(BUG)
#error "copies.cu needs -D BUG"
#endif

constexpr int TILE = 64 * 4;  // floats

KERNEL(64) sum_tiles(float* out, const float* x, int num_tiles) {
  SHARED_ARRAY(float, stages, [2][TILE]);
  float* mine = &stages[0][threadIdx.x * 4];
  const auto start = [&](int tile) {
    if (tile < num_tiles) {
      float* to = mine + (tile + (BUG == STAGE_PAST_END)) % (2 + (BUG == STAGE_PAST_END)) * TILE;
      if (BUG == TO_GLOBAL) to = out + threadIdx.x * 4;
      copy_async(to + (BUG == MISALIGNED), x + tile * TILE + threadIdx.x * 4, true);  // here: start
    }
    if (BUG != NO_COMMIT) commit_copies();
  };
  start(0);
  float sum[4] = {};
  for (int tile = 0; tile < num_tiles; tile++) {
    start(tile + 1);
    if (BUG == WRITTEN_UNDER_WAY) mine[(tile + 1) % 2 * TILE] = 0.0f;  // here: write
    wait_copies<BUG == WAIT_TOO_LAX ? 2 : 1>();
    if (BUG != NO_BARRIER_AFTER_WAIT) __syncthreads();
    for (int i = 0; i < 4; i++) {
      sum[i] += stages[tile % 2][(63 - threadIdx.x) * 4 + i];  // here: read
    }
    if (BUG != OVERWRITTEN_TOO_EARLY) __syncthreads();
  }
  if (BUG == LAST_UNCOMMITTED) copy_async(mine, x, true);  // here: uncommitted
  if (BUG != NEVER_WAITED) wait_copies<0>();
  if (BUG == NEVER_WAITED) start(0);
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = sum[i];
}

KERNEL(32) fill_with_zeros(float* out, const float* x, int n) {
  SHARED_ARRAY(float, tile, [32 * 4]);
  const bool valid = threadIdx.x < n;
  copy_async(tile + threadIdx.x * 4, valid ? x + threadIdx.x * 4 : x, valid);
  commit_copies();
  wait_copies<0>();
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = tile[threadIdx.x * 4 + i];
}
