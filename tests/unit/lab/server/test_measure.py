"""Whole runs against servers on the loopback: turns, interruptions, and servers that go away."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import ConfigError, ServerError
from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.progress import QUIET, Progress
from outrider.lab.result import comparables
from outrider.lab.server.client import RequestOptions, ServerEndpoint
from outrider.lab.server.measure import bench_servers
from outrider.lab.workload.types import BadLine, Workload, WorkloadRequest
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from outrider.sampling.params import SamplingParams
from tests.unit.lab.server.fake_server import Fake


def run(*fakes: Fake, number: int = 6, progress: Progress = QUIET, **facts: Any) -> BenchResult:
    requests = tuple(
        WorkloadRequest(f"r{i}", prompt=f"prompt {i}", task="code" if i % 2 else "qa")
        for i in range(number)
    )
    endpoints = {
        name: ServerEndpoint.parse(fake.url)
        for name, fake in zip(("plain", "spec"), fakes, strict=False)
    }
    options = RequestOptions(**{"settle_s": 0.0, "timeout_s": 5.0, **facts})
    return bench_servers(
        endpoints,
        Workload("w", requests, (BadLine(3, "bad"),)),
        options,
        prompts=100,
        progress=progress,
    )


@pytest.mark.parametrize("at_once", [1, 4])
def test_one_server(at_once: int) -> None:
    with Fake(chunk_s=0.01) as fake:
        result = run(fake, number=8, concurrency=at_once)
        warm = [body for body in fake.seen if body["prompt"].startswith("Warming up. ")]
        assert len(warm) == max(2, at_once), "as many as will be in flight"
        assert {body["max_tokens"] for body in warm} == {16}
        assert fake.max_in_flight == max(2, at_once)
    (server,) = result.servers
    assert server.is_complete
    assert (server.engine, server.model, server.concurrency, server.comparison) == (
        "vllm",
        "fake-model",
        at_once,
        None,
    )
    assert [answer.id for answer in server.answers] == [f"r{i}" for i in range(8)]
    assert [answer.task for answer in server.answers] == ["qa", "code"] * 4
    assert server.tokens_per_s == pytest.approx(8 * 13 / result.seconds)
    assert server.ttft_s is not None
    assert server.ttft_s.n == 8
    assert server.tpot_s is not None
    # the first chunk may come late, the last no earlier
    assert 0.035 / 12 <= server.tpot_s.p50 < 0.02
    assert server.speculation is not None
    assert (server.speculation.num_steps, server.speculation.tau) == (8 * 4, 3.0), (
        "the warm-up is in no number"
    )
    assert result.workload.num_skipped_lines == 1


@pytest.mark.slow
def test_two_servers_take_turns_on_the_same_prompts() -> None:
    """Plain first, then speculative, then the other way round: drift hits both alike, and only one
    works at a time."""
    order: list[tuple[str, str, int]] = []
    with Fake(speculates=False, chunk_s=0.02) as plain, Fake(chunk_s=0.005) as spec:
        plain.on_request = lambda number: order.append(
            ("plain", plain.seen[number]["prompt"], spec.in_flight)
        )
        spec.on_request = lambda number: order.append(
            ("spec", spec.seen[number]["prompt"], plain.in_flight)
        )
        result = run(plain, spec, number=9)
    assert [one[:2] for one in order[4:10]] == [
        ("plain", "prompt 0"),
        ("spec", "prompt 0"),
        ("spec", "prompt 1"),
        ("plain", "prompt 1"),
        ("plain", "prompt 2"),
        ("spec", "prompt 2"),
    ]
    assert sum(one[2] for one in order) == 0
    base, fast = result.servers
    assert base.comparison is None
    compared = fast.comparison
    assert compared is not None
    assert (compared.baseline, compared.num_pairs, compared.differing) == ("plain", 9, [])
    assert compared.speedup is not None
    assert compared.speedup.value > 1.5
    assert compared.speedup.low <= compared.speedup.value <= compared.speedup.high < float("inf")
    assert base.speculation is None
    assert any("no speculation counters" in note for note in base.notes)
    assert "spec: tokens/s" in comparables(result)
    report = to_markdown(render(result))
    assert "Bench: spec against plain" in report
    assert "All 9 greedy texts are the same on both servers" in report
    assert BenchResult.model_validate_json(result.model_dump_json()) == result


def test_texts_that_differ_are_named() -> None:
    words = " ".join(f"w{i}" for i in range(13))
    with (
        Fake() as plain,
        Fake(
            text=lambda body: words.replace("w7", "W7") if body["prompt"] == "prompt 2" else words
        ) as spec,
    ):
        result = run(plain, spec, number=4)
    compared = result.servers[1].comparison
    assert compared is not None
    assert compared.differing == ["r2"]
    assert "1 of 4 greedy texts differ (requests r2)" in to_markdown(render(result))


def test_sampled_texts_are_not_compared() -> None:
    with Fake() as plain, Fake() as spec:
        fast = run(plain, spec, number=2, sampling=SamplingParams(temperature=0.5)).servers[1]
    assert fast.comparison is not None
    assert fast.comparison.differing is None
    assert any("defaults" in note for note in fast.notes)


@pytest.mark.parametrize("fault", ["drop", "garbage", "500", "400"])
def test_one_bad_request_does_not_end_the_run(fault: str) -> None:
    """It is reported, the others are kept."""
    lines: list[str] = []

    class Listener(Progress):
        def say(self, line: str) -> None:
            lines.append(line)

    with Fake(faults={4: fault}) as fake:
        result = run(fake, progress=Listener())
    (server,) = result.servers
    assert [answer.id for answer in server.answers] == ["r0", "r1", "r3", "r4", "r5"]
    assert [failure.partition(":")[0] for failure in server.failures] == ["request r2"]
    assert len(lines) == 1
    assert not server.is_complete
    assert "1 requests without an answer, 1 of them failed" in to_markdown(render(result))


def test_a_server_that_goes_away_keeps_what_was_finished() -> None:
    """The run ends and says why; counters of an interrupted stretch are lost, not guessed."""
    with Fake() as fake:
        fake.faults = dict.fromkeys(range(5, 100), "drop")
        fake.on_request = lambda number: fake.stop() if number == 5 else None
        (server,) = run(fake, number=40).servers
    assert [answer.id for answer in server.answers] == ["r0", "r1", "r2"]
    assert any("given up" in note for note in server.notes)
    assert server.speculation is None
    assert len(server.failures) == 10


def test_a_server_that_only_fails_is_an_error() -> None:
    with Fake(faults=dict.fromkeys(range(100), "500")) as fake:
        with pytest.raises(ServerError, match="CUDA"):
            run(fake, number=40)
        assert len(fake.seen) == 2, "the warm-up already says so"
    with Fake(faults=dict.fromkeys(range(2, 100), "500")) as fake:
        with pytest.raises(ServerError, match="CUDA"):
            run(fake, number=40)
        assert len(fake.seen) == 2 + 10


def test_tokens_that_are_not_counted_are_not_estimated() -> None:
    with Fake(usage=False, metrics=False) as fake:
        (server,) = run(fake, number=2).servers
    assert (server.tokens_per_s, server.tpot_s, server.speculation, server.engine) == (
        None,
        None,
        None,
        "",
    )
    assert server.ttft_s is not None
    assert any("without token counts" in note for note in server.notes)
    assert any("--metrics" in note for note in server.notes)


def test_a_server_that_counts_late_is_waited_for() -> None:
    """Neither may the warm-up be counted, nor may the last request be missed."""
    with Fake(late_counting_s=0.25) as fake:
        (server,) = run(fake, number=2, settle_s=0.1).servers
    assert server.speculation is not None
    assert server.speculation.num_steps == 2 * 4


def test_what_is_refused_before_anything_is_sent() -> None:
    with Fake() as fake:
        talk = Workload(
            "talk", (WorkloadRequest(id="1", messages=({"role": "user", "content": "x"},)),)
        )
        with pytest.raises(ConfigError, match="chat template"):
            bench_servers(
                {"a": ServerEndpoint.parse(fake.url)},
                talk,
                RequestOptions(api="completions"),
                prompts=1,
            )
        assert fake.seen == fake.paths == []


def test_ctrl_c_leaves_what_was_answered() -> None:
    """The signal comes with the fifth request, two of them warm-ups: the two answers that came are
    reported."""

    def stop(number: int) -> None:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with Fake(on_request=stop) as fake:
        result = run(fake)
    assert result.interrupted
    assert [answer.id for answer in result.servers[0].answers] == ["r0", "r1"]
    assert "this is what was known" in to_markdown(render(result))


def test_a_conversation_goes_on_after_the_server_s_own_answer() -> None:
    question = ({"role": "user", "content": "one"},)
    talk = WorkloadRequest("t", messages=question, later=("two",))
    with Fake(text=lambda body: f"to {body['messages'][-1]['content']}") as fake:
        result = bench_servers(
            {"server": ServerEndpoint.parse(fake.url)},
            Workload("w", (talk, WorkloadRequest("u", messages=question))),
            RequestOptions(settle_s=0.0, timeout_s=5.0),
            prompts=100,
        )
        asked = [body["messages"] for body in fake.seen[-3:]]
    (server,) = result.servers
    assert [answer.id for answer in server.answers] == ["t", "t/2", "u"]
    assert [answer.turn for answer in server.answers] == [1, 2, 1]
    assert server.num_requests == 3
    assert asked[1] == [
        *question,
        {"role": "assistant", "content": "to one"},
        {"role": "user", "content": "two"},
    ]
    assert "By turn of a conversation" in to_markdown(render(result))


def test_a_conversation_that_fails_is_not_continued() -> None:
    talk = WorkloadRequest("t", messages=({"role": "user", "content": "one"},), later=("two",))
    with Fake(faults={2: "500"}) as fake:
        result = bench_servers(
            {"server": ServerEndpoint.parse(fake.url)},
            Workload("w", (talk, replace(talk, id="s"))),
            RequestOptions(settle_s=0.0, timeout_s=5.0),
            prompts=100,
        )
    (server,) = result.servers
    assert [answer.id for answer in server.answers] == ["s", "s/2"]
    assert (server.num_requests, len(server.failures)) == (4, 1)
    assert not server.is_complete
