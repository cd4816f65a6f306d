"""bf16 weights in 12 bits a number, without loss, where this machine multiplies them faster so.

Sign and exponent of trained weights take few values: four bits name the sixteen that a panel has
most often, and the rest is escapes (`native/coded_panels.h`). What is multiplied are the same
numbers in the same order, so that no bit of a result differs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.cache import cache_folder, keep_json, keeping, kept_json
from outrider.huge_pages import room_for_weight, zeros_on_huge_pages
from outrider.machine import cpu_name
from outrider.models.linear.panel import WIDTH
from outrider.runtime.building import fingerprint
from outrider.runtime.library import workers
from outrider.runtime.structures import OpStruct, WeightFormat
from outrider.switches import switched

log = logging.getLogger("outrider.runtime")

SWITCH = "OUTRIDER_BF12"  # in the environment
AUTO, ALWAYS, NEVER = CHOICES = ("auto", "always", "never")

# as in native/coded_panels.h
EACH = 4  # inputs decoded at once
HEADER = 64  # bytes
FOUR = 192
MAX_PLACES = 1 << 24
# bytes of bf16 panels that coded ones may take: beyond, little is read less and many are escapes
MAX_SHARE = 0.77

# bytes of bf16 matrices of a model that is worth it: processors keep smaller ones in their caches
LARGE = 64 << 20
# what is timed: a matrix larger than most caches, passes of one token and of a draft
TIMED_SHAPE = (16384, 4096)
TIMED_ROWS = (1, 8)
ROUNDS = 7
MIN_GAIN = 1.05  # of each, above what times differ by themselves
MAX_FILES = 20  # of measurements, the oldest go first


class Coder(NamedTuple):
    """Puts weights into coded panels."""

    library: ctypes.CDLL
    workers: int

    def panels(
        self, parts: Callable[[int], Tensor], count: int, shape: tuple[int, int]
    ) -> Tensor | None:
        """`coded_panels`; None also where weights of this shape (outputs, inputs) cannot lie so."""
        if not can_code(shape):
            return None
        return coded_panels(self.library, self.workers, parts, count, shape)


def choice() -> str:
    """One of CHOICES. Raises ConfigError where the environment says another."""
    return switched(SWITCH, CHOICES)


def coder_for(path: Path, library: ctypes.CDLL, threads: int, num_bytes: int) -> Coder | None:
    """The coder of the bf16 matrices of a model that has so many bytes of them; None where they stay
    as they are. Raises ConfigError for a switch in the environment that is none."""
    coder = Coder(library, workers(library, threads))
    if (chosen := choice()) != AUTO:
        return coder if chosen == ALWAYS else None
    if num_bytes < LARGE:
        return None
    gain = kept_gain(path.name, threads)
    if gain is None:
        gain = _measured_gain(coder)
        with keeping("how fast coded weights are"):
            keep_json(_path(path.name, threads), {"gain": gain}, max_files=MAX_FILES)
    log.info("bf16 weights in 12 bits a number are multiplied %.2f times as fast here", gain)
    return coder if gain >= MIN_GAIN else None


def kept_gain(library: str, threads: int) -> float | None:
    """How many times as fast coded weights are on this machine, as an earlier load measured it by
    the library of this name; None: none did."""
    return kept_json(_path(library, threads), _read)


def _read(content: Any) -> float:
    gain = content["gain"]
    if not isinstance(gain, float) or not 0 < gain < 100:
        raise ValueError("a gain that is none")
    return gain


def _path(library: str, threads: int) -> Path:
    facts = repr((library, threads, cpu_name(), fingerprint()))
    name = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    return cache_folder() / "coding" / f"{name}.json"


def _measured_gain(coder: Coder) -> float:
    """Seconds of products with a matrix in bf16 over those with the same one coded, in turns, the
    fastest of each: the smaller gain of one row and of a draft's rows."""
    outputs, inputs = TIMED_SHAPE
    (plain,) = zeros_on_huge_pages([(outputs, inputs)], torch.bfloat16)
    some = torch.empty(1024, inputs).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    plain.view(-1, *some.shape).copy_(some)
    coded = coded_panels(*coder, lambda _: plain, 1, TIMED_SHAPE, room=_own_room)
    assert coded is not None, "normal weights have few escapes"
    gains = []
    formats = (WeightFormat.PANELS_BF16, plain), (WeightFormat.PANELS_CODED, coded)
    for rows in TIMED_ROWS:
        x = torch.zeros(rows, inputs, dtype=torch.bfloat16)
        out = torch.empty(rows, outputs, dtype=torch.bfloat16)
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            for number, (kind, weight) in enumerate(formats):
                op = OpStruct(format=int(kind), K=inputs, N=outputs, weight=weight.data_ptr())
                op.out.is_bf16 = 1
                start = time.perf_counter()
                coder.library.outrider_runtime_linear(
                    ctypes.addressof(op), x.data_ptr(), rows, out.data_ptr(), coder.workers
                )
                best[number] = min(best[number], time.perf_counter() - start)
        gains.append(best[0] / best[1])
    return min(gains)


def _own_room(size: int) -> Tensor:
    return zeros_on_huge_pages([(size,)], torch.uint8)[0]


def can_code(shape: tuple[int, int]) -> bool:
    """Whether a weight of this shape (outputs, inputs) can lie so."""
    outputs, inputs = shape
    return outputs > 0 and inputs > 0 and inputs % EACH == 0 and inputs * WIDTH <= MAX_PLACES


def are_whole(panels: Tensor, count: int, shape: tuple[int, int]) -> bool:
    """Whether these bytes can be read as `coded_panels` of so many weights of a shape.

    A reader trusts each header to say where the panel's escapes are, and them to be in order and
    inside the panel.
    """
    outputs, inputs = shape
    num_panels = count * -(-outputs // WIDTH)
    size = HEADER + inputs // EACH * FOUR
    end = num_panels * size
    if not can_code(shape) or panels.dim() != 1 or len(panels) < end or len(panels) % 4:
        return False
    headers = panels[:end].view(num_panels, size)[:, :HEADER].contiguous().view(torch.int64)
    offsets, counts = headers[:, 2], headers[:, 3]
    if int(counts.min()) < 0 or int(counts.max()) > inputs * WIDTH:
        return False
    ends = counts.cumsum(0)
    expected = (num_panels - torch.arange(num_panels)) * size + 4 * (ends - counts)
    if len(panels) != end + 4 * int(ends[-1]) or not torch.equal(offsets, expected):
        return False
    places = (panels[end:].view(torch.int32).to(torch.int64) & 0xFFFFFFFF) >> 8
    of_panel = torch.repeat_interleave(torch.arange(num_panels), counts)
    rises = (of_panel * MAX_PLACES + places).diff() > 0
    return bool((places < inputs * WIDTH).all() and rises.all())


def coded_panels(
    library: ctypes.CDLL,
    workers: int,
    parts: Callable[[int], Tensor],
    count: int,
    shape: tuple[int, int],
    room: Callable[[int], Tensor] = lambda size: room_for_weight([size]),
) -> Tensor | None:
    """The panels of so many weights of one shape (outputs, inputs), one after the other. None where
    too many of their numbers are escapes.

    `parts` gives each of them, contiguous, and is asked twice.
    """
    outputs, inputs = shape
    each = -(-outputs // WIDTH)
    headers = torch.zeros(count, each, HEADER, dtype=torch.uint8)
    for number in range(count):
        weight = parts(number)  # held until it is read
        library.outrider_code_tables(
            weight.data_ptr(), outputs, inputs, headers[number].data_ptr(), workers
        )
    size = HEADER + inputs // EACH * FOUR
    facts = headers.view(-1, HEADER).view(torch.int64)  # sixteen bytes, the place, the number
    escapes = facts[:, 3].cumsum(0)
    total = len(facts) * size + 4 * int(escapes[-1])
    if total > MAX_SHARE * len(facts) * 2 * WIDTH * inputs:
        return None
    facts[:, 2] = (len(facts) - torch.arange(len(facts))) * size + 4 * (escapes - facts[:, 3])
    panels = room(total)
    for number in range(count):
        weight = parts(number)
        library.outrider_code_panels(
            weight.data_ptr(),
            outputs,
            inputs,
            headers[number].data_ptr(),
            panels.data_ptr() + number * each * size,
            workers,
        )
    return panels
