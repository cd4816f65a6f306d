"""`outrider chat`: history, commands, the end of input, errors in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from outrider.cli import chat
from outrider.errors import RequestError
from outrider.sampling.params import SamplingParams


def test_piped_conversation(cli: Callable[..., Any], fake: Any) -> None:
    """Every line is a message; no prompt sign on stdout; the history grows; end of input ends the
    program."""
    result = cli("chat", "demo", stdin="first\n\nsecond\n")
    assert result.code == 0
    assert result.out == "Paris is the capital.\n" * 2
    assert fake.prompts[1] > fake.prompts[0], "the second prompt contains the first exchange"


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


def pasted(terminal_asked: bytes, text: bytes) -> bytes:
    """What a terminal sends for a paste: with marks around it only where the program asked for
    them."""
    return b"\x1b[200~" + text + b"\x1b[201~" if BRACKETS_ON in terminal_asked else text


# what is pasted (text) or typed (bytes) -> what is taken
SEVERAL_LINES: dict[str, tuple[list[str | bytes], bytes]] = {
    "a backslash": ([b"one\\\rtwo\r"], rb"message 'one\ntwo'"),
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
def test_a_message_of_several_lines(case: str) -> None:
    """Catches code that is pasted and answered line by line."""
    pytest.importorskip("readline")
    keys, wanted = SEVERAL_LINES[case]
    terminal, its_side = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", TALK],
        stdin=its_side,
        stdout=its_side,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(its_side)
    timer = threading.Timer(60, child.kill)
    timer.start()
    asked = _until(terminal, b"> ")
    for key in [*keys, b"/quit\r"]:
        os.write(terminal, key if isinstance(key, bytes) else pasted(asked, key.encode()))
    shown = _until(terminal, b"bye")
    timer.cancel()
    assert child.wait(timeout=60) == 0
    os.close(terminal)
    assert wanted in shown


def _until(terminal: int, wanted: bytes) -> bytes:
    """What a terminal shows until it shows `wanted`, or its program has ended."""
    shown = b""
    while wanted not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux says so at the end
            break
    return shown


def test_quotes_in_a_pipe(cli: Callable[..., Any], fake: Any) -> None:
    """Several lines of a file are one message; one that does not end is no message."""
    result = cli("chat", "demo", stdin='"""one\n\ntwo"""\nthree\n')
    assert result.code == 0
    assert len(fake.prompts) == 2
    result = cli("chat", "demo", stdin='"""one\ntwo\n')
    assert result.code == 2
    assert 'standard input ends in a message that """ begins' in result.err
    assert len(fake.prompts) == 2


def test_commands(cli: Callable[..., Any], fake: Any) -> None:
    """/reset forgets, /stats adds up, unknown ones teach, /quit leaves the rest unread."""
    result = cli(
        "chat", "demo", stdin="/stats\nfirst\n/stats\n/reset\nfirst\n/rset\n/help\n/quit\nnever\n"
    )
    assert result.code == 0
    assert fake.prompts[0] == fake.prompts[1]
    assert len(fake.prompts) == 2
    assert "no answer yet" in result.err
    assert "5 tokens" in result.err
    assert "Did you mean '/reset'?" in result.err
    assert all(command in result.err for command in chat.COMMANDS)


def test_messages_in_another_encoding(cli: Callable[..., Any], fake: Any) -> None:
    """One line, no traceback; what was typed before was answered. Python reads such bytes as an
    error or as halves of letters."""
    result = cli("chat", "demo", stdin=b"M\xfcnchen\n")
    assert (result.code, fake.prompts) == (2, [])
    assert result.err.startswith("error: standard input is not UTF-8 text")
    result = cli("chat", "demo", "--system", "M\udcfcnchen", stdin="first\n")
    assert (result.code, result.err) == (
        2,
        "error: --system is not UTF-8 text: letter 2 is half of a surrogate pair\n",
    )
    conversation = chat.Conversation(fake, SamplingParams(), None, False)
    with pytest.raises(RequestError, match="the message is not UTF-8 text"):
        conversation.answer("M\udcfcnchen")


def test_system_message_survives_reset(cli: Callable[..., Any], fake: Any) -> None:
    cli("chat", "demo", "--system", "Be brief.", stdin="first\n/reset\nfirst\n")
    cli("chat", "demo", stdin="first\n")
    assert fake.prompts[0] == fake.prompts[1] > fake.prompts[2]


def test_no_chat_template_is_reported_before_the_first_message(
    cli: Callable[..., Any], fake: Any
) -> None:
    fake.has_chat_template = False
    result = cli("chat", "demo", stdin="hello\n")
    assert (result.code, result.out, fake.prompts) == (2, "", [])


def test_ctrl_c_stops_the_answer_not_the_program(cli: Callable[..., Any], fake: Any) -> None:
    presses = iter([True])
    fake.on_step = lambda number: (
        os.kill(os.getpid(), signal.SIGINT) if next(presses, False) else None
    )
    result = cli("chat", "demo", stdin="first\nsecond\n")
    assert result.code == 0
    assert result.out == "Paris is\nParis is the capital.\n"
    assert "stopped by you" in result.err


def test_an_answer_that_is_cut_off_says_so(cli: Callable[..., Any], fake: Any) -> None:
    """A sentence without its end looks like a fault of the model."""
    assert "cut off" not in cli("chat", "demo", stdin="first\n").err
    fake.finish_reason = "length"
    result = cli("chat", "demo", "--max-tokens", "5", stdin="first\n")
    assert "cut off after 5 tokens, the most for one answer: --max-tokens sets it" in result.err
    assert "the context of 6 tokens is full" in cli("chat", "demo", stdin="first\n").err


def test_an_error_ends_a_piped_conversation(cli: Callable[..., Any], fake: Any) -> None:
    def fail(number: int) -> None:
        raise RequestError("prompt 0 has 5000 tokens; the context holds 1024")

    fake.on_step = fail
    result = cli("chat", "demo", stdin="first\nsecond\n")
    assert result.code == 2
    assert len(fake.prompts) == 1


def test_show_drafts(cli: Callable[..., Any], fake: Any) -> None:
    assert (
        cli("chat", "demo", "--show-drafts", stdin="first\n").out == "‹Paris› is‹ the capital›.\n"
    )
