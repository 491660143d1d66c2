// The weights of softmax's samples: exp, over a power of two.
#pragma once

#include "device.h"

namespace yoso {

// 2^-shift
template <class T>
__device__ __forceinline__ T unit_of(int32_t shift) {
  if constexpr (std::is_same_v<T, float>)
    return __int_as_float(127 - shift << 23);
  else
    return ldexp(T{1}, -shift);
}

// Of a head whose weights are divided by 2^shift.
template <class T>
struct Exponential {
  // the shift as a logarithm
  T less;

  __device__ __forceinline__ explicit Exponential(int32_t shift) : less(static_cast<T>(kLog2) * shift) {}

  // Whether the logarithm is not too large to count as what it is.
  __device__ __forceinline__ bool follows(T x) const { return x - less < kMaxLogarithm; }
  __device__ __forceinline__ T operator()(T x) const { return exp(min(x - less, static_cast<T>(kMaxLogarithm))); }
};

}  // namespace yoso
