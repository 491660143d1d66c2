"""attn_implementation="yoso": YOSO attention in the encoders of transformers.

Two functions are registered under each name: the attention, and the mask that it gets. With the first alone,
transformers would pass no mask, and padding would be attended to.
"""

import functools
import inspect
import re
import sys

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
from transformers.utils import logging

from .attention import attention_weights, exact_is_cheaper, yoso_attention
from .hashing import MAX_SEED, HashFunctions, check_integer, kept_hash_functions

logger = logging.get_logger(__name__)

# the arguments of a model's attention that change its weights, and that YOSO's weights cannot follow
UNSUPPORTED = ("position_bias", "head_mask")
# those that sdpa drops or refuses as well
UNSUPPORTED_BY_SDPA = ("s_aux", "sinks", "softcap")
# what masks in floating point add to the logarithm of a masked token's weight, at most
LARGEST_OF_MASKED = -1e3
# parameters of a layer that may attend to other tokens than its own
OTHER_TOKENS = {"key_value_states", "encoder_hidden_states", "cross_attention_states", "key", "keys"}

# the keys of a model's configuration that hold settings, and what they are where it does not have them
SETTINGS = {
    "yoso_num_hash": 64,
    "yoso_hash_code_len": 16,
    "yoso_normalization": "sum",
    "yoso_similarity": "softmax",
    "yoso_local_window": 0,
    "yoso_backward": "sampled",
    "yoso_use_expectation": "auto",
    "yoso_hash_seed": 0,
}


def has_settings(config: PretrainedConfig) -> bool:
    """Whether a configuration holds settings of YOSO attention."""
    return any(hasattr(config, name) for name in SETTINGS)


def read_settings(config: PretrainedConfig, exact: bool = False) -> dict:
    """The settings of a configuration, by the names of SETTINGS.

    Args:
        config: its keys replace those of SETTINGS.
        exact: take yoso_use_expectation for True.

    Raises:
        ValueError: a yoso_ key that does not exist.
    """
    # not by getattr, which takes a configuration some microseconds for each name
    asked = {name: value for name, value in vars(config).items() if name.startswith("yoso_")}
    unknown = [name for name in asked if name not in SETTINGS]
    if unknown:
        raise ValueError(f"the configuration has {', '.join(unknown)}, but YOSO's settings are {', '.join(SETTINGS)}")
    return SETTINGS | asked | ({"yoso_use_expectation": True} if exact else {})


def attention_settings(module: nn.Module, exact: bool = False) -> dict:
    """What a layer's configuration asks for.

    Args:
        module: an attention module with a `config`, whose keys replace the defaults, as in read_settings.
            yoso_hash_code_len may be one number, or a list of one list for every layer with a number for every head.
        exact: take yoso_use_expectation for True.

    Returns:
        The settings by the names of SETTINGS without yoso_; the layer's own hash_code_len.

    Raises:
        ValueError: a yoso_ key that does not exist; numbers by layer for a model whose layers are not numbered, or
            for another number of layers.
    """
    settings = {name.removeprefix("yoso_"): value for name, value in read_settings(module.config, exact).items()}
    if isinstance(settings["hash_code_len"], (list, tuple)):
        layer_idx = getattr(module, "layer_idx", None)
        if layer_idx is None:
            raise ValueError(
                "yoso_hash_code_len must be one number for this model, got a list: "
                f"{type(module).__name__} does not know which layer it is in"
            )
        settings["hash_code_len"] = _hash_code_len_of_layer(settings["hash_code_len"], layer_idx, module.config)
    return settings


def _hash_code_len_of_layer(by_layer: list[list[int]], layer_idx: int, config: PretrainedConfig) -> list[int]:
    layers = getattr(config, "num_hidden_layers", len(by_layer))
    if len(by_layer) != layers or layer_idx >= layers or not all(isinstance(x, (list, tuple)) for x in by_layer):
        raise ValueError(
            f"yoso_hash_code_len must be one number, or a list of {layers} lists, one for each layer, with a number "
            f"for every head, got {by_layer}"
        )
    return by_layer[layer_idx]


def is_delegated(module: nn.Module, query: Tensor, key: Tensor, **kwargs) -> bool:
    """Whether a layer's attention is another than that of all tokens to all tokens, and is left to sdpa.

    Args:
        module: the attention module.
        query: [B, H, N, D].
        key: [B, Hk, M, D].
        **kwargs: what else the model passes to its attention.

    Raises:
        ValueError: a causal layer outside an encoder-decoder model, or a sink.
    """
    _refuse(UNSUPPORTED_BY_SDPA, module, kwargs)
    # what is passed comes first, as with sdpa: decoders can be made to attend in both directions
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", False)
    if causal and not getattr(module.config, "is_encoder_decoder", False):
        raise ValueError(
            f'attn_implementation="yoso" needs an encoder, but {type(module).__name__} is causal: '
            "YOSO attends in both directions"
        )
    if causal or kwargs.get("sliding_window") is not None:
        return True
    return query.shape[2] != key.shape[2] or _may_cross(module)


def _may_cross(module: nn.Module) -> bool:
    """Whether a layer is a decoder's, or may attend to other tokens than its own and does not say whether it does."""
    # not by getattr, which is slow where a module has no such attribute
    if "Cross" in type(module).__name__ or vars(module).get("is_cross_attention"):
        return True
    if hasattr(module, "is_decoder"):
        return module.is_decoder
    return not OTHER_TOKENS.isdisjoint(inspect.signature(type(module).forward).parameters)


def _refuse(names: tuple[str, ...], module: nn.Module, kwargs: dict) -> None:
    for name in names:
        if kwargs.get(name) is not None:
            raise ValueError(f'attn_implementation="yoso" cannot use the {name} of {type(module).__name__}')


def key_mask_of(attention_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The mask of keys, bool [B, N], in an attention mask [B or 1, 1, 1, N], bool or added to softmax's logarithms.

    Raises:
        ValueError: a mask that differs by query or head, is of another size, or adds something to the weights of real
            tokens.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 4 or attention_mask.shape[1:3] != (1, 1):
        raise ValueError(
            'attn_implementation="yoso" needs an attention_mask of shape [B, N], 1 for a real token, got '
            f"{list(attention_mask.shape)}: it cannot mask single pairs of tokens"
        )
    key_mask = attention_mask.squeeze((1, 2))
    if key_mask.shape[0] == 1:
        key_mask = key_mask.expand(key.shape[0], -1)
    if key_mask.shape != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"attention_mask must have shape [B, N] = {[key.shape[0], key.shape[2]]}, got {list(key_mask.shape)}"
        )
    if not key_mask.is_floating_point():
        return key_mask
    # some models make their masks by themselves, to be added to softmax's weights (LayoutLM)
    real = key_mask == 0
    fits = (real | (key_mask <= LARGEST_OF_MASKED)).all()
    message = (
        f'attn_implementation="yoso" needs a floating-point attention_mask of 0 for real tokens and at most '
        f"{LARGEST_OF_MASKED} for others: it adds nothing else to weights"
    )
    can_ask = not (torch.compiler.is_compiling() or key_mask.is_meta)
    if key_mask.requires_grad or (can_ask and not fits):
        raise ValueError(message)
    if torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export():
        # a graph asks as it runs, but for one of ONNX, which has nothing to refuse by
        torch._assert_async(fits, message)
    return real


def yoso_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, Tensor | None]:
    """YOSO attention as transformers calls it, with the settings that the module's configuration asks for.

    Args:
        module: the attention module; its `config` may hold the keys of SETTINGS.
        query: [B, H, N, D].
        key: [B, Hk, N, D], Hk a divisor of H.
        value: [B, Hk, N, D].
        attention_mask: [B, 1, 1, N], bool, True for a real token, or floating point, 0 for a real token; None: all are
            real.
        **kwargs: what else the model passes. Dropout is not used, as YOSO has none; scaling is, by
            yoso_similarity="softmax".

    Returns:
        The output [B, N, H, D]; the weights [B, H, N, N] with output_attentions=True, else None.

    Raises:
        ValueError: a causal layer of a model without an encoder, a mask of pairs, a bias of positions, a setting out
            of range, output_attentions=True without yoso_use_expectation=True or in a layer that keeps its softmax.
    """
    return _attention(module, query, key, value, attention_mask, False, **kwargs)


def yoso_expectation_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, Tensor | None]:
    """The same with yoso_use_expectation=True: exact, and quadratic, at every length."""
    return _attention(module, query, key, value, attention_mask, True, **kwargs)


def _attention(module, query, key, value, attention_mask, exact, **kwargs) -> tuple[Tensor, Tensor | None]:
    if is_delegated(module, query, key, **kwargs):
        # a warning would break a compiled model's graph
        if not torch.compiler.is_compiling():
            logger.warning_once(
                f"Softmax remains where {type(module).__name__} is causal, has a sliding window, or may attend to "
                "other tokens than its own; YOSO computes the other layers, if there are any."
            )
        if kwargs.get("output_attentions"):
            # transformers would leave the layer out, and number those after it by its place
            raise ValueError(
                f"output_attentions=True needs YOSO in all layers, but {type(module).__name__} keeps its softmax, by "
                'a kernel that never forms its weights: attn_implementation="eager" forms those of all layers'
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    _refuse(UNSUPPORTED, module, kwargs)
    # not of a layer that keeps its softmax: a decoder may have more of them than the settings are for
    settings = attention_settings(module, exact)
    key_mask, scale = key_mask_of(attention_mask, key), kwargs.get("scaling")
    weights = None
    if kwargs.get("output_attentions"):
        if settings["use_expectation"] is not True:
            raise ValueError(
                'output_attentions=True needs attn_implementation="yoso_expectation" or yoso_use_expectation=True, '
                f"got yoso_use_expectation={settings['use_expectation']!r}: sampled attention never forms its weights"
            )
        kernel = {name: settings[name] for name in ("hash_code_len", "normalization", "similarity")}
        repeated = repeat_kv(key, query.shape[1] // key.shape[1])
        weights = attention_weights(query, repeated, key_mask, scale=scale, **kernel)
    return yoso_from_settings(module, query, key, value, key_mask, settings, scale), weights


def yoso_from_settings(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    settings: dict,
    scale: float | None,
) -> Tensor:
    """YOSO attention with the settings of attention_settings; shapes as for yoso_attention_forward."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    out = yoso_attention(
        query,
        key,
        value,
        key_mask,
        query_mask=key_mask,
        hash_code_len=settings["hash_code_len"],
        num_hash=settings["num_hash"],
        expectation=settings["use_expectation"],
        hash_functions=_hash_functions(module, query, key, settings),
        normalization=settings["normalization"],
        backward=settings["backward"],
        similarity=settings["similarity"],
        local_window=settings["local_window"],
        scale=scale if settings["similarity"] == "softmax" else None,
    )
    return out.transpose(1, 2).contiguous()


def _hash_functions(module: nn.Module, query: Tensor, key: Tensor, settings: dict) -> HashFunctions | None:
    seed, exact = settings["hash_seed"], settings["use_expectation"]
    check_integer("yoso_num_hash", settings["num_hash"], 1)
    if seed is not None:
        # also where nothing is sampled yet: a longer text may be
        check_integer("yoso_hash_seed", seed, 0, MAX_SEED)
    if exact == "auto":
        # no functions where none are used: a trace by torch.jit has no numbers to make them by
        sizes = (query.shape[2], key.shape[2], settings["num_hash"])
        exact = exact_is_cheaper(*sizes, settings["similarity"], query.device.type, query.dtype)
    if module.training or seed is None or exact:
        return None
    lengths = settings["hash_code_len"]
    longest = max(lengths) if isinstance(lengths, (list, tuple)) else lengths
    # layers that are not numbered share their hash functions
    layer_idx = getattr(module, "layer_idx", None) or 0
    return kept_hash_functions(query, seed, layer_idx, (query.shape[1], query.shape[3], settings["num_hash"], longest))


def make_mask(*, attention_mask: Tensor | None, mask_function, **kwargs) -> Tensor | None:
    """The mask that a layer's attention gets: bool [B, 1, 1, N], or sdpa's for a layer that is left to sdpa."""
    # without a skip the model goes on with the mask, to join it with another (T5Gemma 2)
    if mask_function is bidirectional_mask_function and kwargs.get("allow_is_bidirectional_skip"):
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must have shape [B, N], got {list(attention_mask.shape)}")
        return None if attention_mask is None else attention_mask[:, None, None, :]
    # not every decoder's layer says that it is causal, which sdpa relies on without a mask (NLLB-MoE)
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, **kwargs)


IMPLEMENTATIONS = {
    "yoso": yoso_attention_forward,
    "yoso_expectation": yoso_expectation_attention_forward,
}


@functools.cache
def takes_attention(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model looks its attention up by name, in all parts of it as far as its source shows.

    And that of the models that it derives from; of a class that was typed in, there is none.
    """
    found = False
    for base in model_class.__mro__:
        if not issubclass(base, PreTrainedModel) or base is PreTrainedModel:
            continue
        try:
            source = inspect.getsource(sys.modules.get(base.__module__))
        except (OSError, TypeError):
            continue
        if not base._can_set_attn_implementation() or not _looks_up_attention(source):
            return False
        found = True
    return found


def _looks_up_attention(source: str) -> bool:
    # classes by name, of which none is YOSO's (SAM); an attribute that there never is (KOSMOS-2.5); models of timm,
    # other than its backbones, which are parts of models that do (DETR)
    if re.search(
        r"_CLASSES\[(self\.)?config\._attn_implementation\]|getattr\(\s*ALL_ATTENTION_FUNCTIONS|self\.timm_model\b",
        source,
    ):
        return False
    # transformers looks for one layer that does; another of the same model may have a softmax of its own. That of
    # deformable attention is of a few points of another picture, that of poolings and maps no layer's, and attention
    # to something else keeps softmax anyway
    layers = re.split(r"^class ", source, flags=re.MULTILINE)
    return not any(
        re.match(r"(?!\w*(Deformable|Cross))\w*Attention\(nn\.Module\)", layer)
        and re.search(r"softmax\(|\bMultiheadAttention\(", layer)
        and "get_interface(" not in layer
        for layer in layers
    )


def register_attention() -> None:
    """Makes the names of IMPLEMENTATIONS known to transformers, and has models that would ignore them refuse them."""
    for name, function in IMPLEMENTATIONS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)

    check = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, "refuses_yoso"):
        return

    @functools.wraps(check)
    def check_and_refuse(self, requested_attention, *args, **kwargs):
        # transformers takes a registered name for every model, also for those that never look it up
        if requested_attention in IMPLEMENTATIONS and not takes_attention(type(self)):
            reason = "its attention is not, or not all, written for transformers' attention interface"
            if getattr(type(self).config_class, "model_type", None) == "yoso":
                reason = "its attention is YOSO already, by use_expectation and the other keys of its configuration"
            raise ValueError(
                f'{type(self).__name__} does not take attn_implementation="{requested_attention}": {reason}'
            )
        attention = check(self, requested_attention, *args, **kwargs)
        if not str(attention).startswith("yoso") and has_settings(self.config):
            # transformers saves the settings with a model, but not which attention it had
            logger.warning_once(
                f"The configuration of {type(self).__name__} holds settings of YOSO (yoso_...), which the attention "
                f'{attention!r} does not use: give attn_implementation="yoso" again where the model is loaded.'
            )
        return attention

    check_and_refuse.refuses_yoso = True
    PreTrainedModel.get_correct_attn_implementation = check_and_refuse
