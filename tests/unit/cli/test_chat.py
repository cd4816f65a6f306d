"""`outrider chat`: history, commands, the end of input, errors in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cli import chat
from outrider.cli import messages as chat_messages
from outrider.errors import RequestError
from outrider.models.loading.generation_config import SamplingDefaults
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of saved conversations, this test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "outrider"


def test_piped_conversation(cli: Callable[..., Any], fake: Any) -> None:
    """Every line is a message; no prompt sign on stdout; the history grows; end of input ends the
    program."""
    result = cli("chat", "demo", stdin="first\n\nsecond\n")
    assert result.code == 0
    assert result.out == "Paris is the capital.\n" * 2
    assert fake.prompts[1] > fake.prompts[0], "the second prompt contains the first exchange"


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
    assert all(command in result.err for command in chat.COMMANDS if command != "/exit")


@pytest.mark.parametrize("leaving", ["/bye", "/quit", "/exit"])
def test_names_of_commands_as_ollama_has_them(
    cli: Callable[..., Any], fake: Any, leaving: str
) -> None:
    result = cli("chat", "demo", stdin=f"first\n/clear\nfirst\n/?\n{leaving}\nnever\n")
    assert (result.code, len(fake.prompts)) == (0, 2)
    assert fake.prompts[0] == fake.prompts[1]
    assert "/set parameter NAME VALUE" in result.err
    assert "Did you mean '/bye'?" in cli("chat", "demo", stdin="/bey\n").err


def test_parameters_are_set_in_the_middle(cli: Callable[..., Any], fake: Any) -> None:
    """From the next answer on, and only the one that was named."""
    lines = "temperature 0.7", "max-tokens 9", "stop ###", "seed none"
    typed = "".join(f"/set parameter {line}\n" for line in lines)
    result = cli("chat", "demo", "--top-k", "5", stdin=f"first\n{typed}second\n/show\n")
    assert result.code == 0, result.err
    before, after = fake.params
    assert (before.temperature, before.top_k, before.max_tokens) == (0.0, 5, None)
    assert (after.temperature, after.top_k, after.max_tokens) == (0.7, 5, 9)
    assert (after.stop, after.seed) == (["###"], None)
    shown = dict(line.split(None, 1) for line in result.err.splitlines() if "  " in line)
    assert (shown["temperature"].strip(), shown["max_tokens"].strip()) == ("0.7", "9")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set parameter temperature hot", "temperature must be a number, got 'hot'"),
        ("/set parameter temperature", "temperature must be a number, got ''"),
        ("/set parameter temperature -1", "temperature must be at least 0"),
        ("/set parameter repeat_penalty 1.1", "Did you mean 'repetition_penalty'?"),
        ("/set parameter n 2", "/set parameter has no 'n'. Available: max_tokens"),
        (
            "/set temperature 0.7",
            "'/set temperature 0.7' is written /set parameter temperature 0.7",
        ),
        ("/set sytem x", "/set has no 'sytem x'. Did you mean 'system'?"),
        ("/set", "/set has no ''. Available: parameter"),
        ("/clear all", "/clear takes nothing after it, got 'all'"),
        ("/save ../x", "a conversation's name has letters, digits, '.', '_' and '-', got '../x'"),
        ("/save", "a conversation's name has letters"),
        ("/load nowhere", "no saved conversation 'nowhere'"),
    ],
)
def test_a_command_that_cannot_be_obeyed_ends_a_pipe(
    cli: Callable[..., Any], fake: Any, line: str, message: str
) -> None:
    """What follows was meant to be asked otherwise."""
    result = cli("chat", "demo", stdin=f"{line}\nnever\n")
    assert (result.code, fake.prompts) == (2, [])
    assert message in result.err


def test_the_system_message_is_set_in_the_middle(cli: Callable[..., Any], fake: Any) -> None:
    cli("chat", "demo", "--system", "Be brief.", stdin="first\n")
    typed = "/system Be.\n/set system Be brief.\n/system\nfirst\n/clear\nfirst\n"
    result = cli("chat", "demo", stdin=typed)
    assert fake.prompts == [fake.prompts[0]] * 3
    assert "Be brief." in result.err


def test_saved_conversations(cli: Callable[..., Any], fake: Any, folder: Path) -> None:
    """What was said before is before the next message again, in another run, too."""
    cli("chat", "demo", "--system", "Be.", stdin="first\n/save one\nsecond\n")
    result = cli("chat", "demo", stdin="/load\n/load one\nsecond\n")
    assert (result.code, fake.prompts[1]) == (0, fake.prompts[2])
    assert "one\n3 messages loaded" in result.err
    assert (folder / "chats" / "one.json").stat().st_mode & 0o777 == 0o600


def test_a_conversation_that_the_template_refuses_is_not_loaded(
    cli: Callable[..., Any], fake: Any, folder: Path
) -> None:
    """Otherwise every further message would be refused."""
    cli("chat", "demo", stdin="first\n/save one\n")
    fake.refused = "system"
    file = folder / "chats" / "one.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"user"', '"system"'), "utf-8")
    result = cli("chat", "demo", stdin="/load one\nnever\n")
    assert (result.code, len(fake.prompts)) == (2, 1)
    assert "no system here" in result.err
    assert cli("chat", "demo", stdin="/system Be.\nnever\n").code == 2


def test_answers_are_not_cut_off(cli: Callable[..., Any], fake: Any) -> None:
    """Unless somebody said where: on the command line, or in the model's own file."""
    cli("chat", "demo", stdin="first\n")
    cli("chat", "demo", "--max-tokens", "7", stdin="first\n")
    fake.sampling_defaults = SamplingDefaults({"max_tokens": 9})
    cli("chat", "demo", stdin="first\n")
    assert [params.max_tokens for params in fake.params] == [None, 7, 9]


def test_the_full_context_is_said(cli: Callable[..., Any], fake: Any) -> None:
    fake.finish_reason = "length"
    said = cli("chat", "demo", stdin="first\n").err
    assert "the context of 6 tokens is full: 5 new tokens after 1 of the prompt; /clear" in said


def test_numbers_and_notes_are_for_those_who_ask(cli: Callable[..., Any], fake: Any) -> None:
    fake.notes.append("a note")
    quiet = cli("chat", "demo", stdin="first\n")
    assert (quiet.err, fake.notes_wanted) == ("", False)
    verbose = cli("chat", "demo", "--verbose", stdin="first\n/set quiet\nsecond\n")
    assert fake.notes_wanted
    assert verbose.err.count("τ") == 1
    shown = cli("chat", "demo", stdin="/show\n").err
    assert "note: a note" in shown
    assert "2.0 KiB for each token of context" in shown


@pytest.mark.parametrize(
    ("plain_s", "spent_s", "said"),
    [
        (0.5, 0.6, "6.0 tokens/s, 2.5x"),
        (0.5, 1.5, "6.0 tokens/s, 1.0x: drafts do not help here"),
        (None, 1.5, "6.0 tokens/s"),
    ],
)
def test_how_fast_an_answer_came(
    cli: Callable[..., Any],
    fake: Any,
    monkeypatch: pytest.MonkeyPatch,
    plain_s: float | None,
    spent_s: float,
    said: str,
) -> None:
    """A person is told the speed; and how much faster that is, where plain steps were timed."""
    steps = {} if plain_s is None else {0: plain_s}
    controls = iter(
        [
            {"by_rows": {}, "timed_s": 1.0},
            {"by_rows": {1: {"seconds": steps}}, "timed_s": 1.0 + spent_s},
        ]
    )
    monkeypatch.setattr(type(fake), "control", property(lambda self: next(controls)))
    answers = iter([chat_messages.Message("first"), None])
    monkeypatch.setattr(chat, "messages", lambda: SimpleNamespace(read=lambda: next(answers)))
    result = cli("chat", "demo")
    assert result.err.splitlines() == [
        "demo, 100 tokens of context",
        "drafts by ngram, 5 tokens a step",
        said,
    ]


def test_drafts_that_were_all_wrong_do_not_help() -> None:
    stats = DecodeStats(decode_s=1.0, first_tokens=1, emitted=4)
    assert chat._speed(stats, None) == "3.0 tokens/s"
    stats.drafted = 6
    assert chat._speed(stats, None) == "3.0 tokens/s: drafts do not help here"


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ((), "auto"),
        (("--num-draft-tokens", "3"), "3"),
        (("--drafter", "suffix k=3"), None),
        (("--drafter", "none"), None),
        (("--verifier", "token", "--seed", "1"), None),
        (("--draft-endpoint", "local"), None),
    ],
)
def test_draft_lengths_follow_the_clock_where_nothing_was_said(
    cli: Callable[..., Any], fake: Any, options: tuple[str, ...], asked: str | None
) -> None:
    """So a chat is never slower for its drafts, and knows how much faster it is."""
    assert cli("chat", "demo", *options, stdin="first\n").code == 0
    assert fake.asked[0][1].num_draft_tokens == asked


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
    conversation = chat.Conversation(fake, "demo", SamplingParams())
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
