// What the kernels of every backend share: checks, views of rows, dispatch on dtypes.
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

namespace yoso {

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

  T* at(int64_t batch, int64_t head, int64_t row) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// x itself where its last dimension is dense, else a copy.
inline Tensor dense_rows(const Tensor& x) {
  return x.size(3) <= 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

template <class T>
Rows<const T> rows_of(const Tensor& x) {
  return {static_cast<const T*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

template <class T>
Rows<T> mutable_rows_of(const Tensor& x) {
  return {static_cast<T*>(x.mutable_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

// An uninitialised [B, H, N, D] with the memory order [B, N, H, D], so that merging the heads is a view.
inline Tensor empty_heads_last(const Tensor& like, int64_t B, int64_t H, int64_t N, int64_t D) {
  Tensor memory = torch::stable::new_empty(like, {B, N, H, D});
  return torch::stable::transpose(memory, 1, 2);
}

// codes of tau = 16 bits do not fit int16 beside the -1 of masked rows
inline ScalarType code_dtype(int64_t hash_code_len) {
  return hash_code_len <= 15 ? ScalarType::Short : ScalarType::Int;
}

inline void check_hash_sizes(int64_t num_hash, int64_t hash_code_len) {
  STD_TORCH_CHECK(num_hash >= 1, "num_hash must be at least 1, got ", num_hash);
  STD_TORCH_CHECK(hash_code_len >= 1 && hash_code_len <= 16, "hash_code_len must be in 1..16, got ", hash_code_len);
}

// x must be [like's B, like's H, rows, *]
inline void check_rows(const Tensor& x, const char* name, const Tensor& like, int64_t rows, ScalarType dtype) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(0) == like.size(0) && x.size(1) == like.size(1) && x.size(2) == rows, name,
                  " must have shape [", like.size(0), ", ", like.size(1), ", ", rows, ", *]");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " must have the dtype of the other inputs");
}

// codes must be contiguous [B, H, m, rows] of the dtype that hash_code_len asks for
inline void check_codes(const Tensor& codes, const char* name, int64_t hash_code_len) {
  STD_TORCH_CHECK(codes.dim() == 4 && codes.is_contiguous() && codes.size(2) >= 1, name,
                  " must be contiguous with shape [B, H, num_hash, rows]");
  STD_TORCH_CHECK(codes.scalar_type() == code_dtype(hash_code_len), name, " must be ",
                  hash_code_len <= 15 ? "int16" : "int32", " for hash_code_len ", hash_code_len);
}

// the codes of sampled attention's queries and keys, against each other and value
inline void check_all_codes(const Tensor& query_codes, const Tensor& key_codes, const Tensor& value,
                            int64_t hash_code_len) {
  check_hash_sizes(query_codes.size(2), hash_code_len);
  check_codes(query_codes, "query_codes", hash_code_len);
  check_codes(key_codes, "key_codes", hash_code_len);
  STD_TORCH_CHECK(value.dim() == 4 && key_codes.size(3) == value.size(2), "key_codes must have a code for every value");
  for (int64_t dim = 0; dim < 2; ++dim)
    STD_TORCH_CHECK(query_codes.size(dim) == value.size(dim) && key_codes.size(dim) == value.size(dim),
                    "codes and value must agree in batch and heads");
  STD_TORCH_CHECK(query_codes.size(2) == key_codes.size(2), "query_codes and key_codes must agree in num_hash");
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
      STD_TORCH_CHECK(false, "expected float16, bfloat16, float32 or float64");
  }
}

// Calls f with a value of the codes' element type.
template <class F>
void dispatch_codes(const Tensor& codes, const F& f) {
  return codes.scalar_type() == ScalarType::Short ? f(int16_t{}) : f(int32_t{});
}

}  // namespace yoso
