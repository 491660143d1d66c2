// The kernels of tiled_attention.h on tensor cores, for 16-bit rows of up to kMaxMmaColumns columns whose pieces of 16
// bytes are aligned: a warp has 16 of the block's rows. The rows' products are those of the rows as they are, scaled
// afterwards.
#pragma once

#include <cfloat>

#include "mma.h"
#include "tile_rows.h"
#include "tiles.h"

namespace yoso {
namespace {

// see add_weighted_mma
constexpr int kFewOthers = 64;

// How a block multiplies its rows with tiles of others, of which it weighs kAtOnce at a time. Of a thread's n x 4
// pairs, as many of the n are of each 16 rows of its warp. With 32 rows, a warp loads others from shared memory half as
// often.
template <class In_, int rows, int others, int columns, int rows_of_warp = 16>
struct MmaPlace {
  using In = In_;
  using Weight = In;
  static constexpr int kRows = rows, kOthers = others, kAtOnce = others, kColumns = columns;
  static constexpr int kWarpRows = rows_of_warp, kParts = rows_of_warp / 16;
  static constexpr int kBlockThreads = rows / kWarpRows * kWarp;
  // of a row in shared memory, a piece more than it needs: against bank conflicts
  static constexpr int kStride = columns + kPiece, kAlignment = kPieceBytes;
  // whether the architecture that is compiled for has the instructions
  static constexpr bool kExists = true;
  // those that the threads have at a time
  static constexpr int kPieces = columns / kPiece, kRowsOfStep = kBlockThreads / kPieces;
  int64_t batch_head, first_row, first_other;

  // at a time on a multiprocessor, 0 for as many as the compiler comes to
  static constexpr int gradient_blocks(bool with_values, int of_slopes) {
    return columns > kTile || with_values ? 0 : of_slopes;
  }
  __device__ __forceinline__ static int row(int b, int i) {
    return threadIdx.x / kWarp * kWarpRows + b / (kOthers / 8) * 16 + warp_lane() / 4 + i / 2 * 8;
  }
  __device__ __forceinline__ static int other(int b, int i) {
    return b % (kOthers / 8) * 8 + warp_lane() % 4 * 2 + i % 2;
  }

  // Where a piece of a row is in shared memory, in elements.
  __device__ __forceinline__ static int piece(int row, int piece) { return row * kStride + piece * kPiece; }
  // The pair of columns that a lane has of every 8, of one of the rows that row gives.
  __device__ __forceinline__ static uint32_t* pair(In* rows_from, int row, int piece) {
    return reinterpret_cast<uint32_t*>(rows_from + (row * kStride + warp_lane() % 4 * 2) + piece * kPiece);
  }

  // The warp's of the block's rows, as multiply takes them.
  __device__ __forceinline__ static const In* my_rows(const In* rows_from) {
    return rows_from + (threadIdx.x / kWarp * kWarpRows + warp_lane() % 16) * kStride + warp_lane() / 16 * 8;
  }
  // out = mine . others
  template <int n>
  __device__ __forceinline__ static void multiply(const In* mine, const In* others_from, float (&out)[n][4]) {
    constexpr int kOtherTiles = n / kParts;
    const int lane = warp_lane();
    others_from += (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < n * 4; ++i) out[i / 4][i % 4] = 0;
#pragma unroll
    for (int c = 0; c < kColumns; c += 16) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) load_matrices<false>(a[part], mine + part * 16 * kStride + c);
#pragma unroll
      for (int b = 0; b < kOtherTiles; b += 2) {
        uint32_t pair[4];
        load_matrices<false>(pair, others_from + b * 8 * kStride + c);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          multiply_add<In>(out[part * kOtherTiles + b], a[part], {pair[0], pair[1]});
          multiply_add<In>(out[part * kOtherTiles + b + 1], a[part], {pair[2], pair[3]});
        }
      }
    }
  }

  // What a thread has of its warp's sums, by parts of 16 rows.
  using Sums = float[kParts][kColumns / 8][4];

  __device__ __forceinline__ static void clear(Sums& sums) { memset(sums, 0, sizeof(sums)); }
  // sums += weights others, with A as multiply_add takes it
  template <int n>
  __device__ __forceinline__ static void add(const uint32_t (&weights)[n][4], const In* others_from, Sums& sums) {
    constexpr int kSteps = n / kParts;
    others_from += warp_lane() % 16 * kStride + warp_lane() / 16 * 8;
#pragma unroll
    for (int c = 0; c < kColumns; c += 16) {
#pragma unroll
      for (int b = 0; b < kSteps; ++b) {
        uint32_t pair[4];
        load_matrices<true>(pair, others_from + b * 16 * kStride + c);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          multiply_add<In>(sums[part][c / 8], weights[part * kSteps + b], {pair[0], pair[1]});
          multiply_add<In>(sums[part][c / 8 + 1], weights[part * kSteps + b], {pair[2], pair[3]});
        }
      }
    }
  }

  // Waits until products are there; here they are.
  template <class... Products>
  __device__ __forceinline__ static void finish(Products&...) {}
  // Waits for the block's threads, for what they have copied and for their products.
  __device__ __forceinline__ static void meet() { __syncthreads(); }
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

// Rows in shared memory with their values, or without, and their factors.
template <class Place, int count, bool with_values>
struct MmaTile {
  using In = typename Place::In;
  alignas(Place::kAlignment) In rows[count * Place::kStride];
  alignas(Place::kAlignment) In values[with_values ? count * Place::kStride : kPiece];
  float factors[count];

  // Scales what this thread has copied.
  __device__ __forceinline__ void scale(const Side<In>& side, const Block& block, int64_t first) {
    const float* inverse_length = side.factors + block.batch_head * side.count;
    const int row = threadIdx.x / Place::kPieces, column = threadIdx.x % Place::kPieces * kPiece;
#pragma unroll
    for (int r = row; r < count; r += Place::kRowsOfStep) {
      if (first + r >= side.count) break;
      const float scale = power_of_two(inverse_length[first + r]);
      In* const piece = rows + r * Place::kStride + column;
#pragma unroll
      for (int c = 0; c < kPiece; ++c) piece[c] = static_cast<In>(static_cast<float>(piece[c]) * scale);
    }
    if (threadIdx.x < count) factors[threadIdx.x] /= power_of_two(factors[threadIdx.x]);
  }
};

// Copies tile after tile of `count` rows of a side, from row `first` on. A thread has some pieces of each, of the same
// rows. Where rows may be masked, it can know ahead which of the next tile are, so that no copy waits for that.
template <class Place, int count, bool masks, bool ahead = false>
class MmaReader {
  using In = typename Place::In;
  static constexpr int kSteps = (count - 1) / Place::kRowsOfStep + 1;
  static_assert(Place::kRowsOfStep % 8 == 0, "a step leaves the order of pieces as it is");

 public:
  __device__ MmaReader(const Side<In>& side, const Block& block, const Sizes& sizes, int64_t first)
      : side_(side), left_(static_cast<int>(side.count - first)) {
    const int row = threadIdx.x / Place::kPieces, column = threadIdx.x % Place::kPieces * kPiece;
    place_ = Place::piece(row, threadIdx.x % Place::kPieces);
    rows_left_ = (column < sizes.columns ? left_ : 0) - row;
    values_left_ = (column < sizes.value_columns ? left_ : 0) - row;
    rows_ = side.rows.at(block.batch, block.head, first + row) + column;
    values_ = side.values.at(block.batch, block.head, first + row) + column;
    factors_ = side.factors + block.batch_head * side.count + first;
    look_ahead();
  }

  // Starts to copy the next tile; 0 past the last row and column, and where a row has no weight.
  template <bool with_values>
  __device__ __forceinline__ void copy(MmaTile<Place, count, with_values>& to) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int r = step * Place::kRowsOfStep;
      const bool masked = masks && (ahead ? next_factors_[step] : factor_of(step)) == kMasked;
      copy_ahead<16>(to.rows + place_ + r * Place::kStride, rows_, masked || r >= rows_left_);
      rows_ += Place::kRowsOfStep * side_.rows.row_stride;
      if constexpr (with_values) {
        copy_ahead<16>(to.values + place_ + r * Place::kStride, values_, masked || r >= values_left_);
        values_ += Place::kRowsOfStep * side_.values.row_stride;
      }
    }
    const int i = threadIdx.x;
    if (i < count) copy_ahead<4>(to.factors + i, factors_ + i, i >= left_);
    factors_ += count;
    left_ -= count;
    rows_left_ -= count;
    values_left_ -= count;
    look_ahead();
  }

 private:
  __device__ __forceinline__ float factor_of(int step) const {
    const int row = threadIdx.x / Place::kPieces + step * Place::kRowsOfStep;
    return row < left_ ? __ldg(factors_ + row) : 0;
  }
  __device__ __forceinline__ void look_ahead() {
    if constexpr (ahead)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) next_factors_[step] = factor_of(step);
  }

  const Side<In>& side_;
  int left_, rows_left_, values_left_, place_;
  const In *rows_, *values_;
  const float* factors_;
  float next_factors_[kSteps];
};

// The block's rows, and two tiles of others: one is on its way while the other is multiplied.
template <class Place, bool with_values>
struct MmaShared {
  MmaTile<Place, Place::kRows, with_values> mine;
  MmaTile<Place, Place::kOthers, true> tiles[2];
};

// Copies the block's rows, and one tile of others after the other, for which it calls use(tile, from, first): for those
// of the tile from `from` on, the first of which is number `first`.
template <class Pairs, class Place, bool with_values, class In, class Use>
__device__ __forceinline__ void for_tiles(MmaShared<Place, with_values>& shared, const Side<In>& mine,
                                          const Side<In>& others, const Block& block, const Sizes& sizes,
                                          const Range& range, const Use& use) {
  MmaReader<Place, Place::kRows, Pairs::kMasksRows>(mine, block, sizes, block.first).copy(shared.mine);
  MmaReader<Place, Place::kOthers, Pairs::kMasksRows> reader(others, block, sizes, range.begin);
  reader.copy(shared.tiles[0]);
  if constexpr (kScalesRows<In>) {
    wait_for_copies();
    shared.mine.scale(mine, block, block.first);
  }
  // rows have been counted in 32 bits
  const int end = static_cast<int>(range.end);
  int current = 0;
  for (int first = static_cast<int>(range.begin); first < end; first += Place::kOthers, current ^= 1) {
    wait_for_copies();
    if constexpr (kScalesRows<In>) shared.tiles[current].scale(others, block, first);
    // for all threads' copies, and until those before have been read
    Place::meet();
    if (first + Place::kOthers < end) reader.copy(shared.tiles[current ^ 1]);
#pragma unroll 1
    for (int from = 0; from < Place::kOthers && first + from < end; from += Place::kAtOnce)
      use(shared.tiles[current], from, first + from);
  }
  // where there was no other
  wait_for_copies();
  Place::meet();
}

// Rounds a thread's weights to 16 bits, as the A of products.
template <class In, int n>
__device__ __forceinline__ void round_weights(const float (&weights)[n][4], uint32_t (&rounded)[n / 2][4]) {
#pragma unroll
  for (int i = 0; i < n * 2; ++i)
    rounded[i / 4][i % 4] = pack<In>(weights[i / 2][i % 2 * 2], weights[i / 2][i % 2 * 2 + 1]);
}

// sums += weights others, the weights as round_weights rounded them. With few others, also what was rounded off: the
// errors of many average out, where a single weight's is that of all columns.
template <class Place, class In, int n>
__device__ __forceinline__ void add_weighted_mma(const float (&weights)[n][4], const uint32_t (&rounded)[n / 2][4],
                                                 const In* others, bool few, typename Place::Sums& sums) {
  if (few) {
    uint32_t rest[n / 2][4];
#pragma unroll
    for (int i = 0; i < n * 2; ++i) {
      const float2 pair = unpack<In>(rounded[i / 4][i % 4]);
      const float* exact = &weights[i / 2][i % 2 * 2];
      rest[i / 4][i % 4] = pack<In>(exact[0] - pair.x, exact[1] - pair.y);
    }
    Place::add(rest, others, sums);
  }
  Place::add(rounded, others, sums);
}

// 1 - |cosine|, of the products of rows. Rounded to multiples of 2^-21, as the sum with kWhole is: half of one is more
// than what factors and a product are rounded by, so that rows of the same direction have 0. The root of what was
// rounded off would be far more.
template <class Place, int n>
__device__ __forceinline__ void take_versines(const float (&products)[n][4], const float* my_factors,
                                              const float* other_factors, float (&versines)[n][4]) {
  constexpr float kWhole = 4;
#pragma unroll
  for (int i = 0; i < n * 4; ++i) {
    // what is too large for a float, or the difference of two such: of a row whose inverse length is 0
    const float size = fminf(fabsf(products[i / 4][i % 4]), FLT_MAX);
    // one after the other: both together may leave the range of float32
    const float scaled = size * other_factors[Place::other(i / 4, i % 4)];
    versines[i / 4][i % 4] = fmaf(-scaled, my_factors[Place::row(i / 4, i % 4)], 1 + kWhole) - kWhole;
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
template <int n, int columns>
__device__ __forceinline__ void scale_into_range(float (&slopes)[n][4], float (&scale)[2], float (&sums)[columns][4]) {
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
    for (int i = 0; i < columns * 2; ++i) sums[i / 2][half * 2 + i % 2] *= ratio;
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
template <class Place, class Pairs, class In>
__global__ void __launch_bounds__(Place::kBlockThreads, 2)
    weighted_sum_mma_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out,
                            float* inverse_length) {
  if constexpr (!Place::kExists) return;
  constexpr int kOthers = Place::kAtOnce;
  auto& shared = *shared_memory<MmaShared<Place, false>>();
  const Block block(sizes.heads, mine.count, Place::kRows);
  const Range range = pairs.near(block.first, block.last, others.count);
  const int count = static_cast<int>(others.count), first_row = static_cast<int>(block.first);
  typename Place::Sums parts;
  Place::clear(parts);
  auto& sums = parts[0];
  float weight_sum[2] = {}, rounded_sum[4] = {};
  const bool few = count <= kFewOthers;
  const auto my_rows = Place::my_rows(shared.mine.rows);
  for_tiles<Pairs>(shared, mine, others, block, sizes, range, [&](const auto& tile, int from, int first) {
    float cosines[kOthers / 8][4], weights[kOthers / 8][4];
    Place::multiply(my_rows, tile.rows + from * Place::kStride, cosines);
    Place::finish(cosines);
    take_versines<Place>(cosines, shared.mine.factors, tile.factors + from, weights);
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
    round_weights<In>(weights, rounded);
    if constexpr (Pairs::kPositive) {
      const uint32_t ones = pack<In>(1, 1);
#pragma unroll
      for (int b = 0; b < kOthers / 16; ++b) multiply_add<In>(rounded_sum, rounded[b], {ones, ones});
    }
    add_weighted_mma<Place>(weights, rounded, tile.values + from * Place::kStride, few, parts);
  });
  Place::finish(sums);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = Place::row(0, half * 2), row = first_row + tile_row;
    float scale = 1 / kWeightScale<In>;
    if (Pairs::kMasksRows && shared.mine.factors[tile_row] == kMasked) scale = 0;
    if constexpr (Pairs::kPositive) {
      // what the weights' rounding has in common: with equal keys, all of it
      const float weight = quad_sum(weight_sum[half]), rounded = rounded_sum[half * 2];
      const float ratio = !few && rounded > 0 ? weight / rounded : 1;
#pragma unroll
      for (int i = 0; i < Place::kColumns / 4; ++i) sums[i / 2][half * 2 + i % 2] *= ratio;
    }
    if (inverse_length != nullptr) {
      float square = 0;
#pragma unroll
      for (int i = 0; i < Place::kColumns / 4; ++i) {
        const float x = sums[i / 2][half * 2 + i % 2] * (1 / kWeightScale<In>);
        square += x * x;
      }
      square = quad_sum(square);
      const float inverse = square > 0 ? 1 / sqrt(square) : 0;
      scale *= inverse;
      if (row < mine.count && warp_lane() % 4 == 0) inverse_length[block.batch_head * mine.count + row] = inverse;
    }
    if (row < mine.count)
      store_row(out.at(block.batch, block.head, row), sums, half, scale, sizes.value_columns);
  }
}

// Takes half of a thread's sums, the gradient of a row of length one, through the normalisation, but for the row's
// inverse length. pair(i) gives the two columns that the row has beside sums[i], and factor takes it to length one.
template <class In, int n, class Pair>
__device__ __forceinline__ void take_through_unit_row(const Pair& pair, float factor, int half, float (&sums)[n][4]) {
  float along = 0;
  float2 unit[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    unit[i] = unpack<In>(pair(i));
    along += sums[i][half * 2] * (unit[i].x *= factor);
    along += sums[i][half * 2 + 1] * (unit[i].y *= factor);
  }
  along = quad_sum(along);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    sums[i][half * 2] -= along * unit[i].x;
    sums[i][half * 2 + 1] -= along * unit[i].y;
  }
}

// gradient_kernel on tensor cores; with the gradient of my values too, where there is a place for it
template <class Place, bool with_values, class Pairs, class In>
__global__ void __launch_bounds__(Place::kBlockThreads, Place::gradient_blocks(with_values, Pairs::kBlocks))
    gradient_mma_kernel(Side<In> mine, Side<In> others, Sizes sizes, Pairs pairs, Rows<In> out, Rows<In> out_values) {
  if constexpr (!Place::kExists) return;
  constexpr int kOthers = Place::kAtOnce;
  auto& shared = *shared_memory<MmaShared<Place, true>>();
  const Block block(sizes.heads, mine.count, Place::kRows);
  const Range range = pairs.near(block.first, block.last, others.count);
  const int count = static_cast<int>(others.count), first_row = static_cast<int>(block.first);
  typename Place::Sums parts, value_parts;
  Place::clear(parts);
  Place::clear(value_parts);
  auto& sums = parts[0];
  // the largest power of two, since nothing was added yet
  float scale[2] = {0x1p127f, 0x1p127f};
  const bool few = count <= kFewOthers;
  const auto my_rows = Place::my_rows(shared.mine.rows), my_values = Place::my_rows(shared.mine.values);
  for_tiles<Pairs>(shared, mine, others, block, sizes, range, [&](const auto& tile, int from, int first) {
    const In *const rows = tile.rows + from * Place::kStride, *const values = tile.values + from * Place::kStride;
    const float* const factors = tile.factors + from;
    float cosines[kOthers / 8][4], weights[kOthers / 8][4], products[kOthers / 8][4];
    Place::multiply(my_rows, rows, cosines);
    Place::multiply(my_values, values, products);
    Place::finish(cosines, products);
    take_versines<Place>(cosines, shared.mine.factors, factors, weights);
    pairs.slopes(Place{block.batch_head, first_row, first}, cosines, weights, products);
#pragma unroll
    for (int i = 0; i < kOthers / 2; ++i) products[i / 4][i % 4] *= factors[Place::other(i / 4, i % 4)];
    if constexpr (std::is_same_v<In, Half>) scale_into_range(products, scale, sums);
    uint32_t rounded[kOthers / 16][4];
    round_weights<In>(products, rounded);
    add_weighted_mma<Place>(products, rounded, rows, few, parts);
    if constexpr (with_values) {
#pragma unroll
      for (int i = 0; i < kOthers / 2; ++i) weights[i / 4][i % 4] *= kWeightScale<In>;
      round_weights<In>(weights, rounded);
      add_weighted_mma<Place>(weights, rounded, values, few, value_parts);
    }
  });
  Place::finish(sums);
  if constexpr (with_values) Place::finish(value_parts[0]);
  const float slope_scale = pairs.template slope_scale<float>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = Place::row(0, half * 2), row = first_row + tile_row;
    const float my_factor = shared.mine.factors[tile_row];
    const float factor = std::is_same_v<In, Half> ? slope_scale / scale[half] : slope_scale;
#pragma unroll
    for (int i = 0; i < Place::kColumns / 4; ++i) sums[i / 2][half * 2 + i % 2] *= factor;
    take_through_unit_row<In>([&](int piece) { return *Place::pair(shared.mine.rows, tile_row, piece); }, my_factor,
                              half, sums);
    if (row < mine.count) {
      store_row(out.at(block.batch, block.head, row), sums, half, mine.factors[block.batch_head * mine.count + row],
                sizes.columns);
      if constexpr (with_values)
        store_row(out_values.at(block.batch, block.head, row), value_parts[0], half,
                  Pairs::kMasksRows && my_factor == kMasked ? 0 : 1 / kWeightScale<In>, sizes.value_columns);
    }
  }
}

}  // namespace
}  // namespace yoso
