"""The words that all kernels are written in give the same bits on AVX2, AVX-512 and ARM's NEON."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.unit.runtime import compiled

# AVX-512 rounds sums in its own way, tiny bf16 to 0
OTHERWISE = ("add_products bf16", "store_some bf16", "load_some bf16")


printed = partial(compiled.printed, "lanes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lanes")


@pytest.mark.slow
def test_neon_gives_the_bits_of_avx2(folder: Path) -> None:
    assert len(printed("avx2", folder)) > 20_000
    assert printed("neon", folder) == printed("avx2", folder)


@pytest.mark.slow
def test_avx512_gives_the_bits_of_avx2(folder: Path) -> None:
    ours, others = (
        [line for line in printed(kind, folder) if not line.startswith(OTHERWISE)]
        for kind in ("avx2", "avx512")
    )
    assert others == ours
