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
//     slopes(place, cosine, products) the like, and multiplies products by the slopes of the weights
// The whole block calls the last two, each thread with n x 4 pairs of a tile, which place says.
#pragma once

#include "mma.h"
#include "rows.h"

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
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
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

template <class In, bool aligned, class Pairs>
__global__ void __launch_bounds__(kRowThreads)
    inverse_length_kernel(Rows<const In> rows, int32_t heads, int32_t count, int32_t columns, int lane_bits,
                          Pairs pairs, Accumulator<In>* inverse_length) {
  using T = Accumulator<In>;
  const RowPlace place(count, lane_bits, 1);
  // lanes past the last row stay: the sums are the warp's
  const bool exists = place.row < count;
  const In* x = rows.at(place.head / heads, place.head % heads, exists ? place.row : 0);
  T square = 0, infinite = 0;
  for (int32_t first = place.column; first < columns; first += kLaneColumns << lane_bits) {
    In part[kLaneColumns];
    load_columns<aligned>(x + first, columns_of_lane(columns, first), part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const T element = static_cast<T>(part[c]);
      square += element * element;
      // not a number for what is infinite, where the square is so for what is large
      infinite += element * 0;
    }
  }
  square = sum_of_lanes(square, lane_bits);
  infinite = sum_of_lanes(infinite, lane_bits);
  if (!exists || place.lane != 0) return;
  T inverse = square == 0 ? 0 : 1 / sqrt(square) + infinite;
  if (!pairs.is_real(place.head, place.row)) inverse = kMasked;
  inverse_length[int64_t{place.head} * count + place.row] = inverse;
}

template <class In, class Pairs>
Tensor inverse_lengths(const Device& device, const Tensor& rows, const Pairs& pairs) {
  const int64_t B = rows.size(0), H = rows.size(1), N = rows.size(2), D = rows.size(3);
  Tensor inverse_length = torch::stable::new_empty(rows, {B, H, N}, length_dtype(rows));
  const Rows<const In> from = rows_of<In>(rows);
  const int lane_bits = lane_bits_for(D);
  launch(device, aligned(from, D) ? inverse_length_kernel<In, true, Pairs> : inverse_length_kernel<In, false, Pairs>,
         B * H * blocks_of_head(count_of(N, "rows"), lane_bits), kRowThreads, 0, from, static_cast<int32_t>(H),
         static_cast<int32_t>(N), count_of(D, "columns"), lane_bits, pairs,
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
  int64_t batch_head, first_row, first_other;
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
    const Place place{block.batch_head, block.first, first, reinterpret_cast<int32_t*>(&shared + 1)};
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
    const Place place{block.batch_head, block.first, first, reinterpret_cast<int32_t*>(&shared + 1)};
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

// 16-bit rows of up to kMaxMmaColumns columns whose pieces of 16 bytes are aligned, on tensor cores: a warp has 16 of the
// block's rows. The rows' products are those of the rows as they are, scaled afterwards.
constexpr int kMmaThreads = 128;
constexpr int kMaxMmaColumns = 128;
// 16-bit elements in 16 bytes, which a row in shared memory has more than it needs: against bank conflicts
constexpr int kPiece = 8;
// others in a tile; less of them leaves registers for the gradient's sums
constexpr int kSumOthers = 64;
constexpr int kGradientOthers = 32;

__device__ __forceinline__ int warp_lane() { return threadIdx.x % kWarp; }

template <int others>
struct MmaPlace {
  static constexpr int kRows = kTile, kOthers = others, kBlockThreads = kMmaThreads;
  int64_t batch_head, first_row, first_other;
  int32_t* scratch;

  __device__ __forceinline__ static int row(int, int i) { return threadIdx.x / kWarp * 16 + warp_lane() / 4 + i / 2 * 8; }
  __device__ __forceinline__ static int other(int b, int i) { return b * 8 + warp_lane() % 4 * 2 + i % 2; }
};

// Tiles of rows in shared memory, and room for what the class of pairs needs.
template <class In, int columns, int others>
struct MmaShared {
  static constexpr int kStride = columns + kPiece;
  In my_rows[kTile * kStride], other_rows[others * kStride], other_values[others * kStride];
  float my_inverse[kTile], other_inverse[kTile];
};
template <class In, int columns>
struct MmaGradientShared : MmaShared<In, columns, kGradientOthers> {
  In my_values[kTile * MmaShared<In, columns, kGradientOthers>::kStride];
};

// The power of two in an inverse length, by which rows of float16, which has few exponents, are scaled.
template <class In>
__device__ __forceinline__ float row_scale(float inverse) {
  if (std::is_same_v<In, Half> && inverse > 0) return __int_as_float(__float_as_int(inverse) & 0x7f800000);
  return 1;
}

// Loads the inverse lengths that the rows in shared memory have.
template <class In>
__device__ __forceinline__ void load_scaled_inverse(float* to, const Side<In>& side, const Block& block,
                                                    int64_t first) {
  load_inverse<float, kMmaThreads>(to, side.inverse_length, block.batch_head, first, side.count);
  if constexpr (std::is_same_v<In, Half>)
    // each thread reads what it wrote
    for (int i = threadIdx.x; i < kTile; i += kMmaThreads) to[i] /= row_scale<In>(to[i]);
}

// Loads `count` rows, 0 past the last row and column; and where a row has no weight, or is to become a unit row and
// cannot.
template <int count, int columns, class In>
__device__ __forceinline__ void load_pieces(In* to, const Rows<const In>& rows, const Side<In>& side,
                                            const Block& block, int64_t first, int64_t end, bool unit) {
  constexpr int kPieces = columns / kPiece;
#pragma unroll
  for (int start = 0; start < count * kPieces; start += kMmaThreads) {
    const int i = start + threadIdx.x, row = i / kPieces, column = i % kPieces * kPiece;
    uint4 piece = {};
    if (first + row < side.count && column < end) {
      piece = *reinterpret_cast<const uint4*>(rows.at(block.batch, block.head, first + row) + column);
      const float inverse = side.inverse_length[block.batch_head * side.count + first + row];
      if (inverse == kMasked || (unit && inverse == 0)) piece = {};
      if (std::is_same_v<In, Half> && unit) {
        In elements[kPiece];
        memcpy(elements, &piece, sizeof(piece));
#pragma unroll
        for (int c = 0; c < kPiece; ++c)
          elements[c] = static_cast<In>(static_cast<float>(elements[c]) * row_scale<In>(inverse));
        memcpy(&piece, elements, sizeof(piece));
      }
    }
    *reinterpret_cast<uint4*>(to + row * (columns + kPiece) + column) = piece;
  }
}

// out = the warp's rows . others
template <int columns, class In, int n>
__device__ __forceinline__ void multiply_mma(const In* mine, const In* others, int64_t end, float (&out)[n][4]) {
  constexpr int kStride = columns + kPiece;
  const int lane = warp_lane();
  mine += (threadIdx.x / kWarp * 16 + lane % 16) * kStride + lane / 16 * 8;
  others += (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int i = 0; i < n * 4; ++i) out[i / 4][i % 4] = 0;
#pragma unroll
  for (int c = 0; c < columns; c += 16) {
    if (c >= end) break;
    uint32_t a[4];
    load_matrices<false>(a, mine + c);
#pragma unroll
    for (int b = 0; b < n; b += 2) {
      uint32_t pair[4];
      load_matrices<false>(pair, others + b * 8 * kStride + c);
      multiply_add<In>(out[b], a, {pair[0], pair[1]});
      multiply_add<In>(out[b + 1], a, {pair[2], pair[3]});
    }
  }
}

// A pair of numbers as the sum of two pairs of T. Rounded to one, a weight errs in all columns alike, and a row whose
// largest weights do so has a length that is further off than that of a rounded row.
template <class T>
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack<T>(x, y);
  T pair[2];
  memcpy(pair, &high, sizeof(pair));
  low = pack<T>(x - static_cast<float>(pair[0]), y - static_cast<float>(pair[1]));
}

// sums += weights others
template <int columns, class In, int n>
__device__ __forceinline__ void add_weighted_mma(const float (&weights)[n][4], const In* others, int64_t end,
                                                 float (&sums)[columns / 8][4]) {
  constexpr int kStride = columns + kPiece;
  others += warp_lane() % 16 * kStride + warp_lane() / 16 * 8;
#pragma unroll
  for (int b = 0; b < n; b += 2) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      split<In>(weights[b + i / 2][i % 2 * 2], weights[b + i / 2][i % 2 * 2 + 1], high[i], low[i]);
#pragma unroll
    for (int c = 0; c < columns; c += 16) {
      if (c >= end) break;
      uint32_t pair[4];
      load_matrices<true>(pair, others + b * 8 * kStride + c);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_add<In>(sums[c / 8 + i], high, {pair[2 * i], pair[2 * i + 1]});
        multiply_add<In>(sums[c / 8 + i], low, {pair[2 * i], pair[2 * i + 1]});
      }
    }
  }
}

// The products of rows as cosines.
template <class Place, class Tiles, int n>
__device__ __forceinline__ void scale_products(const Tiles& shared, float (&products)[n][4]) {
#pragma unroll
  for (int i = 0; i < n * 4; ++i)
    // one after the other: both together may leave the range of float32
    products[i / 4][i % 4] = products[i / 4][i % 4] * shared.my_inverse[Place::row(i / 4, i % 4)] *
                             shared.other_inverse[Place::other(i / 4, i % 4)];
}

// The sum over the lanes that have columns of the same rows.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// float16 has few exponents: weights, which are at most 1, are scaled into its range
template <class In>
constexpr float kWeightScale = std::is_same_v<In, Half> ? 32768 : 1;

// Scales a tile's slopes for float16 by a power of two for each row, such that the largest so far is below 2^15, and
// takes the sums along.
template <int n, int m>
__device__ __forceinline__ void scale_into_range(float (&slopes)[n][4], float (&scale)[2], float (&sums)[m][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < n * 2; ++i) largest = fmaxf(largest, fabsf(slopes[i / 2][half * 2 + i % 2]));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    // 2^14 over the power of two in it
    const int exponent = 254 + 14 - (__float_as_int(largest) >> 23);
    const float next = fminf(scale[half], __int_as_float((exponent < 254 ? exponent : 254) << 23));
    const float ratio = next / scale[half];
#pragma unroll
    for (int i = 0; i < m * 2; ++i) sums[i / 2][half * 2 + i % 2] *= ratio;
#pragma unroll
    for (int i = 0; i < n * 2; ++i) slopes[i / 2][half * 2 + i % 2] *= next;
    scale[half] = next;
  }
}

// Stores the thread's part of a row: sums[*][half * 2] and sums[*][half * 2 + 1], scaled.
template <class In, int n>
__device__ __forceinline__ void store_row(In* to, const float (&sums)[n][4], int half, float scale, int64_t end) {
  to += MmaPlace<kTile>::other(0, 0);
#pragma unroll
  for (int b = 0; b < n; ++b)
    if (b * 8 < end)
      *reinterpret_cast<uint32_t*>(to + b * 8) = pack<In>(sums[b][half * 2] * scale, sums[b][half * 2 + 1] * scale);
}

// weighted_sum_kernel on tensor cores
template <class In, int columns, class Pairs>
__global__ void __launch_bounds__(kMmaThreads) weighted_sum_mma_kernel(Side<In> mine, Side<In> others, Sizes sizes,
                                                                      Pairs pairs, Rows<In> out,
                                                                      float* out_inverse_length) {
  using Place = MmaPlace<kSumOthers>;
  auto& shared = *shared_memory<MmaShared<In, columns, kSumOthers>>();
  const Block block(sizes.heads, mine.count);
  load_scaled_inverse(shared.my_inverse, mine, block, block.first);
  load_pieces<kTile, columns>(shared.my_rows, mine.rows, mine, block, block.first, sizes.columns, true);
  float sums[columns / 8][4] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kSumOthers) {
    // those before have been read
    __syncthreads();
    load_scaled_inverse(shared.other_inverse, others, block, first);
    load_pieces<kSumOthers, columns>(shared.other_rows, others.rows, others, block, first, sizes.columns, true);
    load_pieces<kSumOthers, columns>(shared.other_values, others.values, others, block, first, sizes.value_columns,
                                     false);
    __syncthreads();
    float weights[kSumOthers / 8][4];
    multiply_mma<columns>(shared.my_rows, shared.other_rows, sizes.columns, weights);
    scale_products<Place>(shared, weights);
    const Place place{block.batch_head, block.first, first, reinterpret_cast<int32_t*>(&shared + 1)};
    pairs.weigh(place, weights);
#pragma unroll
    for (int i = 0; i < kSumOthers / 2; ++i) weights[i / 4][i % 4] *= kWeightScale<In>;
    add_weighted_mma<columns>(weights, shared.other_values, sizes.value_columns, sums);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = block.first + Place::row(0, half * 2);
    float scale = 1 / kWeightScale<In>;
    if (out_inverse_length != nullptr) {
      float square = 0;
#pragma unroll
      for (int i = 0; i < columns / 4; ++i) {
        const float x = sums[i / 2][half * 2 + i % 2] * (1 / kWeightScale<In>);
        square += x * x;
      }
      square = quad_sum(square);
      const float inverse = square > 0 ? 1 / sqrt(square) : 0;
      scale *= inverse;
      if (row < mine.count && warp_lane() % 4 == 0) out_inverse_length[block.batch_head * mine.count + row] = inverse;
    }
    if (row < mine.count)
      store_row(out.at(block.batch, block.head, row), sums, half, scale, sizes.value_columns);
  }
}

// gradient_kernel on tensor cores; with the gradient of my values too, where there is a place for it
template <class In, int columns, bool with_values, class Pairs>
__global__ void __launch_bounds__(kMmaThreads) gradient_mma_kernel(Side<In> mine, Side<In> others, Sizes sizes,
                                                                   Pairs pairs, Rows<In> out, Rows<In> out_values) {
  using Place = MmaPlace<kGradientOthers>;
  auto& shared = *shared_memory<MmaGradientShared<In, columns>>();
  const Block block(sizes.heads, mine.count);
  load_scaled_inverse(shared.my_inverse, mine, block, block.first);
  load_pieces<kTile, columns>(shared.my_rows, mine.rows, mine, block, block.first, sizes.columns, true);
  load_pieces<kTile, columns>(shared.my_values, mine.values, mine, block, block.first, sizes.value_columns, false);
  float sums[columns / 8][4] = {}, value_sums[with_values ? columns / 8 : 1][4] = {};
  // the largest power of two, since nothing was added yet
  float scale[2] = {0x1p127f, 0x1p127f};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kGradientOthers) {
    // those before have been read
    __syncthreads();
    load_scaled_inverse(shared.other_inverse, others, block, first);
    load_pieces<kGradientOthers, columns>(shared.other_rows, others.rows, others, block, first, sizes.columns, true);
    load_pieces<kGradientOthers, columns>(shared.other_values, others.values, others, block, first,
                                          sizes.value_columns, false);
    __syncthreads();
    float weights[kGradientOthers / 8][4], products[kGradientOthers / 8][4];
    multiply_mma<columns>(shared.my_rows, shared.other_rows, sizes.columns, weights);
    scale_products<Place>(shared, weights);
    multiply_mma<columns>(shared.my_values, shared.other_values, sizes.value_columns, products);
    const Place place{block.batch_head, block.first, first, reinterpret_cast<int32_t*>(&shared + 1)};
    pairs.slopes(place, weights, products);
#pragma unroll
    for (int i = 0; i < kGradientOthers / 2; ++i) {
      products[i / 4][i % 4] *= shared.other_inverse[Place::other(i / 4, i % 4)];
      weights[i / 4][i % 4] *= kWeightScale<In>;
    }
    if constexpr (std::is_same_v<In, Half>) scale_into_range(products, scale, sums);
    add_weighted_mma<columns>(products, shared.other_rows, sizes.columns, sums);
    if constexpr (with_values)
      add_weighted_mma<columns>(weights, shared.other_values, sizes.value_columns, value_sums);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = Place::row(0, half * 2);
    const float inverse = shared.my_inverse[tile_row];
    const In* from = shared.my_rows + tile_row * shared.kStride + Place::other(0, 0);
    if constexpr (std::is_same_v<In, Half>) {
#pragma unroll
      for (int i = 0; i < columns / 4; ++i) sums[i / 2][half * 2 + i % 2] *= 1 / scale[half];
    }
    float along = 0;
#pragma unroll
    for (int i = 0; i < columns / 4; ++i)
      along += sums[i / 2][half * 2 + i % 2] * (static_cast<float>(from[i / 2 * 8 + i % 2]) * inverse);
    along = quad_sum(along);
#pragma unroll
    for (int i = 0; i < columns / 4; ++i)
      sums[i / 2][half * 2 + i % 2] -= along * (static_cast<float>(from[i / 2 * 8 + i % 2]) * inverse);
    const int64_t row = block.first + tile_row;
    if (row < mine.count) {
      store_row(out.at(block.batch, block.head, row), sums, half,
                mine.inverse_length[block.batch_head * mine.count + row], sizes.columns);
      if constexpr (with_values)
        store_row(out_values.at(block.batch, block.head, row), value_sums, half, 1 / kWeightScale<In>,
                  sizes.value_columns);
    }
  }
}

template <class In>
Side<In> side_of(const Tensor& rows, const Tensor& values, const Tensor& inverse_length) {
  return {rows_of<In>(rows), rows_of<In>(values),
          static_cast<const Accumulator<In>*>(inverse_length.const_data_ptr()), rows.size(2)};
}

// The kernels that suit the sizes and the memory, and their launches.
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
    if (suits_mma(mine) && suits_mma(others))
      with_mma_columns([&](auto columns) {
        launch_tiles(weighted_sum_mma_kernel<In, columns(), Pairs>, kMmaThreads,
                     sizeof(MmaShared<In, columns(), kSumOthers>), mine, others, pairs, mutable_rows_of<In>(out),
                     out_inverse_length);
      });
    else
      launch_tiles(columns_ <= kTile ? weighted_sum_kernel<In, 1, Pairs>
                                     : weighted_sum_kernel<In, kMaxColumns / kTile, Pairs>,
                   kThreads, sizeof(Shared<Accumulator<In>>), mine, others, pairs, mutable_rows_of<In>(out),
                   out_inverse_length);
  }

  void gradient(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out) const {
    if (suits_mma(mine) && suits_mma(others))
      with_mma_columns([&](auto columns) {
        launch_tiles(gradient_mma_kernel<In, columns(), false, Pairs>, kMmaThreads,
                     sizeof(MmaGradientShared<In, columns()>), mine, others, pairs, mutable_rows_of<In>(out),
                     Rows<In>{});
      });
    else
      launch_tiles(columns_ <= kTile ? gradient_kernel<In, 1, Pairs> : gradient_kernel<In, kMaxColumns / kTile, Pairs>,
                   kThreads, sizeof(Shared<Accumulator<In>>), mine, others, pairs, mutable_rows_of<In>(out));
  }

  // of my rows and values
  void gradients(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                 const Tensor& out_values) const {
    if (suits_mma(mine) && suits_mma(others)) {
      // computes the weights once for both
      with_mma_columns([&](auto columns) {
        launch_tiles(gradient_mma_kernel<In, columns(), true, Pairs>, kMmaThreads,
                     sizeof(MmaGradientShared<In, columns()>), mine, others, pairs, mutable_rows_of<In>(out),
                     mutable_rows_of<In>(out_values));
      });
    } else {
      gradient(mine, others, pairs, out);
      weighted_sum(mine, others, pairs, out_values, nullptr);
    }
  }

 private:
  // Whether tensor cores take the sizes, and every piece of 16 bytes is aligned.
  bool suits_mma(const Side<In>& side) const {
    if (sizeof(In) != 2 || columns_ > kMaxMmaColumns) return false;
    const auto bits = [](const Rows<const In>& rows) {
      return rows.batch_stride | rows.head_stride | rows.row_stride |
             static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.data) / sizeof(In));
    };
    const int64_t any = sizes_.columns | sizes_.value_columns | bits(side.rows) | bits(side.values);
    return any % kPiece == 0;
  }

  // Calls f with the columns that the kernels on tensor cores are compiled for.
  template <class F>
  void with_mma_columns(const F& f) const {
    if constexpr (sizeof(In) == 2) {
      if (columns_ <= kTile)
        f(std::integral_constant<int, kTile>{});
      else
        f(std::integral_constant<int, kMaxMmaColumns>{});
    }
  }

  template <class Kernel, class... Outputs>
  void launch_tiles(Kernel* kernel, int threads, size_t tile_bytes, const Side<In>& mine, const Side<In>& others,
                    const Pairs& pairs, const Outputs&... outputs) const {
    launch(device_, kernel, batches_ * sizes_.heads * divide_up(mine.count, kTile), threads,
           tile_bytes + Pairs::kScratchBytes, mine, others, sizes_, pairs, outputs...);
  }

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
  launcher.gradients(keys, queries, pairs.swapped(), grad_key, grad_value);
  launcher.gradient(queries, keys, pairs, grad_query);
}

}  // namespace
}  // namespace yoso
