"""What prompt lookup copies."""

from __future__ import annotations

import pytest

from outrider.drafters.ngram import NgramDrafter, _Index
from outrider.errors import ConfigError


def _copy(text: list[int], count: int, low: int = 2, high: int = 4) -> list[int]:
    index = _Index(low, high)
    index.update(text)
    return index.continuation(text, count)


def test_most_recent_match_wins() -> None:
    """The first occurrence (the original's choice) would copy 7 here; what was said last is likelier."""
    assert _copy([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_longest_match_wins_over_a_more_recent_short_one() -> None:
    """Catches sizes tried in the wrong order."""
    assert _copy([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 1, low=2, high=3) == [7]


def test_copy_that_reaches_the_end_goes_on_with_itself() -> None:
    """Short copies are useful: a period is continued, not cut off."""
    assert _copy([1, 2, 3, 1, 2], 5) == [3, 1, 2, 3, 1]


def test_nothing_is_proposed_without_a_match() -> None:
    """The end of the text must not match itself."""
    assert _copy([1, 2, 3, 4, 5], 4) == []


def test_incremental_index_equals_a_fresh_one() -> None:
    """Commit is total: catches an update that forgets the n-grams across the seam."""
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 3, 3, 1]
    grown = _Index(2, 3)
    for end in range(1, len(text) + 1):
        grown.update(text[:end])
    fresh = _Index(2, 3)
    fresh.update(text)
    assert grown.__dict__["_next"] == fresh.__dict__["_next"]


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_ngram"):
        NgramDrafter(min_ngram=3, max_ngram=2)
