"""Write ListOps, the Long Range Arena's task of nested lists, and models to train on it with run_glue.py.

    python benchmarks/listops.py --output_dir runs/listops

The lists follow the grammar of the arena's generator: operators with two to ten arguments, each a digit or, one time
in four, another list, up to ten levels deep; those of 501 to 1999 tokens are kept, none of them twice. Classes are the
ten values that a list can have. The models are the arena's (two layers, hidden size 64, two heads of 32), with
the same random weights: one samples with the settings of YOSO's authors for this task, the other has softmax.
"""

import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import HfArgumentParser, PreTrainedTokenizerFast, set_seed

from yoso_hf import YosoConfig, YosoForSequenceClassification
from yoso_hf.training import whole_file

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
DIGITS = [str(digit) for digit in range(10)]
SHORTEST, LONGEST = 501, 1999
DEEPEST = 10
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
PARTS = ("train", "validation", "test")
# those of the authors for this task, and softmax attention by the same classes
ATTENTION = {
    "yoso": {"use_expectation": False, "num_hash": 32, "hash_code_len": 11},
    "softmax": {"similarity": "softmax", "normalization": "sum", "use_expectation": True},
}


@dataclass
class ListOpsArguments:
    """What to write, and where."""

    output_dir: Path = field(metadata={"help": "gets three .jsonl files and a directory for each model"})
    train: int = field(default=96_000, metadata={"help": "lists to train on; the arena's 96,000 take minutes"})
    held_out: int = field(default=2_000, metadata={"help": "lists to validate and to test on, so many each"})
    seed: int = field(default=0, metadata={"help": "of the lists and of the models' weights"})


def grow(tokens: list[str], depth: int, generator: random.Random) -> int:
    """Appends a digit or a list to `tokens` and returns its value; a list that gets too long is left unfinished."""
    if len(tokens) > LONGEST:
        return 0
    if depth == DEEPEST or generator.random() >= 0.25:
        tokens.append(generator.choice(DIGITS))
        return int(tokens[-1])
    operator = generator.choice(list(OPERATORS))
    tokens.append(operator)
    values = [grow(tokens, depth + 1, generator) for _ in range(generator.randint(2, 10))]
    tokens.append(END)
    return OPERATORS[operator](values)


def lists(seed: int) -> Iterator[dict[str, str | int]]:
    """Lists with their values, all different, without an end."""
    generator, seen = random.Random(seed), set()
    while True:
        tokens: list[str] = []
        value = grow(tokens, 1, generator)
        text = " ".join(tokens)
        if SHORTEST <= len(tokens) <= LONGEST and text not in seen:
            seen.add(text)
            yield {"text": text, "label": value}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every operator, the digits and the end of a list."""
    words = [*SPECIAL.values(), *DIGITS, *OPERATORS, END]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    first, last = ((token, words.index(token)) for token in (SPECIAL["bos_token"], SPECIAL["eos_token"]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first[0]} $A {last[0]}", special_tokens=[first, last]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST + 2, **SPECIAL)


def model(attention: str, seed: int) -> YosoForSequenceClassification:
    """The arena's model with one of ATTENTION; its weights depend on the seed only."""
    config = YosoConfig(
        vocab_size=len(word_tokenizer()),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=2048,
        num_labels=10,
        **ATTENTION[attention],
    )
    set_seed(seed)
    return YosoForSequenceClassification(config)


def main(arguments: ListOpsArguments) -> None:
    """Writes the files and the models that ListOpsArguments ask for."""
    rows = lists(arguments.seed)
    for part in PARTS:
        size = arguments.train if part == "train" else arguments.held_out
        with whole_file(arguments.output_dir / f"{part}.jsonl") as path, path.open("w") as file:
            for _, row in zip(tqdm(range(size), part), rows, strict=False):
                file.write(json.dumps(row) + "\n")
    for attention in ATTENTION:
        model(attention, arguments.seed).save_pretrained(arguments.output_dir / attention)
        word_tokenizer().save_pretrained(arguments.output_dir / attention)


if __name__ == "__main__":
    main(*HfArgumentParser(ListOpsArguments).parse_args_into_dataclasses())
