"""The numbers of an engine under their public names: vLLM's after the prefix `outrider:`, and our
own.

vLLM (0.32, vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py) labels by model_name; ours
have the drafter alongside it where that matters: summed over drafters they are vLLM's. Counters appear
on the page with `_total` after their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from outrider.engine.observer import EngineSnapshot
from outrider.serve.observability.metrics_totals import DrafterTotals, Histogram, ModelTotals

PREFIX = "outrider:"
MODEL = ["model_name"]
DRAFTER = ["model_name", "drafter"]

# ModelTotals' field -> (name, what it is)
COUNTERS = {
    "prompt_tokens": (
        "prompt_tokens",
        "Prompt tokens of requests that were read, those found in the prefix cache included.",
    ),
    "cached_prompt_tokens": (
        "prompt_tokens_cached",
        "Prompt tokens that were found in the prefix cache.",
    ),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "steps": (
        "engine_steps",
        "Steps of the batch: target passes of all running requests together.",
    ),
    "experts": (
        "engine_step_experts",
        "Distinct experts that target passes read, the mean of the layers; 0 where it is not known.",
    ),
    "row_steps": (
        "request_steps",
        "Steps counted once per running request; generation_tokens / request_steps = tau.",
    ),
}
HISTOGRAMS = {
    "ttft_s": (
        "time_to_first_token_seconds",
        "From submission to the first token, waiting included.",
    ),
    "token_gap_s": (
        "inter_token_latency_seconds",
        "Between two steps of a running request; a step may bring several tokens.",
    ),
    "tpot_s": (
        "request_time_per_output_token_seconds",
        "Per request: seconds per token after those of the first step.",
    ),
    "e2e_s": ("e2e_request_latency_seconds", "From submission to the last token."),
    "queue_s": (
        "request_queue_time_seconds",
        "From submission until a request's prompt begins to be read.",
    ),
    "prefill_s": ("request_prefill_time_seconds", "Reading a request's prompt."),
    "decode_s": ("request_decode_time_seconds", "From a request's first token to its last."),
    "request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens per request."),
    "request_generation_tokens": ("request_generation_tokens", "Generated tokens per request."),
    "step_s": ("engine_step_seconds", "One step of the batch."),
}
# DrafterTotals' field -> the same
DRAFT_COUNTERS = {
    "drafts": (
        "spec_decode_num_drafts",
        "Drafts: a request's steps with at least one draft token.",
    ),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens submitted to the target."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that went into the text."),
}
DRAFT_POSITIONS = {
    "accepted_at": (
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted at this position, from 0.",
    ),
    "rejected_at": (
        "spec_decode_num_rejected_tokens_per_pos",
        "Drafts of which this position, from 0, was the first that the verifier turned down.",
    ),
}
# PartStats' field -> the same, of drafts that several parts drafted
PART_COUNTERS = {
    "steps": (
        "spec_decode_num_drafts_per_part",
        "Drafts with at least one token of this part: of a composite's drafter, or forced by a grammar.",
    ),
    "drafted": (
        "spec_decode_num_draft_tokens_per_part",
        "Draft tokens submitted, by part; a token that several parts drafted counts for the first.",
    ),
    "accepted": (
        "spec_decode_num_accepted_tokens_per_part",
        "Draft tokens that went into the text, by part.",
    ),
}
DRAFT_HISTOGRAMS = {
    "asked": (
        "spec_decode_draft_length",
        "Draft tokens the control chose, per request and step; 0 is a plain step.",
    ),
    "request_acceptance": (
        "request_spec_decode_acceptance_rate",
        "Per request: accepted / drafted.",
    ),
}
# EngineSnapshot, at the time of the scrape
GAUGES = {
    "num_requests_running": "Requests in execution: being decoded or having their prompt read.",
    "num_requests_waiting": "Requests in the queue.",
    "num_requests_prefilling": "Requests whose prompt is being read.",
    "kv_cache_usage_perc": "Share of the memory for keys and values in use, 0 to 1.",
    "kv_cache_capacity_tokens": "Positions there is memory for.",
    "prefix_cache_usage_perc": "Share of the prefix cache's pages in use, 0 to 1.",
    "engine_up": "1 while the engine works, 0 after its thread died.",
    "engine_draining": "1 while the engine takes nothing new.",
    "engine_turn_age_seconds": "Seconds since the engine's loop came round; 0 while it has nothing to do.",
}
SNAPSHOT_COUNTERS = {
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Requests that had to leave the batch for a while."),
}
# of EngineSnapshot.drafter: drafters' own counters; with a reason where the name has one after a
# slash, with a part where it has one before a point
OF_DRAFTERS = {
    "remote_draft_hits": "Drafts of a draft service that were at hand when a step began, per request and step.",
    "remote_draft_waits": "Drafts of a draft service that a step waited for.",
    "remote_draft_misses": "Drafts that were wanted of a draft service and did not come in time.",
    "remote_draft_requests": "Requests to a draft service for nodes.",
    "remote_draft_nodes": "Draft nodes that a draft service sent.",
    "remote_draft_wasted_nodes": "Of those, nodes that were never proposed.",
    "remote_draft_round_trips": "Requests to a draft service that were answered.",
    "remote_draft_round_trip_seconds": "Seconds from these requests to the first nodes for them.",
    "remote_draft_wait_seconds": "Seconds that steps waited for a draft service.",
}
OF_DRAFTERS_BY_REASON = {
    "remote_draft_troubles": "What went wrong with a draft service, by reason; decoding continues without its drafts.",
}
# of `Goodput.summary()`, per number of running requests
CONTROL = {
    "control_best_draft_length": "Draft length with the highest predicted goodput.",
    "control_predicted_tokens_per_second": "Predicted goodput of that length.",
    "control_predicted_plain_tokens_per_second": "Predicted goodput without drafting.",
    "control_regret_ratio": "1 - goodput of the lengths that were chosen / goodput of the best single length, as predicted now.",
}


def of_totals(models: Mapping[str, ModelTotals]) -> Iterator[Metric]:
    """Families of what was counted. Each model is read under its lock, all at once."""
    families: dict[str, Any] = {}
    for field, (name, text) in COUNTERS.items():
        families[field] = CounterMetricFamily(PREFIX + name, text, labels=MODEL)
    for field, (name, text) in HISTOGRAMS.items():
        families[field] = HistogramMetricFamily(PREFIX + name, text, labels=MODEL)
    for field, (name, text) in DRAFT_COUNTERS.items():
        families[field] = CounterMetricFamily(PREFIX + name, text, labels=DRAFTER)
    for field, (name, text) in DRAFT_POSITIONS.items():
        families[field] = CounterMetricFamily(PREFIX + name, text, labels=[*DRAFTER, "position"])
    for name, text in PART_COUNTERS.values():
        families[name] = CounterMetricFamily(PREFIX + name, text, labels=[*DRAFTER, "part"])
    for field, (name, text) in DRAFT_HISTOGRAMS.items():
        families[field] = HistogramMetricFamily(PREFIX + name, text, labels=DRAFTER)
    families["finished_by"] = CounterMetricFamily(
        PREFIX + "request_success",
        "Requests that ended, by reason; vLLM's name.",
        labels=[*MODEL, "finished_reason"],
    )
    families["phase_s"] = CounterMetricFamily(
        PREFIX + "step_time_seconds",
        "Seconds of steps, by what they went into.",
        labels=[*MODEL, "phase"],
    )
    for model, totals in models.items():
        with totals.lock:
            _add(families, model, totals)
    yield from families.values()


def _add(families: dict[str, Any], model: str, totals: ModelTotals) -> None:
    for field in COUNTERS:
        families[field].add_metric([model], getattr(totals, field))
    for field in HISTOGRAMS:
        _add_histogram(families[field], [model], getattr(totals, field))
    for reason, count in totals.finished_by.items():
        families["finished_by"].add_metric([model, reason], count)
    for phase, seconds in totals.phase_s.items():
        families["phase_s"].add_metric([model, phase], seconds)
    for name, drafter in totals.by_drafter.items():
        _add_drafter(families, [model, name], drafter)


def _add_drafter(families: dict[str, Any], labels: list[str], drafter: DrafterTotals) -> None:
    for field in DRAFT_COUNTERS:
        families[field].add_metric(labels, getattr(drafter, field))
    for field in DRAFT_POSITIONS:
        for position, count in enumerate(getattr(drafter, field)):
            families[field].add_metric([*labels, str(position)], count)
    for part, counts in drafter.parts.items():
        for field, (name, _) in PART_COUNTERS.items():
            families[name].add_metric([*labels, part], getattr(counts, field))
    for field in DRAFT_HISTOGRAMS:
        _add_histogram(families[field], labels, getattr(drafter, field))


def _add_histogram(family: Any, labels: list[str], histogram: Histogram) -> None:
    """Prometheus' buckets are cumulative."""
    buckets = []
    seen = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        buckets.append((floatToGoString(bound), seen))
    family.add_metric(labels, buckets, sum_value=histogram.total)


def of_snapshots(snapshots: Mapping[str, EngineSnapshot]) -> Iterator[Metric]:
    """Families of what the engines are doing at this moment."""
    gauges = {
        name: GaugeMetricFamily(PREFIX + name, text, labels=MODEL) for name, text in GAUGES.items()
    }
    counters = {
        field: CounterMetricFamily(PREFIX + name, text, labels=MODEL)
        for field, (name, text) in SNAPSHOT_COUNTERS.items()
    }
    control = {
        name: GaugeMetricFamily(PREFIX + name, text, labels=[*MODEL, "num_requests"])
        for name, text in CONTROL.items()
    }
    drafters = {
        name: CounterMetricFamily(PREFIX + name, text, labels=MODEL)
        for name, text in OF_DRAFTERS.items()
    }
    drafters |= {
        name: CounterMetricFamily(PREFIX + name, text, labels=[*MODEL, "reason"])
        for name, text in OF_DRAFTERS_BY_REASON.items()
    }
    for model, snapshot in snapshots.items():
        for name, value in snapshot.drafter.items():
            path, _, reason = name.partition("/")
            part, _, counter = path.rpartition(".")
            if counter in drafters:
                labels = {"model_name": model, "part": part, "reason": reason}
                drafters[counter].add_sample(
                    f"{PREFIX}{counter}_total",
                    {label: text for label, text in labels.items() if text},
                    value,
                )
        for name, value in _gauges(snapshot).items():
            gauges[name].add_metric([model], value)
        for field, family in counters.items():
            family.add_metric([model], getattr(snapshot, field))
        for rows, name, value in _control(snapshot.control):
            control[name].add_metric([model, rows], value)
    yield from [
        *gauges.values(),
        *counters.values(),
        *control.values(),
        *(drafter for drafter in drafters.values() if drafter.samples),
    ]


def _gauges(now: EngineSnapshot) -> dict[str, float]:
    return {
        "num_requests_running": now.running + now.prefilling,
        "num_requests_waiting": now.waiting,
        "num_requests_prefilling": now.prefilling,
        "kv_cache_usage_perc": now.kv_tokens / now.kv_capacity if now.kv_capacity else 0.0,
        "kv_cache_capacity_tokens": now.kv_capacity,
        "prefix_cache_usage_perc": now.prefix_pages / now.prefix_capacity
        if now.prefix_capacity
        else 0.0,
        "engine_up": float(now.failed is None),
        "engine_draining": float(now.draining),
        "engine_turn_age_seconds": now.turn_age_s,
    }


def _control(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(number of requests, name, value); nothing for a fixed length, which predicts nothing."""
    for rows, known in summary.get("by_rows", {}).items():
        rates: dict[int, float] = known["tokens_per_s"]
        yield str(rows), "control_best_draft_length", known["best_fixed"]
        yield str(rows), "control_predicted_tokens_per_second", rates[known["best_fixed"]]
        yield str(rows), "control_predicted_plain_tokens_per_second", rates[0]
        yield str(rows), "control_regret_ratio", known["regret"]


def facts(name: str, text: str, rows: Iterable[Mapping[str, str]]) -> GaugeMetricFamily:
    """Facts as labels of gauges that are 1 (as vLLM does in cache_config_info); all rows have the
    same labels."""
    rows = list(rows)
    family = GaugeMetricFamily(PREFIX + name, text, labels=list(rows[0]) if rows else [])
    for row in rows:
        family.add_metric(list(row.values()), 1)
    return family
