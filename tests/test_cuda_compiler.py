"""What nvcc makes of the CUDA kernels: an object that loads, and, of a mistake, one that the tests find wrong."""

import os
import shutil
import subprocess
import sys

import pytest
from cuda_emulator import build as emulator
from test_build import build, copy_sources
from test_cuda_kernels import needs_emulator, run_emulated

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


@needs_nvcc
def test_kernels_compile_link_and_load_beside_a_torch_without_cuda(tmp_path):
    root = copy_sources(tmp_path)
    shutil.rmtree(root / "csrc" / "cpu")
    if emulator.AVAILABLE:
        # which compiles the others, and links all of them
        for path in root.glob("csrc/cuda/*.cu"):
            if path.name != "unit_rows.cu":
                path.unlink()
    build(root, YOSO_CUDA="1", YOSO_CUDA_ARCHS="90")
    code = """
import torch, yoso_hf
print(torch._C._dispatch_has_kernel_for_dispatch_key("yoso_hf::unit_rows_backward", "CUDA"))
"""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"


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
