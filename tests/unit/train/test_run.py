"""Runs: resumed ones give the same bits, broken ones keep what was good, folders are not
overwritten."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import CheckpointError, ConfigError, NumericalError, OutriderError
from outrider.lab.progress import Progress
from outrider.lab.result import read_result
from outrider.train import feature_cache
from outrider.train.config import TrainConfig
from outrider.train.early_exit import EarlyExitRecipe
from outrider.train.material import TrainingData
from outrider.train.measure import MeasurePlan
from outrider.train.recipe import FeatureBatch, LossReport
from outrider.train.run import TrainSpec, own_device, run_training
from outrider.train.texts import TrainingText
from outrider.train.train_result import TrainResult
from tests.unit.lab.test_claim import another_process_with
from tests.unit.train.material import Interrupting, save_responses, spec_for


def finished(spec: TrainSpec) -> TrainResult:
    result = run_training(spec)
    assert result is not None
    return result


def weights(spec: TrainSpec) -> dict[str, torch.Tensor]:
    return load_file(spec.out / "drafter" / "model.safetensors")


def assert_same(one: TrainSpec, other: TrainSpec) -> None:
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


@pytest.mark.parametrize(("step", "cache"), [(3, 0), (4, 0), (2, 10**6)])
def test_resumed_is_uninterrupted(tmp_path: Path, step: int, cache: int) -> None:
    """Bit for bit, at the end of an epoch (3 steps) and inside one, with features from the cache
    and without."""
    whole = spec_for(tmp_path, "whole", feature_cache=cache)
    cut = spec_for(tmp_path, "cut", feature_cache=cache)
    expected = finished(whole)
    with pytest.raises(KeyboardInterrupt):
        run_training(cut, Interrupting(step))
    assert (cut.out / "checkpoint.pt").exists()
    found = finished(replace(cut, resume=True))
    assert_same(whole, cut)
    assert found.curve == expected.curve
    assert found.losses == expected.losses
    assert found.steps == expected.steps == 6


@pytest.mark.slow
def test_a_late_cache_entry_does_not_change_the_bits(tmp_path: Path) -> None:
    """What a killed run cached after its last checkpoint was computed in other batches: it must be
    forgotten."""
    whole = spec_for(tmp_path, "whole", feature_cache=30_000)
    cut = spec_for(tmp_path, "cut", feature_cache=30_000)
    finished(whole)
    with pytest.raises(KeyboardInterrupt):
        run_training(cut, Interrupting(2))
    checkpoint = (cut.out / "checkpoint.pt").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run_training(replace(cut, resume=True), Interrupting(5))
    # as if the kill had come before the next one was written
    (cut.out / "checkpoint.pt").write_bytes(checkpoint)
    finished(replace(cut, resume=True))
    assert_same(whole, cut)


def test_what_a_finished_run_leaves(tmp_path: Path) -> None:
    """A drafter, a result that can be read again, the resolved config; no checkpoints, no features."""
    spec = spec_for(tmp_path, feature_cache=10**6)
    result = finished(spec)
    assert sorted(path.name for path in spec.out.iterdir()) == [
        "config.json",
        "drafter",
        "result.json",
    ]
    assert read_result(spec.out / "result.json") == result
    saved = json.loads((spec.out / "config.json").read_text())
    assert saved["run"]["train"]["seed"] == 0
    assert {"torch", "transformers", "outrider"} <= set(saved["versions"])
    assert [point.step for point in result.curve] == [0, 3, 6]
    assert result.curve[-1].loss < result.curve[0].loss
    with pytest.raises(ConfigError, match="holds a run already"):
        run_training(spec)
    with pytest.raises(ConfigError, match="is finished"):
        run_training(replace(spec, resume=True))


@pytest.mark.slow
def test_the_best_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that makes it worse must leave the drafter of the best epoch."""
    spec = spec_for(
        tmp_path, config=TrainConfig(epochs=2, batch_size=4, lr=5.0, clip=1e9, held_out=0.2)
    )
    result = finished(spec)
    best = max(result.curve, key=lambda point: point.tau)
    assert result.best_step == best.step
    assert best.tau > result.curve[-1].tau
    if best.step == 0:
        assert torch.equal(weights(spec)["scale"], torch.ones(64))


# of each batch: its texts, and what random draws of its loss begin with
Seen = list[tuple[tuple[int, ...], int]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, Seen]:
    """What runs train on, and what they validate on."""
    batches: tuple[Seen, Seen] = ([], [])
    good = EarlyExitRecipe.loss

    def noting(self: EarlyExitRecipe, batch: FeatureBatch) -> LossReport:
        numbers = (batch.tokens[:, 0] - 10).tolist()  # as `texts` writes them
        batches[not torch.is_grad_enabled()].append((tuple(numbers), torch.initial_seed()))
        return good(self, batch)

    monkeypatch.setattr(EarlyExitRecipe, "loss", noting)
    return batches


def test_every_epoch_has_an_order_of_its_own(tmp_path: Path, seen: tuple[Seen, Seen]) -> None:
    """All texts but the held-out ones are in each. Catches epochs in the order of the first one,
    and one that is cut short."""
    finished(spec_for(tmp_path))
    trained, held_out = seen
    first = trained[: len(trained) // 2]
    second = trained[len(trained) // 2 :]
    epochs = [[number for numbers, _ in epoch for number in numbers] for epoch in (first, second)]
    validated = {number for numbers, _ in held_out for number in numbers}
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted({*range(12)} - validated)
    assert epochs[0] != epochs[1]
    assert all(len(numbers) <= 2 for numbers, _ in trained), "of a micro-batch"


def test_random_draws_differ_between_batches_but_not_between_validations(
    tmp_path: Path, seen: tuple[Seen, Seen]
) -> None:
    """Catches the same anchors in every epoch, and curves that move because the validation drew
    others."""
    config = spec_for(tmp_path).config
    for out, seed in (("zero", 0), ("one", 1)):
        finished(spec_for(tmp_path, out, config=replace(config, seed=seed)))
    trained, held_out = seen
    seeds = [seed for _, seed in trained]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 5, "two runs, two epochs, ten texts in twos"
    each = len(held_out) // 6  # two runs, each validated before, between and after its epochs
    assert (
        held_out[:each]
        == held_out[each : 2 * each]
        == held_out[2 * each : 3 * each]
        != held_out[3 * each : 4 * each]
    )


def test_the_learning_rate_rises_then_falls_along_a_cosine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps, two of them to warm up; the last one is a step before the end, where the floor
    would be."""
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def noting(self: torch.optim.AdamW, *given: Any) -> Any:
        rates.extend({group["lr"] for group in self.param_groups})
        return step(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    base = spec_for(tmp_path)
    finished(
        replace(
            base,
            config=replace(
                base.config, epochs=4, max_steps=10, warmup=0.2, min_lr_share=0.1, lr=0.01
            ),
        )
    )
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 8)) / 2 for done in range(8)]
    assert rates == pytest.approx([0.01 * share for share in (0.5, 1.0, *cosine)])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_stops_and_keeps_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Broken numbers must not reach weights; the message names what is left and what to try."""
    calls: list[int] = []
    good = EarlyExitRecipe.loss

    def breaking(self: EarlyExitRecipe, batch: FeatureBatch) -> LossReport:
        report = good(self, batch)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 8:  # two micro-batches a step: in step 4, behind the first epoch
                factor = float("nan")
                if where == "gradient":
                    report.loss.register_hook(lambda gradient: gradient * factor)
                else:
                    report.loss = report.loss * factor
        return report

    monkeypatch.setattr(EarlyExitRecipe, "loss", breaking)
    spec = spec_for(tmp_path)
    with pytest.raises(
        NumericalError,
        match=r"stopped at step 4 of 6: .*NaN.*step [03], expected tau.*lower learning rate",
    ):
        run_training(spec)
    assert all(torch.isfinite(value).all() for value in weights(spec).values())
    monkeypatch.setattr(EarlyExitRecipe, "loss", good)
    assert finished(replace(spec, resume=True)).steps == 6


def test_a_full_disk_ends_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features can be computed again: the run warns once and continues, with the same result."""

    def full(tensors: Any, path: Path) -> None:
        raise OSError(28, "No space left on device")

    plain = spec_for(tmp_path, "plain")
    finished(plain)
    monkeypatch.setattr(feature_cache, "save_file", full)
    cached = spec_for(tmp_path, "cached", feature_cache=10**6)
    progress = Interrupting(at=10**9)
    assert run_training(cached, progress) is not None
    assert sum("No space left" in line for line in progress.lines) == 1
    assert_same(plain, cached)


def test_a_full_disk_at_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous checkpoint stays whole, no traceback."""
    spec = spec_for(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_training(spec, Interrupting(2))
    before = (spec.out / "checkpoint.pt").read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OutriderError, match=r"checkpoint cannot be written.*--resume"):
            run_training(replace(spec, resume=True))
    assert (spec.out / "checkpoint.pt").read_bytes() == before
    assert finished(replace(spec, resume=True)).steps == 6


@pytest.mark.slow
def test_a_full_disk_among_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message says to do goes on with the responses that are there."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    spec = spec_for(
        tmp_path,
        material=TrainingData(prompts=str(tmp_path / "prompts.jsonl")),
        only_responses=True,
    )
    opened: Any = Path.open

    def full(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "a" and path.read_text().count("\n") == 2:  # the head, and the first response
            raise OSError(28, "No space left on device")
        return opened(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(
            OutriderError, match=r"1 are kept: make room, then the same command without --resume"
        ):
            run_training(spec)
    assert run_training(spec) is None
    assert len((spec.out / "responses.jsonl").read_text().splitlines()) == 3


def test_nothing_is_trained_that_cannot_be_measured(tmp_path: Path) -> None:
    """Responses of ten tokens at most, compared with drafts of eleven: the untrained head would be
    kept as the best."""
    spec = spec_for(tmp_path)
    settings = {"draft": str(tmp_path / "target"), "fixed": 11, "depth": 12}
    with pytest.raises(ConfigError, match="held-out responses are shorter"):
        run_training(replace(spec, kind="acceptance", settings=settings))


def test_a_resumed_run_must_be_the_same(tmp_path: Path) -> None:
    """Another learning rate in the middle would be neither run; where it logs is free."""
    spec = spec_for(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_training(spec, Interrupting(2))
    other = replace(spec, resume=True, config=replace(spec.config, lr=0.5))
    with pytest.raises(ConfigError, match=r"train\.lr: 0\.01 then, 0\.5 now"):
        run_training(other)
    assert finished(replace(spec, resume=True, config=replace(spec.config, log_every=7))).steps == 6
    with pytest.raises(ConfigError, match="no run to resume"):
        run_training(replace(spec, out=tmp_path / "nothing", resume=True))


def test_a_folder_in_which_another_process_trains(tmp_path: Path) -> None:
    """Refused without a trace; the folder is free again afterwards."""
    spec = spec_for(tmp_path)
    with (
        another_process_with(spec.out),
        pytest.raises(ConfigError, match=r"another run writes .*--out"),
    ):
        run_training(spec)
    assert not spec.out.exists()
    assert finished(spec).steps == 6


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Half a file after a crash of the file system."""
    spec = spec_for(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_training(spec, Interrupting(2))
    (spec.out / "checkpoint.pt").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(CheckpointError, match="damaged"):
        run_training(replace(spec, resume=True))


@pytest.mark.parametrize(
    ("asked", "environment", "number"),
    [
        ("cuda:2", {}, 2),
        ("auto", {}, 0),
        ("auto", {"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, 3),
    ],
)
def test_the_target_is_where_accelerate_trains(
    asked: str, environment: dict[str, str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches several processes whose targets are all on the first GPU, and a head on another GPU
    than the one asked for."""
    current = [torch.device("cuda", 0)]
    for name, answer in (("is_available", True), ("device_count", 4), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert own_device(asked) == torch.device("cuda", number) == current[-1]


def test_a_step_is_a_mean_over_positions(tmp_path: Path) -> None:
    """However its texts, of 3 to 21 tokens, are divided into passes: the losses of two steps, and
    the held-out one after them."""
    chosen = [
        TrainingText(f"t{n}", [10 + n, 11], [20 + (n * k) % 30 for k in range(3 + 2 * n)])
        for n in range(10)
    ]
    material = TrainingData(responses=save_responses(tmp_path / "even.jsonl", chosen))
    plan = TrainConfig(
        epochs=1, max_steps=2, batch_size=4, lr=1e-3, held_out=0.2, log_every=1, clip=1e9
    )
    specs = [
        spec_for(tmp_path, f"{size}", material=material, config=replace(plan, micro_batch=size))
        for size in (4, 3)
    ]
    one, two = map(finished, specs)
    assert [x.loss for x in two.losses] == pytest.approx([x.loss for x in one.losses], rel=1e-5)
    assert [x.loss for x in two.curve] == pytest.approx([x.loss for x in one.curve], rel=1e-5)
    assert one.curve[-1].loss != one.curve[0].loss


@pytest.mark.slow
def test_accumulation_is_the_larger_batch(tmp_path: Path) -> None:
    """Two micro-batches of two are one of four up to rounding: catches a mean of means, in which
    short texts count for more."""
    chosen = [
        TrainingText(f"t{n}", [10 + n, 11], [20 + (n * k) % 30 for k in range(3 + 2 * n)])
        for n in range(10)
    ]
    material = TrainingData(responses=save_responses(tmp_path / "even.jsonl", chosen))
    plan = TrainConfig(epochs=2, batch_size=4, lr=1e-2, held_out=0.2, log_every=1)
    one, two = (
        finished(
            spec_for(
                tmp_path, f"{micro}", material=material, config=replace(plan, micro_batch=micro)
            )
        )
        for micro in (4, 2)
    )
    assert [x.loss for x in two.losses] == pytest.approx([x.loss for x in one.losses], rel=1e-4)
    assert one.losses[-1].loss < one.losses[0].loss
    assert [x.loss for x in two.curve] == pytest.approx([x.loss for x in one.curve], rel=1e-4)


@pytest.mark.slow
def test_bfloat16_autocast_and_tensorboard(tmp_path: Path) -> None:
    """Mixed precision, after a run without it in the same process; logs with both curves."""
    finished(spec_for(tmp_path, "first"))
    config = TrainConfig(epochs=1, batch_size=4, precision="bf16", tensorboard=True, held_out=0.2)
    spec = spec_for(tmp_path, "second", config=config)
    assert finished(spec).curve[-1].tau > 1
    assert weights(spec)["scale"].dtype == torch.float32
    assert list((spec.out / "tensorboard").iterdir())


def test_measuring_at_a_temperature_of_nearly_zero_is_greedy() -> None:
    assert MeasurePlan(temperatures=(1e-8, 1.0)).temperatures == (0.0, 1.0)


class Counted(Progress):
    """How many units each stage announces, and how many it does."""

    def __init__(self) -> None:
        self.announced: dict[str, int] = {}
        self.done: Counter[str] = Counter()
        self._name = ""

    def stage(self, name: str, total: int, max_s: float = math.inf) -> None:
        self._name = name
        self.announced[name] = total

    def advance(self, units: int = 1) -> None:
        self.done[self._name] += units

    skip = advance


@pytest.mark.slow
def test_every_stage_does_what_it_announces(tmp_path: Path) -> None:
    """Catches a stage that counts tasks and advances by prompts: '16 of 4'."""
    progress = Counted()
    assert run_training(
        spec_for(tmp_path, measure=MeasurePlan(prompts=2, temperatures=(0.0, 1.0), max_tokens=4)),
        progress,
    )
    assert progress.done == progress.announced
    assert progress.announced["measuring on held-out prompts"] >= 4


@pytest.mark.slow
def test_answers_that_the_context_cannot_hold_are_measured_shorter(tmp_path: Path) -> None:
    """Catches a run of hours at whose end nothing is measured, because its answers were to fill the
    context."""
    spec = spec_for(
        tmp_path, measure=MeasurePlan(prompts=1, temperatures=(0.0,), max_tokens=100_000)
    )
    result = finished(spec)
    assert "after" in {one.label for one in result.measured}
    assert all(one.emitted > 0 for one in result.measured)
    [note] = [note for note in result.notes if "measure_tokens" in note]
    assert "half of the context, not 100000" in note
    short = finished(
        spec_for(
            tmp_path, "short", measure=MeasurePlan(prompts=1, temperatures=(0.0,), max_tokens=4)
        )
    )
    assert not [note for note in short.notes if "measure_tokens" in note]
