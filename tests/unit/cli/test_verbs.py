"""How options are typed: every one as a flag, checked and refused by the name that it is typed by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer.main

from outrider.cli.app import ALIASES, VERBS, build_app, unknown_option
from outrider.foreign import ABSENT, FOREIGN

MAX_SHOWN = 20  # --help itself is one of them
MAX_SLOTS = 287  # options of all verbs together
Cli = Callable[..., Any]


def commands() -> dict[str, Any]:
    """Every verb, those of the group `service` too."""
    top: Any = typer.main.get_command(build_app())
    return {verb: top.commands[verb] for verb in VERBS} | dict(top.commands["service"].commands)


def test_other_names_of_verbs(cli: Cli, fake: Any) -> None:
    """They are in the help, take the same options, and refuse the same ones."""
    top = cli("--help").out
    assert all(f"│ {alias} " in top for alias in ALIASES)
    assert cli("run", "demo", "-n", "7", stdin="first\n").out == "Paris is the capital.\n"
    assert fake.params[0].max_tokens == 7
    assert "Did you mean '--verbose'? See 'outrider run" in cli("run", "demo", "--verbos").err
    assert "--system" in cli("run", "--help").out
    assert cli("list", "--json").out == cli("ls", "models", "--json").out


def test_help_shows_few_options_and_says_how_to_see_the_others(cli: Cli) -> None:
    for name, command in commands().items():
        options = [
            one
            for one in command.params
            if one.param_type_name == "option" and one.name != "help_of"
        ]
        hidden = [one for one in options if one.hidden]
        assert len(options) - len(hidden) < MAX_SHOWN, name
        assert (command.epilog is not None) == bool(hidden), name
        assert not hidden or f"{len(hidden)} further options: --help=all" in command.epilog, name


def test_there_are_few_options() -> None:
    """Catches flags of studies that belong into the text of their group, see `verbs.gathered`."""
    slots = {
        name: sum(
            one.param_type_name == "option" and one.name != "help_of" for one in command.params
        )
        for name, command in commands().items()
    }
    assert sum(slots.values()) <= MAX_SLOTS, slots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "0.9"], "'--top-p' is written --sampling top_p=VALUE"),
        (["--no-chat-template"], "'--no-chat-template' is written --reading chat_template=VALUE"),
        (["--dtyp", "x"], "Did you mean '--model-options dtype=VALUE'?"),
        (["--sampling", "top-k=40 top_q=1"], "--sampling has no 'top_q'. Did you mean 'top_p'?"),
        (["--sampling", "top_k"], "--sampling takes NAME=VALUE with spaces between, got 'top_k'"),
        (["--sampling", "top_k=few"], "--sampling: top_k=few: Input should be a valid integer"),
        (["--sampling", "top_k=1", "--sampling", "top_k=2"], "two values for 'top_k'"),
        (["--sampling", "top_k='1"], "--sampling: No closing quotation"),
        (["--reading", "on_bad=ask"], "--reading: on_bad=ask: Input should be 'refuse' or 'skip'"),
        (["--server", "api=chat"], "--server api means nothing without a server's URL"),
    ],
)
def test_options_of_studies_share_texts(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli("bench", "demo", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_texts_of_options_are_in_the_help_of_their_group(cli: Cli) -> None:
    everything = " ".join(cli("bench", "--help=sampling").out.replace("│", " ").split())
    assert "top_k: Keep the K likeliest tokens" in everything
    assert "ignore_eos:" in everything


def test_help_of_a_group(cli: Cli) -> None:
    everything = cli("generate", "--help=all").out
    assert all(name in everything for name in ("--top-k", "--runtime", "--drafter", "--logprobs"))
    sampling = cli("generate", "--help=sampling").out
    assert "--top-k" in sampling
    assert "--runtime" not in sampling
    assert cli("generate", "demo", "x", "--help=Sampling").out == sampling
    wrong = cli("generate", "--help=samplign")
    assert wrong.code == 2
    assert "no such group of options. Did you mean 'sampling'?" in wrong.err
    for command in commands().values():
        for group in (command.epilog or "--help=").rpartition("--help=")[2].split("|"):
            assert group == "" or group.isalpha()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topk", "3"], "Did you mean '--top-k'? See 'outrider generate --help=all'"),
        (
            ["--top-k", "few"],
            "--top-k must be a whole number, got 'few'. See 'outrider generate --help=all'",
        ),
        (
            ["--temperature", "abc"],
            "--temperature must be a number, got 'abc'. See 'outrider generate",
        ),
        (
            ["--temperature", "-1"],
            "temperature must be at least 0 and at most 1e+30 (0, or below 0.0001, is greedy), got -1.0",
        ),
        (
            ["--runtime", "fast"],
            "--runtime must be one of auto, native, graphs, eager, got 'fast'",
        ),
        (["--seed"], "--seed: a value is needed"),
        (["--set", "top_k=3"], "unknown option '--set'"),
        (["is", "blue"], "got 'is blue': a prompt of several words needs quotes around it"),
        (["--target", "x"], "'--target' is written TARGET without a name in front"),
        (["--draft-max", "5"], "unknown option '--draft-max'. Did you mean '--num-draft-tokens'?"),
        (["--compile", "off"], "unknown option '--compile'. See 'outrider generate --help=all'"),
    ],
)
def test_what_is_typed_otherwise(cli: Cli, fake: Any, arguments: list[str], message: str) -> None:
    result = cli("generate", "demo", "x", *arguments)
    assert (result.code, result.out, fake.asked) == (2, "", [])
    assert message in result.err


def test_options_are_read_after_the_prompt_but_not_in_it(cli: Cli, fake: Any) -> None:
    """Both ways to write one; after -- words are words."""
    fake.has_chat_template = False
    assert (
        cli(
            "generate", "demo", "x", "--top-k=3", "--stop", "a=b", "--stop", "c", "--no-stream"
        ).code
        == 0
    )
    assert (fake.params[0].top_k, fake.params[0].stop) == (3, ["a=b", "c"])
    assert cli("generate", "demo", "--", "--help=all").code == 0
    assert fake.prompts == ["x", "--help=all"]


OTHERS = {  # verb -> an option of another engine, and what is said
    "serve": [
        ("--head", "Did you mean '--draft'?"), ("--draft-model", "Did you mean '--draft'?"),
        ("--tp", "runs a model on one device"),
        ("--gpu-memory-utilization", "Did you mean '--kv-memory'?"), ("--batch-size", "Did you mean '--max-num-seqs'?"),
        ("--speculative-algorithm", "Did you mean '--drafter'?"),
        ("--n-gpu-layers", "no layers are left out"),
    ],
    "bench": [("--max-num-seqs", "Did you mean '--batch-size'?"), ("--speculative-algorithm", "Did you mean '--drafters'?")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [(verb, *one) for verb, several in OTHERS.items() for one in several],
)
def test_options_of_other_engines_name_ours(cli: Cli, verb: str, given: str, message: str) -> None:
    result = cli(verb, "demo", given, "x")
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_no_other_engines_option_is_guessed_by_its_letters() -> None:
    """--head is not --threads: a name that is known elsewhere and means nothing here gets no
    suggestion."""
    assert unknown_option("--head", ["--threads", "target"]) == "unknown option '--head'"
    assert (
        unknown_option("--thread", ["--threads", "target"])
        == "unknown option '--thread'. Did you mean '--threads'?"
    )


def test_the_table_of_other_engines_names_options_of_ours() -> None:
    """An entry of a name that no verb has any more, and one that no command line reaches."""
    known = [
        {name.lstrip("-").replace("_", "-") for one in command.params for name in one.opts}
        for command in commands().values()
    ]
    assert set(FOREIGN) <= set().union(*known)
    for names in (*FOREIGN.values(), *ABSENT.values()):
        for foreign in names.split():
            assert any(foreign not in of_verb for of_verb in known), foreign
