// Sampled attention: every bucket's values are added up in shared memory, and every query reads its buckets there.
#include "sort.h"
#include "unit_rows.h"

namespace yoso {
namespace {

// A block has a multiprocessor and its shared memory for itself.
constexpr int kThreads = 1024;
// Two lanes have a row's slice, each 16 bytes of it: together what the second-level cache hands out at least.
constexpr int kLaneBytes = 16, kRowLanes = 2;
constexpr int kRowsAtOnce = kThreads / kRowLanes;
template <class In>
constexpr int kColumns = kLaneBytes / sizeof(In);
// Rows and codes that a lane has under way; unaligned rows come element by element.
template <bool aligned>
constexpr int kRowsAhead = aligned ? 4 : 2;
constexpr int kCodesAhead = 8;
// A bucket of more rows, and of more than this many times the mean, is added up by a warp.
constexpr int64_t kCrowd = 64, kCrowdOfMean = 4;

// What a table holds. bfloat16 has float32's range: that rounding of each sum weighs as the one of their mean does.
// In float16 a sum could overflow where the mean does not.
template <class In>
struct TableOf {
  using type = Accumulator<In>;
};
template <>
struct TableOf<BFloat16> {
  using type = BFloat16;
};

// The tables of all hash functions, one after the other, are built and read a window at a time: of some hash functions,
// or of a range of the codes of one.
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

// The part of a row that a lane has: `columns` of it, and zeros.
template <class In, bool aligned>
__device__ __forceinline__ void load_part(const In* row, int columns, In (&part)[kColumns<In>]) {
  if constexpr (aligned) {
    const uint4 bits = columns > 0 ? *reinterpret_cast<const uint4*>(row) : uint4{};
    memcpy(part, &bits, sizeof(bits));
  } else {
#pragma unroll
    for (int c = 0; c < kColumns<In>; ++c) part[c] = c < columns ? row[c] : static_cast<In>(0.f);
  }
}

template <class In, bool aligned>
__device__ __forceinline__ void store_part(const In (&part)[kColumns<In>], int columns, In* row) {
  if constexpr (aligned) {
    uint4 bits;
    memcpy(&bits, part, sizeof(bits));
    if (columns > 0) *reinterpret_cast<uint4*>(row) = bits;
  } else {
#pragma unroll
    for (int c = 0; c < kColumns<In>; ++c)
      if (c < columns) row[c] = part[c];
  }
}

// Adds the rows that order names at begin, begin + step, ... before end.
template <class In, bool aligned>
__device__ __forceinline__ void add_rows(const In* values, int64_t row_stride, int columns, const int32_t* order,
                                         uint32_t begin, uint32_t end, int step,
                                         Accumulator<In> (&sums)[kColumns<In>]) {
  constexpr int kAhead = kRowsAhead<aligned>;
  const auto row_at = [&](uint32_t place) { return place < end ? order[place] : -1; };
  int32_t next[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) next[j] = row_at(begin + j * step);
  for (uint32_t place = begin; place < end; place += kAhead * step) {
    In parts[kAhead][kColumns<In>];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      load_part<In, aligned>(values + next[j] * row_stride, next[j] >= 0 ? columns : 0, parts[j]);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next[j] = row_at(place + (kAhead + j) * step);
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
#pragma unroll
      for (int c = 0; c < kColumns<In>; ++c) sums[c] += static_cast<Accumulator<In>>(parts[j][c]);
  }
}

// The window's tables. An entry is split into pieces of 16 bytes a lane, and a piece of all entries lies together,
// which spreads what a warp reads over the banks.
template <class In>
struct Tables {
  using T = Accumulator<In>;
  using Entry = typename TableOf<In>::type;
  static constexpr int kPieces = kColumns<In> * sizeof(Entry) / kLaneBytes;
  static constexpr int kPieceColumns = kColumns<In> / kPieces;
  static constexpr int64_t kEntryBytes = kRowLanes * kPieces * kLaneBytes;

  int32_t entries;

  __device__ uint4* at(int32_t entry, int piece, int lane) const {
    return shared_memory<uint4>() + (piece * entries + entry) * kRowLanes + lane;
  }
  __device__ void store(int32_t entry, int lane, const T (&sums)[kColumns<In>]) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      Entry part[kPieceColumns];
#pragma unroll
      for (int c = 0; c < kPieceColumns; ++c) part[c] = static_cast<Entry>(sums[piece * kPieceColumns + c]);
      memcpy(at(entry, piece, lane), part, kLaneBytes);
    }
  }
  __device__ void add(int32_t entry, int lane, T (&sums)[kColumns<In>]) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 bits = *at(entry, piece, lane);
      Entry part[kPieceColumns];
      memcpy(part, &bits, kLaneBytes);
#pragma unroll
      for (int c = 0; c < kPieceColumns; ++c) sums[piece * kPieceColumns + c] += static_cast<T>(part[c]);
    }
  }
};

template <class In, class Code, bool aligned>
__global__ void __launch_bounds__(kThreads) sampled_attention_kernel(Problem<In, Code> p) {
  using T = Accumulator<In>;
  constexpr int kSliceColumns = kRowLanes * kColumns<In>;
  const Windows w = p.windows;
  const int64_t chunk = blockIdx.x % p.chunks, slice = blockIdx.x / p.chunks % p.slices;
  const int64_t place = blockIdx.x / (p.chunks * p.slices), head = p.first_head + place;
  const int lane = threadIdx.x % kRowLanes, warp_lane = threadIdx.x % kWarp;
  const int32_t group = threadIdx.x / kRowLanes;
  const int64_t first_column = slice * kSliceColumns + lane * kColumns<In>;
  const int64_t columns_left = p.Dv - first_column;
  const int columns = columns_left < 0 ? 0 : columns_left < kColumns<In> ? columns_left : kColumns<In>;
  const In* values = p.value.at(head / p.H, head % p.H, 0) + first_column;
  const Code* query_codes = p.query_codes + place * w.num_hash * p.N;
  const int32_t* orders = p.order + place * w.num_hash * p.M;
  const int32_t* starts = p.starts + place * w.num_hash * (int64_t{w.table_size} + 1);
  T* window_sums = p.sums + (place * p.slices + slice) * p.N * kSliceColumns + lane * kColumns<In>;
  const int64_t first_query = chunk * p.N / p.chunks, last_query = (chunk + 1) * p.N / p.chunks;

  for (int32_t first_hash = 0; first_hash < w.num_hash; first_hash += w.hashes) {
    const int32_t hashes = min(w.hashes, w.num_hash - first_hash);
    for (int32_t first_code = 0; first_code < w.table_size; first_code += w.codes) {
      const int32_t codes = min(w.codes, w.table_size - first_code), entries = hashes * codes;
      const Tables<In> tables{entries};

      for (int32_t entry = group; entry - group < entries; entry += kRowsAtOnce) {
        int32_t hash = 0, begin = 0, end = 0;
        if (entry < entries) {
          hash = first_hash + entry / codes;
          const int32_t* start = starts + hash * (int64_t{w.table_size} + 1) + first_code + entry % codes;
          begin = start[0];
          end = start[1];
        }
        T sums[kColumns<In>] = {};
        const bool crowded = end - begin > p.crowd;
        add_rows<In, aligned>(values, p.value.row_stride, columns, orders + hash * p.M, begin, crowded ? begin : end,
                              1, sums);
        // the warp shares the rows of each crowded bucket of its lanes
        uint32_t left = __ballot_sync(kAllLanes, crowded && lane == 0);
        while (left != 0) {
          const int owner = __ffs(left) - 1;
          left &= left - 1;
          const int32_t from = __shfl_sync(kAllLanes, begin, owner) + warp_lane / kRowLanes;
          const int32_t to = __shfl_sync(kAllLanes, end, owner);
          const int32_t* order = orders + __shfl_sync(kAllLanes, hash, owner) * p.M;
          T part[kColumns<In>] = {};
          add_rows<In, aligned>(values, p.value.row_stride, columns, order, from, to, kWarp / kRowLanes, part);
#pragma unroll
          for (int c = 0; c < kColumns<In>; ++c) {
#pragma unroll
            for (int other = kRowLanes; other < kWarp; other *= 2)
              part[c] += __shfl_xor_sync(kAllLanes, part[c], other);
            if (warp_lane - lane == owner) sums[c] = part[c];
          }
        }
        if (entry < entries) tables.store(entry, lane, sums);
      }
      __syncthreads();

      const bool first = first_hash == 0 && first_code == 0;
      const bool last = first_hash + hashes == w.num_hash && first_code + codes == w.table_size;
      for (int64_t query = first_query + group; query < last_query; query += kRowsAtOnce) {
        T sums[kColumns<In>] = {};
        bool found = false;
        for (int32_t hash = 0; hash < hashes; hash += kCodesAhead) {
          uint32_t code[kCodesAhead];
#pragma unroll
          for (int j = 0; j < kCodesAhead; ++j)
            code[j] = hash + j < hashes
                          ? static_cast<uint32_t>(query_codes[(first_hash + hash + j) * p.N + query]) - first_code
                          : ~0u;
#pragma unroll
          for (int j = 0; j < kCodesAhead; ++j) {
            if (code[j] >= static_cast<uint32_t>(codes)) continue;
            found = true;
            tables.add((hash + j) * codes + code[j], lane, sums);
          }
        }
        T* before = window_sums + query * kSliceColumns;
        if (!first && (found || last))
#pragma unroll
          for (int c = 0; c < kColumns<In>; ++c) sums[c] += before[c];
        if (last) {
          In part[kColumns<In>];
#pragma unroll
          for (int c = 0; c < kColumns<In>; ++c) part[c] = static_cast<In>(sums[c] * (T{1} / w.num_hash));
          store_part<In, aligned>(part, columns, p.out.at(head / p.H, head % p.H, query) + first_column);
        } else if (first || found) {
#pragma unroll
          for (int c = 0; c < kColumns<In>; ++c) before[c] = sums[c];
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
  const int64_t fitting = static_cast<int64_t>(device.shared_bytes()) / Tables<In>::kEntryBytes;
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
  const int64_t slice = kRowLanes * kColumns<In>;
  p.slices = divide_up(p.Dv, slice);
  p.crowd = static_cast<int32_t>(std::max(kCrowd, kCrowdOfMean * (p.M >> hash_code_len)));
  const int64_t group = heads_at_once(heads, num_hash, p.M, hash_code_len);
  // every chunk builds the tables again, so only where multiprocessors would idle
  p.chunks = std::clamp<int64_t>(device.num_multiprocessors() / (group * p.slices), 1,
                                 divide_up(p.N, kRowsAtOnce));
  const int64_t num_sums = p.windows.one() ? 0 : group * p.slices * p.N * slice;
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
           p.windows.hashes * int64_t{p.windows.codes} * Tables<In>::kEntryBytes, p);
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

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) { m.impl("sampled_attention", TORCH_BOX(&sampled_attention_cuda)); }

}  // namespace yoso
