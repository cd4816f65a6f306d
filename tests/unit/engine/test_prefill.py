"""Prompts that are read sparsely, alongside others that are not."""

from __future__ import annotations

from dataclasses import replace

from outrider import LLM, SamplingParams
from tests.unit.engine.conftest import MakeEngine, ask, prompt, request

KEEP = "keep=0.3 draft=early:1"
LONG = 700  # tokens


def test_prompts_are_read_in_turns_and_share_nothing(engine_of: MakeEngine) -> None:
    """Two texts are those of `LLM`; nothing sparse comes from the pool or goes there."""
    engine = engine_of(drafter="ngram", draft=False, prefill=KEEP)
    prompts = [prompt(LONG, 1), prompt(LONG, 1), prompt(300, 2)]
    asked = [ask(engine, request(tokens))[0] for tokens in prompts]
    answers = [answer.wait() for answer in asked]
    with LLM(engine.config["target"], drafter="none", prefill=KEEP) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        ids = [{"prompt_token_ids": tokens} for tokens in prompts]
        expected = llm.generate(ids, params, use_tqdm=False)
    assert [answer.token_ids for answer in answers] == [done.token_ids for done in expected]
    finishes = [answer.finish for answer in answers]
    assert [finish.lossless for finish in finishes] == [False] * 3
    assert [finish.prompt_share for finish in finishes] == [done.prompt_share for done in expected]
    assert finishes[0].prompt_share < 0.4 < finishes[2].prompt_share == 1
    assert [finish.cached_tokens for finish in finishes] == [0, 0, 0]
    assert not engine.lossless
    # what was read whole is kept
    again = [ask(engine, request(tokens))[0].finish.cached_tokens for tokens in prompts]
    assert again[:2] == [0, 0]
    assert again[2] > 0


def test_an_answer_continues_elsewhere(engine_of: MakeEngine) -> None:
    """The prompt is read sparsely again, the answer's beginning whole."""
    engine = engine_of(drafter="ngram", draft=False, prefill=KEEP)
    asked = request(prompt(LONG, 1))
    whole = ask(engine, asked)[0].wait().token_ids
    resumed = replace(asked, id="resumed", committed=whole[:9])
    assert ask(engine, resumed)[0].wait().token_ids == whole[9:]


def test_rows_that_leave_and_come_back(engine_of: MakeEngine) -> None:
    """A row that waits for a more urgent one continues at its place in the text."""
    engine = engine_of(drafter="ngram", draft=False, prefill=KEEP, max_num_seqs=1)
    slow = request(prompt(LONG, 1), max_tokens=200)
    alone = ask(engine, slow)[0].wait().token_ids
    first = ask(engine, replace(slow, id="first"))[0]
    assert first.begun.wait(60)
    ask(engine, request(prompt(LONG, 3), priority=-1))[0].wait()
    assert first.finish.preemptions == 1
    assert first.token_ids == alone


def test_prompts_whose_log_probabilities_are_asked_for_are_read_whole(
    engine_of: MakeEngine,
) -> None:
    engine = engine_of(drafter="ngram", draft=False, prefill=KEEP)
    done = ask(engine, request(prompt(LONG), prompt_logprobs=1))[0].wait()
    assert done.finish.prompt_share == 1
