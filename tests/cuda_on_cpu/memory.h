// memory.h: the arrays that a kernel may touch, and every access to them on its way to the observer.
#pragma once
#include "block.h"

namespace cuda_on_cpu {

// A parameter's array, as device.py passes it; those that overlap are passed as one.
struct Array {
  const char* name;
  unsigned char* data;
  size_t bytes;
  size_t phase;  // where it would begin behind a multiple of 512 bytes, had CuPy allocated it
  uint32_t element_bytes;
  uint32_t is_const;
};

// Make them the launch's arrays. With an observer each is copied to a place of its own until the launch ends.
void begin_memory(const Array* arrays, size_t number);
void end_memory();
void* place_of(void* data);  // where a pointer into an array points to during the launch

void set_dynamic_shared(size_t bytes);
size_t static_shared_bytes();
void clear_shared();  // for the next block: all NaN

// An access of the current thread: fail if it is illegal, else show it to the observer.
void access(const void* address, size_t bytes, Kind kind, const void* pc, bool is_aligned = true);
void access(Thread* thread, const void* address, size_t bytes, Kind kind, const void* pc);
void read_matrix_row(Thread* thread);

std::string describe_place(uintptr_t address);  // "byte 200 of 'x', which has 200 bytes"

}  // namespace cuda_on_cpu
