"""The loop itself: one target pass per step, nothing left behind by a row that is refused, time
that adds up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import outrider.step
from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.errors import ConfigError
from outrider.rows import Row, Rows
from outrider.sampling.params import SamplingParams
from outrider.step import StepFacts
from tests.helpers import byte_tokenizer, make_row, save_checkpoint, tiny_llama


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder: Path = save_checkpoint(
        tmp_path_factory.mktemp("model"), tiny_llama(257), byte_tokenizer()
    )
    threads = torch.get_num_threads()
    yield build(
        Options(target=str(folder), drafter="ngram", dtype="float32", runtime="eager", threads=1)
    ).decoder
    torch.set_num_threads(threads)


def test_one_target_pass_per_step(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second pass that nobody measured: a bonus token fetched apart, a prompt fed twice."""
    passes: list[tuple[int, ...]] = []
    run = decoder.target.run
    monkeypatch.setattr(
        decoder.target, "run", lambda ids, *rest: passes.append(tuple(ids.shape)) or run(ids, *rest)
    )
    for number in range(2):
        decoder.add(make_row([5, 6, 7] * 5, SamplingParams(max_tokens=30), number=number))
    decoder.step()
    assert passes[:2] == [(1, 14), (1, 14)], "each prompt is fed once, without its pending token"
    assert len(passes) == 3
    for _ in range(3):
        before = len(passes)
        decoder.step()
        assert len(passes) == before + 1
    while len(decoder.rows):
        decoder.remove(0)


def test_a_refused_row_leaves_nothing_behind(decoder: Decoder) -> None:
    """Catches a cache slot without a row: from then on every row would use its neighbour's keys."""
    with pytest.raises(ConfigError):
        decoder.add(make_row([5], SamplingParams(allowed_token_ids=[10**6])))
    assert (len(decoder.rows), decoder.target.kv.num_rows) == (0, 0)


def test_a_row_that_the_drafter_cannot_take_leaves_again(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a row that nobody asked for, decoded beside the next ones: in the rows, in the cache
    or in the drafter."""
    beside = make_row([5, 6, 7] * 5, SamplingParams(max_tokens=30))
    decoder.add(beside)
    drafter = decoder.drafter
    start = decoder.drafter.start

    def fails(row: Row) -> None:
        start(row)
        raise RuntimeError("a bug of a plug-in's")

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "start", fails)
        with pytest.raises(RuntimeError, match="plug-in"):
            decoder.add(make_row([9, 8, 9, 8], SamplingParams(max_tokens=30), number=1))
    assert [row.request for row in decoder.rows] == [0]
    assert decoder.target.kv.num_rows == 1
    decoder.add(make_row([9, 8, 9, 8], SamplingParams(max_tokens=30), number=2))
    while beside.finish_reason is None:
        decoder.step()
    assert decoder.rows[1].stats.drafted > 0
    for _ in range(2):
        decoder.remove(0)
    decoder.add(alone := make_row([5, 6, 7] * 5, SamplingParams(max_tokens=30)))
    while alone.finish_reason is None:
        decoder.step()
    decoder.remove(0)
    assert (alone.tokens, alone.stats.drafted) == (beside.tokens, beside.stats.drafted)


def test_what_is_read_into_the_draft_is_no_part_of_a_steps_price(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a control that learns from a long prompt that drafting is slow; and a row whose draft
    is not read yet asked."""
    clock = [0.0]
    seen = list[StepFacts]()

    class Reading(FixedLength):
        def choose(self, rows: Rows) -> list[int]:
            clock[0] += 5.0
            return [0] * len(rows)

    def catch_up(rows: Rows, gamma: list[int]) -> None:
        clock[0] += 2.0

    monkeypatch.setattr(outrider.step, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(decoder, "control", Reading(3))
    monkeypatch.setattr(decoder.drafter, "catch_up", catch_up)
    monkeypatch.setattr(decoder, "observers", [SimpleNamespace(observe=seen.append)])
    decoder.add(make_row([5, 6, 7] * 5, SamplingParams(max_tokens=30)))
    decoder.step()
    (facts,) = seen
    assert (facts.seconds, facts.draft_s) == (0.0, 7.0)
    assert (facts.asked, facts.drafted, facts.accepted) == ([0], [0], [0])
    decoder.remove(0)


def test_times_add_up(decoder: Decoder) -> None:
    """Catches a phase counted twice, or a batch whose rows together took longer than the clock on
    the wall."""
    rows = [
        make_row([5, 6, 7], SamplingParams(max_tokens=30), number=number) for number in range(3)
    ]
    for row in rows:
        decoder.add(row)
    started = time.perf_counter()
    for _ in range(5):
        decoder.step()
    wall = time.perf_counter() - started
    total = sum(sum(row.stats.time_s.values()) for row in rows)
    assert 0.5 * wall <= total <= wall
    while len(decoder.rows):
        decoder.remove(0)
