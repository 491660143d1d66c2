// Angles by their cosines.
#pragma once

#include "device.h"

namespace yoso {
namespace {

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
    ratio = polynomial(t, 0.0059618738f, 0.0057526503f, 0.038127331f, 0.45013664f);
  else if constexpr (std::is_same_v<W, Half>)
    ratio = polynomial(t, 0.0014137337f, -0.0008178968f, 0.0035374586f, 0.0081703179f, 0.037538614f, 0.45015776f);
  else
    ratio = polynomial(t, 0.00040901595f, -0.0007127421f, 0.0011679033f, 0.00040145381f, 0.0026388096f, 0.0084233582f,
                       0.03751405f, 0.45015815f);
  // the complement of the angle where x is negative
  return 0.5f + copysignf(0.5f - quick_sqrt(fabsf(t)) * ratio, signed_as);
}

}  // namespace
}  // namespace yoso
