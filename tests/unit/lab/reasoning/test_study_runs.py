"""The whole study on a small random pair: what is forecast exactly must come out exactly."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.build import Options
from outrider.errors import ConfigError
from outrider.lab.bench import stages
from outrider.lab.bench.turn import run_group
from outrider.lab.journal import Journal
from outrider.lab.progress import Quiet
from outrider.lab.reasoning.acceptance import ALL
from outrider.lab.reasoning.result import ReasoningResult
from outrider.lab.reasoning.study import StudyPlan, run_study
from outrider.lab.result import read_result
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.types import Request, Workload
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from tests.unit.lab.explain.pairs import save_pair

pytestmark = pytest.mark.slow

PLAN = StudyPlan(
    problems=3, max_tokens=24, temperatures=(0.0, 0.8), longest=4, lengths=(2,), own_weights=False, max_other_cpu=10.0, seed=3
)


class Interrupting(Quiet):
    """Ctrl-C when a stage begins."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def stage(self, name: str, total: int, most_s: float = math.inf) -> None:
        if name.startswith(self._stage):
            raise KeyboardInterrupt


def problems(*tasks: str) -> Workload:
    words = ("How many?", "2 + 2 eggs are sold for $3. What is left?", "Why 7?", "And then?")
    requests = [Request(f"q{number}", prompt=words[number], task=task, reference="4") for number, task in enumerate(tasks)]
    return Workload("words", tuple(requests))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), noise=0.05)
    return Options(target, draft=draft, dtype="float32", runtime="eager", threads=1)


@pytest.fixture(scope="module")
def found(options: Options, tmp_path_factory: pytest.TempPathFactory) -> ReasoningResult:
    path = tmp_path_factory.mktemp("study") / "journal.jsonl"
    result, journal = run_study(options, PLAN, problems("reasoning", "chat", "reasoning", "reasoning"), path)
    journal.close()
    return result


def test_what_ran(found: ReasoningResult) -> None:
    assert [study.temperature for study in found.studies] == [0.0, 0.8]
    assert found.problems == 3
    assert any("1 requests of the workload are no reasoning problems" in note for note in found.notes)
    for study in found.studies:
        assert not [one.failure for one in study.contestants if one.failure]
        assert {one.configuration for one in study.contestants} >= {"draft-model k=2", "draft-model k=auto:4", "suffix k=8"}
        assert study.reference is not None
        assert study.reference.num_draft_tokens == study.tried
        assert [one.over_best is None for one in study.contestants].count(True) == 1
        assert study.rounds == 1
        assert study.c > 0


def test_greedy_forecasts_of_tokens_are_exact(found: ReasoningResult) -> None:
    """The replay knows where drafts are kept: τ of every length that ran must be what it said."""
    study = found.studies[0]
    ran = [one for one in study.contestants if one.role == "length" and one.num_draft_tokens is not None]
    assert len(ran) >= 2 or study.tried == 2
    for one in ran:
        assert one.tau is not None
        assert study.estimates[one.num_draft_tokens or 0].replay_tau == pytest.approx(one.tau.value)


def test_greedy_texts_are_plain(found: ReasoningResult) -> None:
    for one in found.studies[0].contestants:
        assert one.identity is not None
        assert one.identity.num_identical == one.identity.num_compared == 3
    assert all(one.identity is None for one in found.studies[1].contestants)


def test_counts_agree(found: ReasoningResult) -> None:
    for study in found.studies:
        total, *kinds = study.kinds
        assert total.kind == ALL
        assert total.tokens == study.tokens == sum(one.tokens for one in kinds)
        assert total.tested == sum(one.tested for one in kinds)
        assert total.starts == sum(one.starts for one in kinds)
        assert total.tested - total.kept == study.rejections[0].count
        assert total.kept + study.rejections[0].count <= study.tokens
        assert total.starts <= study.steps
        assert total.alpha is not None
        assert total.alpha.value == total.kept / total.tested
        curve = [one.value for one in total.survival]
        assert len(curve) <= found.longest
        assert curve == sorted(curve, reverse=True)
    greedy, drawn = (study.rejections[0] for study in found.studies)
    assert sum(greedy.reasons.values()) == greedy.count
    assert drawn.reasons == {}
    assert set(drawn.lost) & {"draft", "luck"}


def test_the_example_is_the_first_solution(found: ReasoningResult) -> None:
    example = found.example
    assert example is not None
    assert example.id == "q0"
    assert example.prompt == "How many?"
    assert len(example.pieces) == len(example.fates) == len(example.kinds) == len(example.rejected)
    corrections = [rejected for fate, rejected in zip(example.fates, example.rejected, strict=True) if fate == "correction"]
    assert corrections
    assert all(corrections)


def test_the_file_says_it_all(found: ReasoningResult, tmp_path: Path) -> None:
    found.write(tmp_path / "result.json")
    again = read_result(tmp_path / "result.json")
    assert again == found
    assert to_markdown(render(again)) == to_markdown(render(found))
    assert len((tmp_path / "result.json").read_bytes()) < 150_000
    labels = [one.label for one in found.comparable()]
    assert len(set(labels)) == len(labels)
    assert "greedy: draft-model k=2: speedup" in labels


def test_an_interrupted_study_goes_on(options: Options, tmp_path: Path) -> None:
    """What was decoded is not decoded again; the same texts and forecasts come out; another plan is refused."""
    plan, path = replace(PLAN, temperatures=(0.0,)), tmp_path / "journal.jsonl"
    workload = problems("reasoning", "reasoning")
    with pytest.raises(KeyboardInterrupt):
        run_study(options, plan, workload, path, progress=Interrupting("round"))
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = [json.loads(line)["key"] for line in lines[1:]]
    assert keys == ["solved T = 0 / 0", "solved T = 0 / 1", "costs T = 0"]
    with pytest.raises(ConfigError, match="max_tokens"):
        run_study(options, replace(plan, max_tokens=20), workload, path, resume=True)
    result, journal = run_study(options, replace(plan, budget_s=60.0), workload, path, resume=True)
    assert path.read_text(encoding="utf-8").splitlines()[: len(lines)] == lines
    costs = journal["costs T = 0"]
    assert result.studies[0].estimates[0].step_s <= min(costs.values()) * 1.0000001
    assert isinstance(journal, Journal)
    journal.close()
    assert not path.exists()


def test_ctrl_c_while_confirming_leaves_what_is_known(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of three problems: the first one's speeds are told, and the temperature that was to come is named."""
    plan = replace(PLAN, temperatures=(0.0, 0.7), problems=3)
    groups: list[int] = []

    def counted(*arguments: object, **more: object) -> object:
        groups.append(1)
        if len(groups) == 2:
            raise KeyboardInterrupt
        return run_group(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(stages, "run_group", counted)
    result, _ = run_study(options, plan, problems("reasoning", "reasoning", "reasoning"), tmp_path / "journal.jsonl")
    assert result.interrupted
    (study,) = result.studies
    assert study.ended_by == "interrupted"
    assert {one.num_problems for one in study.contestants} == {1}
    assert "not studied, the run was stopped before: T = 0.7" in result.notes
    assert "this is what was known" in to_markdown(render(result))


@pytest.mark.nightly
def test_the_demo_pair(tmp_path: Path) -> None:
    """A trained pair: greedy forecasts of tokens hold, its own weights take part, and the page says what happened."""
    plan = StudyPlan(problems=2, max_tokens=48, temperatures=(0.0,), longest=6, max_other_cpu=10.0)
    workload = load_workload("demo", limit=2)
    result, journal = run_study(Options("demo", runtime="eager"), plan, workload, tmp_path / "j")
    journal.close()
    study = result.studies[0]
    assert {one.configuration.split()[0] for one in study.contestants} >= {"early-exit", "quantised", "composite"}
    assert not [one.failure for one in study.contestants if one.failure]
    assert study.kinds[0].alpha is not None
    assert study.kinds[0].alpha.value > 0.8
    assert {one.kind for one in study.kinds} >= {"decomposition", "arithmetic"}
    for one in study.contestants:
        if one.role == "length" and one.num_draft_tokens and one.tau is not None:
            assert study.estimates[one.num_draft_tokens].replay_tau == pytest.approx(one.tau.value, rel=0.02)  # near ties
    text = to_markdown(render(result))
    assert "token by token" in text
