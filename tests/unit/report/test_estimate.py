"""The verdict of an estimate."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.lab.estimate.estimate import estimate
from outrider.lab.estimate.estimate_result import EstimateInput, EstimateResult
from outrider.lab.estimate.roofline import Machine, size_of
from outrider.report.estimate import document, verdict
from outrider.report.markdown import to_markdown
from tests.unit.report.results import MEASURED


def result(**asked: Any) -> EstimateResult:
    return estimate(EstimateInput(**asked))


@pytest.mark.parametrize(
    ("asked", "sentence", "tone"),
    [
        ({"alpha": 0.8, "c": 0.1}, "γ = 6: 2.47x by the flat curve", "good"),
        ({"alpha": 0.8, "c": 0.1, "num_draft_tokens": 2}, "γ = 2: 2.03x by the flat curve; γ = 6: 2.47x would be best", "good"),
        ({"alpha": 0.7, "c": 0.83},
         "do not speculate: break-even α 0.830, you have 0.700 (γ = 1: 0.93x by the flat curve)", "bad"),
        ({"alpha": 0.9, "c": 1.5}, "do not speculate: no α breaks even (γ = 1: 0.76x by the flat curve)", "bad"),
        ({"alpha": 0.4, "c": 0.2, "num_draft_tokens": 8},
         "γ = 8 does not pay: 0.64x, break-even α 0.621, you have 0.400; γ = 1: 1.17x would be best", "bad"),
        ({"alpha": 0.7, "costs": MEASURED, "num_draft_tokens": 3},
         "γ = 3: 1.78x by the measured curve, 357 tokens/s instead of 200", "good"),
        ({"alpha": 0.5, "c": 0.47}, "γ = 1: 1.02x by the flat curve. That is hardly a gain: an estimate can be off by as much",
         "caution"),
    ],
)  # fmt: skip
def test_verdicts(asked: dict[str, Any], sentence: str, tone: str) -> None:
    assert verdict(result(**asked)) == (sentence, tone)


def test_short_of_memory_bandwidth_nothing_is_free() -> None:
    slow = Machine(bandwidth=900e9, flops=1e11)
    found = document(
        result(alpha=0.8, target=size_of("8B", 8 * 10**9, "bfloat16"), draft=size_of("0", 0, "int4"), hardware=slow)
    )
    text = to_markdown(found)
    assert "even plain decoding waits for arithmetic" in text
    assert "bound by arithmetic at every batch size" in text
    assert verdict(result(alpha=0.8, target=size_of("8B", 8 * 10**9, "bfloat16"), c=0.0, hardware=slow))[1] == "bad"
