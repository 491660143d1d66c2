import itertools
import json
import math
import os
import pydoc_data.topics
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    RobertaConfig,
    RobertaForMaskedLM,
    TrainingArguments,
    pipeline,
)

from yoso_hf import YosoForMaskedLM, YosoModel
from yoso_hf.data import train_tokenizer
from yoso_hf.mlm import MaskedLMTrainer, Masking
from yoso_hf.training import MODEL_FILES, claimed, parse_arguments

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "run_mlm.py"
YOSO = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "use_expectation": False,
    "num_hash": 8,
    "hash_code_len": 5,
}
ROBERTA = {name: YOSO[name] for name in list(YOSO)[:4]} | {"max_position_embeddings": 66}


@pytest.fixture(scope="module")
def run_mlm(load_script):
    return load_script("run_mlm")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of its own, for this process and those it starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A few dozen documents of English."""
    path = tmp_path_factory.mktemp("corpus") / "topics.jsonl"
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in topics[:40]))
    return path


def overrides(values: dict) -> str:
    return ",".join(f"{name}={json.dumps(value)}" for name, value in values.items())


def arguments(output_dir: Path, **settings) -> list[str]:
    """A command line, the same for every run but for the settings given; None leaves one out."""
    defaults = {
        "output_dir": output_dir,
        "model_type": "yoso",
        "config_overrides": overrides(YOSO),
        "train_tokenizer": True,
        "vocab_size": 500,
        "block_size": 64,
        "do_train": True,
        "do_eval": True,
        "max_eval_blocks": 40,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 20,
        "max_steps": 12,
        "save_steps": 4,
        "learning_rate": 3e-3,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    chosen = {name: value for name, value in (defaults | settings).items() if value is not None}
    return [f"--{name}={value}" for name, value in chosen.items()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForMaskedLM.from_pretrained(folder).state_dict()


def results(folder: Path) -> dict:
    return json.loads((folder / "all_results.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in `start`: with other numbers of threads, sums are rounded otherwise, and weights differ in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(command: list[str], **options) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def snapshot(folder: Path) -> dict[str, bytes] | None:
    """Every file of a folder with its content."""
    if not folder.exists():
        return None
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def finished(run_mlm, corpus, tmp_path_factory):
    """An uninterrupted run, its checkpoints with it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run_mlm.main(arguments(folder, train_file=corpus, eval_on_start=True))
    return folder


def test_loss_falls(finished):
    history = json.loads((finished / "trainer_state.json").read_text())["log_history"]
    before = next(entry["eval_loss"] for entry in history if "eval_loss" in entry)
    found = results(finished)
    # a model that knows nothing
    assert before == pytest.approx(math.log(500), abs=0.3)
    assert found["eval_loss"] < before - 0.3
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert found["num_input_tokens_seen"] == 12 * 8 * 64
    assert found["train_tokens_per_second"] == pytest.approx(12 * 8 * 64 / found["train_runtime"])
    assert 0 < found["train_loss"] < before


def evaluation_loss(folder: Path, corpus: Path, count: int, probability: float = 0.15) -> float:
    """The mean over all masked tokens of the first so many blocks, by the saved files alone."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    documents = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    # 5 %: the first of every 20
    stream = [token for text in documents[::20] for token in tokenizer(text)["input_ids"]]
    blocks = torch.tensor(stream[: count * 64]).view(count, 64)
    masked = Masking(tokenizer, probability).mask_rows({"input_ids": blocks.tolist()})
    ids, labels = torch.stack(masked["input_ids"]), torch.stack(masked["labels"])
    with torch.no_grad():
        return F.cross_entropy(model.eval()(input_ids=ids).logits.flatten(0, 1), labels.flatten()).item()


def test_saved_model_and_tokenizer(finished, corpus):
    """The files alone give the evaluation loss again: packing, masks and model."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(finished), AutoTokenizer.from_pretrained(finished)
    assert type(model) is YosoForMaskedLM and model.config.num_hash == 8
    assert tokenizer.model_max_length == 64
    assert model.config.vocab_size == len(tokenizer) == 500
    assert (model.config.bos_token_id, model.config.pad_token_id, model.config.eos_token_id) == (0, 1, 2)

    assert results(finished)["eval_loss"] == pytest.approx(evaluation_loss(finished, corpus, 40), rel=1e-5)
    # trained on the training documents alone
    documents = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    training = [text for index, text in enumerate(documents) if index % 20]
    assert train_tokenizer(training, 500).get_vocab() == tokenizer.get_vocab()

    # and they are what pipelines take
    answers = pipeline("fill-mask", model=str(finished))("The value of the <mask> is returned.")
    assert len(answers) == 5 and all(answer["token_str"] for answer in answers)


@pytest.fixture
def built(run_mlm, monkeypatch):
    """The trainers that the script has built."""
    trainers = []

    class SeenTrainer(MaskedLMTrainer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            trainers.append(self)

    monkeypatch.setattr(run_mlm, "MaskedLMTrainer", SeenTrainer)
    return trainers


def test_masks_and_logits_are_those_asked_for(run_mlm, corpus, tmp_path, built):
    settings = {"max_steps": 1, "max_eval_blocks": 10, "mlm_probability": 0.5, "sparse_prediction": False}
    run_mlm.main(arguments(tmp_path / "run", train_file=corpus, **settings))
    expected = evaluation_loss(tmp_path / "run", corpus, 10, 0.5)
    assert results(tmp_path / "run")["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert evaluation_loss(tmp_path / "run", corpus, 10, 0.15) != pytest.approx(expected, rel=1e-5)
    assert not built[0].sparse_prediction


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_checkpoint_goes_on_with_the_attention_asked_for(run_mlm, finished, corpus, tmp_path, built, attention):
    """The second time, the run is finished; what it began from is still what its card names."""
    model = tmp_path / "model"
    RobertaForMaskedLM(RobertaConfig(**ROBERTA, vocab_size=500)).save_pretrained(model)
    AutoTokenizer.from_pretrained(finished).save_pretrained(model)
    settings = {"model_name_or_path": model, "model_type": None, "config_overrides": None, "do_eval": None}
    settings |= {"train_tokenizer": None, "vocab_size": None, "train_file": corpus, "max_steps": 1, "save_steps": 1}
    for _ in range(2):
        run_mlm.main(arguments(tmp_path / "run", **settings, attn_implementation=attention))
    configs = [trainer.model.config for trainer in built]
    assert [config._attn_implementation for config in configs] == [attention] * 2
    assert [config._name_or_path for config in configs] == [str(model)] * 2


def test_killed_while_saving_and_started_again(run_mlm, finished, corpus, tmp_path):
    """SIGKILL in the middle of the second checkpoint: the same command ends with the same weights."""
    command = arguments(tmp_path / "run", train_file=corpus, eval_on_start=True)
    program = f"""
import os, runpy, signal, sys, torch
save = torch.save
def killed(content, path, *arguments, **options):
    if "checkpoint-8" in str(path):
        with open(path, "wb") as file:
            file.write(b"half of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    save(content, path, *arguments, **options)
torch.save = killed
sys.argv[1:] = {command!r}
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    process = start(["-c", program])
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, output
    left = tmp_path / "run"
    assert (left / "checkpoint-8" / "model.safetensors").exists()
    assert not (left / "checkpoint-8" / "trainer_state.json").exists()
    assert not (left / "all_results.json").exists()

    run_mlm.main(command)
    state = json.loads((left / "trainer_state.json").read_text())
    assert state["global_step"] == 12
    # of the 8 steps after checkpoint-4
    tokens = results(left)["train_tokens_per_second"] * results(left)["train_runtime"]
    assert tokens == pytest.approx(8 * 8 * 64)
    assert results(left)["num_input_tokens_seen"] == results(finished)["num_input_tokens_seen"]
    torch.testing.assert_close(weights(left), weights(finished), rtol=0, atol=0)
    assert results(left)["eval_loss"] == results(finished)["eval_loss"]


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_incomplete_checkpoint_is_passed_over(damage, run_mlm, finished, corpus, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("*_results.json", "checkpoint-12"))
    state = run / "checkpoint-8" / "trainer_state.json"
    if damage == "truncated":
        state.write_text(state.read_text()[:200])
    else:
        state.unlink()
    (run / "checkpoint-8" / "optimizer.pt").write_bytes(b"")
    run_mlm.main(arguments(run, train_file=corpus, eval_on_start=True))
    torch.testing.assert_close(weights(run), weights(finished), rtol=0, atol=0)
    assert json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())["global_step"] == 8


def test_finished_run_is_not_trained_again(run_mlm, finished, corpus, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "model.safetensors").unlink()
    run_mlm.main(arguments(run, train_file=corpus, eval_on_start=True))
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    torch.testing.assert_close(weights(run), weights(finished), rtol=0, atol=0)
    for name in ("train_loss", "train_runtime", "eval_loss", "num_input_tokens_seen"):
        assert results(run)[name] == results(finished)[name]
    # what was trained from it goes on being the same run
    for path in (path for pattern in MODEL_FILES for path in finished.glob(pattern)):
        assert (run / path.name).read_bytes() == path.read_bytes()


def test_finished_run_keeps_its_best_model(run_mlm, corpus, tmp_path):
    settings = {
        "train_file": corpus,
        "load_best_model_at_end": True,
        # the worst, which is the first
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "max_eval_blocks": 10,
        "max_steps": 8,
    }
    run = tmp_path / "run"
    run_mlm.main(arguments(run, **settings))
    saved, loss = weights(run), results(run)["eval_loss"]
    torch.testing.assert_close(saved, weights(run / "checkpoint-4"), rtol=0, atol=0)
    run_mlm.main(arguments(run, **settings))
    torch.testing.assert_close(weights(run), saved, rtol=0, atol=0)
    assert results(run)["eval_loss"] == loss


def test_streamed_run_resumes_where_it_was(run_mlm, finished, corpus, tmp_path):
    """Shuffled, through more than one pass of the corpus."""
    small = tmp_path / "small.jsonl"
    small.write_text("".join(line + "\n" for line in corpus.read_text().splitlines()[:3]))
    settings = {
        "train_file": small,
        "validation_file": corpus,
        "streaming": True,
        "shuffle_buffer": 5,
        "train_tokenizer": None,
        "vocab_size": None,
        "tokenizer_name": finished,
        "gradient_accumulation_steps": 2,
    }
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_mlm.main(arguments(whole, **settings))
    shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-4")
    shutil.copy(whole / "run.json", resumed)
    run_mlm.main(arguments(resumed, **settings))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    documents = [json.loads(line)["text"] for line in small.read_text().splitlines()]
    tokens = sum(map(len, tokenizer(documents)["input_ids"]))
    assert tokens < results(whole)["num_input_tokens_seen"] == 12 * 16 * 64


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_is_told_by_the_content_of_its_files_and_of_a_stream_by_their_size(run_mlm, tmp_path, streaming):
    file, config = tmp_path / "a.txt", tmp_path / "config.json"

    def describe(text, settings="{}"):
        file.write_text(text)
        config.write_text(settings)
        argv = arguments(tmp_path / "run", train_file=file, streaming=streaming, config_file=config, model_type=None)
        args, training_args = parse_arguments([run_mlm.MLMArguments, TrainingArguments], argv)
        return run_mlm.describe(args, training_args, {"train_file": [str(file)]})

    one = describe("one")
    assert describe("one") == one
    assert (describe("two") == one) == streaming
    assert describe("three") != one
    assert describe("one", "{ }") != one


def parsed(run_mlm, output_dir: Path, **settings) -> tuple:
    return parse_arguments([run_mlm.MLMArguments, TrainingArguments], arguments(output_dir, **settings))


def test_what_is_only_evaluated_makes_no_other_run(run_mlm, tmp_path):
    """Unless the validation documents are set aside from those for training."""

    def describe(**settings):
        return run_mlm.describe(*parsed(run_mlm, tmp_path, **settings), {"train_file": []})

    by_file = {"validation_file": "a.txt"}, {"validation_file": "b.txt"}
    by_split = {"dataset_name": "x", "validation_split": "a"}, {"dataset_name": "x", "validation_split": "b"}
    for one, other in (by_file, by_split):
        assert describe(**one) == describe(**other, max_eval_blocks=3, validation_percentage=7)
    assert describe() == describe(max_eval_blocks=3)
    assert describe() != describe(validation_percentage=7)
    assert describe() != describe(validation_file="a.txt")


def test_a_streamed_corpus_is_shuffled_by_the_seed(run_mlm, finished, corpus, tmp_path):
    """Among so many blocks, and pass after pass; of 0 in the order of the corpus."""
    small = tmp_path / "small.jsonl"
    small.write_text("".join(corpus.read_text().splitlines(keepends=True)[:4]))
    tokenizer = AutoTokenizer.from_pretrained(finished)
    documents = [json.loads(line)["text"] for line in small.read_text().splitlines()]
    stream = [token for text in documents for token in tokenizer(text)["input_ids"]]
    blocks = [stream[start : start + 64] for start in range(0, len(stream) // 64 * 64, 64)]

    def order(seed: int, buffer: int) -> list[int]:
        settings = {"train_file": small, "do_eval": None, "streaming": True, "shuffle_buffer": buffer}
        args, training_args = parsed(run_mlm, tmp_path / "run", **settings)
        read = run_mlm.read_documents(args, training_args, {"train_file": [str(small)], "validation_file": []})
        rows = run_mlm.make_blocks(args, read, tokenizer, seed)["train"]
        return [blocks.index(row["input_ids"].tolist()) for row in itertools.islice(rows, 2 * len(blocks))]

    passes = [*range(len(blocks)), *range(len(blocks))]
    assert order(1, 0) == passes
    shuffled = order(1, 4)
    assert shuffled == order(1, 4) != passes
    assert order(2, 4) != shuffled
    # none is drawn that the buffer does not hold yet, and of those long gone none is left out
    assert set(shuffled) == set(range(len(blocks)))
    assert all(block < index + 4 for index, block in enumerate(shuffled[: len(blocks)]) if block > index)


@pytest.mark.parametrize("streaming", [None, True])
def test_of_fewer_validation_blocks_than_asked_for_all_are_taken(run_mlm, finished, corpus, tmp_path, streaming):
    files, tokenizer = {"train_file": [], "validation_file": [str(corpus)]}, AutoTokenizer.from_pretrained(finished)
    tokens = sum(len(tokenizer(json.loads(line)["text"])["input_ids"]) for line in corpus.open())
    for asked, count in ((5, 5), (10**6, tokens // 64)):
        settings = {"validation_file": corpus, "do_train": None, "streaming": streaming, "max_eval_blocks": asked}
        args, training_args = parsed(run_mlm, tmp_path / "run", **settings)
        documents = run_mlm.read_documents(args, training_args, files)
        assert len(run_mlm.make_blocks(args, documents, tokenizer, 0)["validation"]) == count


def test_the_best_perplexity_is_the_lowest(run_mlm, tmp_path):
    settings = {"metric_for_best_model": "perplexity", "save_strategy": "best", "eval_strategy": "steps"}
    args, training_args = parsed(run_mlm, tmp_path, train_file="a.txt", **settings)
    run_mlm.check_arguments(args, training_args)
    assert training_args.greater_is_better is False


def test_a_streamed_corpus_is_read_whole_whatever_the_workers(run_mlm, finished, corpus, tmp_path):
    """The recipes have two, of which each would see one of two files."""
    lines = corpus.read_text().splitlines(keepends=True)
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file, part in zip(files, (lines[:2], lines[2:4]), strict=True):
        file.write_text("".join(part))
    settings = {"streaming": True, "train_tokenizer": None, "vocab_size": None, "tokenizer_name": finished}
    runs = [tmp_path / "one", tmp_path / "two"]
    for workers, run in enumerate(runs, 1):
        named = {"train_file": tmp_path / "*.jsonl", "validation_file": corpus, "dataloader_num_workers": workers}
        run_mlm.main(arguments(run, **settings, **named))
    torch.testing.assert_close(*map(weights, runs), rtol=0, atol=0)


def test_another_model_with_softmax_attention(run_mlm, finished, corpus, tmp_path):
    """From a config file, by YAML with the command line on top; then continued from its checkpoint."""
    RobertaConfig(**ROBERTA, vocab_size=500).save_pretrained(tmp_path)
    yaml = tmp_path / "recipe.yaml"
    yaml.write_text(
        f"config_file: {tmp_path / 'config.json'}\nattn_implementation: sdpa\ntokenizer_name: {finished}\n"
        f"train_file: [{corpus}]\nblock_size: 64\nmax_steps: 400\nlearning_rate: 1e-3\nuse_cpu: true\n"
        f"do_train: true\nsave_strategy: 'no'\ndo_eval: true\nmax_eval_blocks: 10\nper_device_train_batch_size: 4\n"
        f"disable_tqdm: true\noutput_dir: {tmp_path / 'first'}\n"
    )
    run_mlm.main([str(yaml), "--max_steps=3"])
    description = json.loads((tmp_path / "first" / "run.json").read_text())
    assert (description["max_steps"], description["learning_rate"]) == (3, 1e-3)
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "first")) is RobertaForMaskedLM

    settings = {"config_overrides": None, "train_tokenizer": None, "vocab_size": None, "save_steps": None}
    settings |= {"model_type": None, "model_name_or_path": tmp_path / "first", "max_eval_blocks": 10}
    command = arguments(tmp_path / "evaluated", **settings, do_train=None, validation_file=corpus)
    run_mlm.main(command)
    assert not (tmp_path / "evaluated" / "model.safetensors").exists()
    settings |= {"max_steps": 2, "learning_rate": 0.0, "train_file": corpus, "validation_file": corpus}
    run_mlm.main(arguments(tmp_path / "continued", **settings))
    torch.testing.assert_close(weights(tmp_path / "continued"), weights(tmp_path / "first"), rtol=0, atol=0)
    evaluated, continued = (results(tmp_path / name)["eval_loss"] for name in ("evaluated", "continued"))
    assert evaluated == continued < math.log(500) + 0.3


@pytest.mark.parametrize(("attention", "expectation"), [("yoso", "auto"), ("yoso_expectation", True)])
def test_another_model_from_scratch_keeps_its_yoso_attention(attention, expectation, run_mlm, corpus, tmp_path):
    """Sampled at this length, unless it is to be exact; what is saved says so, and is evaluated the same way."""
    sizes = overrides(ROBERTA | {"yoso_num_hash": 2})
    settings = {"max_steps": 2, "max_eval_blocks": 10, "validation_file": corpus}
    run_mlm.main(
        arguments(
            tmp_path / "run",
            **settings,
            model_type="roberta",
            config_overrides=sizes,
            attn_implementation=attention,
            train_file=corpus,
        )
    )
    config = RobertaConfig.from_pretrained(tmp_path / "run")
    assert (config.yoso_num_hash, config.yoso_use_expectation) == (2, expectation)
    alone = {"model_type": None, "config_overrides": None, "train_tokenizer": None, "vocab_size": None}
    alone |= {"do_train": None, "model_name_or_path": tmp_path / "run"}
    run_mlm.main(arguments(tmp_path / "evaluated", **(settings | alone)))
    assert results(tmp_path / "evaluated")["eval_loss"] == results(tmp_path / "run")["eval_loss"]


@pytest.mark.parametrize(
    ("recipe", "devices", "parameters", "tokens_a_step"),
    [
        ("tiny", 1, 1_466_756, 4_096),
        ("small-512", 4, 28_527_920, 131_072),
        ("base-512", 8, 124_697_433, 262_144),
        ("yoso-4096", 8, 127_449_945, 262_144),
    ],
)
def test_recipes(recipe, devices, parameters, tokens_a_step, run_mlm, tmp_path):
    """They are accepted, and their arithmetic is right."""
    argv = [str(ROOT / "configs" / f"{recipe}.yaml"), "--train_file=x", f"--output_dir={tmp_path}", "--use_cpu"]
    args, training_args = parse_arguments([run_mlm.MLMArguments, TrainingArguments], argv)
    run_mlm.check_arguments(args, training_args)
    if args.tokenizer_name == "FacebookAI/roberta-base":
        args.vocab_size = 50265
    with torch.device("meta"):
        model = run_mlm.new_model(args, run_mlm.make_config(args, None))
    run_mlm.check_model(args, model, None)
    assert not model.config.use_expectation
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    blocks = devices * training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
    assert blocks * args.block_size == tokens_a_step


@pytest.mark.parametrize("streaming", [None, True])
def test_data_set_by_name_equals_its_files(streaming, run_mlm, finished, corpus, tmp_path):
    """A directory in the hub's place: its splits, or a share of the first."""
    lines = corpus.read_text().splitlines(keepends=True)
    (tmp_path / "data").mkdir()
    files = {split: tmp_path / "data" / f"{split}.jsonl" for split in ("train", "validation")}
    files["train"].write_text("".join(lines[:20]))
    files["validation"].write_text("".join(lines[20:]))
    settings = {
        "train_tokenizer": None,
        "vocab_size": None,
        "tokenizer_name": finished,
        "streaming": streaming,
        "max_steps": 2,
        "max_eval_blocks": 10,
    }
    by_split = {"validation_split": "validation"}, {"validation_file": files["validation"]}
    by_share = {"validation_percentage": 10}, {"validation_percentage": 10}
    for number, (named, read) in enumerate((by_split, by_share)):
        folders = [tmp_path / f"{kind}-{number}" for kind in ("named", "read")]
        run_mlm.main(arguments(folders[0], dataset_name=tmp_path / "data", **settings, **named))
        run_mlm.main(arguments(folders[1], train_file=files["train"], **settings, **read))
        torch.testing.assert_close(weights(folders[0]), weights(folders[1]), rtol=0, atol=0)
        assert results(folders[0])["eval_loss"] == results(folders[1])["eval_loss"]
    with pytest.raises(ValueError, match="no such column in --dataset_name .*data, split train, which has text"):
        run_mlm.main(arguments(tmp_path / "refused", dataset_name=tmp_path / "data", text_column="body", **settings))


def test_documents_are_read_as_the_arguments_say(run_mlm, tmp_path, monkeypatch):
    asked = []

    def load_dataset(*names, split, streaming):
        asked.append((*names, split, streaming))
        return datasets.Dataset.from_dict({"body": [f"{split} {index}" for index in range(20)]})

    def read(files=(), **settings):
        args, training_args = parsed(run_mlm, tmp_path / "run", **settings)
        found = run_mlm.read_documents(args, training_args, {"train_file": files, "validation_file": []})
        return {split: [row["text"] for row in rows] for split, (_, rows) in found.items()}

    monkeypatch.setattr(run_mlm, "load_dataset", load_dataset)
    data = {"dataset_name": "x", "dataset_config_name": "en", "train_split": "part", "text_column": "body"}
    part, dev = ([f"{split} {index}" for index in range(20)] for split in ("part", "dev"))
    assert read(**data, validation_percentage=10) == {
        "train": [text for index, text in enumerate(part) if index % 10],
        "validation": part[::10],
    }
    assert read(**data, validation_split="dev") == {"train": part, "validation": dev}
    assert read(**data, do_eval=None) == {"train": part}
    assert set(asked) == {("x", "en", "part", False), ("x", "en", "dev", False)}

    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree")
    documents = {
        "paragraph": ["one\ntwo", "three"],
        "line": ["one", "two", "", "three"],
        "file": ["one\ntwo\n\nthree"],
    }
    for document, texts in documents.items():
        settings = {"train_file": tmp_path / "a.txt", "document": document, "do_eval": None}
        assert read([str(tmp_path / "a.txt")], **settings) == {"train": texts}


@pytest.mark.parametrize(
    ("settings", "split"),
    [
        ({"validation_split": "dev"}, "dev"),
        ({}, "5 % of train"),
        ({"validation_percentage": 0.5, "train_split": "a", "max_eval_blocks": 7}, "0.5 % of a, the first 7 blocks"),
        ({"validation_file": ["a.txt"]}, None),
    ],
)
def test_the_card_names_what_of_the_hub_was_evaluated_on(run_mlm, settings, split):
    data = run_mlm.hub_data(run_mlm.MLMArguments(dataset_name="owner/name", **settings))
    assert data["datasets"] == ["owner/name"]
    assert data.get("evaluated_on", {}).get("dataset_split") == split


def test_a_new_model_has_the_special_tokens_of_its_tokenizer(run_mlm, finished, tmp_path):
    """A BERT's own have other numbers."""
    for tokenizer in ({}, {"train_tokenizer": None, "vocab_size": None, "tokenizer_name": finished}):
        args, _ = parsed(run_mlm, tmp_path, model_type="bert", config_overrides=None, **tokenizer)
        config = run_mlm.make_config(args, AutoTokenizer.from_pretrained(finished))
        assert (config.bos_token_id, config.pad_token_id, config.eos_token_id, config.vocab_size) == (0, 1, 2, 500)


def test_overrides_as_a_mapping(run_mlm, corpus, tmp_path):
    """In the YAML file, with numbers that YAML takes for text."""
    recipe = tmp_path / "recipe.yaml"
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in YOSO.items())
    recipe.write_text(f"config_overrides:\n{lines}  layer_norm_eps: 1e-7\n")
    settings = {"config_overrides": None, "train_file": corpus, "max_steps": 1, "do_eval": None}
    run_mlm.main([str(recipe), *arguments(tmp_path / "run", **settings)])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert {name: config[name] for name in YOSO} == YOSO
    assert config["layer_norm_eps"] == 1e-7


def checkpoint_of(kind: str, folder: Path, tokenizer: Path) -> Path:
    """A directory that is no checkpoint of a masked language model that fits."""
    sizes = ROBERTA | {"vocab_size": 500}
    if kind == "renamed":
        # RoBERTa's weights under BERT's configuration
        RobertaForMaskedLM(RobertaConfig(**sizes)).save_pretrained(folder)
        BertConfig(**sizes).save_pretrained(folder)
    elif kind == "resized":
        RobertaForMaskedLM(RobertaConfig(**sizes)).save_pretrained(folder)
        RobertaConfig(**sizes | {"intermediate_size": 96}).save_pretrained(folder)
    elif kind == "short":
        RobertaForMaskedLM(RobertaConfig(**sizes | {"max_position_embeddings": 34})).save_pretrained(folder)
    elif kind == "small":
        RobertaForMaskedLM(RobertaConfig(**sizes | {"vocab_size": 499})).save_pretrained(folder)
    else:
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


PLAIN = {"train_tokenizer": None, "vocab_size": None, "tokenizer_name": "TOKENIZER"}
REFUSED = {
    "length": (
        {"block_size": 65},
        "--block_size 65 is longer .* 64 tokens: its max_position_embeddings is 64; "
        "give --config_overrides max_position_embeddings=65",
    ),
    "roberta's length": (
        {"model_type": "roberta", "config_overrides": overrides(ROBERTA), "block_size": 65},
        "--block_size 65 is longer .* 64 tokens: its max_position_embeddings is 66; .*max_position_embeddings=67",
    ),
    "shuffling": ({"shuffle_buffer": -1}, "--shuffle_buffer must be at least 0, which leaves the order, got -1"),
    "short block": ({"block_size": 7}, "--block_size must be at least 8, got 7"),
    "tau": ({"config_overrides": overrides(YOSO | {"hash_code_len": 17})}, "hash_code_len must be in 1..16, got 17"),
    "m": ({"config_overrides": overrides(YOSO | {"num_hash": 0})}, "num_hash must be at least 1, got 0"),
    "override": ({"config_overrides": "num_hashes=3"}, "YosoConfig has no 'num_hashes'"),
    "two models": (
        {"config_file": "x.json"},
        "exactly one of --model_name_or_path, .*; got config_file and model_type",
    ),
    "no model": ({"model_type": None}, "exactly one of --model_name_or_path, .*; got none"),
    "type": ({"model_type": "gpt2", "config_overrides": None}, "gpt2 .* no masked language model"),
    "attention": (
        {"attn_implementation": "sdpa"},
        "--attn_implementation sdpa has no effect on YosoForMaskedLM|does not support .*scaled_dot_product_attention",
    ),
    "no data": ({"train_file": None}, "exactly one of --dataset_name, --train_file; got none"),
    "two data": (
        {"dataset_name": "x"},
        "exactly one of --dataset_name, --train_file; got dataset_name and train_file",
    ),
    "missing file": ({"train_file": "FOLDER/none.txt"}, "--train_file .*none.txt: no such file"),
    "empty file": ({"train_file": "FOLDER/empty.txt"}, "--train_file .*empty.txt: the file is empty"),
    "empty validation": ({"validation_file": "FOLDER/empty.txt"}, "--validation_file .*empty.txt: the file is empty"),
    "column": ({"text_column": "body"}, "--text_column body: no such column in --train_file .*, which has text"),
    "short": (
        PLAIN | {"train_file": "FOLDER/short.txt", "do_eval": None},
        "--train_file .*short.txt holds fewer tokens .* 64",
    ),
    "short part": (
        PLAIN | {"train_file": "FOLDER/two.jsonl"},
        "the 5 % of --train_file .* for validation .* holds fewer tokens",
    ),
    "one document": (
        {"train_file": "FOLDER/short.txt"},
        "--train_file .*short.txt holds 1 document, .* give --validation_file, .* --document line",
    ),
    "range": ({"per_device_eval_batch_size": 0}, "--per_device_eval_batch_size must be at least 1, got 0"),
    "split": ({"validation_split": "test"}, "--validation_split is a split of --dataset_name"),
    "split and file": (
        {"train_file": None, "dataset_name": "x", "validation_split": "a", "validation_file": "FOLDER/short.txt"},
        "--validation_split is a split of --dataset_name, and excludes --validation_file",
    ),
    "percentage": ({"validation_percentage": 60}, "--validation_percentage must be above 0 and at most 50, got 60"),
    "probability": ({"mlm_probability": 1.0}, "--mlm_probability must be above 0 and below 1, got 1.0"),
    "no probability": ({"mlm_probability": 0}, "--mlm_probability must be above 0 and below 1, got 0"),
    "no blocks": ({"max_eval_blocks": 0}, "--max_eval_blocks must be at least 1, got 0"),
    "prediction": ({"do_predict": True}, "--do_predict is not for masked language models"),
    "best metric": (
        {
            "load_best_model_at_end": True,
            "save_strategy": "best",
            "eval_strategy": "steps",
            "metric_for_best_model": "f1",
        },
        "--metric_for_best_model must be one of loss, perplexity, got f1",
    ),
    "vocabulary": (PLAIN | {"config_overrides": overrides(YOSO | {"vocab_size": 499})}, "tokenizer has 500 .* 499"),
    "little vocabulary": ({"vocab_size": 100}, "vocab_size must be at least 261, got 100"),
    "no tokenizer": ({"train_tokenizer": None}, "give --tokenizer_name or --train_tokenizer"),
    "two tokenizers": ({"tokenizer_name": "x"}, "--train_tokenizer excludes"),
    "mask": (PLAIN | {"tokenizer_name": "FOLDER/maskless"}, "must be a fast one with a mask token"),
    "streamed length": (PLAIN | {"streaming": True, "max_steps": None}, "--streaming needs --max_steps"),
    "streamed evaluation": (
        PLAIN | {"streaming": True, "max_eval_blocks": None},
        "--streaming needs --max_eval_blocks",
    ),
    "streamed tokenizer": ({"streaming": True}, "--train_tokenizer .* without --streaming"),
    "untrained tokenizer": ({"do_train": None}, "--train_tokenizer reads all training documents: it needs --do_train"),
    "nothing": ({"do_train": None, "do_eval": None}, "nothing to do: give --do_train or --do_eval"),
    "resume": ({"resume_from_checkpoint": "x"}, "--resume_from_checkpoint is not used"),
    "typo": ({"block_sizes": 64}, "block_sizes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_anything_is_written(case, run_mlm, finished, corpus, tmp_path):
    settings, message = REFUSED[case]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("one two three")
    (tmp_path / "two.jsonl").write_text('{"text": "one"}\n' + json.dumps({"text": "two " * 999}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(finished)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "maskless")
    settings = {
        name: value.replace("FOLDER", str(tmp_path)).replace("TOKENIZER", str(finished))
        if isinstance(value, str)
        else value
        for name, value in settings.items()
    }
    with pytest.raises(ValueError, match=message):
        run_mlm.main(arguments(tmp_path / "run", **({"train_file": corpus} | settings)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("renamed", "no checkpoint of BertForMaskedLM"),
        ("resized", "no checkpoint of RobertaForMaskedLM: .* of another shape"),
        ("short", "64 is longer .* 32 tokens: .* is 34; .*convert_checkpoint.py --max_position_embeddings 64 makes"),
        ("small", "tokenizer has 500 tokens, the model knows 499"),
        ("decoder", "gpt2, for which transformers has no masked language model"),
    ],
)
def test_unfit_checkpoint_is_refused(kind, message, run_mlm, finished, corpus, tmp_path):
    (tmp_path / "model").mkdir()
    settings = {
        "model_name_or_path": checkpoint_of(kind, tmp_path / "model", finished),
        "model_type": None,
        "config_overrides": None,
        "train_tokenizer": None,
        "vocab_size": None,
        "train_file": corpus,
    }
    with pytest.raises(ValueError, match=message):
        run_mlm.main(arguments(tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_an_untrained_head_is_not_evaluated(run_mlm, finished, corpus, tmp_path):
    YosoModel.from_pretrained(finished).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(finished).save_pretrained(tmp_path / "model")
    settings = {"model_name_or_path": tmp_path / "model", "model_type": None, "config_overrides": None}
    settings |= {"train_tokenizer": None, "vocab_size": None, "do_train": None, "validation_file": corpus}
    with pytest.raises(ValueError, match="is no checkpoint of YosoForMaskedLM: .* such as cls.predictions"):
        run_mlm.main(arguments(tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_directory_of_another_run_is_refused(run_mlm, finished, corpus, tmp_path):
    """Another argument of model, data or training; files of something else; a file in the directory's place."""
    before = snapshot(finished)
    changed = {
        "learning_rate": "learning_rate is 0.003 there and 0.001 here",
        "block_size": "block_size is 64 there and 32 here",
        "train_file": "train_file is .*topics.jsonl'. there and .*other.jsonl'. here",
    }
    shutil.copy(corpus, tmp_path / "other.jsonl")
    values = {"learning_rate": 1e-3, "block_size": 32, "train_file": tmp_path / "other.jsonl"}
    for name, message in changed.items():
        settings = {"train_file": corpus, "eval_on_start": True, name: values[name]}
        with pytest.raises(ValueError, match=f"--output_dir .*finished holds another run: .*{message}"):
            run_mlm.main(arguments(finished, **settings))
    with open(corpus, "a") as file:
        file.write("\n")
    try:
        with pytest.raises(ValueError, match="holds another run: content of .*jsonl has changed"):
            run_mlm.main(arguments(finished, train_file=corpus, eval_on_start=True))
    finally:
        corpus.write_text(corpus.read_text()[:-1])
    assert snapshot(finished) == before

    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="--output_dir .*foreign holds files but no run.json; choose a new"):
        run_mlm.main(arguments(tmp_path / "foreign", train_file=corpus))
    with pytest.raises(ValueError, match="--output_dir must be a directory, got the file"):
        run_mlm.main(arguments(corpus, train_file=corpus))
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]

    busy = TrainingArguments(output_dir=str(tmp_path / "busy"))
    with claimed(busy), pytest.raises(ValueError, match="--output_dir .*busy: another command is at work there"):
        run_mlm.main(arguments(tmp_path / "busy", train_file=corpus))
    assert not (tmp_path / "busy").exists()


# Runs a script as its own command does. A thread of the process group that outlives Python may abort the process.
AND_NO_THREADS = """
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in names), names
"""


def run_in_two_processes(command: list[str], script: Path = SCRIPT) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    process = start([*launcher, *command, "--ddp_backend=gloo"], start_new_session=True)
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def test_two_processes(finished, corpus, tmp_path):
    """Packed by one of them; as many steps as one process takes, each over twice as many blocks."""
    # a file that no other run has read
    shutil.copy(corpus, tmp_path)
    script = tmp_path / "and_no_threads.py"
    script.write_text(AND_NO_THREADS)
    # at the end one process has a block less to evaluate
    command = [SCRIPT, *arguments(tmp_path / "run", train_file=tmp_path / corpus.name, max_eval_blocks=37)]
    output = run_in_two_processes(command, script)
    # the file read, blocks to train on, blocks to validate with
    assert output.count("Generating train split: 0 examples") == 3
    found = results(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 12
    assert found["num_input_tokens_seen"] == 2 * 12 * 8 * 64
    assert found["eval_loss"] < math.log(500) - 0.3
    assert found["eval_loss"] == pytest.approx(evaluation_loss(tmp_path / "run", corpus, 37), rel=1e-5)
    # the tokenizer that the first process trained
    tokenizers = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (finished, tmp_path / "run")]
    assert tokenizers[0] == tokenizers[1]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_two_processes_resume_where_they_were(streaming, finished, corpus, tmp_path):
    settings = {"train_tokenizer": None, "vocab_size": None, "tokenizer_name": finished, "streaming": streaming}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_in_two_processes(arguments(whole, train_file=corpus, **settings))
    shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-4")
    shutil.copy(whole / "run.json", resumed)
    run_in_two_processes(arguments(resumed, train_file=corpus, **settings))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert results(resumed)["eval_loss"] == results(whole)["eval_loss"]


@pytest.mark.slow
def test_killed_again_and_again(run_mlm, corpus, tmp_path):
    """Each time soon after a new checkpoint's directory has appeared, often before it is complete."""
    settings = {"train_file": corpus, "max_steps": 60, "save_steps": 2, "save_total_limit": 2}
    run_mlm.main(arguments(tmp_path / "whole", **settings))

    run = tmp_path / "run"
    command = arguments(run, **settings)
    generator = random.Random(0)

    def last() -> int:
        return max((int(path.name.split("-")[1]) for path in run.glob("checkpoint-*")), default=0)

    for _ in range(6):
        seen = last()
        process = start([SCRIPT, *command])
        while last() == seen and process.poll() is None:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    run_mlm.main(command)
    torch.testing.assert_close(weights(run), weights(tmp_path / "whole"), rtol=0, atol=0)
