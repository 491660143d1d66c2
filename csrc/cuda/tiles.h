// What the kernels of tiled_attention.h share: the rows of a side and of a block, and what a cosine weighs.
#pragma once

#include "device.h"

namespace yoso {
namespace {

// rows of a block, where nothing else is said
constexpr int kTile = 64;
// a row's factor where it has no weight, whatever stands in it
template <class Pairs>
constexpr int kMasked = Pairs::kUnitRows ? -1 : 0;

struct Range {
  int64_t begin, end;
};

// Queries and the gradient of their output, or keys and values.
template <class In>
struct Side {
  Rows<const In> rows, values;
  // [B, H, count]: the rows' inverse lengths, or their weights
  const Accumulator<In>* factors;
  int64_t count;
};

struct Sizes {
  int64_t heads, columns, value_columns;
};

// Where gradients go that are not those of the operator's inputs yet, those of rows that are not scaled to length one.
template <class In, class Pairs>
using Gradient = std::conditional_t<Pairs::kUnitRows, In, Accumulator<In>>;

// What makes products of rows cosines.
template <class T, class Pairs>
__device__ __forceinline__ T cosine_scale_of(const Pairs& pairs, int64_t batch_head) {
  if constexpr (Pairs::kUnitRows)
    return 1;
  else
    return pairs.cosine_scale[batch_head];
}

// Which rows a block has.
struct Block {
  int64_t batch_head, batch, head, first, last;

  __device__ Block(int64_t heads, int64_t count, int rows = kTile) {
    const int64_t tiles = (count + rows - 1) / rows;
    batch_head = blockIdx.x / tiles;
    batch = batch_head / heads;
    head = batch_head % heads;
    first = blockIdx.x % tiles * rows;
    last = first + rows < count ? first + rows : count;
  }
};

__device__ __forceinline__ float quick_sqrt(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// Horner's rule, from the highest power.
__device__ __forceinline__ float polynomial(float, float sum) { return sum; }
template <class... Others>
__device__ __forceinline__ float polynomial(float x, float sum, float next, Others... others) {
  return polynomial(x, sum * x + next, others...);
}

// 1 - acos(x) / pi, for x of the sign of `signed_as` and versine 1 - |x|, as precise as W, the type of the weights; not
// a number where either is none.
template <class W>
__device__ __forceinline__ double angle_complement(double signed_as, double versine) {
  return 0.5 + copysign(asin(1 - versine), signed_as) / 3.14159265358979323846;
}
// acos(1 - t) / pi = sqrt(t) * polynomial(t) on [0, 1], minimax fits. t may be negative by rounding: then its size is
// the error that it has anyhow.
template <class W>
__device__ __forceinline__ float angle_complement(float signed_as, float t) {
  float ratio;
  if constexpr (std::is_same_v<W, BFloat16>)
    ratio = polynomial(t, 0.0028314807f, 0.00023319625f, 0.0093952846f, 0.037378907f, 0.45016113f);
  else if constexpr (std::is_same_v<W, Half>)
    ratio = polynomial(t, 0.0014137337f, -0.0008178968f, 0.0035374586f, 0.0081703179f, 0.037538614f, 0.45015776f);
  else
    ratio = polynomial(t, 0.00040901595f, -0.0007127421f, 0.0011679033f, 0.00040145381f, 0.0026388096f, 0.0084233582f,
                       0.03751405f, 0.45015815f);
  // the complement of the angle where x is negative
  return 0.5f + copysignf(0.5f - quick_sqrt(fabsf(t)) * ratio, signed_as);
}

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
