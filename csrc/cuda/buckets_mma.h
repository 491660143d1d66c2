// The kernel of sampled_attention_backward.cu that multiplies buckets, on tensor cores: 16-bit rows of up to kColumns
// columns, in pieces of 16 bytes. Rows are multiplied as they are; what has to be rounded to 16 bits on the way, the
// weights and V or G, takes up the inverse lengths before: its errors are then as if some weights were off by a
// rounding, and the normalisation's gradient, which cancels most of the sums where rows are alike, cancels most of them
// too.
//
// A block copies the rows of as many buckets as fit to shared memory, each once, and multiplies them. Buckets that do
// not fit go through products, whose cost is linear in their size.
#pragma once

#include "buckets.h"
#include "tile_rows.h"

namespace yoso {
namespace {

// How much memory a block has: what every GPU has, half of a multiprocessor's 228 KB, or all of that.
enum class PlanSize { kSmall, kMiddle, kLarge };

// How a block has rows of up to kColumns_ columns. Where buckets are small, several blocks fit a multiprocessor, and
// one multiplies while another waits for its rows; 24 tiles keep eight warps busy more evenly than 20. Where buckets
// are large, a block has all of the shared memory, for two batches, of which one is multiplied while the other comes,
// or one that is twice as large; a warp has two tiles of 16 rows of a bucket at a time, for which it reads the rows
// that they meet once.
template <int kColumns_, PlanSize kSize>
struct MmaPlan {
  static constexpr bool kIsLarge = kSize == PlanSize::kLarge;
  static constexpr int kColumns = kColumns_, kStages = kIsLarge ? 2 : 1, kParts = kIsLarge && kColumns <= 64 ? 2 : 1;
  // of a side of a batch, and of one that has all of the memory
  static constexpr int kTiles = kColumns > 64 ? 5 : kIsLarge ? 11 : kSize == PlanSize::kMiddle ? 12 : 10;
  static constexpr int kMostTiles = kStages * kTiles;
  static constexpr int kRows = kTiles * kPicked, kMostRows = kMostTiles * kPicked;
  static constexpr int kWarps = kParts == 2 ? 12 : 8, kThreads = kWarps * kWarp, kMostCodes = kMostItemCodes;
  // of a multiprocessor, as registers go
  static constexpr int kBlocks = kIsLarge || kColumns > 64 ? 1 : 2;
};

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

// 16-bit rows in shared memory. Pieces change places by row, so that those of eight rows fall into different banks: of
// neighbours, or with kApart, also of two neighbours of each of four times eight rows, in the order of Fragments.
template <int kColumns, bool kApart = false>
struct Matrix {
  static constexpr int kRowBytes = kColumns * 2;
  unsigned char* data;

  // the piece last, which takes one instruction where others of the row are known
  __device__ __forceinline__ unsigned char* piece(uint32_t row, uint32_t piece) const {
    const uint32_t order = (kApart ? row ^ row / 8 * 2 : row) % 8;
    return data + ((row * kRowBytes + order * 16) ^ piece * 16);
  }
  // Where that is in shared memory. The row's piece p ^ i is at the address ^ 16 i, and piece p of a row that is 8 i
  // further on 8 i kRowBytes behind.
  __device__ __forceinline__ uint32_t address(uint32_t row, uint32_t piece) const {
    return unknown(static_cast<uint32_t>(__cvta_generic_to_shared(this->piece(row, piece))));
  }
};

// The gradients or values of 16 rows, a lane's being g and g + 8: pieces t, t + 4 and so on. Products of rows may take
// columns in any order, if all rows do: two registers are a step of 16 columns of all four lanes.
template <int kColumns>
struct Fragments {
  uint32_t rows[2][kColumns / 32][4];

  // Of the lane's rows.
  template <class In>
  __device__ __forceinline__ Fragments(const In* const (&from)[2], int columns) {
    const int first = threadIdx.x % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kColumns / 32; ++i) {
        // that what is past the last column is loaded too lets all loads be under way at once
        const bool exists = 32 * i + first < columns;
        const uint4 piece = __ldg(reinterpret_cast<const uint4*>(from[half] + (exists ? 32 * i + first : 0)));
        rows[half][i][0] = exists ? piece.x : 0;
        rows[half][i][1] = exists ? piece.y : 0;
        rows[half][i][2] = exists ? piece.z : 0;
        rows[half][i][3] = exists ? piece.w : 0;
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
// And how many of them a thread has a piece of on its way.
constexpr int kProductRowsAhead = 4;

// multiply_through_product on tensor cores. The product is kept as two 16-bit numbers an element: one alone would be
// off in directions that the rows do not have, which the normalisation's gradient does not cancel.
template <class Plan, class In>
__device__ __forceinline__ void multiply_through_product(const HeadSide<In>& targets, Span target_span,
                                                         const HeadSide<In>& sources, Span source_span,
                                                         const Sizes& sizes, unsigned char* memory) {
  constexpr int kColumns = Plan::kColumns, kPieces = kColumns / 8, kRows = kProductRows<kColumns>;
  // the product is of eight warps
  constexpr int kDown = kColumns / 64, kAcross = kColumns / 32, kWarpsAcross = 2, kProductWarps = 4 * kWarpsAcross;
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
    // several rows are on their way at a time
    constexpr int kStep = Plan::kThreads / kPieces, kAhead = kProductRowsAhead;
    const int piece = threadIdx.x % kPieces, rows_in_all = tiles_of(count) * kPicked;
#pragma unroll 1
    for (int first = threadIdx.x / kPieces; first < rows_in_all; first += kAhead * kStep) {
      int32_t number[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int r = first + j * kStep;
        number[j] = r < count ? __ldg(sources.order + source_span.first + from + r) : -1;
      }
      uint4 other[kAhead] = {}, row[kAhead] = {};
      float inverse[kAhead] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (number[j] < 0) continue;
        inverse[j] = __ldg(sources.inverse_length + number[j]);
        if (piece * 8 < sizes.Dv)
          other[j] =
              __ldg(reinterpret_cast<const uint4*>(row_at(sources.others, number[j], sources.other_bytes)) + piece);
        if (piece * 8 < sizes.D)
          row[j] = __ldg(reinterpret_cast<const uint4*>(row_at(sources.rows, number[j], sources.row_bytes)) + piece);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int r = first + j * kStep;
        if (r >= rows_in_all) break;
        // of the inverse length, the rows take up a power of two, which they do without an error
        const float power = 2 * __int_as_float(__float_as_int(inverse[j]) & 0x7f800000);
        *reinterpret_cast<uint4*>(others.piece(r, piece)) = scaled<In>(other[j], power > 0 ? inverse[j] / power : 0);
        *reinterpret_cast<uint4*>(rows.piece(r, piece)) = scaled<In>(row[j], power);
      }
    }
    __syncthreads();
    for (int r = warp < kProductWarps ? 0 : count; r < count; r += kPicked) {
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
    for (int other = 0; other < Plan::kWarps; ++other) largest = max(largest, shared[other]);
    __syncthreads();
  }
  const Power<In> power(largest);
  const Matrix<kColumns, true> high{memory}, low{memory + kColumns * kColumns * sizeof(In)};
#pragma unroll
  for (int down = 0; down < kDown; ++down)
#pragma unroll
    for (int across = 0; across < kAcross; ++across)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (warp >= kProductWarps) break;
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

  // the lane's row of a tile's 16; past the last there is the last again, which has an address
  const auto number_of = [&](int tile) {
    return __ldg(targets.order + target_span.first + min(tile * kPicked + lane % kPicked, target_span.count - 1));
  };
  int32_t next_number = warp * kPicked < target_span.count ? number_of(warp) : 0;
  for (int tile = warp; tile * kPicked < target_span.count; tile += Plan::kWarps) {
    const int32_t number = next_number;
    if ((tile + Plan::kWarps) * kPicked < target_span.count) next_number = number_of(tile + Plan::kWarps);
    const auto lane_row = [&](int half) { return __shfl_sync(kAllLanes, number, g + 8 * half); };
    const In* other[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      // others without columns have no address, and the row is as good where none is taken
      other[half] = sizes.Dv > 0 ? row_at(targets.others, lane_row(half), targets.other_bytes)
                                 : row_at(targets.rows, lane_row(half), targets.row_bytes);
    const Fragments<kColumns> left(other, sizes.Dv);
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
      const int32_t mine = lane_row(half);
      to.addend[half] = row_at(targets.addends, mine, targets.addend_bytes);
      to.inverse_length[half] = __ldg(targets.inverse_length + mine);
      to.exists[half] = tile * kPicked + g + 8 * half < target_span.count;
      row[half] = row_at(targets.rows, mine, targets.row_bytes) + 2 * t;
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
template <class Plan>
struct Batch {
  BucketTile tiles[2][Plan::kMostTiles];
  Task tasks[2][Plan::kMostTiles];
  // -1 where there is none
  int32_t row[2][Plan::kMostRows];
  // and the codes that they are of, none where the next bucket goes through products
  int32_t num_tiles[2], num_tasks[2], num_codes;
  // where their item is, and the first code there; no item behind the last batch
  int32_t item, first_code;

  // Whether no other batch's rows are in the block's memory.
  __device__ __forceinline__ bool is_alone() const {
    return num_codes == 0 || max(num_tiles[0], num_tiles[1]) > Plan::kTiles;
  }

  // Of the rows of both sides, the i-th: its side and place.
  __device__ __forceinline__ int2 place_of(int i) const {
    const int queries = num_tiles[0] * kPicked;
    return i < queries ? make_int2(0, i) : make_int2(1, i - queries);
  }
  __device__ __forceinline__ bool has_row(int i) const { return i < (num_tiles[0] + num_tiles[1]) * kPicked; }

  // Makes tiles of an item's buckets from `first` on, of as many as there is room for. A warp does this.
  template <class In>
  __device__ __forceinline__ void choose_buckets(const Item<In>& item, int first) {
    constexpr int kTaskBits = 16, kTileMask = (1 << kTaskBits) - 1;
    const int lane = threadIdx.x % kWarp, code = first + lane, count = item.num_codes;
    // of tiles and, in the upper bits, of tasks
    int rows[2] = {0, 0}, begin[2], end[2];
    if (code < count)
      for (int side = 0; side < 2; ++side) rows[side] = item.starts[side][code + 1] - item.starts[side][code];
    const bool exists = min(rows[0], rows[1]) > 0;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      // one more than fit is as many as any more
      const int tiles = exists ? min(tiles_of(rows[side]), Plan::kMostTiles + 1) : 0;
      const int own = tiles | (tiles + Plan::kParts - 1) / Plan::kParts << kTaskBits;
      end[side] = own;
#pragma unroll
      for (int delta = 1; delta < kWarp; delta *= 2) {
        const int lower = __shfl_up_sync(kAllLanes, end[side], delta);
        if (lane >= delta) end[side] += lower;
      }
      begin[side] = end[side] - own;
    }
    const int needed = max(end[0] & kTileMask, end[1] & kTileMask);
    const bool fits = needed <= (__shfl_sync(kAllLanes, needed, 0) > Plan::kTiles ? Plan::kMostTiles : Plan::kTiles);
    const uint32_t left_out = __ballot_sync(kAllLanes, code >= count || !fits);
    const int taken = left_out == 0 ? kWarp : __ffs(left_out) - 1;
    if (lane == 0) num_codes = taken;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int all = __shfl_sync(kAllLanes, end[side], max(taken - 1, 0));
      if (lane == 0) {
        num_tiles[side] = taken == 0 ? 0 : all & kTileMask;
        num_tasks[side] = taken == 0 ? 0 : all >> kTaskBits;
      }
      if (lane >= taken) continue;
      const int first_tile = begin[side] & kTileMask, end_tile = end[side] & kTileMask;
      const int other = begin[1 - side] & kTileMask, end_other = end[1 - side] & kTileMask;
      for (int tile = first_tile; tile < end_tile; ++tile) {
        const int skipped = (tile - first_tile) * kPicked;
        tiles[side][tile] = {item.starts[side][code] + skipped, min(rows[side] - skipped, kPicked)};
      }
      Task* task = tasks[side] + (begin[side] >> kTaskBits);
      for (int tile = first_tile; tile < end_tile; tile += Plan::kParts)
        *task++ = {tile, min(end_tile - tile, Plan::kParts), other, end_other - other};
    }
  }

  // Copies which rows there are, ahead of when it is waited for. The block does this.
  template <class In>
  __device__ __forceinline__ void copy_row_numbers(const Item<In>& item) {
    for (int i = threadIdx.x; has_row(i); i += Plan::kThreads) {
      const int2 place = place_of(i);
      const BucketTile& tile = tiles[place.x][place.y / kPicked];
      const int r = place.y % kPicked;
      int32_t* to = row[place.x] + place.y;
      if (r < tile.count)
        copy_ahead<4>(to, item.sides[place.x].order + tile.first + r, false);
      else
        *to = -1;
    }
  }
};

// Rows in shared memory: those of a batch from a place on.
template <class In, class Plan>
struct BatchRows {
  static constexpr int kColumns = Plan::kColumns;
  static_assert(kProductRows<kColumns> <= 2 * Plan::kMostRows);
  // of queries, or keys, and their gradients, or values
  alignas(256) In rows[2][Plan::kMostRows * kColumns], others[2][Plan::kMostRows * kColumns];
  alignas(8) float inverse_length[2][Plan::kMostRows];

  __device__ Matrix<kColumns> rows_of(int side) { return {reinterpret_cast<unsigned char*>(rows[side])}; }
  __device__ Matrix<kColumns> others_of(int side) { return {reinterpret_cast<unsigned char*>(others[side])}; }

  // Copies the rows of a batch. The block does this, and waits and meets before it reads them.
  __device__ __forceinline__ void copy(int first_row, const HeadSide<In>* sides, const Batch<Plan>& batch,
                                       const Sizes& sizes) {
    constexpr int kPieces = kColumns / 8, kStep = Plan::kThreads / kPieces;
    static_assert(kStep % 8 == 0, "a step leaves the order of pieces as it is");
    const int piece = threadIdx.x % kPieces, first_place = threadIdx.x / kPieces;
    const bool no_rows = piece * 8 >= sizes.D, no_others = piece * 8 >= sizes.Dv;
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const In* rows_from = sides[side].rows + (no_rows ? 0 : piece * 8);
      const In* others_from = sides[side].others + (no_others ? 0 : piece * 8);
      const uint32_t row_bytes = sides[side].row_bytes, other_bytes = sides[side].other_bytes;
      const int count = batch.num_tiles[side] * kPicked;
      const int32_t* number = batch.row[side] + first_place;
      unsigned char* to_rows = rows_of(side).piece(first_row + first_place, piece);
      unsigned char* to_others = others_of(side).piece(first_row + first_place, piece);
#pragma unroll 3
      for (int place = first_place; place < count; place += kStep) {
        const int row = *number;
        copy_ahead<16>(to_others, row_at(others_from, max(row, 0), other_bytes), row < 0 || no_others);
        copy_ahead<16>(to_rows, row_at(rows_from, max(row, 0), row_bytes), row < 0 || no_rows);
        number += kStep;
        to_rows += kStep * Matrix<kColumns>::kRowBytes;
        to_others += kStep * Matrix<kColumns>::kRowBytes;
      }
    }
    for (int i = threadIdx.x; batch.has_row(i); i += Plan::kThreads) {
      const int2 place = batch.place_of(i);
      const int row = batch.row[place.x][place.y];
      copy_ahead<4>(inverse_length[place.x] + first_row + place.y, sides[place.x].inverse_length + max(row, 0),
                    row < 0);
    }
  }
};

// A block's shared memory.
template <class In, class Plan>
struct MmaMemory {
  // of one batch rows are multiplied, of the next they are on their way, of the third their numbers are, and the last
  // is being chosen; each may be of another item
  static constexpr int kBatches = 4;
  BatchRows<In, Plan> rows;
  Batch<Plan> batches[kBatches];
  Item<In> items[kBatches];
  // of the batch to be chosen: its item, the first code, and the next item's number
  int32_t item, next_code, next_number;

  // Begins: there is no item before the first. A thread does this.
  __device__ void clear(int32_t first_number) {
    item = 0;
    next_code = 0;
    items[0].num_codes = 0;
    next_number = first_number;
  }

  // Chooses a batch, of the next item where there is none left of this one. items: how many there are, and next, how
  // many blocks have taken. A warp does this.
  __device__ __forceinline__ void choose(Batch<Plan>& batch, const Side<In>& query_side, const Side<In>& key_side,
                                         const Sizes& sizes, int32_t all_items, int32_t* next) {
    const bool is_first = threadIdx.x % kWarp == 0, begins = next_code >= items[item].num_codes;
    const int32_t number = next_number, first_code = begins ? 0 : next_code;
    const int32_t chosen = begins ? (item + 1) % kBatches : item;
    // all lanes have read what the first one writes
    __syncwarp();
    if (begins && number >= all_items) {
      if (is_first) batch.item = -1;
      return;
    }
    // known when the batch is
    int32_t number_after = number;
    if (begins) {
      if (is_first) number_after = atomicAdd(next, 1);
      items[chosen].begin(number, query_side, key_side, sizes);
    }
    batch.choose_buckets(items[chosen], first_code);
    if (is_first) {
      batch.item = item = chosen;
      batch.first_code = first_code;
      next_code = first_code + max(batch.num_codes, 1);
      next_number = number_after;
    }
    __syncwarp();
  }
};

// What the rows of a task's first tiles of `side` get from their bucket, of a batch whose rows are from first_row on. A
// warp computes it.
template <int tiles, class In, class Plan, int kParts, int kPairs>
__device__ __forceinline__ void multiply_tiles(BatchRows<In, Plan>& memory, int first_row, const Task& task, int side,
                                               float (&sums)[kParts][kPairs][2][4]) {
  constexpr int kColumns = Plan::kColumns, kRowBytes = Matrix<kColumns>::kRowBytes;
  const uint32_t lane = lane_in_bucket();
  const int t = lane % 4, first = first_row + task.other * kPicked;
  uint32_t left[tiles][kColumns / 16][4];
  const uint32_t target = memory.others_of(side).address(first_row + task.tile * kPicked + lane % 16, lane / 16);
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

// Stores what a tile's rows of `side` get; it begins at a place in the memory, and at `rows` in the row numbers, which
// are -1 where there is none. A warp does this.
template <class In, class Plan, int kPairs>
__device__ __forceinline__ void store_tile(BatchRows<In, Plan>& memory, const HeadSide<In>& head_side,
                                           const int32_t* rows, int side, int place, int columns,
                                           float (&sums)[kPairs][2][4]) {
  const uint32_t lane = lane_in_bucket();
  const int first = place + lane / 4;
  AddendRows<In> to;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t number = rows[lane / 4 + 8 * half];
    to.addend[half] = row_at(head_side.addends, max(number, 0), head_side.addend_bytes);
    to.inverse_length[half] = memory.inverse_length[side][first + 8 * half];
    to.exists[half] = number >= 0;
  }
  uint32_t own[kPairs][4] = {};
  if constexpr (sizeof(Addend<In>) == 2) {
    const uint32_t own_rows = memory.rows_of(side).address(place + lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) load_matrices<false>(own[i], own_rows ^ i * 32);
  }
  to.store(lane, sums, columns, [&](int half, int piece) { return own[piece / 2][piece % 2 * 2 + half]; });
}

// multiply_buckets_kernel on tensor cores. items: how many there are, and next, how many blocks have taken.
template <class In, class Plan>
__global__ void __launch_bounds__(Plan::kThreads, Plan::kBlocks)
    multiply_buckets_mma_kernel(Side<In> query_side, Side<In> key_side, Sizes sizes, int32_t items, int32_t* next) {
  using Memory = MmaMemory<In, Plan>;
  auto& memory = *shared_memory<Memory>();
  const int warp = threadIdx.x / kWarp;
  const auto batch_at = [&](uint32_t number) -> Batch<Plan>& { return memory.batches[number % Memory::kBatches]; };
  const auto choose = [&](uint32_t number) {
    if (warp == 0) memory.choose(batch_at(number), query_side, key_side, sizes, items, next);
  };
  const auto copy_row_numbers = [&](uint32_t number) {
    Batch<Plan>& batch = batch_at(number);
    if (batch.item >= 0) batch.copy_row_numbers(memory.items[batch.item]);
  };
  const auto first_row_of = [&](uint32_t number) {
    return batch_at(number).is_alone() ? 0 : number % Plan::kStages * Plan::kRows;
  };
  const auto copy_rows = [&](uint32_t number) {
    const Batch<Plan>& batch = batch_at(number);
    if (batch.item >= 0) memory.rows.copy(first_row_of(number), memory.items[batch.item].sides, batch, sizes);
  };
  if (threadIdx.x == 0) memory.clear(atomicAdd(next, 1));
  __syncthreads();
  for (uint32_t number = 0; number < 3; ++number) choose(number);
  __syncthreads();
  copy_row_numbers(0);
  copy_row_numbers(1);
  wait_for_copies();
  __syncthreads();
  if (batch_at(0).item >= 0 && !batch_at(0).is_alone()) copy_rows(0);

#pragma unroll 1
  for (uint32_t number = 0; batch_at(number).item >= 0; ++number) {
    const Batch<Plan>& batch = batch_at(number);
    const auto prepare = [&] {
      copy_row_numbers(number + 2);
      choose(number + 3);
    };
    // while the rows come
    if (Plan::kStages == 1) prepare();
    wait_for_copies();
    // for all threads' copies, and until the batch before has been read
    __syncthreads();
    if (Plan::kStages > 1) {
      if (batch.is_alone()) {
        copy_rows(number);
        wait_for_copies();
        __syncthreads();
      } else if (!batch_at(number + 1).is_alone()) {
        copy_rows(number + 1);
      }
      prepare();
    }
    const Item<In>& item = memory.items[batch.item];
    if (batch.first_code == 0) item.clear_others(Plan::kWarps);
    if (batch.num_codes == 0) {
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        const auto span = [&](int side) {
          const int32_t* start = item.starts[side] + batch.first_code;
          return Span{start[0], start[1] - start[0]};
        };
        multiply_through_product<Plan>(item.sides[side], span(side), item.sides[1 - side], span(1 - side), sizes,
                                       reinterpret_cast<unsigned char*>(&memory.rows));
      }
    }
    const Batch<Plan>& tasks_of = batch_at(unknown(number));
    const int query_tasks = tasks_of.num_tasks[0], tasks = query_tasks + tasks_of.num_tasks[1];
    // the first warp, which chooses, comes last
    for (int i = Plan::kWarps - 1 - warp; i < tasks; i += Plan::kWarps) {
      const int side = i >= query_tasks;
      const Task task = batch_at(unknown(number)).tasks[side][i - side * query_tasks];
      const int first_row = first_row_of(unknown(number));
      float sums[Plan::kParts][Plan::kColumns / 16][2][4] = {};
      if (Plan::kParts == 1 || task.tiles == Plan::kParts)
        multiply_tiles<Plan::kParts>(memory.rows, first_row, task, side, sums);
      else
        multiply_tiles<1>(memory.rows, first_row, task, side, sums);
#pragma unroll
      for (int part = 0; part < Plan::kParts; ++part) {
        const int place = (task.tile + part) * kPicked;
        const Batch<Plan>& same = batch_at(unknown(number));
        if (part == 0 || part < task.tiles)
          store_tile(memory.rows, memory.items[same.item].sides[side], same.row[side] + place, side, first_row + place,
                     sizes.D, sums[part]);
      }
    }
    const uint32_t same = unknown(number);
    if (Plan::kStages == 1 || (batch_at(same).is_alone() && !batch_at(same + 1).is_alone())) {
      __syncthreads();
      copy_rows(same + 1);
    }
  }
}

}  // namespace
}  // namespace yoso
