"""Nodes that pay: by hand, against every number of nodes, and with their ancestors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.trees.growth import BestFirstGrowth, Child
from outrider.trees.paying import paying
from tests.helpers import save_checkpoint, word_tokenizer
from tests.unit.runtime.families import make


def test_by_hand() -> None:
    """The first node costs most. One of 0.6 alone is not worth 0.7; with one of 0.5 it is."""
    prices = [0.0, 0.7, 0.9, 1.3]
    assert paying([0.6], prices) == []
    assert paying([0.6, 0.5], prices) == [0, 1]
    assert paying([0.2, 0.6, 0.5], prices) == [1, 2]
    assert paying([0.9, 0.1, 0.1], prices) == [0]
    assert paying([0.2, 0.1], []) == [0, 1], "without prices all pay"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_number_of_nodes_gains_more(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.random() for _ in range(8)]
    prices = [0.0]
    for _ in range(8):
        prices.append(prices[-1] + rng.random() * 0.8)
    kept = paying(values, prices)
    best = sorted(values, reverse=True)
    gains = [sum(best[:count]) - prices[count] for count in range(9)]
    assert sum(values[node] for node in kept) - prices[len(kept)] == pytest.approx(max(gains))
    assert kept == sorted(kept)


def test_a_tree_keeps_the_ancestors_of_what_pays() -> None:
    growth = BestFirstGrowth(6, 2, 3, 0.0, prices=[0.0, 0.5, 0.6, 0.7, 1.2, 1.7, 2.2])
    growth.add([[Child(1, 0.9), Child(2, 0.1)]])
    growth.add([[Child(3, 0.8), Child(4, 0.2)], [Child(5, 0.9), Child(6, 0.1)]])
    kept = growth.finish()
    assert [growth.tokens[node] for node in kept] == [1, 3, 4]
    assert all(growth.parents[node] in (-1, *kept) for node in kept)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["suffix", "draft-model tree=best-first"])
def test_texts_of_a_mixture_are_those_of_plain_decoding(drafter: str, tmp_path: Path) -> None:
    """With `auto`, whose prices leave nodes out; catches a verdict about other nodes than were sent."""
    folder = save_checkpoint(
        tmp_path / "mixture", make("mixtral", torch.bfloat16, picks_all=False), word_tokenizer(97)
    )
    name, *options = drafter.split()
    settings = dict(option.split("=") for option in options)
    draft = str(folder) if name == "draft-model" else None
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    prompts = [[5, 6, 7, 5, 6, 7, 5], [11, 12, 11, 12, 30]]
    plain = LLM(str(folder), drafter="none", threads=1)
    llm = LLM(
        str(folder),
        draft=draft,
        drafter=name,
        drafter_options=settings,
        num_draft_tokens="auto:6",
        threads=1,
    )
    seen = []
    propose = llm._decoder.drafter.propose

    def watched(rows: Any, asked: list[int]) -> Any:
        seen.append(bool(rows.prices))
        return propose(rows, asked)

    llm._decoder.drafter.propose = watched  # type: ignore[method-assign]
    for prompt in prompts:
        expected, found = (
            each.generate([prompt], params, use_tqdm=False)[0] for each in (plain, llm)
        )
        assert found.token_ids == expected.token_ids
        assert found.stats.experts_per_pass is not None
    assert any(seen), "no node had a price"
