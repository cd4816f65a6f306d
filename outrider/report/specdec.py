"""A bench result as the files that NVIDIA's specdec_bench writes, so that what reads those reads
ours: a folder for each setting and condition, with

acceptance_rate.json   acceptance lengths by request and turn, histogram, conditional and joint rates
timing.json            seconds and tokens per second
responses.jsonl        questions and answers

https://github.com/NVIDIA/Model-Optimizer, examples/specdec_bench, `metrics/`. As there, a file holds
a list of runs; ours is the only one in it. Rates are keyed by the tokens of a step, the target's own
among them, so that 1 is a step without an accepted draft token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import BenchResult, Cell, Measured, RunRecord

QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Answer:
    """One run, with where it belongs."""

    conversation: int
    turn: int  # from 0, as there
    task: str
    question: str
    run: RunRecord
    end_to_end_tokens_per_s: float  # of all rows of its cell


def write_folder(result: BenchResult, folder: Path) -> list[Path]:
    """Write the files of every setting; returns their folders. Raises ConfigError where the folder
    cannot be written, or the result has no runs."""
    groups = dict(_answers(result))
    if not groups:
        raise ConfigError("the result has no runs: 'outrider bench --out FOLDER' keeps them")
    folders = []
    try:
        for name, answers in groups.items():
            path = folder / name
            path.mkdir(parents=True, exist_ok=True)
            _dump([acceptance_rate(answers)], path / "acceptance_rate.json")
            _dump([timing(answers)], path / "timing.json")
            lines = [json.dumps(line, ensure_ascii=False) for line in responses(answers)]
            (path / "responses.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            folders.append(path)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return folders


def acceptance_rate(answers: Sequence[Answer]) -> dict[str, Any]:
    """The fields of `acceptance_rate.json`."""
    requests: dict[str, dict[str, float]] = {}
    by_task: dict[str, list[float]] = {}
    steps: dict[int, int] = {}
    for answer in answers:
        length = fmean(answer.run.tokens)
        requests.setdefault(str(answer.conversation), {})[str(answer.turn)] = length
        by_task.setdefault(answer.task, []).append(length)
        for count in answer.run.tokens:
            steps[count] = steps.get(count, 0) + 1
    histogram = dict(sorted(steps.items()))
    total = sum(histogram.values())
    conditional: dict[str, float] = {}
    joint: dict[str, float] = {}
    left = total
    share = 1.0
    for count, num_steps in histogram.items():
        conditional[str(count)] = left / total / share
        share = left / total
        joint[str(count)] = share
        left -= num_steps
    return {
        "Request_AL": requests,
        "Category_AL": {task: fmean(lengths) for task, lengths in sorted(by_task.items())},
        "Average_AL": fmean(length for turns in requests.values() for length in turns.values()),
        "Acceptance_Length_Histogram": {str(count): num for count, num in histogram.items()},
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }


def timing(answers: Sequence[Answer]) -> dict[str, Any]:
    """The fields of `timing.json`. Throughput is that of the runs, for settings take turns."""
    runs = [answer.run for answer in answers]
    gaps = [gap for run in runs for gap in np.diff(run.times_s).tolist()]
    rates = [
        (sum(run.tokens) - 1) / (run.times_s[-1] - run.times_s[0])
        for run in runs
        if len(run.times_s) > 1
    ]
    tokens = sum(sum(run.tokens) for run in runs)
    seconds = sum(sum(answer.run.tokens) / answer.end_to_end_tokens_per_s for answer in answers)
    fields: dict[str, Any] = {
        "Output TPS": tokens / seconds,
        "Output TPS/gpu": tokens / seconds,
        "E2E Request Time": _statistics([run.times_s[-1] for run in runs]),
        "TTFT Time": _statistics([run.times_s[0] for run in runs]),
    }
    if gaps:
        fields["Request Generation Step Time"] = _statistics(gaps)
        fields["Request Generation Tokens Per Second"] = _statistics(rates)
    fields["Number of Output Tokens"] = _statistics([sum(run.tokens) for run in runs])
    return fields


def responses(answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    """The lines of `responses.jsonl`."""
    conversations: dict[int, list[Answer]] = {}
    for answer in answers:
        conversations.setdefault(answer.conversation, []).append(answer)
    for number, turns in conversations.items():
        yield {
            "question_id": number,
            "turns": [turn.question for turn in turns],
            "choices": [{"index": 0, "turns": [turn.run.text for turn in turns]}],
        }


def _answers(result: BenchResult) -> Iterator[tuple[str, list[Answer]]]:
    """The runs of each setting under each temperature, batch size and context length, of all tasks
    together, by the folder's name."""
    groups: dict[str, list[tuple[Cell, Measured]]] = {}
    for cell in result.cells:
        for measured in cell.configurations:
            if measured.runs and cell.questions:
                label = result.configurations[measured.configuration].label
                groups.setdefault(_folder_name(label, cell), []).append((cell, measured))
    for name, parts in groups.items():
        yield name, list(_numbered(parts))


def _numbered(parts: Sequence[tuple[Cell, Measured]]) -> Iterator[Answer]:
    """Conversations are numbered over all tasks."""
    begun = -1
    for cell, measured in parts:
        number_of = {}
        for prompt, (turn, _) in enumerate(cell.questions):
            begun += turn == 1
            number_of[prompt] = begun
        for run in sorted(measured.runs, key=lambda run: run.prompt):
            turn, question = cell.questions[run.prompt]
            yield Answer(
                number_of[run.prompt],
                turn - 1,
                cell.task,
                question,
                run,
                measured.throughput_tokens_per_s,
            )


def _folder_name(label: str, cell: Cell) -> str:
    """'suffix-k-8-t0', with batch size and context length where they are not 1 and the prompt's."""
    words = [label, f"t{cell.temperature:g}"]
    words += [f"batch{cell.batch_size}"] if cell.batch_size > 1 else []
    words += [] if cell.context is None else [f"context{cell.context}"]
    return re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-")


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    """Numbers as texts of four decimals, as there."""
    quantiles = np.quantile(values, QUARTILES).tolist()
    return {
        "min": f"{min(values):.4f}",
        "max": f"{max(values):.4f}",
        "mean": f"{np.mean(values):.4f}",
        "std": f"{np.std(values):.4f}",
        "quantiles": {
            f"{share}": f"{value:.4f}" for share, value in zip(QUARTILES, quantiles, strict=True)
        },
    }


def _dump(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")
