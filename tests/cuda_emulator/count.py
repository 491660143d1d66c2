"""Count the bytes that the CUDA kernels move, on the emulated runtime beside this file, where there is no GPU.

    python tests/cuda_emulator/count.py
    python tests/cuda_emulator/count.py --lengths 4096 65536 --num_hash 8

For yoso_attention with bfloat16, forward and backward, of one head; the bytes are those of all heads. Of what a block
reads, every 32 bytes count once, as if the first-level cache kept them. Milliseconds are the bytes read, written and
added over the speed of the second-level cache: what a kernel needs that nothing else holds up.
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
os.environ["YOSO_REFERENCE"] = "1"

import torch

import build

HEADS, HEAD_DIM = 16 * 12, 64
COLUMNS = ("read", "written", "added", "shared")


def names_of(library: Path) -> dict[int, str]:
    """The functions of a library by their addresses."""
    command = ["nm", "-C", "--defined-only", str(library)]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split(maxsplit=2) for line in symbols.splitlines()]
    return {int(line[0], 16): line[2] for line in lines if len(line) == 3}


class Counts:
    """The bytes that kernels have moved since they were read last."""

    def __init__(self, library: Path) -> None:
        self._write = ctypes.CDLL(str(library)).yoso_emulator_write_traffic
        self._names = names_of(library)
        self._file = library.with_suffix(".txt")

    def take(self) -> dict[str, Counter]:
        """By the name of the kernel, without its template's arguments."""
        self._write(os.fsencode(self._file))
        counts: dict[str, Counter] = {}
        for line in self._file.read_text().splitlines():
            address, *numbers = line.split()
            name = re.search(r"\w+_kernel", self._names[int(address, 16)])[0]
            counts.setdefault(name, Counter()).update(dict(zip(COLUMNS, map(int, numbers), strict=True)))
        return counts


def print_counts(title: str, counts: dict[str, Counter], speed: float) -> None:
    print(f"{title:40}" + "".join(f"{f'{column}, GB':>13}" for column in COLUMNS) + f"{'ms':>8}")
    for name, moved in {**counts, "in all": sum(counts.values(), Counter())}.items():
        time = sum(moved[c] for c in COLUMNS if c != "shared") * HEADS / speed
        print(f"  {name:38}" + "".join(f"{moved[c] * HEADS / 1e9:13.2f}" for c in COLUMNS) + f"{time * 1e3:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--hash_code_len", type=int, default=9)
    parser.add_argument("--num_hash", type=int, default=32)
    parser.add_argument("--speed", type=float, default=5.5e12, help="bytes a second")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        build.build(library, watch="traffic")
        torch.ops.load_library(str(library))
        from yoso_hf import yoso_attention

        counts = Counts(library)
        for length in args.lengths:
            torch.manual_seed(0)
            inputs = [torch.randn(1, 1, length, HEAD_DIM).bfloat16().requires_grad_() for _ in range(3)]
            out = yoso_attention(*inputs, hash_code_len=args.hash_code_len, num_hash=args.num_hash)
            forward = counts.take()
            torch.autograd.grad(out, inputs, torch.randn_like(out))
            print_counts(f"{length} tokens, forward", forward, args.speed)
            print_counts(f"{length} tokens, backward", counts.take(), args.speed)


if __name__ == "__main__":
    main()
