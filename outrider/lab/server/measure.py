"""The prompts through one server, or through a plain and a speculating one in turn, and what a
client sees.

One closed loop: this many requests in flight, a new one as soon as one ends. Two servers take turns
on the same prompts, and only one of them works at any time, so that two on one machine do not
disturb each other. Later turns of a conversation follow the server's own answers. With one request
in flight a turn is a prompt, with more it is TURN times as many. Who begins changes from turn to
turn. Requests that fail are kept as failures; a server that fails PATIENCE of them in a row ends
the run. A run that a server or Ctrl-C ended keeps what was answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter

from outrider.errors import OutriderError, ServerError
from outrider.lab.bench.bench_result import (
    BenchResult,
    MeasuredAnswer,
    Percentiles,
    ServerComparison,
    ServerMeasurement,
    SpeculationCounts,
    WorkloadInfo,
)
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.progress import QUIET, Progress
from outrider.lab.result import Interval
from outrider.lab.server.client import Client, RequestOptions, ServerEndpoint
from outrider.lab.server.counters import Reading, difference, read, read_settled
from outrider.lab.workload.types import Workload, WorkloadRequest

PATIENCE = 10  # failures in a row
TURN = 4
WARMUP = 2
WARMUP_TOKENS = 16
# another beginning, so that no prefix cache knows the prompts when they are measured
WARMUP_PREFIX = "Warming up. "
MIN_PAIRS = 8  # for an interval
SAMPLED = (
    "sampling parameters that were not given are the server's own defaults; texts are not compared"
)


def bench_servers(
    endpoints: Mapping[str, ServerEndpoint],
    workload: Workload,
    options: RequestOptions,
    *,
    prompts: int,
    progress: Progress = QUIET,
) -> BenchResult:
    """Every server on the first `prompts` requests of each task; the first server is the baseline
    of the other.

    Raises the first failure where nothing was answered, ConfigError for options that do not fit,
    and KeyboardInterrupt where Ctrl-C came before the first answer.
    """
    requests = workload.firsts(prompts).requests
    for request in requests:
        options.body(request, "")  # raises before anything is sent
    servers, stopped = asyncio.run(_measure(endpoints, requests, options, progress))
    plain = servers[0]
    if not any(server.answers for server in servers):
        raise plain.errors[0]
    return BenchResult(
        workload=WorkloadInfo.of(workload),
        settings={**asdict(options), "prompts": prompts},
        servers=[
            server.measurement(requests, None if server is plain else plain) for server in servers
        ],
        seconds=sum(server.busy_s for server in servers),
        interrupted=stopped,
    )


async def _measure(
    endpoints: Mapping[str, ServerEndpoint],
    requests: Sequence[WorkloadRequest],
    options: RequestOptions,
    progress: Progress,
) -> tuple[list[_Server], bool]:
    """(the servers with their answers, whether Ctrl-C ended it.)"""
    servers = [
        _Server(label, Client(endpoint, timeout_s=options.timeout_s), options, progress)
        for label, endpoint in endpoints.items()
    ]
    num_turns = sum(len(request.turn_ids) for request in requests)
    progress.stage(", ".join(endpoints), num_turns * len(servers))
    try:
        for server in servers:
            await server.warm_up(requests)
        await _take_turns(servers, requests, options.concurrency)
        for server in servers:
            await server.read_counters()
    except asyncio.CancelledError:  # Ctrl-C, by way of `asyncio.run`
        if not any(server.answers for server in servers):
            raise
        return servers, True
    finally:
        for server in servers:
            await server.client.http.aclose()
    return servers, False


async def _take_turns(
    servers: Sequence[_Server], requests: Sequence[WorkloadRequest], at_once: int
) -> None:
    """A server that is alone has a single turn."""
    size = len(requests) if len(servers) == 1 else TURN * at_once if at_once > 1 else 1
    for turn, first in enumerate(range(0, len(requests), size)):
        for server in servers if turn % 2 == 0 else reversed(servers):
            await server.run(requests[first : first + size])
            if server.is_given_up:
                return


@dataclass
class _Server:
    """One server of a run, and what came of its requests."""

    label: str
    client: Client
    options: RequestOptions
    progress: Progress
    model: str = ""
    answers: dict[str, MeasuredAnswer] = field(default_factory=dict)  # by the request's id
    errors: list[OutriderError] = field(default_factory=list)
    busy_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    before: Reading | None = None  # the counters, once it is warm
    speculation: SpeculationCounts | None = None
    num_failed_in_a_row: int = 0

    @property
    def is_given_up(self) -> bool:
        return self.num_failed_in_a_row >= PATIENCE

    async def warm_up(self, requests: Sequence[WorkloadRequest]) -> None:
        """A few short answers, so that no measured one pays for connections, compilation and
        graphs."""
        self.model = await self.client.model()
        if not self.options.sampling.is_greedy:
            self.notes.append(SAMPLED)
        sampling = replace(
            self.options.sampling, max_tokens=self.options.sampling.limit(WARMUP_TOKENS)
        )
        short = replace(self.options, sampling=sampling)
        count = max(WARMUP, self.options.concurrency)
        asked = [_lukewarm(requests[index % len(requests)]) for index in range(count)]
        try:
            cold = await read(self.client, self.model)
        except ServerError as error:
            cold = None
            self.notes.append(str(error))
        asking = (self.client.ask(request, *short.body(request, self.model)) for request in asked)
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        answers = [outcome for outcome in outcomes if isinstance(outcome, MeasuredAnswer)]
        if not answers and isinstance(outcomes[0], BaseException):
            raise outcomes[0]
        if cold is not None:
            received = sum(answer.num_tokens or 0 for answer in answers)
            self.before = await read_settled(
                self.client, self.model, self.options.settle_s, cold, received
            )

    async def run(self, requests: Sequence[WorkloadRequest]) -> None:
        """Ask them all, in order; returns when all are finished or the server is given up."""
        begin = perf_counter()
        waiting = deque(requests)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.options.concurrency):
                    tasks.create_task(self._work_off(waiting))
        finally:
            self.busy_s += perf_counter() - begin

    async def _work_off(self, waiting: deque[WorkloadRequest]) -> None:
        while waiting and not self.is_given_up:
            await self._converse(waiting.popleft())

    async def _converse(self, first: WorkloadRequest) -> None:
        """A request, and the later turns of its conversation, each after the answer before it."""
        request = first
        for name in first.turn_ids:
            try:
                path, body = self.options.body(request, self.model)
                answer = await self.client.ask(request, path, body)
            except OutriderError as error:
                self.errors.append(type(error)(f"request {request.id}: {error}"))
                self.progress.say(f"{self.label}, {self.errors[-1]}")
                self.num_failed_in_a_row += 1
                self.progress.advance(1 + len(request.later))
                return
            self.answers[name] = answer
            self.num_failed_in_a_row = 0
            self.progress.advance()
            if request.later:
                request = request.next_turn(answer.reply)

    async def read_counters(self) -> None:
        """Counters once more, where there were any."""
        if self.before is None:
            return
        received = sum(answer.num_tokens or 0 for answer in self.answers.values())
        try:
            after = await read_settled(
                self.client, self.model, self.options.settle_s, self.before, received
            )
        except ServerError as error:
            self.notes.append(str(error))
        else:
            self.speculation, notes = difference(self.before, after, received)
            self.notes += notes

    def measurement(
        self, requests: Sequence[WorkloadRequest], plain: _Server | None
    ) -> ServerMeasurement:
        """Everything known, the answers in the order of the requests. `plain`: the server to
        compare with."""
        names = [name for request in requests for name in request.turn_ids]
        answers = [self.answers[name] for name in names if name in self.answers]
        is_counted = all(answer.num_tokens is not None for answer in answers)
        tokens = sum(answer.num_tokens or 0 for answer in answers)
        if not is_counted:
            self.notes.append(
                "answers came without token counts (usage): rates per token are left out"
            )
        if self.is_given_up:
            self.notes.append(f"given up after {PATIENCE} failures in a row")
        return ServerMeasurement(
            label=self.label,
            url=self.client.endpoint.url,
            engine=(self.before.engine if self.before is not None else None) or "",
            model=self.model,
            concurrency=self.options.concurrency,
            num_requests=len(names),
            answers=answers,
            failures=[str(error) for error in self.errors],
            tokens_per_s=tokens / self.busy_s if answers and is_counted else None,
            request_s=Percentiles.of(answer.seconds for answer in answers),
            ttft_s=Percentiles.of(answer.ttft_s for answer in answers),
            tpot_s=Percentiles.of(answer.tpot_s for answer in answers),
            speculation=self.speculation,
            comparison=None if plain is None else self._against(plain),
            notes=self.notes,
        )

    def _against(self, plain: _Server) -> ServerComparison:
        """Both servers on the same requests; texts are compared where they are greedy."""
        pairs = [
            (plain.answers[name], answer)
            for name, answer in self.answers.items()
            if name in plain.answers
        ]
        is_greedy = self.options.sampling.is_greedy
        return ServerComparison(
            baseline=plain.label,
            num_pairs=len(pairs),
            speedup=_speedup(pairs),
            differing=[here.id for there, here in pairs if here.text != there.text]
            if is_greedy
            else None,
        )


def _speedup(pairs: Sequence[tuple[MeasuredAnswer, MeasuredAnswer]]) -> Interval | None:
    """Tokens per second of a request, here over there, sums over the pairs (there, here)."""
    rows = [
        (b.num_tokens, b.seconds, a.num_tokens, a.seconds)
        for a, b in pairs
        if a.num_tokens and b.num_tokens
    ]
    if not rows:
        return None
    speedup = ratio_of_sums(*map(list, zip(*rows, strict=True)))
    return speedup if len(rows) >= MIN_PAIRS else Interval.unknown(speedup.value)


def _lukewarm(request: WorkloadRequest) -> WorkloadRequest:
    if request.messages:
        first, *others = request.messages
        return replace(
            request, messages=({**first, "content": WARMUP_PREFIX + first["content"]}, *others)
        )
    return replace(request, prompt=WARMUP_PREFIX + (request.prompt or ""))
