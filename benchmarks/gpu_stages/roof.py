"""How near a pass comes to the memory's own speed, and what more tokens in one pass cost: the roof
that speculation lives under.

A pass of one token reads all weights and the keys and values of its row; no implementation is
faster than reading them. A pass of eight reads the same weights, so on an ideal device it costs the
same: that is what verification builds on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from gpu_stages.context import Context, OutOfTimeError
from gpu_stages.shapes import LLAMA, QWEN, SMOL, Shaped, cache_bytes, filled, make
from outrider.errors import OutriderError

MINUTES = 2.0
SHARES = {LLAMA: 0.45, SMOL: 0.2, QWEN: 0.35}  # of this stage's time, in order of value
TOKENS = (1, 8, 2, 4, 16, 32, 64)
CELLS = (  # (context, batch), the most telling ones first
    (128, 1), (2048, 1), (128, 8), (2048, 8), (16384, 1), (128, 32), (2048, 32), (16384, 8), (16384, 32),
)  # fmt: skip
TINY_TOKENS = (1, 8, 2)
TINY_CELLS = ((16, 1), (64, 2))
REPEATS = 12
BANDWIDTH_FLOOR = 0.85
RATIO_FLOOR = 1.05
KEEP_FREE = 1 << 30  # bytes of the device beside a cache


def run(context: Context) -> dict[str, Any]:
    """Copy bandwidth, then every shape in turn, alone on the device."""
    copy = copy_bandwidth(context)
    context.say(f"  copy: {copy / 1e9:.0f} GB/s")
    found: dict[str, Any] = {
        "judged": context.on_cuda and not context.tiny,
        "copy_bytes_per_s": copy,
        "models": {},
    }
    context.keep(found)
    rest = 1.0
    late = []
    for name, share in SHARES.items():
        deadline = time.monotonic() + max(0.0, context.left_s()) * share / rest
        rest -= share
        entry: dict[str, Any] = {"cells": []}
        found["models"][name] = entry
        try:
            time_model(
                context,
                name,
                copy,
                min(deadline, context.deadline_s),
                entry,
                partial(context.keep, found),
            )
        except OutOfTimeError as error:
            late.append(f"{name}: {error}")
            entry["reason"] = str(error)
        except (OutriderError, torch.OutOfMemoryError, RuntimeError) as error:
            entry["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            context.say(f"  {name}: {entry['reason']}")
        context.keep(found)
        context.release()
    if not any(entry["cells"] for entry in found["models"].values()):
        raise RuntimeError(
            "no shape could be timed: "
            + "; ".join(e.get("reason", "") for e in found["models"].values())
        )
    if late:
        raise OutOfTimeError("; ".join(late))
    return found


def copy_bandwidth(context: Context) -> float:
    """Bytes per second, read and written, of copying one large tensor to another; the best of
    several copies."""
    size = (1 << 22) if context.tiny else (1 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return 2 * size / min(context.seconds(lambda: target.copy_(source), 3 if context.tiny else 20))


def time_model(
    context: Context,
    name: str,
    copy: float,
    deadline_s: float,
    entry: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """All cells of one shape, as long as there is time."""
    if deadline_s - time.monotonic() < 0:
        raise OutOfTimeError("not begun")
    model = make(context, name)
    entry |= model.facts()
    context.say(
        f"  {name}: ready in {model.seconds:.1f} s" + "".join(f"; {note}" for note in model.notes)
    )
    keep()
    widths = TINY_TOKENS if context.tiny else TOKENS
    for length, batch in TINY_CELLS if context.tiny else CELLS:
        if time.monotonic() > deadline_s:
            raise OutOfTimeError(f"{len(entry['cells'])} passes were timed")
        entry["cells"] += cells(context, model, length, batch, widths, copy)
        keep()
        context.release()
        context.say(f"  {name}: {line_of(entry['cells'], length, batch)}")


@torch.inference_mode()
def cells(
    context: Context, model: Shaped, length: int, batch: int, widths: tuple[int, ...], copy: float
) -> list[dict[str, Any]]:
    """One per number of tokens behind rows of this length; a reason where the memory does not
    suffice."""
    where = {"context": length, "batch": batch}
    lm = model.lm
    room = max(widths)
    needed = cache_bytes(lm, batch, length, room)
    free = context.free_bytes()
    if length + room > lm.shape.context_length:
        return [{**where, "reason": f"longer than the model's {lm.shape.context_length} tokens"}]
    if free is not None and needed + KEEP_FREE > free:
        return [
            {
                **where,
                "reason": f"keys and values take {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free",
            }
        ]
    found: list[dict[str, Any]] = []
    try:
        rows = filled(lm, batch, length, room)
        for count in widths:
            tokens = torch.randint(0, lm.shape.vocab_size, (batch, count), device=context.device)
            seconds = context.seconds(partial(rows.forward, tokens), 2 if context.tiny else REPEATS)
            read = (
                model.bytes.read(batch * count) + batch * (length + count) * lm.kv.bytes_per_token
            )
            found.append(
                {
                    **where,
                    "tokens": count,
                    "seconds": round(median(seconds), 7),
                    "low": round(min(seconds), 7),
                    "high": round(max(seconds), 7),
                    "roof": round(read / median(seconds) / copy, 4),
                    "ratio": round(median(seconds) / found[0]["seconds"], 4) if found else 1.0,
                }
            )
    except torch.OutOfMemoryError as error:
        found.append({**where, "reason": f"out of memory: {str(error).splitlines()[0]}"})
    return found


def line_of(found: list[dict[str, Any]], length: int, batch: int) -> str:
    """One context and batch, for the person who watches."""
    mine = [cell for cell in found if (cell["context"], cell["batch"]) == (length, batch)]
    timed = [cell for cell in mine if "seconds" in cell]
    parts = [
        f"{cell['tokens']} in {cell['seconds'] * 1e3:.2f}"
        for cell in sorted(timed, key=lambda cell: cell["tokens"])
    ]
    parts += [cell["reason"] for cell in mine if "reason" in cell]
    return f"context {length}, batch {batch}: {', '.join(parts)}" + (" ms" if timed else "")


def table(result: dict[str, Any]) -> list[list[str]]:
    """Copy bandwidth, and for each shape one row alone behind its shortest context."""
    judged = result.get("judged", False)
    rows = [["roof: copy bandwidth", f"{result['copy_bytes_per_s'] / 1e9:.0f} GB/s", "", ""]]
    for name, entry in result.get("models", {}).items():
        timed = first_cells(entry["cells"])
        if 1 not in timed:
            rows.append([f"roof: {name}", entry.get("reason", "not timed"), "", ""])
            continue
        one = timed[1]
        is_judged = judged and name == LLAMA
        share = f"{one['seconds'] * 1e3:.3f} ms, {one['roof']:.0%} of the roof"
        rows.append(
            [
                f"roof: {name}, 1 token",
                share,
                *verdict(is_judged, one["roof"] >= BANDWIDTH_FLOOR, "85%"),
            ]
        )
        if 8 in timed:
            ratio = timed[8]["ratio"]
            good = timed[8]["ratio"] <= RATIO_FLOOR
            rows.append(
                [
                    f"roof: {name}, pass(8) / pass(1)",
                    f"{ratio:.3f}",
                    *verdict(judged and name != QWEN, good, "1.05"),
                ]
            )
    return rows


def first_cells(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Timed cells of the first context and batch, by tokens of the pass. Floors judge these."""
    mine = [
        cell
        for cell in found
        if (cell["context"], cell["batch"]) == (found[0]["context"], found[0]["batch"])
    ]
    return {cell["tokens"]: cell for cell in mine if "seconds" in cell}


def verdict(judged: bool, good: bool, floor: str) -> tuple[str, str]:
    """The last two columns of a row."""
    return (floor, "ok" if good else "below") if judged else ("", "")
