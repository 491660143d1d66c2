"""Loss curves of finished runs of run_mlm or run_glue, side by side, as a picture and as numbers.

    python benchmarks/plot_runs.py --commit 61b21e3 docs/results/gutenberg-4096 yoso=runs/yoso softmax=runs/softmax

Writes <name>.png and <name>.json; the latter holds each run's run.json, all_results.json and evaluations.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from harness import save_picture
from matplotlib.figure import Figure

from yoso_hf.training import write_text


def read_run(folder: Path) -> dict[str, Any]:
    description, results, state = (
        json.loads((folder / name).read_text()) for name in ("run.json", "all_results.json", "trainer_state.json")
    )
    curve = [(entry["step"], entry["eval_loss"]) for entry in state["log_history"] if "eval_loss" in entry]
    training = [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]
    # files are named by the machine's directories, which mean nothing elsewhere
    description = {name: value for name, value in description.items() if "/" not in f"{name}{value}"}
    return {"run": description, "results": results, "evaluation": curve, "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", required=True, help="the commit that the runs were made with")
    parser.add_argument("runs", nargs="+", help="label=directory")
    args = parser.parse_args()
    runs = {}
    for run in args.runs:
        label, _, folder = run.partition("=")
        runs[label] = read_run(Path(folder))

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, run in runs.items():
        (line,) = axes.plot(*zip(*run["evaluation"], strict=True), marker="o", label=f"{label}, evaluation")
        axes.plot(*zip(*run["training"], strict=True), color=line.get_color(), alpha=0.4, label=f"{label}, training")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    save_picture(figure, args.output.with_suffix(".png"))
    write_text(args.output.with_suffix(".json"), json.dumps({"commit": args.commit, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
