"""Look-ups grow their trees node by node: a smaller tree is the beginning of a larger one, as
`auto` takes for granted. (The suffix tree nearly so: which match it reads on from may depend on the
budget.)"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.lookup.ngram import NgramDrafter, NgramSettings
from outrider.drafters.lookup.ngram_cache import NgramCacheDrafter, NgramCacheSettings
from outrider.drafters.lookup.recycling import RecyclingDrafter, RecyclingSettings
from outrider.drafters.lookup.retrieval import RetrievalDrafter, RetrievalSettings
from outrider.drafters.lookup.suffix_array import SuffixArray
from outrider.rows import Rows
from tests.unit.drafters.fake_target import join, step

VOCAB = 6
MAX_NODES = 12
TEXT = np.random.default_rng(3).integers(0, VOCAB, 300)


def retrieval() -> Drafter:
    settings = RetrievalSettings(
        corpus=__file__, min_match=1, max_match=4, branches=3, min_share=0.0
    )
    return RetrievalDrafter(SuffixArray.build(TEXT), settings)


KINDS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(NgramSettings(min_ngram=1, tree=3)),
    "ngram-cache": lambda: NgramCacheDrafter(
        NgramCacheSettings(min_ngram=1, branches=3, min_probability=0.001)
    ),
    "recycling": lambda: RecyclingDrafter(VOCAB, MAX_NODES, RecyclingSettings(top_k=3)),
    "retrieval": retrieval,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_tree_is_the_beginning_of_a_larger_one(kind: str) -> None:
    drafter = KINDS[kind]()
    rows = Rows(VOCAB, torch.device("cpu"))
    join(drafter, rows, TEXT[:120].tolist())
    branching = 0
    for _ in range(8):
        largest = drafter.propose(rows, [MAX_NODES])
        assert largest.budgets == [list(range(1, largest.num_nodes + 1))]
        branching += largest.parents is not None
        for asked in range(MAX_NODES):
            smaller = drafter.propose(rows, [asked])
            length = smaller.lists[1][0]
            assert length == min(asked, largest.lists[1][0])
            assert smaller.lists[0][0] == largest.lists[0][0][:length]
            assert smaller.parent_lists[0] == largest.parent_lists[0][:length]
        step(drafter, rows, [MAX_NODES], lambda token: (5 * token + 2) % VOCAB)
    assert branching
