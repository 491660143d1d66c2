// The rows of a head as attention in tiles multiplies them, by the tiles of AMX (amx_tiles.h): bfloat16 rows, sums in
// float32.
//
// Rows are multiplied as they are, which is exact in float32 up to the sums, and scaled to length one afterwards. What
// is no bfloat16, the weights and slopes, is multiplied as the sum of two, which leaves an error of 2^-16: AMX is fast
// enough for that. Places outside of a tile's queries and keys hold zeros, and so do rows and columns past the last.
#pragma once

#include "amx_tiles.h"
#include "tile_rows.h"

#if YOSO_HAS_AMX

namespace yoso {
namespace {

inline int64_t whole_query_tiles(int64_t rows) { return (rows + kTileQueries - 1) / kTileQueries * kTileQueries; }

// 32 numbers of 16 bits, and 16 of 32.
using Halves = Vector<uint16_t, 64>;
using Words = Vector<uint32_t, 64>;
using Floats = Vector<float, 64>;
constexpr uint32_t kUpperHalf = 0xffff0000;

YOSO_INLINE Halves load_halves(const void* from) { return load<Halves>(static_cast<const uint16_t*>(from)); }
YOSO_INLINE void store_halves(void* to, Halves x) { store<Halves>(static_cast<uint16_t*>(to), x); }

template <int First, int... I>
YOSO_INLINE Halves interleave(Halves a, Halves b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (First + I / 2 + I % 2 * 32)...);
}
template <int... I>
YOSO_INLINE Halves odd_halves(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector((Halves)a, (Halves)b, (2 * I + 1)...);
}
constexpr auto kHalfNumbers = std::make_integer_sequence<int, 32>{};

// x as the sum of two bfloat16: its upper half, and that of what it leaves.
YOSO_INLINE Floats less_upper_half(Floats x) { return x - (Floats)((Words)x & kUpperHalf); }

// Copies some rows of [B, H, N, D] at one (batch, head) to rows of `stride` numbers, zero past the last column.
YOSO_INLINE void copy_rows(const InputRows& x, int64_t batch, int64_t head, Range range, BFloat16* to, int64_t stride) {
  const Rows<const BFloat16> rows = x.as<BFloat16>();
  const int64_t columns = x.columns, whole = columns / kAmxStep * kAmxStep;
  for (int64_t row = range.begin; row < range.end; ++row, to += stride) {
    const BFloat16* from = rows.at(batch, head, row);
    fetch_ahead(rows, batch, head, row, range.begin, range.end, columns);
    for (int64_t c = 0; c < whole; c += kAmxStep) store_halves(to + c, load_halves(from + c));
    for (int64_t c = whole; c < stride; ++c) to[c] = c < columns ? from[c] : BFloat16(0);
  }
}

// The rows as float32, times a factor each.
YOSO_INLINE void widen_rows(const BFloat16* from, int64_t stride, int64_t count, const float* factors, int64_t columns,
                            float* to) {
  for (int64_t row = 0; row < count; ++row, from += stride, to += columns)
    for (int64_t c = 0; c < columns; c += kLanes<Floats>)
      store<Floats>(to + c, load_as<Floats>(from + c) * factors[row]);
}

// The inverse lengths of rows, and of the zeros that fill up the last 16. A row that counts as of length zero becomes
// zero, or what is no number where it has one.
YOSO_INLINE void invert_lengths(BFloat16* rows, int64_t stride, int64_t count, float* inverse_length) {
  for (int64_t first = 0; first < count; first += kAmxRows) {
    Floats squares[kAmxRows] = {};
    for (int64_t i = 0; i < kAmxRows; ++i)
      for (int64_t c = 0; c < stride; c += kLanes<Floats>) {
        const Floats x = load_as<Floats>(rows + (first + i) * stride + c);
        squares[i] += x * x;
      }
    alignas(64) float sums[kAmxRows];
    store_sums(squares, sums);
    for (int64_t i = 0; i < kAmxRows; ++i) inverse_length[first + i] = sums[i] > 0 ? 1 / std::sqrt(sums[i]) : 0;
    for (int64_t row = first; row < std::min(count, first + kAmxRows); ++row)
      if (inverse_length[row] == 0)
        for (int64_t c = 0; c < stride; c += kLanes<Floats>)
          store_as<Floats>(rows + row * stride + c, load_as<Floats>(rows + row * stride + c) * 0.0f);
  }
}

// Pairs of neighbouring rows, column by column: to[row / 2][column]. `count` is even.
YOSO_INLINE void pair_rows(const BFloat16* rows, int64_t stride, int64_t count, uint32_t* to) {
  for (int64_t row = 0; row < count; row += 2, rows += 2 * stride, to += stride)
    for (int64_t c = 0; c < stride; c += kAmxStep) {
      const Halves a = load_halves(rows + c), b = load_halves(rows + stride + c);
      store_halves(to + c, interleave<0>(a, b, kHalfNumbers));
      store_halves(to + c + 16, interleave<16>(a, b, kHalfNumbers));
    }
}

// to[column][row] of a matrix of words.
YOSO_INLINE void transpose_words(const void* from, int64_t rows, int64_t columns, void* to) {
  // moved as floats, which leaves the bits as they are
  transpose_rows<Floats>(AllRows<const float>{static_cast<const float*>(from), columns}, rows, columns,
                         static_cast<float*>(to), rows);
}

// Clears what of a tile's weights or slopes lies outside of its queries and keys.
YOSO_INLINE void clear_outside(Range queries, Range keys, float* tile) {
  if (keys.count() < kTileKeys)
    for (int64_t q = 0; q < queries.count(); ++q)
      for (int64_t k = keys.count(); k < kTileKeys; ++k) tile[q * kTileKeys + k] = 0;
  std::fill(tile + queries.count() * kTileKeys, tile + kTileSize, 0.0f);
}

// A tile's numbers as left matrix, in their place: a row's upper halves, and what these leave.
YOSO_INLINE void split_rows(float* tile) {
  for (int64_t q = 0; q < kTileQueries; ++q, tile += kTileKeys) {
    Floats x[kTileKeys / kLanes<Floats>];
    for (int64_t i = 0; i < kTileKeys / kLanes<Floats>; ++i) x[i] = load<Floats>(tile + i * kLanes<Floats>);
    for (int64_t part = 0; part < 2; ++part)
      for (int64_t i = 0; i < kTileKeys / kLanes<Floats>; i += 2) {
        store_halves(tile + (part * kTileKeys + i * kLanes<Floats>) / 2, odd_halves(x[i], x[i + 1], kHalfNumbers));
        x[i] = less_upper_half(x[i]);
        x[i + 1] = less_upper_half(x[i + 1]);
      }
  }
}

// What split_rows made, and pairs of the tile's keys, or values.
YOSO_INLINE TileGrid<2> split_rows_grid(const float* tile) {
  return {tile, kAmxRows * kTileKeys * 4, 64, kTileKeys * 4, kTileKeys * 2};
}
YOSO_INLINE TileGrid<> pairs_grid(const uint32_t* pairs, int64_t stride) {
  return {pairs, 64, kAmxRows * stride * 4, stride * 4};
}

// A tile's numbers as right matrix, in their place: of every pair of queries the upper halves, and what these leave.
YOSO_INLINE void split_pairs(float* tile) {
  for (int64_t q = 0; q < kTileQueries; q += 2, tile += 2 * kTileKeys)
    for (int64_t k = 0; k < kTileKeys; k += kLanes<Floats>) {
      const Floats a = load<Floats>(tile + k), b = load<Floats>(tile + kTileKeys + k);
      const Floats a_rest = less_upper_half(a), b_rest = less_upper_half(b);
      store<Floats>(tile + k, (Floats)((Words)a >> 16 | ((Words)b & kUpperHalf)));
      store<Floats>(tile + kTileKeys + k, (Floats)((Words)a_rest >> 16 | ((Words)b_rest & kUpperHalf)));
    }
}

// sums += the tile's queries, or gradients, one a column of `transposed`, times what split_pairs made.
YOSO_INLINE void multiply_split_pairs(const BFloat16* transposed, int64_t columns, const float* tile, float* sums) {
  multiply_grids(true, columns / kAmxRows, kTileKeys / kAmxRows, 1, TileGrid{transposed, kAmxRows * 64, 0, 64},
                 TileGrid<2>{tile, 64, 0, 2 * kTileKeys * 4, kTileKeys * 4}, sums, kTileKeys);
}

// Multiplies a tile's numbers by factors of the queries, or of the keys.
YOSO_INLINE void scale_by_query(const float* tile, const float* factors, float* to) {
  for (int64_t q = 0; q < kTileQueries; ++q)
    for (int64_t k = 0; k < kTileKeys; k += kLanes<Floats>)
      store<Floats>(to + q * kTileKeys + k, load<Floats>(tile + q * kTileKeys + k) * factors[q]);
}
YOSO_INLINE void scale_by_key(const float* tile, const float* factors, float* to) {
  for (int64_t q = 0; q < kTileQueries; ++q)
    for (int64_t k = 0; k < kTileKeys; k += kLanes<Floats>)
      store<Floats>(to + q * kTileKeys + k, load<Floats>(tile + q * kTileKeys + k) * load<Floats>(factors + k));
}

// A tile's products become cosines.
YOSO_INLINE void scale_products(Range queries, Range keys, const float* query_inverse, const float* key_inverse,
                                float* products) {
  for (int64_t q = queries.begin; q < queries.end; ++q, products += kTileKeys)
    for (int64_t k = 0; k < keys.count(); k += kLanes<Floats>)
      store<Floats>(products + k,
                    load<Floats>(products + k) * load<Floats>(key_inverse + keys.begin + k) * query_inverse[q]);
}

// Rows that are multiplied with each other: a tile of queries, or gradients, with one of keys, or values.
YOSO_INLINE TileGrid<> left_grid(const BFloat16* left, int64_t stride) {
  return {left, kAmxRows * stride * 2, 64, stride * 2};
}
YOSO_INLINE TileGrid<> right_grid(const uint32_t* right) {
  return {right, 64, kAmxRows * kTileKeys * 4, kTileKeys * 4};
}
YOSO_INLINE void multiply_row_tiles(const BFloat16* left, const uint32_t* right, int64_t stride, Range keys,
                                    float* products) {
  multiply_grids(false, kTileQueries / kAmxRows, padded(keys.count()) / kAmxRows, stride / kAmxStep,
                 left_grid(left, stride), right_grid(right), products, kTileKeys);
}

// Some keys or values of a head, a tile at a time: those for which is_real(row) does not hold, and what is past the
// last, are zeros.
template <class IsReal>
YOSO_INLINE void copy_tile(const InputRows& x, int64_t batch, int64_t head, int64_t first, const IsReal& is_real,
                           BFloat16* to, int64_t stride) {
  const Range rows{first, std::min(x.count, first + kTileKeys)};
  copy_rows(x, batch, head, rows, to, stride);
  for (int64_t row = rows.begin; row < first + kTileKeys; ++row)
    if (row >= rows.end || !is_real(row)) std::fill_n(to + (row - first) * stride, stride, BFloat16(0));
}

YOSO_INLINE void copy_query_tiles(const InputRows& x, int64_t batch, int64_t head, Range rows, BFloat16* to,
                                  int64_t stride) {
  copy_rows(x, batch, head, rows, to, stride);
  std::fill(to + rows.count() * stride, to + whole_query_tiles(rows.count()) * stride, BFloat16(0));
}

// See VectorForward.
template <bool unit>
class AmxForward {
 public:
  AmxForward(int64_t num_queries, int64_t num_keys, int64_t D, int64_t Dv)
      : stride_(amx_padded(D)),
        value_stride_(amx_padded(Dv)),
        value_columns_(padded(Dv)),
        num_keys_(num_keys),
        query_(whole_query_tiles(num_queries) * stride_),
        tile_(kTileKeys * std::max(stride_, value_stride_)),
        key_tiles_(whole_tiles(num_keys) * stride_ / 2),
        value_pairs_(whole_tiles(num_keys) * value_stride_ / 2),
        query_inverse_(whole_query_tiles(num_queries)),
        key_inverse_(whole_tiles(num_keys)),
        sums_(whole_query_tiles(num_queries) * value_columns_) {}

  template <class F>
  static void run(const F& f) {
    run_amx(f);
  }

  template <class V>
  YOSO_INLINE void load_queries(const InputRows& query, int64_t batch, int64_t head, Range rows) {
    copy_query_tiles(query, batch, head, rows, query_.data(), stride_);
    if (unit) invert_lengths(query_.data(), stride_, rows.count(), query_inverse_.data());
    sums_.zero();
  }

  template <class V, class IsReal>
  YOSO_INLINE void load_keys(const InputRows& key, const InputRows& value, int64_t batch, int64_t head,
                             const IsReal& is_real) {
    for (int64_t first = 0; first < num_keys_; first += kTileKeys) {
      copy_tile(key, batch, head, first, is_real, tile_.data(), stride_);
      if (unit)
        invert_lengths(tile_.data(), stride_, std::min(kTileKeys, num_keys_ - first), key_inverse_.data() + first);
      transpose_words(tile_.data(), kTileKeys, stride_ / 2, key_tiles_.data() + first * stride_ / 2);
      copy_tile(value, batch, head, first, is_real, tile_.data(), value_stride_);
      pair_rows(tile_.data(), value_stride_, kTileKeys, value_pairs_.data() + first * value_stride_ / 2);
    }
  }

  // Multiplies a tile's rows, as the tile before is weighed and the values of the one before that are added.
  template <class V, class Pairs>
  YOSO_INLINE void add_tile(Pairs& pairs, int64_t first, Range queries, Range keys) {
    // the weights that were there are multiplied before
    float* const products = tiles_.data() + (weighed_next_.numbers == tiles_.data() ? kTileSize : 0);
    meanwhile_.set_rows({padded(keys.count()) / kAmxRows, stride_ / kAmxStep,
                         left_grid(query_.data() + queries.begin * stride_, stride_),
                         right_grid(key_tiles_.data() + keys.begin * stride_ / 2), products, kTileKeys});
    weigh<V>(pairs);
    weighed_next_ = {first, queries, keys, products};
  }

  template <class V, class Pairs>
  YOSO_INLINE void finish(Pairs& pairs) {
    weigh<V>(pairs);
    meanwhile_.finish();
    weighed_next_ = {};
  }

  int64_t value_columns() const { return value_columns_; }
  float* sums() { return sums_.data(); }

 private:
  // A tile's products, and then its weights.
  struct Tile {
    int64_t first;
    Range queries, keys;
    float* numbers;
  };

  template <class V, class Pairs>
  YOSO_INLINE void weigh(Pairs& pairs) {
    const auto [first, queries, keys, weights] = weighed_next_;
    if (weights == nullptr) return meanwhile_.finish();
    if (unit) scale_products(queries, keys, query_inverse_.data(), key_inverse_.data(), weights);
    pairs.template weigh<V>(Range{first + queries.begin, first + queries.end}, keys, weights, meanwhile_);
    meanwhile_.finish();
    clear_outside(queries, keys, weights);
    split_rows(weights);
    meanwhile_.set_values({value_columns_ / kAmxRows, kTileKeys / kAmxStep, split_rows_grid(weights),
                           pairs_grid(value_pairs_.data() + keys.begin * value_stride_ / 2, value_stride_),
                           sums_.data() + queries.begin * value_columns_, value_columns_});
  }

  const int64_t stride_, value_stride_, value_columns_, num_keys_;
  ProductsMeanwhile meanwhile_{kTileQueries};
  Tile weighed_next_{};
  Buffer<float> tiles_{2 * kTileSize};
  Buffer<BFloat16> query_, tile_;
  Buffer<uint32_t> key_tiles_, value_pairs_;
  Buffer<float> query_inverse_, key_inverse_, sums_;
};

// See VectorBackward. The sums of keys and values are kept transposed, by tiles.
template <bool unit>
class AmxBackward {
 public:
  AmxBackward(int64_t num_queries, int64_t num_keys, int64_t D, int64_t Dv)
      : stride_(amx_padded(D)),
        value_stride_(amx_padded(Dv)),
        columns_(padded(D)),
        value_columns_(padded(Dv)),
        num_queries_(num_queries),
        num_keys_(num_keys),
        query_(whole_query_tiles(num_queries) * stride_),
        query_transposed_(whole_query_tiles(num_queries) * stride_),
        grad_(whole_query_tiles(num_queries) * value_stride_),
        grad_transposed_(whole_query_tiles(num_queries) * value_stride_),
        key_(whole_tiles(num_keys) * stride_),
        value_tile_(kTileKeys * value_stride_),
        key_tiles_(whole_tiles(num_keys) * stride_ / 2),
        key_pairs_(whole_tiles(num_keys) * stride_ / 2),
        value_tiles_(whole_tiles(num_keys) * value_stride_ / 2),
        pairs_(kTileQueries / 2 * std::max(stride_, value_stride_)),
        query_inverse_(whole_query_tiles(num_queries)),
        key_inverse_(whole_tiles(num_keys)),
        grad_query_(whole_query_tiles(num_queries) * columns_),
        grad_key_(whole_tiles(num_keys) * columns_),
        grad_value_(whole_tiles(num_keys) * value_columns_),
        rows_(2 * kTileKeys * std::max(columns_, value_columns_)) {}

  template <class F>
  static void run(const F& f) {
    run_amx(f);
  }

  template <class V, class IsReal>
  YOSO_INLINE void load(const InputRows& grad, const InputRows& query, const InputRows& key, const InputRows& value,
                        int64_t batch, int64_t head, const IsReal& is_real) {
    copy_query_tiles(query, batch, head, {0, num_queries_}, query_.data(), stride_);
    copy_query_tiles(grad, batch, head, {0, num_queries_}, grad_.data(), value_stride_);
    const int64_t whole = whole_query_tiles(num_queries_);
    if (unit) {
      // what is past the last row is multiplied too
      query_inverse_.zero();
      key_inverse_.zero();
      invert_lengths(query_.data(), stride_, num_queries_, query_inverse_.data());
    }
    const auto transpose = [&](const BFloat16* rows, int64_t stride, BFloat16* to) YOSO_INLINE_LAMBDA {
      for (int64_t first = 0; first < whole; first += kTileQueries) {
        pair_rows(rows + first * stride, stride, kTileQueries, pairs_.data());
        transpose_words(pairs_.data(), kTileQueries / 2, stride, to + first * stride);
      }
    };
    transpose(query_.data(), stride_, query_transposed_.data());
    transpose(grad_.data(), value_stride_, grad_transposed_.data());
    for (int64_t first = 0; first < num_keys_; first += kTileKeys) {
      BFloat16* const keys = key_.data() + first * stride_;
      copy_tile(key, batch, head, first, is_real, keys, stride_);
      if (unit)
        invert_lengths(keys, stride_, std::min(kTileKeys, num_keys_ - first), key_inverse_.data() + first);
      transpose_words(keys, kTileKeys, stride_ / 2, key_tiles_.data() + first * stride_ / 2);
      pair_rows(keys, stride_, kTileKeys, key_pairs_.data() + first * stride_ / 2);
      copy_tile(value, batch, head, first, is_real, value_tile_.data(), value_stride_);
      transpose_words(value_tile_.data(), kTileKeys, value_stride_ / 2,
                      value_tiles_.data() + first * value_stride_ / 2);
    }
    grad_query_.zero();
    grad_key_.zero();
    grad_value_.zero();
  }

  template <class V>
  YOSO_INLINE void multiply_rows(Range queries, Range keys, float* products, float* value_products) const {
    multiply_row_tiles(query_.data() + queries.begin * stride_, key_tiles_.data() + keys.begin * stride_ / 2, stride_,
                       keys, products);
    multiply_row_tiles(grad_.data() + queries.begin * value_stride_,
                       value_tiles_.data() + keys.begin * value_stride_ / 2, value_stride_, keys, value_products);
    if (unit)
      scale_products(queries, keys, query_inverse_.data(), key_inverse_.data(), products);
  }

  // The slopes stay as they are.
  template <class V>
  YOSO_INLINE void add_to_queries(Range queries, Range keys, float* slopes) {
    clear_outside(queries, keys, slopes);
    alignas(64) float left[kTileSize];
    if (unit)
      scale_by_key(slopes, key_inverse_.data() + keys.begin, left);
    else
      std::memcpy(left, slopes, sizeof(left));
    split_rows(left);
    multiply_grids(true, kTileQueries / kAmxRows, columns_ / kAmxRows, kTileKeys / kAmxStep, split_rows_grid(left),
                   pairs_grid(key_pairs_.data() + keys.begin * stride_ / 2, stride_),
                   grad_query_.data() + queries.begin * columns_, columns_);
  }

  // Overwrites slopes and weights.
  template <class V>
  YOSO_INLINE void add_to_keys(Range queries, Range keys, float* slopes, float* weights) {
    clear_outside(queries, keys, slopes);
    clear_outside(queries, keys, weights);
    if (unit) scale_by_query(slopes, query_inverse_.data() + queries.begin, slopes);
    split_pairs(slopes);
    multiply_split_pairs(query_transposed_.data() + queries.begin * stride_, columns_, slopes,
                         grad_key_.data() + keys.begin * columns_);
    split_pairs(weights);
    multiply_split_pairs(grad_transposed_.data() + queries.begin * value_stride_, value_columns_, weights,
                         grad_value_.data() + keys.begin * value_columns_);
  }

  template <class V>
  YOSO_INLINE void store_gradients(const OutputRows& grad_query, const OutputRows& grad_key,
                                   const OutputRows& grad_value, int64_t batch, int64_t head, float scale) {
    // of a tile of rows or less
    const auto finish = [&](float* sums, const BFloat16* rows, const float* inverse, Range range,
                            const OutputRows& to) YOSO_INLINE_LAMBDA {
      if (unit) {
        float* const unit_rows = rows_.data() + kTileKeys * columns_;
        widen_rows(rows, stride_, range.count(), inverse, columns_, unit_rows);
        through_normalize<V>(sums, columns_, unit_rows, columns_, range.count(), columns_, inverse, 1.0f);
      }
      store_rows<V>(sums, columns_, scale, to, batch, head, range.begin, range.end);
    };
    for (int64_t row = 0; row < num_queries_; row += kTileKeys)
      finish(grad_query_.data() + row * columns_, query_.data() + row * stride_, query_inverse_.data() + row,
             {row, std::min(num_queries_, row + kTileKeys)}, grad_query);
    for (int64_t row = 0; row < num_keys_; row += kTileKeys) {
      const Range range{row, std::min(num_keys_, row + kTileKeys)};
      transpose_rows<V>(AllRows<const float>{grad_key_.data() + row * columns_, kTileKeys}, columns_, kTileKeys,
                        rows_.data(), columns_);
      finish(rows_.data(), key_.data() + row * stride_, key_inverse_.data() + row, range, grad_key);
      transpose_rows<V>(AllRows<const float>{grad_value_.data() + row * value_columns_, kTileKeys}, value_columns_,
                        kTileKeys, rows_.data(), value_columns_);
      store_rows<V>(rows_.data(), value_columns_, 1.0f, grad_value, batch, head, range.begin, range.end);
    }
  }

 private:
  const int64_t stride_, value_stride_, columns_, value_columns_, num_queries_, num_keys_;
  Buffer<BFloat16> query_, query_transposed_, grad_, grad_transposed_, key_, value_tile_;
  Buffer<uint32_t> key_tiles_, key_pairs_, value_tiles_, pairs_;
  Buffer<float> query_inverse_, key_inverse_, grad_query_, grad_key_, grad_value_, rows_;
};

struct AmxRows {
  template <bool unit>
  using Forward = AmxForward<unit>;
  template <bool unit>
  using Backward = AmxBackward<unit>;
};

}  // namespace
}  // namespace yoso

#endif
