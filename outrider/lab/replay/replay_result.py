"""What a replay found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from outrider.lab.estimate.curves import StepCosts
from outrider.lab.result import Comparable, Interval, Record, Result


class AcceptanceCounts(Record):
    """Counters of one configuration over some texts; ratios as in docs/glossary.md. Intervals are bootstrapped over texts (over
    blocks of consecutive texts where the drafter learns from one text for the next); unknown for too few texts."""

    num_texts: int
    steps: int  # target passes
    emitted: int
    drafted: int
    tested: int
    accepted: int
    accepted_per_position: list[int]  # [i]: steps whose (i+1)-th draft token was accepted
    widths: list[int]  # [n]: steps whose widest row submitted n draft tokens; with one row at a time, the row itself
    tau: Interval  # emitted / steps; the speedup if a pass cost the same however many draft tokens are in it
    alpha: float | None  # accepted / tested
    draft_utilisation: float | None  # accepted / drafted
    speedup: Interval | None  # emitted / (sum over steps of seconds by width and of drafting / seconds of a plain step)


class ReplayedConfiguration(Record):
    """One configuration on all texts."""

    configuration: str  # in the text form of `Configuration`
    family: str  # the same without its draft length
    drafter: str
    num_draft_tokens: int  # most nodes per step
    settings: dict[str, Any]  # of the drafter, defaults filled in
    trees: bool
    learns: bool
    overall: AcceptanceCounts
    by_task: dict[str, AcceptanceCounts]
    draft_s_per_step: float  # in the drafter, on the machine of this replay
    charged_draft_s: float  # of drafting, added to what the costs say of a step; 0 where drafting is in the costs
    tokens_per_s: float  # replayed, not decoded
    outside_costs: int  # steps wider than what the costs were measured for


class SearchOutcome(Record):
    """The best settings found on one half of the texts, and what they bring on the other half."""

    objective: Literal["tau", "speedup"]
    space: dict[str, str]  # what was searched: option -> range
    num_trials: int
    num_train: int  # texts
    num_held_out: int
    train_start: float  # the objective of the configuration as given, on the texts searched on
    train_best: float
    start: ReplayedConfiguration  # as given, on the held-out texts
    best: ReplayedConfiguration  # as found, on the held-out texts
    gain: Interval | None  # objective of `best` / objective of `start` - 1, held-out texts, both on the same ones


class ReplayResult(Result):
    """`outrider replay`."""

    kind: Literal["replay"] = "replay"
    workload: str
    tokenizer: str
    order: Literal["logged", "shuffled", "alone"]
    seed: int
    max_num_seqs: int
    num_texts: int
    num_tokens: int  # of all answers
    skipped: list[str]  # "id: reason" of requests that could not be replayed
    costs: StepCosts | None
    configurations: list[ReplayedConfiguration]
    searches: list[SearchOutcome]

    def comparable(self) -> Iterator[Comparable]:
        """tau and predicted speedup of every configuration, over all texts and for each task."""
        for one in self.configurations:
            cells = {"": one.overall, **{f" ({task})": cell for task, cell in one.by_task.items() if len(one.by_task) > 1}}
            for task, cell in cells.items():
                yield Comparable(f"{one.configuration}{task}: tau", cell.tau, True)
                if cell.speedup is not None:
                    yield Comparable(f"{one.configuration}{task}: predicted speedup", cell.speedup, True, "x")
