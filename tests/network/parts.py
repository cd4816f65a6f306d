"""Parts of a deployment as real processes on the hosts of a test network, and a client that stands
on one of them.

Started with the machine's own Python and one thread each, they are killed with the network at the
latest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.live_server import is_listening
from tests.network.network import Network

START_S = 600.0  # a busy machine with two cores takes its time
ANSWER_S = 300.0
HTTP_PORT = 8000
DRAFT_PORT = 50051
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Part:
    """One process of `outrider`: it can be killed and started again at the same address."""

    network: Network
    host: str
    command: Sequence[str]  # after `outrider`
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """As other parts reach it."""
        scheme = "http" if self.port == HTTP_PORT else "grpc"
        return f"{scheme}://{self.network.address(self.host)}:{self.port}"

    def start(self) -> Part:
        """Begin; `wait` tells when it is ready."""
        paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **self.environment}
        command = [sys.executable, "-m", "outrider", *self.command]
        self.process = self.network.start(self.host, command, self.log, environment)
        return self

    def wait(self) -> Part:
        """Return once it takes calls. Raises RuntimeError with its own words when it ends or takes
        too long."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process is not None and self.process.poll() is None:
            if self._is_ready():
                return self
            time.sleep(0.2)
        raise RuntimeError(
            f"{' '.join(self.command)} did not get ready:\n{self.log_text()[-4000:]}"
        )

    def kill(self) -> None:
        """As a crash of the machine would: no signal that it could catch."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def log_text(self) -> str:
        """What it has logged so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def _is_ready(self) -> bool:
        if self.port == HTTP_PORT:
            try:
                return bool(get(self.network, self.host, self.network.address(self.host), "/ready"))
            except (urllib.error.URLError, OSError):
                return False
        command = [sys.executable, "-m", "outrider", "service", "health", self.address]
        with self.network.inside(self.host):
            if not is_listening(self.network.address(self.host), self.port):
                return False
            return (
                subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
                == 0
            )


def get(network: Network, host: str, address: str, path: str, port: int = HTTP_PORT) -> str:
    """GET from a server, as a client on `host`."""
    with (
        network.inside(host),
        urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=ANSWER_S) as answer,
    ):
        return str(answer.read().decode())


def complete(network: Network, host: str, address: str, **body: Any) -> dict[str, Any]:
    """The answer to `/v1/completions`, asked by a client on `host`."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{address}:{HTTP_PORT}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with network.inside(host), urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def stream(network: Network, host: str, address: str, **body: Any) -> str:
    """The text of a stream of `/v1/completions`, asked by a client on `host`. Raises AssertionError
    for one without its end."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(
        f"http://{address}:{HTTP_PORT}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with network.inside(host), urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        blocks = answer.read().decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], blocks[-2:]
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def metric(page: str, name: str) -> float:
    """The sum of a metric's samples on a page of metrics; 0 where it has none."""
    families = text_string_to_metric_families(page)
    return sum(
        sample.value for family in families for sample in family.samples if sample.name == name
    )
