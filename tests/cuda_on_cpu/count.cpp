// count.cpp: the observer of mode count: what a profiler would see of a launch, by instruction. count.py reads it.
//
// A warp request is what the lanes of a warp access at one instruction together. Here lanes run one after another, so
// it is put together afterwards: each lane's k-th execution of the instruction since its warp last met (in a collective
// of all its lanes, or a barrier) belongs to request k; lanes that have no k-th are idle in it. That is right for
// straight code and for loops that lanes leave early. Where a lane skips an iteration and goes on, its later ones are
// paired with the others' earlier ones.
//
// No cache is modelled, but Totals tells what perfect ones would leave of the sectors. Atomics move nothing here.
#include <map>
#include <unordered_map>
#include <vector>

#include "count.h"
#include "observer.h"

namespace cuda_on_cpu {
namespace {

enum class Event : uint32_t {  // as in count.py
  GLOBAL_LOAD, GLOBAL_STORE, COPY_SOURCE, SHARED_LOAD, SHARED_STORE, COPY_DESTINATION, LOAD_MATRICES,
  GLOBAL_ATOMIC, SHARED_ATOMIC, MULTIPLY, SHUFFLE, VOTE, WARP_BARRIER, BARRIER,
};

struct Row {
  uint64_t event;
  uint64_t offset;    // of the instruction, in the library
  uint64_t requests;  // of warps; BARRIER: of blocks
  uint64_t bytes;     // that lanes asked for
  uint64_t moved;     // sectors (global) or wavefronts (shared)
  uint64_t ideal;
  uint64_t widths;    // bit i: some lanes asked for 2^i bytes
};

struct Totals {
  uint64_t block_sectors;   // that blocks read, each counted once a block: what perfect L1 caches let through
  uint64_t launch_sectors;  // read + written, each counted once a launch: what a perfect L2 cache lets through
  uint64_t copy_bytes;      // of cp.async, under way at most in a block
};

// What one warp does at one instruction until its lanes meet.
struct Site {
  Event event;
  const void* pc;
  std::array<uint32_t, WARP> executions{};
  std::vector<Request> requests;
};

struct Warp {
  std::unordered_map<uint64_t, Site> sites;
  std::vector<Site*> busy;  // those with requests
};

// Sort, and leave each number once.
void make_distinct(std::vector<uint64_t>& numbers) {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
}

// cp.async of one thread, in bytes.
struct Copies {
  uint64_t under_way = 0;
  uint64_t most = 0;

  void begin(uint64_t bytes) {
    under_way += bytes;
    most = std::max(most, under_way);
  }
};

class Counter : public Observer {
 public:
  std::vector<Row> rows;  // of the last launch
  Totals totals{};        // likewise

  void begin_launch(const Launch& launch) override {
    threads_ = launch.threads;
    totals = {};
    warps_.assign((launch.threads + WARP - 1) / WARP, {});
    copies_.assign(launch.threads, {});
    by_instruction_.clear();
    for (auto* sectors : {&block_reads_, &launch_reads_, &launch_writes_}) sectors->clear();
  }

  void begin_block(unsigned) override { finish_block(); }

  void access(Where where, const Access& access) override {
    const bool global = access.region->space == Space::GLOBAL;
    switch (access.kind) {
      case Kind::LOAD: return gather(where, access, global ? Event::GLOBAL_LOAD : Event::SHARED_LOAD);
      case Kind::STORE: return gather(where, access, global ? Event::GLOBAL_STORE : Event::SHARED_STORE);
      case Kind::ATOMIC: return gather(where, access, global ? Event::GLOBAL_ATOMIC : Event::SHARED_ATOMIC);
      case Kind::MATRIX_ROW: return gather(where, access, Event::LOAD_MATRICES);
      case Kind::COPY_SOURCE: {  // comes before its destination, and not for each: that one counts the executions
        const uint32_t k = site(where, access.pc, Event::COPY_DESTINATION).executions[where.lane()];
        return add(where, access, Event::COPY_SOURCE, k);
      }
      case Kind::COPY_DESTINATION:
        copies_[where.thread].begin(access.bytes);
        return gather(where, access, Event::COPY_DESTINATION);
      case Kind::COPY_LANDED: copies_[where.thread].under_way -= access.bytes; return;
    }
  }

  void collective(Where where, uint32_t lanes, Op op, const void* pc) override {
    const unsigned left = threads_ - where.warp() * WARP;
    if (lanes == (left < WARP ? (1u << left) - 1 : ~0u)) settle(warps_[where.warp()]);
    switch (op) {
      case Op::LOAD_MATRICES:
      case Op::LOAD_MATRICES_TRANSPOSED: break;  // known by its rows
      case Op::MULTIPLY_BF16:
      case Op::MULTIPLY_F16: row(Event::MULTIPLY, pc).requests++; break;
      case Op::SHUFFLE: row(Event::SHUFFLE, pc).requests++; break;
      case Op::SYNC_WARP: row(Event::WARP_BARRIER, pc).requests++; break;
      default: row(Event::VOTE, pc).requests++;
    }
  }

  void barrier(Where, const void* pc) override {
    for (Warp& warp : warps_) settle(warp);
    row(Event::BARRIER, pc).requests++;
  }

  void end_launch() override {
    finish_block();
    make_distinct(launch_reads_);
    make_distinct(launch_writes_);
    totals.launch_sectors = launch_reads_.size() + launch_writes_.size();
    rows.clear();
    for (const auto& [instruction, row] : by_instruction_) rows.push_back(row);
  }

 private:
  Row& row(Event event, const void* pc) {
    const uint64_t offset = offset_in_library(pc) - 1;
    const uint64_t number = static_cast<uint64_t>(event);
    return by_instruction_.try_emplace({offset, number}, Row{number, offset, 0, 0, 0, 0, 0}).first->second;
  }

  Site& site(Where where, const void* pc, Event event) {
    const uint64_t key = reinterpret_cast<uintptr_t>(pc) * 16 + static_cast<uint64_t>(event);
    return warps_[where.warp()].sites.try_emplace(key, Site{event, pc, {}, {}}).first->second;
  }

  // A struct goes by 16 bytes at most, as instructions do.
  void gather(Where where, Access access, Event event) {
    uint32_t& executions = site(where, access.pc, event).executions[where.lane()];
    const uintptr_t end = access.address + access.bytes;
    for (; access.address < end; access.address += access.bytes) {
      access.bytes = std::min<uintptr_t>(end - access.address, 16);
      add(where, access, event, executions++);
    }
  }

  // Add a lane's access to request k of its instruction.
  void add(Where where, const Access& access, Event event, uint32_t k) {
    Site& at = site(where, access.pc, event);
    if (at.requests.empty()) warps_[where.warp()].busy.push_back(&at);
    if (k >= at.requests.size()) at.requests.resize(k + 1);
    Request& request = at.requests[k];
    request.lanes |= 1u << where.lane();
    request.bytes = access.bytes;
    request.addresses[where.lane()] = access.address;
  }

  // Count what a warp's lanes have asked for until now.
  void settle(Warp& warp) {
    for (Site* at : warp.busy) {
      Row& counted = row(at->event, at->pc);
      for (const Request& request : at->requests)
        if (request.lanes) count(counted, at->event, request);
      at->requests.clear();
      at->executions.fill(0);
    }
    warp.busy.clear();
  }

  void count(Row& counted, Event event, const Request& request) {
    counted.requests++;
    counted.bytes += static_cast<uint64_t>(__builtin_popcount(request.lanes)) * request.bytes;
    counted.widths |= request.bytes;
    if (event <= Event::COPY_SOURCE) {
      Sectors sectors(request);
      counted.moved += sectors.count;
      counted.ideal += ideal_sectors(request);
      auto& all = event == Event::GLOBAL_STORE ? launch_writes_ : block_reads_;
      all.insert(all.end(), sectors.begin(), sectors.begin() + sectors.count);
    } else if (event <= Event::LOAD_MATRICES) {
      const Wavefronts wavefronts(request);
      counted.moved += wavefronts.count;
      counted.ideal += wavefronts.ideal;
    }
  }

  void finish_block() {
    for (Warp& warp : warps_) settle(warp);
    make_distinct(block_reads_);
    totals.block_sectors += block_reads_.size();
    launch_reads_.insert(launch_reads_.end(), block_reads_.begin(), block_reads_.end());
    block_reads_.clear();
    uint64_t copy_bytes = 0;
    for (const Copies& copies : copies_) copy_bytes += copies.most;
    totals.copy_bytes = std::max(totals.copy_bytes, copy_bytes);
    copies_.assign(copies_.size(), {});
  }

  unsigned threads_ = 0;  // a block
  std::vector<Warp> warps_;
  std::vector<Copies> copies_;  // by thread
  std::map<std::pair<uint64_t, uint64_t>, Row> by_instruction_;
  std::vector<uint64_t> block_reads_, launch_reads_, launch_writes_;  // sectors
};

Counter counter;

}  // namespace

Observer* observer() { return &counter; }

}  // namespace cuda_on_cpu

// What the last launch did; `count` becomes the number of rows.
EXPORT const cuda_on_cpu::Row* count_rows(size_t* count) {
  *count = cuda_on_cpu::counter.rows.size();
  return cuda_on_cpu::counter.rows.data();
}

EXPORT const cuda_on_cpu::Totals* count_totals() { return &cuda_on_cpu::counter.totals; }
