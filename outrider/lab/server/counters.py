"""A server's own counters, read from its Prometheus page before and after: what it counted in
between.

Counters have no beginning and no end, so two readings make a window. They are the whole server's:
tokens that others had it generate meanwhile are in them, which shows by comparing what it generated
with what was received.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from outrider.errors import ServerError
from outrider.lab.bench.bench_result import SpeculationCounts
from outrider.lab.server.client import Client

GENERATED = {  # engine -> its counter of tokens
    "vllm": "generation_tokens",
    "sglang": "generation_tokens",
    "outrider": "generation_tokens",
    "llamacpp": "tokens_predicted",
}
DRAFTED = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
STEPS = {"sglang": "spec_verify_calls"}
USUAL_STEPS = "spec_decode_num_drafts"
READINGS = 8  # more, at most
OTHERS = 1.02  # times the tokens received: a server that generated more served somebody else too


@dataclass(frozen=True)
class Reading:
    """One look at the page. Names are without prefix and `_total`."""

    engine: str | None  # whose prefix the counters have
    counters: dict[str, float] = field(default_factory=dict)
    # draft position from 0 -> accepted there
    positions: dict[int, float] = field(default_factory=dict)

    @property
    def generated(self) -> float:
        """Tokens generated since the server started."""
        return self.counters.get(GENERATED.get(self.engine or "", ""), 0.0)

    def since(self, before: Reading, name: str) -> int:
        """The change of a counter; many appear with their first event, and stood at 0 before."""
        return round(self.counters.get(name, 0.0) - before.counters.get(name, 0.0))


def parse(page: str, model: str | None = None) -> Reading:
    """A reading of a page. Series of other models than `model` are left out where some are of it.

    Engines and replicas of one server are summed. Raises ServerError when the page is not in
    Prometheus' format.
    """
    series: dict[tuple[str, str], list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                engine, mark, name = sample.name.partition(":")
                if mark and engine in GENERATED and math.isfinite(sample.value):
                    series[engine, name.removesuffix("_total")].append(
                        (sample.labels, sample.value)
                    )
    except (ValueError, IndexError, KeyError) as error:
        raise ServerError(f"/metrics is not in Prometheus' text format: {error}") from error
    owner = next((engine for engine, _ in series), None)
    counters: dict[str, float] = {}
    positions: dict[int, float] = defaultdict(float)
    for (engine, name), samples in series.items():
        wanted = [
            sample
            for sample in samples
            if model is not None and sample[0].get("model_name") == model
        ] or samples
        if engine == owner:
            counters[name] = sum(value for _, value in wanted)
        for labels, value in wanted if name == PER_POSITION else ():
            positions[int(labels["position"])] += value
    return Reading(owner, counters, dict(positions))


async def read(client: Client, model: str) -> Reading:
    """The counters now. Raises ServerError where the server shows no known ones."""
    try:
        reading = parse((await client.get("/metrics")).text, model)
    except ServerError as error:
        hint = "llama-server shows its counters with --metrics, SGLang with --enable-metrics"
        raise ServerError(f"no counters: {error}; {hint}") from error
    if reading.engine is None:
        raise ServerError(
            "the server's /metrics has no counters of vLLM, SGLang, llama.cpp or Outrider"
        )
    return reading


async def read_settled(
    client: Client, model: str, pause_s: float, earlier: Reading, received: int
) -> Reading:
    """The reading after `received` tokens have come since `earlier`.

    Some engines count a request after its last byte was sent, so it is waited for, READINGS pauses
    at most, until they have counted as much and stand still. Raises ServerError.
    """
    last = await read(client, model)
    for _ in range(READINGS):
        await asyncio.sleep(pause_s)
        now = await read(client, model)
        if now == last and now.generated - earlier.generated >= received:
            return now
        last = now
    return last


def difference(
    before: Reading, after: Reading, received: int
) -> tuple[SpeculationCounts | None, list[str]]:
    """(what was counted between two readings of one server, notes about it); `received`: tokens of
    this run."""
    engine = after.engine
    steps_name = STEPS.get(engine or "", USUAL_STEPS)
    if engine != before.engine or after.generated < before.generated:
        return None, [
            "the server's counters went back: it was restarted meanwhile, and they are worthless"
        ]
    if steps_name not in after.counters:
        return None, [
            "the server has no speculation counters: it does not speculate, or does not show that it does"
        ]
    steps = after.since(before, steps_name)
    generated = round(after.generated - before.generated)
    notes = [] if steps else ["the server counted no speculative step"]
    if 0 < OTHERS * received < generated:
        notes.append(
            f"the server generated {generated} tokens meanwhile, of which this run received "
            f"{received}: its counters also hold other traffic, or requests that failed"
        )
    # a request's first token comes from its prompt's pass, not from a verify call
    if engine == "sglang":
        return SpeculationCounts(
            num_steps=steps, num_tokens=generated - after.since(before, "num_requests")
        ), notes
    accepted = after.since(before, ACCEPTED)
    counts = SpeculationCounts(
        num_steps=steps,
        num_tokens=steps + accepted,
        num_draft_tokens=after.since(before, DRAFTED),
        num_accepted_tokens=accepted,
        accepted_per_position=[
            round(after.positions[index] - before.positions.get(index, 0))
            for index in sorted(after.positions)
        ],
    )
    return counts, notes
