"""Whole runs against servers on the loopback: levels, turns, interruptions, and servers that go away."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ConfigError, RequestError, ServerError
from outrider.lab.progress import QUIET, Progress
from outrider.lab.server.measure import measure_servers
from outrider.lab.server.options import LoadOptions, ServerEndpoint
from outrider.lab.server.types import ServerMeasurement
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.sampling.params import SamplingParams
from tests.unit.lab.server.fake_server import Fake


def workload(number: int = 6) -> Workload:
    return Workload(
        "test", tuple(WorkloadRequest(id=f"r{i}", prompt=f"prompt {i}", task="code" if i % 2 else "qa") for i in range(number))
    )


def options(**facts: Any) -> LoadOptions:
    return LoadOptions(**{"concurrency": (1,), "warmup": 1, "settle_s": 0.0, "timeout_s": 5.0, **facts})


def measure(
    *fakes: Fake, number: int = 6, progress: Any = QUIET, **facts: Any
) -> list[ServerMeasurement]:
    endpoints = {name: ServerEndpoint.parse(fake.url) for name, fake in zip(("plain", "spec"), fakes, strict=False)}
    return measure_servers(endpoints, workload(number), options(**facts), progress=progress)


def test_one_server_at_two_levels() -> None:
    with Fake(chunk_s=0.01) as fake:
        (result,) = measure(fake, number=8, concurrency=(1, 4))
        warm = [body for body in fake.seen if body["prompt"].startswith("Warming up. ")]
        assert len(warm) == 1 + 4, "as many as will be in flight"
        assert {body["max_tokens"] for body in warm} == {16}
        assert len(fake.seen) == len(warm) + 16
        assert fake.max_in_flight == 4
    one, four = result.levels
    assert result.complete
    assert (result.server.engine, result.server.version, result.baseline) == ("vllm", "1.2.3", None)
    for level in (one, four):
        assert [answer.id for answer in level.answers] == [f"r{i}" for i in range(8)]
        assert [answer.task for answer in level.answers] == ["qa", "code"] * 4
        assert level.failures == []
        assert level.tokens_per_s == pytest.approx(8 * 13 / level.busy_s)
        assert level.requests_per_s == pytest.approx(8 / level.busy_s)
        assert level.tokens_per_chunk == pytest.approx(13 / 5)
        assert level.ttft_s is not None
        assert level.ttft_s.n == 8
        assert level.gap_s is not None
        assert level.gap_s.n == 8 * 4
        assert level.gap_s.p50 <= level.gap_s.p90 <= level.gap_s.p99
        assert level.tpot_s is not None
        assert 0.035 / 12 <= level.tpot_s.p50 < 0.02  # the first chunk may come late, the last no earlier
        assert level.speculation is not None
        assert (level.speculation.num_steps, level.speculation.tau) == (8 * 4, 3.0)
    assert one.busy_s > 8 * 0.04
    assert four.busy_s < one.busy_s, "four at once overlap"


def test_the_warm_up_does_not_fill_the_prefix_cache() -> None:
    talk = Workload(
        "talk",
        (WorkloadRequest(id="1", messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"})),),
    )
    with Fake() as fake:
        measure_servers({"a": ServerEndpoint.parse(fake.url)}, talk, options())
        assert [body["messages"][0]["content"] for body in fake.seen] == ["Warming up. Be brief.", "Be brief."]
        assert fake.seen[0]["messages"][1] == fake.seen[1]["messages"][1]


def test_the_warm_up_is_in_no_number() -> None:
    with Fake(engine="llamacpp") as fake:
        (result,) = measure(fake, number=2, warmup=2)
    counts = result.levels[0].speculation
    assert counts is not None
    assert counts.num_steps == 2 * 4


def test_two_servers_take_turns_on_the_same_prompts() -> None:
    """Plain first, then speculative, then the other way round: drift hits both alike."""
    order: list[tuple[str, str]] = []
    with Fake(speculates=False, chunk_s=0.02) as plain, Fake(chunk_s=0.005) as spec:
        plain.on_request = lambda number: order.append(("plain", plain.seen[number]["prompt"]))
        spec.on_request = lambda number: order.append(("spec", spec.seen[number]["prompt"]))
        base, fast = measure(plain, spec, number=9)
    assert order[2:8] == [
        ("plain", "prompt 0"), ("spec", "prompt 0"), ("spec", "prompt 1"), ("plain", "prompt 1"), ("plain", "prompt 2"),
        ("spec", "prompt 2"),
    ]  # fmt: skip
    assert (base.baseline, base.comparisons, fast.baseline) == (None, [], "plain")
    (compared,) = fast.comparisons
    assert (compared.num_pairs, compared.num_identical, compared.differences) == (9, 9, [])
    assert compared.speedup is not None
    assert compared.speedup.value > 1.5
    assert compared.speedup.low <= compared.speedup.value <= compared.speedup.high < float("inf")
    assert compared.throughput_ratio == pytest.approx(compared.speedup.value, rel=0.1)
    assert base.levels[0].speculation is None
    assert any("no speculation counters" in note for note in base.levels[0].notes)


def test_only_one_of_two_servers_works_at_a_time() -> None:
    """On one machine they would slow each other down."""
    overlaps = []
    with Fake(chunk_s=0.002) as one, Fake(chunk_s=0.002) as two:
        one.on_request = lambda number: overlaps.append(two.in_flight)
        two.on_request = lambda number: overlaps.append(one.in_flight)
        measure(one, two, number=12, concurrency=(2,))
        assert max(one.max_in_flight, two.max_in_flight) == 2
    assert sum(overlaps) == 0


def test_texts_that_differ_are_shown() -> None:
    words = " ".join(f"w{i}" for i in range(13))
    with (
        Fake() as plain,
        Fake(text=lambda body: words.replace("w7", "W7") if body["prompt"] == "prompt 2" else words) as spec,
    ):
        _, fast = measure(plain, spec, number=4)
    (compared,) = fast.comparisons
    assert (compared.num_identical, len(compared.differences)) == (3, 1)
    (difference,) = compared.differences
    assert (difference.id, difference.position) == ("r2", words.index("w7"))
    assert difference.baseline.startswith("w7 w8")
    assert difference.other.startswith("W7 w8")


def test_sampled_texts_are_not_compared() -> None:
    with Fake() as plain, Fake() as spec:
        _, fast = measure(plain, spec, number=2, sampling=SamplingParams(temperature=0.5))
    assert fast.comparisons[0].num_identical is None
    assert any("defaults" in note for note in fast.notes)


@pytest.mark.parametrize("fault", ["drop", "close", "garbage", "500", "400"])
def test_one_bad_request_does_not_end_the_run(fault: str) -> None:
    """It is reported, the others are kept; only what the server refused for good counts as settled."""
    lines: list[str] = []

    class Listener(Progress):
        def say(self, line: str) -> None:
            lines.append(line)

    with Fake(faults={3: fault}) as fake:
        (result,) = measure(fake, progress=Listener())
    (level,) = result.levels
    assert [answer.id for answer in level.answers] == ["r0", "r1", "r3", "r4", "r5"]
    assert [failure.id for failure in level.failures] == ["r2"]
    assert len(lines) == 1
    assert "r2" in lines[0]
    assert result.complete == (fault == "400")


def test_a_server_that_goes_away_keeps_what_was_finished() -> None:
    """The run ends at once and says why."""
    with Fake() as fake:
        fake.faults = {4: "drop"}
        fake.on_request = lambda number: fake.stop() if number == 4 else None
        (result,) = measure(fake, concurrency=(1, 2))
    first, second = result.levels
    assert [answer.id for answer in first.answers] == ["r0", "r1", "r2"]
    assert [failure.kind for failure in first.failures] == ["dropped", "refused"]
    assert (second.answers, second.tokens_per_s, second.ttft_s) == ([], None, None)
    assert not result.complete
    assert any("given up" in note for note in result.notes)
    assert first.speculation is None, "the counters of an interrupted stretch are lost, not guessed"


def test_a_server_that_goes_away_between_levels() -> None:
    """What was measured before is a result, not an error."""
    with Fake(faults={7: "close"}) as fake:
        (result,) = measure(fake, concurrency=(1, 2))
        assert len(fake.seen) == 1 + 6 + 2
    assert [len(level.answers) for level in result.levels] == [6, 0]
    assert not result.complete
    assert "dropped" in result.notes[-2]
    assert "6 requests" in result.notes[-1]


def test_one_of_two_servers_goes_away() -> None:
    with Fake() as plain, Fake() as spec:
        spec.faults = {3: "close"}
        spec.on_request = lambda number: spec.stop() if number == 3 else None
        base, fast = measure(plain, spec)
    assert not base.complete
    assert not fast.complete
    assert fast.comparisons[0].num_pairs == len(fast.levels[0].answers) == 2
    assert any("ended with spec" in note for note in base.notes)


def test_a_server_that_only_fails_is_given_up() -> None:
    with Fake(faults=dict.fromkeys(range(100), "500")) as fake:
        with pytest.raises(ServerError, match="CUDA"):
            measure(fake, number=40)
        assert len(fake.seen) == 1, "the warm-up already says so"
        with pytest.raises(ServerError, match="CUDA"):
            measure(fake, number=40, warmup=0)
        assert len(fake.seen) == 1 + 10
    with Fake(faults=dict.fromkeys(range(100), "400")) as fake, pytest.raises(RequestError, match="context length"):
        measure(fake)


def test_failures_with_successes_between_them_are_borne() -> None:
    with Fake(faults={n: "500" for n in range(1, 20) if n != 10}) as fake:
        (result,) = measure(fake, number=25)
    (level,) = result.levels
    assert (len(level.failures), len(level.answers)) == (18, 7)


def test_tokens_that_are_not_counted_are_not_estimated() -> None:
    with Fake(usage=False, metrics=False) as fake:
        (result,) = measure(fake, number=2)
    (level,) = result.levels
    assert (level.tokens_per_s, level.tpot_s, level.tokens_per_chunk, level.speculation) == (None, None, None, None)
    assert level.ttft_s is not None
    assert any("without token counts" in note for note in level.notes)
    assert any("/metrics" in note for note in result.notes)


def test_other_traffic_is_noticed() -> None:
    with Fake(foreign_tokens=20) as fake:
        (result,) = measure(fake, number=4)
    assert any("other traffic" in note for note in result.levels[0].notes)


def test_a_server_that_counts_late_is_waited_for() -> None:
    """Neither may the warm-up be counted with the level, nor may the level's last request be missed."""
    with Fake(late_counting_s=0.25) as fake:
        (result,) = measure(fake, number=2, settle_s=0.1)
    assert result.levels[0].speculation is not None
    assert result.levels[0].speculation.num_steps == 2 * 4


def test_a_warm_prefix_cache_is_noticed() -> None:
    with Fake(cached=5) as fake:
        (result,) = measure(fake, number=4, concurrency=(8,))
    assert any("50%" in note for note in result.levels[0].notes)
    assert any("cannot keep 8 in flight" in note for note in result.levels[0].notes)


def test_prompts_that_come_again_are_new_to_vllms_prefix_cache() -> None:
    """At every level and in every run, warm-ups included; in one level they are of one kind, so what they share is found."""
    with Fake(prefix_cache=set()) as fake:
        for _ in range(2):
            (result,) = measure(fake, number=4, concurrency=(1, 2))
        assert fake.found == 0
        salts = [body["cache_salt"] for body in fake.seen if not body["prompt"].startswith("Warming")]
        assert [len(set(salts[start : start + 4])) for start in range(0, 16, 4)] == [1, 1, 1, 1]
        assert len(set(salts)) == 4
    assert any("cache_salt" in note for note in result.notes)
    assert not any("prefix cache" in note for level in result.levels for note in level.notes)


def test_a_salt_of_the_users_own_is_kept() -> None:
    """Or none: then the cache answers, and the counters show it though the answers do not."""
    with Fake(prefix_cache=set()) as fake:
        (result,) = measure(fake, number=4, concurrency=(1, 2), extra={"cache_salt": None})
        assert not any("cache_salt" in body for body in fake.seen)
    assert not any("cache_salt" in note for note in result.notes)
    assert any("100% of the prompt tokens" in note for note in result.levels[1].notes)
    assert not any("of the prompt tokens" in note for note in result.levels[0].notes)
    with Fake() as fake:
        measure(fake, number=1, extra={"cache_salt": "mine"})
        assert {body["cache_salt"] for body in fake.seen} == {"mine"}


@pytest.mark.parametrize("engine", ["sglang", "llamacpp", "outrider"])
def test_engines_that_know_no_salt_get_none(engine: str) -> None:
    """A server may refuse a field that it does not know."""
    with Fake(engine=engine) as fake:
        (result,) = measure(fake, number=1)
        assert not any("cache_salt" in body for body in fake.seen)
    assert not any("cache_salt" in note for note in result.notes)


def test_a_server_that_refuses_everything_is_an_error() -> None:
    """vLLM with speculation refuses min_p, and says so only in the stream: nothing is left to compare with."""
    with Fake(speculates=False) as plain, Fake(faults=dict.fromkeys(range(100), "refusal")) as spec:
        with pytest.raises(RequestError, match="min_p is not yet supported"):
            measure(plain, spec, number=4)
        assert len(plain.seen) == 1 + 4


def test_one_server_under_two_labels_has_no_counters() -> None:
    """Each would count the other's requests."""
    with Fake() as fake:
        one, two = measure(fake, fake, number=3)
    assert one.levels[0].speculation is None
    assert two.levels[0].speculation is None
    assert any("two labels" in note for note in one.notes)
    assert two.comparisons[0].num_identical == 3


def test_what_is_refused_before_anything_is_sent() -> None:
    with Fake() as fake:
        endpoint = ServerEndpoint.parse(fake.url)
        with pytest.raises(ConfigError, match="at least one"):
            measure_servers({}, workload(), options())
        with pytest.raises(ConfigError, match="no requests"):
            measure_servers({"a": endpoint}, Workload("empty", ()), options())
        talk = Workload("talk", (WorkloadRequest(id="1", messages=({"role": "user", "content": "x"},)),))
        with pytest.raises(ConfigError, match="chat template"):
            measure_servers({"a": endpoint}, talk, options(api="completions"))
        assert fake.seen == fake.paths == []


def test_a_measurement_survives_json() -> None:
    with Fake(engine="sglang") as plain, Fake(engine="sglang") as spec:
        measured = measure(plain, spec, number=8, concurrency=(1, 2))
    for one in measured:
        assert ServerMeasurement.model_validate_json(one.model_dump_json()) == one
