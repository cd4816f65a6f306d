"""How a row's tokens are chosen, as the asker sends and the service reads it: checked once, when the row begins."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from outrider.errors import ConfigError
from outrider.remote.protocol import messages
from outrider.rows import Row
from outrider.sampling.params import SamplingParams

MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, where a top-k does nothing


def sampling_of(row: Row, *, coupled: bool, with_probs: bool) -> messages.Sampling:
    """The sampling options for drafts of this row. `coupled`: target and draft share their noise.

    Only such a row sends its seed. A service that knew another row's seed would know the coins of the verifier, and could
    choose drafts that bias the text. So it gets a number derived from the seed, and its draws repeat, too.
    """
    params = row.params
    sampling = messages.Sampling(
        temperature=params.temperature, top_k=min(max(params.top_k, 0), MAX_TOP_K), top_p=params.top_p, min_p=params.min_p,
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


@dataclass(frozen=True)
class RowOptions:
    """The fields of `Sampling` in the library's form."""

    params: SamplingParams  # of the draft's distribution, which is cut to its likeliest tokens by top_k
    seed: int
    coupled: bool
    num_prompt: int


def row_options(sampling: messages.Sampling, vocab_size: int, distribution_tokens: int) -> RowOptions:
    """The options of one row; top_p and repetition_penalty may be left out (0: off). Raises ConfigError for a value out of range.

    A drawn row's distribution is cut to `distribution_tokens` by its top-k, before anything is drawn. A deterministic row gets no
    distributions and is drafted greedily, because a one-hot draft is kept most often at the likeliest token.
    """
    params = SamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p or 1.0, min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or 1.0, presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias={token: bias for token, bias in sampling.logit_bias.items() if token < vocab_size} or None,
        allowed_token_ids=_allowed(sampling, vocab_size),
    )  # fmt: skip
    if sampling.deterministic and not sampling.coupled:
        params = replace(params, temperature=0.0)
    elif not sampling.coupled and not params.is_greedy:
        params = replace(params, top_k=min(distribution_tokens, params.top_k) if params.top_k > 0 else distribution_tokens)
    return RowOptions(params, sampling.seed, sampling.coupled, sampling.num_prompt)


def _allowed(sampling: messages.Sampling, vocab_size: int) -> list[int] | None:
    """Allowed tokens within the draft's vocabulary; None: all. A target's padded vocabulary may be wider."""
    asked = list(sampling.allowed_token_ids)
    known = [token for token in asked if token < vocab_size]
    if asked and not known:
        raise ConfigError(f"no allowed token is below {vocab_size}, the width of the draft's vocabulary: nothing can be drafted")
    return known or None
