// matrix.cpp: ldmatrix and mma, laid out in the lanes' registers as the PTX ISA says.
#include "matrix.h"

#include <cstring>

#include "memory.h"
#include "ptx.h"

namespace cuda_on_cpu {

// Lane 4 r + c gets, of matrix i, elements 2 c and 2 c + 1 of row r (or of column r) in its register i.
void load_matrices(Thread* const* lanes, bool transposed) {
  uint16_t rows[WARP][8];
  for (unsigned lane = 0; lane < WARP; lane++) {
    read_matrix_row(lanes[lane]);
    memcpy(rows[lane], lanes[lane]->a, sizeof rows[lane]);
  }
  for (unsigned lane = 0; lane < WARP; lane++) {
    uint32_t* registers = static_cast<uint32_t*>(lanes[lane]->matrix);
    const unsigned r = lane / 4, c = lane % 4 * 2;
    for (unsigned i = 0; i < 4; i++) {
      const uint16_t(*matrix)[8] = rows + 8 * i;
      const uint32_t low = transposed ? matrix[c][r] : matrix[r][c];
      const uint32_t high = transposed ? matrix[c + 1][r] : matrix[r][c + 1];
      registers[i] = low | high << 16;
    }
  }
}

typedef float Row __attribute__((vector_size(32)));  // 8 columns

static void to_floats(float* even, float* odd, const uint32_t* pairs, bool is_bf16) {
  for (int i = 0; i < 8; i++) {
    even[i] = is_bf16 ? __uint_as_float(pairs[i] << 16) : f16_to_float(pairs[i] & 0xffff);
    odd[i] = is_bf16 ? __uint_as_float(pairs[i] & 0xffff0000) : f16_to_float(pairs[i] >> 16);
  }
}

// c[16, 8] += a[16, 16] b[16, 8]. Lane 4 r + t has a[r], a[r + 8] at columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9;
// b at rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of column r; c[r], c[r + 8] at columns 2 t, 2 t + 1.
//
// Products are exact and summed in float32: even columns of a ascending, then the odd ones, c last. Tensor cores sum
// in an order and with a precision of their own, so theirs differs in the last bits.
void multiply(Thread* const* lanes, bool is_bf16) {
  uint32_t a_pairs[16][8], b_pairs[8][8];  // of neighbouring columns of a, of neighbouring rows of b
  alignas(32) float c[16][8];
  for (unsigned lane = 0; lane < WARP; lane++) {
    const uint32_t* a = static_cast<const uint32_t*>(lanes[lane]->a);
    const uint32_t* b = static_cast<const uint32_t*>(lanes[lane]->b);
    const float* sums = static_cast<const float*>(lanes[lane]->matrix);
    const unsigned r = lane / 4, t = lane % 4;
    a_pairs[r][t] = a[0];
    a_pairs[r + 8][t] = a[1];
    a_pairs[r][t + 4] = a[2];
    a_pairs[r + 8][t + 4] = a[3];
    b_pairs[t][r] = b[0];
    b_pairs[t + 4][r] = b[1];
    memcpy(&c[r][2 * t], sums, 8);
    memcpy(&c[r + 8][2 * t], sums + 2, 8);
  }
  alignas(32) float a[16][16], b[16][8];  // even columns (of b: rows) before odd ones
  for (int r = 0; r < 16; r++) to_floats(&a[r][0], &a[r][8], a_pairs[r], is_bf16);
  for (int k = 0; k < 8; k++) to_floats(b[k], b[k + 8], b_pairs[k], is_bf16);
  Row b_rows[16];
  memcpy(b_rows, b, sizeof b);
  for (int r = 0; r < 16; r++) {
    Row sum = {}, addend;
    for (int k = 0; k < 16; k++) sum += a[r][k] * b_rows[k];
    memcpy(&addend, c[r], sizeof addend);
    sum += addend;
    memcpy(c[r], &sum, sizeof sum);
  }
  for (unsigned lane = 0; lane < WARP; lane++) {
    float* sums = static_cast<float*>(lanes[lane]->matrix);
    const unsigned r = lane / 4, t = lane % 4;
    memcpy(sums, &c[r][2 * t], 8);
    memcpy(sums + 2, &c[r + 8][2 * t], 8);
  }
}

}  // namespace cuda_on_cpu
