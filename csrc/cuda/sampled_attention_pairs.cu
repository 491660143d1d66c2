// See sampled_attention_pairs.h. A block has some keys and loops over tiles of queries: it adds up the gradients of its
// keys and values in registers, and what its keys add to the gradient of queries it stores as addends (addends.h). So
// codes are compared once for all three. The gradient of a query at length one is the sum of weight x (grad . value) x
// key at length one, and of a key the like.
#include "sampled_attention_pairs.h"

#include <cstdlib>
#include <string_view>

#include "addends.h"
#include "code_planes.h"
#include "tiled_attention.h"

namespace yoso {
namespace {

// What a pair takes by pairs, beside its planes, and a row and hash function by buckets, in the time that a plane of a
// pair takes: the first by count; by the second, 4600 random rows of 64 columns take as long both ways with 32 hash
// functions of 9 bits, as they do on an H200. Rows that are less random take longer by buckets.
constexpr double kPairCost = 19, kBucketCost = 2000;

// A warp has 32 keys, for which a tile of queries is loaded half as often as for 16, or these where rows are wide.
template <int columns>
using PairsPlace = MmaPlace<BFloat16, columns <= 64 ? 128 : 64, 32, columns, columns <= 64 ? 32 : 16>;
// What queries get is multiplied for two tiles of them, 16 rows by a warp.
constexpr int kQueries = 64;

// The pairs whose codes are equal by some hash functions: each has so many times the weight.
struct CollidingPairs {
  // so that there is shared memory for them on every GPU
  static constexpr int kMostPlanes = 32;
  PairedCodes codes;

  CollidingPairs swapped() const { return {codes.swapped()}; }
  // A row that is no number is none either: it would spoil the sums of all others, not of those in its buckets alone.
  __device__ bool is_real(int64_t batch_head, int64_t row, float inverse_length) const {
    return codes.is_real(batch_head, row) && inverse_length >= 0;
  }

  // The planes of the block's rows and of two tiles of others, which lie in shared memory one after the other.
  template <class Place>
  int64_t shared_bytes() const {
    return codes.planes() * int64_t{Place::kRows + 2 * Place::kOthers} * sizeof(uint32_t);
  }
  template <class Place>
  __device__ __forceinline__ void copy_mine(const Block& block, uint32_t* shared) const {
    copy_planes<Place, Place::kRows>(codes.plane_of(codes.mine, block.batch_head, block.first), codes.mine, shared);
  }
  // Of a tile that begins there in the first plane of a head.
  template <class Place>
  __device__ __forceinline__ void copy_others(const uint32_t* from, uint32_t* shared, int tile) const {
    copy_planes<Place, Place::kOthers>(from, codes.others, other_planes<Place>(shared, tile));
  }

  // How many hash functions agree.
  template <class Place, int n>
  __device__ __forceinline__ void count(const uint32_t* shared, int tile, float (&counts)[n][4]) const {
    constexpr int kParts = Place::kParts;
    static_assert(Place::kOthers == 32 && n == kParts * 4, "a lane has 8 others");
    // see PlaneOrder::kLanes
    const int first = threadIdx.x / kWarp * Place::kWarpRows;
    const uint32_t* my_plane = shared + first / 32 * 32 + warp_lane() / 4 * 4 + first % 32 / 8;
    const uint32_t* other_plane = other_planes<Place>(shared, tile) + warp_lane() % 4 * 8;
    const auto compare_plane = [&](bool is_first, uint32_t(&differ)[n][4]) {
      uint32_t mine[kParts * 2], others[2][4];
      if constexpr (kParts == 1)
        memcpy(mine, __builtin_assume_aligned(my_plane, 8), sizeof(mine));
      else
        load(my_plane, mine);
      load(other_plane, others[0]);
      load(other_plane + 4, others[1]);
#pragma unroll
      for (int i = 0; i < n * 4; ++i) {
        const uint32_t bits = mine[i / 16 * 2 + i % 4 / 2] ^ others[i % 2][i / 4 % 4];
        differ[i / 4][i % 4] = is_first ? bits : differ[i / 4][i % 4] | bits;
      }
      my_plane += Place::kRows;
      other_plane += Place::kOthers;
    };
    // the bits of 2^23, a float from which on numbers are one apart: a conversion takes four times as long as a sum
    constexpr int kWhole = 0x4b000000;
    int equal[n][4];
    codes.count_equal(kWhole, compare_plane, equal);
#pragma unroll
    for (int i = 0; i < n * 4; ++i) counts[i / 4][i % 4] = __int_as_float(equal[i / 4][i % 4]) - 0x1p23f;
  }

 private:
  template <class Place, class Word>
  __device__ __forceinline__ Word* other_planes(Word* shared, int tile) const {
    return shared + codes.planes() * (Place::kRows + tile * Place::kOthers);
  }
  template <class Place, int count>
  __device__ __forceinline__ void copy_planes(const uint32_t* from, const CodeSide& side, uint32_t* to) const {
    constexpr int kPieces = count / 4;
    const int32_t length = plane_length(side.length);
    // a single time, mostly, and registers are short
#pragma unroll 1
    for (int i = threadIdx.x; i < codes.planes() * kPieces; i += Place::kBlockThreads)
      copy_ahead<16>(to + i * 4, from + int64_t{i / kPieces} * length + i % kPieces * 4, false);
  }
};

// What a launch stores for the queries: a list by each of `lists` blocks of every head, from these on.
struct QueryAddends {
  BFloat16* data;
  int32_t first_head, first_list, lists;
};

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
__global__ void __launch_bounds__(PairsPlace<columns>::kBlockThreads, 2)
    gradients_by_pairs_kernel(Side<BFloat16> keys, Side<BFloat16> queries, Sizes sizes, CollidingPairs pairs,
                              uint32_t query_bytes, Rows<BFloat16> grad_key, Rows<BFloat16> grad_value,
                              QueryAddends addends) {
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
    memory.query_bytes = query_bytes;
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

  MmaSums<Place> sums = {}, value_sums = {};
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
    add_weighted_mma<Place>(weights, tile.values, false, value_sums, rounded);
    multiply_mma<Place>(mine.values, tile.values, products);
#pragma unroll
    for (int i = 0; i < kPairs * 4; ++i)
      products[i / 4][i % 4] *= weights[i / 4][i % 4] * tile.factors[Place::other(i / 4, i % 4)] *
                                mine.factors[Place::row(i / 4, i % 4)];
    add_weighted_mma<Place>(products, tile.rows, few, sums, rounded);
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
    take_through_unit_row(mine.rows + tile_row * Place::kStride + Place::other(0, 0), my_factor, half, sums[part]);
    const int64_t row = end.first + tile_row;
    if (row >= keys.count) continue;
    store_row(grad_key.at(end.batch, end.head, row), sums[part], half, keys.factors[end.batch_head * keys.count + row],
              sizes.columns);
    store_row(grad_value.at(end.batch, end.head, row), value_sums[part], half,
              my_factor == kMasked ? 0 : 1 / static_cast<float>(pairs.codes.num_hash), sizes.value_columns);
  }
}

// How many heads, of up to `most`, a launch has for the last of its blocks to leave the least of a GPU idle, on which
// `resident` run at a time.
int64_t heads_of_launch(int64_t heads, int64_t most, int64_t blocks, int64_t resident) {
  if (most >= heads) return heads;
  const auto waves = [&](int64_t count) { return divide_up(count * blocks, resident); };
  int64_t best = 1, least = INT64_MAX;
  for (int64_t some = std::max<int64_t>(most - resident, 1); some <= most; ++some) {
    const int64_t all = heads / some * waves(some) + waves(heads % some);
    if (all > least) continue;
    best = some;
    least = all;
  }
  return best;
}

template <int columns>
void backward_by_pairs(const Device& device, const Tensor& grad, const Tensor& query, const Tensor& key,
                       const Tensor& value, const CollidingPairs& pairs, const Tensor& grad_query,
                       const Tensor& grad_key, const Tensor& grad_value) {
  using Place = PairsPlace<columns>;
  using In = BFloat16;
  const int64_t heads = query.size(0) * query.size(1), N = query.size(2), D = query.size(3);
  const Tensor query_inverse = inverse_lengths<In>(device, query, pairs.swapped());
  const Tensor key_inverse = inverse_lengths<In>(device, key, pairs);
  const Side<In> queries = side_of<In>(query, grad, query_inverse), keys = side_of<In>(key, value, key_inverse);
  // a block at least, for queries that meet no key
  const int64_t blocks = std::max<int64_t>(divide_up(key.size(2), Place::kRows), 1);
  const int64_t lists = lists_at_once<In>(device, N, D), most_lists = even_share(blocks, lists);
  const int64_t most_heads =
      heads_of_launch(heads, std::max<int64_t>(lists / blocks, 1), blocks, 2 * device.num_multiprocessors());
  const Tensor sums = empty_tensor(query, {most_heads, N, D}, ScalarType::Float);
  const Tensor addends = empty_tensor(query, {most_heads, most_lists, N, addend_columns<In>(D)}, ScalarType::BFloat16);
  AddendLists<In> all = {};
  all.rows = queries.rows;
  all.sums = static_cast<float*>(sums.mutable_data_ptr());
  all.addends = static_cast<const In*>(addends.const_data_ptr());
  all.heads = static_cast<int32_t>(query.size(1));
  all.count = static_cast<int32_t>(N);
  all.columns = static_cast<int32_t>(D);
  for (int64_t first = 0; first < heads; first += most_heads)
    for (int64_t first_list = 0; first_list < blocks; first_list += most_lists) {
      const int64_t heads_now = std::min(most_heads, heads - first);
      all.first_head = static_cast<int32_t>(first);
      all.inverse_length = queries.factors + first * N;
      all.lists = static_cast<int32_t>(std::min(most_lists, blocks - first_list));
      all.are_first = first_list == 0;
      all.are_last = first_list + all.lists == blocks;
      launch(device, gradients_by_pairs_kernel<columns>, heads_now * all.lists, Place::kBlockThreads,
             sizeof(PairsMemory<Place>) + pairs.shared_bytes<Place>(), keys, queries,
             Sizes{query.size(1), D, value.size(3)}, pairs, row_bytes_of<In>(query), mutable_rows_of<In>(grad_key),
             mutable_rows_of<In>(grad_value),
             QueryAddends{static_cast<In*>(addends.mutable_data_ptr()), all.first_head,
                          static_cast<int32_t>(first_list), all.lists});
      add_up(device, all, heads_now, static_cast<float>(pairs.codes.tau) / (2 * pairs.codes.num_hash), grad_query);
    }
}

}  // namespace

bool goes_by_pairs(const Tensor& query, const Tensor& key, const Tensor& value, int64_t num_hash,
                   int64_t hash_code_len) {
  const char* setting = std::getenv("YOSO_CUDA_BACKWARD");
  const std::string_view way = setting == nullptr ? "" : setting;
  STD_TORCH_CHECK(setting == nullptr || way == "pairs" || way == "buckets",
                  "YOSO_CUDA_BACKWARD must be pairs or buckets, got ", setting);
  const int64_t planes = divide_up(num_hash, kWordBits) * hash_code_len;
  if (query.scalar_type() != ScalarType::BFloat16 || std::max(query.size(3), value.size(3)) > kMaxMmaColumns ||
      planes > CollidingPairs::kMostPlanes)
    return false;
  if (setting != nullptr) return way == "pairs";
  const double N = query.size(2), M = key.size(2);
  return N * M * (kPairCost + static_cast<double>(planes)) <= kBucketCost * (N + M) * num_hash;
}

void sampled_attention_backward_by_pairs(const Device& device, const Tensor& grad, const Tensor& query,
                                         const Tensor& key, const Tensor& value, const Tensor& query_codes,
                                         const Tensor& key_codes, int64_t hash_code_len, const Tensor& grad_query,
                                         const Tensor& grad_key, const Tensor& grad_value) {
  const CodePlanes planes(device, query_codes, key_codes, hash_code_len, PlaneOrder::kLanes);
  const int64_t widest = widest_of(query, value);
  const Tensor grads = tile_rows(grad, widest), queries = tile_rows(query, widest);
  const Tensor keys = tile_rows(key, widest), values = tile_rows(value, widest);
  TileOutput query_output(grad_query, queries), key_output(grad_key, keys), value_output(grad_value, values);
  const auto backward = widest <= kTile ? backward_by_pairs<kTile> : backward_by_pairs<kMaxMmaColumns>;
  // the keys are the rows that are "mine"
  backward(device, grads, queries, keys, values, CollidingPairs{planes.pairs().swapped()}, query_output.tiles(),
           key_output.tiles(), value_output.tiles());
  query_output.copy();
  key_output.copy();
  value_output.copy();
}

}  // namespace yoso
