// The gradient of scaling rows to length one. A warp has a row.
#include "device.h"

namespace yoso {
namespace {

constexpr int kThreads = 256;

// Rows [B, N, H] come in the order of memory.
template <class In>
__global__ void unit_rows_backward_kernel(Rows<const In> grads, Rows<const In> units,
                                          const Accumulator<In>* inverse_length, int64_t count, int64_t H, int64_t N,
                                          int64_t D, Rows<In> out) {
  using T = Accumulator<In>;
  const int64_t warp = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (warp >= count) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t head = warp % H, row = warp / H % N, batch = warp / (H * N);
  const In *g = grads.at(batch, head, row), *u = units.at(batch, head, row);
  T product = 0;
  for (int64_t c = lane; c < D; c += kWarp) product += static_cast<T>(g[c]) * static_cast<T>(u[c]);
  product = warp_sum(product);
  const T inverse = inverse_length[(batch * H + head) * N + row];
  In* to = out.at(batch, head, row);
  for (int64_t c = lane; c < D; c += kWarp)
    to[c] = static_cast<In>((static_cast<T>(g[c]) - product * static_cast<T>(u[c])) * inverse);
}

Tensor unit_rows_backward_cuda(const Tensor& input_grad, const Tensor& input_unit, const Tensor& inverse_length) {
  check_unit_rows(input_grad, input_unit, inverse_length);
  const Device device(input_unit);
  const Tensor grad = dense_rows(input_grad), unit = dense_rows(input_unit);
  const int64_t B = unit.size(0), H = unit.size(1), N = unit.size(2), D = unit.size(3);
  Tensor out = empty_heads_last(unit, B, H, N, D);
  dispatch_floating(unit, [&](auto element) {
    using In = decltype(element);
    launch(device, unit_rows_backward_kernel<In>, divide_up(B * H * N, kThreads / kWarp), kThreads, 0,
           rows_of<In>(grad), rows_of<In>(unit),
           static_cast<const Accumulator<In>*>(inverse_length.const_data_ptr()), B * H * N, H, N, D,
           mutable_rows_of<In>(out));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("unit_rows_backward", TORCH_BOX(&unit_rows_backward_cuda));
}

}  // namespace yoso
