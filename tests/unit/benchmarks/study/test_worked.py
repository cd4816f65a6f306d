"""The study of worked solutions: its counts by hand, and its page as the committed result says it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


def text(**columns: Any) -> SimpleNamespace:
    """Two steps: two draft tokens kept and one of arithmetic rejected; one kept and a bonus token."""
    given = {
        "piece": ["She", " has ", "2+3=5", "\n", "#### 5"],
        "fate": ["accepted", "accepted", "correction", "accepted", "bonus"],
        "level": [0, 1, 2, 0, 1],
        "rejected": ["", "", "2+3=6", "", ""],
        "cause": [None, None, "draft", None, None],
        "lost": [{}, {}, {"draft": 3.0}, {}, {}],
        "p_token": [0.9, 0.9, 0.6, 0.9, 0.9],
        "p_draft": [0.9, 0.9, 0.1, 0.9, 0.9],
        "q_draft": [0.9] * 5,
        "rank_token": [1, 1, 2, 1, 1],
        "disagreement": [0.1, 0.1, 0.5, None, 0.0],
    }
    names = given | columns
    lines = zip(*names.values(), strict=True)
    places = [SimpleNamespace(**dict(zip(names, line, strict=True))) for line in lines]
    return SimpleNamespace(prompt="Question: How many?\nAnswer:", places=places)


def counted(*texts: SimpleNamespace, greedy: bool = True) -> dict[str, Any]:
    result = SimpleNamespace(
        texts=texts, is_greedy=greedy, emitted=5 * len(texts), texts_read=len(texts)
    )
    return {one["kind"]: one for one in import_module("study.worked").counts(result)["kinds"]}


def test_counts_by_kind() -> None:
    """Catches kinds counted where a step began instead of where the token stands, and bonus tokens
    counted as tested."""
    found = counted(text(), text())
    total, words, sums = (found[kind] for kind in ("all", "decomposition", "arithmetic"))
    assert (total["tested"], total["kept"], total["rejected"]) == (8, 6, 2)
    assert (words["tested"], words["kept"], words["alpha"][0]) == (6, 6, 1.0)
    assert (sums["tested"], sums["kept"], sums["alpha"][0]) == (2, 0, 0.0)
    assert (words["starts"], words["survival"]) == (4, [1.0, 1.0, 0.0])
    assert total["overlap"] == pytest.approx((0.9 + 0.9 + 0.5 + 1.0) / 4)
    assert sums["why"] == {"second guess": 2}
    assert sums["pairs"] == [["2+3=6", "2+3=5", 2]]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"p_draft": [0.0, 0.0, 0.3, 0.0, 0.0]}, "near tie"),
        ({"rank_token": [1, 1, 4, 1, 1]}, "sure"),
        ({"rank_token": [1, 1, 4, 1, 1], "q_draft": [0.4] * 5}, "doubt"),
    ],
)
def test_reasons(columns: dict[str, Any], reason: str) -> None:
    assert counted(text(**columns))["all"]["why"] == {reason: 1}


def test_where_tokens_are_drawn_causes_say_what_was_lost() -> None:
    assert counted(text(), greedy=False)["arithmetic"]["why"] == {"draft": 3.0}


def test_steps_add_up_where_steps_can_start() -> None:
    """Two positions, each kept with probability 1/2: 1 step if the first is kept (with the token
    after it), else 2."""
    expected_steps = import_module("study.worked").expected_steps
    assert expected_steps([0.5, 0.5], 1) == pytest.approx(0.5 * 1 + 0.5 * 2)
    assert expected_steps([0.5, 0.5], 0) == 2
    assert expected_steps([1.0] * 7, 3) == 2


def test_the_page_says_what_the_result_says(tmp_path: Path) -> None:
    """Catches a page that was changed by hand, and a report that the committed page does not show."""
    import_module("study.report_worked").render_worked(tmp_path / "page.md")
    committed = REPOSITORY / "docs/results/reasoning.md"
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == committed.read_text(
        encoding="utf-8"
    )


def test_verdicts_want_intervals_that_are_apart() -> None:
    verdict = import_module("study.report_worked").verdict
    best = {"speedup": [2.0, 1.8, 2.2]}
    for found, words in (
        ([2.5, 2.3, 2.7], "pays"),
        ([1.5, 1.3, 1.7], "does not pay"),
        ([2.1, 1.9, 2.3], "no difference seen"),
    ):
        assert verdict({"speedup": found}, best) == words
    assert verdict({"failure": "no draft"}, best) == "no draft"
