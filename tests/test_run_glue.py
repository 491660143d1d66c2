import csv
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate
import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from sklearn.metrics import f1_score, matthews_corrcoef
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    TrainingArguments,
)
from transformers.trainer_callback import TrainerState

from yoso_hf import YosoConfig, YosoForMaskedLM, YosoForSequenceClassification
from yoso_hf.glue import (
    TASKS,
    GlueTask,
    Table,
    _encode_labels,
    check_file,
    encode,
    infer_task,
    read_file,
    set_labels,
    write_predictions,
)
from yoso_hf.model_card import CardTrainer
from yoso_hf.training import claimed

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "run_glue.py"
WORDS = ["good", "fine", "great", "bad", "poor", "awful", "the", "film", "plot", "was", "is", "null", "."]
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Predictions of an untrained regression are nearly alike: their correlation feels how sums are rounded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run_glue(load_script):
    return load_script("run_glue")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories of tiny masked language models, each with a tokenizer of WORDS."""
    folder = tmp_path_factory.mktemp("checkpoints")
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    vocabulary = {token: index for index, token in enumerate(special + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=40,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    sizes = SIZES | {"vocab_size": len(tokenizer), "pad_token_id": 0}
    torch.manual_seed(0)
    tiny = {
        "bert": BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=48)),
        "roberta": RobertaForMaskedLM(RobertaConfig(**sizes, max_position_embeddings=33)),
        "yoso": YosoForMaskedLM(
            YosoConfig(**sizes, max_position_embeddings=48, use_expectation=False, num_hash=16, hash_code_len=5)
        ),
    }
    for name, model in tiny.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def text_of(label: int, generator: np.random.Generator) -> str:
    """A text of a random length in which one word tells the class."""
    telling = generator.choice([["bad", "poor", "awful"], ["good", "fine", "great"]][label])
    return " ".join(
        ["the", "film", "was", telling, *generator.choice(["plot", "the", "is", "."], generator.integers(8))]
    )


def task_rows(task_name: str, count: int, seed: int = 0, *, names: bool = False) -> list[dict]:
    """Rows as the hub has them; of a pair the first text tells the label."""
    task, generator = TASKS[task_name], np.random.default_rng(seed)
    rows = []
    for index in range(count):
        if task.labels is None:
            label = round(float(generator.uniform(0, 5)), 2)
        else:
            label = int(generator.integers(len(task.labels)))
        texts = {
            column: text_of(int(label > 0) if task.labels else int(label > 2.5), generator) for column in task.columns
        }
        rows.append(texts | {"label": task.labels[label] if names else label, "idx": index})
    return rows


def write_rows(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def arguments(**values) -> list[str]:
    defaults = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    return [f"--{name}={value}" for name, value in (defaults | values).items()]


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


def predictions(path: Path) -> list[str]:
    header, *lines = path.read_text().splitlines()
    assert header == "index\tprediction"
    indices, values = zip(*(line.split("\t") for line in lines), strict=True)
    assert indices == tuple(map(str, range(len(lines))))
    return list(values)


def outputs_one_by_one(
    folder: Path, rows: list[dict], columns: tuple[str, ...], tokenizer_folder: Path | None = None
) -> torch.Tensor:
    """Logits of the saved model, each text by itself and so without padding: [N, labels]."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder or folder)
    logits = []
    for row in rows:
        inputs = tokenizer(*(row[column] for column in columns), return_tensors="pt")
        if model.config.type_vocab_size == 1:
            # which the tokenizer of a run does not give
            inputs.pop("token_type_ids", None)
        with torch.no_grad():
            logits.append(model(**inputs).logits[0])
    return torch.stack(logits)


@pytest.mark.parametrize("architecture", ["bert", "yoso"])
def test_a_separable_task_is_learned(run_glue, checkpoints, tmp_path, architecture):
    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 256))
    validation = write_rows(tmp_path / "validation.jsonl", task_rows("sst2", 64, seed=1))
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / architecture,
            task_name="sst2",
            train_file=train,
            validation_file=validation,
            do_train=True,
            do_eval=True,
            eval_strategy="epoch",
            save_strategy="epoch",
            num_train_epochs=4,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            output_dir=tmp_path / "run",
        )
    )
    assert results(tmp_path / "run")["eval_accuracy"] >= 0.97

    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert config["label2id"] == {"negative": 0, "positive": 1}

    history = json.loads((tmp_path / "run" / "checkpoint-64" / "trainer_state.json").read_text())["log_history"]
    by_epoch = [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
    assert len(by_epoch) == 4
    assert by_epoch[-1] == results(tmp_path / "run")["eval_accuracy"]


@pytest.mark.parametrize("architecture", ["bert", "yoso"])
def test_a_score_is_learned(run_glue, checkpoints, tmp_path, architecture):
    def rows(count: int, seed: int) -> list[dict]:
        generator = np.random.default_rng(seed)
        shares = generator.integers(0, 6, count)
        texts = (" ".join(generator.permutation(["good"] * n + ["bad"] * (5 - n))) for n in shares)
        return [
            {"sentence1": text, "sentence2": "the film", "label": float(n)}
            for text, n in zip(texts, shares, strict=True)
        ]

    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / architecture,
            task_name="stsb",
            train_file=write_rows(tmp_path / "train.jsonl", rows(320, 0)),
            validation_file=write_rows(tmp_path / "validation.jsonl", rows(64, 1)),
            do_train=True,
            do_eval=True,
            num_train_epochs=8,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            output_dir=tmp_path / "run",
        )
    )
    assert results(tmp_path / "run")["eval_pearson"] > 0.9
    assert results(tmp_path / "run")["eval_spearmanr"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert model.config.num_labels == 1
    assert model.config.problem_type == "regression"


@pytest.mark.parametrize(
    ("task_name", "split"), [("mnli", "validation_matched and validation_mismatched"), ("mrpc", "validation")]
)
def test_the_card_names_the_splits_of_the_hub(run_glue, task_name, split):
    for rows, slice_of_split in ((None, ""), (50, "[:50]")):
        args = run_glue.GlueArguments("model", task_name=task_name, max_eval_samples=rows)
        found = run_glue.hub_data(args)["evaluated_on"]["dataset_split"].split(" and ")
        assert found == [part + slice_of_split for part in split.split(" and ")]


def test_each_split_has_a_limit_of_its_own(run_glue):
    """Of fewer rows than that, all are used."""
    table = Table("a", datasets.Dataset.from_dict({"label": [5, 6, 7, 8]}))
    args = run_glue.GlueArguments("model", max_train_samples=2, max_eval_samples=3, max_predict_samples=9)
    counts = {"train": 2, "validation": 3, "validation_mismatched": 3, "test": 4, "test_matched": 4}
    for split, count in counts.items():
        assert run_glue.first_rows(table, args, split).rows["label"][:] == [5, 6, 7, 8][:count]
        assert run_glue.first_rows(table, run_glue.GlueArguments("model"), split).rows["label"][:] == [5, 6, 7, 8]


def test_what_is_only_evaluated_or_predicted_makes_no_other_run(run_glue):
    args = run_glue.GlueArguments("model", task_name="mnli", train_file="train.csv")
    files = {f"{split}_file" for split in ("validation", "validation_mismatched", "test", "test_mismatched")}
    others = dict.fromkeys(files, "other.csv") | {"max_eval_samples": 5, "max_predict_samples": 5}
    assert dataclasses.replace(args, **others).of_training() == args.of_training()
    for name, value in {"task_name": "sst2", "train_file": "other.csv", "max_train_samples": 5}.items():
        assert dataclasses.replace(args, **{name: value}).of_training() != args.of_training()


@pytest.mark.parametrize("task_name", TASKS)
def test_predictions_and_scores_are_those_of_the_saved_model(run_glue, checkpoints, tmp_path, task_name):
    task = TASKS[task_name]
    rows = {"": task_rows(task_name, 24, seed=1), "mismatched_": task_rows(task_name, 17, seed=2)}
    mismatched = task_name == "mnli"
    files = {"train_file": write_rows(tmp_path / "train.jsonl", task_rows(task_name, 32))}
    for part, split_rows in rows.items():
        if mismatched or not part:
            for split in ("validation", "test"):
                path = tmp_path / f"{split}_{part}file.jsonl"
                files[f"{split}_{part}file"] = write_rows(path, split_rows)
    # of weights as small as they are drawn, scores of all pairs are the same but for rounding, which then decides how
    # they correlate
    model = BertForMaskedLM.from_pretrained(checkpoints / "bert")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight *= 30
    shutil.copytree(checkpoints / "bert", tmp_path / "bert")
    model.save_pretrained(tmp_path / "bert")
    run_glue.main(
        arguments(
            model_name_or_path=tmp_path / "bert",
            task_name=task_name,
            **files,
            do_train=True,
            do_eval=True,
            do_predict=True,
            num_train_epochs=4,
            learning_rate=1e-3,
            output_dir=tmp_path / "run",
        )
    )

    scores = results(tmp_path / "run")
    for part, name in zip(rows, task.submission, strict=False):
        logits = outputs_one_by_one(tmp_path / "run", rows[part], task.columns)
        labels = np.array([row["label"] for row in rows[part]])
        written = predictions(tmp_path / "run" / f"{name}.tsv")
        if task_name == "stsb":
            expected = logits.squeeze(-1).clamp(0, 5).numpy()
            np.testing.assert_allclose(np.array(written, dtype=float), expected, atol=1e-3)
            value, key = np.corrcoef(logits.squeeze(-1).numpy(), labels)[0, 1], "pearson"
        else:
            ids = logits.argmax(-1).numpy()
            named = task_name in ("mnli", "qnli", "rte")
            assert written == [task.labels[index] if named else str(index) for index in ids]
            key = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1"}.get(task_name, "accuracy")
            score = {"matthews_correlation": matthews_corrcoef, "f1": f1_score}.get(key, lambda x, y: np.mean(x == y))
            value = score(labels, ids)
        infix = {"": "matched_", "mismatched_": "mismatched_"}[part] if mismatched else ""
        assert scores[f"eval_{infix}{key}"] == pytest.approx(value, abs=1e-5)
        # the test files have labels here, so they are scored too
        assert scores[f"predict_{infix}{key}"] == pytest.approx(value, abs=1e-5)
    assert len(list((tmp_path / "run").glob("*.tsv"))) == 1 + mismatched


def test_a_task_comes_from_the_hub(run_glue, checkpoints, tmp_path, monkeypatch):
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("premise", "hypothesis")}
        | {
            "label": datasets.ClassLabel(names=["entailment", "neutral", "contradiction"]),
            "idx": datasets.Value("int32"),
        }
    )
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, *split))
        splits = []
        for seed, name in enumerate(split):
            rows = task_rows("mnli", 12 + seed, seed)
            if name.startswith("test"):
                rows = [row | {"label": -1} for row in rows]
            splits.append(datasets.Dataset.from_list(rows, features=features))
        return splits

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / "bert",
            task_name="mnli",
            do_train=True,
            do_eval=True,
            do_predict=True,
            max_train_samples=8,
            max_predict_samples=9,
            max_steps=1,
            output_dir=tmp_path / "run",
        )
    )
    splits = ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
    assert asked == [("nyu-mll/glue", "mnli", *splits)]
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= results(tmp_path / "run").keys()
    # labels of -1 are none: nothing to score
    assert not [name for name in results(tmp_path / "run") if name.startswith("predict") and "accuracy" in name]
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        written = predictions(tmp_path / "run" / name)
        assert len(written) == 9
        assert set(written) <= {"entailment", "neutral", "contradiction"}


@pytest.mark.parametrize("ending", [".csv", ".json", ".jsonl", ".parquet"])
def test_own_data_in_every_format(run_glue, checkpoints, tmp_path, ending):
    rows = [
        {"id": index, "text": row["sentence"], "kind": "PN"[row["label"]]}
        for index, row in enumerate(task_rows("sst2", 32))
    ]
    # a word that pandas would read as a missing value
    rows[3]["text"] = "null"
    unlabelled = [{"id": row["id"], "text": row["text"], "kind": None} for row in rows]
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / "bert",
            train_file=write_rows(tmp_path / f"train{ending}", rows),
            validation_file=write_rows(tmp_path / f"validation{ending}", rows),
            test_file=write_rows(tmp_path / f"test[1]{ending}", unlabelled),
            label_column="kind",
            do_train=True,
            do_eval=True,
            do_predict=True,
            num_train_epochs=2,
            learning_rate=1e-2,
            output_dir=tmp_path / "run",
        )
    )
    ids = outputs_one_by_one(tmp_path / "run", rows, ("text",)).argmax(-1)
    written = predictions(tmp_path / "run" / "predictions.tsv")
    assert written == ["NP"[index] for index in ids]
    accuracy = np.mean([prediction == row["kind"] for prediction, row in zip(written, rows, strict=True)])
    assert results(tmp_path / "run")["eval_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("labels", [("N", "P", "Q"), None])
def test_own_data_have_the_labels_of_a_checkpoint_that_is_not_trained(run_glue, checkpoints, tmp_path, labels):
    """Whichever of them the file holds, or none; a head of one score makes a regression, also of whole numbers."""
    names = dict(enumerate(labels or ("score",)))
    model = BertForSequenceClassification.from_pretrained(checkpoints / "bert", id2label=names)
    model.classifier.weight.data *= 50
    model.save_pretrained(tmp_path / "model")
    rows = [{"text": row["sentence"]} for row in task_rows("sst2", 12)]
    values = ["Q"] * 12 if labels else list(range(12))
    labelled = [row | {"label": value} for row, value in zip(rows, values, strict=True)]
    run_glue.main(
        arguments(
            model_name_or_path=tmp_path / "model",
            tokenizer_name=checkpoints / "bert",
            validation_file=write_rows(tmp_path / "validation.jsonl", labelled),
            test_file=write_rows(tmp_path / "test.jsonl", rows),
            do_eval=True,
            do_predict=True,
            output_dir=tmp_path / "run",
        )
    )
    logits = outputs_one_by_one(tmp_path / "model", rows, ("text",), checkpoints / "bert")
    written, scores = predictions(tmp_path / "run" / "predictions.tsv"), results(tmp_path / "run")
    if labels:
        assert written == [labels[index] for index in logits.argmax(-1)]
        assert scores["eval_accuracy"] == pytest.approx(written.count("Q") / 12)
    else:
        np.testing.assert_allclose(np.array(written, dtype=float), logits.squeeze(-1), atol=1e-3)
        assert scores["eval_pearson"] == pytest.approx(np.corrcoef(logits.squeeze(-1), values)[0, 1], abs=1e-4)


@pytest.mark.parametrize("named", [False, True])
def test_pairs_that_nobody_asked_for_are_warned_of(run_glue, checkpoints, tmp_path, caplog, named):
    """Of a path beside the text a model may read the label."""
    rows = [row | {"file": f"{'np'[row['label']]}/{row['idx']}.txt"} for row in task_rows("sst2", 8)]
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / "bert",
            train_file=write_rows(tmp_path / "train.jsonl", rows),
            do_train=True,
            max_steps=1,
            output_dir=tmp_path / "run",
            **({"sentence1_column": "sentence"} if named else {}),
        )
    )
    warning = "train.jsonl: each text is the pair of the columns 'sentence' and 'file'"
    assert (warning in caplog.text) != named


@pytest.mark.parametrize("missing", [True, False])
def test_texts_that_are_missing_in_csv_are_warned_of(run_glue, checkpoints, tmp_path, caplog, missing):
    path = tmp_path / "train.csv"
    texts = ["good film", "", "  ", ""] if missing else ["good film", "bad", "bad", "bad"]
    path.write_text("text,label\n" + "".join(f"{text},{index % 2}\n" for index, text in enumerate(texts)))
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / "bert",
            train_file=path,
            do_train=True,
            max_steps=1,
            output_dir=tmp_path / "run",
        )
    )
    assert ("train.csv: column 'text' is blank in 3 of 4 rows" in caplog.text) == missing


def test_own_pairs_with_named_columns_and_float_labels(run_glue, checkpoints, tmp_path):
    rows = [{"a": "good film", "b": "bad plot", "c": "the", "y": value} for value in (-2.5, 0.0, 7.5)]
    path = write_rows(tmp_path / "train.jsonl", rows)
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / "bert",
            train_file=path,
            validation_file=path,
            test_file=path,
            sentence1_column="c",
            sentence2_column="a",
            label_column="y",
            do_train=True,
            do_predict=True,
            max_steps=3,
            learning_rate=1e-2,
            output_dir=tmp_path / "run",
        )
    )
    scores = outputs_one_by_one(tmp_path / "run", rows, ("c", "a")).squeeze(-1)
    written = np.array(predictions(tmp_path / "run" / "predictions.tsv"), dtype=float)
    np.testing.assert_allclose(written, scores, atol=1e-3)


def test_label_names_are_as_good_as_ids(run_glue, checkpoints, tmp_path):
    for names in (False, True):
        run_glue.main(
            arguments(
                model_name_or_path=checkpoints / "bert",
                task_name="rte",
                train_file=write_rows(tmp_path / f"train-{names}.jsonl", task_rows("rte", 32, names=names)),
                validation_file=write_rows(tmp_path / f"dev-{names}.jsonl", task_rows("rte", 32, 1, names=names)),
                do_train=True,
                do_eval=True,
                learning_rate=1e-2,
                output_dir=tmp_path / f"run-{names}",
            )
        )
    first, second = (results(tmp_path / f"run-{names}") for names in (False, True))
    assert first["train_loss"] == second["train_loss"]
    assert first["eval_loss"] == second["eval_loss"]


def test_a_checkpoint_keeps_its_order_of_labels(run_glue, checkpoints, tmp_path):
    model = BertForSequenceClassification.from_pretrained(checkpoints / "bert")
    model.classifier.weight.data *= 50
    texts = task_rows("rte", 48)
    file = write_rows(tmp_path / "validation.jsonl", texts)
    for name, labels in (("usual", TASKS["rte"].labels), ("swapped", ("NOT_ENTAILMENT", "ENTAILMENT"))):
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {label: index for index, label in enumerate(labels)}
        model.save_pretrained(tmp_path / name)
        # the same classifier with its two rows exchanged
        model.classifier.load_state_dict({key: value.flip(0) for key, value in model.classifier.state_dict().items()})
        run_glue.main(
            arguments(
                model_name_or_path=tmp_path / name,
                tokenizer_name=checkpoints / "bert",
                task_name="rte",
                validation_file=file,
                test_file=file,
                do_eval=True,
                do_predict=True,
                output_dir=tmp_path / f"run-{name}",
            )
        )
    usual, swapped = (predictions(tmp_path / f"run-{name}" / "RTE.tsv") for name in ("usual", "swapped"))
    assert usual == swapped
    scores = results(tmp_path / "run-usual")
    assert scores["eval_loss"] == pytest.approx(results(tmp_path / "run-swapped")["eval_loss"], rel=1e-5)
    # the loss tells the two orders apart, whatever the predictions
    flipped = outputs_one_by_one(tmp_path / "usual", texts, TASKS["rte"].columns, checkpoints / "bert").flip(1)
    wrong = torch.nn.functional.cross_entropy(flipped, torch.tensor([row["label"] for row in texts]))
    assert abs(scores["eval_loss"] - wrong.item()) > 1e-3


def test_f1_is_of_the_task_s_class(run_glue, checkpoints, tmp_path):
    """Whichever id the checkpoint gives to it."""
    task, rows = TASKS["mrpc"], task_rows("mrpc", 48)
    model = BertForSequenceClassification.from_pretrained(checkpoints / "bert")
    model.config.id2label = dict(enumerate(reversed(task.labels)))
    model.config.label2id = {label: index for index, label in model.config.id2label.items()}
    # both classes are predicted, one more often
    model.classifier.weight.data *= 50
    model.save_pretrained(tmp_path / "model")
    logits = outputs_one_by_one(tmp_path / "model", rows, task.columns, checkpoints / "bert")
    model.classifier.bias.data[0] += (logits[:, 1] - logits[:, 0]).quantile(0.3)
    model.save_pretrained(tmp_path / "model")
    run_glue.main(
        arguments(
            model_name_or_path=tmp_path / "model",
            tokenizer_name=checkpoints / "bert",
            task_name="mrpc",
            validation_file=write_rows(tmp_path / "validation.jsonl", rows),
            do_eval=True,
            output_dir=tmp_path / "run",
        )
    )
    logits = outputs_one_by_one(tmp_path / "model", rows, task.columns, checkpoints / "bert")
    equivalent = (logits.argmax(-1) == 0).int().numpy()
    labels = np.array([row["label"] for row in rows])
    found = results(tmp_path / "run")
    assert f1_score(labels, equivalent) != pytest.approx(f1_score(1 - labels, 1 - equivalent), abs=0.05)
    assert found["eval_f1"] == pytest.approx(f1_score(labels, equivalent))
    assert found["eval_accuracy"] == pytest.approx(np.mean(labels == equivalent))


@pytest.mark.parametrize("architecture", ["bert", "yoso"])
@pytest.mark.parametrize("task_name", ["sst2", "stsb"])
def test_accumulated_batches_give_the_loss_of_one(run_glue, checkpoints, tmp_path, architecture, task_name):
    """A step over 8 rows, whole or in 4 parts: reported loss and gradient are those of the mean over the rows."""
    task, rows = TASKS[task_name], task_rows(task_name, 8)
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoints / architecture,
        num_labels=len(task.labels or ("score",)),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    if architecture == "yoso":
        model.config.use_expectation = True
    model.save_pretrained(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / architecture)
    texts = ([row[column] for row in rows] for column in task.columns)
    inputs = tokenizer(*texts, padding=True, return_tensors="pt", return_token_type_ids=architecture == "bert")
    logits = model(**inputs).logits
    labels = torch.tensor([row["label"] for row in rows])
    if task.labels is None:
        loss = torch.nn.functional.mse_loss(logits.squeeze(-1), labels)
    else:
        loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()

    train = write_rows(tmp_path / "train.jsonl", rows)
    for parts in (1, 4):
        run_glue.main(
            arguments(
                model_name_or_path=tmp_path / "model",
                tokenizer_name=checkpoints / architecture,
                task_name=task_name,
                train_file=train,
                validation_file=train,
                do_train=True,
                do_eval=True,
                eval_on_start=True,
                max_steps=1,
                per_device_train_batch_size=8 // parts,
                gradient_accumulation_steps=parts,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                output_dir=tmp_path / f"run-{parts}",
            )
        )
        history = json.loads((tmp_path / f"run-{parts}" / "trainer_state.json").read_text())["log_history"]
        assert history[0]["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert results(tmp_path / f"run-{parts}")["train_loss"] == pytest.approx(loss.item(), rel=1e-4)
        # a learning rate of 1: the parameters moved by the gradient
        after = AutoModelForSequenceClassification.from_pretrained(tmp_path / f"run-{parts}").state_dict()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter - after[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_no_label_is_no_class_of_the_name_none(tmp_path):
    task = GlueTask("sst2", ("text",), ("None", "rel"), ("predictions",))
    rows = [{"text": "good", "label": label} for label in ("None", "rel", None)]
    tables = [read_file("a", write_rows(tmp_path / f"{i}.jsonl", part)) for i, part in enumerate((rows, rows[:2]))]
    with pytest.raises(ValueError, match="column 'label' holds None in 1 of 3 rows; allowed are 'None', 'rel'"):
        _encode_labels(tables[0], task, {"None": 0, "rel": 1}, False)
    assert _encode_labels(tables[1], task, {"None": 0, "rel": 1}, False) == [0, 1]
    empty = Table("a", tables[0].rows.select([2, 2]))
    assert _encode_labels(empty, task, {"None": 0, "rel": 1}, True) is None


def test_minus_one_may_be_a_class_of_one_s_own():
    """Of GLUE's tasks it is a missing label."""
    table = Table("a", datasets.Dataset.from_dict({"text": ["good", "bad"], "label": [-1, -1]}))
    own = GlueTask("sst2", ("text",), ("-1", "1"), ("predictions",))
    assert _encode_labels(table, own, {"-1": 0, "1": 1}, True) == [0, 0]
    assert _encode_labels(table, TASKS["sst2"], {"negative": 0, "positive": 1}, True) is None


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_a_score_is_finite(score):
    table = Table("a", datasets.Dataset.from_dict({"text": ["good", "bad"], "label": [1.5, score]}))
    task = GlueTask("stsb", ("text",), None, ("predictions",))
    with pytest.raises(ValueError, match=f"^a: column 'label' holds {score} in 1 of . rows; allowed are numbers$"):
        _encode_labels(table, task, {}, False)


@pytest.mark.parametrize("labels", [("US", "us"), ("a", "A", "b")])
def test_labels_may_differ_in_case_alone(labels):
    """A head that was trained on them is used as it is, in its own order."""
    task = GlueTask("sst2", ("text",), labels, ("predictions",))
    present = labels[::-1]
    config = YosoConfig(id2label=dict(enumerate(present)))
    set_labels(config, task, trains=False)
    assert config.label2id == {label: index for index, label in enumerate(present)}


def test_labels_without_names_are_the_task_s_if_there_are_as_many():
    config = YosoConfig(num_labels=2)
    set_labels(config, TASKS["sst2"], trains=False)
    assert config.id2label == {0: "negative", 1: "positive"}
    with pytest.raises(ValueError, match="the checkpoint's labels are LABEL_0, LABEL_1, LABEL_2, the task's are neg"):
        set_labels(YosoConfig(num_labels=3), TASKS["sst2"], trains=False)


@pytest.mark.parametrize(
    ("present", "warned"),
    [
        (["negative", "positive"], False),
        (["Positive", "Negative"], False),
        (["LABEL_0", "LABEL_1"], False),
        (["a", "b", "c"], False),
        (["bad", "good"], True),
    ],
)
def test_a_trained_head_of_other_labels_is_warned_of(caplog, present, warned):
    """Training goes on from it. A head for another number of labels is made anew."""
    config = YosoConfig(id2label=dict(enumerate(present)))
    set_labels(config, TASKS["sst2"], trains=True)
    assert sorted(label.lower() for label in config.label2id) == ["negative", "positive"]
    assert ("'bad' becomes 'negative', 'good' becomes 'positive'" in caplog.text) == warned
    assert bool(caplog.text) == warned


def test_a_csv_file_may_have_numbers_alone(tmp_path):
    (tmp_path / "a.csv").write_text("n\n1\n 2\n")
    rows = read_file("a", str(tmp_path / "a.csv")).rows
    assert rows.to_dict() == {"n": [1, 2]}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["0", "10", "2"], ("0", "2", "10")),
        (["001", "002", "010"], ("001", "002", "010")),
        (["1", "2.5", "-3e2"], None),
        ([".5", " 00.5", "1."], None),
        (["1", "", "0"], ("0", "1")),
        (["null", "NA", "x"], ("NA", "null", "x")),
        (["99999999999999999999", "x", "1"], ("1", "99999999999999999999", "x")),
    ],
)
def test_labels_of_a_csv_file_are_what_is_written_there(tmp_path, labels, expected):
    (tmp_path / "a.csv").write_text("id,text,label\n" + "".join(f'7,"good, fine",{label}\n' for label in labels))
    table = read_file("train_file", str(tmp_path / "a.csv"))
    # a column of numbers is no text
    task = infer_task(table, [], "label")
    assert (task.labels, task.columns) == (expected, ("text",))
    assert table.rows["text"][:] == ["good, fine"] * 3
    assert table.rows["id"][:] == [7] * 3


@pytest.mark.parametrize(
    ("ending", "labels", "warned"),
    [
        ("csv", ("0.5", "1.5", "2.5", "NA"), True),
        ("jsonl", ("0.5", "1.5"), True),
        ("csv", ("0.5", "NA", "x"), False),
        ("csv", ("0", "1", "NA"), False),
    ],
)
def test_numbers_as_text_are_classes_with_a_warning(tmp_path, caplog, ending, labels, warned):
    path = tmp_path / f"a.{ending}"
    if ending == "csv":
        path.write_text("text,label\n" + "".join(f"good,{label}\n" for label in labels))
    else:
        write_rows(path, [{"text": "good", "label": label} for label in labels])
    assert infer_task(read_file("train_file", str(path)), [], "label").labels == labels
    warning = "column 'label' holds text that is mostly numbers, such as '0.5', and each is a class"
    assert (warning in caplog.text) == warned


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize(("other", "warned"), [("neg ", True), (" pos", True), ("neu ", False), ("Neg", False)])
def test_labels_that_blanks_alone_tell_apart_are_warned_of(tmp_path, caplog, ending, other, warned):
    path = tmp_path / f"a.{ending}"
    labels = ("neg", other, "pos")
    if ending == "csv":
        path.write_text("text,label\n" + "".join(f"good,{label}\n" for label in labels))
    else:
        write_rows(path, [{"text": "good", "label": label} for label in labels])
    assert sorted(infer_task(read_file("train_file", str(path)), [], "label").labels) == sorted(labels)
    warning = (
        f"column 'label' holds labels that differ from others by blanks alone, and are classes of their own: {other!r}"
    )
    assert (warning in caplog.text) == warned


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("text;label\ngood;1\n", "text;label"),
        # as many fields as the header has, and more
        ("text;label\ngood, fine, long;1\n", "text;label"),
        ("text\tlabel\ngood\t1\n", "text\\\\tlabel"),
        ("text|label\ngood|1\n", "text\\|label"),
    ],
)
def test_other_separators_of_a_csv_file_are_named(tmp_path, text, header):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=f"fields must be separated by commas, but the header is '{header}'"):
        read_file("train_file", str(tmp_path / "a.csv"))


@pytest.mark.parametrize(("labels", "warned"), [((0.0, 1.0, 2.0), True), ((0.0, 0.5), False)])
def test_a_regression_on_whole_numbers_is_warned_of(tmp_path, caplog, labels, warned):
    """As classes with a missing label become in pandas."""
    rows = [{"text": "good", "label": label} for label in labels]
    assert infer_task(read_file("train_file", write_rows(tmp_path / "a.jsonl", rows)), [], "label").labels is None
    assert ("column 'label' holds floats, which make a regression, though all are whole" in caplog.text) == warned


def test_the_index_of_a_frame_is_no_text(tmp_path):
    frame = pd.DataFrame({"text": ["good", "bad"], "label": [1, 0]}, index=["first", "second"])
    frame.to_parquet(tmp_path / "a.parquet")
    table = read_file("train_file", str(tmp_path / "a.parquet"))
    assert "__index_level_0__" in table.rows.column_names
    assert infer_task(table, [], "label").columns == ("text",)


@pytest.mark.parametrize("named", [True, False])
def test_texts_of_a_csv_file_may_all_be_numbers(run_glue, checkpoints, tmp_path, named):
    """Where the column is named, or holds other text in the training data."""
    (tmp_path / "train.csv").write_text("a,label\n007,0\ngood film,1\n")
    (tmp_path / "validation.csv").write_text("a,label\n1984,1\n2001,0\n")
    names = {"sentence1_column": "a"} if named else {}
    files = {f"{split}_file": tmp_path / f"{split}.csv" for split in ("train", "validation")}
    if named:
        files["train_file"] = files["validation_file"]
    args, _ = run_glue.parse_arguments(
        [run_glue.GlueArguments, run_glue.TrainingArguments],
        arguments(model_name_or_path=checkpoints / "bert", output_dir=tmp_path / "run", **files, **names),
    )
    tables = run_glue.read_tables(args, ["train", "validation"])
    assert tables["validation"].rows["a"][:] == ["1984", "2001"]
    assert tables["validation"].rows["label"][:] == [1, 0]


def test_texts_of_a_task_in_a_csv_file_may_all_be_numbers(run_glue, tmp_path):
    (tmp_path / "train.csv").write_text("sentence,label\n2001,1\n1984,0\n")
    args = run_glue.GlueArguments("model", task_name="sst2", train_file=str(tmp_path / "train.csv"))
    rows = run_glue.read_tables(args, ["train"])["train"].rows
    assert (rows["sentence"][:], rows["label"][:]) == (["2001", "1984"], [1, 0])


@pytest.mark.parametrize("name", ["a.CSV", "a.Jsonl"])
def test_endings_may_be_in_capitals(tmp_path, name):
    path = tmp_path / name
    path.write_text("text,label\ngood,1\n" if name == "a.CSV" else '{"text": "good", "label": 1}\n')
    check_file("train_file", str(path))
    assert read_file("train_file", str(path)).rows[0] == {"text": "good", "label": 1}


def test_a_csv_column_has_one_type_whatever_rows_are_read_at_once(tmp_path):
    """pandas reads some ten thousand rows at a time, and would choose a type for each."""
    rows = [("A01", "good"), ("001", "bad")] * 6000 + [("001", "12")] * 9000
    (tmp_path / "a.csv").write_text("label,text\n" + "".join(f"{label},{text}\n" for label, text in rows))
    table = read_file("train_file", str(tmp_path / "a.csv"))
    assert infer_task(table, [], "label").labels == ("001", "A01")
    assert list(zip(table.rows["label"], table.rows["text"], strict=True)) == rows


def test_a_blank_line_of_one_column_is_a_row(tmp_path):
    """Predictions would else be those of other lines."""
    (tmp_path / "a.csv").write_text("sentence\ngood\n\nbad\n", newline="")
    assert list(read_file("test_file", str(tmp_path / "a.csv")).rows["sentence"]) == ["good", "", "bad"]
    (tmp_path / "b.csv").write_text("sentence,label\ngood,1\n\nbad,0\n", newline="")
    assert list(read_file("train_file", str(tmp_path / "b.csv")).rows["label"]) == [1, 0]


def test_a_number_among_the_texts_of_a_large_json_file_is_refused(tmp_path):
    """Of the piece of the file that it is in, datasets would else put quotes around all other texts."""
    rows = [{"sentence": f"{index} " * 500, "label": "no"} for index in range(5000)] + [{"sentence": "5", "label": 1}]
    with pytest.raises(ValueError, match="^--train_file .*: no rows can be read as json: .*label.* string to number"):
        read_file("train_file", write_rows(tmp_path / "a.jsonl", rows))


def test_a_file_that_has_changed_is_read_again_whatever_its_time(tmp_path):
    path = tmp_path / "a.csv"
    for text in ("one", "three"):
        path.write_text(f"sentence,label\n{text},1\n")
        os.utime(path, (2e9, 2e9))
        assert list(read_file("train_file", str(path)).rows["sentence"]) == [text]


@pytest.mark.parametrize("row", ["good film, really,1", "good, film, really,1"])
def test_a_csv_row_with_more_fields_than_the_header_is_refused(tmp_path, row):
    (tmp_path / "a.csv").write_text(f"text,label\n{row}\n")
    with pytest.raises(ValueError, match="the first row has more fields than the header, text, label"):
        read_file("train_file", str(tmp_path / "a.csv"))


def test_labels_of_a_parquet_file(tmp_path):
    """Classes by their names, a missing one among them, and decimals as the numbers they are."""
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c", "d"], "label": [1, 0, None, -1]})
    rows.cast(datasets.Features(features)).to_parquet(tmp_path / "a.parquet")
    table = read_file("train_file", str(tmp_path / "a.parquet"))
    assert table.rows["label"][:] == ["pos", "neg", None, None]
    assert infer_task(table, [], "label").labels == ("neg", "pos")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1.5, 2.5]})
    rows.cast_column("label", datasets.Value("decimal128(4, 2)")).to_parquet(tmp_path / "b.parquet")
    table = read_file("train_file", str(tmp_path / "b.parquet"))
    assert infer_task(table, [], "label").labels is None
    assert table.rows["label"][:] == [1.5, 2.5]


def test_a_checkpoint_is_complete_once_all_processes_have_written(run_glue, checkpoints, tmp_path, monkeypatch):
    """The trainer state, by which a resumed run knows it, comes after what each process writes, and a barrier."""
    order = []

    def noted(owner, name):
        function = getattr(owner, name)

        def note(*args, **kwargs):
            order.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)

    noted(transformers.Trainer, "_save_rng_state")
    noted(accelerate.Accelerator, "wait_for_everyone")
    noted(TrainerState, "save_to_json")
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / "bert",
            task_name="sst2",
            train_file=write_rows(tmp_path / "train.jsonl", task_rows("sst2", 8)),
            do_train=True,
            max_steps=1,
            save_strategy="steps",
            save_steps=1,
            output_dir=tmp_path / "run",
        )
    )
    parts = order.index("_save_rng_state")
    assert order[parts : parts + 3] == ["_save_rng_state", "wait_for_everyone", "save_to_json"]


def test_a_run_with_steps_left_is_not_evaluated_by_the_model_before_it(run_glue, checkpoints, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 16))

    def command(**changes) -> list[str]:
        values = {"model_name_or_path": checkpoints / "bert", "task_name": "sst2", "train_file": train}
        values |= {"validation_file": train, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
        return arguments(**values, output_dir=tmp_path / "run", **changes)

    run_glue.main(command(do_train=True))
    last = tmp_path / "run" / "checkpoint-2"
    kept = tmp_path / "last"
    last.rename(kept)
    for action in ("do_eval", "do_predict"):
        with pytest.raises(
            ValueError, match="holds a run that has steps left, at .*checkpoint-1: finish it with --do_tr"
        ):
            run_glue.main(command(test_file=train, **{action: True}))
    kept.rename(last)
    run_glue.main(command(do_eval=True))
    assert results(tmp_path / "run")["eval_loss"] > 0


def test_labels_of_several_cells_or_lines_are_quoted(tmp_path):
    labels = ("a\tb", 'c\n"d"', "e")
    task = GlueTask("sst2", ("text",), labels, ("predictions",), names_in_submission=True)
    write_predictions(tmp_path / "a.tsv", np.array([1, 2, 0]), task, dict(enumerate(labels)))
    rows = list(csv.reader((tmp_path / "a.tsv").open(newline=""), "excel-tab"))
    assert rows == [["index", "prediction"], ["0", labels[1]], ["1", "e"], ["2", labels[0]]]
    assert (tmp_path / "a.tsv").read_bytes().endswith(b'\n1\te\n2\t"a\tb"\n')


def test_ids_of_a_submission_are_the_task_s(tmp_path):
    """Whichever the checkpoint gives to its labels."""
    write_predictions(
        tmp_path / "MRPC.tsv", np.array([0, 1, 1]), TASKS["mrpc"], {0: "equivalent", 1: "not_equivalent"}
    )
    assert predictions(tmp_path / "MRPC.tsv") == ["1", "0", "0"]


def test_similarity_scores_are_clipped(tmp_path):
    write_predictions(tmp_path / "STS-B.tsv", np.array([-0.4, 2.34567, 5.1]), TASKS["stsb"], {0: "score"})
    assert (tmp_path / "STS-B.tsv").read_text() == "index\tprediction\n0\t0.000\n1\t2.346\n2\t5.000\n"
    assert [path.name for path in tmp_path.iterdir()] == ["STS-B.tsv"]


def test_a_finished_run_keeps_its_best_model(run_glue, checkpoints, tmp_path):
    def command(**changes) -> list[str]:
        values = {
            "model_name_or_path": checkpoints / "bert",
            "task_name": "sst2",
            "train_file": train,
            "validation_file": train,
            "do_train": True,
            "do_eval": True,
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
            "max_steps": 3,
            "load_best_model_at_end": True,
            # the worst, which is the first
            "greater_is_better": True,
            "learning_rate": 1e-3,
            "output_dir": tmp_path / "run",
        }
        return arguments(**(values | changes))

    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 32))
    run_glue.main(command())
    weights = BertForSequenceClassification.from_pretrained(tmp_path / "run").state_dict()
    loss = results(tmp_path / "run")["eval_loss"]
    run_glue.main(command())
    again = BertForSequenceClassification.from_pretrained(tmp_path / "run").state_dict()
    last = BertForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint-3").state_dict()
    assert not torch.equal(weights["classifier.weight"], last["classifier.weight"])
    for name, weight in weights.items():
        torch.testing.assert_close(again[name], weight, rtol=0, atol=0)
    assert results(tmp_path / "run")["eval_loss"] == loss
    with pytest.raises(ValueError, match="holds another run: load_best_model_at_end is True there and False here"):
        run_glue.main(command(load_best_model_at_end=False))
    with open(train, "a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="holds another run: content of .*train.jsonl has changed"):
        run_glue.main(command())


def test_a_run_can_be_plotted(run_glue, checkpoints, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 8))
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / "bert",
            task_name="sst2",
            train_file=train,
            validation_file=train,
            do_train=True,
            do_eval=True,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
            max_steps=4,
            output_dir=tmp_path / "run",
        )
    )
    command = [sys.executable, ROOT / "benchmarks" / "plot_runs.py", "--commit", "abc", tmp_path / "plot"]
    subprocess.run([*map(str, command), f"bert={tmp_path / 'run'}"], check=True, timeout=300)
    assert str(tmp_path) not in (tmp_path / "plot.json").read_text()
    run = json.loads((tmp_path / "plot.json").read_text())["runs"]["bert"]
    assert [step for step, _ in run["evaluation"]] == [2, 4]
    assert run["evaluation"][-1][1] == results(tmp_path / "run")["eval_loss"]
    assert [step for step, _ in run["training"]] == [1, 2, 3, 4]
    assert (tmp_path / "plot.png").stat().st_size


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("save_steps", "stop_at", "options"),
    [
        (3, 5, {}),
        # in the second of its epochs of four steps
        (6, 8, {"train_sampling_strategy": "group_by_length"}),
        # saved before the evaluation at an epoch's end, which is not made up for
        (4, 5, {"eval_strategy": "epoch"}),
        # of which Trainer would delete the last one at the end, as the first has the "best" loss
        (
            3,
            5,
            {
                "save_total_limit": 1,
                "load_best_model_at_end": True,
                "metric_for_best_model": "loss",
                "greater_is_better": True,
                "eval_strategy": "steps",
                "eval_steps": 3,
            },
        ),
    ],
)
def test_the_same_command_resumes(run_glue, checkpoints, tmp_path, monkeypatch, save_steps, stop_at, options):
    steps = []

    class CountedTrainer(CardTrainer):
        stop_at = -1

        def training_step(self, *args, **kwargs):
            if self.state.global_step == self.stop_at:
                raise Interrupted
            steps.append(self.state.global_step)
            return super().training_step(*args, **kwargs)

    def command(name: str) -> list[str]:
        return arguments(
            model_name_or_path=checkpoints / "yoso",
            task_name="sst2",
            train_file=train,
            validation_file=train,
            do_train=True,
            do_eval=True,
            save_strategy="steps",
            save_steps=save_steps,
            max_steps=9,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            output_dir=tmp_path / name,
            **options,
        )

    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 32))
    monkeypatch.setattr(run_glue, "CardTrainer", CountedTrainer)
    run_glue.main(command("whole"))
    assert steps == list(range(9))

    CountedTrainer.stop_at = stop_at
    with pytest.raises(Interrupted):
        run_glue.main(command("parts"))
    # what a kill in the middle of writing leaves behind
    shutil.copytree(tmp_path / "parts" / f"checkpoint-{save_steps}", tmp_path / "parts" / f"checkpoint-{stop_at}")
    (tmp_path / "parts" / f"checkpoint-{stop_at}" / "trainer_state.json").write_text('{"global_step": 6, "log_hi')
    CountedTrainer.stop_at = -1
    steps.clear()
    run_glue.main(command("parts"))
    assert steps == list(range(save_steps, 9))

    whole, parts = (
        YosoForSequenceClassification.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts")
    )
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=0)
    assert results(tmp_path / "parts")["eval_loss"] == results(tmp_path / "whole")["eval_loss"]

    # finished: started again it trains nothing, keeps its figures, and can still predict
    before = results(tmp_path / "parts")
    steps.clear()
    for changes in ([], ["--do_train=false", "--do_predict", f"--test_file={train}"]):
        run_glue.main(command("parts") + changes)
        assert steps == []
        after = results(tmp_path / "parts")
        for name in ("train_loss", "train_runtime", "eval_loss", "epoch"):
            assert after[name] == before[name]
    assert after["predict_loss"] == before["eval_loss"]


def test_a_last_batch_that_is_dropped_leaves_something_to_train_on(run_glue, checkpoints, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 7))
    values = {"task_name": "sst2", "train_file": train, "do_train": True, "dataloader_drop_last": True}
    command = arguments(model_name_or_path=checkpoints / "yoso", output_dir=tmp_path / "run", max_steps=1, **values)
    with pytest.raises(ValueError, match="--dataloader_drop_last leaves nothing of 7 rows, as a batch of all has 8"):
        run_glue.main([*command, "--per_device_train_batch_size=8"])
    run_glue.main([*command, "--per_device_train_batch_size=7"])


def test_a_checkpoint_without_a_tokenizer_needs_one(run_glue, checkpoints, tmp_path):
    """Transformers would make up one that knows special tokens alone, to which all texts are the same."""
    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 8))
    for name in ("bert", "roberta", "yoso"):
        alone = tmp_path / name
        AutoModelForMaskedLM.from_pretrained(checkpoints / name).save_pretrained(alone)
        command = arguments(
            model_name_or_path=alone,
            task_name="sst2",
            train_file=train,
            do_train=True,
            max_steps=1,
            output_dir=tmp_path / f"{name}-run",
        )
        with pytest.raises(ValueError, match=f"^{alone} holds no tokenizer: give --tokenizer_name"):
            run_glue.main(command)
        run_glue.main([*command, f"--tokenizer_name={checkpoints / name}"])


def test_attention_and_configuration_are_those_asked_for(run_glue, checkpoints, tmp_path, monkeypatch):
    built = []

    class SeenTrainer(CardTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            built.append(self.model)

    monkeypatch.setattr(run_glue, "CardTrainer", SeenTrainer)
    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 8))
    for architecture, name, value in (
        ("bert", "attn_implementation", "eager"),
        ("bert", "attn_implementation", "sdpa"),
        ("yoso", "config_overrides", "num_hash=7,use_expectation=true"),
    ):
        run_glue.main(
            arguments(
                model_name_or_path=checkpoints / architecture,
                task_name="sst2",
                train_file=train,
                do_train=True,
                max_steps=1,
                output_dir=tmp_path / value,
                **{name: value},
            )
        )
    assert [model.config._attn_implementation for model in built[:2]] == ["eager", "sdpa"]
    assert (built[2].config.num_hash, built[2].config.use_expectation) == (7, True)
    saved = json.loads((tmp_path / "num_hash=7,use_expectation=true" / "config.json").read_text())
    assert (saved["num_hash"], saved["use_expectation"]) == (7, True)


@pytest.mark.parametrize(
    ("architecture", "requested", "expected"),
    # whatever the tokenizer says, which is 40; RoBERTa's table of 33 rows has 32 positions for a padding id of 0
    [("bert", None, 48), ("bert", 48, 48), ("bert", 6, 6), ("roberta", None, 32), ("yoso", None, 48)],
)
def test_texts_are_cut_to_the_longest_input(
    run_glue, checkpoints, tmp_path, monkeypatch, caplog, architecture, requested, expected
):
    longest = []

    class SeenTrainer(CardTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            longest.append(inputs["input_ids"].shape[1])
            return super().training_step(model, inputs, *args, **kwargs)

    monkeypatch.setattr(run_glue, "CardTrainer", SeenTrainer)
    rows = [{"sentence": "good " * 100, "label": 1}, {"sentence": "bad", "label": 0}]
    length = {} if requested is None else {"max_seq_length": requested}
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / architecture,
            task_name="sst2",
            train_file=write_rows(tmp_path / "train.jsonl", rows),
            do_train=True,
            max_steps=2,
            per_device_train_batch_size=1,
            output_dir=tmp_path / "run",
            **length,
        )
    )
    # a batch is as long as its own text
    assert sorted(longest) == [3, expected]
    filled = f"train.jsonl: 1 of 2 rows fill {expected} tokens (--max_seq_length), where longer ones are cut"
    assert filled in caplog.text
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert tokenizer.model_max_length == (32 if architecture == "roberta" else 48)


def test_a_length_is_needed_where_neither_model_nor_tokenizer_has_one(run_glue):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({})))
    with pytest.raises(ValueError, match="give --max_seq_length: neither the model nor the tokenizer has"):
        run_glue.choose_length(None, None, tokenizer)
    assert run_glue.choose_length(None, 7, tokenizer) == 7
    assert run_glue.choose_length(5, None, tokenizer) == 5
    tokenizer.model_max_length = 6
    assert run_glue.choose_length(None, None, tokenizer) == 6
    with pytest.raises(
        ValueError, match="at most 7; got 8: scripts/convert_checkpoint.py --max_position_embeddings 8 "
    ):
        run_glue.choose_length(8, 7, tokenizer)
    with pytest.raises(ValueError, match="at most 7; got 0$"):
        run_glue.choose_length(0, 7, tokenizer)


def test_outputs_beside_the_logits_are_no_predictions(run_glue, checkpoints, tmp_path):
    """As encoder-decoders have them."""
    BertForSequenceClassification.from_pretrained(checkpoints / "bert").save_pretrained(tmp_path / "model")
    file = write_rows(tmp_path / "rows.jsonl", task_rows("sst2", 8))
    for name, override in (("alone", "false"), ("beside", "true")):
        run_glue.main(
            arguments(
                model_name_or_path=tmp_path / "model",
                tokenizer_name=checkpoints / "bert",
                config_overrides=f"output_hidden_states={override}",
                task_name="sst2",
                validation_file=file,
                test_file=file,
                do_eval=True,
                do_predict=True,
                output_dir=tmp_path / name,
            )
        )
    alone, beside = (predictions(tmp_path / name / "SST-2.tsv") for name in ("alone", "beside"))
    assert alone == beside
    assert results(tmp_path / "alone")["eval_accuracy"] == results(tmp_path / "beside")["eval_accuracy"]


@pytest.mark.parametrize("long", [0, 1])
def test_of_a_pair_the_longer_text_is_cut(checkpoints, long):
    texts = ["the film", "was good"]
    texts[long] += " bad" * 20
    columns = TASKS["mrpc"].columns
    rows = [dict(zip(columns, texts, strict=True)) | {"label": 1}]
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "bert")
    labels = {"not_equivalent": 0, "equivalent": 1}
    encoded = encode(Table("a", datasets.Dataset.from_list(rows)), TASKS["mrpc"], labels, tokenizer, 12)
    texts[long] = " ".join(texts[long].split()[:7])
    assert encoded["input_ids"][0] == tokenizer(*texts)["input_ids"]


@pytest.mark.parametrize("architecture", ["bert", "yoso"])
def test_the_saved_tokenizer_gives_what_the_model_takes(run_glue, checkpoints, tmp_path, architecture):
    """A second text is marked for a model of two types only."""
    run_glue.main(
        arguments(
            model_name_or_path=checkpoints / architecture,
            task_name="mrpc",
            train_file=write_rows(tmp_path / "train.jsonl", task_rows("mrpc", 8)),
            do_train=True,
            max_steps=1,
            output_dir=tmp_path / "run",
        )
    )
    inputs = AutoTokenizer.from_pretrained(tmp_path / "run")("the film", "was good", return_tensors="pt")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    assert ("token_type_ids" in inputs) == (architecture == "bert")
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


def test_the_recipe_is_read_and_overridden(run_glue):
    args, training_args = run_glue.parse_arguments(
        [run_glue.GlueArguments, run_glue.TrainingArguments],
        [
            str(ROOT / "configs" / "glue.yaml"),
            *("--model_name_or_path", "m", "--output_dir", "runs", "--seed", "7", "--do_eval", "false"),
        ],
    )
    assert training_args.learning_rate == 3e-5
    assert training_args.per_device_train_batch_size == 32
    assert training_args.do_train
    assert training_args.seed == 7
    assert args.model_name_or_path == "m"


SST2 = {"sentence": "good film", "label": 1}
MNLI = {"premise": "good film", "hypothesis": "bad plot", "label": 2}
BAD_INPUT = {
    "column missing": (
        {"train_file": [{"text": "good", "label": 1}]},
        "--train_file .*train.jsonl has no column 'sentence'; its columns are text, label",
    ),
    "label column missing": (
        {"validation_file": [{"sentence": "good"}]},
        "--validation_file .*validation.jsonl has no column 'label'; its columns are sentence: --label_column names",
    ),
    "own label column missing": (
        {"task_name": None, "label_column": "y"},
        "--train_file .*train.jsonl has no column 'y'; its columns are sentence, label",
    ),
    "no header": (
        {"task_name": None, "train_file": [{"a film of which much can be said, " * 9: "bad"}]},
        r"no column 'label'; its columns are a film of which much can be said, .{16}\.\.\. .is that a header",
    ),
    "own text column missing": (
        {"task_name": None, "sentence1_column": "text", "train_file": [SST2, SST2 | {"label": 0}]},
        "--train_file .*train.jsonl has no column 'text'; its columns are sentence, label",
    ),
    "no text": (
        {"task_name": None, "train_file": [{"x": 1, "label": 1}]},
        "no column of text beside the label; its columns are x .int64., label .int64.",
    ),
    "too many texts": (
        {"task_name": None, "train_file": [SST2 | {"file": "pos/1.txt", "date": "may"}, SST2 | {"label": 0}]},
        "train.jsonl has 3 columns of text beside 'label', sentence, file, date: give --sentence1_column",
    ),
    "text of numbers": ({"train_file": [{"sentence": 5, "label": 1}]}, "column 'sentence' must hold text"),
    "text missing in a row": (
        {"train_file": [SST2, SST2 | {"sentence": None}]},
        "'sentence' has rows without a text",
    ),
    "unknown label in validation": (
        {"validation_file": [SST2, SST2 | {"label": 2}]},
        "--validation_file .*: column 'label' holds 2 in 1 of 2 rows; allowed are 0 to 1 or 'negative', 'positive'$",
    ),
    "-1 in validation": (
        {"validation_file": [SST2 | {"label": -1}]},
        "column 'label' holds -1 in 1 of 1 rows; allowed are 0 to 1",
    ),
    "unknown label in test": (
        {"test_file": [SST2, SST2 | {"label": -1}], "do_predict": True},
        "--test_file .*: column 'label' holds -1",
    ),
    "own label unknown to training": (
        {
            "task_name": None,
            "train_file": [SST2 | {"label": label} for label in "ab"],
            "validation_file": [SST2 | {"label": "c"}],
        },
        "--validation_file .*: column 'label' holds 'c' in 1 of 1 rows; allowed are 'a', 'b', as in the training data",
    ),
    "own label empty": (
        {
            "task_name": None,
            "train_file": [SST2 | {"label": label} for label in ("a", "b", "")],
            "validation_file": [SST2 | {"label": "a"}],
        },
        "--train_file .*: column 'label' holds '' in 1 of 3 rows; allowed are 'a', 'b'",
    ),
    "range": ({"learning_rate": -1}, "--learning_rate must be a number of at least 0, got -1"),
    "one class": ({"task_name": None}, "column 'label' must hold two labels or more"),
    "score out of range": (
        {"task_name": "stsb", "train_file": [{"sentence1": "a", "sentence2": "b", "label": 5.5}]},
        "column 'label' holds 5.5 in 1 of 1 rows; allowed are numbers from 0 to 5",
    ),
    "score below the range": (
        {"task_name": "stsb", "train_file": [{"sentence1": "a", "sentence2": "b", "label": -0.5}]},
        "column 'label' holds -0.5 in 1 of 1 rows; allowed are numbers from 0 to 5",
    ),
    "other name of the labels": (
        {"task_name": None, "train_file": [{"text": "a", "labels": 0}, {"text": "b", "labels": 1}]},
        "has no column 'label'; its columns are text, labels: --label_column names another",
    ),
    "texts in words": (
        {"task_name": None, "train_file": [{"text": ["a", "b"], "label": 0}, {"text": ["c"], "label": 1}]},
        r"no column of text beside the label; its columns are text \(List\), label \(int64\)$",
    ),
    "length": ({"max_seq_length": 49}, "--max_seq_length .* at most 48; got 49"),
    "no length": ({"max_seq_length": 2}, "--max_seq_length must be at least .*; got 2"),
    "samples": ({"max_eval_samples": 0}, "--max_eval_samples must be at least 1, got 0"),
    "no validation file": (
        {"validation_file": None},
        "--validation_file is missing: --do_eval asks for the validation data",
    ),
    "no mismatched file": ({"task_name": "mnli"}, "--validation_mismatched_file is missing"),
    "mismatched file": ({"validation_mismatched_file": [SST2]}, "for --task_name mnli alone"),
    "columns of a task": ({"sentence1_column": "text"}, "--task_name sst2 fixes the columns"),
    "second column alone": (
        {"task_name": None, "sentence2_column": "text"},
        "--sentence2_column needs --sentence1",
    ),
    "no data": (
        {"task_name": None, "train_file": None, "validation_file": None},
        "give --task_name, one of cola, mnli",
    ),
    "nothing to do": ({"do_train": False, "do_eval": False}, "nothing to do"),
    "lists of labels": (
        {"train_file": [SST2 | {"label": [0, 1]}]},
        "column 'label' must hold one label a row",
    ),
    "labels of two types": (
        {"task_name": None, "train_file": [{"text": "a", "label": "0"}, {"text": "b", "label": 0}]},
        r"no rows can be read as json: .*Column\(/label\) changed from string to number",
    ),
    "attention": (
        {"architecture": "yoso", "attn_implementation": "eager"},
        "--attn_implementation eager has no effect on Yoso",
    ),
    "labels by override": ({"config_overrides": "num_labels=5"}, "num_labels is the task's, 2, got 5"),
    "problem type by override": (
        {"config_overrides": "problem_type=multi_label_classification"},
        "problem_type is the task's, single_label_classification, got multi_label_classification",
    ),
    "label smoothing of scores": (
        {
            "task_name": "stsb",
            "train_file": [{"sentence1": "a", "sentence2": "b", "label": 2.5}],
            "validation_file": [{"sentence1": "a", "sentence2": "b", "label": 2.5}],
            "label_smoothing_factor": 0.1,
        },
        "--label_smoothing_factor is for classes, and the task is a regression",
    ),
    "best metric": (
        {
            "load_best_model_at_end": True,
            "save_strategy": "best",
            "eval_strategy": "steps",
            "metric_for_best_model": "f1",
        },
        "--metric_for_best_model must be one of loss, accuracy, got f1",
    ),
    "metric of two parts": (
        {
            "task_name": "mnli",
            "train_file": [MNLI],
            "validation_file": [MNLI],
            "validation_mismatched_file": [MNLI],
            "eval_strategy": "steps",
            "metric_for_best_model": "accuracy",
        },
        "must be one of matched_loss, matched_accuracy, mismatched_loss, mismatched_accuracy, got accuracy",
    ),
    "metric of nothing": (
        {"eval_strategy": "steps", "metric_for_best_model": "f1"},
        "--metric_for_best_model must be one of loss, accuracy, got f1",
    ),
    "override": ({"config_overrides": "num_hashes=64"}, "--config_overrides: BertConfig has no 'num_hashes'"),
    "override with commas": (
        {"config_overrides": "hash_code_len=[3,4]"},
        "must be name=value,name=value, or a JSON object, .*, where a value has commas, got '4]'",
    ),
    "broken override": ({"config_overrides": '{"hash_code_len":[3'}, "is no JSON object: Expecting"),
    "override's value": (
        {"architecture": "yoso", "config_overrides": "num_hash=0"},
        "--config_overrides num_hash=0: .*\n.*num_hash must be at least 1",
    ),
    "override of a weight's size": (
        {"architecture": "yoso", "config_overrides": "max_position_embeddings=64"},
        r"yoso with this configuration is no .*position_embeddings.weight, \[50, 32\] there, \[66, 32\] here",
    ),
    "untrained head": ({"do_train": False}, "is no checkpoint of BertForSequenceClassification"),
    "own resume": ({"resume_from_checkpoint": "x"}, "--resume_from_checkpoint is not used"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused_before_work_begins(run_glue, checkpoints, tmp_path, changes, message):
    values = {
        "architecture": "bert",
        "task_name": "sst2",
        "train_file": [SST2],
        "validation_file": [SST2],
        "do_train": True,
        "do_eval": True,
    } | changes
    values["model_name_or_path"] = checkpoints / values.pop("architecture")
    for name, rows in values.items():
        if name.endswith("_file") and rows:
            values[name] = write_rows(tmp_path / f"{name.removesuffix('_file')}.jsonl", rows)
    given = {name: value for name, value in values.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        run_glue.main(arguments(output_dir=tmp_path / "run", **given))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.txt", "good", "must end in one of .csv, .json, .jsonl, .parquet"),
        ("train.jsonl", "", "the file is empty"),
        (
            "train.csv",
            "sentence,label\n",
            "no rows can be read as csv: there is nothing below the header, sentence, label",
        ),
        ("train.json", "[]", "no rows can be read as json"),
        ("train.jsonl", '{"sentence": "good", "lab', "no rows can be read as json"),
        ("train.parquet", "nothing of the kind", "no rows can be read as parquet"),
        ("train.jsonl", None, "no such file"),
    ],
)
def test_files_that_hold_no_data_are_refused(run_glue, checkpoints, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"--train_file .*{name}: .*({message})"):
        run_glue.main(
            arguments(
                model_name_or_path=checkpoints / "bert",
                task_name="sst2",
                train_file=tmp_path / name,
                do_train=True,
                output_dir=tmp_path / "run",
            )
        )
    assert not (tmp_path / "run").exists()


def test_an_unknown_task_is_refused_with_the_nine(run_glue, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_glue.main(arguments(model_name_or_path="m", task_name="sst-2", do_train=True, output_dir=tmp_path / "run"))
    message = capsys.readouterr().err
    assert "--task_name" in message and "'sst-2'" in message
    for name in ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"):
        assert name in message.partition("choose from")[2]


def test_unknown_arguments_are_refused(run_glue, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: m\nlearning_rat: 1e-3\n")
    with pytest.raises(ValueError, match="learning_rat"):
        run_glue.main([str(recipe)])
    with pytest.raises(ValueError, match="no such file"):
        run_glue.main([str(tmp_path / "missing.yaml")])


def test_a_checkpoint_of_another_architecture_is_refused(run_glue, checkpoints, tmp_path):
    shutil.copytree(checkpoints / "yoso", tmp_path / "mixed")
    BertModel(BertConfig(**SIZES, vocab_size=18)).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "mixed")
    with pytest.raises(
        ValueError, match=r"mixed with this configuration is no checkpoint of YosoForSequence.*such as yoso\."
    ):
        run_glue.main(
            arguments(
                model_name_or_path=tmp_path / "mixed",
                task_name="sst2",
                train_file=write_rows(tmp_path / "train.jsonl", [SST2]),
                do_train=True,
                output_dir=tmp_path / "run",
            )
        )
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_for_other_labels_is_refused_untrained(run_glue, checkpoints, tmp_path):
    labels = {0: "spam", 1: "ham"}
    BertForSequenceClassification.from_pretrained(checkpoints / "bert", id2label=labels).save_pretrained(
        tmp_path / "spam"
    )
    with pytest.raises(ValueError, match="labels are spam, ham, the task's are negative, positive"):
        run_glue.main(
            arguments(
                model_name_or_path=tmp_path / "spam",
                tokenizer_name=checkpoints / "bert",
                task_name="sst2",
                validation_file=write_rows(tmp_path / "validation.jsonl", [SST2]),
                do_eval=True,
                output_dir=tmp_path / "run",
            )
        )


def test_a_directory_with_something_else_is_left_alone(run_glue, checkpoints, tmp_path):
    def command(**changes) -> list[str]:
        return arguments(
            model_name_or_path=checkpoints / "bert",
            task_name="sst2",
            train_file=train,
            do_train=True,
            max_steps=1,
            **({"output_dir": tmp_path / "run"} | changes),
        )

    train = write_rows(tmp_path / "train.jsonl", task_rows("sst2", 8))
    run_glue.main(command(learning_rate=1e-4))
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ValueError, match="holds another run: learning_rate is 0.0001 there and 0.0002 here"):
        run_glue.main(command(learning_rate=2e-4))
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    with pytest.raises(ValueError, match="thesis holds files but no run.json"):
        run_glue.main(command(output_dir=tmp_path / "thesis"))
    assert os.listdir(tmp_path / "thesis") == ["chapter.txt"]

    busy = TrainingArguments(output_dir=str(tmp_path / "run"))
    with claimed(busy), pytest.raises(ValueError, match="--output_dir .*run: another command is at work there"):
        run_glue.main(command(learning_rate=1e-4))
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "launcher"),
    [
        ("yoso", []),
        # its loss takes no notice of num_items_in_batch
        ("bert", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]),
        ("yoso", ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]),
    ],
    ids=["python", "torchrun", "accelerate"],
)
def test_it_runs_under_every_launcher(checkpoints, tmp_path, architecture, launcher):
    values = {"model_name_or_path": checkpoints / architecture, "task_name": "mrpc", "output_dir": tmp_path / "run"}
    rows = task_rows("mrpc", 33)
    file = write_rows(tmp_path / "rows.jsonl", rows)
    command = [
        sys.executable,
        *launcher,
        SCRIPT,
        *arguments(
            **values,
            train_file=file,
            validation_file=file,
            test_file=file,
            do_train=True,
            do_eval=True,
            do_predict=True,
            num_train_epochs=2,
            learning_rate=1e-2,
        ),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    for _ in range(2):
        subprocess.run(list(map(str, command)), env=environment, check=True, timeout=300)
        logits = outputs_one_by_one(tmp_path / "run", rows, TASKS["mrpc"].columns)
        ids = logits.argmax(-1)
        assert predictions(tmp_path / "run" / "MRPC.tsv") == [str(int(index)) for index in ids]
        accuracy = np.mean([row["label"] == int(index) for row, index in zip(rows, ids, strict=True)])
        assert results(tmp_path / "run")["eval_accuracy"] == pytest.approx(accuracy)
        # YOSO samples, and a batch may hold a row twice, for the processes to have as many
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([row["label"] for row in rows]))
        assert results(tmp_path / "run")["eval_loss"] == pytest.approx(loss.item(), rel=0.2)
