"""Counters of every engine: what lies between two readings, and when they say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from outrider.errors import ServerError
from outrider.lab.bench.bench_result import SpeculationCounts
from outrider.lab.server.counters import Reading, difference, parse
from tests.unit.lab.server.fake_server import MODEL, Fake

STEPS = 4  # of a request of 13 tokens


def between(fake: Fake, requests: int = 2) -> tuple[SpeculationCounts | None, list[str]]:
    before = parse(fake.page(), MODEL)
    for _ in range(requests):
        fake.count(fake.num_tokens)
    return difference(before, parse(fake.page(), MODEL), requests * fake.num_tokens)


@pytest.mark.parametrize("engine", ["vllm", "outrider", "llamacpp"])
def test_counters_are_differences(engine: str) -> None:
    """What the server did before the run must not be in it."""
    counts, notes = between(Fake(engine=engine))
    assert counts == SpeculationCounts(
        num_steps=2 * STEPS,
        num_tokens=6 * STEPS,
        num_draft_tokens=6 * STEPS,
        num_accepted_tokens=4 * STEPS,
        accepted_per_position=[2 * STEPS, 2 * STEPS, 0],
    )
    assert counts is not None
    assert counts.tau == 3.0
    assert counts.draft_utilisation == pytest.approx(2 / 3)
    assert notes == []


def test_sglang_counts_verify_calls() -> None:
    """Its first token comes from the prompt's pass; with it tau would be 26 / 8."""
    counts, _ = between(Fake(engine="sglang"))
    assert counts == SpeculationCounts(num_steps=2 * STEPS, num_tokens=24)
    assert counts is not None
    assert counts.tau == 3.0
    assert counts.draft_utilisation is None


def test_a_plain_server_says_so() -> None:
    counts, notes = between(Fake(speculates=False))
    assert counts is None
    assert "no speculation counters" in notes[0]
    assert between(Fake(), requests=0)[1] == ["the server counted no speculative step"]


def test_a_restart_in_between() -> None:
    fake = Fake()
    before = parse(fake.page())
    fake.steps = 3
    fake.generated = 20
    counts, notes = difference(before, parse(fake.page()), 0)
    assert counts is None
    assert "restarted" in notes[0]


def test_other_traffic_is_noticed() -> None:
    fake = Fake(foreign_tokens=20)
    assert any("other traffic" in note for note in between(fake)[1])


def test_counters_that_appear_with_their_first_event_began_at_nothing() -> None:
    """vLLM's positions and llama.cpp's do not exist before the first draft."""
    before = parse("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 5\n")
    fake = Fake(steps=2, drafted=6, accepted=4, positions=[2, 2, 0], generated=10)
    counts, _ = difference(before, parse(fake.page()), 5)
    assert counts is not None
    assert (counts.num_steps, counts.accepted_per_position) == (2, [2, 2, 0])


FIXTURES = Path(__file__).parent / "fixtures"


def recorded(name: str) -> Reading:
    """/metrics of vLLM 0.32.0 around a run of our own with n-gram drafts of 3, cut down;
    `vllm_plain` without speculation."""
    return parse((FIXTURES / f"{name}.prom").read_text(encoding="utf-8"), "pair-14M")


def test_vllm_s_own_page() -> None:
    """The numbers that vLLM's own log summed up over the run: accepted 52 + 184, drafted 213 + 828."""
    counts, _ = difference(recorded("vllm_before"), recorded("vllm_after"), 0)
    assert counts == SpeculationCounts(
        num_steps=347,
        num_tokens=347 + 52 + 184,
        num_draft_tokens=213 + 828,
        num_accepted_tokens=52 + 184,
        accepted_per_position=[136, 64, 36],
    )
    plain = recorded("vllm_plain")
    assert difference(plain, plain, 0)[0] is None


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
    """vLLM counts with prometheus_client, which adds `_total` and `_created` to what its source
    calls the counters."""
    registry = CollectorRegistry()
    drafts = Counter(
        "vllm:spec_decode_num_drafts", "Drafts.", ["model_name", "engine"], registry=registry
    )
    positions = Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "By position.",
        ["model_name", "position"],
        registry=registry,
    )
    Histogram("vllm:generation_tokens", "Of a request.", ["model_name"], registry=registry).labels(
        "m"
    ).observe(5)
    drafts.labels("m", "0").inc(3)
    positions.labels("m", "1").inc(2)
    reading = parse(generate_latest(registry).decode(), "m")
    assert reading.counters["spec_decode_num_drafts"] == 3
    assert reading.positions == {1: 2}
