"""`outrider ls drafters-for MODEL`, and what the other verbs make of `--draft auto`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from outrider.cli import session
from outrider.cli.bench import _compared
from outrider.cli.options import MachineOptions, ModelOptions
from outrider.cli.tune import TunedModels, _drafts
from outrider.configuration import Configuration
from outrider.drafters import companions
from outrider.drafters.companions import Companion
from outrider.models.heads.eagle_files import save_eagle
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama, word_tokenizer
from tests.hub_cache import put

TARGET = "someone/Tiny"
MODEL = tiny_llama(257, num_hidden_layers=3)
Cli = Callable[..., Any]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's client with a target; the table knows three drafters of it, of which two
    are there, and one fits."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    put(tmp_path, TARGET, lambda folder: save_checkpoint(folder, MODEL, byte_tokenizer()))
    kinds = {"x/absent": "block", "x/other": "draft-model", "x/head": "eagle3"}
    entries = [Companion(TARGET, *pair, "mit", "https://example.org") for pair in kinds.items()]
    monkeypatch.setattr(companions, "published", lambda: tuple(entries))
    small = tiny_llama(50)
    put(tmp_path, "x/other", lambda folder: save_checkpoint(folder, small, word_tokenizer(50)))
    head = random_eagle("eagle3", MODEL.config, draft_vocab=40)
    put(tmp_path, "x/head", lambda folder: save_eagle(head, folder))
    return tmp_path


def test_the_table_of_a_model(cli: Cli, cache: Path) -> None:
    shown = cli("ls", "drafters-for", TARGET)
    assert shown.code == 0
    rows = [line.split()[:5] for line in shown.out.splitlines() if line.startswith("x/")]
    assert rows == [
        ["x/absent", "block", "mit", "no", "-"],
        ["x/other", "draft-model", "mit", "yes", "no"],
        ["x/head", "eagle3", "mit", "yes", "yes"],
    ]
    assert "note: x/other: the draft " in shown.err
    assert "50 against 257 tokens" in shown.err
    assert shown.err.count("note: the hub is out of reach") == 1


def test_json(cli: Cli, cache: Path) -> None:
    result = json.loads(cli("ls", "drafters-for", TARGET, "--json").out)
    assert result["drafters_for"] == TARGET
    assert result["drafters"][2] == {
        "target": TARGET,
        "drafter": "x/head",
        "kind": "eagle3",
        "licence": "mit",
        "source": "https://example.org",
        "is_here": True,
        "fits": True,
        "misfit": None,
    }
    assert [row["fits"] for row in result["drafters"]] == [None, False, True]


def test_a_model_that_is_elsewhere(cli: Cli, cache: Path) -> None:
    """The table knows its drafters; whether they fit cannot be told, and nothing is fetched."""
    shown = cli("ls", "drafters-for", "another/Tiny-GGUF:Q4_K_M")
    assert [line.split()[3:5] for line in shown.out.splitlines() if line.startswith("x/")] == [
        ["no", "-"],
        ["yes", "-"],
        ["yes", "-"],
    ]
    assert "is not on this machine, so what fits it cannot be known" in shown.err
    nobody = cli("ls", "drafters-for", "someone/else")
    assert (nobody.code, nobody.out) == (0, "")
    assert "no drafter of 'someone/else' is known: outrider train makes one" in nobody.err


def test_what_comes_with_a_model(cli: Cli, cache: Path) -> None:
    rows = json.loads(cli("ls", "drafters-for", "demo", "--json").out)["drafters"]
    assert {row["kind"] for row in rows} >= {"draft-model", "eagle3", "block", "medusa"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafters-for"], "ls drafters-for takes a model: outrider ls drafters-for MODEL"),
        (["drafters", "x"], "ls drafters takes nothing after it, got 'x'"),
        (["drafter-for"], "Did you mean 'drafters-for'?"),
        (["drafters-for", "./nowhere"], "no model folder at './nowhere'"),
        (["drafters-for", "nowhere"], "no model 'nowhere'"),
    ],
)
def test_what_is_typed_otherwise(cli: Cli, cache: Path, arguments: list[str], message: str) -> None:
    result = cli("ls", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["service", "draft", "--draft", "auto"], "a draft service serves targets"),
        (
            ["estimate", "--alpha", "0.8", "--c", "0.1", "--target", "demo", "--draft", "auto"],
            "--draft auto looks for what runs here, and estimate runs nothing",
        ),
    ],
)
def test_auto_is_refused_where_there_is_no_target(
    cli: Cli, arguments: list[str], message: str
) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert message in result.err


def test_bench_compares_the_head_that_was_found(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, compared = _compared(TARGET, None, MachineOptions(draft="auto"))
    assert machine.draft is None
    assert compared[0].drafter == "eagle3"
    assert Path(compared[0].drafter_options["head"]).is_dir()
    assert compared[1].num_draft_tokens == "auto"
    assert "note: --draft auto: x/head drafts" in capsys.readouterr().err
    named = ["suffix k=3", "eagle3 k=2"]
    _, compared = _compared(TARGET, named, MachineOptions(draft="auto"))
    assert compared[0] == Configuration.parse("suffix k=3")
    assert set(compared[1].drafter_options) == {"head"}
    machine, compared = _compared("demo", None, MachineOptions(draft="auto"))
    assert (machine.draft, compared[0].drafter) == (None, "draft-model")


def test_tune_is_handed_what_was_found(cache: Path) -> None:
    found = _drafts(TARGET, TunedModels(draft=["auto", "mine"]))
    assert found[0] == "mine"
    assert Path(found[1]).is_dir()
    assert _drafts(TARGET, TunedModels(draft=["mine"])) == ["mine"]
    assert _drafts("someone/else", TunedModels(draft=["auto"])) == []


@pytest.mark.parametrize(
    ("terminal", "options", "drafter", "is_offered"),
    [
        (True, ModelOptions(), "suffix", True),
        (False, ModelOptions(), "suffix", False),
        (True, ModelOptions(), "mtp", False),
        (True, ModelOptions(draft="auto"), "suffix", False),
        (True, ModelOptions(drafter="suffix"), "suffix", False),
    ],
)
def test_a_person_is_offered_a_drafter_in_one_line(
    terminal: bool,
    options: ModelOptions,
    drafter: str,
    is_offered: bool,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in a pipe, and not where it was said who drafts."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    llm: Any = SimpleNamespace(config={"drafter": drafter})
    session._offer(TARGET, options, llm)
    said = capsys.readouterr().err
    assert ("x/head is here" in said) == is_offered
    assert said.count("note:") == is_offered
