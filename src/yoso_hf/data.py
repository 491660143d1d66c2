"""Text for masked language modelling: documents, blocks of tokens, a tokenizer trained on the corpus."""

import glob
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TextIO

import fsspec
import numpy as np
import pandas as pd
from datasets import Dataset, Features, IterableDataset, Sequence, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase, RobertaTokenizer
from transformers.utils import logging

logger = logging.get_logger(__name__)

_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# of text, JSON and CSV; what has another ending beneath is no compressed file
_COMPRESSIONS = (".gz", ".bz2", ".xz")
# what the "text" builder of datasets calls them
_DOCUMENT_UNITS = {"line": "line", "paragraph": "paragraph", "file": "document"}
# what a compressed file raises that is damaged, or none
_DAMAGES = (OSError, EOFError, lzma.LZMAError, zlib.error)
# what reading may raise; a streamed file of another schema than the first one's raises a TypeError
_READING_ERRORS = (DatasetGenerationError, ValueError, TypeError, *_DAMAGES)
# a byte order mark at the head of a file, as editors on Windows write it, is no text
_ENCODING = "utf-8-sig"
# of which one at least has the column of the text, whatever the others hold
_ROWS_TO_CHECK = 1000
# enough for the tokenizer's threads, and its own records of so much text still fit in memory
_CHARACTERS_AT_ONCE = 2**20


def find_files(patterns: list[str], source: str) -> list[str]:
    """The files that paths and globs stand for.

    Args:
        patterns: paths or globs of .txt, .json, .jsonl, .csv or .parquet files, all of one kind. What is the path of a
            file is no glob. All but .parquet may be compressed: .txt.gz, .bz2 or .xz.
        source: where they come from, for messages: "--train_file".

    Returns:
        The paths, in the order of patterns, sorted within a glob. A file that is named several times, be it through
        links, is there once, where it is named first.

    Raises:
        ValueError: a pattern matches nothing, a file is empty, or the kinds are mixed or unknown.
    """
    # the path that was given, by the one without links
    files = {}
    for pattern in patterns:
        matches = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        matches = [path for path in matches if os.path.isfile(path)]
        if not matches:
            raise ValueError(f"{source} {pattern}: no such file")
        for path in matches:
            files.setdefault(os.path.realpath(path), path)
    files = list(files.values())
    for path in files:
        if os.path.getsize(path) == 0:
            raise ValueError(f"{source} {path}: the file is empty")
    endings = {_ending(path) for path in files}
    if len(endings) > 1 or not endings <= _BUILDERS.keys():
        raise ValueError(
            f"{source} takes files of one kind, {' or '.join(_BUILDERS)}; got {' and '.join(sorted(endings))}"
        )
    return files


def read_files(
    files: list[str],
    source: str,
    *,
    document: str = "paragraph",
    text_column: str = "text",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Open the text of local files as a dataset.

    Args:
        files: what `find_files` gave.
        source: where they come from, for messages: "--train_file".
        document: what a document is in a .txt file: "line", "paragraph" (a line without text ends it) or "file".
        text_column: the column of other files that holds the text; what else they hold is not looked at in JSON.
        streaming: read the files as they are used, instead of into the cache of datasets first.

    Returns:
        One row per document, with the one column "text".

    Raises:
        ValueError: a file cannot be read as its ending says, or what `select_text` raises.
    """
    builder, missing = _BUILDERS[_ending(files[0])], {}
    try:
        if builder == "json":
            missing = _columns_instead(files, text_column)
            rows = _generated(_json_documents, files, text_column, streaming)
        elif builder == "text" and document == "paragraph":
            rows = _generated(_paragraphs, files, "text", streaming)
        else:
            options = csv_options(files[0]) if builder == "csv" else {}
            if builder == "text":
                options = {"sample_by": _DOCUMENT_UNITS[document], "encoding": _ENCODING}
            # load_dataset takes paths for globs, and finds again what it has read by path and time, and a name
            paths = [glob.escape(path) for path in files]
            name = f"size-{sum(map(os.path.getsize, files))}"
            rows = load_dataset(builder, name, data_files=paths, split="train", streaming=streaming, **options)
    except _READING_ERRORS as error:
        raise _unreadable(f"{source} cannot be read as {builder}", error) from error
    if missing:
        raise _no_column(text_column, source, missing)
    return select_text(rows, text_column, source)


def csv_options(path: str) -> dict[str, Any]:
    """What has each cell of a file stay as it is written: pandas, left alone, takes 001 for 1 and null for no text.

    Args:
        path: a .csv file.

    Returns:
        Options of datasets.load_dataset.

    Raises:
        ValueError: fields are not separated by commas, or there is no row, or one of more fields than the header.
    """
    first = pd.read_csv(path, nrows=1, dtype=str, keep_default_na=False)
    header = ", ".join(first.columns)
    if len(first.columns) == 1 and re.search("[;\t|]", header):
        # which a comma in a text would make an error of another kind
        raise ValueError(f"fields must be separated by commas, but the header is {header!r}")
    if not len(first):
        raise ValueError(f"there is nothing below the header, {header}")
    # which pandas makes of a field more than the header has
    if not isinstance(first.index, pd.RangeIndex):
        raise ValueError(f"the first row has more fields than the header, {header}")
    features = Features({column: Value("string") for column in first.columns})
    # where there is one column, a line without text is a row
    return {"features": features, "keep_default_na": False, "skip_blank_lines": len(first.columns) > 1}


def _ending(path: str) -> str:
    name, ending = os.path.splitext(path.lower())
    inner = os.path.splitext(name)[1]
    return inner if ending in _COMPRESSIONS and inner in _BUILDERS and inner != ".parquet" else ending


def _unreadable(what: str, error: Exception) -> ValueError:
    reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
    return ValueError(f"{what}: {reason or error}")


def _generated(
    read: Callable[[list[str], str], Iterator[dict[str, Any]]], files: list[str], column: str, streaming: bool
) -> Dataset | IterableDataset:
    features, arguments = Features({column: Value("string")}), {"files": files, "column": column}
    if streaming:
        return IterableDataset.from_generator(read, features=features, gen_kwargs=arguments)
    if next(read(**arguments), None) is None:
        # which from_generator refuses, in words of its own
        return Dataset.from_dict({column: []}, features=features)
    # by which what has been read is found again
    status = [(os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files]
    fingerprint = Hasher.hash([read.__name__, column, _ENCODING, status])
    return Dataset.from_generator(read, features=features, gen_kwargs=arguments, fingerprint=fingerprint)


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    try:
        # not by fsspec.open, to which "::" in a path is a chain of file systems
        with fsspec.filesystem("file").open(path, "rt", encoding=_ENCODING, compression="infer") as file:
            yield file
    except (UnicodeDecodeError, *_DAMAGES) as error:
        raise ValueError(f"{path}: {error}") from error


def _paragraphs(files: list[str], column: str) -> Iterator[dict[str, str]]:
    for path in files:
        with _opened(path) as file:
            for is_blank, lines in itertools.groupby(file, key=lambda line: not line.strip()):
                if not is_blank:
                    yield {column: "".join(lines).removesuffix("\n")}


def _json_documents(files: list[str], column: str) -> Iterator[dict[str, str | None]]:
    for place, row in _json_rows(files):
        text = row.get(column)
        try:
            if not isinstance(text, str | None):
                raise ValueError(f"column {column!r} must hold text, got {str(text)[:100]} ({type(text).__name__})")
            # half a character, as a text that was cut may end with, is none
            (text or "").encode()
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        yield {column: text}


def _json_rows(files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of files, one a line or all in a list, each with its place. A text alone is an object's."""
    # load_dataset makes text of what is none where an object's types differ from those before, quotes and all
    for path in files:
        for place, value in _json_values(path):
            for row in value if isinstance(value, list) else [value]:
                row = {"text": row} if isinstance(row, str) else row
                if not isinstance(row, dict):
                    raise ValueError(f"{place}: a document must be an object, got {str(row)[:100]}")
                yield place, row


def _json_values(path: str) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        is_first = True
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            place = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                if is_first and _ending(path) == ".json":
                    # of one value, of many lines
                    break
                raise ValueError(f"{place}: no JSON: {error}") from error
            yield place, value
            is_first = False
        else:
            return
    with _opened(path) as file:
        try:
            value = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: no JSON: {error}") from error
    yield path, value


def _columns_instead(files: list[str], column: str) -> dict[str, None]:
    """The names that the first objects have in place of a column that none of them has."""
    names = {}
    for _, row in itertools.islice(_json_rows(files), _ROWS_TO_CHECK):
        names |= dict.fromkeys(row)
        if column in names:
            return {}
    return names


def _no_column(column: str, source: str, present: Iterable[str]) -> ValueError:
    return ValueError(f"--text_column {column}: no such column in {source}, which has {', '.join(present)}")


def select_text(documents: Dataset | IterableDataset, text_column: str, source: str) -> Dataset | IterableDataset:
    """Reduce a dataset to its text.

    Args:
        documents: one row per document.
        text_column: the column that holds the text.
        source: where the documents come from, for messages: "--train_file".

    Returns:
        The same documents with the one column "text".

    Raises:
        ValueError: there are no documents, the first cannot be read, or there is no such column, or it holds no text.
    """
    try:
        first = next(iter(documents), None)
    except _READING_ERRORS as error:
        raise _unreadable(f"{source} cannot be read", error) from error
    if first is None:
        raise ValueError(f"{source} holds no documents")
    if text_column not in first:
        raise _no_column(text_column, source, first)
    if not isinstance(first[text_column], str | None):
        raise ValueError(
            f"--text_column {text_column} must hold text, got {type(first[text_column]).__name__} in {source}"
        )
    documents = documents.select_columns(text_column)
    return documents if text_column == "text" else documents.rename_column(text_column, "text")


def iterate_texts(documents: Dataset | IterableDataset, source: str) -> Iterator[str | None]:
    """The texts of `select_text`'s documents, one by one.

    Args:
        documents: rows with the column "text".
        source: where the documents come from, for messages: "--train_file".

    Yields:
        The text of a document, None where it has none; the first of these is warned of.

    Raises:
        ValueError: a document cannot be read, or holds something else.
    """
    try:
        for row in documents:
            if not isinstance(row["text"], str | None):
                raise ValueError(f"a document must be text, got {row['text']!r}")
            if row["text"] is None:
                logger.warning_once(
                    f"{source} has documents without a text, null or under another name, which are left out"
                )
            yield row["text"]
    except _READING_ERRORS as error:
        raise _unreadable(f"{source} cannot be read", error) from error


def split_documents(
    documents: Dataset | IterableDataset, percentage: float
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset]:
    """Set documents aside for validation, evenly spread, the first one of all among them.

    Args:
        documents: one row per document.
        percentage: share of the documents to set aside, in percent, above 0 and at most 50.

    Returns:
        The documents to train on, and those to validate with.

    Raises:
        ValueError: the percentage is out of range.
    """
    if not 0 < percentage <= 50:
        raise ValueError(f"--validation_percentage must be above 0 and at most 50, got {percentage}")
    # as written: 0.7 is no binary fraction
    share = Fraction(str(percentage)) / 100
    parts = (
        documents.filter(_is_in_split, with_indices=True, fn_kwargs={"share": share, "validation": validation})
        for validation in (False, True)
    )
    return tuple(parts)


def _is_in_split(_, index: int, share: Fraction, validation: bool) -> bool:
    # of the first n documents, n * share rounded up
    return (-index * share % 1 < share) == validation


def pack_documents(
    texts: Iterable[str | None], tokenizer: PreTrainedTokenizerBase, block_size: int
) -> Iterator[np.ndarray]:
    """Tokenise documents and cut their concatenation into full blocks.

    Every document carries the tokenizer's special tokens, which separate it from its neighbours; text that reads like
    one, such as "<s>" of HTML, becomes one, as the tokenizer has it. A block ends anywhere in a document; only what is
    left after the last full block of all is dropped.

    Args:
        texts: the documents; None and blank ones are left out.
        tokenizer: a fast tokenizer.
        block_size: tokens in a block, >= 1.

    Yields:
        int32 array of shape [block_size].
    """
    rest = np.empty(0, np.int32)
    for batch in _batches(texts):
        documents = tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]
        tokens = np.fromiter(itertools.chain(rest, *documents), np.int32)
        end = len(tokens) - len(tokens) % block_size
        yield from tokens[:end].reshape(-1, block_size)
        rest = tokens[end:]


def _batches(texts: Iterable[str | None]) -> Iterator[list[str]]:
    batch, characters = [], 0
    for text in texts:
        if text is None or not text.strip():
            continue
        batch.append(text)
        characters += len(text)
        if characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pack_dataset(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, block_size: int, source: str
) -> Dataset | IterableDataset:
    """Pack a dataset of documents with `pack_documents`.

    The blocks of a Dataset are written to the cache of datasets, and found there again as long as documents,
    tokenizer and block_size are the same; those of an IterableDataset are made as they are used.

    Args:
        documents: rows with the column "text".
        tokenizer: a fast tokenizer.
        block_size: tokens in a block, >= 1.
        source: where the documents come from, for messages: "--train_file".

    Returns:
        Rows with the column "input_ids", int32 of length block_size; of the kind of documents.

    Raises:
        ValueError: the documents are shorter than one block, or cannot be read. An IterableDataset's blocks raise it
            as they are used, also where a DataLoader has several workers.
    """
    # from_generator would remember the empty result
    if next(_blocks(documents, tokenizer, block_size, source), None) is None:
        raise ValueError(f"{source} holds fewer tokens than one block: --block_size is {block_size}")
    if tokenizer.num_special_tokens_to_add() == 0:
        logger.warning_once("the tokenizer adds no special tokens, so that nothing separates documents in a block")
    arguments = {"documents": documents, "tokenizer": tokenizer, "block_size": block_size, "source": source}
    features = Features({"input_ids": Sequence(Value("int32"), length=block_size)})
    if isinstance(documents, IterableDataset):
        return IterableDataset.from_generator(_blocks, features=features, gen_kwargs=arguments)
    # the tokenizer as a Python object hashes differently in every process
    fingerprint = Hasher.hash([documents._fingerprint, tokenizer.backend_tokenizer.to_str(), block_size])
    return Dataset.from_generator(_blocks, features=features, gen_kwargs=arguments, fingerprint=fingerprint)


def _blocks(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, block_size: int, source: str
) -> Iterator[dict[str, np.ndarray]]:
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        # datasets gives each worker only its share of the files, and the blocks are made in one of them
        raise ValueError(f"a streamed corpus takes one data loader worker at most, got {worker.num_workers}")
    for block in pack_documents(iterate_texts(documents, source), tokenizer, block_size):
        yield {"input_ids": block}


def train_tokenizer(texts: Iterable[str | None], vocab_size: int) -> RobertaTokenizer:
    """Train a byte-level BPE tokenizer with RoBERTa's special tokens.

    Args:
        texts: the documents; None and blank ones are left out.
        vocab_size: entries of the vocabulary, at least the 256 bytes and 5 special tokens; a small corpus may
            give fewer.

    Returns:
        The tokenizer: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> 4. It does not know a model's longest text:
        model_max_length is for the caller to set.

    Raises:
        ValueError: vocab_size is too small.
    """
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    if vocab_size < 256 + len(special):
        raise ValueError(f"vocab_size must be at least {256 + len(special)}, got {vocab_size}")
    empty = RobertaTokenizer(vocab={token: index for index, token in enumerate(special)}, merges=[])
    return empty.train_new_from_iterator(_batches(texts), vocab_size)
