// gated_mul.cu: the gate of a gated MLP, activation(gate) * up.
//   gate_up     T[num_rows, 2 * size], gate then up, rows gate_up_stride elements apart; size is whole 16-byte units
//   out         T[num_rows, size], computed in float and rounded once
//   -D          ELEMENT, THREADS
// A thread has one 16-byte unit of out. No gate overflows: the exponentials are taken of numbers up to 0.
//
// kernel silu_mul
//   grid       num_rows by ceil_div(size * sizeof_T, 16 * THREADS), block THREADS
//   bytes      num_rows * 3 * size * sizeof_T
//   flops      num_rows * 5 * size
//   registers  40
//   shared     0
//
// kernel gelu_tanh_mul
//   grid       num_rows by ceil_div(size * sizeof_T, 16 * THREADS), block THREADS
//   bytes      num_rows * 3 * size * sizeof_T
//   flops      num_rows * 9 * size
//   registers  40
//   shared     0
#include "gpu.cuh"

#if !defined(ELEMENT) || !defined(THREADS)
#error "gated_mul.cu needs -D ELEMENT and THREADS"
#endif

constexpr int UNIT = PER_16_BYTES<T>;  // elements

DEVICE float sigmoid(float x) {
  const float e = exp2_approx(-LOG2_E * fabsf(x));
  return __fdividef(x >= 0.0f ? 1.0f : e, 1.0f + e);
}

DEVICE float silu(float x) { return x * sigmoid(x); }

// x / 2 * (1 + tanh(u)), which is x * sigmoid(2 u) without the cancellation.
DEVICE float gelu_tanh(float x) { return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }

template <float ACTIVATION(float)>
DEVICE void multiply_gate(T* out, const T* gate_up, int size, int64_t gate_up_stride) {
  const int at = (blockIdx.y * THREADS + threadIdx.x) * UNIT;
  if (at >= size) return;
  const T* const from = gate_up + blockIdx.x * gate_up_stride + at;
  float gate[UNIT], up[UNIT];
  unpack16<T>(gate, load16(from));
  unpack16<T>(up, load16(from + size));
#pragma unroll
  for (int i = 0; i < UNIT; i++) gate[i] = ACTIVATION(gate[i]) * up[i];
  store16(out + static_cast<int64_t>(blockIdx.x) * size + at, pack16<T>(gate));
}

KERNEL(THREADS) silu_mul(T* __restrict__ out, const T* __restrict__ gate_up, int size, int64_t gate_up_stride) {
  multiply_gate<silu>(out, gate_up, size, gate_up_stride);
}

KERNEL(THREADS) gelu_tanh_mul(T* __restrict__ out, const T* __restrict__ gate_up, int size, int64_t gate_up_stride) {
  multiply_gate<gelu_tanh>(out, gate_up, size, gate_up_stride);
}
