// The exact kernel p(x) = (1 - acos(x) / pi)^tau and its backward, in tiles: never an N x M matrix.
#include "unit_rows.h"

namespace yoso {
namespace {

// a tile of keys and values (64 columns each) and of weights stays in a 48 KB first-level cache
constexpr int64_t kTileQueries = 32;
constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileSize = kTileQueries * kTileKeys;

// 1 - acos(x) / pi for x clamped to [-1, 1]
inline double angle_complement(double x) { return 1 - std::acos(std::clamp(x, -1.0, 1.0)) / M_PI; }

// acos(x) / pi = sqrt(1 - x) * polynomial(x) on [0, 1], a minimax fit with an error of 4e-9
YOSO_INLINE float angle_complement(float x) {
  const float a = std::min(std::fabs(x), 1.0f);
  float polynomial = -0.000458837887f;
  polynomial = polynomial * a + 0.00230629982f;
  polynomial = polynomial * a - 0.00566877866f;
  polynomial = polynomial * a + 0.00997439207f;
  polynomial = polynomial * a - 0.0160150575f;
  polynomial = polynomial * a + 0.028329346f;
  polynomial = polynomial * a - 0.0683092674f;
  polynomial = polynomial * a + 0.499999996f;
  const float angle = std::sqrt(1.0f - a) * polynomial;
  return x < 0 ? angle : 1.0f - angle;
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

// The same, and their slope dp/dx (0 where it diverges) or its lower bound (tau / 2) p.
template <class T>
YOSO_INLINE void kernel_slope(const T* cosine, int64_t tau, bool exact, T* base, T* weights, T* slope) {
  if (!exact) {
    kernel_weights(cosine, tau, base, weights);
    for (int64_t i = 0; i < kTileSize; ++i) slope[i] = weights[i] * (static_cast<T>(tau) / 2);
    return;
  }
  for (int64_t i = 0; i < kTileSize; ++i) base[i] = angle_complement(cosine[i]);
  power(base, tau - 1, slope);
  for (int64_t i = 0; i < kTileSize; ++i) {
    weights[i] = slope[i] * angle_complement(cosine[i]);
    const T square = 1 - cosine[i] * cosine[i];
    slope[i] = square > 0 ? slope[i] * (static_cast<T>(tau) / static_cast<T>(M_PI)) / std::sqrt(square) : 0;
  }
}

// Transposes each tile of kTileKeys rows: to[tile][column][row]; rows past the end are 0.
template <class T>
YOSO_INLINE void transpose_tiles(const T* from, int64_t count, int64_t columns, T* to) {
  for (int64_t first = 0; first < count; first += kTileKeys, to += columns * kTileKeys)
    for (int64_t r = 0; r < kTileKeys; ++r)
      for (int64_t c = 0; c < columns; ++c)
        to[c * kTileKeys + r] = first + r < count ? from[(first + r) * columns + c] : 0;
}

int64_t whole_tiles(int64_t keys) { return (keys + kTileKeys - 1) / kTileKeys * kTileKeys; }

// out [queries, value_columns] += p(query . key) value, for unit queries and keys transposed by tiles.
template <class V, class T = Element<V>>
YOSO_INLINE void expectation_rows(const T* query, int64_t num_queries, const T* key_tiles, const T* value,
                                        int64_t num_keys, int64_t columns, int64_t value_columns, int64_t tau, T* out) {
  alignas(64) T cosine[kTileSize] = {}, base[kTileSize], weights[kTileSize];
  for (int64_t q = 0; q < num_queries; q += kTileQueries) {
    const int64_t nq = std::min(kTileQueries, num_queries - q);
    for (int64_t k = 0; k < num_keys; k += kTileKeys) {
      const int64_t nk = std::min(kTileKeys, num_keys - k);
      std::memset(cosine, 0, sizeof(cosine));
      multiply<V>(nq, kTileKeys, columns, AllRows<const T>{query + q * columns, columns}, 1,
                  AllRows<const T>{key_tiles + k * columns, kTileKeys}, AllRows<T>{cosine, kTileKeys});
      kernel_weights(cosine, tau, base, weights);
      multiply<V>(nq, value_columns, nk, AllRows<T>{weights, kTileKeys}, 1,
                  AllRows<const T>{value + k * value_columns, value_columns},
                  AllRows<T>{out + q * value_columns, value_columns});
    }
  }
}

template <class In>
void expectation_forward(const Tensor& query, const Tensor& key, const Tensor& value, int64_t tau, bool unit,
                         const Tensor& out, const Tensor& inverse_length) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), D = query.size(3);
  const int64_t M = key.size(2), Dv = value.size(3), columns = padded(D), value_columns = padded(Dv);
  // queries do not interact: few heads are cut into slices of queries, so that every thread has work
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t slices = std::clamp<int64_t>((threads + B * H - 1) / (B * H), 1, (N + kTileQueries - 1) / kTileQueries);
  const int64_t rows = (N + slices - 1) / slices;
  T* inverse = static_cast<T*>(inverse_length.mutable_data_ptr());
  torch::stable::parallel_for(0, B * H * slices, 1, [&](int64_t begin, int64_t end) {
    Buffer<T> queries(rows * columns), keys(M * columns), key_tiles(whole_tiles(M) * columns);
    Buffer<T> values(M * value_columns), sums(rows * value_columns), lengths(std::max(rows, M));
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / slices / H, head = task / slices % H;
        const int64_t first = task % slices * rows, last = std::min(N, first + rows);
        if (first >= last) continue;
        load_rows<V>(rows_of<In>(query), batch, head, first, last, D, queries.data(), columns);
        normalize_rows<V>(queries.data(), columns, last - first, columns, lengths.data());
        if (task == begin || task % slices == 0) {
          load_rows<V>(rows_of<In>(key), batch, head, 0, M, D, keys.data(), columns);
          normalize_rows<V>(keys.data(), columns, M, columns, lengths.data());
          transpose_tiles(keys.data(), M, columns, key_tiles.data());
          load_rows<V>(rows_of<In>(value), batch, head, 0, M, Dv, values.data(), value_columns);
        }
        sums.zero();
        expectation_rows<V>(queries.data(), last - first, key_tiles.data(), values.data(), M, columns, value_columns,
                            tau, sums.data());
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

// A run of tiles of queries or keys, in rows.
struct Range {
  int64_t begin, end;
};

// Adds the tiles of some queries and keys to the gradients of the queries, of the keys and values, or of both.
template <class V, class T = Element<V>>
YOSO_INLINE void expectation_gradients(Head<T>& head, Range queries, Range keys, bool to_queries, bool to_keys,
                                       int64_t tau, bool exact) {
  const int64_t D = head.columns, Dv = head.value_columns;
  alignas(64) T cosine[kTileSize] = {}, base[kTileSize], weights[kTileSize], slope[kTileSize], products[kTileSize] = {};
  for (int64_t k = keys.begin; k < keys.end; k += kTileKeys) {
    const int64_t nk = std::min(kTileKeys, keys.end - k);
    for (int64_t q = queries.begin; q < queries.end; q += kTileQueries) {
      const int64_t nq = std::min(kTileQueries, queries.end - q);
      const AllRows<const T> query{head.query.data() + q * D, D}, grad{head.grad.data() + q * Dv, Dv};
      std::memset(cosine, 0, sizeof(cosine));
      std::memset(products, 0, sizeof(products));
      multiply<V>(nq, kTileKeys, D, query, 1, AllRows<T>{head.key_tiles.data() + k * D, kTileKeys},
                  AllRows<T>{cosine, kTileKeys});
      multiply<V>(nq, kTileKeys, Dv, grad, 1, AllRows<T>{head.value_tiles.data() + k * Dv, kTileKeys},
                  AllRows<T>{products, kTileKeys});
      kernel_slope(cosine, tau, exact, base, weights, slope);
      for (int64_t i = 0; i < kTileSize; ++i) slope[i] *= products[i];
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
  torch::stable::parallel_for(0, (count + tile - 1) / tile, 1, [&](int64_t begin, int64_t end) {
    f(Range{begin * tile, std::min(count, end * tile)});
  });
}

template <class In>
void expectation_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, int64_t tau,
                          bool exact, const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), D = query.size(3);
  const int64_t M = key.size(2), Dv = value.size(3), columns = padded(D), value_columns = padded(Dv);
  auto add_heads = [&](int64_t begin, int64_t end, bool shared) {
    Head<T> rows(N, M, columns, value_columns);
    const auto add_tiles = [&](Range queries, Range keys, bool to_queries, bool to_keys) {
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        expectation_gradients<Vector<T, bytes()>>(rows, queries, keys, to_queries, to_keys, tau, exact);
      });
    };
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const int64_t batch = batch_head / H, head = batch_head % H;
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        load_rows<V>(rows_of<In>(query), batch, head, 0, N, D, rows.query.data(), columns);
        load_rows<V>(rows_of<In>(key), batch, head, 0, M, D, rows.key.data(), columns);
        load_rows<V>(rows_of<In>(value), batch, head, 0, M, Dv, rows.value.data(), value_columns);
        load_rows<V>(rows_of<In>(grad), batch, head, 0, N, Dv, rows.grad.data(), value_columns);
        normalize_rows<V>(rows.query.data(), columns, N, columns, rows.query_inverse.data());
        normalize_rows<V>(rows.key.data(), columns, M, columns, rows.key_inverse.data());
        transpose_tiles(rows.key.data(), M, columns, rows.key_tiles.data());
        transpose_tiles(rows.value.data(), M, value_columns, rows.value_tiles.data());
      });
      rows.grad_query.zero();
      rows.grad_key.zero();
      rows.grad_value.zero();
      if (shared) {
        // the weights are computed twice, so that no two threads add to the same row
        for_tiles(M, kTileKeys, [&](Range keys) { add_tiles({0, N}, keys, false, true); });
        for_tiles(N, kTileQueries, [&](Range queries) { add_tiles(queries, {0, M}, true, false); });
      } else {
        add_tiles({0, N}, {0, M}, true, true);
      }
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        through_normalize<V>(rows.grad_query.data(), columns, rows.query.data(), columns, N, columns,
                             rows.query_inverse.data(), T{1});
        through_normalize<V>(rows.grad_key.data(), columns, rows.key.data(), columns, M, columns,
                             rows.key_inverse.data(), T{1});
        store_rows<V>(rows.grad_query.data(), columns, T{1}, mutable_rows_of<In>(grad_query), batch, head, 0, N, D);
        store_rows<V>(rows.grad_key.data(), columns, T{1}, mutable_rows_of<In>(grad_key), batch, head, 0, M, D);
        store_rows<V>(rows.grad_value.data(), value_columns, T{1}, mutable_rows_of<In>(grad_value), batch, head, 0, M,
                      Dv);
      });
    }
  };
  // sharing a head costs a third more, idle threads cost more than that
  const int64_t threads = torch::stable::get_num_threads();
  if (2 * B * H > threads || threads == 1)
    torch::stable::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) { add_heads(begin, end, false); });
  else
    add_heads(0, B * H, true);
}

void check_all_rows(const Tensor& query, const Tensor& key, const Tensor& value, int64_t hash_code_len) {
  // nothing is hashed: no code has to hold this many bits
  STD_TORCH_CHECK(hash_code_len >= 1 && hash_code_len <= 32, "hash_code_len must be in 1..32, got ", hash_code_len);
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4, "query and key must have shape [B, H, rows, D]");
  check_rows(key, "key", query, key.size(2), query.scalar_type());
  check_rows(value, "value", query, key.size(2), query.scalar_type());
  STD_TORCH_CHECK(query.size(3) == key.size(3), "query and key must agree in head_dim");
}

// the choice of backward matters to autograd only
std::tuple<Tensor, Tensor> expectation_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     int64_t hash_code_len, bool, bool unit) {
  check_all_rows(query, key, value, hash_code_len);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor out = on_huge_pages(empty_heads_last(value, B, H, N, value.size(3)));
  Tensor inverse_length = empty_inverse_length(out, unit);
  if (B * H * N == 0) return {out, inverse_length};
  const Tensor rows[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    expectation_forward<decltype(element)>(rows[0], rows[1], rows[2], hash_code_len, unit, out, inverse_length);
  });
  return {out, inverse_length};
}

std::tuple<Tensor, Tensor, Tensor> expectation_attention_backward_cpu(const Tensor& grad, const Tensor& query,
                                                                      const Tensor& key, const Tensor& value,
                                                                      int64_t hash_code_len, bool exact) {
  check_all_rows(query, key, value, hash_code_len);
  check_rows(grad, "grad", query, query.size(2), query.scalar_type());
  STD_TORCH_CHECK(grad.size(3) == value.size(3), "grad and value must agree in columns");
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), M = key.size(2);
  Tensor grad_query = on_huge_pages(empty_heads_last(query, B, H, N, query.size(3)));
  Tensor grad_key = on_huge_pages(empty_heads_last(key, B, H, M, key.size(3)));
  Tensor grad_value = on_huge_pages(empty_heads_last(value, B, H, M, value.size(3)));
  const Tensor rows[] = {dense_rows(grad), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    expectation_backward<decltype(element)>(rows[0], rows[1], rows[2], rows[3], hash_code_len, exact, grad_query,
                                            grad_key, grad_value);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("expectation_attention", TORCH_BOX(&expectation_attention_cpu));
  m.impl("expectation_attention_backward", TORCH_BOX(&expectation_attention_backward_cpu));
}

}  // namespace yoso
