"""The load policy: from sizes that were timed at several loads to a settings file, and from there
to what is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.build import Options, choose
from outrider.cli.options import ModelOptions
from outrider.lab.bench.bench_result import OtherProcesses
from outrider.lab.result import Interval
from outrider.lab.tune.forecast import LoadStep
from outrider.lab.tune.tune_result import Recommendation, Tried, TuneResult
from outrider.report.document import Table
from outrider.report.tune import document
from outrider.settings_file import read_settings


def step(rows: int, size: int, configuration: str = "") -> LoadStep:
    label = configuration or (f"ngram k={size}" if size else "none")
    return LoadStep(
        batch_size=rows,
        configuration=label,
        size=size,
        tokens_per_s=2,
        plain_tokens_per_s=1,
        speedup=2,
    )


def result(
    by_load: dict[str, list[LoadStep]],
    *,
    length: int | str = 5,
    batch_size: int = 1,
    speculate: bool = True,
    schedule: list[LoadStep] | None = None,
) -> TuneResult:
    """ngram with this length is recommended."""
    options: dict[str, Any] = (
        {"drafter": "ngram", "num_draft_tokens": length} if speculate else {"drafter": "none"}
    )
    return TuneResult(
        tried=Tried(
            temperature=0.0,
            max_new_tokens=8,
            batch_size=batch_size,
            probe_prompts=1,
            confirm_prompts=1,
            tasks={"code": 2},
            workload="w",
            target="org/target",
            draft=None,
            model_options={},
        ),
        families=[],
        plain_step_s=0.01,
        overall_speedup={},
        confirmed=[],
        seconds=1.0,
        forecasts=[],
        schedule=schedule or [],
        by_load=by_load,
        recommendations=[
            Recommendation(
                task="all",
                speculate=speculate,
                configuration="ngram k=5",
                options=options,
                speedup=Interval(value=2.0, low=1.9, high=2.1),
                reason="it was measured",
                family="ngram" if speculate else "",
            )
        ],
    )


@pytest.mark.parametrize(
    ("sizes", "table"),
    [
        ([(4, 3), (16, 0)], [(1, 5), (4, 3), (16, 0)]),
        ([(16, 0), (4, 3)], [(1, 5), (4, 3), (16, 0)]),
        ([(4, 5), (8, 5)], [(1, 5)]),
        ([(4, 2), (8, 4)], [(1, 5), (4, 2)]),  # a busier machine never wants longer drafts: noise
    ],
)
def test_the_length_falls_with_the_load(
    sizes: list[tuple[int, int]], table: list[tuple[int, int]]
) -> None:
    assert result({"ngram": [step(rows, size) for rows, size in sizes]}).lengths_by_load() == table


def test_a_tuning_for_eight_rows_knows_about_one() -> None:
    found = result({"ngram": [step(1, 6), step(16, 0)]}, batch_size=8, length=3)
    assert found.lengths_by_load() == [(1, 6), (8, 3), (16, 0)]
    assert result({"ngram": [step(16, 0)]}, batch_size=8, length=3).lengths_by_load() == [
        (1, 3),
        (16, 0),
    ]


def test_others_loads_are_not_the_recommended_one_s() -> None:
    """Two families are timed; the table is of the one that is recommended."""
    found = result({"suffix": [step(4, 1, "suffix k=1")], "ngram": [step(4, 4)]})
    assert found.lengths_by_load() == [(1, 5), (4, 4)]


@pytest.mark.parametrize("changes", [{"length": "auto:8"}, {"speculate": False}])
def test_no_table_where_there_is_no_fixed_length(changes: dict[str, Any]) -> None:
    """`auto` finds out by itself."""
    found = result({"ngram": [step(4, 0)]}, **changes)
    assert found.lengths_by_load() == []
    assert found.settings_file().options == found.recommendations[0].options


def test_what_is_measured_is_what_is_served(tmp_path: Path) -> None:
    """From the result through the file and the command line to the control of a server of 32 rows,
    and of one of 2."""
    file = tmp_path / "fast.json"
    result(
        {"ngram": [step(4, 3), step(16, 0)]}, schedule=[step(4, 2, "suffix k=2")]
    ).settings_file().write(file)
    assert read_settings(file).for_batch_sizes == {
        4: {"drafter": "suffix", "num_draft_tokens": 2, "verifier": "auto"}
    }
    arguments = ModelOptions(settings=file).llm_arguments()
    for rows, expected in ((32, {1: 5, 4: 3, 16: 0}), (8, {1: 5, 4: 3})):
        _, parts = choose(Options("org/target", **{**arguments, "max_num_seqs": rows}))
        assert parts.make_control().summary() == {"by_load": expected}
    _, parts = choose(Options("org/target", **arguments))  # generate and chat: one row
    assert parts.make_control().summary() == {"fixed": 5}


@pytest.mark.parametrize("given", ["auto", "3", "auto:4"])
def test_a_length_that_is_given_wins(tmp_path: Path, given: str) -> None:
    """`auto`, too: it is an answer here, not the absence of one."""
    file = tmp_path / "fast.json"
    result({"ngram": [step(4, 3)]}).settings_file().write(file)
    assert (
        ModelOptions(settings=file, num_draft_tokens=given).llm_arguments()["num_draft_tokens"]
        == given
    )


def test_the_report_says_what_a_server_does() -> None:
    found = result({"ngram": [step(4, 3), step(16, 0)]}, schedule=[step(4, 3), step(16, 0)])
    texts = [getattr(block, "text", "") for block in document(found).blocks]
    assert (
        "With --settings, serve drafts with ngram: 5 from 1 request on, 3 from 4 requests on, none from 16 requests on."
        in texts
    )


def test_the_table_by_load_says_what_the_sentence_says() -> None:
    """Catches a table that recommends another drafter's drafts where the settings turn drafting
    off."""
    loads = [step(4, 12, "suffix k=12"), step(8, 2)]
    found = result({"ngram": [step(4, 0), step(8, 2)], "suffix": loads[:1]}, schedule=loads)
    blocks = document(found).blocks
    [table] = [
        block
        for block in blocks
        if isinstance(block, Table) and block.columns[0].heading == "requests at once"
    ]
    assert [column.heading for column in table.columns[:3]] == [
        "requests at once",
        "with --settings",
        "fastest there",
    ]
    assert [row[:3] for row in table.rows] == [
        ["4", "none", "suffix k=12"],
        ["8", "none", "ngram k=2"],
    ]
    texts = [getattr(block, "text", "") for block in blocks]
    assert (
        "With --settings, serve drafts with ngram: 5 from 1 request on, none from 4 requests on."
        in texts
    )
    for changes, words in (
        ({"speculate": False}, "none"),
        ({"length": "auto:8"}, "auto:8"),
        ({}, "5"),
    ):
        assert result({}, **changes).nodes_at(4) == words


def test_disturbed_runs_are_counted_with_the_share_that_others_used() -> None:
    calm = result({})
    others = OtherProcesses(
        mean=0.23, highest=0.5, allowed=0.15, num_runs=4, num_disturbed=2, num_repeated=0
    )
    busy = calm.model_copy(update={"others": others})
    sentence = (
        "The machine was busy: other processes used 23% of the processors on average, at most 50%; "
        "2 of 4 runs were disturbed."
    )
    texts = [getattr(block, "text", "") for block in document(busy).blocks]
    assert any(text.startswith(sentence) for text in texts)
    assert not any("busy" in getattr(block, "text", "") for block in document(calm).blocks)
