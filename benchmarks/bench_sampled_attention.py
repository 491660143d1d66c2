"""Time of the operators of sampled attention beside torch's softmax attention.

    python benchmarks/bench_sampled_attention.py --lengths 512 4096 8192

[1, 12, N, 64], float32, m = 32, tau = 9; the codes are given. The backward is that of query, key and value.
"""

from functools import cached_property

from attention_cases import HEAD_DIM, NUM_HASH, SampledKernel, Softmax
from harness import argument_parser, measure, parse_arguments, write_results
from torch import Tensor

from yoso_hf import HashFunctions, ops


class SampledAttention(SampledKernel):
    name = "sampled_attention"
    unit_output = False

    @cached_property
    def functions(self) -> HashFunctions:
        return HashFunctions.sample(self.heads, HEAD_DIM, NUM_HASH, self.hash_code_len, device=self.device)

    @cached_property
    def given_codes(self) -> tuple[Tensor, Tensor]:
        return self.codes(*self.inputs[:2])

    def codes(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.functions.codes(query.detach()), self.functions.codes(key.detach())

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.sampled_attention(query, key, value, *self.given_codes, self.hash_code_len, False, False)[0]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 8192])
    args = parse_arguments(parser)
    rows = []
    for length in args.lengths:
        for task in ("forward", "backward"):
            cases = [kind(args.device, task, length) for kind in (SampledAttention, Softmax)]
            rows += measure(cases, args.repeats, args.seconds)
    write_results(args, rows)


if __name__ == "__main__":
    main()
