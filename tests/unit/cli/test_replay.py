"""`outrider replay`, as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.lab.replay.replay_result import ReplayResult
from outrider.lab.result import read_result
from tests.unit.report import results

Cli = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of twelve answers, in the current folder."""
    lines = [
        {
            "id": f"r{n}",
            "prompt": f"Question: Sam has {n} lemons.\nAnswer:",
            "task": "ab"[n % 2],
            "answer": f" Sam has {n} lemons.\n So Sam has {n} lemons.\n#### {n}",
        }
        for n in range(12)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    results.bench(results.cell(results.measured(1, results.interval(2, 1, 3)), batch_size=4)).write(
        tmp_path / "at-four.json"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def replayed(cli: Cli, *arguments: str) -> ReplayResult:
    found = cli("replay", "log.jsonl", "--tokenizer", "demo", *arguments, "--json")
    assert found.code == 0, found.err
    return ReplayResult.model_validate_json(found.out)


def test_every_drafter_that_needs_only_text(cli: Cli, here: Path) -> None:
    """Catches a default that leaves one out, and a workload read twice."""
    found = replayed(cli)
    assert [one.configuration for one in found.configurations] == ["ngram", "suffix", "ngram-cache"]
    assert (found.workload, found.tokenizer, found.num_texts) == ("log.jsonl", "demo", 12)
    assert found.command.startswith("outrider")
    assert all(one.overall.emitted == found.num_tokens > 200 for one in found.configurations)
    assert all(one.overall.tau.value > 1.1 for one in found.configurations)
    assert set(found.configurations[0].by_task) == {"a", "b"}
    assert sorted(path.name for path in here.iterdir()) == ["at-four.json", "log.jsonl"]


def test_costs_and_limit(cli: Cli, here: Path) -> None:
    """Catches an option that is ignored."""
    chain = results.measured(1, results.interval(2, 1, 3), step_s={0: 0.01, 1: 0.02, 6: 0.02})
    results.bench(results.cell(results.measured(0), chain)).write(here / "bench.json")
    found = replayed(
        cli,
        "--drafters",
        "ngram k=1, ngram k=3 max_ngram=3",
        "--result",
        "bench.json",
        "--limit",
        "5",
    )
    assert [one.configuration for one in found.configurations] == [
        "ngram k=1",
        "ngram k=3 max_ngram=3",
    ]
    assert found.num_texts == 5
    for one in found.configurations:
        speedup = one.overall.speedup
        assert speedup is not None
        assert one.overall.tau.value / 2 < speedup.value < one.overall.tau.value


def test_results_and_reports_are_written(cli: Cli, here: Path) -> None:
    """Catches a report that cannot be made again from its file."""
    files = ["--out", "r.json", "--out", "r.html", "--out", "r.md"]
    done = cli("replay", "log.jsonl", "--tokenizer", "demo", "--drafters", "ngram", *files)
    assert done.code == 0, done.err
    assert "Most tokens per target pass: 'ngram'" in done.out
    assert "tokens/s replayed" in done.err
    again = read_result(here / "r.json")
    assert isinstance(again, ReplayResult)
    assert "Replay of log.jsonl" in (here / "r.html").read_text(encoding="utf-8")
    assert "**ngram**" in (here / "r.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["log.jsonl"], "Missing option '--tokenizer'"),
        (["nothing.jsonl", "--tokenizer", "demo"], "does not exist"),
        (["log.jsonl", "--tokenizer", "demo", "--drafters", "draft-model"], "needs more than text"),
        (["log.jsonl", "--tokenizer", "demo", "--drafters", "ngram k=auto"], "follows the clock"),
        (["log.jsonl", "--tokenizer", "demo", "--result", "at-four.json"], "4 texts at once"),
        (["log.jsonl", "--tokenizer", "demo", "--result", "nowhere.json"], "cannot be read"),
        (["log.jsonl", "--tokenizer", "."], "no usable tokenizer"),
        (["at-four.json", "--tokenizer", "demo"], "at-four.json"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, here: Path, arguments: list[str], message: str) -> None:
    """Catches a traceback, and work before a refusal."""
    found = cli("replay", *arguments)
    assert found.code == 2
    last = found.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_requests_without_an_answer(cli: Cli, here: Path) -> None:
    """Catches a log that is refused although one asked to skip, and one that is thinned out
    silently."""
    with (here / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "open", "prompt": "Question: and?"}\n')
    found = cli("replay", "log.jsonl", "--tokenizer", "demo")
    assert (found.code, "open: has no answer" in found.err) == (2, True)
    result = replayed(cli, "--reading", "on_bad=skip", "--drafters", "ngram")
    assert result.skipped == ["open: has no answer"]
    assert any("open: has no answer" in note for note in result.notes)
