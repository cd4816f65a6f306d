"""The page of an explanation: every number has its place, texts carry their fates, and a phone can show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.lab.explain.causes import CAUSES
from outrider.lab.explain.result import (
    LETTERS,
    Advice,
    CauseRow,
    Confusion,
    Counterfactual,
    ExplainResult,
    GroupRow,
    LevelRow,
    RankRow,
    TextColumns,
    Times,
)
from outrider.lab.result import Interval
from outrider.report import explain as report
from outrider.report import explain_text
from outrider.report.console import print_document
from outrider.report.document import Paragraph, Table, TokenText
from outrider.report.explain import document
from outrider.report.html import to_html
from outrider.report.markdown import to_markdown
from tests.unit.report.browser import FOUND, Page, run_in_frame

SHARE = Interval(value=0.8, low=0.7, high=0.9)


def text(**changes: Any) -> TextColumns:
    """A step of four draft tokens: two kept, one rejected; then a bonus token after a draft kept whole; then a plain one."""
    size = 6
    columns: dict[str, Any] = {
        "id": "q1", "task": "reasoning", "prompt": "How many?", "pieces": [" There", " are", " 12", " in", " all", "."],
        "fate": "aacabp", "kind": "wwdwwp", "section": "ttttta", "cause": "..d.l.", "level": [0, 1, 2, 0, 1, 0],
        "draft": ["", "", " 13", "", "", ""], "siblings": [1, 1, 2, 1, 0, 0],
        "kept_chance": [0.9, 0.8, 0.25, 0.9, None, None], "p_token": [0.5] * size, "q_token": [0.125] * size,
        "p_draft": [0.5, 0.5, 0.0625, 0.5, None, None], "q_draft": [0.5, 0.5, 0.75, 0.5, None, None],
        "p_entropy": [0.7] * size, "q_entropy": [0.3] * size, "disagreement": [0.1] * size,
        "rank_draft": [1, 1, 3, 1, None, None], "rank_token": [1, 1, 2, 1, 4, 1], "lost": [0, 0, 1.5, 0, 0.9, 0],
    }  # fmt: skip
    return TextColumns(**{**columns, **changes})


def result(**changes: Any) -> ExplainResult:
    causes = [
        CauseRow(
            cause=name, tokens=10.0 * (8 - n), tokens_per_step=0.1 * (8 - n), tokens_per_s=2.0,
            spread=4.0 if name == "luck" else None,
        )
        for n, name in enumerate(CAUSES)
    ]  # fmt: skip
    lost = sum(row.tokens for row in causes)
    group = GroupRow(
        name="number", tokens=40, tested=30, kept=24, share=SHARE, expected=0.81, lost=9.5, disagreement=0.2, entropy=0.5
    )
    chains = [
        Counterfactual(
            name="chain of 3" if length else "plain decoding", family="length", steps=50, tokens_per_step=1 + length,
            tokens_per_s=30.0 + length, num_draft_tokens=length, current=length == 3, exact=True, method="m", limits="l",
        )
        for length in range(4)
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "target": "demo", "draft": None, "configuration": "draft-model k=3", "verifier": "block", "is_greedy": False,
        "has_law": True, "is_chain": True, "sampling": {"temperature": 0.7}, "num_draft_tokens": "3", "workload": "demo",
        "texts_read": 1, "steps": 100, "emitted": 320, "drafted": 300, "tested": 250, "accepted": 220, "ideal": 320 + lost,
        "tau": Interval(value=3.2, low=3.0, high=3.4), "alpha": Interval(value=0.88, low=0.8, high=0.9), "tokens_per_s": 64.0,
        "other_cpu": 0.0, "times": Times(step_s=0.05, draft_s=0.02, draft_level_s=0.007, width=4, steps=99), "causes": causes,
        "by_level": [LevelRow(level=n, tested=100, kept=80, share=SHARE, expected=0.79) for n in (1, 2, 3)],
        "by_kind": [group], "by_section": [group.model_copy(update={"name": "answer"})], "by_entropy": [group],
        "ranks": [RankRow(rank="1", rejections=3), RankRow(rank="2", rejections=1)],
        "confusions": [Confusion(draft=" a|b", text="`c`", count=7)], "counterfactuals": chains,
        "advice": [Advice(title="Longer drafts", evidence="because 4 beats 3.", tone="good", gain=0.1)], "texts": [text()],
    }  # fmt: skip
    return ExplainResult(**{**fields, **changes})


def table(found: ExplainResult, first: str) -> Table:
    return next(b for b in document(found).blocks if isinstance(b, Table) and b.columns[0].heading == first)


def test_causes_are_listed_with_what_they_cost_and_their_sum() -> None:
    rows = table(result(), "cause").rows
    assert rows[0][0] == report.CAUSES["draft"][0]
    assert rows[0][1:] == ["80.0", "0.800", "2.0", "22%"]
    assert rows[-1] == ["together", "360.0", "3.60", "16.0", "100%"]
    assert len(rows) == len(CAUSES) + 1


def test_small_causes_are_left_out_and_greedy_has_no_luck() -> None:
    causes = [row.model_copy(update={"tokens": 0.0, "tokens_per_step": 0.0}) for row in result().causes]
    rows = table(result(causes=causes, is_greedy=True), "cause").rows
    assert [row[0] for row in rows] == [report.CAUSES["draft"][0], "together"]


def test_advice_comes_first() -> None:
    blocks = document(result()).blocks
    paragraphs = [block for block in blocks if isinstance(block, Paragraph)]
    assert paragraphs[0].text.startswith("A step emits 3.20 tokens of 6.80")
    assert paragraphs[1] == Paragraph("Longer drafts. Because 4 beats 3.", "good")


def test_every_token_has_its_fate_and_its_numbers() -> None:
    tokens = next(block for block in document(result()).blocks if isinstance(block, TokenText)).tokens
    assert [token.fate for token in tokens] == ["prompt", "accepted", "accepted", "correction", "accepted", "bonus", "plain"]
    assert [token.rejected for token in tokens] == ["", "", "", " 13", "", "", ""]
    card = tokens[3].hover
    for words in ("correction", "number, thinking", "p 0.5", "q 0.125", "rank 2 in q", "drafted ' 13' and 1 more", "p 0.0625",
                  "rank 3 in p", "chance 0.25", "lost here 1.5 tokens: the draft disagrees"):  # fmt: skip
        assert words in card
    assert "drafted" not in tokens[1].hover


def test_the_costliest_rejections_come_with_what_stood_before() -> None:
    rows = table(result(texts=[text(), text(lost=[0, 0, 4.0, 0, 0, 0])]), "before").rows
    assert [row[-1] for row in rows] == ["4", "1.5"]
    assert rows[0][:5] == ["…How many? There are", "' 13'", "' 12'", "number", "2"]


def test_a_drafter_without_law_shows_no_draft_numbers() -> None:
    bare = text(q_token=[None] * 6, q_entropy=[None] * 6, disagreement=[None] * 6, rank_token=[None] * 6, q_draft=[None] * 6)
    found = result(texts=[bare], has_law=False, ranks=[], counterfactuals=[], by_section=[])
    tokens = next(block for block in document(found).blocks if isinstance(block, TokenText)).tokens
    assert "q" not in tokens[1].hover.split("\n", 1)[1]
    assert "have no distribution" in to_markdown(document(found))


def test_nothing_tested_and_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one step: no rates, no shares, no division by zero."""
    causes = [row.model_copy(update={"tokens": 0.0, "tokens_per_step": 0.0, "tokens_per_s": None}) for row in result().causes]
    empty = result(
        causes=causes, times=None, tokens_per_s=None, alpha=None, by_level=[], by_entropy=[], ideal=320.0, steps=1, texts=[],
        by_kind=[result().by_kind[0].model_copy(update={"share": None, "tested": 0, "kept": 0, "lost": 0.0})], ranks=[],
    )  # fmt: skip
    print_document(document(empty))
    out = capsys.readouterr().out
    assert "all that it could have" in out
    to_html(document(empty))


def test_letters_have_words() -> None:
    """Every letter a result may hold is known to the report."""
    assert set(LETTERS["cause"].values()) | {"luck"} == set(report.CAUSES)
    assert set(LETTERS["cause"].values()) == set(explain_text.CAUSES)
    assert set(report.CAUSES) == set(CAUSES)


def test_html_is_whole_and_markdown_has_the_tables() -> None:
    page = Page(to_html(document(result())))
    assert " a|b" in page.text()
    assert len(page.attributes("title")) == 6
    markdown = to_markdown(document(result()))
    assert "the draft disagrees" in markdown
    assert "chain of 3" in markdown


@pytest.mark.slow
@pytest.mark.skipif(FOUND is None, reason="no browser on this machine")
@pytest.mark.parametrize("width", [390, 1200])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    """Nothing sticks out sideways, and a tapped token shows its card inside of the window."""
    html = to_html(document(result(texts=[text() for _ in range(3)])))
    wide = "page.documentElement.scrollWidth - page.documentElement.clientWidth"
    assert run_in_frame(html, width, wide, tmp_path) == "0"
    tap = (
        "(() => { page.querySelector('.tokens .correction').click(); const card = page.querySelector('.card');"
        "const box = card.getBoundingClientRect();"
        "return [card.hidden, card.textContent.includes('chance 0.25'), box.left >= 0, "
        "box.right <= page.documentElement.clientWidth + 1].join() })()"
    )
    assert run_in_frame(html, width, tap, tmp_path) == "false,true,true,true"
