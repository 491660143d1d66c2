// What exp(x) has beyond 1 + x, for x = scale query . key, estimated from the pairs that share a bucket. A warp has a
// row and adds up all that it meets, in the buckets of all hash functions: queries for the output and for their
// gradient, keys for theirs. So a sum is in registers until it is done, and in one order. What a row meets is listed
// with a lane for each hash function, and then taken some rows at a time, however few a bucket has. Rows are taken in
// the order of the first hash function's buckets: those that meet the same rows find them in the same cache.
#include "angles.h"
#include "exponential.h"
#include "rows.h"
#include "sort.h"

namespace yoso {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
// Steps after which the sums so far are put aside: what is rounded off a sum is in proportion to it, so that a few long
// sums lose less than one of all.
constexpr int32_t kStepsOfSum = 16;
// rows by hash functions that a launch has at most, unless one head has more
constexpr int64_t kRowsAtOnce = int64_t{1} << 26;

// The inverse length of a row, and the gradient of a query's total or the weight of a key.
template <class T>
struct alignas(2 * sizeof(T)) Numbers {
  T inverse_length, other;
};

// The queries with the output's gradient, or the keys with the values.
template <class In, class Other>
struct Side {
  Rows<const In> rows;
  Rows<const Other> others;
  // from one row to the next
  uint32_t row_bytes, other_bytes;
  // [B * H, count]
  const Numbers<Accumulator<In>>* numbers;
  // [B * H, m, count]
  const void* codes;
  // [heads, m, count] and [heads, m, table_size + 1], see SortedCodes
  const int32_t *order, *starts;
  int32_t count;
};

// A launch has heads from `first` on, of the B * H.
struct Sizes {
  int32_t first, H, num_hash, hash_code_len, D, Dv, table_size;
  bool wide_codes;
  double scale;
  // [B * H]
  const int32_t* shift;
};

// What is added up: of queries the output, or their gradient; or the gradients of keys, of values and of keys' weights.
enum class Task { kOutput, kQueries, kKeys };

// Blocks that a multiprocessor has at a time: with more, registers would be spilled.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocksOfKeys = 3;
#else
constexpr int kBlocksOfKeys = 4;
#endif
template <class In, bool aligned, Task task>
constexpr int kBlocks = sizeof(In) == 8                ? 1
                        : sizeof(In) != 2 || !aligned  ? 3
                        : task == Task::kKeys          ? kBlocksOfKeys
                                                       : 4;

// rows that a group of lanes reads at the same time: as many as registers hold
template <class In, bool aligned, Task task>
constexpr int kStepsOf = sizeof(In) == 2 && aligned && task == Task::kOutput ? 8 : 4;

template <class In, Task task>
struct TaskOf {
  using T = Accumulator<In>;
  // the gradient of the output is as wide as it
  using Queries = Side<In, T>;
  using Keys = Side<In, In>;
  using Mine = std::conditional_t<task == Task::kKeys, Keys, Queries>;
  using Met = std::conditional_t<task == Task::kKeys, Queries, Keys>;
  using MyOther = std::conditional_t<task == Task::kKeys, In, T>;
  using MetOther = std::conditional_t<task == Task::kKeys, T, In>;
  using Sum = std::conditional_t<task == Task::kOutput, T, In>;
};

// The sums that a lane has.
template <Task task>
constexpr int kLaneSums = task == Task::kOutput    ? kLaneColumns + 1
                          : task == Task::kQueries ? kLaneColumns
                                                   : 2 * kLaneColumns + 1;

// Where the sums of rows, of values or gradients, and of numbers go, as far as the task has them.
template <class In, Task task>
struct Sums {
  Rows<typename TaskOf<In, task>::Sum> rows, others;
  Accumulator<In>* numbers;
};

struct Span {
  int32_t first, count;
};

// What a row meets in its bucket of one hash function, as places of the order: `count` of them, from the first on every
// parts'th key, or every parts'th tile of queries.
struct Meeting {
  int32_t first, count, parts;

  template <bool of_keys>
  __device__ __forceinline__ static int32_t place(int32_t first, int32_t parts, int32_t number) {
    if constexpr (of_keys)
      return first + number / kBucketRows * kBucketRows * parts + number % kBucketRows;
    else
      return first + number * parts;
  }
};

// How many of a bucket's rows come before the row, which is one of them.
__device__ __forceinline__ int32_t rank_of(const int32_t* order, int32_t count, int32_t row) {
  int32_t begin = 0, end = count;
  while (end - begin > 1) {
    const int32_t middle = begin + (end - begin) / 2;
    if (order[middle] <= row)
      begin = middle;
    else
      end = middle;
  }
  return begin;
}

template <bool of_keys, class Mine, class Met>
__device__ __forceinline__ Meeting meeting_of(const Sizes& sizes, const Mine& mine, const Met& met, int32_t head,
                                              int32_t hash, int32_t row) {
  const int64_t list = int64_t{head} * sizes.num_hash + hash;
  const int64_t at = (list + int64_t{sizes.first} * sizes.num_hash) * mine.count + row;
  const int32_t code =
      sizes.wide_codes ? static_cast<const int32_t*>(mine.codes)[at] : static_cast<const int16_t*>(mine.codes)[at];
  const uint32_t bucket = bucket_of<true>(code, sizes.table_size);
  if (bucket >= static_cast<uint32_t>(sizes.table_size)) return {0, 0, 1};
  const auto span_of = [&](const int32_t* starts) {
    starts += list * (sizes.table_size + 1) + bucket;
    return Span{starts[0], starts[1] - starts[0]};
  };
  const Span others = span_of(met.starts);
  if (!of_keys && others.count <= kBucketRows) return {others.first, others.count, 1};
  const Span rows = span_of(mine.starts);
  const int32_t parts = ((of_keys ? rows.count : others.count) - 1) / kBucketRows + 1;
  if (parts == 1) return {others.first, others.count, 1};
  // which part the first queries meet
  const auto chance = static_cast<int32_t>((bucket + 1) * (hash + 1) * 2654435761u >> 16);
  const int32_t rank = rank_of(mine.order + list * mine.count + rows.first, rows.count, row);
  if constexpr (of_keys) {
    const int32_t tile = (rank % parts + parts - chance % parts) % parts;
    const int32_t tiles = (others.count + kBucketRows - 1) / kBucketRows;
    if (tile >= tiles) return {0, 0, 1};
    // full ones before the last
    const int32_t full = (tiles - 1 - tile) / parts, last = (tile + full * parts) * kBucketRows;
    return {others.first + tile * kBucketRows, full * kBucketRows + min(kBucketRows, others.count - last), parts};
  } else {
    const int32_t part = (rank / kBucketRows + chance) % parts;
    return {others.first + part, (others.count - part + parts - 1) / parts, parts};
  }
}

// The sums over a group of lanes of kSteps numbers; that of step i in the lanes that are i modulo kSteps.
template <int kLanes, int kSteps, class T>
__device__ __forceinline__ T sum_of_group(const T (&numbers)[kSteps]) {
  const int lane = threadIdx.x % kWarp;
  T sums[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) sums[i] = numbers[i];
#pragma unroll
  for (int half = kSteps / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const bool upper = (lane & half) != 0;
      const T given = upper ? sums[i] : sums[i + half];
      sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(kAllLanes, given, half);
    }
#pragma unroll
  for (int other = kSteps; other < kLanes; other *= 2) sums[0] += __shfl_xor_sync(kAllLanes, sums[0], other);
  return sums[0];
}

// (exp(x) - 1 - x) / 2^shift, with unit for 2^-shift, and its slope; both follow exp up to the largest logarithm.
template <class T>
struct Remainder {
  T value, slope;

  __device__ __forceinline__ Remainder(T x, const Exponential<T>& exponential, T unit) {
    if (fabs(x) < 1) {
      // Taylor's, up to the power whose term is below a rounding
      constexpr int kPower = sizeof(T) == 8 ? 18 : 11;
      double coefficient = sizeof(T) == 8 ? 1 / 6402373705728000.0 : 1 / 39916800.0;
      T sum = 0;
#pragma unroll
      for (int power = kPower; power >= 2; --power) {
        sum = sum * x + static_cast<T>(coefficient);
        coefficient *= power;
      }
      value = unit * (sum * x * x);
      slope = value + unit * x;
    } else {
      slope = exponential(x) - unit;
      value = slope - unit * x;
      if (!exponential.follows(x)) slope = -unit;
    }
  }
};

// x^exponent, of 1 to 16
template <class T>
__device__ __forceinline__ T power(T x, int exponent) {
  T product = (exponent & 1) != 0 ? x : 1;
#pragma unroll
  for (int bit = 2; bit <= 16; bit *= 2) {
    x *= x;
    if ((exponent & bit) != 0) product *= x;
  }
  return product;
}

// The probability of sharing a bucket.
template <class T>
__device__ __forceinline__ T probability_of(T cosine, int hash_code_len) {
  const T versine = 1 - fabs(cosine);
  // that of agreeing in a bit, or of not agreeing: which one, the sign tells, and the sum is the same
  const T agree = angle_complement<T>(T{1}, versine < 0 ? 0 : versine);
  return power(agree, hash_code_len) + power(1 - agree, hash_code_len);
}

template <class T>
__device__ __forceinline__ T product_of(const T (&x)[kLaneColumns], const T (&y)[kLaneColumns]) {
  T product = 0;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) product += x[c] * y[c];
  return product;
}

// Adds the groups' sums up, and has the first write them.
template <int kLanes, bool aligned, class T, class Sum>
__device__ __forceinline__ void write_sums(T (&sums)[kLaneColumns], int columns, Sum* to) {
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c)
#pragma unroll
    for (int other = kLanes; other < kWarp; other *= 2) sums[c] += __shfl_xor_sync(kAllLanes, sums[c], other);
  Sum rounded[kLaneColumns];
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) rounded[c] = static_cast<Sum>(sums[c]);
  if (threadIdx.x % kWarp < kLanes) store_columns<aligned>(rounded, columns, to);
}

// Adds up what every row meets. kLanes lanes, a group, have a row that is met.
template <class In, int kLanes, bool aligned, Task task>
__global__ void __launch_bounds__(kThreads, kBlocks<In, aligned, task>)
    add_met_rows_kernel(Sizes sizes, typename TaskOf<In, task>::Mine mine, typename TaskOf<In, task>::Met met,
                        Sums<In, task> out) {
  using T = Accumulator<In>;
  constexpr bool of_keys = task == Task::kKeys, adds_rows = task != Task::kOutput, adds_others = task != Task::kQueries;
  constexpr int kGroups = kWarp / kLanes, kSteps = kStepsOf<In, aligned, task>;
  const int32_t head_blocks = (mine.count - 1) / kWarps + 1, head = blockIdx.x / head_blocks;
  const int32_t place = (blockIdx.x - head * head_blocks) * kWarps + threadIdx.x / kWarp;
  if (place >= mine.count) return;
  const int32_t row = mine.order[int64_t{head} * sizes.num_hash * mine.count + place];
  const int lane = threadIdx.x % kWarp, group = lane / kLanes, column = lane % kLanes * kLaneColumns;
  const int columns = columns_of_lane(sizes.D, column), other_columns = columns_of_lane(sizes.Dv, column);
  const int32_t batch_head = sizes.first + head, batch = batch_head / sizes.H, head_of_batch = batch_head % sizes.H;
  // lanes past the columns of aligned rows read the first ones, and write none
  const In* met_rows = met.rows.at(batch, head_of_batch, 0) + (columns > 0 ? column : 0);
  const auto* met_others = met.others.at(batch, head_of_batch, 0) + (other_columns > 0 ? column : 0);
  const Numbers<T>* all_met_numbers = met.numbers + int64_t{batch_head} * met.count;
  const T scale = static_cast<T>(sizes.scale);
  const Exponential<T> exponential(sizes.shift[batch_head]);
  const T unit = unit_of<T>(sizes.shift[batch_head]);

  T my_row[kLaneColumns], my_other[kLaneColumns] = {};
  {
    In part[kLaneColumns];
    load_columns<aligned>(mine.rows.at(batch, head_of_batch, row) + column, columns, part);
    widen(part, my_row);
    if constexpr (adds_rows) {
      typename TaskOf<In, task>::MyOther other[kLaneColumns];
      load_columns<aligned>(mine.others.at(batch, head_of_batch, row) + column, other_columns, other);
      widen(other, my_other);
    }
  }
  const int64_t my_place = int64_t{batch_head} * mine.count + row;
  const Numbers<T> my_numbers = mine.numbers[my_place];

  T row_sums[kLaneColumns] = {}, other_sums[kLaneColumns] = {}, number_sum = 0;
  // in shared memory, since registers are short; few rows meet so many others
  bool has_put_aside = false;
  const auto for_sums = [&](const auto& f) {
    T* aside = shared_memory<T>() + threadIdx.x;
    const auto next = [&](T& sum) {
      f(sum, *aside);
      aside += kThreads;
    };
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if constexpr (adds_rows) next(row_sums[c]);
      if constexpr (adds_others) next(other_sums[c]);
    }
    if constexpr (adds_others) next(number_sum);
  };
  for (int32_t first_hash = 0; first_hash < sizes.num_hash; first_hash += kWarp) {
    Meeting meeting = {0, 0, 1};
    if (first_hash + lane < sizes.num_hash)
      meeting = meeting_of<of_keys>(sizes, mine, met, head, first_hash + lane, row);
    int32_t end = meeting.count;
#pragma unroll
    for (int delta = 1; delta < kWarp; delta *= 2) {
      const int32_t lower = __shfl_up_sync(kAllLanes, end, delta);
      if (lane >= delta) end += lower;
    }
    const int32_t total = __shfl_sync(kAllLanes, end, kWarp - 1);
    const int32_t* order = met.order + (int64_t{head} * sizes.num_hash + first_hash) * met.count;

    // what a lane knows of a row that its group takes: in step i lane i does, as do those that are i modulo kSteps
    struct Taken {
      int32_t row, parts;
      Numbers<T> numbers;
    };
    const auto slot_of = [&](int32_t base) { return base + lane % kSteps * kGroups + group; };
    const auto take = [&](int32_t base) {
      // past the last row that is met there is the last again, with weight zero
      const int32_t slot = min(slot_of(base), total - 1);
      int hash = 0;
#pragma unroll
      for (int half = kWarp / 2; half > 0; half /= 2)
        if (__shfl_sync(kAllLanes, end, hash + half - 1) <= slot) hash += half;
      const int32_t begin = __shfl_sync(kAllLanes, end - meeting.count, hash);
      const int32_t first = __shfl_sync(kAllLanes, meeting.first, hash);
      const int32_t parts = __shfl_sync(kAllLanes, meeting.parts, hash);
      const int32_t met_row = order[int64_t{hash} * met.count + Meeting::place<of_keys>(first, parts, slot - begin)];
      return Taken{met_row, parts, all_met_numbers[met_row]};
    };
    Taken next = {};
    if (total > 0) next = take(0);
    for (int32_t base = 0; base < total; base += kSteps * kGroups) {
      if (base > 0 && base % (kStepsOfSum * kSteps * kGroups) == 0) {
        for_sums([&](T& sum, T& aside) {
          aside = has_put_aside ? aside + sum : sum;
          sum = 0;
        });
        has_put_aside = true;
      }
      const Taken taken = next;
      In rows[kSteps][kLaneColumns];
      typename TaskOf<In, task>::MetOther others[kSteps][kLaneColumns];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int32_t met_row = __shfl_sync(kAllLanes, taken.row, i, kLanes);
        load_columns<aligned>(row_at(met_rows, met_row, met.row_bytes), aligned ? kLaneColumns : columns, rows[i]);
        load_columns<aligned>(row_at(met_others, met_row, met.other_bytes), aligned ? kLaneColumns : other_columns,
                              others[i]);
      }
      // what is read of the rows after them is on its way while these are added
      next = take(base + kSteps * kGroups);
      T products[kSteps], x[kLaneColumns];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        widen(rows[i], x);
        products[i] = product_of(my_row, x);
      }
      const T product = sum_of_group<kLanes>(products);
      const T probability =
          probability_of(product * my_numbers.inverse_length * taken.numbers.inverse_length, sizes.hash_code_len);
      const T share = static_cast<T>(taken.parts) / (sizes.num_hash * probability);
      const T key_weight = of_keys ? my_numbers.other : taken.numbers.other;
      const Remainder<T> remainder(scale * product, exponential, unit);
      const T weight = share * remainder.value;
      // factors of the rows that are met, and of 1
      T by_row = 0, by_other = weight * key_weight, by_one = by_other;
      if constexpr (adds_rows) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          widen(others[i], x);
          products[i] = product_of(my_other, x);
        }
        // the gradient of the pair's weight
        const T gradient = sum_of_group<kLanes>(products) + (of_keys ? taken.numbers.other : my_numbers.other);
        by_row = scale * share * remainder.slope * gradient * key_weight;
        by_one = weight * gradient;
      }
      if (slot_of(base) >= total) by_row = by_other = by_one = 0;
      if (lane % kLanes < kSteps) number_sum += by_one;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (adds_rows) {
          const T factor = __shfl_sync(kAllLanes, by_row, i, kLanes);
          widen(rows[i], x);
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) row_sums[c] += factor * x[c];
        }
        if constexpr (adds_others) {
          const T factor = __shfl_sync(kAllLanes, by_other, i, kLanes);
          widen(others[i], x);
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) other_sums[c] += factor * x[c];
        }
      }
    }
  }

  if (has_put_aside) for_sums([](T& sum, const T& aside) { sum += aside; });
  if constexpr (adds_rows)
    write_sums<kLanes, aligned>(row_sums, columns, out.rows.at(batch, head_of_batch, row) + column);
  if constexpr (adds_others) {
    write_sums<kLanes, aligned>(other_sums, other_columns, out.others.at(batch, head_of_batch, row) + column);
    number_sum = sum_of_lanes(number_sum, 5);
    if (lane == 0) out.numbers[my_place] = number_sum;
  }
}

template <class In, bool aligned>
__global__ void __launch_bounds__(kRowThreads)
    numbers_kernel(Rows<const In> rows, const Accumulator<In>* others, int32_t H, int32_t count, int32_t columns,
                   int lane_bits, Numbers<Accumulator<In>>* numbers) {
  using T = Accumulator<In>;
  const RowPlace place(count, lane_bits, 1);
  // lanes past the last row stay: the sum of squares is the warp's
  const bool exists = place.row < count;
  const int32_t row = exists ? place.row : 0;
  In part[kLaneColumns];
  T x[kLaneColumns], square = 0;
  load_columns<aligned>(rows.at(place.head / H, place.head % H, row) + place.column,
                        columns_of_lane(columns, place.column), part);
  widen(part, x);
  square = sum_of_lanes(product_of(x, x), lane_bits);
  if (!exists || place.lane != 0) return;
  const int64_t i = int64_t{place.head} * count + row;
  numbers[i] = {square > 0 ? 1 / sqrt(square) : 0, others == nullptr ? 0 : others[i]};
}

// The operator's inputs, and launches with them. Without a gradient, for the output only.
template <class In>
class Remainders {
 public:
  using T = Accumulator<In>;

  Remainders(const Device& device, const Tensor* grad, const Tensor* grad_total, const Tensor& query,
             const Tensor& key, const Tensor& value, const Tensor& key_weight, const Tensor& shift,
             const Tensor& query_codes, const Tensor& key_codes, int64_t hash_code_len, double scale)
      : device_(device), query_codes_(query_codes), key_codes_(key_codes),
        heads_(count_of(query.size(0) * query.size(1), "heads")), columns_(std::max(query.size(3), value.size(3))),
        query_numbers_(numbers_of(query, grad_total)), key_numbers_(numbers_of(key, &key_weight)) {
    STD_TORCH_CHECK(columns_ <= kWarp * kLaneColumns, "the CUDA kernels take rows of at most ", kWarp * kLaneColumns,
                    " columns, got ", columns_);
    sizes_ = {.H = static_cast<int32_t>(query.size(1)),
              .num_hash = count_of(query_codes.size(2), "hash functions"),
              .hash_code_len = static_cast<int32_t>(hash_code_len),
              .D = static_cast<int32_t>(query.size(3)),
              .Dv = static_cast<int32_t>(value.size(3)),
              .table_size = int32_t{1} << (hash_code_len - 1),
              .wide_codes = query_codes.scalar_type() == ScalarType::Int,
              .scale = scale,
              .shift = static_cast<const int32_t*>(shift.const_data_ptr())};
    queries_ = side_of<T>(query, grad, query_numbers_, query_codes);
    keys_ = side_of<In>(key, &value, key_numbers_, key_codes);
    aligned_ = sizes_.D > 0 && sizes_.Dv > 0 && aligned(queries_.rows, sizes_.D) && aligned(keys_.rows, sizes_.D) &&
               aligned(queries_.others, sizes_.Dv) && aligned(keys_.others, sizes_.Dv);
  }

  void forward(const Tensor& out, const Tensor& total) {
    for_heads([&](int64_t heads) {
      add<Task::kOutput>(heads, queries_, keys_, {{}, mutable_rows_of<T>(out), data_of(total)});
    });
  }

  void backward(const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value,
                const Tensor& grad_weight) {
    for_heads([&](int64_t heads) {
      add<Task::kQueries>(heads, queries_, keys_, {mutable_rows_of<In>(grad_query), {}, nullptr});
      add<Task::kKeys>(heads, keys_, queries_,
                       {mutable_rows_of<In>(grad_key), mutable_rows_of<In>(grad_value), data_of(grad_weight)});
    });
  }

 private:
  static T* data_of(const Tensor& x) { return static_cast<T*>(x.mutable_data_ptr()); }

  template <class Other>
  static Side<In, Other> side_of(const Tensor& rows, const Tensor* others, const Tensor& numbers,
                                 const Tensor& codes) {
    // what a warp meets in as many hash functions as it has lanes is counted in 32 bits
    STD_TORCH_CHECK(rows.size(2) < INT32_MAX / kWarp, "too many rows: ", rows.size(2));
    return {.rows = rows_of<In>(rows),
            .others = others == nullptr ? Rows<const Other>{} : rows_of<Other>(*others),
            .row_bytes = row_bytes_of<In>(rows),
            .other_bytes = others == nullptr ? 0 : row_bytes_of<Other>(*others),
            .numbers = static_cast<const Numbers<T>*>(numbers.const_data_ptr()),
            .codes = codes.const_data_ptr(),
            .count = static_cast<int32_t>(rows.size(2))};
  }

  Tensor numbers_of(const Tensor& rows, const Tensor* others) const {
    const int64_t count = rows.size(2), columns = rows.size(3);
    const Tensor numbers = empty_tensor(rows, {heads_, count, 2}, length_dtype(rows));
    const Rows<const In> from = rows_of<In>(rows);
    const int lane_bits = lane_bits_for(columns);
    launch(device_, aligned(from, columns) ? numbers_kernel<In, true> : numbers_kernel<In, false>,
           heads_ * blocks_of_head(count_of(count, "rows"), lane_bits), kRowThreads, 0, from,
           others == nullptr ? nullptr : static_cast<const T*>(others->const_data_ptr()), rows.size(1), count, columns,
           lane_bits, static_cast<Numbers<T>*>(numbers.mutable_data_ptr()));
    return numbers;
  }

  // Sorts the codes of as many heads as there is memory for, and calls add with their number, until all are done.
  template <class Add>
  void for_heads(const Add& add) {
    const int64_t rows = (int64_t{queries_.count} + keys_.count) / 2, bits = sizes_.hash_code_len;
    // GPUs that draw a screen end what takes seconds
    const int64_t most = kRowsAtOnce / (sizes_.num_hash * std::max<int64_t>(rows, 1));
    const int64_t at_once =
        std::max<int64_t>(1, std::min(most, heads_at_once(heads_, sizes_.num_hash, rows, bits - 1)));
    for (int64_t first = 0; first < heads_; first += at_once) {
      const int64_t heads = std::min(at_once, heads_ - first);
      const SortedCodes query_order = sort_codes<true>(device_, query_codes_, first, heads, bits);
      const SortedCodes key_order = sort_codes<true>(device_, key_codes_, first, heads, bits);
      sizes_.first = static_cast<int32_t>(first);
      const auto set_order = [](auto& side, const SortedCodes& order) {
        side.order = static_cast<const int32_t*>(order.order.const_data_ptr());
        side.starts = static_cast<const int32_t*>(order.starts.const_data_ptr());
      };
      set_order(queries_, query_order);
      set_order(keys_, key_order);
      add(heads);
    }
  }

  template <Task task>
  void add(int64_t heads, const typename TaskOf<In, task>::Mine& mine, const typename TaskOf<In, task>::Met& met,
           const Sums<In, task>& sums) const {
    const auto start = [&](auto kernel) {
      launch(device_, kernel, heads * divide_up(mine.count, kWarps), kThreads, kLaneSums<task> * kThreads * sizeof(T),
             sizes_, mine, met, sums);
    };
    // float64 is there to be right
    if constexpr (sizeof(In) < 8) {
      if (aligned_ && columns_ <= 8 * kLaneColumns) return start(add_met_rows_kernel<In, 8, true, task>);
      if (aligned_ && columns_ <= 16 * kLaneColumns) return start(add_met_rows_kernel<In, 16, true, task>);
      if (aligned_) return start(add_met_rows_kernel<In, 32, true, task>);
    }
    start(add_met_rows_kernel<In, 32, false, task>);
  }

  const Device& device_;
  const Tensor &query_codes_, &key_codes_;
  const int64_t heads_, columns_;
  const Tensor query_numbers_, key_numbers_;
  Sizes sizes_;
  Side<In, T> queries_;
  Side<In, In> keys_;
  bool aligned_;
};

std::tuple<Tensor, Tensor> sampled_remainder_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const Tensor& key_weight, const Tensor& shift,
                                                  const Tensor& query_codes, const Tensor& key_codes,
                                                  int64_t hash_code_len, double scale) {
  check_sampled_remainder(query, key, value, key_weight, shift, query_codes, key_codes, hash_code_len, scale);
  const Device device(value);
  Tensor out = empty_heads_last(key_weight, query.size(2), value.size(3));
  Tensor total = empty_row_numbers(query);
  const Tensor rows[] = {dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_wide(query, [&](auto element) {
    Remainders<decltype(element)>(device, nullptr, nullptr, rows[0], rows[1], rows[2], key_weight, shift, query_codes,
                                  key_codes, hash_code_len, scale)
        .forward(out, total);
  });
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sampled_remainder_backward_cuda(
    const Tensor& grad, const Tensor& grad_total, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& key_weight, const Tensor& shift, const Tensor& query_codes, const Tensor& key_codes,
    int64_t hash_code_len, double scale) {
  check_sampled_remainder_backward(grad, grad_total, query, key, value, key_weight, shift, query_codes, key_codes,
                                   hash_code_len, scale);
  const Device device(value);
  Tensor grad_query = empty_heads_last(query);
  Tensor grad_key = empty_heads_last(key);
  Tensor grad_value = empty_heads_last(value);
  Tensor grad_weight = empty_row_numbers(key);
  const Tensor rows[] = {dense_rows(grad), dense_rows(query), dense_rows(key), dense_rows(value)};
  dispatch_wide(query, [&](auto element) {
    Remainders<decltype(element)>(device, &rows[0], &grad_total, rows[1], rows[2], rows[3], key_weight, shift,
                                  query_codes, key_codes, hash_code_len, scale)
        .backward(grad_query, grad_key, grad_value, grad_weight);
  });
  return {grad_query, grad_key, grad_value, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, YOSO_CUDA_KEY, m) {
  if (!may_run_here()) return;
  m.impl("sampled_remainder", TORCH_BOX(&sampled_remainder_cuda));
  m.impl("sampled_remainder_backward", TORCH_BOX(&sampled_remainder_backward_cuda));
}

}  // namespace yoso
