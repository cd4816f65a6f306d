"""A causal language model on our own cache: what both the target and a draft model are.

`LM.forward` runs one pass of T tokens per row after each row's committed prefix and returns
logits; it commits nothing. The caller then commits what it keeps (`kv.keep`, `kv.advance`). Feeding
a row up to its last token is `catch_up`: it feeds `tokens[kv.text_length:]`, so a fresh prompt, a fully
accepted draft and a row that moved here from elsewhere are one case. The last token of a row is
never fed by `catch_up`: it is the pending token, first of the next pass. A prompt may be fed with gaps (`read_at`).

`run` is the model itself: transformers' module, or a faster run of the same passes
(`runtime/run.py`, `graphs.py`). Passes are padded and split as `granularity` and
`max_tokens_per_pass` ask, which `pass_limits.py` measures so that a row's bits do not depend on the
pass it is in. A pass gives the hidden states that its `capture` names, too (`signals.py`).
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv import KVCache, LayerShape
from outrider.kv.cache import CHUNK_ROOM
from outrider.kv.state_slots import StateShape, StateSlots
from outrider.models.pass_plan import PassPlan, following
from outrider.models.plan import plan_pass
from outrider.models.signals import Listening

# tokens; bounds activation memory, and keeps a prompt's arithmetic the same however it is batched
PREFILL_CHUNK = CHUNK_ROOM


# (row, position of the first token, hidden states (T, H) by layer): a chunk of text that was fed
Reader = Callable[[int, int, dict[int, Tensor]], None]


class WithoutPadding(Mapping[int, Tensor]):
    """Hidden states of a padded pass, without the padding.

    They are cut when they are read: those of a plain step seldom are, and after a pass each
    operation of torch takes 30 us.
    """

    def __init__(self, padded: dict[int, Tensor], num_tokens: int) -> None:
        self._padded = padded
        self._num_tokens = num_tokens

    def __getitem__(self, key: int) -> Tensor:
        return self._padded[key][:, : self._num_tokens]

    def __iter__(self) -> Iterator[int]:
        return iter(self._padded)

    def __len__(self) -> int:
        return len(self._padded)


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The result of one pass."""

    logits: Tensor  # (B, T, V), or (B, K, V) for the K columns that were asked for
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # (B, T, H) by each key of `capture`
    # distinct experts that it read, the mean of its layers; None: no mixture, or not known
    experts: float | None = None


class Run(Protocol):
    """The model's arithmetic: (ids (B,T), positions (B,T), plan, logit columns (K,)) -> logits (B,
    K, V)."""

    def __call__(
        self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor
    ) -> Tensor: ...

    def with_hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        columns: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the hidden states (B, T, H) of these layers (keys of `signals.py`)."""


@dataclass(frozen=True)
class PassLimits:
    """How passes must be shaped for row-invariant bits."""

    granularity: int = 2  # tokens of a pass are rounded up to a multiple of this
    max_tokens_per_pass: int = 1 << 30  # rows times tokens
    # a tree's path has the bits it has alone; else its sums run in another order (by rounding)
    exact_trees: bool = True
    # a token's bits do not depend on what the others are (an expert's do: it takes its tokens
    # together)
    exact_rows: bool = True


@dataclass(frozen=True)
class LMShape:
    """The facts about the model that the rest of the system needs."""

    vocab_size: int  # width of the logits
    context_length: int
    layers: tuple[LayerShape, ...]
    sliding_window: int | None
    num_parameters: int
    states: tuple[StateShape, ...] = ()  # running states of a row, on our cache

    @property
    def num_layers(self) -> int:
        """Layers of the model; after them `layers` has those that hold keys of indexers."""
        return sum(not layer.is_indexer for layer in self.layers)


class LM:
    """A causal language model on our cache. One instance owns one model and one cache."""

    # why it runs on transformers' own cache (`stateful/`), which takes chains and no trees
    why_own_cache: str | None = None

    def __init__(
        self,
        run: Run,
        shape: LMShape,
        dtype: torch.dtype,
        device: torch.device,
        kv: KVCache | None = None,
    ) -> None:
        self.run = run
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.kv = _cache(shape, dtype, device) if kv is None else kv
        self.limits = PassLimits()
        # layers without a window of their own, too, see `LMShape.sliding_window` positions
        self.every_layer_windowed = False
        # the native library, where the model runs on it (`runtime/library.py`)
        self.kernels: ctypes.CDLL | None = None
        self._columns: dict[int, Tensor] = {}

    def lay_out(self, layers: tuple[LayerShape, ...]) -> None:
        """Keep these layers from now on, in a new cache where they are others."""
        if layers != self.shape.layers:
            self.shape = replace(self.shape, layers=layers)
            self.kv = _cache(self.shape, self.dtype, self.device)

    def twin(self) -> LM:
        """This model with an empty cache of its own."""
        twin = LM(self.run, self.shape, self.dtype, self.device)
        twin.limits = self.limits
        twin.kernels = self.kernels
        twin.every_layer_windowed = self.every_layer_windowed
        return twin

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor | None = None,
        columns: Tensor | None = None,
        first_row: int = 0,
        capture: tuple[int, ...] = (),
    ) -> PassOutput:
        """One pass over rows first_row .. first_row + B: logits for every token, or for the K given
        `columns`.

        `tokens` (B, T) int64, the first one the pending token; `parents` (B, T-1) as in `Draft`,
        None for a chain; `capture` the keys of hidden states (`signals.py`). A pass with `columns`
        reads a text: all of its tokens are committed, or none.
        """
        num_rows, num_tokens = tokens.shape
        reads = columns is not None
        width = self._padded_width(num_rows, num_tokens)
        self.kv.reserve(
            self.kv.num_rows, max(self.kv.lengths[first_row : first_row + num_rows]) + width
        )
        per_pass = max(1, self.limits.max_tokens_per_pass // width)
        # where passes are padded for their bits, the output layer must be as wide, too
        if columns is None:
            columns = self._first_columns(num_tokens if self.limits.granularity == 2 else width)
        # a target's padded vocabulary may be wider than a draft's
        tokens = tokens.clamp(max=self.shape.vocab_size - 1)
        if width > num_tokens:
            tokens = F.pad(tokens, (0, width - num_tokens))
            parents = None if parents is None else F.pad(parents, (0, width - num_tokens), value=-1)
        parts: list[Tensor] = []
        hidden: list[list[Tensor]] = []
        experts: list[float | None] = []
        for start in range(0, num_rows, per_pass):
            some = tokens
            their_parents = parents
            if per_pass < num_rows:
                rows = slice(start, start + per_pass)
                some = tokens[rows]
                their_parents = None if parents is None else parents[rows]
            plan, positions = self._plan(some, their_parents, first_row + start, reads=reads)
            if capture:
                logits, states = self.run.with_hidden(some, positions, plan, columns, capture)
                hidden.append(states)
            else:
                logits = self.run(some, positions, plan, columns)
            parts.append(logits)
            experts.append(getattr(self.run, "experts_read", None))
        logits = _joined(parts)
        if logits.shape[1] > num_tokens:
            logits = logits[:, :num_tokens]
        layers = [_joined(list(states)) for states in zip(*hidden, strict=True)]
        by_key = dict(zip(capture, layers, strict=True))
        padded = width > num_tokens and bool(by_key)
        read = None if None in experts else sum(filter(None, experts))
        return PassOutput(logits, WithoutPadding(by_key, num_tokens) if padded else by_key, read)

    def catch_up(
        self,
        rows: Sequence[Sequence[int]],
        capture: tuple[int, ...] = (),
        read: Reader | None = None,
    ) -> None:
        """Feed and commit `tokens[kv.length : -1]` of every row, in chunks; afterwards only the
        last token is pending.

        `read` is given the hidden states of every chunk that `capture` names.
        """
        longest = max((len(tokens) for tokens in rows), default=0)
        self.kv.reserve(len(rows), longest + PREFILL_CHUNK)
        for row, tokens in enumerate(rows):
            while (done := self.kv.text_length(row)) < len(tokens) - 1:
                chunk = tokens[done : min(done + PREFILL_CHUNK, len(tokens) - 1)]
                ids = torch.tensor([chunk], device=self.device)
                column = torch.zeros(1, dtype=torch.int64, device=self.device)
                output = self.forward(ids, columns=column, first_row=row, capture=capture)
                self.kv.advance(row, len(chunk))
                if read is not None:
                    read(row, done, {layer: states[0] for layer, states in output.hidden.items()})

    def read_at(self, tokens: Tensor, positions: Tensor, row: int) -> None:
        """Feed and commit some tokens (T,) of a row's text, each at its own position (T,): the text
        before and between them is skipped, for good."""
        num_tokens = len(tokens)
        missing = self._padded_width(1, num_tokens) - num_tokens
        self.kv.reserve(self.kv.num_rows, self.kv.lengths[row] + num_tokens + missing)
        ids = F.pad(tokens.clamp(max=self.shape.vocab_size - 1), (0, missing))[None]
        plan, _ = self._plan(ids, None, row, reads=True)
        column = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.run(ids, F.pad(positions, (0, missing))[None], plan, column)
        self.kv.advance(row, num_tokens)
        self.kv.skipped[row] = int(positions[-1]) + 1 - self.kv.lengths[row]

    def _first_columns(self, count: int) -> Tensor:
        """0 .. count, made once: alongside a pass of a small model, and with the caches full of
        weights, every operation counts."""
        if count not in self._columns:
            self._columns[count] = torch.arange(count, device=self.device)
        return self._columns[count]

    def _padded_width(self, num_rows: int, num_tokens: int) -> int:
        """Tokens per row after padding. No pass has one token in all, not even the last of several:
        it takes other kernels."""
        unit = self.limits.granularity
        max_tokens = self.limits.max_tokens_per_pass
        if unit == 2:
            return 2 if num_tokens == 1 and num_rows % max_tokens == 1 else num_tokens
        return -(-num_tokens // unit) * unit

    def _plan(
        self, tokens: Tensor, parents: Tensor | None, first_row: int, *, reads: bool
    ) -> tuple[PassPlan, Tensor]:
        """Cache indices, masks and position ids of a pass over tokens (B, T), already padded.
        `reads`: no token is a draft's."""
        num_rows, width = tokens.shape
        plan, positions = plan_pass(
            self.kv,
            num_rows,
            width,
            parents,
            first_row,
            window=self.shape.sliding_window,
            every_layer=self.every_layer_windowed,
            last_position=self.shape.context_length - 1,
        )
        if isinstance(self.kv, StateSlots):
            states = self.kv.begin(
                first_row, num_rows, width, reads=reads, in_tree=parents is not None
            )
            plan = replace(plan, states=states, parents=parents)
        return plan, positions


def _cache(shape: LMShape, dtype: torch.dtype, device: torch.device) -> KVCache:
    if shape.states:
        return StateSlots(shape.layers, shape.states, dtype, device)
    return KVCache(shape.layers, dtype, device)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class ModuleRun:
    """The plain run: transformers' forward, whose attention follows our plan."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._keeps_columns = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._listening: dict[tuple[int, ...], Listening] = {}

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        with following(plan):
            if self._keeps_columns:
                return self.module(**inputs, logits_to_keep=columns).logits
            return self.module(**inputs).logits[:, columns]

    def with_hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        plan: PassPlan,
        columns: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the hidden states (B, T, H) of these layers (keys of `signals.py`)."""
        if layers not in self._listening:
            self._listening[layers] = Listening(self.module, layers)
        states: dict[int, Tensor] = {}
        with self._listening[layers].during(states):
            logits = self(ids, positions, plan, columns)
        return logits, [states[layer] for layer in layers]


def module_run(module: nn.Module) -> Run:
    """The module as a `Run`."""
    return ModuleRun(module)
