"""The interface of a drafter: five verbs, called by `decode.step`, never by each other.

    start(row)                  a new row joins at the end of the batch
    read(index, start, hidden)  a chunk of its prompt was fed to the target; only for drafters that want `signals`
    propose(rows, gamma)        guess up to gamma[b] tokens for each row; may return fewer, or none
    commit(rows, draft, verdict, output)   the step is over: forget rejected tokens, learn from emitted ones
    stop(index)                 the row at `index` leaves; the last row takes its place, in every `PerRow` of the drafter, too

A server asks for more, all of it optional: `prepare` (long texts in chunks), `pack` and `unpack`
(rows that leave and come back), `text_caches` (texts that begin alike).

A drafter decides what to propose from the committed text and its own distributions, never from the
value of the token it would propose (non-anticipation): that, and honest `Draft.probs`, is all it
takes to be lossless with every verifier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.models.loaded import LoadedModel, ModelMemory
from outrider.rows import PerRow, Row, Rows
from outrider.settings import NoSettings
from outrider.types import Draft, TargetOutput, Verdict

if TYPE_CHECKING:
    from outrider.kv import KVCache
    from outrider.models.lm import LM

# With the pending token a pass of 8 or 16 tokens, whole tiles of most kernels (ours for bf16 on CPU
# have no step there).
SMALL_TREE = 7
LARGE_TREE = 15

UNHEARD = frozenset(
    {
        "needs_draft",
        "needs_head",
        "needs_module",
        "drafts_trees",
        "wants_draft",
        "default_num_draft_tokens",
    }
)


@dataclass(frozen=True)
class DraftSetup:
    """The inputs for building a drafter."""

    target: LoadedModel
    draft: LoadedModel | None  # the model given with --draft
    num_draft_tokens: int  # the most nodes per row it will be asked for
    settings: Any = field(default_factory=NoSettings)  # an instance of the drafter's own `Settings`
    # folder of the trained head (`Settings.head`, or --draft), for drafters that require one
    head: str | None = None


class Drafter(ABC):
    """Base of all drafters; `outrider ls drafters` prints the class attributes."""

    name = ""  # in the table, once it is built by that name
    needs: ClassVar[str] = "nothing"  # in words, for `outrider ls NAME`
    requires: ClassVar[Requirements] = Requirements()  # whatever the settings are
    # the same texts in the same order get the same drafts: no clock decides, no network
    repeatable: ClassVar[bool] = True
    trained: ClassVar[bool] = False  # whether it needs training for this target
    shape: ClassVar[str] = "chain"  # what it can draft: "chain", "tree", "chain or tree"
    # knows what the committed tokens do not give back: a seeded text may depend on it
    learns: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    # what a step takes today is what it takes tomorrow on the same machine
    keeps_costs: ClassVar[bool] = True
    Settings: ClassVar[type] = NoSettings

    def __init_subclass__(cls) -> None:
        """Refuse a class that states its requirements in a way that nobody would read."""
        super().__init_subclass__()
        if unheard := sorted(UNHEARD & vars(cls).keys()):
            raise ConfigError(
                f"drafter class {cls.__name__} has {', '.join(unheard)}, which are never read: "
                "give it `requires = "
                "Requirements(...)`, or a class method `requirements(settings)` "
                "(docs/add-a-drafter.md)"
            )

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how this drafter works, one line each."""
        return []

    @property
    def longest_text(self) -> int | None:
        """Tokens of the longest text that its draft model drafts in; None: any, or there is none."""
        return None

    @property
    def counters(self) -> dict[str, float]:
        """Counters besides drafts, for /metrics: name -> a number that only grows; 'NAME/REASON'
        for one of several reasons. From any thread."""
        return {}

    @property
    def summary(self) -> list[str]:
        """Notes for the user when an answer is done, one line each."""
        return []

    @property
    def signals(self) -> tuple[int, ...]:
        """The target's hidden states it wants from every pass, by the keys of `models/signals.py`.
        Fixed once built."""
        return ()

    @property
    def runs_modules(self) -> bool:
        """Whether drafting runs modules of torch, whose operations several threads make faster."""
        return False

    @property
    def prefers_shared_noise(self) -> bool:
        """Whether sampled rows get more or cheaper drafts if shared noise (`gumbel`) verifies them
        than if nodes are drawn."""
        return False

    @property
    def model(self) -> LM | None:
        """The model whose distribution this drafter guesses from, in the target's token ids: given
        the text so far, its logits under the row's sampling options are the distribution after the
        next guess. None where there is no such model (`lab/explain`)."""
        return None

    def drafts_for(self, index: int) -> bool:
        """Whether the row at `index` may be drafted for at all, by its grammar, too."""
        return True

    def name_for(self, index: int) -> str:
        """The name under which its nodes for the row at `index` are counted."""
        return self.name or type(self).__name__

    def may_lose_nodes(self, index: int) -> bool:
        """Whether forced tokens may take the place of its nodes; not where it learns from the
        target's answer to each of them."""
        return not self.requires.logits

    @classmethod
    def requirements(cls, settings: Any) -> Requirements:
        """The requirements under these settings, the default draft length among them. Raises the
        errors that building with them would raise without a model."""
        heads = ((cls, settings.head),) if cls.requires.head and settings.head else ()
        return replace(cls.requires, heads=heads, trees=cls.shape == "tree")

    @classmethod
    def with_head(cls, options: dict[str, Any], part: str, folder: str) -> dict[str, Any]:
        """The drafter's options with the folder of a head, which drafter `part` drafts with."""
        return {**options, "head": folder}

    @classmethod
    def weigh_head(cls, head: str, target_config: Any, dtype: torch.dtype) -> ModelMemory:
        """The memory that this head (a folder) takes, from its files' headers. Raises
        CheckpointError when it does not fit the target; asked before any weight of the target is
        read. Bytes are 0 where a drafter cannot tell."""
        return ModelMemory(head, 0, 0)

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter:
        """Make one for this target. Raises ConfigError or CapabilityError before the first token."""
        return cls()

    def join(self, rows: Rows, row: Row) -> None:
        """`row` joins `rows` and this drafter. Raises what either raises, and then neither has
        anything of it."""
        index = rows.add(row)
        try:
            self.start(row)
        except BaseException:
            self.undo_start(index)
            rows.swap_remove(index)
            raise

    def start(self, row: Row) -> None:  # noqa: B027  stateless drafters need nothing
        """A row joins the batch as its last one."""

    def undo_start(self, num_rows: int) -> None:
        """Take back what a `start` that raised has left behind the first `num_rows` rows. This
        clears attributes of type `PerRow` and caches; drafters that keep more extend it."""
        for state in vars(self).values():
            if isinstance(state, PerRow):
                del state[num_rows:]
        for cache in self.caches:
            while cache.num_rows > num_rows:
                cache.swap_remove(num_rows)

    def read(self, index: int, start: int, hidden: dict[int, Tensor]) -> None:  # noqa: B027
        """The target was fed positions start .. start + T of the row at `index`; `hidden` has (T,
        H) for each of `signals`.

        Chunks come in order, before the row's first `propose`. They may begin after position 0:
        where keys and values came from a store, no pass was made and there is nothing to read.
        """

    def prepare(self, rows: Rows, gamma: list[int], budget: int) -> list[int]:
        """Before a `propose` that may ask for gamma[b] nodes: a model of its own reads what it
        lacks of those rows, in chunks and in turns, about `budget` tokens in all. Returns `gamma`,
        0 for the rows that are not read to their end yet.

        For callers with neighbours to think of (the engine); without it, `propose` reads all that
        is missing.
        """
        return gamma

    def unread(self, rows: Rows) -> list[int]:
        """Per row, tokens that `prepare` would have to read before something can be drafted for it."""
        return [0] * len(rows)

    def catch_up(self, rows: Rows, gamma: list[int]) -> None:  # noqa: B027
        """Right before a `propose` with the same gamma: it reads what steps without drafts left
        unread, which is no part of a draft's price."""

    @abstractmethod
    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        """A draft with at most gamma[b] nodes for row b."""

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:  # noqa: B027
        """Called after `rows` took the verdict on `draft`; `output` is the target's pass over it.

        Afterwards all state of a row equals a fresh start on its tokens (what is learned across
        rows excepted, `learns`).
        """

    def stop(self, index: int) -> None:
        """The row at `index` leaves by swap-remove, and with it what the drafter's attributes of
        type `PerRow` have of it.

        Drafters that keep more, like a cache of their own, extend this.
        """
        for state in vars(self).values():
            if isinstance(state, PerRow):
                state.swap_remove(index)

    def pack(self, index: int) -> Any:
        """Its state of the row at `index` that would otherwise have to be read again, for `unpack`;
        None: nothing is kept."""
        return None

    def unpack(self, state: Any) -> None:  # noqa: B027
        """The row that started last is the one that `pack` gave this for, with the same tokens."""

    @property
    def text_caches(self) -> list[KVCache]:
        """Its own keys and values of the rows' texts: row by row, position by position, made from
        nothing but the text so far. A caller may fill in the beginning of a row that has just
        started, from what it kept of another (`KVCache.read`, `put`)."""
        return []

    @property
    def caches(self) -> list[KVCache]:
        """All keys and values that it writes: broken numbers in them must go, for masked positions
        enter products, too."""
        return self.text_caches

    def close(self) -> None:  # noqa: B027
        """The process is done with this drafter: save what is to be kept."""


def start_all(drafters: Iterable[Drafter], row: Row, num_rows: int) -> None:
    """`row` joins all of these drafters, which have `num_rows` rows. Where one raises it leaves the
    others again."""
    started: list[Drafter] = []
    for drafter in drafters:
        try:
            drafter.start(row)
        except BaseException:
            drafter.undo_start(num_rows)
            for one in started:
                one.stop(num_rows)
            raise
        started.append(drafter)
