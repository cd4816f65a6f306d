"""What could be tried. A *family* is a drafter with its options and a verifier; its members differ in draft size alone, so that
one run that sweeps over sizes tells about all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.drafters.base import LARGE_TREE, SMALL_TREE
from outrider.lab.configuration import PLAIN, Configuration

CHAIN_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
LOOKUP_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # copies cost nothing, so longer ones may pay
SLOW_SIZES = (1, 2, 3, 4, 5)  # of drafts that cost a good part of a target pass each
TREE_SIZES = (SMALL_TREE, LARGE_TREE)


@dataclass(frozen=True)
class Family:
    """`configuration` without a length, and the lengths (nodes) to choose from."""

    configuration: Configuration
    sizes: tuple[int, ...]
    nested: bool  # a draft asked for fewer nodes is the beginning of one asked for more: one sweep tells about all sizes
    needs_sampling: bool = False  # makes a difference for sampled rows only

    @property
    def label(self) -> str:
        return self.configuration.label

    def member(self, size: int | str) -> Configuration:
        return replace(self.configuration, num_draft_tokens=size)

    @property
    def largest(self) -> Configuration:
        return self.member(self.sizes[-1])

    def members(self) -> Iterator[tuple[int, Configuration]]:
        """(size, configuration) of all sizes."""
        return ((size, self.member(size)) for size in self.sizes)


PLAIN_FAMILY = Family(Configuration(PLAIN), (1,), nested=True)


def _family(
    drafter: str, sizes: Sequence[int], *, nested: bool = True, needs_sampling: bool = False, verifier: str = "auto",
    **options: Any,
) -> Family:  # fmt: skip
    return Family(Configuration(drafter, None, options, verifier), tuple(sizes), nested, needs_sampling)


@dataclass(frozen=True)
class Space:
    """Everything to be tried on one target."""

    families: tuple[Family, ...]

    @property
    def num_members(self) -> int:
        return sum(len(family.sizes) for family in self.families)


@dataclass(frozen=True)
class SpaceOptions:
    """What the user allows."""

    has_draft: bool  # a draft model with the target's tokenizer is there
    corpus: str | None = None  # text to copy from
    sampled: bool = False  # temperatures above 0 are wanted
    trees: bool = True
    own_weights: bool = True  # quantised and early-exit drafts of the target itself
    drafters: frozenset[str] = field(default_factory=frozenset)  # only these; empty: all


def default_space(options: SpaceOptions) -> Space:
    """Families worth a probe. `block`, the default verifier of chains, keeps at least as many tokens as `token` whatever the laws
    (Sun et al. 2403.10444), so `token` is left out; `gumbel` keeps others, and takes part where texts are sampled.
    Universal drafts and third parties' drafters take part when they are named to `tune`."""
    found: list[Family] = []
    if options.has_draft:
        found += [
            _family("draft-model", CHAIN_SIZES),
            _family("draft-model", CHAIN_SIZES, stop="entropy"),
            _family("draft-model", CHAIN_SIZES, needs_sampling=True, verifier="gumbel"),
            _family("composite", (SMALL_TREE, LARGE_TREE), nested=False, parts="draft-model,suffix"),
        ]
        if options.trees:
            found += [
                _family("draft-model", TREE_SIZES, nested=False, tree="best-first"),
                _family("draft-model", TREE_SIZES, nested=False, tree="sequoia"),
                _family("draft-model", TREE_SIZES, nested=False, needs_sampling=True, tree="sequoia", sample_from=99.0),
            ]
    found += [_family("ngram", LOOKUP_SIZES), _family("suffix", LOOKUP_SIZES)]
    if options.trees:
        found += [
            _family("ngram-cache", TREE_SIZES, nested=False),
            _family("recycling", TREE_SIZES, nested=False),
            _family("lookahead", (11,), nested=False),
        ]
    if options.corpus is not None:
        found.append(_family("retrieval", LOOKUP_SIZES, branches=1, corpus=options.corpus))
    if options.own_weights:
        found += [
            _family("early-exit", SLOW_SIZES),
            _family("quantised", SLOW_SIZES, bits=8),
            _family("quantised", SLOW_SIZES, bits=4),
        ]
    wanted = [one for one in found if options.sampled or not one.needs_sampling]
    return Space(tuple(one for one in wanted if not options.drafters or one.configuration.drafter in options.drafters))
