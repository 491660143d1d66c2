// Hash codes of rows by the signs of random projections. A vector's lanes are different rows: no shuffles, no tails
// within a transform.
#include "simd.h"

namespace yoso {
namespace {

// rows of one task: enough to pay for its buffers, few enough to share among threads
constexpr int64_t kTaskRows = 256;

template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};
template <class T>
using Integer = typename IntegerOf<T>::type;
template <class V>
using Codes = Vector<Integer<Element<V>>, sizeof(V)>;

// The Walsh-Hadamard transform of R vectors, lane by lane.
template <int R, class V>
YOSO_INLINE void butterfly(V (&x)[R]) {
  for (int h = 1; h < R; h *= 2)
    for (int i = 0; i < R; ++i)
      if ((i & h) == 0) {
        const V sum = x[i] + x[i + h];
        x[i + h] = x[i] - x[i + h];
        x[i] = sum;
      }
}

// log2(R) stages of a transform in one pass over memory: those between elements that are h, 2 h, .. apart. Elements
// come from read(i) and go to x[i].
template <int R, class V, class Read>
YOSO_INLINE void hadamard_pass(V* x, int64_t size, int64_t h, const Read& read) {
  for (int64_t i = 0; i < size; i += R * h)
    for (int64_t j = i; j < i + h; ++j) {
      V part[R];
      for (int r = 0; r < R; ++r) part[r] = read(j + r * h);
      butterfly<R>(part);
      for (int r = 0; r < R; ++r) x[j + r * h] = part[r];
    }
}

// The stages of a transform between elements from `limit` to h / 2 apart.
template <class V>
YOSO_INLINE void hadamard_stages(V* x, int64_t size, int64_t limit, int64_t h) {
  const auto in_place = [x](int64_t i) YOSO_INLINE_LAMBDA { return x[i]; };
  while (h > limit) {
    if (h >= 8 * limit) {
      h /= 8;
      hadamard_pass<8>(x, size, h, in_place);
    } else if (h >= 4 * limit) {
      h /= 4;
      hadamard_pass<4>(x, size, h, in_place);
    } else {
      h /= 2;
      hadamard_pass<2>(x, size, h, in_place);
    }
  }
}

// A size that the compiler knows: addresses and loops take nearly half of the time otherwise.
template <int64_t size>
using Fixed = std::integral_constant<int64_t, size>;

// Codes [num_hash] of one vector of rows by H G H D2 H D1. x holds `size` vectors and is overwritten; scratch holds
// hash_code_len * size of them. Codes are written by fours.
template <class V, class Size>
YOSO_INLINE void hadamard_codes(V* x, V* scratch, const Element<V>* parameters, Size size, int64_t num_hash,
                                int64_t hash_code_len, Codes<V>* codes) {
  for (int64_t round = 0; round < 2; ++round, parameters += size) {
    hadamard_pass<8>(x, size, size / 8, [=](int64_t i) YOSO_INLINE_LAMBDA { return x[i] * parameters[i]; });
    hadamard_stages(x, size, 1, size / 8);
  }
  const int64_t groups = (num_hash + size - 1) / size;
  // One hash function for each of the first `needed` rows of a transform: a transform of that size, after the rest is
  // folded onto it.
  const auto add_groups = [=](auto needed) YOSO_INLINE_LAMBDA {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t bit = 0; bit < hash_code_len; ++bit) {
        const Element<V>* scale = parameters + (bit * groups + group) * size;
        const auto folded = [=](int64_t i) YOSO_INLINE_LAMBDA {
          V sum = x[i] * scale[i];
          for (int64_t fold = i + needed; fold < size; fold += needed) sum += x[fold] * scale[fold];
          return sum;
        };
        V* rows = scratch + bit * needed;
        if (needed >= 32) {
          hadamard_pass<8>(rows, needed, needed / 8, folded);
          hadamard_stages(rows, needed, 4, needed / 8);
        } else if (needed == 16) {
          hadamard_pass<4>(rows, needed, 4, folded);
        } else {
          hadamard_pass<2>(rows, needed, 4, folded);
        }
      }
      // the last two stages for all bits of four codes, which so stay in registers
      const int64_t first = group * size;
      for (int64_t f = 0; f < std::min<int64_t>(needed, num_hash - first); f += 4) {
        Codes<V> code[4] = {};
        for (int64_t bit = 0; bit < hash_code_len; ++bit) {
          V row[4];
          for (int r = 0; r < 4; ++r) row[r] = scratch[bit * needed + f + r];
          butterfly<4>(row);
          for (int r = 0; r < 4; ++r) code[r] |= (row[r] > 0) & (Integer<Element<V>>{1} << bit);
        }
        for (int r = 0; r < 4; ++r) codes[first + f + r] = code[r];
      }
    }
  };
  int64_t needed = 8;
  while (needed < num_hash && needed < size) needed *= 2;
  if (needed == size)
    add_groups(size);
  else if (needed == 32)
    add_groups(Fixed<32>{});
  else
    add_groups(needed);
}

// Codes [num_hash] of one vector of rows by given directions [hash_code_len, num_hash, columns].
template <class V>
YOSO_INLINE void gaussian_codes(const V* x, const Element<V>* directions, int64_t columns, int64_t num_hash,
                                int64_t hash_code_len, Codes<V>* codes) {
  std::memset(codes, 0, num_hash * sizeof(V));
  for (int64_t bit = 0; bit < hash_code_len; ++bit)
    for (int64_t f = 0; f < num_hash; f += 4) {
      const int64_t count = std::min<int64_t>(4, num_hash - f);
      V sum[4] = {};
      for (int64_t c = 0; c < columns; ++c)
        for (int r = 0; r < 4; ++r) sum[r] += x[c] * directions[std::min<int64_t>(r, count - 1) * columns + c];
      for (int r = 0; r < count; ++r) codes[f + r] |= (sum[r] > 0) & (Integer<Element<V>>{1} << bit);
      directions += count * columns;
    }
}

// Stores the codes of a vector of rows for each hash function, -1 where keep has a 0.
template <class Code, class V>
YOSO_INLINE void store_codes(void* to, const Codes<V>* codes, Codes<V> keep, int64_t num_hash) {
  using Narrow = Vector<Code, kLanes<V> * sizeof(Code)>;
  for (int64_t f = 0; f < num_hash; ++f)
    store<Narrow>(static_cast<Code*>(to) + f * kTaskRows, __builtin_convertvector(codes[f] | ~keep, Narrow));
}

// Hashes x [B, H, N, D]; `size` is the length of a transformed row, D where the directions are given.
template <class T>
void hash_rows(const InputRows& x, const Tensor& parameters, const uint8_t* mask, bool use_hadamard, int64_t num_hash,
               int64_t hash_code_len, const Tensor& out) {
  const int64_t B = x.batches, H = x.heads, N = x.count, D = x.columns, size = parameters.size(2);
  const int64_t chunks = (N + kTaskRows - 1) / kTaskRows, per_head = parameters.size(1) * size;
  const int64_t columns = padded(D), code_bytes = out.element_size();
  const float* all_parameters = parameters.const_data_ptr<float>();
  char* all_codes = static_cast<char*>(out.mutable_data_ptr());
  parallel_for(0, B * H * chunks, 1, [&](int64_t task_begin, int64_t task_end) {
    vectorized([&](auto bytes) YOSO_INLINE_LAMBDA {
      using V = Vector<T, bytes()>;
      constexpr int64_t L = kLanes<V>;
      Buffer<T> loaded(kTaskRows * columns), head_parameters(per_head);
      Buffer<V> block(std::max(size, columns)), scratch(use_hadamard ? hash_code_len * size : 0);
      Buffer<Codes<V>> codes((num_hash + 3) / 4 * 4);
      // of a task: written row by row to `out`, where rows of some lengths are in each other's way in the cache
      Buffer<char> task_codes(num_hash * kTaskRows * code_bytes);
      for (int64_t task = task_begin; task < task_end; ++task) {
        // the heads of a row lie together in memory
        const int64_t batch = task / (H * chunks), first = task / H % chunks * kTaskRows, head = task % H;
        const int64_t last = std::min(N, first + kTaskRows);
        for (int64_t i = 0; i < per_head; ++i) head_parameters[i] = all_parameters[head * per_head + i];
        load_rows<V>(x, batch, head, first, last, loaded.data(), columns);
        for (int64_t row = first; row < last; row += L) {
          const int64_t count = std::min(L, last - row);
          transpose_rows<V>(AllRows<T>{loaded.data() + (row - first) * columns, columns}, count, columns,
                            reinterpret_cast<T*>(block.data()), L);
          for (int64_t c = columns; c < size; ++c) block[c] = V{};
          const auto hash_block = [&](auto known_size) YOSO_INLINE_LAMBDA {
            hadamard_codes<V>(block.data(), scratch.data(), head_parameters.data(), known_size, num_hash, hash_code_len,
                              codes.data());
          };
          if (!use_hadamard)
            gaussian_codes<V>(block.data(), head_parameters.data(), D, num_hash, hash_code_len, codes.data());
          else if (std::is_same_v<T, float> && size == 32)
            hash_block(Fixed<32>{});
          else if (std::is_same_v<T, float> && size == 64)
            hash_block(Fixed<64>{});
          else
            hash_block(size);
          Codes<V> keep = ~Codes<V>{};
          if (mask != nullptr)
            for (int64_t r = 0; r < count; ++r) keep[r] = mask[batch * N + row + r] != 0 ? -1 : 0;
          char* to = task_codes.data() + (row - first) * code_bytes;
          if (code_bytes == sizeof(int16_t))
            store_codes<int16_t, V>(to, codes.data(), keep, num_hash);
          else
            store_codes<int32_t, V>(to, codes.data(), keep, num_hash);
        }
        for (int64_t f = 0; f < num_hash; ++f)
          std::memcpy(all_codes + (((batch * H + head) * num_hash + f) * N + first) * code_bytes,
                      task_codes.data() + f * kTaskRows * code_bytes, (last - first) * code_bytes);
      }
    });
  });
}

Tensor hash_cpu(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& input_mask, int64_t num_hash,
                int64_t hash_code_len, bool use_hadamard) {
  check_hash(x, parameters, input_mask, num_hash, hash_code_len, use_hadamard);
  const int64_t B = x.size(0), H = x.size(1), N = x.size(2);
  const std::optional<Tensor> mask = dense_mask(input_mask);
  const uint8_t* mask_data = mask.has_value() ? mask_bytes(*mask) : nullptr;
  Tensor out = on_huge_pages(empty_tensor(x, {B, H, num_hash, N}, code_dtype(hash_code_len)));
  dispatch_accumulator(x, [&](auto accumulator) {
    hash_rows<decltype(accumulator)>(InputRows(x), parameters, mask_data, use_hadamard, num_hash, hash_code_len, out);
  });
  return out;
}

Tensor hash_hadamard_cpu(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& mask,
                         int64_t num_hash, int64_t hash_code_len) {
  return hash_cpu(x, parameters, mask, num_hash, hash_code_len, true);
}

Tensor hash_gaussian_cpu(const Tensor& x, const Tensor& parameters, const std::optional<Tensor>& mask,
                         int64_t num_hash, int64_t hash_code_len) {
  return hash_cpu(x, parameters, mask, num_hash, hash_code_len, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(yoso_hf, CPU, m) {
  m.impl("hash_hadamard", TORCH_BOX(&hash_hadamard_cpu));
  m.impl("hash_gaussian", TORCH_BOX(&hash_gaussian_cpu));
}

}  // namespace yoso
