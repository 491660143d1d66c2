// What rows get from parts of a sum, such as the buckets of one hash function, as it is kept until that of all is added
// up, list after list: so blocks need no order, and the sums' order is fixed.
#pragma once

#include "mma.h"
#include "rows.h"

namespace yoso {
namespace {

// Float16 has too few exponents.
template <class In>
using Addend = std::conditional_t<std::is_same_v<In, BFloat16>, BFloat16, Accumulator<In>>;
// Those of 16 bits lie as tensor cores leave them. Of 32 columns, four lanes have 8, not neighbours: lane t has columns
// 2t and 2t + 1 of every 8.
constexpr int kLaneGroup = 4, kGroupColumns = kLaneGroup * kLaneColumns;
template <class In>
__host__ __device__ constexpr int32_t addend_columns(int32_t columns) {
  return sizeof(Addend<In>) == 2 ? (columns + kGroupColumns - 1) / kGroupColumns * kGroupColumns : columns;
}

// 16 of the rows that addends are of, a lane's being g and g + 8.
template <class In>
struct AddendRows {
  Addend<In>* addend[2];
  float inverse_length[2];
  bool exists[2];

  // Stores the columns of sums, of which a lane has 2t and 2t + 1 of every 8. pair(half, piece) gives what the row
  // itself has there. All lanes do this.
  template <int pairs, class Pair>
  __device__ __forceinline__ void store(uint32_t lane, float (&sums)[pairs][2][4], int columns,
                                        const Pair& pair) const {
    const uint32_t t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto sum = [&](int piece) { return &sums[piece / 2][piece % 2][2 * half]; };
      if constexpr (sizeof(Addend<In>) == 2) {
        // without what the normalisation's gradient takes away, which may be most of it, and be rounded like the rest
        uint32_t own[2 * pairs];
        float parallel = 0;
#pragma unroll
        for (int piece = 0; piece < 2 * pairs; ++piece) {
          own[piece] = pair(half, piece);
          const float2 x = unpack<In>(own[piece]);
          parallel += sum(piece)[0] * x.x + sum(piece)[1] * x.y;
        }
        parallel += __shfl_xor_sync(kAllLanes, parallel, 1);
        parallel += __shfl_xor_sync(kAllLanes, parallel, 2);
        // one after the other: the square of one may leave the range of float32
        parallel = parallel * inverse_length[half] * inverse_length[half];
#pragma unroll
        for (int first = 0; first < 2 * pairs; first += 4) {
          uint32_t numbers[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 x = unpack<In>(own[first + i]);
            numbers[i] = pack<In>(sum(first + i)[0] - parallel * x.x, sum(first + i)[1] - parallel * x.y);
          }
          // nobody reads them soon: what the cache has of rows is to stay there
          if (exists[half] && 8 * first < columns)
            __stcs(reinterpret_cast<uint4*>(addend[half] + 8 * first + 8 * t),
                   make_uint4(numbers[0], numbers[1], numbers[2], numbers[3]));
        }
      } else {
#pragma unroll
        for (int piece = 0; piece < 2 * pairs; ++piece)
          if (exists[half] && 8 * piece < columns)
            *reinterpret_cast<float2*>(addend[half] + 8 * piece + 2 * t) = make_float2(sum(piece)[0], sum(piece)[1]);
      }
    }
  }
};

// Takes columns from the places of 16-bit addends to their own: of four lanes, lane t gets the t-th pair of each.
__device__ __forceinline__ void order_columns(float (&columns)[kLaneColumns]) {
#pragma unroll
  for (int bit = 1; bit < kLaneGroup; bit *= 2)
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if ((i / 2 & bit) != 0) continue;
      float &low = columns[i], &high = columns[i + 2 * bit];
      const bool is_high = (threadIdx.x & bit) != 0;
      const float other = __shfl_xor_sync(kAllLanes, is_high ? low : high, bit);
      (is_high ? low : high) = other;
    }
}

// Some lists of the addends of some heads' rows.
template <class In>
struct AddendLists {
  // of all heads
  Rows<const In> rows;
  // [heads of the lists, count], of the rows
  const Accumulator<In>* inverse_length;
  // [heads of the lists, count, columns]: of the lists before, then with these
  Accumulator<In>* sums;
  // [heads of the lists, lists, count, addend_columns(columns)]
  const Addend<In>* addends;
  // H, and the first of all B * H
  int32_t heads, first_head;
  int32_t lists, count, columns;
  bool are_first, are_last;
};

// Adds up lists in their order; after the last, takes the sums, times scale, through the normalisation of the rows.
// With fewer registers than three blocks leave it, it would spill some.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads, 3)
    add_up_kernel(AddendLists<In> lists, Accumulator<In> scale, int lane_bits, Rows<In> out) {
  using T = Accumulator<In>;
  const RowPlace place(lists.count, lane_bits, 1);
  const bool exists = place.row < lists.count;
  const int32_t row = exists ? place.row : 0, batch_head = lists.first_head + place.head;
  const int32_t batch = batch_head / lists.heads, head = batch_head % lists.heads;
  const int64_t first_row = int64_t{place.head} * lists.count;
  const int32_t stored_columns = addend_columns<In>(lists.columns);
  const In* x = lists.rows.at(batch, head, row);
  const Addend<In>* addends = lists.addends + (first_row * lists.lists + row) * stored_columns;
  T* sums = lists.sums + (first_row + row) * lists.columns;
  const T inverse = lists.inverse_length[first_row + row];
  In part[kLaneColumns];
  T sum[kLaneColumns], product = 0;
  // lanes past the last column stay: those of a warp order theirs together
  for (int32_t slice = 0; slice < stored_columns; slice += kLaneColumns << lane_bits) {
    const int32_t first = slice + place.column;
    const int columns = columns_of_lane(lists.columns, first), stored = columns_of_lane(stored_columns, first);
    memset(sum, 0, sizeof(sum));
    const Addend<In>* from = addends + first;
#pragma unroll 4
    for (int32_t list = 0; list < lists.lists; ++list, from += int64_t{lists.count} * stored_columns) {
      Addend<In> addend[kLaneColumns];
      T wide[kLaneColumns];
      load_columns<aligned>(from, stored, addend);
      widen(addend, wide);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sum[c] += wide[c];
    }
    if constexpr (sizeof(Addend<In>) == 2) order_columns(sum);
    if (exists && !lists.are_first) {
      T before[kLaneColumns];
      load_columns<aligned>(sums + first, columns, before);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sum[c] += before[c];
    }
    if (exists) store_columns<aligned>(sum, columns, sums + first);
    load_columns<aligned>(x + first, columns, part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) product += sum[c] * (static_cast<T>(part[c]) * inverse);
  }
  if (!lists.are_last) return;
  product = sum_of_lanes(product, lane_bits);
  if (!exists) return;
  In* to = out.at(batch, head, row);
  for (int32_t first = place.column; first < lists.columns; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(lists.columns, first);
    load_columns<aligned>(x + first, columns, part);
    load_columns<aligned>(sums + first, columns, sum);
    // a row that is zero, or no numbers, as one in no bucket may be, gets no gradient
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const T unit = static_cast<T>(part[c]) * inverse;
      part[c] = static_cast<In>(inverse > 0 ? (sum[c] - product * unit) * scale * inverse : 0);
    }
    store_columns<aligned>(part, columns, to + first);
  }
}

// The same, of so many heads; the gradient of their rows goes to out.
template <class In>
void add_up(const Device& device, const AddendLists<In>& lists, int64_t heads, Accumulator<In> scale,
            const Tensor& out) {
  const Rows<In> to = mutable_rows_of<In>(out);
  const int lane_bits = lane_bits_for(addend_columns<In>(lists.columns));
  const bool whole = aligned(lists.rows, lists.columns) && aligned(to, lists.columns);
  launch(device, whole ? add_up_kernel<In, true> : add_up_kernel<In, false>,
         heads * blocks_of_head(lists.count, lane_bits), kRowThreads, 0, lists, scale, lane_bits, to);
}

// How many lists there is memory for, of so many rows and columns: so many times what the cache is to keep, which on an
// H200 is 1 GiB. But a few, as sums are read and written again for the next. A list may take so many other bytes for a
// row.
template <class In>
int64_t lists_at_once(const Device& device, int64_t rows, int64_t columns, int64_t other_bytes = 0) {
  constexpr int64_t kCaches = 32, kFewest = 4;
  const int64_t bytes = rows * (addend_columns<In>(columns) * static_cast<int64_t>(sizeof(Addend<In>)) + other_bytes);
  return std::max(kCaches * device.cached_bytes() / std::max<int64_t>(bytes, 1), kFewest);
}

// The most of `count` that are had at a time if that is up to `most`, or one, and much the same each time.
inline int64_t even_share(int64_t count, int64_t most) {
  return divide_up(count, divide_up(count, std::clamp<int64_t>(most, 1, count)));
}

}  // namespace
}  // namespace yoso
