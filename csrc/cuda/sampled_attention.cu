// Sampled attention: every bucket's values are added up in a table, and every query adds up its buckets' sums. Both
// are sums of rows that lie anywhere, of a head at a time, which the second-level cache keeps. What is read many times,
// some columns of a head's values or of a table, is copied to shared memory where it fits. Sums of values there are
// products on tensor cores where these have 16 bits.
#include "sampled_attention.h"

#include "mma.h"
#include "rows.h"

namespace yoso {
namespace {

// Sums of bfloat16 are rounded to what they are sums of, which halves the bytes that queries read; float16 has too few
// exponents for sums of many rows.
template <class In>
using Sum = std::conditional_t<std::is_same_v<In, BFloat16>, BFloat16, Accumulator<In>>;
// Rows that a lane has under way; unaligned ones come element by element.
template <class In, bool aligned>
constexpr int kRowsAhead = std::max(1, (aligned ? 64 : 32) / static_cast<int>(kLaneColumns * sizeof(In)));
template <class In>
constexpr int kSumsAhead = 128 / (kLaneColumns * sizeof(Sum<In>));
// A bucket of more rows, and of more than this many times the mean, is added up by a warp.
constexpr int64_t kCrowd = 64, kCrowdOfMean = 4;
// Tables take so many times what the cache is to keep: that some leave it before they are read costs less than the ends
// of more launches.
constexpr int64_t kCaches = 4;
// Hash functions for which a copy of the values' columns in shared memory is worth while.
constexpr int64_t kHashesOfCopy = 4;
// Entries that a warp adds up on tensor cores, rows that it multiplies at a time, and columns.
constexpr int kTileEntries = 16, kTileRows = 16, kTileColumns = 16;
// Rows that tensor cores count; a GPU's shared memory does not hold as many.
constexpr int64_t kMostTileRows = 16000;
// Threads of a block that has a copy of values.
constexpr int kCopyThreads = 1024;
// Where queries share copies of the tables' columns: threads of a block, of which more would have few registers, lanes
// that a query has, queries that a lane has, how many of a block's queries there are at least for every entry of a
// table, and tables that threads wait for at once if these fit.
constexpr int kSharingThreads = 512, kSharingLanes = 2, kSharingQueries = 8, kQueriesOfEntry = 2;
constexpr int kTablesAtOnce = 4;
constexpr int kSharingColumns = kSharingLanes * kLaneColumns, kSharingRows = kSharingThreads / kSharingLanes;
// Rows that a lane scales at a time.
constexpr int kRowsScaled = 8;

// The heads from first_head on, and of their hash functions those from first_hash on.
template <class In, class Code>
struct Problem {
  // of all heads
  Rows<const In> value;
  Rows<In> out;
  // of first_head and all hash functions onwards
  const Code* query_codes;
  const int32_t *order, *starts;
  // of the launch's heads and hash functions: [heads, hashes, table_size, columns], or where queries share copies of
  // some columns [heads, columns / kSharingColumns, hashes, table_size, kSharingColumns], so that these lie together
  Sum<In>* tables;
  // [heads, N, row_columns], the sums of the hash functions before; unused where the tables hold all of these
  Accumulator<In>* sums;
  // [B, H, N], of the output rows that are to have length one; null where these stay as they are
  Accumulator<In>* inverse_length;
  // from one of a head's values, one entry of a table, one slice of columns and one head's tables to the next
  uint32_t value_bytes, entry_bytes, slice_bytes, head_bytes;
  // Dv rounded up to what a lane has
  int32_t row_columns;
  int32_t first_head, H, N, M, Dv, num_hash, hash_code_len, first_hash, hashes, crowd;
  // 2^lane_bits lanes, up to a warp, have a slice of a row, of as many slices; rows that get length one have one
  int lane_bits, slices;

  // A column of the first entry of one of the launch's heads.
  __device__ __forceinline__ Sum<In>* table_column(int32_t head, int32_t column) const {
    return row_at(row_at(tables, head, head_bytes), column / kSharingColumns, slice_bytes) + column % kSharingColumns;
  }
};

template <class T>
__device__ __forceinline__ void add(const T (&row)[kLaneColumns], Accumulator<T> (&sums)[kLaneColumns]) {
#pragma unroll
  for (int c = 0; c < kLaneColumns; c += 2)
    if constexpr (std::is_same_v<T, BFloat16>) {
      // one instruction for either number; a conversion of the second would take two
      uint32_t pair;
      memcpy(&pair, row + c, sizeof(pair));
      sums[c] += __uint_as_float(pair << 16);
      sums[c + 1] += __uint_as_float(pair & 0xffff0000);
    } else {
      sums[c] += static_cast<Accumulator<T>>(row[c]);
      sums[c + 1] += static_cast<Accumulator<T>>(row[c + 1]);
    }
}

// Adds the first `columns` columns of the rows that order[0], order[step], ... name, the last before order[count].
template <class In, bool aligned>
__device__ __forceinline__ void add_rows(const In* values, uint32_t row_bytes, int columns, const int32_t* order,
                                         int32_t count, int step, Accumulator<In> (&sums)[kLaneColumns]) {
  constexpr int kAhead = kRowsAhead<In, aligned>;
  int32_t next[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) next[j] = j * step < count ? order[j * step] : -1;
  while (count > 0) {
    In rows[kAhead][kLaneColumns];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      load_columns<aligned>(row_at(values, next[j], row_bytes), next[j] < 0 ? 0 : columns, rows[j]);
    count -= kAhead * step;
    order += kAhead * step;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next[j] = j * step < count ? order[j * step] : -1;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) add(rows[j], sums);
  }
}

// Fills in the lanes' columns of an entry of the tables, from values that begin at their first column; the entry's head
// counts from the launch's first one. The warp's lanes call this together, some with no entry.
template <class In, class Code, bool aligned>
__device__ __forceinline__ void build_entry(const Problem<In, Code>& p, bool exists, int32_t head, int32_t entry,
                                            const In* values, uint32_t row_bytes, int32_t column, int lane_bits) {
  using T = Accumulator<In>;
  const int columns = columns_of_lane(p.Dv, column), lane = threadIdx.x & ((1 << lane_bits) - 1);
  exists = exists && columns > 0;
  const int32_t* order = nullptr;
  int32_t count = 0;
  if (exists) {
    const int64_t list = int64_t{head} * p.num_hash + p.first_hash + (entry >> p.hash_code_len);
    const int32_t table_size = 1 << p.hash_code_len;
    const int32_t* start = p.starts + list * (table_size + 1) + (entry & (table_size - 1));
    order = p.order + list * p.M + start[0];
    count = start[1] - start[0];
  }
  T sums[kLaneColumns] = {};
  const bool crowded = count > p.crowd;
  add_rows<In, aligned>(values, row_bytes, columns, order, crowded ? 0 : count, 1, sums);
  // the warp shares the rows of each crowded bucket of its lanes
  const int warp_lane = threadIdx.x % kWarp;
  for (uint32_t left = __ballot_sync(kAllLanes, crowded && lane == 0); left != 0; left &= left - 1) {
    const int owner = __ffs(left) - 1, first = warp_lane >> lane_bits;
    const int32_t all = __shfl_sync(kAllLanes, count, owner);
    const auto* shared_order =
        reinterpret_cast<const int32_t*>(__shfl_sync(kAllLanes, reinterpret_cast<uintptr_t>(order), owner));
    T part[kLaneColumns] = {};
    add_rows<In, aligned>(values, row_bytes, columns, shared_order + first, columns > 0 ? all - first : 0,
                          kWarp >> lane_bits, part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      for (int other = 1 << lane_bits; other < kWarp; other *= 2)
        part[c] += __shfl_xor_sync(kAllLanes, part[c], other);
      if (warp_lane - lane == owner) sums[c] = part[c];
    }
  }
  if (!exists) return;
  Sum<In> rounded[kLaneColumns];
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) rounded[c] = static_cast<Sum<In>>(sums[c]);
  store(rounded, row_at(p.table_column(head, column), entry, p.entry_bytes));
}

// Rows that lanes' columns in shared memory are apart: an odd number, so that one row's lie in different banks.
__host__ __device__ constexpr int32_t row_stride(int32_t rows) { return rows | 1; }

// Fills the tables, from values in the cache.
template <class In, class Code, bool aligned>
__global__ void __launch_bounds__(kRowThreads, 3) build_tables_kernel(Problem<In, Code> p) {
  start_after_launches_before();
  const int32_t entries = p.hashes << p.hash_code_len;
  const RowPlace place(entries, p.lane_bits, p.slices);
  const int32_t head = p.first_head + place.head;
  build_entry<In, Code, aligned>(p, place.row < entries, place.head, place.row,
                                 p.value.at(head / p.H, head % p.H, 0) + place.column, p.value_bytes, place.column,
                                 p.lane_bits);
}

// Whether one of 8 numbers of 16 bits is not finite, or so large that twice the sum of a bucket might not be.
template <class In>
__device__ __forceinline__ bool has_extreme(const In* numbers) {
  // what is added to the bits of such, the sign aside, carries to the sign's place
  constexpr uint32_t kLeast = std::is_same_v<In, BFloat16> ? 0x7180 : 0x7C00, kCarry = (0x8000 - kLeast) * 0x10001;
  uint32_t pairs[4], carried = 0;
  const uint4 bits = *reinterpret_cast<const uint4*>(numbers);
  memcpy(pairs, &bits, sizeof(bits));
#pragma unroll
  for (int i = 0; i < 4; ++i) carried |= (pairs[i] & 0x7FFF7FFF) + kCarry;
  return (carried & 0x80008000) != 0;
}

// Fills in the columns that are in shared memory of all entries of some hash functions, by products of the matrix that
// has a 2 where a row is in an entry. The rows of neighbouring entries are neighbours in the order. None of the numbers
// may be extreme: 0 times these would be no number.
template <class In, class Code>
__device__ __forceinline__ void build_by_tiles(const Problem<In, Code>& p, int32_t head, int32_t first_hash,
                                               int32_t hashes, const In* shared, int32_t first_column,
                                               int lane_bits) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, warps = kCopyThreads / kWarp;
  // as a power of two, how many tiles a table's entries have
  const int32_t table_size = 1 << p.hash_code_len, tile_bits = max(p.hash_code_len - 4, 0);
  const int32_t columns = kLaneColumns << lane_bits;
  // a warp has neighbours, whose rows are neighbours in the order
  const auto first_of = [&](int32_t warp) {
    return static_cast<int32_t>(int64_t{(columns - 1) / kTileColumns + 1} * (hashes << tile_bits) * warp / warps);
  };
  const int32_t last_tile = first_of(threadIdx.x / kWarp + 1);
  const int64_t first_list = int64_t{head} * p.num_hash + p.first_hash + first_hash;
#pragma unroll 1
  for (int32_t tile = first_of(threadIdx.x / kWarp), end_tile; tile < last_tile; tile = end_tile) {
    // those of one table
    end_tile = min((tile >> tile_bits) + 1 << tile_bits, last_tile);
    const int32_t table = (tile >> tile_bits) % hashes, column = (tile >> tile_bits) / hashes * kTileColumns;
    const int32_t first_entry = (tile & ((1 << tile_bits) - 1)) * kTileEntries;
    // where the rows of entry `lane` of a tile begin, and those of the last one end
    const int32_t* starts =
        p.starts + (first_list + table) * (table_size + 1) + first_entry + min(lane, min(kTileEntries, table_size));
    const int32_t* order = unknown(p.order + (first_list + table) * p.M);
    // past the last row there is the last again, in no entry
    const auto load = [&](int32_t first) { return __ldg(order + min(first + lane, p.M - 1)); };
    Sum<In>* to = row_at(p.table_column(head, first_column + column) + 2 * t,
                         (first_hash + table << p.hash_code_len) + first_entry + g, p.entry_bytes);
    int32_t start = *starts;
    // columns 0 to 7, and 8 to 15 if there are any
    const In* values = shared + column * row_stride(p.M);
    const uint32_t next_columns =
        unknown(column + kLaneColumns < columns ? row_stride(p.M) * kLaneColumns * sizeof(In) : 0);
    const uint32_t values_address = unknown(static_cast<uint32_t>(__cvta_generic_to_shared(values)));
    // Where the lane's row of those from a position in the order on is, which waits for the load, and for all others
    // that the loop below has begun.
    const auto address_of = [&](int32_t row) { return unknown(values_address + row * (kLaneColumns * sizeof(In))); };
    const int32_t columns_to_store = min(columns, p.Dv - first_column) - column;
    // Rows come 32 at a time, those from this position on first. Of two times as many is known where they are, and the
    // numbers of as many after these are under way.
    int32_t position = __shfl_sync(kAllLanes, start, 0), left = end_tile - tile, end;
    uint32_t row_address = address_of(load(position)), next_address = address_of(load(position + kWarp));
    int32_t rows_ahead[2] = {load(position + 2 * kWarp), load(position + 3 * kWarp)};
    // Two positions of rows in the list, 2t and the next, less where an entry's rows begin, and less where these end: a
    // bit says that they are not before it. It is also the only one of 2 as BFloat16 and as Half.
    constexpr uint32_t kTwo = 0x4000, kPair = 0x10001;
    uint32_t since_begin[2], since_end[2];
    float sums[2][4];
    const auto begin_tile = [&] {
      end = __shfl_sync(kAllLanes, start, kTileEntries);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t first = position + 2 * t + kTwo;
        since_begin[i] = (first - __shfl_sync(kAllLanes, start, g + 8 * i)) * kPair + 0x10000;
        since_end[i] = (first - __shfl_sync(kAllLanes, start, g + 8 * i + 1)) * kPair + 0x10000;
      }
      if (left > 1) start = *(starts += kTileEntries);
      memset(sums, 0, sizeof(sums));
    };
    const auto store_tile = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (g + 8 * i >= table_size) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (8 * n >= columns_to_store) break;
          struct alignas(2 * sizeof(Sum<In>)) Pair {
            Sum<In> first, second;
          };
          *reinterpret_cast<Pair*>(row_at(to + 8 * n, 8 * i, p.entry_bytes)) = {
              static_cast<Sum<In>>(sums[n][2 * i] / 2), static_cast<Sum<In>>(sums[n][2 * i + 1] / 2)};
        }
      }
      to = row_at(to, kTileEntries, p.entry_bytes);
    };
    // Adds 32 rows to all tiles that have some of them; false after the last tile.
    const auto add_rows_to_tiles = [&](uint32_t address) {
      // of each 8 rows a matrix of 8 columns
      uint32_t b[2][4];
      load_matrices<true>(b[0], address);
      load_matrices<true>(b[1], address + next_columns);
      while (true) {
#pragma unroll
        for (int s = 0; s < kWarp / kTileRows; ++s) {
          uint32_t a[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int i = k % 2;
            a[k] = since_begin[i] & ~since_end[i] & kTwo * kPair;
            since_begin[i] += 8 * kPair;
            since_end[i] += 8 * kPair;
          }
#pragma unroll
          for (int n = 0; n < 2; ++n) multiply_add<In>(sums[n], a, {b[n][2 * s], b[n][2 * s + 1]});
        }
        if (end > position + kWarp) break;
        store_tile();
        if (--left == 0) return false;
        begin_tile();
      }
      position += kWarp;
      return true;
    };
    begin_tile();
#pragma unroll 1
    for (bool second = false; add_rows_to_tiles(row_address); second = !second) {
      row_address = next_address;
      if (!second) continue;
      // which keeps this a branch: predicated instructions would wait for the loads every time
      __syncwarp();
      row_address = address_of(rows_ahead[0]);
      next_address = address_of(rows_ahead[1]);
      rows_ahead[0] = load(position + 2 * kWarp);
      rows_ahead[1] = load(position + 3 * kWarp);
    }
  }
}

// Fills the tables where rows are aligned, from a copy of some columns of all values in shared memory. A block has
// 2^lane_bits lanes' columns, and 1 / parts of the hash functions, of a head.
template <class In, class Code>
__global__ void __launch_bounds__(kCopyThreads, 1)
    build_from_shared_kernel(Problem<In, Code> p, int lane_bits, int32_t slices, int32_t parts) {
  constexpr int kPieceColumns = kPieceBytes / sizeof(In);
  const int32_t part = blockIdx.x % parts, slice = blockIdx.x / parts % slices, head = blockIdx.x / parts / slices;
  const int32_t part_hashes = (p.hashes - 1) / parts + 1, first_hash = part * part_hashes;
  const int32_t hashes = min(part_hashes, p.hashes - first_hash);
  let_next_launch_start();
  if (hashes <= 0) return wait_for_launches_before();
  const int32_t batch_head = p.first_head + head, columns = kLaneColumns << lane_bits, first_column = slice * columns;
  const In* values = p.value.at(batch_head / p.H, batch_head % p.H, 0) + first_column;
  // a lane's columns of all rows, then those of the next lane
  In* shared = shared_memory<In>();
  const int32_t lane_size = row_stride(p.M) * kLaneColumns;
  const int32_t pieces = columns / kPieceColumns, row_step = kCopyThreads / pieces;
  const int32_t column = threadIdx.x % pieces * kPieceColumns, first_row = threadIdx.x / pieces;
  In* to = shared + column / kLaneColumns * lane_size + column % kLaneColumns;
  const int32_t rows = first_column + column < p.Dv ? p.M : 0;
  for (int32_t row = first_row; row < rows; row += row_step)
    copy_ahead<16>(to + row * kLaneColumns, row_at(values + column, row, p.value_bytes), false);
  // which read the tables that are to be written
  wait_for_launches_before();
  wait_for_copies();

  if constexpr (sizeof(In) == 2) {
    bool extreme = false;
    for (int32_t row = first_row; row < rows; row += row_step) extreme |= has_extreme(to + row * kLaneColumns);
    if (!__syncthreads_or(extreme)) {
      build_by_tiles(p, head, first_hash, hashes, shared, first_column, lane_bits);
      return;
    }
  } else {
    __syncthreads();
  }
  const int32_t entries = hashes << p.hash_code_len, entry_step = kCopyThreads >> lane_bits;
  const int32_t lane = threadIdx.x & ((1 << lane_bits) - 1);
  for (int32_t first = 0; first < entries; first += entry_step) {
    const int32_t entry = first + (threadIdx.x >> lane_bits);
    build_entry<In, Code, true>(p, entry < entries, head, (first_hash << p.hash_code_len) + entry,
                                shared + lane * lane_size, kLaneColumns * sizeof(In),
                                first_column + lane * kLaneColumns, lane_bits);
  }
}

// Scales a row of which neighbouring lanes have a slice each, zero where they have none; the first of them, if there is
// such a row, keeps its inverse length.
template <class In, class Code, class T>
__device__ __forceinline__ void scale_to_length_one(const Problem<In, Code>& p, int32_t head, int32_t row, bool keeps,
                                                    T (&columns)[kLaneColumns]) {
  T square = 0;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) square += columns[c] * columns[c];
  square = sum_of_lanes(square, p.lane_bits);
  const T inverse = square > 0 ? 1 / sqrt(square) : 0;
  if (keeps) p.inverse_length[int64_t{head} * p.N + row] = inverse;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) columns[c] *= inverse;
}

// Adds up the queries' buckets, and scales the rows of the output.
template <class In, class Code, bool aligned>
__global__ void __launch_bounds__(kRowThreads, 3) read_tables_kernel(Problem<In, Code> p) {
  start_after_launches_before();
  using T = Accumulator<In>;
  constexpr int kAhead = kSumsAhead<In>;
  const RowPlace place(p.N, p.lane_bits, p.slices);
  const int columns = columns_of_lane(p.Dv, place.column);
  // lanes without a column, or past the last row, stay: the sum of squares is the warp's
  const bool exists = place.row < p.N && columns > 0;
  const int32_t row = exists ? place.row : 0;
  const Code* codes = p.query_codes + (int64_t{place.head} * p.num_hash + p.first_hash) * p.N + row;
  const Sum<In>* tables = p.table_column(place.head, place.column);
  // no entry where there is no such hash function, or the code has no bucket
  const auto entry_of = [&](int32_t hash) {
    const uint32_t code = exists && hash < p.hashes ? static_cast<uint32_t>(codes[int64_t{hash} * p.N]) : ~0u;
    return code >> p.hash_code_len == 0 ? static_cast<int32_t>((hash << p.hash_code_len) + code) : -1;
  };
  int32_t next[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) next[j] = entry_of(j);
  T sums[kLaneColumns] = {};
  for (int32_t hash = 0; hash < p.hashes; hash += kAhead) {
    Sum<In> rows[kAhead][kLaneColumns] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (next[j] >= 0) load(row_at(tables, next[j], p.entry_bytes), rows[j]);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) next[j] = entry_of(hash + kAhead + j);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) add(rows[j], sums);
  }

  T* before = p.sums + (int64_t{place.head} * p.N + row) * p.row_columns + place.column;
  if (p.first_hash > 0 && exists) {
    T part[kLaneColumns];
    load(before, part);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) sums[c] += part[c];
  }
  if (p.first_hash + p.hashes < p.num_hash) {
    if (exists) store(sums, before);
    return;
  }
  const int32_t head = p.first_head + place.head;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) sums[c] *= T{1} / p.num_hash;
  if (p.inverse_length != nullptr) scale_to_length_one(p, head, place.row, place.row < p.N && place.lane == 0, sums);
  if (!exists) return;
  In* to = p.out.at(head / p.H, head % p.H, row) + place.column;
  In rounded[kLaneColumns];
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) rounded[c] = static_cast<In>(sums[c]);
  store_columns<aligned>(rounded, columns, to);
}

// How many blocks have a head's queries, and how many the columns.
__host__ __device__ inline int32_t sharing_blocks(int32_t queries) {
  return (queries - 1) / (kSharingRows * kSharingQueries) + 1;
}
__host__ __device__ inline int32_t sharing_slices(int32_t row_columns) {
  return (row_columns - 1) / kSharingColumns + 1;
}

// What a block that shares copies of the tables' columns has: some of these, of the queries from first_row on.
struct SharingPlace {
  int32_t head, first_column, first_row, rows;

  template <class Problem>
  __device__ SharingPlace(const Problem& p, uint32_t number) {
    const int32_t slices = sharing_slices(p.row_columns), blocks = sharing_blocks(p.N);
    const int32_t block = number / slices;
    head = block / blocks;
    first_column = number % slices * kSharingColumns;
    // blocks have the same number of queries, but for the last; of millions of queries some may have none
    const int32_t block_rows = (p.N - 1) / blocks + 1;
    first_row = block % blocks * block_rows;
    rows = min(block_rows, p.N - first_row);
  }
  template <class Problem>
  __device__ auto* tables(const Problem& p) const {
    return p.table_column(head, first_column);
  }
  // of one of the block's queries
  template <class Problem>
  __device__ auto* codes(const Problem& p, int32_t row) const {
    return p.query_codes + int64_t{head} * p.num_hash * p.N + first_row + row;
  }
};

// Stores what a thread of add_shared_tables has added up.
template <class In, class Code>
__device__ __forceinline__ void store_shared_sums(const Problem<In, Code>& p, uint32_t number,
                                                  const float (&sums)[kSharingQueries][2][4]) {
  using T = Accumulator<In>;
  // found again, as registers are short
  const SharingPlace end(p, number);
  const int thread = static_cast<int>(unknown(threadIdx.x)), g = thread % kWarp / 4, t = thread % 4;
  const int32_t batch_head = p.first_head + end.head;
  In* const out = p.out.at(batch_head / p.H, batch_head % p.H, end.first_row) + end.first_column;
  // what is not finite has made no numbers of other rows' sums, by products with zero
  float zero = 0;
#pragma unroll
  for (int i = 0; i < kSharingQueries; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) zero += 0 * sums[i][n][j];
  if (__ballot_sync(kAllLanes, zero != 0) != 0) {
    const int32_t lane_column = thread % kSharingLanes * kLaneColumns;
    if (end.first_column + lane_column >= p.Dv) return;
#pragma unroll 1
    for (int row = thread / kSharingLanes; row < end.rows; row += kSharingRows) {
      T sum[kLaneColumns] = {};
#pragma unroll 1
      for (int32_t hash = 0; hash < p.num_hash; ++hash) {
        const auto code = static_cast<uint32_t>(end.codes(p, row)[int64_t{hash} * p.N]);
        Sum<In> entry[kLaneColumns] = {};
        if (code >> p.hash_code_len == 0)
          load(row_at(end.tables(p) + lane_column, (hash << p.hash_code_len) + code, p.entry_bytes), entry);
        add(entry, sum);
      }
      In rounded[kLaneColumns];
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) rounded[c] = static_cast<In>(sum[c] * (T{1} / p.num_hash));
      store(rounded, out + row * p.out.row_stride + lane_column);
    }
    return;
  }
  // of the entries that the sums are of, a warp's lanes have kRows rows' in turn
  constexpr int kRows = 8 / kSharingLanes;
  const int32_t column = g % kSharingLanes * kLaneColumns + 2 * t;
  if (end.first_column + column >= p.Dv) return;
  const float scale = 1.0f / p.num_hash;
  int row = thread / kWarp * (kWarp / kSharingLanes) + g / kSharingLanes;
  In* to = out + row * p.out.row_stride + column;
#pragma unroll
  for (int i = 0; i < kSharingQueries; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (row < end.rows)
          *reinterpret_cast<uint32_t*>(to) = pack<In>(sums[i][n][2 * j] * scale, sums[i][n][2 * j + 1] * scale);
        row += kRows;
        to += kRows * p.out.row_stride;
      }
    row += kSharingRows - 4 * kRows;
    to += (kSharingRows - 4 * kRows) * p.out.row_stride;
  }
}

// Adds up the buckets of a block's queries, where tables hold all hash functions and rows are aligned, in slices of the
// columns, one after the other. A block has a slice of each table in turn in shared memory: of as many tables as
// at_once says, a power of two, and of as many on their way. Entries are added by tensor cores, as products of the
// identity with these.
template <class In, class Code>
__device__ __forceinline__ void add_shared_tables(const Problem<In, Code>& p, int at_once, uint32_t number,
                                                  int32_t slices) {
  constexpr int kPieceColumns = kPieceBytes / sizeof(Sum<In>), kPieces = kSharingColumns / kPieceColumns;
  constexpr int kAhead = kSharingQueries / 2;
  const SharingPlace begin(p, number);
  if (begin.rows <= 0) return;
  const int place = threadIdx.x / kSharingLanes;
  const int32_t table_size = 1 << p.hash_code_len, rows = begin.rows;
  const Code* codes = begin.codes(p, place);
  Sum<In>* shared = shared_memory<Sum<In>>();

  // of each of the tables, with an entry of zeros for codes without a bucket
  const int32_t shared_size = (table_size + 1) * kSharingColumns;
  if (threadIdx.x < 2 * at_once * kSharingColumns)
    shared[threadIdx.x / kSharingColumns * shared_size + table_size * kSharingColumns +
           threadIdx.x % kSharingColumns] = 0;
  const uint32_t shared_address = unknown(static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  const uint32_t table_bytes = unknown(shared_size * sizeof(Sum<In>)), slots = 2 * at_once - 1;
  const int32_t tables = slices * p.num_hash;
  // the tables of the last columns that there are may have none for the thread: what nobody writes may not be finite
  const int32_t last_column = begin.first_column + (slices - 1) * kSharingColumns;
  const int32_t first_clear =
      last_column + static_cast<int>(threadIdx.x) % kPieces * kPieceColumns < p.row_columns ? tables
                                                                                              : tables - p.num_hash;
  // of the next table, what the thread copies first; a table's slice lies together, and behind it the next table's
  const Sum<In>* next_piece = unknown(begin.tables(p) + threadIdx.x * kPieceColumns);
  const auto copy_tables = [&](int32_t first) {
#pragma unroll 1
    for (int32_t table = first; table < min(first + at_once, tables); ++table) {
      const uint32_t to = shared_address + (table & slots) * table_bytes + threadIdx.x * kPieceBytes;
      const bool clear = table >= first_clear;
      // the next, for the compiler to know all addresses: until a copy has read its own, nothing can be written there
#pragma unroll 2
      for (int32_t piece = threadIdx.x, i = 0; piece < table_size * kPieces; piece += kSharingThreads, ++i)
        copy_ahead<16>(to + i * kSharingThreads * kPieceBytes, next_piece + i * kSharingThreads * kPieceColumns, clear);
      next_piece += table_size * kSharingColumns;
    }
  };
  // how many queries the lane has; past the last there is no bucket
  const int queries = static_cast<int>(unknown((rows - place + kSharingRows - 1) / kSharingRows));
  uint32_t next[kSharingQueries];
  const auto load_codes = [&] {
#pragma unroll
    for (int i = 0; i < kSharingQueries; ++i)
      if (i < queries) next[i] = static_cast<uint32_t>(codes[i * kSharingRows]);
  };
  memset(next, -1, sizeof(next));
  load_codes();
  const int warp_lane = threadIdx.x % kWarp;
  const uint32_t one = unknown(warp_lane / 8 == warp_lane % 4 ? 0x3F80u << (warp_lane / 4 % 2 * 16) : 0);
  const uint32_t identity[4] = {one, 0, 0, one};
  const uint32_t lane_address = unknown(shared_address + threadIdx.x % kSharingLanes * kPieceBytes);
  copy_tables(0);
#pragma unroll 1
  for (int32_t slice = 0, table = 0; slice < slices; ++slice) {
    // of the entries of the warp's lanes, columns 2t and 2t + 1 of those of lanes g, g + 8, g + 16 and g + 24
    float sums[kSharingQueries][2][4] = {};
#pragma unroll 1
    for (const int32_t end = table + p.num_hash; table < end; ++table) {
      if ((table & (at_once - 1)) == 0) {
        wait_for_copies();
        // the tables are there, and all have read those before
        __syncthreads();
        copy_tables(table + at_once);
      }
      // of all queries before the next codes are loaded: who waits for one waits for all
      uint32_t entry_address[kSharingQueries];
#pragma unroll
      for (int i = 0; i < kSharingQueries; ++i)
        entry_address[i] = unknown(lane_address + (table & slots) * table_bytes +
                                   min(next[i], static_cast<uint32_t>(table_size)) *
                                       static_cast<uint32_t>(kSharingColumns * sizeof(Sum<In>)));
      codes = table + 1 < end ? codes + p.N : begin.codes(p, place);
      load_codes();
#pragma unroll
      for (int first = 0; first < kSharingQueries; first += kAhead) {
        if (first * kSharingRows >= rows) break;
        uint32_t entries[kAhead][4];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load_matrices<true>(entries[i], entry_address[first + i]);
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
          for (int n = 0; n < 2; ++n)
            multiply_add<In>(sums[first + i][n], identity, {entries[i][2 * n], entries[i][2 * n + 1]});
      }
    }
    store_shared_sums(p, unknown(number + slice), sums);
    // its lanes may have left one by one, and matrices are read and multiplied by all of them
    __syncwarp();
  }
}

// Scales `count` rows of the output to length one, where they are aligned: those from `row` on, `step` apart, that are
// before `end`. Neighbouring lanes have a slice of a row each.
template <int count, class In, class Code>
__device__ __forceinline__ void scale_rows(const Problem<In, Code>& p, int32_t head, int32_t row, int32_t step,
                                           int32_t end, int lane) {
  const int32_t column = lane * kLaneColumns;
  In* const out = p.out.at(head / p.H, head % p.H, row) + column;
  const auto at = [&](int i) { return out + i * (step * p.out.row_stride); };
  const auto exists = [&](int i) { return row + i * step < end && column < p.Dv; };
  In rounded[count][kLaneColumns] = {};
#pragma unroll
  for (int i = 0; i < count; ++i)
    if (exists(i)) load(at(i), rounded[i]);
#pragma unroll
  for (int i = 0; i < count; ++i) {
    Accumulator<In> columns[kLaneColumns];
    widen(rounded[i], columns);
    scale_to_length_one(p, head, row + i * step, row + i * step < end && lane == 0, columns);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) rounded[i][c] = static_cast<In>(columns[c]);
    if (exists(i)) store(rounded[i], at(i));
  }
}

// Scales the rows of the output to length one, where they are aligned.
template <class In, class Code>
__global__ void __launch_bounds__(kRowThreads) scale_rows_kernel(Problem<In, Code> p) {
  start_after_launches_before();
  const RowPlace place(p.N, p.lane_bits, p.slices);
  scale_rows<1>(p, p.first_head + place.head, place.row, 0, p.N, place.lane);
}

// Adds up the queries' buckets where tables hold all hash functions and rows are aligned. A block has many queries of a
// head, and one or all slices of kSharingColumns columns; it scales rows of which it has all.
template <class In, class Code>
__global__ void __launch_bounds__(kSharingThreads, 1)
    read_shared_tables_kernel(Problem<In, Code> p, int at_once, int32_t slices) {
  start_after_launches_before();
  add_shared_tables(p, at_once, blockIdx.x * slices, slices);
  if (p.inverse_length == nullptr || slices < sharing_slices(p.row_columns)) return;
  // what others have written
  __syncthreads();
  const SharingPlace place(p, unknown(blockIdx.x * slices));
  const int32_t step = kSharingThreads >> p.lane_bits, end = place.first_row + place.rows;
#pragma unroll 1
  for (int32_t row = place.first_row; row < end; row += kRowsScaled * step)
    scale_rows<kRowsScaled>(p, p.first_head + place.head, row + (threadIdx.x >> p.lane_bits), step, end,
                            threadIdx.x & ((1 << p.lane_bits) - 1));
}

template <class In, class Code>
void sampled_forward(const Device& device, const Tensor& query_codes, const Tensor& key_codes, const Tensor& value,
                     int64_t hash_code_len, const Tensor& out, const Tensor& inverse_length,
                     const SortedCodes* key_order) {
  const int64_t all_heads = count_of(value.size(0) * value.size(1), "heads"), num_hash = query_codes.size(2);
  const int64_t table_size = int64_t{1} << hash_code_len;
  Problem<In, Code> p;
  p.value = rows_of<In>(value);
  p.out = mutable_rows_of<In>(out);
  p.inverse_length =
      inverse_length.numel() == 0 ? nullptr : static_cast<Accumulator<In>*>(inverse_length.mutable_data_ptr());
  p.value_bytes = row_bytes_of<In>(value);
  p.H = static_cast<int32_t>(value.size(1));
  p.N = count_of(out.size(2), "queries");
  p.M = count_of(value.size(2), "keys");
  p.Dv = count_of(value.size(3), "columns");
  // without columns there are still inverse lengths
  p.row_columns = static_cast<int32_t>(round_up(std::max(p.Dv, 1), kLaneColumns));
  p.num_hash = static_cast<int32_t>(num_hash);
  p.hash_code_len = static_cast<int32_t>(hash_code_len);
  p.crowd = static_cast<int32_t>(std::clamp<int64_t>(kCrowdOfMean * (p.M >> hash_code_len), kCrowd, INT32_MAX));
  p.lane_bits = lane_bits_for(p.row_columns);
  p.slices = static_cast<int>(divide_up(p.row_columns, kLaneColumns << p.lane_bits));
  STD_TORCH_CHECK(p.slices == 1 || p.inverse_length == nullptr, "the CUDA kernels scale rows of at most ",
                  kWarp * kLaneColumns, " columns, got value with ", p.Dv);

  const int64_t heads_sorted =
      key_order == nullptr ? heads_at_once(all_heads, num_hash, p.M, hash_code_len) : all_heads;
  // tables of all hash functions of some heads, or of some hash functions of one
  const int64_t slice_bytes = kSharingColumns * sizeof(Sum<In>);
  const int64_t table_bytes = table_size * sharing_slices(p.row_columns) * slice_bytes;
  const int64_t tables = kCaches * device.cached_bytes() / table_bytes;
  const int64_t heads_added = std::clamp<int64_t>(tables / num_hash, 1, heads_sorted);
  const int64_t hashes_added = std::clamp<int64_t>(tables, 1, num_hash);
  const Tensor memory =
      empty_tensor(value, {heads_added * hashes_added * table_bytes}, ScalarType::Byte);
  p.tables = static_cast<Sum<In>*>(memory.mutable_data_ptr());
  const int64_t num_sums = hashes_added < num_hash ? heads_added * p.N * p.row_columns : 0;
  const Tensor sums = empty_tensor(value, {num_sums}, length_dtype(value));
  p.sums = static_cast<Accumulator<In>*>(sums.mutable_data_ptr());
  const bool whole = aligned(p.value, p.Dv) && aligned(p.out, p.Dv);
  const auto build = whole ? build_tables_kernel<In, Code, true> : build_tables_kernel<In, Code, false>;
  // as many columns of all values as shared memory holds, and as many blocks as run at once
  const int64_t shared_limit = device.shared_bytes(), lane_bytes = int64_t{row_stride(p.M)} * kLaneColumns * sizeof(In);
  int build_lane_bits = p.lane_bits;
  while (build_lane_bits > 0 && lane_bytes << build_lane_bits > shared_limit) --build_lane_bits;
  const auto build_slices = static_cast<int32_t>(divide_up(p.row_columns, kLaneColumns << build_lane_bits));
  const bool build_from_shared =
      whole && hashes_added >= kHashesOfCopy && lane_bytes << build_lane_bits <= shared_limit &&
      p.M > 0 && p.M <= kMostTileRows;
  const auto read = whole ? read_tables_kernel<In, Code, true> : read_tables_kernel<In, Code, false>;
  // bfloat16 only: its tables are small, and rows that are rounded before they are scaled lose none of their exponents
  const int64_t two_tables = 2 * (table_size + 1) * kSharingColumns * static_cast<int64_t>(sizeof(Sum<In>));
  const int tables_at_once = kTablesAtOnce * two_tables <= shared_limit ? kTablesAtOnce : 1;
  const int64_t sharing_queries = p.N / sharing_blocks(p.N);
  const bool sharing = std::is_same_v<In, BFloat16> && whole && hashes_added == num_hash &&
                       sharing_queries >= kQueriesOfEntry * table_size && two_tables <= shared_limit;

  for (int64_t sorted = 0; sorted < all_heads; sorted += heads_sorted) {
    const int64_t sorted_end = std::min(sorted + heads_sorted, all_heads);
    const SortedCodes keys = key_order == nullptr
                                 ? sort_codes(device, key_codes, sorted, sorted_end - sorted, hash_code_len)
                                 : *key_order;
    // the first has to wait for the order as a whole
    bool early = false;
    const auto launch_next = [&](const auto& kernel, int64_t blocks, int threads, size_t shared_bytes,
                                 const auto&... arguments) {
      if (std::exchange(early, true))
        launch<true>(device, kernel, blocks, threads, shared_bytes, arguments...);
      else
        launch(device, kernel, blocks, threads, shared_bytes, arguments...);
    };
    for (int64_t first_head = sorted; first_head < sorted_end; first_head += heads_added) {
      const int64_t heads = std::min(heads_added, sorted_end - first_head), list = (first_head - sorted) * num_hash;
      p.first_head = static_cast<int32_t>(first_head);
      p.query_codes = static_cast<const Code*>(query_codes.const_data_ptr()) + first_head * num_hash * p.N;
      p.order = static_cast<const int32_t*>(keys.order.const_data_ptr()) + list * p.M;
      p.starts = static_cast<const int32_t*>(keys.starts.const_data_ptr()) + list * (table_size + 1);
      for (int64_t first = 0; first < num_hash; first += hashes_added) {
        p.first_hash = static_cast<int32_t>(first);
        p.hashes = static_cast<int32_t>(std::min(hashes_added, num_hash - first));
        p.head_bytes = static_cast<uint32_t>(p.hashes * table_bytes);
        p.slice_bytes = static_cast<uint32_t>(sharing ? p.hashes * table_size * slice_bytes : slice_bytes);
        p.entry_bytes = static_cast<uint32_t>(sharing ? slice_bytes : table_bytes / table_size);
        const auto blocks = [&](uint32_t rows) { return heads * p.slices * blocks_of_head(rows, p.lane_bits); };
        if (build_from_shared) {
          const int64_t at_once = device.num_multiprocessors() / (heads * build_slices);
          const auto parts =
              static_cast<int32_t>(std::clamp<int64_t>(at_once, 1, divide_up(p.hashes, kHashesOfCopy)));
          launch_next(build_from_shared_kernel<In, Code>, heads * build_slices * parts, kCopyThreads,
                      lane_bytes << build_lane_bits, p, build_lane_bits, build_slices, parts);
        } else {
          launch_next(build, blocks(p.hashes << hash_code_len), kRowThreads, 0, p);
        }
        if constexpr (std::is_same_v<In, BFloat16>)
          if (sharing) {
            const int64_t at_once = device.num_multiprocessors(), row_blocks = heads * sharing_blocks(p.N);
            const int32_t all_slices = sharing_slices(p.row_columns);
            // by blocks that have all columns, if these keep the multiprocessors as busy, but for a sixteenth
            const bool scales =
                p.inverse_length != nullptr && 16 * divide_up(row_blocks, at_once) * all_slices <=
                                                   17 * divide_up(row_blocks * all_slices, at_once);
            launch_next(read_shared_tables_kernel<In, Code>, scales ? row_blocks : row_blocks * all_slices,
                        kSharingThreads, tables_at_once * two_tables, p, tables_at_once, scales ? all_slices : 1);
            if (p.inverse_length != nullptr && !scales)
              launch_next(scale_rows_kernel<In, Code>, blocks(p.N), kRowThreads, 0, p);
            continue;
          }
        launch_next(read, blocks(p.N), kRowThreads, 0, p);
      }
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor> sum_by_buckets(const Device& device, const Tensor& value, const Tensor& query_codes,
                                          const Tensor& key_codes, int64_t hash_code_len, bool unit,
                                          const SortedCodes* key_order) {
  const Tensor rows = dense_rows(value);
  Tensor out = empty_heads_last(value, query_codes.size(3), value.size(3));
  Tensor inverse_length = empty_inverse_length(out, unit);
  if (out.numel() > 0 || inverse_length.numel() > 0) {
    dispatch_floating(rows, [&](auto element) {
      dispatch_codes(query_codes, [&](auto code) {
        sampled_forward<decltype(element), decltype(code)>(device, query_codes, key_codes, rows, hash_code_len, out,
                                                           inverse_length, key_order);
      });
    });
  }
  return {out, inverse_length};
}

namespace {

// query, key and the choice of backward matter to autograd only
std::tuple<Tensor, Tensor> sampled_attention_cuda(const Tensor&, const Tensor&, const Tensor& value,
                                                  const Tensor& query_codes, const Tensor& key_codes,
                                                  int64_t hash_code_len, bool, bool unit) {
  check_all_codes(query_codes, key_codes, value, hash_code_len);
  return sum_by_buckets(Device(value), value, query_codes, key_codes, hash_code_len, unit);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("sampled_attention", TORCH_BOX(&sampled_attention_cuda));
}

}  // namespace yoso
