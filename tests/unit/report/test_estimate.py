"""What the report of an estimate says."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.lab.estimate.curves import CostPoints, StepCosts
from outrider.lab.estimate.estimate import estimate
from outrider.lab.estimate.result import EstimateInput, EstimateResult
from outrider.lab.estimate.roofline import Machine, size_of
from outrider.report.document import Bullets, Document, Heading, Paragraph, Plot, Table
from outrider.report.estimate import document, verdict
from outrider.report.render import render

MEASURED = StepCosts(target=CostPoints.of({1: 0.020, 6: 0.024}), draft_s_per_token=0.002, num_rows=4)


def result(**asked: Any) -> EstimateResult:
    return estimate(EstimateInput(**asked))


def blocks(found: Document, kind: type) -> list[Any]:
    return [block for block in found.blocks if isinstance(block, kind)]


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


def test_the_document_begins_with_the_verdict() -> None:
    found = render(result(alpha=0.8, c=0.1))
    first = found.blocks[0]
    assert isinstance(first, Paragraph)
    assert (first.text, first.tone) == ("γ = 6: 2.47x by the flat curve", "good")


def test_tables_and_plots_show_the_same_three_models() -> None:
    answered = result(alpha=0.8, costs=MEASURED, max_draft_tokens=8)
    found = document(answered)
    lengths, models = blocks(found, Table)[:2]
    assert [row[0] for row in lengths.rows] == [str(gamma) for gamma in range(9)]
    assert lengths.marked == {answered.num_draft_tokens}
    assert all(len(row) == len(lengths.columns) for row in lengths.rows)
    three = [column.heading for column in lengths.columns].index("Leviathan")
    assert lengths.rows[2][three] == f"{answered.lengths[2].leviathan_speedup:.2f}x"
    assert [row[0] for row in models.rows] == ["Leviathan", "envelope", "measured curve"]
    over_length, over_alpha = blocks(found, Plot)
    assert [series.label for series in over_length.series] == ["Leviathan", "envelope", "measured curve"]
    assert over_length.x == list(range(9))
    assert (over_length.baseline, over_alpha.baseline) == (1.0, 1.0)
    for plot in (over_length, over_alpha):
        assert all(len(series.y) == len(plot.x) for series in plot.series)


def test_break_even_and_you_are_marked() -> None:
    answered = result(alpha=0.8, costs=MEASURED, num_draft_tokens=4)
    plot = blocks(document(answered), Plot)[1]
    edge, you = plot.series[-2:]
    curve = plot.series[2]
    for mark, alpha in ((edge, answered.models[2].break_even_alpha), (you, 0.8)):
        (place,) = [place for place, value in enumerate(mark.y) if value is not None]
        assert plot.x[place] == pytest.approx(alpha, abs=1e-6)
        assert mark.y[place] == pytest.approx(curve.y[place], abs=1e-4)  # the mark lies on the line
    assert "break-even" in edge.label
    assert you.label == "you: α 0.800"


def test_without_break_even_nothing_is_marked() -> None:
    labels = [series.label for series in blocks(document(result(alpha=0.9, c=1.5)), Plot)[1].series]
    assert not any("break-even" in label for label in labels)


def test_extrapolated_cells_are_starred() -> None:
    table = blocks(document(result(alpha=0.8, costs=MEASURED, max_draft_tokens=7)), Table)[0]
    place = [column.heading for column in table.columns].index("measured curve")
    assert [row[place].endswith("*") for row in table.rows] == [False] * 6 + [True] * 2
    assert "* beyond" in table.title
    assert "*" not in blocks(document(result(alpha=0.8, c=0.1)), Table)[0].title


def test_times_only_where_they_are_known() -> None:
    headings = [column.heading for column in blocks(document(result(alpha=0.8, c=0.1)), Table)[0].columns]
    assert not {"step, ms", "tokens/s"} & set(headings)


def test_memory_and_roof() -> None:
    target = size_of("8B", 8 * 10**9, "bfloat16").model_copy(update={"kv_bytes_per_token": 131072})
    found = document(
        result(
            alpha=0.8,
            target=target,
            draft=size_of("1B", 10**9, "int4"),
            hardware=Machine(bandwidth=900e9, flops=300e12),
        )
    )
    assert "Memory: the draft adds 3.1%" in [block.text for block in blocks(found, Heading)]
    memory = blocks(found, Table)[-1]
    assert [list(row) for row in memory.rows] == [
        ["target", "14.9 GiB", "512.0 MiB"],
        ["draft", "476.8 MiB", "unknown"],
    ]
    text = "\n".join(item for block in blocks(found, Bullets) for item in block.items)
    assert (
        "waits for memory at any batch size" in text
    )  # 4096 tokens to read per row: 0.6 ms, to multiply 0.4 ms or less
    assert "keys and values of 1B are left out" in text


def test_the_roof_names_the_batch_size() -> None:
    """Reading takes 16 / 900 s; five tokens of one row take 2 x 8e9 x 5 / 300e12 s: 66 rows."""
    eight = size_of("8B", 8 * 10**9, "bfloat16")
    found = document(
        result(alpha=0.8, c=0.1, target=eight, hardware=Machine(bandwidth=900e9, flops=300e12), num_draft_tokens=4)
    )
    text = "\n".join(item for block in blocks(found, Bullets) for item in block.items)
    assert "with γ = 4, 5 tokens per row, the target's pass waits for memory up to a batch size of 66" in text


def test_short_of_memory_bandwidth_nothing_is_free() -> None:
    slow = Machine(bandwidth=900e9, flops=1e11)
    found = document(
        result(alpha=0.8, target=size_of("8B", 8 * 10**9, "bfloat16"), draft=size_of("0", 0, "int4"), hardware=slow)
    )
    text = "\n".join(item for block in blocks(found, Bullets) for item in block.items)
    assert "even plain decoding waits for arithmetic" in text
    assert "bound by arithmetic at every batch size" in text
    assert verdict(result(alpha=0.8, target=size_of("8B", 8 * 10**9, "bfloat16"), c=0.0, hardware=slow))[1] == "bad"
