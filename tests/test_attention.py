import bisect
import math
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from yoso_hf import HashFunctions, attention, ops, yoso_attention
from yoso_hf.attention import EXACT_TOKENS_PER_HASH, SIMILARITIES, attention_weights, exact_is_cheaper

BOTH = pytest.mark.parametrize("expectation", [False, True])


def inputs(B=2, H=3, N=20, M=25, D=16, Dv=12, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return tuple(torch.randn(B, H, *size, dtype=dtype) for size in ((N, D), (M, D), (M, Dv)))


def gradients(arguments, out_grad, **options):
    arguments = [x.detach().clone().requires_grad_() for x in arguments]
    out = yoso_attention(*arguments, **options)
    return out.detach(), *torch.autograd.grad(out, arguments, out_grad)


def pair_at(cosine, dim, rows):
    """rows queries and one key each, [1, 1, rows, dim], all at the given cosine."""
    query, other = torch.randn(2, 1, 1, rows, dim, dtype=torch.float64)
    query /= query.norm(dim=-1, keepdim=True)
    other -= (other * query).sum(-1, keepdim=True) * query
    return query, cosine * query + math.sqrt(1 - cosine**2) * other / other.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("kind", ["hadamard", "gaussian"])
@pytest.mark.parametrize("hash_code_len", [8, 9, 12])
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.5, 0.9])
def test_sampled_mean_is_the_expectation_for_output_and_gradients(cosine, dim, hash_code_len, kind):
    """Over fresh hash functions, within 4 standard errors.

    Every head is a replica with hash functions of its own, hence an independent draw. Each quantity is projected
    on a random direction, so that it gives one number a head.
    """
    torch.manual_seed(hash_code_len * dim)
    heads, rows, columns = 256, 12, 5
    query, key = pair_at(cosine, dim, rows)
    value, grad = torch.randn(2, 1, 1, rows, columns, dtype=torch.float64)
    replicas = [x.float().expand(1, heads, -1, -1) for x in (query, key, value, grad)]
    directions = [torch.randn_like(x.float()) for x in (grad, query, key, value)]
    draws = []
    for _ in range(4):
        functions = HashFunctions.sample(heads, dim, 32, hash_code_len, kind=kind)
        results = gradients(replicas[:3], replicas[3], hash_functions=functions, normalization=None)
        draws.append([(r * d).sum(dim=(0, 2, 3)) for r, d in zip(results, directions, strict=True)])
    exact = gradients((query, key, value), grad, hash_code_len=hash_code_len, expectation=True, normalization=None)
    for index, name in enumerate(("output", "grad_query", "grad_key", "grad_value")):
        sample = torch.cat([draw[index] for draw in draws]).double()
        expected = (exact[index] * directions[index]).sum()
        error = sample.std() / math.sqrt(len(sample))
        assert abs(sample.mean() - expected) < 4 * error, name


@BOTH
@pytest.mark.parametrize("anything", [1e4, math.nan, -math.inf])
def test_masked_keys_add_nothing_and_get_no_gradient(expectation, anything):
    query, key, value = inputs()
    key_mask = torch.rand(2, 25) > 0.4
    options = {"expectation": expectation}
    if not expectation:
        options["hash_functions"] = HashFunctions.sample(3, 16, 64, 4)
    grad = torch.randn(2, 3, 20, 12)
    results = gradients((query, key, value), grad, key_mask=key_mask, **options)

    other_key, other_value = key.clone(), value.clone()
    masked = ~key_mask[:, None, :, None].expand(-1, 3, -1, -1)
    other_key[masked.expand_as(key)] = anything
    other_value[masked.expand_as(value)] = -anything
    others = gradients((query, other_key, other_value), grad, key_mask=key_mask, **options)
    for one, other in zip(results, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert results[2][masked.expand_as(key)].eq(0).all()
    assert results[3][masked.expand_as(value)].eq(0).all()
    assert results[2].ne(0).any()

    for row in range(2):
        keep = key_mask[row]
        alone = yoso_attention(
            query[row : row + 1], key[row : row + 1, :, keep], value[row : row + 1, :, keep], **options
        )
        torch.testing.assert_close(results[0][row : row + 1], alone, rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("normalization", ["l2", "sum", None])
def test_a_row_without_keys_is_zero_and_so_is_its_gradient(expectation, normalization):
    query, key, value = inputs()
    key_mask = torch.ones(2, 25, dtype=torch.bool)
    key_mask[1] = False
    out, *grads = gradients(
        (query, key, value),
        torch.randn(2, 3, 20, 12),
        key_mask=key_mask,
        expectation=expectation,
        normalization=normalization,
    )
    for result in (out, *grads):
        assert result[1].eq(0).all()
        assert result[0].ne(0).any()
        assert result.isfinite().all()


@BOTH
@pytest.mark.parametrize("backward", ["sampled", "expectation", "exact"])
@pytest.mark.parametrize("normalization", ["l2", "sum", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_nan_for_equal_zero_opposite_tiny_and_huge_vectors(expectation, backward, normalization, dtype):
    if backward == "exact" and not expectation:
        pytest.skip("refused")
    torch.manual_seed(0)
    query = torch.randn(1, 2, 12, 8)
    query[:, :, 1] = 0
    query[:, :, 2] *= 1e-4
    query[:, :, 3] *= 1e4
    query[:, :, 4] = -query[:, :, 5]
    query[:, :, 6:8] = query[:, :, 8:9]
    query = query.to(dtype)
    value = torch.randn(1, 2, 12, 8).to(dtype)
    value[:, :, 0] = 0
    for key in (query, -query, torch.zeros_like(query)):
        options = {"expectation": expectation, "backward": backward, "normalization": normalization}
        for result in gradients((query, key, value), torch.randn(1, 2, 12, 8).to(dtype), **options):
            assert result.isfinite().all()


@pytest.mark.parametrize("hash_code_len", [9, 16])
def test_the_weight_of_equal_vectors(hash_code_len):
    """README has the bound: a cosine that is one by rounding errors only is half a thousandth of an angle."""
    torch.manual_seed(0)
    rows = torch.randn(2000, 1, 1, 64)
    options = {"expectation": True, "normalization": None, "hash_code_len": hash_code_len}
    weights = yoso_attention(rows, rows, torch.ones(2000, 1, 1, 1), **options)
    assert (weights - 1).abs().max() < 0.01


@pytest.mark.parametrize("has_kernels", [False, True])
def test_float16_on_cuda_is_widened_where_no_kernel_scales_before_it_rounds(has_kernels, monkeypatch):
    """By tensors without data, which need no GPU."""
    computed = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):  # noqa: ARG002
            if function is ops.expectation_attention:
                computed.append(arguments[0].dtype)
            return function(*arguments, **(options or {}))

    monkeypatch.setattr(attention, "HAS_CUDA_KERNELS", has_kernels)
    with FakeTensorMode(), Record():
        rows = torch.empty(1, 2, 8, 4, dtype=torch.float16, device="cuda")
        assert yoso_attention(rows, rows, rows, expectation=True).dtype == torch.float16
    assert computed == [torch.float16 if has_kernels else torch.float32]


@BOTH
def test_one_token(expectation):
    query, _, _ = inputs(1, 2, 1, 1, 8, 8)
    value = torch.randn(1, 2, 1, 8)
    out = yoso_attention(query, query, value, expectation=expectation)
    # the only key is the query itself, of weight one
    torch.testing.assert_close(out, torch.nn.functional.normalize(value, dim=-1), rtol=1e-5, atol=1e-6)
    out = yoso_attention(query, query, value, expectation=expectation, normalization="sum")
    torch.testing.assert_close(out, value, rtol=1e-5, atol=1e-6)


def test_expectation_is_the_formula_under_each_normalization():
    query, key, value = inputs(dtype=torch.float64)
    normalize = torch.nn.functional.normalize
    cosine = normalize(query, dim=-1) @ normalize(key, dim=-1).mT
    weights = (1 - cosine.acos() / torch.pi) ** 5
    expected = {
        None: weights @ value,
        "l2": normalize(weights @ value, dim=-1),
        "sum": (weights / weights.sum(-1, keepdim=True)) @ value,
    }
    for normalization, out in expected.items():
        got = yoso_attention(query, key, value, hash_code_len=5, expectation=True, normalization=normalization)
        torch.testing.assert_close(got, out)


def test_sum_normalization_of_the_sampled_mode_averages_values():
    query, key, value = inputs()
    constant = torch.full_like(value, 3.0)
    out = yoso_attention(query, key, constant, hash_code_len=1, num_hash=16, normalization="sum")
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize("normalization", ["l2", "sum", None])
def test_exact_backward_passes_gradcheck_with_mask(normalization):
    query, key, value = (x.requires_grad_() for x in inputs(2, 1, 4, 5, 3, 2, dtype=torch.float64))
    key_mask = torch.tensor([[True] * 5, [True, False, True, False, True]])

    def attention(*tensors):
        return yoso_attention(
            *tensors,
            key_mask,
            hash_code_len=3,
            expectation=True,
            normalization=normalization,
            backward="exact",
        )

    assert torch.autograd.gradcheck(attention, (query, key, value))


def test_expectation_backward_of_the_sampled_mode_is_the_exact_sum_for_query_and_key():
    query, key, value = inputs()
    key_mask = torch.rand(2, 25) > 0.4
    grad = torch.randn(2, 3, 20, 12)
    functions = HashFunctions.sample(3, 16, 8, 5)
    options = {"key_mask": key_mask, "normalization": None}
    mixed = gradients((query, key, value), grad, hash_functions=functions, backward="expectation", **options)
    exact = gradients((query, key, value), grad, hash_code_len=5, expectation=True, **options)
    sampled = gradients((query, key, value), grad, hash_functions=functions, **options)
    for index in (1, 2):
        torch.testing.assert_close(mixed[index], exact[index])
        assert not torch.allclose(mixed[index], sampled[index])
    for index in (0, 3):
        assert torch.equal(mixed[index], sampled[index])


# the length, N = M, up to which "auto" is exact with 8 hash functions
CROSSING = 8 * EXACT_TOKENS_PER_HASH["cosine"]


@pytest.mark.parametrize(
    ("N", "M", "expectation"),
    [
        (CROSSING, CROSSING, True),
        (CROSSING + 1, CROSSING, False),
        (CROSSING, CROSSING + 1, False),
        # the same N M / (N + M)
        (CROSSING * 3 // 2, CROSSING * 3 // 4, True),
        (CROSSING * 3 // 4, CROSSING * 3 // 2, True),
        (CROSSING * 3 // 2, CROSSING * 3 // 4 + 1, False),
        # the more keys, the less their hashing costs for each pair with the only query
        (1, CROSSING * 10, True),
        (CROSSING * 10, CROSSING * 10, False),
    ],
)
def test_auto_is_the_exact_call_up_to_the_crossing_and_the_sampled_one_beyond_it(N, M, expectation):
    arguments = inputs(1, 2, N, M)
    grad = torch.randn(1, 2, N, 12)
    functions = HashFunctions.sample(2, 16, 8, 4)
    options = {"key_mask": torch.rand(1, M) > 0.4, "hash_functions": functions}
    auto, exact, sampled = (gradients(arguments, grad, expectation=x, **options) for x in ("auto", True, False))
    expected, other = (exact, sampled) if expectation else (sampled, exact)
    for result, same, different in zip(auto, expected, other, strict=True):
        assert torch.equal(result, same)
        assert not torch.allclose(result, different, rtol=1e-2)
    with torch.no_grad():
        assert torch.equal(yoso_attention(*arguments, expectation="auto", **options), auto[0])


@pytest.mark.parametrize("kernels", [True, False])
def test_auto_is_exact_for_longer_where_that_is_softmax(monkeypatch, kernels):
    """And for any length where PyTorch would sample."""
    on_cuda = torch.get_default_device().type == "cuda"
    monkeypatch.setattr(attention, "HAS_CUDA_KERNELS" if on_cuda else "HAS_CPU_KERNELS", kernels)
    tokens = (attention.EXACT_TOKENS_PER_HASH_ON_CUDA if on_cuda else EXACT_TOKENS_PER_HASH)["softmax"]
    options = {"num_hash": 2, "hash_code_len": 4, "similarity": "softmax", "normalization": "sum"}
    for length in (2 * tokens, 2 * tokens + 1):
        arguments = inputs(1, 2, length, length)
        exact = yoso_attention(*arguments, **options, expectation=True)
        auto = yoso_attention(*arguments, **options, expectation="auto")
        assert torch.allclose(auto, exact) == (length == 2 * tokens or not kernels)


def crossing_of(*arguments):
    """The length up to which the exact weights are taken, 10^9 where they always are."""
    return bisect.bisect_left(range(1, 10**9 + 1), True, key=lambda n: not exact_is_cheaper(n, n, *arguments))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_auto_goes_by_the_device(monkeypatch, similarity):
    monkeypatch.setattr(attention, "HAS_CPU_KERNELS", True)
    monkeypatch.setattr(attention, "HAS_AMX", False)
    on_cpu = 64 * EXACT_TOKENS_PER_HASH[similarity]
    without_kernels = 10**9 if similarity == "softmax" else on_cpu
    for has_cuda_kernels in (True, False):
        monkeypatch.setattr(attention, "HAS_CUDA_KERNELS", has_cuda_kernels)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            on_cuda = without_kernels
            # without tensor cores, which multiply numbers of 16 bits, the exact kernel has no such lead
            if has_cuda_kernels and (similarity == "softmax" or dtype != torch.float32):
                on_cuda = 64 * attention.EXACT_TOKENS_PER_HASH_ON_CUDA[similarity]
            assert crossing_of(64, similarity, "cuda", dtype) == on_cuda
            assert crossing_of(64, similarity, "cpu", dtype) == on_cpu
            assert crossing_of(64, similarity, "mps", dtype) == without_kernels


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_auto_goes_by_the_dtype_on_a_cpu_with_amx(monkeypatch, similarity):
    monkeypatch.setattr(attention, "HAS_CPU_KERNELS", True)
    monkeypatch.setattr(attention, "HAS_CUDA_KERNELS", False)
    for has_amx in (False, True):
        monkeypatch.setattr(attention, "HAS_AMX", has_amx)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with_amx = has_amx and dtype == torch.bfloat16
            tokens = attention.EXACT_TOKENS_PER_HASH_WITH_AMX if with_amx else EXACT_TOKENS_PER_HASH
            assert crossing_of(3, similarity, "cpu", dtype) == 3 * tokens[similarity]


def test_the_call_goes_by_the_dtype_that_it_gets(monkeypatch):
    monkeypatch.setattr(attention, "EXACT_TOKENS_PER_HASH_WITH_AMX", {"cosine": 2 * EXACT_TOKENS_PER_HASH["cosine"]})
    arguments = [x.bfloat16() for x in inputs(1, 2, CROSSING + 1, CROSSING + 1)]
    on_cpu = torch.get_default_device().type == "cpu"
    for has_amx in (False, True):
        monkeypatch.setattr(attention, "HAS_AMX", has_amx)
        options = {"hash_functions": HashFunctions.sample(2, 16, 8, 4)}
        # on a GPU it is exact for longer
        exact = has_amx or not on_cpu
        auto, same = (yoso_attention(*arguments, expectation=x, **options) for x in ("auto", exact))
        assert torch.equal(auto, same)


def test_auto_draws_hash_functions_only_to_sample(generator):
    for length in (CROSSING, CROSSING + 1):
        arguments = inputs(1, 2, length, length)
        state = generator.get_state()
        auto = yoso_attention(*arguments, num_hash=8, hash_code_len=4, expectation="auto")
        drawn = not torch.equal(generator.get_state(), state)
        assert drawn == (length > CROSSING)
        generator.set_state(state)
        assert torch.equal(auto, yoso_attention(*arguments, num_hash=8, hash_code_len=4, expectation=not drawn))


def test_auto_compiled_for_every_length_gives_the_eager_result():
    functions = HashFunctions.sample(2, 16, 8, 4)

    def attention(query, key, value):
        return yoso_attention(query, key, value, hash_functions=functions, expectation="auto")

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (CROSSING, CROSSING + 1, CROSSING - 3, CROSSING + 7):
        arguments = [x.requires_grad_() for x in inputs(1, 2, length, length)]
        grad = torch.randn(1, 2, length, 12)
        out = compiled(*arguments)
        expected = gradients(arguments, grad, hash_functions=functions, expectation="auto")
        torch.testing.assert_close((out, *torch.autograd.grad(out, arguments, grad)), expected)


def test_compiled_for_every_number_of_heads_and_hash_functions():
    compiled = torch.compile(yoso_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads, num_hash in ((2, 4), (3, 9), (4, 5)):
        arguments = inputs(1, heads, 20, 20)
        torch.manual_seed(0)
        expected = yoso_attention(*arguments, num_hash=num_hash, hash_code_len=5)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(*arguments, num_hash=num_hash, hash_code_len=5), expected)


def test_randomness_comes_from_the_global_generator_and_is_shared_by_the_batch():
    query, key, value = inputs(1)
    torch.manual_seed(5)
    first, second = (yoso_attention(query, key, value, num_hash=4) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, yoso_attention(query, key, value, num_hash=4))
    assert not torch.equal(first, second)
    out = yoso_attention(*(x.expand(3, -1, -1, -1) for x in (query, key, value)), num_hash=4)
    assert torch.equal(out[0], out[1])


@BOTH
def test_half_precision_is_close_to_float32_and_keeps_values_dtype(expectation):
    torch.manual_seed(0)
    query, key, value = inputs(D=64, Dv=64)
    options = {"expectation": expectation}
    if not expectation:
        options["hash_functions"] = HashFunctions.sample(3, 64, 512, 3)
    for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float16, 0.03)):
        rounded = [x.to(dtype) for x in (query, key, value)]
        out = yoso_attention(*rounded, **options)
        assert out.dtype == dtype
        wide = yoso_attention(*(x.float() for x in rounded), **options)
        torch.testing.assert_close(out.float(), wide, rtol=0, atol=tolerance)
    for dtypes in ((torch.float32, torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32, torch.bfloat16)):
        rounded = [x.to(dtype) for x, dtype in zip((query, key, value), dtypes, strict=True)]
        mixed, wide = yoso_attention(*rounded, **options), yoso_attention(*(x.float() for x in rounded), **options)
        assert torch.equal(mixed, wide.to(dtypes[2]))


def test_autocast_and_compile_give_the_eager_result():
    query, key, value = inputs()
    functions = HashFunctions.sample(3, 16, 8, 5)

    def attention(query, key, value):
        return yoso_attention(query, key, value, hash_functions=functions)

    plain = attention(query, key, value)
    with torch.autocast(query.device.type, torch.bfloat16):
        torch.testing.assert_close(attention(query, key, value), plain)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    grad = torch.randn(2, 3, 20, 12)
    expected = gradients((query, key, value), grad, hash_functions=functions)
    arguments = [x.clone().requires_grad_() for x in (query, key, value)]
    out = compiled(*arguments)
    torch.testing.assert_close((out, *torch.autograd.grad(out, arguments, grad)), expected)


def peak_memory(lengths, options, environment):
    """Peak bytes of forward and backward of 1 x 2 x N x 64, beyond the process with its inputs, for each length N.

    What a thread needs, whatever the heads, counts in full: 12 heads take less than six times that. The highest of
    three runs: in one, what two threads need may not be there at the same time.
    """
    # each run has a process of its own, which one that has imported all and run nothing becomes
    code = f"""
import os, torch
from yoso_hf import yoso_attention

def memory(name):
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(name))

def measure(num_rows):
    torch.set_num_threads(2)
    arguments = [torch.randn(1, 2, num_rows, 64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 2, num_rows, 64)
    small = [torch.randn(1, 2, 64, 64, requires_grad=True) for _ in range(3)]
    yoso_attention(*small, {options}).sum().backward()
    # what is resident now: the peak so far may lie in the imports
    before = memory("VmRSS")
    yoso_attention(*arguments, {options}).backward(grad)
    print(num_rows, memory("VmHWM") - before, flush=True)

for num_rows in {lengths} * 3:
    process = os.fork()
    if process == 0:
        measure(num_rows)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True, text=True)
    peaks = dict.fromkeys(lengths, 0)
    for line in run.stdout.splitlines():
        num_rows, peak = map(int, line.split())
        peaks[num_rows] = max(peaks[num_rows], peak)
    return list(peaks.values())


@pytest.fixture(params=["kernel", "pytorch"])
def softmax_path(request, monkeypatch):
    """Exact softmax by the kernel, where there is one, and as where there is none."""
    if request.param == "pytorch":
        monkeypatch.setattr(attention, "HAS_CPU_KERNELS", False)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("expectation", [False, True])
@pytest.mark.parametrize(("N", "M"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.usefixtures("softmax_path")
def test_without_queries_or_keys_there_is_nothing_to_add(N, M, expectation, similarity):
    tensors = [x.requires_grad_() for x in inputs(N=N, M=M)]
    normalization = "sum" if similarity == "softmax" else "l2"
    options = {"expectation": expectation, "similarity": similarity, "normalization": normalization}
    out = yoso_attention(*tensors, **options)
    assert torch.equal(out, torch.zeros(2, 3, N, 12))
    for x, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("path", ["compiled", pytest.param("reference", marks=pytest.mark.slow)])
def test_sampled_memory_is_linear(path):
    if path == "compiled" and not ops.compiled_backends():
        pytest.skip("no compiled extension")
    # one hash function: memory does not depend on their number, except for the codes
    options = "num_hash=1" if path == "reference" else "num_hash=32"
    environment = {"YOSO_REFERENCE": "1"} if path == "reference" else {}
    half, full = peak_memory([16384, 32768], options, environment)
    assert full < 2.2 * half


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("path", ["compiled", pytest.param("reference", marks=pytest.mark.slow)])
def test_expectation_at_16384_stays_under_a_gigabyte(path):
    if path == "compiled" and not ops.compiled_backends():
        pytest.skip("no compiled extension")
    environment = {"YOSO_REFERENCE": "1"} if path == "reference" else {}
    # of 12 heads
    assert peak_memory([16384], "expectation=True", environment)[0] < 1e9 / 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_code_len": 0}, "hash_code_len must be in 1..16, got 0"),
        ({"hash_code_len": 17}, r"hash_code_len must be in 1..16, got 17 \(1..32 with expectation=True"),
        ({"hash_code_len": 17, "expectation": "auto"}, "hash_code_len must be in 1..16, got 17"),
        ({"hash_code_len": 33, "expectation": True}, "hash_code_len must be in 1..32, got 33$"),
        ({"hash_code_len": [4, 33, 4], "expectation": True}, r"hash_code_len must be in 1..32, got \[4, 33, 4\]"),
        ({"hash_code_len": [4, 17, 4]}, r"must be in 1..16, got \[4, 17, 4\] \(1..32 with expectation=True"),
        ({"hash_code_len": [4, 5]}, "hash_code_len must be one number or 3, one for each head, got 2"),
        (
            {"hash_code_len": [4, 5, 6], "hash_functions": HashFunctions.sample(3, 16, 4, 5)},
            r"hash_code_len must be at most that of hash_functions, 5, got \[4, 5, 6\]",
        ),
        ({"similarity": "euclidean"}, "similarity must be one of .*, got 'euclidean'"),
        ({"hash_code_len": 9.0}, "hash_code_len must be an integer, got 9.0"),
        ({"hash_code_len": "9"}, "hash_code_len must be an integer, got '9'"),
        ({"hash_code_len": [4, 4.5, 4]}, r"hash_code_len must be in 1..16, got \[4, 4.5, 4\]"),
        ({"num_hash": 0}, "num_hash must be at least 1, got 0"),
        ({"num_hash": 2.5}, "num_hash must be an integer, got 2.5"),
        ({"num_hash": True}, "num_hash must be an integer, got True"),
        ({"local_window": -1}, "local_window must be at least 0, got -1"),
        (
            {"query": torch.zeros(3, 20, 16)},
            r"query must have shape \[B, H, rows, columns\], got \[3, 20, 16\]",
        ),
        ({"query": [[0.0]]}, "query must be a tensor, got list"),
        (
            {"query": torch.zeros(2, 3, 20, 16, dtype=torch.long)},
            "query must be float16, bfloat16, float32 or float64, got torch.int64",
        ),
        (
            {"key": torch.zeros(2, 3, 25, 16, dtype=torch.float8_e4m3fn)},
            "key must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn",
        ),
        ({"key": torch.zeros(2, 3, 25, 8)}, "key must have query's head_dim 16, got 8"),
        (
            {"key": torch.zeros(1, 3, 25, 16)},
            r"key must have query's batch and heads \[2, 3\], got shape \[1, 3, 25, 16\]",
        ),
        ({"value": torch.zeros(2, 3, 24, 12)}, "value must have key's length 25, got 24"),
        (
            {"value": torch.zeros(2, 3, 25, 12, device="meta")},
            f"value is on meta, but query is on {torch.get_default_device()}",
        ),
        (
            {"key_mask": torch.ones(2, 20, dtype=torch.bool)},
            r"key_mask must have shape \[2, 25\], got \[2, 20\]",
        ),
        (
            {"query_mask": torch.ones(2, 25, dtype=torch.bool)},
            r"query_mask must have shape \[2, 20\], got \[2, 25\]",
        ),
        (
            {"key_mask": torch.ones(2, 25)},
            "key_mask must be a tensor of bool, True for a real token, got torch.float32",
        ),
        ({"key_mask": [[True]]}, "key_mask must be a tensor of bool, True for a real token, got list"),
        ({"normalization": "softmax"}, "normalization must be one of .*, got 'softmax'"),
        ({"backward": "linear"}, "backward must be one of .*, got 'linear'"),
        ({"expectation": "always"}, r"expectation must be one of \(True, False, 'auto'\), got 'always'"),
        ({"expectation": 1}, r"expectation must be one of \(True, False, 'auto'\), got 1"),
        ({"backward": "exact"}, "needs expectation=True, got False"),
        ({"backward": "exact", "expectation": "auto"}, "needs expectation=True, got 'auto'"),
        (
            {"hash_functions": HashFunctions.sample(2, 16, 4, 4)},
            "hash_functions are for 2 heads of 16, but query has 3 heads of 16",
        ),
        ({"hash_functions": 32}, "hash_functions must be None or HashFunctions, got int"),
        ({"similarity": "softmax"}, 'similarity="softmax" needs normalization="sum", as softmax has it, got \'l2\''),
        ({"scale": 0.5}, "scale must be None, or a number above 0 with similarity=\"softmax\", got 0.5 with 'cosine'"),
        ({"similarity": "softmax", "normalization": "sum", "scale": 0}, "got 0 with 'softmax'"),
        ({"similarity": "softmax", "normalization": "sum", "scale": float("inf")}, "got inf with 'softmax'"),
        ({"similarity": "softmax", "normalization": "sum", "scale": "0.5"}, "got '0.5' with 'softmax'"),
        ({"query": torch.zeros(2, 3, 20, 0)}, "query must have a head_dim of at least 1, got shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    query, key, value = inputs()
    arguments = {"query": query, "key": key, "value": value, **change}
    with pytest.raises(ValueError, match=message):
        yoso_attention(**arguments)


def dense(query, key, value, key_mask, hash_code_len, normalization, similarity="cosine", scale=None):
    """Exact attention by its definition, in float64, one head of a batch row after the other."""
    query, key, value = (x.double() for x in (query, key, value))
    scale = scale or query.shape[3] ** -0.5
    out = value.new_zeros(*query.shape[:3], value.shape[3])
    for b in range(query.shape[0]):
        real = key_mask[b]
        for h in range(query.shape[1]):
            q, k, v = query[b, h], key[b, h, real], value[b, h, real]
            if similarity == "softmax":
                weights = (scale * q @ k.T).exp()
            else:
                x = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).T
                weights = (1 - x.clamp(-1, 1).acos() / math.pi) ** hash_code_len[h]
            out[b, h] = weights @ v
            if normalization == "sum":
                out[b, h] /= weights.sum(-1, keepdim=True)
            elif normalization == "l2":
                out[b, h] /= out[b, h].norm(dim=-1, keepdim=True)
    return out


@pytest.mark.parametrize("normalization", ["l2", "sum", None])
@pytest.mark.parametrize("rows", [25, 20])
def test_lengths_by_head_are_as_defined(normalization, rows):
    query, key, value = inputs(N=rows, D=10)
    key_mask = torch.rand(2, 25) > 0.3
    options = {"hash_code_len": [4, 9, 20], "normalization": normalization}
    result = yoso_attention(query, key, value, key_mask, expectation=True, **options)
    torch.testing.assert_close(result.double(), dense(query, key, value, key_mask, **options), rtol=1e-4, atol=1e-6)
    weights = attention_weights(query, key, key_mask, **options)
    if normalization != "l2":
        torch.testing.assert_close(weights @ value, result, rtol=1e-4, atol=5e-6)


def test_weights_do_not_depend_on_lengths():
    query, key, _ = inputs(D=10)
    expected = attention_weights(query, key, hash_code_len=3)
    for factor in (1e-13, 1e13):
        torch.testing.assert_close(attention_weights(query * factor, key * factor, hash_code_len=3), expected)


# the largest dot products are some 7 of sqrt(D), and with a longer factor beyond exp's range in float32
@pytest.mark.parametrize("longer", [1, 8])
@pytest.mark.parametrize("rows", [25, 20])
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.usefixtures("softmax_path")
def test_softmax_weights_are_as_defined(longer, rows, scale):
    query, key, value = inputs(N=rows, D=10)
    # what all have in common, as in trained models
    query, key = query * longer + torch.randn(10), key * longer + torch.randn(10)
    key_mask = torch.rand(2, 25) > 0.3
    options = {"hash_code_len": [4, 9, 20], "normalization": "sum", "similarity": "softmax", "scale": scale}
    result = yoso_attention(query, key, value, key_mask, expectation=True, **options)
    expected = dense(query, key, value, key_mask, **options)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    weights = attention_weights(query, key, key_mask, **options)
    torch.testing.assert_close((weights @ value).double(), expected, rtol=1e-4, atol=1e-4)


def softmax_of(query, key, value, key_mask, scale=None):
    mask = None if key_mask is None else key_mask[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("rows", [25, 20])
@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_samples_of_softmax_are_softmax_where_every_key_is_heavy(rows, scale, masked):
    """And its gradients, whatever queries and keys have in common."""
    tensors = [x.requires_grad_() for x in inputs(N=rows, D=10, dtype=torch.float64)]
    query, key, value = tensors
    query, key = query + torch.randn(10), key + torch.randn(10)
    key_mask = torch.rand(2, 25) > 0.3
    options = {"similarity": "softmax", "normalization": "sum", "num_hash": 2, "hash_code_len": 3}
    query_mask = torch.rand(2, rows) > 0.3
    real = query_mask[:, None, :, None] if masked else torch.ones(1)
    out = yoso_attention(
        query, key, value, key_mask, query_mask=query_mask if masked else None, scale=scale, **options
    )
    expected = softmax_of(query, key, value, key_mask, scale)
    torch.testing.assert_close(out * real, expected * real)
    grad = torch.randn_like(out) * real
    for got, truth in zip(*(torch.autograd.grad(x, tensors, grad) for x in (out, expected)), strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-6, atol=1e-9)


def test_samples_of_softmax_are_softmax_where_all_pairs_share_a_bucket(monkeypatch):
    """Codes of one bit and their complements are the only bucket, so that nothing is left to chance."""
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", 3)
    tensors = [x.requires_grad_() for x in inputs(N=40, M=40, D=8, dtype=torch.float64)]
    key_mask = torch.rand(2, 40) > 0.2
    options = {"similarity": "softmax", "normalization": "sum", "num_hash": 2, "hash_code_len": 1}
    out, expected = yoso_attention(*tensors, key_mask, **options), softmax_of(*tensors, key_mask)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for got, truth in zip(*(torch.autograd.grad(x, tensors, grad) for x in (out, expected)), strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("hash_code_len", [3, 6])
def test_samples_of_softmax_come_to_softmax(monkeypatch, hash_code_len):
    """With gradients, whatever the length of codes: an error that falls with m, and is small where there are many."""
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", 3)
    tensors = [x.requires_grad_() for x in inputs(B=2, N=40, M=40, D=8)]
    query, key = tensors[0] + torch.randn(8), tensors[1] + torch.randn(8)
    key_mask = torch.rand(2, 40) > 0.2
    expected = softmax_of(query, key, tensors[2], key_mask)
    grad = torch.randn_like(expected)
    expected = [expected, *torch.autograd.grad(expected, tensors, grad, retain_graph=True)]
    options = {"hash_code_len": hash_code_len, "normalization": "sum", "similarity": "softmax"}
    errors = []
    for num_hash in (100, 10_000):
        out = yoso_attention(query, key, tensors[2], key_mask, num_hash=num_hash, **options)
        found = [out, *torch.autograd.grad(out, tensors, grad, retain_graph=True)]
        errors.append([((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)])
    for few, many in zip(*errors, strict=True):
        # a tenth, by the square root of a hundred
        assert many < 0.2 * few
        assert many < 0.05


def test_samples_of_softmax_do_not_notice_what_all_keys_have_in_common(monkeypatch):
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", 3)
    query, key, value = inputs(N=40, M=50, dtype=torch.float64)
    functions = HashFunctions.sample(3, 16, 8, 4)
    options = {"hash_functions": functions, "similarity": "softmax", "normalization": "sum"}
    expected = yoso_attention(query, key, value, **options)
    torch.testing.assert_close(yoso_attention(query, key + 5 * torch.randn(16), value, **options), expected)


@pytest.mark.parametrize("longer", [0, 40])
def test_a_few_keys_have_as_much_in_common(longer):
    """All of them get their weight exactly, also those of a short text in a long batch."""
    query, key, value = inputs(N=30, M=30 + longer, D=64)
    key_mask = (torch.arange(30 + longer) < 30).expand(query.shape[0], -1)
    common = 200 * torch.nn.functional.normalize(torch.randn(64), dim=0)
    options = {"num_hash": 4, "hash_code_len": 8, "similarity": "softmax", "normalization": "sum"}
    out = yoso_attention(query, key + common, value, key_mask, **options)
    torch.testing.assert_close(out, softmax_of(query, key, value, key_mask), rtol=1e-3, atol=1e-3)


def test_samples_of_softmax_are_no_noisier_for_what_all_queries_have_in_common(monkeypatch):
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", 4)
    query, key, value = inputs(B=1, H=2, N=300, M=300, D=16)
    options = {"num_hash": 64, "hash_code_len": 8, "similarity": "softmax", "normalization": "sum"}
    errors = []
    for common in (torch.zeros(16), 6 * torch.nn.functional.normalize(torch.randn(16), dim=0)):
        softmax = softmax_of(query + common, key, value, None)
        out = yoso_attention(query + common, key, value, **options)
        errors.append((out - softmax).norm() / softmax.norm())
    # the keys' weights have it, which are exact
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("similarity", ["cosine", "softmax"])
def test_a_key_like_many_queries_is_where_softmax_has_it(similarity):
    """A key that most queries attend to is missed by samples of cosines, and kept by those of similarity="softmax"."""
    query, key, value = inputs(B=1, H=2, N=500, M=500, D=16)
    # exp(7) times the weight of another key, half of the total
    query[..., 0] += 4
    key[:, :, 100, 0] += 6.5
    softmax = (query @ key.transpose(-1, -2) / 4).softmax(-1) @ value
    options = {"hash_code_len": 8, "num_hash": 64, "normalization": "sum", "similarity": similarity}
    error = (yoso_attention(query, key, value, **options) - softmax).norm() / softmax.norm()
    exact = (yoso_attention(query, key, value, expectation=True, **options) - softmax).norm() / softmax.norm()
    if similarity == "softmax":
        assert error < 0.3
        assert exact < 0.05
    else:
        assert min(error, exact) > 0.6


@pytest.mark.parametrize(("M", "bits"), [(100, 13), (4096, 13), (4097, 14), (8192, 14), (8193, 15), (70_000, 16)])
@pytest.mark.parametrize("highest", [16, 14, 9])
def test_samples_of_softmax_have_codes_that_leave_one_key_to_a_bucket(monkeypatch, M, bits, highest):
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", 1)
    found, compute = [], attention.sampled_remainder
    monkeypatch.setattr(attention, "sampled_remainder", lambda *args: found.append(args[5:8]) or compute(*args))
    query, key, value = inputs(B=1, N=5, M=M, D=8)
    functions = HashFunctions.sample(3, 8, 2, highest)
    yoso_attention(query, key, value, hash_functions=functions, similarity="softmax", normalization="sum")
    ((query_codes, key_codes, length),) = found
    assert length == min(bits, highest)
    assert query_codes.max().item() < 1 << length
    assert key_codes.max().item() >= 1 << (length - 1)


def test_samples_of_softmax_know_lengths():
    """Short queries attend to all keys alike, long ones to few: no power of a cosine does both."""
    device = torch.get_default_device()
    # the same rows on every device: of others, as they are drawn, one in twenty has a power that comes within 0.45
    with torch.device("cpu"):
        query, key, value = inputs(B=1, H=2, N=300, M=300, D=16)
        query, key = (1.2 * torch.rand(1, 2, 300, 1) * x for x in (query, key))
    query, key, value = (x.to(device) for x in (query, key, value))
    softmax = softmax_of(query, key, value, None)
    options = {"num_hash": 1000, "normalization": "sum"}
    out = yoso_attention(query, key, value, similarity="softmax", hash_code_len=8, **options)
    cosines = [yoso_attention(query, key, value, hash_code_len=n, expectation=True, **options) for n in range(1, 17)]
    error, *others = ((x - softmax).norm() / softmax.norm() for x in (out, *cosines))
    assert error < 0.1
    assert min(others) > 0.45


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_code_len": [4, 5, 6]}, r"hash_code_len must be one number, got \[4, 5, 6\], unless expectation=True"),
        ({"backward": "expectation"}, "backward must be \"sampled\", got 'expectation', unless expectation=True"),
        ({"local_window": 2}, "local_window must be 0, got 2, unless expectation=True"),
    ],
)
@pytest.mark.parametrize("expectation", [False, "auto", True])
def test_samples_of_softmax_have_no_other_settings(change, message, expectation):
    query, key, value = inputs(N=25)
    options = {"similarity": "softmax", "normalization": "sum", "expectation": expectation}
    options |= change
    if expectation is True:
        # where they change nothing
        expected = yoso_attention(query, key, value, similarity="softmax", normalization="sum", expectation=True)
        assert torch.equal(yoso_attention(query, key, value, **options), expected)
    else:
        with pytest.raises(ValueError, match=message):
            yoso_attention(query, key, value, **options)


def test_sampling_with_lengths_by_head_has_the_expectation_as_its_mean():
    query, key, value = inputs(B=1, N=12, M=12, D=6, Dv=4)
    options = {"hash_code_len": [2, 5, 3], "normalization": None}
    exact = yoso_attention(query, key, value, expectation=True, **options)
    direction = torch.randn_like(exact)
    torch.manual_seed(2)
    draws = torch.stack(
        [(yoso_attention(query, key, value, num_hash=8, **options) * direction).sum((0, 2, 3)) for _ in range(600)]
    ).double()
    expected = (exact * direction).sum((0, 2, 3))
    assert ((draws.mean(0) - expected).abs() < 4 * draws.std(0) / math.sqrt(600)).all()


@pytest.mark.parametrize("kind", ["hadamard", "gaussian"])
def test_a_heads_shorter_codes_are_the_first_bits_of_the_longer_ones(kind):
    functions = HashFunctions.sample(3, 10, 40, 7, kind=kind)
    x = torch.randn(2, 3, 9, 10)
    part = functions.part([2, 0], 4).codes(x[:, [2, 0]])
    assert torch.equal(part, functions.codes(x)[:, [2, 0]] & 15)
    query, key, value = inputs(N=25, D=10)
    one_by_one = [
        yoso_attention(*(x[:, [h]] for x in (query, key, value)), hash_functions=functions.part([h], length))
        for h, length in enumerate((4, 7, 4))
    ]
    together = yoso_attention(query, key, value, hash_code_len=[4, 7, 4], hash_functions=functions)
    torch.testing.assert_close(together, torch.cat(one_by_one, dim=1), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("softmax_path")
def test_softmax_gradients_are_those_of_the_definition():
    query, key, value = (x.requires_grad_() for x in inputs(B=2, H=2, N=7, M=7, D=4, Dv=3, dtype=torch.float64))
    key_mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])

    def function(*arguments):
        options = {"similarity": "softmax", "normalization": "sum", "scale": 0.1}
        return yoso_attention(*arguments, key_mask, expectation=True, **options) * key_mask[:, None, :, None]

    assert torch.autograd.gradcheck(function, (query, key, value))


@pytest.mark.parametrize("far", [30, 60])
@pytest.mark.usefixtures("softmax_path")
def test_weights_that_are_far_apart_stay_in_range(far):
    """Of a key that queries agree on, but for some that avoid it, and of long sequences of two tokens."""
    torch.manual_seed(0)
    N, D = 600, 16
    query, key = 0.1 * torch.randn(1, 1, N, D), 0.1 * torch.randn(1, 1, N, D)
    query[..., 0], key[:, :, 5, 0] = far**0.5, far**0.5
    query[:, :, 7, 0] = 0
    sides = torch.where(torch.arange(N) % 2 == 0, 1.0, -1.0)[:, None] * (5 * far) ** 0.5 * torch.eye(D)[0]
    key_mask = torch.ones(1, N, dtype=torch.bool)
    for q, k in ((query, key), (sides[None, None],) * 2):
        value = torch.randn(1, 1, N, 3)
        options = {"normalization": "sum", "similarity": "softmax", "scale": 1.0}
        tensors = [x.clone().requires_grad_() for x in (q, k, value)]
        out = yoso_attention(*tensors, expectation=True, **options)
        torch.testing.assert_close(out, dense(q, k, value, key_mask, [9], **options).float(), rtol=1e-3, atol=1e-3)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), tensors))


@pytest.mark.usefixtures("softmax_path")
@pytest.mark.parametrize("far", [70.0, *torch.arange(72, 76, 0.25).tolist()])
def test_gradients_of_a_query_that_avoids_the_only_key_are_finite(far):
    """Its weights add up to what float32 only just holds, or does not: then it gets zero."""
    torch.manual_seed(0)
    query, key, value = torch.zeros(1, 1, 8, 1), torch.ones(1, 1, 1, 1), 3 * torch.randn(1, 1, 1, 64)
    query[0, 0, 0] = -far * 8 / 7
    tensors = [x.requires_grad_() for x in (query, key, value)]
    options = {"similarity": "softmax", "normalization": "sum", "scale": 1.0}
    out = yoso_attention(*tensors, **options)
    torch.testing.assert_close(out[:, :, 1:], value.expand(1, 1, 7, 64))
    if far == 70 or out[:, :, 0].count_nonzero() > 0:
        torch.testing.assert_close(out[:, :, :1], value)
    for gradient in torch.autograd.grad(out, tensors, 10 * torch.randn_like(out)):
        assert gradient.isfinite().all()


@pytest.mark.usefixtures("softmax_path")
@pytest.mark.parametrize("largest", [30, 75, 100])
def test_samples_of_softmax_with_large_dot_products_come_close(largest):
    """As in heads of trained models, which float32 does not hold exp of."""
    torch.manual_seed(0)
    N, D = 600, 3
    directions = torch.nn.functional.normalize(torch.randn(1, 2, N // 2, D), dim=-1)
    # their mean is zero; the second head's products are smaller
    query = torch.cat([directions, -directions], dim=2) * torch.tensor([largest, 2.0]).sqrt()[:, None, None]
    key = query.roll(1, dims=2)
    value, grad = torch.randn(1, 2, N, 4), torch.randn(1, 2, N, 4)
    tensors = [x.clone().requires_grad_() for x in (query, key, value)]
    options = {"normalization": "sum", "similarity": "softmax", "scale": 1.0}
    key_mask = torch.ones(1, N, dtype=torch.bool)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    truth = dense(*exact, key_mask, [9], **options)
    truths = truth, *torch.autograd.grad(truth, exact, grad.double())
    out = yoso_attention(*tensors, hash_code_len=9, num_hash=256, **options)
    for got, expected in zip((out, *torch.autograd.grad(out, tensors, grad)), truths, strict=True):
        error = (got - expected).square().sum((2, 3)) / expected.square().sum((2, 3))
        assert (error.sqrt() < 0.35).all(), error.sqrt()


@BOTH
@pytest.mark.usefixtures("softmax_path")
def test_softmax_of_equal_or_zero_vectors_is_finite(expectation):
    for query, key in ((torch.zeros(1, 2, 5, 4), torch.ones(1, 2, 5, 4)), (torch.ones(1, 2, 5, 4),) * 2):
        arguments = [x.clone().requires_grad_() for x in (query, key, torch.randn(1, 2, 5, 3))]
        out = yoso_attention(*arguments, similarity="softmax", normalization="sum", expectation=expectation)
        out.square().sum().backward()
        torch.testing.assert_close(out, arguments[2].mean(2, keepdim=True).expand_as(out))
        assert all(x.grad.isfinite().all() for x in arguments)


@pytest.mark.usefixtures("softmax_path")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("M", [0, 25])
def test_exact_softmax_of_other_dtypes_and_no_keys(dtype, M):
    tensors = inputs(N=25, M=M, dtype=dtype)
    key_mask = torch.arange(M).expand(2, M) < torch.tensor([[20], [0]])
    options = {"similarity": "softmax", "normalization": "sum", "expectation": True}
    out = yoso_attention(*tensors, key_mask, **options)
    assert out.dtype == dtype
    expected = dense(*tensors, key_mask, None, "sum", "softmax").nan_to_num()
    bound = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    assert not out[1].any()


@pytest.mark.usefixtures("softmax_path")
def test_masked_keys_of_exact_softmax_may_hold_anything():
    tensors = [x.requires_grad_() for x in inputs(N=25)]
    key_mask = torch.tensor([[True] * 20 + [False] * 5, [False] * 25])
    masked = ~key_mask[:, None, :, None]
    found = []
    for filling in (0.0, math.nan, math.inf):
        query, key, value = tensors[0], *(x.masked_fill(masked, filling) for x in tensors[1:])
        out = yoso_attention(query, key, value, key_mask, similarity="softmax", normalization="sum", expectation=True)
        found.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


@BOTH
@pytest.mark.usefixtures("softmax_path")
def test_softmax_of_masked_rows_alone_is_zero(expectation):
    tensors = [x.requires_grad_() for x in inputs(N=25)]
    key_mask = torch.tensor([[True] * 25, [False] * 25])
    out = yoso_attention(*tensors, key_mask, similarity="softmax", normalization="sum", expectation=expectation)
    assert not out[1].any()
    for gradient in torch.autograd.grad(out.square().sum(), tensors):
        assert gradient.isfinite().all()
        assert not gradient[1].any()


@BOTH
@pytest.mark.parametrize("normalization", ["l2", None])
def test_second_derivatives_are_refused(expectation, normalization):
    """Not taken for zero."""
    tensors = [x.requires_grad_() for x in inputs(N=6, M=6, Dv=16)]
    out = yoso_attention(*tensors, expectation=expectation, normalization=normalization)
    gradients = torch.autograd.grad((out**3).sum(), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(gradients[0].square().sum(), tensors, allow_unused=True)


@BOTH
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("moved", [0, 1, 2], ids=["query", "key", "value"])
def test_forward_mode_derivatives_are_refused(moved, compiled, expectation):
    tensors = inputs(N=6, M=6, Dv=16)

    def derivative(moving):
        def attend(x):
            return yoso_attention(*tensors[:moved], x, *tensors[moved + 1 :], expectation=expectation)

        return torch.func.jvp(attend, (moving,), (torch.ones_like(moving),))

    if compiled:
        derivative = torch.compile(derivative, backend="eager")
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives, as torch.func.jvp and jacfwd take"):
        derivative(tensors[moved])


@pytest.mark.parametrize("path", ["compiled", "reference"])
def test_autocast_does_not_round_what_is_float32(path):
    """On the reference path in a process of its own, as it is chosen once."""
    environment = {**os.environ, "YOSO_REFERENCE": "1"} if path == "reference" else dict(os.environ)
    subprocess.run([sys.executable, "-c", UNDER_AUTOCAST], env=environment, check=True)


UNDER_AUTOCAST = """
import torch
from yoso_hf import HashFunctions, attention, yoso_attention
from yoso_hf.attention import attention_weights

# the others are sampled with similarity="softmax"
attention.NUM_HEAVY_KEYS = 4

def results(**options):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    out = yoso_attention(*tensors, **options)
    return out, *torch.autograd.grad(out.square().sum(), tensors[2]), attention_weights(*tensors[:2])

for kind in ("hadamard", "gaussian"):
    functions = HashFunctions.sample(2, 16, 8, 4, kind=kind)
    softmax = {"similarity": "softmax", "normalization": "sum"}
    for options in (
        {"expectation": True}, {}, {"local_window": 3}, {"backward": "expectation"}, {**softmax, "expectation": True},
        softmax,
    ):
        options = {**options, "hash_functions": functions}
        expected = results(**options)
        with torch.autocast("cpu", torch.bfloat16):
            for got, want in zip(results(**options), expected, strict=True):
                assert got.dtype == torch.float32
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize("hash_code_len", [9, [32, 32, 32]])
def test_float16_holds_the_gradient_of_rows_that_were_short(hash_code_len):
    """Before they were scaled to length one: their gradient is out of its range then."""
    tensors = inputs(N=256, M=256, D=64, dtype=torch.float16)
    found = []
    for dtype in (torch.float16, torch.float64):
        rows = [x.to(dtype).requires_grad_() for x in tensors]
        out = yoso_attention(*rows, expectation=True, hash_code_len=hash_code_len)
        found.append((out, *torch.autograd.grad(out[..., 0].sum(), rows)))
    for got, truth in zip(*found, strict=True):
        assert got.dtype == torch.float16
        assert (got - truth).norm() <= 5e-3 * truth.norm()


@pytest.mark.parametrize("scale", [3000, 1e-5])
def test_float16_holds_rows_whose_sum_it_does_not(scale):
    """Of equal keys, all values: too large a number, or one with few bits."""
    query, key, value = inputs(N=300, M=300, dtype=torch.float16)
    key = key[:, :, :1].expand_as(key)
    value = (value.abs() * scale).half()
    functions = HashFunctions.sample(3, 16, 8, 4)
    out, truth = (
        yoso_attention(*(x.to(dtype) for x in (query, key, value)), hash_functions=functions)
        for dtype in (torch.float16, torch.float64)
    )
    assert (out - truth).norm() <= 2e-3 * truth.norm()


@pytest.mark.parametrize("expectation", [False, True])
@pytest.mark.parametrize("heavy", [64, 4])
def test_masked_keys_may_hold_anything_with_softmax(monkeypatch, heavy, expectation):
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", heavy)
    query, key, value = inputs(N=20, M=20)
    mask = torch.arange(20).expand(2, 20) < 15
    found = []
    for anything in (0.0, float("nan")):
        tensors = [x.clone().requires_grad_() for x in (query, key, value)]
        with torch.no_grad():
            for x in tensors[1:]:
                x[:, :, 15:] = anything
        functions = HashFunctions.seeded(0, 0, 3, 16, 8, 4)
        options = {"expectation": expectation, "hash_functions": functions, "similarity": "softmax"}
        out = yoso_attention(*tensors, mask, normalization="sum", **options)
        found.append([out, *(x[:, :, :15] for x in torch.autograd.grad(out.sum(), tensors))])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("heavy", [64, 4])
def test_masked_queries_may_hold_anything_with_softmax(monkeypatch, heavy):
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", heavy)
    query, key, value = inputs(N=20, M=20)
    mask = torch.arange(20).expand(2, 20) < 15
    real = mask[:, None, :, None]
    found = []
    for anything in (0.0, 7.0, math.nan):
        tensors = [x.clone().requires_grad_() for x in (query.masked_fill(~real, anything), key, value)]
        functions = HashFunctions.seeded(0, 0, 3, 16, 8, 4)
        options = {"hash_functions": functions, "similarity": "softmax", "normalization": "sum"}
        out = yoso_attention(*tensors, mask, query_mask=mask, **options)[:, :, :15]
        found.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for got, *others in zip(*found, strict=True):
        assert got.any()
        assert all(torch.equal(got, other) for other in others)


# more than 64 keys would have samples
@pytest.mark.parametrize(("M", "expectation"), [(3, False), (3, True), (100, True)])
def test_softmax_of_equal_keys_is_the_mean_of_the_values(M, expectation):
    """What rounding leaves of them must not become a direction. Exact, their gradient is softmax's."""
    query, key, value = inputs(M=M)
    key = key[:, :, :1].expand_as(key).clone().requires_grad_()
    out = yoso_attention(
        query, key, value, expectation=expectation, similarity="softmax", normalization="sum", num_hash=2
    )
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out), rtol=1e-4, atol=1e-5)
    if expectation:
        softmax = (query @ key.transpose(-1, -2) / 4).softmax(-1) @ value
        grad = torch.randn_like(out)
        gradients = [torch.autograd.grad(x, key, grad)[0] for x in (out, softmax)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_tiny_weights_are_divided_by_their_sum():
    """Whose square is out of float32's range."""
    query, key, value = inputs(B=1, H=1, N=1, M=1)
    query = -key + 0.3 * query
    weight = attention_weights(query, key, hash_code_len=[32]).item()
    assert 0 < weight < 1e-20
    tensors = [x.requires_grad_() for x in (query, key, value)]
    out = yoso_attention(*tensors, expectation=True, hash_code_len=[32], normalization="sum")
    torch.testing.assert_close(out, value)
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("cosine", "is_kept"), [(-0.7, True), (-0.99, False), (-1.0, False)])
def test_weights_too_small_to_be_divided_by_count_as_none(cosine, is_kept):
    """A weight of 1e-41 has an inverse beyond float32's range, which would make a gradient of NaN."""
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[cosine, math.sqrt(1 - cosine**2)]]]])
    tensors = [x.requires_grad_() for x in (query, key, torch.randn(1, 1, 1, 12))]
    out = yoso_attention(*tensors, expectation=True, hash_code_len=32, normalization="sum")
    torch.testing.assert_close(out, tensors[2] if is_kept else torch.zeros_like(out))
    weights = attention_weights(*tensors[:2], hash_code_len=32, normalization="sum")
    torch.testing.assert_close(weights @ tensors[2], out)
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert gradient.isfinite().all()
