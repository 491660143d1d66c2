"""setup.py, run on a copy of the sources."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from time import perf_counter

import gpu_check
import pytest

ROOT = Path(__file__).parent.parent


def copy_sources(to: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    shutil.copytree(ROOT / "src", to / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    shutil.copytree(ROOT / "csrc", to / "csrc")
    return to


def build(root: Path, **environment: str) -> str:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "YOSO_CUDA": "0", **environment}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def backends(root: Path) -> subprocess.CompletedProcess:
    code = "from yoso_hf import ops; print(ops.__file__, sorted(ops.compiled_backends()))"
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(str(root))
    return run


def test_without_a_compiler_the_install_succeeds_and_says_so_in_one_line(tmp_path):
    root = copy_sources(tmp_path)
    log = build(root, CXX="no-such-compiler")
    lines = [line for line in log.splitlines() if "reference path" in line]
    assert lines == ["yoso_hf: no C++ compiler (no-such-compiler); installing with the reference path only"]
    assert not list(root.glob("src/yoso_hf/*.so"))
    run = backends(root)
    assert run.stdout.endswith("[]\n")
    assert "the slower reference path runs" in run.stderr


def test_a_source_distribution_has_all_that_a_wheel_is_built_from(tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    root = copy_sources(sources)
    environment = {**os.environ, "CXX": "no-such-compiler"}

    def run(*command: str, cwd: Path) -> None:
        outcome = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr

    run("setup.py", "-q", "sdist", cwd=root)
    (archive,) = root.glob("dist/*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    (unpacked,) = tmp_path.glob("yoso_hf-*")
    for folder in ("csrc", "src/yoso_hf"):
        files = {x.relative_to(root) for x in (root / folder).rglob("*.*")}
        assert {x.relative_to(unpacked) for x in (unpacked / folder).rglob("*.*")} == files
    run("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), ".", cwd=unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as names:
        installed = {Path(x).name for x in names.namelist() if Path(x).parent.name == "yoso_hf"}
    assert installed == {"py.typed", *(x.name for x in (ROOT / "src/yoso_hf").glob("*.py"))}


def test_an_old_setuptools_is_named(tmp_path):
    root = copy_sources(tmp_path)
    code = "import runpy, setuptools; setuptools.__version__ = '65.5.0'; runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode != 0
    # torch may have said something before
    message = run.stderr.splitlines()[-1]
    assert message == "yoso_hf: setuptools 77 or newer is needed, this is 65.5.0: pip install -U setuptools"


def test_required_cuda_that_is_missing_is_an_error(tmp_path):
    root = copy_sources(tmp_path)
    shutil.rmtree(root / "csrc" / "cpu")
    environment = {**os.environ, "YOSO_CUDA": "1", "PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin"}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    if Path("/usr/local/cuda").exists() or list(Path("/usr/local").glob("cuda-*")):
        pytest.skip("a CUDA toolkit is in its usual place")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert "no CUDA toolkit was found" in run.stderr


def test_a_step_of_gpu_check_ends_in_time_with_all_that_it_started():
    start = perf_counter()
    name, result, seconds = gpu_check.run("long", ["sh", "-c", "sleep 60 & sleep 60"], 1)
    assert (name, result) == ("long", "STOPPED after 1 s")
    # the process in the background holds the pipe that is read
    assert 1 <= seconds <= perf_counter() - start < 30


@pytest.fixture
def pretended_gpu(monkeypatch):
    for name, value in (("is_available", True), ("get_device_capability", (9, 0)), ("get_device_name", "a GPU")):
        monkeypatch.setattr(gpu_check.torch.cuda, name, lambda value=value: value)


@pytest.mark.usefixtures("pretended_gpu")
def test_gpu_check_does_not_pass_without_kernels(monkeypatch):
    """All its tests would be skipped."""
    started = []

    def run(name, *_, **__):
        started.append(name)
        return name, "FAILED (1)" if name == "load" else "passed", 0.0

    monkeypatch.setattr(gpu_check, "run", run)
    assert gpu_check.main() == 1
    assert started == ["build", "load"]


@pytest.mark.usefixtures("pretended_gpu")
def test_the_limits_of_gpu_check_add_up_to_less_than_eight_minutes(monkeypatch):
    limits = {}

    def run(name, command, limit, **_):
        limits[name] = limit
        assert command
        return name, "passed", 0.0

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: name)
    assert gpu_check.main() == 0
    alone = [limits.pop(name) for name in ("build", "load", "benchmarks")]
    assert set(limits) == {*gpu_check.TESTS, "memcheck", "racecheck"}
    # these run at the same time; docs/cuda.md has the sum
    assert sum(alone) + max(limits.values()) == 470
