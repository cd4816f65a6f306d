"""`outrider explain`, as typed: options reach the library, none is accepted and ignored, and the
demo is explained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.lab.explain import explain as library
from outrider.lab.result import read_result
from outrider.lab.runner import Contender, Trace
from tests.helpers import byte_tokenizer

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the library was asked for; then Ctrl-C."""
    calls: list[dict[str, Any]] = []

    def explain(options: Any, configuration: Any, prompts_of: Any, params: Any, **more: Any) -> Any:
        one = {
            "options": options,
            "configuration": configuration,
            "prompts_of": prompts_of,
            "params": params,
        }
        calls.append({**one, **more})
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "explain", explain)
    return calls


def test_every_option_reaches_the_library(
    cli: Cli, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = cli(
        "explain",
        "demo",
        "--drafter",
        "draft-model tree=2x2",
        "--draft",
        "demo",
        "--num-draft-tokens",
        "6",
        "--verifier",
        "multi-round",
        "--temperature",
        "0.7",
        "--sampling",
        "top_p=0.9",
        "--seed",
        "4",
        "--max-tokens",
        "33",
        "--threads",
        "1",
        "--model-options",
        "runtime=eager",
        "--prompts",
        "demo",
        "--limit",
        "3",
        "--reading",
        "show_tokens=77",
        "--out",
        str(tmp_path / "e.json"),
    )
    assert found.code == 130
    call = asked[0]
    assert call["configuration"].label == "draft-model k=6 tree=2x2 verifier=multi-round"
    assert (call["options"].target, call["options"].draft, call["options"].threads) == (
        "demo",
        "demo",
        1,
    )
    assert (
        call["params"].temperature,
        call["params"].top_p,
        call["params"].seed,
        call["params"].max_tokens,
    ) == (0.7, 0.9, 4, 33)
    assert (call["max_shown"], call["workload"]) == (77, "demo")


@pytest.mark.parametrize(
    ("arguments", "drafter"),
    [
        (["demo"], "draft-model"),
        (["somewhere", "--draft", "there"], "draft-model"),
        (["somewhere"], "suffix"),
    ],
)
def test_auto_is_what_it_is_elsewhere(
    cli: Cli, asked: list[dict[str, Any]], arguments: list[str], drafter: str
) -> None:
    cli("explain", *arguments, "--prompts", "embedded")
    assert asked[0]["configuration"].drafter == drafter


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "hello", "--prompts", "demo"], "give one of them"),
        (["demo", "--drafter", "none"], "nothing to explain"),
        (["demo", "--verifier", "typical", "--model-options", "lossy=true"], "lossy"),
        (["demo", "--drafter", "nonsense"], "nonsense"),
        (["demo", "--prompts", "missing.jsonl"], "does not exist"),
        (["demo", "--out", "no/such/folder/x.html"], "does not exist"),
        (["demo", "--temperature", "-1"], "temperature"),
        (["demo", "--resume"], "there is no interrupted run to resume"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, arguments: list[str], words: str) -> None:
    found = cli("explain", *arguments)
    assert found.code == 2
    assert words in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize("named", [(), ("--draft", "some/head")])
def test_a_trained_head_is_explained(
    cli: Cli, asked: list[dict[str, Any]], named: tuple[str, ...]
) -> None:
    """--draft names the head, or the demo has one; sampled answers, too."""
    arguments = ["explain", "demo", "--drafter", "eagle3", *named, "--prompts", "demo"]
    cli(*arguments)
    assert asked[0]["options"].draft is None
    head = asked[0]["configuration"].drafter_options["head"]
    assert head == "some/head" if named else Path(head).is_dir()
    cli(*arguments, "--temperature", "1")
    assert asked[1]["params"].temperature == 1


@pytest.mark.parametrize(
    ("template", "more", "text"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}</s>",
            [],
            "<user>hi</s>",
        ),
        ("{{ messages[0].content }}!", ["--reading", "chat_template=false"], "hi"),
        (None, [], "hi"),
    ],
)
def test_a_prompt_is_asked_as_generate_asks_it(
    cli: Cli, asked: list[dict[str, Any]], template: str | None, more: list[str], text: str
) -> None:
    """Catches a chat model that is explained without its template: it ends its answer at once."""
    cli("explain", "somewhere", "hi", *more)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    [prompt] = asked[0]["prompts_of"](SimpleNamespace(tokenizer=tokenizer, context=64))
    assert tokenizer.decode(prompt.tokens) == text


def test_a_number_of_draft_tokens_means_nothing_where_nothing_drafts(
    cli: Cli, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Catches an option that is taken and ignored, also where a file of settings names the drafter."""
    file = tmp_path / "plain.json"
    file.write_text(
        '{"outrider_settings": 1, "target": "somewhere", "options": {"drafter": "none"}}'
    )
    for named in (["--drafter", "none"], ["--settings", str(file)]):
        refused = cli("explain", "somewhere", "hi", *named, "--num-draft-tokens", "5")
        assert (refused.code, asked) == (2, [])
        assert (
            "--num-draft-tokens means nothing with drafter 'none', which drafts nothing"
            in refused.err
        )
    assert (
        cli("explain", "somewhere", "hi", "--drafter", "ngram", "--num-draft-tokens", "5").code
        == 130
    )


@pytest.mark.slow
def test_the_demo(cli: Cli, tmp_path: Path) -> None:
    """One prompt of the user's own, as JSON, as a page, and as a file that can be read again."""
    found = cli(
        "explain",
        "demo",
        "Question: Tom has 3 pens and buys 4 more. How many pens has he?\nAnswer:",
        "--max-tokens",
        "40",
        "--json",
        "--out",
        "e.json",
        "--out",
        "e.html",
    )
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert (result["kind"], result["texts_read"], result["workload"]) == (
        "explain",
        1,
        "your prompt",
    )
    assert result["command"].startswith("outrider")
    assert sum(row["tokens"] for row in result["causes"]) == pytest.approx(
        result["ideal"] - result["emitted"], abs=1e-6
    )
    assert read_result(tmp_path / "e.json").kind == "explain"
    assert "Why drafts are rejected" in (tmp_path / "e.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_an_interrupted_run_continues(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C keeps what was decoded, a kill while a line is written all lines before it; resumed,
    the report is that of an uninterrupted run."""
    command = ["explain", "demo", "--limit", "3", "--max-tokens", "20", "--temperature", "0.8"]
    whole = json.loads(cli(*command, "--json", "--out", "whole.json").out)
    run = Contender.run
    decoded: list[Any] = []

    def counted(contender: Contender, *arguments: Any) -> list[Trace]:
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append(arguments)
        return run(contender, *arguments)

    monkeypatch.setattr(Contender, "run", counted)
    stopped = cli(*command, "--out", "e.json")
    assert stopped.code == 130
    assert "e.unfinished.jsonl: the same command with --resume continues" in stopped.err
    journal = tmp_path / "e.unfinished.jsonl"
    journal.write_text(journal.read_text(encoding="utf-8") + '{"key": "prom', encoding="utf-8")
    assert (
        "another plan (sampling)" in cli(*command, "--out", "e.json", "--seed", "7", "--resume").err
    )
    decoded.clear()
    resumed = cli(*command, "--out", "e.json", "--json", "--resume")
    assert (resumed.code, len(decoded), journal.exists()) == (0, 1, False)
    result = json.loads(resumed.out)
    for name in ("texts", "steps", "tested", "accepted", "ideal", "tau", "by_kind", "by_level"):
        assert result[name] == whole[name], name
