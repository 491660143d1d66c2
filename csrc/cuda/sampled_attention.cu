// Sampled attention: every bucket's values are added up in a table, and every query adds up its buckets' sums. Both
// are sums of rows that lie anywhere; tables are of a few heads at a time, which the second-level cache keeps.
#include "sort.h"

namespace yoso {
namespace {

constexpr int kThreads = 256;
// of a row, columns that a lane has, and bytes that it reads at a time
constexpr int kColumns = 8, kPieceBytes = 16;
// Sums of bfloat16 are rounded to what they are sums of, which halves the bytes that queries read; float16 has too few
// exponents for sums of many rows.
template <class In>
using Sum = std::conditional_t<std::is_same_v<In, BFloat16>, BFloat16, Accumulator<In>>;
// Rows that a lane has under way; unaligned ones come element by element.
template <class In, bool aligned>
constexpr int kRowsAhead = std::max(1, (aligned ? 64 : 32) / static_cast<int>(kColumns * sizeof(In)));
template <class In>
constexpr int kSumsAhead = 128 / (kColumns * sizeof(Sum<In>));
// A bucket of more rows, and of more than this many times the mean, is added up by a warp.
constexpr int64_t kCrowd = 64, kCrowdOfMean = 4;
// of the tables of a launch, unless that of one hash function of one head takes more
constexpr int64_t kTableBytes = int64_t{64} << 20;

// The heads from first_head on, and of their hash functions those from first_hash on.
template <class In, class Code>
struct Problem {
  // of all heads
  Rows<const In> value;
  Rows<In> out;
  // of first_head and all hash functions onwards
  const Code* query_codes;
  const int32_t *order, *starts;
  // [heads, hashes, table_size, row_columns]
  Sum<In>* tables;
  // [heads, N, row_columns], the sums of the hash functions before; unused where the tables hold all of these
  Accumulator<In>* sums;
  // [B, H, N], of the output rows that are to have length one; null where these stay as they are
  Accumulator<In>* inverse_length;
  // Dv rounded up to what a lane has
  int64_t first_head, H, N, M, Dv, row_columns;
  int32_t num_hash, table_size, first_hash, hashes, crowd;
  // that have a slice of a row, a power of two up to a warp; and slices of a row, one where these get length one
  int lanes, slices;
};

// The row that the thread's lanes have a slice of, among `rows` of each head: an entry of the tables, or a query.
struct Place {
  int64_t head, row;
  // the lane's columns are from this one on
  int64_t column;
  // of the lanes
  int lane;

  __device__ __forceinline__ Place(int64_t rows, int lanes, int slices) {
    const int64_t block_rows = kThreads / lanes, blocks = (rows + block_rows - 1) / block_rows;
    lane = threadIdx.x % lanes;
    row = blockIdx.x % blocks * block_rows + threadIdx.x / lanes;
    head = blockIdx.x / blocks / slices;
    column = (blockIdx.x / blocks % slices * lanes + lane) * kColumns;
  }
};

// How many blocks have all rows.
int64_t blocks_for(int64_t heads, int64_t rows, int lanes, int slices) {
  return heads * slices * divide_up(rows, kThreads / lanes);
}

// Loads `count` neighbours that are aligned to 16 bytes.
template <int count, class T>
__device__ __forceinline__ void load(const T* from, T (&to)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += kPieceBytes / sizeof(T)) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from + i);
    memcpy(to + i, &bits, sizeof(bits));
  }
}

template <int count, class T>
__device__ __forceinline__ void store(const T (&from)[count], T* to) {
#pragma unroll
  for (int i = 0; i < count; i += kPieceBytes / sizeof(T)) {
    uint4 bits;
    memcpy(&bits, from + i, sizeof(bits));
    *reinterpret_cast<uint4*>(to + i) = bits;
  }
}

// Adds the rows that order names at begin, begin + step, ... before end; of each, `columns` columns.
template <class In, bool aligned>
__device__ __forceinline__ void add_rows(const In* values, int64_t row_stride, int columns, const int32_t* order,
                                         uint32_t begin, uint32_t end, uint32_t step,
                                         Accumulator<In> (&sums)[kColumns]) {
  constexpr int kAhead = kRowsAhead<In, aligned>;
  const auto row_at = [&](uint32_t place) { return place < end ? order[place] : -1; };
  int32_t next[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) next[j] = row_at(begin + j * step);
  for (uint32_t place = begin; place < end; place += kAhead * step) {
    In rows[kAhead][kColumns] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const In* from = values + next[j] * row_stride;
      if constexpr (aligned) {
        if (next[j] >= 0 && columns > 0) load(from, rows[j]);
      } else {
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          if (next[j] >= 0 && c < columns) rows[j][c] = from[c];
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next[j] = row_at(place + (kAhead + j) * step);
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] += static_cast<Accumulator<In>>(rows[j][c]);
  }
}

// How many of the columns from `first` on are the lane's.
__device__ __forceinline__ int columns_of_lane(int64_t columns, int64_t first) {
  return static_cast<int>(min(max(columns - first, int64_t{0}), int64_t{kColumns}));
}

// Fills the tables.
template <class In, class Code, bool aligned>
__global__ void __launch_bounds__(kThreads, 3) build_tables_kernel(Problem<In, Code> p) {
  using T = Accumulator<In>;
  const int64_t entries = int64_t{p.hashes} * p.table_size;
  const Place place(entries, p.lanes, p.slices);
  const int64_t head = p.first_head + place.head, first_list = place.head * p.num_hash + p.first_hash;
  const In* values = p.value.at(head / p.H, head % p.H, 0) + place.column;
  const int columns = columns_of_lane(p.Dv, place.column);
  int32_t hash = 0, begin = 0, end = 0;
  if (place.row < entries) {
    hash = static_cast<int32_t>(place.row / p.table_size);
    const int32_t* start = p.starts + (first_list + hash) * (p.table_size + 1) + place.row % p.table_size;
    begin = start[0];
    end = start[1];
  }
  T sums[kColumns] = {};
  const bool crowded = end - begin > p.crowd;
  add_rows<In, aligned>(values, p.value.row_stride, columns, p.order + (first_list + hash) * p.M, begin,
                        crowded ? begin : end, 1, sums);
  // the warp shares the rows of each crowded bucket of its lanes
  const int warp_lane = threadIdx.x % kWarp;
  for (uint32_t left = __ballot_sync(kAllLanes, crowded && place.lane == 0); left != 0; left &= left - 1) {
    const int owner = __ffs(left) - 1;
    const int32_t from = __shfl_sync(kAllLanes, begin, owner) + warp_lane / p.lanes;
    const int32_t to = __shfl_sync(kAllLanes, end, owner);
    const int32_t* order = p.order + (first_list + __shfl_sync(kAllLanes, hash, owner)) * p.M;
    T part[kColumns] = {};
    add_rows<In, aligned>(values, p.value.row_stride, columns, order, from, to, kWarp / p.lanes, part);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      for (int other = p.lanes; other < kWarp; other *= 2) part[c] += __shfl_xor_sync(kAllLanes, part[c], other);
      if (warp_lane - place.lane == owner) sums[c] = part[c];
    }
  }
  if (place.row >= entries || columns == 0) return;
  Sum<In> rounded[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) rounded[c] = static_cast<Sum<In>>(sums[c]);
  store(rounded, p.tables + (place.head * entries + place.row) * p.row_columns + place.column);
}

// Adds up the queries' buckets, and scales the rows of the output.
template <class In, class Code, bool aligned>
__global__ void __launch_bounds__(kThreads, 3) read_tables_kernel(Problem<In, Code> p) {
  using T = Accumulator<In>;
  constexpr int kAhead = kSumsAhead<In>;
  const Place place(p.N, p.lanes, p.slices);
  const int columns = columns_of_lane(p.Dv, place.column);
  // lanes without a column, or past the last row, stay: the sum of squares is the warp's
  const bool exists = place.row < p.N && columns > 0;
  const int64_t row = exists ? place.row : 0;
  const Code* codes = p.query_codes + (place.head * p.num_hash + p.first_hash) * p.N + row;
  const Sum<In>* tables =
      p.tables + place.head * p.hashes * p.table_size * p.row_columns + place.column;
  // no entry where there is no such hash function, or the code has no bucket
  const auto entry_of = [&](int32_t hash) {
    const uint32_t code = exists && hash < p.hashes ? static_cast<uint32_t>(codes[hash * p.N]) : ~0u;
    return code < static_cast<uint32_t>(p.table_size) ? static_cast<int32_t>(hash * p.table_size + code) : -1;
  };
  int32_t next[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) next[j] = entry_of(j);
  T sums[kColumns] = {};
  for (int32_t hash = 0; hash < p.hashes; hash += kAhead) {
    Sum<In> rows[kAhead][kColumns] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (next[j] >= 0) load(tables + next[j] * p.row_columns, rows[j]);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next[j] = entry_of(hash + kAhead + j);
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] += static_cast<T>(rows[j][c]);
  }

  T* before = p.sums + (place.head * p.N + row) * p.row_columns + place.column;
  if (p.first_hash > 0 && exists) {
    T part[kColumns];
    load(before, part);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[c] += part[c];
  }
  if (p.first_hash + p.hashes < p.num_hash) {
    if (exists) store(sums, before);
    return;
  }
  const int64_t head = p.first_head + place.head;
  T scale = T{1} / p.num_hash;
  if (p.inverse_length != nullptr) {
    T square = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) square += sums[c] * scale * (sums[c] * scale);
    for (int other = 1; other < p.lanes; other *= 2) square += __shfl_xor_sync(kAllLanes, square, other);
    const T inverse = square > 0 ? 1 / sqrt(square) : 0;
    if (place.row < p.N && place.lane == 0) p.inverse_length[head * p.N + row] = inverse;
    scale *= inverse;
  }
  if (!exists) return;
  In* to = p.out.at(head / p.H, head % p.H, row) + place.column;
  In rounded[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) rounded[c] = static_cast<In>(sums[c] * scale);
  if constexpr (aligned) {
    store(rounded, to);
  } else {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c < columns) to[c] = rounded[c];
  }
}

// whether all of a lane's columns can be read at once
template <class T>
bool aligned(const Rows<T>& rows, int64_t columns) {
  const int64_t strides = rows.batch_stride | rows.head_stride | rows.row_stride;
  return columns % kColumns == 0 && (reinterpret_cast<uintptr_t>(rows.data) | strides * sizeof(T)) % kPieceBytes == 0;
}

template <class In, class Code>
void sampled_forward(const Device& device, const Tensor& query_codes, const Tensor& key_codes, const Tensor& value,
                     int64_t hash_code_len, const Tensor& out, const Tensor& inverse_length) {
  const int64_t all_heads = value.size(0) * value.size(1), num_hash = query_codes.size(2);
  const int64_t table_size = int64_t{1} << hash_code_len;
  Problem<In, Code> p;
  p.value = rows_of<In>(value);
  p.out = mutable_rows_of<In>(out);
  p.inverse_length =
      inverse_length.numel() == 0 ? nullptr : static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr());
  p.H = value.size(1);
  p.N = out.size(2);
  p.M = value.size(2);
  p.Dv = value.size(3);
  // without columns there are still inverse lengths
  p.row_columns = round_up(std::max<int64_t>(p.Dv, 1), kColumns);
  p.num_hash = static_cast<int32_t>(num_hash);
  p.table_size = static_cast<int32_t>(table_size);
  p.crowd = static_cast<int32_t>(std::max(kCrowd, kCrowdOfMean * (p.M >> hash_code_len)));
  for (p.lanes = 1; p.lanes < kWarp && p.lanes * kColumns < p.row_columns; p.lanes *= 2) continue;
  p.slices = static_cast<int>(divide_up(p.row_columns, p.lanes * kColumns));
  STD_TORCH_CHECK(p.slices == 1 || p.inverse_length == nullptr, "the CUDA kernels scale rows of at most ",
                  kWarp * kColumns, " columns, got value with ", p.Dv);

  const int64_t heads_sorted = heads_at_once(all_heads, num_hash, p.M, hash_code_len);
  // tables of all hash functions of some heads, or of some hash functions of one
  const int64_t tables = kTableBytes / (table_size * p.row_columns * static_cast<int64_t>(sizeof(Sum<In>)));
  const int64_t heads_added = std::clamp<int64_t>(tables / num_hash, 1, heads_sorted);
  const int64_t hashes_added = std::clamp<int64_t>(tables, 1, num_hash);
  const Tensor memory = torch::stable::new_empty(
      value, {heads_added * hashes_added * table_size * p.row_columns * static_cast<int64_t>(sizeof(Sum<In>))},
      ScalarType::Byte);
  p.tables = static_cast<Sum<In>*>(memory.mutable_data_ptr());
  const int64_t num_sums = hashes_added < num_hash ? heads_added * p.N * p.row_columns : 0;
  const Tensor sums = torch::stable::new_empty(value, {num_sums}, length_dtype(value));
  p.sums = static_cast<Accumulator<In>*>(sums.mutable_data_ptr());
  const bool whole = aligned(p.value, p.Dv) && aligned(p.out, p.Dv);
  const auto build = whole ? build_tables_kernel<In, Code, true> : build_tables_kernel<In, Code, false>;
  const auto read = whole ? read_tables_kernel<In, Code, true> : read_tables_kernel<In, Code, false>;

  for (int64_t sorted = 0; sorted < all_heads; sorted += heads_sorted) {
    const int64_t sorted_end = std::min(sorted + heads_sorted, all_heads);
    const SortedCodes keys = sort_codes(device, key_codes, sorted, sorted_end - sorted, hash_code_len);
    for (p.first_head = sorted; p.first_head < sorted_end; p.first_head += heads_added) {
      const int64_t heads = std::min(heads_added, sorted_end - p.first_head);
      const int64_t list = (p.first_head - sorted) * num_hash;
      p.query_codes = static_cast<const Code*>(query_codes.const_data_ptr()) + p.first_head * num_hash * p.N;
      p.order = static_cast<const int32_t*>(keys.order.const_data_ptr()) + list * p.M;
      p.starts = static_cast<const int32_t*>(keys.starts.const_data_ptr()) + list * (table_size + 1);
      for (int64_t first = 0; first < num_hash; first += hashes_added) {
        p.first_hash = static_cast<int32_t>(first);
        p.hashes = static_cast<int32_t>(std::min(hashes_added, num_hash - first));
        launch(device, build, blocks_for(heads, p.hashes * table_size, p.lanes, p.slices), kThreads, 0, p);
        launch(device, read, blocks_for(heads, p.N, p.lanes, p.slices), kThreads, 0, p);
      }
    }
  }
}

// query, key and the choice of backward matter to autograd only
std::tuple<Tensor, Tensor> sampled_attention_cuda(const Tensor&, const Tensor&, const Tensor& value,
                                                  const Tensor& query_codes, const Tensor& key_codes,
                                                  int64_t hash_code_len, bool, bool unit) {
  check_all_codes(query_codes, key_codes, value, hash_code_len);
  const Device device(value);
  const Tensor rows = dense_rows(value);
  Tensor out = empty_heads_last(value, value.size(0), value.size(1), query_codes.size(3), value.size(3));
  Tensor inverse_length = empty_inverse_length(out, unit);
  if (out.numel() > 0 || inverse_length.numel() > 0) {
    dispatch_floating(rows, [&](auto element) {
      dispatch_codes(query_codes, [&](auto code) {
        sampled_forward<decltype(element), decltype(code)>(device, query_codes, key_codes, rows, hash_code_len, out,
                                                           inverse_length);
      });
    });
  }
  return {out, inverse_length};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("sampled_attention", TORCH_BOX(&sampled_attention_cuda));
}

}  // namespace yoso
