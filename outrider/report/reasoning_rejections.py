"""Part of the page about worked solutions: why drafts are rejected, by kind of step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.lab.explain.causes import CAUSES, DRAFT, LENGTH, LUCK
from outrider.lab.reasoning.acceptance import ALL
from outrider.lab.reasoning.rejections import DOUBT, NEAR_TIE, REASONS, SECOND_GUESS, SURE
from outrider.lab.reasoning.result import KindRejections, TemperatureStudy
from outrider.report.document import Block, Column, Heading, Paragraph, Table
from outrider.report.reasoning_words import listed, said, share
from outrider.report.text import number

REMEDY = {
    NEAR_TIE: "the target itself was nearly undecided (no draft could know)",
    SECOND_GUESS: "the right token was the draft's second or third guess (a tree has room for it)",
    DOUBT: "the draft was unsure of its own token (a stop rule could have ended it there)",
    SURE: "the draft was confidently wrong (only a better draft helps)",
}
CAUSE_HELP = {
    CAUSES[DRAFT]: "tokens: draft and target disagree, 1 - sum min(p, q), as it was to be expected",
    CAUSES[LUCK]: "tokens: what coins and draws took beyond the expected; below 0: they gave",
    CAUSES[LENGTH]: "tokens: one more draft token where all were kept",
}


def main_reason(study: TemperatureStudy) -> str:
    """'; in 46 % of them ...', for the first sentences."""
    total = study.rejections[0]
    if not total.count or not total.reasons:
        return ""
    reason = max(REASONS, key=lambda name: total.reasons[name])
    return f"; in {share(total.reasons[reason] / total.count)} of all rejections {REMEDY[reason].partition(' (')[0]}"


def rejected(studies: Sequence[TemperatureStudy]) -> Iterator[Block]:
    """Reasons where decoding is greedy, exact causes where tokens are drawn."""
    yield Heading("Why drafts are rejected")
    for study in studies:
        yield _reasons(study) if study.is_greedy else _causes(study)
        yield Paragraph(f"{_reasons_say(study) if study.is_greedy else _causes_say(study)} {_entropies_say(study)}".strip())


def _reasons(study: TemperatureStudy) -> Table:
    columns = [
        Column("kind of step", "left"), Column("rejections"),
        Column(NEAR_TIE, help="the target gives the draft's token at least half the probability of its own"),
        Column(SECOND_GUESS, help="the text's token is the draft's second or third guess"),
        Column(DOUBT, help="the draft gave its own token less than even odds"),
        Column(SURE, help="none of these; the first that fits counts, laws at temperature 1"),
        _PAIRS,
    ]  # fmt: skip
    rows = [
        [one.kind, str(one.count), *(share(one.reasons[name] / one.count) if one.count else "-" for name in REASONS), _pairs(one)]
        for one in study.rejections
    ]
    return Table(columns, rows, f"Rejections by kind of step, {study.label}")


_PAIRS = Column("commonest pairs", "left", help="draft token → token of the text, and how often")


def _pairs(one: KindRejections) -> str:
    return ", ".join(f"{pair.draft!r} → {pair.text!r} {pair.count}x" for pair in one.confusions)


def _reasons_say(study: TemperatureStudy) -> str:
    total = study.rejections[0]
    if not total.count:
        return "Nothing was rejected."
    order = sorted(REASONS, key=lambda name: -total.reasons[name])
    first = [f"in {share(total.reasons[name] / total.count)} {REMEDY[name]}" for name in order[:2] if total.reasons[name]]
    return f"Of {total.count} rejections, {listed(first)}."


def _causes(study: TemperatureStudy) -> Table:
    """Tokens lost to each cause."""
    names = [name for name in CAUSES if any(name in one.lost for one in study.rejections)]
    columns = [Column("kind of step", "left"), Column("rejections")]
    columns += [Column(f"lost to {name}", help=CAUSE_HELP.get(name, "tokens")) for name in names]
    rows = [
        [one.kind, str(one.count), *(f"{one.lost.get(name, 0.0):.0f}" for name in names), _pairs(one)] for one in study.rejections
    ]
    return Table([*columns, _PAIRS], rows, f"Tokens lost, by cause and kind of step, {study.label}")


def _causes_say(study: TemperatureStudy) -> str:
    total = study.rejections[0]
    lost = {name: tokens for name, tokens in total.lost.items() if name != CAUSES[LUCK] and tokens > 0}
    if not lost:
        return "Nothing was lost."
    cause = max(lost, key=lambda name: lost[name])
    kinds = [one for one in study.rejections if one.kind != ALL]
    worst = max(kinds, key=lambda one: one.lost.get(cause, 0.0)) if kinds else total
    luck = total.lost.get(CAUSES[LUCK], 0.0)
    return (
        f"Luck aside, {share(lost[cause] / sum(lost.values()))} of the tokens lost are lost to '{cause}', most of them "
        f"({share(worst.lost.get(cause, 0.0) / lost[cause])}) in {said(worst.kind)}; coins and draws "
        f"{'took' if luck > 0 else 'gave'} {abs(luck):.0f} in this run, and will do otherwise with another seed."
    )


def _entropies_say(study: TemperatureStudy) -> str:
    total = study.rejections[0]
    found = (total.target_entropy, total.target_entropy_kept, total.draft_entropy, total.draft_entropy_kept)
    if any(value is None for value in found):
        return ""
    there, elsewhere, draft, draft_elsewhere = map(number, found)
    return (
        f"Where a draft token is rejected, the target's law has {there} nats of entropy ({elsewhere} where one is kept), the "
        f"draft's {draft} ({draft_elsewhere})."
    )
