// The rows of a head as attention in tiles multiplies them, by vectors of any width. amx_rows.h has the like for the
// tiles of AMX.
//
// Rows are scaled to length one where `unit` is true. Masked keys and values become 0: what stands in them may be
// anything.
#pragma once

#include "simd.h"

namespace yoso {
namespace {

// a tile of keys and values (64 columns each) and of weights stays in a 48 KB first-level cache
constexpr int64_t kTileQueries = 32;
constexpr int64_t kTileKeys = 64;
constexpr int64_t kTileSize = kTileQueries * kTileKeys;

// A run of queries or keys, in rows.
struct Range {
  int64_t begin, end;

  YOSO_INLINE int64_t count() const { return end - begin; }
};

inline int64_t whole_tiles(int64_t keys) { return (keys + kTileKeys - 1) / kTileKeys * kTileKeys; }

// Transposes each tile of kTileKeys rows: to[tile][column][row]; rows past the end are copies of the last.
template <class V, class T = Element<V>>
YOSO_INLINE void transpose_tiles(const T* from, int64_t count, int64_t columns, T* to) {
  for (int64_t first = 0; first < count; first += kTileKeys, to += columns * kTileKeys) {
    int32_t rows[kTileKeys];
    for (int64_t r = 0; r < kTileKeys; ++r) rows[r] = static_cast<int32_t>(std::min(r, count - 1 - first));
    transpose_rows<V>(PickedRows<const T>{from + first * columns, columns, rows}, kTileKeys, columns, to, kTileKeys);
  }
}

// Loads keys or values of a head, those for which is_real(row) does not hold as zeros.
template <class V, class IsReal>
YOSO_INLINE void load_real_rows(const InputRows& x, int64_t batch, int64_t head, const IsReal& is_real, Element<V>* to,
                                int64_t columns) {
  const int64_t count = x.count;
  load_rows<V>(x, batch, head, 0, count, to, columns);
  for (int64_t row = 0; row < count; ++row)
    if (!is_real(row)) std::memset(to + row * columns, 0, columns * sizeof(Element<V>));
}

// What vectors multiply while a tile is weighed.
struct NothingMeanwhile {
  YOSO_INLINE void operator()() const {}
  YOSO_INLINE void finish() const {}
};

// Some of a head's queries, all its keys and values, and the sums of values that are the output.
template <class T, bool unit>
class VectorForward {
 public:
  VectorForward(int64_t num_queries, int64_t num_keys, int64_t D, int64_t Dv)
      : columns_(padded(D)),
        value_columns_(padded(Dv)),
        num_keys_(num_keys),
        query_(num_queries * columns_),
        key_(num_keys * columns_),
        key_tiles_(whole_tiles(num_keys) * columns_),
        value_(num_keys * value_columns_),
        sums_(num_queries * value_columns_),
        lengths_(std::max(num_queries, num_keys)) {}

  template <class F>
  static void run(const F& f) {
    vectorized(f);
  }

  template <class V>
  YOSO_INLINE void load_queries(const InputRows& query, int64_t batch, int64_t head, Range rows) {
    load_rows<V>(query, batch, head, rows.begin, rows.end, query_.data(), columns_);
    if (unit) normalize_rows<V>(query_.data(), columns_, rows.count(), columns_, lengths_.data());
    sums_.zero();
  }

  template <class V, class IsReal>
  YOSO_INLINE void load_keys(const InputRows& key, const InputRows& value, int64_t batch, int64_t head,
                             const IsReal& is_real) {
    load_real_rows<V>(key, batch, head, is_real, key_.data(), columns_);
    load_real_rows<V>(value, batch, head, is_real, value_.data(), value_columns_);
    if (unit) normalize_rows<V>(key_.data(), columns_, num_keys_, columns_, lengths_.data());
    transpose_tiles<V>(key_.data(), num_keys_, columns_, key_tiles_.data());
  }

  // Adds the values of a tile's keys, times their weights, to the sums of its queries; query 0 here is the head's query
  // `first`. The sums are complete after finish.
  template <class V, class Pairs>
  YOSO_INLINE void add_tile(Pairs& pairs, int64_t first, Range queries, Range keys) {
    // one buffer, from products to what is multiplied: with the rows, it stays in a first-level cache
    alignas(64) T weights[kTileSize];
    // not the products of a last tile that have no key: short sequences have no other
    multiply<V, false>(queries.count(), padded(keys.count()), columns_,
                       AllRows<const T>{query_.data() + queries.begin * columns_, columns_}, 1,
                       AllRows<const T>{key_tiles_.data() + keys.begin * columns_, kTileKeys},
                       AllRows<T>{weights, kTileKeys});
    pairs.template weigh<V>(Range{first + queries.begin, first + queries.end}, keys, weights, NothingMeanwhile{});
    multiply<V>(queries.count(), value_columns_, keys.count(), AllRows<const T>{weights, kTileKeys}, 1,
                AllRows<const T>{value_.data() + keys.begin * value_columns_, value_columns_},
                AllRows<T>{sums_.data() + queries.begin * value_columns_, value_columns_});
  }
  template <class V, class Pairs>
  YOSO_INLINE void finish(Pairs&) {}

  int64_t value_columns() const { return value_columns_; }
  T* sums() { return sums_.data(); }

 private:
  const int64_t columns_, value_columns_, num_keys_;
  Buffer<T> query_, key_, key_tiles_, value_, sums_, lengths_;
};

// A head's queries with the output's gradient, its keys and values, and the sums that become their gradients.
template <class T, bool unit>
class VectorBackward {
 public:
  VectorBackward(int64_t num_queries, int64_t num_keys, int64_t D, int64_t Dv)
      : columns_(padded(D)),
        value_columns_(padded(Dv)),
        num_queries_(num_queries),
        num_keys_(num_keys),
        query_(num_queries * columns_),
        query_inverse_(num_queries),
        key_(num_keys * columns_),
        key_inverse_(num_keys),
        key_tiles_(whole_tiles(num_keys) * columns_),
        value_(num_keys * value_columns_),
        value_tiles_(whole_tiles(num_keys) * value_columns_),
        grad_(num_queries * value_columns_),
        grad_query_(num_queries * columns_),
        grad_key_(num_keys * columns_),
        grad_value_(num_keys * value_columns_) {}

  template <class F>
  static void run(const F& f) {
    vectorized(f);
  }

  // Loads rows, and clears the gradients.
  template <class V, class IsReal>
  YOSO_INLINE void load(const InputRows& grad, const InputRows& query, const InputRows& key, const InputRows& value,
                        int64_t batch, int64_t head, const IsReal& is_real) {
    load_rows<V>(query, batch, head, 0, num_queries_, query_.data(), columns_);
    load_rows<V>(grad, batch, head, 0, num_queries_, grad_.data(), value_columns_);
    load_real_rows<V>(key, batch, head, is_real, key_.data(), columns_);
    load_real_rows<V>(value, batch, head, is_real, value_.data(), value_columns_);
    if (unit) {
      normalize_rows<V>(query_.data(), columns_, num_queries_, columns_, query_inverse_.data());
      normalize_rows<V>(key_.data(), columns_, num_keys_, columns_, key_inverse_.data());
    }
    transpose_tiles<V>(key_.data(), num_keys_, columns_, key_tiles_.data());
    transpose_tiles<V>(value_.data(), num_keys_, value_columns_, value_tiles_.data());
    grad_query_.zero();
    grad_key_.zero();
    grad_value_.zero();
  }

  // The products of a tile's queries and keys, and of its gradients and values.
  template <class V>
  YOSO_INLINE void multiply_rows(Range queries, Range keys, T* products, T* value_products) const {
    const int64_t count = queries.count(), width = padded(keys.count());
    multiply<V, false>(count, width, columns_, AllRows<const T>{query_.data() + queries.begin * columns_, columns_}, 1,
                       AllRows<const T>{key_tiles_.data() + keys.begin * columns_, kTileKeys},
                       AllRows<T>{products, kTileKeys});
    multiply<V, false>(count, width, value_columns_,
                       AllRows<const T>{grad_.data() + queries.begin * value_columns_, value_columns_}, 1,
                       AllRows<const T>{value_tiles_.data() + keys.begin * value_columns_, kTileKeys},
                       AllRows<T>{value_products, kTileKeys});
  }

  // Adds a tile's keys times their slopes to the gradients of queries.
  template <class V>
  YOSO_INLINE void add_to_queries(Range queries, Range keys, const T* slopes) {
    multiply<V>(queries.count(), columns_, keys.count(), AllRows<const T>{slopes, kTileKeys}, 1,
                AllRows<const T>{key_.data() + keys.begin * columns_, columns_},
                AllRows<T>{grad_query_.data() + queries.begin * columns_, columns_});
  }

  // Adds a tile's queries times their slopes, and gradients times weights, to the gradients of keys and values.
  template <class V>
  YOSO_INLINE void add_to_keys(Range queries, Range keys, const T* slopes, const T* weights) {
    multiply<V>(keys.count(), columns_, queries.count(), AllRows<const T>{slopes, 1}, kTileKeys,
                AllRows<const T>{query_.data() + queries.begin * columns_, columns_},
                AllRows<T>{grad_key_.data() + keys.begin * columns_, columns_});
    multiply<V>(keys.count(), value_columns_, queries.count(), AllRows<const T>{weights, 1}, kTileKeys,
                AllRows<const T>{grad_.data() + queries.begin * value_columns_, value_columns_},
                AllRows<T>{grad_value_.data() + keys.begin * value_columns_, value_columns_});
  }

  // Writes the gradients, those of queries and keys times scale.
  template <class V>
  YOSO_INLINE void store_gradients(const OutputRows& grad_query, const OutputRows& grad_key,
                                   const OutputRows& grad_value, int64_t batch, int64_t head, T scale) {
    if (unit) {
      through_normalize<V>(grad_query_.data(), columns_, query_.data(), columns_, num_queries_, columns_,
                           query_inverse_.data(), T{1});
      through_normalize<V>(grad_key_.data(), columns_, key_.data(), columns_, num_keys_, columns_, key_inverse_.data(),
                           T{1});
    }
    const auto store = [&](const Buffer<T>& from, int64_t columns, T scale, const OutputRows& to) YOSO_INLINE_LAMBDA {
      store_rows<V>(from.data(), columns, scale, to, batch, head, 0, to.count);
    };
    store(grad_query_, columns_, scale, grad_query);
    store(grad_key_, columns_, scale, grad_key);
    store(grad_value_, value_columns_, T{1}, grad_value);
  }

 private:
  const int64_t columns_, value_columns_, num_queries_, num_keys_;
  Buffer<T> query_, query_inverse_, key_, key_inverse_, key_tiles_, value_, value_tiles_, grad_;
  Buffer<T> grad_query_, grad_key_, grad_value_;
};

}  // namespace
}  // namespace yoso
