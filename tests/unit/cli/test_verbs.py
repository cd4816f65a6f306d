"""How options are typed: few as flags, all others as settings, each checked and refused by the name that it is typed by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer.main

from outrider.cli.app import VERBS, build_app, unknown_option
from outrider.cli.verbs import FLAGS
from outrider.foreign import ABSENT, FOREIGN

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
        (["--model", "x"], "unknown option '--model'. Did you mean 'TARGET without a name in front'?"),
        (["--target", "x"], "'--target' is written TARGET without a name in front"),
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


OTHERS = {  # verb -> an option of another engine, and what is said
    "serve": [
        ("--head", "Did you mean '--draft'?"), ("--draft-model", "Did you mean '--draft'?"), ("-np", "option '-n'"),
        ("--max-model-len", "'--max-model-len' is written --set max_model_len=VALUE"), ("--tp", "runs a model on one device"),
        ("--gpu-memory-utilization", "Did you mean '--kv-memory'?"), ("--batch-size", "Did you mean '--max-num-seqs'?"),
        ("--ctx-size", "Did you mean '--set max_model_len=VALUE'?"), ("--speculative-config", "Did you mean '--drafter'?"),
        ("--n-gpu-layers", "no layers are left out"),
    ],
    "bench": [("--max-num-seqs", "Did you mean '--batch-size'?"), ("--speculative-algorithm", "Did you mean '--drafters'?")],
}  # fmt: skip


@pytest.mark.parametrize(("verb", "given", "message"), [(verb, *one) for verb, several in OTHERS.items() for one in several])
def test_options_of_other_engines_name_ours(cli: Cli, verb: str, given: str, message: str) -> None:
    result = cli(verb, "demo", given, "x")
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_no_other_engines_option_is_guessed_by_its_letters() -> None:
    """--head is not --threads: a name that is known elsewhere and means nothing here gets no suggestion."""
    assert unknown_option("--head", ["--threads", "target"]) == "unknown option '--head'"
    assert unknown_option("--thread", ["--threads", "target"]) == "unknown option '--thread'. Did you mean '--threads'?"


def test_the_table_of_other_engines_names_options_of_ours() -> None:
    """An entry of a name that no verb has any more, and one that no command line reaches."""
    known = [
        {name.removeprefix("--set ").lstrip("-").replace("_", "-") for one in command.params for name in one.opts}
        for command in commands().values()
    ]
    assert set(FOREIGN) <= set().union(*known)
    for names in (*FOREIGN.values(), *ABSENT.values()):
        for foreign in names.split():
            assert any(foreign not in of_verb for of_verb in known), foreign
