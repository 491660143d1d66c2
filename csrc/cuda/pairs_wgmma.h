// The gradients by pairs for sm_90 and rows of up to 64 columns: a block has three warpgroups, each 64 of its keys,
// which they multiply with tiles of 64 queries (wgmma.h). Tensor cores do so on their own, while the warps weigh pairs.
// After three tiles the groups meet, and add up what the queries of these get of all the block's keys, a tile each. How
// many hash functions agree has been counted before (pair_counts.h).
#pragma once

#include "pair_counts.h"
#include "pairs.h"
#include "wgmma.h"

namespace yoso {
namespace {

struct WgmmaPlace {
  // tiles in shared memory: one for each group
  static constexpr int kGroups = 3, kTiles = kGroups, kOthers = 64;
  static constexpr int kRows = kGroups * kWgmmaRows, kBlockThreads = kGroups * kWarpgroup, kBlocks = 1;
  // of a block
  static constexpr int kStrips = kRows / kStripKeys;
};
static_assert(WgmmaPlace::kOthers == kTileQueries, "tiles are those of the counts");

// The rows of a side and of a head, with their values and factors, and from one row to the next.
struct WgmmaRows {
  const BFloat16 *rows, *values;
  const float* factors;
  uint32_t row_bytes, value_bytes;
  int count;

  __device__ WgmmaRows(const Side<BFloat16>& side, const Block& block)
      : rows(side.rows.at(block.batch, block.head, 0)),
        values(side.values.at(block.batch, block.head, 0)),
        factors(side.factors + block.batch_head * side.count),
        row_bytes(static_cast<uint32_t>(side.rows.row_stride * sizeof(BFloat16))),
        value_bytes(static_cast<uint32_t>(side.values.row_stride * sizeof(BFloat16))),
        count(static_cast<int>(side.count)) {}
};

struct WgmmaMemory {
  static constexpr int kMatrix = 64 * kWgmmaColumns, kTiles = WgmmaPlace::kTiles, kRows = WgmmaPlace::kRows;
  alignas(kSwizzleBytes) BFloat16 keys[kRows * kWgmmaColumns], values[kRows * kWgmmaColumns];
  // of the tiles at hand and of the next ones, by turns
  BFloat16 queries[2][kTiles][kMatrix], grads[2][kTiles][kMatrix];
  // of every pair, by keys, the weight of the query for the key's sum and of the key for the query's
  BFloat16 slopes[kTiles][WgmmaPlace::kGroups * kMatrix];
  float key_factors[kRows], query_factors[2][kRows];
  // those of tiles before these are copied, which say what of them is masked
  float next_factors[2][kRows];
  // of the head, and what the block stores for its queries: registers are short
  WgmmaRows all_queries;
  BFloat16* list;
};
static_assert(sizeof(WgmmaMemory) <= 227 << 10, "a block has 227 KB");
static_assert(WgmmaPlace::kRows == WgmmaPlace::kTiles * WgmmaPlace::kOthers, "as many queries as keys are copied");

__device__ __forceinline__ void copy_factors(const WgmmaRows& from, int first, float* to) {
  const int row = first + threadIdx.x;
  if (threadIdx.x < WgmmaPlace::kRows) copy_ahead<4>(to + threadIdx.x, from.factors + row, row >= from.count);
}

// Copies kRows rows from `first` on, with their values, to matrices in shared memory; 0 past the last row and column,
// and where the factors, which are there, say that the row is masked.
__device__ __forceinline__ void copy_rows(const WgmmaRows& from, int first, const Sizes& sizes, const float* factors,
                                          BFloat16* rows, BFloat16* values) {
  constexpr int kPieces = kWgmmaColumns / kPiece, kStep = WgmmaPlace::kBlockThreads / kPieces;
  static_assert(kStep % 8 == 0 && WgmmaPlace::kRows % kStep == 0, "a step leaves the order of pieces as it is");
  const int copied = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  const bool no_row = piece * kPiece >= sizes.columns, no_value = piece * kPiece >= sizes.value_columns;
  const uint32_t place = swizzled_piece(copied, piece);
  const uint32_t to_rows = static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + place;
  const uint32_t to_values = static_cast<uint32_t>(__cvta_generic_to_shared(values)) + place;
  const BFloat16* const rows_from = row_at(from.rows, first + copied, from.row_bytes) + piece * kPiece;
  const BFloat16* const values_from = row_at(from.values, first + copied, from.value_bytes) + piece * kPiece;
#pragma unroll
  for (int step = 0; step < WgmmaPlace::kRows; step += kStep) {
    const bool clear = first + copied + step >= from.count || factors[copied + step] == kMasked;
    copy_ahead<16>(to_rows + step * kSwizzledRowBytes, row_at(rows_from, step, from.row_bytes), clear || no_row);
    copy_ahead<16>(to_values + step * kSwizzledRowBytes, row_at(values_from, step, from.value_bytes),
                   clear || no_value);
  }
}

// Scales the block's keys, which are there, by the power of two in their factors, and these.
__device__ __forceinline__ void scale_keys(WgmmaMemory& memory) {
  constexpr int kPieces = kWgmmaColumns / kPiece;
  auto* const pieces = reinterpret_cast<uint4*>(memory.keys);
#pragma unroll
  for (int i = threadIdx.x; i < WgmmaPlace::kRows * kPieces; i += WgmmaPlace::kBlockThreads) {
    const float scale = power_of_two(memory.key_factors[i / kPieces]);
    uint32_t pairs[kPiece / 2];
    load(reinterpret_cast<const uint32_t*>(pieces + i), pairs);
    for (uint32_t& pair : pairs) {
      const float2 x = unpack<BFloat16>(pair);
      pair = pack<BFloat16>(x.x * scale, x.y * scale);
    }
    store(pairs, reinterpret_cast<uint32_t*>(pieces + i));
  }
  __syncthreads();
  if (threadIdx.x < WgmmaPlace::kRows) memory.key_factors[threadIdx.x] /= power_of_two(memory.key_factors[threadIdx.x]);
}

// Two of four bytes up to kMostCount, the lower or the upper two, as numbers: a conversion takes four times as long.
__device__ __forceinline__ uint32_t widen_counts(uint32_t bytes, int upper) {
  constexpr uint32_t k128 = 0x43004300, kOne = 0x3F803F80;
  uint32_t pair = __byte_perm(bytes, k128, upper == 0 ? 0x5150 : 0x5352);
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(kOne), "r"(k128 | 0x80008000));
  return pair;
}

// One of such bytes times a factor: as bits of a number it is 128 more, which the same instruction takes off again.
__device__ __forceinline__ float multiply_count(uint32_t bytes, int byte, float factor) {
  constexpr uint32_t k128 = 0x43004300;
  return fmaf(__uint_as_float(__byte_perm(bytes, k128, 0x7044 | byte << 8)), factor, -128 * factor);
}

__global__ void __launch_bounds__(WgmmaPlace::kBlockThreads, WgmmaPlace::kBlocks)
    gradients_by_warpgroups_kernel(Side<BFloat16> keys, Side<BFloat16> queries, Sizes sizes, CollidingPairs pairs,
                                   Rows<BFloat16> grad_key, Rows<BFloat16> grad_value, QueryAddends addends) {
#if YOSO_HAS_WGMMA
  using Place = WgmmaPlace;
  constexpr int kMatrix = WgmmaMemory::kMatrix, kOthers = Place::kOthers, kColumns = kWgmmaColumns / 8;
  constexpr int kTiles = Place::kTiles, kQueries = kTiles * kOthers;
  auto& memory = *shared_memory<WgmmaMemory>();
  const int count = static_cast<int>(queries.count), columns = static_cast<int>(sizes.columns);
  // the same in all of a warp's lanes, as the compiler is to know
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kWarpgroup), 0);
  // of the lane's rows the first, found again each time, as registers are short
  const auto my_row = [] { return static_cast<int>(unknown(threadIdx.x)) / kWarp * 16 + warp_lane() / 4; };
  // of the lane's pairs of a tile, by 32 queries; nobody reads them soon again
  uint32_t counts[2][4];
  const auto* tile_counts =
      reinterpret_cast<const uint4*>(pairs.counts + (int64_t{blockIdx.x} * Place::kStrips + threadIdx.x / kWarp) *
                                                  count_tiles(count) * kTileCounts) +
      warp_lane();
  const auto load_counts = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 bytes = __ldcs(tile_counts + i * kWarp);
      memcpy(counts[i], &bytes, sizeof(bytes));
    }
    tile_counts += kTileCounts / kPieceBytes;
  };
  load_counts();

  // nothing of it is to be kept until the end
  const auto make_block = [&] {
    const uint32_t number = unknown(blockIdx.x), lists = unknown(static_cast<uint32_t>(addends.lists));
    return Block(unknown(static_cast<uint32_t>(sizes.heads)), keys.count, Place::kRows,
                 addends.first_head + number / lists, addends.first_list + number % lists);
  };
  // Copies tiles, whose factors are there, and what says what of the next ones is masked. There are always as many:
  // past the last query they are zero.
  const auto copy_tiles = [&](int first, int turn) {
    const WgmmaRows& all = memory.all_queries;
    copy_rows(all, first, sizes, memory.next_factors[turn], memory.queries[turn][0], memory.grads[turn][0]);
    copy_factors(all, first, memory.query_factors[turn]);
    copy_factors(all, first + kQueries, memory.next_factors[turn ^ 1]);
  };
  {
    const Block block = make_block();
    const WgmmaRows all_keys(keys, block), all_queries(queries, block);
    if (threadIdx.x == 0) {
      memory.all_queries = all_queries;
      memory.list = addends.data + int64_t{blockIdx.x} * count * addend_columns<BFloat16>(columns);
    }
    const int first_key = static_cast<int>(block.first);
    copy_factors(all_keys, first_key, memory.key_factors);
    copy_factors(all_queries, 0, memory.next_factors[0]);
    wait_for_copies();
    __syncthreads();
    copy_rows(all_keys, first_key, sizes, memory.key_factors, memory.keys, memory.values);
  }
  copy_tiles(0, 0);
  wait_for_copies();
  __syncthreads();
  // to about length one by a power of two: what is left of a factor is from 1 to 2, and can be a part of the weights
  scale_keys(memory);
  show_products();
  __syncthreads();

  WgmmaSums sums = {}, value_sums = {};
  keep(sums);
  keep(value_sums);
  // Adds what a tile gives to the sums, and keeps the slopes. The last products go on.
  const auto add_tile = [&](int first, int turn, int place) {
    const uint64_t my_values = descriptor_of(memory.values + group * kMatrix);
    const uint64_t tile_grads = descriptor_of(memory.grads[turn][place]),
                   tile_queries = descriptor_of(memory.queries[turn][place]);
    WgmmaSums products;
    begin_products();
    multiply_shared<false, false>(products, my_values, tile_grads);
#pragma unroll
    for (int k = 1; k < kWgmmaColumns / kWgmmaDepth; ++k)
      multiply_shared<true, false>(products, my_values + k * kNextColumns, tile_grads + k * kNextColumns);
    commit_products();
    // those of the tile before, whose weights are in registers
    wait_for_products<1>();
    keep(sums);
    keep(value_sums);
    uint32_t weights[kColumns / 2][4], slopes[kColumns / 2][4];
#pragma unroll
    for (int i = 0; i < kColumns * 2; ++i)
      weights[i / 4][i % 4] = widen_counts(counts[i / 8][i / 2 % 4], i % 2);
    wait_for_products();
    keep(products);
    begin_products();
#pragma unroll
    for (int k = 0; k < kOthers / kWgmmaDepth; ++k)
      multiply_held<true>(value_sums, weights[k], tile_grads + k * kNextRows);
    commit_products();
    const float* const factors = memory.query_factors[turn] + place * kOthers;
    const int key = my_row();
    const float my_factors[2] = {memory.key_factors[key], memory.key_factors[key + 8]};
    // from the counts once more: products have the weights, and PTX does not promise what is read of these
#pragma unroll
    for (int i = 0; i < kColumns * 2; ++i) {
      const uint32_t bytes = counts[i / 8][i / 2 % 4];
      const int row = i % 2;
      float* const product = &products[i / 2][row * 2];
      const float2 factor = *reinterpret_cast<const float2*>(factors + i / 2 * 8 + warp_lane() % 4 * 2);
      product[0] *= multiply_count(bytes, row * 2, factor.x) * my_factors[row];
      product[1] *= multiply_count(bytes, row * 2 + 1, factor.y) * my_factors[row];
    }
    // there are none of tiles past the last query, whose rows are zero
    if (first + (place + 1) * kOthers < count) load_counts();
    round_weights<BFloat16>(products, slopes);
    BFloat16* const rows = memory.slopes[place];
#pragma unroll
    for (int i = 0; i < kColumns * 2; ++i) *swizzled_pair(rows, key + i % 2 * 8, i / 2) = slopes[i / 4][i % 4];
    begin_products();
#pragma unroll
    for (int k = 0; k < kOthers / kWgmmaDepth; ++k)
      multiply_held<true>(sums, slopes[k], tile_queries + k * kNextRows);
    commit_products();
  };
  // Adds up what all of the block's keys add to the gradient of the tile of queries at a place, and stores it.
  const auto add_to_queries = [&](int first, int turn, int place) {
    const uint64_t all_keys = descriptor_of(memory.keys), slopes = descriptor_of(memory.slopes[place]);
    WgmmaSums query_sums;
    begin_products();
    multiply_shared<false, true>(query_sums, slopes, all_keys);
#pragma unroll
    for (int k = 1; k < Place::kRows / kWgmmaDepth; ++k)
      multiply_shared<true, true>(query_sums, slopes + k * kNextRows, all_keys + k * kNextRows);
    commit_products();
    wait_for_products();
    keep(sums);
    keep(value_sums);
    keep(query_sums);
    AddendRows<BFloat16> to;
    const int tile_row = my_row() % kWgmmaRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + tile_row + half * 8;
      const float factor = memory.query_factors[turn][place * kOthers + tile_row + half * 8];
      const float length = factor > 0 ? __fdividef(1, factor) : 0;
#pragma unroll
      for (int i = 0; i < kColumns * 2; ++i) query_sums[i / 2][half * 2 + i % 2] *= length;
      to.addend[half] = row_at(memory.list, row, addend_columns<BFloat16>(columns) * sizeof(BFloat16));
      to.inverse_length[half] = factor;
      to.exists[half] = row < count;
    }
    BFloat16* const rows = memory.queries[turn][place];
    to.store(warp_lane(), reinterpret_cast<float (&)[kColumns / 2][2][4]>(query_sums), columns,
             [&](int half, int piece) { return *swizzled_pair(rows, tile_row + half * 8, piece); });
  };

#pragma unroll 1
  for (int first = 0, turn = 0; first < count; first += kQueries, turn ^= 1) {
    if (first + kQueries < count) copy_tiles(first + kQueries, turn ^ 1);
    // one after the other: what the compiler would share between them takes registers
#pragma unroll 1
    for (int place = 0; place < kTiles; ++place) add_tile(first, turn, place);
    // all slopes of these tiles are there
    show_products();
    __syncthreads();
    add_to_queries(first + group * kOthers, turn, group);
    // and the next tiles, and nobody reads the slopes any more
    wait_for_copies();
    show_products();
    __syncthreads();
  }

  const Block end = make_block();
  const float scale = static_cast<float>(pairs.codes.tau) / (2 * pairs.codes.num_hash);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int tile_row = my_row() + half * 8;
    const float my_factor = memory.key_factors[tile_row];
#pragma unroll
    for (int i = 0; i < kColumns * 2; ++i)
      sums[i / 2][half * 2 + i % 2] *= my_factor > 0 ? __fdividef(scale, my_factor) : 0;
    take_through_unit_row<BFloat16>([&](int piece) { return *swizzled_pair(memory.keys, tile_row, piece); }, my_factor,
                                    half, sums);
    const int64_t row = end.first + tile_row;
    if (row >= keys.count) continue;
    store_row(grad_key.at(end.batch, end.head, row), sums, half, keys.factors[end.batch_head * keys.count + row],
              sizes.columns);
    store_row(grad_value.at(end.batch, end.head, row), value_sums, half,
              my_factor == kMasked ? 0 : 1 / static_cast<float>(pairs.codes.num_hash), sizes.value_columns);
  }
#endif
}

}  // namespace
}  // namespace yoso
