"""An EAGLE head's whole draft, gamma tokens of a chain, as ONE compiled program.

A head of one layer is all overhead, more so than a small draft model: each token costs a trip through Python, a mask, a dispatch
per operation, for some hundred microseconds of arithmetic. The program takes what a row's last step left behind, the pairs of
token and target's hidden states that the head's cache lacks, and does the rest inside:

    pass 0           the waiting pairs (ragged, padded to the longest row): the hidden states fused (fc), keys and values written,
                     the state behind each row's last pair
    pass 1, 2, ...   one pair a row: the token just picked beside the state that picked it

It picks as `picking.py` does, in the head's own vocabulary. A program of one token cannot go on from its own state, so a second
one that begins with states drafts the tokens behind it (`goes_on`): this is what drafts any length.

The general path, token by token (`drafters/draft_model.py` on `EagleLM`), is the reference: `tests/unit/models/heads/
test_eagle_loop.py`. It also does what no program does: filters, penalties, grammars, stop rules, trees, the feeding of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from outrider.kv.cache import BLOCK
from outrider.models.attention import QUERY_BLOCK, PassPlan
from outrider.models.compile import ONE_THREAD, compile_program
from outrider.models.draft_loop import MAX_SMALL_PARAMETERS, KeyRange, each_token, example_stores, joined
from outrider.models.heads.eagle_lm import EagleLM, cached
from outrider.models.layout import attention_mask
from outrider.models.picking import Draws, example_draws, pick
from outrider.models.program import Program
from outrider.models.workshop import Workshop


class EagleLoopProgram(nn.Module):
    """What is compiled. Also runs eagerly, for the equality test. `goes_on`: it begins with states, not with hidden states."""

    def __init__(self, lm: EagleLM, num_tokens: int, *, goes_on: bool = False) -> None:
        super().__init__()
        self.head = lm.head  # registered, so that its parameters become constants of the program, as must those it shares:
        self.output = lm.head.output if lm.head.lm_head is None else None
        self.num_tokens, self.goes_on = num_tokens, goes_on
        self.native, self.width = lm.native, narrowest(lm)
        self.vocab_size, self.last_position = lm.shape.vocab_size, lm.shape.context_length - 1

    def forward(
        self,
        ids: Tensor,  # (B, T) int64: the tokens of the waiting pairs, padded
        features: Tensor,  # (B, T, F): what the target thought beside them, `EagleHead.join`; with `goes_on` states (B, T, H)
        bounds: Tensor,  # (B, 2) int64: places that a row's cache holds, index of the last pair in ids
        key_positions: Tensor,  # (S,) int64, only its length counts
        keys: list[Tensor],  # the layers' stores, once for each token: `each_token`
        values: list[Tensor],
        embedding: Tensor,  # (V, H): an input, for the target's own may be larger than the head
        draws: list[Tensor],  # `Draws`
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, n) int64; laws (R, n + 1, V) fp32, the last ones 0; the states (B, 1, H) the last tokens come from."""
        head, tokens, laws, num_layers = self.head, [], [], len(keys) // self.num_tokens
        starts, last = bounds[:, 0], bounds[:, 1]
        slots = torch.arange(ids.shape[0], device=ids.device) * keys[0].shape[1]
        features = head.carry(features) if self.goes_on else head.fuse(features)
        for node in range(self.num_tokens):
            width, layers = ids.shape[1], slice(node * num_layers, (node + 1) * num_layers)
            offsets = torch.arange(width, device=ids.device)
            mask = attention_mask(starts, width, key_positions.shape[0], keys[0].dtype)
            places = ((slots + starts)[:, None] + offsets).flatten()
            plan = PassPlan(keys[layers], values[layers], places, mask, None, self.native)
            positions = (starts[:, None] + offsets).clamp(max=self.last_position)  # past the end: cut off later
            states = head.states(F.embedding(ids, embedding), features, positions, cached(plan))
            state = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))
            token, law = pick(head.logits(state)[:, 0], Draws(*draws), node, head.draft_ids)
            tokens.append(token if head.draft_ids is None else head.draft_ids[token])
            laws.append(law)
            ids = tokens[-1][:, None].expand(-1, self.width)
            features = head.carry(state).expand(-1, self.width, -1)
            starts, last = starts + last + 1, torch.zeros_like(last)
        return torch.stack(tokens, dim=1), self._full(torch.stack(laws, dim=1)), state

    def _full(self, laws: Tensor) -> Tensor:
        """Laws over the draft vocabulary (R, n, Vd) as laws over the target's (R, n + 1, V)."""
        ids, laws = self.head.draft_ids, F.pad(laws, (0, 0, 0, 1))
        return laws if ids is None else laws.new_zeros(*laws.shape[:2], self.vocab_size).index_copy(2, ids, laws)


class EagleLoop:
    """The programs with the host's part. `first` drafts `num_tokens` tokens; `further`, one more from the states it left."""

    def __init__(self, lm: EagleLM, num_tokens: int, first: Program, further: Program | None = None) -> None:
        self.lm = lm
        self.num_tokens = num_tokens
        self._first, self._further = first, further
        self._narrowest, self._unit = narrowest(lm), 1 if lm.native else QUERY_BLOCK
        self._keys = KeyRange(lm.kv)

    def length(self, wanted: int) -> int:
        """Tokens that are drafted where `wanted` are."""
        return self.num_tokens if self._further is None else max(wanted, self.num_tokens)

    def __call__(self, pairs: Sequence[tuple[list[int], Tensor]], draws: Draws, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Tokens (B, n) and laws (R, n + 1, V), n = `num_tokens`, a `length`, behind rows whose caches lack these pairs: tokens,
        and the target's hidden states (k, F) beside them. Commits nothing: the pairs are in the caches' scratch."""
        lm, counts = self.lm, [len(tokens) for tokens, _ in pairs]
        width = -(-max(counts) // self._unit) * self._unit
        ends = [length + count for length, count in zip(lm.kv.lengths, counts, strict=True)]
        self._keys.reserve(lm.kv.num_rows, max(lm.kv.lengths) + width + num_tokens + self._narrowest)
        tokens, laws, states = self._run(
            self._first,
            torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in pairs], device=lm.device),
            _padded([features for _, features in pairs], width),
            [[length, count - 1] for length, count in zip(lm.kv.lengths, counts, strict=True)],
            draws, slice(0, self.num_tokens),
        )  # fmt: skip
        if num_tokens == self.num_tokens:
            return tokens, laws
        assert self._further is not None, f"a program of {self.num_tokens} tokens drafts no {num_tokens}"
        found = [(tokens, laws)]
        for node in range(self.num_tokens, num_tokens):
            bounds = [[end + node - 1, 0] for end in ends]
            ids, begun = tokens[:, -1:].expand(-1, self._narrowest), states.expand(-1, self._narrowest, -1)
            # programs read their inputs by the strides of the example
            tokens, laws, states = self._run(
                self._further, ids.contiguous(), begun.contiguous(), bounds, draws, slice(node, node + 1)
            )
            found.append((tokens, laws))
        return joined(found)

    def _run(
        self, program: Program, ids: Tensor, features: Tensor, bounds: list[list[int]], draws: Draws, nodes: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv = self.lm.kv
        keys, values = (each_token(stores, nodes.stop - nodes.start) for stores in (kv.keys, kv.values))
        return program(
            ids, features, torch.tensor(bounds, device=kv.device), self._keys.positions, keys, values,
            self.lm.head.embedding, list(draws.of(nodes)),
        )  # fmt: skip


def narrowest(lm: EagleLM) -> int:
    """Pairs a row in passes behind the first: oneDNN takes other kernels for a single one, so there it is padded. (The first pass
    is padded to whole blocks of the general attention kernel there: a remainder that is symbolic cannot be exported.)"""
    return 1 if lm.native else 2


def eagle_loop(lm: EagleLM, workshop: Workshop, num_tokens: int, *, any_length: bool, label: str) -> EagleLoop | None:
    """The loop for drafts of `num_tokens`, or of any length; None where its programs are not there and are not to be made.

    The head must be bound, and its linear layers plain or native: packed ones cannot be compiled in.
    """
    if not any_length:
        first = _program(lm, workshop, EagleLoopProgram(lm, num_tokens), label)
        return None if first is None else EagleLoop(lm, num_tokens, first)
    first = _program(lm, workshop, EagleLoopProgram(lm, 1), label)
    further = None if first is None else _program(lm, workshop, EagleLoopProgram(lm, 1, goes_on=True), label)
    return None if first is None or further is None else EagleLoop(lm, 1, first, further)


def _program(lm: EagleLM, workshop: Workshop, program: EagleLoopProgram, label: str) -> Program | None:
    purpose = f"{lm.head.config.kind}-draft{'-on' if program.goes_on else ''}{program.num_tokens}"
    facts = (lm.head.config, lm.shape, lm.dtype, lm.device, lm.native, lm.head.embedding.dtype)
    return workshop.program(purpose, facts, program.state_dict(), label, lambda path: compile_eagle_loop(lm, program, path))


def compile_eagle_loop(lm: EagleLM, program: EagleLoopProgram, path: Path) -> None:
    """Make the program and store it at `path`. Raises CapabilityError where that is impossible."""
    is_small = sum(parameter.numel() for parameter in program.parameters()) <= MAX_SMALL_PARAMETERS
    inputs, dynamic = example(lm, program)
    compile_program(program, inputs, dynamic, path, ONE_THREAD if is_small else {})


def example(lm: EagleLM, program: EagleLoopProgram) -> tuple[tuple, tuple]:
    """Example inputs for four rows, and which dimensions stay symbolic."""
    config, num_rows = lm.head.config, 4
    draws, dynamic_draws = example_draws(program.num_tokens, program.vocab_size, lm.device)
    width = program.width if program.goes_on else 5 if lm.native else 2 * QUERY_BLOCK
    keys, values = (example_stores(stores, num_rows + 1, program.num_tokens) for stores in (lm.kv.keys, lm.kv.values))
    row = torch.arange(num_rows, device=lm.device)
    inputs = (
        row[:, None].expand(-1, width).contiguous(),
        torch.zeros(
            num_rows, width, config.hidden_size if program.goes_on else config.feature_size, dtype=lm.dtype, device=lm.device
        ),
        torch.stack([row + 3, row % width], dim=1), torch.arange(2 * BLOCK, device=lm.device), keys, values,
        lm.head.embedding, draws,
    )  # fmt: skip
    rows = {0: Dim("rows", min=1, max=4096)}
    width_dim = Dim("pairs", min=1, max=4096) if lm.native else QUERY_BLOCK * Dim("blocks", min=1, max=512)
    pairs = rows if program.goes_on else {**rows, 1: width_dim}
    store = {0: Dim("slots", min=1, max=4096), 1: Dim("capacity", min=BLOCK, max=1 << 24)}
    dynamic = (
        pairs, pairs, rows, {0: Dim("keys", min=BLOCK, max=1 << 24)},
        [store] * len(keys), [store] * len(values), None, dynamic_draws,
    )  # fmt: skip
    return inputs, dynamic


def _padded(features: Sequence[Tensor], width: int) -> Tensor:
    """(k, F) of each row as one (B, width, F)."""
    if len(features) == 1 and len(features[0]) == width:
        return features[0][None]
    table = features[0].new_zeros(len(features), width, features[0].shape[1])
    for row, part in enumerate(features):
        table[row, : len(part)] = part
    return table
