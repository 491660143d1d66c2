"""Turn a BERT, DistilBERT, RoBERTa, XLM-R, CamemBERT, Data2Vec, ELECTRA or ERNIE checkpoint into a longer Yoso one.

    # what the model becomes, and how far its outputs moved on your own text
    python scripts/convert_checkpoint.py --model_name_or_path FacebookAI/roberta-base --max_position_embeddings 4096 \\
        --text_file 'documents/*.jsonl' --output_dir runs/roberta-4096

    # then further pretraining at the new length, which gets used to it and to the noise of samples
    python scripts/run_mlm.py --model_name_or_path runs/roberta-4096 --train_file 'documents/*.jsonl' \\
        --block_size 4096 --do_train --do_eval --max_steps 1000 --learning_rate 5e-5 \\
        --output_dir runs/roberta-4096-continued

    # a checkpoint of YOSO's authors (mlpen/YOSO), with their config.json beside it or one directory up
    python scripts/convert_checkpoint.py --model_name_or_path models/yoso-v1-32-small/model/cp-0249.model \\
        --tokenizer_name FacebookAI/roberta-base --output_dir runs/yoso-small

    # a longer Yoso: positions stretched instead of repeated
    python scripts/convert_checkpoint.py --model_name_or_path uw-madison/yoso-4096 --max_position_embeddings 8192 \\
        --position_method interpolate --output_dir runs/yoso-8192

The report that is printed is saved as conversion.json beside the checkpoint. Nothing is written before all is done.
"""

import itertools
from dataclasses import dataclass, field

from transformers import set_seed

from yoso_hf.conversion import POSITION_METHODS, convert_checkpoint
from yoso_hf.data import find_files, iterate_texts, read_files
from yoso_hf.training import parse_arguments


@dataclass
class ConversionArguments:
    """What to convert, and how."""

    model_name_or_path: str = field(metadata={"help": "checkpoint to convert: a hub name, a directory, or a file"})
    output_dir: str = field(metadata={"help": "directory of the new checkpoint"})
    tokenizer_name: str | None = field(default=None, metadata={"help": "default: model_name_or_path"})
    max_position_embeddings: int | None = field(
        default=None, metadata={"help": "longest sequence of the new model, in tokens; default: as before"}
    )
    position_method: str = field(
        default="tile",
        metadata={"help": "repeat the positions, or stretch them", "choices": list(POSITION_METHODS)},
    )
    hash_code_len: int | None = field(default=None, metadata={"help": "tau; default: 16, a YOSO model's own"})
    num_hash: int | None = field(default=None, metadata={"help": "m; default: 64, a YOSO model's own"})
    local_window: int | None = field(
        default=None,
        metadata={
            "help": "tokens on either side whose weight is never sampled, for similarity cosine; "
            "default: 0, a YOSO model's own"
        },
    )
    use_expectation: str | None = field(
        default=None,
        metadata={
            "help": "exact kernel, sampled, or the cheaper one; default: auto, a YOSO model's own",
            "choices": ["true", "false", "auto"],
        },
    )
    text_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "txt, json, jsonl, csv or parquet files, or globs, txt.gz and the like too, with texts to compare "
            "the outputs on"
        },
    )
    text_column: str = field(default="text", metadata={"help": "the column that holds the text"})
    document: str = field(
        default="paragraph",
        metadata={"help": "what a text is in txt files", "choices": ["line", "paragraph", "file"]},
    )
    max_texts: int = field(default=32, metadata={"help": "read the first so many texts"})
    overwrite: bool = field(default=False, metadata={"help": "replace a checkpoint in output_dir"})


def read_texts(args: ConversionArguments) -> list[str] | None:
    if not args.text_file:
        return None
    files, source = find_files(args.text_file, "--text_file"), f"--text_file {' '.join(args.text_file)}"
    rows = read_files(files, source, document=args.document, text_column=args.text_column, streaming=True)
    texts = (text for text in iterate_texts(rows, source) if text and text.strip())
    chosen = list(itertools.islice(texts, args.max_texts))
    if not chosen:
        raise ValueError(f"{source} holds no texts, only blank ones")
    return chosen


def main(argv: list[str] | None = None) -> None:
    (args,) = parse_arguments([ConversionArguments], argv, __doc__)
    if args.max_texts < 1:
        raise ValueError(f"--max_texts must be at least 1, got {args.max_texts}")
    # of the weights that are new
    set_seed(0)
    report = convert_checkpoint(
        args.model_name_or_path,
        args.output_dir,
        max_position_embeddings=args.max_position_embeddings,
        position_method=args.position_method,
        hash_code_len=args.hash_code_len,
        num_hash=args.num_hash,
        local_window=args.local_window,
        use_expectation={"true": True, "false": False}.get(args.use_expectation, args.use_expectation),
        tokenizer_name=args.tokenizer_name,
        texts=read_texts(args),
        overwrite=args.overwrite,
    )
    print(report)
    print(f"checkpoint and conversion.json: {args.output_dir} (import yoso_hf before you load it, or its tokenizer)")


if __name__ == "__main__":
    main()
