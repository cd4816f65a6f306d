"""Part of the page about worked solutions: how far drafts are kept, by kind of step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.lab.reasoning.acceptance import ALL
from outrider.lab.reasoning.result import KindAcceptance, TemperatureStudy
from outrider.report.document import Block, Column, Heading, Paragraph, Plot, Series, Table
from outrider.report.reasoning_words import interval, listed, said, share
from outrider.report.text import number

FEW = 20  # tests, or steps, below which a kind takes no part in sentences and curves
LATE = 4  # position in a draft from which it has proved itself
APART = 0.03  # acceptance, early and late, that differs


def kept(studies: Sequence[TemperatureStudy]) -> Iterator[Block]:
    """Acceptance by kind, then how far drafts live."""
    yield Heading("How far drafts are kept")
    yield _by_kind(studies)
    if text := " ".join(filter(None, map(_differences, studies))):
        yield Paragraph(text)
    for study in studies:
        yield _survival_plot(study)
        yield Paragraph(_survival_says(study))
    yield _position_plot(studies[0])
    yield Paragraph(_position_says(studies[0]))


def _by_kind(studies: Sequence[TemperatureStudy]) -> Table:
    columns = [Column("kind of step", "left"), Column("tokens", help=f"share of the tokens written, {studies[0].label}")]
    for place, study in enumerate(studies):
        explained = place == 0
        columns += [
            Column(f"α, {study.label}", help="draft tokens kept / tested, 95 % over problems" if explained else ""),
            Column(f"overlap, {study.label}", help=_OVERLAP if explained else ""),
            Column(f"kept, {study.label}", help="mean draft tokens kept by a step that begins in this kind" if explained else ""),
        ]
    names = list(dict.fromkeys(one.kind for study in studies for one in study.kinds))
    rows = []
    for name in names:
        found = [next((one for one in study.kinds if one.kind == name), None) for study in studies]
        cells = [cell for one in found for cell in (("-",) * 3 if one is None else _cells(one))]
        first = found[0]
        rows.append([name, "-" if first is None else share(first.tokens / studies[0].tokens), *cells])
    return Table(columns, rows, "Draft tokens by kind of step")


_OVERLAP = (
    "mean over all tokens of sum min(p, q), what a drawn draft token is kept with; greedy: of the laws at temperature 1"
)


def _cells(one: KindAcceptance) -> tuple[str, str, str]:
    return interval(one.alpha), number(one.overlap), f"{_mean_kept(one):.1f}" if one.starts >= FEW else "-"


def _differences(study: TemperatureStudy) -> str:
    """Which kinds are surely unlike each other."""
    known = sorted(((one.kind, one.alpha) for one in _enough(study) if one.alpha is not None), key=lambda pair: -pair[1].value)
    if len(known) < 2:
        return ""
    apart = [
        f"{said(high)} over {said(low)}"
        for place, (high, above) in enumerate(known)
        for low, below in known[place + 1 :]
        if above.low > below.high
    ]
    order = listed([f"{alpha.value:.2f} in {said(kind)}" for kind, alpha in known])
    sure = f"intervals are apart for {listed(apart)}" if apart else "all intervals overlap"
    return f"{_capital(study.label)}, α is {order}; {sure}."


def _enough(study: TemperatureStudy) -> list[KindAcceptance]:
    return [one for one in study.kinds if one.kind != ALL and one.tested >= FEW]


def _capital(label: str) -> str:
    return "Greedy" if label == "greedy" else f"At {label}"


def _survival_plot(study: TemperatureStudy) -> Plot:
    shown = [one for one in study.kinds if one.starts >= FEW]
    length = max((len(one.survival) for one in shown), default=0)
    series = []
    for one in shown:
        missing: list[float | None] = [None] * (length - len(one.survival))
        ends = [[getattr(point, name) for point in one.survival] + missing for name in ("value", "low", "high")]
        series.append(Series(f"{one.kind} ({one.starts} steps)", *ends))
    title = f"Survival by the kind that a step begins with, {study.label}"
    return Plot(title, "γ, draft tokens", "P(at least so many are kept)", list(range(1, length + 1)), series)


def _survival_says(study: TemperatureStudy) -> str:
    shown = sorted((one for one in study.kinds if one.kind != ALL and one.starts >= FEW), key=lambda one: -_mean_kept(one))
    curve = [point.value for point in study.kinds[0].survival]
    if not curve:
        return "No draft token was tested."
    half = sum(value >= 0.5 for value in curve)
    tokens = f"{half} token{'s' * (half != 1)}"
    text = f"Half of all drafts live for {tokens} or more" if half else "Most drafts die at their first token"
    text += f", {share(curve[-1])} for {len(curve)}"
    if len(shown) < 2:
        return f"{text}."
    most, least = shown[0], shown[-1]
    return (
        f"{text}; a step that begins in {said(most.kind)} keeps {_mean_kept(most):.1f} draft tokens, one that begins in "
        f"{said(least.kind)} {_mean_kept(least):.1f}."
    )


def _mean_kept(one: KindAcceptance) -> float:
    return sum(point.value for point in one.survival)


def _position_plot(study: TemperatureStudy) -> Plot:
    shown = [one for one in study.kinds if one.tested >= FEW and any(value is not None for value in one.by_position)]
    length = max((place for one in shown for place, value in enumerate(one.by_position, 1) if value is not None), default=0)
    series = [Series(one.kind, one.by_position[:length]) for one in shown]
    title = f"Kept where tested, by position in the draft, {study.label}"
    return Plot(title, "position in the draft", "kept / tested", list(range(1, length + 1)), series)


def _position_says(study: TemperatureStudy) -> str:
    """Whether one alpha describes all positions."""
    positions = study.kinds[0].by_position
    early = positions[0] if positions else None
    known = [value for value in positions[LATE - 1 :] if value is not None]
    if early is None or not known:
        return "Too few drafts came far to tell positions apart."
    late = sum(known) / len(known)
    numbers = f"{share(early)} of first draft tokens are kept, {share(late)} of those from the {LATE}th on (mean of positions)"
    if late - early > APART:
        return f"{numbers}: a draft that has lived so long is in an easy stretch, so one α for all positions draws a wrong curve."
    if early - late > APART:
        return f"{numbers}: the draft drifts off, the longer it runs alone."
    return f"{numbers}: acceptance hardly depends on the position."
