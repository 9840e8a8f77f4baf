// count.h: what the memory of a GPU makes of one warp request, by the addresses of its lanes.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

constexpr unsigned WARP = 32;   // lanes
constexpr unsigned SECTOR = 32; // bytes that global memory moves at least
constexpr unsigned BANKS = 32;  // of shared memory, each a word wide
constexpr unsigned WORD = 4;    // bytes

// What the lanes of one warp access together.
struct Request {
  uint32_t lanes = 0;  // bit i: lane i takes part
  uint32_t bytes = 0;  // of one lane, at most 16
  std::array<uintptr_t, WARP> addresses{};
};

// The sectors that a global request touches, ascending.
struct Sectors {
  std::array<uint64_t, 2 * WARP> numbers;
  size_t count = 0;

  explicit Sectors(const Request& request) {
    for (unsigned lane = 0; lane < WARP; lane++) {
      if (!(request.lanes >> lane & 1)) continue;
      const uintptr_t first = request.addresses[lane] / SECTOR;
      const uintptr_t last = (request.addresses[lane] + request.bytes - 1) / SECTOR;
      numbers[count++] = first;
      if (last != first) numbers[count++] = last;
    }
    std::sort(begin(), begin() + count);
    count = std::unique(begin(), begin() + count) - begin();
  }
  uint64_t* begin() { return numbers.data(); }
};

// Sectors that the lanes' bytes would fill, each byte counted once.
inline uint64_t ideal_sectors(const Request& request) {
  std::array<uintptr_t, WARP> begins;
  size_t count = 0;
  for (unsigned lane = 0; lane < WARP; lane++)
    if (request.lanes >> lane & 1) begins[count++] = request.addresses[lane];
  std::sort(begins.begin(), begins.begin() + count);
  uint64_t bytes = 0;
  uintptr_t end = 0;
  for (size_t i = 0; i < count; i++) {
    bytes += begins[i] + request.bytes - std::max(end, begins[i]);
    end = begins[i] + request.bytes;
  }
  return (bytes + SECTOR - 1) / SECTOR;
}

// A shared request is served in passes: all lanes at once up to 4 bytes, half of them for 8, a quarter for 16. In a
// wavefront of a pass each bank gives or takes one word, which any number of lanes may share.
struct Wavefronts {
  uint64_t count = 0;
  uint64_t ideal = 0;  // one a pass

  explicit Wavefronts(const Request& request) {
    const unsigned lanes_a_pass = WARP / std::max(request.bytes / WORD, 1u);
    for (unsigned lane = 0; lane < WARP; lane += lanes_a_pass) {
      const size_t most = most_words(request, lane, lane + lanes_a_pass);
      count += most;
      ideal += most > 0;
    }
  }

 private:
  // The most words that the lanes [begin, end) want of one bank.
  static size_t most_words(const Request& request, unsigned begin, unsigned end) {
    std::array<std::array<uintptr_t, WARP>, BANKS> words;
    std::array<size_t, BANKS> count{};
    size_t most = 0;
    for (unsigned lane = begin; lane < end; lane++) {
      if (!(request.lanes >> lane & 1)) continue;
      const uintptr_t first = request.addresses[lane] / WORD;
      for (uintptr_t word = first; word <= (request.addresses[lane] + request.bytes - 1) / WORD; word++) {
        auto& bank = words[word % BANKS];
        size_t& n = count[word % BANKS];
        if (std::find(bank.begin(), bank.begin() + n, word) == bank.begin() + n) bank[n++] = word;
        most = std::max(most, n);
      }
    }
    return most;
  }
};

}  // namespace cuda_on_cpu
