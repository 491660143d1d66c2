"""Attention and training on a GPU, and the table of what is asked of them there.

    python benchmarks/bench_cuda.py
    python benchmarks/bench_cuda.py --groups attention --lengths 4096 16384 --output attention.json
    git clone https://github.com/mlpen/YOSO && python benchmarks/bench_cuda.py --authors YOSO

[16, 12, N, 64], bfloat16, m = 32, tau = 9. The groups:

attention: beside torch's scaled_dot_product_attention with the fastest of its backends, from short to long;
float32: the same in float32, in which models load unless asked otherwise, at 4096 tokens;
authors: beside the CUDA kernels of the paper's authors, version 1, at 4096 tokens; theirs are float32 only. They are
    built by nvcc from the clone that --authors names, and left out without one;
training: tokens a second and the largest batch of a base-size masked language model at 4096 tokens, bfloat16
    autocast, forward, loss and backward, beside RoBERTa with scaled_dot_product_attention; as RoBERTa does it, and
    with sparse_prediction, which is what scripts/run_mlm.py trains;
ways: forward and backward with the latter by pairs and by buckets (docs/cuda.md), about where they cross;
exact: the exact weights beside samples and softmax, about where these cross;
kernels: what each kernel of our attention takes, by torch's profiler; some begin before those before them have ended,
    so that their times add up to more than the whole. Left out unless it is named.
"""

import argparse
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from attention_cases import NUM_HASH, SampledKernel, Softmax
from bench_attention import BOTH, Expectation, Sampled
from harness import Case, WrongResult, argument_parser, compare, measure, parse_arguments, print_table, write_results
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.cpp_extension import load
from transformers import PreTrainedModel, RobertaConfig, RobertaForMaskedLM

from yoso_hf import YosoConfig, YosoForMaskedLM

BATCH = 16
# times as fast as softmax, by length: asked, aim
ASKED = {
    "forward": {4096: (1.3, 2.5), 16384: (5, 10), 65536: (20, 40)},
    BOTH: {4096: (1, 2), 16384: (4, 8), 65536: (15, 30)},
}
# asked, aim for times as fast as softmax in float32
ASKED_OF_FLOAT32 = (1, 2)
FLOAT32_LENGTH = 4096
# asked, aim for 16 times the length
GROWTH = (18, 16)
FAST_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION")
# several times as slow, for where there is neither
OTHER_BACKEND = "EFFICIENT_ATTENTION"
# asked, aim for times as fast as the authors' kernels
ASKED_OF_AUTHORS = (8, 20)
AUTHORS_LENGTH = 4096
AUTHORS_SOURCES = "encoders/backbones/efficient_attentions/yoso/yoso_v1/cuda"
TRAINING_LENGTH = 4096
LENGTHS_OF_WAYS = (2048, 4096, 8192)
LENGTHS_OF_EXACT = (512, 1024, 2048, 4096)
PROFILED_RUNS = 3

Rows = list[dict[str, Any]]
# rows and, of the table, those that they give
Part = tuple[Rows, Rows]


@dataclass
class SoftmaxBackend(Softmax):
    """scaled_dot_product_attention by one of torch's kernels."""

    backend: str = "FLASH_ATTENTION"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            return F.scaled_dot_product_attention(query, key, value)

    def works(self) -> bool:
        """Whether the kernel is there for these inputs, and right."""
        self.setup()
        try:
            self.verify()
        except (RuntimeError, WrongResult) as error:
            print(f"left out: {self.backend} {self.task} {self.length}, {error}")
            return False
        finally:
            del self.inputs, self.grad
        return True


def fast_softmax(*shape: Any, **sizes: Any) -> list[SoftmaxBackend]:
    """Those of torch's kernels that may be the fastest."""
    peers = [SoftmaxBackend(*shape, **sizes, backend=name) for name in FAST_BACKENDS]
    return [peer for peer in peers if peer.works()] or [SoftmaxBackend(*shape, **sizes, backend=OTHER_BACKEND)]


def beside_softmax(args: argparse.Namespace, task: str, length: int, dtype: str) -> tuple[Rows, float]:
    """Rows of our attention and of softmax, and how many times the fastest of these takes as long."""
    shape, sizes = (args.device, task, length), {"batch": BATCH, "dtype": dtype}
    rows = measure([Sampled(*shape, **sizes), *fast_softmax(*shape, **sizes)], args.repeats, args.seconds)
    return rows, min(row["times_the_first"] for row in rows[1:])


def attention(args: argparse.Namespace) -> Iterator[Part]:
    for task, asked in ASKED.items():
        ours = {}
        for length in args.lengths:
            rows, ratio = beside_softmax(args, task, length, "bfloat16")
            ours[length] = rows[0]["ms"]
            table = []
            if length in asked:
                name = f"{task}, N = {length}: times as fast as softmax"
                table.append(compare(name, ratio, asked=asked[length][0], aim=asked[length][1]))
            yield rows, table
        if {4096, 65536} <= ours.keys():
            name = f"{task}: time at N = 65536 over 4096"
            yield [], [compare(name, ours[65536] / ours[4096], asked=GROWTH[0], aim=GROWTH[1])]


def float32(args: argparse.Namespace) -> Iterator[Part]:
    for task in ASKED:
        rows, ratio = beside_softmax(args, task, FLOAT32_LENGTH, "float32")
        name = f"{task}, float32, N = {FLOAT32_LENGTH}: times as fast as softmax"
        yield rows, [compare(name, ratio, asked=ASKED_OF_FLOAT32[0], aim=ASKED_OF_FLOAT32[1])]


def build_authors_kernels(clone: Path) -> Any:
    """The module that the sources in a clone of mlpen/YOSO become."""
    names = ("fast_lsh_cumulation_torch.cpp", "fast_lsh_cumulation.cu", "fast_lsh_cumulation_cuda.cu")
    return load("fast_lsh_cumulation", [str(clone / AUTHORS_SOURCES / name) for name in names])


class AuthorsFunction(torch.autograd.Function):
    """Attention by the authors' kernels, of float32 tensors [B * H, N, D] with unit queries and keys."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, codes: list[Tensor], kernels: Any, tau: int) -> Tensor:
        ctx.kernels, ctx.tau = kernels, tau
        ctx.query_side, ctx.key_side = ((no_padding(code), code) for code in codes)
        ctx.save_for_backward(query, key, value)
        return kernels.lsh_cumulation(*ctx.query_side, *ctx.key_side, value, 2**tau, True, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        query_side, key_side, slope, table_size = ctx.query_side, ctx.key_side, ctx.tau / 2, 2**ctx.tau
        grad = grad.contiguous()
        weighted = ctx.kernels.lsh_weighted_cumulation
        return (
            weighted(*query_side, grad, *key_side, value, slope * key, table_size, True, 4),
            weighted(*key_side, value, *query_side, grad, slope * query, table_size, True, 4),
            ctx.kernels.lsh_cumulation(*key_side, *query_side, grad, table_size, True, 1),
            None,
            None,
            None,
        )


def no_padding(rows: Tensor) -> Tensor:
    return torch.ones(rows.shape[:2], dtype=torch.int32, device=rows.device)


@dataclass
class Authors(SampledKernel):
    """The kernels of the paper's authors, called as their model calls them."""

    # the module of their kernels
    kernels: ClassVar[Any] = None

    name = "mlpen/YOSO v1"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.flatten(0, 1).contiguous() for x in (*unit(query, key), value))
        codes = self.hash(query, key)
        out = AuthorsFunction.apply(query, key, value, codes, self.kernels, self.hash_code_len)
        return F.normalize(out, dim=-1).unflatten(0, (self.batch, self.heads))

    def codes(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.hash(*(x.flatten(0, 1).contiguous() for x in unit(query, key)))
        return tuple(code.mT.unflatten(0, (self.batch, self.heads)) for code in codes)

    def hash(self, query: Tensor, key: Tensor) -> list[Tensor]:
        masks = no_padding(query), no_padding(key)
        sizes = NUM_HASH, self.hash_code_len
        return self.kernels.fast_hash(masks[0], query, masks[1], key, *sizes, True, 1)


def unit(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return F.normalize(query, dim=-1), F.normalize(key, dim=-1)


def authors(args: argparse.Namespace) -> Iterator[Part]:
    if args.authors is None:
        print("authors: left out, as --authors names no clone of mlpen/YOSO")
        return
    Authors.kernels = build_authors_kernels(args.authors)
    for task in ASKED:
        ours = Sampled(args.device, task, AUTHORS_LENGTH, batch=BATCH, dtype="bfloat16")
        theirs = Authors(args.device, task, AUTHORS_LENGTH, batch=BATCH)
        rows = measure([ours, theirs], args.repeats, args.seconds)
        name = f"{task}, N = {AUTHORS_LENGTH}: times as fast as the authors' kernels"
        ratio = rows[1]["times_the_first"]
        yield rows, [compare(name, ratio, asked=ASKED_OF_AUTHORS[0], aim=ASKED_OF_AUTHORS[1])]


@dataclass
class Training(Case):
    """Forward, loss and backward of a masked language model of base size, with random weights."""

    batch: int

    def build(self) -> PreTrainedModel:
        raise NotImplementedError

    def setup(self) -> None:
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = self.build().train()
        self.ids = torch.randint(10, 50000, (self.batch, TRAINING_LENGTH), device=self.device)
        masked = torch.rand(self.ids.shape, device=self.device) < 0.15
        self.labels = self.ids.masked_fill(~masked, -100)

    def run(self) -> Tensor:
        self.model.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.labels).loss
        loss.backward()
        return loss.detach()

    def verify(self) -> None:
        loss = self.run()
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        if not (loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)):
            raise WrongResult("the loss or a gradient is not finite")

    def fits(self) -> bool:
        """Whether the GPU's memory is enough."""
        try:
            self.setup()
            self.run()
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return False
        finally:
            self.model = self.ids = self.labels = None
            torch.cuda.empty_cache()
        return True


class YosoTraining(Training):
    name = "yoso"
    settings: ClassVar[dict[str, Any]] = {}

    def build(self) -> PreTrainedModel:
        sizes = {"vocab_size": 50265, "max_position_embeddings": TRAINING_LENGTH, **self.settings}
        return YosoForMaskedLM(YosoConfig(**sizes, use_expectation=False, num_hash=32, hash_code_len=9))


class SparseYosoTraining(YosoTraining):
    name = "yoso, sparse_prediction"
    settings: ClassVar[dict[str, Any]] = {"sparse_prediction": True}


class SoftmaxTraining(Training):
    name = "roberta (sdpa)"

    def build(self) -> PreTrainedModel:
        sizes = {"vocab_size": 50265, "max_position_embeddings": TRAINING_LENGTH + 2, "type_vocab_size": 1}
        config = RobertaConfig(**sizes, attention_probs_dropout_prob=0.0)
        return RobertaForMaskedLM._from_config(config, attn_implementation="sdpa")


def largest_batch(kind: type[Training], device: str, guess: int) -> int:
    """The most sequences that a step can have, to within a sixteenth."""
    fits, fails = 0, guess
    while kind(device, fails).fits():
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, fits // 16):
        middle = (fits + fails) // 2
        if kind(device, middle).fits():
            fits = middle
        else:
            fails = middle
    return fits


def training(args: argparse.Namespace) -> Iterator[Part]:
    kinds = (YosoTraining, SoftmaxTraining, SparseYosoTraining)
    rows = measure([kind(args.device, args.batch) for kind in kinds], args.repeats, args.seconds)
    for row in rows:
        row["tokens_per_second"] = 1e3 * args.batch * TRAINING_LENGTH / row["ms"]
    ours, softmax, _ = rows
    speed = softmax["ms"] / ours["ms"]
    yield rows, [compare("training step at 4096: times as fast as RoBERTa", speed, asked=1, aim=1.5)]
    rows = [{"case": kind.name, "largest_batch": largest_batch(kind, args.device, args.batch)} for kind in kinds]
    batches = rows[0]["largest_batch"] / rows[1]["largest_batch"]
    yield rows, [compare("training step at 4096: largest batch over RoBERTa's", batches, asked=1, aim=2)]


@dataclass
class SampledByWay(Sampled):
    """With one of the ways of the backward, whatever the length."""

    way: str = "pairs"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # of this process, which may run another way between two calls; the backward is called right after
        os.environ["YOSO_CUDA_BACKWARD"] = self.way
        return super().attend(query, key, value)


def ways(args: argparse.Namespace) -> Iterator[Part]:
    with mock.patch.dict(os.environ):
        for length in LENGTHS_OF_WAYS:
            sizes = {"batch": BATCH, "dtype": "bfloat16"}
            cases = [SampledByWay(args.device, BOTH, length, **sizes, way=way) for way in ("pairs", "buckets")]
            yield measure(cases, args.repeats, args.seconds), []


def exact(args: argparse.Namespace) -> Iterator[Part]:
    for task in ASKED:
        for length in LENGTHS_OF_EXACT:
            shape, sizes = (args.device, task, length), {"batch": BATCH, "dtype": "bfloat16"}
            cases = [Expectation(*shape, **sizes), Sampled(*shape, **sizes), *fast_softmax(*shape, **sizes)]
            yield measure(cases, args.repeats, args.seconds), []


def kernels(args: argparse.Namespace) -> Iterator[Part]:
    activity = ProfilerActivity.CUDA if args.device == "cuda" else ProfilerActivity.CPU
    for task in ASKED:
        for length in args.lengths:
            case = Sampled(args.device, task, length, batch=BATCH, dtype="bfloat16")
            case.setup()
            case.verify()
            with profile(activities=[activity]) as profiler:
                for _ in range(PROFILED_RUNS):
                    case.run()
                if args.device == "cuda":
                    torch.cuda.synchronize()
            times = defaultdict(list)
            for event in profiler.events():
                # not what the CPU does meanwhile
                if event.device_type.name == args.device.upper():
                    times[kernel_name(event.name)].append(event.time_range.elapsed_us() / 1e3)
            rows = []
            for name, of_kernel in sorted(times.items(), key=lambda item: -sum(item[1])):
                figures = {"ms": sum(of_kernel) / PROFILED_RUNS, "launches": len(of_kernel) / PROFILED_RUNS}
                rows.append({"case": name, "task": task, "length": length, **figures})
                print(f"{name:60s} {task:22s} {length:6d} {figures['ms']:9.3f} ms {figures['launches']:6g} launches")
            yield rows, []


def kernel_name(name: str) -> str:
    """A kernel's name without its namespaces, arguments and return type."""
    return re.sub(r"void |\w+::|\(anonymous namespace\)::", "", name).partition("(")[0]


GROUPS = {group.__name__: group for group in (attention, float32, authors, training, ways, exact, kernels)}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(device="cuda")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=[*GROUPS][:-1])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="of attention and kernels"
    )
    parser.add_argument("--authors", type=Path, help="a clone of mlpen/YOSO, for the group authors")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a timed training step")
    args = parse_arguments(parser)
    if args.authors is not None and not (args.authors / AUTHORS_SOURCES).is_dir():
        parser.error(f"--authors {args.authors}: a clone of mlpen/YOSO has {AUTHORS_SOURCES}, this has not")
    rows, table, failed = [], [], []
    for name in args.groups:
        try:
            for part_rows, part_table in GROUPS[name](args):
                rows += [{"group": name, **row} for row in part_rows]
                table += part_table
                # not at the end: a run may be cut short
                write_results(args, rows, table)
        except (SystemExit, RuntimeError) as error:
            # the others may be right, and a GPU be had no more
            failed.append(f"{name}: {error}")
            traceback.print_exc()
    print_table(table)
    if failed:
        sys.exit("\n".join(["", "failed:", *failed]))


if __name__ == "__main__":
    main()
