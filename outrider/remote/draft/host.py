"""A draft model that drafts for the texts of many clients: each call's rows side by side in the
cache, and nothing read twice.

A proposal leaves the keys and values of its own tokens in the cache. They stay: if the next message
commits some of those tokens, their positions are kept, and only the rest is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.proposals import proposed
from outrider.kv import KVCache
from outrider.kv.cache import BLOCK
from outrider.kv.view import BorrowedCache
from outrider.models.lm import LM, PREFILL_CHUNK
from outrider.remote.draft.texts import HostedText, common
from outrider.remote.protocol import messages
from outrider.rows import PerRow, Row, Rows
from outrider.stops import StopStrings
from outrider.types import Draft, TargetOutput
from outrider.verifiers.base import prefix_verdict
from outrider.verifiers.coupled import CoupledVerifier


class KVWindow(BorrowedCache):
    """Some neighbouring rows of a cache, as a cache of their own: a drafting call has no idle rows
    in its passes.

    It owns no memory. Its lengths are its own until they are handed back. Rows neither join nor
    leave while it is open.
    """

    def __init__(self, parent: KVCache, first: int, count: int) -> None:
        super().__init__(parent)
        self.first = first
        self.count = count
        self.lengths = parent.lengths[first : first + count]

    @property
    def keys(self) -> list[Tensor]:  # type: ignore[override]
        return [store[self.first : self.first + self.count] for store in self.parent.keys]

    @property
    def values(self) -> list[Tensor]:  # type: ignore[override]
        return [store[self.first : self.first + self.count] for store in self.parent.values]

    @property
    def bases(self) -> list[int]:  # type: ignore[override]
        return self.parent.bases[self.first : self.first + self.count]

    @property
    def firsts(self) -> list[int]:  # type: ignore[override]
        return self.parent.firsts[self.first : self.first + self.count]

    def slide(
        self, first_row: int, committed: Sequence[int], lengths: Sequence[int], width: int
    ) -> None:
        """Forget in the parent."""
        self.parent.slide(self.first + first_row, committed, lengths, width)

    def _set_base(self, row: int, base: int, first: int) -> None:
        self.parent._set_base(self.first + row, base, first)


@contextmanager
def window(lm: LM, first: int, count: int) -> Iterator[KVWindow]:
    """The model works on rows first .. first + count alone; at the end the cache has their new
    lengths."""
    whole = lm.kv
    opened = KVWindow(whole, first, count)
    lm.kv = opened
    try:
        yield opened
    finally:
        lm.kv = whole
        whole.lengths[first : first + count] = opened.lengths


def swap(kv: KVCache, left: int, right: int) -> None:
    """Two rows of a cache change places."""
    packed = [kv.pack(row) for row in (left, right)]
    for row, content in ((left, packed[1]), (right, packed[0])):
        kv.truncate(row, 0)
        kv.unpack(row, content)


class ModelHost:
    """Holds the texts of a draft model and drafts for several at once."""

    def __init__(self, drafter: ModelDrafter, vocab_size: int) -> None:
        self.drafter = drafter
        self._vocab_size = vocab_size
        self._rows: dict[int, Row] = {}  # by uid
        self._slots = PerRow[int]()  # uids, in the cache's order
        # by uid: what was drafted after the text, in the cache but for its last token
        self._chains: dict[int, list[int]] = {}

    @property
    def lm(self) -> LM:
        """The draft model."""
        return self.drafter.lm

    @property
    def uids(self) -> list[int]:
        """The texts it holds, in the cache's order."""
        return self._slots

    def length(self, uid: int) -> int:
        """Tokens of its text."""
        return len(self._rows[uid].tokens)

    def tokens(self, uid: int) -> list[int]:
        """The tokens of the row's text."""
        return self._rows[uid].tokens

    def start(self, text: HostedText, tokens: list[int]) -> None:
        """A new row. Raises ConfigError where its sampling names unknown ids."""
        row = row_of(text, tokens)
        Rows(self._vocab_size, self.lm.device).add(row)
        self.drafter.start(row)
        self._rows[text.uid] = row
        self._slots.append(text.uid)

    def stop(self, uid: int) -> None:
        """A row leaves."""
        index = self._slots.index(uid)
        self.drafter.stop(index)
        self._slots.swap_remove(index)
        del self._rows[uid]
        self._chains.pop(uid, None)

    def change(self, uid: int, start: int, tail: list[int]) -> None:
        """The text is its first `start` tokens, then `tail`: what the cache holds of that stays,
        drafted or not."""
        row = self._rows[uid]
        index = self._slots.index(uid)
        kv = self.lm.kv
        held = (row.tokens + self._chains.pop(uid, []))[: kv.lengths[index]]
        same = shared_with(held, start, tail)
        row.tokens[start:] = tail
        kv.truncate(index, max(0, min(same, len(row.tokens) - 1)))

    def has_room(self, uids: Sequence[int], lengths: Sequence[int], budget: int) -> bool:
        """Whether this many bytes suffice for texts of these lengths. Gives memory back where it is
        needed for that."""
        if self.least_bytes(lengths) > budget:
            return False
        kv = self.lm.kv
        (longest, capacity) = _space(lengths)
        grown_slots, grown = kv.size_for(len(lengths), longest)
        # what it has, and what doubling would add, is more than needed
        if grown_slots * kv.slot_bytes(grown) > budget:
            fewest = 1
            while fewest < kv.num_rows:
                fewest *= 2
            kv.shrink(fewest, max(BLOCK, -(-max([1, *kv.lengths]) // BLOCK) * BLOCK))
            kv.reserve(len(lengths), 0)
            kv.reserve(kv.num_rows, min(longest, capacity))
        return True

    def least_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes that texts of these lengths take at least."""
        slots = 1
        while slots < len(lengths):
            slots *= 2
        return slots * self.lm.kv.slot_bytes(_space(lengths)[1])

    @torch.inference_mode()
    def propose(self, asks: Mapping[int, int]) -> dict[int, list[messages.Node]]:
        """Chains of at most asks[uid] nodes, for the rows whose texts are read to their ends; of
        the others a part is read."""
        with self._batch(list(asks)) as (uids, rows):
            gamma = self.drafter.prepare(rows, [asks[uid] for uid in uids], PREFILL_CHUNK)
            if not any(gamma):
                return {}
            draft = proposed(self.drafter, rows, gamma)
            drafts = drafted_nodes(draft, rows)
            if draft.num_nodes:
                self._commit(uids, rows, draft, drafts)
        return {uid: nodes for uid, nodes, count in zip(uids, drafts, gamma, strict=True) if count}

    def _commit(
        self, uids: list[int], rows: Rows, draft: Draft, drafts: list[list[messages.Node]]
    ) -> None:
        """The texts run ahead meanwhile, as if all that was drafted had been kept, so that the
        commit leaves it in the cache."""
        lengths = draft.lists[1]
        for uid, row, nodes in zip(uids, rows, drafts, strict=True):
            self._chains[uid] = [node.token for node in nodes]
            row.tokens.extend(self._chains[uid])
        try:
            all_kept = prefix_verdict(draft, lengths, [0] * len(rows))
            self.drafter.commit(rows, draft, all_kept, no_output(len(rows), rows.device))
        finally:
            for row, length in zip(rows, lengths, strict=True):
                del row.tokens[len(row.tokens) - length :]

    @contextmanager
    def _batch(self, uids: list[int]) -> Iterator[tuple[list[int], Rows]]:
        """A batch of these rows alone, which the model's cache is for meanwhile: their uids in its
        order, and the rows."""
        first = self._gather(uids)
        order = self._slots[first : first + len(uids)]
        rows = Rows(self._vocab_size, self.lm.device)
        for uid in order:
            rows.add(self._rows[uid])
        with window(self.lm, first, len(uids)):
            yield order, rows

    def _gather(self, uids: list[int]) -> int:
        """Put rows side by side, moving as few as possible; the first one's place."""
        members = set(uids)
        count = len(uids)
        inside = sum(uid in members for uid in self._slots[:count])
        best = inside
        first = 0
        for start in range(1, len(self._slots) - count + 1):
            inside += (self._slots[start + count - 1] in members) - (
                self._slots[start - 1] in members
            )
            if inside > best:
                best = inside
                first = start
        indices = range(first, first + count)
        strangers = [index for index in indices if self._slots[index] not in members]
        outside = [
            index
            for index, uid in enumerate(self._slots)
            if uid in members and index not in indices
        ]
        for left, right in zip(strangers, outside, strict=True):
            swap(self.lm.kv, left, right)
            self._slots[left], self._slots[right] = self._slots[right], self._slots[left]
        return first


def _space(lengths: Sequence[int]) -> tuple[int, int]:
    """(positions that the longest of these texts needs, with what is read ahead; a slot's capacity
    for it)."""
    longest = max(lengths, default=1) + PREFILL_CHUNK  # a chain is shorter
    return longest, -(-longest // BLOCK) * BLOCK


def drafted_nodes(draft: Draft, rows: Rows) -> list[list[messages.Node]]:
    """A drafter's chains, row by row. Greedy rows have no distributions, nor have tokens that were
    placed."""
    tokens, lengths = draft.lists
    drawn = draft.is_sampled().tolist() if draft.probs is not None else []
    chains = []
    for index, row in enumerate(rows):
        chain = [messages.Node(token=token) for token in tokens[index][: lengths[index]]]
        if draft.probs is not None and not row.params.is_greedy:
            sampled = [place for place in range(len(chain)) if drawn[index][place]]
            distributions = distributions_of(draft.probs[index, sampled])
            for place, distribution in zip(sampled, distributions, strict=True):
                chain[place].distribution.CopyFrom(distribution)
        chains.append(chain)
    return chains


def distributions_of(probs: Tensor) -> list[messages.Distribution]:
    """Distributions (M, V) as the tokens that have mass."""
    rows, tokens = probs.nonzero(as_tuple=True)
    masses = probs[rows, tokens].tolist()
    distributions = [messages.Distribution() for _ in range(len(probs))]
    for row, token, mass in zip(rows.tolist(), tokens.tolist(), masses, strict=True):
        distributions[row].tokens.append(token)
        distributions[row].probs.append(mass)
    return distributions


NO_END = 1 << 62


def row_of(text: HostedText, tokens: list[int]) -> Row:
    """The text as the row of a batch."""
    options = text.options
    return Row(
        request=text.uid,
        tokens=list(tokens),
        num_prompt=min(options.num_prompt, NO_END),
        params=options.params,
        seed=options.seed,
        max_tokens=NO_END,
        stop_tokens=frozenset(),
        detokenizer=None,
        stops=StopStrings([]),
        verifier=CoupledVerifier() if options.coupled else None,
    )


def no_output(num_rows: int, device: torch.device) -> TargetOutput:
    """There is no target here: a pass without logits."""
    return TargetOutput(torch.empty(num_rows, 1, 0, device=device), {}, [[0]] * num_rows)


def shared_with(held: list[int], start: int, tail: list[int]) -> int:
    """Length of the common beginning of `held` and a text that has its first `start` tokens, then
    `tail`."""
    return min(start, len(held)) + (common(held, start, tail) if start < len(held) else 0)
