"""Requests that think, beside others: forms and stop strings wait, budgets are kept, and texts do
not show the drafter."""

from __future__ import annotations

import pytest

from outrider.grammar import Grammars, choice
from outrider.sampling.thinking import ThinkingMarks
from tests.helpers import EOS, byte_tokenizer
from tests.unit.engine.conftest import MakeEngine, ask, request

TOKENIZER = byte_tokenizer()
OPEN, CLOSE, DASH = TOKENIZER("<>-")["input_ids"]
MARKS = ThinkingMarks(
    opening=("<",), closing=(">",), opening_id=OPEN, closing_ids=(CLOSE,), is_open=True, budget=5
)
DASHES = {DASH: 90.0}
PROMPT = TOKENIZER("a question")["input_ids"]


@pytest.mark.parametrize("drafter", ["none", "draft-model", "ngram"])
def test_what_waits_for_the_answer(engine_of: MakeEngine, drafter: str) -> None:
    """A form, sampled; a stop string; both without a budget; and a neighbour that does not think."""
    grammars = Grammars(TOKENIZER, 257, [EOS])
    engine = engine_of(drafter=drafter, draft=drafter == "draft-model", max_num_seqs=4)

    def form() -> object:
        return grammars.constraint(choice(["yes", "no"]))

    asked = [
        request(PROMPT, thinking=MARKS, constraint=form(), logit_bias=DASHES, ignore_eos=False),
        request(
            PROMPT,
            thinking=MARKS,
            constraint=form(),
            temperature=1.0,
            seed=3,
            logit_bias={CLOSE: -50.0},
        ),
        request(PROMPT, thinking=MARKS, stop=["--"], logit_bias=DASHES),
        request(PROMPT, stop=["--"], logit_bias=DASHES),
    ]
    held, sampled, stopped, plain = ask(engine, *asked)
    assert held.text in ("----->yes", "----->no")
    assert held.finish.reason == "stop"
    assert [sampled.token_ids[5], len(sampled.token_ids) <= 10] == [CLOSE, True]
    assert sampled.text.endswith((">yes", ">no"))
    assert (stopped.text, stopped.finish.stop_reason) == ("----->", "--")
    assert (plain.text, plain.finish.stop_reason) == ("", "--")
