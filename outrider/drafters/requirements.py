"""A drafter's requirements of models and of a step: its class states them for given settings,
before any model is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.models.loaded import ModelMemory

DEFAULT_NUM_DRAFT_TOKENS = 5
# tokens of drafting programs of which two make up any number to eight
LOOP_LENGTHS = (8, 5, 3, 2, 1)


def context_notes(head: str, known: int | None, held: int) -> list[str]:
    """Says that a head knows shorter texts (`known`; None: as long) than its target can hold."""
    if known is None or known >= held:
        return []
    return [
        f"head '{head}' knows {known} positions, its target {held}: beyond {known} nothing is drafted"
    ]


def lengths_for_any(max_tokens: int) -> tuple[int, ...]:
    """Tokens that the calls of recorded drafting loops make, which together make any number up to
    `max_tokens`.

    There are few, because each recording takes memory. They suffice for any number up to eight to
    take at most two calls and to waste no token. A further call costs as much as half a token of a
    small draft model."""
    return tuple(length for length in LOOP_LENGTHS if length <= max_tokens)


class DraftsWithHead(Protocol):
    """A class of drafters, as far as a trained head that its settings name is concerned."""

    @property
    def requires(self) -> Requirements: ...

    def weigh_head(self, head: str, target_config: Any, dtype: Any) -> ModelMemory: ...


@dataclass(frozen=True)
class Requirements:
    """The requirements of one drafter under given settings (`Drafter.requirements`), or under any
    (`Drafter.requires`)."""

    draft: bool = False  # --draft must name a model
    module: bool = False  # it runs on the target's own weights (`LoadedModel.module`)
    head: bool = False  # --draft, or the setting `head`, must name a head trained for this target
    head_in_target: bool = False  # that head is in the target's own checkpoint, where none is named
    # the part that drafts with a trained head, in a drafter made of several
    head_part: str | None = None
    # trained heads that settings name: who drafts with each, its folder
    heads: tuple[tuple[DraftsWithHead, str], ...] = ()
    logits: bool = False  # it learns from `TargetOutput.logits`, which another engine may not show
    tokenizer: bool = False  # it reads `LoadedModel.tokenizer` of the target
    # it drafts from what the caller expects the answer to be (`Row.prediction`)
    prediction: bool = False
    trees: bool = False  # its drafts are trees, which only some verifiers take
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS  # nodes per row when the user names no number
    loop: bool = False  # its chains can come from a recorded drafting loop (CUDA graphs)
    # several parts share a step's nodes, so each is asked for any number of them
    shares_nodes: bool = False

    @property
    def head_folder(self) -> str | None:
        """The folder of the head that drafts; None: there is none, or none was named."""
        return self.heads[0][1] if self.head and self.heads else None

    def loop_lengths(self, max_tokens: int, *, any_length: bool) -> tuple[int, ...]:
        """Tokens that the calls of a recorded drafting loop make, none: no loop is used.

        They are `max_tokens`, the fixed number, or `lengths_for_any` where the number differs from
        step to step."""
        if not self.loop:
            return ()
        return lengths_for_any(max_tokens) if any_length or self.shares_nodes else (max_tokens,)
