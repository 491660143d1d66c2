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
    _hadamard,
    _kernel,
    _wide_unit_rows,
    sampled_attention,
)


def hash_hadamard_graph(
    x: Tensor, parameters: Tensor, mask: Tensor | None, num_hash: int, hash_code_len: int
) -> Tensor:
    """Codes by signs of H G H D2 H D1 x, with H as a matrix."""
    size = parameters.shape[-1]
    x = torch.nn.functional.pad(_accumulator(x), (0, size - x.shape[-1]))
    matrix = _hadamard(torch.eye(size, dtype=x.dtype, device=x.device))
    signs, scales = parameters.to(x.dtype)[:, :, None].split([2, parameters.shape[1] - 2], dim=1)
    rotated = ((x * signs[:, 0]) @ matrix * signs[:, 1]) @ matrix
    projections = (rotated[:, :, None] * scales) @ matrix
    # [B, H, tau * groups, N, P] to [B, H, tau, groups * P, N]
    projections = projections.unflatten(2, (hash_code_len, -1)).transpose(-1, -2).flatten(3, 4)
    return _codes(projections[:, :, :, :num_hash], mask)


def hash_gaussian_graph(
    x: Tensor, parameters: Tensor, mask: Tensor | None, num_hash: int, hash_code_len: int
) -> Tensor:
    """Codes by signs of projections on given directions."""
    x = _accumulator(x)
    projections = parameters.to(x.dtype) @ x.transpose(-1, -2)
    return _codes(projections.unflatten(2, (hash_code_len, num_hash)), mask)


def sampled_attention_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    hash_code_len: int,
    expectation_backward: bool,
    unit: bool,
) -> tuple[Tensor, Tensor]:
    """Mean over the hash functions, each of them a head of its own with one hash function."""
    num_hash = query_codes.shape[2]
    source = _accumulator(value).repeat_interleave(num_hash, dim=1)
    query_codes, key_codes = (codes.flatten(1, 2)[:, :, None] for codes in (query_codes, key_codes))
    out, _ = sampled_attention(query, key, source, query_codes, key_codes, hash_code_len, expectation_backward, False)
    return _finish_output(out.unflatten(1, (-1, num_hash)).mean(dim=2).to(value.dtype), unit)


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
