"""How long a person waits: from a command of ours to the first letter of its answer, and until a
server is ready."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from workload import REPOSITORY

PROMPT = "Why is the sky blue?"
GIVE_UP_S = 300.0
POLL_S = 0.02
# targets
FILE = "the file"
DEMO = "demo"


def measure_starts(
    source: Path, count: int, runtime: str, threads: int, out: Console
) -> dict[str, list[float]]:
    """Seconds of `count` starts each, in turn: `generate` to its first letter, `serve` to its first
    healthy answer."""
    options = ["--runtime", f"{runtime}", "--threads", str(threads)]
    templated = ["--chat-template"]
    ways: dict[str, Callable[[], float]] = {
        f"outrider generate {DEMO}": lambda: first_letter(["generate", "demo", PROMPT, *options]),
        f"outrider generate {FILE}": lambda: first_letter(
            ["generate", str(source), PROMPT, *templated, *options]
        ),
        f"outrider serve {FILE}": lambda: healthy(["serve", str(source), *options]),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            found[name].append(round(way(), 2))
    for name, seconds in found.items():
        out.print(f"{name}: {', '.join(f'{one:.1f}' for one in seconds)} s")
    return found


def first_letter(arguments: Sequence[str]) -> float:
    """Seconds from the command to the first byte of its answer. Raises RuntimeError where there is
    none."""
    arguments = [*arguments, "--max-tokens", "16"]
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "outrider", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    ) as process:
        assert process.stdout is not None
        letter = process.stdout.read(1)
        seconds = time.perf_counter() - began
        _, errors = process.communicate(timeout=GIVE_UP_S)
    if process.returncode or not letter:
        raise RuntimeError(
            f"outrider {' '.join(arguments)} ended with {process.returncode}: "
            f"{errors.decode()[-500:]}"
        )
    return seconds


def healthy(arguments: Sequence[str]) -> float:
    """Seconds from the command to the first 200 of `/health`. Raises RuntimeError where it ends
    before."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", *arguments, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
    )
    try:
        while time.perf_counter() - began < GIVE_UP_S:
            if process.poll() is not None:
                raise RuntimeError(
                    f"outrider {' '.join(arguments)} ended with {process.returncode}"
                )
            if _answers(f"http://127.0.0.1:{port}/health"):
                return time.perf_counter() - began
            time.sleep(POLL_S)
        raise RuntimeError(f"outrider {' '.join(arguments)} was not ready after {GIVE_UP_S:.0f} s")
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
