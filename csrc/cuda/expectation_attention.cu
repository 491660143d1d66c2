// The exact kernel p(x) = (1 - acos(x) / pi)^tau of all pairs.
#include "tiled_attention.h"

namespace yoso {
namespace {

struct AllPairs {
  static constexpr bool kMasksRows = false, kPositive = true;
  static constexpr int kSumOthers = 64;
  static constexpr int kBlocks = 0;
  static constexpr bool kByWarpgroups = true;
  int tau;
  bool exact;

  AllPairs swapped() const { return *this; }
  template <class T>
  __device__ bool is_real(int64_t, int64_t, T) const {
    return true;
  }
  __device__ Range near(int64_t, int64_t, int64_t count) const { return {0, count}; }

  template <class Place, class T, int n>
  __device__ __forceinline__ void weigh(const Place&, const T (&signed_as)[n][4], T (&x)[n][4]) const {
    kernel_weights<typename Place::Weight>(signed_as, x, tau);
  }

  // dp/dx, 0 where it diverges, or its lower bound (tau / 2) p; both less a constant factor
  template <class Place, class T, int n>
  __device__ __forceinline__ void slopes(const Place& place, const T (&signed_as)[n][4], T (&x)[n][4],
                                         T (&products)[n][4]) const {
    if (!exact) {
      weigh(place, signed_as, x);
#pragma unroll
      for (int i = 0; i < n * 4; ++i) products[i / 4][i % 4] *= x[i / 4][i % 4];
      return;
    }
    T base[n][4];
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      base[i / 4][i % 4] = angle_complement<typename Place::Weight>(signed_as[i / 4][i % 4], x[i / 4][i % 4]);
      products[i / 4][i % 4] *= inverse_sine(x[i / 4][i % 4]);
      x[i / 4][i % 4] = base[i / 4][i % 4];
    }
    if (tau > 1) power(x, tau - 1);
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      if (tau == 1) x[i / 4][i % 4] = 1;
      products[i / 4][i % 4] *= x[i / 4][i % 4];
      x[i / 4][i % 4] *= base[i / 4][i % 4];
    }
  }
  template <class T>
  __device__ T slope_scale() const {
    return tau / (exact ? static_cast<T>(3.14159265358979323846) : T{2});
  }
};

// the choice of backward matters to autograd only
std::tuple<Tensor, Tensor> expectation_attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                                      int64_t hash_code_len, bool, bool unit) {
  check_exact(query, key, value, hash_code_len);
  const Device device(value);
  Tensor out = empty_heads_last(value, query.size(2), value.size(3));
  Tensor inverse_length = empty_inverse_length(out, unit);
  attention_forward(device, AllPairs{static_cast<int>(hash_code_len), false}, query, key, value, unit, out,
                    inverse_length);
  return {out, inverse_length};
}

std::tuple<Tensor, Tensor, Tensor> expectation_attention_backward_cuda(const Tensor& grad, const Tensor& query,
                                                                       const Tensor& key, const Tensor& value,
                                                                       int64_t hash_code_len, bool exact) {
  check_exact(query, key, value, hash_code_len);
  check_output(grad, "grad", query, value, query.scalar_type());
  const Device device(value);
  Tensor grad_query = empty_heads_last(query);
  Tensor grad_key = empty_heads_last(key);
  Tensor grad_value = empty_heads_last(value);
  attention_backward(device, AllPairs{static_cast<int>(hash_code_len), exact}, grad, query, key, value, grad_query,
                     grad_key, grad_value);
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("expectation_attention", TORCH_BOX(&expectation_attention_cuda));
  m.impl("expectation_attention_backward", TORCH_BOX(&expectation_attention_backward_cuda));
}

}  // namespace yoso
