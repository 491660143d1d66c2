// Hash codes of bfloat16 rows of up to 64 columns by Hadamard transforms, on sm_90: what signs, transforms and normal
// numbers make of a row is a product with one direction for each bit of a function's code. The directions are found
// once for all of a head's rows, as two terms of bfloat16, 17 bits between them, and multiplied with tiles of 64 rows
// by warpgroups (wgmma.h).
#pragma once

#include "hash.h"
#include "tile_rows.h"
#include "wgmma.h"

namespace yoso {
namespace {

struct HashProducts {
  static constexpr int kGroups = 4, kThreads = kGroups * kWarpgroup, kTerms = 2;
  // of all functions, for which sums are found together
  static constexpr int kBitsAtOnce = kWideColumns / kFunctions;
  // elements between functions where their codes wait to be stored: 16 bytes more than a tile's rows take
  static constexpr int kCodeStride = kWgmmaRows + 8;

  static __host__ __device__ constexpr int directions(int bits) {
    return (bits + kBitsAtOnce - 1) / kBitsAtOnce * kWideColumns;
  }
  // of all directions of a head and kFunctions functions, with both terms
  static __host__ __device__ constexpr int64_t elements(int bits) {
    return int64_t{kTerms} * directions(bits) * kWgmmaColumns;
  }
};

struct HashMemory {
  // of a warpgroup's tile, and of the next
  alignas(kSwizzleBytes) BFloat16 rows[HashProducts::kGroups][2][kWgmmaRows * kWgmmaColumns];
  // of the tile before, and of this
  alignas(kSwizzleBytes) int16_t codes[HashProducts::kGroups][2][kFunctions * HashProducts::kCodeStride];
};

// the longest codes of 16 bits with a sign
constexpr int kMostProductBits = 15;
static_assert(sizeof(HashMemory) + HashProducts::elements(kMostProductBits) * sizeof(BFloat16) <= 227 << 10,
              "a block has 227 KB");

// Finds the directions, by terms from the smallest on, the highest bit first, in the order of a swizzled matrix. A
// thread has one, of a head and a group of kFunctions functions; zero behind the last bit and function.
__global__ void __launch_bounds__(kWarpgroup) find_directions_kernel(const Problem problem, BFloat16* directions) {
  let_next_launch_start();
  constexpr int kSize = kWgmmaColumns, kTerms = HashProducts::kTerms;
  const int bits = problem.hash_code_len, count = HashProducts::directions(bits);
  const int64_t number = int64_t{blockIdx.x} * kWarpgroup + threadIdx.x;
  const int64_t groups = (problem.num_hash + kFunctions - 1) / kFunctions;
  if (number >= problem.H * groups * count) return;
  const int direction = static_cast<int>(number % count), bit = bits - 1 - direction / kFunctions;
  const int64_t group = number / count % groups, head = number / count / groups;
  const int64_t function = group * kFunctions + direction % kFunctions;
  const int64_t transforms = (problem.num_hash + kSize - 1) / kSize;
  const float* parameters = problem.parameters + head * (2 + bits * transforms) * kSize;
  float x[kSize] = {};
  if (bit >= 0 && function < problem.num_hash) {
    const float* scales = parameters + (2 + bit * transforms + function / kSize) * kSize;
    const int row = static_cast<int>(function % kSize);
    // the row of the transform that is the function's, and what comes before it the other way round
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = odd(row & i) ? scales[i] : -scales[i];
#pragma unroll
    for (int round = 1; round >= 0; --round) {
      butterfly<kSize>(x);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] *= parameters[round * kSize + i];
    }
  }
  BFloat16* to = directions + (head * groups + group) * HashProducts::elements(bits);
#pragma unroll
  for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
    for (int i = 0; i < kSize; i += 8) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float *const low = x + i + 2 * j, *const high = low + 1;
        pairs[j] = pack<BFloat16>(*low, *high);
        const float2 held = unpack<BFloat16>(pairs[j]);
        *low -= held.x;
        *high -= held.y;
      }
      unsigned char* const matrix = reinterpret_cast<unsigned char*>(to + int64_t{term} * count * kSize);
      *reinterpret_cast<uint4*>(matrix + swizzled_piece(direction, i / 8)) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// A block has one of `parts` parts of the tiles of all rows of a head, and kFunctions of its functions. Its warpgroups
// go their own ways.
__global__ void __launch_bounds__(HashProducts::kThreads, 1)
    hash_products_kernel(Rows<const BFloat16> rows, const Problem problem, const BFloat16* directions, int parts) {
  wait_for_launches_before();
#if YOSO_HAS_WGMMA
  using Plan = HashProducts;
  constexpr int kSteps = kWgmmaRows / kWgmmaDepth, kPieces = kSwizzledRowBytes / kPieceBytes;
  auto& memory = *shared_memory<HashMemory>();
  auto* const terms = reinterpret_cast<BFloat16*>(&memory + 1);
  const uint64_t matrices = descriptor_of(terms);
  static_assert(sizeof(HashMemory) % kSwizzleBytes == 0, "matrices lie behind");
  const int bits = problem.hash_code_len;
  const uint32_t next_term = Plan::directions(bits) * kNextRow;
  const int64_t groups = (problem.num_hash + kFunctions - 1) / kFunctions;
  const int64_t part = blockIdx.x % parts, function_group = blockIdx.x / parts % groups;
  const int64_t head = blockIdx.x / parts / groups, first_function = function_group * kFunctions;
  // the same in all of a warp's lanes, as the compiler is to know
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kWarpgroup), 0);
  const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = warp_lane(), g = lane / 4, t = lane % 4;
  {
    const auto* from =
        reinterpret_cast<const uint4*>(directions + (head * groups + function_group) * Plan::elements(bits));
    for (int i = threadIdx.x; i < Plan::elements(bits) / 8; i += Plan::kThreads)
      copy_ahead<16>(reinterpret_cast<uint4*>(terms) + i, from + i, false);
  }
  const uint32_t tiles = (problem.N + kWgmmaRows - 1) / kWgmmaRows, all_tiles = problem.B * tiles;
  const auto copy_tile = [&](uint32_t tile, int place) {
    if (tile >= all_tiles) return;
    const uint32_t batch = tile / tiles, first = tile % tiles * kWgmmaRows;
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(memory.rows[group][place]));
#pragma unroll
    for (int i = 0; i < kWgmmaRows * kPieces / kWarpgroup; ++i) {
      const int row = thread / kPieces + i * (kWarpgroup / kPieces), piece = thread % kPieces;
      const bool clear = first + row >= problem.N || piece * 8 >= problem.D;
      copy_ahead<16>(to + swizzled_piece(row, piece),
                     rows.at(batch, head, clear ? 0 : first + row) + (clear ? 0 : piece * 8), clear);
    }
  };
  const uint32_t step = parts * Plan::kGroups;
  uint32_t tile = part * Plan::kGroups + group;
  copy_tile(tile, 0);
  wait_for_copies();
  show_products();
  __syncthreads();
#pragma unroll 1
  for (int place = 0; tile < all_tiles; tile += step, place ^= 1) {
    const uint32_t batch = tile / tiles, first = tile % tiles * kWgmmaRows;
    const auto rows_address = static_cast<uint32_t>(__cvta_generic_to_shared(memory.rows[group][place]));
    const uint32_t from = rows_address + swizzled_piece(warp * 16 + lane % 16, lane / 16);
    uint32_t a[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_matrices<false>(a[k], from ^ k * 2 * kPieceBytes);
    // in place of the tile before, which all have read when they met
    copy_tile(tile + step, place ^ 1);
    int32_t masked[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = first + warp * 16 + g + 8 * half;
      masked[half] = row < problem.N ? problem.masked(batch, row) : 0;
    }
    uint32_t codes[2][kFunctions / 4] = {};
#pragma unroll 1
    for (int bit = 0; bit < bits; bit += Plan::kBitsAtOnce) {
      const uint64_t some = matrices + bit * (kFunctions * kNextRow);
      WideSums sums;
      begin_products();
      multiply_held<false>(sums, a[0], some);
#pragma unroll
      for (int i = 1; i < Plan::kTerms * kSteps; ++i)
        multiply_held<true>(sums, a[i % kSteps], some + i / kSteps * next_term + i % kSteps * kNextColumns);
      commit_products();
      wait_for_products();
      keep(sums);
#pragma unroll
      for (int i = 0; i < kWideColumns / 8; ++i) {
        if (bit + i * 8 / kFunctions >= bits) break;
#pragma unroll
        for (int j = 0; j < 4; ++j) push_sign(codes[j / 2][i * 8 % kFunctions / 4 + j % 2], sums[i][j]);
      }
    }
    int16_t* const tile_codes = memory.codes[group][place];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kFunctions / 4; ++i)
        tile_codes[(i / 2 * 8 + 2 * t + i % 2) * Plan::kCodeStride + warp * 16 + g + 8 * half] =
            static_cast<int16_t>(codes[half][i] | masked[half]);
    wait_for_copies();
    meet_warpgroup(group);
    // eight rows' codes at a time
#pragma unroll
    for (int i = 0; i < kFunctions * kWgmmaRows / 8 / kWarpgroup; ++i) {
      const int piece = thread % (kWgmmaRows / 8), function = thread / (kWgmmaRows / 8) + i * (kFunctions / 2);
      const uint32_t row = first + piece * 8;
      if (first_function + function >= problem.num_hash || row >= problem.N) continue;
      const int16_t* const from_codes = tile_codes + function * Plan::kCodeStride + piece * 8;
      int16_t* const to = static_cast<int16_t*>(problem.codes) +
                          ((batch * problem.H + head) * problem.num_hash + first_function + function) * problem.N + row;
      if (problem.N % 8 == 0)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from_codes);
      else
        for (int j = 0; j < at_most(problem.N - row, 8); ++j) to[j] = from_codes[j];
    }
  }
#endif
}

inline void launch_hash_products(const Device& device, const Tensor& x, Problem problem) {
  const Tensor tiles = tile_rows(x, problem.D);
  problem.D = tiles.size(3);
  const int bits = problem.hash_code_len;
  const int64_t groups = divide_up(problem.num_hash, kFunctions), heads = problem.H * groups;
  const int64_t all_tiles = count_of(problem.B * divide_up(problem.N, kWgmmaRows), "tiles of rows");
  const Tensor directions = empty_tensor(x, {heads, HashProducts::elements(bits)}, ScalarType::BFloat16);
  auto* const terms = static_cast<BFloat16*>(directions.mutable_data_ptr());
  // not early: what is before an operator's first launch need not be a kernel
  launch(device, find_directions_kernel, divide_up(heads * HashProducts::directions(bits), kWarpgroup), kWarpgroup, 0,
         problem, terms);
  const int64_t parts = std::clamp<int64_t>(device.num_multiprocessors() / std::max<int64_t>(heads, 1), 1,
                                            std::max<int64_t>(divide_up(all_tiles, HashProducts::kGroups), 1));
  launch<true>(device, hash_products_kernel, all_tiles > 0 ? heads * parts : 0, HashProducts::kThreads,
               sizeof(HashMemory) + HashProducts::elements(bits) * sizeof(BFloat16), rows_of<BFloat16>(tiles), problem,
               terms, static_cast<int>(parts));
}

}  // namespace
}  // namespace yoso
