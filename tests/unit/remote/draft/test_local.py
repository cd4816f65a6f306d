"""A draft service of this machine: it is started, waited for, shared, started again when it dies,
and gone when we are.

The service itself is played by a small script that speaks gRPC's health protocol; tests/e2e has the
real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.drafters.base import DraftSetup
from outrider.errors import CapabilityError, ConfigError
from outrider.remote.draft import local
from outrider.remote.draft.drafter_settings import RemoteSettings
from outrider.remote.draft.local import LocalService, lease_local
from tests.unit.remote.draft.test_drafter import wait_for

PLAYED = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
print("listening", flush=True)
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(sys.argv[-1])
server.start()
server.wait_for_termination()
"""


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script in the service's place, behind the same request to the kernel; no pauses."""
    monkeypatch.setattr(local, "BOOT", local.TIED + PLAYED)
    monkeypatch.setattr(local, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def service() -> Iterator[LocalService]:
    made = LocalService(["service", "draft", "demo"])
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, zombies left out."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_it_serves_and_ends(service: LocalService) -> None:
    """On a socket that only we can reach; nothing is left behind."""
    socket = Path(service.endpoint.target.removeprefix("unix:"))
    assert socket.exists()
    assert socket.parent.stat().st_mode & 0o077 == 0
    assert service.child is not None
    pid = service.child.pid
    service.close()
    assert not is_alive(pid)
    assert not socket.parent.exists()


@pytest.mark.slow
def test_it_is_started_again(service: LocalService) -> None:
    """After it died by itself."""
    assert service.child is not None
    first = service.child.pid
    os.kill(first, signal.SIGKILL)
    wait_for(
        lambda: service.starts == 2 and service.child.pid != first and is_alive(service.child.pid),
        30,
    )


def test_what_does_not_come_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its last words, and without a second attempt."""
    monkeypatch.setattr(
        local, "BOOT", "import sys; print('error: no model there', file=sys.stderr); sys.exit(2)"
    )
    with pytest.raises(CapabilityError, match="the local draft service ended: no model there"):
        LocalService(["service", "draft", "nothing"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux' kernel")
def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves no time to tidy up: the kernel ends the child."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import time\nfrom outrider.remote.draft import local\n"
        f"local.BOOT = {local.TIED + PLAYED!r}\n"
        "service = local.LocalService(['service', 'draft', 'demo'])\n"
        "print(service.child.pid, flush=True)\ntime.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        assert is_alive(child)
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: not is_alive(child), 30)


class Target:
    name = "/somewhere"


def test_drafters_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one ends it; `draft` names what drafts, a model or a look-up drafter."""
    commands: list[tuple[str, ...]] = []

    class Played:
        def __init__(self, arguments, status):  # noqa: ANN001, ANN204
            commands.append(tuple(arguments))
            self.closed = False

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(local, "LocalService", Played)
    monkeypatch.setattr(local, "draft_threads", lambda: 3)
    setup = DraftSetup(Target(), None, 5)  # type: ignore[arg-type]
    first, second = (
        lease_local(RemoteSettings(endpoint="local", draft="demo"), setup) for _ in range(2)
    )
    assert first.thing is second.thing
    first.end()
    assert not second.thing.closed
    second.end()
    assert second.thing.closed
    looks_up = lease_local(RemoteSettings(endpoint="local", draft="suffix"), setup)
    looks_up.end()
    assert commands == [
        ("service", "draft", "demo", "--threads", "3", "--max-draft-tokens", "5"),
        (
            "service",
            "draft",
            "--drafter",
            "suffix",
            "--model",
            "/somewhere",
            "--threads",
            "3",
            "--max-draft-tokens",
            "5",
        ),
    ]
    with pytest.raises(ConfigError, match="--draft"):
        lease_local(RemoteSettings(endpoint="local"), setup)


def test_threads_are_what_the_target_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one."""
    monkeypatch.setattr(local, "cores", lambda: {"usable": 8})
    for target, left in ((6, 2), (8, 1), (16, 1), (1, 7)):
        monkeypatch.setattr(local.torch, "get_num_threads", lambda target=target: target)
        assert local.draft_threads() == left


@pytest.mark.slow
def test_waiting_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at once, and another one now and then with the service's last output."""
    monkeypatch.setattr(
        local,
        "BOOT",
        local.TIED + "import time; print('loading', flush=True); time.sleep(0.5)\n" + PLAYED,
    )
    monkeypatch.setattr(local, "SIGN_OF_LIFE_S", 0.0)
    lines: list[str] = []
    LocalService(["service", "draft", "demo"], lines.append).close()
    assert lines[0] == "starting the draft service of this machine"
    assert any(line.startswith("the draft service starts") for line in lines[1:])
