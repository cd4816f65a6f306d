"""/v1/completions over a scripted engine: every field is honoured, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import NumericalError
from outrider.serve.schema.answers import CompletionAnswer
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import error_of, events, serving

URL = "/v1/completions"


def ask(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    with serving(engine) as client:
        response = client.post(
            URL, json={"model": "fake", "prompt": "Say", "max_tokens": 50, **fields}
        )
        assert response.status_code == 200, response.text
        CompletionAnswer.model_validate_json(response.text, strict=True)
        return response.json()


def test_answer_has_openais_shape() -> None:
    answer = ask(FakeEngine(cached=2))
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["id"].startswith("cmpl-")
    choice = {
        "index": 0,
        "text": "Hello, world",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert answer["choices"] == [choice]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 13,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_speculation_is_counted_in_vllms_names() -> None:
    """13 tokens in steps of two, the last of one: 7 steps, 6 accepted of 21 drafted."""
    answer = ask(FakeEngine())
    assert answer["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 6 / 7,
        "draft_acceptance_rate": 6 / 21,
        "acceptance_histogram": [1, 6, 0, 0],
        "num_spec_steps": 7,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 21,
        "num_spec_tokens": 3,
    }
    timing = {
        "queued_s": 0.0,
        "prefill_s": 0.0,
        "ttft_s": 0.25,
        "decode_s": 0.75,
        "tpot_s": 0.75 / 11,
        "decode_tokens_per_s": 11 / 0.75,
        "tokens_per_s": 13.0,
    }
    assert answer["metrics"]["timing"] == timing


def test_timings_are_those_of_llama_cpp_s_server() -> None:
    """By these names its speed-bench client and web page read speeds and acceptance."""
    assert ask(FakeEngine(cached=2))["timings"] == {
        "cache_n": 2,
        "prompt_n": 1,
        "prompt_ms": 0.0,
        "prompt_per_token_ms": 0.0,
        "prompt_per_second": None,
        "predicted_n": 13,
        "predicted_ms": 1000.0,
        "predicted_per_token_ms": pytest.approx(1000 / 13),
        "predicted_per_second": 13.0,
        "draft_n": 21,
        "draft_n_accepted": 6,
    }
    plain = ask(FakeEngine(), speculation={"mode": "off"})["timings"]
    assert "draft_n" not in plain, "as there: only where something was drafted"


@pytest.mark.parametrize(
    ("wish", "number"),
    [
        ({"mode": "fixed", "max_draft_tokens": 2}, 2),
        ({"max_draft_tokens": 2}, 2),
        ({"drafter": "draft-model"}, 3),
        ({"drafter": "ngram"}, None),
        ({}, 3),
    ],
)
def test_the_number_of_draft_tokens_is_the_one_that_was_asked_for(
    wish: dict[str, Any], number: int | None
) -> None:
    """The server's own is about its first drafter, and about requests that name no other number."""
    found = ask(FakeEngine(), speculation=wish)["metrics"]["speculative_decoding"]
    assert found["num_spec_tokens"] == number


def test_defaults_are_openais() -> None:
    engine = FakeEngine()
    with serving(engine) as client:
        client.post(URL, json={"prompt": "Say"})
    params = engine.seen[0].params
    assert (params.temperature, params.max_tokens, params.top_p, params.seed) == (
        1.0,
        16,
        1.0,
        None,
    )
    assert engine.seen[0].timeout_s == 600


def test_every_sampling_field_reaches_the_engine() -> None:
    engine = FakeEngine()
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "allowed_token_ids": [1, 2],
        "max_tokens": 9,
        "stop_token_ids": [3],
        "ignore_eos": True,
    }
    ask(engine, **fields, seed=-1, stop="x", logit_bias={"5": -100}, priority=-4, logprobs=2)
    params = engine.seen[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.seed, params.stop, params.logit_bias, params.logprobs) == (
        2**64 - 1,
        ["x"],
        {5: -100},
        2,
    )
    assert engine.seen[0].priority == -4


@pytest.mark.parametrize("prompt", ["Say", ["Say"], [51, 65, 89], [[51, 65, 89]]])
def test_prompts_come_in_four_forms(prompt: Any) -> None:
    engine = FakeEngine()
    ask(engine, prompt=prompt)
    assert [request.prompt for request in engine.seen] == [engine.tokenizer("Say")["input_ids"]]


def test_several_prompts_and_answers_are_numbered_prompt_by_prompt() -> None:
    engine = FakeEngine(reply=lambda request: f"{len(request.prompt)}/{request.params.seed}")
    answer = ask(engine, prompt=["a", "bc"], n=2, seed=10)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "1/10"),
        (1, "1/11"),
        (2, "2/10"),
        (3, "2/11"),
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert len({request.id for request in engine.seen}) == 4


def test_best_of_returns_the_likeliest_per_token() -> None:
    """The fake's probabilities make tokens with small ids likelier; a sum would prefer the shorter
    text."""
    texts = {0: "z", 1: "!!!!", 2: "yy"}
    engine = FakeEngine(reply=lambda request: texts[request.params.seed])
    answer = ask(engine, best_of=3, n=2, seed=0)
    assert [c["text"] for c in answer["choices"]] == ["!!!!", "z"]
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 2 + 5 + 3  # end tokens included


def test_stop_string_ends_the_text() -> None:
    assert ask(FakeEngine(), stop=["wor", "x"])["choices"][0]["text"] == "Hello, "
    wanted = ask(FakeEngine(), stop=["wor", "x"], include_stop_str_in_output=True)["choices"][0]
    assert (wanted["text"], wanted["finish_reason"]) == ("Hello, wor", "stop")


def test_length_is_a_reason_to_finish() -> None:
    choice = ask(FakeEngine(), max_tokens=4)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hell", "length")


def test_logprobs_are_parallel_lists() -> None:
    logprobs = ask(FakeEngine(reply="é!"), logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|end|>"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert all(
        len(one) == 2 and name in one
        for one, name in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
    )


def test_logprobs_zero_reports_the_tokens_alone() -> None:
    logprobs = ask(FakeEngine(), logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert len(logprobs["token_logprobs"]) == 13


def test_echo_puts_the_prompt_in_front_with_its_logprobs() -> None:
    """What lm-evaluation-harness scores with: the prompt's first token has no probability."""
    engine = FakeEngine()
    choice = ask(engine, prompt="Say", echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert choice["text"] == "SayH"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["S", "a", "y", "H"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert engine.seen[0].prompt_logprobs == 1


def test_no_tokens_with_echo_scores_the_prompt_alone() -> None:
    answer = ask(FakeEngine(), echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Say", "length")
    assert choice["logprobs"]["tokens"] == ["S", "a", "y"]
    assert answer["usage"]["completion_tokens"] == 0


def test_token_ids_and_origins_on_request() -> None:
    engine = FakeEngine(reply="ab")
    answer = ask(
        engine,
        return_token_ids=True,
        return_token_origins=True,
        logprobs=0,
        return_tokens_as_token_ids=True,
    )
    choice = answer["choices"][0]
    a, b = engine.tokenizer("ab")["input_ids"]
    assert choice["token_ids"] == [a, b, 0]
    assert choice["prompt_token_ids"] == engine.seen[0].prompt
    assert choice["token_origins"] == [["a", "accepted"], ["b", "correction"], ["", "correction"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{a}", f"token_id:{b}", "token_id:0"]


def test_prompt_logprobs_in_vllms_form() -> None:
    found = ask(FakeEngine(), prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == 3
    assert all("logprob" in entry for entry in found[1].values())


def test_speculation_reaches_the_engine() -> None:
    engine = FakeEngine()
    ask(
        engine,
        speculation={"mode": "fixed", "drafter": "ngram", "max_draft_tokens": 2, "invariant": True},
    )
    asked = engine.seen[0].speculation
    assert (asked.mode, asked.drafter, asked.max_draft_tokens, asked.invariant) == (
        "fixed",
        "ngram",
        2,
        True,
    )


def test_without_drafting_there_is_nothing_to_count() -> None:
    answer = ask(FakeEngine(), speculation={"mode": "off"}, return_token_origins=True)
    assert answer["metrics"]["speculative_decoding"] is None
    assert {fate for _, fate in answer["choices"][0]["token_origins"]} == {"plain"}


def test_suffix_needs_a_tokenizer_that_knows_it() -> None:
    with serving(FakeEngine()) as client:
        error = error_of(client.post(URL, json={"prompt": "a", "suffix": "b"}), 400)
    assert error["param"] == "suffix"


@pytest.mark.parametrize("has_tokens", [False, True])
def test_an_empty_suffix_asks_only_a_model_that_was_trained_for_it(has_tokens: bool) -> None:
    engine = FakeEngine()
    if has_tokens:
        engine.tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]}
        )
        engine.vocab_size = 260
    ask(engine, prompt="a", suffix="")
    (a,) = engine.tokenizer("a")["input_ids"]
    assert engine.seen[0].prompt == ([257, a, 258, 259] if has_tokens else [a])


def test_suffix_is_laid_out_with_the_models_own_tokens() -> None:
    engine = FakeEngine()
    engine.tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]}
    )
    engine.vocab_size = 260
    ask(engine, prompt="a", suffix="b")
    a, b = engine.tokenizer("ab")["input_ids"]
    assert engine.seen[0].prompt == [257, a, 258, b, 259]


class TestStream:
    def test_pieces_make_the_whole(self) -> None:
        with serving(FakeEngine(reply="Grüße")) as client:
            chunks = events(
                client.post(URL, json={"prompt": "a", "stream": True, "return_token_origins": True})
            )
        assert "".join(c["choices"][0]["text"] for c in chunks) == "Grüße"
        assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
        assert all("usage" not in c for c in chunks)
        assert ["timings" in c for c in chunks] == [False] * (len(chunks) - 1) + [True]
        pieces = [pair for c in chunks for pair in c["choices"][0]["token_origins"]]
        assert "".join(piece for piece, _ in pieces) == "Grüße"
        assert len({c["id"] for c in chunks}) == 1

    def test_usage_comes_last_when_asked_for(self) -> None:
        body = {"prompt": ["a", "bc"], "stream": True, "stream_options": {"include_usage": True}}
        with serving(FakeEngine()) as client:
            *rest, last = events(client.post(URL, json=body))
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 3 + 26
        assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 14
        assert {c["choices"][0]["index"] for c in rest} == {0, 1}

    def test_logprobs_and_echo_are_streamed(self) -> None:
        body = {"prompt": "Say", "stream": True, "echo": True, "logprobs": 1, "max_tokens": 4}
        with serving(FakeEngine()) as client:
            chunks = events(client.post(URL, json=body))
            whole = client.post(URL, json={**body, "stream": False}).json()["choices"][0]
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [value for c in chunks for value in c["choices"][0]["logprobs"][name]]
            assert joined == whole["logprobs"][name]
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"] == "SayHell"

    def test_failure_becomes_an_event(self) -> None:
        with serving(FakeEngine(reply=NumericalError("NaN in layer 3"))) as client:
            chunks = events(client.post(URL, json={"prompt": "a", "stream": True}))
        assert chunks[-1]["error"]["message"] == "NaN in layer 3"


def test_failure_of_the_engine_is_a_500() -> None:
    with serving(FakeEngine(reply=NumericalError("NaN in layer 3"))) as client:
        error = error_of(client.post(URL, json={"prompt": "a"}), 500)
    assert error == {
        "message": "NaN in layer 3",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
