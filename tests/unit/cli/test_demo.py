"""`outrider demo`: the numbers of its table, and its fall-back when nothing can be compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outrider.cli import demo as demo_module
from outrider.cli.demo_runs import CONTENDERS, Series, held_out_problems, measure
from outrider.cli.options import ModelOptions
from outrider.demo.problems import is_held_out
from outrider.errors import CapabilityError
from outrider.outputs import Completion
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats


class Scripted:
    """Answers every prompt alike: `tokens` in `seconds`."""

    def __init__(self, text: str, tokens: list[int], seconds: float, log: list[str], name: str) -> None:
        self.text, self.tokens, self.seconds, self.log, self.name = text, tokens, seconds, log, name

    def generate(self, prompt: str, params: SamplingParams) -> list[Completion]:
        self.log.append(self.name)
        stats = DecodeStats(ttft_s=0.0, decode_s=self.seconds)
        stats.count_step(0, 0, len(self.tokens), rejected=False)
        return [Completion([1], self.text, self.tokens, "stop", [], None, stats, lossless=True, seed=0)]


def test_measure_compares_with_plain() -> None:
    """Speedup, identity and correctness are against plain decoding; a wrong token anywhere is counted."""
    chosen = held_out_problems(2)
    right = f"#### {chosen[0].answer}"
    log: list[str] = []
    series = [
        Series("none", Scripted(right, [1, 2], 1.0, log, "none")),
        Series("fast", Scripted(right, [1, 2], 0.5, log, "fast")),
        Series("wrong", Scripted("no idea", [1, 3], 2.0, log, "wrong")),
    ]
    ticks: list[int] = []
    rows = measure(series, chosen, SamplingParams(), 3, lambda: ticks.append(1))
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 2.0, 0.5])
    assert [row["num_identical"] for row in rows] == [2, 2, 0]
    assert rows[0]["num_correct"] >= 1
    assert rows[2]["num_correct"] == 0
    assert len(ticks) == 9
    assert log[3::2] == ["none", "fast", "wrong", "fast", "wrong", "none", "wrong", "none", "fast"], (
        "interleaved"
    )


def test_problems_are_held_out_and_always_the_same() -> None:
    first = held_out_problems(5)
    assert first == held_out_problems(5)
    assert all(is_held_out(problem.question) for problem in first)


def test_demo_streams_then_stops_without_a_table(cli: Callable[..., Any], fake: Any) -> None:
    result = cli("demo", "--questions", "2", "--problems", "0")
    assert result.code == 0
    assert result.out.count("‹Paris› is‹ the capital›.") == 2
    assert "tokens per target pass" in result.out
    assert [options.compile for _, options in fake.asked] == ["off"], (
        "the first answer must not wait for a compiler"
    )


def test_demo_json(cli: Callable[..., Any], fake: Any) -> None:
    found = json.loads(cli("demo", "--questions", "1", "--problems", "0", "--json").out)
    assert found["answers"][0]["text"] == "Paris is the capital.\n"
    assert found["rows"] == []


def test_without_a_compiler_auto_falls_back_and_on_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--compile on` must not silently measure something else."""

    def load(target: str, options: ModelOptions) -> object:
        if options.compile == "on":
            raise CapabilityError("cannot compile: no C++ compiler found")
        return object()

    monkeypatch.setattr(demo_module.session, "load_llm", load)
    series, notes = demo_module._open_all("demo", ModelOptions(), "auto")
    assert [one.drafter for one in series] == [one.label for one in CONTENDERS]
    assert "no C++ compiler" in notes[0]
    with pytest.raises(CapabilityError):
        demo_module._open_all("demo", ModelOptions(), "on")
