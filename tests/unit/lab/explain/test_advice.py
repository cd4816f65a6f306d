"""Each rule speaks when its case is built, is silent otherwise, and names its evidence."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.lab.explain.advice import advise
from outrider.lab.explain.causes import CAUSES, DRAFT, FILTERS, LUCK, STOPPED, TREE_BUDGET, VERIFIER, VOCABULARY
from outrider.lab.explain.counterfactual import chain_rate, rest_at
from outrider.lab.explain.explain_result import CauseRow, Counterfactual, ExplainResult, GroupRow, RankRow, Times
from outrider.lab.result import Interval
from tests.unit.report.results import explanation

TIMES = Times(step_s=0.05, draft_s=0.01, draft_level_s=0.002, width=6, steps=100)


def causes(lost: dict[int, float] | None = None) -> list[CauseRow]:
    """Tokens lost by cause; of 1000 emitted."""
    by_name = {CAUSES[cause]: tokens for cause, tokens in (lost or {}).items()}
    return [
        CauseRow(
            cause=name, tokens=by_name.get(name, 0.0), tokens_per_step=by_name.get(name, 0.0) / 300, tokens_per_s=0.0,
            spread=10.0 if name == "luck" else None,
        )
        for name in CAUSES
    ]  # fmt: skip


def chain(length: int, tokens: float, *, current: bool = False) -> Counterfactual:
    rate = chain_rate(TIMES, tokens, length)
    return other("length", f"chain of {length}", tokens, rate, num_draft_tokens=length, current=current)


def other(family: str, name: str, tokens: float, rate: float | None, **extra: object) -> Counterfactual:
    return Counterfactual(
        name=name, family=family, steps=1000 / tokens, tokens_per_step=tokens, tokens_per_s=rate, exact=True, method="",
        limits="", **extra,
    )  # type: ignore[arg-type]  # fmt: skip


def result(**changes: Any) -> ExplainResult:
    """300 steps that emitted 1000 tokens, as `changes` say; `alpha` sets accepted, `tau` the tokens per step."""
    facts: dict[str, Any] = {
        "causes": causes(), "by_kind": [], "ranks": [], "counterfactuals": [chain(0, 1.0), chain(5, 3.3, current=True)],
        "times": TIMES, "emitted": 1000, "tested": 900, "alpha": 0.6, "tau": 3.3, "verifier": "block", "is_chain": True,
        "has_draft_probs": True, "is_greedy": False, **changes,
    }  # fmt: skip
    alpha, tau, times = facts.pop("alpha"), facts["tau"], facts["times"]
    facts |= {"accepted": round((alpha or 0) * facts["tested"]), "tau": Interval.unknown(tau)}
    return explanation(**facts, tokens_per_s=None if times is None else tau / times.step_s)


def titles(**changes: Any) -> list[str]:
    return [line.title for line in advise(result(**changes))]


def test_nothing_stands_out() -> None:
    assert titles() == ["Nothing stands out"]


def kind(name: str, tokens: int, lost: float) -> GroupRow:
    return GroupRow(
        name=name, tokens=tokens, tested=tokens, kept=0, share=None, expected=None, lost=lost, disagreement=None, entropy=None
    )


CASES = {
    "Longer drafts: --num-draft-tokens 8": {"counterfactuals": [chain(0, 1), chain(5, 3.3, current=True), chain(8, 4.5)]},
    "Shorter drafts: --num-draft-tokens 2": {"counterfactuals": [chain(0, 1), chain(2, 3.2), chain(5, 3.3, current=True)]},
    "Another drafter: --drafter suffix": {
        "counterfactuals": [*result().counterfactuals, other("drafter", "drafter suffix", 3.3, 100.0)]
    },
    "This draft does not pay: decode plainly": {"counterfactuals": [chain(0, 1), chain(2, 1.05), chain(5, 1.1, current=True)]},
    "Acceptance is fine: the cost of drafting is the problem": {
        "alpha": 0.9, "times": TIMES.model_copy(update={"draft_s": 0.03})
    },
    "Distil the draft on these regions: numbers": {
        "causes": causes({DRAFT: 200}), "by_kind": [kind("number", 300, 150), kind("word", 700, 50)]
    },
    "The draft's vocabulary lacks words that this traffic needs": {"causes": causes({VOCABULARY: 60})},
    "The stop rule stops too early: lower stop_below, or stop=none": {"causes": causes({STOPPED: 80})},
    "There is often nothing to copy: add a drafter that always has a guess": {
        "causes": causes({STOPPED: 80}), "has_draft_probs": False,
    },
    "A larger tree: more --num-draft-tokens": {"causes": causes({TREE_BUDGET: 60}), "is_chain": False, "counterfactuals": []},
    "Let the draft branch: --drafter-option tree=best-first": {
        "causes": causes({DRAFT: 100}), "ranks": [RankRow(rank="1", rejections=6), RankRow(rank="2", rejections=4)]
    },
    "The filters (top-k, top-p, min-p) set target and draft apart": {"causes": causes({FILTERS: 60})},
    "A better verifier: --verifier block": {"causes": causes({VERIFIER: 40}), "verifier": "token"},
    "A better verifier: --verifier traversal": {"causes": causes({VERIFIER: 40}), "verifier": "multi-round"},
    "Drafter-invariance has a price: --verifier block or traversal keeps more": {
        "causes": causes({VERIFIER: 40}), "verifier": "gumbel"
    },
    "Much of the disagreement is temperature": {
        "causes": causes({DRAFT: 100}),
        "counterfactuals": [*result().counterfactuals, other("temperature", "temperature 0", 4.5, 90.0)],
    },
    "This run had bad luck": {"causes": causes({LUCK: 25})},
    "This run had good luck": {"causes": causes({LUCK: -25})},
    "Few tests": {"tested": 100},
    "Doubt the times": {"other_cpu": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("title", CASES)
def test_every_rule_has_its_case(title: str) -> None:
    found = advise(result(**CASES[title]))  # type: ignore[arg-type]
    line = next(one for one in found if one.title == title)
    assert any(char.isdigit() for char in line.evidence), "evidence without a number"


def test_below_their_thresholds_rules_are_silent() -> None:
    small = {DRAFT: 40, VOCABULARY: 40, FILTERS: 40, STOPPED: 40, TREE_BUDGET: 40, VERIFIER: 25, LUCK: 15}
    assert titles(causes=causes(small), ranks=[RankRow(rank="2", rejections=9)]) == ["Nothing stands out"]


def test_the_largest_gain_comes_first() -> None:
    lines = titles(
        counterfactuals=[chain(0, 1), chain(5, 3.3, current=True), chain(8, 4.5), other("drafter", "drafter suffix", 3, 500.0)]
    )
    assert lines[0].startswith("Another drafter")


def test_a_trees_length_is_no_choice_of_chains() -> None:
    assert titles(counterfactuals=[chain(0, 1), chain(8, 4.5)], is_chain=False) == ["Nothing stands out"]


# ------------------------------------------------ times


def test_draft_tokens_are_paid_and_passes_go_by_their_width() -> None:
    assert chain_rate(TIMES, 3.0, 5) == pytest.approx(3.0 / 0.05)
    assert chain_rate(TIMES, 1.0, 0) == pytest.approx(1.0 / 0.04)
    curve = TIMES.model_copy(update={"pass_s": {1: 1.0, 6: 2.0, 9: 3.0}})
    assert rest_at(curve, 9) == pytest.approx(0.04 * 1.5), "in proportion, whatever the machine's speed at that moment"
    assert rest_at(curve, 6) == pytest.approx(0.04)
    assert rest_at(curve, 3.5) == pytest.approx(0.04 * 0.75)
    assert chain_rate(None, 3.0, 5) is None


def test_plain_decoding_is_advised_only_where_it_beats_what_ran() -> None:
    """Where no chain's speed can be estimated, the speed of the run is what counts."""
    alone = [chain(0, 1.0)]
    assert titles(counterfactuals=alone, is_chain=False, tau=3.3) == ["Nothing stands out"]
    assert titles(counterfactuals=alone, is_chain=False, tau=1.1) == ["This draft does not pay: decode plainly"]
