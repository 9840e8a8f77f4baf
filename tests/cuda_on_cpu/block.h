// block.h: the block that is running, its threads, and who runs next. Blocks run one after another.
#pragma once
#include <string>
#include <vector>

#include "fiber.h"
#include "runtime.h"

namespace cuda_on_cpu {

constexpr unsigned WARP = 32;           // threads
constexpr unsigned MAX_THREADS = 1024;  // a block
constexpr size_t STACK_BYTES = 64 << 10;

enum class State : uint8_t { READY, RUNNING, IN_COLLECTIVE, AT_BARRIER, EXITED };

// A cp.async, which lands when its thread waits for it: as late as a GPU may do it.
struct Copy {
  void* to;
  const void* from;
  bool valid;
  const void* pc;
};

struct Thread {
  State state;
  unsigned index;  // threadIdx.x
  // What it waits in, and with what
  Op op;
  uint32_t mask;
  int source;
  uint64_t value;
  const void *a, *b;
  void* matrix;
  Site site;
  const void* pc;
  Vote vote;
  uint64_t result;

  Fiber fiber;
  char* stack;  // its lowest byte

  std::vector<Copy> copies;
  size_t num_landed;
  std::vector<size_t> group_ends;  // how many copies there were at each commit

  unsigned warp() const { return index / WARP; }
  unsigned lane() const { return index % WARP; }
};

enum class Order : uint8_t { FORWARD, REVERSE, RANDOM };

// The threads that could go on. Who comes next is the schedule.
class ReadyThreads {
 public:
  void begin(Order order, uint64_t seed);
  void add(Thread* thread);        // behind all others
  void add_first(Thread* thread);  // before all others
  Thread* take();                  // null if there is none

 private:
  Order order_ = Order::FORWARD;
  uint64_t random_ = 1;
  Thread* ring_[MAX_THREADS];
  unsigned first_ = 0, size_ = 0;
};

struct Block {
  Launch launch;
  unsigned index;
  uint3 block_index;
  std::vector<Thread*> threads;  // may be more than the launch has
  ReadyThreads ready;
  Order order;
  bool early_copies;             // cp.async lands at once
  unsigned num_exited, num_at_barrier;
  uint32_t lanes_joined[MAX_THREADS / WARP];  // by warp: inside a collective
  uint32_t lanes_alive[MAX_THREADS / WARP];   // not exited
  Fiber scheduler;
  std::string error;  // the first

  Where where(const Thread* thread) const { return {index, thread->index}; }
};

extern Block block;
extern Thread* current;  // null outside of a kernel

// Let others run until somebody made this thread RUNNING or READY and its turn came.
void wait_for_turn(Thread* thread);

// A warp's threads, of which some wait in a collective, may now be complete: this lane has exited.
void leave_warp(Thread* thread);

void run_block(unsigned index, const Kernel& kernel, const unsigned char* parameters, uint64_t seed);

// ---- Errors. A message names code by "{+0x1234}", an offset in the library, which device.py makes a line.
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
std::string line_of(const void* pc);
std::string name_of(Where where);
[[noreturn]] void fail(const std::string& message);                        // of the current thread
[[noreturn]] void fail(const Thread* thread, const std::string& message);  // of another, of the same block
const char* name_of(Op op);

}  // namespace cuda_on_cpu
