// Sampled attention: every bucket's values are added up in shared memory, and every query reads its buckets there.
#include "sort.h"
#include "unit_rows.h"

namespace yoso {
namespace {

// A block has a multiprocessor and its shared memory for itself.
constexpr int kThreads = 1024;
// Two lanes have a row's slice, each 16 bytes of it: together what the second-level cache hands out at least. A table
// holds sums in float32 or float64 (rounded to 16 bits they would cost accuracy), and each lane reads 16 bytes again.
constexpr int kLaneBytes = 16, kRowLanes = 2;
template <class In>
constexpr int kRowColumns = kLaneBytes / sizeof(In);
template <class In>
constexpr int kSliceColumns = kRowLanes * kRowColumns<In>;
template <class In>
constexpr int kSumColumns = kLaneBytes / sizeof(Accumulator<In>);
template <class In>
constexpr int64_t kEntryBytes = kSliceColumns<In> * sizeof(Accumulator<In>);
// Rows and codes that a lane has under way; unaligned rows come element by element.
template <bool aligned>
constexpr int kRowsAhead = aligned ? 4 : 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900
// more would be spilled
constexpr int kCodesAhead = 4;
#else
constexpr int kCodesAhead = 8;
#endif
// A bucket of more rows, and of more than this many times the mean, is added up by a warp.
constexpr int64_t kCrowd = 64, kCrowdOfMean = 4;

// The tables of all hash functions, one after the other, are built and read a window at a time: of some hash
// functions, or of a range of the codes of one.
struct Windows {
  int32_t num_hash, table_size;
  // of a window
  int32_t hashes, codes;

  bool one() const { return hashes == num_hash && codes == table_size; }
};

// A block has a slice of a head's columns, and a chunk of the queries.
template <class In, class Code>
struct Problem {
  // of all heads
  Rows<const In> value;
  Rows<In> out;
  // from first_head on
  const Code* query_codes;
  const int32_t *order, *starts;
  // each slice's sums of the windows before, [heads, slices, N, columns of a slice]; none for one window
  Accumulator<In>* sums;
  int64_t first_head, H, N, M, Dv, slices, chunks;
  int32_t crowd;
  Windows windows;
};

// How many of the columns left from the slice's first one on are the lane's.
template <int columns>
__device__ int part_of(int64_t left, int lane) {
  left -= lane * columns;
  return left < 0 ? 0 : left < columns ? static_cast<int>(left) : columns;
}

template <class T>
__device__ __forceinline__ void load_sums(const T* from, T (&sums)[kLaneBytes / sizeof(T)]) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  memcpy(sums, &bits, sizeof(bits));
}

template <class T>
__device__ __forceinline__ void store_sums(const T* sums, T* to) {
  uint4 bits;
  memcpy(&bits, sums, sizeof(bits));
  *reinterpret_cast<uint4*>(to) = bits;
}

// The part of a row that a lane has: `columns` of it, and zeros.
template <class In, bool aligned>
__device__ __forceinline__ void load_part(const In* row, int columns, In (&part)[kRowColumns<In>]) {
  if constexpr (aligned) {
    const uint4 bits = columns > 0 ? *reinterpret_cast<const uint4*>(row) : uint4{};
    memcpy(part, &bits, sizeof(bits));
  } else {
#pragma unroll
    for (int c = 0; c < kRowColumns<In>; ++c) part[c] = c < columns ? row[c] : static_cast<In>(0.f);
  }
}

// Writes a lane's part of an output row.
template <class In, bool aligned>
__device__ __forceinline__ void store_part(const In (&part)[kSumColumns<In>], int columns, In* row) {
  if constexpr (aligned) {
    using Bits = std::conditional_t<sizeof(part) == 16, uint4, uint2>;
    Bits bits;
    memcpy(&bits, part, sizeof(bits));
    if (columns > 0) *reinterpret_cast<Bits*>(row) = bits;
  } else {
#pragma unroll
    for (int c = 0; c < kSumColumns<In>; ++c)
      if (c < columns) row[c] = part[c];
  }
}

// Adds the rows that order names at begin, begin + step, ... before end.
template <class In, bool aligned>
__device__ __forceinline__ void add_rows(const In* values, int64_t row_stride, int columns, const int32_t* order,
                                         uint32_t begin, uint32_t end, int step,
                                         Accumulator<In> (&sums)[kRowColumns<In>]) {
  constexpr int kAhead = kRowsAhead<aligned>;
  const auto row_at = [&](uint32_t place) { return place < end ? order[place] : -1; };
  int32_t next[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) next[j] = row_at(begin + j * step);
  for (uint32_t place = begin; place < end; place += kAhead * step) {
    In parts[kAhead][kRowColumns<In>];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      load_part<In, aligned>(values + next[j] * row_stride, next[j] >= 0 ? columns : 0, parts[j]);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next[j] = row_at(place + (kAhead + j) * step);
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
#pragma unroll
      for (int c = 0; c < kRowColumns<In>; ++c) sums[c] += static_cast<Accumulator<In>>(parts[j][c]);
  }
}

// Fills the tables of `hashes` hash functions for `codes` codes each: entry h * codes + c has the sum of a bucket.
// Orders and starts are those of the first hash function, the latter from the first code on.
template <class In, bool aligned>
__device__ __forceinline__ void build_tables(const In* values, int64_t row_stride, int64_t Dv_left, int32_t crowd,
                                             const int32_t* orders, int64_t M, const int32_t* starts,
                                             int32_t table_size, int32_t hashes, int32_t codes) {
  using T = Accumulator<In>;
  const int lane = threadIdx.x % kRowLanes, warp_lane = threadIdx.x % kWarp;
  const int32_t group = threadIdx.x / kRowLanes, entries = hashes * codes;
  const int columns = part_of<kRowColumns<In>>(Dv_left, lane);
  values += lane * kRowColumns<In>;
  for (int32_t entry = group; entry - group < entries; entry += kThreads / kRowLanes) {
    int32_t hash = 0, begin = 0, end = 0;
    if (entry < entries) {
      hash = entry / codes;
      const int32_t* start = starts + hash * (int64_t{table_size} + 1) + entry % codes;
      begin = start[0];
      end = start[1];
    }
    T sums[kRowColumns<In>] = {};
    const bool crowded = end - begin > crowd;
    add_rows<In, aligned>(values, row_stride, columns, orders + hash * M, begin, crowded ? begin : end, 1, sums);
    // the warp shares the rows of each crowded bucket of its lanes
    uint32_t left = __ballot_sync(kAllLanes, crowded && lane == 0);
    while (left != 0) {
      const int owner = __ffs(left) - 1;
      left &= left - 1;
      const int32_t from = __shfl_sync(kAllLanes, begin, owner) + warp_lane / kRowLanes;
      const int32_t to = __shfl_sync(kAllLanes, end, owner);
      const int32_t* order = orders + __shfl_sync(kAllLanes, hash, owner) * M;
      T part[kRowColumns<In>] = {};
      add_rows<In, aligned>(values, row_stride, columns, order, from, to, kWarp / kRowLanes, part);
#pragma unroll
      for (int c = 0; c < kRowColumns<In>; ++c) {
#pragma unroll
        for (int other = kRowLanes; other < kWarp; other *= 2)
          part[c] += __shfl_xor_sync(kAllLanes, part[c], other);
        if (warp_lane - lane == owner) sums[c] = part[c];
      }
    }
    if (entry < entries) {
      T* to = shared_memory<T>() + entry * kSliceColumns<In> + lane * kRowColumns<In>;
#pragma unroll
      for (int c = 0; c < kRowColumns<In>; c += kSumColumns<In>) store_sums(sums + c, to + c);
    }
  }
}

template <class In, class Code, bool aligned>
__global__ void __launch_bounds__(kThreads) sampled_attention_kernel(Problem<In, Code> p) {
  using T = Accumulator<In>;
  // lanes that have a query's slice
  constexpr int kLanes = kSliceColumns<In> / kSumColumns<In>;
  const Windows w = p.windows;
  const int64_t chunk = blockIdx.x % p.chunks, slice = blockIdx.x / p.chunks % p.slices;
  const int64_t place = blockIdx.x / (p.chunks * p.slices), head = p.first_head + place;
  const int64_t first_column = slice * kSliceColumns<In>;
  const In* values = p.value.at(head / p.H, head % p.H, 0) + first_column;
  const int32_t* orders = p.order + place * w.num_hash * p.M;
  const int32_t* starts = p.starts + place * w.num_hash * (int64_t{w.table_size} + 1);
  const Code* query_codes = p.query_codes + place * w.num_hash * p.N;
  const int lane = threadIdx.x % kLanes;
  const int columns = part_of<kSumColumns<In>>(p.Dv - first_column, lane);
  const T* table = shared_memory<T>() + lane * kSumColumns<In>;
  T* window_sums = p.sums + (place * p.slices + slice) * p.N * kSliceColumns<In> + lane * kSumColumns<In>;
  In* out = p.out.at(head / p.H, head % p.H, 0) + first_column + lane * kSumColumns<In>;
  const int64_t first_query = chunk * p.N / p.chunks, last_query = (chunk + 1) * p.N / p.chunks;

  for (int32_t first_hash = 0; first_hash < w.num_hash; first_hash += w.hashes) {
    const int32_t hashes = min(w.hashes, w.num_hash - first_hash);
    for (int32_t first_code = 0; first_code < w.table_size; first_code += w.codes) {
      const int32_t codes = min(w.codes, w.table_size - first_code);
      build_tables<In, aligned>(values, p.value.row_stride, p.Dv - first_column, p.crowd, orders + first_hash * p.M,
                                p.M, starts + first_hash * (int64_t{w.table_size} + 1) + first_code, w.table_size,
                                hashes, codes);
      __syncthreads();

      const bool first = first_hash == 0 && first_code == 0;
      const bool last = first_hash + hashes == w.num_hash && first_code + codes == w.table_size;
      for (int64_t query = first_query + threadIdx.x / kLanes; query < last_query; query += kThreads / kLanes) {
        const Code* code_at = query_codes + first_hash * p.N + query;
        T sums[kSumColumns<In>] = {};
        bool found = false;
        for (int32_t hash = 0; hash < hashes; hash += kCodesAhead) {
          uint32_t code[kCodesAhead];
#pragma unroll
          for (int j = 0; j < kCodesAhead; ++j)
            code[j] = hash + j < hashes ? static_cast<uint32_t>(code_at[(hash + j) * p.N]) - first_code : ~0u;
#pragma unroll
          for (int j = 0; j < kCodesAhead; ++j) {
            if (code[j] >= static_cast<uint32_t>(codes)) continue;
            found = true;
            T part[kSumColumns<In>];
            load_sums(table + ((hash + j) * codes + code[j]) * kSliceColumns<In>, part);
#pragma unroll
            for (int c = 0; c < kSumColumns<In>; ++c) sums[c] += part[c];
          }
        }
        T* before = window_sums + query * kSliceColumns<In>;
        if (!first && (found || last)) {
          T part[kSumColumns<In>];
          load_sums(before, part);
#pragma unroll
          for (int c = 0; c < kSumColumns<In>; ++c) sums[c] += part[c];
        }
        if (last) {
          In part[kSumColumns<In>];
#pragma unroll
          for (int c = 0; c < kSumColumns<In>; ++c) part[c] = static_cast<In>(sums[c] * (T{1} / w.num_hash));
          store_part<In, aligned>(part, columns, out + query * p.out.row_stride);
        } else if (first || found) {
          store_sums(sums, before);
        }
      }
      __syncthreads();
    }
  }
}

// As few windows as the shared memory allows, of about the same size.
template <class In>
Windows find_windows(const Device& device, int64_t num_hash, int64_t hash_code_len) {
  const int64_t table_size = int64_t{1} << hash_code_len;
  const int64_t fitting = static_cast<int64_t>(device.shared_bytes()) / kEntryBytes<In>;
  const int64_t hashes = std::max<int64_t>(fitting / table_size, 1), codes = std::min(fitting, table_size);
  const auto even = [](int64_t all, int64_t most) {
    return static_cast<int32_t>(divide_up(all, divide_up(all, most)));
  };
  return {static_cast<int32_t>(num_hash), static_cast<int32_t>(table_size), even(num_hash, hashes),
          even(table_size, codes)};
}

// whether 16 bytes can be read at a time
template <class T>
bool aligned(const Rows<T>& rows, int64_t columns) {
  const int64_t strides = rows.batch_stride | rows.head_stride | rows.row_stride | columns;
  return (reinterpret_cast<uintptr_t>(rows.data) | strides * sizeof(T)) % kLaneBytes == 0;
}

template <class In, class Code>
void sampled_forward(const Device& device, const Tensor& query_codes, const Tensor& key_codes, const Tensor& value,
                     int64_t hash_code_len, const Tensor& out) {
  using T = Accumulator<In>;
  const int64_t heads = value.size(0) * value.size(1), num_hash = query_codes.size(2);
  Problem<In, Code> p;
  p.value = rows_of<In>(value);
  p.out = mutable_rows_of<In>(out);
  p.H = value.size(1);
  p.N = out.size(2);
  p.M = value.size(2);
  p.Dv = value.size(3);
  p.windows = find_windows<In>(device, num_hash, hash_code_len);
  constexpr int64_t kSlice = kSliceColumns<In>;
  p.slices = divide_up(p.Dv, kSlice);
  p.crowd = static_cast<int32_t>(std::max(kCrowd, kCrowdOfMean * (p.M >> hash_code_len)));
  const int64_t group = heads_at_once(heads, num_hash, p.M, hash_code_len);
  // every chunk builds the tables again, so only where multiprocessors would idle
  p.chunks = std::clamp<int64_t>(device.num_multiprocessors() / (group * p.slices), 1,
                                 divide_up(p.N, kThreads));
  const int64_t num_sums = p.windows.one() ? 0 : group * p.slices * p.N * kSlice;
  Tensor sums = torch::stable::new_empty(out, {num_sums}, length_dtype(out));
  p.sums = static_cast<T*>(sums.mutable_data_ptr());
  const auto kernel = aligned(p.value, p.Dv) && aligned(p.out, p.Dv) ? sampled_attention_kernel<In, Code, true>
                                                                    : sampled_attention_kernel<In, Code, false>;
  for (p.first_head = 0; p.first_head < heads; p.first_head += group) {
    const int64_t count = std::min(group, heads - p.first_head);
    const SortedCodes sorted = sort_codes(device, key_codes, p.first_head, count, hash_code_len);
    p.query_codes = static_cast<const Code*>(query_codes.const_data_ptr()) + p.first_head * num_hash * p.N;
    p.order = static_cast<const int32_t*>(sorted.order.const_data_ptr());
    p.starts = static_cast<const int32_t*>(sorted.starts.const_data_ptr());
    launch(device, kernel, count * p.slices * p.chunks, kThreads,
           p.windows.hashes * int64_t{p.windows.codes} * kEntryBytes<In>, p);
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
  if (out.numel() > 0) {
    dispatch_floating(rows, [&](auto element) {
      dispatch_codes(query_codes, [&](auto code) {
        sampled_forward<decltype(element), decltype(code)>(device, query_codes, key_codes, rows, hash_code_len, out);
      });
    });
  }
  // not before: a block of the kernel has only some columns of a row
  if (unit) scale_to_unit_rows(device, out, inverse_length);
  return {out, inverse_length};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  m.impl("sampled_attention", TORCH_BOX(&sampled_attention_cuda));
}

}  // namespace yoso
