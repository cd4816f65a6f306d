"""Real engines behind real services in one process: a request whose service is cut off gets the text of a single engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from grpc import aio

from outrider.build import Options
from outrider.engine.engine import Engine
from outrider.engine.observer import Observer
from outrider.engine.request import Request
from outrider.grammar import Grammars, regex
from outrider.remote.coordinator.engine import Carriage, RemoteEngine
from outrider.remote.coordinator.fleet import Fleet
from outrider.remote.coordinator.journey import RetryLimits
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import model_identity
from outrider.remote.protocol import stubs
from outrider.remote.security import ClientSecurity
from outrider.remote.target.facts import model_facts
from outrider.remote.target.run import terms_of
from outrider.remote.target.service import TargetService
from outrider.sampling.params import SamplingParams
from outrider.serve.settings import ServedModel
from tests.unit.engine.conftest import Answer, MakeEngine, engine_of, models, prompt  # noqa: F401
from tests.unit.remote.conftest import PATIENCE, until

SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
CASES: list[dict[str, Any]] = [
    {},
    SEEDED,
    {"logprobs": 2, "frequency_penalty": 0.5},
    {**SEEDED, "bad_words": ["a", "e"], "min_tokens": 200},
]
TOKENS = 250


@dataclass
class Replica:
    """An engine, and the server before it, which can be cut off and come back."""

    engine: Engine
    carriage: Carriage
    port: int = 0
    server: Any = None

    async def open(self) -> None:
        """Listen, on the same port as before."""
        model = ServedModel(name="tiny", options=Options(target="tiny"), engine=self.engine.settings)
        service = TargetService("replica", lambda method, status: None)
        identity = model_identity("tiny", self.engine.tokenizer, self.engine.vocab_size, self.facts)
        service.serve(self.engine, identity, terms_of(self.engine, model), [])
        self.server = aio.server(options=[("grpc.so_reuseport", 0)])
        stubs.add_to_server(stubs.TARGET, service, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def cut(self) -> None:
        """End all calls and connections at once."""
        await self.server.stop(None)

    @property
    def facts(self) -> dict[str, str]:
        return self._facts

    def look(self) -> None:
        """Before the engine starts."""
        self._facts = model_facts(self.engine.built)


@dataclass
class Carried:
    """Two replicas and the coordinator's engine over them."""

    replicas: list[Replica]
    remote: RemoteEngine
    fleet: Fleet


@pytest.fixture
def carried(engine_of: MakeEngine) -> Iterator[Carried]:  # noqa: F811
    """Drafted for differently, which no text may show."""
    carriage = Carriage()
    engines = engine_of(start=False), engine_of(drafter="ngram", draft=False, start=False)
    replicas = [Replica(engine, carriage) for engine in engines]
    for replica in replicas:
        replica.look()
        replica.engine.start()
        carriage.result(replica.open())
    tokenizer = replicas[0].engine.tokenizer

    async def start() -> Fleet:
        fleet = Fleet(
            "tiny", [Endpoint.parse(f"127.0.0.1:{replica.port}") for replica in replicas], ClientSecurity(),
            model_identity("tiny", tokenizer, 257), PATIENCE, instance="test", hold_s=5.0,
        )  # fmt: skip
        fleet.start()
        return fleet

    fleet = carriage.result(start())
    until(lambda: len(fleet.usable) == 2, "both replicas")
    remote = RemoteEngine(fleet, tokenizer, carriage, Observer(), RetryLimits(max_retries=20, wait_s=30.0), max_queue=50)
    yield Carried(replicas, remote, fleet)
    remote.stop()
    carriage.result(fleet.close())
    for replica in replicas:
        carriage.result(replica.cut())
    carriage.close()


def asked(number: int, name: str) -> Request:
    params = {"max_tokens": TOKENS, "ignore_eos": True, **CASES[number % len(CASES)]}
    return Request(
        id=f"{name}-{number}", prompt=prompt(20 + 3 * number, number), params=SamplingParams(**params),
        prompt_logprobs=params.get("logprobs"),
    )  # fmt: skip


def parts(answer: Answer) -> tuple[Any, ...]:
    """All that a reader gets of an answer."""
    updates = answer.wait().updates
    all_logprobs = [logprobs for update in updates for logprobs in update.logprobs]
    prompt_logprobs = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    finish = answer.finish
    return answer.token_ids, answer.text, all_logprobs, prompt_logprobs, finish.reason, finish.stop_reason, finish.seed


def submit(engine: Any, request: Request) -> Answer:
    answer = Answer()
    engine.submit(request, answer)
    return answer


def test_texts_do_not_show_that_services_were_cut_off(carried: Carried) -> None:
    """Each in turn, while several requests are in the middle of their answers."""
    seeds = [asked(number, "far") for number in range(6)]
    answers = [submit(carried.remote, request) for request in seeds]
    for round_ in range(4):
        replica = carried.replicas[round_ % 2]
        until(lambda: all(len(answer.updates) > 3 for answer in answers), "all answers to begin")
        replica.carriage.result(replica.cut())
        replica.carriage.result(replica.open())
        until(lambda: len(carried.fleet.usable) == 2, "both replicas")
        time.sleep(0.05)
    found = [parts(answer) for answer in answers]
    alone = carried.replicas[0].engine
    for number, (request, mine) in enumerate(zip(seeds, found, strict=True)):
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=mine[-1]))  # greedy: it is only reported
        assert mine == parts(submit(alone, replace(request, id=f"near-{number}"))), f"request {number}"
    for answer in answers:
        assert answer.finish.stats.emitted == TOKENS
    assert carried.remote.retries >= 1, "nobody was hit"


def test_grammars_and_stop_strings_are_carried(carried: Carried) -> None:
    """A grammar is compiled on both sides; a stop string may span the cut."""
    alone = carried.replicas[0].engine
    grammars = Grammars(alone.tokenizer, 257, alone.eos_token_ids)
    spec = regex("([a-f]{4}-){30}x")
    free = submit(alone, Request(id="free", prompt=prompt(9), params=SamplingParams(max_tokens=TOKENS, ignore_eos=True))).text
    stop = SamplingParams(max_tokens=TOKENS, ignore_eos=True, stop=[free[len(free) // 2 :][:4]], seed=1)

    def requests(name: str) -> list[Request]:
        sampled = SamplingParams(max_tokens=TOKENS, **SEEDED)
        return [
            Request(id=f"{name} g", prompt=prompt(12), params=sampled, constraint=grammars.constraint(spec)),
            Request(id=f"{name} s", prompt=prompt(9), params=stop),
        ]

    expected = [parts(submit(alone, request)) for request in requests("near")]
    answers = [submit(carried.remote, request) for request in requests("far")]
    replica = carried.replicas[1]
    replica.carriage.result(replica.cut())
    replica.carriage.result(replica.open())
    assert [parts(answer) for answer in answers] == expected
    assert [one[4] for one in expected] == ["stop", "stop"]
