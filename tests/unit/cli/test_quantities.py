"""Numbers with units."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.cli.typed import bandwidth, flops, memory, numbers, parameters, probabilities
from outrider.errors import ConfigError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (parameters, "8B", 8_000_000_000), (parameters, "0.5b", 500_000_000), (parameters, "135 M", 135_000_000),
        (parameters, "1.2T", 1_200_000_000_000), (parameters, "14162304", 14_162_304), (parameters, "8e9", 8_000_000_000),
        (parameters, "0", 0), (bandwidth, "900GB/s", 9e11), (bandwidth, "3.35 TB/s", 3.35e12), (bandwidth, "40GiB/s", 40 * 2**30),
        (flops, "300TFLOPS", 3e14), (flops, "1.2PFLOP/s", 1.2e15), (flops, "800gflops", 8e11),
        (probabilities, "0.9,0.85", [0.9, 0.85]), (probabilities, "0.9", [0.9]), (memory, "2GB", 2e9), (memory, "0.5 mib", 2**19),
    ],
)  # fmt: skip
def test_units(read: Callable[[str, str], object], text: str, value: object) -> None:
    assert read("--x", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parameters, "8"), (parameters, "8X"), (parameters, ""), (parameters, "B"), (parameters, "-8B"), (parameters, "1.2.3B"),
        (parameters, "infB"), (bandwidth, "900"), (bandwidth, "900GB"), (bandwidth, "0GB/s"), (bandwidth, "900Gb/s per s"),
        (flops, "300"), (flops, "300T"), (flops, "0TFLOPS"), (probabilities, "0.9;0.8"),
        (probabilities, ""), (probabilities, "0.9,"), (memory, "0"), (memory, "-1GB"),
    ],
)  # fmt: skip
def test_errors_show_the_form(read: Callable[[str, str], object], text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--x (takes|must be).* like |must be above 0"):
        read("--x", text)


def test_no_memory_where_none_is_an_answer() -> None:
    assert memory("--x", "0", or_none=True) == 0


def test_numbers_with_commas() -> None:
    assert numbers("--x", "1, 2,1", int) == [1, 2]
    assert numbers("--x", "", int) == []
    with pytest.raises(ConfigError, match="--x takes whole numbers"):
        numbers("--x", "1,", int)
