// races.cpp: the observer of mode check. Of every element of every array it keeps who wrote it last and who has read it
// since, and finds two accesses, one of them a write, that no barrier and no __syncwarp puts in order; a read of shared
// memory that the block has not written; and whatever touches the destination of a cp.async that is under way.
//
// Atomics are in order with each other only. Blocks of a launch are never in order.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "block.h"

namespace cuda_on_cpu {

namespace {

constexpr uint32_t UNDER_WAY = ~0u;  // the time of a write by a cp.async that was not yet waited for

struct Touch {
  uint32_t who;      // block * MAX_THREADS + thread + 1; 0 = nobody
  uint32_t when;     // by the clock
  uint32_t pc : 31;  // in the library
  uint32_t is_atomic : 1;
};

struct Element {
  Touch write;
  Touch others[2];  // reads and atomics since the write; two of different warps, if there are such
};

class Races : public Observer {
 public:
  void begin_launch(const Launch&) override {
    clock_ = 1;
    std::fill(synced_.begin(), synced_.end(), Lanes());
  }
  void begin_region(Region& region) override {
    region.notes = calloc(region.bytes / granule(region) + 1, sizeof(Element));
  }
  void end_region(Region& region) override { free(region.notes); }
  void begin_block(unsigned) override { block_begin_ = barrier_ = ++clock_; }
  void barrier(Where, const void*) override { barrier_ = ++clock_; }
  void collective(Where where, uint32_t lanes, Op op, const void*) override {
    if (op == Op::SYNC_WARP) sync(where.warp(), lanes);
  }
  void access(Where, const Access&) override;

 private:
  struct Lanes {
    uint32_t when[WARP] = {};  // before that time, what a lane of the same warp did is in order with this lane
  };

  static uint32_t granule(const Region& region) { return std::min(region.element_bytes, 4u); }
  static uint32_t id_of(Where where) { return where.block * MAX_THREADS + where.thread + 1; }

  void sync(unsigned warp, uint32_t lanes);
  bool is_before(const Touch& touch, Where now) const;
  void check(const Touch& touch, const char* did, Where now, const Access& access) const;
  void remember(Element& element, Where now, const Touch& touch) const;

  uint32_t clock_ = 1;        // goes on at each barrier, __syncwarp and block
  uint32_t barrier_ = 0;      // time of the block's last barrier
  uint32_t block_begin_ = 0;  // what shared memory held before, nobody wrote
  std::vector<Lanes> synced_ = std::vector<Lanes>(MAX_THREADS);
};

void Races::sync(unsigned warp, uint32_t lanes) {
  Lanes all;
  clock_++;
  for (unsigned lane = 0; lane < WARP; lane++) {
    if (!(lanes >> lane & 1)) continue;
    const Lanes& its = synced_[warp * WARP + lane];
    for (unsigned i = 0; i < WARP; i++) all.when[i] = std::max(all.when[i], its.when[i]);
    all.when[lane] = clock_;
  }
  for (unsigned lane = 0; lane < WARP; lane++) {
    if (lanes >> lane & 1) synced_[warp * WARP + lane] = all;
  }
}

bool Races::is_before(const Touch& touch, Where now) const {
  const uint32_t who = touch.who - 1;
  const Where its = {who / MAX_THREADS, who % MAX_THREADS};
  if (its.block != now.block) return false;
  if (its.thread == now.thread || touch.when < barrier_) return true;
  return its.warp() == now.warp() && touch.when < synced_[now.thread].when[its.lane()];
}

std::string verb(Kind kind) {
  if (kind == Kind::COPY_DESTINATION) return "starts a cp.async to";
  if (kind == Kind::ATOMIC) return "changes (atomically)";
  return kind == Kind::STORE ? "writes" : "reads";
}

std::string actor(const Touch& touch, Where now) {
  const uint32_t who = touch.who - 1;
  const Where its = {who / MAX_THREADS, who % MAX_THREADS};
  if (its.block != now.block) return name_of(its);
  return format("thread %u (warp %u, lane %u)", its.thread, its.warp(), its.lane());
}

std::string place(const Access& access) {
  const size_t offset = access.address - access.region->begin;
  return format(" bytes %zu to %zu of '%s'", offset, offset + access.bytes - 1, access.region->name);
}

// Fail if the touch and the access, which are not both reads, are in no order.
void Races::check(const Touch& touch, const char* did, Where now, const Access& access) const {
  if (touch.who == 0 || is_before(touch, now) || (touch.is_atomic && access.kind == Kind::ATOMIC)) return;
  const bool same_block = (touch.who - 1) / MAX_THREADS == now.block;
  fail(line_of(access.pc) + ": race: " + verb(access.kind) + place(access) + ", which " + actor(touch, now) + " " +
       (touch.is_atomic ? "changed (atomically)" : did) + format(" at {+0x%x}", touch.pc) +
       (same_block ? " with no barrier between" : ", and blocks are in no order"));
}

// Keep a read or an atomic, instead of one that is in order with it, or of the second of a warp.
void Races::remember(Element& element, Where now, const Touch& touch) const {
  Touch& first = element.others[0];
  Touch& second = element.others[1];
  const auto warp_of = [](const Touch& it) { return (it.who - 1) / WARP; };
  if (first.who == 0 || is_before(first, now)) {
    first = touch;
  } else if (second.who == 0 || is_before(second, now) || warp_of(second) == warp_of(first)) {
    second = touch;
  }
}

void Races::access(Where now, const Access& access) {
  const bool is_landing = access.kind == Kind::COPY_LANDED, is_start = access.kind == Kind::COPY_DESTINATION;
  const bool is_atomic = access.kind == Kind::ATOMIC, overwrites = is_start || access.kind == Kind::STORE;
  const bool is_shared = access.region->space == Space::SHARED;
  const Touch touch = {id_of(now), is_start ? UNDER_WAY : clock_, offset_in_library(access.pc) - 1, is_atomic};
  const size_t offset = access.address - access.region->begin, size = granule(*access.region);
  Element* elements = static_cast<Element*>(access.region->notes);
  for (size_t i = offset / size; i <= (offset + access.bytes - 1) / size; i++) {
    Element& element = elements[i];
    if (is_shared && element.write.when < block_begin_) element = Element();  // of another block
    if (is_landing) {
      element.write.when = clock_;
      continue;
    }
    if (element.write.when == UNDER_WAY) {
      fail(line_of(access.pc) + ": " + verb(access.kind) + place(access) + ", to where the cp.async of " +
           actor(element.write, now) + format(" at {+0x%x} is still under way", element.write.pc));
    }
    if (is_shared && element.write.who == 0 && !overwrites) {
      fail(line_of(access.pc) + ": " + verb(access.kind) + place(access) + ", which the block has not written yet");
    }
    check(element.write, "wrote", now, access);
    for (const Touch& other : element.others) {
      if (overwrites || is_atomic || other.is_atomic) check(other, "read", now, access);
    }
    if (overwrites) {
      element = {touch, {}};
    } else {
      remember(element, now, touch);
    }
  }
}

}  // namespace

Observer* observer() {
  static Races races;
  return &races;
}

}  // namespace cuda_on_cpu
