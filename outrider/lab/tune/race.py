"""Decides how many rounds each configuration runs: as few as the choice needs, as many as the budget allows.

Plain decoding and all on the track run every group of prompts, in turn. Every few groups all laps so far, together with
the forecasts, make a belief about all members of the space (`beliefs.py`), and by it

    leaves     who is hardly the best any more
    joins      who was not thought of, and may be the best after all: neighbours of the leader, mostly
    ends       when the leader is as good as the best with near certainty, when the budget is spent, or the prompts are used up
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.lab.configuration import PLAIN
from outrider.lab.disturbance import Repeats
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.runner import Contender
from outrider.lab.tune.beliefs import Belief, Member, believe
from outrider.lab.tune.confirm import MAX_OTHER_CPU, Lap, log_seconds, run_lap
from outrider.lab.tune.probe import Sample

LOOK = 2  # groups between two looks, of every task at least one
LEAST_GROUPS = 6  # run whatever the budget: nothing is recommended on fewer
ENOUGH_GROUPS = 8  # to tell the user's speedup by, however clear the choice is
HOPELESS, HOPEFUL = 0.03, 0.08  # chance to be the best below which one leaves, and above which one joins
AS_GOOD, ENOUGH = 0.02, 0.95  # it ends when the leader is within AS_GOOD of the best with probability ENOUGH


@dataclass(frozen=True)
class Rules:
    """What a race may cost."""

    on_track: int = 4  # at a time, plain decoding aside
    budget_s: float = math.inf  # seconds of all laps; LEAST_GROUPS are run all the same


class Race:
    """One race. `laps`: everything that was run; `failures`: why some could not."""

    def __init__(
        self, members: Sequence[Member], open_one: Callable[[str], Contender], groups: Sequence[Sequence[Sample]],
        batch_size: int, journal: Journal, progress: Progress, rules: Rules,
    ) -> None:  # fmt: skip
        """`members`: of the whole space, plain decoding included; `open_one`: makes one of them ready, by its label."""
        self._members, self._open_one, self._groups, self._batch_size = members, open_one, groups, batch_size
        self._journal, self._progress, self._rules = journal, progress, rules
        self._repeats = Repeats(MAX_OTHER_CPU, progress.say)
        self._contenders: dict[str, Contender] = {}
        self._num_tasks = len({group[0].task for group in groups})
        self.laps: list[Lap] = []
        self.failures: dict[str, str] = {}

    def run(self, first: Sequence[str] = ()) -> list[Lap]:
        """`first`: who begins, beside plain decoding and those that the forecasts find likeliest to be the best.

        Raises what plain decoding raises."""
        self._progress.stage("confirming the best", len(self._groups) * (1 + self._rules.on_track))
        track = self._able([PLAIN, *first, *self._joining(self.belief(), list(first), gone=set())])
        while track == [PLAIN] and (others := self._joining(self.belief(), [], gone=set())):
            track = self._able([PLAIN, *others])
        if track == [PLAIN]:  # of the others none can be built
            return self.laps
        gone: set[str] = set()
        for number, group in enumerate(self._groups):
            for position in range(len(track)):
                contender = self._contenders[track[(position + number) % len(track)]]
                self.laps.append(run_lap(contender, number, group, self._batch_size, self._journal, self._repeats))
                self._progress.advance()
            done = number + 1
            if done >= self._min_groups(LEAST_GROUPS) and sum(lap.wall_s for lap in self.laps) >= self._rules.budget_s:
                break
            if done % max(LOOK, self._num_tasks) == 0:
                belief = self.belief()
                if self._is_decided(belief, done, track):
                    break
                staying = self._staying(belief, track)
                gone |= set(track) - set(staying)
                track = self._able([*staying, *self._joining(belief, staying, gone)])
        return self.laps

    def belief(self, task: str | None = None) -> Belief:
        """After all laps, or those of one task."""
        return believe(self._members, log_seconds(self.laps, task))

    # ---------------------------------------------------------------- decisions

    def _min_groups(self, groups: int) -> int:
        """More where several tasks share them."""
        return max(groups, 2 * self._num_tasks)

    def _staying(self, belief: Belief, track: Sequence[str]) -> list[str]:
        chances = belief.chances()
        staying = [label for label in track if label != PLAIN and chances[label] >= HOPELESS]
        return [PLAIN, *(staying or [max((one for one in track if one != PLAIN), key=belief.speedup)])]

    def _joining(self, belief: Belief, running: Sequence[str], gone: set[str]) -> list[str]:
        """The configurations that join: the likeliest of every hopeful family that does not run yet, then the likeliest of all.

        Ten neighbouring sizes share one family's chance, so each alone looks hopeless. At the start every member is hopeful.
        """
        chances, found = belief.chances(), {label for label in running if label != PLAIN}
        family_of = {one.label: one.family for one in self._members}
        outside = {PLAIN, *found, *gone, *self.failures}
        free = sorted((label for label in chances if label not in outside), key=lambda label: -chances[label])
        families: dict[str | None, float] = {}
        for label, chance in chances.items():
            families[family_of[label]] = families.get(family_of[label], 0.0) + chance
        seen, newcomers = {family_of[label] for label in found}, []
        for label in sorted(free, key=lambda label: -families[family_of[label]]):
            if family_of[label] not in seen and families[family_of[label]] > HOPEFUL:
                seen.add(family_of[label])
                newcomers.append(label)
        min_chance = HOPEFUL if self.laps else 0.0
        newcomers += [label for label in free if label not in newcomers and chances[label] > min_chance]
        return newcomers[: max(self._rules.on_track - len(found), 0)]

    def _is_decided(self, belief: Belief, done: int, track: Sequence[str]) -> bool:
        """Whether the best on the track, plain decoding included, is as good as any member."""
        leader = max(track, key=belief.speedup)
        return done >= self._min_groups(ENOUGH_GROUPS) and belief.chances(AS_GOOD)[leader] >= ENOUGH

    def _able(self, labels: Sequence[str]) -> list[str]:
        """The labels that can be built; the others are among the failures."""
        found = []
        for label in dict.fromkeys(labels):
            if label not in self._contenders and label not in self.failures:
                try:
                    self._contenders[label] = self._open_one(label)
                except OutriderError as error:
                    if label == PLAIN:
                        raise
                    self.failures[label] = str(error)
            if label in self._contenders:
                found.append(label)
        return found
