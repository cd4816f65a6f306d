"""Drafts for mixtures of experts: the demo target as mixtures of 8 to 64 experts (`widened.py`), plain,
with fixed lengths, `auto` and trees, each prompt with every setting in turn.

Acceptance is that of the demo's own drafters, since every mixture computes what the demo does; passes
cost what their distinct experts cost. Greedy texts must be the plain ones.

    python benchmarks/experts.py                          all shapes, a quarter of an hour
    python benchmarks/experts.py --shapes 32:4 --add      one shape, put into the result of today
    python benchmarks/experts.py --shapes 64:4 --times 4 --add        the same with longer steps
    python benchmarks/experts.py --render benchmarks/results/experts-DATE.json
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table
from widened import Shape, widened
from workload import PEERS, RESULTS, OtherCpu, console, prompt_texts, read_result, write_result

from outrider import LLM, Completion, SamplingParams
from outrider.build import assemble, choose, load_models
from outrider.configuration import Configuration
from outrider.demo import demo_head, demo_paths
from outrider.engine.warmup import calibrate_alone
from outrider.lab.estimate.experts import mixture_of
from outrider.options import Needs, Options
from tools.demo_models.problems import problems

NAME = "experts"
SEED = 2061  # of the demo's held-out problems
BUSY = 0.1  # share of the processors that others use, above which a run is made again,
TRIES = 3  # so often at most
WAKING_TOKENS = 4  # before every measured run, which another setting's run came before
SETTLING_TOKENS = 200  # before steps are timed: loading is still felt
PLAIN = "none"
BOTH = "both"  # workloads
MODEL = "draft-model"
SETTINGS = (
    *(f"{MODEL} k={k}" for k in ("2", "4", "8", "auto:8")),
    f"{MODEL} tree=best-first k=auto:15",
    *(f"{drafter} k={k}" for drafter in ("eagle3", "suffix") for k in ("4", "auto:8")),
    PLAIN,  # between two plain runs: what this says of itself is noise
)
FIXED = 4  # the length that `auto` is compared with
FLOOR, GAIN = 0.98, 1.15  # of plain; of a fixed length that loses


def main(
    shapes: Annotated[
        str, typer.Option(help="EXPERTS:ACTIVE, comma-separated.")
    ] = "8:4,16:4,32:4,64:4",
    heads: Annotated[int, typer.Option(help="Of attention: 30 cost 0.4 of four experts.")] = 30,
    times: Annotated[
        int, typer.Option(min=1, help="Heads and the width of experts, times this.")
    ] = 1,
    settings: Annotated[str, typer.Option(help="In the lab's words.")] = ",".join(SETTINGS),
    prompts: Annotated[int, typer.Option(min=1, help="Of each workload.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=8)] = 80,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    add: Annotated[bool, typer.Option("--add", help="Keep today's other shapes.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Nothing stored.")] = False,
    folder: Annotated[Path, typer.Option(help="Of the mixtures.")] = PEERS / "models" / "experts",
    render: Annotated[Path | None, typer.Option(help="Print a stored result again.")] = None,
    name: Annotated[str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")] = NAME,
) -> None:
    """Measure, store the result and print the tables."""
    if render:
        show(read_result(render))
        return
    found: dict[str, Any] = {}
    for each in shapes.split(","):
        experts, active = map(int, each.split(":"))
        shape = Shape(experts, active, times * heads, times)
        found[shape.name] = measure(
            shape, folder, settings.split(","), prompts, max_tokens, threads
        )
    content = {"shapes": found, "settings": settings.split(","), "max_tokens": max_tokens}
    if not quick:
        if add and (today := sorted(RESULTS.glob(f"{name}-[0-9]*.json*"))):
            content["shapes"] = {**read_result(today[-1])["shapes"], **found}
        write_result(name, content, threads)
    show(content)


def measure(
    shape: Shape, folder: Path, settings: list[str], prompts: int, max_tokens: int, threads: int
) -> dict[str, Any]:
    """One shape: its experts' share of a plain pass, and one entry a run."""
    cut = f"{shape.experts}-{shape.active}-{shape.heads}-{shape.times}"
    target = widened(shape, folder / cut)
    mixture = mixture_of(str(target))
    assert mixture is not None
    with (
        tempfile.TemporaryDirectory() as cache
    ):  # step times of an earlier hour would be used again
        os.environ["OUTRIDER_CACHE"] = cache
        ways = engines(target, [PLAIN, *settings], threads)
    process = psutil.Process()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    waking = replace(params, max_tokens=WAKING_TOKENS)
    runs = []

    def timed(setting: str, prompt: str) -> Completion:
        llm = ways[setting]
        llm.generate([prompt[: len(prompt) // 2]], waking, use_tqdm=False)
        return llm.generate([prompt], params, use_tqdm=False)[0]

    for number, (workload, prompt) in enumerate(asked(prompts)):
        for setting in settings if number % 2 else settings[::-1]:
            for _ in range(TRIES):
                other = OtherCpu(process)
                plain, answer, after = (timed(name, prompt) for name in (PLAIN, setting, PLAIN))
                if other.share() < BUSY:
                    break
            runs.append(
                {
                    "prompt": number,
                    "workload": workload,
                    "setting": setting,
                    "plain_tokens_per_s": statistics.harmonic_mean(
                        [each.stats.decode_tokens_per_s or 0.0 for each in (plain, after)]
                    ),
                    "tokens_per_s": answer.stats.decode_tokens_per_s,
                    "tau": answer.stats.tau,
                    "experts": answer.stats.experts_per_pass,
                    "drafted": answer.stats.drafted,
                    "steps": answer.stats.steps,
                    "others": other.share(),
                    "is_plain_text": answer.token_ids == plain.token_ids,
                }
            )
    controls = {name: ways[name].control for name in settings if "auto" in name}
    ways.clear()
    gc.collect()
    return {"plain_share": mixture.plain_share, "controls": controls, "runs": runs}


def engines(target: Path, settings: list[str], threads: int) -> dict[str, LLM]:
    """Ways of drafting on one target."""
    wanted = {name: Configuration.parse(name) for name in settings}
    chosen = {}
    for name, one in wanted.items():
        head = demo_head(one.drafter)
        draft = (
            str(demo_paths().draft) if one.drafter == MODEL else None if head is None else str(head)
        )
        chosen[name] = choose(
            Options(
                str(target),
                draft=draft,
                drafter=one.drafter,
                num_draft_tokens=one.num_draft_tokens,
                drafter_options=one.drafter_options,
                threads=threads,
                max_num_seqs=1,
            )
        )
    needs = Needs.of_all([parts for _, parts in chosen.values()])
    options = next((each for each, parts in chosen.values() if parts.requirements.draft), None)
    models = load_models(options or next(iter(chosen.values()))[0], needs)
    ways = {}
    plain = LLM.around(assemble(models, chosen[PLAIN][1]))
    plain.generate(
        [[0]], SamplingParams(max_tokens=SETTLING_TOKENS, ignore_eos=True), use_tqdm=False
    )
    for name, (_, parts) in chosen.items():
        built = assemble(models, parts)
        calibrate_alone(built, built.decoder, parts)
        ways[name] = LLM.around(built)
    return ways


def asked(count: int) -> Iterator[tuple[str, str]]:
    """(workload, prompt): questions that the demo cannot answer, and those that it was trained for,
    in turn."""
    own = islice(problems(SEED, held_out=True), count)
    for hard, easy in zip(prompt_texts(count), own, strict=True):
        yield "gsm8k", hard
        yield "demo", f"Question: {easy.question}\nAnswer:"


def speedups(runs: list[dict[str, Any]], setting: str) -> list[float]:
    """Speed of a setting over the plain runs right before and after it, by prompt."""
    mine = [run for run in runs if run["setting"] == setting]
    return [run["tokens_per_s"] / run["plain_tokens_per_s"] for run in mine]


def interval(values: list[float]) -> float:
    """The half of a 95 % interval of the geometric mean, as a share of it."""
    logarithms = [math.log(value) for value in values]
    return 1.96 * statistics.stdev(logarithms) / math.sqrt(len(values)) if values[1:] else math.inf


def verdicts(runs: list[dict[str, Any]], settings: list[str]) -> list[tuple[str, float, str]]:
    """(what, ratio, whether a floor is met) for every `auto`."""
    found = []
    for name in settings:
        if "k=auto" not in name:
            continue
        plain = statistics.geometric_mean(speedups(runs, name))
        found.append((f"{name} / plain", plain, "met" if plain >= FLOOR else "not met"))
        fixed = f"{name.split(' k=')[0]} k={FIXED}"
        lost = statistics.geometric_mean(speedups(runs, fixed)) if fixed in settings else 1.0
        if lost < 1:
            gain = plain / lost
            found.append((f"{name} / k={FIXED}", gain, "met" if gain >= GAIN else "not met"))
    return found


def show(content: dict[str, Any]) -> None:
    """A table a shape and workload, and the floors."""
    out = console()
    for shape, found in content["shapes"].items():
        for workload in (*dict.fromkeys(run["workload"] for run in found["runs"]), BOTH):
            runs = [run for run in found["runs"] if workload in (run["workload"], BOTH)]
            settings = list(dict.fromkeys(run["setting"] for run in runs))
            title = f"{shape} ({found['plain_share']:.0%} of a plain pass), {workload}"
            table = Table("setting", "x plain", "tau", "experts a pass", "texts equal", title=title)
            for name in sorted(settings):
                mine = [run for run in runs if run["setting"] == name]
                steps = sum(run["steps"] for run in mine)
                tau = sum(run["tau"] * run["steps"] for run in mine) / steps
                read = sum((run["experts"] or 0.0) * run["steps"] for run in mine) / steps
                same = sum(run["is_plain_text"] for run in mine)
                gains = speedups(runs, name)
                gain = f"{statistics.geometric_mean(gains):.3f} ± {interval(gains):.1%}"
                table.add_row(name, gain, f"{tau:.2f}", f"{read:.1f}", f"{same} of {len(mine)}")
            out.print(table)
            for what, ratio, verdict in verdicts(runs, settings):
                out.print(f"{what}: {ratio:.3f}, {verdict}")


if __name__ == "__main__":
    typer.run(main)
