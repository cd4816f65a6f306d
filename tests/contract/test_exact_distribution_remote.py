"""Drafts that come over the wire leave the target's distribution exactly as it is, over several
steps in one chain, without random numbers.

The oracle enumerates everything that is drawn: what a service draws for a prepared chain (through
the messages and all checks), and every outcome of the real verifier in each of the following steps.
Probabilities of four halvings are exact in fp32, so what remains is rounding in fp64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from outrider.remote.draft.chain import DraftChain, ReceivedNode, checked_nodes
from outrider.remote.draft.drafter import draft_of
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
Plan = tuple[str, ...]  # of each node of a chain
CHAIN: Plan = (DRAW, DRAW)
LONG: Plan = (DRAW, DRAW, DRAW, DRAW)


def replies(
    base: oracle.Path, plan: Plan, distribution_of: DistributionOf
) -> list[tuple[list[messages.Node], float]]:
    """Every reply that a service can give which fills `plan` behind the text `base`, with its
    probability."""
    found: list[tuple[list[messages.Node], oracle.Path, float]] = [([], base, 1.0)]
    for what in plan:
        grown = []
        for nodes, path, weight in found:
            distribution = distribution_of(path)
            if what == PLACE:
                token = next(iter(distribution))
                grown.append(([*nodes, messages.Node(token=token)], (*path, token), weight))
                continue
            wire = messages.Distribution(
                tokens=list(distribution), probs=list(distribution.values())
            )
            for token, prob in distribution.items():
                node = messages.Node(token=token, distribution=wire)
                grown.append(([*nodes, node], (*path, token), weight * prob))
        found = grown
    return [(nodes, weight) for nodes, _, weight in found]


def received(chain: DraftChain, base: int, nodes: Sequence[messages.Node]) -> DraftChain:
    """The chain, with a reply that came over the wire."""
    sent = messages.RowReply.FromString(
        messages.RowReply(base_length=base, nodes=nodes).SerializeToString()
    )
    longer = copy.deepcopy(chain)
    longer.add(sent.base_length, checked_nodes(sent.nodes, V, with_probs=True))
    return longer


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
    chain = DraftChain(len(PROMPT))
    open_states: list[tuple[oracle.Path, DraftChain, float, int]] = [((), chain, 1.0, 0)]
    while open_states:
        text, chain, weight, number = open_states.pop()
        if number == len(steps) or len(text) >= HORIZON:
            found[text[:HORIZON]] = found.get(text[:HORIZON], 0.0) + weight
            continue
        for ready, share in arrivals(text, chain, distribution_of, steps[number].arrived):
            for tokens, after, chance in outcomes(
                verify, target, text, ready, min(steps[number].max_nodes, HORIZON - len(text))
            ):
                open_states.append(((*text, *tokens), after, weight * share * chance, number + 1))
    return oracle.continued(found, target, HORIZON)


def arrivals(
    text: oracle.Path,
    chain: DraftChain,
    distribution_of: DistributionOf,
    arrived: Sequence[tuple[int | None, Plan]],
) -> list[tuple[DraftChain, float]]:
    """The chain after the replies, in every way they can be."""
    found = [(chain, 1.0)]
    for since, plan in arrived:
        base = len(text) if since is None else since
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
    chain: DraftChain,
    max_nodes: int,
) -> list[tuple[oracle.Path, DraftChain, float]]:
    """Every outcome of a step that proposes the chain's chain: tokens, the chain behind them,
    probability."""
    nodes = chain.first(max_nodes)
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
            after, proposed = copy.deepcopy((chain, nodes))
            after.advance(tokens, proposed)
            found.append((tokens, after, chance))
    return found


NOW = None
FIRST = 0
STEPS = {
    "one chain, walked": (Step(2, ((FIRST, LONG),)), Step(2), Step(2)),
    "one chain, token by token": (Step(1, ((FIRST, LONG),)), Step(1), Step(1)),
    "more was sent than is proposed": (Step(1, ((FIRST, LONG),)), Step(2)),
    "late: grafted after a plain step": (Step(0), Step(2, ((FIRST, LONG),)), Step(2)),
    "later still": (Step(0), Step(0), Step(2, ((FIRST, LONG),))),
    "asked for in every step": (Step(1, ((FIRST, CHAIN),)), Step(2, ((NOW, CHAIN),))),
    "late, and drawn anew": (Step(0), Step(2, ((NOW, CHAIN), (FIRST, CHAIN)))),
    "placed first, then drawn": (
        Step(1, ((FIRST, (PLACE, DRAW)), (FIRST, (DRAW, DRAW)))),
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
    """Total variation with one method of the chain replaced."""
    monkeypatch.setattr(DraftChain, name, wrong)
    target = target_model()
    distribution = distribution_of_steps(
        VERIFIERS.load("block")().verify, target, cut, STEPS[steps]
    )
    return oracle.total_variation(distribution, target.joint(HORIZON))


def test_a_choice_between_draws_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the larger of two draws at one position is proposed, instead of the first."""
    add = DraftChain.add

    def larger(self, base, nodes):  # noqa: ANN001, ANN202
        known = self._committed[base - self._start :]
        is_of_text = [node.token for node in nodes[: len(known)]] == known
        new = nodes[len(known) :]
        if is_of_text and new and self._nodes and new[0].token > self._nodes[0].token:
            self._nodes.clear()
        add(self, base, nodes)

    assert biased(monkeypatch, "late, and drawn anew", "add", larger) > 1e-3


def test_a_distribution_that_was_not_drawn_from_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: the node keeps its token and gets another distribution."""
    add = DraftChain.add

    def flat(self, base, nodes):  # noqa: ANN001, ANN202
        wrong = [
            ReceivedNode(
                node.token, node.distribution._replace(probs=node.distribution.probs * 0 + 0.5)
            )
            for node in nodes
        ]
        add(self, base, wrong)

    assert biased(monkeypatch, "one chain, walked", "add", flat) > 1e-3


def test_a_draw_taken_for_placed_for_its_value_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: a drawn node is proposed only where it is likely, which looks at its value."""
    chain = DraftChain.first

    def likely(self, max_nodes):  # noqa: ANN001, ANN202
        nodes = chain(self, max_nodes)
        return (
            nodes[:1]
            if len(nodes) > 1 and nodes[1].distribution is not None and nodes[1].token == 0
            else nodes
        )

    assert biased(monkeypatch, "one chain, walked", "first", likely) > 1e-3
