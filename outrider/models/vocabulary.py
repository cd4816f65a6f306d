"""Whether a draft model speaks the target's language: the same token id must mean the same text in both.

Checkpoints of one family often pad the embedding to different widths (Qwen2.5 7B: 152064, 0.5B: 151936) around the same
tokenizer. That is harmless: ids beyond the smaller table have q = 0. A different tokenizer is not.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.errors import CapabilityError

OUTSIDE = -1e4  # logit of a token that a smaller vocabulary lacks: probability 0 beside any other, and still a number


def check_same_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """Raises CapabilityError with both sizes and the first differing token."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    by_id = ({i: t for t, i in vocab.items()} for vocab in (ours, theirs))
    left, right = by_id
    first = next(i for i in sorted(left.keys() | right.keys()) if left.get(i) != right.get(i))
    raise CapabilityError(
        f"the draft '{draft_name}' has another tokenizer than the target '{target_name}': {len(theirs)} against "
        f"{len(ours)} tokens, first difference at id {first} ({_show(right, first)} against {_show(left, first)}). "
        "Use a draft of the same model family, --drafter universal, which translates between tokenizers, or --drafter ngram, "
        "which needs no draft model."
    )


def fit_width(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits (..., V') cut or padded to the target's width V. What the draft lacks may be all that a row's grammar or its
    allowed tokens leave: so it is unlikely, not impossible."""
    width = logits.shape[-1]
    if width == vocab_size:
        return logits
    if width > vocab_size:
        return logits[..., :vocab_size]
    return F.pad(logits, (0, vocab_size - width), value=OUTSIDE)


def _show(vocab: dict[int, str], token: int) -> str:
    return repr(vocab[token]) if token in vocab else "no such id"
