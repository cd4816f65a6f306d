"""Step costs by number of rows and draft length, measured before the first request and kept from
one start to the next.

So a load-aware control knows from its first step what many rows cost, and need not find out at a
user's expense. For other numbers of rows the control begins with the nearest one's (`Goodput`), and
real steps correct it. The sweep and the file are in `step_costs.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch

from outrider.admission import new_row
from outrider.build import Built, Options
from outrider.decode import Decoder
from outrider.draft_length import AutoLength
from outrider.engine.batch import Batch
from outrider.engine.drafter_pool import DrafterPool
from outrider.engine.step_costs import MIN_TIMES, StepTimes, Sweep
from outrider.machine import cores, cpu_name
from outrider.models.loaded import LoadedModel
from outrider.models.probes.probe import probe_tokens
from outrider.parts import Parts
from outrider.run import has_ended, run_rows
from outrider.runtime import building
from outrider.sampling.params import SamplingParams
from outrider.version import __version__

# of a config: what does not make a model slower
NO_SHAPE = ("_name_or_path", "transformers_version", "architectures")


def facts_of(
    options: Options, target: LoadedModel, draft: LoadedModel | None, parts: Parts
) -> dict[str, Any]:
    """All that decides what a step takes, as JSON gives it back. `options`: resolved."""
    device = torch.device(options.device)
    facts = {
        "outrider": __version__,
        "kernels": (building.fingerprint(), torch.__version__),
        "loop_lengths": parts.loop_lengths,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": cores()["usable"],
        "threads": options.threads,
        "dtype": options.dtype,
        "quantise": options.quantise,
        "runtime": options.runtime,
        "target": _shape_of(target),
        "draft": _shape_of(draft) if draft is not None and parts.requirements.draft else None,
        "drafter": parts.drafter_name,
        "drafter_options": asdict(parts.drafter_settings),
        "verifier": parts.verifier.name,
        "most": parts.length.max_nodes,
    }
    return json.loads(json.dumps(facts, default=str))


def _shape_of(model: LoadedModel) -> str:
    config = {name: value for name, value in model.card.values.items() if name not in NO_SHAPE}
    return hashlib.blake2b(
        json.dumps(config, sort_keys=True, default=str).encode(), digest_size=12
    ).hexdigest()


# of the first start with a model and a drafter, for which somebody waits; later ones time nothing
BUDGET_S = 2.0
# steps per number of rows; per size, in a crowd and of one row
WARM_UP = 2
REPEATS = 4
REPEATS_ALONE = 30
# of one row: where its text outgrows a recording, steps are recorded anew and say little
REPEATS_ON_CUDA = 12
# steps more of every size on CUDA: the first runs as it is, the second is recorded
# (`models/graphs.py`)
RECORDED = 2
MIN_SIZES = 3  # how many sizes are timed, whatever it takes
# sizes timed alone; a pass over 8, 16, ... is a node less
ONE_ROW = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 16, 23, 31, 32, 47, 63)
# a prompt that repeats itself: look-up drafters offer something, too
PATTERN = 24
TIMES = 4

Say = Callable[[str], None]


def calibrate(
    batch: Batch, drafter_pool: DrafterPool, max_rows: int, status: Say = lambda line: None
) -> None:
    """Tell the batch's controls what steps cost, where they want to know. Leaves the batch as new."""
    control = batch.control
    began = time.perf_counter()
    if not isinstance(control, AutoLength):
        return
    for name, parts in drafter_pool.parts.items():
        facts = facts_of(batch.built.options, batch.built.target, batch.built.draft, parts)
        costs = StepTimes.of(facts, keeps=parts.drafter.keeps_costs)
        missing = [] if costs.seconds else _counts(max_rows)
        for count in missing:
            left = BUDGET_S - (time.perf_counter() - began)
            if left < _least_s(costs.seconds.get(1, {}), count):
                continue
            status(f"timing steps, once per model and machine: {name}, {count} at once")
            drafter_pool.choose(batch.decoder.drafter, name)
            sizes = _sizes(control.drafters[name].max_nodes, count)
            budget_s = left / 2 if count == 1 < max_rows else left  # crowds need the other half
            costs.add(count, *_times(batch.decoder, batch.built, name, count, sizes, budget_s))
        for count, seconds in costs.seconds.items():
            control.drafters[name].learn_costs(count, seconds, costs.experts.get(count, {}))
    batch.reset()  # what drafters learned from these texts is no user's


def calibrate_alone(
    built: Built, decoder: Decoder, parts: Parts, status: Say = lambda line: None
) -> None:
    """Times the steps of a decoder without a server, for one row. `built`: what rows are made from;
    `decoder`: of `parts`, idle."""
    control = decoder.control
    if not isinstance(control, AutoLength):
        return
    (goodput,) = control.drafters.values()
    costs = step_times(built, decoder, parts, 1, status)
    goodput.learn_costs(1, costs.seconds.get(1, {}), costs.experts.get(1, {}))


def step_times(
    built: Built,
    decoder: Decoder,
    parts: Parts,
    rows: int,
    status: Say = lambda line: None,
    *,
    anew: bool = False,
) -> StepTimes:
    """Costs, with those of steps of this many rows.

    As an earlier start kept them, else timed now, and kept; `anew`: timed now in any case.
    """
    costs = StepTimes.of(
        facts_of(built.options, built.target, built.draft, parts), keeps=parts.drafter.keeps_costs
    )
    if anew or rows not in costs.seconds:
        status("timing steps of every draft length, once per model and machine")
        drafter = decoder.drafter
        if drafter.learns:  # what it learned from this text is no user's
            drafter = parts.make_drafter(
                built.target, built.draft if parts.requirements.draft else None
            )
        trial = Decoder(decoder.target, drafter, decoder.verifier, decoder.control)
        costs.add(
            rows, *_times(trial, built, None, rows, _sizes(parts.length.max_nodes, rows), BUDGET_S)
        )
    return costs


def _counts(max_rows: int) -> list[int]:
    """The ends first: what lies between can be guessed."""
    middle = [count for count in (8, 2, 16, 4, 32, 64, 128) if 1 < count < max_rows]
    return [1, max_rows, *middle] if max_rows > 1 else [1]


def _least_s(alone: dict[int, float], count: int) -> float:
    """About the seconds that the fewest steps of `count` rows take, prompts included, if rows cost
    what one costs alone."""
    if not alone:
        return 0.0
    steps = WARM_UP + MIN_SIZES * MIN_TIMES + PATTERN * TIMES / (max(alone) + 1)
    return count * max(alone.values()) * steps


def _sizes(max_nodes: int, count: int) -> list[int]:
    """Alone all that may be asked for, in a crowd a few; the most telling ones first."""
    sizes = [max_nodes, *(size for size in (0, 2, (max_nodes + 1) // 2, 1, 3) if size < max_nodes)]
    wanted = sizes if count > 1 else [*sizes, *(size for size in ONE_ROW if size < max_nodes)]
    return list(dict.fromkeys(wanted))


def _times(
    decoder: Decoder,
    built: Built,
    drafter: str | None,
    count: int,
    sizes: list[int],
    budget_s: float,
) -> tuple[dict[int, float], dict[int, float]]:
    """Median seconds of a step, and distinct experts of its pass where it tells, by the number of
    nodes in the widest row.

    The step has `count` rows that `drafter` drafts for; empty where the context is too short for
    any.
    """
    control = decoder.control
    began = time.perf_counter()
    pattern = probe_tokens(built.target.lm.shape.vocab_size, PATTERN, "cpu")[0].tolist()
    prompt = (pattern * TIMES)[: max(1, built.context // 2)]
    on_cuda = decoder.target.device.type == "cuda"
    warm_up = WARM_UP + (RECORDED * len(sizes) if on_cuda else 0)
    repeats = REPEATS if count > 1 else REPEATS_ON_CUDA if on_cuda else REPEATS_ALONE
    sweep = decoder.control = Sweep(sizes, warm_up)
    params = SamplingParams(max_tokens=built.context, ignore_eos=True)
    late = warm_up + MIN_SIZES * MIN_TIMES  # steps that may still follow when the time is over
    rows = [
        replace(new_row(built, number, prompt, params, with_text=False), drafter=drafter)
        for number in range(count)
    ]
    steps = run_rows(decoder, rows)
    try:
        for stepped in islice(steps, warm_up + repeats * len(sizes)):
            if any(has_ended(row) for row in stepped):  # a very short context
                break
            if time.perf_counter() - began > budget_s:
                sweep.lengths = sizes[:MIN_SIZES]
                if len(sweep.known()) >= MIN_SIZES or not late:
                    break
                late -= 1
    finally:
        steps.close()
        decoder.control = control
    return sweep.known(), sweep.known_experts()
