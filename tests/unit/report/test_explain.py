"""What the page of an explanation has beside its words: the numbers behind each token, and room on
a phone."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.lab.explain.causes import CAUSES
from outrider.report import explain as report
from outrider.report.console import print_document
from outrider.report.document import MarkedTokens
from outrider.report.explain import document
from outrider.report.html import to_html
from tests.unit.report.browser import FOUND, run_in_frame
from tests.unit.report.results import explained_text, explanation


def test_every_token_has_its_fate_and_its_numbers() -> None:
    tokens = next(
        block for block in document(explanation()).blocks if isinstance(block, MarkedTokens)
    ).tokens
    assert [token.fate for token in tokens] == [
        "prompt",
        "accepted",
        "accepted",
        "correction",
        "accepted",
        "bonus",
        "plain",
    ]
    assert [token.rejected for token in tokens] == ["", "", "", " 13", "", "", ""]
    card = tokens[3].hover
    for words in (
        "correction",
        "number, thinking",
        "p 0.5",
        "q 0.125",
        "rank 2 in q",
        "drafted ' 13' and 1 more",
        "p 0.0625",
        "rank 3 in p",
        "lost here 1.5 tokens: the draft disagrees",
    ):
        assert words in card
    assert "drafted" not in tokens[1].hover


def test_nothing_tested_and_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one step: no rates, no shares, no division by zero."""
    causes = [
        row.model_copy(update={"tokens": 0.0, "tokens_per_step": 0.0, "tokens_per_s": None})
        for row in explanation().causes
    ]
    empty = explanation(
        causes=causes,
        times=None,
        tokens_per_s=None,
        alpha=None,
        by_level=[],
        ideal=320.0,
        steps=1,
        texts=[],
        by_kind=[
            explanation()
            .by_kind[0]
            .model_copy(update={"share": None, "tested": 0, "kept": 0, "lost": 0.0})
        ],
    )
    print_document(document(empty))
    out = capsys.readouterr().out
    assert "and could no more" in out
    to_html(document(empty))


def test_causes_have_words() -> None:
    """Every cause a result may hold is known to the report."""
    assert set(report.CAUSES) == set(CAUSES)


@pytest.mark.slow
@pytest.mark.skipif(FOUND is None, reason="no browser on this machine")
@pytest.mark.parametrize("width", [390, 1200])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    """Nothing sticks out sideways, and a tapped token shows its card inside of the window."""
    html = to_html(document(explanation(texts=[explained_text() for _ in range(3)])))
    wide = "page.documentElement.scrollWidth - page.documentElement.clientWidth"
    assert run_in_frame(html, width, wide, tmp_path) == "0"
    tap = (
        "(() => { page.querySelector('.tokens .correction').click(); const card = page.querySelector('.card');"
        "const box = card.getBoundingClientRect();"
        "return [card.hidden, card.textContent.includes('rank 3 in p'), box.left >= 0, "
        "box.right <= page.documentElement.clientWidth + 1].join() })()"
    )
    assert run_in_frame(html, width, tap, tmp_path) == "false,true,true,true"
