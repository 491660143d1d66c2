// The gradient of sampled attention, by buckets: linear in the number of rows whatever the data. Of values it is
// sampled attention from queries to keys.
#include "buckets.h"
#include "sampled_attention.h"

#include <vector>

namespace yoso {
namespace {

// rows of a bucket that are multiplied at a time
constexpr int64_t kTileRows = 64;
// from this many keys on, products with a transposed tile cost less than sums over lanes
constexpr int64_t kTransposedKeys = 24;
// buckets of at most this many pairs of a query and a key are not multiplied one by one: their pairs are listed
constexpr int64_t kFewPairs = 4;
// pairs of a list whose rows are fetched ahead
constexpr int64_t kPairsAhead = 8;
// hash functions that are gone over together: each pass over them finds its rows in the cache
constexpr int64_t kHashesTogether = 8;

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

// Queries and keys of a bucket that are multiplied at a time. The weights of their pairs, products of gradients and
// values, begin at `weights`, a row of `stride` for each query.
struct BucketTile {
  Bucket rows;
  int64_t weights, stride;
};

// What one thread goes over of a hash function: small buckets as pairs, others as tiles, and those that cost less
// through products.
template <class T>
struct Listed {
  Buffer<int32_t> query_of, key_of;
  Buffer<T> pair_weights, weights{kTileRows * kTileRows};
  int64_t num_pairs = 0;
  std::vector<BucketTile> tiles;
  std::vector<Bucket> large;

  explicit Listed(int64_t most_buckets)
      : query_of(kFewPairs * most_buckets),
        key_of(kFewPairs * most_buckets),
        pair_weights(padded(kFewPairs * most_buckets)) {}
};

// What one thread needs beside the rows, to go over so many hash functions together.
template <class T>
struct Scratch {
  Buffer<int32_t> numbers;
  Buffer<T> tile, product;
  std::vector<Listed<T>> hashes;

  Scratch(const Side<T>& queries, const Side<T>& keys, int64_t hashes_together)
      : numbers(queries.buckets.table_size),
        tile(kTileRows * queries.other_columns),
        product(queries.other_columns * queries.columns) {
    const int64_t most_buckets = std::min({queries.buckets.table_size, queries.buckets.count, keys.buckets.count});
    for (int64_t hash = 0; hash < hashes_together; ++hash) hashes.emplace_back(most_buckets);
  }
};

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

// Lists a part of a hash function's buckets. Weights of all tiles have their place if they are kept, those of one if
// not.
template <class Sizes, class T>
YOSO_INLINE void list_buckets(Sizes sizes, const Side<T>& queries, const Side<T>& keys, int64_t hash, int64_t part,
                              int64_t parts, bool kept, int32_t* numbers, Listed<T>& listed) {
  const int64_t D = sizes.columns, Dv = sizes.value_columns;
  const SharedBuckets buckets(queries.buckets, keys.buckets, hash);
  const int64_t begin = first_bucket(queries.buckets, keys.buckets, hash, part, parts);
  const int64_t end = first_bucket(queries.buckets, keys.buckets, hash, part + 1, parts);
  const int64_t num_shared = buckets.list(begin, end, numbers);
  // which of these have few pairs cannot be foretold either: all write pairs, and those that have more are overwritten
  int32_t *query_of = listed.query_of.data(), *key_of = listed.key_of.data();
  int64_t num_pairs = 0, num_larger = 0;
  for (int64_t i = 0; i < num_shared; ++i) {
    const Bucket bucket = buckets[numbers[i]];
    const bool few = bucket.pairs() <= kFewPairs;
    const int32_t num_keys = few ? bucket.num_keys : 0;
    for (int p = 0; p < kFewPairs; ++p) {
      query_of[num_pairs + p] = bucket.queries[kPairNumbers.query[num_keys][p]];
      key_of[num_pairs + p] = bucket.keys[kPairNumbers.key[num_keys][p]];
    }
    num_pairs += few ? bucket.pairs() : 0;
    numbers[num_larger] = numbers[i];
    num_larger += !few;
  }
  listed.num_pairs = num_pairs;
  listed.tiles.clear();
  listed.large.clear();
  int64_t num_weights = 0;
  for (int64_t i = 0; i < num_larger; ++i) {
    const Bucket bucket = buckets[numbers[i]];
    if (bucket.pairs() * (2 * D + Dv) > 2 * (int64_t{bucket.num_queries} + bucket.num_keys) * D * Dv) {
      listed.large.push_back(bucket);
      continue;
    }
    for (int32_t k = 0; k < bucket.num_keys; k += kTileRows)
      for (int32_t q = 0; q < bucket.num_queries; q += kTileRows) {
        const int32_t nq = std::min<int32_t>(kTileRows, bucket.num_queries - q);
        const int32_t nk = std::min<int32_t>(kTileRows, bucket.num_keys - k);
        // whole tiles of the product that gives them
        const int64_t stride = nk >= kTransposedKeys ? padded(nk) : (nk + 3) / 4 * 4;
        listed.tiles.push_back({{bucket.queries + q, bucket.keys + k, nq, nk}, num_weights, stride});
        if (kept) num_weights += (nq + 3) / 4 * 4 * stride;
      }
  }
  if (num_weights > listed.weights.size()) listed.weights = Buffer<T>(num_weights + num_weights / 4);
}

// Weighs the pairs of a list from `begin` to `end`: products of gradients and values.
template <class V, class Sizes, class T = Element<V>>
YOSO_INLINE void weigh_pairs(Sizes sizes, Side<T>& queries, Side<T>& keys, Listed<T>& listed, int64_t begin,
                             int64_t end) {
  constexpr int64_t L = kLanes<V>;
  const auto Dv = sizes.value_columns;
  const T *grads = queries.other(), *values = keys.other();
  // a product of two rows waits for its sum over lanes: the sums of as many pairs as there are lanes are taken together
  for (int64_t first = begin; first < end; first += L) {
    V products[L];
    for (int64_t p = 0; p < L; ++p) {
      const int64_t pair = std::min(first + p, end - 1);
      const T* grad = grads + listed.query_of[pair] * sizes.stride;
      const T* value = values + listed.key_of[pair] * sizes.stride;
      V sum = {};
      for (int64_t c = 0; c < Dv; c += L) sum += load<V>(grad + c) * load<V>(value + c);
      products[p] = sum;
    }
    store_sums(products, listed.pair_weights.data() + first);
  }
}

// The same of a tile.
template <class V, class Sizes, class Fetch, class T = Element<V>>
YOSO_INLINE void weigh_tile(Sizes sizes, Side<T>& queries, Side<T>& keys, Scratch<T>& scratch, Listed<T>& listed,
                            const BucketTile& tile, Fetch& ahead) {
  using Picked = PickedRows<const T, decltype(sizes.stride)>;
  const auto Dv = sizes.value_columns;
  const int64_t nq = tile.rows.num_queries, nk = tile.rows.num_keys;
  const Picked grads{queries.other(), sizes.stride, tile.rows.queries};
  const Picked values{keys.other(), sizes.stride, tile.rows.keys};
  const AllRows<T> weights{listed.weights.data() + tile.weights, tile.stride};
  if (nk >= kTransposedKeys) {
    const AllRows<T> transposed{scratch.tile.data(), kTileRows};
    transpose_rows<V>(values, nk, Dv, transposed.data, kTileRows);
    multiply<V, false>(nq, padded(nk), Dv, grads, 1, transposed, weights, ahead);
  } else {
    outlined<V>([=, &ahead](auto) YOSO_INLINE_LAMBDA {
      dot_products<V>(nq, nk, Dv, grads, values, weights.data, weights.stride, ahead);
    });
  }
}

// Adds keys times the weights of a list's pairs to the queries' sums, or queries to the keys'.
template <class V, bool to_queries, class Sizes, class T = Element<V>>
YOSO_INLINE void add_pairs(Sizes sizes, Side<T>& queries, Side<T>& keys, const Listed<T>& listed, int64_t begin,
                           int64_t end) {
  constexpr int64_t L = kLanes<V>;
  const auto D = sizes.columns;
  const auto stride = sizes.stride;
  T* const query_rows = to_queries ? queries.sum() : queries.unit();
  T* const key_rows = to_queries ? keys.unit() : keys.sum();
  const int32_t *query_of = listed.query_of.data(), *key_of = listed.key_of.data();
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t next = std::min(pair + kPairsAhead, listed.num_pairs - 1);
    prefetch(query_rows + query_of[next] * stride, D);
    prefetch(key_rows + key_of[next] * stride, D);
    const T weight = listed.pair_weights[pair];
    T *query = query_rows + query_of[pair] * stride, *key = key_rows + key_of[pair] * stride;
    T* const sum = to_queries ? query : key;
    const T* const unit = to_queries ? key : query;
    for (int64_t c = 0; c < D; c += L) store<V>(sum + c, load<V>(sum + c) + weight * load<V>(unit + c));
  }
}

// The same of a tile.
template <class V, bool to_queries, class Sizes, class Fetch, class T = Element<V>>
YOSO_INLINE void add_tile(Sizes sizes, Side<T>& queries, Side<T>& keys, const Listed<T>& listed,
                          const BucketTile& tile, Fetch& ahead) {
  using Picked = PickedRows<T, decltype(sizes.stride)>;
  const auto D = sizes.columns;
  const int64_t nq = tile.rows.num_queries, nk = tile.rows.num_keys, stride = tile.stride;
  const Picked query_rows{to_queries ? queries.sum() : queries.unit(), sizes.stride, tile.rows.queries};
  const Picked key_rows{to_queries ? keys.unit() : keys.sum(), sizes.stride, tile.rows.keys};
  const T* const weights = listed.weights.data() + tile.weights;
  outlined<V>([=, &ahead](auto) YOSO_INLINE_LAMBDA {
    if constexpr (to_queries)
      multiply<V>(nq, D, nk, AllRows<const T>{weights, stride}, 1, key_rows, query_rows, ahead);
    else
      multiply<V>(nk, D, nq, AllRows<const T>{weights, 1}, stride, query_rows, key_rows, ahead);
  });
}

// Adds rows times their weights to the sums of the other side through V^T K or G^T Q, whose cost is linear in the
// bucket's size.
template <class V, class Sizes, class T = Element<V>>
YOSO_INLINE void add_through_product(Sizes sizes, Side<T>& from, const int32_t* from_order, int64_t num_from,
                                     Side<T>& to, const int32_t* to_order, int64_t num_to, Scratch<T>& scratch) {
  const auto D = sizes.columns, Dv = sizes.value_columns;
  const int64_t stride = from.stride;
  const AllRows<T> product{scratch.product.data(), D}, others{scratch.tile.data(), Dv};
  scratch.product.zero();
  for (int64_t i = 0; i < num_from; i += kTileRows) {
    const int64_t rows = std::min(kTileRows, num_from - i);
    const PickedRows<const T> other{from.other(), stride, from_order + i}, unit{from.unit(), stride, from_order + i};
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < Dv; c += kLanes<V>) store<V>(others[row] + c, load<V>(other[row] + c));
    multiply<V>(Dv, D, rows, AllRows<T>{others.data, 1}, Dv, unit, product);
  }
  for (int64_t i = 0; i < num_to; i += kTileRows) {
    const PickedRows<T> other{to.other(), stride, to_order + i}, sum{to.sum(), stride, to_order + i};
    multiply<V>(std::min(kTileRows, num_to - i), D, Dv, other, 1, product, sum);
  }
}

// The same of the buckets that cost less through products.
template <class V, bool to_queries, class Sizes, class T = Element<V>>
YOSO_INLINE void add_large(Sizes sizes, Side<T>& queries, Side<T>& keys, Scratch<T>& scratch,
                           const Listed<T>& listed) {
  for (const Bucket& bucket : listed.large) {
    if constexpr (to_queries)
      add_through_product<V>(sizes, keys, bucket.keys, bucket.num_keys, queries, bucket.queries, bucket.num_queries,
                             scratch);
    else
      add_through_product<V>(sizes, queries, bucket.queries, bucket.num_queries, keys, bucket.keys, bucket.num_keys,
                             scratch);
  }
}

// Calls f(tile, ahead), which fetches the next tile's rows ahead: of each the `columns` from queries and keys on.
template <class Sizes, class T, class Columns, class F>
YOSO_INLINE void for_tiles(Sizes sizes, const Listed<T>& listed, const T* queries, const T* keys, Columns columns,
                           const F& f) {
  using Fetched = FetchedRows<T, decltype(sizes.stride), Columns>;
  Ahead<Fetched> ahead{{queries, sizes.stride, columns}, {keys, sizes.stride, columns}};
  const int64_t num_tiles = listed.tiles.size();
  for (int64_t i = 0; i < num_tiles; ++i) {
    if (i + 1 < num_tiles) ahead.point_to(listed.tiles[i + 1].rows, kTileRows);
    f(listed.tiles[i], ahead);
    ahead.finish();
  }
}

// How many columns the rows of both sides have: known to the compiler for the usual sizes, but in float64, which is
// there to be right.
template <class Columns, class Stride>
struct SizesOf {
  Columns columns, value_columns;
  Stride stride;
};
template <int64_t columns>
using Fixed = SizesOf<std::integral_constant<int64_t, columns>, std::integral_constant<int64_t, 3 * columns>>;

// Calls f(bytes of a vector, sizes, part), a YOSO_INLINE_LAMBDA, for each of `parts` in parallel.
template <class T, class F>
void for_parts(const Side<T>& queries, int64_t parts, const F& f) {
  parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      const auto run = [&](auto sizes) YOSO_INLINE_LAMBDA {
        for (int64_t part = first; part < last; ++part) f(bytes, sizes, part);
      };
      const int64_t columns = queries.columns, value_columns = queries.other_columns;
      if constexpr (sizeof(T) < 8) {
        if (columns == 32 && value_columns == 32) return run(Fixed<32>{});
        if (columns == 64 && value_columns == 64) return run(Fixed<64>{});
      }
      run(SizesOf<int64_t, int64_t>{columns, value_columns, queries.stride});
    });
  });
}

// Adds the hash functions from `begin` to `end` to the sums: threads share their buckets, each with a scratch of its
// own. A pass over gradients and values gives the weights of all pairs, one over keys and the queries' sums, and one
// over queries and the keys' sums: each reads and writes a third of what one pass would, in random order.
template <class T>
void add_in_passes(Side<T>& queries, Side<T>& keys, int64_t begin, int64_t end, std::vector<Scratch<T>>& scratches) {
  const int64_t parts = scratches.size();
  for_parts(queries, parts, [&](auto bytes, auto sizes, int64_t part) YOSO_INLINE_LAMBDA {
    using V = Vector<T, bytes()>;
    Scratch<T>& scratch = scratches[part];
    for (int64_t hash = begin; hash < end; ++hash) {
      Listed<T>& listed = scratch.hashes[hash - begin];
      list_buckets(sizes, queries, keys, hash, part, parts, true, scratch.numbers.data(), listed);
      weigh_pairs<V>(sizes, queries, keys, listed, 0, listed.num_pairs);
      for_tiles(sizes, listed, queries.other(), keys.other(), sizes.value_columns,
                [&](const BucketTile& tile, auto& ahead) YOSO_INLINE_LAMBDA {
                  weigh_tile<V>(sizes, queries, keys, scratch, listed, tile, ahead);
                });
    }
  });
  const auto add = [&](auto to_queries) {
    for (int64_t hash = begin; hash < end; ++hash)
      for_parts(queries, parts, [&](auto bytes, auto sizes, int64_t part) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        Scratch<T>& scratch = scratches[part];
        const Listed<T>& listed = scratch.hashes[hash - begin];
        add_pairs<V, to_queries()>(sizes, queries, keys, listed, 0, listed.num_pairs);
        add_large<V, to_queries()>(sizes, queries, keys, scratch, listed);
        for_tiles(sizes, listed, to_queries() ? queries.sum() : queries.unit(),
                  to_queries() ? keys.unit() : keys.sum(), sizes.columns,
                  [&](const BucketTile& tile, auto& ahead) YOSO_INLINE_LAMBDA {
                    add_tile<V, to_queries()>(sizes, queries, keys, listed, tile, ahead);
                  });
      });
  };
  add(std::true_type{});
  add(std::false_type{});
}

// Adds one hash function to the sums, all three products of a tile after each other: whole rows are read.
template <class T>
void add_at_once(Side<T>& queries, Side<T>& keys, int64_t hash, std::vector<Scratch<T>>& scratches) {
  const int64_t parts = scratches.size();
  for_parts(queries, parts, [&](auto bytes, auto sizes, int64_t part) YOSO_INLINE_LAMBDA {
    using V = Vector<T, bytes()>;
    Scratch<T>& scratch = scratches[part];
    Listed<T>& listed = scratch.hashes[0];
    list_buckets(sizes, queries, keys, hash, part, parts, false, scratch.numbers.data(), listed);
    for (int64_t first = 0; first < listed.num_pairs; first += kLanes<V>) {
      const int64_t last = std::min(first + kLanes<V>, listed.num_pairs);
      weigh_pairs<V>(sizes, queries, keys, listed, first, last);
      add_pairs<V, true>(sizes, queries, keys, listed, first, last);
      add_pairs<V, false>(sizes, queries, keys, listed, first, last);
    }
    add_large<V, true>(sizes, queries, keys, scratch, listed);
    add_large<V, false>(sizes, queries, keys, scratch, listed);
    for_tiles(sizes, listed, queries.unit(), keys.unit(), sizes.stride,
              [&](const BucketTile& tile, auto& ahead) YOSO_INLINE_LAMBDA {
                weigh_tile<V>(sizes, queries, keys, scratch, listed, tile, ahead);
                add_tile<V, true>(sizes, queries, keys, listed, tile, ahead);
                add_tile<V, false>(sizes, queries, keys, listed, tile, ahead);
              });
  });
}

// Whether passes over so many bytes of a head take less time than all at once. They find rows in a second-level cache
// that would come from the third: a gain with 2 MB of the one and a slow other (Intel), none with 1 MB and a quick one
// (Zen 5), where they take as long up to a sixteenth of it, and then longer, for the weights that are kept.
inline bool passes_pay(int64_t pass_bytes) {
  const int64_t cache_bytes = second_level_bytes();
  return pass_bytes <= (cache_bytes >= 2 << 20 ? 8 * cache_bytes : cache_bytes / 16);
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
  const auto bucket_of = [](Code code) { return static_cast<uint32_t>(code); };

  const int64_t pass_bytes = (N + M) * std::max(columns, value_columns) * int64_t{sizeof(T)};
  const bool in_passes = passes_pay(pass_bytes);
  // The parallel loops within run one after the other where the loop over heads is parallel already. No two buckets
  // of a hash function share a row, so the result does not depend on how they are divided.
  const auto add_heads = [&](int64_t begin, int64_t end, int64_t parts) {
    Side<T> queries(N, columns, value_columns, m, table_size), keys(M, columns, value_columns, m, table_size);
    std::vector<Scratch<T>> scratches;
    for (int64_t part = 0; part < parts; ++part)
      scratches.emplace_back(queries, keys, in_passes ? kHashesTogether : 1);
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
      if (in_passes)
        for (int64_t hash = 0; hash < m; hash += kHashesTogether)
          add_in_passes(queries, keys, hash, std::min(hash + kHashesTogether, m), scratches);
      else
        for (int64_t hash = 0; hash < m; ++hash) add_at_once(queries, keys, hash, scratches);
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
  for_bucket_heads(B * H, N + M, in_passes ? pass_bytes : 3 * pass_bytes, add_heads);
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
