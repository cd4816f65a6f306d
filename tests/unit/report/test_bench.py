"""The bench report: the verdict says what to do, the tables what is known, and nothing that is not."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from outrider.lab.bench.result import (
    Acceptance,
    Accuracy,
    BenchResult,
    Cell,
    ConfigurationInfo,
    Divergence,
    Identity,
    Measured,
    OtherProcesses,
    Predicted,
    Speedup,
    WorkloadInfo,
)
from outrider.lab.comparable import comparables
from outrider.lab.result import Interval, read_result
from outrider.lab.server.types import Percentiles
from outrider.report.bench import advice, document
from outrider.report.console import print_document
from outrider.report.document import Paragraph, Plot, Table
from outrider.report.html import to_html
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from tests.unit.lab.bench.test_machine import target

TIMES = {"prompt": 0.2, "draft": 0.3, "target": 0.4, "verify": 0.06, "other": 0.04}
MS = Percentiles(n=9, mean=0.012, p50=0.010, p90=0.02, p99=0.03)


def speedup(value: float, low: float, high: float) -> Speedup:
    return Speedup(value=value, interval=Interval(value=value, low=low, high=high), num_prompts=9)


def measured(number: int, found: Speedup | None = None, **changes: Any) -> Measured:
    values: dict[str, Any] = {
        "configuration": number, "num_runs": 9, "num_tokens": 90, "num_steps": 30, "drafted": 150, "tested": 80, "accepted": 60,
        "num_disturbed": 0, "speedup": found, "end_to_end": found, "tokens_per_s": 50.0, "throughput_tokens_per_s": 40.0,
        "ttft_s": MS, "tpot_s": MS, "chunk_s": MS, "time_s": TIMES, "roof": 0.5,
        "tokens_per_s_interval": Interval(value=50, low=45, high=55),
    }  # fmt: skip
    if found is not None:
        values["acceptance"] = Acceptance(num_steps=30, reached=[30, 25, 2], kept=[25, 20, 1])
        values["predicted"] = Predicted(speedup=1.9, tau=3.0, step_s=0.02, plain_step_s=0.013, extrapolated_share=0.5)
        values["identity"] = Identity(num_compared=9, num_identical=9)
    return Measured(**{**values, **changes})


def cell(*configurations: Measured, **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "task": "reasoning", "temperature": 0.0, "batch_size": 1, "context": None, "prompt_ids": ["a",
        "b"], "mean_prompt_tokens": 20.0,
        "max_new_tokens": 64, "rounds": 2, "ended_by": "prompts", "prompts_for_precision": 120, "seconds": 9.0,
        "configurations": list(configurations), "runs": [],
    }  # fmt: skip
    return Cell(**{**values, **changes})


def result(*cells: Cell, **changes: Any) -> BenchResult:
    names = ("none", "draft-model k=5", "suffix")
    infos = [
        ConfigurationInfo(label=name, arguments={}, baseline=0, added_weights_bytes=900, learns=name == "suffix")
        for name in names
    ]
    values: dict[str, Any] = {
        "workload": WorkloadInfo(name="w"), "target": target(), "configurations": infos, "cells": list(cells), "seconds": 90.0,
        "notes": ["a note"],
    }  # fmt: skip
    return BenchResult(**{**values, **changes})


def printed(found: BenchResult, width: int = 100) -> str:
    file = io.StringIO()
    print_document(document(found), Console(file=file, width=width, highlight=False))
    return file.getvalue()


GAIN = cell(measured(0), measured(1, speedup(1.9, 1.8, 2.0)), measured(2, speedup(0.8, 0.7, 0.9)))


def test_a_gain_is_said_with_its_interval_and_place() -> None:
    text, tone = advice(result(GAIN), GAIN)
    assert text == "draft-model k=5: 1.90x [1.80, 2.00] on reasoning, T = 0 (slower than plain: suffix)"
    assert tone == "good"


def test_disturbed_cells_are_named_with_the_share_that_others_used() -> None:
    """In the console, Markdown and HTML: which cells, how much, what was repeated; calm cells are not called disturbed."""
    others = OtherProcesses(mean=0.48, highest=0.6, allowed=0.1, num_runs=27, num_disturbed=26, num_repeated=9)
    busy = cell(
        measured(0, other_cpu=0.44, num_disturbed=8), measured(1, speedup(1.9, 1.8, 2.0), other_cpu=0.55, num_disturbed=9),
        others=others, task="busy",
    )  # fmt: skip
    calm = cell(measured(0, other_cpu=0.01), others=others.model_copy(update={"num_disturbed": 0, "mean": 0.01}), task="calm")
    found = result(busy, calm)
    line = (
        "busy, T = 0: 26 of 27 runs disturbed (others used more than 10% of the processors); others used 48% on average over all "
        "runs, at most 60%; 9 runs are the calmest of several attempts"
    )
    assert line in printed(found, width=400)
    assert line in to_markdown(document(found))
    assert line in to_html(document(found))
    assert "calm, T = 0: 0 of" not in printed(found, width=400)
    speed = next(block for block in document(found).blocks if isinstance(block, Table) and block.title == "Speed")
    assert [column.heading for column in speed.columns][-1] == "others"
    assert [row[-1] for row in speed.rows] == ["44%", "55%", "1%"]
    assert BenchResult.model_validate_json(found.model_dump_json()).cells[0].others == others


def test_a_calm_machine_is_not_spoken_of() -> None:
    found = printed(result(GAIN))
    assert "Disturbed" not in found
    assert "others" not in found


def test_an_interrupted_run_says_so() -> None:
    found = result(cell(measured(0), measured(1, speedup(1.9, 1.8, 2.0)), ended_by="interrupted"), interrupted=True)
    assert "ended by: you stopped it" in printed(found, width=200)
    assert "this is what was known when the run was stopped" in to_markdown(render(found))
    assert "stopped" not in to_markdown(render(result(GAIN)))


@pytest.mark.parametrize(
    ("first", "second", "words", "tone"),
    [
        (speedup(0.9, 0.8, 0.95), speedup(0.7, 0.6, 0.8),
        "do not speculate on reasoning, T = 0: the fastest is draft-model k=5: 0.90x", "bad"),
        (speedup(1.1, 0.95, 1.3), None, "may be no gain", "caution"),
        (speedup(1.01, 0.95, 1.1), None, "do not speculate", "bad"),
        (Speedup(value=3.0, num_prompts=1), None, "says nothing about others", "caution"),
        (None, None, "nothing was compared", "caution"),
    ],
)  # fmt: skip
def test_doubt_is_said_too(first: Speedup | None, second: Speedup | None, words: str, tone: str) -> None:
    one = cell(measured(0), measured(1, first), measured(2, second))
    found = advice(result(one), one)
    assert words in found[0]
    assert found[1] == tone


def test_lossy_configurations_are_never_the_advice() -> None:
    found = result(GAIN)
    found.configurations[1].lossless = False
    assert "do not speculate" in advice(found, GAIN)[0]


def test_the_report_fits_a_terminal_of_100_columns() -> None:
    text = printed(result(GAIN))
    assert max(map(len, text.splitlines())) <= 100
    assert "1.90x [1.80, 2.00]" in text
    assert "All 18 texts that must be the plain ones are" in text
    assert "about 120 prompts would do" in text


def test_tables_hold_what_was_measured() -> None:
    text = printed(result(GAIN), 200)
    for words in ("0.83 0.80 0.50", "0.83 0.67 0.03", "40%", "3.00", "1.90x*", "1.00", "900 B", "10.0%", "a note", "10.0 / 30.0"):
        assert words in text, words


def test_texts_that_differ_are_shown_and_judged() -> None:
    first = Divergence(prompt="b", position=7, plain=[1], own=[2], plain_text="yes", own_text="no")
    parted = measured(1, speedup(1.9, 1.8, 2.0), identity=Identity(num_compared=9, num_identical=8, first=first))
    found = result(cell(measured(0), parted))
    paragraphs = {block.text: block.tone for block in document(found).blocks if isinstance(block, Paragraph)}
    (text,) = [words for words in paragraphs if "differ" in words]
    assert paragraphs[text] == "bad"
    assert "prompt b, from output token 7: plain 'yes' [1], here 'no' [2]" in printed(found, 300)
    found.configurations[1].exact = False
    tones = {block.tone for block in document(found).blocks if isinstance(block, Paragraph) and "differ" in block.text}
    assert tones == {"caution"}


def test_curves_over_batch_size_and_context() -> None:
    cells = [
        cell(measured(0), measured(1, speedup(2.0 / size, 1.5 / size, 2.5 / size)), batch_size=size)
        for size in (1, 4, 2)
    ]
    cells += [cell(measured(0), measured(1, speedup(1.5, 1.4, 1.6)), context=length) for length in (512, 128)]
    plots = {block.title: block for block in document(result(*cells)).blocks if isinstance(block, Plot)}
    batch, context = (
        plots["Speedup by batch size: reasoning, T = 0"],
        plots["Speedup by context length: reasoning, T = 0"],
    )
    assert list(batch.x) == [1, 2, 4]
    assert list(batch.series[0].y) == pytest.approx([2.0, 1.0, 0.5])
    assert batch.series[0].low is not None
    assert list(batch.series[0].low) == pytest.approx([1.5, 0.75, 0.375])
    assert list(context.x) == [128, 512]
    assert batch.baseline == 1.0
    text = printed(result(*cells))
    assert "do not speculate on reasoning, T = 0, 4 at once" in text


def at_shape(size: int, context: int | None) -> Cell:
    """Speedups tell where they were measured: 2 at one row, 0.5 at four, and a thousandth of the context more."""
    value = 2 / size + (context or 0) / 1000
    found = speedup(value, value - 0.1, value + 0.1)
    return cell(measured(0), measured(1, found), batch_size=size, context=context)


def test_a_grid_is_a_table_and_a_plot_of_lines_by_context() -> None:
    """Catches rows or lines in another order, cells in a wrong place, and gaps that close up."""
    unsure = cell(measured(0), measured(1, speedup(1.1, 0.9, 1.3)))
    cells = [unsure, at_shape(4, None), at_shape(1, 400), at_shape(4, 400), at_shape(4, 100)]
    blocks = document(result(*cells)).blocks
    (table,) = [block for block in blocks if isinstance(block, Table) and "batch size and context" in block.title]
    assert [column.heading for column in table.columns][2:] == ["prompts as they are", "context 100", "context 400"]
    assert table.rows == [
        ["draft-model k=5", "1", "1.10x?", "-", "2.40x"],
        ["", "4", "0.50x", "0.60x", "0.90x?"],
    ]  # fmt: skip
    plots = {block.title: block for block in blocks if isinstance(block, Plot)}
    plot = plots["Speedup of draft-model k=5 by batch size and context: reasoning, T = 0"]
    assert list(plot.x) == [1, 4]
    assert [one.label for one in plot.series] == ["prompts as they are", "context 100", "context 400"]
    assert [list(one.y) for one in plot.series] == [[1.1, 0.5], [None, 0.6], [2.4, 0.9]]
    assert plot.series[2].high == pytest.approx([2.5, 1.0])
    assert "2.40x" in to_html(document(result(*cells)))


def test_curves_of_a_grid_are_those_of_the_first_row() -> None:
    """Catches a curve over contexts that mixes batch sizes, and a grid where contexts were measured at one batch size."""
    cells = [at_shape(size, context) for context in (None, 100, 400) for size in (1, 4)]
    plots = {block.title: block for block in document(result(*cells)).blocks if isinstance(block, Plot)}
    contexts = plots["Speedup by context length: reasoning, T = 0"]
    assert list(contexts.x) == [100, 400]
    assert list(contexts.series[0].y) == pytest.approx([2.1, 2.4])
    assert list(plots["Speedup by batch size: reasoning, T = 0"].series[0].y) == pytest.approx([2.0, 0.5])
    no_grid = [one for one in cells if one.context is None or one.batch_size == 1]
    assert "Batch size and context" not in printed(result(*no_grid))
    assert max(map(len, printed(result(*cells)).splitlines())) <= 100


def test_positions_that_hardly_any_step_reached_are_not_plotted() -> None:
    plots = {block.title: block for block in document(result(GAIN)).blocks if isinstance(block, Plot)}
    survival = plots["Survival: reasoning, T = 0"]
    assert list(survival.x) == [1, 2]
    assert list(survival.series[0].y) == pytest.approx([25 / 30, 25 / 30 * 20 / 25])


def test_right_answers() -> None:
    interval = Interval(value=-0.1, low=-0.3, high=0.1)
    found = Accuracy(
        num_graded=20, num_incomplete=3, num_right=10, num_plain_right=12, num_only_own_right=1, num_only_plain_right=3,
        difference=interval, p_value=0.625,
    )  # fmt: skip
    sampled = cell(measured(0), measured(1, speedup(1.9, 1.8, 2.0), accuracy=found, identity=None), temperature=1.0)
    text = printed(result(sampled), 200)
    assert "10 of 20" in text
    assert "-10.0% [-30.0%, +10.0%]" in text
    assert "0.625" in text
    none = found.model_copy(update={"num_graded": 0, "difference": None})
    cut = cell(measured(0), measured(1, speedup(1.9, 1.8, 2.0), accuracy=none))
    assert "raise --max-new-tokens" in printed(result(cut), 200)


def test_failures_are_named() -> None:
    found = result(cell(measured(0), failures={"suffix": "too large"}))
    found.configurations[1].failure = "no such layer"
    text = printed(found, 200)
    assert "draft-model k=5: no such layer" in text
    assert "reasoning, T = 0, suffix: too large" in text


def test_other_writers_and_the_file_take_it(tmp_path: Any) -> None:
    found = result(GAIN)
    assert "1.90x" in to_html(document(found))
    assert "1.90x [1.80, 2.00]" in to_markdown(document(found)).replace("\\", "")
    found.write(tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == found


def test_numbers_that_compare_with_another_run() -> None:
    found = comparables(result(GAIN, cell(measured(0), measured(1, Speedup(value=3.0, num_prompts=1)), batch_size=2)))
    assert found["reasoning, T = 0: draft-model k=5: speedup"].value == Interval(value=1.9, low=1.8, high=2.0)
    assert found["reasoning, T = 0: none: tokens/s"].value == Interval(value=50, low=45, high=55)
    assert found["reasoning, T = 0: suffix: identical texts"].value == 1
    lonely = found["reasoning, T = 0, 2 at once: draft-model k=5: speedup"].value
    assert isinstance(lonely, Interval)
    assert (lonely.low, lonely.high) == (0, float("inf"))
