"""Predicted outputs: OpenAI's field, its effect, and the counts in the usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch

from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.serve.rules import Rule
from outrider.serve.schema.answers import ChatAnswer, CompletionAnswer
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.serve.fake_engine import TEMPLATE, FakeEngine
from tests.unit.serve.served_app import chat, error_of, events, serving
from tests.unit.serve.test_run import process_of, wait_for

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def predicted(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


def ask(
    engine: FakeEngine, url: str = CHAT, rules: tuple[Rule, ...] = (), **fields: Any
) -> dict[str, Any]:
    body = chat(**fields) if url == CHAT else {"prompt": "Say", "max_tokens": 50, **fields}
    with serving(engine, rules=rules) as client:
        response = client.post(url, json=body)
        assert response.status_code == 200, response.text
        (ChatAnswer if url == CHAT else CompletionAnswer).model_validate_json(
            response.text, strict=True
        )
        return response.json()


def text_of(engine: FakeEngine) -> str:
    return str(engine.tokenizer.decode(engine.seen[-1].prediction))


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "content",
    ["Grüße 😀\n", [{"type": "text", "text": "Grüße "}, {"type": "text", "text": "😀\n"}]],
)
def test_a_prediction_reaches_the_engine_as_tokens(url: str, content: Any) -> None:
    """The prediction arrives unchanged, to the last newline and without begin or end tokens."""
    engine = FakeEngine()
    answer = ask(engine, url, prediction=predicted(content))
    assert text_of(engine) == "Grüße 😀\n"
    assert answer["metrics"]["drafter"] == "prediction"
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] is None


def test_usage_counts_what_came_true() -> None:
    """13 tokens in steps of two, the last of one: 6 accepted of 21 drafted, and the answer has 13
    tokens all the same."""
    usage = ask(FakeEngine(), prediction=predicted("Hello, there"))["usage"]
    assert usage["completion_tokens"] == 13
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 15,
    }
    several = ask(FakeEngine(), n=3, prediction=predicted("Hello, there"))["usage"]
    assert several["completion_tokens_details"] == {
        "accepted_prediction_tokens": 18,
        "rejected_prediction_tokens": 45,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": predicted("Hello"), "speculation": {"mode": "off"}},
        {"prediction": predicted("")},
        {"prediction": predicted([])},
    ],
)
def test_what_was_not_drafted_from_counts_nothing_and_says_so(fields: dict[str, Any]) -> None:
    """Drafting is off, or nothing was predicted: then the usual drafter drafts, and its tokens are
    not the prediction's."""
    answer = ask(FakeEngine(), **fields)
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert answer["metrics"]["drafter"] == "draft-model"


def test_without_a_prediction_usage_has_no_such_field() -> None:
    assert "completion_tokens_details" not in ask(FakeEngine())["usage"]


def test_a_stream_tells_it_in_its_last_chunk() -> None:
    body = chat(prediction=predicted("Hello"), stream=True, stream_options={"include_usage": True})
    with serving(FakeEngine()) as client:
        *_, last = events(client.post(CHAT, json=body))
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 6


def test_lengths_and_the_drafters_own_name_go_with_it() -> None:
    engine = FakeEngine()
    ask(
        engine,
        prediction=predicted("x"),
        speculation={"mode": "fixed", "max_draft_tokens": 20, "drafter": "prediction"},
    )
    assert engine.seen[0].speculation.max_draft_tokens == 20


@pytest.mark.parametrize(
    ("rule", "mode", "invariant"),
    [
        (Rule(drafter="ngram", max_draft_tokens=2, invariant=False), "auto", False),
        (Rule(mode="fixed", max_draft_tokens=2), "auto", None),
        (Rule(mode="off"), "off", None),
    ],
)
def test_a_route_says_how_others_draft(rule: Rule, mode: str, invariant: bool | None) -> None:
    """A route's drafter and length do not apply to predictions; a route without drafting does."""
    engine = FakeEngine()
    ask(engine, rules=(rule,), prediction=predicted("x"))
    asked = engine.seen[0].speculation
    assert (asked.mode, asked.drafter, asked.max_draft_tokens, asked.invariant) == (
        mode,
        None,
        None,
        invariant,
    )


# ---------------------------------------------------------------- a real engine, and OpenAI's own client


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = save_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", tiny_llama(257, sharpness=4.0), tokenizer
    )
    options = Options(target=str(folder), drafter="ngram", max_model_len=256)

    def load() -> list[Any]:
        engine = make_engine(
            options, EngineSettings(max_num_seqs=4, kv_memory=64 << 20), name="fake"
        )
        engine.start()
        return [engine]

    with process_of(load) as (_, address):
        wait_for(f"{address}/ready")
        yield address


@pytest.mark.slow
def test_openais_own_client(url: str) -> None:
    """The text is the same in fewer steps, typed where OpenAI types it."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    question: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 40,
        "temperature": 0,
        # visible characters of ASCII
        "extra_body": {"ignore_eos": True, "allowed_token_ids": list(range(1, 95))},
    }
    off = {**question["extra_body"], "speculation": {"mode": "off"}}
    plain = client.chat.completions.create(**{**question, "extra_body": off})
    text = plain.choices[0].message.content
    edited = text[:15] + "#" + text[16:]
    for prediction in (text, edited, [{"type": "text", "text": text}], "nothing of the kind"):
        answer = client.chat.completions.create(**question, prediction=predicted(prediction))
        assert answer.choices[0].message.content == text
        details = answer.usage.completion_tokens_details
        drafted = answer.metrics["speculative_decoding"]["num_draft_tokens"]
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == drafted
        if prediction != "nothing of the kind":
            assert details.accepted_prediction_tokens >= 25
        assert answer.usage.completion_tokens == 40
    with pytest.raises(openai.BadRequestError, match="'ngram' together with a prediction"):
        client.chat.completions.create(
            **{**question, "extra_body": {"speculation": {"drafter": "ngram"}}},
            prediction=predicted("x"),
        )


@pytest.mark.slow
def test_there_is_a_longest_draft(url: str) -> None:
    fixed = {"mode": "fixed", "max_draft_tokens": 32}
    error = error_of(
        httpx2.post(f"{url}{CHAT}", json=chat(prediction=predicted("x"), speculation=fixed)), 400
    )
    assert "at most 31" in error["message"]
    assert error["param"] == "speculation.max_draft_tokens"
