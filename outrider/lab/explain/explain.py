"""`explain`: run prompts, look at every rejection, say what caused it and what to do about it.

record      each prompt decoded as a user would, step by step
read        one more pass of both models over each finished text (`distributions.py`)
account     every token lost, by cause (`causes.py`)
summarise   by position and kind of text, with advice (`summary.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.explain.causes import account
from outrider.lab.explain.distributions import FinishedText, forced_distributions
from outrider.lab.explain.explain_result import ExplainedText, ExplainResult
from outrider.lab.explain.summary import ReadText, add_words, summarise
from outrider.lab.journal import Journal
from outrider.lab.runner import Contender, Runner, Trace
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.sampling.params import SamplingParams

MAX_SHOWN = 4000  # tokens whose places a result keeps: about 2 MB


TRACE = TypeAdapter(Trace)  # as the journal keeps it


def explain(
    options: Options,
    configuration: Configuration,
    prompts_of: Callable[[Runner], Sequence[PreparedPrompt]],
    params: SamplingParams,
    *,
    workload: str = "",
    max_shown: int = MAX_SHOWN,
    journal: Journal | None = None,
) -> ExplainResult:
    """Decode all prompts, and look at every text.

    `prompts_of`: from the loaded models, whose tokenizer they need. Sampled prompts get the seeds
    params.seed (0), + 1, ... The journal keeps how each was decoded. After Ctrl-C the result is of
    the prompts that were finished (`interrupted`), or KeyboardInterrupt is raised where none was.
    Raises ConfigError for plain decoding, CapabilityError for lossy verifiers, RequestError for a
    prompt that cannot run.
    """
    check(configuration, params, lossy=options.lossy)
    if not params.is_greedy and params.seed is None:
        params = replace(params, seed=0)
    journal = Journal() if journal is None else journal
    runner = Runner(options, [configuration], journal.progress.say)
    contender = runner.open(configuration)
    prompts = prompts_of(runner)
    if not prompts:
        raise ConfigError("there is no prompt to explain: give one, or --prompts FILE")
    texts: list[ReadText] = []
    stopped = False
    journal.progress.stage("decoding and explaining", len(prompts))
    try:
        if contender.keeps_learning:  # it must have seen what an interrupted run had finished
            for number in range(len(journal)):
                _trace(contender, prompts[number], number, params)
        for number, prompt in enumerate(prompts):
            decoded = journal.unit(f"prompt {number}", _trace, contender, prompt, number, params)
            texts.append(_read(contender, prompt, TRACE.validate_python(decoded), params))
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
            f"the run was stopped: {len(texts)} of {len(prompts)} prompts were explained"
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


def _trace(
    contender: Contender, prompt: PreparedPrompt, number: int, params: SamplingParams
) -> dict[str, Any]:
    """One prompt decoded, as plain JSON data."""
    seed = None if params.seed is None else (params.seed + number) % 2**64
    of_prompt = replace(params, seed=seed, max_tokens=params.limit(prompt.max_tokens))
    [trace] = contender.run([prompt.tokens], of_prompt)
    unit: dict[str, Any] = TRACE.dump_python(trace, mode="json")
    return unit


def _read(
    contender: Contender, prompt: PreparedPrompt, trace: Trace, params: SamplingParams
) -> ReadText:
    """The account of one finished text."""
    built = contender.built
    text = FinishedText(
        prompt=prompt.tokens,
        output=trace.completion.token_ids,
        params=params,
        seed=trace.completion.seed,
        coupled=built.decoder.verifier.coupled,
        step_lengths=[step.taken for step in trace.steps],
    )
    distributions = forced_distributions(built.target.lm, built.decoder.drafter, text)
    lost = account(trace.steps, distributions, is_greedy=params.is_greedy)
    words = add_words(built.target.tokenizer, text, trace.completion.origins, lost.places)
    request = prompt.request
    explained = ExplainedText(id=request.id, task=request.task, prompt=words, places=lost.places)
    return ReadText(explained, trace, lost.ideal)
