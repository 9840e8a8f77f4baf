// numbers.cu: CUDA's functions of numbers, one by one.
#include "gpu.cuh"

DEVICE int element() { return blockIdx.x * 256 + threadIdx.x; }

KERNEL(256) narrow(unsigned* bf16s, unsigned* f16s, const float* x, int n) {
  const int i = element();
  if (i >= n) return;
  bf16s[i] = pack_bf16(x[i], -x[i]);
  f16s[i] = pack_f16(x[i], -x[i]);
}

KERNEL(256) widen(float* from_bf16, float* from_f16, const bf16* b, const f16* h) {
  from_bf16[element()] = to_float(b[element()]);
  from_f16[element()] = to_float(h[element()]);
}

KERNEL(256) exp2_of(float* out, const float* x, int n) {
  if (element() < n) out[element()] = exp2_approx(x[element()]);
}

// Separately rounded, and as one fma, whatever the compiler would contract.
KERNEL(256) rounding(float* product_then_sum, float* fused, const float* a, const float* b, const float* c) {
  const int i = element();
  product_then_sum[i] = __fadd_rn(__fmul_rn(a[i], b[i]), c[i]);
  product_then_sum[256 + i] = __fmul_rn(a[i], b[i]) - c[i];
  product_then_sum[512 + i] = __fsub_rn(a[i] * b[i], c[i]);
  product_then_sum[768 + i] = __fadd_rn(a[i] * b[i], c[i]);
  fused[i] = __fmaf_rn(a[i], b[i], c[i]);
}

KERNEL(256) rounding_of_doubles(double* product_then_sum, const double* a, const double* b, const double* c) {
  const int i = element();
  product_then_sum[i] = __dmul_rn(a[i], b[i]) - c[i];
}

// out int[14][256]
KERNEL(256) bits(int* out, const unsigned* x, const unsigned* y) {
  const unsigned a = x[threadIdx.x], b = y[threadIdx.x];
  int i = 0;
  const auto put = [&](int result) { out[256 * i++ + threadIdx.x] = result; };
  put(__popc(a));
  put(__clz(a));
  put(__ffs(a));
  put(__brev(a));
  put(__umulhi(a, b));
  const uint64_t wide = static_cast<uint64_t>(a) << 32 | b;
  put(__umul64hi(wide, wide) >> 32);
  put(__byte_perm(a, b, 0x6042));
  put(__byte_perm(a, b, 0xba98));
  put(__funnelshift_l(a, b, 12));
  put(__funnelshift_r(a, b, 12));
  put(__dp4a(static_cast<int>(a), static_cast<int>(b), 1));
  put(__float_as_int(__int_as_float(a)) == static_cast<int>(a));
  put(max(static_cast<int>(a), static_cast<int>(b)));
  put(min(a, b));
}

// out int[6][256]
KERNEL(256) to_integers(int* out, const float* x) {
  const float v = x[threadIdx.x];
  int i = 0;
  const auto put = [&](int result) { out[256 * i++ + threadIdx.x] = result; };
  put(__float2int_rn(v));
  put(__float2int_rz(v));
  put(__float2int_rd(v));
  put(__float2int_ru(v));
  put(__float2uint_rn(v));
  put(__float2uint_rz(v));
}
