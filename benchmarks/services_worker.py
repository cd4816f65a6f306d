"""The process that runs the steps in `services.py`: several configurations on one target, one
prompt at a time.

The first line of standard input says what to load, each further one what to decode; one JSON line
answers each. It stands on a host of the test network, so whatever it connects to lies behind the
wire.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from outrider import LLM, SamplingParams


def main() -> None:
    """Read `{"target", "runtime", "configurations": {name: options}}`, then `{"name", "prompt",
    "max_tokens"}` to the end."""
    out = sys.stdout
    sys.stdout = sys.stderr
    wanted = json.loads(sys.stdin.readline())
    shared = {"runtime": wanted["runtime"], "threads": 1}
    models = {
        name: LLM(wanted["target"], **shared, **options)
        for name, options in wanted["configurations"].items()
    }
    print(
        json.dumps({"notes": {name: llm.notes for name, llm in models.items()}}),
        file=out,
        flush=True,
    )
    for line in sys.stdin:
        print(json.dumps(decoded(models, json.loads(line))), file=out, flush=True)


def decoded(models: dict[str, LLM], asked: dict[str, Any]) -> dict[str, Any]:
    """One answer: its tokens, its counters, and what the connection counted meanwhile."""
    llm = models[asked["name"]]
    before = counts(llm)
    (completion,) = llm.generate(
        [asked["prompt"]], SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True)
    )
    after = counts(llm)
    return {
        "token_ids": completion.token_ids,
        "stats": completion.stats.as_dict(),
        "remote": {name: after[name] - before.get(name, 0.0) for name in after},
    }


def counts(llm: LLM) -> dict[str, float]:
    """What the drafter counted so far; nothing without a connection."""
    return dict(llm._decoder.drafter.counters)


if __name__ == "__main__":
    main()
