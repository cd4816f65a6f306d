"""The stages `gain`, `peers` and `training` of `benchmarks/gpu.py`, in their small form on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.demo import demo_paths
from outrider.lab.runner import Step

REPOSITORY = Path(__file__).resolve().parents[3]
BENCHMARKS = REPOSITORY / "benchmarks"
UNNEEDED = ("llguidance", "fastapi", "structlog")  # that a GPU machine may not have


class TimeOverError(Exception):
    """Stands for the script's own."""


@dataclass
class Stand:
    """What a stage uses of the script's `Context`."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tiny: bool = True
    deadline_s: float = field(default_factory=lambda: time.monotonic() + 120)
    clock: Callable[[], float] = time.monotonic
    on_cuda: bool = False
    kept: list[dict[str, Any]] = field(default_factory=list)

    def left_s(self) -> float:
        return self.deadline_s - self.clock()

    def check_time(self, needed_s: float = 0.0) -> None:
        if self.left_s() < needed_s:
            raise TimeOverError

    def say(self, line: str) -> None: ...

    def release(self) -> None: ...

    def keep(self, found: dict[str, Any]) -> None:
        self.kept.append(json.loads(json.dumps(found)))  # plain JSON, as it is now


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: import_module(f"gpu_stages.{name}")


def step(at_s: float, tokens: int, kept: int, rows: int = 1) -> Step:
    return Step(
        0, tokens, [1] * tokens, None, None, list(range(kept)), 1, False, kept + 1, rows, 0.0, at_s
    )


def trace(*steps: Step) -> Any:
    return SimpleNamespace(
        steps=list(steps), decode_tokens=lambda: sum(one.taken for one in steps[1:])
    )


# ---------------------------------------------------------------- gain


def test_prediction_by_hand(stage: Any) -> None:
    """A plain step of 10 ms; steps of three drafts, of 13 ms, that emit 4 and 2 tokens: 60 ms of
    plain steps in 26."""
    gain = stage("gain")
    costs = gain.Costs({1: {0: 0.010, 3: 0.013}})
    own = [[trace(step(5.0, 3, 3), step(5.5, 3, 3), step(7.0, 3, 1))]]
    assert gain.predicted(own, costs, plain_token_s=0.010) == pytest.approx(0.060 / 0.026)
    assert gain.tokens_per_s(own) == pytest.approx(6 / 2.0), (
        "the first step and its tokens are left out"
    )


def test_prediction_of_a_batch_counts_a_step_once_and_by_its_widest_row(stage: Any) -> None:
    """Two rows in one step, then one row alone: 20 ms with one row, 30 with two, 2 more for each
    draft token."""
    gain = stage("gain")
    costs = gain.Costs({1: {0: 0.020, 4: 0.028}, 2: {0: 0.030, 4: 0.038}})
    first = [step(1.0, 0, 0, rows=2), step(2.0, 4, 4, rows=2)]
    second = [step(1.0, 0, 0, rows=2), step(2.0, 2, 1, rows=2), step(3.0, 2, 2)]
    own = [[trace(*first), trace(*second)]]
    assert gain.predicted(own, costs, plain_token_s=0.015) == pytest.approx(
        0.015 * (5 + 2 + 3) / (0.038 + 0.024)
    )


def test_floor_of_gain_is_judged_on_devices_only(stage: Any) -> None:
    def run(measured: float) -> dict[str, Any]:
        return {"measured": measured, "predicted": 2.0, "identical": 3, "compared": 4}

    gain = stage("gain")
    result = {
        "judged": True,
        "batches": {"1": {"runs": {"none": run(1.0), "a": run(1.9), "b": run(1.89)}}},
    }
    rows = gain.table(result)
    assert [(row[0], row[3]) for row in rows] == [
        ("gain, batch 1: a", "ok"),
        ("gain, batch 1: b", "below"),
    ]
    assert "3 of 4 texts" in rows[0][1]
    assert [row[3] for row in gain.table(result | {"judged": False})] == ["", ""]
    assert gain.table({}) == []


def test_widened_target_computes_what_the_demo_does(stage: Any, tmp_path: Path) -> None:
    facts = stage("gain").widen(demo_paths().target, tmp_path, 1536, 2, torch.device("cpu"))
    small, wide = (
        AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
        for at in (demo_paths().target, tmp_path)
    )
    ids = torch.arange(2, 40)[None]
    with torch.inference_mode():
        difference = (small(ids).logits - wide(ids).logits).abs().max()
    assert difference < 1e-3
    assert (facts["num_hidden_layers"], facts["intermediate_size"]) == (10, 1536)
    assert (
        facts["parameters"]
        == sum(p.numel() for p in wide.parameters())
        > sum(p.numel() for p in small.parameters())
    )


def test_full_size_costs_what_8b_cost(stage: Any) -> None:
    mlp, extra = stage("gain").LIKE_8B
    assert 7.5e9 < (8 + extra) * 3 * 384 * mlp < 8.5e9


@pytest.mark.nightly
def test_gain_in_its_small_form(stage: Any) -> None:
    context = Stand()
    gain = stage("gain")
    result = gain.run(context)
    assert list(result["batches"]) == ["1", "2"]
    drafters = {"none", "draft-model k=3", "draft-model auto", "ngram", "suffix", "eagle3", "block"}
    for cell in result["batches"].values():
        assert set(cell["runs"]) == drafters, "embedded heads draft for the widened target, too"
        assert all(run["identical"] == run["compared"] > 0 for run in cell["runs"].values())
        assert cell["runs"]["none"]["predicted"] == pytest.approx(1.0)
        assert cell["runs"]["draft-model k=3"]["tau"] > 2
        assert all(run["predicted"] > 0 and run["measured"] > 0 for run in cell["runs"].values())
    assert [list(one["batches"]) for one in context.kept if "batches" in one] == [
        ["1"],
        ["1", "2"],
    ], "each when it is known"
    assert len(gain.table(result)) == 2 * (len(drafters) - 1)


@pytest.mark.slow
def test_a_stage_whose_time_is_over_stops(stage: Any) -> None:
    with pytest.raises(TimeOverError):
        stage("gain").run(Stand(deadline_s=0.0))


# ---------------------------------------------------------------- peers


@pytest.mark.nightly
def test_peers_in_their_small_form(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = stage("peers")
    decoders = peers.hf_decoders

    def with_a_broken_one(*arguments: Any, **options: Any) -> dict[str, Any]:
        def broken(prompt: list[int]) -> list[int]:
            raise ValueError("no such cache")

        return {**decoders(*arguments, **options), "broken": broken}

    monkeypatch.setattr(peers, "hf_decoders", with_a_broken_one)
    result = peers.run(Stand())
    assert result["failures"]["broken"] == "ValueError: no such cache"
    assert result["failures"][peers.COMPILED].startswith(peers.LEFT_OUT)
    assert set(result["eager"]) == {
        peers.OURS,
        peers.OURS_DRAFTED,
        peers.EAGER,
        f"{peers.EAGER}, assistant_model",
        f"{peers.EAGER}, prompt look-up",
    }
    assert all(one["identical"] == one["compared"] == 2 for one in result["eager"].values())


@pytest.mark.slow
def test_peers_with_static_caches(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that only devices run, on a CPU, where `generate` takes a static cache uncompiled."""
    peers = stage("peers")

    def ours(context: Any, target: Path, max_tokens: int) -> tuple[dict[str, Any], str, list[str]]:
        model = peers.hf_model(target, context.device)
        decode = peers.hf_decoders("plain", model, model, max_tokens)["plain"]
        return {peers.OURS: decode}, "eager", []

    monkeypatch.setattr(peers, "our_decoders", ours)
    result = peers.run(Stand(on_cuda=True))
    assert set(result["compiled"]) == {peers.OURS, peers.COMPILED}
    assert result["compiled"][peers.COMPILED]["identical"] == 2
    assert result["compile_s"][peers.COMPILED] > 0
    assert "Static cache" in result["failures"][f"{peers.COMPILED}, assistant_model"], (
        "the peer's own reason"
    )
    verdicts = [row[3] for row in peers.table(result) if row[2]]
    assert len(verdicts) == 2
    assert set(verdicts) <= {"ok", "below"}


def test_prompts_of_peers_have_one_length(stage: Any) -> None:
    prompts = stage("peers").prompts_of_one_length(demo_paths().target, 4)
    assert len(set(map(len, prompts))) == 1
    assert len(set(map(tuple, prompts))) == 4


def test_floors_of_peers(stage: Any) -> None:
    peers = stage("peers")

    def rates(ours: float, name: str, theirs: float) -> dict[str, Any]:
        return {
            who: {"tokens_per_s": rate, "identical": 1, "compared": 1}
            for who, rate in ((peers.OURS, ours), (name, theirs))
        }

    result = {
        "judged": True,
        "eager": rates(149, peers.EAGER, 100),
        "compiled": rates(100, peers.COMPILED, 100),
    }
    assert [row[2:] for row in peers.table(result) if row[2]] == [["1.5x", "below"], ["1x", "ok"]]
    assert not any(row[3] for row in peers.table(result | {"judged": False}))
    assert ["peers: x", "failed: E: why", "", ""] in peers.table({"failures": {"x": "E: why"}})


def test_a_peer_is_not_compiled_without_time(stage: Any) -> None:
    peers = stage("peers")
    race = peers.Race(Stand(deadline_s=30.0, clock=lambda: 0.0), [[1]], {})
    decoders = {"slow": lambda prompt: pytest.fail("must not begin")}
    assert race.enter(decoders, needed_s=40.0) == {}
    assert decoders == {}
    assert race.failures == {"slow": "left out: 30 s were left"}


def test_a_text_that_differs_is_counted(stage: Any) -> None:
    peers = stage("peers")
    race = peers.Race(Stand(), [[1], [2]], {})
    found = race.run(
        {peers.OURS: lambda prompt: [7], "other": lambda prompt: [7] if prompt == [1] else [8]},
        until=0.0,
    )
    assert (found["other"]["identical"], found["other"]["compared"]) == (1, 2)


# ---------------------------------------------------------------- training


@pytest.mark.nightly
def test_training_in_its_small_form(stage: Any) -> None:
    context = Stand()
    training = stage("training")
    result = training.run(context)
    for kind in ("eagle3", "block"):
        one = result["recipes"][kind]
        assert one["steps"] == training.TINY_STEPS
        assert one["loss_end"] < one["loss_begin"]
        assert one["at_work"]["tau"] >= 1
        assert [point[0] for point in one["expected_tau"]][-1] == training.TINY_STEPS
        assert one["peak_bytes"] is None
    assert [list(one["recipes"]) for one in context.kept if "recipes" in one] == [
        ["eagle3"],
        ["eagle3", "block"],
    ]
    assert len(training.table(result)) == 2


def test_pace_plans_the_steps_that_fit_and_ends_in_time(stage: Any) -> None:
    """Half a second a step: 25 steps take 12.5 of 50 seconds, and 85 % of what is left holds 63
    more."""
    training = stage("training")
    now = [0.0]
    pace = training.Pace(Stand(tiny=False, deadline_s=60.0, clock=lambda: now[0]), until=10.0)
    pace.loop = SimpleNamespace(total=training.MAX_STEPS, state=SimpleNamespace(step=0))
    for _ in range(25):
        now[0] += 0.5
        pace.loop.state.step += 1
        pace.advance()
    assert pace.loop.total == 25 + 63
    now[0], pace.loop.state.step = 50.0, 70
    pace.advance()
    assert pace.loop.total == 70, "the time is over: this step was the last"


# ---------------------------------------------------------------- all


@pytest.mark.slow
def test_stages_need_nothing_that_a_gpu_machine_lacks() -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {UNNEEDED!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.path[:0] = [{str(BENCHMARKS)!r}, {str(REPOSITORY)!r}]
import gpu_stages.gain, gpu_stages.peers, gpu_stages.training
from outrider.train.kinds import KINDS
for kind in gpu_stages.training.RECIPES:
    KINDS.load(kind)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
