"""The operators torch.ops.yoso_hf.*: schemas, which kernel runs, fake and autograd registrations.

The extension yoso_hf._C registers kernels for CPU and CUDA; where there is none, reference.py runs, which also says
what each operator computes. The schemas stand here rather than in C++ so that they exist without the extension too.
A copy of this module that came with a checkpoint has operators of its own, without kernels: it may be of another
version than an installed yoso_hf, and a checkpoint computes what its own code says.

Letters in shapes: B batch, H heads, N queries, M keys, D head_dim, Dv value columns, m num_hash, tau hash_code_len.
Outputs of shape [B, H, rows, columns] have the memory order [B, rows, H, columns]: merging the heads is a view.
"""

import functools
import importlib
import logging
import os
import sys
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from .reference import DEFINITIONS

PACKAGE = "yoso_hf"
IS_COPY = __package__ != PACKAGE
# a copy lies in a package named after its checkpoint, with any characters
NAMESPACE = f"{PACKAGE}_{zlib.crc32(__package__.encode()):08x}" if IS_COPY else PACKAGE

SCHEMAS = {
    "hash_hadamard": "(Tensor x, Tensor parameters, Tensor? mask, int num_hash, int hash_code_len) -> Tensor",
    "hash_gaussian": "(Tensor x, Tensor parameters, Tensor? mask, int num_hash, int hash_code_len) -> Tensor",
    "sampled_attention": "(Tensor query, Tensor key, Tensor value, Tensor query_codes, Tensor key_codes, "
    "int hash_code_len, bool expectation_backward, bool unit) -> (Tensor, Tensor)",
    "sampled_attention_backward": "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor query_codes, "
    "Tensor key_codes, int hash_code_len) -> (Tensor, Tensor, Tensor)",
    "expectation_attention": "(Tensor query, Tensor key, Tensor value, int hash_code_len, bool exact_backward, "
    "bool unit) -> (Tensor, Tensor)",
    "expectation_attention_backward": "(Tensor grad, Tensor query, Tensor key, Tensor value, int hash_code_len, "
    "bool exact) -> (Tensor, Tensor, Tensor)",
    "softmax_attention": "(Tensor query, Tensor key, Tensor value, Tensor? key_mask, float scale) -> (Tensor, Tensor)",
    "softmax_attention_backward": "(Tensor grad, Tensor out, Tensor logarithm, Tensor query, Tensor key, "
    "Tensor value, Tensor? key_mask, float scale) -> (Tensor, Tensor, Tensor)",
    "sampled_remainder": "(Tensor query, Tensor key, Tensor value, Tensor key_weight, Tensor shift, "
    "Tensor query_codes, Tensor key_codes, int hash_code_len, float scale) -> (Tensor, Tensor)",
    "sampled_remainder_backward": "(Tensor grad, Tensor grad_total, Tensor query, Tensor key, Tensor value, "
    "Tensor key_weight, Tensor shift, Tensor query_codes, Tensor key_codes, int hash_code_len, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "first_order_attention": "(Tensor query, Tensor key, Tensor value, Tensor key_weight, Tensor shift, "
    "Tensor heavy, Tensor remainder, Tensor remainder_total, float scale) -> (Tensor, Tensor)",
    "first_order_attention_backward": "(Tensor grad, Tensor out, Tensor total, Tensor query, Tensor key, "
    "Tensor value, Tensor key_weight, Tensor shift, Tensor heavy, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "local_attention": "(Tensor query, Tensor key, Tensor value, Tensor query_codes, Tensor key_codes, "
    "int hash_code_len, int window) -> Tensor",
    "local_attention_backward": "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor query_codes, "
    "Tensor key_codes, int hash_code_len, int window) -> (Tensor, Tensor, Tensor)",
    "unit_rows_backward": "(Tensor grad, Tensor unit, Tensor inverse_length) -> Tensor",
}


def compiled_backends() -> set[str]:
    """Which of "cpu" and "cuda" have compiled kernels; the reference runs on every other device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in ("cpu", "cuda") if has_kernel(f"{NAMESPACE}::sampled_attention", name.upper())}


def cpu_uses_amx() -> bool:
    """Whether exact attention of bfloat16 rows is computed by the processor's AMX, by compiled kernels."""
    extension = sys.modules.get(f"{PACKAGE}._C")
    return "cpu" in compiled_backends() and getattr(extension, "cpu_capability", None) == "amx"


def _load_extension() -> None:
    if os.environ.get("YOSO_REFERENCE") == "1":
        return
    logger = logging.getLogger(__name__)
    if IS_COPY:
        logger.warning(
            "this checkpoint's own code runs without compiled kernels, on the slower reference path; with %s "
            "installed and imported first, its kernels run instead",
            PACKAGE,
        )
        return
    try:
        # by name: code that is saved with a checkpoint must not be found to need a compiled file
        importlib.import_module(f"{PACKAGE}._C")
    except ImportError as error:
        logger.warning("no compiled extension (%s): the slower reference path runs", error)


@functools.cache
def _tell_of_missing_kernels(device: str) -> None:
    """Once, where a GPU is used; where there is no extension, or no use of it, that was told before or asked for."""
    extension = sys.modules.get(f"{PACKAGE}._C")
    # where others have kernels, softmax attention has none for GPUs, as PyTorch's own is fast there
    if IS_COPY or extension is None or device in compiled_backends():
        return
    reason = "there are some for CPUs and CUDA"
    if device == "cuda":
        reason = getattr(extension, "cuda_obstacle", "") or "none were compiled, as where nvcc is not found"
    message = "no kernels for %s (%s): the slower reference path runs on it"
    logging.getLogger(__name__).warning(message, device.upper(), reason)


def _empty_heads_last(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_empty(like.shape[0], rows, like.shape[1], columns).transpose(1, 2)


def _fake_hash(x, parameters, mask, num_hash, hash_code_len):  # noqa: ARG001
    dtype = torch.int16 if hash_code_len <= 15 else torch.int32
    return x.new_empty(x.shape[0], x.shape[1], num_hash, x.shape[2], dtype=dtype)


def _fake_attention(value, rows, by_row):
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    numbers = value.new_empty((*value.shape[:2], rows) if by_row else 0, dtype=dtype)
    return _empty_heads_last(value, rows, value.shape[3]), numbers


def _fake_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(_empty_heads_last(x, x.shape[2], x.shape[3]) for x in inputs)


def _fake_sampled(query, key, value, query_codes, key_codes, hash_code_len, expectation_backward, unit):  # noqa: ARG001
    return _fake_attention(value, query_codes.shape[3], unit)


def _fake_expectation(query, key, value, hash_code_len, exact_backward, unit):  # noqa: ARG001
    return _fake_attention(value, query.shape[2], unit)


# of two operators
def _fake_softmax(query, _key, value, *_):
    return _fake_attention(value, query.shape[2], True)


def _fake_softmax_backward(_grad, _out, _logarithm, query, key, value, *_):
    return _fake_gradients(query, key, value)


def _fake_remainder(query, _key, value, key_weight, *_):
    wide = value.new_empty(0, dtype=key_weight.dtype)
    out = wide.new_empty(value.shape[0], query.shape[2], value.shape[1], value.shape[3]).transpose(1, 2)
    return out, wide.new_empty(query.shape[:3])


def _fake_remainder_backward(_grad, _grad_total, query, key, value, key_weight, *_):
    return *_fake_gradients(query, key, value), torch.empty_like(key_weight)


def _fake_first_order_backward(_grad, _out, total, query, key, value, key_weight, *_):
    gradients = *_fake_gradients(query, key, value), torch.empty_like(key_weight)
    return *gradients, *_fake_remainder(query, key, value, total)


def _fake_local(_query, _key, value, *_):
    return _empty_heads_last(value, value.shape[2], value.shape[3])


# of three operators
def _fake_backward(_grad, query, key, value, *_):
    return _fake_gradients(query, key, value)


def _fake_unit_rows_backward(_grad, unit, _inverse_length):
    return _empty_heads_last(unit, unit.shape[2], unit.shape[3])


def _save(ctx, tensors, output):
    ctx.save_for_backward(*tensors, *(output if ctx.unit else ()))
    ctx.mark_non_differentiable(output[1])


def _saved(ctx, grad):
    """The gradient of the output before its rows were scaled, and the operator's tensors."""
    if not ctx.unit:
        return grad, ctx.saved_tensors
    *tensors, out, inverse_length = ctx.saved_tensors
    if out.dtype == torch.float16:
        # divided by a length, which may be tiny, it can be out of float16's range
        grad, out = grad.float(), out.float()
        tensors = [x.float() if x.is_floating_point() else x for x in tensors]
    return unit_rows_backward(grad, out, inverse_length), tensors


def _save_sampled(ctx, inputs, output):
    *tensors, ctx.hash_code_len, ctx.expectation_backward, ctx.unit = inputs
    _save(ctx, tensors, output)


def _sampled_gradients(ctx, grad, _):
    grad, (query, key, value, query_codes, key_codes) = _saved(ctx, grad)
    needs_rows = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    if needs_rows and not ctx.expectation_backward:
        gradients = sampled_attention_backward(grad, query, key, value, query_codes, key_codes, ctx.hash_code_len)
        return *gradients, None, None, None, None, None
    grad_query = grad_key = grad_value = None
    if ctx.needs_input_grad[2]:
        # the output is linear in value: its transpose adds up by query codes and reads by key codes
        grad_value, _ = sampled_attention(key, query, grad, key_codes, query_codes, ctx.hash_code_len, False, False)
    if needs_rows:
        # masked keys, which are in no bucket, must not come back through the exact sum
        outside = key_codes[:, :, 0, :, None] < 0
        key, value = key.masked_fill(outside, 0), value.masked_fill(outside, 0)
        grad_query, grad_key, _ = expectation_attention_backward(grad, query, key, value, ctx.hash_code_len, False)
    return grad_query, grad_key, grad_value, None, None, None, None, None


def _save_expectation(ctx, inputs, output):
    *tensors, ctx.hash_code_len, ctx.exact_backward, ctx.unit = inputs
    _save(ctx, tensors, output)


def _expectation_gradients(ctx, grad, _):
    grad, tensors = _saved(ctx, grad)
    gradients = expectation_attention_backward(grad, *tensors, ctx.hash_code_len, ctx.exact_backward)
    return *gradients, None, None, None


def _save_softmax(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _softmax_gradients(ctx, grad, _):
    gradients = softmax_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *gradients, None, None


def _save_remainder(ctx, inputs, output):  # noqa: ARG001
    *tensors, ctx.hash_code_len, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _remainder_gradients(ctx, grad, grad_total):
    gradients = sampled_remainder_backward(
        grad, grad_total.contiguous(), *ctx.saved_tensors, ctx.hash_code_len, ctx.scale
    )
    return *gradients, None, None, None, None, None


def _save_first_order(ctx, inputs, output):
    *tensors, _, _, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _first_order_gradients(ctx, grad, _):
    *gradients, remainder, remainder_total = first_order_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    # none of shift and heavy
    return *gradients, None, None, remainder, remainder_total, None


def _save_local(ctx, inputs, output):  # noqa: ARG001
    *tensors, ctx.hash_code_len, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _local_gradients(ctx, grad):
    gradients = local_attention_backward(grad, *ctx.saved_tensors, ctx.hash_code_len, ctx.window)
    return *gradients, None, None, None, None


def _refuse_second(ctx, *grads):  # noqa: ARG001
    raise NotImplementedError(
        "YOSO attention has first derivatives only: a loss must not depend on its gradients, as those of "
        "create_graph=True and torch.autograd.functional.hessian do"
    )


def _at_full_precision(definition: Callable) -> Callable:
    @functools.wraps(definition)
    def compute(*arguments):
        # autocast is still on in here, and would have float32 multiplied in 16 bits
        device = arguments[0].device.type
        if device != "cpu":
            _tell_of_missing_kernels(device)
        if not torch.is_autocast_enabled(device):
            return definition(*arguments)
        with torch.autocast(device, enabled=False):
            return definition(*arguments)

    return compute


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    fakes = {
        "hash_hadamard": _fake_hash,
        "hash_gaussian": _fake_hash,
        "sampled_attention": _fake_sampled,
        "sampled_attention_backward": _fake_backward,
        "expectation_attention": _fake_expectation,
        "expectation_attention_backward": _fake_backward,
        "softmax_attention": _fake_softmax,
        "softmax_attention_backward": _fake_softmax_backward,
        "sampled_remainder": _fake_remainder,
        "sampled_remainder_backward": _fake_remainder_backward,
        "first_order_attention": _fake_softmax,
        "first_order_attention_backward": _fake_first_order_backward,
        "local_attention": _fake_local,
        "local_attention_backward": _fake_backward,
        "unit_rows_backward": _fake_unit_rows_backward,
    }
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        # kernels of a backend take precedence over this key
        library.impl(name, _at_full_precision(DEFINITIONS[name]), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fakes[name], lib=library)
    gradients = {
        "sampled_attention": (_save_sampled, _sampled_gradients),
        "expectation_attention": (_save_expectation, _expectation_gradients),
        "softmax_attention": (_save_softmax, _softmax_gradients),
        "sampled_remainder": (_save_remainder, _remainder_gradients),
        "first_order_attention": (_save_first_order, _first_order_gradients),
        "local_attention": (_save_local, _local_gradients),
    }
    for name, (save, gradient) in gradients.items():
        torch.library.register_autograd(f"{NAMESPACE}::{name}", gradient, setup_context=save, lib=library)
    for name in (name for name in SCHEMAS if name.endswith("_backward")):
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _refuse_second, lib=library)
    return library


_load_extension()
# kept: the operators live as long as the library object
_library = _register()

operators = getattr(torch.ops, NAMESPACE)
hash_hadamard = operators.hash_hadamard.default
hash_gaussian = operators.hash_gaussian.default
sampled_attention = operators.sampled_attention.default
sampled_attention_backward = operators.sampled_attention_backward.default
expectation_attention = operators.expectation_attention.default
expectation_attention_backward = operators.expectation_attention_backward.default
softmax_attention = operators.softmax_attention.default
softmax_attention_backward = operators.softmax_attention_backward.default
sampled_remainder = operators.sampled_remainder.default
sampled_remainder_backward = operators.sampled_remainder_backward.default
first_order_attention = operators.first_order_attention.default
first_order_attention_backward = operators.first_order_attention_backward.default
local_attention = operators.local_attention.default
local_attention_backward = operators.local_attention_backward.default
unit_rows_backward = operators.unit_rows_backward.default
