"""How options are typed: few as flags, all others as settings, each checked and refused by the name that it is typed by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer.main

from outrider.cli.app import VERBS, build_app
from outrider.cli.verbs import ELSEWHERE, FLAGS

MAX_SHOWN = 20  # --help itself is one of them
Cli = Callable[..., Any]


def commands() -> dict[str, Any]:
    """Every verb, those of the group `service` too."""
    top: Any = typer.main.get_command(build_app())
    return {verb: top.commands[verb] for verb in VERBS} | dict(top.commands["service"].commands)


def test_help_shows_few_options_and_says_where_the_others_are(cli: Cli) -> None:
    for name, command in commands().items():
        shown = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        settings = [one for one in command.params if one.opts[0].startswith("--set ")]
        assert len(shown) < MAX_SHOWN, name
        assert (command.epilog is not None) == bool(settings), name
        assert not settings or f"{len(settings)} further options" in command.epilog, name


def test_every_flag_is_one_of_some_verb() -> None:
    names = {one.name for command in commands().values() for one in command.params if one.param_type_name == "option"}
    assert FLAGS - names == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k", "3"], "'--top-k' is written --set top_k=VALUE"),
        (["--set", "temperature=1"], "'--set temperature' is written --temperature"),
        (["--set", "topk=3"], "Did you mean '--set top_k=VALUE'? See 'outrider generate --help-all'"),
        (["--set", "top-k=3"], "'--set top-k' is written --set top_k=VALUE"),
        (["--set", "top_k"], "--set takes NAME=VALUE, got 'top_k'"),
        (["--set"], "--set takes NAME=VALUE, got ''"),
        (["--set=top_k=few"], "--set top_k: a whole number is needed; got 'few'. See 'outrider generate --help-all'"),
        (["--set", "lossy=perhaps"], "--set lossy: true or false is needed; got 'perhaps'"),
        (["--temperature", "abc"], "--temperature: a number of at least 0 is needed; got 'abc'. See 'outrider generate --help'"),
        (["--temperature", "-1"], "--temperature: a number of at least 0 is needed; got '-1'"),
        (["--set", "runtime=fast"], "--set runtime: one of auto, native, graphs, eager is needed; got 'fast'"),
        (["--seed"], "--seed: a value is needed"),
        (["is", "blue"], "got 'is blue': a prompt of several words needs quotes around it"),
        (["--model", "x"], "unknown option '--model'"),
        (["--num-speculative-tokens", "5"], "unknown option '--num-speculative-tokens'. Did you mean '--num-draft-tokens'?"),
        (["--speculative-model", "x"], "Did you mean '--draft'?"),
        (["--compile", "off"], "unknown option '--compile'. See 'outrider generate --help'"),
    ],
)
def test_what_is_typed_otherwise(cli: Cli, fake: Any, arguments: list[str], message: str) -> None:
    result = cli("generate", "demo", "x", *arguments)
    assert (result.code, result.out, fake.asked) == (2, "", [])
    assert message in result.err


def test_settings_are_read_behind_the_prompt_but_not_in_it(cli: Cli, fake: Any) -> None:
    """Both ways to write one; behind -- words are words."""
    fake.has_chat_template = False
    assert cli("generate", "demo", "x", "--set=top_k=3", "--set", "stop=a=b", "--set", "stop=c").code == 0
    assert (fake.params[0].top_k, fake.params[0].stop) == (3, ["a=b", "c"])
    assert cli("generate", "demo", "--", "--set").code == 0
    assert fake.prompts == ["x", "--set"]


def test_options_of_other_engines_name_ours() -> None:
    ours = {one.opts[0].removeprefix("--") for one in commands()["generate"].params if one.param_type_name == "option"}
    assert set(ELSEWHERE.values()) <= ours
    assert not ours & set(ELSEWHERE)
