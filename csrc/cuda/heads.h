// Blocks that have all rows of a head each: sums, means and maxima over these.
#pragma once

#include "rows.h"

namespace yoso {
namespace {

constexpr int kHeadThreads = 512, kHeadWarps = kHeadThreads / kWarp;
// that a row has at most: of a warp's lanes
constexpr int kHeadColumns = kWarp * kLaneColumns;
// rows of a thread that are read at the same time
constexpr int kRowsAhead = 4;

template <class T>
constexpr size_t kHeadBytes = sizeof(T) * kHeadWarps * kHeadColumns;

// The columns that a thread has, of every step'th row.
struct HeadPlace {
  int32_t batch_head, batch, head, row, step, column;
  int lane, lane_bits, columns;

  __device__ HeadPlace(int32_t heads, int32_t row_columns, int lane_bits)
      : batch_head(blockIdx.x), batch(batch_head / heads), head(batch_head % heads), row(threadIdx.x >> lane_bits),
        step(kHeadThreads >> lane_bits), lane(threadIdx.x & ((1 << lane_bits) - 1)), lane_bits(lane_bits) {
    column = lane * kLaneColumns;
    columns = columns_of_lane(row_columns, column);
  }
};

// Calls use(row, exists, is_real, part) for the thread's rows; together for those of a warp, past the last row too.
// Rows that the mask, if any, does not say to be real are not read: their part is zero.
template <bool aligned, class X, class Use>
__device__ __forceinline__ void for_rows(const HeadPlace& place, const Rows<const X>& rows, const bool* mask,
                                         int32_t count, const Use& use) {
  for (int32_t first = 0; first < count; first += kRowsAhead * place.step) {
    X parts[kRowsAhead][kLaneColumns];
    bool is_real[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const int32_t row = first + i * place.step + place.row;
      is_real[i] = row < count && (mask == nullptr || mask[row]);
      load_columns<aligned>(rows.at(place.batch, place.head, is_real[i] ? row : 0) + place.column,
                            is_real[i] ? place.columns : 0, parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const int32_t row = first + i * place.step + place.row;
      use(row, row < count, is_real[i], parts[i]);
    }
  }
}

template <bool aligned, class T, class X>
__device__ __forceinline__ void store_part(const HeadPlace& place, const T (&x)[kLaneColumns], X* row) {
  X rounded[kLaneColumns];
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) rounded[c] = static_cast<X>(x[c]);
  store_columns<aligned>(rounded, place.columns, row + place.column);
}

// The product of two rows of a warp's lanes.
template <class T>
__device__ __forceinline__ T product_of_lanes(const HeadPlace& place, const T (&x)[kLaneColumns],
                                              const T (&y)[kLaneColumns]) {
  T product = 0;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) product += x[c] * y[c];
  return sum_of_lanes(product, place.lane_bits);
}

struct Sum {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x + y;
  }
};
struct Maximum {
  template <class T>
  __device__ T operator()(T x, T y) const {
    return x > y ? x : y;
  }
};

// The sum or the maximum over all threads, for all of them.
template <class Join, class T>
__device__ __forceinline__ T over_block(T x, T* shared) {
  const Join join;
#pragma unroll
  for (int other = kWarp / 2; other > 0; other /= 2) x = join(x, __shfl_xor_sync(kAllLanes, x, other));
  // what was there has been read
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int warp = 1; warp < kHeadWarps; ++warp) x = join(x, shared[warp]);
  return x;
}

// The sums over all threads that have the same columns, for all of them.
template <class T>
__device__ __forceinline__ void sum_columns(const HeadPlace& place, T (&x)[kLaneColumns], T* shared) {
  for (int other = 1 << place.lane_bits; other < kWarp; other *= 2)
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) x[c] += __shfl_xor_sync(kAllLanes, x[c], other);
  __syncthreads();
  if (threadIdx.x % kWarp >> place.lane_bits == 0)
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) shared[threadIdx.x / kWarp * kHeadColumns + place.column + c] = x[c];
  __syncthreads();
  if (threadIdx.x < kLaneColumns << place.lane_bits) {
    T sum = 0;
#pragma unroll
    for (int warp = 0; warp < kHeadWarps; ++warp) sum += shared[warp * kHeadColumns + threadIdx.x];
    shared[threadIdx.x] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) x[c] = shared[place.column + c];
}

// The sums of the rows, each multiplied by weigh(row), for the thread's columns.
template <bool aligned, class T, class X, class Weigh>
__device__ __forceinline__ void sum_rows(const HeadPlace& place, const Rows<const X>& rows, const bool* mask,
                                         int32_t count, const Weigh& weigh, T (&sums)[kLaneColumns], T* shared) {
  // what the sums lack: a thread may have many rows, of which each adds little
  T lacking[kLaneColumns] = {};
  memset(sums, 0, sizeof(sums));
  for_rows<aligned>(place, rows, mask, count, [&](int32_t row, bool, bool is_real, const X(&part)[kLaneColumns]) {
    if (!is_real) return;
    const T weight = weigh(row);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const T term = static_cast<T>(part[c]) * weight + lacking[c], sum = sums[c] + term;
      lacking[c] = term - (sum - sums[c]);
      sums[c] = sum;
    }
  });
  sum_columns(place, sums, shared);
}

// The number of real rows, 1 where there is none.
template <class T>
__device__ __forceinline__ T count_real(const bool* mask, int32_t count, T* shared) {
  T real = static_cast<T>(count);
  if (mask != nullptr) {
    int32_t mine = 0;
    for (int32_t row = threadIdx.x; row < count; row += kHeadThreads) mine += mask[row];
    real = over_block<Sum>(static_cast<T>(mine), shared);
  }
  return real > 0 ? real : 1;
}

// The mean of the real rows, for the thread's columns.
template <bool aligned, class T, class X>
__device__ __forceinline__ void mean_of_rows(const HeadPlace& place, const Rows<const X>& rows, const bool* mask,
                                             int32_t count, T real, T (&mean)[kLaneColumns], T* shared) {
  sum_rows<aligned>(place, rows, mask, count, [](int32_t) { return T{1}; }, mean, shared);
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) mean[c] /= real;
}

}  // namespace
}  // namespace yoso
