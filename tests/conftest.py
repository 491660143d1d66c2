"""YOSO_TEST_DEVICE=cuda makes that the device of the tensors that the tests create."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

# threads that wait would take the cores from other processes, such as the other half of the tests
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

if "YOSO_TEST_DEVICE" in os.environ:
    # test_ops.py's poisoned_memory asks for deterministic algorithms, which cuBLAS refuses without
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_default_device(os.environ["YOSO_TEST_DEVICE"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # the longest first, so that nothing is left to wait for when all others are done
    items.sort(key=lambda item: item.path.name != "test_cuda_kernels.py")


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Gives the module of a file in scripts/, by its name without the ending."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[1] / "scripts" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def generator() -> torch.Generator:
    """What random numbers on the default device come from."""
    device = torch.get_default_device()
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
