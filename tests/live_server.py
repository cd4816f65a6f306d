"""A real `outrider serve` in a process of its own, for tests that speak to it as clients do."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.demo import demo_paths

START_S = 180.0  # a busy machine with two cores takes its time
KEY = "sesame"


@contextmanager
def live_demo(folder: Path, template: str, name: str) -> Iterator[str]:
    """Serves the embedded pair as model `name` with another chat template, from a copy made at
    `folder`; the address."""
    target, draft = demo_paths()
    shutil.copytree(target, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with live_server(
        str(folder), "--drafter", "draft-model", "--draft", str(draft), "--served-model-name", name
    ) as address:
        yield address


@contextmanager
def live_server(*arguments: str, key: str = KEY) -> Iterator[str]:
    """Serves `arguments` on a free port until the block ends; the address, without a slash at its
    end."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        *arguments,
        "--port",
        str(port),
        "--api-key",
        key,
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_ready(address, process, log)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(host: str, port: int) -> bool:
    """Whether a connection is taken there: asked before what takes longer, such as a process of its
    own."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def wait_until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError with the server's own words when it ends or takes too long."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    output = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    raise RuntimeError(f"the server did not get ready (exit status {process.poll()}):\n{output}")
