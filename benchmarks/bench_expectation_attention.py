"""Time of the exact operators beside torch's softmax attention and transformers' Yoso.

    python benchmarks/bench_expectation_attention.py --lengths 16 32 64 128 --batch 64 --output short.json
    python benchmarks/bench_expectation_attention.py --dtype bfloat16 --output bfloat16.json

[batch, 12, N, 64], float32 unless --dtype says otherwise, tau = 9, outputs not normalised but for those of softmax,
which the operator softmax_attention computes as well.
"""

from attention_cases import HEAD_DIM, ExactKernel, Softmax, TransformersYoso
from harness import argument_parser, measure, parse_arguments, write_results
from torch import Tensor

from yoso_hf import ops


class ExpectationAttention(ExactKernel):
    name = "expectation_attention"
    unit_output = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.expectation_attention(query, key, value, self.hash_code_len, False, False)[0]


class SoftmaxAttention(Softmax):
    """What attn_implementation="yoso" computes on a CPU where it is exact."""

    name = "softmax_attention"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.softmax_attention(query, key, value, None, HEAD_DIM**-0.5)[0]


class Cumulation(TransformersYoso):
    unit_output = False


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parse_arguments(parser)
    kinds = [ExpectationAttention, SoftmaxAttention, Softmax]
    if args.dtype == "float32":
        # in bfloat16 its results are too far off to be verified
        kinds.append(Cumulation)
    rows = []
    for length in args.lengths:
        for task in ("forward", "forward and backward"):
            cases = [kind(args.device, task, length, batch=args.batch, dtype=args.dtype) for kind in kinds]
            rows += measure(cases, args.repeats, args.seconds)
    write_results(args, rows)


if __name__ == "__main__":
    main()
