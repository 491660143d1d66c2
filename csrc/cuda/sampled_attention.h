// Sums of values by buckets, which sampled attention is, and its values' gradient too.
#pragma once

#include <tuple>

#include "sort.h"

namespace yoso {

// See the operator sampled_attention, of which these are checked arguments. key_order: that of all heads' keys, where
// it is known.
std::tuple<Tensor, Tensor> sum_by_buckets(const Device& device, const Tensor& value, const Tensor& query_codes,
                                          const Tensor& key_codes, int64_t hash_code_len, bool unit,
                                          const SortedCodes* key_order = nullptr);

}  // namespace yoso
