"""The verdict of an estimate."""

from __future__ import annotations

import pytest

from outrider.lab.estimate.estimate import costs_of, estimate
from outrider.report.estimate import document, verdict
from outrider.report.markdown import to_markdown
from tests.unit.report.results import estimated


@pytest.mark.parametrize(
    ("alpha", "c", "words", "tone"),
    [
        (
            0.8,
            0.1,
            "Speculation should pay. 6 draft tokens per step are best: 2.47x the speed",
            "good",
        ),
        (
            0.7,
            0.83,
            "Do not speculate: every draft length is slower than plain decoding; α would have to be above 0.830",
            "bad",
        ),
        (0.9, 1.5, "at these costs no acceptance is high enough", "bad"),
        (0.5, 0.47, "Hardly a gain. 1 draft token per step is best: 1.02x", "caution"),
    ],
)
def test_verdicts(alpha: float, c: float, words: str, tone: str) -> None:
    sentence, meant = verdict(estimate([alpha], costs_of(c, {}), "c"))
    assert words in sentence
    assert meant == tone


def test_memory_is_shown_where_models_are_named() -> None:
    assert "The draft adds 12.5% to the target's weights." in to_markdown(document(estimated()))
    assert "Memory" not in to_markdown(document(estimate([0.8], costs_of(0.1, {}), "c")))
