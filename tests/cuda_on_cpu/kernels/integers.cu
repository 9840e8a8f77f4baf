// integers.cu: what C++ leaves undefined, so that a GPU and a CPU may differ. Each kernel does it for bad arguments only.
#include "gpu.cuh"

KERNEL(1) add(int* out, int x) { out[0] = x + 1; }
KERNEL(1) subtract(int* out, int x) { out[0] = x - 1; }
KERNEL(1) multiply(int* out, int x) { out[0] = x * x; }
KERNEL(1) negate(int* out, int x) { out[0] = -x; }
KERNEL(1) divide(int* out, int x) { out[0] = 7 / x; }
KERNEL(1) remainder_of(int* out, int x) { out[0] = 7 % x; }
KERNEL(1) shift(int* out, int x) { out[0] = 1u << x; }
KERNEL(1) to_int(int* out, float x) { out[0] = static_cast<int>(x); }
KERNEL(1) take(int* out, int x) {
  int local[4] = {1, 2, 3, 4};
  out[0] = local[x];
}
