"""The table of families in docs/models.md says what is measured: some families always, all of them at night."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tools.models_table import makers, measured, written

SOME = ("gemma4_text", "gpt_oss", "llama", "mpt", "qwen3_5_text")
EACH = [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in makers()]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_table_has_the_families_that_the_tests_know() -> None:
    assert list(written()) == list(makers()), "run python -m tools.models_table"


@pytest.mark.parametrize("family", EACH)
def test_the_table_says_what_is_measured(family: str) -> None:
    served = measured(family, makers()[family]())
    line = written()[family]
    if served.runs_on == "torch" and served.cache == "ours":  # what rounds how there is the machine's
        assert line.split("|")[1:4] == served.line().split("|")[1:4]
    else:
        assert line == served.line()
