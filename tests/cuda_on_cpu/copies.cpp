// copies.cpp: cp.async of 16 bytes. A copy reads and writes memory when its thread waits for it, as late as it may; or
// at once, in launches with early copies. A kernel that waits as it must cannot tell.
#include <cstring>

#include "memory.h"

namespace cuda_on_cpu {

static constexpr size_t BYTES = 16;

static void move(const Copy& copy) {
  if (copy.valid) {
    memcpy(copy.to, copy.from, BYTES);
  } else {
    memset(copy.to, 0, BYTES);
  }
}

void start_copy(void* to, const void* from, bool valid) {
  Thread* thread = current;
  const void* pc = __builtin_return_address(0);
  for (const void* end : {static_cast<const void*>(to), from}) {
    if (reinterpret_cast<uintptr_t>(end) % BYTES != 0) {
      fail(line_of(pc) + ": misaligned cp.async at " + describe_place(reinterpret_cast<uintptr_t>(end)));
    }
  }
  if (valid) access(thread, from, BYTES, Kind::COPY_SOURCE, pc);
  access(thread, to, BYTES, Kind::COPY_DESTINATION, pc);
  thread->copies.push_back({to, from, valid, pc});
  if (block.early_copies) move(thread->copies.back());
}

void commit_copies() { current->group_ends.push_back(current->copies.size()); }

void wait_copies(size_t pending) {
  Thread* thread = current;
  const size_t num_groups = thread->group_ends.size();
  if (num_groups <= pending) return;
  const size_t end = thread->group_ends[num_groups - pending - 1];
  for (; thread->num_landed < end; thread->num_landed++) {
    const Copy& copy = thread->copies[thread->num_landed];
    access(thread, copy.to, BYTES, Kind::COPY_LANDED, copy.pc);
    if (!block.early_copies) move(copy);
  }
  if (pending == 0 && end == thread->copies.size()) {  // nothing is under way: forget what was
    thread->copies.clear();
    thread->group_ends.clear();
    thread->num_landed = 0;
  }
}

}  // namespace cuda_on_cpu
