"""The YOSO encoder and its heads.

Parameter names and shapes are those of transformers' own Yoso classes, so that checkpoints go both ways.
Shapes below use B for the batch, N for the tokens of a sequence, H for the heads and D for the width of one.
"""

import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.pytorch_utils import apply_chunking_to_forward
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import attention_weights, exact_is_cheaper, is_exporting, yoso_attention
from .configuration_yoso import YosoConfig
from .hashing import MAX_SEED, HashFunctions, check_integer, kept_hash_functions
from .reference import less_masked, real_rows

# the first two rows of the position table stand for no position, as in RoBERTa
POSITION_OFFSET = 2
IGNORED_LABEL = -100
# from this many tokens of a batch on, activations are computed again in the backward: they are a quarter of what a
# layer would keep for it, and take little time
RECOMPUTED_TOKENS = 4096
# where a product with the vocabulary is several times slower in 16 bits unless rows of logits fill units of 16 bytes;
# padded ones fill the tiles of the product as well
PADDED_DEVICES = ("cuda",)
ALIGNED_LOGITS, PADDED_LOGITS = 8, 64
# the float32 copy that the loss makes of some rows of logits at a time
LOSS_CHUNK_BYTES = 2**28
# what of the code that is saved with a model each Auto class loads
AUTO_MAP = {
    "AutoConfig": "configuration_yoso.YosoConfig",
    "AutoModel": "modeling_yoso.YosoModel",
    "AutoModelForMaskedLM": "modeling_yoso.YosoForMaskedLM",
    "AutoModelForMultipleChoice": "modeling_yoso.YosoForMultipleChoice",
    "AutoModelForQuestionAnswering": "modeling_yoso.YosoForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_yoso.YosoForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_yoso.YosoForTokenClassification",
}


class YosoEmbeddings(nn.Module):
    """The normalised sum of token, position and token type embeddings."""

    def __init__(self, config: YosoConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings + POSITION_OFFSET, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, word_embeddings: Tensor, position_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = self.position_embeddings(position_ids)
        token_types = self.token_type_embeddings(token_type_ids)
        # accelerate may place the tables on different devices
        device = word_embeddings.device
        embeddings = word_embeddings + positions.to(device) + token_types.to(device)
        return self.dropout(self.LayerNorm(embeddings))


class YosoSelfAttention(nn.Module):
    """Multi-head YOSO attention, with the convolution of YOSO-C where the configuration asks for it.

    Its other settings are read from the configuration at each call.
    """

    def __init__(self, config: YosoConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads

        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.conv = None
        if config.conv_window is not None:
            self.conv = nn.Conv2d(
                self.num_heads,
                self.num_heads,
                kernel_size=(config.conv_window, 1),
                padding=(config.conv_window // 2, 0),
                groups=self.num_heads,
                bias=False,
            )
        # of settings that are changed later, hash functions are kept elsewhere
        self.built_settings = self.hash_settings()
        self.register_buffer("hash_parameters", None, persistent=False)
        if self.built_settings is not None:
            # torch.set_default_device and torch.device as a context move the weights
            device = "cpu" if self.query.weight.is_meta else self.query.weight.device
            self.hash_parameters = self.built_hash_parameters().to(device)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.hash_parameters is not None:
            # half() would round them to other hash functions, to_empty() lose them
            self.hash_parameters = self.built_hash_parameters().to(self.hash_parameters.device)
        return self

    def built_hash_parameters(self) -> Tensor:
        seed, layer_idx, sizes, kind = self.built_settings
        return HashFunctions.seeded(seed, layer_idx, *sizes, kind=kind, device="cpu").parameters

    @property
    def hash_code_len(self) -> int | list[int]:
        by_layer = self.config.hash_code_len
        if isinstance(by_layer, int):
            return by_layer
        # it may have changed after the configuration's own checks
        if len(by_layer) != self.config.num_hidden_layers:
            raise ValueError(
                f"hash_code_len must be one number or {self.config.num_hidden_layers} lists, one for each layer, "
                f"got {by_layer}"
            )
        return by_layer[self.layer_idx]

    @property
    def hash_kind(self) -> str:
        return "hadamard" if self.config.use_fast_hash else "gaussian"

    def hash_sizes(self) -> tuple[int, int, int, int]:
        lengths = self.hash_code_len
        longest = lengths if isinstance(lengths, int) else max(lengths)
        return self.num_heads, self.head_dim, self.config.num_hash, longest

    def hash_settings(self) -> tuple | None:
        """What the hash functions of evaluation follow from; None: there are none, or they are drawn afresh."""
        if self.config.use_expectation is True or self.config.hash_seed is None:
            return None
        return self.config.hash_seed, self.layer_idx, self.hash_sizes(), self.hash_kind

    def hash_functions(self, query: Tensor) -> HashFunctions | None:
        if self.config.use_expectation is True:
            return None
        if self.config.hash_seed is not None:
            check_integer("hash_seed", self.config.hash_seed, 0, MAX_SEED)
        if self.training or self.config.hash_seed is None:
            if self.hash_kind == "hadamard":
                # yoso_attention draws the same, where it samples
                return None
            sizes = (query.shape[2], query.shape[2], self.config.num_hash)
            kernel = (self.config.similarity, query.device.type, query.dtype)
            if self.config.use_expectation == "auto" and exact_is_cheaper(*sizes, *kernel):
                return None
            return HashFunctions.sample(*self.hash_sizes(), kind=self.hash_kind, device=query.device)
        settings = self.hash_settings()
        kept = self.hash_parameters
        # FSDP may round buffers
        if settings != self.built_settings or kept.device != query.device or kept.dtype != torch.float32:
            return kept_hash_functions(query, *settings)
        return HashFunctions(kept, *self.hash_sizes()[1:], self.hash_kind)

    def forward(
        self, hidden_states: Tensor, key_mask: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[Tensor, Tensor | None]:
        device_type = hidden_states.device.type
        if hidden_states.dtype == torch.float32 and device_type != "meta" and torch.is_autocast_enabled(device_type):
            # each projection would round a copy of its own, and keep it for the backward
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device_type))
        head_shape = (*hidden_states.shape[:2], self.num_heads, self.head_dim)
        query = self.query(hidden_states).view(head_shape).transpose(1, 2)
        key = self.key(hidden_states).view(head_shape).transpose(1, 2)
        value = self.value(hidden_states).view(head_shape).transpose(1, 2)

        kernel = {
            "hash_code_len": self.hash_code_len,
            "normalization": self.config.normalization,
            "similarity": self.config.similarity,
        }
        weights = None
        if kwargs.get("output_attentions", self.config.output_attentions):
            if self.config.use_expectation is not True:
                raise ValueError(
                    "output_attentions=True needs use_expectation=True, got "
                    f"use_expectation={self.config.use_expectation!r}: sampled attention never forms its weights"
                )
            weights = attention_weights(query, key, key_mask, **kernel)
        context = yoso_attention(
            query,
            key,
            value,
            key_mask,
            query_mask=key_mask,
            num_hash=self.config.num_hash,
            expectation=self.config.use_expectation,
            hash_functions=self.hash_functions(query),
            backward="sampled" if self.config.lsh_backward else "expectation",
            local_window=self.config.local_window,
            **kernel,
        )
        # PyTorch's convolution refuses what has no rows
        if self.conv is not None and value.shape[2]:
            context = context + self.conv(less_masked(value, real_rows(key_mask)))
        return context.transpose(1, 2).flatten(2), weights


class YosoResidual(nn.Module):
    """A projection, perhaps of an activation, added to the layer's input and normalised."""

    def __init__(self, in_features: int, config: YosoConfig, activation: nn.Module | None = None):
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def project(self, features: Tensor) -> Tensor:
        return self.dense(features if self.activation is None else self.activation(features))

    def forward(self, features: Tensor, residual: Tensor) -> Tensor:
        tokens = features.shape[0] * features.shape[1]
        if self.activation is not None and self.training and tokens >= RECOMPUTED_TOKENS:
            # an adapter in its place may drop at random; the generator cannot be read while a CUDA graph is captured
            draws = type(self.dense) is not nn.Linear
            # ends with the last tensor that the backward needs: the projection is not computed twice
            projected = checkpoint(self.project, features, use_reentrant=False, preserve_rng_state=draws)
        else:
            projected = self.project(features)
        return self.LayerNorm(self.dropout(projected) + residual)


class YosoAttention(nn.Module):
    """Self-attention and its residual."""

    def __init__(self, config: YosoConfig, layer_idx: int):
        super().__init__()
        self.self = YosoSelfAttention(config, layer_idx)
        self.output = YosoResidual(config.hidden_size, config)

    def forward(self, hidden_states: Tensor, key_mask: Tensor | None, **kwargs: Unpack[TransformersKwargs]) -> Tensor:
        context, _ = self.self(hidden_states, key_mask, **kwargs)
        return self.output(context, hidden_states)


class YosoIntermediate(nn.Module):
    """The widening half of the feed-forward network, up to its activation."""

    def __init__(self, config: YosoConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense(hidden_states)


class YosoLayer(GradientCheckpointingLayer):
    """Attention and a feed-forward network, both with their residuals."""

    def __init__(self, config: YosoConfig, layer_idx: int):
        super().__init__()
        self.chunk_size = config.chunk_size_feed_forward
        self.attention = YosoAttention(config, layer_idx)
        self.intermediate = YosoIntermediate(config)
        self.output = YosoResidual(config.intermediate_size, config, ACT2FN[config.hidden_act])

    def feed_forward(self, hidden_states: Tensor) -> Tensor:
        return self.output(self.intermediate(hidden_states), hidden_states)

    def forward(
        self, hidden_states: Tensor, key_mask: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> Tensor:
        hidden_states = self.attention(hidden_states, key_mask, **kwargs)
        return apply_chunking_to_forward(self.feed_forward, self.chunk_size, 1, hidden_states)


class YosoEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: YosoConfig):
        super().__init__()
        self.layer = nn.ModuleList(YosoLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))

    def forward(
        self, hidden_states: Tensor, key_mask: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, key_mask, **kwargs)
        return hidden_states


class YosoPredictionHeadTransform(nn.Module):
    """What comes between the encoder and the language model's output layer."""

    def __init__(self, config: YosoConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden_states)))


class YosoLMPredictionHead(nn.Module):
    """Logits over the vocabulary."""

    def __init__(self, config: YosoConfig):
        super().__init__()
        self.transform = YosoPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        # a second name of decoder.bias, which checkpoints hold; where it is not tied, it is used by nothing
        self.bias = nn.Parameter(torch.zeros(config.vocab_size), requires_grad=config.tie_word_embeddings)

    def forward(self, hidden_states: Tensor, padded: bool = False) -> Tensor:
        """Predicts tokens.

        Args:
            hidden_states: shape [..., hidden_size].
            padded: whether to pad the product with the vocabulary: see gains_by_padding.

        Returns:
            Logits of shape [..., vocab_size]; padded, with columns of -inf after them.
        """
        hidden_states = self.transform(hidden_states)
        if not padded:
            return self.decoder(hidden_states)
        padding = -self.decoder.out_features % PADDED_LOGITS
        weight = F.pad(self.decoder.weight, (0, 0, 0, padding))
        return F.linear(hidden_states, weight, F.pad(self.decoder.bias, (0, padding), value=-math.inf))


class YosoOnlyMLMHead(nn.Module):
    """The language model's head under the name that checkpoints give it."""

    def __init__(self, config: YosoConfig):
        super().__init__()
        self.predictions = YosoLMPredictionHead(config)

    def forward(self, hidden_states: Tensor, **kwargs: bool) -> Tensor:
        return self.predictions(hidden_states, **kwargs)


class TokenLosses(torch.autograd.Function):
    """The cross-entropy of every token, for which the backward needs no more memory than logits and their gradient.

    It is computed in float32, of some tokens at a time. Nothing is kept but the logits; the backward computes their
    softmax again, in their dtype, and makes the gradient of it in place.

    Args:
        logits: floating point, shape [tokens, vocab_size].
        labels: int64, shape [tokens], or -100 where there is none.

    Returns:
        Losses of shape [tokens], 0 where there is no label: float32, of float64 logits float64.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        chunks = [(logits, labels)]
        # a compiler makes no such copy, and may not know the number of tokens
        if not torch.compiler.is_compiling():
            tokens = max(1, LOSS_CHUNK_BYTES // (dtype.itemsize * logits.shape[1]))
            chunks = zip(logits.split(tokens), labels.split(tokens), strict=True)
        losses = [
            F.nll_loss(F.log_softmax(x, -1, dtype=dtype), y, ignore_index=IGNORED_LABEL, reduction="none")
            for x, y in chunks
        ]
        return torch.cat(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, losses = ctx.saved_tensors
        ignored = labels == IGNORED_LABEL
        grad = grad.masked_fill(ignored, 0)[:, None]
        # with its dtype, as autocast would make it float32
        grad_logits = torch.softmax(logits, -1, dtype=logits.dtype).mul_(grad)
        # the softmax of a label is not rounded before 1 is subtracted, where little may remain of it
        grad_labels = grad * torch.expm1(-losses)[:, None]
        grad_logits.scatter_(1, labels.masked_fill(ignored, 0)[:, None], grad_labels.to(logits.dtype))
        return grad_logits, None


class YosoClassificationHead(nn.Module):
    """Logits of a whole sequence, from the hidden state of its first token."""

    def __init__(self, config: YosoConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.classifier_activation or config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden_state: Tensor) -> Tensor:
        hidden_state = self.activation(self.dense(self.dropout(hidden_state)))
        return self.out_proj(self.dropout(hidden_state))


class YosoPreTrainedModel(PreTrainedModel):
    """What all YOSO models share: initial weights, loading and saving."""

    config: YosoConfig
    base_model_prefix = "yoso"
    supports_gradient_checkpointing = True
    # also what FSDP shards as one: not the embeddings, whose words the language model's output layer shares
    _no_split_modules = ["YosoLayer"]
    _can_record_outputs = {"hidden_states": YosoLayer, "attentions": YosoSelfAttention}
    # a buffer in checkpoints of old versions of transformers
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # a class registered to be saved with its code does not answer for its subclasses, whose code may lie anywhere
        cls._auto_class = None

    def get_position_embeddings(self) -> nn.Embedding:
        """The table of positions, [max_position_embeddings + 2, hidden_size]: the first token has the third row."""
        return self.base_model.embeddings.position_embeddings

    @torch.no_grad()
    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Makes the model take longer or shorter sequences: a new table of positions, and the configuration says so.

        A longer table repeats the old one, as a conversion does by default; a shorter one has its first rows. An
        optimizer made before holds the old one.

        Args:
            new_num_position_embeddings: tokens of the longest sequence, max_position_embeddings from now on, >= 1.

        Raises:
            ValueError: new_num_position_embeddings is no integer of at least 1.
        """
        check_integer("new_num_position_embeddings", new_num_position_embeddings, 1)
        embeddings = self.get_position_embeddings()
        unused, table = embeddings.weight.tensor_split([POSITION_OFFSET])
        weight = torch.cat([unused, tile_positions(table, new_num_position_embeddings)])
        embeddings.weight = nn.Parameter(weight, requires_grad=embeddings.weight.requires_grad)
        embeddings.num_embeddings = len(weight)
        self.config.max_position_embeddings = new_num_position_embeddings

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs):
        """Saves weights and configuration, with the code that loads them with `trust_remote_code=True`.

        Subclasses of the registered classes are saved without the code of the model.

        Args:
            save_directory: the directory, created where it is missing.
            *args, **kwargs: see PreTrainedModel.save_pretrained.
        """
        given = type(self)
        # fully_shard gives a model a class of torch's, which would be saved without the code
        self.__class__ = next(base for base in given.__mro__ if not base.__module__.startswith("torch."))
        try:
            if self.is_remote_code():
                # all of them: for a head that is not listed, transformers' own class would load in silence
                self.config.auto_map = dict(AUTO_MAP)
            elif hasattr(self.config, "auto_map"):
                # of the checkpoint that it was loaded from
                del self.config.auto_map
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.__class__ = given

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, YosoLMPredictionHead):
            init.zeros_(module.bias)
        elif isinstance(module, YosoSelfAttention) and module.hash_parameters is not None:
            init.copy_(module.hash_parameters, module.built_hash_parameters())


class YosoModel(YosoPreTrainedModel):
    """The YOSO encoder without a head."""

    def __init__(self, config: YosoConfig):
        super().__init__(config)
        if not hasattr(config, "normalization"):
            given = f"{type(config).__module__}.{type(config).__name__}"
            raise ValueError(f"config must be a yoso_hf.YosoConfig, got {given}: YosoConfig(**config.to_dict())")
        # assignments and the overrides of from_pretrained change a configuration after its own checks
        config.validate()
        self.embeddings = YosoEmbeddings(config)
        self.encoder = YosoEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | BaseModelOutput:
        """Encodes token sequences.

        Args:
            input_ids: token ids, int64, shape [B, N], N at most max_position_embeddings.
            attention_mask: bool, integer, or floating point of nothing but 0 and 1, shape [B, N], 1 for a real
                token and 0 for padding on either side; None: all tokens are real.
            token_type_ids: int64, shape [B, N], in 0..type_vocab_size - 1; None: all 0.
            position_ids: rows of the position table, int64, shape [B, N], the first token's being 2; None:
                the real tokens are counted from there.
            inputs_embeds: token embeddings in place of input_ids, floating point, shape [B, N, hidden_size].
            **kwargs: output_hidden_states, output_attentions and return_dict. Attentions are the kernel's
                weights, shape [B, H, N, N], before the context vectors are scaled to unit length, or with rows that
                add up to one where normalization="sum"; without a gradient. They need use_expectation=True.

        Returns:
            BaseModelOutput with last_hidden_state of shape [B, N, hidden_size]; what it holds for padding
            means nothing.

        Raises:
            ValueError: both or neither of input_ids and inputs_embeds, one of other dimensions, a sequence too long,
                an attention_mask of another shape, type or device or with other floating point numbers, or floating
                point in an export, output_attentions without use_expectation=True.
        """
        check_inputs(input_ids, inputs_embeds, "batch, length")
        shape = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:2]
        device = input_ids.device if inputs_embeds is None else inputs_embeds.device
        if shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence may have at most max_position_embeddings={self.config.max_position_embeddings} "
                f"tokens, got {shape[1]}"
            )
        key_mask = None
        if attention_mask is not None:
            check_attention_mask(attention_mask, shape, device)
            key_mask = attention_mask.bool()
        if position_ids is None and key_mask is None:
            position_ids = torch.arange(POSITION_OFFSET, POSITION_OFFSET + shape[1], device=device)
        elif position_ids is None:
            # padding on the left comes before position 0
            position_ids = (key_mask.long().cumsum(dim=1) - 1).clamp(min=0) + POSITION_OFFSET
        if token_type_ids is None:
            token_type_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        hidden_states = self.embeddings(
            # without a name, which would keep them while the encoder runs
            self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds,
            position_ids,
            token_type_ids,
        )
        return BaseModelOutput(last_hidden_state=self.encoder(hidden_states, key_mask, **kwargs))


class YosoForMaskedLM(YosoPreTrainedModel):
    """YOSO with a masked language modelling head."""

    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "yoso.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: YosoConfig):
        super().__init__(config)
        self.yoso = YosoModel(config)
        self.cls = YosoOnlyMLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        bias = new_embeddings.bias
        if bias is not None and not self.config.tie_word_embeddings:
            # a checkpoint would hold a shared parameter under one of its two names only
            bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = bias

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | MaskedLMOutput:
        """Predicts tokens.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see YosoModel.
            labels: int64, shape [B, N], the token to predict, or -100 where none is.
            **kwargs: see YosoModel; num_items_in_batch divides the loss in place of the number of labels.

        Returns:
            MaskedLMOutput with logits of shape [B, N, vocab_size]; with sparse_prediction and labels they are
            those of the labelled tokens alone, in order, shape [number of labels, vocab_size]. The backward
            needs them unchanged. The loss of a batch without labels is 0.
        """
        outputs = self.yoso(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if labels is not None and self.config.sparse_prediction:
            # a model may lie on several devices, its inputs on the first
            labels = labels.to(hidden_states.device)
            labelled = labels != IGNORED_LABEL
            hidden_states, labels = hidden_states[labelled], labels[labelled]
        head = getattr(self.cls, "predictions", None)
        # another in its place may take nothing but hidden states
        pads = isinstance(head, YosoLMPredictionHead) and gains_by_padding(head.decoder)
        padded = self.cls(hidden_states, padded=True) if pads else self.cls(hidden_states)
        logits = padded[..., : head.decoder.out_features] if pads else padded
        loss = None
        if labels is not None:
            kwargs["num_items_in_batch"] = count_labels(labels, kwargs.get("num_items_in_batch"))
            if self.loss_function is ForMaskedLMLoss:
                targets = labels.flatten().to(padded.device)
                if pads:
                    # what is beyond the vocabulary stays out of range
                    targets = targets.masked_fill(targets >= logits.shape[-1], padded.shape[-1])
                # the same in less memory; of padded logits, whose gradient would be copied to be padded
                losses = TokenLosses.apply(padded.flatten(0, -2), targets)
                loss = losses.sum() / kwargs["num_items_in_batch"].to(losses.device)
            else:
                loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class YosoForSequenceClassification(YosoPreTrainedModel):
    """YOSO with a classification or regression head on the first token."""

    def __init__(self, config: YosoConfig):
        super().__init__(config)
        self.yoso = YosoModel(config)
        self.classifier = YosoClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | SequenceClassifierOutput:
        """Classifies sequences.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see YosoModel.
            labels: classes, int64, shape [B]; or floating point, shape [B] for a regression, [B, num_labels]
                for several classes at once. config.problem_type says which; where it is None, num_labels and
                the dtype of the labels do.
            **kwargs: see YosoModel; num_items_in_batch divides the loss in place of the number of labels.

        Returns:
            SequenceClassifierOutput with logits of shape [B, num_labels].
        """
        outputs = self.yoso(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(first_token(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
            if self.config.problem_type != "single_label_classification":
                loss = part_of_batch(loss, labels, kwargs.get("num_items_in_batch"))
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class YosoForMultipleChoice(YosoPreTrainedModel):
    """YOSO with a head that chooses among several sequences."""

    def __init__(self, config: YosoConfig):
        super().__init__(config)
        self.yoso = YosoModel(config)
        self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | MultipleChoiceModelOutput:
        """Scores the choices of every question.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see YosoModel, with a
                dimension for the choices after the batch: [B, choices, N] where YosoModel has [B, N].
            labels: int64, shape [B], the right choice; -100 where there is none.
            **kwargs: see YosoModel; num_items_in_batch divides the loss in place of the number of labels.

        Returns:
            MultipleChoiceModelOutput with logits of shape [B, choices].
        """
        check_inputs(input_ids, inputs_embeds, "batch, choices, length")
        num_choices = input_ids.shape[1] if inputs_embeds is None else inputs_embeds.shape[1]
        input_ids, attention_mask, token_type_ids, position_ids = (
            None if tensor is None else tensor.reshape(-1, tensor.shape[-1])
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids)
        )
        if inputs_embeds is not None:
            inputs_embeds = inputs_embeds.flatten(0, 1)
        outputs = self.yoso(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        pooled = first_token(outputs.last_hidden_state, attention_mask)
        logits = self.classifier(F.relu(self.pre_classifier(pooled))).view(-1, num_choices)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits, labels.to(logits.device), ignore_index=IGNORED_LABEL, reduction="sum")
            loss = loss / count_labels(labels, kwargs.get("num_items_in_batch")).to(loss.device)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class YosoForTokenClassification(YosoPreTrainedModel):
    """YOSO with a classification head on every token."""

    def __init__(self, config: YosoConfig):
        super().__init__(config)
        self.yoso = YosoModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | TokenClassifierOutput:
        """Classifies tokens.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see YosoModel.
            labels: int64, shape [B, N], classes, or -100 where there is none; labels of padding are ignored.
            **kwargs: see YosoModel; num_items_in_batch divides the loss in place of the number of labels.

        Returns:
            TokenClassifierOutput with logits of shape [B, N, num_labels]. The loss of a batch without labels
            is 0.
        """
        outputs = self.yoso(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            if attention_mask is not None:
                labels = labels.masked_fill(~attention_mask.bool(), IGNORED_LABEL)
            kwargs["num_items_in_batch"] = count_labels(labels, kwargs.get("num_items_in_batch"))
            loss = self.loss_function(logits, labels, config=self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class YosoForQuestionAnswering(YosoPreTrainedModel):
    """YOSO with a head that marks the first and the last token of an answer."""

    def __init__(self, config: YosoConfig):
        super().__init__(config)
        self.yoso = YosoModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | QuestionAnsweringModelOutput:
        """Finds the answer to a question in the text that comes with it.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see YosoModel.
            start_positions: int64, shape [B], index of the answer's first token; N and above: none, ignored.
            end_positions: the same of its last token.
            **kwargs: see YosoModel.

        Returns:
            QuestionAnsweringModelOutput with start_logits and end_logits of shape [B, N], the lowest number
            of their dtype at padding. The loss of a batch without answers is NaN, as BERT's is.
        """
        outputs = self.yoso(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        logits = self.qa_outputs(outputs.last_hidden_state)
        if attention_mask is not None:
            # the loss normalises over the sequence, and padding must have no part in it
            padding = ~attention_mask.bool().unsqueeze(-1).to(logits.device)
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None, sizes: str) -> None:
    """Raises ValueError unless exactly one of them is given, with these sizes, `inputs_embeds` with one more."""
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"exactly one of input_ids and inputs_embeds must be given, got {given}")
    name, tensor = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    if inputs_embeds is not None:
        sizes += ", hidden_size"
    if tensor.dim() != len(sizes.split(", ")):
        raise ValueError(f"{name} must be a tensor of shape [{sizes}], got shape {list(tensor.shape)}")


def check_attention_mask(attention_mask: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raises ValueError unless the mask is a tensor of this shape on this device, integer or only 0 and 1."""
    given = type(attention_mask).__name__
    if isinstance(attention_mask, Tensor):
        dtype = attention_mask.dtype
        fits = attention_mask.shape == shape and attention_mask.device == device and not dtype.is_complex
        if fits and not dtype.is_floating_point:
            return
        if fits and is_exporting():
            raise ValueError(
                "attention_mask must be bool or int64 in an export, where a floating point one cannot be checked to "
                f"hold nothing but 0 and 1, got {dtype}"
            )
        # masks that PEFT extends by virtual tokens are floating point, and so are those to be added to weights
        if fits and ((attention_mask == 0) | (attention_mask == 1)).all():
            return
        given = f"{dtype} of shape {list(attention_mask.shape)} on {attention_mask.device}"
    raise ValueError(
        f"attention_mask must be a bool or integer tensor of shape {list(shape)} on {device}, "
        f"1 for a real token and 0 for padding, or a floating point one of nothing but 0 and 1, got {given}"
    )


def tile_positions(table: Tensor, length: int) -> Tensor:
    """A table of `length` rows: those of the given one, over and over."""
    return table[torch.arange(length, device=table.device) % len(table)]


def first_token(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The hidden states of every sequence's first real token, shape [B, hidden_size]."""
    if attention_mask is None:
        return hidden_states[:, 0]
    # argmax gives the first of equal maxima, and index 0 where all is padding
    index = attention_mask.bool().int().argmax(dim=1).to(hidden_states.device)
    # not len(index), which torch.export would take for a constant
    return hidden_states[torch.arange(index.shape[0], device=index.device), index]


def gains_by_padding(decoder: nn.Module) -> bool:
    """Whether the product with the vocabulary is faster padded, and a call of the module is that product alone."""
    # adapters and quantised weights are something else
    if type(decoder) is not nn.Linear or type(decoder.weight) not in (Tensor, nn.Parameter) or decoder.bias is None:
        return False
    hooks = (decoder._forward_pre_hooks, decoder._forward_hooks, decoder._backward_pre_hooks, decoder._backward_hooks)
    # accelerate puts a forward of its own on the instance
    if any(hooks) or "forward" in vars(decoder):
        return False
    return decoder.weight.device.type in PADDED_DEVICES and decoder.out_features % ALIGNED_LOGITS != 0


def count_labels(labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """What the sum of the losses is divided by, at least 1: without labels the loss is 0 and not 0 / 0."""
    if num_items_in_batch is None:
        return (labels != IGNORED_LABEL).sum().clamp(min=1)
    return torch.as_tensor(num_items_in_batch).clamp(min=1)


def part_of_batch(mean: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """The part of a larger batch's mean loss that is these labels', of which `mean` is the mean loss."""
    if num_items_in_batch is None:
        return mean
    # a tensor, as Trainer counts them, may be on another device
    return mean * (labels.numel() / torch.as_tensor(num_items_in_batch, device=mean.device))


__all__ = [
    "YosoForMaskedLM",
    "YosoForMultipleChoice",
    "YosoForQuestionAnswering",
    "YosoForSequenceClassification",
    "YosoForTokenClassification",
    "YosoModel",
    "YosoPreTrainedModel",
]
