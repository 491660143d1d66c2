// What sampled attention lacks of near pairs: their exact weight, less the share of the hash functions that agree.
#include "tiled_attention.h"

namespace yoso {
namespace {

// codes of a tile are copied and compared for this many hash functions at a time
constexpr int64_t kHashBlock = 64;

// Codes [B, H, m, N] of either type.
struct Codes {
  const void* data;
  bool wide;
  uint32_t table_size;

  YOSO_INLINE int32_t operator[](int64_t i) const {
    return wide ? static_cast<const int32_t*>(data)[i] : static_cast<const int16_t*>(data)[i];
  }
  // whether a row with this code, for its first hash function, has any
  YOSO_INLINE bool real(int64_t i) const { return static_cast<uint32_t>((*this)[i]) < table_size; }
};

// The pairs of positions at most `window` apart, their weights p less the share of equal codes.
struct NearPairs {
  static constexpr bool kUnit = true, kNear = true;
  Codes query_codes, key_codes;
  int64_t num_hash, length, tau, window;
  // of the head's first codes
  int64_t offset = 0;
  // codes of a tile, [hash, row], and how many of them agree; 16 bits tell any two codes that are in a table apart
  alignas(64) int16_t tile_queries[kHashBlock * kTileQueries] = {};
  alignas(64) int16_t tile_keys[kHashBlock * kTileKeys] = {};
  alignas(64) int16_t agreeing[kTileSize];

  NearPairs of_head(int64_t batch_head) const {
    NearPairs head = *this;
    head.offset = batch_head * num_hash * length;
    return head;
  }

  YOSO_INLINE Range keys_of(Range queries, Range keys) const { return near(queries, keys, kTileKeys); }
  YOSO_INLINE Range queries_of(Range keys, Range queries) const { return near(keys, queries, kTileQueries); }
  YOSO_INLINE Range near(Range tile, Range others, int64_t others_tile) const {
    const int64_t first = std::max<int64_t>(tile.begin - window, 0) / others_tile * others_tile;
    return {std::max(others.begin, first), std::min(others.end, tile.end + window)};
  }

  YOSO_INLINE bool is_real(int64_t key) const { return key_codes.real(offset + key); }

  template <class V, class Meanwhile, class T = Element<V>>
  YOSO_INLINE void weigh(Range queries, Range keys, T* weights, Meanwhile&& meanwhile) {
    kernel_weights<V>(queries, keys, weights, tau, meanwhile);
    for (int64_t hash = 0; hash < num_hash; hash += kHashBlock) {
      count_agreeing<V>(queries, keys, hash, std::min(kHashBlock, num_hash - hash));
      for (int64_t i = 0; i < kTileSize; ++i) weights[i] -= agreeing[i] * (T{1} / num_hash);
    }
    zero_others(queries, keys, weights);
  }

  template <class V, class T = Element<V>>
  YOSO_INLINE void weigh_slopes(Range queries, Range keys, T* weights, T* slopes) {
    weigh<V>(queries, keys, weights, NothingMeanwhile{});
    for (int64_t i = 0; i < kTileSize; ++i) slopes[i] = weights[i] * (static_cast<T>(tau) / 2);
  }

  template <class V, class T = Element<V>>
  YOSO_INLINE void centre_products(Range, T*) const {}

  YOSO_INLINE void copy_codes(const Codes& codes, Range rows, int64_t hash, int64_t count, int64_t stride,
                              int16_t* to) const {
    for (int64_t h = 0; h < count; ++h, to += stride) {
      const int64_t from = offset + (hash + h) * length + rows.begin;
      for (int64_t i = 0; i < rows.end - rows.begin; ++i) to[i] = static_cast<int16_t>(codes[from + i]);
    }
  }

  template <class V>
  YOSO_INLINE void count_agreeing(Range queries, Range keys, int64_t hash, int64_t count) {
    using C = Vector<int16_t, sizeof(V)>;
    constexpr int kTogether = 4;
    copy_codes(query_codes, queries, hash, count, kTileQueries, tile_queries);
    copy_codes(key_codes, keys, hash, count, kTileKeys, tile_keys);
    for (int64_t q = 0; q < kTileQueries; q += kTogether)
      for (int64_t k = 0; k < kTileKeys; k += kLanes<C>) {
        C sum[kTogether] = {};
        for (int64_t h = 0; h < count; ++h) {
          const C codes = load<C>(tile_keys + h * kTileKeys + k);
          // a comparison gives -1 where it holds
          for (int i = 0; i < kTogether; ++i) sum[i] -= codes == tile_queries[h * kTileQueries + q + i];
        }
        for (int i = 0; i < kTogether; ++i) store<C>(agreeing + (q + i) * kTileKeys + k, sum[i]);
      }
  }

  // Clears the weights of pairs that are further apart or have a masked row.
  template <class T>
  YOSO_INLINE void zero_others(Range queries, Range keys, T* weights) const {
    int32_t real[kTileKeys] = {};
    for (int64_t k = keys.begin; k < keys.end; ++k) real[k - keys.begin] = key_codes.real(offset + k);
    for (int64_t q = queries.begin; q < queries.end; ++q, weights += kTileKeys) {
      const bool none = !query_codes.real(offset + q);
      const int32_t begin = std::clamp<int64_t>(q - window - keys.begin, 0, kTileKeys);
      const int32_t end = none ? 0 : std::clamp<int64_t>(q + window + 1 - keys.begin, 0, kTileKeys);
      for (int32_t k = 0; k < kTileKeys; ++k) weights[k] = (k >= begin) & (k < end) & real[k] ? weights[k] : 0;
    }
  }
};

NearPairs near_pairs(const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len, int64_t window) {
  const int64_t N = query_codes.size(3);
  const bool wide = query_codes.scalar_type() == ScalarType::Int;
  const uint32_t table_size = 1u << hash_code_len;
  // no two rows are further apart than N
  return {{query_codes.const_data_ptr(), wide, table_size},
          {key_codes.const_data_ptr(), wide, table_size},
          query_codes.size(2),
          N,
          hash_code_len,
          std::min(window, N)};
}

Tensor local_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_codes,
                           const Tensor& key_codes, int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  const NearPairs pairs = near_pairs(query_codes, key_codes, hash_code_len, window);
  Tensor out = on_huge_pages(empty_heads_last(value));
  if (query.size(0) * query.size(1) * query.size(2) == 0) return out;
  dispatch_accumulator(query, [&](auto accumulator) {
    attention_forward<decltype(accumulator)>(pairs, InputRows(query), InputRows(key), InputRows(value), false,
                                             OutputRows(out), out);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> local_attention_backward_cpu(const Tensor& grad, const Tensor& query,
                                                                const Tensor& key, const Tensor& value,
                                                                const Tensor& query_codes, const Tensor& key_codes,
                                                                int64_t hash_code_len, int64_t window) {
  check_near(query, key, value, query_codes, key_codes, hash_code_len, window);
  const NearPairs pairs = near_pairs(query_codes, key_codes, hash_code_len, window);
  check_output(grad, "grad", query, value, query.scalar_type());
  Tensor grad_query = on_huge_pages(empty_heads_last(query));
  Tensor grad_key = on_huge_pages(empty_heads_last(key));
  Tensor grad_value = on_huge_pages(empty_heads_last(value));
  dispatch_accumulator(query, [&](auto accumulator) {
    attention_backward<decltype(accumulator)>(pairs, InputRows(grad), InputRows(query), InputRows(key),
                                              InputRows(value), OutputRows(grad_query), OutputRows(grad_key),
                                              OutputRows(grad_value));
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("local_attention", TORCH_BOX(&local_attention_cpu));
  m.impl("local_attention_backward", TORCH_BOX(&local_attention_backward_cpu));
}

}  // namespace yoso
