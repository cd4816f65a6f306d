"""vLLM in a process of its own, in this Python or another one: found, asked once, and ended
whatever happens.

The process stands in a session of its own, so that Ctrl-C reaches us alone and we end it, with all
that it started; so we do when we are asked to end ourselves. Where we are killed without a word,
the end of its standard input tells it (worker.py). It writes into a log, of which a failure shows
the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from in_vllm.methods import explained
from outrider.errors import ConfigError, OutriderError

WORKER = Path(__file__).with_name("worker.py")
PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
PROBE_S = 60
TAKES = "--python takes the path of a Python that has vLLM"
PYDANTIC = " [type="  # what follows repeats the input
GRACE_S = 10  # between asking the process to end and ending it
SHOWN_LINES = 12  # of the log
LEAVING = (signal.SIGTERM, signal.SIGHUP)  # would end this process without a word to the other one
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of our Python, wrong for another one


class VllmError(OutriderError):
    """vLLM refused the exported folder, failed, or took too long. `reason`: its own words, or how
    it ended."""

    def __init__(self, reason: str, log: Path) -> None:
        self.reason = explained(reason)
        self.log = log
        super().__init__(f"{self.reason}. Its log is {log}")

    def tail(self) -> list[str]:
        """The last lines of the log."""
        lines = [
            line.rstrip()
            for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        return [line[:300] for line in lines[-SHOWN_LINES:]]


@dataclass(frozen=True)
class Interpreter:
    """A Python that has vLLM."""

    path: str

    @classmethod
    def find(cls, named: str) -> Interpreter:
        """The one that was named. Raises ConfigError where it has no vLLM."""
        path = Path(named).expanduser()
        if path.is_dir():
            raise ConfigError(f"{TAKES}; '{named}' is a folder. Perhaps {path}/bin/python?")
        try:
            probed = subprocess.run(
                [str(path), "-c", PROBE],
                capture_output=True,
                env=_environment(str(path)),
                timeout=PROBE_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = getattr(error, "strerror", None) or f"no answer within {PROBE_S} s"
            raise ConfigError(f"{TAKES}; '{named}' cannot be run: {reason}") from error
        if probed.returncode:
            raise ConfigError(
                f"the Python '{named}' cannot import vllm: give one that can, or install vllm there"
            )
        return cls(str(path))

    def ask(
        self, task: dict[str, Any], folder: Path, log: Path, timeout_s: float
    ) -> dict[str, Any]:
        """The worker's answer; its files are in `folder`. Raises VllmError."""
        question = folder / "task.json"
        answer = folder / "answer.json"
        question.write_text(json.dumps(task), encoding="utf-8")
        with log.open("wb") as stream, _signals_raise():
            process = subprocess.Popen(
                [self.path, str(WORKER), str(question), str(answer)],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=_environment(self.path),
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                raise VllmError(
                    f"vLLM was not done within {timeout_s:g} s; --timeout SECONDS gives it more",
                    log,
                ) from error
            finally:
                _end(process)
                if process.stdin is not None:
                    process.stdin.close()
        if not answer.exists():
            raise VllmError(f"vLLM ended with code {code} and no answer", log)
        content: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        if "error" in content:
            raise VllmError(" ".join(content["error"].split()).split(PYDANTIC)[0], log)
        return content


def _environment(python: str) -> dict[str, str]:
    if python == sys.executable:
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """The signals that end a process become SystemExit, so that all `finally` are run. Those that
    someone handles or ignores stay as they are, and so does everything outside the main thread, the
    only one that may set handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in LEAVING if is_main and signal.getsignal(number) == signal.SIG_DFL]

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)  # we are about to end; nothing may cut that short
        raise SystemExit(128 + number)

    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started; nothing when all is over already. Ctrl-C while it is given
    time to end: no more time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(GRACE_S)
