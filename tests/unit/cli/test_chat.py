"""`outrider chat`: history, commands, the end of input, errors in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from outrider.cli import chat
from outrider.errors import RequestError
from outrider.sampling.params import SamplingParams


def test_piped_conversation(cli: Callable[..., Any], fake: Any) -> None:
    """Every line is a message; no prompt sign on stdout; the history grows; end of input ends the program."""
    result = cli("chat", "demo", stdin="first\n\nsecond\n")
    assert result.code == 0
    assert result.out == "Paris is the capital.\n" * 2
    assert fake.prompts[1] > fake.prompts[0], "the second prompt contains the first exchange"


@pytest.mark.parametrize("typed", [b"one\\\rtwo\r", b"\x1b[200~one\rtwo\x1b[201~\r"], ids=["a backslash", "pasted"])
def test_a_message_of_several_lines(typed: bytes) -> None:
    """Catches code that is pasted and answered line by line."""
    pytest.importorskip("readline")
    program = "from outrider.cli import chat; import readline; print(repr(chat.read_message()))"
    terminal, its_side = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=its_side, stdout=its_side, env={**os.environ, "TERM": "xterm"}
    )
    os.close(its_side)
    _until(terminal, b"> ")
    os.write(terminal, typed)
    shown = _until(terminal, b"'one\\ntwo'")
    assert child.wait(timeout=60) == 0
    os.close(terminal)
    assert b"'one\\ntwo'" in shown


def _until(terminal: int, wanted: bytes) -> bytes:
    """What a terminal shows until it shows `wanted`, or its program has ended."""
    shown = b""
    while wanted not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux says so at the end
            break
    return shown


def test_commands(cli: Callable[..., Any], fake: Any) -> None:
    """/reset forgets, /stats adds up, unknown ones teach, /quit leaves the rest unread."""
    result = cli("chat", "demo", stdin="/stats\nfirst\n/stats\n/reset\nfirst\n/rset\n/help\n/quit\nnever\n")
    assert result.code == 0
    assert fake.prompts[0] == fake.prompts[1]
    assert len(fake.prompts) == 2
    assert "no answer yet" in result.err
    assert "5 tokens" in result.err
    assert "Did you mean '/reset'?" in result.err
    assert all(command in result.err for command in chat.COMMANDS)


def test_messages_in_another_encoding(cli: Callable[..., Any], fake: Any) -> None:
    """One line, no traceback; what was typed before was answered. Python reads such bytes as an error or as halves of letters."""
    result = cli("chat", "demo", stdin=b"M\xfcnchen\n")
    assert (result.code, fake.prompts) == (2, [])
    assert result.err.startswith("error: standard input is not UTF-8 text")
    result = cli("chat", "demo", "--system", "M\udcfcnchen", stdin="first\n")
    assert (result.code, result.err) == (2, "error: --system is not UTF-8 text: letter 2 is half of a surrogate pair\n")
    conversation = chat.Conversation(fake, SamplingParams(), None, False)
    with pytest.raises(RequestError, match="the message is not UTF-8 text"):
        conversation.answer("M\udcfcnchen")


def test_system_message_survives_reset(cli: Callable[..., Any], fake: Any) -> None:
    cli("chat", "demo", "--system", "Be brief.", stdin="first\n/reset\nfirst\n")
    cli("chat", "demo", stdin="first\n")
    assert fake.prompts[0] == fake.prompts[1] > fake.prompts[2]


def test_no_chat_template_is_reported_before_the_first_message(cli: Callable[..., Any], fake: Any) -> None:
    fake.has_chat_template = False
    result = cli("chat", "demo", stdin="hello\n")
    assert (result.code, result.out, fake.prompts) == (2, "", [])


def test_ctrl_c_stops_the_answer_not_the_program(cli: Callable[..., Any], fake: Any) -> None:
    presses = iter([True])
    fake.on_step = lambda number: os.kill(os.getpid(), signal.SIGINT) if next(presses, False) else None
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
    assert cli("chat", "demo", "--show-drafts", stdin="first\n").out == "‹Paris› is‹ the capital›.\n"
