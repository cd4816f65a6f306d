"""`outrider generate TARGET [PROMPT]`: one answer, streamed, or as one JSON object."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli import session
from outrider.cli.options import (
    GENERATION_CONFIG,
    SAMPLING,
    FormOptions,
    Json,
    ModelOptions,
    SamplingOptions,
    ShowDrafts,
    Target,
)
from outrider.cli.stream import MarkedText, PlainStream, Printer, run_stream
from outrider.cli.typed import read_prompt
from outrider.cli.verbs import listed, with_groups
from outrider.errors import ConfigError
from outrider.report.text import printable, stats_line, to_json
from outrider.wellformed import read_text

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion
    from outrider.sampling.params import SamplingParams

Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; - and none: standard input.", show_default=False)
]
ANSWER = "Answer"
Stream = Annotated[bool, listed(ANSWER, "Print the answer while it is made, or once it is whole.")]
ChatTemplate = Annotated[
    bool | None,
    listed(
        ANSWER,
        "Wrap the prompt in the model's chat template, or send it as it is.",
        show_default="the template, where the model has one",
    ),
]
Logprobs = Annotated[
    int | None,
    listed(
        ANSWER,
        "With --json: the target's log-probabilities, this many per token.",
        show_default=False,
    ),
]
# where the prediction ends, a draft model continues
PREDICTING = "composite parts=draft-model+prediction mode=best"
PredictionFile = Annotated[
    Path | None,
    listed(
        ANSWER,
        "What the answer is expected to be, like the file to be edited: drafted from where it "
        "comes true. The answer "
        "does not depend on it. Drafter: prediction, with --draft a composite of both.",
        metavar="FILE",
        show_default=False,
        common=True,
    ),
]
GenerationConfig = Annotated[
    str | None,
    listed(SAMPLING, GENERATION_CONFIG, metavar="auto|none|FOLDER", show_default="none, so greedy"),
]


@with_groups
def generate(
    target: Target,
    model: ModelOptions,
    sampling: SamplingOptions,
    form: FormOptions,
    prompt: Prompt = None,
    prediction: PredictionFile = None,
    chat_template: ChatTemplate = None,
    show_drafts: ShowDrafts = False,
    stream: Stream = True,
    logprobs: Logprobs = None,
    generation_config: GenerationConfig = None,
    json: Json = False,
) -> int:
    """Answer one prompt, greedily by default."""
    if logprobs is not None and not json:
        raise ConfigError("--logprobs needs --json: log-probabilities are only printed there.")
    if show_drafts and not stream and not json:
        raise ConfigError("--show-drafts marks the stream: leave --no-stream out, or use --json.")
    structured = form.structured_outputs()
    sampling.params(logprobs)  # refuses what is out of range before anything is loaded
    text = read_prompt(prompt)
    expected = (
        None if prediction is None else read_text(prediction, f"the prediction '{prediction}'")
    )
    if expected is not None:
        model = with_prediction(target, model)
    with session.load_llm(target, model, generation_config or "none") as llm:
        params = dataclasses.replace(
            sampling.params(logprobs, llm.sampling_defaults.values), structured_outputs=structured
        )
        if generation_config is None and (unused := llm.sampling_defaults.unused):
            sys.stderr.write(
                f"note: {unused}, which is left aside (--generation-config auto takes what is "
                "supported)\n"
            )
        is_chat = llm.has_chat_template if chat_template is None else chat_template
        question = llm.chat_prompt([{"role": "user", "content": text}]) if is_chat else text
        completion = run_stream(
            llm, question, params, _printer(json or not stream, show_drafts), expected
        )
        summary = llm.drafter_summary
    for note in [*full_context(completion, params), *summary]:
        sys.stderr.write(f"note: {note}\n")
    if json:
        sys.stdout.write(to_json(as_object(llm, completion, params, show_drafts, is_chat)) + "\n")
    else:
        if not stream:
            _print_whole(completion.text)
        seeded = _seeded(completion, params)
        line = stats_line(
            completion.stats,
            completion.finish_reason,
            lossless=completion.lossless,
            prompt_share=completion.prompt_share,
            seeded=seeded,
        )
        sys.stderr.write(f"{line}\n")
    return 130 if completion.finish_reason == "abort" else 0


def with_prediction(target: str, model: ModelOptions) -> ModelOptions:
    """The options with a drafter that looks at a prediction, where none was named. Raises
    ConfigError for one that does not, before any model is read."""
    from outrider.build import Options, choose

    if model.drafter == "auto" and model.settings is None:
        model = dataclasses.replace(
            model, drafter="prediction" if model.draft is None else PREDICTING
        )
    _, parts = choose(Options(target, **model.llm_arguments()))
    if not parts.requirements.prediction:
        raise ConfigError(
            f"drafter '{parts.drafter_name}' does not look at a prediction: leave --drafter out, "
            "or use --drafter prediction, or composite with it among the parts."
        )
    return model


def full_context(completion: Completion, params: SamplingParams) -> list[str]:
    """A note for an answer that ended because the context was full, not at the length that was
    asked for."""
    num_prompt = len(completion.prompt_token_ids)
    num_output = len(completion.token_ids)
    most = params.max_tokens
    if completion.finish_reason != "length" or (most is not None and num_output >= most):
        return []
    wanted = "" if most is None else f" of up to {most}"
    return [
        f"the context of {num_prompt + num_output} tokens is full: {num_output}{wanted} new tokens after "
        f"{num_prompt} of the prompt"
    ]


def _seeded(completion: Completion, params: SamplingParams) -> str | None:
    """The seed and the rule of a sampled answer that was to be repeatable."""
    if params.seed is None or params.is_greedy:
        return None
    return f"seed {completion.seed}, verifier {completion.verifier}"


def as_object(
    llm: LLM, completion: Completion, params: SamplingParams, with_origins: bool, is_chat: bool
) -> dict[str, Any]:
    """The object `--json` prints. `logprobs` and `origins` (one per token) only where they were
    asked for."""
    answer: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "lossless": completion.lossless,
        "prompt_share": completion.prompt_share,
        "verifier": completion.verifier,
        "stats": completion.stats.as_dict(),
        "control": llm.control,
        "config": {
            **llm.config,
            "chat_template": is_chat,
            "sampling": {**dataclasses.asdict(params), "seed": completion.seed},
        },
        "versions": llm.versions,
        **({"drafter_counters": counters} if (counters := llm.drafter_counters) else {}),
        "notes": [*llm.notes, *full_context(completion, params)],
    }
    if completion.logprobs is not None:
        answer["logprobs"] = completion.logprobs
    if with_origins:
        answer["origins"] = list(completion.origins)
    return answer


def _printer(silent: bool, show_drafts: bool) -> Printer:
    if silent or not show_drafts:
        return Printer() if silent else PlainStream()
    marked = MarkedText(Console(highlight=False))
    Console(stderr=True, highlight=False).print(marked.legend())
    return marked


def _print_whole(text: str) -> None:
    text = printable(text) if sys.stdout.isatty() else text
    sys.stdout.write(text + ("" if text.endswith("\n") else "\n"))
