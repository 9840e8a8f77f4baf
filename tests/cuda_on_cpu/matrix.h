// matrix.h: the matrix instructions, done for a whole warp at once.
#pragma once
#include "block.h"

namespace cuda_on_cpu {

// ldmatrix.m8n8.x4: lanes[i]->a is the address of a row, lanes[i]->matrix the lane's uint32_t[4].
void load_matrices(Thread* const* lanes, bool transposed);

// mma.m16n8k16: lanes[i]->a, b and matrix are the lane's uint32_t[4], uint32_t[2] and float[4].
void multiply(Thread* const* lanes, bool is_bf16);

}  // namespace cuda_on_cpu
