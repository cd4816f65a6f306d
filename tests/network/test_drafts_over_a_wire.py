"""`outrider serve` and a draft service across a wire that is slow, lossy or cut, or that is killed:
never another text.

The reference is one process with the same pair. Sampled requests carry seeds and share their noise
with the draft (`--verifier gumbel`), so that their texts do not depend on which drafts arrived in
time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from outrider import LLM, SamplingParams
from outrider.demo import DEMO_PROMPTS, demo_paths
from tests.network.network import Network
from tests.network.parts import DRAFT_PORT, HTTP_PORT, Part, complete, get, metric

pytestmark = pytest.mark.usefixtures("_wires")
TOKENS = 32
PARAMS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}]
ENOUGH_S = 300.0


@dataclass
class Deployment:
    """A server and its draft service, and what one process answers."""

    network: Network
    draft: Part
    server: Part
    expected: list[str]

    def answers(self, prompts: int = len(DEMO_PROMPTS)) -> list[str]:
        """The texts of the first prompts, greedy and seeded, one after another."""
        address = self.network.address("steps")
        bodies = [
            {"prompt": prompt, "max_tokens": TOKENS, **params}
            for params in PARAMS
            for prompt in DEMO_PROMPTS[:prompts]
        ]
        answers = [
            complete(self.network, "steps", address, model="demo", **body) for body in bodies
        ]
        return [answer["choices"][0]["text"] for answer in answers]

    def count(self, name: str) -> float:
        """A metric of the server."""
        return metric(
            get(self.network, "steps", self.network.address("steps"), "/metrics"),
            f"outrider:{name}",
        )

    def check(self) -> None:
        """All texts, compared."""
        assert self.answers() == self.expected

    def arrives(self) -> bool:
        """Whether a draft from the service reaches the server within some answers."""
        before = self.count("remote_draft_hits_total")
        until = time.monotonic() + ENOUGH_S
        while time.monotonic() < until:
            self.answers(1)
            if self.count("remote_draft_hits_total") > before:
                return True
        return False


@pytest.fixture(scope="module")
def deployment(_wires: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("parts")
    target, draft = demo_paths()
    with Network("steps", "drafts") as network:
        service = Part(
            network,
            "drafts",
            ["service", "draft", str(draft), "--host", "0.0.0.0", "--port", str(DRAFT_PORT)],
            DRAFT_PORT,
            folder / "draft.log",
        )
        options = [
            "--verifier",
            "gumbel",
            "--no-self-test",
            "--num-draft-tokens",
            "4",
        ]
        where = ["--draft-endpoint", service.address, "--host", "0.0.0.0", "--port", str(HTTP_PORT)]
        command = ["serve", str(target), "--served-model-name", "demo", *options, *where]
        server = Part(network, "steps", command, HTTP_PORT, folder / "server.log")
        service.start().wait()
        server.start()
        llm = LLM(
            str(target),
            draft=str(draft),
            drafter="draft-model",
            verifier="gumbel",
            num_draft_tokens=4,
        )
        expected = [
            output.text
            for params in PARAMS
            for output in llm.generate(
                list(DEMO_PROMPTS), SamplingParams(max_tokens=TOKENS, **params)
            )  # type: ignore[arg-type]
        ]
        server.wait()
        yield Deployment(network, service, server, expected)


@pytest.fixture(autouse=True)
def _mended(deployment: Deployment) -> Iterator[None]:
    """Each test finds a fast wire and a service that works."""
    deployment.network.change(round_trip_s=0.0, jitter_s=0.0, loss=0.0, cut=False)
    yield
    deployment.network.change(round_trip_s=0.0, jitter_s=0.0, loss=0.0, cut=False)
    assert deployment.server.process is not None
    assert deployment.server.process.poll() is None, deployment.server.log_text()[-4000:]


@pytest.mark.slow
def test_texts_are_those_of_one_process(deployment: Deployment) -> None:
    deployment.network.change(round_trip_s=0.001)
    deployment.check()
    assert deployment.arrives()
    assert deployment.count("spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.slow
@pytest.mark.parametrize("round_trip_s", [0.01, pytest.param(0.05, marks=pytest.mark.nightly)])
def test_a_slow_wire_changes_no_text(deployment: Deployment, round_trip_s: float) -> None:
    deployment.network.change(round_trip_s=round_trip_s, jitter_s=round_trip_s / 4)
    deployment.check()


@pytest.mark.nightly
def test_a_lossy_wire_changes_no_text(deployment: Deployment) -> None:
    deployment.network.change(round_trip_s=0.01, loss=0.02)
    deployment.check()
    assert deployment.network.counts()["lost"] > 0
    deployment.check()


@pytest.mark.nightly
def test_drafts_resume_by_themselves_behind_a_partition(deployment: Deployment) -> None:
    assert deployment.arrives()
    deployment.network.change(cut=True)
    until = time.monotonic() + 12.0  # longer than gRPC takes to give a silent peer up
    while time.monotonic() < until:
        deployment.check()
    deployment.network.change(cut=False)
    assert deployment.arrives()
    deployment.check()


@pytest.mark.nightly
def test_a_killed_draft_service_is_missed_by_no_text_and_found_again(
    deployment: Deployment,
) -> None:
    """At points of the answers that a seed chooses."""
    chance = random.Random(0)
    for _ in range(3):
        assert deployment.arrives()
        killer = threading.Timer(chance.random() * 0.5, deployment.draft.kill)
        killer.start()
        deployment.check()
        killer.join()
        deployment.check()
        deployment.draft.start().wait()
    assert deployment.arrives()
    deployment.check()
