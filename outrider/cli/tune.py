"""`outrider tune TARGET`: which drafter, how many tokens, at which load, on the user's own prompts."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli import session
from outrider.cli.lab import OUTPUT, OutputOptions, Resume, measure
from outrider.cli.options import (
    DRAFTING,
    SAMPLING,
    SELDOM_MODEL,
    SELDOM_SAMPLING,
    MachineOptions,
    Target,
)
from outrider.cli.prompting import SELDOM_READING, AnswerOptions, ConversationOptions
from outrider.cli.typed import check_file, numbers
from outrider.cli.verbs import gathered, listed, option, typed, typed_words
from outrider.errors import ConfigError
from outrider.extras import check_lab
from outrider.lab.progress import Progress

if TYPE_CHECKING:
    from outrider.build import Options
    from outrider.lab.tune.space import TuneRequest
    from outrider.lab.tune.tune_result import TuneResult

SPACE = "What is tried"
LOAD = "Load"


@dataclass(frozen=True, kw_only=True)
class TunedModels(MachineOptions):
    """Options for the target and any number of drafts that compete."""

    draft: list[str] | None = option(  # type: ignore[assignment]  # several, where other verbs take one
        None,
        DRAFTING,
        "A draft model, or a folder that 'outrider train' made (heads, stop rules); may be given "
        "again. auto: what was made for this target and is on this machine.",
        metavar="FOLDER_OR_ID",
        show_default="what comes with the demo, else none",
        common=True,
    )

    def options(self, target: str) -> Options:
        """The options without the drafts, which are distinguished later (lab/tune/drafts.py)."""
        from outrider.build import Options

        values = {
            field.name: getattr(self, field.name)
            for field in fields(MachineOptions)
            if field.name != "draft"
        }
        return Options(target=target, **values)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(AnswerOptions):
    """The configurations to try, and the load they are for."""

    drafters: str = option(
        "",
        SPACE,
        "Only these, with commas between.",
        metavar="NAMES",
        show_default="all that this target can have",
        common=True,
    )
    trees: bool = option(True, SPACE, "Also drafters that draft trees.")
    own_weights: bool = option(True, SPACE, "Also quantised and early-exit drafts of the target.")
    corpus: str | None = option(None, SPACE, "Text to copy from, for retrieval.", metavar="FILE")
    finalists: int = option(
        4, SPACE, "Families whose best member is confirmed by measurement.", min=1
    )
    most_share: float = option(
        0.075,
        SPACE,
        "Most of the cost, as a share of running everything on all prompts; a few are run all the "
        "same.",
    )
    batch_size: str = option(
        "1,4",
        LOAD,
        "Requests at a time: the advice is for the first, the schedule for the others, too.",
        metavar="N,...",
        common=True,
    )
    max_tokens: int = option(128, SAMPLING, "Max tokens of an answer.", min=8, common=True)
    temperature: float = option(0.0, SAMPLING, "0 is greedy.", min=0.0, common=True)  # type: ignore[assignment]

    def request(self, prompts: int, drafts: list[str]) -> TuneRequest:
        """The tuning plan that the options ask for. Raises ConfigError for values out of range."""
        from outrider.lab.tune.space import TuneRequest

        loads = numbers("--batch-size", self.batch_size, int)
        if not loads:
            raise ConfigError("--batch-size takes at least one number of requests")
        return TuneRequest(
            self.params(self.temperature),
            prompts,
            loads[0],
            tuple(loads[1:]),
            self.finalists,
            self.seed,
            frozenset(name.strip() for name in self.drafters.split(",") if name.strip()),
            self.trees,
            self.own_weights,
            self.corpus,
            self.most_share,
            tuple(drafts),
        )


@gathered(
    sampling=SELDOM_SAMPLING,
    model_options=SELDOM_MODEL,
    reading=SELDOM_READING,
    space=("trees", "own_weights", "corpus", "finalists", "most_share"),
)
def tune(
    target: Target,
    options: TuneOptions,
    prompts: ConversationOptions,
    machine: TunedModels,
    output: OutputOptions,
    settings_out: Annotated[
        Path | None,
        listed(
            OUTPUT,
            "Write the advice as a file for generate --settings.",
            metavar="FILE",
            show_default=False,
            common=True,
        ),
    ] = None,
    resume: Resume = False,
) -> int:
    """Find the best way to speculate on your prompts, or that there is none."""
    check_lab("tune")
    from outrider.lab.tune.run import run_tune

    output.check()
    if settings_out is not None:
        check_file(settings_out)
    request = options.request(prompts.limit, _drafts(target, machine))
    tuned = partial(
        run_tune,
        machine.options(target),
        request,
        prompts.load(target),
        on_bad=prompts.on_bad,
        chat_template=prompts.chat_template,
    )

    def run(path: Path, *, resume: bool, progress: Progress) -> TuneResult:
        result = tuned(path, resume=resume, progress=progress)
        if not result.interrupted:
            result.next_command = _serve(target, machine, result, settings_out)
        return result

    def finish(result: TuneResult) -> int:
        if settings_out is not None:
            result.settings_file().write(settings_out)
            sys.stderr.write(f"written: {settings_out}\n")
        return 0

    return measure("tune", output, run, resume=resume, finish=finish)


def _drafts(target: str, machine: TunedModels) -> list[str]:
    """The drafts that were named, auto as what it stands for."""
    from outrider.build import found_companion
    from outrider.drafters.companions import AUTO

    named = [name for name in machine.draft or () if name != AUTO]
    if len(named) == len(machine.draft or ()):
        return named
    choice = found_companion(machine.options(target))
    for note in choice.notes:
        session.say(f"note: {note}")
    return named if choice.draft is None else [*named, choice.draft]


def _serve(target: str, machine: TunedModels, result: TuneResult, settings: Path | None) -> str:
    """The command that serves the recommendation: by the settings file, or by options where none is
    written."""
    how = (
        _drafting(result.settings_file().options)
        if settings is None
        else ["--settings", str(settings)]
    )
    return shlex.join(["outrider", "serve", target, *typed(machine, "draft"), *how])


def _drafting(options: dict[str, Any]) -> list[str]:
    """Options of a settings file as they are typed, word by word."""
    from outrider.configuration import Configuration

    others = dict(options)
    names = [field.name for field in dataclasses.fields(Configuration)]
    drafting = {name: others.pop(name) for name in names if name in others}
    words = typed_words("drafter", Configuration(**drafting).label)
    for name, value in others.items():
        words += typed_words(name, value)
    return words
