"""From runs to a cell's numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.lab.bench.notes import RunNote, notes_of, pair
from outrider.lab.bench.summary import accuracy, identity, measured
from outrider.lab.runner import Trace
from outrider.lab.workload.types import WorkloadRequest
from outrider.report.text import by_part
from outrider.stats import PartStats
from tests.unit.lab.bench.fakes import trace_of
from tests.unit.lab.bench.test_machine import target

TOKENIZER = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))


def note(
    trace: Trace,
    configuration: int,
    prompt: int,
    turn: int = 0,
    plain: Trace | None = None,
    **changes: Any,
) -> RunNote:
    (found,) = notes_of([trace], configuration, [prompt], turn, 1)
    return found.model_copy(
        update={"pairing": None if plain is None else pair(plain, trace), **changes}
    )


PLAIN = trace_of([1] * 9, [0.5] + [0.010] * 8)
OWN = trace_of([3, 3, 3], [0.6, 0.012, 0.012], drafted=[4, 4, 2])
PLAINS = [note(PLAIN, 0, number) for number in range(3)]
OWNS = [note(OWN, 1, number, plain=PLAIN) for number in range(3)]
ABOUT = {
    "target": target(),
    "rows": 1,
    "max_other_cpu": 0.1,
    "same_text": True,
    "prompts": [WorkloadRequest(name, "x") for name in "abc"],
    "tokenizer": TOKENIZER,
}


def test_numbers_of_a_configuration() -> None:
    found = measured(OWNS, PLAINS, **ABOUT)
    assert found.configuration == 1
    assert (
        found.num_runs,
        found.num_tokens,
        found.num_steps,
        found.drafted,
        found.accepted,
        found.tested,
    ) == (
        3,
        27,
        9,
        30,
        18,
        24,
    )
    assert found.tau == 3
    assert found.alpha == pytest.approx(18 / 24)
    assert found.draft_utilisation == pytest.approx(18 / 30)
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(0.060 / 0.024)
    assert found.end_to_end is not None
    assert found.end_to_end.value == pytest.approx(0.580 / 0.624)
    assert found.tokens_per_s is not None
    assert found.tokens_per_s.value == pytest.approx(6 / 0.024)
    assert found.throughput_tokens_per_s == pytest.approx(9 / 0.624)
    assert found.ttft_s is not None
    assert found.ttft_s.p50 == pytest.approx(0.6)
    assert found.tpot_s is not None
    assert found.tpot_s.p50 == pytest.approx(0.004)
    assert found.chunk_s is not None
    assert (found.chunk_s.n, found.chunk_s.p99) == (6, pytest.approx(0.012))
    assert sum(found.time_s.values()) == pytest.approx(3 * 0.624)
    assert found.acceptance is not None
    assert (found.acceptance.num_steps, found.acceptance.reached, found.acceptance.kept) == (
        9,
        [9, 9, 6],
        [9, 9, 0],
    )
    assert found.acceptance.survival == [1, 1, 0]
    assert found.acceptance.per_position == [1, 1, 0]
    assert found.roof == pytest.approx(250 / (100_000 / (8000 + 10 * (4 + 4.5))))
    assert found.step_s == {0: pytest.approx(0.010)}, "three steps of a width are too few"
    assert found.identity is not None
    assert (found.identity.num_compared, found.identity.num_identical, found.identity.first) == (
        3,
        3,
        None,
    )


def test_three_acceptance_lengths() -> None:
    """They are the same only where all requests are alike."""
    short = note(trace_of([1, 1], [0.5, 0.01]), 1, 0, plain=PLAIN)
    found = measured([short, OWNS[1]], PLAINS, **ABOUT)
    lengths = found.acceptance_lengths
    assert lengths is not None
    assert lengths.mean_of_requests == pytest.approx((1 + 3) / 2)
    assert lengths.by_tokens == pytest.approx((2 * 1 + 9 * 3) / 11)
    assert lengths.pooled == pytest.approx(11 / 5) == found.tau
    assert found.tokens_per_step == {1: 2, 3: 3}


def test_turns_of_conversations_apart() -> None:
    prompts = [WorkloadRequest("a", "x"), WorkloadRequest("a/2", "x", turn=2)]
    found = measured(OWNS[:2], PLAINS, **{**ABOUT, "prompts": prompts})
    assert [turn.turn for turn in found.by_turn] == [1, 2]
    assert [turn.num_tokens for turn in found.by_turn] == [9, 9]
    assert found.by_turn[1].tau == 3
    assert found.by_turn[1].speedup is not None
    assert not measured(OWNS, PLAINS, **ABOUT).by_turn, "none where all are first turns"


def test_runs_are_kept_when_asked_for() -> None:
    (run, *_) = measured(OWNS, PLAINS, **ABOUT, keep_runs=True).runs
    assert run.tokens == [3, 3, 3]
    assert run.times_s == pytest.approx([0.6, 0.612, 0.624])
    assert not measured(OWNS, PLAINS, **ABOUT).runs


def test_parts_of_drafts_are_summed_and_shown() -> None:
    parts = {"eagle3": PartStats(3, 8, 5), "ngram": PartStats(1, 2, 1)}
    found = measured([entry.model_copy(update={"parts": parts}) for entry in OWNS], PLAINS, **ABOUT)
    assert found.parts == {"eagle3": PartStats(9, 24, 15), "ngram": PartStats(3, 6, 3)}
    assert by_part(found.parts) == "eagle3 15 of 24, ngram 3 of 6"


def test_plain_decoding_is_compared_with_nothing() -> None:
    found = measured(PLAINS, None, **ABOUT)
    assert (found.speedup, found.end_to_end, found.identity, found.acceptance) == (None,) * 4
    assert found.tau == 1
    assert found.tokens_per_s is not None
    assert found.tokens_per_s.value == pytest.approx(100)


def test_rows_of_a_batch_share_their_wall_time() -> None:
    """Two rows of 9 tokens each in 0.58 s."""
    rows = notes_of([PLAIN, PLAIN], 0, [0, 1], 0, 1)
    assert measured(rows, None, **{**ABOUT, "rows": 2}).throughput_tokens_per_s == pytest.approx(
        18 / 0.58
    )


def test_sampled_texts_are_not_compared() -> None:
    assert measured(OWNS, PLAINS, **{**ABOUT, "same_text": False}).identity is None


def test_the_first_text_that_parts_is_shown() -> None:
    other = trace_of([3, 3, 3], [0.6, 0.012, 0.012], tokens=[0, 1, 2, 3, 44, 55, 6, 7, 8])
    found = identity([OWNS[0], note(other, 1, 2, plain=PLAIN)], ["a", "b", "c"], TOKENIZER)
    assert (found.num_compared, found.num_identical) == (2, 1)
    assert found.first is not None
    assert (found.first.prompt, found.first.position) == ("c", 4)
    assert (found.first.plain[:2], found.first.own_text) == ([4, 5], "44 55 6 7 8")


def graded(
    own: list[bool | None], plain: list[bool | None], *, incomplete: int = -1
) -> tuple[list[RunNote], list[RunNote]]:
    mine = [note(OWN, 1, number, right=right) for number, right in enumerate(own)]
    theirs = [
        note(PLAIN, 0, number, right=right, complete=number != incomplete)
        for number, right in enumerate(plain)
    ]
    return mine, theirs


def test_right_answers_are_paired_by_prompt() -> None:
    found = accuracy(*graded([True, True, False, True, None], [True, False, False, False, True]))
    assert found is not None
    assert (found.num_graded, found.num_right, found.num_plain_right) == (4, 3, 1)
    assert found.p_value == pytest.approx(0.5)  # two coins the same way


def test_answers_that_were_cut_off_are_not_graded() -> None:
    found = accuracy(*graded([True, True], [False, True], incomplete=0))
    assert found is not None
    assert (found.num_graded, found.num_incomplete, found.p_value) == (1, 1, None)


def test_later_rounds_are_not_graded_again() -> None:
    mine, theirs = graded([True], [False])
    again = [*mine, note(OWN, 1, 0, turn=1, right=True)]
    found = accuracy(again, theirs)
    assert found is not None
    assert found.num_graded == 1


def test_nothing_to_grade() -> None:
    assert accuracy(*graded([None, None], [None, None])) is None
