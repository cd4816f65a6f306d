"""What a hybrid's own MTP head brings: tokens per second with `--drafter mtp` over plain decoding,
on held-out problems.

The checkpoint is made by `tools/demo_models/hybrid.py` (three gated delta nets to one attention
layer, the head's tensors beside the target's). Every prompt is answered by all configurations in
turn, in an order that changes, so that each meets the same minutes; the fastest answer to each
prompt counts, because a machine is only ever slowed down by others. At T = 1 the verifier is
drafter-invariant: one seed, one text.

    python -m tools.demo_models.hybrid --out runs/hybrid
    python benchmarks/hybrid_mtp.py --folder runs/hybrid
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.table import Table
from transformers.utils import logging
from workload import OtherCpu, console, write_result

from outrider import LLM, SamplingParams, __version__
from tools.demo_models.hybrid import GRADES, SHAPE
from tools.demo_models.problems import Problem, is_correct, problems

FLOOR = 1.5  # of the best configuration over plain decoding
PROMPT_SEED = 2027
PLAIN = "plain"
Runs = dict[str, dict[str, Any]]  # by configuration: tokens, seconds per prompt, ...


def main(
    folder: Annotated[
        Path, typer.Option(exists=True, help="What tools/demo_models/hybrid.py wrote.")
    ],
    prompts: Annotated[int, typer.Option(min=2, help="Held-out problems.")] = 16,
    repeats: Annotated[
        int, typer.Option(min=1, help="Answers to each, by every configuration.")
    ] = 3,
    lengths: Annotated[str, typer.Option(help="Draft lengths, with commas.")] = "1,2,3,4,auto",
    max_tokens: Annotated[int, typer.Option(min=8)] = 128,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Measure plain decoding and the head, greedy and at T = 1."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()  # of kernels for GPUs that are not installed
    out = console()
    engines = {PLAIN: _engine(folder, threads)}
    engines |= {
        f"mtp k={k}": _engine(folder, threads, drafter="mtp", num_draft_tokens=_length(k))
        for k in lengths.split(",")
    }
    chosen = list(islice(problems(PROMPT_SEED, held_out=True, weights=GRADES), prompts))
    found: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        others = OtherCpu(psutil.Process())
        runs = _measured(engines, chosen, temperature, max_tokens, repeats)
        found[f"T={temperature:g}"] = result = {
            "other_cpu": round(others.share(), 3),
            **_summary(runs, chosen),
        }
        out.print(
            _table(
                f"T = {temperature:g}, {result['other_cpu']:.0%} of the machine used by others",
                result,
            )
        )
    content = {
        "versions": {"outrider": __version__, "torch": torch.__version__},
        "shape": SHAPE,
        "training": json.loads((folder / "training.json").read_text(encoding="utf-8")),
        "prompts": prompts,
        "repeats": repeats,
        "max_tokens": max_tokens,
        "floor": FLOOR,
        "found": found,
    }
    path = write_result("hybrid-mtp", content, threads)
    out.print(f"written to benchmarks/results/{path.name}")


def _engine(folder: Path, threads: int, *, drafter: str = "none", **options: Any) -> LLM:
    return LLM(folder / "target", drafter=drafter, verifier="gumbel", threads=threads, **options)


def _length(text: str) -> int | str:
    return text if text.startswith("auto") else int(text)


def _measured(
    engines: Mapping[str, LLM],
    chosen: list[Problem],
    temperature: float,
    max_tokens: int,
    repeats: int,
) -> Runs:
    """Every prompt by every engine, `repeats` times, in an order that changes; one round before
    them is not counted."""
    runs: Runs = {
        name: {"seconds": [], "texts": [], "tokens": [], "accepted": [0, 0, 0]} for name in engines
    }
    order = list(engines)
    rng = random.Random(0)
    for number, problem in enumerate([chosen[-1], *chosen]):
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(repeats):
            rng.shuffle(order)
            for name in order:
                params = SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens)
                start = time.perf_counter()
                done = engines[name].generate(problem.prompt, params)[0]
                seconds[name].append(time.perf_counter() - start)
                runs[name]["last"] = done
        for name, run in runs.items() if number else ():
            done = run["last"]
            run["seconds"].append(seconds[name])
            run["texts"].append(done.text)
            run["tokens"].append(len(done.token_ids))
            for index, value in enumerate(
                (done.stats.steps, done.stats.accepted, done.stats.tested)
            ):
                run["accepted"][index] += value
    return runs


def _summary(runs: Runs, chosen: list[Problem]) -> dict[str, Any]:
    """Ratios and rates by configuration, from the fastest answer to each prompt."""
    plain = runs[PLAIN]
    total = {name: sum(min(times) for times in run["seconds"]) for name, run in runs.items()}
    by_name = {}
    for name, run in runs.items():
        steps, accepted, tested = run["accepted"]
        by_name[name] = {
            "tokens_per_s": sum(run["tokens"]) / total[name],
            "over_plain": total[PLAIN] / total[name],
            "tokens_per_pass": sum(run["tokens"]) / steps,
            "accepted": accepted / tested if tested else None,
            "same_texts": run["texts"] == plain["texts"],
            "seconds": [[round(one, 4) for one in each] for each in run["seconds"]],
        }
    right = sum(
        is_correct(text, one.answer) for text, one in zip(plain["texts"], chosen, strict=True)
    )
    return {
        "solved": right / len(chosen),
        "tokens": sum(plain["tokens"]),
        "configurations": by_name,
    }


def _table(title: str, result: dict[str, Any]) -> Table:
    table = Table(
        title, "tokens/s", "times plain", "tokens a pass", "accepted / tested", "same texts"
    )
    for name, one in result["configurations"].items():
        share = "" if one["accepted"] is None else f"{one['accepted']:.2f}"
        cells = (
            f"{one['tokens_per_s']:.0f}",
            f"{one['over_plain']:.2f}",
            f"{one['tokens_per_pass']:.2f}",
            share,
        )
        table.add_row(name, *cells, "yes" if one["same_texts"] else "NO")
    return table


if __name__ == "__main__":
    typer.run(main)
