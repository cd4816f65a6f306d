"""How an answer is followed along its prediction: together, apart, and together again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.composite import CompositeDrafter
from outrider.drafters.composite_settings import CompositeSettings
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.prediction import (
    MAX_POSITIONS,
    SURE,
    Alignment,
    PredictionDrafter,
    PredictionSettings,
)
from outrider.errors import ConfigError
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.types import TargetOutput
from outrider.verifiers.greedy import greedy_verdict
from tests.helpers import byte_tokenizer, make_row

PROMPT = [90, 91]
TEXT = list(range(1, 31))  # no token twice
BYTES = byte_tokenizer()


def after(prediction: Sequence[int], answer: Sequence[int], **options: int) -> Alignment:
    """Where a drafter is that followed the answer token by token."""
    alignment = Alignment(prediction, len(PROMPT), PredictionSettings(**options))
    for end in range(len(answer) + 1):
        alignment.update([*PROMPT, *answer[:end]])
    return alignment


def coming(prediction: Sequence[int], answer: Sequence[int], **options: int) -> list[int]:
    """The draft of four tokens behind this answer."""
    return list(after(prediction, answer, **options).coming(4))


def steps_for(
    prediction: Sequence[int] | None, answer: Sequence[int], gamma: int = 8
) -> DecodeStats:
    """The whole loop: a target that says `answer`, and what it took."""
    rows = Rows(400, torch.device("cpu"))
    drafter = PredictionDrafter()
    row = make_row([*PROMPT], SamplingParams(max_tokens=len(answer)))
    row.prediction = prediction
    rows.add(row)
    drafter.start(row)
    while not row.finish_reason:
        left = answer[len(row.output) :]
        draft = drafter.propose(rows, [row.clamp_draft(gamma)])
        logits = torch.zeros(1, draft.num_nodes + 1, 400)
        for column in range(draft.num_nodes + 1):
            logits[0, column, left[min(column, len(left) - 1)]] = 1.0
        verdict = greedy_verdict(draft, logits.argmax(dim=-1).tolist())
        rows.append(draft, verdict, logits)
        drafter.commit(rows, draft, verdict, TargetOutput(logits))
    assert row.output == list(answer)
    return row.stats


# ---------------------------------------------------------------- one position after another


def test_it_begins_at_the_beginning_and_goes_on() -> None:
    assert coming(TEXT, []) == [1, 2, 3, 4]
    assert coming(TEXT, TEXT[:10]) == [11, 12, 13, 14]


def test_behind_the_end_there_is_nothing() -> None:
    assert coming(TEXT, TEXT[:28]) == [29, 30]
    assert coming(TEXT, TEXT) == []
    assert coming(TEXT, [*TEXT, 77, 78]) == []


def test_a_replaced_token_is_passed_over_at_once() -> None:
    """The commonest edit: the draft goes on behind it without a step in between."""
    assert coming(TEXT, [*TEXT[:9], 77]) == [11, 12, 13, 14]


def test_a_second_foreign_token_ends_the_guess() -> None:
    """Catches drafts that walk on beside a long insertion, wrong at every step."""
    assert coming(TEXT, [*TEXT[:9], 77, 78]) == []
    assert coming(TEXT, [*TEXT[:9], 77, 78, 79]) == []


def test_an_insertion_is_left_where_the_old_text_goes_on() -> None:
    assert coming(TEXT, [*TEXT[:9], 77, 78, 79, 10]) == [11, 12, 13, 14]


def test_one_inserted_token_costs_one_wrong_guess_only() -> None:
    """The guess "replaced" was wrong: the position it left is still ahead of the last sure one."""
    assert coming(TEXT, [*TEXT[:9], 77, 10]) == [11, 12, 13, 14]


def test_a_deletion_is_jumped_over() -> None:
    assert coming(TEXT, [*TEXT[:9], 12]) == [13, 14, 15, 16]


def test_a_single_token_counts_nearby_only() -> None:
    """Token 28 is 19 positions ahead: two tokens must agree there, unless set otherwise."""
    answer = [*TEXT[:9], 77, 78, 28]
    assert coming(TEXT, answer) == []
    assert coming(TEXT, answer, near=30) == [29, 30]
    assert coming(TEXT, [*answer, 29]) == [30]
    assert coming(TEXT, [*answer, 29], min_match=3) == []
    assert coming(TEXT, [*TEXT[:9], 77, 78, 10], near=0) == []


def test_the_longest_agreement_wins_then_the_nearest() -> None:
    """Three lines have the same words in the middle: the next one in order is meant, unless the
    text says more."""
    lines = [1, 50, 51, 11, 2, 50, 51, 12, 3, 50, 51, 13]
    assert coming(lines, [1, 50, 51, 11, 77, 78, 50]) == [51, 12, 3, 50]
    assert coming(lines, [1, 50, 51, 11, 77, 78, 3], near=0) == []
    assert coming(lines, [1, 50, 51, 11, 77, 78, 3, 50], near=0) == [51, 13]


def test_a_moved_part_is_found_behind() -> None:
    """The second half comes first: then the position behind is found where SURE tokens agree, not
    before."""
    answer = [*TEXT[15:], *TEXT[:15]]
    assert coming(TEXT, answer[:1]) == [17, 18, 19, 20]
    assert coming(TEXT, answer[: 15 + SURE - 1]) == []
    assert coming(TEXT, answer[: 15 + SURE]) == [5, 6, 7, 8]


def test_a_chance_agreement_does_not_lose_the_position() -> None:
    """Two tokens agree far ahead, then the text goes on where it was. Catches an anchor that
    follows every agreement."""
    prediction = [*TEXT, 200, 201]
    answer = [*TEXT[:9], 200, 201, 10]
    assert coming(prediction, [*TEXT[:9], 77, 78, 200, 201]) == []
    assert coming(prediction, answer) == [11, 12, 13, 14]


def test_a_prediction_that_begins_with_the_prompt_is_entered_behind_it() -> None:
    """The whole file is predicted, and its beginning is the prompt."""
    alignment = Alignment([5, *PROMPT, 1, 2, 3], 2, PredictionSettings())
    alignment.update([*PROMPT, 1])
    assert list(alignment.coming(4)) == [2, 3]


@pytest.mark.parametrize("prediction", [[], [200, 201, 202]])
def test_nothing_in_common_is_nothing_lost(prediction: list[int]) -> None:
    """An empty prediction drafts nothing; an unrelated one a few tokens at the start and never
    again."""
    stats = steps_for(prediction, TEXT)
    assert stats.accepted == 0
    assert stats.drafted <= 2 * len(prediction)
    assert stats.steps == len(TEXT)


def test_no_prediction_drafts_nothing() -> None:
    assert steps_for(None, TEXT).drafted == 0


# ---------------------------------------------------------------- whole answers


def test_a_right_prediction_is_read_out() -> None:
    """9 tokens a step, to the last one."""
    stats = steps_for(TEXT, TEXT)
    assert (stats.accepted, stats.drafted, stats.steps) == (26, 26, 4)


@pytest.mark.parametrize(
    "edited",
    [
        pytest.param(TEXT[:12], id="prefix"),
        pytest.param([*TEXT[:10], 77, *TEXT[11:]], id="replaced"),
        pytest.param([*TEXT[:10], 77, 78, 79, *TEXT[10:]], id="inserted"),
        pytest.param([*TEXT[:10], *TEXT[15:]], id="deleted"),
        pytest.param([77, 78, *TEXT], id="before"),
        pytest.param([*TEXT, 77, 78], id="behind"),
        pytest.param([*TEXT[20:], *TEXT[:20]], id="moved"),
    ],
)
def test_edits_cost_a_few_steps(edited: list[int]) -> None:
    """Plain decoding takes a step per token; a copy of nine at a time with one edit in it, a few
    more than a ninth of that."""
    stats = steps_for(TEXT, edited)
    assert stats.steps <= len(edited) / 9 + 7


def test_multibyte_text_with_an_edit_inside_a_character() -> None:
    """Tokens are bytes: 'é' becomes 'è', which share their first one; nothing of what follows is
    lost or drafted wrongly."""
    before, answer = (
        BYTES(text)["input_ids"]
        for text in ("naïve café, 日本語 😀 fin", "naïve cafè, 日本語 😁 fin")
    )
    assert len(before) == len(answer)
    changed = [
        position
        for position, (old, new) in enumerate(zip(before, answer, strict=True))
        if old != new
    ]
    for position in changed:
        found = after(before, answer[: position + 1]).coming(3)
        assert list(found) == before[position + 1 : position + 4]
    assert steps_for(before, answer).steps <= len(answer) / 9 + len(changed) + 1


TOKENS = st.lists(st.integers(1, 6), max_size=40)


@settings(max_examples=200, deadline=None)
@given(prediction=TOKENS, answer=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_steps_leave_no_trace(prediction: list[int], answer: list[int], cuts: list[int]) -> None:
    """Commit is total: however the answer arrived, one that starts on it now is at the same
    position, to the last field."""
    bursts = Alignment(prediction, len(PROMPT), PredictionSettings())
    for end in sorted({min(cut, len(answer)) for cut in cuts} | {len(answer)}):
        bursts.update([*PROMPT, *answer[:end]])
    assert vars(bursts) == vars(after(prediction, answer))
    once = Alignment(prediction, len(PROMPT), PredictionSettings())
    once.update([*PROMPT, *answer])
    assert vars(bursts) == vars(once)


@settings(max_examples=200, deadline=None)
@given(prediction=TOKENS, answer=TOKENS)
def test_a_position_is_in_the_prediction(prediction: list[int], answer: list[int]) -> None:
    """Catches an index off its end, and a draft that is no part of the prediction."""
    found = after(prediction, answer)
    if found.position is not None:
        assert 0 <= found.position <= len(prediction) + 1
        assert list(found.coming(5)) == prediction[found.position : found.position + 5]


def test_a_departure_looks_at_so_many_positions_only() -> None:
    """Catches a step whose cost grows with the prediction. The positions looked at are the nearest
    ones."""
    looked: list[int] = []

    class Watched(Alignment):
        def _agreement(self, tokens: Sequence[int], end: int, position: int) -> int:
            looked.append(position)
            return super()._agreement(tokens, end, position)

    alignment = Watched([7] * 5000, len(PROMPT), PredictionSettings(near=0))
    alignment.update([*PROMPT, *[7] * 1000, 1, 1, 7])
    assert len(looked) <= 2 * MAX_POSITIONS
    assert {1001, 1000} <= set(looked)


# ---------------------------------------------------------------- the drafter


def test_rows_follow_predictions_of_their_own() -> None:
    """Budgets, rows without a prediction, and rows that leave by swap."""
    rows = Rows(100, torch.device("cpu"))
    drafter = PredictionDrafter()
    for prediction in ([1, 2, 3], None, [4, 5, 6], [7, 8]):
        row = make_row(PROMPT, SamplingParams(max_tokens=20))
        row.prediction = prediction
        rows.add(row)
        drafter.start(row)
    draft = drafter.propose(rows, [2, 4, 3, 0])
    assert draft.lengths.tolist() == [2, 0, 3, 0]
    assert draft.tokens.tolist() == [[1, 2, 0], [0, 0, 0], [4, 5, 6], [0, 0, 0]]
    assert draft.parents is None
    rows.swap_remove(0)
    drafter.stop(0)
    assert drafter.propose(rows, [3, 3, 3]).tokens.tolist() == [[7, 8, 0], [0, 0, 0], [4, 5, 6]]


def test_a_composite_takes_a_prediction_where_a_part_does() -> None:
    chosen = CompositeSettings(parts="prediction,ngram", mode="best")
    assert CompositeDrafter.requirements(chosen).prediction
    assert not CompositeDrafter.requirements(CompositeSettings(parts="suffix,ngram")).prediction
    assert not NgramDrafter.requirements(NgramDrafter().Settings()).prediction


@pytest.mark.parametrize(
    ("options", "name"),
    [({"min_match": 1}, "min_match"), ({"min_match": 9}, "min_match"), ({"near": -1}, "near")],
)
def test_settings_are_checked(options: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PredictionSettings(**options)
