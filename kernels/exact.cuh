// exact.cuh: arithmetic of sampling that GPU and CPU do alike to the last bit; exact.py is the same for the CPU, and
// says what each function is for. No multiplication is contracted with an addition here.
#pragma once
#include "gpu.cuh"

// A mass is in units of 2^-40 of the most likely token's; 2^22 of those add up to 2^62.
constexpr uint32_t KEY_OF_MINUS_INFINITY = 0x007fffffu, KEY_OF_INFINITY = 0xff800000u;
constexpr uint32_t BANNED = 0xffffffffu;              // the bits of a NaN that no arithmetic makes
constexpr float SMALLEST_EXPONENT = -28.0f;           // e^-28 is less than a unit of mass
constexpr float GREEDY_TEMPERATURE = 1e-5f;           // below it a row takes the most likely token
constexpr float LARGEST_TEMPERATURE = 8.5070592e37f;  // 2^126: its reciprocal is a normal number

DEVICE float inverse(float temperature) { return __fdiv_rn(1.0f, fminf(temperature, LARGEST_TEMPERATURE)); }

// fmaxf would do, but C and CUDA disagree on signalling NaN.
DEVICE float number(float z) { return z == z ? z : MINUS_INFINITY; }

// How the logits of a row become exponents.
struct Softmax {
  float z_max, scale;
};

// No less than SMALLEST_EXPONENT, which is also that of NaN.
DEVICE float exponent(float z, Softmax by) {
  const float x = __fmul_rn(__fsub_rn(z, by.z_max), by.scale);
  return x > SMALLEST_EXPONENT ? x : SMALLEST_EXPONENT;
}

// floor(e^x * 2^40) for x in [SMALLEST_EXPONENT, 0]
DEVICE uint64_t to_mass(float x) {
  const int n = static_cast<int>(__fsub_rn(__fmul_rn(x, 1.44269504f), 0.5f));
  const float k = static_cast<float>(n);
  const float r = __fadd_rn(__fsub_rn(x, __fmul_rn(k, 0.693359375f)), __fmul_rn(k, 2.12194440e-4f));
  const float coefficients[5] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                 5.0000001201e-1f};
  float p = 1.9875691500e-4f;
#pragma unroll
  for (int i = 0; i < 5; i++) p = __fadd_rn(__fmul_rn(p, r), coefficients[i]);
  p = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
  const uint32_t bits = __float_as_uint(__fmul_rn(p, __int_as_float((n + 127) << 23)));  // of e^x, in [2^-41, 1]
  const uint64_t significand = (bits & 0x007fffffu) | 0x00800000u;
  return (significand << 17) >> (127 - (bits >> 23));
}

DEVICE uint32_t rank_key(float z) {
  const uint32_t bits = __float_as_uint(z), magnitude = bits & 0x7fffffffu;
  uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
  key = magnitude == 0 ? 0x80000000u : key;
  return magnitude > 0x7f800000u ? KEY_OF_MINUS_INFINITY : key;
}

// The logit of a key: no NaN, and 0 for -0.
DEVICE float from_key(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

DEVICE uint64_t portion(uint64_t total, uint32_t word) {
  return (total >> 32) * word + ((total & 0xffffffffu) * word >> 32);
}

DEVICE uint64_t goal(uint64_t total, float fraction) {
  const uint64_t factor = static_cast<uint64_t>(fmaxf(ceilf(fraction * 4294967296.0f), 1.0f));
  return (total >> 32) * factor + ((total & 0xffffffffu) * factor + 0xffffffffu >> 32);
}

// The least mass that min_p leaves in.
DEVICE uint64_t least_mass(float min_p) {
  const uint64_t least = static_cast<uint64_t>(ceilf(min_p * 1099511627776.0f));
  return least > 0 ? least : 1;
}

DEVICE uint64_t log_of(uint64_t total) {
  constexpr uint64_t LN_2 = 186065279;  // in units of 2^-28
  const int power = 23 - __clzll(static_cast<int64_t>(total));
  uint64_t m = (total >> power) >> 9;  // [1, 2) in units of 2^-31
  uint64_t log2 = power;
#pragma unroll 1
  for (int i = 0; i < 32; i++) {  // squaring doubles the logarithm; its next bit is whether 2 is passed
    m = m * m >> 31;
    const uint64_t bit = m >> 32;
    log2 = log2 << 1 | bit;
    m >>= bit;
  }
  return log2 * LN_2 >> 28;
}
