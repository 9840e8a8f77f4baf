// rows.cu: gathered rows (also the embedding), the last sampled tokens that stay on the device, whole KV blocks.
//   x                 bytes[n][row_bytes], rows x_stride units of 16 bytes apart; row_bytes = 16 * num_units
//   index             int32[num_rows], -1 = padding: that row of out stays as it is
//   out               bytes[num_rows][row_bytes]
//   rows, flags       int32[num_seqs], row -1 = padding
//   query_start       int32[num_seqs + 1]
//   last_token        int32[max_num_seqs], by row
//   input_ids         int32[num_tokens]
//   token_ids         int32[num_seqs]
//   source, target    bytes[num_blocks][block_bytes], two pools or one; block_bytes = 16 * num_units
//   pairs             int32[num_pairs][2], blocks (from, to); no block is the target of two pairs, or, in one pool,
//                     target of one and source of another: all are copied at once
//   -D                THREADS (a multiple of 32)
//
// kernel gather_rows
//   grid       ceil_div(num_rows * row_bytes, 16 * THREADS), block THREADS
//   bytes      num_rows * row_bytes * 2 + ceil_div(num_rows * row_bytes, 512) * 32
//   unique     num_rows * (row_bytes * 2 + 4)
//   flops      0
//   registers  32
//   shared     0
//
// kernel load_last_tokens
//   grid       ceil_div(num_seqs, THREADS), block THREADS
//   bytes      num_seqs * 76
//   unique     num_seqs * 20
//   flops      0
//   registers  32
//   shared     0
//
// kernel store_last_tokens
//   grid       ceil_div(num_seqs, THREADS), block THREADS
//   bytes      num_seqs * 44
//   unique     num_seqs * 16
//   flops      0
//   registers  32
//   shared     0
//
// kernel copy_blocks
//   grid       num_pairs by ceil_div(block_bytes, 16 * THREADS * BATCH), block THREADS
//   bytes      num_pairs * (block_bytes * 2 + ceil_div(block_bytes, 2048) * 64)
//   unique     num_pairs * (block_bytes * 2 + 8)
//   flops      0
//   registers  40
//   shared     0
#include "gpu.cuh"

#if !defined(THREADS)
#error "rows.cu needs -D THREADS"
#endif

constexpr int SAMPLES = 1, INPUT_FROM_LAST_TOKEN = 2;  // bits of a sequence's flags, as in batch.Flag
constexpr int BATCH = 4;                               // units that a thread of copy_blocks has in flight

KERNEL(THREADS)
gather_rows(uint4* __restrict__ out, const uint4* __restrict__ x, const int* __restrict__ index, int num_rows,
            int num_units, int64_t x_stride) {
  const int at = blockIdx.x * THREADS + threadIdx.x;  // units: 2^31 of them are 32 GB
  const int row = at / num_units, unit = at % num_units;
  if (row >= num_rows || index[row] < 0) return;
  store16(out + at, load16(x + index[row] * x_stride + unit));
}

KERNEL(THREADS)
load_last_tokens(int* __restrict__ input_ids, const int* __restrict__ rows, const int* __restrict__ flags,
                 const int* __restrict__ query_start, const int* __restrict__ last_token, int num_seqs) {
  const int seq = blockIdx.x * THREADS + threadIdx.x;
  if (seq < num_seqs && rows[seq] >= 0 && flags[seq] & INPUT_FROM_LAST_TOKEN) {
    input_ids[query_start[seq + 1] - 1] = last_token[rows[seq]];
  }
}

KERNEL(THREADS)
store_last_tokens(int* __restrict__ last_token, const int* __restrict__ rows, const int* __restrict__ flags,
                  const int* __restrict__ token_ids, int num_seqs) {
  const int seq = blockIdx.x * THREADS + threadIdx.x;
  if (seq < num_seqs && rows[seq] >= 0 && flags[seq] & SAMPLES) last_token[rows[seq]] = token_ids[seq];
}

KERNEL(THREADS)
copy_blocks(uint4* __restrict__ target, const uint4* __restrict__ source, const int* __restrict__ pairs,
            int num_units) {
  const uint4* const from = source + static_cast<int64_t>(pairs[2 * blockIdx.x]) * num_units;
  uint4* const to = target + static_cast<int64_t>(pairs[2 * blockIdx.x + 1]) * num_units;
  const int first = blockIdx.y * BATCH * THREADS + threadIdx.x;
  uint4 units[BATCH];
#pragma unroll
  for (int i = 0; i < BATCH; i++)
    if (first + i * THREADS < num_units) units[i] = load16(from + first + i * THREADS);
#pragma unroll
  for (int i = 0; i < BATCH; i++)
    if (first + i * THREADS < num_units) store16(to + first + i * THREADS, units[i]);
}
