"""Is what comes out right on this device? The tests that need one, texts against the CPU's, drawn
tokens' distribution, a server.

Tests and the server run in processes of their own, which are killed at their limit. Everything else
is `right_texts.py`. What is wrong is named, and the next question is asked all the same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_stages.context import Context, OutOfTimeError, short_traceback

MINUTES = 1.5
REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = (
    "-m",
    "gpu",
    "tests/contract/test_on_gpu.py",
    "tests/unit/sampling/test_rng.py",
    "tests/unit/runtime/gpu",
)
TINY = "test_distribution_is_the_targets and plain and sampled and token"
TINY_TESTS = ("tests/contract/test_exact_distribution.py", "-k", TINY)
TESTS_SHARE = 0.5  # of the time of this stage
SERVER_S = 60.0
PROMPT = "Question: A shop sells 3 pens for 2 dollars each. How much are they?\nAnswer:"


def run(context: Context) -> dict[str, Any]:
    """Every question in turn. Each answer has `right`: True, False, or None where it could not be
    asked, and says why."""
    from gpu_stages import right_texts

    questions: dict[str, Callable[[Context], dict[str, Any]]] = {
        "tests": tests,
        "graphs": right_texts.graphs,
        "bits": right_texts.bits,
        "law": right_texts.law,
        "server": server,
        "texts": right_texts.texts,
    }
    late = []
    for name, ask in questions.items():
        context.check_time(1.0)
        start = time.monotonic()
        try:
            answer = ask(context)
        except OutOfTimeError:
            raise
        except ModuleNotFoundError as error:
            answer = {"right": None, "told": f"package '{error.name}' is missing here"}
        except Exception as error:  # noqa: BLE001  one question that breaks must not silence the others
            summary = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            answer = {"right": False, "told": summary, "traceback": short_traceback(error)}
        context.keep({name: {**answer, "seconds": round(time.monotonic() - start, 1)}})
        context.say(f"  {name}: {answer['told']} ({time.monotonic() - start:.1f} s)")
        context.release()
        late += [f"{name}: {answer['told']}"] if answer.get("late") else []
    if late:
        raise OutOfTimeError("; ".join(late))
    return {}


def tests(context: Context) -> dict[str, Any]:
    """pytest's closing line, and the tests that failed."""
    if find_spec("pytest") is None:
        return {"right": None, "told": "package 'pytest' is missing here"}
    chosen = TINY_TESTS if context.tiny else TESTS
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    limit_s = max(1.0, context.left_s() * TESTS_SHARE)
    status, lines = finished(command, limit_s)
    closing = next(
        (line.strip("= ") for line in reversed(lines) if re.search(r"\d+ \w+.* in [\d.]+s", line)),
        "",
    )
    failures = [
        line.removeprefix("FAILED ").removeprefix("ERROR ")
        for line in lines
        if line.startswith(("FAILED ", "ERROR "))
    ]
    answer: dict[str, Any] = {
        "right": status == 0 and " passed" in closing,
        "told": closing,
        "failures": failures,
    }
    if status is None:
        last = [line for line in lines if line.strip()][-3:]
        return {
            **answer,
            "right": None,
            "late": True,
            "told": f"killed after {limit_s:.0f} s",
            "last_lines": last,
        }
    if not closing:
        answer["told"] = f"exit status {status}: " + " ".join(lines[-3:])
    return answer


def finished(command: list[str], limit_s: float) -> tuple[int | None, list[str]]:
    """Exit status and lines of a command run in the repository; None where it was killed at its
    limit."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**environment(), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=limit_s)
        return process.returncode, out.splitlines()
    except subprocess.TimeoutExpired:
        _kill(process)
        out, _ = process.communicate()
        return None, (out or "").splitlines()
    finally:
        _kill(process)  # Ctrl-C reaches this process alone


def environment() -> dict[str, str]:
    """This process's own, with the repository before other folders of Python packages, which may
    hold what is not installed."""
    folders = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "HF_HUB_OFFLINE": "1"}


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills the process and what it started, where it still runs, and returns once it is gone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def server(context: Context) -> dict[str, Any]:
    """One completion of `outrider serve` on the device, twice the same."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        return {"right": None, "told": f"package '{missing[0]}' is missing here"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        "demo",
        "--device",
        str(context.device),
        "--port",
        str(port),
        *(["--runtime", "eager", "--no-self-test"] if context.tiny else []),
    ]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + min(SERVER_S, context.left_s())
        start = time.monotonic()
        _wait(address, process, until)
        ready_s = time.monotonic() - start
        answers = [_completion(address, until) for _ in range(2)]
    except TimeoutError as error:
        return {"right": None, "late": True, "told": str(error)}
    finally:
        _kill(process)
        process.communicate()
    texts = [answer["choices"][0]["text"] for answer in answers]
    same = texts[0] == texts[1] and bool(texts[0])
    summary = f"ready in {ready_s:.1f} s, the same {answers[0]['usage']['completion_tokens']} tokens twice"
    return {
        "right": same,
        "told": summary if same else "two answers to one greedy request differ",
        "texts": texts,
    }


def _wait(address: str, process: subprocess.Popen[str], until: float) -> None:
    while time.monotonic() < until:
        if process.poll() is not None:
            errors = process.stderr.read().splitlines()[-3:] if process.stderr else []
            raise RuntimeError(f"the server ended with {process.returncode}: " + " ".join(errors))
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError("the server was not ready when its time was over")


def _completion(address: str, until: float) -> dict[str, Any]:
    body = json.dumps(
        {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    ).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=max(1.0, until - time.monotonic())) as answer:
        return json.load(answer)


def table(result: dict[str, Any]) -> list[list[str]]:
    """A line for each question. What is right is judged on every device."""
    verdicts = {True: "ok", False: "below", None: ""}
    return [
        [
            f"right: {name}",
            answer["told"][:100],
            "" if answer["right"] is None else "all right",
            verdicts[answer["right"]],
        ]
        for name, answer in result.items()
        if isinstance(answer, dict) and "right" in answer
    ]
