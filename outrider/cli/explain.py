"""`outrider explain TARGET [PROMPT]`: why drafts are rejected, what each cause costs, and what to
do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import session
from outrider.cli.lab import OUTPUT, OutputOptions, Resume, measure
from outrider.cli.options import (
    SAMPLING,
    SELDOM_MODEL,
    SELDOM_SAMPLING,
    ModelOptions,
    SamplingOptions,
    Target,
)
from outrider.cli.prompting import PROMPTS, SELDOM_READING, ConversationOptions
from outrider.cli.typed import read_prompt
from outrider.cli.verbs import gathered, listed, option
from outrider.errors import ConfigError
from outrider.extras import check_lab
from outrider.lab.journal import Journal
from outrider.lab.progress import Progress

if TYPE_CHECKING:
    from outrider.build import Options
    from outrider.configuration import Configuration
    from outrider.lab.explain.explain_result import ExplainResult
    from outrider.lab.runner import Runner
    from outrider.lab.workload.prompts import PreparedPrompt
    from outrider.lab.workload.types import Workload

OWN_PROMPT = "your prompt"
MAX_SHOWN = 4000


Prompt = Annotated[
    str | None,
    typer.Argument(
        help="One prompt instead of --prompts; - is standard input.", show_default=False
    ),
]
Texts = Annotated[
    int, listed(OUTPUT, "Max tokens whose text is shown, with the numbers of each.", min=0)
]


@dataclass(frozen=True, kw_only=True)
class ExplainedOptions(ConversationOptions):
    """Which prompts: the first ones of all tasks."""

    limit: int = option(16, PROMPTS, "Most prompts.", min=1, common=True)


@dataclass(frozen=True, kw_only=True)
class ExplainedSampling(SamplingOptions):
    """How the recorded answers are sampled."""

    seed: int | None = option(None, SAMPLING, "Of sampled answers.", show_default="0", common=True)


@gathered(
    sampling=SELDOM_SAMPLING,
    model_options=SELDOM_MODEL,
    reading=(*SELDOM_READING, "show_tokens"),
)
def explain(
    target: Target,
    models: ModelOptions,
    sampling: ExplainedSampling,
    prompts: ExplainedOptions,
    output: OutputOptions,
    prompt: Prompt = None,
    show_tokens: Texts = MAX_SHOWN,
    resume: Resume = False,
) -> int:
    """Say why draft tokens are rejected, what each cause costs, and what to do about it."""
    check_lab("explain")
    from outrider.lab.explain.explain import explain as run_explain
    from outrider.lab.workload.types import identity

    output.check()
    params = sampling.params()
    max_tokens = params.required_max_tokens
    asked = _asked(target, prompt, prompts)
    options, configuration = _chosen(target, models)
    facts = identity(
        "explain",
        options,
        asked,
        chat_template=prompts.chat_template,
        configuration=configuration.label,
        sampling=asdict(params),
        on_bad=prompts.on_bad,
    )

    def run(path: Path, *, resume: bool, progress: Progress) -> ExplainResult:
        with Journal.open(path, facts, resume=resume, progress=progress) as journal:
            return run_explain(
                options,
                configuration,
                partial(_prepared, asked=asked, prompts=prompts, max_tokens=max_tokens),
                params,
                workload=asked.name,
                max_shown=show_tokens,
                journal=journal,
            )

    return measure("explain", output, run, resume=resume)


def _chosen(target: str, model: ModelOptions) -> tuple[Options, Configuration]:
    """Models and configuration, with drafter 'auto' and --draft settled as in `outrider.LLM`."""
    from outrider.build import Options, choose
    from outrider.configuration import Configuration

    options, parts = choose(Options(target=target, **model.llm_arguments()))
    for note in parts.notes:
        session.say(f"note: {note}")
    configuration = Configuration(
        parts.drafter_name,
        options.num_draft_tokens,
        options.drafter_options,
        options.verifier,
        options.verifier_options,
    )
    return options, configuration


def _asked(target: str, prompt: str | None, prompts: ExplainedOptions) -> Workload:
    """The prompt given, or those of --prompts. Raises ConfigError for both."""
    from outrider.lab.workload.types import Workload, WorkloadRequest

    if prompt is None:
        return prompts.load(target, prompts.limit)
    if prompts.prompts is not None:
        raise ConfigError("a prompt and --prompts: give one of them")
    return Workload(OWN_PROMPT, (WorkloadRequest(id=OWN_PROMPT, prompt=read_prompt(prompt)),))


def _prepared(
    runner: Runner, asked: Workload, prompts: ExplainedOptions, max_tokens: int
) -> Sequence[PreparedPrompt]:
    """The prompts as token ids. One prompt of the user's own is in the chat template where the
    model has one, and may be cut by the context, as in `generate`; a workload's must fit."""
    from outrider.lab.workload.prompts import PreparedPrompt, prepare, to_tokens
    from outrider.messages import template_text

    if asked.name == OWN_PROMPT:
        [request] = asked.requests
        if prompts.chat_template and template_text(runner.tokenizer):
            request = replace(
                request, prompt=None, messages=({"role": "user", "content": request.prompt or ""},)
            )
        return [PreparedPrompt(request, to_tokens(request, runner.tokenizer), max_tokens)]
    return prepare(
        asked,
        runner.tokenizer,
        context=runner.context,
        max_tokens=max_tokens,
        on_bad=prompts.on_bad,
        chat_template=prompts.chat_template,
        answer=runner.answer,
    ).prompts
