"""The part of a report that is about servers: what is in the tables, and what is said when something is missing."""

from __future__ import annotations

from typing import Any

from outrider.lab.result import Interval
from outrider.lab.server.counters import Window
from outrider.lab.server.summary import summarise
from outrider.lab.server.types import (
    Answer,
    Difference,
    Failure,
    Level,
    LevelComparison,
    LevelMeasurement,
    ServerInfo,
    ServerMeasurement,
    Speculation,
)
from outrider.report.document import Bullets, Paragraph, Plot, Table
from outrider.report.server import blocks

COUNTS = Speculation(
    num_steps=10, num_draft_tokens=30, num_accepted_tokens=12, num_full_steps=1, accepted_per_position=[8, 3, 1]
)


def measured(label: str, *levels: LevelMeasurement, engine: str = "vllm", **facts: Any) -> ServerMeasurement:
    info = ServerInfo(engine=engine, version="1.0", model="m", metrics=True)
    return ServerMeasurement(
        label=label, url="http://h", server=info, levels=list(levels), **{"complete": True, **facts}
    )


def level(
    concurrency: int = 1, counts: Speculation | None = None, failures: tuple[Failure, ...] = (), num_requests: int = 1
) -> LevelMeasurement:
    answers = [Answer(id="1", chunks_s=[0.1, 0.3], seconds=0.3, text="a b", num_tokens=3)]
    window = Window(speculation=counts) if counts else None
    return summarise(Level(concurrency=concurrency), num_requests, answers, failures, window)


def tables(*measurements: ServerMeasurement) -> dict[str, Table]:
    return {block.title: block for block in blocks(measurements) if isinstance(block, Table)}


def test_numbers_and_their_units() -> None:
    found = tables(measured("one", level()))
    assert found["Throughput"].rows[0] == ["one", "1 at once", "1 of 1", "10.0", "3.33", "1.50"]
    assert found["Latency: p50 / p90 / p99"].rows[0][2:] == [
        "100.0 / 100.0 / 100.0", "100.0 / 100.0 / 100.0", "200.0 / 200.0 / 200.0", "0.30 / 0.30 / 0.30",
    ]  # fmt: skip


def test_every_ratio_has_its_formula() -> None:
    """The field uses the same words for different ones."""
    table = tables(measured("one", level(counts=COUNTS)))["Speculation, as the servers count it"]
    assert table.rows[0] == ["one", "1 at once", "2.20", "0.57", "0.40", "10", "30", "12", "counters"]
    helps = {column.heading: column.help for column in table.columns}
    assert "1 + accepted / drafts (vllm)" in helps["τ"]
    assert "accepted / tested" in helps["α"]
    assert "accepted / drafted" in helps["utilisation"]


def test_sglangs_formula_is_its_own() -> None:
    counts = Speculation(num_steps=10, num_step_tokens=25)
    table = tables(measured("one", level(counts=counts), engine="sglang"))["Speculation, as the servers count it"]
    assert table.rows[0][2:8] == ["2.50", "-", "-", "10", "-", "-"]
    assert "(generated − requests) / verify calls (sglang)" in table.columns[2].help


def test_counts_out_of_answers_say_so() -> None:
    whole = level()
    reported = whole.model_copy(update={"reported": COUNTS, "num_reported": 1})
    table = tables(measured("one", reported))["Speculation, as the servers count it"]
    assert table.rows[0][-1] == "1 of 1 answers"


def test_no_counters_is_said_and_nothing_estimated() -> None:
    found = blocks([measured("one", level())])
    assert any(isinstance(block, Paragraph) and "τ and acceptance are unknown" in block.text for block in found)
    assert not any(isinstance(block, Table) and block.title.startswith("Speculation") for block in found)


def test_acceptance_by_position() -> None:
    short = Speculation(num_steps=4, num_accepted_tokens=2, accepted_per_position=[2])
    plots = [
        block
        for block in blocks([measured("a", level(counts=COUNTS)), measured("b", level(counts=short))])
        if isinstance(block, Plot)
    ]
    (plot,) = plots
    assert list(plot.x) == [1, 2, 3]
    assert [list(line.y) for line in plot.series] == [[0.8, 0.3, 0.1], [0.5, None, None]]


def test_one_server_against_another() -> None:
    compared = LevelComparison(
        level=Level(concurrency=1),
        num_pairs=9,
        speedup=1.5,
        speedup_interval=Interval(value=1.5, low=1.4, high=1.62),
        throughput_ratio=1.45,
        num_identical=8,
        differences=[Difference(id="7", position=3, baseline="four", other="for")],
    )
    found = blocks([measured("plain", level()), measured("spec", level(), baseline="plain", comparisons=[compared])])
    (table,) = [block for block in found if isinstance(block, Table) and block.title.startswith("spec against plain")]
    assert table.rows == [["1 at once", "9", "1.50 [1.40, 1.62]", "1.45", "8 of 9"]]
    assert any(isinstance(block, Paragraph) and block.tone == "caution" and "differ" in block.text for block in found)
    assert any(
        isinstance(block, Bullets) and "request 7" in block.items[0] and "'for'" in block.items[0] for block in found
    )


def test_uncounted_speedups_say_what_they_are() -> None:
    compared = LevelComparison(level=Level(concurrency=1), num_pairs=2, speedup=1.5, throughput_ratio=None, num_identical=2)
    table = tables(measured("spec", level(), baseline="plain", comparisons=[compared]))["spec against plain, request by request"]
    assert table.rows == [["1 at once", "2", "1.50", "-", "2 of 2"]]
    assert "seconds there / here" in table.columns[2].help


def test_a_column_is_explained_once() -> None:
    """`load` is in every table."""
    found = tables(measured("one", level(counts=COUNTS)))
    assert sum(bool(column.help) for table in found.values() for column in table.columns if column.heading == "load") == 1


def test_all_notes_are_one_list() -> None:
    found = blocks([measured("one", level(), notes=["this"]), measured("two", level(), notes=["that"])])
    (bullets,) = [block for block in found if isinstance(block, Bullets)]
    assert list(bullets.items) == ["one: this", "two: that"]


def test_load_curves_need_two_loads() -> None:
    assert not [block for block in blocks([measured("one", level(1))]) if isinstance(block, Plot)]
    curves = [
        block
        for block in blocks([measured("one", level(1), level(4)), measured("two", level(4))])
        if isinstance(block, Plot)
    ]
    assert [plot.title.split()[0] for plot in curves] == ["Throughput", "Time", "Time"]
    assert list(curves[0].x) == [1, 4]
    assert [list(line.y) for line in curves[0].series] == [[10.0, 10.0], [None, 10.0]]


def test_what_went_wrong_is_not_hidden() -> None:
    failure = Failure(id="r9", kind="dropped", message="http://h: the connection was dropped (ReadError)", num_chunks=2)
    found = blocks(
        [measured("one", level(failures=(failure,), num_requests=5), complete=False, notes=["given up: gone"])]
    )
    texts = [block.text for block in found if isinstance(block, Paragraph) and block.tone == "caution"]
    assert len(texts) == 1
    assert "one: requests without an answer: 4 (1 failed, 3 not sent)" in texts[0]
    items = [item for block in found if isinstance(block, Bullets) for item in block.items]
    assert "request r9: http://h: the connection was dropped (ReadError)" in items
    assert "one: given up: gone" in items


def test_gauges_are_passed_on_as_gauges() -> None:
    measurement = level().model_copy(update={"gauges": {"spec_accept_length": 2.75}, "notes": ["reach back"]})
    items = [
        item for block in blocks([measured("one", measurement)]) if isinstance(block, Bullets) for item in block.items
    ]
    assert items == ["one: reach back", "one: spec_accept_length stood at 2.75"]


def test_a_note_on_several_levels_is_said_once() -> None:
    noted = [level(n).model_copy(update={"notes": ["everywhere", *(["here"] if n > 1 else [])]}) for n in (1, 2, 4)]
    (bullets,) = [block for block in blocks([measured("one", *noted)]) if isinstance(block, Bullets)]
    assert list(bullets.items) == ["one: everywhere", "one: 2 at once, 4 at once: here"]
