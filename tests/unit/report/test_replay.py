"""The verdict of a replay."""

from __future__ import annotations

import pytest

from outrider.lab.replay.replay_result import ReplayedConfiguration
from outrider.report.replay import verdict
from tests.unit.report.results import replay_result, replayed


@pytest.mark.parametrize(
    ("configurations", "sentence", "tone"),
    [
        (
            [replayed("ngram", 1.3, 1.2), replayed("suffix", 1.5, 1.1)],
            "Use 'ngram': predicted speedup 1.20x",
            "good",
        ),
        (
            [replayed("none", 1.0, 1.0), replayed("suffix", 1.5, 0.9)],
            "Do not speculate: the best of these texts, 'suffix'",
            "bad",
        ),
        ([replayed("suffix", 1.5, 1.03)], "Hardly a gain", "caution"),
        (
            [replayed("ngram", 1.3, None), replayed("suffix", 1.5, None)],
            "'suffix', 1.50 [1.40, 1.60]. Its speedup is below 1.50x",
            "plain",
        ),
        (
            [replayed("ngram", 1.3, None, 50), replayed("suffix", 1.3, None, 40)],
            "'suffix'",
            "plain",
        ),
        ([replayed("ngram", 1.02, None)], "'ngram'", "caution"),
        ([replayed("none", 1.0, None)], "Only plain decoding", "caution"),
    ],
)
def test_verdicts(configurations: list[ReplayedConfiguration], sentence: str, tone: str) -> None:
    """Catches the most tokens praised where they cost more than they bring, and plain decoding
    named best."""
    text, meant = verdict(replay_result().model_copy(update={"configurations": configurations}))
    assert sentence in text
    assert meant == tone
