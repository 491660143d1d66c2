// Rows by their buckets: for kernels that go over the queries and keys of one bucket after the other.
#pragma once

#include "simd.h"

namespace yoso {
namespace {

// The rows of one side of a head, sorted by their codes.
struct BucketOrder {
  const int64_t count, table_size;
  // for each hash function: order[ends[b - 1] .. ends[b]) are the rows in bucket b
  Buffer<int32_t> all_orders, all_ends;

  // `spare` rows may be read past the last
  BucketOrder(int64_t count, int64_t num_hash, int64_t table_size, int64_t spare = 0)
      : count(count), table_size(table_size), all_orders(num_hash * count + spare), all_ends(num_hash * table_size) {}

  const int32_t* order(int64_t hash) const { return all_orders.data() + hash * count; }
  const int32_t* ends(int64_t hash) const { return all_ends.data() + hash * table_size; }

  // counting sort; buckets outside the table are left out
  template <class Code, class BucketOf>
  YOSO_INLINE void sort(const Code* codes, int64_t hash, const BucketOf& bucket_of) {
    int32_t *order = all_orders.data() + hash * count, *ends = all_ends.data() + hash * table_size;
    std::memset(ends, 0, table_size * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bucket = bucket_of(codes[i]);
      if (bucket < table_size) ++ends[bucket];
    }
    int32_t begin = 0;
    for (int64_t bucket = 0; bucket < table_size; ++bucket) {
      const int32_t size = ends[bucket];
      ends[bucket] = begin;
      begin += size;
    }
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bucket = bucket_of(codes[i]);
      if (bucket < table_size) order[ends[bucket]++] = static_cast<int32_t>(i);
    }
  }
};

// Sorts the codes of both sides, [num_hash, rows].
template <class Code, class BucketOf>
void sort_codes(BucketOrder& queries, const Code* query_codes, BucketOrder& keys, const Code* key_codes,
                int64_t num_hash, const BucketOf& bucket_of) {
  parallel_for(0, 2 * num_hash, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t hash = task % num_hash;
      if (task < num_hash)
        queries.sort(query_codes + hash * queries.count, hash, bucket_of);
      else
        keys.sort(key_codes + hash * keys.count, hash, bucket_of);
    }
  });
}

YOSO_INLINE int32_t begin_of_bucket(const int32_t* ends, int64_t bucket) { return bucket == 0 ? 0 : ends[bucket - 1]; }

// The first bucket of part `part` of `parts`, with about the same number of rows in each.
inline int64_t first_bucket(const BucketOrder& queries, const BucketOrder& keys, int64_t hash, int64_t part,
                            int64_t parts) {
  if (part == 0) return 0;
  const int64_t buckets = queries.table_size;
  const int32_t *query_ends = queries.ends(hash), *key_ends = keys.ends(hash);
  const int64_t rows = int64_t{query_ends[buckets - 1]} + key_ends[buckets - 1];
  int64_t low = 0, high = buckets;
  while (low < high) {
    const int64_t bucket = (low + high) / 2;
    if ((int64_t{query_ends[bucket]} + key_ends[bucket]) * parts < rows * part)
      low = bucket + 1;
    else
      high = bucket;
  }
  return part == parts ? buckets : low;
}

// Some queries and keys that share a bucket: their numbers.
struct Bucket {
  const int32_t *queries, *keys;
  int32_t num_queries, num_keys;

  YOSO_INLINE int64_t pairs() const { return int64_t{num_queries} * num_keys; }
};

// Both sides' buckets of a hash function.
struct SharedBuckets {
  const int32_t *query_order, *query_ends, *key_order, *key_ends;

  SharedBuckets(const BucketOrder& queries, const BucketOrder& keys, int64_t hash)
      : query_order(queries.order(hash)),
        query_ends(queries.ends(hash)),
        key_order(keys.order(hash)),
        key_ends(keys.ends(hash)) {}

  YOSO_INLINE Bucket operator[](int64_t number) const {
    const int32_t q = begin_of_bucket(query_ends, number), k = begin_of_bucket(key_ends, number);
    return {query_order + q, key_order + k, query_ends[number] - q, key_ends[number] - k};
  }

  // Lists the buckets from `begin` to `end` that have both queries and keys; which have cannot be foretold, so there
  // is no branch. Returns how many there are.
  YOSO_INLINE int64_t list(int64_t begin, int64_t end, int32_t* numbers) const {
    int64_t count = 0;
    int32_t q = begin_of_bucket(query_ends, begin), k = begin_of_bucket(key_ends, begin);
    for (int64_t number = begin; number < end; ++number) {
      numbers[count] = static_cast<int32_t>(number);
      count += (query_ends[number] > q) & (key_ends[number] > k);
      q = query_ends[number];
      k = key_ends[number];
    }
    return count;
  }
};

// Calls add_heads(begin, end, parts) until all heads are done, in parallel unless threads share a head, as `parts` of
// its buckets: where too few heads would leave some idle, or where one for each would leave the cache.
template <class F>
void for_bucket_heads(int64_t heads, int64_t rows, int64_t head_bytes, const F& add_heads) {
  // heads with fewer rows are not worth it
  constexpr int64_t kSharedRows = 1024;
  const int64_t threads = torch::stable::get_num_threads(), rounds = (heads + threads - 1) / threads;
  const bool few = 4 * heads < 3 * rounds * threads;
  if (rows >= kSharedRows && (few || head_bytes * threads > kThirdLevelBytes))
    add_heads(0, heads, threads);
  else
    parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) { add_heads(begin, end, 1); });
}

// Rows of which some columns, the first ones from `data` on, are fetched.
template <class T, class Stride, class Columns>
struct FetchedRows {
  const T* data;
  Stride stride;
  Columns columns;

  YOSO_INLINE void fetch(int64_t row) const { prefetch(data + row * stride, columns); }
};

// Fetches the rows of the next bucket, one at every call: all at once, they would hold up the processor.
template <class Rows>
struct Ahead {
  Rows queries, keys;
  const int32_t *query_order = nullptr, *key_order = nullptr;
  int64_t queries_left = 0, keys_left = 0;

  // from now on of this bucket, `most` of a side at most
  YOSO_INLINE void point_to(const Bucket& bucket, int64_t most) {
    query_order = bucket.queries;
    key_order = bucket.keys;
    queries_left = std::min<int64_t>(bucket.num_queries, most);
    keys_left = std::min<int64_t>(bucket.num_keys, most);
  }

  YOSO_INLINE void operator()() {
    if (queries_left > 0) {
      --queries_left;
      queries.fetch(*query_order++);
    } else if (keys_left > 0) {
      --keys_left;
      keys.fetch(*key_order++);
    }
  }

  // those that are left
  YOSO_INLINE void finish() {
    while (queries_left + keys_left > 0) (*this)();
  }
};

}  // namespace
}  // namespace yoso
