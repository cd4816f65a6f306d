"""Mutual TLS between the parts of a deployment, as processes on loopback: draft service, servers,
coordinator."""

from __future__ import annotations

import io
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.app import run
from tests.certificates import Authority
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama
from tests.live_server import free_port, is_listening

START_S = 600.0  # a busy machine with two cores takes its time
TOKENS = 48
ASKED = {"prompt": "abc abc abc", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
FAST = ("--runtime", "eager", "--threads", "1")


@dataclass
class Parts:
    """Processes by name, with the certificates they show."""

    folder: Path
    ours: Authority
    others: Authority
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "outrider", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def served(self, name: str) -> tuple[str | Path, ...]:
        """Options of a service that shows a certificate for this machine, and wants one of ours."""
        certificate, key = self.ours.signed(name, "IP:127.0.0.1")
        return (
            "--tls-cert",
            certificate,
            "--tls-key",
            key,
            "--tls-client-ca",
            f"{self.ours.certificate}",
        )

    def serving(self, name: str) -> tuple[str, ...]:
        """The same of a server."""
        certificate, key = self.ours.signed(name, "IP:127.0.0.1")
        files = {
            "--ssl-certfile": certificate,
            "--ssl-keyfile": key,
            "--ssl-ca-certs": self.ours.certificate,
        }
        return tuple(f"{option}={file}" for option, file in files.items())

    def asking(self, name: str, authority: Authority) -> dict[str, Path]:
        """What a caller shows and trusts, its certificate signed by `authority`."""
        certificate, key = authority.signed(name, f"DNS:{name}")
        return {"ca": self.ours.certificate, "cert": certificate, "key": key}

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + START_S
        while not holds():
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not dead, "\n".join(
                f"{name} ended: {self.log_of(name)[-3000:]}" for name in dead
            )
            ends = "\n".join(self.log_of(name)[-3000:] for name in self.processes)
            assert time.monotonic() < limit, f"waited for {what}:\n{ends}"
            time.sleep(0.2)

    def stop(self, *names: str) -> None:
        for name in names or list(self.processes):
            process = self.processes.pop(name)
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(30)


def drafter_options(files: dict[str, Path]) -> list[str]:
    """Of drafter `remote`."""
    return ["--drafter", " ".join(["remote", *(f"{name}={file}" for name, file in files.items())])]


def caller_options(files: dict[str, Path]) -> list[str]:
    """Of the coordinator, and of `service health`."""
    return [word for name, file in files.items() for word in (f"--tls-{name}", str(file))]


def get(port: int, path: str, context: ssl.SSLContext | None = None) -> str:
    scheme = "http" if context is None else "https"
    with urllib.request.urlopen(
        f"{scheme}://127.0.0.1:{port}{path}", timeout=60, context=context
    ) as page:
        return str(page.read().decode())


def context_of(files: dict[str, Path]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files["ca"])
    context.load_cert_chain(files["cert"], files["key"])
    return context


def is_up(port: int) -> bool:
    try:
        return bool(get(port, "/ready"))
    except OSError:
        return False


def complete(port: int) -> str:
    body = {"model": json.loads(get(port, "/v1/models"))["data"][0]["id"], **ASKED}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return str(found["choices"][0]["text"])


def counted(port: int, name: str, context: ssl.SSLContext | None = None) -> float:
    lines = get(port, "/metrics", context).splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"outrider:{name}")
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its draft."""
    root = tmp_path_factory.mktemp("tls-models")
    target = tiny_llama(257, sharpness=4.0, max_position_embeddings=1024)
    save_checkpoint(root / "target", target, byte_tokenizer())
    save_checkpoint(root / "draft", disturbed(target, 0.1), byte_tokenizer())
    return root


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Parts]:
    """A draft service that wants certificates, and two authorities."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "others"):
        (folder / name).mkdir()
    made = Parts(folder, Authority(folder / "ours"), Authority(folder / "others"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def drafts(parts: Parts, model: Path) -> str:
    """The address of a draft service that lets in callers with a certificate of ours."""
    port = free_port()
    parts.start(
        "draft",
        "service",
        "draft",
        model / "draft",
        "--port",
        str(port),
        "--model-options",
        "runtime=eager",
        "--threads",
        "1",
        *parts.served("draft"),
    )
    address = f"grpcs://127.0.0.1:{port}"
    files = parts.asking("probe", parts.ours)
    parts.until(
        lambda: is_listening("127.0.0.1", port) and health(address, files)[0] == 0,
        "the draft service",
    )
    return address


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """What the target says by itself."""
    from outrider import LLM, SamplingParams

    llm = LLM(str(model / "target"), runtime="eager", threads=1, drafter="none")
    return llm.generate(ASKED["prompt"], SamplingParams(max_tokens=TOKENS, ignore_eos=True))[0].text


def health(address: str, files: dict[str, Path]) -> tuple[int, str]:
    """Exit status and output."""
    return ran("service", "health", address, *caller_options(files))


def ran(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a command line in this process."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        return run(arguments), output.getvalue()


@pytest.mark.slow
def test_all_parts_with_certificates(parts: Parts, drafts: str, model: Path, expected: str) -> None:
    """Coordinator, target and draft service, all three lines with mutual TLS; the answer is the
    target's, and drafts arrive."""
    target = free_port()
    http = free_port()
    parts.start(
        "target",
        "serve",
        model / "target",
        "--port",
        str(target),
        *FAST,
        "--no-self-test",
        *parts.serving("target"),
        "--draft-endpoint",
        drafts,
        *drafter_options(parts.asking("t", parts.ours)),
    )
    parts.start(
        "coordinator",
        "service",
        "coordinator",
        "--target-endpoint",
        f"https://127.0.0.1:{target}",
        "--port",
        str(http),
        *caller_options(parts.asking("c", parts.ours)),
    )
    context = context_of(parts.asking("scraper", parts.ours))
    parts.until(lambda: is_up(http), "the coordinator")
    assert complete(http) == expected
    parts.until(
        lambda: (
            complete(http) == expected and counted(target, "remote_draft_nodes_total", context) > 0
        ),
        "drafts",
    )
    parts.stop("target", "coordinator")


@pytest.mark.nightly
def test_a_target_whose_draft_service_does_not_trust_it(
    parts: Parts, drafts: str, model: Path, expected: str
) -> None:
    """Answers go on without drafts, and the log says once why."""
    http = free_port()
    strange = drafter_options(parts.asking("stranger", parts.others))
    parts.start(
        "serve",
        "serve",
        model / "target",
        "--port",
        str(http),
        *FAST,
        "--no-self-test",
        "--draft-endpoint",
        drafts,
        *strange,
    )
    parts.until(lambda: is_up(http), "the server")
    assert complete(http) == expected
    assert counted(http, "remote_draft_nodes_total") == 0
    assert counted(http, "remote_draft_troubles_total") > 0
    output = parts.log_of("serve")
    assert "a certificate of an authority that it trusts" in output
    assert "Traceback" not in output
    parts.stop("serve")


@pytest.mark.nightly
def test_a_coordinator_that_targets_do_not_trust_names_the_reason(
    parts: Parts, model: Path
) -> None:
    """It is not ready, and says which replica closes the line, and why; nothing is answered by
    mistake."""
    target = free_port()
    http = free_port()
    parts.start(
        "target",
        "serve",
        model / "target",
        "--port",
        str(target),
        *FAST,
        "--drafter",
        "none",
        "--no-self-test",
        *parts.serving("target"),
    )
    parts.start(
        "coordinator",
        "service",
        "coordinator",
        "--target-endpoint",
        f"https://127.0.0.1:{target}",
        "--port",
        str(http),
        *caller_options(parts.asking("foreign", parts.others)),
    )
    address = f"https://127.0.0.1:{target}"
    files = parts.asking("probe", parts.ours)
    parts.until(
        lambda: is_listening("127.0.0.1", target) and health(address, files)[0] == 0, "the target"
    )
    parts.until(lambda: "away" in parts.log_of("coordinator"), "the reason in the log")
    (replica,) = json.loads(get_any(http, "/health"))["replicas"]
    assert replica["standing"] == "away"
    assert "certificate" in replica["reason"]
    assert not is_up(http)
    parts.stop("target", "coordinator")


def get_any(port: int, path: str) -> str:
    """A page, whatever its status."""
    try:
        return get(port, path)
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


@pytest.mark.slow
def test_callers_that_do_not_fit_are_refused_in_one_line(
    parts: Parts, drafts: str, model: Path, tmp_path: Path
) -> None:
    """By `service health`, and by verbs with a draft service: what a person has to mend is exit
    status 2."""
    fits = parts.asking("fits", parts.ours)
    strange = parts.asking("strange", parts.others)
    status, output = health(drafts, fits)
    assert (status, "ms there and back" in output) == (0, True)
    for files in (strange, {"ca": parts.ours.certificate}):
        status, output = health(drafts, files)
        assert (status, len(output.splitlines())) == (1, 1)
        assert "a certificate of an authority that it trusts (mutual TLS)" in output
    status, output = health(drafts, {**fits, "ca": parts.others.certificate})
    assert (status, "its certificate is of no authority that is trusted here" in output) == (
        1,
        True,
    )
    swapped = {**fits, "key": strange["key"]}
    status, output = health(drafts, swapped)
    assert (status, len(output.splitlines()), "are not of one pair" in output) == (2, 1, True)
    status, output = ran(
        "generate",
        str(model / "target"),
        "abc",
        "--draft-endpoint",
        drafts,
        *FAST,
        *drafter_options(swapped),
    )
    assert status == 2
    assert "are not of one pair" in output.splitlines()[-1]
