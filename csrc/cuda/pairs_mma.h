// The gradients by pairs for any GPU with tensor cores: a warp has 16 or 32 of the block's keys, and multiplies them
// with tiles of 32 queries.
#pragma once

#include "pairs.h"

namespace yoso {
namespace {

// A warp has 32 keys, for which a tile of queries is loaded half as often as for 16, or these where rows are wide.
template <int columns>
struct PairsPlace : MmaPlace<BFloat16, columns <= 64 ? 128 : 64, 32, columns, columns <= 64 ? 32 : 16> {
  // tiles in shared memory, and blocks at a time
  static constexpr int kTiles = 2, kBlocks = 2;
};
// What queries get is multiplied for two tiles of them, 16 rows by a warp.
constexpr int kQueries = 64;

// A block's shared memory, behind which planes are.
template <class Place>
struct PairsMemory {
  // padded against bank conflicts
  static constexpr int kStride = kQueries + kPiece;
  MmaShared<Place, true> tiles;
  // of every pair, the weight of the query for the key's sum and of the key for the query's
  alignas(16) BFloat16 slopes[Place::kRows * kStride];
  // the head's queries, their inverse lengths and planes, and what the block stores for them: registers are short
  const BFloat16* queries;
  const float* query_factors;
  const uint32_t* query_planes;
  BFloat16* addends;
  // from one query to the next
  uint32_t query_bytes;
};

// Stores what the block's keys add to the gradient of the queries from `first` on.
template <class Place>
__device__ __forceinline__ void add_to_queries(const PairsMemory<Place>& memory, int count, const Sizes& sizes,
                                               int first) {
  constexpr int kStride = PairsMemory<Place>::kStride, kColumns = Place::kColumns;
  const int lane = warp_lane(), columns = static_cast<int>(sizes.columns);
  const int warp_row = threadIdx.x / kWarp * 16;
  if (first + warp_row >= count) return;
  const BFloat16* left = memory.slopes + (lane / 16 * 8 + lane % 8) * kStride + warp_row + lane / 8 % 2 * 8;
  const BFloat16* right = memory.tiles.mine.rows + lane % 16 * Place::kStride + lane / 16 * 8;
  float sums[kColumns / 16][2][4] = {};
#pragma unroll kColumns <= kTile ? 2 : 1
  for (int key = 0; key < Place::kRows; key += 16) {
    uint32_t a[4];
    load_matrices<true>(a, left + key * kStride);
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      uint32_t b[4];
      load_matrices<true>(b, right + key * Place::kStride + pair * 16);
#pragma unroll
      for (int n = 0; n < 2; ++n) multiply_add<BFloat16>(sums[pair][n], a, {b[2 * n], b[2 * n + 1]});
    }
  }
  AddendRows<BFloat16> to;
  const BFloat16* own[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + warp_row + lane / 4 + half * 8, existing = min(row, count - 1);
    const float factor = __ldg(memory.query_factors + existing), length = factor > 0 ? __fdividef(1, factor) : 0;
#pragma unroll
    for (int c = 0; c < kColumns / 4; ++c) sums[c / 4][c / 2 % 2][half * 2 + c % 2] *= length;
    to.addend[half] = unknown(row_at(memory.addends, existing, addend_columns<BFloat16>(columns) * sizeof(BFloat16)));
    to.inverse_length[half] = factor;
    to.exists[half] = row < count;
    own[half] = unknown(row_at(memory.queries, existing, memory.query_bytes) + lane % 4 * 2);
  }
  to.store(lane, sums, columns, [&](int half, int piece) {
    return piece * 8 < columns ? __ldg(reinterpret_cast<const uint32_t*>(own[half] + piece * 8)) : 0;
  });
}

template <int columns>
__global__ void __launch_bounds__(PairsPlace<columns>::kBlockThreads, PairsPlace<columns>::kBlocks)
    gradients_by_pairs_kernel(Side<BFloat16> keys, Side<BFloat16> queries, Sizes sizes, CollidingPairs pairs,
                              Rows<BFloat16> grad_key, Rows<BFloat16> grad_value, QueryAddends addends) {
  using Place = PairsPlace<columns>;
  constexpr int kOthers = Place::kOthers, kPairs = Place::kParts * kOthers / 8;
  auto& memory = *shared_memory<PairsMemory<Place>>();
  auto& mine = memory.tiles.mine;
  static_assert(sizeof(memory) % kPieceBytes == 0, "what lies behind is copied in pieces");
  static_assert(Place::kBlockThreads / kWarp * 16 == kQueries, "16 queries a warp");
  uint32_t* const planes = reinterpret_cast<uint32_t*>(&memory + 1);
  const int count = static_cast<int>(queries.count);
  const auto make_block = [&](uint32_t number) {
    return Block(sizes.heads, keys.count, Place::kRows, addends.first_head + number / addends.lists,
                 addends.first_list + number % addends.lists);
  };
  const Block block = make_block(blockIdx.x);
  if (threadIdx.x == 0) {
    memory.query_bytes = static_cast<uint32_t>(queries.rows.row_stride * sizeof(BFloat16));
    memory.queries = queries.rows.at(block.batch, block.head, 0);
    memory.query_factors = queries.factors + block.batch_head * count;
    memory.query_planes = pairs.codes.plane_of(pairs.codes.others, block.batch_head, 0);
    memory.addends = addends.data + int64_t{blockIdx.x} * count *
                                        addend_columns<BFloat16>(static_cast<int32_t>(sizes.columns));
  }
  MmaReader<Place, Place::kRows, true>(keys, block, sizes, block.first).copy(mine);
  // with wide rows there are no registers for it
  MmaReader<Place, kOthers, true, columns == kTile> reader(queries, block, sizes, 0);
  reader.copy(memory.tiles.tiles[0]);
  pairs.copy_mine<Place>(block, planes);
  pairs.copy_others<Place>(pairs.codes.plane_of(pairs.codes.others, block.batch_head, 0), planes, 0);
  wait_for_copies();
  // to about length one by a power of two: what is left of a factor is from 1 to 2, and can be a part of the weights
  mine.scale(keys, block, block.first);

  typename Place::Sums sums = {}, value_sums = {};
  const bool few = count <= kFewOthers;
  for (int first = 0, current = 0; first < count; first += kOthers, current ^= 1) {
    wait_for_copies();
    // for all threads' copies, and until those before have been read
    __syncthreads();
    if (first + kOthers < count) {
      reader.copy(memory.tiles.tiles[current ^ 1]);
      pairs.copy_others<Place>(memory.query_planes + first + kOthers, planes, current ^ 1);
    }
    const auto& tile = memory.tiles.tiles[current];
    float weights[kPairs][4], products[kPairs][4];
    pairs.count<Place>(planes, current, weights);
    uint32_t rounded[kPairs / 2][4];
    round_weights<typename Place::In>(weights, rounded);
    add_weighted_mma<Place>(weights, rounded, tile.values, false, value_sums);
    Place::multiply(Place::my_rows(mine.values), tile.values, products);
#pragma unroll
    for (int i = 0; i < kPairs * 4; ++i)
      products[i / 4][i % 4] *= weights[i / 4][i % 4] * tile.factors[Place::other(i / 4, i % 4)] *
                                mine.factors[Place::row(i / 4, i % 4)];
    round_weights<typename Place::In>(products, rounded);
    add_weighted_mma<Place>(products, rounded, tile.rows, few, sums);
#pragma unroll
    for (int i = 0; i < kPairs * 2; ++i)
      *reinterpret_cast<uint32_t*>(memory.slopes + Place::row(i / 2, i % 2 * 2) * memory.kStride + first % kQueries +
                                   Place::other(i / 2, 0)) = rounded[i / 4][i % 4];
    if (first % kQueries != 0 || first + kOthers >= count) {
      __syncthreads();
      add_to_queries<Place>(memory, count, sizes, first / kQueries * kQueries);
    }
  }
  // where there is no query
  __syncthreads();

  const Block end = make_block(unknown(blockIdx.x));
  const float scale = static_cast<float>(pairs.codes.tau) / (2 * pairs.codes.num_hash);
#pragma unroll
  for (int i = 0; i < Place::kParts * 2; ++i) {
    const int part = i / 2, half = i % 2, tile_row = Place::row(part * kOthers / 8, half * 2);
    const float my_factor = mine.factors[tile_row];
#pragma unroll
    for (int c = 0; c < columns / 4; ++c)
      sums[part][c / 2][half * 2 + c % 2] *= my_factor > 0 ? __fdividef(scale, my_factor) : 0;
    take_through_unit_row<BFloat16>([&](int piece) { return *Place::pair(mine.rows, tile_row, piece); }, my_factor,
                                    half, sums[part]);
    const int64_t row = end.first + tile_row;
    if (row >= keys.count) continue;
    store_row(grad_key.at(end.batch, end.head, row), sums[part], half, keys.factors[end.batch_head * keys.count + row],
              sizes.columns);
    store_row(grad_value.at(end.batch, end.head, row), value_sums[part], half,
              my_factor == kMasked ? 0 : 1 / static_cast<float>(pairs.codes.num_hash), sizes.value_columns);
  }
}

}  // namespace
}  // namespace yoso
