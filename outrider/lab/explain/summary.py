"""From all texts of a run to its result: what was lost to what, by position and kind of text, and
advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.lab.explain.advice import advise
from outrider.lab.explain.causes import CAUSES, Account, Place
from outrider.lab.explain.distributions import FinishedText
from outrider.lab.explain.explain_result import (
    LETTERS,
    CauseRow,
    ExplainResult,
    GroupRow,
    LevelRow,
    TextColumns,
    Times,
)
from outrider.lab.explain.regions import KINDS, SECTIONS, token_kinds, token_sections
from outrider.lab.intervals import proportion, ratio_of_sums
from outrider.lab.runner import Contender, Step
from outrider.models.tokens.token_bytes import token_name
from outrider.sampling.params import SamplingParams
from outrider.text import Detokenizer, decode

PROMPT_END = 400  # characters of the prompt that decide about sections and sentences
NEAR = range(2, 9)  # ranks of a near miss


@dataclass
class ExplainedText:
    """One text of the run, with its account."""

    id: str
    task: str
    text: FinishedText
    steps: Sequence[Step]
    fates: Sequence[str]  # `Completion.origins`
    account: Account
    other_cpu: float  # share of the processors that others used meanwhile
    prompt: str
    pieces: list[str]  # text that each token added
    kinds: list[str]
    sections: list[str]

    @classmethod
    def read(cls, tokenizer: Any, text: FinishedText, **facts: Any) -> ExplainedText:
        """The text with its words."""
        # an unfinished character at the end of the prompt belongs to the answer
        prompt = decode(tokenizer, text.prompt, special=True, flush=False)
        detokenizer = Detokenizer(tokenizer, list(text.prompt))
        pieces = [detokenizer.push(token) for token in text.output]
        if pieces:
            pieces[-1] += detokenizer.flush()
        end = prompt[-PROMPT_END:]
        return cls(
            text=text,
            prompt=prompt,
            pieces=pieces,
            kinds=token_kinds(end, pieces),
            sections=token_sections(end, pieces),
            **facts,
        )

    def columns(self, tokenizer: Any) -> TextColumns:
        """The text as a result keeps it."""
        places = self.account.places
        pieces = list(self.pieces)
        if pieces and not pieces[-1]:  # a last token without text, the end of text, shows its name
            pieces[-1] = token_name(tokenizer, self.text.output[-1])

        def numbers(name: str) -> list[float | None]:
            return [_short(getattr(place, name)) for place in places]

        return TextColumns(
            id=self.id,
            task=self.task,
            prompt=self.prompt,
            pieces=pieces,
            fate=_letters("fate", self.fates),
            kind=_letters("kind", self.kinds),
            section=_letters("section", self.sections),
            cause=_letters("cause", [place.cause for place in places]),
            level=[place.level for place in places],
            draft=[
                token_name(tokenizer, place.tested[0]) if place.is_rejection else ""
                for place in places
            ],
            siblings=[len(place.tested) for place in places],
            p_token=numbers("p_token"),
            q_token=numbers("q_token"),
            p_draft=numbers("p_draft"),
            q_draft=numbers("q_draft"),
            p_entropy=numbers("p_entropy"),
            q_entropy=numbers("q_entropy"),
            disagreement=numbers("disagreement"),
            rank_draft=[place.rank_draft for place in places],
            rank_token=[place.rank_token for place in places],
            lost=[float(f"{sum(place.lost.values()):.3g}") for place in places],
        )


def _letters(column: str, words: Sequence[str | None]) -> str:
    by_word = {word: letter for letter, word in LETTERS[column].items()}
    return "".join("." if word is None else by_word[word] for word in words)


def _short(value: float | None) -> float | None:
    """Three significant digits."""
    return None if value is None else float(f"{value:.3g}")


def summarise(
    contender: Contender,
    texts: Sequence[ExplainedText],
    params: SamplingParams,
    *,
    is_chain: bool,
    target: str,
    draft: str | None,
    workload: str,
    max_shown: int,
) -> ExplainResult:
    """The whole result."""
    built = contender.built
    places = [place for text in texts for place in text.account.places]
    steps = [len(text.steps) for text in texts]
    emitted = [len(text.pieces) for text in texts]
    tested = [sum(bool(place.tested) for place in text.account.places) for text in texts]
    accepted = [sum(place.is_kept for place in text.account.places) for text in texts]
    tau = ratio_of_sums(emitted, steps)
    times = _times([step for text in texts for step in text.steps[1:]])
    shown = list(_shown(texts, max_shown))
    rejections = [place for place in places if place.is_rejection]
    result = ExplainResult(
        target=target,
        draft=draft,
        configuration=contender.configuration.label,
        verifier=built.decoder.verifier.name,
        is_greedy=params.is_greedy,
        has_draft_probs=any(place.q_token is not None for place in places),
        is_chain=is_chain,
        sampling=_sampling(params),
        num_draft_tokens=str(contender.config["num_draft_tokens"]),
        workload=workload,
        texts_read=len(texts),
        steps=sum(steps),
        emitted=sum(emitted),
        drafted=sum(len(step.tokens) for text in texts for step in text.steps),
        tested=sum(tested),
        accepted=sum(accepted),
        near_misses=sum(place.rank_token in NEAR for place in rejections),
        ideal=sum(text.account.ideal for text in texts),
        tau=tau,
        alpha=ratio_of_sums(accepted, tested) if all(tested) else None,
        tokens_per_s=None if times is None else tau.value / times.step_s,
        other_cpu=max(text.other_cpu for text in texts),
        times=times,
        causes=list(_causes(places, sum(steps), times)),
        by_level=list(_by_level(places)),
        by_kind=list(_groups(KINDS, [kind for text in texts for kind in text.kinds], places)),
        by_section=list(
            _groups(SECTIONS, [section for text in texts for section in text.sections], places)
        ),
        advice=[],
        texts=[text.columns(built.target.tokenizer) for text in shown],
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


def _shown(texts: Sequence[ExplainedText], max_shown: int) -> Iterator[ExplainedText]:
    """The first texts, as many as fit into this many tokens; one at least, if any are wanted."""
    room = max_shown
    for number, text in enumerate(texts):
        room -= len(text.pieces)
        if max_shown <= 0 or (room < 0 and number):
            break
        yield text


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What differs from greedy decoding without filters, and the number of tokens."""
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


def _groups(
    names: Sequence[str], group: Sequence[str], places: Sequence[Place]
) -> Iterator[GroupRow]:
    """In the order of `names`, without empty ones."""
    for name in names:
        here = [place for place, own in zip(places, group, strict=True) if own == name]
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
