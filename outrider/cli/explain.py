"""`outrider explain TARGET [PROMPT]`: why drafts are rejected, what each cause costs, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.bench_options import PROMPTS, PromptOptions, ServerOptions, changed
from outrider.cli.lab import (
    OUTPUT,
    OutputOptions,
    Resume,
    command_line,
    deliver,
    interrupted,
    journal_for,
    shown_progress,
)
from outrider.cli.options import ModelOptions, PromptFile, SamplingOptions, ServerTarget, option, with_groups
from outrider.cli.server_study import ask_server, is_server, refuse_for_server, refuse_without_server
from outrider.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from outrider.build import Options
    from outrider.lab.configuration import Configuration
    from outrider.lab.explain.recorded import Question
    from outrider.lab.runner import Runner
    from outrider.lab.workload.types import Workload

OWN_PROMPT = "your prompt"


Prompt = Annotated[
    str | None, typer.Argument(help="One prompt instead of a workload.", show_default=False)
]
Texts = Annotated[int, option(OUTPUT, "Most tokens whose text is shown, with the numbers of each.", min=0)]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(PromptOptions):
    """Which prompts."""

    prompts: Annotated[int, option(PROMPTS, "Most prompts.", min=1)] = 16

    def load(self, target: str) -> Workload:
        """The first ones. Raises ConfigError."""
        return self.load_first(target, self.prompts)


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """What only a model in this process can be asked."""

    prompt: str | None = None
    prompt_file: Path | None = None
    show_tokens: int = 4000


@with_groups
def explain(
    target: ServerTarget,
    models: ModelOptions,
    sampling: SamplingOptions,
    workload: WorkloadOptions,
    servers: ServerOptions,
    output: OutputOptions,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    show_tokens: Texts = 4000,
    resume: Resume = False,
) -> int:
    """Say why draft tokens are rejected, what each cause costs, and what to do about it."""
    output.check()
    if is_server(target):
        refuse_for_server(changed(models, Prompted(prompt=prompt, prompt_file=prompt_file, show_tokens=show_tokens)))
        if servers.baseline_url is not None:
            raise ConfigError("explain is about one server; 'outrider bench' and 'outrider tune' compare it with --baseline-url")
        return ask_server("explain", target, servers, sampling.params(), workload, output, resume=resume)
    refuse_without_server(servers)
    from outrider.cli.session import quieten_libraries
    from outrider.lab.explain.explain import explain as run

    asked, params = _asked(target, prompt, prompt_file, workload), sampling.params()
    options, configuration = _chosen(target, models, greedy=params.is_greedy)
    path = journal_for(output.out, "explain", resume=resume)
    quieten_libraries()

    def questions(runner: Runner) -> list[Question]:
        return _questions(runner, asked, workload, params.required_max_tokens)

    try:
        with shown_progress() as progress:
            result, journal = run(
                options, configuration, questions, params, path, resume=resume, workload=asked.name, max_shown=show_tokens,
                progress=progress, status=progress.say,
            )  # fmt: skip
    except KeyboardInterrupt:
        return interrupted(path)
    deliver(result.model_copy(update={"command": command_line()}), output)
    if result.interrupted:
        return interrupted(path)
    journal.close()
    return 0


def _chosen(target: str, model: ModelOptions, *, greedy: bool) -> tuple[Options, Configuration]:
    """Models and configuration; what drafter 'auto' means, and whether --draft is a model or a head, is settled as in
    `outrider.LLM`. Raises CapabilityError for a head that would draw its drafts."""
    from outrider.build import Options, choose
    from outrider.lab.configuration import Configuration

    options, parts = choose(Options(target=target, **model.llm_arguments()))
    if not greedy and any(kind.needs_head for kind, _ in parts.drafter.heads_of(parts.drafter_settings)):
        raise CapabilityError(
            "a trained head draws from laws that depend on the target's hidden states, which a recording does not hold: "
            "explain it greedily (--temperature 0)"
        )
    configuration = Configuration(
        parts.drafter_name, options.num_draft_tokens, options.drafter_options, options.verifier, options.verifier_options
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
    """The prompts as token ids. One prompt of the user's own may be cut by the context, as in `generate`; a workload's must
    fit."""
    from outrider.lab.explain.recorded import Question
    from outrider.lab.workload.prompts import prepare, to_tokens

    if asked.name == OWN_PROMPT:
        return [Question(to_tokens(asked.requests[0], runner.tokenizer), OWN_PROMPT)]
    prepared = prepare(
        asked, runner.tokenizer, context=runner.context, max_tokens=max_tokens, on_bad=workload.on_bad,
        chat_template=workload.chat_template,
    )  # fmt: skip
    return [Question(one.tokens, one.request.id, one.request.task, one.max_tokens) for one in prepared.prompts]
