// sanitizer.cpp: what g++ makes an instrumented kernel call: -fsanitize=thread before each access to memory, and
// -fsanitize=shift, bounds, ... instead of undefined behaviour. The sanitizers' own libraries are not linked.
#include "memory.h"

using namespace cuda_on_cpu;

#define CALLER __builtin_return_address(0)
#define ACCESSES(bytes)                                                                               \
  extern "C" void __tsan_read##bytes(void* address) { access(address, bytes, Kind::LOAD, CALLER); }  \
  extern "C" void __tsan_write##bytes(void* address) { access(address, bytes, Kind::STORE, CALLER); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
extern "C" void __tsan_read_range(void* address, size_t bytes) { access(address, bytes, Kind::LOAD, CALLER, false); }
extern "C" void __tsan_write_range(void* address, size_t bytes) { access(address, bytes, Kind::STORE, CALLER, false); }
extern "C" void __tsan_init() {}

#define UNDEFINED(what, text) \
  extern "C" void __ubsan_handle_##what##_abort(void*, ...) { fail(line_of(CALLER) + ": " text); }
UNDEFINED(out_of_bounds, "index out of an array's bounds")
UNDEFINED(shift_out_of_bounds, "shift by a negative number or by more than there are bits, or out of an int")
UNDEFINED(divrem_overflow, "integer division by zero, or out of an int")
UNDEFINED(add_overflow, "+ of integers overflows")
UNDEFINED(sub_overflow, "- of integers overflows")
UNDEFINED(mul_overflow, "* of integers overflows")
UNDEFINED(negate_overflow, "negation of an integer overflows")
UNDEFINED(float_cast_overflow, "a float becomes an integer that cannot hold it")
