"""`outrider demo`: the numbers of its table, and its fall-back when nothing can be compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cli import demo as demo_module
from outrider.cli import demo_runs
from outrider.cli.demo_runs import CONTENDERS, Series, disturbed, held_out_problems, measure
from outrider.cli.options import ModelOptions
from outrider.outputs import Completion
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats


class Scripted:
    """Answers every prompt alike: a step with the first token, which takes a second, then the others in `seconds` of each run."""

    def __init__(
        self, text: str, tokens: list[int], seconds: float | Callable[[int], float], log: list[str], name: str
    ) -> None:
        self.text, self.tokens, self.log, self.name = text, tokens, log, name
        self.seconds = seconds if callable(seconds) else lambda run: seconds
        self.runs = -1  # the first one warms up

    def generate(self, prompt: str, params: SamplingParams) -> list[Completion]:
        self.log.append(self.name)
        stats = DecodeStats(ttft_s=1.0, decode_s=self.seconds(self.runs))
        stats.count_step(0, 0, 1, rejected=False)
        stats.count_step(0, 0, len(self.tokens) - 1, rejected=False)
        self.runs += 1
        return [Completion([1], self.text, self.tokens, "stop", [], None, stats, lossless=True, seed=0)]


class Idle:
    """A machine on which nothing else runs."""

    def share(self) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_runs, "Disturbance", Idle)


def test_measure_compares_with_plain() -> None:
    """Speedup, identity and correctness are against plain decoding; a wrong token anywhere is counted."""
    chosen = held_out_problems(2)
    right = f"#### {chosen[0].reference}"
    log: list[str] = []
    series = [
        Series("none", Scripted(right, [1, 2, 3], 1.0, log, "none")),
        Series("fast", Scripted(right, [1, 2, 3], 0.5, log, "fast")),
        Series("wrong", Scripted("no idea", [1, 3, 3], 2.0, log, "wrong")),
    ]
    ticks: list[int] = []
    rows, interrupted = measure(series, chosen, SamplingParams(), 3, lambda: ticks.append(1))
    assert not interrupted
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 2.0, 0.5])
    assert [row["decode_tokens_per_s"] for row in rows] == pytest.approx([2.0, 4.0, 1.0]), "the first second is the prompt's"
    assert [row["ttft_s"] for row in rows] == [1.0, 1.0, 1.0]
    assert [row["num_identical"] for row in rows] == [2, 2, 0]
    assert rows[0]["num_correct"] >= 1
    assert rows[2]["num_correct"] == 0
    assert len(ticks) == 18
    assert log[3:12] == ["none", "fast", "wrong", "fast", "wrong", "none", "fast", "wrong", "none"], (
        "every problem goes through all of them before the next one"
    )


def slow_in_the_middle(seconds: float) -> Callable[[int], float]:
    """The machine is five times as slow during the second of three rounds of four problems."""
    return lambda run: seconds * (5 if 4 <= run < 8 else 1)


def test_a_slow_round_hits_all_rows_alike() -> None:
    chosen, log = held_out_problems(4), []
    series = [
        Series(name, Scripted("", [1, 2, 3], slow_in_the_middle(seconds), log, name))
        for name, seconds in (("none", 1.0), ("fast", 0.4))
    ]
    plain, fast = measure(series, chosen, SamplingParams(), 3, lambda: None).rows
    assert plain["speedup_interval"] == pytest.approx([0.2, 1.0]), "plain decoding shows its slowest and fastest round"
    assert fast["speedup"] == pytest.approx(2.5)
    assert fast["speedup_interval"] == pytest.approx([2.5, 2.5])


def test_one_that_learns_is_compared_with_the_first_round_of_plain_decoding() -> None:
    """Only its first round counts, in which the machine was slow for both."""
    chosen, log = held_out_problems(4), []
    series = [
        Series("none", Scripted("", [1, 2, 3], lambda run: 5.0 if run < 4 else 1.0, log, "none")),
        Series("learner", Scripted("", [1, 2, 3], lambda run: 2.5 if run < 4 else 0.1, log, "learner"), learns=True),
    ]
    _, learner = measure(series, chosen, SamplingParams(), 3, lambda: None).rows
    assert learner["speedup"] == pytest.approx(2.0)
    assert learner["num_rounds"] == 1


def test_problems_that_differ_make_the_interval_wide() -> None:
    """A row that looks like 1.6x is 4x on some problems and 1x on others: the table must show it."""
    chosen, log = held_out_problems(8), []
    series = [
        Series("none", Scripted("", [1, 2, 3], 1.0, log, "none")),
        Series("odd", Scripted("", [1, 2, 3], lambda run: 0.25 if run % 2 else 1.0, log, "odd")),
    ]
    _, odd = measure(series, chosen, SamplingParams(), 1, lambda: None).rows
    low, high = odd["speedup_interval"]
    assert odd["speedup"] == pytest.approx(1.6)
    assert low < 1.3
    assert high > 2


def test_one_problem_has_no_interval_and_one_step_no_speed() -> None:
    chosen, log = held_out_problems(1), []
    series = [
        Series(name, Scripted("", [1, 2, 3], seconds, log, name)) for name, seconds in (("none", 1.0), ("fast", 0.5))
    ]
    _, fast = measure(series, chosen, SamplingParams(), 1, lambda: None).rows
    assert (fast["speedup"], fast["speedup_interval"]) == (pytest.approx(2.0), None)
    short = [Series("none", Scripted("", [1], 0.0, log, "none"))]
    (plain,) = measure(short, chosen, SamplingParams(), 1, lambda: None).rows
    assert (plain["decode_tokens_per_s"], plain["speedup"]) == (None, None)


@pytest.mark.parametrize(("stop_at", "problems", "rounds"), [(7, 3, 1), (13, 4, 1), (18, 4, 2)])
def test_ctrl_c_leaves_what_all_have_done(stop_at: int, problems: int, rounds: int) -> None:
    """In the first round the problems behind the last common one are dropped, later the round that is not complete."""
    log: list[str] = []

    def seconds(run: int) -> float:
        if len(log) == 2 + stop_at:  # behind the warm-up
            raise KeyboardInterrupt
        return 1.0

    series = [Series(name, Scripted("", [1, 2, 3], seconds, log, name)) for name in ("none", "fast")]
    rows, interrupted = measure(series, held_out_problems(4), SamplingParams(), 3, lambda: None)
    assert interrupted
    assert [(row["num_problems"], row["num_rounds"]) for row in rows] == [(problems, rounds)] * 2


def test_ctrl_c_before_anything_is_known_is_passed_on() -> None:
    def seconds(run: int) -> float:
        if run >= 0:
            raise KeyboardInterrupt
        return 1.0

    series = [Series("none", Scripted("", [1, 2], seconds, [], "none"))]
    with pytest.raises(KeyboardInterrupt):
        measure(series, held_out_problems(2), SamplingParams(), 1, lambda: None)


def test_ctrl_c_without_a_table_is_said(cli: Callable[..., Any], fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "_measure", stopped)
    found = cli("demo", "--questions", "0")
    assert found.code == 130
    assert "there is no table yet" in found.err


def test_rows_beside_busy_processes_are_named() -> None:
    rows = [{"drafter": name, "other_cpu": share} for name, share in (("none", 0.02), ("ngram", 0.48), ("block", 0.31))]
    assert disturbed(rows[:1]) is None
    assert str(disturbed(rows)).startswith(
        "disturbed: other processes used 31% to 48% of the processors during the runs of ngram, block;"
    )
    assert "48% of the processors during the runs of all rows" in str(disturbed(rows[1:2]))


def test_the_share_that_others_use_is_weighed_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shares = iter([0.0, 1.0, 1.0, 4.0]), iter([1.0, 0.2])
    monkeypatch.setattr(demo_runs, "Disturbance", lambda: SimpleNamespace(share=lambda: next(shares)))
    monkeypatch.setattr(demo_runs.time, "perf_counter", lambda: next(now))
    one = Series("none", Scripted("", [1, 2], 1.0, [], "none"))
    for problem in held_out_problems(2):
        one.run(problem, SamplingParams(), 0)
    assert one.others_s / one.seconds == pytest.approx((1 + 3 * 0.2) / 4)


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
    assert found["rows"] == []


def test_every_drafter_is_measured_on_the_runtime_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of another runtime than the one named would be a silent one."""
    asked: list[ModelOptions] = []

    def load(target: str, options: ModelOptions) -> object:
        asked.append(options)
        return object()

    monkeypatch.setattr(demo_module.session, "load_llm", load)
    series = demo_module._open_all("demo", ModelOptions(runtime="eager"))
    assert [one.drafter for one in series] == [one.label for one in CONTENDERS]
    assert {options.runtime for options in asked} == {"eager"}
