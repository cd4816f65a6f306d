"""Drafts that come over the wire leave the target's distribution exactly as it is, over several
steps in one tree, without random numbers.

The oracle enumerates everything that is drawn: what a service draws for a prepared tree (through
the messages and all checks), and every outcome of the real verifier in each of the following steps.
Probabilities of four halvings are exact in fp32, so what remains is rounding in fp64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from outrider.remote.draft.drafter import draft_of
from outrider.remote.draft.tree import DraftTree, checked_nodes
from outrider.remote.protocol import messages
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests import oracle

V = 3
HORIZON = 3
EXACT = 1e-12
PROMPT = [0, 2]
Distribution = dict[int, float]
DistributionOf = Callable[[oracle.Path], Distribution]


def cut(path: oracle.Path) -> Distribution:
    """A draft's distribution, cut to two of three tokens, so that the target may emit what the
    draft never does."""
    first = (2 * sum(path) + len(path)) % V
    return {first: 0.75, (first + 1) % V: 0.25}


def whole(path: oracle.Path) -> Distribution:
    """A draft's distribution over all tokens."""
    first = (sum(path) + 2 * len(path)) % V
    return {first: 0.5, (first + 1) % V: 0.375, (first + 2) % V: 0.125}


# ---------------------------------------------------------------- a service whose draws are enumerated

DRAW = "draw"
PLACE = "place"
Plan = tuple[tuple[str, int], ...]  # (what, parent) of each node
CHAIN: Plan = ((DRAW, -1), (DRAW, 0))
OUTCOMES: Plan = (*CHAIN, (PLACE, -1), (DRAW, 2), (PLACE, 0), (DRAW, 4), (PLACE, 1), (DRAW, 6))


def replies(
    base: oracle.Path, plan: Plan, distribution_of: DistributionOf
) -> list[tuple[list[messages.Node], float]]:
    """Every reply that a service can give which fills `plan` behind the text `base`, with its
    probability."""
    found: list[tuple[list[messages.Node], list[oracle.Path], float]] = [([], [], 1.0)]
    for what, parent in plan:
        grown = []
        for nodes, paths, weight in found:
            above = base if parent < 0 else paths[parent]
            distribution = distribution_of(above)
            if what == DRAW:
                wire = messages.Distribution(
                    tokens=list(distribution), probs=list(distribution.values())
                )
                for token, prob in distribution.items():
                    node = messages.Node(parent=parent, token=token, drawn=True, distribution=wire)
                    grown.append(([*nodes, node], [*paths, (*above, token)], weight * prob))
            else:
                taken = {node.token for node in nodes if node.parent == parent}
                token = next(token for token in (*distribution, *range(V)) if token not in taken)
                grown.append(
                    (
                        [*nodes, messages.Node(parent=parent, token=token)],
                        [*paths, (*above, token)],
                        weight,
                    )
                )
        found = grown
    return [(nodes, weight) for nodes, _, weight in found]


def received(tree: DraftTree, base: int, nodes: Sequence[messages.Node]) -> DraftTree:
    """The tree, with a reply that came over the wire."""
    sent = messages.RowReply.FromString(
        messages.RowReply(base_length=base, nodes=nodes).SerializeToString()
    )
    grafted = copy.deepcopy(tree)
    grafted.add(
        sent.base_length, checked_nodes(sent.nodes, grafted.num_sent(base), V, with_probs=True)
    )
    return grafted


# ---------------------------------------------------------------- the joint distribution of several steps


@dataclass(frozen=True)
class Step:
    """One step: the replies that have come before it, as (how many tokens were committed then,
    plan); nodes it may propose."""

    max_nodes: int
    arrived: tuple[tuple[int | None, Plan], ...] = ()  # None: behind the text as it is now


def distribution_of_steps(
    verify: oracle.Verify,
    target: oracle.TableModel,
    distribution_of: DistributionOf,
    steps: Sequence[Step],
) -> oracle.Distribution:
    """The distribution of the first HORIZON tokens; what the steps leave open is the target's own."""
    found: oracle.Distribution = {}
    tree = DraftTree(len(PROMPT))
    tree.ask()
    open_states: list[tuple[oracle.Path, DraftTree, float, int]] = [((), tree, 1.0, 0)]
    while open_states:
        text, tree, weight, number = open_states.pop()
        if number == len(steps) or len(text) >= HORIZON:
            found[text[:HORIZON]] = found.get(text[:HORIZON], 0.0) + weight
            continue
        for ready, share in arrivals(text, tree, distribution_of, steps[number].arrived):
            for tokens, after, chance in outcomes(
                verify, target, text, ready, min(steps[number].max_nodes, HORIZON - len(text))
            ):
                open_states.append(((*text, *tokens), after, weight * share * chance, number + 1))
    return oracle.continued(found, target, HORIZON)


def arrivals(
    text: oracle.Path,
    tree: DraftTree,
    distribution_of: DistributionOf,
    arrived: Sequence[tuple[int | None, Plan]],
) -> list[tuple[DraftTree, float]]:
    """The tree after the replies, in every way they can be."""
    found = [(tree, 1.0)]
    for since, plan in arrived:
        base = len(text) if since is None else since
        if not tree.was_asked(len(PROMPT) + base):
            continue
        found = [
            (received(one, len(PROMPT) + base, nodes), weight * share)
            for one, weight in found
            for nodes, share in replies(text[:base], plan, distribution_of)
        ]
    return found


def outcomes(
    verify: oracle.Verify,
    target: oracle.TableModel,
    text: oracle.Path,
    tree: DraftTree,
    max_nodes: int,
) -> list[tuple[oracle.Path, DraftTree, float]]:
    """Every outcome of a step that proposes the tree's chain: tokens, the tree behind them,
    probability."""
    nodes = tree.chain(max_nodes)
    path = tuple(node.token for node in nodes)
    draft = draft_of([nodes], V, torch.device("cpu"))
    if draft.probs is not None:
        draft.probs = draft.probs.double()
    distributions = torch.stack(
        [target.probs((*text, *path[:kept])) for kept in range(len(path) + 1)]
    )[None]
    proposals = oracle.Proposals([path], [1.0], draft if nodes else Draft.empty(1))
    ends = oracle.enumerate_step(verify, proposals, distributions)
    together: dict[oracle.Path, float] = {}
    for tokens, chance in zip(
        oracle.emitted_tokens(ends, proposals), ends.weights.tolist(), strict=True
    ):
        together[tokens] = together.get(tokens, 0.0) + chance
    found = []
    for tokens, chance in together.items():
        if chance > 0:
            after, proposed = copy.deepcopy((tree, nodes))
            after.advance(tokens, proposed)
            after.ask()
            found.append((tokens, after, chance))
    return found


NOW = None
FIRST = 0
STEPS = {
    "one tree, walked": (Step(2, ((FIRST, OUTCOMES),)), Step(2), Step(2)),
    "one tree, token by token": (Step(1, ((FIRST, OUTCOMES),)), Step(1), Step(1)),
    "more was sent than is proposed": (Step(1, ((FIRST, OUTCOMES),)), Step(2)),
    "late: grafted after a plain step": (Step(0), Step(2, ((FIRST, OUTCOMES),)), Step(2)),
    "later still": (Step(0), Step(0), Step(2, ((FIRST, OUTCOMES),))),
    "asked for in every step": (Step(1, ((FIRST, CHAIN),)), Step(2, ((NOW, CHAIN),))),
    "late, and drawn anew": (Step(0), Step(2, ((NOW, CHAIN), (FIRST, CHAIN)))),
    "placed first, then drawn": (
        Step(1, ((FIRST, ((PLACE, -1), (DRAW, 0), (DRAW, -1))),)),
        Step(1),
    ),
}
QUICK = ("asked for in every step", "late, and drawn anew", "placed first, then drawn")
CHAINS = [
    name
    for name in VERIFIERS.names()
    if VERIFIERS.load(name).lossless and not VERIFIERS.load(name).coupled
]
CASES = [
    *(pytest.param(cut, name, id=f"cut-{name}") for name in STEPS),
    *(  # half as many outcomes again in every draw: seconds each
        pytest.param(
            whole, name, id=f"whole-{name}", marks=() if name in QUICK else pytest.mark.nightly
        )
        for name in STEPS
    ),
]


def target_model(seed: int = 4) -> oracle.TableModel:
    generator = torch.Generator().manual_seed(seed)
    return oracle.TableModel.random(
        generator, V, HORIZON + 1, SamplingParams(temperature=1.0), PROMPT
    )


@pytest.mark.parametrize("verifier", CHAINS)
@pytest.mark.parametrize(("distribution_of", "steps"), CASES)
def test_distribution_is_the_targets(
    verifier: str, steps: str, distribution_of: DistributionOf
) -> None:
    """Any bias of grafting, re-rooting, choosing between draws, or of distributions on their way."""
    target = target_model()
    distribution = distribution_of_steps(
        VERIFIERS.load(verifier)().verify, target, distribution_of, STEPS[steps]
    )
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT)
    assert oracle.total_variation(distribution, target.joint(HORIZON)) < EXACT


def biased(monkeypatch: pytest.MonkeyPatch, steps: str, name: str, wrong: object) -> float:
    """Total variation with one method of the tree replaced."""
    monkeypatch.setattr(DraftTree, name, wrong)
    target = target_model()
    distribution = distribution_of_steps(
        VERIFIERS.load("block")().verify, target, cut, STEPS[steps]
    )
    return oracle.total_variation(distribution, target.joint(HORIZON))


def test_a_choice_between_draws_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the larger of two draws at one position is proposed, instead of the first."""
    drawn = DraftTree._drawn

    def larger(self, parent, token, distribution):  # noqa: ANN001, ANN202
        if parent.drawn is not None and token > parent.drawn.token:
            parent.drawn = None
        return drawn(self, parent, token, distribution)

    assert biased(monkeypatch, "late, and drawn anew", "_drawn", larger) > 1e-3


def test_a_distribution_that_was_not_drawn_from_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: the node keeps its token and gets another distribution."""
    drawn = DraftTree._drawn

    def flat(self, parent, token, distribution):  # noqa: ANN001, ANN202
        return drawn(self, parent, token, distribution._replace(probs=distribution.probs * 0 + 0.5))

    assert biased(monkeypatch, "one tree, walked", "_drawn", flat) > 1e-3


def test_a_draw_taken_for_placed_for_its_value_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: a drawn node is proposed only where it is likely, which looks at its value."""
    chain = DraftTree.chain

    def likely(self, max_nodes):  # noqa: ANN001, ANN202
        nodes = chain(self, max_nodes)
        return (
            nodes[:1]
            if len(nodes) > 1 and nodes[1].distribution is not None and nodes[1].token == 0
            else nodes
        )

    assert biased(monkeypatch, "one tree, walked", "chain", likely) > 1e-3
