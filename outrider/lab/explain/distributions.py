"""Both models' distributions at every position of a finished text, from one more pass of each over it (teacher forcing).

docs/explain.md says why the finished text is enough, and where each drafter's distribution comes from. Filters, penalties and
biases are the row's own, through `distribution`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.drafters.proposals import proposed
from outrider.kv.view import KVView
from outrider.models.lm import LM
from outrider.models.tokens.vocabulary import OUTSIDE, fit_width
from outrider.rows import Row, Rows
from outrider.sampling.distribution import BatchSampling, History, distribution, greedy_choice
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import RowStreams
from outrider.stops import StopStrings
from outrider.types import Draft, TargetOutput, Verdict, VerdictLists

CHUNK_NUMBERS = 1 << 20  # tokens times vocabulary of one chunk: bounds the memory of its distributions (8 MB each)
MAX_CHUNK = 128  # tokens


@dataclass(frozen=True)
class FinishedText:
    """The emitted tokens, and how they were sampled."""

    prompt: Sequence[int]
    output: Sequence[int]
    params: SamplingParams
    limit: int  # most tokens the output could have had
    seed: int = 0
    coupled: bool = False  # emitted with the drafter-invariant verifier: the noise is known again
    step_lengths: Sequence[int] = ()  # tokens that each step took


@dataclass(frozen=True)
class Distributions:
    """One output position: p is the target's distribution, q the draft's; None where there is none."""

    token: int  # that stands there
    is_greedy: bool
    p_soft: np.ndarray  # (V,) of sampled rows the distribution in force; of greedy ones temperature 1 without filters
    q: np.ndarray | None  # (V,) likewise
    p_open: np.ndarray  # (V,) without top-k, top-p and min-p; the same array where none is used
    q_open: np.ndarray | None
    outside: np.ndarray | None  # (V,) bool: tokens that the draft can never say; None: there are none
    p_best: int  # favourites, penalties and biases included
    q_best: int | None
    guess: int | None  # what a deterministic draft says here; None where the draft draws, or is unknown

    @cached_property
    def p(self) -> np.ndarray:
        """(V,) the distribution that the text's token was drawn from: a point mass where decoding is greedy."""
        if not self.is_greedy:
            return self.p_soft
        point = np.zeros_like(self.p_soft)
        point[self.token] = 1
        return point

    @property
    def filtered(self) -> bool:
        """Whether a filter stands between the open distributions and those in force."""
        return self.p_open is not self.p_soft

    def opened(self) -> Distributions:
        """This position without filters."""
        return replace(self, p_soft=self.p_open, q=self.q_open) if self.filtered else self


class LogitsSource(Protocol):
    """The source of the draft's logits."""

    def chunks(self) -> list[int] | None:
        """Lengths it wants the text cut into; None: any."""

    def logits(self, first: int, last: int) -> Tensor | None:
        """(1, last - first, V) before the output tokens first .. last - 1; None where it has no distribution there."""

    def close(self) -> None: ...


@torch.inference_mode()
def forced_distributions(target: LM, drafter: Drafter, text: FinishedText) -> Iterator[Distributions]:
    """One `Distributions` per output token. The models must be idle: no rows in their caches."""
    maker = _Maker(target, text)
    source = _source(target, drafter, text)
    reader = _TextReader(target, text)
    try:
        for first, last in _cuts(text, source.chunks() if source else None, target):
            drafted = source.logits(first, last) if source else None
            yield from maker.of(first, reader.logits(first, last), drafted)
    finally:
        if source:
            source.close()
        reader.close()


def _source(target: LM, drafter: Drafter, text: FinishedText) -> LogitsSource | None:
    model = drafter.model
    if model is not None:
        return _Viewer(model, text) if isinstance(model.kv, KVView) else _TextReader(model, text, target.shape.vocab_size)
    return _Asked(drafter, text, target) if drafter.requires.draft or drafter.requires.module else None


def _cuts(text: FinishedText, wanted: list[int] | None, target: LM) -> Iterator[tuple[int, int]]:
    """(first, last) of each chunk of the output."""
    size = max(1, min(MAX_CHUNK, CHUNK_NUMBERS // target.shape.vocab_size, target.limits.max_tokens_per_pass))
    total, first = len(text.output), 0
    for length in wanted or [size] * -(-total // size):
        yield first, min(first + length, total)
        first += length


class _TextReader:
    """A model reads the text with a cache of its own."""

    def __init__(self, lm: LM, text: FinishedText, vocab_size: int | None = None) -> None:
        self._lm = lm
        self._tokens = [*text.prompt, *text.output]
        self._num_prompt = len(text.prompt)
        self._width = vocab_size
        lm.kv.add_row()
        lm.catch_up([list(text.prompt)])

    def chunks(self) -> list[int] | None:
        return None

    def logits(self, first: int, last: int) -> Tensor | None:
        begin = self._num_prompt + first - 1
        tokens = self._tokens[begin : self._num_prompt + last - 1]
        if self._width is not None and begin + len(tokens) >= self._lm.shape.context_length:
            return None  # a drafter stops where its model's context ends
        found = self._lm.forward(torch.tensor([tokens], device=self._lm.device)).logits
        self._lm.kv.advance(0, len(tokens))
        return found if self._width is None else fit_width(found, self._width)

    def close(self) -> None:
        self._lm.kv.swap_remove(0)


class _Viewer:
    """A model on the target's own cache: it writes behind what is committed, and the target, which reads after it, overwrites."""

    def __init__(self, lm: LM, text: FinishedText) -> None:
        self._lengths = list(text.step_lengths)
        self._lm = lm
        self._tokens = [*text.prompt, *text.output]
        self._num_prompt = len(text.prompt)

    def chunks(self) -> list[int]:
        return self._lengths

    def logits(self, first: int, last: int) -> Tensor:
        view = self._lm.kv
        assert isinstance(view, KVView)
        if not view.num_rows:
            view.add_row()
        view.follow()
        tokens = self._tokens[self._num_prompt + first - 1 : self._num_prompt + last - 1]
        return self._lm.forward(torch.tensor([tokens], device=self._lm.device)).logits

    def close(self) -> None:
        if self._lm.kv.num_rows:
            self._lm.kv.swap_remove(0)


class _Asked:
    """The drafter itself, at temperature 1 without filters, one token at every position: its distribution's logarithms are
    logits."""

    def __init__(self, drafter: Drafter, text: FinishedText, target: LM) -> None:
        self._drafter, self._text = drafter, text
        self._rows = Rows(target.shape.vocab_size, target.device)
        params = SamplingParams(temperature=1.0, max_tokens=len(text.output) + 2)
        row = Row(
            request=0, tokens=list(text.prompt), num_prompt=len(text.prompt), params=params, seed=0,
            max_tokens=len(text.prompt) + len(text.output) + 2, stop_tokens=frozenset(), detokenizer=None, stops=StopStrings([]),
        )  # fmt: skip
        self._rows.add(row)
        drafter.start(row)

    def chunks(self) -> list[int]:
        return [1] * len(self._text.output)

    def logits(self, first: int, last: int) -> Tensor | None:
        draft = proposed(self._drafter, self._rows, [1])
        found = None if draft.probs is None else draft.probs[:, :1].log()
        lists = VerdictLists([[-1] * draft.num_nodes], [0], [self._text.output[first]], [draft.num_nodes == 0])
        verdict = Verdict.of_lists(lists, draft.num_nodes, draft.tokens.device)
        nothing = torch.empty(1, draft.num_nodes + 1, self._rows.vocab_size, device="meta")
        self._rows.append(draft, verdict, nothing)
        self._drafter.commit(self._rows, draft, verdict, TargetOutput(nothing))
        return found

    def close(self) -> None:
        self._drafter.stop(0)


class _Maker:
    """From logits to distributions, as the decoder does it: in fp32, along the text."""

    def __init__(self, target: LM, text: FinishedText) -> None:
        self._text, self._size, self._device = text, target.shape.vocab_size, target.device
        params = text.params
        is_open = params.is_greedy or (params.top_k <= 0 and params.top_p == 1 and params.min_p == 0)
        no_filters = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        drawn = replace(no_filters, temperature=1.0) if params.is_greedy else params
        self._best = self._sampling(replace(params, temperature=0.0))
        self._drawn = self._sampling(drawn)
        self._open = None if is_open else self._sampling(no_filters)
        self._noise = RowStreams(text.seed) if text.coupled and not params.is_greedy else None

    def of(self, first: int, target: Tensor | None, draft: Tensor | None) -> Iterator[Distributions]:
        """`target` and `draft` (1, T, V): logits of the output positions from `first` on."""
        assert target is not None
        count = target.shape[1]
        output, greedy = self._text.output, self._text.params.is_greedy
        history, chain = self._context(first, count)
        p = self._probs(target, self._drawn, history, chain)
        p_open = p if self._open is None else self._probs(target, self._open, history, chain)
        p_best = greedy_choice(target, self._best, history, chain)[0]
        q, q_open, outside = None, None, None
        q_best: Sequence[int | None] = [None] * count
        if draft is not None:
            q = self._probs(draft, self._drawn, history, chain, drafting=True)
            q_open = q if self._open is None else self._probs(draft, self._open, history, chain, drafting=True)
            q_best = greedy_choice(draft, self._best, history, chain)[0]
            silent = draft[0, 0] < OUTSIDE / 2  # 16-bit floats round it
            outside = silent.cpu().numpy() if bool(silent.any()) else None
        for index in range(count):
            own = None if q is None else q[index]
            yield Distributions(
                output[first + index], greedy, p[index], own, p_open[index] if self._open else p[index],
                own if self._open is None or q_open is None else q_open[index], outside, p_best[index], q_best[index],
                self._guess(first + index, own, q_best[index]),
            )  # fmt: skip

    def _guess(self, index: int, q: np.ndarray | None, favourite: int | None) -> int | None:
        if q is None or self._text.params.is_greedy:
            return favourite
        if self._noise is None:
            return None
        noise = self._noise.gumbel(len(self._text.prompt) + index, self._size).numpy()
        with np.errstate(divide="ignore"):
            return int((np.log(q) + noise).argmax())

    def _probs(
        self, logits: Tensor, sampling: BatchSampling, history: History | None, chain: Draft, *, drafting: bool = False
    ) -> list[np.ndarray]:
        probs = distribution(logits, sampling, history, chain, drafting=drafting)[0].double()
        return list((probs / probs.sum(-1, keepdim=True)).cpu().numpy())

    def _context(self, first: int, count: int) -> tuple[History | None, Draft]:
        """What penalties count: the text before the chunk, and the chunk's own tokens as the path of a draft."""
        output = self._text.output
        tokens = torch.tensor([list(output[first : first + count - 1])], dtype=torch.int64, device=self._device)
        chain = Draft(tokens.view(1, count - 1), torch.tensor([count - 1], device=self._device))
        if not self._text.params.needs_history:
            return None, chain
        return History.start([list(self._text.prompt)], [list(output[:first])], self._size, self._device), chain

    def _sampling(self, params: SamplingParams) -> BatchSampling:
        return BatchSampling.of([params], self._size, self._device)
