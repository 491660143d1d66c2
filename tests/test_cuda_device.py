"""What only a GPU can show: streams, graphs, devices, sizes, and the same results as on the CPU."""

import pytest
import torch
from test_kernels import Inputs

from yoso_hf import HashFunctions, YosoConfig, YosoForMaskedLM, ops, yoso_attention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "cuda" not in ops.compiled_backends(), reason="no GPU, or no kernels for it"
)


SAMPLED_SOFTMAX = {"similarity": "softmax", "normalization": "sum"}
both_similarities = pytest.mark.parametrize("options", [{}, SAMPLED_SOFTMAX], ids=["cosine", "softmax"])
# the second has more than 2^31 bytes before its last sequence
sizes_beyond_limits = pytest.mark.parametrize(
    ("B", "H", "N"), [(1, 1, 2**20), (20, 1, 2**20), (70000, 1, 5), (1, 2, 131_071)]
)


def tensors(B, H, N, D=64, dtype=torch.bfloat16, device="cuda"):
    torch.manual_seed(0)
    return [torch.randn(B, H, N, D, device=device).to(dtype) for _ in range(3)]


def step(query, key, value, grad=None, **options):
    """The output and the three gradients."""
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    out = yoso_attention(*inputs, **options)
    if grad is None:
        grad = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out)
    return out, *torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_codes_and_results_as_on_the_cpu(dtype):
    with torch.device("cpu"):
        inputs = Inputs("random", (2, 3, 401, 353, 64, 64, 8, 7), dtype)
    functions = inputs.functions[0]
    moved = HashFunctions(functions.parameters.cuda(), 64, 8, 7)
    differing = (moved.codes(inputs.query.cuda()).cpu() != inputs.codes[0]).double().mean()
    # a projection within rounding of zero may fall on either side
    assert differing < 1e-4
    on_cpu = inputs.sampled(ops, dtype)
    for name in ("grad", "query", "key", "value"):
        setattr(inputs, name, getattr(inputs, name).cuda())
    inputs.codes = [codes.cuda() for codes in inputs.codes]
    for gpu, cpu in zip(inputs.sampled(ops, dtype), on_cpu, strict=True):
        torch.testing.assert_close(gpu.cpu().float(), cpu.float(), rtol=2e-2, atol=2e-2 * cpu.abs().max().item())


@both_similarities
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [4096, 16_384])
def test_the_same_bits_every_time(N, dtype, options):
    """Many launches, of which each adds to the sums of the one before, whatever else runs."""
    inputs = tensors(2, 12, N, dtype=dtype)
    functions = HashFunctions.sample(12, 64, 32, 9, device="cuda")
    expected = step(*inputs, hash_functions=functions, **options)
    for _ in range(5):
        other_work = torch.cuda.Stream()
        with torch.cuda.stream(other_work):
            torch.randn(4096, 4096, device="cuda").square().sum()
        for one, other in zip(step(*inputs, hash_functions=functions, **options), expected, strict=True):
            assert torch.equal(one, other)


@both_similarities
def test_work_is_on_the_current_stream(options):
    query, key, value = tensors(1, 2, 4096)
    functions = HashFunctions.sample(2, 64, 8, 9, device="cuda")
    expected = step(query, key, value, hash_functions=functions, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # the inputs are ready long after the kernels are asked for
        torch.cuda._sleep(100_000_000)
        late = [x.clone() for x in (query, key, value)]
        results = step(*late, hash_functions=functions, **options)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"hash_code_len": [9, 7]}, SAMPLED_SOFTMAX, {**SAMPLED_SOFTMAX, "expectation": True}],
)
def test_a_graph_replays_forward_and_backward(options):
    inputs = tensors(1, 2, 1000)
    options = {"hash_functions": HashFunctions.sample(2, 64, 8, 9, device="cuda"), **options}
    step(*inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*inputs, **options)
    for x in inputs:
        x.copy_(torch.randn_like(x))
    graph.replay()
    # PyTorch's backward of softmax adds in an order of chance
    rtol = 2e-2 if options.get("expectation") else 0
    for one, other in zip(results, step(*inputs, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def test_operators_refuse_tensors_of_several_devices():
    query, key, value = tensors(1, 2, 50)
    functions = HashFunctions.sample(2, 64, 8, 9, device="cuda")
    codes = functions.codes(query)
    mask = torch.ones(1, 50, dtype=torch.bool, device="cpu")
    with pytest.raises(RuntimeError, match="parameters must be on the device"):
        ops.hash_hadamard(query, functions.parameters.cpu(), None, 8, 9)
    with pytest.raises(RuntimeError, match="mask must be on the device"):
        ops.hash_hadamard(query, functions.parameters, mask, 8, 9)
    with pytest.raises(RuntimeError, match="query_codes must be on the device"):
        ops.sampled_attention(query, key, value, codes.cpu(), codes, 9, False, True)
    with pytest.raises(RuntimeError, match="key must be on the device"):
        ops.expectation_attention(query, key.cpu(), value, 9, False, True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one():
    inputs = tensors(1, 2, 500)
    functions = HashFunctions.sample(2, 64, 8, 9, device="cuda")
    expected = step(*inputs, hash_functions=functions)
    there = HashFunctions(functions.parameters.to("cuda:1"), 64, 8, 9)
    results = step(*(x.to("cuda:1") for x in inputs), hash_functions=there)
    assert torch.cuda.current_device() == 0
    for one, other in zip(results, expected, strict=True):
        assert one.device == torch.device("cuda:1")
        assert torch.equal(one.to("cuda:0"), other)


@sizes_beyond_limits
def test_sizes_that_leave_32_bits_or_a_grid_dimension(B, H, N):
    """Against the last sequence, and some of its queries, alone."""
    if torch.cuda.mem_get_info()[0] < 20 * B * H * N * 64 * 2:
        pytest.skip("too little memory")
    query, key, value = tensors(B, H, N)
    grad = query.roll(1, dims=2)
    functions = HashFunctions.sample(H, 64, 4, 9, device="cuda")
    results = step(query, key, value, grad, hash_functions=functions)
    assert all(x.isfinite().all() for x in results)
    last = step(query[-1:], key[-1:], value[-1:], grad[-1:], hash_functions=functions)
    for one, other in zip(results, last, strict=True):
        torch.testing.assert_close(one[-1:], other)
    some = slice(N // 2, N // 2 + 7)
    alone = yoso_attention(query[-1:, :, some], key[-1:], value[-1:], hash_functions=functions)
    torch.testing.assert_close(results[0][-1:, :, some], alone)


@sizes_beyond_limits
def test_samples_of_softmax_of_such_sizes(B, H, N):
    """Near to the last sequence alone: a sum in another order may change a code, and with it a row's samples."""
    if torch.cuda.mem_get_info()[0] < 80 * B * H * N * 64 * 2:
        pytest.skip("too little memory")
    query, key, value = tensors(B, H, N)
    grad = query.roll(1, dims=2)
    options = {"hash_functions": HashFunctions.sample(H, 64, 4, 9, device="cuda"), **SAMPLED_SOFTMAX}
    results = step(query, key, value, grad, **options)
    assert all(x.isfinite().all() for x in results)
    last = step(query[-1:], key[-1:], value[-1:], grad[-1:], **options)
    for one, other in zip(results, last, strict=True):
        assert (one[-1:] - other).float().norm() < 0.05 * other.float().norm()


def test_a_model_trains_under_autocast_compile_and_checkpointing():
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    config = YosoConfig(**sizes, vocab_size=100, max_position_embeddings=600, use_expectation=False)
    torch.manual_seed(0)
    model = YosoForMaskedLM(config).cuda().train()
    ids = torch.randint(3, 100, (2, 600), device="cuda")

    def gradients(model):
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]

    plain = gradients(model)
    assert all(x.isfinite().all() for x in plain)
    model.gradient_checkpointing_enable()
    for one, other in zip(gradients(model), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    model.gradient_checkpointing_disable()
    compiled = gradients(torch.compile(model.eval()))
    for one, other in zip(compiled, gradients(model.eval()), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)
