// What sampled attention lacks of near pairs: their exact weight, less the share of the hash functions that agree.
#include "code_planes.h"
#include "tiled_attention.h"

namespace yoso {
namespace {

// The pairs of positions at most `window` apart, their weights p less the share of equal codes.
struct NearPairs {
  static constexpr bool kMasksRows = true, kPositive = false;
  static constexpr int kSumOthers = 32;
  static constexpr int kBlocks = 3;
  static constexpr bool kByWarpgroups = false;
  PairedCodes codes;
  int window;

  NearPairs swapped() const { return {codes.swapped(), window}; }

  template <class T>
  __device__ bool is_real(int64_t batch_head, int64_t row, T) const {
    return codes.is_real(batch_head, row);
  }
  __device__ Range near(int64_t first, int64_t last, int64_t count) const {
    // from an even one on, see weigh
    return {first > window ? (first - window) / 2 * 2 : 0, last + window < count ? last + window : count};
  }

  template <class Place, class T, int n>
  __device__ __forceinline__ void weigh(const Place& place, const T (&signed_as)[n][4], T (&x)[n][4]) const {
    // distances are counted from -window on
    const int apart = static_cast<int>(place.first_row - place.first_other) + window;
    const int least = apart + Place::row(0, 0) - Place::other(n - 1, 3);
    const int most = apart + Place::row(n - 1, 3) - Place::other(0, 0);
    if (__ballot_sync(kAllLanes, most >= 0 && least <= 2 * window) == 0) {
#pragma unroll
      for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] = 0;
      return;
    }
    // before, as the cosines are not needed then
    kernel_weights<typename Place::Weight>(signed_as, x, codes.tau);
    const uint32_t* my_plane = codes.plane_of(codes.mine, place.batch_head, place.first_row);
    const uint32_t* other_plane = codes.plane_of(codes.others, place.batch_head, place.first_other);
    const int32_t my_length = plane_length(codes.mine.length), other_length = plane_length(codes.others.length);
    int equal[n][4];
    const auto compare_plane = [&](bool is_first, uint32_t(&differ)[n][4]) {
#pragma unroll
      for (int i = 0; i < n * 4; i += 2) {
        const uint2 pair = *reinterpret_cast<const uint2*>(other_plane + Place::other(i / 4, i % 4));
        const uint32_t bits[] = {my_plane[Place::row(i / 4, i % 4)] ^ pair.x,
                                 my_plane[Place::row(i / 4, i % 4 + 1)] ^ pair.y};
#pragma unroll
        for (int of = 0; of < 2; ++of)
          differ[i / 4][i % 4 + of] = is_first ? bits[of] : differ[i / 4][i % 4 + of] | bits[of];
      }
      my_plane += my_length;
      other_plane += other_length;
    };
    codes.count_equal(0, compare_plane, equal);
    const T share = T{1} / codes.num_hash;
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      const uint32_t distance = apart + Place::row(i / 4, i % 4) - Place::other(i / 4, i % 4);
      const bool near = distance <= static_cast<uint32_t>(2 * window);
      x[i / 4][i % 4] = near ? x[i / 4][i % 4] - equal[i / 4][i % 4] * share : 0;
    }
  }

  template <class Place, class T, int n>
  __device__ __forceinline__ void slopes(const Place& place, const T (&signed_as)[n][4], T (&x)[n][4],
                                         T (&products)[n][4]) const {
    weigh(place, signed_as, x);
#pragma unroll
    for (int i = 0; i < n * 4; ++i) products[i / 4][i % 4] *= x[i / 4][i % 4];
  }
  template <class T>
  __device__ T slope_scale() const {
    return codes.tau / T{2};
  }
};

NearPairs near_pairs(const CodePlanes& planes, int64_t length, int64_t window) {
  // no two rows are further apart than the length, of which twice fits 32 bits
  STD_TORCH_CHECK(length <= INT32_MAX / 2 - kPadding, "too many rows for a window: ", length);
  return {planes.pairs(), static_cast<int>(std::min(window, length))};
}

Tensor local_attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_codes,
                            const Tensor& key_codes, int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  const Device device(value);
  Tensor out = empty_heads_last(value);
  const CodePlanes planes(device, query_codes, key_codes, hash_code_len, PlaneOrder::kRows);
  attention_forward(device, near_pairs(planes, query.size(2), window), query, key, value, false, out, out);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> local_attention_backward_cuda(const Tensor& grad, const Tensor& query,
                                                                 const Tensor& key, const Tensor& value,
                                                                 const Tensor& query_codes, const Tensor& key_codes,
                                                                 int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  check_output(grad, "grad", query, value, query.scalar_type());
  const Device device(value);
  Tensor grad_query = empty_heads_last(query);
  Tensor grad_key = empty_heads_last(key);
  Tensor grad_value = empty_heads_last(value);
  const CodePlanes planes(device, query_codes, key_codes, hash_code_len, PlaneOrder::kRows);
  attention_backward(device, near_pairs(planes, query.size(2), window), grad, query, key, value, grad_query, grad_key,
                     grad_value);
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("local_attention", TORCH_BOX(&local_attention_cuda));
  m.impl("local_attention_backward", TORCH_BOX(&local_attention_backward_cuda));
}

}  // namespace yoso
