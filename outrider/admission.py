"""From a checked prompt to a `Row`: the one place where a request is refused or becomes decodable."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from outrider.build import Built
from outrider.errors import ConfigError, RequestError
from outrider.rows import Row
from outrider.sampling.distribution import BatchSampling
from outrider.sampling.params import SamplingParams
from outrider.text import Detokenizer, StopStrings


def new_row(
    built: Built, number: int, tokens: Sequence[int], params: SamplingParams,
    *, with_text: bool, context: int | None = None, called: str = "the prompt",
) -> Row:  # fmt: skip
    """A row that continues `tokens`. `with_text`: text is wanted while it runs; `context`: fewer tokens than the model's.

    Raises RequestError for an unusable prompt, ConfigError for sampling this vocabulary cannot honour.
    """
    limit, vocab_size = context or built.context, built.target.lm.shape.vocab_size
    if not tokens:
        raise RequestError(f"{called} is empty: there is nothing to continue")
    if len(tokens) >= limit:
        raise RequestError(f"{called} has {len(tokens)} tokens; the context holds {limit}, one must be left to answer")
    outside = [t for t in tokens if not 0 <= t < vocab_size]
    if outside:
        raise RequestError(f"{called} has token id {outside[0]}, outside the vocabulary of {vocab_size}")
    BatchSampling.of([params], vocab_size)  # refuses ids outside the vocabulary
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ConfigError(f"logprobs must be at most {vocab_size}, the size of the vocabulary, got {params.logprobs}")
    eos = frozenset() if params.ignore_eos else built.target.eos_token_ids
    return Row(
        request=number,
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=params,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        max_tokens=min(limit, len(tokens) + params.max_tokens),
        stop_tokens=eos | frozenset(params.stop_token_ids),
        detokenizer=Detokenizer(built.target.tokenizer, tokens) if with_text or params.stop else None,
        stops=StopStrings(params.stop),
    )
