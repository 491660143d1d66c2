// The kernels of tiled_attention.h for rows of float32 and float64. A thread has n x kSide pairs of a tile, and as many
// elements of every kTile columns of the sums.
#pragma once

#include "tiles.h"

namespace yoso {
namespace {

constexpr int kMaxColumns = 256;
// n, for sums of so many columns
template <int columns>
constexpr int kPairRows = columns == kTile ? 8 : 4;

// Where a thread's pairs are in a tile, and what weights are rounded to.
template <int n>
struct Place {
  // not at all
  using Weight = double;
  static constexpr int kRows = kTile, kBlockThreads = kThreadsFor<n>;
  int64_t batch_head, first_row, first_other;

  __device__ __forceinline__ static int row(int r, int) { return my_row<n>(r); }
  __device__ __forceinline__ static int other(int, int c) { return my_column(c); }
};

template <class T>
struct Shared {
  Tile<T> left, right;
  T my_factors[kTile], other_factors[kTile];
};

// Loads the factors of rows first..first + kTile; kMasked past the end.
template <int threads, class T>
__device__ __forceinline__ void load_factors(T* to, const T* factors, int64_t batch_head, int64_t first,
                                             int64_t count) {
  for (int64_t i = threadIdx.x; i < kTile; i += threads)
    to[i] = first + i < count ? factors[batch_head * count + first + i] : static_cast<T>(kMasked);
}

// A side's rows, or values.
template <class T>
__device__ __forceinline__ TileSource<T> source_of(const Side<T>& side, const Rows<const T>& rows, int64_t columns) {
  return {rows, static_cast<int32_t>(columns), side.aligned};
}

// Loads kTile columns of kTile rows, or their transpose, scaled to unit rows or not.
template <bool transposed, int threads, class T>
__device__ __forceinline__ void load_rows(const TileSource<T>& source, const Block& block, int64_t first,
                                          int32_t column, const T* factors, bool unit, Tile<T>& to) {
  const auto row = [&](int r) {
    return factors[r] == kMasked ? nullptr : source.rows.at(block.batch, block.head, first + r);
  };
  load_tile<transposed, threads>(source, row, column, [&](int r) { return unit ? factors[r] : 1; }, to);
}

// out = mine . others
template <class T, int n>
__device__ __forceinline__ void multiply_rows(Shared<T>& shared, const TileSource<T>& mine, const TileSource<T>& others,
                                              const Block& block, int64_t first_other, bool unit, T (&out)[n][kSide]) {
  for_elements<n>([&](int r, int c) { out[r][c] = 0; });
  for (int32_t column = 0; column < mine.columns; column += kTile) {
    // what was there has been read, and the factors are there
    __syncthreads();
    load_rows<false, kThreadsFor<n>>(mine, block, block.first, column, shared.my_factors, unit, shared.left);
    load_rows<true, kThreadsFor<n>>(others, block, first_other, column, shared.other_factors, unit, shared.right);
    __syncthreads();
    if (unit)
      multiply_tiles_in_parts(shared.left, shared.right, out);
    else
      multiply_tiles<false>(shared.left, shared.right, out);
  }
}

// 1 - |cosine|, not less than 0.
template <class T, int n>
__device__ __forceinline__ void take_versines(const T (&cosines)[n][kSide], T (&versines)[n][kSide]) {
  for_elements<n>([&](int r, int c) {
    const T versine = 1 - fabs(cosines[r][c]);
    versines[r][c] = versine < 0 ? 0 : versine;
  });
}

// sums += weights others
template <int column_tiles, class T, int n>
__device__ __forceinline__ void add_weighted(Shared<T>& shared, const T (&weights)[n][kSide],
                                             const TileSource<T>& others, const Block& block, int64_t first_other,
                                             bool unit, T (&sums)[column_tiles][n][kSide]) {
  __syncthreads();
  store_elements(weights, shared.left);
#pragma unroll
  for (int tile = 0; tile < column_tiles; ++tile) {
    if (tile * kTile >= others.columns) break;
    if (tile > 0) __syncthreads();
    load_rows<false, kThreadsFor<n>>(others, block, first_other, tile * kTile, shared.other_factors, unit,
                                     shared.right);
    __syncthreads();
    multiply_tiles<false>(shared.left, shared.right, sums[tile]);
  }
}

// out = the sum of the others' values by the weights. With a place for inverse lengths: of length one.
template <class T, int n, int column_tiles, class Pairs>
__global__ void __launch_bounds__(kThreadsFor<n>)
    weighted_sum_kernel(Side<T> mine, Side<T> others, Sizes sizes, Pairs pairs, Rows<T> out, T* inverse_length) {
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_factors<kThreadsFor<n>>(shared.my_factors, mine.factors, block.batch_head, block.first, mine.count);
  T sums[column_tiles][n][kSide] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_factors<kThreadsFor<n>>(shared.other_factors, others.factors, block.batch_head, first, others.count);
    T cosines[n][kSide], weights[n][kSide];
    multiply_rows(shared, source_of(mine, mine.rows, sizes.columns), source_of(others, others.rows, sizes.columns),
                  block, first, true, cosines);
    take_versines(cosines, weights);
    pairs.weigh(Place<n>{block.batch_head, block.first, first}, cosines, weights);
    add_weighted<column_tiles>(shared, weights, source_of(others, others.values, sizes.value_columns), block, first,
                               false, sums);
  }
  // where there was no other
  __syncthreads();
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int64_t row = block.first + my_row<n>(r);
    T scale = shared.my_factors[my_row<n>(r)] == kMasked ? 0 : 1;
    if (inverse_length != nullptr) {
      T square = 0;
#pragma unroll
      for (int i = 0; i < column_tiles * kSide; ++i)
        square += sums[i / kSide][r][i % kSide] * sums[i / kSide][r][i % kSide];
      square = span_sum(square);
      scale = square > 0 ? 1 / sqrt(square) : 0;
      if (row < mine.count && my_column(0) == 0) inverse_length[block.batch_head * mine.count + row] = scale;
    }
#pragma unroll
    for (int i = 0; i < column_tiles * kSide; ++i) {
      const int64_t column = i / kSide * kTile + my_column(i % kSide);
      if (row < mine.count && column < sizes.value_columns)
        out.at(block.batch, block.head, row)[column] = sums[i / kSide][r][i % kSide] * scale;
    }
  }
}

// out = the gradient of my rows: the sum of the others' rows by slope times product of values, taken through the
// scaling of my rows to length one
template <class T, int n, int column_tiles, class Pairs>
__global__ void __launch_bounds__(kThreadsFor<n>)
    gradient_kernel(Side<T> mine, Side<T> others, Sizes sizes, Pairs pairs, Rows<T> out) {
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_factors<kThreadsFor<n>>(shared.my_factors, mine.factors, block.batch_head, block.first, mine.count);
  T sums[column_tiles][n][kSide] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_factors<kThreadsFor<n>>(shared.other_factors, others.factors, block.batch_head, first, others.count);
    const TileSource<T> other_rows = source_of(others, others.rows, sizes.columns);
    T cosines[n][kSide], weights[n][kSide], products[n][kSide];
    multiply_rows(shared, source_of(mine, mine.rows, sizes.columns), other_rows, block, first, true, cosines);
    take_versines(cosines, weights);
    multiply_rows(shared, source_of(mine, mine.values, sizes.value_columns),
                  source_of(others, others.values, sizes.value_columns), block, first, false, products);
    pairs.slopes(Place<n>{block.batch_head, block.first, first}, cosines, weights, products);
    add_weighted<column_tiles>(shared, products, other_rows, block, first, true, sums);
  }
  __syncthreads();
  const T scale = pairs.template slope_scale<T>();
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int64_t row = block.first + my_row<n>(r);
    const T factor = shared.my_factors[my_row<n>(r)];
    const T* from = mine.rows.at(block.batch, block.head, row);
    const auto unit = [&](int64_t column) -> T {
      if (factor == kMasked || column >= sizes.columns) return 0;
      return from[column] * factor;
    };
    T along = 0;
#pragma unroll
    for (int i = 0; i < column_tiles * kSide; ++i)
      along += sums[i / kSide][r][i % kSide] * unit(i / kSide * kTile + my_column(i % kSide));
    along = span_sum(along);
#pragma unroll
    for (int i = 0; i < column_tiles * kSide; ++i) {
      const int64_t column = i / kSide * kTile + my_column(i % kSide);
      if (row < mine.count && column < sizes.columns)
        out.at(block.batch, block.head, row)[column] =
            factor == kMasked ? 0 : (sums[i / kSide][r][i % kSide] - along * unit(column)) * factor * scale;
    }
  }
}

}  // namespace
}  // namespace yoso
