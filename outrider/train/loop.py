"""The training loop: epochs over texts, features from the target, AdamW on what a recipe makes of
them.

accelerate does mixed precision, loss scaling and several GPUs (`accelerate launch -m outrider train
...`): transformers itself trains with it, it wraps a loop of our own instead of owning it, and it
adds one package (Fabric would do, but is Lightning's). Every process gets its share of each step's
micro-batches.

A run that is cut anywhere and resumed ends with the same bits on CPU as one that was not: the order
of texts is a function of (seed, epoch), random draws are seeded from (seed, step, micro-batch), and
the checkpoint has the rest. Ctrl-C waits for the end of a step. A loss that is no number ends the
run before it touches the weights.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from outrider.errors import ConfigError, NumericalError
from outrider.lab.progress import Progress
from outrider.train.checkpoint import load_trained, read_checkpoint, trained_state, write_checkpoint
from outrider.train.config import TrainConfig
from outrider.train.expected import Expectation
from outrider.train.features import FeatureSource
from outrider.train.recipe import FeatureBatch, LossReport, Recipe
from outrider.train.texts import TrainingText, collate, epoch_order

CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
# (step, numbers by name): TensorBoard, where it is wanted
Log = Callable[[int, dict[str, float]], None]


@dataclass
class Point:
    """One validation, as `CurvePoint` has it: training on a GPU needs no pydantic."""

    epoch: float
    step: int
    loss: float
    tau: float
    survival: list[float]
    parts: dict[str, float]


@dataclass
class TrainState:
    """The progress of a run. Plain data: it is part of the checkpoint."""

    step: int = 0
    best_tau: float = -math.inf
    best_step: int = 0
    validated: int = -1  # last step at which it was validated
    # losses since the last point of the training curve
    running: list[float] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)  # Points
    # (step, mean training loss since the last entry)
    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


class _LossOf(nn.Module):
    """A recipe's loss as a forward pass, which is what accelerate (autocast, DDP) wraps."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.module = recipe.module
        self.__dict__["recipe"] = recipe

    def forward(self, batch: FeatureBatch) -> LossReport:
        report: LossReport = self.__dict__["recipe"].loss(batch)
        return report


class TrainLoop:
    """One run. `folder` gets the checkpoints; `on_best` is called with better weights in place."""

    def __init__(
        self,
        recipe: Recipe,
        source: FeatureSource,
        train: Sequence[TrainingText],
        held_out: Sequence[TrainingText],
        config: TrainConfig,
        folder: Path,
        device: torch.device,
        progress: Progress,
        *,
        on_best: Callable[[], None] = lambda: None,
        log: Log = lambda step, numbers: None,
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.folder = folder
        self.state = TrainState()
        self._source = source
        self._train = train
        self._held_out = held_out
        self._device = device
        self._progress = progress
        self._on_best = on_best
        self._log = log
        self._accelerator = Accelerator(mixed_precision=config.precision, cpu=device.type == "cpu")
        recipe.module.to(device)
        decayed = [p for p in recipe.module.parameters() if p.requires_grad and p.dim() >= 2]
        others = [p for p in recipe.module.parameters() if p.requires_grad and p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.adam_betas()
        )
        self._model, self._optimizer = self._accelerator.prepare(_LossOf(recipe), optimizer)
        self.steps_per_epoch = len(epoch_order(train, config.batch_size, config.seed, 0))
        self.total = self.steps_per_epoch * config.epochs
        if config.max_steps:
            self.total = min(self.total, config.max_steps)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return self._accelerator.is_main_process

    def resume(self) -> bool:
        """Go on from the last checkpoint; False where there is none. Raises CheckpointError when it
        does not fit."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return False
        checkpoint = read_checkpoint(path, self._device)
        load_trained(self.recipe.module, checkpoint["module"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        if self._accelerator.scaler is not None and checkpoint["scaler"]:
            self._accelerator.scaler.load_state_dict(checkpoint["scaler"])
        if self._source.cache is not None and checkpoint["cache"]:
            self._source.cache.load_state(checkpoint["cache"])
        self.state = TrainState(**checkpoint["state"])
        return True

    def run(self) -> None:
        """To the end, or to Ctrl-C (KeyboardInterrupt, after a checkpoint). Afterwards the best
        weights are in place."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _interrupt_between_steps() as is_interrupted:
            if self.state.validated < 0:
                self._validate()  # the untrained drafter is the first point of the curve
            self._progress.stage("training", self.total)
            self._progress.skip(self.state.step)
            saved = time.monotonic()
            while self.state.step < self.total:
                began = time.monotonic()
                self._step()
                self.state.seconds += time.monotonic() - began
                self._progress.advance()
                if self.state.step % self.steps_per_epoch == 0 or self.state.step == self.total:
                    self._validate()
                    saved = -math.inf
                if is_interrupted() or time.monotonic() - saved >= self.config.save_every_s:
                    self._save()
                    saved = time.monotonic()
                if is_interrupted():
                    raise KeyboardInterrupt
        self._load_best()

    def close(self) -> None:
        """Forget accelerate's process-wide state, so that the next run in this process may choose
        again."""
        self._accelerator.end_training()
        self._accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=self._accelerator.num_processes == 1)

    def _step(self) -> None:
        state = self.state
        config = self.config
        step = self.state.step
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * self._rate(step)
        epoch, index = divmod(step, self.steps_per_epoch)
        numbers = epoch_order(self._train, config.batch_size, config.seed, epoch)[index]
        micro = [
            numbers[at : at + config.micro_batch]
            for at in range(0, len(numbers), config.micro_batch)
        ]
        self.recipe.module.train()
        loss, parts = self._accumulate(micro)
        norm = self._accelerator.clip_grad_norm_(self.recipe.module.parameters(), config.clip)
        if (
            norm is not None
            and config.precision != "fp16"
            and not torch.isfinite(torch.as_tensor(norm))
        ):
            self._stop_broken("a gradient")
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.step += 1
        state.running.append(loss)
        if state.step % config.log_every == 0 or state.step == self.total:
            mean = sum(state.running) / len(state.running)
            state.losses.append((state.step, mean))
            state.running = []
            rate = config.lr * self._rate(step)
            self._log(
                state.step,
                {
                    "train/loss": mean,
                    "train/lr": rate,
                    **{f"train/{k}": v for k, v in parts.items()},
                },
            )

    def _accumulate(self, micro: list[list[int]]) -> tuple[float, dict[str, float]]:
        """Gradients of the mean over the step's positions; (mean loss of this process's, parts of
        its last micro-batch)."""
        world = self._accelerator.num_processes
        rank = self._accelerator.process_index
        rounds = math.ceil(len(micro) / world)
        sizes = [self._num_positions(numbers) for numbers in micro]
        total = 0.0
        counted = 0.0
        parts = dict[str, float]()
        for round_ in range(rounds):
            index = round_ * world + rank
            # others still work: the same collective calls, without weight
            absent = index >= len(micro)
            number = min(index, len(micro) - 1)
            torch.manual_seed(_seed_of(self.config.seed, self.state.step, number))
            batch = self._source.features(
                collate(self._train, micro[number], self._device),
                progress=self.state.step / self.total,
            )
            with nullcontext() if round_ == rounds - 1 else self._accelerator.no_sync(self._model):
                report: LossReport = self._model(batch)
                # sync: once a micro-batch, and a broken loss must not go further
                value = float(report.loss.detach())
                if not math.isfinite(value):
                    self._stop_broken("the loss")
                self._accelerator.backward(
                    report.loss * (0.0 if absent else world * sizes[number] / sum(sizes))
                )
            if not absent:
                total += sizes[number] * value
                counted += sizes[number]
                parts = report.parts
        return total / max(counted, 1), parts

    def _num_positions(self, numbers: list[int]) -> float:
        """Positions that the loss of these texts is a mean over."""
        most = getattr(self.recipe, "max_positions", math.inf)
        return sum(min(len(self._train[number].response), most) for number in numbers)

    @torch.no_grad()
    def _validate(self) -> None:
        """Expected tau on the held-out texts; the best weights are kept."""
        state = self.state
        config = self.config
        self.recipe.module.eval()
        sums = Expectation()
        for batch in self.held_out_batches():
            sums.add(self._model(batch))
        if not sums.survival:
            raise ConfigError(
                "the held-out responses are shorter than the drafts to be measured: give longer "
                "ones, or more"
            )
        tau = sums.tau()
        loss = sums.mean_loss()
        if not (math.isfinite(loss) and math.isfinite(tau)):
            self._stop_broken("the validation loss")
        epoch = state.step / self.steps_per_epoch
        state.curve.append(
            asdict(Point(epoch, state.step, loss, tau, sums.mean_survival(), sums.mean_parts()))
        )
        state.validated = state.step
        self._log(state.step, {"validation/loss": loss, "validation/tau": tau})
        self._progress.say(
            f"epoch {epoch:.2g} of {config.epochs}: held-out loss {loss:.4f}, expected tau "
            f"{tau:.3f}"
        )
        if tau > state.best_tau:
            state.best_tau = tau
            state.best_step = state.step
            if self.is_main:
                write_checkpoint(self.folder / BEST, trained_state(self.recipe.module))
                self._on_best()

    @torch.no_grad()
    def held_out_batches(self) -> Iterator[FeatureBatch]:
        """Features of the held-out texts, always the same batches with the same random draws."""
        texts = self._held_out
        size = self.config.micro_batch
        numbers = sorted(range(len(texts)), key=lambda n: len(texts[n].tokens))
        for start in range(0, len(numbers), size):
            torch.manual_seed(_seed_of(self.config.seed, -1, start))
            yield self._source.features(
                collate(texts, numbers[start : start + size], self._device), split="held-out"
            )

    def _save(self) -> None:
        if not self.is_main:
            return
        scaler = self._accelerator.scaler
        cache = self._source.cache
        write_checkpoint(
            self.folder / CHECKPOINT,
            {
                "module": trained_state(self.recipe.module),
                "optimizer": self._optimizer.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "cache": None if cache is None else cache.state(),
                "state": asdict(self.state),
            },
        )

    def _load_best(self) -> None:
        load_trained(self.recipe.module, read_checkpoint(self.folder / BEST, self._device))
        self.recipe.module.eval()

    def _rate(self, step: int) -> float:
        """Share of the learning rate: linear warm-up, then a cosine down to `min_lr_share`."""
        warm = max(1, round(self.config.warmup * self.total))
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, self.total - warm)
        floor = self.config.min_lr_share
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    def _stop_broken(self, what: str) -> None:
        """Raise a NumericalError that names the files that are left."""
        state = self.state
        self._log(state.step, {"train/stopped": 1.0})
        best = f"the best drafter so far (step {state.best_step}, expected tau {state.best_tau:.3f}) is kept in {self.folder}"
        outcome = best if math.isfinite(state.best_tau) else "nothing was trained yet"
        raise NumericalError(
            f"training stopped at step {state.step} of {self.total}: {what} is NaN or infinite; "
            f"{outcome}. "
            f"Try a lower learning rate (--training lr=..., now {self.config.lr:g}), more warm-up, or "
            "--training precision=no."
        )


def _seed_of(seed: int, step: int, number: int) -> int:
    """One seed for every batch of a run; step -1 is validation."""
    return (seed * 1_000_003 + (step + 1) * 8191 + number) % (1 << 63)


@contextmanager
def _interrupt_between_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag: a checkpoint must not hold weights that half a step has changed. The
    second one is raised."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, which Ctrl-C does not reach
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
