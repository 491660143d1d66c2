// The kernels of tiled_attention.h for any dtype and size: a thread has 4 x 4 pairs of a tile, and as many elements of
// every kTile columns of the sums.
#pragma once

#include "tiles.h"

namespace yoso {
namespace {

constexpr int kThreads = 256;
// that a multiprocessor has room for: with two, registers would be spilled
constexpr int kBlocks = 1;
constexpr int kSpan = 16;
// columns that are multiplied between loads
constexpr int kDepth = 16;
constexpr int kMaxColumns = 256;

// Where a thread's pairs are in a tile, and what weights are rounded to.
struct Place {
  // not at all
  using Weight = double;
  static constexpr int kRows = kTile, kBlockThreads = kThreads;
  int64_t batch_head, first_row, first_other;

  __device__ __forceinline__ static int row(int b, int) { return threadIdx.x / kSpan + kSpan * b; }
  __device__ __forceinline__ static int other(int, int i) { return threadIdx.x % kSpan + kSpan * i; }
};

template <class T>
struct Shared {
  struct Chunks {
    // padded against bank conflicts
    T mine[kTile][kDepth + 4], others[kTile][kDepth + 4];
  };
  union {
    Chunks chunks;
    T source[kTile][kTile + 4];
  };
  T weights[kTile][kTile + 4];
  T my_factors[kTile], other_factors[kTile];
};

// Loads the factors of rows first..first + kTile; kMasked past the end.
template <class T>
__device__ __forceinline__ void load_factors(T* to, const T* factors, int64_t batch_head, int64_t first,
                                             int64_t count) {
  for (int64_t i = threadIdx.x; i < kTile; i += kThreads)
    to[i] = first + i < count ? factors[batch_head * count + first + i] : static_cast<T>(kMasked);
}

// Loads `columns` columns, those from `begin` on, of kTile rows, scaled to unit rows or not; 0 where there is nothing.
template <int columns, class T, class In, int stride>
__device__ __forceinline__ void load_tile(T (&to)[kTile][stride], const Rows<const In>& rows, const Block& block,
                                          int64_t first, int64_t begin, int64_t end, const T* factors, bool unit) {
  for (int i = threadIdx.x; i < kTile * columns; i += kThreads) {
    const int row = i / columns, column = i % columns;
    const T scale = factors[row];
    T x = 0;
    if (scale != kMasked && begin + column < end)
      x = static_cast<T>(rows.at(block.batch, block.head, first + row)[begin + column]) * (unit ? scale : 1);
    to[row][column] = x;
  }
}

// out = mine . others
template <class T, class In>
__device__ __forceinline__ void multiply_rows(Shared<T>& shared, const Rows<const In>& mine,
                                              const Rows<const In>& others, const Block& block, int64_t first_other,
                                              int64_t columns, bool unit, T (&out)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) out[i / 4][i % 4] = 0;
  for (int64_t c = 0; c < columns; c += kDepth) {
    // what was there has been read, and the factors are there
    __syncthreads();
    load_tile<kDepth>(shared.chunks.mine, mine, block, block.first, c, columns, shared.my_factors, unit);
    load_tile<kDepth>(shared.chunks.others, others, block, first_other, c, columns, shared.other_factors, unit);
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          out[b][i] += shared.chunks.mine[Place::row(b, i)][d] * shared.chunks.others[Place::other(b, i)][d];
  }
}

// 1 - |cosine|, not less than 0.
template <class T>
__device__ __forceinline__ void take_versines(const T (&cosines)[4][4], T (&versines)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const T versine = 1 - fabs(cosines[i / 4][i % 4]);
    versines[i / 4][i % 4] = versine < 0 ? 0 : versine;
  }
}

// sums += weights others
template <int column_tiles, class T, class In>
__device__ __forceinline__ void add_weighted(Shared<T>& shared, const T (&weights)[4][4], const Rows<const In>& others,
                                             const Block& block, int64_t first_other, int64_t columns, bool unit,
                                             T (&sums)[column_tiles][4][4]) {
#pragma unroll
  for (int b = 0; b < 4; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.weights[Place::row(b, i)][Place::other(b, i)] = weights[b][i];
#pragma unroll
  for (int tile = 0; tile < column_tiles; ++tile) {
    if (tile * kTile >= columns) break;
    __syncthreads();
    load_tile<kTile>(shared.source, others, block, first_other, tile * kTile, columns, shared.other_factors, unit);
    __syncthreads();
#pragma unroll 4
    for (int other = 0; other < kTile; ++other)
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[tile][b][i] += shared.weights[Place::row(b, i)][other] * shared.source[other][Place::other(b, i)];
  }
}

// The sum over the threads that have columns of the same rows.
template <class T>
__device__ __forceinline__ T span_sum(T x) {
#pragma unroll
  for (int other = kSpan / 2; other > 0; other /= 2) x += __shfl_xor_sync(kAllLanes, x, other);
  return x;
}

// out = the sum of the others' values by the weights. With a place for inverse lengths: of length one.
template <class In, int column_tiles, class Pairs>
__global__ void __launch_bounds__(kThreads, kBlocks)
    weighted_sum_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out,
                        Accumulator<In>* inverse_length) {
  using T = Accumulator<In>;
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_factors(shared.my_factors, mine.factors, block.batch_head, block.first, mine.count);
  T sums[column_tiles][4][4] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_factors(shared.other_factors, others.factors, block.batch_head, first, others.count);
    T cosines[4][4], weights[4][4];
    multiply_rows(shared, mine.rows, others.rows, block, first, sizes.columns, true, cosines);
    take_versines(cosines, weights);
    const Place place{block.batch_head, block.first, first};
    pairs.weigh(place, cosines, weights);
    add_weighted<column_tiles>(shared, weights, others.values, block, first, sizes.value_columns, false, sums);
  }
  // where there was no other
  __syncthreads();
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int64_t row = block.first + Place::row(b, 0);
    T scale = shared.my_factors[Place::row(b, 0)] == kMasked ? 0 : 1;
    if (inverse_length != nullptr) {
      T square = 0;
#pragma unroll
      for (int i = 0; i < column_tiles * 4; ++i) square += sums[i / 4][b][i % 4] * sums[i / 4][b][i % 4];
      square = span_sum(square);
      scale = square > 0 ? 1 / sqrt(square) : 0;
      if (row < mine.count && threadIdx.x % kSpan == 0) inverse_length[block.batch_head * mine.count + row] = scale;
    }
#pragma unroll
    for (int i = 0; i < column_tiles * 4; ++i) {
      const int64_t column = i / 4 * kTile + Place::other(b, i % 4);
      if (row < mine.count && column < sizes.value_columns)
        out.at(block.batch, block.head, row)[column] = static_cast<In>(sums[i / 4][b][i % 4] * scale);
    }
  }
}

// out = the gradient of my rows: the sum of the others' rows by slope times product of values, taken through the
// scaling of my rows to length one
template <class In, int column_tiles, class Pairs>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradient_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out) {
  using T = Accumulator<In>;
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_factors(shared.my_factors, mine.factors, block.batch_head, block.first, mine.count);
  T sums[column_tiles][4][4] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_factors(shared.other_factors, others.factors, block.batch_head, first, others.count);
    T cosines[4][4], weights[4][4], products[4][4];
    multiply_rows(shared, mine.rows, others.rows, block, first, sizes.columns, true, cosines);
    take_versines(cosines, weights);
    multiply_rows(shared, mine.values, others.values, block, first, sizes.value_columns, false, products);
    const Place place{block.batch_head, block.first, first};
    pairs.slopes(place, cosines, weights, products);
    add_weighted<column_tiles>(shared, products, others.rows, block, first, sizes.columns, true, sums);
  }
  __syncthreads();
  const T scale = pairs.template slope_scale<T>();
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int64_t row = block.first + Place::row(b, 0);
    const T factor = shared.my_factors[Place::row(b, 0)];
    const In* from = mine.rows.at(block.batch, block.head, row);
    const auto unit = [&](int64_t column) -> T {
      if (factor == kMasked || column >= sizes.columns) return 0;
      return static_cast<T>(from[column]) * factor;
    };
    T along = 0;
#pragma unroll
    for (int i = 0; i < column_tiles * 4; ++i)
      along += sums[i / 4][b][i % 4] * unit(i / 4 * kTile + Place::other(b, i % 4));
    along = span_sum(along);
#pragma unroll
    for (int i = 0; i < column_tiles * 4; ++i) {
      const int64_t column = i / 4 * kTile + Place::other(b, i % 4);
      if (row < mine.count && column < sizes.columns)
        out.at(block.batch, block.head, row)[column] =
            static_cast<In>(factor == kMasked ? 0 : (sums[i / 4][b][i % 4] - along * unit(column)) * factor * scale);
    }
  }
}

}  // namespace
}  // namespace yoso
