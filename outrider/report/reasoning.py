"""The page about worked solutions: the answer in three sentences, then what it rests on, each picture with what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, cast

from outrider.lab.bench.result import ENDINGS
from outrider.lab.reasoning.acceptance import ALL
from outrider.lab.reasoning.result import Contestant, Example, KindAcceptance, ReasoningResult, TemperatureStudy
from outrider.report import reasoning_acceptance, reasoning_rejections, reasoning_speed
from outrider.report.bench_tables import speed_text
from outrider.report.document import (
    Block,
    Bullets,
    Code,
    Column,
    Document,
    Heading,
    Paragraph,
    Table,
    Token,
    TokenText,
    Tone,
)
from outrider.report.heading import origin
from outrider.report.reasoning_words import listed, said, share, tried, verdict

BUSY = 0.1  # share of the processors
FEW_PROBLEMS = 16
Fate = Literal["prompt", "accepted", "correction", "bonus", "plain"]


def document(result: ReasoningResult) -> Document:
    """Everything in it is in the result."""
    blocks: list[Block] = [Paragraph(*answer(result))]
    blocks += reasoning_acceptance.kept(result.studies)
    blocks += reasoning_speed.forecast(result.studies)
    blocks += reasoning_rejections.rejected(result.studies)
    blocks += reasoning_speed.improved(result.studies)
    blocks += [*_same(result), *_example(result), *_method(result)]
    return Document(f"Worked solutions: {result.workload.name}", _subtitle(result), tuple(blocks))


# ---------------------------------------------------------------- the answer


def answer(result: ReasoningResult) -> tuple[str, Tone]:
    """Three sentences, and how they are meant."""
    speed, tone = _speed(result)
    first = result.studies[0]
    return " ".join(filter(None, (speed, _where(first), _improvement(first)))), tone


def _speed(result: ReasoningResult) -> tuple[str, Tone]:
    study = result.studies[0]
    lead = "Decoding greedily" if study.is_greedy else f"At {study.label}"
    found = study.reference
    if found is None or found.speedup is None:
        return f"{lead}, no draft length could be confirmed.", "caution"
    others = [
        f"{speed_text(one.reference.speedup)} at {one.label} (k={one.tried})"
        for one in result.studies[1:]
        if one.reference is not None and one.reference.speedup is not None
    ]
    text = (
        f"{lead}, {study.tried} draft tokens a step solve {found.num_problems} problems {speed_text(found.speedup)} as fast as "
        f"plain decoding{_identity(found)}{'; ' if others else ''}{'; '.join(others)}."
    )
    if found.speedup.is_gain:
        return text, "good"
    if study.best == 0 or found.speedup.is_loss:
        return f"Do not speculate here: {text[0].lower()}{text[1:]}", "bad"
    return text, "caution"


def _identity(one: Contestant) -> str:
    if one.identity is None:
        return ""
    if one.identity.num_identical == one.identity.num_compared:
        return ", with the same text token by token"
    return f", with {one.identity.num_identical} of {one.identity.num_compared} texts the same"


def _where(study: TemperatureStudy) -> str:
    """Which kind of step the draft is good at, and which is lost."""
    total = study.kinds[0]
    known = [one for one in study.kinds[1:] if one.alpha is not None and one.tested >= reasoning_acceptance.FEW]
    if total.alpha is None or len(known) < 2:
        return ""
    best, worst = max(known, key=_alpha), min(known, key=_alpha)
    rejected = {one.kind: one.count for one in study.rejections}
    text = (
        f"The target keeps {share(total.alpha.value)} of the draft tokens that it gets to test, most in {said(best.kind)} "
        f"({share(_alpha(best))}), fewest in {said(worst.kind)} ({share(_alpha(worst))})"
    )
    if not rejected[ALL]:
        return f"{text}."
    part = share(rejected.get(worst.kind, 0) / rejected[ALL])
    return f"{text}, where {part} of the rejections are{reasoning_rejections.main_reason(study)}."


def _alpha(one: KindAcceptance) -> float:
    return one.alpha.value if one.alpha is not None else 0.0


def _improvement(study: TemperatureStudy) -> str:
    ideas = tried(study.contestants)
    if not ideas:
        return ""
    better = sum(verdict(found) == "pays" for _, found in ideas)
    best, gain = ideas[0]
    change = f"{best.configuration} ({best.what}), {speed_text(gain)} its speed"
    if better:
        return f"Of {len(ideas)} ideas for a better draft {better} surely beat{'s' * (better == 1)} that; the best is {change}."
    return f"None of {len(ideas)} ideas for a better draft surely beats that; closest is {change}."


# ---------------------------------------------------------------- the rest


def _same(result: ReasoningResult) -> Iterator[Block]:
    """Greedy text and answers with and without speculation."""
    ran = [one for study in result.studies for one in study.contestants if one.identity is not None]
    if not ran:
        return
    yield Heading("Same text, same answers")
    compared = sum(one.identity.num_compared for one in ran if one.identity)
    apart = [(one, one.identity.num_compared - one.identity.num_identical) for one in ran if one.identity]
    apart = [(one, count) for one, count in apart if count]
    if apart:
        promised = any(one.exact for one, _ in apart)
        rounding = "" if promised else "; none of them was promised to the bit (trees are exact up to rounding on this machine)"
        names = listed([f"{one.configuration} ({count})" for one, count in apart])
        text = f"{sum(count for _, count in apart)} of {compared} greedy texts are not plain decoding's: {names}{rounding}."
        yield Paragraph(text, "bad" if promised else "caution")
    else:
        yield Paragraph(f"All {compared} greedy texts of {len(ran)} configurations are plain decoding's, token by token.", "good")
    yield from _accuracy(ran)


def _accuracy(ran: Sequence[Contestant]) -> Iterator[Block]:
    graded = [one.accuracy for one in ran if one.accuracy is not None and one.accuracy.num_graded]
    if not graded:
        return
    changed = sum(bool(one.num_only_own_right or one.num_only_plain_right) for one in graded)
    plain = f"Plain decoding gets {graded[0].num_plain_right} of {graded[0].num_graded} finished answers right"
    if changed:
        others = "1 configuration gets" if changed == 1 else f"{changed} configurations get"
        yield Paragraph(f"{plain}; {others} others right.", "caution")
    else:
        yield Paragraph(f"{plain}, and every configuration the same ones.")


def _example(result: ReasoningResult) -> Iterator[Block]:
    example = result.example
    if example is None:
        return
    yield Heading("One solution")
    title = f"{example.id}, {result.studies[0].label}, up to {result.longest} draft tokens a step"
    yield TokenText(title, tuple(_tokens(example)))
    columns = (Column("kind", "left"), Column("text", "left"))
    yield Table(columns, [[kind, text] for kind, text in _segments(example)], "The same solution by kind of step")


def _tokens(example: Example) -> Iterator[Token]:
    yield Token(example.prompt, "prompt")
    for piece, fate, kind, rejected in zip(example.pieces, example.fates, example.kinds, example.rejected, strict=True):
        yield Token(piece, cast(Fate, fate), rejected if fate == "correction" else "", kind)


def _segments(example: Example) -> Iterator[tuple[str, str]]:
    for kind, group in groupby(zip(example.kinds, example.pieces, strict=True), key=lambda pair: pair[0]):
        text = " ".join("".join(piece for _, piece in group).split())
        if text:
            yield kind, text


def _method(result: ReasoningResult) -> Iterator[Block]:
    yield Heading("How it was measured, and what to doubt")
    yield Bullets([*_always(result), *(line for study in result.studies for line in _of(study, result)), *_notes(result)])
    if result.command:
        yield Paragraph("This page is made by one command:")
        yield Code(result.command, "bash")


def _always(result: ReasoningResult) -> Iterator[str]:
    yield (
        "kinds are told by rules on the text (outrider/lab/reasoning/kinds.py), which know form and not meaning: arithmetic is "
        "numbers joined by signs; the conclusion is the line with the answer; restating are sentences half of whose pairs of "
        "words stand in the question; decomposition is every other sentence"
    )
    yield (
        f"acceptance is of one recording per temperature, {result.longest} draft tokens a step; problems are what is resampled "
        "in every interval (95 %)"
    )
    yield (
        "forecasts rest on that recording and on step costs timed on runs of their own; they were made before any other length "
        "ran, for the same problems: they say nothing about other workloads"
    )
    if result.runtime != "eager":
        yield "chains are drafted by one loop of calls; trees and stop rules go level by level, which is part of their price"
    yield "speeds count behind each text's first step, one problem at a time, all configurations in turn on every problem"


def _of(study: TemperatureStudy, result: ReasoningResult) -> Iterator[str]:
    ending = ENDINGS[study.ended_by]
    rounds = "1 round" if study.rounds == 1 else f"{study.rounds} rounds"
    yield f"{study.label}: {study.tokens} tokens in {study.texts} recorded texts; confirmed in {rounds}, ended by: {ending}"
    fewest = min((one.num_problems for one in study.contestants if not one.failure), default=0)
    if fewest < study.texts:
        yield f"{study.label}: confirmed on {fewest} of {study.texts} problems"
    if study.unfinished:
        yield (
            f"{study.label}: {study.unfinished} of {study.texts} texts were cut off after {result.max_new_tokens} tokens; a text "
            "that runs away repeats itself, which is easy to draft"
        )
    if study.other_cpu > BUSY:
        yield f"{study.label}: others used up to {share(study.other_cpu)} of the processors during a run: speeds are uncertain"
    if not study.is_greedy:
        yield f"{study.label}: texts differ between configurations by design, and their speeds differ by their texts, too"


def _notes(result: ReasoningResult) -> Iterator[str]:
    if result.problems < FEW_PROBLEMS:
        yield f"{result.problems} problems are few: intervals are rough"
    yield from result.workload.notes
    yield from result.notes


def _subtitle(result: ReasoningResult) -> str:
    draft = f" with draft {result.draft}" if result.draft else ""
    machine = [f"{result.dtype} on {result.device}, {result.threads} threads", f"{result.runtime} runtime"]
    return f"{result.target}{draft} · {origin(result, *machine, f'{result.seconds / 60:.1f} minutes')}"
