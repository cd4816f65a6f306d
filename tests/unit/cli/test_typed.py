"""Numbers with units."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.cli.typed import by_count, memory, numbers, probabilities
from outrider.errors import ConfigError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (probabilities, "0.9,0.85", [0.9, 0.85]),
        (probabilities, "0.9", [0.9]),
        (memory, "2GB", 2e9),
        (memory, "0.5 mib", 2**19),
        (by_count, "5:1.05,9:1.4", {5: 1.05, 9: 1.4}),
    ],
)
def test_units(read: Callable[[str, str], object], text: str, value: object) -> None:
    assert read("--x", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (probabilities, "0.9;0.8"),
        (probabilities, ""),
        (probabilities, "0.9,"),
        (memory, "0"),
        (memory, "-1GB"),
        (memory, "8X"),
        (memory, ""),
        (memory, "1.2.3GB"),
        (memory, "inf"),
        (by_count, "5"),
        (by_count, "a:1"),
        (by_count, ""),
    ],
)
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
