"""A drafter at work: tau and acceptance by position on held-out prompts, before and after training.

Through the lab's runner, so the numbers are those of `outrider bench`. Speed is not measured: bench
does that, in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.errors import OutriderError
from outrider.lab.progress import Progress
from outrider.lab.runner import Runner
from outrider.sampling.params import SamplingParams, usable_temperature
from outrider.stats import DecodeStats
from outrider.train.texts import TrainingText
from outrider.train.train_result import HeldOutResult


@dataclass(frozen=True)
class MeasurePlan:
    """How much is measured; no prompts: nothing."""

    prompts: int = 16  # of each task
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 128
    batch_size: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(map(usable_temperature, self.temperatures)))


def measure(
    options: Options,
    kind: Any,
    folders: dict[str, Path],
    draft: str | None,
    held_out: Sequence[TrainingText],
    plan: MeasurePlan,
    progress: Progress,
) -> tuple[list[HeldOutResult], list[str]]:
    """(what was measured, what was not as asked and why). `folders`: label -> saved drafter;
    `kind`: a `RecipeKind`; `draft`: the draft model that its drafter needs besides the folder."""
    prompts = _prompts(held_out, plan.prompts)
    progress.stage(
        "measuring on held-out prompts",
        len(folders) * len(plan.temperatures) * sum(map(len, prompts.values())),
    )
    results: list[HeldOutResult] = []
    notes: list[str] = []
    for label, folder in folders.items():
        try:
            results += _one(options, kind, label, folder, draft, prompts, plan, progress, notes)
        except OutriderError as error:
            notes.append(f"{label}: could not be measured: {error}")
    return results, notes


def _one(
    options: Options,
    kind: Any,
    label: str,
    folder: Path,
    beside: str | None,
    prompts: dict[str, list[TrainingText]],
    plan: MeasurePlan,
    progress: Progress,
    notes: list[str],
) -> list[HeldOutResult]:
    configuration = _with_folder(Configuration.parse(kind.drafter), folder)
    draft = str(folder) if getattr(kind, "uses_draft", False) else beside
    runner = Runner(replace(options, draft=draft), [configuration])
    shown = kind.drafter.replace("{folder}", "DIR")
    runs = []
    max_tokens = min(plan.max_tokens, max(1, runner.context // 2))  # the prompt needs room, too
    note = f"measured answers have at most {max_tokens} tokens, half of the context, not {plan.max_tokens} of measure_tokens"
    if max_tokens < plan.max_tokens and note not in notes:
        notes.append(note)
    for temperature in plan.temperatures:
        for task, texts in prompts.items():
            contender = runner.open(configuration)
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=plan.seed * 1_000_003 + number,
                )
                for number in range(len(texts))
            ]
            room = runner.context - max_tokens
            traces = contender.run([text.prompt[-room:] for text in texts], params, plan.batch_size)
            total = DecodeStats()
            for trace in traces:
                total = total.merge(trace.stats)
            progress.advance(len(texts))
            runs.append(
                HeldOutResult(
                    label=label,
                    configuration=shown,
                    temperature=temperature,
                    task=task,
                    num_prompts=len(texts),
                    steps=total.steps,
                    emitted=total.emitted,
                    drafted=total.drafted,
                    accepted=total.accepted,
                    tested=total.tested,
                    accepted_per_position=total.accepted_per_position,
                )
            )
    return runs


def _with_folder(configuration: Configuration, folder: Path) -> Configuration:
    options = {
        name: str(folder) if value == "{folder}" else value
        for name, value in configuration.drafter_options.items()
    }
    return replace(configuration, drafter_options=options)


def _prompts(held_out: Sequence[TrainingText], max_prompts: int) -> dict[str, list[TrainingText]]:
    """Different prompts by task, at most this many of each."""
    prompts: dict[str, list[TrainingText]] = {}
    seen: set[tuple[int, ...]] = set()
    for text in held_out:
        key = tuple(text.prompt)
        if key not in seen and len(prompts.setdefault(text.task, [])) < max_prompts:
            prompts[text.task].append(text)
            seen.add(key)
    return prompts
