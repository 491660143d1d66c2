// Rows that neighbouring lanes share: which ones a thread has a part of, and reading and writing these.
#pragma once

#include <type_traits>

#include "device.h"

namespace yoso {

constexpr int kRowThreadBits = 8, kRowThreads = 1 << kRowThreadBits;
// of a row, columns that a lane has, and bytes that it reads at a time
constexpr int kLaneColumns = 8, kPieceBytes = 16;

// How many blocks have a slice of all rows of a head.
__host__ __device__ inline uint32_t blocks_of_head(uint32_t rows, int lane_bits) {
  return (rows + (kRowThreads >> lane_bits) - 1) >> (kRowThreadBits - lane_bits);
}

// The row that the thread's lanes have a slice of, among `rows` of each head: an entry of the tables, or a query.
struct RowPlace {
  // the lane's columns are from this one on
  int32_t head, row, column;
  // of the lanes
  int lane;

  __device__ __forceinline__ RowPlace(uint32_t rows, int lane_bits, uint32_t slices) {
    const uint32_t blocks = blocks_of_head(rows, lane_bits), slice = blockIdx.x / blocks;
    lane = threadIdx.x & ((1 << lane_bits) - 1);
    row = ((blockIdx.x - slice * blocks) << (kRowThreadBits - lane_bits)) + (threadIdx.x >> lane_bits);
    head = slices == 1 ? slice : slice / slices;
    column = (((slice - head * slices) << lane_bits) + lane) * kLaneColumns;
  }
};

// Loads `count` neighbours that are aligned to 16 bytes.
template <int count, class T>
__device__ __forceinline__ void load(const T* from, T (&to)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += kPieceBytes / sizeof(T)) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from + i);
    memcpy(to + i, &bits, sizeof(bits));
  }
}

template <int count, class T>
__device__ __forceinline__ void store(const T (&from)[count], T* to) {
#pragma unroll
  for (int i = 0; i < count; i += kPieceBytes / sizeof(T)) {
    uint4 bits;
    memcpy(&bits, from + i, sizeof(bits));
    *reinterpret_cast<uint4*>(to + i) = bits;
  }
}

// The elements as those of another type, of which there is room for as many.
template <int count, class In, class T>
__device__ __forceinline__ void widen(const In (&from)[count], T* to) {
  if constexpr (std::is_same_v<In, BFloat16>) {
    // the upper halves of float32
    uint32_t pairs[count / 2];
    memcpy(pairs, from, sizeof(from));
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      to[2 * i] = __uint_as_float(pairs[i] << 16);
      to[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
  }
}

// How many of the columns from `first` on are the lane's.
__device__ __forceinline__ int columns_of_lane(int32_t columns, int32_t first) {
  return min(max(columns - first, 0), kLaneColumns);
}

// Loads a lane's `columns` columns, zero past these; of rows that are not aligned, element by element.
template <bool aligned, class T>
__device__ __forceinline__ void load_columns(const T* from, int columns, T (&to)[kLaneColumns]) {
  memset(to, 0, sizeof(to));
  if constexpr (aligned) {
    if (columns > 0) load(from, to);
  } else {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c)
      if (c < columns) to[c] = from[c];
  }
}

template <bool aligned, class T>
__device__ __forceinline__ void store_columns(const T (&from)[kLaneColumns], int columns, T* to) {
  if constexpr (aligned) {
    if (columns > 0) store(from, to);
  } else {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c)
      if (c < columns) to[c] = from[c];
  }
}

template <class T>
__device__ __forceinline__ T sum_of_lanes(T x, int lane_bits) {
  for (int other = 1; other >> lane_bits == 0; other *= 2) x += __shfl_xor_sync(kAllLanes, x, other);
  return x;
}

// How many lanes, as a power of two, have a row of so many columns: a warp at most.
inline int lane_bits_for(int64_t columns) {
  int bits = 0;
  while (1 << bits < kWarp && kLaneColumns << bits < columns) ++bits;
  return bits;
}

// whether all of a lane's columns can be read at once
template <class T>
bool aligned(const Rows<T>& rows, int64_t columns) {
  const int64_t strides = rows.batch_stride | rows.head_stride | rows.row_stride;
  return columns % kLaneColumns == 0 &&
         (reinterpret_cast<uintptr_t>(rows.data) | strides * sizeof(T)) % kPieceBytes == 0;
}

}  // namespace yoso
