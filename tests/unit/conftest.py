"""What tests of the native kernels share."""

from __future__ import annotations

import ctypes

import pytest
import torch

from outrider.models import native, ops


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The native kernels, built and enabled as operations; skips where they cannot be had."""
    if not native.is_supported(torch.device("cpu"), torch.bfloat16) or native.compiler() is None:
        pytest.skip("needs AVX2 or AVX-512, and a C++ compiler")
    path = tmp_path_factory.mktemp("native") / "native.so"
    native.build(path)
    ops.enable(path)
    return native.load(path)
