// launches.cu: kernels for the tests of launching: arguments, schedules, traps.
#include "gpu.cuh"

KERNEL(32) arguments(int* out, int a, int64_t b, float c, const bf16* x, int d) {
  if (threadIdx.x != 0) return;
  out[0] = a;
  out[1] = b >> 32;
  out[2] = b;
  out[3] = __float_as_int(c);
  out[4] = x == nullptr ? -1 : x[0].bits;
  out[5] = d;
}

KERNEL(32) floats(float* out, const float* x, const void* any) {
  if (threadIdx.x == 0) out[0] = x[0];
}

KERNEL(32) unit(uint4* out, const uint4* x) {
  if (threadIdx.x == 0) store16(out, load16(x));
}

KERNEL(32) places(int* out) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[block * 32 + threadIdx.x] = 100 * blockIdx.x + 10 * blockIdx.y + blockIdx.z + 1000 * blockDim.x;
}

// The last one to write wins: which, decides the schedule.
KERNEL(64) last_thread(int* out) { out[blockIdx.x] = threadIdx.x; }
KERNEL(32) last_block(int* out) { out[0] = blockIdx.x; }

KERNEL(32) big_static(int* out) {
  SHARED_ARRAY(int, a, [8 * 1024]);
  SHARED_ARRAY(int, b, [8 * 1024]);
  a[0] = b[0] = 1;
  out[0] = a[0] + b[0];
}

// A function's shared array is one for all of its calls, and another for each of its instances.
template <int N>
DEVICE int broadcast(int x) {
  SHARED_ARRAY(int, s, [1]);
  __syncthreads();
  if (threadIdx.x == N) s[0] = x;
  __syncthreads();
  return s[0];
}
KERNEL(32) instances(int* out) {
  SHARED_ARRAY(int, s, [1]);
  if (threadIdx.x == 0) s[0] = 5;
  out[threadIdx.x] = 10000 * broadcast<1>(threadIdx.x + 1) + 100 * broadcast<2>(threadIdx.x + 2) + broadcast<1>(threadIdx.x);
  if (threadIdx.x == 0) out[0] += s[0];
}

KERNEL(32) traps(int* out, int x) {
  if (threadIdx.x == 0) out[0] = x;
  assert(x < 5);  // here: assert
  if (x < 0) __trap();  // here: trap
}

KERNEL(32) wild(int* out, int64_t offset) {
  out[threadIdx.x] = 1;
  if (threadIdx.x == 3) out[offset] = 1;  // here: wild
}

KERNEL(32) divides(int* out, int x) { out[threadIdx.x] = 100 / x; }  // here: divides
