"""`outrider replay WORKLOAD`: how many tokens look-up drafters would have saved on logged answers;
no model is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.lab import OutputOptions, answer
from outrider.cli.prompting import SELDOM_READING
from outrider.cli.session import quieten_libraries
from outrider.cli.verbs import gathered, listed, option
from outrider.demo import demo_paths
from outrider.extras import check_lab

if TYPE_CHECKING:
    from outrider.configuration import Configuration

LOG = "Log"
DRAFTERS = "What is replayed"

WorkloadName = Annotated[
    str,
    typer.Argument(
        help="A log: prompts with their answers (docs/workloads.md); several with + between.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str,
    listed(
        LOG,
        "Whose tokens: the model that answered, as a folder, hub id or 'demo'. No weights are "
        "read.",
        common=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How the log is read; what is replayed."""

    limit: int | None = option(
        None, LOG, "Only this many texts.", min=1, show_default="all", common=True
    )
    data: Path | None = option(None, LOG, "Folder with the files of named workloads.")
    on_bad: Literal["refuse", "skip"] = option(
        "refuse", LOG, "Bad lines, and requests without an answer."
    )
    chat_template: bool = option(
        True, LOG, "Conversations were wrapped in the chat template, or sent as plain text."
    )
    turns: Literal["first", "all"] = option(
        "first", LOG, "Of ShareGPT conversations: which answers."
    )
    trust_remote_code: bool = option(False, LOG, "Run code that comes with the tokenizer.")
    drafters: list[str] | None = option(
        None,
        DRAFTERS,
        "Configurations, with commas between: 'ngram k=8, suffix max_depth=32'; may be given "
        "again.",
        metavar="LIST",
        show_default="all that need no model and no option",
        common=True,
    )
    result: Path | None = option(
        None,
        DRAFTERS,
        "A result of bench: the speedup is predicted by what its steps took.",
        metavar="FILE",
        common=True,
    )


@gathered(reading=(*SELDOM_READING, "trust_remote_code"))
def replay(
    workload: WorkloadName, tokenizer: Tokenizer, options: ReplayOptions, output: OutputOptions
) -> int:
    """Predict acceptance of look-up drafters from logged answers, without a model."""
    check_lab("replay")
    from outrider.lab.estimate.estimate import read_bench
    from outrider.lab.replay.loop import load_text_target
    from outrider.lab.replay.replay import check_replay, run_replay
    from outrider.lab.replay.texts import read_log
    from outrider.lab.workload.load import load_workload

    output.check()
    configurations, notes = _chosen(options)
    costs = None if options.result is None else read_bench(options.result).costs
    check_replay(configurations, costs)
    quieten_libraries()
    requests = load_workload(
        workload, limit=options.limit, on_bad=options.on_bad, data=options.data, turns=options.turns
    )
    notes += requests.notes
    if requests.skipped:
        lines = [f"line {line.number}: {line.reason}" for line in requests.skipped]
        notes.append(f"{len(lines)} bad lines were skipped: {'; '.join(lines[:3])}")
    target = load_text_target(
        str(demo_paths().target) if tokenizer == "demo" else tokenizer, options.trust_remote_code
    )
    target.name = tokenizer
    log = read_log(
        requests, target.tokenizer, on_bad=options.on_bad, chat_template=options.chat_template
    )
    run = partial(
        run_replay, configurations, log, target, workload=requests.name, costs=costs, notes=notes
    )
    return answer(output, lambda progress: run(progress=progress))


def _chosen(options: ReplayOptions) -> tuple[list[Configuration], list[str]]:
    """The drafters to replay, and a line about each that is left out because it cannot be used."""
    from outrider.configuration import parse_configurations
    from outrider.lab.replay.replay import default_configurations

    if options.drafters:
        return parse_configurations(options.drafters), []
    return default_configurations()
