// What the lanes of a warp do together, but for waiting (threads.h) and products (tensor_cores.h). The tests spend much
// of their time here: compiled for speed, as the kernels are not.
#pragma once

#include <array>
#include <cstdint>

#include "threads.h"

namespace emulator {

// operation is a number of its own in the kernel, that of the instruction that the lanes must meet at.

enum class Shuffle { up, down, bfly, idx };
struct Shuffled {
  uint32_t value;
  bool valid;
};
// clamp: the last lane of a segment, or the first for up, and in its second byte the lane's bits that are a segment's.
Shuffled shuffle(Shuffle kind, uint32_t x, uint32_t by, uint32_t clamp, uint32_t lanes, int operation);

uint32_t ballot(bool x, uint32_t lanes, int operation);

// Four matrices of 8 x 8: lane l shows row l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the next of row l / 4
// of each, or of its transpose.
std::array<uint32_t, 4> load_matrices(bool transposed, const uint16_t* row, int operation);

}  // namespace emulator
