"""What reading a prompt into a draft model costs, told to the control of whoever drafts for the row."""

from __future__ import annotations

import pytest

from outrider.engine.reading_price import ReadingPrice, ReadingPrices
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from tests.helpers import make_row


def row(number: int, prompt: int, drafter: str | None = None) -> Row:
    one = make_row([0] * prompt, SamplingParams(max_tokens=100), number=number)
    one.drafter = drafter
    return one


def end(one: Row, said: int) -> None:
    one.tokens += [0] * said
    one.finish_reason = "length"


def test_nothing_is_known_before_a_text_was_read_and_one_ended() -> None:
    price = ReadingPrice()
    assert price.seconds_per_token == 0
    price.read(200, 0.02)
    assert price.seconds_per_token == 0
    price.ended(200, 50)
    assert price.seconds_per_token == pytest.approx(200 / 50 * 1e-4)


def test_it_follows_the_texts() -> None:
    price = ReadingPrice()
    for tokens in [*[100] * 50, *[400] * 100]:
        price.read(tokens, tokens * 1e-4)
        price.ended(tokens, 100)
    assert price.seconds_per_token == pytest.approx(4e-4, rel=0.02)


def test_each_row_counts_once_with_what_was_unread_when_it_joined() -> None:
    """Whether it was read in one step, in several or never: what drafting would cost does not depend on it."""
    prices, rows = ReadingPrices(), [row(0, 300), row(1, 100)]
    for left in ([300, 100], [100, 0], [0, 0]):  # read in two steps
        prices.joined(rows, left)  # type: ignore[arg-type]
        prices.read(rows, [max(0, count - 200) for count in left], sum(min(count, 200) for count in left) * 1e-4)  # type: ignore[arg-type]
        assert prices.ended(rows) == {}  # type: ignore[arg-type]
    for one in rows:
        end(one, 40)
    assert prices.ended(rows) == {None: pytest.approx(400 / 80 * 1e-4, rel=0.03)}  # type: ignore[arg-type]
    unread = [row(2, 400), row(3, 400)]
    prices.joined(unread, [400, 400])  # type: ignore[arg-type]
    for one in unread:
        end(one, 40)
    assert prices.ended(unread)[None] > 400 / 80 * 1e-4  # type: ignore[arg-type]


def test_rows_that_are_never_drafted_for_do_not_count() -> None:
    prices, off = ReadingPrices(), row(0, 5000)
    off.draft_bound, off.draft_fixed = 0, True
    rows = [off, row(1, 100)]
    prices.joined(rows, [5000, 100])  # type: ignore[arg-type]
    prices.read(rows, [5000, 0], 0.01)  # type: ignore[arg-type]
    for one in rows:
        end(one, 50)
    assert prices.ended(rows) == {None: pytest.approx(100 / 50 * 1e-4)}  # type: ignore[arg-type]


def test_a_row_that_left_unfinished_is_forgotten() -> None:
    """Cancelled or parked; one that comes back brings what its drafter knew, and has little left to read."""
    prices, one = ReadingPrices(), row(0, 300)
    prices.joined([one], [300])  # type: ignore[arg-type]
    prices.read([one], [0], 0.03)  # type: ignore[arg-type]
    prices.joined([row(1, 100)], [100])  # type: ignore[arg-type]
    prices.joined([one], [1])  # type: ignore[arg-type]
    end(one, 50)
    assert prices.ended([one]) == {None: pytest.approx(1 / 50 * 1e-4)}  # type: ignore[arg-type]


def test_what_is_unread_is_known_in_seconds() -> None:
    """By drafter; nothing before its pace was seen, and nothing of rows without drafts."""
    prices, off = ReadingPrices(), row(2, 900, "model")
    off.draft_bound, off.draft_fixed = 0, True
    rows = [row(0, 300, "model"), row(1, 300, "copy"), off]
    prices.joined(rows, [300, 0, 900])  # type: ignore[arg-type]
    assert prices.unread_seconds(rows) == {"model": 0, "copy": 0}  # type: ignore[arg-type]
    prices.read(rows, [100, 0, 900], 0.02)  # type: ignore[arg-type]
    prices.joined(rows, [100, 0, 900])  # type: ignore[arg-type]
    assert prices.unread_seconds(rows) == {"model": pytest.approx(0.01), "copy": 0}  # type: ignore[arg-type]


def test_every_drafter_has_its_own_price() -> None:
    """A look-up reads nothing; the model beside it does, in the same step."""
    prices, rows = ReadingPrices(), [row(0, 300, "model"), row(1, 300, "copy")]
    prices.joined(rows, [300, 0])  # type: ignore[arg-type]
    prices.read(rows, [0, 0], 0.03)  # type: ignore[arg-type]
    for one in rows:
        end(one, 30)
    assert prices.ended(rows) == {"model": pytest.approx(1e-3), "copy": 0.0}  # type: ignore[arg-type]
