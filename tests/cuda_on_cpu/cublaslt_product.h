// cublaslt_product.h: what a call of the stand-in's cublasLtMatmul was told, and the product itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

enum DataType { FLOAT32 = 0, FLOAT16 = 2, BFLOAT16 = 14 };

// All that a call was told, by value: descriptors may change or go before the stream comes to it.
struct Matmul {
  uint64_t m, n, k;
  int64_t lda, ldb, ldd;
  int32_t type, out_type, has_bias;
  float alpha;
  const void *a, *b;
  void* d;
  const void* bias;
  void* workspace;
  uint64_t workspace_bytes;  // that it uses
  uint64_t stream;
  uint64_t key;  // hash of problem and algorithm
  double seconds;
};

namespace {

float to_float(int type, const void* data, size_t i) {
  if (type == FLOAT32) return static_cast<const float*>(data)[i];
  if (type == FLOAT16) return static_cast<const _Float16*>(data)[i];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

void store(int type, void* data, size_t i, float x) {
  if (type == FLOAT32) {
    static_cast<float*>(data)[i] = x;
  } else if (type == FLOAT16) {
    static_cast<_Float16*>(data)[i] = static_cast<_Float16>(x);
  } else {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const bool is_nan = x != x;
    const uint32_t rounded = is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(rounded >> 16);
  }
}

constexpr size_t LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

// Each of 16 lanes sums every 16th product, in order; then the lanes are summed in pairs. So a result depends on its
// own row and column alone.
float dot(const Lanes* a, const Lanes* b, size_t num_vectors) {
  Lanes sum = {};
  for (size_t i = 0; i < num_vectors; i++) sum += a[i] * b[i];
  for (size_t width = LANES / 2; width; width /= 2)
    for (size_t i = 0; i < width; i++) sum[i] += sum[i + width];
  return sum[0];
}

// Columns of k elements as float, each filled up with zeros.
std::vector<Lanes> columns_as_float(int type, const void* data, uint64_t num_columns, uint64_t k, int64_t stride) {
  const size_t num_vectors = (k + LANES - 1) / LANES;
  std::vector<Lanes> columns(num_columns * num_vectors);
  for (uint64_t j = 0; j < num_columns; j++) {
    float* column = reinterpret_cast<float*>(&columns[j * num_vectors]);
    for (uint64_t i = 0; i < k; i++) column[i] = to_float(type, data, j * stride + i);
  }
  return columns;
}

}  // namespace

// Do what the GPU then does.
EXPORT void run_matmul(const Matmul* matmul) {
  const Matmul& p = *matmul;
  const size_t num_vectors = (p.k + LANES - 1) / LANES;
  memset(p.workspace, 0xff, p.workspace_bytes);
  const std::vector<Lanes> b = columns_as_float(p.type, p.b, p.n, p.k, p.ldb);
  for (uint64_t i = 0; i < p.m; i++) {
    const char* row = static_cast<const char*>(p.a) + 2 * i * p.lda;
    const std::vector<Lanes> a = columns_as_float(p.type, row, 1, p.k, p.lda);
    const float bias = p.has_bias ? to_float(p.out_type, p.bias, i) : 0.0f;
    for (uint64_t j = 0; j < p.n; j++)
      store(p.out_type, p.d, j * p.ldd + i, p.alpha * dot(a.data(), &b[j * num_vectors], num_vectors) + bias);
  }
}
