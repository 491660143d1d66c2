// Scaling rows to length one, and its gradient. A warp has a row.
#include "unit_rows.h"

namespace yoso {
namespace {

constexpr int kThreads = 256;

// Where the block's warp stands among the rows [B, N, H] in the order of memory; false past the last one.
struct Place {
  int64_t batch, head, row;
  int lane;

  __device__ bool find(int64_t rows, int64_t H, int64_t N) {
    const int64_t warp = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
    lane = threadIdx.x % kWarp;
    head = warp % H;
    row = warp / H % N;
    batch = warp / (H * N);
    return warp < rows;
  }
};

template <class In>
__global__ void unit_rows_kernel(Rows<In> rows, int64_t count, int64_t H, int64_t N, int64_t D,
                                 Accumulator<In>* inverse_length) {
  using T = Accumulator<In>;
  Place place;
  if (!place.find(count, H, N)) return;
  In* x = rows.at(place.batch, place.head, place.row);
  T square = 0;
  for (int64_t c = place.lane; c < D; c += kWarp) square += static_cast<T>(x[c]) * static_cast<T>(x[c]);
  square = warp_sum(square);
  const T inverse = square > 0 ? 1 / sqrt(square) : 0;
  for (int64_t c = place.lane; c < D; c += kWarp) x[c] = static_cast<In>(static_cast<T>(x[c]) * inverse);
  if (place.lane == 0) inverse_length[(place.batch * H + place.head) * N + place.row] = inverse;
}

template <class In>
__global__ void unit_rows_backward_kernel(Rows<const In> grads, Rows<const In> units,
                                          const Accumulator<In>* inverse_length, int64_t count, int64_t H, int64_t N,
                                          int64_t D, Rows<In> out) {
  using T = Accumulator<In>;
  Place place;
  if (!place.find(count, H, N)) return;
  const In *g = grads.at(place.batch, place.head, place.row), *u = units.at(place.batch, place.head, place.row);
  T product = 0;
  for (int64_t c = place.lane; c < D; c += kWarp) product += static_cast<T>(g[c]) * static_cast<T>(u[c]);
  product = warp_sum(product);
  const T inverse = inverse_length[(place.batch * H + place.head) * N + place.row];
  In* to = out.at(place.batch, place.head, place.row);
  for (int64_t c = place.lane; c < D; c += kWarp)
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

void scale_to_unit_rows(const Device& device, const Tensor& out, const Tensor& inverse_length) {
  const int64_t B = out.size(0), H = out.size(1), N = out.size(2), D = out.size(3);
  dispatch_floating(out, [&](auto element) {
    using In = decltype(element);
    launch(device, unit_rows_kernel<In>, divide_up(B * H * N, kThreads / kWarp), kThreads, 0,
           mutable_rows_of<In>(out), B * H * N, H, N, D,
           static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr()));
  });
}

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("unit_rows_backward", TORCH_BOX(&unit_rows_backward_cuda));
}

}  // namespace yoso
