"""The workload `demo` of the lab: the first held-out problems of `outrider demo`, as a file of prompts.

    python -m tools.demo_models.workload outrider/lab/workload/embedded/demo.jsonl

The lab may not import the demo (docs/architecture.md), so the problems travel as a file; a test compares it with the generator.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from outrider.demo.problems import problems

NUM_PROBLEMS = 64
SEED = 2024  # that of `outrider demo`


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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(workload_lines()) + "\n", encoding="utf-8")
