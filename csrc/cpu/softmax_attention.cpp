// Softmax attention: what samples of exp estimate. The kernel of PyTorch takes longer from 32 tokens on.
#include <limits>

#include "tiled_attention.h"

namespace yoso {
namespace {

// rows that are loaded at a time where only their products are kept
constexpr int64_t kLoadedRows = 64;

template <int Offset, class V, int... I>
YOSO_INLINE V rotate_lanes(V x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, ((I + Offset) % static_cast<int>(sizeof...(I)))...);
}

template <class V, int Offset = kLanes<V> / 2>
YOSO_INLINE Element<V> largest_lane(V x) {
  if constexpr (Offset == 0) {
    return x[0];
  } else {
    const V other = rotate_lanes<Offset>(x, std::make_integer_sequence<int, kLanes<V>>{});
    return largest_lane<V, Offset / 2>(x > other ? x : other);
  }
}

// The pairs of one head. A weight is 2^(factor q.k + bias of the key), over the largest of its row or their sum.
template <class T>
struct SoftmaxPairs {
  T factor;
  // 0, or minus infinity where a key is masked or there is none; padded to whole tiles
  const T* bias;
  // the tiles of keys outside have none that is real
  Range real{};
  // of the forward, by query: its largest logarithm so far, the sum of its weights in kRowQuantum lanes, and its
  // output
  T *largest = nullptr, *totals = nullptr, *out = nullptr;
  int64_t value_columns = 0;
  // of the backward, by query: the logarithm of its weights' sum, the mean of the gradient's products with values
  const T *logarithm = nullptr, *mean_product = nullptr;

  YOSO_INLINE Range keys_of(Range, Range) const { return real; }
  YOSO_INLINE Range queries_of(Range keys, Range queries) const {
    return keys.begin < real.end && keys.end > real.begin ? queries : Range{0, 0};
  }

  // calls f with how many columns of a tile there are to compute: all, known to the compiler, or fewer
  template <class F>
  YOSO_INLINE void with_width(Range keys, const F& f) const {
    const int64_t width = padded(keys.end - keys.begin);
    if (width == kTileKeys)
      f(std::integral_constant<int64_t, kTileKeys>{});
    else
      f(width);
  }

  template <class V>
  YOSO_INLINE void weigh(Range queries, Range keys, const T* products, T*, T* weights) const {
    with_width(keys, [&](auto width) YOSO_INLINE_LAMBDA { weigh_columns<V>(width, queries, keys, products, weights); });
  }

  template <class V, class Width>
  YOSO_INLINE void weigh_columns(Width width, Range queries, Range keys, const T* products, T* weights) const {
    const int64_t nq = queries.end - queries.begin;
    for (int64_t q = 0; q < nq; ++q) {
      const T* from = products + q * kTileKeys;
      T* to = weights + q * kTileKeys;
      V most = load<V>(from) * factor + load<V>(bias + keys.begin);
      store<V>(to, most);
      for (int64_t k = kLanes<V>; k < width; k += kLanes<V>) {
        const V x = load<V>(from + k) * factor + load<V>(bias + keys.begin + k);
        store<V>(to + k, x);
        most = x > most ? x : most;
      }
      const int64_t row = queries.begin + q;
      const T tile_largest = largest_lane(most);
      if (tile_largest > largest[row]) raise<V>(row, tile_largest);
      for (int64_t k = 0; k < width; k += kLanes<V>) store<V>(to + k, load<V>(to + k) - largest[row]);
    }
    for (int64_t q = 0; q < nq; ++q)
      for (int64_t k = 0; k < width; ++k) weights[q * kTileKeys + k] = power_of_two(weights[q * kTileKeys + k]);
    T* total = totals + queries.begin * kRowQuantum;
    for (int64_t q = 0; q < nq; ++q, weights += kTileKeys, total += kRowQuantum) {
      V sum = load<V>(total);
      for (int64_t k = 0; k < width; k += kLanes<V>) sum += load<V>(weights + k);
      store<V>(total, sum);
    }
  }

  // takes the row's sums to another largest logarithm
  template <class V>
  YOSO_INLINE void raise(int64_t row, T to) const {
    const T less = power_of_two(largest[row] - to);
    largest[row] = to;
    T *x = out + row * value_columns, *total = totals + row * kRowQuantum;
    for (int64_t c = 0; c < value_columns; c += kLanes<V>) store<V>(x + c, load<V>(x + c) * less);
    store<V>(total, load<V>(total) * less);
  }

  template <class V>
  YOSO_INLINE void weigh(Range queries, Range keys, const T* products, T*, T* weights, T* slope) const {
    with_width(keys, [&](auto width) YOSO_INLINE_LAMBDA {
      for (int64_t q = 0; q < queries.end - queries.begin; ++q)
        for (int64_t k = 0, i = q * kTileKeys; k < width; ++k, ++i)
          slope[i] = weights[i] =
              power_of_two(products[i] * factor + (bias[keys.begin + k] - logarithm[queries.begin + q]));
    });
  }

  template <class V>
  YOSO_INLINE void centre_products(Range queries, T* products) const {
    for (int64_t q = queries.begin; q < queries.end; ++q, products += kTileKeys)
      for (int64_t k = 0; k < kTileKeys; k += kLanes<V>)
        store<V>(products + k, load<V>(products + k) - mean_product[q]);
  }
};

// Fills a head's bias by its row of the mask, nullptr where all keys are real; returns the tiles that have any.
template <class T>
YOSO_INLINE Range fill_bias(const bool* real, int64_t num_keys, T* bias) {
  Range tiles{num_keys, 0};
  for (int64_t row = 0; row < whole_tiles(num_keys); ++row) {
    const bool is_real = row < num_keys && (real == nullptr || real[row]);
    bias[row] = is_real ? 0 : -std::numeric_limits<T>::infinity();
    if (is_real) tiles = {std::min(tiles.begin, row / kTileKeys * kTileKeys), row + 1};
  }
  return tiles;
}

// Loads keys or values of a head; masked rows, which may hold anything, become 0.
template <class V, class In>
YOSO_INLINE void load_real_rows(const Tensor& x, int64_t batch, int64_t head, const bool* real, Element<V>* to,
                                int64_t columns) {
  load_rows<V>(rows_of<In>(x), batch, head, 0, x.size(2), x.size(3), to, columns);
  if (real == nullptr) return;
  for (int64_t row = 0; row < x.size(2); ++row)
    if (!real[row]) std::memset(to + row * columns, 0, columns * sizeof(Element<V>));
}

// The mask's row of a batch; nullptr where all keys are real.
inline const bool* real_keys(const std::optional<Tensor>& key_mask, int64_t batch) {
  if (!key_mask.has_value()) return nullptr;
  return static_cast<const bool*>(key_mask->const_data_ptr()) + batch * key_mask->size(1);
}

template <class In>
void forward(const Tensor& query, const Tensor& key, const Tensor& value,
             const std::optional<Tensor>& key_mask, double scale, const Tensor& out, const Tensor& logarithm) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  const int64_t M = key.size(2), columns = padded(query.size(3)), value_columns = padded(value.size(3));
  const int64_t slices = slices_of_head(B * H, N);
  const int64_t rows = (N + slices - 1) / slices;
  T* logarithms = static_cast<T*>(logarithm.mutable_data_ptr());
  parallel_for(0, B * H * slices, 1, [&](int64_t begin, int64_t end) {
    Buffer<T> queries(rows * columns), keys(M * columns), key_tiles(whole_tiles(M) * columns), bias(whole_tiles(M));
    Buffer<T> values(M * value_columns), sums(rows * value_columns), totals(rows * kRowQuantum), largest(rows);
    Range tiles{};
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / slices / H, head = task / slices % H;
        const int64_t first = task % slices * rows, last = std::min(N, first + rows);
        if (first >= last) continue;
        load_rows<V>(rows_of<In>(query), batch, head, first, last, query.size(3), queries.data(), columns);
        if (task == begin || task % slices == 0) {
          const bool* real = real_keys(key_mask, batch);
          load_real_rows<V, In>(key, batch, head, real, keys.data(), columns);
          load_real_rows<V, In>(value, batch, head, real, values.data(), value_columns);
          tiles = fill_bias(real, M, bias.data());
          transpose_tiles<V>(keys.data(), M, columns, key_tiles.data());
        }
        sums.zero();
        totals.zero();
        std::fill_n(largest.data(), last - first, std::numeric_limits<T>::lowest());
        SoftmaxPairs<T> pairs{static_cast<T>(scale * M_LOG2E), bias.data(), tiles, largest.data(), totals.data(),
                              sums.data(), value_columns};
        attention_rows<V>(pairs, 0, queries.data(), last - first, key_tiles.data(), values.data(), M, columns,
                          value_columns, sums.data());
        for (int64_t row = 0; row < last - first; ++row) {
          const T sum = sum_of_lanes(load<V>(totals.data() + row * kRowQuantum)), inverse = sum == 0 ? 0 : 1 / sum;
          T* x = sums.data() + row * value_columns;
          for (int64_t c = 0; c < value_columns; c += kLanes<V>) store<V>(x + c, load<V>(x + c) * inverse);
          logarithms[(batch * H + head) * N + first + row] = static_cast<T>(M_LN2) * largest[row] + std::log(sum);
        }
        store_rows<V>(sums.data(), value_columns, T{1}, mutable_rows_of<In>(out), batch, head, first, last,
                      value.size(3));
      }
    });
  });
}

template <class In>
void backward(const Tensor& grad, const Tensor& out, const Tensor& logarithm, const Tensor& query, const Tensor& key,
              const Tensor& value, const std::optional<Tensor>& key_mask, double scale, const Tensor& grad_query,
              const Tensor& grad_key, const Tensor& grad_value) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), Dv = value.size(3);
  const int64_t M = key.size(2), columns = padded(query.size(3)), value_columns = padded(Dv);
  const T* logarithms = static_cast<const T*>(logarithm.const_data_ptr());
  auto add_heads = [&](int64_t begin, int64_t end, bool shared) {
    Head<T> rows(N, M, columns, value_columns);
    Buffer<T> bias(whole_tiles(M)), head_logarithms(N), mean_products(N), out_rows(kLoadedRows * value_columns);
    SoftmaxPairs<T> pairs{static_cast<T>(scale * M_LOG2E), bias.data()};
    pairs.logarithm = head_logarithms.data();
    pairs.mean_product = mean_products.data();
    const auto add_tiles = [&](Range queries, Range keys, bool to_queries, bool to_keys) {
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        attention_gradients<Vector<T, bytes()>>(pairs, rows, queries, keys, to_queries, to_keys);
      });
    };
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const int64_t batch = batch_head / H, head = batch_head % H;
      const bool* real = real_keys(key_mask, batch);
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        load_rows<V>(rows_of<In>(query), batch, head, 0, N, query.size(3), rows.query.data(), columns);
        load_real_rows<V, In>(key, batch, head, real, rows.key.data(), columns);
        load_real_rows<V, In>(value, batch, head, real, rows.value.data(), value_columns);
        load_rows<V>(rows_of<In>(grad), batch, head, 0, N, Dv, rows.grad.data(), value_columns);
        pairs.real = fill_bias(real, M, bias.data());
        for (int64_t row = 0; row < N; ++row) {
          const int64_t place = row % kLoadedRows;
          if (place == 0)
            load_rows<V>(rows_of<In>(out), batch, head, row, std::min(N, row + kLoadedRows), Dv, out_rows.data(),
                         value_columns);
          V sum = {};
          for (int64_t c = 0; c < value_columns; c += kLanes<V>)
            sum += load<V>(rows.grad.data() + row * value_columns + c) *
                   load<V>(out_rows.data() + place * value_columns + c);
          mean_products[row] = sum_of_lanes(sum);
          const T logarithm = logarithms[batch_head * N + row];
          // without a key, all weights are zero whatever they are divided by
          head_logarithms[row] = std::isinf(logarithm) ? 0 : logarithm * static_cast<T>(M_LOG2E);
        }
        transpose_tiles<V>(rows.key.data(), M, columns, rows.key_tiles.data());
        transpose_tiles<V>(rows.value.data(), M, value_columns, rows.value_tiles.data());
      });
      add_gradients(rows, shared, add_tiles);
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        using V = Vector<T, bytes()>;
        for (int64_t i = 0; i < N * columns; ++i) rows.grad_query[i] *= static_cast<T>(scale);
        for (int64_t i = 0; i < M * columns; ++i) rows.grad_key[i] *= static_cast<T>(scale);
        store_gradients<V, In>(rows, grad_query, grad_key, grad_value, batch, head);
      });
    }
  };
  for_heads(B * H, add_heads);
}

std::tuple<Tensor, Tensor> softmax_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                 const std::optional<Tensor>& key_mask, double scale) {
  check_softmax(query, key, value, key_mask, scale);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor out = on_huge_pages(empty_heads_last(value, B, H, N, value.size(3)));
  Tensor logarithm = empty_row_numbers(out);
  if (B * H * N == 0) return {out, logarithm};
  const Tensor rows[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    forward<decltype(element)>(rows[0], rows[1], rows[2], dense_mask(key_mask), scale, out, logarithm);
  });
  return {out, logarithm};
}

std::tuple<Tensor, Tensor, Tensor> softmax_attention_backward_cpu(
    const Tensor& grad, const Tensor& out, const Tensor& logarithm, const Tensor& query, const Tensor& key,
    const Tensor& value, const std::optional<Tensor>& key_mask, double scale) {
  check_softmax_backward(grad, out, logarithm, query, key, value, key_mask, scale);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), M = key.size(2);
  Tensor grad_query = on_huge_pages(empty_heads_last(query, B, H, N, query.size(3)));
  Tensor grad_key = on_huge_pages(empty_heads_last(key, B, H, M, key.size(3)));
  Tensor grad_value = on_huge_pages(empty_heads_last(value, B, H, M, value.size(3)));
  const Tensor rows[] = {dense_rows(grad), dense_rows(out), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    backward<decltype(element)>(rows[0], rows[1], logarithm, rows[2], rows[3], rows[4], dense_mask(key_mask),
                                scale, grad_query, grad_key, grad_value);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("softmax_attention", TORCH_BOX(&softmax_attention_cpu));
  m.impl("softmax_attention_backward", TORCH_BOX(&softmax_attention_backward_cpu));
}

}  // namespace yoso
