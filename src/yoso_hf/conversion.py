"""Checkpoints of softmax encoders, and of YOSO's authors, turned into checkpoints of this package."""

import contextlib
import dataclasses
import fnmatch
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .attention_interface import SETTINGS, has_settings, read_settings
from .configuration_yoso import YosoConfig
from .hashing import check_integer
from .mlm import Masking
from .modeling_yoso import (
    IGNORED_LABEL,
    POSITION_OFFSET,
    YosoForMaskedLM,
    YosoForMultipleChoice,
    YosoForQuestionAnswering,
    YosoForSequenceClassification,
    YosoForTokenClassification,
    YosoPreTrainedModel,
    tile_positions,
)
from .training import MODEL_FILES, read_tokenizer, write_text


def _of_yoso_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of attn_implementation="yoso", by the names and in the values of YosoConfig."""
    attention = {name.removeprefix("yoso_"): value for name, value in settings.items()}
    return attention | {"lsh_backward": attention.pop("backward") == "sampled"}


REPORT_FILE = "conversion.json"
# what sentence-transformers keeps beside an encoder: its settings of it, and what follows the encoder
_SENTENCE_SETTINGS = "sentence_*_config.json"
_SENTENCE_MODULES = "modules.json"
_SENTENCE_FILES = (_SENTENCE_MODULES, "config_sentence_transformers.json", _SENTENCE_SETTINGS)
POSITION_METHODS = ("tile", "interpolate")
# what a softmax model's attention becomes unless the caller says otherwise, as with attn_implementation="yoso"
SOFTMAX_ATTENTION = _of_yoso_config(SETTINGS)
MASKED_SHARE = 0.15

# by model type, what the names of its classes begin with
_CLASS_PREFIXES = {
    "bert": "Bert",
    "camembert": "Camembert",
    "data2vec-text": "Data2VecText",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "ernie": "Ernie",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "yoso": "Yoso",
}
# by the rest of the class's name, how to load it and what it becomes
_TASKS = {
    "Model": (AutoModel, YosoForMaskedLM),
    "ForMaskedLM": (AutoModelForMaskedLM, YosoForMaskedLM),
    "ForMultipleChoice": (AutoModelForMultipleChoice, YosoForMultipleChoice),
    "ForNextSentencePrediction": (AutoModelForNextSentencePrediction, YosoForMaskedLM),
    "ForPreTraining": (AutoModelForPreTraining, YosoForMaskedLM),
    "ForQuestionAnswering": (AutoModelForQuestionAnswering, YosoForQuestionAnswering),
    "ForSequenceClassification": (AutoModelForSequenceClassification, YosoForSequenceClassification),
    "ForTokenClassification": (AutoModelForTokenClassification, YosoForTokenClassification),
}
_POSITION_TABLE = "yoso.embeddings.position_embeddings.weight"
_TYPE_TABLE = "yoso.embeddings.token_type_embeddings.weight"
# of ERNIE: what it adds to every token of a task, which is the first unless a caller names another
_TASK_TYPE_TABLE = "embeddings.task_type_embeddings.weight"
# of a Yoso configuration, what is written anew
_NOT_COPIED = (
    "model_type",
    "architectures",
    "transformers_version",
    "max_position_embeddings",
    "dtype",
)
_COPIED_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "id2label",
    "label2id",
    "problem_type",
)
# what sentence-transformers keeps of a cross-encoder in its configuration, such as what its scores go through
_SENTENCE_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function")
_MLM_TRANSFORM = "cls.predictions.transform."
# language model heads, whose weights go by other names than BERT's
_MLM_PREFIXES = {
    "lm_head.dense.": _MLM_TRANSFORM + "dense.",
    "lm_head.layer_norm.": _MLM_TRANSFORM + "LayerNorm.",
    "lm_head.decoder.": "cls.predictions.decoder.",
    "lm_head.bias": "cls.predictions.bias",
    "generator_predictions.dense.": _MLM_TRANSFORM + "dense.",
    "generator_predictions.LayerNorm.": _MLM_TRANSFORM + "LayerNorm.",
    "generator_lm_head.": "cls.predictions.decoder.",
}
_EXACT_GELU = ("gelu", "gelu_python")
# of DistilBERT, what is no setting: the first it has, and types of tokens it has none, so that Yoso's are zero
_DISTILBERT_FIXED = {"layer_norm_eps": 1e-12, "type_vocab_size": 2}
# its settings, layers and heads go by other names than BERT's
_DISTILBERT_SETTINGS = {
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
_DISTILBERT_HEAD_DROPOUT = {
    "ForMultipleChoice": "seq_classif_dropout",
    "ForQuestionAnswering": "qa_dropout",
    "ForSequenceClassification": "seq_classif_dropout",
}
_DISTILBERT_LAYER = re.compile(r"transformer\.layer\.(\d+)\.(.*)")
_DISTILBERT_LAYER_PREFIXES = {
    "attention.q_lin.": "attention.self.query.",
    "attention.k_lin.": "attention.self.key.",
    "attention.v_lin.": "attention.self.value.",
    "attention.out_lin.": "attention.output.dense.",
    "sa_layer_norm.": "attention.output.LayerNorm.",
    "ffn.lin1.": "intermediate.dense.",
    "ffn.lin2.": "output.dense.",
    "output_layer_norm.": "output.LayerNorm.",
}
_DISTILBERT_MLM_PREFIXES = {
    "vocab_transform.": _MLM_TRANSFORM + "dense.",
    "vocab_layer_norm.": _MLM_TRANSFORM + "LayerNorm.",
    "vocab_projector.": "cls.predictions.decoder.",
}
# inside the head for sequence classification, where that of an architecture has no tanh
_CLASSIFIER_ACTIVATIONS = {"distilbert": "relu", "electra": "gelu"}
# what has no counterpart, and why
_DROPPED_PREFIXES = {
    "pooler.": "Yoso has no pooler",
    _TASK_TYPE_TABLE: "its first row is added to those of the types of tokens, the others are of other tasks",
    "cls.seq_relationship.": "Yoso has no head for pairs of sentences",
    "discriminator_predictions.": "Yoso has no head that tells replaced tokens",
    "sequence_summary.": "YosoForMultipleChoice has another activation between its layers",
}

# what the configuration of a checkpoint of mlpen/YOSO has to say, whatever its attention
_AUTHORS_SIZES = ("vocab_size", "dim", "embedding_dim", "num_layers", "num_head", "head_dim", "hidden_dim")
_AUTHORS_SIZES += ("max_seq_len", "num_sen_type", "dropout_prob")
# names in the checkpoints of mlpen/YOSO: those of its code, and those of the models published from it
_AUTHORS_NAMES = (
    (r"model\.embeddings\.norm\.", r"yoso.embeddings.LayerNorm."),
    (r"model\.embeddings\.(word|position|token_type)_embeddings\.", r"yoso.embeddings.\1_embeddings."),
    (r"mlm\.dense\.", _MLM_TRANSFORM + "dense."),
    (r"mlm\.norm\.", _MLM_TRANSFORM + "LayerNorm."),
    (r"mlm\.mlm_class\.", "cls.predictions.decoder."),
)
_AUTHORS_LAYER = re.compile(r"model\.(?:backbone\.backbone\.(?:encoders\.(\d+)|encoder)|transformer_(\d+))\.(.*)")
_AUTHORS_LAYER_NAMES = (
    (r"mha\.W_q\.", "attention.self.query."),
    (r"mha\.W_k\.", "attention.self.key."),
    (r"mha\.W_v\.", "attention.self.value."),
    (r"mha\.attn\.conv\.", "attention.self.conv."),
    (r"mha\.ff\.", "attention.output.dense."),
    (r"norm1\.", "attention.output.LayerNorm."),
    (r"ff(?:\.0|1)\.", "intermediate.dense."),
    (r"ff(?:\.2|2)\.", "output.dense."),
    (r"norm2\.", "output.LayerNorm."),
)
_AUTHORS_DROPPED = {
    "model.pooler.": "Yoso has no pooler",
    "sen_class.": "Yoso has no head for pairs of sentences",
}


@dataclass
class Comparison:
    """How far a conversion moved a model's outputs, on texts that both can take.

    Args:
        num_texts: texts compared.
        num_tokens: their tokens, special ones included.
        cosine: cosine of a token's last hidden state before and after, the mean over all tokens.
        cosine_by_layer: the same for the embeddings and after each layer.
        num_masked: tokens masked; 0, and None below, where the original has no language model head that was kept, or
            the tokenizer no token for a mask.
        original_loss, converted_loss: mean cross-entropy of the masked tokens.
        original_accuracy, converted_accuracy: share of them that the model ranks first.
    """

    num_texts: int
    num_tokens: int
    cosine: float
    cosine_by_layer: list[float]
    num_masked: int = 0
    original_loss: float | None = None
    converted_loss: float | None = None
    original_accuracy: float | None = None
    converted_accuracy: float | None = None


@dataclass
class ConversionReport:
    """What a conversion did.

    Args:
        source: the checkpoint that was converted.
        source_architecture, architecture: its class and the new one.
        original_positions, positions: how many tokens the original takes and how many the new checkpoint.
        position_method: "tile" or "interpolate", how the table was lengthened; "copy" or "cut" where it was not.
        mapped: by name of a new weight, the name of the original it was taken from.
        new: names of weights that start at random; what starts at zero is in the notes.
        dropped: by name of an original weight, why it has no place.
        notes: what else differs from the original.
        comparison: how far the outputs moved; None where no texts were given.
    """

    source: str
    source_architecture: str
    architecture: str
    original_positions: int
    positions: int
    position_method: str
    mapped: dict[str, str]
    new: list[str]
    dropped: dict[str, str]
    notes: list[str]
    comparison: Comparison | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.source_architecture} -> {self.architecture}",
            f"positions   {self.original_positions} -> {self.positions} ({self.position_method})",
            f"weights     {len(self.mapped)} mapped, {len(self.new)} new, {len(self.dropped)} dropped",
            *(f"  new       {name}" for name in self.new),
            *(f"  dropped   {name}: {reason}" for name, reason in self.dropped.items()),
            *(f"note        {note}" for note in self.notes),
        ]
        if self.comparison is None:
            lines.append("outputs     not compared")
        else:
            found = self.comparison
            lines.append(
                f"outputs     mean cosine of the last hidden states {found.cosine:.4f}, "
                f"{found.num_tokens} tokens of {found.num_texts} texts"
            )
            if found.num_masked:
                lines.append(
                    f"masked      loss {found.original_loss:.3f} -> {found.converted_loss:.3f}, "
                    f"accuracy {found.original_accuracy:.1%} -> {found.converted_accuracy:.1%}, "
                    f"{found.num_masked} tokens"
                )
        return "\n".join(lines)


@dataclass
class _Source:
    """A checkpoint as read: its weights by their own names, and what becomes of each."""

    architecture: str
    target_class: type[YosoPreTrainedModel]
    settings: dict[str, Any]
    weights: dict[str, Tensor]
    # by the name of the new weight, the name of the original
    mapped: dict[str, str]
    dropped: dict[str, str]
    # rows of the position table in front of the first token's
    position_offset: int
    is_softmax: bool
    model: PreTrainedModel | None = None
    notes: list[str] = field(default_factory=list)
    # new weights that are zero, as the original computes without them
    zeros: tuple[str, ...] = ()


def convert_checkpoint(
    source: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    max_position_embeddings: int | None = None,
    position_method: Literal["tile", "interpolate"] = "tile",
    hash_code_len: int | None = None,
    num_hash: int | None = None,
    local_window: int | None = None,
    use_expectation: bool | Literal["auto"] | None = None,
    tokenizer_name: str | None = None,
    texts: Sequence[str] | None = None,
    overwrite: bool = False,
) -> ConversionReport:
    """Write a Yoso checkpoint made of another encoder's: configuration, weights, tokenizer and a report.

    Every weight and every head with an exact counterpart is kept; the rest is new, drawn from torch's global
    generator. A softmax model's attention stays the same where it is computed exactly; where it is sampled, it is an
    estimate of that, whose noise moves the outputs. A YOSO model keeps its own. A checkpoint of
    sentence-transformers stays one, with its pooling and what else follows.

    Args:
        source: hub name or directory of a BERT, DistilBERT, RoBERTa, XLM-R, CamemBERT, Data2Vec, ELECTRA, ERNIE or
            Yoso checkpoint; or a file of YOSO's authors (cp-0249.model), with the config.json that it was trained
            with beside it or one directory up. A checkpoint of attn_implementation="yoso" whose configuration has
            settings of it keeps the attention it has.
        output_dir: where to write; must not exist or be empty, unless overwrite is set.
        max_position_embeddings: longest sequence of the new model, >= 1; None: the original's.
        position_method: how the position table becomes longer. "tile" repeats it, as YOSO's authors do;
            "interpolate" stretches it linearly. A shorter one is cut.
        hash_code_len, num_hash, local_window, use_expectation: of the new configuration, see YosoConfig. None: a
            YOSO model's own; for a softmax model those in SOFTMAX_ATTENTION, which takes no local_window unless
            use_expectation is True.
        tokenizer_name: hub name or directory of the tokenizer; None: the source's, or none where it holds none, as
            a file of the authors.
        texts: what to compare the outputs on; None: they are not compared.
        overwrite: replace a checkpoint that is in output_dir, if there is nothing else.

    Returns:
        The report, which is also saved as conversion.json.

    Raises:
        ValueError: the source is of an architecture that Yoso cannot hold, lacks weights or is damaged, or an
            argument is out of range; nothing has been written.
        huggingface_hub.errors.StrictDataclassError: hash_code_len, num_hash, local_window or use_expectation is out
            of range, or not for the attention that the model gets.
    """
    output_dir = Path(output_dir)
    _check_output(output_dir, source, overwrite)
    if max_position_embeddings is not None:
        check_integer("max_position_embeddings", max_position_embeddings, 1)
    if position_method not in POSITION_METHODS:
        raise ValueError(f"position_method must be one of {POSITION_METHODS}, got {position_method!r}")
    if texts is not None and (isinstance(texts, str) or not texts):
        raise ValueError(f"texts must be None or a sequence of at least one text, got {texts!r}")

    is_file = os.path.isfile(source)
    # first of all, because what is no such checkpoint may have no tokenizer either
    read = _read_authors(Path(source)) if is_file else _read_pretrained(str(source))
    tokenizer = None if is_file and tokenizer_name is None else read_tokenizer(tokenizer_name or source)
    if tokenizer is None and (tokenizer_name is not None or texts):
        need = "texts need a tokenizer, and " if tokenizer_name is None else ""
        raise ValueError(f"{need}{tokenizer_name or source} holds none: give another tokenizer_name")

    original = read.weights[read.mapped[_POSITION_TABLE]][read.position_offset :]
    length = max_position_embeddings or len(original)
    chosen = {
        "hash_code_len": hash_code_len,
        "num_hash": num_hash,
        "local_window": local_window,
        "use_expectation": use_expectation,
    }
    attention = SOFTMAX_ATTENTION if read.is_softmax else {}
    settings = read.settings | attention | {name: value for name, value in chosen.items() if value is not None}
    if is_file and tokenizer is not None:
        settings |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if tokenizer is not None:
        vocab_size = settings["vocab_size"]
        if len(tokenizer) > vocab_size:
            raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model knows {vocab_size} (vocab_size)")
        # without room for a word beside these, tokenizers cut nothing
        shortest = tokenizer.num_special_tokens_to_add() + 1
        if texts and length < shortest:
            raise ValueError(f"max_position_embeddings must be at least {shortest} for texts, got {length}")
        longest_before, tokenizer.model_max_length = tokenizer.model_max_length, length
    config = YosoConfig(**settings, max_position_embeddings=length)

    model = read.target_class(config)
    new = _fill(model, read, lengthen_positions(original, length, position_method))
    if length == len(original):
        position_method = "copy"
    elif length < len(original):
        position_method = "cut"
    if tokenizer is None:
        read.notes.append(f"no tokenizer: {source} holds none")
    # before anything is written, as the hub may not answer
    sentence_files = {} if is_file else _find_sentence_files(str(source))
    if sentence_files:
        read.notes.append(f"a checkpoint of sentence-transformers, kept with {', '.join(sorted(sentence_files))}")
        if tokenizer is not None and max_position_embeddings is None:
            # where sentence-transformers cuts texts, unless its own files say so
            tokenizer.model_max_length = min(longest_before, length)
    report = ConversionReport(
        source=str(source),
        source_architecture=read.architecture,
        architecture=type(model).__name__,
        original_positions=len(original),
        positions=length,
        position_method=position_method,
        mapped=read.mapped,
        new=new,
        dropped=read.dropped,
        notes=read.notes,
    )
    if texts and read.model is None:
        report.notes.append(f"outputs were not compared: {read.architecture} is not a model of transformers")
    elif texts:
        kept_head = any(name.startswith(_MLM_TRANSFORM) for name in read.mapped)
        report.comparison = compare(
            read.model,
            model,
            tokenizer,
            texts,
            max_length=min(length, len(original)),
            language_model=kept_head and tokenizer.mask_token is not None,
        )
    with _replacing(output_dir) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            if tokenizer.is_fast:
                # which the tokenizers library goes by: a sentence encoder's file has both for its own length, and the
                # comparison has cut texts at the old one
                tokenizer.backend_tokenizer.no_truncation()
                tokenizer.backend_tokenizer.no_padding()
            tokenizer.save_pretrained(folder)
        for name, file in sentence_files.items():
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(file, folder / name)
        if max_position_embeddings is not None:
            _set_longest_sentence(folder, length)
        write_text(folder / REPORT_FILE, json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    return report


def lengthen_positions(table: Tensor, length: int, method: Literal["tile", "interpolate"]) -> Tensor:
    """A position table of another length.

    Args:
        table: [P, hidden_size], row i for token i, P >= 1.
        length: rows of the new table, >= 1; where it is at most P, the first rows are taken.
        method: "tile": row i is row i mod P of the given table; "interpolate": the given rows are spread evenly
            over the new table, first and last at its ends, with straight lines between them.

    Returns:
        [length, hidden_size].

    Raises:
        ValueError: another method.
    """
    if method not in POSITION_METHODS:
        raise ValueError(f"method must be one of {POSITION_METHODS}, got {method!r}")
    if method == "tile" or length <= len(table):
        return tile_positions(table, length)
    return F.interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T


@torch.no_grad()
def compare(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_length: int,
    language_model: bool,
) -> Comparison:
    """Run two models, in eval mode, on the same texts.

    Args:
        original: the model to compare with.
        converted: a model with as many layers and the same vocabulary.
        tokenizer: of both.
        texts: at least one, taken one by one.
        max_length: tokens at which a text is cut.
        language_model: both predict masked tokens: compare that, too, on masks that are the same for both.

    Returns:
        The comparison.
    """
    original.eval()
    converted.eval()
    masking = Masking(tokenizer, MASKED_SHARE) if language_model else None
    cosines, losses, hits = [], [], []
    for index, text in enumerate(texts):
        inputs = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
        layers = [
            model.base_model(**inputs, output_hidden_states=True).hidden_states for model in (original, converted)
        ]
        cosines.append(torch.stack([F.cosine_similarity(*pair, dim=-1)[0] for pair in zip(*layers, strict=True)]))
        if masking is None:
            continue
        masked = masking(inputs["input_ids"], [index])
        labels, inputs["input_ids"] = masked["labels"].flatten(), masked["input_ids"]
        chosen = labels != IGNORED_LABEL
        logits = torch.stack([_token_logits(model(**inputs))[0, chosen] for model in (original, converted)])
        losses.append(torch.stack([F.cross_entropy(each, labels[chosen], reduction="none") for each in logits]))
        hits.append(logits.argmax(-1) == labels[chosen])
    cosine = torch.cat(cosines, dim=1)
    by_layer = cosine.mean(dim=1).tolist()
    found = Comparison(len(texts), cosine.shape[1], by_layer[-1], by_layer)
    if masking is not None and (num_masked := sum(part.shape[1] for part in losses)):
        found.num_masked = num_masked
        found.original_loss, found.converted_loss = torch.cat(losses, dim=1).mean(dim=1).tolist()
        found.original_accuracy, found.converted_accuracy = torch.cat(hits, dim=1).float().mean(dim=1).tolist()
    return found


def _token_logits(outputs: Any) -> Tensor:
    # BERT's pretraining class has a second head beside it
    return outputs.prediction_logits if hasattr(outputs, "prediction_logits") else outputs.logits


def _find_sentence_files(source: str) -> dict[str, Path]:
    """The files that make a checkpoint one of sentence-transformers, by their names in it; none of another."""
    patterns = [*_SENTENCE_FILES]
    root = _folder_with(source, patterns)
    if not (root / _SENTENCE_MODULES).is_file():
        return {}
    with _naming_damage(root / _SENTENCE_MODULES):
        modules = json.loads((root / _SENTENCE_MODULES).read_text(encoding="utf-8"))
        encoder, *folders = (module["path"] for module in modules)
    # it would stay what it was
    if encoder or any(not folder or ".." in Path(folder).parts or Path(folder).is_absolute() for folder in folders):
        raise ValueError(
            f"{root / _SENTENCE_MODULES} must have the encoder first, with an empty path, and the others in folders "
            f"beside it, got the paths {[encoder, *folders]}"
        )
    patterns += [f"{folder}/*" for folder in folders]
    root = _folder_with(source, patterns)
    files = [file for pattern in patterns for file in root.glob(pattern) if file.is_file()]
    return {file.relative_to(root).as_posix(): file for file in files}


def _folder_with(source: str, patterns: list[str]) -> Path:
    return Path(source if os.path.isdir(source) else snapshot_download(source, allow_patterns=patterns))


def _set_longest_sentence(folder: Path, length: int) -> None:
    for file in folder.glob(_SENTENCE_SETTINGS):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if "max_seq_length" in settings:
            write_text(file, json.dumps(settings | {"max_seq_length": length}, indent=2) + "\n")


def _read_pretrained(source: str) -> _Source:
    """A checkpoint of transformers."""
    if not os.path.exists(source) and (source.count("/") > 1 or source.startswith((".", "/", "~"))):
        raise ValueError(f"there is no file or directory {source}, which is no name of the hub either")
    if os.path.isfile(os.path.join(source, "adapter_config.json")):
        raise ValueError(f"{source} holds an adapter of PEFT: merge it into its model, and save that, first")
    config = AutoConfig.from_pretrained(source)
    task = _check_config(source, config)
    auto_class, target_class = _TASKS[task]
    # trained with attn_implementation="yoso"
    has_yoso_attention = has_settings(config)
    with _naming_damage(source):
        model, found = auto_class.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            attn_implementation="yoso" if has_yoso_attention else None,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    weights = model.state_dict()
    prefixes = _head_prefixes(config, target_class)
    is_distilbert = config.model_type == "distilbert"
    base = f"{model.base_model_prefix}."
    mapped, dropped = {}, {}
    for name in weights:
        target = _target_name(name.removeprefix(base), prefixes)
        if target is None:
            dropped[name] = _why_dropped(name.removeprefix(base), target_class)
        else:
            mapped[target] = name
    # the heads of ELECTRA and DistilBERT hold their bias once
    if (bias := mapped.get("cls.predictions.decoder.bias")) is not None:
        mapped.setdefault("cls.predictions.bias", bias)

    absent = set(found["missing_keys"]) | {mismatch[0] for mismatch in found["mismatched_keys"]}
    task_types = [name for name in dropped if name.removeprefix(base) == _TASK_TYPE_TABLE]
    needed = sorted(absent & {*mapped.values(), *task_types})
    if needed:
        raise ValueError(
            f"{source} is no complete checkpoint of {type(model).__name__}: {len(needed)} of its weights are missing "
            f"or of another shape, such as {needed[0]}"
        )
    for name in task_types:
        weights[mapped[_TYPE_TABLE]] = weights[mapped[_TYPE_TABLE]] + weights[name][0]
    dropped = {name: reason for name, reason in dropped.items() if name not in absent}
    dropped |= {name: f"not part of {type(model).__name__}" for name in sorted(found["unexpected_keys"])}

    if config.model_type == "yoso":
        settings = {name: value for name, value in config.to_dict().items() if name not in _NOT_COPIED}
        offset = POSITION_OFFSET
    else:
        names = _DISTILBERT_SETTINGS if is_distilbert else {}
        settings = {name: getattr(config, names.get(name, name), None) for name in _COPIED_SETTINGS}
        settings |= _DISTILBERT_FIXED if is_distilbert else {}
        settings |= {name: value for name, value in vars(config).items() if name in _SENTENCE_KEYS}
        if has_yoso_attention:
            settings |= _of_yoso_config(read_settings(config))
        # also where there is no classifier yet: the one that is trained is then the original's kind
        settings["classifier_activation"] = _CLASSIFIER_ACTIVATIONS.get(config.model_type, "tanh")
        # RoBERTa's kind counts from behind the row of padding
        padding = model.base_model.embeddings.position_embeddings.padding_idx
        offset = 0 if padding is None else padding + 1
    is_softmax = config.model_type != "yoso" and not has_yoso_attention
    read = _Source(type(model).__name__, target_class, settings, weights, mapped, dropped, offset, is_softmax, model)
    if has_yoso_attention and getattr(config, "yoso_backward", None) == "exact":
        read.notes.append("the gradient of query and key becomes the lower bound's, yoso_backward was 'exact'")
    dropout_name = "classifier_dropout"
    if is_distilbert:
        read.zeros = (_TYPE_TABLE,)
        read.notes.append("types of tokens add nothing until they are trained, as DistilBERT has none")
        if has_yoso_attention:
            read.notes.append("every layer has hash functions of its own, DistilBERT's layers share theirs")
        dropout_name = _DISTILBERT_HEAD_DROPOUT.get(task, "dropout")
    dropout, head_dropout = settings["hidden_dropout_prob"], getattr(config, dropout_name, None)
    if head_dropout not in (None, dropout):
        read.notes.append(f"the head's dropout becomes {dropout}, {dropout_name} was {head_dropout}")
    return read


@contextlib.contextmanager
def _naming_damage(source: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # safetensors, torch, pickle, zipfile and json have many; what follows their first sentence is advice
        reason = f"{type(error).__name__}: {error}".partition(". ")[0]
        # also what torch says of objects that it would have to run code for
        code = ", or hold code, which is not run" if isinstance(error, pickle.UnpicklingError) else ""
        message = f"{source} cannot be read, its files may be missing, cut short or damaged{code} ({reason})"
        raise ValueError(message) from error


def _check_config(source: str, config: PreTrainedConfig) -> str:
    """Refuse what Yoso cannot hold; the task of the checkpoint's class otherwise."""
    if config.model_type not in _CLASS_PREFIXES:
        raise ValueError(
            f"{source} is of model type {config.model_type!r}; "
            f"what can be converted is {', '.join(map(repr, _CLASS_PREFIXES))}"
        )
    # a Yoso checkpoint carries this package's
    if config.model_type != "yoso" and getattr(config, "auto_map", None):
        raise ValueError(f"{source} brings code of its own (auto_map), which may compute what Yoso does not")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{source} is quantized (quantization_config): give the checkpoint that it was made of")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{source} is a decoder (is_decoder or add_cross_attention); Yoso is an encoder")
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise ValueError(
            f"{source} has position_embedding_type {positions!r}; Yoso adds positions to the embeddings (absolute)"
        )
    embedding_size = getattr(config, "embedding_size", config.hidden_size)
    if embedding_size != config.hidden_size:
        raise ValueError(
            f"{source} has embedding_size {embedding_size} and hidden_size {config.hidden_size}; "
            "Yoso's embeddings are as wide as its hidden states"
        )
    tasks = {prefix + task: task for prefix in _CLASS_PREFIXES.values() for task in _TASKS}
    architectures = config.architectures or ()
    if len(architectures) != 1 or architectures[0] not in tasks:
        raise ValueError(
            f"{source} names the architectures {config.architectures} in its config.json; "
            f"it takes one, whose name ends in {', '.join(_TASKS)}"
        )
    return tasks[architectures[0]]


def _head_prefixes(config: PreTrainedConfig, target_class: type) -> dict[str, str]:
    """What the names of a head's weights begin with, here and there."""
    if config.model_type == "yoso":
        return {prefix: prefix for prefix in ("cls.", "classifier.", "pre_classifier.", "qa_outputs.")}
    if config.model_type == "distilbert":
        if target_class is YosoForMaskedLM:
            return _DISTILBERT_MLM_PREFIXES
        if target_class is YosoForSequenceClassification:
            return {"pre_classifier.": "classifier.dense.", "classifier.": "classifier.out_proj."}
        return {prefix: prefix for prefix in ("pre_classifier.", "classifier.", "qa_outputs.")}
    if target_class is YosoForMaskedLM:
        prefixes = {"cls.predictions.": "cls.predictions."}
        # these heads have a gelu, whatever hidden_act is, and Yoso's has hidden_act
        return prefixes | _MLM_PREFIXES if config.hidden_act in _EXACT_GELU else prefixes
    if target_class is YosoForSequenceClassification and config.model_type in ("bert", "ernie"):
        return {"pooler.dense.": "classifier.dense.", "classifier.": "classifier.out_proj."}
    if target_class is YosoForMultipleChoice:
        return {}
    return {"classifier.": "classifier.", "qa_outputs.": "qa_outputs."}


def _target_name(name: str, prefixes: dict[str, str]) -> str | None:
    if name.startswith(("embeddings.", "encoder.")):
        return None if name == _TASK_TYPE_TABLE else f"yoso.{name}"
    layer = _DISTILBERT_LAYER.fullmatch(name)
    if layer is not None:
        return f"yoso.encoder.layer.{layer[1]}.{_renamed(layer[2], _DISTILBERT_LAYER_PREFIXES)}"
    return _renamed(name, prefixes)


def _renamed(name: str, prefixes: dict[str, str]) -> str | None:
    for prefix, target in prefixes.items():
        if name.startswith(prefix):
            return target + name.removeprefix(prefix)
    return None


def _why_dropped(name: str, target_class: type) -> str:
    for prefix, reason in _DROPPED_PREFIXES.items():
        if name.startswith(prefix):
            return reason
    return f"{target_class.__name__} computes its outputs otherwise"


def _read_authors(path: Path) -> _Source:
    """A file of mlpen/YOSO."""
    config_file = path.parent / "config.json"
    if not config_file.is_file():
        config_file = path.resolve().parents[1] / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{path} needs the config.json it was trained with, beside it or one directory up")
    with _naming_damage(config_file):
        config = json.loads(config_file.read_text()).get("model")
    with _naming_damage(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    weights = content.get("model_state_dict") if isinstance(content, dict) else None
    table = (weights or {}).get("model.embeddings.position_embeddings.weight")
    if not isinstance(config, dict) or table is None or "mlm.mlm_class.weight" not in weights:
        raise ValueError(f"{path} with {config_file} is no language model of mlpen/YOSO")
    _check_keys(config_file, config, _AUTHORS_SIZES)
    if config["embedding_dim"] != config["dim"] or config["num_head"] * config["head_dim"] != config["dim"]:
        raise ValueError(
            f"{path} has dim {config['dim']}, embedding_dim {config['embedding_dim']} and {config['num_head']} heads "
            f"of {config['head_dim']}; Yoso has one width, that of all heads together"
        )
    offset = len(table) - config["max_seq_len"]
    if offset not in (0, POSITION_OFFSET):
        raise ValueError(f"{path} has {len(table)} rows of positions for max_seq_len {config['max_seq_len']}")
    attention, notes = _authors_attention(path, config_file, config)

    mapped, dropped = {}, {}
    for name in weights:
        targets = _authors_targets(name, config["num_layers"])
        if targets:
            mapped |= dict.fromkeys(targets, name)
        else:
            reasons = (reason for prefix, reason in _AUTHORS_DROPPED.items() if name.startswith(prefix))
            dropped[name] = next(reasons, "Yoso has no such weight")
    settings = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["dim"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_head"],
        "intermediate_size": config["hidden_dim"],
        "hidden_dropout_prob": config["dropout_prob"],
        "attention_probs_dropout_prob": config["dropout_prob"],
        "type_vocab_size": config["num_sen_type"],
        # torch's default, which the authors' code has
        "layer_norm_eps": 1e-5,
        "conv_window": config.get("conv_window"),
    }
    if offset == 0:
        # those of the configuration's defaults are RoBERTa's
        settings |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    settings |= attention or {}
    is_softmax = attention is None
    return _Source("mlpen/YOSO", YosoForMaskedLM, settings, weights, mapped, dropped, offset, is_softmax, notes=notes)


def _check_keys(config_file: Path, config: dict[str, Any], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in config]
    if missing:
        raise ValueError(f"{config_file} has no {', '.join(missing)} among its model's settings")


def _authors_attention(
    path: Path, config_file: Path, config: dict[str, Any]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The settings of a YOSO attention, None for softmax, and what differs."""
    kind = config.get("attn_type", "softmax" if config.get("model_type") == "vanila_transformer" else None)
    if kind == "softmax":
        return None, []
    if kind in ("yoso-v1", "yoso-v1-e"):
        _check_keys(config_file, config, ["hash_code_len"])
        return {
            "hash_code_len": config["hash_code_len"],
            "num_hash": config.get("num_hash", YosoConfig.num_hash),
            "use_expectation": kind == "yoso-v1-e",
            "use_fast_hash": config.get("use_fast_hash", True),
            "lsh_backward": not config.get("n2_backward", False),
        }, []
    if kind == "yoso-v2":
        _check_keys(config_file, config, ["hashcode_len", "num_hash_f"])
        expectation = config["num_hash_f"] < 0
        notes = ["the original's kernel takes 0.98 times the cosine"] if expectation else []
        return {
            "hash_code_len": config["hashcode_len"],
            "num_hash": YosoConfig.num_hash if expectation else config["num_hash_f"],
            "use_expectation": expectation,
        }, notes
    raise ValueError(f"{path} has attn_type {kind!r}; it must be softmax, yoso-v1, yoso-v1-e or yoso-v2")


def _authors_targets(name: str, num_layers: int) -> list[str]:
    """The new names of a weight: several where layers share it, none where it has no place."""
    layer = _AUTHORS_LAYER.fullmatch(name)
    if layer is None:
        for pattern, target in _AUTHORS_NAMES:
            if re.match(pattern, name):
                renamed = re.sub(f"^{pattern}", target, name)
                # a second name of the same bias
                return [renamed] + ["cls.predictions.bias"] * (name == "mlm.mlm_class.bias")
        return []
    index = layer[1] or layer[2]
    layers = range(num_layers) if index is None else [index]
    for pattern, target in _AUTHORS_LAYER_NAMES:
        if re.match(pattern, layer[3]):
            renamed = re.sub(f"^{pattern}", target, layer[3])
            return [f"yoso.encoder.layer.{number}.{renamed}" for number in layers]
    return []


def _fill(model: YosoPreTrainedModel, read: _Source, positions: Tensor) -> list[str]:
    """Give a new model the weights that were read; the names of those that stay as they are."""
    weights = {target: read.weights[name] for target, name in read.mapped.items()}
    weights[_POSITION_TABLE] = F.pad(positions, (0, 0, POSITION_OFFSET, 0))
    own = model.state_dict()
    weights |= {name: torch.zeros_like(own[name]) for name in read.zeros}
    if model.config.tie_word_embeddings and (tied := "cls.predictions.decoder.weight") in own:
        word_embeddings = "yoso.embeddings.word_embeddings.weight"
        read.mapped.setdefault(tied, read.mapped[word_embeddings])
        weights.setdefault(tied, weights[word_embeddings])
    unfit = [name for name, weight in weights.items() if name not in own or weight.shape != own[name].shape]
    new = [name for name in own if name not in weights]
    base = [name for name in new if name.startswith("yoso.")]
    if unfit or base:
        raise ValueError(
            f"{read.architecture} does not fit {type(model).__name__}: "
            f"{len(unfit)} weights have no place of their shape, {len(base)} are missing, such as {(unfit + base)[0]}"
        )
    model.load_state_dict(weights, strict=False)
    return new


def _check_output(output_dir: Path, source: str | os.PathLike, overwrite: bool) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"output_dir must be a directory, got the file {output_dir}")
    if output_dir.resolve() == Path.cwd():
        raise ValueError(f"output_dir must not be the current directory, which is in use, got {str(output_dir)!r}")
    parent = next(path for path in output_dir.resolve().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"output_dir {output_dir} cannot be written: {parent} is no directory that takes new ones")
    if not output_dir.exists() or not any(output_dir.iterdir()):
        return
    if not overwrite:
        raise ValueError(
            f"output_dir {output_dir} is not empty: choose another one, or set overwrite (--overwrite of the script)"
        )
    if not (output_dir / "config.json").is_file():
        raise ValueError(f"output_dir {output_dir} holds files but no config.json: only a checkpoint is overwritten")
    # what lies beside a checkpoint would be lost: a repository, a training run, notes
    kept = [REPORT_FILE, "generation_config.json", "*.index.json", "*.py", "__pycache__", *MODEL_FILES]
    kept += ["chat_template*", *_SENTENCE_FILES]
    kept += [name.partition("/")[0] for name in _find_sentence_files(str(output_dir))]
    names = sorted(path.name for path in output_dir.iterdir())
    foreign = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in kept)]
    if foreign:
        raise ValueError(
            f"output_dir {output_dir} holds more than a checkpoint, {', '.join(foreign)}, which would be lost: choose "
            "another one, or move that"
        )
    if os.path.exists(source) and output_dir.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise ValueError(f"output_dir {output_dir} holds the source {source}: choose another one")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A directory to write in, which takes folder's place once all is written."""
    # a link stays, and points to what is written
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        new, old = Path(temporary) / "new", Path(temporary) / "old"
        # a directory made by tempfile is the user's alone
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
