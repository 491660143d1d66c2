// What the kernels of every backend share: views of rows, new outputs, dispatch on dtypes.
// Shapes: B batch, H heads, N queries, M keys, D head_dim, Dv value columns, m hash functions.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>

#ifdef __CUDACC__
#define YOSO_HOST_DEVICE __host__ __device__
#else
#define YOSO_HOST_DEVICE
#endif

namespace yoso {

// Of samples of softmax: the keys of a bucket that a query meets at most, and the queries that meet the same ones
constexpr int kBucketRows = 64;
// The largest logarithm of a weight that is not divided by a power of two; by 2^shift, it is as much as that more.
constexpr int kMaxLogarithm = 60;
constexpr double kLog2 = 0.693147180559945309;

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// float64 computes in float64, everything else in float32
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

// The rows of a [B, H, N, D] tensor; strides in elements, the last one 1.
template <class T>
struct Rows {
  T* data;
  int64_t batch_stride, head_stride, row_stride;

  YOSO_HOST_DEVICE T* at(int64_t batch, int64_t head, int64_t row) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// What `make` gives, a tensor of so many elements. Why torch gives none, the stable ABI does not tell; there is nothing
// but memory that it could lack. Programs that go on with a smaller batch know torch's own messages.
template <class Make>
Tensor allocated(bool is_cuda, int64_t elements, Make make) {
  try {
    return make();
  } catch (const std::exception&) {
    STD_TORCH_CHECK(false, is_cuda ? "CUDA out of memory." : "DefaultCPUAllocator: can't allocate memory.",
                    " Tried to allocate a tensor of ", elements, " elements.");
  }
}

inline Tensor empty_tensor(const Tensor& like, std::initializer_list<int64_t> sizes,
                           std::optional<ScalarType> dtype = std::nullopt) {
  int64_t elements = 1;
  for (const int64_t size : sizes) elements *= size;
  return allocated(like.is_cuda(), elements, [&] { return torch::stable::new_empty(like, sizes, dtype); });
}

inline Tensor dense(const Tensor& x) {
  return allocated(x.is_cuda(), x.numel(), [&] { return torch::stable::contiguous(x); });
}

// x itself where its last dimension is dense, else a copy.
inline Tensor dense_rows(const Tensor& x) { return x.size(3) <= 1 || x.stride(3) == 1 ? x : dense(x); }

inline std::optional<Tensor> dense_mask(const std::optional<Tensor>& mask) {
  if (!mask.has_value()) return {};
  return dense(*mask);
}

// Of a boolean tensor, whose true elements are any bytes but zero, as of a view of others.
inline const uint8_t* mask_bytes(const Tensor& mask) { return static_cast<const uint8_t*>(mask.const_data_ptr()); }

template <class T>
Rows<const T> rows_of(const Tensor& x) {
  return {static_cast<const T*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

template <class T>
Rows<T> mutable_rows_of(const Tensor& x) {
  return {static_cast<T*>(x.mutable_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

// An uninitialised [B, H, rows, columns], of like's batch and heads, with the memory order [B, rows, H, columns], so
// that merging the heads is a view.
inline Tensor empty_heads_last(const Tensor& like, int64_t rows, int64_t columns) {
  Tensor memory = empty_tensor(like, {like.size(0), rows, like.size(1), columns});
  return torch::stable::transpose(memory, 1, 2);
}

// The same, of like's size.
inline Tensor empty_heads_last(const Tensor& like) { return empty_heads_last(like, like.size(2), like.size(3)); }

// Sums of weights up to this count as none, as in reference.py: their inverse, times a gradient, leaves float32's range.
constexpr double kSmallestTotal = 1e-36;

// float64 for float64 rows, else float32
inline ScalarType length_dtype(const Tensor& rows) {
  return rows.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Uninitialised [B, H, N] for rows [B, H, N, D].
inline Tensor empty_row_numbers(const Tensor& rows) {
  return empty_tensor(rows, {rows.size(0), rows.size(1), rows.size(2)}, length_dtype(rows));
}

// The same for the lengths of out's rows, of shape [0] unless these are scaled to length one.
inline Tensor empty_inverse_length(const Tensor& out, bool unit) {
  return unit ? empty_row_numbers(out) : empty_tensor(out, {0}, length_dtype(out));
}

// codes of tau = 16 bits do not fit int16 beside the -1 of masked rows
inline ScalarType code_dtype(int64_t hash_code_len) {
  return hash_code_len <= 15 ? ScalarType::Short : ScalarType::Int;
}

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    default:
      return "no floating point number of 16 to 64 bits";
  }
}

// Calls f with a value of x's element type.
template <class F>
void dispatch_floating(const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::BFloat16:
      return f(BFloat16{});
    case ScalarType::Half:
      return f(Half{});
    default:
      STD_TORCH_CHECK(false, "rows must be float16, bfloat16, float32 or float64, got ", name_of(x.scalar_type()));
  }
}

// Calls f with a value of the codes' element type.
template <class F>
void dispatch_codes(const Tensor& codes, const F& f) {
  return codes.scalar_type() == ScalarType::Short ? f(int16_t{}) : f(int32_t{});
}

}  // namespace yoso
