// Attention whose weights are computed in tiles, never as an N x M matrix, and its backward.
//
// What the weights are, and which tiles have any, is for a class of pairs to say:
//     kUnit                           whether rows are scaled to length one, so that their products are cosines
//     kNear                           whether a tile meets only those near it
//     keys_of(queries, keys)          the part of the keys that a tile of queries needs; begins where a tile does
//     queries_of(keys, queries)       the like for a tile of keys
//     weigh(queries, keys, weights, meanwhile)
//                                     puts a tile's weights in the place of the products of its rows; calls
//                                     meanwhile() up to kTileQueries times, and meanwhile.finish() before it changes
//                                     sums
//     weigh_slopes(queries, keys, weights, slopes)
//                                     puts a tile's weights there, and their slopes elsewhere
//     centre_products(queries, products)
//                                     may change the products of gradients and values, with which the slope is
//                                     multiplied
// For attention_forward and attention_backward there are also:
//     of_head(batch_head)             the pairs of one head, for one thread
//     is_real(row)                    whether a key has any weight
#pragma once

#include "amx_rows.h"

namespace yoso {
namespace {

// Functions of a number X or of the lanes of a vector X.

// of float, unsigned numbers of the same size
template <class X>
struct BitsOf {
  using type = Vector<uint32_t, sizeof(X)>;
};
template <>
struct BitsOf<float> {
  using type = uint32_t;
};

// 0 of what is below 0. Where `coarse`, with an error of 2^-14.
template <bool coarse = false, class X>
YOSO_INLINE X square_root(X x) {
  if constexpr (std::is_arithmetic_v<X>) {
    return std::sqrt(x < 0 ? 0 : x);
#if defined(__x86_64__) && !defined(__clang__)
    // clang refuses the operand, as it does not know yet that this becomes part of a function for AVX-512
  } else if constexpr (std::is_same_v<X, Vector<float, 64>>) {
    // by Newton's step from an estimate of the inverse: a fifth of the time of the instruction for the root
    X inverse;
    asm("vrsqrt14ps %1, %0" : "=v"(inverse) : "v"(x));
    const X root = x * inverse;
    // the inverse of what is too small is infinite
    return x < 1e-37f ? X{} : coarse ? root : root + root * (0.5f - root * (0.5f * inverse));
#endif
  } else {
    Element<X> lanes[kLanes<X>];
    store<X>(lanes, x < 0 ? X{} : x);
    for (int64_t i = 0; i < kLanes<X>; ++i) lanes[i] = std::sqrt(lanes[i]);
    return load<X>(lanes);
  }
}

// 1 - acos(x) / pi for x clamped to [-1, 1]
template <bool coarse = false>
inline double angle_complement(double x) {
  return 1 - std::acos(std::clamp(x, -1.0, 1.0)) / M_PI;
}

// acos(x) / pi = sqrt(1 - x) * polynomial(x) on [0, 1], minimax fits with an error of 9e-10, as powers multiply it, and
// of 3e-6 where `coarse`
template <bool coarse = false, class X>
YOSO_INLINE X angle_complement(X x) {
  using Bits = typename BitsOf<X>::type;
  const X a = __builtin_bit_cast(X, __builtin_bit_cast(Bits, x) & 0x7fffffffu);
  X polynomial;
  if constexpr (coarse) {
    polynomial = X{} + 0.00275296159f;
    polynomial = polynomial * a - 0.0113816205f;
    polynomial = polynomial * a + 0.0269501843f;
    polynomial = polynomial * a - 0.068157971f;
    polynomial = polynomial * a + 0.49999732f;
  } else {
    polynomial = X{} + 0.00027659145f;
    polynomial = polynomial * a - 0.0014864685f;
    polynomial = polynomial * a + 0.0038485099f;
    polynomial = polynomial * a - 0.006865996f;
    polynomial = polynomial * a + 0.010485322f;
    polynomial = polynomial * a - 0.016132422f;
    polynomial = polynomial * a + 0.028342457f;
    polynomial = polynomial * a - 0.06830982f;
    polynomial = polynomial * a + 0.5f;
  }
  const X angle = square_root<coarse>(1.0f - a) * polynomial;
  return x < 0 ? angle : 1.0f - angle;
}

// 2^(n - shift), with n the integer next to x / log(2), for x between -88 and 88 more than shift log(2); rest is what x
// has beyond n log(2).
template <class X>
YOSO_INLINE X power_of_two(X x, X& rest, int32_t shift = 0) {
  // added to a small number it rounds that to an integer, which the lowest bits of the sum hold
  constexpr float kRounds = 0x1.8p23f;
  using Bits = typename BitsOf<X>::type;
  const X rounded = x * static_cast<float>(M_LOG2E) + kRounds, n = rounded - kRounds;
  // log(2) in two parts, of which the product with the first is exact
  rest = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  return __builtin_bit_cast(X, (__builtin_bit_cast(Bits, rounded) << 23) + (static_cast<uint32_t>(127 - shift) << 23));
}

YOSO_INLINE double exponential(double x, int32_t shift = 0) { return std::exp(x) * std::ldexp(1.0, -shift); }

// exp(x) / 2^shift, below 2^126; 0 below float's normal range.
template <class X>
YOSO_INLINE X exponential(X x, int32_t shift = 0) {
  const float smallest = -87.25f + static_cast<float>(kLog2) * shift;
  X f;
  const X power = power_of_two(x < smallest ? X{} + smallest : x, f, shift);
  // a minimax fit of exp(f) for f up to log(2) / 2, with a relative error of 1e-7
  X series = X{} + 0.00829031478f;
  series = series * f + 0.0418979308f;
  series = series * f + 0.166676357f;
  series = series * f + 0.499991502f;
  series = series * f + 0.999999745f;
  series = series * f + 1.0f;
  return x < smallest ? X{} : power * series;
}

// What weights are computed in: vectors of float32, and one float64 after the other.
template <class V>
using Numbers = std::conditional_t<std::is_same_v<Element<V>, double>, double, V>;
template <class X, class T>
YOSO_INLINE X load_numbers(const T* from) {
  if constexpr (std::is_arithmetic_v<X>)
    return *from;
  else
    return load<X>(from);
}
template <class X, class T>
YOSO_INLINE void store_numbers(T* to, X x) {
  if constexpr (std::is_arithmetic_v<X>)
    *to = x;
  else
    store<X>(to, x);
}
template <class V>
constexpr int64_t kNumbers = sizeof(Numbers<V>) / sizeof(Element<V>);

// of these, so many are computed at a time: their operations take turns
constexpr int64_t kTogether = 4;

// out = base^exponent by squaring; base is overwritten
template <class X, size_t count>
YOSO_INLINE void power(X (&base)[count], int64_t exponent, X (&out)[count]) {
  for (size_t j = 0; j < count; ++j) out[j] = (exponent & 1) != 0 ? base[j] : X{} + 1;
  for (exponent >>= 1; exponent > 0; exponent >>= 1) {
    for (size_t j = 0; j < count; ++j) base[j] *= base[j];
    if ((exponent & 1) != 0)
      for (size_t j = 0; j < count; ++j) out[j] *= base[j];
  }
}

// The weights p(cosine) of a tile's rows, as wide as it has keys, in the place of its cosines; `coarse` is precise
// enough for bfloat16.
template <class V, bool coarse = false, class Meanwhile, class T = Element<V>>
YOSO_INLINE void kernel_weights(Range queries, Range keys, T* weights, int64_t tau, Meanwhile&& meanwhile) {
  using X = Numbers<V>;
  const int64_t width = padded(keys.count());
  for (int64_t q = 0; q < queries.count(); q += kTogether)
    for (int64_t k = 0; k < width; k += kNumbers<V>) {
      T* const from = weights + q * kTileKeys + k;
      X base[kTogether], out[kTogether];
      for (int64_t j = 0; j < kTogether; ++j) base[j] = angle_complement<coarse>(load_numbers<X>(from + j * kTileKeys));
      power(base, tau, out);
      for (int64_t j = 0; j < kTogether; ++j) store_numbers(from + j * kTileKeys, out[j]);
      meanwhile();
    }
}

// What keeps and multiplies rows, by its Forward and Backward.
template <class T>
struct VectorRows {
  template <bool unit>
  using Forward = VectorForward<T, unit>;
  template <bool unit>
  using Backward = VectorBackward<T, unit>;
};

// Calls f with a value of what suits the rows and the processor.
template <class T, class F>
void with_rows([[maybe_unused]] const InputRows& rows, const F& f) {
#if YOSO_HAS_AMX
  if constexpr (std::is_same_v<T, float>)
    if (rows.type == ScalarType::BFloat16 && cpu_capability() == Capability::kAmx) return f(AmxRows{});
#endif
  f(VectorRows<T>{});
}

// rows, of whole tiles, that all rows of the other side meet before the next ones: they stay in a second-level cache
constexpr int64_t kChunkRows = 1024;

// Adds the keys' values to the sums of the queries that `rows` holds, the first of them row `first` of its head.
template <class T, class Pairs, class Rows>
void attention_rows(Pairs& pairs, int64_t first, int64_t num_queries, int64_t num_keys, Rows& rows) {
  Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
    using V = Vector<T, bytes()>;
    const int64_t chunk_rows = Pairs::kNear ? num_keys : kChunkRows;
    for (int64_t chunk = 0; chunk < num_keys; chunk += chunk_rows)
      for (int64_t q = 0; q < num_queries; q += kTileQueries) {
        const Range queries{q, std::min(num_queries, q + kTileQueries)};
        const Range keys = pairs.keys_of({first + queries.begin, first + queries.end}, {0, num_keys});
        const int64_t end = std::min(keys.end, chunk + chunk_rows);
        for (int64_t k = std::max(keys.begin, chunk); k < end; k += kTileKeys)
          rows.template add_tile<V>(pairs, first, queries, {k, std::min(end, k + kTileKeys)});
      }
    rows.template finish<V>(pairs);
  });
}

// Into how many slices of queries, which do not interact, heads are cut, so that every thread has work.
inline int64_t slices_of_head(int64_t heads, int64_t num_queries) {
  const int64_t threads = torch::stable::get_num_threads();
  return std::clamp<int64_t>((threads + heads - 1) / heads, 1, (num_queries + kTileQueries - 1) / kTileQueries);
}

// inverse_length is used only where out's rows are scaled to length one.
template <class T, class Pairs>
void attention_forward(const Pairs& all_pairs, const InputRows& query, const InputRows& key, const InputRows& value,
                       bool unit, const OutputRows& out, const Tensor& inverse_length) {
  const int64_t B = query.batches, H = query.heads, N = query.count, M = key.count;
  // of whole tiles: a key that is not finite makes all queries of a tile so, near to it or not
  const int64_t slices = slices_of_head(B * H, N), tiles = (N + kTileQueries - 1) / kTileQueries;
  const int64_t num_rows = (tiles + slices - 1) / slices * kTileQueries;
  T* inverse = unit ? static_cast<T*>(inverse_length.mutable_data_ptr()) : nullptr;
  with_rows<T>(query, [&](auto kind) {
    using Rows = typename decltype(kind)::template Forward<Pairs::kUnit>;
    parallel_for(0, B * H * slices, 1, [&](int64_t begin, int64_t end) {
      Rows rows(num_rows, M, query.columns, value.columns);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch = task / slices / H, head = task / slices % H;
        const int64_t first = task % slices * num_rows, last = std::min(N, first + num_rows);
        if (first >= last) continue;
        auto pairs = all_pairs.of_head(batch * H + head);
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          rows.template load_queries<V>(query, batch, head, {first, last});
          if (task == begin || task % slices == 0)
            rows.template load_keys<V>(key, value, batch, head,
                                       [&](int64_t row) YOSO_INLINE_LAMBDA { return pairs.is_real(row); });
        });
        attention_rows<T>(pairs, first, last - first, M, rows);
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          using V = Vector<T, bytes()>;
          if (unit)
            normalize_rows<V>(rows.sums(), rows.value_columns(), last - first, rows.value_columns(),
                              inverse + (batch * H + head) * N + first);
          store_rows<V>(rows.sums(), rows.value_columns(), T{1}, out, batch, head, first, last);
        });
      }
    });
  });
}

// Adds the tiles of some queries and keys to the gradients of the queries, of the keys and values, or of both.
template <class V, class Pairs, class Rows, class T = Element<V>>
YOSO_INLINE void attention_gradients(Pairs& pairs, Rows& rows, Range all_queries, Range all_keys, bool to_queries,
                                     bool to_keys) {
  alignas(64) T weights[kTileSize], slopes[kTileSize], value_products[kTileSize];
  const int64_t chunk_rows = Pairs::kNear ? all_queries.count() : kChunkRows;
  for (int64_t chunk = all_queries.begin; chunk < all_queries.end; chunk += chunk_rows) {
    const Range chunk_queries{chunk, std::min(all_queries.end, chunk + chunk_rows)};
    for (int64_t k = all_keys.begin; k < all_keys.end; k += kTileKeys) {
      const Range keys{k, std::min(all_keys.end, k + kTileKeys)}, near = pairs.queries_of(keys, chunk_queries);
      for (int64_t q = near.begin; q < near.end; q += kTileQueries) {
        const Range queries{q, std::min(near.end, q + kTileQueries)};
        rows.template multiply_rows<V>(queries, keys, weights, value_products);
        pairs.template weigh_slopes<V>(queries, keys, weights, slopes);
        pairs.template centre_products<V>(queries, value_products);
        const int64_t width = padded(keys.count());
        for (int64_t row = 0; row < queries.count() * kTileKeys; row += kTileKeys)
          for (int64_t i = row; i < row + width; ++i) slopes[i] *= value_products[i];
        if (to_queries) rows.template add_to_queries<V>(queries, keys, slopes);
        if (to_keys) rows.template add_to_keys<V>(queries, keys, slopes, weights);
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

// Sums up a head's gradients, in parallel where threads share it.
template <class T, class Pairs, class Rows>
void add_gradients(const Pairs& pairs, Rows& rows, int64_t num_queries, int64_t num_keys, bool shared) {
  const auto add_tiles = [&](Range queries, Range keys, bool to_queries, bool to_keys) {
    // weighing uses memory of its own
    Pairs thread_pairs = pairs;
    Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
      attention_gradients<Vector<T, bytes()>>(thread_pairs, rows, queries, keys, to_queries, to_keys);
    });
  };
  const Range all_queries{0, num_queries}, all_keys{0, num_keys};
  if (shared) {
    // the weights are computed twice, so that no two threads add to the same row
    for_tiles(num_keys, kTileKeys, [&](Range keys) { add_tiles(all_queries, keys, false, true); });
    for_tiles(num_queries, kTileQueries, [&](Range queries) { add_tiles(queries, all_keys, true, false); });
  } else {
    add_tiles(all_queries, all_keys, true, true);
  }
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

template <class T, class Pairs>
void attention_backward(const Pairs& all_pairs, const InputRows& grad, const InputRows& query, const InputRows& key,
                        const InputRows& value, const OutputRows& grad_query, const OutputRows& grad_key,
                        const OutputRows& grad_value) {
  const int64_t B = query.batches, H = query.heads, N = query.count, M = key.count;
  with_rows<T>(query, [&](auto kind) {
    using Rows = typename decltype(kind)::template Backward<Pairs::kUnit>;
    for_heads(B * H, [&](int64_t begin, int64_t end, bool shared) {
      Rows rows(N, M, query.columns, value.columns);
      for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
        const int64_t batch = batch_head / H, head = batch_head % H;
        const auto pairs = all_pairs.of_head(batch_head);
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          const auto is_real = [&](int64_t row) YOSO_INLINE_LAMBDA { return pairs.is_real(row); };
          rows.template load<Vector<T, bytes()>>(grad, query, key, value, batch, head, is_real);
        });
        add_gradients<T>(pairs, rows, N, M, shared);
        Rows::run([&](auto bytes) YOSO_INLINE_LAMBDA {
          rows.template store_gradients<Vector<T, bytes()>>(grad_query, grad_key, grad_value, batch, head, T{1});
        });
      }
    });
  });
}

}  // namespace
}  // namespace yoso
