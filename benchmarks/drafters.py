"""Which drafter pays where: drafters that need no training (all but early-exit and universal), nine
workloads, T = 0 and above.

A *cell* is one model pair, workload and temperature. In it all configurations decode a prompt side
by side, step by step: the next step is always that of whoever is furthest behind in the text, so
that a slow second of the machine hits all alike. A configuration is compared with plain decoding of
the same prompt. Drafters that learn, and the control of `auto`, start afresh in each cell and round
and meet the prompts in order, as they would with a user. Both models are loaded once, each
configuration has its own caches; they differ in drafter, options, length and verifier.

Speed is that of the decode phase: the prompt's keys and values are made once and handed to every
configuration, and the first step is left out. Known gains (`GAINS`) are measured by tau alone,
without a clock, on the target as it was before inflation.

    python benchmarks/drafters.py                      all of it; Ctrl-C, then --resume, continues after the last finished cell
    python benchmarks/drafters.py --render benchmarks/results/drafters-DATE.json
    python benchmarks/drafters.py --again benchmarks/results/auto-DATE.json --prompts 32 --name auto-again
                                                       the cells there that are below a floor, on
                                                       fresh prompts
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from drafters_report import gain, is_below, markdown, results, together
from peers import inflated
from questions import SPEC_BENCH, lines, questions
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from workload import (
    PAIRS,
    PEERS,
    REPOSITORY,
    OtherCpu,
    console,
    encode,
    model_name,
    model_pair,
    read_result,
    write_result,
)

from outrider import SamplingParams, __version__
from outrider.build import Needs, Options, assemble, build, choose, load_models
from outrider.decode import Decoder
from outrider.drafters.base import Drafter
from outrider.engine.warmup import calibrate_alone
from outrider.errors import OutriderError
from outrider.models.lm import LM
from outrider.models.loaded import LoadedModel
from outrider.parts import Parts, choose_parts
from outrider.rows import Row
from outrider.stats import PHASES, DecodeStats
from outrider.stops import StopStrings

Run = dict[str, Any]
# relative to the repository, so that no machine's path is in a result
CORPUS = "../shared/data/gsm8k/train.jsonl"
MAX_PROMPT_TOKENS = 600  # of a longer prompt, its end
COUNTERS = ("steps", "emitted", "drafted", "tested", "accepted")  # of `DecodeStats`
HARDER = 1.3  # time on all workloads over that on GSM8K, where most is accepted: for the estimate
ROTATION = 7  # positions by which the order of configurations moves on from prompt to prompt


@dataclass(frozen=True)
class Configuration:
    """What a user would say after --drafter."""

    drafter: str
    num_draft_tokens: int | str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    verifier: str = "auto"
    # where it takes part unless --configs names it; none given: everywhere
    workloads: tuple[str, ...] = ()


FEW = ("gsm8k", "code", "summarization", "repeat")  # for what is slow: one of each kind of text
CONFIGURATIONS = {
    "none": Configuration("none"),
    **{f"draft-model k={k}": Configuration("draft-model", k) for k in (2, 3, 5, 8)},
    "draft-model auto": Configuration("draft-model", "auto:8"),
    "draft-model best-first 8": Configuration("draft-model", 8, {"tree": "best-first"}),
    "draft-model best-first 8 adapt": Configuration(
        "draft-model", 8, {"tree": "best-first", "adapt": True}
    ),
    "draft-model best-first 16 adapt": Configuration(
        "draft-model", 16, {"tree": "best-first", "adapt": True}, workloads=FEW
    ),
    "draft-model sequoia 8": Configuration("draft-model", 8, {"tree": "sequoia"}, workloads=FEW),
    "draft-model parallel:2": Configuration(
        "draft-model", 8, {"tree": "parallel:2"}, workloads=FEW
    ),
    "ngram k=3": Configuration("ngram", 3),
    "ngram k=8": Configuration("ngram", 8),
    "ngram auto": Configuration("ngram", "auto:8"),
    "suffix": Configuration("suffix", 8),
    "suffix tree": Configuration("suffix", 8, {"tree": True}, workloads=FEW),
    "ngram-cache": Configuration("ngram-cache"),
    "recycling": Configuration("recycling", workloads=FEW),
    "lookahead": Configuration("lookahead", workloads=FEW),
    "retrieval": Configuration(
        "retrieval", None, {"corpus": CORPUS}, workloads=("gsm8k", "math_reasoning")
    ),
    "quantised 4 bits k=5": Configuration("quantised", 5, {"bits": 4}, workloads=FEW),
    "quantised 4 bits k=8": Configuration("quantised", 8, {"bits": 4}, workloads=FEW),
    "composite merge": Configuration("composite", 8, {"parts": "draft-model,suffix"}),
    **{
        f"composite merge k={k}": Configuration(
            "composite", k, {"parts": "draft-model,suffix"}, workloads=FEW
        )
        for k in (3, 5)
    },
    "composite best": Configuration("composite", 8, {"parts": "ngram,draft-model", "mode": "best"}),
    "composite auto": Configuration("composite", "auto:8", {"parts": "draft-model,suffix"}),
}

_SEQUOIA = {"tree": "sequoia"}
_WIDE = {"tree": "4x1"}
_MERGE = Configuration("composite", 8, {"parts": "draft-model,suffix"})
# workload, temperature, ours, theirs
GAINS: dict[str, tuple[str, float, Configuration, Configuration]] = {
    "block over token": ("gsm8k", 1.0, Configuration("draft-model", 8), Configuration("draft-model", 8, {}, "token")),
    "traversal over multi-round": (
        "gsm8k", 1.0, Configuration("draft-model", 8, _SEQUOIA), Configuration("draft-model", 8, _SEQUOIA, "multi-round"),
    ),
    "drawn without replacement over top-k": (
        "gsm8k", 1.0,
        Configuration("draft-model", 8, _WIDE | {"sample_from": 0}), Configuration("draft-model", 8, _WIDE | {"sample_from": 99}),
    ),
    "suffix over ngram": ("repeat", 0.0, Configuration("suffix", 8), Configuration("ngram", 8)),
    "composite over draft-model, repetitive": ("repeat", 0.0, _MERGE, Configuration("draft-model", 8)),
    "composite over suffix, repetitive": ("repeat", 0.0, _MERGE, Configuration("suffix", 8)),
    "composite over draft-model, retrieved text": ("rag", 0.0, _MERGE, Configuration("draft-model", 8)),
    "composite over suffix, retrieved text": ("rag", 0.0, _MERGE, Configuration("suffix", 8)),
    "composite over draft-model": ("gsm8k", 0.0, _MERGE, Configuration("draft-model", 8)),
    "composite over suffix": ("gsm8k", 0.0, _MERGE, Configuration("suffix", 8)),
}  # fmt: skip
WORKLOADS = ("gsm8k", "code", *SPEC_BENCH, "mt", "repeat")


def prompt_texts(workload: str, count: int, skip: int = 0) -> list[str]:
    """The first `count` prompts of a workload after `skip`, always the same ones. Questions are
    put as the pairs know them."""
    if workload == "code":
        return questions(workload, count, skip)
    asked = [
        f"Question: {text}\nAnswer:"
        for text in questions("gsm8k" if workload == "repeat" else workload, count, skip)
    ]
    if workload != "repeat":
        return asked
    answers = [item["answer"] for item in lines("gsm8k/test.jsonl")[skip : skip + count]]
    return [f"{text} {answer}\n\n{text}" for text, answer in zip(asked, answers, strict=True)]


def prompt_ids(workload: str, count: int, model: Path, skip: int = 0) -> list[list[int]]:
    """Token ids, `<s>` first; of a long prompt the last ones."""
    encoded = encode(prompt_texts(workload, count, skip), model)
    return [[ids[0], *ids[1:][-(MAX_PROMPT_TOKENS - 1) :]] for ids in encoded]


class Bench:
    """One pair of models, and decoders around them, each with caches of its own, which are empty
    between runs."""

    def __init__(
        self, target: Path, draft: Path, threads: int, runtime: str, *, module: bool
    ) -> None:
        fixed: dict[str, Any] = {
            "dtype": "bfloat16",
            "threads": threads,
            "runtime": runtime,
            "max_num_seqs": 1,
        }
        options, parts = choose(
            Options(
                str(target),
                drafter="draft-model",
                draft=str(draft),
                num_draft_tokens="auto:8",
                **fixed,
            )
        )
        # with the drafting programs of all fixed lengths
        built = assemble(load_models(options, Needs.of(parts)), parts)
        self._built = built
        self.target = built.target
        self.draft = built.draft
        self.folder = target
        if module:  # only a drafter that runs on the target's weights makes `build` keep them
            self.target = build(Options(str(target), drafter="quantised", **fixed)).target
        self.about = {
            "runtime": built.options.runtime,
            "exact_trees": self.target.lm.limits.exact_trees,
        }
        self._kept: dict[str, tuple[LM, Drafter]] = {}
        self._prompt: list[int] = []
        self._stores: list[torch.Tensor] = []

    def decoder(self, configuration: Configuration) -> Decoder:
        """With caches of its own, a new control, and a new drafter where it learns. OutriderError
        when it cannot be built."""
        options = dict(configuration.options)
        if "corpus" in options:
            options["corpus"] = str(REPOSITORY / options["corpus"])
        parts = choose_parts(
            configuration.drafter,
            options,
            configuration.verifier,
            {},
            configuration.num_draft_tokens,
            lossy=False,
        )
        key = repr(configuration)
        if parts.drafter.learns or key not in self._kept:
            target = self.target.twin()
            self._kept[key] = target.lm, parts.make_drafter(target, self._draft_for(parts))
        target_lm, drafter = self._kept[key]
        decoder = Decoder(target_lm, drafter, parts.make_verifier(), parts.make_control())
        # as `LLM` does: `auto` knows what steps cost, not yet what is accepted
        calibrate_alone(self._built, decoder, parts)
        return decoder

    def _draft_for(self, parts: Parts) -> LoadedModel | None:
        """The draft model with the programs that `build` would make for these parts."""
        if self.draft is None or self.draft.draft_loop is None:
            return None if self.draft is None else self.draft.twin()
        lengths = parts.loop_lengths
        return replace(
            self.draft, draft_loop=self.draft.draft_loop.of(lengths) if lengths else None
        ).twin()

    def start(
        self, decoder: Decoder, prompt: list[int], temperature: float, seed: int, max_tokens: int
    ) -> Running:
        """A prompt's decode phase, end of text ignored, after the step that follows the prompt."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        row = Row(
            request=0,
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            seed=seed,
            max_tokens=len(prompt) + max_tokens,
            stop_tokens=frozenset(),
            detokenizer=None,
            stops=StopStrings([]),
        )
        decoder.add(row)
        self._read_prompt(decoder.target, row.tokens)
        decoder.step()
        return Running(decoder, row)

    def decode(
        self, decoder: Decoder, prompt: list[int], temperature: float, seed: int, max_tokens: int
    ) -> Run:
        """The same to its end, alone."""
        running = self.start(decoder, prompt, temperature, seed, max_tokens)
        while not running.done:
            running.step()
        return running.finish()

    @torch.inference_mode()
    def _read_prompt(self, lm: LM, tokens: list[int]) -> None:
        """Commit the prompt to row 0: computed when it is a new one, else copied, as from a prefix
        cache."""
        kv = lm.kv
        length = len(tokens) - 1
        if tokens == self._prompt:
            kv.reserve(1, length)
            for store, saved in zip((*kv.keys, *kv.values), self._stores, strict=True):
                store[0, :length] = saved
            kv.advance(0, length)
            return
        lm.catch_up([tokens])
        self._prompt = list(tokens)
        self._stores = [store[0, :length].clone() for store in (*kv.keys, *kv.values)]


class Running:
    """One configuration on one prompt; the step after the prompt is left out of every number."""

    def __init__(self, decoder: Decoder, row: Row) -> None:
        self._decoder = decoder
        self._row = row
        self._first = row.stats.merge(DecodeStats())
        self._seconds = 0.0

    @property
    def emitted(self) -> int:
        """How far it is in the text."""
        return self._row.stats.emitted

    @property
    def done(self) -> bool:
        return bool(self._row.finish_reason)

    def step(self) -> None:
        start = time.perf_counter()
        self._decoder.step()
        self._seconds += time.perf_counter() - start

    def finish(self) -> Run:
        """What it came to; the decoder is free again."""
        self._decoder.remove(0)
        stats = self._row.stats
        first = self._first
        before = dict(enumerate(first.accepted_per_position))
        return {name: getattr(stats, name) - getattr(first, name) for name in COUNTERS} | {
            "seconds": self._seconds,
            "accepted_per_position": [
                n - before.get(i, 0) for i, n in enumerate(stats.accepted_per_position)
            ],
            "time_s": {phase: stats.time_s[phase] - first.time_s[phase] for phase in PHASES},
            "text": hashlib.sha256(str(self._row.output).encode()).hexdigest()[:8],
        }


def side_by_side(running: Sequence[Running]) -> float:
    """All to their ends, the next step always that of whoever is furthest behind. Share of the
    processors that others used.

    Garbage is collected before: a collection takes longer than a prompt, and would be charged to
    whoever's step it falls into.
    """
    waiting = [one for one in running if not one.done]
    gc.collect()
    gc.freeze()
    gc.disable()
    others = OtherCpu(psutil.Process())
    while waiting:
        last = min(waiting, key=lambda one: one.emitted)
        last.step()
        if last.done:
            waiting.remove(last)
    gc.enable()
    return others.share()


@dataclass(frozen=True)
class Plan:
    """What is measured; a resumed run must be the same."""

    pairs: list[str]
    workloads: list[str]
    temperatures: list[float]
    configurations: list[str]
    everywhere: bool  # also where they usually take no part
    prompts: int
    max_tokens: int
    rounds: int
    gain_prompts: int
    gain_seeds: int
    threads: int
    mlp: int
    runtime: str
    verifier: str  # of all configurations of the cells; "auto": each its own
    skip: int = 0  # prompts of each workload that come before those measured
    # these cells only -> configurations; none given: all there are
    again: dict[str, list[str]] = field(default_factory=dict)

    def configuration(self, name: str) -> Configuration:
        """As it takes part in cells."""
        chosen = CONFIGURATIONS[name]
        return chosen if self.verifier == "auto" else replace(chosen, verifier=self.verifier)

    def cells(self) -> list[tuple[str, str, float]]:
        everything = itertools.product(self.pairs, self.workloads, self.temperatures)
        return [cell for cell in everything if not self.again or cell_name(*cell) in self.again]

    def names(self, pair: str, workload: str, temperature: float) -> list[str]:
        """Configurations that take part in a cell."""
        if self.again:
            return self.again[cell_name(pair, workload, temperature)]
        wanted = {name: CONFIGURATIONS[name].workloads for name in self.configurations}
        return [
            name for name, only in wanted.items() if self.everywhere or not only or workload in only
        ]

    def num_runs(self, cell: tuple[str, str, float]) -> int:
        return len(self.names(*cell)) * self.prompts * self.rounds

    def gain_runs(self, temperature: float) -> int:
        return 2 * self.gain_prompts * (self.gain_seeds if temperature else 1)


def cell_name(pair: str, workload: str, temperature: float) -> str:
    return f"{pair} {workload} T={temperature:g}"


def below_a_floor(result: dict[str, Any]) -> dict[str, list[str]]:
    """Cells in which some `auto` was below a floor -> these autos, and what they are compared with."""
    cells: dict[str, list[str]] = {}
    for regret in result["regrets"]:
        if is_below(regret):
            found = cells.setdefault(
                cell_name(regret["pair"], regret["workload"], regret["temperature"]), []
            )
            found += [
                name for name in (*regret["rivals"], regret["configuration"]) if name not in found
            ]
    return cells


@dataclass
class Unfinished:
    """What has been measured so far, in a file that git ignores."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path, plan: Plan, *, resume: bool) -> Unfinished:
        """Start, or go on with the file. BadParameter when there is none, or when it has another
        plan or other code."""
        settings = asdict(plan) | {
            "versions": {
                "outrider": __version__,
                "source": _source_digest(),
                "torch": torch.__version__,
            }
        }
        if not resume:
            return cls(
                path, {"plan": settings, "pairs": {}, "failures": {}, "cells": [], "gains": []}
            )
        if not path.exists():
            raise typer.BadParameter("there is no interrupted run to resume")
        content = json.loads(path.read_text(encoding="utf-8"))
        if different := [
            name for name, value in settings.items() if content["plan"].get(name) != value
        ]:
            raise typer.BadParameter(
                f"the interrupted run had other settings: {', '.join(different)}"
            )
        return cls(path, content)

    def save(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(self.content), encoding="utf-8")
        scratch.replace(self.path)

    def has_cell(self, pair: str, workload: str, temperature: float) -> bool:
        cells = self.content["cells"]
        return any(
            (c["pair"], c["workload"], c["temperature"]) == (pair, workload, temperature)
            for c in cells
        )

    def has_gain(self, pair: str, name: str) -> bool:
        return any((g["pair"], g["name"]) == (pair, name) for g in self.content["gains"])


def _source_digest() -> str:
    """Of Outrider's code: cells measured before and after a change of it do not belong in one
    table."""
    files = sorted((REPOSITORY / "outrider").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def measure_cell(
    bench: Bench,
    names: Sequence[str],
    prompts: list[list[int]],
    temperature: float,
    plan: Plan,
    done: Callable[[int], None],
) -> dict[str, list[Run]]:
    """Every configuration on every prompt; its runs stand in the order of round and prompt. `done`
    hears how many there were."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(plan.rounds * len(prompts)):
        number, index = divmod(turn, len(prompts))
        if index == 0:
            decoders = {name: bench.decoder(plan.configuration(name)) for name in names}
        order = deque(names)
        order.rotate(-ROTATION * turn)  # who goes first where several are equally far
        running = {
            name: bench.start(decoders[name], prompts[index], temperature, index, plan.max_tokens)
            for name in order
        }
        other_cpu = side_by_side([*running.values()])
        for name, one in running.items():
            runs[name].append(
                {"round": number, "prompt": index, "other_cpu": other_cpu, **one.finish()}
            )
        done(len(names))
    return runs


def measure_gain(bench: Bench, name: str, plan: Plan, done: Callable[[], None]) -> dict[str, Any]:
    """Tau of both sides on the same prompts, a few seeds each where tokens are sampled."""
    workload, temperature, *sides = GAINS[name]
    decoders = [bench.decoder(side) for side in sides]
    counts: list[list[list[int]]] = [[], []]  # side, prompt: [emitted, steps]
    for index, prompt in enumerate(prompt_ids(workload, plan.gain_prompts, bench.folder)):
        for decoder, mine in zip(decoders, counts, strict=True):
            mine.append([0, 0])
            for seed in range(plan.gain_seeds if temperature else 1):
                run = bench.decode(
                    decoder, prompt, temperature, 1000 * seed + index, plan.max_tokens
                )
                mine[-1][0] += run["emitted"]
                mine[-1][1] += run["steps"]
                done()
    return {"name": name, "workload": workload, "temperature": temperature, **gain(*counts)}


def main(
    pairs: Annotated[
        str, typer.Option(help=f"Model pairs, comma-separated: {', '.join(PAIRS)}.")
    ] = "shared,demo",
    workloads: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(WORKLOADS)}.")
    ] = "",
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 = greedy.")] = "0,0.7,1",
    configs: Annotated[
        str, typer.Option(help="Configurations by name, comma-separated; 'none' always takes part.")
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Per workload.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=16)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    gain_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of each known gain; 0: leave them out.")
    ] = 24,
    gain_seeds: Annotated[
        int, typer.Option(min=1, help="Seeds per prompt of each sampled known gain.")
    ] = 4,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    mlp: Annotated[
        int, typer.Option(help="Inflate the target's MLPs to this width; 0: leave them.")
    ] = 10368,
    runtime: Annotated[str, typer.Option(help="Outrider's --runtime.")] = "auto",
    verifier: Annotated[
        str,
        typer.Option(
            help="Of all configurations; with 'gumbel' every length writes the same sampled text, "
            "too."
        ),
    ] = "auto",
    name: Annotated[
        str, typer.Option(help="Result: benchmarks/results/NAME-DATE.json.")
    ] = "drafters",
    again: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Only this result's cells with an auto below a floor, with its settings.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on after the last finished cell of an interrupted run.")
    ] = False,
    render: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            help="Only print the tables of this result; of several, one option each, the floors "
            "of all.",
        ),
    ] = None,
) -> None:
    """Compare drafters on model pairs, workloads and temperatures."""
    if render:
        stored = [read_result(path) for path in render]
        print(markdown(stored[0]) if len(stored) == 1 else together(stored))
        return
    plan = Plan(
        _named("pair", pairs, PAIRS),
        _named("workload", workloads, WORKLOADS),
        [float(t) for t in temperatures.split(",")],
        _named("configuration", configs, CONFIGURATIONS),
        bool(configs),
        prompts,
        max_tokens,
        rounds,
        gain_prompts,
        gain_seeds,
        threads,
        mlp,
        runtime,
        verifier,
    )
    if again is not None:
        plan = repeated(plan, read_result(again))
    unfinished = Unfinished.open(PEERS / f"{name}.unfinished.json", plan, resume=resume)
    try:
        measure(plan, unfinished)
    except KeyboardInterrupt:
        console().print(
            "interrupted; the same command with --resume goes on after the last finished cell"
        )
        raise typer.Exit(130) from None
    content = results(
        unfinished.content, {name: asdict(plan.configuration(name)) for name in plan.configurations}
    )
    path = write_result(name, content, threads)
    unfinished.path.unlink()
    print(markdown(read_result(path)))
    print(f"written to benchmarks/results/{path.name}")
    sys.exit(1 if content["failures"] or content["texts_that_differ"] else 0)


def repeated(plan: Plan, result: dict[str, Any]) -> Plan:
    """The cells of a result in which an `auto` is below a floor, with its settings, on the prompts
    after those of that time; of `plan` stay the numbers of prompts and rounds.

    Raises BadParameter where there are no such cells, or not as many prompts.
    """
    cells = below_a_floor(result)
    theirs = result["plan"]
    if not cells:
        raise typer.BadParameter("no auto of this result is below a floor")
    names = [name for name in CONFIGURATIONS if any(name in chosen for chosen in cells.values())]
    kept = (
        "pairs",
        "workloads",
        "temperatures",
        "max_tokens",
        "threads",
        "mlp",
        "runtime",
        "verifier",
    )
    skip = theirs.get("skip", 0) + theirs["prompts"]
    for workload in theirs["workloads"]:
        left = len(prompt_texts(workload, plan.prompts, skip))
        if left < plan.prompts and any(f" {workload} T=" in cell for cell in cells):
            raise typer.BadParameter(
                f"{workload} has {left} prompts after the first {skip}, got --prompts "
                f"{plan.prompts}"
            )
    return replace(
        plan,
        configurations=names,
        gain_prompts=0,
        skip=skip,
        again=cells,
        **{name: theirs[name] for name in kept},
    )


def _named(kind: str, given: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    """The names given, in the order of `known`; all when none is. Plain decoding is always among
    configurations."""
    names = [name for name in given.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no {kind} '{unknown[0]}'; there are: {', '.join(known)}")
    return [name for name in known if not names or name in names or name == "none"]


def measure(plan: Plan, unfinished: Unfinished) -> None:
    """All cells and gains that `unfinished` lacks; saved one by one."""
    out = console()
    cells = [cell for cell in plan.cells() if not unfinished.has_cell(*cell)]
    gains = [
        (pair, name)
        for pair in plan.pairs
        for name in GAINS
        if plan.gain_prompts and not unfinished.has_gain(pair, name)
    ]
    total = sum(map(plan.num_runs, cells)) + sum(
        plan.gain_runs(GAINS[name][1]) for _, name in gains
    )
    out.print(
        f"{len(cells)} cells, {len(gains)} known gains: {total} runs of {plan.max_tokens} tokens"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, speed_estimate_period=900) as progress:
        task = progress.add_task("loading", total=total)
        for pair in plan.pairs:
            mine = [cell for cell in cells if cell[0] == pair]
            wanted = [name for owner, name in gains if owner == pair]
            if mine:
                _measure_cells(plan, unfinished, pair, mine, progress, task)
            if wanted:
                _measure_gains(plan, unfinished, pair, wanted, progress, task)


def _measure_cells(
    plan: Plan, unfinished: Unfinished, pair: str, cells: list, progress: Progress, task: Any
) -> None:
    target, draft = model_pair(pair)
    wide, inflation = inflated(target, plan.mlp, 0)
    from_target = any(CONFIGURATIONS[name].drafter == "quantised" for name in plan.configurations)
    bench = Bench(wide, draft, plan.threads, plan.runtime, module=from_target)
    failures = unfinished.content["failures"]
    models = {"target": model_name(target), "draft": model_name(draft), "inflation": inflation}
    unfinished.content["pairs"][pair] = models | bench.about
    costs = _warm_up(bench, plan, failures, pair)
    seconds = (
        sum(costs.get(name, 0) for cell in cells for name in plan.names(*cell))
        * plan.prompts
        * plan.rounds
    )
    progress.console.print(
        f"{pair}: about {HARDER * seconds / 60:.0f} minutes, going by a first run of each "
        "configuration"
    )
    for _, workload, temperature in cells:
        progress.update(task, description=f"{pair} {workload} T={temperature:g}")
        names = [name for name in plan.names(pair, workload, temperature) if name in costs]
        prompts = prompt_ids(workload, plan.prompts, wide, skip=plan.skip)
        runs = measure_cell(
            bench, names, prompts, temperature, plan, lambda count: progress.advance(task, count)
        )
        cell = {
            "pair": pair,
            "workload": workload,
            "temperature": temperature,
            "prompt_tokens": [*map(len, prompts)],
        }
        unfinished.content["cells"].append(cell | {"runs": runs})
        unfinished.save()


def _warm_up(bench: Bench, plan: Plan, failures: dict[str, str], pair: str) -> dict[str, float]:
    """Configuration -> seconds of one whole run, on a prompt that is not measured. Those that
    cannot be built are failures."""
    (prompt,) = prompt_ids("gsm8k", 1, bench.folder, skip=plan.skip + plan.prompts)
    costs = {}
    for name in plan.configurations:
        try:
            decoder = bench.decoder(plan.configuration(name))
        except OutriderError as error:
            failures[f"{pair}: {name}"] = str(error).replace(f"{REPOSITORY.parent}/", "../")
            continue
        bench.decode(decoder, prompt, 1.0, 0, plan.max_tokens)
        began = time.perf_counter()
        bench.decode(decoder, prompt, 0.0, 0, plan.max_tokens)
        costs[name] = time.perf_counter() - began
    return costs


def _measure_gains(
    plan: Plan, unfinished: Unfinished, pair: str, names: list[str], progress: Progress, task: Any
) -> None:
    bench = Bench(*model_pair(pair), plan.threads, plan.runtime, module=False)
    for name in names:
        progress.update(task, description=f"{pair} {name}")
        found = measure_gain(bench, name, plan, lambda: progress.advance(task))
        unfinished.content["gains"].append({"pair": pair, **found})
        unfinished.save()


if __name__ == "__main__":
    typer.run(main)
