"""Trees of a draft model: what is drawn and what is placed, each node's own distribution, and the
model's own cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.helpers import (
    byte_tokenizer,
    disturbed,
    make_row,
    run_to_end,
    save_checkpoint,
    tiny_llama,
)

PROMPT = [5, 80, 33, 7, 80, 33]
WARM = SamplingParams(temperature=1.0)
COLD = SamplingParams(temperature=0.3)
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def decoder_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    target = tiny_llama(257, sharpness=2.0)
    for name, model in (("target", target), ("draft", disturbed(target, 0.05))):
        save_checkpoint(root / name, model, tokenizer)

    def make(num_nodes: int, **options: Any) -> Decoder:
        return build(_options(root, num_nodes, options)).decoder

    return make


def _options(root: Path, num_nodes: int, options: dict[str, Any]) -> Options:
    return Options(
        str(root / "target"),
        drafter="draft-model",
        draft=str(root / "draft"),
        drafter_options=options,
        num_draft_tokens=num_nodes,
        dtype="float32",
        threads=1,
    )


def proposed(decoder: Decoder, params: list[SamplingParams], num_nodes: int) -> Draft:
    """The first draft for rows with these parameters."""
    for number, one in enumerate(params):
        decoder.add(make_row(PROMPT, one, seed=number, number=number))
    with torch.inference_mode():
        return decoder.drafter.propose(decoder.rows, [num_nodes] * len(params))


@pytest.mark.slow
def test_warm_rows_are_drawn_and_cold_ones_placed(decoder_for: Callable[..., Decoder]) -> None:
    """Catches distributions claimed for tokens that were not drawn from them, or the switch at the
    wrong temperature."""
    draft = proposed(decoder_for(6, tree="2x2"), [WARM, COLD, GREEDY], 6)
    assert draft.lengths.tolist() == [6, 6, 6]
    assert draft.parents.tolist() == [[-1, -1, 0, 0, 1, 1]] * 3
    assert draft.sampled.tolist() == [[True] * 6, [False] * 6, [False] * 6]
    assert proposed(decoder_for(6, tree="2x2"), [COLD, GREEDY], 6).probs is None


def test_every_drawn_node_has_the_distribution_it_was_drawn_from(
    decoder_for: Callable[..., Decoder],
) -> None:
    """Catches a distribution at a neighbour's position: each is the draft model's own, run on the
    node's path alone."""
    decoder = decoder_for(6, tree="2x2")
    draft = proposed(decoder, [WARM], 6)
    lm = decoder.drafter.lm
    tokens = draft.tokens[0].tolist()
    paths = {0: [], 1: [tokens[0]], 2: [tokens[1]]}
    for output, path in paths.items():
        lm.kv.add_row()
        with torch.inference_mode():
            lm.catch_up([decoder.rows[0].tokens, [*PROMPT, *path]])
            alone = lm.forward(torch.tensor([[(PROMPT + path)[-1]]]), first_row=1).logits[0, 0]
        lm.kv.swap_remove(1)
        torch.testing.assert_close(draft.probs[0, output], alone.softmax(-1), rtol=1e-4, atol=1e-6)
    for siblings in draft.children[0]:
        assert len({tokens[node] for node in siblings}) == len(siblings), (
            "drawn without replacement"
        )


def test_a_distribution_with_fewer_tokens_than_children(
    decoder_for: Callable[..., Decoder],
) -> None:
    """Catches a draw from nothing: top-k 2 leaves no third child to draw, so a placed guess fills
    the shape."""
    decoder = decoder_for(3, tree="3")
    draft = proposed(decoder, [SamplingParams(temperature=1.0, top_k=2, max_tokens=30)], 3)
    assert draft.sampled.tolist() == [[True, True, False]]
    assert int((draft.probs[0, 0] > 0).sum()) == 2
    assert len(run_to_end(decoder)[0].output) == 30


def test_best_first_takes_the_likeliest_first_token(decoder_for: Callable[..., Decoder]) -> None:
    """Catches growth on the wrong distribution: the best single node is the draft's argmax; with
    more, products only fall."""
    one = proposed(decoder_for(1, tree="best-first"), [GREEDY], 1)
    chain = proposed(decoder_for(1), [GREEDY], 1)
    assert one.tokens.tolist() == chain.tokens.tolist()
    assert proposed(
        decoder_for(7, tree="best-first", min_gain=0), [GREEDY], 7
    ).lengths.tolist() == [7]


def test_a_smaller_budget_cuts_the_tree(decoder_for: Callable[..., Decoder]) -> None:
    """Catches a shape that ignores the room a row has: never more nodes than asked for, parents
    kept."""
    decoder = decoder_for(14, tree="2x2x2")
    for row in (WARM, GREEDY):
        decoder.add(make_row(PROMPT, row, seed=3))
    for budget in ([5, 0], [0, 3], [14, 1]):
        with torch.inference_mode():
            draft = decoder.drafter.propose(decoder.rows, budget)
        assert draft.lengths.tolist() == budget
        for row, length in enumerate(budget):
            assert all(
                parent < node for node, parent in enumerate(draft.parents[row, :length].tolist())
            )


def test_adapting_shapes_follow_what_is_kept(decoder_for: Callable[..., Decoder]) -> None:
    """Catches counts that are never used: a draft that is mostly right by its first child goes
    deeper."""
    decoder = decoder_for(6, tree="sequoia", adapt=True, sibling_acceptance="0.3,0.3,0.3")
    first = proposed(decoder, [GREEDY], 6).depths().max()
    for number in range(12):
        decoder.add(make_row(PROMPT, SamplingParams(max_tokens=60), seed=number, number=number))
    run_to_end(decoder)
    measured = decoder.drafter.plan.siblings.measured()
    assert measured[0] > 0.6 > measured[1]
    assert proposed(decoder, [GREEDY], 6).depths().max() > first
