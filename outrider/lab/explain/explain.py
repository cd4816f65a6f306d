"""`explain`: run prompts, look at every rejection, say what caused it and what to do about it.

record      each prompt decoded as a user would, step by step
read        one more pass of both models over each finished text (`distributions.py`)
account     every token lost, by cause (`causes.py`)
summarise   by position and kind of text, with advice
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.drafters.composite import CompositeDrafter
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.explain.advice import advise
from outrider.lab.explain.causes import CAUSES, account
from outrider.lab.explain.distributions import FinishedText, forced_distributions
from outrider.lab.explain.explain_result import (
    CauseRow,
    ExplainedText,
    ExplainResult,
    GroupRow,
    LevelRow,
    Place,
    Times,
)
from outrider.lab.explain.regions import KINDS, SECTIONS, token_kinds, token_sections
from outrider.lab.intervals import proportion, ratio_of_sums
from outrider.lab.journal import Journal
from outrider.lab.runner import Contender, Runner, Step, Trace
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.models.tokens.token_bytes import token_name
from outrider.sampling.params import SamplingParams
from outrider.stats import sum_parts
from outrider.text import Detokenizer, decode

MAX_SHOWN = 4000  # tokens whose places a result keeps: about 2 MB
PROMPT_END = 400  # characters of the prompt that decide about sections and sentences
TRACE = TypeAdapter(Trace)  # as the journal keeps it


@dataclass(frozen=True)
class ReadText:
    """One text of the run, with its account."""

    text: ExplainedText
    trace: Trace
    ideal: float  # tokens that its steps could have emitted

    @property
    def places(self) -> list[Place]:
        return self.text.places


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
    if options.prefill is not None:
        raise ConfigError(
            "--prefill has the target read a share of the prompt, and explain looks at what it "
            "makes of the whole: leave it out"
        )
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
    result = _summary(contender, texts, params, options, workload)
    shown = list(_shown(texts, max_shown))
    result.texts = [text.text for text in shown]
    if len(shown) < len(texts):
        result.notes.append(
            f"the first {len(shown)} of {len(texts)} texts are shown; the numbers are of all of "
            "them"
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
    text = FinishedText(trace, params, built.decoder.verifier.coupled)
    distributions = forced_distributions(built.target.lm, built.decoder.drafter, text)
    lost = account(trace.steps, distributions, is_greedy=params.is_greedy)
    words = _add_words(built.target.tokenizer, text, lost.places)
    request = prompt.request
    explained = ExplainedText(id=request.id, task=request.task, prompt=words, places=lost.places)
    return ReadText(explained, trace, lost.ideal)


def _add_words(tokenizer: Any, text: FinishedText, places: Sequence[Place]) -> str:
    """Gives every place its words; returns the prompt's."""
    # an unfinished character at the end of the prompt belongs to the answer
    prompt = decode(tokenizer, text.prompt, special=True, flush=False)
    detokenizer = Detokenizer(tokenizer, list(text.prompt))
    pieces = [detokenizer.push(token) for token in text.output]
    if pieces:
        pieces[-1] += detokenizer.flush()
    end = prompt[-PROMPT_END:]
    words = zip(
        pieces,
        text.trace.completion.origins,
        token_kinds(end, pieces),
        token_sections(end, pieces),
        places,
        strict=True,
    )
    for piece, fate, kind, section, place in words:
        place.piece = piece
        place.fate = fate
        place.kind = kind
        place.section = section
        if place.is_rejection:
            place.rejected = token_name(tokenizer, place.tested[0])
    if pieces and not pieces[-1]:  # a last token without text, the end of text, shows its name
        places[-1].piece = token_name(tokenizer, text.output[-1])
    return prompt


def _summary(
    contender: Contender,
    texts: Sequence[ReadText],
    params: SamplingParams,
    options: Options,
    workload: str,
) -> ExplainResult:
    built = contender.built
    places = [place for text in texts for place in text.places]
    steps = [len(text.trace.steps) for text in texts]
    emitted = [len(text.places) for text in texts]
    tested = [sum(bool(place.tested) for place in text.places) for text in texts]
    accepted = [sum(place.is_kept for place in text.places) for text in texts]
    tau = ratio_of_sums(emitted, steps)
    times = _times([step for text in texts for step in text.trace.steps[1:]])
    result = ExplainResult(
        target=options.target,
        draft=options.draft,
        configuration=contender.configuration.label,
        verifier=built.decoder.verifier.name,
        is_greedy=params.is_greedy,
        has_draft_probs=any(place.q_token is not None for place in places),
        is_chain=not (isinstance(built.decoder.drafter, CompositeDrafter) or built.draws_trees),
        sampling=_sampling(params),
        num_draft_tokens=str(contender.config["num_draft_tokens"]),
        workload=workload,
        texts_read=len(texts),
        steps=sum(steps),
        emitted=sum(emitted),
        drafted=sum(len(step.tokens) for text in texts for step in text.trace.steps),
        tested=sum(tested),
        accepted=sum(accepted),
        ideal=sum(text.ideal for text in texts),
        tau=tau,
        alpha=ratio_of_sums(accepted, tested) if all(tested) else None,
        tokens_per_s=None if times is None else tau.value / times.step_s,
        other_cpu=max(text.trace.other_cpu for text in texts),
        times=times,
        causes=list(_causes(places, sum(steps), times)),
        by_part=sum_parts(*(text.trace.stats.parts for text in texts)),
        by_level=list(_by_level(places)),
        by_kind=list(_groups(KINDS, [(place.kind, place) for place in places])),
        by_section=list(_groups(SECTIONS, [(place.section, place) for place in places])),
        advice=[],
        notes=list(built.notes),
    )
    if len(result.by_section) == 1:  # nothing is marked
        result.by_section = []
    result.advice = advise(result)
    return result


def _shown(texts: Sequence[ReadText], max_shown: int) -> Iterator[ReadText]:
    """The first texts, as many as fit into this many tokens; one at least, if any are wanted."""
    room = max_shown
    for number, text in enumerate(texts):
        room -= len(text.places)
        if max_shown <= 0 or (room < 0 and number):
            break
        yield text


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Settings that differ from greedy decoding without filters, and the number of tokens."""
    plain = asdict(SamplingParams())
    always = ("temperature", "max_tokens")
    return {
        name: value
        for name, value in asdict(params).items()
        if value != plain[name] or name in always
    }


def _times(steps: Sequence[Step]) -> Times | None:
    """Means over these steps; None where there is none."""
    seconds = sum(step.seconds / step.rows for step in steps)
    if seconds <= 0:
        return None
    draft_s = sum(step.draft_s / step.rows for step in steps)
    levels = sum(step.num_levels for step in steps)
    return Times(
        step_s=seconds / len(steps),
        draft_s=draft_s / len(steps),
        draft_level_s=draft_s / levels if levels else 0.0,
        steps=len(steps),
    )


def _causes(places: Sequence[Place], steps: int, times: Times | None) -> Iterator[CauseRow]:
    for cause in CAUSES:
        tokens = sum(place.lost.get(cause, 0.0) for place in places)
        yield CauseRow(
            cause=cause,
            tokens=tokens,
            tokens_per_step=tokens / steps,
            tokens_per_s=None if times is None else tokens / (steps * times.step_s),
        )


def _by_level(places: Sequence[Place]) -> Iterator[LevelRow]:
    """The n-th level of a draft, of chains and trees alike."""
    tested = [place for place in places if place.tested]
    for level in range(max((place.level for place in tested), default=-1) + 1):
        here = [place for place in tested if place.level == level]
        if here:
            kept = sum(place.is_kept for place in here)
            share = proportion(kept, len(here))
            yield LevelRow(level=level + 1, tested=len(here), kept=kept, share=share)


def _groups(names: Sequence[str], places: Sequence[tuple[str, Place]]) -> Iterator[GroupRow]:
    """In the order of `names`, without empty ones."""
    for name in names:
        here = [place for group, place in places if group == name]
        if not here:
            continue
        tested = sum(bool(place.tested) for place in here)
        kept = sum(place.is_kept for place in here)
        gaps = [place.disagreement for place in here if place.disagreement is not None]
        yield GroupRow(
            name=name,
            tokens=len(here),
            tested=tested,
            kept=kept,
            share=proportion(kept, tested) if tested else None,
            lost=sum(sum(place.lost.values()) for place in here if place.is_rejection),
            disagreement=sum(gaps) / len(gaps) if gaps else None,
            entropy=sum(place.p_entropy for place in here) / len(here),
        )
