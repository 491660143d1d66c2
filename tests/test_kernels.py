"""The kernels of the device that the tests run on: as accurate as PyTorch, whether rows spread or crowd."""

import math
import random
from functools import partial

import pytest
import torch
from test_ops import HAS_SOFTMAX_KERNEL, needs_kernels, poisoned_memory  # noqa: F401

from yoso_hf import HashFunctions, ops, reference
from yoso_hf.hashing import KINDS

pytestmark = needs_kernels
needs_softmax_kernel = pytest.mark.skipif(not HAS_SOFTMAX_KERNEL, reason="PyTorch computes softmax there")
needs_cuda_kernels = pytest.mark.skipif(HAS_SOFTMAX_KERNEL, reason="of the CUDA kernels")


# how CUDA's kernels come to the sampled backward of bfloat16 rows; of others by buckets
@pytest.fixture(params=[None] if HAS_SOFTMAX_KERNEL else ["pairs", "buckets"])
def way(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setenv("YOSO_CUDA_BACKWARD", request.param)
    return request.param


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
        device = torch.get_default_device()
        torch.manual_seed(0)
        # the same numbers on every device: with others, rounding errors of a few elements could be out of proportion
        with torch.device("cpu"):
            query, key = torch.randn(B, N, H, D), torch.randn(B, M, H, D)
            if data != "random":
                centres = torch.randn(3 if data == "clusters" else 1, H, D)
                for rows in (query, key):
                    crowd = rows[:, ::2] if data == "mixed" else rows
                    crowd *= 0 if data == "equal" and rows is key else 0.1
                    crowd += centres[torch.randint(len(centres), (crowd.shape[1],))]
            value, grad = torch.randn(B, M, H, Dv), torch.randn(B, N, H, Dv)
            self.functions = [HashFunctions.sample(H, D, num_hash, self.tau, kind=kind) for kind in KINDS]
            mask = torch.rand(B, M) > 0.25
        # [B, rows, H, *] seen as [B, H, rows, *], as a model's projections come
        self.query, self.key, self.value, self.grad = (
            x.transpose(1, 2).to(device, dtype) for x in (query, key, value, grad)
        )
        for functions in self.functions:
            functions.parameters = functions.parameters.to(device)
        self.mask = mask.to(device)
        # of softmax's samples, for every other head
        self.shift = (20 * (torch.arange(B * H, dtype=torch.int32, device=device) % 2)).view(B, H)
        self.codes = self.functions[0].codes(self.query), self.functions[0].codes(self.key, self.mask)

    def hashes(self, namespace, dtype):
        """The codes of the keys by both kinds of hash function."""
        return [
            getattr(namespace, f"hash_{f.kind}")(self.key.to(dtype), f.parameters, self.mask, f.num_hash, self.tau)
            for f in self.functions
        ]

    def sampled(self, namespace, dtype):
        """What the sampled operators give, forward and backward."""
        arguments = (*(x.to(dtype) for x in (self.query, self.key, self.value)), *self.codes, self.tau)
        return [
            namespace.sampled_attention(*arguments, False, False)[0],
            *namespace.sampled_attention(*arguments, False, True),
            *self.sampled_backward(namespace, dtype),
        ]

    def sampled_backward(self, namespace, dtype):
        """What the backward alone gives: the gradients of query, key and value."""
        rows = (x.to(dtype) for x in (self.grad, self.query, self.key, self.value))
        return namespace.sampled_attention_backward(*rows, *self.codes, self.tau)

    def expectation(self, namespace, dtype, backwards=(False, True)):
        """What the exact operators give, forward and with both backwards, and the gradient of the normalisation."""
        grad, query, key, value = (x.to(dtype) for x in (self.grad, self.query, self.key, self.value))
        arguments = (query, key, value, self.tau)
        unit, inverse_length = namespace.expectation_attention(*arguments, False, True)
        return [
            namespace.expectation_attention(*arguments, False, False)[0],
            unit,
            inverse_length,
            *(x for exact in backwards for x in namespace.expectation_attention_backward(grad, *arguments, exact)),
            namespace.unit_rows_backward(grad, unit, inverse_length),
        ]

    def softmax(self, namespace, dtype):
        """What the operators of softmax attention give, forward and backward, with all keys and with some masked."""
        grad, query, key, value = (x.to(dtype) for x in (self.grad, self.query, self.key, self.value))
        results = []
        for mask in (None, self.mask):
            arguments = (query, key, value, mask, query.shape[3] ** -0.5)
            out, logarithm = namespace.softmax_attention(*arguments)
            results += [out, logarithm, *namespace.softmax_attention_backward(grad, out, logarithm, *arguments)]
        return results

    def remainder(self, namespace, dtype):
        """What the operators of the sampled remainder give, forward and backward."""
        query, key, value = (x.to(dtype) for x in (self.query, self.key, self.value))
        wide = torch.promote_types(dtype, torch.float32)
        key_weight = torch.linspace(0, 1, key.shape[2], dtype=wide).expand(key.shape[:3]).contiguous()
        grad, grad_total = self.grad.to(wide), self.grad.to(wide).sum(-1)
        arguments = (query, key, value, key_weight, self.shift, *self.codes, self.tau, query.shape[3] ** -0.5)
        return [
            *namespace.sampled_remainder(*arguments),
            *namespace.sampled_remainder_backward(grad, grad_total, *arguments),
        ]

    def first_order(self, namespace, dtype, forward=None):
        """What the operators of the first order give, forward and backward, or that of the forward that is given."""
        query, key, value = (x.to(dtype) for x in (self.query, self.key, self.value))
        wide = torch.promote_types(dtype, torch.float32)
        key_weight = torch.linspace(0, 1, key.shape[2], dtype=wide).expand(key.shape[:3]).contiguous()
        heavy = key_weight.topk(min(key.shape[2], 64)).indices
        grad, scale = self.grad.to(dtype), query.shape[3] ** -0.5
        inputs = (query, key, value, key_weight, self.shift, heavy)
        # of sums near 0 the inverse would have all errors: logarithms are at most the product of lengths
        largest = scale * query.to(wide).norm(dim=-1) * key.to(wide).norm(dim=-1).amax(-1, keepdim=True)
        remainder = self.grad.to(wide), key_weight.sum(-1, keepdim=True) * largest + 1
        out, total = namespace.first_order_attention(*inputs, *remainder, scale)
        of_out, of_total = (out, total) if forward is None else (forward[0].to(dtype), forward[1].to(wide))
        return [out, total, *namespace.first_order_attention_backward(grad, of_out, of_total, *inputs, scale)]


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
# functions than a transform has rows, a table that is larger than the rows, more pairs of small buckets than are
# listed at a time, tables that do not fit the memory for them, heads enough for blocks of a small GPU to have all
# columns of their queries, rows that take three quarters of the lanes that they have
SPREAD = [
    (2, 3, 65, 97, 32, 32, 3, 8),
    (1, 2, 131, 77, 64, 65, 8, 9),
    (1, 2, 63, 129, 128, 64, 5, 7),
    (2, 1, 33, 49, 7, 19, 70, 1),
    (1, 1, 259, 301, 100, 33, 9, 10),
    (1, 2, 700, 600, 32, 48, 3, 9),
    (1, 1, 17, 19, 8, 200, 3, 16),
    (1, 4, 333, 90, 64, 40, 5, 6),
    (1, 2, 65, 97, 72, 96, 3, 6),
]
# enough rows that kernels leave the order of multiplication that suits small buckets, tables far larger than rows,
# rows that a warp goes over twice, few keys, a tile of few, and so many rows that no pairs are multiplied
CROWDED = [
    (1, 4, 401, 353, 32, 47, 5, 6),
    (2, 2, 401, 353, 64, 64, 5, 9),
    (1, 2, 601, 653, 128, 40, 5, 8),
    (2, 2, 401, 353, 19, 33, 5, 1),
    (1, 3, 37, 50, 64, 64, 5, 13),
    (1, 2, 37, 50, 24, 17, 3, 16),
    (1, 2, 37, 45, 304, 24, 3, 4),
    (2, 6, 40, 1, 64, 64, 4, 9),
    (1, 2, 300, 3, 64, 64, 4, 9),
    (1, 1, 40, 65, 64, 64, 4, 9),
    (1, 2, 29, 560, 64, 64, 3, 4),
    (1, 2, 700, 60, 48, 64, 3, 4),
]
# products of more columns than are added up at once
WIDEST = (1, 2, 150, 170, 256, 64, 4, 8)
DTYPES = [torch.float32, torch.bfloat16]


# the other shapes have rows wider than a tile of columns and more hash functions than a block, and, at usual widths,
# fewer than a transform has rows, and more; and rows that many lanes share, also with as many hash functions as need
# the transform's rows in many steps
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [*SPREAD, (2, 2, 9, 133, 200, 16, 40, 5), (1, 3, 9, 301, 64, 8, 19, 9), (1, 2, 9, 77, 64, 8, 70, 7)]
    + [(1, 2, 9, 77, 32, 8, 34, 16), (1, 2, 9, 45, 304, 8, 5, 4), (1, 1, 9, 35, 1000, 8, 330, 2)],
)
def test_hash_kernels_give_the_codes_of_float64(shape, dtype):
    inputs = Inputs("random", shape, dtype)
    exact = inputs.hashes(reference, torch.float64)
    for got, expected in zip(inputs.hashes(ops, dtype), exact, strict=True):
        # a projection within rounding of zero may fall on either side
        assert (got != expected).sum() <= 1 + 1e-4 * got.numel()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("columns", [64, 40, 33])
def test_a_row_has_the_same_codes_wherever_it_lies(columns, dtype):
    """As queries and keys, of which there may be more or fewer, meet by equal codes."""
    inputs = Inputs("random", (2, 3, 5, 201, columns, 8, 33, 9), dtype)
    key = inputs.key.to(dtype)
    # rows at odd places
    apart = torch.zeros(*key.shape[:3], columns + 3, dtype=dtype)[..., 3:].copy_(key)
    for functions in inputs.functions:
        codes = functions.codes(key)
        assert torch.equal(functions.codes(apart), codes)
        for row in (0, 63, 64, 200):
            assert torch.equal(functions.codes(key[:1, :, row : row + 1]), codes[:1, :, :, row : row + 1])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("columns", [64, 32, 33])
def test_hash_codes_of_zeros_are_zero(columns, dtype):
    """No projection is positive, whatever the signs of the zeros."""
    inputs = Inputs("random", (1, 3, 5, 77, columns, 8, 33, 9), dtype)
    inputs.mask = None
    inputs.key[:, :, ::3] = 0
    inputs.key[:, :, ::6] = -0.0
    for codes in inputs.hashes(ops, dtype):
        assert (codes == 0).all(dim=(0, 1, 2)).nonzero().flatten().tolist() == list(range(0, 77, 3))


@pytest.mark.parametrize("byte", [2, 4, 255])
def test_any_byte_but_zero_of_a_mask_is_true(byte):
    """As a view of other bytes has them."""
    inputs = Inputs("random", (2, 2, 40, 45, 8, 8, 5, 3), torch.float32)
    expected = [*inputs.hashes(ops, torch.float32), *inputs.softmax(ops, torch.float32)]
    inputs.mask = (inputs.mask.to(torch.uint8) * byte).view(torch.bool)
    for got, wanted in zip(
        [*inputs.hashes(ops, torch.float32), *inputs.softmax(ops, torch.float32)], expected, strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SPREAD)
def test_kernels_are_as_accurate_as_pytorch(shape, dtype, way):
    if way == "pairs" and dtype != torch.bfloat16:
        pytest.skip("of bfloat16 only")
    inputs = Inputs("random", shape, dtype)
    assert_as_accurate_as_pytorch(inputs.sampled, dtype)
    if way != "pairs":
        assert_as_accurate_as_pytorch(inputs.expectation, dtype)


def random_inputs(seed, dtype):
    """Of sizes that nobody chose: no two kernels end in the same place."""
    generator = random.Random(seed)
    columns = [generator.randint(8, 136) for _ in range(2)]
    rows = [generator.randint(30, 200) for _ in range(2)]
    shape = (generator.randint(1, 2), generator.randint(1, 3), *rows, *columns)
    # with one function, as much is rounded twice as once, and the bound is where luck decides
    functions = (generator.randint(2, 20), generator.randint(1, 9))
    return Inputs(generator.choice(["random", "mixed"]), (*shape, *functions), dtype)


def at_odd_places(x, odd):
    """A tensor whose batches, heads or rows lie an odd number of elements apart, or whose first is at an odd place.

    All else is a multiple of 8 elements: of the strides, a kernel has to look at each.
    """
    row = x.shape[3] + (odd == "row")
    head = -(-x.shape[2] * row // 8) * 8 + (odd == "head")
    batch = -(-x.shape[1] * head // 8) * 8 + (odd == "batch")
    memory = x.new_empty(x.shape[0] * batch + 1)
    return memory.as_strided(x.shape, (batch, head, row, 1), int(odd == "start")).copy_(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", ["batch", "head", "row", "start"])
def test_rows_at_odd_places_are_not_read_as_if_aligned(odd, dtype, way):
    inputs = Inputs("random", (2, 2, 40, 48, 64, 64, 3, 5), dtype)
    for name in ("query", "key", "value", "grad"):
        setattr(inputs, name, at_odd_places(getattr(inputs, name), odd))
    assert_as_accurate_as_pytorch(inputs.sampled, dtype)
    if way == "pairs":
        return
    for got, expected in zip(inputs.hashes(ops, dtype), inputs.hashes(reference, torch.float64), strict=True):
        assert (got != expected).sum() <= 1
    for outputs in (inputs.expectation, inputs.remainder, inputs.first_order):
        assert_as_accurate_as_pytorch(outputs, dtype)
    if HAS_SOFTMAX_KERNEL:
        assert_as_accurate_as_pytorch(inputs.softmax, dtype)
    _, unit, inverse_length, *_, expected = inputs.expectation(ops, dtype)
    grad = inputs.grad.contiguous()
    assert torch.equal(ops.unit_rows_backward(grad, at_odd_places(unit, odd), inverse_length), expected)


@pytest.mark.parametrize("seed", range(12))
def test_sampled_rows_of_random_sizes(seed, way):
    for dtype in DTYPES if way is None else DTYPES[1:]:
        assert_as_accurate_as_pytorch(random_inputs(seed, dtype).sampled, dtype)


@pytest.mark.parametrize("seed", range(12))
def test_exact_rows_of_random_sizes(seed):
    inputs = random_inputs(seed, torch.bfloat16)
    for outputs in (inputs.expectation, inputs.remainder, inputs.first_order):
        assert_as_accurate_as_pytorch(outputs, torch.bfloat16)


# of several words of 32, and more bits of all than pairs are compared by
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 157, 301, 64, 64, 70, 6), (1, 1, 130, 97, 64, 40, 33, 12), (1, 1, 65, 90, 128, 100, 128, 8)]
    + [(1, 1, 65, 90, 64, 64, 130, 10), (1, 1, 65, 90, 128, 100, 128, 12), (2, 2, 129, 30, 64, 64, 32, 1)]
    # by tables with places of 16 bits, the largest that there are, and by planes beyond
    + [(1, 2, 131, 97, 64, 40, 3, 13), (1, 1, 65, 90, 64, 64, 3, 14)],
)
def test_backward_of_many_hash_functions_is_as_accurate_as_pytorch(shape, dtype):
    inputs = Inputs("mixed", shape, dtype)
    assert_as_accurate_as_pytorch(inputs.sampled_backward, dtype)


# of 160 to 240 rows, half of which have a block's memory to themselves; some of 352 and more, which do not fit it;
# wide rows, of which it has room for half as many; with rows that meet none, and several buckets at a time; one row;
# and rows that are alike
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("data", "shape"),
    [("random", (1, 1, 1500, 1400, 64, 48, 2, 3)), ("random", (1, 1, 1500, 700, 64, 64, 2, 2))]
    + [("random", (1, 1, 500, 600, 104, 128, 2, 2)), ("random", (1, 4, 430, 20, 24, 40, 24, 3))]
    + [("random", (1, 2, 130, 1, 64, 64, 2, 1)), ("mixed", (2, 2, 300, 290, 64, 64, 3, 2))]
    + [("equal", (1, 1, 300, 530, 64, 64, 3, 3))],
)
def test_backward_of_large_buckets_is_as_accurate_as_pytorch(data, shape, dtype, monkeypatch):
    monkeypatch.setenv("YOSO_CUDA_BACKWARD", "buckets")
    inputs = Inputs(data, shape, dtype)
    assert_as_accurate_as_pytorch(inputs.sampled_backward, dtype)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", ["equal", "random"])
def test_gradients_without_columns_of_values_are_zero(data, dtype):
    """In buckets of all rows too."""
    inputs = Inputs(data, (1, 2, 420, 450, 16, 0, 2, 3), dtype)
    for gradient, x in zip(inputs.sampled_backward(ops, dtype), (inputs.query, inputs.key, inputs.value), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x, dtype=dtype))


# in small buckets and in large ones
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("hash_code_len", [4, 2])
@pytest.mark.parametrize("factor", [3e-20, 1e18])
def test_gradients_of_rows_far_from_length_one_are_as_accurate_as_pytorch(factor, hash_code_len):
    """Squares of the lengths just fit float32, products of two such squares do not."""
    inputs = Inputs("random", (1, 2, 157, 301, 64, 64, 4, hash_code_len), torch.bfloat16)
    inputs.query *= factor
    inputs.key *= factor
    assert_as_accurate_as_pytorch(inputs.sampled_backward, torch.bfloat16)


# by tables of functions whose number is and is no multiple of what is read at a time, and by planes, of several words;
# with queries and keys without codes
@pytest.mark.parametrize(
    ("data", "shape"),
    [("random", (1, 2, 700, 33, 64, 64, 32, 9)), ("equal", (1, 1, 301, 230, 64, 64, 64, 7))]
    + [("mixed", (1, 2, 300, 210, 64, 64, 4, 5)), ("random", (1, 1, 500, 50, 64, 64, 64, 12))]
    + [("mixed", (1, 1, 200, 90, 64, 64, 2, 16))],
)
def test_the_gradient_of_values_counts_functions_that_agree(data, shape, monkeypatch):
    """Exactly, where the output's gradient is one in a column of its own for some queries, and else zero."""
    monkeypatch.setenv("YOSO_CUDA_BACKWARD", "pairs")
    inputs = Inputs(data, shape, torch.bfloat16)
    query_codes, key_codes = inputs.codes
    query_codes[..., ::7] = -1
    some = torch.randperm(shape[2])[:64]
    inputs.grad.zero_()[:, :, some] = torch.eye(64, dtype=torch.bfloat16)
    _, _, gradient = inputs.sampled_backward(ops, torch.bfloat16)
    agree = (query_codes[..., some, None] == key_codes[..., None, :]) & (key_codes[..., None, :] >= 0)
    assert torch.equal(gradient.float(), agree.sum(2).mT / shape[6])


@needs_cuda_kernels
def test_a_row_that_is_no_number_has_no_part_in_the_backward_by_pairs(monkeypatch):
    monkeypatch.setenv("YOSO_CUDA_BACKWARD", "pairs")
    inputs = Inputs("random", (1, 2, 157, 90, 64, 64, 4, 3), torch.bfloat16)
    (query_codes, key_codes), anything = inputs.codes, torch.tensor([math.nan, math.inf])
    query_codes[..., [3, 150]] = key_codes[..., [7, 8]] = -1
    expected = inputs.sampled(ops, torch.bfloat16)[-3:-1]
    query_codes[..., [3, 150]] = key_codes[..., [7, 8]] = 5
    inputs.query[:, :, [3, 150], 1] = inputs.key[:, :, [7, 8], 1] = anything.to(inputs.query)
    for got, gradient in zip(inputs.sampled(ops, torch.bfloat16)[-3:-1], expected, strict=True):
        assert gradient.norm() > 0
        assert torch.equal(got, gradient)


@pytest.mark.parametrize(
    ("data", "queries", "num_hash"), [("equal", 300, 301), ("equal", 70, 301), ("mixed", 300, 511)]
)
def test_more_hash_functions_than_bfloat16_counts(data, queries, num_hash):
    """How many agree is a whole number beyond 256, which is not to be rounded."""
    inputs = Inputs(data, (1, 1, queries, 300, 64, 64, num_hash, 1), torch.bfloat16)
    assert_as_accurate_as_pytorch(inputs.sampled_backward, torch.bfloat16)


# about 190 rows, where both take the same time with one function of 2 bits; more planes, columns and hash functions
# than pairs have
@needs_cuda_kernels
@pytest.mark.parametrize(
    ("shape", "setting", "taken"),
    [((1, 1, 187, 187, 64, 64, 1, 2), None, "pairs"), ((1, 1, 230, 230, 64, 64, 1, 2), None, "buckets")]
    + [((1, 1, 17, 20, 64, 64, 130, 10), "pairs", "buckets"), ((1, 1, 65, 90, 64, 136, 4, 3), "pairs", "buckets")]
    + [((1, 1, 17, 20, 64, 64, 257, 1), "pairs", "buckets")],
)
def test_the_backward_goes_the_faster_way_that_it_can(shape, setting, taken, monkeypatch):
    """As the ways round in other places."""
    inputs, found = Inputs("random", shape, torch.bfloat16), {}
    for name in {setting, "pairs", "buckets"}:
        monkeypatch.delenv("YOSO_CUDA_BACKWARD", raising=False)
        if name is not None:
            monkeypatch.setenv("YOSO_CUDA_BACKWARD", name)
        found[name] = torch.cat([x.flatten() for x in inputs.sampled(ops, torch.bfloat16)[-3:]])
    assert torch.equal(found[setting], found[taken])
    # where there are two
    assert torch.equal(found["pairs"], found["buckets"]) == (setting == "pairs")


@needs_cuda_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unknown_way_is_refused(dtype, monkeypatch):
    monkeypatch.setenv("YOSO_CUDA_BACKWARD", "Pairs")
    inputs = Inputs("random", (1, 1, 7, 9, 8, 8, 2, 3), dtype)
    with pytest.raises(RuntimeError, match="YOSO_CUDA_BACKWARD must be pairs or buckets, got Pairs"):
        inputs.sampled(ops, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_read_and_rounded_as_pytorch_does(dtype):
    """Each of them, and sums of two, with ties, infinite ones and those below the normal range."""
    value = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 1, 1024, 64)
    rows = torch.randn_like(value)
    order = torch.arange(1024, dtype=torch.int16)
    # every query meets one key by the first function, and another by the second
    codes = torch.stack([order, torch.randperm(1024).to(torch.int16)])[None, None]
    key_codes = torch.stack([order, order])[None, None]
    for m in (1, 2):
        met = value.float()[:, :, codes[0, 0, :m].long()].sum(2)
        got, _ = ops.sampled_attention(rows, rows, value, codes[:, :, :m], key_codes[:, :, :m], 10, False, False)
        torch.testing.assert_close(got, (met / m).to(dtype), rtol=0, atol=0, equal_nan=True)


# what GPUs have in shared memory: tables for more queries than a block has, and half a slice of columns; of a single
# hash function; for as many queries as it takes, and for so many heads that a block has all columns of a query; some
# columns of many keys, and hash functions in two parts
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 4099, 70, 8, 72, 3, 6), (1, 2, 2049, 33, 8, 8, 1, 2), (2, 1, 256, 40, 8, 200, 2, 7)]
    + [(11, 12, 70, 40, 8, 40, 2, 5), (1, 1, 33, 1600, 8, 40, 9, 4)],
)
def test_tables_and_values_in_shared_memory(shape, dtype):
    inputs = Inputs("random", shape, dtype)
    inputs.codes[0][:, :, :, ::3] = -1

    def outputs(namespace, dtype):
        rows = (x.to(dtype) for x in (inputs.query, inputs.key, inputs.value))
        arguments = (*rows, *inputs.codes, inputs.tau, False)
        return [namespace.sampled_attention(*arguments, False)[0], *namespace.sampled_attention(*arguments, True)]

    assert_as_accurate_as_pytorch(outputs, dtype)


# where GPUs multiply copies of the values in shared memory, and where they add them up from the cache
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2, 1100, 300, 8, 24, 5, 6), (1, 2, 40, 300, 8, 40, 1, 2)])
def test_values_that_are_no_numbers_or_huge_spoil_sums_they_are_in_only(shape, dtype):
    inputs = Inputs("random", shape, dtype)
    inputs.value[:, 0, 3, 1] = float("nan")
    inputs.value[:, 0, 7, 20] = float("inf")
    inputs.value[:, 1, 5] = torch.finfo(dtype).max / 8
    # none of them masked, and with queries in their bucket
    inputs.codes[1][..., [3, 5, 7]] = inputs.codes[0][..., :3]
    # too large to be added twice, and in a bucket of one hash function, beside no number that is none
    inputs.value[:, 1, 6] = 0.7 * torch.finfo(dtype).max
    inputs.codes[1][..., 6] = -1
    inputs.codes[1][:, :, 0, 6] = inputs.codes[0][:, :, 0, 3]
    arguments = (*inputs.codes, inputs.tau, False, False)
    got, _ = ops.sampled_attention(inputs.query, inputs.key, inputs.value, *arguments)
    wide = (x.double() for x in (inputs.query, inputs.key, inputs.value))
    truth, _ = reference.sampled_attention(*wide, *arguments)
    assert torch.equal(got.isfinite(), truth.isfinite())
    assert 0 < truth.isfinite().logical_not().sum() < truth.numel() / 4
    # a bucket's sum is rounded to the dtype, and so is the output
    torch.testing.assert_close(got.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=0.05, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_keys", "hash_code_len"), [(65535, 9), (65536, 9), (65537, 9), (65536, 15)])
def test_as_many_keys_as_16_bits_count_and_more(num_keys, hash_code_len, dtype):
    """Equal ones, whose sum is that of all, and random ones; of long codes, one warp counts all keys."""
    codes = torch.full((num_keys,), 511), torch.randint(0, 1 << hash_code_len, (num_keys,))
    codes = torch.stack(codes).to(torch.int16)[None, None]
    query_codes = torch.tensor([[511, -1, 511], [-1, 7, 511]], dtype=torch.int16)[None, None]
    value, query = torch.randn(1, 1, num_keys, 8), torch.randn(1, 1, 3, 8)

    def outputs(namespace, dtype):
        rows = (x.to(dtype) for x in (query, value, value))
        return namespace.sampled_attention(*rows, query_codes, codes, hash_code_len, False, False)[:1]

    assert_as_accurate_as_pytorch(outputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CROWDED)
@pytest.mark.parametrize("data", ["equal", "clusters", "mixed"])
def test_kernels_are_as_accurate_as_pytorch_in_crowded_buckets(data, shape, dtype, way):
    if way == "pairs" and dtype != torch.bfloat16:
        pytest.skip("of bfloat16 only")
    inputs = Inputs(data, shape, dtype)
    assert_as_accurate_as_pytorch(inputs.sampled, dtype)
    # more columns than the exact kernels take on a GPU
    if shape[4] > 256 or way == "pairs":
        return
    # not the exact slope: of cosines near 1 it is mostly their rounding error
    assert_as_accurate_as_pytorch(partial(inputs.expectation, backwards=[False]), dtype)


# on a CPU a whole chunk of keys and a part of one, and of queries in the backward
@pytest.mark.parametrize("sizes", [(1100, 2090), (2048, 1025)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_exact_kernels_of_many_rows_are_as_accurate_as_pytorch(dtype, sizes):
    inputs = Inputs("random", (1, 1, *sizes, 16, 24, 1, 7), dtype)
    assert_as_accurate_as_pytorch(inputs.expectation, dtype)
    if HAS_SOFTMAX_KERNEL:
        assert_as_accurate_as_pytorch(inputs.softmax, dtype)


# the last: as many queries as keys
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SPREAD, WIDEST, (2, 2, 97, 97, 64, 64, 1, 1)])
@pytest.mark.parametrize("data", ["random", "clusters", "mixed"])
@needs_softmax_kernel
def test_softmax_kernels_are_as_accurate_as_pytorch(data, shape, dtype):
    inputs = Inputs(data, shape, dtype)
    assert_as_accurate_as_pytorch(inputs.softmax, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [*SPREAD, WIDEST, (1, 2, 2100, 2200, 64, 64, 1, 1)])
@pytest.mark.parametrize("data", ["random", "clusters", "mixed"])
def test_first_order_kernels_are_as_accurate_as_pytorch(data, shape, dtype):
    if dtype == torch.float16 and not HAS_SOFTMAX_KERNEL:
        pytest.skip("as the sampled remainder, which there is of no float16 on a GPU")
    inputs = Inputs(data, shape, dtype)
    # the same for every backward: the weights' gradient has the rounding errors of a few rows of the output, which
    # could be out of proportion
    forward = inputs.first_order(reference, torch.float64)[:2]
    assert_as_accurate_as_pytorch(partial(inputs.first_order, forward=forward), dtype)


@pytest.mark.parametrize("shift", [0, 31, 87])
def test_the_weight_of_a_heavy_key_is_exp_of_its_logarithm(shift):
    """To a few roundings of each, not only on average; with a shift, of the logarithm too."""
    beyond = shift * math.log(2)
    query = torch.linspace(beyond - 60, beyond + 59.99, 2001)[None, None, :, None]
    key, value, key_weight = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1)
    heavy, remainder = torch.zeros(1, 1, 1, dtype=torch.int64), (torch.zeros(1, 1, 2001, 8), torch.zeros(1, 1, 2001))
    shifts = torch.full((1, 1), shift, dtype=torch.int32)
    out, total = ops.first_order_attention(query, key, value, key_weight, shifts, heavy, *remainder, 1.0)
    truth, eps = (query[..., 0].double() - beyond).exp(), torch.finfo(torch.float32).eps
    roundings = 4 if shift == 0 else 4 + query[..., 0].abs() + beyond
    assert ((total - truth).abs() <= roundings * eps * truth).all()
    assert ((out - 1).abs() <= 2 * eps).all()


# the last three: buckets of several parts, and more hash functions than a warp has lanes, whose buckets differ. More
# rows of the longest codes: a single pair of those above shares a bucket, and PyTorch's error of one is a matter of
# luck.
LONGEST = (1, 1, 401, 353, 8, 200, 3, 16)
SHORTER = [shape for shape in SPREAD if shape[-1] < LONGEST[-1]]
REMAINDER = [*SHORTER, LONGEST, WIDEST, (1, 2, 150, 333, 64, 64, 3, 2), (1, 1, 65, 129, 32, 32, 2, 1)]
REMAINDER += [(1, 2, 40, 37, 24, 16, 40, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", REMAINDER)
@pytest.mark.parametrize("data", ["random", "equal", "clusters", "mixed"])
def test_remainder_kernels_are_as_accurate_as_pytorch(data, shape, dtype):
    assert_as_accurate_as_pytorch(Inputs(data, shape, dtype).remainder, dtype)


# Of the keys 8 times as long, logarithms beyond the largest, forward only: of the gradients, the pair with the largest
# one below it would have everything.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("factor", "num_outputs"), [(1, 6), (8, 2)])
def test_remainder_kernels_are_as_accurate_as_pytorch_where_logarithms_are_large(factor, num_outputs, dtype):
    """In root mean square over all shapes: of one, a few pairs have nearly everything, and their errors are luck."""
    errors = []
    for shape in REMAINDER:
        inputs = Inputs("random", shape, dtype)
        inputs.query *= 8
        inputs.key *= factor
        results = [inputs.remainder(*each) for each in ((ops, dtype), (reference, dtype), (reference, torch.float64))]
        for got, same_dtype, truth in list(zip(*results, strict=True))[:num_outputs]:
            if truth.norm() > 0:
                errors.append([(x - truth).norm() / truth.norm() for x in (got, same_dtype)])
    assert len(errors) > len(REMAINDER)
    error, bound = torch.tensor(errors).square().mean(0).sqrt()
    assert error <= 2 * bound + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_remainder_kernels_are_as_accurate_as_pytorch_where_all_logarithms_are_beyond_the_largest(dtype):
    """There exp no longer grows, and of the slope of what it has beyond 1 + x that of -x is left."""
    inputs = Inputs("equal", (1, 2, 70, 65, 64, 64, 5, 3), dtype)
    inputs.query *= 5
    inputs.key *= 5
    # of both shifts
    assert (inputs.query @ inputs.key.mT).min() / 8 > 60 + math.log(2) * inputs.shift.max()
    assert_as_accurate_as_pytorch(inputs.remainder, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_remainder_of_rows_of_length_zero_is_zero(dtype):
    inputs = Inputs("random", (1, 2, 90, 100, 64, 64, 3, 3), dtype)
    inputs.query[:, :, ::2] = inputs.key[:, :, ::3] = 0
    assert_as_accurate_as_pytorch(inputs.remainder, dtype)
    out, total, grad_query, grad_key, grad_value, grad_weight = inputs.remainder(ops, dtype)
    for x in (out, total, grad_query):
        assert (x[:, :, ::2] == 0).all()
    for x in (grad_key, grad_value, grad_weight):
        assert (x[:, :, ::3] == 0).all()


@pytest.mark.parametrize("hash_code_len", [5, 16])
def test_cosines_that_rounding_has_above_one(hash_code_len):
    """Of queries that are keys, in float64, where nothing else hides what comes of them."""
    inputs = Inputs("random", (1, 2, 65, 65, 24, 16, 4, hash_code_len), torch.float64)
    inputs.query = inputs.key
    inputs.codes = inputs.functions[0].codes(inputs.query), inputs.codes[1]
    rows = torch.nn.functional.normalize(inputs.query, dim=-1)
    assert ((rows @ rows.mT).diagonal(dim1=-2, dim2=-1) > 1).any()
    assert_as_accurate_as_pytorch(partial(inputs.expectation, backwards=[False]), torch.float64)
    assert_as_accurate_as_pytorch(inputs.remainder, torch.float64)


@needs_softmax_kernel
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_softmax_is_as_accurate_as_pytorch_where_logarithms_rise_from_tile_to_tile(dtype):
    """What was summed up before is over a smaller weight each time."""
    inputs = Inputs("random", (1, 2, 70, 400, 32, 16, 1, 7), dtype)
    inputs.key = inputs.key * (torch.arange(400) / 8).to(dtype).unsqueeze(-1)
    largest = (32**-0.5 * inputs.query.double() @ inputs.key.double().mT).unflatten(-1, (-1, 50)).amax(-1)
    assert (largest.diff(dim=-1) > 8).double().mean() > 0.3
    assert_as_accurate_as_pytorch(inputs.softmax, dtype)


@needs_softmax_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e8])
def test_the_gradient_of_a_single_key_is_that_of_a_weight_of_one(size, dtype):
    """However large its logarithm, of which the forward keeps what the backward takes from it."""
    torch.manual_seed(0)
    query = (size * torch.randn(1, 1, 40, 32)).to(dtype)
    key, value, grad = (torch.randn(1, 1, rows, 32).to(dtype) for rows in (1, 1, 40))
    out, logarithm = ops.softmax_attention(query, key, value, None, 32**-0.5)
    gradients = ops.softmax_attention_backward(grad, out, logarithm, query, key, value, None, 32**-0.5)
    exact = grad.double().sum(2, keepdim=True)
    assert (gradients[2] - exact).norm() <= 2 * (grad.sum(2, keepdim=True) - exact).norm() + 1e-6 * exact.norm()


@pytest.fixture
def flushed_denormals():
    """Floats below the normal range are zero to the processor."""
    if not torch.set_flush_denormal(True):
        pytest.skip("not on this processor")
    yield
    torch.set_flush_denormal(False)


@needs_softmax_kernel
@pytest.mark.parametrize("columns", [1, 16, 65536])
def test_halves_below_their_normal_range_are_numbers_all_the_same(columns, flushed_denormals):  # noqa: ARG001
    """They are normal floats. Of one key, the output is its value: of every number there is."""
    value = torch.arange(65536).to(torch.int16).view(torch.float16).view(-1, 1, 1, columns)
    row = torch.zeros(len(value), 1, 1, 1, dtype=torch.float16)
    out, _ = ops.softmax_attention(row, row, value, None, 1.0)
    torch.testing.assert_close(out, value, rtol=0, atol=0, equal_nan=True)


@needs_softmax_kernel
def test_softmax_does_not_depend_on_which_rows_share_a_tile():
    """Where a logarithm is above the largest before by what is only just too much, or not, by how it is rounded."""
    torch.manual_seed(0)
    query = torch.full((1, 1, 40, 1), 0.1)
    query[0, 0, 25], query[0, 0, 5] = 1, 20
    key = torch.full((1, 1, 80, 1), -1.0)
    key[0, 0, 64], key[0, 0, 65:] = 7 + 2**-21, 7 * torch.rand(15, 1)
    value = torch.randn(1, 1, 80, 8)
    threads, found = torch.get_num_threads(), []
    # by threads of their own, or not
    for count in (1, 2):
        torch.set_num_threads(count)
        found += [ops.softmax_attention(query, key, value, None, scale) for scale in (1.0, math.log(2))]
    torch.set_num_threads(threads)
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@needs_softmax_kernel
def test_masked_keys_of_softmax_attention_may_hold_anything(dtype):
    inputs = Inputs("random", (3, 2, 90, 197, 64, 64, 1, 1), dtype)
    # tiles without a real key on either side, and between
    inputs.mask[1] = False
    inputs.mask[2, :70] = inputs.mask[2, 71:150] = inputs.mask[2, 180:] = False
    expected = inputs.softmax(ops, dtype)[5:]
    masked = ~inputs.mask[:, None, :, None]
    inputs.key, inputs.value = (x.masked_fill(masked, float("nan")) for x in (inputs.key, inputs.value))
    for got, same in zip(inputs.softmax(ops, dtype)[5:], expected, strict=True):
        assert torch.equal(got, same)
    out, logarithm, *gradients = expected
    # of the batch without a real key
    assert all((x[1] == 0).all() for x in (out, *gradients))
    assert (logarithm[1] == -torch.inf).all()
    assert all((x.masked_select(masked) == 0).all() for x in gradients[1:])
    out, logarithm, *_ = inputs.softmax(ops, dtype)[5:]
    rows = inputs.mask[2]
    alone = ops.softmax_attention(inputs.query[2:], *(x[2:, :, rows] for x in (inputs.key, inputs.value)), None, 0.125)
    for one, other in zip((out, logarithm), alone, strict=True):
        torch.testing.assert_close(one[2:], other, rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_weights_that_are_all_small_are_as_accurate_as_pytorch(dtype):
    """Of keys in the other direction; less than what a tile's places without a key could add."""
    inputs = Inputs("equal", (1, 1, 40, 65, 64, 64, 4, 9), dtype)
    inputs.query = -inputs.query
    assert_as_accurate_as_pytorch(partial(inputs.expectation, backwards=[False]), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("num_keys", [40, 100])
def test_rows_that_are_no_numbers_or_huge_spoil_what_they_touch_only(num_keys, dtype):
    inputs = Inputs("random", (1, 2, 130, num_keys, 64, 64, 4, 9), dtype)
    inputs.query[:, 0, 3] = float("nan")
    inputs.query[:, 0, 7] = float("inf")
    inputs.query[:, 1, 9] = 0
    huge = torch.finfo(dtype).max / 8

    def outputs(namespace, dtype):
        # rows whose square is too large for float32 count as of length zero; float64 could hold it
        is_zero = dtype == torch.float64 and huge > torch.finfo(torch.float16).max
        inputs.query[:, 1, 11] = inputs.key[:, 1, 5] = 0 if is_zero else huge
        results = inputs.expectation(namespace, dtype, backwards=[False])
        not_numbers.append([x.isnan() for x in results])
        return [x.nan_to_num(nan=0) for x in results]

    not_numbers = []
    assert_as_accurate_as_pytorch(outputs, dtype)
    for truth, got, _ in zip(*not_numbers, strict=True):
        assert torch.equal(got, truth)
    out = not_numbers[0][0]
    assert out[:, 0, [3, 7]].all()
    assert out.sum() == out[:, 0, [3, 7]].numel()
