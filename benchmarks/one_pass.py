"""A draft in one pass by a mask token (PARD) against a chain token by token, on the demo's target.

First the cost of a draft, call by call in turn, the fastest of each: a chain and one pass of the
same model, after a draft that was kept whole, and the target's pass over it. The ratio of both steps
is the speed at equal tau. Then answers: the demo's own chain, and the model with the mask token read
without it and with it; the fastest answer of each to each prompt counts.

    outrider train "draft-model parallel=8" --target demo --prompts demo:3000 --init demo --out runs/parallel \
        --epochs 4 --batch-size 16 --training lr=2e-3 --max-tokens 160
    OMP_NUM_THREADS=1 python benchmarks/one_pass.py --draft runs/parallel/drafter     a minute
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from workload import console

from outrider import LLM, SamplingParams
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import MASK_TOKENS
from outrider.runtime.drafting import (
    Picks,
    Vocabulary,
    chains_behind,
    draft_masked,
    first_pass,
    with_masks,
)
from outrider.runtime.run import NativeRun
from tools.demo_models.problems import problems

SEED = 2031  # of held-out problems
TEXT = 64  # tokens that caches hold where calls are timed
CALLS = 200
DEMO = "demo's chain"
Run = tuple[float, int, int]  # seconds, tokens, steps of an answer


def main(
    draft: Annotated[Path, typer.Option(exists=True, help="A draft model with a mask token.")],
    prompts: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 20,
    repeats: Annotated[int, typer.Option(min=0, help="Answers to each; 0: costs alone.")] = 5,
    lengths: Annotated[str, typer.Option(help="Draft lengths, with commas.")] = "3,5,8",
    max_tokens: Annotated[int, typer.Option(min=8)] = 120,
) -> None:
    """Measure and print two tables. Texts must be the same for all."""
    sizes = [int(each) for each in lengths.split(",")]
    out = console()
    out.print(costs(LLM("demo", draft=str(draft), threads=1), sizes))
    if not repeats:
        return
    questions = [
        f"Question: {problem.question}\nAnswer:"
        for problem in islice(problems(SEED, held_out=True), prompts)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        plain = without_mask(draft, Path(scratch) / "draft")
        folders = {DEMO: "demo", "own chain": str(plain), "one pass": str(draft)}
        engines = {
            (kind, k): LLM("demo", draft=folder, num_draft_tokens=k, threads=1)
            for k in sizes
            for kind, folder in folders.items()
        }
        best = answers(engines, questions, repeats, SamplingParams(max_tokens=max_tokens))
    out.print(speeds(best))


@torch.inference_mode()
def costs(llm: LLM, sizes: list[int]) -> Table:
    """Microseconds of the calls of a step, greedy, one row."""
    built = llm._built
    assert built.draft is not None
    mask_token = built.draft.mask_token
    assert mask_token is not None
    target, lm = (holding_text(model.lm) for model in (built.target, built.draft))
    shown = Table("k", "target's pass, us", "chain, us", "one pass, us", "speed at equal tau")
    for k in sizes:
        fastest = fastest_of(calls_of(target, lm, k, mask_token))
        passed, chain, masked = (seconds * 1e6 for seconds in fastest)
        ratio = (passed + chain) / (passed + masked)
        shown.add_row(f"{k}", f"{passed:.0f}", f"{chain:.0f}", f"{masked:.0f}", f"{ratio:.2f}x")
    return shown


def calls_of(target: LM, lm: LM, k: int, mask_token: int) -> list[Callable[[], object]]:
    """The target's pass over a draft of k tokens, a chain of them, and the one pass."""
    run = lm.run
    assert isinstance(run, NativeRun)
    vocabulary = Vocabulary(target.shape.vocab_size)
    picks = Picks.likeliest(1, k)
    kept = with_masks([[5] * (k + 1)], mask_token, k)

    def one_pass() -> None:
        first = first_pass(lm.kv, kept, 0, lm.shape.context_length - 1, lm.shape.vocab_size)
        draft_masked(run.bound, lm.kv, picks, first, k, vocabulary)

    return [
        lambda: target.forward(torch.tensor([[5] * (k + 1)])),
        lambda: chains_behind(lm, run, picks, [[5, 5]], k, vocabulary),
        one_pass,
    ]


def holding_text(lm: LM) -> LM:
    """The model with one row of `TEXT` tokens in its cache."""
    own = lm.twin()
    own.kv.add_row()
    own.catch_up([[5] * (TEXT + 1)])
    return own


def fastest_of(calls: list[Callable[[], object]]) -> list[float]:
    """Seconds of the fastest of each, made in turn."""
    fastest = [float("inf")] * len(calls)
    for _ in range(CALLS):
        for number, call in enumerate(calls):
            began = time.perf_counter()
            call()
            fastest[number] = min(fastest[number], time.perf_counter() - began)
    return fastest


def without_mask(draft: Path, folder: Path) -> Path:
    """A copy of the model whose config names no mask token."""
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    plain = {name: value for name, value in config.items() if name not in MASK_TOKENS}
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


def answers(
    engines: dict[tuple[str, int], LLM], questions: list[str], repeats: int, params: SamplingParams
) -> dict[tuple[str, int], dict[str, Run]]:
    """The fastest answer of each engine to each question."""
    best: dict[tuple[str, int], dict[str, Run]] = {name: {} for name in engines}
    texts: dict[str, list[int]] = {}
    for _ in range(repeats):
        for question in questions:
            for name, llm in engines.items():
                answer = llm.generate(question, params)[0]
                assert texts.setdefault(question, answer.token_ids) == answer.token_ids
                run = (answer.stats.decode_s, answer.stats.emitted, answer.stats.steps)
                best[name][question] = min(run, best[name].get(question, run))
    return best


def speeds(best: dict[tuple[str, int], dict[str, Run]]) -> Table:
    """A row for each configuration, against the demo's chain of that length."""
    shown = Table("drafts", "k", "tau", "speed")
    for (kind, k), runs in best.items():
        seconds, tokens, steps = (sum(each) for each in zip(*runs.values(), strict=True))
        theirs, same, _ = (sum(each) for each in zip(*best[DEMO, k].values(), strict=True))
        speed = tokens / seconds / (same / theirs)
        shown.add_row(kind, f"{k}", f"{tokens / steps:.2f}", f"{speed:.2f}x")
    return shown


if __name__ == "__main__":
    typer.run(main)
