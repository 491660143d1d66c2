"""Model cards: what a YOSO checkpoint is, how to load it, what it was trained on and what it reached."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch.utils.data import Dataset, Sampler
from transformers import Trainer
from transformers.modelcard import TrainingSummary, make_markdown_table
from transformers.trainer_pt_utils import LengthGroupedSampler

from .modeling_yoso import AUTO_MAP, YosoPreTrainedModel
from .training import write_text

PIPELINE_TAGS = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}

# how many times as fast as softmax attention, by benchmarks/results/attention-cpu.json; a test compares
SPEED_COMMIT = "42fe032202"
SPEED_LENGTHS = (512, 4096, 16384)
SPEED = {
    ("sampled", "forward"): (3.7, 32.7, 140.3),
    ("sampled", "forward and backward"): (3.3, 19.1, 26.0),
    ("exact", "forward"): (2.1, 2.4, 2.3),
    ("exact", "forward and backward"): (2.2, 2.5, 2.4),
}

# logged beside the metrics of an evaluation, and none of a model
_NOT_METRICS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")

TEXT = """---
{metadata}
---

# {name}

{summary}

{settings}

## Use

With yoso-hf installed, on its compiled kernels:

```python
import yoso_hf
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{repo_id}")
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
```

Without it, on the code in this repository, plain PyTorch (torch 2.10 and transformers 5.17, or newer): the same
outputs, slower{without_kernels}.

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{repo_id}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{repo_id}", trust_remote_code=True)
```

With neither, transformers loads a Yoso class of its own without a word. It ignores `attention_mask`, so that padding
changes its outputs, and `similarity` and `normalization`, which it does not know; on a CPU it cannot run sampled
attention, and it refuses `use_expectation="auto"` and a `hash_code_len` by head.
{sections}
## Citation

Zhanpeng Zeng, Yunyang Xiong, Sathya N. Ravi, Shailesh Acharya, Glenn Fung, Vikas Singh: You Only Sample (Almost) Once:
Linear Cost Self-Attention Via Bernoulli Sampling. ICML 2021. [arXiv:2111.09714](https://arxiv.org/abs/2111.09714)
"""

# by similarity, what "auto" takes without kernels where it would take the other with them
AUTO_WITHOUT_KERNELS = {
    "cosine": ", but samples of some lengths where `auto` is exact on a GPU's kernels, and on a CPU's with AMX",
    "softmax": ", and exact softmax where `auto` would sample it",
}

SPEED_TEXT = """
## Speed

Attention of yoso-hf's compiled kernels, times as fast as softmax (PyTorch's `scaled_dot_product_attention`):
`[1, 12, N, 64]`, float32, m = 32, tau = 9, two cores of an AMD EPYC (Zen 5, AVX-512), yoso-hf at commit {commit}.

{speed}
"""


def auto_class_of(model: YosoPreTrainedModel) -> str:
    """The name of the Auto class that loads a model's checkpoint.

    Args:
        model: a YOSO model, or an instance of a subclass.

    Returns:
        Such as "AutoModelForMaskedLM".

    Raises:
        ValueError: it is no YOSO model.
    """
    names = {reference.rpartition(".")[2]: auto_class for auto_class, reference in AUTO_MAP.items()}
    for base in type(model).__mro__:
        if issubclass(base, YosoPreTrainedModel) and base.__name__ in names:
            return names[base.__name__]
    raise ValueError(f"model must be a YOSO model of yoso_hf, got {type(model).__name__}")


def model_card(model: YosoPreTrainedModel, repo_id: str, *, training: str | None = None, **metadata: Any) -> ModelCard:
    """Describes a checkpoint: its attention, how it is loaded, its training and, of cosine similarity, the speed.

    Args:
        model: the model.
        repo_id: the repository's name on the hub, "owner/name".
        training: Markdown for the section on training; None: no such section.
        **metadata: fields of huggingface_hub.ModelCardData, such as license, language, datasets, base_model and
            eval_results, a list of huggingface_hub.EvalResult. Tags are added to those of the card.

    Returns:
        The card, whose save and push_to_hub write it.

    Raises:
        ValueError: it is no YOSO model.
    """
    auto_class = auto_class_of(model)
    name = repo_id.rpartition("/")[2]
    tags = metadata.pop("tags", None) or []
    tags = ["yoso", *(tag for tag in ([tags] if isinstance(tags, str) else tags) if tag != "yoso")]
    data = ModelCardData(
        **{
            "library_name": "transformers",
            "pipeline_tag": PIPELINE_TAGS[auto_class],
            "model_name": name,
            "tags": tags,
            **metadata,
        }
    )
    sections = ""
    if data.eval_results:
        sections += (
            f"\n## Evaluation\n\n{_table(('data set', 'split', 'metric', 'value'), _rows(data.eval_results))}\n"
        )
    if training:
        sections += f"\n## Training\n\n{training}\n"
    picks_by_length = model.config.use_expectation == "auto"
    if model.config.similarity == "cosine":
        header = ("attention", "pass", *(f"N = {length}" for length in SPEED_LENGTHS))
        speed = _table(header, [(*case, *ratios) for case, ratios in SPEED.items()])
        sections += SPEED_TEXT.format(commit=SPEED_COMMIT, speed=speed)
    return ModelCard(
        TEXT.format(
            metadata=data.to_yaml(),
            name=name,
            summary=_summary(model),
            settings=_table(("", ""), list(_settings(model).items())),
            auto_class=auto_class,
            without_kernels=AUTO_WITHOUT_KERNELS[model.config.similarity] if picks_by_length else "",
            repo_id=repo_id,
            sections=sections,
        )
    )


def _summary(model: YosoPreTrainedModel) -> str:
    weights = {"cosine": "whose weights are collisions of random hash codes", "softmax": "in place of softmax's"}
    return (
        f"A {type(model).__name__}: a transformer encoder with YOSO attention, {weights[model.config.similarity]}, "
        f"for sequences of up to {model.config.max_position_embeddings} tokens."
    )


def _settings(model: YosoPreTrainedModel) -> dict[str, Any]:
    config = model.config
    modes = {
        True: "exact expectation, quadratic in the sequence length",
        False: "sampled, linear in the sequence length",
        "auto": "exact for short sequences, sampled and linear for long ones",
    }
    seed = "none: drawn afresh at every call" if config.hash_seed is None else config.hash_seed
    lengths = config.hash_code_len
    if not isinstance(lengths, int):
        every = [length for by_head in lengths for length in by_head]
        lengths = f"{min(every)} to {max(every)}, by layer and head"
    settings = {
        "attention (`use_expectation`)": f"{modes[config.use_expectation]} (`{config.use_expectation}`)",
        "bits of a hash code, tau (`hash_code_len`)": lengths,
        "hash functions, m (`num_hash`)": config.num_hash,
        "hash (`use_fast_hash`)": "Hadamard transforms" if config.use_fast_hash else "Gaussian projections",
        "seed of the hash functions in eval mode (`hash_seed`)": seed,
        "similarity of query and key (`similarity`)": config.similarity,
        "exact pairs of near tokens among samples (`local_window`)": config.local_window or "none",
        "normalisation of the output (`normalization`)": config.normalization or "none",
        "convolution (`conv_window`)": config.conv_window or "none",
        "layers, width, heads": f"{config.num_hidden_layers}, {config.hidden_size}, {config.num_attention_heads}",
        "parameters": f"{model.num_parameters():,}",
    }
    if config.use_expectation is True:
        # nothing is hashed
        of_samples = ["num_hash", "use_fast_hash", "hash_seed", "local_window"]
        if config.similarity == "softmax":
            of_samples.append("hash_code_len")
        for name in [name for name in settings if any(key in name for key in of_samples)]:
            del settings[name]
    return settings


def _rows(results: list[EvalResult]) -> list[tuple]:
    return [
        (
            f"{result.dataset_name} {result.dataset_config or ''}".strip(),
            result.dataset_split or "",
            result.metric_name or result.metric_type,
            _rounded(result.metric_value),
        )
        for result in results
    ]


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _table(header: tuple, rows: list[tuple]) -> str:
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(content: Any) -> str:
    # a line break would end the table, a bar the cell
    return str(content).replace("\n", " ").replace("|", "\\|")


class _OrderOfEpoch(Sampler):
    """Has a sampler by lengths draw the order of an epoch anew, whatever has been drawn before.

    Args:
        sampler: the sampler.
        trainer: whose epoch it is.
    """

    def __init__(self, sampler: LengthGroupedSampler, trainer: Trainer):
        self.sampler, self.trainer = sampler, trainer

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        args = self.trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        # a fraction within an epoch, which may be short of a whole number by rounding after it
        epoch = math.floor((self.trainer.state.epoch or 0) + 1e-6)
        self.sampler.generator = torch.Generator().manual_seed(seed + epoch)
        return iter(self.sampler)


class CardTrainer(Trainer):
    """Trainer whose card of a YOSO model is that of `model_card`, with the run's settings and results.

    Cards of other models are Trainer's own. A checkpoint's trainer state is written once all processes have written
    their part of it: until then `training.find_checkpoint` takes the one before. A run that is resumed takes the rows
    in the order of an uninterrupted one by every strategy (but "batch_rebalance" by several processes, which begins
    as in the first epoch), and evaluations leave its random numbers as they were.

    Args:
        datasets: names of the hub's data sets that the model is trained on; None: data of one's own. dataset_tags of
            push_to_hub and create_model_card go before them.
        evaluated_on: what the evaluation data are, where they are a data set of the hub: the fields task_type,
            dataset_type, dataset_name and, if need be, dataset_config and dataset_split of EvalResult.
        *args, **arguments: those of Trainer.
    """

    def __init__(
        self,
        *args: Any,
        datasets: list[str] | None = None,
        evaluated_on: dict[str, str] | None = None,
        **arguments: Any,
    ):
        super().__init__(*args, **arguments)
        self.datasets = datasets
        self.evaluated_on = evaluated_on

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"language": language, "license": license, "tags": tags, "model_name": model_name}
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, YosoPreTrainedModel):
            super().create_model_card(**kwargs)
            return
        if not self.is_world_process_zero():
            return
        # without one, the summary has what the data were read by
        named = kwargs.get("dataset_tags") or self.datasets or []
        datasets = [named] if isinstance(named, str) else named
        summary = TrainingSummary.from_trainer(self, **kwargs)
        metadata = {
            "license": summary.license,
            "language": summary.language,
            "base_model": summary.finetuned_from or None,
            # what it is only evaluated on is no data of its training
            "datasets": datasets if self.state.global_step else None,
            "tags": summary.tags,
        }
        metrics = self._final_metrics()
        if self.evaluated_on:
            metadata["metrics"] = list(metrics)
            metadata["eval_results"] = [
                EvalResult(**self.evaluated_on, metric_type=name, metric_value=value)
                for name, value in metrics.items()
            ]
        card = model_card(
            model,
            self.hub_model_id or summary.model_name,
            training=self._describe_training(summary, datasets, {} if self.evaluated_on else metrics),
            **{name: value for name, value in metadata.items() if value},
        )
        write_text(Path(self.args.output_dir) / "README.md", str(card))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # a data loader draws a seed; a run that is resumed where it was saved evaluates no more there
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        # Trainer's has the generator of everything else
        return _OrderOfEpoch(sampler, self) if isinstance(sampler, LengthGroupedSampler) else sampler

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # the trainer state, written next by the main process, says that the checkpoint is complete
        self.accelerator.wait_for_everyone()

    def _final_metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        metrics = {}
        for entry in self.state.log_history:
            for name, value in entry.items():
                if name.startswith("eval_") and not name.endswith(_NOT_METRICS):
                    metrics[name.removeprefix("eval_")] = value
        return metrics

    def _describe_training(self, summary: TrainingSummary, datasets: list[str], metrics: dict[str, float]) -> str:
        data = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in datasets)
        data = data or "data that are not on the hub"
        steps = f"{self.state.global_step} step{'' if self.state.global_step == 1 else 's'} of Trainer"
        versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
        parts = [f"{steps if self.state.global_step else 'Evaluated, not trained,'} on {data}, with {versions}."]
        if metrics:
            rows = [(name, _rounded(value)) for name, value in metrics.items()]
            parts.append(_table(("on the evaluation data", ""), rows))
        if summary.hyperparameters and self.state.global_step:
            parts.append(_table(("argument", "value"), list(summary.hyperparameters.items())))
        if summary.eval_lines:
            parts.append(make_markdown_table(summary.eval_lines))
        return "\n\n".join(part.strip() for part in parts)

    def _push_from_checkpoint(self, checkpoint_folder: str | os.PathLike):
        # Trainer takes weights and configuration from the checkpoint, but not the code that the configuration names
        if self.is_world_process_zero():
            for path in Path(checkpoint_folder).glob("*.py"):
                shutil.copyfile(path, Path(self.args.output_dir) / path.name)
        super()._push_from_checkpoint(checkpoint_folder)
