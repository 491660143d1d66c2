// The kernel of sampled_attention_backward.cu that multiplies large buckets on sm_90: bfloat16 rows of up to 64
// columns. What a row gets is its V or G times a product of the other side, G^T Q or V^T K, whose cost is linear in a
// bucket's size. A block is one warpgroup (wgmma.h). It goes through a bucket by chunks of 64 rows, while the next two
// chunks are on their way: the smaller side for its product, the other side for what it gets and for its product, and
// the smaller side again for what it gets.
//
// As in buckets_mma.h, V or G takes up the inverse lengths before it is rounded, and a product is kept as two 16-bit
// numbers an element.
#pragma once

#include "buckets.h"
#include "wgmma.h"

namespace yoso {
namespace {

struct WarpgroupPlan {
  // as many chunks are in shared memory, and of one more it is known which rows it has
  static constexpr int kChunks = 3, kNumbers = kChunks + 1;
  // those that the chunks are of, and the next
  static constexpr int kItems = kNumbers + 1;
  static constexpr int kThreads = kWarpgroup, kBlocks = 3, kMostCodes = 32;
  // of a bucket, on the average: with fewer, much of a chunk is empty
  static constexpr int64_t kFewestRows = 53;
};

// Up to kWgmmaRows rows of a bucket's one side.
struct Chunk {
  enum Kind : uint32_t {
    // there are no rows, as the item begins, or was the last
    kBegins = 1,
    kEnds = 2,
    // rows are for their product, of their side's first to last
    kAdds = 4,
    kIsFirst = 8,
    kIsLast = 16,
    // and for what they get
    kGets = 32,
    // of queries or keys
    kSide = 64,
  };
  uint32_t kind;
  // of the items in memory, and of the rows in the order
  int32_t item, first, count;

  __device__ __forceinline__ bool is(Kind some) const { return (kind & some) != 0; }
  __device__ __forceinline__ int side() const { return is(kSide); }
};

struct WarpgroupMemory {
  static constexpr int kChunks = WarpgroupPlan::kChunks, kNumbers = WarpgroupPlan::kNumbers;
  static constexpr int kItems = WarpgroupPlan::kItems, kMatrix = kWgmmaRows * kWgmmaColumns;
  using Item = yoso::Item<BFloat16, WarpgroupPlan::kMostCodes>;
  // of queries, or keys, and their gradients, or values
  alignas(kSwizzleBytes) BFloat16 rows[kChunks][kMatrix], others[kChunks][kMatrix];
  // the other side's, by columns of others: what 16 bits hold, and what they leave
  BFloat16 high[kMatrix], low[kMatrix];
  alignas(8) float inverse_length[kChunks][kWgmmaRows];
  int32_t row[kNumbers][kWgmmaRows];
  Item items[kItems];
  // of the item behind those
  int32_t next_number;

  // Begins the item behind those that there are, which has no codes if there is none. A warp does this. all_items: how
  // many there are, and next, how many blocks have taken.
  __device__ __forceinline__ void begin_item(int32_t item, const Side<BFloat16>& query_side,
                                             const Side<BFloat16>& key_side, const Sizes& sizes, int32_t all_items,
                                             int32_t* next) {
    const bool is_first = warp_lane() == 0;
    const int32_t number = next_number;
    // all lanes have read what the first one writes
    __syncwarp();
    if (number >= all_items) {
      if (is_first) items[item].num_codes = 0;
      return;
    }
    int32_t number_after = 0;
    if (is_first) number_after = atomicAdd(next, 1);
    items[item].begin(number, query_side, key_side, sizes);
    if (is_first) next_number = number_after;
  }

  // Copies which rows a chunk has.
  __device__ __forceinline__ void copy_numbers(const Chunk& chunk, int place) {
    if (chunk.count == 0 || threadIdx.x >= kWgmmaRows) return;
    copy_ahead<4>(row[place] + threadIdx.x, items[chunk.item].sides[chunk.side()].order + chunk.first + threadIdx.x,
                  threadIdx.x >= chunk.count);
  }

  // Copies a chunk's rows, of which it is known which they are; 0 behind the last.
  __device__ __forceinline__ void copy_rows(const Chunk& chunk, int place, int numbers_place, const Sizes& sizes) {
    if (chunk.count == 0) return;
    constexpr int kPieces = kSwizzledRowBytes / kPieceBytes, kStep = WarpgroupPlan::kThreads / kPieces;
    static_assert(kStep % 8 == 0, "a step leaves the order of pieces as it is");
    const auto& side = items[chunk.item].sides[chunk.side()];
    const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
    const bool no_rows = piece * 8 >= sizes.D, no_others = piece * 8 >= sizes.Dv;
    const BFloat16* const rows_from = side.rows + (no_rows ? 0 : piece * 8);
    const BFloat16* const others_from = side.others + (no_others ? 0 : piece * 8);
    const auto address = [&](BFloat16* matrix) {
      return static_cast<uint32_t>(__cvta_generic_to_shared(matrix)) + swizzled_piece(first, piece);
    };
    const uint32_t to_rows = address(rows[place]), to_others = address(others[place]);
    const uint32_t row_bytes = side.row_bytes, other_bytes = side.other_bytes;
    int32_t number[kWgmmaRows / kStep];
#pragma unroll
    for (int i = 0; i < kWgmmaRows / kStep; ++i) number[i] = row[numbers_place][first + i * kStep];
#pragma unroll
    for (int i = 0; i < kWgmmaRows / kStep; ++i) {
      const bool clear = first + i * kStep >= chunk.count;
      constexpr int kStepBytes = kStep * kSwizzledRowBytes;
      copy_ahead<16>(to_others + i * kStepBytes, row_at(others_from, number[i], other_bytes), clear || no_others);
      copy_ahead<16>(to_rows + i * kStepBytes, row_at(rows_from, number[i], row_bytes), clear || no_rows);
    }
    if (threadIdx.x < kWgmmaRows)
      copy_ahead<4>(inverse_length[place] + threadIdx.x, side.inverse_length + row[numbers_place][threadIdx.x],
                    threadIdx.x >= chunk.count);
  }
};

// a multiprocessor keeps 1 KB for each block beside what it asks for
static_assert(WarpgroupPlan::kBlocks * (sizeof(WarpgroupMemory) + 1024) <= 228 << 10, "a multiprocessor has 228 KB");

// Goes through the chunks of the items in memory.
class Chunks {
 public:
  __device__ Chunks() : item_(WarpgroupPlan::kItems - 1), code_(-1), left_(0), kind_(Chunk::kGets) {}

  __device__ __forceinline__ Chunk next(const WarpgroupMemory& memory) {
    uint32_t kind = 0;
    if (left_ == 0) {
      if (kind_ & Chunk::kAdds) {
        // of the smaller side for their product, of the other for both, and of the smaller side for what they get
        kind_ ^= kind_ & Chunk::kGets ? Chunk::kAdds : Chunk::kGets;
        change_sides();
      } else if (!find_bucket(memory.items[item_])) {
        return next_item(memory);
      }
      first_ = span_.first;
      left_ = span_.count;
      kind = Chunk::kIsFirst;
    }
    const Chunk chunk = {kind | kind_ | (left_ <= kWgmmaRows ? Chunk::kIsLast : 0), item_, first_,
                         min(left_, kWgmmaRows)};
    first_ += chunk.count;
    left_ -= chunk.count;
    return chunk;
  }

 private:
  __device__ __forceinline__ void change_sides() {
    const Span other = span_;
    span_ = other_span_;
    other_span_ = other;
    kind_ ^= Chunk::kSide;
  }

  // Goes on to the item's next bucket with rows of both sides, if there is one.
  __device__ __forceinline__ bool find_bucket(const WarpgroupMemory::Item& item) {
    while (++code_ < item.num_codes) {
      const auto span = [&](int side) {
        const int32_t* start = item.starts[side] + code_;
        return Span{start[0], start[1] - start[0]};
      };
      span_ = span(0);
      other_span_ = span(1);
      if (min(span_.count, other_span_.count) == 0) continue;
      kind_ = Chunk::kAdds;
      if (other_span_.count < span_.count) change_sides();
      return true;
    }
    return false;
  }

  // Goes on to before the next item's first bucket, or if there is no item stays behind the last bucket.
  __device__ __forceinline__ Chunk next_item(const WarpgroupMemory& memory) {
    const int32_t next = (item_ + 1) % WarpgroupPlan::kItems;
    if (memory.items[next].num_codes == 0) {
      --code_;
      return {Chunk::kEnds};
    }
    item_ = next;
    code_ = -1;
    return {Chunk::kBegins, next};
  }

  int32_t item_, code_;
  // of the bucket's sides, the one at hand and the other
  Span span_, other_span_;
  // of the rows that are left of a side
  int32_t first_, left_;
  uint32_t kind_;
};

// multiply_buckets_kernel by warpgroups. items: how many there are, and next, how many blocks have taken.
__global__ void __launch_bounds__(WarpgroupPlan::kThreads, WarpgroupPlan::kBlocks)
    multiply_buckets_by_warpgroups_kernel(Side<BFloat16> query_side, Side<BFloat16> key_side, Sizes sizes,
                                          int32_t items, int32_t* next) {
#if YOSO_HAS_WGMMA
  using Plan = WarpgroupPlan;
  constexpr int kSteps = kWgmmaRows / kWgmmaDepth, kPieces = kWgmmaColumns / 8;
  auto& memory = *shared_memory<WarpgroupMemory>();
  // the same in all of a warp's lanes, as the compiler is to know
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kWarp), 0);
  const int lane = warp_lane(), t = lane % 4, first_row = warp * 16 + lane / 4;
  if (threadIdx.x == 0) {
    memory.next_number = atomicAdd(next, 1);
    memory.items[Plan::kItems - 1].num_codes = 0;
  }
  __syncwarp();
  if (warp == 0) memory.begin_item(0, query_side, key_side, sizes, items, next);
  Chunks chunks;
  // the chunk at hand, and those behind it; none are the first
  Chunk chunk = {}, second = {}, third = {};
  WgmmaSums product = {};
  const uint64_t high = descriptor_of(memory.high), low = descriptor_of(memory.low);
  // of the chunk among those in shared memory
  int place = 0;
#pragma unroll 1
  for (uint32_t number = 0;; ++number, place = (place + 1) % Plan::kChunks) {
    // the same in all of a warp's lanes, as the compiler is to know
    chunk.kind = __shfl_sync(kAllLanes, chunk.kind, 0);
    if (chunk.is(Chunk::kEnds)) break;
    // for its rows, and the numbers of the third's
    wait_for_groups<1>();
    show_products();
    __syncthreads();
    const Chunk fourth = chunks.next(memory);
    memory.copy_numbers(fourth, (number + 3) % Plan::kNumbers);
    commit_copies();
    memory.copy_rows(third, (place + 2) % Plan::kChunks, (number + 2) % Plan::kNumbers, sizes);
    commit_copies();
    if (fourth.is(Chunk::kBegins) && warp == 0)
      memory.begin_item((fourth.item + 1) % Plan::kItems, query_side, key_side, sizes, items, next);
    if (chunk.is(Chunk::kBegins)) memory.items[chunk.item].clear_others(Plan::kThreads / kWarp);

    BFloat16 *const rows = memory.rows[place], *const others = memory.others[place];
    const auto others_address = static_cast<uint32_t>(__cvta_generic_to_shared(others));
    if (chunk.is(Chunk::kGets)) {
      WgmmaSums sums;
      uint32_t a[kSteps][4];
      const uint32_t from = others_address + swizzled_piece(warp * 16 + lane % 16, lane / 16);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_matrices<false>(a[k], from ^ k * 2 * kPieceBytes);
      begin_products();
      multiply_held<false>(sums, a[0], high);
#pragma unroll
      for (int k = 1; k < kSteps; ++k) multiply_held<true>(sums, a[k], high + k * kNextRows);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) multiply_held<true>(sums, a[k], low + k * kNextRows);
      commit_products();
      wait_for_products();
      keep(sums);
      const auto& side = memory.items[chunk.item].sides[chunk.side()];
      AddendRows<BFloat16> to;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        to.addend[half] = row_at(side.addends, memory.row[number % Plan::kNumbers][row], side.addend_bytes);
        to.inverse_length[half] = memory.inverse_length[place][row];
        to.exists[half] = row < chunk.count;
      }
      uint32_t own[kSteps][4];
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        load_matrices<false>(own[k], from + (rows - others) * sizeof(BFloat16) ^ k * 2 * kPieceBytes);
      to.store(lane, reinterpret_cast<float (&)[kSteps][2][4]>(sums), sizes.D,
               [&](int half, int piece) { return own[piece / 2][piece % 2 * 2 + half]; });
    }
    if (chunk.is(Chunk::kAdds)) {
      uint32_t a[kSteps][4];
      const uint32_t from = others_address + swizzled_piece(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
      const float* const inverse_length = memory.inverse_length[place] + 2 * t;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices<true>(a[k], from + k * kWgmmaDepth * kSwizzledRowBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 inverse = *reinterpret_cast<const float2*>(inverse_length + k * kWgmmaDepth + i / 2 * 8);
          const float2 pair = unpack<BFloat16>(a[k][i]);
          a[k][i] = pack<BFloat16>(pair.x * inverse.x, pair.y * inverse.y);
        }
      }
      const uint64_t from_rows = descriptor_of(rows);
      if (chunk.is(Chunk::kIsFirst)) memset(product, 0, sizeof(product));
      keep(product);
      begin_products();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) multiply_held<true>(product, a[k], from_rows + k * kNextRows);
      commit_products();
      wait_for_products();
      keep(product);
      if (chunk.is(Chunk::kIsLast)) {
        // until all have read the other side's
        if (chunk.is(Chunk::kGets)) __syncthreads();
#pragma unroll
        for (int i = 0; i < 2 * kPieces; ++i) {
          const int piece = i / 2, half = i % 2, row = first_row + 8 * half;
          const float x = product[piece][2 * half], y = product[piece][2 * half + 1];
          const uint32_t pair = pack<BFloat16>(x, y);
          const float2 held = unpack<BFloat16>(pair);
          *swizzled_pair(memory.high, row, piece) = pair;
          *swizzled_pair(memory.low, row, piece) = pack<BFloat16>(x - held.x, y - held.y);
        }
      }
    }
    chunk = second;
    second = third;
    third = fourth;
  }
#endif
}

}  // namespace
}  // namespace yoso
