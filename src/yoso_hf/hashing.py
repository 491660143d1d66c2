"""Random hash functions whose collision probability is a power of the angle's complement."""

import functools

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from .graphs import hash_gaussian_graph, hash_hadamard_graph
from .ops import NAMESPACE, hash_gaussian, hash_hadamard

MAX_HASH_CODE_LEN = 16
# where nothing is hashed, hash_code_len is only the power of the kernel
MAX_EXACT_HASH_CODE_LEN = 32
# of an error about codes: what takes longer ones
EXACT_RANGE = f" (1..{MAX_EXACT_HASH_CODE_LEN} with expectation=True, which samples nothing)"
KINDS = ("hadamard", "gaussian")
MAX_SEED = 2**32 - 1


def check_integer(name: str, x: object, lowest: int, highest: int | None = None, note: str = "") -> None:
    """Refuses what is no integer in a range.

    Args:
        name: of the argument, for the message.
        x: what was given for it.
        lowest, highest: the range; None: without a highest.
        note: what follows in the message where x is out of range.

    Raises:
        ValueError: x is no integer, or out of range.
    """
    if not isinstance(x, (int, torch.SymInt)) or isinstance(x, bool):
        # a trace has tensors for sizes
        hint = ": torch.jit.trace takes the exact kernel only" if torch.jit.is_tracing() else ""
        raise ValueError(f"{name} must be an integer, got {x!r}{hint}")
    if x < lowest or (highest is not None and x > highest):
        allowed = f"at least {lowest}" if highest is None else f"in {lowest}..{highest}"
        raise ValueError(f"{name} must be {allowed}, got {x}{note}")


def check_floating(name: str, x: Tensor) -> None:
    """Refuses a tensor, the argument of that name, whose dtype nothing here computes with, by a ValueError."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def check_mask(name: str, mask: Tensor | None, rows: Tensor) -> None:
    """Refuses a mask, the argument of that name, that is not bool [B, N] beside rows [B, H, N, D], by a ValueError."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = getattr(mask, "dtype", type(mask).__name__)
        raise ValueError(f"{name} must be a tensor of bool, True for a real token, got {given}")
    if mask.shape != (rows.shape[0], rows.shape[2]):
        raise ValueError(f"{name} must have shape {[rows.shape[0], rows.shape[2]]}, got {list(mask.shape)}")
    if mask.device != rows.device:
        raise ValueError(f"{name} is on {mask.device}, but its rows are on {rows.device}: they must share a device")


class HashFunctions:
    """The random functions f_1..f_m of every head, each mapping a vector to a code of tau bits.

    Two vectors at angle a share a code with probability (1 - a / pi)^tau. A bit is the sign of a random
    projection (a projection of exactly zero gives 0); the length of a vector does not matter. Functions differ by
    head and are shared by the batch.

    "gaussian" draws every projection's direction from a normal distribution. "hadamard" takes the directions to be
    the rows of H G H D2 H D1, with H the Walsh-Hadamard matrix, D1 and D2 diagonals of random signs and G a diagonal
    of normal numbers. Given the rest, each row of H G is a normal vector, and every bit of a code has a G of its own,
    so the collision probability is exact for any two vectors of any length. (With signs in place of G the rows of
    one product are orthogonal; a code that takes several of them collides too seldom.) D1 and D2, shared by all
    bits, only spread the vectors, so that the hash functions of one product are nearly uncorrelated.

    Args:
        parameters: floating point. "hadamard": shape [num_heads, 2 + tau * ceil(m / P), P], P the transform's size:
            D1, D2, then the G of every bit (for every P hash functions: [tau, ceil(m / P)], the bit being the slower
            index). "gaussian": directions, shape [num_heads, tau * m, head_dim], the bit being the slower index.
        head_dim: length of the vectors, >= 1.
        num_hash: m, the number of functions, >= 1.
        hash_code_len: tau, bits of a code, 1..16.
        kind: "hadamard" or "gaussian".

    Raises:
        ValueError: a size out of range, an unknown kind, or parameters of another shape.
    """

    def __init__(self, parameters: Tensor, head_dim: int, num_hash: int, hash_code_len: int, kind: str = "hadamard"):
        shape = self.parameters_shape(parameters.shape[0], head_dim, num_hash, hash_code_len, kind)
        if parameters.shape != shape:
            raise ValueError(f"parameters must have shape {list(shape)}, got {list(parameters.shape)}")
        self.parameters = parameters
        self.head_dim = head_dim
        self.num_hash = num_hash
        self.hash_code_len = hash_code_len
        self.kind = kind

    @staticmethod
    def parameters_shape(
        num_heads: int, head_dim: int, num_hash: int, hash_code_len: int, kind: str = "hadamard"
    ) -> tuple[int, int, int]:
        """The shape of `parameters`.

        Raises:
            ValueError: a size below 1, a hash_code_len outside 1..16 or an unknown kind.
        """
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_hash": num_hash}
        for name, size in sizes.items():
            check_integer(name, size, 1)
        check_integer("hash_code_len", hash_code_len, 1, MAX_HASH_CODE_LEN, EXACT_RANGE)
        if kind == "gaussian":
            return (num_heads, hash_code_len * num_hash, head_dim)
        if kind == "hadamard":
            # the hash functions of a smaller transform are correlated, which raises the estimate's variance
            size = max(32, 1 << (head_dim - 1).bit_length())
            return (num_heads, 2 + hash_code_len * -(-num_hash // size), size)
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")

    @classmethod
    def sample(
        cls,
        num_heads: int,
        head_dim: int,
        num_hash: int,
        hash_code_len: int,
        *,
        kind: str = "hadamard",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> "HashFunctions":
        """Draws fresh functions.

        Args:
            num_heads: number of heads, each with functions of its own, >= 1.
            head_dim: length of the vectors, >= 1.
            num_hash: m, functions of one head, >= 1.
            hash_code_len: tau, bits of a code, 1..16.
            kind: "hadamard" or "gaussian".
            generator: source of randomness, on `device`; None: torch's global generator of that device.
            device: where the parameters are drawn and kept; None: torch's default.

        Raises:
            ValueError: a size out of range or an unknown kind.
        """
        shape = cls.parameters_shape(num_heads, head_dim, num_hash, hash_code_len, kind)
        # given as None, a generator refuses sizes that a compiler does not know
        options = {} if generator is None else {"generator": generator}
        parameters = torch.randn(shape, device=device, dtype=torch.float32, **options)
        if kind == "hadamard":
            # not by sign(), which is 0 where a draw is
            signs = parameters[:, :2]
            signs.copy_(torch.ones_like(signs).copysign(signs))
        return cls(parameters, head_dim, num_hash, hash_code_len, kind)

    @classmethod
    def seeded(
        cls,
        seed: int,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_hash: int,
        hash_code_len: int,
        *,
        kind: str = "hadamard",
        device: torch.device | str | None = None,
    ) -> "HashFunctions":
        """The functions that a layer has in eval mode: always the same for a seed and a layer, on any device.

        Args:
            seed: 0..2**32 - 1.
            layer_idx: number of the layer, >= 0.
            num_heads, head_dim, num_hash, hash_code_len, kind, device: as for `sample`.

        Raises:
            ValueError: a seed or a size out of range, or an unknown kind.
        """
        check_integer("seed", seed, 0, MAX_SEED)
        # torch's CPU generator reads the low 32 bits of a seed: seed and layer have to share them
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer_idx)
        sizes = (num_heads, head_dim, num_hash, hash_code_len)
        functions = cls.sample(*sizes, kind=kind, generator=generator, device="cpu")
        device = torch.get_default_device() if device is None else device
        return cls(functions.parameters.to(device), head_dim, num_hash, hash_code_len, kind)

    def part(self, heads: list[int] | None, hash_code_len: int) -> "HashFunctions":
        """The functions of some of the heads, with the first bits of their codes only.

        Args:
            heads: indices of heads, in their order; None: all of them.
            hash_code_len: bits of a code to keep, at most those there are.
        """
        blocks = self.parameters.shape[1] - 2 if self.kind == "hadamard" else self.parameters.shape[1]
        rows = blocks // self.hash_code_len * hash_code_len + (2 if self.kind == "hadamard" else 0)
        parameters = self.parameters[:, :rows].contiguous()
        if heads is not None:
            # not by a list as an index, which would have to be copied to the GPU
            parameters = torch.stack([parameters[head] for head in heads])
        return HashFunctions(parameters, self.head_dim, self.num_hash, hash_code_len, self.kind)

    def codes(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The codes of vectors.

        Args:
            x: vectors, floating point, shape [B, H, N, D].
            mask: bool, shape [B, N], False for vectors that belong to no bucket; None: all belong.

        Returns:
            Codes in [0, 2**tau), and -1 where the mask is False; shape [B, H, m, N], int16 for tau <= 15, else int32.

        Raises:
            ValueError: x of other heads or another head_dim than the functions have, or of another dtype or device; a
                mask of another shape, dtype or device.
        """
        heads = self.parameters.shape[0]
        if x.dim() != 4 or (x.shape[1], x.shape[3]) != (heads, self.head_dim):
            raise ValueError(f"x must have shape [B, {heads}, N, {self.head_dim}], got {list(x.shape)}")
        check_floating("x", x)
        if x.device != self.parameters.device:
            raise ValueError(f"x is on {x.device}, but the functions' parameters are on {self.parameters.device}")
        check_mask("mask", mask, x)
        if torch.onnx.is_in_onnx_export():
            hash_op = hash_gaussian_graph if self.kind == "gaussian" else hash_hadamard_graph
        else:
            hash_op = hash_gaussian if self.kind == "gaussian" else hash_hadamard
        return hash_op(x, self.parameters.float(), mask, self.num_hash, self.hash_code_len)


@functools.lru_cache(maxsize=256)
def _kept_parameters(seed: int, layer_idx: int, sizes: tuple[int, ...], kind: str, device: torch.device) -> Tensor:
    # an export and torch.func run models on tensors without data, or on batches of them, which must not be kept
    with _disable_current_modes(), temporarily_clear_interpreter_stack(), torch.inference_mode(False):
        return HashFunctions.seeded(seed, layer_idx, *sizes, kind=kind, device=device).parameters


# an operator of compiled models: a graph cannot make the generator that they are drawn from, and torch.compile takes
# the constants that one function gives to two layers for the same
@torch.library.custom_op(f"{NAMESPACE}::seeded_hash_parameters", mutates_args=())
def _compiled_parameters(like: Tensor, seed: int, layer_idx: int, sizes: list[int], kind: str) -> Tensor:
    # what an operator gives must be its own
    return _kept_parameters(seed, layer_idx, tuple(sizes), kind, like.device).clone()


@_compiled_parameters.register_fake
def _(like, seed, layer_idx, sizes, kind):  # noqa: ARG001
    return like.new_empty(HashFunctions.parameters_shape(*sizes, kind), dtype=torch.float32)


def kept_hash_functions(
    like: Tensor, seed: int, layer_idx: int, sizes: tuple[int, int, int, int], kind: str = "hadamard"
) -> HashFunctions:
    """HashFunctions.seeded, which are drawn once and kept, also where a model is compiled, exported or vmapped.

    Args:
        like: a tensor on the device that they are for, of any shape and dtype.
        seed, layer_idx, kind: as for HashFunctions.seeded.
        sizes: num_heads, head_dim, num_hash and hash_code_len, as for HashFunctions.seeded.

    Raises:
        ValueError: a seed or a size out of range, or an unknown kind.
    """
    if torch.compiler.is_dynamo_compiling():
        parameters = _compiled_parameters(like, seed, layer_idx, list(sizes), kind)
    else:
        parameters = _kept_parameters(seed, layer_idx, sizes, kind, like.device)
    return HashFunctions(parameters, *sizes[1:], kind)
