"""Who may draft for whom, and what becomes of logits of another width."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import CapabilityError
from outrider.models.tokens.vocabulary import check_same_vocabulary, fit_width
from tests.helpers import byte_tokenizer, word_tokenizer


def test_equal_tokenizers_pass() -> None:
    """Catches a comparison of objects instead of vocabularies."""
    check_same_vocabulary(byte_tokenizer(), byte_tokenizer(), "target", "draft")


def test_the_first_difference_is_named() -> None:
    """Catches a message from which nobody learns what differs."""
    with pytest.raises(
        CapabilityError,
        match=r"8 against 9 tokens, first difference at id 8 \(no such id against 'w8'\)",
    ):
        check_same_vocabulary(word_tokenizer(9), word_tokenizer(8), "target", "draft")


def test_widths() -> None:
    """Catches a padded id that gets mass, or a shift of all the others."""
    logits = torch.randn(2, 3, 5)
    assert fit_width(logits, 5) is logits
    assert torch.equal(fit_width(logits, 4), logits[..., :4])
    wide = fit_width(logits, 7)
    assert torch.equal(wide[..., :5], logits)
    assert wide.softmax(dim=-1)[..., 5:].sum() == 0


def test_ids_a_narrower_draft_lacks_can_be_all_that_may_be_emitted() -> None:
    """Catches a request that fails because all that is allowed lies outside the draft's table: a
    distribution there must be."""
    only = torch.tensor([float("-inf")] * 5 + [0.0, 0.0])
    for temperature in (1e-4, 1.0):
        probs = (fit_width(torch.randn(1, 5), 7) / temperature + only).softmax(dim=-1)
        assert probs[0, 5:].tolist() == [0.5, 0.5]
