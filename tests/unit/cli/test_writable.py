"""What cannot be written is reported before any work: files, folders, and every verb that leaves
some."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.app import run
from outrider.cli.typed import check_file, check_folder
from outrider.errors import ConfigError


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New ones, old ones and devices are fine; nothing is written by looking."""
    old = tmp_path / "old.json"
    old.touch()
    monkeypatch.chdir(tmp_path)
    for path in (old, tmp_path / "new.json", Path("here.json"), Path("/dev/null")):
        check_file(path)
    assert list(tmp_path.iterdir()) == [old]
    for path, message in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "none" / "x.json", "does not exist; create it first"),
        (old / "x.json", "does not exist; create it first"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_file(path)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There or not there yet, however deep; not a file, and not below one."""
    old = tmp_path / "old.json"
    old.touch()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path / "a" / "b", Path("c/d")):
        check_folder(path)
    assert list(tmp_path.iterdir()) == [old]
    for path in (old, old / "run", Path("old.json")):
        with pytest.raises(ConfigError, match=r"old\.json is a file; a folder is needed there"):
            check_folder(path)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the file where there is one, else of the folder that would get it (who tests may be
    root, who may do all)."""
    asked: list[Path] = []

    def refuse(path: Path, mode: int) -> bool:
        asked.append(Path(path))
        return False

    (tmp_path / "old").touch()
    monkeypatch.setattr(os, "access", refuse)
    for check, path in (
        (check_file, tmp_path / "old"),
        (check_file, tmp_path / "new"),
        (check_folder, tmp_path / "a" / "b"),
    ):
        with pytest.raises(ConfigError, match="cannot be written: no permission"):
            check(path)
    assert asked == [tmp_path / "old", tmp_path, tmp_path]


VERBS = {
    "bench": ["bench", "nowhere"], "tune": ["tune", "nowhere"], "certify": ["certify", "nowhere"],
    "explain": ["explain", "nowhere", "x"],
    "replay": ["replay", "nowhere", "--tokenizer", "nowhere"], "estimate": ["estimate", "--alpha", "0.8", "--c", "0.1"],
    "report": ["report", "nowhere.json"],
}  # fmt: skip
OUTPUTS = [*((verb, "--out") for verb in VERBS), ("tune", "--settings-out")]


@pytest.mark.parametrize(("verb", "option"), OUTPUTS)
def test_every_verb_looks_first(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str
) -> None:
    """Before it finds that there is no such model, log or result."""
    monkeypatch.chdir(tmp_path)
    done = cli(*VERBS[verb], option, str(tmp_path))
    assert (done.code, done.out) == (2, "")
    if (verb, option) == ("bench", "--out"):  # it takes a folder, and goes on to the model
        assert "is a folder" not in done.err
    else:
        assert done.err == f"error: {tmp_path} is a folder; name a file in it\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_bench_that_cannot_be_made(cli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    done = cli("bench", "nowhere", "--out", str(file / "folder"))
    assert done.code == 2
    assert done.err == f"error: {file} is a file; a folder is needed there. Give another --out\n"
    done = cli("bench", "http://127.0.0.1:1", "--out", str(tmp_path))
    assert done.code == 2
    assert "is a folder; name a file in it" in done.err, "a server does not show its steps"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "draft-model", "--target", "demo", "--prompts", "demo:9"],
        ["export", "head", "--target", "demo", "--to", "raw"],
    ],
    ids=["train", "export"],
)
def test_a_file_where_a_folder_is_to_be(
    cli: Callable[..., Any], tmp_path: Path, arguments: list[str]
) -> None:
    """One line, before a model is read, and the file as it was."""
    file = tmp_path / "drafter.json"
    file.write_text("mine")
    done = cli(*arguments, "--out", str(file))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {file} is a file; a folder is needed there. Give another --out\n"
    assert file.read_text() == "mine"


def test_export_looks_at_the_drafter_before_it_loads_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not there is refused at once, and without a line that says it is being
    written."""
    from outrider.train.export import Target

    monkeypatch.setattr(Target, "load", lambda *names: pytest.fail("the target was loaded"))
    assert (
        run(
            [
                "export",
                str(tmp_path / "none"),
                "--target",
                "demo",
                "--to",
                "raw",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "there is no folder" in error
    assert "writing" not in error
