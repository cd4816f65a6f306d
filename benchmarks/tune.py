"""Does `outrider tune` find what trying everything finds, at a tenth of the price?

Three parts, on one loaded pair: tuning as the command does it; every member of every family on all
prompts (what tuning saves); then the exhaustive search's best few and tuning's advice once more, in
turn, on prompts that neither has seen. The last part decides: of many noisy numbers the largest
looks better than it is.

    python benchmarks/tune.py                      both temperatures, the shared pair with its target widened
    python benchmarks/tune.py --render benchmarks/results/tune-DATE.json
    python benchmarks/tune.py --rehearse 30        whole tunings on simulated machines (tools/tune_simulation/simulate.py)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from peers import inflated
from rich.progress import track
from workload import (
    PEERS,
    REPOSITORY,
    SHARED,
    console,
    model_name,
    model_pair,
    read_result,
    write_result,
)

from outrider import SamplingParams
from outrider.build import Options
from outrider.cli.options import RuntimeName
from outrider.configuration import PLAIN, Configuration
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.journal import Journal
from outrider.lab.runner import Contender, Runner
from outrider.lab.tune.decide import recommendations
from outrider.lab.tune.drafts import read_drafts
from outrider.lab.tune.run import choose_space, gather_prompts, split
from outrider.lab.tune.space import TuneRequest
from outrider.lab.tune.tune import Tuner
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.prompts import PreparedPrompt
from tools.tune_simulation import simulate

FINALISTS = 4  # of the exhaustive search, measured again


def seconds_per_token(
    contender: Contender, prompts: Sequence[PreparedPrompt], request: TuneRequest
) -> list[float]:
    """Decode phase, prompt by prompt."""
    return [
        contender.run([prompt.tokens], [request.params(prompt)])[0].seconds_per_token
        for prompt in prompts
    ]


def measure(
    options: Options,
    workload: str,
    temperature: float,
    prompts: int,
    fresh: int,
    max_tokens: int,
    *,
    own_weights: bool,
) -> dict[str, Any]:
    """All three parts at one temperature."""
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    request = TuneRequest(sampling, prompts, load_sizes=(), own_weights=own_weights)
    families = choose_space(options, request, read_drafts(options))
    runner = Runner(options, [family.largest for family in families], print)
    wider = TuneRequest(request.sampling, prompts + fresh)
    loaded = load_workload(workload, limit=prompts + fresh, data=SHARED / "data")
    samples, _ = gather_prompts(loaded, runner, wider, on_bad="skip", chat_template=False)
    samples, unseen = samples[:prompts], samples[prompts:]
    # touches all weights once
    runner.open(Configuration(PLAIN)).run([samples[0].tokens], [request.params(samples[0])])

    began = time.perf_counter()
    probe, confirm = split(samples)
    journal = Journal.open(PEERS / "tune.journal", {}, resume=False)
    found = Tuner(runner, families, request, probe, confirm, journal)
    found.run()
    journal.close()
    advice = recommendations(found, options.draft)[0]
    tune_s = time.perf_counter() - began

    members = [Configuration(PLAIN), *(one for family in families for _, one in family.members())]
    began = time.perf_counter()
    everything = {
        one.label: sum(seconds_per_token(runner.open(one), samples, request))
        for one in track(members, description=f"exhaustive, T = {temperature:g}", console=console())
    }
    exhaustive_s = time.perf_counter() - began

    best = sorted(everything, key=lambda label: everything[label])[:FINALISTS]
    labels = list(dict.fromkeys([advice.configuration, PLAIN, *best]))
    by_label = {one.label: one for one in [*members, *found.finalists]}
    again = _in_turn(runner, [by_label[label] for label in labels], unseen, request)
    winner = min((label for label in labels if label != PLAIN), key=lambda label: sum(again[label]))
    return {
        "temperature": temperature,
        "workload": workload,
        "prompts": prompts,
        "fresh_prompts": len(unseen),
        "max_tokens": max_tokens,
        "num_members": sum(len(family.sizes) for family in families),
        "advice": advice.configuration,
        "advice_speedup": advice.model_dump()["speedup"],
        "exhaustive_best": best[0],
        "tune_s": tune_s,
        "exhaustive_s": exhaustive_s,
        "cost_share": tune_s / exhaustive_s,
        "again": {
            label: {"speedup": ratio_of_sums(again[PLAIN], again[label]).model_dump()}
            for label in labels
        },
        "best_again": winner,
        "of_optimum": ratio_of_sums(again[best[0]], again[advice.configuration]).model_dump(),
        "of_best_again": ratio_of_sums(again[winner], again[advice.configuration]).model_dump(),
        "forecasts": found.overall,
        "exhaustive": {label: everything[PLAIN] / seconds for label, seconds in everything.items()},
        "failures": found.failures,
    }


def _in_turn(
    runner: Runner,
    configurations: Sequence[Configuration],
    prompts: Sequence[PreparedPrompt],
    request: TuneRequest,
) -> dict[str, list[float]]:
    """Everybody on every prompt, the order rotating."""
    contenders = [runner.open(one) for one in configurations]
    found: dict[str, list[float]] = {one.label: [] for one in configurations}
    for turn, prompt in enumerate(prompts):
        for index in range(len(contenders)):
            contender = contenders[(index + turn) % len(contenders)]
            found[contender.configuration.label] += seconds_per_token(contender, [prompt], request)
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of benchmarks/README.md."""
    lines = [
        "| T | members | tune's advice | exhaustive best | advice / best, fresh prompts | cost of tuning |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for cell in result["cells"]:
        ratio = cell["of_optimum"]
        lines.append(
            f"| {cell['temperature']:g} | {cell['num_members']} | {cell['advice']} | "
            f"{cell['exhaustive_best']} "
            f"| {ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] "
            f"| {cell['tune_s']:.0f} s of {cell['exhaustive_s']:.0f} s ({cell['cost_share']:.0%}) |"
        )
    return "\n".join(lines)


def rehearsed(worlds: int, *, greedy: bool, heads: bool) -> str:
    """One line: how good the choices are, and what they cost."""
    seeds = track(range(worlds), description="rehearsing", console=console())
    found = [simulate.rehearse(seed, greedy=greedy, heads=heads) for seed in seeds]
    good = sorted(one.of_best for one in found)
    which = f"{'greedy' if greedy else 'sampled'}, {'all families' if heads else 'a draft model and look-up'}"
    exhaustive = fmean(one.of_exhaustive for one in found)
    return (
        f"{which}: {exhaustive:.3f} of what trying everything on the same prompts chooses, on average; "
        f"{fmean(good):.3f} of the truly best on average, median {good[worlds // 2]:.3f}, tenth percentile "
        f"{good[worlds // 10]:.3f}, worst {good[0]:.3f}; cost {fmean(one.cost_share for one in found):.3f} on average, "
        f"{max(one.cost_share for one in found):.3f} at most"
    )


def main(
    pair: Annotated[str, typer.Option(help="Model pair.")] = "shared",
    workload: Annotated[str, typer.Option(help="Prompts.")] = "gsm8k",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    prompts: Annotated[int, typer.Option(help="That tuning and the exhaustive search see.")] = 16,
    fresh: Annotated[int, typer.Option(help="That nobody has seen.")] = 16,
    max_tokens: Annotated[int, typer.Option()] = 48,
    own_weights: Annotated[
        bool, typer.Option(help="Also quantised and early-exit drafts, made on loading.")
    ] = False,
    mlp: Annotated[
        int, typer.Option(help="Inflate the target's MLPs to this width; 0: leave them.")
    ] = 10368,
    threads: Annotated[int, typer.Option()] = 2,
    runtime: Annotated[RuntimeName, typer.Option()] = "auto",
    rehearse: Annotated[
        int, typer.Option(help="Only tune this many simulated machines, greedy and sampled.")
    ] = 0,
    render: Annotated[
        Path | None, typer.Option(exists=True, help="Only print the table of this result.")
    ] = None,
) -> None:
    """Tuning against trying everything."""
    if render is not None:
        print(markdown(read_result(render)))
        return
    if rehearse:
        print(
            "\n".join(
                rehearsed(rehearse, greedy=greedy, heads=heads)
                for heads in (False, True)
                for greedy in (True, False)
            )
        )
        return
    target, draft = model_pair(pair)
    wide, inflation = inflated(target, mlp, 0)
    options = Options(
        str(wide), draft=str(draft), dtype="bfloat16", threads=threads, runtime=runtime
    )
    cells = [
        measure(options, workload, float(t), prompts, fresh, max_tokens, own_weights=own_weights)
        for t in temperatures.split(",")
    ]
    models = {"target": model_name(target), "draft": model_name(draft), "inflation": inflation}
    content = {"models": models, "cells": cells}
    path = write_result("tune", content, threads)
    print(markdown(content))
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    typer.run(main)
