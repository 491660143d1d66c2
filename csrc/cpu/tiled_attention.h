// Attention whose weights are computed in tiles, never as an N x M matrix, and its backward.
//
// What the weights are, and which tiles have any, is for a class of pairs to say:
//     keys_of(queries, keys)          the part of the keys that a tile of queries needs; begins where a tile does
//     queries_of(keys, queries)       the like for a tile of keys
//     weigh(queries, keys, cosine, base, weights[, slope])   a tile's weights from its cosines, and their slope; base
//                                     is scratch
//     centre_products(queries, products)
//                                     may change the products of gradients and values, with which the slope is
//                                     multiplied
// A cosine is the product of two rows, which need not have length one. For attention_forward and attention_backward,
// which scale them to that, there are also:
//     of_head(batch_head)             the pairs of one head, for one thread
//     zero_masked(rows, columns, M)   clears the rows of masked keys or values
#pragma once

#include "unit_rows.h"

namespace yoso {
namespace {

// a tile of keys and values (64 columns each) and of weights stays in a 48 KB first-level cache
constexpr int64_t kTileQueries = 32;
constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileSize = kTileQueries * kTileKeys;

// 1 - acos(x) / pi for x clamped to [-1, 1]
inline double angle_complement(double x) { return 1 - std::acos(std::clamp(x, -1.0, 1.0)) / M_PI; }

// acos(x) / pi = sqrt(1 - x) * polynomial(x) on [0, 1], a minimax fit with an error of 9e-10: powers multiply it
YOSO_INLINE float angle_complement(float x) {
  const float a = std::min(std::fabs(x), 1.0f);
  float polynomial = 0.00027659145f;
  polynomial = polynomial * a - 0.0014864685f;
  polynomial = polynomial * a + 0.0038485099f;
  polynomial = polynomial * a - 0.006865996f;
  polynomial = polynomial * a + 0.010485322f;
  polynomial = polynomial * a - 0.016132422f;
  polynomial = polynomial * a + 0.028342457f;
  polynomial = polynomial * a - 0.06830982f;
  polynomial = polynomial * a + 0.5f;
  const float angle = std::sqrt(1.0f - a) * polynomial;
  return x < 0 ? angle : 1.0f - angle;
}

YOSO_INLINE double power_of_two(double x) { return std::exp2(x); }

// 2^x for x < 127, as 2^n 2^f with n an integer; 0 below float's normal range.
YOSO_INLINE float power_of_two(float x) {
  // added to a small number and subtracted, it rounds that to an integer
  constexpr float kRounds = 0x1.8p23f;
  constexpr float kSmallest = -126;
  const float y = x < kSmallest ? kSmallest : x;
  const float n = (y + kRounds) - kRounds, f = y - n;
  // a minimax fit of 2^f on [-1/2, 1/2], with a relative error of 1e-7
  float series = 0.00132647273f;
  series = series * f + 0.00967151299f;
  series = series * f + 0.0555073358f;
  series = series * f + 0.240222424f;
  series = series * f + 0.693147004f;
  series = series * f + 1.0f;
  const float power = __builtin_bit_cast(float, (static_cast<int32_t>(n) + 127) << 23) * series;
  return x < kSmallest ? 0.0f : power;
}

// out = base^exponent by squaring; base is overwritten
template <class T>
YOSO_INLINE void power(T* base, int64_t exponent, T* out) {
  for (int64_t i = 0; i < kTileSize; ++i) out[i] = (exponent & 1) ? base[i] : T{1};
  for (exponent >>= 1; exponent > 0; exponent >>= 1) {
    for (int64_t i = 0; i < kTileSize; ++i) base[i] *= base[i];
    if (exponent & 1)
      for (int64_t i = 0; i < kTileSize; ++i) out[i] *= base[i];
  }
}

// A tile's weights p(cosine); base is scratch.
template <class T>
YOSO_INLINE void kernel_weights(const T* cosine, int64_t tau, T* base, T* weights) {
  for (int64_t i = 0; i < kTileSize; ++i) base[i] = angle_complement(cosine[i]);
  power(base, tau, weights);
}

// A run of queries or keys, in rows.
struct Range {
  int64_t begin, end;
};

// Transposes each tile of kTileKeys rows: to[tile][column][row]; rows past the end are copies of the last.
template <class V, class T = Element<V>>
YOSO_INLINE void transpose_tiles(const T* from, int64_t count, int64_t columns, T* to) {
  for (int64_t first = 0; first < count; first += kTileKeys, to += columns * kTileKeys) {
    int32_t rows[kTileKeys];
    for (int64_t r = 0; r < kTileKeys; ++r) rows[r] = static_cast<int32_t>(std::min(r, count - 1 - first));
    transpose_rows<V>(PickedRows<const T>{from + first * columns, columns, rows}, kTileKeys, columns, to, kTileKeys);
  }
}

int64_t whole_tiles(int64_t keys) { return (keys + kTileKeys - 1) / kTileKeys * kTileKeys; }

// out [queries, value_columns] += weights value, for queries, the first of them row `first` of its head, and keys
// transposed by tiles.
template <class V, class Pairs, class T = Element<V>>
YOSO_INLINE void attention_rows(Pairs& pairs, int64_t first, const T* query, int64_t num_queries, const T* key_tiles,
                                const T* value, int64_t num_keys, int64_t columns, int64_t value_columns, T* out) {
  alignas(64) T cosine[kTileSize], base[kTileSize], weights[kTileSize];
  for (int64_t q = 0; q < num_queries; q += kTileQueries) {
    const int64_t nq = std::min(kTileQueries, num_queries - q);
    const Range keys = pairs.keys_of({first + q, first + q + nq}, {0, num_keys});
    for (int64_t k = keys.begin; k < keys.end; k += kTileKeys) {
      const int64_t nk = std::min(kTileKeys, keys.end - k);
      std::memset(cosine, 0, sizeof(cosine));
      // not those of a last tile that have no key: short sequences have no other
      multiply<V>(nq, padded(nk), columns, AllRows<const T>{query + q * columns, columns}, 1,
                  AllRows<const T>{key_tiles + k * columns, kTileKeys}, AllRows<T>{cosine, kTileKeys});
      pairs.template weigh<V>({first + q, first + q + nq}, {k, k + nk}, cosine, base, weights);
      multiply<V>(nq, value_columns, nk, AllRows<T>{weights, kTileKeys}, 1,
                  AllRows<const T>{value + k * value_columns, value_columns},
                  AllRows<T>{out + q * value_columns, value_columns});
    }
  }
}

// Into how many slices of queries, which do not interact, heads are cut, so that every thread has work.
inline int64_t slices_of_head(int64_t heads, int64_t num_queries) {
  const int64_t threads = torch::stable::get_num_threads();
  return std::clamp<int64_t>((threads + heads - 1) / heads, 1, (num_queries + kTileQueries - 1) / kTileQueries);
}

// inverse_length is used only where out's rows are scaled to length one.
template <class In, class Pairs>
void attention_forward(const Pairs& all_pairs, const Tensor& query, const Tensor& key, const Tensor& value, bool unit,
                       const Tensor& out, const Tensor& inverse_length) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), D = query.size(3);
  const int64_t M = key.size(2), Dv = value.size(3), columns = padded(D), value_columns = padded(Dv);
  const int64_t slices = slices_of_head(B * H, N);
  const int64_t rows = (N + slices - 1) / slices;
  T* inverse = unit ? static_cast<T*>(inverse_length.mutable_data_ptr()) : nullptr;
  parallel_for(0, B * H * slices, 1, [&](int64_t begin, int64_t end) {
    Buffer<T> queries(rows * columns), keys(M * columns), key_tiles(whole_tiles(M) * columns);
    Buffer<T> values(M * value_columns), sums(rows * value_columns), lengths(std::max(rows, M));
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / slices / H, head = task / slices % H;
        const int64_t first = task % slices * rows, last = std::min(N, first + rows);
        if (first >= last) continue;
        auto pairs = all_pairs.of_head(batch * H + head);
        load_rows<V>(rows_of<In>(query), batch, head, first, last, D, queries.data(), columns);
        normalize_rows<V>(queries.data(), columns, last - first, columns, lengths.data());
        if (task == begin || task % slices == 0) {
          load_rows<V>(rows_of<In>(key), batch, head, 0, M, D, keys.data(), columns);
          load_rows<V>(rows_of<In>(value), batch, head, 0, M, Dv, values.data(), value_columns);
          pairs.zero_masked(keys.data(), columns, M);
          pairs.zero_masked(values.data(), value_columns, M);
          normalize_rows<V>(keys.data(), columns, M, columns, lengths.data());
          transpose_tiles<V>(keys.data(), M, columns, key_tiles.data());
        }
        sums.zero();
        attention_rows<V>(pairs, first, queries.data(), last - first, key_tiles.data(), values.data(), M, columns,
                          value_columns, sums.data());
        if (unit)
          normalize_rows<V>(sums.data(), value_columns, last - first, value_columns,
                            inverse + (batch * H + head) * N + first);
        store_rows<V>(sums.data(), value_columns, T{1}, mutable_rows_of<In>(out), batch, head, first, last, Dv);
      }
    });
  });
}

// One (batch, head): rows as loaded, unit rows and transposed tiles, and the gradients' sums.
template <class T>
struct Head {
  const int64_t num_queries, num_keys, columns, value_columns;
  Buffer<T> query, query_inverse, key, key_inverse, key_tiles, value, value_tiles, grad;
  Buffer<T> grad_query, grad_key, grad_value;

  Head(int64_t num_queries, int64_t num_keys, int64_t columns, int64_t value_columns)
      : num_queries(num_queries),
        num_keys(num_keys),
        columns(columns),
        value_columns(value_columns),
        query(num_queries * columns),
        query_inverse(num_queries),
        key(num_keys * columns),
        key_inverse(num_keys),
        key_tiles(whole_tiles(num_keys) * columns),
        value(num_keys * value_columns),
        value_tiles(whole_tiles(num_keys) * value_columns),
        grad(num_queries * value_columns),
        grad_query(num_queries * columns),
        grad_key(num_keys * columns),
        grad_value(num_keys * value_columns) {}
};

// Adds the tiles of some queries and keys to the gradients of the queries, of the keys and values, or of both.
template <class V, class Pairs, class T = Element<V>>
YOSO_INLINE void attention_gradients(Pairs& pairs, Head<T>& head, Range queries, Range keys, bool to_queries,
                                     bool to_keys) {
  const int64_t D = head.columns, Dv = head.value_columns;
  alignas(64) T cosine[kTileSize], base[kTileSize], weights[kTileSize], slope[kTileSize], products[kTileSize];
  for (int64_t k = keys.begin; k < keys.end; k += kTileKeys) {
    const int64_t nk = std::min(kTileKeys, keys.end - k);
    const Range near = pairs.queries_of({k, k + nk}, queries);
    for (int64_t q = near.begin; q < near.end; q += kTileQueries) {
      const int64_t nq = std::min(kTileQueries, near.end - q);
      const AllRows<const T> query{head.query.data() + q * D, D}, grad{head.grad.data() + q * Dv, Dv};
      std::memset(cosine, 0, sizeof(cosine));
      std::memset(products, 0, sizeof(products));
      multiply<V>(nq, padded(nk), D, query, 1, AllRows<T>{head.key_tiles.data() + k * D, kTileKeys},
                  AllRows<T>{cosine, kTileKeys});
      multiply<V>(nq, padded(nk), Dv, grad, 1, AllRows<T>{head.value_tiles.data() + k * Dv, kTileKeys},
                  AllRows<T>{products, kTileKeys});
      pairs.template weigh<V>({q, q + nq}, {k, k + nk}, cosine, base, weights, slope);
      pairs.template centre_products<V>({q, q + nq}, products);
      for (int64_t i = 0; i < nq * kTileKeys; ++i) slope[i] *= products[i];
      if (to_queries)
        multiply<V>(nq, D, nk, AllRows<T>{slope, kTileKeys}, 1, AllRows<T>{head.key.data() + k * D, D},
                    AllRows<T>{head.grad_query.data() + q * D, D});
      if (to_keys) {
        multiply<V>(nk, D, nq, AllRows<T>{slope, 1}, kTileKeys, query, AllRows<T>{head.grad_key.data() + k * D, D});
        multiply<V>(nk, Dv, nq, AllRows<T>{weights, 1}, kTileKeys, grad,
                    AllRows<T>{head.grad_value.data() + k * Dv, Dv});
      }
    }
  }
}

// Calls f(Range) in parallel for runs of whole tiles that make up `count` rows.
template <class F>
void for_tiles(int64_t count, int64_t tile, const F& f) {
  parallel_for(0, (count + tile - 1) / tile, 1, [&](int64_t begin, int64_t end) {
    f(Range{begin * tile, std::min(count, end * tile)});
  });
}

// Sums up a head's gradients by add_tiles(queries, keys, to_queries, to_keys), in parallel where threads share it.
template <class T, class F>
void add_gradients(Head<T>& head, bool shared, const F& add_tiles) {
  const int64_t N = head.num_queries, M = head.num_keys;
  head.grad_query.zero();
  head.grad_key.zero();
  head.grad_value.zero();
  if (shared) {
    // the weights are computed twice, so that no two threads add to the same row
    for_tiles(M, kTileKeys, [&](Range keys) { add_tiles({0, N}, keys, false, true); });
    for_tiles(N, kTileQueries, [&](Range queries) { add_tiles(queries, {0, M}, true, false); });
  } else {
    add_tiles({0, N}, {0, M}, true, true);
  }
}

template <class V, class In, class T = Element<V>>
YOSO_INLINE void store_gradients(const Head<T>& rows, const Tensor& grad_query, const Tensor& grad_key,
                                 const Tensor& grad_value, int64_t batch, int64_t head) {
  const auto store = [&](const Buffer<T>& from, int64_t columns, const Tensor& to) YOSO_INLINE_LAMBDA {
    store_rows<V>(from.data(), columns, T{1}, mutable_rows_of<In>(to), batch, head, 0, to.size(2), to.size(3));
  };
  store(rows.grad_query, rows.columns, grad_query);
  store(rows.grad_key, rows.columns, grad_key);
  store(rows.grad_value, rows.value_columns, grad_value);
}

// Calls add_heads(begin, end, shared) for parts of all heads in parallel, or for all where threads have to share them.
template <class F>
void for_heads(int64_t heads, const F& add_heads) {
  // sharing a head costs a third more, idle threads cost more than that
  const int64_t threads = torch::stable::get_num_threads();
  if (2 * heads > threads || threads == 1)
    parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) { add_heads(begin, end, false); });
  else
    add_heads(0, heads, true);
}

template <class In, class Pairs>
void attention_backward(const Pairs& all_pairs, const Tensor& grad, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& grad_query, const Tensor& grad_key,
                        const Tensor& grad_value) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), D = query.size(3);
  const int64_t M = key.size(2), Dv = value.size(3), columns = padded(D), value_columns = padded(Dv);
  auto add_heads = [&](int64_t begin, int64_t end, bool shared) {
    Head<T> rows(N, M, columns, value_columns);
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const int64_t batch = batch_head / H, head = batch_head % H;
      const auto add_tiles = [&](Range queries, Range keys, bool to_queries, bool to_keys) {
        auto pairs = all_pairs.of_head(batch_head);
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          attention_gradients<Vector<T, bytes()>>(pairs, rows, queries, keys, to_queries, to_keys);
        });
      };
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        load_rows<V>(rows_of<In>(query), batch, head, 0, N, D, rows.query.data(), columns);
        load_rows<V>(rows_of<In>(key), batch, head, 0, M, D, rows.key.data(), columns);
        load_rows<V>(rows_of<In>(value), batch, head, 0, M, Dv, rows.value.data(), value_columns);
        load_rows<V>(rows_of<In>(grad), batch, head, 0, N, Dv, rows.grad.data(), value_columns);
        const auto pairs = all_pairs.of_head(batch_head);
        pairs.zero_masked(rows.key.data(), columns, M);
        pairs.zero_masked(rows.value.data(), value_columns, M);
        normalize_rows<V>(rows.query.data(), columns, N, columns, rows.query_inverse.data());
        normalize_rows<V>(rows.key.data(), columns, M, columns, rows.key_inverse.data());
        transpose_tiles<V>(rows.key.data(), M, columns, rows.key_tiles.data());
        transpose_tiles<V>(rows.value.data(), M, value_columns, rows.value_tiles.data());
      });
      add_gradients(rows, shared, add_tiles);
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        through_normalize<V>(rows.grad_query.data(), columns, rows.query.data(), columns, N, columns,
                             rows.query_inverse.data(), T{1});
        through_normalize<V>(rows.grad_key.data(), columns, rows.key.data(), columns, M, columns,
                             rows.key_inverse.data(), T{1});
        store_gradients<V, In>(rows, grad_query, grad_key, grad_value, batch, head);
      });
    }
  };
  for_heads(B * H, add_heads);
}

}  // namespace
}  // namespace yoso
