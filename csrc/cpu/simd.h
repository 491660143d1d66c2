// Vectors, buffers and the small matrix products that the CPU kernels are made of.
#pragma once

#include "../common.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

// Compiles a function for AVX-512, AVX2 and the portable baseline and picks one at run time. Everything it calls in
// its loops must be YOSO_INLINE, or it would stay at the baseline.
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__)
#define YOSO_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define YOSO_MULTIVERSION
#endif
#define YOSO_INLINE inline __attribute__((always_inline))

namespace yoso {

// 64 bytes of T: one AVX-512 register, two of AVX2, four of SSE or NEON.
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(64)));
  // the same, in memory that is aligned for T only
  typedef T memory __attribute__((vector_size(64), aligned(alignof(T)), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;
template <class T>
constexpr int64_t kLanes = 64 / sizeof(T);

template <class T>
YOSO_INLINE Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T>::memory*>(from);
}
template <class T>
YOSO_INLINE void store(T* to, Vector<T> x) {
  *reinterpret_cast<typename VectorOf<T>::memory*>(to) = x;
}

// Rows in buffers are padded with zeros to this many elements, whatever T: whole vectors, no tails.
constexpr int64_t kRowQuantum = 16;
inline int64_t padded(int64_t columns) { return (columns + kRowQuantum - 1) / kRowQuantum * kRowQuantum; }

// Uninitialised memory, aligned to cache lines.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(size * sizeof(T) + 64, kAlign))), size_(size) {}
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) { return data_.get()[i]; }
  const T& operator[](int64_t i) const { return data_.get()[i]; }
  void zero() { std::memset(static_cast<void*>(data_.get()), 0, size_ * sizeof(T)); }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(T* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_;
};

// Copies rows of [B, H, N, D] at one (batch, head) to a padded buffer in the accumulator's type.
template <class In, class T>
void load_rows(Rows<const In> rows, int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t columns, T* to,
               int64_t to_columns) {
  for (int64_t row = begin; row < end; ++row, to += to_columns) {
    const In* from = rows.at(batch, head, row);
    for (int64_t c = 0; c < columns; ++c) to[c] = static_cast<T>(from[c]);
    for (int64_t c = columns; c < to_columns; ++c) to[c] = 0;
  }
}

template <class Out, class T>
void store_rows(const T* from, int64_t from_columns, T scale, Rows<Out> rows, int64_t batch, int64_t head,
                int64_t begin, int64_t end, int64_t columns) {
  for (int64_t row = begin; row < end; ++row, from += from_columns) {
    Out* to = rows.at(batch, head, row);
    for (int64_t c = 0; c < columns; ++c) to[c] = static_cast<Out>(from[c] * scale);
  }
}

template <class T>
YOSO_INLINE T sum_of_lanes(Vector<T> x) {
  T sum = 0;
  for (int64_t lane = 0; lane < kLanes<T>; ++lane) sum += x[lane];
  return sum;
}

// Scales rows to length one and keeps the inverse lengths; a zero row stays zero, with inverse length 0.
template <class T>
static YOSO_MULTIVERSION void normalize_rows(T* rows, int64_t count, int64_t columns, T* inverse_length) {
  for (int64_t row = 0; row < count; ++row, rows += columns) {
    Vector<T> squares = {};
    for (int64_t c = 0; c < columns; c += kLanes<T>) squares += load(rows + c) * load(rows + c);
    const T square = sum_of_lanes<T>(squares);
    const T inverse = square > 0 ? 1 / std::sqrt(square) : 0;
    for (int64_t c = 0; c < columns; c += kLanes<T>) store<T>(rows + c, load(rows + c) * inverse);
    inverse_length[row] = inverse;
  }
}

// Turns the gradient of unit rows into that of the rows they came from, scaled: (g - (g . u) u) * inverse_length.
template <class T>
static YOSO_MULTIVERSION void through_normalize(T* grad, const T* unit, int64_t count, int64_t columns,
                                                const T* inverse_length, T scale) {
  for (int64_t row = 0; row < count; ++row, grad += columns, unit += columns) {
    Vector<T> products = {};
    for (int64_t c = 0; c < columns; c += kLanes<T>) products += load(grad + c) * load(unit + c);
    const T along = sum_of_lanes<T>(products), factor = inverse_length[row] * scale;
    for (int64_t c = 0; c < columns; c += kLanes<T>)
      store<T>(grad + c, (load(grad + c) - along * load(unit + c)) * factor);
  }
}

template <class T>
YOSO_INLINE void copy_row(T* to, const T* from, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes<T>) store<T>(to + c, load(from + c));
}

template <class T>
YOSO_INLINE void add_row(T* to, const T* from, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes<T>) store<T>(to + c, load(to + c) + load(from + c));
}

template <class T, int R, int C>
YOSO_INLINE void multiply_tile(int64_t K, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_row, T* c,
                               int64_t c_row) {
  Vector<T> sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) sum[r][v] = load(c + r * c_row + v * kLanes<T>);
  for (int64_t k = 0; k < K; ++k) {
    Vector<T> row[C];
    for (int v = 0; v < C; ++v) row[v] = load(b + k * b_row + v * kLanes<T>);
    for (int r = 0; r < R; ++r) {
      T factor = a[r * a_row + k * a_column];
      for (int v = 0; v < C; ++v) sum[r][v] += factor * row[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) store<T>(c + r * c_row + v * kLanes<T>, sum[r][v]);
}

// c[i][j] += sum over k of a[i][k] * b[k][j], for i < I, k < K, j < J; J a multiple of kRowQuantum. Element a[i][k]
// lies at a[i * a_row + k * a_column], so a may be transposed.
template <class T>
YOSO_INLINE void multiply(int64_t I, int64_t J, int64_t K, const T* a, int64_t a_row, int64_t a_column, const T* b,
                          int64_t b_row, T* c, int64_t c_row) {
  constexpr int64_t L = kLanes<T>;
  int64_t j = 0;
  for (; j + 2 * L <= J; j += 2 * L) {
    int64_t i = 0;
    for (; i + 4 <= I; i += 4)
      multiply_tile<T, 4, 2>(K, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row);
    for (; i < I; ++i)
      multiply_tile<T, 1, 2>(K, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row);
  }
  for (; j < J; j += L) {
    int64_t i = 0;
    for (; i + 4 <= I; i += 4)
      multiply_tile<T, 4, 1>(K, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row);
    for (; i < I; ++i)
      multiply_tile<T, 1, 1>(K, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row);
  }
}

// Adds up the lanes of two vectors of blocks of 2 * Half lanes at a time: the blocks of Half lanes of the result are
// those of a, then those of b, each folded in two.
template <int Half, class V, int... I>
YOSO_INLINE V fold_blocks(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int L = sizeof...(I);
  return __builtin_shufflevector(a, b, (I * 2 / L * L + (I % (L / 2)) / Half * 2 * Half + I % Half)...) +
         __builtin_shufflevector(a, b, (I * 2 / L * L + (I % (L / 2)) / Half * 2 * Half + I % Half + Half)...);
}

// The sums of the lanes of each of eight vectors.
template <class T>
YOSO_INLINE void sums_of_lanes(const Vector<T> (&x)[8], T* sums) {
  constexpr int L = kLanes<T>;
  constexpr auto lanes = std::make_integer_sequence<int, L>{};
  Vector<T> pairs[4], quads[2];
  for (int i = 0; i < 4; ++i) pairs[i] = fold_blocks<L / 2>(x[2 * i], x[2 * i + 1], lanes);
  for (int i = 0; i < 2; ++i) quads[i] = fold_blocks<L / 4>(pairs[2 * i], pairs[2 * i + 1], lanes);
  Vector<T> all = fold_blocks<L / 8>(quads[0], quads[1], lanes);
  if constexpr (L == 16) all = fold_blocks<1>(all, all, lanes);
  for (int i = 0; i < 8; ++i) sums[i] = all[i];
}

template <class T, int R, int C>
YOSO_INLINE void dot_tile(int64_t columns, const T* a, const T* b, T* c, int64_t c_row) {
  Vector<T> sum[8] = {};
  for (int64_t k = 0; k < columns; k += kLanes<T>) {
    Vector<T> row[C];
    for (int v = 0; v < C; ++v) row[v] = load(b + v * columns + k);
    for (int r = 0; r < R; ++r) {
      Vector<T> left = load(a + r * columns + k);
      for (int v = 0; v < C; ++v) sum[r * C + v] += left * row[v];
    }
  }
  T sums[8];
  sums_of_lanes<T>(sum, sums);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) c[r * c_row + v] = sums[r * C + v];
}

// c[i][j] = a[i] . b[j], for rows of padded length `columns` that lie one after the other.
template <class T>
YOSO_INLINE void dot_products(int64_t I, int64_t J, int64_t columns, const T* a, const T* b, T* c, int64_t c_row) {
  for (int64_t i = 0; i < I; i += 2) {
    int64_t j = 0;
    if (i + 2 <= I) {
      for (; j + 4 <= J; j += 4) dot_tile<T, 2, 4>(columns, a + i * columns, b + j * columns, c + i * c_row + j, c_row);
      for (; j < J; ++j) dot_tile<T, 2, 1>(columns, a + i * columns, b + j * columns, c + i * c_row + j, c_row);
    } else {
      for (; j + 4 <= J; j += 4) dot_tile<T, 1, 4>(columns, a + i * columns, b + j * columns, c + i * c_row + j, c_row);
      for (; j < J; ++j) dot_tile<T, 1, 1>(columns, a + i * columns, b + j * columns, c + i * c_row + j, c_row);
    }
  }
}

}  // namespace yoso
