"""Emoji from a real model whose tokenizer spells them in bytes: streamed, whole, behind prompts
that end anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.serve.app import make_app
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.unit.serve.served_app import events

PARTY = "Party 🎉🎉"
THREE = {
    "structured_outputs": {"regex": "(🎈|🎊|🎁){3}\\."},
    "max_tokens": 40,
    "temperature": 1.0,
    "seed": 1,
}


@pytest.fixture(scope="module")
def client(stories: Path) -> Iterator[TestClient]:
    options = Options(target=str(stories), drafter="ngram", max_model_len=256)
    engine = make_engine(
        options, EngineSettings(max_num_seqs=2, kv_memory=64 << 20), name="stories"
    )
    engine.start()
    state = ServerState(ServerSettings(models=(ServedModel(name="stories", options=options),)))
    state.serve([engine], created=1)
    with TestClient(make_app(state)) as client:
        yield client
    engine.stop()


def ask(client: TestClient, **body: Any) -> Any:
    response = client.post("/v1/completions", json={"prompt": PARTY, **THREE, **body})
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_three_emoji_behind_emoji(client: TestClient, mode: str) -> None:
    """Catches twelve U+FFFD instead of three characters, one for each byte."""
    body = {"speculation": {"mode": mode}}
    text = ask(client, **body).json()["choices"][0]["text"]
    assert set(text[:3]) <= set("🎈🎊🎁")
    assert text[3:] == "."
    pieces = [chunk["choices"][0]["text"] for chunk in events(ask(client, **body, stream=True))]
    assert "".join(pieces) == text
    assert (
        ask(client, **body, stop=[text[1:3]]).json()["choices"][0]["text"]
        == text[: text.index(text[1:3])]
    )
    choice = ask(client, **body, logprobs=0, echo=True).json()["choices"][0]
    assert [choice["text"][offset:] for offset in choice["logprobs"]["text_offset"][-13:-1:4]] == [
        text[at:] for at in range(3)
    ]


def test_sentencepiece_tokens_have_their_spaces(client: TestClient) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["tokens"][1] == " there"


def test_prompts_that_end_inside_a_character(stories: Path) -> None:
    """Catches text that depends on where the prompt was cut; whole and streamed answers must agree."""
    llm = LLM(str(stories), drafter="ngram", max_model_len=256)
    prompt = llm.tokenizer(PARTY)["input_ids"]
    spelled = llm.tokenizer("🎁🎁", add_special_tokens=False)["input_ids"][1:]
    for cut in range(len(prompt) - 5, len(prompt) + 1):
        rest = [*prompt[cut:], *spelled]
        params = SamplingParams(
            temperature=0.0, max_tokens=len(rest), allowed_token_ids=sorted(set(spelled))
        )
        [whole] = llm.generate(prompt[:cut], params)
        streamed = "".join(chunk.text for chunk in llm.stream(prompt[:cut], params))
        assert whole.text == streamed
        data = bytes(token - 3 for token in [*prompt[7:cut], *whole.token_ids])
        # without the prompt's whole ones
        characters = data.decode(errors="surrogateescape")[(cut - 7) // 4 :]
        assert whole.text == "".join(
            "\ufffd" if "\udc80" <= c <= "\udcff" else c for c in characters
        )
