"""YOSO_TEST_DEVICE=cuda makes that the device of the tensors that the tests create."""

import os

import torch

if "YOSO_TEST_DEVICE" in os.environ:
    torch.set_default_device(os.environ["YOSO_TEST_DEVICE"])
