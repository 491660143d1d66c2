"""The forward operators as graphs of PyTorch's own operators, for the ONNX exporter, which knows no others.

They compute what reference.py defines, without loops over hash functions or blocks: a graph is as large for many hash
functions as for one, and batch and lengths may be symbolic. That takes memory: [B, H, N, M] in the exact one,
[B, H, m, N, Dv] in the sampled one.
"""

import torch
from torch import Tensor

from .reference import (
    _accumulator,
    _finish_output,
    _hadamard_directions,
    _kernel,
    _through_buckets,
    _wide_unit_rows,
)


def hash_hadamard_graph(
    x: Tensor, parameters: Tensor, mask: Tensor | None, num_hash: int, hash_code_len: int
) -> Tensor:
    """Codes by signs of H G H D2 H D1 x."""
    directions = _hadamard_directions(parameters.to(_accumulator(x).dtype), x.shape[3], num_hash, hash_code_len)
    return hash_gaussian_graph(x, directions, mask, num_hash, hash_code_len)


def hash_gaussian_graph(
    x: Tensor, parameters: Tensor, mask: Tensor | None, num_hash: int, hash_code_len: int
) -> Tensor:
    """Codes by signs of projections on given directions."""
    x = _accumulator(x)
    projections = parameters.to(x.dtype) @ x.transpose(-1, -2)
    return _codes(projections.unflatten(2, (hash_code_len, num_hash)), mask)


def sampled_attention_graph(
    query: Tensor,  # noqa: ARG001
    key: Tensor,  # noqa: ARG001
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
    expectation_backward: bool,  # noqa: ARG001
    unit: bool,
) -> tuple[Tensor, Tensor]:
    """Mean over the hash functions, each of them a head of its own with one hash function."""
    num_hash = query_codes.shape[2]
    source = _accumulator(value).repeat_interleave(num_hash, dim=1).flatten(0, 1)
    sums = _through_buckets(source, query_codes.flatten(0, 2), key_codes.flatten(0, 2), hash_code_len)
    out = sums.unflatten(0, (*value.shape[:2], num_hash)).mean(dim=2)
    return _finish_output(out.to(value.dtype), unit)


def expectation_attention_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hash_code_len: int,
    exact_backward: bool,  # noqa: ARG001
    unit: bool,
) -> tuple[Tensor, Tensor]:
    """p(query . key) value, with the matrix of weights."""
    cosine = _wide_unit_rows(query) @ _wide_unit_rows(key).transpose(-1, -2)
    weights, _ = _kernel(cosine, hash_code_len)
    return _finish_output((weights @ _accumulator(value)).to(value.dtype), unit)


def _codes(projections: Tensor, mask: Tensor | None) -> Tensor:
    """Codes [B, H, m, N] of projections [B, H, tau, m, N]; int32 always: ONNX Runtime lacks operators on int16."""
    place = 2 ** torch.arange(projections.shape[2], dtype=torch.int32, device=projections.device)
    codes = ((projections > 0).int() * place[:, None, None]).sum(dim=2, dtype=torch.int32)
    return codes if mask is None else codes.masked_fill(~mask[:, None, None], -1)
