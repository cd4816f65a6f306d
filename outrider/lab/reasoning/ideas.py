"""What might improve on the best chain of the draft model. Each is one change that users ask about, in a word or two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outrider.drafters.base import LARGE_TREE, SMALL_TREE
from outrider.lab.configuration import Configuration

CHAIN = "draft-model"
COPIED = 8  # tokens of a look-up: they cost nothing
OWN = 3  # tokens of a draft that costs a good part of a target pass each


@dataclass(frozen=True)
class Idea:
    """One change."""

    configuration: Configuration
    what: str


def ideas(temperature: float, best: int, longest: int, num_layers: int, *, own_weights: bool) -> list[Idea]:
    """`best`: length of the chain to improve on. `own_weights`: greedy, also drafts made of the target's own weights, which take
    long."""
    found = [
        *_drafting(longest),
        *(_greedy_trees() if temperature == 0 else _sampled(best)),
        *(_own_weights(num_layers) if own_weights and temperature == 0 else []),
    ]
    return [Idea(Configuration.parse(text), what) for text, what in found]


def _drafting(longest: int) -> Iterator[tuple[str, str]]:
    yield f"{CHAIN} k={longest} stop=entropy", "stop drafting where the draft is unsure"
    yield f"suffix k={COPIED}", "copy from question and answer, no draft model"
    yield f"composite k={SMALL_TREE} parts={CHAIN}+suffix", "copies beside the draft model's guesses, in one tree"


def _greedy_trees() -> Iterator[tuple[str, str]]:
    for nodes in (SMALL_TREE, LARGE_TREE):
        yield f"{CHAIN} k={nodes} tree=best-first", f"several guesses: a tree of {nodes}, grown where the draft is sure"
    yield f"{CHAIN} k={LARGE_TREE} tree=sequoia", f"several guesses: a tree of {LARGE_TREE}, its shape planned beforehand"


def _sampled(best: int) -> Iterator[tuple[str, str]]:
    yield f"{CHAIN} k={best} verifier=token", "judge token by token instead of whole blocks"
    for nodes in (SMALL_TREE, LARGE_TREE):
        yield f"{CHAIN} k={nodes} tree=sequoia", f"several draws: a tree of {nodes}, its shape planned beforehand"


def _own_weights(num_layers: int) -> Iterator[tuple[str, str]]:
    if num_layers > 1:
        yield f"early-exit k={OWN} exit_layer={num_layers // 2}", "instead of a draft model, the target's first half"
    if num_layers > 3:
        yield f"early-exit k={OWN} exit_layer={num_layers * 3 // 4}", "the same with three quarters of the target"
    yield f"quantised k={OWN} bits=8", "a better draft that costs more: the target in 8 bits"
