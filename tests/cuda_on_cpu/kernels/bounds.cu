// bounds.cu: kernels that touch what they must not with -D BUG=1. "// here: name" marks the line that check must name.
#include "gpu.cuh"

#if !defined(BUG)
#error "bounds.cu needs -D BUG"
#endif

KERNEL(64) off_by_one_table(float* out, const float* pool, const int* table) {
  const int i = threadIdx.x;
  const int block = table[i / 16 + BUG];  // here: off_by_one_table
  out[i] = pool[block * 16 + i % 16];
}

// The tables' padding is -1.
KERNEL(64) padded_table(float* out, const float* pool, const int* table, int n) {
  const int i = threadIdx.x, block = table[i / 16];
  if (BUG || block >= 0) out[i] = pool[block * 16 + i % 16];  // here: padded_table
}

KERNEL(64) past_end(float* out, int n) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (BUG || i < n) out[i] = 1.0f;  // here: past_end
}

// Into another array, had memory no gaps.
KERNEL(64) far_off(float* out, const float* x, int far) {
  out[threadIdx.x] = x[threadIdx.x + BUG * far];  // here: far_off
}

KERNEL(64) last_unit(uint4* out, const float* x, int n) {
  const int i = threadIdx.x * 4;
  if (i < n - (BUG ? 0 : 3)) out[threadIdx.x] = load16(x + i);  // here: last_unit
}

KERNEL(64) past_shared_array(float* out) {
  SHARED_ARRAY(float, s, [64]);
  SHARED_ARRAY(float, t, [64]);
  t[threadIdx.x] = 2.0f;
  float* p = s;
  p[threadIdx.x + BUG] = 1.0f;  // here: past_shared_array
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x] + t[threadIdx.x];
}

KERNEL(64) past_dynamic_shared(float* out) {
  DYNAMIC_SHARED(shared);
  float* s = reinterpret_cast<float*>(shared);
  s[threadIdx.x + BUG] = 1.0f;  // here: past_dynamic_shared
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

// In the array's memory, but in the next row.
KERNEL(64) past_row(float* out) {
  SHARED_ARRAY(float, s, [8][8]);
  s[threadIdx.x / 8][threadIdx.x % 8 + BUG] = 1.0f;  // here: past_row
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x / 8][threadIdx.x % 8];
}

KERNEL(64) null_pointer(float* out, const float* bias) {
  if (BUG || bias != nullptr) out[threadIdx.x] += bias[threadIdx.x];  // here: null_pointer
}

KERNEL(64) last_pair(float* out, const float* x, int n) {
  const float2 first = *reinterpret_cast<const float2*>(x);
  const float2 last = *reinterpret_cast<const float2*>(x + n - (BUG ? 1 : 3));  // here: last_pair
  out[threadIdx.x] = first.x + last.x;
}

KERNEL(64) misaligned_load(float* out, const float* x) {
  const uint4 v = load16(x + threadIdx.x * (BUG ? 2 : 4));  // here: misaligned_load
  store16(out + threadIdx.x * 4, v);
}

KERNEL(64) misaligned_pair(float* out, const float* x) {
  const float2 v = *reinterpret_cast<const float2*>(x + threadIdx.x * 2 + BUG);  // here: misaligned_pair
  out[threadIdx.x] = v.x + v.y;
}

KERNEL(64) write_to_const(float* out, const float* x) {
  out[threadIdx.x] = x[threadIdx.x];
  if (BUG) const_cast<float*>(x)[threadIdx.x] = 0.0f;  // here: write_to_const
}

KERNEL(64) atomic_past_end(int* out, int n) {
  atomicAdd(out + threadIdx.x % n + BUG, 1);  // here: atomic_past_end
}

KERNEL(64) half_a_row(bf16* out, const bf16* x, int64_t stride) {
  out[threadIdx.x] = x[threadIdx.x * stride + BUG];  // here: half_a_row
}

__constant__ float WEIGHTS[4] = {0.5f, 0.25f, 0.125f, 0.0625f};

KERNEL(64) constants(float* out) {
  out[threadIdx.x] = WEIGHTS[threadIdx.x % 4 + BUG];  // here: constants
}

__constant__ float OTHER_WEIGHTS[4] = {1.5f, 1.25f, 1.125f, 1.0625f};

KERNEL(64) constants_by_pointer(float* out) {
  const float* weights = threadIdx.x < 32 ? WEIGHTS : OTHER_WEIGHTS;
  out[threadIdx.x] = weights[threadIdx.x % 4];
  if (BUG) const_cast<float*>(weights)[threadIdx.x % 4] = 0.0f;  // here: constants_by_pointer
}
