"""Study `domain`: the shared pair's own draft, distilled on word problems only, on Python only, and
on both; alpha on each.

Prompts to train on: GSM8K's training split and heads of Python files; measured on GSM8K's test
split and on heads of files that no study trains on. The target answers them all itself, at T = 0
and 1 in turn. (HumanEval's prompts make this target end its text at once: nothing to measure.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from study.common import PAIR, WORK, Way, answers, counted, curve, joined, saved, train
from study.prompts import held_out, training_prompts

DOMAINS = ("gsm8k", "python")
NUM_PROMPTS = 200  # of each domain
MAX_NEW_TOKENS = 96  # of the answers to train on
MEASURED_TOKENS = 64
EPOCHS = 3
TASKS = {"gsm8k": 16, "python": 16}
WAY = Way("draft-model k=5", uses_draft=True)
WORDS = (
    "--init",
    PAIR / "draft",
    "--epochs",
    EPOCHS,
    "--training",
    "lr=5e-4",
    "--training",
    "feature_cache=3GB",
)


def domain_answers() -> dict[str, Path]:
    """The pair target's answers: to the prompts of each domain, and to both."""
    files = {}
    for domain in DOMAINS:
        prompts = training_prompts(domain, NUM_PROMPTS)
        files[domain] = answers(
            f"pair-{domain}",
            PAIR / "target",
            PAIR / "draft",
            prompts,
            max_new_tokens=MAX_NEW_TOKENS,
        )
    return {**files, "both": joined("pair-both.jsonl", list(files.values()))}


def domain_rows() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(counters of the drafts of every domain, their learning curves); measured once for this study
    and `distil`."""
    path = WORK / "domain.json"
    folders = {"before": PAIR / "draft"}
    curves = dict[str, Any]()
    for domain, file in domain_answers().items():
        folders[domain], result = train(
            f"domain-{domain}", "draft-model", PAIR / "target", "--responses", f"{file}", *WORDS
        )
        curves[domain] = curve(result)
    if not path.exists():
        texts = held_out(TASKS, PAIR / "target")
        path.write_text(
            json.dumps(
                counted(PAIR / "target", WAY, folders, texts, max_new_tokens=MEASURED_TOKENS)
            )
        )
    return json.loads(path.read_text()), curves


def run_domain() -> None:
    """Measure and write the result."""
    measured, curves = domain_rows()
    settings = {
        "target": "pair-14M/target",
        "draft": "pair-14M/draft",
        "prompts_to_train_on": NUM_PROMPTS,
        "epochs": EPOCHS,
        "max_new_tokens": MEASURED_TOKENS,
        "tasks": TASKS,
        "drafter": WAY.drafter,
    }
    saved("domain", {"settings": settings, "curves": curves, "measured": measured})
