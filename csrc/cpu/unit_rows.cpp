// Scaling rows to length one, and its gradient.
#include "simd.h"

namespace yoso {
namespace {

// rows of one task, held in a first-level cache
constexpr int64_t kTaskRows = 64;

// Calls f(Width, batch, head, begin, end) in parallel for runs of rows of x [B, H, N, *].
template <class F>
void for_rows(const Tensor& x, const F& f) {
  const int64_t H = x.size(1), N = x.size(2), chunks = (N + kTaskRows - 1) / kTaskRows;
  torch::stable::parallel_for(0, x.size(0) * H * chunks, 16, [&](int64_t task_begin, int64_t task_end) {
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      for (int64_t task = task_begin; task < task_end; ++task) {
        const int64_t begin = task % chunks * kTaskRows;
        f(bytes, task / chunks / H, task / chunks % H, begin, std::min(N, begin + kTaskRows));
      }
    });
  });
}

std::tuple<Tensor, Tensor> unit_rows_cpu(const Tensor& input) {
  STD_TORCH_CHECK(input.dim() == 4, "x must have shape [B, H, N, D]");
  const Tensor x = dense_rows(input);
  const int64_t B = x.size(0), H = x.size(1), N = x.size(2), D = x.size(3), columns = padded(D);
  Tensor unit = empty_heads_last(x, B, H, N, D);
  const bool wide = x.scalar_type() == ScalarType::Double;
  Tensor inverse_length = torch::stable::new_empty(x, {B, H, N}, wide ? ScalarType::Double : ScalarType::Float);
  dispatch_floating(x, [&](auto element) {
    using In = decltype(element);
    using T = Accumulator<In>;
    T* inverse = static_cast<T*>(inverse_length.mutable_data_ptr());
    for_rows(x, [&](auto bytes, int64_t batch, int64_t head, int64_t begin, int64_t end) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      Buffer<T> rows(kTaskRows * columns);
      load_rows<V>(rows_of<In>(x), batch, head, begin, end, D, rows.data(), columns);
      normalize_rows<V>(rows.data(), columns, end - begin, columns, inverse + (batch * H + head) * N + begin);
      store_rows<V>(rows.data(), columns, T{1}, mutable_rows_of<In>(unit), batch, head, begin, end, D);
    });
  });
  return {unit, inverse_length};
}

Tensor unit_rows_backward_cpu(const Tensor& input_grad, const Tensor& input_unit, const Tensor& inverse_length) {
  STD_TORCH_CHECK(input_unit.dim() == 4, "unit must have shape [B, H, N, D]");
  const Tensor grad = dense_rows(input_grad), unit = dense_rows(input_unit);
  const int64_t B = unit.size(0), H = unit.size(1), N = unit.size(2), D = unit.size(3), columns = padded(D);
  check_rows(grad, "grad", unit, N, unit.scalar_type());
  STD_TORCH_CHECK(grad.size(3) == D, "grad and unit must agree in columns");
  const ScalarType wide = unit.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(inverse_length.is_contiguous() && inverse_length.numel() == B * H * N &&
                      inverse_length.scalar_type() == wide,
                  "inverse_length must be contiguous with shape [B, H, N], float64 for float64 rows, else float32");
  Tensor out = empty_heads_last(unit, B, H, N, D);
  dispatch_floating(unit, [&](auto element) {
    using In = decltype(element);
    using T = Accumulator<In>;
    const T* inverse = static_cast<const T*>(inverse_length.const_data_ptr());
    for_rows(unit, [&](auto bytes, int64_t batch, int64_t head, int64_t begin, int64_t end) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      Buffer<T> grads(kTaskRows * columns), units(kTaskRows * columns);
      load_rows<V>(rows_of<In>(grad), batch, head, begin, end, D, grads.data(), columns);
      load_rows<V>(rows_of<In>(unit), batch, head, begin, end, D, units.data(), columns);
      through_normalize<V>(grads.data(), columns, units.data(), columns, end - begin, columns,
                           inverse + (batch * H + head) * N + begin, T{1});
      store_rows<V>(grads.data(), columns, T{1}, mutable_rows_of<In>(out), batch, head, begin, end, D);
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("unit_rows", TORCH_BOX(&unit_rows_cpu));
  m.impl("unit_rows_backward", TORCH_BOX(&unit_rows_backward_cpu));
}

}  // namespace yoso
