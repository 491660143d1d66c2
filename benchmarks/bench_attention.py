"""Time and peak memory of yoso_attention beside torch's softmax attention, and the table of what is asked of it.

    python benchmarks/bench_attention.py
    python benchmarks/bench_attention.py --groups lengths --lengths 512 4096 --output attention.json
    python benchmarks/bench_attention.py --groups crowded growth --output crowded.json

[1, 12, N, 64], float32, m = 32, tau = 9 unless a group says otherwise. The groups:

lengths: sampled and in expectation beside softmax, from short to long, with peak memory; in --dtype;
similarity: samples of similarity="softmax", m = 64, and its exact kernel beside softmax, at the same lengths; in
--dtype. Samples are verified by the mean of many, which takes minutes: only where this group is named;
crowded: all keys equal, or in 8 tight clusters;
growth: from N to 16 N; the same with tau raised by one for every doubling; from 32 N to 64 N with 2 heads;
expectation: beside transformers' Yoso;
bfloat16: beside float32;
local_window: with the exact weights of near pairs, by how near, beside softmax.
"""

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from attention_cases import (
    HEAD_DIM,
    NUM_HASH,
    VERIFIED_QUERIES,
    ExactKernel,
    SampledKernel,
    Softmax,
    TransformersYoso,
)
from harness import argument_parser, check_close, compare, measure, parse_arguments, print_table, write_results
from torch import Tensor

from yoso_hf import HashFunctions, yoso_attention

BOTH = "forward and backward"
# times as fast as softmax, by length: asked, aim
ASKED = {
    "forward": {512: (3, 6), 4096: (25, 50), 16384: (100, 200)},
    BOTH: {512: (3, 5), 4096: (14, 25), 16384: (25, 45)},
}

# of random tensors, of which a single estimate is off by twice the result
SOFTMAX_DRAWS, SOFTMAX_TOLERANCE, SOFTMAX_GRADIENT_TOLERANCE = 64, 0.4, 0.6

Rows = list[dict[str, Any]]


class Sampled(SampledKernel):
    """Hash functions are drawn in the call, as they are in training."""

    name = "yoso"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return yoso_attention(query, key, value, hash_code_len=self.hash_code_len, num_hash=NUM_HASH)

    def codes(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        functions = HashFunctions.sample(self.heads, HEAD_DIM, NUM_HASH, self.hash_code_len, device=self.device)
        return functions.codes(query), functions.codes(key)


@dataclass
class LocalWindow(Sampled, ExactKernel):
    """Near pairs have their exact weight."""

    local_window: int = 16

    name = "yoso with local_window"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = {"hash_code_len": self.hash_code_len, "num_hash": NUM_HASH}
        return yoso_attention(query, key, value, **sizes, local_window=self.local_window)

    def weights(self, query: Tensor, key: Tensor, *codes: Tensor) -> Tensor:
        distance = (self.verified[:, None] - torch.arange(self.length, device=self.device)).abs()
        exact, sampled = ExactKernel.weights(self, query, key), Sampled.weights(self, query, key, *codes)
        return torch.where(distance <= self.local_window, exact, sampled)


class Expectation(ExactKernel):
    name = "yoso expectation"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return yoso_attention(query, key, value, hash_code_len=self.hash_code_len, expectation=True)


class ExactSoftmax(Softmax):
    name = "yoso, softmax"
    settings: ClassVar[dict[str, Any]] = {"expectation": True}

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return yoso_attention(query, key, value, similarity="softmax", normalization="sum", **self.settings)


class SampledSoftmax(ExactSoftmax):
    """What attn_implementation="yoso" computes where it samples."""

    name = "yoso, samples of softmax"
    settings: ClassVar[dict[str, Any]] = {"hash_code_len": 16, "num_hash": 64}

    def verify(self) -> None:
        queries = torch.randperm(self.length, device=self.device)[:VERIFIED_QUERIES]
        grad = torch.zeros_like(self.grad).index_copy(2, queries, self.grad[:, :, queries])
        means, truths = [0] * 4, []
        for draw in range(SOFTMAX_DRAWS + 1):
            exact = draw == SOFTMAX_DRAWS
            out = Softmax.attend(self, *self.inputs) if exact else self.attend(*self.inputs)
            gradients = torch.autograd.grad(out, self.inputs, grad) if self.task != "forward" else ()
            found = [x.detach().double() for x in (out[:, :, queries], *gradients)]
            if exact:
                truths = found
            else:
                means = [mean + x / SOFTMAX_DRAWS for mean, x in zip(means, found, strict=False)]
        names = ("the output", "the gradient of query", "the gradient of key", "the gradient of value")
        for name, mean, truth in zip(names, means, truths, strict=False):
            check_close(name, mean, truth, SOFTMAX_TOLERANCE if name == "the output" else SOFTMAX_GRADIENT_TOLERANCE)


def lengths(args: argparse.Namespace) -> tuple[Rows, Rows]:
    rows, table = [], []
    for length in args.lengths:
        for task, asked in ASKED.items():
            cases = [kind(args.device, task, length, dtype=args.dtype) for kind in (Sampled, Expectation, Softmax)]
            group = measure(cases, args.repeats, args.seconds, memory=True)
            rows += group
            if length in asked:
                name = f"{task}, N = {length}: times as fast as softmax"
                ratio = group[-1]["times_the_first"]
                table.append(compare(name, ratio, asked=asked[length][0], aim=asked[length][1]))
    return rows, table


def similarity(args: argparse.Namespace) -> tuple[Rows, Rows]:
    rows = []
    for length in args.lengths:
        for task in ASKED:
            kinds = (SampledSoftmax, ExactSoftmax, Softmax)
            cases = [kind(args.device, task, length, dtype=args.dtype) for kind in kinds]
            rows += measure(cases, args.repeats, args.seconds)
    # nothing is asked of them
    return rows, []


def crowded(args: argparse.Namespace) -> tuple[Rows, Rows]:
    rows, table = [], []
    for data in ("equal keys", "clustered keys", "clustered queries and keys"):
        cases = [kind(args.device, BOTH, args.length, data=data) for kind in (Sampled, Softmax)]
        sampled, softmax = measure(cases, args.repeats, args.seconds)
        rows += sampled, softmax
        name = f"{BOTH}, {data}, N = {args.length}: times as fast as softmax"
        table.append(compare(name, softmax["ms"] / sampled["ms"], asked=1, aim=4))
    return rows, table


def growth(args: argparse.Namespace) -> tuple[Rows, Rows]:
    n = args.length
    device = args.device
    comparisons = [
        ("forward", Sampled(device, "forward", n), Sampled(device, "forward", 16 * n), 18, 16),
        (
            f"{BOTH}, tau = 9 and 13",
            Sampled(device, BOTH, n),
            Sampled(device, BOTH, 16 * n, hash_code_len=13),
            24,
            18,
        ),
        (
            f"{BOTH}, 2 heads",
            Sampled(device, BOTH, 32 * n, heads=2),
            Sampled(device, BOTH, 64 * n, heads=2),
            2.2,
            2.05,
        ),
    ]
    rows, table = [], []
    for what, *cases, asked, aim in comparisons:
        short, long = measure(cases, args.repeats, args.seconds)
        rows += short, long
        name = f"{what}: time at N = {long['length']} over {short['length']}"
        table.append(compare(name, long["ms"] / short["ms"], asked=asked, aim=aim))
    return rows, table


def expectation(args: argparse.Namespace) -> tuple[Rows, Rows]:
    rows, table = [], []
    for task in ("forward", BOTH):
        ours, peer = measure(
            [kind(args.device, task, args.length) for kind in (Expectation, TransformersYoso)],
            args.repeats,
            args.seconds,
        )
        rows += ours, peer
        name = f"expectation, {task}, N = {args.length}: times as fast as transformers' Yoso"
        table.append(compare(name, peer["ms"] / ours["ms"], asked=5, aim=10))
    return rows, table


def bfloat16(args: argparse.Namespace) -> tuple[Rows, Rows]:
    dtypes = ("bfloat16", "float32")
    half, full = measure(
        [Sampled(args.device, "forward", args.length, dtype=dtype) for dtype in dtypes], args.repeats, args.seconds
    )
    name = f"forward in bfloat16, N = {args.length}: times as fast as in float32"
    return [half, full], [compare(name, full["ms"] / half["ms"], asked=1, aim=1.5)]


def local_window(args: argparse.Namespace) -> tuple[Rows, Rows]:
    rows = []
    for task in ("forward", BOTH):
        near = [LocalWindow(args.device, task, args.length, local_window=window) for window in (64, 128, 256)]
        cases = [Sampled(args.device, task, args.length), *near, Softmax(args.device, task, args.length)]
        rows += measure(cases, args.repeats, args.seconds)
    # nothing is asked of them
    return rows, []


GROUPS = {
    group.__name__: group for group in (lengths, crowded, growth, expectation, bfloat16, local_window, similarity)
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=[*GROUPS][:-1])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(7, 15)], help="of these groups")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of lengths and similarity"
    )
    parser.add_argument("--length", type=int, default=4096, help="N of the other groups")
    args = parse_arguments(parser)
    rows, table = [], []
    for name in args.groups:
        group_rows, group_table = GROUPS[name](args)
        rows += [{"group": name, **row} for row in group_rows]
        table += group_table
    print_table(table)
    write_results(args, rows, table)


if __name__ == "__main__":
    main()
