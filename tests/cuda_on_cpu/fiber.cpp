// fiber.cpp: on x86-64 a switch is a dozen instructions; elsewhere ucontext, which also makes a system call.
#include "fiber.h"

#include <cstdint>

namespace cuda_on_cpu {

#if defined(__x86_64__)

// Keeps what a called function must keep, on the stack that it leaves.
extern "C" void cuda_on_cpu_switch(void** left, void* entered) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden cuda_on_cpu_switch
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");

void Fiber::prepare(char*, char* high, void (*entry)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(high) & ~uintptr_t{15});
  *--top = nullptr;  // where entry would return to: so it finds its stack aligned as behind a call
  *--top = reinterpret_cast<void*>(entry);
  for (int saved_register = 0; saved_register < 6; saved_register++) *--top = nullptr;
  stack_pointer = top;
}

void switch_fiber(Fiber& from, Fiber& to) { cuda_on_cpu_switch(&from.stack_pointer, to.stack_pointer); }

#else

void Fiber::prepare(char* low, char* high, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = low;
  context.uc_stack.ss_size = high - low;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

}  // namespace cuda_on_cpu
