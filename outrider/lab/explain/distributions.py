"""Both models' distributions at every position of a finished text, from one more pass of each over
it.

docs/explain.md says why the finished text is enough, and where each drafter's distribution comes
from. Filters, penalties and biases are the row's own, through `distribution`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.drafters.proposals import proposed
from outrider.kv.view import KVView
from outrider.lab.runner import Trace
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import OUTSIDE, fit_width
from outrider.rows import Row, Rows
from outrider.sampling.distribution import BatchSampling, History, distribution, greedy_choice
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import RowStreams
from outrider.stops import StopStrings
from outrider.types import Draft, TargetOutput, Verdict, VerdictLists

CHUNK_NUMBERS = 1 << 20  # tokens times vocabulary of one chunk: 8 MB of distributions
MAX_CHUNK = 128  # tokens


@dataclass(frozen=True)
class FinishedText:
    """The emitted tokens, and how they were sampled."""

    trace: Trace
    params: SamplingParams
    coupled: bool = False  # emitted with shared noise, which is known again

    @property
    def prompt(self) -> list[int]:
        return self.trace.completion.prompt_token_ids

    @property
    def output(self) -> list[int]:
        return self.trace.completion.token_ids

    def fed(self, first: int, last: int) -> list[int]:
        """The tokens whose logits are before the output tokens first .. last - 1."""
        text = [*self.prompt, *self.output]
        return text[len(self.prompt) + first - 1 : len(self.prompt) + last - 1]


@dataclass(frozen=True)
class Distributions:
    """One output position: p is the target's distribution, q the draft's; None where there is none.

    Of sampled rows the distributions in force, of greedy ones temperature 1 without filters.
    """

    token: int  # that stands there
    p_soft: np.ndarray  # (V,)
    q: np.ndarray | None  # (V,)
    p_open: np.ndarray  # (V,) without top-k, top-p and min-p; the same array where none is used
    q_open: np.ndarray | None
    outside: np.ndarray | None  # (V,) bool: tokens that the draft can never say
    q_best: int | None  # the draft's favourite, penalties and biases included
    guess: int | None  # what a deterministic draft says here; None: it draws, or is not known


@torch.inference_mode()
def forced_distributions(
    target: LM, drafter: Drafter, text: FinishedText
) -> Iterator[Distributions]:
    """One `Distributions` per output token. The models must be idle: no rows in their caches."""
    maker = _Maker(target, text)
    source = _source(target, drafter, text)
    reader = _Reader(target, text)
    try:
        for first, last in _cuts(text, source.step_lengths if source else (), target):
            drafted = source.logits(first, last) if source else None
            logits = reader.logits(first, last)
            assert logits is not None
            yield from maker.of(first, logits, drafted)
    finally:
        if source:
            source.close()
        reader.close()


def _source(target: LM, drafter: Drafter, text: FinishedText) -> _Reader | _Viewer | _Asked | None:
    model = drafter.model
    if model is None:
        asks = drafter.requires.draft or drafter.requires.module
        return _Asked(drafter, text, target) if asks else None
    if isinstance(model.kv, KVView):
        return _Viewer(model, text)
    return _Reader(model, text, target.shape.vocab_size)


def _cuts(text: FinishedText, lengths: Sequence[int], target: LM) -> Iterator[tuple[int, int]]:
    """(first, last) of each chunk of the output: of these lengths, else as long as fits."""
    total = len(text.output)
    room = CHUNK_NUMBERS // target.shape.vocab_size
    size = max(1, min(MAX_CHUNK, room, target.limits.max_tokens_per_pass))
    first = 0
    for length in lengths or [size] * -(-total // size):
        yield first, min(first + length, total)
        first += length


class _Reader:
    """A model reads the text with a cache of its own."""

    step_lengths: Sequence[int] = ()

    def __init__(self, lm: LM, text: FinishedText, vocab_size: int | None = None) -> None:
        self._lm = lm
        self._text = text
        self._width = vocab_size  # of a draft: the target's
        lm.kv.add_row()
        lm.catch_up([text.prompt])

    def logits(self, first: int, last: int) -> Tensor | None:
        """(1, last - first, V) before output tokens first .. last - 1; None beyond a draft's
        context."""
        tokens = self._text.fed(first, last)
        end = len(self._text.prompt) + last - 1
        if self._width is not None and end >= self._lm.shape.context_length:
            return None
        logits = self._lm.forward(torch.tensor([tokens], device=self._lm.device)).logits
        self._lm.kv.advance(0, len(tokens))
        return logits if self._width is None else fit_width(logits, self._width)

    def close(self) -> None:
        self._lm.kv.swap_remove(0)


class _Viewer:
    """A model on the target's own cache writes after what is committed; the target, which reads
    next, overwrites."""

    def __init__(self, lm: LM, text: FinishedText) -> None:
        assert isinstance(lm.kv, KVView)
        self.step_lengths = [step.taken for step in text.trace.steps]
        self._lm = lm
        self._view = lm.kv
        self._text = text

    def logits(self, first: int, last: int) -> Tensor:
        if not self._view.num_rows:
            self._view.add_row()
        self._view.follow()
        tokens = torch.tensor([self._text.fed(first, last)], device=self._lm.device)
        return self._lm.forward(tokens).logits

    def close(self) -> None:
        if self._view.num_rows:
            self._view.swap_remove(0)


class _Asked:
    """The drafter itself proposes one token at every position: its log distribution serves as
    logits."""

    def __init__(self, drafter: Drafter, text: FinishedText, target: LM) -> None:
        self.step_lengths = [1] * len(text.output)
        self._drafter = drafter
        self._text = text
        self._rows = Rows(target.shape.vocab_size, target.device)
        room = len(text.output) + 2
        row = Row(
            request=0,
            tokens=list(text.prompt),
            num_prompt=len(text.prompt),
            params=SamplingParams(temperature=1.0, max_tokens=room),
            seed=0,
            max_tokens=len(text.prompt) + room,
            stop_tokens=frozenset(),
            detokenizer=None,
            stops=StopStrings([]),
        )
        self._rows.add(row)
        drafter.start(row)

    def logits(self, first: int, last: int) -> Tensor | None:
        draft = proposed(self._drafter, self._rows, [1])
        logits = None if draft.probs is None else draft.probs[:, :1].log()
        size = draft.num_nodes
        lists = VerdictLists([[-1] * size], [0], [self._text.output[first]], [size == 0])
        verdict = Verdict.of_lists(lists, size, draft.tokens.device)
        nothing = torch.empty(1, size + 1, self._rows.vocab_size, device="meta")
        self._rows.append(draft, verdict, nothing)
        self._drafter.commit(self._rows, draft, verdict, TargetOutput(nothing))
        return logits

    def close(self) -> None:
        self._drafter.stop(0)


class _Maker:
    """From logits to distributions, as the decoder does it: in fp32, along the text."""

    def __init__(self, target: LM, text: FinishedText) -> None:
        self._text = text
        self._size = target.shape.vocab_size
        self._device = target.device
        params = text.params
        self._greedy = params.is_greedy
        no_filters = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        self._best = self._sampling(replace(params, temperature=0.0))
        self._drawn = self._sampling(
            replace(no_filters, temperature=1.0) if self._greedy else params
        )
        is_open = self._greedy or no_filters == params
        self._open = None if is_open else self._sampling(no_filters)
        has_noise = text.coupled and not self._greedy
        self._noise = RowStreams(text.trace.completion.seed) if has_noise else None

    def of(self, first: int, target: Tensor, draft: Tensor | None) -> Iterator[Distributions]:
        """`target` and `draft` (1, T, V): logits of the output positions from `first` on."""
        count = target.shape[1]
        history, chain = self._context(first, count)
        p, p_open = self._probs(target, history, chain, drafting=False)
        q: Sequence[np.ndarray | None] = [None] * count
        q_open = q
        q_best: Sequence[int | None] = [None] * count
        outside = None
        if draft is not None:
            q, q_open = self._probs(draft, history, chain, drafting=True)
            q_best = greedy_choice(draft, self._best, history, chain)[0]
            silent = draft[0, 0] < OUTSIDE / 2  # 16-bit floats round it
            outside = silent.cpu().numpy() if bool(silent.any()) else None
        for index in range(count):
            yield Distributions(
                token=self._text.output[first + index],
                p_soft=p[index],
                q=q[index],
                p_open=p_open[index],
                q_open=q_open[index],
                outside=outside,
                q_best=q_best[index],
                guess=self._guess(first + index, q[index], q_best[index]),
            )

    def _guess(self, index: int, q: np.ndarray | None, favourite: int | None) -> int | None:
        if q is None or self._greedy:
            return favourite
        if self._noise is None:
            return None
        noise = self._noise.gumbel(len(self._text.prompt) + index, self._size).numpy()
        with np.errstate(divide="ignore"):
            return int((np.log(q) + noise).argmax())

    def _probs(
        self, logits: Tensor, history: History | None, chain: Draft, *, drafting: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(V,) of every position, in force and without filters."""

        def rows(sampling: BatchSampling) -> list[np.ndarray]:
            probs = distribution(logits, sampling, history, chain, drafting=drafting)[0].double()
            return list((probs / probs.sum(-1, keepdim=True)).cpu().numpy())

        in_force = rows(self._drawn)
        return in_force, in_force if self._open is None else rows(self._open)

    def _context(self, first: int, count: int) -> tuple[History | None, Draft]:
        """The history that penalties count: the text before the chunk, and the chunk's own tokens
        as a draft's path."""
        output = self._text.output
        fed = [list(output[first : first + count - 1])]
        tokens = torch.tensor(fed, dtype=torch.int64, device=self._device).view(1, count - 1)
        chain = Draft(tokens, torch.tensor([count - 1], device=self._device))
        if not self._text.params.needs_history:
            return None, chain
        before = [list(output[:first])]
        return History.start([self._text.prompt], before, self._size, self._device), chain

    def _sampling(self, params: SamplingParams) -> BatchSampling:
        return BatchSampling.of([params], self._size, self._device)
