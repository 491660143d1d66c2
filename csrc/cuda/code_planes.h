// Pairs of hash codes compared 32 hash functions at a time: a plane of a row holds one bit of the codes of as many
// functions, and the codes of two rows are equal where no plane differs.
#pragma once

#include "rows.h"

namespace yoso {
namespace {

// hash functions that a word has a bit of
constexpr int kWordBits = 32;
// places that a plane has past the last row: no tile ends later
constexpr int kPadding = 192;

// Of so many rows, how many places a plane has.
__host__ __device__ constexpr int32_t plane_length(int32_t rows) { return (rows + kPadding + 31) / 32 * 32; }

// The orders of the places: that of the rows, or one in which those of 32 rows that a lane of a tile on tensor cores
// has are neighbours: g, g + 8, g + 16 and g + 24. Or there are no planes.
enum class PlaneOrder { kRows, kLanes, kNone };
__host__ __device__ constexpr int32_t plane_place(PlaneOrder order, int32_t row) {
  return order == PlaneOrder::kRows ? row : row / 32 * 32 + row % 8 * 4 + row % 32 / 8;
}

// planes [B * H, words, tau, plane_length(length)] of codes [B, H, m, length], with the bits of `filler` where there is
// no hash function and no row.
template <class Code>
__global__ void __launch_bounds__(kRowThreads) pack_planes_kernel(const Code* codes, int num_hash, int tau, int length,
                                                                  uint32_t filler, PlaneOrder order, uint32_t* planes) {
  const int padded = plane_length(length), blocks = (padded + kRowThreads - 1) / kRowThreads;
  const int words = (num_hash + kWordBits - 1) / kWordBits;
  const int row = blockIdx.x % blocks * kRowThreads + threadIdx.x, line = blockIdx.x / blocks;
  const int first = line % words * kWordBits;
  if (row >= padded) return;
  uint32_t bits[kWordBits];
#pragma unroll
  for (int hash = 0; hash < kWordBits; ++hash) {
    const bool exists = first + hash < num_hash && row < length;
    bits[hash] = exists ? codes[(int64_t{line / words} * num_hash + first + hash) * length + row] : filler;
  }
  planes += int64_t{line} * tau * padded + plane_place(order, row);
  for (int bit = 0; bit < tau; ++bit) {
    uint32_t plane = 0;
#pragma unroll
    for (int hash = 0; hash < kWordBits; ++hash) plane |= (bits[hash] >> bit & 1) << hash;
    planes[int64_t{bit} * padded] = plane;
  }
}

// The codes [B, H, m, length] of one side, of either type, and their planes.
struct CodeSide {
  const void* codes;
  const uint32_t* planes;
  int32_t length;
  bool wide;

  __device__ __forceinline__ int32_t at(int64_t i) const {
    return wide ? static_cast<const int32_t*>(codes)[i] : static_cast<const int16_t*>(codes)[i];
  }
};

// The codes of my rows and of the others, see tiled_attention.h.
struct PairedCodes {
  CodeSide mine, others;
  int num_hash, tau;

  PairedCodes swapped() const { return {others, mine, num_hash, tau}; }

  // A row without codes has none by the first function either.
  __device__ bool is_real(int64_t batch_head, int64_t row) const {
    return static_cast<uint32_t>(mine.at(batch_head * num_hash * mine.length + row)) < 1u << tau;
  }

  __host__ __device__ int words() const { return (num_hash + kWordBits - 1) / kWordBits; }
  __host__ __device__ int planes() const { return words() * tau; }
  // the first plane of a head's rows, from one of them on
  __device__ const uint32_t* plane_of(const CodeSide& side, int64_t batch_head, int64_t row) const {
    return side.planes + batch_head * planes() * plane_length(side.length) + row;
  }

  // `from` and how many hash functions agree, of pairs of rows that have codes. compare_plane(is_first, differ) adds to
  // differ what differs in a plane; the first of a word it sets differ to.
  template <int n, class ComparePlane>
  __device__ __forceinline__ void count_equal(int from, const ComparePlane& compare_plane, int (&equal)[n][4]) const {
    const auto compare_word = [&](bool is_first) {
      uint32_t differ[n][4];
      compare_plane(true, differ);
#pragma unroll 1
      for (int bit = 1; bit < tau; ++bit) compare_plane(false, differ);
#pragma unroll
      for (int i = 0; i < n * 4; ++i)
        equal[i / 4][i % 4] = (is_first ? from : equal[i / 4][i % 4]) - __popc(differ[i / 4][i % 4]);
    };
    const int words = this->words();
    from += words * kWordBits;
    // what takes a tenth of the time is not done where it need not be: clearing what the first of all overwrites
    compare_word(true);
#pragma unroll 1
    for (int word = 1; word < words; ++word) compare_word(false);
  }
};

inline Tensor pack_planes(const Device& device, const Tensor& codes, int tau, uint32_t filler, PlaneOrder order) {
  const int64_t B = codes.size(0), H = codes.size(1), m = codes.size(2);
  const int32_t length = count_of(codes.size(3), "rows"), padded = plane_length(length);
  const int64_t lines = order == PlaneOrder::kNone ? 0 : B * H * divide_up(m, kWordBits);
  Tensor planes = empty_tensor(codes, {lines, tau, padded}, ScalarType::Int);
  dispatch_codes(codes, [&](auto code) {
    launch(device, pack_planes_kernel<decltype(code)>, lines * divide_up(padded, kRowThreads), kRowThreads, 0,
           static_cast<const decltype(code)*>(codes.const_data_ptr()), static_cast<int>(m), tau, length, filler, order,
           static_cast<uint32_t*>(planes.mutable_data_ptr()));
  });
  return planes;
}

// The codes [B, H, m, N] and [B, H, m, M], "mine" being the queries' side, with their planes.
class CodePlanes {
 public:
  CodePlanes(const Device& device, const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
             PlaneOrder order)
      : tau_(static_cast<int>(hash_code_len)),
        query_codes_(query_codes),
        key_codes_(key_codes),
        // fillers that differ: functions that there are not never agree
        query_planes_(pack_planes(device, query_codes, tau_, 0, order)),
        key_planes_(pack_planes(device, key_codes, tau_, 1, order)) {}

  PairedCodes pairs() const {
    return {side(query_codes_, query_planes_), side(key_codes_, key_planes_),
            static_cast<int>(count_of(query_codes_.size(2), "hash functions")), tau_};
  }

 private:
  static CodeSide side(const Tensor& codes, const Tensor& planes) {
    return {codes.const_data_ptr(),
            planes.numel() == 0 ? nullptr : static_cast<const uint32_t*>(planes.const_data_ptr()),
            static_cast<int32_t>(codes.size(3)), codes.scalar_type() == ScalarType::Int};
  }

  int tau_;
  Tensor query_codes_, key_codes_, query_planes_, key_planes_;
};

}  // namespace
}  // namespace yoso
