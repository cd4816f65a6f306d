"""What tests of the native library share."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from outrider.instructions import of_this_cpu
from outrider.runtime import building, library

KERNELS = "OUTRIDER_TEST_KERNELS"


@pytest.fixture(scope="session")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for the best instructions here, or for those that OUTRIDER_TEST_KERNELS names. Skips
    where it cannot be had."""
    kind = os.environ.get(KERNELS) or of_this_cpu()
    if kind is None or building.compiler() is None:
        pytest.skip("needs a CPU that kernels are written for, and a C++ compiler")
    prebuilt = building.PREBUILT / building.file_name(kind)
    if prebuilt.exists():
        return prebuilt
    path = tmp_path_factory.mktemp("runtime") / building.file_name(kind)
    building.build(path, kind)
    return path


@pytest.fixture(scope="session")
def native_library(library_path: Path) -> ctypes.CDLL:
    """The library at `library_path`, loaded."""
    return library.load(library_path)
