"""How a worker talks: one JSON object per line, commands on standard input, answers on standard
output.

    {"cmd": "load", "target": folder, "draft": folder | null, "threads": 2, "num_draft_tokens": 5,
    ...}
        -> {"versions": {...}, "settings": {...}, "load_s": seconds, imports left out}
    {"cmd": "run", "prompt_ids": [...], "max_tokens": 96}
        -> {"token_ids": [...], "seconds": wall time of the call, "ttft_s": to the first token or null, ...}
           greedy; "temperature" and "seed" where the engine is set to sample
    {"cmd": "use", "drafting": "suffix k=8", "fresh": false}
        -> {"settings": {...}}; from now on the loaded target is decoded so; fresh: with nothing learned from texts
    {"cmd": "passes", "contexts": [128], "widths": [1, 8], "repeats": 5}
        -> {"seconds": [[the fastest pass of each width] by context]}; where an engine has `passes`
    {"cmd": "quit"}

One worker holds one target: decoded plainly (draft null) or with one draft length; where an engine
has `use`, as that says in the engine's own words. Engines print what they like on standard output,
so the real one is kept aside for answers and engines write to standard error. A failure answers
{"error": ...} and the worker goes on. Standard library only: it runs in every peer's environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


class Worker(Protocol):
    """An engine in one configuration."""

    def load(self, command: dict[str, Any]) -> dict[str, Any]: ...

    def run(self, *prompt_and_tokens: Any, **sampling: Any) -> dict[str, Any]: ...


@runtime_checkable
class Switchable(Protocol):
    """A worker whose drafting can be changed once its target is loaded."""

    def use(self, drafting: str, *, fresh: bool) -> dict[str, Any]: ...


@runtime_checkable
class Passing(Protocol):
    """A worker that times single passes over given numbers of tokens."""

    def passes(self, contexts: list[int], widths: list[int], repeats: int) -> list[list[float]]: ...


def serve(worker: Worker) -> None:
    """Answer commands until "quit" or the end of input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        if command["cmd"] == "quit":
            break
        try:
            answer = _answer(worker, command)
        except Exception as error:  # noqa: BLE001  whatever an engine raises is the answer
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    answers.close()
    os._exit(0)  # engines leave threads and children behind that would keep the process alive


def _answer(worker: Worker, command: dict[str, Any]) -> dict[str, Any]:
    if command["cmd"] == "load":
        start = time.perf_counter()
        loaded = worker.load(command)
        return {**loaded, "load_s": time.perf_counter() - start}
    if command["cmd"] == "use":
        if not isinstance(worker, Switchable):
            raise ValueError("this engine's drafting cannot be changed once its target is loaded")
        return worker.use(command["drafting"], fresh=command["fresh"])
    if command["cmd"] == "passes":
        if not isinstance(worker, Passing):
            raise ValueError("this engine's single passes cannot be timed")
        asked = command["contexts"], command["widths"], command["repeats"]
        return {"seconds": worker.passes(*asked)}
    if command["cmd"] != "run":
        raise ValueError(f"unknown command {command['cmd']!r}")
    start = time.perf_counter()
    sampling = {name: command[name] for name in ("temperature", "seed") if name in command}
    answer = worker.run(command["prompt_ids"], command["max_tokens"], **sampling)
    return {"seconds": time.perf_counter() - start, **answer}


def export_name(checkpoint: Path) -> str:
    """A name for what is made of a checkpoint once and kept: changes when the weights do."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return f"{checkpoint.parent.name}-{checkpoint.name}-{digest.hexdigest()[:8]}"


class Stopwatch:
    """Seconds from its making to the first `mark`: the time to the first token, from a callback."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self.first_s: float | None = None

    def mark(self) -> None:
        if self.first_s is None:
            self.first_s = self._clock() - self._start


def named_numbers(text: str, word: str, **defaults: int) -> dict[str, int]:
    """'lookup k=5 ngram=3' -> {"k": 5, "ngram": 3}. ValueError for another first word or a name
    without a default."""
    first, *given = text.split()
    found = dict(part.partition("=")[::2] for part in given)
    if first != word or not set(found) <= set(defaults):
        raise ValueError(
            f"'{text}' is neither 'plain' nor '{word}' with "
            f"{', '.join(f'{name}=N' for name in defaults)}"
        )
    return {**defaults, **{name: int(value) for name, value in found.items()}}
