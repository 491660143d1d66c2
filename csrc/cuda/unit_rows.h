// Scaling of an attention operator's output to rows of length one.
#pragma once

#include "device.h"

namespace yoso {

// Scales the rows of out, which empty_heads_last made, in place; a zero row stays zero, with inverse length 0.
void scale_to_unit_rows(const Device& device, const Tensor& out, const Tensor& inverse_length);

}  // namespace yoso
