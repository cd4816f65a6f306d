"""`explain`: run prompts, look at every rejection, say what caused it and what to do about it.

record      each prompt decoded as a user would, step by step, into a journal
read        one more pass of both models over each finished text (`distributions.py`)
account     every token lost, by cause (`causes.py`)
summarise   by position and kind of text, with advice (`summary.py`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.drafters.composite import CompositeDrafter
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.explain.causes import account
from outrider.lab.explain.distributions import FinishedText, forced_distributions
from outrider.lab.explain.explain_result import ExplainResult
from outrider.lab.explain.summary import ExplainedText, summarise
from outrider.lab.journal import Journal
from outrider.lab.progress import QUIET, Progress
from outrider.lab.runner import Contender, Runner, Step
from outrider.machine import versions
from outrider.sampling.params import SamplingParams

MAX_SHOWN = 4000  # tokens whose columns a result keeps: less than 3 MB


@dataclass(frozen=True)
class Question:
    """One prompt, as token ids."""

    tokens: Sequence[int]
    id: str = ""  # unique in its run
    task: str = "other"
    max_tokens: int | None = None  # fewer than the run's, where its log asked for fewer


@dataclass(frozen=True)
class RecordedPrompt:
    """One prompt's run, as plain data."""

    output: list[int]
    origins: list[str]  # per token: "accepted", "correction", "bonus" or "plain"
    steps: list[Step]
    seed: int
    other_cpu: float = 0.0  # share of the processors that others used meanwhile, 0..1

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecordedPrompt:
        """The recording that `asdict` made these data of."""
        return cls(**{**data, "steps": [Step(**step) for step in data["steps"]]})


def record(contender: Contender, question: Question, params: SamplingParams) -> RecordedPrompt:
    """Decode one prompt."""
    trace = contender.run([list(question.tokens)], params)[0]
    done = trace.completion
    return RecordedPrompt(
        list(done.token_ids), list(done.origins), trace.steps, done.seed, trace.other_cpu
    )


def explain(
    options: Options,
    configuration: Configuration,
    questions: Callable[[Runner], Sequence[Question]],
    params: SamplingParams,
    journal_path: Path,
    *,
    resume: bool = False,
    workload: str = "",
    max_shown: int = MAX_SHOWN,
    progress: Progress = QUIET,
) -> tuple[ExplainResult, Journal]:
    """The result, and the journal, which is closed when the result is safe.

    `questions`: from the loaded models, whose tokenizer they need. Sampled prompts get the seeds
    params.seed (0), + 1, ... After Ctrl-C the result is of the prompts that were finished
    (`interrupted`), or KeyboardInterrupt is raised where none was. Raises ConfigError for plain
    decoding or a journal of another plan, CapabilityError for lossy verifiers, RequestError for a
    prompt that cannot run.
    """
    check(configuration, params, lossy=options.lossy)
    if not params.is_greedy and params.seed is None:
        params = replace(params, seed=0)
    runner = Runner(options, [configuration], progress.say)
    contender = runner.open(configuration)
    asked = questions(runner)
    if not asked:
        raise ConfigError("there is no prompt to explain: give one, or --prompts FILE")
    plan = _identity(options, configuration, asked, params)
    journal = Journal.open(journal_path, plan, resume=resume)
    texts: list[ExplainedText] = []
    stopped = False
    progress.stage("decoding and explaining", len(asked))
    try:
        for number, question in enumerate(asked):
            texts.append(_explained(contender, question, number, params, journal))
            progress.advance()
    except KeyboardInterrupt:
        stopped = True
        if not texts:
            raise
    result = summarise(
        contender,
        texts,
        params,
        is_chain=_is_chain(contender),
        target=options.target,
        draft=options.draft,
        workload=workload,
        max_shown=max_shown,
    )
    if stopped:
        result.interrupted = True
        result.notes.append(
            f"the run was stopped: {len(texts)} of {len(asked)} prompts were explained"
        )
    return result, journal


def check(configuration: Configuration, params: SamplingParams, *, lossy: bool = False) -> None:
    """Before any model is read. Raises ConfigError or CapabilityError."""
    if configuration.is_plain:
        raise ConfigError(
            "plain decoding drafts nothing, so there is nothing to explain; choose a drafter"
        )
    verifier = configuration.parts(lossy=lossy).verifier
    if not verifier.lossless:
        raise CapabilityError(
            f"verifier '{verifier.name}' is lossy: what it keeps does not follow from how far "
            "target "
            "and draft agree, which is what explain takes apart; use a lossless one"
        )


def _identity(
    options: Options,
    configuration: Configuration,
    asked: Sequence[Question],
    params: SamplingParams,
) -> dict[str, Any]:
    """What an interrupted run must have in common with the one that continues it."""
    prompts = "\n".join(f"{question.id} {list(question.tokens)}" for question in asked)
    return {
        "verb": "explain",
        "models": asdict(options),
        "configuration": configuration.as_dict(),
        "sampling": asdict(params),
        "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:12],
        "versions": versions(),
    }


def _is_chain(contender: Contender) -> bool:
    """Whether one drafter alone drafts, and no trees."""
    decoder = contender.built.decoder
    is_mixed = isinstance(decoder.drafter, CompositeDrafter)
    return not (is_mixed or contender.built.draws_trees)


def _explained(
    contender: Contender,
    question: Question,
    number: int,
    params: SamplingParams,
    journal: Journal,
) -> ExplainedText:
    """Decode one prompt, unless the journal has it, and look at the text."""
    if question.max_tokens is not None:
        params = replace(params, max_tokens=params.limit(question.max_tokens))
    if params.seed is not None and not params.is_greedy:
        params = replace(params, seed=(params.seed + number) % 2**64)

    def recorded() -> dict[str, Any]:
        return asdict(record(contender, question, params))

    recording = RecordedPrompt.from_json(journal.unit(str(number), recorded))
    built = contender.built
    text = FinishedText(
        prompt=list(question.tokens),
        output=recording.output,
        params=params,
        limit=params.limit(built.context - len(question.tokens)),
        seed=recording.seed,
        coupled=built.decoder.verifier.coupled,
        step_lengths=[step.taken for step in recording.steps],
    )
    distributions = forced_distributions(built.target.lm, built.decoder.drafter, text)
    return ExplainedText.read(
        built.target.tokenizer,
        text,
        id=question.id,
        task=question.task,
        steps=recording.steps,
        fates=recording.origins,
        account=account(recording.steps, distributions, is_greedy=params.is_greedy),
        other_cpu=recording.other_cpu,
    )
