"""What the studies of trained drafters share: training by `outrider train`, measuring by the
trainer's own `measure`.

Everything is counted in tokens (tau, alpha, drafted), nothing by the clock, so other work on the
machine changes no number. Work lies in `runs/studies` (git-ignored): a study that was cut goes on
there, and what is finished is not made again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from workload import BENCHMARKS, REPOSITORY, SHARED, console, write_result

from outrider.build import Options
from outrider.demo import demo_paths
from outrider.errors import OutriderError
from outrider.lab.progress import Progress
from outrider.lab.result import read_result
from outrider.machine import versions
from outrider.models.loading.load import (
    load_config,
    load_module,
    load_tokenizer,
    own_dtype,
    resolve_dtype,
)
from outrider.models.source import resolve
from outrider.settings import parse_settings
from outrider.train.config import TrainConfig
from outrider.train.kinds import KINDS
from outrider.train.measure import MeasurePlan, measure
from outrider.train.recipe import RecipeSetup
from outrider.train.responses import read_responses
from outrider.train.run import save_drafter
from outrider.train.texts import TrainingText, fitting, split, token_counts
from outrider.train.train_result import TrainResult

WORK = REPOSITORY / "runs" / "studies"
DEMO = demo_paths().draft.parent  # asked for, so that the target's weights are unpacked
PAIR = SHARED / "models" / "pair-14M"
DEMO_PROBLEMS = 6000  # of the demo's training split, answered for the embedded heads
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Way:
    """A way to draft, as `outrider.train.measure` wants it."""

    drafter: str  # text form; {folder} stands for the drafter's folder
    uses_draft: bool = False  # the folder is a draft model


def answers(
    name: str,
    target: Path,
    draft: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    task: str = "other",
) -> Path:
    """The target's responses to prompts, made by `outrider train --only-responses`; T = 0 and 1
    take turns.

    `draft` makes it quicker and changes no answer's distribution.
    """
    out = WORK / name
    path = out / "responses.jsonl"
    done = out / "done"
    if done.exists():
        return path
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": f"{name}-{number}", "prompt": text, "task": task})
        for number, text in enumerate(prompts)
    ]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    outrider(
        "train",
        "draft-model",
        "--target",
        target,
        "--prompts",
        out / "prompts.jsonl",
        "--out",
        out,
        "--only-responses",
        "--drafter",
        "draft-model",
        "--draft",
        draft,
        "--model-options",
        "runtime=eager",
        "--threads",
        1,
        "--max-tokens",
        max_new_tokens,
        "--sampling",
        "max_num_seqs=16",
        *(["--resume"] if (out / "config.json").exists() else []),
    )
    done.touch()
    return path


def joined(name: str, files: Sequence[Path]) -> Path:
    """Several files of responses of one target as one, their texts in turn."""
    path = WORK / name
    if not path.exists():
        parts = [file.read_text(encoding="utf-8").splitlines() for file in files]
        mixed = [
            line for group in zip(*(part[1:] for part in parts), strict=False) for line in group
        ]
        path.write_text("\n".join([parts[0][0], *mixed]) + "\n", encoding="utf-8")
    return path


def demo_answers() -> Path:
    """The demo target's answers to problems of its training split: those that the embedded heads
    were trained on."""
    out = WORK / "demo"
    path = out / "responses.jsonl"
    done = out / "done"
    if not done.exists():
        outrider(
            "train",
            "medusa",
            "--target",
            "demo",
            "--prompts",
            f"demo:{DEMO_PROBLEMS}",
            "--out",
            out,
            "--only-responses",
            "--runtime",
            "eager",
            "--threads",
            1,
            "--max-tokens",
            160,
            "--sampling",
            "max_num_seqs=16",
            *(["--resume"] if (out / "config.json").exists() else []),
        )
        done.touch()
    return path


def train(
    name: str, kind: str, target: Path | str, *words: object, plugin: Path | None = None
) -> tuple[Path, TrainResult]:
    """(the trained drafter's folder, the run's result). `outrider train`, gone on with where it was
    cut, not repeated where it is finished."""
    out = WORK / name
    if not (out / "result.json").exists():
        resume = ["--resume"] if (out / "config.json").exists() else []
        shared = [
            "--model-options",
            "runtime=eager",
            "--threads",
            1,
            "--measuring",
            "measure_limit=0",
        ]
        outrider(
            "train", kind, "--target", target, "--out", out, *shared, *words, *resume, plugin=plugin
        )
    result = read_result(out / "result.json")
    assert isinstance(result, TrainResult)
    return out / "drafter", result


def untrained(
    name: str, kind: str, target: Path, settings: dict[str, Any], responses: Path
) -> Path:
    """What a run of `train` begins with: the product measures it, and deletes it when the run is
    finished."""
    folder = WORK / name
    if not folder.exists():
        config = load_config(resolve(str(target)))
        tokenizer = load_tokenizer(resolve(str(target)))
        device = torch.device("cpu")
        module = load_module(
            resolve(str(target)), config, resolve_dtype("auto", config, device, ours=False), device
        )
        texts = read_responses(responses, tokenizer, config.vocab_size)
        run = TrainConfig()
        learned, _ = split(fitting(texts, config.max_position_embeddings), run.held_out, run.seed)
        recipe = KINDS.load(kind)
        random.seed(run.seed)
        torch.manual_seed(run.seed)
        built = recipe.build(
            RecipeSetup(
                module,
                tokenizer,
                target.name,
                parse_settings(recipe.Settings, settings, kind),
                token_counts(learned, config.vocab_size),
                dtype=own_dtype(config),
            )
        )
        save_drafter(built.save, folder)
    return folder


def curve(result: TrainResult) -> dict[str, Any]:
    """The learning curve and its circumstances, as a study's result keeps them."""
    return {
        "command": result.command,
        "settings": result.settings,
        "config": result.config,
        "num_train": result.num_train,
        "num_held_out": result.num_held_out,
        "num_train_tokens": result.num_train_tokens,
        "num_trained_parameters": result.num_trained_parameters,
        "drafter_bytes": result.drafter_bytes,
        "best_step": result.best_step,
        "curve": [point.model_dump() for point in result.curve],
        "losses": [one.model_dump() for one in result.losses],
    }


def read_curve(path: Path) -> dict[str, Any] | None:
    """Of a finished run; None where it has left no result."""
    if not path.exists():
        return None
    result = read_result(path)
    assert isinstance(result, TrainResult)
    return curve(result)


def outrider(*words: object, plugin: Path | None = None) -> None:
    """The command line, as a user would run it; `plugin`: a folder with metadata of a package that
    registers more.

    Raises OutriderError when it fails.
    """
    command = [sys.executable, "-m", "outrider", *map(str, words)]
    console().print("$ outrider " + " ".join(map(str, words)))
    # `study.hard_labels` lies in the latter
    paths = [] if plugin is None else [str(plugin), str(BENCHMARKS)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, cwd=REPOSITORY, env=environment if plugin else None, check=False)
    if done.returncode:
        raise OutriderError(f"outrider {words[0]} ended with code {done.returncode}")


def counted(
    target: Path,
    way: Way,
    folders: dict[str, Path],
    texts: Sequence[TrainingText],
    *,
    max_new_tokens: int,
    batch_size: int = 8,
) -> list[dict[str, Any]]:
    """Counters by label, temperature and task. Raises OutriderError where a drafter could not be
    measured."""
    plan = MeasurePlan(len(texts), TEMPERATURES, max_new_tokens, batch_size)
    found, refused = measure(
        Options(str(target), threads=1), way, folders, None, texts, plan, Progress()
    )
    if refused:
        raise OutriderError("; ".join(refused))
    return [one.model_dump() for one in found]


def saved(name: str, content: dict[str, Any]) -> Path:
    """`benchmarks/results/studies-NAME-DATE.json`, without this machine's paths."""
    text = json.dumps(content).replace(f"{REPOSITORY}/", "").replace(str(SHARED), "../shared")
    path = write_result(f"studies-{name}", {"versions": versions(), **json.loads(text)}, 1)
    console().print(f"written: {path}")
    return path
