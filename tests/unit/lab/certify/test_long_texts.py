"""Long texts: how many there are, which positions are tested together, and what a fault at late
positions does."""

from __future__ import annotations

import itertools

import pytest

from outrider.lab.certify.long_texts import BANDS, LATEST, bands_of, enough_prompts, long_texts
from outrider.lab.journal import Units
from outrider.sampling.params import SamplingParams
from tests.unit.lab.certify.conftest import PROMPTS, Open

WARM = SamplingParams(temperature=1.0)


@pytest.mark.parametrize("context", [40, 600, 5000])
@pytest.mark.parametrize("num_draws", [1, 80, 1000])
def test_texts_hold_enough_tokens_and_no_needless_text(context: int, num_draws: int) -> None:
    chosen = enough_prompts(PROMPTS, context, num_draws)
    # each band may lack one draw of a text
    rooms = [min(LATEST, context - len(prompt)) - BANDS for prompt in chosen]
    assert sum(rooms) >= BANDS * num_draws > sum(rooms[:-1])
    assert chosen[: len(PROMPTS)] == PROMPTS[: len(chosen)], "prompts take turns"


def test_bands_share_the_draws_evenly_and_leave_no_position_out() -> None:
    texts = [range(5, 805), range(9, 1000), range(4, 300)]
    bands = bands_of(texts, 400)
    assert (bands[0].first, bands[-1].last) == (4, 999)
    assert all(one.last + 1 == other.first for one, other in itertools.pairwise(bands))
    counts = [
        sum(
            len(range(max(text.start, band.first), min(text.stop, band.last + 1))) for text in texts
        )
        for band in bands
    ]
    assert len(counts) == BANDS
    assert max(counts) - min(counts) <= 2 * len(texts)
    assert min(counts) >= 400


def test_a_band_never_lacks_draws() -> None:
    """Catches bands that end within the draws of one position."""
    texts = [range(5, 605)] * 4
    counts = [4 * (band.last + 1 - band.first) for band in bands_of(texts, 599)]
    assert counts == [800, 800, 800]


def test_texts_that_end_early_make_fewer_bands() -> None:
    texts = [range(5, 105)] * 3
    assert [len(bands_of(texts, num)) for num in (60, 140, 300, 301)] == [4, 2, 1, 0]


def test_end_tokens_do_not_end_them(open_subject: Open) -> None:
    """Otherwise a model that likes to stop would leave late positions untested."""
    subject = open_subject()
    bands, drafted = long_texts(subject, "speculative", PROMPTS[:2], WARM, 100, 0, Units())
    context = subject.built.context
    assert bands[-1].last == min(LATEST + len(PROMPTS[0]), context) - 1
    drawn = sum(min(LATEST, context - len(prompt)) for prompt in PROMPTS[:2])
    *parts, whole = [band.table.num_draws for band in bands]
    assert sum(parts) == whole == drawn
    assert (bands[-1].first, bands[-1].last) == (bands[0].first, bands[-2].last)
    assert all(sum(counts["by id"]) > 100 for counts in drafted)
    assert subject.target.kv.num_rows == 0


@pytest.mark.usefixtures("broken")
def test_a_rule_that_errs_only_at_late_positions_is_found_there(open_subject: Open) -> None:
    """The first band is sound; with the draft at hand its preference shows the bias."""
    subject = open_subject(verifier="resamples-late")
    prompts = enough_prompts(PROMPTS, subject.built.context, 1000)
    bands, _ = long_texts(subject, "speculative", prompts, WARM, 1000, 0, Units())
    p_values = [band.table.preference().p_value for band in bands]  # type: ignore[union-attr]
    assert p_values[0] > 1e-3
    assert bands[0].last < 300
    assert min(p_values[1:]) < 1e-5
