// The exact kernel p(x) = (1 - acos(x) / pi)^tau of all pairs.
#include "tiled_attention.h"

namespace yoso {
namespace {

// A tile's weights, in the place of its cosines, and their slopes dp/dx, 0 where it diverges.
template <class V, class T = Element<V>>
YOSO_INLINE void kernel_slopes(T* weights, int64_t tau, T* slopes) {
  using X = Numbers<V>;
  for (int64_t i = 0; i < kTileSize; i += kNumbers<V>) {
    const X x = load_numbers<X>(weights + i), base = angle_complement(x), square = 1 - x * x;
    X factors[1] = {base}, less[1];
    power(factors, tau - 1, less);
    store_numbers(weights + i, less[0] * base);
    const X slope = less[0] * (static_cast<T>(tau) / static_cast<T>(M_PI)) / square_root(square);
    store_numbers(slopes + i, square > 0 ? slope : X{});
  }
}

// Weights are `coarse` of rows of bfloat16.
template <bool coarse>
struct AllPairs {
  static constexpr bool kUnit = true, kNear = false;
  int64_t tau;
  bool exact;

  AllPairs of_head(int64_t) const { return *this; }
  YOSO_INLINE Range keys_of(Range, Range keys) const { return keys; }
  YOSO_INLINE Range queries_of(Range, Range queries) const { return queries; }
  // keys are not masked here
  YOSO_INLINE bool is_real(int64_t) const { return true; }

  template <class V, class Meanwhile, class T = Element<V>>
  YOSO_INLINE void weigh(Range queries, Range keys, T* weights, Meanwhile&& meanwhile) const {
    kernel_weights<V, coarse>(queries, keys, weights, tau, meanwhile);
  }
  template <class V, class T = Element<V>>
  YOSO_INLINE void weigh_slopes(Range queries, Range keys, T* weights, T* slopes) const {
    if (exact) return kernel_slopes<V>(weights, tau, slopes);
    weigh<V>(queries, keys, weights, NothingMeanwhile{});
    // the lower bound
    for (int64_t i = 0; i < queries.count() * kTileKeys; ++i) slopes[i] = weights[i] * (static_cast<T>(tau) / 2);
  }
  template <class V, class T = Element<V>>
  YOSO_INLINE void centre_products(Range, T*) const {}
};

// Calls f with a value of the type that rows are summed up in, and the pairs.
template <class F>
void dispatch_pairs(const Tensor& rows, int64_t tau, bool exact, const F& f) {
  if (rows.scalar_type() == ScalarType::BFloat16) return f(float{}, AllPairs<true>{tau, exact});
  dispatch_accumulator(rows, [&](auto accumulator) { f(accumulator, AllPairs<false>{tau, exact}); });
}

// the choice of backward matters to autograd only
std::tuple<Tensor, Tensor> expectation_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     int64_t hash_code_len, bool, bool unit) {
  check_exact(query, key, value, hash_code_len);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor out = on_huge_pages(empty_heads_last(value, N, value.size(3)));
  Tensor inverse_length = empty_inverse_length(out, unit);
  if (B * H * N == 0) return {out, inverse_length};
  dispatch_pairs(query, hash_code_len, false, [&](auto accumulator, const auto& pairs) {
    attention_forward<decltype(accumulator)>(pairs, InputRows(query), InputRows(key), InputRows(value), unit,
                                             OutputRows(out), inverse_length);
  });
  return {out, inverse_length};
}

std::tuple<Tensor, Tensor, Tensor> expectation_attention_backward_cpu(const Tensor& grad, const Tensor& query,
                                                                      const Tensor& key, const Tensor& value,
                                                                      int64_t hash_code_len, bool exact) {
  check_exact(query, key, value, hash_code_len);
  check_output(grad, "grad", query, value, query.scalar_type());
  Tensor grad_query = on_huge_pages(empty_heads_last(query));
  Tensor grad_key = on_huge_pages(empty_heads_last(key));
  Tensor grad_value = on_huge_pages(empty_heads_last(value));
  dispatch_pairs(query, hash_code_len, exact, [&](auto accumulator, const auto& pairs) {
    attention_backward<decltype(accumulator)>(pairs, InputRows(grad), InputRows(query), InputRows(key),
                                              InputRows(value), OutputRows(grad_query), OutputRows(grad_key),
                                              OutputRows(grad_value));
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("expectation_attention", TORCH_BOX(&expectation_attention_cpu));
  m.impl("expectation_attention_backward", TORCH_BOX(&expectation_attention_backward_cpu));
}

}  // namespace yoso
