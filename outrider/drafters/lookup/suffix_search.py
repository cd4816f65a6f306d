"""From the points where a text's ends stand in a suffix tree to the most promising guess: the other
half of suffix decoding.

Each match length m of the text's end is a point to read on from. What follows is taken best first
by the probability of its path, at most alpha * m + beta tokens, nothing below `min_probability`.
The sum of the path probabilities is the number of tokens expected to be accepted: the score by
which match lengths, and trees, are compared.

A token seen c times out of n after m equal tokens gets the probability

    (c - discount / sqrt(m)) / n

The paper's c / n is certain of whatever was seen once; measured, that comes true every fourth time
after one equal token, three times of four after eight. So counts are discounted, as n-gram language
models do, and less after a longer match; every token of the guess lengthens it.
docs/algorithms/suffix.md has the measurement.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.drafters.lookup.suffix_tree import END, Point, SuffixNode, likeliest
from outrider.trees.token_tree import TokenTree


@dataclass(frozen=True)
class SearchRule:
    """How far and how wide to read on."""

    width: int  # children followed per node; 1 makes chains
    alpha: float  # at most alpha * m + beta tokens after a match of m
    beta: float
    min_probability: float
    discount: float


class Guess(NamedTuple):
    """Nodes and, for each, the estimated probability that it and all its ancestors are accepted.
    Never rising along a path."""

    tree: TokenTree
    survival: list[float]

    @property
    def score(self) -> float:
        """Expected number of accepted tokens."""
        return sum(self.survival)


class Match(NamedTuple):
    """A point to read on from: the text's last `length` tokens end here, and `seen` times something
    followed."""

    node: SuffixNode
    passed: int
    length: int
    seen: int


def best_guess(
    points: Sequence[Point], max_depth: int, budget: int, rule: SearchRule, *, from_row: bool
) -> Guess:
    """The guess of at most `budget` nodes with the highest score, over the match lengths of
    `points` (longest first).

    `from_row`: the points are those of the tree's own growing text, whose ends are counted in the tree
    though nothing followed them yet. Match lengths are tried from the longest; a shorter one only
    where it was seen twice as often as the last one tried (with the same count it has the same
    continuations), and only while it could still win.
    """
    best = Guess(TokenTree(), [])
    tried = 0
    for match in _matches(points, from_row):
        cap = min(budget, int(rule.alpha * match.length + rule.beta))
        if cap <= best.score:
            break  # so do all shorter ones
        # beyond that the tree's depth would cut the guess
        deep_enough = match.length <= max(1, max_depth - budget)
        if deep_enough and match.seen >= 2 * tried:
            guess = read_on(match, cap, rule)
            tried = match.seen
            if guess.score > best.score:
                best = guess
    return best


def _matches(points: Sequence[Point], from_row: bool) -> Iterator[Match]:
    """Longest first, with the number of times something is known to have followed."""
    # suffixes that stand on this edge no further than the point in hand
    waiting: dict[SuffixNode, int] = {}
    if from_row:
        for node, _ in points:
            waiting[node] = waiting.get(node, 0) + 1
    for index, (node, passed) in enumerate(points):
        seen = node.count - waiting.get(node, 0)
        if from_row:
            waiting[node] -= 1
        yield Match(node, passed, len(points) - index, seen)


def read_on(match: Match, budget: int, rule: SearchRule) -> Guess:
    """The likeliest `budget` nodes below a match, best first."""
    tree = TokenTree()
    survival = list[float]()
    # (-survival, tie, parent, token, match); ties: the earlier, i.e. the shallower and more
    # frequent one
    waiting: list[tuple[float, int, int, int, Match]] = []
    parent = -1
    reached = match
    probability = 1.0
    order = 0
    while True:
        for token, chance, following in _step(reached, rule):
            if probability * chance >= rule.min_probability:
                order += 1
                heapq.heappush(waiting, (-probability * chance, order, parent, token, following))
        if not waiting or len(tree) >= budget:
            return Guess(tree, survival)
        negative, _, above, token, reached = heapq.heappop(waiting)
        probability = -negative
        parent = tree.add(above, token)
        survival.append(probability)


def _step(match: Match, rule: SearchRule) -> list[tuple[int, float, Match]]:
    """(token, its probability, the match after it) for what followed here."""
    node, passed, length, seen = match
    discount = rule.discount / math.sqrt(length)
    if passed == node.end - node.start:
        return [
            (
                child.text[child.start],
                (child.count - discount) / seen,
                Match(child, 1, length + 1, child.count),
            )
            for child in likeliest(node, rule.width)
        ]
    position = node.start + passed
    if position >= len(node.text) or node.text[position] == END:
        return []
    return [
        (node.text[position], (seen - discount) / seen, Match(node, passed + 1, length + 1, seen))
    ]
