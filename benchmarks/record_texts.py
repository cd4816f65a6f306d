"""What a drafter gets right at every position of real texts, for `control.py --recorded`: no clock,
so any machine will do.

With shared noise (`--verifier gumbel`) and at T = 0 every draft length writes the same text, so how
many nodes the target keeps at a position depends on the position alone. Here each step drafts all
it may, notes how much of it would be kept, and takes one token only: then every position of a text
is known, and with it what any length, fixed or chosen, would have met there.

    python benchmarks/record_texts.py --pairs shared
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from control_worlds import MAX_NODES
from drafters import CONFIGURATIONS, WORKLOADS, Bench, prompt_ids
from rich.progress import track
from torch import Tensor
from workload import PAIRS, console, model_name, model_pair, write_result

from outrider import __version__
from outrider.decode import Decoder
from outrider.types import Draft, Verdict, VerdictLists

# -> configuration, all of MAX_NODES nodes
DRAFTERS = {"draft-model": "draft-model k=8", "ngram": "ngram k=8"}


class OneByOne(Decoder):
    """Takes the first token of every verdict, and notes how many nodes were offered and how many of
    them are kept."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.target, decoder.drafter, decoder.verifier, decoder.control)
        self.offered: list[int] = []
        self.kept: list[int] = []

    def _verify(self, logits: Tensor, draft: Draft) -> Verdict:
        found = super()._verify(logits, draft).lists
        num_nodes = draft.num_nodes
        self.offered += draft.lists[1]
        self.kept += found.num_accepted
        first = draft.lists[0][0][0] if found.num_accepted[0] else found.next_token[0]
        return Verdict.of_lists(
            VerdictLists([[-1] * num_nodes], [0], [first], [not num_nodes]),
            num_nodes,
            logits.device,
        )


@dataclass(frozen=True)
class Plan:
    """Of every cell."""

    prompts: int
    max_tokens: int


def record(
    bench: Bench, drafter: str, workload: str, temperature: float, plan: Plan
) -> dict[str, list[str]]:
    """A digit per position, a line per text: nodes offered, and nodes kept."""
    decoder = OneByOne(bench.decoder(replace(CONFIGURATIONS[DRAFTERS[drafter]], verifier="gumbel")))
    lines: dict[str, list[str]] = {"offered": [], "kept": []}
    for seed, prompt in enumerate(prompt_ids(workload, plan.prompts, bench.folder)):
        decoder.offered = []
        decoder.kept = []
        # close to its end a row is offered less
        bench.decode(decoder, prompt, temperature, seed, plan.max_tokens + MAX_NODES)
        lines["offered"].append("".join(map(str, decoder.offered[: plan.max_tokens])))
        lines["kept"].append("".join(map(str, decoder.kept[: plan.max_tokens])))
    return lines


def main(
    pairs: Annotated[
        str, typer.Option(help=f"Model pairs, comma-separated: {', '.join(PAIRS)}.")
    ] = ",".join(PAIRS),
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 = greedy.")] = "0,0.7,1",
    prompts: Annotated[int, typer.Option(min=1, help="Per workload.")] = 48,
    max_tokens: Annotated[int, typer.Option(min=16)] = 64,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    name: Annotated[
        str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")
    ] = "recorded-texts",
) -> None:
    """Record what drafters get right."""
    plan = Plan(prompts, max_tokens)
    cells = []
    models = {}
    for pair in pairs.split(","):
        target, draft = model_pair(pair)
        models[pair] = {"target": model_name(target), "draft": model_name(draft)}
        bench = Bench(target, draft, threads, "native", module=False)
        wanted = [
            (d, float(t), w) for d in DRAFTERS for t in temperatures.split(",") for w in WORKLOADS
        ]
        for drafter, temperature, workload in track(wanted, description=pair, console=console()):
            cell: dict[str, Any] = {
                "pair": pair,
                "drafter": drafter,
                "workload": workload,
                "temperature": temperature,
            }
            cells.append(cell | record(bench, drafter, workload, temperature, plan))
    versions = {"outrider": __version__, "torch": torch.__version__}
    path = write_result(
        name,
        {"versions": versions, "models": models, "most_nodes": MAX_NODES, "cells": cells},
        threads,
    )
    print(f"{len(cells)} cells written to benchmarks/results/{path.name}")


if __name__ == "__main__":
    typer.run(main)
