"""Files of saved conversations, a stranger's among them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import conversations
from outrider.errors import OutriderError

MESSAGES = [
    {"role": "system", "content": "Be."},
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "X\nL"},
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "chats"


def test_a_conversation_is_read_as_it_was_written(folder: Path) -> None:
    assert conversations.names() == []
    path = conversations.save("one.2", "demo", MESSAGES[:1])
    assert conversations.save("one.2", "demo", MESSAGES) == path
    assert conversations.names() == ["one.2"]
    assert conversations.load("one.2") == MESSAGES
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)


def content(**changes: Any) -> bytes:
    return json.dumps(
        {"outrider_chat": 1, "target": "demo", "messages": MESSAGES} | changes
    ).encode()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (content()[:-9], "is not JSON"),
        (b"[" * 1000, "nested deeper"),
        (b"[]", "is no conversation that /save wrote"),
        (content(outrider_chat=2), 'it must have "outrider_chat": 1'),
        (content(messages="Hi"), "'messages' must be a list, got str"),
        (content(messages=["Hi"]), "message 0 must have a role (system, user, assistant)"),
        (content(messages=[*MESSAGES, {"role": "user"}]), "message 3 must have a role"),
        (content(messages=[{"role": "tool", "content": "x"}]), "got {'role': 'tool'"),
        (content(messages=[{"role": "user", "content": [{"type": "text"}]}]), "a text as content"),
        (content(messages=[{"role": "user", "content": "x", "name": "y"}]), "message 0 must have"),
        (content(messages=[{"role": "user", "content": "\ud800"}]), "half of a surrogate pair"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_name(
    folder: Path, written: bytes, message: str
) -> None:
    folder.mkdir(parents=True)
    path = folder / "one.json"
    path.write_bytes(written)
    with pytest.raises(OutriderError) as refused:
        conversations.load("one")
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


def test_a_file_that_others_may_change_is_refused(folder: Path) -> None:
    path = conversations.save("one", "demo", MESSAGES)
    path.chmod(0o606)
    with pytest.raises(
        OutriderError, match=r"one\.json' can be changed by other users.*chmod go-w"
    ):
        conversations.load("one")


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / "one.json", 0o600)
    with pytest.raises(OutriderError, match="no regular file"):
        conversations.load("one")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", "a b", "x" * 101])
def test_names_that_mean_no_file_here(name: str) -> None:
    for use in (conversations.load, lambda name: conversations.save(name, "demo", MESSAGES)):
        with pytest.raises(OutriderError, match="a conversation's name has letters"):
            use(name)


def test_the_nearest_name_is_suggested() -> None:
    conversations.save("recipes", "demo", MESSAGES)
    with pytest.raises(OutriderError, match=r"Did you mean 'recipes'\?"):
        conversations.load("recipe")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "outrider").write_text("a file")
    with pytest.raises(OutriderError, match=r"one\.json cannot be written: Not a directory"):
        conversations.save("one", "demo", MESSAGES)
