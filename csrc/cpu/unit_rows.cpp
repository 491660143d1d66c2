// Scaling rows to length one, and its gradient.
#include "unit_rows.h"

namespace yoso {
namespace {

// positions of one task: a position's rows of all heads are neighbours in memory
constexpr int64_t kTaskPositions = 64;

// Calls f(Width, memory, batch, head, row) in parallel for the rows of x [B, H, N, D], in the order of memory; memory
// holds `buffers` padded rows.
template <class T, class F>
void for_rows(const Tensor& x, int64_t buffers, const F& f) {
  const int64_t B = x.size(0), H = x.size(1), N = x.size(2), columns = padded(x.size(3));
  parallel_for(0, B * N, kTaskPositions, [&](int64_t begin, int64_t end) {
    Buffer<T> memory(buffers * columns);
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      for (int64_t position = begin; position < end; ++position)
        for (int64_t head = 0; head < H; ++head) f(bytes, memory.data(), position / N, head, position % N);
    });
  });
}

Tensor unit_rows_backward_cpu(const Tensor& input_grad, const Tensor& input_unit, const Tensor& inverse_length) {
  check_unit_rows(input_grad, input_unit, inverse_length);
  const Tensor grad = dense_rows(input_grad), unit = dense_rows(input_unit);
  const int64_t H = unit.size(1), N = unit.size(2), D = unit.size(3), columns = padded(D);
  Tensor out = on_huge_pages(empty_heads_last(unit));
  dispatch_floating(unit, [&](auto element) {
    using In = decltype(element);
    using T = Accumulator<In>;
    const Rows<const In> grads = rows_of<In>(grad), units = rows_of<In>(unit);
    const Rows<In> to = mutable_rows_of<In>(out);
    const T* inverse = static_cast<const T*>(inverse_length.const_data_ptr());
    for_rows<T>(unit, 2, [&](auto bytes, T* g, int64_t batch, int64_t head, int64_t row) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      T* u = g + columns;
      load_rows<V>(grads, batch, head, row, row + 1, D, g, columns);
      load_rows<V>(units, batch, head, row, row + 1, D, u, columns);
      through_normalize<V>(g, columns, u, columns, 1, columns, inverse + (batch * H + head) * N + row, T{1});
      store_rows<V>(g, columns, T{1}, to, batch, head, row, row + 1, D);
    });
  });
  return out;
}

}  // namespace

void scale_to_unit_rows(const Tensor& out, const Tensor& inverse_length) {
  const int64_t H = out.size(1), N = out.size(2), D = out.size(3), columns = padded(D);
  dispatch_floating(out, [&](auto element) {
    using In = decltype(element);
    using T = Accumulator<In>;
    const Rows<const In> from = rows_of<In>(out);
    const Rows<In> to = mutable_rows_of<In>(out);
    T* inverse = static_cast<T*>(inverse_length.mutable_data_ptr());
    for_rows<T>(out, 1, [&](auto bytes, T* x, int64_t batch, int64_t head, int64_t row) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      load_rows<V>(from, batch, head, row, row + 1, D, x, columns);
      normalize_rows<V>(x, columns, 1, columns, inverse + (batch * H + head) * N + row);
      store_rows<V>(x, columns, T{1}, to, batch, head, row, row + 1, D);
    });
  });
}

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) { m.impl("unit_rows_backward", TORCH_BOX(&unit_rows_backward_cpu)); }

}  // namespace yoso
