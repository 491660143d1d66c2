"""How close YOSO comes to the softmax attention that a sentence encoder was trained with, without any training.

    python benchmarks/bench_embeddings.py --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 \\
        --validation_file STS-B/validation.jsonl --train_file STS-B/train.jsonl --document_file documents.jsonl \\
        --output embeddings.json

For every setting of the attention: Spearman's correlation of the cosines of embeddings with the scores of sentence
pairs; the mean cosine of embeddings to those of softmax; the same, and the mean cosine of the last hidden states, on
the beginnings of documents; and the time of the encoder at several lengths beside sdpa's. Embeddings are means over
the tokens. Where hash_code_len is fitted, it is on sentences of the training file. Beyond its own length the encoder's
table of positions is repeated, for softmax as well. For the times, it gets random tokens. Similarity is "softmax"
where no other is named, and so a text of at most 64 tokens has no samples.

The files are JSON Lines with sentence1, sentence2 and label, a number; the documents' has text.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Case, argument_parser, check_close, compare, measure, parse_arguments, print_table, write_results
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import yoso_hf  # noqa: F401, registers the attention
from yoso_hf.fitting import fit_hash_code_len
from yoso_hf.modeling_yoso import tile_positions

SOFTMAX = "softmax"
FITTED = "fitted"
BATCH_SIZE = 64
FIRST_LAYER_TOLERANCE, TOLERANCE = 1e-3, 1e-2
# the mean cosine that is asked of exact attention
CLOSE = 0.985
EXACT = {"yoso_use_expectation": True}
SAMPLED = {"yoso_use_expectation": False, "yoso_hash_code_len": 16, "yoso_num_hash": 64}
COSINE = {"yoso_similarity": "cosine"}
# by name: what is set in the encoder's configuration
SETTINGS: dict[str, dict[str, Any]] = {
    SOFTMAX: {},
    "default": {},
    "exact": EXACT,
    "sampled, m 64": SAMPLED,
    "sampled, m 32": {**SAMPLED, "yoso_num_hash": 32},
    "sampled, m 128": {**SAMPLED, "yoso_num_hash": 128},
    "sampled, tau 11, m 64": {**SAMPLED, "yoso_hash_code_len": 11},
    "exact, cosine, tau 9": {**EXACT, **COSINE, "yoso_hash_code_len": 9},
    "exact, cosine, tau fitted": {**EXACT, **COSINE, "yoso_hash_code_len": FITTED},
    "sampled, cosine, tau 9, m 32": {**SAMPLED, **COSINE, "yoso_hash_code_len": 9, "yoso_num_hash": 32},
    "sampled, cosine, tau 9, m 64": {**SAMPLED, **COSINE, "yoso_hash_code_len": 9},
    "sampled, cosine, tau 9, m 512": {**SAMPLED, **COSINE, "yoso_hash_code_len": 9, "yoso_num_hash": 512},
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def lengthen(model: PreTrainedModel, length: int) -> None:
    """Repeat the table of positions of a BERT or RoBERTa, so that it takes `length` tokens; none gets another row."""
    table = model.get_submodule("embeddings.position_embeddings")
    # RoBERTa's positions begin after that of padding
    first = 0 if table.padding_idx is None else table.padding_idx + 1
    rows = max(first + length, table.num_embeddings)
    weight = table.weight.detach()
    weight = torch.cat([weight[:first], tile_positions(weight[first:], rows - first)])
    count = torch.arange(rows, device=weight.device)
    model.embeddings.position_embeddings = nn.Embedding.from_pretrained(weight)
    model.embeddings.register_buffer("position_ids", count[None], persistent=False)
    model.embeddings.register_buffer("token_type_ids", torch.zeros_like(count[None]), persistent=False)


class Encoder:
    """A checkpoint, and its attention in each of SETTINGS.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace):
        self.path, self.device = args.model_name_or_path, args.device
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        train = read_rows(args.train_file)
        step = max(1, len(train) // args.fit_sentences)
        self.fit_sentences = sorted((row["sentence1"] for row in train[::step][: args.fit_sentences]), key=len)
        self.fits: dict[str, Any] = {}

    def batches(self, sentences: list[str]):
        for first in range(0, len(sentences), BATCH_SIZE):
            chosen = sentences[first : first + BATCH_SIZE]
            yield self.tokenizer(chosen, padding=True, truncation=True, return_tensors="pt").to(self.device)

    def model(self, setting: str) -> PreTrainedModel:
        attention = "sdpa" if setting == SOFTMAX else "yoso"
        model = AutoModel.from_pretrained(self.path, attn_implementation=attention, dtype=torch.float32)
        model = model.to(self.device).eval()
        given = dict(SETTINGS[setting])
        if given.get("yoso_hash_code_len") == FITTED:
            del given["yoso_hash_code_len"]
            model.config.update(given)
            if setting not in self.fits:
                self.fits[setting] = fit_hash_code_len(model, self.batches(self.fit_sentences))
            given = {"yoso_hash_code_len": self.fits[setting].hash_code_len}
        model.config.update(given)
        return model

    @torch.no_grad()
    def embeddings(self, setting: str, sentences: list[str]) -> Tensor:
        model, embeddings = self.model(setting), []
        for batch in self.batches(sentences):
            states = model(**batch).last_hidden_state
            real = batch["attention_mask"][..., None]
            embeddings.append(F.normalize((states * real).sum(1) / real.sum(1), dim=-1))
        return torch.cat(embeddings).cpu()

    @torch.no_grad()
    def states(self, setting: str, documents: list[str], length: int) -> list[Tensor]:
        """The last hidden states of the first `length` tokens of each document, [1, length, hidden_size]."""
        model = self.model(setting)
        lengthen(model, length)
        inputs = (self.tokenizer(text, truncation=True, max_length=length, return_tensors="pt") for text in documents)
        return [model(**each.to(self.device)).last_hidden_state for each in inputs]


@dataclass
class EncoderCase(Case):
    """One forward of the encoder on one sequence of random tokens."""

    length: int
    setting: str
    name = "encoder"

    def build(self, encoder: Encoder) -> "EncoderCase":
        self.model = encoder.model(self.setting)
        return self

    def setup(self) -> None:
        torch.manual_seed(0)
        lengthen(self.model, self.length)
        self.ids = torch.randint(
            self.model.config.vocab_size // 2, self.model.config.vocab_size, (1, self.length), device=self.device
        )

    @torch.no_grad()
    def run(self) -> Tensor:
        return self.model(self.ids).last_hidden_state

    @torch.no_grad()
    def verify(self) -> None:
        result = self.model(self.ids, output_hidden_states=True).hidden_states
        truth = self.model.double()(self.ids, output_hidden_states=True).hidden_states
        self.model.float()
        check_close("the first layer", result[1], truth[1], FIRST_LAYER_TOLERANCE)
        # a projection within rounding of zero changes a code, and with it, layer by layer, more of them
        if self.setting == SOFTMAX or SETTINGS[self.setting].get("yoso_use_expectation") is True:
            check_close("the last layer", result[-1], truth[-1], TOLERANCE)


def quality(encoder: Encoder, pairs: list[dict[str, Any]], settings: list[str]) -> list[dict[str, Any]]:
    """Correlation and closeness to softmax by setting.

    Args:
        encoder: the encoder.
        pairs: rows with sentence1, sentence2 and label.
        settings: keys of SETTINGS.
    """
    sentences = sorted({row[side] for row in pairs for side in ("sentence1", "sentence2")}, key=len)
    index = {sentence: i for i, sentence in enumerate(sentences)}
    first, second = ([index[row[side]] for row in pairs] for side in ("sentence1", "sentence2"))
    labels = [row["label"] for row in pairs]
    softmax, rows = encoder.embeddings(SOFTMAX, sentences), []
    for setting in settings:
        embeddings = encoder.embeddings(setting, sentences)
        row = {
            "setting": setting,
            "spearman": float(spearmanr((embeddings[first] * embeddings[second]).sum(-1), labels).statistic),
            "cosine_to_softmax": (embeddings * softmax).sum(-1).mean().item(),
        }
        if setting in encoder.fits:
            row["hash_code_len"] = encoder.fits[setting].hash_code_len
        rows.append(row)
        print(f"{setting:48s} Spearman {row['spearman']:.4f}  cosine {row['cosine_to_softmax']:.4f}", flush=True)
    return rows


def document_quality(
    encoder: Encoder, documents: list[str], settings: list[str], lengths: list[int]
) -> list[dict[str, Any]]:
    """Closeness to softmax by setting on the beginnings of documents.

    Args:
        encoder: the encoder.
        documents: texts.
        settings: keys of SETTINGS.
        lengths: tokens of a beginning.
    """
    rows = []
    for length in lengths:
        softmax = encoder.states(SOFTMAX, documents, length)
        short = [states.shape[1] for states in softmax if states.shape[1] < length]
        if short:
            raise ValueError(f"--document_file must hold documents of {length} tokens, got one of {min(short)}")
        for setting in settings:
            states = encoder.states(setting, documents, length)
            by_state = [F.cosine_similarity(*pair, dim=-1).mean() for pair in zip(states, softmax, strict=True)]
            means = [[each.mean(1) for each in texts] for texts in (states, softmax)]
            by_embedding = [F.cosine_similarity(*pair, dim=-1) for pair in zip(*means, strict=True)]
            row = {
                "setting": setting,
                "document_length": length,
                "state_cosine": sum(by_state).item() / len(documents),
                "embedding_cosine": sum(by_embedding).item() / len(documents),
            }
            rows.append(row)
            print(
                f"{length:6d} {setting:48s} states {row['state_cosine']:.4f}  "
                f"embeddings {row['embedding_cosine']:.4f}",
                flush=True,
            )
    return rows


def asked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table of what is asked: one exact setting has to reach both of its two figures."""
    spearman = {row["setting"]: row["spearman"] for row in rows}
    if SOFTMAX not in spearman:
        return []
    exact = [row for row in rows if row["setting"].startswith("exact")]
    table = []
    if exact:
        close = [row for row in exact if row["cosine_to_softmax"] >= CLOSE] or exact
        best = max(close, key=lambda row: row["spearman"])
        name = best["setting"]
        table.append(compare(f"{name}: cosine to softmax", best["cosine_to_softmax"], asked=CLOSE, aim=0.99))
        table.append(compare(f"{name}: Spearman lost", spearman[SOFTMAX] - best["spearman"], asked=0.003, aim=0))
    sampled = [row for row in rows if row["setting"].startswith("sampled")]
    if sampled:
        best = max(sampled, key=lambda row: row["spearman"])
        lost = spearman[SOFTMAX] - best["spearman"]
        table.append(compare(f"{best['setting']}: Spearman lost", lost, asked=0.01, aim=0.003))
    return table


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--validation_file", type=Path, required=True)
    parser.add_argument("--train_file", type=Path, required=True, help="what hash_code_len is fitted on")
    parser.add_argument("--fit_sentences", type=int, default=200)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512, 2048, 4096, 8192])
    parser.add_argument("--document_file", type=Path, help="without it, no documents are compared")
    parser.add_argument("--max_documents", type=int, default=10, help="as many, evenly spread over the file")
    parser.add_argument("--document_lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    args = parse_arguments(parser)
    encoder = Encoder(args)
    rows = quality(encoder, read_rows(args.validation_file), args.settings)
    table = asked(rows)
    print_table(table)
    if args.document_file is not None:
        documents = [row["text"] for row in read_rows(args.document_file)]
        documents = documents[:: -(-len(documents) // args.max_documents)]
        rows += document_quality(encoder, documents, args.settings, args.document_lengths)
    for length in args.lengths:
        cases = [EncoderCase(args.device, length, setting).build(encoder) for setting in args.settings]
        rows += measure(cases, args.repeats, args.seconds)
    for name in ("validation_file", "train_file", "document_file"):
        path = getattr(args, name)
        setattr(args, name, path and path.name)
    args.model_name_or_path = Path(args.model_name_or_path).name
    write_results(args, rows, table)


if __name__ == "__main__":
    main()
