"""What tests of the native library share."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from outrider.models import native, ops
from outrider.runtime import building

KERNELS = "OUTRIDER_TEST_KERNELS"


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The native kernels, built and enabled as operations; skips where they cannot be had. KERNELS in the environment names
    other instructions than the best (`test_native.py` runs tests anew with it)."""
    if not native.can_serve(torch.device("cpu"), torch.bfloat16):
        pytest.skip("needs AVX2 or AVX-512, and a C++ compiler")
    path = tmp_path_factory.mktemp("native") / "native.so"
    native.build(path, os.environ.get(KERNELS))
    ops.enable(path)
    return native.load(path)


@pytest.fixture(scope="session")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for the best instructions here, or for those that OUTRIDER_TEST_KERNELS names. Skips where it cannot be had."""
    kind = os.environ.get(KERNELS) or native.instructions()
    if kind is None or building.compiler() is None:
        pytest.skip("needs AVX2 or AVX-512, and a C++ compiler")
    prebuilt = building.PREBUILT / building.file_name(kind)
    if prebuilt.exists():
        return prebuilt
    path = tmp_path_factory.mktemp("runtime") / building.file_name(kind)
    building.build(path, kind)
    return path
