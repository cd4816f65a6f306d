"""What forecasts and laps together say about speedups: a Gaussian belief about the logarithms of all of them at once.

    before a lap     log speedup(c) = forecast(c) + error of all forecasts + error of c's family + error at c's size + error of c
    a lap            log seconds per token(c, group) = state of the machine and the prompts(group) - log speedup(c)
                                                       + how these prompts suit c's drafter + noise

Errors of forecasts are shared by what they share a cause with: all sizes of a family have the same drafter and neighbouring sizes
nearly the same step, so a lap of one teaches about the others, and of many noisy numbers the largest is not simply believed.
What a group of prompts has in common (its texts, the machine's mood) is unknown and divides out: laps are compared within groups.
Whom a group suits is shared by all who draft alike, so three sizes of one drafter on ten prompts are ten witnesses, not thirty.
What counts is the sum of seconds over prompts, not of their logarithms (a drafter that is brilliant on a few texts and idle on
most gains less than the mean logarithm says), so each lap enters as log m + r / m - 1, r its seconds relative to its group's
level and m the mean of its member's r: the same to first order, and its mean is the logarithm of the mean.

With normal errors the belief after the laps is normal again and known in closed form (Gaussian-process regression: Rasmussen &
Williams 2006, chapter 2). The spread of the noise is estimated from the laps, beginning with what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

# Standard deviations of logarithms. Forecasts against clocks in benchmarks/results/tune-*.json differ by 0.14 to 0.18 from member
# to member; of families, from probes of four prompts, more is allowed for: who is not believed too early costs a few laps.
ALL_ERROR, FAMILY_ERROR, SIZE_ERROR = 0.15, 0.22, 0.06
NESTED_ERROR, MEMBER_ERROR = 0.02, 0.12  # of one member: where every step tells about its size, and where few do
PLAIN_ERROR = 1e-4  # plain decoding's speedup is 1 by definition
USUAL_NOISE, LEAST_NOISE, USUAL_WORTH = 0.1, 0.02, 8.0  # of a lap; worth that many laps
SUITED = 0.12  # from prompt to prompt, how much better or worse one drafter does than the others
TURNS = 4  # noise, levels and belief depend on one another; this many turns settle them
DOUBLINGS = 1.0  # sizes apart by so many doublings have nearly independent errors at their sizes
DRAWS = 2000
Laps = Mapping[str, Mapping[int, float]]  # label -> group -> log seconds per token


@dataclass(frozen=True)
class Member:
    """One configuration before it ran. `family` None: plain decoding."""

    label: str
    family: str | None
    size: float
    forecast: float  # of the speedup
    error: float  # of this member alone


@dataclass(frozen=True)
class Belief:
    """Normal in the logarithms of the speedups of `labels`."""

    labels: tuple[str, ...]
    mean: np.ndarray  # (n,)
    covariance: np.ndarray  # (n, n)
    noise: float  # standard deviation of a lap

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
    labels = tuple(one.label for one in members)
    groups = _by_group(members, laps)
    noise = USUAL_NOISE
    after = mean, covariance
    for _ in range(TURNS):
        linear = _linear(groups, after[0], noise)
        after = _after(mean, covariance, linear, noise)
        noise = _noise(after[0], linear, noise)
    return Belief(labels, *after, noise)


def _before(members: Sequence[Member]) -> tuple[np.ndarray, np.ndarray]:
    count = len(members)
    covariance = np.zeros((count, count))
    for i, one in enumerate(members):
        for j, other in enumerate(members):
            covariance[i, j] = _shared(one, other)
        covariance[i, i] += one.error**2 if one.family is not None else PLAIN_ERROR**2
    return np.array([math.log(one.forecast) for one in members]), covariance


def _shared(one: Member, other: Member) -> float:
    """Covariance of the errors of two forecasts, without what each has alone."""
    if one.family is None or other.family is None:
        return 0.0
    if one.family != other.family:
        return ALL_ERROR**2
    apart = (math.log2(one.size) - math.log2(other.size)) / DOUBLINGS
    return ALL_ERROR**2 + FAMILY_ERROR**2 + SIZE_ERROR**2 * math.exp(-(apart**2) / 2)


@dataclass(frozen=True)
class _Group:
    """Laps of two members or more on the same prompts."""

    indices: np.ndarray  # (m,) of the members
    seconds: np.ndarray  # (m,) logarithms per token
    alike: np.ndarray  # (m, m) 1 where two have the same drafter
    plain: int | None  # which of them is plain decoding, if it ran

    def precision(self, noise: float) -> np.ndarray:
        """(m, m): of these laps."""
        return np.linalg.inv(noise**2 * np.eye(len(self.indices)) + SUITED**2 * self.alike)

    def weights(self, noise: float) -> np.ndarray:
        """(m, m): their precision, the group's own level being unknown."""
        precision = self.precision(noise)
        sums = precision.sum(axis=1)
        return precision - np.outer(sums, sums) / sums.sum()

    def level(self, mean: np.ndarray, noise: float) -> float:
        """What the group has in common: plain decoding's seconds, which do not depend on what texts suit whom; where it did not
        run, what the others say if they are as fast as `mean` says."""
        if self.plain is not None:
            return float(self.seconds[self.plain])
        sums = self.precision(noise).sum(axis=1)
        return float(sums @ (self.seconds + mean[self.indices]) / sums.sum())


def _by_group(members: Sequence[Member], laps: Laps) -> list[_Group]:
    found: dict[int, list[int]] = {}
    for index, one in enumerate(members):
        for group in laps.get(one.label, {}):
            found.setdefault(group, []).append(index)
    groups = []
    for group, indices in found.items():
        if len(indices) > 1:
            drafters = np.array([members[index].label.split()[0] for index in indices])
            seconds = np.array([laps[members[index].label][group] for index in indices])
            plain = next((at for at, index in enumerate(indices) if members[index].family is None), None)
            groups.append(_Group(np.array(indices), seconds, (drafters[:, None] == drafters[None, :]).astype(float), plain))
    return groups


def _linear(groups: Sequence[_Group], mean: np.ndarray, noise: float) -> list[_Group]:
    """The laps, each as log m + r / m - 1 (see above)."""
    levels = [group.level(mean, noise) for group in groups]
    relative: dict[int, list[float]] = {}
    for group, level in zip(groups, levels, strict=True):
        for index, seconds in zip(group.indices.tolist(), np.exp(group.seconds - level).tolist(), strict=True):
            relative.setdefault(index, []).append(seconds)
    found = []
    for group, level in zip(groups, levels, strict=True):
        middle = np.array([fmean(relative[index]) for index in group.indices.tolist()])
        found.append(replace(group, seconds=level + np.log(middle) + np.exp(group.seconds - level) / middle - 1))
    return found


def _after(
    mean: np.ndarray, covariance: np.ndarray, groups: Sequence[_Group], noise: float
) -> tuple[np.ndarray, np.ndarray]:
    precision = np.linalg.inv(covariance)
    pull = precision @ mean
    for group in groups:
        weights = group.weights(noise)
        precision[np.ix_(group.indices, group.indices)] += weights
        pull[group.indices] -= weights @ group.seconds
    after = np.linalg.inv(precision)
    return after @ pull, (after + after.T) / 2


def _noise(mean: np.ndarray, groups: Sequence[_Group], before: float) -> float:
    """The noise of a lap, from what the belief leaves unexplained: laps as a whole are more or less noisy than was thought."""
    unexplained, free, seen = 0.0, 0.0, set()
    for group in groups:
        left = group.seconds + mean[group.indices]
        unexplained += float(left @ group.weights(before) @ left)
        free += len(group.indices) - 1
        seen |= set(group.indices.tolist())
    free = max(free - len(seen) / 2, 0.0)  # members share what they explain
    usual = USUAL_WORTH * (USUAL_NOISE / before) ** 2
    return max(LEAST_NOISE, before * math.sqrt((unexplained + usual) / (free + USUAL_WORTH)))
