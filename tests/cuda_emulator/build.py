"""Compile csrc/cuda with nvcc, and the PTX of its kernels for the CPU.

    python tests/cuda_emulator/build.py kernels.so
    YOSO_REFERENCE=1 python -c "import torch, sys, pytest; torch.ops.load_library('kernels.so'); \\
        sys.exit(pytest.main(['tests/test_ops.py']))"

The library holds nvcc's objects, whose kernels are registered for the CPU here, runtime.cpp in place of CUDA's
runtime, and the kernels' PTX in C++ (translate.py): in a process that leaves out the compiled extension, the tests of
the CPU kernels test what a GPU would run. With YOSO_EMULATOR_WATCH=races, accesses to memory that no barrier orders,
or outside of tensors, end the process; with YOSO_EMULATOR_WATCH=traffic, what kernels move is counted, see count.py.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

if __package__:
    from .product_registers import check_products
    from .translate import translate
else:
    from product_registers import check_products
    from translate import translate

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILER, NVCC = shutil.which("g++"), shutil.which("nvcc")
ARCHS = ("80", "86", "89", "90", "90a")
AVAILABLE = COMPILER is not None and NVCC is not None and platform.machine() == "x86_64"
# fast enough to run, and quick to compile; sums and products are not contracted, as nvcc has decided which are
FLAGS = ["-std=c++20", "-Og", "-fira-algorithm=priority", "-march=native", "-ffp-contract=off", "-fwrapv"]
FLAGS += ["-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", f"-I{HERE}"]
NVCC_FLAGS = ["-std=c++20", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
# with setup.py's others, but for -O3, which is for what launches the kernels
KERNEL_FLAGS = [*NVCC_FLAGS, "-lineinfo", "-Xptxas", "-v"]
KERNEL_FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DYOSO_CUDA_EMULATOR"]


def build(target: Path, arch: str = "90a", kernels: Sequence[str] = ("*",)) -> str:
    """Compile and link the library.

    Args:
        target: the file to write.
        arch: one of ARCHS, the architecture that nvcc compiles for and that the emulated GPU has.
        kernels: which sources of csrc/cuda, without their suffix; all unless given.

    Returns:
        What ptxas, which compiles the kernels for the GPU itself too, says of their registers and stacks.

    Raises:
        subprocess.CalledProcessError: a compiler failed; what it said is on stderr.
        translate.UnknownInstruction: a kernel has an instruction that the translator does not know.
        product_registers.RegisterInUse: a kernel has registers of products in use that it has not waited for.
    """
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    sources = sorted({source for name in kernels for source in (ROOT / "csrc" / "cuda").glob(f"{name}.cu")})
    sources += HERE.glob("*.cpp")

    def run(*command: str) -> str:
        outcome = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if outcome.returncode != 0:
            sys.stderr.write(outcome.stderr)
            outcome.check_returncode()
        return outcome.stderr

    def compile_one(source: Path, folder: Path) -> tuple[list[str], str]:
        folder.mkdir()
        program, translated, kernels = (folder / name for name in ("program.o", "kernels.cpp", "kernels.o"))
        command = [NVCC, "-c", str(source), "-o", str(program), f"-DYOSO_EMULATOR_ARCH={arch.rstrip('a')}", *includes]
        if source.suffix == ".cpp":
            run(*command, *NVCC_FLAGS, "-O3", "-Xcompiler", "-march=native,-ffp-contract=off")
            return [str(program)], ""
        architecture = f"-gencode=arch=compute_{arch},code=[compute_{arch},sm_{arch}]"
        log = run(*command, *KERNEL_FLAGS, architecture, "--keep", "--keep-dir", str(folder))
        ptx = (folder / f"{source.stem}.ptx").read_text()
        check_products(ptx)
        translated.write_text(translate(ptx))
        run(COMPILER, "-c", str(translated), "-o", str(kernels), *FLAGS)
        return [str(program), str(kernels)], log

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=2) as pool:
        compiled = list(pool.map(compile_one, sources, [Path(name) / source.stem for source in sources]))
        objects = [path for paths, _ in compiled for path in paths]
        links = [f"-L{Path(torch.__path__[0]) / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl"]
        run(COMPILER, "-shared", "-o", str(target), *objects, *links)
    return "".join(log for _, log in compiled)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--arch", default="90a", choices=ARCHS)
    args = parser.parse_args()
    build(args.target, args.arch)
