// fiber.h: a stack and a place to go on from. Fibers take turns by their own will, all on one OS thread.
#pragma once
#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif

  // Make the fiber begin with `entry`, which must never return, on the stack [low, high).
  void prepare(char* low, char* high, void (*entry)());
};

// Leave off in `from`, go on in `to`; returns when somebody switches back to `from`.
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace cuda_on_cpu
