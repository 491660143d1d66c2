// The gradient of sampled attention, by buckets: linear in the number of rows whatever the data. A row is in one bucket
// of each hash function. What it gets from each is an addend (addends.h), by buckets_any.h or, on tensor cores,
// buckets_mma.h and buckets_wgmma.h. Of values it is sampled attention from queries to keys.
#include "buckets_any.h"
#include "buckets_mma.h"
#include "buckets_wgmma.h"
#include "rows.h"
#include "sampled_attention.h"
#include "sampled_attention_pairs.h"
#include "tile_rows.h"

namespace yoso {
namespace {

// Where so many buckets of the mean size do not fit a small batch, many a bucket does not fit one alone.
constexpr int64_t kLargeShare = 3;
// How blocks have rows that are not for tensor cores: as many of a multiprocessor.
template <class In>
struct AnyPlan {
  static constexpr int kBlocks = sizeof(In) == sizeof(float) ? 2 : 1, kMostCodes = kMostItemCodes;
};
// How many items every block has to do at least, so that all end at much the same time, where there are so many codes.
constexpr int64_t kItemsOfBlock = 16;

// Fills in the inverse lengths of a side's rows, and clears `count` counters.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads)
    prepare_kernel(Side<In> side, Sizes sizes, int lane_bits, int32_t* counters, int32_t count) {
  using T = Accumulator<In>;
  if (blockIdx.x == 0)
    for (int32_t i = threadIdx.x; i < count; i += kRowThreads) counters[i] = 0;
  const RowPlace place(side.count, lane_bits, 1);
  // lanes past the last row stay: the sum of squares is the warp's
  const bool exists = place.row < side.count;
  const int32_t row = exists ? place.row : 0, batch_head = sizes.first_sorted + sizes.first + place.head;
  const In* x = side.rows.at(batch_head / sizes.H, batch_head % sizes.H, row);
  T square = 0;
  for (int32_t first = place.column; first < sizes.D; first += kLaneColumns << lane_bits) {
    In part[kLaneColumns];
    load_columns<aligned>(x + first, columns_of_lane(sizes.D, first), part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) square += static_cast<T>(part[c]) * static_cast<T>(part[c]);
  }
  square = sum_of_lanes(square, lane_bits);
  if (exists && place.lane == 0)
    side.inverse_length[int64_t{place.head} * side.count + row] = square > 0 ? 1 / sqrt(square) : 0;
}

// How many heads' codes are sorted at a time.
int64_t heads_sorted_at_once(const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len) {
  return heads_at_once(query_codes.size(0) * query_codes.size(1), query_codes.size(2),
                       (query_codes.size(3) + key_codes.size(3)) / 2, hash_code_len);
}

// What a side takes beside its rows and codes, of the heads that are sorted and of those of a launch.
template <class In>
struct SideMemory {
  Tensor lengths, sums, addends;

  SideMemory(const Tensor& rows, int64_t heads_sorted, int64_t heads, int64_t hashes)
      : lengths(empty_tensor(rows, {heads_sorted, rows.size(2)}, length_dtype(rows))),
        sums(empty_tensor(rows, {heads, rows.size(2), rows.size(3)}, length_dtype(rows))),
        addends(empty_tensor(rows, {heads, hashes, rows.size(2), addend_columns<In>(rows.size(3))},
                             sizeof(Addend<In>) == 2 ? rows.scalar_type() : length_dtype(rows))) {}

  Side<In> side(const Tensor& rows, const Tensor& others, const SortedCodes& codes) const {
    using T = Accumulator<In>;
    const Rows<const In> from = rows_of<In>(rows), other = rows_of<In>(others);
    return {from,
            other,
            row_bytes_of<In>(rows),
            row_bytes_of<In>(others),
            static_cast<T*>(lengths.mutable_data_ptr()),
            static_cast<Addend<In>*>(addends.mutable_data_ptr()),
            static_cast<const int32_t*>(codes.order.const_data_ptr()),
            static_cast<const int32_t*>(codes.starts.const_data_ptr()),
            static_cast<int32_t>(rows.size(2)),
            aligned(from, rows.size(3)) && aligned(other, others.size(3))};
  }
};

template <class In, class Plan>
void sampled_backward(const Device& device, const Tensor& grad, const Tensor& query, const Tensor& key,
                      const Tensor& value, const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
                      const SortedCodes* all_query_order, const Tensor& grad_query, const Tensor& grad_key) {
  const int64_t H = query.size(1), all_heads = count_of(query.size(0) * H, "heads"), m = query_codes.size(2);
  const int64_t N = count_of(query.size(2), "queries"), M = count_of(key.size(2), "keys");
  const int64_t D = query.size(3), Dv = value.size(3), table_size = int64_t{1} << hash_code_len;
  const int64_t resident = Plan::kBlocks * device.num_multiprocessors();
  const int64_t heads_sorted = heads_sorted_at_once(query_codes, key_codes, hash_code_len);
  // hash functions of heads that there is memory for, whose codes are counted in 32 bits, and a launch's share of them
  const int64_t lists = std::min(lists_at_once<In>(device, N + M, D), (int64_t{1} << 30) / table_size);
  const int64_t most_hashes = even_share(m, lists), most_heads = even_share(heads_sorted, lists / m);
  const int64_t item_codes = std::clamp<int64_t>(most_heads * most_hashes * table_size / (kItemsOfBlock * resident), 1,
                                                 std::min<int64_t>(table_size, Plan::kMostCodes));

  const SideMemory<In> query_memory(query, heads_sorted, most_heads, most_hashes);
  const SideMemory<In> key_memory(key, heads_sorted, most_heads, most_hashes);
  const int64_t launches = divide_up(heads_sorted, most_heads) * divide_up(m, most_hashes);
  const Tensor counters = empty_tensor(query, {launches}, ScalarType::Int);
  const int lane_bits = lane_bits_for(D);
  for (int64_t sorted = 0; sorted < all_heads; sorted += heads_sorted) {
    const int64_t heads = std::min(heads_sorted, all_heads - sorted);
    const SortedCodes query_order = all_query_order == nullptr
                                        ? sort_codes(device, query_codes, sorted, heads, hash_code_len)
                                        : *all_query_order;
    const SortedCodes key_order = sort_codes(device, key_codes, sorted, heads, hash_code_len);
    const Side<In> queries = query_memory.side(query, grad, query_order);
    const Side<In> keys = key_memory.side(key, value, key_order);
    const auto sizes_of = [&](int64_t first, int64_t first_hash) {
      const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
      return Sizes{narrow(sorted),     narrow(first),
                   narrow(H),          narrow(first_hash),
                   narrow(m),          narrow(std::min(most_hashes, m - first_hash)),
                   narrow(D),          narrow(Dv),
                   narrow(table_size), narrow(item_codes)};
    };
    int32_t* counter = static_cast<int32_t*>(counters.mutable_data_ptr());
    for (const Side<In>& side : {queries, keys})
      launch(device, aligned(side.rows, D) ? prepare_kernel<In, true> : prepare_kernel<In, false>,
             heads * blocks_of_head(side.count, lane_bits), kRowThreads, 0, side, sizes_of(0, 0), lane_bits, counter,
             launches);
    for (int64_t first = 0; first < heads; first += most_heads)
      for (int64_t first_hash = 0; first_hash < m; first_hash += most_hashes) {
        const Sizes sizes = sizes_of(first, first_hash);
        const int64_t heads_now = std::min(most_heads, heads - first);
        const int64_t items = heads_now * sizes.hashes * sizes.items();
        if constexpr (std::is_same_v<Plan, WarpgroupPlan>) {
          launch(device, multiply_buckets_by_warpgroups_kernel, std::min(items, resident), Plan::kThreads,
                 sizeof(WarpgroupMemory), queries, keys, sizes, items, counter++);
        } else if constexpr (kIsForTensorCores<In>) {
          launch(device, multiply_buckets_mma_kernel<In, Plan>, std::min(items, resident), Plan::kThreads,
                 sizeof(MmaMemory<In, Plan>), queries, keys, sizes, items, counter++);
        } else {
          launch(device, multiply_buckets_kernel<In>, items, kThreads, sizeof(AnyMemory<In>), queries, keys, sizes);
        }
        const auto finish = [&](const Side<In>& side, const SideMemory<In>& memory, const Tensor& out) {
          const AddendLists<In> addends{side.rows,
                                        side.inverse_length + first * side.count,
                                        static_cast<Accumulator<In>*>(memory.sums.mutable_data_ptr()),
                                        side.addends,
                                        sizes.H,
                                        sizes.first_sorted + sizes.first,
                                        sizes.hashes,
                                        side.count,
                                        sizes.D,
                                        first_hash == 0,
                                        first_hash + sizes.hashes == m};
          add_up(device, addends, heads_now, static_cast<Accumulator<In>>(hash_code_len) / (2 * m), out);
        };
        finish(queries, query_memory, grad_query);
        finish(keys, key_memory, grad_key);
      }
  }
}

// Calls f with how blocks have up to so many rows a side, in table_size buckets, of up to so many columns.
template <class In, class F>
void dispatch_plan(const Device& device, int64_t rows, int64_t table_size, int64_t columns, const F& f) {
  const auto dispatch = [&](auto most_columns) {
    using Small = MmaPlan<most_columns(), PlanSize::kSmall>;
    using Large = MmaPlan<most_columns(), PlanSize::kLarge>;
    static_assert(sizeof(MmaMemory<In, Small>) <= size_t{99} << 10, "more than a block has on sm_86 and sm_89");
    if (kLargeShare * rows > Small::kRows * table_size && sizeof(MmaMemory<In, Large>) <= device.shared_bytes())
      return f(Large{});
    if constexpr (Small::kBlocks == 2) {
      using Middle = MmaPlan<most_columns(), PlanSize::kMiddle>;
      // a multiprocessor keeps 1 KB for each block beside what it asks for
      if (2 * sizeof(MmaMemory<In, Middle>) + 1024 <= device.shared_bytes()) return f(Middle{});
    }
    f(Small{});
  };
  if constexpr (std::is_same_v<In, BFloat16>)
    if (device.has_wgmma() && columns <= kWgmmaColumns && rows > WarpgroupPlan::kFewestRows * table_size)
      return f(WarpgroupPlan{});
  if constexpr (!kIsForTensorCores<In>)
    f(AnyPlan<In>{});
  else if (columns <= 64)
    dispatch(std::integral_constant<int, 64>{});
  else
    dispatch(std::integral_constant<int, kMaxMmaColumns>{});
}

std::tuple<Tensor, Tensor, Tensor> sampled_attention_backward_cuda(const Tensor& grad, const Tensor& query,
                                                                   const Tensor& key, const Tensor& value,
                                                                   const Tensor& query_codes, const Tensor& key_codes,
                                                                   int64_t hash_code_len) {
  check_hashed(query, key, value, query_codes, key_codes, hash_code_len);
  check_output(grad, "grad", query, value, query.scalar_type());
  const Device device(value);
  const int64_t B = query.size(0), H = query.size(1), D = query.size(3);
  Tensor grad_query = empty_heads_last(query);
  Tensor grad_key = empty_heads_last(key);
  if (goes_by_pairs(device, query, key, value, query_codes.size(2), hash_code_len)) {
    const Tensor grad_value = empty_heads_last(value);
    if (B * H > 0)
      sampled_attention_backward_by_pairs(device, grad, query, key, value, query_codes, key_codes, hash_code_len,
                                          grad_query, grad_key, grad_value);
    return {grad_query, grad_key, grad_value};
  }
  // queries are sorted once, where those of all heads are at a time
  std::optional<SortedCodes> sorted;
  if (heads_sorted_at_once(query_codes, key_codes, hash_code_len) == B * H)
    sorted = sort_codes(device, query_codes, 0, B * H, hash_code_len);
  const SortedCodes* query_order = sorted ? &*sorted : nullptr;
  const Tensor grad_value =
      std::get<0>(sum_by_buckets(device, grad, key_codes, query_codes, hash_code_len, false, query_order));
  if (grad_query.numel() == 0 && grad_key.numel() == 0) return {grad_query, grad_key, grad_value};
  const int64_t widest = std::max(D, value.size(3));
  const Tensor grads = tile_rows(grad, widest), queries = tile_rows(query, widest);
  const Tensor keys = tile_rows(key, widest), values = tile_rows(value, widest);
  TileOutput query_output(grad_query, queries), key_output(grad_key, keys);
  const int64_t rows = std::max(query.size(2), key.size(2));
  dispatch_floating(queries, [&](auto element) {
    using In = decltype(element);
    dispatch_plan<In>(device, rows, int64_t{1} << hash_code_len, widest, [&](auto plan) {
      sampled_backward<In, decltype(plan)>(device, grads, queries, keys, values, query_codes, key_codes, hash_code_len,
                                           query_order, query_output.tiles(), key_output.tiles());
    });
  });
  query_output.copy();
  key_output.copy();
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("sampled_attention_backward", TORCH_BOX(&sampled_attention_backward_cuda));
}

}  // namespace yoso
