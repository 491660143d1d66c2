// Products of matrices by four warps together, a warpgroup, on the tensor cores of sm_90: they run on their own while
// the warps go on, and read one or both of the matrices from shared memory.
//
// A matrix there has rows of 64 elements of 16 bits, the pieces of 16 bytes of which lie in an order of their own
// (swizzled_piece), and begins at a multiple of kSwizzleBytes. In the sum of 64 x 64, warp w of the four has rows from
// 16 w on, and of these its lanes have what mma.h says of D, for 8 times 8 columns.
#pragma once

#include "mma.h"

namespace yoso {

// Whether the compiler has the instructions; what else is compiled of a kernel that has them never runs.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define YOSO_HAS_WGMMA 1
#else
#define YOSO_HAS_WGMMA 0
#endif

constexpr int kWarpgroup = 4 * kWarp, kWgmmaColumns = 64, kWgmmaRows = 64, kWgmmaDepth = 16;
constexpr int kSwizzledRowBytes = kWgmmaColumns * sizeof(uint16_t), kSwizzleBytes = 8 * kSwizzledRowBytes;

// The place of a row's piece, in bytes from the matrix' beginning.
__host__ __device__ constexpr uint32_t swizzled_piece(int row, int piece) {
  return row * kSwizzledRowBytes + (piece ^ row % 8) * kPieceBytes;
}

// What an instruction takes of a matrix that begins at an address of shared memory: eight rows after eight others.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{kSwizzleBytes / 16} << 32, kLeading = 1 << 16;
  return kSwizzle128 | kStride | kLeading | address / 16;
}
__device__ __forceinline__ uint64_t descriptor_of(const BFloat16* matrix) {
  return matrix_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(matrix)));
}
// How far a descriptor goes on for the next kWgmmaDepth columns, for the next row, and for kWgmmaDepth rows.
constexpr uint64_t kNextColumns = kWgmmaDepth * sizeof(uint16_t) / 16, kNextRow = kSwizzledRowBytes / 16;
constexpr uint64_t kNextRows = kWgmmaDepth * kNextRow;

// The pair of columns that a lane has of a row, of every 8; `row` is one of lane / 4 more than a multiple of 8.
__device__ __forceinline__ uint32_t* swizzled_pair(BFloat16* rows, int row, int piece) {
  // a matrix begins at a multiple of kSwizzleBytes
  const uint32_t first = row * kSwizzledRowBytes + warp_lane() / 4 * kPieceBytes + warp_lane() % 4 * sizeof(uint32_t);
  return reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(rows) + (first ^ piece * kPieceBytes));
}

using WgmmaSums = float[kWgmmaColumns / 8][4];
// of fewer and more columns, whose number the instructions know too
constexpr int kNarrowColumns = 32, kWideColumns = 96;
using NarrowSums = float[kNarrowColumns / 8][4];
using WideSums = float[kWideColumns / 8][4];

#if YOSO_HAS_WGMMA
// Before the first product, and after registers that products take have been written by others.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Makes a group of what began since the last one, and waits for all groups but the newest.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int newest = 0>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(newest) : "memory");
}
// Keeps the compiler from using sums before, or changing them after, this. Where products add to sums that something
// else has set, it comes in between: else ptxas of CUDA 12.8 has every product waited for.
template <int n>
__device__ __forceinline__ void keep(float (&sums)[n][4]) {
#pragma unroll
  for (int i = 0; i < n * 4; ++i) asm volatile("" : "+f"(sums[i / 4][i % 4])::"memory");
}
// Shows products what the thread has written to shared memory, once a barrier has come after it.
__device__ __forceinline__ void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the warpgroup's warps, as the block's number group.
__device__ __forceinline__ void meet_warpgroup(int group) {
  asm volatile("bar.sync %0, %1;" : : "r"(1 + group), "n"(kWarpgroup) : "memory");
}

#define YOSO_SET(x) "=f"(x)
#define YOSO_CHANGED(x) "+f"(x)
#define YOSO_FOUR(mode, d) mode(d[0]), mode(d[1]), mode(d[2]), mode(d[3])
#define YOSO_SIXTEEN(mode, d, i) \
  YOSO_FOUR(mode, d[i]), YOSO_FOUR(mode, d[i + 1]), YOSO_FOUR(mode, d[i + 2]), YOSO_FOUR(mode, d[i + 3])
#define YOSO_SUMS(mode, d) YOSO_SIXTEEN(mode, d, 0), YOSO_SIXTEEN(mode, d, 4)
#define YOSO_FEW_SUM_NAMES "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define YOSO_SUM_NAMES \
  YOSO_FEW_SUM_NAMES ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define YOSO_MORE_SUM_NAMES ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define YOSO_MULTIPLY_COLUMNS(columns, names, add)                                              \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns \
  "k16.f32.bf16.bf16 {" names "}, "
#define YOSO_MULTIPLY(add) YOSO_MULTIPLY_COLUMNS("64", YOSO_SUM_NAMES, add)

// sums = a b, or sums += a b: of the 64 x 16 of a and the 16 x 64 of b that descriptors say. a's rows are rows of its
// matrix, and b's columns rows of its own; by_rows, it is the other way round.
template <bool add, bool by_rows>
__device__ __forceinline__ void multiply_shared(WgmmaSums& sums, uint64_t a, uint64_t b) {
  if constexpr (add)
    asm volatile(YOSO_MULTIPLY("1") "%32, %33, add, 1, 1, %34, %34;\n}\n"
                 : YOSO_SUMS(YOSO_CHANGED, sums)
                 : "l"(a), "l"(b), "n"(static_cast<int>(by_rows)));
  else
    asm volatile(YOSO_MULTIPLY("0") "%32, %33, add, 1, 1, %34, %34;\n}\n"
                 : YOSO_SUMS(YOSO_SET, sums)
                 : "l"(a), "l"(b), "n"(static_cast<int>(by_rows)));
}
// The same of 64 x 32.
template <bool add, bool by_rows>
__device__ __forceinline__ void multiply_shared(NarrowSums& sums, uint64_t a, uint64_t b) {
  if constexpr (add)
    asm volatile(YOSO_MULTIPLY_COLUMNS("32", YOSO_FEW_SUM_NAMES, "1") "%16, %17, add, 1, 1, %18, %18;\n}\n"
                 : YOSO_SIXTEEN(YOSO_CHANGED, sums, 0)
                 : "l"(a), "l"(b), "n"(static_cast<int>(by_rows)));
  else
    asm volatile(YOSO_MULTIPLY_COLUMNS("32", YOSO_FEW_SUM_NAMES, "0") "%16, %17, add, 1, 1, %18, %18;\n}\n"
                 : YOSO_SIXTEEN(YOSO_SET, sums, 0)
                 : "l"(a), "l"(b), "n"(static_cast<int>(by_rows)));
}
// The same by rows, where every warp has its 16 rows of a in registers, as multiply_add takes them.
template <bool add>
__device__ __forceinline__ void multiply_held(WgmmaSums& sums, const uint32_t (&a)[4], uint64_t b) {
  if constexpr (add)
    asm volatile(YOSO_MULTIPLY("1") "{%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}\n"
                 : YOSO_SUMS(YOSO_CHANGED, sums)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(YOSO_MULTIPLY("0") "{%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}\n"
                 : YOSO_SUMS(YOSO_SET, sums)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same of more columns, where b's columns are rows of its matrix.
template <bool add>
__device__ __forceinline__ void multiply_held(WideSums& sums, const uint32_t (&a)[4], uint64_t b) {
  if constexpr (add)
    asm volatile(YOSO_MULTIPLY_COLUMNS("96", YOSO_SUM_NAMES YOSO_MORE_SUM_NAMES,
                                       "1") "{%48, %49, %50, %51}, %52, add, 1, 1, 0;\n}\n"
                 : YOSO_SUMS(YOSO_CHANGED, sums), YOSO_SIXTEEN(YOSO_CHANGED, sums, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(YOSO_MULTIPLY_COLUMNS("96", YOSO_SUM_NAMES YOSO_MORE_SUM_NAMES,
                                       "0") "{%48, %49, %50, %51}, %52, add, 1, 1, 0;\n}\n"
                 : YOSO_SUMS(YOSO_SET, sums), YOSO_SIXTEEN(YOSO_SET, sums, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef YOSO_SET
#undef YOSO_CHANGED
#undef YOSO_MULTIPLY
#undef YOSO_MULTIPLY_COLUMNS
#undef YOSO_MORE_SUM_NAMES
#undef YOSO_SUM_NAMES
#undef YOSO_FEW_SUM_NAMES
#undef YOSO_SUMS
#undef YOSO_SIXTEEN
#undef YOSO_FOUR
#endif

}  // namespace yoso
