// Matrix products on tensor cores, where tests spend much of their time: compiled for speed, as the kernels are not.
#pragma once

#include <cstdint>

#include "threads.h"

namespace emulator {

// The sums of columns, as GPUs are known to add: numbers are cut to multiples of one that is below the last bit of the
// largest, and the sum to a float32. For a width of 4 or 8.
template <unsigned width>
void sum_on_tensor_cores(const float (&numbers)[17][width], float* sums);

// d = a b, or d += a b, by the threads of a warpgroup: a is 64 x 16, b has as many columns as the product. d[4 j + r] of
// warp w is element (16 w + lane / 4 + 8 (r / 2), 8 j + 2 (lane % 4) + r % 2); a's registers, if it lies in them, are
// those of mma.m16n8k16 for rows 16 w..16 w + 15.
void multiply_in_warpgroup(const Product& product, const uint32_t* a, float* d, int operation);
// What wgmma.fence, commit_group and wait_group do, the last for all groups but the newest.
void fence_products();
void commit_products();
void finish_products(unsigned newest);

}  // namespace emulator
