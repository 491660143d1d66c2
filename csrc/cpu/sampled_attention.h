// Sums of values by buckets, which sampled attention is, and its values' gradient too.
#pragma once

#include <tuple>

#include "simd.h"

namespace yoso {

// See the operator sampled_attention, of which these are checked arguments.
std::tuple<Tensor, Tensor> sum_by_buckets(const Tensor& value, const Tensor& query_codes, const Tensor& key_codes,
                                          int64_t hash_code_len, bool unit);

}  // namespace yoso
