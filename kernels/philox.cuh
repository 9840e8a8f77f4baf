// philox.cuh: Philox4x32-10, as philox.py has it for the CPU.
#pragma once
#include "gpu.cuh"

constexpr int ROUNDS = 10;

DEVICE uint4 philox(uint2 key, uint4 counter) {
  uint4 c = counter;
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    constexpr uint32_t A = 0xd2511f53u, B = 0xcd9e8d57u;
    c = make_uint4(__umulhi(B, c.z) ^ c.y ^ key.x, B * c.z, __umulhi(A, c.x) ^ c.w ^ key.y, A * c.x);
    key.x += 0x9e3779b9u;
    key.y += 0xbb67ae85u;
  }
  return c;
}

// The uniform word of one token of one sequence.
DEVICE uint32_t random_word(int seed_low, int seed_high, int output_position, int group_index) {
  return philox(make_uint2(seed_low, seed_high), make_uint4(output_position, group_index, 0, 0)).x;
}
