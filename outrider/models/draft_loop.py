"""A whole drafting loop, gamma tokens of a draft model, as one module: what is recorded as a CUDA
graph (`graphs.py`).

A tiny draft is all overhead: each token costs a trip through Python, a dispatch per operation, a
mask, a softmax, a draw. Unrolled and recorded, only the arithmetic is left. The program feeds what
the draft's cache lacks (one token, or two after a full acceptance), then picks each next token
inside, as `picking.py` does, and returns the distributions of the rows that draw. Penalties, biases
and grammars need the general path, token by token (`drafters/model/draft_model.py`), which is also
the reference: `tests/unit/models/test_draft_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kv.cache import BLOCK, KVCache
from outrider.models.layout import attention_mask
from outrider.models.lm import LM, Run
from outrider.models.pass_plan import PassPlan, ShortSlots
from outrider.models.picking import Draws, pick
from outrider.models.tokens.vocabulary import fit_width

Program = Callable[..., tuple[Tensor, ...]]
WIDTH = 2  # tokens of the first pass: up to two catch up


class DraftLoopProgram(nn.Module):
    """The loop that is recorded. It also runs as plain Python, for the equality test."""

    def __init__(self, lm: LM, module: nn.Module, num_tokens: int, vocab_size: int) -> None:
        super().__init__()
        self.module = module
        self._run: Run = lm.run
        self.num_tokens = num_tokens
        self.vocab_size = vocab_size
        self.window = lm.shape.sliding_window
        self.context_length = lm.shape.context_length
        self._windowed = next(
            (layer for layer, shape in enumerate(lm.shape.layers) if shape.window is not None), None
        )
        self.last_id = lm.shape.vocab_size - 1  # a target's padded vocabulary may be wider

    def forward(
        self,
        # (B, 5) int64: the two tokens the cache lacks, which of them is the last, committed
        # positions, bases
        state: Tensor,
        key_positions: Tensor,  # (S,) int64, only its length counts
        keys: list[Tensor],  # the layers' stores
        values: list[Tensor],
        draws: list[Tensor],  # `Draws`
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, n) int64; distributions (R, n + 1, V) fp32, the last ones 0; the `state` to go
        on from."""
        tokens = []
        probs = []
        ids = state[:, :WIDTH].clamp(max=self.last_id)
        (last, starts, bases) = state[:, WIDTH:].unbind(1)
        rows = torch.arange(state.shape[0], device=state.device)
        num_keys = key_positions.shape[0]
        slots = rows * max(store.shape[1] for store in keys)
        for node in range(self.num_tokens):
            offsets = torch.arange(WIDTH, device=starts.device)
            mask = partial(attention_mask, starts, WIDTH, num_keys, keys[0].dtype)
            indices = (slots + starts)[:, None] + offsets
            near = None if self.window is None else partial(mask, self.window)
            short = None
            if self._windowed is not None:
                room = keys[self._windowed].shape[1]
                near = partial(
                    attention_mask,
                    starts - bases,
                    WIDTH,
                    min(num_keys, room),
                    keys[0].dtype,
                    self.window,
                )
                short = ShortSlots(
                    ((rows * room + starts - bases)[:, None] + offsets).flatten(), bases
                )
            plan = PassPlan(
                keys, values, indices.flatten(), mask, near, chain_keys=num_keys, short=short
            )
            # past the end: cut off later
            positions = (starts[:, None] + offsets).clamp(max=self.context_length - 1)
            logits = self._run(ids, positions, plan, offsets)
            logits = logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]
            token, step_probs = pick(fit_width(logits, self.vocab_size), Draws(*draws), node)
            tokens.append(token)
            probs.append(step_probs)
            ids = token[:, None].expand(-1, WIDTH)
            starts = starts + last + 1
            last = torch.zeros_like(last)
        state = torch.stack([token, token, last, starts, bases], dim=1)
        return torch.stack(tokens, dim=1), F.pad(torch.stack(probs, dim=1), (0, 0, 0, 1)), state


class DraftLoop:
    """The recorded loop with the host's part: inputs from the cache, commits to it.

    `programs` by their length. A fixed draft length is one call; programs of several lengths make
    up any other, at 40 to 110 microseconds for each further call (what `--num-draft-tokens auto`
    uses).
    """

    def __init__(self, lm: LM, programs: Mapping[int, Program]) -> None:
        self.lm = lm
        self._programs = dict(sorted(programs.items(), reverse=True))
        self._keys = KeyRange(lm.kv)

    def of(self, lengths: Collection[int]) -> DraftLoop:
        """This loop with these programs alone."""
        return DraftLoop(self.lm, {length: self._programs[length] for length in lengths})

    def on(self, lm: LM) -> DraftLoop:
        """This loop on the cache of a model's twin."""
        return DraftLoop(lm, self._programs)

    def length(self, wanted: int) -> int:
        """Tokens that are drafted where `wanted` are."""
        return sum(self._calls(wanted))

    def __call__(
        self, pending: Sequence[list[int]], draws: Draws, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Draft after rows whose caches lack `pending` (1 or 2 tokens each); their caches then
        hold all but the last.

        Tokens (B, n) and distributions (R, n + 1, V), n = `num_tokens`, a `length`.
        """
        kv = self.lm.kv
        chunks = []
        self._keys.reserve(len(pending), max(kv.lengths) + num_tokens + 2 * WIDTH)
        kv.make_room(0, len(pending), num_tokens + 2 * WIDTH)
        state = self._state(pending)
        done = 0
        for size in self._calls(num_tokens):  # the host looks at nothing between two calls
            part_draws = draws if size == num_tokens else draws.of(slice(done, done + size))
            tokens, probs, state = self._programs[size](
                state, self._keys.positions, kv.keys, kv.values, list(part_draws)
            )
            chunks.append((tokens, probs))
            done += size
        for row, missing in enumerate(pending):
            kv.advance(row, len(missing) + num_tokens - 1)
        return joined(chunks)

    def _calls(self, wanted: int) -> list[int]:
        """Lengths of the programs that make up `wanted` tokens, or a few more where none is that
        short. The same one twice comes before two of different lengths: its second call finds its
        code in the caches."""
        calls: list[int] = []
        for size in self._programs:
            if wanted not in self._programs and wanted % 2 == 0 and wanted // 2 in self._programs:
                return [*calls, wanted // 2, wanted // 2]
            count, wanted = divmod(wanted, size)
            calls += [size] * count
        return [*calls, size] if wanted else calls

    def _state(self, pending: Sequence[list[int]]) -> Tensor:
        """The inputs of the first program."""
        lines = zip(pending, self.lm.kv.lengths, self.lm.kv.bases, strict=True)
        return torch.tensor(
            [[p[0], p[-1], len(p) - 1, start, base] for p, start, base in lines],
            device=self.lm.device,
        )


class KeyRange:
    """The positions of a cache that a program's passes look at, made anew only when texts outgrow
    them."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.positions = torch.arange(0, device=kv.device)  # (S,) int64, whole blocks

    def reserve(self, num_rows: int, end: int) -> None:
        """Room for `end` positions in each row."""
        self._kv.reserve(num_rows, end)
        num_keys = min(-(-end // BLOCK) * BLOCK, self._kv.capacity)
        if num_keys != len(self.positions):
            self.positions = torch.arange(num_keys, device=self._kv.device)


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Tokens (B, n) and distributions (R, n + 1, V), the last ones 0, of calls that follow one
    another."""
    if len(parts) == 1:
        return parts[0]
    drafted, probs = zip(*parts, strict=True)
    tokens = torch.cat(drafted, dim=1)
    last = probs[-1]
    if not len(last):  # greedy batches have none
        return tokens, last.new_empty(0, tokens.shape[1] + 1, last.shape[2])
    return tokens, torch.cat([*(step_probs[:, :-1] for step_probs in probs[:-1]), last], dim=1)
