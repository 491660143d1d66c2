// See sampled_attention_pairs.h. A block has some keys and loops over tiles of queries: it adds up the gradients of its
// keys and values in registers, and what its keys add to the gradient of queries it stores as addends (addends.h). So
// it is counted once for all three how many hash functions agree, by the block or, for warpgroups, by a kernel before.
// The gradient of a query at length one is the sum of weight x (grad . value) x key at length one, and of a key the
// like.
#include "sampled_attention_pairs.h"

#include <cstdlib>
#include <string_view>

#include "pairs_mma.h"
#include "pairs_wgmma.h"

namespace yoso {
namespace {

// What a pair takes by pairs, beside its planes, and a row and hash function by buckets, in the time that a plane of a
// pair takes, or a plane by warpgroups: the first by count; by the others, 4600 random rows of 64 columns, or 5500,
// take as long both ways with 32 hash functions of 9 bits, as they did on an H200; by warpgroups before pairs were
// counted first. Rows that are less random take longer by buckets.
constexpr double kPairCost = 19, kBucketCost = 2000, kBucketCostOfWarpgroups = 2400;

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

// The kernels, with what their blocks have, and how many counts these read for every query, if they do.
template <int columns>
struct ByWarps {
  using Place = PairsPlace<columns>;
  static constexpr auto kKernel = gradients_by_pairs_kernel<columns>;
  static constexpr int kCounts = 0;
  // planes lie behind the memory
  static int64_t shared_bytes(const CollidingPairs& pairs) {
    return sizeof(PairsMemory<Place>) + pairs.shared_bytes<Place>();
  }
};
struct ByWarpgroups {
  using Place = WgmmaPlace;
  static constexpr auto kKernel = gradients_by_warpgroups_kernel;
  static constexpr int kCounts = Place::kRows;
  static int64_t shared_bytes(const CollidingPairs&) { return sizeof(WgmmaMemory); }
};

template <class Way>
void backward_by_pairs(const Device& device, const Tensor& grad, const Tensor& query, const Tensor& key,
                       const Tensor& value, CollidingPairs pairs, const Tensor& grad_query, const Tensor& grad_key,
                       const Tensor& grad_value) {
  using Place = typename Way::Place;
  using In = BFloat16;
  const int64_t heads = query.size(0) * query.size(1), N = query.size(2), D = query.size(3);
  // the kernels count in 32 bits what these refuse to
  for (const Tensor& rows : {query, grad, key, value}) row_bytes_of<In>(rows);
  const Tensor query_inverse = inverse_lengths<In>(device, query, pairs.swapped());
  const Tensor key_inverse = inverse_lengths<In>(device, key, pairs);
  const Side<In> queries = side_of<In>(query, grad, query_inverse), keys = side_of<In>(key, value, key_inverse);
  // a block at least, for queries that meet no key
  const int64_t blocks = std::max<int64_t>(divide_up(key.size(2), Place::kRows), 1);
  const int64_t lists = lists_at_once<In>(device, N, D, Way::kCounts), most_lists = even_share(blocks, lists);
  const int64_t most_heads = heads_of_launch(heads, std::max<int64_t>(lists / blocks, 1), blocks,
                                             Place::kBlocks * device.num_multiprocessors());
  const Tensor sums = empty_tensor(query, {most_heads, N, D}, ScalarType::Float);
  const Tensor addends = empty_tensor(query, {most_heads, most_lists, N, addend_columns<In>(D)}, ScalarType::BFloat16);
  const int32_t tiles = count_tiles(count_of(N, "queries"));
  const Tensor places = find_places(device, query, pairs.codes, heads);
  const Tensor counts =
      empty_tensor(query, {most_heads, most_lists, Way::kCounts, tiles, kTileQueries}, ScalarType::Byte);
  auto* const counts_of_launch = static_cast<uint8_t*>(counts.mutable_data_ptr());
  AddendLists<In> all = {};
  all.rows = queries.rows;
  all.sums = static_cast<float*>(sums.mutable_data_ptr());
  all.addends = static_cast<const In*>(addends.const_data_ptr());
  all.heads = static_cast<int32_t>(query.size(1));
  all.count = static_cast<int32_t>(N);
  all.columns = static_cast<int32_t>(D);
  for (int64_t first = 0; first < heads; first += most_heads) {
    const int64_t heads_now = std::min(most_heads, heads - first);
    for (int64_t first_list = 0; first_list < blocks; first_list += most_lists) {
      all.first_head = static_cast<int32_t>(first);
      all.inverse_length = queries.factors + first * N;
      all.lists = static_cast<int32_t>(std::min(most_lists, blocks - first_list));
      all.are_first = first_list == 0;
      all.are_last = first_list + all.lists == blocks;
      if constexpr (Way::kCounts > 0) {
        const auto first_strip = static_cast<int32_t>(first_list * Place::kStrips);
        count_pairs(device,
                    {pairs.codes, static_cast<const uint32_t*>(places.const_data_ptr()), counts_of_launch,
                     all.first_head, first_strip, all.lists * Place::kStrips, tiles},
                    heads_now);
        pairs.counts = counts_of_launch;
      }
      launch(device, Way::kKernel, heads_now * all.lists, Place::kBlockThreads, Way::shared_bytes(pairs), keys, queries,
             Sizes{query.size(1), D, value.size(3)}, pairs, mutable_rows_of<In>(grad_key),
             mutable_rows_of<In>(grad_value),
             QueryAddends{static_cast<In*>(addends.mutable_data_ptr()), all.first_head,
                          static_cast<int32_t>(first_list), all.lists});
      add_up(device, all, heads_now, static_cast<float>(pairs.codes.tau) / (2 * pairs.codes.num_hash), grad_query);
    }
  }
}

int64_t planes_of(int64_t num_hash, int64_t hash_code_len) { return divide_up(num_hash, kWordBits) * hash_code_len; }

// With few queries, the other kernel rounds less.
bool goes_by_warpgroups(const Device& device, const Tensor& query, const Tensor& value, int64_t num_hash) {
  return std::max(query.size(3), value.size(3)) <= kWgmmaColumns && query.size(2) > kFewOthers &&
         num_hash <= kMostCount && device.has_wgmma();
}

}  // namespace

bool goes_by_pairs(const Device& device, const Tensor& query, const Tensor& key, const Tensor& value, int64_t num_hash,
                   int64_t hash_code_len) {
  const char* setting = std::getenv("YOSO_CUDA_BACKWARD");
  const std::string_view way = setting == nullptr ? "" : setting;
  STD_TORCH_CHECK(setting == nullptr || way == "pairs" || way == "buckets",
                  "YOSO_CUDA_BACKWARD must be pairs or buckets, got ", setting);
  const int64_t planes = planes_of(num_hash, hash_code_len);
  if (query.scalar_type() != ScalarType::BFloat16 || std::max(query.size(3), value.size(3)) > kMaxMmaColumns ||
      num_hash > CollidingPairs::kMostHashes || planes > CollidingPairs::kMostPlanes)
    return false;
  if (setting != nullptr) return way == "pairs";
  const double N = query.size(2), M = key.size(2);
  const double bucket_cost = goes_by_warpgroups(device, query, value, num_hash) ? kBucketCostOfWarpgroups : kBucketCost;
  return N * M * (kPairCost + static_cast<double>(planes)) <= bucket_cost * (N + M) * num_hash;
}

void sampled_attention_backward_by_pairs(const Device& device, const Tensor& grad, const Tensor& query,
                                         const Tensor& key, const Tensor& value, const Tensor& query_codes,
                                         const Tensor& key_codes, int64_t hash_code_len, const Tensor& grad_query,
                                         const Tensor& grad_key, const Tensor& grad_value) {
  const int64_t widest = widest_of(query, value);
  const Tensor grads = tile_rows(grad, widest), queries = tile_rows(query, widest);
  const Tensor keys = tile_rows(key, widest), values = tile_rows(value, widest);
  TileOutput query_output(grad_query, queries), key_output(grad_key, keys), value_output(grad_value, values);
  const bool by_warpgroups = goes_by_warpgroups(device, query, value, query_codes.size(2));
  const CodePlanes planes(
      device, query_codes, key_codes, hash_code_len,
      by_warpgroups ? planes_to_count(device, query_codes.size(2), hash_code_len) : PlaneOrder::kLanes);
  const auto backward = by_warpgroups     ? backward_by_pairs<ByWarpgroups>
                        : widest <= kTile ? backward_by_pairs<ByWarps<kTile>>
                                          : backward_by_pairs<ByWarps<kMaxMmaColumns>>;
  // the keys are the rows that are "mine"
  backward(device, grads, queries, keys, values, CollidingPairs{planes.pairs().swapped()}, query_output.tiles(),
           key_output.tiles(), value_output.tiles());
  query_output.copy();
  key_output.copy();
  value_output.copy();
}

}  // namespace yoso
