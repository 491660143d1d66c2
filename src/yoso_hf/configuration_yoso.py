"""The configuration of a YOSO model."""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN


@strict
class YosoConfig(PreTrainedConfig):
    """Sizes and attention settings of a YOSO model.

    The keys and defaults are those of transformers' own YosoConfig, with `normalization`, `similarity`,
    `local_window`, `hash_seed`, `sparse_prediction` and `classifier_activation` added; they give the shape of
    [uw-madison/yoso-4096](https://huggingface.co/uw-madison/yoso-4096). The attention reads its settings at each call,
    all but conv_window: they may be changed while a model is in memory, and are saved as they are.

    Args:
        vocab_size: tokens in the vocabulary, >= 1.
        hidden_size: width of the hidden states, a multiple of num_attention_heads.
        num_hidden_layers: layers, >= 1.
        num_attention_heads: heads of every layer, >= 1.
        intermediate_size: width of the feed-forward layers, >= 1.
        hidden_act: name of the activation in the feed-forward layers and the heads.
        hidden_dropout_prob: dropout of embeddings, layer outputs and heads, 0..1.
        attention_probs_dropout_prob: kept so that published configurations load; YOSO has no attention
            dropout.
        max_position_embeddings: longest sequence, in tokens, >= 1.
        type_vocab_size: token types, >= 1.
        initializer_range: standard deviation of the initial weights.
        layer_norm_eps: epsilon of the layer normalisations.
        use_expectation: True for the exact kernel, quadratic in time; False for its estimate by hashing,
            linear; "auto" for whichever is estimated to be cheaper, by num_hash and the padded length.
        hash_code_len: tau, the bits of a hash code and, with similarity="cosine", the power of the kernel, 1..16, or
            1..32 with use_expectation=True. A list of one list for every layer, with a number for every head, gives
            each head its own. With "softmax" it is the most bits that codes have, which follow the length.
        num_hash: m, hash functions of a head, >= 1; more of them give a better estimate and take more time.
        conv_window: tokens under the depthwise convolution of the values (YOSO-C), odd; None: no convolution.
        use_fast_hash: True for Hadamard transforms, False for Gaussian projections.
        lsh_backward: True for the linear estimate of the gradient of query and key, False for its exact sum,
            quadratic in time.
        pad_token_id, bos_token_id, eos_token_id: ids of the special tokens.
        add_cross_attention: must be False, the model is an encoder.
        tie_word_embeddings: share the token embeddings with the language model's output layer.
        normalization: "l2": context vectors have length one, as in the paper; "sum": they are divided by the sum of
            their weights, as in softmax attention; None: neither.
        similarity: "cosine": weights depend on the cosine of query and key, as in the paper; "softmax": they are those
            of softmax attention (see yoso_attention), with normalization="sum" and, unless use_expectation is True,
            one hash_code_len, local_window=0 and lsh_backward=True.
        local_window: pairs of tokens at most so far apart get their exact weight where the others are sampled, >= 0.
        hash_seed: seed of the hash functions in eval mode, 0..2**32 - 1, drawn once for every layer; None:
            drawn afresh from torch's global generator at each call, as always in training.
        sparse_prediction: given labels, YosoForMaskedLM computes logits for the labelled positions only, as rows of
            which Trainer's predict and compute_metrics would drop some: for these, turn it off.
        classifier_activation: name of the activation in YosoForSequenceClassification's head; None: hidden_act.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value of the wrong type or out of range.
    """

    model_type = "yoso"

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 4096
    type_vocab_size: int = 1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    use_expectation: bool | Literal["auto"] = True
    hash_code_len: int | list[list[int]] = 9
    num_hash: int = 64
    conv_window: int | None = None
    use_fast_hash: bool = True
    lsh_backward: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    normalization: Literal["l2", "sum"] | None = "l2"
    similarity: Literal["cosine", "softmax"] = "cosine"
    local_window: int = 0
    hash_seed: int | None = 0
    sparse_prediction: bool = False
    classifier_activation: str | None = None

    def __post_init__(self, **kwargs):
        # published YOSO models carry this class beside the files of a RoBERTa tokenizer
        if kwargs.get("tokenizer_class") == "AlbertTokenizer":
            del kwargs["tokenizer_class"]
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Checks that the sizes are in range and fit each other."""
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
            "num_hash",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id must be below vocab_size={self.vocab_size}, got {self.pad_token_id}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        for name in ("hidden_act", "classifier_activation"):
            activation = getattr(self, name)
            if activation not in ACT2FN and not (activation is None and name == "classifier_activation"):
                raise ValueError(f"{name} must be one of {', '.join(ACT2FN)}, got {activation!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads={self.num_attention_heads}, "
                f"got {self.hidden_size}"
            )
        self._validate_hash_code_len()
        if self.conv_window is not None and (self.conv_window < 1 or self.conv_window % 2 == 0):
            raise ValueError(f"conv_window must be None or an odd positive number, got {self.conv_window}")
        if self.similarity == "softmax" and self.normalization != "sum":
            raise ValueError(f'similarity="softmax" needs normalization="sum", got {self.normalization!r}')
        if self.similarity == "softmax" and self.use_expectation is not True:
            needed = isinstance(self.hash_code_len, int) and self.local_window == 0 and self.lsh_backward
            if not needed:
                raise ValueError(
                    f'similarity="softmax" with use_expectation={self.use_expectation!r} needs one hash_code_len, '
                    f"local_window=0 and lsh_backward=True, got {self.hash_code_len}, {self.local_window} and "
                    f"{self.lsh_backward}"
                )
        if self.local_window < 0:
            raise ValueError(f"local_window must be at least 0, got {self.local_window}")
        if self.hash_seed is not None and not 0 <= self.hash_seed < 2**32:
            raise ValueError(f"hash_seed must be None or in 0..2**32 - 1, got {self.hash_seed}")
        if self.add_cross_attention:
            raise ValueError("add_cross_attention must be False, got True: YOSO is an encoder")

    def _validate_hash_code_len(self):
        by_layer, highest = self.hash_code_len, 32 if self.use_expectation is True else 16
        if isinstance(by_layer, int):
            by_layer = [[by_layer]]
        sizes = [len(by_head) for by_head in by_layer]
        if by_layer is self.hash_code_len and sizes != [self.num_attention_heads] * self.num_hidden_layers:
            raise ValueError(
                f"hash_code_len must be one number or {self.num_hidden_layers} lists of {self.num_attention_heads}, "
                f"for layers and heads, got {self.hash_code_len}"
            )
        if not all(1 <= length <= highest for by_head in by_layer for length in by_head):
            note = "" if self.use_expectation is True else " (1..32 with use_expectation=True, which samples nothing)"
            raise ValueError(f"hash_code_len must be in 1..{highest}, got {self.hash_code_len}{note}")


__all__ = ["YosoConfig"]
