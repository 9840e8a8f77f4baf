// attention.cuh: one warp's share of FlashAttention-2 on tensor cores, for paged_decode.cu and paged_prefill.cu.
//
// A warp has M tiles of 16 rows; a row is a (query, head) pair. Scores [16 M, KEYS] and the output [16 M, HEAD_DIM] are
// in the registers as mma.m16n8k16 leaves them: lane 4 r + c holds, of each 16 x 8 part,
//      x[0], x[1]   row r,     columns 2 c and 2 c + 1
//      x[2], x[3]   row r + 8, the same columns
// so four lanes share a row, and what belongs to a row (m, l) is a pair: of row r and row r + 8.
// Scores become exponents of 2 by the factors that score_factors (attention.py) makes of scale and softcap.
// -D: ELEMENT (bf16 or f16), HEAD_DIM (a multiple of 16)
#pragma once
#include "gpu.cuh"

#if !defined(ELEMENT) || !defined(HEAD_DIM)
#error "attention.cuh needs -D ELEMENT and HEAD_DIM"
#endif

// Elements from row to row in shared memory: an odd number of 16-byte units, so that the same unit of eight rows lies
// in eight groups of banks, and ldmatrix has no bank conflict.
constexpr int ROW_STRIDE = HEAD_DIM + 8;

// The lanes of a warp share NUM_ROWS rows [HEAD_DIM] by 16-byte units. Call f(lane_row, lane_unit, row, unit) for each
// unit of this lane: unit lane_unit + unit of row lane_row + row, of which row and unit are constants once unrolled.
// Eight lanes have eight units of a row at a time: whole sectors of 32 bytes in global memory, and eight different
// groups of banks in shared memory [NUM_ROWS][ROW_STRIDE]. A row of head_dim 80 or 96 ends with TAIL units, fewer than
// eight. Then eight lanes have the ends of 8 / TAIL rows that lie TAIL rows apart: as ROW_STRIDE is an odd number of
// units, these ends lie TAIL groups of banks apart.
template <int NUM_ROWS, class F>
DEVICE void each_unit(F f) {
  constexpr int UNITS = HEAD_DIM / 8, TAIL = UNITS % 8;
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int row = 0; row < NUM_ROWS; row += 4)
#pragma unroll
    for (int unit = 0; unit < UNITS - TAIL; unit += 8) f(lane / 8, lane % 8, row, unit);
  constexpr int SPAN = TAIL > 0 ? TAIL : 8;
  const int lane_row = lane / 8 / SPAN * 8 + lane / 8 % SPAN + lane % 8 / SPAN * SPAN;  // of 32 / SPAN
  static_assert(NUM_ROWS * TAIL % WARP == 0, "a warp copies the ends of rows with all its lanes");
#pragma unroll
  for (int row = 0; TAIL > 0 && row < NUM_ROWS; row += WARP / SPAN) f(lane_row, lane % SPAN, row, UNITS - TAIL);
}

// Start copying NUM_ROWS rows [HEAD_DIM], which lie one after the other from `global` on, to shared memory
// [NUM_ROWS][ROW_STRIDE], by one warp. Rows outside [begin, end) become 0 and are not read, but `global` is mapped.
template <int NUM_ROWS>
DEVICE void copy_rows(T* shared, const T* global, int begin, int end) {
  const uint32_t num_valid = max(end - begin, 0);
  each_unit<NUM_ROWS>([=](int lane_row, int lane_unit, int row, int unit) {
    T* const to = shared + lane_row * ROW_STRIDE + lane_unit * 8;
    const T* const from = global + (lane_row * HEAD_DIM + lane_unit * 8);
    const bool valid = static_cast<uint32_t>(lane_row - begin + row) < num_valid;
    copy_async(to + (row * ROW_STRIDE + unit * 8), from + (row * HEAD_DIM + unit * 8), valid);
  });
}

// s = q k^T. q [16 M][ROW_STRIDE] and k [KEYS][ROW_STRIDE] in shared memory.
template <int M, int KEYS>
DEVICE void score_keys(float (&s)[M][KEYS / 8][4], const T* q, const T* k) {
  const int lane = threadIdx.x % WARP;
  q += lane % 16 * ROW_STRIDE + lane / 16 * 8;
  k += (lane / 16 * 8 + lane % 8) * ROW_STRIDE + lane / 8 % 2 * 8;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) load_matrices(a[m], q + 16 * m * ROW_STRIDE + d);
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      uint32_t b[4];  // two parts of 8 keys, each of 8 + 8 dimensions
      load_matrices(b, k + 16 * n * ROW_STRIDE + d);
#pragma unroll
      for (int m = 0; m < M; m++) {
        Element<T>::multiply(s[m][2 * n], a[m], b[0], b[1]);
        Element<T>::multiply(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// s = tanh x with e^2x = 2^(s * tanh_factor), that is 1 - 2 / (1 + e^2x); nothing if tanh_factor is 0.
template <int M, int KEYS>
DEVICE void soften_scores(float (&s)[M][KEYS / 8][4], float tanh_factor) {
  if (tanh_factor == 0.0f) return;
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[t][n][i] = 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(s[t][n][i] * tanh_factor));
}

// Take away the scores that a row does not see: it sees the `window` keys before its `end`, counted from the first key.
template <int M, int KEYS>
DEVICE void mask_scores(float (&s)[M][KEYS / 8][4], const int (&end)[M][2], int window) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int distance = end[t][i / 2] - 1 - (8 * n + column + i % 2);  // from key to query
        if (static_cast<uint32_t>(distance) >= static_cast<uint32_t>(window)) s[t][n][i] = MINUS_INFINITY;  // or < 0
      }
}

// m, or 0 for a row that has not seen a key: -inf minus -inf would be no number.
DEVICE float finite(float m) { return m == MINUS_INFINITY ? 0.0f : m; }

// Raise the rows' maximum m to that of s * factor, and scale what is relative to 2^m down: l, this lane's part of the
// weights' sum, and o, the weighted values. A row that sees none of the keys keeps its bits: `keep` is exactly 1.
template <int M, int KEYS>
DEVICE void raise_maximum(float (&m)[M][2], float (&l)[M][2], float (&o)[M][HEAD_DIM / 8][4],
                          const float (&s)[M][KEYS / 8][4], float factor) {
  float keep[M][2];
  bool raised = false;
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int row = 0; row < 2; row++) {
      float top = MINUS_INFINITY;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s[t][n][2 * row], s[t][n][2 * row + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      const float last = m[t][row];
      m[t][row] = fmaxf(last, top * factor);
      keep[t][row] = exp2_approx(last - finite(m[t][row]));
      l[t][row] = __fmul_rn(l[t][row], keep[t][row]);
      raised |= keep[t][row] != 1.0f;
    }
  if (!__any_sync(ALL_LANES, raised)) return;  // most often: the maximum of a long row is found early
#pragma unroll
  for (int t = 0; t < M; t++)
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[t][n][i] *= keep[t][i / 2];
}

// o += w v and l += w with the weights w = 2^(s * factor - m). v [KEYS][ROW_STRIDE] in shared memory; what no row sees
// must be finite there, for 0 times it is added. Weights are made 16 keys at a time, so that the exponentials of some
// run beside the products of others.
template <int M, int KEYS>
DEVICE void add_values(float (&o)[M][HEAD_DIM / 8][4], float (&l)[M][2], const float (&s)[M][KEYS / 8][4],
                       const float (&m)[M][2], float factor, const T* v) {
  const int lane = threadIdx.x % WARP;
  v += lane % 16 * ROW_STRIDE + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
    uint32_t a[M][4];  // the scores' places are those of mma's left operand
#pragma unroll
    for (int t = 0; t < M; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* const pair = s[t][2 * n + i / 2] + i % 2 * 2;
        const float base = finite(m[t][i % 2]);
        const float first = exp2_approx(fmaf(pair[0], factor, -base));
        const float second = exp2_approx(fmaf(pair[1], factor, -base));
        l[t][i % 2] += first + second;
        a[t][i] = Element<T>::pair(first, second);
      }
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
      uint32_t b[4];  // two parts of 8 dimensions, each of 8 + 8 keys
      load_matrices_transposed(b, v + 16 * n * ROW_STRIDE + 16 * d);
#pragma unroll
      for (int t = 0; t < M; t++) {
        Element<T>::multiply(o[t][2 * d], a[t], b[0], b[1]);
        Element<T>::multiply(o[t][2 * d + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// The sum over the four lanes that share a row.
DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
