"""`outrider reasoning`, as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.lab.result import read_result

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("some/model",), "give --draft"),
        (("demo", "--lengths", "2,13"), "between 1 and the longest, 12; got [13]"),
        (("demo", "--lengths", "two"), "--lengths takes whole numbers"),
        (("demo", "--temperature", ""), "one or several different temperatures"),
        (("demo", "--temperature", "-1"), "temperature"),
        (("demo", "--budget", "0"), "the budget must be more than 0"),
        (("demo", "--workload", "gsm9k"), "Did you mean 'gsm8k'?"),
        (("demo", "--workload", "embedded:code"), "no reasoning problems, only code"),
        (("demo", "--workload", "gsm8k", "--data", "/nowhere"), "does not exist"),
        (("demo", "--markdown", "/nowhere/page.md"), "the folder of /nowhere/page.md does not exist"),
        (("demo", "--resume"), "there is no interrupted run to resume"),
    ],
)
def test_what_cannot_be_studied(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Any, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    found = cli("reasoning", *arguments, "--runtime", "eager")
    assert found.code == 2, found.err
    assert found.err.startswith("error: ") or "\nerror: " in found.err
    assert words in found.err
    assert found.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_out_of_the_box(cli: Cli, tmp_path: Path) -> None:
    """The demo pair on its own problems: a result, a page, JSON on standard output, no journal left."""
    out, page = tmp_path / "result.json", tmp_path / "page.md"
    found = cli(
        "reasoning", "demo", "--problems", "2", "--max-new-tokens", "24", "--temperature", "0", "--longest", "3",
        "--no-own-weights", "--max-other-cpu", "10", "--runtime", "eager", "--out", str(out), "--markdown", str(page), "--json",
    )  # fmt: skip
    assert found.code == 0, found.err
    result = read_result(out)
    assert json.loads(found.out)["kind"] == result.kind == "reasoning"
    assert result.problems == 2  # type: ignore[attr-defined]
    assert result.workload.name == "demo"  # type: ignore[attr-defined]
    assert result.command.startswith("outrider")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Worked solutions: demo\n")
    assert "Decoding greedily, " in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.md", "result.json"]
    again = cli("report", str(out))
    assert again.code == 0
    assert "Worked solutions: demo" in again.out
