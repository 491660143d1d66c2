// The gradient of scaling rows to length one.
#include "rows.h"

namespace yoso {
namespace {

template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads)
    unit_rows_backward_kernel(Rows<const In> grads, Rows<const In> units, const Accumulator<In>* inverse_length,
                              int32_t H, int32_t N, int32_t D, int lane_bits, Rows<In> out) {
  using T = Accumulator<In>;
  const RowPlace place(N, lane_bits, 1);
  // lanes past the last row stay: the product is the warp's
  const bool exists = place.row < N;
  const int32_t row = exists ? place.row : 0, batch = place.head / H, head = place.head % H;
  const In *g = grads.at(batch, head, row), *u = units.at(batch, head, row);
  In grad[kLaneColumns], unit[kLaneColumns];
  T product = 0;
  for (int32_t first = place.column; first < D; first += kLaneColumns << lane_bits) {
    load_columns<aligned>(g + first, columns_of_lane(D, first), grad);
    load_columns<aligned>(u + first, columns_of_lane(D, first), unit);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) product += static_cast<T>(grad[c]) * static_cast<T>(unit[c]);
  }
  product = sum_of_lanes(product, lane_bits);
  if (!exists) return;
  const T inverse = inverse_length[int64_t{place.head} * N + row];
  In* to = out.at(batch, head, row);
  for (int32_t first = place.column; first < D; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(D, first);
    load_columns<aligned>(g + first, columns, grad);
    load_columns<aligned>(u + first, columns, unit);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c)
      grad[c] = static_cast<In>((static_cast<T>(grad[c]) - product * static_cast<T>(unit[c])) * inverse);
    store_columns<aligned>(grad, columns, to + first);
  }
}

Tensor unit_rows_backward_cuda(const Tensor& input_grad, const Tensor& input_unit, const Tensor& inverse_length) {
  check_unit_rows(input_grad, input_unit, inverse_length);
  const Device device(input_unit);
  const Tensor grad = dense_rows(input_grad), unit = dense_rows(input_unit);
  const int64_t B = unit.size(0), H = unit.size(1), N = unit.size(2), D = unit.size(3);
  Tensor out = empty_heads_last(unit);
  dispatch_floating(unit, [&](auto element) {
    using In = decltype(element);
    const Rows<const In> grads = rows_of<In>(grad), units = rows_of<In>(unit);
    const Rows<In> to = mutable_rows_of<In>(out);
    const bool whole = aligned(grads, D) && aligned(units, D) && aligned(to, D);
    const int lane_bits = lane_bits_for(D);
    launch(device, whole ? unit_rows_backward_kernel<In, true> : unit_rows_backward_kernel<In, false>,
           B * H * blocks_of_head(count_of(N, "rows"), lane_bits), kRowThreads, 0, grads, units,
           static_cast<const Accumulator<In>*>(inverse_length.const_data_ptr()), static_cast<int32_t>(H),
           static_cast<int32_t>(N), count_of(D, "columns"), lane_bits, to);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("unit_rows_backward", TORCH_BOX(&unit_rows_backward_cuda));
}

}  // namespace yoso
