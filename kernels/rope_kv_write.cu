// rope_kv_write.cu: norm and rotate the heads of q and k, write this step's keys and values into the paged cache.
//   q             T[num_tokens, num_heads, head_dim], in place, tokens q_stride elements apart
//   k, v          T[num_tokens, num_kv_heads, head_dim], only read: what comes of k is in the cache alone. Values in
//                 the cache are finite: of one that is not, the key becomes NaN, and so does all that sees the token,
//                 but nothing else does, though attention may multiply values that are not seen by a weight of 0
//   pool          T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], by block_stride and layer_offset
//   positions     int32[num_tokens]
//   slot_mapping  int32[num_tokens], -1 = padding, or stored already: q is rotated, the cache is left alone
//   cos_sin       float32[max_positions, rotary_dim], cosines then sines; rotary_dim is even, at most head_dim
//   q_norm,
//   k_norm        T[head_dim], RMS norm of each head before the rotation, times (weight_offset + it); or null
//   -D            ELEMENT, THREADS (a multiple of 32), LANES (a power of two up to 32, at least head_dim / PAIR)
// LANES lanes share a head of a token, of q or of both k and v, and each has two 16-byte units of it. A pair is two
// numbers rotary_dim / 2 apart (neighbours if interleaved); a lane's units lie just so far apart that it has both. Only
// where rotary_dim is no multiple of two units (20 of 80 dimensions) pairs lie in two lanes, which exchange them
// through shared memory. num_norms is how many of q_norm and k_norm are given. The last sum in `bytes` is how many
// warps have some of a token, for each of them reads its cosines and sines.
//
// kernel rope_kv_write
//   grid       ceil_div(num_tokens * (num_heads + num_kv_heads) * LANES, THREADS), block THREADS
//   bytes      num_tokens * (2 * num_heads + 4 * num_kv_heads) * ceil_div(head_dim * sizeof_T, 64) * 64
//              + ceil_div(num_tokens * (num_heads + num_kv_heads) * LANES, 32) * 64
//              + (rotary_dim * (4 if interleaved else 16 // sizeof_T) + num_norms * head_dim * sizeof_T // 2)
//                * sum(((t + 1) * (num_heads + num_kv_heads) - 1) * LANES // 32
//                      - t * (num_heads + num_kv_heads) * LANES // 32 + 1 for t in range(num_tokens))
//   unique     num_tokens * ((2 * num_heads + 4 * num_kv_heads) * head_dim * sizeof_T + rotary_dim * 4 + 8)
//              + num_norms * head_dim * sizeof_T
//   flops      num_tokens * (num_heads + num_kv_heads) * (3 * rotary_dim + 2 * num_norms * head_dim)
//   registers  56
//   shared     0 if rotary_dim * sizeof_T % 32 == 0 else THREADS // LANES * head_dim * 4
#include "gpu.cuh"

#if !defined(ELEMENT) || !defined(THREADS) || !defined(LANES)
#error "rope_kv_write.cu needs -D ELEMENT, THREADS and LANES"
#endif

constexpr int UNIT = PER_16_BYTES<T>;  // elements
constexpr int PAIR = 2 * UNIT;         // elements of a lane

using Part = float[2][UNIT];           // what a lane has of its head: two units

// 2, 4 or 8 floats, aligned to 8 bytes or to 16.
template <int N>
DEVICE void load_floats(float (&f)[N], const float* from) {
  if constexpr (N == 2) {
    const float2 v = __ldg(reinterpret_cast<const float2*>(from));
    f[0] = v.x;
    f[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 v = load16(from + i);
      f[i] = __uint_as_float(v.x);
      f[i + 1] = __uint_as_float(v.y);
      f[i + 2] = __uint_as_float(v.z);
      f[i + 3] = __uint_as_float(v.w);
    }
  }
}

DEVICE void rotate(float& a, float& b, float cos, float sin) {
  const float x = a * cos - b * sin;
  b = b * cos + a * sin;
  a = x;
}

// Rotate pairs that lie within the lane's two units: across them, or neighbours if interleaved.
DEVICE void rotate_own(Part& x, const int (&unit)[2], const float* cos, int rotary_dim, bool interleaved) {
  const float* const sin = cos + rotary_dim / 2;
  if (interleaved) {
#pragma unroll
    for (int u = 0; u < 2; u++) {
      const int pair = unit[u] * UNIT / 2;
      if (2 * pair >= rotary_dim) continue;
      float c[UNIT / 2], s[UNIT / 2];
      load_floats(c, cos + pair);
      load_floats(s, sin + pair);
#pragma unroll
      for (int i = 0; i < UNIT / 2; i++) rotate(x[u][2 * i], x[u][2 * i + 1], c[i], s[i]);
    }
  } else if (unit[0] * PAIR < rotary_dim) {
    float c[UNIT], s[UNIT];
    load_floats(c, cos + unit[0] * UNIT);
    load_floats(s, sin + unit[0] * UNIT);
#pragma unroll
    for (int i = 0; i < UNIT; i++) rotate(x[0][i], x[1][i], c[i], s[i]);
  }
}

// Rotate pairs that may lie in different lanes. `all` float[head_dim] is the head's place in shared memory, num_lanes
// how many lanes have part of it. Every lane of a warp must come; rotary_dim 0 = nothing to rotate.
DEVICE void rotate_exchanged(Part& x, const int (&unit)[2], float* all, const float* cos, int rotary_dim, int num_lanes,
                             bool interleaved) {
  const int half = rotary_dim / 2;
  if (rotary_dim > 0) {
#pragma unroll
    for (int i = 0; i < PAIR; i++) all[unit[i / UNIT] * UNIT + i % UNIT] = x[i / UNIT][i % UNIT];
  }
  __syncwarp();
#pragma unroll 1
  for (int pair = threadIdx.x % LANES; pair < half; pair += num_lanes) {
    float* const a = all + (interleaved ? 2 * pair : pair);
    rotate(*a, a[interleaved ? 1 : half], cos[pair], cos[half + pair]);
  }
  __syncwarp();
  if (rotary_dim > 0) {
#pragma unroll
    for (int i = 0; i < PAIR; i++) x[i / UNIT][i % UNIT] = all[unit[i / UNIT] * UNIT + i % UNIT];
  }
}

// RMS norm of the head that LANES lanes share; weight null = no norm, but every lane of a warp must come.
DEVICE void norm_head(Part& x, const int (&unit)[2], const T* weight, int head_dim, float eps, float weight_offset) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIR; i++) sum += x[i / UNIT][i % UNIT] * x[i / UNIT][i % UNIT];
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  if (weight == nullptr) return;
  const float scale = rsqrtf(__fdividef(sum, head_dim) + eps);
#pragma unroll
  for (int u = 0; u < 2; u++) {
    float w[UNIT];
    unpack16<T>(w, load16(weight + unit[u] * UNIT));
#pragma unroll
    for (int i = 0; i < UNIT; i++) x[u][i] = x[u][i] * scale * (weight_offset + w[i]);
  }
}

// Where the cache keeps a head of K in a slot.
DEVICE T* in_cache(T* pool, int slot, int head, int head_dim, int block_size, int64_t block_stride) {
  const int row = head * block_size + slot % block_size;
  return pool + slot / block_size * block_stride + static_cast<int64_t>(row) * head_dim;
}

// The word of infinities: these bits are all set in infinities and NaN alone.
DEVICE constexpr uint32_t infinities(float) { return 0x7f800000u; }
DEVICE constexpr uint32_t infinities(bf16) { return 0x7f807f80u; }
DEVICE constexpr uint32_t infinities(f16) { return 0x7c007c00u; }

// Whether all elements of a word are finite: one more in the last place of an exponent does not reach the sign.
DEVICE bool is_finite(uint32_t word) {
  constexpr uint32_t EXPONENTS = infinities(T{}), LAST = EXPONENTS & ~(EXPONENTS << 1);
  return ((word & EXPONENTS) + LAST & EXPONENTS << 1 & ~EXPONENTS) == 0;
}

// Copy the lane's units of a value, a unit that is not finite as zeros. Returns whether both are.
DEVICE bool copy_finite(T* to, const T* from, const int (&unit)[2]) {
  bool all = true;
#pragma unroll
  for (int u = 0; u < 2; u++) {
    uint4 words = load16(from + unit[u] * UNIT);
    const bool own = is_finite(words.x) && is_finite(words.y) && is_finite(words.z) && is_finite(words.w);
    if (!own) words = make_uint4(0, 0, 0, 0);
    if (to != nullptr) store16(to + unit[u] * UNIT, words);
    all &= own;
  }
  return all;
}

// Whether something is true for one of the LANES lanes that share a head.
DEVICE bool any_of_head(bool own) {
  const uint32_t lanes = __ballot_sync(ALL_LANES, own);
  return lanes << (WARP - LANES - threadIdx.x % WARP / LANES * LANES) >> (WARP - LANES) != 0;
}

KERNEL(THREADS)
rope_kv_write(T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ pool,
              const int* __restrict__ positions, const int* __restrict__ slot_mapping,
              const float4* __restrict__ cos_sin, const T* __restrict__ q_norm, const T* __restrict__ k_norm,
              int num_tokens, int num_heads, int num_kv_heads, int head_dim, int rotary_dim, int block_size,
              int interleaved, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t block_stride,
              int64_t layer_offset, float eps, float weight_offset) {
  DYNAMIC_SHARED(exchanged);
  const int num_rows = num_heads + num_kv_heads;  // of a token: the heads of q, then those of k and v
  const int index = (blockIdx.x * THREADS + threadIdx.x) / LANES, token = index / num_rows, head = index % num_rows;
  const int kv_head = head - num_heads;
  const bool is_q = kv_head < 0;
  const int lane = threadIdx.x % LANES, num_lanes = head_dim / PAIR;
  const bool is_here = token < num_tokens && lane < num_lanes;

  // Lanes below `span` have the halves of pairs, those from it on what lies behind rotary_dim.
  const bool is_paired = rotary_dim % PAIR == 0;  // no pair lies in different lanes
  const int span = is_paired && !interleaved ? rotary_dim / PAIR : num_lanes;
  const int first = lane < span ? lane : lane + span;
  const int unit[2] = {first, first + (lane < span ? span : num_lanes - span)};

  Part x = {};
  T* to = nullptr;
  const float* cos = reinterpret_cast<const float*>(cos_sin);
  bool finite = true;
  if (is_here) {
    T* const own = q + token * q_stride + head * head_dim;
    const T* const from = k + token * k_stride + kv_head * head_dim;
#pragma unroll
    for (int u = 0; u < 2; u++) unpack16<T>(x[u], is_q ? read16(own + unit[u] * UNIT) : load16(from + unit[u] * UNIT));
    cos += static_cast<int64_t>(positions[token]) * rotary_dim;
    if (is_q) {
      to = own;
    } else {
      const int slot = slot_mapping[token], values = num_kv_heads * block_size * head_dim;  // behind the keys
      if (slot >= 0) to = in_cache(pool + layer_offset, slot, kv_head, head_dim, block_size, block_stride);
      finite = copy_finite(to == nullptr ? to : to + values, v + token * v_stride + kv_head * head_dim, unit);
    }
  }
  if (any_of_head(!finite)) {
#pragma unroll
    for (int i = 0; i < PAIR; i++) x[i / UNIT][i % UNIT] = __int_as_float(0x7fffffff);  // NaN, and so whatever is done
  }
  if (q_norm != nullptr || k_norm != nullptr) {
    norm_head(x, unit, !is_here ? nullptr : is_q ? q_norm : k_norm, head_dim, eps, weight_offset);
  }
  if (is_paired) {
    if (is_here) rotate_own(x, unit, cos, rotary_dim, interleaved);
  } else {
    float* const all = reinterpret_cast<float*>(exchanged) + threadIdx.x / LANES * head_dim;
    rotate_exchanged(x, unit, all, cos, is_here ? rotary_dim : 0, num_lanes, interleaved);
  }
  if (to == nullptr) return;
#pragma unroll
  for (int u = 0; u < 2; u++) store16(to + unit[u] * UNIT, pack16<T>(x[u]));
}
