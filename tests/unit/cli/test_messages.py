"""Messages as they are typed, at a terminal of the test's own."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.cli.messages import Message

TALK = """
from outrider.cli import chat

class Echo:
    def answer(self, message):
        print("message", repr(message))

    def command(self, name):
        print("command", repr(name))

chat._talk(Echo())
print("bye")
"""
BRACKETS_ON = b"\x1b[?2004h"  # with which a program asks for marks around what is pasted
UP = b"\x1b[A"
CTRL_C = b"\x03"
CTRL_D = b"\x04"


class Terminal:
    """A terminal with a program in it, 60 columns wide."""

    def __init__(self, program: Sequence[str], state: Path) -> None:
        self._side, its_side = os.openpty()
        fcntl.ioctl(its_side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        environment = {
            "TERM": "xterm",
            "XDG_STATE_HOME": str(state),
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here says where the cursor is
        }
        self.process = subprocess.Popen(
            program,
            stdin=its_side,
            stdout=its_side,
            stderr=its_side,
            env={**os.environ, **environment},
        )
        os.close(its_side)
        self._timer = threading.Timer(60, self.process.kill)
        self._timer.start()
        self.shown = b""
        self._looked_at = 0

    def read_until(self, wanted: bytes) -> None:
        """Read on until that is shown, which it must before the program ends."""
        while (found := self.shown.find(wanted, self._looked_at)) < 0:
            try:
                self.shown += os.read(self._side, 4096)
            except OSError:  # Linux says so at the end
                raise AssertionError(f"never shown: {wanted!r}, but {self.shown!r}") from None
        self._looked_at = found + len(wanted)

    def type(self, keys: bytes) -> None:
        os.write(self._side, keys)

    def answer(self, keys: bytes, wanted: bytes) -> None:
        """Type something, and wait for what it brings and for the next prompt."""
        self.type(keys)
        self.read_until(wanted)
        self.read_until(b"> ")

    def leave(self) -> None:
        """End the program by Ctrl-D, which must be at a prompt."""
        self.type(CTRL_D)
        self.read_until(b"bye")
        assert self.process.wait(timeout=60) == 0

    def paste(self, text: bytes) -> None:
        """Marked where the program asked for that, as terminals do it."""
        assert BRACKETS_ON in self.shown
        self.type(b"\x1b[200~" + text + b"\x1b[201~")

    def close(self) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.wait()
        os.close(self._side)


@contextmanager
def talk(state: Path) -> Iterator[Terminal]:
    """A conversation that is ready for its first message."""
    terminal = Terminal([sys.executable, "-c", TALK], state)
    try:
        terminal.read_until(b"> ")
        yield terminal
    finally:
        terminal.close()


# what is pasted (text) or typed (bytes) -> what is taken
SEVERAL_LINES: dict[str, tuple[list[str | bytes], bytes]] = {
    "a backslash": ([b"one\\\rtwo\r"], rb"message 'one\ntwo'"),
    "a backslash pasted": (["one \\\rtwo", b"\r"], rb"message 'one \\\ntwo'"),
    "pasted": (["one\rtwo", b"\r"], rb"message 'one\ntwo'"),
    "quotes pasted": (['"""\rone\r  two\r"""', b"\r"], rb"message 'one\n  two'"),
    "quotes typed": ([b'"""one\r', b'  two"""\r'], rb"message 'one\n  two'"),
    "quotes alone": ([b'"""\r', b"  one\r", b"\r", b'two\r"""\r'], rb"message '  one\n\ntwo'"),
    "quotes and a slash": ([b'"""/reset"""\r'], b"message '/reset'"),
    "a path pasted": (["/etc/hosts:\rnot found", b"\r"], rb"message '/etc/hosts:\nnot found'"),
    "a docstring pasted": (
        ['"""Adds."""\rimport os', b"\r"],
        b"message '" + b'"' * 3 + b"Adds." + b'"' * 3 + rb"\nimport os'",
    ),
    "a command": ([b"/reset\r"], b"command '/reset'"),
}


@pytest.mark.parametrize("case", SEVERAL_LINES)
def test_a_message_of_several_lines(case: str, tmp_path: Path) -> None:
    """Catches code that is pasted and answered line by line."""
    keys, wanted = SEVERAL_LINES[case]
    with talk(tmp_path) as terminal:
        for key in keys:
            if isinstance(key, bytes):
                terminal.type(key)
            else:
                terminal.paste(key.encode())
        terminal.type(b"/quit\r")
        terminal.read_until(b"bye")
        assert terminal.process.wait(timeout=60) == 0
    assert wanted in terminal.shown


def test_inputs_are_kept_between_runs(tmp_path: Path) -> None:
    """A block of several lines is one of them; nobody else may read the file."""
    with talk(tmp_path) as terminal:
        terminal.paste(b"one\rtwo")
        terminal.answer(b"\r", b"message")
        terminal.answer(b"three\r", b"message")
        terminal.leave()
    file = tmp_path / "outrider" / "chat-history"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with talk(tmp_path) as terminal:
        terminal.answer(UP + UP + b"\r", b"message")
        terminal.leave()
    assert rb"message 'one\ntwo'" in terminal.shown
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_chat_without_a_file_of_inputs(tmp_path: Path) -> None:
    """What cannot be kept costs nobody the conversation."""
    (tmp_path / "outrider").write_text("a file where the folder would be")
    with talk(tmp_path) as terminal:
        terminal.answer(b"one\r", b"message 'one'")
        terminal.answer(UP + b"\r", b"message 'one'")
        terminal.leave()


def test_ctrl_c_clears_the_line(tmp_path: Path) -> None:
    with talk(tmp_path) as terminal:
        terminal.answer(b"unwanted" + CTRL_C, b"/bye or Ctrl-D leaves")
        terminal.answer(b"wanted\r", b"message 'wanted'")
        terminal.leave()
    assert b"message 'unwanted" not in terminal.shown


def test_a_line_between_quotes_is_no_command() -> None:
    assert Message.of(" /bye ") == ("/bye", True)
    assert Message.of('"""/bye"""') == ("/bye", False)
    assert Message.of('""""""') == ("", False)
