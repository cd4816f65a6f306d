"""Part of the page about worked solutions: what each draft length should bring and does, and what brings more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.lab.bench.result import Speedup
from outrider.lab.reasoning.result import Contestant, LengthEstimate, TemperatureStudy
from outrider.report.bench_tables import speed_text
from outrider.report.document import Block, Column, Heading, Paragraph, Plot, Series, Table
from outrider.report.reasoning_words import interval, listed, share, tried, verdict
from outrider.report.text import number

ESTIMATES = {"alpha": "one α", "survival": "survival", "replay": "replay"}
HELP = {
    "alpha": "(1 - α^(γ+1)) / ((1 - α)(γc + 1)): the same α everywhere, steps of one price (Leviathan et al. 2211.17192)",
    "survival": "(1 + S(1) + ... + S(γ)) x plain step / step of γ: survival of the recorded drafts, measured costs",
    "replay": "the recorded texts walked through with drafts of γ, measured costs",
}


# ---------------------------------------------------------------- lengths


def forecast(studies: Sequence[TemperatureStudy]) -> Iterator[Block]:
    """Estimates of every length, and the measured ones beside them."""
    yield Heading("What each length should bring, and does")
    for study in studies:
        yield _lengths(study)
        yield Paragraph(_lengths_say(study))
        yield _plot(study)
        yield _confirmed(study)
        yield Paragraph(_confirmed_says(study))


def _lengths(study: TemperatureStudy) -> Table:
    columns = [
        Column("γ", help="draft tokens a step; 0: plain decoding"),
        Column("step, ms", help="median of whole steps, timed apart, fitted so that more tokens do not cost less"),
        Column("τ, one α", help="(1 - α^(γ+1)) / (1 - α)"),
        Column("τ, survival", help="1 + S(1) + ... + S(γ), of steps with the longest drafts"),
        Column("τ, replay", help="of drafts of γ on the recorded texts, their ends included"),
        Column("τ, measured", help="tokens / target passes, correction and bonus tokens included"),
    ]
    rows = [_length(one, measured(study, one.num_draft_tokens)) for one in study.estimates]
    return Table(columns, rows, f"Tokens a pass and what a step costs, {study.label}", frozenset({study.best}))


def _length(one: LengthEstimate, found: Contestant | None) -> list[str]:
    own = "-" if found is None or found.tau is None else number(found.tau.value)
    taus = (one.alpha_tau, one.survival_tau, one.replay_tau)
    return [str(one.num_draft_tokens), number(1e3 * one.step_s), *map(number, taus), own]


def _lengths_say(study: TemperatureStudy) -> str:
    last, plain = study.estimates[-1], study.estimates[0]
    return (
        f"Drafting a token costs {share(study.c)} of a plain step (c), a whole step with {last.num_draft_tokens} of them "
        f"{last.step_s / plain.step_s:.1f} plain steps."
    )


def measured(study: TemperatureStudy, length: int) -> Contestant | None:
    """The chain of this length, where it ran."""
    mine = (one for one in study.contestants if one.role == "length" and one.num_draft_tokens == length)
    return next((one for one in mine if one.speedup is not None), None)


def _plot(study: TemperatureStudy) -> Plot:
    lengths = [one.num_draft_tokens for one in study.estimates]
    series = [Series(word, [getattr(one, f"{name}_speedup") for one in study.estimates]) for name, word in ESTIMATES.items()]
    found = [measured(study, length) for length in lengths]
    series.append(Series("measured", [one.speedup.value if one is not None and one.speedup else None for one in found]))
    return Plot(f"Speedup by draft length, {study.label}", "γ, draft tokens a step", "speedup", lengths, series, baseline=1.0)


def _confirmed(study: TemperatureStudy) -> Table:
    columns = [
        Column("chain of the draft model", "left"),
        Column("measured", help="plain seconds / own seconds behind the first step, over the same tokens; 95 % over problems"),
        *(Column(f"/ {word}", help=f"measured / forecast: {HELP[name]}") for name, word in ESTIMATES.items()),
        Column("tokens/s", help="behind the first step"),
    ]
    lengths = [one for one in study.contestants if one.role == "length"]
    rows = [[one.configuration, *_against(study, one), number(one.tokens_per_s, 0)] for one in lengths]
    place = next((place for place, one in enumerate(lengths) if one.num_draft_tokens == study.tried), None)
    return Table(columns, rows, f"Forecasts and the clock, {study.label}", frozenset() if place is None else frozenset({place}))


def _against(study: TemperatureStudy, one: Contestant) -> list[str]:
    if one.speedup is None:
        return [one.failure or "-", *["-"] * len(ESTIMATES)]
    if one.num_draft_tokens is None:
        return [speed_text(one.speedup), *["-"] * len(ESTIMATES)]
    forecasts = study.estimates[one.num_draft_tokens]
    ratios = [number(one.speedup.value / getattr(forecasts, f"{name}_speedup")) for name in ESTIMATES]
    return [speed_text(one.speedup), *ratios]


def _confirmed_says(study: TemperatureStudy) -> str:
    """How far off each estimate was, and where the best length is."""
    pairs = [(one, measured(study, one.num_draft_tokens)) for one in study.estimates]
    ran = [(one, found.speedup.value) for one, found in pairs if found is not None and found.speedup is not None]
    best = study.estimates[study.best]
    text = f"The replay puts the best length at γ = {study.best} ({best.replay_speedup:.2f}x)" if study.best else (
        "By the replay no length is faster than plain decoding"
    )  # fmt: skip
    if not ran:
        return f"{text}; no length could be confirmed."
    fastest = max(ran, key=lambda pair: pair[1])[0].num_draft_tokens
    clock = "and so does the clock" if fastest == study.best else f"by the clock γ = {fastest} was the fastest of those that ran"
    errors = [
        f"{word} {share(max(abs(value / getattr(one, f'{name}_speedup') - 1) for one, value in ran))}"
        for name, word in ESTIMATES.items()
    ]
    return f"{text}, {clock}; at worst, of {len(ran)} lengths, the forecasts are off by: {', '.join(errors)}."


# ---------------------------------------------------------------- ideas


def improved(studies: Sequence[TemperatureStudy]) -> Iterator[Block]:
    """Ideas against the best length."""
    shown = [study for study in studies if any(one.role == "idea" for one in study.contestants)]
    if not shown:
        return
    yield Heading("What improves the draft")
    for study in shown:
        yield _ideas(study)
        yield Paragraph(_ideas_say(study))


def _ideas(study: TemperatureStudy) -> Table:
    columns = [
        Column("configuration", "left"),
        Column("change", "left"),
        Column("τ", help="tokens / target passes, 95 % over problems"),
        Column("drafted", help="draft tokens of a step that drafts"),
        Column("speedup", help="over plain decoding"),
        Column(f"over k={study.tried}", help="seconds per token of the best chain / its own; 95 % over problems"),
        Column("so it", "left"),
    ]
    reference = study.reference
    rows = [] if reference is None else [[*_numbers(reference, "the chain to improve on"), "1", ""]]
    marked = set()
    for one in study.contestants:
        if one.role == "idea":
            if verdict(one.over_best) == "pays":
                marked.add(len(rows))
            rows.append([*_numbers(one, one.what), speed_text(one.over_best), one.failure or verdict(one.over_best)])
    return Table(columns, rows, f"Ideas, {study.label}", frozenset(marked))


def _numbers(one: Contestant, what: str) -> list[str]:
    return [one.configuration, what, interval(one.tau), number(one.drafted, 1), speed_text(one.speedup)]


def _ideas_say(study: TemperatureStudy) -> str:
    ideas, reference = tried(study.contestants), study.reference
    if not ideas or reference is None or reference.tau is None:
        return "There is nothing to compare."
    paying = [f"{one.configuration} ({speed_text(found)})" for one, found in ideas if verdict(found) == "pays"]
    if paying:
        text = f"Over {reference.configuration}, {listed(paying)} {'pay' if len(paying) > 1 else 'pays'}."
    else:
        one, found = ideas[0]
        text = f"Over {reference.configuration}, nothing surely pays; closest is {one.configuration}, {speed_text(found)}."
    return f"{text}{_dear(ideas, reference.tau.value)}"


def _dear(ideas: Sequence[tuple[Contestant, Speedup]], tau: float) -> str:
    """The ideas that keep more tokens a pass and are slower for it."""
    more = [(one, found) for one, found in ideas if one.tau is not None and one.tau.value > tau]
    dear = [one.configuration for one, found in more if verdict(found) == "does not pay"]
    if not dear:
        return ""
    costs = "costs" if len(dear) == 1 else "cost"
    return f" {len(more)} of {len(ideas)} ideas keep more tokens a pass, but {listed(dear)} {costs} more than that brings."
