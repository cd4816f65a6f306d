"""`outrider demo`: the embedded pair answers a few problems, drafts marked, then `bench` measures
nine drafters on others."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli import session
from outrider.cli.lab import INTERRUPTED, shown_progress
from outrider.cli.options import MODEL, Json, ModelOptions, RuntimeName
from outrider.cli.stream import MarkedText, Printer, run_stream
from outrider.cli.verbs import listed, with_groups
from outrider.demo import DEMO_PROMPTS
from outrider.errors import ConfigError
from outrider.extras import check_lab
from outrider.report.text import stats_line, to_json

if TYPE_CHECKING:
    from outrider.lab.bench.bench_result import BenchResult
    from outrider.llm import LLM, Completion

MAX_NEW_TOKENS = 160
# seconds, and the relative width of an interval: the number of rounds alone decides when it ends
UNLIMITED = math.inf
CONFIGURATIONS = (
    "draft-model, draft-model k=auto, draft-model k=7 tree=best-first, ngram, suffix, recycling, lookahead, composite, medusa, "
    "eagle3 k=7, block k=7"
)
Threads = Annotated[
    int | None, typer.Option(help="CPU threads.", show_default="as many as this process may use")
]
Runtime = Annotated[
    RuntimeName, listed(MODEL, "How passes run; auto takes the fastest that this machine allows.")
]
Questions = Annotated[int, typer.Option(help="Problems answered before the table.", min=0, max=6)]
Limit = Annotated[
    int, typer.Option(help="Held-out problems per round of the table; 0 skips it.", min=0)
]
Rounds = Annotated[int, typer.Option(help="Rounds over the problems.", min=1)]


@with_groups
def demo(
    runtime: Runtime = "auto",
    threads: Threads = None,
    questions: Questions = 3,
    limit: Limit = 12,
    rounds: Rounds = 3,
    json: Json = False,
) -> int:
    """Answer a few problems with the embedded model pair, then measure nine drafters on it."""
    from outrider.lab.workload.load import load_workload

    if limit:
        check_lab("the table (--limit 0 skips it)")
    known = len(load_workload("demo").requests)
    if limit > known:
        raise ConfigError(
            f"there are {known} held-out problems, got --limit {limit}; --rounds measures them "
            "again"
        )
    options = ModelOptions(drafter="draft-model", threads=threads, runtime=runtime)
    llm = session.load_llm("demo", options)
    answers, interrupted = _answer(llm, questions, json)
    result = None
    if limit and not interrupted:
        try:
            result = _measure(options, limit, rounds)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted before anything was measured: there is no table yet\n")
            return INTERRUPTED
        interrupted = result.interrupted
    if json:
        measured = None if result is None else result.model_dump(mode="json")
        sys.stdout.write(
            to_json({"answers": answers, "bench": measured, "versions": llm.versions}) + "\n"
        )
    elif result is not None:
        from outrider.report.bench import brief
        from outrider.report.console import print_document

        print_document(brief(result))
    return INTERRUPTED if interrupted else 0


def _answer(llm: LLM, count: int, silent: bool) -> tuple[list[dict[str, Any]], bool]:
    """Stream the answers to the first prompts; also whether Ctrl-C ended it."""
    from outrider.sampling.params import SamplingParams

    console = Console(highlight=False)
    marked = MarkedText(console)
    answers: list[dict[str, Any]] = []
    if count and not silent:
        console.print(marked.legend())
    for prompt in DEMO_PROMPTS[:count]:
        if not silent:
            marked.write([(f"\n{prompt}", "bold")])
        completion = run_stream(
            llm, prompt, SamplingParams(max_tokens=MAX_NEW_TOKENS), Printer() if silent else marked
        )
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


def _measure(options: ModelOptions, limit: int, rounds: int) -> BenchResult:
    """Greedy, one problem at a time. Raises KeyboardInterrupt where nothing is known yet."""
    from outrider.build import Options
    from outrider.configuration import parse_configurations
    from outrider.lab.bench.plan import Plan
    from outrider.lab.bench.run import run_bench
    from outrider.lab.workload.load import load_workload
    from outrider.sampling.params import SamplingParams

    plan = Plan(
        tuple(parse_configurations([CONFIGURATIONS])),
        prompts=limit,
        sampling=SamplingParams(max_tokens=MAX_NEW_TOKENS),
        rounds=rounds,
        budget_s=UNLIMITED,
    )
    models = Options("demo", threads=options.threads, runtime=options.runtime)
    with TemporaryDirectory() as folder, shown_progress() as progress:
        journal = Path(folder) / "demo.jsonl"
        return run_bench(models, plan, load_workload("demo"), journal, progress=progress)
