"""The nine GLUE tasks: their columns, labels and submission files, read from the hub or from local files."""

import csv
import glob
import io
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from .data import csv_options
from .training import write_text

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class GlueTask:
    """One task.

    Args:
        metric: the GLUE task whose metric scores it.
        columns: the column of the text, or the two of a pair.
        labels: the labels' names in the order of their ids; None: a regression.
        submission: name of the prediction file, without its ending, for each part of the test set.
        label_column: the column of the labels.
        names_in_submission: whether predictions are written as labels' names or as their ids.
        parts: what the validation and test sets are divided into; empty: not divided.
        score_range: lowest and highest label of a regression.
    """

    metric: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] | None
    submission: tuple[str, ...]
    label_column: str = "label"
    names_in_submission: bool = False
    parts: tuple[str, ...] = ()
    score_range: tuple[float, float] = (-math.inf, math.inf)


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS = {
    "cola": GlueTask("cola", ("sentence",), ("unacceptable", "acceptable"), ("CoLA",)),
    "mnli": GlueTask(
        "mnli",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        ("MNLI-m", "MNLI-mm"),
        names_in_submission=True,
        parts=("matched", "mismatched"),
    ),
    "mrpc": GlueTask("mrpc", _PAIR, ("not_equivalent", "equivalent"), ("MRPC",)),
    "qnli": GlueTask("qnli", ("question", "sentence"), _ENTAILMENT, ("QNLI",), names_in_submission=True),
    "qqp": GlueTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), ("QQP",)),
    "rte": GlueTask("rte", _PAIR, _ENTAILMENT, ("RTE",), names_in_submission=True),
    "sst2": GlueTask("sst2", ("sentence",), ("negative", "positive"), ("SST-2",)),
    "stsb": GlueTask("stsb", _PAIR, None, ("STS-B",), score_range=(0.0, 5.0)),
    "wnli": GlueTask("wnli", _PAIR, ("not_entailment", "entailment"), ("WNLI",)),
}

# what an empty cell is read as, in csv files the latter
_NO_LABEL = (None, "")
# what is a number in a csv file; 007 is a name, 00.5 is none
_NUMBERS = {
    "int64": r"^-?(0|[1-9][0-9]{0,17})$",
    "float64": r"^-?(0|[1-9][0-9]*|[0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$",
}
_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Table:
    """A data set together with where it came from, for the messages of errors.

    Args:
        source: the argument and the file, or the hub's data set and split.
        rows: the data.
    """

    source: str
    rows: datasets.Dataset


def check_file(argument: str, path: str) -> None:
    """Refuse a file that holds no data, without reading it.

    Args:
        argument: the argument that named the file.
        path: the file.

    Raises:
        ValueError: the file is missing, empty or of another kind than `read_file` takes.
    """
    source = f"--{argument} {path}"
    if Path(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"{source}: the file must end in one of {', '.join(_FORMATS)}")
    if not Path(path).is_file():
        raise ValueError(f"{source}: no such file")
    if not Path(path).stat().st_size:
        raise ValueError(f"{source}: the file is empty")


def read_file(argument: str, path: str, texts: Collection[str] = ()) -> Table:
    """Read a local file.

    Args:
        argument: the argument that named the file.
        path: a .csv, .json, .jsonl or .parquet file, which `check_file` lets pass.
        texts: columns of a .csv file that are text, also where all of them could be numbers.

    Returns:
        Its rows. Of a .csv file, another column that holds numbers throughout is of numbers, blanks around them left
        out, and every other one is text as it is written there: 007, null.

    Raises:
        ValueError: the file cannot be read as its ending says, or holds no rows.
    """
    source, kind = f"--{argument} {path}", _FORMATS[Path(path).suffix.lower()]
    try:
        options = csv_options(path) if kind == "csv" else {}
        if kind == "json":
            # else a number among the texts of a large file puts quotes around all others near it
            options["on_mixed_types"] = None
        # datasets finds again what it has read by path and time, and a name; a path is no glob
        name = f"size-{Path(path).stat().st_size}"
        rows = datasets.load_dataset(kind, name, data_files=glob.escape(str(path)), split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{source}: no rows can be read as {kind}: {error.__cause__ or error}") from error
    if not len(rows):
        raise ValueError(f"{source}: the file holds no rows")
    rows = _with_plain_types(rows)
    return Table(source, _with_numbers(rows, set(rows.column_names) - set(texts)) if kind == "csv" else rows)


def _with_plain_types(rows: datasets.Dataset) -> datasets.Dataset:
    """Decimals as the numbers they are, and classes by their names."""
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.ClassLabel):
            names = [None if index in (None, -1) else feature.names[index] for index in rows[name]]
            rows = rows.remove_columns(name).add_column(name, names, feature=datasets.Value("string"))
        elif str(getattr(feature, "dtype", "")).startswith("decimal"):
            rows = rows.cast_column(name, datasets.Value("float64"))
    return rows


def _with_numbers(rows: datasets.Dataset, columns: Collection[str]) -> datasets.Dataset:
    """Texts as numbers, where a whole column is of them."""
    order = rows.column_names
    for name in columns:
        texts = pc.utf8_trim_whitespace(rows.data.column(name))
        for dtype, pattern in _NUMBERS.items():
            if pc.all(pc.match_substring_regex(texts, pattern)).as_py():
                numbers = pc.cast(texts, dtype).to_pylist()
                # first, as a table without a column does not know how many rows it has
                rows = rows.add_column(f"{name} as numbers", numbers, feature=datasets.Value(dtype))
                rows = rows.remove_columns(name).rename_column(f"{name} as numbers", name)
                break
    return rows.select_columns(order)


def read_hub(task_name: str, splits: Sequence[str]) -> dict[str, Table]:
    """Read splits of a task from the hub's nyu-mll/glue.

    Args:
        task_name: one of the nine tasks.
        splits: train, validation, test, the last two of mnli as validation_matched and so on.

    Returns:
        The rows by split.
    """
    data = datasets.load_dataset("nyu-mll/glue", task_name, split=list(splits))
    return {
        split: Table(f"nyu-mll/glue {task_name}, split {split}", rows)
        for split, rows in zip(splits, data, strict=True)
    }


def infer_task(
    table: Table,
    text_columns: Sequence[str],
    label_column: str,
    config: PreTrainedConfig | None = None,
) -> GlueTask:
    """The task that a file of other than GLUE data poses.

    Args:
        table: the training data, or without any the data to evaluate or predict.
        text_columns: one or two columns of text; empty: those that are not the label, of two with a warning.
        label_column: floats in it make a regression, anything else classes, sorted.
        config: where to take the labels from when table is not the training data.

    Returns:
        The task, scored as sst2 or stsb are.

    Raises:
        ValueError: a column is missing, the columns of text are to be inferred but more than two, or there are fewer
            than two classes.
    """
    features = table.rows.features
    # what pandas makes of a frame's index is no text of a row
    texts = [
        name
        for name, feature in features.items()
        if name != label_column and is_text(feature) and not name.startswith("__index_level_")
    ]
    columns = tuple(text_columns or texts)
    if not columns:
        kinds = [f"{name} ({getattr(kind, 'dtype', type(kind).__name__)})" for name, kind in features.items()]
        is_csv = table.source.lower().endswith(".csv")
        hint = "; --sentence1_column takes one whose texts all are numbers" if is_csv else ""
        raise ValueError(
            f"{table.source} has no column of text beside the label; its columns are {', '.join(kinds)}{hint}"
        )
    if len(columns) > 2:
        raise ValueError(
            f"{table.source} has {len(columns)} columns of text beside {label_column!r}, {', '.join(columns)}: "
            "give --sentence1_column, and for pairs --sentence2_column"
        )
    if len(columns) == 2 and not text_columns:
        # a name or a path may be text as well, and may tell the label
        logger.warning(
            f"{table.source}: each text is the pair of the columns {columns[0]!r} and {columns[1]!r}, as both hold "
            "text; --sentence1_column takes one alone"
        )
    if config is not None:
        is_regression = config.num_labels == 1
        labels = tuple(config.id2label[index] for index in range(config.num_labels))
    else:
        _check_label_column(table, label_column)
        is_regression = str(features[label_column].dtype).startswith("float")
        present = [label for label in table.rows.unique(label_column) if label not in _NO_LABEL]
        if is_regression and all(label.is_integer() for label in present):
            logger.warning(
                f"{table.source}: column {label_column!r} holds floats, which make a regression, though all are whole "
                "numbers; classes are texts or integers"
            )
        labels = tuple(map(str, sorted(present)))
        padded = [label for label in labels if label != label.strip() and label.strip() in labels]
        if padded:
            logger.warning(
                f"{table.source}: column {label_column!r} holds labels that differ from others by blanks alone, and "
                f"are classes of their own: {', '.join(map(repr, padded))}"
            )
        numbers = [label for label in labels if "." in label and re.search(_NUMBERS["float64"], label)]
        if not is_regression and 2 * len(numbers) > len(labels):
            logger.warning(
                f"{table.source}: column {label_column!r} holds text that is mostly numbers, such as {numbers[0]!r}, "
                "and each is a class; a column of numbers alone makes a regression"
            )
    if is_regression:
        return GlueTask("stsb", columns, None, ("predictions",), label_column)
    if len(labels) < 2:
        raise ValueError(f"{table.source}: column {label_column!r} must hold two labels or more, got {labels}")
    return GlueTask("sst2", columns, labels, ("predictions",), label_column, names_in_submission=True)


def set_labels(config: PreTrainedConfig, task: GlueTask, *, trains: bool) -> None:
    """Make a configuration's head that of a task, keeping the checkpoint's order of the same labels.

    Args:
        config: the checkpoint's configuration, changed in place.
        task: the task.
        trains: whether the head will be trained; if not, its labels must be the task's. Of a head that has others
            already, a warning says which becomes which.

    Raises:
        ValueError: an untrained head has other labels.
    """
    labels = task.labels or ("score",)
    present = [config.id2label[index] for index in range(config.num_labels)]
    same = {label.lower(): label for label in labels}
    if sorted(labels) == sorted(present):
        # labels of one's own may differ in case alone
        labels = present
    elif sorted(same) == sorted(label.lower() for label in present):
        labels = [same[label.lower()] for label in present]
    elif not trains and (len(present) != len(labels) or not _are_unnamed(present)):
        raise ValueError(
            f"--model_name_or_path: the checkpoint's labels are {', '.join(present)}, "
            f"the task's are {', '.join(labels)}; fine-tune it with --do_train"
        )
    elif len(present) == len(labels) and not _are_unnamed(present):
        renamed = ", ".join(f"{old!r} becomes {new!r}" for old, new in zip(present, labels, strict=True))
        logger.warning(
            f"--model_name_or_path: the checkpoint's head knows other labels than the data, and is trained on as it "
            f"is: {renamed}. Where these are the same classes by other names, give the data the checkpoint's"
        )
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "regression" if task.labels is None else "single_label_classification"


def _are_unnamed(labels: Sequence[str]) -> bool:
    # as Transformers names them where nobody has
    return all(label.startswith("LABEL_") for label in labels)


def encode(
    table: Table,
    task: GlueTask,
    label2id: dict[str, int],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    *,
    may_be_unlabelled: bool = False,
) -> datasets.Dataset:
    """Tokens and labels, as Trainer takes them.

    Args:
        table: the rows.
        task: their task.
        label2id: the model's label ids.
        tokenizer: the model's tokenizer.
        max_seq_length: tokens after which a text, or the longer one of a pair, is cut, with a warning.
        may_be_unlabelled: allow a missing label column, and one that is empty or, as in GLUE's tests, -1.

    Returns:
        The encoded rows, with a column `labels` unless they are unlabelled.

    Raises:
        ValueError: a column is missing or holds no text, or a label is outside the task's.
    """
    _check_columns(table, task.columns)
    for column in task.columns:
        if not is_text(table.rows.features[column]):
            raise ValueError(f"{table.source}: column {column!r} must hold text, got {table.rows.features[column]}")
        texts = table.rows.unique(column)
        if None in texts:
            raise ValueError(f"{table.source}: column {column!r} has rows without a text")
        if not all(text.strip() for text in texts):
            # what a csv file has where a text is missing
            blank = sum(not text.strip() for text in table.rows[column])
            logger.warning(f"{table.source}: column {column!r} is blank in {blank} of {len(table.rows)} rows")
    labels = _encode_labels(table, task, label2id, may_be_unlabelled)

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        return tokenizer(
            *(batch[column] for column in task.columns),
            truncation=True,
            max_length=max_seq_length,
        )

    encoded = table.rows.map(
        tokenize, batched=True, remove_columns=table.rows.column_names, desc=f"Tokenizing {table.source}"
    )
    lengths = pc.list_value_length(encoded.data.column("input_ids"))
    long = pc.sum(pc.greater_equal(lengths, max_seq_length)).as_py() or 0
    if long:
        logger.warning(
            f"{table.source}: {long} of {len(encoded)} rows fill {max_seq_length} tokens (--max_seq_length), where "
            "longer ones are cut"
        )
    return encoded if labels is None else encoded.add_column("labels", labels)


def is_text(feature: object) -> bool:
    """Whether a column with this feature, of a datasets.Dataset, holds text."""
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _check_columns(table: Table, columns: Sequence[str], hint: str = "") -> None:
    present = table.rows.column_names
    for column in columns:
        if column not in present:
            # a first row in place of the names may hold whole texts
            shown = [name if len(name) <= 50 else f"{name[:50]}..." for name in present]
            hint = " (is that a header?)" if shown != present else hint
            raise ValueError(f"{table.source} has no column {column!r}; its columns are {', '.join(shown)}{hint}")


def _check_label_column(table: Table, column: str) -> None:
    _check_columns(table, (column,), ": --label_column names another")
    if not isinstance(table.rows.features[column], (datasets.Value, datasets.ClassLabel)):
        raise ValueError(f"{table.source}: column {column!r} must hold one label a row, a text or a number")


def _encode_labels(
    table: Table, task: GlueTask, label2id: dict[str, int], may_be_unlabelled: bool
) -> list[int] | list[float] | None:
    if may_be_unlabelled and task.label_column not in table.rows.column_names:
        return None
    _check_label_column(table, task.label_column)
    values = list(table.rows[task.label_column])
    present = set(values)
    if task.labels is None:
        low, high = task.score_range
        encoding = {
            value: float(value)
            for value in present
            if isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high
        }
        allowed = "numbers" if math.isinf(low) else f"numbers from {low:g} to {high:g}"
    else:
        ids = {label: label2id[label] for label in task.labels}
        allowed = ", ".join(map(repr, task.labels))
        if task in TASKS.values():
            ids |= {str(index): label2id[label] for index, label in enumerate(task.labels)}
            allowed = f"0 to {len(task.labels) - 1} or {allowed}"
        else:
            allowed += ", as in the training data or, without any, in the checkpoint"
        # null is no class of the name None
        encoding = {value: ids[str(value)] for value in present if value not in _NO_LABEL and str(value) in ids}
    if may_be_unlabelled and present <= {-1, *_NO_LABEL} and not encoding:
        return None
    strange = present - encoding.keys()
    if strange:
        shown = ", ".join(sorted(map(repr, strange))[:5])
        count = sum(value in strange for value in values)
        raise ValueError(
            f"{table.source}: column {task.label_column!r} holds {shown} in {count} of {len(values)} rows; "
            f"allowed are {allowed}"
        )
    return [encoding[value] for value in values]


def write_predictions(path: str | Path, predictions: np.ndarray, task: GlueTask, id2label: dict[int, str]) -> None:
    """Write a test set's predictions in the format of GLUE submissions.

    Args:
        path: the file, written whole or not at all.
        predictions: label ids of the model, or scores, [N].
        task: the task.
        id2label: the model's labels.
    """
    if task.labels is None:
        values = [f"{score:.3f}" for score in np.clip(predictions, *task.score_range)]
    else:
        values = [id2label[int(index)] for index in predictions]
        if not task.names_in_submission:
            values = [str(task.labels.index(label)) for label in values]
    table = io.StringIO()
    # a label with a tab or the end of a line is quoted
    csv.writer(table, "excel-tab", lineterminator="\n").writerows([("index", "prediction"), *enumerate(values)])
    write_text(path, table.getvalue())
