"""Pretrain, or go on pretraining, a masked language model on blocks of text of any length, with Trainer.

    # a small YOSO from scratch, with a tokenizer trained on the corpus; everything else is in the recipe
    python scripts/run_mlm.py configs/tiny.yaml --train_file corpus.txt --output_dir runs/tiny

    # the hub checkpoint's shape, on a data set of the hub, on 8 GPUs
    torchrun --nproc_per_node 8 scripts/run_mlm.py configs/yoso-4096.yaml --bf16 \\
        --dataset_name wikimedia/wikipedia --dataset_config_name 20231101.en --output_dir runs/yoso-4096
    accelerate launch scripts/run_mlm.py configs/yoso-4096.yaml --bf16 \\
        --dataset_name wikimedia/wikipedia --dataset_config_name 20231101.en --output_dir runs/yoso-4096

    # continued pretraining on your own documents, with sampled attention instead of the exact kernel
    python scripts/run_mlm.py --model_name_or_path uw-madison/yoso-4096 \\
        --config_overrides use_expectation=false,num_hash=32 --train_file 'documents/*.jsonl' --do_train --do_eval \\
        --gradient_checkpointing --max_steps 1000 --learning_rate 3e-5 \\
        --output_dir runs/yoso-4096-continued

    # a corpus too large to keep: read and packed while training
    python scripts/run_mlm.py configs/base-512.yaml --streaming --dataset_name HuggingFaceFW/fineweb \\
        --dataset_config_name sample-10BT --validation_percentage 5 --output_dir runs/base-512

    # softmax attention of the same shape, for comparison
    python scripts/run_mlm.py configs/small-512.yaml --model_type roberta --attn_implementation sdpa \\
        --config_overrides 'num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048,
                            max_position_embeddings=514' --train_file corpus.txt --output_dir runs/roberta-512

    # loss and perplexity of a checkpoint, nothing trained
    python scripts/run_mlm.py --model_name_or_path runs/tiny --do_eval --validation_file valid.txt \\
        --output_dir runs/tiny-valid

Arguments on the command line override those of the YAML file; transformers' TrainingArguments are allowed,
--push_to_hub among them. The same command with the same output_dir resumes from the last complete checkpoint, so that
a finished run is not trained again, unless --save_strategy no or best left none of its end. For that,
--metric_for_best_model keeps the last checkpoint beside the best one, also with --save_total_limit 1. all_results.json
there holds losses, perplexity and speed; of a resumed run, train_loss and speed are those since it was resumed.

Each document of the corpus gets the tokenizer's special tokens, and the stream of them is cut into full blocks: no
padding, and nothing lost but the last incomplete block. With several processes the first one does this while the
others wait; where that takes longer than --ddp_timeout, run the command with one process and another output_dir
first, until it trains: the blocks stay in the cache. A streamed run that resumes reads what it has used again.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset, load_dataset
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

import yoso_hf  # noqa: F401, registers the models
from yoso_hf.data import (
    find_files,
    iterate_texts,
    pack_dataset,
    read_files,
    select_text,
    split_documents,
    train_tokenizer,
)
from yoso_hf.mlm import MaskedLMTrainer, Masking
from yoso_hf.training import (
    check_attention,
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
    set_attention,
    train_and_evaluate,
    write_run,
)


@dataclass
class MLMArguments:
    """What to pretrain, and on which text."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "checkpoint to go on from: a hub name or a directory"}
    )
    config_file: str | None = field(
        default=None,
        metadata={"help": "config.json of a model to start from scratch: a file, directory or hub name"},
    )
    model_type: str | None = field(
        default=None,
        metadata={"help": "the same by its type, with that type's default sizes: yoso, roberta, ..."},
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "values to change in the model's configuration, num_hash=64,use_expectation=false or a JSON object"
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "attention of models that let it be chosen: yoso, yoso_expectation, sdpa, ..."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "default: model_name_or_path"})
    train_tokenizer: bool = field(
        default=False, metadata={"help": "train a byte-level BPE tokenizer on the training documents"}
    )
    vocab_size: int = field(default=8192, metadata={"help": "entries of the trained tokenizer, at most"})
    dataset_name: str | None = field(default=None, metadata={"help": "data set of the hub"})
    dataset_config_name: str | None = field(default=None, metadata={"help": "its configuration"})
    train_split: str = field(default="train", metadata={"help": "its split to train on"})
    validation_split: str | None = field(
        default=None,
        metadata={"help": "its split to evaluate on; default: a share of the training documents"},
    )
    train_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "txt, json, jsonl, csv or parquet files, or globs, txt.gz and the like too, instead of the hub"
        },
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "the same, to evaluate on"})
    text_column: str = field(default="text", metadata={"help": "the column that holds the text"})
    document: str = field(
        default="paragraph",
        metadata={
            "help": "what a document is in txt files; a paragraph ends at a line without text",
            "choices": ["line", "paragraph", "file"],
        },
    )
    validation_percentage: float = field(
        default=5.0,
        metadata={"help": "documents set aside where no validation data are given, evenly spread, in percent"},
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "read and pack the corpus while training, in one worker at most; needs max_steps"},
    )
    shuffle_buffer: int = field(default=1000, metadata={"help": "blocks among which a streamed corpus is shuffled"})
    block_size: int = field(default=4096, metadata={"help": "tokens in a block"})
    max_eval_blocks: int | None = field(default=None, metadata={"help": "evaluate on the first so many blocks"})
    mlm_probability: float = field(default=0.15, metadata={"help": "share of the tokens to predict"})
    sparse_prediction: bool = field(
        default=True, metadata={"help": "compute logits for the masked positions only; the loss is the same"}
    )


def check_arguments(args: MLMArguments, training_args: TrainingArguments) -> None:
    """Refuse what needs no file to be seen wrong."""

    def exactly_one(*names: str) -> None:
        given = [name for name in names if getattr(args, name)]
        if len(given) != 1:
            choices = ", ".join("--" + name for name in names)
            raise ValueError(f"give exactly one of {choices}; got {' and '.join(given) or 'none'}")

    if not (training_args.do_train or training_args.do_eval):
        raise ValueError("nothing to do: give --do_train or --do_eval")
    if training_args.do_predict:
        raise ValueError("--do_predict is not for masked language models: give --do_eval")
    check_best_metric(training_args, ["loss", "perplexity"], lower_is_better=["perplexity"])
    exactly_one("model_name_or_path", "config_file", "model_type")
    if training_args.do_train or is_split(args, training_args):
        exactly_one("dataset_name", "train_file")
    if args.validation_split and (args.validation_file or not args.dataset_name):
        raise ValueError("--validation_split is a split of --dataset_name, and excludes --validation_file")
    if args.train_tokenizer:
        if args.model_name_or_path or args.tokenizer_name:
            raise ValueError("--train_tokenizer excludes --model_name_or_path and --tokenizer_name")
        if args.streaming or not training_args.do_train:
            raise ValueError(
                "--train_tokenizer reads all training documents: it needs --do_train, without --streaming"
            )
    elif not (args.tokenizer_name or args.model_name_or_path):
        raise ValueError("give --tokenizer_name or --train_tokenizer")
    if args.block_size < 8:
        raise ValueError(f"--block_size must be at least 8, got {args.block_size}")
    if not 0 < args.mlm_probability < 1:
        raise ValueError(f"--mlm_probability must be above 0 and below 1, got {args.mlm_probability}")
    if args.max_eval_blocks is not None and args.max_eval_blocks < 1:
        raise ValueError(f"--max_eval_blocks must be at least 1, got {args.max_eval_blocks}")
    if args.shuffle_buffer < 0:
        raise ValueError(f"--shuffle_buffer must be at least 0, which leaves the order, got {args.shuffle_buffer}")
    if args.streaming and training_args.do_train and training_args.max_steps <= 0:
        raise ValueError("--streaming needs --max_steps: the length of the corpus is not known")
    if args.streaming and training_args.do_eval and args.max_eval_blocks is None:
        raise ValueError("--streaming needs --max_eval_blocks to evaluate")


def is_split(args: MLMArguments, training_args: TrainingArguments) -> bool:
    """Whether the validation documents are set aside from those for training."""
    return training_args.do_eval and not (args.validation_file or args.validation_split)


def describe(args: MLMArguments, training_args: TrainingArguments, files: dict[str, list[str]]) -> dict[str, Any]:
    """What decides the weights: all arguments but those that only choose what to evaluate on."""
    choices = dataclasses.asdict(args)
    for name in ("validation_file", "validation_split", "max_eval_blocks"):
        del choices[name]
    if not is_split(args, training_args):
        del choices["validation_percentage"]
    inputs = [args.model_name_or_path, args.config_file, args.tokenizer_name]
    if args.streaming:
        # too large to be read before
        choices["train_file_bytes"] = {path: os.path.getsize(path) for path in files["train_file"]}
    else:
        inputs += files["train_file"]
    return describe_run(
        training_args,
        inputs,
        script="run_mlm",
        do_train=training_args.do_train,
        **choices,
    )


def make_config(args: MLMArguments, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    """The model's configuration; for a tokenizer yet to be trained, with room for its whole vocabulary."""
    name = args.model_name_or_path or args.config_file
    config = AutoConfig.from_pretrained(name) if name else AutoConfig.for_model(args.model_type)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(
            f"{name or args.model_type} is of model type {config.model_type}, "
            "for which transformers has no masked language model"
        )
    if not args.model_name_or_path:
        fitting = {}
        if args.train_tokenizer or args.model_type:
            fitting["vocab_size"] = args.vocab_size if tokenizer is None else len(tokenizer)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(tokenizer, token, None) is not None:
                fitting[token] = getattr(tokenizer, token)
        config = type(config).from_dict(config.to_dict() | fitting)
    return override_config(config, args.config_overrides)


def load_fast_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(name_or_path)
    if not tokenizer.is_fast or tokenizer.mask_token is None:
        raise ValueError(f"the tokenizer {name_or_path} must be a fast one with a mask token")
    return tokenizer


def new_model(args: MLMArguments, config: PreTrainedConfig) -> PreTrainedModel:
    attn_implementation = set_attention(config, args.attn_implementation)
    model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    check_attention(model, attn_implementation)
    return model


def check_model(args: MLMArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse a model that does not fit the blocks or the tokenizer."""
    longest = longest_input(model)
    if longest is not None and args.block_size > longest:
        positions = model.config.max_position_embeddings
        # RoBERTa's kind has more positions than it takes tokens
        needed = positions + args.block_size - longest
        remedy = f"give --config_overrides max_position_embeddings={needed}"
        if args.model_name_or_path:
            remedy = longer_by_conversion(args.block_size)
        raise ValueError(
            f"--block_size {args.block_size} is longer than what the model takes, {longest} tokens: "
            f"its max_position_embeddings is {positions}; {remedy}"
        )
    known = model.get_input_embeddings().num_embeddings
    tokens = args.vocab_size if tokenizer is None else len(tokenizer)
    if tokens > known:
        source = "--vocab_size asks for" if tokenizer is None else "the tokenizer has"
        raise ValueError(f"{source} {tokens} tokens, the model knows {known} (vocab_size)")


def read_documents(
    args: MLMArguments, training_args: TrainingArguments, files: dict[str, list[str]]
) -> dict[str, tuple[str, Dataset | IterableDataset]]:
    """The documents to train on and to validate with, as far as the run needs them, each with its source."""

    def read(argument: str, split: str | None) -> tuple[str, Dataset | IterableDataset]:
        if files[argument]:
            source = f"--{argument} {' '.join(getattr(args, argument))}"
            return source, read_files(
                files[argument],
                source,
                document=args.document,
                text_column=args.text_column,
                streaming=args.streaming,
            )
        source = f"--dataset_name {args.dataset_name}, split {split}"
        documents = load_dataset(args.dataset_name, args.dataset_config_name, split=split, streaming=args.streaming)
        return source, select_text(documents, args.text_column, source)

    documents = {}
    if is_split(args, training_args):
        source, corpus = read("train_file", args.train_split)
        training, validation = split_documents(corpus, args.validation_percentage)
        if training_args.do_train and next(iter(training), None) is None:
            raise ValueError(
                f"{source} holds 1 document, which is set aside for validation: give --validation_file, "
                "or for a txt file of many --document line"
            )
        share = f"the {args.validation_percentage:g} % of {source} for validation (--validation_percentage)"
        documents = {"train": (source, training), "validation": (share, validation)}
    else:
        if training_args.do_train:
            documents["train"] = read("train_file", args.train_split)
        if training_args.do_eval:
            documents["validation"] = read("validation_file", args.validation_split)
    if not training_args.do_train:
        documents.pop("train", None)
    return documents


def make_blocks(
    args: MLMArguments,
    documents: dict[str, tuple[str, Dataset | IterableDataset]],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> dict[str, Dataset | IterableDataset]:
    """The packed documents: to train on, as tensors and shuffled if streamed; to validate with, as rows."""
    blocks = {
        split: pack_dataset(part, tokenizer, args.block_size, source) for split, (source, part) in documents.items()
    }
    if "train" in blocks:
        if args.streaming:
            blocks["train"] = blocks["train"].repeat(None)
            # datasets 4.8 cannot shuffle among none
            if args.shuffle_buffer > 0:
                blocks["train"] = blocks["train"].shuffle(seed, buffer_size=args.shuffle_buffer)
        blocks["train"] = blocks["train"].with_format("torch")
    if "validation" in blocks and args.max_eval_blocks is not None:
        validation = blocks["validation"]
        if args.streaming:
            # evaluated many times, read once
            rows = list(validation.take(args.max_eval_blocks))
            blocks["validation"] = Dataset.from_list(rows, features=validation.features)
        else:
            blocks["validation"] = validation.select(range(min(args.max_eval_blocks, len(validation))))
    return blocks


def hub_data(args: MLMArguments) -> dict[str, Any]:
    """What a model card says of the hub's data."""
    data = {"datasets": [args.dataset_name]}
    if not args.validation_file:
        split = args.validation_split or f"{args.validation_percentage:g} % of {args.train_split}"
        blocks = "" if args.max_eval_blocks is None else f", the first {args.max_eval_blocks} blocks"
        data["evaluated_on"] = {
            "task_type": "fill-mask",
            "dataset_type": args.dataset_name,
            "dataset_name": args.dataset_name,
            "dataset_config": args.dataset_config_name,
            "dataset_split": split + blocks,
        }
    return data


def main(argv: list[str] | None = None) -> None:
    args, training_args = parse_arguments([MLMArguments, TrainingArguments], argv, __doc__)
    check_arguments(args, training_args)
    with claimed(training_args):
        run(args, training_args)


def run(args: MLMArguments, training_args: TrainingArguments) -> None:
    """Train and evaluate, as far as the arguments ask for it, in an output_dir that is this command's."""
    if args.streaming:
        # several would each pack a share of the files, and only one's blocks be used
        training_args.dataloader_num_workers = min(training_args.dataloader_num_workers, 1)
    training_args.include_num_input_tokens_seen = "all"
    files = {name: find_files(getattr(args, name) or [], f"--{name}") for name in ("train_file", "validation_file")}
    description = describe(args, training_args, files)
    checkpoint = find_checkpoint(training_args.output_dir, description)
    finished = finished_state(checkpoint)
    set_seed(training_args.seed)

    tokenizer = None
    if not args.train_tokenizer:
        tokenizer = load_fast_tokenizer(args.tokenizer_name or args.model_name_or_path)
    elif checkpoint:
        tokenizer = load_fast_tokenizer(checkpoint)
    config = make_config(args, tokenizer)
    weights = finished_weights(checkpoint, finished, training_args) if finished else args.model_name_or_path
    if weights:
        model = load_pretrained(
            AutoModelForMaskedLM,
            weights,
            config,
            attn_implementation=args.attn_implementation,
            new_head=training_args.do_train and not finished,
        )
        if args.model_name_or_path:
            # the card's base model, also where the weights are those of a finished run
            model.config._name_or_path = args.model_name_or_path
    else:
        # no weights yet: what does not fit is to be refused before the documents are read
        with torch.device("meta"):
            model = new_model(args, config)
    check_model(args, model, tokenizer)

    with training_args.main_process_first(desc="reading the documents"):
        documents = read_documents(args, training_args, files)
    if tokenizer is None:
        if training_args.process_index == 0:
            source, training = documents["train"]
            tokenizer = train_tokenizer(iterate_texts(training, source), args.vocab_size)
        (tokenizer,) = broadcast_object_list([tokenizer])
    tokenizer.model_max_length = args.block_size
    fit_tokenizer(tokenizer, model)
    with training_args.main_process_first(desc="packing the documents"):
        blocks = make_blocks(args, documents, tokenizer, training_args.seed)
    if not weights:
        model = new_model(args, make_config(args, tokenizer))

    masking = Masking(tokenizer, args.mlm_probability)
    validation = blocks.get("validation")
    trainer = MaskedLMTrainer(
        model=model,
        args=training_args,
        masking=masking,
        sparse_prediction=args.sparse_prediction,
        train_dataset=blocks.get("train"),
        eval_dataset=None if validation is None else validation.with_transform(masking.mask_rows),
        processing_class=tokenizer,
        **(hub_data(args) if args.dataset_name else {}),
    )
    if training_args.should_save:
        write_run(training_args.output_dir, description)
    train_and_evaluate(trainer, checkpoint, finished)
    if training_args.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        print(f"model, tokenizer and all_results.json: {training_args.output_dir}")


if __name__ == "__main__":
    main()
    end_processes()
