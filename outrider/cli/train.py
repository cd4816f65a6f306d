"""`outrider train KIND`: from a target and prompts to a trained, measured drafter in one folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.lab import INTERRUPTED, OUTPUT, REPORTS, OutputOptions, Resume, command_line, deliver, shown_progress
from outrider.cli.options import MachineOptions
from outrider.cli.quantities import memory
from outrider.cli.train_options import KindOptions, MeasuringOptions, ResponseOptions, TextOptions
from outrider.cli.verbs import given, listed, refuse_unused, with_groups
from outrider.cli.writable import check_folder
from outrider.errors import ConfigError
from outrider.train.config import TrainConfig

Kind = Annotated[
    str,
    typer.Argument(
        help="draft-model, medusa, eagle, eagle3, mtp, block, early-exit or acceptance.", show_default=False, metavar="KIND"
    ),
]
TargetOption = Annotated[str, typer.Option(help="'demo', a local folder, or a hub id.", show_default=False)]
Out = Annotated[
    Path,
    listed(
        OUTPUT, "Folder of the run: 'drafter' is in it, and result.json, of which 'outrider report' makes pages.",
        show_default=False,
    ),
]  # fmt: skip
OnlyResponses = Annotated[bool, listed(OUTPUT, "End when the target has answered all prompts.")]


@with_groups
def train(
    kind: Kind,
    target: TargetOption,
    out: Out,
    texts: TextOptions,
    answers: ResponseOptions,
    which: KindOptions,
    training: TrainConfig,
    machine: MachineOptions,
    measuring: MeasuringOptions,
    resume: Resume = False,
    only_responses: OnlyResponses = False,
) -> int:
    """Train a drafter for a target: its responses, its features, training, before and after."""
    if out.suffix in REPORTS:
        raise ConfigError(f"--out is the run's folder; 'outrider report FOLDER/result.json --out {out.name}' makes pages")
    check_folder(out)
    if find_spec("accelerate") is None:
        raise ConfigError("training needs accelerate: pip install 'outrider[train]'")
    asking = [*given(answers), *(["--draft"] if machine.draft is not None else [])]
    if texts.from_traffic is None and texts.prompts is None:
        refuse_unused(asking, "without --prompts or --from-traffic")
    if texts.recorded_answers:
        refuse_unused(asking, "beside --set recorded_answers=true, which asks the target nothing")
    from outrider.build import DEMO
    from outrider.cli.session import quieten_libraries
    from outrider.demo import demo_paths
    from outrider.train.run import TrainSpec, run_training

    options = replace(machine.options(target), drafter=answers.drafter, max_num_seqs=answers.max_num_seqs)
    if target == DEMO:
        options = replace(options, target=str(demo_paths().target))
    spec = TrainSpec(
        kind=kind, options=options, name=target, out=out, material=texts.material(out),
        responses=answers.plan(training.seed), init=which.start, settings=which.settings(), config=training,
        feature_cache=memory("--set feature_cache", which.feature_cache, or_none=True), measure=measuring.plan(training.seed),
        resume=resume, only_responses=only_responses,
    )  # fmt: skip
    quieten_libraries()
    try:
        with shown_progress() as progress:
            result = run_training(spec, progress, command_line())
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; what is finished is in {out}: the same command with --resume goes on\n")
        return INTERRUPTED
    if result is not None:
        deliver(result, OutputOptions())
        sys.stderr.write(f"written: {out / 'drafter'}, {out / 'result.json'}\n")
    return 0
