import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoTokenizer, BertTokenizer, RobertaTokenizer
from transformers.models.yoso import YosoConfig as TransformersYosoConfig

from yoso_hf import YosoConfig

# what the config.json of uw-madison/yoso-4096 says
PUBLISHED = {
    "architectures": ["YosoForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "conv_window": None,
    "eos_token_id": 2,
    "hash_code_len": 9,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "lsh_backward": True,
    "max_position_embeddings": 4096,
    "model_type": "yoso",
    "num_attention_heads": 12,
    "num_hash": 64,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "tokenizer_class": "AlbertTokenizer",
    "torch_dtype": "float32",
    "transformers_version": "4.16.0.dev0",
    "type_vocab_size": 1,
    "use_expectation": True,
    "use_fast_hash": True,
    "vocab_size": 50265,
}


def write_config(directory, **config):
    (directory / "config.json").write_text(json.dumps(config))


def test_defaults_are_those_of_transformers():
    ours, theirs = YosoConfig().to_dict(), TransformersYosoConfig().to_dict()
    assert ours.pop("hash_seed") == 0
    assert ours.pop("sparse_prediction") is False
    assert ours.pop("normalization") == "l2"
    assert ours.pop("similarity") == "cosine"
    assert ours.pop("local_window") == 0
    assert ours.pop("classifier_activation") is None
    assert ours == theirs


@pytest.mark.parametrize("use_expectation", [True, False, "auto"])
def test_published_config_loads_unchanged(use_expectation, tmp_path):
    published = {**PUBLISHED, "use_expectation": use_expectation}
    write_config(tmp_path, **published)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is YosoConfig
    not_kept = ("tokenizer_class", "torch_dtype", "transformers_version")
    for key, value in published.items():
        if key not in not_kept:
            assert getattr(config, key) == value, key


@pytest.mark.parametrize("use_expectation", [True, False, "auto"])
def test_round_trip(use_expectation, tmp_path):
    changes = {"num_hash": 17, "conv_window": 5, "hash_seed": None, "sparse_prediction": True, "num_labels": 4}
    config = YosoConfig(use_expectation=use_expectation, **changes)
    assert config.use_expectation is use_expectation
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert loaded == {**config.to_dict(), "_name_or_path": loaded["_name_or_path"]}


@pytest.mark.parametrize(
    ("given", "name", "allowed"),
    [
        ({"hash_code_len": 0}, "hash_code_len", "1..32"),
        ({"hash_code_len": 17, "use_expectation": "auto"}, "hash_code_len", "1..16"),
        ({"hash_code_len": 17, "use_expectation": False}, "hash_code_len", "1..32 with use_expectation=True"),
        ({"hash_code_len": 33}, "hash_code_len", "1..32"),
        ({"hash_code_len": [[17] * 12] * 12, "use_expectation": False}, "hash_code_len", "1..16"),
        ({"hash_code_len": [[33] * 12] * 12}, "hash_code_len", "1..32"),
        ({"hash_code_len": [[9] * 12] * 11}, "hash_code_len", "one number or 12 lists of 12"),
        ({"hash_code_len": [[9] * 12] * 11 + [[9]]}, "hash_code_len", "one number or 12 lists of 12"),
        ({"normalization": "softmax"}, "normalization", "'sum'"),
        ({"similarity": "euclidean"}, "similarity", "'softmax'"),
        ({"local_window": -1}, "local_window", "at least 0"),
        ({"num_hash": 0}, "num_hash", "at least 1"),
        ({"num_hash": -3}, "num_hash", "at least 1"),
        ({"conv_window": 4}, "conv_window", "odd"),
        ({"conv_window": 0}, "conv_window", "odd"),
        ({"conv_window": -3}, "conv_window", "odd"),
        ({"hidden_size": 770}, "hidden_size", "multiple of num_attention_heads=12"),
        ({"num_attention_heads": 0}, "num_attention_heads", "at least 1"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob", "0..1"),
        ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob", "0..1"),
        ({"hidden_act": "glue"}, "hidden_act", "gelu"),
        ({"classifier_activation": "tan"}, "classifier_activation", "tanh"),
        ({"vocab_size": 0}, "vocab_size", "at least 1"),
        ({"vocab_size": 7, "pad_token_id": 7}, "vocab_size", "pad_token_id must be below vocab_size=7, got 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "at least 1"),
        ({"intermediate_size": -1}, "intermediate_size", "at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings", "at least 1"),
        ({"type_vocab_size": 0}, "type_vocab_size", "at least 1"),
        ({"hash_seed": -1}, "hash_seed", "0..2**32 - 1"),
        ({"hash_seed": 2**32}, "hash_seed", "0..2**32 - 1"),
        ({"add_cross_attention": True}, "add_cross_attention", "False"),
        ({"num_hash": "many"}, "num_hash", "int"),
        ({"use_expectation": "always"}, "use_expectation", "'auto'"),
    ],
)
def test_value_out_of_range(given, name, allowed):
    with pytest.raises(StrictDataclassError) as error:
        YosoConfig(**given)
    assert name in str(error.value)
    assert f"got {given[name]}" in str(error.value) or f"'{given[name]}'" in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"hash_code_len": 1},
        {"hash_code_len": 32},
        {"hash_code_len": 16, "use_expectation": False},
        {"hash_code_len": [[1, 16] * 6] * 12, "use_expectation": "auto"},
        {"conv_window": 1},
        {"hash_seed": 0},
        {"hash_seed": 2**32 - 1},
        {"hidden_dropout_prob": 1, "attention_probs_dropout_prob": 0},
        {"num_hash": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "type_vocab_size": 1},
    ],
)
def test_ends_of_ranges_are_in_them(given):
    config = YosoConfig(**given)
    assert {name: getattr(config, name) for name in given} == given


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Directory with the vocab.json and merges.txt of a byte-level BPE, RoBERTa's special tokens first."""
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    text = ["the quick brown fox jumps over the lazy dog", "the dog is quicker than the fox"]
    tokenizer.train_from_iterator(text, vocab_size=300, min_frequency=1, special_tokens=special)
    directory = tmp_path_factory.mktemp("bpe")
    tokenizer.save_model(str(directory))
    return directory


def copy_files(source, target, *names):
    for name in names:
        (target / name).write_bytes((source / name).read_bytes())


@pytest.mark.parametrize("config", [{"model_type": "yoso"}, PUBLISHED], ids=["plain", "published"])
@pytest.mark.parametrize("files", ["vocab and merges", "tokenizer.json", "saved by transformers"])
def test_auto_tokenizer_is_roberta_bpe(tmp_path, bpe, config, files):
    expected = RobertaTokenizer.from_pretrained(bpe)
    if files == "vocab and merges":
        copy_files(bpe, tmp_path, "vocab.json", "merges.txt")
    else:
        expected.save_pretrained(tmp_path)
    if files == "tokenizer.json":
        (tmp_path / "tokenizer_config.json").unlink()
    write_config(tmp_path, **config)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is RobertaTokenizer
    text = " The lazy fox,\nüber 3 dogs <mask>."
    encoded = tokenizer(text, "the end")
    assert encoded == expected(text, "the end")
    assert tokenizer.decode(encoded["input_ids"]) == "<s> The lazy fox,\nüber 3 dogs <mask>.</s></s>the end</s>"
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_auto_tokenizer_keeps_the_class_of_tokenizer_config(tmp_path):
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fox", "dog"])}
    BertTokenizer(vocab=vocab).save_pretrained(tmp_path)
    write_config(tmp_path, **PUBLISHED)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is BertTokenizer
    assert tokenizer("fox dog cat")["input_ids"] == [2, 5, 6, 1, 3]
