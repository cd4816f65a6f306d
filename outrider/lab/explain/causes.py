"""Charges every token that a step could have emitted and did not to a cause. The parts add up exactly.

A step that asks for n levels of draft could emit n + 1 tokens (fewer where the text ends). At every node of its kept path
one of two things happened:

    it had children, with b = P(one is kept) before they were drawn and the coins tossed.  Failing costs `lost` tokens, so
        (1 - kept) lost = [(1 - b) + (b - kept)] lost
        1 - b    what was to be expected: the draft's part, split further below
        b - kept    luck: 0 on average, whatever happened before (a martingale difference)
    it had none.  The draft ended: because the drafter stopped, because the tree has no node there, or because it was whole.

    1 - b = (1 - bound) + (bound - b)       bound: what the best lossless rule would keep of these children (`transport.py`)
    1 - bound = vocabulary + filters + tree budget + draft
        vocabulary     mass of p on tokens that the draft can never say
        filters        what top-k, top-p and min-p change: (1 - bound) with them less without them; negative where they help
        tree budget    what one more sibling would carry (trees only)
        draft          the rest: p and q disagree. For one drawn child all of it is their total variation, 1 - sum min(p, q)

b is the verifier's (`Verifier.kept_share`). Under block verification and traversal a node is entered with its path weight a, and
b is the share kept given that the path is: (1 - E[...]) / a of `sampling/kept.py`. Judging a drawn chain node by node keeps less
than the best rule for whole chains, which is block verification (Sun et al. 2403.10444): its nodes are weighted with W =
P(prefix kept by block) / P(kept by the verifier), so that the gap is unbiased, node by node possibly negative. Trees, and the
chains of a verifier that does not say how likely it keeps a token, are compared node by node, with the weight they are entered
with.

Greedy rows are the case p in {0, 1}: no luck, no gap. docs/explain.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.lab.explain.distributions import Distributions
from outrider.lab.explain.transport import bound_share
from outrider.lab.runner import Step
from outrider.sampling.kept import Children, child_weight
from outrider.verifiers.base import Verifier
from outrider.verifiers.multi_round import MultiRoundVerifier

DRAFT, VOCABULARY, FILTERS, STOPPED, TREE_BUDGET, LENGTH, VERIFIER, LUCK = range(8)
CAUSES = ("draft", "vocabulary", "filters", "stopped", "tree-budget", "length", "verifier", "luck")
FAINTEST = 1e-9  # path weight below which rounding would decide
# (position, levels, path weight, whether tokens are drawn) -> expected tokens kept of a draft that goes on; None: not known
GainAlong = Callable[[int, int, float, bool], float | None]


def judge_of(verifier: Verifier, *, is_greedy: bool) -> Verifier:
    """What decides on the rows of a run: on greedy rows all lossless verifiers decide alike."""
    return MultiRoundVerifier() if is_greedy else verifier


@dataclass(frozen=True)
class Ended:
    """A kept path that ended although more was asked for: what an unbroken draft would have brought is split later."""

    lost: int  # tokens
    weight: float  # path weight there
    cause: int
    drawn: bool


@dataclass
class Ledger:
    """The account of a step, of a text or of several; a row for each token, about the node before it."""

    parts: np.ndarray  # (n, causes) tokens lost there
    expected: np.ndarray  # (n,) b; NaN where nothing was tested
    lost: np.ndarray  # (n,) what failing there costs
    level: np.ndarray  # (n,) draft tokens kept before it in its step
    kept: np.ndarray  # (n,) 1 kept, 0 not, -1 nothing was tested
    ideal: float
    ended: list[tuple[int, Ended]] = field(default_factory=list)  # (position, what ended)

    @classmethod
    def joined(cls, ledgers: Sequence[Ledger]) -> Ledger:
        """One behind the other."""
        names = ("parts", "expected", "lost", "level", "kept")
        columns: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in ledgers]) for name in names}
        starts = np.cumsum([0, *(len(one.lost) for one in ledgers)]).tolist()
        ended = [(start + at, end) for start, one in zip(starts, ledgers, strict=False) for at, end in one.ended]
        return cls(**columns, ideal=sum(one.ideal for one in ledgers), ended=ended)

    def split_ends(self, gain_along: GainAlong) -> None:
        """Moves the part of an early end's cost that an unbroken draft would not have brought either to the draft."""
        for position, ended in self.ended:
            gain = gain_along(position, ended.lost, ended.weight, ended.drawn)
            if gain is not None:
                self.parts[position, ended.cause] -= ended.lost - gain
                self.parts[position, DRAFT] += ended.lost - gain

    @property
    def luck_variance(self) -> float:
        """The variance of the sum of luck, had the same tests been made: sum of lost^2 b (1 - b)."""
        b = np.nan_to_num(self.expected)
        return float((self.lost**2 * b * (1 - b)).sum())


@dataclass
class _PathWalk:
    """The state along a step's kept path."""

    weight: float = 1.0  # a: what the best rule would enter the node with
    ratio: float = 1.0  # W; 1 but for token-level rejection of drawn chains
    node: int = -1


@dataclass(frozen=True)
class Drafting:
    """What a step's record does not say."""

    verifier: Verifier  # of `judge_of`
    replacement: bool = False
    seed: int = 0  # of simulations
    draws: bool = False  # sampled rows: whether the drafter draws from its distribution where it is asked for one token more


def account(step: Step, distributions: Sequence[Distributions], remaining: int, drafting: Drafting) -> Ledger:
    """The account of one step. `distributions`: of the positions that it filled. `remaining`: tokens of the text from its start
    on."""
    tree = _Tree(step, drafting.replacement, draws=not distributions[0].is_greedy)
    ideal = min(tree.depth + 1, remaining)
    taken, nothing = step.taken, np.full(step.taken, np.nan)
    found = Ledger(np.zeros((taken, len(CAUSES))), nothing, np.zeros(taken), np.arange(taken), np.full(taken, -1), ideal)
    walk = _PathWalk()
    for level in range(taken):
        lost, point = ideal - level - 1, distributions[level]
        children = tree.children(walk.node)
        if children is None:
            _end(found, level, lost, point, walk, tree, drafting, remaining)
            break
        kept = tree.rank_of(step.path[level]) if level < len(step.path) else None
        found.kept[level], found.lost[level] = kept is not None, lost
        found.expected[level], found.parts[level] = _node(point, children, walk, kept is not None, tree, drafting)
        found.parts[level] *= lost
        if kept is None:
            break
        _enter(point, children, walk, kept, tree, drafting)
        walk.node = step.path[level]
    return found


class _Tree:
    """A step's draft as children of nodes."""

    def __init__(self, step: Step, replacement: bool, *, draws: bool) -> None:
        """`draws`: False for greedy rows, where a "drawn" token is the only one with mass, which is the same as placed."""
        self._step, self._replacement = step, replacement
        self._sampled = step.sampled if draws and step.sampled is not None else [False] * len(step.tokens)
        self.is_chain = step.parents is None
        self._parents, self.num_levels = step.parent_list, step.num_levels
        self._children: list[list[int]] = [[] for _ in range(len(self._parents) + 1)]
        for node, parent in enumerate(self._parents):
            self._children[parent + 1].append(node)
        self.depth = step.asked if self.is_chain else max(self.num_levels, min(step.asked, 1))

    @property
    def draws(self) -> bool:
        return any(self._sampled)

    def children(self, node: int) -> Children | None:
        """None for a leaf."""
        nodes = self._children[node + 1]
        if not nodes:
            return None
        return Children(
            [self._step.tokens[child] for child in nodes], [self._sampled[child] for child in nodes], self._replacement
        )

    def rank_of(self, node: int) -> int:
        """Among its siblings."""
        return self._children[self._parents[node] + 1].index(node)


def _node(
    point: Distributions, children: Children, walk: _PathWalk, kept: bool, tree: _Tree, drafting: Drafting
) -> tuple[float, np.ndarray]:
    """b, and the parts of 1 - kept."""
    verifier, judged = drafting.verifier, children
    if verifier.coupled and point.q is not None:  # the winners of a race are drawn from q, without replacement
        judged = Children(children.tokens, [True] * len(children.tokens))
    expected = verifier.kept_share(point.p, point.q, children, _weight(walk, verifier), drafting.seed)
    bound = bound_share(point.p, point.q, judged, walk.weight, drafting.seed)
    parts = np.zeros(len(CAUSES))
    opened = point.opened()
    reachable = bound if opened is point else bound_share(opened.p, opened.q, judged, walk.weight, drafting.seed)
    parts[FILTERS] = reachable - bound
    parts[VOCABULARY] = _outside(opened, judged)
    if not tree.is_chain and point.q is not None:
        parts[TREE_BUDGET] = _one_more(opened, judged, walk.weight, drafting.seed) - reachable
    parts[DRAFT] = 1 - reachable - parts[VOCABULARY] - parts[TREE_BUDGET]
    parts *= walk.ratio
    parts[VERIFIER] = (1 - expected) - walk.ratio * (1 - bound)
    parts[LUCK] = expected - kept
    return expected, parts


def _weight(walk: _PathWalk, verifier: Verifier) -> float:
    """What a node is entered with."""
    return walk.weight if verifier.judges_paths else 1.0


def _outside(point: Distributions, children: Children) -> float:
    if point.outside is None:
        return 0.0
    missing = point.outside.copy()
    missing[children.placed] = False
    return float(point.p[missing].sum())


def _one_more(point: Distributions, children: Children, weight: float, seed: int) -> float:
    """The bound with one more sibling: drawn where siblings are, else the draft's next favourite."""
    assert point.q is not None
    drawn, token = children.num_drawn > 0, -1
    if not drawn:
        rest = point.q.copy()
        rest[children.placed] = -1
        token = int(rest.argmax())
    more = Children([*children.tokens, token], [*children.drawn, drawn], children.replacement)
    return bound_share(point.p, point.q, more, weight, seed)


def _enter(point: Distributions, children: Children, walk: _PathWalk, kept: int, tree: _Tree, drafting: Drafting) -> None:
    """Take the weights along to the kept child."""
    verifier = drafting.verifier
    if point.is_greedy or verifier.coupled:
        return
    alone = None
    if tree.is_chain and tree.draws and not verifier.judges_paths:
        alone = verifier.token_share(point.p, point.q, children, kept)
    if alone is None and not verifier.judges_paths:
        return
    weight = max(child_weight(point.p, point.q, children, walk.weight, kept), FAINTEST)
    if alone is not None:
        walk.ratio *= weight / walk.weight / max(alone, FAINTEST)
    walk.weight = weight


def _end(
    found: Ledger, level: int, lost: int, point: Distributions, walk: _PathWalk, tree: _Tree, drafting: Drafting, remaining: int
) -> None:
    """The kept path has no child here."""
    drawn = tree.draws or (drafting.draws and not tree.num_levels)
    if level >= tree.depth:
        gain = _next_share(point, _weight(walk, drafting.verifier), drafting, drawn) if remaining > level + 1 else 0.0
        found.ideal += gain
        found.parts[level, LENGTH] = gain
    elif lost > 0:
        cause = STOPPED if tree.is_chain or not tree.num_levels else TREE_BUDGET
        found.ended.append((level, Ended(lost, _weight(walk, drafting.verifier), cause, drawn)))
        found.parts[level, cause] = lost


def _next_share(point: Distributions, weight: float, drafting: Drafting, drawn: bool) -> float:
    """P(one draft token more would have been kept)."""
    if point.q is None:
        return 0.0
    if point.guess is not None:
        return float(point.guess == point.token)
    if not drawn:
        return float(point.p[point.q_best])
    one = Children.one(drawn=True)
    return drafting.verifier.kept_share(point.p, point.q, one, weight, drafting.seed)
