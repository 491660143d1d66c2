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

}  // namespace
}  // namespace yoso
