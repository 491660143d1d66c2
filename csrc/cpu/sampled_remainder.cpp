// What exp(x) has beyond 1 + x, from pairs that share a bucket; reference.py says what it is. Its gradient.
#include "buckets.h"
#include "tiled_attention.h"

namespace yoso {
namespace {

// buckets of at most this many pairs are not multiplied one by one: their pairs are listed
constexpr int64_t kFewPairs = 16;
// the longest list
constexpr int64_t kListedPairs = 256;
// the smallest logarithm of a weight that counts, less what a shift adds
constexpr float kMinLogarithm = -87;

// How products of rows become weights: these are divided by 2^shift.
template <class T>
struct Exponent {
  T scale, unit, least, most;
  int32_t shift;

  Exponent(double scale, int32_t shift)
      : scale(static_cast<T>(scale)),
        unit(std::ldexp(T{1}, -shift)),
        least(kMinLogarithm + static_cast<T>(kLog2) * shift),
        most(kMaxLogarithm + static_cast<T>(kLog2) * shift),
        shift(shift) {}
};

// (exp(x) - 1 - x) / 2^shift; slope is what it has in x
YOSO_INLINE double remainder(double x, const Exponent<double>& exponent, double& slope) {
  const double less_one = std::expm1(std::min(x, exponent.most));
  slope = exponent.unit * (x < exponent.most ? less_one : -1);
  return exponent.unit * (less_one - x);
}

// By 2^n exp(f), with exp(f) - 1 - f as a series: where n is 0, nothing cancels.
template <class X>
YOSO_INLINE X remainder(X x, const Exponent<float>& exponent, X& slope) {
  const float unit = exponent.unit;
  const X least = x < exponent.least ? X{} + exponent.least : x;
  X f;
  const X power = power_of_two(least > exponent.most ? X{} + exponent.most : least, f, exponent.shift);
  X series = X{} + 1.0f / 5040;
  series = series * f + 1.0f / 720;
  series = series * f + 1.0f / 120;
  series = series * f + 1.0f / 24;
  series = series * f + 1.0f / 6;
  series = series * f + 0.5f;
  const X beyond = power * (f * f * series), first = power * f, less_one = power - unit;
  slope = x < exponent.most ? less_one + first + beyond : X{} - unit;
  return beyond + (less_one + (first - unit * x));
}

// The numbers of a tile's pairs.
template <class T>
struct Tile {
  static constexpr int64_t kSize = kBucketRows * kBucketRows;
  // in turn: products of queries and keys, weights; slopes; products of gradients and values
  alignas(64) T products[kSize], weights[kSize], slopes[kSize];
  // by key: what makes a product a cosine, and what the key weighs
  alignas(64) T inverse[kBucketRows], key_weight[kBucketRows];
  int32_t part[kBucketRows];
};

// Turns cosines into weights: the remainder of scale x products, times share, over the probability that a pair shares
// a bucket. Where `with_slopes`, slopes get what the weights have in the products.
template <class V, bool with_slopes, class T>
YOSO_INLINE void weigh(Tile<T>& tile, int64_t size, int64_t tau, const Exponent<T>& exponent, T share) {
  using X = Numbers<V>;
  for (int64_t i = 0; i < size; i += kNumbers<V>) {
    const X left = angle_complement(load_numbers<X>(tile.weights + i)), angle = 1 - left;
    X left_power = left, angle_power = angle;
    // by squaring, from the highest bit on
    for (int bit = 62 - __builtin_clzll(tau); bit >= 0; --bit) {
      const bool once_more = tau >> bit & 1;
      left_power *= once_more ? left_power * left : left_power;
      angle_power *= once_more ? angle_power * angle : angle_power;
    }
    X slope;
    const X factor = share / (left_power + angle_power);
    const X logarithm = exponent.scale * load_numbers<X>(tile.products + i);
    store_numbers(tile.weights + i, factor * remainder(logarithm, exponent, slope));
    if constexpr (with_slopes) store_numbers(tile.slopes + i, factor * exponent.scale * slope);
  }
}

// Which sides of a head's rows there are, in this order: of queries the query, of the backward the gradient, and the
// sum; of keys the key, the value, and of the backward both sums.
template <class T>
struct RemainderRows {
  const int64_t columns, value_columns, stride;
  Buffer<T> rows, inverse;
  BucketOrder buckets;

  RemainderRows(int64_t count, int64_t columns, int64_t value_columns, int64_t stride, int64_t num_hash,
                int64_t table_size)
      : columns(columns),
        value_columns(value_columns),
        stride(stride),
        rows(count * stride),
        inverse(count),
        buckets(count, num_hash, table_size) {}

  // the row's first vector, whose inverse length is kept
  template <class V>
  YOSO_INLINE void load_first(const InputRows& x, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    T* to = rows.data() + begin * stride;
    load_rows<V>(x, batch, head, begin, end, to, stride);
    for (int64_t row = begin; row < end; ++row, to += stride) {
      V squares = {};
      for (int64_t c = 0; c < columns; c += kLanes<V>) squares += load<V>(to + c) * load<V>(to + c);
      const T square = sum_of_lanes(squares);
      inverse[row] = square > 0 ? 1 / std::sqrt(square) : 0;
      std::memset(to + columns, 0, (stride - columns) * sizeof(T));
    }
  }

  template <class V>
  YOSO_INLINE void load_other(const InputRows& x, int64_t batch, int64_t head, int64_t begin, int64_t end) {
    load_rows<V>(x, batch, head, begin, end, rows.data() + begin * stride + columns, stride);
  }

  template <class V>
  YOSO_INLINE void store(int64_t first_column, const OutputRows& out, int64_t batch, int64_t head, int64_t begin,
                         int64_t end) {
    store_rows<V>(rows.data() + begin * stride + first_column, stride, T{1}, out, batch, head, begin, end);
  }
};

// One head: numbers by row that tensors hold, and those that become tensors.
template <class T>
struct RemainderNumbers {
  const T *key_weight, *grad_total;
  T *total, *grad_weight;
};

// Adds what a tile of queries and a part of their bucket's keys give to the sums of the rows.
template <class V, bool backward, class Sizes, class T, class A>
YOSO_INLINE void add_tile(Sizes sizes, RemainderRows<T>& queries, const int32_t* query_order, int64_t nq,
                          RemainderRows<T>& keys, const int32_t* key_order, int64_t nk,
                          const RemainderNumbers<T>& numbers, int64_t tau, const Exponent<T>& exponent, T share,
                          Tile<T>& tile, A& ahead) {
  const auto D = sizes.columns, Dv = sizes.value_columns;
  const PickedRows<T> query{queries.rows.data(), queries.stride, query_order};
  const PickedRows<T> key{keys.rows.data(), keys.stride, key_order};
  const auto after = [](PickedRows<T> rows, int64_t columns) YOSO_INLINE_LAMBDA {
    return PickedRows<T>{rows.data + columns, rows.stride, rows.picked};
  };
  // of a tile's numbers; rows shorter than a vector share one
  const int64_t stride = nk <= 4 ? 4 : nk <= 8 ? 8 : padded(nk), size = padded(nq * stride);
  outlined<V>([&](auto) YOSO_INLINE_LAMBDA {
    dot_products<V>(nq, nk, D, query, key, tile.products, stride, ahead);
  });
  for (int64_t k = 0; k < nk; ++k) {
    tile.inverse[k] = keys.inverse[key_order[k]];
    tile.key_weight[k] = numbers.key_weight[key_order[k]];
  }
  for (int64_t q = 0; q < nq; ++q) {
    const T* products = tile.products + q * stride;
    const T inverse = queries.inverse[query_order[q]];
    for (int64_t k = 0; k < stride; ++k) tile.weights[q * stride + k] = products[k] * inverse * tile.inverse[k];
  }
  for (int64_t i = nq * stride; i < size; ++i) tile.products[i] = tile.weights[i] = 0;
  weigh<V, backward>(tile, size, tau, exponent, share);
  if constexpr (!backward) {
    for (int64_t q = 0; q < nq; ++q) {
      T* weights = tile.weights + q * stride;
      T sum = 0;
      for (int64_t k = 0; k < nk; ++k) sum += weights[k] *= tile.key_weight[k];
      numbers.total[query_order[q]] += sum;
    }
    const AllRows<const T> weights{tile.weights, stride};
    outlined<V>([&](auto) YOSO_INLINE_LAMBDA {
      multiply<V>(nq, Dv, nk, weights, 1, after(key, D), after(query, D), ahead);
    });
  } else {
    // the gradients' products with the values, in place of those of queries and keys
    outlined<V>([&](auto) YOSO_INLINE_LAMBDA {
      dot_products<V>(nq, nk, Dv, after(query, D), after(key, D), tile.products, stride, ahead);
    });
    for (int64_t q = 0; q < nq; ++q) {
      const T grad_total = numbers.grad_total[query_order[q]];
      T *products = tile.products + q * stride, *weights = tile.weights + q * stride;
      T* slopes = tile.slopes + q * stride;
      for (int64_t k = 0; k < stride; ++k) {
        const T product = products[k] + grad_total;
        products[k] = weights[k] * product;
        weights[k] *= tile.key_weight[k];
        slopes[k] *= product * tile.key_weight[k];
      }
    }
    for (int64_t k = 0; k < nk; ++k) {
      T sum = 0;
      for (int64_t q = 0; q < nq; ++q) sum += tile.products[q * stride + k];
      numbers.grad_weight[key_order[k]] += sum;
    }
    const T *slope = tile.slopes, *weights = tile.weights;
    outlined<V>([&](auto) YOSO_INLINE_LAMBDA {
      multiply<V>(nq, D, nk, AllRows<const T>{slope, stride}, 1, key, after(query, D + Dv), ahead);
    });
    outlined<V>([&](auto) YOSO_INLINE_LAMBDA {
      multiply<V>(nk, D, nq, AllRows<const T>{slope, 1}, stride, query, after(key, D + Dv), ahead);
    });
    outlined<V>([&](auto) YOSO_INLINE_LAMBDA {
      multiply<V>(nk, Dv, nq, AllRows<const T>{weights, 1}, stride, after(query, D), after(key, 2 * D + Dv), ahead);
    });
  }
}

// Products of the rows of each pair of a list, from these columns on.
template <class V, class T = Element<V>>
YOSO_INLINE void multiply_pairs(int64_t columns, const T* queries, int64_t query_stride, const int32_t* query_of,
                                const T* keys, int64_t key_stride, const int32_t* key_of, int64_t count, T* products) {
  constexpr int64_t L = kLanes<V>;
  for (int64_t first = 0; first < count; first += L) {
    V sums[L];
    for (int64_t p = 0; p < L; ++p) {
      const T *query = queries + query_of[first + p] * query_stride, *key = keys + key_of[first + p] * key_stride;
      V sum = {};
      for (int64_t c = 0; c < columns; c += L) sum += load<V>(query + c) * load<V>(key + c);
      sums[p] = sum;
    }
    store_sums(sums, products + first);
  }
}

// Adds what the pairs of a list give. The loops of a small bucket are too short to be foretold, and the sum over lanes
// of a product of two rows is waited for; here those of as many pairs as there are lanes are taken together.
template <class V, bool backward, class Sizes, class T>
YOSO_INLINE void add_listed_pairs(Sizes sizes, RemainderRows<T>& queries, int32_t* query_of, RemainderRows<T>& keys,
                                  int32_t* key_of, int64_t count, const RemainderNumbers<T>& numbers, int64_t tau,
                                  const Exponent<T>& exponent, T share, Tile<T>& tile) {
  constexpr int64_t L = kLanes<V>;
  const auto D = sizes.columns, Dv = sizes.value_columns;
  if (count == 0) return;
  const int64_t size = padded(count), query_stride = queries.stride, key_stride = keys.stride;
  T *query_rows = queries.rows.data(), *key_rows = keys.rows.data();
  for (int64_t p = count; p < size; ++p) {
    query_of[p] = query_of[count - 1];
    key_of[p] = key_of[count - 1];
  }
  multiply_pairs<V>(D, query_rows, query_stride, query_of, key_rows, key_stride, key_of, size, tile.products);
  for (int64_t p = 0; p < size; ++p)
    tile.weights[p] = tile.products[p] * queries.inverse[query_of[p]] * keys.inverse[key_of[p]];
  weigh<V, backward>(tile, size, tau, exponent, share);
  if constexpr (backward)
    multiply_pairs<V>(Dv, query_rows + D, query_stride, query_of, key_rows + D, key_stride, key_of, size,
                      tile.products);
  for (int64_t p = 0; p < count; ++p) {
    const int64_t q = query_of[p], k = key_of[p];
    const T weight = tile.weights[p] * numbers.key_weight[k];
    T *query = query_rows + q * query_stride, *key = key_rows + k * key_stride;
    if constexpr (!backward) {
      numbers.total[q] += weight;
      for (int64_t c = 0; c < Dv; c += L)
        store<V>(query + D + c, load<V>(query + D + c) + weight * load<V>(key + D + c));
    } else {
      const T product = tile.products[p] + numbers.grad_total[q];
      const T slope = tile.slopes[p] * product * numbers.key_weight[k];
      numbers.grad_weight[k] += tile.weights[p] * product;
      T *query_sum = query + D + Dv, *key_sum = key + D + Dv, *value_sum = key_sum + D;
      for (int64_t c = 0; c < D; c += L) {
        store<V>(query_sum + c, load<V>(query_sum + c) + slope * load<V>(key + c));
        store<V>(key_sum + c, load<V>(key_sum + c) + slope * load<V>(query + c));
      }
      for (int64_t c = 0; c < Dv; c += L)
        store<V>(value_sum + c, load<V>(value_sum + c) + weight * load<V>(query + D + c));
    }
  }
}

// Which of a bucket's parts its first queries meet: another one in every bucket and for every hash function.
YOSO_INLINE int64_t chance(int64_t bucket, int64_t hash) {
  return static_cast<uint32_t>((bucket + 1) * (hash + 1) * 2654435761u) >> 16;
}

// Adds a hash function's buckets from `begin` to `end`; listed has room for their numbers.
template <class V, bool backward, class Sizes, class T>
YOSO_INLINE void add_buckets(Sizes sizes, RemainderRows<T>& queries, RemainderRows<T>& keys,
                             const RemainderNumbers<T>& numbers, int64_t num_hash, int64_t hash, int64_t begin,
                             int64_t end, int64_t tau, const Exponent<T>& exponent, Tile<T>& tile, int32_t* listed) {
  const SharedBuckets buckets(queries.buckets, keys.buckets, hash);
  const int64_t num_shared = buckets.list(begin, end, listed);
  alignas(64) int32_t query_of[kListedPairs + kFewPairs], key_of[kListedPairs + kFewPairs];
  const auto add_pairs = [&](int64_t num_pairs) YOSO_INLINE_LAMBDA {
    add_listed_pairs<V, backward>(sizes, queries, query_of, keys, key_of, num_pairs, numbers, tau, exponent,
                                  T{1} / num_hash, tile);
  };
  int64_t num_pairs = 0, count = 0;
  for (int64_t i = 0; i < num_shared; ++i) {
    const Bucket bucket = buckets[listed[i]];
    if (bucket.pairs() > kFewPairs) {
      listed[count++] = listed[i];
      continue;
    }
    for (int32_t k = 0; k < bucket.num_keys; ++k)
      for (int32_t q = 0; q < bucket.num_queries; ++q, ++num_pairs) {
        query_of[num_pairs] = bucket.queries[q];
        key_of[num_pairs] = bucket.keys[k];
      }
    if (num_pairs > kListedPairs - kFewPairs) {
      add_pairs(num_pairs);
      num_pairs = 0;
    }
  }
  add_pairs(num_pairs);
  using Fetched = FetchedRows<T, int64_t, int64_t>;
  Ahead<Fetched> ahead{{queries.rows.data(), queries.stride, queries.stride},
                       {keys.rows.data(), keys.stride, keys.stride}};
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) ahead.point_to(buckets[listed[i + 1]], kBucketRows);
    const Bucket bucket = buckets[listed[i]];
    const int64_t parts = (bucket.num_keys + kBucketRows - 1) / kBucketRows;
    const T share = static_cast<T>(parts) / num_hash;
    for (int64_t q = 0; q < bucket.num_queries; q += kBucketRows) {
      const int64_t part = (q / kBucketRows + chance(listed[i], hash)) % parts;
      const int64_t nq = std::min<int64_t>(kBucketRows, bucket.num_queries - q);
      const int64_t nk = (bucket.num_keys - part + parts - 1) / parts;
      const int32_t* met = bucket.keys;
      if (parts > 1) {
        for (int64_t k = 0; k < nk; ++k) tile.part[k] = met[part + k * parts];
        met = tile.part;
      }
      add_tile<V, backward>(sizes, queries, bucket.queries + q, nq, keys, met, nk, numbers, tau, exponent, share, tile,
                            ahead);
    }
    ahead.finish();
  }
}

// How many columns rows have: known to the compiler for the usual sizes, but in float64, which is there to be right.
template <class Columns>
struct RemainderSizes {
  Columns columns, value_columns;
};
template <int64_t columns>
using FixedSizes = RemainderSizes<std::integral_constant<int64_t, columns>>;

template <bool backward, class T>
void add_buckets(RemainderRows<T>& queries, RemainderRows<T>& keys, const RemainderNumbers<T>& numbers,
                 int64_t num_hash, int64_t hash, int64_t begin, int64_t end, int64_t tau,
                 const Exponent<T>& exponent) {
  const std::unique_ptr<Tile<T>> tile(new Tile<T>);
  Buffer<int32_t> listed(queries.buckets.table_size);
  const int64_t D = queries.columns, Dv = queries.value_columns;
  vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
    using V = Vector<T, bytes()>;
    const auto add = [&](auto sizes) YOSO_INLINE_LAMBDA {
      add_buckets<V, backward>(sizes, queries, keys, numbers, num_hash, hash, begin, end, tau, exponent, *tile,
                               listed.data());
    };
    if constexpr (sizeof(T) < 8) {
      if (D == 32 && Dv == 32) return add(FixedSizes<32>{});
      if (D == 64 && Dv == 64) return add(FixedSizes<64>{});
    }
    add(RemainderSizes<int64_t>{D, Dv});
  });
}

// What the operators get; the last two are the backward's.
struct Inputs {
  InputRows query, key, value;
  Tensor key_weight, shift, query_codes, key_codes;
  std::optional<InputRows> grad;
  std::optional<Tensor> grad_total;
};

template <class T, class Code, bool backward, class Store>
void for_buckets(const Inputs& x, int64_t tau, double scale, std::optional<Tensor> total,
                 std::optional<Tensor> grad_weight, const Store& store) {
  const int64_t B = x.query.batches, H = x.query.heads, N = x.query.count, M = x.key.count;
  const int64_t m = x.query_codes.size(2), D = padded(x.query.columns), Dv = padded(x.value.columns);
  const uint32_t table_size = 1u << (tau - 1), last_code = 2 * table_size - 1;
  // no bucket of the table for codes below 0
  const auto bucket_of = [=](Code code) {
    const uint32_t c = static_cast<uint32_t>(code);
    return c > last_code ? table_size : std::min(c, last_code - c);
  };
  const Code* query_codes = static_cast<const Code*>(x.query_codes.const_data_ptr());
  const Code* key_codes = static_cast<const Code*>(x.key_codes.const_data_ptr());
  const T* key_weight = static_cast<const T*>(x.key_weight.const_data_ptr());
  const T* grad_total = backward ? static_cast<const T*>(x.grad_total->const_data_ptr()) : nullptr;
  T* totals = backward ? nullptr : static_cast<T*>(total->mutable_data_ptr());
  T* grad_weights = backward ? static_cast<T*>(grad_weight->mutable_data_ptr()) : nullptr;
  const int64_t query_stride = D + Dv + (backward ? D : 0), key_stride = (backward ? 2 : 1) * (D + Dv);

  // The parallel loops within run one after the other where the loop over heads is parallel already. No two buckets
  // of a hash function share a row, so the result does not depend on how they are divided.
  const auto add_heads = [&](int64_t begin, int64_t end, int64_t parts) {
    RemainderRows<T> queries(N, D, Dv, query_stride, m, table_size), keys(M, D, Dv, key_stride, m, table_size);
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const int64_t batch = batch_head / H, head = batch_head % H;
      const Exponent<T> exponent(scale, static_cast<const int32_t*>(x.shift.const_data_ptr())[batch_head]);
      RemainderNumbers<T> numbers{key_weight + batch_head * M};
      if constexpr (backward) {
        numbers.grad_total = grad_total + batch_head * N;
        numbers.grad_weight = grad_weights + batch_head * M;
        std::fill_n(numbers.grad_weight, M, T(0));
      } else {
        numbers.total = totals + batch_head * N;
        std::fill_n(numbers.total, N, T(0));
      }
      parallel_for(0, N + M, 1024, [&](int64_t first, int64_t last) {
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          if (first < N) {
            queries.template load_first<V>(x.query, batch, head, first, std::min(last, N));
            if constexpr (backward) queries.template load_other<V>(*x.grad, batch, head, first, std::min(last, N));
          }
          if (last > N) {
            keys.template load_first<V>(x.key, batch, head, std::max(first, N) - N, last - N);
            keys.template load_other<V>(x.value, batch, head, std::max(first, N) - N, last - N);
          }
        });
      });
      sort_codes(queries.buckets, query_codes + batch_head * m * N, keys.buckets, key_codes + batch_head * m * M, m,
                 bucket_of);
      for (int64_t hash = 0; hash < m; ++hash)
        parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
          add_buckets<backward, T>(queries, keys, numbers, m, hash,
                                   first_bucket(queries.buckets, keys.buckets, hash, first, parts),
                                   first_bucket(queries.buckets, keys.buckets, hash, last, parts), tau, exponent);
        });
      parallel_for(0, N + M, 1024, [&](int64_t first, int64_t last) {
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          store(bytes, queries, keys, batch, head, Range{first, std::min(last, N)},
                Range{std::max(first, N) - N, last - N});
        });
      });
    }
  };
  const int64_t head_bytes = (N * query_stride + M * key_stride) * int64_t{sizeof(T)};
  for_bucket_heads(B * H, N + M, head_bytes, add_heads);
}

std::tuple<Tensor, Tensor> sampled_remainder_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                 const Tensor& key_weight, const Tensor& shift,
                                                 const Tensor& query_codes, const Tensor& key_codes,
                                                 int64_t hash_code_len, double scale) {
  check_sampled_remainder(query, key, value, key_weight, shift, query_codes, key_codes, hash_code_len, scale);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor out = on_huge_pages(empty_heads_last(key_weight, N, value.size(3)));
  Tensor total = empty_row_numbers(query);
  if (B * H * N == 0) return {out, total};
  const Inputs x{InputRows(query), InputRows(key), InputRows(value), key_weight, shift, query_codes, key_codes, {}, {}};
  const OutputRows out_rows(out);
  dispatch_accumulator(query, [&](auto accumulator) {
    dispatch_codes(query_codes, [&](auto code) {
      using T = decltype(accumulator);
      const auto store = [&](auto bytes, auto& queries, auto&, int64_t batch, int64_t head, Range rows,
                             Range) YOSO_INLINE_LAMBDA {
        if (rows.begin < rows.end)
          queries.template store<Vector<T, bytes()>>(queries.columns, out_rows, batch, head, rows.begin, rows.end);
      };
      for_buckets<T, decltype(code), false>(x, hash_code_len, scale, total, {}, store);
    });
  });
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sampled_remainder_backward_cpu(
    const Tensor& grad, const Tensor& grad_total, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& key_weight, const Tensor& shift, const Tensor& query_codes, const Tensor& key_codes,
    int64_t hash_code_len, double scale) {
  check_sampled_remainder_backward(grad, grad_total, query, key, value, key_weight, shift, query_codes, key_codes,
                                   hash_code_len, scale);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), M = key.size(2);
  Tensor grad_query = on_huge_pages(empty_heads_last(query));
  Tensor grad_key = on_huge_pages(empty_heads_last(key));
  Tensor grad_value = on_huge_pages(empty_heads_last(value));
  Tensor grad_weight = empty_row_numbers(key);
  if (B * H * (N + M) == 0) return {grad_query, grad_key, grad_value, grad_weight};
  const Inputs x{InputRows(query), InputRows(key), InputRows(value), key_weight, shift,
                 query_codes,      key_codes,      InputRows(grad),  grad_total};
  const OutputRows to_query(grad_query), to_key(grad_key), to_value(grad_value);
  dispatch_accumulator(query, [&](auto accumulator) {
    dispatch_codes(query_codes, [&](auto code) {
      using T = decltype(accumulator);
      const auto store = [&](auto bytes, auto& queries, auto& keys, int64_t batch, int64_t head, Range query_rows,
                             Range key_rows) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        const int64_t sums = queries.columns + queries.value_columns;
        if (query_rows.begin < query_rows.end)
          queries.template store<V>(sums, to_query, batch, head, query_rows.begin, query_rows.end);
        if (key_rows.begin < key_rows.end) {
          keys.template store<V>(sums, to_key, batch, head, key_rows.begin, key_rows.end);
          keys.template store<V>(sums + keys.columns, to_value, batch, head, key_rows.begin, key_rows.end);
        }
      };
      for_buckets<T, decltype(code), true>(x, hash_code_len, scale, {}, grad_weight, store);
    });
  });
  return {grad_query, grad_key, grad_value, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("sampled_remainder", TORCH_BOX(&sampled_remainder_cpu));
  m.impl("sampled_remainder_backward", TORCH_BOX(&sampled_remainder_backward_cpu));
}

}  // namespace yoso
