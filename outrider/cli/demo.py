"""`outrider demo`: the embedded pair answers a few problems, drafts marked, then every drafter is measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli import session
from outrider.cli.lab import INTERRUPTED, shown_progress
from outrider.cli.options import Json, ModelOptions, RuntimeName
from outrider.cli.stream import MarkedText, Printer, Silent, run_stream
from outrider.cli.verbs import with_groups
from outrider.errors import ConfigError
from outrider.report.marks import DraftMarks
from outrider.report.text import stats_line, to_json

if TYPE_CHECKING:
    from outrider.cli.demo_runs import Series
    from outrider.lab.workload.types import Request
    from outrider.llm import LLM, Completion

MAX_NEW_TOKENS = 160
FEW_PROBLEMS = 8  # below it an interval is rough
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="torch's choice")]
Runtime = Annotated[RuntimeName, typer.Option(help="How passes run; auto takes the fastest that this machine allows.")]
Questions = Annotated[int, typer.Option(help="Problems answered before the table.", min=0, max=6)]
Limit = Annotated[int, typer.Option(help="Held-out problems per round of the table; 0 skips it.", min=0)]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds; the median is reported.", min=1)]
TargetPair = Annotated[str, typer.Option(help="Another target than the embedded one; it needs --draft.")]
DraftPair = Annotated[str | None, typer.Option(help="Its draft model.", show_default=False)]


@with_groups
def demo(
    runtime: Runtime = "auto",
    threads: Threads = None,
    questions: Questions = 3,
    limit: Limit = 12,
    rounds: Rounds = 3,
    target: TargetPair = "demo",
    draft: DraftPair = None,
    json: Json = False,
) -> int:
    """Answer a few problems with the embedded model pair, then measure every drafter on it."""
    if target != "demo" and draft is None:
        raise ConfigError("--target needs its --draft here.")
    from outrider.cli.demo_runs import held_out_problems

    chosen = held_out_problems(limit)
    options = ModelOptions(drafter="draft-model", draft=draft, threads=threads, runtime=runtime)
    llm = session.load_llm(target, options)
    answers, interrupted = _answer(llm, questions, json)
    found: dict[str, Any] = {"answers": answers, "rows": []}
    if chosen and not interrupted:
        try:
            found |= _measure(target, options, chosen, rounds)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted before all drafters had answered a problem: there is no table yet\n")
            return INTERRUPTED
        interrupted = found.pop("interrupted")
    if json:
        sys.stdout.write(to_json({**found, "versions": llm.versions}) + "\n")
    elif found["rows"]:
        _show(found)
    return INTERRUPTED if interrupted else 0


def _answer(llm: LLM, count: int, silent: bool) -> tuple[list[dict[str, Any]], bool]:
    """Stream the answers to the first prompts; also whether Ctrl-C ended it."""
    from outrider.demo import DEMO_PROMPTS
    from outrider.sampling.params import SamplingParams

    console = Console(highlight=False)
    marks = DraftMarks(console)
    printer: Printer = Silent() if silent else MarkedText(marks)
    answers: list[dict[str, Any]] = []
    if count and not silent:
        console.print(marks.legend())
    for prompt in DEMO_PROMPTS[:count]:
        if not silent:
            console.print(f"\n{prompt}", style="bold", markup=False, end="", soft_wrap=True)
        completion = run_stream(llm, prompt, SamplingParams(max_tokens=MAX_NEW_TOKENS), printer)
        answers.append(_as_dict(prompt, completion))
        if not silent:
            console.print(stats_line(completion.stats), style="dim", soft_wrap=True)
        if completion.finish_reason == "abort":
            return answers, True
    return answers, False


def _as_dict(prompt: str, completion: Completion) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "origins": completion.origins,
        "stats": completion.stats.as_dict(),
    }


def _measure(target: str, options: ModelOptions, chosen: Sequence[Request], rounds: int) -> dict[str, Any]:
    from outrider.cli.demo_runs import disturbed, measure
    from outrider.machine import cpu_name
    from outrider.sampling.params import SamplingParams

    series, notes = _open_all(target, options), list[str]()
    with shown_progress() as progress:
        progress.stage("measuring", rounds * len(chosen) * len(series))
        params = SamplingParams(max_tokens=MAX_NEW_TOKENS)
        rows, interrupted = measure(series, chosen, params, rounds, progress.advance)
    if interrupted:
        notes.append("stopped by you: the table shows what all drafters had done by then")
    if (sentence := disturbed(rows)) is not None:
        notes.append(sentence)
    config = series[0].llm.config
    measured_on = {key: config[key] for key in ("threads", "dtype", "device", "runtime")}
    return {"rows": rows, "measured_on": {"cpu": cpu_name(), **measured_on}, "notes": notes, "interrupted": interrupted}


def _open_all(target: str, options: ModelOptions) -> list[Series]:
    """One engine per drafter, all on one runtime."""
    from outrider.cli.demo_runs import CONTENDERS, Series
    from outrider.drafters import DRAFTERS

    opened = []
    for one in CONTENDERS:
        wanted = ModelOptions(
            drafter=one.drafter, draft=options.draft if one.drafter in ("draft-model", "composite") else None,
            drafter_option=list(one.options), num_draft_tokens=one.num_draft_tokens, threads=options.threads,
            runtime=options.runtime,
        )  # fmt: skip
        opened.append(Series(one.label, session.load_llm(target, wanted), DRAFTERS.load(one.drafter).learns))
    return opened


def _show(found: dict[str, Any]) -> None:
    from outrider.report.tables import demo_table, show

    rows, on = found["rows"], found["measured_on"]
    first = rows[0]
    title = f"Greedy, {_counted(first['num_problems'], 'held-out problem')}, median of {_counted(first['num_rounds'], 'round')}"
    few = " (few: rough)" if first["num_problems"] < FEW_PROBLEMS else ""
    caption = (
        f"{on['cpu']}, {on['threads']} threads, {on['dtype']}, {on['runtime']} runtime; of drafters that learn, the first round\n"
        f"tokens/s, speedup: after the first step · in brackets: 95 % interval over the problems{few}; plain: its rounds\n"
        f"time to first token, median: {_span([1000 * row['ttft_s'] for row in rows])} ms, reading the prompt included\n"
        "τ: tokens per target pass, the target's own one included · α: accepted / tested draft tokens\n"
        "identical: the same token ids as plain decoding · correct: the worked-out answer is right"
    )
    sys.stdout.write("\n")
    show(demo_table(title, rows, caption))
    for note in found["notes"]:
        sys.stderr.write(f"note: {note}\n")


def _counted(number: int, word: str) -> str:
    """3, 'round' -> '3 rounds'."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def _span(values: list[float]) -> str:
    """[12.3, 15.9] -> '12 to 16'."""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"
