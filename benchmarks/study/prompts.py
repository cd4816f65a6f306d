"""Prompts of the studies: what is trained on, and what is held out."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from workload import SHARED, encode

from outrider.train.texts import TrainingText
from tools.demo_models.problems import GRADES, problems

HELD_OUT_SEED = 77  # of the demo's held-out problems; training problems are another split
HEAD_CHARACTERS = 400  # of a Python file, as a prompt
HELD_OUT_FILES = 80  # Python files at the end of the corpus that no study trains on


def task_prompts(task: str, count: int) -> list[str]:
    """The first `count` held-out prompts of a task; nobody here trains on them."""
    if task.startswith("demo"):
        grades = {int(task[-1]): 1.0} if task[-1].isdigit() else None
        return [
            one.prompt
            for one in islice(problems(HELD_OUT_SEED, held_out=True, weights=grades), count)
        ]
    if task == "gsm8k":
        return [_asked(item["question"]) for item in _lines("gsm8k/test.jsonl", count)]
    if task == "humaneval":
        return [item["prompt"] for item in _lines("humaneval/problems.jsonl", count)]
    if task == "math":
        return [_asked(item["problem"]) for item in _lines("math/problems.jsonl")[-count:]]
    if task == "python":
        return python_heads()[-HELD_OUT_FILES:][:count]
    raise ValueError(f"no task '{task}'")


def training_prompts(domain: str, count: int) -> list[str]:
    """Prompts of a domain to train on."""
    if domain == "gsm8k":
        return [_asked(item["question"]) for item in _lines("gsm8k/train.jsonl", count)]
    if domain == "math":
        return [_asked(item["problem"]) for item in _lines("math/problems.jsonl", count)]
    if domain == "python":
        return python_heads()[:-HELD_OUT_FILES][:count]
    raise ValueError(f"no domain '{domain}'")


def python_heads() -> list[str]:
    """The first lines of every Python file that is long enough to go on."""
    found = []
    for item in _lines("code/python.jsonl"):
        if len(item["text"]) > 2 * HEAD_CHARACTERS:
            found.append(item["text"][:HEAD_CHARACTERS].rsplit("\n", 1)[0] + "\n")
    return found


def held_out(tasks: dict[str, int], model: Path) -> list[TrainingText]:
    """Prompts of every task, as the model's tokens."""
    found = []
    for task, count in tasks.items():
        for number, tokens in enumerate(encode(task_prompts(task, count), model)):
            found.append(TrainingText(f"{task}-{number}", tokens, [], task))
    return found


def demo_tasks(count: int) -> dict[str, int]:
    """So many held-out problems of every grade."""
    return {f"demo grade {grade}": count for grade in GRADES}


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _lines(file: str, count: int | None = None) -> list[dict[str, Any]]:
    path = SHARED / "data" / file
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, count)]
