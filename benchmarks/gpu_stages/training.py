"""The package's own recipes for an EAGLE-3 and a block head, on the demo target, for the time there
is.

The same calls that `outrider train` makes (`outrider/train/run.py`): the target answers problems of
the demo, a recipe is built, `TrainLoop` trains and validates it; then the saved head drafts for
held-out prompts. `run.py` is not used, because it has no limit of time.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.demo import demo_paths
from outrider.demo.training import training_prompts
from outrider.lab.progress import Progress
from outrider.lab.runner import Runner
from outrider.models.loading.load import (
    load_config,
    load_module,
    load_tokenizer,
    own_dtype,
    resolve_dtype,
)
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from outrider.settings import parse_settings
from outrider.stats import DecodeStats
from outrider.train.config import TrainConfig
from outrider.train.features import FeatureSource
from outrider.train.kinds import KINDS
from outrider.train.loop import TrainLoop
from outrider.train.material import TrainingData, gather
from outrider.train.recipe import Calibrates, RecipeSetup
from outrider.train.responses import ResponsePlan
from outrider.train.texts import TrainingText, fitting, split, token_counts

if TYPE_CHECKING:
    from gpu_stages.context import Context

MINUTES = 2.0
RECIPES = ("eagle3", "block")
TEXTS = 1024
TINY_TEXTS = 4
TINY_STEPS = 2
MAX_STEPS = 100_000  # until the rate is known
# steps that are not timed, and those by which the others are planned
TIMED_AFTER = 5
TIMED_STEPS = 20
TRAINING_SHARE = 0.85  # of the planned time: the rest is for the validations between epochs
RESERVE = 0.15  # of a recipe's time, for validation and drafting at the end


@dataclass(frozen=True)
class Bench:
    """The target and the texts that both recipes train on."""

    context: Context
    target: Any  # transformers module
    tokenizer: Any
    dtype: torch.dtype  # of the checkpoint
    train: list[TrainingText]
    held_out: list[TrainingText]


def run(context: Context) -> dict[str, Any]:
    """Responses once, then each recipe within its half of the time left."""
    logging.disable_progress_bar()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-gpu-") as name:
        folder = Path(name)
        start = time.monotonic()
        bench = prepared(context, folder)
        context.keep(
            {
                "responses_s": time.monotonic() - start,
                "texts": len(bench.train) + len(bench.held_out),
            }
        )
        for index, kind in enumerate(RECIPES):
            share = context.left_s() / (len(RECIPES) - index)
            found[kind] = trained(bench, kind, folder / kind, share)
            context.keep({"recipes": found})
            context.say(_words(kind, found[kind]))
    return {"recipes": found}


def table(result: dict[str, Any]) -> list[list[str]]:
    """A row for each recipe; nothing here has a floor."""
    return [
        [f"training: {kind}", _words(kind, one), "", ""]
        for kind, one in result.get("recipes", {}).items()
    ]


def prepared(context: Context, folder: Path) -> Bench:
    """The demo target's own answers to problems of the demo, and the target as a module."""
    count = TINY_TEXTS if context.tiny else TEXTS
    prompts = folder / "prompts.jsonl"
    lines = [
        json.dumps({"prompt": prompt, "task": "reasoning"}) for prompt in training_prompts(count)
    ]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    target = str(demo_paths().target)
    options = Options(
        target,
        draft=str(demo_paths().draft),
        drafter="draft-model",
        device=str(context.device),
        runtime="auto" if context.on_cuda else "eager",
        max_num_seqs=64,
    )
    plan = ResponsePlan(max_tokens=24 if context.tiny else 160)
    source = resolve(str(target))
    tokenizer = load_tokenizer(source)
    config = load_config(source)
    texts, _ = gather(
        TrainingData(prompts=str(prompts)), options, "demo", tokenizer, plan, folder, Progress()
    )
    train, held_out = split(fitting(texts, 512), 0.1, 0)
    dtype = resolve_dtype("auto", config, context.device, ours=False)
    module = load_module(source, config, dtype, context.device)
    return Bench(context, module, tokenizer, own_dtype(config), train, held_out)


class Pace(Progress):
    """A `Progress` that plans a loop's steps by how fast the first ones were, and ends it when its
    time is over."""

    def __init__(self, context: Context, until: float) -> None:
        self.loop: TrainLoop | None = None
        self._context = context
        self._until = until
        self._timed: tuple[int, float] | None = None

    def advance(self, units: int = 1) -> None:
        loop = self.loop
        left = self._context.left_s() - self._until
        if loop is None or not units or self._context.tiny:
            return
        step = loop.state.step
        if step == TIMED_AFTER:
            self._timed = step, left
        elif self._timed is not None and step == TIMED_AFTER + TIMED_STEPS:
            each = (self._timed[1] - left) / TIMED_STEPS
            loop.total = step + int(TRAINING_SHARE * max(left, 0.0) / each)
        if left <= 0:
            loop.total = step


def trained(bench: Bench, kind: str, folder: Path, share: float) -> dict[str, Any]:
    """One recipe, trained for its share of the time, validated and put to work."""
    context = bench.context
    recipe_kind = KINDS.load(kind)
    settings = parse_settings(recipe_kind.Settings, {}, f"recipe '{kind}'")
    max_steps, log_every = (TINY_STEPS, 1) if context.tiny else (MAX_STEPS, 10)
    given = TrainConfig(epochs=MAX_STEPS, max_steps=max_steps, log_every=log_every)
    config = given.resolve(
        num_parameters=sum(p.numel() for p in bench.target.parameters()),
        context=512,
        device=str(context.device),
        kind_lr=recipe_kind.default_lr,
        warm=False,
    )
    vocab_size = bench.target.get_output_embeddings().weight.shape[0]
    counts = token_counts(bench.train, vocab_size)
    random.seed(0)
    torch.manual_seed(0)
    recipe = recipe_kind.build(
        RecipeSetup(bench.target, bench.tokenizer, "demo", settings, counts, None, bench.dtype)
    )
    folder.mkdir()
    _reset_peak(context)
    pace = Pace(context, until=context.left_s() - (1 - RESERVE) * share)
    loop = TrainLoop(
        recipe,
        FeatureSource(bench.target, recipe.signals),
        bench.train,
        bench.held_out,
        config,
        folder,
        context.device,
        pace,
    )
    pace.loop = loop
    try:
        loop.run()
        if isinstance(recipe, Calibrates):
            with torch.no_grad():
                recipe.calibrate(loop.held_out_batches())
    finally:
        loop.close()
    recipe.save(_made(folder / "drafter"))
    state = loop.state
    return {
        "steps": state.step,
        "seconds": state.seconds,
        "steps_per_s": state.step / state.seconds,
        "batch_size": config.batch_size,
        "precision": config.precision,
        "loss_begin": state.losses[0][1],
        "loss_end": state.losses[-1][1],
        "expected_tau": [[point["step"], point["tau"]] for point in state.curve],
        "best_step": state.best_step,
        "peak_bytes": _peak(context),
        "at_work": at_work(bench, recipe_kind, folder / "drafter"),
    }


def at_work(bench: Bench, kind: Any, head: Path) -> dict[str, Any]:
    """Acceptance of the saved head on held-out prompts, greedy, counted as in
    `outrider/train/measure.py`."""
    context = bench.context
    parsed = Configuration.parse(kind.drafter)
    options = {
        name: str(head) if value == "{folder}" else value
        for name, value in parsed.drafter_options.items()
    }
    configuration = Configuration(parsed.drafter, parsed.num_draft_tokens, options)
    runner = Runner(
        Options(str(demo_paths().target), device=str(context.device), runtime="eager"),
        [configuration],
    )
    prompts = list(dict.fromkeys(tuple(text.prompt) for text in bench.held_out))[
        : 1 if context.tiny else 16
    ]
    params = SamplingParams(temperature=0.0, max_tokens=16 if context.tiny else 128)
    traces = runner.open(configuration).run([list(prompt) for prompt in prompts], params, 4)
    total = DecodeStats()
    for trace in traces:
        total = total.merge(trace.stats)
    return {"prompts": len(prompts), "tau": total.tau, "alpha": total.alpha}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _reset_peak(context: Context) -> None:
    context.release()
    if context.on_cuda:
        torch.cuda.reset_peak_memory_stats(context.device)


def _peak(context: Context) -> int | None:
    """Most bytes that tensors took on the device; None on a CPU."""
    return torch.cuda.max_memory_allocated(context.device) if context.on_cuda else None


def _words(kind: str, one: dict[str, Any]) -> str:
    tau = one["at_work"]["tau"]
    return (
        f"{one['steps']} steps, {one['steps_per_s']:.1f} a second, loss {one['loss_begin']:.3f} to {one['loss_end']:.3f}, "
        f"tau {tau:.2f}"
    )
