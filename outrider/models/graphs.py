"""CUDA graphs: what runs again with the same shapes is launched as one recording.

A pass of a few tokens is hundreds of kernels of some microseconds each; launched one by one from
Python the device waits for the host most of the time. A graph is recorded once for each combination
of shapes and caches, and then replayed: inputs are copied to where the recording read them, one
launch, results copied out before the next replay overwrites them.

A shape is recorded the second time it comes: prompts bring many lengths that never come again,
decoding brings few that always do. Whole chunks of a prompt are never recorded. The same arithmetic
without graphs is the reference (runtime `eager`): `graph_use.py` compares both before the first
token, and `tests/unit/models/test_graphs.py` does so on simulated devices.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.models.lm import PREFILL_CHUNK, Run
from outrider.models.pass_plan import PassPlan, ShortSlots

log = logging.getLogger("outrider.models")
# Of a pass, rows times tokens. Chunks of a prompt hide their launches, and each cache length comes
# twice a prompt: recording them would cost more than reading, and push out the recordings that
# decoding needs.
MAX_TOKENS = PREFILL_CHUNK - 1
# kept at once; each holds its inputs and results, all share the memory of what lies between
MAX_GRAPHS = 64
# runs before recording: libraries choose kernels and take memory, which a recording must not
WARM_UPS = 2


class Graphs:
    """Recordings of functions of tensors on one device, the least recently used dropped beyond
    `max_graphs`."""

    def __init__(self, max_graphs: int = MAX_GRAPHS) -> None:
        self._max_graphs = max_graphs
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()  # met once, not yet recorded
        self._pool: Any = None  # device memory of all recordings: they never run at the same time
        self._stream: Any = None  # on which all are recorded: another could not have its memory

    def __len__(self) -> int:
        return len(self._recordings)

    def run(
        self,
        key: Hashable,
        call: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        harmless: Callable[[], Sequence[Tensor]] | None = None,
    ) -> list[Tensor]:
        """`call(*inputs)`, a list of new tensors. What else the call depends on, shapes and memory
        included, must be in `key`.

        The call may write to tensors it reaches otherwise (a cache), with the same result if it
        runs twice; where running twice is not the same, `harmless` makes inputs with which it
        writes to none.
        """
        key = (key, tuple((tensor.shape, tensor.dtype) for tensor in inputs))
        recording = self._recordings.get(key)
        if recording is None and key in self._seen and self._max_graphs:
            recording = self._record(key, call, inputs if harmless is None else harmless())
        if recording is None:
            self._remember(key)
            return list(call(*inputs))
        self._recordings.move_to_end(key)
        return recording.replay(inputs)

    def _remember(self, key: Hashable) -> None:
        self._seen[key] = None
        if len(self._seen) > MAX_GRAPHS:
            self._seen.popitem(last=False)

    def _record(
        self, key: Hashable, call: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> _Recording | None:
        """None where the device has no memory for it: then all recordings go, and from now on half
        as many are kept."""
        del self._seen[key]
        try:
            recording = self._made(call, inputs)
        except torch.OutOfMemoryError:
            self._max_graphs = len(self._recordings) // 2
            self._recordings.clear()
            log.warning(
                "no memory for another CUDA graph: the pass runs without, and %d are kept from "
                "now on",
                self._max_graphs,
            )
            return None
        self._recordings[key] = recording
        if len(self._recordings) > self._max_graphs:
            self._recordings.popitem(last=False)
        return recording

    def _made(self, call: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Recording:
        """On the device of the inputs: the thread's own, where streams and recordings go by
        themselves, may be another."""
        device = inputs[0].device
        with _Recording.alone, torch.cuda.device(device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream(device)
            try:
                return _Recording(call, inputs, self._pool, self._stream)
            except BaseException:
                # torch refuses to record into the memory of a recording that broke
                self._pool = None
                raise


class _Recording:
    """One graph, with the tensors it reads and writes. Made on the current device."""

    # Held while one is made: recording begins by waiting for the device, which breaks whatever
    # another thread is recording.
    alone: ClassVar = threading.Lock()

    def __init__(
        self,
        call: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        pool: Any,
        stream: Any,
    ) -> None:
        with torch.inference_mode(False):  # written to by every replay, in inference mode or not
            self._inputs = [
                tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs
            ]
        self._graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            # around the recording's own: one that breaks never leaves that
            with torch.cuda.stream(stream):
                self._record(call, pool, stream)
        finally:
            current.wait_stream(stream)

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self._graph.replay()
        return [tensor.clone() for tensor in self._outputs]

    def _record(self, call: Callable[..., Sequence[Tensor]], pool: Any, stream: Any) -> None:
        """Warmed up on the same stream, whose work space libraries then have already."""
        for _ in range(WARM_UPS):
            call(*self._inputs)
        # "thread_local": other threads (another model's engine) may use the device meanwhile, but
        # not wait for all of it
        with torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):
            self._outputs = list(call(*self._inputs))


class GraphedPass:
    """A `Run` whose short passes are replayed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sees_chains = getattr(run, "sees_chains", _needs_mask)
        self.graphs = Graphs()

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        if ids.numel() > MAX_TOKENS:
            return self._run(ids, positions, plan, columns)
        return self._replayed(ids, positions, plan, columns, ())[0]

    def with_hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        columns: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the hidden states (B, T, H) of these layers."""
        if ids.numel() > MAX_TOKENS:
            return self._run.with_hidden(ids, positions, plan, columns, layers)
        logits, *hidden = self._replayed(ids, positions, plan, columns, layers)
        return logits, hidden

    def _replayed(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        columns: Tensor,
        layers: tuple[int, ...],
    ) -> list[Tensor]:
        by_indices = plan.chain_keys is not None and self._sees_chains(ids.numel())
        masks = (
            []
            if by_indices
            else [plan.mask]
            if plan.window_mask is None
            else [plan.mask, plan.window_mask]
        )

        short = [] if plan.short is None else [plan.short.indices, plan.short.bases]
        states = plan.states
        parents = [] if plan.parents is None else [plan.parents]
        moves = [] if states is None else [states.table(ids.device)]

        def call(*given: Tensor) -> list[Tensor]:
            known = given[: len(moves) + len(parents)]
            given = given[len(moves) + len(parents) :]
            ids, positions, indices, columns, *others = given
            slots = others[: len(short)]
            masks = others[len(short) :]
            full, *near = [partial(_given, mask) for mask in masks] or [partial(_given, None)]
            chain_keys = plan.chain_keys if by_indices else None
            static_plan = PassPlan(
                plan.keys,
                plan.values,
                indices,
                full,
                near[0] if near else None,
                chain_keys=chain_keys,
                short=ShortSlots(*slots) if slots else None,
                parents=known[1] if parents else None,
                states=None if states is None else replace(states, on_device=known[0]),
            )
            if not layers:
                return [self._run(ids, positions, static_plan, columns)]
            logits, hidden = self._run.with_hidden(ids, positions, static_plan, columns, layers)
            return [logits, *hidden]

        stores = [
            *plan.keys,
            *plan.values,
            *([] if states is None else [*states.states, *states.records]),
        ]
        key = (
            layers,
            memory_of(stores),
            plan.chain_keys if by_indices else None,
            bool(short),
            plan.parents is None,
        )
        others = [*parents, ids, positions, plan.indices, columns, *short, *masks]
        harmless = None if states is None else lambda: [*map(_written_nowhere, moves), *others]
        return self.graphs.run(key, call, [*moves, *others], harmless)


def _written_nowhere(moves: Tensor) -> Tensor:
    """Moves of a pass (`StatePass.table`) that leaves states and records as they are."""
    return torch.cat([moves[:, :-1], torch.zeros_like(moves[:, -1:])], dim=1)


def memory_of(stores: Sequence[Tensor]) -> tuple[object, ...]:
    """The addresses of a cache: a recording reads and writes there, whatever lies there by then."""
    return (
        *dict.fromkeys(store.shape for store in stores),
        *(store.data_ptr() for store in stores),
    )


def _given(mask: Tensor | None) -> Tensor:
    assert mask is not None, "a run that reads indices asked for a mask"
    return mask


def _needs_mask(num_tokens: int) -> bool:
    """Runs that do not say otherwise read the mask."""
    return False
