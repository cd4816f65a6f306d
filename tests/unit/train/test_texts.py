"""Texts: what counts in a batch, cutting, holding out by prompt, one order for a seed."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError
from outrider.train.texts import TrainingText, collate, epoch_order, fitting, split, token_counts
from tests.unit.train.material import texts


def test_the_mask_is_that_of_the_legend() -> None:
    """recipe.py: the prompt's last token counts, the text's last does not; padding never."""
    batch = collate(
        [TrainingText("a", [1, 2], [3, 4]), TrainingText("b", [5], [6, 7, 8, 9])],
        [0, 1],
        torch.device("cpu"),
    )
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 0], [5, 6, 7, 8, 9]]
    assert batch.mask.tolist() == [
        [False, True, True, False, False],
        [True, True, True, True, False],
    ]
    assert batch.lengths.tolist() == [4, 5]


def test_every_text_once_an_epoch_and_another_order_each() -> None:
    """A text lost at the end of an epoch, or the same order for ever."""
    chosen = texts(37)
    first, second = (epoch_order(chosen, 4, 0, epoch) for epoch in (0, 1))
    assert sorted(number for batch in first for number in batch) == list(range(37))
    assert first != second
    assert first == epoch_order(chosen, 4, 0, 0)
    assert first != epoch_order(chosen, 4, 1, 0)
    assert len(first) == len(second)


def test_texts_of_one_prompt_stay_on_one_side() -> None:
    """Two samples of a prompt on both sides would make validation a memory test."""
    double = [
        TrainingText(f"{t.id}/{n}", t.prompt, t.response) for t in texts(10) for n in range(2)
    ]
    train, held_out = split(double, 0.3, 0)
    assert {tuple(t.prompt) for t in train}.isdisjoint(tuple(t.prompt) for t in held_out)
    assert len(held_out) == 6
    with pytest.raises(ConfigError, match="two different prompts"):
        split(double[:2], 0.3, 0)


def test_cutting() -> None:
    """Long texts lose their end; texts without a response left are dropped, and an error names a
    file with none left."""
    kept = fitting([TrainingText("a", [1, 2], [3, 4, 5]), TrainingText("b", [1, 2, 3], [4, 5])], 4)
    assert [(t.id, t.response) for t in kept] == [("a", [3, 4])]
    with pytest.raises(ConfigError, match="max_length = 3"):
        fitting(kept, 3)


def test_counts_are_of_responses() -> None:
    """Prompt tokens do not have to be drafted."""
    assert token_counts([TrainingText("a", [0, 0], [1, 1, 2])], 4).tolist() == [0, 2, 1, 0]
