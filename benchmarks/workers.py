"""Worker processes seen from the benchmark's side: where each peer's environment is, and a
conversation with one worker.

The conversation is `peers/protocol.py`. Beside the answer, every run records how much of the
machine others used while it ran (other processes, and what the hypervisor took): a speed measured
beside a busy neighbour says nothing.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from workload import BENCHMARKS, PEERS, REPOSITORY, OtherCpu

PEER_NAMES = ("transformers", "vllm", "llamacpp", "openvino", "outrider")
LOAD_TIMEOUT_S = 900  # compiling and exporting included
RUN_TIMEOUT_S = 300


class WorkerError(Exception):
    """A worker answered with an error, died, or fell silent."""


@dataclass(frozen=True)
class Configuration:
    """One engine, decoding plainly (k = 0) or with k draft tokens a step."""

    peer: str
    k: int

    @property
    def name(self) -> str:
        return f"{self.peer} k={self.k}" if self.k else f"{self.peer} plain"


def interpreter(peer: str) -> Path:
    """The Python a peer's worker runs in; Outrider's is the one running this."""
    return Path(sys.executable) if peer == "outrider" else PEERS / peer / "bin" / "python"


class Worker:
    """A running worker. Loads on construction; close it."""

    def __init__(self, configuration: Configuration, load: dict[str, Any], log: IO[str]) -> None:
        self.configuration = configuration
        script = BENCHMARKS / "peers" / f"{configuration.peer}_peer.py"
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if configuration.peer == "outrider":
            environment["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{BENCHMARKS}"
        self._process = subprocess.Popen(
            [str(interpreter(configuration.peer)), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        )
        self._usage = psutil.Process(self._process.pid)
        self.about = self._ask(
            {"cmd": "load", "num_draft_tokens": configuration.k, **load}, LOAD_TIMEOUT_S
        )
        self.load_s: float = self.about.pop("load_s")

    def run(self, prompt_ids: list[int], max_tokens: int, **sampling: float) -> dict[str, Any]:
        """The worker's answer, with `other_cpu`: the share of all processors that others used
        meanwhile.

        `sampling`: temperature and seed, for workers that know them; greedy without.
        """
        others = OtherCpu(self._usage)
        answer = self._ask(
            {"cmd": "run", "prompt_ids": prompt_ids, "max_tokens": max_tokens, **sampling},
            RUN_TIMEOUT_S,
        )
        return {**answer, "other_cpu": others.share()}

    def use(self, drafting: str, *, fresh: bool = False) -> dict[str, Any]:
        """The loaded target with another drafter, in the engine's own words; fresh: one that has
        not seen a text."""
        return self._ask({"cmd": "use", "drafting": drafting, "fresh": fresh}, LOAD_TIMEOUT_S)

    def passes(
        self, contexts: Sequence[int], widths: Sequence[int], repeats: int
    ) -> list[list[float]]:
        """Seconds of the fastest pass of each width after each context."""
        asked = {"contexts": [*contexts], "widths": [*widths], "repeats": repeats}
        found: list[list[float]] = self._ask({"cmd": "passes", **asked}, RUN_TIMEOUT_S)["seconds"]
        return found

    def memory_bytes(self) -> int:
        return self._usage.memory_info().rss

    def peak_bytes(self) -> int:
        """The most memory that it has held so far, mapped files included."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        """Ask it to stop, then insist."""
        try:
            self._send({"cmd": "quit"})
            self._process.wait(10)
        except (WorkerError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _send(self, command: dict[str, Any]) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"the worker is gone (exit code {self._process.poll()})") from error

    def _ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._send(command)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            self._process.kill()
            raise WorkerError(f"no answer to '{command['cmd']}' within {timeout_s} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(
                f"the worker died during '{command['cmd']}' (exit code {self._process.wait()})"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer
