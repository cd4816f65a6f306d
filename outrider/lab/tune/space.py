"""The space of configurations. A *family* is a drafter with its options and a verifier; its members
differ in draft size alone, so that one run that sweeps over sizes tells about all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.configuration import PLAIN, Configuration
from outrider.errors import ConfigError
from outrider.lab.result import Record
from outrider.lab.runner import MAX_ROWS
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.sampling.params import SamplingParams

MIN_PROBED = 2  # prompts of a task


class TrainedHead(Record):
    """A trained part that takes part in `tune`, as results keep it. `drafts.py` reads its files."""

    # the drafter that drafts with it; ACCEPTANCE: a rule that ends the draft model's drafts
    kind: str
    folder: str  # as options name it; "": it comes with the target
    max_chain: int | None = None  # tokens of its longest chain; None: any number
    confidence: bool = False  # of a block head: it says when to stop
    markov: bool = False  # of a block head: its guesses depend on the token before
    masked: bool = False  # of an EAGLE-3 head: it drafts in one pass (P-EAGLE)

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


PLAIN_FAMILY = Family(Configuration(PLAIN), (1,), nested=True)


@dataclass(frozen=True)
class TuneRequest:
    """The user's request, and what there is to draft with. Raises ConfigError for one that makes no
    sense."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompts: int = 24  # most of each task
    batch_size: int = 1
    load_sizes: tuple[int, ...] = (4,)  # further batch sizes for the schedule
    finalists: int = 4  # families whose best member is confirmed
    seed: int = 0
    drafters: frozenset[str] = field(default_factory=frozenset)  # only these; empty: all
    trees: bool = True
    own_weights: bool = True  # quantised and early-exit drafts of the target itself
    corpus: str | None = None  # text to copy from
    most_share: float = 0.075  # of the cost of running everything on all prompts
    # next to `Options.draft`: folders of trained heads, or the draft model itself (`drafts.py`)
    drafts: tuple[str, ...] = ()
    # found by `choose_space`
    has_draft: bool = False  # a draft model is there
    heads: tuple[TrainedHead, ...] = ()  # trained for this target
    num_layers: int = 0  # of the target; 0: not known, so no exits are tried
    on_accelerator: bool = False  # a GPU: wide passes are cheap, so trees are larger

    def params(self, prompt: PreparedPrompt) -> SamplingParams:
        """Sampling parameters of a prompt, by its number."""
        return replace(self.sampling, max_tokens=prompt.max_tokens, seed=self.seed + prompt.number)

    def __post_init__(self) -> None:
        if self.prompts < 2 * MIN_PROBED:
            raise ConfigError(
                f"a task needs {2 * MIN_PROBED} prompts (--limit), to probe some and confirm with "
                f"others; got {self.prompts}"
            )
        sizes = (self.batch_size, *self.load_sizes)
        for what, number in (("batch sizes", min(sizes)), ("finalists", self.finalists)):
            if number < 1:
                raise ConfigError(f"{what} must be 1 or more, got {number}")
        if max(sizes) > MAX_ROWS:
            raise ConfigError(f"batch sizes must be at most {MAX_ROWS}, got {max(sizes)}")
        if not 0 < self.most_share <= 1:
            raise ConfigError(
                "the share of the exhaustive cost must be above 0 and at most 1, got "
                f"{self.most_share:g}"
            )
