"""Forecasts meet the clock: all configurations in turn on the same problems, by the rounds of `outrider bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.lab.bench.material import Material
from outrider.lab.bench.notes import RunNote
from outrider.lab.bench.plan import Plan
from outrider.lab.bench.result import Ending, Speedup
from outrider.lab.bench.speedup import Sample, samples, speedup
from outrider.lab.bench.stages import CellState, Rounds
from outrider.lab.bench.summary import accuracy, identity
from outrider.lab.bench.turn import Field
from outrider.lab.configuration import Configuration
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress
from outrider.lab.reasoning.result import Contestant, Role
from outrider.lab.reasoning.shares import ratio
from outrider.lab.result import Interval
from outrider.lab.runner import Runner

TASK = "reasoning"


@dataclass(frozen=True)
class Entry:
    """One configuration that takes part, beside plain decoding."""

    configuration: Configuration
    role: Role
    what: str = ""


@dataclass(frozen=True)
class Confirmed:
    """What the clock said."""

    contestants: list[Contestant]
    rounds: int
    ended_by: Ending
    other_cpu: float


def confirm(
    runner: Runner, entries: Sequence[Entry], best: Configuration, plan: Plan, material: Material, journal: Journal,
    progress: Progress,
) -> Confirmed:  # fmt: skip
    """`plan`: of one temperature, its configurations those of `entries`, `best` among them.

    After Ctrl-C: what was known by then, KeyboardInterrupt where that is nothing. Raises what plain decoding raises.
    """
    configurations = plan.all_configurations
    field, failures = Field.open(runner, configurations)
    rounds = Rounds(field, plan, material, plan.places([TASK]), journal, progress)
    try:
        states = rounds.run()
    except KeyboardInterrupt:
        if not (states := rounds.stopped()):
            raise
    state = states[0]
    reference = state.of(configurations.index(best))
    found = []
    for entry in entries:
        number = configurations.index(entry.configuration)
        if reason := failures.get(number) or state.failures.get(number):
            found.append(_entry(entry).model_copy(update={"failure": reason}))
            continue
        exact = bool(field[number].config["exact"])
        one = contestant(entry, state, number, rounds.baselines[number], reference, runner.tokenizer)
        found.append(one.model_copy(update={"exact": exact}))
    assert state.ended_by is not None
    return Confirmed(found, state.rounds, state.ended_by, max(note.other_cpu for note in state.notes))


def contestant(
    entry: Entry, state: CellState, number: int, baseline: int, reference: Sequence[RunNote], tokenizer: Any
) -> Contestant:
    """The numbers of one that ran."""
    own, plain = state.of(number), state.of(baseline)
    tested, drafts = sum(note.tested for note in own), sum(note.num_drafts for note in own)
    seconds = sum(note.decode_s for note in own)
    is_reference = bool(reference) and reference[0].configuration == number
    ids = [one.request.id for one in state.prompts]
    return _entry(entry).model_copy(
        update={
            "num_problems": len({note.prompt for note in own}),
            "tau": tokens_per_step(own),
            "alpha": sum(note.accepted for note in own) / tested if tested else None,
            "drafted": sum(note.drafted for note in own) / drafts if drafts else 0.0,
            "tokens_per_s": sum(note.decode_tokens for note in own) / seconds if seconds else None,
            "speedup": speedup(samples(own)),
            "over_best": None if is_reference else versus(reference, own),
            "identity": identity(own, ids, tokenizer) if state.place.temperature == 0 else None,
            "accuracy": accuracy(own, plain),
        }
    )


def _entry(entry: Entry) -> Contestant:
    length = entry.configuration.num_draft_tokens
    return Contestant(
        configuration=entry.configuration.label, role=entry.role, what=entry.what,
        num_draft_tokens=length if isinstance(length, int) else None,
    )  # fmt: skip


def tokens_per_step(notes: Sequence[RunNote]) -> Interval | None:
    """τ over all runs, resampled by problem."""
    tokens: dict[int, int] = {}
    steps: dict[int, int] = {}
    for note in notes:
        tokens[note.prompt] = tokens.get(note.prompt, 0) + note.tokens
        steps[note.prompt] = steps.get(note.prompt, 0) + note.steps
    return ratio(list(tokens.values()), list(steps.values()), least=1.0, most=float(max(tokens.values())))


def versus(reference: Sequence[RunNote], own: Sequence[RunNote]) -> Speedup | None:
    """Seconds per token behind the first step, `reference` / `own`, each problem as long as the reference's text."""
    theirs = {(note.prompt, note.round): note for note in reference if note.decode_tokens}
    found = []
    for note in own:
        other = theirs.get((note.prompt, note.round))
        if other is not None and note.decode_tokens:
            own_s = note.decode_s / note.decode_tokens * other.decode_tokens
            found.append(Sample(note.prompt, other.decode_s, own_s))
    return speedup(found)

