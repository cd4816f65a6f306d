"""The result of a replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from outrider.lab.predict import StepCosts
from outrider.lab.result import Comparable, Interval, Record, Result


class AcceptanceCounts(Record):
    """Counters of one configuration over some texts; ratios as in docs/glossary.md.

    Intervals are bootstrapped over texts (over blocks of consecutive texts where the drafter learns
    from one text for the next); unknown for too few texts.
    """

    num_texts: int
    steps: int  # target passes
    emitted: int
    drafted: int
    tested: int
    accepted: int
    accepted_per_position: list[int]  # [i]: steps whose (i+1)-th draft token was accepted
    # emitted / steps; the speedup if a pass cost the same however many draft tokens are in it
    tau: Interval
    alpha: float | None  # accepted / tested
    draft_utilisation: float | None  # accepted / drafted
    # emitted / steps by their cost in plain steps; None: no costs were given
    speedup: Interval | None


class ReplayedConfiguration(Record):
    """One configuration on all texts."""

    configuration: str  # in the text form of `Configuration`
    drafter: str
    overall: AcceptanceCounts
    by_task: dict[str, AcceptanceCounts]
    draft_s_per_step: float  # in the drafter, on the machine of this replay
    learns: bool
    outside_costs: int  # steps that drafted more than any whose time the costs have


class ReplayResult(Result):
    """Acceptance of look-up drafters on the texts of a log."""

    kind: Literal["replay"] = "replay"
    workload: str
    tokenizer: str
    num_texts: int
    num_tokens: int  # of all answers
    skipped: list[str]  # "id: reason" of requests that could not be replayed
    costs: StepCosts | None
    configurations: list[ReplayedConfiguration]

    def comparable(self) -> Iterator[Comparable]:
        """tau and predicted speedup of every configuration, over all texts and for each task."""
        for configuration in self.configurations:
            by_task = configuration.by_task if len(configuration.by_task) > 1 else {}
            for task, counts in {"": configuration.overall, **by_task}.items():
                label = (
                    f"{configuration.configuration} ({task})"
                    if task
                    else configuration.configuration
                )
                yield Comparable(f"{label}: tau", counts.tau, True)
                if counts.speedup is not None:
                    yield Comparable(f"{label}: predicted speedup", counts.speedup, True, "x")
