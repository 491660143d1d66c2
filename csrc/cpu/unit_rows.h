// Scaling of an attention operator's output to rows of length one.
#pragma once

#include "simd.h"

namespace yoso {

// Uninitialised [B, H, N] for rows of out [B, H, N, D], in the accumulator's type; of shape [0] unless unit.
Tensor empty_inverse_length(const Tensor& out, bool unit);

// Scales the rows of out, which empty_heads_last made, in place; a zero row stays zero, with inverse length 0.
void scale_to_unit_rows(const Tensor& out, const Tensor& inverse_length);

}  // namespace yoso
