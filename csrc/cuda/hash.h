// What the kernels share that find hash codes.
#pragma once

#include <type_traits>

#include "rows.h"

namespace yoso {
namespace {

// hash functions whose codes are found together
constexpr int kFunctions = 32;

struct Problem {
  int64_t B, H, N, D, num_hash;
  // of the rows
  ScalarType dtype;
  int hash_code_len;
  // [B, N] or null
  const uint8_t* mask;
  const float* parameters;
  // length of the transforms that parameters are for
  int64_t size;
  // whether 16 bytes of a row can be loaded at a time
  bool vectors;
  // int16 or, where wide, int32
  void* codes;
  bool wide;

  // -1 for a masked row, else 0
  __device__ int32_t masked(int64_t batch, int64_t row) const {
    return mask == nullptr || mask[batch * N + row] != 0 ? 0 : -1;
  }
  // Calls f with where to store the row's code by a function; the next function's is N further.
  template <class F>
  __device__ __forceinline__ void store(int64_t batch, int64_t head, int64_t function, int64_t row, const F& f) const {
    const int64_t place = ((batch * H + head) * num_hash + function) * N + row;
    if (wide)
      f(static_cast<int32_t*>(codes) + place);
    else
      f(static_cast<int16_t*>(codes) + place);
  }
};

// Rows of the problem's dtype: transforms, of some thousand instructions, are not compiled for each.
using AnyRows = Rows<const unsigned char>;

// Appends a sign bit.
template <class T>
__device__ __forceinline__ void push_sign(uint32_t& code, T x) {
  std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t> bits;
  memcpy(&bits, &x, sizeof(bits));
  // one shift of both words, where bits has 32 of them
  code = code << 1 | static_cast<uint32_t>(bits >> (8 * sizeof(T) - 1));
}

// The Walsh-Hadamard transform of a thread's R elements.
template <int R, class T>
__device__ __forceinline__ void butterfly(T* x) {
#pragma unroll
  for (int h = 1; h < R; h *= 2)
#pragma unroll
    for (int i = 0; i < R; ++i)
      if ((i & h) == 0) {
        const T sum = x[i] + x[i + h];
        x[i + h] = x[i] - x[i + h];
        x[i] = sum;
      }
}

__device__ __forceinline__ bool odd(int x) { return __popc(x) % 2 != 0; }

__device__ __forceinline__ int at_most(int64_t x, int64_t limit) { return static_cast<int>(x < limit ? x : limit); }

}  // namespace
}  // namespace yoso
