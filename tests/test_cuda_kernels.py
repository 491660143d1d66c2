"""The CUDA kernels where there is no GPU: compiled by nvcc, and their PTX run on the CPU by cuda_emulator/.

Where there is one, `make gpu-check` runs the tests of the kernels themselves on it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_emulator import build as emulator

TESTS = Path(__file__).parent
needs_emulator = pytest.mark.skipif(not emulator.AVAILABLE, reason="the emulator needs nvcc, g++ and x86-64")


@pytest.fixture(scope="module")
def built_emulator(tmp_path_factory):
    target = tmp_path_factory.mktemp("emulator") / "kernels.so"
    return target, emulator.build(target)


@pytest.fixture(scope="module")
def emulated_kernels(built_emulator):
    return built_emulator[0]


def run_emulated(kernels: Path, code: str, *arguments: str, **settings: str) -> None:
    """Run code in a process whose operators for the CPU are the emulated CUDA kernels.

    Args:
        kernels: the library.
        code: Python.
        arguments: for code.
        settings: of the emulator, as in YOSO_EMULATOR_*: order, watch and cache.
    """
    prologue = f"import sys, torch\ntorch.ops.load_library({str(kernels)!r})\n"
    # the installed kernels stay out; one thread: a block's threads share a core
    environment = {**os.environ, "YOSO_REFERENCE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {f"YOSO_EMULATOR_{name.upper()}": value for name, value in settings.items()}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", prologue + code, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]


def assert_no_register_is_spilled(log: str, but: str = "kernelId") -> None:
    """By what nvcc says of kernels, but for some: those of float64, unless given, which is there to be right.

    Nor is a product of a warpgroup waited for where the source does not, which ptxas warns of; nor is there any other
    warning.
    """
    assert re.findall(r".*: warning .*", log) == []
    assert re.findall(r"\(C75\d\d\).*", log) == []
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    names = re.findall(r"Compiling entry function '(\w+)' for", log)
    assert len(spills) == len(names) > 50
    hot = {name: numbers for name, numbers in zip(names, spills, strict=True) if re.search(but, name) is None}
    assert {name: numbers for name, numbers in hot.items() if set(numbers) != {"0"}} == {}


PASS_TESTS = """
import pytest
from yoso_hf import ops
assert ops.compiled_backends() == {"cpu"}
sys.exit(pytest.main([*sys.argv[1:], "-q", "-x", "-p", "no:cacheprovider"]))
"""


# what takes longest beside what is much the same: rows in clusters lie in buckets between those of equal rows and
# those of random ones; most shapes of equal ones; the largest tables again; large numbers of what others test, and the
# largest of random sizes
LONG = ("clusters", "pairs-shape6", "buckets-shape6", "where_logarithms_are_large", "ops-shape4", "counts[mixed-300")
LONG += tuple(f"equal-shape{shape}-" for shape in (1, 2, 4, 5, 6, 8, 9)) + ("counts[equal-300",)
LONG += tuple(f"exact_rows_of_random_sizes[{seed}]" for seed in (3, 5, 7))
LONG += ("(test_remainder and shape3)", "(of_many_hash_functions and shape4)")
LONG = " or ".join(LONG)


@needs_emulator
@pytest.mark.parametrize(
    "selected",
    [pytest.param(f"not ({LONG})", id="most"), pytest.param(f"({LONG})", id="long", marks=pytest.mark.slow)],
)
def test_emulated_kernels_pass_the_tests_of_the_kernels(emulated_kernels, selected):
    near = "test_local_window.py::test_kernels_are_as_accurate_as_the_reference"
    tests = [str(TESTS / name) for name in ("test_ops.py", "test_kernels.py", near)]
    leave_out = (
        # of PyTorch's operators, which need no emulator
        *("opcheck", "without_the_extension", "gradcheck", "[reference", "reference]"),
        # codes of 16 bits by 70 functions, half a minute each, which test_kernels.py has too
        "(test_ops and shape3)",
        # draws hundreds of times
        "as_their_mean",
        # for what the CPU's kernels do, and millions of pairs
        "exact_kernels_of_many_rows",
        # rows of 16 bits are float32 once they are loaded
        *("(where_logarithms_are_large and dtype1)", "(test_remainder and equal and dtype1)"),
    )
    left = " and ".join(f"not {name}" for name in leave_out)
    run_emulated(emulated_kernels, PASS_TESTS, *tests, "-k", f"{left} and {selected}")


@pytest.mark.slow
@needs_emulator
def test_kernels_of_smaller_gpus_pass_the_tests_of_the_kernels(tmp_path):
    """Less shared memory, and no launch that starts early."""
    kernels = tmp_path / "kernels.so"
    log = emulator.build(kernels, arch="86", kernels=("sampled_*", "expectation_attention", "first_order_attention"))
    # of the first order's gradients one is too large by some 30 registers
    assert_no_register_is_spilled(log, but="kernelId|query_gradients_kernel")
    # what hashes there does so for other dtypes everywhere
    run_emulated(kernels, PASS_TESTS, str(TESTS / "test_kernels.py"), "-k", "not hash")


@pytest.mark.slow
@needs_emulator
def test_heads_that_are_sorted_one_after_the_other(emulated_kernels):
    code = """
from test_kernels import Inputs, assert_as_accurate_as_pytorch
# seven heads have as many buckets as are sorted at a time
inputs = Inputs("random", (2, 4, 19, 21, 16, 16, 70, 16), torch.float32)
assert_as_accurate_as_pytorch(inputs.remainder, torch.float32)
"""
    run_emulated(emulated_kernels, code)


@needs_emulator
def test_addends_for_which_a_launch_has_no_room_are_added_in_the_next(emulated_kernels):
    """Those of some heads, or of one, or some of one."""
    code = """
import os
from test_kernels import Inputs, assert_as_accurate_as_pytorch

os.environ["YOSO_CUDA_BACKWARD"] = "buckets"
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    # of the last two, in bfloat16, also the forward has several launches, from values in shared memory
    for heads, rows, columns, num_hash in (
        (5, 31, 8, 3), (1, 31, 16, 6), (3, 40, 40, 5), (2, 150, 64, 9), (5, 31, 16, 4), (1, 31, 16, 11),
    ):
        inputs = Inputs("random", (1, heads, rows, rows + 3, columns, columns, num_hash, 3), dtype)
        assert_as_accurate_as_pytorch(inputs.sampled, dtype)
os.environ["YOSO_CUDA_BACKWARD"] = "pairs"
# of more hash functions than 127, and of few queries, warps multiply on sm_90 too, and else warpgroups
for heads, queries, keys, columns, num_hash, tau in (
    (5, 31, 34, 8, 3, 3), (3, 70, 130, 64, 3, 3), (1, 70, 300, 64, 130, 3), (2, 40, 700, 40, 3, 3),
    (2, 70, 700, 40, 3, 3), (1, 33, 350, 128, 3, 3),
):
    inputs = Inputs("random", (1, heads, queries, keys, columns, columns, num_hash, tau), torch.bfloat16)
    assert_as_accurate_as_pytorch(inputs.sampled, torch.bfloat16)
"""
    run_emulated(emulated_kernels, code, cache="512", watch="races")


@needs_emulator
@pytest.mark.parametrize(
    "selected", [pytest.param("most", id="most"), pytest.param("long", id="long", marks=pytest.mark.slow)]
)
def test_every_access_to_memory_is_ordered_and_aligned_and_of_a_tensor(emulated_kernels, selected):
    """What compute-sanitizer looks for, and where a barrier inside a warp is missing too."""
    code = """
import os
from test_kernels import Inputs
from test_local_window import make_near, outputs
from yoso_hf import ops

is_long = sys.argv[1] == "long"
cases = (("random", (1, 2, 157, 301, 64, 64, 4, 6)), ("mixed", (1, 2, 157, 301, 64, 64, 4, 6)),
         ("mixed", (1, 1, 65, 90, 128, 100, 2, 3)), ("random", (1, 2, 33, 0, 64, 64, 3, 5)),
         ("random", (1, 1, 300, 90, 40, 40, 2, 3)), ("equal", (1, 1, 19, 190, 64, 64, 2, 4)),
         ("equal", (1, 1, 19, 530, 64, 64, 2, 4)), ("random", (1, 1, 700, 650, 64, 64, 2, 2)))
if is_long:
    cases = (("random", (1, 1, 900, 40, 64, 64, 32, 12)), ("random", (1, 1, 700, 650, 64, 64, 2, 2)))
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for data, shape in cases:
        inputs = Inputs(data, shape, dtype)
        inputs.hashes(ops, dtype)
        for way in ("pairs", "buckets"):
            os.environ["YOSO_CUDA_BACKWARD"] = way
            inputs.sampled(ops, dtype)
        # of so many rows, buckets are large, and pairs are more of the same
        if is_long or shape[2] < 700:
            inputs.expectation(ops, dtype)
        if dtype != torch.float16:
            inputs.remainder(ops, dtype)
        if dtype != torch.float16 and shape[3] > 0:
            inputs.first_order(ops, dtype)
    *tensors, codes = make_near((1, 1, 130, 64, 40, 18, 6), dtype)
    outputs(ops, *tensors, codes, 6, 40)
# few functions that agree, of many
os.environ["YOSO_CUDA_BACKWARD"] = "pairs"
Inputs("random", (1, 1, 900, 40, 64, 64, 32, 12), torch.bfloat16).sampled(ops, torch.bfloat16)
# queries for two blocks that share tables, the last of which has fewer
inputs = Inputs("random", (1, 1, 2051, 40, 64, 64, 2, 2), torch.bfloat16)
rows = [x.bfloat16() for x in (inputs.query, inputs.key, inputs.value)]
ops.sampled_attention(*rows, *inputs.codes, 2, False, True)
inputs = Inputs("random", (1, 1, 40, 40, 16, 16, 1, 1), torch.float32)
rows, weight = (inputs.query, inputs.key, inputs.value), torch.ones(1, 1, 40)
places = inputs.shift, torch.tensor([[[-1, 40, 2**40, 3]]])
out, total = ops.first_order_attention(*rows, weight, *places, inputs.grad, weight, 0.5)
ops.first_order_attention_backward(inputs.grad, out, total, *rows, weight, *places, 0.5)
"""
    run_emulated(emulated_kernels, code, selected, watch="races")


@needs_emulator
def test_results_do_not_depend_on_the_order_of_threads_and_blocks(emulated_kernels, tmp_path):
    """The same bits: nothing is read before it is written, and no sum is in an order of chance."""
    code = """
import os
from test_kernels import Inputs
from test_local_window import make_near, outputs
from yoso_hf import ops

results = []
for dtype in (torch.float32, torch.bfloat16):
    for data, tau in (("random", 6), ("mixed", 3), ("random", 13)):
        inputs = Inputs(data, (1, 2, 333, 301, 64, 64, 4, tau), dtype)
        results += [*inputs.hashes(ops, dtype), *inputs.remainder(ops, dtype)]
        for way in ("pairs", "buckets"):
            os.environ["YOSO_CUDA_BACKWARD"] = way
            results += inputs.sampled(ops, dtype)
    results += [*inputs.first_order(ops, dtype), *inputs.expectation(ops, dtype)]
    *tensors, codes = make_near((1, 2, 130, 64, 40, 6, 6), dtype)
    results += outputs(ops, *tensors, codes, 6, 40)
torch.save(results, sys.argv[1])
"""
    forward, reverse = tmp_path / "forward.pt", tmp_path / "reverse.pt"
    run_emulated(emulated_kernels, code, str(forward))
    run_emulated(emulated_kernels, code, str(reverse), order="reverse")
    for one, other in zip(torch.load(forward), torch.load(reverse), strict=True):
        assert torch.equal(one, other)


@needs_emulator
def test_rows_too_far_apart_to_count_are_refused(emulated_kernels):
    """Before any is read: of the tensor's 4 GiB no page is ever touched."""
    code = """
import os
import pytest
from yoso_hf import ops

rows, codes = torch.ones(1, 1, 2, 64).bfloat16(), torch.zeros(1, 1, 3, 2, dtype=torch.int16)
far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((1, 1, 2, 64), (2**31, 2**31, 2**31, 1))
for way in ("pairs", "buckets"):
    os.environ["YOSO_CUDA_BACKWARD"] = way
    for place in range(4):
        grad, query, key, value = [far if place == i else rows for i in range(4)]
        with pytest.raises(RuntimeError, match="rows must be less than 4 GiB apart, got 4294967296 bytes"):
            ops.sampled_attention_backward(grad, query, key, value, codes, codes, 2)
"""
    run_emulated(emulated_kernels, code)


@needs_emulator
def test_wide_values_are_added_up_in_slices_but_not_scaled(emulated_kernels):
    code = """
import pytest
from test_kernels import Inputs
from yoso_hf import ops, reference

inputs = Inputs("random", (1, 2, 21, 33, 16, 264, 3, 4), torch.float64)
arguments = (inputs.query, inputs.key, inputs.value, *inputs.codes, inputs.tau, False)
got, _ = ops.sampled_attention(*arguments, False)
torch.testing.assert_close(got, reference.sampled_attention(*arguments, False)[0])
with pytest.raises(RuntimeError, match="scale rows of at most 256 columns, got value with 264"):
    ops.sampled_attention(*arguments, True)
"""
    run_emulated(emulated_kernels, code)


@needs_emulator
def test_kernels_keep_to_their_registers(built_emulator):
    _, log = built_emulator
    assert_no_register_is_spilled(log)


@needs_emulator
def test_counts_of_bytes_and_instructions(emulated_kernels):
    """Every hash function reads every value once, and what finds it, and writes its table."""
    script = TESTS / "cuda_emulator" / "count.py"
    # more values than a copy in shared memory holds
    command = [
        sys.executable,
        str(script),
        "--lengths",
        "16384",
        "--num_hash",
        "2",
        "--library",
        str(emulated_kernels),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-5000:]
    rows = [line.split() for line in run.stdout.splitlines() if "_kernel" in line]
    kernels = {name: [float(number) for number in numbers] for name, *numbers in rows}
    values, tables = (192 * 2 * count * 64 * 2 / 1e9 for count in (16384, 2**9))
    read, written, shared, instructions, *_ = kernels["build_tables_kernel"]
    assert values <= read <= 1.1 * values
    assert written == pytest.approx(tables, abs=0.01)
    assert shared == 0
    # a lane has eight columns of a row: a load, and eight numbers to convert and to add, while others have longer ones
    assert 17 <= instructions / (192 * 2 * 16384 * 8 / 32 / 1e9) <= 100
