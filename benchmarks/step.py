"""What a decoding step costs and whether speculation pays what it promises: the floors that are
ours alone.

1. One target pass over 1 to 16 query tokens behind a prompt (floor: 8 tokens at most 1.2 times 1
   token), and what the
   multiplications of 8 tokens alone take at the processor's own limit (`arithmetic.py`), measured
   between the passes.
2. The drafter's time per draft token over a target pass of one token (floor: 0.06 for 1.2M against
   100M).
3. The share of a step outside model passes: distribution, verification, bookkeeping (floor: 5 % at
   100M), greedy and sampled; of
   draft trees beside it.
4. Measured speedup over plain decoding against what acceptance and measured costs predict (floor:
   0.9 of it):
   tau(alpha, k) * pass(1) / (pass(k + 1) + k * draft token), tau: Leviathan et al. 2211.17192, eq.
   1.

The decode phase is timed around `Decoder.step`, the step that everything else calls, after the step
that feeds the prompt. Configurations are interleaved over prompts and rounds; runs beside busy
neighbours are repeated.

    python benchmarks/step.py
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import typer
from arithmetic import Arithmetic
from peers import inflated
from rich.console import Console
from rich.table import Table
from workload import (
    PAIRS,
    OtherCpu,
    console,
    encode,
    model_name,
    model_pair,
    prompt_texts,
    spread,
    write_result,
)

from outrider import SamplingParams, __version__
from outrider.build import Built, Options, build
from outrider.lab.disturbance import Repeats
from outrider.models.lm import LM
from outrider.rows import Row, RowVerifier
from outrider.sampling.theory import tau
from outrider.stats import PHASES
from outrider.stops import StopStrings
from outrider.verifiers.coupled import CoupledVerifier

MAX_TOKENS = 16
PASS_REPEATS = 5  # between two prompts
FLOORS = {
    "pass(8) / pass(1)": 1.2, "draft token / pass(1)": 0.06, "outside model passes": 0.05, "outside model passes, sampled": 0.05,
}  # fmt: skip
SAMPLED: dict[str, dict[str, Any]] = {
    "T = 1": {"temperature": 1.0},
    "T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T = 1, gumbel": {"temperature": 1.0, "rule": CoupledVerifier()},
}
TREE = {"tree": "best-first"}
TREE_NODES = 8
PROMISE_FLOOR = 0.9


@dataclass
class Decoded:
    """One prompt's decode phase, the prompt's own step left out."""

    seconds: float
    emitted: int
    steps: int
    drafted: int
    tested: int
    accepted: int
    time_s: dict[str, float]
    token_ids: list[int]
    other_cpu: float


@dataclass
class Measured:
    """By tokens of a pass, by draft length, and by how it was sampled."""

    seconds: dict[int, list[float]]
    flops_per_s: list[float]
    runs: dict[int, list[Decoded]]
    sampled: dict[str, dict[int, list[Decoded]]]
    trees: dict[str, list[Decoded]]


def main(
    pair: Annotated[
        str, typer.Option(help=f"Target and draft: {', '.join(PAIRS)}, or a folder of both.")
    ] = "shared",
    mlp: Annotated[
        int, typer.Option(help="Inflate the target's MLPs to this width; 0: leave them.")
    ] = 10368,
    extra_layers: Annotated[int, typer.Option(help="Inflate the target by silent layers.")] = 0,
    k: Annotated[str, typer.Option(help="Draft lengths, comma-separated.")] = "3,5",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    prompts: Annotated[int, typer.Option(min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(min=16)] = 96,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    max_other_cpu: Annotated[
        float, typer.Option(help="Repeat a run beside busier neighbours.")
    ] = 0.08,
    runtime: Annotated[str, typer.Option(help="Outrider's --runtime.")] = "auto",
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = "step",
) -> None:
    """Measure a step's parts and compare the speedup with its prediction."""
    out = console()
    target, draft = model_pair(pair)
    wide, inflation = inflated(target, mlp, extra_layers)
    ids = encode(prompt_texts(prompts), wide)
    lengths = [0, *map(int, k.split(","))]
    built = {length: _build(wide, draft, length, threads, runtime) for length in lengths}
    tree = _build(wide, draft, TREE_NODES, threads, runtime, **TREE)
    with tempfile.TemporaryDirectory() as scratch:
        arithmetic = Arithmetic(Path(scratch), threads) if Arithmetic.is_possible() else None
        found = measure(built, tree, ids, max_tokens, rounds, max_other_cpu, arithmetic)
    passes = {n: spread(values) for n, values in found.seconds.items()}
    bound = (
        arithmetic_bound(wide, built[0].decoder.target, found.flops_per_s)
        if found.flops_per_s
        else None
    )
    summary = {length: summarise(length, found.runs, passes) for length in lengths}
    drawn = {
        name: {str(length): parts(runs) for length, runs in mine.items()}
        for name, mine in found.sampled.items()
    }
    branching = {name: parts(runs) for name, runs in found.trees.items()}
    content: dict[str, Any] = {
        "models": {
            "target": model_name(target),
            "draft": model_name(draft),
            "inflation": inflation,
        },
        "versions": {"outrider": __version__, "torch": torch.__version__},
        "workload": {
            "prompts": prompts,
            "max_tokens": max_tokens,
            "rounds": rounds,
            "threads": threads,
        },
        "config": built[lengths[-1]].config()
        | {"target": model_name(target), "draft": model_name(draft)},
        "pass_s": passes,
        "arithmetic_of_8_tokens": bound,
        "summary": {str(length): row for length, row in summary.items()},
        "sampled": drawn,
        "trees": {"nodes": TREE_NODES, **TREE, "runs": branching},
        "floors": reached(passes, summary, drawn),
    }
    path = write_result(name, content, threads)
    show(out, passes, summary, drawn, branching, content["floors"])
    if bound:
        out.print(
            "8 tokens' multiplications at the processor's "
            f"{bound['flops_per_s']['median'] / 1e9:.0f} GFLOP/s: "
            f"{bound['seconds'] * 1e3:.1f} ms"
        )
    out.print(f"written to benchmarks/results/{path.name}")


def _build(
    target: Path, draft: Path, length: int, threads: int, runtime: str, **tree: Any
) -> Built:
    fixed: dict[str, Any] = {
        "dtype": "bfloat16",
        "threads": threads,
        "runtime": runtime,
        "max_num_seqs": 1,
    }
    if not length:
        return build(Options(str(target), drafter="none", **fixed))
    drafting: dict[str, Any] = {
        "draft": str(draft),
        "num_draft_tokens": length,
        "drafter_options": tree,
    }
    return build(Options(str(target), drafter="draft-model", **drafting, **fixed))


def measure(
    built: dict[int, Built],
    tree: Built,
    prompts: list[list[int]],
    max_tokens: int,
    rounds: int,
    max_other_cpu: float,
    arithmetic: Arithmetic | None,
) -> Measured:
    """Everything in turn, in every round: this machine changes its speed within minutes."""
    repeats = Repeats(max_other_cpu, console().print)
    seconds: dict[int, list[float]] = {n: [] for n in range(1, MAX_TOKENS + 1)}
    flops_per_s: list[float] = []
    runs: dict[int, list[Decoded]] = {length: [] for length in built}
    sampled: dict[str, dict[int, list[Decoded]]] = {
        name: {length: [] for length in built} for name in SAMPLED
    }
    trees: dict[str, list[Decoded]] = {name: [] for name in ("T = 0", *SAMPLED)}
    for configuration in (*built.values(), tree):
        decode(configuration, prompts[0], max_tokens)
    for number in range(rounds * len(prompts)):
        time_passes(built[0].decoder.target, prompts[0], seconds)
        if arithmetic:
            flops_per_s += [arithmetic.flops_per_s(rows=8) for _ in range(PASS_REPEATS)]
        prompt = prompts[number % len(prompts)]
        for length in list(built)[:: 1 if number % 2 == 0 else -1]:
            runs[length].append(undisturbed(built[length], prompt, max_tokens, repeats))
            for name, sampling in SAMPLED.items():
                sampled[name][length].append(
                    undisturbed(built[length], prompt, max_tokens, repeats, **sampling)
                )
        for name, mine in trees.items():
            mine.append(undisturbed(tree, prompt, max_tokens, repeats, **SAMPLED.get(name, {})))
    return Measured(seconds, flops_per_s, runs, sampled, trees)


def undisturbed(
    built: Built, prompt: list[int], max_tokens: int, repeats: Repeats, **sampling: Any
) -> Decoded:
    """`decode`, repeated beside busy neighbours; the quietest run."""
    return repeats.calmest(
        lambda: decode(built, prompt, max_tokens, **sampling), lambda run: run.other_cpu, limit=3
    )[0]


def arithmetic_bound(folder: Path, lm: LM, flops_per_s: list[float]) -> dict[str, Any]:
    """What 8 tokens take where nothing but the multiplications with the weights costs time."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # read, not multiplied
    table = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
    speed = spread(flops_per_s)
    flops = 2 * 8 * (lm.shape.num_parameters - table)
    return {"flops": flops, "flops_per_s": speed, "seconds": flops / speed["median"]}


@torch.inference_mode()
def time_passes(lm: LM, prompt: list[int], seconds: dict[int, list[float]]) -> None:
    """One pass over n tokens behind the prompt, for every n in turn, a few times; the first turn
    warms up."""
    lm.kv.add_row()
    lm.catch_up([[*prompt, 0]])
    for repeat in range(PASS_REPEATS + 1):
        for n, values in seconds.items():
            tokens = torch.tensor([prompt[-1:] * n])
            start = time.perf_counter()
            lm.forward(tokens)
            if repeat:
                values.append(time.perf_counter() - start)
    lm.kv.swap_remove(0)


def decode(
    built: Built,
    prompt: list[int],
    max_tokens: int,
    rule: RowVerifier | None = None,
    **sampling: Any,
) -> Decoded:
    """Text of one prompt, greedy unless `sampling` says otherwise, by the default verifier or this
    `rule`; what the steps after the first cost."""
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **sampling}
    )
    row = Row(
        request=0,
        tokens=list(prompt),
        num_prompt=len(prompt),
        params=params,
        seed=0,
        max_tokens=len(prompt) + max_tokens,
        stop_tokens=frozenset(),
        detokenizer=None,
        stops=StopStrings([]),
        verifier=rule,
    )
    decoder = built.decoder
    decoder.add(row)
    decoder.step()
    stats = row.stats
    before = row.stats.merge(type(row.stats)())
    others = OtherCpu(psutil.Process())
    start = time.perf_counter()
    while not row.finish_reason:
        decoder.step()
    seconds = time.perf_counter() - start
    decoder.remove(0)
    return Decoded(
        seconds=seconds,
        emitted=stats.emitted - before.emitted,
        steps=stats.steps - before.steps,
        drafted=stats.drafted - before.drafted,
        tested=stats.tested - before.tested,
        accepted=stats.accepted - before.accepted,
        time_s={phase: stats.time_s[phase] - before.time_s[phase] for phase in PHASES},
        token_ids=row.output,
        other_cpu=others.share(),
    )


def summarise(
    length: int, runs: dict[int, list[Decoded]], passes: dict[int, dict[str, float]]
) -> dict[str, Any]:
    """Medians over greedy runs of one configuration, and its speedup beside the prediction."""
    mine = runs[length]
    plain = runs[0]
    summary: dict[str, Any] = parts(mine) | {
        "identical_to_plain": all(
            a.token_ids == b.token_ids for a, b in zip(mine, plain, strict=True)
        ),
        "other_cpu": spread([run.other_cpu for run in mine]),
    }
    if not length:
        return summary
    pass_1 = passes[1]["median"]
    pass_k = passes[length + 1]["median"]
    token_s = median(run.time_s["draft"] / run.drafted for run in mine)
    alpha = sum(run.accepted for run in mine) / sum(run.tested for run in mine)
    measured_tau = sum(run.emitted for run in mine) / sum(run.steps for run in mine)
    predicted = tau(alpha, length) * pass_1 / (pass_k + length * token_s)
    speedup = sum(run.seconds for run in plain) / sum(run.seconds for run in mine)
    speedup *= sum(run.emitted for run in mine) / sum(run.emitted for run in plain)
    return summary | {
        "alpha": alpha,
        "tau": measured_tau,
        "tau_of_alpha": tau(alpha, length),
        "draft_token_s": token_s,
        "draft_token_over_pass": token_s / pass_1,
        "speedup": speedup,
        "predicted_speedup": predicted,
        "measured_over_predicted": speedup / predicted,
    }


def parts(runs: list[Decoded]) -> dict[str, Any]:
    """Speed, and where a step's time goes, as medians over runs."""
    outside = [1 - (run.time_s["target"] + run.time_s["draft"]) / run.seconds for run in runs]
    return {
        "tokens_per_s": spread([run.emitted / run.seconds for run in runs]),
        "step_s": median(run.seconds / run.steps for run in runs),
        "phase_s": {
            phase: median(run.time_s[phase] / run.steps for run in runs) for phase in PHASES
        },
        "outside_model_passes": median(outside),
    }


def reached(
    passes: dict[int, dict[str, float]],
    summary: dict[int, dict[str, Any]],
    drawn: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Each floor: the value, the bound, and whether it holds."""
    drafting = [row for length, row in summary.items() if length]
    values = {
        "pass(8) / pass(1)": passes[8]["median"] / passes[1]["median"],
        "draft token / pass(1)": min(row["draft_token_over_pass"] for row in drafting),
        "outside model passes": max(row["outside_model_passes"] for row in summary.values()),
        "outside model passes, sampled": max(
            row["outside_model_passes"] for rows in drawn.values() for row in rows.values()
        ),
    }
    result = {
        name: {"value": v, "at_most": FLOORS[name], "holds": v <= FLOORS[name]}
        for name, v in values.items()
    }
    worst = min(row["measured_over_predicted"] for row in drafting)
    promise = {"value": worst, "at_least": PROMISE_FLOOR, "holds": worst >= PROMISE_FLOOR}
    return {**result, "measured / predicted speedup": promise}


def show(
    console: Console,
    passes: dict[int, dict[str, float]],
    summary: dict[int, dict[str, Any]],
    drawn: dict[str, dict[str, Any]],
    trees: dict[str, dict[str, Any]],
    floors: dict[str, Any],
) -> None:
    costs = Table(title="one target pass, ms (median)")
    row = Table(title="decode phase, medians")
    ratios = ("tau", "alpha", "speedup", "predicted_speedup")
    for n in passes:
        costs.add_column(str(n), justify="right")
    costs.add_row(*(f"{cost['median'] * 1e3:.1f}" for cost in passes.values()))
    for column in (
        "k",
        "tokens/s",
        "step ms",
        *PHASES,
        "outside",
        "tau",
        "alpha",
        "speedup",
        "predicted",
        "same text",
    ):
        row.add_column(column, justify="right")
    for length, result in summary.items():
        row.add_row(
            str(length),
            f"{result['tokens_per_s']['median']:.0f}",
            f"{result['step_s'] * 1e3:.2f}",
            *(f"{result['phase_s'][phase] * 1e3:.2f}" for phase in PHASES),
            f"{result['outside_model_passes']:.1%}",
            *(f"{result[name]:.2f}" if length else "-" for name in ratios),
            "yes" if result["identical_to_plain"] else "NO",
        )
    others = Table(title="sampled, and trees")
    for column in ("", "k", "tokens/s", "step ms", *PHASES, "outside"):
        others.add_column(column, justify="right")
    branching = {name: {f"tree of {TREE_NODES}": result} for name, result in trees.items()}
    for name, rows in (*drawn.items(), *branching.items()):
        for tokens, result in rows.items():
            others.add_row(
                name,
                tokens,
                f"{result['tokens_per_s']['median']:.0f}",
                f"{result['step_s'] * 1e3:.2f}",
                *(f"{result['phase_s'][phase] * 1e3:.2f}" for phase in PHASES),
                f"{result['outside_model_passes']:.1%}",
            )
    console.print(costs, row, others)
    for name, floor in floors.items():
        bound = f"<= {floor['at_most']}" if "at_most" in floor else f">= {floor['at_least']}"
        console.print(
            f"{name}: {floor['value']:.3f} ({bound}: "
            f"{'holds' if floor['holds'] else 'does NOT hold'})"
        )


if __name__ == "__main__":
    typer.run(main)
