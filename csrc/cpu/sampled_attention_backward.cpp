// The gradient of sampled attention, by buckets: linear in the number of rows whatever the data. Of values it is sampled
// attention from queries to keys.
#include "buckets.h"
#include "sampled_attention.h"

namespace yoso {
namespace {

// rows of a bucket that are multiplied at a time
constexpr int64_t kTileRows = 64;
// from this many keys on, products with a transposed tile cost less than sums over lanes
constexpr int64_t kTransposedKeys = 24;
// buckets of at most this many pairs of a query and a key are not multiplied one by one: their pairs are listed
constexpr int64_t kFewPairs = 4;
// the longest list
constexpr int64_t kListedPairs = 256;

// One side of the backward pass: the queries with the output's gradient, or the keys with the values. A row holds
// the unit vector, the gradient or value, and the sum that becomes the gradient of the unit vector.
template <class T>
struct Side {
  const int64_t columns, other_columns, stride;
  Buffer<T> rows, inverse_length;
  BucketOrder buckets;

  Side(int64_t count, int64_t columns, int64_t other_columns, int64_t num_hash, int64_t table_size)
      : columns(columns),
        other_columns(other_columns),
        stride(2 * columns + other_columns),
        rows(count * stride),
        inverse_length(count),
        buckets(count, num_hash, table_size, kFewPairs) {}

  T* unit() { return rows.data(); }
  T* other() { return rows.data() + columns; }
  T* sum() { return rows.data() + columns + other_columns; }

  template <class V>
  YOSO_INLINE void load(const InputRows& x, const InputRows& others, int64_t batch, int64_t head, int64_t begin,
                        int64_t end) {
    const int64_t offset = begin * stride;
    load_rows<V>(x, batch, head, begin, end, unit() + offset, stride);
    load_rows<V>(others, batch, head, begin, end, other() + offset, stride);
    normalize_rows<V>(unit() + offset, stride, end - begin, columns, inverse_length.data() + begin);
    for (int64_t row = begin; row < end; ++row) std::memset(sum() + row * stride, 0, columns * sizeof(T));
  }

  template <class V>
  YOSO_INLINE void store(T scale, const OutputRows& out, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    const int64_t offset = begin * stride;
    // a row that is zero, or no numbers, as one in no bucket may be, gets no gradient
    for (int64_t row = begin; row < end; ++row)
      if (inverse_length[row] == 0) std::memset(unit() + row * stride, 0, columns * sizeof(T));
    through_normalize<V>(sum() + offset, stride, unit() + offset, stride, end - begin, columns,
                         inverse_length.data() + begin, scale);
    store_rows<V>(sum() + offset, stride, T{1}, out, batch, head, begin, end);
  }
};

// What one thread needs beside the rows.
template <class T>
struct Scratch {
  Buffer<int32_t> codes, pairs;
  Buffer<T> weights, tile, grad_query_product, value_key_product;

  Scratch(int64_t columns, int64_t value_columns, int64_t table_size)
      : codes(table_size),
        pairs(2 * kListedPairs),
        weights(kTileRows * kTileRows),
        tile(kTileRows * value_columns),
        grad_query_product(value_columns * columns),
        value_key_product(value_columns * columns) {}
};

// Adds a bucket's part of W K to the queries' sums and of W^T Q to the keys', with W = G V^T, pair by pair.
template <class V, class Sizes, class T = Element<V>>
YOSO_INLINE void add_pairs(Sizes sizes, Side<T>& queries, const int32_t* query_order, int64_t num_queries,
                           Side<T>& keys, const int32_t* key_order, int64_t num_keys, Scratch<T>& scratch,
                           Ahead<T, typename Sizes::Stride>& ahead) {
  using Picked = PickedRows<T, typename Sizes::Stride>;
  const auto D = sizes.columns, Dv = sizes.value_columns;
  const AllRows<T> weights{scratch.weights.data(), kTileRows};
  for (int64_t k = 0; k < num_keys; k += kTileRows, key_order += kTileRows) {
    const int64_t nk = std::min(kTileRows, num_keys - k);
    const Picked unit_keys{keys.unit(), sizes.stride, key_order};
    const Picked values{keys.other(), sizes.stride, key_order};
    const Picked key_sums{keys.sum(), sizes.stride, key_order};
    const bool transposed = nk >= kTransposedKeys;
    if (transposed) transpose_rows<V>(values, nk, Dv, scratch.tile.data(), kTileRows);
    for (int64_t q = 0; q < num_queries; q += kTileRows) {
      const int64_t nq = std::min(kTileRows, num_queries - q);
      const Picked unit_queries{queries.unit(), sizes.stride, query_order + q};
      const Picked grads{queries.other(), sizes.stride, query_order + q};
      const Picked query_sums{queries.sum(), sizes.stride, query_order + q};
      if (transposed) {
        multiply<V, false>(nq, padded(nk), Dv, grads, 1, AllRows<T>{scratch.tile.data(), kTileRows}, weights, ahead);
      } else {
        outlined<V>([=, &ahead](auto) YOSO_INLINE_LAMBDA {
          dot_products<V>(nq, nk, Dv, grads, values, weights.data, kTileRows, ahead);
        });
      }
      outlined<V>([=, &ahead](auto) YOSO_INLINE_LAMBDA {
        multiply<V>(nq, D, nk, weights, 1, unit_keys, query_sums, ahead);
      });
      outlined<V>([=, &ahead](auto) YOSO_INLINE_LAMBDA {
        multiply<V>(nk, D, nq, AllRows<T>{weights.data, 1}, kTileRows, unit_queries, key_sums, ahead);
      });
    }
  }
}

// Copies the gradients or values of some rows one after the other.
template <class V, class T = Element<V>>
YOSO_INLINE AllRows<T> gather(Side<T>& side, const int32_t* order, int64_t rows, Buffer<T>& tile) {
  const int64_t columns = side.other_columns;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < columns; c += kLanes<V>)
      store<V>(tile.data() + i * columns + c, load<V>(side.other() + order[i] * side.stride + c));
  return {tile.data(), columns};
}

// The same through G^T Q and V^T K, whose cost is linear in the bucket's size.
template <class V, class T = Element<V>>
YOSO_INLINE void add_through_products(Side<T>& queries, const int32_t* query_order, int64_t num_queries, Side<T>& keys,
                                      const int32_t* key_order, int64_t num_keys, Scratch<T>& scratch) {
  const int64_t D = queries.columns, Dv = queries.other_columns;
  const AllRows<T> grad_query{scratch.grad_query_product.data(), D}, value_key{scratch.value_key_product.data(), D};
  scratch.grad_query_product.zero();
  scratch.value_key_product.zero();
  for (int64_t q = 0; q < num_queries; q += kTileRows) {
    const int64_t nq = std::min(kTileRows, num_queries - q);
    const AllRows<T> grads = gather<V>(queries, query_order + q, nq, scratch.tile);
    const PickedRows<T> unit_queries{queries.unit(), queries.stride, query_order + q};
    multiply<V>(Dv, D, nq, AllRows<T>{grads.data, 1}, Dv, unit_queries, grad_query);
  }
  for (int64_t k = 0; k < num_keys; k += kTileRows) {
    const int64_t nk = std::min(kTileRows, num_keys - k);
    const AllRows<T> values = gather<V>(keys, key_order + k, nk, scratch.tile);
    const PickedRows<T> unit_keys{keys.unit(), keys.stride, key_order + k};
    multiply<V>(Dv, D, nk, AllRows<T>{values.data, 1}, Dv, unit_keys, value_key);
    multiply<V>(nk, D, Dv, values, 1, grad_query, PickedRows<T>{keys.sum(), keys.stride, key_order + k});
  }
  for (int64_t q = 0; q < num_queries; q += kTileRows) {
    const int64_t nq = std::min(kTileRows, num_queries - q);
    const PickedRows<T> grads{queries.other(), queries.stride, query_order + q};
    multiply<V>(nq, D, Dv, grads, 1, value_key, PickedRows<T>{queries.sum(), queries.stride, query_order + q});
  }
}

// Which query and key of a bucket make its pair p: query[number of keys][p] and key[number of keys][p].
struct PairNumbers {
  int8_t query[kFewPairs + 1][kFewPairs] = {}, key[kFewPairs + 1][kFewPairs] = {};
  constexpr PairNumbers() {
    for (int keys = 1; keys <= kFewPairs; ++keys)
      for (int pair = 0; pair < kFewPairs; ++pair) {
        query[keys][pair] = pair / keys;
        key[keys][pair] = pair % keys;
      }
  }
};
constexpr PairNumbers kPairNumbers;

// Adds what the pairs of a list weigh: the loops of a small bucket are too short to be foretold, and a product of two
// rows waits for its sum over lanes, so the sums of as many pairs as there are lanes are taken together.
template <class V, class T = Element<V>>
YOSO_INLINE void add_listed_pairs(Side<T>& queries, const int32_t* query_of, Side<T>& keys, const int32_t* key_of,
                                  int64_t count) {
  constexpr int64_t L = kLanes<V>;
  const int64_t D = queries.columns, Dv = queries.other_columns;
  const int64_t query_stride = queries.stride, key_stride = keys.stride;
  T *query_rows = queries.unit(), *key_rows = keys.unit();
  for (int64_t first = 0; first < count; first += L) {
    V products[L];
    for (int64_t p = 0; p < L; ++p) {
      const int64_t pair = std::min(first + p, count - 1);
      const T* grad = query_rows + query_of[pair] * query_stride + D;
      const T* value = key_rows + key_of[pair] * key_stride + D;
      V sum = {};
      for (int64_t c = 0; c < Dv; c += L) sum += load<V>(grad + c) * load<V>(value + c);
      products[p] = sum;
    }
    alignas(64) T weights[L];
    store_sums(products, weights);
    for (int64_t pair = first; pair < std::min(first + L, count); ++pair) {
      if (pair + L < count) {
        prefetch(query_rows + query_of[pair + L] * query_stride, query_stride);
        prefetch(key_rows + key_of[pair + L] * key_stride, key_stride);
      }
      const T weight = weights[pair - first];
      T *query = query_rows + query_of[pair] * query_stride, *key = key_rows + key_of[pair] * key_stride;
      T *query_sum = query + D + Dv, *key_sum = key + D + Dv;
      for (int64_t c = 0; c < D; c += L) {
        const V q = load<V>(query_sum + c) + weight * load<V>(key + c);
        const V k = load<V>(key_sum + c) + weight * load<V>(query + c);
        store<V>(query_sum + c, q);
        store<V>(key_sum + c, k);
      }
    }
  }
}

// Adds a hash function's buckets of the codes from `begin` to `end`, each in the cheaper order of multiplication.
template <class V, class Sizes, class T = Element<V>>
YOSO_INLINE void add_buckets(Sizes sizes, Side<T>& queries, Side<T>& keys, int64_t hash, int64_t begin, int64_t end,
                             Scratch<T>& scratch) {
  const int64_t D = sizes.columns, Dv = sizes.value_columns;
  const int32_t *query_ends = queries.buckets.ends(hash), *key_ends = keys.buckets.ends(hash);
  const int32_t *query_order = queries.buckets.order(hash), *key_order = keys.buckets.order(hash);
  int32_t* codes = scratch.codes.data();
  const int64_t num_codes = shared_buckets(query_ends, key_ends, begin, end, codes);
  // which of these have few pairs cannot be foretold either: all write pairs, and those that have more are overwritten
  int32_t *query_of = scratch.pairs.data(), *key_of = query_of + kListedPairs;
  int64_t num_pairs = 0, num_larger = 0;
  for (int64_t i = 0; i < num_codes; ++i) {
    const int32_t code = codes[i];
    const int32_t first_q = begin_of_bucket(query_ends, code), first_k = begin_of_bucket(key_ends, code);
    const int32_t nq = query_ends[code] - first_q, nk = key_ends[code] - first_k;
    const bool few = int64_t{nq} * nk <= kFewPairs;
    const int32_t numbers = few ? nk : 0;
    for (int p = 0; p < kFewPairs; ++p) {
      query_of[num_pairs + p] = query_order[first_q + kPairNumbers.query[numbers][p]];
      key_of[num_pairs + p] = key_order[first_k + kPairNumbers.key[numbers][p]];
    }
    num_pairs += few ? nq * nk : 0;
    codes[num_larger] = code;
    num_larger += !few;
    if (num_pairs > kListedPairs - kFewPairs) {
      add_listed_pairs<V>(queries, query_of, keys, key_of, num_pairs);
      num_pairs = 0;
    }
  }
  add_listed_pairs<V>(queries, query_of, keys, key_of, num_pairs);
  Ahead<T, typename Sizes::Stride> ahead{queries.unit(), keys.unit(), sizes.stride, sizes.stride};
  for (int64_t i = 0; i < num_larger; ++i) {
    if (i + 1 < num_larger) ahead.point_to(queries.buckets, keys.buckets, hash, codes[i + 1], kTileRows);
    const int64_t code = codes[i];
    const int64_t first_q = begin_of_bucket(query_ends, code), first_k = begin_of_bucket(key_ends, code);
    const int64_t nq = query_ends[code] - first_q, nk = key_ends[code] - first_k;
    if (nq * nk * (2 * D + Dv) <= 2 * (nq + nk) * D * Dv)
      add_pairs<V>(sizes, queries, query_order + first_q, nq, keys, key_order + first_k, nk, scratch, ahead);
    else
      add_through_products<V>(queries, query_order + first_q, nq, keys, key_order + first_k, nk, scratch);
    while (ahead.queries_left + ahead.keys_left > 0) ahead();
  }
}

// How many columns the rows of both sides have: known to the compiler for the usual sizes, but in float64, which is
// there to be right.
template <class Columns, class RowStride>
struct SizesOf {
  using Stride = RowStride;
  Columns columns, value_columns;
  Stride stride;
};
template <int64_t columns>
using Fixed = SizesOf<std::integral_constant<int64_t, columns>, std::integral_constant<int64_t, 3 * columns>>;

template <class T>
void add_buckets(Side<T>& queries, Side<T>& keys, int64_t hash, int64_t begin, int64_t end, Scratch<T>& scratch) {
  const int64_t columns = queries.columns, value_columns = queries.other_columns;
  vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
    const auto add = [&](auto sizes) YOSO_INLINE_LAMBDA {
      add_buckets<Vector<T, bytes()>>(sizes, queries, keys, hash, begin, end, scratch);
    };
    if constexpr (sizeof(T) < 8) {
      if (columns == 32 && value_columns == 32) return add(Fixed<32>{});
      if (columns == 64 && value_columns == 64) return add(Fixed<64>{});
    }
    add(SizesOf<int64_t, int64_t>{columns, value_columns, queries.stride});
  });
}

template <class T, class Code>
void sampled_backward(const InputRows& grad, const InputRows& query, const InputRows& key, const InputRows& value,
                      const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
                      const OutputRows& grad_query, const OutputRows& grad_key) {
  const int64_t B = query.batches, H = query.heads, N = query.count, M = key.count;
  const int64_t m = query_codes.size(2), columns = padded(query.columns), value_columns = padded(value.columns);
  const uint32_t table_size = 1u << hash_code_len;
  const Code* all_query_codes = static_cast<const Code*>(query_codes.const_data_ptr());
  const Code* all_key_codes = static_cast<const Code*>(key_codes.const_data_ptr());
  const int64_t threads = torch::stable::get_num_threads();
  const auto bucket_of = [](Code code) { return static_cast<uint32_t>(code); };

  // The parallel loops within run one after the other where the loop over heads is parallel already. No two buckets
  // of a hash function share a row, so the result does not depend on how they are divided.
  const auto add_heads = [&](int64_t begin, int64_t end) {
    Side<T> queries(N, columns, value_columns, m, table_size), keys(M, columns, value_columns, m, table_size);
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const int64_t batch = batch_head / H, head = batch_head % H;
      parallel_for(0, N + M, 1024, [&](int64_t first, int64_t last) {
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          if (first < N) queries.template load<V>(query, grad, batch, head, first, std::min(last, N));
          if (last > N) keys.template load<V>(key, value, batch, head, std::max(first, N) - N, last - N);
        });
      });
      sort_codes(queries.buckets, all_query_codes + batch_head * m * N, keys.buckets,
                 all_key_codes + batch_head * m * M, m, bucket_of);
      for (int64_t hash = 0; hash < m; ++hash)
        parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
          Scratch<T> scratch(columns, value_columns, table_size);
          add_buckets(queries, keys, hash, first_bucket(queries.buckets, keys.buckets, hash, first, threads),
                      first_bucket(queries.buckets, keys.buckets, hash, last, threads), scratch);
        });
      parallel_for(0, N + M, 1024, [&](int64_t first, int64_t last) {
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          const T scale = static_cast<T>(hash_code_len) / (2 * m);
          if (first < N) queries.template store<V>(scale, grad_query, batch, head, first, std::min(last, N));
          if (last > N) keys.template store<V>(scale, grad_key, batch, head, std::max(first, N) - N, last - N);
        });
      });
    }
  };
  const int64_t head_bytes = (N + M) * (2 * columns + value_columns) * int64_t{sizeof(T)};
  for_bucket_heads(B * H, N + M, head_bytes, add_heads);
}

std::tuple<Tensor, Tensor, Tensor> sampled_attention_backward_cpu(const Tensor& grad, const Tensor& query,
                                                                  const Tensor& key, const Tensor& value,
                                                                  const Tensor& query_codes, const Tensor& key_codes,
                                                                  int64_t hash_code_len) {
  check_hashed(query, key, value, query_codes, key_codes, hash_code_len);
  check_output(grad, "grad", query, value, query.scalar_type());
  Tensor grad_query = on_huge_pages(empty_heads_last(query));
  Tensor grad_key = on_huge_pages(empty_heads_last(key));
  const Tensor grad_value = std::get<0>(sum_by_buckets(grad, key_codes, query_codes, hash_code_len, false));
  if (grad_query.numel() == 0 && grad_key.numel() == 0) return {grad_query, grad_key, grad_value};
  dispatch_accumulator(query, [&](auto accumulator) {
    dispatch_codes(query_codes, [&](auto code) {
      sampled_backward<decltype(accumulator), decltype(code)>(InputRows(grad), InputRows(query), InputRows(key),
                                                              InputRows(value), query_codes, key_codes, hash_code_len,
                                                              OutputRows(grad_query), OutputRows(grad_key));
    });
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("sampled_attention_backward", TORCH_BOX(&sampled_attention_backward_cpu));
}

}  // namespace yoso
