"""Train a small YOSO at length 4096 in a few minutes on text that every machine has, and show what it gives.

    make quickstart
    python scripts/quickstart.py

The text is Python's own documentation (pydoc_data.topics). The model, its tokenizer and the corpus go to
runs/quickstart; started again, it resumes or shows the finished model. Times are of this machine.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM, pipeline, set_seed
from transformers.utils import logging

import yoso_hf  # noqa: F401, registers the models
from yoso_hf import ops
from yoso_hf.training import write_text

ROOT = Path(__file__).parent.parent
RUN = ROOT / "runs" / "quickstart"
RECIPE = ROOT / "configs" / "tiny.yaml"
PROMPT = "The value of the expression is returned by the<mask>."


def write_corpus() -> tuple[Path, Path]:
    """One document a topic; every tenth is for validation."""
    paths = []
    for name, validation in (("train", False), ("validation", True)):
        documents = [text for number, text in enumerate(topics.values()) if (number % 10 == 0) == validation]
        paths.append(RUN / "corpus" / f"{name}.jsonl")
        write_text(paths[-1], "".join(json.dumps({"text": text}) + "\n" for text in documents))
    return tuple(paths)


def pretrain(output_dir: Path) -> None:
    train_file, validation_file = write_corpus()
    command = [sys.executable, str(ROOT / "scripts" / "run_mlm.py"), str(RECIPE)]
    command += ["--train_file", str(train_file), "--validation_file", str(validation_file)]
    subprocess.run([*command, "--output_dir", str(output_dir)], check=True)


def evaluation_losses(output_dir: Path) -> list[float]:
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    return [entry["eval_loss"] for entry in history if "eval_loss" in entry]


def step_seconds(model: torch.nn.Module, input_ids: torch.Tensor) -> float:
    """Seconds of one forward and backward through the encoder, the fastest of three after one to warm up."""
    model.train()
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        model.base_model(input_ids).last_hidden_state.sum().backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def softmax_twin(model: torch.nn.Module) -> RobertaForMaskedLM:
    """RoBERTa of the same sizes, untrained. Without dropout on the attention, which YOSO has not either: with it,
    PyTorch would take a slower path."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = RobertaConfig(
        **{name: getattr(model.config, name) for name in sizes},
        max_position_embeddings=model.config.max_position_embeddings + 2,
        type_vocab_size=1,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    return RobertaForMaskedLM(config)


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    output_dir = RUN / "model"
    pretrain(output_dir)

    # the report below is all that a reader needs
    logging.set_verbosity_error()
    set_seed(0)
    model = AutoModelForMaskedLM.from_pretrained(output_dir)
    results = json.loads((output_dir / "all_results.json").read_text())
    losses = evaluation_losses(output_dir)
    length = model.config.max_position_embeddings
    input_ids = torch.randint(5, model.config.vocab_size, (1, length))
    yoso, softmax = (step_seconds(network, input_ids) for network in (model, softmax_twin(model)))
    guesses = pipeline("fill-mask", model=str(output_dir))(PROMPT)

    backends = ", ".join(sorted(ops.compiled_backends())) or "none: the slower reference path ran"
    print(
        f"""
evaluation loss       {losses[0]:.2f} before, {losses[-1]:.2f} after training
training speed        {results["train_tokens_per_second"]:,.0f} tokens a second
one step of {length}     {yoso:.2f} s with YOSO, {softmax:.2f} s with softmax (RoBERTa of the same size, sdpa)
compiled kernels      {backends}
{PROMPT}"""
    )
    for guess in guesses:
        print(f"  {guess['score']:.3f}  {guess['token_str']!r}")
    folder = output_dir.relative_to(Path.cwd()) if output_dir.is_relative_to(Path.cwd()) else output_dir
    print(
        f"""
The model lies in {folder}. Load it with

    import yoso_hf
    from transformers import AutoModelForMaskedLM, AutoTokenizer
    model = AutoModelForMaskedLM.from_pretrained("{folder}")
    tokenizer = AutoTokenizer.from_pretrained("{folder}")

Next: your own text, or a task.

    .venv/bin/python scripts/run_mlm.py configs/tiny.yaml --train_file 'my/*.txt' --output_dir runs/mine
    .venv/bin/python scripts/run_glue.py configs/glue.yaml --task_name sst2 --model_name_or_path {folder} \\
        --output_dir runs/sst2"""
    )


if __name__ == "__main__":
    main()
