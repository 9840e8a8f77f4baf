// observer.h: what watches a launch, event by event: races.cpp in mode check, count.cpp in mode count, nothing in mode
// fast. Each mode links one definition of observer().
//
// All runs on one OS thread: fibers take turns, so an observer needs no locks. It sees an access before it happens.
// What it EXPORTs, Python reaches as a function of EmulatedKernel.library. EmulatedKernel.lines(offsets) are the lines
// of the source that offset_in_library(pc) - 1 stands for; EmulatedDevice(..., on_launch=f) calls f(kernel) behind each
// launch.
#pragma once
#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda_on_cpu {

enum class Space : uint8_t { GLOBAL, SHARED };

// An array that the kernel may touch. Global ones lie as a GPU would have them: what CuPy allocates as one piece begins
// at a multiple of 512 bytes. SHARED_ARRAYs and dynamic shared memory begin at multiples of 128.
struct Region {
  uintptr_t begin;
  size_t bytes;
  uint32_t element_bytes;
  Space space;
  bool is_const;     // every parameter that points into it points to const
  const char* name;  // parameters, SHARED_ARRAY's name, or "dynamic shared memory"
  void* notes;       // the observer's own, null at first
};

enum class Kind : uint8_t {
  LOAD,              // also __ldg, load16; always the whole width, so 16 bytes for a uint4
  STORE,
  ATOMIC,            // reads and writes
  COPY_SOURCE,       // cp.async reads; not called for one that only fills with zeros
  COPY_DESTINATION,  // cp.async starts; from here on its 16 bytes may land at any time
  COPY_LANDED,       // the same thread has waited for that copy (pc is cp.async's)
  MATRIX_ROW,        // ldmatrix reads a row of 16 bytes: called for lanes 0 to 31 in turn, then collective()
};

struct Access {
  Region* region;
  uintptr_t address;
  uint32_t bytes;
  Kind kind;
  const void* pc;  // of the instruction behind the access, as all pc here
};

enum class Op : uint8_t {
  SHUFFLE, BALLOT, ANY, ALL,
  REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR, REDUCE_XOR, MATCH_ANY, SYNC_WARP,
  LOAD_MATRICES, LOAD_MATRICES_TRANSPOSED, MULTIPLY_BF16, MULTIPLY_F16,
};

struct Where {
  unsigned block;   // blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)
  unsigned thread;  // threadIdx.x
  unsigned warp() const { return thread / 32; }
  unsigned lane() const { return thread % 32; }
};

struct Launch {
  const char* kernel;
  unsigned grid[3];
  unsigned threads;     // a block
  size_t shared_bytes;  // dynamic; those of SHARED_ARRAY are regions from the first use on
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void begin_launch(const Launch& /*launch*/) {}
  virtual void begin_region(Region&) {}  // a parameter's before the first block, a SHARED_ARRAY's at its first use
  virtual void begin_block(unsigned /*block*/) {}
  virtual void access(Where, const Access&) {}  // a legal one: inside a region, aligned, no write to const
  virtual void collective(Where, uint32_t /*lanes*/, Op, const void* /*pc*/) {}  // once, when all lanes have come
  virtual void barrier(Where, const void* /*pc*/) {}                             // once, when all threads have come
  virtual void end_region(Region&) {}
  virtual void end_launch() {}
};

Observer* observer();  // of this mode; null = none

// Places in the library, as addr2line and EmulatedKernel.lines know them; they fit 32 bits.
uint32_t offset_in_library(const void* pc);

}  // namespace cuda_on_cpu
