// What every backend asks of an operator's inputs, before it computes anything.
#pragma once

#include <optional>
#include <string>

#include "common.h"

namespace yoso {

inline void check_hash_sizes(int64_t num_hash, int64_t hash_code_len) {
  STD_TORCH_CHECK(num_hash >= 1, "num_hash must be at least 1, got ", num_hash);
  STD_TORCH_CHECK(hash_code_len >= 1 && hash_code_len <= 16, "hash_code_len must be in 1..16, got ", hash_code_len);
}

inline std::string shape_of(const Tensor& x) {
  std::string shape = "[";
  for (int64_t dim = 0; dim < x.dim(); ++dim) shape += (dim > 0 ? ", " : "") + std::to_string(x.size(dim));
  return shape + "]";
}

// Kernels run on one device, and a pointer does not say where it points to.
inline void check_device(const Tensor& x, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(x.is_cuda() == like.is_cuda() && (!x.is_cuda() || x.get_device_index() == like.get_device_index()),
                  name, " must be on the device of the other inputs");
}

// x must be [like's B, like's H, rows, *]
inline void check_rows(const Tensor& x, const char* name, const Tensor& like, int64_t rows, ScalarType dtype) {
  check_device(x, name, like);
  STD_TORCH_CHECK(x.dim() == 4 && x.size(0) == like.size(0) && x.size(1) == like.size(1) && x.size(2) == rows, name,
                  " must have shape [", like.size(0), ", ", like.size(1), ", ", rows, ", *], got ", shape_of(x));
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " must be ", name_of(dtype), " here, got ",
                  name_of(x.scalar_type()));
}

// codes must be contiguous [B, H, m, rows] of the dtype that hash_code_len asks for
inline void check_codes(const Tensor& codes, const char* name, int64_t hash_code_len) {
  STD_TORCH_CHECK(codes.dim() == 4 && codes.is_contiguous(), name,
                  " must be contiguous with shape [B, H, num_hash, rows], got ", shape_of(codes));
  STD_TORCH_CHECK(codes.scalar_type() == code_dtype(hash_code_len), name, " must be ",
                  hash_code_len <= 15 ? "int16" : "int32", " for hash_code_len ", hash_code_len);
}

// the codes of sampled attention's queries and keys, against each other and value
inline void check_all_codes(const Tensor& query_codes, const Tensor& key_codes, const Tensor& value,
                            int64_t hash_code_len) {
  check_device(query_codes, "query_codes", value);
  check_device(key_codes, "key_codes", value);
  check_codes(query_codes, "query_codes", hash_code_len);
  check_codes(key_codes, "key_codes", hash_code_len);
  check_hash_sizes(query_codes.size(2), hash_code_len);
  STD_TORCH_CHECK(value.dim() == 4 && key_codes.size(3) == value.size(2), "key_codes must have a code for every value");
  for (int64_t dim = 0; dim < 2; ++dim)
    STD_TORCH_CHECK(query_codes.size(dim) == value.size(dim) && key_codes.size(dim) == value.size(dim),
                    "codes and value must agree in batch and heads, got ", shape_of(query_codes), ", ",
                    shape_of(key_codes), " and ", shape_of(value));
  STD_TORCH_CHECK(query_codes.size(2) == key_codes.size(2), "query_codes and key_codes must agree in num_hash, got ",
                  query_codes.size(2), " and ", key_codes.size(2));
}

// mask must be bool [batch, rows]
inline void check_mask(const std::optional<Tensor>& mask, const char* name, const Tensor& like, int64_t batch,
                       int64_t rows) {
  if (!mask.has_value()) return;
  check_device(*mask, name, like);
  STD_TORCH_CHECK(mask->dim() == 2 && mask->size(0) == batch && mask->size(1) == rows &&
                      mask->scalar_type() == ScalarType::Bool,
                  name, " must be bool with shape [", batch, ", ", rows, "], got ", shape_of(*mask));
}

// x [B, H, N, D] to hash, with HashFunctions' parameters and a mask [B, N]
inline void check_hash(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& mask, int64_t num_hash,
                       int64_t hash_code_len, bool use_hadamard) {
  check_hash_sizes(num_hash, hash_code_len);
  STD_TORCH_CHECK(x.dim() == 4, "x must have shape [B, H, N, D], got ", shape_of(x));
  check_device(parameters, "parameters", x);
  STD_TORCH_CHECK(parameters.dim() == 3 && parameters.size(0) == x.size(1) && parameters.is_contiguous() &&
                      parameters.scalar_type() == ScalarType::Float,
                  "parameters must be contiguous float32 with one entry a head");
  const int64_t D = x.size(3), size = parameters.size(2);
  if (use_hadamard) {
    STD_TORCH_CHECK(size >= D && (size & (size - 1)) == 0 && size >= 32 &&
                        parameters.size(1) == 2 + hash_code_len * ((num_hash + size - 1) / size),
                    "parameters must have shape [H, 2 + hash_code_len * ceil(num_hash / P), P], P a power of two, at "
                    "least D and 32");
  } else {
    STD_TORCH_CHECK(size == D && parameters.size(1) == hash_code_len * num_hash,
                    "parameters must have shape [H, hash_code_len * num_hash, D]");
  }
  check_mask(mask, "mask", x, x.size(0), x.size(2));
}

inline void check_attention(const Tensor& query, const Tensor& key, const Tensor& value) {
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4, "query and key must have shape [B, H, rows, D], got ",
                  shape_of(query), " and ", shape_of(key));
  check_rows(key, "key", query, key.size(2), query.scalar_type());
  check_rows(value, "value", query, key.size(2), query.scalar_type());
  STD_TORCH_CHECK(query.size(3) == key.size(3), "query and key must agree in head_dim, got ", query.size(3), " and ",
                  key.size(3));
}

// Of YOSO's expectation.
inline void check_exact(const Tensor& query, const Tensor& key, const Tensor& value, int64_t hash_code_len) {
  // nothing is hashed: no code has to hold this many bits
  STD_TORCH_CHECK(hash_code_len >= 1 && hash_code_len <= 32, "hash_code_len must be in 1..32, got ", hash_code_len);
  check_attention(query, key, value);
}

// Where rows are hashed; query_codes has a code for every query.
inline void check_hashed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_codes,
                         const Tensor& key_codes, int64_t hash_code_len) {
  check_attention(query, key, value);
  check_all_codes(query_codes, key_codes, value, hash_code_len);
  STD_TORCH_CHECK(query_codes.size(3) == query.size(2), "query_codes must have a code for every query, got ",
                  query_codes.size(3), " for ", query.size(2));
}

// x must be contiguous [B, H, N] for rows [B, H, N, *]
inline void check_row_numbers(const Tensor& x, const char* name, const Tensor& rows) {
  check_device(x, name, rows);
  STD_TORCH_CHECK(x.dim() == 3 && x.is_contiguous() && x.size(0) == rows.size(0) && x.size(1) == rows.size(1) &&
                      x.size(2) == rows.size(2) && x.scalar_type() == length_dtype(rows),
                  name, " must be contiguous with shape [", rows.size(0), ", ", rows.size(1), ", ", rows.size(2),
                  "], float64 for float64 rows, else float32, got ", name_of(x.scalar_type()), " ", shape_of(x));
}

// x must have the shape of the output: that itself, its gradient or a part of it
inline void check_output(const Tensor& x, const char* name, const Tensor& query, const Tensor& value,
                         ScalarType dtype) {
  check_rows(x, name, query, query.size(2), dtype);
  STD_TORCH_CHECK(x.size(3) == value.size(3), name, " and value must agree in columns, got ", x.size(3), " and ",
                  value.size(3));
}

inline void check_softmax(const Tensor& query, const Tensor& key, const Tensor& value,
                          const std::optional<Tensor>& key_mask, double scale) {
  check_attention(query, key, value);
  STD_TORCH_CHECK(scale > 0, "scale must be above 0, got ", scale);
  check_mask(key_mask, "key_mask", query, key.size(0), key.size(2));
}

inline void check_softmax_backward(const Tensor& grad, const Tensor& out, const Tensor& logarithm, const Tensor& query,
                                   const Tensor& key, const Tensor& value, const std::optional<Tensor>& key_mask,
                                   double scale) {
  check_softmax(query, key, value, key_mask, scale);
  check_output(grad, "grad", query, value, query.scalar_type());
  check_output(out, "out", query, value, query.scalar_type());
  check_row_numbers(logarithm, "logarithm", query);
}

// The power of two that a head's weights are divided by.
inline void check_shift(const Tensor& shift, const Tensor& key) {
  check_device(shift, "shift", key);
  STD_TORCH_CHECK(shift.dim() == 2 && shift.is_contiguous() && shift.size(0) == key.size(0) &&
                      shift.size(1) == key.size(1) && shift.scalar_type() == ScalarType::Int,
                  "shift must be contiguous int32 with shape [B, H], got ", shape_of(shift));
}

inline void check_sampled_remainder(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Tensor& key_weight, const Tensor& shift, const Tensor& query_codes,
                                    const Tensor& key_codes, int64_t hash_code_len, double scale) {
  check_hashed(query, key, value, query_codes, key_codes, hash_code_len);
  check_row_numbers(key_weight, "key_weight", key);
  check_shift(shift, key);
  STD_TORCH_CHECK(scale > 0, "scale must be above 0, got ", scale);
}

inline void check_sampled_remainder_backward(const Tensor& grad, const Tensor& grad_total, const Tensor& query,
                                             const Tensor& key, const Tensor& value, const Tensor& key_weight,
                                             const Tensor& shift, const Tensor& query_codes, const Tensor& key_codes,
                                             int64_t hash_code_len, double scale) {
  check_sampled_remainder(query, key, value, key_weight, shift, query_codes, key_codes, hash_code_len, scale);
  // of an output that is wider than 16 bits
  check_output(grad, "grad", query, value, length_dtype(query));
  check_row_numbers(grad_total, "grad_total", query);
}

inline void check_first_order(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_weight,
                              const Tensor& shift, const Tensor& heavy, double scale) {
  check_attention(query, key, value);
  check_row_numbers(key_weight, "key_weight", key);
  check_shift(shift, key);
  check_device(heavy, "heavy", key);
  STD_TORCH_CHECK(heavy.dim() == 3 && heavy.is_contiguous() && heavy.size(0) == key.size(0) &&
                      heavy.size(1) == key.size(1) && heavy.size(2) <= 64 && heavy.scalar_type() == ScalarType::Long,
                  "heavy must be contiguous int64 with shape [B, H, K], K at most 64, got ", shape_of(heavy));
  STD_TORCH_CHECK(scale > 0, "scale must be above 0, got ", scale);
}

inline void check_near(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_codes,
                       const Tensor& key_codes, int64_t hash_code_len, int64_t window) {
  check_hashed(query, key, value, query_codes, key_codes, hash_code_len);
  STD_TORCH_CHECK(key.size(2) == query.size(2), "query, key and value must agree in length, got ", query.size(2),
                  " and ", key.size(2));
  STD_TORCH_CHECK(window >= 0, "window must be at least 0, got ", window);
}

inline void check_unit_rows(const Tensor& grad, const Tensor& unit, const Tensor& inverse_length) {
  STD_TORCH_CHECK(unit.dim() == 4, "unit must have shape [B, H, N, D], got ", shape_of(unit));
  check_output(grad, "grad", unit, unit, unit.scalar_type());
  check_row_numbers(inverse_length, "inverse_length", unit);
}

}  // namespace yoso
