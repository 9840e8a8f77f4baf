// attention.cuh: one warp's share of FlashAttention-2 on tensor cores, for paged_decode.cu and paged_prefill.cu.
//
// A warp has M tiles of 16 rows; a row is a (query, head) pair. Scores [16 M, KEYS] and the output [16 M, HEAD_DIM] are
// in the registers as mma.m16n8k16 leaves them: lane 4 r + c holds, of each 16 x 8 part,
//      x[0], x[1]   row r,     columns 2 c and 2 c + 1
//      x[2], x[3]   row r + 8, the same columns
// so four lanes share a row, and what belongs to a row (m, l) is a pair: of row r and row r + 8.
// -D: ELEMENT (bf16 or f16), HEAD_DIM (a multiple of 16)
#pragma once
#include "gpu.cuh"

#if !defined(ELEMENT) || !defined(HEAD_DIM)
#error "attention.cuh needs -D ELEMENT and HEAD_DIM"
#endif

// Elements from row to row in shared memory: an odd number of 16-byte units, so that the same unit of eight rows lies
// in eight groups of banks, and ldmatrix has no bank conflict.
constexpr int ROW_STRIDE = HEAD_DIM + 8;
constexpr float LOG2_E = 1.4426950408889634f;

// How scores become exponents of 2.
struct Scores {
  float scale;
  float softcap;  // 0 = off
};

DEVICE float soften(float score, Scores by) {
  if (by.softcap == 0.0f) return score * (by.scale * LOG2_E);
  const float x = score * by.scale / by.softcap;
  const float e = exp2_approx(-2.0f * LOG2_E * fabsf(x));
  return copysignf(by.softcap * LOG2_E * __fdividef(1.0f - e, 1.0f + e), x);
}

// s = q k^T. q [16 M][ROW_STRIDE] and k [KEYS][ROW_STRIDE] in shared memory.
template <int M, int KEYS>
DEVICE void score_keys(float (&s)[M][KEYS / 8][4], const T* q, const T* k) {
  const int lane = threadIdx.x % WARP;
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
    for (int m = 0; m < M; m++) load_matrices(a[m], q + (16 * m + lane % 16) * ROW_STRIDE + d + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      uint32_t b[4];  // two parts of 8 keys, each of 8 + 8 dimensions
      load_matrices(b, k + (16 * n + lane / 16 * 8 + lane % 8) * ROW_STRIDE + d + lane / 8 % 2 * 8);
#pragma unroll
      for (int m = 0; m < M; m++) {
        Element<T>::multiply(s[m][2 * n], a[m], b[0], b[1]);
        Element<T>::multiply(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Make the scores of the keys [begin, end) (by row, counted from the tile's first) into weights, 0 where a row does not
// see. m is the rows' running maximum, l this lane's part of their running sums, o their output so far, which all keep up.
template <int M, int KEYS>
DEVICE void weigh_scores(float (&s)[M][KEYS / 8][4], float (&m)[M][2], float (&l)[M][2], float (&o)[M][HEAD_DIM / 8][4],
                         const int (&begin)[M][2], const int (&end)[M][2], Scores by) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int t = 0; t < M; t++) {
    float top[2] = {m[t][0], m[t][1]};
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = 8 * n + column + i % 2;
        const bool seen = key >= begin[t][i / 2] && key < end[t][i / 2];
        s[t][n][i] = seen ? soften(s[t][n][i], by) : MINUS_INFINITY;
        top[i / 2] = fmaxf(top[i / 2], s[t][n][i]);
      }
#pragma unroll
    for (int row = 0; row < 2; row++) {
      top[row] = fmaxf(top[row], __shfl_xor_sync(ALL_LANES, top[row], 1));
      top[row] = fmaxf(top[row], __shfl_xor_sync(ALL_LANES, top[row], 2));
      const float base = top[row] == MINUS_INFINITY ? 0.0f : top[row];  // -inf minus -inf would be no number
      const float keep = exp2_approx(m[t][row] - base);
      m[t][row] = top[row];
      l[t][row] *= keep;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 2 * row; i < 2 * row + 2; i++) {
          s[t][n][i] = exp2_approx(s[t][n][i] - base);
          l[t][row] += s[t][n][i];
        }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n++) {
        o[t][n][2 * row] *= keep;
        o[t][n][2 * row + 1] *= keep;
      }
    }
  }
}

// o += s v. v [KEYS][ROW_STRIDE] in shared memory; what no row sees must be finite there, for 0 times it is added.
template <int M, int KEYS>
DEVICE void add_values(float (&o)[M][HEAD_DIM / 8][4], const float (&s)[M][KEYS / 8][4], const T* v) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
    uint32_t a[M][4];  // the scores' registers are those of mma's left operand
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float(&pair)[4] = s[m][2 * n + i / 2];
        a[m][i] = Element<T>::pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
      uint32_t b[4];  // two parts of 8 dimensions, each of 8 + 8 keys
      load_matrices_transposed(b, v + (16 * n + lane / 8 % 2 * 8 + lane % 8) * ROW_STRIDE + 16 * d + lane / 16 * 8);
#pragma unroll
      for (int m = 0; m < M; m++) {
        Element<T>::multiply(o[m][2 * d], a[m], b[0], b[1]);
        Element<T>::multiply(o[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The sum over the four lanes that share a row.
DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
