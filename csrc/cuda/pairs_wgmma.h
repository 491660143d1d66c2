// The gradients by pairs for sm_90 and rows of up to 64 columns: a block has three warpgroups, each 64 of its keys,
// which they multiply with tiles of 64 queries (wgmma.h). Tensor cores do so on their own, while other warps count; a
// multiprocessor has registers for twelve warps, as no sums but those of keys and values stay while a warp counts. What
// three tiles of queries get of all the block's keys the groups add up after these, a tile each.
#pragma once

#include "pairs.h"
#include "wgmma.h"

namespace yoso {
namespace {

struct WgmmaPlace {
  // tiles in shared memory: one for each group
  static constexpr int kGroups = 3, kTiles = kGroups, kOthers = 64;
  static constexpr int kRows = kGroups * kWgmmaRows, kBlockThreads = kGroups * kWarpgroup, kBlocks = 1;
  static constexpr int kWarpRows = 16, kParts = 1, kPlanesAtOnce = 2;
  // for which a block has shared memory
  static constexpr int kMostPlanes = 16;
};

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
  static constexpr int kMatrix = 64 * kWgmmaColumns, kTiles = WgmmaPlace::kTiles;
  alignas(kSwizzleBytes) BFloat16 keys[WgmmaPlace::kGroups * kMatrix], values[WgmmaPlace::kGroups * kMatrix];
  // of the tiles at hand, and by turns of those before or after
  BFloat16 queries[2][kTiles][kMatrix], grads[kTiles][kMatrix];
  // of every pair, by keys, the weight of the query for the key's sum and of the key for the query's
  BFloat16 slopes[kTiles][WgmmaPlace::kGroups * kMatrix];
  float key_factors[WgmmaPlace::kRows], query_factors[2][kTiles][WgmmaPlace::kOthers];
  // those of a tile before it is copied, which say what of it is masked
  float next_factors[kTiles][WgmmaPlace::kOthers];
  // of the head, and what the block stores for its queries: registers are short
  WgmmaRows all_queries;
  const uint32_t* query_planes;
  BFloat16* list;
};
// with as many planes as there may be
static_assert(sizeof(WgmmaMemory) + WgmmaPlace::kMostPlanes * sizeof(uint32_t) *
                                        (WgmmaPlace::kRows + WgmmaPlace::kTiles * WgmmaPlace::kOthers) <=
                  227 << 10,
              "a block has 227 KB");

__device__ __forceinline__ void copy_factors(const WgmmaRows& from, int first, float* to) {
  const int row = first + threadIdx.x;
  if (threadIdx.x < 64) copy_ahead<4>(to + threadIdx.x, from.factors + row, row >= from.count);
}

// Copies 64 rows from `first` on, with their values, to matrices in shared memory, and their factors; 0 past the last
// row and column, and where factor(row) says that the row is masked.
template <class Factor>
__device__ __forceinline__ void copy_rows(const WgmmaRows& from, int first, const Sizes& sizes, BFloat16* rows,
                                          BFloat16* values, float* factors, const Factor& factor) {
  constexpr int kPieces = kWgmmaColumns / kPiece;
  const auto rows_address = static_cast<uint32_t>(__cvta_generic_to_shared(rows));
  const auto values_address = static_cast<uint32_t>(__cvta_generic_to_shared(values));
#pragma unroll
  for (int i = threadIdx.x; i < 64 * kPieces; i += WgmmaPlace::kBlockThreads) {
    const int tile_row = i / kPieces, column = i % kPieces * kPiece, row = first + tile_row;
    const uint32_t place = swizzled_piece(tile_row, i % kPieces);
    const bool clear = row >= from.count || factor(tile_row) == kMasked;
    copy_ahead<16>(rows_address + place, row_at(from.rows, row, from.row_bytes) + column,
                   clear || column >= sizes.columns);
    copy_ahead<16>(values_address + place, row_at(from.values, row, from.value_bytes) + column,
                   clear || column >= sizes.value_columns);
  }
  copy_factors(from, first, factors);
}

// Scales the block's keys, which are there, by the power of two in their factors, and these.
__device__ __forceinline__ void scale_keys(WgmmaMemory& memory) {
  constexpr int kPairs = kWgmmaColumns / 2;
  auto* const pairs = reinterpret_cast<uint32_t*>(memory.keys);
#pragma unroll 4
  for (int i = threadIdx.x; i < WgmmaPlace::kRows * kPairs; i += WgmmaPlace::kBlockThreads) {
    const float scale = power_of_two(memory.key_factors[i / kPairs]);
    const float2 x = unpack<BFloat16>(pairs[i]);
    pairs[i] = pack<BFloat16>(x.x * scale, x.y * scale);
  }
  __syncthreads();
  if (threadIdx.x < WgmmaPlace::kRows) memory.key_factors[threadIdx.x] /= power_of_two(memory.key_factors[threadIdx.x]);
}

__global__ void __launch_bounds__(WgmmaPlace::kBlockThreads, WgmmaPlace::kBlocks)
    gradients_by_warpgroups_kernel(Side<BFloat16> keys, Side<BFloat16> queries, Sizes sizes, CollidingPairs pairs,
                                   Rows<BFloat16> grad_key, Rows<BFloat16> grad_value, QueryAddends addends) {
#if YOSO_HAS_WGMMA
  using Place = WgmmaPlace;
  constexpr int kMatrix = WgmmaMemory::kMatrix, kOthers = Place::kOthers, kColumns = kWgmmaColumns / 8;
  auto& memory = *shared_memory<WgmmaMemory>();
  uint32_t* const planes = reinterpret_cast<uint32_t*>(&memory + 1);
  static_assert(sizeof(memory) % kPieceBytes == 0, "what lies behind is copied in pieces");
  // nothing of it is to be kept until the end
  const auto make_block = [&] {
    const uint32_t number = unknown(blockIdx.x), lists = unknown(static_cast<uint32_t>(addends.lists));
    return Block(unknown(static_cast<uint32_t>(sizes.heads)), keys.count, Place::kRows,
                 addends.first_head + number / lists, addends.first_list + number % lists);
  };
  {
    const Block block = make_block();
    const WgmmaRows all_keys(keys, block), all_queries(queries, block);
    const uint32_t* const query_planes = pairs.codes.plane_of(pairs.codes.others, block.batch_head, 0);
    if (threadIdx.x == 0) {
      memory.all_queries = all_queries;
      memory.query_planes = query_planes;
      memory.list = addends.data +
                    int64_t{blockIdx.x} * queries.count * addend_columns<BFloat16>(static_cast<int32_t>(sizes.columns));
    }
#pragma unroll 1
    for (int part = 0; part < Place::kGroups; ++part) {
      const int first = static_cast<int>(block.first) + part * kWgmmaRows;
      copy_rows(all_keys, first, sizes, memory.keys + part * kMatrix, memory.values + part * kMatrix,
                memory.key_factors + part * kWgmmaRows, [&](int row) { return __ldg(all_keys.factors + first + row); });
    }
    pairs.copy_mine<Place>(block, planes);
#pragma unroll 1
    for (int tile = 0; tile < 2; ++tile) {
      const int first = tile * kOthers;
      copy_rows(all_queries, first, sizes, memory.queries[0][tile], memory.grads[tile], memory.query_factors[0][tile],
                [&](int row) { return __ldg(all_queries.factors + first + row); });
      pairs.copy_others<Place>(query_planes + first, planes, tile);
    }
    copy_factors(all_queries, 2 * kOthers, memory.next_factors[2]);
  }
  wait_for_copies();
  __syncthreads();
  // to about length one by a power of two: what is left of a factor is from 1 to 2, and can be a part of the weights
  scale_keys(memory);
  show_products();
  __syncthreads();

  const int count = static_cast<int>(queries.count), columns = static_cast<int>(sizes.columns);
  // the same in all of a warp's lanes, as the compiler is to know
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kWarpgroup), 0);
  // of the lane's rows the first, found again each time, as registers are short
  const auto my_row = [] { return static_cast<int>(unknown(threadIdx.x)) / kWarp * 16 + warp_lane() / 4; };
  WgmmaSums sums, value_sums;
  // Copies a tile, and what says what of the next is masked. There are always as many as places: past the last query
  // they are zero.
  const auto copy_tile = [&](int first, int turn, int place) {
    if (first - place * kOthers >= count) return;
    const WgmmaRows& all = memory.all_queries;
    copy_rows(all, first, sizes, memory.queries[turn][place], memory.grads[place], memory.query_factors[turn][place],
              [&](int row) { return memory.next_factors[place][row]; });
    const int next = (place + 1) % Place::kTiles;
    copy_factors(all, first + kOthers, memory.next_factors[next]);
    if (first < count) pairs.copy_others<Place>(memory.query_planes + first, planes, place);
  };

  // Adds what a tile gives to the sums, and keeps the slopes. The products go on.
  const auto add_tile = [&](int turn, int place, bool is_first) {
    const uint64_t my_values = descriptor_of(memory.values + group * kMatrix);
    const uint64_t tile_grads = descriptor_of(memory.grads[place]),
                   tile_queries = descriptor_of(memory.queries[turn][place]);
    float counts[kColumns][4];
    pairs.count<Place>(planes, place, counts);
    WgmmaSums products;
    begin_products();
    multiply_shared<false, false>(products, my_values, tile_grads);
#pragma unroll
    for (int k = 1; k < kWgmmaColumns / kWgmmaDepth; ++k)
      multiply_shared<true, false>(products, my_values + k * kNextColumns, tile_grads + k * kNextColumns);
    commit_products();
    uint32_t weights[kColumns / 2][4], slopes[kColumns / 2][4];
    round_weights<BFloat16>(counts, weights);
    wait_for_products();
    keep(products);
    begin_products();
#pragma unroll
    for (int k = 0; k < kOthers / kWgmmaDepth; ++k)
      add_products(value_sums, weights[k], tile_grads + k * kNextRows, k > 0 || !is_first);
    commit_products();
    const float* const factors = memory.query_factors[turn][place];
    const int key = my_row();
    const float my_factors[2] = {memory.key_factors[key], memory.key_factors[key + 8]};
#pragma unroll
    for (int i = 0; i < kColumns * 2; ++i) {
      const float2 weight = unpack<BFloat16>(weights[i / 4][i % 4]);
      const int row = i % 2;
      float* const product = &products[i / 2][row * 2];
      const float2 factor = *reinterpret_cast<const float2*>(factors + i / 2 * 8 + warp_lane() % 4 * 2);
      product[0] *= weight.x * factor.x * my_factors[row];
      product[1] *= weight.y * factor.y * my_factors[row];
    }
    round_weights<BFloat16>(products, slopes);
    BFloat16* const rows = memory.slopes[place];
    // which all groups have read then, of the tiles before
    if (place == 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns * 2; ++i) *swizzled_pair(rows, key + i % 2 * 8, i / 2) = slopes[i / 4][i % 4];
    begin_products();
#pragma unroll
    for (int k = 0; k < kOthers / kWgmmaDepth; ++k)
      add_products(sums, slopes[k], tile_queries + k * kNextRows, k > 0 || !is_first);
    commit_products();
  };
  const auto finish_products = [&] {
    wait_for_products();
    keep(sums);
    keep(value_sums);
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
    finish_products();
    keep(query_sums);
    AddendRows<BFloat16> to;
    const int tile_row = my_row() % kWgmmaRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + tile_row + half * 8;
      const float factor = memory.query_factors[turn][place][tile_row + half * 8];
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
  for (int first = 0, turn = 0; first < count; first += Place::kTiles * kOthers, turn ^= 1) {
#pragma unroll
    for (int place = 0; place < Place::kTiles; ++place) {
      add_tile(turn, place, place == 0 && first == 0);
      // the next tile, which all have copied
      wait_for_copies();
      show_products();
      __syncthreads();
      const int ahead = place + 2;
      copy_tile(first + ahead * kOthers, turn ^ ahead / Place::kTiles, ahead % Place::kTiles);
      if (place == Place::kTiles - 1)
        add_to_queries(first + group * kOthers, turn, group);
      else
        finish_products();
    }
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
