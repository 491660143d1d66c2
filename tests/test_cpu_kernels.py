"""The CPU kernels on every instruction set: deterministic, parallel, linear."""

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
from test_kernels import DTYPES, Inputs
from test_local_window import make_near
from test_local_window import outputs as near_outputs
from test_ops import poisoned_memory  # noqa: F401

from yoso_hf import ops

pytestmark = pytest.mark.skipif("cpu" not in ops.compiled_backends(), reason="no compiled extension")
if "cpu" in ops.compiled_backends():
    from yoso_hf import _C

TESTS = Path(__file__).parent
CAPABILITIES = ("default", "avx2", "avx512", "amx")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# more than half of the time: what no instruction set should change, threads and memory; rows in clusters, which lie in
# buckets between those of equal and random ones; most shapes of equal ones, and the largest
LONG = ("same_bits", "out_of_memory", "clusters", "where_logarithms_are_large", "16_counts", "through_the_formula")
LONG += tuple(f"equal-shape{shape}-" for shape in (1, 2, 4, 5, 6, 8, 9)) + ("random_sizes[3]", "random_sizes[5]")
LONG = f"({' or '.join(LONG)})"


@pytest.mark.parametrize(
    "selected",
    [pytest.param(f"not {LONG}", id="most"), pytest.param(LONG, id="the long ones", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forced_instruction_sets_pass_the_same_tests(capability, selected):
    """In a process of its own, since the choice is made once."""
    if CAPABILITIES.index(capability) >= CAPABILITIES.index(_C.cpu_capability):
        pytest.skip("this process runs it, or the processor cannot")
    code = (
        "import sys, pytest\n"
        "from yoso_hf import _C\n"
        "assert _C.cpu_capability == sys.argv[1], _C.cpu_capability\n"
        "sys.exit(pytest.main(sys.argv[2:]))"
    )
    # those that do not depend on the instruction set, as what only PyTorch computes, this one, and the longest
    leave_out = "not opcheck and not without_the_extension and not instruction and not [reference and not reference]"
    leave_out += " and not out_of_memory and not compile and not heads2"
    tests = [
        str(TESTS / "test_ops.py"),
        str(TESTS / "test_kernels.py"),
        str(TESTS / "test_local_window.py"),
        __file__,
        "-q",
        "-x",
        "-k",
        f"{leave_out} and {selected}",
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
    """In the functions that are compiled for AVX2, AVX-512 or AMX, which run after asking the processor."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _C.__file__], capture_output=True, text=True, check=True
    ).stdout
    # vector instructions from AVX on, and the others that come with AVX2; lzcnt would run as another instruction
    beyond_baseline = re.compile(
        r"\t(v(?!err|erw)\w+|andn|bextr|bls(i|r|msk)|bzhi|[sr]arx|sh[lr]x|rorx|mulx|pdep|pext|lzcnt|movbe)[lqw]?\b"
    )
    beyond_avx2 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])")
    # tiles, and what no processor of AVX-512 alone has
    beyond_avx512 = re.compile(r"\t(tile|ldtilecfg|tdp|v\w+bf16)")
    beyond = {
        "baseline": re.compile(f"{beyond_baseline.pattern}|{beyond_avx512.pattern}"),
        "avx2": re.compile(f"{beyond_avx2.pattern}|{beyond_avx512.pattern}"),
        "avx512": beyond_avx512,
        "amx": beyond_avx512,
    }
    found = {"baseline": [], "avx2": [], "avx512": [], "amx": []}
    instructions = dict.fromkeys(found, 0)
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line
            compiled_for = re.search(r"run_(avx2|avx512|amx)", function)
            where = compiled_for[1] if compiled_for else "baseline"
        elif "\t" in line:
            instructions[where] += 1
            if beyond[where].search(line):
                found[where].append(function + line)
    assert not any(found[where] for where in ("baseline", "avx2", "avx512")), [x[:3] for x in found.values()]
    # what was looked for can be found
    assert found["amx"] and min(instructions.values()) > 1000, instructions
    assert beyond_avx2.search(listing)


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


# long enough for every loop that is shared among threads to be shared; the second needs little of a cache
@pytest.mark.parametrize("sizes", [(1100, 1000, 64, 64), (550, 474, 16, 16)])
@pytest.mark.parametrize("data", ["random", "mixed"])
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_whatever_the_number_of_threads(dtype, heads, data, sizes):
    # more hash functions than are gone over together
    inputs = Inputs(data, (*heads, *sizes, 9, 6), dtype)
    assert_same_bits_on_any_number_of_threads(
        lambda: [
            *inputs.hashes(ops, dtype),
            *inputs.sampled(ops, dtype),
            *inputs.expectation(ops, dtype),
            *inputs.softmax(ops, dtype),
            *inputs.remainder(ops, dtype),
            *inputs.first_order(ops, dtype),
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 4)])
def test_same_bits_of_near_pairs_whatever_the_number_of_threads(heads, dtype):
    *tensors, codes = make_near((*heads, 517, 64, 40, 6, 6), dtype)
    assert_same_bits_on_any_number_of_threads(lambda: near_outputs(ops, *tensors, codes, 6, 75))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_which_outputs_a_value_spoils_does_not_depend_on_the_number_of_threads(value):
    """Beside those near it, some queries that share a tile with these."""
    _, query, key, values, codes = make_near((1, 1, 200, 16, 16, 4, 5), torch.float32)
    values[0, 0, 100] = value
    assert_same_bits_on_any_number_of_threads(
        lambda: [ops.local_attention(query, key, values, *codes, 5, 5).isfinite()]
    )


def test_same_bits_where_the_number_of_threads_decides_what_fits_the_cache():
    inputs = Inputs("random", (1, 4, 15000, 14000, 64, 64, 2, 11), torch.float32)
    assert_same_bits_on_any_number_of_threads(
        lambda: [*inputs.sampled(ops, torch.float32), *inputs.remainder(ops, torch.float32)]
    )


@pytest.mark.parametrize("columns", [16, 64])
def test_a_long_head_has_the_gradients_of_its_parts(columns):
    """Of parts that share no bucket. Short and long heads go over their buckets in different orders."""
    rows, used_codes, num_hash = 250, 32, 9
    parts = (40 << 20) // (2 * rows * columns * 4)
    query, key, value, grad = torch.randn(4, parts, 1, rows, columns)
    # buckets of every size
    codes = (used_codes * torch.rand(2, parts, 1, num_hash, rows) ** 4).int()
    expected = ops.sampled_attention_backward(grad, query, key, value, *codes.short(), 8)
    codes += used_codes * torch.arange(parts, dtype=torch.int32).view(-1, 1, 1, 1)
    whole = (x.view(1, 1, -1, columns) for x in (grad, query, key, value))
    long_codes = codes.permute(0, 2, 3, 1, 4).reshape(2, 1, 1, num_hash, -1)
    got = ops.sampled_attention_backward(*whole, *long_codes, 16)
    for name, long, short in zip(("query", "key", "value"), got, expected, strict=True):
        # gradients of query and key are proportional to the length of codes, which is twice that of the parts
        factor = 1 if name == "value" else 2
        torch.testing.assert_close(long.view_as(short), factor * short, rtol=0, atol=0, msg=name)


def one_head_calls():
    """A call of every operator for one long head."""
    sampled = Inputs("random", (1, 1, 32768, 32768, 64, 64, 16, 9), torch.float32)
    exact = Inputs("random", (1, 1, 4096, 4096, 64, 64, 1, 9), torch.float32)
    hadamard, gaussian = sampled.functions
    buckets = (sampled.query, sampled.key, sampled.value, *sampled.codes, 9)
    near = (*buckets, 64)
    remainder = (*buckets[:3], torch.ones(1, 1, 32768), sampled.shift, *buckets[3:], 0.125)
    heavy, total = torch.arange(64).view(1, 1, 64), torch.ones(1, 1, 32768)
    rows = (exact.query, exact.key, exact.value, 9)
    unit, inverse_length = ops.sampled_attention(*buckets, False, True)
    softmax = ops.softmax_attention(*rows[:3], None, 0.125)
    return {
        "hash_hadamard": lambda: hadamard.codes(sampled.query),
        "hash_gaussian": lambda: gaussian.codes(sampled.query),
        "sampled_attention": lambda: ops.sampled_attention(*buckets, False, True),
        "sampled_attention_backward": lambda: ops.sampled_attention_backward(sampled.grad, *buckets),
        "expectation_attention": lambda: ops.expectation_attention(*rows, False, True),
        "expectation_attention_backward": lambda: ops.expectation_attention_backward(exact.grad, *rows, False),
        "softmax_attention": lambda: ops.softmax_attention(*rows[:3], None, 0.125),
        "softmax_attention_backward": lambda: ops.softmax_attention_backward(
            exact.grad, *softmax, *rows[:3], None, 0.125
        ),
        "sampled_remainder": lambda: ops.sampled_remainder(*remainder),
        "sampled_remainder_backward": lambda: ops.sampled_remainder_backward(
            sampled.grad, sampled.grad.sum(-1), *remainder
        ),
        "first_order_attention": lambda: ops.first_order_attention(*remainder[:5], heavy, sampled.grad, total, 0.125),
        "first_order_attention_backward": lambda: ops.first_order_attention_backward(
            sampled.grad, sampled.grad, total, *remainder[:5], heavy, 0.125
        ),
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


OUT_OF_MEMORY = """
import resource
import torch
from accelerate.utils.memory import should_reduce_batch_size
from yoso_hf import ops
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
torch.set_num_threads(2)

def attend(num_queries, num_keys, heads, columns=8):
    # tensors of any size that take no memory
    query, key = (torch.zeros(1, 1, 1, columns).expand(1, heads, n, 8) for n in (num_queries, num_keys))
    try:
        ops.expectation_attention(query, key, key, 9, False, True)
    except RuntimeError as error:
        assert should_reduce_batch_size(error), error
        return str(error)
    raise SystemExit("it fitted the memory")

# a result of 12.8 GB
assert "Tried to allocate a tensor of 3200000000 elements" in attend(400_000_000, 1, 1)
# a copy of keys whose columns are one
assert "Tried to allocate a tensor of 3200000000 elements" in attend(1, 400_000_000, 1, columns=1)
# what threads need for 45 million keys, of one head and of one each
for heads in (1, 2):
    assert "Tried to allocate 2880000064 bytes" in attend(1, 45_000_000, heads)
"""


def test_out_of_memory_is_known_to_accelerate():
    """Which then tries a smaller batch (auto_find_batch_size)."""
    subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], check=True)
