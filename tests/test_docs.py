import shutil
from pathlib import Path

import transformers
from doc_blocks import python_blocks
from tokenizers import BertWordPieceTokenizer

DOCS = Path(__file__).parents[1] / "docs"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def test_blocks_of_the_guide_on_encoders_run(tmp_path, monkeypatch):
    """With a small model in place of the published one."""
    monkeypatch.chdir(tmp_path)
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(python_blocks(DOCS / "encoders.md"), vocab_size=300, show_progress=False)
    transformers.BertTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(MODEL)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    transformers.BertModel(transformers.BertConfig(vocab_size=300, **sizes)).save_pretrained(MODEL)
    blocks = python_blocks(DOCS / "encoders.md")
    assert len(blocks) == 3
    names = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "encoders.md", "exec"), names)
    assert names["model"].config._attn_implementation == "yoso"
    assert [len(layer) for layer in names["fit"].hash_code_len] == [4, 4]
    shutil.rmtree(MODEL)
