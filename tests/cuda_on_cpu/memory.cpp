// memory.cpp: where arrays lie, and what an access may do.
#include "memory.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <deque>

namespace cuda_on_cpu {

static constexpr size_t PAGE = 4096;
static constexpr size_t GAP = size_t{1} << 29;  // bytes before and behind an array that no access may touch
static constexpr size_t MAX_STATIC_SHARED = 48 << 10, MAX_SHARED = 227 << 10;

// An array of the launch.
struct Placed {
  Array array;
  unsigned char* place;  // array.data, or a copy of it
};

static std::vector<Placed> placed;
static std::deque<Region> regions;  // with an observer; pointers to them stay good
static Region* last_found;
static std::vector<SharedArray*> shared_arrays;  // of this launch
static unsigned char* dynamic;
static size_t dynamic_bytes;
static constexpr char DYNAMIC_NAME[] = "dynamic shared memory";

static uintptr_t address_of(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// ---- Places ---------------------------------------------------------------------------------------------------------
static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Far from all else: an index that is far off then meets no other array. The memory begins at a multiple of PAGE.
static unsigned char* map_alone(size_t bytes) {
  void* range = mmap(nullptr, pages(bytes) + 2 * GAP, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) abort();
  unsigned char* memory = static_cast<unsigned char*>(range) + GAP;
  if (mprotect(memory, pages(bytes), PROT_READ | PROT_WRITE) != 0) abort();
  return memory;
}

static void unmap_alone(unsigned char* memory, size_t bytes) { munmap(memory - GAP, pages(bytes) + 2 * GAP); }

static void add_region(const Region& region) {
  regions.push_back(region);
  observer()->begin_region(regions.back());
}

void begin_memory(const Array* arrays, size_t number) {
  for (size_t i = 0; i < number; i++) {
    const Array& array = arrays[i];
    unsigned char* place = array.data;
    if (observer() != nullptr) {
      place = map_alone(array.phase + array.bytes) + array.phase;
      memcpy(place, array.data, array.bytes);
      add_region({address_of(place), array.bytes, array.element_bytes, Space::GLOBAL, array.is_const != 0, array.name,
                  nullptr});
    }
    placed.push_back({array, place});
  }
}

void end_memory() {
  for (Region& region : regions) observer()->end_region(region);
  regions.clear();
  last_found = nullptr;
  for (const Placed& it : placed) {
    if (it.place == it.array.data) continue;
    if (!it.array.is_const) memcpy(it.array.data, it.place, it.array.bytes);
    unmap_alone(it.place - it.array.phase, it.array.phase + it.array.bytes);
  }
  placed.clear();
  for (SharedArray* array : shared_arrays) array->is_known = false;
  shared_arrays.clear();
}

void* place_of(void* data) {
  for (const Placed& it : placed) {
    const size_t offset = static_cast<unsigned char*>(data) - it.array.data;
    if (offset < it.array.bytes || (offset == 0 && it.array.bytes == 0)) return it.place + offset;
  }
  return data;
}

// ---- Shared memory --------------------------------------------------------------------------------------------------
static constexpr int NAN_BYTE = 0xff;  // four, or two, of them are a NaN in every float format

void set_dynamic_shared(size_t bytes) {
  if (bytes != dynamic_bytes) {
    if (dynamic != nullptr) unmap_alone(dynamic, dynamic_bytes);
    dynamic = bytes != 0 ? map_alone(bytes) : nullptr;
    dynamic_bytes = bytes;
  }
  if (observer() != nullptr && bytes != 0) {
    constexpr uint32_t SMALLEST_ELEMENT = 2;
    add_region({address_of(dynamic), bytes, SMALLEST_ELEMENT, Space::SHARED, false, DYNAMIC_NAME, nullptr});
  }
}

unsigned char* dynamic_shared() { return dynamic; }

void* storage_of(SharedArray& array) {
  if (!array.is_known) {
    array.is_known = true;
    shared_arrays.push_back(&array);
    const size_t bytes = static_shared_bytes();
    if (bytes > MAX_STATIC_SHARED || bytes + dynamic_bytes > MAX_SHARED) {
      fail(format("with '%s' the SHARED_ARRAYs take %zu bytes, but a block has %zu for them, %zu with dynamic ones",
                  array.name, bytes, MAX_STATIC_SHARED, MAX_SHARED));
    }
    if (array.storage == nullptr) array.storage = map_alone(array.bytes);  // for as long as the library is loaded
    memset(array.storage, NAN_BYTE, array.bytes);
    if (observer() != nullptr) {
      add_region({address_of(array.storage), array.bytes, array.element_bytes, Space::SHARED, false, array.name,
                  nullptr});
    }
  }
  return array.storage;
}

size_t static_shared_bytes() {
  size_t bytes = 0;
  for (const SharedArray* array : shared_arrays) bytes = (bytes + 15) / 16 * 16 + array->bytes;
  return bytes;
}

void clear_shared() {
  if (dynamic != nullptr) memset(dynamic, NAN_BYTE, dynamic_bytes);
  for (SharedArray* array : shared_arrays) memset(array->storage, NAN_BYTE, array->bytes);
}

// ---- Accesses -------------------------------------------------------------------------------------------------------
static Region* find(uintptr_t address, size_t bytes) {
  if (last_found != nullptr && address - last_found->begin < last_found->bytes) {
    return address - last_found->begin + bytes <= last_found->bytes ? last_found : nullptr;
  }
  for (Region& region : regions) {
    if (address - region.begin < region.bytes) {
      last_found = &region;
      return address - region.begin + bytes <= region.bytes ? &region : nullptr;
    }
  }
  return nullptr;
}

std::string describe_place(uintptr_t address) {
  const char* name = nullptr;
  size_t bytes = 0, nearest = GAP;
  intptr_t offset = 0;
  const auto consider = [&](const char* its_name, const void* begin, size_t its_bytes) {
    const intptr_t its_offset = address - address_of(begin), its_end = its_bytes;
    const size_t distance = its_offset < 0 ? -its_offset : its_offset < its_end ? 0 : its_offset - its_end;
    if (distance >= nearest) return;
    nearest = distance;
    name = its_name;
    bytes = its_bytes;
    offset = its_offset;
  };
  for (const Placed& it : placed) consider(it.array.name, it.place, it.array.bytes);
  for (const SharedArray* it : shared_arrays) consider(it->name, it->storage, it->bytes);
  if (dynamic != nullptr) consider(DYNAMIC_NAME, dynamic, dynamic_bytes);
  if (address < PAGE) return "a null pointer";
  if (name == nullptr) return format("address %#zx, near no array", address);
  return format("byte %zd of '%s', which has %zu bytes", offset, name, bytes);
}

static const char* verb_of(Kind kind) {
  switch (kind) {
    case Kind::LOAD:
      return "read";
    case Kind::STORE:
      return "write";
    case Kind::ATOMIC:
      return "atomic access";
    case Kind::COPY_SOURCE:
      return "read by cp.async";
    case Kind::MATRIX_ROW:
      return "read by ldmatrix";
    default:
      return "write by cp.async";
  }
}

static bool is_constant_of_library(uintptr_t address) {
  Dl_info its, ours;
  return dladdr(reinterpret_cast<void*>(address), &its) != 0 && dladdr(reinterpret_cast<void*>(&find), &ours) != 0 &&
         its.dli_fbase == ours.dli_fbase;
}

static void check_access(const Thread* thread, const Region* region, uintptr_t address, size_t bytes, Kind kind,
                         const void* pc, bool is_aligned) {
  const auto illegal = [&](const char* how) {
    fail(thread, line_of(pc) + format(": %s %s of %zu bytes at ", how, verb_of(kind), bytes) + describe_place(address));
  };
  const bool writes = kind != Kind::LOAD && kind != Kind::COPY_SOURCE && kind != Kind::MATRIX_ROW;
  if (region == nullptr) illegal("illegal");
  if (is_aligned && (bytes & (bytes - 1)) == 0 && address % bytes != 0) illegal("misaligned");
  if (writes && region->is_const) illegal("forbidden (const)");
  if (kind == Kind::COPY_SOURCE && region->space != Space::GLOBAL) illegal("shared-memory");
  const bool is_shared_only = kind == Kind::COPY_DESTINATION || kind == Kind::MATRIX_ROW;
  if (is_shared_only && region->space != Space::SHARED) illegal("global-memory");
}

static inline void access(Thread* thread, uintptr_t address, size_t bytes, Kind kind, const void* pc, bool is_aligned) {
  if (address - address_of(thread->stack) < STACK_BYTES) return;  // registers and local memory
  Region* region = find(address, bytes);
  if (region == nullptr && kind == Kind::LOAD && is_constant_of_library(address)) return;
  check_access(thread, region, address, bytes, kind, pc, is_aligned);
  observer()->access(block.where(thread), {region, address, static_cast<uint32_t>(bytes), kind, pc});
}

void access(const void* address, size_t bytes, Kind kind, const void* pc, bool is_aligned) {
  if (current != nullptr) access(current, address_of(address), bytes, kind, pc, is_aligned);
}

void access(Thread* thread, const void* address, size_t bytes, Kind kind, const void* pc) {
  if (observer() != nullptr) access(thread, address_of(address), bytes, kind, pc, true);
}

void observe_atomic(const void* address, size_t bytes, const void* pc) {
  access(current, address, bytes, Kind::ATOMIC, pc);
}

void read_matrix_row(Thread* thread) {
  if (address_of(thread->a) % 16 != 0) {
    fail(thread, line_of(thread->pc) + ": misaligned row of ldmatrix at " + describe_place(address_of(thread->a)));
  }
  access(thread, thread->a, 16, Kind::MATRIX_ROW, thread->pc);
}

}  // namespace cuda_on_cpu
