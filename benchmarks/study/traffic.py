"""Study `from-traffic`: a server records its requests, `outrider train --from-traffic` refreshes
its draft model.

The traffic is competition mathematics (MATH), asked as users would: completions at temperature 0
and 1 through HTTP. alpha is measured on requests of the same kind that are not in the log, and on
GSM8K, which is other traffic.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from serve import free_port, serving

from study.common import PAIR, WORK, Way, counted, curve, saved, train
from study.prompts import held_out, training_prompts

NUM_REQUESTS = 60
CLIENTS = 12
MAX_TOKENS = 48
TASKS = {"math": 10, "gsm8k": 10}
WAY = Way("draft-model k=5", uses_draft=True)
EPOCHS = 4


def run_traffic() -> None:
    """Record, refresh, measure, write the result."""
    log = record(WORK / "traffic.jsonl")
    changes = (
        "--reading",
        "recorded_answers=true",
        "--training",
        "lr=5e-4",
        "--training",
        "feature_cache=3GB",
    )
    words = ("--from-traffic", log, "--init", PAIR / "draft", "--epochs", EPOCHS, *changes)
    after, result = train("traffic-refreshed", "draft-model", PAIR / "target", *words)
    texts = held_out(TASKS, PAIR / "target")
    folders = {"before": PAIR / "draft", "after": after}
    measured = counted(PAIR / "target", WAY, folders, texts, max_new_tokens=MAX_TOKENS)
    settings = {
        "requests": NUM_REQUESTS,
        "max_tokens": MAX_TOKENS,
        "epochs": EPOCHS,
        "tasks": TASKS,
        "drafter": WAY.drafter,
        "answers": "recorded",
    }
    saved(
        "from-traffic",
        {"settings": settings, "curves": {"after": curve(result)}, "measured": measured},
    )


def record(log: Path) -> Path:
    """The server's own log of `NUM_REQUESTS` completions."""
    if log.exists() and len(log.read_text(encoding="utf-8").splitlines()) >= NUM_REQUESTS:
        return log
    log.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        str(PAIR / "target"),
        "--draft",
        str(PAIR / "draft"),
        "--model-options",
        "runtime=eager",
        "--threads",
        "1",
        "--max-num-seqs",
        str(CLIENTS),
        "--port",
        str(port),
        "--log-requests",
        str(log),
        "--no-self-test",
        "--served-model-name",
        "pair",
    ]
    with (
        serving(command, port, "/ready", WORK / "traffic-server.log") as url,
        httpx.Client(timeout=600) as client,
    ):

        def ask(number: int, prompt: str) -> None:
            body: dict[str, Any] = {
                "model": "pair",
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "temperature": number % 2,
                "seed": number,
            }
            client.post(f"{url}/v1/completions", json=body).raise_for_status()

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(ask, range(NUM_REQUESTS), training_prompts("math", NUM_REQUESTS)))
    return log
