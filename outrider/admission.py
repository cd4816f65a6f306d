"""From a checked prompt to a `Row`: the one place where a request is refused or becomes decodable."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any

from outrider.build import Built
from outrider.errors import ConfigError, RequestError
from outrider.grammar import form_of
from outrider.rows import Row
from outrider.sampling.bans import Bans
from outrider.sampling.constraint import Constraint
from outrider.sampling.distribution import BatchSampling
from outrider.sampling.params import SamplingParams
from outrider.sampling.thinking import BehindThoughts
from outrider.sampling.words import BadWords
from outrider.stops import StopStrings
from outrider.text import Detokenizer
from outrider.thoughts import StopsBehindThoughts
from outrider.wellformed import checked_text

COMMITTED = "committed"  # origin of tokens that were emitted elsewhere


def new_row(
    built: Built,
    number: int,
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    with_text: bool,
    context: int | None = None,
    called: str = "the prompt",
    constraint: Constraint | None = None,
) -> Row:
    """A row that continues `tokens`. `with_text`: text is wanted while it runs; `context`: fewer
    tokens than the model's.

    Raises RequestError for an unusable prompt, ConfigError for sampling this vocabulary cannot
    honour.
    """
    limit = context or built.context
    vocab_size = built.target.lm.shape.vocab_size
    if not tokens:
        raise RequestError(f"{called} is empty: there is nothing to continue")
    if len(tokens) >= limit:
        raise RequestError(
            f"{called} has {len(tokens)} tokens; the context holds {limit}, one must be left to "
            "answer: shorten it"
        )
    outside = [t for t in tokens if not 0 <= t < vocab_size]
    if outside:
        raise RequestError(
            f"{called} has token id {outside[0]}, outside the vocabulary of {vocab_size}"
        )
    if params.n != 1:
        raise ConfigError(
            f"n must be 1 where one answer is made, got {params.n}: LLM.generate and the server "
            "make several"
        )
    BatchSampling.of([params], vocab_size)  # refuses ids outside the vocabulary
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ConfigError(
            f"logprobs must be at most {vocab_size}, the size of the vocabulary, got "
            f"{params.logprobs}"
        )
    eos, ends = _ends(built, params)
    return Row(
        request=number,
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=params,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        max_tokens=len(tokens) + params.limit(limit - len(tokens)),
        stop_tokens=ends,
        named_stops=ends - eos,
        detokenizer=detokenizer_for(built.target.tokenizer, tokens, params)
        if with_text or params.stop
        else None,
        stops=_stops(params),
        constraint=constraint_for(built, params, constraint),
    )


def resume(row: Row, committed: Sequence[int], vocab_size: int) -> None:
    """Bring a new row to where it stands after output tokens that were emitted elsewhere: text,
    stop strings, grammar, limits.

    Raises RequestError for tokens that this row could not have emitted.
    """
    for number, token in enumerate(committed):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"committed has token id {token}, outside the vocabulary of {vocab_size}"
            )
        if row.finish_reason is not None:
            raise RequestError(
                f"committed has {len(committed)} tokens, but the answer ends with its first "
                f"{number}"
            )
        if row.constraint is not None and not row.constraint.allowed([[]])[0, token]:
            raise RequestError(
                f"committed has token id {token} at {number}, which grammar or bans do not allow "
                "there"
            )
        row.add(token, COMMITTED)
        if row.params.logprobs is not None:
            row.logprobs.append({})  # reported where it was emitted


def checked_prediction(tokens: Sequence[int], vocab_size: int, context: int) -> list[int]:
    """For `Row.prediction`: what an answer is expected to be. Raises RequestError for one that
    cannot come true."""
    if len(tokens) > context:
        raise RequestError(
            f"the prediction has {len(tokens)} tokens; the context holds {context}, prompt and "
            "answer together: shorten it"
        )
    outside = [t for t in tokens if not 0 <= t < vocab_size]
    if outside:
        raise RequestError(
            f"the prediction has token id {outside[0]}, outside the vocabulary of {vocab_size}"
        )
    return list(tokens)


def constraint_for(
    built: Built, params: SamplingParams, grammar: Constraint | None = None
) -> Constraint | None:
    """The bans of a request's answer before its first token, around its grammar, which waits for
    thoughts to end. `grammar`: in place of one from `params`. Raises ConfigError for bad words that
    this vocabulary cannot write, or that leave none of the allowed tokens, and the errors of a
    wrong grammar."""
    vocab_size = built.target.lm.shape.vocab_size
    thinking = params.thinking
    if params.structured_outputs is not None:
        if grammar is not None:
            raise ConfigError(
                "structured_outputs together with a grammar: an answer has one form; give one of them"
            )
        grammar = built.grammars.constraint(form_of(params.structured_outputs))
    if thinking is not None and (grammar is not None or thinking.budget is not None):
        grammar = BehindThoughts(vocab_size, thinking, grammar)
    if not (params.min_tokens or params.bad_words):
        return grammar
    words = bad_words(built, params)
    ends = _ends(built, params)[1]
    only = params.allowed_token_ids
    banned = {*(words.anywhere if words else ()), *(ends if params.min_tokens else ())}
    if only is not None and banned.issuperset(only):
        raise ConfigError(
            f"{' and '.join(name for name in ('bad_words', 'min_tokens') if getattr(params, name))} forbid every token of "
            "allowed_token_ids: no token could be emitted"
        )
    return Bans(
        vocab_size, min_tokens=params.min_tokens, ends=ends, words=words, only=only, inner=grammar
    )


def bad_words(built: Built, params: SamplingParams) -> BadWords | None:
    """The words that the answer may not hold. Raises ConfigError for one that this vocabulary
    cannot write."""
    if not params.bad_words:
        return None
    words = tuple(checked_text("bad_words", word.lstrip() or word) for word in params.bad_words)
    words_ = built.bad_words.find(words, shows_specials=not params.skip_special_tokens)
    if words_.unwritten:
        raise ConfigError(
            "bad_words must hold words that tokens of this model's vocabulary write, got "
            f"{words_.unwritten[0]!r}"
        )
    return words_


def _stops(params: SamplingParams) -> StopStrings:
    after = params.min_tokens
    include = params.include_stop_str_in_output
    if params.thinking is None or not params.stop:
        return StopStrings(params.stop, after=after, include=include)
    return StopsBehindThoughts(params.stop, params.thinking, after=after, include=include)


def _ends(built: Built, params: SamplingParams) -> tuple[frozenset[int], frozenset[int]]:
    """The model's tokens that end a text, none where they are ignored; and with them those that the
    request adds."""
    eos = frozenset() if params.ignore_eos else built.target.eos_token_ids
    return eos, eos | frozenset(params.stop_token_ids)


def detokenizer_for(
    tokenizer: Any, prompt: Sequence[int], params: SamplingParams, ends: Collection[int] = ()
) -> Detokenizer:
    """A detokenizer that shows special tokens, and the tokens in `ends`, where the request wants
    them."""
    silent = () if params.include_stop_str_in_output else ends
    return Detokenizer(tokenizer, prompt, special=not params.skip_special_tokens, silent=silent)
