"""`outrider demo`: answers with marks, then one table made by `bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outrider.build import Options
from outrider.cli import demo as demo_module
from outrider.cli.options import ModelOptions
from outrider.lab.bench import run as bench_run
from outrider.lab.bench.plan import Plan


def test_ctrl_c_without_a_table_is_reported(
    cli: Callable[..., Any], fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "_measure", stopped)
    found = cli("demo", "--questions", "0")
    assert found.code == 130
    assert "there is no table yet" in found.err


def test_more_problems_than_there_are(cli: Callable[..., Any]) -> None:
    found = cli("demo", "--limit", "65")
    assert found.code == 2
    assert "there are 64 held-out problems, got --limit 65" in found.err


def test_demo_streams_then_stops_without_a_table(cli: Callable[..., Any], fake: Any) -> None:
    result = cli("demo", "--questions", "2", "--limit", "0")
    assert result.code == 0
    assert result.out.count("‹Paris› is‹ the capital›.") == 2
    assert "tokens per target pass" in result.out
    assert [options.runtime for _, options in fake.asked] == ["auto"]


def test_demo_json(cli: Callable[..., Any], fake: Any) -> None:
    found = json.loads(cli("demo", "--questions", "1", "--limit", "0", "--json").out)
    assert found["answers"][0]["text"] == "Paris is the capital.\n"
    assert found["bench"] is None


def test_every_drafter_is_measured_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of another runtime than the one named, or of other rounds, would be a silent one."""
    asked: list[tuple[Options, Plan]] = []

    def run(options: Options, plan: Plan, *rest: Any, **more: Any) -> str:
        asked.append((options, plan))
        return "result"

    monkeypatch.setattr(bench_run, "run_bench", run)
    assert demo_module._measure(ModelOptions(runtime="eager", threads=1), 5, 2) == "result"
    ((options, plan),) = asked
    assert (options.runtime, options.threads) == ("eager", 1)
    assert (plan.prompts, plan.rounds, len(plan.configurations)) == (5, 2, 11)
