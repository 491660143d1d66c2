"""Fitting the hash_code_len of YOSO's cosine similarity, head by head, to a model that was trained with softmax."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_interface import (
    attention_settings,
    is_delegated,
    key_mask_of,
    make_mask,
    takes_attention,
    yoso_from_settings,
)
from .hashing import MAX_EXACT_HASH_CODE_LEN, MAX_HASH_CODE_LEN

NAME = "yoso_fitting"

# Candidates take so many times the samples of the model: less noise than it will have, as what follows averages noise
# over tokens and heads, but not what all of them are wrong by.
SAMPLES_FACTOR = 4


@dataclass
class HashCodeLenFit:
    """What fit_hash_code_len found.

    Args:
        hash_code_len: tau by layer and head, as yoso_hash_code_len and YosoConfig.hash_code_len take it.
        error: what is left, by layer and head: the squared difference of YOSO's and softmax's outputs, over the
            square of softmax's; 0 for a layer that YOSO does not compute, and for a head without output.
    """

    hash_code_len: list[list[int]]
    error: list[list[float]]


@dataclass
class _Errors:
    """An attention function that returns softmax attention, and sums YOSO's errors by layer, candidate and head."""

    # the attention of every configuration in the model, by its id
    names: dict[int, str]
    errors: dict[int, Tensor] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)
    # numbers of layers that are left to sdpa, by the id of their configuration
    delegated: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    # the configurations of the layers that are not
    fitted: set[int] = field(default_factory=set)

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ValueError(f"model must number its layers, but {type(module).__name__} has no layer_idx")
        exact = self.names.get(id(module.config)) == "yoso_expectation"
        if is_delegated(module, query, key, **kwargs):
            # a decoder may have more layers than its encoder, whose numbers these are
            if layer < getattr(module.config, "num_hidden_layers", layer + 1):
                length = attention_settings(module, exact)["hash_code_len"]
                heads = [length] * query.shape[1] if isinstance(length, int) else length
                self.delegated.setdefault(id(module.config), {})[layer] = heads
            return out, None
        self.fitted.add(id(module.config))
        settings = attention_settings(module, exact)
        if settings["similarity"] == "softmax":
            raise ValueError(
                'nothing to fit: with yoso_similarity "softmax", hash_code_len does not change what the attention '
                'comes close to; set yoso_similarity="cosine" to fit'
            )
        key_mask = key_mask_of(attention_mask, key)
        real = 1 if key_mask is None else key_mask[:, :, None, None]
        self._add(self.squares, layer, (out * real).square().sum((0, 1, 3)))
        # of "auto" the samples, which are the harder to bring close
        settings["use_expectation"] = settings["use_expectation"] is True
        settings["num_hash"] *= SAMPLES_FACTOR
        errors = []
        for candidate in candidates(settings["use_expectation"]):
            settings["hash_code_len"] = [candidate] * query.shape[1]
            approximation = yoso_from_settings(module, query, key, value, key_mask, settings, scale=None)
            errors.append(((approximation - out) * real).square().sum((0, 1, 3)))
        self._add(self.errors, layer, torch.stack(errors))
        return out, None

    @staticmethod
    def _add(sums: dict[int, Tensor], layer: int, what: Tensor) -> None:
        # some devices have no float64
        what = what.cpu().double()
        sums[layer] = sums[layer] + what if layer in sums else what


def candidates(use_expectation: bool) -> range:
    """The values of hash_code_len that are tried."""
    return range(1, 1 + (MAX_EXACT_HASH_CODE_LEN if use_expectation else MAX_HASH_CODE_LEN))


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations of a model and of its parts."""
    waiting, found = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)], {}
    while waiting:
        config = waiting.pop()
        found[id(config)] = config
        waiting += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return list(found.values())


def _let_parts_change(configs: list[PreTrainedConfig]) -> None:
    # set_attn_implementation of Transformers 5.17 leaves this mark on the parts of parts, and then passes them over
    for config in configs:
        vars(config).pop("_attn_was_changed", None)


@torch.no_grad()
def fit_hash_code_len(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> HashCodeLenFit:
    """Chooses for each head the hash_code_len whose attention comes closest to softmax's, on sample inputs.

    This is for yoso_similarity="cosine", where hash_code_len is the power of the weights. With "softmax" it only
    trades the noise of samples for time.

    Every layer gets softmax's inputs. The attention that is compared is the one that the model would have with
    attn_implementation="yoso", or has with "yoso_expectation": the keys yoso_<name> of its configuration,
    yoso_hash_code_len excepted, decide its samples, so that where sampling is noisy, shorter codes are chosen, which
    collide more often. Noise counts for a quarter, as later layers average it out. With yoso_use_expectation "auto" it
    is the attention of long inputs, which samples. Take inputs of the lengths that the model is meant for.

    Args:
        model: an encoder that takes attn_implementation="yoso", trained with softmax attention, whose configuration
            has yoso_similarity="cosine". Its attention implementation is put back at the end; its configuration is
            not changed.
        batches: inputs of the model, such as a tokenizer returns, on its device.

    Returns:
        The numbers of every layer and head, and the error that is left.

    Raises:
        ValueError: no inputs, or other things than a model's inputs; a model that does not take YOSO or does not
            number its layers; or nothing to fit, as yoso_similarity is "softmax", which it is by default.
    """
    if not takes_attention(type(model)):
        raise ValueError(f"model must take another attn_implementation, got a {type(model).__name__}, which does not")
    configs, training = _configs(model), [module for module in model.modules() if module.training]
    before = {id(config): config._attn_implementation for config in configs}
    sums = _Errors(names=before)
    ALL_ATTENTION_FUNCTIONS[NAME] = sums
    try:
        _let_parts_change(configs)
        model.set_attn_implementation(NAME)
        model.eval()
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise ValueError(
                    "batches must be a list of a model's inputs, such as a tokenizer returns, "
                    f"but it holds a {type(batch).__name__}"
                )
            model(**batch)
    finally:
        for config in configs:
            # the attribute without _internal is that of a configuration's parts as well
            config._attn_implementation_internal = before[id(config)]
        _let_parts_change(configs)
        for module in training:
            module.training = True
        del ALL_ATTENTION_FUNCTIONS[NAME]
    if not sums.errors:
        raise ValueError("batches must hold inputs that a layer of full attention sees, got none")
    lengths = {}
    # a decoder with a configuration of its own has none of these layers
    for config, heads_of_layers in sums.delegated.items():
        if config in sums.fitted:
            lengths |= heads_of_layers
    error = {layer: [0.0] * len(heads) for layer, heads in lengths.items()}
    for layer, errors in sums.errors.items():
        best, index = errors.min(0)
        lengths[layer] = [1 + i for i in index.tolist()]
        squares = sums.squares[layer]
        error[layer] = torch.where(squares > 0, best / squares, 0).tolist()
    layers = sorted(lengths)
    return HashCodeLenFit([lengths[layer] for layer in layers], [error[layer] for layer in layers])


AttentionMaskInterface.register(NAME, make_mask)
