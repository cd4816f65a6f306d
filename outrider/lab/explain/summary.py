"""From all texts of a run to its result: what was lost to what, by position and kind of text, and
advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.drafters.composite import CompositeDrafter
from outrider.lab.explain.advice import advise
from outrider.lab.explain.causes import CAUSES
from outrider.lab.explain.distributions import FinishedText
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
from outrider.lab.runner import Contender, Step, Trace
from outrider.models.tokens.token_bytes import token_name
from outrider.sampling.params import SamplingParams
from outrider.text import Detokenizer, decode

PROMPT_END = 400  # characters of the prompt that decide about sections and sentences


@dataclass(frozen=True)
class ReadText:
    """One text of the run, with its account."""

    text: ExplainedText
    trace: Trace
    ideal: float  # tokens that its steps could have emitted

    @property
    def places(self) -> list[Place]:
        return self.text.places


def add_words(
    tokenizer: Any, text: FinishedText, fates: Sequence[str], places: Sequence[Place]
) -> str:
    """Gives every place its words; returns the prompt's."""
    # an unfinished character at the end of the prompt belongs to the answer
    prompt = decode(tokenizer, text.prompt, special=True, flush=False)
    detokenizer = Detokenizer(tokenizer, list(text.prompt))
    pieces = [detokenizer.push(token) for token in text.output]
    if pieces:
        pieces[-1] += detokenizer.flush()
    end = prompt[-PROMPT_END:]
    words = zip(
        pieces, fates, token_kinds(end, pieces), token_sections(end, pieces), places, strict=True
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


def is_chain(contender: Contender) -> bool:
    """Whether one drafter alone drafts, and no trees."""
    built = contender.built
    return not (isinstance(built.decoder.drafter, CompositeDrafter) or built.draws_trees)


def summarise(
    contender: Contender,
    texts: Sequence[ReadText],
    params: SamplingParams,
    *,
    target: str,
    draft: str | None,
    workload: str,
    max_shown: int,
) -> ExplainResult:
    built = contender.built
    places = [place for text in texts for place in text.places]
    steps = [len(text.trace.steps) for text in texts]
    emitted = [len(text.places) for text in texts]
    tested = [sum(bool(place.tested) for place in text.places) for text in texts]
    accepted = [sum(place.is_kept for place in text.places) for text in texts]
    tau = ratio_of_sums(emitted, steps)
    times = _times([step for text in texts for step in text.trace.steps[1:]])
    shown = list(_shown(texts, max_shown))
    result = ExplainResult(
        target=target,
        draft=draft,
        configuration=contender.configuration.label,
        verifier=built.decoder.verifier.name,
        is_greedy=params.is_greedy,
        has_draft_probs=any(place.q_token is not None for place in places),
        is_chain=is_chain(contender),
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
        by_level=list(_by_level(places)),
        by_kind=list(_groups(KINDS, [(place.kind, place) for place in places])),
        by_section=list(_groups(SECTIONS, [(place.section, place) for place in places])),
        advice=[],
        texts=[text.text for text in shown],
        notes=list(built.notes),
    )
    if len(result.by_section) == 1:  # nothing is marked
        result.by_section = []
    if len(shown) < len(texts):
        result.notes.append(
            f"the first {len(shown)} of {len(texts)} texts are shown; the numbers are of all of "
            "them"
        )
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
