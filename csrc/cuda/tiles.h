// What the kernels of tiled_attention.h share: the rows of a side and of a block, and what a cosine weighs.
#pragma once

#include "angles.h"
#include "tile_products.h"

namespace yoso {
namespace {

// a row's factor where it has no weight, whatever stands in it
constexpr int kMasked = -1;

struct Range {
  int64_t begin, end;
};

// Queries and the gradient of their output, or keys and values.
template <class In>
struct Side {
  Rows<const In> rows, values;
  // [B, H, count]: the rows' inverse lengths
  const Accumulator<In>* factors;
  int64_t count;
  // whether pieces of kLaneColumns of both can be read at once
  bool aligned;
};

struct Sizes {
  int64_t heads, columns, value_columns;
};

// Which rows a block has.
struct Block {
  int64_t batch_head, batch, head, first, last;

  __device__ Block(int64_t heads, int64_t count, int rows = kTile)
      : Block(heads, count, rows, blockIdx.x / ((count + rows - 1) / rows), blockIdx.x % ((count + rows - 1) / rows)) {}
  __device__ Block(int64_t heads, int64_t count, int rows, int64_t batch_head, int64_t tile)
      : batch_head(batch_head), batch(batch_head / heads), head(batch_head % heads), first(tile * rows) {
    last = first + rows < count ? first + rows : count;
  }
};

// 1 / sqrt(1 - x^2), 0 where it diverges
template <class T>
__device__ __forceinline__ T inverse_sine(T versine) {
  const T square = versine * (2 - versine);
  return square > 0 ? rsqrt(square) : 0;
}

// x = x^exponent, where the exponent has `bits` bits below the highest
template <int bits, class T, int n>
__device__ __forceinline__ void power_of_bits(T (&x)[n][4], int exponent) {
  T base[n][4];
#pragma unroll
  for (int i = 0; i < n * 4; ++i) base[i / 4][i % 4] = x[i / 4][i % 4];
#pragma unroll
  for (int bit = bits - 1; bit >= 0; --bit) {
#pragma unroll
    for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] *= x[i / 4][i % 4];
    if (exponent >> bit & 1) {
#pragma unroll
      for (int i = 0; i < n * 4; ++i) x[i / 4][i % 4] *= base[i / 4][i % 4];
    }
  }
}
// x = x^exponent, of 1 to 63; without a loop, which would have to copy x
template <class T, int n>
__device__ __forceinline__ void power(T (&x)[n][4], int exponent) {
  if (exponent >= 32)
    power_of_bits<5>(x, exponent);
  else if (exponent >= 16)
    power_of_bits<4>(x, exponent);
  else if (exponent >= 8)
    power_of_bits<3>(x, exponent);
  else if (exponent >= 4)
    power_of_bits<2>(x, exponent);
  else if (exponent >= 2)
    power_of_bits<1>(x, exponent);
}

// Turns versines, of cosines that have the signs of signed_as, into p(cosine).
template <class W, class T, int n>
__device__ __forceinline__ void kernel_weights(const T (&signed_as)[n][4], T (&versines)[n][4], int tau) {
#pragma unroll
  for (int i = 0; i < n * 4; ++i)
    versines[i / 4][i % 4] = angle_complement<W>(signed_as[i / 4][i % 4], versines[i / 4][i % 4]);
  power(versines, tau);
}

}  // namespace
}  // namespace yoso
