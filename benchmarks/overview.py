"""The first table of docs/results: for each model at hand plain decoding, the best drafter without
training, and the best with a trained one, at temperature 0 and 1, for 1 and 8 requests at once.

    OMP_NUM_THREADS=2 python benchmarks/overview.py             measure, store, and write the table into the page
    python benchmarks/overview.py --render benchmarks/results/overview-DATE.json

Every setting takes turns with plain decoding on the same prompts. One request: tokens per second of
its decode phase; eight: of all together, prompts included. Speedups are of the decode phase.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from workload import REPOSITORY, SHARED, console, read_result, write_result

from outrider import SamplingParams
from outrider.build import DEMO, Options
from outrider.configuration import Configuration
from outrider.lab.bench.bench_result import BenchResult, Cell, Measured
from outrider.lab.bench.plan import Plan
from outrider.lab.bench.run import run_bench
from outrider.lab.workload.load import load_workload

PAGE = REPOSITORY / "docs" / "results" / "README.md"
BEGIN = "<!-- made by benchmarks/overview.py -->"
END = "<!-- to here -->"
UNTRAINED = ("suffix k=8", "suffix k=auto", "ngram k=8")
TRAINED = ("draft-model k=5", "eagle3 k=5", "medusa k=4")


@dataclass(frozen=True)
class Subject:
    """A model and what it is asked."""

    name: str  # in the table
    target: str
    workload: str
    settings: tuple[str, ...]


def subjects() -> list[Subject]:
    """The models at hand: the embedded pair, and the real chat model where it lies beside."""
    found = [Subject("embedded pair, bf16", DEMO, "demo", (*UNTRAINED, *TRAINED))]
    files = sorted((SHARED / "models" / "smollm2-135m-instruct").glob("*Q4_1.gguf"))
    for file in files[:1]:
        prompts = "spec-bench:mt-bench"
        found.insert(0, Subject("SmolLM2-135M-Instruct, Q4_1", str(file), prompts, UNTRAINED))
    return found


def measure(subject: Subject, prompts: int, max_tokens: int) -> BenchResult:
    """All cells of one model."""
    plan = Plan(
        configurations=tuple(Configuration.parse(text) for text in subject.settings),
        temperatures=(0.0, 1.0),
        batch_sizes=(1, 8),
        prompts=prompts,
        rounds=1,
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    # first questions, so that a prompt is a prompt of the named set
    workload = load_workload(subject.workload, data=SHARED / "data", turns="first")
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        return run_bench(Options(subject.target), plan, workload, journal)


def row_of(name: str, result: BenchResult, cell: Cell) -> dict[str, Any]:
    """One line: a temperature and a number of requests."""
    plain = _speed(cell, cell.configurations[0])
    row: dict[str, Any] = {
        "model": name,
        "temperature": cell.temperature,
        "requests": cell.batch_size,
        "prompts": len(cell.prompt_ids),
        "plain": plain,
    }
    for column, settings in (("untrained", UNTRAINED), ("trained", TRAINED)):
        row[column] = _best(result, cell, settings)
    compared = [one.identity for one in cell.configurations if one.identity is not None]
    row["compared"] = sum(one.num_compared for one in compared)
    row["equal"] = sum(one.num_identical for one in compared)
    return row


def _best(result: BenchResult, cell: Cell, settings: tuple[str, ...]) -> dict[str, Any] | None:
    """The fastest of these settings; None where none was measured."""
    labels = {Configuration.parse(text).label for text in settings}
    able = [
        one
        for one in cell.configurations
        if result.configurations[one.configuration].label in labels and one.speedup is not None
    ]
    if not able:
        return None
    best = max(able, key=lambda one: one.speedup.value if one.speedup else 0.0)
    assert best.speedup is not None
    return {
        "setting": result.configurations[best.configuration].label,
        "tokens_per_s": _speed(cell, best),
        "speedup": best.speedup.value,
        "low": best.speedup.low,
        "high": best.speedup.high,
        "tau": best.tau,
    }


def _speed(cell: Cell, measured: Measured) -> float:
    if cell.batch_size > 1 or measured.tokens_per_s is None:
        return measured.throughput_tokens_per_s
    return measured.tokens_per_s.value


def markdown(content: dict[str, Any]) -> str:
    """The table, and where it was measured."""
    hardware = content["hardware"]
    lines = [
        "| model | T | requests at once | plain, tokens/s | best without training | best with a "
        "trained drafter | texts equal to plain's |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for row in content["rows"]:
        equal = f"{row['equal']} of {row['compared']}" if row["compared"] else "sampled"
        lines.append(
            f"| {row['model']} | {row['temperature']:g} | {row['requests']} | {row['plain']:.0f} | "
            f"{_words(row['untrained'])} | {_words(row['trained'])} | {equal} |"
        )
    machine = f"{hardware['cpu']}, {hardware['threads_used']} threads, {content['date']}"
    lines += [
        "",
        f"In brackets: speedup of the decode phase with its 95 % interval, tokens per pass. {machine}; "
        f"{content['rows'][0]['prompts']} prompts a line, `{content['command']}`.",
    ]
    return "\n".join(lines)


def _words(best: dict[str, Any] | None) -> str:
    if best is None:
        return "none at hand"
    return (
        f"`{best['setting']}` {best['tokens_per_s']:.0f} ({best['speedup']:.2f}x "
        f"[{best['low']:.2f}, {best['high']:.2f}], {best['tau']:.2f})"
    )


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(
    prompts: Annotated[int, typer.Option(min=8, help="Of each model.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=8, help="Of an answer.")] = 96,
    threads: Annotated[int, typer.Option(min=1, help="That torch was given.")] = 2,
    render: Annotated[Path | None, typer.Option(help="Show a stored result.")] = None,
) -> None:
    """Measure, or show what was measured."""
    if render is not None:
        console().print(markdown(read_result(render)), markup=False, soft_wrap=True)
        return
    rows = []
    for subject in subjects():
        result = measure(subject, prompts, max_tokens)
        rows += [row_of(subject.name, result, cell) for cell in result.cells]
    path = write_result("overview", {"rows": rows}, threads)
    text = markdown(read_result(path))
    write_page(text)
    console().print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
