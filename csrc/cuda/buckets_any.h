// The kernel of sampled_attention_backward.cu that multiplies buckets of float32 and float64 of any size. A warp has a
// bucket of up to 16 rows a side: a lane has some of the products of gradients and values, and then some columns of all
// sums.
#pragma once

#include "buckets.h"
#include "tile_products.h"

namespace yoso {
namespace {

// columns that are multiplied at a time, by 32 lanes
template <class T>
constexpr int kSlice = sizeof(T) == 8 ? kWarp : 2 * kWarp;

// A warp's shared memory: a slice of gradients or values of both sides, and their products as weights. What pads a row
// keeps it aligned to 16 bytes, and eight rows in different banks.
template <class T>
union WarpMemory {
  static constexpr int kPadding = 16 / sizeof(T);
  using Others = T[kPicked][kSlice<T> + kPadding];
  // of the sources by targets, times the inverse lengths of the sources
  using Weights = T[kPicked][kPicked + kPadding];
  Others others[2];
  Weights weights[2];
};

// A block's shared memory where it multiplies through products.
template <class T>
struct BlockMemory {
  Tile<T> left, right;
};

// A lane's columns of those that rows have from `first` on.
template <class T>
struct LaneColumns {
  static constexpr int kCount = kSlice<T> / kWarp;
  int32_t first, end;
  // whether no lane has a column past the last
  bool whole;

  __device__ __forceinline__ LaneColumns(uint32_t lane, int32_t first, int32_t end)
      : first(first + lane), end(end), whole(first + kSlice<T> <= end) {}

  __device__ __forceinline__ bool exists(int i) const { return first + i * kWarp < end; }
  // a column that exists, if not the lane's
  __device__ __forceinline__ int32_t readable(int i) const { return min(first + i * kWarp, end - 1); }
};

// The products of up to 16 gradients with as many values: pairs [i][j][e] of the left row 8 i + lane / 4 and the right
// row 8 j + lane % 4 + 4 e.
template <class T>
struct Products {
  T pairs[2][2][2] = {};

  // Fills in the products of rows that lanes 0..15 and lanes 16..31 have picked.
  __device__ __forceinline__ Products(uint32_t lane, const HeadSide<T>& left, int num_left, const HeadSide<T>& right,
                                      int num_right, const PickedRows<T>& picked, int32_t columns,
                                      WarpMemory<T>& memory) {
    for (int32_t first = 0; first < columns; first += kSlice<T>) {
      const LaneColumns<T> mine(lane, first, columns);
      // all have read what was here before
      __syncwarp();
      load(lane, left, picked, 0, num_left, mine, memory.others[0]);
      load(lane, right, picked, kPicked, num_right, mine, memory.others[1]);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (8 * i < num_left && 8 * j < num_right)
            multiply(memory.others[0][8 * i + lane / 4], memory.others[1] + 8 * j + lane % 4, pairs[i][j]);
    }
    __syncwarp();
  }

  // Writes the weights of right rows by left ones, or of left rows by right ones.
  template <bool by_left>
  __device__ __forceinline__ void store(uint32_t lane, int num_left, int num_right, const PickedRows<T>& picked,
                                        typename WarpMemory<T>::Weights& weights) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int l = 8 * i + lane / 4, r = 8 * j + lane % 4 + 4 * e;
          const T inverse = __shfl_sync(kAllLanes, picked.inverse_length, by_left ? kPicked + r : l);
          // where there is no row, there may be anything
          const T weight = l < num_left && r < num_right ? pairs[i][j][e] * inverse : 0;
          (by_left ? weights[r][l] : weights[l][r]) = weight;
        }
  }

 private:
  __device__ __forceinline__ static void load(uint32_t lane, const HeadSide<T>& side, const PickedRows<T>& picked,
                                              int first_lane, int count, const LaneColumns<T>& columns,
                                              typename WarpMemory<T>::Others& to) {
    const T* const rows = side.others;
    const uint32_t row_bytes = side.other_bytes;
#pragma unroll 4
    for (int r = 0; r < count; ++r) {
      const T* from = row_at(rows, picked.at(first_lane + r), row_bytes);
#pragma unroll
      for (int i = 0; i < LaneColumns<T>::kCount; ++i) {
        const T x = from[columns.readable(i)];
        to[r][lane + i * kWarp] = columns.exists(i) ? x : 0;
      }
    }
  }

  // sums += left . right[0] and left . right[4]
  template <int stride>
  __device__ __forceinline__ static void multiply(const T (&left)[stride], const T (*right)[stride], T (&sums)[2]) {
    constexpr int kAtOnce = 16 / sizeof(T);
#pragma unroll 2
    for (int c = 0; c < kSlice<T>; c += kAtOnce) {
      T a[kAtOnce], b[2][kAtOnce];
      yoso::load(left + c, a);
      yoso::load(right[0] + c, b[0]);
      yoso::load(right[4] + c, b[1]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[e] += a[i] * b[e][i];
    }
  }
};

// A lane's columns of the sums of up to 16 rows.
template <class T>
struct WarpSums {
  T sums[kPicked][kSlice<T> / kWarp] = {};

  // Adds `count` source rows, by their weights; of columns that do not exist, anything.
  __device__ __forceinline__ void add(const HeadSide<T>& sources, const PickedRows<T>& picked, int first_lane,
                                      int count, const typename WarpMemory<T>::Weights& weights, int num_targets,
                                      const LaneColumns<T>& columns) {
    const T* const rows = sources.rows;
    const uint32_t row_bytes = sources.row_bytes;
#pragma unroll 2
    for (int s = 0; s < count; ++s) {
      const T* from = row_at(rows, picked.at(first_lane + s), row_bytes);
      T row[LaneColumns<T>::kCount];
#pragma unroll
      for (int i = 0; i < LaneColumns<T>::kCount; ++i) row[i] = from[columns.readable(i)];
#pragma unroll
      for (int half = 0; half < kPicked; half += 8) {
        if (half > 0 && half >= num_targets) break;
        T w[8];
        load(weights[s] + half, w);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
          for (int i = 0; i < LaneColumns<T>::kCount; ++i) sums[half + t][i] += w[t] * row[i];
      }
    }
  }

  // Stores the sums as the addends of `count` picked rows.
  __device__ __forceinline__ void store(const HeadSide<T>& targets, const PickedRows<T>& picked, int first_lane,
                                        int count, const LaneColumns<T>& columns) const {
    T* const rows = targets.addends + columns.first;
    const uint32_t row_bytes = targets.addend_bytes;
    // without a branch for each column
    if (columns.whole)
      store_each(rows, row_bytes, picked, first_lane, count, [](int) { return true; });
    else
      store_each(rows, row_bytes, picked, first_lane, count, [&](int i) { return columns.exists(i); });
  }

 private:
  template <class Exists>
  __device__ __forceinline__ void store_each(T* rows, uint32_t row_bytes, const PickedRows<T>& picked, int first_lane,
                                             int count, const Exists& exists) const {
#pragma unroll
    for (int t = 0; t < kPicked; ++t) {
      if (t >= count) break;
      T* to = row_at(rows, picked.at(first_lane + t), row_bytes);
#pragma unroll
      for (int i = 0; i < LaneColumns<T>::kCount; ++i)
        if (exists(i)) to[i * kWarp] = sums[t][i];
    }
  }
};

// What the rows of a bucket of up to 16 a side get from it. A warp has it.
template <class T>
__device__ __forceinline__ void multiply_small_bucket(const HeadSide<T>& queries, const Span& q,
                                                      const HeadSide<T>& keys, const Span& k, const Sizes& sizes,
                                                      WarpMemory<T>& memory) {
  const uint32_t lane = lane_in_bucket();
  const PickedRows<T> picked(lane, queries, q, keys, k);
  const Products<T> products(lane, queries, q.count, keys, k.count, picked, sizes.Dv, memory);
  products.template store<true>(lane, q.count, k.count, picked, memory.weights[0]);
  products.template store<false>(lane, q.count, k.count, picked, memory.weights[1]);
  __syncwarp();
  for (int32_t first = 0; first < sizes.D; first += kSlice<T>) {
    const LaneColumns<T> mine(lane, first, sizes.D);
    WarpSums<T> query_sums;
    query_sums.add(keys, picked, kPicked, k.count, memory.weights[0], q.count, mine);
    query_sums.store(queries, picked, 0, q.count, mine);
    WarpSums<T> key_sums;
    key_sums.add(queries, picked, 0, q.count, memory.weights[1], k.count, mine);
    key_sums.store(keys, picked, kPicked, k.count, mine);
  }
}

// What up to 16 of one side's rows get from their bucket. A warp has them.
template <class T>
__device__ __forceinline__ void multiply_pairs_of_tile(const HeadSide<T>& targets, const Span& target_span,
                                                       const HeadSide<T>& sources, const Span& source_span,
                                                       const Sizes& sizes, WarpMemory<T>& memory) {
  const int num_targets = min(target_span.count, kPicked);
  for (int32_t first = 0; first < sizes.D; first += kSlice<T>) {
    WarpSums<T> sums;
    for (int s = 0; s < source_span.count; s += kPicked) {
      const uint32_t lane = lane_in_bucket();
      const LaneColumns<T> mine(lane, first, sizes.D);
      const int count = min(source_span.count - s, kPicked);
      const PickedRows<T> picked(lane, targets, target_span, sources, {source_span.first + s, count});
      const Products<T> products(lane, targets, num_targets, sources, count, picked, sizes.Dv, memory);
      products.template store<true>(lane, num_targets, count, picked, memory.weights[0]);
      __syncwarp();
      sums.add(sources, picked, kPicked, count, memory.weights[0], num_targets, mine);
      if (s + kPicked >= source_span.count) sums.store(targets, picked, 0, num_targets, mine);
    }
  }
}

// What one side's rows get from a bucket, through the product of the other side's rows, at a cost that is linear in the
// bucket's size: G (V^T K) for the queries, V (G^T Q) for the keys. The block shares the work.
template <class T>
__device__ __forceinline__ void multiply_through_product(const HeadSide<T>& targets, const Span& target_span,
                                                         const HeadSide<T>& sources, const Span& source_span,
                                                         const Sizes& sizes, BlockMemory<T>& memory) {
  constexpr int n = kTile * kTile / (kThreads * kSide);
  // Loads kTile of the gradients or values, from `first` of the bucket's on, and returns how many there are.
  const auto load_others = [&](const HeadSide<T>& side, const Span& span, int first, int32_t column, Tile<T>& to) {
    const int32_t* order = side.order + span.first + first;
    const int count = min(kTile, span.count - first);
    const auto row = [&](int r) { return r < count ? row_at(side.others, order[r], side.other_bytes) : nullptr; };
    load_tile<false, kThreads>(TileSource<T>{{}, sizes.Dv, side.aligned}, row, column, to);
    return count;
  };
  // once at least: without columns of values, the sums are zero
  for (int32_t other = 0; other < max(sizes.Dv, 1); other += kTile)
    for (int32_t column = 0; column < sizes.D; column += kTile) {
      T product[n][kSide] = {};
      for (int from = 0; from < source_span.count; from += kTile) {
        __syncthreads();
        const int count = load_others(sources, source_span, from, other, memory.left);
        const int32_t* order = sources.order + source_span.first + from;
        const auto row = [&](int r) { return r < count ? row_at(sources.rows, order[r], sources.row_bytes) : nullptr; };
        const auto inverse_length = [&](int r) { return r < count ? sources.inverse_length[order[r]] : 0; };
        load_tile<false, kThreads>(TileSource<T>{{}, sizes.D, sources.aligned}, row, column, inverse_length,
                                   memory.right);
        __syncthreads();
        // a tile's sums by themselves, for accuracy
        T sums[n][kSide] = {};
        multiply_tiles<true>(memory.left, memory.right, sums);
        for_elements<n>([&](int r, int c) { product[r][c] += sums[r][c]; });
      }
      __syncthreads();
      store_elements(product, memory.right);
      for (int to = 0; to < target_span.count; to += kTile) {
        __syncthreads();
        const int count = load_others(targets, target_span, to, other, memory.left);
        __syncthreads();
        T sums[n][kSide] = {};
        multiply_tiles<false>(memory.left, memory.right, sums);
        const int32_t* order = targets.order + target_span.first + to;
        for_elements<n>([&](int r, int c) {
          if (my_row<n>(r) >= count || column + my_column(c) >= sizes.D) return;
          T* addend = row_at(targets.addends, order[my_row<n>(r)], targets.addend_bytes) + column + my_column(c);
          // the thread's own, of the columns of others before
          *addend = other > 0 ? *addend + sums[r][c] : sums[r][c];
        });
      }
    }
}

// Calls, for the buckets of an item: where one side has no rows, alone(side, span) by one warp; of up to kPicked rows a
// side, small(query_span, key_span) by one warp; of more, where is_crowded(query_span, key_span) is false, tile(side,
// target_span, source_span) by one warp for every kPicked rows of either side; else crowded(side, target_span,
// source_span) by the block, for each side.
template <class T, class IsCrowded, class Alone, class Small, class OfTile, class Crowded>
__device__ __forceinline__ void for_buckets(const HeadSide<T>* sides, const Sizes& sizes, int32_t item,
                                            const IsCrowded& is_crowded, const Alone& alone, const Small& small,
                                            const OfTile& tile, const Crowded& crowded) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int32_t begin = item * sizes.item_codes, end = min(begin + sizes.item_codes, sizes.table_size);
  // the warp whose turn it is
  int turn = 0;
  for (int32_t first = begin; first < end; first += kWarp) {
    Span query_span = {0, 0}, key_span = {0, 0};
    if (first + lane < end) {
      query_span = span_of(sides[0], first + lane);
      key_span = span_of(sides[1], first + lane);
    }
    const int largest = query_span.count == 0 || key_span.count == 0 ? 0 : max(query_span.count, key_span.count);
    const bool is_small = largest <= kPicked, has_crowd = !is_small && is_crowded(query_span, key_span);
    const auto from_lane = [](const Span& span, int source) {
      return Span{__shfl_sync(kAllLanes, span.first, source), __shfl_sync(kAllLanes, span.count, source)};
    };
    const auto from_either = [](bool first, const Span& a, const Span& b) {
      return Span{first ? a.first : b.first, first ? a.count : b.count};
    };
    const uint32_t smalls = __ballot_sync(kAllLanes, query_span.count + key_span.count > 0 && is_small);
    const int before = __popc(smalls & ~(kAllLanes << lane));
    const bool is_mine = (smalls >> lane & 1) != 0 && (turn + before) % kWarps == warp;
    for (uint32_t left = __ballot_sync(kAllLanes, is_mine); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const Span q = from_lane(query_span, source), k = from_lane(key_span, source);
      if (q.count == 0 || k.count == 0)
        alone(q.count == 0, from_either(q.count > 0, q, k));
      else
        small(q, k);
    }
    turn = (turn + __popc(smalls)) % kWarps;
    for (uint32_t left = __ballot_sync(kAllLanes, !is_small && !has_crowd); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const Span q = from_lane(query_span, source), k = from_lane(key_span, source);
      const int query_tiles = (q.count + kPicked - 1) / kPicked,
                tiles = query_tiles + (k.count + kPicked - 1) / kPicked;
      for (int i = (warp - turn + kWarps) % kWarps; i < tiles; i += kWarps) {
        const bool is_query = i < query_tiles;
        const int skipped = (is_query ? i : i - query_tiles) * kPicked;
        const Span targets = from_either(is_query, q, k);
        tile(!is_query, Span{targets.first + skipped, targets.count - skipped}, from_either(is_query, k, q));
      }
      turn = (turn + tiles) % kWarps;
    }
    for (uint32_t left = __ballot_sync(kAllLanes, has_crowd); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const Span q = from_lane(query_span, source), k = from_lane(key_span, source);
#pragma unroll 1
      for (int side = 0; side < 2; ++side) crowded(side, from_either(side == 0, q, k), from_either(side == 0, k, q));
      // the memory is the warps' again
      __syncthreads();
    }
  }
}

// The shared memory of multiply_buckets_kernel.
template <class T>
struct AnyMemory {
  union {
    WarpMemory<T> warps[kWarps];
    BlockMemory<T> block;
  };
  // here they take no registers
  HeadSide<T> sides[2];
};

// Stores what all rows get from their buckets. A block has an item.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 2)
    multiply_buckets_kernel(Side<T> query_side, Side<T> key_side, Sizes sizes) {
  auto& memory = *shared_memory<AnyMemory<T>>();
  const int32_t items = sizes.items(), item = blockIdx.x % items;
  if (threadIdx.x < 2)
    memory.sides[threadIdx.x] = HeadSide<T>(threadIdx.x == 0 ? query_side : key_side, sizes, blockIdx.x / items);
  __syncthreads();
  const HeadSide<T>* sides = memory.sides;
  const int warp = threadIdx.x / kWarp;
  WarpMemory<T>& warp_memory = memory.warps[warp];
  for (int side = 0; side < 2; ++side) sides[side].clear(sides[side].in_none(sizes, item, items), warp, kWarps);
  for_buckets(
      sides, sizes, item,
      [&](const Span& q, const Span& k) {
        // the products of all pairs, those of gradients and values for either side, or through products
        const int64_t D = sizes.D, Dv = sizes.Dv;
        return int64_t{q.count} * k.count * (D + Dv) > (int64_t{q.count} + k.count) * D * Dv;
      },
      [&](int side, const Span& span) { sides[side].clear(span, 0, 1); },
      [&](const Span& q, const Span& k) { multiply_small_bucket(sides[0], q, sides[1], k, sizes, warp_memory); },
      [&](int side, const Span& targets, const Span& sources) {
        multiply_pairs_of_tile(sides[side], targets, sides[1 - side], sources, sizes, warp_memory);
      },
      [&](int side, const Span& targets, const Span& sources) {
        multiply_through_product(sides[side], targets, sides[1 - side], sources, sizes, memory.block);
      });
}

}  // namespace
}  // namespace yoso
