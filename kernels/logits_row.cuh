// logits_row.cuh: a block walks a row of logits: for the greatest of it, and for a place in the order of ids.
// -D: THREADS (a multiple of 32 from 64 to 1024)
#pragma once
#include "exact.cuh"

#if !defined(THREADS)
#error "logits_row.cuh needs -D THREADS"
#endif

constexpr int WARPS = THREADS / WARP;
constexpr int LINE = 32;  // floats in 128 bytes

// A row of logits by places: place p is base[p], base is the beginning of the row rounded down to 128 bytes, the
// logit of token id is at place first + id.
struct Row {
  const float* base;
  int first, end;
};

DEVICE Row row_of(const float* logits, int vocab_size) {
  const int first = reinterpret_cast<uint64_t>(logits) / sizeof(float) % LINE;
  return {logits - first, first, first + vocab_size};
}

// Call visit(id, logit) for the tokens at places [begin, end), in no particular order; they are shared by `width`
// threads, of which this is number `index`. PRECOND: begin is a multiple of LINE, width of 8.
template <class Visit>
DEVICE void walk(Row row, int begin, int end, int index, int width, Visit visit) {
  const int low = max(begin, row.first), high = min(end, row.end);
  const int from = min((low + 3) / 4 * 4, high), to = max(from, high / 4 * 4);  // whole 16-byte units: [from, to)
  const int edge = index < 4 ? low + index : to + index - 4;  // of [low, from) or [to, high), 3 at most
  if (index < 7 && edge < (index < 4 ? from : high)) visit(edge - row.first, row.base[edge]);
  int place = begin + 4 * index;
  if (place < from) place += 4 * width;
  uint4 unit = place < to ? load16(row.base + place) : make_uint4(0, 0, 0, 0);
  while (place < to) {
    const int next = place + 4 * width;
    const uint4 ahead = next < to ? load16(row.base + next) : make_uint4(0, 0, 0, 0);  // in flight meanwhile
    const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; i++) visit(place + i - row.first, __uint_as_float(words[i]));
    place = next;
    unit = ahead;
  }
}

template <class Visit>
DEVICE void walk_row(Row row, Visit visit) {
  walk(row, 0, row.end, threadIdx.x, THREADS, visit);
}

// ---- Integer reductions ---------------------------------------------------------------------------------------------
DEVICE uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

// Sum over this lane and those before it.
template <class Integer>
DEVICE Integer warp_prefix(Integer x) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const Integer before = __shfl_up_sync(ALL_LANES, x, distance);
    if (threadIdx.x % WARP >= distance) x += before;
  }
  return x;
}

// Greatest of a block; every thread gets it.
DEVICE uint64_t block_max(uint64_t x) {
  SHARED_ARRAY(uint64_t, greatest, [WARPS]);
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(ALL_LANES, x, distance);
    x = x > other ? x : other;
  }
  if (threadIdx.x % WARP == 0) greatest[threadIdx.x / WARP] = x;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) x = x > greatest[w] ? x : greatest[w];
  __syncthreads();
  return x;
}

// Sum over a block, by warp in sums [WARPS] (shared, to be used again after a barrier); every thread gets it.
DEVICE uint64_t block_sum(uint64_t x, uint64_t* sums) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
  __syncthreads();
  uint64_t total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += sums[w];
  return total;
}

// ---- The greatest, and a place in the order of ids ------------------------------------------------------------------
struct Greatest {
  uint32_t key;
  int id;  // the lowest with this key; where nothing is above minus infinity, the lowest not BANNED, or 0
};

DEVICE Greatest find_greatest(Row row) {
  float best = MINUS_INFINITY;
  int id = 0;
  walk_row(row, [&](int at, float z) {
    if (z > best || (z == best && at < id)) {
      best = z;
      id = at;
    }
  });
  const uint64_t found = block_max(static_cast<uint64_t>(rank_key(best)) << 32 | (~0u - id));
  if (found >> 32 > KEY_OF_MINUS_INFINITY) return {static_cast<uint32_t>(found >> 32), static_cast<int>(~0u - found)};
  int left = 0;  // vocab_size - id, of the lowest
  walk_row(row, [&](int at, float z) {
    if (__float_as_uint(z) != BANNED) left = max(left, row.end - row.first - at);
  });
  left = block_max(left);
  return {KEY_OF_MINUS_INFINITY, left == 0 ? 0 : row.end - row.first - left};
}

// Return the first id, ascending, at which the running sum of weight(id, logit) passes target(sum over the row).
template <class Weight, class Target>
DEVICE int find_in_order(Row row, Weight weight, Target target) {
  constexpr int PIECE = 4 * WARP;  // places; what a warp loads at a time
  SHARED_ARRAY(uint64_t, sums, [WARPS]);
  SHARED_ARRAY(int, found, [1]);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  int begin = 0, end = row.end;
  uint64_t left = 0;  // of the target, at begin
  bool first = true;
  do {  // each warp has one part of [begin, end); the next round is that in which the sum passes
    const int part = (end - begin + WARPS * PIECE - 1) / (WARPS * PIECE) * PIECE;
    uint64_t sum = 0;
    const int start = min(begin + warp * part, end);
    walk(row, start, min(start + part, end), lane, WARP, [&](int id, float z) { sum += weight(id, z); });
    const uint64_t total = block_sum(sum, sums);
    if (first) left = target(total);
    first = false;
    for (int w = 0; left >= sums[w]; w++) {
      left -= sums[w];
      begin += part;
    }
    end = min(begin + part, end);
    __syncthreads();
  } while (end - begin > PIECE);
  if (warp == 0) {
    uint64_t upto[4];  // running sums of this lane's tokens
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int place = begin + 4 * lane + i;
      const bool inside = place >= row.first && place < end;
      upto[i] = (i > 0 ? upto[i - 1] : 0) + (inside ? weight(place - row.first, row.base[place]) : 0);
    }
    const uint64_t before = warp_prefix(upto[3]) - upto[3];
    if (left >= before && left - before < upto[3]) {
      left -= before;
      found[0] = begin + 4 * lane + (left >= upto[0]) + (left >= upto[1]) + (left >= upto[2]) - row.first;
    }
  }
  __syncthreads();
  return found[0];
}
