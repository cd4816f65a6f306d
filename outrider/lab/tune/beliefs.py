"""What forecasts and laps together say about speedups: a Gaussian belief about the logarithms of all of them at once.

    before a lap     log speedup(c) = forecast(c) + error of all forecasts + error of c's family + error of c
    a lap            log seconds per token(c, group) = level of the group - log speedup(c)
                                                       + how these prompts suit c's drafter + noise

Errors of forecasts are shared by what they share a cause with: all sizes of a family have the same drafter, so a lap of one
teaches about the others, and of many noisy numbers the largest is not simply believed. What a group of prompts has in common
(its texts, how fast the machine was then) is unknown and divides out: laps are compared within groups, all of which plain
decoding runs, too. Which drafter suits a group is shared by all who draft alike, so three sizes of one drafter on ten prompts
count as ten tries, not thirty.

What counts is the sum of seconds over prompts, not of their logarithms (a drafter that is brilliant on a few texts and idle on
most gains less than the mean logarithm says), so each lap enters as log m + r / m - 1, r its seconds relative to plain decoding's
and m the mean of its member's r: the same to first order, and its mean is the logarithm of the mean.

With normal errors the belief after the laps is normal again and known in closed form (Gaussian-process regression: Rasmussen &
Williams 2006, chapter 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

# Standard deviations of logarithms. Forecasts against clocks in benchmarks/results/tune-*.json differ by 0.14 to 0.18 from member
# to member; of families, from probes of four prompts, more is allowed for: who is not believed too early costs a few laps.
ALL_ERROR, FAMILY_ERROR = 0.15, 0.22
NESTED_ERROR, MEMBER_ERROR = 0.02, 0.12  # of one member: where every step tells about its size, and where few do
PLAIN_ERROR = 1e-4  # plain decoding's speedup is 1 by definition
NOISE = 0.1  # of a lap
SUITED = 0.12  # from prompt to prompt, how much better or worse one drafter does than the others
DRAWS = 2000
Laps = Mapping[str, Mapping[int, float]]  # label -> group -> log seconds per token


@dataclass(frozen=True)
class Member:
    """One configuration before it ran. `family` None: plain decoding."""

    label: str
    family: str | None
    forecast: float  # of the speedup
    error: float  # of this member alone


@dataclass(frozen=True)
class Belief:
    """Normal in the logarithms of the speedups of `labels`."""

    labels: tuple[str, ...]
    mean: np.ndarray  # (n,)
    covariance: np.ndarray  # (n, n)

    def speedup(self, label: str) -> float:
        """The middle of what is believed."""
        return math.exp(float(self.mean[self.labels.index(label)]))

    def error(self, label: str) -> float:
        """Standard deviation of the logarithm."""
        index = self.labels.index(label)
        return math.sqrt(float(self.covariance[index, index]))

    def chances(self, tolerance: float = 0.0, seed: int = 0) -> dict[str, float]:
        """P(no other member is faster by more than `tolerance`, a share) of every member, from DRAWS draws of this belief."""
        rng = np.random.default_rng(seed)
        draws = rng.multivariate_normal(self.mean, self.covariance, DRAWS, method="eigh")
        good = draws >= draws.max(axis=1, keepdims=True) + math.log1p(-tolerance)
        return dict(zip(self.labels, good.mean(axis=0).tolist(), strict=True))


def believe(members: Sequence[Member], laps: Laps) -> Belief:
    """After these laps (labels that are no members are left out)."""
    mean, covariance = _before(members)
    precision = np.linalg.inv(covariance)
    pull = precision @ mean
    for group in _linear(_by_group(members, laps)):
        precision[np.ix_(group.indices, group.indices)] += group.weights
        pull[group.indices] -= group.weights @ group.seconds
    after = np.linalg.inv(precision)
    return Belief(tuple(one.label for one in members), after @ pull, (after + after.T) / 2)


def _before(members: Sequence[Member]) -> tuple[np.ndarray, np.ndarray]:
    families = np.array([one.family or "" for one in members])
    drafts = families != ""
    alike = families[:, None] == families[None, :]
    shared = np.outer(drafts, drafts) * (ALL_ERROR**2 + FAMILY_ERROR**2 * alike)
    own = [PLAIN_ERROR if one.family is None else one.error for one in members]
    return np.array([math.log(one.forecast) for one in members]), shared + np.diag(np.square(own))


@dataclass(frozen=True)
class _Group:
    """Laps of plain decoding and of other members on the same prompts."""

    indices: np.ndarray  # (m,) of the members
    seconds: np.ndarray  # (m,) logarithms per token, less plain decoding's
    weights: np.ndarray  # (m, m): their precision, the group's own level being unknown


def _by_group(members: Sequence[Member], laps: Laps) -> list[_Group]:
    plain = laps.get(next((one.label for one in members if one.family is None), ""), {})
    groups = []
    for number, plain_s in plain.items():
        indices = [index for index, one in enumerate(members) if number in laps.get(one.label, {})]
        seconds = np.array([laps[members[index].label][number] for index in indices]) - plain_s
        drafters = np.array([members[index].label.split()[0] for index in indices])
        alike = drafters[:, None] == drafters[None, :]
        precision = np.linalg.inv(NOISE**2 * np.eye(len(indices)) + SUITED**2 * alike)
        sums = precision.sum(axis=1)
        groups.append(_Group(np.array(indices), seconds, precision - np.outer(sums, sums) / sums.sum()))
    return groups


def _linear(groups: Sequence[_Group]) -> Iterator[_Group]:
    """The laps, each as log m + r / m - 1 (see above)."""
    relative: dict[int, list[float]] = {}
    for group in groups:
        for index, seconds in zip(group.indices.tolist(), np.exp(group.seconds).tolist(), strict=True):
            relative.setdefault(index, []).append(seconds)
    for group in groups:
        middle = np.array([fmean(relative[index]) for index in group.indices.tolist()])
        yield replace(group, seconds=np.log(middle) + np.exp(group.seconds) / middle - 1)
