"""What the training scripts share: arguments, run directories, and loading a pretrained model."""

import dataclasses
import difflib
import gc
import hashlib
import json
import math
import os
import re
import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import TrainerState
from transformers.utils import logging

from .attention_interface import IMPLEMENTATIONS, SETTINGS, has_settings, read_settings

try:
    import fcntl
except ImportError:
    # Windows
    fcntl = None

logger = logging.get_logger(__name__)

RUN_FILE = "run.json"
RESULTS_FILE = "all_results.json"

# the arguments of Trainer that a resumed run must share with the interrupted one
_TRAINER_CHOICES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "dataloader_drop_last",
    "bf16",
    "fp16",
    "seed",
    "data_seed",
    "train_sampling_strategy",
    "ignore_data_skip",
    "accelerator_config",
    "average_tokens_across_devices",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
)

# what Trainer takes below, to fail later or to train otherwise than was meant
_LOWEST_VALUES = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "dataloader_num_workers": 0,
}

# what values of --config_overrides may be called beside JSON's names of them
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
# of a file that a run reads, before its name
_CONTENT = "content of "
# of a checkpoint's directory, what decides what is learned from it
MODEL_FILES = (
    *("config.json", "*.safetensors", "pytorch_model*.bin"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.codes"),
)


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Shows the description as it is written, and the defaults that there are."""

    def _get_help_string(self, action: Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse_arguments(
    argument_types: list[type], argv: list[str] | None = None, description: str | None = None
) -> tuple:
    """Parse `[config.yaml] [--argument value ...]`; the command line overrides the file.

    Args:
        argument_types: the dataclasses to fill.
        argv: the arguments without the program's name; None: those of this process.
        description: what --help shows above the arguments.

    Returns:
        One instance of each dataclass.

    Raises:
        ValueError: the file is missing or no mapping, an argument is unknown, or a list's given twice, one of
            Trainer's is out of range or --output_dir missing, or Trainer does not know the other processes.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = HfArgumentParser(
        argument_types,
        allow_abbrev=False,
        usage="%(prog)s [config.yaml] [--argument value ...]",
        description=description,
        formatter_class=_HelpFormatter,
    )
    if TrainingArguments in argument_types:
        # Trainer would show 0 for a loss that is no number
        parser.set_defaults(logging_nan_inf_filter=False)
    given = [item.partition("=")[0].replace("-", "_").lstrip("_") for item in argv if item.startswith("--")]
    if argv and not argv[0].startswith("-"):
        # by the file's strategy, or at the start, Trainer would evaluate all the same
        refused = re.search(r"--do[-_]eval[ =](false|f|no|n|0)( |$)", " ".join(argv), re.IGNORECASE)
        no_evaluation = ["--eval_strategy=no", "--eval_on_start=false"] if refused else []
        argv = _yaml_arguments(argv[0], given) + no_evaluation + argv[1:]
    *parsed, left = parser.parse_args_into_dataclasses(
        args=argv, look_for_args_file=False, return_remaining_strings=True
    )
    if left:
        known = [f"--{field.name}" for arguments in argument_types for field in dataclasses.fields(arguments)]
        guesses = [_similar_name(item.partition("=")[0], known) for item in left if item.startswith("--")]
        raise ValueError(f"there is no argument {' '.join(left)}{''.join(guesses)}")
    for args in parsed:
        for name, value in vars(args).items():
            # of which argparse would take the last
            if isinstance(value, list) and given.count(name) > 1:
                raise ValueError(f"--{name} is given more than once: give it once, with all values after it")
        if isinstance(args, TrainingArguments):
            # Trainer would choose one, which the next command would find to be another run's
            if not any(item.replace("-", "_").startswith("__output_dir") for item in argv):
                raise ValueError("--output_dir is missing: where the run is written, and resumed from")
            _check_trainer_arguments(args)
            # which Trainer would miss the data for
            args.do_eval |= args.eval_on_start
            if args.metric_for_best_model is not None and args.save_total_limit == 1:
                # of one, Trainer would keep the best at the end, and not the last, by which a run is known as finished
                args.save_total_limit = 2
            if not torch.accelerator.is_available():
                # which PyTorch would warn of at every run
                args.dataloader_pin_memory = False
    return tuple(parsed)


def _similar_name(name: str, known: Iterable[str]) -> str:
    """Words for the end of a message: which known name may be meant, if any."""
    similar = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def _check_trainer_arguments(args: TrainingArguments) -> None:
    """Refuse what Trainer would notice only once the data are read and the run is recorded, or not at all."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if processes != args.world_size:
        # each would train alone, and write over the others' files
        raise ValueError(
            f"started in {processes} processes, of which Trainer knows {args.world_size}: without a GPU, "
            "several processes need --use_cpu"
        )
    for name, lowest in _LOWEST_VALUES.items():
        if not getattr(args, name) >= lowest:
            raise ValueError(f"--{name} must be at least {lowest}, got {getattr(args, name)}")
    if args.save_strategy == "steps" and args.save_steps <= 0:
        raise ValueError(
            f"--save_steps must be above 0, got {args.save_steps}; --save_strategy no saves no checkpoint"
        )
    if args.fp16 and args.device.type == "cpu":
        # which Trainer would take without a word, and train in float32
        raise ValueError("--fp16 needs a GPU; on a CPU there is --bf16, with --use_cpu")
    for name, only in (
        ("eval_do_concat_batches", True),
        ("batch_eval_metrics", False),
        ("prediction_loss_only", False),
    ):
        if getattr(args, name) is not only:
            raise ValueError(f"--{name} must be {str(only).lower()}: metrics are of all predictions at once")
    if not 0 <= args.learning_rate < math.inf:
        raise ValueError(f"--learning_rate must be a number of at least 0, got {args.learning_rate}")
    if args.max_steps <= 0 and not 0 < args.num_train_epochs < math.inf:
        raise ValueError(f"--num_train_epochs must be above 0 without --max_steps, got {args.num_train_epochs}")
    if args.resume_from_checkpoint:
        raise ValueError(
            "--resume_from_checkpoint is not used: the same command resumes in its --output_dir by itself"
        )


def check_best_metric(args: TrainingArguments, names: Sequence[str], lower_is_better: Sequence[str] = ()) -> None:
    """Refuse to look for the best model by what is not computed, as Trainer would, but before it trains.

    Args:
        args: Trainer's arguments; greater_is_better is set to false for those of lower_is_better.
        names: what an evaluation computes, without the prefix eval_.
        lower_is_better: those of names, beside losses, of which Trainer would keep the model with the greatest.

    Raises:
        ValueError: --metric_for_best_model is something else.
    """
    metric = args.metric_for_best_model
    # Trainer looks for it at every evaluation in training, whatever for
    if args.eval_strategy != "no" and metric is not None and metric.removeprefix("eval_") not in names:
        raise ValueError(f"--metric_for_best_model must be one of {', '.join(names)}, got {metric}")
    if metric is not None and metric.removeprefix("eval_") in lower_is_better:
        args.greater_is_better = False


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where PyYAML's 1.1 surprises: `no` is a word, as --save_strategy has it, and so are 1:30, 1_000 and
    2024-01-01; 1e-6 is a number, and 010 is ten.
    """

    yaml_implicit_resolvers = {
        first: [
            (tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":int", ":float", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def _yaml_arguments(path: str, given: Sequence[str]) -> list[str]:
    if not Path(path).is_file():
        raise ValueError(f"the first argument must be a YAML file or an --argument, got {path!r}: no such file")
    try:
        settings = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold `argument: value` lines")
    arguments = []
    for name, value in settings.items():
        if isinstance(value, dict) and name in given:
            logger.warning(
                f"--{name} is that of the command line alone, without that of {path}: {', '.join(map(str, value))}"
            )
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return arguments


def describe_run(training_args: TrainingArguments, inputs: Iterable[str | None], **choices: Any) -> dict[str, Any]:
    """What makes two commands the same run: the script's own choices, the optimiser's settings and what is read.

    Args:
        training_args: Trainer's arguments; those that only report or place the run are left out.
        inputs: files to train on, and files, directories or names of the hub that a model or a tokenizer comes from.
            Of what is on this machine, the content counts.
        choices: the script's arguments that decide what is learned; values that JSON can hold.

    Returns:
        A dictionary that JSON holds unchanged.
    """
    trainer_arguments = training_args.to_dict()
    return {
        **choices,
        **{name: trainer_arguments[name] for name in _TRAINER_CHOICES},
        "world_size": training_args.world_size,
        # one process may have several
        "n_gpu": max(training_args.n_gpu, 1),
        **{f"{_CONTENT}{file}": _digest(file) for path in inputs if path for file in _files_of(Path(path))},
    }


def _files_of(path: Path) -> list[Path]:
    """A file itself, what a directory holds of a model or a tokenizer, and nothing of a name of the hub."""
    if path.is_dir():
        return sorted({file for pattern in MODEL_FILES for file in path.glob(pattern) if file.is_file()})
    return [path] if path.is_file() else []


def _digest(path: Path) -> str:
    # hashlib.file_digest is of Python 3.11
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def claimed(training_args: TrainingArguments) -> Iterator[None]:
    """Keep other commands out of the output_dir meanwhile; of several processes, the first does it for all.

    Where the system has no such locks nothing is kept out.

    Args:
        training_args: Trainer's arguments; an output_dir that is missing is created, and removed if it stays empty.

    Raises:
        ValueError: another command is at work there.
    """
    folder = Path(training_args.output_dir)
    # a file is for find_checkpoint to refuse
    if fcntl is None or training_args.process_index != 0 or folder.is_file():
        yield
        return
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # the directory's own lock, which leaves no file behind and ends with the process
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f"--output_dir {folder}: another command is at work there; wait for it to end, or choose another directory"
        ) from error
    except OSError:
        # not every network file system has locks
        pass
    try:
        yield
    finally:
        if is_new:
            # unless there is something in it
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            # a process that was forked meanwhile has the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def find_checkpoint(output_dir: str | os.PathLike, description: dict[str, Any]) -> str | None:
    """The last complete checkpoint of this run in output_dir, None for a fresh start.

    A checkpoint is complete once its trainer state, which Trainer writes last, can be read.

    Args:
        output_dir: the run's directory; need not exist.
        description: what `describe_run` gave.

    Returns:
        The checkpoint's path, or None.

    Raises:
        ValueError: the directory holds another run that has saved something, files of something else, a damaged
            record, or a checkpoint with steps left and no optimizer.
    """
    folder = Path(output_dir)
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise ValueError(f"--output_dir must be a directory, got the file {folder}")
    if not any(folder.iterdir()):
        return None
    if not (folder / RUN_FILE).is_file():
        raise ValueError(f"--output_dir {folder} holds files but no {RUN_FILE}; choose a new or an empty directory")
    other = _read_json(folder / RUN_FILE, "choose another directory")
    steps = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    steps = sorted((int(step) for step in steps if step.isdecimal()), reverse=True)
    results = folder / RESULTS_FILE
    if results.exists():
        # Trainer adds to it
        _read_json(results, "delete it, and repeat the command to have it written again")
    # what was typed before what was read
    names = sorted(description.keys() | other.keys(), key=lambda name: (name.startswith(_CONTENT), name))
    differences = [
        _difference(name, other.get(name), description.get(name))
        for name in names
        if other.get(name) != description.get(name)
    ]
    # a run that has saved nothing, such as one with a wrong argument, has nothing to lose
    if differences and (steps or results.exists() or any(folder.glob("*.safetensors"))):
        raise ValueError(
            f"--output_dir {folder} holds another run: {'; '.join(differences)}. "
            "Repeat that run's command to resume it, or choose another directory"
        )
    for checkpoint in (folder / f"checkpoint-{step}" for step in steps):
        state = _read_state(checkpoint)
        if state is None:
            continue
        if state.global_step < state.max_steps and not _has_optimizer(checkpoint):
            # Trainer would go on with a new one, and warm up again
            raise ValueError(
                f"--output_dir {checkpoint} holds no optimizer and scheduler, as --save_only_model leaves it, and "
                "cannot be resumed; choose another directory to train again"
            )
        return str(checkpoint)
    return None


def _difference(name: str, there: Any, here: Any) -> str:
    if not name.startswith(_CONTENT):
        return f"{name} is {there!r} there and {here!r} here"
    # digests are no help
    if there is not None and here is not None:
        return f"{name} has changed"
    return f"{name} counts {'there' if here is None else 'here'} alone"


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--output_dir: {path} is damaged ({error}); {remedy}") from error


def _read_state(checkpoint: Path) -> TrainerState | None:
    try:
        return TrainerState.load_from_json(checkpoint / "trainer_state.json")
    except (OSError, ValueError):
        return None
    except TypeError as error:
        raise ValueError(
            f"--output_dir {checkpoint} was written by another version of transformers ({error}): take that one, or "
            "choose another directory to train again"
        ) from error


def _has_optimizer(checkpoint: Path) -> bool:
    # DeepSpeed's are in a folder of its own
    if any(checkpoint.glob("global_step*")):
        return True
    return any(checkpoint.glob("optimizer*")) and (checkpoint / "scheduler.pt").is_file()


def finished_state(checkpoint: str | None) -> TrainerState | None:
    """The state of a run that has no step left; Trainer, told to resume it, may take one more.

    Args:
        checkpoint: what `find_checkpoint` gave.

    Returns:
        Trainer's state in that checkpoint, None where steps are left.
    """
    if checkpoint is None:
        return None
    state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
    return state if state.global_step >= state.max_steps else None


def finished_weights(checkpoint: str, state: TrainerState, training_args: TrainingArguments) -> str:
    """The checkpoint whose weights a finished run saved: the best one with --load_best_model_at_end, else the last.

    Args:
        checkpoint: what `find_checkpoint` gave.
        state: what `finished_state` gave.
        training_args: Trainer's arguments.

    Returns:
        The checkpoint's path.

    Raises:
        ValueError: the best checkpoint is gone.
    """
    if not training_args.load_best_model_at_end or state.best_model_checkpoint is None:
        return checkpoint
    # beside the last one, wherever the directory has been moved since
    best = Path(checkpoint).with_name(Path(state.best_model_checkpoint).name)
    if not best.is_dir():
        raise ValueError(
            f"--output_dir {best.parent} no longer holds {best.name}, the best checkpoint of this run, "
            "which --load_best_model_at_end asks for; choose another directory to train again"
        )
    return str(best)


def write_run(output_dir: str | os.PathLike, description: dict[str, Any]) -> None:
    """Record in output_dir which run it holds.

    Args:
        output_dir: the run's directory, created where it is missing.
        description: what `describe_run` gave.
    """
    write_text(Path(output_dir) / RUN_FILE, json.dumps(description, indent=2, sort_keys=True) + "\n")


def train_and_evaluate(trainer: Trainer, checkpoint: str | None, finished: TrainerState | None) -> None:
    """Train what is left of a run and evaluate, as its arguments ask, and save the model, metrics and state.

    Args:
        trainer: the trainer; of a finished run, with the weights that it saved.
        checkpoint: what `find_checkpoint` gave.
        finished: what `finished_state` gave.

    Raises:
        ValueError: with --dataloader_drop_last there is no batch to train on.
    """
    args = trainer.args
    if args.do_train and args.dataloader_drop_last and hasattr(trainer.train_dataset, "__len__"):
        rows, batch = len(trainer.train_dataset), args.train_batch_size * args.world_size
        if rows < batch:
            raise ValueError(f"--dataloader_drop_last leaves nothing of {rows} rows, as a batch of all has {batch}")

    def keep(split: str, metrics: dict[str, float]) -> None:
        trainer.log_metrics(split, metrics)
        trainer.save_metrics(split, metrics)

    if finished:
        trainer.state = finished
    elif args.do_train:
        keep("train", trainer.train(resume_from_checkpoint=checkpoint).metrics)
        trainer.save_state()
    if args.do_train:
        trainer.save_model()
    if args.do_eval:
        keep("eval", trainer.evaluate())


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file whole or not at all, creating its directory.

    Args:
        path: the file.
        text: its content, written as UTF-8.
    """
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A context to write a file of any kind whole or not at all.

    Args:
        path: the file; its directory is created.

    Yields:
        Where to write: what is there takes the file's place at the end, and is removed if anything fails before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        # of a full disk, it would be what a run's directory holds
        temporary.unlink(missing_ok=True)


def override_config(config: PreTrainedConfig, overrides: str | None) -> PreTrainedConfig:
    """A configuration with some values replaced, checked as a new one is.

    Args:
        config: the configuration to start from; left as it is.
        overrides: `name=value,name=value`, or the JSON object that a mapping in a YAML file becomes; values as
            JSON writes them (64, 0.1, true, null), or Python (True, None), or plain text.

    Returns:
        The new configuration.

    Raises:
        ValueError: an item is not `name=value`, the object is no JSON, or config has no such name or does not allow
            the value.
    """
    if overrides and overrides.startswith("{"):
        try:
            given = json.loads(overrides)
        except json.JSONDecodeError as error:
            raise ValueError(f"--config_overrides {overrides} is no JSON object: {error}") from error
    else:
        given = {}
        for item in overrides.split(",") if overrides else ():
            name, equals, text = (part.strip() for part in item.partition("="))
            if not equals or not name:
                raise ValueError(
                    f'--config_overrides must be name=value,name=value, or a JSON object, {{"name": [1, 2]}}, where a '
                    f"value has commas, got {item!r}"
                )
            given[name] = text
    values = {}
    for name, value in given.items():
        # a YOSO model has names of its own for them
        is_setting = name in SETTINGS and config.model_type != "yoso"
        if not hasattr(config, name) and not is_setting:
            raise ValueError(
                f"--config_overrides: {type(config).__name__} has no {name!r}{_similar_name(name, config.to_dict())}"
            )
        try:
            # YAML, too, takes 1e-5 for text
            values[name] = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            values[name] = _PYTHON_WORDS.get(value, value)
    try:
        return type(config).from_dict(config.to_dict() | values)
    except StrictDataclassError as error:
        raise ValueError(f"--config_overrides {overrides}: {error}") from error


def read_tokenizer(name_or_path: str | os.PathLike) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer that is saved as it was, wherever it was read from.

    Args:
        name_or_path: hub name or directory of the tokenizer.

    Returns:
        The tokenizer; None where there is none.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # what transformers makes up where there are no files
        return None
    # transformers saves with it where it was read from: the model of a finished run would change when that is repeated
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def load_tokenizer(name_or_path: str, config: PreTrainedConfig | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a training script.

    Args:
        name_or_path: hub name or directory of the tokenizer.
        config: the configuration of a model that must know its tokens; None: of none.

    Returns:
        The tokenizer.

    Raises:
        ValueError: there is no tokenizer, or it has more tokens than the model, or none for padding.
    """
    tokenizer = read_tokenizer(name_or_path)
    if tokenizer is None:
        raise ValueError(f"{name_or_path} holds no tokenizer: give --tokenizer_name")
    if config is None:
        return tokenizer
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer {name_or_path} has {len(tokenizer)} tokens, "
            f"the model knows {config.vocab_size} (vocab_size)"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer {name_or_path} has no padding token")
    return tokenizer


def load_pretrained(
    auto_class: type,
    model_name_or_path: str,
    config: PreTrainedConfig,
    *,
    attn_implementation: str | None = None,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load a float32 model whose weights all come from the checkpoint.

    Args:
        auto_class: an Auto class, such as AutoModelForMaskedLM.
        model_name_or_path: hub name or directory of the checkpoint.
        config: the configuration to load it with, changed in place as by `set_attention`.
        attn_implementation: the attention to use, see `set_attention`.
        new_head: let weights outside the base model, and a pooler, start afresh where the checkpoint has none
            that fit.

    Returns:
        The model.

    Raises:
        ValueError: weights are missing or of another shape, or the model does not take that attention.
    """
    attn_implementation = set_attention(config, attn_implementation)
    model, report = auto_class.from_pretrained(
        model_name_or_path,
        config=config,
        dtype=torch.float32,
        attn_implementation=attn_implementation,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    check_attention(model, attn_implementation)
    absent = set(report["missing_keys"]) | {mismatch[0] for mismatch in report["mismatched_keys"]}
    if new_head:
        absent = {name for name in absent if name.startswith(f"{model.base_model_prefix}.") and ".pooler." not in name}
    if absent:
        example = min(absent)
        shapes = {name: f", {list(there)} there, {list(here)} here" for name, there, here in report["mismatched_keys"]}
        raise ValueError(
            f"{model_name_or_path} with this configuration is no checkpoint of {type(model).__name__}: "
            f"{len(absent)} of its {len(model.state_dict())} weights are missing or of another shape, "
            f"such as {example}{shapes.get(example, '')}"
        )
    return model


def fit_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Have a tokenizer that is saved beside a model give what the model takes.

    Args:
        tokenizer: changed in place: its longest text is that of the model, where that has one, and it marks no second
            text for a model that knows one type of texts.
        model: the model.
    """
    longest = longest_input(model)
    if longest is not None:
        tokenizer.model_max_length = longest
    names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    if getattr(model.config, "type_vocab_size", None) == 1 and names != tokenizer.model_input_names:
        # from_pretrained reads those that it is made with
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names


def set_attention(config: PreTrainedConfig, attn_implementation: str | None) -> str | None:
    """Have a configuration tell its model's attention, as transformers saves no attn_implementation.

    Args:
        config: the model's configuration, changed in place: with YOSO it holds all of its settings, with another
            attention none of them.
        attn_implementation: the attention to use, as transformers names it; None: YOSO where the configuration
            holds settings of it, else the model's own.

    Returns:
        The attention to use; None: the model's own.
    """
    if attn_implementation is None and has_settings(config):
        attn_implementation = "yoso"
    if attn_implementation in IMPLEMENTATIONS:
        config.update(read_settings(config, exact=attn_implementation == "yoso_expectation"))
    else:
        for name in [name for name in SETTINGS if hasattr(config, name)]:
            delattr(config, name)
    return attn_implementation


def check_attention(model: PreTrainedModel, attn_implementation: str | None) -> None:
    """Make sure that a model computes the attention it was asked for, as some accept a name and ignore it.

    Args:
        model: the model as built or loaded.
        attn_implementation: the attention asked for; None: any.

    Raises:
        ValueError: the model uses another one.
    """
    if attn_implementation is None:
        return
    if not model._can_set_attn_implementation() or model.config._attn_implementation != attn_implementation:
        raise ValueError(
            f"--attn_implementation {attn_implementation} has no effect on {type(model).__name__}, "
            "which computes its own attention"
        )


def longest_input(model: PreTrainedModel) -> int | None:
    """How many tokens a model takes at most.

    Args:
        model: any text model.

    Returns:
        The number of positions that the model can tell apart, or else that its configuration says; None: neither.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa's kind counts positions from padding_idx + 1, inside the table
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1
    return limit


def longer_by_conversion(length: int) -> str:
    """What to do for a checkpoint to take so many tokens, for messages."""
    return (
        f"scripts/convert_checkpoint.py --max_position_embeddings {length} makes a longer Yoso of a BERT, DistilBERT, "
        "RoBERTa, XLM-R, CamemBERT, Data2Vec, ELECTRA, ERNIE or Yoso checkpoint"
    )


def end_processes() -> None:
    """End the process group of a script that ran in several processes, and its threads.

    Its last line: nothing may refer to the group, so what was trained with it must be gone. A thread of gloo that has
    yet to release a tensor when Python ends aborts the process.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()
