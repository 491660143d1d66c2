// The gradient of sampled attention for query and key, by buckets: linear in the number of rows whatever the data.
// Hash functions are added one after the other: a row is in one bucket of each, so its sum gets the addends in their
// order, whatever order the blocks run in. The kernels that add are in buckets_any.h, a launch for each hash function,
// and, for tensor cores, buckets_mma.h, where blocks wait for each other.
#include "buckets_any.h"
#include "buckets_mma.h"
#include "rows.h"
#include "sampled_attention_pairs.h"
#include "sort.h"

namespace yoso {
namespace {

// the most codes that a block has
constexpr int64_t kBlockCodes = 32;
// On tensor cores: of a hash function, what every block has to do at least, and heads at least. On an H200, N = 4096,
// 16,384 and 65,536 took 16.4, 66 and 414 ms with 8, 4 and 2 heads, and 15.0, 62 and 373 with 12, 8 and 3.
constexpr int64_t kItemsOfBlock = 2, kFewestHeads = 3;

// Fills in the inverse lengths of a side's rows, and clears its sums and `count` counters.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads)
    prepare_kernel(Side<In> side, Sizes sizes, int lane_bits, int32_t* counters, int32_t count) {
  using T = Accumulator<In>;
  if (blockIdx.x == 0)
    for (int32_t i = threadIdx.x; i < count; i += kRowThreads) counters[i] = 0;
  const RowPlace place(side.count, lane_bits, 1);
  // lanes past the last row stay: the sum of squares is the warp's
  const bool exists = place.row < side.count;
  const int32_t row = exists ? place.row : 0, batch_head = sizes.first + place.head;
  const int64_t number = int64_t{place.head} * side.count + row;
  const In* x = side.rows.at(batch_head / sizes.H, batch_head % sizes.H, row);
  const T zeros[kLaneColumns] = {};
  T square = 0;
  for (int32_t first = place.column; first < sizes.D; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(sizes.D, first);
    In part[kLaneColumns];
    load_columns<aligned>(x + first, columns, part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) square += static_cast<T>(part[c]) * static_cast<T>(part[c]);
    if (exists) store_columns<aligned>(zeros, columns, side.sums + number * sizes.D + first);
  }
  square = sum_of_lanes(square, lane_bits);
  if (exists && place.lane == 0) side.inverse_length[number] = square > 0 ? 1 / sqrt(square) : 0;
}

// Takes the sums, times scale, through the normalisation of the rows.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads)
    finish_kernel(Side<In> side, Sizes sizes, Accumulator<In> scale, int lane_bits, Rows<In> out) {
  using T = Accumulator<In>;
  const RowPlace place(side.count, lane_bits, 1);
  const bool exists = place.row < side.count;
  const int32_t row = exists ? place.row : 0, batch_head = sizes.first + place.head;
  const int32_t batch = batch_head / sizes.H, head = batch_head % sizes.H;
  const int64_t number = int64_t{place.head} * side.count + row;
  const In* x = side.rows.at(batch, head, row);
  const T* sums = side.sums + number * sizes.D;
  const T inverse = side.inverse_length[number];
  In part[kLaneColumns];
  T sum[kLaneColumns], product = 0;
  for (int32_t first = place.column; first < sizes.D; first += kLaneColumns << lane_bits) {
    load_columns<aligned>(x + first, columns_of_lane(sizes.D, first), part);
    load_columns<aligned>(sums + first, columns_of_lane(sizes.D, first), sum);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) product += sum[c] * (static_cast<T>(part[c]) * inverse);
  }
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

// What add_buckets_mma_kernel asks of rows.
template <class In>
bool fits_tensor_cores(const Tensor& rows) {
  return sizeof(In) == 2 && rows.size(3) <= 128 && aligned(rows_of<In>(rows), rows.size(3));
}

// How many tiles of either side a block of add_buckets_mma_kernel has room for.
constexpr int32_t block_tiles(int64_t columns) {
  return columns <= 64 ? MmaMemory<BFloat16, 64>::kTiles : MmaMemory<BFloat16, 128>::kTiles;
}

// What add_buckets_mma_kernel needs beside the sums.
struct MmaWorkspace {
  // rows of either side that a block has, and large buckets that a hash function has at most
  int32_t block_rows, room;
  Tensor large, progress;

  MmaWorkspace(const Tensor& like, int64_t columns, int64_t rows, int64_t lists, int64_t heads)
      : block_rows(block_tiles(columns) * kPicked),
        room(static_cast<int32_t>(rows / (block_rows + 1))),
        large(empty_tensor(like, {lists, 1 + room, sizeof(LargeBucket) / sizeof(int32_t)}, ScalarType::Int)),
        progress(empty_tensor(like, {1 + heads}, ScalarType::Int)) {}

  LargeBucket* large_buckets(int64_t list) const {
    return static_cast<LargeBucket*>(large.mutable_data_ptr()) + list * (1 + room);
  }
  int32_t* counters() const { return static_cast<int32_t*>(progress.mutable_data_ptr()); }
};

// How many codes a block has at a time where it has room for so many tiles.
int64_t codes_of_block(int64_t most_tiles, int64_t rows, int64_t table_size) {
  // of few rows, a bucket has some of both sides rarely
  const double mean = static_cast<double>(rows) / table_size;
  const double tiles = mean < 1 ? mean * mean : std::max(1.0, (mean + kPicked / 2) / kPicked);
  const int64_t most = std::min<int64_t>(table_size, Item<BFloat16>::kMostCodes);
  return tiles * most > most_tiles ? std::max<int64_t>(static_cast<int64_t>(most_tiles / tiles), 1) : most;
}

// Adds the buckets of all hash functions on `resident` blocks, as many as run at a time. The lists of large buckets begin
// with that of `first_list`.
template <class In>
void add_buckets(const Device& device, const Side<In>& queries, const Side<In>& keys, const Sizes& sizes,
                 int64_t resident, const std::optional<MmaWorkspace>& mma, int64_t first_list) {
  const int64_t blocks = int64_t{sizes.heads} * sizes.head_blocks;
  if constexpr (sizeof(In) == 2)
    if (mma) {
      const auto add = [&](auto kernel, size_t shared_bytes) {
        launch(device, kernel, std::min(blocks * sizes.num_hash, resident), kThreads, shared_bytes, queries, keys,
               sizes, mma->large_buckets(first_list), mma->room, mma->counters());
      };
      return std::max(sizes.D, sizes.Dv) <= 64 ? add(add_buckets_mma_kernel<In, 64>, sizeof(MmaMemory<In, 64>))
                                               : add(add_buckets_mma_kernel<In, 128>, sizeof(MmaMemory<In, 128>));
    }
  // but for the additions, a hash function does not need those before it
  for (int32_t hash = 0; hash < sizes.num_hash; ++hash)
    if (hash > 0)
      launch<true>(device, add_buckets_kernel<In>, blocks, kThreads, sizeof(AnyMemory<In>), queries, keys, sizes, hash);
    else
      launch(device, add_buckets_kernel<In>, blocks, kThreads, sizeof(AnyMemory<In>), queries, keys, sizes, hash);
}

template <class In>
void sampled_backward(const Device& device, const Tensor& grad, const Tensor& query, const Tensor& key,
                      const Tensor& value, const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
                      const Tensor& grad_query, const Tensor& grad_key) {
  using T = Accumulator<In>;
  const int64_t H = query.size(1), all_heads = count_of(query.size(0) * H, "heads"), m = query_codes.size(2);
  const int64_t N = count_of(query.size(2), "queries"), M = count_of(key.size(2), "keys");
  const int64_t D = query.size(3), Dv = value.size(3), table_size = int64_t{1} << hash_code_len;
  const int64_t head_bytes = (N + M) * ((D + Dv) * int64_t{sizeof(In)} + D * int64_t{sizeof(T)});
  const int64_t heads_sorted = heads_at_once(all_heads, m, (N + M) / 2, hash_code_len);
  const bool tensor_cores = fits_tensor_cores<In>(grad) && fits_tensor_cores<In>(query) &&
                            fits_tensor_cores<In>(key) && fits_tensor_cores<In>(value);
  // by the kernels' launch bounds
  const bool one_at_a_time = sizeof(In) == 8 || (tensor_cores && std::max(D, Dv) > 64);
  const int64_t resident = (one_at_a_time ? 1 : 2) * device.num_multiprocessors();
  // heads whose rows and sums the cache keeps from one hash function to the next
  const int64_t heads_cached = std::clamp<int64_t>(device.cached_bytes() / head_bytes, 1, heads_sorted);
  int64_t block_codes, heads_added;
  if (tensor_cores) {
    block_codes = codes_of_block(block_tiles(std::max(D, Dv)), std::max(N, M), table_size);
    const int64_t head_blocks = divide_up(table_size, block_codes);
    // or more, so that blocks have other heads' work where one's hash function waits for the one before
    heads_added = std::max({heads_cached, kFewestHeads, divide_up(kItemsOfBlock * resident, head_blocks)});
    // what blocks do is counted in 32 bits
    heads_added = std::clamp<int64_t>((int64_t{1} << 30) / (head_blocks * m), 1, std::min(heads_added, heads_sorted));
  } else {
    block_codes = std::min(divide_up(heads_cached * table_size, resident), kBlockCodes);
    heads_added = heads_cached;
  }
  const int64_t head_blocks = divide_up(table_size, block_codes);
  std::optional<MmaWorkspace> mma;
  if (tensor_cores) mma.emplace(query, std::max(D, Dv), N + M, heads_sorted * m, heads_added);

  const ScalarType sum_dtype = length_dtype(query);
  const Tensor lengths = empty_tensor(query, {heads_added, N + M}, sum_dtype);
  const Tensor sums = empty_tensor(query, {heads_added, N + M, D}, sum_dtype);
  T *inverse_length = static_cast<T*>(lengths.mutable_data_ptr()), *sum = static_cast<T*>(sums.mutable_data_ptr());
  for (int64_t sorted = 0; sorted < all_heads; sorted += heads_sorted) {
    const int64_t sorted_end = std::min(sorted + heads_sorted, all_heads);
    const SortedCodes query_order = sort_codes(device, query_codes, sorted, sorted_end - sorted, hash_code_len);
    const SortedCodes key_order = sort_codes(device, key_codes, sorted, sorted_end - sorted, hash_code_len);
    if (mma) {
      const auto starts_of = [](const SortedCodes& order) {
        return static_cast<const int32_t*>(order.starts.const_data_ptr());
      };
      const int64_t lists = (sorted_end - sorted) * m;
      launch(device, list_large_buckets_kernel, divide_up(lists, kWarps), kThreads, 0, starts_of(query_order),
             starts_of(key_order), lists, table_size, mma->block_rows, mma->room, mma->large_buckets(0));
    }
    for (int64_t first = sorted; first < sorted_end; first += heads_added) {
      const int64_t heads = std::min(heads_added, sorted_end - first);
      const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
      const Sizes sizes{narrow(first), narrow(heads), narrow(H), narrow(m), narrow(D), narrow(Dv),
                        narrow(table_size), narrow(head_blocks), narrow(block_codes)};
      const auto side = [&](const Tensor& rows, const Tensor& others, const SortedCodes& order, T* lengths, T* sums) {
        const int64_t list = (first - sorted) * m, count = rows.size(2);
        const Rows<const In> from = rows_of<In>(rows), other = rows_of<In>(others);
        return Side<In>{from,
                        other,
                        row_bytes_of<In>(rows),
                        row_bytes_of<In>(others),
                        lengths,
                        sums,
                        static_cast<const int32_t*>(order.order.const_data_ptr()) + list * count,
                        static_cast<const int32_t*>(order.starts.const_data_ptr()) + list * (table_size + 1),
                        narrow(count),
                        aligned(from, D) && aligned(other, Dv)};
      };
      const Side<In> queries = side(query, grad, query_order, inverse_length, sum);
      const Side<In> keys = side(key, value, key_order, inverse_length + heads * N, sum + heads * N * D);
      const int lane_bits = lane_bits_for(D);
      for (const Side<In>& rows : {queries, keys})
        launch(device, aligned(rows.rows, D) ? prepare_kernel<In, true> : prepare_kernel<In, false>,
               heads * blocks_of_head(rows.count, lane_bits), kRowThreads, 0, rows, sizes, lane_bits,
               mma ? mma->counters() : nullptr, mma ? 1 + heads : 0);
      add_buckets(device, queries, keys, sizes, resident, mma, (first - sorted) * m);
      const T scale = static_cast<T>(hash_code_len) / (2 * m);
      const auto finish = [&](const Side<In>& side, const Rows<In>& out) {
        const bool whole = aligned(side.rows, D) && aligned(out, D);
        launch(device, whole ? finish_kernel<In, true> : finish_kernel<In, false>,
               heads * blocks_of_head(side.count, lane_bits), kRowThreads, 0, side, sizes, scale, lane_bits, out);
      };
      finish(queries, mutable_rows_of<In>(grad_query));
      finish(keys, mutable_rows_of<In>(grad_key));
    }
  }
}

std::tuple<Tensor, Tensor> sampled_attention_backward_cuda(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                           const Tensor& value, const Tensor& query_codes,
                                                           const Tensor& key_codes, int64_t hash_code_len) {
  check_hashed(query, key, value, query_codes, key_codes, hash_code_len);
  check_output(grad, "grad", query, value, query.scalar_type());
  const Device device(value);
  const int64_t B = query.size(0), H = query.size(1), D = query.size(3);
  Tensor grad_query = empty_heads_last(query, B, H, query.size(2), D);
  Tensor grad_key = empty_heads_last(key, B, H, key.size(2), D);
  if (grad_query.numel() == 0 && grad_key.numel() == 0) return {grad_query, grad_key};
  if (goes_by_pairs(query, key, value, query_codes.size(2), hash_code_len)) {
    sampled_attention_backward_by_pairs(device, grad, query, key, value, query_codes, key_codes, hash_code_len,
                                        grad_query, grad_key);
    return {grad_query, grad_key};
  }
  const Tensor rows[] = {dense_rows(grad), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    sampled_backward<decltype(element)>(device, rows[0], rows[1], rows[2], rows[3], query_codes, key_codes,
                                        hash_code_len, grad_query, grad_key);
  });
  return {grad_query, grad_key};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("sampled_attention_backward", TORCH_BOX(&sampled_attention_backward_cuda));
}

}  // namespace yoso
