from pathlib import Path

import pytest
import torch
import transformers
from doc_blocks import python_blocks
from tokenizers import BertWordPieceTokenizer

from yoso_hf import YosoConfig, YosoForMaskedLM, attention
from yoso_hf.data import train_tokenizer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def save_small_bert(path: str | Path, texts: list[str]) -> None:
    """A BERT with random weights and a tokenizer trained on the texts."""
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=1100, show_progress=False)
    transformers.BertTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=1100, max_position_embeddings=64, initializer_range=0.2, **sizes)
    transformers.BertModel(config).save_pretrained(path)


def test_blocks_of_the_guide_on_encoders_run(tmp_path, monkeypatch):
    """With a small model in place of the published one."""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(DOCS / "encoders.md")
    assert len(blocks) == 3
    save_small_bert(MODEL, blocks)
    names = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "encoders.md", "exec"), names)
    assert names["model"].config._attn_implementation == "yoso"
    assert [len(layer) for layer in names["fit"].hash_code_len] == [4, 4]


def test_blocks_of_the_readme_run(tmp_path, monkeypatch):
    """With small models in place of the published ones; test_hub.py runs the one that pushes."""
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in python_blocks(ROOT / "README.md") if "push_to_hub" not in block]
    assert len(blocks) == 4
    tokenizer = train_tokenizer(blocks, vocab_size=300)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer.save_pretrained("runs/quickstart/model")
    YosoForMaskedLM(YosoConfig(**sizes, max_position_embeddings=64)).save_pretrained("runs/quickstart/model")
    theirs = transformers.YosoConfig(**sizes, max_position_embeddings=64)
    transformers.YosoForMaskedLM(theirs).save_pretrained("uw-madison/yoso-4096")
    modern = transformers.ModernBertConfig(**sizes, pad_token_id=0)
    transformers.ModernBertModel(modern).save_pretrained("answerdotai/ModernBERT-base")
    transformers.RobertaModel(transformers.RobertaConfig(**sizes)).save_pretrained("FacebookAI/roberta-base")
    names = {"__name__": "readme"}
    models = []
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        models.append(names["model"])
    assert isinstance(models[1], YosoForMaskedLM)
    assert (models[1].config.use_expectation, models[1].config.num_hash) == (False, 64)
    assert models[2].config._attn_implementation == "yoso_expectation"
    torch.testing.assert_close(names["out"].norm(dim=-1), torch.ones(1, 12, 4096))


@pytest.mark.parametrize("name", ["convert_checkpoint", "run_glue", "run_mlm"])
def test_help_of_the_scripts_is_their_head(name, load_script, capsys):
    script = load_script(name)
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    assert f"\n{script.__doc__.strip()}\n" in capsys.readouterr().out


def test_help_of_the_quickstart(load_script, monkeypatch, capsys):
    """Printed, and nothing trained."""
    quickstart = load_script("quickstart")
    monkeypatch.setattr(quickstart, "pretrain", lambda _: pytest.fail("trains"))
    monkeypatch.setattr("sys.argv", ["quickstart.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        quickstart.main()
    assert ended.value.code == 0
    assert "python scripts/quickstart.py" in capsys.readouterr().out


def test_the_settings_say_where_auto_crosses_over():
    page = (DOCS / "settings.md").read_text()
    for start, tokens in (
        ("| CPU, float32", attention.EXACT_TOKENS_PER_HASH),
        ("| CPU with AMX, bfloat16", attention.EXACT_TOKENS_PER_HASH_WITH_AMX),
        ("| GPU, bfloat16 and float16", attention.EXACT_TOKENS_PER_HASH_ON_CUDA),
    ):
        (row,) = (line for line in page.splitlines() if line.startswith(start))
        lengths = [
            f" {tokens['cosine']} ({32 * tokens['cosine']}) ",
            f" {tokens['softmax']} ({64 * tokens['softmax']}) ",
        ]
        assert row.replace(",384", "384").split("|")[2:4] == lengths
