// What the kernels share that add buckets to the sums of sampled attention's backward.
#pragma once

#include "device.h"

namespace yoso {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
// rows of a bucket that are multiplied at a time
constexpr int kPicked = 16;

// The queries with the output's gradient, or the keys with the values, of the heads of a launch.
template <class In>
struct Side {
  Rows<const In> rows, others;
  // from one row to the next
  uint32_t row_bytes, other_bytes;
  // [heads, count], and [heads, count, D] that become the gradient of the rows at length one
  Accumulator<In>*inverse_length, *sums;
  // [heads, m, count] and [heads, m, table_size + 1], see SortedCodes
  const int32_t *order, *starts;
  int32_t count;
  // whether pieces of kLaneColumns of rows and others can be read at once
  bool aligned;
};

// The heads from `first` on, of the B * H.
struct Sizes {
  int32_t first, heads, H, num_hash, D, Dv;
  // blocks that a head has in a launch, and codes that a block has
  int32_t table_size, head_blocks, block_codes;
};

// A side of one head and one hash function.
template <class In>
struct HeadSide {
  using T = Accumulator<In>;
  const In *rows, *others;
  const T* inverse_length;
  T* sums;
  const int32_t *order, *starts;
  uint32_t row_bytes, other_bytes, sum_bytes;
  bool aligned;

  __device__ HeadSide(const Side<In>& side, const Sizes& sizes, int32_t head, int32_t hash) {
    const int32_t batch = (sizes.first + head) / sizes.H, head_of_batch = (sizes.first + head) % sizes.H;
    const int64_t list = int64_t{head} * sizes.num_hash + hash, first_row = int64_t{head} * side.count;
    rows = side.rows.at(batch, head_of_batch, 0);
    others = side.others.at(batch, head_of_batch, 0);
    inverse_length = side.inverse_length + first_row;
    sums = side.sums + first_row * sizes.D;
    order = side.order + list * side.count;
    starts = side.starts + list * (sizes.table_size + 1);
    row_bytes = side.row_bytes;
    other_bytes = side.other_bytes;
    sum_bytes = sizes.D * sizeof(T);
    aligned = side.aligned;
  }
};

// The part of a bucket that is one side's: its rows are order[first] .. order[first + count - 1].
struct Span {
  int32_t first, count;
};

template <class In>
__device__ Span span_of(const HeadSide<In>& side, int32_t code) {
  const int32_t first = __ldg(side.starts + code);
  return {first, __ldg(side.starts + code + 1) - first};
}

// A number that the compiler knows nothing about: it would compute what depends on the number early, and run out of
// registers.
__device__ __forceinline__ uint32_t unknown(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// The thread's lane, on which the addresses of all kinds of buckets depend.
__device__ __forceinline__ uint32_t lane_in_bucket() { return unknown(threadIdx.x % kWarp); }

// Up to 16 rows of a bucket's one side in lanes 0..15, and of the other in lanes 16..31. Past the last there is the
// last again, at inverse length zero: it has an address, if nothing to add.
template <class T>
struct PickedRows {
  int32_t row;
  T inverse_length;

  template <class In>
  __device__ __forceinline__ PickedRows(uint32_t lane, const HeadSide<In>& side, Span span,
                                        const HeadSide<In>& other_side, Span other_span) {
    const HeadSide<In>& mine = lane < kPicked ? side : other_side;
    const Span rows = lane < kPicked ? span : other_span;
    const int place = lane % kPicked;
    row = __ldg(mine.order + rows.first + min(place, rows.count - 1));
    inverse_length = place < rows.count ? __ldg(mine.inverse_length + row) : 0;
  }

  __device__ __forceinline__ int32_t at(int lane) const { return __shfl_sync(kAllLanes, row, lane); }
};

// Calls, for the buckets that a block has of a hash function and in which both sides have rows: of up to kPicked rows a
// side, small(query_span, key_span) by one warp; of more, where is_crowded(query_span, key_span) is false, tile(side,
// target_span, source_span) by one warp for every kPicked rows of either side; else crowded(side, target_span,
// source_span) by the block, for each side.
template <class In, class IsCrowded, class Small, class OfTile, class Crowded>
__device__ __forceinline__ void for_buckets(const HeadSide<In>* sides, const Sizes& sizes, const IsCrowded& is_crowded,
                                            const Small& small, const OfTile& tile, const Crowded& crowded) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int32_t begin = static_cast<int32_t>(blockIdx.x % sizes.head_blocks) * sizes.block_codes;
  const int32_t end = min(begin + sizes.block_codes, sizes.table_size);
  // the warp whose turn it is
  int turn = 0;
  for (int32_t first = begin; first < end; first += kWarp) {
    Span query_span = {0, 0}, key_span = {0, 0};
    if (first + lane < end) {
      query_span = span_of(sides[0], first + lane);
      key_span = span_of(sides[1], first + lane);
    }
    const int largest = query_span.count == 0 || key_span.count == 0 ? 0 : max(query_span.count, key_span.count);
    const bool is_small = largest <= kPicked, has_crowd = !is_small && is_crowded(query_span, key_span);
    const auto from_lane = [](const Span& span, int source) {
      return Span{__shfl_sync(kAllLanes, span.first, source), __shfl_sync(kAllLanes, span.count, source)};
    };
    const auto from_either = [](bool first, const Span& a, const Span& b) {
      return Span{first ? a.first : b.first, first ? a.count : b.count};
    };
    const uint32_t smalls = __ballot_sync(kAllLanes, largest > 0 && is_small);
    const int before = __popc(smalls & ~(kAllLanes << lane));
    const bool is_mine = (smalls >> lane & 1) != 0 && (turn + before) % kWarps == warp;
    for (uint32_t left = __ballot_sync(kAllLanes, is_mine); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      small(from_lane(query_span, source), from_lane(key_span, source));
    }
    turn = (turn + __popc(smalls)) % kWarps;
    for (uint32_t left = __ballot_sync(kAllLanes, !is_small && !has_crowd); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const Span q = from_lane(query_span, source), k = from_lane(key_span, source);
      const int query_tiles = (q.count + kPicked - 1) / kPicked,
                tiles = query_tiles + (k.count + kPicked - 1) / kPicked;
      for (int i = (warp - turn + kWarps) % kWarps; i < tiles; i += kWarps) {
        const bool is_query = i < query_tiles;
        const int skipped = (is_query ? i : i - query_tiles) * kPicked;
        const Span targets = from_either(is_query, q, k);
        tile(!is_query, Span{targets.first + skipped, targets.count - skipped}, from_either(is_query, k, q));
      }
      turn = (turn + tiles) % kWarps;
    }
    for (uint32_t left = __ballot_sync(kAllLanes, has_crowd); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const Span q = from_lane(query_span, source), k = from_lane(key_span, source);
#pragma unroll 1
      for (int side = 0; side < 2; ++side) crowded(side, from_either(side == 0, q, k), from_either(side == 0, k, q));
      // the memory is the warps' again
      __syncthreads();
    }
  }
}

}  // namespace
}  // namespace yoso
