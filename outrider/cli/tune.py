"""`outrider tune TARGET`: which drafter, how many tokens, at which load, on the user's own prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.bench_options import PromptOptions, numbers
from outrider.cli.lab import OUTPUT, OutputOptions, command_line, deliver, journal_path, shown_progress
from outrider.cli.options import SAMPLING, MachineOptions, Target, with_groups

if TYPE_CHECKING:
    from outrider.lab.tune.run import TuneRequest

INTERRUPTED = 130
SPACE, LOAD = "What is tried", "Load"


def _option(panel: str, text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **extra)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is tried, and for which load."""

    drafters: Annotated[
        str, _option(SPACE, "Only these, with commas between.", metavar="NAMES", show_default="all that this target can have")
    ] = ""
    trees: Annotated[bool, _option(SPACE, "Also drafters that draft trees.", "--trees/--no-trees")] = True
    own_weights: Annotated[
        bool, _option(SPACE, "Also quantised and early-exit drafts of the target.", "--own-weights/--no-own-weights")
    ] = True
    corpus: Annotated[
        str | None, _option(SPACE, "Text to copy from, for retrieval.", metavar="FILE", show_default=False)
    ] = None
    finalists: Annotated[int, _option(SPACE, "Configurations confirmed by measurement, 'auto' aside.", min=1)] = 3
    search_trials: Annotated[
        int, _option(SPACE, "Trials for the options of a model-free drafter (from 48 prompts on); 0: none.", min=0)
    ] = 24
    batch_size: Annotated[int, _option(LOAD, "Requests at a time that the advice is for.", min=1)] = 1
    load: Annotated[str, _option(LOAD, "Further loads for the schedule; empty: none.", metavar="N,...")] = "4"
    max_new_tokens: Annotated[int, _option(SAMPLING, "Most tokens of an answer.", min=8)] = 128
    temperature: Annotated[float, _option(SAMPLING, "0 is greedy.", min=0.0)] = 0.0
    top_k: Annotated[int, _option(SAMPLING, "Keep the K likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, _option(SAMPLING, "Keep the likeliest tokens up to this mass; 1 is off.")] = 1.0
    ignore_eos: Annotated[bool, _option(SAMPLING, "Go on behind the end of the text.", "--ignore-eos")] = False
    seed: Annotated[int, _option(SAMPLING, "Of sampled texts.", min=0)] = 0

    def request(self, prompts: int) -> TuneRequest:
        """Raises ConfigError for values out of range."""
        from outrider.lab.tune.run import TuneRequest
        from outrider.sampling.params import SamplingParams

        sampling = SamplingParams(
            temperature=self.temperature, max_tokens=self.max_new_tokens, top_k=self.top_k, top_p=self.top_p,
            ignore_eos=self.ignore_eos,
        )  # fmt: skip
        return TuneRequest(
            sampling, prompts, self.batch_size, tuple(numbers("--load", self.load, int)), self.finalists, self.search_trials,
            self.seed, frozenset(name.strip() for name in self.drafters.split(",") if name.strip()), self.trees,
            self.own_weights, self.corpus,
        )  # fmt: skip


@with_groups
def tune(
    target: Target,
    options: TuneOptions,
    prompts: PromptOptions,
    machine: MachineOptions,
    output: OutputOptions,
    settings_out: Annotated[
        Path | None,
        _option(OUTPUT, "Write the advice as a file for generate --settings.", metavar="FILE", show_default=False),
    ] = None,
    resume: Annotated[bool, _option(OUTPUT, "Go on with an interrupted run.", "--resume")] = False,
) -> int:
    """Find the best way to speculate on your prompts, or that there is none."""
    output.check()
    from outrider.cli.session import quieten_libraries
    from outrider.lab.tune.run import run_tune

    request, path = options.request(prompts.prompts), journal_path(output.out, "tune")
    workload = prompts.load(target)
    quieten_libraries()
    try:
        with shown_progress() as progress:
            result, journal = run_tune(
                machine.options(target), request, workload, path, resume=resume, on_bad=prompts.on_bad,
                chat_template=prompts.chat_template, progress=progress, status=progress.say,
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = f"; what is finished is in {path}: the same command with --resume goes on" if path.exists() else ""
        sys.stderr.write(f"interrupted{kept}\n")
        return INTERRUPTED
    deliver(result.model_copy(update={"command": command_line()}), output)
    if settings_out is not None:
        result.settings_file().write(settings_out)
        sys.stderr.write(f"written: {settings_out}\n")
    journal.close()
    return 0
