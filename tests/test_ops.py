import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.library import opcheck

from yoso_hf import HashFunctions, ops, reference

# where the tests put their tensors, see conftest.py
DEVICE = torch.get_default_device().type
needs_kernels = pytest.mark.skipif(DEVICE not in ops.compiled_backends(), reason="no compiled extension")
# which there is for CPUs only
HAS_SOFTMAX_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key("yoso_hf::softmax_attention", DEVICE.upper())

# B, H, N, M, D, Dv, num_hash, hash_code_len: odd sizes, single elements, a table larger than the rows, full buckets
SHAPES = [
    (2, 2, 63, 129, 64, 64, 6, 9),
    (1, 1, 1, 1, 1, 1, 1, 1),
    (2, 1, 151, 1, 33, 17, 3, 5),
    (2, 2, 19, 23, 3, 5, 70, 16),
    (1, 1, 700, 300, 16, 130, 2, 1),
    (1, 2, 130, 65, 128, 32, 5, 12),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills uninitialised tensors with NaN, so that an element nobody writes fails the comparison."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(shape, dtype, seed=0):
    B, H, N, M, D, Dv, num_hash, hash_code_len = shape
    torch.manual_seed(seed)
    # the same numbers on every device: with others, rounding errors of a few elements could be out of proportion
    with torch.device("cpu"):
        # [B, rows, H, *] seen as [B, H, rows, *], as a model's projections come
        query, key = (torch.randn(B, n, H, D).transpose(1, 2).to(dtype) for n in (N, M))
        value, grad = (torch.randn(B, n, H, Dv).transpose(1, 2).to(dtype) for n in (M, N))
        functions = HashFunctions.sample(H, D, num_hash, hash_code_len)
        mask = torch.rand(B, M) > 0.25
    functions.parameters = functions.parameters.to(DEVICE)
    query, key, value, grad, mask = (x.to(DEVICE) for x in (query, key, value, grad, mask))
    codes = functions.codes(query), functions.codes(key, mask)
    return query, key, value, grad, functions, mask, codes


def assert_as_close_as_pytorch(got, same_dtype, exact, terms=None):
    """The error against float64 is at most twice that of plain PyTorch in the same dtype.

    The largest error; for 16-bit outputs that in root mean square: tensor cores take factors of 16 bits, so that a
    result is a sum of many rounding errors beside its own, and the largest of some thousand is a matter of luck. Where
    results are small differences, `terms` of their size are what is rounded.
    """
    for g, s, e, t in zip(got, same_dtype, exact, terms or exact, strict=True):
        assert g.dtype == s.dtype
        assert g.shape == s.shape
        if e.numel() == 0:
            continue
        size = torch.Tensor.norm if g.element_size() == 2 else lambda x: x.abs().max()
        bound = 2 * size(s.double() - e) + 4 * torch.finfo(torch.float32).eps * size(t)
        assert size(g.double() - e) <= bound


def normalized(rows):
    """Rows at length one and their inverse lengths, zero and 0 for a zero row."""
    length = rows.norm(dim=-1)
    return torch.nn.functional.normalize(rows, dim=-1), torch.where(length > 0, 1 / length, 0)


@needs_kernels
@pytest.mark.parametrize("kind", ["hadamard", "gaussian"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_hash_kernel_equals_reference(shape, dtype, kind):
    x, _, _, _, _, _, _ = make(shape, dtype)
    B, H, N, _, D, _, num_hash, hash_code_len = shape
    functions = HashFunctions.sample(H, D, num_hash, hash_code_len, kind=kind)
    mask = torch.rand(B, N) > 0.25
    hash_op = getattr(ops, f"hash_{kind}")
    definition = getattr(reference, f"hash_{kind}")
    got = hash_op(x, functions.parameters, mask, num_hash, hash_code_len)
    expected = definition(x, functions.parameters, mask, num_hash, hash_code_len)
    # a projection within rounding of zero may fall on either side
    differing = (got != expected).double().mean().item()
    assert differing <= (0 if dtype == torch.float64 else 2e-4)


@needs_kernels
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_kernels_are_as_accurate_as_the_reference(shape, dtype, unit):
    query, key, value, grad, _, _, codes = make(shape, dtype)
    tau = shape[-1]
    wide = [x.double() for x in (grad, query, key, value)]
    assert_as_close_as_pytorch(
        ops.sampled_attention(query, key, value, *codes, tau, False, unit),
        reference.sampled_attention(query, key, value, *codes, tau, False, unit),
        reference.sampled_attention(*wide[1:], *codes, tau, False, unit),
    )
    assert_as_close_as_pytorch(
        ops.sampled_attention_backward(grad, query, key, value, *codes, tau),
        reference.sampled_attention_backward(grad, query, key, value, *codes, tau),
        reference.sampled_attention_backward(*wide, *codes, tau),
    )


@needs_kernels
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_expectation_kernels_are_as_accurate_as_the_reference(shape, dtype, exact):
    query, key, value, grad, _, _, _ = make(shape, dtype)
    tau = shape[-1]
    wide = [x.double() for x in (grad, query, key, value)]
    for unit in (False, True):
        assert_as_close_as_pytorch(
            ops.expectation_attention(query, key, value, tau, exact, unit),
            reference.expectation_attention(query, key, value, tau, exact, unit),
            reference.expectation_attention(*wide[1:], tau, exact, unit),
        )
    if exact and shape[4] == 1:
        pytest.skip("cosines of one-dimensional vectors are all 1 or -1, where the slope diverges")
    assert_as_close_as_pytorch(
        ops.expectation_attention_backward(grad, query, key, value, tau, exact),
        reference.expectation_attention_backward(grad, query, key, value, tau, exact),
        reference.expectation_attention_backward(*wide, tau, exact),
    )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unit_rows_backward_kernel_is_as_accurate_as_the_reference(shape, dtype):
    _, _, value, grad, _, _, _ = make((*shape[:2], shape[3], *shape[3:]), dtype)
    value[..., 0, :] = 0
    unit, inverse_length = normalized(value.double())
    unit, inverse_length = unit.to(dtype), inverse_length.to(torch.promote_types(dtype, torch.float32))
    assert_as_close_as_pytorch(
        [ops.unit_rows_backward(grad, unit, inverse_length)],
        [reference.unit_rows_backward(grad, unit, inverse_length)],
        [reference.unit_rows_backward(grad.double(), unit.double(), inverse_length.double())],
    )


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_unit_rows_backward_equals_autograd(implementation):
    namespace = ops if implementation == "kernel" else reference
    _, _, x, _, _, _, _ = make((2, 3, 9, 33, 8, 37, 4, 5), torch.float64)
    x.requires_grad_()
    unit, inverse_length = (t.detach() for t in normalized(x))
    grad = torch.randn_like(x)
    (expected,) = torch.autograd.grad(torch.nn.functional.normalize(x, dim=-1), x, grad)
    torch.testing.assert_close(namespace.unit_rows_backward(grad, unit, inverse_length), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_zero_rows_stay_zero_and_get_no_gradient(implementation, dtype):
    namespace = ops if implementation == "kernel" else reference
    query, key, value, grad, _, _, codes = make((2, 3, 9, 33, 8, 37, 4, 5), dtype)
    value[0] = 0
    for out, inverse_length in (
        namespace.sampled_attention(query, key, value, *codes, 5, False, True),
        namespace.expectation_attention(query, key, value, 5, False, True),
    ):
        gradient = namespace.unit_rows_backward(grad, out, inverse_length)
        for x in (out, inverse_length, gradient):
            assert torch.equal(x[0], torch.zeros_like(x[0]))
            assert (x[1].flatten(1) != 0).any(dim=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_rows_in_no_bucket_may_hold_anything_and_get_no_gradient(implementation, dtype):
    namespace = ops if implementation == "kernel" else reference
    query, key, value, grad, _, mask, codes = make((2, 3, 33, 33, 24, 37, 4, 5), dtype)
    masked = ~mask[:, None, :, None]
    codes = [x.masked_fill(masked.mT, -1) for x in codes]
    found = []
    for anything in (0.0, torch.nan, torch.inf):
        rows = [x.masked_fill(masked, anything) for x in (grad, query, key, value)]
        found.append(namespace.sampled_attention_backward(*rows, *codes, 5))
    for first, *others in zip(*found, strict=True):
        assert first.masked_select(masked).eq(0).all()
        assert first.ne(0).any()
        assert all(torch.equal(first, other) for other in others)


def dense_collisions(query_codes, key_codes):
    """The weights a query gives to each key, [B, H, N, M], from the codes pair by pair."""
    equal = (query_codes[..., :, None] == key_codes[..., None, :]) & (key_codes >= 0)[..., None, :]
    return equal.double().mean(dim=2)


# the last: crowded buckets, and more rows than the reference takes at a time
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 2, 1300, 1500, 5, 7, 2, 1)])
def test_sampled_operators_equal_the_dense_definition(shape, implementation):
    """Against the N x M matrix of collisions, which neither implementation forms."""
    namespace = ops if implementation == "kernel" else reference
    query, key, value, grad, _, _, codes = make(shape, torch.float64)
    tau = shape[-1]
    weights = dense_collisions(*codes)
    out, empty = namespace.sampled_attention(query, key, value, *codes, tau, False, False)
    torch.testing.assert_close(out, weights @ value)
    assert empty.shape == (0,)
    got = namespace.sampled_attention(query, key, value, *codes, tau, False, True)
    torch.testing.assert_close(got, normalized(weights @ value))

    # autograd through the normalisation, for a loss whose gradient in p is grad value^T and dp/dx is (tau / 2) p
    query, key = query.clone().requires_grad_(), key.clone().requires_grad_()
    cosine = torch.nn.functional.normalize(query, dim=-1) @ torch.nn.functional.normalize(key, dim=-1).mT
    slope = weights * (tau / 2) * (grad @ value.mT)
    expected = *torch.autograd.grad((cosine * slope).sum(), (query, key)), weights.mT @ grad
    got = namespace.sampled_attention_backward(grad, query.detach(), key.detach(), value, *codes, tau)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_expectation_operators_equal_autograd_through_the_formula(shape, implementation):
    namespace = ops if implementation == "kernel" else reference
    query, key, value, grad, _, _, _ = make(shape, torch.float64)
    tau = shape[-1]
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    cosine = torch.nn.functional.normalize(inputs[0], dim=-1) @ torch.nn.functional.normalize(inputs[1], dim=-1).mT
    weights = (1 - cosine.clamp(-1, 1).acos() / torch.pi) ** tau
    out = weights @ inputs[2]
    got, empty = namespace.expectation_attention(query, key, value, tau, True, False)
    torch.testing.assert_close(got, out.detach())
    assert empty.shape == (0,)
    got = namespace.expectation_attention(query, key, value, tau, True, True)
    torch.testing.assert_close(got, normalized(out.detach()))
    if shape[4] > 1:
        expected = torch.autograd.grad((out * grad).sum(), inputs, retain_graph=True)
        got = namespace.expectation_attention_backward(grad, query, key, value, tau, True)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)

    bound = (cosine * (weights.detach() * (tau / 2) * (grad @ value.mT))).sum()
    expected = torch.autograd.grad(bound, inputs[:2])
    got = namespace.expectation_attention_backward(grad, query, key, value, tau, False)
    torch.testing.assert_close(got[:2], expected)


def no_shift(key):
    return torch.zeros(key.shape[:2], dtype=torch.int32)


def shifts(B, H):
    """None, some and the most, by which weights are divided as powers of two; these powers; and the logarithms."""
    shift = (43 * (torch.arange(B * H, dtype=torch.int32) % 3) + 1) * (torch.arange(B * H) % 3 > 0)
    shift = shift.int().view(B, H)
    wide = shift.double()[..., None, None]
    return shift, torch.exp2(-wide), 60 + math.log(2) * wide


def operator_calls():
    query, key, value, grad, functions, mask, codes = make((2, 2, 9, 11, 8, 6, 4, 5), torch.float32)
    gaussian = HashFunctions.sample(2, 8, 4, 5, kind="gaussian")
    inputs = [x.requires_grad_() for x in (query, key, value)]
    plain = [x.detach() for x in inputs]
    # keys and values of the queries' positions
    near = [inputs[0], *(x.detach()[:, :, :9].requires_grad_() for x in inputs[1:])]
    near_codes = codes[0], codes[1][..., :9].contiguous()
    key_weight, shift = torch.rand(2, 2, 11), no_shift(inputs[1])
    heavy, total = key_weight.topk(3).indices, torch.ones(2, 2, 9)
    remainder = grad.clone().requires_grad_(), total.clone().requires_grad_()
    return {
        "hash_hadamard": [(plain[1], functions.parameters, mask, 4, 5)],
        "hash_gaussian": [(plain[0], gaussian.parameters, None, 4, 5)],
        "sampled_attention": [(*inputs, *codes, 5, False, unit) for unit in (False, True)],
        "sampled_attention_backward": [(grad, *plain, *codes, 5)],
        "expectation_attention": [(*inputs, 5, False, unit) for unit in (False, True)],
        "expectation_attention_backward": [(grad, *plain, 5, False)],
        "softmax_attention": [(*inputs, key_mask, 0.5) for key_mask in (None, mask)],
        "softmax_attention_backward": [
            (grad, *(x.detach() for x in ops.softmax_attention(*plain, mask, 0.5)), *plain, mask, 0.5)
        ],
        "sampled_remainder": [(*inputs, key_weight.clone().requires_grad_(), shift, *codes, 5, 0.5)],
        "sampled_remainder_backward": [(grad, grad.sum(-1), *plain, key_weight, shift, *codes, 5, 0.5)],
        "first_order_attention": [(*inputs, key_weight.clone().requires_grad_(), shift, heavy, *remainder, 0.5)],
        "first_order_attention_backward": [(grad, grad, total, *plain, key_weight, shift, heavy, 0.5)],
        "local_attention": [(*near, *near_codes, 5, 3)],
        "local_attention_backward": [(grad, *(x.detach() for x in near), *near_codes, 5, 3)],
        "unit_rows_backward": [(grad, *normalized(grad))],
    }


@pytest.mark.parametrize("name", list(ops.SCHEMAS))
def test_opcheck(name):
    # opcheck compiles, which refuses the poisoning of memory
    torch.use_deterministic_algorithms(False)
    for arguments in operator_calls()[name]:
        opcheck(getattr(torch.ops.yoso_hf, name).default, arguments)


@pytest.mark.parametrize("unit", [False, True])
def test_exact_backward_passes_gradcheck(unit):
    torch.manual_seed(0)
    shapes = (2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3)
    query, key, value = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    for tau in (1, 9):
        assert torch.autograd.gradcheck(
            lambda *x, tau=tau: ops.expectation_attention(*x, tau, True, unit)[0], (query, key, value)
        )


@pytest.mark.parametrize("num_queries", [5, 7])
@pytest.mark.parametrize("with_mask", [False, True])
def test_softmax_backward_passes_gradcheck(num_queries, with_mask):
    query, key, value, _, _, mask, _ = make((2, 2, num_queries, 7, 4, 3, 1, 1), torch.float64)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    assert torch.autograd.gradcheck(lambda *x: ops.softmax_attention(*x, mask if with_mask else None, 0.5)[0], inputs)


@pytest.mark.parametrize("namespace", [ops, reference], ids=["ops", "reference"])
def test_remainder_of_a_single_bucket_is_exact(namespace):
    """Codes of one bit: every pair shares the bucket, with probability 1."""
    query, key, value, _, _, _, _ = make((2, 2, 70, 7, 4, 3, 1, 1), torch.float64)
    functions = HashFunctions.sample(2, 4, 3, 1)
    codes = functions.codes(query), functions.codes(key)
    key_weight, (shift, unit, most) = torch.rand(2, 2, 7, dtype=torch.float64), shifts(2, 2)
    # logarithms beyond 60, and some beyond what their head's shift adds
    query[:, :, 0] *= 150 / (query[:, :, 0] * key[:, :, 0]).sum(-1, keepdim=True)
    out, total = namespace.sampled_remainder(query, key, value, key_weight, shift, *codes, 1, 0.5)
    exponent = 0.5 * query @ key.mT
    assert ((exponent > 60) & (exponent < most)).any()
    assert (exponent > most).any()
    weights = (torch.minimum(exponent, most).exp() - 1 - exponent) * key_weight[:, :, None]
    torch.testing.assert_close(out / unit, weights @ value)
    torch.testing.assert_close(total / unit[..., 0], weights.sum(-1))


def test_remainder_backward_passes_gradcheck():
    query, key, value, _, _, _, _ = make((2, 2, 5, 7, 4, 3, 1, 1), torch.float64)
    functions = HashFunctions.sample(2, 4, 3, 1)
    codes = functions.codes(query), functions.codes(key)
    key_weight = torch.rand(2, 2, 7, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (query, key, value, key_weight)]
    shift = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *x: ops.sampled_remainder(*x, shift, *codes, 1, 0.5), inputs)


# the second: buckets of several parts, of which a query meets one
@pytest.mark.parametrize("num_keys", [40, 400])
def test_remainder_and_its_gradient_have_the_exact_ones_as_their_mean(num_keys):
    query, key, value, grad, _, _, _ = make((1, 3, 30, num_keys, 6, 4, 1, 1), torch.float64)
    key_weight = torch.rand(1, 3, num_keys, dtype=torch.float64)
    grad_total = torch.randn(1, 3, 30, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (query, key, value, key_weight)]
    exponent = 0.3 * query @ key.mT
    weights = (exponent.exp() - 1 - exponent) * key_weight[:, :, None]
    shift = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    weights = weights * torch.exp2(-shift.double())[..., None, None]
    exact = (weights @ value, weights.sum(-1))
    exact = [*exact, *torch.autograd.grad(exact, inputs, (grad, grad_total))]
    directions = [torch.randn_like(x) for x in exact]
    draws, rows = [], [x.detach() for x in inputs]
    for _ in range(400):
        functions = HashFunctions.sample(3, 6, 4, 3)
        arguments = (*rows, shift, functions.codes(rows[0]), functions.codes(rows[1]), 3, 0.3)
        results = *ops.sampled_remainder(*arguments), *ops.sampled_remainder_backward(grad, grad_total, *arguments)
        draws.append(torch.stack([(x * y).flatten(2).sum(-1) for x, y in zip(results, directions, strict=True)]))
    draws = torch.stack(draws)
    expected = torch.stack([(x * y).flatten(2).sum(-1) for x, y in zip(exact, directions, strict=True)])
    assert ((draws.mean(0) - expected).abs() < 4 * draws.std(0) / 20).all()


# B, H, N, M, D, Dv, K: odd sizes, all keys heavy, none, a single row, more rows than are taken at a time
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 70, 131, 33, 17, 64), (1, 2, 5, 7, 4, 3, 7), (2, 1, 9, 65, 5, 40, 0), (1, 1, 1, 1, 1, 1, 1)]
    + [(3, 2, 4100, 1500, 5, 7, 20)],
)
@pytest.mark.parametrize("namespace", [ops, reference], ids=["ops", "reference"])
def test_first_order_operators_equal_autograd_through_the_formula(namespace, shape):
    *shape, num_heavy = shape
    query, key, value, grad, _, _, _ = make((*shape, 1, 1), torch.float64)
    # a logarithm of more than the largest, of two keys that are alike but for one being heavy, where there are so many
    query[:, :, 0] *= 150 / (query[:, :, 0] * key[:, :, 0]).sum(-1, keepdim=True)
    key[:, :, -1] = key[:, :, 0]
    key_weight = torch.rand(*key.shape[:3], dtype=torch.float64)
    key_weight[:, :, 0] = 2
    heavy = key_weight.topk(num_heavy).indices.flip(-1)
    # of a row, all weights add up to less than 0
    shift, unit, most = shifts(*shape[:2])
    remainder = unit * torch.randn_like(grad), unit[..., 0] * torch.randn(query.shape[:3], dtype=torch.float64).abs()
    remainder[1][0, 0, -1] = -1e60
    tensors = query, key, value, key_weight, *remainder
    inputs = [x.clone().requires_grad_() for x in tensors]
    logarithms = 0.7 * inputs[0] @ inputs[1].mT
    is_heavy = torch.zeros(key.shape[:3], dtype=torch.bool).scatter(2, heavy, True)[:, :, None]
    weights = torch.where(is_heavy, torch.minimum(logarithms, most).exp(), 1 + logarithms)
    weights = unit * inputs[3][:, :, None] * weights
    total = weights.sum(-1) + inputs[5]
    expected = (weights @ inputs[2] + inputs[4]) / torch.where(total > 0, total, torch.inf)[..., None]
    out, sums = namespace.first_order_attention(*tensors[:4], shift, heavy, *remainder, 0.7)
    torch.testing.assert_close((out, sums / unit[..., 0]), (expected.detach(), total.detach() / unit[..., 0]))
    assert out[0, 0, -1].count_nonzero() == 0
    expected = torch.autograd.grad(expected, inputs, grad)
    got = namespace.first_order_attention_backward(grad, out, sums, *tensors[:4], shift, heavy, 0.7)
    torch.testing.assert_close(got, expected)


def test_first_order_backward_passes_gradcheck():
    query, key, value, grad, _, _, _ = make((2, 2, 5, 7, 4, 3, 1, 1), torch.float64)
    key_weight, total = torch.rand(2, 2, 7, dtype=torch.float64), torch.full((2, 2, 5), 20.0, dtype=torch.float64)
    heavy, shift = key_weight.topk(3).indices, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    inputs = [x.requires_grad_() for x in (query, key, value, key_weight, grad, total)]

    def attend(query, key, value, key_weight, *remainder):
        return ops.first_order_attention(query, key, value, key_weight, shift, heavy, *remainder, 0.5)[0]

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("namespace", [ops, reference], ids=["ops", "reference"])
def test_a_query_meets_a_part_of_a_crowded_bucket_only(namespace):
    """So that the time is linear: of 1000 keys in a bucket at most 64 for each hash function, each for 16."""
    query, key = (torch.ones(1, 1, n, 4, dtype=torch.float64) for n in (200, 1000))
    codes = [torch.full((1, 1, 5, n), 3, dtype=torch.int16) for n in (200, 1000)]
    key_weight = torch.ones(1, 1, 1000, dtype=torch.float64)
    # the weights themselves, as many columns at a time as the CUDA kernels take
    parts = [
        namespace.sampled_remainder(query, key, value, key_weight, no_shift(key), *codes, 4, 0.5)
        for value in torch.eye(1000, dtype=torch.float64)[None, None].split(250, dim=3)
    ]
    out, total = torch.cat([part for part, _ in parts], dim=3), parts[0][1]
    remainder = torch.e**2 - 3
    times = out[0, 0] * 5 / (16 * remainder)
    torch.testing.assert_close(times, times.round())
    assert ((times > 0).sum(-1) > 64).all()
    assert (times.sum(-1) <= 5 * 64).all()
    # queries of the same 64 meet the same keys, others meet others, and every part is as good as another
    for first in range(0, 200, 64):
        assert (times[first] == times[first : first + 64]).all()
    assert not torch.equal(times[0], times[64])
    torch.testing.assert_close(total, total.new_full((1, 1, 200), 1000 * remainder), rtol=0.02, atol=0)


@pytest.mark.parametrize("unit", [False, True])
def test_gradient_of_value_passes_gradcheck(unit):
    query, key, value, _, _, _, codes = make((2, 2, 6, 5, 4, 3, 8, 2), torch.float64)
    assert torch.autograd.gradcheck(
        lambda value: ops.sampled_attention(query, key, value, *codes, 2, False, unit)[0], value.requires_grad_()
    )


@pytest.mark.parametrize("lower_bound", ["sampled", "expectation", "expectation for sampled"])
def test_gradients_through_unit_rows_equal_those_of_a_separate_normalisation(lower_bound):
    """Of query and key too, where the lower bound is no derivative that gradcheck could find."""
    query, key, value, grad, _, _, codes = make((2, 2, 9, 11, 8, 6, 4, 2), torch.float64)
    inputs = [x.requires_grad_() for x in (query, key, value)]

    def attend(unit):
        if lower_bound == "expectation":
            return ops.expectation_attention(*inputs, 2, False, unit)
        return ops.sampled_attention(*inputs, *codes, 2, lower_bound != "sampled", unit)

    out, inverse_length = attend(unit=True)
    assert not inverse_length.requires_grad
    got = torch.autograd.grad(out, inputs, grad)
    expected = torch.autograd.grad(torch.nn.functional.normalize(attend(unit=False)[0], dim=-1), inputs, grad)
    torch.testing.assert_close(got, expected)


# the reference's products may round differently with other strides
@needs_kernels
def test_views_and_expanded_gradients_give_what_copies_give():
    query, key, value, grad, functions, _, codes = make((2, 2, 40, 50, 24, 20, 4, 3), torch.float32)
    wide = torch.randn(2, 2, 80, 48)
    views = {
        "every other row and column": wide[:, :, ::2, ::2],
        "transposed": torch.randn(24, 40, 2, 2).permute(3, 2, 1, 0),
        "expanded": torch.randn(2, 2, 1, 1).expand(2, 2, 40, 24),
        "not aligned": torch.randn(2, 2, 40, 25)[..., 1:],
    }
    for view in views.values():
        assert torch.equal(functions.codes(view), functions.codes(view.contiguous()))
        for op, arguments in (
            (ops.sampled_attention_backward, (*codes, 3)),
            (ops.expectation_attention_backward, (3, False)),
        ):
            got = op(grad, view, key, value, *arguments)
            expected = op(grad, view.contiguous(), key, value, *arguments)
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        as_value, of_copy = (
            ops.sampled_attention(key, query, x, *reversed(codes), 3, False, True) for x in (view, view.contiguous())
        )
        assert all(torch.equal(g, e) for g, e in zip(as_value, of_copy, strict=True))
        unit, inverse_length = torch.nn.functional.normalize(query, dim=-1), query.norm(dim=-1).reciprocal()
        for x in (view, unit):
            got = ops.unit_rows_backward(view, x, inverse_length)
            assert torch.equal(got, ops.unit_rows_backward(view.contiguous(), x.contiguous(), inverse_length))
        if HAS_SOFTMAX_KERNEL:
            got, expected = (ops.softmax_attention(x, key, value, None, 0.2) for x in (view, view.contiguous()))
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
            got, expected = (
                ops.softmax_attention_backward(grad, *got, x, key, value, None, 0.2) for x in (view, view.contiguous())
            )
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        key_weight = torch.linspace(0, 1, 50).expand(2, 2, 50).contiguous()
        arguments = (key, value, key_weight, no_shift(key), key_weight.topk(5).indices)
        total = torch.ones(2, 2, 40)
        got, expected = (
            [
                *ops.first_order_attention(x, *arguments, rest, total, 0.2),
                *ops.first_order_attention_backward(rest, grad, total, x, *arguments, 0.2),
            ]
            for x, rest in ((view, grad.mT.contiguous().mT), (view.contiguous(), grad))
        )
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        arguments = (key, value, torch.ones(2, 2, 50), no_shift(key))
        got, expected = (
            [
                *ops.sampled_remainder(x, *arguments, *codes, 3, 0.2),
                *ops.sampled_remainder_backward(grad, grad[..., 0].contiguous(), x, *arguments, *codes, 3, 0.2),
            ]
            for x in (view, view.contiguous())
        )
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    expanded = torch.ones(1).expand(2, 2, 40, 20)
    got = ops.sampled_attention_backward(expanded, query, key, value, *codes, 3)
    expected = ops.sampled_attention_backward(expanded.contiguous(), query, key, value, *codes, 3)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@needs_kernels
@pytest.mark.parametrize("columns", [24, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_attention_to_unaligned_rows_of_16_bits_is_that_to_copies(dtype, columns):
    query, key, value, grad, *_ = make((2, 2, 40, 70, columns, 16, 1, 1), dtype)
    rows = [x.contiguous() for x in (grad, query, key, value)]
    unaligned = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in rows]
    got, expected = (
        [
            ops.expectation_attention(*x[1:], 3, False, False)[0],
            *ops.expectation_attention_backward(*x, 3, True),
        ]
        for x in (unaligned, rows)
    )
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)])
def test_empty_tensors(sizes, unit, implementation):
    namespace = ops if implementation == "kernel" else reference
    query, key, value, grad, _, mask, codes = make((*sizes, 8, 6, 4, 5), torch.float32)
    softmax = namespace.softmax_attention(query, key, value, mask, 0.5)
    assert torch.equal(softmax[0], torch.zeros(*sizes[:3], 6))
    assert torch.equal(softmax[1], torch.full(sizes[:3], -torch.inf))
    key_weight, shift = torch.ones(*sizes[:2], sizes[3]), no_shift(key)
    out, total = namespace.sampled_remainder(query, key, value, key_weight, shift, *codes, 5, 0.5)
    assert torch.equal(out, torch.zeros(*sizes[:3], 6))
    assert torch.equal(total, torch.zeros(sizes[:3]))
    heavy = key_weight.topk(min(2, sizes[3])).indices
    first_order = namespace.first_order_attention(query, key, value, key_weight, shift, heavy, out, total, 0.5)
    assert torch.equal(first_order[0], torch.zeros(*sizes[:3], 6))
    assert torch.equal(first_order[1], torch.zeros(sizes[:3]))
    for out, inverse_length in (
        namespace.sampled_attention(query, key, value, *codes, 5, False, unit),
        namespace.expectation_attention(query, key, value, 5, False, unit),
    ):
        assert torch.equal(out, torch.zeros(*sizes[:3], 6))
        assert torch.equal(inverse_length, torch.zeros(sizes[:3] if unit else 0))
    for gradients in (
        namespace.sampled_attention_backward(grad, query, key, value, *codes, 5),
        namespace.expectation_attention_backward(grad, query, key, value, 5, False),
        namespace.softmax_attention_backward(grad, *softmax, query, key, value, mask, 0.5),
        namespace.sampled_remainder_backward(grad, grad.sum(-1), query, key, value, key_weight, shift, *codes, 5, 0.5)[
            :3
        ],
        namespace.first_order_attention_backward(grad, *first_order, query, key, value, key_weight, shift, heavy, 0.5)[
            :3
        ],
    ):
        for gradient, x in zip(gradients, (query, key, value), strict=False):
            assert torch.equal(gradient, torch.zeros_like(x))


@needs_kernels
@pytest.mark.parametrize("sampled", [False, True])
def test_gradients_of_unit_rows_are_not_bounded_by_float16(sampled):
    """They are divided by lengths, which are far below one for values that are small, and small weights."""
    query, key, value, grad, _, _, codes = make((1, 2, 60, 60, 64, 20, 8, 4), torch.float16)
    value, grad = value * 2**-12, grad * (2**5 if sampled else 2**-8)
    found = []
    for dtype in (torch.float16, torch.float64):
        rows = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        if sampled:
            out, _ = ops.sampled_attention(*rows, *codes, 4, False, True)
        else:
            out, _ = ops.expectation_attention(*rows, 32, False, True)
        # not of value: where sampled, that gradient is out of range itself
        found.append(torch.autograd.grad(out, rows[:2], grad.to(dtype)))
    for got, truth in zip(*found, strict=True):
        assert got.dtype == torch.float16
        assert got.isfinite().all()
        assert (got - truth).norm() <= 0.05 * truth.norm()


@needs_kernels
def test_kernels_refuse_what_would_read_past_a_buffer():
    query, key, value, grad, functions, _, codes = make((2, 2, 9, 11, 8, 6, 4, 5), torch.float32)

    def softmax_backward(grad=grad, out=grad, logarithm=torch.ones(2, 2, 9)):  # noqa: B008
        return ops.softmax_attention_backward(grad, out, logarithm, query, key, value, None, 0.5)

    shift = no_shift(key)

    def remainder(value=value, key_weight=torch.ones(2, 2, 11), shift=shift, codes=codes, scale=0.5):  # noqa: B008
        return ops.sampled_remainder(query, key, value, key_weight, shift, *codes, 5, scale)

    one, total, heavy = torch.ones(2, 2, 11), torch.ones(2, 2, 9), torch.zeros(2, 2, 1).long()

    def first_order(value=value, key_weight=one, shift=shift, heavy=heavy, remainder=grad, total=total):
        return ops.first_order_attention(query, key, value, key_weight, shift, heavy, remainder, total, 0.5)

    def first_order_backward(grad=grad, out=grad, total=total, heavy=heavy):
        return ops.first_order_attention_backward(grad, out, total, query, key, value, one, shift, heavy, 0.5)

    bad_calls = [
        lambda: ops.sampled_attention(query, key, value[:, :, :-1], *codes, 5, False, False),
        lambda: ops.sampled_attention(query, key, value, codes[0][:, :1], codes[1], 5, False, False),
        lambda: ops.sampled_attention(query, key, value, *(x[0, 0] for x in codes), 5, False, False),
        lambda: ops.sampled_attention(query, key, value, codes[0].int(), codes[1].int(), 5, False, False),
        lambda: ops.sampled_attention(query, key, value, *codes, 17, False, False),
        lambda: ops.sampled_attention_backward(grad, query[..., :-1], key, value, *codes, 5),
        lambda: ops.sampled_attention_backward(grad.double(), query, key, value, *codes, 5),
        lambda: ops.expectation_attention(query, key[..., :-1], value, 5, False, False),
        lambda: ops.expectation_attention_backward(grad[:, :, :-1], query, key, value, 5, False),
        lambda: remainder(value=value[:, :, :-1]),
        lambda: remainder(key_weight=torch.ones(2, 2, 12)),
        lambda: remainder(key_weight=torch.ones(2, 2, 11, dtype=torch.float64)),
        lambda: remainder(codes=(codes[0][:, :1], codes[1])),
        lambda: remainder(scale=0.0),
        lambda: remainder(shift=shift[:1]),
        lambda: remainder(shift=shift.long()),
        lambda: first_order(shift=shift[:, :1]),
        lambda: ops.sampled_remainder_backward(
            grad[:, :, :-1], grad.sum(-1), query, key, value, torch.ones(2, 2, 11), shift, *codes, 5, 0.5
        ),
        lambda: ops.sampled_remainder_backward(
            grad, grad.sum(-1)[:, :1], query, key, value, torch.ones(2, 2, 11), shift, *codes, 5, 0.5
        ),
        lambda: first_order(value=value[:, :, :-1]),
        lambda: first_order(key_weight=torch.ones(2, 2, 12)),
        lambda: first_order(heavy=torch.zeros(2, 2, 65).long()),
        lambda: first_order(heavy=torch.zeros(2, 2, 1).int()),
        lambda: first_order(remainder=grad[:, :, :-1]),
        lambda: first_order(remainder=grad.double()),
        lambda: first_order(total=torch.ones(2, 2, 8)),
        lambda: first_order_backward(grad[:, :, :-1]),
        lambda: first_order_backward(out=grad[..., :-1]),
        lambda: first_order_backward(total=torch.ones(2, 2, 8)),
        lambda: ops.unit_rows_backward(grad[..., :-1], grad, torch.ones(2, 2, 9)),
        lambda: ops.unit_rows_backward(grad, grad, torch.ones(2, 2, 8)),
        lambda: ops.hash_hadamard(query, functions.parameters[:, :-1].contiguous(), None, 4, 5),
        lambda: ops.hash_hadamard(query, functions.parameters, torch.ones(2, 3, dtype=torch.bool), 4, 5),
        lambda: ops.hash_hadamard(query[..., :4], torch.ones(2, 7, 4), None, 4, 5),
        lambda: ops.hash_gaussian(query, functions.parameters, None, 4, 5),
    ]
    if HAS_SOFTMAX_KERNEL:
        bad_calls += [
            lambda: ops.softmax_attention(query, key, value[:, :, :-1], None, 0.5),
            lambda: ops.softmax_attention(query, key, value, torch.ones(2, 3, dtype=torch.bool), 0.5),
            lambda: ops.softmax_attention(query, key, value, None, 0.0),
            lambda: softmax_backward(grad[:, :, :-1]),
            lambda: softmax_backward(out=grad[..., :-1]),
            lambda: softmax_backward(logarithm=torch.ones(2, 2, 8)),
            # on a GPU that would have to be waited for
            *(lambda i=i: first_order(heavy=torch.full((2, 2, 1), i)) for i in (-1, 11)),
            lambda: first_order_backward(heavy=torch.full((2, 2, 1), 11)),
        ]
    for call in bad_calls:
        with pytest.raises(RuntimeError, match="must"):
            call()
    # wider than the other inputs, where these have 16 bits
    halves = [x.bfloat16() for x in (query, key, value)]
    with pytest.raises(RuntimeError, match="remainder must be float32 here, got bfloat16"):
        ops.first_order_attention(*halves, one, shift, heavy, grad.bfloat16(), total, 0.5)
    with pytest.raises(RuntimeError, match=r"value must have shape \[2, 2, 11, \*\], got \[2, 2, 10, 6\]"):
        remainder(value=value[:, :, :-1])


@needs_kernels
@pytest.mark.parametrize("code", [-2, 32, 1000])
def test_codes_outside_the_table_belong_to_no_bucket(code):
    query, key, value, grad, _, _, codes = make((1, 1, 9, 11, 8, 6, 4, 5), torch.float32)
    masked, outside = codes[1].clone(), codes[1].clone()
    masked[..., 3], outside[..., 3] = -1, code
    for op, arguments in (
        (ops.sampled_attention, lambda c: (query, key, value, codes[0], c, 5, False, True)),
        (ops.sampled_attention_backward, lambda c: (grad, query, key, value, codes[0], c, 5)),
        (
            ops.sampled_remainder,
            lambda c: (query, key, value, torch.ones(1, 1, 11), no_shift(key), codes[0], c, 5, 0.5),
        ),
    ):
        pairs = zip(op(*arguments(masked)), op(*arguments(outside)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("backends", "extension", "gpu", "message"),
    [
        ({"cpu"}, SimpleNamespace(cuda_obstacle="this has sm_75"), "cuda", "no kernels for CUDA (this has sm_75)"),
        ({"cpu"}, SimpleNamespace(cuda_obstacle=""), "cuda", "no kernels for CUDA (none were compiled"),
        ({"cpu"}, SimpleNamespace(cuda_obstacle=""), "mps", "no kernels for MPS"),
        # as of softmax attention, which has none for GPUs by design
        ({"cpu", "cuda"}, SimpleNamespace(cuda_obstacle=""), "cuda", None),
        # which the import has told
        (set(), None, "cuda", None),
    ],
)
def test_the_reference_path_on_a_gpu_is_told_of_once(backends, extension, gpu, message, monkeypatch, caplog):
    monkeypatch.setattr(ops, "compiled_backends", lambda: backends)
    if extension is None:
        monkeypatch.delitem(sys.modules, "yoso_hf._C", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "yoso_hf._C", extension)
    ops._tell_of_missing_kernels.cache_clear()
    compute = ops._at_full_precision(lambda rows: rows.device)
    for device in ("cpu", gpu, gpu):
        compute(SimpleNamespace(device=torch.device(device)))
        assert len(caplog.messages) == (device == gpu and message is not None)
    if message is not None:
        assert caplog.messages[0].startswith(message)
    ops._tell_of_missing_kernels.cache_clear()


def test_the_reference_path_runs_without_the_extension():
    """In a process of its own, since operators are registered once."""
    code = """
import torch
from yoso_hf import HashFunctions, ops, reference
assert ops.compiled_backends() == set()
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3))
functions = HashFunctions.sample(2, 8, 4, 5)
codes = functions.codes(query.detach()), functions.codes(key.detach())
out, _ = ops.sampled_attention(query, key, value, *codes, 5, False, True)
assert torch.equal(out, reference.sampled_attention(query, key, value, *codes, 5, False, True)[0])
out.sum().backward()
assert query.grad.abs().sum() > 0 and value.grad.abs().sum() > 0
"""
    environment = {**os.environ, "YOSO_REFERENCE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
