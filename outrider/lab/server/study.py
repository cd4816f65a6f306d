"""Whole questions about running servers, loaded with prompts: `study` reads counters and clocks for `explain` and `tune`,
`bench_servers` compares what a client sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from outrider.errors import CapabilityError
from outrider.lab.bench.bench_result import BenchResult, WorkloadInfo
from outrider.lab.progress import Progress
from outrider.lab.server.client import Client
from outrider.lab.server.counters import CACHE_ASKED, CACHE_FOUND, Reading, difference, read
from outrider.lab.server.discover import discover
from outrider.lab.server.measure import measure_servers
from outrider.lab.server.options import LoadOptions, ServerEndpoint
from outrider.lab.server.server_result import LevelAdvice, ServerResult, Standing, advise, findings, schedule
from outrider.lab.server.types import ServerMeasurement, SpeculationCounts
from outrider.lab.workload.types import Workload

Question = Literal["explain", "tune"]
RUNNING, WAITING = ("num_requests_running", "num_running_reqs"), ("num_requests_waiting", "num_queue_reqs")
DIFFERENT = 0.15  # of the tokens per pass, between two loads
UNKNOWN = {
    "explain": [
        "Why a draft token was rejected (luck, a filter, a drafter that disagrees, a draft too short) needs both models' "
        "distributions: outrider explain FOLDER_OR_HUB_ID.",
        "Which texts and positions lose drafts: counters have no texts.",
    ],
    "tune": [
        "Longer drafts than the server makes, and other drafters: start it otherwise and ask again, or outrider tune "
        "FOLDER_OR_HUB_ID.",
    ],
}


def study(
    question: Question, endpoints: Mapping[str, ServerEndpoint], workload: Workload, options: LoadOptions, *, prompts: int,
    progress: Progress,
) -> ServerResult:  # fmt: skip
    """The last endpoint is asked about, one before it is the plain server. Raises what `measure_servers` raises."""
    standing = asyncio.run(_standing(list(endpoints.values())[-1], options.timeout_s))
    facts = _measured(endpoints, workload, options, prompts, progress)
    found = facts["servers"]
    _check_counters(question, found)
    plain = found[0].levels if len(found) > 1 else [None] * len(found[-1].levels)
    advice = [advise(level, other) for level, other in zip(found[-1].levels, plain, strict=True)] if question == "tune" else []
    return ServerResult(
        question=question, standing=standing, advice=advice, table=schedule(advice),
        findings=list(_explained(found[-1]) if question == "explain" else _tuned(advice)), unknown=UNKNOWN[question],
        workload=workload.name, **facts,
    )  # fmt: skip


def _check_counters(question: Question, servers: Sequence[ServerMeasurement]) -> None:
    """Raises CapabilityError where counters say nothing about drafts, and no second server's clock does."""
    asked = servers[-1]
    if any(level.speculation is not None for level in asked.levels) or (question == "tune" and len(servers) > 1):
        return
    why = "; ".join(dict.fromkeys([*asked.server.notes, *(note for level in asked.levels for note in level.notes)]))
    raise CapabilityError(
        f"the server at {asked.url} has no counters of its drafts{f' ({why})' if why else ''}: "
        f"{question} has nothing to read; 'outrider bench URL --baseline-url PLAIN' measures what a client sees"
    )


async def _standing(endpoint: ServerEndpoint, timeout_s: float) -> Standing | None:
    async with Client(endpoint, timeout_s=timeout_s) as client:
        info = await discover(client)
        reading = (await read(client, info.model))[0] if info.metrics else None
    return None if reading is None else standing(reading)


def standing(reading: Reading) -> Standing:
    """All that was counted since the server started, as a window from zero."""
    window, counters = difference(Reading(reading.engine), reading), reading.counters
    asked = counters.get(CACHE_ASKED)
    return Standing(
        speculation=window.speculation, num_generated=window.num_generated,
        running=_first(counters, RUNNING), waiting=_first(counters, WAITING),
        cache_hits=counters.get(CACHE_FOUND, 0.0) / asked if asked else None,
    )  # fmt: skip


def _first(counters: Mapping[str, float], names: Sequence[str]) -> float | None:
    return next((counters[name] for name in names if name in counters), None)


def _explained(server: ServerMeasurement) -> Iterator[str]:
    """Advice in words: what the drafts are worth at all levels together, then what the load changes."""
    counted = [level.speculation for level in server.levels if level.speculation is not None]
    total = counted[0]
    for more in counted[1:]:
        total = total + more
    yield from findings(total)
    taus = [(level.level.label, level.speculation.tau) for level in server.levels if level.speculation and level.speculation.tau]
    if len(taus) > 1:
        low, high = min(taus, key=lambda one: one[1]), max(taus, key=lambda one: one[1])
        if high[1] > low[1] * (1 + DIFFERENT):
            yield (
                f"Passes emit {high[1]:.2f} tokens at {high[0]}, {low[1]:.2f} at {low[0]}: acceptance does not depend on load, "
                "so the server drafts otherwise there."
            )
    lengths = [(level.level.label, _length(level.speculation)) for level in server.levels if level.speculation]
    if len({round(length, 1) for _, length in lengths if length is not None}) > 1:
        yield "Draft tokens a pass: " + ", ".join(f"{length:.1f} at {label}" for label, length in lengths if length) + "."


def _length(counts: SpeculationCounts) -> float | None:
    return counts.num_draft_tokens / counts.num_steps if counts.num_draft_tokens and counts.num_steps else None


def _tuned(advice: Sequence[LevelAdvice]) -> Iterator[str]:
    for one in advice:
        label = one.level.label
        if one.best is None:
            measured = "" if one.measured is None else f" As it drafts now it is {one.measured:.2f}x plain decoding."
            yield f"{label}: how many draft tokens pay is unknown. Missing: {one.why_not}.{measured}"
        elif one.best == 0:
            yield f"{label}: do not speculate; the best length would give {max(one.forecast):.2f}x."
        else:
            yield (
                f"{label}: {one.best} draft tokens, {one.forecast[one.best - 1]:.2f}x plain decoding by forecast; now "
                f"{one.num_draft_tokens:.1f} a pass and {one.measured:.2f}x, measured."
            )


def bench_servers(
    endpoints: Mapping[str, ServerEndpoint], workload: Workload, options: LoadOptions, *, prompts: int, progress: Progress
) -> BenchResult:
    """`prompts`: of each task. Raises what `measure_servers` raises."""
    return BenchResult(workload=WorkloadInfo.of(workload), **_measured(endpoints, workload, options, prompts, progress))


def _measured(
    endpoints: Mapping[str, ServerEndpoint], workload: Workload, options: LoadOptions, prompts: int, progress: Progress
) -> dict[str, Any]:
    """The servers, and what every result says of them."""
    found = measure_servers(endpoints, workload.firsts(prompts), options, progress=progress)
    return {
        "servers": found, "settings": {**asdict(options), "prompts": prompts},
        "seconds": sum(level.busy_s for one in found for level in one.levels),
        "interrupted": any(one.interrupted for one in found),
    }  # fmt: skip
