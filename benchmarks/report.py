"""What every benchmark's result file says beside its figures."""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from yoso_hf import ops
from yoso_hf.training import write_text


def machine() -> dict[str, Any]:
    """The machine, the versions and the commit, with "+" where the working tree differs from it."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--match="],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "commit": commit,
        "processor": processor,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compiled_backends": sorted(ops.compiled_backends()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_results(path: Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a benchmark's figures with their circumstances as JSON.

    Args:
        path: the file.
        settings: the benchmark's arguments.
        rows: one dictionary for each measured case.
    """
    result = {"machine": machine(), "settings": settings, "rows": rows}
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
