"""attn_implementation="yoso_expectation" in every model type of transformers, small and with random weights.

Every call of an attention is compared with a dense one written here, which finds out by itself, from what queries,
keys and masks are made of, whether YOSO is to compute it. A model type ends as

- replaced: all attention of a text's tokens to each other is YOSO's, all other softmax's, which is warned of;
- left alone: all is softmax's, with a warning;
- refused: with an error that says so, and for a reason that the dense attention has found as well;
- no attention: none at all, so that nothing is computed otherwise than was asked for;
- not built: its defaults cannot be made small here, or need another package. How many may be is bounded.
"""

import contextlib
import importlib
import inspect
import math
import re
import sys
from collections import Counter

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask
from transformers.models.auto import modeling_auto

from yoso_hf import attention_interface

pytestmark = pytest.mark.slow

MODEL_TYPES = sorted(set(CONFIG_MAPPING.keys()))
MODELS_WITH_HEADS = (
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
)
LENGTH = 16
MAX_PARAMETERS = 3e7
# of all model types; 0.31 and 0.20 of 719 with transformers 5.17 and of 804 with 5.23
MOST_NOT_BUILT = 0.33
LEAST_REPLACED = 0.19

# what becomes of a number in a configuration whose key matches, where it is larger
LARGEST = (
    (r"type_vocab_size", 2),
    (r"\w*vocab_size\w*|n_words|num_embeddings|codebook_size", 128),
    (r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|mlp_dim|linear_units|dim_feedforward)", 128),
    (r"\w*(num_experts|num_local_experts|n_routed_experts)", 4),
    (r"\w*(experts_per_tok|experts_per_token|moe_topk|moe_k)", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"\w*max_position_embeddings|max_(source|target)_positions|n_positions|n_ctx|max_seq_len|seq_len", 512),
    (r"max_length", 64),
    # half of it at least as long as the padding: no query sees padding only
    (r"sliding_window|attention_window|local_attention", 10),
    (r"num_queries|num_query_tokens", 10),
)
LAYERS = r"(?!num_feat_extract)\w*(num_hidden_layers|_layers|n_layer|depth|num_blocks)|layers"
LAYERS_OF_STAGES = r"depths|\w*num_blocks|blocks_per_stage|stage_numb_of_layers|num_block_repeats"
HEADS = r"(?!mamba|linear|index)\w*(num_attention_heads|attention_heads|num_heads|n_head|n_heads)"
KEY_HEADS = r"\w*num_key_value_heads|num_kv_heads"
WIDTHS = r"\w*(hidden_size|d_model|hidden_dim|embed_dim|emb_dim|embedding_size|projection_dim|n_embd)|dim|width"
WIDTH = 256

# arguments of an attention that change none of its weights, or are in its mask already
HARMLESS = {
    "dropout", "scaling", "is_causal", "sliding_window", "output_attentions", "output_hidden_states", "return_dict",
    "use_cache", "position_ids", "input_ids", "deterministic", "grid_thw", "indices", "output_router_logits",
    "vision_feature_select_strategy", "logits_to_keep",
}  # fmt: skip
BIASES = {"position_bias", "softcap", "s_aux", "sinks"}

# refused although this test sees no reason
REFUSED = {
    # the part of a model that uses the interface beside one that does not
    "bridgetower_text_model", "clap_text_model", "git_vision_model", "granite_speech", "granite_speech_plus",
    "got_ocr2",
    # the part without attention of a model that does not use it
    "wavtokenizer_encoder",
    # attention without softmax, or of rectangles only
    "mra", "reformer", "rwkv", "yoso", "patchtsmixer", "swiftformer", "cvt", "longformer", "gemma4_audio",
    # says of itself that it is causal, and masks as an encoder, or as it is told
    "phi4_multimodal_vision", "blt_global_transformer",
    # one number stands for the windows of all its layers once it is made small
    "neomme",
}  # fmt: skip
OUTSIDE = {
    # softmax that is no attention, and one that is thrown away
    "SuperPointInterestPointDecoder", "Sam2MultiScaleAttention",
    # of a backbone, to which transformers does not hand the name down
    "MaskFormerSwinSelfAttention",
}  # fmt: skip


class NotBuilt(Exception):
    pass


def shrink(config, narrow):
    """Makes a configuration small: a layer of every kind, few tokens and experts; if narrow, two heads of 128."""
    stages = any(re.fullmatch(LAYERS_OF_STAGES, name) and not isinstance(x, int) for name, x in vars(config).items())
    layers = 0 if stages else getattr(config, "num_hidden_layers", 0) or 0
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    kept = sorted(first.values()) if len(first) > 1 else list(range(min(layers, 2)))
    heads = getattr(config, "num_attention_heads", None)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            if value.model_type == "timm_backbone":
                value = transformers.ResNetConfig(out_indices=[1, 2, 3, 4])
            shrink(value, narrow)
        elif value is None and name in ("vocab_size", "pad_token_id"):
            value = {"vocab_size": 128, "pad_token_id": 0}[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            value = smaller(name, value, narrow, stages, heads)
        elif isinstance(value, (list, tuple)) and value:
            if re.fullmatch(LAYERS_OF_STAGES, name):
                value = [1] * len(value)
            elif name == "image_size":
                value = [min(x, 224 if stages else 64) for x in value]
            elif layers and name == "stage_names" and len(value) == layers + 1:
                value = value[: len(kept) + 1]
                config._out_features, config._out_indices = value[-1:], [len(kept)]
            elif layers and re.fullmatch(r"(?!_out)\w*(indexes|indices)", name):
                value = [1]
            elif layers and len(value) == layers:
                value = [value[i] for i in kept]
        setattr(config, name, value)
    if layers:
        config.num_hidden_layers = len(kept)
    if isinstance(getattr(config, "image_size", None), int):
        patch = getattr(config, "patch_size", 16)
        patch = patch if isinstance(patch, int) else 16
        config.image_size = min(config.image_size, 224) if stages else patch * max(2, 64 // patch)
    # the whole gradient, which a dense attention has
    config.yoso_backward = "exact"


def smaller(name, value, narrow, stages, heads):
    if re.fullmatch(r"\w*(token_id|token_index|token)", name):
        return value if value < 128 else 100 + value % 20
    for pattern, largest in LARGEST:
        if re.fullmatch(pattern, name):
            return min(value, largest)
    if re.fullmatch(LAYERS, name) and not stages:
        return min(value, 2)
    if narrow and re.fullmatch(HEADS, name):
        return min(value, 2)
    if narrow and re.fullmatch(KEY_HEADS, name):
        return min(value, 2 if value == heads else 1)
    if narrow and re.fullmatch(WIDTHS, name):
        return min(value, WIDTH)
    return value


def classes_of(config_class):
    """The class that AutoModel takes, and one with a head; or the first of the module made for the configuration."""
    if config_class in modeling_auto.MODEL_MAPPING:
        mappings = [modeling_auto.MODEL_MAPPING, *(x for x in MODELS_WITH_HEADS if config_class in x)][:2]
        try:
            found = [mapping[config_class] for mapping in mappings]
        # a mapping may name a class that there is not (Voxtral Realtime)
        except ValueError as error:
            raise NotBuilt(str(error)) from None
        return [x[0] if isinstance(x, (list, tuple)) else x for x in found]
    try:
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError as error:
        raise NotBuilt(str(error)) from None
    models = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, PreTrainedModel)]
    made = [x for x in models if x.config_class is config_class and not x.__name__.endswith("PreTrainedModel")]
    if not made:
        raise NotBuilt(f"no model of {config_class.__name__}")
    return made[:1]


def build(model_class, config_class, narrow, attention):
    config = config_class()
    shrink(config, narrow)
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # initial weights may be so small that all attention is uniform, and some are not even numbers
            if parameter.dim() > 1 and parameter.numel():
                parameter.normal_(std=(parameter.numel() / len(parameter)) ** -0.5)
            else:
                parameter.nan_to_num_()
    return model


def find(config, *names):
    """The first value that a configuration, or one in it, has under one of the names."""
    nested = [x for x in vars(config).values() if isinstance(x, PreTrainedConfig)]
    found = (getattr(owner, name, None) for name in names for owner in (config, *nested))
    return next((x for x in found if x is not None), None)


def inputs_of(model):
    """Sets of inputs, of which the model should take one: two rows each, a quarter of the second is padding."""
    config = model.config
    parameters = inspect.signature(model.forward).parameters
    given = set(parameters)
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def ids(length=LENGTH):
        return torch.randint(5, 30, (2, length), generator=generator)

    def mask(length):
        return (torch.arange(length) < torch.tensor([[length], [length - length // 4]])).long()

    def one(name, default):
        value = find(config, *name.split())
        value = value[0] if isinstance(value, (list, tuple)) else value
        return value if isinstance(value, int) else default

    width, positions = one("hidden_size d_model", 64), one("max_source_positions max_length", 64)
    size, patch = one("image_size", 64), one("patch_size", 16)
    channels, frames = one("num_channels in_channels in_chans", 3), one("num_frames frames_per_clip", 2)
    mels = one("num_mel_bins feature_size n_mels feature_projection_input_dim input_dim mel_dim", 80)

    text = {name: ids() for name in {"input_ids", "qformer_input_ids"} & given}
    text |= {name: normal(2, LENGTH, width) for name in {"inputs_embeds", "query_embeds", "hidden_states"} & required}
    text |= {name: mask(LENGTH) for name in {"attention_mask"} & given if text}
    text |= {name: torch.tensor([1, 2, 30, 40]).expand(2, LENGTH, 4) for name in {"bbox"} & given}
    # as many as the encoder has, so that attention to those is not told by its shape
    decoded = {name: ids() for name in {"decoder_input_ids"} & given}

    # images, films, patches with a mask or with a grid; sounds and their spectra
    grid = {"grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    patches = normal(32, channels * one("temporal_patch_size", 1) * patch**2)
    packed = {"pixel_attention_mask": mask(16), "spatial_shapes": torch.tensor([[4, 4], [3, 4]])}
    masks = {"attention_mask", "padding_mask", "input_features_mask"} & given
    other = [
        {"pixel_values": normal(2, channels, size, size)},
        {"pixel_values": normal(2, frames, channels, size, size)},
        {"pixel_values_videos": normal(2, frames, channels, size, size)},
        {"pixel_values": normal(2, 16, channels * patch**2), **packed},
        {"hidden_states": patches, **grid},
        {"pixel_values": patches, **grid},
        {"input_values": normal(2, 4000), **dict.fromkeys(masks, mask(4000))},
        {"input_values": normal(2, 1, 4000), **dict.fromkeys(masks, mask(4000))},
        {"input_values": normal(2, positions, mels)},
        {"input_features": normal(2, 64, mels), **dict.fromkeys(masks, mask(64))},
        {"input_features": normal(2, mels, 64), **dict.fromkeys(masks, mask(64))},
        {"input_features": normal(2, mels, 2 * positions), **dict.fromkeys(masks, mask(2 * positions))},
        {"past_values": normal(2, one("context_length", 32), one("num_input_channels", 1))},
    ]
    other = [x for x in other if set(x) <= given]
    sets = [*(text | decoded | x for x in other), text | decoded, *(decoded | x for x in other)]
    sets += [{name: x for name, x in one.items() if name not in masks} for one in sets]
    return [x for x in sets if x and required <= set(x)]


def outputs_of(model, inputs):
    torch.manual_seed(1)
    return dict(tensors_in(model(**inputs)))


def tensors_in(output, name="output"):
    if torch.is_tensor(output):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from tensors_in(value, f"{name}.{key}")
    elif isinstance(output, (list, tuple)):
        for i, value in enumerate(output):
            yield from tensors_in(value, f"{name}[{i}]")


class Outside(TorchFunctionMode):
    """Notes where a model computes attention of tokens to each other without the interface."""

    def __init__(self):
        super().__init__()
        self.found = set()
        self.paused = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if not self.paused:
            if name == "softmax":
                scores = args[0] if args else kwargs["input"]
                square = scores.dim() > 2 and scores.shape[-1] == scores.shape[-2]
            elif name == "scaled_dot_product_attention":
                square = args[0].shape[-2] == args[1].shape[-2]
            else:
                square = name == "multi_head_attention_forward" and args[0].shape[0] == args[1].shape[0]
            if square:
                frame = sys._getframe(1)
                while not isinstance(frame.f_locals.get("self"), torch.nn.Module):
                    frame = frame.f_back
                self.found.add(type(frame.f_locals["self"]).__name__)
        return function(*args, **(kwargs or {}))


class Oracle:
    """A dense softmax attention of float64, and what it finds about each call."""

    def __init__(self, model):
        self.outside = Outside()
        self.states = {}
        for module in model.modules():
            module.register_forward_pre_hook(self._keep_states, with_kwargs=True)
        self.clear()

    def clear(self):
        self.names, self.reasons, self.may_cross, self.outputs = [], [], [], []
        self.unknown = set()
        self.states.clear()
        self.outside.found.clear()

    def _keep_states(self, module, args, kwargs):
        given = (x for x in (*args, *kwargs.values()) if torch.is_tensor(x) and x.is_floating_point() and x.dim() > 1)
        states = self.states[module] = next(given, None)
        if states is not None and not states.requires_grad and torch.is_grad_enabled():
            states.requires_grad_()

    def _own_tokens(self, module, query, key):
        """Whether queries and keys are made of the same tokens, by their gradients."""
        if query.shape[2] != key.shape[2]:
            return False
        states = self.states[module]
        made = [torch.autograd.grad(x.sum(), states, retain_graph=True, allow_unused=True)[0] for x in (query, key)]
        return all(x is not None for x in made)

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        self.outside.paused = True
        self.unknown |= {name for name, x in kwargs.items() if x is not None} - HARMLESS - BIASES
        reasons = {name for name in BIASES if kwargs.get(name) is not None}
        bias = torch.zeros(1, 1, query.shape[2], key.shape[2], dtype=torch.float64)
        if attention_mask is not None:
            if attention_mask.dtype == torch.bool:
                bias = bias.masked_fill(~attention_mask, -math.inf)
            else:
                hidden = attention_mask < -1000
                bias = bias + attention_mask.double().masked_fill(hidden, -math.inf)
        seen = bias != -math.inf
        reasons |= {"weights in the mask"} if bias[seen].any() else set()
        if not torch.equal(seen, seen[:, :1, :1].expand_as(seen)):
            reasons.add("pairs" if seen.triu(1).any() else "causal")
        reasons |= {"window"} if kwargs.get("sliding_window") is not None else set()
        reasons |= set() if self._own_tokens(module, query, key) else {"other tokens"}

        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        scores = query.double() @ key.double().mT * (kwargs.get("scaling") or query.shape[-1] ** -0.5)
        if kwargs.get("position_bias") is not None:
            scores = scores + kwargs["position_bias"]
        # rows that see nothing are even in eager, as there no number is infinite
        weights = (scores + bias.clamp(min=-1e300)).softmax(-1)
        out = (weights @ value.double()).to(value.dtype).transpose(1, 2).contiguous()
        self.names.append(type(module).__name__)
        self.reasons.append(reasons)
        parameters = inspect.signature(type(module).forward).parameters
        self.may_cross.append(any(re.match(r"key|encoder_hidden|cross", name) for name in parameters))
        self.outputs.append(out)
        self.outside.paused = False
        return out, None


class Recorder:
    """Calls the implementation, and notes of every call what it returned and whether it was YOSO."""

    def __init__(self, monkeypatch):
        self.outputs, self.yoso, self.warnings = [], [], []
        compute = attention_interface.yoso_from_settings

        def yoso_from_settings(*args):
            self.yoso[-1] = True
            return compute(*args)

        monkeypatch.setattr(attention_interface, "yoso_from_settings", yoso_from_settings)
        monkeypatch.setattr(attention_interface.logger, "warning_once", self.warnings.append)

    def __call__(self, *args, **kwargs):
        self.yoso.append(False)
        out, weights = attention_interface.yoso_expectation_attention_forward(*args, **kwargs)
        self.outputs.append(out)
        return out, weights


def register(monkeypatch, name, attention, mask):
    monkeypatch.setitem(AttentionInterface._global_mapping, name, attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, mask)


def mask_of_pairs(**kwargs):
    return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def build_with_oracle(model_class, config_class, monkeypatch):
    """A model whose attention is the oracle's, that oracle, inputs that the model takes, whether it is narrow, and
    what it computed.
    """
    failures = []
    for narrow in (True, False):
        try:
            register(monkeypatch, "dense_yoso", None, mask_of_pairs)
            config = config_class()
            shrink(config, narrow)
            with torch.device("meta"), no_init_weights():
                parameters = sum(x.numel() for x in model_class(config).parameters())
            if parameters > MAX_PARAMETERS:
                raise ValueError(f"{parameters} parameters")
            model = build(model_class, config_class, narrow, "dense_yoso")
        except Exception as error:
            if str(error) == "'dense_yoso'":
                raise
            failures.append(error)
            continue
        oracle = Oracle(model)
        register(monkeypatch, "dense_yoso", oracle, mask_of_pairs)
        for inputs in inputs_of(model):
            oracle.clear()
            try:
                with oracle.outside:
                    return model, oracle, inputs, narrow, outputs_of(model, inputs)
            except Exception as error:
                failures.append(error)
    messages = dict.fromkeys(f"{type(x).__name__}: {x}".split("\n")[0] for x in failures)
    raise NotBuilt("; ".join(messages) or "no inputs")


def assert_close(result, expected, name):
    """The largest difference, as a part of the largest value: one wrong weight is far more than rounding."""
    assert result.shape == expected.shape, name
    if expected.numel():
        assert torch.equal(result.isfinite(), expected.isfinite()), f"{name} is not finite"
        difference, scale = (result - expected).nan_to_num().abs().max(), expected.nan_to_num().abs().max()
        assert difference <= 0.01 * scale, f"{name}: {difference:.3g} of {scale:.3g}"


def outcome_of(model_class, config_class, monkeypatch):
    try:
        model, oracle, inputs, narrow, softmax = build_with_oracle(model_class, config_class, monkeypatch)
    except KeyError:
        # it looks names up among its own
        with pytest.raises(ValueError, match='does not take attn_implementation="yoso'):
            build(model_class, config_class, True, "yoso_expectation")
        return "refused"
    reasons, outside = list(oracle.reasons), set(oracle.outside.found)
    assert not oracle.unknown, f"arguments of an attention that this test does not know: {oracle.unknown}"

    recorder = Recorder(monkeypatch)
    register(monkeypatch, "yoso_expectation", recorder, attention_interface.make_mask)
    try:
        yoso_model = build(model_class, config_class, narrow, "yoso_expectation")
        result = outputs_of(yoso_model, inputs)
    except ValueError as error:
        if 'attn_implementation="yoso' not in str(error):
            raise
        known = config_class.model_type in REFUSED
        hopeless = any(x & (BIASES | {"causal", "weights in the mask"}) or x == {"pairs"} for x in reasons)
        assert outside or hopeless or known, f"refused for nothing: {error}"
        return "refused"
    assert outside <= OUTSIDE, f"ignored by {outside - OUTSIDE}"

    # else what is compared below would say nothing about the model
    for name, expected in outputs_of(build(model_class, config_class, narrow, "eager"), inputs).items():
        assert_close(softmax[name], expected, f"softmax's {name}")

    calls = list(zip(oracle.names, recorder.yoso, reasons, oracle.may_cross, strict=True))
    for i, (name, yoso, reason, may_cross) in enumerate(calls):
        assert not (yoso and reason), f"{name}, call {i}, is YOSO in spite of {reason}"
        assert yoso or reason or may_cross, f"{name}, call {i}, is softmax for no reason"
    assert recorder.warnings or all(recorder.yoso)

    for i, (out, expected) in enumerate(zip(recorder.outputs, oracle.outputs, strict=True)):
        assert_close(out, expected, f"{oracle.names[i]}, call {i}")
    assert result.keys() == softmax.keys()
    for name, expected in softmax.items():
        assert_close(result[name], expected, name)
    if not any(recorder.yoso):
        return "left alone" if recorder.yoso else "no attention"
    compare_gradients(yoso_model, result, model, softmax)
    return "replaced"


def compare_gradients(model, outputs, expected_model, expected_outputs):
    """Of every parameter; where two vectors point the same way the whole gradient has no bound, and is only finite."""
    for computed in (outputs, expected_outputs):
        # every number counts differently: layer norms have a constant sum and a constant length
        sum(x.flatten() @ torch.arange(x.numel()).cos() for x in computed.values() if x.requires_grad).backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    expected = {name: x.grad for name, x in expected_model.named_parameters() if x.grad is not None}
    assert found.keys() == expected.keys()
    assert all(x.isfinite().all() for x in found.values())
    # biases of keys have none in softmax, but rounding
    largest = max(x.abs().max() for x in expected.values() if x.numel())
    for name, gradient in expected.items() if largest < 1e6 else ():
        if gradient.numel():
            difference, scale = (found[name] - gradient).abs().max(), gradient.abs().max()
            assert difference <= 0.05 * scale + 1e-5 * largest, f"gradient of {name}: {difference:.3g} of {scale:.3g}"


OUTCOMES = {}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_attention_is_yoso_or_softmax_as_documented(model_type, monkeypatch):
    OUTCOMES[model_type] = "failed"
    config_class = CONFIG_MAPPING[model_type]
    try:
        base, *heads = classes_of(config_class)
        with monkeypatch.context() as patches:
            outcome = outcome_of(base, config_class, patches)
    except NotBuilt as error:
        OUTCOMES[model_type] = "not built"
        pytest.skip(str(error)[:300])
    for head in heads if outcome != "refused" else ():
        with monkeypatch.context() as patches, contextlib.suppress(NotBuilt):
            assert outcome_of(head, config_class, patches) == outcome
    OUTCOMES[model_type] = outcome


def test_most_model_types_are_covered():
    if set(OUTCOMES) != set(MODEL_TYPES):
        pytest.skip("only when all of them ran")
    counts = Counter(OUTCOMES.values())
    assert counts["not built"] <= MOST_NOT_BUILT * len(MODEL_TYPES), counts
    assert counts["replaced"] >= LEAST_REPLACED * len(MODEL_TYPES), counts
