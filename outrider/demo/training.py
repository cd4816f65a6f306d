"""Problems that the demo pair may be trained on: the first of those that its recipe
(`tools/demo_models`) makes."""

from __future__ import annotations

import lzma
from pathlib import Path

from outrider.errors import ConfigError

# one a line; written by tools/demo_models/workload.py
QUESTIONS = Path(__file__).with_name("training.txt.xz")


def training_prompts(count: int) -> list[str]:
    """Returns the prompts of the first `count` problems. Raises ConfigError for more than there
    are."""
    questions = lzma.decompress(QUESTIONS.read_bytes()).decode().splitlines()
    if count > len(questions):
        raise ConfigError(
            f"demo:{count} asks for more than the {len(questions)} problems that come with "
            "outrider; a checkout makes more: "
            f"python -m tools.demo_models.workload --training {count} FILE"
        )
    return [f"Question: {question}\nAnswer:" for question in questions[:count]]
