"""`explain`: run prompts, look at every rejection, say what caused it and what to do about it.

record      each prompt decoded as a user would, step by step
read        one more pass of both models over each finished text (`distributions.py`)
account     every token lost, by cause (`causes.py`)
summarise   by position and kind of text, with advice (`summary.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.explain.causes import account
from outrider.lab.explain.distributions import FinishedText, forced_distributions
from outrider.lab.explain.explain_result import ExplainedText, ExplainResult
from outrider.lab.explain.summary import ReadText, add_words, summarise
from outrider.lab.progress import QUIET, Progress
from outrider.lab.runner import Contender, Runner
from outrider.sampling.params import SamplingParams

MAX_SHOWN = 4000  # tokens whose places a result keeps: about 2 MB


@dataclass(frozen=True)
class Question:
    """One prompt, as token ids."""

    tokens: Sequence[int]
    id: str = ""  # unique in its run
    task: str = "other"
    max_tokens: int | None = None  # fewer than the run's, where its log asked for fewer


def explain(
    options: Options,
    configuration: Configuration,
    questions: Callable[[Runner], Sequence[Question]],
    params: SamplingParams,
    *,
    workload: str = "",
    max_shown: int = MAX_SHOWN,
    progress: Progress = QUIET,
) -> ExplainResult:
    """Decode all prompts, and look at every text.

    `questions`: from the loaded models, whose tokenizer they need. Sampled prompts get the seeds
    params.seed (0), + 1, ... After Ctrl-C the result is of the prompts that were finished
    (`interrupted`), or KeyboardInterrupt is raised where none was. Raises ConfigError for plain
    decoding, CapabilityError for lossy verifiers, RequestError for a prompt that cannot run.
    """
    check(configuration, params, lossy=options.lossy)
    if not params.is_greedy and params.seed is None:
        params = replace(params, seed=0)
    runner = Runner(options, [configuration], progress.say)
    contender = runner.open(configuration)
    asked = questions(runner)
    if not asked:
        raise ConfigError("there is no prompt to explain: give one, or --prompts FILE")
    texts: list[ReadText] = []
    stopped = False
    progress.stage("decoding and explaining", len(asked))
    try:
        for number, question in enumerate(asked):
            texts.append(_explained(contender, question, number, params))
            progress.advance()
    except KeyboardInterrupt:
        stopped = True
        if not texts:
            raise
    result = summarise(
        contender,
        texts,
        params,
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
    return result


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
            "target and draft agree, which is what explain takes apart; use a lossless one"
        )


def _explained(
    contender: Contender, question: Question, number: int, params: SamplingParams
) -> ReadText:
    """Decode one prompt, and look at the text."""
    if question.max_tokens is not None:
        params = replace(params, max_tokens=params.limit(question.max_tokens))
    if params.seed is not None and not params.is_greedy:
        params = replace(params, seed=(params.seed + number) % 2**64)
    built = contender.built
    trace = contender.run([list(question.tokens)], params)[0]
    text = FinishedText(
        prompt=list(question.tokens),
        output=trace.completion.token_ids,
        params=params,
        limit=params.limit(built.context - len(question.tokens)),
        seed=trace.completion.seed,
        coupled=built.decoder.verifier.coupled,
        step_lengths=[step.taken for step in trace.steps],
    )
    distributions = forced_distributions(built.target.lm, built.decoder.drafter, text)
    tally = account(trace.steps, distributions, is_greedy=params.is_greedy)
    prompt = add_words(built.target.tokenizer, text, trace.completion.origins, tally.places)
    return ReadText(
        ExplainedText(id=question.id, task=question.task, prompt=prompt, places=tally.places),
        trace,
        tally.ideal,
    )
