"""The Medusa drafter: which token each head guesses, rows without a feature, trees planned by
accuracies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.drafters.heads.medusa import MedusaDrafter, MedusaSettings, assumed_accuracies
from outrider.errors import ConfigError
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads
from outrider.models.signals import AFTER_NORM
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.trees.cartesian import cartesian_shape
from outrider.types import Draft, TargetOutput
from outrider.verifiers.greedy import greedy_verdict
from tests.helpers import make_row
from tests.unit.drafters.fake_target import target_logits

V = 40


def following(token: int) -> int:
    return (token * 3 + 7) % V


def clairvoyant(num_heads: int, offset: int = 2, sureness: float = 5.0) -> MedusaHeads:
    """Heads on a target whose state at a position is its token, one-hot: head i says what comes
    `offset` + i tokens later. `sureness`: the logit of what it says, the others being 0."""
    heads = MedusaHeads(MedusaConfig(V, V, num_heads))
    with torch.no_grad():
        for index, head in enumerate(heads.heads):
            head.layers[0].weight.zero_()
            head.layers[0].bias.zero_()
            head.output.weight.zero_()
            for token in range(V):
                later = token
                for _ in range(offset + index):
                    later = following(later)
                head.output.weight[later, token] = sureness
    return heads.requires_grad_(False)


def states(tokens: Tensor) -> dict[int, Tensor]:
    return {AFTER_NORM: torch.nn.functional.one_hot(tokens, V).float()}


def joined(
    drafter: MedusaDrafter, rows: Rows, prompt: list[int], params: SamplingParams | None = None
) -> None:
    """A row joins and its prompt is read, as `Decoder` does it."""
    row = make_row(prompt, params or SamplingParams(max_tokens=1000), seed=0)
    index = rows.add(row)
    drafter.start(row)
    if len(prompt) > 1:
        drafter.read(
            index, 0, {layer: hidden for layer, hidden in states(torch.tensor(prompt[:-1])).items()}
        )


def step(drafter: MedusaDrafter, rows: Rows, gamma: list[int]) -> Draft:
    """One greedy step of the loop on the toy target."""
    draft = drafter.propose(rows, gamma)
    logits = target_logits(rows, draft, following)
    fed = torch.cat([torch.tensor([[row.tokens[-1]] for row in rows]), draft.tokens], dim=1)
    verdict = greedy_verdict(draft, logits.argmax(dim=-1).tolist())
    taken = rows.append(draft, verdict, logits)
    kept = [
        [0, *(node + 1 for node in path[: n - 1])]
        for path, n in zip(verdict.lists.path, taken, strict=True)
    ]
    drafter.commit(rows, draft, verdict, TargetOutput(logits, states(fed), kept))
    return draft


@pytest.mark.parametrize("tree", ["chain", "medusa", "2x1x1", "best-first"])
def test_the_published_offset_accepts_everything(tree: str) -> None:
    """Head 0 guesses what follows the pending token, from the state of the token before it: tau =
    heads + 1, from the first step. One position off, in the heads or in the feature that is kept,
    and nothing is accepted."""
    drafter = MedusaDrafter(clairvoyant(3), MedusaSettings(tree=tree))
    rows = Rows(V, torch.device("cpu"))
    joined(drafter, rows, [3, following(3), following(following(3))])
    joined(drafter, rows, [9, following(9)])
    num_nodes = 3 if tree == "chain" else 6
    for number in range(4):
        step(drafter, rows, [num_nodes, num_nodes])
        assert [row.stats.accepted for row in rows] == [3 * (number + 1)] * 2
    for offset in (1, 3):
        wrong = MedusaDrafter(clairvoyant(3, offset), MedusaSettings(tree="chain"))
        rows = Rows(V, torch.device("cpu"))
        joined(wrong, rows, [3, following(3)])
        step(wrong, rows, [3])
        assert rows[0].stats.accepted == 0


@pytest.mark.parametrize("adapt", [False, True])
def test_best_first_trees_learn_that_unsure_heads_are_right_if_asked_to(adapt: bool) -> None:
    """Catches growths not handed on, or those of other rows: heads that give the right token 0.16
    and all others 0.02 spend six nodes on siblings, until it is seen that first guesses always
    stand."""
    drafter = MedusaDrafter(
        clairvoyant(3, sureness=2.0), MedusaSettings(tree="best-first", adapt=adapt)
    )
    rows = Rows(V, torch.device("cpu"))
    joined(drafter, rows, [3, following(3)])
    joined(drafter, rows, [9, following(9)])
    for _ in range(8):
        step(drafter, rows, [6, 6])
    before = [row.stats.accepted for row in rows]
    step(drafter, rows, [6, 6])
    assert [row.stats.accepted - old for row, old in zip(rows, before, strict=True)] == (
        [3, 3] if adapt else [2, 2]
    )


def test_a_row_without_a_feature_drafts_after_its_first_step() -> None:
    """A prompt of one token has been fed nothing: no state, no draft, and no crash beside a row
    that has one."""
    drafter = MedusaDrafter(clairvoyant(2), MedusaSettings())
    rows = Rows(V, torch.device("cpu"))
    joined(drafter, rows, [5])
    assert step(drafter, rows, [2]).num_nodes == 0
    joined(drafter, rows, [7])
    assert step(drafter, rows, [2, 2]).lengths.tolist() == [2, 0]
    assert step(drafter, rows, [2, 1]).lengths.tolist() == [2, 1]
    assert [row.stats.accepted for row in rows] == [4, 1]


def test_rows_leave_by_swap_remove() -> None:
    """Catches features that stay behind when the last row moves."""
    drafter = MedusaDrafter(clairvoyant(2), MedusaSettings())
    rows = Rows(V, torch.device("cpu"))
    for first in (3, 9, 14):
        joined(drafter, rows, [first, following(first)])
    drafter.stop(0)
    rows.swap_remove(0)
    step(drafter, rows, [2, 2])
    assert [row.stats.accepted for row in rows] == [2, 2]


def test_warm_trees_are_drawn_and_cold_ones_placed() -> None:
    drafter = MedusaDrafter(clairvoyant(2), MedusaSettings(tree="medusa"))
    rows = Rows(V, torch.device("cpu"))
    for temperature in (1.0, 0.3, 0.0):
        joined(drafter, rows, [3, following(3)], SamplingParams(temperature=temperature))
    draft = drafter.propose(rows, [4, 4, 4])
    assert draft.sampled.tolist() == [[True] * 4, [False] * 4, [False] * 4]


def test_cartesian_trees_take_the_likeliest_paths() -> None:
    """By hand: 0.6, 0.36, 0.3 (= 0.6 * 0.5), 0.3 (rank 1), ... ; later heads are less sure than
    early ones."""
    shape = cartesian_shape(((0.6, 0.3), (0.5, 0.1)), 4)
    assert shape.parents == (-1, -1, 0, 1)
    assert cartesian_shape(((0.6, 0.3), (0.5, 0.1)), 99).parents == (-1, -1, 0, 0, 1, 1)
    # measured ranks may be out of order
    assert cartesian_shape(((0.3, 0.6),), 2).parents == (-1, -1)
    assert cartesian_shape(((0.6, 0.0), (0.0,)), 9).parents == (-1,)
    assert assumed_accuracies((0.5, 0.25), 2) == ((0.5, 0.25), (0.4, 0.2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tree": "medusa", "adapt": True}, "planned once"),
        ({"tree": "medusa", "stop": "entropy"}, "is for chains"),
        ({"tree": "medusa", "top_k": 0}, "top_k"),
        ({"tree": "cartesian"}, "medusa|chain"),
        ({"stop_below": 2.0}, "stop_below"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MedusaSettings(**settings)
