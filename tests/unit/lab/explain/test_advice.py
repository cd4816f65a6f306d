"""Each rule speaks when its case is built, is silent otherwise, and names its evidence."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.lab.explain.advice import advise
from outrider.lab.explain.causes import CAUSES
from outrider.lab.explain.explain_result import CauseRow, ExplainResult, GroupRow, LevelRow, Times
from outrider.lab.result import Interval
from tests.unit.report.results import explanation

TIMES = Times(step_s=0.05, draft_s=0.01, draft_level_s=0.002, steps=100)
SHARE = Interval(value=0.5, low=0.4, high=0.6)


def causes(**lost: float) -> list[CauseRow]:
    """Tokens lost by cause; of 1000 emitted."""
    return [
        CauseRow(cause=name, tokens=tokens, tokens_per_step=tokens / 300, tokens_per_s=0.0)
        for name in CAUSES
        for tokens in [lost.get(name.replace("-", "_"), 0.0)]
    ]


def deepest(kept: int) -> list[LevelRow]:
    """The fifth level was tested in 200 steps of 300."""
    return [LevelRow(level=5, tested=200, kept=kept, share=SHARE)]


def result(**changes: Any) -> ExplainResult:
    """300 steps that emitted 1000 tokens, as `changes` say; `alpha` sets accepted, `tau` the tokens
    per step."""
    facts: dict[str, Any] = {
        "causes": causes(),
        "by_kind": [],
        "by_level": deepest(100),
        "times": TIMES,
        "emitted": 1000,
        "steps": 300,
        "tested": 900,
        "alpha": 0.6,
        "tau": 3.3,
        "is_chain": True,
        "has_draft_probs": True,
        "other_cpu": 0.0,
        "num_draft_tokens": "5",
        **changes,
    }
    alpha = facts.pop("alpha")
    tau = facts["tau"]
    times = facts["times"]
    facts |= {"accepted": round((alpha or 0) * facts["tested"]), "tau": Interval.unknown(tau)}
    return explanation(**facts, tokens_per_s=None if times is None else tau / times.step_s)


def titles(**changes: Any) -> list[str]:
    return [line.title for line in advise(result(**changes))]


def test_nothing_stands_out() -> None:
    assert titles() == ["Nothing stands out"]


def kind(name: str, tokens: int, lost: float) -> GroupRow:
    return GroupRow(
        name=name,
        tokens=tokens,
        tested=tokens,
        kept=0,
        share=None,
        lost=lost,
        disagreement=None,
        entropy=None,
    )


CASES = {
    "This draft does not pay: decode plainly": {"tau": 1.2, "times": TIMES.model_copy(update={"draft_s": 0.03})},
    "Longer drafts may pay: more --num-draft-tokens, or auto": {"causes": causes(length=60)},
    "Shorter drafts: fewer --num-draft-tokens, or auto": {"by_level": deepest(30)},
    "Distil the draft on these regions: numbers": {
        "causes": causes(draft=200), "by_kind": [kind("number", 300, 150), kind("word", 700, 50)]
    },
    "The draft's vocabulary lacks words that this traffic needs": {"causes": causes(vocabulary=60)},
    "The stop rule stops too early: lower stop_below, or stop=none": {"causes": causes(stopped=80)},
    "There is often nothing to copy: add a drafter that always has a guess": {
        "causes": causes(stopped=80), "has_draft_probs": False,
    },
    "A larger tree: more --num-draft-tokens": {"causes": causes(tree_budget=60), "is_chain": False},
    "The filters (top-k, top-p, min-p) set target and draft apart": {"causes": causes(filters=60)},
    "Few draft tokens were tested": {"tested": 100},
    "The times are rough": {"other_cpu": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("title", CASES)
def test_every_rule_has_its_case(title: str) -> None:
    found = advise(result(**CASES[title]))  # type: ignore[arg-type]
    line = next(one for one in found if one.title == title)
    assert any(char.isdigit() for char in line.evidence), "evidence without a number"


def test_below_their_thresholds_rules_are_silent() -> None:
    small = causes(draft=40, vocabulary=40, filters=40, stopped=40, tree_budget=40, length=40)
    assert titles(causes=small) == ["Nothing stands out"]


def test_a_length_is_a_choice_of_fixed_chains() -> None:
    assert titles(by_level=deepest(30), is_chain=False) == ["Nothing stands out"]
    assert titles(by_level=deepest(30), num_draft_tokens="auto:8") == ["Nothing stands out"]
    assert titles(by_level=deepest(30), has_draft_probs=False) == ["Nothing stands out"]
    assert titles(by_level=deepest(30), causes=causes(stopped=80)) == [
        "The stop rule stops too early: lower stop_below, or stop=none"
    ]
    assert titles(causes=causes(length=60), is_chain=False) == ["Nothing stands out"]


def test_drafts_lose_for_sure_where_their_time_alone_is_more_than_they_bring() -> None:
    """A plain step takes no longer than a step's rest: 0.04 s here, so 1.25 tokens in 0.05 s are
    even."""
    assert "decode plainly" in titles(tau=1.24)[0]
    assert titles(tau=1.26) == ["Nothing stands out"]
    assert titles(tau=1.24, times=None) == ["Nothing stands out"]
