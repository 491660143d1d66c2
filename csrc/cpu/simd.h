// What the CPU kernels are made of: vectors, the choice of instruction set, buffers, rows, small matrix products.
#pragma once

#include "../checks.h"
#include "../cpu_capability.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#define YOSO_INLINE inline __attribute__((always_inline))
// between the parameters and the body of a lambda
#define YOSO_INLINE_LAMBDA __attribute__((always_inline))

namespace yoso {

// The width of the vectors a kernel is compiled for: one register of AVX-512, AVX2, or SSE and NEON.
template <int Bytes>
using Width = std::integral_constant<int, Bytes>;

#if defined(__x86_64__)
template <class F>
__attribute__((target("arch=x86-64-v4"), noinline)) void run_avx512(const F& f) {
  f(Width<64>{});
}
template <class F>
__attribute__((target("arch=x86-64-v3"), noinline)) void run_avx2(const F& f) {
  f(Width<32>{});
}
#endif
template <class F>
__attribute__((noinline)) void run_baseline(const F& f) {
  f(Width<16>{});
}

// Calls f(Width) compiled for the processor's instruction set. f must be a YOSO_INLINE_LAMBDA, and what it calls in
// its loops YOSO_INLINE: anything else stays compiled for the portable baseline.
template <class F>
void vectorized(const F& f) {
#if defined(__x86_64__)
  if (cpu_capability() >= Capability::kAvx512) return run_avx512(f);
  if (cpu_capability() == Capability::kAvx2) return run_avx2(f);
#endif
  run_baseline(f);
}

template <class T, int Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes)));
  // the same, in memory that is aligned for T only
  typedef T memory __attribute__((vector_size(Bytes), aligned(alignof(T)), may_alias));
};
template <class T, int Bytes>
using Vector = typename VectorOf<T, Bytes>::type;
template <class V>
using Element = std::remove_reference_t<decltype(std::declval<V>()[0])>;
template <class V>
constexpr int64_t kLanes = sizeof(V) / sizeof(Element<V>);

// of vectors V: 32 of AVX-512 and NEON, 16 of AVX2 and SSE
#if defined(__aarch64__)
template <class V>
constexpr int kRegisters = 32;
#else
template <class V>
constexpr int kRegisters = sizeof(V) == 64 ? 32 : 16;
#endif

// Calls f(Width), a YOSO_INLINE_LAMBDA, as a function of its own from code for vectors V: a loop that needs nearly all
// registers loses some to whatever surrounds it.
template <class V, class F>
YOSO_INLINE void outlined(const F& f) {
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 64) return run_avx512(f);
  if constexpr (sizeof(V) == 32) return run_avx2(f);
#endif
  run_baseline(f);
}

template <class V>
YOSO_INLINE V load(const Element<V>* from) {
  return *reinterpret_cast<const typename VectorOf<Element<V>, sizeof(V)>::memory*>(from);
}
template <class V>
YOSO_INLINE void store(Element<V>* to, V x) {
  *reinterpret_cast<typename VectorOf<Element<V>, sizeof(V)>::memory*>(to) = x;
}

template <class V>
YOSO_INLINE V load_as(const Element<V>* from) {
  return load<V>(from);
}
template <class V>
YOSO_INLINE V load_as(const BFloat16* from) {
  using Bits = Vector<uint16_t, sizeof(V) / 2>;
  return (V)(__builtin_convertvector(load<Bits>(reinterpret_cast<const uint16_t*>(from)), Vector<uint32_t, sizeof(V)>)
             << 16);
}
template <class V>
YOSO_INLINE V load_as(const Half* from) {
  using Bits = Vector<uint32_t, sizeof(V)>;
  const Bits half =
      __builtin_convertvector(load<Vector<uint16_t, sizeof(V) / 2>>(reinterpret_cast<const uint16_t*>(from)), Bits);
  const Bits size = half & 0x7fff;
  // a float's exponent is over 112 more; below the normal range, what is more than a half has the number's last bits:
  // a float below its own normal range may be zero to the processor (torch.set_flush_denormal)
  const Bits small = (Bits)((V)(size | __builtin_bit_cast(uint32_t, 0.5f)) - 0.5f);
  Bits bits = (size << 13) + (112u << 23);
  bits = size >= 0x7c00 ? bits + (112u << 23) : bits;
  bits = size < 0x400 ? small : bits;
  return (V)(bits | (half & 0x8000) << 16);
}

template <class V>
YOSO_INLINE void store_as(Element<V>* to, V x) {
  store<V>(to, x);
}
template <class V>
YOSO_INLINE void store_as(BFloat16* to, V x) {
  using Bits = Vector<uint32_t, sizeof(V)>;
  const Bits bits = (Bits)x;
  // to nearest, ties to even; a NaN must not be rounded to infinity
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits result = x == x ? rounded : (bits >> 16 | 0x40);
  store(reinterpret_cast<uint16_t*>(to), __builtin_convertvector(result, Vector<uint16_t, sizeof(V) / 2>));
}
template <class V>
YOSO_INLINE void store_as(Half* to, V x) {
  using Bits = Vector<uint32_t, sizeof(V)>;
  // to nearest, ties to even, everywhere
  const Bits size = (Bits)x & 0x7fffffff;
  const Bits normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
  // below the normal range, the sum's last bit is worth as much as the result's
  const Bits small = (Bits)((V)size + 0.5f) - __builtin_bit_cast(uint32_t, 0.5f);
  Bits half = size < (113u << 23) ? small : normal;
  half = size >= (143u << 23) ? Bits{} + 0x7c00 : half;
  half = size > 0x7f800000 ? Bits{} + 0x7e00 : half;
  store(reinterpret_cast<uint16_t*>(to),
        __builtin_convertvector(half | ((Bits)x >> 16 & 0x8000), Vector<uint16_t, sizeof(V) / 2>));
}

// Rows in buffers are padded with zeros to this many elements, whatever T: whole vectors, no tails.
constexpr int64_t kRowQuantum = 16;
inline int64_t padded(int64_t columns) { return (columns + kRowQuantum - 1) / kRowQuantum * kRowQuantum; }

// rows of a strided tensor are fetched this many ahead
constexpr int64_t kRowsAhead = 16;

// what the rows of all threads may take before they overflow a third-level cache
constexpr int64_t kThirdLevelBytes = 24 << 20;

// The size of a second-level cache, 0 where it is not known.
inline int64_t second_level_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE));
  return bytes;
#else
  return 0;
#endif
}

constexpr size_t kHugePage = 1 << 21;

// Asks for huge pages where the memory holds whole ones.
inline void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  // advice only: where it is not taken, the memory is as good, but slower
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// The same for an operator's output: large ones are mapped afresh by every call, and small pages cost a fault each.
inline Tensor on_huge_pages(Tensor x) {
  advise_huge_pages(x.mutable_data_ptr(), x.numel() * x.element_size());
  return x;
}

// Uninitialised memory, aligned to cache lines; large ones on huge pages, since rows are read in random order.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : size_(size) {
    const size_t bytes = size * sizeof(T) + 64;
    const std::align_val_t alignment{bytes < kHugePage ? 64 : kHugePage};
    void* const data = ::operator new(bytes, alignment, std::nothrow);
    // torch's own words, see empty_tensor
    STD_TORCH_CHECK(data != nullptr, "DefaultCPUAllocator: can't allocate memory. Tried to allocate ", bytes,
                    " bytes.");
    data_ = std::unique_ptr<T, Free>(static_cast<T*>(data), Free{alignment});
    advise_huge_pages(data_.get(), bytes);
  }
  int64_t size() const { return size_; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) { return data_.get()[i]; }
  const T& operator[](int64_t i) const { return data_.get()[i]; }
  void zero() { std::memset(static_cast<void*>(data_.get()), 0, size_ * sizeof(T)); }

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(T* p) const { ::operator delete(p, alignment); }
  };
  std::unique_ptr<T, Free> data_{nullptr, Free{}};
  int64_t size_;
};

// torch's parallel_for, which would lose what an exception says.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error;
  torch::stable::parallel_for(begin, end, grain_size, [&](int64_t first, int64_t last) {
    try {
      f(first, last);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

template <class T, class Columns>
YOSO_INLINE void prefetch(const T* row, Columns columns) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t line = 0; line < columns * int64_t{sizeof(T)}; line += 64) __builtin_prefetch(bytes + line);
}

// Fetches a row that will be loaded soon, where each head's rows from `begin` to `end` are loaded one after the other:
// they lie far apart, and the processor does not see them coming. After the last head there is none; nothing is read.
// Where a head is loaded by tiles, the last rows of one fetch in vain; those of the next instead saved no time.
template <class In>
YOSO_INLINE void fetch_ahead(Rows<const In> rows, int64_t batch, int64_t head, int64_t row, int64_t begin, int64_t end,
                             int64_t columns) {
  const int64_t count = end - begin, ahead = row + std::min(kRowsAhead, count);
  prefetch(ahead < end ? rows.at(batch, head, ahead) : rows.at(batch, head + 1, ahead - count), columns);
}

// Calls f with a value of the type that sums of x's numbers have.
template <class F>
void dispatch_accumulator(const Tensor& x, const F& f) {
  dispatch_floating(x, [&](auto element) { f(Accumulator<decltype(element)>{}); });
}

// Calls f, a YOSO_INLINE_LAMBDA, with a value of this type, one of those whose sums have type T.
template <class T, class F>
YOSO_INLINE void with_element(ScalarType type, const F& f) {
  if constexpr (std::is_same_v<T, double>)
    f(double{});
  else if (type == ScalarType::BFloat16)
    f(BFloat16{});
  else if (type == ScalarType::Half)
    f(Half{});
  else
    f(float{});
}

// The rows of a [B, H, N, D] tensor of any type: Data is const void where they are read, void where they are written.
// What a Tensor is asked takes longer than it looks, and a head may have few rows: it is asked once.
template <class Data>
struct AnyRows {
  static constexpr bool kRead = std::is_const_v<Data>;
  const Tensor tensor;
  Data* const data;
  const ScalarType type;
  const int64_t batches, heads, count, columns, batch_stride, head_stride, row_stride;

  // where rows that are read are not dense, of a copy
  explicit AnyRows(const Tensor& x)
      : tensor(kRead ? dense_rows(x) : x),
        data(data_of(tensor)),
        type(tensor.scalar_type()),
        batches(tensor.size(0)),
        heads(tensor.size(1)),
        count(tensor.size(2)),
        columns(tensor.size(3)),
        batch_stride(tensor.stride(0)),
        head_stride(tensor.stride(1)),
        row_stride(tensor.stride(2)) {}

  template <class T>
  YOSO_INLINE Rows<std::conditional_t<kRead, const T, T>> as() const {
    return {static_cast<std::conditional_t<kRead, const T, T>*>(data), batch_stride, head_stride, row_stride};
  }

 private:
  static Data* data_of(const Tensor& x) {
    if constexpr (kRead)
      return x.const_data_ptr();
    else
      return x.mutable_data_ptr();
  }
};
using InputRows = AnyRows<const void>;
using OutputRows = AnyRows<void>;

// Copies some rows of [B, H, N, D] at one (batch, head) to padded rows in the accumulator's type.
template <class V, class In>
YOSO_INLINE void load_rows(Rows<const In> rows, int64_t batch, int64_t head, int64_t begin, int64_t end,
                           int64_t columns, Element<V>* to, int64_t to_stride) {
  const int64_t whole = columns / kLanes<V> * kLanes<V>, to_columns = padded(columns);
  for (int64_t row = begin; row < end; ++row, to += to_stride) {
    const In* from = rows.at(batch, head, row);
    fetch_ahead(rows, batch, head, row, begin, end, columns);
    for (int64_t c = 0; c < whole; c += kLanes<V>) store<V>(to + c, load_as<V>(from + c));
    for (int64_t c = whole; c < to_columns; ++c) to[c] = c < columns ? static_cast<Element<V>>(from[c]) : 0;
  }
}

template <class V, class Out>
YOSO_INLINE void store_rows(const Element<V>* from, int64_t from_stride, Element<V> scale, Rows<Out> rows,
                            int64_t batch, int64_t head, int64_t begin, int64_t end, int64_t columns) {
  const int64_t whole = columns / kLanes<V> * kLanes<V>;
  for (int64_t row = begin; row < end; ++row, from += from_stride) {
    Out* to = rows.at(batch, head, row);
    for (int64_t c = 0; c < whole; c += kLanes<V>) store_as<V>(to + c, load<V>(from + c) * scale);
    for (int64_t c = whole; c < columns; ++c) to[c] = static_cast<Out>(from[c] * scale);
  }
}

// The same for all columns of rows of any type: what calls these is compiled for the accumulator's alone.
template <class V>
void load_rows(const InputRows& rows, int64_t batch, int64_t head, int64_t begin, int64_t end, Element<V>* to,
               int64_t to_stride) {
  outlined<V>([=, &rows](auto) YOSO_INLINE_LAMBDA {
    with_element<Element<V>>(rows.type, [=, &rows](auto element) YOSO_INLINE_LAMBDA {
      load_rows<V>(rows.as<decltype(element)>(), batch, head, begin, end, rows.columns, to, to_stride);
    });
  });
}
template <class V>
void store_rows(const Element<V>* from, int64_t from_stride, Element<V> scale, const OutputRows& rows, int64_t batch,
                int64_t head, int64_t begin, int64_t end) {
  outlined<V>([=, &rows](auto) YOSO_INLINE_LAMBDA {
    with_element<Element<V>>(rows.type, [=, &rows](auto element) YOSO_INLINE_LAMBDA {
      store_rows<V>(from, from_stride, scale, rows.as<decltype(element)>(), batch, head, begin, end, rows.columns);
    });
  });
}

template <class V>
YOSO_INLINE Element<V> sum_of_lanes(V x) {
  Element<V> sum = 0;
  for (int64_t lane = 0; lane < kLanes<V>; ++lane) sum += x[lane];
  return sum;
}

// Scales rows to length one and keeps the inverse lengths; a zero row stays zero, with inverse length 0.
template <class V>
YOSO_INLINE void normalize_rows(Element<V>* rows, int64_t stride, int64_t count, int64_t columns,
                                Element<V>* inverse_length) {
  for (int64_t row = 0; row < count; ++row, rows += stride) {
    V squares = {};
    for (int64_t c = 0; c < columns; c += kLanes<V>) squares += load<V>(rows + c) * load<V>(rows + c);
    const Element<V> square = sum_of_lanes(squares);
    const Element<V> inverse = square > 0 ? 1 / std::sqrt(square) : 0;
    for (int64_t c = 0; c < columns; c += kLanes<V>) store<V>(rows + c, load<V>(rows + c) * inverse);
    inverse_length[row] = inverse;
  }
}

// Turns the gradient of unit rows into that of the rows they came from, scaled: (g - (g . u) u) * inverse_length.
template <class V>
YOSO_INLINE void through_normalize(Element<V>* grad, int64_t grad_stride, const Element<V>* unit, int64_t unit_stride,
                                   int64_t count, int64_t columns, const Element<V>* inverse_length,
                                   Element<V> scale) {
  for (int64_t row = 0; row < count; ++row, grad += grad_stride, unit += unit_stride) {
    V products = {};
    for (int64_t c = 0; c < columns; c += kLanes<V>) products += load<V>(grad + c) * load<V>(unit + c);
    const Element<V> along = sum_of_lanes(products), factor = inverse_length[row] * scale;
    for (int64_t c = 0; c < columns; c += kLanes<V>)
      store<V>(grad + c, (load<V>(grad + c) - along * load<V>(unit + c)) * factor);
  }
}

// Rows of a matrix by number: all of them, or those that a list picks.
template <class T>
struct AllRows {
  T* data;
  int64_t stride;
  YOSO_INLINE T* operator[](int64_t i) const { return data + i * stride; }
};
template <class T, class Stride = int64_t>
struct PickedRows {
  T* data;
  Stride stride;
  const int32_t* picked;
  YOSO_INLINE T* operator[](int64_t i) const { return data + picked[i] * stride; }
};

// products that are added up at once: of 256, in a row, errors were up to 2.4 times those of PyTorch
constexpr int64_t kLongestSum = 128;

template <class V, bool add, int R, int C, class A, class B, class To>
YOSO_INLINE void multiply_tile(int64_t K, A a, int64_t a_step, B b, To c, int64_t i, int64_t j) {
  const Element<V>* factors[R];
  for (int r = 0; r < R; ++r) factors[r] = a[i + r];
  int64_t k = 0;
  do {
    const bool onto = add || k > 0;
    // from zero: small sums, added up to c last, are rounded less than a long one
    V sum[R][C] = {};
    for (const int64_t end = std::min(K, k + kLongestSum); k < end; ++k) {
      V row[C];
      for (int v = 0; v < C; ++v) row[v] = load<V>(b[k] + j + v * kLanes<V>);
      for (int r = 0; r < R; ++r) {
        const Element<V> factor = factors[r][k * a_step];
        for (int v = 0; v < C; ++v) sum[r][v] += factor * row[v];
      }
    }
    // asked for: GCC unrolls these loops late otherwise, and keeps the sums in memory till then
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < C; ++v) {
        Element<V>* to = c[i + r] + j + v * kLanes<V>;
        store<V>(to, onto ? load<V>(to) + sum[r][v] : sum[r][v]);
      }
  } while (k < K);
}

// what most products do between their tiles
struct Nothing {
  YOSO_INLINE void operator()() const {}
};

// The rows from i to `end`, R at a time, of the columns from j to J, C vectors at a time, then fewer.
template <class V, bool add, int R, int C, class Columns, class A, class B, class To, class F>
YOSO_INLINE void multiply_block(int64_t i, int64_t end, int64_t j, Columns J, int64_t K, A a, int64_t a_step, B b,
                                To c, F& after_tile) {
  constexpr int64_t kColumns = C * kLanes<V>;
  for (; j + kColumns <= J; j += kColumns)
    for (int64_t row = i; row < end; row += R, after_tile())
      multiply_tile<V, add, R, C>(K, a, a_step, b, c, row, j);
  if constexpr (kColumns > kRowQuantum)
    multiply_block<V, add, R, C / 2>(i, end, j, J, K, a, a_step, b, c, after_tile);
}

// c[i][j] += sum over k of a[i][k * a_step] * b[k][j], for i < I, k < K, j < J; J a multiple of kRowQuantum. Without
// `add` it is = in place of +=. With a_step other than 1, a is the transpose of a matrix of that many columns. Calls
// after_tile() now and then, for a caller that has something to fetch meanwhile.
template <class V, bool add = true, class Columns, class A, class B, class To, class F = const Nothing>
YOSO_INLINE void multiply(int64_t I, Columns J, int64_t K, A a, int64_t a_step, B b, To c, F& after_tile = {}) {
  // sums that fit the registers, also of the last rows: enough that none waits for the one before
  constexpr int kSums = kRegisters<V> / 2;
  const int64_t fours = I / 4 * 4, twos = I / 2 * 2;
  multiply_block<V, add, 4, kSums / 4>(0, fours, 0, J, K, a, a_step, b, c, after_tile);
  if (fours < twos) multiply_block<V, add, 2, kSums / 2>(fours, twos, 0, J, K, a, a_step, b, c, after_tile);
  if (twos < I) multiply_block<V, add, 1, 8>(twos, I, 0, J, K, a, a_step, b, c, after_tile);
}

// Adds up blocks of 2 * Half lanes of two vectors by halves: the blocks of Half lanes of the result are those of a,
// then those of b.
template <int Half, class V, int... I>
YOSO_INLINE V fold_blocks(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int L = sizeof...(I);
  return __builtin_shufflevector(a, b, (I * 2 / L * L + (I % (L / 2)) / Half * 2 * Half + I % Half)...) +
         __builtin_shufflevector(a, b, (I * 2 / L * L + (I % (L / 2)) / Half * 2 * Half + I % Half + Half)...);
}

// Stores the sums of the lanes of each of N vectors, N a power of two; writes whole vectors.
template <class V, int N, int Half = kLanes<V> / 2>
YOSO_INLINE void store_sums(const V (&x)[N], Element<V>* sums) {
  if constexpr (Half == 0) {
    for (int i = 0; i < N; ++i) store<V>(sums + i * kLanes<V>, x[i]);
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<V>>{};
    constexpr int kPairs = N > 1 ? N / 2 : 1;
    V folded[kPairs];
    for (int i = 0; i < kPairs; ++i) folded[i] = fold_blocks<Half>(x[2 * i % N], x[(2 * i + 1) % N], lanes);
    store_sums<V, kPairs, Half / 2>(folded, sums);
  }
}

// c[i][j] = a[i] . b[j] for rows of padded length `columns`; after_tile() as above. Works by whole tiles: c has room
// for multiples of four rows and columns, and those past I and J repeat the last.
template <class V, class Columns, class A, class B, class F>
YOSO_INLINE void dot_products(int64_t I, int64_t J, Columns columns, A a, B b, Element<V>* c, int64_t c_stride,
                              F& after_tile) {
  using T = Element<V>;
  // sums that fit the registers
  constexpr int R = kRegisters<V> / 8, C = 4;
  for (int64_t i = 0; i < I; i += R) {
    const T* left[R];
    for (int r = 0; r < R; ++r) left[r] = a[std::min(i + r, I - 1)];
    for (int64_t j = 0; j < J; j += C, after_tile()) {
      const T* right[C];
      for (int v = 0; v < C; ++v) right[v] = b[std::min(j + v, J - 1)];
      V sum[R * C] = {};
      for (int64_t k = 0; k < columns; k += kLanes<V>) {
        V part[C];
        for (int v = 0; v < C; ++v) part[v] = load<V>(right[v] + k);
        for (int r = 0; r < R; ++r) {
          const V factor = load<V>(left[r] + k);
          for (int v = 0; v < C; ++v) sum[r * C + v] += factor * part[v];
        }
      }
      alignas(64) T sums[std::max<int64_t>(R * C, kLanes<V>)];
      store_sums(sum, sums);
      for (int r = 0; r < R; ++r) std::memcpy(c + (i + r) * c_stride + j, sums + r * C, C * sizeof(T));
    }
  }
}

// One stage of a transpose: swaps blocks of Half lanes between vectors that are Half apart.
template <int Half, class V, int... I>
YOSO_INLINE void swap_blocks(V& a, V& b, std::integer_sequence<int, I...>) {
  constexpr int L = sizeof...(I);
  const V first = __builtin_shufflevector(a, b, ((I & Half) == 0 ? I : L + I - Half)...);
  b = __builtin_shufflevector(a, b, ((I & Half) == 0 ? I + Half : L + I)...);
  a = first;
}

template <class V, int Half = kLanes<V> / 2>
YOSO_INLINE void transpose(V (&x)[kLanes<V>]) {
  if constexpr (Half > 0) {
    for (int i = 0; i < kLanes<V>; ++i)
      if ((i & Half) == 0) swap_blocks<Half>(x[i], x[i + Half], std::make_integer_sequence<int, kLanes<V>>{});
    transpose<V, Half / 2>(x);
  }
}

// Writes the transpose of `count` rows to columns of whole vectors: to[c * to_stride + row]; rows past the last are
// copies of it. Padded rows, `columns` of them.
template <class V, class From>
YOSO_INLINE void transpose_rows(From from, int64_t count, int64_t columns, Element<V>* to, int64_t to_stride) {
  constexpr int64_t L = kLanes<V>;
  for (int64_t first = 0; first < count; first += L)
    for (int64_t c = 0; c < columns; c += L) {
      V x[L];
      for (int64_t r = 0; r < L; ++r) x[r] = load<V>(from[std::min(first + r, count - 1)] + c);
      transpose(x);
      for (int64_t r = 0; r < L; ++r) store<V>(to + (c + r) * to_stride + first, x[r]);
    }
}

}  // namespace yoso
