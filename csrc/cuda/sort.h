// Rows in the order of their hash codes, by a counting sort that keeps the order of equal codes.
#pragma once

#include <algorithm>

#include "device.h"

namespace yoso {

// codes of each lane that are on their way while a warp sorts those before them, and those of all lanes
constexpr int kCodesAhead = 8, kCodesAtOnce = kCodesAhead * kWarp;
// Warps of a list at most, rows for which there is one, and codes of a list that each of their lanes adds up at a time.
constexpr int kSortWarps = 16, kSortRows = 1 << 10, kLaneCodes = 4;
// Codes that are sorted at a time at most, whose counters every GPU's shared memory holds.
constexpr int32_t kSortCodes = (1 << 14) + 1;
// Rows that 16 bits can count.
constexpr int64_t kShortRows = 1 << 16;

// For every hash function of some heads, hash function h of head b being list b * m + h:
struct SortedCodes {
  // the rows by code, int32 [lists, rows]; behind the last bucket come those in none
  Tensor order;
  // where each code's rows begin, and where the last code's end, int32 [lists, 2^tau + 1], or 2^(tau - 1) if folded
  Tensor starts;
};

// The bucket of a code, in no table where it is none: with fold, that of its complement too. Unsigned, because any
// int32 may stand for no bucket.
template <bool fold>
__device__ __forceinline__ uint32_t bucket_of(int32_t code, uint32_t table_size) {
  const uint32_t bucket = static_cast<uint32_t>(code);
  return fold ? min(bucket, 2 * table_size - 1 - bucket) : bucket;
}

// Neighbouring counters, which are read and written at once.
template <class Counter>
struct alignas(kLaneCodes * sizeof(Counter)) Counters {
  Counter of[kLaneCodes];
};

// Adds one to a counter in shared memory: in any order, as nobody is told what was there.
template <class Counter>
__device__ __forceinline__ void add_one(uint32_t counters, uint32_t place) {
  uint32_t address = counters + place * sizeof(Counter), one = 1;
  if constexpr (sizeof(Counter) < sizeof(int32_t)) {
    // to half a word, from which nothing is carried to the other
    one = (place & 1) != 0 ? 1 << 16 : 1;
    address &= ~3u;
  }
  asm volatile("red.shared.add.u32 [%0], %1;" : : "r"(address), "r"(one) : "memory");
}

// How many counters a warp has: one for every code that is sorted at a time, and one for all others.
__host__ __device__ constexpr int32_t num_counters(int32_t table_size, bool all) {
  const int32_t codes = all || table_size < kSortCodes ? table_size + 1 : kSortCodes;
  return (codes / kLaneCodes + 1) * kLaneCodes;
}

// A block sorts a list, and each of its warps a segment of the rows, a multiple of kCodesAtOnce: all count their codes,
// which gives each warp a place for its rows of each code, and then put them there. Codes outside 0..table_size - 1
// come last. Counters of 16 bits are for all codes at once; rows are sorted in shared memory then, as each that is
// stored alone takes the cache as long as eight neighbours.
template <class Code, bool fold, class Counter>
__global__ void __launch_bounds__(kSortWarps * kWarp, sizeof(Counter) < sizeof(int32_t) ? 3 : 2)
    sort_codes_kernel(const Code* codes, int32_t rows, int32_t table_size, int32_t segment, int32_t* order,
                      int32_t* starts) {
  constexpr bool kShort = sizeof(Counter) < sizeof(int32_t);
  const int32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  codes += int64_t{blockIdx.x} * rows;
  order += int64_t{blockIdx.x} * rows;
  starts += int64_t{blockIdx.x} * (table_size + 1);
  const int32_t stride = num_counters(table_size, kShort);
  int32_t* totals = shared_memory<int32_t>();
  auto* all_counters = reinterpret_cast<Counter*>(totals + kSortWarps);
  auto* sorted = reinterpret_cast<uint16_t*>(all_counters + warps * stride);
  Counter* counters = all_counters + warp * stride;
  const auto counters_address = static_cast<uint32_t>(__cvta_generic_to_shared(counters));

  int32_t total = 0;
  for (int32_t first_code = 0, part_codes; first_code <= table_size; first_code += part_codes) {
    part_codes = table_size + 1 - first_code;
    if constexpr (!kShort) part_codes = min(part_codes, kSortCodes);
    // Calls f(row, places) for the rows of the warp, kCodesAhead of every lane at a time: the lane's first one, and the
    // places of all codes in the part. Those of other parts have the place behind, rows past the last come last.
    const auto for_rows = [&](const auto& f) {
      int32_t row = warp * segment + lane;
      const int32_t end = min((warp + 1) * segment, rows);
      const Code* from = codes + row;
      int32_t next[kCodesAhead];
      const auto load = [&](int32_t left) {
#pragma unroll
        for (int j = 0; j < kCodesAhead; ++j) next[j] = j * kWarp < left ? from[j * kWarp] : -1;
        from += kCodesAtOnce;
      };
      load(rows - row);
#pragma unroll 1
      for (; row - lane < end; row += kCodesAtOnce) {
        int32_t places[kCodesAhead];
#pragma unroll
        for (int j = 0; j < kCodesAhead; ++j) {
          uint32_t place = min(bucket_of<fold>(next[j], table_size), static_cast<uint32_t>(table_size));
          if constexpr (!kShort) place = min(place - first_code, static_cast<uint32_t>(part_codes));
          places[j] = static_cast<int32_t>(place);
        }
        load(rows - row - kCodesAtOnce);
        f(row, places);
      }
    };

    for (int32_t i = lane * kLaneCodes; i < stride; i += kWarp * kLaneCodes)
      *reinterpret_cast<Counters<Counter>*>(counters + i) = {};
    __syncwarp();
    for_rows([&](int32_t, const int32_t (&places)[kCodesAhead]) {
#pragma unroll
      for (int j = 0; j < kCodesAhead; ++j)
        if (kShort || places[j] < part_codes) add_one<Counter>(counters_address, places[j]);
    });
    __syncthreads();

    // of the part's codes, for all warps, those that the warp adds up
    const int32_t share = ((stride / kLaneCodes - 1) / warps + 1) * kLaneCodes;
    const int32_t share_end = min((warp + 1) * share, stride);
    // Calls f(counters) for those of each warp of the lane's codes.
    const auto for_warps = [&](int32_t code, const auto& f) {
      if (code >= share_end) return;
#pragma unroll 1
      for (Counter* of = all_counters + code; of < all_counters + warps * stride; of += stride)
        f(*reinterpret_cast<Counters<Counter>*>(of));
    };
    int32_t sum = 0;
    for (int32_t code = warp * share + lane * kLaneCodes; code < share_end; code += kWarp * kLaneCodes)
      for_warps(code, [&](const Counters<Counter>& counts) {
#pragma unroll
        for (int c = 0; c < kLaneCodes; ++c) sum += counts.of[c];
      });
#pragma unroll
    for (int other = 1; other < kWarp; other *= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
    if (lane == 0) totals[warp] = sum;
    __syncthreads();
    int32_t before = total;
    for (int32_t w = 0; w < warps; ++w) {
      before += w < warp ? totals[w] : 0;
      total += totals[w];
    }
    for (int32_t first = warp * share; first < share_end; first += kWarp * kLaneCodes) {
      const int32_t code = first + lane * kLaneCodes;
      int32_t places[kLaneCodes] = {};
      for_warps(code, [&](const Counters<Counter>& counts) {
#pragma unroll
        for (int c = 0; c < kLaneCodes; ++c) places[c] += counts.of[c];
      });
      // from counts to where these begin
      int32_t mine = 0;
#pragma unroll
      for (int c = 0; c < kLaneCodes; ++c) {
        const int32_t count = places[c];
        places[c] = mine;
        mine += count;
      }
      int32_t up_to_mine = mine;
#pragma unroll
      for (int delta = 1; delta < kWarp; delta *= 2) {
        const int32_t lower = __shfl_up_sync(kAllLanes, up_to_mine, delta);
        if (lane >= delta) up_to_mine += lower;
      }
#pragma unroll
      for (int c = 0; c < kLaneCodes; ++c) {
        places[c] += before + up_to_mine - mine;
        if (code < share_end && code + c < part_codes) starts[first_code + code + c] = places[c];
      }
      for_warps(code, [&](Counters<Counter>& counts) {
#pragma unroll
        for (int c = 0; c < kLaneCodes; ++c) {
          const int32_t count = counts.of[c];
          counts.of[c] = static_cast<Counter>(places[c]);
          places[c] += count;
        }
      });
      before += __shfl_sync(kAllLanes, up_to_mine, kWarp - 1);
    }
    __syncthreads();

    for_rows([&](int32_t row, const int32_t (&places)[kCodesAhead]) {
      // lanes with the same code: those with all of its bits, which are found faster than lanes are compared
      uint32_t same[kCodesAhead];
#pragma unroll
      for (int j = 0; j < kCodesAhead; ++j) same[j] = kAllLanes;
#pragma unroll 1
      for (int32_t bit = 1; bit <= part_codes; bit *= 2)
#pragma unroll
        for (int j = 0; j < kCodesAhead; ++j) {
          const bool is_set = (places[j] & bit) != 0;
          same[j] &= __ballot_sync(kAllLanes, is_set) ^ (is_set ? 0 : ~0u);
        }
#pragma unroll
      for (int j = 0; j < kCodesAhead; ++j) {
        const int32_t place = counters[places[j]] + __popc(same[j] & ((1u << lane) - 1));
        __syncwarp();
        if (place < rows && (kShort || places[j] < part_codes)) {
          if constexpr (kShort) {
            sorted[place] = static_cast<uint16_t>(row + j * kWarp);
          } else {
            order[place] = row + j * kWarp;
          }
        }
        // of the last lane; 16 bits wrap where no row is left
        if (same[j] >> lane == 1) counters[places[j]] = static_cast<Counter>(place + 1);
        __syncwarp();
      }
    });
  }
  if constexpr (kShort) {
    __syncthreads();
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < rows; i += blockDim.x) order[i] = sorted[i];
  }
}

// How many heads to sort at a time, so that their buckets' starts take no more memory than rows and codes do.
inline int64_t heads_at_once(int64_t heads, int64_t num_hash, int64_t rows, int64_t hash_code_len) {
  const int64_t table_size = int64_t{1} << hash_code_len, budget = std::max<int64_t>(heads * num_hash * rows, 1 << 24);
  return std::max<int64_t>(1, std::min(heads, budget / (num_hash * table_size)));
}

// Sorts the codes [B, H, m, rows] of `heads` heads, from the first on, of the B * H. With fold, a code and its
// complement are one, the smaller of both.
template <bool fold = false>
SortedCodes sort_codes(const Device& device, const Tensor& codes, int64_t first, int64_t heads,
                       int64_t hash_code_len) {
  const int64_t num_hash = codes.size(2), lists = heads * num_hash;
  const int32_t rows = count_of(codes.size(3), "rows"), table_size = 1 << (hash_code_len - fold);
  SortedCodes sorted{empty_tensor(codes, {lists, rows}, ScalarType::Int),
                     empty_tensor(codes, {lists, table_size + 1}, ScalarType::Int)};
  // with as many warps as there is memory for, if for any
  const auto sort = [&](auto counter) {
    using Counter = decltype(counter);
    constexpr bool kShort = sizeof(Counter) < sizeof(int32_t);
    const int64_t warp_bytes = num_counters(table_size, kShort) * int64_t{sizeof(Counter)};
    const int64_t other_bytes = kSortWarps * sizeof(int32_t) + (kShort ? rows * sizeof(uint16_t) : 0);
    const int64_t most = (static_cast<int64_t>(device.shared_bytes()) - other_bytes) / warp_bytes;
    const int64_t warps = std::min<int64_t>({most, kSortWarps, (rows - 1) / kSortRows + 1});
    if (warps < 1) return false;
    const int64_t segment = round_up(divide_up(rows, warps), kCodesAtOnce);
    if (kShort && segment >= kShortRows) return false;
    dispatch_codes(codes, [&](auto code) {
      using Code = decltype(code);
      launch(device, sort_codes_kernel<Code, fold, Counter>, lists, static_cast<int>(warps * kWarp),
             warps * warp_bytes + other_bytes,
             static_cast<const Code*>(codes.const_data_ptr()) + first * num_hash * rows, rows, table_size, segment,
             static_cast<int32_t*>(sorted.order.mutable_data_ptr()),
             static_cast<int32_t*>(sorted.starts.mutable_data_ptr()));
    });
    return true;
  };
  if (rows > kShortRows || !sort(uint16_t{})) sort(int32_t{});
  return sorted;
}

}  // namespace yoso
