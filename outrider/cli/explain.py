"""`outrider explain TARGET [PROMPT]`: why drafts are rejected, what each cause costs, and what to do about it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.lab import OUTPUT, OutputOptions, command_line, deliver, journal_path, shown_progress
from outrider.cli.options import ModelOptions, PromptFile, SamplingOptions, Target, with_groups
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.build import Options
    from outrider.lab.configuration import Configuration
    from outrider.lab.explain.recorded import Question
    from outrider.lab.runner import Runner
    from outrider.lab.workload.types import Workload

INTERRUPTED = 130
PROMPTS = "Prompts"
DEMO = "demo"
OWN_PROMPT = "your prompt"


def _option(panel: str, text: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **extra)


Prompt = Annotated[
    str | None, typer.Argument(help="One prompt instead of a workload.", show_default=False)
]
Resume = Annotated[bool, _option(OUTPUT, "Go on with an interrupted run.", "--resume")]
Texts = Annotated[int, _option(OUTPUT, "Most tokens whose text is shown, with the numbers of each.", min=0)]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Which prompts."""

    workload: Annotated[
        str | None,
        _option(
            PROMPTS, "A prompts file, a built-in name (docs/workloads.md), several with + between.", metavar="FILE_OR_NAME",
            show_default="demo for the demo target, else embedded:reasoning",
        ),
    ] = None  # fmt: skip
    data: Annotated[Path | None, _option(PROMPTS, "Folder with the files of named workloads.", show_default=False)] = None
    on_bad: Annotated[Literal["refuse", "skip"], _option(PROMPTS, "Bad lines, and prompts that do not fit.")] = "refuse"
    prompts: Annotated[int, _option(PROMPTS, "Most prompts.", min=1)] = 16
    chat_template: Annotated[
        bool,
        _option(PROMPTS, "Wrap conversations in the model's chat template, or send them as plain text.", "--chat-template/--raw"),
    ] = True

    def load(self, target: str) -> Workload:
        """Raises ConfigError."""
        from outrider.lab.workload.load import load_workload

        name = self.workload or (DEMO if target == DEMO else "embedded:reasoning")
        return load_workload(name, limit=self.prompts, on_bad=self.on_bad, data=self.data)


@with_groups
def explain(
    target: Target,
    model: ModelOptions,
    sampling: SamplingOptions,
    workload: WorkloadOptions,
    output: OutputOptions,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    show_tokens: Texts = 4000,
    resume: Resume = False,
) -> int:
    """Say why draft tokens are rejected, what each cause costs, and what to do about it."""
    output.check()
    from outrider.cli.session import quieten_libraries
    from outrider.lab.explain.explain import explain as run

    options, configuration = _chosen(target, model)
    asked, params = _asked(target, prompt, prompt_file, workload), sampling.params()
    path = journal_path(output.out, "explain")
    if path.exists() and not resume:
        sys.stderr.write(f"note: {path} of an interrupted run is begun anew (--resume would have gone on with it)\n")
    quieten_libraries()

    def questions(runner: Runner) -> list[Question]:
        return _questions(runner, asked, workload, params.max_tokens)

    try:
        with shown_progress() as progress:
            result, journal = run(
                options, configuration, questions, params, path, resume=resume, workload=asked.name, max_shown=show_tokens,
                progress=progress, status=progress.say,
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = f"; what is finished is in {path}: the same command with --resume goes on" if path.exists() else ""
        sys.stderr.write(f"interrupted{kept}\n")
        return INTERRUPTED
    deliver(result.model_copy(update={"command": command_line()}), output)
    journal.close()
    return 0


def _chosen(target: str, model: ModelOptions) -> tuple[Options, Configuration]:
    """Models and configuration; what drafter 'auto' means is settled here, as `outrider.LLM` does."""
    from outrider.build import Options
    from outrider.lab.configuration import Configuration

    options = Options(target=target, **model.llm_arguments())
    drafter = options.drafter
    if drafter == "auto":
        drafter = "draft-model" if options.draft is not None or target == DEMO else "ngram"
    configuration = Configuration(
        drafter, options.num_draft_tokens, options.drafter_options, options.verifier, options.verifier_options
    )
    return options, configuration


def _asked(target: str, prompt: str | None, file: Path | None, workload: WorkloadOptions) -> Workload:
    """The prompt given, or the workload. Raises ConfigError for both."""
    from outrider.cli.prompt import read_prompt
    from outrider.lab.workload.types import Request, Workload

    if prompt is None and file is None:
        return workload.load(target)
    if workload.workload is not None:
        raise ConfigError("a prompt and --workload: give one of them")
    return Workload(OWN_PROMPT, (Request(id=OWN_PROMPT, prompt=read_prompt(prompt, file)),))


def _questions(runner: Runner, asked: Workload, workload: WorkloadOptions, max_tokens: int) -> list[Question]:
    """As token ids. One prompt of the user's own may be cut by the context, as in `generate`; a workload's must fit."""
    from outrider.lab.explain.recorded import Question
    from outrider.lab.workload.prompts import prepare, to_tokens

    if asked.name == OWN_PROMPT:
        return [Question(to_tokens(asked.requests[0], runner.tokenizer), OWN_PROMPT)]
    prepared = prepare(
        asked, runner.tokenizer, context=runner.context, max_tokens=max_tokens, on_bad=workload.on_bad,
        chat_template=workload.chat_template,
    )  # fmt: skip
    return [Question(one.tokens, one.request.id, one.request.task, one.max_tokens) for one in prepared.prompts]
