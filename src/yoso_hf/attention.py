"""yoso_attention, the one attention function."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .graphs import expectation_attention_graph, sampled_attention_graph
from .hashing import (
    EXACT_RANGE,
    MAX_EXACT_HASH_CODE_LEN,
    MAX_HASH_CODE_LEN,
    HashFunctions,
    check_floating,
    check_integer,
    check_mask,
)
from .ops import (
    compiled_backends,
    cpu_uses_amx,
    expectation_attention,
    first_order_attention,
    local_attention,
    sampled_attention,
    sampled_remainder,
    softmax_attention,
)
from .reference import MAX_LOGARITHM, MAX_SHIFT, SMALLEST_TOTAL, _kernel, _wide_unit_rows, less_masked, real_rows

HAS_CPU_KERNELS, HAS_CUDA_KERNELS = (name in compiled_backends() for name in ("cpu", "cuda"))
HAS_AMX = cpu_uses_amx()

NORMALIZATIONS = ("l2", "sum", None)
SIMILARITIES = ("cosine", "softmax")
BACKWARDS = ("sampled", "expectation", "exact")
EXPECTATIONS = (True, False, "auto")
# what expectation is called there
IN_CONFIGURATIONS = "use_expectation of a model, yoso_use_expectation of an encoder"

# Of similarity="softmax", the keys of the largest weight, which are not sampled: a few have much of it. As many as the
# kernel of first_order_attention takes.
NUM_HEAVY_KEYS = 64
# The bits of its samples' codes up to 4096 keys. Fewer would be less noisy where there are fewer keys, but would make
# samples depend on how far a text is padded there, and take a compiled graph for each number of bits.
FEWEST_BITS = 13
# The length, for each hash function, at which the exact kernel takes as long as the sampled one, by similarity; on
# CPUs in float32. "cosine": that at which "yoso" and "yoso expectation" cross, m = 32, tau = 9, D = 64, between that
# of the forward and that of forward with backward, by
#     python benchmarks/bench_attention.py --groups lengths --lengths 256 320 384 512 --output crossing.json
# "softmax": with D = 32 the two cross at 32 m in the forward (docs/results), with D = 64 at 28 m or below, by
#     python benchmarks/bench_embeddings.py --settings softmax exact "sampled, m 64" \
#         --lengths 1792 2304 2560 3584 --output crossing.json
# with models and the files of its docstring. Up to 40 m the exact ones are taken for being exact: they take less time
# than softmax with either.
EXACT_TOKENS_PER_HASH = {"cosine": 11, "softmax": 40}
# Of bfloat16 on a CPU with AMX, where exact kernels take a third of the time, and sampled ones what they take in
# float32; "softmax" with D = 64 and m = 64, from where on samples take less time than PyTorch's softmax. By
#     python benchmarks/bench_attention.py --groups lengths similarity --dtype bfloat16 \
#         --lengths 768 1024 1280 6144 7168 8192 --output crossing.json
EXACT_TOKENS_PER_HASH_WITH_AMX = {"cosine": 32, "softmax": 120}
# On a GPU with our kernels, by an H200 (docs/cuda.md). "softmax": its exact weights are PyTorch's; the forward crosses
# later, and with its backward about there. "cosine": of rows of 16 bits, which tensor cores multiply; where the
# forward crosses, with its backward somewhat earlier.
EXACT_TOKENS_PER_HASH_ON_CUDA = {"cosine": 48, "softmax": 256}

if torch.__version__ >= "2.13":
    from torch.compiler import is_exporting
else:
    # before, torch.compile took the public function for True
    def is_exporting() -> bool:
        return torch.compiler._is_exporting_flag


def _is_exporting_any_length(*lengths: int | torch.SymInt) -> bool:
    # strict export hides from this code whether a length is dynamic
    return is_exporting() and (
        torch.compiler.is_dynamo_compiling() or any(isinstance(length, torch.SymInt) for length in lengths)
    )


def exact_is_cheaper(
    num_queries: int,
    num_keys: int,
    num_hash: int,
    similarity: Literal["cosine", "softmax"] = "cosine",
    device_type: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Whether expectation="auto" takes the exact weights: their cost grows as N M, that of sampling as (N + M) m.

    Args:
        num_queries: N; padding counts.
        num_keys: M; padding counts.
        num_hash: m, >= 1.
        similarity: as for yoso_attention.
        device_type: of the tensors, "cpu" or "cuda" or another.
        dtype: of query.

    Returns:
        True while the harmonic mean of N and M is at most EXACT_TOKENS_PER_HASH[similarity] m. In its place stands
        EXACT_TOKENS_PER_HASH_WITH_AMX[similarity] for bfloat16 on a CPU with AMX, and, with CUDA kernels,
        EXACT_TOKENS_PER_HASH_ON_CUDA[similarity], of "cosine" for bfloat16 and float16 only; of "softmax" without
        compiled kernels all is exact.

    Raises:
        ValueError: num_hash or similarity is out of range; torch.export with a dynamic length or strict=True: an
            exported program has one of the two kernels.
    """
    check_integer("num_hash", num_hash, 1)
    _check_similarity(similarity)
    if _is_exporting_any_length(num_queries, num_keys):
        # not by is_in_onnx_export, which a strict export does not see
        in_onnx = " (True for ONNX, which has no operators for these samples)" if similarity == "softmax" else ""
        raise ValueError(
            f'expectation="auto" ({IN_CONFIGURATIONS}) cannot be exported with a dynamic length or strict=True: '
            f"choose True or False{in_onnx}, or export a fixed length with strict=False"
        )
    on_cuda = device_type == "cuda" and HAS_CUDA_KERNELS
    if similarity == "softmax" and not on_cuda and not (device_type == "cpu" and HAS_CPU_KERNELS):
        return True
    tokens_per_hash = EXACT_TOKENS_PER_HASH
    if on_cuda and (similarity == "softmax" or dtype in (torch.bfloat16, torch.float16)):
        tokens_per_hash = EXACT_TOKENS_PER_HASH_ON_CUDA
    elif HAS_AMX and device_type == "cpu" and dtype == torch.bfloat16:
        tokens_per_hash = EXACT_TOKENS_PER_HASH_WITH_AMX
    # one rule with and without gradients: checkpointing runs a layer both ways, and must compute the same twice
    return 2 * num_queries * num_keys <= tokens_per_hash[similarity] * (num_queries + num_keys) * num_hash


def yoso_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    *,
    query_mask: Tensor | None = None,
    hash_code_len: int | list[int] | tuple[int, ...] = 9,
    num_hash: int = 32,
    expectation: bool | Literal["auto"] = False,
    hash_functions: HashFunctions | None = None,
    normalization: Literal["l2", "sum"] | None = "l2",
    backward: Literal["sampled", "expectation", "exact"] = "sampled",
    similarity: Literal["cosine", "softmax"] = "cosine",
    local_window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention whose weights are collisions of random hash codes, linear in the sequence length (Zeng et al., 2021).

    A key's value is added to a query's output for the share of the hash functions that give both the same code. In
    expectation that is (1 - acos(x) / pi)^hash_code_len, x the cosine of query and key. Lengths of query and key do
    not matter between 1e-18 and 1e18, whose squares float32 holds. A vector of length zero has cosine 0 with every
    other; where sampled, two of them share all codes. A NaN in query or key makes exact weights and those of
    similarity="softmax" NaN, and others only different. Second derivatives of this package's operators are refused,
    and those of forward mode (torch.func.jvp).

    Args:
        query: [B, H, N, D], float16, bfloat16, float32 or float64; D >= 1.
        key: [B, H, M, D].
        value: [B, H, M, Dv].
        key_mask: bool [B, M], True for a real token; a masked key adds nothing, whatever stands in it. None: all are
            real.
        query_mask: bool [B, N], True for a real token; outputs of the others mean nothing. In self-attention, the
            key_mask. Only samples of similarity="softmax" heed it, since they go by what all queries have in common:
            without it, what padding holds moves them, and NaN in it spoils them. None: all are real.
        hash_code_len: tau, bits of a code, 1..16, or 1..32 with expectation=True: the higher, the sharper the
            attention. A list of H numbers gives every head its own. With similarity="softmax" it matters to samples
            only, and is the most bits that their codes have: 13, and from M = 4097 on log2(M) + 1, rounded up, which
            leaves one key on average to a bucket; padding counts.
        num_hash: m, the number of hash functions, >= 1: the higher, the less noise, at a cost in proportion.
        expectation: True for the expectation itself: O(N M) time, O(N + M) memory, no randomness. "auto": the same
            where exact_is_cheaper says so, else sampled; padding counts there, so an output may depend on how far its
            inputs are padded.
        hash_functions: the hash functions, whose sizes replace num_hash and hash_code_len; None: drawn from torch's
            global generator. With a list in hash_code_len, a head's codes are their first so many bits. Nothing
            is drawn or hashed where the expectation is computed.
        normalization: "l2": output rows have length one, as in the paper; "sum": they are divided by the sum of their
            weights; None: neither. A row without any weight is zero, and so is its gradient.
        backward: the gradient of query and key. "sampled": the lower bound (tau / 2) p of the kernel's slope,
            with p sampled, linear in time; "expectation": the same bound with p exact, O(N M);
            "exact": the true derivative, only with expectation=True. With expectation=True nothing is sampled, and
            "sampled" means "expectation". The gradient of value is always the true one.
        similarity: "cosine": the weights above. "softmax": those of softmax attention, exp(scale query . key). Where
            the expectation is computed, hash_code_len has no effect, backward is "exact", and PyTorch computes it but
            on a CPU with compiled kernels. Where sampled, queries are taken less their mean over the sequence, and
            keys less one of theirs, as softmax does not notice what all keys share, and what the queries share is a
            weight of each key, exp(scale mean of queries . key). That one is exact, and what is left is exp, up to
            exp(120): exact for the 64 keys of the largest weight, and for the others 1 plus the dot product, exact,
            plus an estimate of the rest, from the pairs whose codes agree in all bits or in none. The expectations of
            that and of the sum of the weights do not depend on hash_code_len from 2 on: shorter codes are less noisy,
            and take longer. Their quotient, the output, has a bias, small beside its noise where a query meets the
            keys that have its weight in several of the hash functions, and as large where most draws miss them: where
            its weight lies in few keys that are not nearly parallel to it. A query that avoids, by far more than 60 in
            the exponent, a key that most queries agree on, has no weight that float32 can hold, and gets zero; where a
            head has exponents beyond 60, that margin of 60 shrinks by as much, down to 22. Needs normalization="sum"
            and, where sampled, one hash_code_len, backward="sampled" and no local_window.
        local_window: >= 0. Pairs of positions at most so far apart get their exact weight, and only the others are
            sampled: the same expectation with less noise, at a cost of O(N local_window). Needs N = M. 0: none, not
            even a position with itself. Nothing changes where the expectation is computed.
        scale: of similarity="softmax" only, above 0; None: D ** -0.5.

    Returns:
        [B, H, N, Dv], in value's dtype.

    Raises:
        ValueError: an argument out of range, or shapes, dtypes or devices that do not fit; the message names it.
        NotImplementedError: query, key or value has a tangent, as in torch.func.jvp.
    """
    _check(query, key, value, normalization, backward, expectation, similarity, local_window, scale)
    check_mask("key_mask", key_mask, key)
    check_mask("query_mask", query_mask, query)
    _refuse_tangents(query, key, value)
    heads, head_dim = query.shape[1], query.shape[3]
    if hash_functions is not None:
        _check_hash_functions(hash_functions, query)
        num_hash = hash_functions.num_hash
        if isinstance(hash_code_len, int):
            hash_code_len = hash_functions.hash_code_len
    check_integer("num_hash", num_hash, 1)
    _check_hash_code_len(hash_code_len, heads, expectation, hash_functions)
    if similarity == "softmax" and expectation is not True:
        _check_sampled_softmax(hash_code_len, backward, local_window)
    if expectation == "auto":
        expectation = exact_is_cheaper(
            query.shape[2], key.shape[2], num_hash, similarity, query.device.type, query.dtype
        )

    out_dtype = dtype = value.dtype
    if not query.dtype == key.dtype == dtype:
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if similarity == "softmax":
        scale = scale or head_dim**-0.5
        if expectation:
            return _softmax(query, key, value, key_mask, scale).to(out_dtype)
        if dtype == torch.float16:
            # weights span more than its range
            query, key, value = query.float(), key.float(), value.float()
        if hash_functions is None:
            hash_functions = HashFunctions.sample(heads, head_dim, num_hash, hash_code_len, device=query.device)
        with _without_autocast(query.device):
            return _sampled_softmax(query, key, value, query_mask, key_mask, hash_functions, scale).to(out_dtype)
    # sums of many values, or of small weights, leave float16's range; CUDA's kernels scale them before they round
    scaled_late = normalization == "sum" or (normalization == "l2" and not (query.is_cuda and HAS_CUDA_KERNELS))
    if dtype == torch.float16 and (scaled_late or (local_window > 0 and not expectation)):
        query, key, value = query.float(), key.float(), value.float()
    if normalization == "sum":
        # the weights' sum is a column more; zeros before it keep rows aligned to 8 elements, as GPUs read them best
        columns, weight = value.shape[3], value.new_ones(*value.shape[:-1], 1)
        value = torch.cat([value, value.new_zeros(*value.shape[:-1], -(columns + 1) % 8), weight], dim=-1)
    unit = normalization == "l2"
    if expectation:
        # a zero value adds nothing, and a zero key gets no gradient
        key, value = (less_masked(x, real_rows(key_mask)) for x in (key, value))

    def of_heads(hash_code_len: int, functions: HashFunctions | None, query, key, value) -> Tensor:
        exact_attention = expectation_attention_graph if torch.onnx.is_in_onnx_export() else expectation_attention
        if expectation:
            out, _ = exact_attention(query, key, value, hash_code_len, backward == "exact", unit)
            return out
        if functions is None:
            sizes = (query.shape[1], head_dim, num_hash, hash_code_len)
            functions = HashFunctions.sample(*sizes, device=query.device)
        query_codes = functions.codes(query.detach())
        key_codes = functions.codes(key.detach(), key_mask)
        exact_sum, scaled = backward == "expectation", unit and local_window == 0
        attend = sampled_attention_graph if torch.onnx.is_in_onnx_export() else sampled_attention
        out, _ = attend(query, key, value, query_codes, key_codes, hash_code_len, exact_sum, scaled)
        if local_window > 0:
            if exact_sum:
                # their gradient is the exact sum over all pairs already
                query, key = query.detach(), key.detach()
            out = out + local_attention(query, key, value, query_codes, key_codes, hash_code_len, local_window)
            if unit:
                out = _scaled_to_unit(out)
        return out

    if isinstance(hash_code_len, int):
        out = of_heads(hash_code_len, hash_functions, query, key, value)
    else:
        # heads of the same length together; not by lists as indices, which no CUDA graph copies to the GPU
        outs = [None] * heads
        for length in sorted(set(hash_code_len)):
            chosen = [head for head in range(heads) if hash_code_len[head] == length]
            functions = None if hash_functions is None else hash_functions.part(chosen, length)
            rows = (torch.stack([x[:, head] for head in chosen], dim=1) for x in (query, key, value))
            for head, out in zip(chosen, of_heads(length, functions, *rows).unbind(1), strict=True):
                outs[head] = out
        out = torch.stack(outs, dim=1)
    if normalization == "sum":
        out = _divide(out[..., :columns], out[..., -1:])
    return out.to(out_dtype)


@torch.no_grad()
def attention_weights(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None = None,
    *,
    hash_code_len: int | list[int] | tuple[int, ...] = 9,
    normalization: Literal["l2", "sum"] | None = "l2",
    similarity: Literal["cosine", "softmax"] = "cosine",
    scale: float | None = None,
) -> Tensor:
    """The weights of yoso_attention with expectation=True, whole: for looking at, not for computing with.

    Args:
        query, key, key_mask, hash_code_len, similarity, scale: as for yoso_attention.
        normalization: "sum": rows add up to one; else the kernel's values.

    Returns:
        [B, H, N, M], in query's dtype.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    with _without_autocast(query.device):
        if similarity == "softmax":
            logarithms = (scale or query.shape[3] ** -0.5) * query.to(wide) @ key.to(wide).mT
            if key_mask is not None:
                logarithms = logarithms.masked_fill(~key_mask[:, None, None], torch.finfo(wide).min)
            weights = logarithms.softmax(-1)
        else:
            cosine = _wide_unit_rows(query) @ _wide_unit_rows(key).mT
            weights, _ = _kernel(cosine, _by_head(hash_code_len, query))
    if key_mask is not None:
        weights = weights.masked_fill(~key_mask[:, None, None], 0)
    if normalization == "sum":
        weights = _divide(weights, weights.sum(-1, keepdim=True))
    return weights.to(query.dtype)


def _without_autocast(device: torch.device) -> AbstractContextManager:
    # not by is_autocast_available, which torch 2.11 cannot compile
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _by_head(hash_code_len: int | list[int] | tuple[int, ...], like: Tensor) -> int | Tensor:
    """One number, or [H, 1, 1]."""
    # a tensor of one number would have to be copied to a GPU
    return hash_code_len if isinstance(hash_code_len, int) else like.new_tensor(hash_code_len).view(-1, 1, 1)


def _softmax(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention, by the faster of the CPU kernel and PyTorch's own."""
    if query.device.type == "cpu" and HAS_CPU_KERNELS and not torch.onnx.is_in_onnx_export():
        out, _ = softmax_attention(query, key, value, key_mask, scale)
        return out
    attn_mask = None
    if key_mask is not None:
        key, value = (less_masked(x, real_rows(key_mask)) for x in (key, value))
        # where no key is real, all are taken, whose values are zero: no kernel has to divide by zero
        attn_mask = (key_mask | ~key_mask.any(1, keepdim=True))[:, None, None]
    with _without_autocast(query.device):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)


def _sampled_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    functions: HashFunctions,
    scale: float,
) -> Tensor:
    """Softmax attention, exact in the first order of the exponent and in the heaviest keys, else sampled."""
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    real_queries, real_keys = real_rows(query_mask), real_rows(key_mask)
    query, key = less_masked(query, real_queries), less_masked(key.to(wide), real_keys)
    value = less_masked(value, real_keys)
    with torch.no_grad():
        # softmax does not notice what is taken from all keys, nor, with the keys' weights, what is from all queries
        num_queries = (
            max(query.shape[2], 1) if real_queries is None else real_queries.sum(2, keepdim=True).clamp(min=1)
        )
        query_mean = query.sum(2, keepdim=True, dtype=wide) / num_queries
    logarithm = scale * (key @ query_mean.mT)
    if real_keys is not None:
        logarithm = logarithm.masked_fill(~real_keys, -math.inf)
    if key.shape[2] > 0:
        logarithm = logarithm - logarithm.detach().amax(2, keepdim=True).clamp(min=torch.finfo(wide).min)
    weight = logarithm.exp()
    heavy = weight.detach().topk(min(NUM_HEAVY_KEYS, key.shape[2]), dim=2).indices
    light = weight.scatter(2, heavy, 0)
    with torch.no_grad():
        # so that the first order adds nothing to the sum of the light keys' weights, and the rest only adds to it;
        # without light keys, so that what all keys share is taken off them all the same
        averaged = torch.where(light.any(2, keepdim=True), light, weight)
        key_mean = _divide(averaged.mT @ key, averaged.sum(2, keepdim=True))
    # as wide as their means
    query, key, weight, light = query - query_mean, key - key_mean, weight.squeeze(-1), light.squeeze(-1)
    length = _bits_for(key.shape[2], functions.hash_code_len)
    functions = functions.part(None, length)
    query_codes = functions.codes(query.detach(), query_mask)
    key_codes = functions.codes(key.detach(), key_mask)
    rows = query.to(dtype), key.to(dtype), value
    with torch.no_grad():
        # no dot product is larger than that of the longest rows
        longest = scale * _longest(query, real_queries) * _longest(key, real_keys)
        shift = ((longest - MAX_LOGARITHM) / math.log(2)).ceil().nan_to_num(0).clamp(0, MAX_SHIFT).int()
    remainder = sampled_remainder(*rows, light, shift, query_codes, key_codes, length, scale)
    out, _ = first_order_attention(*rows, weight, shift, heavy.squeeze(-1), *remainder, scale)
    return out


def _longest(x: Tensor, real: Tensor | None) -> Tensor:
    """The largest length of a head's rows, [B, H], 0 where there are none."""
    # on a CPU, torch.linalg.vector_norm takes twice as long
    squares = x.square().sum(-1)
    if real is not None:
        squares = squares.masked_fill(~real.squeeze(-1), 0)
    return F.pad(squares, (0, 1)).amax(-1).sqrt()


def _bits_for(num_keys: int, highest: int) -> int:
    """As many as leave at most one key on average to a bucket, of a code and its complement, but FEWEST_BITS."""
    # an exported program has codes of one length
    if _is_exporting_any_length(num_keys):
        return highest
    bits = min(FEWEST_BITS, highest)
    # without a logarithm, which a graph of any length could not be asked for
    while bits < highest and num_keys > 1 << (bits - 1):
        bits += 1
    return bits


def _divide(out: Tensor, total: Tensor) -> Tensor:
    # by infinity where there is no weight: a quotient that is masked afterwards would have the gradient 0 * inf, as
    # would one by a total whose inverse is out of float32's range
    return out / torch.where(total > SMALLEST_TOTAL, total, math.inf)


def _scaled_to_unit(out: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(out, dim=-1, keepdim=True, dtype=torch.promote_types(out.dtype, torch.float32))
    return _divide(out, length)


def _refuse_tangents(*tensors: Tensor) -> None:
    # which the operators would drop in silence
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("YOSO attention has no forward-mode derivatives, as torch.func.jvp and jacfwd take")


def _check_similarity(similarity: str) -> None:
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity must be one of {SIMILARITIES}, got {similarity!r}")


def _check(query, key, value, normalization, backward, expectation, similarity, local_window, scale) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape [B, H, rows, columns], got {_shape(tensor)}")
        check_floating(name, tensor)
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, but query is on {query.device}: they must share a device")
        if tensor.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} must have query's batch and heads {_shape(query)[:2]}, got shape {_shape(tensor)}"
            )
    if query.shape[3] == 0:
        raise ValueError(f"query must have a head_dim of at least 1, got shape {_shape(query)}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key must have query's head_dim {query.shape[3]}, got {key.shape[3]}")
    if value.shape[2] != key.shape[2]:
        raise ValueError(f"value must have key's length {key.shape[2]}, got {value.shape[2]}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {NORMALIZATIONS}, got {normalization!r}")
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {BACKWARDS}, got {backward!r}")
    # 1 == True, but the range of hash_code_len and the settings' defaults go by True itself
    if not isinstance(expectation, bool) and expectation != "auto":
        raise ValueError(f"expectation must be one of {EXPECTATIONS}, got {expectation!r}")
    _check_similarity(similarity)
    if similarity == "softmax" and normalization != "sum":
        raise ValueError(f'similarity="softmax" needs normalization="sum", as softmax has it, got {normalization!r}')
    if scale is not None and (
        similarity != "softmax" or not isinstance(scale, (int, float, torch.SymFloat)) or not 0 < scale < math.inf
    ):
        raise ValueError(
            f'scale must be None, or a number above 0 with similarity="softmax", got {scale!r} with {similarity!r}'
        )
    if backward == "exact" and expectation in (False, "auto"):
        raise ValueError(
            f'backward="exact" needs expectation=True, got {expectation!r}: a sampled collision has no derivative'
        )
    check_integer("local_window", local_window, 0)
    if local_window > 0 and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"local_window needs as many queries as keys, got {query.shape[2]} and {key.shape[2]}: "
            "it counts positions of one sequence"
        )


def _check_sampled_softmax(hash_code_len, backward, local_window) -> None:
    note = f'unless expectation=True ({IN_CONFIGURATIONS}): samples of similarity="softmax" take no other'
    if not isinstance(hash_code_len, int):
        raise ValueError(f"hash_code_len must be one number, got {hash_code_len}, {note}")
    if backward != "sampled":
        raise ValueError(f'backward must be "sampled", got {backward!r}, {note}')
    if local_window != 0:
        raise ValueError(f"local_window must be 0, got {local_window}, {note}")


def _check_hash_code_len(hash_code_len, heads: int, expectation, functions: HashFunctions | None) -> None:
    highest, note = (MAX_EXACT_HASH_CODE_LEN, "") if expectation is True else (MAX_HASH_CODE_LEN, EXACT_RANGE)
    if not isinstance(hash_code_len, (list, tuple)):
        check_integer("hash_code_len", hash_code_len, 1, highest, note)
        return
    if not all(isinstance(length, int) and 1 <= length <= highest for length in hash_code_len):
        raise ValueError(f"hash_code_len must be in 1..{highest}, got {hash_code_len}{note}")
    if len(hash_code_len) != heads:
        raise ValueError(f"hash_code_len must be one number or {heads}, one for each head, got {len(hash_code_len)}")
    if functions is not None and max(hash_code_len) > functions.hash_code_len:
        raise ValueError(
            f"hash_code_len must be at most that of hash_functions, {functions.hash_code_len}, got {hash_code_len}"
        )


def _check_hash_functions(functions: HashFunctions, query: Tensor) -> None:
    if not isinstance(functions, HashFunctions):
        raise ValueError(f"hash_functions must be None or HashFunctions, got {type(functions).__name__}")
    heads = functions.parameters.shape[0]
    if (heads, functions.head_dim) != (query.shape[1], query.shape[3]):
        raise ValueError(
            f"hash_functions are for {heads} heads of {functions.head_dim}, "
            f"but query has {query.shape[1]} heads of {query.shape[3]}"
        )
    if functions.parameters.device != query.device:
        raise ValueError(
            f"hash_functions are on {functions.parameters.device}, but query is on {query.device}: "
            "they must share a device"
        )


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
