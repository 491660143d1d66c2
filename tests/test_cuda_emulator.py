"""What the emulator makes of instructions of Hopper, by kernels of its own (cuda_emulator/products.cu)."""

import shutil

import pytest
from cuda_emulator import build as emulator
from cuda_emulator.product_registers import RegisterInUse, check_products
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
        (4, "products of a warpgroup that nobody waited for"),
        (5, "layout is not the swizzle of 128 bytes"),
        (6, "a warpgroup of less than four warps"),
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


# instructions for paths through products that are under way: two groups, of registers of their own
MULTIPLY = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
PRODUCT = MULTIPLY + "{%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, %rd1, p, 1, 1, 0; "
OTHER = MULTIPLY + "{%f5, %f6, %f7, %f8}, %rd2, %rd3, p, 1, 1, 0, 0; "
FENCE, COMMIT = (f"wgmma.{name}.sync.aligned; " for name in ("fence", "commit_group"))
GROUP = FENCE + PRODUCT + COMMIT
WAIT, WAIT_BUT_ONE, WAIT_BUT_THREE = (f"wgmma.wait_group.sync.aligned {number}; " for number in (0, 1, 3))
USE = "add.f32 %f9, %f1, %f1; "


def make_ptx(code):
    lines = code.replace("$", "\n$")
    return f'.file 1 "/made/up.cu"\n.visible .entry made_up(.param .u64 x)\n{{\n.loc 1 7 3\n{lines}\nret;\n}}\n'


@pytest.mark.parametrize(
    ("code", "register"),
    [
        (GROUP + USE + WAIT, "f1"),
        (GROUP + "shl.b32 %r9, %r4, 16; " + WAIT, "r4"),
        (GROUP + "cvt.rn.bf16x2.f32 %r2, %f9, %f9; " + WAIT, "r2"),
        (GROUP + "mov.f32 %f9, %f2; st.global.f32 [%rd4], %f9; " + WAIT, "f9"),
        (FENCE + PRODUCT + WAIT + USE, "f1"),
        (FENCE + PRODUCT + OTHER + COMMIT + USE, "f1"),
        (GROUP + COMMIT * 12 + USE, "f1"),
        (GROUP + WAIT_BUT_ONE + USE, "f1"),
        (FENCE + OTHER + COMMIT + GROUP + WAIT_BUT_ONE + USE, "f1"),
        ("$again: add.f32 %f9, %f3, %f3; " + GROUP + "@%p1 bra $again; " + WAIT, "f3"),
        (GROUP + "@!%p1 bra $over; " + WAIT + "$over: " + USE, "f1"),
        # what a loop has begun before that is ended in it, but for the last
        ("$again: " + GROUP + WAIT_BUT_ONE + "@%p1 bra $again; " + USE + WAIT, "f1"),
    ],
)
def test_registers_of_a_product_under_way_are_found(code, register):
    with pytest.raises(RegisterInUse, match=rf"up\.cu:7: .*: %{register} of a product that has not been waited for"):
        check_products(make_ptx(code))


@pytest.mark.parametrize(
    "code",
    [
        GROUP + WAIT + USE,
        GROUP + OTHER + COMMIT + WAIT_BUT_ONE + USE + WAIT,
        # sums that another product goes on with
        GROUP + "mov.f32 %f5, %f1; " + FENCE + OTHER + COMMIT + WAIT + "add.f32 %f9, %f5, %f1;",
        GROUP + PRODUCT + COMMIT + WAIT + USE + GROUP + WAIT,
        GROUP + "mov.f32 %f9, %f1; mov.f32 %f9, 0f00000000; add.f32 %f9, %f9, %f9; " + WAIT,
        "$again: " + WAIT + USE + GROUP + "@%p1 bra $again; " + WAIT + USE,
        GROUP + OTHER + COMMIT * 3 + WAIT_BUT_THREE + USE + WAIT,
        # never reached
        GROUP + "bra $over; " + USE + "$over: " + WAIT,
        GROUP + "ret; " + USE,
        # of more groups than a wait can leave out
        GROUP * 12 + OTHER + COMMIT + WAIT_BUT_ONE + USE + WAIT,
    ],
)
def test_registers_may_be_used_once_the_product_has_been_waited_for(code):
    check_products(make_ptx(code))


@pytest.mark.parametrize(
    ("code", "register"),
    [
        (PRODUCT + COMMIT + WAIT, "f1, %f2, %f3, %f4, %r1, %r2, %r3, %r4"),
        (GROUP + WAIT + USE + "add.f32 %f9, %f9, %f9; " + PRODUCT + COMMIT + WAIT, "f1"),
        (FENCE + "cvt.rn.bf16x2.f32 %r2, %f9, %f9; " + PRODUCT + COMMIT + WAIT, "r2"),
        (FENCE + "mov.f32 %f4, 0f00000000; " + PRODUCT + COMMIT + WAIT, "f4"),
        # but for the first time
        (FENCE + "$again: " + PRODUCT + COMMIT + WAIT + USE + "@%p1 bra $again;", "f1"),
        ("@%p1 bra $over; " + FENCE + "$over: " + PRODUCT + COMMIT + WAIT, "f1, .*"),
    ],
)
def test_a_product_that_takes_registers_without_a_fence_is_found(code, register):
    message = rf"up\.cu:7: wgmma.*: %{register} of other instructions since the last fence"
    with pytest.raises(RegisterInUse, match=message):
        check_products(make_ptx(code))
