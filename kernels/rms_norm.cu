// rms_norm.cu: RMS norm of rows, with or without the addition to the residual stream before it.
//   x           T[num_rows, hidden_size], rows x_stride elements apart; a row is whole 16-byte units, aligned
//   weight      T[hidden_size]
//   residual    T[num_rows, hidden_size]; residual += x in place, rounded to T, and the norm is that of the rounded sum
//   out         T[num_rows, hidden_size] = row / sqrt(mean(row * row) + eps) * (weight_offset + weight), rounded once;
//               must not overlap x or residual
//   -D          ELEMENT, THREADS (a multiple of 32)
// A block has one row. The first HELD * THREADS units of it stay in registers; the rest of a longer row is read twice.
//
// kernel rms_norm
//   grid       num_rows, block THREADS
//   bytes      num_rows * (3 * hidden_size * sizeof_T + max(0, hidden_size * sizeof_T - 32 * THREADS))
//   unique     (2 * num_rows + 1) * hidden_size * sizeof_T
//   flops      num_rows * 5 * hidden_size
//   registers  40
//   shared     THREADS // 8
//
// kernel add_rms_norm
//   grid       num_rows, block THREADS
//   bytes      num_rows * (5 * hidden_size * sizeof_T + max(0, hidden_size * sizeof_T - 32 * THREADS))
//   unique     (4 * num_rows + 1) * hidden_size * sizeof_T
//   flops      num_rows * 6 * hidden_size
//   registers  64
//   shared     THREADS // 8
#include "gpu.cuh"

#if !defined(ELEMENT) || !defined(THREADS)
#error "rms_norm.cu needs -D ELEMENT and THREADS"
#endif

constexpr int UNIT = PER_16_BYTES<T>;  // elements
constexpr int HELD = 2;                // units of a row that a thread keeps in registers

// Element by element a + b, rounded.
DEVICE uint4 add(uint4 a, uint4 b) {
  float x[UNIT], y[UNIT];
  unpack16<T>(x, a);
  unpack16<T>(y, b);
#pragma unroll
  for (int i = 0; i < UNIT; i++) x[i] += y[i];
  return pack16<T>(x);
}

DEVICE float sum_squares(uint4 unit) {
  float x[UNIT];
  unpack16<T>(x, unit);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < UNIT; i++) sum += x[i] * x[i];
  return sum;
}

DEVICE uint4 multiply(uint4 unit, float scale, uint4 weight, float weight_offset) {
  float x[UNIT], w[UNIT];
  unpack16<T>(x, unit);
  unpack16<T>(w, weight);
#pragma unroll
  for (int i = 0; i < UNIT; i++) x[i] = x[i] * scale * (weight_offset + w[i]);
  return pack16<T>(x);
}

// The norm of one row: of x, or, where there is a residual, of residual += x. Called by a whole block.
template <bool ADD>
DEVICE void norm_row(T* out, const T* x, T* residual, const T* weight, int hidden_size, float eps,
                     float weight_offset) {
  const int num_units = hidden_size / UNIT;
  uint4 held[HELD], before[HELD], weights[HELD];  // before: the residual
#pragma unroll
  for (int i = 0; i < HELD; i++) {  // all loads are in flight before the first is waited for
    const int unit = threadIdx.x + i * THREADS;
    held[i] = before[i] = weights[i] = make_uint4(0, 0, 0, 0);
    if (unit < num_units) {
      held[i] = load16(x + unit * UNIT);
      if constexpr (ADD) before[i] = read16(residual + unit * UNIT);
      weights[i] = load16(weight + unit * UNIT);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int unit = threadIdx.x + i * THREADS;
    if constexpr (ADD) {
      held[i] = add(held[i], before[i]);
      if (unit < num_units) store16(residual + unit * UNIT, held[i]);
    }
    sum += sum_squares(held[i]);
  }
#pragma unroll 1
  for (int unit = threadIdx.x + HELD * THREADS; unit < num_units; unit += THREADS) {
    uint4 more = load16(x + unit * UNIT);
    if constexpr (ADD) {
      more = add(more, read16(residual + unit * UNIT));
      store16(residual + unit * UNIT, more);
    }
    sum += sum_squares(more);
  }
  const float scale = rsqrtf(__fdividef(block_sum<THREADS>(sum), hidden_size) + eps);
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int unit = threadIdx.x + i * THREADS;
    if (unit < num_units) store16(out + unit * UNIT, multiply(held[i], scale, weights[i], weight_offset));
  }
#pragma unroll 1
  for (int unit = threadIdx.x + HELD * THREADS; unit < num_units; unit += THREADS) {
    const uint4 more = ADD ? read16(residual + unit * UNIT) : load16(x + unit * UNIT);
    store16(out + unit * UNIT, multiply(more, scale, load16(weight + unit * UNIT), weight_offset));
  }
}

KERNEL(THREADS) rms_norm(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ weight, int hidden_size,
                         int64_t x_stride, float eps, float weight_offset) {
  const int64_t row = blockIdx.x;
  norm_row<false>(out + row * hidden_size, x + row * x_stride, nullptr, weight, hidden_size, eps, weight_offset);
}

KERNEL(THREADS) add_rms_norm(T* __restrict__ out, T* __restrict__ residual, const T* __restrict__ x,
                             const T* __restrict__ weight, int hidden_size, int64_t x_stride, float eps,
                             float weight_offset) {
  const int64_t row = blockIdx.x;
  norm_row<true>(out + row * hidden_size, x + row * x_stride, residual + row * hidden_size, weight, hidden_size, eps,
                 weight_offset);
}
