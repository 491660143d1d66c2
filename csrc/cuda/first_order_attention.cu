// Softmax attention of which a remainder is given: the rest is the first order of the exponent, but for a few heavy
// keys, of which it is all.
//
// What queries meet of a head's light keys is one matrix, the sum over these of (key, 1)^T w (value, 1), with w a key's
// weight; what light keys meet of the queries is the sum of (query, 1)^T (gradient, gradient of the weights' sum). In
// both, the rows but the last are multiplied by scale, and all are divided by the head's 2^shift. All products are of
// tiles in shared memory, in float32 (float64 for float64) whatever the dtype: 16 bits would be too few for factors
// that are sums.
#include "exponential.h"
#include "tile_products.h"

namespace yoso {
namespace {

// of a tile that a thread has a part of
constexpr int kMyRows = 8, kThreads = kThreadsFor<kMyRows>;
// longer products are added up in parts where they become exponents, as exp makes more of what is rounded off
constexpr int32_t kLongestSum = 128;
// sums over rows are those of at most so many parts, of at least so many rows
constexpr int64_t kMaxParts = 64, kMinPartRows = 512;

template <class T>
struct Shared {
  Tile<T> left, right;
  T numbers[kTile];
};

// A matrix for each of some places: (columns of one side + 1) x (columns of the other + 1).
template <class T>
struct Sums {
  T* data;
  int32_t rows, columns;

  // so that pieces are aligned
  YOSO_HOST_DEVICE int32_t stride() const { return (columns + kLaneColumns) / kLaneColumns * kLaneColumns; }
  YOSO_HOST_DEVICE int64_t size() const { return int64_t{rows + 1} * stride(); }
  __device__ T* at(int64_t place, int32_t row) const { return data + place * size() + int64_t{row} * stride(); }
};

// How rows are divided among blocks that sum over them.
struct Parts {
  int64_t rows, count;

  explicit Parts(int64_t all)
      : rows(round_up(std::max(divide_up(all, kMaxParts), kMinPartRows), kTile)), count(divide_up(all, rows)) {}
};

// What all kernels know.
template <class T>
struct Problem {
  int64_t heads, queries, keys, num_heavy;
  T scale;
  const T* key_weight;
  // [B * H]
  const int32_t* shift;
  // the heavy keys' places
  const int64_t* heavy;
};

struct Head {
  int64_t both, batch, head;

  __device__ Head(int64_t batch_head, int64_t heads)
      : both(batch_head), batch(batch_head / heads), head(batch_head % heads) {}
};

constexpr YOSO_HOST_DEVICE int32_t tiles_of(int32_t columns) { return (columns + kTile - 1) / kTile; }

// Where a tile's rows are: those of a head from `first` on, before `last`.
template <class In>
__device__ __forceinline__ auto rows_of_head(const TileSource<In>& source, const Head& head, int64_t first,
                                             int64_t last) {
  return [=](int r) { return first + r < last ? source.rows.at(head.batch, head.head, first + r) : nullptr; };
}
// Where a heavy key is, below 0 where there is none, or its place is outside the keys.
template <class T>
__device__ __forceinline__ int64_t heavy_place(const Problem<T>& p, int64_t batch_head, int64_t k) {
  const int64_t place = k < p.num_heavy ? p.heavy[batch_head * p.num_heavy + k] : -1;
  return place < p.keys ? place : -1;
}
// The heavy keys or their values.
template <class In, class T>
__device__ __forceinline__ auto heavy_rows(const TileSource<In>& source, const Head& head, const Problem<T>& p) {
  return [&](int k) -> const In* {
    const int64_t place = heavy_place(p, head.both, k);
    return place >= 0 ? source.rows.at(head.batch, head.head, place) : nullptr;
  };
}
// The rows of sums from `first` on, but the last.
template <class T>
__device__ __forceinline__ auto rows_of_sums(const Sums<T>& sums, const Head& head, int32_t first) {
  return [=](int r) { return first + r < sums.rows ? sums.at(head.both, first + r) : nullptr; };
}
template <class T>
__device__ __forceinline__ TileSource<T> source_of_sums(const Sums<T>& sums) {
  return {{}, sums.columns, sums.columns % kLaneColumns == 0};
}

// The weights of keys, 0 for the heavy ones.
template <class T>
__global__ void __launch_bounds__(kThreads) light_weights_kernel(Problem<T> p, int64_t all_keys, T* light) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= all_keys) return;
  const int64_t* places = p.heavy + i / p.keys * p.num_heavy;
  T weight = p.key_weight[i];
  for (int64_t k = 0; k < p.num_heavy; ++k)
    if (places[k] == i % p.keys) weight = 0;
  light[i] = weight;
}

// A tile of the sums over a part's rows: of (row, 1)^T (factor, number), or of (row, 1)^T number (factor, 1).
template <class In, class Factor, bool weighted, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 3)
    sum_rows_kernel(TileSource<In> rows, TileSource<Factor> factors, const T* numbers, int64_t heads, int64_t count,
                    Parts parts, Sums<T> sums) {
  auto& shared = *shared_memory<Shared<T>>();
  const int32_t across = max(tiles_of(sums.columns), 1), tiles = max(tiles_of(sums.rows), 1) * across;
  const int32_t tile = blockIdx.x % tiles, first_row_column = tile / across * kTile,
                first_factor = tile % across * kTile;
  const int64_t place = blockIdx.x / tiles, begin = place % parts.count * parts.rows;
  const int64_t end = min(begin + parts.rows, count);
  const Head head(place / parts.count, heads);
  // of what the products of tiles leave out, half of the threads have the last column, the others the last row
  const bool has_column = threadIdx.x < kTile;
  const int32_t beside = threadIdx.x % kTile;
  Elements<T, kMyRows> elements = {};
  T edge = 0, corner = 0;
  for (int64_t first = begin; first < end; first += kTile) {
    __syncthreads();
    const auto number = [=](int r) { return first + r < end ? numbers[head.both * count + first + r] : 0; };
    if (threadIdx.x < kTile) shared.numbers[threadIdx.x] = number(threadIdx.x);
    load_tile<false, kThreads>(rows, rows_of_head(rows, head, first, end), first_row_column, shared.left);
    const auto factor = rows_of_head(factors, head, first, end);
    if constexpr (weighted)
      load_tile<false, kThreads>(factors, factor, first_factor, number, shared.right);
    else
      load_tile<false, kThreads>(factors, factor, first_factor, shared.right);
    __syncthreads();
    if (has_column) {
      for (int r = 0; r < kTile; ++r) {
        edge += shared.left[r][beside] * shared.numbers[r];
        corner += shared.numbers[r];
      }
    } else {
      for (int r = 0; r < kTile; ++r) edge += shared.right[r][beside];
    }
    multiply_tiles<true>(shared.left, shared.right, elements);
  }
  for_elements<kMyRows>([&](int r, int c) {
    const int32_t row = first_row_column + my_row<kMyRows>(r), to = first_factor + my_column(c);
    if (row < sums.rows && to < sums.columns) sums.at(place, row)[to] = elements[r][c];
  });
  if (has_column && first_factor == 0 && first_row_column + beside < sums.rows)
    sums.at(place, first_row_column + beside)[sums.columns] = edge;
  if (!has_column && first_row_column == 0 && first_factor + beside < sums.columns)
    sums.at(place, sums.rows)[first_factor + beside] = edge;
  if (tile == 0 && threadIdx.x == 0) sums.at(place, sums.rows)[sums.columns] = corner;
}

// Adds up a head's parts; all rows but the last are multiplied by scale, and where there is a shift, all are divided by
// 2^shift.
template <class T>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(Sums<T> parts, int64_t num_parts, T scale,
                                                             const int32_t* shift, int64_t all_rows, Sums<T> sums) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = i / (sums.columns + 1);
  if (row >= all_rows) return;
  const int64_t head = row / (sums.rows + 1);
  const int32_t row_of_head = row % (sums.rows + 1), column = i % (sums.columns + 1);
  T sum = 0;
  for (int64_t part = 0; part < num_parts; ++part) sum += parts.at(head * num_parts + part, row_of_head)[column];
  if (shift != nullptr) sum *= unit_of<T>(shift[head]);
  sums.at(head, row_of_head)[column] = row_of_head < sums.rows ? sum * scale : sum;
}

// The products of a tile's rows, count from `first` on, with the heavy keys or their values.
template <class In, class Key, class T>
__device__ __forceinline__ void multiply_heavy(Shared<T>& shared, const TileSource<In>& rows, int64_t first,
                                               int64_t count, const TileSource<Key>& keys, const Head& head,
                                               const Problem<T>& p, Elements<T, kMyRows>& products) {
  for (int32_t column = 0; column < rows.columns; column += kTile) {
    __syncthreads();
    load_tile<false, kThreads>(rows, rows_of_head(rows, head, first, count), column, shared.left);
    load_tile<true, kThreads>(keys, heavy_rows(keys, head, p), column, shared.right);
    __syncthreads();
    if (rows.columns > kLongestSum)
      multiply_tiles_in_parts(shared.left, shared.right, products);
    else
      multiply_tiles<false>(shared.left, shared.right, products);
  }
}

// The weights of the heavy keys that the thread's elements are of, 0 where there are none.
template <class T>
__device__ __forceinline__ void load_heavy_weights(const Head& head, const Problem<T>& p, T (&weights)[kSide]) {
#pragma unroll
  for (int c = 0; c < kSide; ++c) {
    const int64_t place = heavy_place(p, head.both, my_column(c));
    weights[c] = place >= 0 ? p.key_weight[head.both * p.keys + place] : 0;
  }
}

// A tile of the output. sums are those of the light keys.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 3)
    attend_kernel(Problem<T> p, TileSource<In> query, TileSource<In> key, TileSource<In> value, Sums<T> sums,
                  Rows<const T> remainder, const T* remainder_total, Rows<In> out, T* total) {
  auto& shared = *shared_memory<Shared<T>>();
  const int32_t across = max(tiles_of(value.columns), 1), first_value = blockIdx.x % across * kTile;
  const int64_t tiles = (p.queries + kTile - 1) / kTile, first = blockIdx.x / across % tiles * kTile;
  const Head head(blockIdx.x / across / tiles, p.heads);
  Elements<T, kMyRows> elements = {}, weights = {};
  // the thread's part of the sums of weights
  T row_total[kMyRows] = {}, heavy_weights[kSide];
  for (int32_t column = 0; column < query.columns; column += kTile) {
    __syncthreads();
    load_tile<false, kThreads>(query, rows_of_head(query, head, first, p.queries), column, shared.left);
    load_tile<false, kThreads>(source_of_sums(sums), rows_of_sums(sums, head, column), first_value, shared.right);
    if (threadIdx.x < kTile)
      shared.numbers[threadIdx.x] =
          column + threadIdx.x < sums.rows ? sums.at(head.both, column + threadIdx.x)[sums.columns] : 0;
    __syncthreads();
    for_elements<kMyRows>([&](int r, int c) {
      row_total[r] += shared.left[my_row<kMyRows>(r)][my_column(c)] * shared.numbers[my_column(c)];
    });
    multiply_tiles<false>(shared.left, shared.right, elements);
  }
  if (p.num_heavy > 0) {
    multiply_heavy(shared, query, first, p.queries, key, head, p, weights);
    load_heavy_weights(head, p, heavy_weights);
    const Exponential<T> exponential(p.shift[head.both]);
    for_elements<kMyRows>([&](int r, int c) {
      weights[r][c] = heavy_weights[c] * exponential(p.scale * weights[r][c]);
      row_total[r] += weights[r][c];
    });
    __syncthreads();
    store_elements(weights, shared.left);
    load_tile<false, kThreads>(value, heavy_rows(value, head, p), first_value, shared.right);
    __syncthreads();
    multiply_tiles<false>(shared.left, shared.right, elements);
  }
  const T* last = sums.at(head.both, sums.rows);
#pragma unroll
  for (int r = 0; r < kMyRows; ++r) {
    row_total[r] = span_sum(row_total[r]);
    const int64_t row = first + my_row<kMyRows>(r);
    if (row >= p.queries) continue;
    const int64_t number = head.both * p.queries + row;
    row_total[r] += last[sums.columns] + remainder_total[number];
    const T inverse = row_total[r] > static_cast<T>(kSmallestTotal) ? 1 / row_total[r] : 0;
    if (first_value == 0 && my_column(0) == 0) total[number] = row_total[r];
#pragma unroll
    for (int c = 0; c < kSide; ++c) {
      const int32_t column = first_value + my_column(c);
      if (column >= value.columns) continue;
      const T sum = elements[r][c] + last[column] + remainder.at(head.batch, head.head, row)[column];
      out.at(head.batch, head.head, row)[column] = static_cast<In>(sum * inverse);
    }
  }
}

// The gradients of the sums before they were divided, which are the remainder's too.
template <class In, bool aligned, class T = Accumulator<In>>
__global__ void __launch_bounds__(kRowThreads)
    divide_kernel(TileSource<In> grad, TileSource<In> out, const T* total, int64_t heads, int32_t count, int lane_bits,
                  Rows<T> grad_sum, T* grad_total) {
  const RowPlace place(count, lane_bits, 1);
  // lanes past the last row stay: the product is the warp's
  const bool exists = place.row < count;
  const Head head(place.head, heads);
  const int32_t row = exists ? place.row : 0;
  const int64_t number = head.both * count + row;
  const T inverse = total[number] > static_cast<T>(kSmallestTotal) ? 1 / total[number] : 0;
  T product = 0;
  for (int32_t first = place.column; first < grad.columns; first += kLaneColumns << lane_bits) {
    const int columns = columns_of_lane(grad.columns, first);
    In grads[kLaneColumns], outs[kLaneColumns];
    load_columns<aligned>(grad.rows.at(head.batch, head.head, row) + first, columns, grads);
    load_columns<aligned>(out.rows.at(head.batch, head.head, row) + first, columns, outs);
    T divided[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      divided[c] = static_cast<T>(grads[c]) * inverse;
      product -= divided[c] * static_cast<T>(outs[c]);
    }
    if (exists) store_columns<aligned>(divided, columns, grad_sum.at(head.batch, head.head, row) + first);
  }
  product = sum_of_lanes(product, lane_bits);
  if (exists && place.lane == 0) grad_total[number] = product;
}

// For a part's queries, kTile columns of their gradient, and of the heavy keys' and values' gradients: sums over these
// queries, with those of the heavy weights in the last column. grad is that of the sums before they were divided.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradients_kernel(Problem<T> p, TileSource<In> query, TileSource<In> key, TileSource<In> value,
                           TileSource<T> grad, const T* grad_total, Sums<T> sums, Parts parts, Rows<In> grad_query,
                           Sums<T> heavy_sums) {
  auto& shared = *shared_memory<Shared<T>>();
  const int32_t across = max(tiles_of(max(query.columns, value.columns)), 1), start = blockIdx.x % across * kTile;
  const int64_t place = blockIdx.x / across, begin = place % parts.count * parts.rows;
  const int64_t end = min(begin + parts.rows, p.queries);
  const Head head(place / parts.count, p.heads);
  Elements<T, kMyRows> key_sums = {}, value_sums = {};
  T weight_sums[kSide] = {}, heavy_weights[kSide];
  load_heavy_weights(head, p, heavy_weights);
  for (int64_t first = begin; first < end; first += kTile) {
    T grad_totals[kMyRows];
#pragma unroll
    for (int r = 0; r < kMyRows; ++r) {
      const int64_t row = first + my_row<kMyRows>(r);
      grad_totals[r] = row < end ? grad_total[head.both * p.queries + row] : 0;
    }
    Elements<T, kMyRows> elements = {};
    if (p.num_heavy > 0) {
      Elements<T, kMyRows> logarithms = {}, products = {};
      multiply_heavy(shared, query, first, end, key, head, p, logarithms);
      multiply_heavy(shared, grad, first, end, value, head, p, products);
      const Exponential<T> exponential(p.shift[head.both]);
      for_elements<kMyRows>([&](int r, int c) {
        const T logarithm = p.scale * logarithms[r][c], weight = exponential(logarithm);
        const T product = weight * (products[r][c] + grad_totals[r]);
        // of rows past the last, all factors are 0
        weight_sums[c] += product;
        logarithms[r][c] = heavy_weights[c] * weight;
        products[r][c] = exponential.follows(logarithm) ? p.scale * heavy_weights[c] * product : 0;
      });
      if (start < query.columns) {
        __syncthreads();
        store_elements(products, shared.left);
        load_tile<false, kThreads>(key, heavy_rows(key, head, p), start, shared.right);
        __syncthreads();
        multiply_tiles<false>(shared.left, shared.right, elements);
        __syncthreads();
        load_tile<false, kThreads>(query, rows_of_head(query, head, first, end), start, shared.right);
        __syncthreads();
        multiply_tiles<true>(shared.left, shared.right, key_sums);
      }
      if (start < value.columns) {
        __syncthreads();
        store_elements(logarithms, shared.left);
        load_tile<false, kThreads>(grad, rows_of_head(grad, head, first, end), start, shared.right);
        __syncthreads();
        multiply_tiles<true>(shared.left, shared.right, value_sums);
      }
    }
    if (start < query.columns) {
      for (int32_t column = 0; column < value.columns; column += kTile) {
        __syncthreads();
        load_tile<false, kThreads>(grad, rows_of_head(grad, head, first, end), column, shared.left);
        load_tile<true, kThreads>(source_of_sums(sums), rows_of_sums(sums, head, start), column, shared.right);
        __syncthreads();
        multiply_tiles<false>(shared.left, shared.right, elements);
      }
      for_elements<kMyRows>([&](int r, int c) {
        const int32_t column = start + my_column(c);
        if (column < query.columns) elements[r][c] += grad_totals[r] * sums.at(head.both, column)[sums.columns];
      });
    }
    for_elements<kMyRows>([&](int r, int c) {
      const int64_t row = first + my_row<kMyRows>(r);
      const int32_t column = start + my_column(c);
      if (row < end && column < query.columns)
        grad_query.at(head.batch, head.head, row)[column] = static_cast<In>(elements[r][c]);
    });
  }
  // of the weights, threads have sums over their rows
  __syncthreads();
  store(weight_sums, shared.left[threadIdx.x / kSpan] + my_column(0));
  __syncthreads();
  if (start == 0 && threadIdx.x < p.num_heavy) {
    T sum = 0;
    for (int i = 0; i < kThreads / kSpan; ++i) sum += shared.left[i][threadIdx.x];
    heavy_sums.at(place, threadIdx.x)[heavy_sums.columns] = sum;
  }
  for_elements<kMyRows>([&](int r, int c) {
    const int32_t k = my_row<kMyRows>(r), column = start + my_column(c);
    if (k >= p.num_heavy) return;
    T* row = heavy_sums.at(place, k);
    if (column < query.columns) row[column] = key_sums[r][c];
    if (column < value.columns) row[query.columns + column] = value_sums[r][c];
  });
}

// The gradients of a tile of keys as if all were light. sums are those over the queries.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 3)
    key_gradients_kernel(Problem<T> p, TileSource<In> key, TileSource<In> value, const T* light, Sums<T> sums,
                         Rows<In> grad_key, Rows<In> grad_value, T* grad_weight) {
  auto& shared = *shared_memory<Shared<T>>();
  const int64_t tiles = (p.keys + kTile - 1) / kTile, first = blockIdx.x % tiles * kTile;
  const Head head(blockIdx.x / tiles, p.heads);
  const auto key_rows = rows_of_head(key, head, first, p.keys), value_rows = rows_of_head(value, head, first, p.keys);
  const T *last = sums.at(head.both, sums.rows), *factors = light + head.both * p.keys + first;
  // the thread's part of the gradients of weights
  T weights[kMyRows] = {};
  for (int32_t start = 0; start < key.columns; start += kTile) {
    Elements<T, kMyRows> elements = {};
    for (int32_t column = 0; column < value.columns; column += kTile) {
      __syncthreads();
      load_tile<false, kThreads>(value, value_rows, column, shared.left);
      load_tile<true, kThreads>(source_of_sums(sums), rows_of_sums(sums, head, start), column, shared.right);
      __syncthreads();
      multiply_tiles<false>(shared.left, shared.right, elements);
    }
    for_elements<kMyRows>([&](int r, int c) {
      const In* row = key_rows(my_row<kMyRows>(r));
      const int32_t column = start + my_column(c);
      if (row == nullptr || column >= key.columns) return;
      const T product = elements[r][c] + sums.at(head.both, column)[sums.columns];
      weights[r] += product * static_cast<T>(row[column]);
      grad_key.at(head.batch, head.head, first + my_row<kMyRows>(r))[column] =
          static_cast<In>(product * factors[my_row<kMyRows>(r)]);
    });
  }
  for (int32_t start = 0; start < value.columns; start += kTile) {
    Elements<T, kMyRows> elements = {};
    for (int32_t column = 0; column < key.columns; column += kTile) {
      __syncthreads();
      load_tile<false, kThreads>(key, key_rows, column, shared.left);
      load_tile<false, kThreads>(source_of_sums(sums), rows_of_sums(sums, head, column), start, shared.right);
      __syncthreads();
      multiply_tiles<false>(shared.left, shared.right, elements);
    }
    for_elements<kMyRows>([&](int r, int c) {
      const In* row = value_rows(my_row<kMyRows>(r));
      const int32_t column = start + my_column(c);
      if (row == nullptr || column >= value.columns) return;
      weights[r] += last[column] * static_cast<T>(row[column]);
      grad_value.at(head.batch, head.head, first + my_row<kMyRows>(r))[column] =
          static_cast<In>((elements[r][c] + last[column]) * factors[my_row<kMyRows>(r)]);
    });
  }
#pragma unroll
  for (int r = 0; r < kMyRows; ++r) {
    const int64_t row = first + my_row<kMyRows>(r);
    weights[r] = span_sum(weights[r]);
    if (row < p.keys && my_column(0) == 0) grad_weight[head.both * p.keys + row] = weights[r] + last[sums.columns];
  }
}

// Writes the heavy keys' gradients in their places.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads)
    store_heavy_kernel(Problem<T> p, Sums<T> heavy_sums, int32_t key_columns, int64_t all_rows, Rows<In> grad_key,
                       Rows<In> grad_value, T* grad_weight) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = i / (heavy_sums.columns + 1);
  if (row >= all_rows) return;
  const int32_t column = i % (heavy_sums.columns + 1);
  const Head head(row / p.num_heavy, p.heads);
  const int64_t place = heavy_place(p, head.both, row % p.num_heavy);
  if (place < 0) return;
  const T sum = heavy_sums.at(head.both, row % p.num_heavy)[column];
  if (column < key_columns)
    grad_key.at(head.batch, head.head, place)[column] = static_cast<In>(sum);
  else if (column < heavy_sums.columns)
    grad_value.at(head.batch, head.head, place)[column - key_columns] = static_cast<In>(sum);
  else
    grad_weight[head.both * p.keys + place] = sum;
}

template <class In>
TileSource<In> source_of(const Tensor& x) {
  const Rows<const In> rows = rows_of<In>(x);
  return {rows, count_of(x.size(3), "columns"), aligned(rows, x.size(3))};
}

// The launches of a call.
template <class In>
class FirstOrder {
 public:
  using T = Accumulator<In>;

  FirstOrder(const Device& device, const Tensor& query, const Tensor& key, const Tensor& value,
             const Tensor& key_weight, const Tensor& shift, const Tensor& heavy, double scale)
      : device_(device),
        key_weight_(key_weight),
        query_(source_of<In>(query)),
        key_(source_of<In>(key)),
        value_(source_of<In>(value)),
        all_heads_(query.size(0) * query.size(1)),
        p_{query.size(1),
           query.size(2),
           key.size(2),
           heavy.size(2),
           static_cast<T>(scale),
           static_cast<const T*>(key_weight.const_data_ptr()),
           static_cast<const int32_t*>(shift.const_data_ptr()),
           static_cast<const int64_t*>(heavy.const_data_ptr())},
        light_(empty_row_numbers(key)) {
    const int64_t all_keys = all_heads_ * p_.keys;
    launch(device_, light_weights_kernel<T>, divide_up(all_keys, kThreads), kThreads, 0, p_, all_keys, data(light_));
  }

  void forward(const Tensor& remainder, const Tensor& remainder_total, const Tensor& out, const Tensor& total) const {
    const Memory sums = sum_rows<In, true>(key_, value_, light_, p_.keys);
    launch(device_, attend_kernel<In>,
           all_heads_ * divide_up(p_.queries, kTile) * std::max(tiles_of(value_.columns), 1), kThreads, kSharedBytes,
           p_, query_, key_, value_, sums.sums, rows_of<T>(remainder), numbers(remainder_total),
           mutable_rows_of<In>(out), data(total));
  }

  void backward(const Tensor& grad, const Tensor& out, const Tensor& total, const Tensor& grad_query,
                const Tensor& grad_key, const Tensor& grad_value, const Tensor& grad_weight, const Tensor& grad_sum,
                const Tensor& grad_total) const {
    const TileSource<In> grads = source_of<In>(grad), outs = source_of<In>(out);
    const Rows<T> to = mutable_rows_of<T>(grad_sum);
    const int lane_bits = lane_bits_for(grads.columns);
    const bool whole = grads.aligned && outs.aligned && aligned(to, grads.columns);
    launch(device_, whole ? divide_kernel<In, true> : divide_kernel<In, false>,
           all_heads_ * blocks_of_head(count_of(p_.queries, "rows"), lane_bits), kRowThreads, 0, grads, outs,
           numbers(total), p_.heads, static_cast<int32_t>(p_.queries), lane_bits, to, data(grad_total));

    const TileSource<T> sum_grads = source_of<T>(grad_sum);
    const Memory key_sums = sum_rows<In, true>(key_, value_, light_, p_.keys);
    const Parts parts(p_.queries);
    // a row for each heavy key, and the last for nothing
    const auto heavy_sums = [&](int64_t places) {
      return Memory(key_weight_, places, static_cast<int32_t>(p_.num_heavy), key_.columns + value_.columns);
    };
    const Memory heavy_parts = heavy_sums(all_heads_ * parts.count);
    launch(device_, query_gradients_kernel<In>,
           all_heads_ * parts.count * std::max(tiles_of(std::max(query_.columns, value_.columns)), 1), kThreads,
           kSharedBytes, p_, query_, key_, value_, sum_grads, numbers(grad_total), key_sums.sums, parts,
           mutable_rows_of<In>(grad_query), heavy_parts.sums);

    const Memory query_sums = sum_rows<T, false>(query_, sum_grads, grad_total, p_.queries);
    launch(device_, key_gradients_kernel<In>, all_heads_ * divide_up(p_.keys, kTile), kThreads, kSharedBytes, p_, key_,
           value_, numbers(light_), query_sums.sums, mutable_rows_of<In>(grad_key), mutable_rows_of<In>(grad_value),
           data(grad_weight));
    // over what was written as if they were light
    const Memory heavy = heavy_sums(all_heads_);
    add_parts(heavy_parts, parts, 1, nullptr, heavy);
    const int64_t heavy_rows = all_heads_ * p_.num_heavy;
    launch(device_, store_heavy_kernel<In>, divide_up(heavy_rows * (heavy.sums.columns + 1), kThreads), kThreads, 0, p_,
           heavy.sums, key_.columns, heavy_rows, mutable_rows_of<In>(grad_key), mutable_rows_of<In>(grad_value),
           data(grad_weight));
  }

 private:
  static constexpr size_t kSharedBytes = sizeof(Shared<T>);

  // Sums and what holds them.
  struct Memory {
    Tensor memory;
    Sums<T> sums;

    Memory(const Tensor& like, int64_t places, int32_t rows, int32_t columns)
        : memory(empty_tensor(like, {places * Sums<T>{nullptr, rows, columns}.size()})),
          sums{data(memory), rows, columns} {}
  };

  static T* data(const Tensor& x) { return static_cast<T*>(x.mutable_data_ptr()); }
  static const T* numbers(const Tensor& x) { return static_cast<const T*>(x.const_data_ptr()); }

  template <class Factor, bool weighted>
  Memory sum_rows(const TileSource<In>& rows, const TileSource<Factor>& factors, const Tensor& row_numbers,
                  int64_t count) const {
    const Parts parts(count);
    const Memory each(key_weight_, all_heads_ * parts.count, rows.columns, factors.columns);
    launch(device_, sum_rows_kernel<In, Factor, weighted>,
           all_heads_ * parts.count * std::max(tiles_of(rows.columns), 1) * std::max(tiles_of(factors.columns), 1),
           kThreads, kSharedBytes, rows, factors, numbers(row_numbers), p_.heads, count, parts, each.sums);
    const Memory sums(key_weight_, all_heads_, rows.columns, factors.columns);
    add_parts(each, parts, p_.scale, p_.shift, sums);
    return sums;
  }

  void add_parts(const Memory& each, const Parts& parts, T scale, const int32_t* shift, const Memory& to) const {
    const int64_t all_rows = all_heads_ * (to.sums.rows + 1);
    launch(device_, add_parts_kernel<T>, divide_up(all_rows * (to.sums.columns + 1), kThreads), kThreads, 0, each.sums,
           parts.count, scale, shift, all_rows, to.sums);
  }

  const Device& device_;
  const Tensor& key_weight_;
  const TileSource<In> query_, key_, value_;
  const int64_t all_heads_;
  const Problem<T> p_;
  // the weights of keys, 0 for the heavy ones
  const Tensor light_;
};

std::tuple<Tensor, Tensor> first_order_attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                                      const Tensor& key_weight, const Tensor& shift,
                                                      const Tensor& heavy, const Tensor& remainder,
                                                      const Tensor& remainder_total, double scale) {
  check_first_order(query, key, value, key_weight, shift, heavy, scale);
  check_output(remainder, "remainder", query, value, length_dtype(query));
  check_row_numbers(remainder_total, "remainder_total", query);
  const Device device(value);
  Tensor out = empty_heads_last(value, query.size(2), value.size(3));
  Tensor total = empty_row_numbers(query);
  const Tensor rows[] = {dense_rows(query), dense_rows(key), dense_rows(value), dense_rows(remainder)};
  dispatch_wide(query, [&](auto element) {
    FirstOrder<decltype(element)>(device, rows[0], rows[1], rows[2], key_weight, shift, heavy, scale)
        .forward(rows[3], remainder_total, out, total);
  });
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> first_order_attention_backward_cuda(
    const Tensor& grad, const Tensor& out, const Tensor& total, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& key_weight, const Tensor& shift, const Tensor& heavy, double scale) {
  check_first_order(query, key, value, key_weight, shift, heavy, scale);
  check_output(grad, "grad", query, value, query.scalar_type());
  check_output(out, "out", query, value, query.scalar_type());
  check_row_numbers(total, "total", query);
  const Device device(value);
  Tensor grad_query = empty_heads_last(query);
  Tensor grad_key = empty_heads_last(key);
  Tensor grad_value = empty_heads_last(value);
  Tensor grad_weight = empty_row_numbers(key);
  Tensor grad_remainder = empty_heads_last(total, query.size(2), value.size(3));
  Tensor grad_remainder_total = empty_row_numbers(query);
  const Tensor rows[] = {dense_rows(grad), dense_rows(out), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_wide(query, [&](auto element) {
    FirstOrder<decltype(element)>(device, rows[2], rows[3], rows[4], key_weight, shift, heavy, scale)
        .backward(rows[0], rows[1], total, grad_query, grad_key, grad_value, grad_weight, grad_remainder,
                  grad_remainder_total);
  });
  return {grad_query, grad_key, grad_value, grad_weight, grad_remainder, grad_remainder_total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("first_order_attention", TORCH_BOX(&first_order_attention_cuda));
  m.impl("first_order_attention_backward", TORCH_BOX(&first_order_attention_backward_cuda));
}

}  // namespace yoso
