// probe.cu: each PTX function of gpu.cuh alone, so that a GPU shows whether their host twins say what it does.
// One warp a kernel.  -D ELEMENT for multiply (bf16 or f16)
#include "gpu.cuh"

constexpr int LANES = 32;
constexpr int N = 8;   // columns of b, elements of a matrix's row
constexpr int K = 16;

// d [16][8] = c + a [16][16] b, where b is given by its columns [8][16]; fragments as the PTX ISA draws them for
// mma.m16n8k16: lane 4 r + q holds rows r and r + 8, elements 2 q, 2 q + 1 and those 8 further.
KERNEL(LANES) multiply(float* __restrict__ d, const float* __restrict__ c, const T* __restrict__ a,
                       const T* __restrict__ b) {
  const int r = threadIdx.x / 4, q = threadIdx.x % 4;
  const uint32_t* a_pairs = reinterpret_cast<const uint32_t*>(a);  // [16][8]
  const uint32_t* b_pairs = reinterpret_cast<const uint32_t*>(b);  // [8][8]
  const uint32_t left[4] = {a_pairs[r * K / 2 + q], a_pairs[(r + 8) * K / 2 + q], a_pairs[r * K / 2 + q + 4],
                            a_pairs[(r + 8) * K / 2 + q + 4]};
  float sums[4];
  for (int i = 0; i < 4; i++) sums[i] = c[(r + i / 2 * 8) * N + 2 * q + i % 2];
  Element<T>::multiply(sums, left, b_pairs[r * K / 2 + q], b_pairs[r * K / 2 + q + 4]);
  for (int i = 0; i < 4; i++) d[(r + i / 2 * 8) * N + 2 * q + i % 2] = sums[i];
}

// out[0] and out[1] [32 lanes][4]: what each lane gets of four matrices [32 rows][8], plain and transposed.
KERNEL(LANES) load_four_matrices(uint32_t* __restrict__ out, const uint16_t* __restrict__ rows) {
  SHARED_ARRAY(uint16_t, tile, [LANES][N]);
  store16(tile[threadIdx.x], load16(rows + threadIdx.x * N));
  __syncthreads();
  uint32_t plain[4], transposed[4];
  load_matrices(plain, tile[threadIdx.x]);
  load_matrices_transposed(transposed, tile[threadIdx.x]);
  for (int i = 0; i < 4; i++) {
    out[threadIdx.x * 4 + i] = plain[i];
    out[(LANES + threadIdx.x) * 4 + i] = transposed[i];
  }
}

// out [32][8] = rows by asynchronous copies of 16 bytes; those of odd lanes are told to be of nothing.
KERNEL(LANES) copy(uint16_t* __restrict__ out, const uint16_t* __restrict__ rows) {
  SHARED_ARRAY(uint16_t, tile, [LANES][N]);
  copy_async(tile[threadIdx.x], rows + threadIdx.x * N, threadIdx.x % 2 == 0);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  store16(out + threadIdx.x * N, read16(tile[threadIdx.x]));
}

KERNEL(LANES) exponentiate(float* __restrict__ out, const float* __restrict__ x, int n) {
  for (int i = threadIdx.x; i < n; i += LANES) out[i] = exp2_approx(x[i]);
}

// The floats x[i] (low half) and x[i ^ 1], of any bits, rounded.
KERNEL(LANES) narrow(uint32_t* __restrict__ bf16_pairs, uint32_t* __restrict__ f16_pairs, const float* __restrict__ x,
                     int n) {
  for (int i = threadIdx.x; i < n; i += LANES) {
    bf16_pairs[i] = pack_bf16(x[i], x[i ^ 1]);
    f16_pairs[i] = pack_f16(x[i], x[i ^ 1]);
  }
}

// out [n] = floats of the halves of these bits.
KERNEL(LANES) widen(float* __restrict__ out, const uint16_t* __restrict__ bits, int n) {
  for (int i = threadIdx.x; i < n; i += LANES) out[i] = f16_to_float(bits[i]);
}
