// Rows in the order of their hash codes, by a counting sort that keeps the order of equal codes.
#pragma once

#include <algorithm>

#include "device.h"

namespace yoso {

// codes of each lane that are on their way while a warp sorts those before them
constexpr int kCodesAhead = 8;
// Counters that a warp keeps at most, which every GPU's shared memory holds; codes of more bits are sorted a range at
// a time.
constexpr int32_t kSortCounters = 1 << 14;

// For every hash function of some heads, hash function h of head b being list b * m + h:
struct SortedCodes {
  // the rows by code, int32 [lists, rows]; behind the last bucket come those in none if folded, else it is unwritten
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

// A warp sorts a list. Codes outside 0..table_size - 1 are left out, or come last.
template <class Code, bool fold>
__global__ void sort_codes_kernel(const Code* codes, int64_t lists, int64_t rows, int32_t table_size, int32_t* order,
                                  int32_t* starts) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t list = int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp;
  if (list >= lists) return;
  const int32_t part_size = table_size < kSortCounters ? table_size : kSortCounters;
  int32_t* counters = shared_memory<int32_t>() + warp * part_size;
  codes += list * rows;
  order += list * rows;
  starts += list * (table_size + 1);
  const uint32_t lower_lanes = (1u << lane) - 1;

  // Calls f(row, place of its code in the part, lanes with the same code) for 32 rows at a time; the lanes that have
  // no row in the part are called with place -1.
  const auto for_rows = [&](int32_t first_code, const auto& f) {
    int32_t next[kCodesAhead];
    const auto load = [&](int64_t first) {
#pragma unroll
      for (int j = 0; j < kCodesAhead; ++j) {
        const int64_t row = first + j * kWarp + lane;
        next[j] = row < rows ? codes[row] : -1;
      }
    };
    load(0);
    for (int64_t first = 0; first < rows; first += kCodesAhead * kWarp) {
      int32_t places[kCodesAhead];
#pragma unroll
      for (int j = 0; j < kCodesAhead; ++j) {
        const uint32_t offset = bucket_of<fold>(next[j], table_size) - first_code;
        places[j] = offset < static_cast<uint32_t>(part_size) ? static_cast<int32_t>(offset) : -1;
      }
      load(first + kCodesAhead * kWarp);
#pragma unroll
      for (int j = 0; j < kCodesAhead; ++j)
        f(first + j * kWarp + lane, places[j], __match_any_sync(kAllLanes, places[j]));
    }
  };

  int32_t total = 0;
  for (int32_t first_code = 0; first_code < table_size; first_code += part_size) {
    for (int32_t i = lane; i < part_size; i += kWarp) counters[i] = 0;
    __syncwarp();
    for_rows(first_code, [&](int64_t, int32_t place, uint32_t same) {
      if (place >= 0 && (same & lower_lanes) == 0) counters[place] += __popc(same);
      __syncwarp();
    });
    for (int32_t i = lane; i - lane < part_size; i += kWarp) {
      const int32_t count = i < part_size ? counters[i] : 0;
      int32_t sum = count;
#pragma unroll
      for (int delta = 1; delta < kWarp; delta *= 2) {
        const int32_t lower = __shfl_up_sync(kAllLanes, sum, delta);
        if (lane >= delta) sum += lower;
      }
      if (i < part_size) {
        counters[i] = total + sum - count;
        starts[first_code + i] = total + sum - count;
      }
      total += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    __syncwarp();
    for_rows(first_code, [&](int64_t row, int32_t place, uint32_t same) {
      const int32_t start = place >= 0 ? counters[place] : 0;
      __syncwarp();
      if (place >= 0) {
        order[start + __popc(same & lower_lanes)] = static_cast<int32_t>(row);
        if ((same & lower_lanes) == 0) counters[place] = start + __popc(same);
      }
      __syncwarp();
    });
  }
  if (lane == 0) starts[table_size] = total;
  if (!fold || total == rows) return;
  for (int64_t first = 0; first < rows; first += kWarp) {
    const int64_t row = first + lane;
    const bool is_last = row < rows && bucket_of<fold>(codes[row], table_size) >= static_cast<uint32_t>(table_size);
    const uint32_t last = __ballot_sync(kAllLanes, is_last);
    if (is_last) order[total + __popc(last & lower_lanes)] = static_cast<int32_t>(row);
    total += __popc(last);
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
  const int64_t num_hash = codes.size(2), rows = codes.size(3), lists = heads * num_hash;
  STD_TORCH_CHECK(rows <= INT32_MAX - kCodesAhead * kWarp, "too many rows: ", rows);
  const int32_t table_size = int32_t{1} << (hash_code_len - fold);
  SortedCodes sorted{empty_tensor(codes, {lists, rows}, ScalarType::Int),
                     empty_tensor(codes, {lists, table_size + 1}, ScalarType::Int)};
  const int64_t bytes = std::min(table_size, kSortCounters) * int64_t{sizeof(int32_t)};
  const int64_t warps = std::clamp<int64_t>(static_cast<int64_t>(kDefaultSharedBytes) / bytes, 1, 8);
  dispatch_codes(codes, [&](auto code) {
    using Code = decltype(code);
    launch(device, sort_codes_kernel<Code, fold>, divide_up(lists, warps), static_cast<int>(warps * kWarp),
           warps * bytes,
           static_cast<const Code*>(codes.const_data_ptr()) + first * num_hash * rows, lists, rows, table_size,
           static_cast<int32_t*>(sorted.order.mutable_data_ptr()),
           static_cast<int32_t*>(sorted.starts.mutable_data_ptr()));
  });
  return sorted;
}

}  // namespace yoso
