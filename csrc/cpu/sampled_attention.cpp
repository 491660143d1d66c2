// Sampled attention and its backward, by buckets: linear in the number of rows whatever the data.
#include "simd.h"

namespace yoso {
namespace {

// Adds every row to its bucket's. Codes outside the table belong to no bucket.
template <class T, class Code>
YOSO_MULTIVERSION void add_to_buckets(const Code* codes, int64_t count, const T* rows, int64_t columns, T* table,
                                      uint32_t table_size) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = static_cast<uint32_t>(codes[i]);
    if (code < table_size) add_row(table + code * columns, rows + i * columns, columns);
  }
}

template <class T, class Code>
YOSO_MULTIVERSION void add_from_buckets(const Code* codes, int64_t count, const T* table, uint32_t table_size,
                                        int64_t columns, T* rows) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = static_cast<uint32_t>(codes[i]);
    if (code < table_size) add_row(rows + i * columns, table + code * columns, columns);
  }
}

template <class T, class Code>
void zero_buckets(const Code* codes, int64_t count, int64_t columns, T* table, uint32_t table_size) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = static_cast<uint32_t>(codes[i]);
    if (code < table_size) std::memset(table + code * columns, 0, columns * sizeof(T));
  }
}

template <class In, class Code>
void sampled_forward(const Tensor& query_codes, const Tensor& key_codes, const Tensor& value, int64_t hash_code_len,
                     const Tensor& out) {
  using T = Accumulator<In>;
  const int64_t B = value.size(0), H = value.size(1), M = value.size(2), Dv = value.size(3);
  const int64_t m = query_codes.size(2), N = query_codes.size(3);
  const uint32_t table_size = 1u << hash_code_len;
  const Code* all_query_codes = static_cast<const Code*>(query_codes.const_data_ptr());
  const Code* all_key_codes = static_cast<const Code*>(key_codes.const_data_ptr());
  // columns do not interact: few heads are cut into slices of columns, so that every thread has work
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t slices = std::clamp<int64_t>((threads + B * H - 1) / (B * H), 1, padded(Dv) / kRowQuantum);
  const int64_t columns = padded((Dv + slices - 1) / slices);
  torch::stable::parallel_for(0, B * H * slices, 1, [&](int64_t task_begin, int64_t task_end) {
    Buffer<T> source(M * columns), sums(N * columns), table(table_size * columns);
    for (int64_t task = task_begin; task < task_end; ++task) {
      const int64_t batch_head = task / slices, batch = batch_head / H, head = batch_head % H;
      const int64_t first = task % slices * columns, width = std::min(columns, Dv - first);
      if (width <= 0) continue;
      Rows<const In> from = rows_of<In>(value);
      from.data += first;
      load_rows(from, batch, head, 0, M, width, source.data(), columns);
      sums.zero();
      for (int64_t hash = 0; hash < m; ++hash) {
        const Code* to_buckets = all_key_codes + (batch_head * m + hash) * M;
        const Code* from_buckets = all_query_codes + (batch_head * m + hash) * N;
        if (table_size <= N + M) {
          table.zero();
        } else {
          // a table that is larger than the rows is never swept as a whole
          zero_buckets(to_buckets, M, columns, table.data(), table_size);
          zero_buckets(from_buckets, N, columns, table.data(), table_size);
        }
        add_to_buckets<T, Code>(to_buckets, M, source.data(), columns, table.data(), table_size);
        add_from_buckets<T, Code>(from_buckets, N, table.data(), table_size, columns, sums.data());
      }
      Rows<In> to = mutable_rows_of<In>(out);
      to.data += first;
      store_rows(sums.data(), columns, T{1} / m, to, batch, head, 0, N, width);
    }
  });
}

// Rows in the order of their codes: order[offsets[c] .. offsets[c + 1]) are the rows with code c.
struct Buckets {
  Buffer<int32_t> offsets, order;
  Buckets(int64_t table_size, int64_t count) : offsets(table_size + 1), order(count) {}

  template <class Code>
  void sort(const Code* codes, int64_t count, uint32_t table_size) {
    offsets.zero();
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t code = static_cast<uint32_t>(codes[i]);
      if (code < table_size) ++offsets[code];
    }
    for (uint32_t code = 1; code <= table_size; ++code) offsets[code] += offsets[code - 1];
    // filling from the back turns each end into a beginning and keeps the rows' order
    for (int64_t i = count - 1; i >= 0; --i) {
      const uint32_t code = static_cast<uint32_t>(codes[i]);
      if (code < table_size) order[--offsets[code]] = static_cast<int32_t>(i);
    }
  }
};

// rows of a bucket that are multiplied at a time
constexpr int64_t kTileRows = 64;

// One side of the backward pass: the queries with the output's gradient, or the keys with the values.
template <class T>
struct Side {
  const int64_t count, columns, value_columns;
  // unit rows, their inverse lengths, gradients or values, and the sums that become the rows' gradient
  Buffer<T> unit, inverse_length, other, sums;
  Buckets buckets;
  // some rows of one bucket, gathered
  Buffer<T> tile_unit, tile_other, tile_sums;

  Side(int64_t count, int64_t columns, int64_t value_columns, int64_t table_size)
      : count(count),
        columns(columns),
        value_columns(value_columns),
        unit(count * columns),
        inverse_length(count),
        other(count * value_columns),
        sums(count * columns),
        buckets(table_size, count),
        tile_unit(kTileRows * columns),
        tile_other(kTileRows * value_columns),
        tile_sums(kTileRows * columns) {}

  template <class In>
  void load(const Tensor& rows, const Tensor& others, int64_t batch, int64_t head) {
    load_rows(rows_of<In>(rows), batch, head, 0, count, rows.size(3), unit.data(), columns);
    load_rows(rows_of<In>(others), batch, head, 0, count, others.size(3), other.data(), value_columns);
    normalize_rows(unit.data(), count, columns, inverse_length.data());
    sums.zero();
  }

  template <class In>
  void store(T scale, const Tensor& out, int64_t batch, int64_t head) {
    through_normalize(sums.data(), unit.data(), count, columns, inverse_length.data(), scale);
    store_rows(sums.data(), columns, T{1}, mutable_rows_of<In>(out), batch, head, 0, count, out.size(3));
  }

  YOSO_INLINE void gather(const int32_t* order, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) {
      copy_row(tile_unit.data() + i * columns, unit.data() + order[i] * columns, columns);
      copy_row(tile_other.data() + i * value_columns, other.data() + order[i] * value_columns, value_columns);
    }
    std::memset(tile_sums.data(), 0, rows * columns * sizeof(T));
  }

  YOSO_INLINE void scatter(const int32_t* order, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) add_row(sums.data() + order[i] * columns, tile_sums.data() + i * columns, columns);
  }
};

// Adds one bucket's part of W K to the queries' sums and of W^T Q to the keys', with W = G V^T. The products are
// taken pair by pair or through G^T Q and V^T K, whichever costs less, so that a crowded bucket stays linear.
template <class T>
YOSO_INLINE void add_bucket(Side<T>& queries, const int32_t* query_order, int64_t num_queries, Side<T>& keys,
                            const int32_t* key_order, int64_t num_keys, T* weights, T* grad_query_product,
                            T* value_key_product) {
  const int64_t D = queries.columns, Dv = queries.value_columns;
  if (num_queries * num_keys * (2 * D + Dv) <= 2 * (num_queries + num_keys) * D * Dv) {
    for (int64_t k = 0; k < num_keys; k += kTileRows) {
      const int64_t nk = std::min(kTileRows, num_keys - k);
      keys.gather(key_order + k, nk);
      for (int64_t q = 0; q < num_queries; q += kTileRows) {
        const int64_t nq = std::min(kTileRows, num_queries - q);
        queries.gather(query_order + q, nq);
        dot_products(nq, nk, Dv, queries.tile_other.data(), keys.tile_other.data(), weights, kTileRows);
        multiply(nq, D, nk, weights, kTileRows, 1, keys.tile_unit.data(), D, queries.tile_sums.data(), D);
        multiply(nk, D, nq, weights, 1, kTileRows, queries.tile_unit.data(), D, keys.tile_sums.data(), D);
        queries.scatter(query_order + q, nq);
      }
      keys.scatter(key_order + k, nk);
    }
    return;
  }
  std::memset(grad_query_product, 0, Dv * D * sizeof(T));
  std::memset(value_key_product, 0, Dv * D * sizeof(T));
  for (int64_t q = 0; q < num_queries; q += kTileRows) {
    const int64_t nq = std::min(kTileRows, num_queries - q);
    queries.gather(query_order + q, nq);
    multiply(Dv, D, nq, queries.tile_other.data(), 1, Dv, queries.tile_unit.data(), D, grad_query_product, D);
  }
  for (int64_t k = 0; k < num_keys; k += kTileRows) {
    const int64_t nk = std::min(kTileRows, num_keys - k);
    keys.gather(key_order + k, nk);
    multiply(Dv, D, nk, keys.tile_other.data(), 1, Dv, keys.tile_unit.data(), D, value_key_product, D);
    multiply(nk, D, Dv, keys.tile_other.data(), Dv, 1, grad_query_product, D, keys.tile_sums.data(), D);
    keys.scatter(key_order + k, nk);
  }
  for (int64_t q = 0; q < num_queries; q += kTileRows) {
    const int64_t nq = std::min(kTileRows, num_queries - q);
    queries.gather(query_order + q, nq);
    multiply(nq, D, Dv, queries.tile_other.data(), Dv, 1, value_key_product, D, queries.tile_sums.data(), D);
    queries.scatter(query_order + q, nq);
  }
}

template <class T>
YOSO_MULTIVERSION void add_all_buckets(Side<T>& queries, Side<T>& keys, int64_t table_size, T* weights,
                                       T* grad_query_product, T* value_key_product) {
  const Buffer<int32_t>&q = queries.buckets.offsets, &k = keys.buckets.offsets;
  for (int64_t code = 0; code < table_size; ++code) {
    const int64_t num_queries = q[code + 1] - q[code], num_keys = k[code + 1] - k[code];
    if (num_queries > 0 && num_keys > 0)
      add_bucket(queries, queries.buckets.order.data() + q[code], num_queries, keys,
                 keys.buckets.order.data() + k[code], num_keys, weights, grad_query_product, value_key_product);
  }
}

template <class In, class Code>
void sampled_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len,
                      const Tensor& grad_query, const Tensor& grad_key) {
  using T = Accumulator<In>;
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), M = key.size(2);
  const int64_t m = query_codes.size(2), columns = padded(query.size(3)), value_columns = padded(value.size(3));
  const uint32_t table_size = 1u << hash_code_len;
  const Code* all_query_codes = static_cast<const Code*>(query_codes.const_data_ptr());
  const Code* all_key_codes = static_cast<const Code*>(key_codes.const_data_ptr());
  torch::stable::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    Side<T> queries(N, columns, value_columns, table_size), keys(M, columns, value_columns, table_size);
    Buffer<T> weights(kTileRows * kTileRows);
    Buffer<T> grad_query_product(value_columns * columns), value_key_product(value_columns * columns);
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const int64_t batch = batch_head / H, head = batch_head % H;
      queries.template load<In>(query, grad, batch, head);
      keys.template load<In>(key, value, batch, head);
      for (int64_t hash = 0; hash < m; ++hash) {
        queries.buckets.sort(all_query_codes + (batch_head * m + hash) * N, N, table_size);
        keys.buckets.sort(all_key_codes + (batch_head * m + hash) * M, M, table_size);
        add_all_buckets(queries, keys, table_size, weights.data(), grad_query_product.data(),
                        value_key_product.data());
      }
      const T scale = static_cast<T>(hash_code_len) / (2 * m);
      queries.template store<In>(scale, grad_query, batch, head);
      keys.template store<In>(scale, grad_key, batch, head);
    }
  });
}

void check_all_codes(const Tensor& query_codes, const Tensor& key_codes, const Tensor& value, int64_t hash_code_len) {
  check_hash_sizes(query_codes.size(2), hash_code_len);
  check_codes(query_codes, "query_codes", hash_code_len);
  check_codes(key_codes, "key_codes", hash_code_len);
  STD_TORCH_CHECK(value.dim() == 4 && key_codes.size(3) == value.size(2), "key_codes must have a code for every value");
  for (int64_t dim = 0; dim < 2; ++dim)
    STD_TORCH_CHECK(query_codes.size(dim) == value.size(dim) && key_codes.size(dim) == value.size(dim),
                    "codes and value must agree in batch and heads");
  STD_TORCH_CHECK(query_codes.size(2) == key_codes.size(2), "query_codes and key_codes must agree in num_hash");
}

// query, key and the choice of backward matter to autograd only
Tensor sampled_attention_cpu(const Tensor&, const Tensor&, const Tensor& value, const Tensor& query_codes,
                             const Tensor& key_codes, int64_t hash_code_len, bool) {
  check_all_codes(query_codes, key_codes, value, hash_code_len);
  const Tensor rows = dense_rows(value);
  Tensor out = empty_heads_last(value, value.size(0), value.size(1), query_codes.size(3), value.size(3));
  if (out.numel() == 0) return out;
  dispatch_floating(rows, [&](auto element) {
    dispatch_codes(query_codes, [&](auto code) {
      sampled_forward<decltype(element), decltype(code)>(query_codes, key_codes, rows, hash_code_len, out);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> sampled_attention_backward_cpu(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                          const Tensor& value, const Tensor& query_codes,
                                                          const Tensor& key_codes, int64_t hash_code_len) {
  check_all_codes(query_codes, key_codes, value, hash_code_len);
  const ScalarType dtype = query.scalar_type();
  check_rows(query, "query", value, query_codes.size(3), dtype);
  check_rows(key, "key", value, value.size(2), dtype);
  check_rows(grad, "grad", value, query_codes.size(3), dtype);
  check_rows(value, "value", value, value.size(2), dtype);
  STD_TORCH_CHECK(query.size(3) == key.size(3), "query and key must agree in head_dim");
  STD_TORCH_CHECK(grad.size(3) == value.size(3), "grad and value must agree in columns");
  Tensor grad_query = empty_heads_last(query, query.size(0), query.size(1), query.size(2), query.size(3));
  Tensor grad_key = empty_heads_last(key, key.size(0), key.size(1), key.size(2), key.size(3));
  const Tensor rows[] = {dense_rows(grad), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_floating(query, [&](auto element) {
    dispatch_codes(query_codes, [&](auto code) {
      sampled_backward<decltype(element), decltype(code)>(rows[0], rows[1], rows[2], rows[3], query_codes, key_codes,
                                                          hash_code_len, grad_query, grad_key);
    });
  });
  return {grad_query, grad_key};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("sampled_attention", TORCH_BOX(&sampled_attention_cpu));
  m.impl("sampled_attention_backward", TORCH_BOX(&sampled_attention_backward_cpu));
}

}  // namespace yoso
