"""Whole replays: what is refused, orders of texts, what learning sees, what is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.configuration import Configuration
from outrider.drafters import DRAFTERS
from outrider.errors import CapabilityError, ConfigError, OutriderError
from outrider.lab.replay.replay import (
    default_configurations,
    replay,
    replayable_drafters,
    replayable_parts,
)
from outrider.lab.replay.texts import Text
from outrider.registry import Entry

PERIOD = list(range(2, 14))
RECORDED = Text([1, 20, 21], [*PERIOD, 40, 41])
TWICE = [RECORDED, RECORDED]


def taus(texts: list[Text], label: str = "suffix k=8") -> list[float | None]:
    return [text.stats.tau for text in replay(texts, Configuration.parse(label)).texts]


def test_drafters_are_sorted_by_what_they_need() -> None:
    """Catches a drafter that slips in although it learns from logits, and one left out that reads
    only text."""
    names = replayable_drafters()
    assert names == ["ngram", "suffix", "ngram-cache", "retrieval"]
    configurations, unusable = default_configurations()
    assert unusable == []
    assert [one.label for one in configurations] == ["ngram", "suffix", "ngram-cache"]
    for name in set(DRAFTERS.names()) - {"none", *names}:
        with pytest.raises(CapabilityError, match=r"more than text.* Replayable: ngram"):
            replayable_parts(Configuration(name))
    assert replayable_parts(Configuration("none")).length.max_nodes


def test_a_broken_drafter_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a package of somebody else's, or one that an extra would bring, that takes all other
    drafters with it."""
    monkeypatch.setitem(DRAFTERS._builtin, "absent", Entry("no.such:Drafter", "broken", "services"))
    assert replayable_drafters() == ["ngram", "suffix", "ngram-cache", "retrieval"]
    [absent] = default_configurations()[1]
    assert (
        "drafter 'absent' (no.such:Drafter) cannot be imported: No module named 'no'; pip install '.[services]'"
        in absent
    )
    with pytest.raises(ConfigError, match=r"'absent'.* cannot be imported"):
        replayable_parts(Configuration("absent"))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("draft-model", "needs more than text"),
        ("early-exit", "needs more than text"),
        ("recycling", "needs more than text"),
        ("composite parts=ngram+recycling", "needs more than text"),
        ("composite", "needs more than text"),
        ("ngram k=auto:6", "follows the clock.* k=6"),
        ("ngram verifier=typical", "'typical' keeps tokens"),
        ("sufix", "Did you mean 'suffix'"),
        ("ngram max_gram=3", "Did you mean 'max_ngram'"),
        ("retrieval", "needs a corpus"),
    ],
)
def test_refusals_say_why(label: str, message: str) -> None:
    """Catches a reason of another drafter, and a traceback."""
    with pytest.raises(OutriderError, match=message):
        replay(TWICE, Configuration.parse(label))


def test_texts_without_tokens_are_refused() -> None:
    """Catches a division by zero far from its cause."""
    for texts in ([], [RECORDED, Text([1], [])], [Text([], [1])]):
        with pytest.raises(ConfigError, match="replay"):
            replay(texts, Configuration("ngram"))


def test_who_learns_meets_the_texts_in_their_order() -> None:
    """Catches a memory that is lost between texts, or lives on in the next replay."""
    fresh, again = taus(TWICE)
    assert fresh is not None
    assert again is not None
    assert again > fresh + 1
    other = Text([30], [31, 32, 33, 34, 35])
    assert taus([RECORDED, other, RECORDED]) == [fresh, 1.0, again]


def test_what_is_not_learned_does_not_depend_on_its_neighbours() -> None:
    """Catches rows replayed together for speed that touch one another, and results of one text
    filed under another."""
    texts = [
        Text([1, 2, 3, 1, 2], [3, 1 + n % 3, 2, 3, *range(n % 5), 1, 2, 3, 1, 2, 3, 1])
        for n in range(40)
    ]
    for label in ("ngram", "ngram k=9 tree=true min_share=0"):
        together = replay(texts, Configuration.parse(label))
        for number in range(0, 40, 7):
            alone = replay([texts[number]], Configuration.parse(label)).texts[0]
            found = together.texts[number]
            assert (
                found.stats.steps,
                found.stats.drafted,
                found.stats.accepted_per_position,
                found.origins,
            ) == (
                alone.stats.steps,
                alone.stats.drafted,
                alone.stats.accepted_per_position,
                alone.origins,
            )


def test_a_replay_leaves_no_files(tmp_path: Path) -> None:
    """Catches a user's cache overwritten by texts that were only replayed."""
    cache = tmp_path / "cache.json"
    replay(TWICE, Configuration("suffix", drafter_options={"cache": str(cache)}))
    assert not cache.exists()
