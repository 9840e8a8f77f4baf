// logprobs.cu: log-probabilities of a chosen token and of the most likely ones of each row of raw logits, or of logits
// divided by the sequence's temperature.
//   logits           float32[num_rows, vocab_size], rows row_stride elements apart; NaN counts as minus infinity
//   logit_seq        int32[num_rows], the sequence of each row
//   logit_target     int32[num_rows], the token of column 0, -1 = the sampled one
//   sampled          int32[num_seqs]
//   flags            int32[num_seqs]; SCALED_LOGPROBS is for the rows in which the sequence samples
//   temperature      float32[num_seqs]
//   token_ids, logprobs  int32, float32[num_rows, 1 + num_top]; the top ones by logit, the lower id first among equals
//   ranks            int32[num_rows], 1 + how many tokens have a greater logit than column 0
//   -D               THREADS (a multiple of 32 from 64 to 1024), MAX_TOP (num_top is at most this)
// A block has one row and walks it twice, and for the top tokens once or twice, rarely more, to narrow down where they
// end and once to collect them. `walks` lists how often each row is walked. A number that every thread reads costs a
// sector of 32 bytes for each warp: THREADS bytes. FLOPs are all operations, also those on integers.
//
// kernel logprobs
//   grid       num_rows, block THREADS
//   bytes      4 * vocab_size * sum(walks) + 5 * THREADS * num_rows
//   unique     4 * vocab_size * num_rows
//   flops      vocab_size * (10 * sum(walks) + 50 * num_rows)
//   registers  64
//   shared     32768 + 7 * THREADS // 4 + 128 + 8 * MAX_TOP
#include "ranking.cuh"

#if !defined(MAX_TOP)
#error "logprobs.cu needs -D MAX_TOP"
#endif

constexpr int SCALED_LOGPROBS = 8;  // a bit of a sequence's flags, as in batch.Flag

// What the logits of a row are multiplied with: not 1 only where a flagged sequence samples.
DEVICE float scale_of(int target, int flags, float temperature) {
  const bool is_scaled = target < 0 && flags & SCALED_LOGPROBS && temperature >= GREEDY_TEMPERATURE;
  return is_scaled ? inverse(temperature) : 1.0f;
}

// What is left in shared memory for when the top tokens are found: registers are for what finds them.
struct Left {
  double log_total;  // log(sum(exp((z - z_max) * scale)))
  float scale;
  int num_tokens;  // collected

  DEVICE float log_probability(float z, float z_max) const {
    return __dmul_rn(static_cast<double>(z) - z_max, scale) - log_total;  // not contracted: as the twin
  }
};

// What a walk over the row finds: log(sum(exp((z - z_max) * scale))) in units of 2^-32, and how many logits are above
// z_target.
struct Totals {
  uint64_t log;
  int above;
};

// Also counts the tokens of each step, if `counters` are to.
DEVICE Totals total_row(Row row, Softmax by, float z_target, Counters counters, bool is_finite, bool counts) {
  SHARED_ARRAY(uint64_t, sums, [WARPS]);
  uint64_t mass = 0, above = 0;
  walk_row(row, [&](int, float z) {
    above += z > z_target;
    if (!is_finite) return;
    const float x = exponent(z, by);
    mass += to_mass(x);
    if (counts) counters.add(step_of(x) * WARP + threadIdx.x % WARP, 0);
  });
  above = block_sum(above, sums);
  __syncthreads();
  mass = block_sum(mass, sums);
  __syncthreads();
  return {is_finite ? log_of(mass) : 0, static_cast<int>(above)};
}

// The prefix of num_top tokens of the ranking.
DEVICE Prefix find_top(Row row, Softmax by, int num_top, Counters counters, Counters bins, Sum* steps, bool is_finite) {
  const Sum aim = {NO_GOAL, static_cast<uint64_t>(num_top)};
  Sum before = {0, 0};
  Keys keys = {KEY_OF_MINUS_INFINITY, KEY_OF_INFINITY};
  if (is_finite) {
    fold_steps(counters, steps);
    const Found found = find_place<STEPS>(before, aim, [&](int step) { return steps[step]; });
    before = found.before;
    keys = keys_of(found.place, by);
  }
  return find_prefix(row, keys, before, aim, bins, [](float) { return 0; });
}

// Column 1 on: the tokens of the prefix, in order.
DEVICE void write_top(Row row, Prefix top, int num_top, float z_max, Left* left, int* token_ids, float* logprobs) {
  SHARED_ARRAY(uint64_t, tokens, [MAX_TOP]);  // key, then the complement of the id: the order of the ranking
  const float cut = from_key(top.key);
  walk_row(row, [&](int id, float raw) {
    const float z = number(raw);
    if (z > cut || (z == cut && id < top.end))
      tokens[atomicAdd(&left->num_tokens, 1)] = static_cast<uint64_t>(rank_key(z)) << 32 | (~0u - id);
  });
  __syncthreads();
  for (int n = threadIdx.x; n < num_top; n += THREADS) {
    int place = 0;
    for (int other = 0; other < num_top; other++) place += tokens[other] > tokens[n];
    token_ids[place] = ~static_cast<uint32_t>(tokens[n]);
    logprobs[place] = left->log_probability(from_key(tokens[n] >> 32), z_max);
  }
}

KERNEL(THREADS) logprobs(int* __restrict__ token_ids, float* __restrict__ logprobs, int* __restrict__ ranks,
                         const float* __restrict__ logits, const int* __restrict__ logit_seq,
                         const int* __restrict__ logit_target, const int* __restrict__ sampled,
                         const int* __restrict__ flags, const float* __restrict__ temperature, int vocab_size,
                         int num_top, int64_t row_stride) {
  DYNAMIC_SHARED(memory);
  SHARED_ARRAY(Left, left, [1]);
  uint32_t* words = reinterpret_cast<uint32_t*>(memory);
  const Counters counters = {words, COUNTERS, false}, bins = {words, COUNTERS / 2, false};
  Sum* steps = reinterpret_cast<Sum*>(words + COUNTERS / 2);
  const int i = blockIdx.x, seq = logit_seq[i];
  const int target = logit_target[i] >= 0 ? logit_target[i] : sampled[seq];
  const Row row = row_of(logits + i * row_stride, vocab_size);
  const float z_target = from_key(rank_key(row.base[row.first + target]));  // no NaN, no -0
  const float scale = scale_of(logit_target[i], flags[seq], temperature[seq]);
  const Softmax by = {from_key(find_greatest(row).key), scale};
  const bool is_finite = fabsf(by.z_max) < -MINUS_INFINITY;
  if (num_top > 0) counters.clear();
  __syncthreads();
  const Totals totals = total_row(row, by, z_target, counters, is_finite, num_top > 0);
  token_ids += i * (1 + static_cast<int64_t>(num_top));
  logprobs += i * (1 + static_cast<int64_t>(num_top));
  if (threadIdx.x == 0) {
    left[0] = {totals.log * (1.0 / 4294967296.0), by.scale, 0};  // a power of 2: exact
    token_ids[0] = target;
    logprobs[0] = left->log_probability(z_target, by.z_max);
    ranks[i] = 1 + totals.above;
  }
  if (num_top == 0) return;
  const Prefix top = find_top(row, by, num_top, counters, bins, steps, is_finite);
  write_top(row, top, num_top, by.z_max, left, token_ids + 1, logprobs + 1);
}
