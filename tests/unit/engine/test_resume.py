"""A request that goes on behind tokens of another engine gets the text of one engine, wherever it
was cut."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.engine.engine import Engine
from outrider.engine.request import Request, Speculation
from outrider.errors import RequestError
from outrider.grammar import Grammars, regex
from outrider.sampling.params import SamplingParams
from tests.helpers import EOS
from tests.unit.engine.conftest import Answer, MakeEngine, ask, prompt

TOKENS = prompt(40, 3)
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


def asked(name: str, committed: list[int], grammar: Any = None, **params: Any) -> Request:
    params = {"max_tokens": 24, "ignore_eos": True, **params}
    return Request(
        id=name,
        prompt=TOKENS,
        params=SamplingParams(**params),
        committed=committed,
        constraint=grammar,
        prompt_logprobs=params.get("logprobs"),
    )


def answered(
    engine: Engine, name: str, committed: list[int], grammar: Any = None, **params: Any
) -> Answer:
    return ask(engine, asked(name, committed, grammar, **params))[0].wait()


def logprobs_of(answer: Answer) -> list[dict[int, float]]:
    return [entry for update in answer.updates for entry in update.logprobs]


def pieces(answer: Answer) -> list[str]:
    return [piece for update in answer.updates for piece in update.pieces]


def stop_spanning(text: str) -> str:
    """Three characters in the middle of a text: bytes are tokens, so a stop string spans tokens."""
    middle = len(text) // 2
    return text[middle : middle + 3]


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED,
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "seeded penalties": {**SEEDED, "frequency_penalty": 0.7},
    "logprobs": {"logprobs": 3},
    "bad words": {"bad_words": ["a", "e"], **SEEDED},
    "end tokens": {"ignore_eos": False, "min_tokens": 9, "logit_bias": {EOS: 30.0}},
    "minimum": {
        "ignore_eos": False,
        "min_tokens": 5,
        "max_tokens": 12,
        "logit_bias": {EOS: 5.0},
        **SEEDED,
    },
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_text_may_be_cut_anywhere(engine_of: MakeEngine, case: str) -> None:
    """Tokens, text, log-probabilities, the reason of the end and what ended it, for every cut and
    both engines warm or cold."""
    params = CASES[case]
    first = engine_of()
    second = engine_of(drafter="ngram", draft=False)
    whole = answered(first, "whole", [], **params)
    tokens = whole.token_ids
    for cut in range(len(tokens) + 1):
        rest = answered(second, f"cut {cut}", tokens[:cut], **params)
        assert rest.token_ids == tokens[cut:], f"cut at {cut}"
        assert "".join(pieces(whole)[:cut]) + rest.text == whole.text
        assert logprobs_of(rest) == logprobs_of(whole)[cut:]
        assert (rest.finish.reason, rest.finish.stop_reason) == (
            whole.finish.reason,
            whole.finish.stop_reason,
        )
        assert rest.finish.stats.emitted == len(tokens) - cut
        assert rest.finish.prompt_tokens == len(TOKENS)


def test_characters_are_split_over_the_cut(engine_of: MakeEngine) -> None:
    """The case above is worth nothing unless some cut falls into a character: bytes are tokens
    here."""
    whole = answered(engine_of(), "whole", [], **SEEDED)
    assert "" in pieces(whole)[:-1]


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_stop_strings_span_the_cut(engine_of: MakeEngine, sampling: dict[str, Any]) -> None:
    """Text that is held back on one side decides on the other."""
    first = engine_of()
    second = engine_of()
    text = answered(first, "free", [], **sampling).text
    for include in (False, True):
        params = {**sampling, "stop": [stop_spanning(text)], "include_stop_str_in_output": include}
        whole = answered(first, "whole", [], **params)
        assert whole.finish.reason == "stop"
        for cut in range(len(whole.token_ids) + 1):
            rest = answered(second, f"cut {cut}", whole.token_ids[:cut], **params)
            assert "".join(pieces(whole)[:cut]) + rest.text == whole.text, f"cut at {cut}"
            assert rest.finish.stop_reason == whole.finish.stop_reason


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_grammars_go_on(engine_of: MakeEngine, sampling: dict[str, Any]) -> None:
    """A pattern half matched on one side is finished on the other."""
    first = engine_of()
    second = engine_of()
    grammars = Grammars(first.tokenizer, first.vocab_size, first.eos_token_ids)
    spec = regex("[a-f]{4}-[0-9]{3}(x|yz)")
    params = {**sampling, "ignore_eos": False}
    whole = answered(first, "whole", [], grammars.constraint(spec), **params)
    for cut in range(len(whole.token_ids) + 1):
        rest = answered(
            second, f"cut {cut}", whole.token_ids[:cut], grammars.constraint(spec), **params
        )
        assert rest.token_ids == whole.token_ids[cut:]
        assert "".join(pieces(whole)[:cut]) + rest.text == whole.text
        assert rest.finish.reason == "stop"


def test_long_answers_are_read_as_they_were_written(engine_of: MakeEngine) -> None:
    """More committed tokens than one pass reads, behind a prompt of more than a chunk."""
    first = engine_of()
    second = engine_of()
    tokens = prompt(300, 5)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    whole = ask(first, Request(id="whole", prompt=tokens, params=params))[0].token_ids
    for cut in (1, 24, 25, 99, 149):
        again = Request(id=f"cut {cut}", prompt=tokens, params=params, committed=whole[:cut])
        assert ask(second, again)[0].token_ids == whole[cut:]


def test_a_sampled_text_without_a_seed_goes_on(engine_of: MakeEngine) -> None:
    """Its distribution is what counts; it ends where it should."""
    engine = engine_of()
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
    free = Speculation(invariant=False)
    whole = ask(engine, Request(id="whole", prompt=TOKENS, params=params, speculation=free))[0]
    again = Request(
        id="rest", prompt=TOKENS, params=params, speculation=free, committed=whole.token_ids[:10]
    )
    rest = ask(engine, again)[0]
    assert len(rest.token_ids) == 14
    assert not rest.finish.reproducible


def test_nothing_is_read_where_all_was_emitted(engine_of: MakeEngine) -> None:
    """The end lies exactly at the cut: one update, which is the finish."""
    engine = engine_of()
    whole = answered(engine, "whole", [])
    rest = answered(engine, "rest", whole.token_ids)
    assert [update.token_ids for update in rest.updates] == [[]]
    assert rest.finish.reason == "length"
    assert rest.finish.stats.steps == 0


@pytest.mark.parametrize(
    ("committed", "params", "message"),
    [
        ([5, 999], {}, "token id 999, outside the vocabulary"),
        ([5, -1], {}, "outside the vocabulary"),
        ([5] * 25, {}, "the answer ends with its first 24"),
        ([5, EOS, 7], {"ignore_eos": False}, "the answer ends with its first 2"),
        ([EOS], {"ignore_eos": False, "min_tokens": 3}, "bans do not allow"),
    ],
)
def test_impossible_beginnings_are_refused(
    engine_of: MakeEngine, committed: list[int], params: dict[str, Any], message: str
) -> None:
    """Before anything runs."""
    with pytest.raises(RequestError, match=message):
        engine_of().submit(asked("no", committed, **params), Answer())


def test_grammars_refuse_what_they_never_allowed(engine_of: MakeEngine) -> None:
    """Tokens of another grammar, or of none."""
    engine = engine_of()
    grammars = Grammars(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)
    wrong = engine.tokenizer("zz")["input_ids"]
    with pytest.raises(RequestError, match="grammar or bans"):
        engine.submit(
            asked("no", wrong, grammars.constraint(regex("[a-f]{4}")), ignore_eos=False), Answer()
        )


def test_prompt_logprobs_are_of_the_prompt_alone(engine_of: MakeEngine) -> None:
    """Whoever asks for them again gets the same ones."""
    engine = engine_of()
    whole = answered(engine, "whole", [], logprobs=2)
    rest = answered(engine, "rest", whole.token_ids[:7], logprobs=2)
    assert rest.updates[0].prompt_logprobs == whole.updates[0].prompt_logprobs
    assert len(rest.updates[0].prompt_logprobs or []) == len(TOKENS)
