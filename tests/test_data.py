import bz2
import copy
import gzip
import json
import logging
import lzma
import math
import os
from decimal import Decimal

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset, load_dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from yoso_hf import data
from yoso_hf.data import (
    find_files,
    iterate_texts,
    pack_dataset,
    pack_documents,
    read_files,
    select_text,
    split_documents,
    train_tokenizer,
)

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "seven", "dogs", "ran", "12", "birds;", "naïve", "café."]


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 60 words, with None and blank ones among them."""
    generator = np.random.default_rng(seed)
    documents = [" ".join(generator.choice(WORDS, generator.integers(1, 61))) for _ in range(count)]
    return [[text, text, text, None, " \n"][index % 5] for index, text in enumerate(documents)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(200), 320)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def stream_of_tokens(documents: list[str | None], tokenizer) -> list[int]:
    """All documents one by one, each between <s> and </s>."""
    stream = []
    for text in documents:
        if text and text.strip():
            stream += [0, *tokenizer.encode(text, add_special_tokens=False), 2]
    return stream


@pytest.mark.parametrize("block_size", [1, 7, 64, 4096])
@pytest.mark.parametrize("characters_at_once", [1, 500, 2**20])
def test_blocks_are_slices_of_all_documents_in_a_row(tokenizer, block_size, characters_at_once, monkeypatch):
    monkeypatch.setattr(data, "_CHARACTERS_AT_ONCE", characters_at_once)
    documents = texts(200, seed=1)
    blocks = list(pack_documents(documents, tokenizer, block_size))
    stream = stream_of_tokens(documents, tokenizer)
    assert len(blocks) == len(stream) // block_size > 0
    assert np.concatenate(blocks).tolist() == stream[: len(blocks) * block_size]
    assert {(block.dtype, block.shape) for block in blocks} == {(np.dtype(np.int32), (block_size,))}


def test_streamed_blocks_equal_stored_ones(tokenizer):
    documents = Dataset.from_dict({"text": texts(150)})
    stored = pack_dataset(documents, tokenizer, 32, "--train_file")
    streamed = pack_dataset(documents.to_iterable_dataset(), tokenizer, 32, "--train_file")
    assert isinstance(stored, Dataset) and isinstance(streamed, IterableDataset)
    stream = stream_of_tokens(texts(150), tokenizer)
    assert np.concatenate(stored["input_ids"]).tolist() == stream[: len(stream) // 32 * 32]
    assert [list(row["input_ids"]) for row in streamed] == stored.to_dict()["input_ids"]
    assert stored.features["input_ids"].feature.dtype == "int32"


def test_a_streamed_corpus_takes_one_worker(tokenizer, tmp_path):
    """datasets would give each of several only a part of the files, and drop the others."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name} the cat sat on a mat\n\n" * 50)
    documents = read_files(find_files([str(tmp_path / "*.txt")], "--train_file"), "--train_file", streaming=True)
    blocks = pack_dataset(documents, tokenizer, 32, "--train_file").with_format("torch")
    expected = [row["input_ids"].tolist() for row in blocks]
    found = [row["input_ids"].tolist() for row in DataLoader(blocks, batch_size=None, num_workers=1)]
    assert found == expected
    with pytest.raises(ValueError, match="a streamed corpus takes one data loader worker at most, got 2"):
        list(DataLoader(blocks, batch_size=None, num_workers=2))


def test_blocks_are_made_once(tokenizer, monkeypatch, tmp_path):
    """Found again for the same documents, tokenizer and block size; made anew when one of them changes."""
    made = 0

    def counted(*arguments):
        nonlocal made
        for block in pack_documents(*arguments):
            made += 1
            yield block

    monkeypatch.setattr(data, "pack_documents", counted)

    def read(count: int):
        path = tmp_path / "corpus.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count)))
        return read_files([str(path)], "--train_file")

    def blocks_made(documents, tokenizer, block_size):
        nonlocal made
        made = 0
        count = len(pack_dataset(documents, tokenizer, block_size, "--train_file"))
        # one is made each time, to see whether there is any
        return count, made - 1

    first, anew = blocks_made(read(100), tokenizer, 32)
    assert first == anew > 10
    assert blocks_made(read_files([str(tmp_path / "corpus.jsonl")], "--train_file"), tokenizer, 32) == (first, 0)
    reloaded = tmp_path / "tokenizer"
    tokenizer.save_pretrained(reloaded)
    again = read_files([str(tmp_path / "corpus.jsonl")], "--train_file")
    assert blocks_made(again, AutoTokenizer.from_pretrained(reloaded), 32) == (first, 0)
    for count, other, block_size in (
        (100, tokenizer, 16),
        (100, train_tokenizer(texts(200), 270), 32),
        (120, tokenizer, 32),
    ):
        found, anew = blocks_made(read(count), other, block_size)
        assert found == anew > first


def test_corpus_shorter_than_one_block_is_refused(tokenizer):
    length = len(stream_of_tokens(["the cat sat"], tokenizer))
    for documents in (Dataset.from_dict({"text": ["the cat sat"]}), Dataset.from_dict({"text": [" ", None]})):
        for kind in (documents, documents.to_iterable_dataset()):
            with pytest.raises(ValueError, match=f"the corpus holds fewer tokens .*--block_size is {length + 1}"):
                pack_dataset(kind, tokenizer, length + 1, "the corpus")
    exact = pack_dataset(Dataset.from_dict({"text": ["the cat sat"]}), tokenizer, length, "the corpus")
    assert len(exact) == 1


def test_documents_that_nothing_separates_are_warned_of(tokenizer, caplog):
    documents, warning = Dataset.from_dict({"text": texts(9)}), "the tokenizer adds no special tokens"
    pack_dataset(documents, tokenizer, 8, "-")
    assert warning not in caplog.text
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = None
    pack_dataset(documents, tokenizer, 8, "-")
    assert warning in caplog.text


def test_long_documents_bring_no_warning(tokenizer, monkeypatch):
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(tokenizer, "model_max_length", 16)
    logger.addHandler(handler)
    try:
        assert len(list(pack_documents(["the cat sat " * 100], tokenizer, 64))) > 1
        assert not warnings
        tokenizer("the cat sat " * 100)
        assert any("16" in warning for warning in warnings)
    finally:
        logger.removeHandler(handler)


def test_documents_of_txt_files(tmp_path):
    for name, text in (("a.txt", "one\ntwo\n\nthree\n"), ("b.txt", "four\n\n\n\nfive\nsix")):
        (tmp_path / name).write_text(text)
    files = find_files([str(tmp_path / "*.txt")], "--train_file")

    def documents(**options):
        rows = [row["text"].strip() for row in read_files(files, "--train_file", **options)]
        return [text for text in rows if text]

    paragraphs = ["one\ntwo", "three", "four", "five\nsix"]
    assert documents() == documents(streaming=True) == paragraphs
    assert documents(document="line") == ["one", "two", "three", "four", "five", "six"]
    assert documents(document="file") == ["one\ntwo\n\nthree", "four\n\n\n\nfive\nsix"]


@pytest.mark.parametrize("streaming", [False, True])
def test_blank_lines_end_paragraphs(streaming, tmp_path):
    """Lines of spaces are blank, as wikitext has them, and a file's end ends its paragraph."""
    (tmp_path / "a.txt").write_text(" \n\n = Title = \n \n one \n two \n \t \n\nthree", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes("vier\r\n\r\nfünf\r\n".encode())
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    expected = [" = Title = ", " one \n two ", "three", "vier", "fünf"]
    assert [row["text"] for row in read_files(files, "--train_file", streaming=streaming)] == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_a_byte_order_mark_is_no_text(streaming, tmp_path):
    """At the head of each file; elsewhere the same character is one of the text's."""
    for name, text in (("a", "one\n\nt\ufeffwo\n"), ("b", "three\n")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8-sig")
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8-sig")
    text_files, json_files = (find_files([str(tmp_path / f"*.{end}")], "--train_file") for end in ("txt", "jsonl"))
    for document, expected in {
        "paragraph": ["one", "t\ufeffwo", "three"],
        "line": ["one", "", "t\ufeffwo", "three"],
        "file": ["one\n\nt\ufeffwo\n", "three\n"],
    }.items():
        rows = read_files(text_files, "--train_file", document=document, streaming=streaming)
        assert [row["text"] for row in rows] == expected
    rows = read_files(json_files, "--train_file", streaming=streaming)
    assert [row["text"] for row in rows] == ["one\n\nt\ufeffwo\n", "three\n"]


def test_changed_paragraphs_are_read_again(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("one\n\ntwo", "one\n\ntwo\n\nthree"):
        path.write_text(text)
        assert list(read_files([str(path)], "--train_file")["text"]) == text.split("\n\n")


@pytest.mark.parametrize("document", ["line", "paragraph"])
def test_a_file_that_has_changed_is_read_again_whatever_its_size_or_time(tmp_path, document):
    path = tmp_path / "a.txt"
    # another size at the same time, then the same size at another
    for text, time in (("one", 2e9), ("three", 2e9), ("seven", 2e9 + 1)):
        path.write_text(text)
        os.utime(path, (time, time))
        assert list(read_files([str(path)], "--train_file", document=document)["text"]) == [text]


def test_files_of_one_name_size_and_time_are_told_apart(tmp_path):
    for folder, text in (("a", "one"), ("b", "two")):
        path = tmp_path / folder / "corpus.txt"
        path.parent.mkdir()
        path.write_text(text)
        os.utime(path, (2e9, 2e9))
        assert list(read_files([str(path)], "--train_file")["text"]) == [text]


def test_columns_of_one_file_are_told_apart(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"title": "one", "body": "two"}))
    for column, text in (("title", "one"), ("body", "two")):
        assert list(read_files([str(path)], "--train_file", text_column=column)["text"]) == [text]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_column_of_a_json_file_may_begin_late(tmp_path, streaming):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": 1}) + "\n" + json.dumps({"body": "one"}) + "\n")

    def documents(column: str):
        return read_files([str(path)], "--train_file", text_column=column, streaming=streaming)

    assert [row["text"] for row in documents("body")] == [None, "one"]
    with pytest.raises(ValueError, match="^--text_column text: no such column in --train_file, which has id, body$"):
        documents("text")


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "csv.gz", "parquet", "JSONL"])
@pytest.mark.parametrize("streaming", [False, True])
def test_text_column_of_files(ending, streaming, tmp_path):
    rows = [{"id": index, "body": text} for index, text in enumerate(texts(9))]
    path = tmp_path / f"corpus.{ending}"
    if ending == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif ending.startswith("csv"):
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text(json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows))

    def documents(**options):
        return read_files(find_files([str(path)], "--train_file"), "--train_file", streaming=streaming, **options)

    # where there is nothing, a CSV file has an empty text
    nothing = "" if ending.startswith("csv") else None
    expected = [{"text": nothing if row["body"] is None else row["body"]} for row in rows]
    assert [dict(row) for row in documents(text_column="body")] == expected
    with pytest.raises(ValueError, match="^--text_column text: no such column in --train_file, .* id, body"):
        documents()
    if ending.startswith("csv"):
        assert [row["text"] for row in documents(text_column="id")] == [str(row["id"]) for row in rows]
        return
    with pytest.raises(ValueError, match="^--.* id.* must hold text, got .*int|column 'id' must hold text, got 0"):
        documents(text_column="id")


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_of_a_csv_file_are_as_written(streaming, tmp_path):
    texts = ["007", "null", "NA", " x ", 'a "b", c', "one\ntwo", "2020-01-01", "1e5", "é"]
    (tmp_path / "a.csv").write_text(pd.DataFrame({"n": range(9), "text": texts}).to_csv(index=False), encoding="utf-8")
    (tmp_path / "b.csv").write_text("n,text\n1,alone\n", encoding="utf-8-sig")
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    assert list(iterate_texts(read_files(files, "-", streaming=streaming), "-")) == [*texts, "alone"]


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_of_json_are_as_written_whatever_lies_beside_them(streaming, tmp_path):
    """Columns of mixed types, and texts that look like dates, numbers or JSON."""
    texts = ["2020-01-01", "5", '{"a": 1}', '"quoted"\n', "null", "\u2028é\x85"]
    beside = [1, "one", {"a": 1}, {"b": ["x", 2]}, [1, {"c": None}], None]
    rows = [{"meta": value, "text": text} for text, value in zip(texts, beside, strict=True)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    contents = {
        "lines": lines,
        "blank": f"\r\n{lines}\n ",
        "list": json.dumps(rows, ensure_ascii=False),
        "pretty": json.dumps(rows, indent=2),
        "texts": json.dumps(texts),
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content, encoding="utf-8", newline="")
    (tmp_path / "object.json").write_text(json.dumps({"text": "alone", "more": rows}, indent=2))
    for name in contents:
        files = [str(tmp_path / f"{name}.json"), str(tmp_path / "object.json")]
        assert list(iterate_texts(read_files(files, "-", streaming=streaming), "-")) == [*texts, "alone"], name


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_text_in_a_later_json_file_is_refused(streaming, tmp_path):
    """As in the first; load_dataset would put quotes around all texts of such a file, and of those after it."""
    for name, row in (("a", {"text": "one"}), ("b", {"text": 2024}), ("c", {"text": "three"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    files = find_files([str(tmp_path / "*.jsonl")], "--train_file")
    with pytest.raises(ValueError, match="^--train_file cannot be read.*b.jsonl, line 1: column 'text' .* got 2024"):
        list(iterate_texts(read_files(files, "--train_file", streaming=streaming), "--train_file"))


def test_files_in_the_order_given(tmp_path):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    found = find_files([str(tmp_path / "c.txt"), str(tmp_path / "[ab].txt")], "--train_file")
    assert [path[-5] for path in found] == ["c", "a", "b"]


def test_two_stars_are_folders_of_any_depth_and_no_folder_is_a_file(tmp_path):
    names = ["a/b.txt/c.txt", "a/d.txt", "e.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_files([str(tmp_path / "**" / "*.txt")], "--train_file")
    assert found == [str(tmp_path / name) for name in names]
    with pytest.raises(ValueError, match="--train_file .*b.*: no such file"):
        find_files([str(tmp_path / "a" / "b.*")], "--train_file")


def test_a_file_named_twice_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to("b.txt")
    patterns = ["b.txt", "*.txt", "./a.txt", str(tmp_path / "c.txt")]
    assert find_files(patterns, "--train_file") == ["b.txt", "a.txt", "c.txt"]


@pytest.mark.parametrize("name", ["one[1].txt", "one[1].jsonl", "[ab].jsonl", "what?.txt", "a*.txt"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_path_is_no_glob(name, streaming, tmp_path):
    folder = tmp_path / "data [old]"
    folder.mkdir()
    for other in ("one1", "a", "what!"):
        (folder / f"{other}{name[name.index('.') :]}").write_text('{"text": "other"}')
    (folder / name).write_text('{"text": "this"}')
    for document in ("line", "paragraph"):
        files = find_files([str(folder / name)], "--train_file")
        rows = read_files(files, "--train_file", document=document, streaming=streaming)
        assert ["this" in row["text"] for row in rows] == [True]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["missing.txt"], "--train_file .*missing.txt: no such file"),
        (["*.csv"], "--train_file .*csv: no such file"),
        (["empty.txt"], "--train_file .*empty.txt: the file is empty"),
        (["full.txt", "full.jsonl"], "files of one kind, .*; got .jsonl and .txt"),
        (["full.doc.gz"], "files of one kind, .txt or .json or .jsonl or .csv or .parquet; got .gz"),
        (["full.parquet.gz"], "files of one kind, .txt or .json or .jsonl or .csv or .parquet; got .gz"),
        (["full.doc"], "files of one kind, .txt or .json or .jsonl or .csv or .parquet; got .doc"),
    ],
)
def test_files_that_are_refused(patterns, message, tmp_path):
    for name in ("full.txt", "full.jsonl", "full.doc", "full.doc.gz", "full.parquet.gz"):
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=message):
        find_files([str(tmp_path / pattern) for pattern in patterns], "--train_file")


def test_broken_file_is_refused(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"te')
    with pytest.raises(ValueError, match="--train_file cannot be read as json"):
        read_files([str(tmp_path / "broken.jsonl")], "--train_file")


@pytest.mark.parametrize(
    ("name", "content", "line"), [("a.json", '{"text": "a"}\n{"te\n', 2), ("a.jsonl", '{"te\n{"text": "a"}\n', 1)]
)
def test_the_line_of_a_broken_object_is_named(tmp_path, name, content, line):
    """Only a .json file whose first line is none may be of one value."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"--train_file cannot be read.*{name}, line {line}: no JSON"):
        list(iterate_texts(read_files([str(tmp_path / name)], "--train_file", streaming=True), "--train_file"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("latin.txt", "café".encode("latin-1"), "'utf-8' codec can't decode"),
        ("cut.jsonl", b'{"te', "JSON"),
        ("other.parquet", b"nothing of the kind", "Parquet"),
    ],
)
def test_what_cannot_be_read_is_named(name, content, reason, streaming, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    for document in ("line", "paragraph", "file"):
        with pytest.raises(ValueError, match=f"^--train_file {path} cannot be read.*: .*{reason}"):
            source = f"--train_file {path}"
            read_files([str(path)], source, document=document, streaming=streaming)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ('{"text": "one"}\n{"text": 5}\n', '{"text": "two"}\n', r"a.jsonl, line 2: .* must hold text, got 5 \(int\)"),
        ('{"text": "one"}\n', '{"text": "two"}\n\n{"text": {"a": 1}}', r"b.jsonl, line 3: .* got {'a': 1} \(dict\)"),
        ('{"text": "one"}\n', '{"text": "two"}\n{"te', "b.jsonl, line 2: no JSON: .* column 2"),
        ('{"text": "one"}\n', '{"text": "two"}\n5', "b.jsonl, line 2: a document must be an object, got 5"),
        ('{"text": "one"}\n', r'{"text": "two\ud83d"}', "b.jsonl, line 1: .*surrogates not allowed"),
    ],
)
def test_what_cannot_be_read_later_is_named_too(first, second, reason, tmp_path):
    """A streamed file is opened only when those before it are used up."""
    source = "--train_file corpus"
    (tmp_path / "a.jsonl").write_text(first)
    (tmp_path / "b.jsonl").write_text(second)
    files = find_files([str(tmp_path / "*.jsonl")], source)
    texts = iterate_texts(read_files(files, source, streaming=True), source)
    assert next(texts) in ("one", None)
    with pytest.raises(ValueError, match=f"(?s)^{source} cannot be read: .*{reason}"):
        list(texts)


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", COMPRESSIONS)
@pytest.mark.parametrize(
    ("name", "contents", "document", "expected"),
    [
        ("txt", ("one\n\ntwo ü\nlines", "three\n"), "paragraph", ["one", "two ü\nlines", "three"]),
        ("txt", ("one\n\ntwo ü\nlines", "three\n"), "line", ["one", "", "two ü", "lines", "three"]),
        ("TXT", ("one\n\ntwo ü\nlines", "three"), "file", ["one\n\ntwo ü\nlines", "three"]),
        ("json", ('[{"text": "one"}, {"text": "two ü"}]', '[{"text": "three"}]'), "line", ["one", "two ü", "three"]),
        ("jsonl", ('{"text": "one"}\n{"text": "two ü"}', '{"text": "three"}'), "line", ["one", "two ü", "three"]),
    ],
)
def test_compressed_files_hold_what_they_were_made_of(tmp_path, streaming, ending, name, contents, document, expected):
    (tmp_path / f"a.{name}{ending}").write_bytes(COMPRESSIONS[ending](contents[0].encode()))
    # beside others
    (tmp_path / f"b.{name}").write_text(contents[1])
    files = find_files([str(tmp_path / "*")], "--train_file")
    rows = read_files(files, "--train_file", document=document, streaming=streaming)
    assert list(iterate_texts(rows, "--train_file")) == expected


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", COMPRESSIONS)
@pytest.mark.parametrize("name", ["txt", "jsonl"])
@pytest.mark.parametrize("damage", ["cut", "overwritten", "not compressed"])
def test_damaged_compressed_files_are_named(tmp_path, streaming, ending, name, damage):
    text = "\n".join(f'{{"text": "{x}"}}' for x in torch.rand(3000).tolist()).encode()
    content = bytearray(COMPRESSIONS[ending](text))
    middle = len(content) // 2
    if damage == "cut":
        del content[middle:]
    elif damage == "overwritten":
        content[middle : middle + 8] = b"overhere"
    else:
        content = text
    (tmp_path / f"a.{name}{ending}").write_bytes(content)
    files = find_files([str(tmp_path / "*")], "--train_file")
    with pytest.raises(ValueError, match="^--train_file cannot be read"):
        rows = read_files(files, "--train_file", streaming=streaming)
        list(iterate_texts(rows, "--train_file"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("second", ['{"text": null}', '{"body": "two"}', '{"text": " "}'])
def test_documents_without_a_text_are_warned_of_once(tmp_path, caplog, streaming, second):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + 3 * f"{second}\n")
    source = f"--train_file {tmp_path}"
    documents = read_files([str(tmp_path / "a.jsonl")], source, streaming=streaming)
    for _ in range(2):
        assert next(iterate_texts(documents, source)) == "one"
        assert len(list(iterate_texts(documents, source))) == 4
    warned = caplog.text.count(f"{source} has documents without a text, null or under another name")
    assert warned == (0 if second == '{"text": " "}' else 1)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_of_blank_lines_holds_no_documents(tmp_path, streaming):
    (tmp_path / "blank.txt").write_text("\n\n \n")
    files = find_files([str(tmp_path / "blank.txt")], "--train_file")
    with pytest.raises(ValueError, match="^--train_file holds no documents"):
        read_files(files, "--train_file", streaming=streaming)


def test_empty_dataset_is_refused():
    documents = Dataset.from_dict({"text": []})
    with pytest.raises(ValueError, match="--train_file holds no documents"):
        select_text(documents, "text", "--train_file")


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_text_after_a_document_without_one_is_refused(streaming):
    documents = Dataset.from_dict({"text": [None, ["one", "two"]]})
    documents = select_text(documents.to_iterable_dataset() if streaming else documents, "text", "--dataset_name x")
    texts = iterate_texts(documents, "--dataset_name x")
    assert next(texts) is None
    with pytest.raises(ValueError, match=r"^--dataset_name x cannot be read: a document must be text, got \['one'"):
        next(texts)


@pytest.mark.parametrize("percentage", ["5", "50", "40", "30", "0.7", "0.1", "33.3"])
def test_split_takes_documents_evenly_and_each_once(percentage):
    documents = Dataset.from_dict({"text": [str(index) for index in range(1000)]})
    training, validation = split_documents(documents, float(percentage))
    # of the first n, as many as were asked for, rounded up
    counts = np.searchsorted(list(map(int, validation["text"])), range(1001))
    assert counts.tolist() == [math.ceil(n * Decimal(percentage) / 100) for n in range(1001)]
    assert sorted([*training["text"], *validation["text"]], key=int) == list(documents["text"])
    streamed = split_documents(documents.to_iterable_dataset(), float(percentage))
    for stored, stream in zip((training, validation), streamed, strict=True):
        assert [row["text"] for row in stream] == list(stored["text"])


@pytest.mark.parametrize("percentage", [0, -1, 51])
def test_split_percentage_out_of_range(percentage):
    with pytest.raises(ValueError, match=f"--validation_percentage .* at most 50, got {percentage}"):
        split_documents(Dataset.from_dict({"text": ["a"]}), percentage)


def test_trained_tokenizer(tmp_path):
    documents = texts(200)
    tokenizer = train_tokenizer(documents, 400)
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in special} == special
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (1, 4)
    assert len(tokenizer) <= 400
    # words of the corpus became single tokens, and any other text survives byte by byte
    assert len(tokenizer(" cat sat")["input_ids"]) == 4
    unseen = "Ünseen — текст, 漢字 \U0001f642\n\ttabs"
    ids = tokenizer(unseen)["input_ids"]
    assert ids[0] == 0 and ids[-1] == 2 and 3 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == unseen
    assert tokenizer("a<mask>")["input_ids"][-2] == 4

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(unseen)["input_ids"] == ids
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert train_tokenizer(documents, 400).get_vocab() == tokenizer.get_vocab()


def test_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="^vocab_size must be at least 261, got 260"):
        train_tokenizer(["text"], 260)


def test_dataset_from_a_directory(tokenizer, tmp_path):
    """What --dataset_name loads goes through the same steps."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(50)))
    documents = select_text(load_dataset(str(tmp_path), split="train"), "text", "--dataset_name")
    blocks = pack_dataset(documents, tokenizer, 16, "--dataset_name")
    stream = stream_of_tokens(texts(50), tokenizer)
    assert np.concatenate(blocks["input_ids"]).tolist() == stream[: len(stream) // 16 * 16]
