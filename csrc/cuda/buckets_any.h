// The kernel of sampled_attention_backward.cu that adds buckets, for any dtype and size.
#pragma once

#include "buckets.h"

namespace yoso {
namespace {

// columns that are multiplied at a time
constexpr int kSlice = 64;

// A block's shared memory where it multiplies without tensor cores. A column more avoids bank conflicts.
template <class T>
struct Scratch {
  using Slice = T[kTile][kSlice + 1];
  Slice query_others, key_others, queries, keys;
  T weights[kTile][kTile + 1], product[kSlice][kSlice + 1];
};

// Copies columns first_column .. first_column + kSlice - 1 of up to kTile rows, zero past the last row and column:
// the other rows, or the rows at length one.
template <bool others, class In, class T = Accumulator<In>>
__device__ void load_slice(T (&to)[kTile][kSlice + 1], const HeadSide<In>& side, const int32_t* order, int count,
                           int first_column, int columns) {
  for (int i = threadIdx.x; i < kTile * kSlice; i += kThreads) {
    const int r = i / kSlice, c = i % kSlice;
    T value = 0;
    if (r < count && first_column + c < columns) {
      const int32_t row = order[r];
      if constexpr (others)
        value = static_cast<T>(row_at(side.others, row, side.other_bytes)[first_column + c]);
      else
        value = static_cast<T>(row_at(side.rows, row, side.row_bytes)[first_column + c]) * side.inverse_length[row];
    }
    to[r][c] = value;
  }
}

// Adds f(r, c) to the sums of up to kTile rows.
template <class In, class F, class T = Accumulator<In>>
__device__ void add_slice(const HeadSide<In>& side, const int32_t* order, int count, int first_column, int columns,
                          const F& f) {
  for (int i = threadIdx.x; i < kTile * kSlice; i += kThreads) {
    const int r = i / kSlice, c = i % kSlice;
    if (r < count && first_column + c < columns) {
      T* sum = row_at(side.sums, order[r], side.sum_bytes) + first_column + c;
      // not from a first-level cache, which may hold it from before another launch, on another multiprocessor, added
      *sum = __ldcg(sum) + f(r, c);
    }
  }
}

// Adds a bucket's W K to the queries' sums and W^T Q to the keys', with W = G V^T. The block shares the work.
template <class In, class T = Accumulator<In>>
__device__ void add_pairs(const HeadSide<In>& queries, Span query_span, const HeadSide<In>& keys, Span key_span,
                          const Sizes& sizes, Scratch<T>& scratch) {
  static_assert(kTile * kTile == kThreads);
  const int i = threadIdx.x / kTile, j = threadIdx.x % kTile;
  for (int k = 0; k < key_span.count; k += kTile)
    for (int q = 0; q < query_span.count; q += kTile) {
      const int32_t *query_order = queries.order + query_span.first + q, *key_order = keys.order + key_span.first + k;
      const int num_queries = min(kTile, query_span.count - q), num_keys = min(kTile, key_span.count - k);
      T weight = 0;
      for (int first = 0; first < sizes.Dv; first += kSlice) {
        __syncthreads();
        load_slice<true>(scratch.query_others, queries, query_order, num_queries, first, sizes.Dv);
        load_slice<true>(scratch.key_others, keys, key_order, num_keys, first, sizes.Dv);
        __syncthreads();
        const int columns = min(kSlice, sizes.Dv - first);
        for (int c = 0; c < columns; ++c) weight += scratch.query_others[i][c] * scratch.key_others[j][c];
      }
      for (int first = 0; first < sizes.D; first += kSlice) {
        __syncthreads();
        if (first == 0) scratch.weights[i][j] = weight;
        load_slice<false>(scratch.queries, queries, query_order, num_queries, first, sizes.D);
        load_slice<false>(scratch.keys, keys, key_order, num_keys, first, sizes.D);
        __syncthreads();
        add_slice(queries, query_order, num_queries, first, sizes.D, [&](int r, int c) {
          T sum = 0;
          for (int key = 0; key < num_keys; ++key) sum += scratch.weights[r][key] * scratch.keys[key][c];
          return sum;
        });
        add_slice(keys, key_order, num_keys, first, sizes.D, [&](int r, int c) {
          T sum = 0;
          for (int query = 0; query < num_queries; ++query)
            sum += scratch.weights[query][r] * scratch.queries[query][c];
          return sum;
        });
      }
    }
}

// Adds a bucket's part of one side's sums through the product of the other side's rows, at a cost that is linear in
// the bucket's size: G (V^T K) to the queries', V (G^T Q) to the keys'. The block shares the work.
template <class In, class T = Accumulator<In>>
__device__ void add_through_product(const HeadSide<In>& targets, Span target_span, const HeadSide<In>& sources,
                                    Span source_span, const Sizes& sizes, Scratch<T>& scratch) {
  constexpr int kSide = 4;
  static_assert(kSlice * kSlice == kThreads * kSide * kSide);
  const int i = threadIdx.x / (kSlice / kSide) * kSide, j = threadIdx.x % (kSlice / kSide) * kSide;
  for (int other = 0; other < sizes.Dv; other += kSlice)
    for (int first = 0; first < sizes.D; first += kSlice) {
      const int columns = min(kSlice, sizes.Dv - other);
      T product[kSide][kSide] = {};
      for (int from = 0; from < source_span.count; from += kTile) {
        const int32_t* order = sources.order + source_span.first + from;
        const int count = min(kTile, source_span.count - from);
        __syncthreads();
        load_slice<true>(scratch.key_others, sources, order, count, other, sizes.Dv);
        load_slice<false>(scratch.keys, sources, order, count, first, sizes.D);
        __syncthreads();
        // a tile's sums by themselves, for accuracy
        T sums[kSide][kSide] = {};
        for (int r = 0; r < count; ++r)
#pragma unroll
          for (int a = 0; a < kSide; ++a)
#pragma unroll
            for (int b = 0; b < kSide; ++b) sums[a][b] += scratch.key_others[r][i + a] * scratch.keys[r][j + b];
#pragma unroll
        for (int a = 0; a < kSide; ++a)
#pragma unroll
          for (int b = 0; b < kSide; ++b) product[a][b] += sums[a][b];
      }
      // all have read the product before, since they met while this one was computed
#pragma unroll
      for (int a = 0; a < kSide; ++a)
#pragma unroll
        for (int b = 0; b < kSide; ++b) scratch.product[i + a][j + b] = product[a][b];
      for (int to = 0; to < target_span.count; to += kTile) {
        const int32_t* order = targets.order + target_span.first + to;
        const int count = min(kTile, target_span.count - to);
        __syncthreads();
        load_slice<true>(scratch.query_others, targets, order, count, other, sizes.Dv);
        __syncthreads();
        add_slice(targets, order, count, first, sizes.D, [&](int r, int c) {
          T sum = 0;
          for (int l = 0; l < columns; ++l) sum += scratch.query_others[r][l] * scratch.product[l][c];
          return sum;
        });
      }
    }
}

// Adds the buckets of one hash function: any dtype and size. A block has block_codes codes of a head.
template <class In>
__global__ void __launch_bounds__(kThreads, sizeof(In) == 8 ? 1 : 2)
    add_buckets_kernel(Side<In> query_side, Side<In> key_side, Sizes sizes, int32_t hash) {
  using T = Accumulator<In>;
  let_next_launch_start();
  wait_for_launches_before();
  Scratch<T>& scratch = *shared_memory<Scratch<T>>();
  const int32_t head = blockIdx.x / sizes.head_blocks;
  const HeadSide<In> queries(query_side, sizes, head, hash), keys(key_side, sizes, head, hash);
  const int32_t begin = static_cast<int32_t>(blockIdx.x % sizes.head_blocks) * sizes.block_codes;
  const int32_t end = min(begin + sizes.block_codes, sizes.table_size);
  for (int32_t code = begin; code < end; ++code) {
    const Span q = span_of(queries, code), k = span_of(keys, code);
    if (q.count == 0 || k.count == 0) continue;
    const int64_t D = sizes.D, Dv = sizes.Dv;
    if (int64_t{q.count} * k.count * (2 * D + Dv) <= 2 * (int64_t{q.count} + k.count) * D * Dv) {
      add_pairs(queries, q, keys, k, sizes, scratch);
    } else {
      add_through_product(queries, q, keys, k, sizes, scratch);
      add_through_product(keys, k, queries, q, sizes, scratch);
    }
  }
}

}  // namespace
}  // namespace yoso
