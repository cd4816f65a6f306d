"""The report of `outrider tune`: the advice first, then its evidence."""

from __future__ import annotations

from outrider.errors import counted
from outrider.lab.tune.confirm import Confirmed
from outrider.lab.tune.forecast import LoadStep
from outrider.lab.tune.tune_result import Recommendation, TuneResult
from outrider.report.document import (
    Block,
    Bullets,
    CodeBlock,
    Document,
    Fact,
    Heading,
    Paragraph,
    curves,
    table,
)
from outrider.report.render import disturbed, origin, to_keep_in_mind
from outrider.report.text import interval, number, times

SHOWN = 12  # forecasts in the table
CURVES = 5  # families in a plot
RARE = 0.01  # chances below this are not drawn


def document(result: TuneResult) -> Document:
    """The whole report."""
    return Document(
        title=f"Tuning {result.tried.target}",
        subtitle=origin(result, *_tried(result)),
        blocks=(
            *map(_sentence, result.recommendations),
            *disturbed({"confirming runs": result.others}),
            *_confirmed(result),
            *_forecasts(result),
            *_acceptance(result),
            *_schedule(result),
            *_advice(result),
            *to_keep_in_mind(result),
            *_next(result),
        ),
    )


def _tried(result: TuneResult) -> list[str]:
    tried = result.tried
    tasks = ", ".join(f"{count} {task}" for task, count in tried.tasks.items())
    return [
        f"{tried.workload} ({tasks})",
        f"temperature {tried.temperature:g}",
        f"{tried.batch_size} at a time",
    ]


def _sentence(choice: Recommendation) -> Paragraph:
    where = "" if choice.task == "all" else f"For {choice.task}: "
    if not choice.speculate:
        return Paragraph(f"{where}do not speculate: {choice.reason}.", "caution")
    return Paragraph(f"{where}use {choice.configuration}: {choice.reason}.", "good")


def _confirmed(result: TuneResult) -> list[Block]:
    if not result.confirmed:
        return []
    order = sorted(result.confirmed, key=lambda one: -one.speedup.value)
    best = next(
        (
            index
            for index, summary in enumerate(order)
            if summary.configuration == result.recommendations[0].configuration
        ),
        None,
    )
    facts: list[Fact[Confirmed]] = [
        Fact("configuration", lambda one: one.configuration, align="left"),
        Fact(
            "speedup",
            lambda one: interval(one.speedup, "x"),
            "plain seconds per token / its seconds per token, decode phase; 95 % bootstrap over "
            "prompts",
        ),
        Fact(
            "forecast",
            lambda one: times(result.overall_speedup.get(one.configuration)),
            "from probes alone, before this was run",
        ),
        Fact("tokens/s", lambda one: number(one.tokens_per_s, 0), "of one row's decode phase"),
        Fact(
            "τ",
            lambda one: number(one.tau),
            "tokens per target pass and row, the bonus token included",
        ),
        Fact("prompts", lambda one: str(one.texts)),
        Fact("identical", lambda one: _same(result, one), "greedy texts equal to plain decoding's"),
    ]
    marked = frozenset() if best is None else frozenset({best})
    return [Heading("Measured"), table(order, facts, marked=marked)]


def _forecasts(result: TuneResult) -> list[Block]:
    ranking = sorted(result.overall_speedup, key=lambda label: -result.overall_speedup[label])
    if not ranking:
        return []
    by_label: dict[str, list[float]] = {}
    for forecast in result.forecasts:
        by_label.setdefault(forecast.configuration, []).append(forecast.tau)
    tasks = list(dict.fromkeys(forecast.task for forecast in result.forecasts))
    facts: list[Fact[str]] = [
        Fact("configuration", lambda label: label, align="left"),
        Fact(
            "speedup",
            lambda label: times(result.overall_speedup[label]),
            "τ × seconds of a plain step / expected seconds of its step, over the whole workload",
        ),
        Fact(
            f"τ ({', '.join(tasks)})" if len(tasks) > 1 else "τ",
            lambda label: " ".join(number(tau) for tau in by_label[label]),
        ),
    ]
    shown = ranking[:SHOWN]
    title = f"The best {len(shown)} of {len(ranking)} forecasts, none of them run as such"
    return [
        Heading("Forecast for everything"),
        table(shown, facts, title),
        *_length_plot(result),
        *_break_even(result),
    ]


def _length_plot(result: TuneResult) -> list[Block]:
    """Speedup over length, for the families that have lengths."""
    sizes_of: dict[str, dict[int, float]] = {}
    for forecast in result.forecasts:
        if forecast.configuration in result.overall_speedup:
            sizes_of.setdefault(forecast.family, {})[forecast.size] = result.overall_speedup[
                forecast.configuration
            ]
    ranking = sorted(
        (f for f in sizes_of if len(sizes_of[f]) > 2), key=lambda f: -max(sizes_of[f].values())
    )[:CURVES]
    if not ranking:
        return []
    lines = {family: sizes_of[family] for family in ranking}
    return [
        curves(
            "Forecast speedup by draft length",
            "draft tokens per step",
            "speedup",
            lines,
            baseline=1.0,
        )
    ]


def _break_even(result: TuneResult) -> list[Block]:
    best = result.recommendations[0].configuration
    alpha = next(
        (
            forecast.break_even_alpha
            for forecast in result.forecasts
            if forecast.configuration == best
        ),
        None,
    )
    if alpha is None:
        return []
    return [
        Paragraph(
            f"{best} pays from an acceptance of {alpha:.2f} per draft token on, equal at all "
            "positions."
        )
    ]


def _acceptance(result: TuneResult) -> list[Block]:
    """How far drafts survive, for the families whose drafts survive longest; and the families that
    were not tried."""
    lines = {}
    for family in result.families:
        for task, curve in family.survival.items():
            label = family.family if len(family.survival) == 1 else f"{family.family} ({task})"
            lines[label] = {at: kept for at, kept in enumerate(curve, 1) if kept >= RARE}
    longest = sorted(
        (label for label in lines if len(lines[label]) > 1),
        key=lambda label: -sum(lines[label].values()),
    )
    blocks: list[Block] = []
    if longest:
        shown = {label: lines[label] for label in longest[:CURVES]}
        blocks += [
            Heading("Acceptance"),
            curves("How far drafts survive", "position in the draft", "P(kept)", shown),
        ]
    failed = [f"{family.family}: {family.failure}" for family in result.families if family.failure]
    return [*blocks, Paragraph("Not tried:"), Bullets(failed)] if failed else blocks


def _schedule(result: TuneResult) -> list[Block]:
    if not result.schedule:
        return []
    served = "draft tokens of a server that loads the settings: the recommended drafter, never more at a higher load"
    best = "of the drafters tried at this load, whichever drafts; the speeds are its"
    facts: list[Fact[LoadStep]] = [
        Fact("rows at a time", lambda one: str(one.batch_size)),
        Fact("with --settings", lambda one: result.nodes_at(one.batch_size), served),
        Fact("best there", lambda one: one.configuration, best, align="left"),
        Fact("tokens/s", lambda one: number(one.tokens_per_s, 0), "forecast, all rows together"),
        Fact("plain tokens/s", lambda one: number(one.plain_tokens_per_s, 0)),
        Fact("speedup", lambda one: times(one.speedup)),
    ]
    title = "Forecast from costs at each load and the acceptance above"
    return [Heading("By load"), table(result.schedule, facts, title), *_lengths(result)]


def _lengths(result: TuneResult) -> list[Block]:
    """The behaviour of a server that loads the settings."""
    lengths = result.lengths_by_load()
    if not lengths:
        return []
    words = [f"{nodes or 'none'} from {counted(rows, 'row')} on" for rows, nodes in lengths]
    configuration = result.recommendations[0].configuration
    return [
        Paragraph(
            f"With --settings, serve drafts by {configuration.split()[0]}: {', '.join(words)}."
        )
    ]


def _next(result: TuneResult) -> list[Block]:
    """The command to type now."""
    return [Heading("Next"), CodeBlock(result.next_command, "bash")] if result.next_command else []


def _advice(result: TuneResult) -> list[Block]:
    blocks: list[Block] = []
    for words in result.advice:
        blocks += [
            Heading(words.engine, 3),
            *([CodeBlock(words.text, "bash")] if words.text else []),
        ]
        blocks += [Bullets(words.notes)] if words.notes else []
    return [Heading("The same, in the words of other engines"), *blocks] if blocks else []


def _same(result: TuneResult, summary: Confirmed) -> str:
    if result.tried.temperature > 0:
        return "-"
    return (
        "yes" if summary.identical == summary.texts else f"no ({summary.identical}/{summary.texts})"
    )
