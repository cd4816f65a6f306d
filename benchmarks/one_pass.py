"""A draft in one pass by a mask token (PARD) against a chain token by token, on the demo's target.

The chain drafts with the model that comes with the demo, and with the very model that has the mask
token, read without it. Every prompt is answered by all in turn; the fastest answer to each counts.
Two ratios of speed: of answers as they are, and of steps, as if both kept as many tokens a step
("at equal tau").

    outrider train "draft-model parallel=8" --target demo --prompts demo:3000 --init demo --out runs/parallel \
        --epochs 4 --batch-size 16 --training lr=2e-3 --max-tokens 160
    OMP_NUM_THREADS=1 python benchmarks/one_pass.py --draft runs/parallel/drafter     two minutes
"""

from __future__ import annotations

import json
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from workload import console

from outrider import LLM, SamplingParams
from outrider.models.tokens.vocabulary import MASK_TOKENS
from tools.demo_models.problems import problems

SEED = 2031  # of held-out problems
KINDS = ("demo's chain", "own chain", "one pass")
Best = dict[str, Any]  # of one configuration: by prompt (seconds, draft seconds, tokens, steps)


def main(
    draft: Annotated[Path, typer.Option(exists=True, help="A draft model with a mask token.")],
    prompts: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Answers to each.")] = 5,
    lengths: Annotated[str, typer.Option(help="Draft lengths, with commas.")] = "3,5,8",
    max_tokens: Annotated[int, typer.Option(min=8)] = 120,
) -> None:
    """Measure and print a table. Texts must be the same for all."""
    questions = [
        f"Question: {problem.question}\nAnswer:"
        for problem in islice(problems(SEED, held_out=True), prompts)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            "demo's chain": "demo",
            "own chain": str(without_mask(draft, Path(scratch) / "draft")),
            "one pass": str(draft),
        }
        engines = {
            (kind, k): LLM("demo", draft=folders[kind], num_draft_tokens=k, threads=1)
            for k in map(int, lengths.split(","))
            for kind in KINDS
        }
        best = measured(engines, questions, repeats, SamplingParams(max_tokens=max_tokens))
    console().print(table(best))


def without_mask(draft: Path, folder: Path) -> Path:
    """A copy of the model whose config names no mask token."""
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    plain = {name: value for name, value in config.items() if name not in MASK_TOKENS}
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


def measured(
    engines: dict[tuple[str, int], LLM], questions: list[str], repeats: int, params: SamplingParams
) -> dict[tuple[str, int], Best]:
    """The fastest answer of each engine to each question."""
    best: dict[tuple[str, int], Best] = {name: {} for name in engines}
    texts: dict[str, list[int]] = {}
    for _ in range(repeats):
        for question in questions:
            for name, llm in engines.items():
                answer = llm.generate(question, params)[0]
                stats = answer.stats
                assert texts.setdefault(question, answer.token_ids) == answer.token_ids
                run = (stats.decode_s, stats.time_s["draft"], stats.emitted, stats.steps)
                best[name][question] = min(run, best[name].get(question, run))
    return best


def table(best: dict[tuple[str, int], Best]) -> Table:
    """A row for each configuration; ratios against the demo's chain of that length."""
    shown = Table()
    for title in (
        "drafts",
        "k",
        "tau",
        "draft, us a step, prompt included",
        "step, us",
        "speed",
        "at equal tau",
    ):
        shown.add_column(title)
    for (kind, k), runs in best.items():
        seconds, drafting, tokens, steps = (sum(each) for each in zip(*runs.values(), strict=True))
        of_chain = [sum(each) for each in zip(*best["demo's chain", k].values(), strict=True)]
        speed = tokens / seconds / (of_chain[2] / of_chain[0])
        equal = (of_chain[0] / of_chain[3]) / (seconds / steps)
        shown.add_row(
            kind,
            str(k),
            f"{tokens / steps:.2f}",
            f"{drafting / steps * 1e6:.0f}",
            f"{seconds / steps * 1e6:.0f}",
            f"{speed:.2f}x",
            f"{equal:.2f}x",
        )
    return shown


if __name__ == "__main__":
    typer.run(main)
