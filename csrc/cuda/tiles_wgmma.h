// How the kernels of tiles_mma.h multiply on sm_90: bfloat16 rows of up to 64 columns by warpgroups (wgmma.h).
#pragma once

#include "tiles_mma.h"
#include "wgmma.h"

namespace yoso {
namespace {

// A warpgroup has 64 of the block's rows, and its warps of their products what they have with MmaPlace. Rows are
// multiplied where they lie; products go on until they are waited for, while other warps weigh pairs.
template <int rows, int others>
struct WarpgroupPlace : MmaPlace<BFloat16, rows, others, kWgmmaColumns> {
  static constexpr int kStride = kWgmmaColumns, kAlignment = kSwizzleBytes, kAtOnce = kNarrowColumns;
  static constexpr bool kExists = YOSO_HAS_WGMMA;

  static constexpr int gradient_blocks(bool with_values, int) { return with_values ? 3 : 2; }
  __device__ __forceinline__ static int piece(int row, int piece) {
    return swizzled_piece(row, piece) / sizeof(BFloat16);
  }
  __device__ __forceinline__ static uint32_t* pair(BFloat16* rows_from, int row, int piece) {
    return swizzled_pair(rows_from, row, piece);
  }

#if YOSO_HAS_WGMMA
  __device__ __forceinline__ static uint64_t my_rows(const BFloat16* rows_from) {
    // the same in all of a warp's lanes, as the compiler is to know
    const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kWarpgroup), 0);
    return descriptor_of(rows_from + group * kWgmmaRows * kStride);
  }
  template <int n>
  __device__ __forceinline__ static void multiply(uint64_t mine, const BFloat16* others_from, float (&out)[n][4]) {
    const uint64_t others_there = descriptor_of(others_from);
    begin_products();
    multiply_shared<false, false>(out, mine, others_there);
#pragma unroll
    for (int k = 1; k < kWgmmaColumns / kWgmmaDepth; ++k)
      multiply_shared<true, false>(out, mine + k * kNextColumns, others_there + k * kNextColumns);
    commit_products();
  }

  __device__ __forceinline__ static void clear(WgmmaSums (&sums)[1]) {
    memset(sums, 0, sizeof(sums));
    keep(sums[0]);
  }
  template <int n>
  __device__ __forceinline__ static void add(const uint32_t (&weights)[n][4], const BFloat16* others_from,
                                             WgmmaSums (&sums)[1]) {
    const uint64_t others_there = descriptor_of(others_from);
    begin_products();
#pragma unroll
    for (int k = 0; k < n; ++k) multiply_held<true>(sums[0], weights[k], others_there + k * kNextRows);
    commit_products();
  }

  template <class... Products>
  __device__ __forceinline__ static void finish(Products&... products) {
    wait_for_products();
    (keep(products), ...);
  }
  __device__ __forceinline__ static void meet() {
    wait_for_products();
    show_products();
    __syncthreads();
  }
#endif
};
using WarpgroupSumPlace = WarpgroupPlace<128, 64>;
// With the gradient of values, registers are left for three warpgroups of a multiprocessor. Blocks of one each do not
// wait for each other.
template <bool with_values>
using WarpgroupGradientPlace = WarpgroupPlace<with_values ? 64 : 128, 64>;

}  // namespace
}  // namespace yoso
