// How many hash functions agree, of every pair of a query and a key of some heads, as bytes, in the order in which the
// lanes of a warpgroup's product have the pairs. Of some keys a block has a table for every function: which of them
// have a code, a bit each. What a query finds in the tables by its codes is added up for all of the keys at once, bit
// by bit. So it takes as long for any data. Where tables do not fit shared memory, pairs are compared by planes.
#pragma once

#include "code_planes.h"
#include "wgmma.h"

namespace yoso {
namespace {

// The counts of kStripKeys keys, a strip, and kTileQueries queries lie together, and those of the next queries next.
constexpr int kStripKeys = 16, kTileQueries = 64, kTileCounts = kStripKeys * kTileQueries;
// As bfloat16, numbers up to this one more than 128 are a constant and the byte.
constexpr int64_t kMostCount = 127;
// Threads of a block, keys of its tables, and hash functions whose tables a thread reads at a time.
constexpr int kCountThreads = 512, kTableKeys = 32, kHashesAtOnce = 8;

__host__ __device__ constexpr int32_t count_tiles(int32_t queries) {
  return (queries + kTileQueries - 1) / kTileQueries;
}

// Where the count of a strip's key and of a tile's query is. A lane that has keys g and g + 8, and queries 2t and 2t +
// 1 of every 8, finds those of 32 queries side by side, and of these those of 8 at a time, a word.
__host__ __device__ constexpr uint32_t count_place(uint32_t key, uint32_t query) {
  return query / 32 * 512 + (key % 8 * 4 + query % 8 / 2) * 16 + query % 32 / 8 * 4 + key / 8 * 2 + query % 2;
}

// Entries of a table: with one for rows without a code, which nobody has.
__host__ __device__ constexpr int32_t table_entries(int32_t tau) { return (1 << tau) + 1; }

// Of some heads, from first_head on, the strips from first_strip on, an even number.
struct CountProblem {
  // "mine" being the keys
  PairedCodes codes;
  // of all heads; where pairs are compared by planes, none
  const uint32_t* places;
  // [heads, strips, tiles, kTileCounts]; of queries past the last, and of rows without codes, anything
  uint8_t* counts;
  int32_t first_head, first_strip, strips, tiles;

  // The word of a strip's first key, and of two queries of a tile.
  __device__ __forceinline__ uint32_t* words(int32_t head, int32_t strip, int32_t tile, uint32_t query) const {
    uint8_t* const counts_of_tile = counts + ((int64_t{head} * strips + strip) * tiles + tile) * kTileCounts;
    return reinterpret_cast<uint32_t*>(counts_of_tile + count_place(0, query));
  }
};
// from one key's word to the next key's
constexpr int kNextKey = count_place(1, 0) / sizeof(uint32_t);

// The counts of 32 keys, up to kMostCount: a word has one bit of every key's.
struct BitCounts {
  static constexpr int kBits = 7;
  static_assert((1 << kBits) - 1 == kMostCount, "bits enough, and no more");
  // the eighth is for bytes
  uint32_t bits[8] = {};

  // sum + a + b, of bits: the sum's, and what is carried
  __device__ __forceinline__ static uint32_t carry_of(uint32_t& sum, uint32_t a, uint32_t b) {
    const uint32_t carry = sum & a | b & (sum ^ a);
    sum ^= a ^ b;
    return carry;
  }

  // Adds to every key's count how many of these words have its bit.
  __device__ __forceinline__ void add(const uint32_t (&ones)[8]) {
    uint32_t twos[4], fours[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) twos[i] = carry_of(bits[0], ones[2 * i], ones[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) fours[i] = carry_of(bits[1], twos[2 * i], twos[2 * i + 1]);
    uint32_t carry = carry_of(bits[2], fours[0], fours[1]);
#pragma unroll
    for (int bit = 3; bit < kBits; ++bit) {
      const uint32_t next = bits[bit] & carry;
      bits[bit] ^= carry;
      carry = next;
    }
  }

  // Takes bits to bytes: those of words[i] become the counts of keys i, i + 8, i + 16 and i + 24.
  __device__ __forceinline__ void take_to_bytes(uint32_t (&words)[8]) const {
    memcpy(words, bits, sizeof(words));
    const auto swap = [&](int distance, uint32_t mask) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((i & distance) != 0) continue;
        const uint32_t differ = (words[i] >> distance ^ words[i + distance]) & mask;
        words[i + distance] ^= differ;
        words[i] ^= differ << distance;
      }
    };
    swap(4, 0x0F0F0F0F);
    swap(2, 0x33333333);
    swap(1, 0x55555555);
  }
};

constexpr uint32_t kWordBytes = sizeof(uint32_t);
// A word of shared memory, at an address that takes no conversion.
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

// Places [heads, tiles, num_hash, kWarp]: where in a function's table a lane's two queries find their words, in bytes,
// 16 bits each.
__global__ void __launch_bounds__(kRowThreads) find_places_kernel(PairedCodes codes, int32_t tiles, uint32_t* places) {
#if YOSO_HAS_WGMMA
  const int32_t head = blockIdx.x / tiles, first = blockIdx.x % tiles * kTileQueries, queries = codes.others.length;
  const uint32_t nowhere = table_entries(codes.tau) - 1;
  for (int32_t i = threadIdx.x; i < codes.num_hash * kWarp; i += kRowThreads) {
    const int64_t list = int64_t{head} * codes.num_hash + i / kWarp;
    const auto place = [&](int32_t query) {
      return query < queries ? min(static_cast<uint32_t>(codes.others.at(list * queries + query)), nowhere) : nowhere;
    };
    const int32_t query = first + i % kWarp * 2;
    places[int64_t{blockIdx.x} * codes.num_hash * kWarp + i] = (place(query) | place(query + 1) << 16) * kWordBytes;
  }
#endif
}

// A warp counts the functions that agree for the block's keys and a tile of queries, two a lane.
__global__ void __launch_bounds__(kCountThreads, 2) count_by_tables_kernel(CountProblem p) {
#if YOSO_HAS_WGMMA
  static_assert(kTableKeys == 2 * kStripKeys && kTileQueries == 2 * kWarp && kHashesAtOnce == 8, "as the words are");
  const PairedCodes& codes = p.codes;
  const int32_t groups = p.strips / 2, head = blockIdx.x / groups, strip = blockIdx.x % groups * 2;
  const int32_t keys = codes.mine.length, entries = table_entries(codes.tau);
  const int64_t first_list = (p.first_head + int64_t{head}) * codes.num_hash;
  uint32_t* const tables = shared_memory<uint32_t>();

  for (int32_t i = threadIdx.x; i < codes.num_hash * entries; i += kCountThreads) tables[i] = 0;
  __syncthreads();
  const int32_t table_key = threadIdx.x % kTableKeys, key = (p.first_strip + strip) * kStripKeys + table_key;
  const auto tables_address = static_cast<uint32_t>(__cvta_generic_to_shared(tables));
#pragma unroll 4
  for (int32_t hash = threadIdx.x / kTableKeys; hash < codes.num_hash; hash += kCountThreads / kTableKeys) {
    const uint32_t code = key < keys ? codes.mine.at((first_list + hash) * keys + key) : ~0u;
    const uint32_t address = tables_address + (hash * entries + code) * kWordBytes;
    // each key's bit once
    if (code < entries - 1u)
      asm volatile("red.shared.add.u32 [%0], %1;" : : "r"(address), "r"(1u << table_key) : "memory");
  }
  __syncthreads();

#pragma unroll 1
  for (int32_t tile = threadIdx.x / kWarp; tile < p.tiles; tile += kCountThreads / kWarp) {
    const uint32_t tile_query = warp_lane() * 2;
    BitCounts counts[2];
    const uint32_t* from = p.places + (first_list * p.tiles + int64_t{tile} * codes.num_hash) * kWarp + warp_lane();
    const auto add = [&](int32_t hash, bool is_whole) {
      uint32_t both[kHashesAtOnce], found[2][kHashesAtOnce];
#pragma unroll
      for (int i = 0; i < kHashesAtOnce; ++i)
        both[i] = is_whole || hash + i < codes.num_hash ? from[i * kWarp] : 0;
      from += kHashesAtOnce * kWarp;
#pragma unroll
      for (int i = 0; i < kHashesAtOnce; ++i) {
        const bool exists = is_whole || hash + i < codes.num_hash;
        const uint32_t table = tables_address + (hash + i) * entries * kWordBytes;
        found[0][i] = exists ? load_shared(table + (both[i] & 0xFFFF)) : 0;
        found[1][i] = exists ? load_shared(table + (both[i] >> 16)) : 0;
      }
#pragma unroll
      for (int q = 0; q < 2; ++q) counts[q].add(found[q]);
    };
    int32_t hash = 0;
#pragma unroll 1
    for (; hash + kHashesAtOnce <= codes.num_hash; hash += kHashesAtOnce) add(hash, true);
    if (hash < codes.num_hash) add(hash, false);
    uint32_t words[2][8];
#pragma unroll
    for (int q = 0; q < 2; ++q) counts[q].take_to_bytes(words[q]);
    uint32_t* const to = p.words(head, strip, tile, tile_query);
    uint32_t* const next_strip = p.words(head, strip + 1, tile, tile_query);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // of both queries, those of keys i and i + 8, and of the next strip's
      to[i * kNextKey] = __byte_perm(words[0][i], words[1][i], 0x5140);
      next_strip[i * kNextKey] = __byte_perm(words[0][i], words[1][i], 0x7362);
    }
  }
#endif
}

// The same of a strip's keys by planes. A thread has two queries and, of each half of the keys, half.
__global__ void __launch_bounds__(kCountThreads, 2) count_by_planes_kernel(CountProblem p) {
#if YOSO_HAS_WGMMA
  constexpr int kHalf = kStripKeys / 2, kQuarter = kStripKeys / 4;
  const PairedCodes& codes = p.codes;
  const int32_t head = blockIdx.x / p.strips, strip = blockIdx.x % p.strips;
  const int64_t batch_head = p.first_head + head;
  uint32_t* const my_planes = shared_memory<uint32_t>();
  const uint32_t* const from = codes.plane_of(codes.mine, batch_head, (p.first_strip + strip) * kStripKeys);
  for (int32_t i = threadIdx.x; i < codes.planes() * kStripKeys; i += kCountThreads)
    my_planes[i] = from[int64_t{i / kStripKeys} * plane_length(codes.mine.length) + i % kStripKeys];
  __syncthreads();
  const int32_t length = plane_length(codes.others.length), pairs = p.tiles * kTileQueries / 2;
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < 2 * pairs; i += kCountThreads) {
    const int32_t first = i < pairs ? 0 : kQuarter, query = (i < pairs ? i : i - pairs) * 2;
    const uint32_t* my_plane = my_planes + first;
    const uint32_t* other_plane = codes.plane_of(codes.others, batch_head, query);
    // the key, and whether it is of the second half and the second query
    int equal[kQuarter][4];
    const auto compare_plane = [&](bool is_first, uint32_t(&differ)[kQuarter][4]) {
      uint32_t mine[2][kQuarter];
      load(my_plane, mine[0]);
      load(my_plane + kHalf, mine[1]);
      const uint2 others = *reinterpret_cast<const uint2*>(other_plane);
#pragma unroll
      for (int k = 0; k < kStripKeys; ++k) {
        const uint32_t bits = mine[k / 2 % 2][k / 4] ^ (k % 2 == 0 ? others.x : others.y);
        differ[k / 4][k % 4] = is_first ? bits : differ[k / 4][k % 4] | bits;
      }
      my_plane += kStripKeys;
      other_plane += length;
    };
    codes.count_equal(0, compare_plane, equal);
    uint32_t* const to = p.words(head, strip, query / kTileQueries, query % kTileQueries);
#pragma unroll
    for (int k = 0; k < kQuarter; ++k)
      to[(first + k) * kNextKey] = equal[k][0] | equal[k][1] << 8 | equal[k][2] << 16 | equal[k][3] << 24;
  }
#endif
}

// What a block's tables take.
inline int64_t table_bytes(int64_t num_hash, int64_t tau) {
  return num_hash * table_entries(static_cast<int32_t>(tau)) * static_cast<int64_t>(sizeof(uint32_t));
}

// Which planes counting takes: none where there is memory for tables, of whose places 16 bits are enough.
inline PlaneOrder planes_to_count(const Device& device, int64_t num_hash, int64_t tau) {
  const bool by_tables =
      table_bytes(num_hash, tau) <= static_cast<int64_t>(device.shared_bytes()) && table_bytes(1, tau) < 1 << 16;
  return by_tables ? PlaneOrder::kNone : PlaneOrder::kRows;
}

// Where queries find their words in tables, if there are any.
inline Tensor find_places(const Device& device, const Tensor& like, const PairedCodes& codes, int64_t heads) {
  const int32_t tiles = count_tiles(codes.others.length);
  if (codes.mine.planes != nullptr) heads = 0;
  Tensor places = empty_tensor(like, {heads, tiles, codes.num_hash, kWarp}, ScalarType::Int);
  launch(device, find_places_kernel, heads * tiles, kRowThreads, 0, codes, tiles,
         static_cast<uint32_t*>(places.mutable_data_ptr()));
  return places;
}

// Fills in the counts of `heads` heads.
inline void count_pairs(const Device& device, const CountProblem& p, int64_t heads) {
  if (p.codes.mine.planes == nullptr)
    launch(device, count_by_tables_kernel, heads * p.strips / 2, kCountThreads,
           table_bytes(p.codes.num_hash, p.codes.tau), p);
  else
    launch(device, count_by_planes_kernel, heads * p.strips, kCountThreads,
           p.codes.planes() * kStripKeys * sizeof(uint32_t), p);
}

}  // namespace
}  // namespace yoso
