// Attention whose weights are computed in tiles, never as an N x M matrix, and its backward: a block has a tile of rows
// and loops over tiles of the others.
//
// Sums over keys for a tile of queries and over queries for a tile of keys are the same kernels: "mine" are the rows of
// the block's side, "others" those of the other one. What the weights are, and which pairs have any, is for a class of
// pairs to say:
//     swapped()                       the pairs with the sides swapped
//     is_real(batch_head, row)        whether a row of mine has any weight
//     near(first, last, count)        the run of others, of `count`, that my rows first..last need
//     weigh(place, cosine)            turns cosines into weights
//     slopes(place, cosine, products) multiplies products by the slopes of the weights; cosine is scratch
// The whole block calls the last two, each thread with n x 4 pairs of a tile, which place says.
#pragma once

#include "device.h"

namespace yoso {
namespace {

// rows of a block
constexpr int kTile = 64;
// a row's inverse length where it has no weight, whatever stands in it
constexpr int kMasked = -1;

struct Range {
  int64_t begin, end;
};

// Queries and the gradient of their output, or keys and values.
template <class In>
struct Side {
  Rows<const In> rows, values;
  // [B, H, count]
  const Accumulator<In>* inverse_length;
  int64_t count;
};

struct Sizes {
  int64_t heads, columns, value_columns;
};

// Which rows a block has.
struct Block {
  int64_t batch_head, batch, head, first, last;

  __device__ Block(int64_t heads, int64_t count) {
    const int64_t tiles = (count + kTile - 1) / kTile;
    batch_head = blockIdx.x / tiles;
    batch = batch_head / heads;
    head = batch_head % heads;
    first = blockIdx.x % tiles * kTile;
    last = first + kTile < count ? first + kTile : count;
  }
};

__device__ __forceinline__ float quick_sqrt(float x) {
#ifdef YOSO_CUDA_EMULATOR
  return std::sqrt(x);
#else
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
#endif
}

// 1 - acos(x) / pi for x clamped to [-1, 1]; not a number where x is none
__device__ __forceinline__ double angle_complement(double x) {
  return 1 - acos(x < -1 ? -1 : x > 1 ? 1 : x) / 3.14159265358979323846;
}
// acos(x) / pi = sqrt(1 - x) * polynomial(x) on [0, 1], a minimax fit
__device__ __forceinline__ float angle_complement(float x) {
  const float magnitude = fabsf(x), a = magnitude > 1 ? 1 : magnitude;
  float polynomial = -0.00045883973f;
  polynomial = polynomial * a + 0.002306306f;
  polynomial = polynomial * a - 0.0056687873f;
  polynomial = polynomial * a + 0.009974398f;
  polynomial = polynomial * a - 0.01601506f;
  polynomial = polynomial * a + 0.028329346f;
  polynomial = polynomial * a - 0.06830927f;
  polynomial = polynomial * a + 0.5f;
  const float angle = quick_sqrt(1 - a) * polynomial;
  return x < 0 ? angle : 1 - angle;
}

// 1 / sqrt(1 - x^2), 0 where it diverges
template <class T>
__device__ __forceinline__ T inverse_sine(T x) {
  const T square = (1 - x) * (1 + x);
  return square > 0 ? rsqrt(square) : 0;
}

// x = x^exponent
template <class T, int n>
__device__ __forceinline__ void power(T (&x)[n][4], int exponent) {
  T base[n][4];
#pragma unroll
  for (int i = 0; i < n * 4; ++i) {
    base[i / 4][i % 4] = x[i / 4][i % 4];
    if (exponent == 0) x[i / 4][i % 4] = 1;
  }
  // below the highest bit
  for (int bit = 30 - __clz(exponent); bit >= 0; --bit) {
#pragma unroll
    for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] *= x[i / 4][i % 4];
    if (exponent >> bit & 1) {
#pragma unroll
      for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] *= base[i / 4][i % 4];
    }
  }
}

// Turns cosines into p(cosine).
template <class T, int n>
__device__ __forceinline__ void kernel_weights(T (&x)[n][4], int tau) {
#pragma unroll
  for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] = angle_complement(x[i / 4][i % 4]);
  power(x, tau);
}

// A warp has a row.
constexpr int kLengthThreads = 256;
template <class In, class Pairs>
__global__ void inverse_length_kernel(Rows<const In> rows, int64_t all_rows, int64_t heads, int64_t count,
                                      int64_t columns, Pairs pairs, Accumulator<In>* inverse_length) {
  using T = Accumulator<In>;
  const int64_t index = int64_t{blockIdx.x} * (kLengthThreads / kWarp) + threadIdx.x / kWarp;
  if (index >= all_rows) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t batch_head = index / count, row = index % count;
  const In* x = rows.at(batch_head / heads, batch_head % heads, row);
  T square = 0, infinite = 0;
  for (int64_t c = lane; c < columns; c += kWarp) {
    square += static_cast<T>(x[c]) * static_cast<T>(x[c]);
    // not a number for what is infinite, where the square is so for what is large
    infinite += static_cast<T>(x[c]) * 0;
  }
  square = warp_sum(square);
  infinite = warp_sum(infinite);
  T inverse = square == 0 ? 0 : 1 / sqrt(square) + infinite;
  if (!pairs.is_real(batch_head, row)) inverse = kMasked;
  if (lane == 0) inverse_length[index] = inverse;
}

template <class In, class Pairs>
Tensor inverse_lengths(const Device& device, const Tensor& rows, const Pairs& pairs) {
  const int64_t B = rows.size(0), H = rows.size(1), N = rows.size(2);
  Tensor inverse_length = torch::stable::new_empty(rows, {B, H, N}, length_dtype(rows));
  launch(device, inverse_length_kernel<In, Pairs>, divide_up(B * H * N, kLengthThreads / kWarp), kLengthThreads, 0,
         rows_of<In>(rows), B * H * N, H, N, rows.size(3), pairs,
         static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr()));
  return inverse_length;
}

// Any dtype and size: a thread has 4 x 4 pairs of a tile, and as many elements of every kTile columns of the sums.
constexpr int kThreads = 256;
constexpr int kSpan = 16;
// columns that are multiplied between loads
constexpr int kDepth = 16;
constexpr int kMaxColumns = 256;

// Where a thread's pairs are in a tile, and shared memory for the class of pairs.
struct Place {
  static constexpr int kRows = kTile, kOthers = kTile, kBlockThreads = kThreads;
  int64_t batch_head, first_row, first_other, num_rows, num_others;
  int32_t* scratch;

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
  T my_inverse[kTile], other_inverse[kTile];
};

// Loads the inverse lengths of rows first..first + kTile; kMasked past the end.
template <class T, int threads>
__device__ __forceinline__ void load_inverse(T* to, const T* inverse_length, int64_t batch_head, int64_t first,
                                             int64_t count) {
  for (int64_t i = threadIdx.x; i < kTile; i += threads)
    to[i] = first + i < count ? inverse_length[batch_head * count + first + i] : static_cast<T>(kMasked);
}

// Loads `columns` columns, those from `begin` on, of kTile rows, scaled to unit rows or not; 0 where there is nothing.
template <int columns, class T, class In, int stride>
__device__ __forceinline__ void load_tile(T (&to)[kTile][stride], const Rows<const In>& rows, const Block& block,
                                          int64_t first, int64_t begin, int64_t end, const T* inverse, bool unit) {
  for (int i = threadIdx.x; i < kTile * columns; i += kThreads) {
    const int row = i / columns, column = i % columns;
    const T scale = inverse[row];
    T x = 0;
    if (scale != kMasked && begin + column < end)
      x = static_cast<T>(rows.at(block.batch, block.head, first + row)[begin + column]) * (unit ? scale : 1);
    to[row][column] = x;
  }
}

// out = mine . others
template <class T, class In>
__device__ __forceinline__ void multiply_rows(Shared<T>& shared, const Rows<const In>& mine, const Rows<const In>& others,
                                              const Block& block, int64_t first_other, int64_t columns, bool unit,
                                              T (&out)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) out[i / 4][i % 4] = 0;
  for (int64_t c = 0; c < columns; c += kDepth) {
    // what was there has been read, and the inverse lengths are there
    __syncthreads();
    load_tile<kDepth>(shared.chunks.mine, mine, block, block.first, c, columns, shared.my_inverse, unit);
    load_tile<kDepth>(shared.chunks.others, others, block, first_other, c, columns, shared.other_inverse, unit);
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
    load_tile<kTile>(shared.source, others, block, first_other, tile * kTile, columns, shared.other_inverse, unit);
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

// out = the sum of the others' values by the weights, of length one where there is a place for the inverse lengths
template <class In, int column_tiles, class Pairs>
__global__ void __launch_bounds__(kThreads) weighted_sum_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs,
                                                                Rows<In> out, Accumulator<In>* out_inverse_length) {
  using T = Accumulator<In>;
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_inverse<T, kThreads>(shared.my_inverse, mine.inverse_length, block.batch_head, block.first, mine.count);
  T sums[column_tiles][4][4] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_inverse<T, kThreads>(shared.other_inverse, others.inverse_length, block.batch_head, first, others.count);
    T weights[4][4];
    multiply_rows(shared, mine.rows, others.rows, block, first, sizes.columns, true, weights);
    const Place place{block.batch_head, block.first, first, mine.count, others.count,
                      reinterpret_cast<int32_t*>(&shared + 1)};
    pairs.weigh(place, weights);
    add_weighted<column_tiles>(shared, weights, others.values, block, first, sizes.value_columns, false, sums);
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int64_t row = block.first + Place::row(b, 0);
    T scale = 1;
    if (out_inverse_length != nullptr) {
      T square = 0;
#pragma unroll
      for (int i = 0; i < column_tiles * 4; ++i) square += sums[i / 4][b][i % 4] * sums[i / 4][b][i % 4];
      square = span_sum(square);
      scale = square > 0 ? 1 / sqrt(square) : 0;
      if (row < mine.count && threadIdx.x % kSpan == 0) out_inverse_length[block.batch_head * mine.count + row] = scale;
    }
#pragma unroll
    for (int i = 0; i < column_tiles * 4; ++i) {
      const int64_t column = i / 4 * kTile + Place::other(b, i % 4);
      if (row < mine.count && column < sizes.value_columns)
        out.at(block.batch, block.head, row)[column] = static_cast<In>(sums[i / 4][b][i % 4] * scale);
    }
  }
}

// out = the gradient of my rows: the sum of the others' unit rows by slope times product of values, taken through the
// scaling of my rows to length one
template <class In, int column_tiles, class Pairs>
__global__ void __launch_bounds__(kThreads) gradient_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs,
                                                            Rows<In> out) {
  using T = Accumulator<In>;
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_inverse<T, kThreads>(shared.my_inverse, mine.inverse_length, block.batch_head, block.first, mine.count);
  T sums[column_tiles][4][4] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_inverse<T, kThreads>(shared.other_inverse, others.inverse_length, block.batch_head, first, others.count);
    T cosine[4][4], products[4][4];
    multiply_rows(shared, mine.rows, others.rows, block, first, sizes.columns, true, cosine);
    multiply_rows(shared, mine.values, others.values, block, first, sizes.value_columns, false, products);
    const Place place{block.batch_head, block.first, first, mine.count, others.count,
                      reinterpret_cast<int32_t*>(&shared + 1)};
    pairs.slopes(place, cosine, products);
    add_weighted<column_tiles>(shared, products, others.rows, block, first, sizes.columns, true, sums);
  }
  __syncthreads();
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int64_t row = block.first + Place::row(b, 0);
    const T inverse = shared.my_inverse[Place::row(b, 0)];
    const In* from = mine.rows.at(block.batch, block.head, row);
    const auto unit = [&](int64_t column) {
      return inverse != kMasked && column < sizes.columns ? static_cast<T>(from[column]) * inverse : 0;
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
            static_cast<In>(inverse == kMasked ? 0 : (sums[i / 4][b][i % 4] - along * unit(column)) * inverse);
    }
  }
}

template <class In>
Side<In> side_of(const Tensor& rows, const Tensor& values, const Tensor& inverse_length) {
  return {rows_of<In>(rows), rows_of<In>(values),
          static_cast<const Accumulator<In>*>(inverse_length.const_data_ptr()), rows.size(2)};
}

// The kernel that suits the sizes and the memory, and its launch.
template <class In, class Pairs>
class Launcher {
 public:
  Launcher(const Device& device, const Tensor& query, const Tensor& value)
      : device_(device), batches_(query.size(0)), sizes_{query.size(1), query.size(3), value.size(3)} {
    columns_ = sizes_.columns > sizes_.value_columns ? sizes_.columns : sizes_.value_columns;
    STD_TORCH_CHECK(columns_ <= kMaxColumns, "the CUDA kernels take query, key and value of at most ", kMaxColumns,
                    " columns, got ", columns_);
  }

  void weighted_sum(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                    Accumulator<In>* out_inverse_length) const {
    const auto kernel = columns_ <= kTile ? weighted_sum_kernel<In, 1, Pairs>
                                          : weighted_sum_kernel<In, kMaxColumns / kTile, Pairs>;
    launch(device_, kernel, blocks(mine), kThreads, kSharedBytes, mine, others, sizes_, pairs,
           mutable_rows_of<In>(out), out_inverse_length);
  }

  void gradient(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out) const {
    const auto kernel =
        columns_ <= kTile ? gradient_kernel<In, 1, Pairs> : gradient_kernel<In, kMaxColumns / kTile, Pairs>;
    launch(device_, kernel, blocks(mine), kThreads, kSharedBytes, mine, others, sizes_, pairs,
           mutable_rows_of<In>(out));
  }

 private:
  static constexpr size_t kSharedBytes = sizeof(Shared<Accumulator<In>>) + Pairs::kScratchBytes;
  int64_t blocks(const Side<In>& mine) const { return batches_ * sizes_.heads * divide_up(mine.count, kTile); }

  const Device& device_;
  int64_t batches_, columns_;
  Sizes sizes_;
};

// inverse_length is used only where out's rows are scaled to length one.
template <class In, class Pairs>
void attention_forward(const Device& device, const Pairs& pairs, const Tensor& query, const Tensor& key,
                       const Tensor& value, bool unit, const Tensor& out, const Tensor& inverse_length) {
  const Launcher<In, Pairs> launcher(device, query, value);
  const Tensor query_inverse = inverse_lengths<In>(device, query, pairs);
  const Tensor key_inverse = inverse_lengths<In>(device, key, pairs.swapped());
  // no values of the queries are read
  launcher.weighted_sum(side_of<In>(query, query, query_inverse), side_of<In>(key, value, key_inverse), pairs, out,
                        unit ? static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr()) : nullptr);
}

template <class In, class Pairs>
void attention_backward(const Device& device, const Pairs& pairs, const Tensor& grad, const Tensor& query,
                        const Tensor& key, const Tensor& value, const Tensor& grad_query, const Tensor& grad_key,
                        const Tensor& grad_value) {
  const Launcher<In, Pairs> launcher(device, query, value);
  const Tensor query_inverse = inverse_lengths<In>(device, query, pairs);
  const Tensor key_inverse = inverse_lengths<In>(device, key, pairs.swapped());
  const Side<In> queries = side_of<In>(query, grad, query_inverse), keys = side_of<In>(key, value, key_inverse);
  launcher.weighted_sum(keys, queries, pairs.swapped(), grad_value, nullptr);
  launcher.gradient(keys, queries, pairs.swapped(), grad_key);
  launcher.gradient(queries, keys, pairs, grad_query);
}

}  // namespace
}  // namespace yoso
