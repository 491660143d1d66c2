"""Fine-tune, evaluate and predict on a GLUE task, or on sentences and pairs of your own, with Trainer.

    # one of cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli, from the hub
    python scripts/run_glue.py configs/glue.yaml --task_name mrpc \\
        --model_name_or_path uw-madison/yoso-4096 --output_dir runs/mrpc

    # the same task from local files, with predictions for a test set in runs/mrpc-files/MRPC.tsv
    python scripts/run_glue.py configs/glue.yaml --task_name mrpc --do_predict \\
        --train_file train.jsonl --validation_file validation.jsonl --test_file test.jsonl \\
        --model_name_or_path uw-madison/yoso-4096 --output_dir runs/mrpc-files

    # other data: a column `label` (floats: a regression) and one or two columns of text; where there are others as
    # well (names, paths, dates), --sentence1_column text
    python scripts/run_glue.py configs/glue.yaml --train_file train.csv --validation_file dev.csv \\
        --model_name_or_path uw-madison/yoso-4096 --output_dir runs/mine

    # what the model of such a run says of other texts, in runs/predictions/predictions.tsv
    python scripts/run_glue.py --do_predict --test_file test.csv --model_name_or_path runs/mine \\
        --output_dir runs/predictions

    # five seeds
    for seed in 1 2 3 4 5; do
        python scripts/run_glue.py configs/glue.yaml --task_name rte --seed $seed \\
            --model_name_or_path uw-madison/yoso-4096 --output_dir runs/rte-$seed
    done

    # more hashes; softmax attention for comparison
    python scripts/run_glue.py configs/glue.yaml --task_name sst2 --output_dir runs/sst2-128 \\
        --model_name_or_path uw-madison/yoso-4096 --config_overrides use_expectation=false,num_hash=128
    python scripts/run_glue.py configs/glue.yaml --task_name sst2 --output_dir runs/sst2-roberta \\
        --model_name_or_path FacebookAI/roberta-base --attn_implementation sdpa

    # several devices
    torchrun --nproc_per_node 2 scripts/run_glue.py configs/glue.yaml --task_name qnli ...
    accelerate launch scripts/run_glue.py configs/glue.yaml --task_name qnli ...

Arguments on the command line override those of the YAML file; transformers' TrainingArguments are allowed. The same
command with the same output_dir resumes from the last checkpoint. all_results.json there holds the scores; of a
resumed run, train_loss is that since it was resumed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

import yoso_hf  # noqa: F401, registers the models
from yoso_hf.glue import (
    TASKS,
    Table,
    check_file,
    encode,
    infer_task,
    is_text,
    read_file,
    read_hub,
    set_labels,
    write_predictions,
)
from yoso_hf.glue_metric import GlueMetric
from yoso_hf.model_card import CardTrainer
from yoso_hf.training import (
    check_best_metric,
    claimed,
    describe_run,
    end_processes,
    find_checkpoint,
    finished_state,
    finished_weights,
    fit_tokenizer,
    load_pretrained,
    load_tokenizer,
    longer_by_conversion,
    longest_input,
    override_config,
    parse_arguments,
    train_and_evaluate,
    write_run,
)


@dataclass
class GlueArguments:
    """What to fine-tune, and on which data."""

    model_name_or_path: str = field(metadata={"help": "checkpoint: a hub name or a directory"})
    tokenizer_name: str | None = field(default=None, metadata={"help": "default: model_name_or_path"})
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "values to change in the model's configuration, num_hash=64,use_expectation=false or a JSON object"
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "attention of models that let it be chosen: yoso, yoso_expectation, sdpa, ..."}
    )
    task_name: str | None = field(default=None, metadata={"help": "the GLUE task", "choices": list(TASKS)})
    train_file: str | None = field(default=None, metadata={"help": "csv, json, jsonl or parquet instead of the hub"})
    validation_file: str | None = field(default=None, metadata={"help": "the same; of mnli the matched part"})
    validation_mismatched_file: str | None = field(default=None, metadata={"help": "of mnli"})
    test_file: str | None = field(default=None, metadata={"help": "the same; of mnli the matched part"})
    test_mismatched_file: str | None = field(default=None, metadata={"help": "of mnli"})
    sentence1_column: str | None = field(
        default=None,
        metadata={"help": "without task_name; default: the columns of text beside the label, one or two"},
    )
    sentence2_column: str | None = field(default=None, metadata={"help": "the second text of pairs"})
    label_column: str = field(default="label", metadata={"help": "without task_name: the column of the labels"})
    max_seq_length: int | None = field(
        default=None,
        metadata={"help": "tokens after which texts are cut; default: what the model takes, else the tokenizer"},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "use only the first so many rows"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only the first so many rows"})
    max_predict_samples: int | None = field(default=None, metadata={"help": "use only the first so many rows"})

    def files(self) -> dict[str, str]:
        """The arguments that name a file, with their values."""
        return {name: value for name, value in vars(self).items() if name.endswith("_file") and value}

    def text_columns(self) -> list[str]:
        """The columns of text that are named."""
        return [column for column in (self.sentence1_column, self.sentence2_column) if column]

    def of_training(self) -> dict[str, Any]:
        """The arguments that decide what is learned: all but those of evaluation and prediction."""
        others = ("validation_", "test_", "max_eval_", "max_predict_")
        return {name: value for name, value in vars(self).items() if not name.startswith(others)}


# which argument holds the file of which split
FILE_ARGUMENTS = {
    "train": "train_file",
    "validation": "validation_file",
    "validation_matched": "validation_file",
    "validation_mismatched": "validation_mismatched_file",
    "test": "test_file",
    "test_matched": "test_file",
    "test_mismatched": "test_mismatched_file",
}
# which argument asks for it
ASKED_BY = {"train": "do_train", "validation": "do_eval", "test": "do_predict"}
SAMPLE_LIMITS = {
    "train": "max_train_samples",
    "validation": "max_eval_samples",
    "test": "max_predict_samples",
}


def needed_splits(task_name: str | None, training_args: TrainingArguments) -> list[str]:
    """The splits that the command reads, under the hub's names."""
    parts = TASKS[task_name].parts if task_name else ()
    splits = ["train"] if training_args.do_train else []
    for wanted, split in ((training_args.do_eval, "validation"), (training_args.do_predict, "test")):
        if wanted:
            splits += [f"{split}_{part}" for part in parts] or [split]
    return splits


def check_arguments(args: GlueArguments, training_args: TrainingArguments) -> None:
    """Refuse what needs no data to be seen wrong."""
    splits = needed_splits(args.task_name, training_args)
    if not splits:
        raise ValueError("nothing to do: give --do_train, --do_eval or --do_predict")
    if args.files():
        for split in splits:
            if getattr(args, FILE_ARGUMENTS[split]) is None:
                asked_by = ASKED_BY[split.partition("_")[0]]
                raise ValueError(
                    f"--{FILE_ARGUMENTS[split]} is missing: --{asked_by} asks for the {split} data "
                    f"(--{asked_by} false leaves them out), and with "
                    f"{', '.join('--' + name for name in args.files())} all data come from local files"
                )
        for name, path in args.files().items():
            check_file(name, path)
    elif args.task_name is None:
        raise ValueError(f"give --task_name, one of {', '.join(TASKS)}, or --train_file")
    if args.task_name != "mnli" and (args.validation_mismatched_file or args.test_mismatched_file):
        raise ValueError("--validation_mismatched_file and --test_mismatched_file are for --task_name mnli alone")
    if args.task_name and (args.sentence1_column or args.sentence2_column or args.label_column != "label"):
        raise ValueError(f"--task_name {args.task_name} fixes the columns; leave out --*_column or --task_name")
    if args.sentence2_column and not args.sentence1_column:
        raise ValueError("--sentence2_column needs --sentence1_column")
    for name in SAMPLE_LIMITS.values():
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")


def read_tables(args: GlueArguments, splits: list[str]) -> dict[str, Table]:
    """The whole splits, from files or from the hub."""
    if not args.files():
        return read_hub(args.task_name, splits)
    texts = TASKS[args.task_name].columns if args.task_name else args.text_columns()
    tables = {}
    for split in splits:
        name = FILE_ARGUMENTS[split]
        tables[split] = read_file(name, getattr(args, name), [*texts, *texts_of(tables)])
    return tables


def texts_of(tables: dict[str, Table]) -> list[str]:
    """The columns of text of the first table; in the others they are text too, also where all could be numbers."""
    features = next((table.rows.features for table in tables.values()), {})
    return [name for name, feature in features.items() if is_text(feature)]


def hub_data(args: GlueArguments) -> dict[str, Any]:
    """What a model card says of the hub's data."""
    rows = "" if args.max_eval_samples is None else f"[:{args.max_eval_samples}]"
    splits = [f"validation_{part}{rows}" for part in TASKS[args.task_name].parts] or [f"validation{rows}"]
    evaluated_on = {
        "task_type": "text-classification",
        "dataset_type": "nyu-mll/glue",
        "dataset_name": "GLUE",
        "dataset_config": args.task_name,
        "dataset_split": " and ".join(splits),
    }
    return {"datasets": ["nyu-mll/glue"], "evaluated_on": evaluated_on}


def first_rows(table: Table, args: GlueArguments, split: str) -> Table:
    """As much of a split as the arguments ask for."""
    limit = getattr(args, SAMPLE_LIMITS[split.partition("_")[0]])
    if limit is None:
        return table
    return Table(table.source, table.rows.select(range(min(limit, len(table.rows)))))


def choose_length(requested: int | None, longest: int | None, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens after which texts are cut; a tokenizer's own limit, often that of another model, is a last resort."""
    if requested is None:
        length = longest or tokenizer.model_max_length
        # of a tokenizer without a limit
        if length > 10**9:
            raise ValueError("give --max_seq_length: neither the model nor the tokenizer has a longest input")
        return length
    shortest = tokenizer.num_special_tokens_to_add(pair=True) + 1
    if requested < shortest or (longest is not None and requested > longest):
        remedy = "" if requested < shortest else f": {longer_by_conversion(requested)}"
        raise ValueError(
            f"--max_seq_length must be at least {shortest} and, by the model's max_position_embeddings, "
            f"at most {longest or 'anything'}; got {requested}{remedy}"
        )
    return requested


def main(argv: list[str] | None = None) -> None:
    args, training_args = parse_arguments([GlueArguments, TrainingArguments], argv, __doc__)
    check_arguments(args, training_args)
    with claimed(training_args):
        run(args, training_args)


def run(args: GlueArguments, training_args: TrainingArguments) -> None:
    """Train, evaluate and predict, as far as the arguments ask for it, in an output_dir that is this command's."""
    splits = needed_splits(args.task_name, training_args)
    inputs = [args.train_file, args.model_name_or_path, args.tokenizer_name]
    description = describe_run(training_args, inputs, script="run_glue", **args.of_training())
    checkpoint = find_checkpoint(training_args.output_dir, description)
    finished = finished_state(checkpoint)
    if checkpoint and not finished and not training_args.do_train:
        raise ValueError(
            f"--output_dir {training_args.output_dir} holds a run that has steps left, at {checkpoint}: finish it "
            "with --do_train, or give that checkpoint as --model_name_or_path, and another directory"
        )
    weights = finished_weights(checkpoint, finished, training_args) if finished else args.model_name_or_path
    set_seed(training_args.seed)

    config = AutoConfig.from_pretrained(weights)
    with training_args.main_process_first(desc="reading the data"):
        tables = read_tables(args, splits)
    if args.task_name:
        task = TASKS[args.task_name]
    else:
        labels_from = None if training_args.do_train else config
        task = infer_task(tables[splits[0]], args.text_columns(), args.label_column, labels_from)
    set_labels(config, task, trains=training_args.do_train)
    of_task = config
    config = override_config(config, args.config_overrides)
    for name in ("num_labels", "problem_type"):
        if getattr(config, name) != getattr(of_task, name):
            raise ValueError(
                f"--config_overrides: {name} is the task's, {getattr(of_task, name)}, got {getattr(config, name)}"
            )
    if task.labels is None and training_args.label_smoothing_factor > 0:
        raise ValueError("--label_smoothing_factor is for classes, and the task is a regression: leave it out")
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path, config)
    model = load_pretrained(
        AutoModelForSequenceClassification,
        weights,
        config,
        attn_implementation=args.attn_implementation,
        new_head=training_args.do_train and not finished,
    )
    # the card's base model, also where the weights are those of a finished run
    model.config._name_or_path = args.model_name_or_path
    max_seq_length = choose_length(args.max_seq_length, longest_input(model), tokenizer)
    fit_tokenizer(tokenizer, model)
    with training_args.main_process_first(desc="encoding the data"):
        encoded = {
            split: encode(
                first_rows(table, args, split),
                task,
                config.label2id,
                tokenizer,
                max_seq_length,
                may_be_unlabelled=split.startswith("test"),
            )
            for split, table in tables.items()
        }

    metric = GlueMetric(task.metric, keep_in_memory=True)
    names = ["loss", *metric.compute(predictions=[0, 1], references=[0, 1])]
    check_best_metric(training_args, [f"{part}_{name}" for part in task.parts for name in names] or names)

    def predictions_of(logits, _labels):
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.squeeze(-1) if task.labels is None else logits.argmax(-1)

    def compute_metrics(outcome: EvalPrediction) -> dict[str, float]:
        predictions, references = outcome.predictions, outcome.label_ids
        if task.labels is not None:
            # F1 is that of the task's class 1, which may be another one of the checkpoint's
            task_ids = np.array([task.labels.index(config.id2label[index]) for index in range(config.num_labels)])
            predictions, references = task_ids[predictions], task_ids[references]
        return metric.compute(predictions=predictions, references=references)

    if training_args.do_eval and task.parts:
        validation = {part: encoded[f"validation_{part}"] for part in task.parts}
    else:
        validation = encoded.get("validation")
    if training_args.should_save:
        write_run(training_args.output_dir, description)
    trainer = CardTrainer(
        model=model,
        args=training_args,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=encoded.get("train"),
        eval_dataset=validation,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=predictions_of,
        **({} if args.files() else hub_data(args)),
    )
    # Trainer then averages over the batches of a step itself: many models take num_items_in_batch and ignore it
    trainer.model_accepts_loss_kwargs = False

    train_and_evaluate(trainer, checkpoint, finished)
    if training_args.do_predict:
        test_splits = [split for split in splits if split.startswith("test")]
        for split, name in zip(test_splits, task.submission, strict=True):
            prefix = split.replace("test", "predict")
            outcome = trainer.predict(encoded[split], metric_key_prefix=prefix)
            trainer.log_metrics(prefix, outcome.metrics)
            trainer.save_metrics(prefix, outcome.metrics)
            if trainer.is_world_process_zero():
                path = Path(training_args.output_dir) / f"{name}.tsv"
                write_predictions(path, outcome.predictions, task, config.id2label)
                print(f"predictions: {path}")
    if training_args.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        written = "model, tokenizer and all_results.json" if training_args.do_train else "all_results.json"
        print(f"{written}: {training_args.output_dir}")


if __name__ == "__main__":
    main()
    end_processes()
