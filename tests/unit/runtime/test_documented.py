"""The tables of docs/models.md say what is measured: some families always, all of them at night."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tools.models_table import BEGIN, END, PAGE, makers, measured, tables, written

SOME = ("gemma4_text", "gpt_oss", "llama", "mpt", "qwen3_5_text")
EACH = [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in makers()]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_tables_are_of_the_families_that_the_tests_know() -> None:
    """Catches a table edited by hand, a family without a test, and one of the native tier that is
    listed as another."""
    runs = written()
    assert runs.keys() == makers().keys(), "run python -m tools.models_table"
    assert tables(runs) == PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


@pytest.mark.parametrize("family", EACH)
def test_the_tables_say_what_is_measured(family: str) -> None:
    assert written()[family] == measured(family, makers()[family]())
