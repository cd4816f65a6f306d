"""When parts fail, or memory is short: every request ends once, nobody's row stays behind, and the
engine goes on."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.build import Options
from outrider.drafters.lookup.ngram_cache import NgramCache
from outrider.engine.batch import Batch
from outrider.engine.engine import make_engine
from outrider.engine.prefill import Prefiller
from outrider.engine.request import EngineSettings, Request
from outrider.errors import ConfigError, NumericalError, RequestError
from outrider.grammar import Grammars, regex
from outrider.rows import Row, Rows
from outrider.sampling.params import SamplingParams
from tests.helpers import EOS, byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.engine.conftest import Answer, MakeEngine, Models, ask, prompt, request


@pytest.mark.slow
def test_a_request_that_comes_in_while_a_turn_fails_ends_with_the_others(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a row that nobody owns: ended with all the others, queued after all, and decoded for
    ever."""
    engine = engine_of()
    late = Answer()
    step = Batch.step
    failed = []

    def fails_once(batch: Batch, drafts: Any) -> Any:
        if failed:
            return step(batch, drafts)
        failed.append(True)
        engine.submit(request(prompt(9, 2)), late)  # as another thread might, meanwhile
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Batch, "step", fails_once)
    first = ask(engine, request(prompt(9)))[0]
    assert [first.finish.reason, late.finish.reason] == ["error", "error"]
    assert ask(engine, request(prompt(20, 3)))[0].finish.reason == "length"
    assert len(late.updates) == 1
    assert engine.snapshot().running == 0


def test_a_failure_between_two_turns_is_survived(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an engine that dies for good because a drafter failed while a cancelled row left."""

    def fails(index: int) -> None:
        raise RuntimeError("a bug of the drafter's")

    engine = engine_of(drafter="ngram", draft=False)
    endless = request(prompt(9), max_tokens=1900)
    answer = ask(engine, endless)[0]
    assert answer.begun.wait(30)
    monkeypatch.setattr(engine._batch.decoder.drafter, "stop", fails)
    engine.cancel(endless.id)
    assert answer.finish.reason == "error"
    assert ask(engine, request(prompt(12)))[0].finish.reason == "length"
    assert engine.snapshot().failed is None


@pytest.mark.parametrize(
    ("drafter", "extra"),
    [
        ("ngram", ()),
        ("draft-model", ()),
        pytest.param("early-exit", (), marks=pytest.mark.slow),
        ("composite", ()),
        ("draft-model", ("suffix",)),
    ],
)
def test_a_request_that_a_drafter_cannot_take_ends_alone(
    engine_of: MakeEngine,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    extra: tuple[str, ...],
) -> None:
    """Catches a plug-in whose `start` raises and ends everybody's requests, or leaves a row that
    the others' rows are taken for; with several drafters, a row that some of them have."""
    engine = engine_of(
        drafter=drafter, extra=extra, draft=drafter in ("draft-model", "composite"), start=False
    )
    last = engine._batch.decoder.drafter
    while more := list(getattr(last, "_drafters", {}).values()) or [
        part.drafter for part in getattr(last, "parts", ())
    ]:
        last = more[-1]
    start = last.start
    prompts = [prompt(20, 1), prompt(9, 2), prompt(31, 3)]

    def fails(row: Row) -> None:
        start(row)
        if row.tokens[:9] == prompts[1]:
            raise RuntimeError("a bug of a plug-in's")

    monkeypatch.setattr(last, "start", fails)
    first = ask(engine, request(prompts[0], max_tokens=200))[0]
    engine.start()
    assert first.begun.wait(30)
    bad, beside = ask(engine, *(request(tokens) for tokens in prompts[1:]))
    plain = LLM(models.target, drafter="none", max_num_seqs=1)
    for answer, tokens, count in ((first, prompts[0], 200), (beside, prompts[2], 24)):
        expected = plain.generate([tokens], SamplingParams(max_tokens=count, ignore_eos=True))[0]
        assert answer.token_ids == expected.token_ids
    assert (bad.finish.reason, bad.token_ids) == ("error", [])
    assert "RuntimeError" in str(bad.finish.error)


def test_every_request_ends_when_the_device_is_broken(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches clients that wait for ever: after a CUDA assert nothing works any more, not even
    taking a row out."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for name in ("step", "leave", "reset"):
        monkeypatch.setattr(Batch, name, broken)
    # the thread ends with its error, as it should
    monkeypatch.setattr(threading, "excepthook", lambda death: None)
    options = Options(target=str(models.target), drafter="ngram")
    engine = make_engine(options, EngineSettings(kv_memory=64 << 20))
    answers = [Answer(), Answer()]
    for answer in answers:
        engine.submit(request(prompt(5)), answer)
    engine.start()
    assert [answer.finish.reason for answer in answers] == ["error", "error"]
    assert "CUDA error" in (engine.snapshot().failed or "")


def test_a_request_that_comes_in_while_the_thread_dies_ends_too(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a client that waits for ever: taken by an engine whose thread has just ended all
    requests, but this one."""
    monkeypatch.setattr(threading, "excepthook", lambda death: None)
    engine = make_engine(
        Options(target=str(models.target), drafter="ngram"), EngineSettings(kv_memory=64 << 20)
    )
    dies = threading.Event()
    refuse = engine._refuse
    late = Answer()

    def die() -> None:
        dies.wait(30)
        raise SystemExit

    def refuse_slowly(asked: Request) -> None:
        refuse(asked)
        dies.set()
        assert engine._thread is not None
        engine._thread.join(0.5)

    monkeypatch.setattr(engine._loop, "_receive", die)
    monkeypatch.setattr(engine, "_refuse", refuse_slowly)
    engine.start()
    engine.submit(request(prompt(5)), late)
    assert late.over.wait(10)
    assert late.finish.reason == "error"


def test_a_prompt_that_is_read_again_found_nothing_at_first(
    engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its own first reading kept is in the prefix store by then; a bill that calls it cached
    is wrong."""
    engine = engine_of(drafter="ngram", draft=False, start=False)
    advance = Prefiller.advance
    turns: list[int] = []

    def fails(prefiller: Prefiller) -> Any:
        turns.append(1)
        if len(turns) == 4:
            raise RuntimeError("a bug of the model's")
        return advance(prefiller)

    monkeypatch.setattr(Prefiller, "advance", fails)
    answers = ask(engine, request(prompt(600, 1)), request(prompt(600, 2)))
    engine.start()
    assert sorted(answer.finish.reason for answer in answers) == ["error", "length"]
    assert [answer.finish.cached_tokens for answer in answers] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["auto", "eager"])
def test_broken_numbers_stay_with_their_request(tmp_path: Path, runtime: str) -> None:
    """Catches a prompt whose NaN stays in memory, and ends the requests that are read into the same
    place later."""
    model = tiny_llama(257, sharpness=4.0, max_position_embeddings=2048)
    broken = 255
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = torch.nan
    target = save_checkpoint(tmp_path / "target", model, byte_tokenizer())
    engine = make_engine(
        Options(target=str(target), drafter="ngram", runtime=runtime),
        EngineSettings(kv_memory=64 << 20),
    )
    engine.start()

    def asked(length: int, **more: Any) -> Request:
        return request(prompt(length, 4), allowed_token_ids=list(range(1, 251)), **more)

    expected = [ask(engine, asked(length))[0].token_ids for length in (9, 5)]
    guilty = replace(asked(700), prompt=[*prompt(20), broken, *prompt(680)])
    beside, bad = ask(engine, asked(12, max_tokens=200), guilty)
    assert (beside.finish.reason, bad.finish.reason) == ("length", "error")
    assert isinstance(bad.finish.error, NumericalError)
    assert [ask(engine, asked(length))[0].token_ids for length in (9, 5)] == expected
    engine.stop()
    engine.check_integrity()


@pytest.mark.parametrize("beside", [False, True])
def test_a_row_that_ended_in_a_step_that_failed_says_nothing_more(
    engine_of: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """Catches a step made again by rows that came to their end in it: tokens behind the end, or an
    answer taken for a failure."""
    prompts = [prompt(9, 1), prompt(20, 2)][: 1 + beside]
    engine = engine_of(drafter="ngram", draft=False, start=False)
    drafter = engine._batch.decoder.drafter
    commit = drafter.commit

    def fails(rows: Rows, *others: Any) -> None:
        if any(row.finish_reason for row in rows):
            raise RuntimeError("a bug of the drafter's")
        commit(rows, *others)

    monkeypatch.setattr(drafter, "commit", fails)
    answers = ask(
        engine,
        *(
            request(tokens, max_tokens=count)
            for tokens, count in zip(prompts, (3, 24), strict=False)
        ),
    )
    engine.start()
    plain = LLM(models.target, drafter="none", max_num_seqs=1)
    expected = [
        plain.generate([tokens], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids
        for tokens, count in zip(prompts, (3, 24), strict=False)
    ]
    assert [answer.finish.reason for answer in answers] == ["length"] * len(prompts)
    assert [answer.token_ids for answer in answers] == expected


def test_a_grammar_that_is_too_heavy_ends_its_request_alone(
    engine_of: MakeEngine, models: Models
) -> None:
    """With an error that says so; the neighbour, and who asks for a shorter answer of the same
    form, get theirs. Catches an answer that ends early as if it were complete, for a matcher that
    used up its lexer counts as stopped."""
    grammars = Grammars(byte_tokenizer(), 257, [EOS])
    heavy = regex("((a{1,100}){1,100}){1,100}")
    engine = engine_of(drafter="ngram", draft=False)

    def formed(tokens: int) -> Any:
        constraint = grammars.constraint(heavy)
        return request(
            prompt(9), ignore_eos=False, min_tokens=tokens, max_tokens=tokens, constraint=constraint
        )

    guilty, beside = ask(engine, formed(100), request(prompt(20, 3), max_tokens=60))
    assert guilty.finish.reason == "error"
    assert isinstance(guilty.finish.error, RequestError)
    assert "takes more work than one answer may cost" in str(guilty.finish.error)
    plain = LLM(models.target, drafter="none", max_num_seqs=1)
    expected = plain.generate([prompt(20, 3)], SamplingParams(max_tokens=60, ignore_eos=True))
    assert beside.token_ids == expected[0].token_ids
    short = ask(engine, formed(15))[0]
    assert (short.finish.reason, short.text) == ("length", "a" * 15)


def test_memory_for_less_than_one_request_is_refused(engine_of: MakeEngine) -> None:
    """Catches an engine that accepts a request for which there will never be room, and turns round
    and round."""
    with pytest.raises(ConfigError, match=r"kv_memory is too small.*prefix_share"):
        engine_of(kv_memory=1 << 20)  # 1024 tokens, a quarter of them for prefixes


def test_a_row_that_made_room_stays_out_until_there_is_room(
    engine_of: MakeEngine, models: Models
) -> None:
    """Catches a row that is let in beside a long one and sent away again, every turn, without a
    step of its own."""
    # 2048 tokens
    engine = engine_of(drafter="ngram", draft=False, kv_memory=1 << 20, prefix_share=0.0)
    prompts = [prompt(440, 1), prompt(100, 2)]
    answers = ask(engine, *(request(tokens, max_tokens=200) for tokens in prompts))
    plain = LLM(models.target, drafter="none", max_num_seqs=1)
    expected = plain.generate(prompts, SamplingParams(max_tokens=200, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == [done.token_ids for done in expected]
    assert 1 <= answers[1].finish.preemptions <= 2


@pytest.mark.parametrize("drafter", ["suffix", "ngram-cache"])
def test_a_row_that_made_room_is_learned_once(engine_of: MakeEngine, drafter: str) -> None:
    """Catches a text that counts once more each time it makes room for another."""
    engine = engine_of(
        drafter=drafter, draft=False, kv_memory=1 << 20, prefix_share=0.0, num_draft_tokens=4
    )
    answers = ask(
        engine, *(request(prompt(length, length), max_tokens=200) for length in (440, 100))
    )
    assert sum(answer.finish.preemptions for answer in answers) > 0
    learner = engine._batch.decoder.drafter._drafters[drafter]
    texts = [answer.token_ids for answer in answers]
    if drafter == "suffix":
        assert sorted(learner.memory.sequences) == sorted(texts)
    else:
        counts = learner._cache._counts
        known = NgramCache(2, 4, 200_000)
        for length, text in zip((440, 100), texts, strict=True):
            known.learn([*prompt(length, length), *text], 0)
        assert sum(sum(one.values()) for one in counts.values()) == sum(
            sum(one.values()) for one in known._counts.values()
        )
