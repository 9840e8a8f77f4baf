// warp.cpp: what the lanes of a warp do together. A lane waits until all lanes of its mask that have not exited have
// come to the same place; the last one does the work for all.
#include <algorithm>

#include "block.h"
#include "matrix.h"

namespace cuda_on_cpu {

const char* name_of(Op op) {
  static const char* const names[] = {
      "__shfl_sync",       "__ballot_sync",     "__any_sync",        "__all_sync",       "__reduce_add_sync",
      "__reduce_min_sync", "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
      "__match_any_sync",  "__syncwarp",        "ldmatrix",          "ldmatrix.trans",   "mma (bf16)",
      "mma (f16)"};
  return names[static_cast<int>(op)];
}

// Each lane of `mask`, ascending.
template <class Visit>
static void for_each(uint32_t mask, Visit visit) {
  for (; mask != 0; mask &= mask - 1) visit(__builtin_ctz(mask));
}

static void shuffle(Thread* const* lanes, uint32_t mask) {
  for_each(mask, [&](unsigned lane) {
    Thread* thread = lanes[lane];
    if (!(mask >> thread->source & 1)) {
      fail(thread, line_of(thread->pc) + format(": __shfl_sync reads lane %d, which is not in mask %08x or has exited",
                                                thread->source, thread->mask));
    }
    thread->result = lanes[thread->source]->value;
  });
}

static uint32_t ballot(Thread* const* lanes, uint32_t mask) {
  uint32_t set = 0;
  for_each(mask, [&](unsigned lane) { set |= (lanes[lane]->value != 0) << lane; });
  return set;
}

static uint64_t combine(Op op, uint64_t a, uint64_t b) {
  switch (op) {
    case Op::REDUCE_ADD:
      return a + b;
    case Op::REDUCE_MIN:
      return std::min(static_cast<int64_t>(a), static_cast<int64_t>(b));
    case Op::REDUCE_MAX:
      return std::max(static_cast<int64_t>(a), static_cast<int64_t>(b));
    case Op::REDUCE_AND:
      return a & b;
    case Op::REDUCE_OR:
      return a | b;
    default:
      return a ^ b;
  }
}

static uint64_t reduce(Op op, Thread* const* lanes, uint32_t mask) {
  uint64_t result = lanes[__builtin_ctz(mask)]->value;
  for_each(mask & (mask - 1), [&](unsigned lane) { result = combine(op, result, lanes[lane]->value); });
  return result;
}

static uint32_t lanes_with(uint64_t value, Thread* const* lanes, uint32_t mask) {
  uint32_t same = 0;
  for_each(mask, [&](unsigned lane) { same |= (lanes[lane]->value == value) << lane; });
  return same;
}

// What every lane of `mask` gets from `op`.
static void perform(Op op, Thread* const* lanes, uint32_t mask) {
  const auto give_all = [&](uint64_t result) { for_each(mask, [&](unsigned lane) { lanes[lane]->result = result; }); };
  switch (op) {
    case Op::SHUFFLE:
      return shuffle(lanes, mask);
    case Op::BALLOT:
      return give_all(ballot(lanes, mask));
    case Op::ANY:
      return give_all(ballot(lanes, mask) != 0);
    case Op::ALL:
      return give_all(ballot(lanes, mask) == mask);
    case Op::MATCH_ANY:
      return for_each(mask, [&](unsigned lane) { lanes[lane]->result = lanes_with(lanes[lane]->value, lanes, mask); });
    case Op::SYNC_WARP:
      return;
    case Op::LOAD_MATRICES:
    case Op::LOAD_MATRICES_TRANSPOSED:
      return load_matrices(lanes, op == Op::LOAD_MATRICES_TRANSPOSED);
    case Op::MULTIPLY_BF16:
    case Op::MULTIPLY_F16:
      return multiply(lanes, op == Op::MULTIPLY_BF16);
    default:
      return give_all(reduce(op, lanes, mask));
  }
}

static bool is_matrix(Op op) { return op >= Op::LOAD_MATRICES; }

static bool all_have_come(const Thread* thread) {
  const unsigned warp = thread->warp();
  return (thread->mask & block.lanes_alive[warp] & ~block.lanes_joined[warp]) == 0;
}

// All lanes of the thread's mask are in some collective: if it is the same one, do it and let them go on.
static void complete(Thread* thread) {
  Thread* const* lanes = &block.threads[thread->warp() * WARP];
  const uint32_t mask = thread->mask & block.lanes_alive[thread->warp()];
  bool is_same = true;
  for_each(mask, [&](unsigned lane) { is_same &= lanes[lane]->mask == thread->mask; });
  if (!is_same) return;  // they wait for other lanes first
  for_each(mask, [&](unsigned lane) {
    const Thread* other = lanes[lane];
    if (other->op != thread->op || !(other->site == thread->site)) {
      fail(thread, line_of(thread->pc) + ": lanes of a warp have diverged: this one is in " + name_of(thread->op) +
                       format(", lane %u in %s at ", lane, name_of(other->op)) + line_of(other->pc));
    }
  });
  if (is_matrix(thread->op) && mask != ~0u) {
    fail(thread, line_of(thread->pc) + ": " + name_of(thread->op) + format(" needs all 32 lanes, here are %08x", mask));
  }
  perform(thread->op, lanes, mask);
  if (Observer* watching = observer()) watching->collective(block.where(thread), mask, thread->op, thread->pc);
  block.lanes_joined[thread->warp()] &= ~mask;
  if (block.order == Order::FORWARD) {  // who came last goes on and its warp follows: all it needs is in the L1 cache
    for (uint32_t left = mask; left != 0;) {
      const unsigned lane = 31 - __builtin_clz(left);
      left ^= 1u << lane;
      if (lanes[lane] == current) {
        current->state = State::RUNNING;
      } else {
        block.ready.add_first(lanes[lane]);
      }
    }
  } else {
    for_each(mask, [&](unsigned lane) { block.ready.add(lanes[lane]); });
  }
}

static inline uint64_t join(Thread* thread, Op op, uint32_t mask, Site site, const void* pc) {
  thread->op = op;
  thread->mask = mask;
  thread->site = site;
  thread->pc = pc;
  thread->state = State::IN_COLLECTIVE;
  block.lanes_joined[thread->warp()] |= 1u << thread->lane();
  if (all_have_come(thread)) complete(thread);
  wait_for_turn(thread);
  return thread->result;
}

uint64_t collective(Op op, uint32_t mask, uint64_t value, int source, Site site) {
  Thread* thread = current;
  const void* pc = __builtin_return_address(0);
  if (!(mask >> thread->lane() & 1)) {
    fail(line_of(pc) + ": " + name_of(op) + format(" of mask %08x, in which the calling lane is not", mask));
  }
  thread->value = value;
  thread->source = source;
  return join(thread, op, mask, site, pc);
}

void matrix_collective(Op op, const void* a, const void* b, void* result, Site site) {
  Thread* thread = current;
  thread->a = a;
  thread->b = b;
  thread->matrix = result;
  join(thread, op, ~0u, site, __builtin_return_address(0));
}

void leave_warp(Thread* thread) {
  const unsigned warp = thread->warp();
  block.lanes_alive[warp] &= ~(1u << thread->lane());
  for_each(block.lanes_joined[warp], [&](unsigned lane) {
    Thread* other = block.threads[warp * WARP + lane];
    const bool waits_for_it = other->mask >> thread->lane() & 1;
    if (other->state == State::IN_COLLECTIVE && waits_for_it && all_have_come(other)) complete(other);
  });
}

}  // namespace cuda_on_cpu
