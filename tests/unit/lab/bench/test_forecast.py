"""The predicted speedup: closed forms where there are some, and what it must not know."""

from __future__ import annotations

from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.lab.bench import sweeps
from outrider.lab.bench.forecast import Costs, predicted
from outrider.lab.bench.notes import RunNote, notes_of
from outrider.lab.bench.sweeps import HELD, LEAST_STEPS, ROUNDS, Timings, time_steps, together
from outrider.lab.configuration import Configuration
from outrider.lab.costs import SKIPPED
from outrider.lab.disturbance import Repeats
from outrider.lab.estimate.curves import StepCosts, predict
from outrider.sampling.params import SamplingParams
from tests.unit.lab.bench.fakes import trace_of

PLAIN_S = 0.010  # of a plain step, and of a target pass over one token


def timings(steps: dict[str, float], passes: dict[int, float] | None = None, counts: int = 1) -> Timings:
    """Passes over any number of tokens cost the same, unless said."""
    flat = dict.fromkeys((1, 20), steps.get("0", PLAIN_S))
    return Timings({shape: (seconds, counts) for shape, seconds in steps.items()}, passes or flat)


PLAIN_TIMES = {1: timings({"0": PLAIN_S})}


def notes(takes: list[int], drafted: int | list[int], *, rows: int = 1, step_s: float = 0.5) -> list[RunNote]:
    """A run whose own seconds are nonsense: the prediction must not look at them."""
    widths = [drafted] * len(takes) if isinstance(drafted, int) else drafted
    return notes_of([trace_of(takes, [step_s] * len(takes), drafted=widths, rows=rows)], 1, [0], 0, 1)


PLAIN = notes([1] * 9, 0)


def test_a_fixed_chain_is_the_closed_form() -> None:
    """Survival 1, 5/7, 3/7 at 3 draft tokens: `predict` of the same costs and the same curve."""
    own = notes([4, 2, 2, 3, 3, 4, 4, 4], 3)  # the first step is left out
    times = {1: timings({"1": 0.013, "3": 0.017})}
    found = predicted(own, PLAIN, times, PLAIN_TIMES)
    assert found is not None
    survival = [1.0, 5 / 7, 3 / 7]
    expected = predict(survival, StepCosts.of_steps({0: 0.010, 1: 0.013, 3: 0.017}), 3)
    assert found.speedup == pytest.approx(expected.speedup)
    assert found.tau == pytest.approx(expected.tau)
    assert (found.step_s, found.plain_step_s) == pytest.approx((0.017, 0.010))
    assert found.extrapolated_share == 0


def test_plain_steps_of_the_same_sweep_are_the_baseline() -> None:
    """Timed in a minute that was half as fast, a configuration is not half as good."""
    own = notes([3, 3, 3], 2)
    usual = predicted(own, PLAIN, {1: timings({"0": 0.010, "2": 0.012})}, PLAIN_TIMES)
    slow = predicted(own, PLAIN, {1: timings({"0": 0.020, "2": 0.024})}, PLAIN_TIMES)
    assert usual is not None
    assert slow is not None
    assert slow.speedup == pytest.approx(usual.speedup) == pytest.approx(3 * 10 / 12)


def test_the_clock_of_the_runs_plays_no_part() -> None:
    times = {1: timings({"3": 0.017})}
    fast, slow = (
        predicted(notes([2, 2, 3], 3, step_s=s), notes([1] * 5, 0, step_s=s), times, PLAIN_TIMES) for s in (0.1, 9.0)
    )
    assert fast == slow


def test_steps_of_several_widths_are_weighed_by_how_often_they_came() -> None:
    own = notes([1, 1, 1, 3, 3], [0, 0, 0, 2, 2])
    found = predicted(own, PLAIN, {1: timings({"0": 0.010, "2": 0.014})}, PLAIN_TIMES)
    assert found is not None
    assert found.tau == pytest.approx((1 + 1 + 3 + 3) / 4)
    assert found.step_s == pytest.approx(0.012)
    assert found.speedup == pytest.approx(2 * 0.010 / 0.012)


def test_what_the_end_cuts_off_is_not_predicted() -> None:
    (note,) = notes([3, 3, 3], 2)
    whole, cut = (
        predicted([n], PLAIN, {1: timings({"2": 0.01})}, PLAIN_TIMES) for n in (note, note.model_copy(update={"cut": 2}))
    )
    assert whole is not None
    assert cut is not None
    assert (whole.tau, cut.tau) == pytest.approx((3.0, 2.0))


def test_costs_between_batch_sizes_lie_on_a_line() -> None:
    costs = Costs.of({8: timings({"2": 0.024}), 1: timings({"2": 0.010})})
    assert costs is not None
    assert costs.seconds(2, 4) == (pytest.approx(0.010 + 3 / 7 * 0.014), False)
    assert costs.seconds(2, 9) == (pytest.approx(0.024), True)
    assert costs.seconds(2, 1) == (pytest.approx(0.010), False)


def test_steps_outside_of_what_was_timed_are_counted() -> None:
    times = {1: timings({"1": 0.011, "2": 0.012}, {1: 0.010, 3: 0.010})}
    found = predicted(notes([3, 3, 3, 6], [2, 2, 2, 5]), PLAIN, times, PLAIN_TIMES)
    assert found is not None
    assert found.extrapolated_share == pytest.approx(1 / 3)


def test_nothing_timed_or_nothing_decoded_is_no_prediction() -> None:
    own = notes([3, 3], 2)
    assert predicted(own, PLAIN, {}, PLAIN_TIMES) is None
    assert predicted(own, PLAIN, {1: Timings({}, {})}, PLAIN_TIMES) is None
    assert predicted(own, PLAIN, {1: Timings({"2": (0.1, 3)}, {})}, PLAIN_TIMES) is None
    assert predicted(notes([3], 2), PLAIN, {1: timings({"2": 0.1})}, PLAIN_TIMES) is None


class Sweeper:
    """A contender that keeps `tau` tokens a step and drafts what it is asked for; a step takes `seconds(drafted)`."""

    def __init__(
        self, text: str, most: Any, tau: int = 1, seconds: Any = lambda drafted: 0.01 + 0.001 * drafted
    ) -> None:
        self.configuration, self.tau, self.seconds = Configuration.parse(text), tau, seconds
        self.built = SimpleNamespace(
            options=SimpleNamespace(num_draft_tokens=most), context=10_000, target=SimpleNamespace(lm="target"),
            decoder=SimpleNamespace(control=None),
        )
        self.runs: list[tuple[int, int, int]] = []  # prompts, batch size, tokens
        self.asked: list[int] = []

    def run(self, prompts: Any, params: Any, batch_size: int) -> list[Any]:
        self.runs.append((len(prompts), batch_size, params.max_tokens))
        assert params.ignore_eos
        lengths = self.built.decoder.control.lengths
        takes: list[int] = []
        while sum(takes) < params.max_tokens:
            takes.append(min(self.tau, lengths[len(takes) % len(lengths)] + 1))
        drafted = [lengths[number % len(lengths)] for number in range(len(takes))]
        self.built.decoder.control.asked += drafted
        self.asked += drafted
        gaps = [self.seconds(one) for one in drafted]
        gaps[:SKIPPED] = [9.0] * len(gaps[:SKIPPED])  # new memory is touched: not to be counted
        began = 100.0 * len(self.runs)
        found = [trace_of(takes, gaps, drafted=drafted, rows=len(prompts), began_s=began) for _ in prompts]
        for step in (step for trace in found for step in trace.steps):
            step.seconds = 0.0  # what lies between steps is paid, too
        return found


@pytest.fixture(autouse=True)
def passes_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes a millisecond a token."""

    def measure_passes(target: Any, widths: Any, *, rows: int, context: int, repeats: int) -> dict[int, float]:
        assert target == "target"
        assert context >= 1
        return {width: 0.001 * width for width in widths}

    monkeypatch.setattr(sweeps, "measure_passes", measure_passes)


def timed(contender: Sweeper, batch_size: int = 1, max_other_cpu: float = 2.0) -> dict[str, Any]:
    prompts = [[number] for number in range(4)]
    return time_steps(contender, prompts, SamplingParams(stop=["x"]), batch_size, Repeats(max_other_cpu))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "most", "lengths"),
    [("none", 5, [0]), ("draft-model", 5, [0, 2, 5]), ("ngram k=1", 1, [0, 1]), ("suffix", "auto:8", [0, 1, 2, 4, 8])],
)
def test_lengths_to_time(text: str, most: Any, lengths: list[int]) -> None:
    """Around the fixed length, over the range of `auto`, without drafts for plain decoding; full batch and single row."""
    contender = Sweeper(text, most)
    found = timed(contender, batch_size=4)
    assert {(prompts, size) for prompts, size, _ in contender.runs} == {(4, 4), (1, 1)}
    assert list(found) == ["4", "1"]
    for times in found.values():
        means = {shape: fmean(seconds) for shape, seconds in times["steps"].items()}
        assert means == {str(length): pytest.approx(0.01 + 0.001 * length) for length in lengths}
        assert list(times["passes"]) == [str(width) for width in range(1, max(lengths) + 2)]


def test_every_length_comes_often_enough_and_no_more() -> None:
    """One token a step: as many tokens as steps. Up to four, as far as lengths 0, 2, 0 and 5 allow: a second run, with more."""
    slow, fast = Sweeper("draft-model", 5), Sweeper("draft-model", 5, tau=4)
    timed(slow)
    timed(fast)
    wanted = SKIPPED + ROUNDS * HELD * 4
    assert wanted > LEAST_STEPS
    assert [tokens for *_, tokens in slow.runs] == [wanted]
    assert [tokens for *_, tokens in fast.runs] == [wanted, pytest.approx(wanted * (1 + 3 + 1 + 4) / 4, rel=0.2)]
    for contender in (slow, fast):
        assert all(contender.asked.count(length) >= ROUNDS * HELD - 1 for length in (2, 5))


def test_a_step_behind_another_length_does_not_count() -> None:
    """Guards against charging a fixed length with what only a change of length costs."""

    class Switching(Sweeper):
        def run(self, prompts: Any, params: Any, batch_size: int) -> list[Any]:
            before: list[int] = []

            def seconds(drafted: int) -> float:
                before.append(drafted)
                return 0.01 + 0.001 * drafted + (0.5 if before[-2:-1] != [drafted] else 0.0)

            self.seconds = seconds
            return super().run(prompts, params, batch_size)

    steps = timed(Switching("draft-model", 5))["1"]["steps"]
    assert {shape: max(found) for shape, found in steps.items()} == {
        shape: pytest.approx(0.01 + 0.001 * int(shape)) for shape in ("0", "2", "5")
    }


def test_sweeps_are_put_together_step_by_step() -> None:
    """In units of each sweep's own plain steps: one at a slow minute says what the others say. A shape that came up once does not
    weigh like one that came up often."""
    usual = {"1": {"steps": {"0": [0.01, 0.01], "5": [0.015, 0.014, 0.016]}, "passes": {"1": 0.009, "6": 0.012}}}
    slow = {"1": {"steps": {"0": [0.03], "5": [0.045], "2": [0.09]}, "passes": {"1": 0.027, "6": 0.036}}}
    other = {"4": {"steps": {"2": [0.5]}, "passes": {"1": 0.4}}}
    found = together([usual, slow, usual, other])
    assert found[1].steps == {"0": (0.01, 5), "2": (pytest.approx(0.03), 1), "5": (pytest.approx(0.015), 7)}
    assert found[1].passes == {1: pytest.approx(0.009), 6: pytest.approx(0.012)}
    assert found[4].steps == {"2": (0.5, 1)}
    assert together([]) == {}


def test_lengths_that_were_never_offered_cost_what_their_pass_does() -> None:
    """Guards against a look-up that offered 2 and 4 tokens in the sweeps and 8 later, past the jump at nine tokens."""
    passes = {1: 0.010, 3: 0.010, 5: 0.011, 8: 0.012, 9: 0.017}
    costs = Costs.of({1: timings({"0": 0.0104, "2": 0.0105, "4": 0.0115}, passes)})
    assert costs is not None
    assert costs.seconds(8, 1) == (pytest.approx(0.0175), False)
    assert costs.seconds(0, 1)[0] == pytest.approx(0.0104)


def test_a_shape_that_came_up_once_does_not_outweigh_the_others() -> None:
    steps = {"0": (0.010, 30), "2": (0.030, 1), "3": (0.013, 30)}
    costs = Costs.of({1: Timings(steps, {1: 0.010, 4: 0.010})})
    assert costs is not None
    assert costs.seconds(3, 1)[0] == pytest.approx(0.013, rel=0.06)


def test_without_any_offer_a_step_costs_what_a_plain_one_does() -> None:
    costs = Costs.of({1: timings({"0": 0.011}, {1: 0.010, 9: 0.016})})
    assert costs is not None
    assert costs.seconds(0, 1)[0] == pytest.approx(0.011)
    assert costs.seconds(8, 1)[0] == pytest.approx(0.017)


def test_deep_trees_cost_more_than_flat_ones_of_as_many_nodes() -> None:
    """Guards against predicting a sure draft, whose trees are deep, by the flat trees of the sweep."""
    costs = Costs.of({1: timings({"0": 0.010, "7/3": 0.018, "7/5": 0.022, "4/2": 0.016})})
    assert costs is not None
    assert costs.seconds(7, 1, 7)[0] == pytest.approx(0.026)
    assert costs.seconds(7, 1, 4)[0] == pytest.approx(0.020)
    assert costs.seconds(0, 1, 0)[0] == pytest.approx(0.010)


def test_chains_pay_for_their_nodes_alone() -> None:
    costs = Costs.of({1: timings({"0": 0.010, "5": 0.015})})
    assert costs is not None
    assert costs.seconds(5, 1, 5)[0] == pytest.approx(0.015)


def test_no_more_tokens_than_the_context_holds() -> None:
    short = Sweeper("draft-model", 5)
    short.built.context = 6
    timed(short)
    assert [tokens for *_, tokens in short.runs] == [5]


def test_costs_beside_busy_neighbours_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calmer of two attempts counts."""
    attempt = iter([0.03] * 18 + [0.01] * 18)
    shares = iter([0.9, 0.3])
    monkeypatch.setattr(sweeps, "Disturbance", lambda: SimpleNamespace(share=lambda: next(shares)))
    contender = Sweeper("none", 5, seconds=lambda drafted: next(attempt))
    assert fmean(timed(contender, max_other_cpu=0.1)["1"]["steps"]["0"]) == pytest.approx(0.01)
