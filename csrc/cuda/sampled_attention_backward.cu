// The gradient of sampled attention for query and key, by buckets: linear in the number of rows whatever the data.
// A row is in one bucket of each hash function. What it gets from each is kept, by buckets_any.h or, on tensor cores,
// buckets_mma.h, and then added up in the order of hash functions, so that blocks need no order.
#include "buckets_any.h"
#include "buckets_mma.h"
#include "rows.h"
#include "sampled_attention.h"
#include "sampled_attention_pairs.h"
#include "sort.h"
#include "tile_rows.h"

namespace yoso {
namespace {

// What rows get from their buckets may take so many times the memory that the cache is to keep: on an H200 512 MiB.
// But a launch has a few hash functions, as sums are read and written again for the next.
constexpr int64_t kAddendCaches = 16, kFewestHashes = 4;
// Of so many rows a bucket, most have two tiles of them.
constexpr int64_t kRowsOfTwoTiles = 24;
// How many items every block has to do at least, so that all end at much the same time, where there are so many codes;
// and the codes of an item at most.
constexpr int64_t kItemsOfBlock = 16, kMostCodes = Item<BFloat16>::kMostCodes;

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

// Takes columns from the places of 16-bit addends to their own: of four lanes, lane t gets the t-th pair of each.
__device__ __forceinline__ void order_columns(float (&columns)[kLaneColumns]) {
#pragma unroll
  for (int bit = 1; bit < kLaneGroup; bit *= 2)
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if ((i / 2 & bit) != 0) continue;
      float &low = columns[i], &high = columns[i + 2 * bit];
      const bool is_high = (threadIdx.x & bit) != 0;
      const float other = __shfl_xor_sync(kAllLanes, is_high ? low : high, bit);
      (is_high ? low : high) = other;
    }
}

// Adds what a side's rows get from the hash functions of the launch to what they got from those before; after the last,
// takes the sums, times scale, through the normalisation of the rows.
// With fewer registers than three blocks leave it, it would spill some.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads, 3)
    finish_kernel(Side<In> side, Sizes sizes, Accumulator<In> scale, int lane_bits, Rows<In> out) {
  using T = Accumulator<In>;
  const RowPlace place(side.count, lane_bits, 1);
  const bool exists = place.row < side.count;
  const int32_t row = exists ? place.row : 0, batch_head = sizes.first_sorted + sizes.first + place.head;
  const int32_t batch = batch_head / sizes.H, head = batch_head % sizes.H;
  const int64_t first_row = int64_t{place.head} * side.count;
  const int32_t stored_columns = addend_columns<In>(sizes.D);
  const In* x = side.rows.at(batch, head, row);
  const Addend<In>* addends = side.addends + (first_row * sizes.hashes + row) * stored_columns;
  T* sums = side.sums + (first_row + row) * sizes.D;
  const T inverse = side.inverse_length[int64_t{sizes.first} * side.count + first_row + row];
  In part[kLaneColumns];
  T sum[kLaneColumns], product = 0;
  for (int32_t first = place.column; first < stored_columns; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(sizes.D, first), stored = columns_of_lane(stored_columns, first);
    memset(sum, 0, sizeof(sum));
    const Addend<In>* from = addends + first;
#pragma unroll 4
    for (int32_t hash = 0; hash < sizes.hashes; ++hash, from += int64_t{side.count} * stored_columns) {
      Addend<In> addend[kLaneColumns];
      T wide[kLaneColumns];
      load_columns<aligned>(from, stored, addend);
      widen(addend, wide);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sum[c] += wide[c];
    }
    if constexpr (sizeof(Addend<In>) == 2) order_columns(sum);
    if (exists && sizes.first_hash > 0) {
      T before[kLaneColumns];
      load_columns<aligned>(sums + first, columns, before);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sum[c] += before[c];
    }
    if (exists) store_columns<aligned>(sum, columns, sums + first);
    load_columns<aligned>(x + first, columns, part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) product += sum[c] * (static_cast<T>(part[c]) * inverse);
  }
  if (sizes.first_hash + sizes.hashes < sizes.num_hash) return;
  product = sum_of_lanes(product, lane_bits);
  if (!exists) return;
  In* to = out.at(batch, head, row);
  for (int32_t first = place.column; first < sizes.D; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(sizes.D, first);
    load_columns<aligned>(x + first, columns, part);
    load_columns<aligned>(sums + first, columns, sum);
    // a row that is zero, or no numbers, as one in no bucket may be, gets no gradient
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const T unit = static_cast<T>(part[c]) * inverse;
      part[c] = static_cast<In>(inverse > 0 ? (sum[c] - product * unit) * scale * inverse : 0);
    }
    store_columns<aligned>(part, columns, to + first);
  }
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
            static_cast<T*>(sums.mutable_data_ptr()),
            static_cast<Addend<In>*>(addends.mutable_data_ptr()),
            static_cast<const int32_t*>(codes.order.const_data_ptr()),
            static_cast<const int32_t*>(codes.starts.const_data_ptr()),
            static_cast<int32_t>(rows.size(2)),
            aligned(from, rows.size(3)) && aligned(other, others.size(3))};
  }
};

// The most of `count` that are had at a time if that is up to `most`, or one, and much the same each time.
int64_t even_share(int64_t count, int64_t most) {
  return divide_up(count, divide_up(count, std::clamp<int64_t>(most, 1, count)));
}

template <class In>
void sampled_backward(const Device& device, const Tensor& grad, const Tensor& query, const Tensor& key,
                      const Tensor& value, const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
                      const Tensor& grad_query, const Tensor& grad_key) {
  const int64_t H = query.size(1), all_heads = count_of(query.size(0) * H, "heads"), m = query_codes.size(2);
  const int64_t N = count_of(query.size(2), "queries"), M = count_of(key.size(2), "keys");
  const int64_t D = query.size(3), Dv = value.size(3), table_size = int64_t{1} << hash_code_len;
  // by the kernels' launch bounds
  const bool one_at_a_time = sizeof(In) == 8 || (kIsForTensorCores<In> && std::max(D, Dv) > 64);
  const int64_t resident = (one_at_a_time ? 1 : 2) * device.num_multiprocessors();
  const int64_t heads_sorted = heads_at_once(all_heads, m, (N + M) / 2, hash_code_len);
  // hash functions of heads that there is memory for, whose codes are counted in 32 bits, and a launch's share of them
  const int64_t list_bytes = (N + M) * addend_columns<In>(D) * static_cast<int64_t>(sizeof(Addend<In>));
  const int64_t lists = std::clamp<int64_t>(kAddendCaches * device.cached_bytes() / list_bytes, kFewestHashes,
                                            (int64_t{1} << 30) / table_size);
  const int64_t most_hashes = even_share(m, lists), most_heads = even_share(heads_sorted, lists / m);
  const int64_t item_codes = std::clamp<int64_t>(most_heads * most_hashes * table_size / (kItemsOfBlock * resident), 1,
                                                 std::min(table_size, kMostCodes));

  const SideMemory<In> query_memory(query, heads_sorted, most_heads, most_hashes);
  const SideMemory<In> key_memory(key, heads_sorted, most_heads, most_hashes);
  const int64_t launches = divide_up(heads_sorted, most_heads) * divide_up(m, most_hashes);
  const Tensor counters = empty_tensor(query, {launches}, ScalarType::Int);
  const int lane_bits = lane_bits_for(addend_columns<In>(D));
  for (int64_t sorted = 0; sorted < all_heads; sorted += heads_sorted) {
    const int64_t heads = std::min(heads_sorted, all_heads - sorted);
    const SortedCodes query_order = sort_codes(device, query_codes, sorted, heads, hash_code_len);
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
        if constexpr (kIsForTensorCores<In>) {
          const auto multiply = [&](auto columns, auto parts) {
            constexpr size_t shared_bytes = sizeof(MmaMemory<In, columns(), parts()>);
            static_assert(shared_bytes <= size_t{99} << 10, "more than a block has on sm_86 and sm_89");
            launch(device, multiply_buckets_mma_kernel<In, columns(), parts()>, std::min(items, resident),
                   kMmaThreads<parts()>, shared_bytes, queries, keys, sizes, items, counter++);
          };
          if (std::max(D, Dv) > 64)
            multiply(std::integral_constant<int, kMaxMmaColumns>{}, std::integral_constant<int, 1>{});
          else if (std::max(N, M) < kRowsOfTwoTiles * table_size)
            multiply(std::integral_constant<int, 64>{}, std::integral_constant<int, 1>{});
          else
            multiply(std::integral_constant<int, 64>{}, std::integral_constant<int, 2>{});
        } else {
          launch(device, multiply_buckets_kernel<In>, items, kThreads, sizeof(AnyMemory<In>), queries, keys, sizes);
        }
        const auto finish = [&](const Side<In>& side, const Rows<In>& out) {
          const bool whole = aligned(side.rows, D) && aligned(out, D);
          launch(device, whole ? finish_kernel<In, true> : finish_kernel<In, false>,
                 heads_now * blocks_of_head(side.count, lane_bits), kRowThreads, 0, side, sizes,
                 static_cast<Accumulator<In>>(hash_code_len) / (2 * m), lane_bits, out);
        };
        finish(queries, mutable_rows_of<In>(grad_query));
        finish(keys, mutable_rows_of<In>(grad_key));
      }
  }
}

std::tuple<Tensor, Tensor, Tensor> sampled_attention_backward_cuda(const Tensor& grad, const Tensor& query,
                                                                   const Tensor& key, const Tensor& value,
                                                                   const Tensor& query_codes, const Tensor& key_codes,
                                                                   int64_t hash_code_len) {
  check_hashed(query, key, value, query_codes, key_codes, hash_code_len);
  check_output(grad, "grad", query, value, query.scalar_type());
  const Device device(value);
  const int64_t B = query.size(0), H = query.size(1), D = query.size(3);
  Tensor grad_query = empty_heads_last(query, B, H, query.size(2), D);
  Tensor grad_key = empty_heads_last(key, B, H, key.size(2), D);
  const Tensor grad_value = std::get<0>(sum_by_buckets(device, grad, key_codes, query_codes, hash_code_len, false));
  if (grad_query.numel() == 0 && grad_key.numel() == 0) return {grad_query, grad_key, grad_value};
  if (goes_by_pairs(query, key, value, query_codes.size(2), hash_code_len)) {
    sampled_attention_backward_by_pairs(device, grad, query, key, value, query_codes, key_codes, hash_code_len,
                                        grad_query, grad_key);
    return {grad_query, grad_key, grad_value};
  }
  const int64_t widest = std::max(D, value.size(3));
  const Tensor grads = tile_rows(grad, widest), queries = tile_rows(query, widest);
  const Tensor keys = tile_rows(key, widest), values = tile_rows(value, widest);
  TileOutput query_output(grad_query, queries), key_output(grad_key, keys);
  dispatch_floating(queries, [&](auto element) {
    sampled_backward<decltype(element)>(device, grads, queries, keys, values, query_codes, key_codes, hash_code_len,
                                        query_output.tiles(), key_output.tiles());
  });
  query_output.copy();
  key_output.copy();
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("sampled_attention_backward", TORCH_BOX(&sampled_attention_backward_cuda));
}

}  // namespace yoso
