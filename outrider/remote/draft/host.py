"""A drafter at work for the texts of many askers: what is the same for all drafters, and the
general way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.drafters.proposals import proposed
from outrider.models.lm import LM, PREFILL_CHUNK
from outrider.remote.draft.texts import HostedText, common
from outrider.remote.protocol import messages
from outrider.rows import PerRow, Row, Rows
from outrider.stops import StopStrings
from outrider.types import Draft, TargetOutput
from outrider.verifiers.base import prefix_verdict
from outrider.verifiers.coupled import CoupledVerifier


def drafted_nodes(draft: Draft, rows: Rows) -> list[list[messages.Node]]:
    """A drafter's proposal as chains, row by row: of a tree, the first child of each node. Greedy
    rows have no distributions, nor have tokens that were placed."""
    tokens, lengths = draft.lists
    drawn = draft.is_sampled().tolist() if draft.probs is not None else []
    chains = []
    for index, row in enumerate(rows):
        parents = draft.parent_lists[index]
        path: list[int] = []
        for node in range(lengths[index]):
            if parents[node] == (path[-1] if path else -1):
                path.append(node)
        nodes = {node: messages.Node(token=tokens[index][node]) for node in path}
        if draft.probs is not None and not row.params.is_greedy:
            sampled = [node for node in path if drawn[index][node]]
            outputs = [parents[node] + 1 for node in sampled]
            for node, sent in zip(
                sampled, distributions_of(draft.probs[index, outputs]), strict=True
            ):
                nodes[node].distribution.CopyFrom(sent)
        chains.append(list(nodes.values()))
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


LOOKUP_BYTES = 1024  # that a token of a text takes in the tables of a look-up drafter, about
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


@dataclass(frozen=True)
class _Proposal:
    """The latest one for a row, until its text continues."""

    length: int  # of the text that it hangs on
    nodes: list[tuple[int, int]]  # (parent, token)
    credit: Callable[[list[int], int], None]

    def judge(self, tail: list[int]) -> None:
        """The text went on with these tokens."""
        path = PerRow[int]()
        at = -1
        for token in tail:
            if (at, token) not in self.nodes:
                break
            at = self.nodes.index((at, token))
            path.append(at)
        self.credit(path, len(tail))


class GeneralHost:
    """All rows in the drafter's one batch; rows without a request get no nodes.

    Verdicts are made by the target's process. So the drafter's own verdict is always empty, and the
    outcome arrives as text, from which look-ups learn. Where it also learns from acceptance
    (`Drafter.credit`), the following text is its verdict.
    """

    def __init__(
        self, drafter: Drafter, vocab_size: int, device: torch.device, model: LM | None = None
    ) -> None:
        """`model`: the one that it drafts with, alongside look-ups or after another tokenizer."""
        self.drafter = drafter
        self._rows = Rows(vocab_size, device)
        self._uids = PerRow[int]()
        # of a token
        self._bytes = LOOKUP_BYTES + (0 if model is None else model.kv.bytes_per_token)
        self._pending: dict[int, _Proposal] = {}  # by uid

    @property
    def uids(self) -> list[int]:
        """The texts it holds, in the batch's order."""
        return self._uids

    def start(self, text: HostedText, tokens: list[int]) -> None:
        """A new row. Raises ConfigError where its sampling names unknown ids."""
        row = row_of(text, tokens)
        self.drafter.join(self._rows, row)
        self._uids.append(text.uid)

    def stop(self, uid: int) -> None:
        """A row leaves."""
        index = self._uids.index(uid)
        self._pending.pop(uid, None)
        self.drafter.stop(index)
        self._rows.swap_remove(index)
        self._uids.swap_remove(index)

    def length(self, uid: int) -> int:
        """Tokens of its text."""
        return len(self.tokens(uid))

    def tokens(self, uid: int) -> list[int]:
        """The tokens of the row's text."""
        return self._rows[self._uids.index(uid)].tokens

    def change(self, uid: int, start: int, tail: list[int]) -> None:
        """Replace all tokens from `start` on by `tail`. A row whose tokens were replaced starts
        again, because look-ups only grow.
        """
        index = self._uids.index(uid)
        row = self._rows[index]
        if tail or start != len(row.tokens):
            proposal = self._pending.pop(uid, None)
            if proposal is not None and proposal.length == start == len(row.tokens):
                proposal.judge(tail)
        if start == len(row.tokens) and (self._rows.history is None or start >= row.num_prompt):
            row.tokens.extend(tail)
            if self._rows.history is not None and tail:
                self._rows.history.append(index, tail)
            return
        # it comes back at once: nobody remembers what is replaced, which was never emitted
        row.num_learned = max(start, 1)
        self.drafter.stop(index)
        self._rows.swap_remove(index)
        self._uids.swap_remove(index)
        row.tokens = row.tokens[:start] + tail
        self.drafter.join(self._rows, row)
        row.num_learned = 0
        self._uids.append(uid)

    def has_room(self, uids: Sequence[int], lengths: Sequence[int], budget: int) -> bool:
        """Whether this many bytes suffice for texts of these lengths."""
        return self.least_bytes(lengths) <= budget

    def least_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes that texts of these lengths take at least."""
        return sum(lengths) * self._bytes

    @torch.inference_mode()
    def propose(self, asks: Mapping[int, int]) -> dict[int, list[messages.Node]]:
        """Drafts of at most asks[uid] nodes, for the rows whose texts are read to their ends; of
        the others a part is read."""
        self._settle()  # first the drafter learns how the texts went on
        gamma = [asks.get(uid, 0) for uid in self._uids]
        wanted = self.drafter.prepare(self._rows, gamma, PREFILL_CHUNK)
        draft = proposed(self.drafter, self._rows, wanted)
        drafts = drafted_nodes(draft, self._rows)
        for index, uid in enumerate(self._uids):
            if drafts[index] and (credit := self.drafter.credit(index)) is not None:
                tree = list(zip(draft.parent_lists[index], draft.lists[0][index], strict=False))
                length = len(self._rows[index].tokens)
                self._pending[uid] = _Proposal(length, tree[: draft.lists[1][index]], credit)
        self._settle()
        return {uid: drafts[index] for index, uid in enumerate(self._uids) if wanted[index]}

    def _settle(self) -> None:
        """A step without a draft: the drafter takes in the texts as they are, and counts nothing as
        rejected."""
        rows = self._rows
        nothing = self.drafter.propose(rows, [0] * len(rows))
        verdict = prefix_verdict(nothing, [0] * len(rows), [0] * len(rows))
        self.drafter.commit(rows, nothing, verdict, no_output(len(rows), rows.device))


def no_output(num_rows: int, device: torch.device) -> TargetOutput:
    """There is no target here: a pass without logits."""
    return TargetOutput(torch.empty(num_rows, 1, 0, device=device), {}, [[0]] * num_rows)


def shared_with(held: list[int], start: int, tail: list[int]) -> int:
    """Length of the common beginning of `held` and a text that has its first `start` tokens, then
    `tail`."""
    return min(start, len(held)) + (common(held, start, tail) if start < len(held) else 0)
