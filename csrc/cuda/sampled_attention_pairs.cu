// See sampled_attention_pairs.h. The kernels are those of tiled_attention.h.
#include "sampled_attention_pairs.h"

#include <cstdlib>
#include <string_view>

#include "code_planes.h"
#include "tiled_attention.h"

namespace yoso {
namespace {

// What a pair takes by pairs, and a row and hash function by buckets, in the time that a plane of a pair takes: the
// first by count, the second from 12 ms on an H200, for 16 x 12 heads of 4096 random rows of 64 columns and 32 hash
// functions. Rows that are less random take longer by buckets.
constexpr double kPairCost = 7, kBucketCost = 3200;

// The pairs whose codes are equal by some hash functions: each has so many times the weight.
struct CollidingPairs {
  static constexpr bool kMasksRows = true, kPositive = false, kTakesCosines = false;
  static constexpr int kWarpRows = 32;
  template <class In>
  static constexpr int kBlocks = std::is_same_v<In, Half> ? 2 : 3;
  // so that there is shared memory for them on every GPU
  static constexpr int kMostPlanes = 48;
  PairedCodes codes;

  CollidingPairs swapped() const { return {codes.swapped()}; }
  // A row that is no number is none either: it would spoil the sums of all others, not of those in its buckets alone.
  __device__ bool is_real(int64_t batch_head, int64_t row, float inverse_length) const {
    return codes.is_real(batch_head, row) && inverse_length >= 0;
  }
  __device__ Range near(int64_t, int64_t, int64_t count) const { return {0, count}; }

  // The planes of the block's rows and of two tiles of others, which lie in shared memory behind their rows.
  template <class Place>
  int64_t shared_bytes() const {
    return codes.planes() * int64_t{Place::kRows + 2 * Place::kOthers} * sizeof(uint32_t);
  }
  template <class Place>
  __device__ __forceinline__ void copy_mine(const Place& place, uint32_t* shared) const {
    copy_planes<Place, Place::kRows>(codes.mine, place.batch_head, place.first_row, shared);
  }
  template <class Place>
  __device__ __forceinline__ void copy_others(const Place& place, uint32_t* shared, int tile) const {
    copy_planes<Place, Place::kOthers>(codes.others, place.batch_head, place.first_other,
                                       other_planes<Place>(shared, tile));
  }

  // How many hash functions agree, times the others' factors.
  template <class Place, int n>
  __device__ __forceinline__ void slopes(uint32_t* shared, int tile, const float* factors,
                                         float (&slopes)[n][4]) const {
    // the bits of 2^23, a float from which on numbers are one apart: a conversion takes four times as long as a sum
    constexpr int kWhole = 0x4b000000;
    int equal[n][4];
    codes.template count_equal<Place>(shared, Place::kRows, other_planes<Place>(shared, tile), Place::kOthers, kWhole,
                                      equal);
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      // a factor is at most 2^75
      const float factor = factors[Place::other(i / 4, i % 4)];
      slopes[i / 4][i % 4] = fmaf(__int_as_float(equal[i / 4][i % 4]), factor, -0x1p23f * factor);
    }
  }
  template <class T>
  __device__ T slope_scale() const {
    return codes.tau / (2 * static_cast<T>(codes.num_hash));
  }

 private:
  template <class Place>
  __device__ __forceinline__ uint32_t* other_planes(uint32_t* shared, int tile) const {
    return shared + codes.planes() * (Place::kRows + tile * Place::kOthers);
  }
  template <class Place, int count>
  __device__ __forceinline__ void copy_planes(const CodeSide& side, int64_t batch_head, int64_t first,
                                              uint32_t* to) const {
    constexpr int kPieces = count / 4;
    const uint32_t* from = codes.plane_of(side, batch_head, first);
    const int32_t length = plane_length(side.length);
    // a single time, mostly, and registers are short
#pragma unroll 1
    for (int i = threadIdx.x; i < codes.planes() * kPieces; i += Place::kBlockThreads)
      copy_ahead<16>(to + i * 4, from + int64_t{i / kPieces} * length + i % kPieces * 4, false);
  }
};

}  // namespace

bool goes_by_pairs(const Tensor& query, const Tensor& key, const Tensor& value, int64_t num_hash,
                   int64_t hash_code_len) {
  const char* setting = std::getenv("YOSO_CUDA_BACKWARD");
  const std::string_view way = setting == nullptr ? "" : setting;
  STD_TORCH_CHECK(setting == nullptr || way == "pairs" || way == "buckets",
                  "YOSO_CUDA_BACKWARD must be pairs or buckets, got ", setting);
  const bool is_16_bit = query.scalar_type() == ScalarType::BFloat16 || query.scalar_type() == ScalarType::Half;
  const int64_t planes = divide_up(num_hash, kWordBits) * hash_code_len;
  if (!is_16_bit || std::max(query.size(3), value.size(3)) > kMaxMmaColumns || planes > CollidingPairs::kMostPlanes)
    return false;
  if (setting != nullptr) return way == "pairs";
  const double N = query.size(2), M = key.size(2);
  return 2 * N * M * (kPairCost + static_cast<double>(planes)) <= kBucketCost * (N + M) * num_hash;
}

void sampled_attention_backward_by_pairs(const Device& device, const Tensor& grad, const Tensor& query,
                                         const Tensor& key, const Tensor& value, const Tensor& query_codes,
                                         const Tensor& key_codes, int64_t hash_code_len, const Tensor& grad_query,
                                         const Tensor& grad_key) {
  const CodePlanes planes(device, query_codes, key_codes, hash_code_len);
  const CollidingPairs pairs{planes.pairs()};
  const int64_t widest = widest_of(query, value);
  const Tensor grads = tile_rows(grad, widest), queries = tile_rows(query, widest);
  const Tensor keys = tile_rows(key, widest), values = tile_rows(value, widest);
  TileOutput query_output(grad_query, queries), key_output(grad_key, keys);
  const auto run = [&](auto element) {
    using In = decltype(element);
    const Launcher<In, CollidingPairs> launcher(device, queries, values);
    const Tensor query_inverse = inverse_lengths<In>(device, queries, pairs);
    const Tensor key_inverse = inverse_lengths<In>(device, keys, pairs.swapped());
    const Side<In> query_side = side_of<In>(queries, grads, query_inverse);
    const Side<In> key_side = side_of<In>(keys, values, key_inverse);
    launcher.gradient(query_side, key_side, pairs, query_output.tiles());
    launcher.gradient(key_side, query_side, pairs.swapped(), key_output.tiles());
  };
  if (query.scalar_type() == ScalarType::Half)
    run(Half{});
  else
    run(BFloat16{});
  query_output.copy();
  key_output.copy();
}

}  // namespace yoso
