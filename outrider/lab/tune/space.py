"""The space of configurations. A *family* is a drafter with its options and a verifier; its members
differ in draft size alone, so that one run that sweeps over sizes tells about all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.configuration import PLAIN, Configuration
from outrider.lab.result import Record


class TrainedHead(Record):
    """A trained part that takes part in `tune`, as results keep it. `drafts.py` reads its files."""

    # the drafter that drafts with it; ACCEPTANCE: a rule that ends the draft model's drafts
    kind: str
    folder: str  # as options name it; "": it comes with the target
    max_chain: int | None = None  # tokens of its longest chain; None: any number
    confidence: bool = False  # of a block head: it says when to stop
    markov: bool = False  # of a block head: its guesses depend on the token before

    @property
    def options(self) -> dict[str, Any]:
        """Options of the drafter that drafts with this head."""
        return {"head": self.folder} if self.folder else {}


@dataclass(frozen=True)
class Family:
    """`configuration` without a length, and the lengths (nodes) to choose from."""

    configuration: Configuration
    sizes: tuple[int, ...]
    # a draft asked for fewer nodes is the beginning of one asked for more: one sweep tells about
    # all sizes
    nested: bool

    @classmethod
    def of(
        cls,
        drafter: str,
        sizes: Sequence[int],
        *,
        nested: bool = True,
        verifier: str = "auto",
        **options: Any,
    ) -> Family:
        """`options`: of the drafter."""
        return cls(Configuration(drafter, None, options, verifier), tuple(sizes), nested)

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


def num_members(families: Sequence[Family]) -> int:
    """The number of members of all families."""
    return sum(len(family.sizes) for family in families)


PLAIN_FAMILY = Family(Configuration(PLAIN), (1,), nested=True)


@dataclass(frozen=True)
class SpaceOptions:
    """The available drafts and the user's limits."""

    has_draft: bool  # a draft model is there
    heads: tuple[TrainedHead, ...] = ()  # trained for this target
    corpus: str | None = None  # text to copy from
    temperature: float = 0.0
    trees: bool = True
    own_weights: bool = True  # quantised and early-exit drafts of the target itself
    num_layers: int = 0  # of the target; 0: not known, so no exits are tried
    on_accelerator: bool = False  # a GPU: wide passes are cheap, so trees are larger
    drafters: frozenset[str] = field(default_factory=frozenset)  # only these; empty: all

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0
