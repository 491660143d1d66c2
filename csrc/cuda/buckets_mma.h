// The kernel of sampled_attention_backward.cu that multiplies buckets, on tensor cores: 16-bit rows of up to kColumns
// columns, in pieces of 16 bytes. Rows are multiplied as they are; what has to be rounded to 16 bits on the way, the
// weights and V or G, takes up the inverse lengths before: its errors are then as if some weights were off by a
// rounding, and the normalisation's gradient, which cancels most of the sums where rows are alike, cancels most of them
// too.
//
// Blocks copy the rows of as many buckets as fit to shared memory, each once, and multiply them. Buckets that do not
// fit go through products, whose cost is linear in their size.
//
// A warp has kParts tiles of 16 rows of a bucket at a time: with two, it reads the rows that they meet half as often,
// and has twice the registers, so that a block has half of the warps.
#pragma once

#include "buckets.h"
#include "tile_rows.h"

namespace yoso {
namespace {

// of a block
template <int kParts>
constexpr int kMmaThreads = 256 / kParts;
template <int kParts>
constexpr int kMmaWarps = kMmaThreads<kParts> / kWarp;

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

// How many tiles of kPicked rows there are.
__host__ __device__ constexpr int32_t tiles_of(int32_t rows) { return (rows + kPicked - 1) / kPicked; }

// 16-bit rows in shared memory. Pieces change places by row, so that those of eight rows fall into different banks.
template <int kColumns>
struct Matrix {
  static constexpr int kRowBytes = kColumns * 2;
  unsigned char* data;

  // the piece last, which takes one instruction where others of the row are known
  __device__ __forceinline__ unsigned char* piece(uint32_t row, uint32_t piece) const {
    return data + ((row * kRowBytes + row % 8 * 16) ^ piece * 16);
  }
  // Where that is in shared memory. The row's piece p ^ i is at the address ^ 16 i, and piece p of a row that is 8 i
  // further on 8 i kRowBytes behind.
  __device__ __forceinline__ uint32_t address(uint32_t row, uint32_t piece) const {
    return unknown(static_cast<uint32_t>(__cvta_generic_to_shared(this->piece(row, piece))));
  }
};

// The gradients or values of `count` picked rows, a lane's being g and g + 8: pieces t, t + 4 and so on. Products of
// rows may take columns in any order, if all rows do: two registers are a step of 16 columns of all four lanes.
template <int kColumns>
struct Fragments {
  uint32_t rows[2][kColumns / 32][4];

  template <class In>
  __device__ __forceinline__ Fragments(uint32_t lane, const HeadSide<In>& side, const PickedRows<float>& picked,
                                       int count, int columns) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const In* from = row_at(side.others, picked.at(g + 8 * half), side.other_bytes) + 8 * t;
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

// The numbers of a piece, times a factor.
template <class In>
__device__ __forceinline__ uint4 scaled(const uint4& piece, float factor) {
  const auto scale = [&](uint32_t bits) {
    const float2 pair = unpack<In>(bits);
    return pack<In>(pair.x * factor, pair.y * factor);
  };
  return make_uint4(scale(piece.x), scale(piece.y), scale(piece.z), scale(piece.w));
}

// How many rows of either side multiply_through_product copies to a block's memory at a time.
template <int kColumns>
constexpr int kProductRows = 16384 / kColumns;

// multiply_through_product on tensor cores. The product is kept as two 16-bit numbers an element: one alone would be
// off in directions that the rows do not have, which the normalisation's gradient does not cancel.
template <int kColumns, int kParts, class In>
__device__ __forceinline__ void multiply_through_product(const HeadSide<In>& targets, Span target_span,
                                                         const HeadSide<In>& sources, Span source_span,
                                                         const Sizes& sizes, unsigned char* memory) {
  constexpr int kPieces = kColumns / 8, kRows = kProductRows<kColumns>;
  constexpr int kDown = kColumns / 64, kAcross = kColumns / 32 * kParts, kWarpsAcross = 2 / kParts;
  const uint32_t lane = lane_in_bucket();
  const int warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const Matrix<kColumns> others{memory}, rows{memory + kRows * kColumns * sizeof(In)};
  // of the product, a warp has a quarter of the rows, and half or all of the columns
  const int first_row = warp / kWarpsAcross * (kColumns / 4);
  const int first_piece = warp % kWarpsAcross * (kPieces / kWarpsAcross);
  float product[kDown][kAcross][2][4] = {};
  for (int from = 0; from < source_span.count; from += kRows) {
    const int count = min(kRows, source_span.count - from);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < tiles_of(count) * kPicked * kPieces; i += kMmaThreads<kParts>) {
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
      *reinterpret_cast<uint4*>(others.piece(r, piece)) = other;
      *reinterpret_cast<uint4*>(rows.piece(r, piece)) = row;
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
    for (int other = 0; other < kMmaWarps<kParts>; ++other) largest = max(largest, shared[other]);
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
          reinterpret_cast<uint32_t*>(high.piece(r, piece))[t] = pack<In>(rounded[0], rounded[1]);
          reinterpret_cast<uint32_t*>(low.piece(r, piece))[t] = pack<In>(x[0] - rounded[0], x[1] - rounded[1]);
        }
  __syncthreads();

  for (int tile = warp; tile * kPicked < target_span.count; tile += kMmaWarps<kParts>) {
    const Span span{target_span.first + tile * kPicked, target_span.count - tile * kPicked};
    const PickedRows<float> picked(lane, targets, span, targets, span);
    const Fragments<kColumns> left(lane, targets, picked, span.count, sizes.Dv);
    float sums[kColumns / 16][2][4] = {};
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair)
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
            load_matrices<true>(b, (part == 0 ? high : low).piece(r, 2 * pair + lane / 16));
#pragma unroll
            for (int n = 0; n < 2; ++n) multiply_add<In>(sums[pair][n], a, {b[2 * n], b[2 * n + 1]});
          }
        }
    if constexpr (std::is_same_v<In, Half>)
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) sums[i / 8][i / 4 % 2][i % 4] *= power.down;
    AddendRows<In> to;
    const In* row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = g + 8 * half;
      to.addend[half] = row_at(targets.addends, picked.at(r), targets.addend_bytes);
      to.inverse_length[half] = __shfl_sync(kAllLanes, picked.inverse_length, r);
      to.exists[half] = r < span.count;
      row[half] = row_at(targets.rows, picked.at(r), targets.row_bytes) + 2 * t;
    }
    to.store(lane, sums, sizes.D, [&](int half, int piece) {
      return 8 * piece < sizes.D ? __ldg(reinterpret_cast<const uint32_t*>(row[half] + 8 * piece)) : 0;
    });
  }
}

// Up to 16 rows of a bucket's one side.
struct BucketTile {
  // in the order
  int32_t first, count;
};

// Tiles of a bucket that a warp has at a time, and where the other side's are: of either, the first, and how many.
struct Task {
  int32_t tile, tiles, other, others;
};

// The tiles that a block multiplies at a time.
template <int kTiles_, int kParts_>
struct Batch {
  static constexpr int kTiles = kTiles_, kParts = kParts_, kRows = kTiles * kPicked;
  BucketTile tiles[2][kTiles];
  Task tasks[2][kTiles];
  // -1 where there is none
  int32_t row[2][kRows];
  // and the codes that they are of, none where the next bucket goes through products
  int32_t num_tiles[2], num_tasks[2], num_codes;

  // Of the rows of both sides, the i-th: its side and place.
  __device__ __forceinline__ int2 place_of(int i) const {
    const int queries = num_tiles[0] * kPicked;
    return i < queries ? make_int2(0, i) : make_int2(1, i - queries);
  }
  __device__ __forceinline__ bool has_row(int i) const { return i < (num_tiles[0] + num_tiles[1]) * kPicked; }
};

// Some codes of a hash function of a head.
template <class In>
struct Item {
  static constexpr int kMostCodes = 128;
  HeadSide<In> sides[2];
  int32_t starts[2][kMostCodes + 1];
  // its codes, none past the last item
  int32_t num_codes;
  // its part of the rows that are in no bucket
  Span in_none[2];

  // A warp does this.
  __device__ __forceinline__ void begin(int32_t number, int32_t end, const Side<In>& query_side,
                                        const Side<In>& key_side, const Sizes& sizes) {
    const int32_t lane = lane_in_bucket(), items = sizes.items(), part = number % items;
    const int32_t first_code = part * sizes.item_codes;
    const int32_t codes = number < end ? min(sizes.item_codes, sizes.table_size - first_code) : 0;
    if (lane == 0) num_codes = codes;
    if (codes > 0 && lane < 2) {
      sides[lane] = HeadSide<In>(lane == 0 ? query_side : key_side, sizes, number / items);
      in_none[lane] = sides[lane].in_none(sizes, part, items);
    }
    __syncwarp();
    if (codes == 0) return;
    for (int code = lane; code <= codes; code += kWarp)
#pragma unroll
      for (int side = 0; side < 2; ++side) starts[side][code] = __ldg(sides[side].starts + first_code + code);
    __syncwarp();
  }

  // Clears what rows get that have none of the other side in their bucket, or are in no bucket. So many warps of the
  // block do this.
  __device__ __forceinline__ void clear_others(int warps) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (int side = 0; side < 2; ++side) sides[side].clear(in_none[side], warp, warps);
    for (int first = 0; first < num_codes; first += kWarp) {
      const int code = first + lane;
      int rows[2] = {0, 0};
      if (code < num_codes)
        for (int side = 0; side < 2; ++side) rows[side] = starts[side][code + 1] - starts[side][code];
      for (uint32_t left = __ballot_sync(kAllLanes, (rows[0] > 0) != (rows[1] > 0)); left != 0; left &= left - 1) {
        const int alone = first + __ffs(left) - 1, side = starts[0][alone] == starts[0][alone + 1];
        const int32_t* start = starts[side] + alone;
        sides[side].clear({start[0], start[1] - start[0]}, warp, warps);
      }
    }
  }

  // Makes tiles of the buckets from `first` on, of as many as there is room for. A warp does this.
  template <class Tiles>
  __device__ __forceinline__ void choose_buckets(int first, Tiles& batch) const {
    constexpr int kTaskBits = 16, kTileMask = (1 << kTaskBits) - 1;
    const int lane = threadIdx.x % kWarp, code = first + lane, count = num_codes;
    // of tiles and, in the upper bits, of tasks
    int rows[2] = {0, 0}, begin[2], end[2];
    if (code < count)
      for (int side = 0; side < 2; ++side) rows[side] = starts[side][code + 1] - starts[side][code];
    const bool exists = min(rows[0], rows[1]) > 0;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      // one more than fit is as many as any more
      const int tiles = exists ? min(tiles_of(rows[side]), Tiles::kTiles + 1) : 0;
      const int own = tiles | (tiles + Tiles::kParts - 1) / Tiles::kParts << kTaskBits;
      end[side] = own;
#pragma unroll
      for (int delta = 1; delta < kWarp; delta *= 2) {
        const int lower = __shfl_up_sync(kAllLanes, end[side], delta);
        if (lane >= delta) end[side] += lower;
      }
      begin[side] = end[side] - own;
    }
    const bool fits = max(end[0] & kTileMask, end[1] & kTileMask) <= Tiles::kTiles;
    const uint32_t left_out = __ballot_sync(kAllLanes, code >= count || !fits);
    const int taken = left_out == 0 ? kWarp : __ffs(left_out) - 1;
    if (lane == 0) batch.num_codes = taken;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int all = __shfl_sync(kAllLanes, end[side], max(taken - 1, 0));
      if (lane == 0) {
        batch.num_tiles[side] = taken == 0 ? 0 : all & kTileMask;
        batch.num_tasks[side] = taken == 0 ? 0 : all >> kTaskBits;
      }
      if (lane >= taken) continue;
      const int first_tile = begin[side] & kTileMask, end_tile = end[side] & kTileMask;
      const int other = begin[1 - side] & kTileMask, others = (end[1 - side] & kTileMask) - other;
      for (int tile = first_tile; tile < end_tile; ++tile) {
        const int skipped = (tile - first_tile) * kPicked;
        batch.tiles[side][tile] = {starts[side][code] + skipped, min(rows[side] - skipped, kPicked)};
      }
      Task* task = batch.tasks[side] + (begin[side] >> kTaskBits);
      for (int tile = first_tile; tile < end_tile; tile += Tiles::kParts)
        *task++ = {tile, min(end_tile - tile, Tiles::kParts), other, others};
    }
  }

  // Copies which rows a batch has, ahead of when it is waited for. The block does this.
  template <class Tiles>
  __device__ __forceinline__ void copy_row_numbers(Tiles& batch) const {
    for (int i = threadIdx.x; batch.has_row(i); i += kMmaThreads<Tiles::kParts>) {
      const int2 place = batch.place_of(i);
      const BucketTile& tile = batch.tiles[place.x][place.y / kPicked];
      const int r = place.y % kPicked;
      int32_t* to = batch.row[place.x] + place.y;
      if (r < tile.count)
        copy_ahead<4>(to, sides[place.x].order + tile.first + r, false);
      else
        *to = -1;
    }
  }
};

// A block's shared memory.
template <class In, int kColumns, int kParts>
struct MmaMemory {
  static constexpr int kTiles = kColumns == 64 ? 11 : 5, kRows = kTiles * kPicked;
  static_assert(kProductRows<kColumns> <= 2 * kRows);
  using Tiles = Batch<kTiles, kParts>;
  // of queries, or keys, and their gradients, or values
  alignas(256) In rows[2][kRows * kColumns], others[2][kRows * kColumns];
  alignas(8) float inverse_length[2][kRows];
  // each beside the next one; of items, their numbers too
  Item<In> items[2];
  Tiles batches[2];
  int32_t numbers[2];

  __device__ Matrix<kColumns> rows_of(int side) { return {reinterpret_cast<unsigned char*>(rows[side])}; }
  __device__ Matrix<kColumns> others_of(int side) { return {reinterpret_cast<unsigned char*>(others[side])}; }

  // Copies the rows of a batch. The block does this, and waits and meets before it reads them.
  __device__ __forceinline__ void copy_rows(const HeadSide<In>* sides, const Tiles& batch, const Sizes& sizes) {
    constexpr int kPieces = kColumns / 8, kStep = kMmaThreads<kParts> / kPieces;
    const int piece = threadIdx.x % kPieces, first_place = threadIdx.x / kPieces;
    const bool no_rows = piece * 8 >= sizes.D, no_others = piece * 8 >= sizes.Dv;
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const In* rows_from = sides[side].rows + (no_rows ? 0 : piece * 8);
      const In* others_from = sides[side].others + (no_others ? 0 : piece * 8);
      const uint32_t row_bytes = sides[side].row_bytes, other_bytes = sides[side].other_bytes;
      const int count = batch.num_tiles[side] * kPicked;
      const int32_t* number = batch.row[side] + first_place;
      unsigned char* const to_rows = rows_of(side).piece(first_place, piece);
      unsigned char* const to_others = others_of(side).piece(first_place, piece);
#pragma unroll 3
      for (int step = 0; step < (kRows - 1) / kStep + 1; ++step) {
        if (first_place + step * kStep >= count) break;
        // a step leaves the order of pieces as it is
        const uint32_t skipped = step * kStep * Matrix<kColumns>::kRowBytes;
        const int row = number[step * kStep];
        copy_ahead<16>(to_others + skipped, row_at(others_from, max(row, 0), other_bytes), row < 0 || no_others);
        copy_ahead<16>(to_rows + skipped, row_at(rows_from, max(row, 0), row_bytes), row < 0 || no_rows);
      }
    }
    for (int i = threadIdx.x; batch.has_row(i); i += kMmaThreads<kParts>) {
      const int2 place = batch.place_of(i);
      const int row = batch.row[place.x][place.y];
      inverse_length[place.x][place.y] = row < 0 ? 0 : __ldg(sides[place.x].inverse_length + row);
    }
  }
};

// What the rows of a task's first tiles of `side` get from their bucket. A warp computes it.
template <int tiles, class In, int kColumns, int kParts>
__device__ __forceinline__ void multiply_tiles(MmaMemory<In, kColumns, kParts>& memory, const Task& task, int side,
                                               float (&sums)[kParts][kColumns / 16][2][4]) {
  constexpr int kRowBytes = Matrix<kColumns>::kRowBytes;
  const uint32_t lane = lane_in_bucket();
  const int t = lane % 4, first = task.other * kPicked;
  uint32_t left[tiles][kColumns / 16][4];
  const uint32_t target = memory.others_of(side).address(task.tile * kPicked + lane % 16, lane / 16);
#pragma unroll
  for (int part = 0; part < tiles; ++part)
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i)
      load_matrices<false>(left[part][i], target + part * kPicked * kRowBytes ^ i * 32);
  uint32_t source = memory.others_of(1 - side).address(first + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  uint32_t row = memory.rows_of(1 - side).address(first + lane % 16, lane / 16);
  const float* inverse_length = memory.inverse_length[1 - side] + first + 2 * t;
#pragma unroll 1
  for (int remaining = task.others; remaining > 0; --remaining) {
    float w[tiles][2][4] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      uint32_t b[4];
      load_matrices<false>(b, source ^ i * 32);
#pragma unroll
      for (int part = 0; part < tiles; ++part)
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply_add<In>(w[part][n], left[part][i], {b[2 * n], b[2 * n + 1]});
    }
    float2 inverses[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) inverses[n] = *reinterpret_cast<const float2*>(inverse_length + 8 * n);
    uint32_t a[tiles][4];
    float down[tiles];
#pragma unroll
    for (int part = 0; part < tiles; ++part) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[part][n][i] *= i % 2 == 0 ? inverses[n].x : inverses[n].y;
          if constexpr (std::is_same_v<In, Half>) largest = max(largest, fabsf(w[part][n][i]));
        }
      if constexpr (std::is_same_v<In, Half>) largest = warp_max(largest);
      const Power<In> power(largest);
      down[part] = power.down;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[part][i] = pack<In>(w[part][i / 2][i % 2 * 2] * power.up, w[part][i / 2][i % 2 * 2 + 1] * power.up);
    }
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
      uint32_t b[4];
      load_matrices<true>(b, row ^ pair * 32);
#pragma unroll
      for (int part = 0; part < tiles; ++part)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float some[4] = {};
          auto& product = std::is_same_v<In, Half> ? some : sums[part][pair][n];
          multiply_add<In>(product, a[part], {b[2 * n], b[2 * n + 1]});
          if constexpr (std::is_same_v<In, Half>)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[part][pair][n][i] += some[i] * down[part];
        }
    }
    source += kPicked * kRowBytes;
    row += kPicked * kRowBytes;
    inverse_length += kPicked;
  }
}

// Stores what a tile's rows of `side` get, rows[r] being its r-th row's number, or -1 where there is none. A warp does
// this.
template <class In, int kColumns, int kParts>
__device__ __forceinline__ void store_tile(MmaMemory<In, kColumns, kParts>& memory, const HeadSide<In>& head_side,
                                           const int32_t* rows, int side, int tile, int columns,
                                           float (&sums)[kColumns / 16][2][4]) {
  const uint32_t lane = lane_in_bucket();
  const int first = tile * kPicked + lane / 4;
  AddendRows<In> to;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t number = rows[first + 8 * half];
    to.addend[half] = row_at(head_side.addends, max(number, 0), head_side.addend_bytes);
    to.inverse_length[half] = memory.inverse_length[side][first + 8 * half];
    to.exists[half] = number >= 0;
  }
  const Matrix<kColumns> own = memory.rows_of(side);
  to.store(lane, sums, columns, [&](int half, int piece) {
    return reinterpret_cast<const uint32_t*>(own.piece(first + 8 * half, piece))[lane % 4];
  });
}

// multiply_buckets_kernel on tensor cores, where rows have up to kColumns columns. items: how many there are, and next,
// how many blocks have taken.
template <class In, int kColumns, int kParts>
__global__ void __launch_bounds__(kMmaThreads<kParts>, kColumns == 64 ? 2 : 1)
    multiply_buckets_mma_kernel(Side<In> query_side, Side<In> key_side, Sizes sizes, int32_t items, int32_t* next) {
  using Memory = MmaMemory<In, kColumns, kParts>;
  using Tiles = typename Memory::Tiles;
  auto& memory = *shared_memory<Memory>();
  const int warp = threadIdx.x / kWarp;
  // Makes an item and its first batch.
  const auto begin_item = [&](int i, Tiles& batch) {
    Item<In>& item = memory.items[i];
    item.begin(memory.numbers[i], items, query_side, key_side, sizes);
    if (item.num_codes > 0) item.choose_buckets(0, batch);
  };
  if (threadIdx.x == 0)
    for (int32_t& number : memory.numbers) number = atomicAdd(next, 1);
  __syncthreads();
  if (warp == 0) begin_item(0, memory.batches[0]);
  __syncthreads();
  if (memory.items[0].num_codes == 0) return;
  memory.items[0].copy_row_numbers(memory.batches[0]);
  wait_for_copies();
  __syncthreads();

  for (int first = 0, this_item = 0, this_batch = 0;; this_batch ^= 1) {
    const Item<In>& item = memory.items[this_item];
    const Tiles& batch = memory.batches[this_batch];
    const int chosen = batch.num_codes, next_code = first + max(chosen, 1);
    const bool is_last = next_code >= item.num_codes;
    if (chosen > 0) {
      memory.copy_rows(item.sides, batch, sizes);
    } else {
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        const auto span = [&](int side) {
          const int32_t* start = item.starts[side] + first;
          return Span{start[0], start[1] - start[0]};
        };
        multiply_through_product<kColumns, kParts>(item.sides[side], span(side), item.sides[1 - side], span(1 - side),
                                                   sizes, reinterpret_cast<unsigned char*>(&memory));
      }
    }
    if (first == 0) item.clear_others(kMmaWarps<kParts>);
    // what comes next, while the rows do
    if (warp == 0) {
      Tiles& next_batch = memory.batches[unknown(this_batch ^ 1)];
      if (is_last)
        begin_item(unknown(this_item ^ 1), next_batch);
      else
        memory.items[unknown(this_item)].choose_buckets(next_code, next_batch);
    } else if (is_last && threadIdx.x == kWarp) {
      memory.numbers[this_item] = atomicAdd(next, 1);
    }
    wait_for_copies();
    __syncthreads();
    const Item<In>& next_item = memory.items[unknown(this_item ^ is_last)];
    if (next_item.num_codes > 0) next_item.copy_row_numbers(memory.batches[unknown(this_batch ^ 1)]);
    const int query_tasks = batch.num_tasks[0], tasks = query_tasks + batch.num_tasks[1];
    for (int i = warp; i < tasks; i += kMmaWarps<kParts>) {
      const int side = i >= query_tasks;
      const Task task = batch.tasks[side][i - side * query_tasks];
      float sums[kParts][kColumns / 16][2][4] = {};
      if (kParts == 1 || task.tiles == kParts)
        multiply_tiles<kParts>(memory, task, side, sums);
      else
        multiply_tiles<1>(memory, task, side, sums);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (part == 0 || part < task.tiles)
          store_tile(memory, memory.items[unknown(this_item)].sides[side],
                     memory.batches[unknown(this_batch)].row[side], side, task.tile + part, sizes.D, sums[part]);
    }
    wait_for_copies();
    // nobody reads the rows any longer
    __syncthreads();
    first = next_code;
    if (!is_last) continue;
    this_item ^= 1;
    if (memory.items[this_item].num_codes == 0) return;
    first = 0;
  }
}

}  // namespace
}  // namespace yoso
