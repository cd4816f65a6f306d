"""`outrider replay`, as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.lab.replay import run
from outrider.lab.replay.replay_result import ReplayResult
from outrider.lab.result import read_result

Cli = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of twelve answers, in the current folder."""
    lines = [
        {"id": f"r{n}", "prompt": f"Question: Sam has {n} lemons.\nAnswer:", "task": "ab"[n % 2],
         "answer": f" Sam has {n} lemons.\n So Sam has {n} lemons.\n#### {n}"}
        for n in range(12)
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    (tmp_path / "costs.json").write_text('{"target": {"points": [{"num_tokens": 1, "seconds": 0.01}]}, "draft_fixed_s": 0.01}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def replayed(cli: Cli, *arguments: str) -> ReplayResult:
    found = cli("replay", "log.jsonl", "--tokenizer", "demo", *arguments, "--json")
    assert found.code == 0, found.err
    return ReplayResult.model_validate_json(found.out)


def test_every_drafter_that_needs_only_text(cli: Cli, here: Path) -> None:
    """Catches a default that leaves one out, a workload read twice, and a journal left behind."""
    found = replayed(cli)
    assert [one.configuration for one in found.configurations] == ["ngram", "suffix", "ngram-cache"]
    assert (found.workload, found.tokenizer, found.num_texts, found.order) == ("log.jsonl", "demo", 12, "logged")
    assert found.command.startswith("outrider")
    assert all(one.overall.emitted == found.num_tokens > 200 for one in found.configurations)
    assert all(one.overall.tau.value > 1.1 for one in found.configurations)
    assert set(found.configurations[0].by_task) == {"a", "b"}
    assert sorted(path.name for path in here.iterdir()) == ["costs.json", "log.jsonl"]


def test_lengths_costs_and_search(cli: Cli, here: Path) -> None:
    """Catches an option that is ignored."""
    asked = ["--drafters", "ngram max_ngram=3", "--sweep", "3", "--costs", "costs.json", "--search", "3", "--seed", "5"]
    found = replayed(cli, *asked)
    assert [one.configuration for one in found.configurations] == [f"ngram k={k} max_ngram=3" for k in (1, 2, 3)]
    for one in found.configurations:
        drafting = sum(one.overall.widths[1:])
        assert one.overall.speedup is not None
        assert one.overall.speedup.value == pytest.approx(one.overall.emitted / (one.overall.steps + drafting))
    (outcome,) = found.searches
    assert (outcome.num_trials, outcome.objective, outcome.start.configuration) == (3, "speedup", "ngram max_ngram=3")
    assert "k" in outcome.space
    assert "max_ngram" not in outcome.space
    assert found.seed == 5


def test_order_limit_and_rows(cli: Cli, here: Path) -> None:
    """Catches an option that is ignored."""
    logged, alone, together, shuffled = (
        replayed(cli, "--drafters", "suffix", *more)
        for more in ([], ["--set", "order=alone"], ["--max-num-seqs", "12"], ["--set", "order=shuffled", "--seed", "2"])
    )
    assert alone.configurations[0].overall.tau.value < logged.configurations[0].overall.tau.value
    assert together.configurations[0].overall.steps == alone.configurations[0].overall.steps  # nobody ends before another
    assert [one.order for one in (logged, alone, together, shuffled)] == ["logged", "alone", "logged", "shuffled"]
    assert replayed(cli, "--limit", "5").num_texts == 5


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
    assert "| ngram |" in (here / "r.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["log.jsonl"], "Missing option '--tokenizer'"),
        (["nothing.jsonl", "--tokenizer", "demo"], "does not exist"),
        (["log.jsonl", "--tokenizer", "demo", "--drafters", "draft-model"], "runs a draft model"),
        (["log.jsonl", "--tokenizer", "demo", "--drafters", "ngram k=auto"], "follows the clock"),
        (["log.jsonl", "--tokenizer", "demo", "--drafters", "ngram k=3", "--sweep", "4"], "leave one out"),
        (["log.jsonl", "--tokenizer", "demo", "--sweep", "65"], "from 1 to 64"),
        (["log.jsonl", "--tokenizer", "demo", "--search", "1"], "2 trials at least"),
        (["log.jsonl", "--tokenizer", "demo", "--search", "5", "--limit", "3"], "4 texts at least"),
        (["log.jsonl", "--tokenizer", "demo", "--costs", "costs.json", "--max-num-seqs", "2"], "num_rows=1"),
        (["log.jsonl", "--tokenizer", "."], "no usable tokenizer"),
        (["log.jsonl", "--tokenizer", "demo", "--resume"], "no interrupted run"),
        (["costs.json", "--tokenizer", "demo"], "costs.json"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, here: Path, arguments: list[str], message: str) -> None:
    """Catches a traceback, work before a refusal, and what a refused run leaves behind."""
    found = cli("replay", *arguments)
    assert found.code == 2
    last = found.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not list(here.glob("*unfinished*"))


def test_an_interrupted_run_goes_on(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches finished configurations that are replayed again, or lost."""
    real, started = run.replay, list[str]()

    def interrupted(texts: Any, configuration: Any, **options: Any) -> Any:
        started.append(configuration.label)
        if len(started) == 2:
            raise KeyboardInterrupt
        return real(texts, configuration, **options)

    monkeypatch.setattr(run, "replay", interrupted)
    found = cli("replay", "log.jsonl", "--tokenizer", "demo", "--out", "r.json")
    assert (found.code, found.out) == (130, "")
    assert "r.unfinished.jsonl" in found.err
    assert "--resume" in found.err
    found = cli("replay", "log.jsonl", "--tokenizer", "demo", "--out", "r.json", "--resume")
    assert found.code == 0, found.err
    assert "begun anew" not in found.err
    assert started == ["ngram", "suffix", "suffix", "ngram-cache"]
    assert [one.configuration for one in read_result(here / "r.json").configurations] == ["ngram", "suffix", "ngram-cache"]
    assert not (here / "r.unfinished.jsonl").exists()


def test_a_run_that_finished_nothing_leaves_nothing(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file that promises something to go on with."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "replay", interrupted)
    found = cli("replay", "log.jsonl", "--tokenizer", "demo")
    assert (found.code, found.err.strip().splitlines()[-1]) == (130, "interrupted")
    assert not list(here.glob("*unfinished*"))


def test_requests_without_an_answer(cli: Cli, here: Path) -> None:
    """Catches a log that is refused although one asked to skip, and one that is thinned out silently."""
    with (here / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "open", "prompt": "Question: and?"}\n')
    found = cli("replay", "log.jsonl", "--tokenizer", "demo")
    assert (found.code, "open: has no answer" in found.err) == (2, True)
    result = replayed(cli, "--set", "on_bad=skip", "--drafters", "ngram")
    assert result.skipped == ["open: has no answer"]
    assert any("open: has no answer" in note for note in result.notes)
