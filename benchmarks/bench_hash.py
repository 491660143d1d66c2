"""Time of the hash operators beside the same work done by torch's matrix product.

    python benchmarks/bench_hash.py --lengths 512 4096 16384

Codes of [1, 12, N, 64], float32, by m = 32 functions of tau = 9 bits. The peer multiplies by Gaussian directions and
packs the signs into codes.
"""

from dataclasses import dataclass

import torch
from harness import Case, WrongResult, argument_parser, measure, parse_arguments, write_results
from torch import Tensor

from yoso_hf import HashFunctions, ops, reference

HEADS, HEAD_DIM, NUM_HASH, HASH_CODE_LEN = 12, 64, 32, 9
# a projection within rounding of zero may have either sign
DIFFERENT_CODES = 1e-4


@dataclass
class HashCase(Case):
    """Codes of vectors; subclasses say how."""

    length: int

    kind = "gaussian"

    def setup(self) -> None:
        torch.manual_seed(0)
        # in memory as a model's projections are
        self.x = torch.randn(1, self.length, HEADS, HEAD_DIM, device=self.device).transpose(1, 2)
        sizes = (HEADS, HEAD_DIM, NUM_HASH, HASH_CODE_LEN)
        self.parameters = HashFunctions.sample(*sizes, kind=self.kind, device=self.device).parameters

    def verify(self) -> None:
        definition = reference.DEFINITIONS[f"hash_{self.kind}"]
        truth = definition(self.x.double(), self.parameters.double(), None, NUM_HASH, HASH_CODE_LEN)
        different = (self.run() != truth).double().mean().item()
        if different > DIFFERENT_CODES:
            raise WrongResult(f"{different:.1e} of the codes differ, allowed is {DIFFERENT_CODES:.0e}")


class Gaussian(HashCase):
    name = "hash_gaussian"

    def run(self) -> Tensor:
        return ops.hash_gaussian(self.x, self.parameters, None, NUM_HASH, HASH_CODE_LEN)


class Hadamard(HashCase):
    name = "hash_hadamard"
    kind = "hadamard"

    def run(self) -> Tensor:
        return ops.hash_hadamard(self.x, self.parameters, None, NUM_HASH, HASH_CODE_LEN)


class MatrixProduct(HashCase):
    name = "torch.matmul"

    def run(self) -> Tensor:
        bits = (self.parameters @ self.x.mT > 0).unflatten(2, (HASH_CODE_LEN, NUM_HASH))
        powers = 1 << torch.arange(HASH_CODE_LEN, dtype=torch.int16, device=self.device)
        return (bits * powers[:, None, None]).sum(2, dtype=torch.int16)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384])
    args = parse_arguments(parser)
    rows = []
    for length in args.lengths:
        cases = [kind(args.device, length) for kind in (Hadamard, Gaussian, MatrixProduct)]
        rows += measure(cases, args.repeats, args.seconds)
    write_results(args, rows)


if __name__ == "__main__":
    main()
