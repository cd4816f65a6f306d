"""Files of specdec_bench, read back as NVIDIA's `speculation_profile.build_profile` reads them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import BenchResult, RunRecord
from outrider.report.specdec import write_folder
from tests.unit.report.results import bench, cell, measured

RUNS = [
    RunRecord(prompt=0, text="one", tokens=[1, 3, 2], times_s=[0.5, 0.6, 0.7]),
    RunRecord(prompt=1, text="two", tokens=[1, 1, 4, 1], times_s=[0.4, 0.5, 0.6, 0.9]),
]
QUESTIONS = [(1, "first?"), (2, "then?")]


def with_runs() -> BenchResult:
    """A bench of one cell, whose two prompts are a conversation."""
    settings = [measured(number, runs=RUNS) for number in range(2)]
    return bench(cell(*settings, questions=QUESTIONS))


def profile_of(out: dict[str, Any], num_draft_tokens: int) -> dict[str, Any]:
    """What the published reader makes of `acceptance_rate.json`: entry i of a vector is about draft
    token i + 1, which is kept by steps of i + 2 tokens or more."""
    joint = {int(count): share for count, share in out["Joint_Acceptance_Rate"].items()}
    histogram = {int(count): num for count, num in out["Acceptance_Length_Histogram"].items()}
    steps = sum(histogram.values())
    return {
        "marginal": [joint.get(index + 2, 0.0) for index in range(num_draft_tokens)],
        "mean": sum(count * num for count, num in histogram.items()) / steps,
    }


def test_the_published_reader_finds_the_mean(tmp_path: Path) -> None:
    folders = write_folder(with_runs(), tmp_path)
    assert len(folders) == 2
    for folder in folders:
        [out] = json.loads((folder / "acceptance_rate.json").read_text())
        assert out["Acceptance_Length_Histogram"] == {"1": 4, "2": 1, "3": 1, "4": 1}
        assert out["Request_AL"] == {"0": {"0": 2.0, "1": 1.75}}
        assert out["Average_AL"] == pytest.approx(1.875)
        profile = profile_of(out, 3)
        assert profile["mean"] == pytest.approx(13 / 7)
        assert 1 + sum(profile["marginal"]) == pytest.approx(profile["mean"]), (
            "its check of consistency"
        )
        assert all(before >= after for before, after in pairwise(profile["marginal"]))
        shares = out["Conditional_Acceptance_Rate"]
        assert shares["1"] == 1
        assert shares["2"] == pytest.approx(3 / 7)
        assert shares["3"] == pytest.approx(2 / 3)


def test_lengths_that_no_step_had_are_left_out_as_there(tmp_path: Path) -> None:
    jump = RunRecord(prompt=0, text="x", tokens=[1, 4], times_s=[0.1, 0.2])
    result = bench(cell(measured(1, runs=[jump]), questions=QUESTIONS))
    [folder] = write_folder(result, tmp_path)
    [out] = json.loads((folder / "acceptance_rate.json").read_text())
    assert out["Conditional_Acceptance_Rate"] == {"1": 1.0, "4": 0.5}
    assert out["Joint_Acceptance_Rate"] == {"1": 1.0, "4": 0.5}


def test_times_and_answers(tmp_path: Path) -> None:
    folder = write_folder(with_runs(), tmp_path)[1]
    [out] = json.loads((folder / "timing.json").read_text())
    assert out["E2E Request Time"]["mean"] == "0.8000"
    assert out["TTFT Time"]["max"] == "0.5000"
    assert out["Number of Output Tokens"]["min"] == "6.0000"
    assert set(out["TTFT Time"]["quantiles"]) == {"0.25", "0.5", "0.75"}
    # (6 - 1) / 0.2 and (7 - 1) / 0.5
    assert out["Request Generation Tokens Per Second"]["max"] == "25.0000"
    [line] = (folder / "responses.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "question_id": 0,
        "turns": ["first?", "then?"],
        "choices": [{"index": 0, "turns": ["one", "two"]}],
    }


def test_a_result_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no runs"):
        write_folder(bench(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_folder(with_runs(), tmp_path / "file")
