"""Charges every token that a step could have emitted and did not to a cause (docs/explain.md, "Causes").
The parts add up exactly.

A step that asks for n levels of draft could emit n + 1 tokens (fewer where the text ends).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from outrider.lab.explain.distributions import Distributions
from outrider.lab.explain.explain_result import Place
from outrider.lab.runner import Step
from outrider.lazy import scipy

CAUSES = ("draft", "vocabulary", "filters", "stopped", "tree-budget", "length")


@dataclass
class Account:
    """All places of one text, and the tokens that its steps could have emitted."""

    places: list[Place]
    ideal: float


def account(
    steps: Sequence[Step], distributions: Iterable[Distributions], *, is_greedy: bool
) -> Account:
    """The account of a text; `distributions` of its positions in order, of which one step's are
    held at a time."""
    stream = iter(distributions)
    draws = not is_greedy and any(any(step.sampled or ()) for step in steps)
    length = sum(step.taken for step in steps)
    places: list[Place] = []
    ideal = 0.0
    ends: list[tuple[int, int, str]] = []  # (place, tokens lost, cause) of drafts that ended early
    for step in steps:
        points = list(islice(stream, step.taken))
        depth = _depth(step)
        could = min(depth + 1, length - step.start)
        ideal += could
        for level, (point, tested) in enumerate(zip(points, tested_tokens(step), strict=True)):
            place = _place(point, level, tested, level < len(step.path), draws)
            places.append(place)
            lost = could - level - 1
            if tested:
                if place.is_rejection and lost:
                    place.lost[_cause(point, tested, step.parents is not None)] = lost
            elif level < depth:
                cause = "tree-budget" if step.parents is not None and step.tokens else "stopped"
                if lost:
                    ends.append((len(places) - 1, lost, cause))
            elif length > step.start + level + 1 and place.keeps:
                place.lost["length"] = place.keeps
                ideal += place.keeps
    for index, lost, cause in ends:
        gain = _kept_along(places[index : index + lost], lost)
        places[index].lost = {cause: gain, "draft": lost - gain}
    return Account(places, ideal)


def tested_tokens(step: Step) -> list[list[int]]:
    """At every token that the step took: the draft tokens that were tested there, the kept one
    first."""
    tested = []
    for level, node in enumerate([-1, *step.path][: step.taken]):
        children = [child for child, parent in enumerate(step.parent_list) if parent == node]
        kept = step.path[level] if level < len(step.path) else None
        children.sort(key=lambda child: child != kept)
        tested.append([step.tokens[child] for child in children])
    return tested


def _depth(step: Step) -> int:
    """The levels that were asked for: of a tree, those that it has."""
    return step.asked if step.parents is None else max(step.num_levels, min(step.asked, 1))


def _cause(point: Distributions, tested: Sequence[int], is_tree: bool) -> str:
    token = point.token
    if point.outside is not None and point.outside[token]:
        return "vocabulary"
    if point.q is None:
        return "draft"
    if point.q_open is not None and point.q[token] == 0 < point.q_open[token]:
        return "filters"
    if any(point.p_soft[draft] == 0 < point.p_open[draft] for draft in tested):
        return "filters"
    likelier = set(np.flatnonzero(point.q > point.q[token]).tolist())
    return "tree-budget" if is_tree and likelier <= set(tested) else "draft"


def _kept_along(places: Sequence[Place], levels: int) -> float:
    """Expected tokens that an unbroken draft of these levels would have kept; all where that is not
    known."""
    if places[0].keeps is None:
        return float(levels)
    chances = np.array([place.keeps or 0.0 for place in places])
    return float(chances.cumprod().sum())


def _keeps(point: Distributions, draws: bool) -> float | None:
    """P(a draft token is kept here, given the text): of the draft's guess, or of a draw from q."""
    if point.q is None:
        return None
    if point.guess is not None:
        return float(point.guess == point.token)
    if not draws:
        return float(point.q_best == point.token)
    return float(min(1.0, point.q[point.token] / max(point.p_soft[point.token], 1e-30)))


def _place(
    point: Distributions, level: int, tested: list[int], is_kept: bool, draws: bool
) -> Place:
    p = point.p_soft
    q = point.q
    place = Place(
        token=point.token,
        level=level,
        tested=tested,
        is_kept=is_kept,
        keeps=_keeps(point, draws),
        p_token=float(p[point.token]),
        p_entropy=float(scipy.stats.entropy(p)),
    )
    if tested:
        place.p_draft = float(p[tested[0]])
        place.rank_draft = rank(p, tested[0])
    if q is not None:
        place.q_token = float(q[point.token])
        place.q_entropy = float(scipy.stats.entropy(q))
        place.rank_token = rank(q, point.token)
        place.disagreement = float(1 - np.minimum(p, q).sum())
        if tested:
            place.q_draft = float(q[tested[0]])
    return place


def rank(probs: np.ndarray, token: int) -> int:
    """1 for the likeliest; equals share the better rank."""
    return 1 + int((probs > probs[token]).sum())
