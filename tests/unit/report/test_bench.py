"""What a bench advises, and numbers of it that the golden reports do not show."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.result import Interval, comparables, read_result
from outrider.report.bench import advice, document
from outrider.report.console import print_document
from outrider.report.document import Bullets, Chart, CodeBlock, Paragraph
from outrider.report.render import SPEEDUP
from tests.unit.report.results import GAIN, at_shape, bench, cell, interval, measured


@pytest.mark.parametrize(
    ("first", "second", "words", "tone"),
    [
        (
            interval(0.9, 0.8, 0.95),
            interval(0.7, 0.6, 0.8),
            "Do not speculate on reasoning (greedy): the fastest setting, draft-model k=5, reaches 0.90x",
            "bad",
        ),
        (interval(1.1, 0.95, 1.3), None, "It may be no gain", "caution"),
        (interval(1.01, 0.95, 1.1), None, "Do not speculate", "bad"),
        (Interval.unknown(3.0), None, "says nothing about others", "caution"),
        (None, None, "Nothing was compared", "caution"),
    ],
)
def test_doubt_is_reported_too(
    first: Interval | None, second: Interval | None, words: str, tone: str
) -> None:
    measurements = cell(measured(0), measured(1, first), measured(2, second))
    text, meant = advice(bench(measurements), measurements)
    assert words in text
    assert meant == tone


def test_lossy_configurations_are_never_the_advice() -> None:
    found = bench(GAIN)
    found.configurations[1].lossless = False
    assert "Do not speculate" in advice(found, GAIN)[0]


def test_the_report_fits_a_terminal_of_100_columns() -> None:
    file = io.StringIO()
    print_document(document(bench(GAIN)), Console(file=file, width=100, highlight=False))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "1.90x [1.80, 2.00]" in text
    assert "all 18 texts are plain decoding's, token by token" in text
    assert "all rounds were run" in text


def charts(result: BenchResult) -> dict[str, Chart]:
    return {block.title: block for block in document(result).blocks if isinstance(block, Chart)}


def test_the_chart_has_every_setting_the_fastest_first() -> None:
    [bars] = charts(bench(GAIN))[SPEEDUP].groups.values()
    assert [(bar.label, bar.value, bar.tone, bar.is_best) for bar in bars] == [
        ("draft-model k=5", 1.9, "good", True),
        ("plain decoding", 1.0, "plain", False),
        ("suffix", 0.8, "bad", False),
    ]
    assert (bars[0].low, bars[0].high) == (1.8, 2.0)
    assert bars[0].text == "1.90x [1.80, 2.00]"


def test_batch_sizes_and_contexts_have_charts_of_their_own() -> None:
    cells = [at_shape(1, None), at_shape(4, None), at_shape(1, 100), at_shape(1, 1000)]
    found = charts(bench(*cells))
    by_batch = found["Speedup by batch size: reasoning (greedy)"].groups["draft-model k=5"]
    assert [(bar.label, bar.value) for bar in by_batch] == [("1", 2.0), ("4", 0.5)]
    by_context = found["Speedup by tokens of context: reasoning (greedy)"]
    values = [bar.value for bar in by_context.groups["draft-model k=5"]]
    assert values == pytest.approx([2.1, 3.0])


def test_several_conditions_have_one_first_sentence() -> None:
    first, sentences = document(bench(at_shape(1, None), at_shape(4, None))).blocks[:2]
    assert isinstance(first, Paragraph)
    assert first.text.startswith("Use draft-model k=5: 2.00 times as fast")
    assert "in 1 of 2 conditions" in first.text
    assert isinstance(sentences, Bullets)
    assert sentences.items[1].startswith("Do not speculate on reasoning (greedy, batch of 4)")


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("", "outrider serve t --drafter 'draft-model k=5'"),
        (
            "outrider bench t --draft d --device=cpu --prompts p --model-options "
            "'dtype=float32 trust_remote_code=true' --out r.json",
            "outrider serve t --draft d --device cpu --dtype float32 --trust-remote-code --drafter "
            "'draft-model k=5'",
        ),
    ],
)
def test_the_next_command_has_the_model_and_the_settings_of_the_run(
    typed: str, command: str
) -> None:
    codes = [
        block.text
        for block in document(bench(GAIN, command=typed)).blocks
        if isinstance(block, CodeBlock)
    ]
    assert codes == [command]


def test_without_a_gain_the_next_command_looks_for_one() -> None:
    lost = cell(measured(0), measured(1, interval(0.9, 0.8, 0.95)))
    command = "outrider bench t --prompts p.jsonl --threads 2"
    codes = [
        block.text
        for block in document(bench(lost, command=command)).blocks
        if isinstance(block, CodeBlock)
    ]
    assert codes == ["outrider tune t --prompts p.jsonl --threads 2"]


def test_the_file_takes_it(tmp_path: Any) -> None:
    found = bench(GAIN)
    found.write(tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == found


def test_numbers_that_compare_with_another_run() -> None:
    found = comparables(
        bench(GAIN, cell(measured(0), measured(1, Interval.unknown(3.0)), batch_size=2))
    )
    assert found["reasoning, T = 0: draft-model k=5: speedup"].value == Interval(
        value=1.9, low=1.8, high=2.0
    )
    assert found["reasoning, T = 0: none: tokens/s"].value == Interval(value=50, low=45, high=55)
    assert found["reasoning, T = 0: suffix: identical texts"].value == 1
    lonely = found["reasoning, T = 0, 2 at once: draft-model k=5: speedup"].value
    assert isinstance(lonely, Interval)
    assert (lonely.low, lonely.high) == (0, float("inf"))
