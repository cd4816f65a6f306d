"""`run_training`: responses, features, training, measuring; one folder that a cut run continues in.

OUT/config.json       what was asked for, resolved, with versions; a resumed run must be the same one
OUT/responses.jsonl   the target's responses (responses.py)
OUT/checkpoint.pt, best.pt, features/, before/    while it runs
OUT/drafter/          the best drafter so far: `--draft OUT/drafter`
OUT/result.json       the learning curve and what was measured: `outrider report OUT/result.json`
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.build import DEMO, Options
from outrider.errors import ConfigError, OutriderError, counted, install_hint
from outrider.lab.journal import claimed
from outrider.lab.progress import Progress
from outrider.machine import versions
from outrider.models.loading.load import (
    load_config,
    load_module,
    load_tokenizer,
    own_dtype,
    resolve_device,
    resolve_dtype,
)
from outrider.models.source import ModelSource, resolve
from outrider.settings import parse_settings
from outrider.train.checkpoint import GO_ON, why_unwritten
from outrider.train.config import TrainConfig, check_same
from outrider.train.feature_cache import FeatureCache
from outrider.train.features import FeatureSource
from outrider.train.kinds import KINDS
from outrider.train.loop import BEST, CHECKPOINT, TrainLoop
from outrider.train.material import RESPONSES, TrainingData, gather
from outrider.train.measure import MeasurePlan, measure
from outrider.train.recipe import Calibrates, Recipe, RecipeSetup
from outrider.train.responses import ResponsePlan
from outrider.train.texts import TrainingText, fitting, split, token_counts
from outrider.train.train_result import CurvePoint, TrainingLoss, TrainResult
from outrider.wellformed import load_object

DRAFTER = "drafter"
BEFORE = "before"
FEATURES = "features"
CONFIG = "config.json"
RESULT = "result.json"


@dataclass(frozen=True)
class TrainSpec:
    """Everything that shapes a run; what the command line fills in."""

    kind: str
    # the target's folder or hub id, the machine, and who drafts while responses are regenerated
    options: Options
    name: str  # of the target, as the user says it: it may be 'demo'
    out: Path
    material: TrainingData
    responses: ResponsePlan = field(default_factory=ResponsePlan)
    init: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    config: TrainConfig = field(default_factory=TrainConfig)
    feature_cache: int = 0  # bytes on disk; 0: features are computed anew every epoch
    measure: MeasurePlan = field(default_factory=MeasurePlan)
    resume: bool = False
    only_responses: bool = False  # end when the responses are there

    @property
    def asked(self) -> Options:
        """The options for what knows the embedded pair by its name, and shows that name."""
        return replace(self.options, target=DEMO) if self.name == DEMO else self.options


def run_training(
    spec: TrainSpec, progress: Progress | None = None, command: str = ""
) -> TrainResult | None:
    """All stages; None with `only_responses`, and in processes besides the first.

    Raises OutriderError; KeyboardInterrupt leaves a run that `resume` continues with.
    """
    progress = progress if progress is not None and _is_main() else Progress()
    if spec.options.quantise is not None:
        raise ConfigError(
            "training reads the checkpoint's own weights: leave --quantise out; what was trained "
            "can draft for the rounded "
            "target, too"
        )
    kind = KINDS.load(spec.kind)
    settings = parse_settings(kind.Settings, spec.settings, f"kind '{spec.kind}'")
    spec.material.check(spec.init)
    device = own_device(spec.options.device)
    if spec.options.threads is not None:
        torch.set_num_threads(spec.options.threads)
    source = resolve(spec.options.target, spec.options.revision)
    config_of_target = load_config(source, spec.options.trust_remote_code)
    tokenizer = load_tokenizer(source, spec.options.trust_remote_code)
    if _num_processes() > 1 and spec.material.needs_target:
        raise ConfigError(
            "several processes train, but one answers: run the same command in one process with "
            "--only-responses; then "
            f"all of them --responses {spec.out / RESPONSES} and another --out"
        )
    with claimed(spec.out) if _is_main() else nullcontext():
        if _is_main():
            _open_folder(spec, asdict(settings), command)
        try:
            return _run(
                spec, kind, settings, source, config_of_target, tokenizer, device, progress, command
            )
        except OutriderError:
            if _is_main() and not any((spec.out / name).exists() for name in (CHECKPOINT, DRAFTER)):
                # nothing was trained: the corrected command may use the folder
                (spec.out / CONFIG).unlink(missing_ok=True)
            raise


def _run(
    spec: TrainSpec,
    kind: Any,
    settings: Any,
    source: ModelSource,
    config_of_target: Any,
    tokenizer: Any,
    device: torch.device,
    progress: Progress,
    command: str,
) -> TrainResult | None:
    texts, notes = gather(
        spec.material, spec.asked, spec.name, tokenizer, spec.responses, spec.out, progress
    )
    if spec.only_responses:
        progress.say(
            f"{counted(len(texts), 'response')} written to {spec.out / RESPONSES}; --resume goes "
            "on with training"
        )
        return None
    # torch's own, with gradients
    dtype = resolve_dtype(spec.options.dtype, config_of_target, device, ours=False)
    target = load_module(source, config_of_target, dtype, device, spec.options.trust_remote_code)
    saved = own_dtype(config_of_target) if spec.options.dtype == "auto" else dtype
    job = _Job(spec, kind, settings, target, tokenizer, device, progress, notes, saved)
    result = job.run(texts).model_copy(update={"command": command})
    if not _is_main():
        return None
    result.write(spec.out / RESULT)
    for leftover in (CHECKPOINT, BEST):
        (spec.out / leftover).unlink(missing_ok=True)
    for folder in (FEATURES, BEFORE):
        shutil.rmtree(spec.out / folder, ignore_errors=True)
    return result


class _Job:
    """Training and measuring on a loaded target."""

    def __init__(
        self,
        spec: TrainSpec,
        kind: Any,
        settings: Any,
        target: Any,
        tokenizer: Any,
        device: torch.device,
        progress: Progress,
        notes: list[str],
        saved_dtype: torch.dtype,
    ) -> None:
        self._saved_dtype = saved_dtype
        self._spec = spec
        self._kind = kind
        self._settings = settings
        self._target = target
        self._tokenizer = tokenizer
        self._device = device
        self._progress = progress
        self._notes = notes
        self._vocab_size = target.get_output_embeddings().weight.shape[0]
        self._config = spec.config.resolve(
            num_parameters=sum(p.numel() for p in target.parameters()),
            context=getattr(target.config.get_text_config(), "max_position_embeddings", None)
            or 1 << 20,
            device=str(device),
            kind_lr=getattr(kind, "default_lr", None),
            warm=spec.init is not None,
        )

    def run(self, texts: list[TrainingText]) -> TrainResult:
        spec = self._spec
        config = self._config
        fitting_texts = fitting(texts, config.max_length)
        if dropped := len(texts) - len(fitting_texts):
            self._notes.append(
                f"{dropped} of {len(texts)} texts are too long or have no response of two tokens"
            )
        train, held_out = split(fitting_texts, config.held_out, config.seed)
        recipe = self._recipe(train)
        cache = (
            FeatureCache(spec.out / FEATURES, spec.feature_cache, self._progress.say)
            if spec.feature_cache
            else None
        )
        source = FeatureSource(self._target, recipe.signals, cache)
        with Logs(spec.out / "tensorboard", wanted=config.tensorboard) as logs:
            loop = TrainLoop(
                recipe,
                source,
                train,
                held_out,
                config,
                spec.out,
                self._device,
                self._progress,
                on_best=partial(save_drafter, recipe.save, spec.out / DRAFTER),
                log=logs.add,
            )
            try:
                if not (spec.resume and loop.resume()) and loop.is_main:
                    save_drafter(recipe.save, spec.out / BEFORE)
                loop.run()
                calibration = self._calibrate(recipe, loop)
                is_main = loop.is_main
            finally:
                loop.close()
        num_trained = sum(p.numel() for p in recipe.module.parameters() if p.requires_grad)
        del recipe, source
        self._target = None
        gc.collect()
        measured, problems = self._measured(held_out) if is_main else ([], [])
        return TrainResult(
            target=spec.name,
            recipe=spec.kind,
            config=config.as_dict(),
            settings=_plain(asdict(self._settings)),
            responses=_plain({**spec.material.as_dict(), **asdict(spec.responses)}),
            num_train=len(train),
            num_held_out=len(held_out),
            num_train_tokens=sum(len(text.response) for text in train),
            num_trained_parameters=num_trained,
            drafter_bytes=sum(
                f.stat().st_size for f in (spec.out / DRAFTER).rglob("*") if f.is_file()
            ),
            steps=loop.state.step,
            seconds=loop.state.seconds,
            best_step=loop.state.best_step,
            curve=[CurvePoint(**point) for point in loop.state.curve],
            losses=[TrainingLoss(step=step, loss=loss) for step, loss in loop.state.losses],
            calibration=calibration,
            measured=measured,
            notes=[*self._notes, *problems],
        )

    def _recipe(self, train: list[TrainingText]) -> Recipe:
        """Built under the run's seed: random weights are part of the run."""
        counts = token_counts(train, self._vocab_size)
        setup = RecipeSetup(
            self._target,
            self._tokenizer,
            self._spec.name,
            self._settings,
            counts,
            self._spec.init,
            self._saved_dtype,
        )
        random.seed(self._config.seed)
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self._config.seed)
            recipe: Recipe = self._kind.build(setup)
        if not any(p.requires_grad for p in recipe.module.parameters()):
            raise ConfigError(f"kind '{self._spec.kind}' has nothing to train")
        return recipe

    def _calibrate(self, recipe: Recipe, loop: TrainLoop) -> dict[str, float]:
        if not isinstance(recipe, Calibrates):
            return {}
        with torch.no_grad():
            temperature = recipe.calibrate(loop.held_out_batches())
        if loop.is_main:
            save_drafter(recipe.save, self._spec.out / DRAFTER)
        return temperature

    def _measured(self, held_out: list[TrainingText]) -> tuple[list[Any], list[str]]:
        spec = self._spec
        if spec.measure.prompts == 0:
            return [], ["nothing was measured on held-out prompts (--measuring measure_limit=0)"]
        folders = {
            label: spec.out / name for label, name in (("before", BEFORE), ("after", DRAFTER))
        }
        # of kinds that are trained for a draft model
        draft = getattr(self._settings, "draft", "") or None
        return measure(
            spec.asked, self._kind, folders, draft, held_out, spec.measure, self._progress
        )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The value after a round trip through JSON: tuples are lists there."""
    values_: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return values_


def save_drafter(save: Callable[[Path], None], folder: Path) -> None:
    """Through a scratch folder: what is there is whole. Raises OutriderError when the disk is full."""
    scratch = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        save(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    except OutriderError:
        raise
    except Exception as error:
        why = why_unwritten(folder.parent, error)
        shutil.rmtree(scratch, ignore_errors=True)
        raise OutriderError(
            f"the drafter cannot be written to {folder} ({why}); {GO_ON}"
        ) from error


def own_device(asked: str) -> torch.device:
    """This process's device, made the current one: accelerate moves what is trained there. Raises
    as `resolve_device`."""
    device = resolve_device(asked)
    if device.type == "cuda":
        device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if _num_processes() > 1 else device
        )
        torch.cuda.set_device(device)
    return device


def _num_processes() -> int:
    """Processes that `accelerate launch` started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _open_folder(spec: TrainSpec, settings: dict[str, Any], command: str) -> None:
    """Refuse a folder of another run, and note what this one is. Raises ConfigError."""
    path = spec.out / CONFIG
    asked = _plain(
        {
            "kind": spec.kind,
            "target": spec.name,
            "init": None if spec.init is None else str(spec.init),
            "settings": settings,
            "train": spec.config.as_dict(),
            "responses": asdict(spec.responses),
            "material": spec.material.as_dict(),
        }
    )
    if path.exists() and not spec.resume:
        raise ConfigError(
            f"{spec.out} holds a run already: --resume continues with it, or give another --out"
        )
    if spec.resume:
        if not path.exists():
            raise ConfigError(f"there is no run to resume in {spec.out}; leave --resume out")
        if (spec.out / RESULT).exists():
            raise ConfigError(
                f"the run in {spec.out} is finished: outrider report {spec.out / RESULT}"
            )
        try:
            before = load_object(path)["run"]
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}); begin anew with another --out"
            ) from error
        check_same(before, asked)
        return
    try:
        spec.out.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"run": asked, "versions": versions(), "command": command}, indent=1) + "\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


class Logs:
    """Scalars by step. Raises ConfigError when TensorBoard is asked for and missing."""

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        self._writer: Any = None
        if not wanted:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard logs need the package tensorboard: {install_hint('train')}, or "
                "leave tensorboard=true out"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def add(self, step: int, numbers: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()
