"""The simulation behind the numbers of docs/algorithms/draft-length.md: its own arithmetic, and
what it must see."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
QUIET = {"prompt": 0.0, "step": 0.0, "outliers": 0.0}


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return SimpleNamespace(
        **{**vars(import_module("control_worlds")), **vars(import_module("control"))}
    )


def text_of(sim: Any, ranks: list[int], offered: list[int] | None = None) -> Any:
    return sim.Text([0.5] * len(ranks), ranks, offered or [8] * len(ranks))


def study(sim: Any, kind: Any, size: tuple[int, int, int], clock: Any, *, known: bool) -> Any:
    """`size`: cells, prompts, tokens."""
    return sim.study(kind, sim.made_up(kind, *size, 0), clock, known=known)


def test_a_fixed_length_by_hand(sim: Any) -> None:
    """Catches a step that drafts beyond the text's end, forgets the token behind the draft, or pays
    for what is not offered."""
    machine = sim.Machine(passes=(1.0, 1.1, 1.2, 1.3), draft=0.5, start=0.25, empty=0.05, other=0.0)
    kind = sim.Kind(machine, sim.steady(0.5))
    text = text_of(sim, [1, 1, 9, 1, 9, 1], [8, 8, 8, 8, 0, 8])
    steps = [kind.step(text, position, asked) for position, asked in ((0, 2), (3, 2), (5, 0))]
    assert [(step.drafted, step.kept) for step in steps] == [(2, 2), (2, 1), (0, 0)]
    assert [step.ms for step in steps] == pytest.approx([1.2 + 0.25 + 1.0, 1.2 + 0.25 + 1.0, 1.0])
    assert [step.tokens for step in steps] == pytest.approx([1.75, 1.75, 1.0])
    total = sim.fixed([text], kind, 2)
    assert (total.ms, total.tokens) == pytest.approx((5.9, 4.5))
    assert kind.step(text, 4, 3).ms == pytest.approx(1.05), "asked for nothing"


def test_trees_keep_what_a_chain_would_lose(sim: Any) -> None:
    """A second choice is kept where the tree is wide enough there, and what is expected is what
    comes about."""
    assert sum(sim.tree(7)) == 7
    assert sim.tree(1) == sim.chain(1) == (1,)
    text = text_of(sim, [2, 1, 1])
    assert text.kept(0, sim.chain(3)) == 0
    assert text.kept(0, (2, 1)) == 2
    rng = random.Random(0)
    texts = [sim.steady(0.6)(rng, 6) for _ in range(4000)]
    for widths in (sim.chain(4), (3, 2, 1)):
        mean = sum(one.kept(0, widths) for one in texts) / len(texts)
        assert mean == pytest.approx(texts[0].expected(0, widths), abs=0.06)


def test_the_causes_add_up_to_the_loss(sim: Any) -> None:
    kind = sim.KINDS["draft model, bursts"]
    found = study(sim, kind, (3, 2, 48), sim.Clock(), known=False)
    assert sum(found.loss.values()) == pytest.approx(1 - found.ratio, abs=1e-9)
    assert set(found.loss) == set(sim.CAUSES)


def test_where_nothing_is_found_plain_is_the_best(sim: Any) -> None:
    """A case whose answer is known, at the promised floors."""
    found = study(sim, sim.KINDS["look-up, nothing found"], (4, 4, 64), sim.Clock(), known=True)
    assert found.best == 0
    assert found.ratio == found.plain > 0.98


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        ("draft model, alpha 0.95", 0.95),
        ("draft model, alpha 0.5", 0.95),
        ("trees, bursts", 0.94),
        ("look-up, some copied", 0.96),
    ],
)
def test_auto_keeps_close_to_the_best_fixed_length(sim: Any, name: str, floor: float) -> None:
    """250 tokens, a clock as noisy as a shared machine's; what the document says is over more
    cells."""
    found = study(sim, sim.KINDS[name], (10, 4, 64), sim.Clock(), known=True)
    assert found.ratio > floor
    assert found.plain > 0.98


def test_knowing_costs_helps_where_the_best_length_is_far_from_the_first_guess(sim: Any) -> None:
    """Else the file that keeps them would be for nothing."""
    kind = sim.KINDS["draft model, alpha 0.95"]
    known, unknown = (
        study(sim, kind, (10, 4, 64), sim.Clock(), known=known).ratio for known in (True, False)
    )
    assert known > unknown + 0.01


def test_the_table_has_a_line_for_each_kind(sim: Any) -> None:
    found = {
        "a kind": study(
            sim, sim.KINDS["look-up, nothing found"], (2, 1, 24), sim.Clock(**QUIET), known=True
        )
    }
    head, _, line = sim.table(found).splitlines()
    assert line.startswith("| a kind | 0 | ")
    assert head.count("|") == line.count("|")


def test_a_recorded_text_is_met_as_the_text_was(sim: Any) -> None:
    """Catches a position read for its neighbour, and a draft that keeps more than was asked for."""
    kind = sim.KINDS["look-up, some copied"]
    (texts,) = sim.made_up(kind, 1, 3, 40, 5)
    lines = [
        [text.kept(position, sim.chain(text.offered[position])) for position in range(len(text))]
        for text in texts
    ]
    cell = {
        "pair": "a",
        "drafter": "ngram",
        "workload": "b",
        "temperature": 0.7,
        "offered": ["".join(map(str, text.offered)) for text in texts],
        "kept": ["".join(map(str, line)) for line in lines],
    }
    ((name, (recorded_kind, recorded)),) = sim.recorded({"cells": [cell]}).items()
    assert name == "a b, T = 0.7, ngram"
    for text, again in zip(texts, recorded, strict=True):
        for position in range(len(text)):
            for asked in range(sim.MAX_NODES + 1):
                before = kind.step(text, position, asked)
                after = recorded_kind.step(again, position, asked)
                assert (after.drafted, after.kept, after.ran_out) == (
                    before.drafted,
                    before.kept,
                    before.ran_out,
                )
                assert after.tokens == 1 + after.kept
    assert (
        sim.study(recorded_kind, [recorded, recorded], sim.Clock(**QUIET), known=True).ratio > 0.9
    )
