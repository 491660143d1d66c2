// Attention whose exact weights stand in for softmax's; reference.py says which.
#include <limits>

#include "tiled_attention.h"

namespace yoso {
namespace {

constexpr int64_t kPower = 128;
// squared, the scale of weights, with which neither they nor their sums leave float32's range
constexpr double kHalfScale = 0x1p49;
// by which a cosine stays below 1
constexpr double kMargin = 1.01;
// rows that are summed up at a time: a long sum is rounded more
constexpr int64_t kSumRows = 64;

// The powers of which x^127 and x^128 are made, the last one scaled.
template <class T>
struct Powers {
  T x, x2, x4, x8, x16, x32, x64;
  YOSO_INLINE explicit Powers(T x)
      : x(x),
        x2(x * x),
        x4(x2 * x2),
        x8(x4 * x4),
        x16(x8 * x8),
        x32(x16 * x16),
        x64(x32 * x32 * static_cast<T>(kHalfScale)) {}
};

// The pairs of one head. What is by row is padded to whole tiles with zeros.
template <class T>
struct SoftmaxLikePairs {
  const T* key_weight;
  // sums of weights, kRowQuantum lanes for each query; only the forward has them
  T* totals = nullptr;
  // of the backward: by query, the mean of the gradient's products with values; by key, the gradient of the logarithm
  // of its weight, nullptr where that is another pass's
  const T* mean_product = nullptr;
  T* grad_logarithm = nullptr;

  YOSO_INLINE Range keys_of(Range, Range keys) const { return keys; }
  YOSO_INLINE Range queries_of(Range, Range queries) const { return queries; }

  template <class V>
  YOSO_INLINE void weigh(Range queries, Range keys, const T* cosine, T*, T* weights) const {
    for (int64_t i = 0; i < kTileSize; ++i) {
      const Powers<T> p(angle_complement(cosine[i]));
      weights[i] = p.x64 * p.x64;
    }
    T* total = totals + queries.begin * kRowQuantum;
    for (int64_t q = 0; q < kTileQueries; ++q, weights += kTileKeys, total += kRowQuantum) {
      V sum = load<V>(total);
      for (int64_t k = 0; k < kTileKeys; k += kLanes<V>) {
        const V weight = load<V>(weights + k) * load<V>(key_weight + keys.begin + k);
        store<V>(weights + k, weight);
        sum += weight;
      }
      store<V>(total, sum);
    }
  }

  template <class V>
  YOSO_INLINE void weigh(Range, Range keys, const T* cosine, T*, T* weights, T* slope) const {
    for (int64_t i = 0; i < kTileSize; ++i) {
      const Powers<T> p(angle_complement(cosine[i]));
      weights[i] = p.x64 * p.x64;
      slope[i] = p.x * p.x2 * p.x4 * p.x8 * p.x16 * p.x32 * p.x64 *
                 (static_cast<T>(kHalfScale * kPower / M_PI) / std::sqrt(1 - cosine[i] * cosine[i]));
    }
    for (int64_t q = 0; q < kTileQueries; ++q, weights += kTileKeys, slope += kTileKeys)
      for (int64_t k = 0; k < kTileKeys; k += kLanes<V>) {
        const V weight = load<V>(key_weight + keys.begin + k);
        store<V>(weights + k, load<V>(weights + k) * weight);
        store<V>(slope + k, load<V>(slope + k) * weight);
      }
  }

  template <class V>
  YOSO_INLINE void centre_products(Range queries, Range keys, const T* weights, T* products) const {
    for (int64_t k = 0; k < kTileKeys; k += kLanes<V>) {
      V sum = {};
      for (int64_t q = 0; q < kTileQueries; ++q) {
        const V product = load<V>(products + q * kTileKeys + k) - mean_product[queries.begin + q];
        store<V>(products + q * kTileKeys + k, product);
        sum += load<V>(weights + q * kTileKeys + k) * product;
      }
      if (grad_logarithm == nullptr) continue;
      T* to = grad_logarithm + keys.begin + k;
      store<V>(to, load<V>(to) + sum);
    }
  }
};

int64_t whole_query_tiles(int64_t queries) { return (queries + kTileQueries - 1) / kTileQueries * kTileQueries; }

// real[row], for all rows where it is nullptr
YOSO_INLINE bool is_real(const bool* real, int64_t row) { return real == nullptr || real[row]; }

template <class V>
YOSO_INLINE Element<V> dot(const Element<V>* a, const Element<V>* b, int64_t columns) {
  V sum = {};
  for (int64_t c = 0; c < columns; c += kLanes<V>) sum += load<V>(a + c) * load<V>(b + c);
  return sum_of_lanes(sum);
}

// to += factor * from
template <class V>
YOSO_INLINE void add_row(Element<V> factor, const Element<V>* from, int64_t columns, Element<V>* to) {
  for (int64_t c = 0; c < columns; c += kLanes<V>) store<V>(to + c, load<V>(to + c) + factor * load<V>(from + c));
}

// Takes their mean from the real rows; the others, which may hold anything, become 0. Returns how many are real.
template <class V, class T = Element<V>>
YOSO_INLINE int64_t subtract_mean(T* rows, int64_t count, int64_t columns, const bool* real, T* mean) {
  int64_t num_real = count;
  if (real != nullptr)
    for (int64_t row = 0; row < count; ++row)
      if (!real[row]) {
        std::memset(rows + row * columns, 0, columns * sizeof(T));
        --num_real;
      }
  for (int64_t c = 0; c < columns; c += kLanes<V>) {
    V sum = {};
    for (int64_t first = 0; first < count; first += kSumRows) {
      V part = {};
      for (int64_t row = first; row < std::min(count, first + kSumRows); ++row) part += load<V>(rows + row * columns + c);
      sum += part;
    }
    store<V>(mean + c, sum / static_cast<T>(std::max<int64_t>(num_real, 1)));
  }
  for (int64_t row = 0; row < count; ++row)
    if (is_real(real, row)) add_row<V>(-1, mean, columns, rows + row * columns);
  return num_real;
}

// The numbers of a head that its gradient needs again.
template <class T>
struct Centred {
  // what keys are multiplied by for their products with queries to be cosines
  T factor;
  int64_t num_queries;
};

// Takes their means from a head's queries and keys and scales the keys. Finds the keys' weights, at most 1, and the
// mean of the queries; key_mean is scratch.
template <class V, class T = Element<V>>
YOSO_INLINE Centred<T> centre_head(T* query, int64_t N, T* key, int64_t M, int64_t columns, const bool* real_queries,
                                   const bool* real_keys, double scale, T* key_weight, T* query_mean, T* key_mean) {
  const int64_t num_queries = subtract_mean<V>(query, N, columns, real_queries, query_mean);
  subtract_mean<V>(key, M, columns, real_keys, key_mean);
  T square_query = 0, square_key = 0, largest = -std::numeric_limits<T>::infinity();
  for (int64_t row = 0; row < N; ++row) {
    const T* x = query + row * columns;
    square_query = std::max(square_query, dot<V>(x, x, columns));
  }
  for (int64_t row = 0; row < M; ++row) {
    const T* x = key + row * columns;
    square_key = std::max(square_key, dot<V>(x, x, columns));
    key_weight[row] = dot<V>(x, query_mean, columns) * static_cast<T>(scale);
    if (is_real(real_keys, row)) largest = std::max(largest, key_weight[row]);
  }
  for (int64_t row = 0; row < whole_tiles(M); ++row)
    key_weight[row] = row < M && is_real(real_keys, row) ? std::exp(key_weight[row] - largest) : 0;
  const auto length = [](T square) { return square > 0 ? std::sqrt(square) : 1; };
  const T longest = static_cast<T>(kMargin) * length(square_query) * length(square_key);
  const T factor = 1 / std::max(longest, static_cast<T>(2 * kPower / (M_PI * scale)));
  for (int64_t i = 0; i < M * columns; i += kLanes<V>) store<V>(key + i, load<V>(key + i) * factor);
  return {factor, num_queries};
}

// Which keys and queries of a batch are real; masked ones are of the same tokens where there are as many of both.
struct Mask {
  std::optional<Tensor> real;
  int64_t num_queries, num_keys;

  Mask(const std::optional<Tensor>& key_mask, int64_t num_queries, int64_t num_keys)
      : num_queries(num_queries), num_keys(num_keys) {
    if (key_mask.has_value()) real = torch::stable::contiguous(*key_mask);
  }
  const bool* keys(int64_t batch) const {
    return real.has_value() ? static_cast<const bool*>(real->const_data_ptr()) + batch * num_keys : nullptr;
  }
  const bool* queries(int64_t batch) const { return num_queries == num_keys ? keys(batch) : nullptr; }
};

// Clears the rows that are not real.
template <class T>
YOSO_INLINE void zero_masked(const bool* real, int64_t count, int64_t columns, T* rows) {
  for (int64_t row = 0; row < count; ++row)
    if (!is_real(real, row)) std::memset(rows + row * columns, 0, columns * sizeof(T));
}

template <class In>
void forward(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, double scale,
             const Tensor& out, const Tensor& total) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), D = query.size(3);
  const int64_t M = key.size(2), Dv = value.size(3), columns = padded(D), value_columns = padded(Dv);
  const int64_t slices = slices_of_head(B * H, N);
  const int64_t rows = (N + slices - 1) / slices;
  T* total_data = static_cast<T*>(total.mutable_data_ptr());
  torch::stable::parallel_for(0, B * H * slices, 1, [&](int64_t begin, int64_t end) {
    Buffer<T> queries(N * columns), keys(M * columns), key_tiles(whole_tiles(M) * columns), means(2 * columns);
    Buffer<T> values(M * value_columns), key_weight(whole_tiles(M)), sums(rows * value_columns);
    Buffer<T> totals(whole_query_tiles(rows) * kRowQuantum);
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / slices / H, head = task / slices % H;
        const int64_t first = task % slices * rows, last = std::min(N, first + rows);
        if (first >= last) continue;
        if (task == begin || task % slices == 0) {
          load_rows<V>(rows_of<In>(query), batch, head, 0, N, D, queries.data(), columns);
          load_rows<V>(rows_of<In>(key), batch, head, 0, M, D, keys.data(), columns);
          load_rows<V>(rows_of<In>(value), batch, head, 0, M, Dv, values.data(), value_columns);
          zero_masked(mask.keys(batch), M, value_columns, values.data());
          centre_head<V>(queries.data(), N, keys.data(), M, columns, mask.queries(batch), mask.keys(batch), scale,
                         key_weight.data(), means.data(), means.data() + columns);
          transpose_tiles(keys.data(), M, columns, key_tiles.data());
        }
        sums.zero();
        totals.zero();
        SoftmaxLikePairs<T> pairs{key_weight.data(), totals.data()};
        attention_rows<V>(pairs, 0, queries.data() + first * columns, last - first, key_tiles.data(), values.data(), M,
                          columns, value_columns, sums.data());
        for (int64_t row = 0; row < last - first; ++row) {
          const T sum = sum_of_lanes(load<V>(totals.data() + row * kRowQuantum)), inverse = sum > 0 ? 1 / sum : 0;
          T* x = sums.data() + row * value_columns;
          for (int64_t c = 0; c < value_columns; c += kLanes<V>) store<V>(x + c, load<V>(x + c) * inverse);
          total_data[(batch * H + head) * N + first + row] = sum;
        }
        store_rows<V>(sums.data(), value_columns, T{1}, mutable_rows_of<In>(out), batch, head, first, last, Dv);
      }
    });
  });
}

// What a head's backward has beside Head.
template <class T>
struct HeadMeans {
  Buffer<T> key_weight, query_mean, key_mean, grad_mean, mean_product, grad_logarithm;

  HeadMeans(int64_t num_queries, int64_t num_keys, int64_t columns)
      : key_weight(whole_tiles(num_keys)),
        query_mean(columns),
        key_mean(columns),
        grad_mean(columns),
        mean_product(whole_query_tiles(num_queries)),
        grad_logarithm(whole_tiles(num_keys)) {}
};

// Divides the gradients of a head's outputs by the sums of weights, and finds their products with the outputs;
// out_rows has room for kSumRows.
template <class V, class In, class T = Element<V>>
YOSO_INLINE void divide_gradients(const Tensor& out, const T* total, int64_t batch, int64_t head, int64_t N, int64_t Dv,
                                  int64_t value_columns, T* grad, T* out_rows, T* mean_product) {
  for (int64_t row = 0; row < N; ++row, grad += value_columns) {
    const int64_t place = row % kSumRows;
    if (place == 0)
      load_rows<V>(rows_of<In>(out), batch, head, row, std::min(N, row + kSumRows), Dv, out_rows, value_columns);
    const T inverse = total[row] > 0 ? 1 / total[row] : 0;
    for (int64_t c = 0; c < value_columns; c += kLanes<V>) store<V>(grad + c, load<V>(grad + c) * inverse);
    mean_product[row] = dot<V>(grad, out_rows + place * value_columns, value_columns);
  }
  for (int64_t row = N; row < whole_query_tiles(N); ++row) mean_product[row] = 0;
}

template <class In>
void backward(const Tensor& grad, const Tensor& out, const Tensor& total, const Tensor& query, const Tensor& key,
              const Tensor& value, const Mask& mask, double scale, const Tensor& grad_query, const Tensor& grad_key,
              const Tensor& grad_value) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), D = query.size(3);
  const int64_t M = key.size(2), Dv = value.size(3), columns = padded(D), value_columns = padded(Dv);
  const T* total_data = static_cast<const T*>(total.const_data_ptr());
  auto add_heads = [&](int64_t begin, int64_t end, bool shared) {
    Head<T> rows(N, M, columns, value_columns);
    HeadMeans<T> means(N, M, columns);
    Buffer<T> out_rows(kSumRows * value_columns);
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const int64_t batch = batch_head / H, head = batch_head % H;
      const bool *real_keys = mask.keys(batch), *real_queries = mask.queries(batch);
      const auto add_tiles = [&](Range queries, Range keys, bool to_queries, bool to_keys) {
        T* grad_logarithm = to_keys ? means.grad_logarithm.data() : nullptr;
        SoftmaxLikePairs<T> pairs{means.key_weight.data(), nullptr, means.mean_product.data(), grad_logarithm};
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          attention_gradients<Vector<T, bytes()>>(pairs, rows, queries, keys, to_queries, to_keys);
        });
      };
      Centred<T> centred;
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        load_rows<V>(rows_of<In>(query), batch, head, 0, N, D, rows.query.data(), columns);
        load_rows<V>(rows_of<In>(key), batch, head, 0, M, D, rows.key.data(), columns);
        load_rows<V>(rows_of<In>(value), batch, head, 0, M, Dv, rows.value.data(), value_columns);
        load_rows<V>(rows_of<In>(grad), batch, head, 0, N, Dv, rows.grad.data(), value_columns);
        zero_masked(real_keys, M, value_columns, rows.value.data());
        centred = centre_head<V>(rows.query.data(), N, rows.key.data(), M, columns, real_queries, real_keys, scale,
                                 means.key_weight.data(), means.query_mean.data(), means.key_mean.data());
        divide_gradients<V, In>(out, total_data + batch_head * N, batch, head, N, Dv, value_columns, rows.grad.data(),
                                out_rows.data(), means.mean_product.data());
        transpose_tiles(rows.key.data(), M, columns, rows.key_tiles.data());
        transpose_tiles(rows.value.data(), M, value_columns, rows.value_tiles.data());
      });
      means.grad_logarithm.zero();
      add_gradients(rows, shared, add_tiles);
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        // through the weights of keys to their rows, which are scaled here, and to the mean of the queries
        T* const grad_mean = means.grad_mean.data();
        means.grad_mean.zero();
        for (int64_t row = 0; row < M; ++row) {
          const T grad_logarithm = means.grad_logarithm[row] * static_cast<T>(scale);
          T* g = rows.grad_key.data() + row * columns;
          for (int64_t c = 0; c < columns; c += kLanes<V>) store<V>(g + c, load<V>(g + c) * centred.factor);
          add_row<V>(grad_logarithm, means.query_mean.data(), columns, g);
          add_row<V>(grad_logarithm / centred.factor, rows.key.data() + row * columns, columns, grad_mean);
        }
        subtract_mean<V>(rows.grad_key.data(), M, columns, real_keys, means.key_mean.data());
        subtract_mean<V>(rows.grad_query.data(), N, columns, real_queries, means.query_mean.data());
        const T share = T{1} / std::max<int64_t>(centred.num_queries, 1);
        for (int64_t row = 0; row < N; ++row)
          if (is_real(real_queries, row))
            add_row<V>(share, grad_mean, columns, rows.grad_query.data() + row * columns);
        store_gradients<V, In>(rows, grad_query, grad_key, grad_value, batch, head);
      });
    }
  };
  for_heads(B * H, add_heads);
}

std::tuple<Tensor, Tensor> softmax_like_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const std::optional<Tensor>& key_mask, double scale) {
  check_softmax_like(query, key, value, key_mask, scale);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor out = on_huge_pages(empty_heads_last(value, B, H, N, value.size(3)));
  Tensor total = empty_inverse_length(out, true);
  if (B * H * N == 0) return {out, total};
  const Tensor rows[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    forward<decltype(element)>(rows[0], rows[1], rows[2], Mask(key_mask, N, key.size(2)), scale, out, total);
  });
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor> softmax_like_attention_backward_cpu(
    const Tensor& grad, const Tensor& out, const Tensor& total, const Tensor& query, const Tensor& key,
    const Tensor& value, const std::optional<Tensor>& key_mask, double scale) {
  check_softmax_like_backward(grad, out, total, query, key, value, key_mask, scale);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), M = key.size(2);
  Tensor grad_query = on_huge_pages(empty_heads_last(query, B, H, N, query.size(3)));
  Tensor grad_key = on_huge_pages(empty_heads_last(key, B, H, M, key.size(3)));
  Tensor grad_value = on_huge_pages(empty_heads_last(value, B, H, M, value.size(3)));
  const Tensor rows[] = {dense_rows(grad), dense_rows(out), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    backward<decltype(element)>(rows[0], rows[1], total, rows[2], rows[3], rows[4], Mask(key_mask, N, M), scale,
                                grad_query, grad_key, grad_value);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("softmax_like_attention", TORCH_BOX(&softmax_like_attention_cpu));
  m.impl("softmax_like_attention_backward", TORCH_BOX(&softmax_like_attention_backward_cpu));
}

}  // namespace yoso
