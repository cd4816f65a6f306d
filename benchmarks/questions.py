"""Questions of the data sets in `../shared/data`, as people put them: no prompt format and no
tokenizer.

Workloads: GSM8K's test set, HumanEval, Spec-Bench's own categories, and "mt": MT-bench, one
question of each category in turn.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from workload import SHARED

# its other categories are MT-bench's: "mt"
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
QUESTIONS = ("gsm8k", "code", *SPEC_BENCH, "mt")


def lines(file: str) -> list[dict[str, Any]]:
    """Every object of a JSON Lines file below `../shared/data`."""
    return [
        json.loads(line)
        for line in (SHARED / "data" / file).read_text(encoding="utf-8").split("\n")
        if line
    ]


def questions(workload: str, count: int, skip: int = 0) -> list[str]:
    """The first `count` questions of a workload after `skip`, always the same ones; fewer where it
    has no more."""
    chosen = slice(skip, skip + count)
    if workload == "code":
        return [item["prompt"] for item in lines("humaneval/problems.jsonl")[chosen]]
    if workload == "gsm8k":
        return [item["question"] for item in lines("gsm8k/test.jsonl")[chosen]]
    turns: dict[str, list[str]] = {}
    for item in lines("spec_bench/question.jsonl"):
        turns.setdefault(item["category"], []).append(item["turns"][0])
    if workload == "mt":
        groups = zip(
            *(texts for category, texts in turns.items() if category not in SPEC_BENCH),
            strict=False,
        )
        return list(itertools.chain.from_iterable(groups))[chosen]
    return turns[workload][chosen]
