"""The fixed bank of small cases that a verifier must pass: pairs of random tables, every filter,
every kind of draft; exact distributions, no random number involved. Chains for every verifier;
trees as well where it takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from outrider.sampling.params import SamplingParams
from outrider.verifiers.base import Verifier
from tests.enumeration.enumerate import Verify, bias
from tests.enumeration.intervals import interval_joint, keyed_by_step
from tests.enumeration.tables import (
    Growth,
    Nodes,
    Proposals,
    Stop,
    TableModel,
    fixed_drafts,
    greedy_draft,
    sampled_drafts,
    shape,
    total_variation,
    tree_drafts,
)

PLAIN = SamplingParams(temperature=1.0)
FILTERS = {
    "plain": PLAIN,
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.0, top_k=2),
    "top-p": SamplingParams(temperature=1.2, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.7, presence_penalty=0.8, frequency_penalty=0.6
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 1.5, 2: -0.7}),
    "allowed tokens": SamplingParams(temperature=1.0, allowed_token_ids=[0, 2]),
    "greedy": SamplingParams(),
    "greedy with penalties": SamplingParams(
        repetition_penalty=3.0, presence_penalty=1.5, frequency_penalty=1.5
    ),
}
TREE_FILTERS = ("plain", "top-k", "penalties", "greedy")

FORK = [-1, -1, 0, 0, 1]  # two children, of which one has two and the other one
TREES: dict[str, tuple[list[int], str]] = {
    "siblings without replacement": ([-1, -1, 0, 1], "ssss"),
    "placed siblings": (FORK, "ddddd"),
    "placed and drawn siblings": ([-1, -1, 0, 1], "dsds"),
    "foreign branch first": ([-1, -1, 0, 1], "fsfs"),
    # may repeat a drawn token: then it can never be kept
    "foreign branch last": ([-1, 0, -1, 0], "ssff"),
    # V = 3: the last sibling is certain, top-k leaves nothing for it
    "three siblings": ([-1, -1, -1], "sss"),
    "a chain": ([-1, 0], "ss"),
    "late sibling": ([-1, 0, -1], "sss"),  # depth first instead of level by level
}
Drafting = Callable[[TableModel, int], Proposals]
LIMIT = 1e-9  # total variation; sound rules stay below 1e-12, the smallest known bug is at 0.003


@dataclass(frozen=True)
class Case:
    """One exact computation: the total variation between what a verifier emits and the target's
    distribution."""

    kind: str  # of draft
    name: str  # unique in the bank
    measure: Callable[[Verify], float]


def bank(*, trees: bool) -> list[Case]:
    """Every case, in the order in which they are run."""
    return [*_chain_cases(), *(_tree_cases() if trees else ())]


def _pair(
    seed: int, vocab: int, depth: int, target: SamplingParams, drafter: SamplingParams
) -> tuple[TableModel, TableModel]:
    generator = torch.Generator().manual_seed(seed)
    prompt = [0, vocab - 1]
    first = TableModel.random(generator, vocab, depth, target, prompt)
    return first, TableModel.random(generator, vocab, depth, drafter, prompt)


def _of(target: TableModel, proposals: Callable[[], Proposals]) -> Callable[[Verify], float]:
    return lambda verify: bias(verify, target, proposals())


# ------------------------------------------------ chains

CHAINS: dict[str, Drafting] = {
    "drawn": sampled_drafts,
    "likeliest": greedy_draft,
    "placed, of all lengths": lambda drafter, gamma: _placed(drafter, gamma),
    "drawn and placed": lambda drafter, gamma: sampled_drafts(drafter, gamma, kinds="sds"[:gamma]),
    "stopped after an unlikely token": lambda drafter, gamma: sampled_drafts(
        drafter, gamma, _after_unlikely(drafter)
    ),
    "stopped before an uncertain one": lambda drafter, gamma: sampled_drafts(
        drafter, gamma, _before_uncertain(drafter)
    ),
    "none": lambda drafter, gamma: fixed_drafts([()], 0),
}


def _chain_cases() -> Iterator[Case]:
    for kind, drafting in CHAINS.items():
        for name, params in FILTERS.items():
            yield _chain_case(kind, f"{kind}, {name}", drafting, 2, _pair(11, 3, 3, params, params))
    # a drafter whose distribution is not the target's filtered alike: q = 0 where p > 0 included
    for seed in range(3):
        for kind in ("drawn", "drawn and placed", "stopped after an unlikely token"):
            pair = _pair(seed, 3, 4, PLAIN, FILTERS["top-k"])
            yield _chain_case(
                kind,
                f"{kind}, three tokens of a filtered drafter, pair {seed}",
                CHAINS[kind],
                3,
                pair,
            )
    yield _chain_case(
        "drawn",
        "drawn, three of four tokens",
        sampled_drafts,
        3,
        _pair(5, 4, 4, FILTERS["penalties"], PLAIN),
    )
    for name in ("greedy", "greedy with penalties"):
        pair = _pair(3, 3, 3, FILTERS[name], PLAIN)
        yield _chain_case(
            "drawn", f"drawn, {name} target of a sampling drafter", sampled_drafts, 2, pair
        )
    target, _ = _pair(3, 3, 4, PLAIN, PLAIN)
    yield _chain_case(
        "drawn", "drawn, drafter and target alike", sampled_drafts, 3, (target, target)
    )


def _chain_case(
    kind: str, name: str, drafting: Drafting, gamma: int, pair: tuple[TableModel, TableModel]
) -> Case:
    target, drafter = pair
    return Case(f"chain: {kind}", f"chain {name}", _of(target, lambda: drafting(drafter, gamma)))


def steps_in_a_row() -> Case:
    """Two steps on one set of keyed numbers; not for verifiers that choose by noise, whose numbers
    are keyed by position."""
    target, drafter = _pair(2, 2, 3, PLAIN, PLAIN)

    def measure(verify: Verify) -> float:
        joint = interval_joint(verify, target, drafter, 2, keyed_by_step, num_steps=2)
        return total_variation(joint, target.joint(3))

    return Case("two steps in a row", "two steps in a row", measure)


def _placed(drafter: TableModel, gamma: int) -> Proposals:
    """Deterministic drafts of 0 .. gamma tokens, several rows of one batch, some of them bad
    guesses."""
    paths = [tuple((n + i) % drafter.vocab_size for i in range(n)) for n in range(gamma + 1)]
    return fixed_drafts(paths, gamma)


def _after_unlikely(drafter: TableModel) -> Stop:
    """Stop AFTER keeping a token whose q was low: depends on drafted tokens and q only, so it must
    be harmless."""
    return lambda path: bool(path) and float(drafter.probs(path[:-1])[path[-1]]) < 0.4


def _before_uncertain(drafter: TableModel) -> Stop:
    """Stop before a draw whose distribution is flat."""
    return lambda path: float(drafter.probs(path).max()) < 0.5


# ------------------------------------------------ trees


def _tree_cases() -> Iterator[Case]:
    for kind, (parents, kinds) in TREES.items():
        for name in TREE_FILTERS:
            target, drafter = _pair(11, 3, 3, FILTERS[name], FILTERS[name])
            yield _tree_case(kind, f"{kind}, {name}", target, drafter, shape(parents, kinds))
    for seed in range(2):
        target, drafter = _pair(seed, 3, 3, PLAIN, FILTERS["top-k"])
        yield _tree_case(
            "siblings with replacement",
            f"siblings with replacement, pair {seed}",
            target,
            drafter,
            shape([-1, -1, 0, 1], "ssss"),
            replacement=True,
        )
        target, drafter = _pair(seed, 3, 3, PLAIN, PLAIN)
        growth = follow_the_likely(drafter)
        yield _tree_case(
            "following what was drawn",
            f"following what was drawn, pair {seed}",
            target,
            drafter,
            growth,
        )
        target, drafter = _pair(seed, 3, 4, PLAIN, FILTERS["top-k"])
        for parents, kinds in (([-1, 0, 0, 1], "ssss"), ([-1, -1, 1, 2], "dsss")):
            name = f"three deep, {kinds}, pair {seed}"
            yield _tree_case("three deep", name, target, drafter, shape(parents, kinds))
    target, drafter = _pair(1, 3, 3, PLAIN, PLAIN)
    yield _tree_case(
        "siblings without replacement",
        "five nodes without replacement",
        target,
        drafter,
        shape(FORK, "sssss"),
    )
    target, drafter = _pair(3, 3, 3, FILTERS["greedy"], PLAIN)
    name = "greedy target of a sampling drafter"
    yield _tree_case(
        "siblings without replacement", name, target, drafter, shape([-1, -1, 0, 1], "ssss")
    )


def _tree_case(
    kind: str,
    name: str,
    target: TableModel,
    drafter: TableModel,
    growth: Growth,
    *,
    replacement: bool = False,
) -> Case:
    measure = _of(target, lambda: tree_drafts(drafter, growth, replacement=replacement))
    return Case(f"tree: {kind}", f"tree {name}", measure)


def follow_the_likely(drafter: TableModel) -> Growth:
    """A second child only where the first was unlikely, one grandchild under the likelier of the
    two. It looks at drawn tokens that stay in the tree, never at one it then withholds."""

    def growth(nodes: Nodes) -> tuple[int, str] | None:
        probs = drafter.probs(())
        if not nodes:
            return -1, "s"
        first = float(probs[nodes[0][1]])
        if len(nodes) == 1:
            return (-1, "s") if first < float(probs.max()) else (0, "s")
        if len(nodes) == 2 and nodes[1][0] == -1 and nodes[1][1] != 0:
            return (0 if first > float(probs[nodes[1][1]]) else 1), "s"
        return None

    return growth


def cases_of(verifier: Verifier, *, trees: bool) -> list[Case]:
    """The cases that apply to a verifier: trees where it is asked for them, steps in a row where it
    tosses coins."""
    return [*bank(trees=trees), *([] if verifier.coupled else [steps_in_a_row()])]


@dataclass(frozen=True)
class CaseFound:
    """The outcome of one case."""

    kind: str
    name: str
    total_variation: float | None  # None: the verifier raised
    problem: str | None = None  # what it raised

    @property
    def is_exact(self) -> bool:
        # NaN is not exact
        return self.total_variation is not None and self.total_variation <= LIMIT


def run_case(case: Case, verifier: Verifier) -> CaseFound:
    """A verifier that raises has failed the case."""
    try:
        return CaseFound(case.kind, case.name, case.measure(verifier.verify))
    except Exception as error:  # noqa: BLE001
        return CaseFound(case.kind, case.name, None, f"{type(error).__name__}: {error}")


def run_bank(verifier: Verifier, *, trees: bool = False) -> list[CaseFound]:
    """Every case that applies."""
    return [run_case(case, verifier) for case in cases_of(verifier, trees=trees)]


def failures(found: list[CaseFound]) -> list[CaseFound]:
    """The cases in which the emitted distribution is not the target's."""
    return [one for one in found if not one.is_exact]
