"""What a step costs beside the model's arithmetic: the host's time, launches, a draft token in its
graph.

A small draft is where the host shows first: 135M parameters are read in a tenth of a millisecond,
the time of a few dozen kernels that are launched one by one. Beside an 8B pass the same host time
is small, so its share is asked there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from gpu_stages.context import Context
from gpu_stages.roof import verdict
from gpu_stages.shapes import LLAMA, SMOL, Shaped, filled, make
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.errors import OutriderError
from outrider.models.picking import no_draws
from outrider.parts import choose_parts
from outrider.rows import Row
from outrider.sampling.params import SamplingParams
from outrider.stats import PHASES
from outrider.stops import StopStrings

MINUTES = 1.0
LENGTHS = (1, 4)  # draft tokens per step: alone, and as a loop
PROMPT = 128
STEPS = 40
TINY_PROMPT = 16
TINY_STEPS = 4
DRAFT_FLOOR_S = 0.35e-3
OUTSIDE_FLOOR = 0.03
COUNTED = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
)
KINDS = {"greedy": SamplingParams(), "T = 1": SamplingParams(temperature=1.0)}


def run(context: Context) -> dict[str, Any]:
    """The draft's tokens at its own vocabulary, then steps of the large shape: plain, and with a
    draft model."""
    found: dict[str, Any] = {"judged": context.on_cuda and not context.tiny}
    found["draft_token"] = draft_token(context)
    context.say(
        f"  {SMOL}: a draft token takes {found['draft_token']['seconds'] * 1e3:.3f} ms in a loop "
        f"of {LENGTHS[-1]}"
    )
    context.keep(found)
    context.release()
    context.check_time(1.0 if context.tiny else 15.0)
    found["steps"] = {}
    target = make(context, LLAMA)
    found["target"] = target.facts()
    time_steps(context, target, None, found)
    draft = make(context, SMOL, LENGTHS, vocab_size=target.lm.shape.vocab_size)
    found["draft"] = draft.facts()
    time_steps(context, target, draft, found)
    return found


@torch.inference_mode()
def draft_token(context: Context) -> dict[str, Any]:
    """Seconds of a draft token: one pass alone, its arithmetic (the `Run` within), and a loop's
    share."""
    model = make(context, SMOL, LENGTHS)
    length, repeats = (TINY_PROMPT, 3) if context.tiny else (PROMPT, 30)
    num_tokens = LENGTHS[-1]
    rows = filled(model.lm, 1, length, 2 * num_tokens + 4)
    loop = model.loaded.draft_loop
    assert loop is not None
    loop = loop.on(rows)
    draws = no_draws(num_tokens, model.lm.shape.vocab_size, context.device)

    def drafted() -> None:
        loop([[1]], draws, num_tokens)
        rows.kv.truncate(0, length)

    whole = context.seconds(drafted, repeats)
    host = context.host_seconds(drafted, repeats)
    alone = context.seconds(
        partial(rows.forward, torch.ones(1, 1, dtype=torch.int64, device=context.device)), repeats
    )
    return {
        **model.facts(),
        "loop_length": num_tokens,
        "seconds": median(whole) / num_tokens,
        "low": min(whole) / num_tokens,
        "waited_seconds": median(host) / num_tokens,
        "pass_seconds": median(alone),
        "launches": launches(context, drafted),
    }


def time_steps(
    context: Context, target: Shaped, draft: Shaped | None, found: dict[str, Any]
) -> None:
    """Steps of one row, greedy and sampled, added to `found`."""
    for kind, params in KINDS.items():
        context.check_time()
        decoder = decoder_of(target, draft)
        name = f"{'plain' if draft is None else f'{LENGTHS[-1]} draft tokens'}, {kind}"
        found["steps"][name] = entry = steps_of(context, decoder, params)
        context.say(
            f"  {name}: step {entry['step_s'] * 1e3:.3f} ms, {entry['outside']:.1%} outside passes"
        )
        context.keep(found)


def decoder_of(target: Shaped, draft: Shaped | None) -> Decoder:
    """A decoder of these models with the default verifier; without `draft` it decodes plainly."""
    length = LENGTHS[-1] if draft is not None else None
    parts = choose_parts(
        "none" if draft is None else "draft-model", {}, "auto", {}, length, lossy=False
    )
    drafter = parts.make_drafter(target.loaded, None if draft is None else draft.loaded)
    return Decoder(target.lm, drafter, parts.make_verifier(), FixedLength(length or 0))


def steps_of(context: Context, decoder: Decoder, params: SamplingParams) -> dict[str, Any]:
    """Medians over steps behind a prompt: the step, its phases, what its passes and drafts do not
    account for."""
    prompt, count = (TINY_PROMPT, TINY_STEPS) if context.tiny else (PROMPT, STEPS)
    row = row_of(prompt, params)
    decoder.add(row)
    try:
        for _ in range(3):  # the prompt, and what is recorded at a shape's second use
            decoder.step()
        seconds: list[float] = []
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for _ in range(count):
            before = dict(row.stats.time_s)
            start = time.perf_counter()
            decoder.step()
            context.synchronize()
            seconds.append(time.perf_counter() - start)
            for phase in PHASES:
                phases[phase].append(row.stats.time_s[phase] - before[phase])
        counts = launches(context, decoder.step)
    finally:
        decoder.remove(0)
    parts = {phase: median(values) for phase, values in phases.items()}
    passes = [a + b for a, b in zip(phases["target"], phases["draft"], strict=True)]
    outside = [1 - inside / whole for inside, whole in zip(passes, seconds, strict=True)]
    return {
        "step_s": median(seconds),
        "phase_s": parts,
        "outside": median(outside),
        "launches": counts,
    }


def row_of(prompt: int, params: SamplingParams) -> Row:
    """A row of arbitrary tokens that never ends by itself."""
    tokens = [3 + number % 200 for number in range(prompt)]
    return Row(
        request=0,
        tokens=tokens,
        num_prompt=prompt,
        params=params,
        seed=0,
        max_tokens=prompt + 100_000,
        stop_tokens=frozenset(),
        detokenizer=None,
        stops=StopStrings([]),
        verifier=None,
    )


def launches(context: Context, call: Callable[[], Any], repeats: int = 5) -> dict[str, Any]:
    """What one call asks of the device, on average, by the names of CUDA's own calls; on a CPU,
    torch's operations."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.on_cuda else [])]
    if not supported_activities().issuperset(activities):
        return {"reason": "not counted: this torch cannot profile CUDA"}
    try:
        call()
        context.synchronize()
        with profile(activities=activities) as seen:
            for _ in range(repeats):
                call()
            context.synchronize()
    except (RuntimeError, OutriderError) as error:  # a driver may forbid profiling
        return {"reason": f"not counted: {str(error).splitlines()[0]}"}
    counts: Counter[str] = Counter()
    for event in seen.key_averages():
        if event.key in COUNTED or (not context.on_cuda and event.key.startswith("aten::")):
            counts[event.key if context.on_cuda else "operations"] += event.count
    return {name: round(count / repeats, 1) for name, count in counts.items()}


def table(result: dict[str, Any]) -> list[list[str]]:
    """The draft token, and the share outside passes of every kind of step."""
    judged = result.get("judged", False)
    rows = []
    if token := result.get("draft_token"):
        value = token["seconds"]
        floor = verdict(judged, value <= DRAFT_FLOOR_S, f"{DRAFT_FLOOR_S * 1e3:.2f} ms")
        rows.append([f"overhead: {SMOL}, draft token", f"{value * 1e3:.3f} ms", *floor])
    for name, entry in result.get("steps", {}).items():
        got = f"{entry['outside']:.1%} of {entry['step_s'] * 1e3:.2f} ms"
        rows.append(
            [
                f"overhead: outside passes, {name}",
                got,
                *verdict(judged, entry["outside"] <= OUTSIDE_FLOOR, "3%"),
            ]
        )
    return rows
