"""The batch being decoded: each row's tokens, sampling, randomness, and the rules that end it.

`Rows.append` is the only way tokens enter a text. It takes a verdict, adds the kept draft tokens
and the verifier's own token one by one, and stops a row where a stop token, a stop string or a
limit says so, even in the middle of an accepted block. Nothing after that point counts as emitted:
text, counters and caches all follow the shortened row.

Rows leave by swap-remove (the last one moves into the hole), like every per-row state in the system
(`PerRow`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from outrider.sampling.constraint import Constraint
from outrider.sampling.distribution import BatchSampling, History
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import KeyedStreams, NoiseMaker, Randomness
from outrider.sampling.thinking import ThinkingState
from outrider.stats import DecodeStats
from outrider.stops import StopStrings
from outrider.types import Draft, Verdict

if TYPE_CHECKING:
    from outrider.text import Detokenizer

T = TypeVar("T")


class PerRow(list[T]):
    """State that a part keeps for each row of a batch, in its order."""

    def swap_remove(self, index: int) -> T:
        """The row at `index` leaves; the last row takes its place."""
        self[index], self[-1] = self[-1], self[index]
        return self.pop()


class RowVerifier(Protocol):
    """A verification rule as rows use it (outrider/verifiers/base.py)."""

    name: ClassVar[str]
    lossless: ClassVar[bool]
    coupled: ClassVar[bool]

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict: ...


@dataclass
class Row:
    """One request in the batch."""

    request: int  # the caller's number for it
    tokens: list[int]  # prompt and output; the last one is the pending token
    num_prompt: int
    params: SamplingParams
    seed: int
    max_tokens: int  # total length at which the row ends: prompt + max_tokens, or the context
    # tokens that end the row; no part of its text unless the request wants them shown
    stop_tokens: frozenset[int]
    detokenizer: Detokenizer | None  # None when nobody needs text before the end
    stops: StopStrings
    # None: the decoder's. As little as `params` may it change while in the batch
    verifier: RowVerifier | None = None
    constraint: Constraint | None = None  # a grammar, fed with emitted tokens; of this row alone
    # tokens that the answer is expected to have, for drafters that follow it
    prediction: Sequence[int] | None = None
    # who drafts for it, where there are several; None: the default drafter
    drafter: str | None = None
    draft_bound: int | None = None  # most nodes a step may draft for this row; 0: none
    # `draft_bound` is the number itself, whatever the control would choose
    draft_fixed: bool = False
    # the stop tokens that the request named; the others end any text
    named_stops: frozenset[int] = frozenset()
    # of its first tokens: drafters that learn have seen them, or will not; 0 but for a row that
    # comes back
    num_learned: int = 0
    # of its prompt's tokens that the target read; below 1 where it was read sparsely
    prompt_share: float = 1.0
    finish_reason: str | None = None
    # the stop string or the named stop token that ended the row
    stop_reason: int | str | None = None
    text: str = ""
    pieces: list[str] = field(default_factory=list)  # text released by each output token
    # per output token: "accepted", "correction", "bonus", "plain", "committed"
    origins: list[str] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)
    # before, inside or after its thoughts; None: they have no marks that are tokens
    thinking_state: ThinkingState | None = None

    def __post_init__(self) -> None:
        thinking = self.params.thinking
        if self.thinking_state is None and thinking is not None and thinking.closing_ids:
            self.thinking_state = ThinkingState.beginning(thinking)

    @property
    def thinks(self) -> bool:
        """Whether its text is inside its thoughts."""
        return self.thinking_state is not None and self.thinking_state.phase == "thinking"

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def shown(self) -> list[int]:
        """The output tokens that are text: without a stop token at the end, unless it is to be
        shown."""
        output = self.output
        return output[:-1] if output and not self._is_shown(output[-1]) else output

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self.max_tokens - len(self.tokens)

    def clamp_draft(self, size: int) -> int:
        """Nodes to ask for when the control chose `size`: the row's own bound or number first, then
        what it has room for."""
        if self.draft_bound is not None:
            size = self.draft_bound if self.draft_fixed else min(size, self.draft_bound)
        return max(0, min(size, self.room - 1))

    def add(self, token: int, origin: str) -> None:
        """Append one token and decide whether the row ends with it. Raises what its constraint
        raises, then without the token."""
        if self.constraint is not None:
            self.constraint.commit([token])
        self.tokens.append(token)
        self.origins.append(origin)
        piece = ""
        if self.detokenizer is not None and self._is_shown(token):
            piece = self.stops.push(self.detokenizer.push(token), token)
        is_over = token in self.stop_tokens or (
            self.constraint is not None and self.constraint.is_over
        )
        if is_over or self.room <= 0:
            piece += self._held_back()
        if self.stops.found:
            self.finish_reason = "stop"
            self.stop_reason = self.stops.match
        elif is_over:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.named_stops else None
        elif self.room <= 0:
            self.finish_reason = "length"
        self.text += piece
        self.pieces.append(piece)
        if self.thinking_state is not None and self.params.thinking is not None:
            blank = self.thinking_state.phase == "before" and not self.text.strip()
            self.thinking_state = self.thinking_state.after(
                token, self.params.thinking, blank=blank
            )

    def release(self) -> str:
        """The text that was held back, once no more tokens will come: a row may be ended from
        outside, too."""
        rest = self._held_back()
        self.text += rest
        return rest

    def _held_back(self) -> str:
        if self.stops.found or self.detokenizer is None:
            return ""
        return self.stops.push(self.detokenizer.flush()) + self.stops.flush()

    def _is_shown(self, token: int) -> bool:
        return token not in self.stop_tokens or self.params.include_stop_str_in_output


class Rows:
    """The rows of one batch and the tensors made from them."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        *,
        coupled: bool = False,
        noise: NoiseMaker | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._coupled = coupled  # whether the decoder's own verifier is, for rows that name none
        self.coupled_rows: Tensor | None = None  # (B,) bool, None where no row is: see `coupled`
        self.are_coupled: list[bool] = []  # the same on the host, also where no row is
        # coupled rows whose candidates noise ranks: greedy ones take the likeliest token anyway
        self.racing_rows: list[int] = []
        self.rows = PerRow[Row]()
        # what a step's drafts must bring to pay, by nodes (`trees/paying.py`); empty: anything pays
        self.prices: Sequence[float] = ()
        self.rng = KeyedStreams([], noise)
        self._sampling: BatchSampling | None = None
        self._soft_sampling: BatchSampling | None = None
        self.history: History | None = None
        self._rebuild()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    @property
    def coupled(self) -> bool:
        """Whether all rows choose with keyed noise (drafter-invariant sampling), which their
        drafters then guess with; `coupled_rows` says which ones do. A drafter that looks at neither
        is right all the same, and accepted less."""
        return self._all_coupled

    @property
    def sampling(self) -> BatchSampling:
        """The rows' sampling options as tensors. There must be a row."""
        assert self._sampling is not None, "no rows"
        return self._sampling

    @property
    def soft_sampling(self) -> BatchSampling:
        """The sampling of all rows, greedy ones at temperature 1, which ranks candidates where
        `sampling` has a point mass."""
        if self._soft_sampling is None:
            params = [
                row.params.drawn() if row.params.is_greedy else row.params for row in self.rows
            ]
            self._soft_sampling = BatchSampling.of(
                params, self.vocab_size, self.device, self._constraints()
            )
        return self._soft_sampling

    @property
    def starts(self) -> list[int]:
        """Index in its text of each row's next token."""
        return [len(row.tokens) for row in self.rows]

    @property
    def positions(self) -> Tensor:
        """(B,) int64: `starts` as a tensor."""
        return torch.tensor(self.starts, device=self.device)

    def add(self, row: Row) -> int:
        """Append a row; returns its index. Raises ConfigError, and adds nothing, when its sampling
        names unknown ids."""
        BatchSampling.of([row.params], self.vocab_size, self.device)
        self.rows.append(row)
        self.rng.add_row(row.seed)
        if self.history is not None:
            self.history.add_row(row.tokens[: row.num_prompt], row.output)
        self._rebuild()
        return len(self.rows) - 1

    def swap_remove(self, index: int) -> Row:
        """Take a row out; the last row moves into its place."""
        row = self.rows.swap_remove(index)
        self.rng.swap_remove(index)
        if self.history is not None:
            self.history.swap_remove(index)
        self._rebuild()
        return row

    def append(self, draft: Draft, verdict: Verdict, logits: Tensor) -> list[int]:
        """Add what the verdict keeps; returns the number of tokens each row really took.

        `logits` (B, N+1, V) are the target's, for the rows that asked for log-probabilities.
        """
        paths, counts, next_tokens, complete = verdict.lists
        tokens, drafted = draft.lists
        taken = []
        for index, row in enumerate(self.rows):
            path = paths[index][: counts[index]]
            last = "plain" if drafted[index] == 0 else "bonus" if complete[index] else "correction"
            news = [(tokens[index][node], "accepted") for node in path] + [
                (next_tokens[index], last)
            ]
            before = len(row.tokens)
            for (token, origin), column in zip(
                news, [0, *(node + 1 for node in path)], strict=True
            ):
                if row.params.logprobs is not None:
                    row.logprobs.append(
                        _logprobs(logits[index, column], token, row.params.logprobs)
                    )
                row.add(token, origin)
                if row.finish_reason:
                    break
            added = row.tokens[before:]
            accepted = min(len(added), len(path))
            row.stats.count_step(drafted[index], accepted, len(added), rejected=not complete[index])
            if draft.parts is not None and (parts := draft.parts[index]) is not None:
                row.stats.count_parts(parts, path[:accepted])
            if self.history is not None:
                self.history.append(index, added)
            taken.append(len(added))
        return taken

    def _rebuild(self) -> None:
        """Per-batch tensors follow the membership, which changes rarely; a history exists while
        some row needs one."""
        params = [row.params for row in self.rows]
        sampling = (
            BatchSampling.of(params, self.vocab_size, self.device, self._constraints())
            if params
            else None
        )
        self._sampling = sampling
        self._soft_sampling = None
        coupled = [
            self._coupled if row.verifier is None else row.verifier.coupled for row in self.rows
        ]
        self._all_coupled = all(coupled) if coupled else self._coupled
        self.coupled_rows = torch.tensor(coupled, device=self.device) if any(coupled) else None
        self.are_coupled = coupled
        self.racing_rows = [
            row for row, races in enumerate(coupled) if races and not params[row].is_greedy
        ]
        if not any(p.needs_history for p in params):
            self.history = None
        elif self.history is None:
            prompts = [row.tokens[: row.num_prompt] for row in self.rows]
            self.history = History.start(
                prompts, [row.output for row in self.rows], self.vocab_size, self.device
            )

    def _constraints(self) -> list[Constraint | None]:
        return [row.constraint for row in self.rows]


def _logprobs(logits: Tensor, token: int, count: int) -> dict[int, float]:
    """The target's own log-probabilities (temperature 1, no filters) of the token and of the
    `count` likeliest."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = torch.topk(logprobs, count)
    found = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    found[token] = logprobs[token].item()
    return {
        t: p
        for t, p in sorted(found.items(), key=lambda item: -item[1])
        if math.isfinite(p) or t == token
    }
