"""Two servers and a coordinator in processes of their own: clients see time, not text, while
servers are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

import openai

from outrider.build import Options
from outrider.engine.engine import Engine, make_engine
from outrider.engine.request import EngineSettings, Request
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.live_server import free_port
from tests.unit.engine.conftest import Answer, prompt

pytestmark = pytest.mark.slow

TOKENS = 500  # of an answer: long enough to be hit in its middle
START_S = 600.0  # a busy machine with two cores takes its time
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.0, "frequency_penalty": 0.4},
    {"temperature": 0.7, "top_p": 0.9, "seed": 6},
]


@dataclass
class Deployment:
    """Processes by name; a service that was killed can be started again on its port."""

    folder: Path
    model: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> None:
        self.ports.setdefault(name, free_port())
        command = [sys.executable, "-m", "outrider", *arguments, "--port", str(self.ports[name])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def start_target(self, name: str, model: Path | None = None) -> None:
        self.start(
            name,
            "serve",
            str(model or self.model),
            "--served-model-name",
            "tiny",
            "--drafter",
            "ngram",
            "--no-self-test",
            "--kv-memory",
            "64MiB",
        )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.ports['coordinator']}"

    def standings(self) -> dict[str, str]:
        """By name of the service."""
        with urllib.request.urlopen(f"{self.address}/health", timeout=10) as page:
            replicas = json.load(page)["replicas"]
        names = {f"http://127.0.0.1:{port}": name for name, port in self.ports.items()}
        return {names[replica["endpoint"]]: replica["standing"] for replica in replicas}

    def is_ready(self) -> bool:
        """Whether the coordinator answers and uses all replicas."""
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        assert not ended, "\n".join(f"{name} ended: {self.log_of(name)}" for name in ended)
        try:
            with urllib.request.urlopen(f"{self.address}/ready", timeout=10):
                return set(self.standings().values()) == {"ready"}
        except OSError:
            return False

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + START_S
        while not holds():
            assert time.monotonic() < limit, f"waited for {what}:\n" + "\n".join(
                self.log_of(name) for name in self.processes
            )
            time.sleep(0.1)

    def stop(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(30)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two targets and a coordinator, ready."""
    folder = tmp_path_factory.mktemp("services")
    model = save_checkpoint(
        folder / "tiny",
        tiny_llama(257, sharpness=4.0, max_position_embeddings=2048),
        byte_tokenizer(),
    )
    made = Deployment(folder, model)
    try:
        for name in ("first", "second"):
            made.start_target(name)
        endpoints = ",".join(f"127.0.0.1:{made.ports[name]}" for name in ("first", "second"))
        made.start(
            "coordinator",
            "service",
            "coordinator",
            "--target-endpoint",
            endpoints,
            "--limits",
            "stall_timeout=5",
        )
        made.until(made.is_ready, "the coordinator and both replicas")
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def alone(deployment: Deployment) -> Iterator[Callable[[list[int], dict[str, Any]], list[int]]]:
    """What one process says to the same request."""
    options = Options(target=str(deployment.model), drafter="ngram")
    engine: Engine = make_engine(options, EngineSettings(kv_memory=64 << 20))
    engine.start()

    def ask(tokens: list[int], sampling: dict[str, Any]) -> list[int]:
        answer = Answer()
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)
        engine.submit(Request(id=f"{time.monotonic_ns()}", prompt=tokens, params=params), answer)
        assert answer.over.wait(START_S)
        return answer.token_ids

    yield ask
    engine.stop()


@dataclass
class Streamed:
    """One answer as a client collects it."""

    token_ids: list[int] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    usage: Any = None


def stream(
    deployment: Deployment, tokens: list[int], sampling: dict[str, Any], into: Streamed
) -> Streamed:
    client = openai.OpenAI(
        base_url=f"{deployment.address}/v1", api_key="none", max_retries=0, timeout=START_S
    )
    extra = {"ignore_eos": True, "return_token_ids": True}
    chunks = client.completions.create(
        model="tiny",
        prompt=tokens,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
        **sampling,
    )
    for chunk in chunks:
        for choice in chunk.choices:
            into.token_ids += choice.token_ids or []
            into.begun.set()
        into.usage = chunk.usage or into.usage
    return into


def crowd(
    deployment: Deployment, prompts: list[list[int]], meanwhile: Callable[[list[Streamed]], None]
) -> list[Streamed]:
    """All answers; `meanwhile` is called when all have begun."""
    answers = [Streamed() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [
            pool.submit(
                stream, deployment, tokens, SAMPLINGS[number % len(SAMPLINGS)], answers[number]
            )
            for number, tokens in enumerate(prompts)
        ]
        for answer, future in zip(answers, running, strict=True):
            while not answer.begun.wait(0.1):
                assert not future.done(), future.exception()
        meanwhile(answers)
        return [future.result(START_S) for future in running]


def check(answers: list[Streamed], prompts: list[list[int]], alone: Any) -> None:
    for number, (answer, tokens) in enumerate(zip(answers, prompts, strict=True)):
        assert answer.token_ids == alone(tokens, SAMPLINGS[number % len(SAMPLINGS)]), (
            f"request {number}"
        )
        assert answer.usage.completion_tokens == TOKENS
        assert answer.usage.prompt_tokens == len(tokens)


def test_killed_services_cost_time_not_text(deployment: Deployment, alone: Any) -> None:
    """kill -9 in the middle of answers; the service comes back by itself, and the other one is
    killed."""
    prompts = [prompt(20 + 7 * number, number) for number in range(6)]
    chance = random.Random(7)
    for victim in ("first", "second"):

        def strike(answers: list[Streamed], name: str = victim) -> None:
            time.sleep(chance.random())
            deployment.kill(name)

        answers = crowd(deployment, prompts, strike)
        check(answers, prompts, alone)
        deployment.processes[victim].wait(30)
        deployment.start_target(victim)
        deployment.until(deployment.is_ready, f"{victim} to come back")
    with urllib.request.urlopen(f"{deployment.address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    retries = next(line for line in lines if line.startswith("outrider:retries_total"))
    assert float(retries.split()[-1]) >= 1, "no request was hit"


def test_a_drained_service_finishes_what_it_has(deployment: Deployment, alone: Any) -> None:
    """SIGTERM: nothing is lost, nothing goes on elsewhere, and the process ends with code 0."""
    prompts = [prompt(15 + number, 40 + number) for number in range(4)]
    answers = crowd(deployment, prompts, lambda answers: deployment.kill("first", signal.SIGTERM))
    check(answers, prompts, alone)
    assert deployment.processes["first"].wait(60) == 0
    assert "lost" not in deployment.log_of("coordinator").split("request_id")[-1]
    deployment.start_target("first")
    deployment.until(deployment.is_ready, "it to come back")


def test_a_stopped_service_is_left(deployment: Deployment, alone: Any) -> None:
    """SIGSTOP: the connection stands and nothing comes."""
    prompts = [prompt(15 + number, 60 + number) for number in range(4)]
    answers = crowd(deployment, prompts, lambda answers: deployment.kill("first", signal.SIGSTOP))
    deployment.kill("first", signal.SIGCONT)
    check(answers, prompts, alone)


@pytest.mark.nightly  # by day in one process: tests/unit/remote/test_coordinator.py
def test_other_weights_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    """A service that comes back with another model is named in /health and not used."""
    other = save_checkpoint(
        tmp_path / "other",
        tiny_llama(257, 1, sharpness=4.0, max_position_embeddings=2048),
        byte_tokenizer(),
    )
    deployment.kill("first")
    deployment.processes["first"].wait(30)
    deployment.start_target("first", other)
    deployment.until(lambda: deployment.standings()["first"] == "refused", "the refusal")
    assert "weights" in deployment.log_of("coordinator")
    deployment.kill("first")
    deployment.processes["first"].wait(30)
    deployment.start_target("first")
    deployment.until(lambda: deployment.standings()["first"] == "ready", "it to come back")
