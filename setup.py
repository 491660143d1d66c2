"""Builds csrc/ into one yoso_hf._C: CPU always, CUDA where it can be used. Metadata lives in pyproject.toml.

Environment:
    YOSO_CUDA        0: leave csrc/cuda out; 1: build it, and fail when nvcc is missing; unset: build it where nvcc is
                     found and torch has CUDA
    YOSO_CUDA_ARCHS  architectures for nvcc, such as "80;90"; default: those of the GPUs here, or 80, 86, 89 and 90
                     where there is none. 90 is compiled as 90a, and PTX of the newest is added for later GPUs
    CXX, MAX_JOBS    the usual meaning; of C++ and of CUDA, so many files each are compiled at a time
"""

import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
import torch
from torch.utils import cpp_extension

# older ones fail on pyproject.toml, in other words
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"yoso_hf: setuptools 77 or newer is needed, this is {setuptools.__version__}: pip install -U setuptools")

if sys.platform == "darwin":
    # a Python for two architectures would compile for both, of which torch has one
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")

ROOT = Path(__file__).parent
# the oldest torch whose stable ABI has parallel_for and const_data_ptr; every later torch loads the binary
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# messages of STD_TORCH_CHECK carry __FILE__, here and in torch's headers: keep the builder's directories out of them
PREFIX_MAPS = [f"-ffile-prefix-map={path}/=" for path in (ROOT.resolve(), Path(torch.__file__).parents[1])]

# vectors wider than the baseline's registers never cross a function's border, whatever -Wpsabi fears
CXX_FLAGS = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
# else where short loops happen to begin changes some kernels' time by up to a seventh
CXX_FLAGS += ["-falign-loops=32"]
# torch adds a standard where there is none, 2.11 that of 2017
CXX_FLAGS += ["-std=c++20", TORCH_TARGET, *PREFIX_MAPS]

CUDA_ARCHITECTURES = (80, 86, 89, 90)

# what csrc/ needs that older compilers lack
PROBE = """
typedef float Vector __attribute__((vector_size(16)));
Vector evens(Vector a, Vector b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
#if defined(__x86_64__)
bool has_avx512() { return __builtin_cpu_supports("x86-64-v4"); }
#endif
"""


def compiler_lacks() -> str | None:
    """Why no compiler here can be expected to compile csrc/, or None."""
    if sys.platform == "win32":
        return "the kernels need vector extensions, which the compiler for Windows lacks"
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        return f"no C++ compiler ({compiler[0]})"
    # tried, not asked for its version: Apple counts otherwise, and its c++ may be there only to say what to install
    command = [*compiler, "-std=c++20", "-x", "c++", "-S", "-o", os.devnull, "-"]
    if subprocess.run(command, input=PROBE, text=True, capture_output=True).returncode != 0:
        return f"the kernels need GCC 12 or clang 18 or newer, which {shlex.join(compiler)} is not"
    return None


def find_cuda() -> Path | None:
    """The CUDA toolkit's root: a directory with bin/nvcc beside include/cuda_runtime.h, or None."""
    wanted = os.environ.get("YOSO_CUDA") or None
    if wanted not in ("0", "1", None):
        sys.exit(f"yoso_hf: YOSO_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0" or (wanted != "1" and torch.version.cuda is None):
        return None
    nvcc = shutil.which("nvcc")
    # nvcc on the PATH may be a wrapper script, so its own location proves nothing
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates += [nvcc and Path(nvcc).parent.parent, nvcc and Path(nvcc).resolve().parent.parent]
    candidates += ["/usr/local/cuda", *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for root in filter(None, candidates):
        root = Path(root)
        has_headers = any(root.glob("include/cuda_runtime.h")) or any(root.glob("targets/*/include/cuda_runtime.h"))
        if (root / "bin" / "nvcc").exists() and has_headers:
            return root
    if wanted == "1":
        sys.exit("yoso_hf: YOSO_CUDA=1, but no CUDA toolkit was found; set CUDA_HOME to one")
    return None


def cuda_architectures() -> list[str]:
    """What to compile for, from the oldest on; empty where no GPU here is new enough for the kernels."""
    wanted = os.environ.get("YOSO_CUDA_ARCHS", "")
    archs = wanted.replace(".", "").split(";")
    if wanted not in ("", "all") and not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        sys.exit(f'yoso_hf: YOSO_CUDA_ARCHS must be such as "80;90", or "all", got {wanted!r}')
    if archs == [""]:
        oldest, newest = CUDA_ARCHITECTURES[0], CUDA_ARCHITECTURES[-1]
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        found = {10 * major + minor for major, minor in map(torch.cuda.get_device_capability, gpus)}
        # what is newer takes the newest's PTX
        archs = {str(min(arch, newest)) for arch in found if arch >= oldest}
        if not found or (not archs and os.environ.get("YOSO_CUDA") == "1"):
            archs = ["all"]
    if archs == ["all"]:
        archs = map(str, CUDA_ARCHITECTURES)
    # as numbers; 90a and 100f are architectures too
    return sorted(archs, key=lambda arch: (len(arch.rstrip("af")), arch))


class BuildExtension(cpp_extension.BuildExtension):
    """Adds nvcc objects to the extension: torch's CUDAExtension refuses to build against a CPU-only torch."""

    def build_extensions(self):
        # without ninja, setuptools would keep an object that is newer than the sources, with CUDA kernels or without
        self.force = True
        reason = compiler_lacks()
        if reason is not None:
            if os.environ.get("YOSO_CUDA") == "1":
                sys.exit(f"yoso_hf: YOSO_CUDA=1, but {reason}")
            print(f"yoso_hf: {reason}; installing with the reference path only", file=sys.stderr)
            self.extensions.clear()
            return
        # some interpreters have every object look for libraries in a directory of theirs, which other machines lack
        for linker in ("linker_so", "linker_so_cxx"):
            command = getattr(self.compiler, linker, [])
            setattr(self.compiler, linker, [part for part in command if not part.startswith("-Wl,-rpath")])
        sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/cuda/*.cu"))
        cuda = find_cuda() if sources else None
        archs = cuda_architectures() if cuda is not None else []
        if not archs:
            if cuda is not None:
                print("yoso_hf: no GPU here is of sm_80 or newer; leaving the CUDA kernels out", file=sys.stderr)
            super().build_extensions()
            return
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        pool = ThreadPoolExecutor(max_workers=jobs)
        compiled = pool.map(self.cuda_compiler(cuda, archs, math.ceil(jobs / len(sources))), sources)
        link = self.compiler.link_shared_object
        # C++ is compiled meanwhile
        self.compiler.link_shared_object = lambda objects, *args, **options: link(
            [*objects, *compiled], *args, **options
        )
        (extension,) = self.extensions
        extension.define_macros.append(("YOSO_WITH_CUDA", None))
        extension.library_dirs += [str(cuda / "lib64"), str(cuda / "targets" / "x86_64-linux" / "lib")]
        extension.extra_link_args += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        try:
            super().build_extensions()
        finally:
            pool.shutdown(cancel_futures=True)

    def cuda_compiler(self, cuda: Path, archs: list[str], threads: int) -> Callable[[str], str]:
        """A function that compiles a source, for so many architectures at a time, and returns the object's name."""
        # csrc/cuda/wgmma.h needs what of sm_90 later ones lack, and device.h takes for granted that it is there
        targets = ["90a" if arch == "90" else arch for arch in archs]
        gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in targets]
        # later ones do not run what is of one architecture alone
        newest = archs[-1].rstrip("af")
        gencode.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        flags = ["-std=c++20", "-O3", TORCH_TARGET, f"--threads={threads}", "-Xcompiler"]
        flags.append(",".join(["-fPIC", "-fvisibility=hidden", *PREFIX_MAPS]))
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            target = str(Path(self.build_temp) / (Path(source).stem + ".cuda.o"))
            command = [str(cuda / "bin" / "nvcc"), "-c", source, "-o", target, *flags, *gencode, *includes]
            subprocess.run(command, cwd=ROOT, check=True)
            return target

        return compile_one

    def get_outputs(self):
        # an extension that was left out has no file
        return [path for path in super().get_outputs() if Path(path).exists()]

    def copy_extensions_to_source(self):
        if self.extensions:
            super().copy_extensions_to_source()


extension = cpp_extension.CppExtension(
    "yoso_hf._C",
    sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp")),
    include_dirs=[str(ROOT / "csrc")],
    depends=sorted(str(path.relative_to(ROOT)) for suffix in ("h", "cu") for path in ROOT.glob(f"csrc/**/*.{suffix}")),
    extra_compile_args={"cxx": CXX_FLAGS},
    # before torch, which exports some of its functions: another torch may lack them
    libraries=["stdc++"] if sys.platform == "linux" else [],
    py_limited_api=True,
)

setuptools.setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
