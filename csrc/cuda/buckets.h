// What the kernels share that find what a bucket adds to the sums of sampled attention's backward.
#pragma once

#include "addends.h"

namespace yoso {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
// rows of a bucket that are multiplied at a time
constexpr int kPicked = 16;

// The queries with the output's gradient, or the keys with the values, of the heads whose codes are sorted.
template <class In>
struct Side {
  // of all heads
  Rows<const In> rows, others;
  // from one row to the next
  uint32_t row_bytes, other_bytes;
  // [heads sorted, count]
  Accumulator<In>* inverse_length;
  // [heads of a launch, hashes, count, addend_columns(D)]
  Addend<In>* addends;
  // [heads sorted, m, count] and [heads sorted, m, table_size + 1], see SortedCodes
  const int32_t *order, *starts;
  int32_t count;
  // whether pieces of kLaneColumns of rows and others can be read at once
  bool aligned;
};

// What a launch has: heads from the first-th on of those that are sorted, which begin at first_sorted of the B * H, and
// `hashes` hash functions of each, from first_hash on. A block takes an item at a time, item_codes codes of one of
// them.
struct Sizes {
  int32_t first_sorted, first, H, first_hash, num_hash, hashes, D, Dv, table_size, item_codes;

  // of a hash function of a head
  __host__ __device__ int32_t items() const { return (table_size + item_codes - 1) / item_codes; }
};

// The part of a bucket that is one side's: its rows are order[first] .. order[first + count - 1].
struct Span {
  int32_t first, count;
};

// A side of one hash function of one head, the i-th of all that a launch has.
template <class In>
struct HeadSide {
  const In *rows, *others;
  const Accumulator<In>* inverse_length;
  Addend<In>* addends;
  const int32_t *order, *starts;
  int32_t count;
  uint32_t row_bytes, other_bytes, addend_bytes;
  bool aligned;

  __device__ HeadSide(const Side<In>& side, const Sizes& sizes, int32_t i) {
    const int32_t head = sizes.first + i / sizes.hashes, hash = sizes.first_hash + i % sizes.hashes;
    const int32_t batch = (sizes.first_sorted + head) / sizes.H, head_of_batch = (sizes.first_sorted + head) % sizes.H;
    const int64_t list = int64_t{head} * sizes.num_hash + hash;
    rows = side.rows.at(batch, head_of_batch, 0);
    others = side.others.at(batch, head_of_batch, 0);
    inverse_length = side.inverse_length + int64_t{head} * side.count;
    addends = side.addends + int64_t{i} * side.count * addend_columns<In>(sizes.D);
    order = side.order + list * side.count;
    starts = side.starts + list * (sizes.table_size + 1);
    count = side.count;
    row_bytes = side.row_bytes;
    other_bytes = side.other_bytes;
    addend_bytes = addend_columns<In>(sizes.D) * sizeof(Addend<In>);
    aligned = side.aligned;
  }

  // Of the rows in no bucket, one of so many parts.
  __device__ Span in_none(const Sizes& sizes, int32_t part, int32_t parts) const {
    const int32_t first = __ldg(starts + sizes.table_size);
    const auto begin = [&](int32_t i) { return static_cast<int32_t>(int64_t{count - first} * i / parts); };
    return {first + begin(part), begin(part + 1) - begin(part)};
  }

  // Clears the addends of a span's rows. So many warps do this, of which the thread's is one.
  __device__ __forceinline__ void clear(const Span& span, int warp, int warps) const {
    const int lane = threadIdx.x % kWarp, columns = addend_bytes / sizeof(Addend<In>);
    for (int first = warp * kWarp; first < span.count; first += warps * kWarp) {
      const int32_t row = first + lane < span.count ? __ldg(order + span.first + first + lane) : 0;
      for (int r = 0; r < min(span.count - first, kWarp); ++r) {
        Addend<In>* to = row_at(addends, __shfl_sync(kAllLanes, row, r), addend_bytes);
        for (int c = lane; c < columns; c += kWarp) to[c] = 0;
      }
    }
  }
};

template <class In>
__device__ Span span_of(const HeadSide<In>& side, int32_t code) {
  const int32_t first = __ldg(side.starts + code);
  return {first, __ldg(side.starts + code + 1) - first};
}

// The thread's lane, on which the addresses of all kinds of buckets depend.
__device__ __forceinline__ uint32_t lane_in_bucket() { return unknown(threadIdx.x % kWarp); }

// codes of an item at most, but where a block has less memory for them
constexpr int kMostItemCodes = 128;

// Some codes of a hash function of a head.
template <class In, int most_codes = kMostItemCodes>
struct Item {
  HeadSide<In> sides[2];
  int32_t starts[2][most_codes + 1];
  int32_t num_codes;
  // its part of the rows that are in no bucket
  Span in_none[2];

  // A warp does this.
  __device__ __forceinline__ void begin(int32_t number, const Side<In>& query_side, const Side<In>& key_side,
                                        Sizes sizes) {
    // what depends on them alone is not to be kept in registers
    for (int32_t* size : {&sizes.H, &sizes.hashes, &sizes.D, &sizes.table_size, &sizes.item_codes})
      *size = unknown(*size);
    const int32_t lane = lane_in_bucket(), items = sizes.items(), part = number % items;
    const int32_t first_code = part * sizes.item_codes, codes = min(sizes.item_codes, sizes.table_size - first_code);
    if (lane == 0) num_codes = codes;
    if (lane < 2) {
      sides[lane] = HeadSide<In>(lane == 0 ? query_side : key_side, sizes, number / items);
      in_none[lane] = sides[lane].in_none(sizes, part, items);
    }
    __syncwarp();
    for (int code = lane; code <= codes; code += kWarp)
#pragma unroll
      for (int side = 0; side < 2; ++side) starts[side][code] = __ldg(sides[side].starts + first_code + code);
    __syncwarp();
  }

  // Clears what rows get that have none of the other side in their bucket, or are in no bucket. The block's warps do
  // this.
  __device__ __forceinline__ void clear_others(int warps) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (int side = 0; side < 2; ++side) sides[side].clear(in_none[side], warp, warps);
    for (int first = 0; first < num_codes; first += kWarp) {
      const int code = first + lane;
      int rows[2] = {0, 0};
      if (code < num_codes)
        for (int side = 0; side < 2; ++side) rows[side] = starts[side][code + 1] - starts[side][code];
      for (uint32_t left = __ballot_sync(kAllLanes, (rows[0] > 0) != (rows[1] > 0)); left != 0; left &= left - 1) {
        const int alone = first + __ffs(left) - 1, side = starts[0][alone] == starts[0][alone + 1];
        const int32_t* start = starts[side] + alone;
        sides[side].clear({start[0], start[1] - start[0]}, warp, warps);
      }
    }
  }
};

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
