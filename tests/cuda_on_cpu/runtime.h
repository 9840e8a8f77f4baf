// runtime.h: what the headers that a kernel is compiled with (cuda.h, ptx.h) call; the .cpp files here define it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "observer.h"
#include "vectors.h"

struct dim3 {
  unsigned x, y, z;
};

namespace cuda_on_cpu {

// Where a collective stands in the source: its threads must all have come to the same one.
struct Site {
  const char* file;
  int line;
  bool operator==(const Site& other) const { return line == other.line && file == other.file; }
};
#define SITE cuda_on_cpu::Site site = {__builtin_FILE(), __builtin_LINE()}

// Of the calling thread: they never change while it lives, so g++ need not call them twice.
uint3 thread_index() __attribute__((const));
uint3 block_index() __attribute__((const));
dim3 block_dim() __attribute__((const));
dim3 grid_dim() __attribute__((const));

enum class Vote : uint8_t { NONE, OR, AND, COUNT };
int barrier(Vote vote, int predicate, Site site);

// Wait for the other lanes of `mask`, then get this lane's result; lane `source` is for shuffles.
uint64_t collective(Op op, uint32_t mask, uint64_t value, int source, Site site);
// The same for all 32 lanes and a matrix instruction, which reads a and b and writes `result`.
void matrix_collective(Op op, const void* a, const void* b, void* result, Site site);

// One __shared__ array of a kernel; a static of the function that declares it.
struct SharedArray {
  const char* name;
  size_t bytes;
  uint32_t element_bytes;
  void* storage = nullptr;
  bool is_known = false;  // in this launch
  constexpr SharedArray(const char* name, size_t bytes, uint32_t element_bytes)
      : name(name), bytes(bytes), element_bytes(element_bytes) {}
};
void* storage_of(SharedArray& array);
unsigned char* dynamic_shared();

void start_copy(void* to, const void* from, bool valid);
void commit_copies();
void wait_copies(size_t pending);

void observe_atomic(const void* address, size_t bytes, const void* pc);
[[noreturn]] void trap(const char* why);

struct ParameterType {
  char code;           // as kernels/launch.py: P, i, q, f; ? for what it does not know
  bool is_const;       // what a pointer points to
  uint8_t size;        // bytes of what a pointer points to, 0 if that says nothing
  char element;        // of what a pointer points to: f float, i integer, else a space
};

struct Kernel {
  const char* name;
  unsigned threads;  // a block
  unsigned num_parameters;
  const ParameterType* parameters;
  size_t parameter_bytes;
  void (*call)(const unsigned char* parameters);
};

}  // namespace cuda_on_cpu
