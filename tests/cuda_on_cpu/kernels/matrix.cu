// matrix.cu: ldmatrix and mma for one warp.
#include "gpu.cuh"

// out uint32[32, 4]: what each lane gets of the four matrices x uint16[4, 8, 8].
KERNEL(32) load(unsigned* out, const f16* x, int transposed) {
  SHARED_ARRAY(f16, s, [32 * 8]);
  store16(s + threadIdx.x * 8, load16(x + threadIdx.x * 8));
  __syncwarp();
  uint32_t r[4];
  if (transposed) {
    load_matrices_transposed(r, s + threadIdx.x * 8);
  } else {
    load_matrices(r, s + threadIdx.x * 8);
  }
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
}

KERNEL(32) load_misaligned(unsigned* out) {
  SHARED_ARRAY(f16, s, [33 * 8]);
  for (int i = threadIdx.x; i < 33 * 8; i += WARP) s[i] = {0};
  __syncwarp();
  uint32_t r[4];
  load_matrices(r, s + threadIdx.x * 8 + (threadIdx.x == 9) * 4);  // here: load_misaligned
  out[threadIdx.x] = r[0];
}

KERNEL(32) load_from_global(unsigned* out, const f16* x) {
  uint32_t r[4];
  load_matrices(r, x + threadIdx.x * 8);  // here: load_from_global
  out[threadIdx.x] = r[0];
}

// c float[16, 8] += a T[16, 16] b T[16, 8]. The fragments are taken from memory one by one, as the PTX ISA lists them.
KERNEL(32) multiply(float* c, const T* a, const T* b) {
  const int r = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  const auto pair = [](T low, T high) { return low.bits | static_cast<uint32_t>(high.bits) << 16; };
  const auto a_pair = [&](int row, int column) { return pair(a[row * 16 + column], a[row * 16 + column + 1]); };
  const auto b_pair = [&](int row, int column) { return pair(b[row * 8 + column], b[(row + 1) * 8 + column]); };
  const uint32_t as[4] = {a_pair(r, t), a_pair(r + 8, t), a_pair(r, t + 8), a_pair(r + 8, t + 8)};
  float cs[4];
  for (int i = 0; i < 4; i++) cs[i] = c[(r + i / 2 * 8) * 8 + t + i % 2];
  Element<T>::multiply(cs, as, b_pair(t, r), b_pair(t + 8, r));
  for (int i = 0; i < 4; i++) c[(r + i / 2 * 8) * 8 + t + i % 2] = cs[i];
}

// The same with fragments from ldmatrix, as kernels load them.
KERNEL(32) load_and_multiply(float* c, const T* a, const T* b) {
  SHARED_ARRAY(T, sa, [16 * 16]);
  SHARED_ARRAY(T, sb, [16 * 8]);
  const int lane = threadIdx.x, r = lane / 4, t = lane % 4 * 2;
  store16(sa + lane * 8, load16(a + lane * 8));
  if (lane < 16) store16(sb + lane * 8, load16(b + lane * 8));
  __syncwarp();
  uint32_t as[4], bs[4];
  load_matrices(as, sa + lane % 16 * 16 + lane / 16 * 8);
  load_matrices_transposed(bs, sb + lane % 16 * 8);
  float cs[4];
  for (int i = 0; i < 4; i++) cs[i] = c[(r + i / 2 * 8) * 8 + t + i % 2];
  Element<T>::multiply(cs, as, bs[0], bs[1]);
  for (int i = 0; i < 4; i++) c[(r + i / 2 * 8) * 8 + t + i % 2] = cs[i];
}
