// The backward of sampled attention by all pairs of a query and a key, each with the number of hash functions that
// agree: quadratic, whatever the data, and the faster way up to some thousand rows. Otherwise it goes by buckets, see
// sampled_attention_backward.cu.
#pragma once

#include "device.h"

namespace yoso {

// Whether the backward goes by pairs, which it can for bfloat16 rows of up to 128 columns, 32 bits of 32 codes and 256
// hash functions. Where this is not to choose, YOSO_CUDA_BACKWARD says "pairs" or "buckets".
bool goes_by_pairs(const Device& device, const Tensor& query, const Tensor& key, const Tensor& value, int64_t num_hash,
                   int64_t hash_code_len);

// See sampled_attention_backward, of which these are checked arguments.
void sampled_attention_backward_by_pairs(const Device& device, const Tensor& grad, const Tensor& query,
                                         const Tensor& key, const Tensor& value, const Tensor& query_codes,
                                         const Tensor& key_codes, int64_t hash_code_len, const Tensor& grad_query,
                                         const Tensor& grad_key, const Tensor& grad_value);

}  // namespace yoso
