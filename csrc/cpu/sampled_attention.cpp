// Sampled attention: every value is added to the bucket of its key, every query reads its bucket.
#include "sampled_attention.h"

#include "unit_rows.h"

namespace yoso {
namespace {

// A head's values, its sums and the tables of a few hash functions, cut to columns of this many bytes, stay in a
// second-level cache.
constexpr int64_t kSliceBytes = 128;

// What the tables of a thread may take. Where the cache is small, they leave most of it to the values and sums.
int64_t table_bytes() {
  constexpr int64_t kMost = 512 * 1024;
  const int64_t cache_bytes = second_level_bytes();
  return 0 < cache_bytes && cache_bytes < 2 * kMost ? cache_bytes / 4 : kMost;
}

// Adds each of `count` rows of W vectors to its bucket of each of G tables. Codes outside a table are in no bucket.
template <class V, int W, int G, class Code>
YOSO_INLINE void add_to_buckets(const Code* codes, int64_t count, const Element<V>* rows, Element<V>* tables,
                                uint32_t table_size) {
  constexpr int64_t kStride = W * kLanes<V>;
  for (int64_t i = 0; i < count; ++i) {
    V row[W];
    for (int v = 0; v < W; ++v) row[v] = load<V>(rows + i * kStride + v * kLanes<V>);
    for (int g = 0; g < G; ++g) {
      const uint32_t code = static_cast<uint32_t>(codes[g * count + i]);
      if (code >= table_size) continue;
      Element<V>* bucket = tables + (g * int64_t{table_size} + code) * kStride;
      for (int v = 0; v < W; ++v)
        store<V>(bucket + v * kLanes<V>, load<V>(bucket + v * kLanes<V>) + row[v]);
    }
  }
}

// Adds to each of `count` rows its bucket of each of G tables.
template <class V, int W, int G, class Code>
YOSO_INLINE void add_from_buckets(const Code* codes, int64_t count, const Element<V>* tables, uint32_t table_size,
                                  Element<V>* rows) {
  constexpr int64_t kStride = W * kLanes<V>;
  for (int64_t i = 0; i < count; ++i) {
    V row[W];
    for (int v = 0; v < W; ++v) row[v] = load<V>(rows + i * kStride + v * kLanes<V>);
    for (int g = 0; g < G; ++g) {
      const uint32_t code = static_cast<uint32_t>(codes[g * count + i]);
      if (code >= table_size) continue;
      const Element<V>* bucket = tables + (g * int64_t{table_size} + code) * kStride;
      for (int v = 0; v < W; ++v) row[v] += load<V>(bucket + v * kLanes<V>);
    }
    for (int v = 0; v < W; ++v) store<V>(rows + i * kStride + v * kLanes<V>, row[v]);
  }
}

template <class V, int W, class Code>
YOSO_INLINE void zero_buckets(const Code* codes, int64_t count, Element<V>* table, uint32_t table_size) {
  constexpr int64_t kStride = W * kLanes<V>;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = static_cast<uint32_t>(codes[i]);
    if (code >= table_size) continue;
    // not by memset, for which GCC takes an instruction that starts slowly
    for (int v = 0; v < W; ++v) store<V>(table + code * kStride + v * kLanes<V>, V{});
  }
}

// One slice of one head: codes [m, count] of keys and queries, rows of W vectors.
template <class V, int W, class Code>
struct Slice {
  const Code *key_codes, *query_codes;
  int64_t num_keys, num_queries;
  uint32_t table_size;
  const Element<V>* values;
  Element<V>*tables, *sums;

  // the part of G hash functions from the given one on
  template <int G>
  YOSO_INLINE void add(int64_t hash) const {
    constexpr int64_t kColumns = W * kLanes<V>;
    const Code *to = key_codes + hash * num_keys, *from = query_codes + hash * num_queries;
    const int64_t table = table_size * kColumns;
    if (table_size <= num_queries) {
      std::memset(tables, 0, G * table * sizeof(Element<V>));
    } else {
      // buckets that no query reads may hold anything
      for (int g = 0; g < G; ++g)
        zero_buckets<V, W>(from + g * num_queries, num_queries, tables + g * table, table_size);
    }
    constexpr int kTogether = G < 2 ? G : 2;
    for (int g = 0; g < G; g += kTogether)
      add_to_buckets<V, W, kTogether>(to + g * num_keys, num_keys, values, tables + g * table, table_size);
    add_from_buckets<V, W, G>(from, num_queries, tables, table_size, sums);
  }

  YOSO_INLINE void add_all(int64_t num_hash, int64_t num_tables) const {
    for (int64_t hash = 0; hash < num_hash;) {
      const int64_t group = std::min(num_hash - hash, num_tables);
      if (group >= 8) {
        add<8>(hash);
        hash += 8;
      } else if (group >= 4) {
        add<4>(hash);
        hash += 4;
      } else if (group >= 2) {
        add<2>(hash);
        hash += 2;
      } else {
        add<1>(hash++);
      }
    }
  }
};

template <class T, class Code>
void sampled_forward(const Tensor& query_codes, const Tensor& key_codes, const InputRows& value, int64_t hash_code_len,
                     const OutputRows& out) {
  const int64_t B = value.batches, H = value.heads, M = value.count, Dv = value.columns;
  const int64_t m = query_codes.size(2), N = query_codes.size(3);
  const uint32_t table_size = 1u << hash_code_len;
  const Code* all_query_codes = static_cast<const Code*>(query_codes.const_data_ptr());
  const Code* all_key_codes = static_cast<const Code*>(key_codes.const_data_ptr());
  // columns do not interact, so a task is a slice of a head's
  constexpr int64_t kColumns = kSliceBytes / sizeof(T);
  // narrower slices where those of all threads would leave the cache
  const bool narrow = (M + N) * kSliceBytes * torch::stable::get_num_threads() > kThirdLevelBytes;
  const int64_t slice = narrow ? kRowQuantum : kColumns, slices = (Dv + slice - 1) / slice;
  const int64_t fitting = table_bytes() / (table_size * kSliceBytes);
  const int64_t num_tables = std::clamp<int64_t>(fitting, 1, std::min<int64_t>(m, 8));
  parallel_for(0, B * H * slices, 1, [&](int64_t begin, int64_t end) {
    Buffer<T> memory((M + N + num_tables * table_size) * slice);
    T *values = memory.data(), *sums = values + M * slice, *tables = sums + N * slice;
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      constexpr int kVectors = kSliceBytes / bytes();
      for (int64_t task = begin; task < end; ++task) {
        const int64_t batch_head = task / slices, batch = batch_head / H, head = batch_head % H;
        const int64_t first = task % slices * slice, width = std::min(slice, Dv - first);
        const Code *keys = all_key_codes + batch_head * m * M, *queries = all_query_codes + batch_head * m * N;
        const int64_t stride = padded(width);
        with_element<T>(value.type, [&](auto element) YOSO_INLINE_LAMBDA {
          auto rows = value.as<decltype(element)>();
          rows.data += first;
          load_rows<V>(rows, batch, head, 0, M, width, values, stride);
        });
        std::memset(sums, 0, N * stride * sizeof(T));
        if (stride == kColumns) {
          Slice<V, kVectors, Code>{keys, queries, M, N, table_size, values, tables, sums}.add_all(m, num_tables);
        } else {
          Slice<V, kVectors / 2, Code>{keys, queries, M, N, table_size, values, tables, sums}.add_all(m, num_tables);
        }
        with_element<T>(out.type, [&](auto element) YOSO_INLINE_LAMBDA {
          auto rows = out.as<decltype(element)>();
          rows.data += first;
          store_rows<V>(sums, stride, T{1} / m, rows, batch, head, 0, N, width);
        });
      }
    });
  });
}

}  // namespace

std::tuple<Tensor, Tensor> sum_by_buckets(const Tensor& value, const Tensor& query_codes, const Tensor& key_codes,
                                          int64_t hash_code_len, bool unit) {
  Tensor out = on_huge_pages(empty_heads_last(value, query_codes.size(3), value.size(3)));
  Tensor inverse_length = empty_inverse_length(out, unit);
  if (out.numel() > 0) {
    dispatch_accumulator(value, [&](auto accumulator) {
      dispatch_codes(query_codes, [&](auto code) {
        sampled_forward<decltype(accumulator), decltype(code)>(query_codes, key_codes, InputRows(value), hash_code_len,
                                                               OutputRows(out));
      });
    });
  }
  // not before: a task of the kernel has only some columns of a row
  if (unit) scale_to_unit_rows(out, inverse_length);
  return {out, inverse_length};
}

namespace {

// query, key and the choice of backward matter to autograd only
std::tuple<Tensor, Tensor> sampled_attention_cpu(const Tensor&, const Tensor&, const Tensor& value,
                                                 const Tensor& query_codes, const Tensor& key_codes,
                                                 int64_t hash_code_len, bool, bool unit) {
  check_all_codes(query_codes, key_codes, value, hash_code_len);
  return sum_by_buckets(value, query_codes, key_codes, hash_code_len, unit);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) { m.impl("sampled_attention", TORCH_BOX(&sampled_attention_cpu)); }

}  // namespace yoso
