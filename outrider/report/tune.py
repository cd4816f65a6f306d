"""The report of `outrider tune`: the advice in a sentence and a chart, then its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from outrider.errors import counted
from outrider.lab.tune.confirm import Confirmed
from outrider.lab.tune.forecast import Forecast, LoadStep
from outrider.lab.tune.tune_result import Recommendation, TuneResult
from outrider.report.document import (
    NOTHING,
    Block,
    Bullets,
    Cells,
    Chart,
    CodeBlock,
    Document,
    Heading,
    Paragraph,
    table,
)
from outrider.report.next_step import step
from outrider.report.render import (
    SPEEDUP,
    disturbed,
    how_fast,
    origin,
    plain_bar,
    speedup_bar,
    to_keep_in_mind,
)
from outrider.report.text import interval, number

SHOWN = 12  # forecasts in the table


def document(result: TuneResult) -> Document:
    """The whole report."""
    return Document(
        title=f"Tuning {result.tried.target}",
        subtitle=origin(result, *_tried(result)),
        blocks=(
            *(_sentence(result, choice) for choice in result.recommendations),
            *_chart(result),
            *disturbed([result.others]),
            *_next(result),
            *_confirmed(result),
            *_forecasts(result),
            *_schedule(result),
            *_advice(result),
            *to_keep_in_mind(result),
        ),
    )


def _tried(result: TuneResult) -> list[str]:
    tried = result.tried
    tasks = ", ".join(f"{count} {task}" for task, count in tried.tasks.items())
    return [
        f"{tried.workload} ({tasks})",
        f"temperature {tried.temperature:g}",
        f"batch of {tried.batch_size}",
    ]


def _sentence(result: TuneResult, choice: Recommendation) -> Paragraph:
    where = "" if choice.task == "all" else f" for {choice.task}"
    if not choice.speculate or choice.speedup is None:
        return Paragraph(f"Do not speculate{where}: {choice.reason}.", "caution")
    texts = [row.texts for row in result.confirmed if row.configuration == choice.configuration]
    num_prompts = texts[0] if texts and choice.task == "all" else None
    fast = how_fast(choice.speedup, num_prompts)
    text = f"Use {choice.configuration}{where}: {fast}."
    if choice.speedup.is_known:
        return Paragraph(text, "good")
    return Paragraph(f"{text} One prompt says nothing of others: raise --limit.", "caution")


def _next(result: TuneResult) -> list[Block]:
    return step("Serve with it:", result.next_command) if result.next_command else []


def _chart(result: TuneResult) -> list[Block]:
    """The settings that were confirmed by measurement, the fastest first."""
    if not result.confirmed:
        return []
    bars = [
        speedup_bar(row.configuration, row.speedup, is_best=_is_recommended(result, row))
        for row in result.confirmed
    ]
    bars = sorted([*bars, plain_bar()], key=lambda bar: -bar.value)
    return [Chart(SPEEDUP, "setting", "speedup", {"": bars}, baseline=1.0)]


def _is_recommended(result: TuneResult, row: Confirmed) -> bool:
    return row.configuration == result.recommendations[0].configuration


def _confirmed(result: TuneResult) -> list[Block]:
    if not result.confirmed:
        return []
    cells: Cells[Confirmed] = {
        "setting": lambda row: row.configuration,
        "speedup": lambda row: interval(row.speedup, "x"),
        "forecast": lambda row: number(result.overall_speedup.get(row.configuration), unit="x"),
        "tokens/s": lambda row: number(row.tokens_per_s, 0),
        "tokens per pass": lambda row: number(row.tau),
        "prompts": lambda row: str(row.texts),
        "unchanged texts": lambda row: _same(result, row),
    }
    rows = sorted(result.confirmed, key=lambda row: -row.speedup.value)
    return [table(rows, cells, "Measured", lambda row: _is_recommended(result, row))]


def _same(result: TuneResult, row: Confirmed) -> str:
    return NOTHING if result.tried.temperature > 0 else f"{row.identical} of {row.texts}"


def _forecasts(result: TuneResult) -> list[Block]:
    """The best forecasts, and the families that were not tried."""
    failed = [f"{family.family}: {family.failure}" for family in result.families if family.failure]
    not_tried: list[Block] = [Paragraph("Not tried:"), Bullets(failed)] if failed else []
    ranking = sorted(result.overall_speedup, key=lambda label: -result.overall_speedup[label])
    if not ranking:
        return not_tried
    by_label: dict[str, dict[str, Forecast]] = {}
    for forecast in result.forecasts:
        by_label.setdefault(forecast.configuration, {})[forecast.task] = forecast
    tasks = list(dict.fromkeys(forecast.task for forecast in result.forecasts))
    cells: Cells[str] = {
        "setting": lambda label: label,
        "forecast": lambda label: number(result.overall_speedup[label], unit="x"),
    }
    for task in tasks:
        name = f"tokens per pass, {task}" if len(tasks) > 1 else "tokens per pass"
        cells[name] = partial(_tau, by_label, task)
    title = f"The best {min(SHOWN, len(ranking))} of {len(ranking)} forecasts"
    return [
        Heading("Forecast for every setting"),
        table(ranking[:SHOWN], cells, title),
        *_break_even(result),
        *not_tried,
    ]


def _tau(forecasts: Mapping[str, Mapping[str, Forecast]], task: str, label: str) -> str:
    return number(forecasts[label][task].tau)


def _break_even(result: TuneResult) -> list[Block]:
    best = result.recommendations[0].configuration
    alphas = [row.break_even_alpha for row in result.forecasts if row.configuration == best]
    if not alphas or alphas[0] is None:
        return []
    return [
        Paragraph(
            f"{best} pays from an acceptance of {alphas[0]:.2f} per draft token, equal at all "
            "positions."
        )
    ]


def _schedule(result: TuneResult) -> list[Block]:
    if not result.schedule:
        return []
    cells: Cells[LoadStep] = {
        "requests at once": lambda load: str(load.batch_size),
        "with --settings": lambda load: result.nodes_at(load.batch_size),
        "fastest there": lambda load: load.configuration,
        "its speedup": lambda load: number(load.speedup, unit="x"),
        "its throughput": lambda load: number(load.tokens_per_s, 0),
        "plain throughput": lambda load: number(load.plain_tokens_per_s, 0),
    }
    title = "Forecast from the costs of steps at each load, tokens/s of all requests together"
    return [Heading("By load"), table(result.schedule, cells, title), *_lengths(result)]


def _lengths(result: TuneResult) -> list[Block]:
    """The behaviour of a server that loads the settings."""
    lengths = result.lengths_by_load()
    if not lengths:
        return []
    words = [f"{nodes or 'none'} from {counted(rows, 'request')} on" for rows, nodes in lengths]
    drafter = result.recommendations[0].configuration.split()[0]
    return [Paragraph(f"With --settings, serve drafts with {drafter}: {', '.join(words)}.")]


def _advice(result: TuneResult) -> list[Block]:
    blocks: list[Block] = []
    for words in result.advice:
        blocks += [
            Heading(words.engine, 3),
            *([CodeBlock(words.text, "bash")] if words.text else []),
        ]
        blocks += [Bullets(words.notes)] if words.notes else []
    return [Heading("The same in other engines"), *blocks] if blocks else []
