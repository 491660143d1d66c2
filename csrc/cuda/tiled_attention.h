// Attention whose weights are computed in tiles, never as an N x M matrix, and its backward: a block has a tile of rows
// and loops over tiles of the others.
//
// Sums over keys for a tile of queries and over queries for a tile of keys are the same kernels: "mine" are the rows of
// the block's side, "others" those of the other one. What the weights are, and which pairs have any, is for a class of
// pairs to say:
//     swapped()                       the pairs with the sides swapped
//     kSumOthers                      others in a tile of up to 64 columns, by the registers that weigh takes
//     kMasksRows                      whether rows may have no weight, whatever stands in them
//     kPositive                       whether no weight is negative
//     is_real(batch_head, row)        whether a row of mine has any weight
//     near(first, last, count)        the run of others, of `count`, that my rows first..last need
//     weigh(place, signed_as, x)      turns the versines x, 1 less the size of a cosine, into weights; the cosines have
//                                     the signs of signed_as
//     slopes(place, signed_as, x, products)
//                                     the like, and multiplies products by the slopes of the weights
//     slope_scale()                   what the slopes are to be multiplied by besides
// The threads of a warp call weigh and slopes together, each with n x 4 pairs of a tile, which place says; rows without
// a weight, and places past the last row, may get any.
#pragma once

#include <cfloat>

#include "mma.h"
#include "rows.h"

namespace yoso {
namespace {

// rows of a block, where nothing else is said
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

  __device__ Block(int64_t heads, int64_t count, int rows = kTile) {
    const int64_t tiles = (count + rows - 1) / rows;
    batch_head = blockIdx.x / tiles;
    batch = batch_head / heads;
    head = batch_head % heads;
    first = blockIdx.x % tiles * rows;
    last = first + rows < count ? first + rows : count;
  }
};

__device__ __forceinline__ float quick_sqrt(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// Horner's rule, from the highest power.
__device__ __forceinline__ float polynomial(float, float sum) { return sum; }
template <class... Others>
__device__ __forceinline__ float polynomial(float x, float sum, float next, Others... others) {
  return polynomial(x, sum * x + next, others...);
}

// 1 - acos(x) / pi, for x of the sign of `signed_as` and versine 1 - |x|, as precise as W, the type of the weights; not
// a number where either is none.
template <class W>
__device__ __forceinline__ double angle_complement(double signed_as, double versine) {
  return 0.5 + copysign(asin(1 - versine), signed_as) / 3.14159265358979323846;
}
// acos(1 - t) / pi = sqrt(t) * polynomial(t) on [0, 1], minimax fits. t may be negative by rounding: then its size is
// the error that it has anyhow.
template <class W>
__device__ __forceinline__ float angle_complement(float signed_as, float t) {
  float ratio;
  if constexpr (std::is_same_v<W, BFloat16>)
    ratio = polynomial(t, 0.0028314807f, 0.00023319625f, 0.0093952846f, 0.037378907f, 0.45016113f);
  else if constexpr (std::is_same_v<W, Half>)
    ratio = polynomial(t, 0.0014137337f, -0.0008178968f, 0.0035374586f, 0.0081703179f, 0.037538614f, 0.45015776f);
  else
    ratio = polynomial(t, 0.00040901595f, -0.0007127421f, 0.0011679033f, 0.00040145381f, 0.0026388096f, 0.0084233582f,
                       0.03751405f, 0.45015815f);
  // the complement of the angle where x is negative
  return 0.5f + copysignf(0.5f - quick_sqrt(fabsf(t)) * ratio, signed_as);
}

// 1 / sqrt(1 - x^2), 0 where it diverges
template <class T>
__device__ __forceinline__ T inverse_sine(T versine) {
  const T square = versine * (2 - versine);
  return square > 0 ? rsqrt(square) : 0;
}

// x = x^exponent, where the exponent has `bits` bits below the highest
template <int bits, class T, int n>
__device__ __forceinline__ void power_of_bits(T (&x)[n][4], int exponent) {
  T base[n][4];
#pragma unroll
  for (int i = 0; i < n * 4; ++i) base[i / 4][i % 4] = x[i / 4][i % 4];
#pragma unroll
  for (int bit = bits - 1; bit >= 0; --bit) {
#pragma unroll
    for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] *= x[i / 4][i % 4];
    if (exponent >> bit & 1) {
#pragma unroll
      for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] *= base[i / 4][i % 4];
    }
  }
}
// x = x^exponent, of 1 to 63; without a loop, which would have to copy x
template <class T, int n>
__device__ __forceinline__ void power(T (&x)[n][4], int exponent) {
  if (exponent >= 32)
    power_of_bits<5>(x, exponent);
  else if (exponent >= 16)
    power_of_bits<4>(x, exponent);
  else if (exponent >= 8)
    power_of_bits<3>(x, exponent);
  else if (exponent >= 4)
    power_of_bits<2>(x, exponent);
  else if (exponent >= 2)
    power_of_bits<1>(x, exponent);
}

// Turns versines, of cosines that have the signs of signed_as, into p(cosine).
template <class W, class T, int n>
__device__ __forceinline__ void kernel_weights(const T (&signed_as)[n][4], T (&versines)[n][4], int tau) {
#pragma unroll
  for (int i = 0; i < n * 4; ++i)
    versines[i / 4][i % 4] = angle_complement<W>(signed_as[i / 4][i % 4], versines[i / 4][i % 4]);
  power(versines, tau);
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
  Tensor inverse_length = empty_tensor(rows, {B, H, N}, length_dtype(rows));
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
  T my_inverse[kTile], other_inverse[kTile];
};

// Loads the inverse lengths of rows first..first + kTile; kMasked past the end.
template <class T>
__device__ __forceinline__ void load_inverse(T* to, const T* inverse_length, int64_t batch_head, int64_t first,
                                             int64_t count) {
  for (int64_t i = threadIdx.x; i < kTile; i += kThreads)
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
__device__ __forceinline__ void multiply_rows(Shared<T>& shared, const Rows<const In>& mine,
                                              const Rows<const In>& others, const Block& block, int64_t first_other,
                                              int64_t columns, bool unit, T (&out)[4][4]) {
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
__global__ void __launch_bounds__(kThreads, kBlocks)
    weighted_sum_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out,
                        Accumulator<In>* out_inverse_length) {
  using T = Accumulator<In>;
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_inverse(shared.my_inverse, mine.inverse_length, block.batch_head, block.first, mine.count);
  T sums[column_tiles][4][4] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_inverse(shared.other_inverse, others.inverse_length, block.batch_head, first, others.count);
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
    T scale = shared.my_inverse[Place::row(b, 0)] == kMasked ? 0 : 1;
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
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradient_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out) {
  using T = Accumulator<In>;
  auto& shared = *shared_memory<Shared<T>>();
  const Block block(sizes.heads, mine.count);
  load_inverse(shared.my_inverse, mine.inverse_length, block.batch_head, block.first, mine.count);
  T sums[column_tiles][4][4] = {};
  const Range range = pairs.near(block.first, block.last, others.count);
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    __syncthreads();
    load_inverse(shared.other_inverse, others.inverse_length, block.batch_head, first, others.count);
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
            static_cast<In>(inverse == kMasked ? 0 : (sums[i / 4][b][i % 4] - along * unit(column)) * inverse * scale);
    }
  }
}

// 16-bit rows of up to kMaxMmaColumns columns whose pieces of 16 bytes are aligned, on tensor cores: a warp has 16 of
// the block's rows. The rows' products are those of the rows as they are, scaled afterwards.
constexpr int kWarpRows = 16;
constexpr int kMaxMmaColumns = 128;
// 16-bit elements in 16 bytes, which a row in shared memory has more than it needs: against bank conflicts
constexpr int kPiece = 8;
// see add_weighted_mma
constexpr int kFewOthers = 64;

__device__ __forceinline__ int warp_lane() { return threadIdx.x % kWarp; }

template <class In_, int rows, int others, int columns>
struct MmaPlace {
  using In = In_;
  using Weight = In;
  static constexpr int kRows = rows, kOthers = others;
  static constexpr int kBlockThreads = rows / kWarpRows * kWarp;
  // of a row in shared memory
  static constexpr int kStride = columns + kPiece;
  // those that the threads have at a time
  static constexpr int kPieces = columns / kPiece, kRowsOfStep = kBlockThreads / kPieces;
  int64_t batch_head, first_row, first_other;

  __device__ __forceinline__ static int row(int, int i) {
    return threadIdx.x / kWarp * kWarpRows + warp_lane() / 4 + i / 2 * 8;
  }
  __device__ __forceinline__ static int other(int b, int i) { return b * 8 + warp_lane() % 4 * 2 + i % 2; }
};
// as many rows and others as leave shared memory to other blocks
template <class In, int columns, class Pairs>
using SumPlace = MmaPlace<In, 8192 / columns, Pairs::kSumOthers * 64 / columns, columns>;
// and registers to the gradient's sums
template <class In, int columns>
using GradientPlace = MmaPlace<In, 64, 32, columns>;

// float16 has few exponents: rows are scaled by the power of two in their inverse length
template <class In>
constexpr bool kScalesRows = std::is_same_v<In, Half>;

__device__ __forceinline__ float power_of_two(float inverse) {
  return inverse > 0 ? __int_as_float(__float_as_int(inverse) & 0x7f800000) : 1;
}

// Rows in shared memory with their values, or without, and their inverse lengths.
template <class Place, int count, bool with_values>
struct MmaTile {
  using In = typename Place::In;
  In rows[count * Place::kStride], values[with_values ? count * Place::kStride : kPiece];
  float inverse[count];

  // Scales what this thread has copied.
  __device__ __forceinline__ void scale(const Side<In>& side, const Block& block, int64_t first) {
    const float* inverse_length = side.inverse_length + block.batch_head * side.count;
    const int row = threadIdx.x / Place::kPieces, column = threadIdx.x % Place::kPieces * kPiece;
#pragma unroll
    for (int r = row; r < count; r += Place::kRowsOfStep) {
      if (first + r >= side.count) break;
      const float scale = power_of_two(inverse_length[first + r]);
      In* const piece = rows + r * Place::kStride + column;
#pragma unroll
      for (int c = 0; c < kPiece; ++c) piece[c] = static_cast<In>(static_cast<float>(piece[c]) * scale);
    }
    if (threadIdx.x < count) inverse[threadIdx.x] /= power_of_two(inverse[threadIdx.x]);
  }
};

// Copies tile after tile of a side, from row `first` on. A thread has some pieces of each, of the same rows.
template <class Place>
class MmaReader {
  using In = typename Place::In;

 public:
  __device__ MmaReader(const Side<In>& side, const Block& block, const Sizes& sizes, int64_t first)
      : side_(side), left_(static_cast<int>(side.count - first)) {
    const int row = threadIdx.x / Place::kPieces, column = threadIdx.x % Place::kPieces * kPiece;
    place_ = row * Place::kStride + column;
    rows_left_ = (column < sizes.columns ? left_ : 0) - row;
    values_left_ = (column < sizes.value_columns ? left_ : 0) - row;
    rows_ = side.rows.at(block.batch, block.head, first + row) + column;
    values_ = side.values.at(block.batch, block.head, first + row) + column;
    inverse_length_ = side.inverse_length + block.batch_head * side.count + first;
  }

  // Starts to copy the next tile; 0 past the last row and column, and where a row has no weight.
  template <class Pairs, int count, bool with_values>
  __device__ __forceinline__ void copy(MmaTile<Place, count, with_values>& to) {
#pragma unroll
    for (int r = 0; r < count; r += Place::kRowsOfStep) {
      const int row = threadIdx.x / Place::kPieces + r;
      const bool masked = Pairs::kMasksRows && row < left_ && inverse_length_[row] == kMasked;
      copy_ahead<16>(to.rows + place_ + r * Place::kStride, rows_, masked || r >= rows_left_);
      rows_ += Place::kRowsOfStep * side_.rows.row_stride;
      if constexpr (with_values) {
        copy_ahead<16>(to.values + place_ + r * Place::kStride, values_, masked || r >= values_left_);
        values_ += Place::kRowsOfStep * side_.values.row_stride;
      }
    }
    const int i = threadIdx.x;
    if (i < count) copy_ahead<4>(to.inverse + i, inverse_length_ + i, i >= left_);
    inverse_length_ += count;
    left_ -= count;
    rows_left_ -= count;
    values_left_ -= count;
  }

 private:
  const Side<In>& side_;
  int left_, rows_left_, values_left_, place_;
  const In *rows_, *values_;
  const float* inverse_length_;
};

// The block's rows, and two tiles of others: one is on its way while the other is multiplied.
template <class Place, bool with_values>
struct MmaShared {
  MmaTile<Place, Place::kRows, with_values> mine;
  MmaTile<Place, Place::kOthers, true> tiles[2];
};

// Copies the block's rows, and one tile of others after the other, for which it calls use(first, tile).
template <class Pairs, class Place, bool with_values, class In, class Use>
__device__ __forceinline__ void for_tiles(MmaShared<Place, with_values>& shared, const Side<In>& mine,
                                          const Side<In>& others, const Block& block, const Sizes& sizes,
                                          const Range& range, const Use& use) {
  MmaReader<Place>(mine, block, sizes, block.first).template copy<Pairs>(shared.mine);
  MmaReader<Place> reader(others, block, sizes, range.begin);
  reader.template copy<Pairs>(shared.tiles[0]);
  if constexpr (kScalesRows<In>) {
    wait_for_copies();
    shared.mine.scale(mine, block, block.first);
  }
  // rows have been counted in 32 bits
  const int end = static_cast<int>(range.end);
  int current = 0;
  for (int first = static_cast<int>(range.begin); first < end; first += Place::kOthers, current ^= 1) {
    auto& tile = shared.tiles[current];
    wait_for_copies();
    if constexpr (kScalesRows<In>) tile.scale(others, block, first);
    // for all threads' copies, and until those before have been read
    __syncthreads();
    if (first + Place::kOthers < end) reader.template copy<Pairs>(shared.tiles[current ^ 1]);
    use(first, tile);
  }
  // where there was no other
  wait_for_copies();
  __syncthreads();
}

// out = the warp's rows . others
template <int columns, class In, int n>
__device__ __forceinline__ void multiply_mma(const In* mine, const In* others, float (&out)[n][4]) {
  constexpr int kStride = columns + kPiece;
  const int lane = warp_lane();
  mine += (threadIdx.x / kWarp * kWarpRows + lane % 16) * kStride + lane / 16 * 8;
  others += (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int i = 0; i < n * 4; ++i) out[i / 4][i % 4] = 0;
#pragma unroll
  for (int c = 0; c < columns; c += 16) {
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

// sums += weights others, with A as multiply_add takes it
template <int columns, class In, int n>
__device__ __forceinline__ void add_rounded(const uint32_t (&weights)[n][4], const In* others,
                                            float (&sums)[columns / 8][4]) {
  constexpr int kStride = columns + kPiece;
  others += warp_lane() % 16 * kStride + warp_lane() / 16 * 8;
#pragma unroll
  for (int c = 0; c < columns; c += 16) {
#pragma unroll
    for (int b = 0; b < n; ++b) {
      uint32_t pair[4];
      load_matrices<true>(pair, others + b * 16 * kStride + c);
      multiply_add<In>(sums[c / 8], weights[b], {pair[0], pair[1]});
      multiply_add<In>(sums[c / 8 + 1], weights[b], {pair[2], pair[3]});
    }
  }
}

// sums += weights others, the weights rounded to 16 bits, which become `rounded`. With few others, also what is rounded
// off: the errors of many average out, where a single weight's is that of all columns.
template <int columns, class In, int n>
__device__ __forceinline__ void add_weighted_mma(const float (&weights)[n][4], const In* others, bool few,
                                                 float (&sums)[columns / 8][4], uint32_t (&rounded)[n / 2][4]) {
#pragma unroll
  for (int i = 0; i < n * 2; ++i)
    rounded[i / 4][i % 4] = pack<In>(weights[i / 2][i % 2 * 2], weights[i / 2][i % 2 * 2 + 1]);
  if (few) {
    uint32_t rest[n / 2][4];
#pragma unroll
    for (int i = 0; i < n * 2; ++i) {
      In pair[2];
      memcpy(pair, &rounded[i / 4][i % 4], sizeof(pair));
      const float* exact = &weights[i / 2][i % 2 * 2];
      rest[i / 4][i % 4] = pack<In>(exact[0] - static_cast<float>(pair[0]), exact[1] - static_cast<float>(pair[1]));
    }
    add_rounded<columns>(rest, others, sums);
  }
  add_rounded<columns>(rounded, others, sums);
}

// 1 - |cosine|, of the products of rows.
template <class Place, int n>
__device__ __forceinline__ void take_versines(const float (&products)[n][4], const float* my_inverse,
                                              const float* other_inverse, float (&versines)[n][4]) {
#pragma unroll
  for (int i = 0; i < n * 4; ++i) {
    // what is too large for a float, or the difference of two such: of a row whose inverse length is 0
    const float size = fminf(fabsf(products[i / 4][i % 4]), FLT_MAX);
    // one after the other: both together may leave the range of float32
    versines[i / 4][i % 4] =
        1 - size * other_inverse[Place::other(i / 4, i % 4)] * my_inverse[Place::row(i / 4, i % 4)];
  }
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
  to += warp_lane() % 4 * 2;
#pragma unroll
  for (int b = 0; b < n; ++b)
    if (b * 8 < end)
      *reinterpret_cast<uint32_t*>(to + b * 8) = pack<In>(sums[b][half * 2] * scale, sums[b][half * 2 + 1] * scale);
}

// weighted_sum_kernel on tensor cores
template <class In, int columns, class Pairs>
__global__ void __launch_bounds__(SumPlace<In, columns, Pairs>::kBlockThreads, 2)
    weighted_sum_mma_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out,
                            float* out_inverse_length) {
  using Place = SumPlace<In, columns, Pairs>;
  constexpr int kOthers = Place::kOthers;
  auto& shared = *shared_memory<MmaShared<Place, false>>();
  const Block block(sizes.heads, mine.count, Place::kRows);
  const Range range = pairs.near(block.first, block.last, others.count);
  const int count = static_cast<int>(others.count), first_row = static_cast<int>(block.first);
  float sums[columns / 8][4] = {}, weight_sum[2] = {}, rounded_sum[4] = {};
  const bool few = count <= kFewOthers;
  for_tiles<Pairs>(shared, mine, others, block, sizes, range, [&](int first, const auto& tile) {
    float cosines[kOthers / 8][4], weights[kOthers / 8][4];
    multiply_mma<columns>(shared.mine.rows, tile.rows, cosines);
    take_versines<Place>(cosines, shared.mine.inverse, tile.inverse, weights);
    const Place place{block.batch_head, first_row, first};
    pairs.weigh(place, cosines, weights);
    if (Pairs::kPositive && first + kOthers > count) {
      // they would count in weight_sum; a branch, not so many selections in every tile
      asm volatile("");
#pragma unroll
      for (int i = 0; i < kOthers / 2; ++i)
        if (first + Place::other(i / 4, i % 4) >= count) weights[i / 4][i % 4] = 0;
    }
#pragma unroll
    for (int i = 0; i < kOthers / 2; ++i) {
      weights[i / 4][i % 4] *= kWeightScale<In>;
      weight_sum[i % 4 / 2] += weights[i / 4][i % 4];
    }
    uint32_t rounded[kOthers / 16][4];
    add_weighted_mma<columns>(weights, tile.values, few, sums, rounded);
    if constexpr (Pairs::kPositive) {
      const uint32_t ones = pack<In>(1, 1);
#pragma unroll
      for (int b = 0; b < kOthers / 16; ++b) multiply_add<In>(rounded_sum, rounded[b], {ones, ones});
    }
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = Place::row(0, half * 2), row = first_row + tile_row;
    float scale = 1 / kWeightScale<In>;
    if (Pairs::kMasksRows && shared.mine.inverse[tile_row] == kMasked) scale = 0;
    if constexpr (Pairs::kPositive) {
      // what the weights' rounding has in common: with equal keys, all of it
      const float weight = quad_sum(weight_sum[half]), rounded = rounded_sum[half * 2];
      const float ratio = !few && rounded > 0 ? weight / rounded : 1;
#pragma unroll
      for (int i = 0; i < columns / 4; ++i) sums[i / 2][half * 2 + i % 2] *= ratio;
    }
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
__global__ void __launch_bounds__(GradientPlace<In, columns>::kBlockThreads)
    gradient_mma_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out, Rows<In> out_values) {
  using Place = GradientPlace<In, columns>;
  constexpr int kOthers = Place::kOthers;
  auto& shared = *shared_memory<MmaShared<Place, true>>();
  const Block block(sizes.heads, mine.count, Place::kRows);
  const Range range = pairs.near(block.first, block.last, others.count);
  const int count = static_cast<int>(others.count), first_row = static_cast<int>(block.first);
  float sums[columns / 8][4] = {}, value_sums[with_values ? columns / 8 : 1][4] = {};
  // the largest power of two, since nothing was added yet
  float scale[2] = {0x1p127f, 0x1p127f};
  const bool few = count <= kFewOthers;
  for_tiles<Pairs>(shared, mine, others, block, sizes, range, [&](int first, const auto& tile) {
    float cosines[kOthers / 8][4], weights[kOthers / 8][4], products[kOthers / 8][4];
    multiply_mma<columns>(shared.mine.rows, tile.rows, cosines);
    take_versines<Place>(cosines, shared.mine.inverse, tile.inverse, weights);
    multiply_mma<columns>(shared.mine.values, tile.values, products);
    const Place place{block.batch_head, first_row, first};
    pairs.slopes(place, cosines, weights, products);
#pragma unroll
    for (int i = 0; i < kOthers / 2; ++i) {
      products[i / 4][i % 4] *= tile.inverse[Place::other(i / 4, i % 4)];
      weights[i / 4][i % 4] *= kWeightScale<In>;
    }
    if constexpr (std::is_same_v<In, Half>) scale_into_range(products, scale, sums);
    uint32_t rounded[kOthers / 16][4];
    add_weighted_mma<columns>(products, tile.rows, few, sums, rounded);
    if constexpr (with_values) add_weighted_mma<columns>(weights, tile.values, few, value_sums, rounded);
  });
  const float slope_scale = pairs.template slope_scale<float>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = Place::row(0, half * 2);
    const float inverse = shared.mine.inverse[tile_row];
    const In* from = shared.mine.rows + tile_row * Place::kStride + Place::other(0, 0);
    const float factor = std::is_same_v<In, Half> ? slope_scale / scale[half] : slope_scale;
#pragma unroll
    for (int i = 0; i < columns / 4; ++i) sums[i / 2][half * 2 + i % 2] *= factor;
    float along = 0;
#pragma unroll
    for (int i = 0; i < columns / 4; ++i)
      along += sums[i / 2][half * 2 + i % 2] * (static_cast<float>(from[i / 2 * 8 + i % 2]) * inverse);
    along = quad_sum(along);
#pragma unroll
    for (int i = 0; i < columns / 4; ++i)
      sums[i / 2][half * 2 + i % 2] -= along * (static_cast<float>(from[i / 2 * 8 + i % 2]) * inverse);
    const int row = first_row + tile_row;
    if (row < mine.count) {
      store_row(out.at(block.batch, block.head, row), sums, half,
                mine.inverse_length[block.batch_head * mine.count + row], sizes.columns);
      if constexpr (with_values)
        store_row(out_values.at(block.batch, block.head, row), value_sums, half,
                  Pairs::kMasksRows && inverse == kMasked ? 0 : 1 / kWeightScale<In>, sizes.value_columns);
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
        using Place = SumPlace<In, columns(), Pairs>;
        launch_tiles<Place, MmaShared<Place, false>>(weighted_sum_mma_kernel<In, columns(), Pairs>, mine, others, pairs,
                                                     mutable_rows_of<In>(out), out_inverse_length);
      });
    else
      launch_tiles<Place, Shared<Accumulator<In>>>(
          columns_ <= kTile ? weighted_sum_kernel<In, 1, Pairs> : weighted_sum_kernel<In, kMaxColumns / kTile, Pairs>,
          mine, others, pairs, mutable_rows_of<In>(out), out_inverse_length);
  }

  void gradient(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out) const {
    if (suits_mma(mine) && suits_mma(others))
      with_mma_columns([&](auto columns) {
        using Place = GradientPlace<In, columns()>;
        launch_tiles<Place, MmaShared<Place, true>>(gradient_mma_kernel<In, columns(), false, Pairs>, mine, others,
                                                    pairs, mutable_rows_of<In>(out), Rows<In>{});
      });
    else
      launch_tiles<Place, Shared<Accumulator<In>>>(
          columns_ <= kTile ? gradient_kernel<In, 1, Pairs> : gradient_kernel<In, kMaxColumns / kTile, Pairs>, mine,
          others, pairs, mutable_rows_of<In>(out));
  }

  // of my rows and values
  void gradients(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                 const Tensor& out_values) const {
    if (suits_mma(mine) && suits_mma(others)) {
      // computes the weights once for both
      with_mma_columns([&](auto columns) {
        using Place = GradientPlace<In, columns()>;
        launch_tiles<Place, MmaShared<Place, true>>(gradient_mma_kernel<In, columns(), true, Pairs>, mine, others,
                                                    pairs, mutable_rows_of<In>(out), mutable_rows_of<In>(out_values));
      });
    } else {
      gradient(mine, others, pairs, out);
      weighted_sum(mine, others, pairs, out_values, nullptr);
    }
  }

 private:
  // Whether tensor cores take the sizes, and every piece of 16 bytes is aligned.
  bool suits_mma(const Side<In>& side) const {
    return sizeof(In) == 2 && columns_ <= kMaxMmaColumns && aligned(side.rows, sizes_.columns) &&
           aligned(side.values, sizes_.value_columns);
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

  template <class Place, class Shared, class Kernel, class... Outputs>
  void launch_tiles(Kernel* kernel, const Side<In>& mine, const Side<In>& others, const Pairs& pairs,
                    const Outputs&... outputs) const {
    launch(device_, kernel, batches_ * sizes_.heads * divide_up(mine.count, Place::kRows), Place::kBlockThreads,
           sizeof(Shared), mine, others, sizes_, pairs, outputs...);
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
