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
from collections.abc import Callable, Mapping, Sequence
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


@dataclass
class LoadRun:
    """One server under one level. `keep` is called with every answer as soon as it is there."""

    label: str
    client: Client
    model: str
    options: LoadOptions
    level: Level
    keep: Callable[[MeasuredAnswer], None]
    progress: Progress
    failures: list[Failure] = field(default_factory=list)
    given_up: str = ""  # why, once it is
    _in_a_row: int = 0

    async def run(self, requests: Sequence[WorkloadRequest], window: int) -> None:
        """Ask them all, in order; returns when all are finished or the server was given up."""
        begin, waiting = perf_counter(), deque(requests)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.level.concurrency, len(waiting))):
                tasks.create_task(self._work_off(waiting, window, begin))

    async def _work_off(self, waiting: deque[WorkloadRequest], window: int, begin: float) -> None:
        while waiting:
            await self._ask(waiting.popleft(), window, begin)

    async def _ask(self, request: WorkloadRequest, window: int, begin: float) -> None:
        if self.given_up:
            return
        path, body = self.options.body(request, self.model)
        start_s = perf_counter() - begin
        outcome = await self.client.ask(request.id, path, body)
        if isinstance(outcome, Failure):
            self._failed(outcome)
        else:
            self._in_a_row = 0
            facts = {"task": request.task, "window": window, "start_s": round(start_s, 6)}
            self.keep(outcome.model_copy(update=facts))
        self.progress.advance()

    def _failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        self._in_a_row += 1
        self.progress.say(f"{self.label}, request {failure.id}: {failure.message}")
        if failure.kind == "refused":
            self.given_up = failure.message
        elif self._in_a_row >= PATIENCE:
            self.given_up = f"{PATIENCE} requests in a row failed; the last: {failure.message}"


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
            servers.append(_Server(label, client, info, info.metrics and alone, notes))
        run = _Measuring(servers, requests, options, progress)
        try:
            for level in options.levels:
                if not run.given_up:
                    await run.level(level)
        except asyncio.CancelledError:  # Ctrl-C, by way of `asyncio.run`
            if not run.has_answers:
                raise
            run.stopped = True
    return run.results()


@dataclass
class _Server:
    label: str
    client: Client
    info: ServerInfo
    reads_counters: bool
    notes: list[str]
    answers: dict[str, list[MeasuredAnswer]] = field(default_factory=dict)  # by level
    failures: dict[str, list[Failure]] = field(default_factory=dict)  # by level
    windows: dict[str, CounterWindow] = field(default_factory=dict)  # by level, what the counters say

    async def reading(self) -> Reading | None:
        return (await read(self.client, self.info.model))[0] if self.reads_counters else None

    async def settled(self, pause_s: float, earlier: Reading | None, received: int) -> Reading | None:
        """None where there was none `earlier`."""
        return None if earlier is None else await read_settled(self.client, self.info.model, pause_s, earlier, received)


class _Measuring:
    """`given_up`: the server that ended it, or None."""

    def __init__(
        self, servers: Sequence[_Server], requests: Sequence[WorkloadRequest], options: LoadOptions, progress: Progress
    ) -> None:
        self.given_up: _Server | None = None
        self.stopped = False  # by Ctrl-C
        self._cold: Failure | None = None  # that ended a warm-up
        self._servers, self._requests, self._options, self._progress = servers, requests, options, progress

    async def level(self, level: Level) -> None:
        """Measure every server at one level."""
        names = ", ".join(server.label for server in self._servers)
        self._progress.stage(f"{names}: {level.label}", len(self._requests) * len(self._servers))
        before = []
        for server in self._servers:
            before.append(await self._warm_up(server, level))
            if self.given_up:
                return
        await self._take_turns(level)
        for server, reading in zip(self._servers, before, strict=True):
            await self._close_window(server, level, reading)

    @property
    def has_answers(self) -> bool:
        return any(answers for server in self._servers for answers in server.answers.values())

    def results(self) -> list[ServerMeasurement]:
        """Raises the first failure when there is nothing else to tell, or when a server refused everything."""
        levels = [[self._measured(server, level) for level in self._options.levels] for server in self._servers]
        failures = [failure for repeats in levels for level in repeats for failure in level.failures]
        failures += [self._cold] if self._cold else []
        if failures and not any(level.answers for repeats in levels for level in repeats):
            raise raised(failures[0])
        for repeats in levels:
            errors = [raised(failure) for level in repeats for failure in level.failures]
            if errors and not any(level.answers for level in repeats) and all(isinstance(one, RequestError) for one in errors):
                raise errors[0]
        return [self._result(server, repeats, levels[0]) for server, repeats in zip(self._servers, levels, strict=True)]

    async def _warm_up(self, server: _Server, level: Level) -> Reading | None:
        """A few short answers under the level's load, so that no measured one pays for connections, compilation and graphs. The
        counters after them."""
        at_once = level.concurrency
        number = max(self._options.warmup, at_once) if self._options.warmup else 0
        requests = [_lukewarm(self._requests[index % len(self._requests)]) for index in range(number)]
        options = self._options.salted(server.info.engine)
        sampling = replace(options.sampling, max_tokens=options.sampling.limit(WARMUP_TOKENS))
        options = replace(options, sampling=sampling)
        cold, received = await server.reading(), 0
        for start in range(0, number, at_once):
            asked = [(one.id, *options.body(one, server.info.model)) for one in requests[start : start + at_once]]
            for outcome in await asyncio.gather(*(server.client.ask(*one) for one in asked)):
                if isinstance(outcome, MeasuredAnswer):
                    received += outcome.num_tokens or 0
                elif not isinstance(raised(outcome), RequestError):
                    self._cold = outcome
                    self._give_up(server, outcome.message)
                    return None
        return await server.settled(self._options.settle_s, cold, received)

    async def _take_turns(self, level: Level) -> None:
        loads = [self._load(server, level) for server in self._servers]
        for turn, requests in enumerate(self._turns(level)):
            start = turn % len(loads)
            for number in (*range(start, len(loads)), *range(start)):
                await loads[number].run(requests, turn)
                if loads[number].given_up:
                    self._give_up(self._servers[number], loads[number].given_up)
                    return

    def _give_up(self, server: _Server, reason: str) -> None:
        self.given_up = server
        server.notes.append(f"given up: {reason}")

    def _turns(self, level: Level) -> list[Sequence[WorkloadRequest]]:
        """The requests, cut into turns. A server that is alone needs none."""
        size = TURN * level.concurrency if level.concurrency > 1 else 1
        if len(self._servers) == 1:
            size = len(self._requests)
        return [self._requests[start : start + size] for start in range(0, len(self._requests), size)]

    def _load(self, server: _Server, level: Level) -> LoadRun:
        answers = server.answers[level.label] = []
        failures = server.failures[level.label] = []
        options = self._options.salted(server.info.engine)
        return LoadRun(server.label, server.client, server.info.model, options, level, answers.append, self._progress, failures)

    async def _close_window(self, server: _Server, level: Level, before: Reading | None) -> None:
        if before is None or server is self.given_up:
            return
        received = sum(answer.num_tokens or 0 for answer in server.answers[level.label])
        after = await server.settled(self._options.settle_s, before, received)
        if after is not None:
            server.windows[level.label] = difference(before, after)

    def _measured(self, server: _Server, level: Level) -> LevelMeasurement:
        by_id = {answer.id: answer for answer in server.answers.get(level.label, [])}
        answers = [by_id[request.id] for request in self._requests if request.id in by_id]
        failures, window = server.failures.get(level.label, []), server.windows.get(level.label)
        return summarise(level, len(self._requests), answers, failures, window)

    def _result(
        self, server: _Server, levels: list[LevelMeasurement], baseline: list[LevelMeasurement]
    ) -> ServerMeasurement:
        unanswered = sum(level.num_requests - len(level.answers) for level in levels)
        refused = [failure for level in levels for failure in level.failures if isinstance(raised(failure), RequestError)]
        if self.given_up:
            others = "" if server is self.given_up else f"the run ended with {self.given_up.label}: "
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
