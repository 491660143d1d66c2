// Attention whose weights stand in for those of softmax: of rows less their means, with a weight for each key.
#include "heads.h"
#include "tiled_attention.h"

namespace yoso {
namespace {

// Of the kernel, which follows exp the further the higher it is: seven squarings.
constexpr int kPower = 128, kSquarings = 7;
// squared, the scale of weights, with which neither they nor their sums leave float32's range
constexpr float kHalfScale = 0x1p49f;
// by which a cosine stays below 1, where the kernel's slope diverges
constexpr double kMargin = 1.01;
constexpr double kPi = 3.14159265358979323846;
// places that a line of numbers has past the last row: no tile ends later
constexpr int kPadding = kTile;

struct WeightedRows {
  static constexpr bool kMasksRows = true, kPositive = true, kUnitRows = false;
  static constexpr int kSumOthers = 64;
};

// the power multiplies the error of the angle
template <class W>
using PreciseWeight = std::conditional_t<std::is_same_v<W, BFloat16>, Half, W>;

// x = x^kPower, scaled
template <class T, int n>
__device__ __forceinline__ void take_power(T (&x)[n][4]) {
#pragma unroll
  for (int squaring = 1; squaring <= kSquarings; ++squaring)
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      if (squaring == kSquarings) x[i / 4][i % 4] *= kHalfScale;
      x[i / 4][i % 4] *= x[i / 4][i % 4];
    }
}

// All pairs. The factors of keys are their weights, those of queries 1 over the sum of a query's weights, where it is
// known; with of_keys, mine are keys.
template <class T, bool of_keys>
struct SoftmaxLikePairs : WeightedRows {
  static constexpr bool kSumsRows = of_keys;
  const T* cosine_scale;
  // what products of a query's gradient are less, [B * H, queries + kPadding]
  const T* along;
  int64_t queries;
  // the gradients of the logarithms of the keys' weights
  T* row_sums;

  __device__ Range near(int64_t, int64_t, int64_t count) const { return {0, count}; }

  template <class Place, int n>
  __device__ __forceinline__ void weigh(const Place&, const T (&signed_as)[n][4], T (&x)[n][4]) const {
#pragma unroll
    for (int i = 0; i < n * 4; ++i)
      x[i / 4][i % 4] =
          angle_complement<PreciseWeight<typename Place::Weight>>(signed_as[i / 4][i % 4], x[i / 4][i % 4]);
    take_power(x);
  }

  // the slopes less a constant factor
  template <class Place, int n>
  __device__ __forceinline__ void slopes(const Place& place, const T (&signed_as)[n][4], const T* other_factors,
                                         T (&x)[n][4], T (&products)[n][4], T (&sums)[Place::kMyRows]) const {
    const T* from = along + place.batch_head * (queries + kPadding) + (of_keys ? place.first_other : place.first_row);
    // of the logarithm of a weight
    T slope[n][4];
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      const int row = Place::row(i / 4, i % 4), other = Place::other(i / 4, i % 4);
      const T versine = x[i / 4][i % 4];
      const T base = angle_complement<PreciseWeight<typename Place::Weight>>(signed_as[i / 4][i % 4], versine);
      slope[i / 4][i % 4] = rsqrt(versine * (2 - versine) * base * base);
      products[i / 4][i % 4] = (products[i / 4][i % 4] - from[of_keys ? other : row]) * other_factors[other];
      x[i / 4][i % 4] = base;
    }
    take_power(x);
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      products[i / 4][i % 4] *= x[i / 4][i % 4];
      if (of_keys) sums[Place::my_row(i / 4, i % 4)] += products[i / 4][i % 4];
      products[i / 4][i % 4] *= slope[i / 4][i % 4];
      x[i / 4][i % 4] *= other_factors[Place::other(i / 4, i % 4)];
    }
  }
  template <class>
  __device__ T slope_scale() const {
    return static_cast<T>(kPower / kPi);
  }
};

// What all kernels of rows take.
struct Heads {
  int32_t heads, queries, keys, columns;
  int lane_bits;
  // [B, M], true for a real key; or null
  const bool* key_mask;
  double scale;

  __device__ const bool* real_keys(int32_t batch) const {
    return key_mask == nullptr ? nullptr : key_mask + int64_t{batch} * keys;
  }
  // as many queries as keys are of the same tokens
  __device__ const bool* real_queries(int32_t batch) const {
    return queries == keys ? real_keys(batch) : nullptr;
  }
};

// What becomes of queries and keys.
template <class In>
struct Centred {
  // rows less their mean
  Rows<In> query, key;
  // [B * H, D], [B * H, N], [B * H, M] and [B * H]
  Accumulator<In>*query_mean, *query_factor, *key_weight, *cosine_scale;
};

template <class T>
__device__ __forceinline__ T longest_of(T square) {
  return square > 0 ? sqrt(square) : 1;
}

// x = part - mean, or 0
template <class In, class T>
__device__ __forceinline__ void take_mean(const In (&part)[kLaneColumns], const T (&mean)[kLaneColumns], bool is_real,
                                          T (&x)[kLaneColumns]) {
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) x[c] = is_real ? static_cast<T>(part[c]) - mean[c] : 0;
}

template <class In, bool aligned>
__global__ void __launch_bounds__(kHeadThreads)
    centre_kernel(Heads heads, Rows<const In> query, Rows<const In> key, Centred<In> out) {
  using T = Accumulator<In>;
  T* const shared = shared_memory<T>();
  const HeadPlace place(heads.heads, heads.columns, heads.lane_bits);
  const bool* key_mask = heads.real_keys(place.batch);
  const bool* query_mask = heads.real_queries(place.batch);
  const int64_t first_query = int64_t{place.batch_head} * heads.queries;
  const int64_t first_key = int64_t{place.batch_head} * heads.keys;
  const T scale = static_cast<T>(heads.scale);
  T query_mean[kLaneColumns], key_mean[kLaneColumns], longest_query = 0, longest_key = 0, largest = -INFINITY;
  const T real_queries = count_real<T>(query_mask, heads.queries, shared);
  const T real_keys = count_real<T>(key_mask, heads.keys, shared);
  mean_of_rows<aligned>(place, query, query_mask, heads.queries, real_queries, query_mean, shared);
  mean_of_rows<aligned>(place, key, key_mask, heads.keys, real_keys, key_mean, shared);
  for_rows<aligned>(place, query, query_mask, heads.queries,
                    [&](int32_t row, bool exists, bool is_real, const In(&part)[kLaneColumns]) {
                      T x[kLaneColumns];
                      take_mean(part, query_mean, is_real, x);
                      longest_query = max(longest_query, product_of_lanes(place, x, x));
                      if (!exists) return;
                      store_part<aligned>(place, x, out.query.at(place.batch, place.head, row));
                      if (place.lane == 0) out.query_factor[first_query + row] = 1;
                    });
  for_rows<aligned>(place, key, key_mask, heads.keys,
                    [&](int32_t row, bool exists, bool is_real, const In(&part)[kLaneColumns]) {
                      T x[kLaneColumns];
                      take_mean(part, key_mean, is_real, x);
                      longest_key = max(longest_key, product_of_lanes(place, x, x));
                      const T logarithm = scale * product_of_lanes(place, x, query_mean);
                      if (is_real) largest = max(largest, logarithm);
                      if (!exists) return;
                      store_part<aligned>(place, x, out.key.at(place.batch, place.head, row));
                      if (place.lane == 0) out.key_weight[first_key + row] = logarithm;
                    });
  longest_query = longest_of(over_block<Maximum>(longest_query, shared));
  longest_key = longest_of(over_block<Maximum>(longest_key, shared));
  // waits for the logarithms too
  largest = over_block<Maximum>(largest, shared);
  for (int32_t row = threadIdx.x; row < heads.keys; row += kHeadThreads) {
    T& weight = out.key_weight[first_key + row];
    weight = key_mask == nullptr || key_mask[row] ? exp(weight - largest) : 0;
  }
  if (threadIdx.x == 0)
    out.cosine_scale[place.batch_head] = 1 / max(static_cast<T>(kMargin) * longest_query * longest_key,
                                                 static_cast<T>(2 * kPower / kPi) / scale);
  if (place.row == 0)
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c)
      if (c < place.columns)
        out.query_mean[int64_t{place.batch_head} * heads.columns + place.column + c] = query_mean[c];
}

// Of each query, the product of the output and its gradient, 0 past the last, and 1 over the sum of its weights.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads)
    along_kernel(Rows<const In> grads, Rows<const In> outs, const Accumulator<In>* total, int32_t heads, int32_t count,
                 int32_t columns, int lane_bits, Accumulator<In>* along, Accumulator<In>* inverse_total) {
  using T = Accumulator<In>;
  const int32_t padded = count + kPadding;
  const RowPlace place(padded, lane_bits, 1);
  // lanes past the last row stay: the product is the warp's
  const bool exists = place.row < count;
  const int32_t row = exists ? place.row : 0, batch = place.head / heads, head = place.head % heads;
  In grad[kLaneColumns], out[kLaneColumns];
  T product = 0;
  for (int32_t first = place.column; first < columns; first += kLaneColumns << lane_bits) {
    const int mine = exists ? columns_of_lane(columns, first) : 0;
    load_columns<aligned>(grads.at(batch, head, row) + first, mine, grad);
    load_columns<aligned>(outs.at(batch, head, row) + first, mine, out);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) product += static_cast<T>(grad[c]) * static_cast<T>(out[c]);
  }
  product = sum_of_lanes(product, lane_bits);
  if (place.lane != 0 || place.row >= padded) return;
  along[int64_t{place.head} * padded + place.row] = product;
  if (!exists) return;
  const int64_t i = int64_t{place.head} * count + row;
  inverse_total[i] = total[i] > 0 ? 1 / total[i] : 0;
}

// The gradients of queries and keys, given those of the centred rows and of the logarithms of the keys' weights.
template <class In, bool aligned>
__global__ void __launch_bounds__(kHeadThreads)
    through_centring_kernel(Heads heads, Rows<const In> key, const Accumulator<In>* query_mean,
                            Rows<const Accumulator<In>> centred_query, Rows<const Accumulator<In>> centred_key,
                            const Accumulator<In>* logarithms, Rows<In> grad_query, Rows<In> grad_key) {
  using T = Accumulator<In>;
  T* const shared = shared_memory<T>();
  const HeadPlace place(heads.heads, heads.columns, heads.lane_bits);
  const bool* key_mask = heads.real_keys(place.batch);
  const bool* query_mask = heads.real_queries(place.batch);
  const T scale = static_cast<T>(heads.scale);
  query_mean += int64_t{place.batch_head} * heads.columns + place.column;
  logarithms += int64_t{place.batch_head} * heads.keys;

  const T real_queries = count_real<T>(query_mask, heads.queries, shared);
  const T real_keys = count_real<T>(key_mask, heads.keys, shared);

  // what all queries get of their mean, less the mean of what they get otherwise
  T common[kLaneColumns], mean[kLaneColumns];
  sum_rows<aligned>(place, key, key_mask, heads.keys, [&](int32_t row) { return logarithms[row]; }, common, shared);
  mean_of_rows<aligned>(place, centred_query, query_mask, heads.queries, real_queries, mean, shared);
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) common[c] = scale * common[c] / real_queries - mean[c];
  for_rows<aligned>(place, centred_query, query_mask, heads.queries,
                    [&](int32_t row, bool exists, bool is_real, T(&x)[kLaneColumns]) {
                      if (!exists) return;
#pragma unroll
                      for (int c = 0; c < kLaneColumns; ++c) x[c] = is_real ? x[c] + common[c] : 0;
                      store_part<aligned>(place, x, grad_query.at(place.batch, place.head, row));
                    });

  mean_of_rows<aligned>(place, centred_key, key_mask, heads.keys, real_keys, mean, shared);
  // those of masked keys are zero
  T logarithm = 0, by_logarithm[kLaneColumns];
  for (int32_t row = threadIdx.x; row < heads.keys; row += kHeadThreads) logarithm += logarithms[row];
  logarithm = over_block<Sum>(logarithm, shared) / real_keys;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) by_logarithm[c] = c < place.columns ? scale * query_mean[c] : 0;
  for_rows<aligned>(place, centred_key, key_mask, heads.keys,
                    [&](int32_t row, bool exists, bool is_real, T(&x)[kLaneColumns]) {
                      if (!exists) return;
                      const T less_mean = logarithms[row] - logarithm;
#pragma unroll
                      for (int c = 0; c < kLaneColumns; ++c)
                        x[c] = is_real ? x[c] + less_mean * by_logarithm[c] - mean[c] : 0;
                      store_part<aligned>(place, x, grad_key.at(place.batch, place.head, row));
                    });
}

template <class T>
T* data_of(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

// Queries and keys, without their means, and what is computed with them.
template <class In>
class CentredRows {
 public:
  using T = Accumulator<In>;

  CentredRows(const Device& device, const Tensor& query, const Tensor& key, const std::optional<Tensor>& key_mask,
              double scale)
      : device_(device), B_(query.size(0)), H_(query.size(1)), N_(query.size(2)), M_(key.size(2)), D_(query.size(3)),
        query_(empty_tensor(query, {B_, H_, N_, D_})), key_(empty_tensor(query, {B_, H_, M_, D_})),
        query_mean_(empty({B_, H_, D_})), query_factor_(empty({B_, H_, N_})), key_weight_(empty({B_, H_, M_})),
        cosine_scale_(empty({B_, H_})) {
    if (key_mask.has_value()) mask_ = torch::stable::contiguous(*key_mask);
    heads_ = {.heads = count_of(H_, "heads"),
              .queries = count_of(N_, "rows"),
              .keys = count_of(M_, "rows"),
              .columns = count_of(D_, "columns"),
              .lane_bits = lane_bits_for(D_),
              .key_mask = mask_.has_value() ? static_cast<const bool*>(mask_->const_data_ptr()) : nullptr,
              .scale = scale};
    const Rows<const In> queries = rows_of<In>(query), keys = rows_of<In>(key);
    const bool whole = aligned(queries, D_) && aligned(keys, D_);
    launch(device, whole ? centre_kernel<In, true> : centre_kernel<In, false>, B_ * H_, kHeadThreads, kHeadBytes<T>,
           heads_, queries, keys,
           Centred<In>{mutable_rows_of<In>(query_), mutable_rows_of<In>(key_), data_of<T>(query_mean_),
                       data_of<T>(query_factor_), data_of<T>(key_weight_), data_of<T>(cosine_scale_)});
  }

  void forward(const Tensor& value, const Tensor& out, const Tensor& total) const {
    using Pairs = SoftmaxLikePairs<T, false>;
    // no values of the queries are read
    Launcher<In, Pairs>(device_, query_, value)
        .weighted_sum(side_of<In>(query_, query_, query_factor_), side_of<In>(key_, value, key_weight_),
                      Pairs{{}, data_of<T>(cosine_scale_), nullptr, N_, nullptr}, out, data_of<T>(total));
  }

  void backward(const Tensor& grad, const Tensor& out, const Tensor& total, const Tensor& value,
                const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value) const {
    const Tensor along = empty({B_, H_, N_ + kPadding}), inverse_total = empty({B_, H_, N_});
    const Rows<const In> grads = rows_of<In>(grad), outs = rows_of<In>(out);
    const int64_t columns = value.size(3);
    const int lane_bits = lane_bits_for(columns);
    const bool whole = aligned(grads, columns) && aligned(outs, columns);
    launch(device_, whole ? along_kernel<In, true> : along_kernel<In, false>,
           B_ * H_ * blocks_of_head(count_of(N_ + kPadding, "rows"), lane_bits), kRowThreads, 0, grads, outs,
           static_cast<const T*>(total.const_data_ptr()), heads_.heads, heads_.queries, count_of(columns, "columns"),
           lane_bits, data_of<T>(along), data_of<T>(inverse_total));

    const Tensor centred_query = empty({B_, H_, N_, D_}), centred_key = empty({B_, H_, M_, D_});
    const Tensor logarithms = empty({B_, H_, M_});
    const Side<In> queries = side_of<In>(query_, grad, inverse_total), keys = side_of<In>(key_, value, key_weight_);
    using OfKeys = SoftmaxLikePairs<T, true>;
    using OfQueries = SoftmaxLikePairs<T, false>;
    const T *cosine_scale = data_of<T>(cosine_scale_), *products = data_of<T>(along);
    Launcher<In, OfKeys>(device_, query_, value)
        .gradients(keys, queries, OfKeys{{}, cosine_scale, products, N_, data_of<T>(logarithms)}, centred_key,
                   grad_value);
    Launcher<In, OfQueries>(device_, query_, value)
        .gradient(queries, keys, OfQueries{{}, cosine_scale, products, N_, nullptr}, centred_query);

    launch(device_, D_ % kLaneColumns == 0 ? through_centring_kernel<In, true> : through_centring_kernel<In, false>,
           B_ * H_, kHeadThreads, kHeadBytes<T>, heads_, rows_of<In>(key_), data_of<T>(query_mean_),
           rows_of<T>(centred_query), rows_of<T>(centred_key), data_of<T>(logarithms),
           mutable_rows_of<In>(grad_query), mutable_rows_of<In>(grad_key));
  }

 private:
  // of accumulators
  Tensor empty(std::initializer_list<int64_t> sizes) const { return empty_tensor(query_, sizes, length_dtype(query_)); }

  const Device& device_;
  const int64_t B_, H_, N_, M_, D_;
  const Tensor query_, key_, query_mean_, query_factor_, key_weight_, cosine_scale_;
  std::optional<Tensor> mask_;
  Heads heads_;
};

std::tuple<Tensor, Tensor> softmax_like_attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                                       const std::optional<Tensor>& key_mask, double scale) {
  check_softmax_like(query, key, value, key_mask, scale);
  const Device device(value);
  Tensor out = empty_heads_last(value, query.size(0), query.size(1), query.size(2), value.size(3));
  Tensor total = empty_inverse_length(out, true);
  const Tensor rows[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_wide(query, [&](auto element) {
    CentredRows<decltype(element)>(device, rows[0], rows[1], key_mask, scale).forward(rows[2], out, total);
  });
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor> softmax_like_attention_backward_cuda(
    const Tensor& grad, const Tensor& out, const Tensor& total, const Tensor& query, const Tensor& key,
    const Tensor& value, const std::optional<Tensor>& key_mask, double scale) {
  check_softmax_like_backward(grad, out, total, query, key, value, key_mask, scale);
  const Device device(value);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), M = key.size(2);
  Tensor grad_query = empty_heads_last(query, B, H, N, query.size(3));
  Tensor grad_key = empty_heads_last(key, B, H, M, key.size(3));
  Tensor grad_value = empty_heads_last(value, B, H, M, value.size(3));
  const Tensor rows[] = {dense_rows(grad), dense_rows(out), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_wide(query, [&](auto element) {
    CentredRows<decltype(element)>(device, rows[2], rows[3], key_mask, scale)
        .backward(rows[0], rows[1], total, rows[4], grad_query, grad_key, grad_value);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("softmax_like_attention", TORCH_BOX(&softmax_like_attention_cuda));
  m.impl("softmax_like_attention_backward", TORCH_BOX(&softmax_like_attention_backward_cuda));
}

}  // namespace yoso
