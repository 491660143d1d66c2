"""Cases of one attention call, [batch, heads, N, 64], of which the attention benchmarks compare some.

A case is verified at its full size, against the dense weights of a few queries in float64: the outputs of these
queries, and the gradients of all of query, key and value where only these outputs have a gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import Case, check_close
from torch import Tensor
from transformers.models.yoso.modeling_yoso import YosoCumulation

HEAD_DIM, NUM_HASH = 64, 32
VERIFIED_QUERIES = 16
# of float32 sums over thousands of terms; of rounding to bfloat16 in between
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass
class AttentionCase(Case):
    """One implementation of attention on random tensors.

    task: "forward", "backward" (of a forward that was done before) or "forward and backward".
    data: "random", "equal keys", "clustered keys" (8 tight clusters) or "clustered queries and keys".
    """

    task: str
    length: int
    heads: int = 12
    hash_code_len: int = 9
    dtype: str = "float32"
    data: str = "random"
    batch: int = 1

    # whether the outputs are scaled to length one
    unit_output = True

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention itself."""
        raise NotImplementedError

    def codes(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | tuple[()]:  # noqa: ARG002
        """Codes [batch, heads, m, length] of query and key from the hash functions that `attend` uses, if any."""
        return ()

    def weights(self, query: Tensor, key: Tensor, *codes: Tensor) -> Tensor:
        """What the weights of some queries of one sequence should be, and their gradient, from float64 tensors.

        `verified` holds the queries' positions, codes are those of these queries and of the keys.
        """
        raise NotImplementedError

    def setup(self) -> None:
        torch.manual_seed(0)
        tensors = dict(
            zip(("query", "key", "value", "grad"), (self._random(self.length) for _ in range(4)), strict=True)
        )
        if self.data == "equal keys":
            tensors["key"] = tensors["key"][:, :, :1].expand_as(tensors["key"])
        elif self.data != "random":
            centres = self._random(8)
            for name in ("query", "key") if self.data == "clustered queries and keys" else ("key",):
                cluster = torch.randint(8, (self.length,), device=self.device)
                tensors[name] = centres[:, :, cluster] + 0.01 * tensors[name]
        # in memory as a model's projections are: heads side by side in a token's row
        dtype = getattr(torch, self.dtype)
        query, key, value, self.grad = (
            x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype) for x in tensors.values()
        )
        self.inputs = [x.requires_grad_() for x in (query, key, value)]
        if self.task == "backward":
            self.out = self.attend(*self.inputs)

    def _random(self, length: int) -> Tensor:
        return torch.randn(self.batch, self.heads, length, HEAD_DIM, device=self.device)

    def run(self) -> object:
        if self.task == "backward":
            return torch.autograd.grad(self.out, self.inputs, self.grad, retain_graph=True)
        if self.task == "forward and backward":
            return torch.autograd.grad(self.attend(*self.inputs), self.inputs, self.grad)
        with torch.no_grad():
            return self.attend(*self.inputs)

    def verify(self) -> None:
        self.verified = queries = torch.randperm(self.length, device=self.device)[:VERIFIED_QUERIES]
        # whatever is drawn inside is drawn the same again
        torch.manual_seed(1)
        out = self.attend(*self.inputs)
        torch.manual_seed(1)
        with torch.no_grad():
            codes = self.codes(*self.inputs[:2])
        if codes:
            codes = codes[0][..., queries], codes[1]
        grad, given = self.grad[:, :, queries], ()
        if self.task != "forward":
            given = torch.autograd.grad(out, self.inputs, torch.zeros_like(out).index_copy(2, queries, grad))
        # one sequence at a time: all in float64 would take more memory than some GPUs have
        for i in range(self.batch):
            one = slice(i, i + 1)
            self._verify_sequence(out[one][:, :, queries], grad[one], [x[one] for x in given], one, codes)

    def _verify_sequence(
        self, out: Tensor, grad: Tensor, given: list[Tensor], one: slice, codes: tuple[Tensor, ...]
    ) -> None:
        inputs = [x.detach()[one].double().requires_grad_() for x in self.inputs]
        query, key, value = inputs
        truth = self.weights(query[:, :, self.verified], key, *(code[one] for code in codes)) @ value
        if self.unit_output:
            truth = F.normalize(truth, dim=-1)
        tolerance = TOLERANCE[self.dtype]
        check_close("the output", out, truth, tolerance)
        if not given:
            return
        expected = torch.autograd.grad(truth, inputs, grad.double())
        # the query's is zero, up to rounding, where all keys are equal
        scale = max(x.norm() for x in expected)
        for name, *pair in zip(("query", "key", "value"), given, expected, strict=True):
            check_close(f"the gradient of {name}", *pair, tolerance, scale)


class Softmax(AttentionCase):
    """torch's own attention."""

    name = "softmax (sdpa)"
    unit_output = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def weights(self, query: Tensor, key: Tensor, *_codes: Tensor) -> Tensor:
        return (query @ key.mT / HEAD_DIM**0.5).softmax(dim=-1)


class ExactKernel(AttentionCase):
    """YOSO's weights in expectation."""

    def weights(self, query: Tensor, key: Tensor, *_codes: Tensor) -> Tensor:
        cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
        weights = (1 - cosine.detach().clamp(-1, 1).acos() / torch.pi) ** self.hash_code_len
        return with_lower_bound(weights, cosine, self.hash_code_len)


class TransformersYoso(ExactKernel):
    """The expectation as transformers' Yoso model computes it."""

    name = "transformers' Yoso"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = query.new_ones(self.batch * self.heads, self.length)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        flat = [x.flatten(0, 1) for x in (query, key, value)]
        out = YosoCumulation.apply(mask, mask, *flat, {"hash_code_len": self.hash_code_len})
        if self.unit_output:
            out = F.normalize(out, dim=-1)
        return out.view_as(value)


class SampledKernel(AttentionCase):
    """YOSO's weights as some hash functions' codes have them."""

    def weights(self, query: Tensor, key: Tensor, *codes: Tensor) -> Tensor:
        collisions = 0
        for query_code, key_code in zip(*(code.unbind(2) for code in codes), strict=True):
            collisions = collisions + (query_code[..., :, None] == key_code[..., None, :]).float()
        cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
        return with_lower_bound(collisions.double() / NUM_HASH, cosine, self.hash_code_len)


def with_lower_bound(weights: Tensor, cosine: Tensor, hash_code_len: int) -> Tensor:
    """These weights, with the lower bound of their slope, tau / 2 times the weight, for their gradient."""
    return weights * (1 + hash_code_len / 2 * (cosine - cosine.detach()))
