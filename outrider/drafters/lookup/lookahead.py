"""Lookahead decoding: the target guesses for itself, in passes it makes anyway (Fu et al.
2402.02057).

Two kinds of guesses ride in every target pass, next to one another in one draft tree:

* the *window*: W columns of N - 1 tokens each. Column j starts j positions after the pending
  token, which begins column 0;
  everything else is guessed. A column's first token follows the first token of the column before,
  its other tokens follow one another. So a window token is an ordinary draft node at the position
  it guesses: it sees what it is meant to see, and it may even be accepted. The target's favourite
  after a column is the next Jacobi guess: the column drops its first token and takes that one in.
* the *candidates*: a column and its favourite are an n-gram of N tokens. A pool keeps the last G of
  them per first token;
  those that begin with the pending token are proposed.

Candidates have priority for nodes, the newest first; then come whole columns, from the left: what
does not fit waits. With fewer than N - 2 nodes the window never runs, and only the pool's n-grams
of the text itself are proposed. Guesses are the favourites of the raw logits, under sampling too: a
deterministic draft, so no distribution has to be known.

Everything is per row, so no row notices another one. But window and pool come from logits at
rejected nodes, which the committed text does not tell: a row that starts again in the middle of its
text starts with other guesses. Hence `learns`. Mathematics and costs: docs/algorithms/lookahead.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.drafters.base import SMALL_TREE, Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.errors import ConfigError
from outrider.rows import PerRow, Row, Rows
from outrider.runtime.top_tokens import TopTokens
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

MAX_NODES = 64  # the most nodes a row may have in a step
SPREAD = 2654435761  # odd and large: neighbouring columns begin far apart in the text


@checked()
@dataclass(frozen=True)
class LookaheadSettings:
    """A step has at most (N - 1) (W + G) - 1 nodes: 23 here, 55 with the paper's 5, 7, 7 for a GPU."""

    ngram: int = setting(
        3, "tokens of an n-gram (N): a column of the window holds N - 1", at_least=2
    )
    window: int = setting(8, "columns of the Jacobi window (W)", at_least=1)
    guesses: int = setting(4, "n-grams kept and proposed per first token (G)", at_least=1)
    pool_from_text: bool = setting(
        True, "also keep the n-grams of the prompt and of the committed text"
    )

    def __post_init__(self) -> None:
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                "lookahead: (ngram - 1) x (window + guesses) - 1 is the nodes of a step, at most "
                f"{MAX_NODES}, "
                f"got {self.num_nodes}; make one of them smaller"
            )

    @property
    def num_nodes(self) -> int:
        return (self.ngram - 1) * (self.window + self.guesses) - 1


class NgramPool:
    """For each first token, the last few n-grams that began with it."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        # first token -> the other tokens, oldest first
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Enter one, as the newest of its first token; the oldest goes when there are too many."""
        first, *rest = ngram
        known = self._rests.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self._num_kept:
            del known[next(iter(known))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The tokens that followed this token, newest first."""
        return list(reversed(self._rests.get(token, {})))


class GuessWindow:
    """W columns of N - 1 tokens, left to right; the first token of the first column is the pending
    token, no guess."""

    def __init__(self, num_columns: int, num_levels: int, text: Sequence[int]) -> None:
        self._shape = (num_columns, num_levels)
        self.columns: list[list[int]] = []
        self._refill(text)

    def plant(self, tree: TokenTree, budget: int) -> None:
        """Add the columns that fit whole. Where tokens agree, columns and candidates share nodes."""
        first = -1
        for index, column in enumerate(self.columns):
            if len(tree) + len(column) - (index == 0) > budget:
                return
            if index:
                first = tree.add(first, column[0])
            tree.add_path(column[1:], budget, parent=first)

    def ends(self, nodes: Mapping[tuple[int | None, int], int]) -> list[int | None]:
        """The node of each column's last token, given (parent, token) -> node; None for a column
        that was not drafted."""
        ends = []
        first: int | None = -1
        for index, column in enumerate(self.columns):
            if index:
                first = nodes.get((first, column[0]))
            node = first
            for token in column[1:]:
                node = nodes.get((node, token))
            ends.append(node)
        return ends

    def move(self, guesses: Sequence[int | None], num_taken: int, text: Sequence[int]) -> None:
        """Take in the new guesses, and follow the text, which grew by `num_taken` tokens.

        A column that took a guess dropped a token, so it starts one position later: after one new
        token all stand where they should, after more the leftmost columns lie in the past. A column
        without a guess waits as it is.
        """
        moved = [
            column if guess is None else [*column[1:], guess]
            for column, guess in zip(self.columns, guesses, strict=True)
        ]
        self.columns = moved[num_taken - 1 :]
        self._refill(text)

    def _refill(self, text: Sequence[int]) -> None:
        """New columns on the right: scattered pieces of the text, so that columns do not all say
        the same."""
        num_columns, num_levels = self._shape
        while len(self.columns) < num_columns:
            start = (len(text) + len(self.columns)) * SPREAD
            self.columns.append([text[(start + level) % len(text)] for level in range(num_levels)])
        self.columns[0][0] = text[-1]


class _Lookahead:
    """One row's window and pool."""

    def __init__(self, settings: LookaheadSettings, tokens: Sequence[int]) -> None:
        self._ngram = settings.ngram
        self._pools_text = settings.pool_from_text
        self._num_tokens = 0  # committed tokens seen so far
        self.pool = NgramPool(settings.guesses)
        self.window = GuessWindow(settings.window, settings.ngram - 1, tokens)
        self._read(tokens)

    def tree(self, pending: int, budget: int) -> TokenTree:
        tree = TokenTree()
        for candidate in self.pool.after(pending):
            tree.add_path(candidate, budget)
        self.window.plant(tree, budget)
        return tree

    def advance(self, guesses: Sequence[int | None], tokens: Sequence[int]) -> None:
        """`guesses`: the target's favourite after each column, None where the column was not
        drafted."""
        for column, guess in zip(self.window.columns, guesses, strict=True):
            if guess is not None:
                self.pool.add([*column, guess])
        self.window.move(guesses, len(tokens) - self._num_tokens, tokens)
        self._read(tokens)

    def _read(self, tokens: Sequence[int]) -> None:
        """Enter the n-grams of the text that were not complete before."""
        if self._pools_text:
            for end in range(max(self._num_tokens + 1, self._ngram), len(tokens) + 1):
                self.pool.add(tokens[end - self._ngram : end])
        self._num_tokens = len(tokens)


class LookaheadDrafter(Drafter):
    """Jacobi guesses and the n-grams they make, in the target's own passes."""

    shape = "tree"
    requires = Requirements(logits=True)
    learns = True
    Settings = LookaheadSettings

    def __init__(self, settings: LookaheadSettings, top_tokens: TopTokens | None = None) -> None:
        self._settings = settings
        self._top_tokens = top_tokens or TopTokens()
        self._rows = PerRow[_Lookahead]()

    @classmethod
    def requirements(cls, settings: LookaheadSettings) -> Requirements:
        return replace(
            super().requirements(settings), num_draft_tokens=min(settings.num_nodes, SMALL_TREE)
        )

    @classmethod
    def build(cls, setup: DraftSetup) -> LookaheadDrafter:
        """The drafter of these settings. Raises ConfigError when nothing could ever be drafted."""
        settings: LookaheadSettings = setup.settings
        if setup.num_draft_tokens < settings.ngram - 2 and not settings.pool_from_text:
            raise ConfigError(
                f"lookahead: the window needs at least ngram - 2 = {settings.ngram - 2} draft "
                "tokens, got "
                f"{setup.num_draft_tokens}; raise num_draft_tokens, lower ngram, or set "
                "pool_from_text"
            )
        return cls(settings, TopTokens(setup.target.lm.kernels))

    def start(self, row: Row) -> None:
        self._rows.append(_Lookahead(self._settings, row.tokens))

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = [
            state.tree(row.tokens[-1], budget)
            for state, row, budget in zip(self._rows, rows, gamma, strict=True)
        ]
        return to_draft(trees, rows.device)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        ends = [
            state.window.ends(nodes)
            for state, nodes in zip(self._rows, _nodes_by_parent(draft), strict=True)
        ]
        width = draft.num_nodes + 1
        asked = [
            index * width + node + 1
            for index, line in enumerate(ends)
            for node in line
            if node is not None
        ]
        best = iter(self._top_tokens.tokens(output.logits, asked, 1)[:, 0].tolist())
        for state, row, line in zip(self._rows, rows, ends, strict=True):
            state.advance([None if node is None else next(best) for node in line], row.tokens)


def _nodes_by_parent(draft: Draft) -> list[dict[tuple[int | None, int], int]]:
    """Per row, (parent, token) -> node."""
    return [
        {(parents[node], tokens[node]): node for node in range(length)}
        for parents, tokens, length in zip(draft.parent_lists, *draft.lists, strict=True)
    ]
