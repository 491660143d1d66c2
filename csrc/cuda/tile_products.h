// Products of tiles of rows in shared memory, in float32 or float64.
//
// A thread has n x kSide elements of a tile, n being 4 or 8: of n / 4 times four neighbouring rows.
#pragma once

#include "rows.h"

namespace yoso {
namespace {

// rows and columns of a tile
constexpr int kTile = 64;
constexpr int kSide = 4, kSpan = kTile / kSide;

// padded against bank conflicts, by what keeps rows aligned to 16 bytes
template <class T>
using Tile = T[kTile][kTile + 4];

template <class T, int n>
using Elements = T[n][kSide];

template <int n>
constexpr int kThreadsFor = kTile * kTile / (n * kSide);

// Where the thread's elements are.
template <int n>
__device__ __forceinline__ int my_row(int r) {
  return threadIdx.x / kSpan * kSide + r % kSide + r / kSide * (kTile * kSide / n);
}
__device__ __forceinline__ int my_column(int c) { return threadIdx.x % kSpan * kSide + c; }

// Calls f(r, c) for each of the thread's elements.
template <int n, class F>
__device__ __forceinline__ void for_elements(const F& f) {
#pragma unroll
  for (int r = 0; r < n; ++r)
#pragma unroll
    for (int c = 0; c < kSide; ++c) f(r, c);
}

// elements += left right, or left^T right
template <bool transposed, class T, int n>
__device__ __forceinline__ void multiply_tiles(const Tile<T>& left, const Tile<T>& right, T (&elements)[n][kSide]) {
#pragma unroll 1
  for (int inner = 0; inner < kTile; inner += kSide) {
    // of the left rows, or transposed columns
    T a[n][kSide];
#pragma unroll
    for (int r = 0; r < n; ++r)
      load(transposed ? left[inner + r % kSide] + my_row<n>(r / kSide * kSide) : left[my_row<n>(r)] + inner, a[r]);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      T b[kSide];
      load(right[inner + i] + my_column(0), b);
      for_elements<n>(
          [&](int r, int c) { elements[r][c] += (transposed ? a[r / kSide * kSide + i][r % kSide] : a[r][i]) * b[c]; });
    }
  }
}

// elements += left right, for cosines, whose distance from 1 is what counts: of kSide products at a time, since what is
// rounded off a sum is in proportion to it. One more addition for every kSide multiplications.
template <class T, int n>
__device__ __forceinline__ void multiply_tiles_in_parts(const Tile<T>& left, const Tile<T>& right,
                                                        T (&elements)[n][kSide]) {
#pragma unroll 1
  for (int inner = 0; inner < kTile; inner += kSide) {
    T b[kSide][kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) load(right[inner + i] + my_column(0), b[i]);
#pragma unroll
    for (int r = 0; r < n; ++r) {
      T a[kSide];
      load(left[my_row<n>(r)] + inner, a);
#pragma unroll
      for (int c = 0; c < kSide; ++c) {
        T part = 0;
#pragma unroll
        for (int i = 0; i < kSide; ++i) part += a[i] * b[i][c];
        elements[r][c] += part;
      }
    }
  }
}

template <class T, int n>
__device__ __forceinline__ void store_elements(const T (&elements)[n][kSide], Tile<T>& to) {
#pragma unroll
  for (int r = 0; r < n; ++r) store(elements[r], to[my_row<n>(r)] + my_column(0));
}

// The rows of a [B, H, *, columns] tensor, or rows that another says the places of.
template <class In>
struct TileSource {
  Rows<const In> rows;
  int32_t columns;
  // whether pieces of kLaneColumns can be read at once
  bool aligned;
};

// Loads columns first..first + kTile of kTile rows, times weight(r), or their transpose. row(r) points to one, or
// nowhere; zeros where there is nothing.
template <bool transposed, int threads, class In, class T, class Row, class Weight>
__device__ __forceinline__ void load_tile(const TileSource<In>& source, const Row& row, int32_t first,
                                          const Weight& weight, Tile<T>& to) {
  constexpr int pieces = kTile / kLaneColumns;
  // all at once would take more registers than there are
#pragma unroll 2
  for (int i = threadIdx.x; i < kTile * pieces; i += threads) {
    // neighbours store to neighbours
    const int r = transposed ? i % kTile : i / pieces;
    const int column = (transposed ? i / kTile : i % pieces) * kLaneColumns;
    In part[kLaneColumns] = {};
    // no address is computed from what points nowhere: a compiler may take that as proof that it points to a row
    if (const In* from = row(r); from != nullptr) {
      const int columns = columns_of_lane(source.columns, first + column);
      if (source.aligned)
        load_columns<true>(from + first + column, columns, part);
      else
        load_columns<false>(from + first + column, columns, part);
    }
    T wide[kLaneColumns];
    widen(part, wide);
    const T times = weight(r);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      wide[c] *= times;
      if (transposed) to[column + c][r] = wide[c];
    }
    if (!transposed) store(wide, to[r] + column);
  }
}
template <bool transposed, int threads, class In, class T, class Row>
__device__ __forceinline__ void load_tile(const TileSource<In>& source, const Row& row, int32_t first, Tile<T>& to) {
  load_tile<transposed, threads>(source, row, first, [](int) { return 1; }, to);
}

// The sum over the threads that have elements of the same rows.
template <class T>
__device__ __forceinline__ T span_sum(T x) {
#pragma unroll
  for (int other = kSpan / 2; other > 0; other /= 2) x += __shfl_xor_sync(kAllLanes, x, other);
  return x;
}

}  // namespace
}  // namespace yoso
