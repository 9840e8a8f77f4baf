// block.cpp: runs a block: one fiber a thread, barriers, and what there is to say when no thread can go on.
#include "block.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>

#include "memory.h"

namespace cuda_on_cpu {

Block block;
Thread* current;

uint3 thread_index() { return {current->index, 0, 0}; }
uint3 block_index() { return block.block_index; }
dim3 block_dim() { return {block.launch.threads, 1, 1}; }
dim3 grid_dim() { return {block.launch.grid[0], block.launch.grid[1], block.launch.grid[2]}; }

// ---- Turns ----------------------------------------------------------------------------------------------------------
void ReadyThreads::begin(Order order, uint64_t seed) {
  order_ = order;
  random_ = (seed + 1) * 0x9e3779b97f4a7c15;
  first_ = size_ = 0;
}

void ReadyThreads::add(Thread* thread) {
  thread->state = State::READY;
  ring_[(first_ + size_++) % MAX_THREADS] = thread;
}

void ReadyThreads::add_first(Thread* thread) {
  thread->state = State::READY;
  first_ = (first_ - 1) % MAX_THREADS;
  ring_[first_] = thread;
  size_++;
}

Thread* ReadyThreads::take() {
  if (size_ == 0) return nullptr;
  size_--;
  if (order_ == Order::REVERSE) return ring_[(first_ + size_) % MAX_THREADS];
  unsigned chosen = first_;
  if (order_ == Order::RANDOM) {  // xorshift
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    chosen = (first_ + random_ % (size_ + 1)) % MAX_THREADS;
  }
  Thread* thread = ring_[chosen];
  ring_[chosen] = ring_[first_];
  first_ = (first_ + 1) % MAX_THREADS;
  return thread;
}

static void give_turn(Fiber& from, Thread* to) {
  current = to;
  if (to != nullptr) to->state = State::RUNNING;
  switch_fiber(from, to != nullptr ? to->fiber : block.scheduler);
}

void wait_for_turn(Thread* thread) {
  if (thread->state == State::RUNNING) return;
  Thread* next = block.ready.take();
  if (next == thread) {
    thread->state = State::RUNNING;
  } else {
    give_turn(thread->fiber, next);
  }
}

// ---- Errors ---------------------------------------------------------------------------------------------------------
std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

static uintptr_t begin_of_library() {
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(&begin_of_library), &library) == 0) abort();
  return reinterpret_cast<uintptr_t>(library.dli_fbase);
}

uint32_t offset_in_library(const void* pc) {
  static const uintptr_t begin = begin_of_library();
  return reinterpret_cast<uintptr_t>(pc) - begin;
}

// pc is where a call returns to: the byte before it belongs to the call.
std::string line_of(const void* pc) { return format("{+0x%x}", offset_in_library(pc) - 1); }

std::string name_of(Where where) {
  const unsigned* grid = block.launch.grid;
  const unsigned x = where.block % grid[0], y = where.block / grid[0] % grid[1], z = where.block / grid[0] / grid[1];
  return format("block (%u, %u, %u), thread %u (warp %u, lane %u)", x, y, z, where.thread, where.warp(), where.lane());
}

void fail(const Thread* thread, const std::string& message) {
  if (block.error.empty()) {
    block.error = message + "\n  in " + block.launch.kernel + ", " + name_of(block.where(thread));
  }
  give_turn(current->fiber, nullptr);  // for good
  __builtin_unreachable();
}

void fail(const std::string& message) { fail(current, message); }

void trap(const char* why) { fail(line_of(__builtin_return_address(0)) + ": " + why); }

static std::string describe_wait(const Thread* thread) {
  switch (thread->state) {
    case State::EXITED:
      return "have exited";
    case State::AT_BARRIER:
      return "wait in __syncthreads at " + line_of(thread->pc);
    case State::IN_COLLECTIVE:
      return format("wait in %s of mask %08x at ", name_of(thread->op), thread->mask) + line_of(thread->pc);
    default:
      return "could go on";
  }
}

static std::string describe_deadlock() {
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned i = 0; i < block.launch.threads; i++) groups[describe_wait(block.threads[i])].push_back(i);
  std::string text = "no thread can go on:";
  for (const auto& [wait, threads] : groups) {
    text += format("\n  %zu threads, from %u to %u, ", threads.size(), threads.front(), threads.back()) + wait;
  }
  return text + format("\n  in %s, block (%u, %u, %u)", block.launch.kernel, block.block_index.x, block.block_index.y,
                       block.block_index.z);
}

// ---- Barriers -------------------------------------------------------------------------------------------------------
static void open_barrier(const Thread* last) {
  int count = 0;
  for (unsigned i = 0; i < block.launch.threads; i++) {
    const Thread* thread = block.threads[i];
    if (!(thread->site == last->site)) {
      fail(line_of(last->pc) + format(": threads of a block are at different barriers: thread %u is at ", i) +
           line_of(thread->pc));
    }
    count += thread->value != 0;
  }
  if (Observer* watching = observer()) watching->barrier(block.where(last), last->pc);
  block.num_at_barrier = 0;
  const int all = static_cast<int>(block.launch.threads);
  for (unsigned i = 0; i < block.launch.threads; i++) {
    Thread* thread = block.threads[i];
    thread->result = thread->vote == Vote::OR ? count != 0 : thread->vote == Vote::AND ? count == all : count;
    if (thread == last && block.order == Order::FORWARD) {
      thread->state = State::RUNNING;
    } else {
      block.ready.add(thread);
    }
  }
}

int barrier(Vote vote, int predicate, Site site) {
  Thread* thread = current;
  thread->state = State::AT_BARRIER;
  thread->vote = vote;
  thread->value = predicate != 0;
  thread->site = site;
  thread->pc = __builtin_return_address(0);
  if (++block.num_at_barrier == block.launch.threads) open_barrier(thread);  // who has exited never comes: a deadlock
  wait_for_turn(thread);
  return static_cast<int>(thread->result);
}

// ---- A block --------------------------------------------------------------------------------------------------------
static const Kernel* running;
static const unsigned char* running_parameters;

static void run_thread() {
  running->call(running_parameters);
  Thread* thread = current;
  if (thread->num_landed != thread->copies.size()) {
    fail(line_of(thread->copies[thread->num_landed].pc) + ": this cp.async was never waited for");
  }
  thread->state = State::EXITED;
  block.num_exited++;
  leave_warp(thread);
  give_turn(thread->fiber, block.ready.take());
}

// Each Thread lies at the top of its own stack, a few cache lines further down than its neighbour's: at the same place
// in all pages they would push each other out of the L1 cache.
static void make_threads(unsigned number) {
  constexpr size_t PITCH = STACK_BYTES + 17 * 64;
  const size_t old = block.threads.size();
  if (old >= number) return;
  void* stacks = mmap(nullptr, (number - old) * PITCH, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) abort();
  for (size_t i = 0; i < number - old; i++) {
    char* stack = static_cast<char*>(stacks) + i * PITCH;
    Thread* thread = new (stack + STACK_BYTES - (sizeof(Thread) + 63) / 64 * 64) Thread();
    thread->stack = stack;
    block.threads.push_back(thread);
  }
}

void run_block(unsigned index, const Kernel& kernel, const unsigned char* parameters, uint64_t seed) {
  const Launch& launch = block.launch;
  running = &kernel;
  running_parameters = parameters;
  make_threads(launch.threads);
  block.index = index;
  block.block_index = {index % launch.grid[0], index / launch.grid[0] % launch.grid[1],
                       index / launch.grid[0] / launch.grid[1]};
  block.num_exited = block.num_at_barrier = 0;
  block.ready.begin(block.order, seed + index);
  clear_shared();
  if (Observer* watching = observer()) watching->begin_block(index);
  for (unsigned warp = 0; warp * WARP < launch.threads; warp++) {
    const unsigned lanes = launch.threads - warp * WARP;
    block.lanes_joined[warp] = 0;
    block.lanes_alive[warp] = lanes >= WARP ? ~0u : (1u << lanes) - 1;
  }
  for (unsigned i = 0; i < launch.threads; i++) {
    Thread* thread = block.threads[i];
    thread->index = i;
    thread->copies.clear();
    thread->group_ends.clear();
    thread->num_landed = 0;
    thread->fiber.prepare(thread->stack, reinterpret_cast<char*>(thread), run_thread);
    block.ready.add(thread);
  }
  give_turn(block.scheduler, block.ready.take());
  if (block.error.empty() && block.num_exited != launch.threads) block.error = describe_deadlock();
}

}  // namespace cuda_on_cpu
