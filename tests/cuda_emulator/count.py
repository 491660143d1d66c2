"""Count what the CUDA kernels move and do, on the emulated GPU beside this file, where there is no other.

    python tests/cuda_emulator/count.py
    python tests/cuda_emulator/count.py --lengths 4096 65536 --num_hash 8
    python tests/cuda_emulator/count.py --lengths 512 1024 --expectation
    python tests/cuda_emulator/count.py --lengths 512 1024 --expectation --dtype float32
    python tests/cuda_emulator/count.py --similarity softmax --hash_code_len 13
    python tests/cuda_emulator/count.py --local_window 128

For yoso_attention, forward and backward, of one head; the numbers are those of all heads. Of what a block reads, every
32 bytes count once, as if the first-level cache kept them; instructions are those of PTX but for moves and what
becomes part of an operand, of warps whose lanes stay together. Milliseconds are the bytes read and written over
the speed of the second-level cache, and the instructions over what all multiprocessors start: what a kernel needs that
nothing else holds up.
"""

import argparse
import ctypes
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

# the installed kernels stay out
os.environ |= {"YOSO_REFERENCE": "1", "YOSO_EMULATOR_WATCH": "traffic"}

import torch

import build

HEADS, HEAD_DIM = 16 * 12, 64
COLUMNS = ("read", "written", "shared", "instructions")


class Counts:
    """What kernels have moved and done since they were asked last."""

    def __init__(self, library: Path, file: Path) -> None:
        self._write = ctypes.CDLL(str(library)).yoso_emulator_write_traffic
        self._file = file

    def take(self) -> dict[str, Counter]:
        """By the name of the kernel, without its template's arguments."""
        self._write(os.fsencode(self._file))
        counts: dict[str, Counter] = {}
        for line in self._file.read_text().splitlines():
            mangled, *numbers = line.split()
            name = subprocess.run(["c++filt", mangled], check=True, capture_output=True, text=True).stdout
            kernel = re.search(r"\w+_kernel", name)[0]
            counts.setdefault(kernel, Counter()).update(dict(zip(COLUMNS, map(int, numbers), strict=True)))
        return counts


def print_counts(title: str, counts: dict[str, Counter], bandwidth: float, issue_rate: float) -> None:
    *bytes_columns, _ = COLUMNS
    heads = [f"{column}, GB" for column in bytes_columns] + ["G instr.", "ms, bytes", "ms, instr."]
    print(f"{title:32}" + "".join(f"{head:>13}" for head in heads))
    for name, moved in {**counts, "in all": sum(counts.values(), Counter())}.items():
        numbers = [moved[column] * HEADS / 1e9 for column in COLUMNS]
        numbers.append(sum(moved[column] for column in bytes_columns if column != "shared") * HEADS / bandwidth * 1e3)
        numbers.append(moved["instructions"] * HEADS / issue_rate * 1e3)
        print(f"  {name:30}" + "".join(f"{number:13.2f}" for number in numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--hash_code_len", type=int, default=9)
    parser.add_argument("--num_hash", type=int, default=32)
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument("--expectation", action="store_true", help="the exact kernels")
    kernels.add_argument(
        "--similarity", default="cosine", choices=("cosine", "softmax"), help="of the sampled kernels"
    )
    parser.add_argument("--local_window", type=int, default=0, help="near pairs too, those at most so far apart")
    parser.add_argument("--library", type=Path, help="what build.py has made; built unless given")
    parser.add_argument("--bandwidth", type=float, default=5e12, help="bytes a second from the second-level cache")
    parser.add_argument("--issue_rate", type=float, default=132 * 4 * 1.75e9, help="instructions of warps a second")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        library = args.library
        if library is None:
            library = Path(folder) / "kernels.so"
            build.build(library)
        torch.ops.load_library(str(library))
        from yoso_hf import yoso_attention

        counts, dtype = Counts(library, Path(folder) / "counts.txt"), getattr(torch, args.dtype)
        for length in args.lengths:
            torch.manual_seed(0)
            inputs = [torch.randn(1, 1, length, HEAD_DIM).to(dtype).requires_grad_() for _ in range(3)]
            options = {"num_hash": args.num_hash, "local_window": args.local_window}
            if args.expectation:
                options = {"expectation": True}
            if args.similarity == "softmax":
                options |= {"similarity": "softmax", "normalization": "sum"}
            out = yoso_attention(*inputs, hash_code_len=args.hash_code_len, **options)
            forward = counts.take()
            torch.autograd.grad(out, inputs, torch.randn_like(out))
            print_counts(f"{length} tokens, forward", forward, args.bandwidth, args.issue_rate)
            print_counts(f"{length} tokens, backward", counts.take(), args.bandwidth, args.issue_rate)


if __name__ == "__main__":
    main()
