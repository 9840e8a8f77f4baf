// adjust_logits.cu: bias, penalties and bans, applied to the logits that are sampled from; and the counts behind them.
//   logits           float32[num_rows, vocab_size], rows row_stride elements apart; NaN becomes minus infinity
//   logit_seq, logit_target  int32[num_rows], the sequence of each row; -1 = sampled from, other rows are left out
//   rows             int32[num_seqs], a sequence's row of counts
//   counts           int32[max_num_seqs, vocab_size], how often a token is in the output; sign bit: it is in the
//                    prompt; no pointer where no sequence has penalties
//   repetition_penalty, frequency_penalty, presence_penalty  float32[num_seqs]; 1, 0 and 0 = none
//   bias_start       int32[num_seqs + 1], a sequence's part of bias_ids int32 (each once), bias float32; or no pointer
//   banned_start     int32[num_seqs + 1], a sequence's part of banned int32 (each once); or no pointer
//   adjusted         float32[num_rows, vocab_size]
//   flags            int32[num_seqs], 1 = samples, 4 = enters
//   output_position  int32[num_seqs], how many of the last ids of a history are output
//   history_start    int32[num_seqs + 1], a sequence's part of history int32, the ids of those that enter
//   token_ids        int32[num_seqs], sampled
//   -D               THREADS (a multiple of 32), CHUNK (tokens of a row that a block has)
// A number that every thread reads costs a sector of 32 bytes for each warp: THREADS bytes. `bytes` leaves out atomics,
// and biased and banned ids: 4 bytes for each block of their row, then 128 for a bias and 32 for a ban.
//
// kernel adjust_logits
//   grid       ceil_div(vocab_size, CHUNK) by num_rows, block THREADS
//   bytes      4 * vocab_size * (2 * num_rows + num_penalised) + 10 * THREADS * ceil_div(vocab_size, CHUNK) * num_rows
//   unique     4 * vocab_size * (2 * num_rows + num_penalised)
//   flops      4 * vocab_size * num_penalised
//   registers  40
//   shared     0
//
// kernel count_history
//   grid       ceil_div(vocab_size, CHUNK) by num_seqs, block THREADS
//   bytes      4 * vocab_size * len(histories)
//              + ceil_div(vocab_size, CHUNK) * (4 * sum(histories) + 5 * THREADS * num_seqs)
//   unique     4 * vocab_size * len(histories) + 4 * sum(histories)
//   flops      0
//   registers  32
//   shared     0
//
// kernel count_sampled
//   grid       ceil_div(num_seqs, THREADS), block THREADS
//   bytes      12 * num_seqs + 64 * num_sampled
//   flops      0
//   registers  24
//   shared     0
#include "exact.cuh"

#if !defined(THREADS) || !defined(CHUNK)
#error "adjust_logits.cu needs -D THREADS and CHUNK"
#endif

constexpr int SAMPLES = 1, RESET = 4;  // bits of flags
constexpr uint32_t IN_PROMPT = 0x80000000u;

struct Penalties {
  float repetition, frequency, presence;
};

// The logit of a token with this entry of counts; every operation is rounded by itself.
DEVICE float penalise(float z, uint32_t count, Penalties by) {
  if (count == 0) return z;
  z = z > 0.0f ? __fdiv_rn(z, by.repetition) : __fmul_rn(z, by.repetition);
  const uint32_t num_output = count & ~IN_PROMPT;
  if (num_output == 0) return z;
  return __fsub_rn(__fsub_rn(z, __fmul_rn(by.frequency, static_cast<float>(num_output))), by.presence);
}

KERNEL(THREADS) adjust_logits(float* __restrict__ adjusted, const float* __restrict__ logits,
                              const int* __restrict__ logit_seq, const int* __restrict__ logit_target,
                              const int* __restrict__ rows, const uint32_t* __restrict__ counts,
                              const float* __restrict__ repetition_penalty, const float* __restrict__ frequency_penalty,
                              const float* __restrict__ presence_penalty, const int* __restrict__ bias_start,
                              const int* __restrict__ bias_ids, const float* __restrict__ bias,
                              const int* __restrict__ banned_start, const int* __restrict__ banned, int vocab_size,
                              int64_t row_stride) {
  const int64_t i = blockIdx.y;
  if (logit_target[i] >= 0) return;
  const int seq = logit_seq[i], begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, vocab_size);
  const float* row = logits + i * row_stride;
  float* out = adjusted + i * vocab_size;
  Penalties by = {1.0f, 0.0f, 0.0f};
  if (counts != nullptr) by = {repetition_penalty[seq], frequency_penalty[seq], presence_penalty[seq]};
  const bool penalised = by.repetition != 1.0f || by.frequency != 0.0f || by.presence != 0.0f;
  const uint32_t* counted = penalised ? counts + rows[seq] * static_cast<int64_t>(vocab_size) : nullptr;
  auto finish = [&](int id, float z) { return penalised ? penalise(z, counted[id], by) : z; };
#pragma unroll 4
  for (int id = begin + threadIdx.x; id < end; id += THREADS) out[id] = finish(id, number(row[id]));
  if (bias_start != nullptr && bias_start[seq] < bias_start[seq + 1]) {
    __syncthreads();
    for (int k = bias_start[seq] + threadIdx.x; k < bias_start[seq + 1]; k += THREADS) {
      const int id = bias_ids[k];
      if (id >= begin && id < end) out[id] = finish(id, __fadd_rn(number(row[id]), bias[k]));
    }
  }
  if (banned_start != nullptr && banned_start[seq] < banned_start[seq + 1]) {
    __syncthreads();
    for (int k = banned_start[seq] + threadIdx.x; k < banned_start[seq + 1]; k += THREADS) {
      const int id = banned[k];
      if (id >= begin && id < end) reinterpret_cast<uint32_t*>(out)[id] = BANNED;
    }
  }
}

// Set the row of counts of each sequence that enters with a history.
KERNEL(THREADS) count_history(uint32_t* __restrict__ counts, const int* __restrict__ rows,
                              const int* __restrict__ flags, const int* __restrict__ output_position,
                              const int* __restrict__ history_start, const int* __restrict__ history, int vocab_size) {
  const int seq = blockIdx.y, start = history_start[seq], stop = history_start[seq + 1];
  if (!(flags[seq] & RESET) || start == stop) return;
  uint32_t* row = counts + rows[seq] * static_cast<int64_t>(vocab_size);
  const int begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, vocab_size);
  for (int id = begin + threadIdx.x; id < end; id += THREADS) row[id] = 0;
  __syncthreads();
  for (int k = start + threadIdx.x; k < stop; k += THREADS) {
    const int id = history[k];
    if (id < begin || id >= end) continue;
    if (k < stop - output_position[seq]) {
      atomicOr(row + id, IN_PROMPT);
    } else {
      atomicAdd(row + id, 1u);
    }
  }
}

// Count the tokens of the sequences that sampled.
KERNEL(THREADS) count_sampled(uint32_t* __restrict__ counts, const int* __restrict__ rows,
                              const int* __restrict__ flags, const int* __restrict__ token_ids, int num_seqs,
                              int vocab_size) {
  const int seq = blockIdx.x * THREADS + threadIdx.x;
  if (seq >= num_seqs || !(flags[seq] & SAMPLES)) return;
  counts[rows[seq] * static_cast<int64_t>(vocab_size) + token_ids[seq]] += 1;
}
