"""Passes of a model and its twins on several threads: they wait for one another inside the library,
and share nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from outrider.models.lm import LM
from outrider.models.probes.probe import probe_tokens
from outrider.runtime.rotary import BLOCK, Rotary
from outrider.runtime.run import Executor, PassInputs
from tests.unit.runtime.test_run import CPU, on_executor

WIDTHS = (3, 40, 1, 200, 7, 90)  # tokens of passes, one after the other


@torch.inference_mode()
def passes(lm: LM, number: int) -> list[Tensor]:
    """Logits of passes over a text of its own."""
    tokens = probe_tokens(lm.shape.vocab_size, 600, CPU)
    found = []
    lm.kv.add_row()
    for width in WIDTHS[number:] + WIDTHS[:number]:
        found.append(lm.forward(tokens[:, number : number + width]).logits)
        lm.kv.advance(0, width)
    lm.kv.swap_remove(0)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twins_on_several_threads_give_what_each_gives_alone(
    dtype: torch.dtype, library_path: Path
) -> None:
    expected = [passes(on_executor("llama", dtype, library_path)[0], number) for number in range(4)]
    lm, _ = on_executor("llama", dtype, library_path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(passes, [lm.twin() for _ in range(4)], range(4)))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_pass_keeps_its_memory_when_another_thread_needs_more(
    library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches memory that is given back while a pass that waits for its turn still has its address."""
    lm, _ = on_executor("llama", torch.float32, library_path)
    taken: list[ReferenceType[Tensor]] = []
    empty = torch.empty

    def watched(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = empty(*sizes, dtype=dtype)
        if dtype == torch.uint8:
            taken.append(ref(made))
        return made

    executor: Executor = lm.run.executor  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "empty", watched)
    calls = [executor.call(PassInputs(1, width, 1)) for width in (2, 50, 400)]
    assert len(taken) == len(calls)
    for call, memory in zip(calls, taken, strict=True):
        room = memory()
        assert room is not None, "given back"
        assert room.data_ptr() <= call.arena < room.data_ptr() + room.numel()
    del call, calls, room
    assert [memory() is None for memory in taken] == [True, True, False], "kept for ever"


def test_tables_of_positions_are_whole_whoever_asks() -> None:
    """Catches a thread that is given half of what another one is making."""
    seen = []

    def table(positions: Tensor) -> Tensor:
        if len(positions) > BLOCK:
            seen.append([len(one) for one in rotary.up_to(5)])  # another thread asks meanwhile
        return positions[:, None].float()

    rotary = Rotary([table, table])
    assert [len(one) for one in rotary.up_to(5)] == [BLOCK] * 2
    assert all(len(one) > 5000 for one in rotary.up_to(5000))
    assert seen == [[BLOCK] * 2] * 2
