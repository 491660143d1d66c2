// Attention whose weights are computed in tiles, never as an N x M matrix, and its backward: a block has a tile of rows
// and loops over tiles of the others.
//
// Sums over keys for a tile of queries and over queries for a tile of keys are the same kernels: "mine" are the rows of
// the block's side, "others" those of the other one. What the weights are, and which pairs have any, is for a class of
// pairs to say:
//     swapped()                       the pairs with the sides swapped
//     kSumOthers                      others in a tile of up to 64 columns, by the registers that weigh takes
//     kBlocks                         blocks that are to run at a time for slopes alone, of up to 64 columns, or 0 for
//                                     as many as the compiler comes to
//     kByWarpgroups                   whether there are so many pairs that warpgroups are to multiply, where they can
//     kMasksRows                      whether rows may have no weight, whatever stands in them
//     kPositive                       whether no weight is negative
//     is_real(batch_head, row, inverse_length)
//                                     whether a row of mine has any weight
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
#include "tiles_wgmma.h"

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
  if (!pairs.is_real(place.head, place.row, inverse)) inverse = kMasked;
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

// The kernels that suit the dtype and the sizes, and their launches.
template <class In, class Pairs>
class Launcher {
 public:
  Launcher(const Device& device, const Tensor& query, const Tensor& value)
      : device_(device), batches_(query.size(0)), sizes_{query.size(1), query.size(3), value.size(3)} {}

  void weighted_sum(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                    Accumulator<In>* inverse_length) const {
    const Rows<In> to = mutable_rows_of<In>(out);
    with_columns([&](auto columns) {
      if constexpr (kIsForTensorCores<In>) {
        with_place<SumPlace<In, columns(), Pairs>, WarpgroupSumPlace>(others, [&](auto of) {
          using Place = decltype(of);
          launch_tiles<Place, MmaShared<Place, false>>(weighted_sum_mma_kernel<Place, Pairs, In>, mine, others, pairs,
                                                       to, inverse_length);
        });
      } else {
        constexpr int n = kPairRows<columns()>;
        launch_tiles<Place<n>, Shared<In>>(weighted_sum_kernel<In, n, columns() / kTile, Pairs>, mine, others, pairs,
                                           to, inverse_length);
      }
    });
  }

  void gradient(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out) const {
    const Rows<In> to = mutable_rows_of<In>(out);
    with_columns([&](auto columns) {
      if constexpr (kIsForTensorCores<In>) {
        gradient_mma<columns(), false>(mine, others, pairs, to, Rows<In>{});
      } else {
        constexpr int n = kPairRows<columns()>;
        launch_tiles<Place<n>, Shared<In>>(gradient_kernel<In, n, columns() / kTile, Pairs>, mine, others, pairs, to);
      }
    });
  }

  // of my rows and values
  void gradients(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Tensor& out,
                 const Tensor& out_values) const {
    if constexpr (kIsForTensorCores<In>) {
      // computes the weights once for both
      with_columns([&](auto columns) {
        gradient_mma<columns(), true>(mine, others, pairs, mutable_rows_of<In>(out), mutable_rows_of<In>(out_values));
      });
    } else {
      gradient(mine, others, pairs, out);
      weighted_sum(mine, others, pairs, out_values, nullptr);
    }
  }

 private:
  // Calls f with the columns that the kernels are compiled for.
  template <class F>
  void with_columns(const F& f) const {
    constexpr int most = kIsForTensorCores<In> ? kMaxMmaColumns : kMaxColumns;
    // the pairs that go with few columns would take more registers than there are for float64
    if constexpr (!std::is_same_v<In, double>) {
      if (std::max(sizes_.columns, sizes_.value_columns) <= kTile) return f(std::integral_constant<int, kTile>{});
    }
    f(std::integral_constant<int, most>{});
  }

  // Calls f with the place of the kernels on tensor cores: Warpgroup where warpgroups multiply, if there is any other.
  template <class Mma, class Warpgroup, class F>
  void with_place(const Side<In>& others, const F& f) const {
    if constexpr (Pairs::kByWarpgroups && std::is_same_v<In, BFloat16> && Mma::kColumns == kWgmmaColumns)
      if (others.count > 0 && device_.has_wgmma()) return f(Warpgroup{});
    f(Mma{});
  }

  template <int columns, bool with_values>
  void gradient_mma(const Side<In>& mine, const Side<In>& others, const Pairs& pairs, const Rows<In>& out,
                    const Rows<In>& out_values) const {
    with_place<GradientPlace<In, columns>, WarpgroupGradientPlace<with_values>>(others, [&](auto of) {
      using Place = decltype(of);
      launch_tiles<Place, MmaShared<Place, true>>(gradient_mma_kernel<Place, with_values, Pairs, In>, mine, others,
                                                  pairs, out, out_values);
    });
  }

  template <class Place, class Shared, class Kernel, class... Outputs>
  void launch_tiles(Kernel* kernel, const Side<In>& mine, const Side<In>& others, const Pairs& pairs,
                    const Outputs&... outputs) const {
    launch(device_, kernel, blocks<Place>(mine), Place::kBlockThreads, sizeof(Shared), mine, others, sizes_, pairs,
           outputs...);
  }
  template <class Place>
  int64_t blocks(const Side<In>& mine) const {
    return batches_ * sizes_.heads * divide_up(mine.count, Place::kRows);
  }

  const Device& device_;
  int64_t batches_;
  Sizes sizes_;
};

inline int64_t widest_of(const Tensor& query, const Tensor& value) {
  const int64_t widest = std::max(query.size(3), value.size(3));
  STD_TORCH_CHECK(widest <= kMaxColumns, "the CUDA kernels take query, key and value of at most ", kMaxColumns,
                  " columns, got ", widest);
  return widest;
}

// inverse_length is used only where out's rows are scaled to length one.
template <class Pairs>
void attention_forward(const Device& device, const Pairs& pairs, const Tensor& query, const Tensor& key,
                       const Tensor& value, bool unit, const Tensor& out, const Tensor& inverse_length) {
  const int64_t widest = widest_of(query, value);
  const Tensor queries = tile_rows(query, widest), keys = tile_rows(key, widest), values = tile_rows(value, widest);
  TileOutput output(out, values);
  dispatch_floating(queries, [&](auto element) {
    using In = decltype(element);
    const Launcher<In, Pairs> launcher(device, queries, values);
    const Tensor query_inverse = inverse_lengths<In>(device, queries, pairs);
    const Tensor key_inverse = inverse_lengths<In>(device, keys, pairs.swapped());
    // no values of the queries are read
    launcher.weighted_sum(side_of<In>(queries, queries, query_inverse), side_of<In>(keys, values, key_inverse), pairs,
                          output.tiles(),
                          unit ? static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr()) : nullptr);
  });
  output.copy();
}

template <class Pairs>
void attention_backward(const Device& device, const Pairs& pairs, const Tensor& grad, const Tensor& query,
                        const Tensor& key, const Tensor& value, const Tensor& grad_query, const Tensor& grad_key,
                        const Tensor& grad_value) {
  const int64_t widest = widest_of(query, value);
  const Tensor grads = tile_rows(grad, widest), queries = tile_rows(query, widest);
  const Tensor keys = tile_rows(key, widest), values = tile_rows(value, widest);
  TileOutput query_output(grad_query, queries), key_output(grad_key, keys), value_output(grad_value, values);
  dispatch_floating(queries, [&](auto element) {
    using In = decltype(element);
    const Launcher<In, Pairs> launcher(device, queries, values);
    const Tensor query_inverse = inverse_lengths<In>(device, queries, pairs);
    const Tensor key_inverse = inverse_lengths<In>(device, keys, pairs.swapped());
    const Side<In> query_side = side_of<In>(queries, grads, query_inverse);
    const Side<In> key_side = side_of<In>(keys, values, key_inverse);
    launcher.gradients(key_side, query_side, pairs.swapped(), key_output.tiles(), value_output.tiles());
    launcher.gradient(query_side, key_side, pairs, query_output.tiles());
  });
  query_output.copy();
  key_output.copy();
  value_output.copy();
}

}  // namespace
}  // namespace yoso
