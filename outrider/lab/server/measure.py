"""The run: every server at every level, on the same prompts, so that two servers can be compared fairly.

Several servers take turns. With one request at a time the turn is a prompt; with more in flight it is TURN times as many
prompts, so that the load is reached within each turn. Who begins changes from turn to turn, and only one server works at any
time: two on one machine do not disturb each other. A turn is one window: an uninterrupted stretch of work whose clock all its
answers share. Requests that fail are kept as failures; a server that refuses connections, or fails PATIENCE requests in a row, is
given up. A run that a server or Ctrl-C ended keeps what was answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter

from outrider.errors import ConfigError, RequestError
from outrider.lab.progress import QUIET, Progress
from outrider.lab.server.client import Client, raised
from outrider.lab.server.counters import CounterWindow, Reading, difference, read, read_settled
from outrider.lab.server.discover import discover
from outrider.lab.server.options import SALT_NOTE, LoadOptions, ServerEndpoint
from outrider.lab.server.summary import compare, summarise
from outrider.lab.server.types import Failure, Level, LevelMeasurement, MeasuredAnswer, ServerInfo, ServerMeasurement
from outrider.lab.workload.types import Workload, WorkloadRequest

PATIENCE = 10  # failures in a row
TURN = 4
WARMUP_TOKENS = 16
WARMUP_PREFIX = "Warming up. "
SAME = "two labels name this server: whose requests its counters counted is unknown, so they are left out"
SAMPLED = "sampling parameters that were not given are the server's own defaults; texts are not compared"


def measure_servers(
    endpoints: Mapping[str, ServerEndpoint],
    workload: Workload,
    options: LoadOptions,
    *,
    progress: Progress = QUIET,
) -> list[ServerMeasurement]:
    """By label, the first being the baseline of the others.

    Raises ServerError where a server is not there or nothing was answered at all, RequestError where no request was usable,
    ConfigError for options that do not fit. A server that fails later is reported in its measurement, and ends the run. After
    Ctrl-C: what was answered by then (`interrupted`), KeyboardInterrupt where nothing was.
    """
    if not endpoints:
        raise ConfigError("there must be at least one server to measure")
    if not workload.requests:
        raise ConfigError(f"the workload {workload.name} has no requests")
    for request in workload.requests:
        options.body(request, "")  # raises before anything is sent
    return asyncio.run(_measure(endpoints, workload.requests, options, progress))


async def _measure(
    endpoints: Mapping[str, ServerEndpoint], requests: Sequence[WorkloadRequest], options: LoadOptions, progress: Progress
) -> list[ServerMeasurement]:
    async with AsyncExitStack() as stack:
        servers = []
        for label, endpoint in endpoints.items():
            client = await stack.enter_async_context(Client(endpoint, timeout_s=options.timeout_s))
            info = await discover(client)
            alone = sum(other.root == endpoint.root for other in endpoints.values()) == 1
            applies = {SAME: not alone, SAMPLED: not options.sampling.is_greedy, SALT_NOTE: options.is_salted(info.engine)}
            notes = [*info.notes, *(note for note, is_so in applies.items() if is_so)]
            servers.append(Server(label, client, info, info.metrics and alone, notes))
        run = _Measuring(servers, requests, options, progress)
        try:
            for loads in run.levels:
                if not run.given_up:
                    await run.level(loads)
        except asyncio.CancelledError:  # Ctrl-C, by way of `asyncio.run`
            if not run.has_answers:
                raise
            run.stopped = True
    return run.results()


@dataclass
class Server:
    """One server of a run."""

    label: str
    client: Client
    info: ServerInfo
    reads_counters: bool
    notes: list[str]

    async def reading(self) -> Reading | None:
        return (await read(self.client, self.info.model))[0] if self.reads_counters else None

    async def settled(self, pause_s: float, earlier: Reading | None, received: int) -> Reading | None:
        """None where there was none `earlier`."""
        return None if earlier is None else await read_settled(self.client, self.info.model, pause_s, earlier, received)


@dataclass
class Load:
    """One server under one level."""

    server: Server
    level: Level
    options: LoadOptions
    progress: Progress
    answers: list[MeasuredAnswer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    cold: Failure | None = None  # that ended the warm-up
    before: Reading | None = None  # the counters, once it is warm
    window: CounterWindow | None = None  # what the counters say
    given_up: str = ""  # why, once it is
    _in_a_row: int = 0  # failures

    async def warm_up(self, requests: Sequence[WorkloadRequest]) -> None:
        """A few short answers under the load, so that no measured one pays for connections, compilation and graphs."""
        at_once, options = self.level.concurrency, self.options.salted(self.server.info.engine)
        number = max(options.warmup, at_once) if options.warmup else 0
        lukewarm = [_lukewarm(requests[index % len(requests)]) for index in range(number)]
        short = replace(options, sampling=replace(options.sampling, max_tokens=options.sampling.limit(WARMUP_TOKENS)))
        cold, received = await self.server.reading(), 0
        for start in range(0, number, at_once):
            asked = [(one.id, *short.body(one, self.server.info.model)) for one in lukewarm[start : start + at_once]]
            for outcome in await asyncio.gather(*(self.server.client.ask(*one) for one in asked)):
                if isinstance(outcome, MeasuredAnswer):
                    received += outcome.num_tokens or 0
                elif not isinstance(raised(outcome), RequestError):
                    self.cold, self.given_up = outcome, outcome.message
                    return
        self.before = await self.server.settled(options.settle_s, cold, received)

    async def run(self, requests: Sequence[WorkloadRequest], window: int) -> None:
        """Ask them all, in order; returns when all are finished or the server was given up."""
        begin, waiting = perf_counter(), deque(requests)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.level.concurrency, len(waiting))):
                tasks.create_task(self._work_off(waiting, window, begin))

    async def _work_off(self, waiting: deque[WorkloadRequest], window: int, begin: float) -> None:
        while waiting and not self.given_up:
            request = waiting.popleft()
            path, body = self.options.body(request, self.server.info.model)
            start_s = perf_counter() - begin
            outcome = await self.server.client.ask(request.id, path, body)
            if isinstance(outcome, Failure):
                self._failed(outcome)
            else:
                self._in_a_row = 0
                facts = {"task": request.task, "window": window, "start_s": round(start_s, 6)}
                self.answers.append(outcome.model_copy(update=facts))
            self.progress.advance()

    def _failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        self._in_a_row += 1
        self.progress.say(f"{self.server.label}, request {failure.id}: {failure.message}")
        if failure.kind == "refused":
            self.given_up = failure.message
        elif self._in_a_row >= PATIENCE:
            self.given_up = f"{PATIENCE} requests in a row failed; the last: {failure.message}"

    async def close(self) -> None:
        """Read the counters once more, unless the server was given up."""
        if self.before is not None and not self.given_up:
            received = sum(answer.num_tokens or 0 for answer in self.answers)
            after = await self.server.settled(self.options.settle_s, self.before, received)
            self.window = None if after is None else difference(self.before, after)

    def measured(self, requests: Sequence[WorkloadRequest]) -> LevelMeasurement:
        """Everything known, the answers in the order of the requests."""
        by_id = {answer.id: answer for answer in self.answers}
        answers = [by_id[request.id] for request in requests if request.id in by_id]
        return summarise(self.level, len(requests), answers, self.failures, self.window)


class _Measuring:
    """All servers at all levels."""

    def __init__(
        self, servers: Sequence[Server], requests: Sequence[WorkloadRequest], options: LoadOptions, progress: Progress
    ) -> None:
        self.stopped = False  # by Ctrl-C
        self._servers, self._requests, self._options, self._progress = servers, requests, options, progress
        self.levels = [
            [Load(server, level, options.salted(server.info.engine), progress) for server in servers]
            for level in options.levels
        ]

    @property
    def given_up(self) -> Load | None:
        """What ended the run, if anything did."""
        return next((load for loads in self.levels for load in loads if load.given_up), None)

    @property
    def has_answers(self) -> bool:
        return any(load.answers for loads in self.levels for load in loads)

    async def level(self, loads: Sequence[Load]) -> None:
        """Measure every server at one level."""
        names = ", ".join(server.label for server in self._servers)
        self._progress.stage(f"{names}: {loads[0].level.label}", len(self._requests) * len(loads))
        for load in loads:
            await load.warm_up(self._requests)
            if load.given_up:
                return
        await self._take_turns(loads)
        for load in loads:
            await load.close()

    async def _take_turns(self, loads: Sequence[Load]) -> None:
        """A server that is alone has a single turn."""
        at_once = loads[0].level.concurrency
        size = len(self._requests) if len(loads) == 1 else TURN * at_once if at_once > 1 else 1
        for turn, first in enumerate(range(0, len(self._requests), size)):
            start = turn % len(loads)
            for load in (*loads[start:], *loads[:start]):
                await load.run(self._requests[first : first + size], turn)
                if load.given_up:
                    return

    def results(self) -> list[ServerMeasurement]:
        """The measurements of all servers.

        Raises the first failure when there is nothing else to tell, or when a server refused everything.
        """
        loads = [load for several in self.levels for load in several]
        failures = [*(one for load in loads for one in load.failures), *(load.cold for load in loads if load.cold)]
        if failures and not self.has_answers:
            raise raised(failures[0])
        by_server = list(zip(*self.levels, strict=True))
        for own in by_server:
            errors = [raised(failure) for load in own for failure in load.failures]
            if errors and not any(load.answers for load in own) and all(isinstance(one, RequestError) for one in errors):
                raise errors[0]
        measured = [[load.measured(self._requests) for load in own] for own in by_server]
        return [self._result(server, found, measured[0]) for server, found in zip(self._servers, measured, strict=True)]

    def _result(
        self, server: Server, levels: list[LevelMeasurement], baseline: list[LevelMeasurement]
    ) -> ServerMeasurement:
        unanswered = sum(level.num_requests - len(level.answers) for level in levels)
        refused = [failure for level in levels for failure in level.failures if isinstance(raised(failure), RequestError)]
        if (ended := self.given_up) is not None:
            is_own = server is ended.server
            server.notes += [f"given up: {ended.given_up}"] if is_own else []
            others = "" if is_own else f"the run ended with {ended.server.label}: "
            server.notes.append(f"{others}{unanswered} requests are without an answer")
        elif self.stopped:
            server.notes.append(f"the run was stopped: {unanswered} requests are without an answer")
        greedy, first = self._options.sampling.is_greedy, self._servers[0]
        pairs = [] if server is first else zip(baseline, levels, strict=True)
        return ServerMeasurement(
            label=server.label,
            url=server.client.endpoint.url,
            server=server.info,
            levels=levels,
            baseline=None if server is first else first.label,
            comparisons=[compare(theirs, repeats, greedy=greedy) for theirs, repeats in pairs],
            complete=unanswered == len(refused),
            interrupted=self.stopped,
            notes=server.notes,
        )


def _lukewarm(request: WorkloadRequest) -> WorkloadRequest:
    """Another beginning, so that the prefix cache does not know the prompt when its time is measured."""
    if request.messages:
        first, *others = request.messages
        return replace(request, messages=({**first, "content": WARMUP_PREFIX + first["content"]}, *others))
    return replace(request, prompt=WARMUP_PREFIX + (request.prompt or ""))
