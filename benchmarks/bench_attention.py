"""Time of one attention call, forward and forward with backward, beside its peers, in one run.

    python benchmarks/bench_attention.py --lengths 512 1024 2048 4096 8192 16384
    python benchmarks/bench_attention.py --lengths 4096 --dtype bfloat16 --num_hash 64

Prints a table and writes benchmarks/results/attention-<device>.json. A case is timed after its result was verified.
Times are medians in milliseconds; a peer that would take longer than --limit seconds a call is left out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from report import write_results
from torch import Tensor
from transformers.models.yoso.modeling_yoso import YosoCumulation

from yoso_hf import HashFunctions, yoso_attention


class Case:
    """One implementation: called on [B, H, N, D] tensors, and checked on a short piece of them."""

    def __init__(self, run: Callable[..., Tensor], truth: Callable[..., Tensor], tolerance: float):
        self.run = run
        self.truth = truth
        self.tolerance = tolerance

    def verify(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        short = [x[:, :, :384] for x in (query, key, value)]
        out = self.run(*short).double()
        error = (out - self.truth(*(x.double() for x in short))).norm() / out.norm()
        if not error <= self.tolerance:
            raise SystemExit(f"wrong result: error {error:.2e}, allowed {self.tolerance:.2e}")


def kernel_weights(query: Tensor, key: Tensor, hash_code_len: int) -> Tensor:
    cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    return (1 - cosine.clamp(-1, 1).acos() / torch.pi) ** hash_code_len


def make_cases(args: argparse.Namespace) -> dict[str, Case]:
    functions = HashFunctions.sample(args.heads, args.head_dim, args.num_hash, args.hash_code_len, device=args.device)
    tau = args.hash_code_len

    def collisions(query, key, value):
        """The dense matrix of collisions, from the same hash functions."""
        codes = [functions.codes(x.to(args.dtype)) for x in (query, key)]
        weights = (codes[0][..., :, None] == codes[1][..., None, :]).double().mean(dim=2)
        return F.normalize(weights @ value, dim=-1)

    def exact(query, key, value):
        return F.normalize(kernel_weights(query, key, tau) @ value, dim=-1)

    def transformers_expectation(query, key, value):
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        mask = query.new_ones(query.shape[0] * query.shape[1], query.shape[2])
        flat = [x.flatten(0, 1) for x in (query, key, value)]
        out = YosoCumulation.apply(mask, mask, *flat, {"hash_code_len": tau})
        return F.normalize(out, dim=-1).view_as(value)

    # rounding of the inputs' dtype; float32 sums of a few thousand terms
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[args.dtype]
    softmax = F.scaled_dot_product_attention
    return {
        "yoso": Case(lambda *x: yoso_attention(*x, hash_functions=functions), collisions, tolerance),
        "yoso expectation": Case(lambda *x: yoso_attention(*x, hash_code_len=tau, expectation=True), exact, tolerance),
        "sdpa": Case(softmax, softmax, tolerance),
        "transformers yoso": Case(transformers_expectation, exact, tolerance),
    }


def median_ms(call: Callable[[], object], device: str, repeats: int) -> float:
    def once() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    once()
    return statistics.median(once() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--num_hash", type=int, default=32)
    parser.add_argument("--hash_code_len", type=int, default=9)
    parser.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds a call, by extrapolation")
    args = parser.parse_args()
    torch.manual_seed(0)
    cases = make_cases(args)
    rows = []
    for length in args.lengths:
        shape = (args.batch, length, args.heads, args.head_dim)
        query, key, value, grad = (
            torch.randn(shape, dtype=args.dtype, device=args.device).transpose(1, 2) for _ in range(4)
        )
        for name, case in cases.items():
            earlier = [row for row in rows if row["case"] == name]
            if earlier and name != "yoso":
                expected = earlier[-1]["forward_backward_ms"] * (length / earlier[-1]["length"]) ** 2
                if expected > 1e3 * args.limit:
                    continue
            case.verify(query, key, value)
            inputs = [x.detach().requires_grad_() for x in (query, key, value)]

            def forward(case=case, inputs=inputs):
                with torch.no_grad():
                    case.run(*inputs)

            def both(case=case, inputs=inputs, grad=grad):
                torch.autograd.grad(case.run(*inputs), inputs, grad)

            row = {"case": name, "length": length}
            row["forward_ms"] = median_ms(forward, args.device, args.repeats)
            row["forward_backward_ms"] = median_ms(both, args.device, args.repeats)
            rows.append(row)
        softmax = next((row for row in rows if row["case"] == "sdpa" and row["length"] == length), None)
        for row in rows:
            if row["length"] == length:
                ratio = ""
                if softmax:
                    row["sdpa_over_forward"] = softmax["forward_ms"] / row["forward_ms"]
                    row["sdpa_over_forward_backward"] = softmax["forward_backward_ms"] / row["forward_backward_ms"]
                    ratio = f"{row['sdpa_over_forward']:8.2f}x {row['sdpa_over_forward_backward']:8.2f}x"
                print(
                    f"{length:7d}  {row['case']:18s} {row['forward_ms']:10.2f} ms "
                    f"{row['forward_backward_ms']:10.2f} ms {ratio}",
                    flush=True,
                )
    settings = {name: str(setting) for name, setting in vars(args).items()}
    write_results(Path(__file__).parent / "results" / f"attention-{args.device}.json", settings, rows)


if __name__ == "__main__":
    main()
