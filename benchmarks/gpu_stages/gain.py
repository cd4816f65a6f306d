"""What speculation gains on a target of known acceptance at the cost of an 8B model, measured
against what step costs predict.

The target is the demo's, widened without changing what it computes (`inflate.py`): silent layers
and silent MLP columns. So the demo's own draft model and heads draft for it as they do for the
demo. All configurations take turns on models that are loaded once; each batch is decoded by all of
them, then the next one.

    measured  = decode tokens per second / those of plain decoding; an answer's first step is left out
    predicted = plain seconds per token x tokens / sum over steps of cost(widest draft, rows)

Costs are timed in sweeps of their own; of the measured runs the prediction takes counts only, not a
second.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import inflate
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider import SamplingParams
from outrider.build import Options, assemble
from outrider.configuration import Configuration
from outrider.demo import demo_heads, demo_paths
from outrider.engine.warmup import calibrate_alone
from outrider.errors import OutriderError
from outrider.lab.runner import Contender, Runner, Trace
from outrider.lab.workload.load import load_workload

if TYPE_CHECKING:
    from gpu_stages.context import Context

MINUTES = 2.5
FLOOR = 0.95  # measured over predicted
LIKE_8B = (212_992, 24)  # MLP width and silent layers: 32 layers, 7.9B parameters
LIKE_TINY = (2048, 1)
WIDENING = "widening.json"  # what was done, beside the weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SKIPPED = 2  # first steps of a run, which touch new memory
HELD = 3  # steps of one length on end in a sweep, the first of which pays for the change


@dataclass(frozen=True)
class Size:
    """Prompts, lengths and repeats of a run."""

    batches: tuple[int, ...] = (1, 4, 16)
    prompts: tuple[int, ...] = (4, 8, 16)  # of each batch size
    max_tokens: int = 64
    lengths: tuple[int, ...] = (3, 5, 8)
    # rounds, and sweeps of each configuration: clocks rise, graphs are recorded
    unmeasured: int = 1
    sweeps: int = 3  # texts on which each configuration's steps are timed
    rounds: int = 4  # at most


TINY = Size(
    batches=(1, 2), prompts=(1, 2), max_tokens=16, lengths=(3,), unmeasured=0, sweeps=2, rounds=1
)


def run(context: Context) -> dict[str, Any]:
    """Every batch size in turn, each within its share of the time left."""
    size = TINY if context.tiny else Size()
    target = widened_target(context)
    try:
        return _run(context, target, size)
    finally:
        context.release()


def _run(context: Context, target: Path, size: Size) -> dict[str, Any]:
    configurations, notes = wanted(target, size)
    runner, runtime, more = opened(context, target, configurations, max(size.batches))
    notes += more
    contenders, failures = everyone(runner, configurations, context)
    facts = json.loads((target / WIDENING).read_text(encoding="utf-8"))
    context.keep(
        {
            "target": facts,
            "runtime": runtime,
            "notes": notes,
            "failures": failures,
            "judged": context.on_cuda,
        }
    )
    prompts = prompt_tokens(runner.tokenizer, max(size.prompts))
    cells: dict[str, Any] = {}
    timed: dict[tuple[str, int], dict[int, float]] = {}
    for index, (rows, count) in enumerate(zip(size.batches, size.prompts, strict=True)):
        share = context.left_s() / (len(size.batches) - index)
        cell = Cell(context, runner, contenders, rows, prompts[:count], size, timed)
        cells[str(rows)] = cell.measured(until=context.left_s() - share)
        context.keep({"batches": cells})
        context.say(
            f"batch {rows}: "
            + ", ".join(_words(name, one) for name, one in cells[str(rows)]["runs"].items())
        )
    return {"batches": cells}


def table(result: dict[str, Any]) -> list[list[str]]:
    """A row for every batch size and configuration that drafts."""
    rows = []
    for batch, cell in result.get("batches", {}).items():
        for name, one in cell["runs"].items():
            if name == "none" or one.get("measured") is None:
                continue
            share = one["measured"] / one["predicted"] if one["predicted"] else None
            got = (
                f"{one['measured']:.2f}x of {one['predicted']:.2f}x"
                if share
                else f"{one['measured']:.2f}x"
            )
            verdict = (
                ""
                if share is None or not result.get("judged")
                else "ok"
                if share >= FLOOR
                else "below"
            )
            same = f", {one['identical']} of {one['compared']} texts"
            rows.append(
                [f"gain, batch {batch}: {name}", got + same, f"{FLOOR:g} of predicted", verdict]
            )
    return rows


# ---------------------------------------------------------------- models


@functools.cache
def _folder() -> Path:
    """Temporary folder of the widened target, removed when the process ends; in memory where 16 GB
    have room."""
    roomy = [folder for folder in ("/dev/shm", None) if folder is None or _free(folder) > 24 << 30]
    folder = Path(tempfile.mkdtemp(prefix="outrider-gpu-", dir=roomy[0]))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _free(folder: str) -> int:
    return shutil.disk_usage(folder).free if Path(folder).is_dir() else 0


def widened_target(context: Context) -> Path:
    """The folder of the widened demo target, made at its first use; its random weights are drawn on
    the device."""
    folder = _folder() / ("tiny" if context.tiny else "like-8b")
    if not (folder / WIDENING).exists():
        mlp, layers = LIKE_TINY if context.tiny else LIKE_8B
        context.say(f"widening the demo target: MLPs of {mlp}, {layers} silent layers more")
        facts = widen(demo_paths().target, folder, mlp, layers, context.device)
        (folder / WIDENING).write_text(json.dumps(facts), encoding="utf-8")
        context.release()
    return folder


def widen(
    source: Path, folder: Path, mlp: int, layers: int, device: torch.device
) -> dict[str, Any]:
    """Do what `inflate.inflate` does, with random weights drawn on the device: for 8B that saves
    minutes."""
    config = AutoConfig.from_pretrained(source)
    state = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device).state_dict()
    )
    with device:
        generator = torch.Generator(device).manual_seed(0)
        state = {
            name: inflate._widen(name, weight, mlp, generator) for name, weight in state.items()
        }
    state |= inflate._extra_layers(state, config.num_hidden_layers, layers)
    config.intermediate_size = mlp
    config.num_hidden_layers += layers
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *config.layer_types[-1:] * layers]
    with torch.device("meta"):
        wide = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    wide.load_state_dict(state, assign=True)
    wide.tie_weights()
    wide.save_pretrained(folder)
    for file in TOKENIZER_FILES:
        shutil.copyfile(source / file, folder / file)
    parameters = sum(weight.numel() for weight in wide.parameters())
    return {
        "parameters": parameters,
        "intermediate_size": mlp,
        "num_hidden_layers": config.num_hidden_layers,
    }


def wanted(target: Path, size: Size) -> tuple[dict[str, Configuration], list[str]]:
    """Configurations by name, and what was done to let heads fit."""
    found = {"none": Configuration()}
    found |= {f"draft-model k={k}": Configuration("draft-model", k) for k in size.lengths}
    found["draft-model auto"] = Configuration("draft-model", f"auto:{max(size.lengths)}")
    found |= {name: Configuration(name, max(size.lengths)) for name in ("ngram", "suffix")}
    heads = {name: folder for name, folder in demo_heads().items() if name in ("eagle3", "block")}
    for name, folder in heads.items():
        found[name] = Configuration(name, None, {"head": str(refitted(folder, target))})
    return found, [
        "heads read layers of the demo target, which the silent layers follow: only their number was corrected"
    ]


def refitted(head: Path, target: Path) -> Path:
    """A copy of an embedded head that expects the widened target's number of layers."""
    folder = target.parent / f"{target.name}-{head.name}"
    shutil.copytree(head, folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "num_target_layers" in values:
        layers = json.loads((target / "config.json").read_text(encoding="utf-8"))[
            "num_hidden_layers"
        ]
        values["num_target_layers"] = layers
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def opened(
    context: Context, target: Path, configurations: dict[str, Configuration], rows: int
) -> tuple[Runner, str, list[str]]:
    """The models with CUDA graphs and heads; without what cannot be had, and why. Raises the last
    reason where nothing goes."""
    notes: list[str] = []
    while True:
        for runtime in ("graphs", "eager") if context.on_cuda else ("eager",):
            options = Options(
                str(target),
                draft=str(demo_paths().draft),
                dtype="bfloat16",
                device=str(context.device),
                runtime=runtime,
                max_num_seqs=rows,
            )
            try:
                return Runner(options, list(configurations.values()), context.say), runtime, notes
            except OutriderError as error:
                reason = error
                notes.append(f"runtime {runtime}, {len(configurations)} configurations: {error}")
        heads = [name for name in ("eagle3", "block") if name in configurations]
        if not heads:
            raise reason
        for name in heads:
            del configurations[name]


def everyone(
    runner: Runner, configurations: dict[str, Configuration], context: Context
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Configurations that can be built, and why others cannot."""
    found: dict[str, Contender] = {}
    failures: dict[str, str] = {}
    for name, configuration in configurations.items():
        try:
            found[name] = fresh(runner, configuration, calibrated=not context.tiny)
        except OutriderError as error:
            if configuration.is_plain:
                raise
            failures[name] = str(error)
            context.say(f"{name}: {error}")
    return found, failures


def fresh(runner: Runner, configuration: Configuration, *, calibrated: bool) -> Contender:
    """A decoder that has seen no text; one that chooses its own lengths knows what steps cost, as
    in `LLM`."""
    parts = configuration.parts()
    built = assemble(runner.models, parts)
    if calibrated:
        calibrate_alone(built, built.decoder, parts)
    return Contender(configuration, built)


def prompt_tokens(tokenizer: Any, count: int) -> list[list[int]]:
    """The first held-out problems of the demo."""
    return [
        tokenizer(one.prompt)["input_ids"] for one in load_workload("demo", limit=count).requests
    ]


# ---------------------------------------------------------------- measuring


class Cell:
    """All configurations, measured on one batch size."""

    def __init__(
        self,
        context: Context,
        runner: Runner,
        contenders: dict[str, Contender],
        rows: int,
        prompts: list[list[int]],
        size: Size,
        timed: dict[tuple[str, int], dict[int, float]],
    ) -> None:
        self._context = context
        self._runner = runner
        self._contenders = contenders
        self._rows = rows
        self._size = size
        self._timed = timed  # step costs by name and rows: those of one row serve all batch sizes
        self._groups = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
        self._params = SamplingParams(temperature=0.0, max_tokens=size.max_tokens, ignore_eos=True)

    def measured(self, until: float) -> dict[str, Any]:
        """An unmeasured round, costs, then rounds while more than `until` seconds are left to the
        stage, at least one."""
        began = self._context.left_s()
        for number in range(self._size.unmeasured):
            self._round(number)
        costs = {name: self._costs(name) for name in self._contenders}
        runs: dict[str, list[list[Trace]]] = {name: [] for name in self._contenders}
        rounds = 0
        longest = 0.0
        while rounds == 0 or (
            rounds < self._size.rounds and self._context.left_s() - longest > until
        ):
            before = self._context.left_s()
            for name, groups in self._round(rounds + 1).items():
                runs[name] += groups
            rounds = rounds + 1
            longest = max(longest, before - self._context.left_s())
        plain = runs["none"]
        plain_token_s = costs["none"].seconds(0, self._rows) / self._rows
        found = {
            name: summary(mine, plain, costs[name], plain_token_s) for name, mine in runs.items()
        }
        return {"rounds": rounds, "seconds": began - self._context.left_s(), "runs": found}

    def _round(self, number: int) -> dict[str, list[list[Trace]]]:
        """Decode each group with every configuration, in an order that rotates. Drafters that learn
        from texts begin anew."""
        now = {name: self._anew(name) for name in self._contenders}
        found: dict[str, list[list[Trace]]] = {name: [] for name in now}
        names = list(now)
        for index, group in enumerate(self._groups):
            turn = (index + number) % len(names)
            for name in [*names[turn:], *names[:turn]]:
                self._context.check_time()
                found[name].append(now[name].run(group, self._params, self._rows))
        return found

    def _anew(self, name: str) -> Contender:
        """The configuration's decoder; a new one where its drafter learns from texts."""
        own = self._contenders[name]
        if not own.built.decoder.drafter.learns:
            return own
        return fresh(self._runner, own.configuration, calibrated=not self._context.tiny)

    def _costs(self, name: str) -> Costs:
        """Step costs of the full batch and, for the ends of answers, of one row."""
        for rows in sorted({1, self._rows}):
            if (name, rows) not in self._timed:
                self._context.check_time()
                self._timed[name, rows] = step_costs(
                    self._anew(name), self._groups[0][:rows], self._size
                )
        return Costs({rows: self._timed[name, rows] for rows in sorted({1, self._rows})})


@dataclass(frozen=True)
class Costs:
    """Median seconds of a step, by rows and by nodes of the widest draft."""

    by_rows: dict[int, dict[int, float]]

    def seconds(self, width: int, rows: int) -> float:
        """Straight lines between what was timed."""
        known = {
            count: float(np.interp(width, list(one), list(one.values())))
            for count, one in self.by_rows.items()
        }
        return float(np.interp(rows, list(known), list(known.values())))


def step_costs(contender: Contender, prompts: Sequence[list[int]], size: Size) -> dict[int, float]:
    """Nodes of the widest draft -> median seconds from step to step, on texts as long as the
    measured ones.

    The first step of another length pays for the change and does not count; nor do steps in which a
    row is missing.
    """
    lengths = lengths_of(contender)
    params = SamplingParams(temperature=0.0, max_tokens=size.max_tokens, ignore_eos=True)
    found: dict[int, list[float]] = {}
    for number in range(size.unmeasured + size.sweeps):
        first = number % len(lengths)
        order = [length for length in [*lengths[first:], *lengths[:first]] for _ in range(HELD)]
        with contender.sweeping(order) as sweep:
            traces = contender.run(prompts, params, len(prompts))
        clock, widest = together(traces)
        for index, (before, at) in enumerate(pairwise(clock), start=1):
            counts = (
                index >= SKIPPED
                and sweep.asked[index] == sweep.asked[index - 1]
                and widest[at][1] == len(prompts)
            )
            if counts and number >= size.unmeasured:
                found.setdefault(widest[at][0], []).append(at - before)
    return {width: median(seconds) for width, seconds in sorted(found.items())}


def lengths_of(contender: Contender) -> list[int]:
    """Draft lengths to time: none, the longest, and some between that `auto` or a look-up may use."""
    if contender.configuration.is_plain:
        return [0]
    asked = str(contender.built.options.num_draft_tokens)
    longest = int(asked.rpartition(":")[2])
    shorter = (longest // 4, longest // 2) if asked.startswith("auto") else (longest // 2,)
    return sorted({0, *(max(1, length) for length in shorter), longest})


def together(traces: Sequence[Trace]) -> tuple[list[float], dict[float, tuple[int, int]]]:
    """Ends of steps in order, and of each (nodes of its widest draft, rows). Rows of one step have
    the same end."""
    widest: dict[float, tuple[int, int]] = {}
    for trace in traces:
        for step in trace.steps:
            widest[step.at_s] = max(widest.get(step.at_s, (0, 0))[0], len(step.tokens)), step.rows
    return sorted(widest), widest


def summary(
    own: list[list[Trace]], plain: list[list[Trace]], costs: Costs, plain_token_s: float
) -> dict[str, Any]:
    """Measured and predicted numbers of one configuration on one batch size."""
    rate = tokens_per_s(own)
    plain_rate = tokens_per_s(plain)
    pairs = [
        (a, b)
        for mine, theirs in zip(own, plain, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    stats = functools.reduce(lambda a, b: a.merge(b), (one.stats for group in own for one in group))
    return {
        "tokens_per_s": rate,
        "measured": rate / plain_rate if rate and plain_rate else None,
        "predicted": predicted(own, costs, plain_token_s),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "compared": len(pairs),
        "identical": sum(a.completion.token_ids == b.completion.token_ids for a, b in pairs),
        "step_s": {
            str(rows): {str(width): s for width, s in one.items()}
            for rows, one in costs.by_rows.items()
        },
    }


def tokens_per_s(groups: list[list[Trace]]) -> float | None:
    """Decode tokens of all groups over their seconds, first steps left out; None where there was no
    second step."""
    clocks = [together(group)[0] for group in groups]
    seconds = sum(clock[-1] - clock[0] for clock in clocks)
    return (
        sum(trace.decode_tokens() for group in groups for trace in group) / seconds
        if seconds
        else None
    )


def predicted(groups: list[list[Trace]], costs: Costs, plain_token_s: float) -> float | None:
    """The speedup that costs and counts give; see the module docstring."""
    seconds = tokens = 0.0
    for group in groups:
        clock, widest = together(group)
        seconds += sum(costs.seconds(*widest[at]) for at in clock[1:])
        tokens += sum(trace.decode_tokens() for trace in group)
    return plain_token_s * tokens / seconds if seconds else None


def _words(name: str, one: dict[str, Any]) -> str:
    return f"{name} {one['measured']:.2f}x" if one["measured"] else name
