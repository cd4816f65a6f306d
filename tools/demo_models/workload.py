"""Problems of the demo as files: the held-out ones of the workload `demo`, and those that may be
trained on.

    python -m tools.demo_models.workload outrider/lab/workload/embedded/demo.jsonl
    python -m tools.demo_models.workload --packed 6000 outrider/demo/training.txt.xz
    python -m tools.demo_models.workload --training 16000 prompts.jsonl

The package has no generator, so its problems travel as files; tests compare them with the
generator.
"""

from __future__ import annotations

import argparse
import json
import lzma
from itertools import islice
from pathlib import Path

from tools.demo_models.problems import problems

NUM_PROBLEMS = 64
SEED = 2024  # any: the split, not the seed, keeps training questions out
TRAINING_SEED = 1


def workload_lines(count: int = NUM_PROBLEMS) -> list[str]:
    """One JSON line per problem."""
    chosen = islice(problems(SEED, held_out=True), count)
    return [
        json.dumps(
            {
                "id": f"demo-{number}",
                "task": "reasoning",
                "prompt": one.prompt,
                "reference": str(one.answer),
                "solution": one.solution,
            }
        )
        for number, one in enumerate(chosen, 1)
    ]


def packed_questions(count: int) -> bytes:
    """Questions of the training split, one a line, compressed; the same bytes every time."""
    text = "\n".join(one.question for one in islice(problems(TRAINING_SEED), count)) + "\n"
    return lzma.compress(text.encode(), preset=9)


def training_lines(count: int) -> list[str]:
    """Prompts of the training split, as JSON lines for `outrider train --prompts`."""
    return [
        json.dumps({"prompt": one.prompt, "task": "reasoning"})
        for one in islice(problems(TRAINING_SEED), count)
    ]


def main() -> None:
    """The three files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--training", type=int, metavar="N", help="write N prompts of the training split"
    )
    parser.add_argument(
        "--packed",
        type=int,
        metavar="N",
        help="write N questions of the training split as the package has them",
    )
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    if asked.packed is not None:
        asked.file.write_bytes(packed_questions(asked.packed))
        return
    lines = workload_lines() if asked.training is None else training_lines(asked.training)
    asked.file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
