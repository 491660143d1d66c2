// Softmax attention: what samples of exp estimate. The kernel of PyTorch takes longer from 32 tokens on, and without
// AVX-512 about as long.
#include <limits>

#include "tiled_attention.h"

namespace yoso {
namespace {

// rows that are loaded at a time where only their products are kept
constexpr int64_t kLoadedRows = 64;

// How far logarithms may be above the largest that a row's weights are over before these are taken to another: far
// below what overflows, and seldom reached
constexpr int kMostAbove = 8;

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

// The pairs of one head. A weight is exp(scale q.k + bias of the key), over about the largest of its row or their sum.
// Logarithms are rounded before anything is taken from them: the forward and the backward take the same from the same.
template <class T>
struct SoftmaxPairs {
  static constexpr bool kUnit = false, kNear = false;
  T scale;
  // 0, or minus infinity where a key is masked or there is none; padded to whole tiles
  const T* bias;
  // the tiles of keys outside have none that is real
  Range real{};
  // of the forward, by query: about the largest logarithm so far, which its weights are over, the sum of these in
  // kRowQuantum lanes, and its output
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

  template <class V, class Meanwhile>
  YOSO_INLINE void weigh(Range queries, Range keys, T* weights, Meanwhile&& meanwhile) const {
    using X = Numbers<V>;
    with_width(keys, [&](auto width) YOSO_INLINE_LAMBDA {
      if (most_above<V>(width, queries, keys, weights) > kMostAbove) {
        // the sums are over the same as the weights that are still to be multiplied
        meanwhile.finish();
        raise<V>(width, queries, keys, weights);
      }
      for (int64_t q = 0; q < queries.count(); ++q) {
        const T most = largest[queries.begin + q];
        T *to = weights + q * kTileKeys, *total = totals + (queries.begin + q) * kRowQuantum;
        for (int64_t k = 0; k < width; k += kNumbers<V>)
          store_numbers(to + k, exponential(logarithms_of<X>(q * kTileKeys + k, keys.begin + k, weights) - most));
        V sum = load<V>(total);
        for (int64_t k = 0; k < width; k += kLanes<V>) sum += load<V>(to + k);
        store<V>(total, sum);
        meanwhile();
      }
    });
  }

  // How far a logarithm is above the largest of its row so far, at most.
  template <class V, class Width>
  YOSO_INLINE T most_above(Width width, Range queries, Range keys, const T* products) const {
    V above = V{} + std::numeric_limits<T>::lowest();
    for (int64_t q = 0; q < queries.count(); ++q) {
      const V most = largest_of_row<V>(width, q, keys, products) - largest[queries.begin + q];
      above = most > above ? most : above;
    }
    return largest_lane(above);
  }

  template <class V, class Width>
  YOSO_INLINE V largest_of_row(Width width, int64_t q, Range keys, const T* products) const {
    V most = logarithms_of<V>(q * kTileKeys, keys.begin, products);
    for (int64_t k = kLanes<V>; k < width; k += kLanes<V>) {
      const V x = logarithms_of<V>(q * kTileKeys + k, keys.begin + k, products);
      most = x > most ? x : most;
    }
    return most;
  }

  template <class X>
  YOSO_INLINE X logarithms_of(int64_t place, int64_t key, const T* products) const {
    return load_numbers<X>(products + place) * scale + load_numbers<X>(bias + key);
  }

  // Takes the rows of the tile that have far larger logarithms than before to these, and what their sums are over.
  template <class V, class Width>
  YOSO_INLINE void raise(Width width, Range queries, Range keys, const T* products) const {
    for (int64_t q = 0; q < queries.count(); ++q) {
      const int64_t row = queries.begin + q;
      const T to = largest_lane(largest_of_row<V>(width, q, keys, products));
      // by the same difference as most_above: which rows share a tile must not matter
      if (!(to - largest[row] > kMostAbove)) continue;
      const T less = exponential(largest[row] - to);
      largest[row] = to;
      T *x = out + row * value_columns, *total = totals + row * kRowQuantum;
      for (int64_t c = 0; c < value_columns; c += kLanes<V>) store<V>(x + c, load<V>(x + c) * less);
      store<V>(total, load<V>(total) * less);
    }
  }

  template <class V>
  YOSO_INLINE void weigh_slopes(Range queries, Range keys, T* weights, T* slopes) const {
    using X = Numbers<V>;
    with_width(keys, [&](auto width) YOSO_INLINE_LAMBDA {
      for (int64_t q = 0; q < queries.count(); ++q)
        for (int64_t k = 0, i = q * kTileKeys; k < width; k += kNumbers<V>, i += kNumbers<V>) {
          // at most 1 but for rounding, which huge logarithms leave much of
          const X above = logarithms_of<X>(i, keys.begin + k, weights) - logarithm[queries.begin + q];
          const X x = exponential(above > kMostAbove ? X{} + kMostAbove : above);
          store_numbers(weights + i, x);
          store_numbers(slopes + i, x);
        }
    });
  }

  template <class V>
  YOSO_INLINE void centre_products(Range queries, T* products) const {
    for (int64_t q = queries.begin; q < queries.end; ++q, products += kTileKeys)
      for (int64_t k = 0; k < kTileKeys; k += kLanes<V>)
        store<V>(products + k, load<V>(products + k) - mean_product[q]);
  }
};

// The keys of a batch that its row of the mask has, all where there is no mask.
struct RealKeys {
  const uint8_t* mask;

  YOSO_INLINE bool operator()(int64_t row) const { return mask == nullptr || mask[row] != 0; }
};

inline RealKeys real_keys(const std::optional<Tensor>& key_mask, int64_t batch) {
  if (!key_mask.has_value()) return {nullptr};
  return {mask_bytes(*key_mask) + batch * key_mask->size(1)};
}

// Fills a head's bias; returns the tiles that have any real key.
template <class T>
YOSO_INLINE Range fill_bias(const RealKeys& is_real, int64_t num_keys, T* bias) {
  Range tiles{num_keys, 0};
  for (int64_t row = 0; row < whole_tiles(num_keys); ++row) {
    const bool exists = row < num_keys && is_real(row);
    bias[row] = exists ? 0 : -std::numeric_limits<T>::infinity();
    if (exists) tiles = {std::min(tiles.begin, row / kTileKeys * kTileKeys), row + 1};
  }
  return tiles;
}

template <class T>
void forward(const InputRows& query, const InputRows& key, const InputRows& value,
             const std::optional<Tensor>& key_mask, double scale, const OutputRows& out, const Tensor& logarithm) {
  const int64_t B = query.batches, H = query.heads, N = query.count, M = key.count, Dv = value.columns;
  const int64_t slices = slices_of_head(B * H, N), num_rows = (N + slices - 1) / slices;
  T* logarithms = static_cast<T*>(logarithm.mutable_data_ptr());
  with_rows<T>(query, [&](auto kind) {
    using Rows = typename decltype(kind)::template Forward<SoftmaxPairs<T>::kUnit>;
    parallel_for(0, B * H * slices, 1, [&](int64_t begin, int64_t end) {
      Rows rows(num_rows, M, query.columns, Dv);
      const int64_t value_columns = rows.value_columns();
      Buffer<T> bias(whole_tiles(M)), totals(num_rows * kRowQuantum), largest(num_rows);
      Range tiles{};
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / slices / H, head = task / slices % H;
        const int64_t first = task % slices * num_rows, last = std::min(N, first + num_rows);
        if (first >= last) continue;
        const bool next_head = task == begin || task % slices == 0;
        const RealKeys is_real = real_keys(key_mask, batch);
        if (next_head) tiles = fill_bias(is_real, M, bias.data());
        totals.zero();
        std::fill_n(largest.data(), last - first, std::numeric_limits<T>::lowest());
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          rows.template load_queries<V>(query, batch, head, {first, last});
          if (next_head) rows.template load_keys<V>(key, value, batch, head, is_real);
        });
        SoftmaxPairs<T> pairs{static_cast<T>(scale), bias.data(), tiles, largest.data(), totals.data(), rows.sums(),
                              value_columns};
        attention_rows<T>(pairs, 0, last - first, M, rows);
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          for (int64_t row = 0; row < last - first; ++row) {
            const T sum = sum_of_lanes(load<V>(totals.data() + row * kRowQuantum)), inverse = sum == 0 ? 0 : 1 / sum;
            T* x = rows.sums() + row * value_columns;
            for (int64_t c = 0; c < value_columns; c += kLanes<V>) store<V>(x + c, load<V>(x + c) * inverse);
            logarithms[(batch * H + head) * N + first + row] = largest[row] + std::log(sum);
          }
          store_rows<V>(rows.sums(), value_columns, T{1}, out, batch, head, first, last);
        });
      }
    });
  });
}

// Of every row of a head, the product of two tensors, to products.
template <class V, class T = Element<V>>
YOSO_INLINE void multiply_row_by_row(const InputRows& a, const InputRows& b, int64_t batch, int64_t head, T* a_rows,
                                     T* b_rows, int64_t columns, T* products) {
  for (int64_t row = 0; row < a.count; row += kLoadedRows) {
    const int64_t last = std::min(a.count, row + kLoadedRows);
    load_rows<V>(a, batch, head, row, last, a_rows, columns);
    load_rows<V>(b, batch, head, row, last, b_rows, columns);
    for (int64_t i = 0; i < last - row; ++i) {
      V sum = {};
      for (int64_t c = 0; c < columns; c += kLanes<V>)
        sum += load<V>(a_rows + i * columns + c) * load<V>(b_rows + i * columns + c);
      products[row + i] = sum_of_lanes(sum);
    }
  }
}

template <class T>
void backward(const InputRows& grad, const InputRows& out, const Tensor& logarithm, const InputRows& query,
              const InputRows& key, const InputRows& value, const std::optional<Tensor>& key_mask, double scale,
              const OutputRows& grad_query, const OutputRows& grad_key, const OutputRows& grad_value) {
  const int64_t B = query.batches, H = query.heads, N = query.count, M = key.count, Dv = value.columns;
  const int64_t value_columns = padded(Dv);
  const T* logarithms = static_cast<const T*>(logarithm.const_data_ptr());
  with_rows<T>(query, [&](auto kind) {
    using Rows = typename decltype(kind)::template Backward<SoftmaxPairs<T>::kUnit>;
    for_heads(B * H, [&](int64_t begin, int64_t end, bool shared) {
      Rows rows(N, M, query.columns, Dv);
      Buffer<T> bias(whole_tiles(M)), head_logarithms(N), mean_products(N);
      Buffer<T> grad_rows(kLoadedRows * value_columns), out_rows(kLoadedRows * value_columns);
      SoftmaxPairs<T> pairs{static_cast<T>(scale), bias.data()};
      pairs.logarithm = head_logarithms.data();
      pairs.mean_product = mean_products.data();
      for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
        const int64_t batch = batch_head / H, head = batch_head % H;
        const RealKeys is_real = real_keys(key_mask, batch);
        pairs.real = fill_bias(is_real, M, bias.data());
        for (int64_t row = 0; row < N; ++row) {
          const T logarithm = logarithms[batch_head * N + row];
          // without a key, all weights are zero whatever they are divided by
          head_logarithms[row] = std::isinf(logarithm) ? 0 : logarithm;
        }
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          multiply_row_by_row<V>(grad, out, batch, head, grad_rows.data(), out_rows.data(), value_columns,
                                 mean_products.data());
          rows.template load<V>(grad, query, key, value, batch, head, is_real);
        });
        add_gradients<T>(pairs, rows, N, M, shared);
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          rows.template store_gradients<Vector<T, bytes()>>(grad_query, grad_key, grad_value, batch, head,
                                                            static_cast<T>(scale));
        });
      }
    });
  });
}

std::tuple<Tensor, Tensor> softmax_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                 const std::optional<Tensor>& key_mask, double scale) {
  check_softmax(query, key, value, key_mask, scale);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor out = on_huge_pages(empty_heads_last(value, N, value.size(3)));
  Tensor logarithm = empty_row_numbers(out);
  if (B * H * N == 0) return {out, logarithm};
  dispatch_accumulator(query, [&](auto accumulator) {
    forward<decltype(accumulator)>(InputRows(query), InputRows(key), InputRows(value), dense_mask(key_mask), scale,
                                   OutputRows(out), logarithm);
  });
  return {out, logarithm};
}

std::tuple<Tensor, Tensor, Tensor> softmax_attention_backward_cpu(
    const Tensor& grad, const Tensor& out, const Tensor& logarithm, const Tensor& query, const Tensor& key,
    const Tensor& value, const std::optional<Tensor>& key_mask, double scale) {
  check_softmax_backward(grad, out, logarithm, query, key, value, key_mask, scale);
  Tensor grad_query = on_huge_pages(empty_heads_last(query));
  Tensor grad_key = on_huge_pages(empty_heads_last(key));
  Tensor grad_value = on_huge_pages(empty_heads_last(value));
  dispatch_accumulator(query, [&](auto accumulator) {
    backward<decltype(accumulator)>(InputRows(grad), InputRows(out), logarithm, InputRows(query), InputRows(key),
                                    InputRows(value), dense_mask(key_mask), scale, OutputRows(grad_query),
                                    OutputRows(grad_key), OutputRows(grad_value));
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("softmax_attention", TORCH_BOX(&softmax_attention_cpu));
  m.impl("softmax_attention_backward", TORCH_BOX(&softmax_attention_backward_cpu));
}

}  // namespace yoso
