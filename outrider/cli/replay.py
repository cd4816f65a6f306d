"""`outrider replay WORKLOAD`: how many tokens the model-free drafters would have saved on logged answers; no model is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.lab import OutputOptions, Resume, measure
from outrider.cli.verbs import listed, option, with_groups
from outrider.demo import demo_paths
from outrider.extras import check_lab
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress

if TYPE_CHECKING:
    from outrider.lab.replay.replay_result import ReplayResult
    from outrider.lab.replay.run import ReplayPlan

LOG, DRAFTERS = "Log", "What is replayed"


WorkloadName = Annotated[
    str, typer.Argument(help="A log: prompts with their answers (docs/workloads.md); several with + between.", show_default=False)
]
Tokenizer = Annotated[
    str, listed(LOG, "Whose tokens: the model that answered, as a folder, hub id or 'demo'. No weights are read.")
]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How the log is read; what is replayed, and how."""

    limit: int | None = option(None, LOG, "Only so many texts.", min=1, show_default="all")
    data: Path | None = option(None, LOG, "Folder with the files of named workloads.")
    on_bad: Literal["refuse", "skip"] = option("refuse", LOG, "Bad lines, and requests without an answer.")
    chat_template: bool = option(
        True, LOG, "Conversations were wrapped in the chat template; false: sent as plain text."
    )
    turns: Literal["first", "all"] = option("first", LOG, "Of ShareGPT conversations: which answers.")
    trust_remote_code: bool = option(False, LOG, "Run code that comes with the tokenizer.")
    drafters: list[str] | None = option(
        None, DRAFTERS,
        "Configurations, with commas between: 'ngram k=8, suffix max_depth=32'; may be given again.",
        metavar="LIST", show_default="all that need no model and no option",
    )  # fmt: skip
    sweep: int = option(
        0, DRAFTERS, "Each with draft lengths 1 to N.", metavar="N", min=0, show_default="its own length"
    )
    search: int = option(
        0, DRAFTERS, "Search each one's options: so many trials on half of the texts.", metavar="N", show_default="none"
    )
    costs: Path | None = option(
        None, DRAFTERS, "What steps cost, as for 'outrider estimate': predicts speedups.", metavar="FILE"
    )
    order: Literal["logged", "shuffled", "alone"] = option(
        "logged", DRAFTERS,
        "For drafters that learn: in which order they meet the texts, or each text without the others.",
    )  # fmt: skip
    max_num_seqs: int = option(1, DRAFTERS, "Texts served at the same time.", min=1)
    seed: int = option(0, DRAFTERS, "Of the search and of order=shuffled.", min=0)

    def plan(self) -> ReplayPlan:
        """What the options ask to be replayed. Raises ConfigError and CapabilityError."""
        from outrider.lab.configuration import parse_configurations
        from outrider.lab.estimate.curves import read_costs
        from outrider.lab.replay.replay import sort_drafters
        from outrider.lab.replay.run import ReplayPlan

        named = parse_configurations(self.drafters) if self.drafters else sort_drafters().configurations
        plan = ReplayPlan(
            tuple(named), sweep=self.sweep, trials=self.search, order=self.order, max_num_seqs=self.max_num_seqs, seed=self.seed,
            costs=None if self.costs is None else read_costs(self.costs),
        )  # fmt: skip
        plan.check()
        return plan

    def left_out(self) -> list[str]:
        """A line about each drafter that is not replayed because it cannot be used, where none is named."""
        from outrider.lab.replay.replay import sort_drafters

        return [] if self.drafters else sort_drafters().unusable


@with_groups
def replay(
    workload: WorkloadName,
    tokenizer: Tokenizer,
    options: ReplayOptions,
    output: OutputOptions,
    resume: Resume = False,
) -> int:
    """Predict acceptance of model-free drafters from logged answers, without a model."""
    check_lab("replay")
    output.check()
    return measure("replay", output, partial(_replayed, workload, tokenizer, options, options.plan()), resume=resume)


def _replayed(
    name: str, tokenizer: str, options: ReplayOptions, plan: ReplayPlan, path: Path, *, resume: bool, progress: Progress
) -> tuple[ReplayResult, Journal]:
    from outrider.lab.replay.loop import load_text_target
    from outrider.lab.replay.run import run_replay
    from outrider.lab.replay.texts import read_log
    from outrider.lab.workload.load import load_workload

    workload = load_workload(name, limit=options.limit, on_bad=options.on_bad, data=options.data, turns=options.turns)
    target = load_text_target(str(demo_paths().target) if tokenizer == "demo" else tokenizer, options.trust_remote_code)
    target.name = tokenizer
    log = read_log(workload, target.tokenizer, on_bad=options.on_bad, chat_template=options.chat_template)
    lines = [f"line {line.number}: {line.reason}" for line in workload.skipped]
    notes = [*options.left_out(), *workload.notes]
    if lines:
        notes.append(f"{len(lines)} bad lines were skipped: {'; '.join(lines[:3])}")
    return run_replay(plan, log, target, path, workload=workload.name, resume=resume, notes=notes, progress=progress)
