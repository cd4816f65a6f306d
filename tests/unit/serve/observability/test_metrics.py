"""The numbers on /metrics: each is what the engine reported, under the name that vLLM's dashboards
and our lab look for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.engine.observer import EngineSnapshot, Observers, StepReport
from outrider.engine.request import Finish, Request
from outrider.lab.server.counters import difference, parse
from outrider.sampling.params import SamplingParams
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.observability.metrics_totals import Histogram, ModelTotals
from outrider.serve.observability.selftest import Finding, SelfTest
from outrider.stats import DecodeStats, PartStats
from outrider.version import __version__

# of docs/usage/metrics (vLLM 0.32) what a server without LoRA, swapping and multi-modal input has
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "prompt_tokens_cached_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)  # fmt: skip
CONTROL = {
    "chosen": {0: 1, 3: 4},
    "by_rows": {
        2: {
            "tokens_per_s": {0: 10.0, 3: 25.0},
            "best_fixed": 3,
            "regret": 0.04,
            "chosen": {},
            "seconds": {},
        }
    },
}


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """What /metrics asks of one."""

    name = "m"
    context = 1024
    lossless = True
    config: dict[str, Any] = {  # noqa: RUF012
        "target": "/secret/path", "drafter": "draft-model", "num_draft_tokens": "auto:8", "verifier": "block",
        "dtype": "bfloat16", "device": "cpu", "runtime": "eager",
    }  # fmt: skip

    def __init__(self, snapshot: EngineSnapshot | None = None) -> None:
        self.now = snapshot or EngineSnapshot()

    def snapshot(self) -> EngineSnapshot:
        return self.now


def request(number: int = 0, prompt: int = 5) -> Request:
    return Request(
        id=f"cmpl-{number}", prompt=list(range(1, prompt + 1)), params=SamplingParams(max_tokens=8)
    )


def step(
    asked: list[int], drafted: list[int], accepted: list[int], emitted: list[int], **facts: Any
) -> StepReport:
    fields = {
        "rows": len(asked),
        "waiting": 0,
        "drafters": ["draft-model"] * len(asked),
        "parts": [{}] * len(asked),
        "kv_tokens": 0,
        "kv_capacity": 100,
        "seconds": {"draft": 0.1, "target": 0.3, "verify": 0.05, "other": 0.05},
        **facts,
    }
    fields.setdefault("rejected", [d > a for d, a in zip(drafted, accepted, strict=True)])
    return StepReport(asked=asked, drafted=drafted, accepted=accepted, emitted=emitted, **fields)


def finish(**facts: Any) -> Finish:
    stats = DecodeStats(
        emitted=9,
        steps=3,
        drafted=10,
        accepted=6,
        answers=1,
        first_tokens=4,
        ttft_s=0.5,
        decode_s=1.6,
    )
    fields = {
        "reason": "stop",
        "stats": stats,
        "seed": 1,
        "lossless": True,
        "drafter": "draft-model",
        "prompt_tokens": 5,
    }
    return Finish(**{**fields, **facts})


def samples(metrics: ServerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name without prefix, labels but model_name) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            found[sample.name.removeprefix("outrider:"), labels] = sample.value
    return found


def names(metrics: ServerMetrics) -> Iterator[str]:
    return (name for name, _ in samples(metrics))


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def one_step() -> tuple[ServerMetrics, ModelTotals]:
    """Three rows: two of four draft tokens kept, all three kept, a plain step."""
    metrics = ServerMetrics()
    totals = metrics.observer("m")
    totals.stepped(step([4, 3, 0], [4, 3, 0], [2, 3, 0], [3, 4, 1]))
    return metrics, totals


def test_step_is_counted_once_per_row_and_position() -> None:
    """Off-by-one positions, plain steps counted as drafts, rejections of whole drafts."""
    metrics, _ = one_step()
    drafter = {"drafter": "draft-model"}
    assert value(metrics, "generation_tokens_total") == 8
    assert value(metrics, "engine_steps_total") == 1
    assert value(metrics, "request_steps_total") == 3
    assert value(metrics, "spec_decode_num_drafts_total", **drafter) == 2
    assert value(metrics, "spec_decode_num_draft_tokens_total", **drafter) == 7
    assert value(metrics, "spec_decode_num_accepted_tokens_total", **drafter) == 5
    per = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per, position=str(p), **drafter) for p in range(3)] == [2, 2, 1]
    rejected = "spec_decode_num_rejected_tokens_per_pos_total"
    assert value(metrics, rejected, position="2", **drafter) == 1
    assert sum(v for (name, _), v in samples(metrics).items() if name == rejected) == 1
    assert value(metrics, "step_time_seconds_total", phase="target") == pytest.approx(0.3)
    assert value(metrics, "engine_step_seconds_sum") == pytest.approx(0.5)
    lengths = {
        le: value(metrics, "spec_decode_draft_length_bucket", le=le, **drafter)
        for le in ("0.0", "3.0", "4.0", "+Inf")
    }
    assert lengths == {"0.0": 1, "3.0": 2, "4.0": 3, "+Inf": 3}


def test_experts_of_passes_that_tell_are_summed() -> None:
    metrics = ServerMetrics()
    totals = metrics.observer("m")
    for experts in (12.5, None, 8.0):
        totals.stepped(step([4], [4], [2], [3], experts=experts))
    assert value(metrics, "engine_step_experts_total") == 20.5


def test_accepted_tokens_behind_the_end_of_a_text_do_not_count() -> None:
    """The verifier kept four, the text ended with the second: two went into it, and nothing was
    rejected."""
    metrics = ServerMetrics()
    metrics.observer("m").stepped(step([4], [4], [4], [2]))
    assert value(metrics, "spec_decode_num_accepted_tokens_total", drafter="draft-model") == 2
    assert not any(
        name == "spec_decode_num_rejected_tokens_per_pos_total" for name in names(metrics)
    )


def test_first_token_is_no_gap_between_tokens() -> None:
    """A row that joins gives a time to first token; the pause before it is no inter-token latency."""
    clock = Clock()
    totals = ModelTotals(clock)
    totals.prefilled(request(0), 0.1, 5)
    totals.stepped(step([0], [0], [0], [1]))
    clock.now = 0.02
    totals.prefilled(request(1), 0.1, 5)
    totals.stepped(step([0, 0], [0, 0], [0, 0], [1, 1]))
    clock.now = 0.05
    totals.stepped(step([0, 0], [0, 0], [0, 0], [1, 1]))
    assert sum(totals.token_gap_s.counts) == 3
    assert totals.token_gap_s.total == pytest.approx(0.02 + 2 * 0.03)
    clock.now = 100.0  # idle
    totals.prefilled(request(2), 0.1, 5)
    totals.stepped(step([0], [0], [0], [1]))
    assert sum(totals.token_gap_s.counts) == 3


def test_request_times_go_into_their_histograms() -> None:
    metrics = ServerMetrics()
    totals = metrics.observer("m")
    totals.admitted(request(), 0.25, 2)
    totals.prefilled(request(), 0.2, 3)
    totals.finished(request(), finish(prefill_s=0.2))
    for name, wanted in (
        ("time_to_first_token_seconds", 0.5),
        ("e2e_request_latency_seconds", 2.1),
        ("request_queue_time_seconds", 0.25),
        ("request_prefill_time_seconds", 0.2),
        ("request_decode_time_seconds", 1.6),
        ("request_time_per_output_token_seconds", 0.32),
        ("request_prompt_tokens", 5),
        ("request_generation_tokens", 9),
    ):
        assert value(metrics, f"{name}_count") == 1, name
        assert value(metrics, f"{name}_sum") == pytest.approx(wanted), name
    assert value(metrics, "prompt_tokens_total") == 5
    assert value(metrics, "prompt_tokens_cached_total") == 2
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert (
        value(
            metrics, "request_spec_decode_acceptance_rate_bucket", le="0.6", drafter="draft-model"
        )
        == 1
    )
    assert (
        value(
            metrics, "request_spec_decode_acceptance_rate_bucket", le="0.5", drafter="draft-model"
        )
        == 0
    )


def test_request_that_never_began_has_no_latencies() -> None:
    """A cancelled request in the queue would otherwise improve the time to first token with zeros."""
    metrics = ServerMetrics()
    metrics.observer("m").finished(request(), finish(reason="abort", stats=DecodeStats()))
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "time_to_first_token_seconds_count") == 0


def test_names_are_those_of_vllm_behind_our_prefix() -> None:
    metrics, totals = one_step()
    totals.finished(request(), finish())
    metrics.watch(Engine())
    assert set(VLLM) <= set(names(metrics))
    page = metrics.render()[0].decode()
    ours = [line for line in page.splitlines() if not line.startswith(("#", "process_", "python_"))]
    assert all(line.startswith("outrider:") for line in ours)


def test_gauges_are_those_of_the_engine_at_the_scrape() -> None:
    metrics = ServerMetrics()
    engine = Engine()
    metrics.watch(engine)
    engine.now = EngineSnapshot(
        running=3,
        waiting=7,
        prefilling=1,
        kv_tokens=25,
        kv_capacity=100,
        prefix_pages=1,
        prefix_capacity=4,
        prefix_queries=50,
        prefix_hits=20,
        preemptions=2,
        draining=True,
        failed="it broke",
        turn_age_s=1.5,
        control=CONTROL,
    )
    expected = {
        "num_requests_running": 4,
        "num_requests_waiting": 7,
        "num_requests_prefilling": 1,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 50,
        "prefix_cache_hits_total": 20,
        "num_preemptions_total": 2,
        "engine_up": 0,
        "engine_draining": 1,
        "kv_cache_capacity_tokens": 100,
        "engine_turn_age_seconds": 1.5,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    control = {
        "control_best_draft_length": 3,
        "control_predicted_tokens_per_second": 25.0,
        "control_predicted_plain_tokens_per_second": 10.0,
        "control_regret_ratio": 0.04,
    }
    assert {name: value(metrics, name, num_requests="2") for name in control} == control


def test_facts_have_no_paths_and_findings_are_named() -> None:
    """Folder names of a machine belong into no monitoring system."""
    metrics = ServerMetrics()
    metrics.watch(Engine())
    metrics.tested(
        "m", SelfTest([Finding("no-acceptance", "nothing is accepted", drafter="draft-model")])
    )
    metrics.answered("/v1/completions", 200)
    metrics.answered("/v1/completions", 200)
    page = metrics.render()[0].decode()
    assert "secret" not in page
    assert f'version="{__version__}"' in page
    labels = {"finding": "no-acceptance", "severity": "warning", "drafter": "draft-model"}
    assert value(metrics, "self_test_finding_info", **labels) == 1
    assert value(metrics, "http_responses_total", route="/v1/completions", status="200") == 2


def test_no_series_is_on_the_page_twice() -> None:
    """Two drafters with the same fault, one of them twice: a scraper that is strict takes nothing
    of a page with doubles."""
    metrics = ServerMetrics()
    found = [
        Finding("draft-unused", "nothing", drafter=name) for name in ("suffix", "eagle3", "eagle3")
    ]
    metrics.tested("m", SelfTest(found))
    lines = [
        line
        for line in metrics.render()[0].decode().splitlines()
        if "self_test_finding_info{" in line
    ]
    assert len(lines) == len(set(lines)) == 2


def test_parts_of_drafts_are_counted_alongside_the_whole() -> None:
    """Summed over parts they are the drafter's series; a drafter without parts has none."""
    metrics, totals = one_step()
    parts = [{"eagle3": PartStats(1, 3, 2), "ngram": PartStats(1, 1, 0)}, {}]
    for _ in range(2):
        totals.stepped(
            step([4, 2], [4, 2], [2, 0], [3, 1], drafters=["composite", "ngram"], parts=parts)
        )
    found = {
        (name, dict(labels)["part"]): number
        for (name, labels), number in samples(metrics).items()
        if "_per_part" in name and dict(labels)["drafter"] == "composite"
    }
    assert found == {
        ("spec_decode_num_drafts_per_part_total", "eagle3"): 2,
        ("spec_decode_num_drafts_per_part_total", "ngram"): 2,
        ("spec_decode_num_draft_tokens_per_part_total", "eagle3"): 6,
        ("spec_decode_num_draft_tokens_per_part_total", "ngram"): 2,
        ("spec_decode_num_accepted_tokens_per_part_total", "eagle3"): 4,
        ("spec_decode_num_accepted_tokens_per_part_total", "ngram"): 0,
    }
    assert value(metrics, "spec_decode_num_draft_tokens_total", drafter="composite") == 8
    assert sum("_per_part" in name for name in names(metrics)) == len(found)


def test_counters_of_a_part_have_its_name() -> None:
    metrics = ServerMetrics()
    counters = {
        "remote_draft_hits": 1.0,
        "a.remote_draft_hits": 2.0,
        "a.remote_draft_troubles/late": 3.0,
    }
    metrics.watch(Engine(EngineSnapshot(drafter=counters)))
    assert value(metrics, "remote_draft_hits_total") == 1
    assert value(metrics, "remote_draft_hits_total", part="a") == 2
    assert value(metrics, "remote_draft_troubles_total", part="a", reason="late") == 3


def test_lab_reads_our_page_as_it_reads_vllms() -> None:
    """`outrider bench URL` on our own server: steps, drafts and positions of the window, summed
    over drafters."""
    metrics, totals = one_step()
    metrics.watch(Engine(EngineSnapshot(prefix_queries=10, prefix_hits=4)))
    before = parse(metrics.render()[0].decode(), "m")
    assert before.engine == "outrider"
    totals.stepped(step([4, 2], [4, 2], [1, 0], [2, 1], drafters=["draft-model", "ngram"]))
    counts, _ = difference(before, parse(metrics.render()[0].decode(), "m"), 3)
    assert counts is not None
    assert (counts.num_steps, counts.num_draft_tokens, counts.num_accepted_tokens) == (2, 6, 1)
    assert counts.accepted_per_position == [1, 0, 0]


def test_histogram_bounds_are_inclusive_and_open_above() -> None:
    histogram = Histogram((1, 2))
    for number in (1, 1.5, 2, 3):
        histogram.add(number)
    assert histogram.counts == [1, 2, 1]
    histogram.add(5, times=4)
    assert histogram.counts == [1, 2, 5]
    assert histogram.total == 27.5


def test_a_scrape_sees_whole_steps() -> None:
    """Drafts without their accepted tokens would make impossible ratios. Every step here accepts
    all it drafts."""
    metrics = ServerMetrics()
    totals = metrics.observer("m")
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            totals.stepped(step([2] * 8, [2] * 8, [2] * 8, [3] * 8))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            found = samples(metrics)
            drafted = found.get(
                ("spec_decode_num_draft_tokens_total", (("drafter", "draft-model"),)), 0
            )
            accepted = found.get(
                ("spec_decode_num_accepted_tokens_total", (("drafter", "draft-model"),)), 0
            )
            assert drafted == accepted == 16 * found["engine_steps_total", ()]
    finally:
        over.set()
        thread.join()


class Broken(ModelTotals):
    """Fails with the first step."""

    def stepped(self, report: StepReport) -> None:
        raise ZeroDivisionError


def test_observer_that_fails_is_dropped_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error in a metric must never end somebody's request."""
    good = ModelTotals()
    late = ModelTotals()
    several = Observers([good, Broken(), late])
    several.stepped(step([1], [1], [1], [2]))
    several.stepped(step([1], [1], [1], [2]))
    assert (good.steps, late.steps) == (2, 2)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Broken" in caplog.text


def test_self_test_requests_can_be_kept_out() -> None:
    totals = ModelTotals()
    several = Observers([totals])
    with several.muted():
        several.stepped(step([1], [1], [1], [2]))
    several.stepped(step([1], [1], [1], [2]))
    assert totals.steps == 1
