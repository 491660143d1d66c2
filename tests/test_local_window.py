"""Sampled attention whose near pairs have their exact weight: yoso_attention's local_window and its operators."""

import math
import os

import pytest
import torch
from test_attention import gradients, peak_memory
from test_kernels import assert_as_accurate_as_pytorch
from test_ops import (  # noqa: F401
    DTYPES,
    assert_as_close_as_pytorch,
    dense_collisions,
    make,
    needs_kernels,
    poisoned_memory,
)

from yoso_hf import HashFunctions, ops, reference, yoso_attention

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [pytest.param(ops, id="ops"), reference])
# B, H, N, D, Dv, num_hash, hash_code_len and the window: odd sizes, one token, several blocks of the reference and of
# hash functions, codes of 16 bits, windows of nothing but the position itself, within a tile, beyond the length and
# one position into the next tile
SHAPES = [
    ((2, 2, 63, 64, 64, 6, 9), 10),
    ((1, 1, 1, 8, 5, 1, 3), 4),
    ((1, 2, 300, 33, 17, 70, 16), 40),
    ((2, 1, 257, 7, 19, 130, 2), 0),
    ((1, 2, 130, 128, 65, 5, 12), 64),
    ((1, 1, 601, 16, 16, 3, 4), 290),
    ((1, 2, 90, 24, 32, 9, 5), 2**63 - 1),
    ((1, 1, 200, 12, 9, 4, 3), 1),
]


def make_near(shape, dtype, repeated=False):
    """grad, query, key, value and codes, some of queries and keys masked; the tensors are views, as a model's are."""
    B, H, N, D, Dv, num_hash, tau = shape
    query, key, value, grad, functions, mask, _ = make((B, H, N, N, D, Dv, num_hash, tau), dtype)
    if repeated:
        token = torch.randint(3, (N,))
        query, key = query[:, :, token % N], key[:, :, token % N]
        key[:, :, ::2] = query[:, :, ::2]
    query_mask = torch.rand(B, N) > 0.1
    return grad, query, key, value, (functions.codes(query, query_mask), functions.codes(key, mask))


def outputs(namespace, grad, query, key, value, codes, *sizes):
    return [
        namespace.local_attention(query, key, value, *codes, *sizes),
        *namespace.local_attention_backward(grad, query, key, value, *codes, *sizes),
    ]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_kernels_are_as_accurate_as_the_reference(shape, window, dtype):
    *tensors, codes = make_near(shape, dtype)

    def results(namespace, dtype):
        return outputs(namespace, *(x.to(dtype) for x in tensors), codes, shape[-1], window)

    assert_as_accurate_as_pytorch(results, dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_operators_equal_the_dense_definition(shape, window, implementation, repeated):
    grad, query, key, value, codes = make_near(shape, torch.float64, repeated)
    tau, normalize = shape[-1], torch.nn.functional.normalize
    query.requires_grad_(), key.requires_grad_()
    cosine = normalize(query, dim=-1) @ normalize(key, dim=-1).mT
    position = torch.arange(shape[2])
    near = (position[:, None] - position).abs() <= window
    near = near & (codes[0][:, :, 0, :, None] >= 0) & (codes[1][:, :, 0, None] >= 0)
    exact = (1 - cosine.detach().clamp(-1, 1).acos() / torch.pi) ** tau
    weights = near * (exact - dense_collisions(*codes))

    # autograd through the normalisation, for a loss whose gradient in p is grad value^T and dp/dx is (tau / 2) p
    bound = (cosine * weights * (tau / 2) * (grad @ value.mT)).sum()
    expected = [weights @ value, *torch.autograd.grad(bound, (query, key)), weights.mT @ grad]
    got = outputs(implementation, grad, query.detach(), key.detach(), value, codes, tau, window)
    # acos turns the rounding of a cosine of 1 into its square root
    atol = 1e-5 if repeated else 1e-12
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=atol)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_keys_may_hold_anything_and_get_no_gradient(dtype, implementation):
    shape, window = (2, 2, 100, 16, 16, 8, 5), 30
    grad, query, key, value, codes = make_near(shape, dtype)
    expected = outputs(implementation, grad, query, key, value, codes, shape[-1], window)
    masked = codes[1][:, :, 0] < 0
    key[masked], value[masked] = float("nan"), float("inf")
    got = outputs(implementation, grad, query, key, value, codes, shape[-1], window)
    assert masked.any() and not masked.all()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    for gradient in got[2:]:
        assert gradient[masked].eq(0).all() and gradient[~masked].ne(0).any()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_expanded_gradients_give_what_copies_give(dtype):
    grad, query, key, value, codes = make_near((2, 2, 80, 24, 20, 4, 3), dtype)
    views = {
        "every other row and column": torch.randn(2, 2, 160, 48, dtype=dtype)[:, :, ::2, ::2],
        "transposed": torch.randn(24, 80, 2, 2, dtype=dtype).permute(3, 2, 1, 0),
        "expanded": torch.randn(2, 2, 1, 1, dtype=dtype).expand(2, 2, 80, 24),
        "not aligned": torch.randn(2, 2, 80, 25, dtype=dtype)[..., 1:],
    }
    one_grad = torch.ones(1, dtype=dtype).expand(2, 2, 80, 20)
    for view in views.values():
        got = outputs(ops, one_grad, view, key, value, codes, 3, 9)
        expected = outputs(ops, one_grad.contiguous(), view.contiguous(), key, value, codes, 3, 9)
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@IMPLEMENTATIONS
@pytest.mark.parametrize("sizes", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_empty_tensors(sizes, implementation):
    functions = HashFunctions.sample(2, 8, 4, 5)
    grad, query, key, value = (torch.randn(*sizes, 8) for _ in range(4))
    codes = functions.codes(torch.randn(sizes[0], 2, sizes[2], 8))[:, : sizes[1]].contiguous()
    for result in outputs(implementation, grad, query, key, value, (codes, codes), 5, 3):
        assert torch.equal(result, query)


@needs_kernels
def test_kernels_refuse_what_would_read_past_a_buffer():
    grad, query, key, value, (query_codes, key_codes) = make_near((2, 2, 9, 8, 6, 4, 5), torch.float32)
    good = {"query": query, "key": key, "value": value, "query_codes": query_codes, "key_codes": key_codes}
    changes = [
        {"query": query[:, :, :-1], "query_codes": query_codes[..., :-1].contiguous()},
        {"key": key[:, :, :-1], "value": value[:, :, :-1], "key_codes": key_codes[..., :-1].contiguous()},
        {"query": query[..., :-1]},
        {"value": value.double()},
        {"query_codes": query_codes.int(), "key_codes": key_codes.int()},
        {"key_codes": key_codes[:, :, :-1].contiguous()},
        {"window": -1},
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match="must"):
            ops.local_attention(**{**good, "hash_code_len": 5, "window": 2, **change})
    with pytest.raises(RuntimeError, match="must"):
        ops.local_attention_backward(grad[..., :-1], **good, hash_code_len=5, window=2)


@needs_kernels
def test_codes_outside_the_table_belong_to_no_bucket():
    grad, query, key, value, codes = make_near((1, 1, 11, 8, 6, 4, 5), torch.float32)
    for index in (0, 1):
        masked, outside = [[x.clone() for x in codes] for _ in range(2)]
        masked[index][..., 3], outside[index][..., 3] = -1, 32
        pairs = zip(*(outputs(ops, grad, query, key, value, c, 5, 4) for c in (masked, outside)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def sequence(B=2, H=3, N=50, D=16, Dv=12, dtype=torch.float32):
    torch.manual_seed(0)
    with torch.device("cpu"):
        tensors = [torch.randn(B, H, N, columns, dtype=dtype) for columns in (D, D, Dv)]
    return tuple(x.to(torch.get_default_device()) for x in tensors)


@pytest.mark.parametrize("normalization", ["l2", "sum", None])
@pytest.mark.parametrize("length", [1, 2, 33, 300])
def test_a_window_over_the_whole_length_gives_the_expectation(length, normalization):
    """Output and all gradients, whatever the hash functions."""
    grad = torch.randn(2, 3, length, 12, dtype=torch.float64)
    key_mask = torch.rand(2, length) > 0.2
    options = {"key_mask": key_mask, "normalization": normalization}
    wide = sequence(N=length, dtype=torch.float64)
    narrow = [x.float() for x in wide]
    functions = HashFunctions.sample(3, 16, 8, 4)
    expectation = {"hash_code_len": 4, "expectation": True}
    exact, same_dtype = (gradients(x, grad.to(x[0].dtype), **expectation, **options) for x in (wide, narrow))
    # one key's weight does not change a normalised output: its gradient is a difference of terms of this size
    raw, weights = (
        yoso_attention(*wide[:2], value, key_mask=key_mask, normalization=None, **expectation).detach()
        for value in (wide[2], torch.ones_like(wide[2]))
    )
    size = {"l2": raw.norm(dim=-1, keepdim=True), "sum": weights, None: torch.ones_like(raw)}[normalization]
    scaled = torch.where(size > 0, grad / size, 0)
    terms = exact[0], *gradients(wide, scaled, key_mask=key_mask, normalization=None, **expectation)[1:]
    for window in (length - 1, length + 70):
        if window == 0:
            continue
        near = {"hash_functions": functions, "local_window": window, **options}
        torch.testing.assert_close(gradients(wide, grad, **near), exact)
        assert_as_close_as_pytorch(gradients(narrow, grad.float(), **near), same_dtype, exact, terms)


def test_heads_of_their_own_sharpness_have_near_pairs_too():
    tensors = sequence(H=4, dtype=torch.float64)
    grad = torch.randn(2, 4, 50, 12, dtype=torch.float64)
    options = {"hash_code_len": [3, 7, 3, 5]}
    exact = gradients(tensors, grad, expectation=True, **options)
    torch.testing.assert_close(gradients(tensors, grad, local_window=49, num_hash=4, **options), exact)


@pytest.mark.parametrize("normalization", ["l2", "sum"])
def test_the_output_is_normalised_after_the_near_pairs_are_added(normalization):
    query, key, value = (x.requires_grad_() for x in sequence(dtype=torch.float64))
    grad = torch.randn_like(value)
    options = {"hash_functions": HashFunctions.sample(3, 16, 8, 4), "local_window": 7}
    got = yoso_attention(query, key, value, normalization=normalization, **options)
    plain = yoso_attention(query, key, value, normalization=None, **options)
    if normalization == "l2":
        expected = torch.nn.functional.normalize(plain, dim=-1)
    else:
        ones = torch.ones_like(value[..., :1])
        expected = plain / yoso_attention(query, key, ones, normalization=None, **options)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, (query, key, value), grad) for x in (got, expected)), rtol=1e-6, atol=1e-9
    )


def replicas(heads, tensors):
    """Every head a replica with hash functions of its own, hence an independent draw."""
    return [x.float().expand(1, heads, -1, -1) for x in tensors]


@pytest.mark.parametrize("kind", ["hadamard", "gaussian"])
def test_the_mean_is_the_expectation_for_output_and_gradients(kind):
    """Over fresh hash functions, within 4 standard errors, with a window in the middle of the length."""
    torch.manual_seed(0)
    heads, length, dim, columns, tau = 256, 14, 32, 5, 6
    query, key = torch.randn(2, 1, 1, length, dim, dtype=torch.float64)
    key = query + key
    value, grad = torch.randn(2, 1, 1, length, columns, dtype=torch.float64)
    many = replicas(heads, (query, key, value, grad))
    directions = [torch.randn_like(many[i]) for i in (3, 0, 1, 2)]
    draws = []
    for _ in range(4):
        options = {"hash_functions": HashFunctions.sample(heads, dim, 4, tau, kind=kind), "local_window": 4}
        results = gradients(many[:3], many[3], normalization=None, **options)
        draws.append([(r * d).sum(dim=(0, 2, 3)) for r, d in zip(results, directions, strict=True)])
    exact = gradients((query, key, value), grad, hash_code_len=tau, expectation=True, normalization=None)
    for index, name in enumerate(("output", "grad_query", "grad_key", "grad_value")):
        sample = torch.cat([draw[index] for draw in draws]).double()
        error = sample.std() / math.sqrt(len(sample))
        expected = (exact[index] * directions[index]).sum(dim=(0, 2, 3))
        # one direction for each head
        difference = (sample.view(4, heads) - expected).mean()
        assert abs(difference) < 4 * error, name
        assert error > 0


def test_noise_is_lower_where_neighbours_are_alike():
    """A sequence that changes slowly, each token attending to those like it."""
    torch.manual_seed(0)
    heads, length, dim = 64, 200, 32
    token = torch.randn(length, dim)
    for i in range(1, length):
        token[i] = 0.95 * token[i - 1] + math.sqrt(1 - 0.95**2) * token[i]
    value, grad = torch.randn(2, length, dim)
    tensors = replicas(heads, [token[None, None], token[None, None], value[None, None], grad[None, None]])
    functions = HashFunctions.sample(heads, dim, 16, 8)
    noise = []
    for window in (0, 8, 32):
        options = {"hash_functions": functions, "local_window": window, "normalization": None}
        noise.append([x.var(dim=1).sum().item() for x in gradients(tensors[:3], tensors[3], **options)])
    for plain, some, more in zip(*noise, strict=True):
        assert some < 0.85 * plain
        assert more < 0.65 * some


@pytest.mark.parametrize("backward", ["sampled", "expectation"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_or_not_the_result_is_the_same(side, backward):
    real, padding = 45, 23
    tensors = sequence(1, 3, real + padding, dtype=torch.float64)
    grad = torch.randn(1, 3, real + padding, 12, dtype=torch.float64)
    kept = slice(padding, None) if side == "left" else slice(real)
    key_mask = torch.zeros(1, real + padding, dtype=torch.bool)
    key_mask[:, kept] = True
    grad[:, :, ~key_mask[0]] = 0
    functions = HashFunctions.sample(3, 16, 8, 4)
    options = {"hash_functions": functions, "local_window": 11, "backward": backward}
    padded = gradients(tensors, grad, key_mask=key_mask, **options)
    alone = gradients([x[:, :, kept] for x in tensors], grad[:, :, kept], **options)
    for index, (one, other) in enumerate(zip(padded, alone, strict=True)):
        torch.testing.assert_close(one[:, :, kept], other)
        # padding gets an output, as any query does, but no gradient
        if index > 0:
            assert one[:, :, ~key_mask[0]].eq(0).all()
    other = [x.masked_fill(~key_mask[:, None, :, None], 1e4) for x in tensors[1:]]
    changed = gradients((tensors[0], *other), grad, key_mask=key_mask, **options)
    assert all(torch.equal(one, two) for one, two in zip(padded, changed, strict=True))


@pytest.mark.parametrize("normalization", ["l2", "sum", None])
def test_a_row_without_keys_is_zero_and_so_is_its_gradient(normalization):
    tensors = sequence()
    key_mask = torch.ones(2, 50, dtype=torch.bool)
    key_mask[1] = False
    options = {"key_mask": key_mask, "local_window": 5, "normalization": normalization}
    for result in gradients(tensors, torch.randn(2, 3, 50, 12), **options):
        assert result[1].eq(0).all()
        assert result[0].ne(0).any()
        assert result.isfinite().all()


def test_expectation_backward_stays_the_exact_sum_for_query_and_key():
    tensors, grad = sequence(dtype=torch.float64), torch.randn(2, 3, 50, 12, dtype=torch.float64)
    options = {"key_mask": torch.rand(2, 50) > 0.3, "normalization": None}
    near = {"hash_functions": HashFunctions.sample(3, 16, 8, 4), "local_window": 9, **options}
    mixed, sampled = (gradients(tensors, grad, backward=backward, **near) for backward in ("expectation", "sampled"))
    exact = gradients(tensors, grad, hash_code_len=4, expectation=True, **options)
    for index in (1, 2):
        torch.testing.assert_close(mixed[index], exact[index])
        assert not torch.allclose(mixed[index], sampled[index])
    for index in (0, 3):
        assert torch.equal(mixed[index], sampled[index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalization", ["l2", "sum"])
def test_half_precision_is_close_to_float32_and_keeps_values_dtype(normalization, dtype):
    tensors = [x.to(dtype) for x in sequence(D=64, Dv=64)]
    functions = HashFunctions.sample(3, 64, 64, 3)
    options = {"hash_functions": functions, "local_window": 10, "normalization": normalization}
    out, wide = yoso_attention(*tensors, **options), yoso_attention(*(x.float() for x in tensors), **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), wide, rtol=0, atol=0.03)


@pytest.mark.parametrize("normalization", ["l2", "sum"])
def test_small_weights_do_not_leave_the_range_of_float16(normalization):
    """Opposite vectors, whose only weights are those of near pairs."""
    query, _, value = (x.half() for x in sequence(D=64, Dv=64))
    options = {"hash_functions": HashFunctions.sample(3, 64, 8, 12), "local_window": 49}
    key = -query + 0.3 * torch.randn_like(query)
    out = yoso_attention(query, key, value, normalization=normalization, **options)
    wide = yoso_attention(query.float(), key.float(), value.float(), normalization=normalization, **options)
    torch.testing.assert_close(out.float(), wide, rtol=0, atol=2e-3)


@pytest.mark.parametrize("normalization", ["l2", "sum", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_nan_for_equal_zero_opposite_tiny_and_huge_vectors(dtype, normalization):
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
        options = {"local_window": 3, "normalization": normalization}
        for result in gradients((query, key, value), torch.randn(1, 2, 12, 8).to(dtype), **options):
            assert result.isfinite().all()


def test_compile_gives_the_eager_result():
    # compiling refuses the poisoning of memory
    torch.use_deterministic_algorithms(False)
    tensors, grad = sequence(), torch.randn(2, 3, 50, 12)
    options = {"hash_functions": HashFunctions.sample(3, 16, 8, 5), "local_window": 6}
    compiled = torch.compile(lambda *x: yoso_attention(*x, **options), fullgraph=True, backend="aot_eager")
    arguments = [x.clone().requires_grad_() for x in tensors]
    out = compiled(*arguments)
    expected = gradients(tensors, grad, **options)
    torch.testing.assert_close((out, *torch.autograd.grad(out, arguments, grad)), expected)


def test_it_is_ignored_where_the_expectation_is_computed():
    tensors = sequence()
    for expectation in (True, "auto"):
        options = {"expectation": expectation, "num_hash": 50}
        assert torch.equal(yoso_attention(*tensors, local_window=5, **options), yoso_attention(*tensors, **options))


@pytest.mark.parametrize(
    ("window", "length", "message"),
    [
        (-1, 50, "local_window must be at least 0, got -1"),
        (2.0, 50, "local_window must be an integer, got 2.0"),
        (3, 49, "local_window needs as many queries as keys, got 49 and 50"),
    ],
)
def test_bad_windows_are_refused(window, length, message):
    query, key, value = sequence()
    with pytest.raises(ValueError, match=message):
        yoso_attention(query[:, :, :length], key, value, local_window=window)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("path", [pytest.param("compiled", marks=needs_kernels), "reference"])
def test_memory_is_linear(path):
    environment = {"YOSO_REFERENCE": "1"} if path == "reference" else {}
    half, full = peak_memory([16384, 32768], "num_hash=1, local_window=64", environment)
    assert full < 2.2 * half
