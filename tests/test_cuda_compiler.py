"""What nvcc makes of the CUDA kernels: an object that loads, and, of a mistake, one that the tests find wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emulator import build as emulator
from cuda_emulator.product_registers import RegisterInUse
from test_build import build, copy_sources
from test_cuda_kernels import needs_emulator, run_emulated

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The sources, with an object of the CUDA kernels for sm_80 and sm_86."""
    root = copy_sources(tmp_path_factory.mktemp("compiled"))
    shutil.rmtree(root / "csrc" / "cpu")
    if emulator.AVAILABLE:
        # which compiles the others, and links all of them
        for path in root.glob("csrc/cuda/*.cu"):
            if path.stem not in ("unit_rows", "obstacle"):
                path.unlink()
    build(root, YOSO_CUDA="1", YOSO_CUDA_ARCHS="80;86")
    return root


def load(root: Path, **environment: str) -> tuple[bool, str]:
    """Whether importing the package registers kernels for CUDA, and what it gives for a reason."""
    code = """
import torch
from yoso_hf import _C
print(torch._C._dispatch_has_kernel_for_dispatch_key("yoso_hf::unit_rows_backward", "CUDA"))
print(_C.cuda_obstacle)
"""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), **environment}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    registers, obstacle = run.stdout.splitlines()
    return registers == "True", obstacle


@needs_nvcc
def test_kernels_compile_link_and_load_beside_a_torch_without_cuda(compiled):
    assert load(compiled) == (True, "")


# NVIDIA's management library as of a machine with a GPU or two, of which the environment tells
MANAGEMENT_LIBRARY = """
#include <stdlib.h>
static int number(const char* name) { return getenv(name) == NULL ? 0 : atoi(getenv(name)); }
int nvmlInit_v2(void) { return number("FAILS"); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = number("GPUS"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = number("DRIVER"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) { *gpu = (void*)(size_t)(index + 1); return 0; }
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) {
  const int capability = number((size_t)gpu == 1 ? "FIRST" : "SECOND");
  *major = capability / 10;
  *minor = capability % 10;
  return 0;
}
"""


@pytest.fixture(scope="module")
def management_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    command = ["cc", "-x", "c", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), "-"]
    subprocess.run(command, input=MANAGEMENT_LIBRARY, text=True, check=True)
    return folder


OTHER_GPUS = "this machine has {}, the kernels were compiled for sm_80, sm_86"


@needs_nvcc
@pytest.mark.parametrize(
    ("machine", "obstacle"),
    [
        # later ones of a generation, and PTX for all later
        ({"GPUS": 1, "FIRST": 89}, ""),
        ({"GPUS": 1, "FIRST": 120}, ""),
        ({"GPUS": 2, "FIRST": 75, "SECOND": 90}, ""),
        ({"GPUS": 1, "FIRST": 75}, OTHER_GPUS.format("sm_75")),
        ({"GPUS": 2, "FIRST": 75, "SECOND": 70}, OTHER_GPUS.format("sm_75, sm_70")),
        ({"GPUS": 1, "FIRST": 90, "DRIVER": 11080}, "the driver knows CUDA 11.8, the kernels were compiled by CUDA"),
        # nothing is known
        ({"GPUS": 1, "FIRST": 75, "FAILS": 9}, ""),
    ],
)
def test_kernels_are_not_registered_where_no_gpu_can_run_them(machine, obstacle, compiled, management_library):
    settings = {name: str(number) for name, number in {"DRIVER": 99000, **machine}.items()}
    registers, found = load(compiled, LD_LIBRARY_PATH=str(management_library), **settings)
    assert registers == (found == "") == (obstacle == "")
    assert found.startswith(obstacle)


@needs_emulator
@pytest.mark.parametrize(
    ("kernel", "file", "line", "instead", "message"),
    [
        ("sampled_attention", "sort.h", "      __syncwarp();", ";", "sort.h:.* a race"),
        # the others take nvcc and g++ as long again
        *(
            pytest.param(*mistake, marks=pytest.mark.slow)
            for mistake in (
                ("sampled_attention", "sort.h", "    __syncthreads();", ";", "addition after read"),
                ("sampled_attention", "device.h", "  wait_for_launches_before();", ";", "a race"),
                ("sampled_attention", "sampled_attention.cu", "if (i < queries) next[i]", "next[i]", "outside of all"),
                ("sampled_attention", "sampled_attention.cu", "have written\n  __syncthreads();", "", "a race"),
                ("sampled_attention_backward", "buckets_mma.h", "been read\n    __syncthreads();", "", "a race"),
                (
                    "sampled_attention_backward",
                    "buckets_mma.h",
                    "__syncthreads();\n      copy_rows(same",
                    "copy_rows(same",
                    "a race",
                ),
                (
                    "sampled_attention_backward",
                    "buckets_wgmma.h",
                    "if (chunk.is(Chunk::kGets)) __sync",
                    "//",
                    "a race",
                ),
                ("sampled_attention_backward", "pair_counts.h", "  __syncthreads();", ";", "a race"),
                (
                    "sampled_attention_backward",
                    "pairs_wgmma.h",
                    "__syncthreads();\n    add_to_queries(",
                    "add_to_queries(",
                    "a race",
                ),
                (
                    "sampled_attention_backward",
                    "pairs_wgmma.h",
                    "    show_products();\n    __syncthreads();",
                    "    __syncthreads();",
                    "a race",
                ),
                ("sampled_attention_backward", "buckets_any.h", "      __syncwarp();", ";", "a race"),
                ("expectation_attention", "tiles_wgmma.h", "wait_for_products();\n    show", "show", "a race"),
                ("expectation_attention", "tiles_wgmma.h", "    show_products();", "", "a race"),
                (
                    "sampled_attention_backward",
                    "mma.h",
                    "%6, %7}, {%8, %9}",
                    "%7, %6}, {%8, %9}",
                    "in assert_as_accurate_as",
                ),
            )
        ),
    ],
)
def test_a_mistake_is_found(kernel, file, line, instead, message, tmp_path, monkeypatch):
    """So that the tests around can fail: all but the last, in an instruction's operands, leave the results right."""
    root = copy_sources(tmp_path)
    source = root / "csrc" / "cuda" / file
    assert line in source.read_text()
    source.write_text(source.read_text().replace(line, instead, 1))
    monkeypatch.setattr(emulator, "ROOT", root)
    kernels = root / "kernels.so"
    # with what these call
    needed = {"sampled_attention_backward": ("sampled_attention*",), "expectation_attention": (kernel, "unit_rows")}
    emulator.build(kernels, kernels=needed.get(kernel, (kernel,)))
    operators = "expectation" if kernel == "expectation_attention" else "sampled"
    code = f"""
import os
from test_kernels import Inputs, assert_as_accurate_as_pytorch
for way, dtype in (("buckets", torch.bfloat16), ("buckets", torch.float32), ("pairs", torch.bfloat16)):
    os.environ["YOSO_CUDA_BACKWARD"] = way
    for columns, tau in ((64, 6), (40, 4), (64, 1)):
        inputs = Inputs("random", (1, 4, 333, 90, 64, columns, 4, tau), dtype)
        assert_as_accurate_as_pytorch(inputs.{operators}, dtype)
"""
    with pytest.raises(AssertionError, match=message):
        run_emulated(kernels, code, watch="races")


@pytest.mark.slow
@needs_emulator
def test_sums_that_are_not_there_yet_are_found(tmp_path, monkeypatch):
    """The emulator multiplies at once, so that results would be right."""
    root = copy_sources(tmp_path)
    source = root / "csrc" / "cuda" / "pairs_wgmma.h"
    line = "    wait_for_products();\n    keep(sums);\n    keep(value_sums);\n    keep(query_sums);\n"
    assert line in source.read_text()
    source.write_text(source.read_text().replace(line, line.replace("()", "<1>()", 1)))
    monkeypatch.setattr(emulator, "ROOT", root)
    with pytest.raises(RegisterInUse, match="of a product that has not been waited for"):
        emulator.build(root / "kernels.so", kernels=("sampled_attention_pairs",))
