// How many hash functions agree, of every pair of a query and a key of some heads. Where few do, pairs are found in the
// buckets, which takes a step for each function that agrees; where many do, all pairs are compared by planes, so that
// no data takes much longer than that. The numbers are bytes, in the order in which the lanes of a warpgroup's product
// have the pairs.
#pragma once

#include "code_planes.h"
#include "sort.h"
#include "wgmma.h"

namespace yoso {
namespace {

// The counts of kStripKeys keys, a strip, and kTileQueries queries lie together, and those of the next queries next.
constexpr int kStripKeys = 16, kTileQueries = 64, kTileCounts = kStripKeys * kTileQueries;
// As bfloat16, numbers up to this one more than 128 are a constant and the byte.
constexpr int64_t kMostCount = 127;

__host__ __device__ constexpr int32_t count_tiles(int32_t queries) {
  return (queries + kTileQueries - 1) / kTileQueries;
}

// Where the count of a strip's key and of a query is. A lane that has keys g and g + 8, and queries 2t and 2t + 1 of
// every 8, finds those of 32 queries side by side, and of these those of 8 at a time.
__host__ __device__ constexpr uint32_t count_place(uint32_t key, uint32_t query) {
  return query / 32 * 512 + (key % 8 * 4 + query % 8 / 2) * 16 + query % 32 / 8 * 4 + key / 8 * 2 + query % 2;
}

// A block has a strip and up to so many tiles; of its lanes so many share a bucket, and have so many rows of it at
// once.
constexpr int kCountThreads = 384, kCountTiles = 64, kBucketLanes = 8, kRowsAtOnce = 3, kBucketsAtOnce = 2;
// How many functions that agree take as long as a plane of a pair: by what both took on an H200 as first written, and
// the instructions of each since.
constexpr float kAgreeingOfPlane = 0.04f;

// Of some heads, from first_head on, the strips from first_strip on.
struct CountProblem {
  // "mine" being the keys
  PairedCodes codes;
  // the queries of these heads by code, see SortedCodes
  const int32_t *order, *starts;
  // [heads, strips, tiles, kTileCounts]; of queries past the last, and of rows without codes, anything
  uint8_t* counts;
  int32_t first_head, first_strip, strips, tiles;
};

__global__ void __launch_bounds__(kCountThreads, 3) count_pairs_kernel(CountProblem p) {
#if YOSO_HAS_WGMMA
  // of a head's rows in the order, all hash functions'
  struct Bucket {
    int32_t first, size;
  };
  constexpr int kWarps = kCountThreads / kWarp, kGroups = kCountThreads / kBucketLanes;
  constexpr int kHashStep = kCountThreads / kStripKeys;
  static_assert(kGroups % kStripKeys == 0, "a group has buckets of one key");
  const PairedCodes& codes = p.codes;
  const int32_t parts = (p.tiles - 1) / kCountTiles + 1, part = blockIdx.x % parts, line = blockIdx.x / parts;
  const int32_t head = line / p.strips, first_key = (p.first_strip + line % p.strips) * kStripKeys;
  const int32_t first_tile = part * kCountTiles, tiles = min(kCountTiles, p.tiles - first_tile);
  const int32_t first_query = first_tile * kTileQueries, table_size = 1 << codes.tau;
  const int32_t num_buckets = codes.num_hash * kStripKeys;
  const int64_t batch_head = p.first_head + head, first_list = int64_t{head} * codes.num_hash;
  const int32_t keys = codes.mine.length, queries = codes.others.length;
  auto* const met = shared_memory<float>();
  auto* const buckets = reinterpret_cast<Bucket*>(met + kWarps);
  auto* const my_planes = reinterpret_cast<uint32_t*>(buckets + num_buckets);
  auto* const counts = reinterpret_cast<uint8_t*>(my_planes + codes.planes() * kStripKeys);
  static_assert(kWarps * sizeof(float) % kPieceBytes == 0 && kStripKeys * sizeof(Bucket) % kPieceBytes == 0,
                "planes and counts are read and written in pieces");

#pragma unroll 4
  for (int32_t i = threadIdx.x; i < tiles * kTileCounts / kPieceBytes; i += kCountThreads)
    reinterpret_cast<uint4*>(counts)[i] = {};
  // of each hash function the keys' buckets, and how many queries the thread's have
  float thread_met = 0;
  const int32_t key = first_key + threadIdx.x % kStripKeys;
  const int32_t* const head_starts = p.starts + first_list * (table_size + 1);
#pragma unroll 1
  for (int32_t first = threadIdx.x / kStripKeys; first < codes.num_hash; first += kBucketsAtOnce * kHashStep) {
    uint32_t code[kBucketsAtOnce];
    int32_t start[kBucketsAtOnce], end[kBucketsAtOnce];
#pragma unroll
    for (int k = 0; k < kBucketsAtOnce; ++k) {
      const int32_t hash = first + k * kHashStep;
      const bool exists = key < keys && hash < codes.num_hash;
      code[k] = exists ? codes.mine.at((batch_head * codes.num_hash + hash) * keys + key) : ~0u;
    }
#pragma unroll
    for (int k = 0; k < kBucketsAtOnce; ++k) {
      const bool exists = code[k] < static_cast<uint32_t>(table_size);
      const uint32_t place = (first + k * kHashStep) * (table_size + 1) + code[k];
      start[k] = exists ? head_starts[place] : 0;
      end[k] = exists ? head_starts[place + 1] : 0;
    }
#pragma unroll
    for (int k = 0; k < kBucketsAtOnce; ++k) {
      const int32_t hash = first + k * kHashStep;
      if (hash >= codes.num_hash) break;
      buckets[hash * kStripKeys + threadIdx.x % kStripKeys] = {hash * queries + start[k], end[k] - start[k]};
      thread_met += static_cast<float>(end[k] - start[k]);
    }
  }
  thread_met = sum_of_lanes(thread_met, 5);
  if (threadIdx.x % kWarp == 0) met[threadIdx.x / kWarp] = thread_met;
  __syncthreads();
  float all_met = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) all_met += met[warp];

  // a bucket of few takes as long as one of as many as lanes share it
  if (all_met + kBucketLanes * num_buckets <= kAgreeingOfPlane * codes.planes() * kStripKeys * queries) {
    const int32_t group = threadIdx.x / kBucketLanes, lane = threadIdx.x % kBucketLanes;
    const uint32_t first_count =
        static_cast<uint32_t>(__cvta_generic_to_shared(counts)) + count_place(group % kStripKeys, 0);
    // no row is -1
    const auto count = [&](int32_t row) {
      const uint32_t query = row - first_query;
      if (query < tiles * kTileQueries) add_one<uint8_t>(first_count, count_place(0, query));
    };
    const int32_t* const head_order = p.order + first_list * queries + lane;
#pragma unroll 1
    for (int32_t i = group; i < num_buckets; i += kBucketsAtOnce * kGroups) {
      const int32_t* rows[kBucketsAtOnce];
      int32_t left[kBucketsAtOnce], row[kBucketsAtOnce][kRowsAtOnce];
#pragma unroll
      for (int k = 0; k < kBucketsAtOnce; ++k) {
        const Bucket bucket = i + k * kGroups < num_buckets ? buckets[i + k * kGroups] : Bucket{};
        rows[k] = head_order + bucket.first;
        left[k] = bucket.size - lane;
#pragma unroll
        for (int j = 0; j < kRowsAtOnce; ++j) row[k][j] = j * kBucketLanes < left[k] ? rows[k][j * kBucketLanes] : -1;
      }
#pragma unroll
      for (int k = 0; k < kBucketsAtOnce; ++k) {
#pragma unroll
        for (int j = 0; j < kRowsAtOnce; ++j) count(row[k][j]);
#pragma unroll 1
        for (int32_t j = kRowsAtOnce * kBucketLanes; j < left[k]; j += kBucketLanes) count(rows[k][j]);
      }
    }
  } else {
    const uint32_t* const from = codes.plane_of(codes.mine, batch_head, first_key);
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < codes.planes() * kStripKeys; i += kCountThreads)
      my_planes[i] = from[i / kStripKeys * plane_length(keys) + i % kStripKeys];
    __syncthreads();
    const int32_t length = plane_length(queries), pairs = tiles * kTileQueries / 2;
    // a thread has two queries and, of each half of the keys, half: whose counts are words
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < 2 * pairs; i += kCountThreads) {
      const int32_t first = i < pairs ? 0 : kStripKeys / 4, query = (i < pairs ? i : i - pairs) * 2;
      const uint32_t* my_plane = my_planes + first;
      const uint32_t* other_plane = codes.plane_of(codes.others, batch_head, first_query + query);
      // the key, and whether it is of the second half and the second query
      int equal[kStripKeys / 4][4];
      codes.count_equal(
          0,
          [&](bool is_first, uint32_t(&differ)[kStripKeys / 4][4]) {
            uint32_t mine[2][kStripKeys / 4];
            load(my_plane, mine[0]);
            load(my_plane + kStripKeys / 2, mine[1]);
            const uint2 others = *reinterpret_cast<const uint2*>(other_plane);
#pragma unroll
            for (int k = 0; k < kStripKeys; ++k) {
              const uint32_t bits = mine[k / 2 % 2][k / 4] ^ (k % 2 == 0 ? others.x : others.y);
              differ[k / 4][k % 4] = is_first ? bits : differ[k / 4][k % 4] | bits;
            }
            my_plane += kStripKeys;
            other_plane += length;
          },
          equal);
#pragma unroll
      for (int k = 0; k < kStripKeys / 4; ++k)
        *reinterpret_cast<uint32_t*>(counts + count_place(first, query) + count_place(k, 0)) =
            equal[k][0] | equal[k][1] << 8 | equal[k][2] << 16 | equal[k][3] << 24;
    }
  }
  __syncthreads();
  // found again, as registers are short
  const uint32_t block = unknown(blockIdx.x), first = block / parts * p.tiles + block % parts * kCountTiles;
  auto* const to = reinterpret_cast<uint4*>(p.counts + int64_t{first} * kTileCounts);
#pragma unroll 4
  for (int32_t i = threadIdx.x; i < tiles * kTileCounts / kPieceBytes; i += kCountThreads)
    to[i] = reinterpret_cast<const uint4*>(counts)[i];
#endif
}

// Fills in the counts of `heads` heads.
inline void count_pairs(const Device& device, const CountProblem& p, int64_t heads) {
  const int64_t bytes = kCountThreads / kWarp * int64_t{sizeof(float)} +
                        (2 * p.codes.num_hash + p.codes.planes()) * int64_t{kStripKeys} * int64_t{sizeof(int32_t)} +
                        std::min(p.tiles, kCountTiles) * int64_t{kTileCounts};
  launch(device, count_pairs_kernel, heads * p.strips * divide_up(p.tiles, kCountTiles), kCountThreads, bytes, p);
}

}  // namespace
}  // namespace yoso
