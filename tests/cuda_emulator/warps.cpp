#include "warps.h"

namespace emulator {
namespace {

// Shows x to the lanes of the mask, and returns f(what each lane shows).
template <class F>
auto exchange(uint32_t mask, int operation, uint64_t x, const F& f) {
  const bool all = (mask & existing_lanes()) == existing_lanes();
  uint64_t* const shown = warp().shown[all ? warp().exchanges % 2 : 2];
  shown[lane()] = x;
  wait_warp(mask, operation);
  const auto result = f(shown);
  if (!all) wait_warp(mask, operation);
  return result;
}

}  // namespace

Shuffled shuffle(Shuffle kind, uint32_t x, uint32_t by, uint32_t clamp, uint32_t lanes, int operation) {
  const uint32_t own = lane(), segment = clamp >> 8 & 31;
  const uint32_t first = own & segment, last = first | (clamp & 31 & ~segment);
  by &= 31;
  uint32_t from = kind == Shuffle::up     ? own - by
                  : kind == Shuffle::down ? own + by
                  : kind == Shuffle::bfly ? own ^ by
                                          : first | (by & ~segment);
  const bool valid = kind == Shuffle::up ? static_cast<int32_t>(from) >= static_cast<int32_t>(last) : from <= last;
  if (!valid) from = own;
  if ((lanes >> from & 1) == 0) fail("a shuffle from a lane that is not in the mask");
  const auto of_lane = [=](const uint64_t* shown) { return static_cast<uint32_t>(shown[from]); };
  return {exchange(lanes, operation, x, of_lane), valid};
}

uint32_t ballot(bool x, uint32_t lanes, int operation) {
  return exchange(lanes, operation, x, [=](const uint64_t* shown) {
    uint32_t result = 0;
    for (uint32_t lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1) result |= static_cast<uint32_t>(shown[lane]) << lane;
    return result;
  });
}

std::array<uint32_t, 4> load_matrices(bool transposed, const uint16_t* row, int operation) {
  return exchange(~0u, operation, reinterpret_cast<uint64_t>(row), [=](const uint64_t* shown) {
    const unsigned i = lane() / 4, j = lane() % 4 * 2;
    std::array<uint32_t, 4> result;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      const auto element = [&](unsigned row, unsigned column) {
        return uint32_t{reinterpret_cast<const uint16_t*>(shown[8 * matrix + row])[column]};
      };
      result[matrix] = transposed ? element(j, i) | element(j + 1, i) << 16 : element(i, j) | element(i, j + 1) << 16;
    }
    return result;
  });
}

}  // namespace emulator
