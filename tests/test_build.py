"""setup.py, run on a copy of the sources."""

import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from time import perf_counter

import gpu_check
import pytest
import torch
from torch.utils import cpp_extension

import yoso_hf

ROOT = Path(__file__).parent.parent
LOADER = f"ld-linux-{platform.machine()}".replace("_", "-")


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


def test_an_object_of_another_build_is_not_kept_where_there_is_no_ninja(tmp_path):
    """It may lack the CUDA kernels that are asked for now."""
    root = copy_sources(tmp_path)
    shutil.rmtree(root / "csrc" / "cpu")
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text("#!/bin/sh\nexit 1\n")
    ninja.chmod(0o755)
    path = os.pathsep.join([str(ninja.parent), os.environ["PATH"]])
    build(root, PATH=path)
    (library,) = root.glob("src/yoso_hf/_C.*")
    before = library.stat().st_mtime_ns
    build(root, PATH=path)
    assert library.stat().st_mtime_ns > before


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path, Path]:
    """The sources, a source distribution of them, unpacked, and a wheel that is built from it with one kernel."""
    folder = tmp_path_factory.mktemp("distributions")
    (folder / "sources").mkdir()
    root = copy_sources(folder / "sources")

    def run(*command: str, cwd: Path) -> None:
        environment = {**os.environ, "YOSO_CUDA": "0"}
        outcome = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr

    run("setup.py", "-q", "sdist", cwd=root)
    (archive,) = root.glob("dist/*.tar.gz")
    shutil.unpack_archive(archive, folder)
    (unpacked,) = folder.glob("yoso_hf-*")
    copy = shutil.copytree(unpacked, folder / "copy")
    # all kernels take minutes
    for path in copy.glob("csrc/cpu/*.cpp"):
        if path.name != "unit_rows.cpp":
            path.unlink()
    run("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), ".", cwd=copy)
    (wheel,) = folder.glob("*.whl")
    return root, unpacked, wheel


def test_a_source_distribution_has_all_that_a_wheel_is_built_from(distributions):
    root, unpacked, wheel = distributions
    for folder in ("csrc", "src/yoso_hf"):
        files = {x.relative_to(root) for x in (root / folder).rglob("*.*")}
        assert {x.relative_to(unpacked) for x in (unpacked / folder).rglob("*.*")} == files
    with zipfile.ZipFile(wheel) as names:
        installed = {Path(x).name for x in names.namelist() if Path(x).parent.name == "yoso_hf"}
    assert installed - {"_C.abi3.so"} == {"py.typed", *(x.name for x in (ROOT / "src/yoso_hf").glob("*.py"))}


def test_a_wheel_is_for_every_python(distributions):
    assert distributions[-1].name.split("-")[2:4] == ["cp310", "abi3"]


@pytest.fixture(scope="module", params=["of a wheel", "installed"])
def compiled(request, distributions, tmp_path_factory) -> Path:
    """The object of a wheel, with one kernel, or the one that other tests run, with all that were built."""
    if request.param == "installed":
        spec = importlib.util.find_spec("yoso_hf._C")
        path = spec and Path(spec.origin)
    else:
        folder = tmp_path_factory.mktemp("wheel")
        shutil.unpack_archive(distributions[-1], folder, "zip")
        path = next(folder.glob("yoso_hf/_C.*"), None)
    if path is None or sys.platform != "linux" or shutil.which("objdump") is None:
        pytest.skip("no compiler or no objdump, or not Linux")
    return path


def objdump(option: str, path: Path) -> list[list[str]]:
    run = subprocess.run(["objdump", option, path], capture_output=True, text=True, check=True)
    return [line.split() for line in run.stdout.splitlines()]


def test_an_object_is_linked_to_torch_and_the_system_only(compiled):
    entries = [line for line in objdump("-p", compiled) if len(line) == 2]
    libraries = {value.split(".")[0] for key, value in entries if key == "NEEDED"}
    assert "libtorch_cpu" in libraries
    assert libraries <= {"libtorch_cpu", "libtorch", "libc10", "libstdc++", "libgcc_s", "libm", "libc", LOADER}
    assert {"RPATH", "RUNPATH"}.isdisjoint(key for key, _ in entries)


def test_an_object_takes_no_cpp_function_from_torch(compiled):
    """Its stable ABI is of C, and which of the C++ library's functions it exports changes."""
    undefined = [line for line in objdump("-T", compiled) if "*UND*" in line]
    assert any(name.startswith("aoti_torch_") for *_, name in undefined)
    unversioned = [name for *_, version, name in undefined if not re.search("GLIBCXX|CXXABI", version)]
    assert not [name for name in unversioned if name.startswith("_Z")]


@pytest.mark.skipif(platform.libc_ver() > ("glibc", "2.36"), reason="newer systems may give newer tags")
def test_an_object_asks_for_no_newer_system_than_the_tag_of_the_docs(compiled):
    tag = re.search(r"manylinux_(\d+)_(\d+)_x86_64", (ROOT / "docs" / "install.md").read_text())
    # with what that tag allows of GCC's libraries
    newest = {"GLIBC": tuple(map(int, tag.groups())), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
    asked = set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", str(objdump("-T", compiled))))
    assert {library for library, _ in asked} == set(newest)
    assert not {x for x in asked if tuple(map(int, x[1].split("."))) > newest[x[0]]}


def test_an_object_does_not_name_the_directories_that_it_was_built_in(compiled, distributions):
    content = compiled.read_bytes()
    assert b"torch/csrc/stable" in content
    for directory in (distributions[0].parent, ROOT, Path(torch.__file__).parents[1]):
        assert bytes(directory) + b"/" not in content


def test_a_compiler_that_cannot_compile_the_kernels_leaves_the_reference_path(tmp_path):
    """Too old, or, as a Mac's c++ at first, there only to say what to install."""
    root = copy_sources(tmp_path)
    compiler = root / "stub++"
    compiler.write_text("#!/bin/sh\necho no developer tools were found >&2\nexit 1\n")
    compiler.chmod(0o755)
    log = build(root, CXX=f"{compiler} -march=native")
    lines = [line for line in log.splitlines() if "reference path" in line]
    assert lines == [
        f"yoso_hf: the kernels need GCC 12 or clang 18 or newer, which {compiler} -march=native is not; installing "
        "with the reference path only"
    ]
    assert not list(root.glob("src/yoso_hf/*.so"))


def test_what_a_good_compiler_refuses_is_an_error(tmp_path):
    root = copy_sources(tmp_path)
    shutil.rmtree(root / "csrc" / "cpu")
    (root / "csrc" / "module.cpp").write_text('#error "mistake"\n')
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "YOSO_CUDA": "0"}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert "mistake" in run.stdout + run.stderr


def test_required_cuda_without_a_compiler_is_an_error(tmp_path):
    root = copy_sources(tmp_path)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "YOSO_CUDA": "1", "CXX": "no-such-compiler"}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert "YOSO_CUDA=1, but no C++ compiler (no-such-compiler)" in run.stderr


@pytest.mark.parametrize("name", ["find_cuda", "cuda_architectures"])
def test_settings_of_the_build_that_are_neither_are_refused(name, monkeypatch):
    monkeypatch.setenv("YOSO_CUDA", "true")
    monkeypatch.setenv("YOSO_CUDA_ARCHS", "sm_80,sm_90")
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    message = {
        "find_cuda": "YOSO_CUDA must be 0 or 1, got 'true'",
        "cuda_architectures": """YOSO_CUDA_ARCHS must be such as "80;90", or "all", got 'sm_80,sm_90'""",
    }
    with pytest.raises(SystemExit, match=message[name]):
        runpy.run_path(str(ROOT / "setup.py"))[name]()


def newest(compiler: str, oldest: int) -> str | None:
    """The newest of a compiler's versions on the PATH, as clang++ and clang++-19, from the oldest that will do."""
    versions = {}
    for folder in os.environ["PATH"].split(os.pathsep):
        for path in Path(folder).glob(f"{compiler}*"):
            if re.fullmatch(r"(-\d+)?", path.name.removeprefix(compiler)):
                run = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=True)
                versions[int(run.stdout.split(".")[0])] = str(path)
    return versions[max(versions)] if versions and max(versions) >= oldest else None


def cxx_flags() -> list[str]:
    """What setup.py has the C++ compiler given."""
    code = "import json, runpy, setuptools; setuptools.setup = lambda **settings: print(json.dumps("
    code += "settings['ext_modules'][0].extra_compile_args['cxx'])); runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "target",
    ["GCC for aarch64", *(pytest.param(name, marks=pytest.mark.slow) for name in ("clang", "clang for aarch64"))],
)
def test_other_compilers_take_the_cpu_kernels_without_a_warning(target):
    """To assembly: what may not be inlined into what is found out only then."""
    cross_gcc = newest("aarch64-linux-gnu-g++", 12)
    compiler = cross_gcc if target == "GCC for aarch64" else newest("clang++", 18)
    # clang takes the C++ library of GCC
    if compiler is None or (target != "clang" and cross_gcc is None):
        pytest.skip("no such compiler")
    # not optimized, as that takes minutes
    command = [compiler, *(flag for flag in cxx_flags() if flag != "-O3"), "-Werror"]
    command += ["--target=aarch64-linux-gnu"] if target == "clang for aarch64" else []
    for path in cpp_extension.include_paths():
        command += ["-isystem", path]
    sources = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
    assert sources
    running = [
        subprocess.Popen([*command, "-S", "-o", os.devnull, source], stderr=subprocess.PIPE, text=True)
        for source in sources
    ]
    errors = [process.communicate()[1] for process in running]
    assert not any(errors), "".join(errors)
    assert not any(process.returncode for process in running)


def test_the_kernels_are_compiled_as_cpp20_whatever_torch_takes():
    """torch 2.11 adds the standard of 2017 where none is named, and later ones that of 2020."""
    assert "-std=c++20" in cxx_flags()


def test_one_version_everywhere(tmp_path):
    root = copy_sources(tmp_path)
    run = subprocess.run([sys.executable, "setup.py", "--version"], cwd=root, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == yoso_hf.__version__
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited[1] == yoso_hf.__version__


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
    step = gpu_check.run("long", ["sh", "-c", "echo begun; sleep 60 & sleep 60"], 1)
    assert (step.name, step.result) == ("long", "STOPPED after 1 s")
    # the process in the background holds the pipe that is read
    assert 1 <= step.seconds <= perf_counter() - start < 30
    assert step.output.startswith("begun\n")


@pytest.mark.parametrize("ignores", [False, True])
def test_a_step_of_gpu_check_that_is_stopped_says_where_it_was(ignores, monkeypatch):
    monkeypatch.setattr(gpu_check, "LAST_SECONDS", 2)
    code = "import signal, time\nprint('begun', flush=True)\ndef wait_for_the_kernel(): time.sleep(60)\n"
    if ignores:
        # as a process does that waits in the driver
        code += "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGABRT])\n"
    step = gpu_check.run("hangs", [sys.executable, "-c", code + "wait_for_the_kernel()"], 3)
    assert step.result == "STOPPED after 3 s" and "begun" in step.output
    assert ("wait_for_the_kernel" in step.output) == (not ignores)


@pytest.mark.usefixtures("pretended_gpu")
def test_gpu_check_ends_with_what_failed(monkeypatch, capsys):
    def run(name, *_, **__):
        if name in ("tests", "benchmarks"):
            return gpu_check.Step(name, "FAILED (1)", 0.0, f"{name} begin{'.' * 5000}{name} end")
        return gpu_check.Step(name, "passed", 0.0, f"{name} passed")

    monkeypatch.setattr(gpu_check, "run", run)
    assert gpu_check.main() == 1
    printed = capsys.readouterr().out
    assert "tests end" in printed and "benchmarks end" in printed and "begin" not in printed
    assert "build passed" not in printed


def test_a_step_of_gpu_check_may_find_a_device_that_a_tool_does_not_support():
    for status, message, expected in (
        (1, "Error: Device not supported", gpu_check.NOT_SUPPORTED),
        (1, "ERROR SUMMARY: 1 error", "FAILED (1)"),
        (0, "Device not supported", "passed"),
    ):
        assert gpu_check.run("memcheck", ["sh", "-c", f"echo {message}; exit {status}"], 30).result == expected


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
        return gpu_check.Step(name, "FAILED (1)" if name == "load" else "passed", 0.0)

    monkeypatch.setattr(gpu_check, "run", run)
    assert gpu_check.main() == 1
    assert started == ["build", "load"]


@pytest.mark.usefixtures("pretended_gpu")
def test_the_limits_of_gpu_check_add_up_to_less_than_eight_minutes(monkeypatch):
    limits, clock = {}, iter((0.0, 410.0))
    monkeypatch.setattr(gpu_check, "perf_counter", lambda: next(clock))

    def run(name, command, limit, **_):
        limits[name] = limit
        assert command
        return gpu_check.Step(name, "passed", 0.0)

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: name)
    assert gpu_check.main() == 0
    before, benchmarks = [limits.pop(name) for name in ("build", "load")], limits.pop("benchmarks")
    assert set(limits) == {"tests", "memcheck", "racecheck"}
    # these run at the same time; the benchmarks have the rest, of which docs/cuda.md has the sum
    assert sum(before) + max(limits.values()) == 410
    assert benchmarks == 60


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        # none, as where a wheel is built for other machines
        ([], {}, ["80", "86", "89", "90"]),
        ([(9, 0), (9, 0)], {}, ["90"]),
        ([(8, 9), (8, 0), (7, 5)], {}, ["80", "89"]),
        # newer ones take the PTX
        ([(12, 0)], {}, ["90"]),
        ([(7, 5)], {}, []),
        ([(7, 5)], {"YOSO_CUDA": "1"}, ["80", "86", "89", "90"]),
        ([(9, 0)], {"YOSO_CUDA_ARCHS": "100;8.6;90"}, ["86", "90", "100"]),
        ([(9, 0)], {"YOSO_CUDA_ARCHS": "all"}, ["80", "86", "89", "90"]),
    ],
)
def test_cuda_kernels_are_compiled_for_the_gpus_at_hand(gpus, settings, expected, monkeypatch):
    for name in ("YOSO_CUDA", "YOSO_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    assert runpy.run_path(str(ROOT / "setup.py"))["cuda_architectures"]() == expected
