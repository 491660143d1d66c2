// What the kernels of sampled_attention_pairs.cu share.
#pragma once

#include "addends.h"
#include "code_planes.h"
#include "tiled_attention.h"

namespace yoso {
namespace {

// The pairs whose codes are equal by some hash functions: each has so many times the weight.
struct CollidingPairs {
  // so that there is shared memory for them on every GPU, and that bfloat16 has all numbers of functions that agree
  static constexpr int kMostPlanes = 32, kMostHashes = 256;
  PairedCodes codes;
  // those of a launch, counted before, of kernels that take them: see CountProblem
  const uint8_t* counts = nullptr;

  CollidingPairs swapped() const { return {codes.swapped()}; }
  // A row that is no number is none either: it would spoil the sums of all others, not of those in its buckets alone,
  // as a value or a gradient that is none does.
  __device__ bool is_real(int64_t batch_head, int64_t row, float inverse_length) const {
    return codes.is_real(batch_head, row) && inverse_length >= 0;
  }

  // The planes of the block's rows and of its tiles of others, which lie in shared memory one after the other.
  template <class Place>
  int64_t shared_bytes() const {
    return codes.planes() * int64_t{Place::kRows + Place::kTiles * Place::kOthers} * sizeof(uint32_t);
  }
  template <class Place>
  __device__ __forceinline__ void copy_mine(const Block& block, uint32_t* shared) const {
    copy_planes<Place, Place::kRows>(codes.plane_of(codes.mine, block.batch_head, block.first), codes.mine, shared);
  }
  // Of a tile that begins there in the first plane of a head.
  template <class Place>
  __device__ __forceinline__ void copy_others(const uint32_t* from, uint32_t* shared, int tile) const {
    copy_planes<Place, Place::kOthers>(from, codes.others, other_planes<Place>(shared, tile));
  }

  // How many hash functions agree, of pairs of the warp's 16 or 32 rows and the others of a tile.
  template <class Place, int n>
  __device__ __forceinline__ void count(const uint32_t* shared, int tile, float (&counts)[n][4]) const {
    constexpr int kParts = Place::kParts, kColumns = n / kParts;
    static_assert(kColumns * 8 == Place::kOthers && kColumns % 4 == 0, "planes are by 32 others");
    // see PlaneOrder::kLanes
    const int first = threadIdx.x / kWarp * Place::kWarpRows;
    const uint32_t* my_plane = shared + first / 32 * 32 + warp_lane() / 4 * 4 + first % 32 / 8;
    const uint32_t* other_plane = other_planes<Place>(shared, tile) + warp_lane() % 4 * 8;
    const auto compare_plane = [&](bool is_first, uint32_t(&differ)[n][4]) {
      uint32_t mine[kParts * 2], others[kColumns / 4][2][4];
      if constexpr (kParts == 1)
        memcpy(mine, __builtin_assume_aligned(my_plane, 8), sizeof(mine));
      else
        load(my_plane, mine);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) load(other_plane + i / 2 * 32 + i % 2 * 4, others[i / 2][i % 2]);
#pragma unroll
      for (int i = 0; i < n * 4; ++i) {
        const int column = i / 4 % kColumns;
        const uint32_t bits = mine[i / 4 / kColumns * 2 + i % 4 / 2] ^ others[column / 4][i % 2][column % 4];
        differ[i / 4][i % 4] = is_first ? bits : differ[i / 4][i % 4] | bits;
      }
      my_plane += Place::kRows;
      other_plane += Place::kOthers;
    };
    // the bits of 2^23, a float from which on numbers are one apart: a conversion takes four times as long as a sum
    constexpr int kWhole = 0x4b000000;
    int equal[n][4];
    codes.count_equal(kWhole, compare_plane, equal);
#pragma unroll
    for (int i = 0; i < n * 4; ++i) counts[i / 4][i % 4] = __int_as_float(equal[i / 4][i % 4]) - 0x1p23f;
  }

 private:
  template <class Place, class Word>
  __device__ __forceinline__ Word* other_planes(Word* shared, int tile) const {
    return shared + codes.planes() * (Place::kRows + tile * Place::kOthers);
  }
  template <class Place, int count>
  __device__ __forceinline__ void copy_planes(const uint32_t* from, const CodeSide& side, uint32_t* to) const {
    constexpr int kPieces = count / 4;
    const int32_t length = plane_length(side.length);
    // a single time, mostly, and registers are short
#pragma unroll 1
    for (int i = threadIdx.x; i < codes.planes() * kPieces; i += Place::kBlockThreads)
      copy_ahead<16>(to + i * 4, from + int64_t{i / kPieces} * length + i % kPieces * 4, false);
  }
};

// What a launch stores for the queries: a list by each of `lists` blocks of every head, from these on.
struct QueryAddends {
  BFloat16* data;
  int32_t first_head, first_list, lists;
};

}  // namespace
}  // namespace yoso
