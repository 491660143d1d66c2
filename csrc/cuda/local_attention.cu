// What sampled attention lacks of near pairs: their exact weight, less the share of the hash functions that agree.
#include "tiled_attention.h"

namespace yoso {
namespace {

// How codes are packed into words, of which one instruction compares all codes: a field is a code and a bit above it.
// What is left of a word's bits is room to shift its fields, so that the bits above those of several words do not meet.
struct WordLayout {
  // the lowest bit of every field, and the one above its code
  uint32_t ones, above;
  int tau, fields, shifts, words;

  WordLayout(int num_hash, int tau) : ones(0), above(0), tau(tau), fields(32 / (tau + 1)) {
    shifts = 32 - fields * (tau + 1) + 1;
    words = static_cast<int>(divide_up(num_hash, fields));
    for (int field = 0; field < fields; ++field) ones |= 1u << field * (tau + 1);
    above = ones << tau;
  }
};

// places that a line of words has past the last row: no tile ends later
constexpr int kPadding = 128;

// words [B * H, words, length + kPadding] of codes [B, H, m, N]; what is no code becomes filler
template <class Code>
__global__ void __launch_bounds__(kRowThreads)
    pack_codes_kernel(const Code* codes, WordLayout layout, int num_hash, int length, uint32_t filler,
                      uint32_t* words) {
  const int padded = length + kPadding, blocks = (padded + kRowThreads - 1) / kRowThreads;
  const int row = blockIdx.x % blocks * kRowThreads + threadIdx.x, line = blockIdx.x / blocks;
  const int word = line % layout.words, head = line / layout.words;
  if (row >= padded) return;
  uint32_t packed = 0;
  for (int field = 0; field < layout.fields; ++field) {
    const int hash = word * layout.fields + field;
    uint32_t code = filler;
    if (hash < num_hash && row < length) code = codes[(int64_t{head} * num_hash + hash) * length + row];
    packed |= (code & ((1u << layout.tau) - 1)) << field * (layout.tau + 1);
  }
  words[int64_t{line} * padded + row] = packed << word % layout.shifts;
}

Tensor pack_codes(const Device& device, const Tensor& codes, const WordLayout& layout, uint32_t filler) {
  const int64_t B = codes.size(0), H = codes.size(1), m = codes.size(2), N = codes.size(3);
  Tensor words = empty_tensor(codes, {B, H, layout.words, N + kPadding}, ScalarType::Int);
  const auto pack = [&](auto code) {
    launch(device, pack_codes_kernel<decltype(code)>, B * H * layout.words * divide_up(N + kPadding, kRowThreads),
           kRowThreads, 0, static_cast<const decltype(code)*>(codes.const_data_ptr()), layout, static_cast<int>(m),
           count_of(N, "rows"), filler, static_cast<uint32_t*>(words.mutable_data_ptr()));
  };
  dispatch_codes(codes, pack);
  return words;
}

// Codes [B, H, m, N] of either type.
struct Codes {
  const void* data;
  bool wide;

  __device__ __forceinline__ int32_t operator[](int64_t i) const {
    return wide ? static_cast<const int32_t*>(data)[i] : static_cast<const int16_t*>(data)[i];
  }
};

// The pairs of positions at most `window` apart, their weights p less the share of equal codes.
struct NearPairs {
  static constexpr bool kMasksRows = true, kPositive = false;
  static constexpr int kSumOthers = 32;
  Codes my_codes, other_codes;
  const uint32_t *my_words, *other_words;
  WordLayout layout;
  int num_hash, length, window;

  NearPairs swapped() const {
    return {other_codes, my_codes, other_words, my_words, layout, num_hash, length, window};
  }

  __device__ bool is_real(int64_t batch_head, int64_t row) const {
    return static_cast<uint32_t>(my_codes[batch_head * num_hash * length + row]) < (1u << layout.tau);
  }
  __device__ Range near(int64_t first, int64_t last, int64_t count) const {
    return {first > window ? first - window : 0, last + window < count ? last + window : count};
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
    const int padded = length + kPadding;
    const uint32_t* mine = my_words + place.batch_head * layout.words * padded + place.first_row;
    const uint32_t* others = other_words + place.batch_head * layout.words * padded + place.first_other;
    int agreeing[n][4] = {};
    for (int word = 0; word < layout.words;) {
      // the bits above the codes that agree, of as many words as can be shifted apart
      uint32_t above[n][4] = {};
      for (int shift = 0; shift < layout.shifts && word < layout.words; ++shift, ++word) {
        const uint32_t ones = layout.ones << shift, bits = layout.above << shift;
#pragma unroll
        for (int i = 0; i < n * 4; ++i) {
          const uint32_t equal = ~(mine[Place::row(i / 4, i % 4)] ^ others[Place::other(i / 4, i % 4)]);
          // where all bits of a code are equal, adding one carries to the bit above
          above[i / 4][i % 4] |= ((equal & (bits - ones)) + ones) & bits;
        }
        mine += padded;
        others += padded;
      }
#pragma unroll
      for (int i = 0; i < n * 4; ++i) agreeing[i / 4][i % 4] += __popc(above[i / 4][i % 4]);
    }
    kernel_weights<typename Place::Weight>(signed_as, x, layout.tau);
    const T share = T{1} / num_hash;
#pragma unroll
    for (int i = 0; i < n * 4; ++i) {
      const uint32_t distance = apart + Place::row(i / 4, i % 4) - Place::other(i / 4, i % 4);
      const bool near = distance <= static_cast<uint32_t>(2 * window);
      x[i / 4][i % 4] = near ? x[i / 4][i % 4] - agreeing[i / 4][i % 4] * share : 0;
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
    return layout.tau / T{2};
  }
};

// Packs the codes of both sides, of which the pairs are, and calls f with them.
template <class F>
void with_near_pairs(const Device& device, const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
                     int64_t window, const F& f) {
  STD_TORCH_CHECK(query_codes.size(2) <= INT32_MAX, "num_hash must fit 32 bits");
  const int num_hash = static_cast<int>(query_codes.size(2)), length = count_of(query_codes.size(3), "rows");
  const WordLayout layout(num_hash, static_cast<int>(hash_code_len));
  // different fillers: they must not agree
  const Tensor query_words = pack_codes(device, query_codes, layout, 0);
  const Tensor key_words = pack_codes(device, key_codes, layout, 1);
  const bool wide = query_codes.scalar_type() == ScalarType::Int;
  const auto data = [](const Tensor& words) { return static_cast<const uint32_t*>(words.const_data_ptr()); };
  // no two rows are further apart than the length, of which twice fits 32 bits
  STD_TORCH_CHECK(length <= INT32_MAX / 2 - kPadding, "too many rows for a window: ", length);
  f(NearPairs{{query_codes.const_data_ptr(), wide}, {key_codes.const_data_ptr(), wide}, data(query_words),
              data(key_words), layout, num_hash, length, static_cast<int>(window < length ? window : length)});
}

Tensor local_attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_codes,
                            const Tensor& key_codes, int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  const Device device(value);
  Tensor out = empty_heads_last(value, value.size(0), value.size(1), value.size(2), value.size(3));
  with_near_pairs(device, query_codes, key_codes, hash_code_len, window, [&](const NearPairs& pairs) {
    attention_forward(device, pairs, query, key, value, false, out, out);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> local_attention_backward_cuda(const Tensor& grad, const Tensor& query,
                                                                 const Tensor& key, const Tensor& value,
                                                                 const Tensor& query_codes, const Tensor& key_codes,
                                                                 int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  check_output(grad, "grad", query, value, query.scalar_type());
  const Device device(value);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor grad_query = empty_heads_last(query, B, H, N, query.size(3));
  Tensor grad_key = empty_heads_last(key, B, H, N, key.size(3));
  Tensor grad_value = empty_heads_last(value, B, H, N, value.size(3));
  with_near_pairs(device, query_codes, key_codes, hash_code_len, window, [&](const NearPairs& pairs) {
    attention_backward(device, pairs, grad, query, key, value, grad_query, grad_key, grad_value);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("local_attention", TORCH_BOX(&local_attention_cuda));
  m.impl("local_attention_backward", TORCH_BOX(&local_attention_backward_cuda));
}

}  // namespace yoso
