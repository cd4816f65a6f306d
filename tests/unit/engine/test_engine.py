"""The engine against one request at a time: whatever runs beside it, a text stays what it is."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM
from outrider.build import Options
from outrider.demo import demo_paths
from outrider.drafters.model.reading import Turns
from outrider.engine import request as request_module
from outrider.engine.engine import make_engine
from outrider.engine.prefill import Prefiller
from outrider.engine.request import ActiveRequest, Speculation
from outrider.errors import (
    CapabilityError,
    ConfigError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from outrider.grammar import Grammars, regex
from outrider.sampling.params import SamplingParams
from outrider.sampling.words import Spelling
from outrider.stats import DecodeStats
from tests.helpers import byte_tokenizer
from tests.unit.engine.conftest import Answer, MakeEngine, Models, ask, prompt, request

LENGTHS = (1, 2, 9, 40, 300, 33, 5, 70)


either = pytest.mark.parametrize("runtime", ["auto", "eager"])


def alone(
    models: Models, prompts: list[list[int]], runtime: str = "auto", **params: object
) -> list[list[int]]:
    """What plain decoding says to each prompt by itself."""
    llm = LLM(models.target, drafter="none", runtime=runtime, max_num_seqs=1)
    each = [SamplingParams(max_tokens=24, ignore_eos=True, **params) for _ in prompts]  # type: ignore[arg-type]
    return [done.token_ids for done in llm.generate(prompts, each)]


@either
def test_greedy_texts_under_load_are_plain_decodings(
    engine_of: MakeEngine, models: Models, runtime: str
) -> None:
    """Requests join and leave a small batch while others run, short and longer than a chunk."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    engine = engine_of(max_num_seqs=3, runtime=runtime)
    answers = ask(engine, *(request(tokens) for tokens in prompts))
    assert [answer.token_ids for answer in answers] == alone(models, prompts, runtime)
    assert {answer.finish.reason for answer in answers} == {"length"}


@pytest.mark.parametrize("length", ["auto", 4])
def test_seeded_texts_do_not_depend_on_load_drafter_or_length(
    engine_of: MakeEngine, length: object
) -> None:
    """The same seed alone without speculation, and in a crowd under a load-aware control."""
    prompts = [prompt(size, seed) for seed, size in enumerate(LENGTHS[:5])]
    engine = engine_of(num_draft_tokens=length, max_num_seqs=4)
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    off = [
        ask(engine, request(tokens, speculation=Speculation(mode="off"), **sampling))[0].token_ids
        for tokens in prompts
    ]
    crowd = ask(
        engine,
        *(request(tokens, **sampling) for tokens in prompts),
        *(request(tokens) for tokens in prompts),
    )
    assert [answer.token_ids for answer in crowd[:5]] == off


def test_a_preempted_request_comes_back_as_it_was(engine_of: MakeEngine, models: Models) -> None:
    """An urgent request takes the only slot; the first one's text does not show it."""
    first = prompt(40, 1)
    urgent = prompt(12, 2)
    engine = engine_of(max_num_seqs=1)
    slow = ask(engine, request(first, max_tokens=400, priority=1))[0]
    assert slow.begun.wait(30)
    quick = ask(engine, request(urgent, priority=0))[0]
    assert quick.token_ids == alone(models, [urgent])[0]
    assert not slow.over.is_set(), "the urgent request was to overtake it"
    expected = LLM(models.target, drafter="none").generate(
        [first], SamplingParams(max_tokens=400, ignore_eos=True)
    )
    assert slow.token_ids == expected[0].token_ids
    assert slow.finish.preemptions == 1


@pytest.mark.parametrize(
    ("priorities", "preempted"),
    [((2, 1, 0), [1, 0, 0]), ((1, 2, 0), [0, 1, 0]), ((1, 1, 0), [0, 1, 0])],
)
def test_the_least_urgent_row_is_preempted(
    engine_of: MakeEngine, priorities: tuple[int, ...], preempted: list[int]
) -> None:
    """However long it has run; of equally urgent ones the last to arrive."""
    engine = engine_of(drafter="none", draft=False, max_num_seqs=2)
    answers = []
    for number, priority in enumerate(priorities):
        answers += ask(
            engine,
            request(prompt(12, number), max_tokens=12 if number == 2 else 300, priority=priority),
        )
        assert answers[-1].begun.wait(30)
    assert not any(answer.over.is_set() for answer in answers[:2]), (
        "both were to be there when the urgent one came"
    )
    assert [answer.finish.preemptions for answer in answers] == preempted


def test_nobody_makes_room_for_an_equal(engine_of: MakeEngine) -> None:
    """Who is as urgent as the rows that run waits for one of them to end; who is less urgent, too."""
    engine = engine_of(drafter="none", draft=False, max_num_seqs=2)
    running = ask(
        engine, *(request(prompt(12, number), max_tokens=60, priority=1) for number in range(2))
    )
    assert all(answer.begun.wait(30) for answer in running)
    waiting = ask(engine, request(prompt(12, 3), priority=1), request(prompt(12, 4), priority=2))
    assert [answer.finish.preemptions for answer in (*running, *waiting)] == [0] * 4


def test_the_least_urgent_row_makes_room_in_memory(engine_of: MakeEngine) -> None:
    """Not the younger one, which the older one's text leaves no room for."""
    # 2048 tokens
    engine = engine_of(drafter="ngram", draft=False, kv_memory=1 << 20, prefix_share=0.0)
    older = ask(engine, request(prompt(440, 1), max_tokens=200, priority=1))[0]
    assert older.begun.wait(30)
    younger = ask(engine, request(prompt(100, 2), max_tokens=200))[0]
    assert younger.finish.preemptions == 0
    assert older.finish.preemptions > 0


@pytest.mark.slow
@either
def test_memory_that_runs_out_preempts_and_loses_nothing(
    engine_of: MakeEngine, models: Models, runtime: str
) -> None:
    """Rows that grow beyond what there is room for together take turns."""
    engine = engine_of(runtime=runtime, max_num_seqs=4, kv_memory=1 << 20, prefix_share=0.0)
    room = engine.context - 8
    prompts = [prompt(room // 2, seed) for seed in range(4)]
    answers = ask(engine, *(request(tokens, max_tokens=room // 2) for tokens in prompts))
    llm = LLM(models.target, drafter="none", runtime=runtime)
    expected = llm.generate(prompts, SamplingParams(max_tokens=room // 2, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == [done.token_ids for done in expected]
    assert engine.snapshot().kv_capacity * 1.0 <= (1 << 20)


def test_a_prompt_seen_before_is_not_read_again(
    engine_of: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second turn of a conversation begins with the first one's prompt and answer: neither
    target nor draft read it."""
    drafts_read: list[int] = []
    read = Turns.read

    def counted(turns: Turns, *arguments: Any) -> list[int]:
        sizes = read(turns, *arguments)
        drafts_read.extend(sizes)
        return sizes

    monkeypatch.setattr(Turns, "read", counted)
    engine = engine_of()
    first = prompt(600, 3)
    answer = ask(engine, request(first))[0]
    assert answer.finish.cached_tokens == 0
    assert sum(drafts_read) == 601, (
        "the prompt and two tokens emitted meanwhile, the pending one not"
    )
    drafts_read.clear()
    second = [*first, *answer.token_ids, *prompt(20, 4)]
    again = ask(engine, request(second))[0]
    assert again.finish.cached_tokens >= 512
    assert again.token_ids == alone(models, [second])[0]
    assert 0 < sum(drafts_read) < 60, "of 644 tokens: what is behind the last whole page"
    assert again.updates[0].origins != ["plain"], "it drafts from its first step"
    snapshot = engine.snapshot()
    assert snapshot.prefix_hits == again.finish.cached_tokens
    assert snapshot.prefix_pages > 0


def test_every_request_has_its_own_speculation(engine_of: MakeEngine, models: Models) -> None:
    """Off, fixed, bounded, another drafter and the default, in one batch."""
    engine = engine_of(extra=("ngram",), max_num_seqs=8)
    kinds = [
        Speculation(mode="off"),
        Speculation(mode="fixed", max_draft_tokens=2),
        Speculation(max_draft_tokens=1),
        Speculation(drafter="ngram"),
        Speculation(),
    ]
    tokens = prompt(30, 5) * 3
    answers = ask(engine, *(request(tokens, speculation=kind, max_tokens=40) for kind in kinds))
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    off, two, one, ngram, usual = (answer.finish for answer in answers)
    assert off.stats.drafted == 0
    assert off.stats.steps == 40
    assert {
        len(two.stats.accepted_per_position) <= 2,
        len(one.stats.accepted_per_position) <= 1,
    } == {True}
    assert ngram.drafter == "ngram"
    assert usual.drafter == "draft-model"
    assert usual.stats.tau is not None
    assert usual.stats.tau > 1.5, "a slightly disturbed copy is a good draft"


def test_a_cancelled_request_ends_and_the_others_do_not_notice(
    engine_of: MakeEngine, models: Models
) -> None:
    """Cancelled while it runs, while it waits, and twice."""
    engine = engine_of(max_num_seqs=2)
    others = [prompt(20, 6), prompt(25, 7)]
    endless = request(prompt(9, 8), max_tokens=1900)
    waiting = request(prompt(9, 9), max_tokens=1900)
    answers = ask(engine, endless, request(others[0]), waiting, request(others[1]))
    assert answers[0].begun.wait(30)
    for one in (waiting, endless, endless):
        engine.cancel(one.id)
    assert answers[0].finish.reason == answers[2].finish.reason == "abort"
    assert [answers[1].token_ids, answers[3].token_ids] == alone(models, others)


def test_a_late_request_keeps_what_it_has(engine_of: MakeEngine) -> None:
    """A timeout ends it, the text so far stays."""
    answer = ask(engine_of(), request(prompt(9), max_tokens=1900, timeout_s=0.3))[0]
    assert answer.finish.reason == "timeout"
    assert answer.finish.stats.emitted == len(answer.token_ids)


def test_time_limits_hold_while_a_long_prompt_is_read(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a client that waits for as long as its prompt, or that of somebody else, takes to be
    read."""
    engine = engine_of(drafter="ngram", draft=False, max_prefills=1)
    advance = Prefiller.advance
    chunks = []

    def slow(prefiller: Prefiller) -> Any:
        chunks.append(time.sleep(0.1))
        return advance(prefiller)

    monkeypatch.setattr(Prefiller, "advance", slow)
    asked = [request(prompt(1900), timeout_s=0.25), request(prompt(9), timeout_s=0.05)]
    assert [answer.finish.reason for answer in ask(engine, *asked)] == ["timeout", "timeout"]
    assert len(chunks) < 6  # of 8


def test_text_held_back_for_a_stop_string_is_sent_when_time_is_up(engine_of: MakeEngine) -> None:
    """Catches the end of an answer lost because it could still have become a stop string."""
    letter = byte_tokenizer()("a")["input_ids"]
    late = request(
        prompt(9), max_tokens=1900, timeout_s=0.3, allowed_token_ids=letter, stop=["a" * 1950]
    )
    answer = ask(engine_of(), late)[0]
    assert answer.finish.reason == "timeout"
    assert answer.text == "a" * len(answer.token_ids)


def test_an_answer_reports_whether_its_text_can_be_had_again(engine_of: MakeEngine) -> None:
    """Greedy and seeded ones always; sampled ones that asked for the usual verification never."""
    engine = engine_of(lossy=("typical",))
    kinds = [
        ({}, None, True),
        ({"temperature": 1.0, "seed": 3}, None, True),
        ({"temperature": 1.0}, None, False),
        ({"temperature": 1.0, "seed": 3}, Speculation(invariant=False), False),
        ({"temperature": 1.0}, Speculation(invariant=True), True),
        ({}, Speculation(lossy="typical"), False),
    ]
    requests = (
        request(prompt(9), speculation=speculation, max_tokens=3, **fields)
        for fields, speculation, _ in kinds
    )
    answers = ask(engine, *requests)
    assert [answer.finish.reproducible for answer in answers] == [
        expected for *_, expected in kinds
    ]


def test_an_answer_may_not_end_early_or_say_what_is_banned(engine_of: MakeEngine) -> None:
    """Beside a grammar of its own, and beside rows without any."""
    engine = engine_of()
    early = {"logit_bias": {0: 60.0}, "ignore_eos": False, "max_tokens": 12}
    grammar = Grammars(byte_tokenizer(), 257, [0]).constraint(regex("[a-d]*"))
    answers = ask(
        engine,
        request(prompt(9), min_tokens=7, **early),
        request(prompt(9), min_tokens=5, constraint=grammar, **early),
        request(prompt(9), bad_words=["a"], max_tokens=40),
        request(prompt(20, 3)),
    )
    assert [len(answer.token_ids) for answer in answers] == [8, 6, 40, 24]
    assert set(answers[1].text) <= set("abcd")
    assert "a" not in answers[2].text


def test_bad_words_that_were_prepared_are_not_looked_for_again(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a preparation that `submit` does not use: it would stop the thread that answers
    everybody."""
    engine = engine_of()
    looked = []
    monkeypatch.setattr(
        Spelling,
        "holding",
        lambda self, word, real=Spelling.holding: looked.append(word) or real(self, word),
    )
    asked = request(prompt(9), bad_words=["prepared"], max_tokens=3)
    engine.prepare(asked.params)
    assert looked == [b"prepared"]
    ask(engine, asked)
    assert looked == [b"prepared"]


class BrokenConstraint:
    """Works until it is asked, in the middle of a step of all rows."""

    is_over = False

    def __init__(self, asked: str) -> None:
        self._asked = asked

    def forced(self, path: object, most: int) -> list[int]:
        if self._asked == "forced":
            raise RuntimeError("this grammar is broken")
        return []

    def allowed(self, paths: object) -> object:
        raise RuntimeError("this grammar is broken")

    def commit(self, tokens: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("asked", ["allowed", "forced"])
def test_a_request_that_breaks_a_step_ends_alone(
    engine_of: MakeEngine, models: Models, asked: str
) -> None:
    """Its neighbours' texts are what they would have been."""
    engine = engine_of(max_num_seqs=4)
    tokens = [prompt(20, 1), prompt(31, 2), prompt(8, 3)]
    good = ask(engine, *(request(one) for one in tokens[:2]))
    bad = ask(engine, request(tokens[2], constraint=BrokenConstraint(asked)))[0]
    after = ask(engine, request(tokens[2]))[0]
    assert bad.finish.reason == "error"
    assert "RuntimeError" in str(bad.finish.error)
    assert [answer.token_ids for answer in (*good, after)] == alone(models, tokens)


def test_a_listener_that_fails_is_not_called_again(engine_of: MakeEngine, models: Models) -> None:
    """A caller's bug is the caller's."""

    def fails(update: object) -> None:
        raise ValueError("a bug in the caller")

    engine = engine_of()
    one = request(prompt(9), max_tokens=1900)
    engine.submit(one, fails)
    other = prompt(12, 4)
    assert ask(engine, request(other))[0].token_ids == alone(models, [other])[0]


def test_too_many_waiting_are_turned_away_with_a_time(engine_of: MakeEngine) -> None:
    """429 in HTTP: how long to wait is part of the answer."""
    engine = engine_of(max_num_seqs=1, max_queue=2, start=False)
    ask(engine, *(request(prompt(5), max_tokens=2) for _ in range(2)))
    with pytest.raises(QueueFullError) as refused:
        ask(engine, request(prompt(5)))
    assert 1 <= refused.value.retry_after_s <= 60
    engine.start()


def test_room_is_asked_for_by_the_rule_of_the_queue(engine_of: MakeEngine) -> None:
    """What there is room for is taken to the last one; what there will never be room for is refused
    for good, not for now."""
    engine = engine_of(max_num_seqs=1, max_queue=3, start=False)
    with pytest.raises(RequestError, match=r"4 answers .* at most 3 requests .*--max-queue"):
        engine.check_room(4)
    engine.check_room(3)
    ask(engine, request(prompt(5), max_tokens=2))
    with pytest.raises(
        QueueFullError, match="1 requests are waiting of 3 that may, too many for 3 more"
    ) as refused:
        engine.check_room(3)
    assert 1 <= refused.value.retry_after_s <= 60
    engine.check_room(2)
    ask(engine, *(request(prompt(5), max_tokens=2) for _ in range(2)))
    engine.start()


def test_a_draining_engine_takes_nothing_new(engine_of: MakeEngine) -> None:
    """What runs is finished first."""
    engine = engine_of()
    answer = ask(engine, request(prompt(5)))[0]
    assert engine.drain(30)
    assert answer.over.is_set()
    with pytest.raises(UnavailableError, match="shutting down"):
        ask(engine, request(prompt(5)))


def test_what_cannot_be_honoured_is_refused_by_name(engine_of: MakeEngine) -> None:
    """Before anything runs."""
    engine = engine_of(lossy=("typical",))
    wrong = [
        (request([]), RequestError, "empty"),
        (request(prompt(4000)), RequestError, "context"),
        (request([9999]), RequestError, "vocabulary"),
        (request(prompt(5), logit_bias={9999: 1.0}), ConfigError, "logit_bias"),
        (request(prompt(5), speculation=Speculation(drafter="ngrm")), ConfigError, "not loaded"),
        (
            request(prompt(5), speculation=Speculation(mode="fixed", max_draft_tokens=99)),
            ConfigError,
            "at most 4",
        ),
        (
            request(prompt(5), speculation=Speculation(lossy="top-k")),
            CapabilityError,
            "Allowed: typical",
        ),
    ]
    for one, error, message in wrong:
        with pytest.raises(error, match=message):
            ask(engine, one)
    assert not ask(
        engine, request(prompt(5), temperature=1.0, speculation=Speculation(lossy="typical"))
    )[0].finish.lossless


def test_logprobs_of_prompt_and_answer(engine_of: MakeEngine, models: Models) -> None:
    """The prompt's come once, and agree with those of an answer that says the same."""
    engine = engine_of(draft=False, drafter="none")
    first = prompt(20, 2)
    answer = ask(engine, request(first, logprobs=3, max_tokens=12))[0]
    logprobs = [entry for update in answer.wait().updates for entry in update.logprobs]
    again = ask(engine, request([*first, *answer.token_ids], prompt_logprobs=3, max_tokens=2))[0]
    [asked] = [
        update.prompt_logprobs
        for update in again.wait().updates
        if update.prompt_logprobs is not None
    ]
    assert len(asked) == 32
    assert asked[0] is None
    for mine, theirs, token in zip(asked[20:], logprobs, answer.token_ids, strict=True):
        assert mine is not None
        assert mine[token] == pytest.approx(theirs[token], abs=1e-4)


def test_a_stream_adds_up(engine_of: MakeEngine) -> None:
    """Texts, pieces, origins and counters of all updates are the whole."""
    answer = ask(engine_of(), request(prompt(30), max_tokens=50))[0].wait()
    finish = answer.finish
    assert "".join(piece for update in answer.updates for piece in update.pieces) == answer.text
    assert (
        sum(len(update.origins) for update in answer.updates)
        == len(answer.token_ids)
        == finish.stats.emitted
        == 50
    )
    assert finish.prompt_tokens == 30
    assert finish.stats.ttft_s > 0
    first = answer.updates[0]
    assert finish.stats.first_tokens == len(first.token_ids), (
        "the time to first token pays for the whole first step"
    )


def test_waiting_after_the_last_token_is_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is cancelled a minute after its last token decoded until that token."""
    row = SimpleNamespace(
        stats=DecodeStats(),
        origins=["plain"],
        pieces=["a"],
        output=[1],
        logprobs=[],
        num_prompt=1,
        finish_reason=None,
    )
    clock = iter([10.0, 11.0, 14.0, 74.0])
    monkeypatch.setattr(request_module.time, "perf_counter", lambda: next(clock))
    active = ActiveRequest(
        None, lambda update: None, row, 0, "none", True, True, submitted=next(clock)
    )  # type: ignore[arg-type]
    active.show()
    row.origins = ["plain"] * 3
    row.pieces = ["a"] * 3
    row.output = [1, 2, 3]
    active.show()
    active.show()
    assert (row.stats.ttft_s, row.stats.decode_s) == (1.0, 3.0)


@pytest.mark.slow
def test_a_storm_of_requests_leaves_nothing_behind(engine_of: MakeEngine, models: Models) -> None:
    """Short, long, cancelled, late, urgent and refused ones; what finished says what it says alone."""
    rng = random.Random(1)
    engine = engine_of(max_num_seqs=6, max_queue=400, kv_memory=4 << 20, extra=("ngram",))
    prompts = [prompt(rng.choice([3, 17, 64, 290]), seed) for seed in range(12)]
    expected = alone(models, prompts)
    sent: list[tuple[int, Answer]] = []
    for number in range(300):
        which = rng.randrange(12)
        kind = rng.choice([Speculation(), Speculation(mode="off"), Speculation(drafter="ngram")])
        one = request(prompts[which], priority=rng.choice([0, 0, 1]), speculation=kind)
        sent.append((which, ask(engine, one)[0]))
        if number % 7 == 0:
            engine.cancel(one.id)
        if number % 5 == 0:
            time.sleep(0.01)
    for which, answer in sent:
        if answer.finish.reason == "length":
            assert answer.token_ids == expected[which]
        else:
            assert answer.finish.reason == "abort"
    assert sum(answer.finish.reason == "length" for _, answer in sent) > 200


def test_the_demo_is_known_under_any_name(tmp_path: Path, models: Models) -> None:
    """A copy in another folder whose playground offers it what it cannot answer."""
    shutil.copytree(demo_paths().draft, tmp_path / "copy")  # the small one of the pair
    for target, is_demo, size in (
        ("demo", True, 14_160_000),
        (tmp_path / "copy", True, 1_120_000),
        (models.target, False, None),
    ):
        engine = make_engine(Options(str(target), drafter="ngram"), name="called so")
        assert engine.is_demo is is_demo
        if size is not None:
            assert engine.num_parameters == pytest.approx(size, rel=0.01)
