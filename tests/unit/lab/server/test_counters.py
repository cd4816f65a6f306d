"""Counters of every engine: what lies between two readings, and when they say nothing."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from outrider.errors import ServerError
from outrider.lab.server.counters import CounterWindow, difference, parse
from outrider.lab.server.server_result import positions
from outrider.lab.server.types import SpeculationCounts
from tests.unit.lab.server.fake_server import MODEL, Fake

STEPS = 4  # of a request of 13 tokens


def between(fake: Fake, requests: int = 2) -> CounterWindow:
    before = parse(fake.page(), MODEL)
    for _ in range(requests):
        fake.count(fake.num_tokens)
    return difference(before, parse(fake.page(), MODEL))


@pytest.mark.parametrize("engine", ["vllm", "outrider", "llamacpp"])
def test_counters_are_differences(engine: str) -> None:
    """What the server did before the run must not be in it."""
    window = between(Fake(engine=engine))
    assert window.num_generated == 26
    counts = window.speculation
    assert counts == SpeculationCounts(
        num_steps=2 * STEPS, num_draft_tokens=6 * STEPS, num_accepted_tokens=4 * STEPS, num_full_steps=0,
        accepted_per_position=[2 * STEPS, 2 * STEPS, 0],
    )  # fmt: skip
    assert counts is not None
    assert counts.tau == 3.0
    assert counts.draft_utilisation == pytest.approx(2 / 3)
    assert counts.alpha == pytest.approx(2 / 3)  # of three tested tokens of every step two were accepted
    assert [row.share for row in positions(counts)] == [1.0, 1.0, 0.0]
    assert counts.tau_formula == "1 + accepted / drafts"


def test_sglang_counts_verify_calls() -> None:
    """Its first token comes from the prompt's pass; with it tau would be 26 / 8."""
    window = between(Fake(engine="sglang"))
    counts = window.speculation
    assert counts == SpeculationCounts(num_steps=2 * STEPS, num_step_tokens=24)
    assert counts is not None
    assert counts.tau == 3.0
    assert counts.draft_utilisation is None
    assert counts.alpha is None
    assert "verify calls" in counts.tau_formula
    assert window.gauges == {"spec_accept_length": 2.75}
    assert any("gauges" in note for note in window.notes)


def test_tensorrt_llm_counts_tokens_but_no_steps() -> None:
    """Names as in tensorrt_llm/metrics/collector.py; without steps there is no tau, but for the server's own gauge."""

    def page(drafted: int, accepted: int, generated: int) -> str:
        return (
            f'trtllm_spec_decode_num_draft_tokens_total{{model_name="m"}} {drafted}\n'
            f'trtllm_spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}\n'
            f'trtllm_generation_tokens_total{{model_name="m"}} {generated}\n'
            'trtllm_spec_decode_acceptance_length{model_name="m"} 2.5\n'
        )

    window = difference(parse(page(100, 50, 90), "m"), parse(page(160, 80, 150), "m"))
    assert window.speculation == SpeculationCounts(num_draft_tokens=60, num_accepted_tokens=30)
    assert window.speculation is not None
    assert window.speculation.tau is None
    assert window.speculation.draft_utilisation == 0.5
    assert (window.num_generated, window.gauges) == (60, {"spec_decode_acceptance_length": 2.5})


def test_a_plain_server_says_so() -> None:
    window = between(Fake(speculates=False))
    assert window.speculation is None
    assert "no speculation counters" in window.notes[0]
    assert between(Fake(), requests=0).notes == ["the server counted no speculative step"]


def test_a_restart_in_between() -> None:
    fake = Fake()
    before = parse(fake.page())
    fake.steps, fake.generated = 3, 20
    window = difference(before, parse(fake.page()))
    assert window.speculation is None
    assert "restarted" in window.notes[0]


def test_counters_that_appear_with_their_first_event_began_at_nothing() -> None:
    """vLLM's positions and llama.cpp's do not exist before the first draft."""
    before = parse("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 5\n")
    fake = Fake(steps=2, drafted=6, accepted=4, positions=[2, 2, 0], generated=10)
    counts = difference(before, parse(fake.page())).speculation
    assert counts is not None
    assert (counts.num_steps, counts.accepted_per_position) == (2, [2, 2, 0])


def test_drafts_of_different_lengths_leave_tested_tokens_unknown() -> None:
    before = Fake(steps=0, drafted=0, accepted=0, positions=[0, 0, 0])
    after = Fake(steps=10, drafted=25, accepted=12, positions=[8, 4, 0])
    counts = difference(parse(before.page()), parse(after.page())).speculation
    assert counts is not None
    assert counts.num_full_steps is None
    assert counts.alpha is None
    assert counts.tau == 2.2


PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 4.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="b"} 100.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{le="+Inf",model_name="a"} NaN
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_engines_of_one_server_are_summed_and_other_models_are_not() -> None:
    assert parse(PAGE, "a").counters["spec_decode_num_drafts"] == 7
    assert parse(PAGE, "b").counters["spec_decode_num_drafts"] == 100
    assert parse(PAGE, "an alias").counters["spec_decode_num_drafts"] == 107
    assert parse(PAGE, "a").engine == "vllm"


def test_names_without_total() -> None:
    """vLLM's offline interface and early versions."""
    assert parse("vllm:spec_decode_num_drafts 5\n").counters == {"spec_decode_num_drafts": 5}


def test_pages_of_others() -> None:
    assert parse("").engine is None
    assert parse("python_gc_total 1\nacme:tokens 3\n").engine is None
    with pytest.raises(ServerError, match="Prometheus"):
        parse("<html>not here</html>")


def test_the_page_as_vllms_library_writes_it() -> None:
    """vLLM counts with prometheus_client, which adds `_total` and `_created` to what its source calls the counters."""
    registry = CollectorRegistry()
    drafts = Counter("vllm:spec_decode_num_drafts", "Drafts.", ["model_name", "engine"], registry=registry)
    positions = Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "By position.", ["model_name", "position"], registry=registry
    )
    Histogram("vllm:generation_tokens", "Of a request.", ["model_name"], registry=registry).labels("m").observe(5)
    drafts.labels("m", "0").inc(3)
    positions.labels("m", "1").inc(2)
    reading = parse(generate_latest(registry).decode(), "m")
    assert reading.counters["spec_decode_num_drafts"] == 3
    assert reading.positions == {1: 2}
