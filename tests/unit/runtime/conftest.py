"""The native runtime's library, built once for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.models import native
from outrider.runtime import building


@pytest.fixture(scope="session")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for the best instructions here, or for those that OUTRIDER_TEST_KERNELS names. Skips where it cannot be had."""
    kind = os.environ.get("OUTRIDER_TEST_KERNELS") or native.instructions()
    if kind is None or building.compiler() is None:
        pytest.skip("needs AVX2 or AVX-512, and a C++ compiler")
    prebuilt = building.PREBUILT / building.file_name(kind)
    if prebuilt.exists():
        return prebuilt
    path = tmp_path_factory.mktemp("runtime") / building.file_name(kind)
    building.build(path, kind)
    return path
