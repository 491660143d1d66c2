import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    TrainingArguments,
)
from transformers.trainer_callback import TrainerState

from yoso_hf import YosoConfig, YosoForMaskedLM, YosoModel
from yoso_hf.attention_interface import SETTINGS
from yoso_hf.data import train_tokenizer
from yoso_hf.training import (
    check_attention,
    check_best_metric,
    claimed,
    describe_run,
    find_checkpoint,
    finished_state,
    finished_weights,
    load_pretrained,
    load_tokenizer,
    longest_input,
    override_config,
    parse_arguments,
    write_run,
    write_text,
)

SIZES = {
    "vocab_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
}


def test_the_command_line_overrides_the_file(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "learning_rate: 3e-5\nwarmup_steps: 0.1\nbf16: false\ndo_train: true\nhub_token: null\n"
        "lr_scheduler_kwargs: {num_cycles: 2, min_lr: 1e-6}\nlabel_names: [labels, more]\nseed: 1\nsave_strategy: no\n"
        f"logging_first_step: yes\nweight_decay: .5\nmax_grad_norm: 2E3\noutput_dir: {tmp_path}\n"
    )
    (args,) = parse_arguments([TrainingArguments], [str(recipe), "--seed", "5", "--do_train", "false"])
    assert (args.learning_rate, args.warmup_steps, args.bf16) == (3e-5, 0.1, False)
    assert (args.lr_scheduler_kwargs, args.label_names) == (
        {"num_cycles": 2, "min_lr": 1e-6},
        ["labels", "more"],
    )
    assert (args.save_strategy, args.logging_first_step, args.weight_decay, args.max_grad_norm) == (
        "no",
        True,
        0.5,
        2e3,
    )
    assert (args.seed, args.do_train, args.hub_token) == (5, False, None)
    # nothing to copy to without an accelerator
    assert args.dataloader_pin_memory == torch.accelerator.is_available()


def test_a_mapping_of_the_file_is_replaced_with_a_warning(tmp_path, caplog):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"lr_scheduler_kwargs: {{num_cycles: 2, min_lr: 0}}\noutput_dir: {tmp_path}\n")
    parse_arguments([TrainingArguments], [str(recipe), "--seed=1"])
    assert not caplog.text
    (args,) = parse_arguments([TrainingArguments], [str(recipe), '--lr-scheduler-kwargs={"num_cycles": 3}'])
    assert args.lr_scheduler_kwargs == {"num_cycles": 3}
    assert f"command line alone, without that of {recipe}: num_cycles, min_lr" in caplog.text


def test_help_has_the_description_and_defaults_that_there_are(capsys):
    with pytest.raises(SystemExit):
        parse_arguments([TrainingArguments], ["--help"], "What it does.\n\n    a command\n")
    text = capsys.readouterr().out
    assert "\nWhat it does.\n\n    a command\n" in text
    assert "(default: adamw_torch" in text and "default: None" not in text


def test_a_list_is_given_once(tmp_path):
    output = f"--output_dir={tmp_path}"
    (args,) = parse_arguments([TrainingArguments], [output, "--label_names", "a", "b"])
    assert args.label_names == ["a", "b"]
    with pytest.raises(ValueError, match="--label_names is given more than once"):
        parse_arguments([TrainingArguments], [output, "--label_names", "a", "--label-names=b"])
    # of others the last is taken, as everywhere
    (args,) = parse_arguments([TrainingArguments], [output, "--seed=1", "--seed=2"])
    assert args.seed == 2


def test_what_trainer_does_by_default_and_should_not(tmp_path):
    output = f"--output_dir={tmp_path}"
    (args,) = parse_arguments([TrainingArguments], [output])
    assert not args.logging_nan_inf_filter
    (args,) = parse_arguments([TrainingArguments], [output, "--logging_nan_inf_filter=true", "--save_total_limit=1"])
    assert args.logging_nan_inf_filter
    assert args.save_total_limit == 1
    # the last checkpoint is kept beside the best one
    best = [output, "--metric_for_best_model=loss"]
    for limit, kept in ((1, 2), (2, 2), (3, 3)):
        (args,) = parse_arguments([TrainingArguments], [*best, f"--save_total_limit={limit}"])
        assert args.save_total_limit == kept


def test_the_best_model_has_the_lowest_of_what_is_better_lower(tmp_path):
    for metric, greater in (("perplexity", False), ("eval_perplexity", False), ("accuracy", True), ("loss", False)):
        values = [f"--output_dir={tmp_path}", f"--metric_for_best_model={metric}", "--save_strategy=best"]
        (args,) = parse_arguments([TrainingArguments], [*values, "--eval_strategy=steps"])
        check_best_metric(args, ["accuracy", "loss", "perplexity"], lower_is_better=["perplexity"])
        assert args.greater_is_better == greater
    # never looked for
    args.metric_for_best_model, args.eval_strategy = "f1", "no"
    check_best_metric(args, ["accuracy"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: 1", "seeds"),
        ("- seed", "must hold `argument: value` lines"),
        ("seed: [1", r"recipe.yaml cannot be read as YAML: while parsing"),
        ("seed: \xe9", r"recipe.yaml cannot be read as YAML: 'utf-8'"),
        (None, "no such file"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    recipe = tmp_path / "recipe.yaml"
    if text:
        recipe.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        parse_arguments([TrainingArguments], [str(recipe)])


def test_an_evaluation_before_training_is_one(tmp_path):
    (args,) = parse_arguments([TrainingArguments], [f"--output_dir={tmp_path}", "--do_train", "--eval_on_start"])
    assert args.do_eval


@pytest.mark.parametrize(
    "argument", [["--do_eval", "false"], ["--do-eval=False"], ["--do_eval=0"], ["--do_eval", "no"]]
)
def test_no_evaluation_is_none_whatever_the_files_strategy(argument, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"do_eval: true\neval_strategy: epoch\neval_on_start: true\noutput_dir: {tmp_path}\n")
    (args,) = parse_arguments([TrainingArguments], [str(recipe), *argument])
    assert not args.do_eval and not args.eval_on_start
    assert args.eval_strategy == "no"
    (args,) = parse_arguments([TrainingArguments], [str(recipe), *argument, "--eval_on_start"])
    assert args.do_eval and args.eval_on_start
    # of what is given together, Trainer decides
    (args,) = parse_arguments(
        [TrainingArguments], [str(recipe), *argument, "--eval_strategy", "steps", "--eval_steps=5"]
    )
    assert args.do_eval
    assert args.eval_strategy == "steps"
    for others in (["--do_eval", "true"], ["--do_eval=1"], ["--do_eval"], ["--do_train", "false"]):
        (args,) = parse_arguments([TrainingArguments], [str(recipe), *others])
        assert args.do_eval
        assert args.eval_strategy == "epoch"


def test_what_is_a_number_in_yaml_alone_stays_as_it_is_written(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "seed: 010\nmax_steps: 1_000\nsave_steps: 7\nlearning_rate: 2.\nrun_name: 2024_01_01\nproject: 12:30:45\n"
        f"lr_scheduler_kwargs: {{day: 2024-01-01, one: -1, ten: 1e1}}\noutput_dir: {tmp_path}\n"
    )
    (args,) = parse_arguments([TrainingArguments], [str(recipe)])
    assert (args.seed, args.max_steps, args.save_steps, args.learning_rate) == (10, 1000, 7, 2.0)
    assert (args.run_name, args.project) == ("2024_01_01", "12:30:45")
    assert args.lr_scheduler_kwargs == {"day": "2024-01-01", "one": -1, "ten": 10.0}


def test_a_name_close_to_a_known_one_is_suggested(tmp_path):
    with pytest.raises(ValueError, match="no argument --learning_rte 3; did you mean --learning_rate\\?$"):
        parse_arguments([TrainingArguments], [f"--output_dir={tmp_path}", "--learning_rte", "3"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("save_step: 5\nqqq: 1\n")
    with pytest.raises(ValueError, match="no argument --save_step=5 --qqq=1; did you mean --save_steps\\?$"):
        parse_arguments([TrainingArguments], [str(recipe), f"--output_dir={tmp_path}"])


@pytest.mark.parametrize("name", ["output_dir", "output-dir"])
def test_no_directory_is_chosen_for_the_user(tmp_path, name):
    (args,) = parse_arguments([TrainingArguments], [f"--{name}", str(tmp_path)])
    assert args.output_dir == str(tmp_path)
    with pytest.raises(ValueError, match="--output_dir is missing"):
        parse_arguments([TrainingArguments], ["--do_train"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["--per_device_train_batch_size=0"], "--per_device_train_batch_size must be at least 1, got 0"),
        (["--per_device_eval_batch_size=-1"], "--per_device_eval_batch_size must be at least 1, got -1"),
        (["--gradient_accumulation_steps=0"], "--gradient_accumulation_steps must be at least 1, got 0"),
        (["--weight_decay=-0.1"], "--weight_decay must be at least 0, got -0.1"),
        (["--weight_decay=nan"], "--weight_decay must be at least 0, got nan"),
        (["--max_grad_norm=-1"], "--max_grad_norm must be at least 0, got -1"),
        (["--dataloader_num_workers=-1"], "--dataloader_num_workers must be at least 0, got -1"),
        (["--save_steps=0"], "--save_steps must be above 0, got 0"),
        (["--use_cpu", "--fp16"], "--fp16 needs a GPU; on a CPU there is --bf16, with --use_cpu"),
        (["--learning_rate=-1e-3"], "--learning_rate must be a number of at least 0, got -0.001"),
        (["--learning_rate=nan"], "--learning_rate must be a number of at least 0, got nan"),
        (["--eval_do_concat_batches=false"], "--eval_do_concat_batches must be true"),
        (["--batch_eval_metrics"], "--batch_eval_metrics must be false"),
        (["--prediction_loss_only"], "--prediction_loss_only must be false"),
        (["--num_train_epochs=0"], "--num_train_epochs must be above 0 without --max_steps, got 0"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments([TrainingArguments], [f"--output_dir={tmp_path}", *values])


def test_ends_of_ranges_are_taken(tmp_path):
    values = {"weight_decay": 0.0, "max_grad_norm": 0.0, "dataloader_num_workers": 0, "save_steps": 0.5}
    (args,) = parse_arguments(
        [TrainingArguments], [f"--{name}={value}" for name, value in values.items()] + [f"--output_dir={tmp_path}"]
    )
    assert {name: getattr(args, name) for name in values} == values
    # without checkpoints it has no effect
    parse_arguments([TrainingArguments], [f"--output_dir={tmp_path}", "--save_strategy=no", "--save_steps=0"])


def test_processes_that_would_train_apart_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="started in 2 processes, of which Trainer knows 1: .* need --use_cpu"):
        parse_arguments([TrainingArguments], [f"--output_dir={tmp_path}"])


def test_steps_take_the_place_of_epochs(tmp_path):
    (args,) = parse_arguments(
        [TrainingArguments], [f"--output_dir={tmp_path}", "--num_train_epochs=0", "--max_steps=3"]
    )
    assert args.max_steps == 3


def test_overrides_are_typed_and_checked():
    config = YosoConfig(hidden_dropout_prob=0.2)
    changed = override_config(
        config, "num_hash=7,use_expectation=false,layer_norm_eps=1e-5,conv_window=3,hash_seed=null,hidden_act=relu"
    )
    assert (changed.num_hash, changed.use_expectation, changed.layer_norm_eps) == (7, False, 1e-5)
    assert (changed.conv_window, changed.hash_seed, changed.hidden_act) == (3, None, "relu")
    assert changed.hidden_dropout_prob == 0.2
    assert (config.num_hash, config.use_expectation) == (64, True)
    assert override_config(config, None).to_dict() == config.to_dict()
    pythons = override_config(config, "use_expectation=False,hash_seed=None")
    assert (pythons.use_expectation, pythons.hash_seed) == (False, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("num_hash", "must be name=value,name=value, or a JSON object, .*, got 'num_hash'"),
        ("num_hashes=3", "YosoConfig has no 'num_hashes'; did you mean num_hash\\?$"),
        ("yoso_num_hash=3", "YosoConfig has no 'yoso_num_hash'"),
        ("qqq=3", "YosoConfig has no 'qqq'$"),
        ("num_hash=many", "'num_hash' expected int, got str"),
        ("conv_window=4", "conv_window must be None or an odd positive number, got 4"),
    ],
)
def test_wrong_overrides_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        override_config(YosoConfig(), overrides)


def write_state(folder, step: int, max_steps: int = 20) -> None:
    folder.mkdir()
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / name).touch()
    TrainerState(global_step=step, max_steps=max_steps).save_to_json(folder / "trainer_state.json")


def test_the_last_complete_checkpoint_is_found(tmp_path):
    run = describe_run(TrainingArguments(output_dir=str(tmp_path / "a"), learning_rate=1e-3), [], model="m")
    folder = tmp_path / "run"
    assert find_checkpoint(folder, run) is None
    assert not folder.exists()
    write_run(folder, run)
    assert find_checkpoint(folder, run) is None
    write_state(folder / "checkpoint-9", 9)
    write_state(folder / "checkpoint-10", 10)
    # killed before its trainer state was written, and in the middle of that
    (folder / "checkpoint-11").mkdir()
    (folder / "checkpoint-12").mkdir()
    (folder / "checkpoint-12" / "trainer_state.json").write_text('{"epoch": 1.0, "glob')
    # copies that somebody made
    shutil.copytree(folder / "checkpoint-9", folder / "checkpoint-best1")
    shutil.copytree(folder / "checkpoint-9", folder / "checkpoint-best-11")
    assert find_checkpoint(folder, run) == str(folder / "checkpoint-10")

    # where it lies and how it reports do not make another run, what it learns does
    elsewhere = TrainingArguments(output_dir=str(tmp_path / "b"), learning_rate=1e-3, logging_steps=3)
    assert find_checkpoint(folder, describe_run(elsewhere, [], model="m")) == str(folder / "checkpoint-10")
    with pytest.raises(ValueError, match="holds another run: model is 'm' there and 'other' here"):
        find_checkpoint(folder, describe_run(elsewhere, [], model="other"))
    elsewhere.learning_rate = 2e-3
    with pytest.raises(ValueError, match="another run: learning_rate is 0.001 there and 0.002 here"):
        find_checkpoint(folder, describe_run(elsewhere, [], model="m"))


def test_a_checkpoint_of_another_version_is_not_trained_over(tmp_path):
    write_run(tmp_path, {})
    write_state(tmp_path / "checkpoint-10", 10)
    state = tmp_path / "checkpoint-10" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"of_another_version": 1}))
    with pytest.raises(ValueError, match="checkpoint-10 was written by another version of .*of_another_version"):
        find_checkpoint(tmp_path, {})


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_optimizer_is_not_resumed(tmp_path, missing):
    """As --save_only_model leaves it: Trainer would start a new one, in silence."""
    write_run(tmp_path, {})
    write_state(tmp_path / "checkpoint-10", 10)
    last = tmp_path / "checkpoint-15"
    write_state(last, 15)
    (last / missing).unlink()
    with pytest.raises(ValueError, match="checkpoint-15 holds no optimizer and scheduler, as --save_only_model"):
        find_checkpoint(tmp_path, {})
    # of DeepSpeed, and of FSDP
    (last / "global_step15").mkdir()
    assert find_checkpoint(tmp_path, {}) == str(last)
    (last / "global_step15").rmdir()
    (last / "scheduler.pt").touch()
    (last / "optimizer_0").mkdir()
    assert find_checkpoint(tmp_path, {}) == str(last)
    # a finished run needs none
    write_state(tmp_path / "checkpoint-20", 20)
    (tmp_path / "checkpoint-20" / missing).unlink()
    assert find_checkpoint(tmp_path, {}) == str(tmp_path / "checkpoint-20")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("per_device_train_batch_size", 3),
        ("gradient_accumulation_steps", 2),
        ("num_train_epochs", 2.5),
        ("max_steps", 7),
        ("learning_rate", 1e-3),
        ("lr_scheduler_type", "cosine"),
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
        ("warmup_steps", 5),
        ("optim", "sgd"),
        ("optim_args", "momentum=0.9"),
        ("optim_target_modules", ["query"]),
        ("weight_decay", 0.1),
        ("adam_beta1", 0.8),
        ("adam_beta2", 0.8),
        ("adam_epsilon", 1e-6),
        ("max_grad_norm", 0.5),
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("dataloader_drop_last", True),
        ("bf16", True),
        ("fp16", True),
        ("seed", 1),
        ("data_seed", 1),
        ("train_sampling_strategy", "sequential"),
        ("ignore_data_skip", True),
        ("accelerator_config", {"split_batches": True}),
        ("average_tokens_across_devices", False),
        ("load_best_model_at_end", True),
        ("metric_for_best_model", "accuracy"),
        ("greater_is_better", True),
    ],
)
def test_what_decides_the_weights_makes_another_run(tmp_path, name, value):
    folder, settings = tmp_path / "run", {"output_dir": str(tmp_path), "use_cpu": True, "save_strategy": "no"}
    write_run(folder, describe_run(TrainingArguments(**settings), []))
    write_state(folder / "checkpoint-1", 1)
    changed = TrainingArguments(**settings)
    setattr(changed, name, value)
    with pytest.raises(ValueError, match=f"holds another run: {name} is "):
        find_checkpoint(folder, describe_run(changed, []))


def test_processes_and_what_is_read_make_another_run(tmp_path, monkeypatch):
    """The same size is not the same content; names of the hub, and what else a directory holds, do not count."""
    folder, args = tmp_path / "run", TrainingArguments(output_dir=str(tmp_path))
    model, file = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    weights, log = model / "model.safetensors", model / "all_results.json"
    # longer than what is read at a time
    long = "x" * 2**21
    contents = {file: long + "12345", weights: "weights", log: "1"}

    def describe():
        return describe_run(args, [str(file), str(model), "google-bert/bert-base-uncased", None])

    for path, content in contents.items():
        path.write_text(content)
    write_run(folder, describe())
    write_state(folder / "checkpoint-1", 1)
    log.write_text("2")
    assert find_checkpoint(folder, describe())
    for path, other in ((file, long + "54321"), (file, "y" + long[1:] + "12345"), (weights, "thgiews")):
        path.write_text(other)
        with pytest.raises(ValueError, match=re.escape(f"holds another run: content of {path} has changed. ")):
            find_checkpoint(folder, describe())
        path.write_text(contents[path])
    weights.unlink()
    with pytest.raises(ValueError, match=re.escape(f"holds another run: content of {weights} counts there alone. ")):
        find_checkpoint(folder, describe())
    weights.write_text(contents[weights])
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda _: 2))
    with pytest.raises(ValueError, match="holds another run: world_size is 1 there and 2 here"):
        find_checkpoint(folder, describe())
    with monkeypatch.context() as patch:
        patch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
        with pytest.raises(ValueError, match="holds another run: .*n_gpu is 1 there and 2 here"):
            find_checkpoint(folder, describe())
    # what was typed comes first
    file.write_text("other")
    with pytest.raises(ValueError, match="holds another run: world_size is 1 there and 2 here; content of "):
        find_checkpoint(folder, describe())


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
        *("added_tokens.json", "special_tokens_map.json", "bpe.codes"),
    ],
)
def test_every_file_of_a_model_and_a_tokenizer_makes_another_run(tmp_path, name):
    folder, file = tmp_path / "run", tmp_path / "model" / name
    file.parent.mkdir()
    file.write_text("before")
    args = TrainingArguments(output_dir=str(folder))
    write_run(folder, describe_run(args, [str(file.parent)]))
    write_state(folder / "checkpoint-1", 1)
    file.write_text("behind")
    with pytest.raises(ValueError, match=re.escape(f"holds another run: content of {file} has changed. ")):
        find_checkpoint(folder, describe_run(args, [str(file.parent)]))


def test_a_run_that_saved_nothing_gives_way(tmp_path):
    write_run(tmp_path, {"model": "m"})
    assert find_checkpoint(tmp_path, {"model": "other"}) is None
    # an incomplete checkpoint, and results without any checkpoint, are something
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="holds another run: model is 'm' there and 'other' here"):
        find_checkpoint(tmp_path, {"model": "other"})
    (tmp_path / "checkpoint-2").rmdir()
    (tmp_path / "all_results.json").write_text("{}")
    with pytest.raises(ValueError, match="holds another run"):
        find_checkpoint(tmp_path, {"model": "other"})
    # and so are weights whose results were deleted
    (tmp_path / "all_results.json").rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds another run"):
        find_checkpoint(tmp_path, {"model": "other"})


def test_damaged_records_are_named(tmp_path):
    write_run(tmp_path, {"model": "m"})
    (tmp_path / "all_results.json").write_text('{"eval_loss": 1.')
    with pytest.raises(ValueError, match="all_results.json is damaged .*; delete it, and repeat the command"):
        find_checkpoint(tmp_path, {"model": "m"})
    (tmp_path / "run.json").write_text("")
    with pytest.raises(ValueError, match="run.json is damaged .*; choose another directory"):
        find_checkpoint(tmp_path, {"model": "m"})


# Holds a directory until it is ended.
HOLDER = """
import sys, time
from transformers import TrainingArguments
from yoso_hf.training import claimed
with claimed(TrainingArguments(output_dir=sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_was_forked_meanwhile_keeps_no_one_out(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path))
    with claimed(args):
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
    try:
        with claimed(args):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of directories")
def test_one_command_at_a_time_is_at_work_in_a_directory(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path / "runs" / "run"))
    folder = Path(args.output_dir)
    with claimed(args), pytest.raises(ValueError, match="runs/run: another command is at work there"), claimed(args):
        pass
    # nothing was written
    assert not folder.exists()
    folder.mkdir()
    with claimed(args):
        assert not any(folder.iterdir())
    assert folder.is_dir()

    process = subprocess.Popen([sys.executable, "-c", HOLDER, args.output_dir], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another command is at work there"), claimed(args):
            pass
        # of several processes the others do not ask
        other = TrainingArguments(output_dir=args.output_dir)
        with patch.object(TrainingArguments, "process_index", 1), claimed(other):
            pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    # what ended without a word holds nothing
    with claimed(args):
        (folder / "run.json").write_text("{}")
    assert [path.name for path in folder.iterdir()] == ["run.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of directories")
def test_where_there_are_no_locks_nothing_is_kept_out(tmp_path):
    """As on some network file systems."""
    args = TrainingArguments(output_dir=str(tmp_path / "run"))
    with patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")), claimed(args), claimed(args):
        (tmp_path / "run" / "run.json").touch()
    assert (tmp_path / "run" / "run.json").exists()


def test_a_directory_of_other_files_is_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files but no run.json"):
        find_checkpoint(tmp_path, {})
    with pytest.raises(ValueError, match="must be a directory, got the file"):
        find_checkpoint(tmp_path / "notes.txt", {})


def test_a_run_without_steps_left_is_finished(tmp_path):
    assert finished_state(None) is None
    write_state(tmp_path / "checkpoint-19", 19)
    write_state(tmp_path / "checkpoint-20", 20)
    assert finished_state(str(tmp_path / "checkpoint-19")) is None
    assert finished_state(str(tmp_path / "checkpoint-20")).global_step == 20


def test_a_finished_run_has_the_weights_it_saved(tmp_path):
    last, best = tmp_path / "checkpoint-20", tmp_path / "checkpoint-10"
    best.mkdir()
    plain, keeps_best = TrainingArguments(output_dir="x"), TrainingArguments(output_dir="x")
    keeps_best.load_best_model_at_end = True
    # the path it was trained under
    state = TrainerState(global_step=20, max_steps=20, best_model_checkpoint="/elsewhere/checkpoint-10")
    assert finished_weights(str(last), state, plain) == str(last)
    assert finished_weights(str(last), state, keeps_best) == str(best)
    # never evaluated
    assert finished_weights(str(last), TrainerState(global_step=20, max_steps=20), keeps_best) == str(last)
    best.rmdir()
    with pytest.raises(ValueError, match="--output_dir .* no longer holds checkpoint-10, the best checkpoint"):
        finished_weights(str(last), state, keeps_best)


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "text"
    write_text(path, "first")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert [other.name for other in path.parent.iterdir()] == ["text"]


def test_a_model_is_loaded_in_float32_with_all_its_weights(tmp_path):
    config = YosoConfig(**SIZES)
    saved = YosoForMaskedLM(config).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "model")
    loaded = load_pretrained(AutoModelForMaskedLM, str(tmp_path / "model"), config)
    for name, weight in saved.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight.float(), rtol=0, atol=0)


def test_a_tokenizer_must_fit_the_model(tmp_path):
    tokenizer = train_tokenizer(["the cat"], 261)
    tokenizer.save_pretrained(tmp_path / "whole")
    assert len(load_tokenizer(str(tmp_path / "whole"), YosoConfig(vocab_size=261))) == 261
    with pytest.raises(ValueError, match="whole has 261 tokens, the model knows 260 .vocab_size.$"):
        load_tokenizer(str(tmp_path / "whole"), YosoConfig(vocab_size=260))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "padless")
    with pytest.raises(ValueError, match="the tokenizer .*padless has no padding token"):
        load_tokenizer(str(tmp_path / "padless"), YosoConfig(vocab_size=261))


def test_settings_of_yoso_stay_with_a_model_of_another_type(tmp_path):
    original, tuned, softmax = (str(tmp_path / name) for name in ("original", "tuned", "softmax"))
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(original)
    with pytest.raises(ValueError, match="BertConfig has no 'yoso_num_hashes'"):
        override_config(BertConfig.from_pretrained(original), "yoso_num_hashes=7")
    config = override_config(BertConfig.from_pretrained(original), "yoso_num_hash=7")
    model = load_pretrained(AutoModelForMaskedLM, original, config, attn_implementation="yoso")
    assert {name: getattr(model.config, name) for name in SETTINGS} == {**SETTINGS, "yoso_num_hash": 7}

    exact = load_pretrained(AutoModelForMaskedLM, original, config, attn_implementation="yoso_expectation")
    # what it was trained with stays
    assert {name: getattr(exact.config, name) for name in SETTINGS} == {
        **SETTINGS,
        "yoso_num_hash": 7,
        "yoso_use_expectation": True,
    }
    for attention, key in (("yoso_expectation", "yoso_num_hash=7"), ("yoso", "yoso_use_expectation=true")):
        new = override_config(BertConfig.from_pretrained(original), key)
        exact = load_pretrained(AutoModelForMaskedLM, original, new, attn_implementation=attention)
        expected = {**SETTINGS, "yoso_num_hash": exact.config.yoso_num_hash, "yoso_use_expectation": True}
        assert {name: getattr(exact.config, name) for name in SETTINGS} == expected

    # chosen again without being named, and left when another attention is
    model.save_pretrained(tuned)
    again = load_pretrained(AutoModelForMaskedLM, tuned, BertConfig.from_pretrained(tuned))
    assert again.config._attn_implementation == "yoso"
    assert again.config.yoso_num_hash == 7
    other = BertConfig.from_pretrained(tuned)
    load_pretrained(AutoModelForMaskedLM, tuned, other, attn_implementation="sdpa").save_pretrained(softmax)
    last = load_pretrained(AutoModelForMaskedLM, softmax, BertConfig.from_pretrained(softmax))
    assert last.config._attn_implementation == "sdpa"


def test_only_a_new_head_may_be_missing(tmp_path):
    config = YosoConfig(**SIZES)
    YosoModel(config).save_pretrained(tmp_path / "base")
    load_pretrained(AutoModelForMaskedLM, str(tmp_path / "base"), config, new_head=True)
    with pytest.raises(ValueError, match="is no checkpoint of YosoForMaskedLM: .* such as cls.predictions"):
        load_pretrained(AutoModelForMaskedLM, str(tmp_path / "base"), config)

    # one layer more than the checkpoint has, and a table of another shape
    for change in ({"num_hidden_layers": 2}, {"max_position_embeddings": 16}):
        with pytest.raises(ValueError, match="are missing or of another shape, such as yoso"):
            load_pretrained(AutoModelForMaskedLM, str(tmp_path / "base"), YosoConfig(**SIZES | change), new_head=True)


def test_an_attention_without_effect_is_refused():
    check_attention(YosoForMaskedLM(YosoConfig(**SIZES)), None)
    with pytest.raises(ValueError, match="--attn_implementation eager has no effect on YosoForMaskedLM"):
        check_attention(YosoForMaskedLM(YosoConfig(**SIZES)), "eager")
    bert = BertForMaskedLM._from_config(BertConfig(**SIZES), attn_implementation="sdpa")
    check_attention(bert, "sdpa")
    with pytest.raises(ValueError, match="--attn_implementation eager has no effect"):
        check_attention(bert, "eager")


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (YosoForMaskedLM, YosoConfig(**SIZES, max_position_embeddings=12)),
        (BertForMaskedLM, BertConfig(**SIZES, max_position_embeddings=12)),
        # its first two rows stand for no position and for padding
        (RobertaForMaskedLM, RobertaConfig(**SIZES, max_position_embeddings=14)),
    ],
)
def test_the_longest_input_runs_and_a_longer_one_does_not(model_class, config):
    model = model_class(config)
    assert longest_input(model) == 12
    # id 5 is padding in none of them
    model(input_ids=torch.full((1, 12), 5))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(input_ids=torch.full((1, 13), 5))


def test_without_a_table_of_positions_the_configuration_tells():
    config = ModernBertConfig(**SIZES, pad_token_id=0, max_position_embeddings=64)
    assert longest_input(ModernBertForMaskedLM(config)) == 64
