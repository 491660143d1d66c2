"""The operators in plain PyTorch: their definition, for any device and for float16 to float64.

Linear where the operators are: the sampled ones never form an N x M tensor, the exact ones work in blocks.
Tensors: query [B, H, N, D], key [B, H, M, D], value [B, H, M, Dv], grad [B, H, N, Dv] (the gradient of the output,
before its rows are scaled), query_codes [B, H, m, N], key_codes [B, H, m, M] (-1: in no bucket). With x the cosine of
a query and a key, the kernel is p(x) = (1 - acos(x) / pi)^tau (Zeng et al., 2021); a vector of length zero has cosine
0 with everything and gets no gradient. Everything is computed in at least float32.

unit asks the attention operators for output rows of length one. Their second output holds what the gradient needs
then, the inverse lengths [B, H, N] the rows had; otherwise it is empty.
"""

import math

import torch
from torch import Tensor

# rows of one block of the exact operators
BLOCK = 256
# rows that are taken at a time: such that a CPU's cache holds them, or another device is busy for longer than an
# operation takes to start
ROWS_CPU, ROWS_OTHER = 1 << 12, 1 << 16
# rows of a bucket that it multiplies at a time, at most
TILE = 64
# pairs of tiles that are multiplied one by one, for each tile at most; with more, a bucket's rows are summed up first
PAIRS = 4

# sums of weights up to this count as none: their inverse, times a gradient, leaves float32's range
SMALLEST_TOTAL = 1e-36

# Of sampled_remainder. The keys of a bucket that a query meets, at most, and the queries that meet the same ones
BUCKET_ROWS = 64
# the largest logarithm of a weight, such that sums of weights stay within float32's range
MAX_LOGARITHM = 60.0
# the largest power of two that weights are divided by, such that those with a logarithm of 0 stay within it
MAX_SHIFT = 87


def hash_hadamard(x: Tensor, parameters: Tensor, mask: Tensor | None, num_hash: int, hash_code_len: int) -> Tensor:
    """Codes by signs of H G H D2 H D1 x; see HashFunctions."""
    directions = _hadamard_directions(parameters.to(_accumulator(x).dtype), x.shape[3], num_hash, hash_code_len)
    return hash_gaussian(x, directions, mask, num_hash, hash_code_len)


def hash_gaussian(x: Tensor, parameters: Tensor, mask: Tensor | None, num_hash: int, hash_code_len: int) -> Tensor:
    """Codes by signs of projections on given directions; see HashFunctions."""
    x = _accumulator(x)
    codes = x.new_zeros(*x.shape[:2], num_hash, x.shape[2], dtype=torch.int32)
    for bit, directions in enumerate(parameters.to(x.dtype).split(num_hash, dim=1)):
        codes.add_(directions @ x.mT > 0, alpha=1 << bit)
    codes = codes.to(torch.int16 if hash_code_len <= 15 else torch.int32)
    return codes if mask is None else codes.masked_fill(~mask[:, None, None], -1)


def sampled_attention(
    query: Tensor,  # noqa: ARG001
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
    expectation_backward: bool,  # noqa: ARG001
    unit: bool,
) -> tuple[Tensor, Tensor]:
    """Mean over the hash functions of the sum of the values in each query's bucket.

    query, key and expectation_backward matter to the gradient only, which ops.py registers.
    """
    # as they lie in memory, a head's rows may be apart, and adding them to a table took eight times as long
    source = _accumulator(value).flatten(0, 1).contiguous()
    out = source.new_zeros(len(source), query_codes.shape[3], value.shape[3])
    for codes in zip(query_codes.flatten(0, 1).unbind(1), key_codes.flatten(0, 1).unbind(1), strict=True):
        out += _through_buckets(source, *codes, hash_code_len)
    return _finish_output((out / query_codes.shape[2]).unflatten(0, value.shape[:2]).to(value.dtype), unit)


def sampled_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of query and key, by the authors' lower bound dp/dx >= (tau / 2) p, with p sampled, and of value.

    For unit rows, grad_query_i = tau / (2 m) grad_i^T (sum of value_j key_j^T over the keys in i's bucket), summed
    over the hash functions; and the like for keys, with queries and their output's gradient in the bucket. The output
    is linear in value, whose gradient is the transpose: sampled attention from queries to keys.
    """
    grad_value, _ = sampled_attention(key, query, grad, key_codes, query_codes, hash_code_len, False, False)
    (query,), (key,) = _zero_masked(query_codes, query), _zero_masked(key_codes, key)
    tensors = _wide_unit_rows(query), _wide_unit_rows(key), _accumulator(grad), _accumulator(value)
    tensors = [x.flatten(0, 1) for x in (*tensors, query_codes, key_codes)]
    heads = max(1, _rows_at_a_time(query) // max(query.shape[2], key.shape[2], 1))
    parts = []
    for q, k, g, v, query_codes_part, key_codes_part in zip(*(x.split(heads) for x in tensors), strict=True):
        q_rows, k_rows, g_rows, v_rows = (_with_zero_row(x) for x in (q, k, g, v))
        grad_q, grad_k = torch.zeros_like(q_rows), torch.zeros_like(k_rows)
        for codes in zip(query_codes_part.unbind(1), key_codes_part.unbind(1), strict=True):
            tiles = (_tiles(x, hash_code_len) for x in codes)
            _add_bucket_products(grad_q, grad_k, g_rows, q_rows, v_rows, k_rows, *tiles)
        parts.append((grad_q[:-1].view_as(q), grad_k[:-1].view_as(k)))
    grad_query, grad_key = (torch.cat(x).unflatten(0, query.shape[:2]) for x in zip(*parts, strict=True))
    scale = hash_code_len / (2 * query_codes.shape[2])
    return _through_unit_rows(query, grad_query * scale), _through_unit_rows(key, grad_key * scale), grad_value


def expectation_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hash_code_len: int,
    exact_backward: bool,  # noqa: ARG001
    unit: bool,
) -> tuple[Tensor, Tensor]:
    """The expectation of sampled attention, p(query . key) value, in blocks (YOSO-E in the paper).

    exact_backward matters to the gradient only, which ops.py registers.
    """
    unit_query, unit_key, source = _wide_unit_rows(query), _wide_unit_rows(key), _accumulator(value)
    out = source.new_zeros(*query.shape[:-1], value.shape[-1])
    for rows, columns in _blocks(query.shape[2], key.shape[2]):
        weights, _ = _kernel(unit_query[:, :, rows] @ unit_key[:, :, columns].transpose(-1, -2), hash_code_len)
        out[:, :, rows] += weights @ source[:, :, columns]
    return _finish_output(out.to(value.dtype), unit)


def expectation_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hash_code_len: int,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of query, key and value of the exact operator, in blocks.

    exact: True for dp/dx itself (0 where it diverges, at |x| = 1), False for its lower bound (tau / 2) p.
    """
    unit_query, unit_key = _wide_unit_rows(query), _wide_unit_rows(key)
    grad_rows, source = _accumulator(grad), _accumulator(value)
    grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (unit_query, unit_key, source))
    for rows, columns in _blocks(query.shape[2], key.shape[2]):
        q, k, g, v = (
            unit_query[:, :, rows],
            unit_key[:, :, columns],
            grad_rows[:, :, rows],
            source[:, :, columns],
        )
        weights, slope = _kernel(q @ k.transpose(-1, -2), hash_code_len, exact)
        slope = slope * (g @ v.transpose(-1, -2))
        grad_query[:, :, rows] += slope @ k
        grad_key[:, :, columns] += slope.transpose(-1, -2) @ q
        grad_value[:, :, columns] += weights.transpose(-1, -2) @ g
    return (
        _through_unit_rows(query, grad_query),
        _through_unit_rows(key, grad_key),
        _heads_last(grad_value.to(value.dtype)),
    )


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention, in blocks of queries: what sampled_remainder's sums converge to with what they leave out.

    Returns:
        The output, and the logarithm of each query's sum of weights exp(scale query . key), [B, H, N]. Where no key is
        real they are zero and minus infinity.
    """
    real = real_rows(key_mask)
    query, key, source = _accumulator(query), *(less_masked(_accumulator(x), real) for x in (key, value))
    out, logarithm = source.new_zeros(*query.shape[:-1], value.shape[-1]), query.new_zeros(query.shape[:-1])
    for row in range(0, query.shape[2], BLOCK):
        rows = slice(row, row + BLOCK)
        logarithms = _logarithms(query[:, :, rows], key, real, scale)
        logarithm[:, :, rows] = logarithms.logsumexp(-1)
        out[:, :, rows] = _softmax_weights(logarithms, logarithm[:, :, rows]) @ source
    return _heads_last(out.to(value.dtype)), logarithm


def softmax_attention_backward(
    grad: Tensor,
    out: Tensor,
    logarithm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of query, key and value, in blocks of queries; out and logarithm are what the operator gave."""
    dtype, real = query.dtype, real_rows(key_mask)
    query, key, source = _accumulator(query), *(less_masked(_accumulator(x), real) for x in (key, value))
    grad = _accumulator(grad)
    along = (grad * _accumulator(out)).sum(-1, keepdim=True)
    grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, source))
    for row in range(0, query.shape[2], BLOCK):
        rows = slice(row, row + BLOCK)
        q, g = query[:, :, rows], grad[:, :, rows]
        weights = _softmax_weights(_logarithms(q, key, real, scale), logarithm[:, :, rows])
        slope = scale * weights * (g @ source.mT - along[:, :, rows])
        grad_query[:, :, rows] = slope @ key
        grad_key += slope.mT @ q
        grad_value += weights.mT @ g
    return tuple(_heads_last(x.to(dtype)) for x in (grad_query, grad_key, grad_value))


def sampled_remainder(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_weight: Tensor,
    shift: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What exp(x) has beyond 1 + x, for x = scale query . key, estimated from the pairs that share a bucket.

    A code and its complement are one bucket, so that a pair at the angle theta shares one with probability
    p = (1 - theta / pi)^tau + (theta / pi)^tau, at least 2^(1 - tau). The weight of a pair is its remainder over p,
    and over m, for each hash function that gives it one bucket: in expectation the remainder itself, whatever tau.

    Of a bucket with more keys than BUCKET_ROWS, a query meets one of as few parts as have no more, which counts for
    all: each part has every so many-th key, and the bucket's code and its hash function decide which one the first
    queries meet. So the time is linear in the rows, whatever the data.

    Args:
        key_weight: [B, H, M], in float32 or wider, a factor of each key.
        shift: [B, H], int32, in 0..MAX_SHIFT. A head's weights are divided by 2^shift, so that x counts up to
            MAX_LOGARITHM + shift log(2).

    Returns:
        The sums of value and of 1 by these weights, [B, H, N, Dv] and [B, H, N], both in float32 or wider.
    """
    rows = _RemainderRows(query, key, value, key_weight, shift, query_codes.shape[2], hash_code_len, scale)
    out, total = rows.value.new_zeros(len(rows.query), value.shape[3]), torch.zeros_like(rows.inverse)
    for pairs in _bucket_pairs(query_codes, key_codes, hash_code_len):
        weights, _ = rows.remainders(*pairs)
        weights = weights * rows.key_weight[pairs[1]]
        out.index_add_(0, pairs[0], weights[:, None] * rows.value[pairs[1]])
        total.index_add_(0, pairs[0], weights)
    return _heads_last(out.view(*query.shape[:3], value.shape[3])), total.view(query.shape[:3])


def sampled_remainder_backward(
    grad: Tensor,
    grad_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_weight: Tensor,
    shift: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of query, key, value and key_weight, of the remainder itself: p counts as a constant.

    In expectation, that is the gradient of the expectation.
    """
    rows = _RemainderRows(query, key, value, key_weight, shift, query_codes.shape[2], hash_code_len, scale)
    grad, grad_total = grad.flatten(0, 2), grad_total.flatten()
    tensors = rows.query, rows.key, rows.value, rows.key_weight
    grad_query, grad_key, grad_value, grad_weight = (torch.zeros_like(x) for x in tensors)
    for pairs in _bucket_pairs(query_codes, key_codes, hash_code_len):
        q, k, _ = pairs
        weights, slope = rows.remainders(*pairs)
        products = (grad[q] * rows.value[k]).sum(-1) + grad_total[q]
        slope = (scale * slope * products * rows.key_weight[k])[:, None]
        grad_query.index_add_(0, q, slope * rows.key[k])
        grad_key.index_add_(0, k, slope * rows.query[q])
        grad_value.index_add_(0, k, (weights * rows.key_weight[k])[:, None] * grad[q])
        grad_weight.index_add_(0, k, weights * products)
    gradients = zip((grad_query, grad_key, grad_value), (query, key, value), strict=True)
    return *(_heads_last(g.view(x.shape).to(x.dtype)) for g, x in gradients), grad_weight.view(key_weight.shape)


def first_order_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_weight: Tensor,
    shift: Tensor,
    heavy: Tensor,
    remainder: Tensor,
    remainder_total: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of which sampled_remainder gives what the light keys have beyond the first order.

    Sums over keys, of w value and of w, with x = scale query . key, key_weight [B, H, M] and shift as there: w is
    key_weight (1 + x) / 2^shift, and key_weight exp(x) / 2^shift for the keys that heavy [B, H, K] lists, all
    different ones. To these, remainder [B, H, N, Dv] and remainder_total [B, H, N] are added.

    Returns:
        The sums of values divided by those of weights, 0 where these are at most SMALLEST_TOTAL, and the sums of
        weights, [B, H, N] in float32 or wider, which are for the gradient.
    """
    part = _FirstOrder(query, key, value, key_weight, shift, heavy, scale)
    out = torch.baddbmm(part.light_value.sum(1, keepdim=True), part.query, part.key_value, alpha=scale)
    heavy_value = part.heavy_weight * part.heavy_value
    for rows in part.rows_at_a_time():
        out[:, rows] += part.heavy_exponentials(rows)[1] @ heavy_value
    out = out.unflatten(0, query.shape[:2])
    total = out[..., -1] + remainder_total
    out = (out[..., :-1] + remainder) / torch.where(total > SMALLEST_TOTAL, total, math.inf)[..., None]
    return _heads_last(out.to(value.dtype)), total.contiguous()


def first_order_attention_backward(
    grad: Tensor,
    out: Tensor,
    total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_weight: Tensor,
    shift: Tensor,
    heavy: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of query, key, value, key_weight, remainder and remainder_total."""
    part = _FirstOrder(query, key, value, key_weight, shift, heavy, scale)
    grad_remainder = _accumulator(grad) * _inverse(torch.where(total > SMALLEST_TOTAL, total, 0))[..., None]
    grad_remainder_total = -(grad_remainder * out).sum(-1)
    # of all sums alike
    grad = torch.cat([grad_remainder, grad_remainder_total[..., None]], dim=-1).flatten(0, 1)
    grad_query = scale * grad @ part.key_value.mT
    grad_sum, grad_key_value = grad.sum(1, keepdim=True), scale * part.query.mT @ grad
    grad_products = part.value @ grad_key_value.mT
    grad_weight = (part.key * grad_products).sum(-1, keepdim=True) + (part.value * grad_sum).sum(-1, keepdim=True)
    grad_weight *= part.exponential.unit
    grad_key = part.light * grad_products
    grad_value = part.light * (grad_sum + part.key @ grad_key_value)
    grad_heavy = [torch.zeros_like(x) for x in (part.heavy_key, part.heavy_value, part.heavy_weight)]
    for rows in part.rows_at_a_time():
        logarithms, exponentials = part.heavy_exponentials(rows)
        products = exponentials * (grad[:, rows] @ part.heavy_value.mT)
        slope = scale * part.heavy_weight.mT * torch.where(logarithms < part.exponential.most, products, 0)
        grad_query[:, rows] += slope @ part.heavy_key
        grad_heavy[0] += slope.mT @ part.query[:, rows]
        grad_heavy[1] += part.heavy_weight * (exponentials.mT @ grad[:, rows])
        grad_heavy[2] += products.sum(1)[..., None]
    for x, heavy_rows in zip((grad_key, grad_value, grad_weight), grad_heavy, strict=True):
        x.scatter_(1, part.heavy.expand_as(heavy_rows), heavy_rows)
    gradients = zip((grad_query, grad_key, grad_value[..., :-1]), (query, key, value), strict=True)
    return (
        *(_heads_last(g.unflatten(0, x.shape[:2]).to(x.dtype)) for g, x in gradients),
        grad_weight.view(key_weight.shape),
        _heads_last(grad_remainder),
        grad_remainder_total,
    )


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
    window: int,
) -> Tensor:
    """What sampled attention lacks of near pairs, those at most `window` positions apart.

    That is their exact weight less their sampled one, p - c / m, with c the number of hash functions whose codes
    agree; a row of code -1 has no weight. N = M.
    """
    key, value = _zero_masked(key_codes, key, value)
    unit_query, unit_key, source = _wide_unit_rows(query), _wide_unit_rows(key), _accumulator(value)
    out = torch.zeros_like(source)
    blocks = _near_weights(unit_query, unit_key, query_codes, key_codes, hash_code_len, window)
    for rows, columns, weights in blocks:
        out[:, :, rows] = weights @ source[:, :, columns]
    return _heads_last(out.to(value.dtype))


def local_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of query, key and value: with the lower bound (tau / 2) p of the slope, and p - c / m for p."""
    key, value = _zero_masked(key_codes, key, value)
    unit_query, unit_key = _wide_unit_rows(query), _wide_unit_rows(key)
    grad_rows, source = _accumulator(grad), _accumulator(value)
    grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (unit_query, unit_key, source))
    blocks = _near_weights(unit_query, unit_key, query_codes, key_codes, hash_code_len, window)
    for rows, columns, weights in blocks:
        q, k, g = unit_query[:, :, rows], unit_key[:, :, columns], grad_rows[:, :, rows]
        slope = weights * (hash_code_len / 2) * (g @ source[:, :, columns].transpose(-1, -2))
        grad_query[:, :, rows] = slope @ k
        grad_key[:, :, columns] += slope.transpose(-1, -2) @ q
        grad_value[:, :, columns] += weights.transpose(-1, -2) @ g
    return (
        _through_unit_rows(query, grad_query),
        _through_unit_rows(key, grad_key),
        _heads_last(grad_value.to(value.dtype)),
    )


def unit_rows_backward(grad: Tensor, unit: Tensor, inverse_length: Tensor) -> Tensor:
    """The gradient of x, given that of its rows u at length one: (g - (g . u) u) / |x|, and 0 for a zero row."""
    g, u = _accumulator(grad), _accumulator(unit)
    return _heads_last(((g - (g * u).sum(-1, keepdim=True) * u) * inverse_length[..., None]).to(unit.dtype))


def _accumulator(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _hadamard_directions(parameters: Tensor, head_dim: int, num_hash: int, hash_code_len: int) -> Tensor:
    """The directions of "hadamard" HashFunctions one by one, as those of "gaussian" ones: [H, tau * m, head_dim]."""
    matrix = parameters.new_ones(1, 1)
    while len(matrix) < parameters.shape[2]:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    signs, scales = parameters[:, :2, None], parameters[:, 2:, None]
    # rows of H G, of all bits and groups of P functions, each with a G of its own
    rows = (scales * matrix[:num_hash]).unflatten(1, (hash_code_len, -1)).flatten(2, 3)[:, :, :num_hash].flatten(1, 2)
    # H is symmetric
    return (((rows @ matrix) * signs[:, 1]) @ matrix * signs[:, 0])[..., :head_dim]


def _through_buckets(source: Tensor, query_codes: Tensor, key_codes: Tensor, hash_code_len: int) -> Tensor:
    """For each query the sum of the rows of source [heads, M, C] in its bucket, by one hash function of each head."""
    # the number of heads may be symbolic, which exporters can multiply, but not shift
    heads, num_buckets = source.shape[0], 1 << hash_code_len
    # row 0 is of the codes that are in no bucket
    first = torch.arange(heads, device=source.device)[:, None] * num_buckets + 1
    query_rows, key_rows = (torch.where(codes < 0, 0, first + codes) for codes in (query_codes, key_codes))
    table = source.new_zeros(heads * num_buckets + 1, source.shape[2])
    table.index_add_(0, key_rows.flatten(), source.flatten(0, 1))
    table[0] = 0
    return _gather(table, query_rows)


class _Exponential:
    """exp(x) over 2^shift, for x up to `most`; shift is of the shape that x has, or can be broadcast to."""

    def __init__(self, shift: Tensor, like: Tensor):
        shift = shift.to(like.dtype)
        self.unit, self.most = torch.exp2(-shift), MAX_LOGARITHM + math.log(2) * shift

    def __call__(self, x: Tensor) -> Tensor:
        # in two steps, as float32 does not hold exp(most)
        low = x.clamp(max=MAX_LOGARITHM)
        return low.exp() * self.unit * (torch.minimum(x, self.most) - low).exp()

    def less_unit(self, x: Tensor) -> Tensor:
        """Less that of 0."""
        small = x < MAX_LOGARITHM
        return torch.where(small, x.clamp(max=MAX_LOGARITHM).expm1() * self.unit, self(x) - self.unit)


class _RemainderRows:
    """The rows of all heads one after the other, and what pairs of them weigh."""

    def __init__(self, query, key, value, key_weight, shift, num_hash: int, hash_code_len: int, scale: float):
        self.num_queries = query.shape[2]
        self.query, self.key, self.value = (_accumulator(x).flatten(0, 2) for x in (query, key, value))
        lengths = (torch.linalg.vector_norm(x, dim=-1) for x in (self.query, self.key))
        self.inverse, self.key_inverse = (_inverse(length) for length in lengths)
        self.key_weight = key_weight.flatten()
        self.shift = shift.flatten()
        self.num_hash, self.hash_code_len, self.scale = num_hash, hash_code_len, scale

    def remainders(self, q: Tensor, k: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """(exp(x) - 1 - x) / 2^shift and its slope in x, over the probability of a bucket and m, times parts."""
        products = (self.query[q] * self.key[k]).sum(-1)
        angle = (products * self.inverse[q] * self.key_inverse[k]).clamp(-1, 1).acos() / math.pi
        probability = (1 - angle) ** self.hash_code_len + angle**self.hash_code_len
        share = parts / (self.num_hash * probability)
        x, exponential = self.scale * products, _Exponential(self.shift[q // self.num_queries], products)
        slope, unit = exponential.less_unit(x), exponential.unit
        return share * (slope - unit * x), share * torch.where(x < exponential.most, slope, -unit)


class _FirstOrder:
    """What the queries of a head have in common; a last column of ones in value adds up the weights."""

    def __init__(self, query, key, value, key_weight, shift, heavy, scale: float):
        self.query, self.key, value = (_accumulator(x).flatten(0, 1) for x in (query, key, value))
        self.value = torch.nn.functional.pad(value, (0, 1), value=1.0)
        self.heavy, weight = heavy.flatten(0, 1)[..., None], key_weight.flatten(0, 1)[..., None]
        self.exponential = _Exponential(shift.flatten()[:, None, None], self.query)
        self.light = weight.scatter(1, self.heavy, 0) * self.exponential.unit
        self.light_value = self.light * self.value
        self.key_value = self.key.mT @ self.light_value
        self.heavy_key, self.heavy_value, self.heavy_weight = (
            x.gather(1, self.heavy.expand(-1, -1, x.shape[2])) for x in (self.key, self.value, weight)
        )
        self.scale = scale

    def rows_at_a_time(self) -> list[slice]:
        step = max(1, _rows_at_a_time(self.query) // max(1, self.query.shape[0]))
        return [slice(row, row + step) for row in range(0, self.query.shape[1], step)]

    def heavy_exponentials(self, rows: slice) -> tuple[Tensor, Tensor]:
        """x and exp(x) / 2^shift for some of each head's queries and the heavy keys."""
        logarithms = self.query[:, rows] @ (self.scale * self.heavy_key).mT
        return logarithms, self.exponential(logarithms)


def _bucket_pairs(query_codes: Tensor, key_codes: Tensor, hash_code_len: int):
    """For each hash function: the rows of queries and keys that meet, and the number of parts of the pair's bucket.

    Rows are those of all heads one after the other.
    """
    buckets = 1 << (hash_code_len - 1)
    heads = query_codes.shape[0] * query_codes.shape[1]
    first, end = torch.arange(heads, device=query_codes.device)[:, None] * buckets, heads * buckets
    for hash_index in range(query_codes.shape[2]):
        codes = (x[:, :, hash_index].flatten(0, 1).long() for x in (query_codes, key_codes))
        # rows in no bucket are in the one behind all
        folded = (torch.where(c < 0, end, first + torch.minimum(c, 2 * buckets - 1 - c)).flatten() for c in codes)
        (bucket, query_order), (key_bucket, key_order) = (x.sort(stable=True) for x in folded)
        counts, num_keys = (x.bincount(minlength=end + 1) for x in (bucket, key_bucket))
        rank = torch.arange(len(bucket), device=bucket.device) - (counts.cumsum(0) - counts)[bucket]
        begin, num_keys = (num_keys.cumsum(0) - num_keys)[bucket], torch.where(bucket < end, num_keys[bucket], 0)
        parts = (-(-num_keys // BUCKET_ROWS)).clamp(min=1)
        chance = ((bucket % buckets + 1) * (hash_index + 1) * 2654435761 & 0xFFFFFFFF) >> 16
        part = (rank // BUCKET_ROWS + chance) % parts
        met = ((num_keys - part + parts - 1) // parts).clamp(min=0)
        place = torch.arange(int(met.sum()), device=met.device) - (met.cumsum(0) - met).repeat_interleave(met)
        begin, parts = (begin + part).repeat_interleave(met), parts.repeat_interleave(met)
        yield query_order.repeat_interleave(met), key_order[begin + place * parts], parts


def _rows_at_a_time(x: Tensor) -> int:
    return ROWS_CPU if x.device.type == "cpu" else ROWS_OTHER


def _with_zero_row(x: Tensor) -> Tensor:
    """The rows of x [heads, rows, C], and a zero row that a tile's empty places point to: [heads * rows + 1, C]."""
    return torch.nn.functional.pad(x.flatten(0, 1), (0, 0, 0, 1))


def _tiles(codes: Tensor, hash_code_len: int) -> tuple[Tensor, Tensor]:
    """Cuts the buckets of one hash function, codes [heads, rows], into tiles of about as many rows as they have.

    Returns the tiles' rows [tiles, size], heads * rows where there is none, and the tiles' buckets, ascending.
    """
    first = torch.arange(len(codes), device=codes.device)[:, None] << hash_code_len
    buckets, order = torch.where(codes < 0, -1, first + codes).flatten().sort(stable=True)
    order, buckets = order[buckets >= 0], buckets[buckets >= 0]
    buckets, counts = buckets.unique_consecutive(return_counts=True)
    mean = len(order) / max(len(buckets), 1)
    size = min(1 << math.ceil(math.log2(max(mean, 1))), TILE)
    tiles = -(-counts // size)
    first_place = (tiles.cumsum(0) - tiles) * size - (counts.cumsum(0) - counts)
    places = first_place.repeat_interleave(counts) + torch.arange(len(order), device=codes.device)
    buckets = buckets.repeat_interleave(tiles)
    rows = order.new_full((len(buckets) * size,), codes.numel()).index_copy_(0, places, order)
    return rows.unflatten(0, (-1, size)), buckets


def _add_bucket_products(grad_query, grad_key, grad, query, value, key, query_tiles, key_tiles) -> None:
    """grad_query_i += grad_i^T (sum of value_j key_j^T over the keys in its bucket), and the like for grad_key."""
    (query_rows, query_buckets), (key_rows, key_buckets) = query_tiles, key_tiles
    first = torch.searchsorted(key_buckets, query_buckets)
    counts = torch.searchsorted(key_buckets, query_buckets, right=True) - first
    tile = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    if len(tile) <= PAIRS * (len(query_rows) + len(key_rows)):
        # every tile of queries with every tile of keys in its bucket
        query_rows = query_rows[tile]
        key_rows = key_rows[(first - counts.cumsum(0) + counts)[tile] + torch.arange(len(tile), device=tile.device)]
        products = _gather(grad, query_rows) @ _gather(value, key_rows).mT
        _scatter(grad_query, query_rows, products @ _gather(key, key_rows))
        _scatter(grad_key, key_rows, products.mT @ _gather(query, query_rows))
    else:
        _add_through_sums(grad_query, grad, query_tiles, value, key, key_tiles)
        _add_through_sums(grad_key, value, key_tiles, grad, query, query_tiles)


def _add_through_sums(out: Tensor, left: Tensor, left_tiles, right: Tensor, third: Tensor, right_tiles) -> None:
    """out_i += left_i^T (sum of right_j third_j^T over the rows j in i's bucket), linear in a bucket's rows."""
    (left_rows, left_buckets), (right_rows, right_buckets) = left_tiles, right_tiles
    buckets, bucket = right_buckets.unique_consecutive(return_inverse=True)
    products = _gather(right, right_rows).mT @ _gather(third, right_rows)
    sums = products.new_zeros(len(buckets), *products.shape[1:]).index_add_(0, bucket, products)
    left_rows, left_buckets = (x[torch.isin(left_buckets, buckets)] for x in left_tiles)
    _scatter(out, left_rows, _gather(left, left_rows) @ sums[torch.searchsorted(buckets, left_buckets)])


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _scatter(out: Tensor, rows: Tensor, x: Tensor) -> None:
    out.index_add_(0, rows.flatten(), x.flatten(0, 1))


def _blocks(num_queries: int, num_keys: int):
    for row in range(0, num_queries, BLOCK):
        for column in range(0, num_keys, BLOCK):
            yield slice(row, row + BLOCK), slice(column, column + BLOCK)


def real_rows(key_mask: Tensor | None) -> Tensor | None:
    """Which rows of keys [B, H, M, D] are real, [B, 1, M, 1]; None: all are."""
    return None if key_mask is None else key_mask[:, None, :, None]


def less_masked(x: Tensor, real: Tensor | None) -> Tensor:
    # masked rows may hold anything
    return x if real is None else x.masked_fill(~real, 0)


def _logarithms(query: Tensor, key: Tensor, real: Tensor | None, scale: float) -> Tensor:
    logarithms = scale * query @ key.mT
    return logarithms if real is None else logarithms.masked_fill(~real.mT, -math.inf)


def _softmax_weights(logarithms: Tensor, logarithm: Tensor) -> Tensor:
    # without a key all are zero, whatever they are divided by
    return (logarithms - logarithm.masked_fill(logarithm == -math.inf, 0)[..., None]).exp()


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0)


def _near_weights(unit_query, unit_key, query_codes, key_codes, hash_code_len: int, window: int):
    """Blocks of p - c / m, and 0 where a pair is further apart than the window or one of its rows is masked.

    Yields the block's queries, its keys and its weights.
    """
    length = unit_query.shape[2]
    positions = torch.arange(length, device=unit_query.device)
    # smaller blocks have fewer keys beyond the window, and a CPU starts an operation in no time
    block = BLOCK // 4 if unit_query.device.type == "cpu" else BLOCK
    for row in range(0, length, block):
        rows = slice(row, min(row + block, length))
        columns = slice(max(rows.start - window, 0), min(rows.stop + window, length))
        weights, _ = _kernel(unit_query[:, :, rows] @ unit_key[:, :, columns].transpose(-1, -2), hash_code_len)
        q, k = query_codes[..., rows, None], key_codes[..., None, columns]
        agreeing = torch.zeros(weights.shape, dtype=torch.int32, device=weights.device)
        for h in range(q.shape[2]):
            agreeing += q[:, :, h] == k[:, :, h]
        near = (positions[rows, None] - positions[columns]).abs() <= window
        near = near & (q[:, :, 0] >= 0) & (k[:, :, 0] >= 0)
        yield rows, columns, torch.where(near, weights - agreeing.to(weights.dtype) / q.shape[2], 0)


def _zero_masked(codes: Tensor, *tensors: Tensor) -> list[Tensor]:
    # what stands in a masked row, not even a number perhaps, must not be multiplied by its weight of zero
    return [x.masked_fill(codes[:, :, 0, :, None] < 0, 0) for x in tensors]


def _kernel(cosine: Tensor, hash_code_len: int, exact: bool = False) -> tuple[Tensor, Tensor]:
    """p(x), and dp/dx or its lower bound."""
    cosine = cosine.clamp(-1, 1)
    base = 1 - cosine.acos() / math.pi
    weights = base**hash_code_len
    if not exact:
        return weights, weights * (hash_code_len / 2)
    sine = (1 - cosine.square()).sqrt()
    slope = base ** (hash_code_len - 1) * (hash_code_len / math.pi) / sine
    return weights, torch.where(sine > 0, slope, 0)


def _unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x scaled to length one, and their inverse lengths; zero and 0 for a zero row."""
    length = torch.linalg.vector_norm(_accumulator(x), dim=-1)
    inverse_length = _inverse(length)
    return (x * inverse_length[..., None]).to(x.dtype), inverse_length


def _wide_unit_rows(x: Tensor) -> Tensor:
    return _unit_rows(_accumulator(x))[0]


def _through_unit_rows(x: Tensor, grad: Tensor) -> Tensor:
    return unit_rows_backward(grad, *_unit_rows(_accumulator(x))).to(x.dtype)


def _finish_output(out: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    out, inverse_length = _unit_rows(out) if unit else (out, _accumulator(out.new_empty(0)))
    return _heads_last(out), inverse_length


# by the operators' names
DEFINITIONS = {
    function.__name__: function
    for function in (
        hash_hadamard,
        hash_gaussian,
        sampled_attention,
        sampled_attention_backward,
        expectation_attention,
        expectation_attention_backward,
        softmax_attention,
        softmax_attention_backward,
        sampled_remainder,
        sampled_remainder_backward,
        first_order_attention,
        first_order_attention_backward,
        local_attention,
        local_attention_backward,
        unit_rows_backward,
    )
}
