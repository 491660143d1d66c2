// The gradient of sampled attention for query and key, by buckets: linear in the number of rows whatever the data.
// A launch adds one hash function: a row is in one of its buckets, so every sum has one addend a launch, and what
// order the blocks run in does not matter. The next launch may do all else meanwhile.
#include "mma.h"
#include "rows.h"
#include "sort.h"

namespace yoso {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
// rows of a bucket, and columns, that are multiplied at a time
constexpr int kTile = 16, kSlice = 64;
// Heads whose rows and sums fit here stay in the cache from one hash function to the next.
constexpr int64_t kCacheBytes = int64_t{32} << 20;
// of a multiprocessor at a time, and the most codes that one has
constexpr int64_t kResidentBlocks = 2, kBlockCodes = 32;

// The queries with the output's gradient, or the keys with the values, of the heads of a launch.
template <class In>
struct Side {
  Rows<const In> rows, others;
  // from one row to the next
  uint32_t row_bytes, other_bytes;
  // [heads, count], and [heads, count, D] that become the gradient of the rows at length one
  Accumulator<In>*inverse_length, *sums;
  // [heads, m, count] and [heads, m, table_size + 1], see SortedCodes
  const int32_t *order, *starts;
  int32_t count;
};

// The heads from `first` on, of the B * H.
struct Sizes {
  int32_t first, heads, H, num_hash, D, Dv;
  // blocks that a head has in a launch, and codes that a block has
  int32_t table_size, head_blocks, block_codes;
};

// A side of one head and one hash function.
template <class In>
struct HeadSide {
  using T = Accumulator<In>;
  const In *rows, *others;
  const T* inverse_length;
  T* sums;
  const int32_t *order, *starts;
  uint32_t row_bytes, other_bytes, sum_bytes;

  __device__ HeadSide(const Side<In>& side, const Sizes& sizes, int32_t head, int32_t hash) {
    const int32_t batch = (sizes.first + head) / sizes.H, head_of_batch = (sizes.first + head) % sizes.H;
    const int64_t list = int64_t{head} * sizes.num_hash + hash, first_row = int64_t{head} * side.count;
    rows = side.rows.at(batch, head_of_batch, 0);
    others = side.others.at(batch, head_of_batch, 0);
    inverse_length = side.inverse_length + first_row;
    sums = side.sums + first_row * sizes.D;
    order = side.order + list * side.count;
    starts = side.starts + list * (sizes.table_size + 1);
    row_bytes = side.row_bytes;
    other_bytes = side.other_bytes;
    sum_bytes = sizes.D * sizeof(T);
  }
};

// The part of a bucket that is one side's: its rows are order[first] .. order[first + count - 1].
struct Span {
  int32_t first, count;
};

template <class In>
__device__ Span span_of(const HeadSide<In>& side, int32_t code) {
  const int32_t first = __ldg(side.starts + code);
  return {first, __ldg(side.starts + code + 1) - first};
}

// Fills in the inverse lengths of a side's rows, and clears its sums.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads) prepare_kernel(Side<In> side, Sizes sizes, int lane_bits) {
  using T = Accumulator<In>;
  const RowPlace place(side.count, lane_bits, 1);
  // lanes past the last row stay: the sum of squares is the warp's
  const bool exists = place.row < side.count;
  const int32_t row = exists ? place.row : 0, batch_head = sizes.first + place.head;
  const int64_t number = int64_t{place.head} * side.count + row;
  const In* x = side.rows.at(batch_head / sizes.H, batch_head % sizes.H, row);
  const T zeros[kLaneColumns] = {};
  T square = 0;
  for (int32_t first = place.column; first < sizes.D; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(sizes.D, first);
    In part[kLaneColumns];
    load_columns<aligned>(x + first, columns, part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) square += static_cast<T>(part[c]) * static_cast<T>(part[c]);
    if (exists) store_columns<aligned>(zeros, columns, side.sums + number * sizes.D + first);
  }
  square = sum_of_lanes(square, lane_bits);
  if (exists && place.lane == 0) side.inverse_length[number] = square > 0 ? 1 / sqrt(square) : 0;
}

// Takes the sums, times scale, through the normalisation of the rows.
template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads)
    finish_kernel(Side<In> side, Sizes sizes, Accumulator<In> scale, int lane_bits, Rows<In> out) {
  using T = Accumulator<In>;
  const RowPlace place(side.count, lane_bits, 1);
  const bool exists = place.row < side.count;
  const int32_t row = exists ? place.row : 0, batch_head = sizes.first + place.head;
  const int32_t batch = batch_head / sizes.H, head = batch_head % sizes.H;
  const int64_t number = int64_t{place.head} * side.count + row;
  const In* x = side.rows.at(batch, head, row);
  const T* sums = side.sums + number * sizes.D;
  const T inverse = side.inverse_length[number];
  In part[kLaneColumns];
  T sum[kLaneColumns], product = 0;
  for (int32_t first = place.column; first < sizes.D; first += kLaneColumns << lane_bits) {
    load_columns<aligned>(x + first, columns_of_lane(sizes.D, first), part);
    load_columns<aligned>(sums + first, columns_of_lane(sizes.D, first), sum);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) product += sum[c] * (static_cast<T>(part[c]) * inverse);
  }
  product = sum_of_lanes(product, lane_bits);
  if (!exists) return;
  In* to = out.at(batch, head, row);
  for (int32_t first = place.column; first < sizes.D; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(sizes.D, first);
    load_columns<aligned>(x + first, columns, part);
    load_columns<aligned>(sums + first, columns, sum);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c)
      part[c] = static_cast<In>((sum[c] - product * (static_cast<T>(part[c]) * inverse)) * scale * inverse);
    store_columns<aligned>(part, columns, to + first);
  }
}

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
template <class In, class F>
__device__ void add_slice(const HeadSide<In>& side, const int32_t* order, int count, int first_column, int columns,
                          const F& f) {
  for (int i = threadIdx.x; i < kTile * kSlice; i += kThreads) {
    const int r = i / kSlice, c = i % kSlice;
    if (r < count && first_column + c < columns)
      row_at(side.sums, order[r], side.sum_bytes)[first_column + c] += f(r, c);
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

// Below, tensor cores multiply 16-bit rows of up to kColumns columns, in pieces of 16 bytes. Rows are multiplied as
// they are; what has to be rounded to 16 bits on the way, the weights and V or G, takes up the inverse lengths before:
// its errors are then as if some weights were off by a rounding, and the normalisation's gradient, which cancels most
// of the sums where rows are alike, cancels most of them too.

// Half's range is small: numbers are rounded at a power of two, which brings the largest to 1..2.
template <class In>
struct Power {
  float up, down;

  __device__ explicit Power(float largest) {
    if constexpr (std::is_same_v<In, Half>) {
      const int exponent = min(max(__float_as_int(largest) >> 23, 1), 253);
      up = __int_as_float((254 - exponent) << 23);
      down = __int_as_float(exponent << 23);
    } else {
      up = down = 1;
    }
  }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int other = kWarp / 2; other > 0; other /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, other));
  return x;
}

// Adds to two floats, `offset` floats behind an address that is aligned to their size, unless there are none: in two
// instructions, which a branch or an addition would double.
template <int offset>
__device__ __forceinline__ void add_two(float* to, float x, float y, bool exists) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0; @p red.relaxed.gpu.global.add.v2.f32 [%0 + %4], {%1, %2}; }"
      :
      : "l"(__cvta_generic_to_global(to)), "f"(x), "f"(y), "r"(uint32_t{exists}), "n"(offset * sizeof(float)));
#else
  if (!exists) return;
  atomicAdd(to + offset, x);
  atomicAdd(to + offset + 1, y);
#endif
}

// Calls f<0>(), f<1>() and so on.
template <int count, class F>
__device__ __forceinline__ void for_numbers(const F& f) {
  [&]<int... number>(std::integer_sequence<int, number...>) {
    (f.template operator()<number>(), ...);
  }(std::make_integer_sequence<int, count>{});
}

// The thread's lane, as a number that the compiler knows nothing about: it would compute what depends on the lane for
// all kinds of buckets before the loop over these, and run out of registers.
__device__ __forceinline__ uint32_t lane_in_bucket() {
  uint32_t lane = threadIdx.x % kWarp;
  asm volatile("" : "+r"(lane));
  return lane;
}

// 16-bit rows in shared memory. Pieces change places by row, so that those of eight rows fall into different banks.
template <int kColumns>
struct Matrix {
  static constexpr int kPieces = kColumns / 8;
  unsigned char* data;

  __device__ __forceinline__ void* piece(uint32_t row, uint32_t piece) const {
    return data + (row * kPieces + (piece ^ (row % 8))) * 16;
  }
};

// Up to 16 rows of a bucket's one side in lanes 0..15, and of the other in lanes 16..31. Past the last there is the
// last again, at inverse length zero: it has an address, if nothing to add.
struct PickedRows {
  int32_t row;
  float inverse_length;

  template <class In>
  __device__ __forceinline__ PickedRows(uint32_t lane, const HeadSide<In>& side, Span span,
                                        const HeadSide<In>& other_side, Span other_span) {
    const HeadSide<In>& mine = lane < kTile ? side : other_side;
    const Span rows = lane < kTile ? span : other_span;
    const int place = lane % kTile;
    row = __ldg(mine.order + rows.first + min(place, rows.count - 1));
    inverse_length = place < rows.count ? __ldg(mine.inverse_length + row) : 0;
  }

  __device__ __forceinline__ int32_t at(int lane) const { return __shfl_sync(kAllLanes, row, lane); }
};

// The gradients or values of `count` picked rows, a lane's being g and g + 8: pieces t, t + 4 and so on. Products of
// rows may take columns in any order, if all rows do: two registers are a step of 16 columns of all four lanes.
template <int kColumns>
struct Fragments {
  uint32_t rows[2][kColumns / 32][4];

  template <class In>
  __device__ __forceinline__ Fragments(uint32_t lane, const HeadSide<In>& side, const PickedRows& picked,
                                       int first_lane, int count, int columns) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const In* from = row_at(side.others, picked.at(first_lane + g + 8 * half), side.other_bytes) + 8 * t;
#pragma unroll
      for (int i = 0; i < kColumns / 32; ++i) {
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (g + 8 * half < count && 32 * i + 8 * t < columns)
          piece = __ldg(reinterpret_cast<const uint4*>(from + 32 * i));
        rows[half][i][0] = piece.x;
        rows[half][i][1] = piece.y;
        rows[half][i][2] = piece.z;
        rows[half][i][3] = piece.w;
      }
    }
  }

  __device__ __forceinline__ void left(uint32_t (&a)[4], int i, int step) const {
    a[0] = rows[0][i][2 * step];
    a[1] = rows[1][i][2 * step];
    a[2] = rows[0][i][2 * step + 1];
    a[3] = rows[1][i][2 * step + 1];
  }
};

// The weights of picked rows, 16 x 16, times the inverse lengths of the right ones: as the left matrix of a product.
template <class In>
struct Weights {
  uint32_t a[4];
  // what the product is to be multiplied by
  float scale;

  template <int kColumns>
  __device__ __forceinline__ Weights(uint32_t lane, const Fragments<kColumns>& left, const Fragments<kColumns>& right,
                                     const PickedRows& picked, int first_right_lane) {
    float w[2][4] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i)
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t rows[4];
        left.left(rows, i, step);
#pragma unroll
        for (int n = 0; n < 2; ++n)
          multiply_add<In>(w[n], rows, {right.rows[n][i][2 * step], right.rows[n][i][2 * step + 1]});
      }
    const int t = lane % 4;
    float largest = 0;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float inverse = __shfl_sync(kAllLanes, picked.inverse_length, first_right_lane + 8 * n + 2 * t + i);
        w[n][i] *= inverse;
        w[n][i + 2] *= inverse;
        if constexpr (std::is_same_v<In, Half>) largest = max(largest, max(fabsf(w[n][i]), fabsf(w[n][i + 2])));
      }
    if constexpr (std::is_same_v<In, Half>) largest = warp_max(largest);
    const Power<In> power(largest);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = pack<In>(w[i / 2][i % 2 * 2] * power.up, w[i / 2][i % 2 * 2 + 1] * power.up);
    scale = power.down;
  }
};

// Copies `count` of the picked rows that 16 lanes have to a matrix, zero past the last row and column.
template <int kColumns, class In>
__device__ __forceinline__ void copy_rows(uint32_t lane, Matrix<kColumns> to, const HeadSide<In>& side,
                                          const PickedRows& picked, int first_lane, int count, int columns) {
  constexpr int kPieces = kColumns / 8;
  const int piece = lane % kPieces;
  const In* rows = side.rows + (piece * 8 < columns ? piece * 8 : 0);
  const uint32_t row_bytes = side.row_bytes;
  if (piece * 8 >= columns) count = 0;
#pragma unroll
  for (int i = 0; i < kTile * kPieces / kWarp; ++i) {
    const int r = (i * kWarp + lane) / kPieces;
    copy_ahead<16>(to.piece(r, piece), row_at(rows, picked.at(first_lane + r), row_bytes), r >= count);
  }
}

// sums = the weights times columns 16 * pair .. 16 * pair + 15 of a matrix of 16 rows; without the scale.
template <int kColumns, class In>
__device__ __forceinline__ void multiply_rows(uint32_t lane, float (&sums)[2][4], const Weights<In>& weights,
                                              Matrix<kColumns> rows, int pair) {
  uint32_t b[4];
  load_matrices<true>(b, rows.piece(lane % 16, 2 * pair ^ lane / 16));
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    multiply_add<In>(sums[n], weights.a, {b[2 * n], b[2 * n + 1]});
  }
}

// The sums of `count` picked rows, a lane's being those of g and g + 8 from column 2t on.
struct PickedSums {
  float* row[2];
  bool exists[2];

  template <class In>
  __device__ __forceinline__ PickedSums(uint32_t lane, const HeadSide<In>& side, const PickedRows& picked,
                                        int first_lane, int count) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = row_at(side.sums, picked.at(first_lane + g + 8 * half), side.sum_bytes) + 2 * t;
      exists[half] = g + 8 * half < count;
    }
    wait_for_launches_before();
  }

  // Adds to columns 16 * pair .. 16 * pair + 15.
  template <int pair>
  __device__ __forceinline__ void add(const float (&sums)[2][4], float scale, int columns) const {
    for_numbers<4>([&]<int number>() {
      constexpr int n = number / 2, half = number % 2, column = 16 * pair + 8 * n;
      add_two<column>(row[half], sums[n][2 * half] * scale, sums[n][2 * half + 1] * scale,
                      exists[half] && column < columns);
    });
  }
};

// Adds a bucket of up to 16 rows a side. A warp has it, with the memory of two matrices of 16 rows.
template <int kColumns, class In>
__device__ __forceinline__ void add_small_bucket(const HeadSide<In>& queries, Span query_span,
                                                 const HeadSide<In>& keys, Span key_span, const Sizes& sizes,
                                                 unsigned char* memory) {
  const Matrix<kColumns> query_rows{memory}, key_rows{memory + kTile * kColumns * sizeof(In)};
  const uint32_t lane = lane_in_bucket();
  const PickedRows picked(lane, queries, query_span, keys, key_span);
  // all have read what was here before
  __syncwarp();
  copy_rows(lane, query_rows, queries, picked, 0, query_span.count, sizes.D);
  copy_rows(lane, key_rows, keys, picked, kTile, key_span.count, sizes.D);
  const Fragments<kColumns> grads(lane, queries, picked, 0, query_span.count, sizes.Dv);
  const Fragments<kColumns> values(lane, keys, picked, kTile, key_span.count, sizes.Dv);
  // both ways rather than one and its transpose: the products cost less than moving it between lanes
  const Weights<In> by_query(lane, grads, values, picked, kTile), by_key(lane, values, grads, picked, 0);
  const PickedSums query_sums(lane, queries, picked, 0, query_span.count);
  const PickedSums key_sums(lane, keys, picked, kTile, key_span.count);
  wait_for_copies();
  __syncwarp();
  for_numbers<kColumns / 16>([&]<int pair>() {
    if (16 * pair >= sizes.D) return;
    float sums[2][4];
    multiply_rows(lane, sums, by_query, key_rows, pair);
    query_sums.template add<pair>(sums, by_query.scale, sizes.D);
    multiply_rows(lane, sums, by_key, query_rows, pair);
    key_sums.template add<pair>(sums, by_key.scale, sizes.D);
  });
}

// Adds a bucket's part of the sums of up to 16 of one side's rows. A warp has them, with the memory of a matrix of 16
// rows.
template <int kColumns, class In>
__device__ __forceinline__ void add_pairs_of_tile(const HeadSide<In>& targets, Span target_span,
                                                  const HeadSide<In>& sources, Span source_span, const Sizes& sizes,
                                                  unsigned char* memory) {
  const Matrix<kColumns> source_rows{memory};
  uint32_t lane = lane_in_bucket();
  PickedRows picked(lane, targets, target_span, sources, source_span);
  const Fragments<kColumns> target_others(lane, targets, picked, 0, target_span.count, sizes.Dv);
  float sums[kColumns / 16][2][4] = {};
  while (true) {
    __syncwarp();
    copy_rows(lane, source_rows, sources, picked, kTile, source_span.count, sizes.D);
    const Fragments<kColumns> source_others(lane, sources, picked, kTile, source_span.count, sizes.Dv);
    const Weights<In> weights(lane, target_others, source_others, picked, kTile);
    wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair)
      if (16 * pair < sizes.D) {
        float some[2][4];
        multiply_rows(lane, some, weights, source_rows, pair);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[pair][n][i] += some[n][i] * weights.scale;
      }
    source_span = {source_span.first + kTile, source_span.count - kTile};
    if (source_span.count <= 0) break;
    lane = lane_in_bucket();
    picked = PickedRows(lane, targets, target_span, sources, source_span);
  }
  const PickedSums target_sums(lane, targets, picked, 0, target_span.count);
  for_numbers<kColumns / 16>([&]<int pair>() { target_sums.template add<pair>(sums[pair], 1, sizes.D); });
}

// The numbers of a piece, times a factor.
template <class In>
__device__ __forceinline__ uint4 scaled(const uint4& piece, float factor) {
  const auto scale = [&](uint32_t bits) {
    In pair[2];
    memcpy(pair, &bits, sizeof(bits));
    return pack<In>(static_cast<float>(pair[0]) * factor, static_cast<float>(pair[1]) * factor);
  };
  return make_uint4(scale(piece.x), scale(piece.y), scale(piece.z), scale(piece.w));
}

// add_through_product on tensor cores. The product is kept as two 16-bit numbers an element: one alone would be off
// in directions that the rows do not have, which the normalisation's gradient does not cancel.
template <int kColumns, class In>
__device__ __forceinline__ void add_through_product(const HeadSide<In>& targets, Span target_span,
                                                    const HeadSide<In>& sources, Span source_span, const Sizes& sizes,
                                                    unsigned char* memory) {
  constexpr int kPieces = kColumns / 8, kRows = 4096 / kColumns, kDown = kColumns / 64, kAcross = kColumns / 32;
  const uint32_t lane = lane_in_bucket();
  const int warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const Matrix<kColumns> others{memory}, rows{memory + kRows * kColumns * sizeof(In)};
  // of the product, a warp has a quarter of the rows and half of the columns
  const int first_row = warp / 2 * (kColumns / 4), first_piece = warp % 2 * (kPieces / 2);
  float product[kDown][kAcross][2][4] = {};
  for (int from = 0; from < source_span.count; from += kRows) {
    const int count = min(kRows, source_span.count - from);
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
      const int r = i / kPieces, piece = i % kPieces;
      uint4 other = make_uint4(0, 0, 0, 0), row = other;
      if (r < count) {
        const int32_t number = sources.order[source_span.first + from + r];
        const In* other_row = row_at(sources.others, number, sources.other_bytes);
        const In* row_itself = row_at(sources.rows, number, sources.row_bytes);
        // of the inverse length, the rows take up a power of two, which they do without an error
        const float inverse = sources.inverse_length[number];
        const float power = 2 * __int_as_float(__float_as_int(inverse) & 0x7f800000);
        if (piece * 8 < sizes.Dv)
          other = scaled<In>(*reinterpret_cast<const uint4*>(other_row + piece * 8),
                             power > 0 ? inverse / power : 0);
        if (piece * 8 < sizes.D)
          row = scaled<In>(*reinterpret_cast<const uint4*>(row_itself + piece * 8), power);
      }
      *static_cast<uint4*>(others.piece(r, piece)) = other;
      *static_cast<uint4*>(rows.piece(r, piece)) = row;
    }
    __syncthreads();
    for (int r = 0; r < count; r += kTile) {
      uint32_t a[kDown][4], b[4];
#pragma unroll
      for (int down = 0; down < kDown; ++down)
        load_matrices<true>(a[down], others.piece(r + lane / 16 * 8 + lane % 8,
                                                  first_row / 8 + 2 * down + lane / 8 % 2));
#pragma unroll
      for (int across = 0; across < kAcross; ++across) {
        load_matrices<true>(b, rows.piece(r + lane % 16, first_piece + 2 * across + lane / 16));
#pragma unroll
        for (int down = 0; down < kDown; ++down)
#pragma unroll
          for (int n = 0; n < 2; ++n) multiply_add<In>(product[down][across][n], a[down], {b[2 * n], b[2 * n + 1]});
      }
    }
  }

  __syncthreads();
  float largest = 0;
  if constexpr (std::is_same_v<In, Half>) {
#pragma unroll
    for (int down = 0; down < kDown; ++down)
#pragma unroll
      for (int across = 0; across < kAcross; ++across)
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = max(largest, fabsf(product[down][across][i / 4][i % 4]));
    float* shared = reinterpret_cast<float*>(memory);
    largest = warp_max(largest);
    if (lane == 0) shared[warp] = largest;
    __syncthreads();
    for (int other = 0; other < kWarps; ++other) largest = max(largest, shared[other]);
    __syncthreads();
  }
  const Power<In> power(largest);
  const Matrix<kColumns> high{memory}, low{memory + kColumns * kColumns * sizeof(In)};
#pragma unroll
  for (int down = 0; down < kDown; ++down)
#pragma unroll
    for (int across = 0; across < kAcross; ++across)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = first_row + 16 * down + 8 * half + g, piece = first_piece + 2 * across + n;
          float x[2], rounded[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            x[i] = product[down][across][n][2 * half + i] * power.up;
            rounded[i] = static_cast<float>(static_cast<In>(x[i]));
          }
          static_cast<uint32_t*>(high.piece(r, piece))[t] = pack<In>(rounded[0], rounded[1]);
          static_cast<uint32_t*>(low.piece(r, piece))[t] = pack<In>(x[0] - rounded[0], x[1] - rounded[1]);
        }
  __syncthreads();

  for (int tile = warp; tile * kTile < target_span.count; tile += kWarps) {
    const Span span{target_span.first + tile * kTile, target_span.count - tile * kTile};
    const PickedRows picked(lane, targets, span, targets, span);
    const Fragments<kColumns> left(lane, targets, picked, 0, span.count, sizes.Dv);
    const PickedSums target_sums(lane, targets, picked, 0, span.count);
    for_numbers<kColumns / 16>([&]<int pair>() {
      if (16 * pair >= sizes.D) return;
      float sums[2][4] = {};
#pragma unroll
      for (int i = 0; i < kColumns / 32; ++i)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t a[4], b[4];
          left.left(a, i, step);
          // the rows in the order of the fragments' columns
          const int r = 32 * i + 4 * step + lane % 8 / 2 * 8 + lane / 8 % 2 * 2 + lane % 2;
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            load_matrices<true>(b, (part == 0 ? high : low).piece(r, 2 * pair ^ lane / 16));
#pragma unroll
            for (int n = 0; n < 2; ++n) multiply_add<In>(sums[n], a, {b[2 * n], b[2 * n + 1]});
          }
        }
      target_sums.template add<pair>(sums, power.down, sizes.D);
    });
  }
}

// add_buckets_kernel on tensor cores, where rows have up to kColumns columns, a multiple of 8, and are aligned to 16
// bytes.
template <class In, int kColumns>
__global__ void __launch_bounds__(kThreads, kColumns == 64 ? 2 : 1)
    add_buckets_mma_kernel(Side<In> query_side, Side<In> key_side, Sizes sizes, int32_t hash) {
  let_next_launch_start();
  unsigned char* memory = shared_memory<unsigned char>();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  unsigned char* warp_memory = memory + warp * (2 * kTile * kColumns * sizeof(In));
  // in shared memory they take no registers
  HeadSide<In>* sides = reinterpret_cast<HeadSide<In>*>(memory + kWarps * 2 * kTile * kColumns * sizeof(In));
  if (threadIdx.x < 2)
    sides[threadIdx.x] =
        HeadSide<In>(threadIdx.x == 0 ? query_side : key_side, sizes, blockIdx.x / sizes.head_blocks, hash);
  __syncthreads();
  const int32_t begin = static_cast<int32_t>(blockIdx.x % sizes.head_blocks) * sizes.block_codes;
  const int32_t end = min(begin + sizes.block_codes, sizes.table_size);
  // the warp whose turn it is
  int turn = 0;
  for (int32_t first = begin; first < end; first += kWarp) {
    Span query_span = {0, 0}, key_span = {0, 0};
    if (first + lane < end) {
      query_span = span_of(sides[0], first + lane);
      key_span = span_of(sides[1], first + lane);
    }
    const int largest = query_span.count == 0 || key_span.count == 0 ? 0 : max(query_span.count, key_span.count);
    const auto from_lane = [](const Span& span, int source) {
      return Span{__shfl_sync(kAllLanes, span.first, source), __shfl_sync(kAllLanes, span.count, source)};
    };
    const auto from_either = [](bool first, const Span& a, const Span& b) {
      return Span{first ? a.first : b.first, first ? a.count : b.count};
    };
    const uint32_t small = __ballot_sync(kAllLanes, largest > 0 && largest <= kTile);
    const int before = __popc(small & ~(kAllLanes << lane));
    const bool is_mine = (small >> lane & 1) != 0 && (turn + before) % kWarps == warp;
    for (uint32_t left = __ballot_sync(kAllLanes, is_mine); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      add_small_bucket<kColumns>(sides[0], from_lane(query_span, source), sides[1], from_lane(key_span, source), sizes,
                                 warp_memory);
    }
    turn = (turn + __popc(small)) % kWarps;
    for (uint32_t left = __ballot_sync(kAllLanes, largest > kTile && largest <= kColumns); left != 0;
         left &= left - 1) {
      const int source = __ffs(left) - 1;
      const Span q = from_lane(query_span, source), k = from_lane(key_span, source);
      const int query_tiles = (q.count + kTile - 1) / kTile, tiles = query_tiles + (k.count + kTile - 1) / kTile;
      for (int tile = (warp - turn + kWarps) % kWarps; tile < tiles; tile += kWarps) {
        const bool is_query = tile < query_tiles;
        const int skipped = (is_query ? tile : tile - query_tiles) * kTile;
        const Span target_span = from_either(is_query, q, k), source_span = from_either(is_query, k, q);
        add_pairs_of_tile<kColumns>(sides[!is_query], {target_span.first + skipped, target_span.count - skipped},
                                    sides[is_query], source_span, sizes, warp_memory);
      }
      turn = (turn + tiles) % kWarps;
    }
    // with so many rows, the products of all pairs would cost more
    for (uint32_t left = __ballot_sync(kAllLanes, largest > kColumns); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const Span q = from_lane(query_span, source), k = from_lane(key_span, source);
#pragma unroll 1
      for (int side = 0; side < 2; ++side)
        add_through_product<kColumns>(sides[side], from_either(side == 0, q, k), sides[1 - side],
                                      from_either(side == 0, k, q), sizes, memory);
      __syncthreads();
    }
  }
  // also where there was nothing to add: a launch ends after those before it
  wait_for_launches_before();
}

// What add_buckets_mma_kernel asks of rows.
template <class In>
bool fits_tensor_cores(const Tensor& rows) {
  return sizeof(In) == 2 && rows.size(3) <= 128 && aligned(rows_of<In>(rows), rows.size(3));
}

template <class In>
void add_buckets(const Device& device, const Side<In>& queries, const Side<In>& keys, const Sizes& sizes, int32_t hash,
                 bool tensor_cores) {
  const int64_t blocks = int64_t{sizes.heads} * sizes.head_blocks;
  const auto add = [&](auto kernel, size_t shared_bytes) {
    // but for the additions, a hash function does not need those before it
    if (hash > 0)
      launch<true>(device, kernel, blocks, kThreads, shared_bytes, queries, keys, sizes, hash);
    else
      launch(device, kernel, blocks, kThreads, shared_bytes, queries, keys, sizes, hash);
  };
  if constexpr (sizeof(In) == 2) {
    const auto mma_bytes = [](int columns) {
      return kWarps * 2 * kTile * columns * sizeof(In) + 2 * sizeof(HeadSide<In>);
    };
    if (tensor_cores && std::max(sizes.D, sizes.Dv) <= 64) return add(add_buckets_mma_kernel<In, 64>, mma_bytes(64));
    if (tensor_cores) return add(add_buckets_mma_kernel<In, 128>, mma_bytes(128));
  }
  add(add_buckets_kernel<In>, sizeof(Scratch<Accumulator<In>>));
}

template <class In>
void sampled_backward(const Device& device, const Tensor& grad, const Tensor& query, const Tensor& key,
                      const Tensor& value, const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
                      const Tensor& grad_query, const Tensor& grad_key) {
  using T = Accumulator<In>;
  const int64_t H = query.size(1), all_heads = count_of(query.size(0) * H, "heads"), m = query_codes.size(2);
  const int64_t N = count_of(query.size(2), "queries"), M = count_of(key.size(2), "keys");
  const int64_t D = query.size(3), Dv = value.size(3), table_size = int64_t{1} << hash_code_len;
  const int64_t head_bytes = (N + M) * ((D + Dv) * int64_t{sizeof(In)} + D * int64_t{sizeof(T)});
  const int64_t heads_sorted = heads_at_once(all_heads, m, (N + M) / 2, hash_code_len);
  const int64_t heads_added = std::clamp<int64_t>(kCacheBytes / head_bytes, 1, heads_sorted);
  // a launch has the blocks that run at a time, or more
  const int64_t resident = kResidentBlocks * device.num_multiprocessors();
  const int64_t block_codes = std::min(divide_up(heads_added * table_size, resident), kBlockCodes);
  const int64_t head_blocks = divide_up(table_size, block_codes);
  const bool tensor_cores = fits_tensor_cores<In>(grad) && fits_tensor_cores<In>(query) &&
                            fits_tensor_cores<In>(key) && fits_tensor_cores<In>(value);

  const ScalarType sum_dtype = length_dtype(query);
  const Tensor lengths = empty_tensor(query, {heads_added, N + M}, sum_dtype);
  const Tensor sums = empty_tensor(query, {heads_added, N + M, D}, sum_dtype);
  T *inverse_length = static_cast<T*>(lengths.mutable_data_ptr()), *sum = static_cast<T*>(sums.mutable_data_ptr());
  for (int64_t sorted = 0; sorted < all_heads; sorted += heads_sorted) {
    const int64_t sorted_end = std::min(sorted + heads_sorted, all_heads);
    const SortedCodes query_order = sort_codes(device, query_codes, sorted, sorted_end - sorted, hash_code_len);
    const SortedCodes key_order = sort_codes(device, key_codes, sorted, sorted_end - sorted, hash_code_len);
    for (int64_t first = sorted; first < sorted_end; first += heads_added) {
      const int64_t heads = std::min(heads_added, sorted_end - first);
      const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
      const Sizes sizes{narrow(first), narrow(heads), narrow(H), narrow(m), narrow(D), narrow(Dv),
                        narrow(table_size), narrow(head_blocks), narrow(block_codes)};
      const auto side = [&](const Tensor& rows, const Tensor& others, const SortedCodes& order, T* lengths, T* sums) {
        const int64_t list = (first - sorted) * m, count = rows.size(2);
        return Side<In>{rows_of<In>(rows),
                        rows_of<In>(others),
                        row_bytes_of<In>(rows),
                        row_bytes_of<In>(others),
                        lengths,
                        sums,
                        static_cast<const int32_t*>(order.order.const_data_ptr()) + list * count,
                        static_cast<const int32_t*>(order.starts.const_data_ptr()) + list * (table_size + 1),
                        narrow(count)};
      };
      const Side<In> queries = side(query, grad, query_order, inverse_length, sum);
      const Side<In> keys = side(key, value, key_order, inverse_length + heads * N, sum + heads * N * D);
      const int lane_bits = lane_bits_for(D);
      for (const Side<In>& rows : {queries, keys})
        launch(device, aligned(rows.rows, D) ? prepare_kernel<In, true> : prepare_kernel<In, false>,
               heads * blocks_of_head(rows.count, lane_bits), kRowThreads, 0, rows, sizes, lane_bits);
      for (int32_t hash = 0; hash < m; ++hash) add_buckets(device, queries, keys, sizes, hash, tensor_cores);
      const T scale = static_cast<T>(hash_code_len) / (2 * m);
      const auto finish = [&](const Side<In>& side, const Rows<In>& out) {
        const bool whole = aligned(side.rows, D) && aligned(out, D);
        launch(device, whole ? finish_kernel<In, true> : finish_kernel<In, false>,
               heads * blocks_of_head(side.count, lane_bits), kRowThreads, 0, side, sizes, scale, lane_bits, out);
      };
      finish(queries, mutable_rows_of<In>(grad_query));
      finish(keys, mutable_rows_of<In>(grad_key));
    }
  }
}

std::tuple<Tensor, Tensor> sampled_attention_backward_cuda(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                           const Tensor& value, const Tensor& query_codes,
                                                           const Tensor& key_codes, int64_t hash_code_len) {
  check_sampled_backward(grad, query, key, value, query_codes, key_codes, hash_code_len);
  const Device device(value);
  const int64_t B = query.size(0), H = query.size(1), D = query.size(3);
  Tensor grad_query = empty_heads_last(query, B, H, query.size(2), D);
  Tensor grad_key = empty_heads_last(key, B, H, key.size(2), D);
  if (grad_query.numel() == 0 && grad_key.numel() == 0) return {grad_query, grad_key};
  const Tensor rows[] = {dense_rows(grad), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    sampled_backward<decltype(element)>(device, rows[0], rows[1], rows[2], rows[3], query_codes, key_codes,
                                        hash_code_len, grad_query, grad_key);
  });
  return {grad_query, grad_key};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("sampled_attention_backward", TORCH_BOX(&sampled_attention_backward_cuda));
}

}  // namespace yoso
