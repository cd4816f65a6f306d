"""A server's own counters, read from its Prometheus page before and after: what it counted in between.

    vllm:, outrider:, llamacpp:   spec_decode_num_drafts, _num_draft_tokens, _num_accepted_tokens, and the last per position
    trtllm_                       spec_decode_num_draft_tokens, _num_accepted_tokens; no steps, the acceptance length as a gauge
                                  (tensorrt_llm/metrics/collector.py; by reading, not against a server)
    sglang:                       spec_verify_calls, generation_tokens, num_requests; acceptance only as gauges

Counters have no beginning and no end, so two readings make a window; gauges are running averages of the server's own choosing,
reach back before any window, and are passed on as they are. Counters are the whole server's: tokens that others had it
generate meanwhile are in them, which shows by comparing what it generated with what was received. The page is parsed by
prometheus_client, the format's own library.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from outrider.errors import ServerError
from outrider.lab.result import Record
from outrider.lab.server.client import Client
from outrider.lab.server.types import SpeculationCounts

GENERATED = {
    "vllm": "generation_tokens", "sglang": "generation_tokens", "outrider": "generation_tokens", "llamacpp": "tokens_predicted",
    "trtllm": "generation_tokens",
}  # fmt: skip
STEPS, DRAFTED, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
SGLANG_STEPS, SGLANG_REQUESTS = "spec_verify_calls", "num_requests"
CACHE_ASKED, CACHE_FOUND = "prefix_cache_queries", "prefix_cache_hits"  # vLLM: prompt tokens looked up, and found
GAUGES = ("spec_accept_length", "spec_accept_rate", "spec_decode_acceptance_length")
SWITCHES = {
    "llamacpp": "llama-server shows its counters with --metrics",
    "sglang": "SGLang shows its counters with --enable-metrics",
}
READINGS = 8  # more, at most
PAGES = ("/metrics", "/prometheus/metrics")


@dataclass(frozen=True)
class Reading:
    """One look at the page. Names are without prefix and `_total`."""

    engine: str | None  # whose prefix was found
    counters: dict[str, float] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)  # draft position from 0 -> accepted there
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def generated(self) -> float | None:
        """Tokens generated since the server started."""
        return self.counters.get(GENERATED[self.engine]) if self.engine else None


class CounterWindow(Record):
    """What happened between two readings."""

    speculation: SpeculationCounts | None = None
    num_generated: int | None = None
    num_prompt_tokens: int | None = None  # that were looked up in the prefix cache
    num_cached_tokens: int | None = None  # of them found there
    gauges: dict[str, float] = Field(default_factory=dict)  # as they stood at the end
    notes: list[str] = Field(default_factory=list)


def parse(page: str, model: str | None = None) -> Reading:
    """A reading of a page. Series of other models than `model` are left out where some are of it; engines and replicas of one
    server are summed. Raises ServerError when the page is not in Prometheus' format."""
    series: dict[tuple[str, str], list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                engine, mark, name = sample.name.partition("_" if sample.name.startswith("trtllm_") else ":")
                if mark and engine in GENERATED and math.isfinite(sample.value):
                    series[engine, name.removesuffix("_total")].append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise ServerError(f"/metrics is not in Prometheus' text format: {error}") from error
    found = next((engine for engine in GENERATED if any(owner == engine for owner, _ in series)), None)
    wanted = {name: _of_model(samples, model) for (engine, name), samples in series.items() if engine == found}
    positions: dict[int, float] = defaultdict(float)
    for labels, value in wanted.pop(PER_POSITION, []):
        if labels.get("position", "").isdigit():
            positions[int(labels["position"])] += value
    sums = {name: sum(value for _, value in samples) for name, samples in wanted.items()}
    averages = {name: {value for _, value in wanted.get(name, [])} for name in GAUGES}
    gauges = {name: values.pop() for name, values in averages.items() if len(values) == 1}  # of several replicas: no sum of means
    return Reading(found, sums, dict(positions), gauges)


async def read(client: Client, model: str | None, engine: str | None = None) -> tuple[Reading | None, str]:
    """(reading, why there is none). TensorRT-LLM's /metrics is JSON, and its Prometheus page lies elsewhere."""
    why = ""
    for path in PAGES:
        try:
            response = await client.get(path)
            if response.status_code == 200:
                return parse(response.text, model), ""
        except ServerError as error:
            why = why or str(error)
            continue
        hint = f"; {SWITCHES[engine]}" if engine in SWITCHES else ""
        return None, why or f"the server shows no counters ({path}: HTTP {response.status_code}{hint})"
    return None, why


async def read_settled(client: Client, model: str | None, pause_s: float, earlier: Reading, received: int) -> Reading | None:
    """The reading after `received` tokens have come since `earlier`: some engines count a request after its last byte was sent,
    so it is waited for, READINGS pauses at most, until they have counted as much and stand still."""
    last, _ = await read(client, model)
    for _ in range(READINGS):
        await asyncio.sleep(pause_s)
        now, _ = await read(client, model)
        if now is None:
            return last
        counted = received if now.generated is None else now.generated - (earlier.generated or 0)
        if now == last and counted >= received:
            return now
        last = now
    return last


def difference(before: Reading, after: Reading) -> CounterWindow:
    """What was counted between two readings of one server."""
    went_back = [name for name, value in before.counters.items() if after.counters.get(name, value) < value and _counts(name)]
    if went_back or before.engine != after.engine:
        return CounterWindow(notes=["the server's counters went back: it was restarted meanwhile, and they are worthless"])
    generated = None if before.generated is None or after.generated is None else round(after.generated - before.generated)
    counts = _sglang(before, after, generated) if after.engine == "sglang" else _vllm(before, after)
    notes = []
    if counts is None:
        notes.append("the server has no speculation counters: it does not speculate, or does not show that it does")
    elif counts.num_steps == 0:
        notes.append("the server counted no speculative step")
    if after.gauges:
        notes.append("gauges are the server's running averages: they reach back before this level and cannot be cut to it")
    asked, cached = (_change(before, after, name) for name in (CACHE_ASKED, CACHE_FOUND))
    return CounterWindow(
        speculation=counts, num_generated=generated, num_prompt_tokens=asked, num_cached_tokens=cached, gauges=after.gauges,
        notes=notes,
    )  # fmt: skip


def _vllm(before: Reading, after: Reading) -> SpeculationCounts | None:
    if STEPS not in after.counters and DRAFTED not in after.counters:
        return None
    steps, drafted, accepted = (_change(before, after, name) for name in (STEPS, DRAFTED, ACCEPTED))
    length = max(after.positions, default=-1) + 1
    positions = [round(after.positions.get(i, 0) - before.positions.get(i, 0)) for i in range(length)]
    # Every draft was a chain of the same length, so those accepted at the last position were kept whole; else it is not known.
    whole = positions[-1] if positions and steps and drafted == steps * length else None
    return SpeculationCounts(
        num_steps=steps, num_draft_tokens=drafted, num_accepted_tokens=accepted, num_full_steps=whole,
        accepted_per_position=positions,
    )  # fmt: skip


def _sglang(before: Reading, after: Reading, generated: int | None) -> SpeculationCounts | None:
    """SGLang counts verify calls and tokens; a request's first token comes from its prompt's pass, not from a verify call."""
    steps, requests = (_change(before, after, name) for name in (SGLANG_STEPS, SGLANG_REQUESTS))
    if steps is None:
        return None
    tokens = None if generated is None or requests is None else generated - requests
    return SpeculationCounts(num_steps=steps, num_step_tokens=tokens)


def _change(before: Reading, after: Reading, name: str) -> int | None:
    """A counter that was not there before stood at 0: many appear with their first event."""
    return round(after.counters[name] - before.counters.get(name, 0)) if name in after.counters else None


def _counts(name: str) -> bool:
    """Whether a name is one of the counters that are used here; gauges may go back."""
    return name in (STEPS, DRAFTED, ACCEPTED, SGLANG_STEPS, SGLANG_REQUESTS, *GENERATED.values())


def _of_model(samples: list[tuple[dict[str, str], float]], model: str | None) -> list[tuple[dict[str, str], float]]:
    return [sample for sample in samples if model is not None and sample[0].get("model_name") == model] or samples
