"""Time and peak memory against length, of attention alone and of whole models, as one picture.

    python benchmarks/plot_lengths.py benchmarks/results/attention-cpu.json benchmarks/results/models-cpu.json \
        docs/results/lengths-cpu.png

Reads the results of bench_attention.py and bench_models.py: forward and backward of one call, and a training step.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from harness import save_picture
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

YOSO = {"color": "black", "linewidth": 2.5, "marker": "o", "zorder": 3}
SOFTMAX = {"color": "tab:red"}
# what is in both rows of the picture looks alike
STYLES = {
    "yoso": YOSO,
    "yoso expectation": {"color": "black", "linestyle": "--"},
    "yoso, value itself": {"color": "gray", "linestyle": ":"},
    "softmax (sdpa)": SOFTMAX,
    "BERT (sdpa)": SOFTMAX,
}
OTHERS = ("tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:pink")


def draw(panel: Axes, rows: list[dict[str, Any]], key: str, label: str) -> None:
    panel.set_prop_cycle(color=OTHERS)
    for case in dict.fromkeys(row["case"] for row in rows):
        points = sorted((row["length"], row[key]) for row in rows if row["case"] == case and row[key] is not None)
        if points:
            panel.plot(*zip(*points, strict=True), label=case, **{"marker": ".", **STYLES.get(case, {})})
    lengths = sorted({row["length"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
    panel.set_xlabel("tokens")
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:,g}")
    panel.yaxis.set_minor_formatter("")
    panel.tick_params(axis="y", labelsize=8)
    panel.set_ylabel(label)
    panel.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attention", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    sources = [
        (args.attention, "forward and backward", "one attention call, forward and backward"),
        (args.models, "training step", "training step of a model of two base-size layers"),
    ]
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    for (path, task, title), (time, memory) in zip(sources, figure.subplots(2, 2), strict=True):
        rows = json.loads(path.read_text())["rows"]
        rows = [row for row in rows if row["group"] == "lengths" and row["task"] == task]
        draw(time, rows, "ms", "milliseconds")
        draw(memory, rows, "peak_mib", "peak memory, MiB")
        time.set_title(title, loc="left")
        memory.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save_picture(figure, args.output)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
