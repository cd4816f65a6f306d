"""A coordinator, two targets, their draft service: targets are killed, wires are cut, and no answer
is lost or changed.

The reference is one process without drafts. Sampled requests carry seeds and the targets share
their noise with the drafts (`--verifier gumbel`), so that a text depends neither on drafts nor on
who emits it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.demo import demo_paths
from tests.network.network import Network
from tests.network.parts import DRAFT_PORT, HTTP_PORT, Part, complete, get, metric, stream
from tools.demo_models.problems import problems

pytestmark = [pytest.mark.usefixtures("_wires"), pytest.mark.slow]
AT_ONCE = 12
MANY = 1000
MAX_KILLS = 20


@dataclass
class Deployment:
    """The parts, and what one process answers."""

    network: Network
    targets: list[Part]
    coordinator: Part
    bodies: list[dict[str, Any]]
    llm: LLM
    expected: dict[int, str] = field(default_factory=dict)

    def answers(self, numbers: Sequence[int]) -> list[str]:
        """The texts of these requests, some at once."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._answer, numbers))

    def check(self, numbers: Sequence[int]) -> None:
        """All of them, compared."""
        self.expect(numbers)
        answers = self.answers(numbers)
        changed = {
            number: text
            for number, text in zip(numbers, answers, strict=True)
            if text != self.expected[number]
        }
        assert not changed, {
            number: (text, self.expected[number]) for number, text in changed.items()
        }

    def expect(self, numbers: Sequence[int]) -> None:
        """Have one process answer these requests, where it has not."""
        new = [number for number in numbers if number not in self.expected]
        params = [
            SamplingParams(
                **{name: value for name, value in self.bodies[number].items() if name != "prompt"}
            )
            for number in new
        ]
        answers = self.llm.generate([self.bodies[number]["prompt"] for number in new], params)
        self.expected |= {number: answer.text for number, answer in zip(new, answers, strict=True)}

    def count(self, name: str) -> float:
        """The sum of a metric over the targets' pages."""
        pages = [
            get(self.network, "front", self.network.address(part.host), "/metrics")
            for part in self.targets
        ]
        return sum(metric(page, f"outrider:{name}") for page in pages)

    def _answer(self, number: int) -> str:
        """Half of them as streams, which continue in their middle; the others in one piece."""
        body = {"model": "demo", **self.bodies[number]}
        address = self.network.address("front")
        if number % 4 < 2:
            return stream(self.network, "front", address, **body)
        return str(complete(self.network, "front", address, **body)["choices"][0]["text"])


@pytest.fixture(scope="module")
def deployment(_wires: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("parts")
    target, draft = demo_paths()
    anywhere = ["--host", "0.0.0.0", "--port"]
    with Network("front", "one", "two", "drafts", round_trip_s=0.001) as network:
        command = ["service", "draft", str(draft), *anywhere, str(DRAFT_PORT)]
        # before the targets, which ask again seconds later where it is still loading
        service = Part(network, "drafts", command, DRAFT_PORT, folder / "draft.log").start().wait()
        command = ["serve", *anywhere, str(HTTP_PORT), "--served-model-name", "demo"]
        command += ["--no-self-test", "--verifier", "gumbel"]
        environment = {
            "MODEL": str(target),
            "DRAFT_ENDPOINT": service.address,
            "MAX_DRAFT_TOKENS": "4",
        }
        targets = [
            Part(network, host, command, HTTP_PORT, folder / f"{host}.log", environment).start()
            for host in ("one", "two")
        ]
        environment = {"TARGET_ENDPOINT": ",".join(part.address for part in targets)}
        command = ["service", "coordinator", *anywhere, str(HTTP_PORT)]
        coordinator = Part(
            network, "front", command, HTTP_PORT, folder / "coordinator.log", environment
        ).start()
        llm = LLM(str(target), drafter="none", verifier="gumbel")
        for part in (*targets, coordinator):
            part.wait()
        yield Deployment(network, targets, coordinator, requests(), llm)


def requests() -> list[dict[str, Any]]:
    """Short word problems, every second one sampled with a seed."""
    chance = random.Random(0)
    return [
        {
            "prompt": problem.prompt,
            "max_tokens": chance.randint(4, 24),
            "temperature": 0.8 if number % 2 else 0.0,
            "seed": number,
        }
        for number, problem in zip(range(MANY), problems(0), strict=False)
    ]


@pytest.fixture(autouse=True)
def _mended(deployment: Deployment) -> Iterator[None]:
    """Each test finds, and leaves, all parts alive and every wire whole."""
    yield
    deployment.network.change(round_trip_s=0.001, loss=0.0, cut=False)
    for target in deployment.targets:
        assert target.process is not None
        if target.process.poll() is not None:
            target.start()
        target.wait()
    assert deployment.coordinator.process is not None
    assert deployment.coordinator.process.poll() is None, deployment.coordinator.log_text()[-4000:]


@pytest.mark.slow
def test_texts_are_those_of_one_process(deployment: Deployment) -> None:
    """Both targets find the draft service by the environment alone."""
    deployment.check(range(40))
    assert deployment.count("remote_draft_requests_total") > 0


@pytest.mark.nightly
def test_a_target_that_is_killed_takes_no_answer_with_it(deployment: Deployment) -> None:
    """At points that a seed chooses, now one and now the other."""
    chance = random.Random(1)
    for turn in range(4):
        victim = deployment.targets[turn % 2]
        deployment.expect(range(60))
        killer = threading.Timer(chance.random() * 1.0, victim.kill)
        killer.start()
        deployment.check(range(60))
        killer.join()
        victim.start().wait()


@pytest.mark.nightly
def test_a_target_behind_a_cut_wire_takes_no_answer_with_it(deployment: Deployment) -> None:
    deployment.expect(range(60))
    cutter = threading.Timer(0.3, deployment.network.change, ("front", "one"), {"cut": True})
    cutter.start()
    deployment.check(range(60))
    cutter.join()
    deployment.network.change("front", "one", cut=False)
    deployment.check(range(60))


@pytest.mark.nightly
def test_a_lossy_wire_changes_no_answer(deployment: Deployment) -> None:
    deployment.network.change(round_trip_s=0.01, loss=0.02)
    deployment.check(range(60))


@pytest.mark.nightly
def test_a_thousand_requests_outlive_both_targets_one_after_the_other(
    deployment: Deployment,
) -> None:
    deployment.expect(range(MANY))
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(deployment.check, range(MANY))
        kills = 0
        while (
            not checked.done() and kills < MAX_KILLS
        ):  # from this thread: a process ends with the thread that started it
            victim = deployment.targets[kills % 2]
            victim.kill()
            victim.start().wait()
            kills += 1
        checked.result()
    assert kills >= 2
