"""`outrider report`: one file again, two side by side, and the exit code for continuous
integration."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from outrider.cli.lab import command_line
from outrider.lab import result as results
from outrider.lab.result import Comparable, Interval, Result
from outrider.report import render
from outrider.report.document import Document, Paragraph


class Sample(Result):
    """Stands in for `bench`."""

    kind: Literal["bench"] = "bench"
    speedup: Interval

    def comparable(self) -> list[Comparable]:
        return [Comparable("speedup", self.speedup, higher_is_better=True)]


def document(result: Sample) -> Document:
    return Document("A sample", "", [Paragraph(f"speedup {result.speedup.value}")])


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a result of the kind `bench`; returns its path."""
    module = type("module", (), {"Sample": Sample, "document": staticmethod(document)})
    monkeypatch.setattr(results, "import_module", lambda name: module)
    monkeypatch.setattr(render, "import_module", lambda name: module)
    monkeypatch.setitem(results.KINDS, "bench", "anywhere:Sample")

    def write(name: str, value: float, **fields: Any) -> str:
        interval = Interval(value=value, low=value - 0.01, high=value + 0.01)
        Sample(speedup=interval, **fields).write(tmp_path / name)
        return str(tmp_path / name)

    return write


def test_one_file_is_rendered_again(
    cli: Callable[..., Any], saved: Callable[..., str], tmp_path: Path
) -> None:
    html = tmp_path / "x.html"
    markdown = tmp_path / "x.md"
    result = cli("report", saved("a.json", 1.5), "--out", str(html), "--out", str(markdown))
    assert result.code == 0
    assert "speedup 1.5" in result.out
    assert "speedup 1.5" in html.read_text()
    assert markdown.read_text() == "# A sample\n\nspeedup 1.5\n"
    assert result.err == f"written: {html}\nwritten: {markdown}\n"


def test_two_files_are_compared_old_first(
    cli: Callable[..., Any], saved: Callable[..., str]
) -> None:
    result = cli("report", saved("old.json", 2.0), saved("new.json", 1.0))
    assert result.code == 0
    assert "x 0.500 [" in result.out
    assert "✗ worse" in result.out


def test_bad_input_is_reported_in_one_line(
    cli: Callable[..., Any], saved: Callable[..., str], tmp_path: Path
) -> None:
    good = saved("a.json", 1.0)
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "damaged.json").write_text(
        Path(good).read_text().replace('"value": 1.0', '"value": "much"')
    )
    for arguments, words in (
        ((str(tmp_path / "missing.json"),), "cannot be read"),
        ((str(tmp_path),), "cannot be read"),
        ((str(tmp_path / "no.json"),), "is no result of outrider"),
        ((str(tmp_path / "damaged.json"),), "is damaged: speedup.value"),
        ((good, "--out", str(tmp_path / "no" / "x.html")), "does not exist"),
        ((good, "--out", str(tmp_path)), "is a folder; name a file in it"),
        (
            (good, "--out", str(tmp_path / "again.json")),
            "--out writes .html or .md, by the name's end",
        ),
    ):
        result = cli("report", *arguments)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert words in result.err


def test_the_command_of_a_result_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["outrider", "bench", "demo", "--drafters", "suffix k=8, ngram"]
    monkeypatch.setattr("sys.argv", ["/bin/outrider", *typed[1:]])
    assert shlex.split(command_line()) == typed
