// Softmax attention of which a remainder is given: the rest is the first order of the exponent, but for a few heavy
// keys, of which it is all.
#include "tiled_attention.h"

#include <limits>

namespace yoso {
namespace {

// sums over rows are those of so many parts, on any number of threads
constexpr int64_t kParts = 32;

// The sums over a head's light keys of w, of w value, of scale w key and of scale w key value^T, with w a key's weight,
// one after the other in memory.
template <class T>
struct KeySums {
  T *weight, *value, *key, *key_value;

  KeySums(T* data, int64_t columns, int64_t value_columns)
      : weight(data), value(data + kRowQuantum), key(value + value_columns), key_value(key + columns) {}
  static int64_t size(int64_t columns, int64_t value_columns) {
    return kRowQuantum + value_columns + columns + columns * value_columns;
  }
};

// The gradients of these sums, where scale is multiplied last, and of the heavy keys, their values and weights.
template <class T>
struct Gradients {
  T *weight, *value, *key, *key_value, *heavy_key, *heavy_value, *heavy_weight;

  Gradients(T* data, int64_t columns, int64_t value_columns) {
    const KeySums<T> sums(data, columns, value_columns);
    weight = sums.weight;
    value = sums.value;
    key = sums.key;
    key_value = sums.key_value;
    heavy_key = data + KeySums<T>::size(columns, value_columns);
    heavy_value = heavy_key + kTileKeys * columns;
    heavy_weight = heavy_value + kTileKeys * value_columns;
  }
  static int64_t size(int64_t columns, int64_t value_columns) {
    return KeySums<T>::size(columns, value_columns) + kTileKeys * (columns + value_columns + 1);
  }
};

// Sums up what add(rows, sums) adds to sums of `size` numbers, for parts of `count` rows in parallel.
template <class T, class F>
void sum_parts(int64_t count, int64_t tile, int64_t size, T* sums, const F& add) {
  const int64_t tiles = (count + tile - 1) / tile, parts = std::min(tiles, kParts);
  Buffer<T> partial(parts * size);
  partial.zero();
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const Range rows{part * tiles / parts * tile, std::min(count, (part + 1) * tiles / parts * tile)};
      add(rows, partial.data() + part * size);
    }
  });
  std::fill_n(sums, size, T{0});
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t i = 0; i < size; ++i) sums[i] += partial[part * size + i];
}

// What the queries of one head meet: the sums over the light keys, and the heavy ones. Weights are 0 in `light` for the
// heavy, in `heavy_weight` where there are fewer than a tile.
template <class T>
struct Keys {
  const InputRows &key, &value;
  const int64_t batch, head, count, columns, value_columns, num_heavy;
  const int64_t* heavy;
  const T scale;
  // weights are divided by 2^shift: those of a logarithm of 0 are `unit`
  const int32_t shift;
  const T unit, most;
  Buffer<T> light, sums_data, heavy_key, heavy_tile, heavy_value, heavy_weight;
  KeySums<T> sums;

  Keys(const InputRows& key, const InputRows& value, const Tensor& key_weight, const Tensor& shifts,
       const Tensor& all_heavy, int64_t batch_head, T scale)
      : key(key),
        value(value),
        batch(batch_head / key.heads),
        head(batch_head % key.heads),
        count(key.count),
        columns(padded(key.columns)),
        value_columns(padded(value.columns)),
        num_heavy(all_heavy.size(2)),
        heavy(static_cast<const int64_t*>(all_heavy.const_data_ptr()) + batch_head * num_heavy),
        scale(scale),
        shift(static_cast<const int32_t*>(shifts.const_data_ptr())[batch_head]),
        unit(std::ldexp(T{1}, -shift)),
        most(kMaxLogarithm + static_cast<T>(kLog2) * shift),
        light(count),
        sums_data(KeySums<T>::size(columns, value_columns)),
        heavy_key(kTileKeys * columns),
        heavy_tile(kTileKeys * columns),
        heavy_value(kTileKeys * value_columns),
        heavy_weight(kTileKeys),
        sums(sums_data.data(), columns, value_columns) {
    std::copy_n(static_cast<const T*>(key_weight.const_data_ptr()) + batch_head * count, count, light.data());
    heavy_weight.zero();
    for (int64_t k = 0; k < num_heavy; ++k) {
      heavy_weight[k] = light[heavy[k]];
      light[heavy[k]] = 0;
    }
    for (int64_t k = 0; k < count; ++k) light[k] *= unit;
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      for (int64_t k = 0; k < num_heavy; ++k)
        load_tile<V>({heavy[k], heavy[k] + 1}, heavy_key.data() + k * columns, heavy_value.data() + k * value_columns);
      transpose_tiles<V>(heavy_key.data(), num_heavy, columns, heavy_tile.data());
    });
    sum_parts(count, kTileKeys, KeySums<T>::size(columns, value_columns), sums_data.data(), [&](Range rows, T* to) {
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA { add<Vector<T, bytes()>>(rows, to); });
    });
    for (int64_t i = sums.key - sums_data.data(); i < KeySums<T>::size(columns, value_columns); ++i)
      sums_data[i] *= scale;
  }

  template <class V>
  YOSO_INLINE void load_tile(Range rows, T* keys, T* values) const {
    load_rows<V>(key, batch, head, rows.begin, rows.end, keys, columns);
    load_rows<V>(value, batch, head, rows.begin, rows.end, values, value_columns);
  }

  template <class V>
  YOSO_INLINE void add(Range rows, T* data) const {
    const KeySums<T> to(data, columns, value_columns);
    Buffer<T> keys(kTileKeys * columns), values(kTileKeys * value_columns);
    const AllRows<const T> key_rows{keys.data(), columns}, value_rows{values.data(), value_columns};
    for (int64_t first = rows.begin; first < rows.end; first += kTileKeys) {
      const int64_t num = std::min(kTileKeys, rows.end - first);
      load_tile<V>({first, first + num}, keys.data(), values.data());
      const AllRows<const T> weights{light.data() + first, 1};
      multiply<V>(1, columns, num, weights, 1, key_rows, AllRows<T>{to.key, 1});
      multiply<V>(1, value_columns, num, weights, 1, value_rows, AllRows<T>{to.value, 1});
      T weight = 0;
      for (int64_t k = 0; k < num; ++k) {
        const T w = light[first + k];
        T* row = values.data() + k * value_columns;
        weight += w;
        for (int64_t c = 0; c < value_columns; c += kLanes<V>) store<V>(row + c, load<V>(row + c) * w);
      }
      *to.weight += weight;
      multiply<V>(columns, value_columns, num, AllRows<const T>{keys.data(), 1}, columns, value_rows,
                  AllRows<T>{to.key_value, value_columns});
    }
  }

  // of a tile of queries and the heavy keys: their logarithms, and exp of these
  template <class V>
  YOSO_INLINE void heavy_exponentials(const T* queries, int64_t num, T* logarithms, T* exponentials) const {
    multiply<V, false>(num, kTileKeys, columns, AllRows<const T>{queries, columns}, 1,
                       AllRows<const T>{heavy_tile.data(), kTileKeys}, AllRows<T>{logarithms, kTileKeys});
    for (int64_t i = 0; i < num * kTileKeys; ++i) {
      logarithms[i] *= scale;
      exponentials[i] = exponential(logarithms[i] < most ? logarithms[i] : most, shift);
    }
  }
};

// Stores the output of some queries, and their weights' sums; `total` has those of the remainder.
template <class V, class T = Element<V>>
YOSO_INLINE void attend(const Keys<T>& keys, const InputRows& query, const InputRows& remainder, Range rows,
                        const OutputRows& out, T* total) {
  const int64_t columns = keys.columns, value_columns = keys.value_columns;
  Buffer<T> queries(kTileQueries * columns), sums(kTileQueries * value_columns), rest(kTileQueries * value_columns);
  alignas(64) T logarithms[kTileSize], weights[kTileSize];
  for (int64_t row = rows.begin; row < rows.end; row += kTileQueries) {
    const int64_t num = std::min(kTileQueries, rows.end - row);
    load_rows<V>(query, keys.batch, keys.head, row, row + num, queries.data(), columns);
    for (int64_t q = 0; q < num; ++q) {
      V sum = {};
      for (int64_t c = 0; c < columns; c += kLanes<V>)
        sum += load<V>(queries.data() + q * columns + c) * load<V>(keys.sums.key + c);
      total[row + q] += *keys.sums.weight + sum_of_lanes(sum);
      std::copy_n(keys.sums.value, value_columns, sums.data() + q * value_columns);
    }
    multiply<V>(num, value_columns, columns, AllRows<const T>{queries.data(), columns}, 1,
                AllRows<const T>{keys.sums.key_value, value_columns}, AllRows<T>{sums.data(), value_columns});
    if (keys.num_heavy > 0) {
      keys.template heavy_exponentials<V>(queries.data(), num, logarithms, weights);
      for (int64_t q = 0; q < num; ++q) {
        V sum = {};
        for (int64_t k = 0; k < kTileKeys; k += kLanes<V>) {
          T* to = weights + q * kTileKeys + k;
          const V weight = load<V>(to) * load<V>(keys.heavy_weight.data() + k);
          store<V>(to, weight);
          sum += weight;
        }
        total[row + q] += sum_of_lanes(sum);
      }
      multiply<V>(num, value_columns, keys.num_heavy, AllRows<const T>{weights, kTileKeys}, 1,
                  AllRows<const T>{keys.heavy_value.data(), value_columns}, AllRows<T>{sums.data(), value_columns});
    }
    load_rows<V>(remainder, keys.batch, keys.head, row, row + num, rest.data(), value_columns);
    for (int64_t q = 0; q < num; ++q) {
      const T divisor = total[row + q] > kSmallestTotal ? total[row + q] : std::numeric_limits<T>::infinity();
      for (int64_t i = q * value_columns; i < (q + 1) * value_columns; i += kLanes<V>)
        store<V>(sums.data() + i, (load<V>(sums.data() + i) + load<V>(rest.data() + i)) / divisor);
    }
    store_rows<V>(sums.data(), value_columns, T{1}, out, keys.batch, keys.head, row, row + num);
  }
}

template <class T>
void forward(const InputRows& query, const InputRows& key, const InputRows& value, const Tensor& key_weight,
             const Tensor& shift, const Tensor& heavy, const InputRows& remainder, const Tensor& remainder_total,
             double scale, const OutputRows& out, const Tensor& total) {
  const int64_t N = query.count;
  T* totals = static_cast<T*>(total.mutable_data_ptr());
  std::copy_n(static_cast<const T*>(remainder_total.const_data_ptr()), total.numel(), totals);
  for_heads(query.batches * query.heads, [&](int64_t begin, int64_t end, bool) {
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const Keys<T> keys(key, value, key_weight, shift, heavy, batch_head, static_cast<T>(scale));
      for_tiles(N, kTileQueries, [&](Range rows) {
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          attend<Vector<T, bytes()>>(keys, query, remainder, rows, out, totals + batch_head * N);
        });
      });
    }
  });
}

// What the backward keeps of a head beside its keys.
template <class T>
struct Transposes {
  // of the sums key_value; of the heavy values
  Buffer<T> value_key, heavy_value_tile;

  explicit Transposes(const Keys<T>& keys)
      : value_key(keys.columns * keys.value_columns), heavy_value_tile(kTileKeys * keys.value_columns) {
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      transpose_rows<V>(AllRows<const T>{keys.sums.key_value, keys.value_columns}, keys.columns, keys.value_columns,
                        value_key.data(), keys.columns);
      transpose_tiles<V>(keys.heavy_value.data(), keys.num_heavy, keys.value_columns, heavy_value_tile.data());
    });
  }
};

// What the backward has of the queries, and what it gives of them.
struct QueryTensors {
  InputRows grad, out, query;
  Tensor total;
  OutputRows grad_query, grad_remainder;
  Tensor grad_remainder_total;
};

// Loads the gradient of some queries' output, turns it into that of the sums before they were divided, and stores that:
// it is the remainder's too. grad_total gets that of the weights' sums.
template <class V, class T = Element<V>>
YOSO_INLINE void load_gradients(const Keys<T>& keys, const QueryTensors& x, int64_t row, int64_t num, T* grads, T* outs,
                                T* grad_total) {
  const int64_t value_columns = keys.value_columns;
  const int64_t first = (keys.batch * x.query.heads + keys.head) * x.query.count + row;
  load_rows<V>(x.grad, keys.batch, keys.head, row, row + num, grads, value_columns);
  load_rows<V>(x.out, keys.batch, keys.head, row, row + num, outs, value_columns);
  for (int64_t q = 0; q < num; ++q) {
    const T total = static_cast<const T*>(x.total.const_data_ptr())[first + q];
    const T inverse = total > kSmallestTotal ? 1 / total : 0;
    V sum = {};
    for (int64_t i = q * value_columns; i < (q + 1) * value_columns; i += kLanes<V>) {
      const V grad = load<V>(grads + i) * inverse;
      store<V>(grads + i, grad);
      sum -= grad * load<V>(outs + i);
    }
    grad_total[q] = sum_of_lanes(sum);
  }
  store_rows<V>(grads, value_columns, T{1}, x.grad_remainder, keys.batch, keys.head, row, row + num);
  std::copy_n(grad_total, num, static_cast<T*>(x.grad_remainder_total.mutable_data_ptr()) + first);
}

// Stores the gradient of some queries, and adds to those of what they met.
template <class V, class T = Element<V>>
YOSO_INLINE void query_gradients(const Keys<T>& keys, const Transposes<T>& transposes, const QueryTensors& x,
                                 Range rows, const Gradients<T>& to) {
  const int64_t columns = keys.columns, value_columns = keys.value_columns;
  Buffer<T> queries(kTileQueries * columns), results(kTileQueries * columns);
  Buffer<T> grads(kTileQueries * value_columns), outs(kTileQueries * value_columns);
  const AllRows<const T> query_rows{queries.data(), columns}, grad_rows{grads.data(), value_columns};
  const AllRows<T> result_rows{results.data(), columns};
  alignas(64) T logarithms[kTileSize], weights[kTileSize], products[kTileSize];
  T ones[kTileQueries], grad_total[kTileQueries];
  std::fill_n(ones, kTileQueries, T{1});
  for (int64_t row = rows.begin; row < rows.end; row += kTileQueries) {
    const int64_t num = std::min(kTileQueries, rows.end - row);
    load_rows<V>(x.query, keys.batch, keys.head, row, row + num, queries.data(), columns);
    load_gradients<V>(keys, x, row, num, grads.data(), outs.data(), grad_total);
    T tile_total = 0;
    for (int64_t q = 0; q < num; ++q) {
      const T total = grad_total[q];
      tile_total += total;
      for (int64_t c = 0; c < columns; c += kLanes<V>) store<V>(result_rows[q] + c, load<V>(keys.sums.key + c) * total);
    }
    *to.weight += tile_total;
    multiply<V>(1, value_columns, num, AllRows<const T>{ones, 1}, 1, grad_rows, AllRows<T>{to.value, 1});
    multiply<V>(1, columns, num, AllRows<const T>{grad_total, 1}, 1, query_rows, AllRows<T>{to.key, 1});
    multiply<V>(columns, value_columns, num, AllRows<const T>{queries.data(), 1}, columns, grad_rows,
                AllRows<T>{to.key_value, value_columns});
    multiply<V>(num, columns, value_columns, grad_rows, 1, AllRows<const T>{transposes.value_key.data(), columns},
                result_rows);
    if (keys.num_heavy > 0) {
      keys.template heavy_exponentials<V>(queries.data(), num, logarithms, weights);
      multiply<V, false>(num, kTileKeys, value_columns, grad_rows, 1,
                         AllRows<const T>{transposes.heavy_value_tile.data(), kTileKeys},
                         AllRows<T>{products, kTileKeys});
      for (int64_t q = 0; q < num; ++q)
        for (int64_t k = 0; k < kTileKeys; ++k) {
          const int64_t i = q * kTileKeys + k;
          const T product = weights[i] * (products[i] + grad_total[q]), w = keys.heavy_weight[k];
          products[i] = logarithms[i] < keys.most ? keys.scale * product * w : 0;
          weights[i] *= w;
          logarithms[i] = product;
        }
      multiply<V>(1, kTileKeys, num, AllRows<const T>{ones, 1}, 1, AllRows<const T>{logarithms, kTileKeys},
                  AllRows<T>{to.heavy_weight, 1});
      multiply<V>(num, columns, keys.num_heavy, AllRows<const T>{products, kTileKeys}, 1,
                  AllRows<const T>{keys.heavy_key.data(), columns}, result_rows);
      multiply<V>(keys.num_heavy, columns, num, AllRows<const T>{products, 1}, kTileKeys, query_rows,
                  AllRows<T>{to.heavy_key, columns});
      multiply<V>(keys.num_heavy, value_columns, num, AllRows<const T>{weights, 1}, kTileKeys, grad_rows,
                  AllRows<T>{to.heavy_value, value_columns});
    }
    store_rows<V>(results.data(), columns, T{1}, x.grad_query, keys.batch, keys.head, row, row + num);
  }
}

template <class V, class T = Element<V>>
YOSO_INLINE void store_key_rows(const Keys<T>& keys, const T* key_rows, const T* value_rows, Range rows,
                                const OutputRows& grad_key, const OutputRows& grad_value) {
  store_rows<V>(key_rows, keys.columns, T{1}, grad_key, keys.batch, keys.head, rows.begin, rows.end);
  store_rows<V>(value_rows, keys.value_columns, T{1}, grad_value, keys.batch, keys.head, rows.begin, rows.end);
}

// Stores the gradients of some light keys; value_key is the transpose of from.key_value.
template <class V, class T = Element<V>>
YOSO_INLINE void key_gradients(const Keys<T>& keys, const Gradients<T>& from, const T* value_key, Range rows,
                               const OutputRows& grad_key, const OutputRows& grad_value, T* grad_weight) {
  const int64_t columns = keys.columns, value_columns = keys.value_columns;
  Buffer<T> key_data(kTileKeys * columns), value_data(kTileKeys * value_columns);
  Buffer<T> key_results(kTileKeys * columns), value_results(kTileKeys * value_columns);
  const AllRows<T> key_rows{key_data.data(), columns}, value_rows{value_data.data(), value_columns};
  const AllRows<T> to_keys{key_results.data(), columns}, to_values{value_results.data(), value_columns};
  for (int64_t first = rows.begin; first < rows.end; first += kTileKeys) {
    const int64_t num = std::min(kTileKeys, rows.end - first);
    keys.template load_tile<V>({first, first + num}, key_data.data(), value_data.data());
    for (int64_t k = 0; k < num; ++k) {
      std::copy_n(from.key, columns, to_keys[k]);
      std::copy_n(from.value, value_columns, to_values[k]);
    }
    multiply<V>(num, columns, value_columns, value_rows, 1, AllRows<const T>{value_key, columns}, to_keys);
    multiply<V>(num, value_columns, columns, key_rows, 1, AllRows<const T>{from.key_value, value_columns}, to_values);
    for (int64_t k = 0; k < num; ++k) {
      const T w = keys.light[first + k];
      V sum = {};
      for (int64_t c = 0; c < columns; c += kLanes<V>) {
        const V x = load<V>(to_keys[k] + c);
        sum += load<V>(key_rows[k] + c) * x;
        store<V>(to_keys[k] + c, w * x);
      }
      for (int64_t c = 0; c < value_columns; c += kLanes<V>) {
        sum += load<V>(value_rows[k] + c) * load<V>(from.value + c);
        store<V>(to_values[k] + c, w * load<V>(to_values[k] + c));
      }
      grad_weight[first + k] = (*from.weight + sum_of_lanes(sum)) * keys.unit;
    }
    store_key_rows<V>(keys, to_keys.data, to_values.data, {first, first + num}, grad_key, grad_value);
  }
}

template <class T>
void backward(const QueryTensors& x, const InputRows& key, const InputRows& value, const Tensor& key_weight,
              const Tensor& shift, const Tensor& heavy, double scale, const OutputRows& grad_key,
              const OutputRows& grad_value, const Tensor& grad_weight) {
  const int64_t N = x.query.count, M = key.count;
  const int64_t columns = padded(x.query.columns), value_columns = padded(value.columns);
  for_heads(x.query.batches * x.query.heads, [&](int64_t begin, int64_t end, bool) {
    Buffer<T> data(Gradients<T>::size(columns, value_columns)), value_key(columns * value_columns);
    const Gradients<T> gradients(data.data(), columns, value_columns);
    for (int64_t batch_head = begin; batch_head < end; ++batch_head) {
      const Keys<T> keys(key, value, key_weight, shift, heavy, batch_head, static_cast<T>(scale));
      const Transposes<T> transposes(keys);
      sum_parts(N, kTileQueries, Gradients<T>::size(columns, value_columns), data.data(), [&](Range rows, T* sums) {
        const Gradients<T> to(sums, columns, value_columns);
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          query_gradients<Vector<T, bytes()>>(keys, transposes, x, rows, to);
        });
      });
      for (int64_t c = 0; c < columns; ++c) gradients.key[c] *= keys.scale;
      for (int64_t i = 0; i < columns * value_columns; ++i) gradients.key_value[i] *= keys.scale;
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        transpose_rows<Vector<T, bytes()>>(AllRows<const T>{gradients.key_value, value_columns}, columns, value_columns,
                                           value_key.data(), columns);
      });
      T* grad_weights = static_cast<T*>(grad_weight.mutable_data_ptr()) + batch_head * M;
      for_tiles(M, kTileKeys, [&](Range rows) {
        vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
          key_gradients<Vector<T, bytes()>>(keys, gradients, value_key.data(), rows, grad_key, grad_value,
                                            grad_weights);
        });
      });
      vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
        for (int64_t k = 0; k < keys.num_heavy; ++k) {
          const int64_t row = keys.heavy[k];
          grad_weights[row] = gradients.heavy_weight[k];
          store_key_rows<Vector<T, bytes()>>(keys, gradients.heavy_key + k * columns,
                                             gradients.heavy_value + k * value_columns, {row, row + 1}, grad_key,
                                             grad_value);
        }
      });
    }
  });
}

// On a CPU a wrong place can be told from the data.
void check_places(const Tensor& heavy, int64_t num_keys) {
  const int64_t* places = static_cast<const int64_t*>(heavy.const_data_ptr());
  for (int64_t i = 0; i < heavy.numel(); ++i)
    STD_TORCH_CHECK(places[i] >= 0 && places[i] < num_keys, "heavy must be in 0..", num_keys - 1, ", got ", places[i]);
}

std::tuple<Tensor, Tensor> first_order_attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Tensor& key_weight, const Tensor& shift,
                                                     const Tensor& heavy, const Tensor& remainder,
                                                     const Tensor& remainder_total, double scale) {
  check_first_order(query, key, value, key_weight, shift, heavy, scale);
  check_output(remainder, "remainder", query, value, length_dtype(query));
  check_row_numbers(remainder_total, "remainder_total", query);
  check_places(heavy, key.size(2));
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2);
  Tensor out = on_huge_pages(empty_heads_last(value, N, value.size(3)));
  Tensor total = empty_row_numbers(query);
  if (B * H * N == 0) return {out, total};
  dispatch_accumulator(query, [&](auto accumulator) {
    forward<decltype(accumulator)>(InputRows(query), InputRows(key), InputRows(value), key_weight, shift, heavy,
                                   InputRows(remainder), remainder_total, scale, OutputRows(out), total);
  });
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> first_order_attention_backward_cpu(
    const Tensor& grad, const Tensor& out, const Tensor& total, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& key_weight, const Tensor& shift, const Tensor& heavy, double scale) {
  check_first_order(query, key, value, key_weight, shift, heavy, scale);
  check_output(grad, "grad", query, value, query.scalar_type());
  check_output(out, "out", query, value, query.scalar_type());
  check_row_numbers(total, "total", query);
  check_places(heavy, key.size(2));
  const int64_t B = query.size(0), H = query.size(1), N = query.size(2), M = key.size(2);
  Tensor grad_query = on_huge_pages(empty_heads_last(query));
  Tensor grad_key = on_huge_pages(empty_heads_last(key));
  Tensor grad_value = on_huge_pages(empty_heads_last(value));
  Tensor grad_weight = empty_row_numbers(key);
  Tensor grad_remainder = on_huge_pages(empty_heads_last(total, N, value.size(3)));
  Tensor grad_remainder_total = empty_row_numbers(query);
  if (B * H * (N + M) > 0) {
    const QueryTensors queries{InputRows(grad),        InputRows(out),
                               InputRows(query),       total,
                               OutputRows(grad_query), OutputRows(grad_remainder),
                               grad_remainder_total};
    dispatch_accumulator(query, [&](auto accumulator) {
      backward<decltype(accumulator)>(queries, InputRows(key), InputRows(value), key_weight, shift, heavy, scale,
                                      OutputRows(grad_key), OutputRows(grad_value), grad_weight);
    });
  }
  return {grad_query, grad_key, grad_value, grad_weight, grad_remainder, grad_remainder_total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("first_order_attention", TORCH_BOX(&first_order_attention_cpu));
  m.impl("first_order_attention_backward", TORCH_BOX(&first_order_attention_backward_cpu));
}

}  // namespace yoso
