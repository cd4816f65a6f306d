"""Requests about one row: what the service must know of its text, and how its tokens are chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from outrider.remote.protocol import messages
from outrider.rows import Row


def sampling_of(row: Row, *, coupled: bool, with_probs: bool) -> messages.Sampling:
    """The sampling options for drafts of this row. `coupled`: target and draft share their noise.

    Only such a row sends its seed. A service that knew another row's seed would know the coins of the verifier, and could
    choose drafts that bias the text. So it gets a number derived from the seed, and its draws repeat, too.
    """
    params = row.params
    sampling = messages.Sampling(
        temperature=params.temperature, top_k=max(params.top_k, 0), top_p=params.top_p, min_p=params.min_p,
        repetition_penalty=params.repetition_penalty, presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty, allowed_token_ids=params.allowed_token_ids or (),
        num_prompt=row.num_prompt, seed=row.seed % 2**64 if coupled else other_seed(row.seed),
        coupled=coupled and not params.is_greedy, deterministic=not with_probs,
    )  # fmt: skip
    for token, bias in (params.logit_bias or {}).items():
        sampling.logit_bias[token] = bias
    return sampling


def other_seed(seed: int) -> int:
    """A seed that follows from `seed` and does not tell it."""
    return int.from_bytes(hashlib.blake2b(f"draft {seed}".encode(), digest_size=8).digest(), "big")


def end_of(number: int) -> messages.RowRequest:
    """The row is over."""
    return messages.RowRequest(row=number, end=True)


def row_request(
    number: int, base: int, tokens: Sequence[int], sampling: messages.Sampling | None, num_draft_tokens: int, *, outcomes: bool
) -> messages.RowRequest:
    """Tokens from `base` on, and how many nodes are wanted behind them."""
    return messages.RowRequest(
        row=number, base_length=base, tokens=tokens, sampling=sampling, num_draft_tokens=num_draft_tokens,
        prepare_outcomes=outcomes and num_draft_tokens > 0,
    )  # fmt: skip
