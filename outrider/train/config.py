"""Every choice of a training run, in one place. What a kind of drafter needs besides it is in the
kind's own `Settings`.

The resolved config is saved with the run (`config.json`); a resumed run must have the same one,
`RESUMABLE` fields aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from outrider.errors import ConfigError
from outrider.settings import checked, parse_settings, setting

OWNER = "training"
WARM_SHARE = 0.2  # of the learning rate, where training continues from a trained drafter
LARGE_TARGET = 1_000_000_000  # parameters from which the defaults are those for GPUs
RESUMABLE = ("log_every", "save_every_s", "tensorboard")  # may differ when a run continues


@checked()
@dataclass(frozen=True)
class TrainConfig:
    """Choices of the training loop. Where a field allows it, 0 means "by the target's size": see
    `resolve`."""

    epochs: int = setting(
        0,
        "passes over the texts; 0: 6 below 1B parameters of the target, else 3",
        at_least=0,
        common=True,
    )
    max_steps: int = setting(
        0, "stop after this many optimizer steps; 0: when the epochs are over", at_least=0
    )
    batch_size: int = setting(
        0,
        "texts per optimizer step; 0: 8 below 1B parameters of the target, else 16",
        at_least=0,
        common=True,
    )
    micro_batch: int = setting(
        0, "texts per pass; 0: the batch, at most 8. Smaller ones are accumulated", at_least=0
    )
    max_length: int = setting(
        0,
        "tokens of a text; longer ones are cut. 0: 2048, or the target's context where it is "
        "shorter",
        at_least=0,
    )
    lr: float = setting(
        0.0,
        "highest learning rate; 0: the kind's, else 1e-3, from 1B parameters 3e-4; with --init a "
        "fifth",
        at_least=0,
    )
    min_lr_share: float = setting(
        0.05, "of `lr`, left at the end of the cosine", at_least=0, at_most=1
    )
    warmup: float = setting(
        0.04, "share of the steps in which the learning rate rises", at_least=0, below=1
    )
    betas: str = setting("0.9,0.95", "of AdamW")
    weight_decay: float = setting(0.01, "of AdamW, on matrices only", at_least=0)
    clip: float = setting(1.0, "largest gradient norm", above=0)
    precision: Literal["auto", "no", "bf16", "fp16"] = setting(
        "auto", "mixed precision: auto is bf16 on CUDA and none on CPU"
    )
    held_out: float = setting(
        0.1,
        "share of the texts that are kept for validation and measuring, at least 1",
        above=0,
        below=1,
    )
    seed: int = setting(
        0, "of weights, order, anchors and sampled responses", at_least=0, common=True
    )
    log_every: int = setting(
        10, "optimizer steps between two points of the training curve", at_least=1
    )
    save_every_s: float = setting(
        300.0, "seconds between checkpoints; there is one at the end of every epoch, too"
    )
    tensorboard: bool = setting(
        False, "write TensorBoard logs into the run's folder (needs the package tensorboard)"
    )

    def __post_init__(self) -> None:
        if 0 < self.max_length < 8:
            raise ConfigError(
                f"{OWNER}: max_length must be at least 8 tokens, got {self.max_length}"
            )
        if self.batch_size and self.micro_batch > self.batch_size:
            raise ConfigError(
                f"{OWNER}: micro_batch {self.micro_batch} is larger than batch_size "
                f"{self.batch_size}"
            )
        self.adam_betas()

    def adam_betas(self) -> tuple[float, float]:
        """AdamW's two betas. Raises ConfigError when they are no two numbers below 1."""
        try:
            first, second = (float(word) for word in self.betas.split(","))
        except ValueError as error:
            raise ConfigError(
                f"{OWNER}: betas must be two numbers like 0.9,0.95, got '{self.betas}'"
            ) from error
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ConfigError(f"{OWNER}: betas must lie in [0, 1), got '{self.betas}'")
        return first, second

    def resolve(
        self, *, num_parameters: int, context: int, device: str, kind_lr: float | None, warm: bool
    ) -> TrainConfig:
        """Without zeros that stand for a default. `num_parameters` and `context` (tokens) are the
        target's. `warm`: weights are trained already."""
        large = num_parameters >= LARGE_TARGET
        batch = self.batch_size or (16 if large else 8)
        precision = (
            ("bf16" if device.startswith("cuda") else "no")
            if self.precision == "auto"
            else self.precision
        )
        if precision == "fp16" and not device.startswith("cuda"):
            raise ConfigError(
                f"{OWNER}: precision fp16 needs a CUDA device; on {device} use bf16 or no"
            )
        return replace(
            self,
            epochs=self.epochs or (3 if large else 6),
            batch_size=batch,
            micro_batch=self.micro_batch or min(batch, 8),
            max_length=min(self.max_length or 2048, context),
            lr=self.lr or (WARM_SHARE if warm else 1.0) * (kind_lr or (3e-4 if large else 1e-3)),
            precision=precision,
        )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TrainConfig:
        """From names and texts. Raises ConfigError with the nearest name."""
        config: TrainConfig = parse_settings(cls, dict(given), OWNER)
        return config

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Whether a run may continue under this description. Raises ConfigError naming what differs."""
    free = {f"train.{name}" for name in RESUMABLE}
    old = _flat(before)
    new = _flat(now)
    if different := sorted(name for name in {*old, *new} - free if old.get(name) != new.get(name)):
        shown = "; ".join(
            f"{name}: {old.get(name)} then, {new.get(name)} now" for name in different[:4]
        )
        raise ConfigError(
            f"the interrupted run was another one ({shown}); give its options, or another --out"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            values.update(_flat(value, f"{prefix}{name}."))
        else:
            values[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return values


CONFIG_FIELDS = tuple(field.name for field in fields(TrainConfig))
