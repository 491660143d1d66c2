// Hash codes of rows by the signs of random projections. A vector's lanes are different rows: no shuffles, no tails
// within a transform.
#include "simd.h"

namespace yoso {
namespace {

// rows of one task: enough to pay for its buffers, few enough to share among threads
constexpr int64_t kTaskRows = 256;

template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};
template <class T>
using Integer = typename IntegerOf<T>::type;

// In-place Walsh-Hadamard transform of `size` vectors, lane by lane; two stages a pass over memory.
template <class V>
YOSO_INLINE void hadamard(V* x, int64_t size) {
  int64_t h = 1;
  for (; h * 4 <= size; h *= 4)
    for (int64_t i = 0; i < size; i += 4 * h)
      for (int64_t j = i; j < i + h; ++j) {
        V a = x[j] + x[j + h], b = x[j] - x[j + h];
        V c = x[j + 2 * h] + x[j + 3 * h], d = x[j + 2 * h] - x[j + 3 * h];
        x[j] = a + c;
        x[j + h] = b + d;
        x[j + 2 * h] = a - c;
        x[j + 3 * h] = b - d;
      }
  if (h < size)
    for (int64_t j = 0; j < h; ++j) {
      V a = x[j], b = x[j + h];
      x[j] = a + b;
      x[j + h] = a - b;
    }
}

// Sets bit `bit` of codes[f] where projections[f] > 0.
template <class T>
YOSO_INLINE void set_bits(const Vector<T>* projections, int64_t count, int64_t bit, Vector<Integer<T>>* codes) {
  for (int64_t f = 0; f < count; ++f) codes[f] |= (projections[f] > 0) & (Integer<T>{1} << bit);
}

// Codes [num_hash] of one vector of rows by H G H D2 H D1; x and projections hold `size` vectors, x is overwritten.
template <class T>
YOSO_MULTIVERSION void hadamard_codes(Vector<T>* x, Vector<T>* projections, const T* parameters, int64_t size,
                                      int64_t num_hash, int64_t hash_code_len, Vector<Integer<T>>* codes) {
  for (int64_t round = 0; round < 2; ++round, parameters += size) {
    for (int64_t j = 0; j < size; ++j) x[j] *= parameters[j];
    hadamard(x, size);
  }
  // the first `needed` rows of a transform are a transform of that size, after the rest is folded onto it
  int64_t needed = 1;
  while (needed < num_hash && needed < size) needed *= 2;
  for (int64_t bit = 0; bit < hash_code_len; ++bit)
    for (int64_t first = 0; first < num_hash; first += size, parameters += size) {
      for (int64_t j = 0; j < needed; ++j) projections[j] = x[j] * parameters[j];
      for (int64_t fold = needed; fold < size; fold += needed)
        for (int64_t j = 0; j < needed; ++j) projections[j] += x[fold + j] * parameters[fold + j];
      hadamard(projections, needed);
      set_bits<T>(projections, std::min(size, num_hash - first), bit, codes + first);
    }
}

// Codes [num_hash] of one vector of rows by given directions [hash_code_len, num_hash, columns].
template <class T>
YOSO_MULTIVERSION void gaussian_codes(Vector<T>* x, Vector<T>* projections, const T* directions, int64_t columns,
                                      int64_t num_hash, int64_t hash_code_len, Vector<Integer<T>>* codes) {
  for (int64_t bit = 0; bit < hash_code_len; ++bit) {
    int64_t f = 0;
    for (; f + 4 <= num_hash; f += 4, directions += 4 * columns) {
      Vector<T> sum[4] = {};
      for (int64_t c = 0; c < columns; ++c)
        for (int r = 0; r < 4; ++r) sum[r] += x[c] * directions[r * columns + c];
      for (int r = 0; r < 4; ++r) projections[f + r] = sum[r];
    }
    for (; f < num_hash; ++f, directions += columns) {
      Vector<T> sum = {};
      for (int64_t c = 0; c < columns; ++c) sum += x[c] * directions[c];
      projections[f] = sum;
    }
    set_bits<T>(projections, num_hash, bit, codes);
  }
}

// Hashes x [B, H, N, D] with `transform`, one of the two above; `size` is the length of a transformed row.
template <class In, class Code, class Transform>
void hash_rows(const Tensor& x, const Tensor& parameters, const bool* mask, int64_t mask_stride, int64_t size,
               int64_t num_projections, int64_t num_hash, int64_t hash_code_len, const Tensor& out,
               const Transform& transform) {
  using T = Accumulator<In>;
  constexpr int64_t L = kLanes<T>;
  const int64_t B = x.size(0), H = x.size(1), N = x.size(2), D = x.size(3);
  const int64_t chunks = (N + kTaskRows - 1) / kTaskRows, per_head = parameters.size(1) * parameters.size(2);
  const Rows<const In> rows = rows_of<In>(x);
  const float* all_parameters = parameters.const_data_ptr<float>();
  Code* all_codes = static_cast<Code*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, B * H * chunks, 1, [&](int64_t task_begin, int64_t task_end) {
    Buffer<Vector<T>> block(size), projections(num_projections);
    Buffer<Vector<Integer<T>>> codes(num_hash);
    Buffer<T> head_parameters(per_head);
    for (int64_t task = task_begin; task < task_end; ++task) {
      const int64_t batch = task / (H * chunks), head = task / chunks % H, first = task % chunks * kTaskRows;
      if (task == task_begin || task % chunks == 0)
        for (int64_t i = 0; i < per_head; ++i) head_parameters[i] = all_parameters[head * per_head + i];
      for (int64_t row = first; row < std::min(N, first + kTaskRows); row += L) {
        const int64_t count = std::min(L, N - row);
        block.zero();
        T* lanes = reinterpret_cast<T*>(block.data());
        for (int64_t r = 0; r < count; ++r) {
          const In* from = rows.at(batch, head, row + r);
          for (int64_t c = 0; c < D; ++c) lanes[c * L + r] = static_cast<T>(from[c]);
        }
        codes.zero();
        transform(block.data(), projections.data(), head_parameters.data(), size, num_hash, hash_code_len,
                  codes.data());
        Code* to = all_codes + (batch * H + head) * num_hash * N + row;
        for (int64_t f = 0; f < num_hash; ++f, to += N)
          for (int64_t r = 0; r < count; ++r)
            to[r] = mask == nullptr || mask[batch * mask_stride + row + r] ? static_cast<Code>(codes[f][r]) : -1;
      }
    }
  });
}

Tensor hash_cpu(const Tensor& input, const Tensor& parameters, const std::optional<Tensor>& input_mask,
                int64_t num_hash, int64_t hash_code_len, bool use_hadamard) {
  check_hash_sizes(num_hash, hash_code_len);
  STD_TORCH_CHECK(input.dim() == 4, "x must have shape [B, H, N, D]");
  const int64_t B = input.size(0), H = input.size(1), N = input.size(2), D = input.size(3);
  STD_TORCH_CHECK(parameters.dim() == 3 && parameters.size(0) == H && parameters.is_contiguous() &&
                      parameters.scalar_type() == ScalarType::Float,
                  "parameters must be contiguous float32 with one entry a head");
  const int64_t size = parameters.size(2);
  if (use_hadamard) {
    STD_TORCH_CHECK(size >= D && (size & (size - 1)) == 0 && size > 0 &&
                        parameters.size(1) == 2 + hash_code_len * ((num_hash + size - 1) / size),
                    "parameters must have shape [H, 2 + hash_code_len * ceil(num_hash / P), P], P a power of two >= D");
  } else {
    STD_TORCH_CHECK(size == D && parameters.size(1) == hash_code_len * num_hash,
                    "parameters must have shape [H, hash_code_len * num_hash, D]");
  }
  std::optional<Tensor> mask;
  if (input_mask.has_value()) {
    STD_TORCH_CHECK(input_mask->dim() == 2 && input_mask->size(0) == B && input_mask->size(1) == N &&
                        input_mask->scalar_type() == ScalarType::Bool,
                    "mask must be bool with shape [B, N]");
    mask = torch::stable::contiguous(*input_mask);
  }
  const bool* mask_data = mask.has_value() ? static_cast<const bool*>(mask->const_data_ptr()) : nullptr;
  const Tensor x = dense_rows(input);
  Tensor out = torch::stable::new_empty(x, {B, H, num_hash, N}, code_dtype(hash_code_len));
  dispatch_floating(x, [&](auto element) {
    using In = decltype(element);
    using T = Accumulator<In>;
    dispatch_codes(out, [&](auto code) {
      hash_rows<In, decltype(code)>(x, parameters, mask_data, N, size, use_hadamard ? size : num_hash, num_hash,
                                    hash_code_len, out, use_hadamard ? hadamard_codes<T> : gaussian_codes<T>);
    });
  });
  return out;
}

Tensor hash_hadamard_cpu(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& mask,
                         int64_t num_hash, int64_t hash_code_len) {
  return hash_cpu(x, parameters, mask, num_hash, hash_code_len, true);
}

Tensor hash_gaussian_cpu(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& mask,
                         int64_t num_hash, int64_t hash_code_len) {
  return hash_cpu(x, parameters, mask, num_hash, hash_code_len, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("hash_hadamard", TORCH_BOX(&hash_hadamard_cpu));
  m.impl("hash_gaussian", TORCH_BOX(&hash_gaussian_cpu));
}

}  // namespace yoso
