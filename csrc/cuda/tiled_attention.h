// Attention whose weights are computed in tiles, never as an N x M matrix, and its backward: a block has a tile of rows
// and loops over tiles of the others.
//
// Sums over keys for a tile of queries and over queries for a tile of keys are the same kernels: "mine" are the rows of
// the block's side, "others" those of the other one. What the weights are, and which pairs have any, is for a class of
// pairs to say:
//     swapped()                       the pairs with the sides swapped
//     kSumOthers                      others in a tile of up to 64 columns, by the registers that weigh takes
//     kMasksRows                      whether rows may have no weight, whatever stands in them
//     kPositive                       whether no weight is negative
//     is_real(batch_head, row)        whether a row of mine has any weight
//     near(first, last, count)        the run of others, of `count`, that my rows first..last need
//     weigh(place, signed_as, x)      turns the versines x, 1 less the size of a cosine, into weights; the cosines have
//                                     the signs of signed_as
//     slopes(place, signed_as, x, products)
//                                     the like, and multiplies products by the slopes of the weights
//     slope_scale()                   what the slopes are to be multiplied by besides
// The threads of a warp call weigh and slopes together, each with n x 4 pairs of a tile, which place says; rows without
// a weight, and places past the last row, may get any.
#pragma once

#include "rows.h"
#include "tiles_any.h"
#include "tiles_mma.h"

namespace yoso {
namespace {

// 1 over each row's length: 0 for a row of zeros, kMasked for one without a weight.
template <class In, bool aligned, class Pairs>
__global__ void __launch_bounds__(kRowThreads)
    inverse_length_kernel(Rows<const In> rows, int32_t heads, int32_t count, int32_t columns, int lane_bits,
                          Pairs pairs, Accumulator<In>* inverse_length) {
  using T = Accumulator<In>;
  const RowPlace place(count, lane_bits, 1);
  // lanes past the last row stay: the sums are the warp's
  const bool exists = place.row < count;
  const In* x = rows.at(place.head / heads, place.head % heads, exists ? place.row : 0);
  T square = 0, infinite = 0;
  for (int32_t first = place.column; first < columns; first += kLaneColumns << lane_bits) {
    In part[kLaneColumns];
    load_columns<aligned>(x + first, columns_of_lane(columns, first), part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const T element = static_cast<T>(part[c]);
      square += element * element;
      // not a number for what is infinite, where the square is so for what is large
      infinite += element * 0;
    }
  }
  square = sum_of_lanes(square, lane_bits);
  infinite = sum_of_lanes(infinite, lane_bits);
  if (!exists || place.lane != 0) return;
  T inverse = square == 0 ? 0 : 1 / sqrt(square) + infinite;
  if (!pairs.is_real(place.head, place.row)) inverse = kMasked;
  inverse_length[int64_t{place.head} * count + place.row] = inverse;
}

template <class In, class Pairs>
Tensor inverse_lengths(const Device& device, const Tensor& rows, const Pairs& pairs) {
  const int64_t B = rows.size(0), H = rows.size(1), N = rows.size(2), D = rows.size(3);
  Tensor inverse_length = empty_tensor(rows, {B, H, N}, length_dtype(rows));
  const Rows<const In> from = rows_of<In>(rows);
  const int lane_bits = lane_bits_for(D);
  launch(device, aligned(from, D) ? inverse_length_kernel<In, true, Pairs> : inverse_length_kernel<In, false, Pairs>,
         B * H * blocks_of_head(count_of(N, "rows"), lane_bits), kRowThreads, 0, from, static_cast<int32_t>(H),
         static_cast<int32_t>(N), count_of(D, "columns"), lane_bits, pairs,
         static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr()));
  return inverse_length;
}

template <class In>
Side<In> side_of(const Tensor& rows, const Tensor& values, const Tensor& factors) {
  const Rows<const In> from = rows_of<In>(rows), other = rows_of<In>(values);
  return {from, other, static_cast<const Accumulator<In>*>(factors.const_data_ptr()), rows.size(2),
          aligned(from, rows.size(3)) && aligned(other, values.size(3))};
}

// The kernels that suit the sizes and the memory, and their launches.
template <class In, class Pairs>
class Launcher {
 public:
  Launcher(const Device& device, const Tensor& query, const Tensor& value)
      : device_(device), batches_(query.size(0)), sizes_{query.size(1), query.size(3), value.size(3)} {
    columns_ = sizes_.columns > sizes_.value_columns ? sizes_.columns : sizes_.value_columns;
    STD_TORCH_CHECK(columns_ <= kMaxColumns, "the CUDA kernels take query, key and value of at most ", kMaxColumns,
                    " columns, got ", columns_);
  }

  void weighted_sum(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                    Accumulator<In>* inverse_length) const {
    if (suits_mma(mine) && suits_mma(others))
      with_mma_columns([&](auto columns) {
        using Place = SumPlace<In, columns(), Pairs>;
        launch_tiles<Place, MmaShared<Place, false>>(weighted_sum_mma_kernel<In, columns(), Pairs>, mine, others, pairs,
                                                     mutable_rows_of<In>(out), inverse_length);
      });
    else
      weighted_sum_any(mine, others, pairs, out, inverse_length);
  }

  void gradient(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out) const {
    if (suits_mma(mine) && suits_mma(others))
      with_mma_columns([&](auto columns) {
        using Place = GradientPlace<In, columns()>;
        launch_tiles<Place, MmaShared<Place, true>>(gradient_mma_kernel<In, columns(), false, Pairs>, mine, others,
                                                    pairs, mutable_rows_of<In>(out), Rows<In>{});
      });
    else
      gradient_any(mine, others, pairs, out);
  }

  // of my rows and values
  void gradients(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                 const Tensor& out_values) const {
    if (suits_mma(mine) && suits_mma(others)) {
      // computes the weights once for both
      with_mma_columns([&](auto columns) {
        using Place = GradientPlace<In, columns()>;
        launch_tiles<Place, MmaShared<Place, true>>(gradient_mma_kernel<In, columns(), true, Pairs>, mine, others,
                                                    pairs, mutable_rows_of<In>(out), mutable_rows_of<In>(out_values));
      });
    } else {
      gradient_any(mine, others, pairs, out);
      weighted_sum_any(mine, others, pairs, out_values, nullptr);
    }
  }

 private:
  void weighted_sum_any(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                        Accumulator<In>* inverse_length) const {
    if (columns_ <= kTile)
      launch_tiles<Place<8>, Shared<Accumulator<In>>>(weighted_sum_kernel<In, 8, 1, Pairs>, mine, others, pairs,
                                                      mutable_rows_of<In>(out), inverse_length);
    else
      launch_tiles<Place<4>, Shared<Accumulator<In>>>(weighted_sum_kernel<In, 4, kMaxColumns / kTile, Pairs>, mine,
                                                      others, pairs, mutable_rows_of<In>(out), inverse_length);
  }

  void gradient_any(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out) const {
    if (columns_ <= kTile)
      launch_tiles<Place<8>, Shared<Accumulator<In>>>(gradient_kernel<In, 8, 1, Pairs>, mine, others, pairs,
                                                      mutable_rows_of<In>(out));
    else
      launch_tiles<Place<4>, Shared<Accumulator<In>>>(gradient_kernel<In, 4, kMaxColumns / kTile, Pairs>, mine, others,
                                                      pairs, mutable_rows_of<In>(out));
  }

  // Whether tensor cores take the sizes, and every piece of 16 bytes is aligned.
  bool suits_mma(const Side<In>& side) const { return sizeof(In) == 2 && columns_ <= kMaxMmaColumns && side.aligned; }

  // Calls f with the columns that the kernels on tensor cores are compiled for.
  template <class F>
  void with_mma_columns(const F& f) const {
    if constexpr (sizeof(In) == 2) {
      if (columns_ <= kTile)
        f(std::integral_constant<int, kTile>{});
      else
        f(std::integral_constant<int, kMaxMmaColumns>{});
    }
  }

  template <class Place, class Shared, class Kernel, class... Outputs>
  void launch_tiles(Kernel* kernel, const Side<In>& mine, const Side<In>& others, const Pairs& pairs,
                    const Outputs&... outputs) const {
    launch(device_, kernel, batches_ * sizes_.heads * divide_up(mine.count, Place::kRows), Place::kBlockThreads,
           sizeof(Shared), mine, others, sizes_, pairs, outputs...);
  }

  const Device& device_;
  int64_t batches_, columns_;
  Sizes sizes_;
};

// inverse_length is used only where out's rows are scaled to length one.
template <class In, class Pairs>
void attention_forward(const Device& device, const Pairs& pairs, const Tensor& query, const Tensor& key,
                       const Tensor& value, bool unit, const Tensor& out, const Tensor& inverse_length) {
  const Launcher<In, Pairs> launcher(device, query, value);
  const Tensor query_inverse = inverse_lengths<In>(device, query, pairs);
  const Tensor key_inverse = inverse_lengths<In>(device, key, pairs.swapped());
  // no values of the queries are read
  launcher.weighted_sum(side_of<In>(query, query, query_inverse), side_of<In>(key, value, key_inverse), pairs, out,
                        unit ? static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr()) : nullptr);
}

template <class In, class Pairs>
void attention_backward(const Device& device, const Pairs& pairs, const Tensor& grad, const Tensor& query,
                        const Tensor& key, const Tensor& value, const Tensor& grad_query, const Tensor& grad_key,
                        const Tensor& grad_value) {
  const Launcher<In, Pairs> launcher(device, query, value);
  const Tensor query_inverse = inverse_lengths<In>(device, query, pairs);
  const Tensor key_inverse = inverse_lengths<In>(device, key, pairs.swapped());
  const Side<In> queries = side_of<In>(query, grad, query_inverse), keys = side_of<In>(key, value, key_inverse);
  launcher.gradients(keys, queries, pairs.swapped(), grad_key, grad_value);
  launcher.gradient(queries, keys, pairs, grad_query);
}

}  // namespace
}  // namespace yoso
