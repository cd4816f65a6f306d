"""The cache folder: where it is, who may write to it, and what is read of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import cache
from outrider.cache import (
    cache_folder,
    keep_json,
    kept_json,
    make_folder,
    state_folder,
    why_unsafe,
    write_private,
)
from outrider.errors import CapabilityError
from outrider.models.loading.kept_weights import keep_weights, kept_weights
from outrider.runtime import library
from outrider.wellformed import regular_bytes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


def as_it_is(content: Any) -> Any:
    return content


@pytest.mark.parametrize(
    ("named", "users", "expected"),
    [
        ("", "", "{home}/.cache/outrider"),
        ("", "relative/folder", "{home}/.cache/outrider"),  # as the XDG specification has it
        ("", "/var/cache", "/var/cache/outrider"),
        ("", "~/other", "{home}/other/outrider"),
        ("~/own", "/var/cache", "{home}/own"),
    ],
)
def test_where_it_is(
    named: str, users: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable is one that is not set: otherwise a library in the folder where somebody
    works would be run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_CACHE", named)
    monkeypatch.setenv("XDG_CACHE_HOME", users)
    assert str(cache_folder()) == expected.format(home=tmp_path)


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ("", "{home}/.local/state/outrider"),
        ("relative/folder", "{home}/.local/state/outrider"),
        ("/var/state", "/var/state/outrider"),
    ],
)
def test_where_the_state_is(
    users: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", users)
    assert str(state_folder()) == expected.format(home=tmp_path)


def test_an_unsafe_state_folder_has_a_remedy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_private(state_folder() / "one", "text")
    assert (state_folder() / "one").stat().st_mode & 0o777 == 0o600
    state_folder().chmod(0o777)
    with pytest.raises(PermissionError, match="set XDG_STATE_HOME to a folder of your own"):
        write_private(state_folder() / "one", "another")
    assert "the state folder is not used" in caplog.text
    assert (state_folder() / "one").read_text(encoding="utf-8") == "text"


def test_a_kept_file_is_whole_or_none(folder: Path) -> None:
    file = folder / "parts" / "one.json"
    assert kept_json(file, as_it_is) is None
    keep_json(file, {"a": [1.5, None]}, max_files=1)
    assert kept_json(file, as_it_is) == {"a": [1.5, None]}
    assert kept_json(file, lambda content: content["b"]) is None
    file.write_text(file.read_text(encoding="utf-8").replace("1.5", "2.5"), encoding="utf-8")
    assert kept_json(file, as_it_is) is None
    assert (folder.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o700, 0o700)


def test_of_another_user_or_writable_by_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read from there and nothing written, the work goes on, and one line says which
    folder and what to do."""
    file = folder / "parts" / "one.json"
    keep_json(file, [1], max_files=1)
    for place in (folder, file.parent, file):
        place.chmod(0o777)
        assert kept_json(file, as_it_is) is None
        assert f"'{place}' can be changed by other users: chmod go-w '{place}'" in caplog.text
        if place != file:  # which would be replaced
            with pytest.raises(PermissionError):
                keep_json(file, [2], max_files=1)
        place.chmod(0o700)
        assert kept_json(file, as_it_is) == [1]
    number = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: number + 1)
        if number:  # what root owns is safe
            assert f"belongs to user {number}, not to user {number + 1}: set OUTRIDER_CACHE" in (
                why_unsafe(file) or ""
            )
    assert kept_json(file, as_it_is) == [1]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 3, (
        "once for each place"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user(folder: Path) -> None:
    keep_json(folder / "one.json", [1], max_files=1)
    os.chown(folder, 4321, -1)
    assert f"'{folder}' belongs to user 4321, not to user 0: set OUTRIDER_CACHE" in (
        why_unsafe(folder / "one.json") or ""
    )
    assert kept_json(folder / "one.json", as_it_is) is None


def test_a_folder_of_a_group_that_this_process_is_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that a group shares is meant to be written to; a group of strangers is not."""
    folder.mkdir()
    folder.chmod(0o775)
    assert why_unsafe(folder) is None
    monkeypatch.setattr(cache, "_groups", lambda: [-1])
    assert "can be changed by other users" in (why_unsafe(folder) or "")


@pytest.mark.parametrize("kind", ["zero", "pipe", "folder"])
def test_what_is_no_file_is_not_read(kind: str, folder: Path) -> None:
    """A link to /dev/zero has no end, and a pipe that nobody writes to never begins."""
    folder.mkdir()
    keep_weights(folder / "kept.weights", "a start", {"a": torch.ones(3)})
    (folder / "kept.weights").unlink()
    for name in ("one.json", "kept.weights"):
        if kind == "zero":
            (folder / name).symlink_to("/dev/zero")
        elif kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).mkdir()
    assert kept_json(folder / "one.json", as_it_is) is None
    assert kept_weights(folder / "kept.weights", "a start") == {}


def test_a_file_that_is_too_large_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_json(folder / "one.json", ["a" * 1000], max_files=1)
    monkeypatch.setattr("outrider.wellformed.regular_bytes.__defaults__", (100,))
    assert kept_json(folder / "one.json", as_it_is) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no sum", "pipe"])
def test_a_damaged_library_is_built_again(
    damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a library ends the process that loads it; one that was changed runs."""
    built: list[Path] = []

    def build(path: Path, kind: str) -> None:
        built.append(path)
        path.unlink(missing_ok=True)
        path.write_bytes(b"a library")

    monkeypatch.setattr(library, "compiler", lambda: "g++")
    monkeypatch.setattr(library, "of_this_cpu", lambda: "avx2")
    monkeypatch.setattr(library, "build", build)
    monkeypatch.setattr(library, "PREBUILT", folder / "none")
    path = library.find(folder)
    assert library.find(folder) == path
    assert len(built) == 1
    if damage == "cut":
        path.write_bytes(b"a lib")
    elif damage == "changed":
        path.write_bytes(b"a planted")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no sum":
        path.with_suffix(".sum").unlink()
    else:
        path.unlink()
        os.mkfifo(path)
    assert library.find(folder) == path
    assert (path.read_bytes(), len(built)) == (b"a library", 2)


def test_no_library_is_loaded_from_an_unsafe_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "PREBUILT", folder / "none")
    monkeypatch.setattr(library, "of_this_cpu", lambda: "avx2")
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(
        CapabilityError,
        match=f"no library is loaded from the cache, since '{folder}' can be changed",
    ):
        library.find(folder)
    assert f"'{folder}' can be changed" in (library.why_missing() or "")


def test_a_system_without_users_and_groups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' os has neither geteuid nor O_NONBLOCK; folders in a profile are their user's alone."""
    monkeypatch.delattr(os, "geteuid")
    monkeypatch.delattr(os, "O_NONBLOCK")
    make_folder(folder)
    (folder / "kept").write_bytes(b"content")
    assert why_unsafe(folder / "kept") is None
    assert regular_bytes(folder / "kept") == b"content"


def test_a_library_that_cannot_be_loaded_is_one_line(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.so").write_bytes(b"\x7fELF")
    with pytest.raises(CapabilityError, match="the native library cannot be loaded"):
        library.load(folder / "a.so")
