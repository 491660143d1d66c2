"""Build, test and measure on the GPU of this machine, and print one table: make gpu-check.

Nothing is installed: the interpreter must have torch with CUDA, transformers, accelerate, setuptools 77 or newer,
pytest and pytest-xdist, and nvcc must be at hand. Each step goes on where the one before failed, but for the build;
the exit status says whether all passed.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
# what computes on the device that the tests put their tensors on, and how many of it run at the same time: each has
# some GB of the GPU's memory, and most wait for the CPU
TESTS = ["cuda_device", "ops", "kernels", "hashing", "local_window", "attention", "modeling_yoso"]
MOST_WORKERS = 12
# seconds for all, of which the benchmarks get what the steps before leave
LIMIT = 470
# of a test: one that hangs is named then, and ends with its worker
TEST_LIMIT = 75
# of a step that is stopped, to say where it is, and to end: with both the last one ends within eight minutes
LAST_SECONDS = 5
# what is printed once more at the end of what a step that did not pass printed, characters
LAST_CHARACTERS = 3000
# how a step may end beside passing
NOT_SUPPORTED, NOT_FOUND = "not supported", "not found"
# these measure the CPU's memory, whatever the device
LEFT_OUT = "not memory_is_linear and not gigabyte"
LOADED = 'from yoso_hf import ops; assert "cuda" in ops.compiled_backends(), "the extension has no CUDA kernels"'
SANITIZED = f"""
import os
import torch
from test_kernels import Inputs
{LOADED}
torch.set_default_device("cuda")
for dtype in (torch.float32, torch.bfloat16):
    # large buckets by the last
    for data, tau in (("random", 6), ("mixed", 6), ("equal", 6), ("mixed", 2)):
        inputs = Inputs(data, (1, 2, 301, 333, 64, 64, 4, tau), dtype)
        inputs.hashes(ops, dtype), inputs.expectation(ops, dtype)
        for way in ("pairs", "buckets"):
            os.environ["YOSO_CUDA_BACKWARD"] = way
            inputs.sampled(ops, dtype)
        inputs.remainder(ops, dtype), inputs.first_order(ops, dtype)
# tables of codes that fit no block's memory
os.environ["YOSO_CUDA_BACKWARD"] = "pairs"
Inputs("random", (1, 1, 900, 40, 64, 64, 32, 12), torch.bfloat16).sampled(ops, torch.bfloat16)
torch.cuda.synchronize()
"""


class Step(NamedTuple):
    """A step, how it ended, the seconds it took and what it printed."""

    name: str
    result: str
    seconds: float
    output: str = ""

    @property
    def passed(self) -> bool:
        return self.result in ("passed", NOT_FOUND, NOT_SUPPORTED)


def run(name: str, command: list[str], limit: int, **environment: str) -> Step:
    """Run a step, and print what it printed."""
    start = perf_counter()
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    # ninja, which builds on all cores, may be installed beside an interpreter that is not on the path
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    # Python says where it is when it is stopped
    environment["PYTHONFAULTHANDLER"] = "1"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": environment}
    # not as a context, which waits for the end, and a kernel may not come to one
    step = subprocess.Popen(command, start_new_session=True, **options)
    try:
        output, _ = step.communicate(timeout=limit)
        result = "passed" if step.returncode == 0 else f"FAILED ({step.returncode})"
        # what compute-sanitizer says on some virtual machines
        if step.returncode != 0 and b"Device not supported" in output:
            result = NOT_SUPPORTED
    except subprocess.TimeoutExpired:
        output, result = stop(step), f"STOPPED after {limit} s"
    printed = output.decode(errors="replace")
    print(f"\n== {name}\n{printed}", flush=True)
    return Step(name, result, perf_counter() - start, printed)


def stop(step: subprocess.Popen) -> bytes:
    """End a step with all that it has started, which would go on beside the next one; what it printed."""
    output = None
    for number in (signal.SIGABRT, signal.SIGKILL):
        os.killpg(step.pid, number)
        try:
            return step.communicate(timeout=LAST_SECONDS)[0]
        except subprocess.TimeoutExpired as error:
            output = error.output
    return output or b""


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("gpu-check needs a GPU that torch can use; torch.cuda.is_available() is False")
    # an aborted process has many GB of addresses
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    major, minor = torch.cuda.get_device_capability()
    start = perf_counter()
    python = sys.executable
    build = [python, "setup.py", "build_ext", "--inplace"]
    # compute-sanitizer names lines of the source then
    settings = {"YOSO_CUDA": "1", "YOSO_CUDA_ARCHS": f"{major}{minor}", "NVCC_APPEND_FLAGS": "-lineinfo"}
    steps = [run("build", build, 200, **settings)]
    if steps[-1].result == "passed":
        # without them the tests would be skipped, which passes
        steps.append(run("load", [python, "-c", LOADED], 30))
    if steps[-1].result == "passed":
        workers = str(max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 2)))
        pytest = [python, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider", "-k", LEFT_OUT]
        pytest += ["-o", f"faulthandler_timeout={TEST_LIMIT}", "-o", "faulthandler_exit_on_timeout=true"]
        files = [f"tests/test_{name}.py" for name in TESTS]
        sanitizer = shutil.which("compute-sanitizer")
        # failed calls of torch's libraries are none of ours; our own raise
        sanitize = [sanitizer, "--report-api-errors", "no", "--error-exitcode", "1"]
        with ThreadPoolExecutor() as pool:
            together = [pool.submit(run, "tests", [*pytest, *files], 180, YOSO_TEST_DEVICE="cuda")]
            for tool in ("memcheck", "racecheck") if sanitizer else ():
                command = [*sanitize, "--tool", tool, python, "-c", SANITIZED]
                together.append(pool.submit(run, tool, command, 180, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))
        steps += [step.result() for step in together]
        if sanitizer is None:
            steps.append(Step("compute-sanitizer", NOT_FOUND, 0.0))
        left = int(LIMIT - (perf_counter() - start))
        steps.append(run("benchmarks", [python, "benchmarks/bench_cuda.py", "--seconds", "1"], left))
    for step in steps:
        if not step.passed:
            # where only the end of all this is at hand
            print(f"\n== {step.name}, the end of it\n{step.output[-LAST_CHARACTERS:]}")
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for step in steps:
        print(f"{step.name:26s} {step.result:20s} {step.seconds:6.0f} s")
    return int(not all(step.passed for step in steps))


if __name__ == "__main__":
    sys.exit(main())
