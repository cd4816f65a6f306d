"""A server against itself without drafts, over HTTP: exact ones pass, each kind of fault is found,
and servers that behave badly get no certificate."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from outrider.errors import ConfigError, ServerError
from outrider.lab.certify.server import ServerPlan, certify_server
from outrider.lab.certify.server_result import ServerCertifyResult
from outrider.lab.server.client import ServerEndpoint
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from outrider.sampling.params import SamplingParams
from tests.unit.lab.server.fake_server import Fake

PROMPTS = 2
FEW = 12  # draws, where greedy text decides
TOKENS = 12
WORDS = ["yes", "no"]
WEIGHTS = [0.6, 0.4]
Say = Callable[[dict[str, Any]], str]


def speaker(weights: list[float] = WEIGHTS, change: Callable[[str], str] = str) -> Say:
    """A server's text: greedy it repeats the prompt, sampled it chooses a word. `change` is made to
    greedy texts."""
    unseeded = random.Random(5)

    def say(body: dict[str, Any]) -> str:
        about = body.get("prompt") or body["messages"][-1]["content"]
        if body["temperature"] == 0:
            return change(f"{about} is what you said and so on it goes")
        source = random.Random(body["seed"]) if "seed" in body else unseeded
        return source.choices(WORDS, weights)[0]

    return say


def near(place: int, gap: float, other: str = "thing ") -> Callable[[int, str], dict[str, float]]:
    """Log-probabilities of a plain server that prefers its word by `gap` in one place."""

    def of(number: int, token: str) -> dict[str, float]:
        return {token: -0.1, (other if number == place else "x "): -0.1 - gap}

    return of


def run(
    *fakes: Fake, samples: int = 280, chat: bool = False, at_once: int = 4, timeout_s: float = 5.0
) -> ServerCertifyResult:
    """Of one server, or of a plain and a speculative one."""
    requests = tuple(
        WorkloadRequest(f"r{i}", messages=({"role": "user", "content": f"prompt {i}"},))
        if chat
        else WorkloadRequest(f"r{i}", prompt=f"prompt {i}")
        for i in range(PROMPTS)
    )
    names = ("plain", "speculative") if len(fakes) > 1 else ("server",)
    endpoints = {
        name: ServerEndpoint.parse(fake.url) for name, fake in zip(names, fakes, strict=True)
    }
    plan = ServerPlan(
        samples=samples,
        sampling=SamplingParams(max_tokens=TOKENS),
        concurrency=at_once,
        timeout_s=timeout_s,
        settle_s=0.0,
    )
    result = certify_server(endpoints, Workload("w", requests), plan)
    assert ServerCertifyResult.model_validate_json(result.model_dump_json()) == result
    to_markdown(render(result))
    return result


def plain(**facts: Any) -> Fake:
    return Fake(speculates=False, text=facts.pop("text", speaker()), **facts)


def drafting(**facts: Any) -> Fake:
    return Fake(text=facts.pop("text", speaker()), **facts)


# ------------------------------------------------ servers that are exact


def test_two_servers_with_the_same_text() -> None:
    with plain() as one, drafting() as other:
        result = run(one, other)
        greedy = [body for body in other.seen if body["temperature"] == 0]
        drawn = [body for body in other.seen if body["temperature"] == 1]
        assert (len(greedy), len(drawn)) == (2 * PROMPTS, 280)
        assert {body["max_tokens"] for body in drawn} == {8}
        seeds = [body["seed"] for body in drawn if "seed" in body]
        assert len(set(seeds)) == len(seeds) == 140, "half of the draws have a seed, each its own"
        assert not set(seeds) & {body.get("seed") for body in one.seen}, "independent draws"
        assert 1 < other.max_in_flight <= 4
        assert "logprobs" not in {name for body in other.seen for name in body}
    assert result.verdict == "lossless", result.reasons
    assert result.determinism.status == result.greedy.status == result.sampled.status == "passed"
    assert (result.plain.drafted, result.plain.fields) == ({"greedy": None, "sampled": None}, {})
    assert result.speculative.drafted["greedy"] == 2 * PROMPTS * 3
    assert result.sampled.finds is not None
    assert 0.1 < result.sampled.finds < 0.25
    assert [test.num_draws for test in result.sampled.tests] == [280, 280, 140, 140, 140, 140]
    assert "Lossless, as far as HTTP shows" in to_markdown(render(result))


def test_one_server_whose_requests_switch_drafts_off() -> None:
    with drafting(engine="outrider") as fake:
        result = run(fake)
        off = {"speculation": {"mode": "off"}}
        switched = [body for body in fake.seen if body.get("speculation") == off["speculation"]]
        assert len(switched) == 3 * PROMPTS + 280
        assert len(fake.seen) - len(switched) == 2 * PROMPTS + 280
    assert result.verdict == "lossless", result.reasons
    assert result.plain.fields == off
    assert (result.plain.drafted["greedy"], result.speculative.drafted["greedy"]) == (
        0,
        2 * PROMPTS * 3,
    )


def test_conversations() -> None:
    with plain() as one, drafting() as other:
        result = run(one, other, chat=True, samples=FEW)
        assert {body["path"] for body in other.seen} == {"/v1/chat/completions"}
    assert result.greedy.status == "passed", result.reasons


# ------------------------------------------------ faults that are found


def swapped(text: str) -> str:
    return text.replace("what", "thing")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("gap", "cause", "verdict"),
    [
        (0.05, "rounding", "inconclusive"),
        (0.6, "unknown", "inconclusive"),
        (4.0, "error", "not lossless"),
    ],
)
def test_rounding_and_error_are_told_apart(
    gap: float, cause: str, verdict: str, chat: bool
) -> None:
    with plain(logprobs=near(3, gap)) as one, drafting(text=speaker(change=swapped)) as other:
        result = run(one, other, samples=FEW, chat=chat)
        (asked,) = {
            str(body.get("top_logprobs", body["logprobs"]))
            for body in one.seen
            if "logprobs" in body
        }
        assert asked == "5"
    assert (result.verdict, len(result.greedy.differences)) == (verdict, 2 * PROMPTS)
    first = result.greedy.differences[0]
    assert (first.cause, first.is_least, first.position) == (cause, False, len("prompt 0 is "))
    assert first.gap == pytest.approx(gap)
    assert (first.expected_text[:5], first.found_text[:5]) == ("what ", "thing")
    assert [run.num_identical for run in result.greedy.runs] == [0, 0]


@pytest.mark.parametrize(("gap", "cause"), [(0.1, "unknown"), (2.0, "error")])
def test_a_token_that_the_plain_server_does_not_list(gap: float, cause: str) -> None:
    with (
        plain(logprobs=near(3, gap, "foo ")) as one,
        drafting(text=speaker(change=swapped)) as other,
    ):
        first = run(one, other, samples=FEW).greedy.differences[0]
    assert (first.cause, first.is_least) == (cause, True)


def test_without_logprobs_it_says_so() -> None:
    with plain() as one, drafting(text=speaker(change=swapped)) as other:
        result = run(one, other, samples=FEW)
    assert result.verdict == "inconclusive"
    assert "cannot tell rounding from error without log-probabilities" in result.greedy.why
    assert result.greedy.differences[0].gap is None


def test_logprobs_that_are_refused_or_of_another_text_say_nothing() -> None:
    def other_text(body: dict[str, Any]) -> str:
        return "another text" if body.get("logprobs") else speaker()(body)

    refused = {number: "400" for number in range(3 * PROMPTS + FEW, 1000)}
    with (
        plain(text=other_text, logprobs=near(3, 0.01)) as one,
        drafting(text=speaker(change=swapped)) as other,
    ):
        assert run(one, other, samples=FEW).greedy.differences[0].cause == "unknown"
    with plain(faults=refused) as one, drafting(text=speaker(change=swapped)) as other:
        result = run(one, other, samples=FEW)
    assert result.greedy.differences[0].cause == "unknown"
    assert result.plain.failures == []


def test_a_text_that_is_longer_than_max_tokens() -> None:
    with plain() as one, drafting(text=speaker(change=lambda text: f"{text} and on")) as other:
        result = run(one, other, samples=FEW)
    assert result.verdict == "not lossless"
    assert result.greedy.differences[0].cause == "length"
    assert "both ended at max_tokens" in result.greedy.why


def test_a_biased_sampler() -> None:
    """By more than what the test claims to find; its greedy text is right."""
    biased = [0.25, 0.75]
    with plain() as one, drafting(text=speaker(biased)) as other:
        result = run(one, other)
    assert (result.verdict, result.greedy.status) == ("not lossless", "passed")
    assert result.sampled.finds is not None
    assert result.sampled.finds < 0.25
    assert result.sampled.tests[0].rejected
    assert "differ in their" in result.sampled.why


def test_a_sampler_that_is_biased_without_a_seed_only() -> None:
    """Requests with a seed often take another path."""
    right, wrong = speaker(), speaker([0.1, 0.9])

    def say(body: dict[str, Any]) -> str:
        return (right if "seed" in body or body["temperature"] == 0 else wrong)(body)

    with plain() as one, drafting(text=say) as other:
        result = run(one, other)
    rejected = {(test.drawn, test.view): test.rejected for test in result.sampled.tests}
    assert rejected["without seeds", "end"]
    assert not rejected["with seeds", "end"]


# ------------------------------------------------ no certificate


def numbered(change: Callable[[int, dict[str, Any]], bool]) -> Say:
    """Greedy text that is another one where `change` of the number of the request says so."""
    count = iter(range(100_000))
    say = speaker()

    def text(body: dict[str, Any]) -> str:
        number = next(count)
        return say(body) + (" or not" if body["temperature"] == 0 and change(number, body) else "")

    return text


def test_a_server_that_changes_is_not_deterministic() -> None:
    with (
        plain(text=numbered(lambda number, body: number > 2 * PROMPTS + FEW)) as one,
        drafting() as other,
    ):
        result = run(one, other, samples=FEW)
    assert (result.verdict, result.greedy.status) == ("not deterministic", "not claimed")
    assert "not deterministic, no claim" in result.reasons[0]
    assert "Not deterministic: no claim" in to_markdown(render(result))


def test_texts_that_differ_of_a_server_that_does_not_repeat_itself_are_no_fault() -> None:
    with (
        plain(text=numbered(lambda number, body: number > 2 * PROMPTS + FEW)) as one,
        drafting(text=speaker(change=swapped)) as other,
    ):
        result = run(one, other, samples=FEW)
    assert (result.verdict, result.greedy.status) == ("not deterministic", "not claimed")


def test_a_server_that_does_not_repeat_itself_in_a_batch() -> None:
    """What it does alone can be compared all the same."""
    with plain(text=numbered(lambda number, body: number == PROMPTS)) as one, drafting() as other:
        result = run(one, other)
    assert (result.verdict, result.determinism.status) == ("lossless", "not claimed")
    assert [run.name for run in result.greedy.runs] == ["speculative, alone"]


def test_one_url_of_an_unknown_server_asks_for_the_other() -> None:
    with drafting(engine="sglang") as fake:
        with pytest.raises(
            ConfigError, match=r"drafts off in a server of 'sglang'.*--baseline-url"
        ):
            run(fake)
        assert fake.seen == []


def test_too_few_draws_and_no_choice() -> None:
    with plain() as one, drafting() as other:
        few = run(one, other, samples=40)
    assert few.verdict == "inconclusive"
    assert "raise --samples" in few.sampled.why
    certain = speaker([1, 0])
    with plain(text=certain) as one, drafting(text=certain) as other:
        alike = run(one, other, samples=FEW)
    assert (alike.verdict, alike.sampled.finds) == ("inconclusive", None)
    assert "nothing to test" in alike.sampled.why


def test_a_server_that_drafts_nothing_or_a_baseline_that_drafts() -> None:
    with plain() as one, drafting() as other:
        other.count = lambda tokens, drafts=True: None  # type: ignore[method-assign]
        result = run(one, other, samples=FEW)
    assert result.verdict == "inconclusive"
    assert "drafted nothing" in result.reasons[0]
    with drafting() as one, drafting() as other:
        result = run(one, other, samples=FEW)
    assert result.verdict == "inconclusive"
    assert "the server without drafts drafted, too" in result.reasons[0]


def test_empty_texts() -> None:
    with plain(text=lambda body: "") as one, drafting(text=lambda body: "") as other:
        result = run(one, other, samples=FEW)
    assert result.verdict == "inconclusive"
    assert "all texts are empty" in result.greedy.why


@pytest.mark.parametrize("fault", ["500", "drop", "garbage", "close", "html", "abort"])
def test_single_failures_leave_it_open(fault: str) -> None:
    with plain() as one, drafting(faults={1: fault, 10: fault}) as other:
        result = run(one, other, samples=FEW)
    assert result.verdict == "inconclusive"
    assert "missing: see failures" in result.greedy.why
    assert result.speculative.failures[0].startswith("request r1: http")
    assert "Failures" in to_markdown(render(result))


def test_not_every_failure_is_named() -> None:
    with plain() as one, drafting(faults=dict.fromkeys(range(5, 100, 2), "500")) as other:
        result = run(one, other, samples=60, at_once=1)
    assert len(result.speculative.failures) == 21
    assert result.speculative.failures[-1].startswith("and ")


def test_a_server_that_goes_away_is_soon_asked_no_more() -> None:
    with plain() as one, drafting() as other:
        other.on_request = lambda number: (
            other.faults.update({number: "close"}) if number > 30 else None
        )
        result = run(one, other)
        # ten failures in a row end it, of which late answers may interrupt a few; there are 560
        assert len(other.seen) < 31 + 2 * 10 + 4
    assert result.verdict == "inconclusive"
    assert "of 560 texts are missing" in result.sampled.why


def test_a_plain_server_that_went_away_is_not_asked_for_logprobs() -> None:
    with plain() as one, drafting(text=speaker(change=swapped)) as other:
        one.on_request = lambda number: (
            one.faults.update({number: "close"}) if number > 2 * PROMPTS else None
        )
        result = run(one, other, samples=40)
        assert not any("logprobs" in body for body in one.seen)
    assert (result.verdict, result.determinism.status) == ("inconclusive", "inconclusive")
    assert result.greedy.differences[0].cause == "unknown"


def test_ctrl_c_ends_it() -> None:
    with plain() as one, drafting() as other:
        other.on_request = lambda number: number or os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            run(one, other)
        assert len(other.seen) < 5


def test_nothing_is_answered() -> None:
    faults = dict.fromkeys(range(1000), "500")
    message = pytest.raises(ServerError, match=r"speculative, request r0: .*HTTP 500")
    with plain() as one, drafting(faults=faults) as other, message:
        run(one, other)


def test_counts_that_cannot_be() -> None:
    """The texts are compared all the same."""
    with plain() as one, drafting(counted_as=10_000) as other:
        result = run(one, other, samples=FEW)
    assert result.greedy.status == "passed", result.reasons
    assert any("a count of tokens that cannot be" in note for note in result.notes)


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lab.server.client.MAX_CHARACTERS", 20)
    with plain() as one, drafting() as other, pytest.raises(ServerError, match="longer than 20"):
        run(one, other)
