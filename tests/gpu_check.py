"""Build, test and measure on the GPU of this machine, and print one table: make gpu-check.

Nothing is installed: the interpreter must have torch with CUDA, transformers and pytest, and nvcc must be at hand.
Each step goes on where the one before failed, but for the build; the exit status says whether all passed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

ROOT = Path(__file__).parents[1]
# what computes on the device that the tests put their tensors on
TESTS = ["ops", "kernels", "local_window", "hashing", "attention", "cuda_device", "modeling_yoso"]
SANITIZED = """
import torch
from test_kernels import Inputs
from yoso_hf import ops
torch.set_default_device("cuda")
for dtype in (torch.float32, torch.bfloat16):
    for data in ("random", "mixed"):
        inputs = Inputs(data, (1, 2, 301, 333, 64, 64, 4, 6), dtype)
        inputs.hashes(ops, dtype), inputs.sampled(ops, dtype), inputs.expectation(ops, dtype)
torch.cuda.synchronize()
"""


def run(name: str, command: list[str], limit: int, **environment: str) -> tuple[str, str, float]:
    """Run a step, with its output as it comes; its name, how it ended, and the seconds it took."""
    print(f"\n== {name}", flush=True)
    start = perf_counter()
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit).returncode
        result = "passed" if status == 0 else f"FAILED ({status})"
    except subprocess.TimeoutExpired:
        result = f"STOPPED after {limit} s"
    return name, result, perf_counter() - start


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("gpu-check needs a GPU that torch can use; torch.cuda.is_available() is False")
    major, minor = torch.cuda.get_device_capability()
    python = sys.executable
    steps = [
        run(
            "build",
            [python, "setup.py", "build_ext", "--inplace"],
            180,
            YOSO_CUDA="1",
            YOSO_CUDA_ARCHS=f"{major}{minor}",
        )
    ]
    if steps[0][1] == "passed":
        tests = [f"tests/test_{name}.py" for name in TESTS]
        steps.append(run("tests", [python, "-m", "pytest", "-q", *tests], 180, YOSO_TEST_DEVICE="cuda"))
        sanitizer = shutil.which("compute-sanitizer")
        for tool in ("memcheck", "racecheck") if sanitizer else ():
            command = [sanitizer, "--tool", tool, "--error-exitcode", "1", python, "-c", SANITIZED]
            steps.append(run(tool, command, 60, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))
        steps.append(run("benchmarks", [python, "benchmarks/bench_cuda.py"], 150))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, result, seconds in steps:
        print(f"{name:12s} {result:20s} {seconds:6.0f} s")
    return int(any(result != "passed" for _, result, _ in steps))


if __name__ == "__main__":
    sys.exit(main())
