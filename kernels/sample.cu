// sample.cu: pick the next token of each row of logits: temperature, top-k, top-p, min-p, then one Philox word.
//   logits           float32[num_rows, vocab_size], rows row_stride elements apart
//   logit_seq        int32[num_rows], the sequence of each row
//   logit_target     int32[num_rows], -1 = sample here; other rows are left out
//   temperature      float32[num_seqs], below 1e-5 = greedy, and by sequence too:
//   top_k, top_p, min_p  int32 (0 = all), float32 (1 = all), float32 (0 = all)
//   seed             int32[num_seqs, 2]
//   group_index, output_position  int32
//   token_ids        int32[num_seqs]; set where a row samples
//   -D               THREADS (a multiple of 32 from 64 to 1024)
// A block has one row and walks it several times: once to find the greatest logit, which is all that a greedy row
// needs; once to put the tokens into steps, where top-k or top-p is asked for, and for each of the two once or twice,
// rarely more, to narrow down where its prefix ends; and once for the draw, which then looks again at a 32nd of the row
// and at 128 tokens. `walks` lists how often each row is walked, num_draws rows are not greedy, num_weighed walks
// compute the mass of every token: that of the steps where there is a top-p, that of the draw where nothing was
// filtered. A number that every thread reads costs a sector of 32 bytes for each warp: THREADS bytes.
//
// How long a row takes on its SM, in us: greedy 6, unfiltered 45, top-k 35, top-p 70, both 85. Not measured: estimated
// for 128,256 tokens at 1.75 GHz from the instructions of sm_90 (69 a token that is weighed, 10 one that is compared,
// 4 a clock) and 64 bytes a clock from L2. FLOPs below are all operations, also those on integers.
//
// kernel sample
//   grid       num_rows, block THREADS
//   bytes      4 * vocab_size * sum(walks) + 3 * THREADS * num_rows
//              + (vocab_size // 8 + 2048 + 7 * THREADS) * num_draws
//   unique     4 * vocab_size * num_rows
//   flops      vocab_size * (10 * sum(walks) + 58 * num_weighed)
//   registers  64
//   shared     98304 + 7 * THREADS // 4 + 128
#include "philox.cuh"
#include "ranking.cuh"

// Bins, and after the steps' counters their sums, share the memory of the steps' counters.
struct Memory {
  Counters by_step, bins;
  Sum* steps;
};

DEVICE Memory divide(unsigned char* memory, bool with_mass) {
  uint32_t* words = reinterpret_cast<uint32_t*>(memory);
  Sum* steps = reinterpret_cast<Sum*>(words + 3 * COUNTERS / 2);
  return {{words, COUNTERS, with_mass}, {words, COUNTERS / 2, with_mass}, steps};
}

// What top-k and then top-p leave of a row.
DEVICE Prefix filter(Row row, Softmax by, int top_k, float top_p, Memory memory) {
  const bool with_mass = top_p < 1.0f;
  auto weigh = [&](float z) { return with_mass ? to_mass(exponent(z, by)) : 0; };
  memory.by_step.clear();
  __syncthreads();
  walk_row(row, [&](int, float z) {
    const float x = exponent(z, by);
    const int step = step_of(x);
    if (step < STEPS - 1) memory.by_step.add(step * WARP + threadIdx.x % WARP, with_mass ? to_mass(x) : 0);
  });
  __syncthreads();
  fold_steps(memory.by_step, memory.steps);
  Prefix kept = {KEY_OF_MINUS_INFINITY, ALL_IDS, {0, 0}};
  Sum aim = {NO_GOAL, top_k > 0 ? top_k : NO_GOAL};
  for (int filters = 0; filters < 2; filters++) {
    const Found found = find_place<STEPS>({0, 0}, aim, [&](int step) { return memory.steps[step]; });
    if (found.place < STEPS) {
      kept = find_prefix(row, keys_of(found.place, by), found.before, aim, memory.bins, weigh);
    } else {
      kept.sum = found.before;
    }
    if (!with_mass) break;
    aim = {goal(kept.sum.mass, top_p), NO_GOAL};
  }
  return kept;
}

KERNEL(THREADS) sample(int* __restrict__ token_ids, const float* __restrict__ logits, const int* __restrict__ logit_seq,
                       const int* __restrict__ logit_target, const float* __restrict__ temperature,
                       const int* __restrict__ top_k, const float* __restrict__ top_p, const float* __restrict__ min_p,
                       const int* __restrict__ seed, const int* __restrict__ group_index,
                       const int* __restrict__ output_position, int vocab_size, int64_t row_stride) {
  DYNAMIC_SHARED(memory);
  const int i = blockIdx.x;
  if (logit_target[i] >= 0) return;
  const int seq = logit_seq[i];
  const Row row = row_of(logits + i * row_stride, vocab_size);
  const Greatest top = find_greatest(row);
  int token = top.id;
  if (temperature[seq] >= GREEDY_TEMPERATURE && top.key > KEY_OF_MINUS_INFINITY && top.key < KEY_OF_INFINITY) {
    const Softmax by = {from_key(top.key), inverse(temperature[seq])};
    Prefix kept = {KEY_OF_MINUS_INFINITY, ALL_IDS, {0, 0}};
    if (top_k[seq] > 0 || top_p[seq] < 1.0f)
      kept = filter(row, by, top_k[seq], top_p[seq], divide(memory, top_p[seq] < 1.0f));
    const uint64_t least = least_mass(min_p[seq]);
    const uint32_t word = random_word(seed[2 * seq], seed[2 * seq + 1], output_position[seq], group_index[seq]);
    const float cut = from_key(kept.key);
    auto weight = [&](int id, float z) -> uint64_t {
      if (!(z > cut || (z == cut && id < kept.end))) return 0;
      const uint64_t mass = to_mass(exponent(z, by));
      return mass >= least ? mass : 0;
    };
    token = find_in_order(row, weight, [&](uint64_t total) { return portion(total, word); });
  }
  if (threadIdx.x == 0) token_ids[seq] = token;
}
