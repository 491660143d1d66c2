// What sampled attention lacks of near pairs: their exact weight, less the share of the hash functions that agree.
#include "tiled_attention.h"

namespace yoso {
namespace {

// codes of a tile are staged and compared for this many hash functions at a time
constexpr int kHashBlock = 16;

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
  static constexpr int kSumBlocks = 1;
  static constexpr bool kMasksRows = true, kPositive = false;
  static constexpr size_t kScratchRowBytes = kHashBlock * sizeof(int32_t);
  Codes my_codes, other_codes;
  int num_hash, tau;
  int64_t length, window;

  NearPairs swapped() const { return {other_codes, my_codes, num_hash, tau, length, window}; }

  __device__ __forceinline__ bool in_table(int32_t code) const { return static_cast<uint32_t>(code) < (1u << tau); }
  __device__ bool is_real(int64_t batch_head, int64_t row) const {
    return in_table(my_codes[batch_head * num_hash * length + row]);
  }
  __device__ Range near(int64_t first, int64_t last, int64_t count) const {
    return {first > window ? first - window : 0, last + window < count ? last + window : count};
  }

  template <class Place, class T, int n>
  __device__ __forceinline__ void weigh(const Place& place, const T (&signed_as)[n][4], T (&x)[n][4]) const {
    // one bit for each pair: near, and both rows in a bucket
    uint32_t real = 0;
    int agreeing[n][4] = {};
    for (int hash = 0; hash < num_hash; hash += kHashBlock) {
      const int count = num_hash - hash < kHashBlock ? num_hash - hash : kHashBlock;
      int32_t *mine = place.scratch, *others = mine + kHashBlock * Place::kRows;
      // those before have been read
      __syncthreads();
      stage<Place::kRows, Place::kBlockThreads>(my_codes, place.batch_head, hash, count, place.first_row, mine);
      stage<Place::kOthers, Place::kBlockThreads>(other_codes, place.batch_head, hash, count, place.first_other,
                                                  others);
      __syncthreads();
      if (hash == 0) {
#pragma unroll
        for (int i = 0; i < n * 4; ++i) {
          const int row = Place::row(i / 4, i % 4), other = Place::other(i / 4, i % 4);
          const int64_t apart = place.first_row + row - place.first_other - other;
          real |= static_cast<uint32_t>(apart <= window && -apart <= window && in_table(mine[row]) &&
                                        in_table(others[other]))
                  << i;
        }
      }
      for (int h = 0; h < count; ++h, mine += Place::kRows, others += Place::kOthers)
#pragma unroll
        for (int i = 0; i < n * 4; ++i)
          agreeing[i / 4][i % 4] += mine[Place::row(i / 4, i % 4)] == others[Place::other(i / 4, i % 4)];
    }
    kernel_weights<typename Place::Weight>(signed_as, x, tau);
    const T share = T{1} / num_hash;
#pragma unroll
    for (int i = 0; i < n * 4; ++i)
      x[i / 4][i % 4] = (real >> i & 1) ? x[i / 4][i % 4] - agreeing[i / 4][i % 4] * share : 0;
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
    return tau / T{2};
  }

  // to [hash, row]; -1 past the end
  template <int rows, int threads>
  __device__ __forceinline__ void stage(const Codes& codes, int64_t batch_head, int hash, int count, int64_t first,
                                        int32_t* to) const {
    for (int i = threadIdx.x; i < count * rows; i += threads) {
      const int64_t row = first + i % rows;
      to[i] = row < length ? codes[(batch_head * num_hash + hash + i / rows) * length + row] : -1;
    }
  }
};

NearPairs near_pairs(const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len, int64_t window) {
  const int64_t N = query_codes.size(3);
  const bool wide = query_codes.scalar_type() == ScalarType::Int;
  STD_TORCH_CHECK(query_codes.size(2) <= INT32_MAX, "num_hash must fit 32 bits");
  // no two rows are further apart than N
  return {{query_codes.const_data_ptr(), wide},
          {key_codes.const_data_ptr(), wide},
          static_cast<int>(query_codes.size(2)),
          static_cast<int>(hash_code_len),
          N,
          window < N ? window : N};
}

Tensor local_attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_codes,
                            const Tensor& key_codes, int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  const Device device(value);
  Tensor out = empty_heads_last(value, value.size(0), value.size(1), value.size(2), value.size(3));
  const NearPairs pairs = near_pairs(query_codes, key_codes, hash_code_len, window);
  const Tensor rows[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    attention_forward<decltype(element)>(device, pairs, rows[0], rows[1], rows[2], false, out, out);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> local_attention_backward_cuda(const Tensor& grad, const Tensor& query,
                                                                 const Tensor& key, const Tensor& value,
                                                                 const Tensor& query_codes, const Tensor& key_codes,
                                                                 int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  check_grad(grad, query, value);
  const Device device(value);
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor grad_query = empty_heads_last(query, B, H, N, query.size(3));
  Tensor grad_key = empty_heads_last(key, B, H, N, key.size(3));
  Tensor grad_value = empty_heads_last(value, B, H, N, value.size(3));
  const NearPairs pairs = near_pairs(query_codes, key_codes, hash_code_len, window);
  const Tensor rows[] = {dense_rows(grad), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    attention_backward<decltype(element)>(device, pairs, rows[0], rows[1], rows[2], rows[3], grad_query, grad_key,
                                          grad_value);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("local_attention", TORCH_BOX(&local_attention_cuda));
  m.impl("local_attention_backward", TORCH_BOX(&local_attention_backward_cuda));
}

}  // namespace yoso
