"""Requests with a prediction, beside others, whatever drafts there usually; and predictions given
to `LLM`."""

from __future__ import annotations

import pytest

from outrider import LLM
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, RequestError
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer
from tests.unit.engine.conftest import MakeEngine, Models, ask, prompt, request

LENGTH = 48


@pytest.fixture(scope="module")
def plain_texts(models: Models) -> list[list[int]]:
    """Plain decoding's answers to four prompts."""
    llm = LLM(models.target, drafter="none")
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    return [
        done.token_ids for done in llm.generate([prompt(20, seed) for seed in range(4)], params)
    ]


def edited(tokens: list[int]) -> list[int]:
    """Another token in the middle."""
    return [*tokens[:20], tokens[20] % 256 + 1, *tokens[21:]]


@pytest.mark.parametrize(
    ("drafter", "extra", "length"),
    [
        ("none", (), 4),
        ("draft-model", ("suffix",), 4),
        ("ngram", (), "1:5,3:2"),
        pytest.param("draft-model", (), "auto", marks=pytest.mark.slow),
    ],
)
def test_predicted_rows_beside_others(
    engine_of: MakeEngine,
    plain_texts: list[list[int]],
    drafter: str,
    extra: tuple[str, ...],
    length: object,
) -> None:
    """Right, nearly right, wrong, none, and off: five texts as if nothing was predicted, and each
    drafted for as it asked."""
    engine = engine_of(
        drafter=drafter,
        extra=extra,
        draft=drafter == "draft-model",
        num_draft_tokens=length,
        max_num_seqs=3,
    )
    predictions = [plain_texts[0], edited(plain_texts[1]), plain_texts[1], None]
    asked = [
        request(prompt(20, seed), max_tokens=LENGTH, prediction=prediction)
        for seed, prediction in enumerate(predictions)
    ]
    off = request(
        prompt(20, 0),
        max_tokens=LENGTH,
        prediction=plain_texts[0],
        speculation=Speculation(mode="off"),
    )
    answers = ask(engine, *asked, off)
    assert [answer.token_ids for answer in answers] == [*plain_texts, plain_texts[0]]
    right, near, wrong, none, plain = (answer.finish for answer in answers)
    assert [one.drafter for one in (right, near, wrong)] == ["prediction"] * 3
    assert (none.drafter, plain.drafter, plain.stats.drafted) == (drafter, drafter, 0)
    assert all(one.reproducible and one.lossless for one in (right, near, wrong))
    if length == 4:
        assert right.stats.accepted == right.stats.drafted
        assert right.stats.steps == -(-LENGTH // 8)
        assert near.stats.accepted >= LENGTH - 14
        assert wrong.stats.accepted < near.stats.accepted / 2


def test_seeded_texts_do_not_show_a_prediction(
    engine_of: MakeEngine, plain_texts: list[list[int]]
) -> None:
    """Sampled with a seed: the prediction of something else, and of itself."""
    engine = engine_of(max_num_seqs=4)
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": LENGTH}
    plain = ask(engine, request(prompt(20, 0), speculation=Speculation(mode="off"), **sampling))[
        0
    ].token_ids
    for prediction in (plain_texts[0], plain):
        answer = ask(engine, request(prompt(20, 0), prediction=prediction, **sampling))[0]
        assert answer.token_ids == plain
    assert answer.finish.stats.accepted > LENGTH / 2


def test_lengths_are_the_requests_own(engine_of: MakeEngine, plain_texts: list[list[int]]) -> None:
    """A bound, a number, more than the usual drafter's, and more than there can be."""
    engine = engine_of(max_num_seqs=1)
    kinds = [
        Speculation(max_draft_tokens=2),
        Speculation(mode="fixed", max_draft_tokens=15),
        Speculation(drafter="prediction"),
    ]
    answers = ask(
        engine,
        *(
            request(prompt(20, 0), max_tokens=LENGTH, prediction=plain_texts[0], speculation=kind)
            for kind in kinds
        ),
    )
    assert [answer.finish.stats.steps for answer in answers] == [
        LENGTH // 3,
        LENGTH // 16,
        LENGTH // 8,
    ]
    with pytest.raises(ConfigError, match="at most 31"):
        ask(
            engine, request(prompt(5), prediction=[1], speculation=Speculation(max_draft_tokens=32))
        )


def test_a_preempted_row_finds_its_position_again(engine_of: MakeEngine, models: Models) -> None:
    """It left in the middle of the prediction; a more urgent request took its place."""
    params = SamplingParams(max_tokens=240, ignore_eos=True)
    [plain] = LLM(models.target, drafter="none").generate(prompt(20, 0), params)
    engine = engine_of(drafter="none", draft=False, max_num_seqs=1)
    asked = request(
        prompt(20, 0),
        max_tokens=240,
        priority=1,
        prediction=edited(plain.token_ids),
        speculation=Speculation(max_draft_tokens=1),
    )
    slow = ask(engine, asked)[0]
    assert slow.begun.wait(30)
    ask(engine, request(prompt(12, 2), priority=0, max_tokens=4))[0].wait()
    assert slow.token_ids == plain.token_ids
    assert slow.finish.preemptions == 1
    assert slow.finish.stats.steps < 130


@pytest.mark.parametrize(
    ("prediction", "message"),
    [([1] * 3000, "prediction has 3000 tokens.*: shorten it"), ([1, 257], "token id 257")],
)
def test_what_cannot_come_true_is_refused(
    engine_of: MakeEngine, prediction: list[int], message: str
) -> None:
    engine = engine_of(drafter="ngram", draft=False)
    with pytest.raises(RequestError, match=message):
        ask(engine, request(prompt(5), prediction=prediction))


def test_another_drafter_beside_a_prediction_is_refused(engine_of: MakeEngine) -> None:
    engine = engine_of(drafter="ngram", extra=("suffix",), draft=False)
    with pytest.raises(ConfigError, match="'suffix' together with a prediction"):
        ask(engine, request(prompt(5), prediction=[1], speculation=Speculation(drafter="suffix")))
    with pytest.raises(ConfigError, match="not loaded here"):
        ask(engine, request(prompt(5), speculation=Speculation(drafter="prediction")))


# ---------------------------------------------------------------- LLM


def test_llm_takes_a_text_or_tokens_for_each_prompt(
    models: Models, plain_texts: list[list[int]]
) -> None:
    llm = LLM(models.target, drafter="prediction")
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    prompts = [prompt(20, seed) for seed in range(4)]
    text = byte_tokenizer().decode(plain_texts[0])
    found = llm.generate(prompts, params, prediction=[text, plain_texts[1], None, []])
    assert [one.token_ids for one in found] == plain_texts
    assert found[1].stats.steps == LENGTH // 16
    assert found[0].stats.drafted > 0
    assert [one.stats.drafted for one in found[2:]] == [0, 0]
    [again] = llm.generate(prompts[1], params, prediction=plain_texts[1])
    assert again.stats.steps == LENGTH // 16
    *_, last = llm.stream(prompts[1], params, prediction=plain_texts[1])
    assert last.completion is not None
    assert last.completion.token_ids == plain_texts[1]
    assert last.completion.stats.steps == LENGTH // 16


def test_llm_refuses_what_would_be_ignored(models: Models) -> None:
    llm = LLM(models.target, drafter="ngram")
    with pytest.raises(ConfigError, match="'ngram' does not look at a prediction"):
        llm.generate(prompt(5), prediction="x")
    with pytest.raises(ConfigError, match="'ngram' does not look at a prediction"):
        llm.stream(prompt(5), prediction="x")
    follower = LLM(models.target, drafter="prediction")
    with pytest.raises(ConfigError, match="2 predictions for 1 prompts"):
        follower.generate([prompt(5)], prediction=["x", "y"])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        follower.generate([prompt(5)], prediction=[300])


def test_a_composite_goes_on_with_another_part(
    models: Models, plain_texts: list[list[int]]
) -> None:
    """Half of the answer is predicted; the draft model says the rest."""
    options = {"parts": "draft-model,prediction"}
    llm = LLM(models.target, drafter="composite", draft=models.draft, drafter_options=options)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    [done] = llm.generate(prompt(20, 0), params, prediction=plain_texts[0][: LENGTH // 2])
    assert done.token_ids == plain_texts[0]
    assert done.stats.accepted > LENGTH // 2
