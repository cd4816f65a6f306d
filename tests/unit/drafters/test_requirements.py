"""What drafters say of themselves before any model is read."""

from __future__ import annotations

import pytest

from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from outrider.drafters.heads.eagle import Eagle3Drafter, EagleSettings
from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.rows import Rows
from outrider.types import Draft


def test_a_flag_that_nobody_reads_is_refused() -> None:
    """Catches a drafter of trees, written for an earlier version, that a chain verifier would be
    given to."""
    with pytest.raises(
        ConfigError, match=r"Old has drafts_trees, needs_draft.*requirements\(settings\)"
    ):

        class Old(Drafter):
            needs_draft = True

            @classmethod
            def drafts_trees(cls, settings: object) -> bool:
                return True

            def propose(self, rows: Rows, gamma: list[int]) -> Draft:
                return Draft.empty(len(rows), rows.device)


def test_the_head_is_the_one_that_the_settings_name() -> None:
    assert Eagle3Drafter.requirements(EagleSettings()).head_folder is None
    named = Eagle3Drafter.requirements(EagleSettings(head="folder", tree="2x2"))
    assert (named.head, named.heads, named.head_folder) == (
        True,
        ((Eagle3Drafter, "folder"),),
        "folder",
    )
    assert (named.trees, named.num_draft_tokens, named.draft) == (True, 6, False)


def test_a_loop_serves_chains_of_a_draft_model_alone() -> None:
    """Catches loops recorded for trees, or for lengths that no step asks for."""
    kind = DRAFTERS.load("draft-model")
    chain = kind.requirements(kind.Settings())
    tree = kind.requirements(kind.Settings(tree="2x2"))
    assert chain.loop_lengths(4, any_length=False) == (4,)
    assert chain.loop_lengths(4, any_length=True) == (3, 2, 1)
    assert tree.loop_lengths(4, any_length=True) == ()
    assert Requirements(loop=True, shares_nodes=True).loop_lengths(8, any_length=False) == (
        8,
        5,
        3,
        2,
        1,
    )
    assert not Eagle3Drafter.requirements(EagleSettings()).loop
