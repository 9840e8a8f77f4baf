// paged_prefill.cu: attention of many new tokens a sequence over its paged keys and values, FlashAttention-2.
//
// A row is a (new token, head) pair of one KV head's group, numbered token * group + head, so that the heads of a group
// share each load of keys and values, however many they are. A block does ROWS consecutive rows of a sequence for one
// KV head, and walks the tokens that they see in tiles of KV_TILE counted from position 0. What a row gets is the same,
// bit for bit, whatever the batch, the chunk that it came in, and the rows beside it, for a row of the same sequence
// that needs a tile which this row does not see leaves this one as it was: values there are multiplied by 0, and all in
// the cache are finite, as rope_kv_write sees to.
//   out            T[num_tokens, num_heads, HEAD_DIM]
//   q              T[num_tokens, num_heads, HEAD_DIM], q_stride elements from token to token
//   pool           T[num_blocks, num_layers, 2, num_kv_heads, block_size, HEAD_DIM], block_stride elements from block
//                  to block, this layer from layer_offset on
//   block_tables   int32[num_seqs, table_stride], -1 where nothing is to be read
//   query_start    int32[num_seqs + 1], where the new tokens of each sequence begin in the step
//   seq_lens       int32[num_seqs], tokens in the cache, the new ones included
//   sinks          float32[num_heads], or null
//   first_seq      sequences before it are not looked at, nor those that have no new token (padding)
//   block_shift    log2 of block_size
//   window         tokens seen, the query's own included; 2^31 - 1 = all
//   factor, tanh_factor   of scores, see attention.cuh
//   -D             ELEMENT, HEAD_DIM, ROWS, KV_TILE
//
// Keys of the next tile are in flight while values are added, values of this one while keys are scored: each copy
// has half a tile's time, as with two stages of half the size, but a tile's maximum, rescaling and barriers come half
// as often. A warp has 32 rows up to head_dim 128: each ldmatrix of keys or values then feeds four mma, and shared
// memory keeps up with the tensor cores.
//
// Estimate for sm_90, head_dim 128, no GPU asked: without a mask a warp's tile is 823 instructions, of them 256 mma, 80
// ldmatrix and 68 exp2. Two blocks are two warps a scheduler: 1646 issue slots, 1100 cycles of exp2, 3100 of shared
// memory, and 3300 of mma if mma.sync has 62 % of wgmma's rate, as others measured. Were nothing but mma waited for,
// that is 610 TFLOP/s of an H200; FlashAttention-2, built alike, attains 55 % of it: 340, or 43 % of matmul's 790.
//
// kernel paged_prefill
//   grid       num_kv_heads by num_tokens * group // ROWS + num_seqs - first_seq, block 128
//   unique     sum((s - max(0, s - n + 1 - window)) * 2 * num_kv_heads * HEAD_DIM * sizeof_T
//                  for n, s in zip(query_lens, seq_lens) if n > 0)
//              + sum(query_lens) * num_heads * HEAD_DIM * 2 * sizeof_T
//   bytes      sum((end - begin) * 2 * HEAD_DIM * sizeof_T
//                  + (ceil_div(end, KV_TILE // 4) - begin // (KV_TILE // 4)) * 32
//                  for n, s in zip(query_lens, seq_lens) for i in range(ceil_div(n * group, ROWS))
//                  for begin in (max(0, s - n + i * ROWS // group + 1 - window),)
//                  for end in (s - n + (min((i + 1) * ROWS, n * group) - 1) // group + 1,)) * num_kv_heads
//              + sum(query_lens) * num_heads * HEAD_DIM * 2 * sizeof_T
//              + (sum(query_lens) * group // ROWS + num_seqs) * num_kv_heads * 4 * 32 * (4 + ceil_div(num_seqs, 8))
//   flops      sum((ceil_div(end, KV_TILE) - begin // KV_TILE) * KV_TILE
//                  for n, s in zip(query_lens, seq_lens) for i in range(ceil_div(n * group, ROWS))
//                  for begin in (max(0, s - n + i * ROWS // group + 1 - window),)
//                  for end in (s - n + (min((i + 1) * ROWS, n * group) - 1) // group + 1,))
//              * num_kv_heads * ROWS * 4 * HEAD_DIM
//   registers  255
//   shared     (ROWS + 2 * KV_TILE) * (HEAD_DIM + 8) * sizeof_T + 12 * ROWS
#include "attention.cuh"

#if !defined(ROWS) || !defined(KV_TILE)
#error "paged_prefill.cu needs -D ROWS and KV_TILE"
#endif

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int M = ROWS / WARPS / 16;     // mma tiles of a warp's rows
constexpr int WARP_ROWS = 16 * M;        // rows of a warp
constexpr int COPIED = KV_TILE / WARPS;  // tokens of a tile that a warp copies, all of one KV block
static_assert(M * 16 * WARPS == ROWS && ROWS <= THREADS, "a warp has whole mma tiles, a row has a thread");
static_assert(16 % COPIED == 0, "a warp copies from one KV block");

// ---- Which rows are whose -----------------------------------------------------------------------------------------
// Of a block's or a warp's rows, in shared memory: registers are for what is computed.
struct Rows {
  int* token;  // of the step, -1 behind the last row of the sequence
  int* head;
  int* end;  // one behind the row's own token: it sees the `window` tokens before, up to there

  DEVICE Rows from(int row) const { return {token + row, head + row, end + row}; }
};

// Find this block's sequence and set its ROWS rows, a thread each. Returns the sequence, or -1 if there is no work.
//
// A sequence of n new tokens has t(n) = ceil(n g / ROWS) tiles, g = group. Sequence s has the grid's slots from
// floor(x g / ROWS) + s on, for x new tokens in the s sequences before it. The next one's begin
//     floor((x + n) g / ROWS) - floor(x g / ROWS) + 1  >=  floor(n g / ROWS) + 1  >=  t(n)
// slots later, so each tile has a slot, whatever the lengths, and num_tokens g / ROWS + num_seqs slots are enough.
DEVICE int find_rows(const Rows& rows, const int* query_start, const int* seq_lens, int first_seq, int num_seqs,
                     int group) {
  const int slot = blockIdx.y, lane = threadIdx.x % WARP, origin = query_start[first_seq];
  int seq = first_seq - 1;  // the last whose slots begin at ours or before: 32 of them are looked at at a time
  for (int base = first_seq, found = WARP; found == WARP && base < num_seqs; base += WARP) {
    const int s = base + lane;
    const bool before = s < num_seqs && (query_start[s] - origin) * group / ROWS + s - first_seq <= slot;
    found = __popc(__ballot_sync(ALL_LANES, before));
    seq += found;
  }
  const int first_token = query_start[seq], num_rows = (query_start[seq + 1] - first_token) * group;
  const int first_slot = (first_token - origin) * group / ROWS + seq - first_seq;
  const int num_tiles = (num_rows + ROWS - 1) / ROWS;
  const int tile = num_tiles - 1 - (slot - first_slot);  // those that see the most start first
  if (tile < 0 || seq_lens[seq] == 0) return -1;  // padding may have a row of q, as a decode has
  if (threadIdx.x < ROWS) {
    const int row = tile * ROWS + threadIdx.x, used = min(row, num_rows - 1), query = used / group;
    rows.token[threadIdx.x] = row < num_rows ? first_token + query : -1;
    rows.head[threadIdx.x] = blockIdx.x * group + used % group;
    rows.end[threadIdx.x] = seq_lens[seq] - num_rows / group + query + 1;
  }
  return seq;
}

// ---- What is copied -----------------------------------------------------------------------------------------------
// The tokens that a block's rows see, of one sequence. No other is read, nor its entry of the table.
struct Tokens {
  const T* keys;     // of one head, in block 0
  const int* table;  // of the sequence
  const int* ends;   // [ROWS], of the block's rows
  int window;
  int64_t block_stride;
  int block_shift;

  DEVICE int begin() const { return max(0, ends[0] - window); }
  DEVICE int end() const { return ends[ROWS - 1]; }

  // The KV block of tokens [token, token + COPIED), or any if none of them is seen.
  DEVICE int find_block(int token) const {
    return max(token, begin()) < min(token + COPIED, end()) ? table[token >> block_shift] : 0;
  }

  // Start copying tokens [token, token + COPIED), of KV block `block`, `offset` elements behind the keys; unseen are 0.
  DEVICE void copy(T* shared, int block, int token, int offset) const {
    const int in_block = (token & ((1 << block_shift) - 1)) * HEAD_DIM + offset;
    copy_rows<COPIED>(shared, keys + (block * block_stride + in_block), begin() - token, end() - token);
  }
};

// Start copying a warp's queries to [WARP_ROWS][ROW_STRIDE].
DEVICE void copy_queries(T* shared, const T* q, const Rows& rows, int64_t q_stride) {
  each_unit<WARP_ROWS>([=](int lane_row, int lane_unit, int row, int unit) {
    T* const to = shared + lane_row * ROW_STRIDE + lane_unit * 8;
    const int token = rows.token[lane_row + row], head = rows.head[lane_row + row];
    const T* const from = q + (max(token, 0) * q_stride + (head * HEAD_DIM + lane_unit * 8));
    copy_async(to + (row * ROW_STRIDE + unit * 8), from + unit * 8, token >= 0);
  });
}

// ---- One warp's rows ----------------------------------------------------------------------------------------------
using Output = float[M][HEAD_DIM / 8][4];

// Begin with no key seen, but the sink of each row's head if there are sinks: a weight of 2^0 that has no value.
DEVICE void start_rows(Output& o, float (&m)[M][2], float (&l)[M][2], const float* sinks, const Rows& rows) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int t = 0; t < M; t++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      m[t][i] = sinks ? sinks[rows.head[16 * t + 8 * i + lane / 4]] * LOG2_E : MINUS_INFINITY;
      l[t][i] = sinks && lane % 4 == 0 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[t][n][i] = 0.0f;
  }
}

// Mask the tile of tokens from `first` on, if some row of the warp does not see all of it.
DEVICE void mask_tile(float (&s)[M][KV_TILE / 8][4], const Rows& rows, int first, int window) {
  const int first_end = rows.end[0], last_end = rows.end[WARP_ROWS - 1];
  if (last_end - window <= first && first + KV_TILE <= first_end) return;
  int end[M][2];
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int i = 0; i < 2; i++) end[t][i] = rows.end[16 * t + 8 * i + threadIdx.x % WARP / 4] - first;
  mask_scores<M, KV_TILE>(s, end, window);
}

// Write o / l, by way of shared memory [WARP_ROWS][ROW_STRIDE], so that what goes out is 16 bytes a lane.
DEVICE void store_rows(T* out, T* shared, const Output& o, const float (&l)[M][2], const Rows& rows, int num_heads) {
  const int lane = threadIdx.x % WARP;
  T* const own = shared + lane / 4 * ROW_STRIDE + lane % 4 * 2;
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float by = __fdividef(1.0f, row_sum(l[t][i]));
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n++)
        *reinterpret_cast<uint32_t*>(own + ((16 * t + 8 * i) * ROW_STRIDE + 8 * n)) =
            Element<T>::pair(o[t][n][2 * i] * by, o[t][n][2 * i + 1] * by);
    }
  __syncwarp();
  each_unit<WARP_ROWS>([=](int lane_row, int lane_unit, int row, int unit) {
    const T* const from = shared + lane_row * ROW_STRIDE + lane_unit * 8;
    const int token = rows.token[lane_row + row], head = rows.head[lane_row + row];
    T* const to = out + ((static_cast<int64_t>(token) * num_heads + head) * HEAD_DIM + lane_unit * 8);
    if (token >= 0) store16(to + unit * 8, *reinterpret_cast<const uint4*>(from + (row * ROW_STRIDE + unit * 8)));
  });
}

KERNEL(THREADS, 2)
paged_prefill(T* out, const T* q, const T* pool, const int* block_tables, const int* query_start, const int* seq_lens,
              const float* sinks, int64_t q_stride, int64_t block_stride, int64_t layer_offset, int64_t table_stride,
              int first_seq, int num_seqs, int num_kv_heads, int group, int block_shift, int window, float factor,
              float tanh_factor) {
  SHARED_ARRAY(int, row_fields, [3][ROWS]);
  DYNAMIC_SHARED(shared);
  const Rows block_rows = {row_fields[0], row_fields[1], row_fields[2]};
  const int seq = find_rows(block_rows, query_start, seq_lens, first_seq, num_seqs, group);
  if (seq < 0) return;
  __syncthreads();  // the rows are there
  const int warp = threadIdx.x / WARP, own = warp * COPIED, values = num_kv_heads * HEAD_DIM << block_shift;
  const Rows rows = block_rows.from(warp * WARP_ROWS);
  const Tokens tokens = {pool + (layer_offset + static_cast<int64_t>(blockIdx.x * HEAD_DIM << block_shift)),
                         block_tables + seq * table_stride, block_rows.end, window, block_stride, block_shift};
  T* const q_rows = reinterpret_cast<T*>(shared) + warp * WARP_ROWS * ROW_STRIDE;  // [WARP_ROWS][ROW_STRIDE]
  T* const k_tile = reinterpret_cast<T*>(shared) + ROWS * ROW_STRIDE;              // [KV_TILE][ROW_STRIDE]
  T* const v_tile = k_tile + KV_TILE * ROW_STRIDE;                                 // [KV_TILE][ROW_STRIDE]

  int first = tokens.begin() / KV_TILE * KV_TILE;  // of a tile
  int block = tokens.find_block(first + own);
  copy_queries(q_rows, q, rows, q_stride);
  tokens.copy(k_tile + own * ROW_STRIDE, block, first + own, 0);
  commit_copies();
  Output o;
  float m[M][2], l[M][2];
  start_rows(o, m, l, sinks, rows);
  for (; first < tokens.end(); first += KV_TILE) {
    wait_copies<0>();
    __syncthreads();  // the tile's keys are there, and no warp reads the last one's values any more
    tokens.copy(v_tile + own * ROW_STRIDE, block, first + own, values);
    commit_copies();
    block = tokens.find_block(first + KV_TILE + own);
    float s[M][KV_TILE / 8][4];
    score_keys<M, KV_TILE>(s, q_rows, k_tile);
    wait_copies<0>();
    __syncthreads();  // the values are there, and no warp reads the keys any more
    tokens.copy(k_tile + own * ROW_STRIDE, block, first + KV_TILE + own, 0);
    commit_copies();
    soften_scores<M, KV_TILE>(s, tanh_factor);
    mask_tile(s, rows, first, window);
    raise_maximum<M, KV_TILE>(m, l, o, s, factor);
    add_values<M, KV_TILE>(o, l, s, m, factor, v_tile);
  }
  wait_copies<0>();
  store_rows(out, q_rows, o, l, rows, num_kv_heads * group);
}
