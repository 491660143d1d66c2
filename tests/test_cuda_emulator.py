"""What the emulator makes of instructions of Hopper, by kernels of its own (cuda_emulator/products.cu)."""

import shutil

import pytest
from cuda_emulator import build as emulator
from test_cuda_kernels import needs_emulator, run_emulated

CALLS = """
import ctypes
library = ctypes.CDLL(sys.argv[1])

def multiply(which, accumulates=False, mistake=0):
    torch.manual_seed(0)
    columns = 128 if which < 4 else 32
    # sums that a float32 holds, so that all are exact
    a, b = (torch.randint(-128, 128, (rows, 64)).to(torch.bfloat16) for rows in (64, columns))
    before, out = torch.randint(-1000, 1000, (2, 64, columns)).float(), torch.empty(2, 64, columns)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (out, before, a, b)]
    if not accumulates:
        pointers[1] = None
    library.products(*pointers, which, mistake)
    return out.double(), a.double() @ b.double().T + (before.double() if accumulates else 0)
"""


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    root = tmp_path_factory.mktemp("products")
    sources = root / "csrc" / "cuda"
    sources.mkdir(parents=True)
    shutil.copy(emulator.HERE / "products.cu", sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "ROOT", root)
        emulator.build(root / "products.so")
    return root / "products.so"


@needs_emulator
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_products_of_warpgroups(products, order):
    """Of all layouts, and with a in registers, in steps of 16 columns."""
    code = """
for which in range(6):
    for accumulates in (False, True):
        out, expected = multiply(which, accumulates)
        assert torch.equal(out, expected.expand_as(out)), (which, accumulates)
"""
    run_emulated(products, CALLS + code, str(products), order=order, watch="races")


@needs_emulator
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (1, "read after write.* a race|write after read.* a race"),
        (2, r"read by tensor cores without fence\.proxy\.async after write.* a race"),
        (3, "read after write.* a race|write after read.* a race"),
        (4, "without a fence before"),
        (5, "products of a warpgroup that nobody waited for"),
        (6, "layout is not the swizzle of 128 bytes"),
        (7, "a warpgroup of less than four warps"),
    ],
)
def test_a_mistake_around_a_product_is_found(products, mistake, message):
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        run_emulated(products, CALLS + f"multiply(1, mistake={mistake})", str(products), watch="races")


@needs_emulator
def test_copies_in_groups(products):
    """All but those of the newest groups are there, and those of none, whose group has not ended, are not."""
    code = """
numbers, out = torch.arange(16.0), torch.empty(32)
library.copies(ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(numbers.data_ptr()))
assert torch.equal(out[:8], numbers[:8]) and out[8:16].isnan().all() and torch.equal(out[16:], numbers)
"""
    run_emulated(products, CALLS + code, str(products))


def turn_around(of_block, waits):
    return f"""{CALLS}
numbers, out = torch.arange(256.0), torch.empty(256)
library.barriers(ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(numbers.data_ptr()), {of_block}, {waits})
assert torch.equal(out.view(2, 128), numbers.view(2, 128).flip(1))
"""


@needs_emulator
def test_barriers_of_warpgroups(products):
    run_emulated(products, turn_around(of_block=False, waits=True), str(products), watch="races")


@needs_emulator
@pytest.mark.parametrize(("of_block", "waits"), [(False, False), (True, True)])
def test_a_barrier_of_too_few_is_found(products, of_block, waits):
    with pytest.raises(AssertionError, match=r"(?s)after (read|write).* a race"):
        run_emulated(products, turn_around(of_block, waits), str(products), watch="races")
