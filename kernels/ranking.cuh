// ranking.cuh: where a prefix of a row's ranking ends, without a sort.
//
// Tokens are ranked by key (rank_key: the logit), the lower id first among equals. What is searched is the shortest
// prefix with a number of tokens or a mass. First all tokens are put into STEPS steps by their distance from the
// greatest logit; the tokens of the step in which the prefix ends are then put into bins by key, and those of one bin
// again, until a bin holds one token or one key. Sums are integers, so no order of threads changes a bit.
//
// Every lane has its own counter of each step: no two lanes of a warp meet in a bank, whatever the logits are.
#pragma once
#include "logits_row.cuh"

constexpr int STEPS = 256;                 // the last one has all that is further away
constexpr float STEPS_PER_UNIT = 9.1875f;  // of the exponent; (STEPS - 1) / STEPS_PER_UNIT has no mass any more
constexpr int COUNTERS = STEPS * WARP;     // words
constexpr int BIN_BITS = 12;               // bins need half the counters
constexpr uint64_t NO_GOAL = ~0ull;
constexpr int ALL_IDS = 0x7fffffff;

struct Sum {
  uint64_t mass, count;
};

DEVICE Sum operator+(Sum a, Sum b) { return {a.mass + b.mass, a.count + b.count}; }
DEVICE Sum operator-(Sum a, Sum b) { return {a.mass - b.mass, a.count - b.count}; }

// What a prefix is to have: so many tokens, or so much mass.
DEVICE bool reaches(Sum sum, Sum goal) { return sum.count >= goal.count || sum.mass >= goal.mass; }

// Counters in shared memory: of tokens, and the low and high words of their mass.
struct Counters {
  uint32_t* words;
  int stride;  // words from counts to low words to high words
  bool with_mass;

  DEVICE void clear() const {
    for (int i = 4 * threadIdx.x; i < (with_mass ? 3 : 1) * stride; i += 4 * THREADS)
      store16(words + i, make_uint4(0, 0, 0, 0));
  }
  DEVICE void add(int place, uint64_t mass) const {
    atomicAdd(words + place, 1u);
    if (!with_mass) return;
    const uint32_t low = static_cast<uint32_t>(mass);
    const uint32_t before = atomicAdd(words + stride + place, low);
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + (before + low < before);  // with the carry
    if (high > 0) atomicAdd(words + 2 * stride + place, high);
  }
  DEVICE Sum read(int place) const {
    if (!with_mass) return {0, words[place]};
    return {static_cast<uint64_t>(words[2 * stride + place]) << 32 | words[stride + place], words[place]};
  }
};

// The number of a logit's step; -0.0f at the greatest.
DEVICE int step_of(float exponent) { return min(static_cast<int>(exponent * -STEPS_PER_UNIT), STEPS - 1); }

// Where in a sequence of sums, the first of them behind `before`, the goal is reached.
struct Found {
  int64_t place;  // PLACES where it is not
  Sum before, own;
};

// read(place) gives one of PLACES sums; thread t has those from t * PLACES / THREADS on.
template <int PLACES, class Read>
DEVICE Found find_place(Sum before, Sum goal, Read read) {
  constexpr int PART = (PLACES + THREADS - 1) / THREADS;
  SHARED_ARRAY(Sum, sums, [WARPS]);
  SHARED_ARRAY(Found, found, [1]);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first = threadIdx.x * PART;
  Sum own = {0, 0};
  for (int i = 0; i < PART; i++)
    if (first + i < PLACES) own = own + read(first + i);
  Sum upto = {warp_prefix(own.mass), warp_prefix(own.count)};
  if (lane == WARP - 1) sums[warp] = upto;
  __syncthreads();
  upto = upto + before;
  for (int w = 0; w < warp; w++) upto = upto + sums[w];
  if (threadIdx.x == THREADS - 1 && !reaches(upto, goal)) found[0] = {PLACES, upto, {0, 0}};
  Sum running = upto - own;
  if (!reaches(running, goal) && reaches(upto, goal)) {
    int place = first;
    Sum here = read(place);
    while (!reaches(running + here, goal)) {
      running = running + here;
      here = read(++place);
    }
    found[0] = {place, running, here};
  }
  __syncthreads();
  return found[0];
}

// Make the counters by step and lane into one sum of each step. `steps` may lie among the counters.
DEVICE void fold_steps(Counters counters, Sum* steps) {
  constexpr int PART = (STEPS + THREADS - 1) / THREADS;
  const int lane = threadIdx.x % WARP;
  Sum sums[PART];
#pragma unroll
  for (int part = 0; part < PART; part++) {
    const int step = threadIdx.x + part * THREADS;
    sums[part] = {0, 0};
    for (int i = 0; i < WARP && step < STEPS; i++)  // no two lanes at the same bank
      sums[part] = sums[part] + counters.read(step * WARP + (lane + i) % WARP);
  }
  __syncthreads();
#pragma unroll
  for (int part = 0; part < PART; part++)
    if (threadIdx.x + part * THREADS < STEPS) steps[threadIdx.x + part * THREADS] = sums[part];
  __syncthreads();
}

// A prefix of the ranking: the tokens of greater keys than this, and those of this key in [0, end).
struct Prefix {
  uint32_t key;
  int end;
  Sum sum;
};

// A range of keys, both ends included.
struct Keys {
  uint32_t low, high;
};

// The least key whose logit is of this step or a nearer one.
DEVICE uint32_t least_key(int step, Softmax by) {
  uint32_t low = KEY_OF_MINUS_INFINITY, high = rank_key(by.z_max);  // the latter is of step 0
  while (low < high) {  // every lane looks at one of 32 keys; the least that fits and the one before it bound the next
    const uint32_t width = (high - low) / WARP + 1, key = low + threadIdx.x % WARP * width;
    const bool fits = key >= high || key < low || step_of(exponent(from_key(key), by)) <= step;
    const int first = __ffs(__ballot_sync(ALL_LANES, fits)) - 1;  // -1: it lies behind the last of them
    if (first >= 0) high = min(high, low + first * width);
    if (first != 0) low += (first > 0 ? first - 1 : WARP - 1) * width + 1;
  }
  return high;
}

DEVICE Keys keys_of(int step, Softmax by) {
  const uint32_t low = step < STEPS - 1 ? least_key(step, by) : KEY_OF_MINUS_INFINITY;
  return {low, step > 0 ? least_key(step - 1, by) - 1 : rank_key(by.z_max)};
}

// Return the shortest prefix that reaches the goal, which it does among the tokens in `keys`; `before` is the sum of
// those that rank in front of them. weigh(logit) gives the mass. PRECOND: no thread reads the counters any more.
template <class Weigh>
DEVICE Prefix find_prefix(Row row, Keys keys, Sum before, Sum goal, Counters bins, Weigh weigh) {
  Found found;
  int shift;
  do {
    shift = max(0, 32 - __clz(keys.high - keys.low) - BIN_BITS);
    bins.clear();
    __syncthreads();
    const float lowest = from_key(keys.low), highest = from_key(keys.high);
    walk_row(row, [&](int, float raw) {
      const float z = number(raw);
      if (z < lowest || z > highest) return;
      const uint32_t key = rank_key(z);
      if (key <= keys.high) bins.add(keys.high - key >> shift, weigh(z));  // 0 is above the key of -0, not above -0
    });
    __syncthreads();
    found = find_place<1 << BIN_BITS>(before, goal, [&](int place) { return bins.read(place); });
    before = found.before;
    keys.high -= found.place << shift;
    keys.low = max(keys.low, keys.high - ((1u << shift) - 1));
    if (found.own.count == 1 || before.count + found.own.count == goal.count)
      return {keys.low, ALL_IDS, before + found.own};
  } while (shift > 0);
  // All that are left have one key, and so one mass.
  uint64_t ties = min(found.own.count, goal.count - before.count), mass = 0;
  if (bins.with_mass) {
    mass = found.own.mass / found.own.count;
    const uint64_t needed = goal.mass == NO_GOAL ? ties : (goal.mass - before.mass - 1) / mass + 1;
    ties = min(needed, ties);
  }
  const Sum sum = before + Sum{ties * mass, ties};
  if (ties == found.own.count) return {keys.low, ALL_IDS, sum};
  const int last = find_in_order(
      row, [&](int, float z) -> uint64_t { return rank_key(z) == keys.low; }, [&](uint64_t) { return ties - 1; });
  return {keys.low, last + 1, sum};
}
