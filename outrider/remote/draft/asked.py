"""How a row's drafts are drawn, from the message about it: checked once, when the row begins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.errors import ConfigError
from outrider.remote.protocol import messages
from outrider.sampling.params import SamplingParams


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
