"""Whether a draft model speaks the target's language: the same token id must mean the same text in
both.

Checkpoints of one family often pad the embedding to different widths (Qwen2.5 7B: 152064, 0.5B:
151936) around the same tokenizer. That is harmless: ids beyond the smaller table have q = 0. So are
tokens that one of the two lacks while all ids that both have say the same (QwQ has two more than
Qwen2.5 0.5B): they are never drafted. A different tokenizer is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import CapabilityError, CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LACKING = 0.1  # share of the larger vocabulary that one of the two may lack
# logit of a token that a smaller vocabulary lacks: probability 0 alongside any other, and still a
# number
OUTSIDE = -1e4
# the fields of config.json that name a mask token: PARD's, and the one of other parallel drafts
MASK_TOKENS = ("pard_token", "ptd_token_id")


def tokens_of_one(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
) -> dict[int, str] | None:
    """Tokens that only one of two tokenizers has, by id; None where an id says something else, or
    one lacks too many."""
    ours, theirs = (
        {token: text for text, token in vocabulary.get_vocab().items()}
        for vocabulary in (target, draft)
    )
    if any(ours[token] != theirs[token] for token in ours.keys() & theirs.keys()):
        return None
    tokens = {
        token: ours.get(token) or theirs[token] for token in sorted(ours.keys() ^ theirs.keys())
    }
    return tokens if len(tokens) <= MAX_LACKING * max(len(ours), len(theirs)) else None


def never_draft(module: Any, tokens: Iterable[int]) -> None:
    """Give these ids a logit of OUTSIDE in the module, whatever runs it: a bias of its output
    layer."""
    head = module.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0], dtype=head.weight.dtype, device=head.weight.device)
    if head.bias is not None:
        bias += head.bias
    bias[[token for token in tokens if token < len(bias)]] = OUTSIDE
    head.bias = nn.Parameter(bias, requires_grad=False)


def check_same_vocabulary(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    target_name: str,
    draft_name: str,
    *,
    may_lack: bool = False,
) -> None:
    """Raises CapabilityError with both sizes and the first differing token. `may_lack`: see
    `tokens_of_one`."""
    ours = target.get_vocab()
    theirs = draft.get_vocab()
    if ours == theirs or (may_lack and tokens_of_one(target, draft) is not None):
        return
    by_id = ({i: t for t, i in vocab.items()} for vocab in (ours, theirs))
    left, right = by_id
    first = next(i for i in sorted(left.keys() | right.keys()) if left.get(i) != right.get(i))
    raise CapabilityError(
        f"the draft '{draft_name}' has another tokenizer than the target '{target_name}': "
        f"{len(theirs)} against "
        f"{len(ours)} tokens, first difference at id {first} ({_show(right, first)} against "
        f"{_show(left, first)}). "
        "Use a draft of the same model family, --drafter universal, which translates between "
        "tokenizers, or --drafter ngram, "
        "which needs no draft model."
    )


def mask_token_in(
    values: Mapping[str, Any], vocab_size: int, what: str, names: Iterable[str] = MASK_TOKENS
) -> int | None:
    """The mask token that the values of a config name; None: they name none.

    Raises CheckpointError for one outside a vocabulary of this size. `what`: whose config it is.
    """
    name = next((name for name in names if values.get(name) is not None), None)
    if name is None:
        return None
    token = values[name]
    if type(token) is int and 0 <= token < vocab_size:
        return token
    raise CheckpointError(
        f"{what}: config.json names mask token {token!r} ({name}), but its vocabulary has the ids "
        f"0 to {vocab_size - 1}: set {name} to the id that it was trained with, or remove it to "
        "draft token by token"
    )


def fit_width(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits (..., V') cut or padded to the target's width V. What the draft lacks may be all
    that a row's grammar or its allowed tokens leave: so it is unlikely, not impossible."""
    width = logits.shape[-1]
    if width == vocab_size:
        return logits
    if width > vocab_size:
        return logits[..., :vocab_size]
    return F.pad(logits, (0, vocab_size - width), value=OUTSIDE)


def _show(vocab: dict[int, str], token: int) -> str:
    return repr(vocab[token]) if token in vocab else "no such id"
