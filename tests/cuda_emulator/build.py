"""Compile csrc/cuda for the CPU, on the emulated runtime beside this file.

    python tests/cuda_emulator/build.py kernels.so
    YOSO_REFERENCE=1 python -c "import torch, sys, pytest; torch.ops.load_library('kernels.so'); \\
        sys.exit(pytest.main(['tests/test_ops.py']))"

With --races, accesses to memory that no barrier orders, or that are not aligned to their size, end the process. With
--traffic, the bytes that kernels read and write are counted, see count.py.

The library registers the kernels for the CPU: in a process that leaves out the compiled extension, the tests of the
CPU kernels test these.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILER = shutil.which("g++")
# fast enough to run, and quick to compile; the target is setup.py's
FLAGS = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-fvisibility=hidden"]
FLAGS += ["-DYOSO_CUDA_KEY=CPU", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{HERE}"]
# with what looks at accesses to memory; hooks.cpp has what the compiler calls for the first
WATCH_FLAGS = {
    "races": ["-fsanitize=thread", "-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-g1"],
    "traffic": ["-fsanitize=thread"],
}


def build(target: Path, watch: str | None = None) -> None:
    """Compile and link the library.

    Args:
        target: the file to write.
        watch: "races" or "traffic", what looks at every access to memory; None for nothing.

    Raises:
        subprocess.CalledProcessError: the compiler failed; what it said is on stderr.
    """
    flags = [*FLAGS, *(f"-I{path}" for path in cpp_extension.include_paths())]
    kernels = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    watchers = [] if watch is None else [HERE / "hooks.cpp", HERE / f"{watch}.cpp"]
    sources = [HERE / "emulator.cpp", *watchers, *kernels]
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, to: Path) -> None:
            watched = WATCH_FLAGS[watch] if watch and source in kernels else []
            subprocess.run([COMPILER, "-x", "c++", "-c", str(source), "-o", str(to), *flags, *watched], check=True)

        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(compile_one, sources, objects))
        library = Path(torch.__path__[0]) / "lib"
        links = ["-shared", "-o", str(target), *map(str, objects), f"-L{library}", "-ltorch_cpu", "-lc10", "-ldl"]
        links += ["-lubsan"] if watch == "races" else []
        subprocess.run([COMPILER, *links], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), watch=next((name for name in WATCH_FLAGS if f"--{name}" in sys.argv[2:]), None))
