import copy
import csv
import fnmatch
import importlib
import json
import pydoc_data.topics
import re
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertTokenizer,
    CamembertTokenizer,
    DistilBertTokenizer,
    XLMRobertaTokenizer,
)

import yoso_hf
from yoso_hf import YosoConfig, YosoForMaskedLM, YosoForSequenceClassification, conversion
from yoso_hf import attention as attention_module
from yoso_hf.conversion import compare, convert_checkpoint, lengthen_positions
from yoso_hf.data import train_tokenizer
from yoso_hf.mlm import Masking

ROOT = Path(__file__).parents[1]
TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())][:6]
POSITIONS = 24
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-6,
}
# by DistilBERT's names
DISTILBERT_SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
KINDS = {
    "bert": ("Bert", {"max_position_embeddings": POSITIONS, "type_vocab_size": 3}),
    "distilbert": ("DistilBert", {"max_position_embeddings": POSITIONS, **DISTILBERT_SIZES}),
    "electra": ("Electra", {"max_position_embeddings": POSITIONS, "type_vocab_size": 2, "embedding_size": 32}),
    "roberta": ("Roberta", {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}),
    "camembert": ("Camembert", {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}),
    "data2vec-text": ("Data2VecText", {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}),
    "ernie": ("Ernie", {"max_position_embeddings": POSITIONS, "type_vocab_size": 3, "use_task_id": True}),
}
HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
LOGITS = ("logits", "prediction_logits", "start_logits", "end_logits")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
YOSO_TABLE = "yoso.embeddings.position_embeddings.weight"
TYPE_TABLE = "yoso.embeddings.token_type_embeddings.weight"
# of ERNIE
TASK_TYPE_TABLE = "embeddings.task_type_embeddings.weight"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """No network, and a cache of data sets of its own, for this process and those it starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        for name, value in {"HF_DATASETS_CACHE": folder, "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1}.items():
            patch.setenv(name, str(value))
        yield


@pytest.fixture(scope="module")
def tokenizers():
    """One of each kind, all with pieces of a few letters."""
    byte_level = train_tokenizer(TEXTS, 300)
    letters = string.ascii_lowercase + string.digits + string.punctuation
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *letters, *("##" + letter for letter in letters), "the", "##ing", "is"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    word_piece = BertTokenizer(vocab=vocab)
    unigram = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    unigram += [("▁", -2.0), ("▁the", -2.5), *((letter, -4.0) for letter in string.ascii_letters), ("<mask>", 0.0)]
    return {
        "bert": word_piece,
        "distilbert": DistilBertTokenizer(vocab=vocab),
        "electra": word_piece,
        "roberta": byte_level,
        "xlm-roberta": XLMRobertaTokenizer(vocab=unigram),
        "camembert": CamembertTokenizer(vocab=unigram),
        "data2vec-text": byte_level,
        "ernie": word_piece,
    }


def make_config(kind, tokenizer, **changes):
    prefix, sizes = KINDS[kind]
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    settings = (
        ({} if kind == "distilbert" else SIZES)
        | sizes
        | special
        | {"vocab_size": len(tokenizer), "num_labels": 5}
        | changes
    )
    return getattr(transformers, f"{prefix}Config")(**settings)


def make_model(kind, task, tokenizer, *, uniform=True, **changes):
    """A model whose weights are all random. Without queries its attention is uniform, as is that of Yoso."""
    if task == "ForQuestionAnswering":
        changes["num_labels"] = 2
    model = getattr(transformers, KINDS[kind][0] + task)(make_config(kind, tokenizer, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
            if uniform and (".self.query." in name or ".q_lin." in name):
                parameter.zero_()
    return model


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder):
    config = YosoConfig.from_pretrained(folder)
    return getattr(yoso_hf, config.architectures[0]).from_pretrained(folder).eval()


def make_inputs(model, tokenizer):
    """Two sequences, the second padded on the right, with token types where the model has several."""
    length, vocab_size = POSITIONS - 1, model.config.vocab_size
    input_ids = torch.randint(vocab_size, (2, length))
    # RoBERTa's kind takes every padding token for padding
    input_ids[input_ids == tokenizer.pad_token_id] = tokenizer.mask_token_id
    attention_mask = torch.ones_like(input_ids)
    input_ids[1, -6:], attention_mask[1, -6:] = tokenizer.pad_token_id, 0
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if (types := getattr(model.config, "type_vocab_size", None)) is not None:
        inputs["token_type_ids"] = torch.randint(types, input_ids.shape)
    return inputs


@torch.no_grad()
def check_same_outputs(original, converted, inputs):
    before, after = (model(**inputs, output_hidden_states=True) for model in (original, converted))
    real = inputs["attention_mask"].bool()
    assert len(after.hidden_states) == len(before.hidden_states) == 3
    for expected, found in zip(before.hidden_states, after.hidden_states, strict=True):
        torch.testing.assert_close(found[real], expected[real], **CLOSE)
    logits = [getattr(before, name) for name in LOGITS if getattr(before, name, None) is not None]
    found = [getattr(after, name) for name in LOGITS if getattr(after, name, None) is not None]
    assert len(logits) == len(found) > 0
    for expected, given in zip(logits, found, strict=True):
        if expected.shape[:2] == real.shape:
            expected, given = expected[real], given[real]
        assert expected.std() > 0.05
        torch.testing.assert_close(given, expected, **CLOSE)


def check_lists(report, source, target):
    """Every weight is accounted for, once."""
    assert set(report.mapped.values()) | set(report.dropped) == set(source)
    assert not set(report.mapped.values()) & set(report.dropped)
    zeros = {TYPE_TABLE} - report.mapped.keys() if "DistilBert" in report.source_architecture else set()
    assert report.mapped.keys() | set(report.new) | zeros == target.keys()
    assert not any(target[name].any() for name in zeros)
    assert not report.mapped.keys() & set(report.new)
    tasks = [weight[0] for name, weight in source.items() if name.endswith(TASK_TYPE_TABLE)]
    for new, old in report.mapped.items():
        if new != YOSO_TABLE:
            expected = source[old] + tasks[0] if tasks and new == TYPE_TABLE else source[old]
            assert torch.equal(target[new], expected), new


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_the_original(kind, task, tokenizers, tmp_path):
    """Where both attend uniformly, all else is the same function: embeddings, layers and the head."""
    tokenizer = tokenizers[kind]
    original = make_model(kind, task, tokenizer)
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso", max_position_embeddings=3 * POSITIONS)
    converted = load(tmp_path / "yoso")
    assert type(converted).__name__ == report.architecture == "Yoso" + task
    assert report.source_architecture == type(original).__name__
    check_same_outputs(original, converted, make_inputs(original, tokenizer))
    check_lists(report, original.state_dict(), converted.state_dict())
    # what has no counterpart
    assert not report.new
    assert list(report.dropped) == [f"ernie.{TASK_TYPE_TABLE}"] * (kind == "ernie")
    assert converted.config.id2label == original.config.id2label
    assert json.loads((tmp_path / "yoso" / "conversion.json").read_text())["mapped"] == report.mapped


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_classifier_is_of_the_originals_kind(kind, tokenizers, tmp_path):
    """What is converted without one and given the original's weights computes what the original does."""
    tokenizer = tokenizers[kind]
    original = make_model(kind, "ForSequenceClassification", tokenizer)
    encoder = getattr(transformers, KINDS[kind][0] + "ForMaskedLM")(original.config)
    encoder.base_model.load_state_dict(original.base_model.state_dict(), strict=False)
    for name, model in {"classifier": original, "encoder": encoder}.items():
        save(model, tokenizer, tmp_path / name)
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}-yoso")
    model = YosoForSequenceClassification.from_pretrained(tmp_path / "encoder-yoso", num_labels=5).eval()
    model.classifier.load_state_dict(load(tmp_path / "classifier-yoso").classifier.state_dict())
    check_same_outputs(original, model, make_inputs(original, tokenizer))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "electra"])
def test_output_embeddings_tied_or_not(kind, tie, tokenizers, tmp_path):
    tokenizer = tokenizers[kind]
    original = make_model(kind, "ForMaskedLM", tokenizer, tie_word_embeddings=tie)
    save(original, tokenizer, tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    converted = load(tmp_path / "yoso")
    same = converted.get_output_embeddings().weight is converted.get_input_embeddings().weight
    assert same == converted.config.tie_word_embeddings == tie
    check_same_outputs(original, converted, make_inputs(original, tokenizer))


@pytest.mark.parametrize(("kind", "changes"), [("bert", {}), ("ernie", {"use_task_id": False})])
def test_pretraining_class(kind, changes, tokenizers, tmp_path):
    """The second head is dropped, the first one kept."""
    tokenizer = tokenizers[kind]
    original = make_model(kind, "ForPreTraining", tokenizer, **changes)
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso", texts=TEXTS[:2])
    converted = load(tmp_path / "yoso")
    assert type(converted) is YosoForMaskedLM
    check_same_outputs(original, converted, make_inputs(original, tokenizer))
    check_lists(report, original.state_dict(), converted.state_dict())
    assert {name.rpartition(".")[0]: reason for name, reason in report.dropped.items()} == {
        f"{kind}.pooler.dense": "Yoso has no pooler",
        "cls.seq_relationship": "Yoso has no head for pairs of sentences",
    }
    assert report.comparison.original_loss == pytest.approx(report.comparison.converted_loss, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "task", "changes", "dropped", "new"),
    [
        ("bert", "Model", {}, {"pooler"}, {"cls"}),
        ("roberta", "Model", {}, {"pooler"}, {"cls"}),
        ("data2vec-text", "Model", {}, {"pooler"}, {"cls"}),
        ("ernie", "Model", {}, {"pooler", "embeddings"}, {"cls"}),
        ("ernie", "Model", {"use_task_id": False}, {"pooler"}, {"cls"}),
        ("ernie", "ForMultipleChoice", {}, {"ernie", "classifier"}, {"classifier", "pre_classifier"}),
        ("electra", "ForPreTraining", {}, {"discriminator_predictions"}, {"cls"}),
        ("bert", "ForNextSentencePrediction", {}, {"bert", "cls"}, {"cls"}),
        ("bert", "ForMultipleChoice", {}, {"bert", "classifier"}, {"classifier", "pre_classifier"}),
        ("electra", "ForMultipleChoice", {}, {"sequence_summary", "classifier"}, {"classifier", "pre_classifier"}),
        # the head of these has a gelu all the same
        ("roberta", "ForMaskedLM", {"hidden_act": "relu"}, {"lm_head"}, {"cls"}),
        ("roberta", "ForMaskedLM", {"hidden_act": "gelu_new"}, {"lm_head"}, {"cls"}),
    ],
)
def test_heads_without_counterpart(kind, task, changes, dropped, new, tokenizers, tmp_path):
    """The encoder is kept, and the report says what is not."""
    tokenizer = tokenizers[kind]
    original = make_model(kind, task, tokenizer, **changes)
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    converted = load(tmp_path / "yoso")
    check_lists(report, original.state_dict(), converted.state_dict())
    assert {name.partition(".")[0] for name in report.dropped} == dropped
    assert {name.partition(".")[0] for name in report.new} == new
    inputs = make_inputs(original, tokenizer)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = original.base_model(**inputs).last_hidden_state[real]
        torch.testing.assert_close(converted.base_model(**inputs).last_hidden_state[real], expected, **CLOSE)
    output = "cls.predictions.decoder.weight"
    if converted.config.tie_word_embeddings and output in converted.state_dict():
        assert report.mapped[output].endswith("word_embeddings.weight")


@pytest.mark.parametrize(("kind", "hidden_act"), [("bert", "relu"), ("roberta", "gelu_python")])
def test_a_language_model_head_with_hidden_act(kind, hidden_act, tokenizers, tmp_path):
    """BERT's head has the activation of its layers, as Yoso's; others have a gelu, as the second has by that name."""
    original = make_model(kind, "ForMaskedLM", tokenizers[kind], hidden_act=hidden_act)
    save(original, tokenizers[kind], tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    assert not report.new
    check_same_outputs(original, load(tmp_path / "yoso"), make_inputs(original, tokenizers[kind]))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize(
    ("length", "method", "called"),
    [
        (60, "tile", "tile"),
        (61, "interpolate", "interpolate"),
        (10, "interpolate", "cut"),
        (None, "tile", "copy"),
    ],
)
def test_positions(kind, length, method, called, tokenizers, tmp_path):
    original = make_model(kind, "ForMaskedLM", tokenizers[kind])
    save(original, tokenizers[kind], tmp_path / "original")
    report = convert_checkpoint(
        tmp_path / "original", tmp_path / "yoso", max_position_embeddings=length, position_method=method
    )
    offset = 2 if kind == "roberta" else 0
    given = original.base_model.embeddings.position_embeddings.weight.detach()[offset:]
    assert len(given) == POSITIONS
    length = length or POSITIONS
    assert (report.original_positions, report.positions, report.position_method) == (POSITIONS, length, called)
    found = load_file(tmp_path / "yoso" / "model.safetensors")[YOSO_TABLE]
    assert found.shape == (length + 2, 32)
    assert not found[:2].any()
    if called == "interpolate":
        place = np.linspace(0, POSITIONS - 1, length)
        columns = [np.interp(place, np.arange(POSITIONS), column) for column in given.T.numpy()]
        np.testing.assert_allclose(found[2:].T, columns, rtol=1e-5, atol=1e-6)
    else:
        for row in range(length):
            assert torch.equal(found[2 + row], given[row % POSITIONS])
    config, tokenizer = YosoConfig.from_pretrained(tmp_path / "yoso"), AutoTokenizer.from_pretrained(tmp_path / "yoso")
    assert config.max_position_embeddings == tokenizer.model_max_length == length


def test_one_position_becomes_many():
    row = torch.randn(1, 5)
    for method in ("tile", "interpolate"):
        assert torch.equal(lengthen_positions(row, 3, method), row.expand(3, 5))
    with pytest.raises(ValueError, match="method must be one of .*, got 'tille'"):
        lengthen_positions(row, 3, "tille")


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_is_the_original_one(kind, tokenizers, tmp_path):
    tokenizer = tokenizers[kind]
    save(make_model(kind, "ForMaskedLM", tokenizer), tokenizer, tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso", max_position_embeddings=100)
    expected = AutoTokenizer.from_pretrained(tmp_path / "original")
    found = AutoTokenizer.from_pretrained(tmp_path / "yoso")
    assert type(found) is type(expected)
    pair = (TEXTS[0][:200], "The rest.")
    assert dict(found(*pair)) == dict(expected(*pair))
    assert len(set(found(*pair)["input_ids"])) > 10
    assert found.all_special_tokens == expected.all_special_tokens


def test_settings_are_carried_over(tokenizers, tmp_path):
    changes = {
        "hidden_act": "relu",
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.3,
        "classifier_dropout": 0.4,
        "initializer_range": 0.05,
        "type_vocab_size": 2,
        "pad_token_id": 3,
        "bos_token_id": 7,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "problem_type": "multi_label_classification",
        "id2label": {0: "no", 1: "yes", 2: "maybe"},
        "label2id": {"no": 0, "yes": 1, "maybe": 2},
    }
    del changes["pad_token_id"]
    original = make_model("bert", "ForSequenceClassification", tokenizers["bert"], num_labels=3, **changes)
    save(original, tokenizers["bert"], tmp_path / "original")
    report = convert_checkpoint(
        tmp_path / "original", tmp_path / "yoso", hash_code_len=9, num_hash=16, use_expectation=False
    )
    config = YosoConfig.from_pretrained(tmp_path / "yoso")
    del changes["classifier_dropout"]
    for name, value in (changes | SIZES).items():
        assert getattr(config, name) == value, name
    assert config.pad_token_id == tokenizers["bert"].pad_token_id
    assert (config.hash_code_len, config.num_hash, config.use_expectation) == (9, 16, False)
    assert (config.normalization, config.similarity, config.classifier_activation) == ("sum", "softmax", "tanh")
    assert any("classifier_dropout was 0.4" in note for note in report.notes)

    original.config.classifier_dropout = changes["hidden_dropout_prob"]
    save(original, tokenizers["bert"], tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "default")
    assert report.notes == []
    config = YosoConfig.from_pretrained(tmp_path / "default")
    assert (config.normalization, config.similarity) == ("sum", "softmax")
    settings = (config.hash_code_len, config.num_hash, config.local_window, config.use_expectation)
    assert settings == (16, 64, 0, "auto")


@torch.no_grad()
def test_multiple_choice_of_distilbert(tokenizers, tmp_path):
    """Its head has a relu, as Yoso's, where those of others have not."""
    tokenizer = tokenizers["distilbert"]
    original = make_model("distilbert", "ForMultipleChoice", tokenizer)
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    converted = load(tmp_path / "yoso")
    check_lists(report, original.state_dict(), converted.state_dict())
    assert not report.new and not report.dropped
    # two questions of three choices
    inputs = {name: x.repeat(3, 1).reshape(2, 3, -1) for name, x in make_inputs(original, tokenizer).items()}
    inputs["input_ids"] = torch.where(inputs["attention_mask"] > 0, inputs["input_ids"].roll(1, -1), 0)
    expected = original(**inputs).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(converted(**inputs).logits, expected, **CLOSE)


@pytest.mark.parametrize(
    ("task", "dropout"),
    [
        ("ForSequenceClassification", "seq_classif_dropout was 0.4"),
        ("ForQuestionAnswering", "qa_dropout was 0.5"),
        ("ForTokenClassification", None),
        ("ForMaskedLM", None),
    ],
)
def test_settings_of_distilbert_are_carried_over(task, dropout, tokenizers, tmp_path):
    changes = {
        "activation": "relu",
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "seq_classif_dropout": 0.4,
        "qa_dropout": 0.5,
        "initializer_range": 0.05,
        "sinusoidal_pos_embds": True,
    }
    tokenizer = tokenizers["distilbert"]
    original = make_model("distilbert", task, tokenizer, **changes)
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    converted = load(tmp_path / "yoso")
    check_same_outputs(original, converted, make_inputs(original, tokenizer))
    expected = {
        **{"hidden_act": "relu", "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
        **{"initializer_range": 0.05, "layer_norm_eps": 1e-12, "type_vocab_size": 2, "intermediate_size": 48},
        "classifier_activation": "relu",
    }
    assert {name: getattr(converted.config, name) for name in expected} == expected
    notes = ["types of tokens add nothing until they are trained, as DistilBERT has none"]
    assert report.notes == notes + ([f"the head's dropout becomes 0.2, {dropout}"] if dropout else [])


def test_types_of_tokens_of_distilbert_can_be_trained(tokenizers, tmp_path):
    tokenizer = tokenizers["distilbert"]
    save(make_model("distilbert", "Model", tokenizer), tokenizer, tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    model = load(tmp_path / "yoso")
    inputs = tokenizer("the", "is the", return_tensors="pt")
    assert "token_type_ids" not in inputs
    types = torch.ones_like(inputs["input_ids"])
    before, after = (model.base_model(**inputs, **more)[0] for more in ({}, {"token_type_ids": types}))
    assert torch.equal(before, after)
    after.square().sum().backward()
    table = model.get_parameter(TYPE_TABLE)
    assert table.grad[1].any() and not table.grad[0].any()


REFUSED = {
    "embedding_size": ("electra", {"embedding_size": 16}, "embedding_size 16 and hidden_size 32"),
    "relative": ("bert", {"position_embedding_type": "relative_key_query"}, "position_embedding_type"),
    "alibi": ("bert", {"position_embedding_type": "alibi"}, "'alibi'"),
    "decoder": ("roberta", {"is_decoder": True}, "decoder"),
    "cross-attention": ("bert", {"add_cross_attention": True}, "decoder"),
    "own code": ("bert", {"auto_map": {"AutoModel": "modeling.Other"}}, "auto_map"),
    "quantized": ("bert", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized"),
    "class": ("bert", {"architectures": ["BertLMHeadModel"]}, "BertLMHeadModel"),
    "no class": ("bert", {"architectures": None}, "architectures None"),
    "type": ("bert", {"model_type": "mobilebert"}, "'mobilebert'"),
    "pre-norm": ("bert", {"model_type": "xlm-roberta-xl"}, "'xlm-roberta-xl'"),
}


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_architectures(kind, changes, message, tokenizers, tmp_path):
    source = tmp_path / "original"
    tokenizers[kind].save_pretrained(source)
    config = make_config(kind, tokenizers[kind]).to_dict() | {"architectures": [KINDS[kind][0] + "Model"]} | changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_checkpoint(source, tmp_path / "yoso")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original"]


def test_an_adapter_is_no_checkpoint(tokenizers, tmp_path):
    tokenizers["bert"].save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="adapter holds an adapter of PEFT: merge it into its model"):
        convert_checkpoint(tmp_path / "adapter", tmp_path / "yoso")


@pytest.mark.parametrize("change", ["missing", "another shape"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("bert", "bert.encoder.layer.1.attention.self.key.weight"), ("ernie", f"ernie.{TASK_TYPE_TABLE}")],
)
def test_incomplete_checkpoint(kind, name, change, tokenizers, tmp_path):
    source = save(make_model(kind, "ForMaskedLM", tokenizers[kind]), tokenizers[kind], tmp_path / "original")
    weights = load_file(source / "model.safetensors")
    weights[name] = weights[name][:2].clone()
    if change == "missing":
        del weights[name]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"1 of its weights are missing or of another shape, such as {name}"):
        convert_checkpoint(source, tmp_path / "yoso")
    assert not (tmp_path / "yoso").exists()


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_checkpoint_is_named(name, kept, tokenizers, tmp_path):
    original, source = make_model("bert", "ForMaskedLM", tokenizers["bert"]), tmp_path / "original"
    save(original, tokenizers["bert"], source)
    (source / "model.safetensors").rename(source / name)
    if name == "pytorch_model.bin":
        torch.save(original.state_dict(), source / name)
    content = (source / name).read_bytes()
    (source / name).write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ValueError, match=r"original cannot be read, .* cut short or damaged \(.*Error: ") as raised:
        convert_checkpoint(source, tmp_path / "yoso")
    assert raised.value.__cause__ is not None
    assert not (tmp_path / "yoso").exists()


def test_weights_outside_the_class_are_listed(tokenizers, tmp_path):
    """A pooler that the checkpoint lacks is no loss, and a weight that its class lacks is named."""
    source = save(make_model("bert", "Model", tokenizers["bert"]), tokenizers["bert"], tmp_path / "original")
    weights = {
        name: weight for name, weight in load_file(source / "model.safetensors").items() if "pooler" not in name
    }
    weights["projection.weight"] = torch.ones(3)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    report = convert_checkpoint(source, tmp_path / "yoso")
    assert report.dropped == {"projection.weight": "not part of BertModel"}
    check_lists(report, weights, load(tmp_path / "yoso").state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_tokenizer(kind, tokenizers, tmp_path):
    """transformers would make one up."""
    source = tmp_path / "original"
    make_model(kind, "ForMaskedLM", tokenizers[kind]).save_pretrained(source)
    report = convert_checkpoint(source, tmp_path / "yoso")
    assert not [path.name for path in (tmp_path / "yoso").iterdir() if "token" in path.name or "vocab" in path.name]
    of_kind = ["types of tokens add nothing until they are trained, as DistilBERT has none"] * (kind == "distilbert")
    assert report.notes == [*of_kind, f"no tokenizer: {source} holds none"]
    for changes in ({"texts": TEXTS}, {"tokenizer_name": str(source)}):
        with pytest.raises(ValueError, match=f"{source} holds none: give another tokenizer_name"):
            convert_checkpoint(source, tmp_path / "other", **changes)
    assert not (tmp_path / "other").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_a_cross_encoder_gives_the_same_scores(name, tokenizers, tmp_path):
    """What they go through, kept in the configuration up to sentence-transformers 5, is not the default."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = make_model("bert", "ForSequenceClassification", tokenizers["bert"], num_labels=1)
    identity = "torch.nn.modules.linear.Identity"
    setattr(model.config, name, {"activation_fn": identity} if name == "sentence_transformers" else identity)
    save(model, tokenizers["bert"], tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    scores = [
        sentence_transformers.CrossEncoder(str(tmp_path / folder), device="cpu").predict([("the", "is the")])
        for folder in ("original", "yoso")
    ]
    torch.testing.assert_close(*map(torch.tensor, scores), **CLOSE)


def sentence_encoder(tokenizer, folder, longest):
    """An encoder of sentence-transformers with a module that has weights; other poolings than the usual one."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = importlib.import_module("sentence_transformers.models")
    save(make_model("bert", "Model", tokenizer), tokenizer, folder)
    encoder = sentence_transformers.SentenceTransformer(
        device="cpu",
        modules=[
            modules.Transformer(str(folder)),
            modules.Pooling(SIZES["hidden_size"], "cls"),
            modules.Dense(SIZES["hidden_size"], 7),
            modules.Normalize(),
        ],
    )
    encoder.save(str(folder))
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings | {"max_seq_length": longest}))
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("kept_in", ["its own settings", "the tokenizer"])
@pytest.mark.parametrize("length", [None, 3 * POSITIONS])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_checkpoint_of_sentence_transformers_stays_one(kept_in, length, tokenizers, tmp_path):
    original = sentence_encoder(tokenizers["bert"], tmp_path / "original", POSITIONS - 4)
    if kept_in == "the tokenizer":
        # as sentence-transformers 6 saves it
        original.save(str(tmp_path / "original"))
        assert "max_seq_length" not in (tmp_path / "original" / "sentence_bert_config.json").read_text()
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso", max_position_embeddings=length)
    assert "1_Pooling/config.json, 2_Dense/config.json, 2_Dense/model.safetensors" in report.notes[0]
    converted = type(original)(str(tmp_path / "yoso"), device="cpu")
    assert type(converted[0].auto_model) is yoso_hf.YosoModel
    settings = json.loads((tmp_path / "yoso" / "sentence_bert_config.json").read_text())
    assert ("max_seq_length" in settings) == (kept_in == "its own settings")
    short, long = "the", "is the " * 50
    assert original.max_seq_length == POSITIONS - 4
    embeddings = [encoder.encode([short, long], convert_to_tensor=True) for encoder in (original, converted)]
    torch.testing.assert_close(embeddings[0][0], embeddings[1][0], **CLOSE)
    # with its modules it is a checkpoint, and nothing more
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso", max_position_embeddings=length, overwrite=True)
    # the long text is cut where it was before, or at the new length
    assert converted.max_seq_length == (length or POSITIONS - 4)
    assert torch.allclose(embeddings[0][1], embeddings[1][1], **CLOSE) == (length is None)


@pytest.mark.parametrize("longest", [POSITIONS - 4, 1000])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_sentence_tokenizer_is_no_longer_than_the_positions(longest, tokenizers, tmp_path):
    tokenizer = copy.deepcopy(tokenizers["bert"])
    sentence_encoder(tokenizer, tmp_path / "original", POSITIONS)
    tokenizer.model_max_length = longest
    tokenizer.save_pretrained(tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    assert AutoTokenizer.from_pretrained(tmp_path / "yoso").model_max_length == min(longest, POSITIONS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_hub_checkpoint_of_sentence_transformers(tokenizers, tmp_path, monkeypatch):
    """Of the hub's files, only those that are needed are read."""
    folder = tmp_path / "hub" / "encoder"
    sentence_encoder(tokenizers["bert"], folder, POSITIONS)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("large")
    cached = tmp_path / "cached"

    def snapshot_download(source, allow_patterns):
        assert source == "hub/encoder"
        cached.mkdir(exist_ok=True)
        for file in folder.rglob("*"):
            name = file.relative_to(folder).as_posix()
            if file.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (cached / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, cached / name)
        return str(cached)

    monkeypatch.setattr(conversion, "snapshot_download", snapshot_download)
    found = conversion._find_sentence_files("hub/encoder")
    assert found == {file.relative_to(cached).as_posix(): file for file in cached.rglob("*") if file.is_file()}
    assert not {"onnx/model.onnx", "model.safetensors"} & found.keys()
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= found.keys()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([{"path": "0_BERT"}, {"path": "1_Pooling"}], "the encoder first, with an empty path, .*'0_BERT'"),
        ([{"path": ""}, {"path": "../other"}], "in folders beside it, got the paths \\['', '../other'\\]"),
        ([{"path": ""}, {"path": str(ROOT)}], "in folders beside it"),
        ([{"path": ""}, {"path": ""}], "in folders beside it"),
        ([], "modules.json cannot be read"),
    ],
)
def test_modules_that_do_not_follow_the_encoder_are_refused(modules, message, tokenizers, tmp_path):
    source = save(make_model("bert", "Model", tokenizers["bert"]), tokenizers["bert"], tmp_path / "original")
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "yoso")
    assert not (tmp_path / "yoso").exists()


def test_the_tokenizers_file_cuts_and_pads_nothing(tokenizers, tmp_path):
    """As sentence encoders' files do, at their own length."""
    tokenizer = copy.deepcopy(tokenizers["bert"])
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=4)
    save(make_model("bert", "Model", tokenizers["bert"]), tokenizer, tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso")
    # whose texts are cut at the original's length
    convert_checkpoint(tmp_path / "original", tmp_path / "compared", max_position_embeddings=100, texts=TEXTS[:1])
    for folder, counts in (("original", [4, 4]), ("yoso", [2, 9]), ("compared", [2, 9])):
        file = Tokenizer.from_file(str(tmp_path / folder / "tokenizer.json"))
        assert folder == "original" or file.truncation is None
        assert [len(file.encode("a " * count).ids) for count in (0, 7)] == counts


def test_half_precision_becomes_float32(tokenizers, tmp_path):
    original = make_model("roberta", "ForMaskedLM", tokenizers["roberta"]).to(torch.bfloat16)
    save(original, tokenizers["roberta"], tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso", texts=TEXTS[:1])
    # the original is computed in float32 too
    assert report.comparison.cosine == pytest.approx(1, abs=1e-6)
    weights = load_file(tmp_path / "yoso" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    expected = original.get_input_embeddings().weight.float()
    assert torch.equal(weights["yoso.embeddings.word_embeddings.weight"], expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "electra"])
def test_outputs_are_the_originals_where_attention_is_exact(kind, tokenizers, tmp_path):
    tokenizer = tokenizers[kind]
    original = make_model(kind, "ForMaskedLM", tokenizer, uniform=False).eval()
    save(original, tokenizer, tmp_path / "original")
    convert_checkpoint(tmp_path / "original", tmp_path / "yoso", max_position_embeddings=64)
    inputs = tokenizer(TEXTS, truncation=True, max_length=POSITIONS, padding=True, return_tensors="pt")
    inputs["attention_mask"][0, POSITIONS // 2 :] = 0
    real = inputs["attention_mask"].bool()
    converted = AutoModelForMaskedLM.from_pretrained(tmp_path / "yoso").eval()
    torch.testing.assert_close(converted(**inputs).logits[real], original(**inputs).logits[real], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_comparison(kind, tokenizers, tmp_path, monkeypatch):
    """The figures are those of the two checkpoints, computed anew."""
    # so that texts as short as these have samples
    monkeypatch.setattr(attention_module, "NUM_HEAVY_KEYS", 3)
    tokenizer = tokenizers[kind]
    source = save(make_model(kind, "ForMaskedLM", tokenizer, uniform=False), tokenizer, tmp_path / "original")
    sampled = {"use_expectation": False, "hash_code_len": 4, "num_hash": 128}
    # of two lengths
    texts = [*TEXTS, "this"]
    report = convert_checkpoint(source, tmp_path / "yoso", max_position_embeddings=64, **sampled, texts=texts)
    found = report.comparison
    models = [AutoModelForMaskedLM.from_pretrained(folder).eval() for folder in (source, tmp_path / "yoso")]
    masking = Masking(tokenizer, 0.15)
    cosines, labels, losses, hits = [], [], [[], []], [[], []]
    for index, text in enumerate(texts):
        input_ids = torch.tensor([tokenizer(text, truncation=True, max_length=POSITIONS)["input_ids"]])
        masked = masking(input_ids, [index])
        with torch.no_grad():
            states = [model.base_model(input_ids).last_hidden_state[0] for model in models]
            logits = [model(masked["input_ids"]).logits[0] for model in models]
        cosines += [(a @ b / a.norm() / b.norm()).item() for a, b in zip(*states, strict=True)]
        for place, label in enumerate(masked["labels"][0].tolist()):
            if label == -100:
                continue
            labels.append(label)
            for model in range(2):
                losses[model].append(-logits[model][place].log_softmax(-1)[label].item())
                hits[model].append(logits[model][place].argmax().item() == label)
    assert found.num_texts == len(texts) and found.num_tokens == len(cosines)
    assert POSITIONS * len(TEXTS) < len(cosines) < POSITIONS * len(texts)
    assert found.num_masked == len(losses[0]) > 10
    assert found.cosine == pytest.approx(np.mean(cosines), abs=1e-6)
    # this close, and yet not the same
    assert 0.999 < found.cosine < 0.99999
    assert found.cosine_by_layer[0] == pytest.approx(1, abs=1e-5)
    assert found.cosine_by_layer[-1] == found.cosine and len(found.cosine_by_layer) == 3
    losses_found = (found.original_loss, found.converted_loss)
    assert losses_found == pytest.approx(np.mean(losses, axis=1), rel=1e-4)
    assert losses_found[0] != pytest.approx(losses_found[1], rel=1e-4)
    assert (found.original_accuracy, found.converted_accuracy) == pytest.approx(np.mean(hits, axis=1))
    assert json.loads((tmp_path / "yoso" / "conversion.json").read_text())["comparison"] == vars(found)
    assert f"loss {found.original_loss:.3f} -> {found.converted_loss:.3f}" in str(report)
    assert f"cosine of the last hidden states {found.cosine:.4f}, {len(cosines)} tokens of" in str(report)

    # of models that train too, the second of which predicts one token everywhere
    models = [model.train() for model in models]
    models[1].get_output_embeddings().bias.data[labels[0]] += 1000
    again = compare(*models, tokenizer, texts, max_length=POSITIONS, language_model=True)
    assert again.cosine == pytest.approx(found.cosine, abs=1e-6)
    assert again.original_accuracy == found.original_accuracy
    assert again.converted_accuracy == pytest.approx(labels.count(labels[0]) / len(labels))


def test_without_a_token_for_masks_hidden_states_alone_are_compared(tokenizers, tmp_path):
    tokenizer = copy.deepcopy(tokenizers["bert"])
    tokenizer.mask_token = None
    source = save(make_model("bert", "ForMaskedLM", tokenizer), tokenizer, tmp_path / "original")
    found = convert_checkpoint(source, tmp_path / "yoso", texts=TEXTS).comparison
    assert (found.num_masked, found.original_loss) == (0, None) and found.cosine == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("similarity", ["cosine", "softmax"])
def test_a_model_that_has_yoso_attention_already(kind, similarity, tokenizers, tmp_path, monkeypatch):
    """Trained with attn_implementation="yoso": the same attention, hash functions and all, and so the same outputs."""
    # so that texts as short as these have samples
    monkeypatch.setattr(attention_module, "NUM_HEAVY_KEYS", 3)
    tokenizer = tokenizers[kind]
    attention = {
        "yoso_use_expectation": False,
        "yoso_num_hash": 8,
        "yoso_hash_code_len": 5,
        "yoso_similarity": similarity,
        "yoso_hash_seed": 7,
    }
    if similarity == "cosine":
        attention |= {"yoso_hash_code_len": [[3, 4, 5, 6], [6, 5, 4, 3]], "yoso_backward": "expectation"}
    original = make_model(kind, "ForMaskedLM", tokenizer, uniform=False, **attention)
    save(original, tokenizer, tmp_path / "original")
    length = 2 * POSITIONS
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso", max_position_embeddings=length, texts=TEXTS)
    assert report.comparison.cosine == pytest.approx(1, abs=1e-4)
    original.set_attn_implementation("yoso")
    converted = load(tmp_path / "yoso")
    check_same_outputs(original, converted, make_inputs(original, tokenizer))
    assert converted.config.lsh_backward is (similarity == "softmax")
    assert not report.notes


def test_layers_of_distilbert_get_hash_functions_of_their_own(tokenizers, tmp_path):
    tokenizer = tokenizers["distilbert"]
    attention = {"yoso_similarity": "cosine", "yoso_use_expectation": False, "yoso_hash_code_len": 3}
    original = make_model("distilbert", "ForMaskedLM", tokenizer, uniform=False, **attention)
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso", use_expectation=True)
    assert any("DistilBERT's layers share theirs" in note for note in report.notes)
    original.config.yoso_use_expectation = True
    original.set_attn_implementation("yoso")
    check_same_outputs(original, load(tmp_path / "yoso"), make_inputs(original, tokenizer))


def test_an_exact_gradient_becomes_the_lower_bound_and_is_noted(tokenizers, tmp_path):
    tokenizer = tokenizers["bert"]
    attention = {"yoso_use_expectation": True, "yoso_backward": "exact", "yoso_similarity": "cosine"}
    original = make_model("bert", "ForMaskedLM", tokenizer, uniform=False, **attention)
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "yoso", max_position_embeddings=POSITIONS)
    assert load(tmp_path / "yoso").config.lsh_backward is False
    assert report.notes == ["the gradient of query and key becomes the lower bound's, yoso_backward was 'exact'"]


def test_options_replace_the_attention_of_a_yoso_model(tokenizers, tmp_path):
    """That of cosine similarity takes them all."""
    tokenizer = tokenizers["roberta"]
    config = YosoConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=POSITIONS)
    source = save(YosoForMaskedLM(config), tokenizer, tmp_path / "original")
    options = {"hash_code_len": 5, "num_hash": 8, "local_window": 3, "use_expectation": False}
    convert_checkpoint(source, tmp_path / "yoso", **options)
    expected = YosoConfig.from_pretrained(source)
    expected.update(options)
    assert load(tmp_path / "yoso").config.to_diff_dict() == expected.to_diff_dict()


@pytest.mark.parametrize("use_expectation", [None, "auto", False])
def test_samples_of_a_softmax_model_have_no_window(use_expectation, tokenizers, tmp_path):
    tokenizer = tokenizers["bert"]
    source = save(make_model("bert", "ForMaskedLM", tokenizer), tokenizer, tmp_path / "original")
    with pytest.raises(StrictDataclassError, match='similarity="softmax" .* needs one hash_code_len, local_window=0'):
        convert_checkpoint(source, tmp_path / "yoso", local_window=3, use_expectation=use_expectation)
    assert not (tmp_path / "yoso").exists()
    convert_checkpoint(source, tmp_path / "yoso", local_window=3, use_expectation=True)
    assert load(tmp_path / "yoso").config.local_window == 3


def test_a_yoso_checkpoint_becomes_longer(tokenizers, tmp_path):
    """Its own attention stays: within the old length nothing changes."""
    tokenizer = tokenizers["roberta"]
    config = YosoConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS,
        use_expectation=False,
        num_hash=8,
        hash_code_len=5,
        conv_window=3,
        num_labels=3,
    )
    original = yoso_hf.YosoForMultipleChoice(config).eval()
    save(original, tokenizer, tmp_path / "original")
    report = convert_checkpoint(tmp_path / "original", tmp_path / "longer", max_position_embeddings=50, texts=TEXTS)
    longer = load(tmp_path / "longer")
    changed = longer.config.to_diff_dict().items() ^ original.config.to_diff_dict().items()
    assert {name for name, _ in changed} <= {"max_position_embeddings", "auto_map"}
    assert report.comparison.cosine == pytest.approx(1, abs=1e-5)
    assert not report.new and not report.dropped
    inputs = {name: tensor[:, None] for name, tensor in make_inputs(original, tokenizer).items()}
    with torch.no_grad():
        torch.testing.assert_close(longer(**inputs).logits, original(**inputs).logits)


def authors_weights(*, layers, offset, style, conv):
    """Weights under the names of the authors' code ("code"), of its variant with one layer's weights for all
    ("shared"), or of the models published from it ("published")."""
    width, names = 32, {}
    ff = ("ff1", "ff2") if style == "published" else ("ff.0", "ff.2")
    parts = {f"mha.W_{letter}": (width, width) for letter in "qkv"} | {"mha.ff": (width, width)}
    parts |= {"norm1": (width,), ff[0]: (48, width), ff[1]: (width, 48), "norm2": (width,)}
    places = {
        "code": [f"model.backbone.backbone.encoders.{layer}" for layer in range(layers)],
        "shared": ["model.backbone.backbone.encoder"],
        "published": [f"model.transformer_{layer}" for layer in range(layers)],
    }[style]
    for place in places:
        for part, shape in parts.items():
            names[f"{place}.{part}.weight"], names[f"{place}.{part}.bias"] = shape, shape[:1]
        if conv:
            names[f"{place}.mha.attn.conv.weight"] = (4, 1, 3, 1)
    embeddings = {"word": (40, width), "position": (POSITIONS + offset, width), "token_type": (2, width)}
    names |= {f"model.embeddings.{name}_embeddings.weight": shape for name, shape in embeddings.items()}
    for name, rows in {"model.embeddings.norm": None, "mlm.dense": width, "mlm.norm": None, "model.pooler": 7}.items():
        names[f"{name}.weight"], names[f"{name}.bias"] = (rows, width) if rows else (width,), (rows or width,)
    names |= {"mlm.mlm_class.bias": (40,), "sen_class.weight": (2, 7), "sen_class.bias": (2,)}
    weights = {name: torch.randn(shape) * 0.3 for name, shape in names.items()}
    for name in weights:
        if ".W_q." in name:
            weights[name].zero_()
    weights["mlm.mlm_class.weight"] = weights["model.embeddings.word_embeddings.weight"]
    return weights, places * layers if style == "shared" else places, ff


def authors_logits(weights, places, ff, offset, attention, conv, input_ids):
    """The authors' model, written from its structure: post-norm layers, LayerNorm with torch's default epsilon."""

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    length = input_ids.shape[1]
    table = {
        name: weights[f"model.embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    }
    x = table["word"][input_ids] + table["position"][offset : offset + length] + table["token_type"][0]
    x = norm("model.embeddings.norm", x)
    for place in places:
        heads = linear(f"{place}.mha.W_v", x).view(1, length, 4, 8).transpose(1, 2)
        # without queries every key counts the same
        mixed = heads.mean(dim=2, keepdim=True).expand_as(heads)
        if attention != "softmax":
            mixed = F.normalize(mixed, dim=-1)
        if conv:
            mixed = mixed + F.conv2d(heads, weights[f"{place}.mha.attn.conv.weight"], padding=(1, 0), groups=4)
        x = norm(f"{place}.norm1", x + linear(f"{place}.mha.ff", mixed.transpose(1, 2).flatten(2)))
        x = norm(f"{place}.norm2", x + linear(f"{place}.{ff[1]}", F.gelu(linear(f"{place}.{ff[0]}", x))))
    return linear("mlm.mlm_class", norm("mlm.norm", F.gelu(linear("mlm.dense", x))))


AUTHORS_CONFIG = {
    "vocab_size": 40,
    "num_sen_type": 2,
    "max_seq_len": POSITIONS,
    "num_layers": 2,
    "dropout_prob": 0.2,
    "embedding_dim": 32,
    "dim": 32,
    "hidden_dim": 48,
    "num_head": 4,
    "head_dim": 8,
}
AUTHORS = {
    "RoBERTa, sampled": (
        "code",
        2,
        {"attn_type": "yoso-v1", "num_hash": 8, "hash_code_len": 5, "n2_backward": True, "use_fast_hash": False},
        False,
    ),
    "RoBERTa, published": ("published", 2, {"attn_type": "yoso-v1-e", "hash_code_len": 5}, False),
    "BERT, shared layers": ("shared", 0, {"attn_type": "yoso-v1-e", "hash_code_len": 5}, False),
    "with convolution": ("code", 0, {"attn_type": "yoso-v2", "num_hash_f": 8, "hashcode_len": 5}, True),
    "the exact kernel": ("code", 0, {"attn_type": "yoso-v2", "num_hash_f": -1, "hashcode_len": 5}, False),
    "softmax": ("code", 2, {"attn_type": "softmax"}, False),
    "softmax, named otherwise": ("code", 2, {"model_type": "vanila_transformer"}, False),
}


@pytest.mark.parametrize(("style", "offset", "attention", "conv"), AUTHORS.values(), ids=AUTHORS)
def test_checkpoints_of_the_authors(style, offset, attention, conv, tmp_path, monkeypatch):
    config = AUTHORS_CONFIG | attention
    if conv:
        config["conv_window"] = 3
    weights, places, ff = authors_weights(layers=2, offset=offset, style=style, conv=conv)
    path = tmp_path / "small" / "model" / "cp-0003.model"
    path.parent.mkdir(parents=True)
    torch.save({"model_state_dict": weights}, path)
    (tmp_path / "small" / "config.json").write_text(json.dumps({"model": config}))
    with pytest.raises(ValueError, match="texts need a tokenizer, and .*cp-0003.model holds none"):
        convert_checkpoint(path, tmp_path / "yoso", texts=TEXTS)
    monkeypatch.chdir(path.parent)
    report = convert_checkpoint(path.name, tmp_path / "yoso", max_position_embeddings=2 * POSITIONS)
    model = load(tmp_path / "yoso")
    check_lists(report, weights, model.state_dict())
    assert {name.rpartition(".")[0] for name in report.dropped} == {"model.pooler", "sen_class"}
    kind = attention.get("attn_type", "softmax")
    is_exact = kind == "yoso-v1-e" or attention.get("num_hash_f") == -1
    notes = ["the original's kernel takes 0.98 times the cosine"] if kind == "yoso-v2" and is_exact else []
    assert not report.new and report.notes == [*notes, f"no tokenizer: {path.name} holds none"]
    if kind == "softmax":
        assert (model.config.normalization, model.config.hash_code_len) == ("sum", 16)
    else:
        assert model.config.use_expectation is is_exact
        assert (model.config.hash_code_len, model.config.num_hash) == (5, YosoConfig.num_hash if is_exact else 8)
    assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.2
    assert model.config.lsh_backward is not attention.get("n2_backward", False)
    assert model.config.use_fast_hash is attention.get("use_fast_hash", True)
    assert model.config.pad_token_id == (1 if offset else None)
    # that of torch, which the authors left as it is
    assert model.config.layer_norm_eps == 1e-5

    # the exact kernel, which the sampled one estimates
    exact = YosoForMaskedLM.from_pretrained(tmp_path / "yoso", use_expectation=True).eval()
    input_ids = torch.randint(40, (1, POSITIONS))
    expected = authors_logits(weights, places, ff, offset, kind, conv, input_ids)
    with torch.no_grad():
        torch.testing.assert_close(exact(input_ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offset", [0, 2])
def test_a_tokenizer_for_a_file_of_the_authors(offset, tmp_path):
    """The configuration's special tokens are the tokenizer's."""
    weights, _, _ = authors_weights(layers=1, offset=offset, style="code", conv=False)
    torch.save({"model_state_dict": weights}, tmp_path / "cp.model")
    config = AUTHORS_CONFIG | {"num_layers": 1, "attn_type": "softmax"}
    (tmp_path / "config.json").write_text(json.dumps({"model": config}))
    pieces = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "[PAD]", "[MASK]"]
    tokenizer = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    report = convert_checkpoint(tmp_path / "cp.model", tmp_path / "yoso", tokenizer_name=str(tmp_path / "tokenizer"))
    config = load(tmp_path / "yoso").config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (5, None, None)
    assert AutoTokenizer.from_pretrained(tmp_path / "yoso").get_vocab() == tokenizer.get_vocab()
    assert not report.notes


def test_code_in_a_file_of_the_authors_is_not_run(tmp_path):
    class Code:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    weights, _, _ = authors_weights(layers=1, offset=0, style="code", conv=False)
    torch.save({"model_state_dict": weights, "code": Code()}, tmp_path / "cp.model")
    (tmp_path / "config.json").write_text(json.dumps({"model": AUTHORS_CONFIG | {"num_layers": 1}}))
    message = r"cp.model cannot be read, .* hold code, which is not run \(UnpicklingError: "
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "cp.model", tmp_path / "yoso")
    assert not (tmp_path / "ran").exists()


def test_authors_files_that_do_not_fit(tmp_path):
    weights, _, _ = authors_weights(layers=1, offset=0, style="code", conv=False)
    path = tmp_path / "cp.model"
    torch.save({"model_state_dict": weights}, path)
    with pytest.raises(ValueError, match="needs the config.json"):
        convert_checkpoint(path, tmp_path / "yoso")
    sizes = AUTHORS_CONFIG | {"num_layers": 1}
    for change, message in (
        ({"attn_type": "linformer"}, "'linformer'"),
        ({"attn_type": "yoso-v1"}, "config.json has no hash_code_len among"),
        ({"attn_type": "yoso-v2", "num_hash_f": 8}, "config.json has no hashcode_len among"),
        ({"embedding_dim": 16}, "embedding_dim 16"),
        ({"head_dim": 16}, "4 heads of 16"),
        ({"max_seq_len": 7}, "rows of positions"),
        ({"attn_type": "softmax", "num_layers": 2}, "0 weights have no place of their shape, 16 are missing, such as"),
        ({"attn_type": "softmax", "hidden_dim": 40}, "3 weights have no place of their shape, 0 are missing, such as"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model": sizes | change}))
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(path, tmp_path / "yoso")
    del sizes["embedding_dim"], sizes["num_sen_type"]
    (tmp_path / "config.json").write_text(json.dumps({"model": sizes}))
    with pytest.raises(ValueError, match="config.json has no embedding_dim, num_sen_type among"):
        convert_checkpoint(path, tmp_path / "yoso")
    # one of the LRA tasks
    (tmp_path / "config.json").write_text(json.dumps({"listops": {"model": sizes}}))
    with pytest.raises(ValueError, match="no language model of mlpen/YOSO"):
        convert_checkpoint(path, tmp_path / "yoso")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cp.model cannot be read, .* cut short or damaged \(.*Error: "):
        convert_checkpoint(path, tmp_path / "yoso")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read, .* cut short or damaged \(JSONDecodeError: "):
        convert_checkpoint(path, tmp_path / "yoso")
    assert not (tmp_path / "yoso").exists()


def test_nothing_is_half_written(tokenizers, tmp_path, monkeypatch):
    source = save(make_model("bert", "Model", tokenizers["bert"]), tokenizers["bert"], tmp_path / "original")
    output = tmp_path / "yoso"
    convert_checkpoint(source, output)
    (output / "vocab.txt").write_text("of another tokenizer")
    before = {path.name: path.read_bytes() for path in output.iterdir()}

    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", fail)
        for target in (output, tmp_path / "new"):
            with pytest.raises(OSError, match="disk full"):
                convert_checkpoint(source, target, max_position_embeddings=7, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "yoso"]
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before

    rename = Path.rename

    def fail_at_last(self, target):
        if self.name == "new":
            raise OSError("disk full")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_at_last)
        with pytest.raises(OSError, match="disk full"):
            convert_checkpoint(source, output, max_position_embeddings=7, overwrite=True)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before

    with pytest.raises(ValueError, match="is not empty"):
        convert_checkpoint(source, output)
    # as of a tokenizer that has one
    (output / "chat_template.jinja").write_text("{{ messages }}")
    convert_checkpoint(source, output, max_position_embeddings=7, overwrite=True)
    assert YosoConfig.from_pretrained(output).max_position_embeddings == 7
    assert not (output / "vocab.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "yoso"]


def test_only_a_checkpoint_is_overwritten(tokenizers, tmp_path):
    """Not what lies beside one in a clone of a repository, or in the directory of a training run."""
    source = save(make_model("bert", "Model", tokenizers["bert"]), tokenizers["bert"], tmp_path / "original")
    convert_checkpoint(source, tmp_path / "yoso")
    # which other models have in theirs
    (tmp_path / "yoso" / "generation_config.json").write_text("{}")
    convert_checkpoint(source, tmp_path / "yoso", overwrite=True)
    for name in (".git/HEAD", "checkpoint-100/optimizer.pt", "README.md"):
        (tmp_path / "yoso" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "yoso" / name).write_text("mine")
    before = {path: path.read_bytes() for path in (tmp_path / "yoso").rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match="more than a checkpoint, .git, README.md, checkpoint-100, which would be lost"
    ):
        convert_checkpoint(source, tmp_path / "yoso", overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "yoso").rglob("*") if path.is_file()} == before


def test_a_link_to_a_directory_stays(tokenizers, tmp_path):
    source = save(make_model("bert", "Model", tokenizers["bert"]), tokenizers["bert"], tmp_path / "original")
    (tmp_path / "large disk").mkdir()
    (tmp_path / "yoso").symlink_to("large disk")
    for overwrite in (False, True):
        convert_checkpoint(source, tmp_path / "yoso", overwrite=overwrite)
        assert (tmp_path / "yoso").is_symlink()
        assert (tmp_path / "large disk" / "model.safetensors").is_file()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["large disk", "original", "yoso"]


def test_refused_arguments(tokenizers, tmp_path, monkeypatch):
    source = save(make_model("bert", "Model", tokenizers["bert"]), tokenizers["bert"], tmp_path / "original")
    kept = {path.name: path.read_bytes() for path in source.iterdir()}
    for target in (source, tmp_path):
        with pytest.raises(ValueError, match="holds the source|no config.json"):
            convert_checkpoint(source, target, overwrite=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("not a checkpoint")
    with pytest.raises(ValueError, match="no config.json"):
        convert_checkpoint(source, tmp_path / "notes", overwrite=True)
    with pytest.raises(ValueError, match="got the file"):
        convert_checkpoint(source, tmp_path / "notes" / "mine.txt")
    with pytest.raises(ValueError, match="yoso cannot be written: .*mine.txt is no directory"):
        convert_checkpoint("not looked for", tmp_path / "notes" / "mine.txt" / "models" / "yoso")
    with pytest.raises(ValueError, match="there is no file or directory models/small/cp-1.model, which is no name"):
        convert_checkpoint("models/small/cp-1.model", tmp_path / "yoso")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Unrecognized model in .*empty"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "yoso")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "empty")
        with pytest.raises(ValueError, match="output_dir must not be the current directory, .*, got '.'"):
            convert_checkpoint(source, ".")
    with pytest.raises(ValueError, match="max_position_embeddings must be at least 1, got 0"):
        convert_checkpoint(source, tmp_path / "yoso", max_position_embeddings=0)
    with pytest.raises(ValueError, match="max_position_embeddings must be an integer, got '512'"):
        convert_checkpoint(source, tmp_path / "yoso", max_position_embeddings="512")
    with pytest.raises(ValueError, match="max_position_embeddings must be at least 3 for texts, got 2"):
        convert_checkpoint(source, tmp_path / "yoso", max_position_embeddings=2, texts=["one text"])
    with pytest.raises(ValueError, match="position_method must be one of"):
        convert_checkpoint(source, tmp_path / "yoso", position_method="stretch")
    for given in ([], "one text"):
        with pytest.raises(ValueError, match="^texts must be None or a sequence of at least one text, got"):
            convert_checkpoint(source, tmp_path / "yoso", texts=given)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == kept
    assert not (tmp_path / "yoso").exists()
    report = convert_checkpoint(source, tmp_path / "yoso", max_position_embeddings=3, texts=["one text"])
    assert report.comparison.num_tokens == 3


@pytest.fixture
def commands(tokenizers, tmp_path, monkeypatch):
    """A directory in which the commands of the guide and of the script find small files under the names they use."""
    monkeypatch.chdir(tmp_path)
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    tokenizer = tokenizers["roberta"]
    save(make_model("roberta", "ForMaskedLM", tokenizer), tokenizer, tmp_path / "FacebookAI" / "roberta-base")
    (tmp_path / "documents").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 2)
    (tmp_path / "documents" / "topics.jsonl").write_text(lines)
    for name in ("train", "validation"):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *((text, i % 2) for i, text in enumerate(TEXTS))])
    weights, _, _ = authors_weights(layers=1, offset=2, style="code", conv=False)
    words = "model.embeddings.word_embeddings.weight"
    weights[words] = weights["mlm.mlm_class.weight"] = torch.randn(300, 32)
    weights["mlm.mlm_class.bias"] = torch.zeros(300)
    folder = tmp_path / "models" / "yoso-v1-32-small" / "model"
    folder.mkdir(parents=True)
    torch.save({"model_state_dict": weights}, folder / "cp-0249.model")
    attention = {"attn_type": "yoso-v1", "num_hash": 8, "hash_code_len": 5}
    config = AUTHORS_CONFIG | attention | {"num_layers": 1, "vocab_size": 300}
    (folder.parent / "config.json").write_text(json.dumps({"model": config}))
    config = YosoConfig(**SIZES, vocab_size=300, max_position_embeddings=POSITIONS)
    save(YosoForMaskedLM(config), tokenizer, tmp_path / "uw-madison" / "yoso-4096")
    return tmp_path


def small(command):
    """The words of a command as it is written, but for "python", with lengths and steps that suit the small models."""
    command = re.sub(r" 4096\b", " 64", command.replace("\\\n", "")).replace(" 8192", " 100").replace(" 1000", " 3")
    words = shlex.split(command)
    assert words[0] == "python"
    if not words[1].endswith("convert_checkpoint.py"):
        words += ["--use_cpu", "--disable_tqdm=true"]
    return words[1:]


def run(command):
    done = subprocess.run([sys.executable, *small(command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_guide(commands):
    """Its commands, in their order."""
    blocks = re.findall(r"```(python|bash)\n(.*?)```", (ROOT / "docs" / "conversion.md").read_text(), re.DOTALL)
    assert [language for language, _ in blocks] == ["bash", "python", "bash", "bash", "python", "bash"]
    printed, names = [], {}
    for language, text in blocks:
        if language == "bash":
            printed.append(run(text))
        else:
            exec(text, names)
    assert "RobertaForMaskedLM -> YosoForMaskedLM" in printed[0]
    assert type(names["model"]) is YosoForMaskedLM and names["tokenizer"].mask_token
    # further training at more than twice the original's length
    converted, continued = (commands / "runs" / name for name in ("roberta-4096", "roberta-4096-continued"))
    results = json.loads((continued / "all_results.json").read_text())
    assert results["train_tokens_per_second"] > 0 and results["eval_loss"] > 0
    before, after = (load(folder).state_dict() for folder in (converted, continued))
    changed = (before[YOSO_TABLE] != after[YOSO_TABLE]).any(dim=1)
    assert before.keys() == after.keys()
    assert not changed[:2].any() and changed[2 + POSITIONS :].all()
    assert AutoTokenizer.from_pretrained(continued).model_max_length == 64
    classifier = YosoForSequenceClassification.from_pretrained(commands / "runs" / "classifier-4096")
    assert (classifier.config.num_labels, classifier.config.classifier_activation) == (2, "tanh")
    words = "embeddings.word_embeddings.weight"
    assert not torch.equal(classifier.yoso.get_parameter(words), load(continued).yoso.get_parameter(words))
    config = load(commands / "runs" / "yoso-small").config
    assert (config.num_hash, config.pad_token_id, config.eos_token_id) == (8, 1, 2)
    assert len(AutoTokenizer.from_pretrained(commands / "runs" / "yoso-small")) <= 300


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("convert_checkpoint")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("blank.txt", b" \n\n\t\n", "holds no documents"),
        ("blank.jsonl", b'{"text": " "}\n{"text": null}\n', "holds no texts, only blank ones"),
        ("latin.txt", "café".encode("latin-1"), "cannot be read: .*'utf-8' codec can't decode"),
        ("cut.jsonl", b'{"te', "cannot be read.*: .*JSON"),
    ],
)
def test_files_without_usable_texts_are_refused(script, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    values = ["--model_name_or_path=none", f"--output_dir={tmp_path / 'yoso'}", f"--text_file={tmp_path / name}"]
    with pytest.raises(ValueError, match=f"^--text_file {tmp_path / name} {message}"):
        script.main(values)
    assert not (tmp_path / "yoso").exists()


def test_commands_of_the_script(script, commands, capsys):
    """Those of its docstring; the options that they leave out reach the conversion as well."""
    lines = [line.strip() for line in script.__doc__.replace("\\\n", "").splitlines()]
    lines = [line for line in lines if line.startswith("python scripts/convert_checkpoint.py")]
    assert len(lines) == 3
    for line in lines:
        script.main(small(line)[1:])
        out = capsys.readouterr().out
        assert "checkpoint and conversion.json: runs/" in out and "import yoso_hf" in out
    assert load(commands / "runs" / "yoso-8192").config.max_position_embeddings == 100
    with pytest.raises(ValueError, match="is not empty"):
        script.main(small(lines[0])[1:])
    options = "--hash_code_len 7 --num_hash 9 --local_window 5 --use_expectation true"
    script.main(small(f"{lines[0]} {options} --max_texts 2 --overwrite")[1:])
    config = YosoConfig.from_pretrained(commands / "runs" / "roberta-4096")
    settings = (config.hash_code_len, config.num_hash, config.local_window, config.use_expectation)
    assert settings == (7, 9, 5, True)
    report = json.loads((commands / "runs" / "roberta-4096" / "conversion.json").read_text())
    assert report["comparison"]["num_texts"] == 2


def test_options_of_the_script_reach_the_conversion(script, monkeypatch):
    given = []
    monkeypatch.setattr(script, "convert_checkpoint", lambda *places, **options: given.append((*places, options)))
    options = {
        "max_position_embeddings": 100,
        "position_method": "interpolate",
        "hash_code_len": 7,
        "num_hash": 9,
        "local_window": 5,
        "tokenizer_name": "another",
        "use_expectation": False,
        "overwrite": True,
    }
    places = ["--model_name_or_path=none", "--output_dir=out"]
    script.main([*places, *(f"--{name}={str(value).lower()}" for name, value in options.items())])
    script.main(places)
    defaults = dict.fromkeys(options) | {"position_method": "tile", "overwrite": False}
    for call, expected in zip(given, (options, defaults), strict=True):
        assert call == ("none", "out", expected | {"texts": None})
    for word, value in (("true", True), ("auto", "auto")):
        script.main([*places, f"--use_expectation={word}"])
        assert given[-1][-1]["use_expectation"] == value


def test_texts_of_the_script(script, tmp_path, monkeypatch):
    """Which texts of a file the outputs are compared on."""
    given = []
    monkeypatch.setattr(script, "convert_checkpoint", lambda *_, texts, **__: given.append(texts))
    (tmp_path / "lines.txt").write_text("one\ntwo\n\n  \nthree\n")
    (tmp_path / "rows.jsonl").write_text('{"body": "one"}\n{"body": "  "}\n{"body": "two"}\n')
    values = ["--model_name_or_path=none", f"--output_dir={tmp_path / 'yoso'}"]
    script.main(values)
    for options in (["lines.txt"], ["lines.txt", "--document=line"], ["rows.jsonl", "--text_column=body"]):
        script.main([*values, f"--text_file={tmp_path / options[0]}", *options[1:]])
    assert given == [None, ["one\ntwo", "three"], ["one", "two", "three"], ["one", "two"]]
    with pytest.raises(ValueError, match="--max_texts must be at least 1, got 0"):
        script.main([*values, "--max_texts=0"])


def test_new_weights_of_the_script_are_the_same_every_time(script, tokenizers, tmp_path):
    source = save(make_model("bert", "Model", tokenizers["bert"]), tokenizers["bert"], tmp_path / "original")
    for name in ("one", "other"):
        script.main([f"--model_name_or_path={source}", f"--output_dir={tmp_path / name}"])
    one, other = (load(tmp_path / name).state_dict() for name in ("one", "other"))
    assert one["cls.predictions.transform.dense.weight"].std() > 0
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name
