// paged_decode.cu: attention of one new token a sequence over its paged keys and values.
//
// The tokens that a sequence sees are cut into splits of SPLIT. The splits of a whole step are numbered one after the
// other, and one of them for one KV head is an item: as many items as there is work, however unlike the lengths. A
// block does every gridDim-th item, which is one where the grid has as many blocks as items, and ends at the first that
// the step does not have: so a CUDA graph, whose grid is fixed, serves any lengths. A sequence of one split is done
// with that; those of the others meet in paged_decode_combine. Bit for bit, what a sequence gets depends on its own
// tokens alone, not on the grid.
//   out            T[num_seqs, num_heads, HEAD_DIM]
//   workspace      float32[num_heads, max_splits, HEAD_DIM + 2], then int32[num_seqs]: what splits leave, see Partials
//   q              T[num_seqs, num_heads, HEAD_DIM], q_stride elements from sequence to sequence
//   pool           T[num_blocks, num_layers, 2, num_kv_heads, block_size, HEAD_DIM], block_stride elements from block
//                  to block, this layer from layer_offset on
//   block_tables   int32[num_seqs, table_stride], -1 where nothing is to be read
//   seq_lens       int32[num_seqs], tokens in the cache, the query's own included; 0 = padding
//   sinks          float32[num_heads], or null
//   max_splits     the step's splits, or more
//   window         tokens seen, the query's own included; 2^31 - 1 = all
//   group          num_heads / num_kv_heads, at most 16: the rows of an mma tile, which is of 16 whatever the group, so
//                  that all its heads share each load. At an H200's full bandwidth that is a sixth of the issue slots
//                  and an eighth of what mma.sync attains (280 instructions, 32 of them mma, for 8 KiB): it is free.
//   -D             ELEMENT, HEAD_DIM, SPLIT, SLOTS
//
// A block is 4 warps. Each walks every fourth tile of 16 tokens, keys then values, through a ring of its own in shared
// memory, of SLOTS half tiles; SLOTS - 1 of them are in flight by cp.async, and no warp waits for others before the
// end. HEAD_DIM 128 has 48 KiB in flight in a block, and 3 blocks on an SM of 228 KB, 2 on 164 KB, 1 on 100 KB;
// 4.8 TB/s times a latency of 1 us is 36 KB an SM.
//
// kernel paged_decode
//   grid       max_splits * num_kv_heads or fewer, block 128
//   unique     sum(min(n, window) for n in seq_lens) * 2 * num_kv_heads * HEAD_DIM * sizeof_T
//              + sum(min(n, 1) for n in seq_lens) * num_heads * HEAD_DIM * sizeof_T
//              + sum(HEAD_DIM * sizeof_T if s == 1 else s * (HEAD_DIM * 4 + 8) for n in seq_lens
//                    for s in (ceil_div(n - max(0, n - window) // 16 * 16, SPLIT),)) * num_heads
//   bytes      sum(min(n, window) for n in seq_lens) * 2 * num_kv_heads * HEAD_DIM * sizeof_T
//              + sum(ceil_div(n - max(0, n - window) // 16 * 16, SPLIT) for n in seq_lens)
//                * (num_heads * HEAD_DIM * sizeof_T + num_kv_heads * 4 * (ceil_div(num_seqs, 8) * 32 + 160))
//              + sum(HEAD_DIM * sizeof_T if s == 1 else s * (HEAD_DIM * 4 + 32) for n in seq_lens
//                    for s in (ceil_div(n - max(0, n - window) // 16 * 16, SPLIT),)) * num_heads
//   flops      sum(ceil_div(min(n, window), 16) * 16 for n in seq_lens) * 16 * num_kv_heads * 4 * HEAD_DIM
//   registers  128 if HEAD_DIM <= 128 else 255
//   shared     (16 + 64 * SLOTS) * (HEAD_DIM + 8) * sizeof_T + 512
//
// kernel paged_decode_combine
//   grid       num_heads * num_seqs, block 128
//   unique     sum(HEAD_DIM * sizeof_T + s * (HEAD_DIM * 4 + 8) for n in seq_lens
//                  for s in (ceil_div(n - max(0, n - window) // 16 * 16, SPLIT),) if s > 1) * num_heads
//   bytes      num_seqs * num_heads * 4 * 32
//              + sum(HEAD_DIM * sizeof_T + s * (HEAD_DIM * 4 + 32) + 4 * 32 for n in seq_lens
//                    for s in (ceil_div(n - max(0, n - window) // 16 * 16, SPLIT),) if s > 1) * num_heads
//   flops      sum(ceil_div(n - max(0, n - window) // 16 * 16, SPLIT) for n in seq_lens) * num_heads * 2 * HEAD_DIM
//   registers  48
//   shared     min(ceil_div(ceil_div(min(max_seq_len, window + 15), SPLIT), 128 // (HEAD_DIM // 4)), 20) * 2048 + 128
#include "attention.cuh"

#if !defined(SPLIT) || !defined(SLOTS)
#error "paged_decode.cu needs -D SPLIT and SLOTS"
#endif

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int MIN_BLOCKS = HEAD_DIM <= 128 ? 4 : 2;  // on an SM, as far as registers go
constexpr int ROWS = 16;                             // query heads of a group, those that it lacks are zero
constexpr int TILE = 16;                             // tokens, all of one KV block
constexpr int LANES = HEAD_DIM / 4;                  // threads that share a row of float, 16 bytes each
constexpr int GROUPS = THREADS / LANES;              // of LANES threads, in paged_decode_combine
static_assert(SPLIT % TILE == 0 && SPLIT / TILE <= WARP, "each tile of a split has a lane that knows where it lies");

// ---- Which split is whose -----------------------------------------------------------------------------------------
// The first token of a sequence's splits: where its window begins, or up to 15 before.
DEVICE int first_token(int seq_len, int window) { return max(0, seq_len - window) / TILE * TILE; }

DEVICE int num_splits(int seq_len, int window) {
  return (seq_len - first_token(seq_len, window) + SPLIT - 1) / SPLIT;
}

struct Place {
  int seq;    // -1: the step has fewer splits
  int split;  // of the sequence
};

// Find split `index` of the WARP sequences from `first` on; this lane's has `own` of them. PRECOND: index < their sum.
DEVICE Place find_among(int index, int first, int own) {
  const int lane = threadIdx.x % WARP;
  int total = own;  // of the sequences up to this lane's
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int before = __shfl_up_sync(ALL_LANES, total, distance);
    if (lane >= distance) total += before;
  }
  const int owner = __ffs(__ballot_sync(ALL_LANES, index < total)) - 1;
  return {first + owner, index - __shfl_sync(ALL_LANES, total - own, owner)};
}

// Find the step's split `index`, by a whole warp.
DEVICE Place find_split(int index, const int* seq_lens, int num_seqs, int window) {
  constexpr int AHEAD = 4;  // loads of a lane at a time
  for (int first = 0; first < num_seqs; first += AHEAD * WARP) {
    int own[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int seq = first + i * WARP + threadIdx.x % WARP;
      own[i] = seq < num_seqs ? num_splits(seq_lens[seq], window) : 0;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int all = __reduce_add_sync(ALL_LANES, own[i]);
      if (index < all) return find_among(index, first + i * WARP, own[i]);
      index -= all;
    }
  }
  return {-1, 0};
}

// ---- Parts of a softmax -------------------------------------------------------------------------------------------
// Four dimensions of a weighted sum of values.
struct Part {
  float4 x;
  float top;  // the largest exponent of a weight; x and sum are relative to 2^top
  float sum;  // of the weights
};

DEVICE Part no_part() { return {{0.0f, 0.0f, 0.0f, 0.0f}, MINUS_INFINITY, 0.0f}; }

// Add a part to `all`, whose top is no less.
DEVICE void add(Part& all, const Part& part) {
  const float by = exp2_approx(part.top - finite(all.top));
  all.x.x = fmaf(part.x.x, by, all.x.x);
  all.x.y = fmaf(part.x.y, by, all.x.y);
  all.x.z = fmaf(part.x.z, by, all.x.z);
  all.x.w = fmaf(part.x.w, by, all.x.w);
  all.sum = fmaf(part.sum, by, all.sum);
}

// Write four dimensions of the output: divided by the weights' sum, to which the head's sink adds its own.
DEVICE void finish(T* out, const Part& part, const float* sinks, int head) {
  const float sink = sinks ? sinks[head] * LOG2_E : MINUS_INFINITY;
  const float top = fmaxf(part.top, sink);
  const float keep = exp2_approx(part.top - top);
  const float by = keep / fmaf(part.sum, keep, exp2_approx(sink - top));
  *reinterpret_cast<uint2*>(out) = make_uint2(Element<T>::pair(part.x.x * by, part.x.y * by),
                                              Element<T>::pair(part.x.z * by, part.x.w * by));
}

// What blocks leave for paged_decode_combine: a part for each head and split of the step.
struct Partials {
  float* values;    // [num_heads, max_splits, HEAD_DIM]
  float2* weights;  // [num_heads, max_splits], the part's top and sum
  int* first;       // [num_seqs], number of the sequence's first split
  int64_t max_splits;

  DEVICE Partials(float4* workspace, int num_heads, int max_splits)
      : values(reinterpret_cast<float*>(workspace)), max_splits(max_splits) {
    weights = reinterpret_cast<float2*>(values + num_heads * this->max_splits * HEAD_DIM);
    first = reinterpret_cast<int*>(weights + num_heads * this->max_splits);
  }

  DEVICE void store(int head, int split, int d, const Part& part) const {
    const int64_t place = head * max_splits + split;
    *reinterpret_cast<float4*>(values + place * HEAD_DIM + d) = part.x;
    if (d == 0) weights[place] = make_float2(part.top, part.sum);
  }
};

// ---- One warp's share of a split ----------------------------------------------------------------------------------
// Its tiles number warp, warp + WARPS, ... below num_tiles, keys then values of each, copied through a ring of its own.
struct Walk {
  T* ring;         // [SLOTS][TILE][ROW_STRIDE]
  const T* keys;   // of this layer and KV head, in block 0
  int64_t values;  // elements from keys to values
  int64_t offset;  // elements from block 0 to the tile of this lane's number
  int begin, end;  // the tokens of the split that the query sees
  int num_tiles;

  DEVICE T* slot(int half) const { return ring + half % SLOTS * TILE * ROW_STRIDE; }

  // Start copying half a tile: 2 i the keys, 2 i + 1 the values of the warp's tile i. Past the last, commit nothing.
  DEVICE void start(int half) const {
    const int tile = threadIdx.x / WARP + half / 2 * WARPS;
    if (tile < num_tiles) {
      const T* const from = keys + __shfl_sync(ALL_LANES, offset, tile) + half % 2 * values;
      copy_rows<TILE>(slot(half), from, begin - tile * TILE, end - tile * TILE);
    }
    commit_copies();
  }

  // Wait for a half, the oldest in flight, and start the copy to where the half before it was.
  DEVICE const T* take(int half) const {
    wait_copies<SLOTS - 2>();
    __syncwarp();  // all lanes' copies are there, and no lane reads the half before any more
    start(half + SLOTS - 1);
    return slot(half);
  }
};

// Copy the group's queries to [ROWS][ROW_STRIDE], by one warp.
DEVICE void copy_queries(T* shared, const T* q, int group) {
  each_unit<ROWS>([=](int lane_row, int lane_unit, int row, int unit) {
    row += lane_row;
    unit += lane_unit;
    const T* const from = q + (row < group ? row : 0) * HEAD_DIM + unit * 8;
    copy_async(shared + row * ROW_STRIDE + unit * 8, from, row < group);
  });
}

// Attend with the group's rows to the warp's tiles: values o relative to 2^m, l this lane's part of the weights' sum.
DEVICE void attend(float (&o)[1][HEAD_DIM / 8][4], float (&m)[1][2], float (&l)[1][2], const T* queries,
                   const Walk& walk, float factor, float tanh_factor) {
  int half = 0;
  for (int tile = threadIdx.x / WARP; tile < walk.num_tiles; tile += WARPS, half += 2) {
    float s[1][TILE / 8][4];
    score_keys<1, TILE>(s, queries, walk.take(half));
    soften_scores<1, TILE>(s, tanh_factor);
    const int begin = walk.begin - tile * TILE, end = walk.end - tile * TILE;
    if (begin > 0 || end < TILE) mask_scores<1, TILE>(s, {{end, end}}, end - begin);
    raise_maximum<1, TILE>(m, l, o, s, factor);
    add_values<1, TILE>(o, l, s, m, factor, walk.take(half + 1));
  }
}

// Leave the warp's part of the group's rows in shared memory: values [ROWS][ROW_STRIDE], maximum and sum [ROWS].
DEVICE void store_part(float* values, float2* weights, const float (&o)[HEAD_DIM / 8][4], const float (&m)[2],
                       const float (&l)[2], int group) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane / 4 + 8 * i;
    const float sum = row_sum(l[i]);
    if (row >= group) continue;
    if (lane % 4 == 0) weights[row] = make_float2(m[i], sum);
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
      *reinterpret_cast<float2*>(values + row * ROW_STRIDE + 8 * n + lane % 4 * 2) =
          make_float2(o[n][2 * i], o[n][2 * i + 1]);
  }
}

// Return the sum of the warps' parts, four dimensions of a row.
DEVICE Part add_warps(const float* values, const float2 (&weights)[WARPS][ROWS], int row) {
  Part all = no_part();
#pragma unroll
  for (int w = 0; w < WARPS; w++) all.top = fmaxf(all.top, weights[w][row].x);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float2 own = weights[w][row];
    add(all, {*reinterpret_cast<const float4*>(values + w * ROWS * ROW_STRIDE), own.x, own.y});
  }
  return all;
}

KERNEL(THREADS, MIN_BLOCKS)
paged_decode(T* out, float4* workspace, const T* q, const T* pool, const int* block_tables, const int* seq_lens,
             const float* sinks, int64_t q_stride, int64_t block_stride, int64_t layer_offset, int table_stride,
             int num_seqs, int num_kv_heads, int max_splits, int group, int block_size, int window, float factor,
             float tanh_factor) {
  DYNAMIC_SHARED(shared);
  SHARED_ARRAY(float2, weights, [WARPS][ROWS]);
  const int num_blocks = gridDim.x;
  for (int item = blockIdx.x; item < max_splits * num_kv_heads; item += num_blocks) {
    if (item >= num_blocks) __syncthreads();  // no thread reads in shared memory what the item before left
    const int kv_head = item % num_kv_heads, index = item / num_kv_heads;
    const Place place = find_split(index, seq_lens, num_seqs, window);
    if (place.seq < 0) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, seq_len = seq_lens[place.seq];

    T* const queries = reinterpret_cast<T*>(shared);  // [ROWS][ROW_STRIDE], behind them the warps' rings
    if (warp == 0) copy_queries(queries, q + place.seq * q_stride + kv_head * group * HEAD_DIM, group);
    commit_copies();
    const int64_t head_size = static_cast<int64_t>(block_size) * HEAD_DIM;
    const int origin = first_token(seq_len, window) + place.split * SPLIT;
    Walk walk = {};
    walk.ring = queries + (ROWS + warp * SLOTS * TILE) * ROW_STRIDE;
    walk.keys = pool + layer_offset + kv_head * head_size;
    walk.values = num_kv_heads * head_size;
    walk.begin = max(0, seq_len - window - origin);
    walk.end = min(SPLIT, seq_len - origin);
    walk.num_tiles = (walk.end + TILE - 1) / TILE;
    if (lane < walk.num_tiles) {
      const int token = origin + lane * TILE;
      const int64_t block = block_tables[static_cast<int64_t>(place.seq) * table_stride + token / block_size];
      walk.offset = block * block_stride + token % block_size * HEAD_DIM;
    }
#pragma unroll
    for (int half = 0; half < SLOTS - 1; half++) walk.start(half);
    wait_copies<SLOTS - 1>();
    __syncthreads();  // the queries are there

    float o[1][HEAD_DIM / 8][4] = {}, m[1][2] = {{MINUS_INFINITY, MINUS_INFINITY}}, l[1][2] = {};
    attend(o, m, l, queries, walk, factor, tanh_factor);

    __syncthreads();  // no warp reads queries or rings any more
    float* const values = reinterpret_cast<float*>(shared);  // [WARPS][ROWS][ROW_STRIDE] in their place
    store_part(values + warp * ROWS * ROW_STRIDE, weights[warp], o[0], m[0], l[0], group);
    __syncthreads();
    const int num_heads = num_kv_heads * group;
    const Partials partials(workspace, num_heads, max_splits);
    if (place.split == 0 && kv_head == 0 && threadIdx.x == 0) partials.first[place.seq] = index;
    for (int i = threadIdx.x; i < group * LANES; i += THREADS) {
      const int row = i / LANES, head = kv_head * group + row, d = i % LANES * 4;
      const Part all = add_warps(values + row * ROW_STRIDE + d, weights, row);
      if (num_splits(seq_len, window) == 1) {
        finish(out + (static_cast<int64_t>(place.seq) * num_heads + head) * HEAD_DIM + d, all, sinks, head);
      } else {
        partials.store(head, index, d, all);
      }
    }
  }
}

// Merge a sequence's splits for one head: GROUPS of LANES threads add up every GROUPS-th split each, and then their
// sums meet. `depth` splits of a group are in flight to shared memory at a time; how many changes no bit.
KERNEL(THREADS)
paged_decode_combine(T* out, float4* workspace, const int* seq_lens, const float* sinks, int num_heads, int max_splits,
                     int window, int depth) {
  DYNAMIC_SHARED(shared);
  SHARED_ARRAY(float, tops, [WARPS]);
  SHARED_ARRAY(float, sums, [GROUPS]);
  const int head = blockIdx.x % num_heads, seq = blockIdx.x / num_heads;
  const int count = num_splits(seq_lens[seq], window);
  if (count <= 1) return;
  const Partials partials(workspace, num_heads, max_splits);
  const int64_t first = head * partials.max_splits + partials.first[seq];
  const float2* const weights = partials.weights + first;  // [count]
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES, step = GROUPS * depth;
  float4* const values = reinterpret_cast<float4*>(shared) + threadIdx.x;  // this thread's of [depth][THREADS]
  const auto start = [=](int begin) {
    for (int split = begin, i = 0; split < min(count, begin + step); split += GROUPS, i++)
      copy_async(values + i * THREADS, partials.values + (first + split) * HEAD_DIM + lane * 4, true);
    commit_copies();
  };
  const int own = group < GROUPS ? group : count;  // the group's first split
  start(own);

  Part all = no_part();
  for (int split = threadIdx.x; split < count; split += THREADS) all.top = fmaxf(all.top, weights[split].x);
  all.top = warp_max(all.top);
  if (threadIdx.x % WARP == 0) tops[threadIdx.x / WARP] = all.top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) all.top = fmaxf(all.top, tops[w]);

  for (int begin = own; begin < count; begin += step) {
    wait_copies<0>();
    for (int split = begin, i = 0; split < min(count, begin + step); split += GROUPS, i++) {
      const float2 weight = weights[split];
      add(all, {values[i * THREADS], weight.x, weight.y});
    }
    start(begin + step);
  }

  if (group < GROUPS) values[0] = all.x;
  if (group < GROUPS && lane == 0) sums[group] = all.sum;
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int i = 1; i < GROUPS; i++) add(all, {values[i * LANES], all.top, sums[i]});
  finish(out + (static_cast<int64_t>(seq) * num_heads + head) * HEAD_DIM + lane * 4, all, sinks, head);
}
