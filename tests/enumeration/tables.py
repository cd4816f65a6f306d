"""Language models small enough to write down: a distribution for every text, so that whole
distributions of texts can be computed; and every draft that a drafter can propose, with its
probability: chains, and trees grown node by node.

The logits are a table; what turns them into distributions, penalties along a draft's path included,
is the real `distribution`.

A `Growth` decides, from the nodes drawn so far, where the next one goes and how it is chosen; so it
can stand for fixed shapes and for trees that follow what was drawn. Kinds of node:

    s   sampled from the parent's distribution (without its earlier siblings' tokens, or from all of it with replacement)
    d   the likeliest token that no earlier sibling has
    f   a foreign guess: a token fixed in advance, whatever the distribution
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.sampling.params import SamplingParams
from outrider.types import Draft

SCALE = 1.5  # of random logits: distributions that are neither flat nor certain

Path = tuple[int, ...]
Joint = dict[Path, float]  # text -> its probability
Stop = Callable[[Path], bool]  # draft so far -> stop drafting? may look at the draft and at q
Nodes = tuple[tuple[int, int], ...]  # (parent, token) of every node so far
# -> (parent, kind) of the next node; None = the tree is complete
Growth = Callable[[Nodes], tuple[int, str] | None]


@dataclass
class TableModel:
    """A language model as a table: logits for every text up to a depth, then a distribution through
    the real `distribution`."""

    logits: dict[Path, Tensor]  # output so far -> (V,) fp64
    params: SamplingParams
    prompt: list[int]
    known: dict[Path, Tensor] = field(default_factory=dict)  # distributions computed so far

    @classmethod
    def random(
        cls,
        generator: torch.Generator,
        vocab_size: int,
        depth: int,
        params: SamplingParams,
        prompt: list[int],
    ) -> TableModel:
        """Independent normal logits for every output of fewer than `depth` tokens."""
        paths = [
            path for n in range(depth) for path in itertools.product(range(vocab_size), repeat=n)
        ]
        table = SCALE * torch.randn(
            len(paths), vocab_size, generator=generator, dtype=torch.float64
        )
        return cls(dict(zip(paths, table, strict=True)), params, prompt)

    @property
    def vocab_size(self) -> int:
        return self.logits[()].shape[0]

    def probs(self, path: Path) -> Tensor:
        """(V,) the plain distribution after `path`: its history is committed text, no draft is
        involved."""
        if path not in self.known:
            history = History.start([self.prompt], [list(path)], self.vocab_size)
            sampling = BatchSampling.of([self.params], self.vocab_size)
            probs = distribution(
                self.logits[path][None, None], sampling, history, dtype=torch.float64
            )
            self.known[path] = probs[0, 0]
        return self.known[path]

    def probs_along(self, drafts: list[Path], width: int) -> Tensor:
        """(B, width + 1, V): one pass over padded chains, penalties applied per draft path by
        `distribution` itself."""
        return self.probs_on(chain(drafts, width))

    def probs_on(self, draft: Draft) -> Tensor:
        """(B, N+1, V): one pass over chains or trees; NaN logits in the padding, which must never
        be looked at."""
        nan = torch.full((self.vocab_size,), torch.nan, dtype=torch.float64)
        rows = []
        for tokens, parents, length in zip(
            draft.lists[0], draft.parent_lists, draft.lists[1], strict=True
        ):
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
    tokens = torch.tensor(
        [list(draft) + [0] * (width - len(draft)) for draft in drafts], dtype=torch.int64
    )
    return Draft(tokens.view(len(drafts), width), torch.tensor([len(draft) for draft in drafts]))


def text_of(tokens: list[int], parents: list[int], node: int) -> Path:
    """The tokens from the root of a tree to `node`; none for the root, -1."""
    path: Path = ()
    while node >= 0:
        path = (tokens[node], *path)
        node = parents[node]
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
            growing += [
                ((*path, token), weight * prob) for token, prob in enumerate(probs) if prob > 0
            ]
    return done


def total_variation(left: Joint, right: Joint) -> float:
    """Half the sum of absolute differences: the largest difference in the probability of any event."""
    return 0.5 * sum(
        abs(left.get(path, 0.0) - right.get(path, 0.0)) for path in left.keys() | right.keys()
    )


@dataclass
class Proposals:
    """All drafts a drafter can make, with their probabilities."""

    paths: list[Path]  # the drafted texts, where they are chains; () for trees
    weights: list[float]
    draft: Draft  # B = len(weights)


# ------------------------------------------------ chains


def never(_: Path) -> bool:
    return False


def sampled_drafts(
    drafter: TableModel, gamma: int, stop: Stop = never, kinds: str = ""
) -> Proposals:
    """Drafts drawn from the drafter's distribution, up to `gamma` tokens or until `stop`.

    `kinds` may make single nodes deterministic: "sds" = sampled, argmax, sampled.
    """
    kinds = kinds or "s" * gamma
    proposals: list[tuple[Path, float]] = []
    growing: list[tuple[Path, float]] = [((), 1.0)]
    while growing:
        path, weight = growing.pop()
        if len(path) == gamma or stop(path):
            proposals.append((path, weight))
            continue
        probs = drafter.probs(path)
        probs = (
            probs
            if kinds[len(path)] == "s"
            else torch.nn.functional.one_hot(probs.argmax(), len(probs))
        )
        growing += [
            ((*path, token), weight * prob) for token, prob in enumerate(probs.tolist()) if prob > 0
        ]
    paths = [path for path, _ in proposals]
    draft = chain(paths, gamma)
    draft.probs = drafter.probs_on(draft)
    if "d" in kinds:
        draft.sampled = torch.tensor([[kind == "s" for kind in kinds]] * len(paths))
    return Proposals(paths, [weight for _, weight in proposals], draft)


def fixed_drafts(paths: list[Path], width: int) -> Proposals:
    """Deterministic drafts; several of them are several rows of a batch with equal weight (lengths
    may differ)."""
    return Proposals(paths, [1 / len(paths)] * len(paths), chain(paths, width))


def greedy_draft(drafter: TableModel, gamma: int) -> Proposals:
    """The drafter's argmax path as a deterministic draft."""
    path: Path = ()
    for _ in range(gamma):
        path = (*path, int(drafter.probs(path).argmax()))
    return fixed_drafts([path], gamma)


# ------------------------------------------------ trees


def shape(parents: list[int], kinds: str) -> Growth:
    """A tree whose shape is fixed before anything is drawn."""
    return lambda nodes: (
        None if len(nodes) == len(parents) else (parents[len(nodes)], kinds[len(nodes)])
    )


def tree_drafts(drafter: TableModel, growth: Growth, *, replacement: bool = False) -> Proposals:
    """Every tree that `growth` can give with this drafter's distributions."""
    complete: list[tuple[Nodes, tuple[bool, ...], float]] = []
    growing: list[tuple[Nodes, tuple[bool, ...], float]] = [((), (), 1.0)]
    while growing:
        nodes, drawn, weight = growing.pop()
        wanted = growth(nodes)
        if wanted is None:
            complete.append((nodes, drawn, weight))
            continue
        parent, kind = wanted
        for token, prob, is_drawn in _choices(drafter, nodes, parent, kind, replacement):
            growing.append(((*nodes, (parent, token)), (*drawn, is_drawn), weight * prob))
    trees, kinds, weights = (list(part) for part in zip(*complete, strict=True))
    width = max(map(len, trees))
    draft = Draft(
        tokens=_padded([[token for _, token in nodes] for nodes in trees], width, 0),
        lengths=torch.tensor([len(nodes) for nodes in trees]),
        parents=_padded([[parent for parent, _ in nodes] for nodes in trees], width, -1),
        sampled=_padded([list(map(int, drawn)) for drawn in kinds], width, 0).bool(),
        replacement=replacement,
    )
    if bool(draft.is_sampled().any()):
        draft.probs = drafter.probs_on(draft)
    else:
        draft.sampled = None
    return Proposals([()] * len(trees), weights, draft)


def _choices(
    drafter: TableModel, nodes: Nodes, parent: int, kind: str, replacement: bool
) -> list[tuple[int, float, bool]]:
    """(token, probability, drawn from the distribution?) of every way to fill the next node."""
    siblings = [token for other, token in nodes if other == parent]
    probs = drafter.probs(
        text_of([token for _, token in nodes], [up for up, _ in nodes], parent)
    ).clone()
    if kind == "f":
        return [(len(nodes) % drafter.vocab_size, 1.0, False)]
    if not replacement or kind == "d":
        probs[siblings] = 0
    if probs.sum() == 0:  # nothing is left to draw from: any guess, not drawn
        return [(0, 1.0, False)]
    if kind == "d":
        return [(int(probs.argmax()), 1.0, False)]
    return [
        (token, prob, True) for token, prob in enumerate((probs / probs.sum()).tolist()) if prob > 0
    ]


def _padded(rows: list[list[int]], width: int, fill: int) -> Tensor:
    return torch.tensor(
        [row + [fill] * (width - len(row)) for row in rows], dtype=torch.int64
    ).view(-1, width)
