"""The CPU kernels on every instruction set: as accurate as PyTorch, deterministic, parallel, linear."""

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter, process_time

import pytest
import torch
from test_ops import needs_kernels, poisoned_memory  # noqa: F401

from yoso_hf import HashFunctions, ops, reference
from yoso_hf.hashing import KINDS

pytestmark = needs_kernels
if "cpu" in ops.compiled_backends():
    from yoso_hf import _C

TESTS = Path(__file__).parent
CAPABILITIES = ("default", "avx2", "avx512")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Inputs:
    """Rows that spread over the buckets or crowd in a few, and their codes.

    Args:
        data: "random"; "equal": all keys equal, the queries near them; "clusters": both in three tight clusters;
            "mixed": half of both in one cluster, the others random, so that a hash function has crowded and small
            buckets.
        shape: B, H, N, M, D, Dv, num_hash, hash_code_len.
        dtype: of the rows.
    """

    def __init__(self, data, shape, dtype):
        B, H, N, M, D, Dv, num_hash, self.tau = shape
        torch.manual_seed(0)
        query, key = torch.randn(B, N, H, D), torch.randn(B, M, H, D)
        if data != "random":
            centres = torch.randn(3 if data == "clusters" else 1, H, D)
            for rows in (query, key):
                crowd = rows[:, ::2] if data == "mixed" else rows
                crowd *= 0 if data == "equal" and rows is key else 0.1
                crowd += centres[torch.randint(len(centres), (crowd.shape[1],))]
        # [B, rows, H, *] seen as [B, H, rows, *], as a model's projections come
        self.query, self.key, self.value, self.grad = (
            x.transpose(1, 2).to(dtype) for x in (query, key, torch.randn(B, M, H, Dv), torch.randn(B, N, H, Dv))
        )
        self.functions = [HashFunctions.sample(H, D, num_hash, self.tau, kind=kind) for kind in KINDS]
        self.mask = torch.rand(B, M) > 0.25
        self.codes = self.functions[0].codes(self.query), self.functions[0].codes(self.key, self.mask)

    def hashes(self, namespace, dtype):
        """The codes of the keys by both kinds of hash function."""
        return [
            getattr(namespace, f"hash_{f.kind}")(self.key.to(dtype), f.parameters, self.mask, f.num_hash, self.tau)
            for f in self.functions
        ]

    def sampled(self, namespace, dtype):
        """What the sampled operators give, forward and backward."""
        grad, query, key, value = (x.to(dtype) for x in (self.grad, self.query, self.key, self.value))
        arguments = (query, key, value, *self.codes, self.tau)
        return [
            namespace.sampled_attention(*arguments, False, False)[0],
            *namespace.sampled_attention(*arguments, False, True),
            *namespace.sampled_attention_backward(grad, *arguments),
        ]

    def expectation(self, namespace, dtype):
        """What the exact operators give, forward and with both backwards, and the gradient of the normalisation."""
        grad, query, key, value = (x.to(dtype) for x in (self.grad, self.query, self.key, self.value))
        arguments = (query, key, value, self.tau)
        unit, inverse_length = namespace.expectation_attention(*arguments, False, True)
        return [
            namespace.expectation_attention(*arguments, False, False)[0],
            unit,
            inverse_length,
            *namespace.expectation_attention_backward(grad, *arguments, False),
            *namespace.expectation_attention_backward(grad, *arguments, True),
            namespace.unit_rows_backward(grad, unit, inverse_length),
        ]


def assert_as_accurate_as_pytorch(outputs, dtype):
    """The error against float64 is at most twice that of plain PyTorch in the same dtype.

    In root mean square: the largest error of some thousand elements is a matter of luck.
    """
    exact = outputs(reference, torch.float64)
    for got, same_dtype, truth in zip(outputs(ops, dtype), outputs(reference, dtype), exact, strict=True):
        assert got.dtype == same_dtype.dtype
        assert got.shape == same_dtype.shape
        bound = 2 * (same_dtype - truth).norm() + 4 * torch.finfo(torch.float32).eps * truth.norm()
        assert (got - truth).norm() <= bound


# B, H, N, M, D, Dv, num_hash, hash_code_len: usual head sizes and odd ones, values of another size, more hash
# functions than a transform has rows, a table that is larger than the rows, more pairs of
# small buckets than are listed at a time
SPREAD = [
    (2, 3, 65, 97, 32, 32, 3, 8),
    (1, 2, 131, 77, 64, 65, 8, 9),
    (1, 2, 63, 129, 128, 64, 5, 7),
    (2, 1, 33, 49, 7, 19, 70, 1),
    (1, 1, 259, 301, 100, 33, 9, 10),
    (1, 2, 700, 600, 32, 48, 3, 9),
]
# enough rows that kernels leave the order of multiplication that suits small buckets, and tables far larger than rows
CROWDED = [
    (1, 4, 401, 353, 32, 47, 5, 6),
    (2, 2, 401, 353, 64, 64, 5, 9),
    (1, 2, 601, 653, 128, 40, 5, 8),
    (2, 2, 401, 353, 19, 33, 5, 1),
    (1, 3, 37, 50, 64, 64, 5, 13),
    (1, 2, 37, 50, 24, 17, 3, 16),
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SPREAD)
def test_hash_kernels_give_the_codes_of_float64(shape, dtype):
    inputs = Inputs("random", shape, dtype)
    exact = inputs.hashes(reference, torch.float64)
    for got, expected in zip(inputs.hashes(ops, dtype), exact, strict=True):
        # a projection within rounding of zero may fall on either side
        assert (got != expected).sum() <= 1 + 1e-4 * got.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SPREAD)
def test_kernels_are_as_accurate_as_pytorch(shape, dtype):
    inputs = Inputs("random", shape, dtype)
    assert_as_accurate_as_pytorch(inputs.sampled, dtype)
    assert_as_accurate_as_pytorch(inputs.expectation, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CROWDED)
@pytest.mark.parametrize("data", ["equal", "clusters", "mixed"])
def test_kernels_are_as_accurate_as_pytorch_in_crowded_buckets(data, shape, dtype):
    assert_as_accurate_as_pytorch(Inputs(data, shape, dtype).sampled, dtype)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forced_instruction_sets_pass_the_same_tests(capability):
    """In a process of its own, since the choice is made once."""
    if CAPABILITIES.index(capability) >= CAPABILITIES.index(_C.cpu_capability):
        pytest.skip("this process runs it, or the processor cannot")
    code = (
        "import sys, pytest\n"
        "from yoso_hf import _C\n"
        "assert _C.cpu_capability == sys.argv[1], _C.cpu_capability\n"
        "sys.exit(pytest.main(sys.argv[2:]))"
    )
    # those that do not depend on the instruction set, and this one
    leave_out = "not opcheck and not without_the_extension and not instruction"
    tests = [
        str(TESTS / "test_ops.py"),
        str(TESTS / "test_local_window.py"),
        __file__,
        "-q",
        "-x",
        "-k",
        leave_out,
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    run = subprocess.run(
        [sys.executable, "-c", code, capability, *tests], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one instruction set here")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not on the PATH")
def test_instructions_that_an_older_processor_lacks_stand_only_where_it_never_comes():
    """In the functions that are compiled for AVX2 or AVX-512, which run after asking the processor."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _C.__file__], capture_output=True, text=True, check=True
    ).stdout
    # vector instructions from AVX on, and the others that come with AVX2; lzcnt would run as another instruction
    beyond_baseline = re.compile(
        r"\t(v(?!err|erw)\w+|andn|bextr|bls(i|r|msk)|bzhi|[sr]arx|sh[lr]x|rorx|mulx|pdep|pext|lzcnt|movbe)[lqw]?\b"
    )
    beyond_avx2 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])")
    found = {"baseline": [], "avx2": [], "avx512": []}
    instructions = dict.fromkeys(found, 0)
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line
            compiled_for = re.search(r"run_(avx2|avx512)", function)
            where = compiled_for[1] if compiled_for else "baseline"
        elif "\t" in line:
            instructions[where] += 1
            if (beyond_baseline if where == "baseline" else beyond_avx2).search(line):
                found[where].append(function + line)
    assert not found["baseline"] and not found["avx2"], found["baseline"][:3] + found["avx2"][:3]
    # what was looked for can be found
    assert found["avx512"] and min(instructions.values()) > 1000, instructions


def assert_same_bits_on_any_number_of_threads(outputs):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = outputs()
        for number in (1, 2, 2, 3, 4, 8):
            torch.set_num_threads(number)
            for got, alone in zip(outputs(), expected, strict=True):
                assert torch.equal(got, alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("data", ["random", "mixed"])
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_whatever_the_number_of_threads(dtype, heads, data):
    # long enough for every loop that is shared among threads to be shared
    inputs = Inputs(data, (*heads, 1100, 1000, 64, 64, 4, 6), dtype)
    assert_same_bits_on_any_number_of_threads(
        lambda: [*inputs.hashes(ops, dtype), *inputs.sampled(ops, dtype), *inputs.expectation(ops, dtype)]
    )


def test_same_bits_where_the_number_of_threads_decides_what_fits_the_cache():
    inputs = Inputs("random", (1, 4, 15000, 14000, 64, 64, 2, 11), torch.float32)
    assert_same_bits_on_any_number_of_threads(lambda: inputs.sampled(ops, torch.float32))


def one_head_calls():
    """A call of every operator for one long head."""
    sampled = Inputs("random", (1, 1, 32768, 32768, 64, 64, 16, 9), torch.float32)
    exact = Inputs("random", (1, 1, 4096, 4096, 64, 64, 1, 9), torch.float32)
    hadamard, gaussian = sampled.functions
    buckets = (sampled.query, sampled.key, sampled.value, *sampled.codes, 9)
    near = (*buckets, 64)
    rows = (exact.query, exact.key, exact.value, 9)
    unit, inverse_length = ops.sampled_attention(*buckets, False, True)
    return {
        "hash_hadamard": lambda: hadamard.codes(sampled.query),
        "hash_gaussian": lambda: gaussian.codes(sampled.query),
        "sampled_attention": lambda: ops.sampled_attention(*buckets, False, True),
        "sampled_attention_backward": lambda: ops.sampled_attention_backward(sampled.grad, *buckets),
        "expectation_attention": lambda: ops.expectation_attention(*rows, False, True),
        "expectation_attention_backward": lambda: ops.expectation_attention_backward(exact.grad, *rows, False),
        "local_attention": lambda: ops.local_attention(*near),
        "local_attention_backward": lambda: ops.local_attention_backward(sampled.grad, *near),
        "unit_rows_backward": lambda: ops.unit_rows_backward(sampled.grad, unit, inverse_length),
    }


def cores_used(call):
    """How many cores a call keeps busy; the most of a few runs, since whatever else runs can only take cores away."""
    call()
    most = 0.0
    for _ in range(7):
        wall, cpu = perf_counter(), process_time()
        call()
        most = max(most, (process_time() - cpu) / (perf_counter() - wall))
    return most


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="one core")
def test_one_head_keeps_two_cores_busy():
    code = (
        "import json\n"
        "from test_cpu_kernels import cores_used, one_head_calls\n"
        "print(json.dumps({name: cores_used(call) for name, call in one_head_calls().items()}))"
    )
    # threads that wait must not look busy, which is settled before torch is imported
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS, env=environment, capture_output=True, text=True, check=True
    )
    cores = json.loads(run.stdout)
    assert min(cores.values()) > 1.3, cores


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [1, 8])
def test_crowded_buckets_take_linear_time(clusters):
    def crowded(length):
        """The forward and the backward where queries and keys are in tight clusters, or all equal."""
        inputs = Inputs("random", (1, 1, length, length, 64, 64, 8, 9), torch.float32)
        rows = torch.randn(clusters, 64)[torch.arange(length) % clusters][None, None]
        inputs.query, inputs.key = (rows + (clusters > 1) * 1e-3 * torch.randn(rows.shape) for _ in range(2))
        inputs.codes = inputs.functions[0].codes(inputs.query), inputs.functions[0].codes(inputs.key)
        return lambda: inputs.sampled(ops, torch.float32)

    lengths = (16384, 65536)
    calls = {length: crowded(length) for length in lengths}
    times = {length: [] for length in lengths}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for _ in range(5):
            for length, call in calls.items():
                # of this process alone, whatever else runs
                start = process_time()
                call()
                times[length].append(process_time() - start)
    finally:
        torch.set_num_threads(threads)
    # linear is 4, quadratic 16
    short, long = (statistics.median(times[length]) for length in lengths)
    assert long < 7 * short
