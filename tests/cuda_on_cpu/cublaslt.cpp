// cublaslt.cpp: a stand-in for libcublasLt: the functions that cupaged/backend/cublaslt.py calls, without a GPU.
//
// Functions, values and sizes are the real library's. It accepts what we ask of it and no more: D = alpha * A^T * B
// (+ bias), column-major, A and B of bfloat16 or float16, D of their type or float32, summed in float32. What it
// refuses it explains on stderr, as the real one's logger does. An algorithm serves the problem and the alignments
// that the heuristics made it for. All algorithms give the same bits, and a column of D (a row of x) gives the same
// bits beside any others.

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "cublaslt_product.h"

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
constexpr int COMPUTE_32F = 68;
constexpr size_t VERSION = 1;
constexpr uint64_t WORKSPACE_ALIGNMENT = 256;  // bytes
constexpr uint64_t BIAS_ALIGNMENT = 16;

enum DescAttribute { DESC_COMPUTE_TYPE, DESC_SCALE_TYPE, DESC_POINTER_MODE, DESC_TRANSA, DESC_TRANSB, DESC_TRANSC,
                     DESC_FILL_MODE, DESC_EPILOGUE, DESC_BIAS_POINTER, DESC_BIAS_DATA_TYPE = 26 };
enum Preference { MAX_WORKSPACE_BYTES = 1, REDUCTION_SCHEME_MASK = 3, MIN_ALIGNMENT_A = 5, MIN_ALIGNMENT_D = 8 };
enum Epilogue { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };
enum Reduction { REDUCE_NOT = 0, REDUCE_IN_COMPUTE_TYPE = 2, REDUCE_IN_OUTPUT_TYPE = 4 };

Status refuse(Status status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  fputs("stand-in cublasLt: ", stderr);
  vfprintf(stderr, format, values);
  fputc('\n', stderr);
  va_end(values);
  return status;
}

// Attributes by number: size in bytes and value.
struct Attribute {
  size_t bytes;
  uint64_t value;
};
struct Attributes {
  std::map<int, Attribute> by_number;
  int64_t operator[](int number) const {
    const Attribute& a = by_number.at(number);
    return a.bytes == 4 ? static_cast<int32_t>(a.value) : static_cast<int64_t>(a.value);
  }
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;  // elements from column to column
};

using Descriptors = std::map<const void*, Attributes>;
std::set<const void*> handles;
Descriptors operations, preferences;
std::map<const void*, Layout> layouts;
uintptr_t next_address = 0x10000;  // of a descriptor: nobody may look inside, and none is ever used again

template <typename Map>
const typename Map::mapped_type* find(const Map& map, const void* key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : &found->second;
}

void* new_address() { return reinterpret_cast<void*>(next_address += 64); }

Status set_attribute(Descriptors& map, const void* target, int number, const void* value, size_t bytes) {
  const auto found = map.find(target);
  if (found == map.end()) return refuse(INVALID_VALUE, "attribute %d of no descriptor: %p", number, target);
  const auto attribute = found->second.by_number.find(number);
  if (attribute == found->second.by_number.end()) return refuse(INVALID_VALUE, "there is no attribute %d", number);
  if (!value || bytes != attribute->second.bytes)
    return refuse(INVALID_VALUE, "attribute %d has %zu bytes, not %zu", number, attribute->second.bytes, bytes);
  attribute->second.value = 0;
  memcpy(&attribute->second.value, value, bytes);
  return SUCCESS;
}

template <typename Map>
Status destroy(Map& map, void* target, const char* what) {
  if (!map.erase(target)) return refuse(INVALID_VALUE, "%s %p does not exist, or no more", what, target);
  return SUCCESS;
}

// ---- A problem, as descriptors describe it ---------------------------------------------------------------------
struct Problem {
  uint64_t m, n, k;         // D is m x n: features out, rows of x
  int64_t lda, ldb, ldd;
  int type, out_type;
  int has_bias;
  uint64_t bias;
};

Status read_problem(const void* operation, const void* const (&matrices)[4], Problem& problem) {
  const Attributes* op = find(operations, operation);
  if (!op) return refuse(INVALID_VALUE, "the operation %p does not exist, or no more", operation);
  const Layout* matrix[4];
  for (int i = 0; i < 4; i++) {
    matrix[i] = find(layouts, matrices[i]);
    const char name = static_cast<char>('A' + i);
    if (!matrix[i]) return refuse(INVALID_VALUE, "the layout %p of %c does not exist, or no more", matrices[i], name);
    if (!matrix[i]->rows || !matrix[i]->columns) return refuse(INVALID_VALUE, "%c is empty", name);
    if (matrix[i]->stride < static_cast<int64_t>(matrix[i]->rows))
      return refuse(INVALID_VALUE, "columns of %c overlap: %ld from one to the next, which has %lu", name,
                    matrix[i]->stride, matrix[i]->rows);
  }
  const Layout &a = *matrix[0], &b = *matrix[1], &c = *matrix[2], &d = *matrix[3];
  if ((*op)[DESC_TRANSA] != 1 || (*op)[DESC_TRANSB] != 0)
    return refuse(NOT_SUPPORTED, "not A transposed and B as it is");
  if ((*op)[DESC_COMPUTE_TYPE] != COMPUTE_32F || (*op)[DESC_SCALE_TYPE] != FLOAT32 || (*op)[DESC_POINTER_MODE] != 0)
    return refuse(NOT_SUPPORTED, "sums and scales are not float32, or scales not on the host");
  if (a.rows != b.rows || a.columns != d.rows || b.columns != d.columns)
    return refuse(INVALID_VALUE, "A^T [%lu, %lu] * B [%lu, %lu] is not D [%lu, %lu]", a.columns, a.rows, b.rows,
                  b.columns, d.rows, d.columns);
  if (memcmp(&c, &d, sizeof c)) return refuse(INVALID_VALUE, "C is not laid out as D");
  if (a.type != b.type || (a.type != BFLOAT16 && a.type != FLOAT16) || (d.type != a.type && d.type != FLOAT32))
    return refuse(NOT_SUPPORTED, "types %d, %d to %d", a.type, b.type, d.type);
  const int64_t epilogue = (*op)[DESC_EPILOGUE], bias_type = (*op)[DESC_BIAS_DATA_TYPE];
  if (epilogue != EPILOGUE_DEFAULT && epilogue != EPILOGUE_BIAS) return refuse(NOT_SUPPORTED, "epilogue %ld", epilogue);
  const bool has_bias = epilogue == EPILOGUE_BIAS;
  const uint64_t bias = static_cast<uint64_t>((*op)[DESC_BIAS_POINTER]);
  if (has_bias && (!bias || bias % BIAS_ALIGNMENT)) return refuse(INVALID_VALUE, "the bias begins at %#lx", bias);
  if (has_bias && bias_type != -1 && bias_type != d.type)
    return refuse(NOT_SUPPORTED, "the bias has type %ld, but D %d", bias_type, d.type);
  problem = {a.columns, b.columns, a.rows, a.stride, b.stride, d.stride, a.type, d.type, has_bias, has_bias ? bias : 0};
  return SUCCESS;
}

// ---- Algorithms: cublasLtMatmulAlgo_t is ours to fill -----------------------------------------------------------
struct Algorithm {
  uint64_t magic;
  uint64_t problem;  // hash
  uint32_t index, reduction;
  uint64_t workspace_bytes;
  uint32_t alignment[4];  // bytes, of A, B, C, D
  uint64_t reserved;
  uint64_t check;  // hash of all before
};
static_assert(sizeof(Algorithm) == 64, "cublasLtMatmulAlgo_t has 8 words of 64 bits");
constexpr uint64_t MAGIC = 0x6d6c616d756c0001;

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96, "cublasLtMatmulHeuristicResult_t");

uint64_t hash(const void* data, size_t bytes) {
  uint64_t h = 0xcbf29ce484222325;  // FNV-1a
  for (size_t i = 0; i < bytes; i++) h = (h ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
  return h;
}

uint64_t problem_key(const Problem& p) {
  const uint64_t words[] = {p.m, p.n, p.k, static_cast<uint64_t>(p.lda), static_cast<uint64_t>(p.ldb),
                            static_cast<uint64_t>(p.ldd), static_cast<uint64_t>(p.type) << 32 | p.out_type,
                            static_cast<uint64_t>(p.has_bias)};
  return hash(words, sizeof words);
}

Status check_algorithm(const Problem& problem, const Algorithm* algorithm) {
  if (!algorithm) return refuse(NOT_SUPPORTED, "no algorithm is given");
  if (algorithm->magic != MAGIC || algorithm->check != hash(algorithm, offsetof(Algorithm, check)))
    return refuse(INVALID_VALUE, "the algorithm did not come from our heuristics");
  if (algorithm->problem != problem_key(problem)) return refuse(INVALID_VALUE, "the algorithm is for another problem");
  return SUCCESS;
}

// Pretended: the roofline of an H200, a launch, and what the algorithm makes of it, which only trying tells.
double pretended_seconds(const Problem& p, uint32_t index) {
  const double m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const double by_bytes = 2 * (m * k + n * k + m * n) / 4.3e12, by_flops = 2 * m * n * k / 790e12;
  const uint64_t draw[] = {problem_key(p), index};
  const double factor = index == 0 ? 1.2 : 1.0 + (hash(draw, sizeof draw) >> 40) % 100 / 200.0;  // [1, 1.5)
  return factor * (2e-6 + (by_bytes > by_flops ? by_bytes : by_flops));
}

bool overlap(const void* x, uint64_t x_bytes, const void* y, uint64_t y_bytes) {
  const char *a = static_cast<const char*>(x), *b = static_cast<const char*>(y);
  return a < b + y_bytes && b < a + x_bytes;
}

}  // namespace

EXPORT size_t cublasLtGetVersion() { return VERSION; }

EXPORT const char* cublasLtGetStatusName(int status) {
  switch (status) {
    case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "unrecognized status";
  }
}

EXPORT int cublasLtCreate(void** handle) {
  handles.insert(*handle = new_address());
  return SUCCESS;
}

EXPORT int cublasLtDestroy(void* handle) {
  return handles.erase(handle) ? SUCCESS : refuse(NOT_INITIALIZED, "the handle %p does not exist, or no more", handle);
}

EXPORT int cublasLtMatmulDescCreate(void** operation, int compute_type, int scale_type) {
  const auto u32 = [](int value) { return Attribute{4, static_cast<uint32_t>(value)}; };
  operations[*operation = new_address()] = {{
      {DESC_COMPUTE_TYPE, u32(compute_type)}, {DESC_SCALE_TYPE, u32(scale_type)}, {DESC_POINTER_MODE, u32(0)},
      {DESC_TRANSA, u32(0)}, {DESC_TRANSB, u32(0)}, {DESC_TRANSC, u32(0)}, {DESC_FILL_MODE, u32(2)},
      {DESC_EPILOGUE, u32(EPILOGUE_DEFAULT)}, {DESC_BIAS_POINTER, {8, 0}}, {DESC_BIAS_DATA_TYPE, u32(-1)}}};
  return SUCCESS;
}

EXPORT int cublasLtMatmulDescSetAttribute(void* operation, int attribute, const void* value, size_t bytes) {
  return set_attribute(operations, operation, attribute, value, bytes);
}

EXPORT int cublasLtMatmulDescDestroy(void* operation) { return destroy(operations, operation, "operation"); }

EXPORT int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  layouts[*layout = new_address()] = {type, rows, columns, stride};  // not checked, as by the real one
  return SUCCESS;
}

EXPORT int cublasLtMatrixLayoutDestroy(void* layout) { return destroy(layouts, layout, "layout"); }

EXPORT int cublasLtMatmulPreferenceCreate(void** preference) {
  Attributes& p = preferences[*preference = new_address()];
  p.by_number = {{MAX_WORKSPACE_BYTES, {8, 0}}, {REDUCTION_SCHEME_MASK, {4, 7}}};
  for (int i = MIN_ALIGNMENT_A; i <= MIN_ALIGNMENT_D; i++) p.by_number[i] = {4, 256};
  return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
  return set_attribute(preferences, preference, attribute, value, bytes);
}

EXPORT int cublasLtMatmulPreferenceDestroy(void* preference) { return destroy(preferences, preference, "preference"); }

EXPORT int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d,
                                          void* preference, int count, HeuristicResult* results, int* found) {
  if (!handles.count(handle)) return refuse(NOT_INITIALIZED, "the handle %p does not exist, or no more", handle);
  const Attributes* wanted = find(preferences, preference);
  if (!wanted || count <= 0 || !results || !found) return refuse(INVALID_VALUE, "%d heuristics", count);
  Problem problem;
  if (const Status status = read_problem(operation, {a, b, c, d}, problem)) return status;
  struct Kind {
    uint32_t reduction;
    uint64_t workspace_bytes;
  };
  const uint64_t parts = 4 * problem.m * problem.n * sizeof(float);
  const Kind kinds[] = {
      {REDUCE_NOT, 0}, {REDUCE_IN_OUTPUT_TYPE, parts / 2}, {REDUCE_IN_COMPUTE_TYPE, parts}, {REDUCE_NOT, 0}};
  *found = 0;
  for (uint32_t i = 0; i < 4 && *found < count; i++) {
    const Kind& kind = kinds[i];
    if (kind.reduction && !(kind.reduction & (*wanted)[REDUCTION_SCHEME_MASK])) continue;
    if (kind.workspace_bytes > static_cast<uint64_t>((*wanted)[MAX_WORKSPACE_BYTES])) continue;
    Algorithm algorithm = {MAGIC, problem_key(problem), i, kind.reduction, kind.workspace_bytes, {}, 0, 0};
    for (int j = 0; j < 4; j++) algorithm.alignment[j] = (*wanted)[MIN_ALIGNMENT_A + j];
    algorithm.check = hash(&algorithm, offsetof(Algorithm, check));
    results[(*found)++] = {algorithm, kind.workspace_bytes, SUCCESS, 1.0f, {}};
  }
  return SUCCESS;
}

EXPORT int cublasLtMatmulAlgoCheck(void* handle, void* operation, void* a, void* b, void* c, void* d,
                                   const Algorithm* algorithm, HeuristicResult* result) {
  if (!handles.count(handle)) return refuse(NOT_INITIALIZED, "the handle %p does not exist, or no more", handle);
  Problem problem;
  if (const Status status = read_problem(operation, {a, b, c, d}, problem)) return status;
  if (const Status status = check_algorithm(problem, algorithm)) return status;
  result->workspace_bytes = algorithm->workspace_bytes;
  result->state = SUCCESS;
  result->waves = 1.0f;
  return SUCCESS;
}

// Do what cublasLtMatmul does at the call: check, and take what it was told.
EXPORT int prepare_matmul(void* handle, void* operation, const float* alpha, const void* a, void* a_layout,
                          const void* b, void* b_layout, const float* beta, const void* c, void* c_layout, void* d,
                          void* d_layout, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                          void* stream, Matmul* matmul) {
  if (!handles.count(handle)) return refuse(NOT_INITIALIZED, "the handle %p does not exist, or no more", handle);
  Problem p;
  if (const Status status = read_problem(operation, {a_layout, b_layout, c_layout, d_layout}, p)) return status;
  if (const Status status = check_algorithm(p, algorithm)) return status;
  if (!alpha || !beta || *beta != 0) return refuse(NOT_SUPPORTED, "alpha is missing, or beta not 0");
  const void* const matrices[] = {a, b, c, d};
  for (int i = 0; i < 4; i++)
    if (!matrices[i] || reinterpret_cast<uintptr_t>(matrices[i]) % algorithm->alignment[i])
      return refuse(INVALID_VALUE, "%c begins at %p, not at a multiple of %u", 'A' + i, matrices[i],
                    algorithm->alignment[i]);
  if (c != d) return refuse(NOT_SUPPORTED, "C is not D");
  const uint64_t out_bytes = ((p.n - 1) * p.ldd + p.m) * (p.out_type == FLOAT32 ? 4 : 2);
  if (overlap(d, out_bytes, a, 2 * ((p.m - 1) * p.lda + p.k)) ||
      overlap(d, out_bytes, b, 2 * ((p.n - 1) * p.ldb + p.k)) ||
      overlap(d, out_bytes, workspace, algorithm->workspace_bytes))
    return refuse(INVALID_VALUE, "D overlaps A, B or the workspace");
  if (workspace_bytes < algorithm->workspace_bytes)
    return refuse(INVALID_VALUE, "a workspace of %zu bytes, %lu are needed", workspace_bytes,
                  algorithm->workspace_bytes);
  if (!workspace || reinterpret_cast<uintptr_t>(workspace) % WORKSPACE_ALIGNMENT)
    return refuse(INVALID_VALUE, "the workspace begins at %p, not at a multiple of %lu", workspace,
                  WORKSPACE_ALIGNMENT);
  const uint64_t key[] = {algorithm->problem, algorithm->index};
  *matmul = {p.m, p.n, p.k, p.lda, p.ldb, p.ldd, p.type, p.out_type, p.has_bias, *alpha, a, b, d,
             reinterpret_cast<const void*>(p.bias), workspace, algorithm->workspace_bytes,
             reinterpret_cast<uint64_t>(stream), hash(key, sizeof key), pretended_seconds(p, algorithm->index)};
  return SUCCESS;
}

EXPORT int cublasLtMatmul(void* handle, void* operation, const float* alpha, const void* a, void* a_layout,
                          const void* b, void* b_layout, const float* beta, const void* c, void* c_layout, void* d,
                          void* d_layout, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                          void* stream) {
  Matmul matmul;
  const int status = prepare_matmul(handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d,
                                    d_layout, algorithm, workspace, workspace_bytes, stream, &matmul);
  if (status == SUCCESS) run_matmul(&matmul);
  return status;
}
