"""A draft model with ANOTHER tokenizer than the target's: any small causal LM can draft for any
target.

The committed text is kept in the draft's tokens (`models/tokens/alignment.py`), the draft model
continues from there, and what it says comes back as target tokens in one of two ways (Timor et al.
2502.05202; the first is what transformers calls universal assisted generation):

* `reencode`: the draft continues greedily in its own tokens, and their text is encoded with the
  target's tokenizer: a
  deterministic chain. Works for any two tokenizers.
* `shared`: token by token, the draft's logits are moved to the target's ids of the tokens that both
  have, the others get
  no mass, and the row's sampling options apply as they do to the target: an honest distribution
  over the target's vocabulary, so sampled drafts are accepted as often as those distributions
  agree. Works as well as the vocabularies overlap.

The draft's cache follows its own tokens: what a new translation no longer shares with the cached
one is forgotten, the rest is fed. docs/algorithms/universal.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSetup
from outrider.drafters.choice import choose, chosen_chain
from outrider.drafters.model.reading import Turns
from outrider.drafters.programs import bans_bite, drafted, programs_serve
from outrider.drafters.requirements import Requirements
from outrider.errors import CapabilityError, ConfigError
from outrider.kv import KVCache
from outrider.models.lm import LM
from outrider.models.tokens.alignment import DraftContext, TokenizerPair
from outrider.rows import PerRow, Row, Rows
from outrider.runtime.drafting import Picks, Vocabulary, chains_behind
from outrider.runtime.run import NativeRun
from outrider.sampling.constraint import path_masks
from outrider.sampling.distribution import distribution
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

# Share of the draft's vocabulary that "auto" wants shared: what a text is mostly made of, the
# frequent tokens, is shared first
MIN_COVERAGE = 0.5
MAX_STRETCH = 4  # draft tokens drafted at most for each target token asked for
MAX_RAGGED = 8  # tokens a row may lag behind and still catch up inside the first drafting pass


@checked()
@dataclass(frozen=True)
class UniversalSettings:
    """Options of drafter 'universal'."""

    method: Literal["auto", "shared", "reencode"] = setting(
        "auto",
        "shared: tokens both vocabularies have; reencode: text; auto: shared from "
        f"{MIN_COVERAGE:.0%} overlap on",
    )


@dataclass
class _RowState:
    """One row of the draft model."""

    context: DraftContext
    can_draw: bool  # whether the row may say any token that both vocabularies have
    cached: list[int] = field(default_factory=list)  # the draft tokens after its cache


class UniversalDrafter(Drafter):
    """Chains from a draft model with any tokenizer."""

    needs = "a smaller model, its tokenizer does not matter (--draft)"
    requires = Requirements(draft=True, tokenizer=True)
    Settings = UniversalSettings

    def __init__(self, lm: LM, pair: TokenizerPair, vocab_size: int, method: str) -> None:
        """`vocab_size` is the target's. Raises CapabilityError when the method is `shared` and
        nothing is."""
        if method == "shared" and not pair.to_draft:
            raise CapabilityError("the two tokenizers have no token in common: use method=reencode")
        if method == "auto":
            method = "shared" if pair.coverage >= MIN_COVERAGE else "reencode"
        self.lm = lm
        self.pair = pair
        self.method = method
        draft_id = torch.tensor(
            [pair.to_draft.get(token, -1) for token in range(vocab_size)], device=lm.device
        )
        self._shared = Vocabulary(vocab_size, draft_id, float("-inf"), feeds_sources=True)
        # (V,) int64: the draft's id of each target token, where it has one
        self._draft_id = draft_id.clamp(min=0)
        self._is_foreign = draft_id < 0  # (V,) bool: where it has none
        named = torch.zeros(lm.shape.vocab_size, dtype=torch.bool, device=lm.device)
        named[[token for token in pair.draft.keys if token < len(named)]] = True
        # (V',) bool: rows of the draft's embedding that stand for no token
        self._is_unnamed = ~named
        ids = torch.arange(len(named), device=lm.device).where(named, -1)
        self._own = Vocabulary(len(named), ids, float("-inf"))
        self._rows = PerRow[_RowState]()
        self._turns = Turns()

    @classmethod
    def build(cls, setup: DraftSetup) -> UniversalDrafter:
        if setup.draft is None:
            raise ConfigError(
                "drafter 'universal' needs a model: --draft FOLDER_OR_HUB_ID (draft=... in Python)"
            )
        for model in (setup.target, setup.draft):
            if model.tokenizer is None:
                raise ConfigError(
                    f"drafter 'universal' translates between tokenizers, but '{model.label}' has "
                    "none"
                )
        size = setup.target.lm.shape.vocab_size
        pair = TokenizerPair(
            setup.target.tokenizer, setup.draft.tokenizer, size, setup.draft.lm.shape.vocab_size
        )
        return cls(setup.draft.lm, pair, size, setup.settings.method)

    @property
    def runs_modules(self) -> bool:
        return not isinstance(self.lm.run, NativeRun)

    @property
    def longest_text(self) -> int | None:
        return self.lm.shape.context_length

    def start(self, row: Row) -> None:
        self.lm.kv.add_row()
        allowed = row.params.allowed_token_ids
        can_draw = allowed is None or any(token in self.pair.to_draft for token in allowed)
        self._rows.append(_RowState(DraftContext(self.pair), can_draw))

    @property
    def caches(self) -> list[KVCache]:
        return [self.lm.kv]

    def pack(self, index: int) -> object:
        return self._rows[index], self.lm.kv.pack(index)

    def unpack(self, state: tuple[_RowState, object]) -> None:
        self._rows[-1], packed = state
        self.lm.kv.unpack(self.lm.kv.num_rows - 1, packed)

    def prepare(self, rows: Rows, gamma: list[int], budget: int) -> list[int]:
        self._align(rows)
        context_tokens = [state.context.tokens for state in self._rows]
        room = self.lm.shape.context_length
        wanted = [
            index
            for index, g in enumerate(gamma)
            if g and self._lags(index) and len(context_tokens[index]) < room
        ]
        if self._turns.read(self.lm, context_tokens, wanted, budget):
            self._note_cached()
        return [0 if self._lags(index) else g for index, g in enumerate(gamma)]

    def unread(self, rows: Rows) -> list[int]:
        self._align(rows)
        lengths = self.lm.kv.lengths
        return [
            max(0, len(state.context.tokens) - 1 - n)
            for state, n in zip(self._rows, lengths, strict=True)
        ]

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        self._align(rows)
        choose = self._num_shared if self.method == "shared" else self._num_own
        steps = [
            min(choose(state, row, count), self.lm.shape.context_length - len(state.context.tokens))
            if count and state.context.tokens
            else 0
            for state, row, count in zip(self._rows, rows, gamma, strict=True)
        ]
        steps = [max(0, count) for count in steps]
        if not any(steps):
            return Draft.empty(len(rows), rows.device)
        return (
            self._draft_shared(rows, steps)
            if self.method == "shared"
            else self._draft_text(rows, steps, gamma)
        )

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self._align(rows)

    def stop(self, index: int) -> None:
        self.lm.kv.swap_remove(index)
        super().stop(index)

    def _align(self, rows: Rows) -> None:
        """Translate what is new, and remove what no longer fits: rejected tokens, and words that
        now split differently."""
        for index, (row, state) in enumerate(zip(rows, self._rows, strict=True)):
            state.context.update(row.tokens)
            context_tokens = state.context.tokens
            # the last one is fed again: its logits
            num_cached = min(
                _num_common(context_tokens, state.cached), max(0, len(context_tokens) - 1)
            )
            del state.cached[num_cached:]
            self.lm.kv.truncate(index, num_cached)
            # a model with running states may have gone back further
            del state.cached[self.lm.kv.lengths[index] :]

    def _num_shared(self, state: _RowState, row: Row, count: int) -> int:
        """Draft passes for `count` nodes: one each; none after a character's first bytes, if the
        draft has no such tokens."""
        return count if state.can_draw and state.context.is_complete else 0

    def _num_own(self, state: _RowState, row: Row, count: int) -> int:
        """Draft passes for text of about `count` target tokens, by the row's own ratio of draft to
        target tokens."""
        context = state.context
        wanted = -(-count * (context.whole - context.prefix) // max(1, context.covered))
        if not context.is_complete:
            wanted += len(row.tokens) - context.covered
        return max(1, min(wanted, MAX_STRETCH * count))

    def _draft_shared(self, rows: Rows, steps: list[int]) -> Draft:
        """A node per pass, drawn from the draft's distribution over shared tokens; whole chains
        from one call where possible."""
        if isinstance(self.lm.run, NativeRun) and programs_serve(rows):
            pending = self._pending(steps)
            count = max(steps)
            chains = self._chains(self.lm.run, Picks.of(rows, count), pending, count, self._shared)
            draft = None if chains is None else drafted(rows, *chains, steps)
            if draft is not None and not bans_bite(rows, draft):
                self._hold(pending, [self._draft_id[line].tolist() for line in draft.tokens], steps)
                return draft
        lengths = torch.tensor(steps, device=rows.device)
        # (B, 1): whatever distribution they get, nothing is drafted from it
        idle = (lengths == 0)[:, None]
        plain = rows.sampling.is_plain_greedy
        tokens: list[Tensor] = []  # each (B,)
        node_probs: list[Tensor] = []  # each (B, V)
        start = rows.positions
        logits = self._feed(self._pending(steps))
        for node in range(max(steps)):
            if node:
                logits = self._feed([[token] for token in self._draft_id[tokens[-1]].tolist()])
            scores = (
                logits[:, self._draft_id]
                .masked_fill(self._is_foreign, float("-inf"))
                .masked_fill(idle, 0.0)
            )
            if plain:
                tokens.append(scores.argmax(dim=-1))
                continue
            so_far = Draft(torch.stack(tokens, 1), lengths.clamp(max=node)) if tokens else None
            if (stuck := self._stuck(rows, so_far, node)) is not None:
                lengths = torch.where(stuck, lengths.clamp(max=node), lengths)
                idle = idle | stuck[:, None]
                scores = scores.masked_fill(idle, 0.0)
            probs = distribution(
                scores[:, None], rows.sampling, rows.history, so_far, first_node=node, drafting=True
            )[:, 0]
            node_probs.append(probs)
            tokens.append(choose(probs, rows, start, node))
        return (
            Draft(torch.stack(tokens, dim=1), lengths)
            if plain
            else chosen_chain(tokens, node_probs, lengths, rows)
        )

    def _stuck(self, rows: Rows, so_far: Draft | None, node: int) -> Tensor | None:
        """(B,) bool: rows whose grammar asks for a token here that the draft does not have; None
        where there is no grammar."""
        constraints = rows.sampling.constraints
        if constraints is None:
            return None
        stuck = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for row, mask in path_masks(constraints, so_far, node, 1):
            stuck[row] = not (mask.to(rows.device) & ~self._is_foreign).any()
        return stuck

    def _draft_text(self, rows: Rows, steps: list[int], gamma: list[int]) -> Draft:
        """The draft's own greedy continuation, in the target's tokens."""
        guesses = self._guesses(len(rows), steps)
        trees = []
        for row, state, tokens, count, max_tokens in zip(
            rows, self._rows, guesses, steps, gamma, strict=True
        ):
            trees.append(TokenTree())
            if count:
                trees[-1].add_path(
                    self.pair.continuation(row.tokens, state.context, tokens[:count]), max_tokens
                )
        return to_draft(trees, rows.device)

    def _guesses(self, num_rows: int, steps: list[int]) -> list[list[int]]:
        """The draft model's next tokens, in its own vocabulary; of each row at least `steps`."""
        count = max(steps)
        pending = self._pending(steps)
        if isinstance(self.lm.run, NativeRun):
            found = self._chains(
                self.lm.run, Picks.likeliest(num_rows, count), pending, count, self._own
            )
            if found is not None:
                chains: list[list[int]] = found[0].tolist()
                self._hold(pending, chains, steps)
                return chains
        guesses: list[list[int]] = [[] for _ in range(num_rows)]
        logits = self._feed(pending)
        for step in range(count):
            if step:
                logits = self._feed([tokens[-1:] for tokens in guesses])
            best = logits.masked_fill(self._is_unnamed, float("-inf")).argmax(dim=-1)
            for tokens, token in zip(guesses, best.tolist(), strict=True):
                tokens.append(token)
        return guesses

    def _chains(
        self,
        run: NativeRun,
        picks: Picks,
        pending: list[list[int]],
        count: int,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor] | None:
        return chains_behind(
            self.lm, run, picks, [tokens or [0] for tokens in pending], count, vocabulary
        )

    def _hold(self, pending: list[list[int]], chains: list[list[int]], steps: list[int]) -> None:
        """Commit what a whole chain fed of each row: what it lacked, and its draft tokens but the
        last."""
        for index, (state, tokens, chain, count) in enumerate(
            zip(self._rows, pending, chains, steps, strict=True)
        ):
            fed = [*tokens, *chain[: max(0, count - 1)]]
            self.lm.kv.advance(index, len(fed))
            state.cached += fed

    def _pending(self, steps: list[int]) -> list[list[int]]:
        """The tokens that each row's cache still lacks, the last draft token included, once long
        texts are read. A long text that nothing is drafted for is not read: it lacks nothing."""
        kv = self.lm.kv
        context_tokens = [
            state.context.tokens
            if count or not self._lags(index)
            else state.context.tokens[: kv.lengths[index]]
            for index, (state, count) in enumerate(zip(self._rows, steps, strict=True))
        ]
        if any(
            len(tokens) - length > MAX_RAGGED
            for tokens, length in zip(context_tokens, kv.lengths, strict=True)
        ):
            self.lm.catch_up(context_tokens)
            self._note_cached()
        return [tokens[length:] for tokens, length in zip(context_tokens, kv.lengths, strict=True)]

    def _lags(self, index: int) -> bool:
        """Whether its cache lacks more than the first drafting pass can feed."""
        return len(self._rows[index].context.tokens) - self.lm.kv.lengths[index] > MAX_RAGGED

    def _note_cached(self) -> None:
        """The tokens of the texts that the caches were fed."""
        for state, length in zip(self._rows, self.lm.kv.lengths, strict=True):
            state.cached = state.context.tokens[:length]

    def _feed(self, tokens: list[list[int]]) -> Tensor:
        """Feed and commit some tokens of every row; logits (B, V') after each row's last one."""
        width = max(1, *map(len, tokens))
        padded = torch.tensor(
            [row + [0] * (width - len(row)) for row in tokens], device=self.lm.device
        )
        last = torch.tensor([max(0, len(row) - 1) for row in tokens], device=self.lm.device)
        logits = self.lm.forward(padded).logits
        for index, (state, row) in enumerate(zip(self._rows, tokens, strict=True)):
            self.lm.kv.advance(index, len(row))
            state.cached += row
        return logits[torch.arange(len(tokens), device=self.lm.device), last]


def _num_common(left: list[int], right: list[int]) -> int:
    """Length of the common beginning; whole blocks at a time, for it is long and nearly all of
    both."""
    at = 0
    block = 256
    while (
        at + block <= min(len(left), len(right)) and left[at : at + block] == right[at : at + block]
    ):
        at += block
    while at < min(len(left), len(right)) and left[at] == right[at]:
        at += 1
    return at
