from pathlib import Path

import transformers
from doc_blocks import python_blocks
from tokenizers import BertWordPieceTokenizer

DOCS = Path(__file__).parents[1] / "docs"
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
