"""Language models small enough to write down: a distribution for every text, so that whole distributions of texts can be
computed.

The logits are a table; what turns them into distributions, penalties along a draft's path included, is the real `distribution`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.sampling.params import SamplingParams
from outrider.types import Draft

SCALE = 1.5  # of random logits: distributions that are neither flat nor certain

Path = tuple[int, ...]
Joint = dict[Path, float]  # text -> its probability


@dataclass
class TableModel:
    """A language model as a table: logits for every text up to a depth, then a distribution through the real `distribution`."""

    logits: dict[Path, Tensor]  # output so far -> (V,) fp64
    params: SamplingParams
    prompt: list[int]
    known: dict[Path, Tensor] = field(default_factory=dict)  # distributions computed so far

    @classmethod
    def random(
        cls, generator: torch.Generator, vocab_size: int, depth: int, params: SamplingParams, prompt: list[int]
    ) -> TableModel:
        """Independent normal logits for every output of fewer than `depth` tokens."""
        paths = [path for n in range(depth) for path in itertools.product(range(vocab_size), repeat=n)]
        table = SCALE * torch.randn(len(paths), vocab_size, generator=generator, dtype=torch.float64)
        return cls(dict(zip(paths, table, strict=True)), params, prompt)

    @property
    def vocab_size(self) -> int:
        return self.logits[()].shape[0]

    def probs(self, path: Path) -> Tensor:
        """(V,) the plain distribution after `path`: its history is committed text, no draft is involved."""
        if path not in self.known:
            history = History.start([self.prompt], [list(path)], self.vocab_size)
            sampling = BatchSampling.of([self.params], self.vocab_size)
            probs = distribution(self.logits[path][None, None], sampling, history, dtype=torch.float64)
            self.known[path] = probs[0, 0]
        return self.known[path]

    def probs_along(self, drafts: list[Path], width: int) -> Tensor:
        """(B, width + 1, V): one pass over padded chains, penalties applied per draft path by `distribution` itself."""
        return self.probs_on(chain(drafts, width))

    def probs_on(self, draft: Draft) -> Tensor:
        """(B, N+1, V): one pass over chains or trees; NaN logits in the padding, which must never be looked at."""
        nan = torch.full((self.vocab_size,), torch.nan, dtype=torch.float64)
        rows = []
        for tokens, parents, length in zip(draft.lists[0], draft.parent_lists, draft.lists[1], strict=True):
            line = [self.logits[text_of(tokens, parents, node)] for node in range(-1, length)]
            rows.append(torch.stack(line + [nan] * (draft.num_nodes - length)))
        history = History.start([self.prompt] * len(rows), [[]] * len(rows), self.vocab_size)
        sampling = BatchSampling.of([self.params] * len(rows), self.vocab_size)
        return distribution(torch.stack(rows), sampling, history, draft, dtype=torch.float64)

    def joint(self, horizon: int) -> Joint:
        """The target's own joint distribution over the next `horizon` tokens."""
        return continued({(): 1.0}, self, horizon)


def chain(drafts: list[Path], width: int) -> Draft:
    """A batch of chains, padded with token 0."""
    tokens = torch.tensor([list(draft) + [0] * (width - len(draft)) for draft in drafts], dtype=torch.int64)
    return Draft(tokens.view(len(drafts), width), torch.tensor([len(draft) for draft in drafts]))


def text_of(tokens: list[int], parents: list[int], node: int) -> Path:
    """The tokens from the root of a tree to `node`; none for the root, -1."""
    path: Path = ()
    while node >= 0:
        path, node = (tokens[node], *path), parents[node]
    return path


def continued(joint: Joint, target: TableModel, horizon: int) -> Joint:
    """Extend every shorter text with the target's distribution."""
    done: Joint = {}
    growing = list(joint.items())
    while growing:
        path, weight = growing.pop()
        if len(path) == horizon:
            done[path] = done.get(path, 0.0) + weight
        else:
            probs = target.probs(path).tolist()
            growing += [((*path, token), weight * prob) for token, prob in enumerate(probs) if prob > 0]
    return done


def total_variation(left: Joint, right: Joint) -> float:
    """Half the sum of absolute differences: the largest difference in the probability of any event."""
    return 0.5 * sum(abs(left.get(path, 0.0) - right.get(path, 0.0)) for path in left.keys() | right.keys())
