"""How many threads torch has in a step, and that nobody else notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.rows import Rows
from outrider.runtime import layers, library
from outrider.runtime.layers import layer_kernels
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers.block import BlockVerifier
from tests.helpers import make_row, tiny_llama

THREADS = 2
CPU = torch.device("cpu")


class Looking(NgramDrafter):
    """Notes how many threads torch has while it drafts."""

    def __init__(self, *, runs_modules: bool = False, trouble: BaseException | None = None) -> None:
        super().__init__()
        self.seen: list[int] = []
        self._runs_modules = runs_modules
        self._trouble = trouble

    @property
    def runs_modules(self) -> bool:
        return self._runs_modules

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        self.seen.append(torch.get_num_threads())
        if self._trouble is not None:
            raise self._trouble
        return super().propose(rows, gamma)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def eager() -> LM:
    return build_lm(tiny_llama(60), "tiny", torch.float32, CPU)


@pytest.fixture
def native(library_path: Path, eager: LM) -> LM:
    module = tiny_llama(60)
    return LM(NativeRun(eager, module, lower(module), library_path), eager.shape, eager.dtype, CPU)


def decoder(target: LM, drafter: Looking) -> Decoder:
    target.kv.lengths.clear()
    made = Decoder(target, drafter, BlockVerifier(), FixedLength(3))
    made.add(make_row([5, 6, 7], SamplingParams(max_tokens=20)))
    return made


def test_torch_has_one_thread_beside_native_passes_alone(native: LM, eager: LM) -> None:
    """Modules of torch keep all: eager targets, drafters that run some."""
    for target, runs_modules, expected in (
        (native, False, 1),
        (native, True, THREADS),
        (eager, False, THREADS),
    ):
        drafter = Looking(runs_modules=runs_modules)
        decoder(target, drafter).step()
        assert drafter.seen == [expected]
        assert torch.get_num_threads() == THREADS


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), ValueError("broken")], ids=repr)
def test_a_step_that_breaks_leaves_the_number_as_it_was(native: LM, trouble: BaseException) -> None:
    broken = decoder(native, Looking(trouble=trouble))
    with pytest.raises(type(trouble)):
        broken.step()
    assert torch.get_num_threads() == THREADS


def test_other_threads_keep_theirs(native: LM) -> None:
    """Catches a number set for the process: a thread that computes for the first time during a step
    would keep it for good."""
    found: list[int] = []

    class Neighbour(Looking):
        def propose(self, rows: Rows, gamma: list[int]) -> Draft:
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
            return super().propose(rows, gamma)

    drafter = Neighbour()
    decoder(native, drafter).step()
    assert (drafter.seen, found) == ([1], [THREADS])


def test_layers_of_modules_have_the_number_they_were_put_there_with(
    library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a number that is asked for while loading has torch on one thread, or at each call."""
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    asked: list[int] = []

    def counted(layer: Any, path: Path, num_threads: int) -> None:
        asked.append(num_threads)

    monkeypatch.setattr(layers, "Kernel", counted)
    kernels = layer_kernels(CPU, torch.bfloat16)
    assert kernels is not None
    torch.set_num_threads(1)
    kernels(layers.PanelLinear(torch.nn.Linear(64, 64).bfloat16()))
    torch.set_num_threads(THREADS)
    assert asked == [THREADS]
