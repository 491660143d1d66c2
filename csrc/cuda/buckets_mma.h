// The kernel of sampled_attention_backward.cu that adds buckets, on tensor cores: they multiply 16-bit rows of up to
// kColumns columns, in pieces of 16 bytes. Rows are multiplied as they are; what has to be rounded to 16 bits on the
// way, the weights and V or G, takes up the inverse lengths before: its errors are then as if some weights were off by
// a rounding, and the normalisation's gradient, which cancels most of the sums where rows are alike, cancels most of
// them too.
#pragma once

#include "buckets.h"
#include "mma.h"

namespace yoso {
namespace {

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

// Adds to two floats, `offset` floats behind an address that is aligned to their size. Not by atomicAdd, which does not
// know that the address is one of global memory: it would wait for an answer to tell it from shared memory's.
template <int offset>
__device__ __forceinline__ void add_two(float* to, float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0 + %3], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(to)), "f"(x), "f"(y), "n"(offset * sizeof(float)));
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0 + %3], %1; red.relaxed.gpu.global.add.f32 [%0 + %4], %2;"
               :
               : "l"(__cvta_generic_to_global(to)), "f"(x), "f"(y), "n"(offset * sizeof(float)),
                 "n"((offset + 1) * sizeof(float)));
#endif
}

// Calls f<0>(), f<1>() and so on.
template <int count, class F>
__device__ __forceinline__ void for_numbers(const F& f) {
  [&]<int... number>(std::integer_sequence<int, number...>) {
    (f.template operator()<number>(), ...);
  }(std::make_integer_sequence<int, count>{});
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

// The gradients or values of `count` picked rows, a lane's being g and g + 8: pieces t, t + 4 and so on. Products of
// rows may take columns in any order, if all rows do: two registers are a step of 16 columns of all four lanes.
template <int kColumns>
struct Fragments {
  uint32_t rows[2][kColumns / 32][4];

  template <class In>
  __device__ __forceinline__ Fragments(uint32_t lane, const HeadSide<In>& side, const PickedRows<float>& picked,
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
                                     const PickedRows<float>& picked, int first_right_lane) {
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
                                          const PickedRows<float>& picked, int first_lane, int count, int columns) {
  constexpr int kPieces = kColumns / 8;
  const int piece = lane % kPieces;
  const In* rows = side.rows + (piece * 8 < columns ? piece * 8 : 0);
  const uint32_t row_bytes = side.row_bytes;
  if (piece * 8 >= columns) count = 0;
#pragma unroll
  for (int i = 0; i < kPicked * kPieces / kWarp; ++i) {
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
  __device__ __forceinline__ PickedSums(uint32_t lane, const HeadSide<In>& side, const PickedRows<float>& picked,
                                        int first_lane, int count) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = row_at(side.sums, picked.at(first_lane + g + 8 * half), side.sum_bytes) + 2 * t;
      exists[half] = g + 8 * half < count;
    }
    wait_for_launches_before();
  }

  // Adds products, times scale. The compiler makes a branch of every addition that may be left out: there is one for
  // all of a row that has all columns.
  template <int pairs>
  __device__ __forceinline__ void add(const float (&sums)[pairs][2][4], float scale, int columns) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto add_first = [&](int count) {
        for_numbers<2 * pairs>([&]<int piece>() {
          const float* sum = &sums[piece / 2][piece % 2][2 * half];
          if (8 * piece < count) add_two<8 * piece>(row[half], sum[0] * scale, sum[1] * scale);
        });
      };
      if (!exists[half]) continue;
      if (columns == 16 * pairs)
        add_first(16 * pairs);
      else
        add_first(columns);
    }
  }
};

// Adds a bucket of up to 16 rows a side. A warp has it, with the memory of two matrices of 16 rows.
template <int kColumns, class In>
__device__ __forceinline__ void add_small_bucket(const HeadSide<In>& queries, Span query_span,
                                                 const HeadSide<In>& keys, Span key_span, const Sizes& sizes,
                                                 unsigned char* memory) {
  const Matrix<kColumns> query_rows{memory}, key_rows{memory + kPicked * kColumns * sizeof(In)};
  const uint32_t lane = lane_in_bucket();
  const PickedRows<float> picked(lane, queries, query_span, keys, key_span);
  // all have read what was here before
  __syncwarp();
  copy_rows(lane, query_rows, queries, picked, 0, query_span.count, sizes.D);
  copy_rows(lane, key_rows, keys, picked, kPicked, key_span.count, sizes.D);
  const Fragments<kColumns> grads(lane, queries, picked, 0, query_span.count, sizes.Dv);
  const Fragments<kColumns> values(lane, keys, picked, kPicked, key_span.count, sizes.Dv);
  // both ways rather than one and its transpose: the products cost less than moving it between lanes
  const Weights<In> by_query(lane, grads, values, picked, kPicked), by_key(lane, values, grads, picked, 0);
  const PickedSums query_sums(lane, queries, picked, 0, query_span.count);
  const PickedSums key_sums(lane, keys, picked, kPicked, key_span.count);
  wait_for_copies();
  __syncwarp();
  const auto add = [&](const Weights<In>& weights, const Matrix<kColumns>& rows, const PickedSums& to) {
    float sums[kColumns / 16][2][4];
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) multiply_rows(lane, sums[pair], weights, rows, pair);
    to.add(sums, weights.scale, sizes.D);
  };
  add(by_query, key_rows, query_sums);
  add(by_key, query_rows, key_sums);
}

// Adds a bucket's part of the sums of up to 16 of one side's rows. A warp has them, with the memory of a matrix of 16
// rows.
template <int kColumns, class In>
__device__ __forceinline__ void add_pairs_of_tile(const HeadSide<In>& targets, Span target_span,
                                                  const HeadSide<In>& sources, Span source_span, const Sizes& sizes,
                                                  unsigned char* memory) {
  const Matrix<kColumns> source_rows{memory};
  uint32_t lane = lane_in_bucket();
  PickedRows<float> picked(lane, targets, target_span, sources, source_span);
  const Fragments<kColumns> target_others(lane, targets, picked, 0, target_span.count, sizes.Dv);
  float sums[kColumns / 16][2][4] = {};
  while (true) {
    __syncwarp();
    copy_rows(lane, source_rows, sources, picked, kPicked, source_span.count, sizes.D);
    const Fragments<kColumns> source_others(lane, sources, picked, kPicked, source_span.count, sizes.Dv);
    const Weights<In> weights(lane, target_others, source_others, picked, kPicked);
    wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      float some[2][4];
      multiply_rows(lane, some, weights, source_rows, pair);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[pair][n][i] += some[n][i] * weights.scale;
    }
    source_span = {source_span.first + kPicked, source_span.count - kPicked};
    if (source_span.count <= 0) break;
    lane = lane_in_bucket();
    picked = PickedRows<float>(lane, targets, target_span, sources, source_span);
  }
  PickedSums(lane, targets, picked, 0, target_span.count).add(sums, 1, sizes.D);
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
    for (int r = 0; r < count; r += kPicked) {
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

  for (int tile = warp; tile * kPicked < target_span.count; tile += kWarps) {
    const Span span{target_span.first + tile * kPicked, target_span.count - tile * kPicked};
    const PickedRows<float> picked(lane, targets, span, targets, span);
    const Fragments<kColumns> left(lane, targets, picked, 0, span.count, sizes.Dv);
    float sums[kColumns / 16][2][4] = {};
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      if (16 * pair >= sizes.D) break;
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
            for (int n = 0; n < 2; ++n) multiply_add<In>(sums[pair][n], a, {b[2 * n], b[2 * n + 1]});
          }
        }
    }
    PickedSums(lane, targets, picked, 0, span.count).add(sums, power.down, sizes.D);
  }
}

// add_buckets_kernel on tensor cores, where rows have up to kColumns columns, a multiple of 8, and are aligned to 16
// bytes.
template <class In, int kColumns>
__global__ void __launch_bounds__(kThreads, kColumns == 64 ? 2 : 1)
    add_buckets_mma_kernel(Side<In> query_side, Side<In> key_side, Sizes sizes, int32_t hash) {
  let_next_launch_start();
  unsigned char* memory = shared_memory<unsigned char>();
  unsigned char* warp_memory = memory + threadIdx.x / kWarp * (2 * kPicked * kColumns * sizeof(In));
  // in shared memory they take no registers
  HeadSide<In>* sides = reinterpret_cast<HeadSide<In>*>(memory + kWarps * 2 * kPicked * kColumns * sizeof(In));
  if (threadIdx.x < 2)
    sides[threadIdx.x] =
        HeadSide<In>(threadIdx.x == 0 ? query_side : key_side, sizes, blockIdx.x / sizes.head_blocks, hash);
  __syncthreads();
  for_buckets(
      sides, sizes,
      // with so many rows, the products of all pairs would cost more
      [](const Span& q, const Span& k) { return max(q.count, k.count) > kColumns; },
      [&](const Span& q, const Span& k) { add_small_bucket<kColumns>(sides[0], q, sides[1], k, sizes, warp_memory); },
      [&](int side, const Span& targets, const Span& sources) {
        add_pairs_of_tile<kColumns>(sides[side], targets, sides[1 - side], sources, sizes, warp_memory);
      },
      [&](int side, const Span& targets, const Span& sources) {
        add_through_product<kColumns>(sides[side], targets, sides[1 - side], sources, sizes, memory);
      });
  // also where there was nothing to add: a launch ends after those before it
  wait_for_launches_before();
}

}  // namespace
}  // namespace yoso
