"""What the benchmarks share: verified cases, timed in turns, their peak memory, and files of results.

No figure comes from a case whose result is wrong: `measure` verifies every case before it times the first one.
"""

import argparse
import dataclasses
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from yoso_hf import ops
from yoso_hf.training import whole_file, write_text

if TYPE_CHECKING:
    # which machines that only measure need not have
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIN_RUNS = 3
GPU_RUNS = 5
# seconds, beside which the time that Python takes to ask for a run is nothing
LONG_GPU_RUN = 0.1
# the arguments that all benchmarks have; others choose among their cases
COMMON_ARGUMENTS = ("device", "repeats", "seconds", "output")


class WrongResult(Exception):
    """A case computes something else than it should."""


@dataclasses.dataclass
class Case:
    """One thing to measure; its fields, small and few, say which, and are sent to a process of its own for memory."""

    device: str

    # what the results call it
    name = ""

    def setup(self) -> None:
        """Make whatever `run` needs."""

    def run(self) -> Any:
        """Do once what is measured."""
        raise NotImplementedError

    def verify(self) -> None:
        """Compute the same at full size, which also warms up, and raise WrongResult unless it is right."""
        raise NotImplementedError


def check_close(what: str, given: Tensor, truth: Tensor, tolerance: float, scale: Tensor | None = None) -> None:
    """Compare a result with the truth.

    Args:
        what: the result's name, for the message.
        given: the result, of any floating point dtype.
        truth: what it should be, float64, of the same shape.
        tolerance: the largest norm of the difference, as a share of the scale.
        scale: a norm; None: the truth's.

    Raises:
        WrongResult: it is further off, or not finite.
    """
    error = ((given.double() - truth).norm() / (truth.norm() if scale is None else scale)).item()
    if not error <= tolerance:
        raise WrongResult(f"{what} has error {error:.2e}, allowed is {tolerance:.0e}")


def measure(cases: list[Case], repeats: int, seconds: float, memory: bool = False) -> list[dict[str, Any]]:
    """Verify all cases, then time them in turns, so that whatever the machine does happens to all alike.

    Args:
        cases: what to compare; they are set up together.
        repeats: how often a case is timed at most,
        seconds: unless its runs, of which there are MIN_RUNS anyway, have taken that long before.
        memory: measure each case's peak memory as well.

    Returns:
        A row for each case: its name, its fields, the median time `ms`, the number of timed `runs`, its time over that
        of the first case `times_the_first`, and with memory `peak_mib`.

    Raises:
        SystemExit: a case's result is wrong.
    """
    for case in cases:
        case.setup()
    for case in cases:
        try:
            case.verify()
        except WrongResult as error:
            raise SystemExit(f"wrong result of {case}, {case.name}: {error}") from error
    times, spent = [[] for _ in cases], [0.0 for _ in cases]
    waiting = list(range(len(cases)))
    while waiting:
        for i in waiting:
            start = perf_counter()
            times[i].append(_time(cases[i]))
            spent[i] += perf_counter() - start
        waiting = [i for i in waiting if len(times[i]) < MIN_RUNS or (len(times[i]) < repeats and spent[i] < seconds)]
    rows = []
    for case, case_times in zip(cases, times, strict=True):
        row = {"case": case.name, **dataclasses.asdict(case)}
        row |= {"ms": 1e3 * statistics.median(case_times), "runs": len(case_times)}
        row["times_the_first"] = row["ms"] / (rows or [row])[0]["ms"]
        if memory:
            row["peak_mib"] = peak_memory(case)
        settings = " ".join(str(setting) for setting in dataclasses.astuple(case))
        peak = f"{row['peak_mib']:9.0f} MiB" if row.get("peak_mib") else ""
        print(f"{case.name:26s} {settings:56s} {row['ms']:10.2f} ms {row['times_the_first']:8.2f}x {peak}", flush=True)
        rows.append(row)
    return rows


def _time(case: Case) -> float:
    if case.device == "cuda":
        return _gpu_time(case)
    start = perf_counter()
    case.run()
    return perf_counter() - start


def _gpu_time(case: Case) -> float:
    def seconds_of(runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            case.run()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / runs

    seconds = seconds_of(1)
    # short runs come several at a time, so that the GPU does not wait for Python
    return seconds if seconds > LONG_GPU_RUN else seconds_of(GPU_RUNS)


def peak_memory(case: Case) -> float | None:
    """How far memory grows during one run above what it was after setup, in MiB, in a process of its own.

    Args:
        case: the case; on the CPU it is the resident set that is looked at, on a GPU what torch has allocated.

    Returns:
        The growth; None where the system does not tell.
    """
    if case.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        return None
    # a server that has imported what is slow to import, and forks a process for each case
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["yoso_hf"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        # without the tensors of this process
        return pool.submit(_memory_growth, dataclasses.replace(case)).result()


def _memory_growth(case: Case) -> float:
    case.setup()
    if case.device == "cuda":
        # libraries get their workspaces in the first run
        case.run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # resets the peak to what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    case.run()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def compare(name: str, ratio: float, *, asked: float, aim: float) -> dict[str, Any]:
    """A row of the table of ratios; where asked is below aim, the ratio should be at least that, else at most.

    Args:
        name: what is compared with what.
        ratio: the measured ratio.
        asked: the value it has to reach.
        aim: the value it is meant to reach.

    Returns:
        The arguments, with `direction`, and `passed` and `aim_reached`.
    """
    sign = 1 if asked < aim else -1
    return {
        "name": name,
        "ratio": ratio,
        "direction": "at least" if sign == 1 else "at most",
        "asked": asked,
        "aim": aim,
        "passed": sign * ratio >= sign * asked,
        "aim_reached": sign * ratio >= sign * aim,
    }


def print_table(table: list[dict[str, Any]]) -> None:
    """Print the rows that `compare` made."""
    if not table:
        return
    width = max(len(row["name"]) for row in table)
    print(f"\n{'':{width}s} {'ratio':>8s}  {'asked':>16s} {'aim':>8s}")
    for row in table:
        asked = f"{row['direction']} {row['asked']:g}"
        verdict = "aim reached" if row["aim_reached"] else "passed" if row["passed"] else "MISSED"
        print(f"{row['name']:{width}s} {row['ratio']:8.2f}  {asked:>16s} {row['aim']:8g}  {verdict}")


def within_limit(case: Case, earlier: list[dict[str, Any]], limit: float) -> bool:
    """Whether a call will take less than a limit, if time grows with the square of the length.

    Args:
        case: a case with a field `length`.
        earlier: rows of shorter lengths.
        limit: seconds.

    Returns:
        True where it should, or where no earlier row has the case's name.
    """
    rows = [row for row in earlier if row["case"] == case.name]
    if not rows:
        return True
    longest = max(rows, key=lambda row: row["length"])
    return longest["ms"] * (case.length / longest["length"]) ** 2 < 1e3 * limit


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all benchmarks have.

    Args:
        description: the benchmark's docstring.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=25, help="how often a case is timed at most")
    parser.add_argument("--seconds", type=float, default=2, help=f"no more runs after that, if there were {MIN_RUNS}")
    parser.add_argument("--output", type=Path, help="results; default: benchmarks/results/<benchmark>-<device>.json")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a benchmark's arguments, and end the program where its results would replace those of more cases.

    Args:
        parser: what `argument_parser` gave, with the benchmark's own arguments.
    """
    args = parser.parse_args()
    chosen = [name for name, given in vars(args).items() if given != parser.get_default(name)]
    chosen = [name for name in chosen if name not in COMMON_ARGUMENTS]
    if chosen and args.output is None:
        parser.error(
            f"--output is needed with --{', --'.join(chosen)}: benchmarks/results holds the figures of all cases"
        )
    return args


def machine() -> dict[str, Any]:
    """The machine, the versions and the commit, with "+" where code differs from it."""
    # results that an earlier benchmark wrote do not make this one's code another
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "commit": _git("rev-parse", "--short=10", "HEAD") + ("+" if changed else ""),
        "processor": processor,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        # of the kernels, which ops has loaded where there are any
        "kernels_cpu_capability": getattr(sys.modules.get("yoso_hf._C"), "cpu_capability", None),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compiled_backends": sorted(ops.compiled_backends()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def write_results(
    args: argparse.Namespace, rows: list[dict[str, Any]], table: list[dict[str, Any]] | None = None
) -> None:
    """Write a benchmark's figures with their circumstances as JSON.

    Args:
        args: the benchmark's arguments.
        rows: what `measure` gave.
        table: what `compare` gave.
    """
    stem = Path(sys.argv[0]).stem.removeprefix("bench_")
    path = args.output or RESULTS / f"{stem}-{args.device}.json"
    # nothing of where files lie on this machine
    settings = {name: setting for name, setting in vars(args).items() if name not in ("output", "authors")}
    result = {"machine": machine(), "settings": settings, "rows": rows}
    if table is not None:
        result["table"] = table
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {path}")


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a picture, whole or not at all.

    Args:
        figure: what is to be seen.
        path: the file, which ends in .png.
    """
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
