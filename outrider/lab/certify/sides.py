"""The two sides of `certify URL`: a server with drafts, and the same one without, by another URL or
by a field of the request.

A field is known for Outrider's server only. SGLang, vLLM and TensorRT-LLM have none; llama.cpp's
`speculative.n_max` is not read by its current server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError, OutriderError, ServerError
from outrider.lab.certify.server_result import AskedServer
from outrider.lab.progress import Progress
from outrider.lab.server.client import Client, ServerEndpoint, Stream
from outrider.lab.server.counters import Reading, difference, read, read_settled

PATIENCE = 10  # failures in a row, after which a server is asked nothing more
# fields that switch drafts off, by `owned_by` of /v1/models
SWITCHES: Mapping[str, dict[str, Any]] = {"outrider": {"speculation": {"mode": "off"}}}
MAX_FAILURES = 20  # that a result names


@dataclass(frozen=True)
class Ask:
    """One request: where to, and its body without model and switch."""

    name: str  # for messages
    path: str
    body: dict[str, Any]


@dataclass
class Side:
    """One server, asked with or without drafts."""

    label: str  # plain, speculative
    client: Client
    progress: Progress
    settle_s: float
    model: str = ""
    engine: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 0
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)
    drafted: dict[str, int | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_miscounted: int = 0  # answers with a count of tokens that cannot be
    _failed_in_a_row: int = 0

    @property
    def is_given_up(self) -> bool:
        """Whether it is asked nothing more."""
        return self._failed_in_a_row >= PATIENCE

    async def ask(self, section: str, asks: Sequence[Ask], at_once: int) -> list[Stream | None]:
        """The answers in order, None for those that failed; `at_once` are in flight. What the
        server drafted meanwhile is added to the section's."""
        answers: list[Stream | None] = [None] * len(asks)
        waiting = deque(enumerate(asks))
        before = await self._read()

        async def work() -> None:
            while waiting and not self.is_given_up:
                number, ask = waiting.popleft()
                answers[number] = await self._answer(ask)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(at_once, len(asks))):
                tasks.create_task(work())
        self.progress.advance(len(waiting))
        await self._count(section, [answer for answer in answers if answer is not None], before)
        return answers

    async def _answer(self, ask: Ask) -> Stream | None:
        self.num_requests += 1
        body = {**ask.body, "model": self.model, **self.fields}
        try:
            stream = await self.client.stream(ask.path, body)
        except OutriderError as error:
            self._failed_in_a_row += 1
            self.num_failed += 1
            if len(self.failures) < MAX_FAILURES:
                self.failures.append(f"{ask.name}: {error}")
            return None
        finally:
            self.progress.advance()
        self._failed_in_a_row = 0
        count = stream.num_tokens
        if count is not None:
            asked = body["max_tokens"] or count
            self.num_miscounted += count > asked or (count <= 0 < stream.num_characters)
        return stream

    async def _read(self) -> Reading | None:
        try:
            return await read(self.client, self.model)
        except ServerError:
            return None

    async def _count(self, section: str, answers: Sequence[Stream], before: Reading | None) -> None:
        """By the answers themselves where they say how much was drafted, else by the server's
        counters."""
        told = [answer.num_drafted for answer in answers if answer.num_drafted is not None]
        now: int | None = sum(told) if told else None
        if now is None and before is not None:
            received = sum(max(0, answer.num_tokens or 0) for answer in answers)
            try:
                after = await read_settled(self.client, self.model, self.settle_s, before, received)
            except ServerError:
                return
            counts, notes = difference(before, after, received)
            self.notes += [note for note in notes if "other traffic" in note]
            now = None if counts is None else counts.num_steps
        if now is not None:
            self.drafted[section] = (self.drafted.get(section) or 0) + now
        else:
            self.drafted.setdefault(section, None)

    def asked(self) -> AskedServer:
        """For the result."""
        more = self.num_failed - len(self.failures)
        failures = [*self.failures, *([f"and {more} more"] if more else [])]
        return AskedServer(
            url=self.client.endpoint.url,
            model=self.model,
            engine=self.engine,
            fields=self.fields,
            num_requests=self.num_requests,
            failures=failures,
            drafted=self.drafted,
        )


async def open_sides(
    endpoints: Mapping[str, ServerEndpoint],
    clients: Mapping[str, Client],
    progress: Progress,
    settle_s: float,
) -> tuple[Side, Side]:
    """(plain, speculative). `endpoints` as of `ServerOptions.endpoints`: one, or both.

    Raises ConfigError where there is one URL and its server has no known field that switches drafts
    off, ServerError where a server does not answer.
    """
    names = list(endpoints)
    sides = [
        Side(label, clients[name], progress, settle_s)
        for label, name in (("plain", names[0]), ("speculative", names[-1]))
    ]
    for side in sides:
        side.model = await side.client.model()
        side.engine = await _engine(side.client, side.model)
    plain, speculative = sides
    if len(names) == 1:
        plain.fields = _switch(plain)
    return plain, speculative


async def _engine(client: Client, model: str) -> str:
    """The maker that a server names as the owner of its model; empty where it names none."""
    try:
        owners = dict(await client.models())
    except ServerError:
        return ""
    return owners.get(model) or next(iter(owners.values()), "")


def _switch(side: Side) -> dict[str, Any]:
    if side.engine not in SWITCHES:
        who = f"a server of '{side.engine}'" if side.engine else "this server"
        raise ConfigError(
            f"no field of a request is known that switches drafts off in {who}: start the same "
            "model without drafts, too, with everything else the same, and name it by "
            "--baseline-url http://HOST:PORT"
        )
    return SWITCHES[side.engine]
