// Matrix products on tensor cores, where tests spend much of their time: compiled for speed, as the kernels are not.
#pragma once

#include <array>
#include <cstdint>

#include "threads.h"

namespace emulator {

enum class Format { f16, bf16 };

// c + a b, by the threads of a warp: 16 x 16 times 16 x 8. Element (i, k) of a is of lane 4 (i % 8) + k % 8 / 2, there
// number 2 (i / 8) + 4 (k / 8) + k % 2; (k, j) of b of lane 4 j + k % 8 / 2, number 2 (k / 8) + k % 2; (i, j) of c and
// of the result of lane 4 (i % 8) + j / 2, number 2 (i / 8) + j % 2. A register has two numbers of a or b, the first in
// its lower half.
std::array<float, 4> multiply_in_warp(Format format, const std::array<uint32_t, 4>& a,
                                      const std::array<uint32_t, 2>& b, const std::array<float, 4>& c,
                                      int operation);

// d = a b, or d += a b, by the threads of a warpgroup: a is 64 x 16, b has as many columns as the product. d[4 j + r]
// of warp w is element (16 w + lane / 4 + 8 (r / 2), 8 j + 2 (lane % 4) + r % 2); a's registers, if it lies in them,
// are those of mma.m16n8k16 for rows 16 w..16 w + 15.
void multiply_in_warpgroup(const Product& product, const uint32_t* a, float* d, int operation);
// What wgmma.commit_group and wait_group do, the latter for all groups but the newest.
void commit_products();
void finish_products(unsigned newest);

}  // namespace emulator
