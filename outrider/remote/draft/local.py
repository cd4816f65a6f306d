"""`--draft-endpoint local`: a draft service of this machine, which is started with the first
drafter and ends with the last.

The service is a process of its own, so it drafts on idle cores while the target works. It listens
on a socket in a folder that only this user may enter. The kernel ends it when this process is gone,
however that happens, and it is started again when it dies by itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.drafters import DRAFTERS
from outrider.drafters.base import DraftSetup
from outrider.errors import CapabilityError, ConfigError
from outrider.machine import cores
from outrider.remote.draft.background import Lease, Shared
from outrider.remote.draft.drafter_settings import RemoteSettings
from outrider.remote.endpoint import Endpoint

log = logging.getLogger("outrider.remote")
START_S = 600.0  # that a draft model may take to load
SIGN_OF_LIFE_S = 5.0  # between two lines while it loads
POLL_S = 0.1
# before a service that died is started again
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # after which a service has lived well, and the next pause is short again
GRACE_S = 5.0  # that it has to leave
# they are about this process
VARIABLES = ("DRAFT_ENDPOINT", "TARGET_ENDPOINT", "MODEL", "BATCH_SIZE", "MAX_DRAFT_TOKENS")
# The new process asks the kernel to end it with the thread that started it, then becomes the
# service.
TIED = (
    "import ctypes, os, runpy, signal, sys\n"
    "parent = int(sys.argv.pop(1))\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "if os.getppid() != parent: sys.exit(0)\n"
)
BOOT = TIED + "sys.argv[0] = 'outrider'\nrunpy.run_module('outrider', run_name='__main__')\n"


def draft_threads() -> int:
    """Threads of the service: the cores that the target leaves, at least one."""
    return max(1, (cores()["usable"] or 1) - torch.get_num_threads())


class LocalService:
    """One child process, and the thread that brings it back. Use `lease_local`."""

    def __init__(
        self, arguments: Sequence[str], status: Callable[[str], None] = lambda line: None
    ) -> None:
        """`arguments`: of `outrider`, but where it listens. Returns when it serves; raises
        CapabilityError when it does not."""
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-draft-"))
        self._socket = self._folder / "socket"
        self._log = self._folder / "log"
        self.endpoint = Endpoint(f"unix:{self._socket}")
        listen = ["--host", str(self.endpoint)]
        self._command = [sys.executable, "-c", BOOT, str(os.getpid()), *arguments, *listen]
        self._closing = threading.Event()
        self._has_served = threading.Event()
        self.child: subprocess.Popen[bytes] | None = None
        self.starts = 0
        threading.Thread(target=self._supervise, name="outrider-local-draft", daemon=True).start()
        try:
            self._wait(status)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the child."""
        self._closing.set()
        child = self.child
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _supervise(self) -> None:
        """Child after child. This thread starts them, since the kernel ends a child with the thread
        that started it."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            child = self._start()
            code = child.wait()
            if self._closing.is_set() or not self._has_served.wait(10 * POLL_S):
                return  # `_wait` says why it does not come up
            log.warning(
                "the local draft service ended with code %d (%s); it is started again",
                code,
                self._last_words(),
            )
            self._socket.unlink(missing_ok=True)
            pause_s = FIRST_PAUSE_S if time.monotonic() - began > STEADY_S else pause_s
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        with self._log.open("wb") as output:
            self.child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the child
            )
        self.starts += 1
        if self._closing.is_set():  # `close` came between
            self.child.terminate()
        return self.child

    def _wait(self, status: Callable[[str], None]) -> None:
        """Wait until the child reports that it serves."""
        began = reported_s = time.monotonic()
        status("starting the draft service of this machine")
        with grpc.insecure_channel(self.endpoint.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not _serves(health):
                now = time.monotonic()
                ended = self.child is not None and self.child.poll() is not None
                if ended or now - began > START_S:
                    why = "ended" if ended else f"does not serve after {START_S:.0f} s"
                    raise CapabilityError(f"the local draft service {why}: {self._last_words()}")
                if now - reported_s > SIGN_OF_LIFE_S:
                    reported_s = now
                    status(f"the draft service starts, {now - began:.0f} s: {self._last_words()}")
                time.sleep(POLL_S)
        self._has_served.set()

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].removeprefix("error: ")[:300] if lines else "it wrote nothing to its log"


SERVICES: Shared[LocalService] = Shared()


def lease_local(settings: RemoteSettings, setup: DraftSetup) -> Lease[LocalService]:
    """The use of a local service, shared by all that want the same.

    Raises ConfigError where no drafter is named, CapabilityError where the service does not start.
    """
    if settings.draft is None:
        raise ConfigError(
            "--draft-endpoint local needs to know what drafts: --draft FOLDER_OR_HUB_ID, or a "
            "look-up drafter"
        )
    looks_up = settings.draft in DRAFTERS.names()
    what = (
        ["--drafter", settings.draft, "--model", setup.target.name]
        if looks_up
        else [settings.draft]
    )
    max_tokens = str(max(1, setup.num_draft_tokens))
    arguments = (
        "service",
        "draft",
        *what,
        "--threads",
        str(draft_threads()),
        "--max-draft-tokens",
        max_tokens,
    )
    return SERVICES.lease(arguments, lambda: LocalService(arguments, setup.status))


def _serves(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
