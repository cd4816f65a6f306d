"""Tokens in log-probabilities, over HTTP: their texts, bytes and offsets are those of the returned
text, for every tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.models.tokens.token_bytes import token_bytes
from outrider.serve.api.logprobs import LogprobLists, Namer, chat_logprobs
from outrider.text import Detokenizer
from tests.published_tokenizers import JOINED, WITH_BYTE_FALLBACK, llama_2
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.serve.served_app import chat, events, serving

every_tokenizer = pytest.mark.parametrize("name", JOINED)
spelling = pytest.mark.parametrize("name", WITH_BYTE_FALLBACK)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "the cat"


def engine_of(name: str, *texts: str) -> FakeEngine:
    """An engine that emits the tokens of these texts, each written as a continuation."""
    tokenizer = JOINED[name]()
    reply = [
        tokenizer.convert_tokens_to_ids(part) if part.startswith("<0x") else part for part in texts
    ]
    ids = [
        token
        for part in reply
        for token in ([part] if isinstance(part, int) else continued(tokenizer, part))
    ]
    engine = FakeEngine(tokenizer=tokenizer, reply=ids)
    engine.vocab_size = len(tokenizer)
    engine.eos_token_ids = frozenset([tokenizer.eos_token_id])
    return engine


def continued(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text behind other text."""
    return [token for part in text.split("|") for token in [tokenizer.convert_tokens_to_ids(part)]]


def asked(engine: FakeEngine, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    with serving(engine) as client:
        response = client.post(url, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


REPLIES = {
    "llama 2": ("▁there|.|▁cat", "🎉"), "phi 3": ("▁there|.|▁cat", "🎉"), "gemma": ("▁there|.|▁cat", "🎉"),
    "t5": ("▁there|.|▁cat", "🎉"), "gpt 2": ("Ġthe|!|Ġthe|ðŁİ", "ī"), "bert": ("the|##re|.|cat", "é"),
    "words": ("the|cat|.", "é"),
}  # fmt: skip


@every_tokenizer
def test_bytes_and_texts_are_what_the_tokens_add(name: str) -> None:
    """Catches '▁there', 'Ġthe' and '##re' in answers, and bytes that do not make up the text."""
    body = {**chat(PROMPT), "logprobs": True, "top_logprobs": 1}
    choice = asked(engine_of(name, *REPLIES[name]), CHAT, **body)
    text = choice["message"]["content"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert text.startswith(" the")
    whole = [entry["token"] for entry in entries if not entry["token"].startswith("bytes:")]
    assert entries[0]["token"] in (" there", " the")
    assert entries[-1]["token"] == "</s>"
    assert entries[-1]["bytes"] == []
    assert all(
        bytes(e["bytes"]).decode() == e["token"] for e in entries[:-1] if e["token"] in whole
    )


@every_tokenizer
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_index_the_returned_text(name: str, echo: bool) -> None:
    body = {"prompt": PROMPT, "logprobs": 1, "echo": echo}
    choice = asked(engine_of(name, *REPLIES[name]), **body)
    text = choice["text"]
    logprobs = choice["logprobs"]
    assert text.startswith(PROMPT) == echo
    ends = [*logprobs["text_offset"][1:], len(text)]
    for token, begin, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        if token not in ("<s>", "</s>") and not token.startswith("bytes:"):
            assert text[begin:end] == token
    assert max(logprobs["text_offset"]) <= len(text)
    assert all(
        name in one
        for one, name in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
        if one is not None
    )
    with serving(engine_of(name, *REPLIES[name])) as client:
        chunks = events(client.post(COMPLETIONS, json={**body, "stream": True}))
    for field in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [
            one for chunk in chunks for one in chunk["choices"][0]["logprobs"][field]
        ] == logprobs[field]


def test_the_first_token_of_a_text_has_no_space() -> None:
    """Catches ' there' for a token whose space the decoder strips: nothing stands before it."""
    engine = engine_of("llama 2", "▁there|▁there")
    choice = asked(engine, prompt=[engine.tokenizer.bos_token_id], logprobs=1)
    assert choice["text"] == "there there"
    assert choice["logprobs"]["tokens"] == ["there", " there", "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 5, 11]


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_token_of_a_chat_has_no_space(stream: bool) -> None:
    """Its bytes and the names of its alternatives neither: they would stand in its place. Later,
    all have one."""
    engine = engine_of("llama 2", "▁there|▁there")
    body = {
        "prompt_token_ids": [engine.tokenizer.bos_token_id],
        "logprobs": True,
        "top_logprobs": 2,
        "stream": stream,
    }
    with serving(engine) as client:
        response = client.post(CHAT, json=body)
    choices = (
        [chunk["choices"][0] for chunk in events(response)]
        if stream
        else response.json()["choices"]
    )
    entries = [
        entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in entries] == ["there", " there", "</s>"]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"there", b" there", b""]
    assert [entry["top_logprobs"][-1]["token"] for entry in entries] == ["there", " there", "</s>"]


def test_a_token_of_a_chat_is_named_by_the_text_before_it() -> None:
    """Catches entries that are made when the token itself, or the next one, stands there already."""
    tokenizer = llama_2()
    spaced, bare = tokenizer.convert_tokens_to_ids(["▁a", "a"])
    logprobs = {spaced: -0.1, bare: -2.0}
    name = Namer(token_bytes(tokenizer), as_ids=False)
    entries = chat_logprobs(name, Detokenizer(tokenizer, []), [spaced, spaced], [logprobs] * 2, 2)[
        "content"
    ]
    assert [entry["token"] for entry in entries] == ["a", " a"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == [
        ["a", "a"],
        [" a", "a"],
    ]


@spelling
def test_a_character_of_several_tokens(name: str) -> None:
    """Every byte stands where its character does; the bytes joined are the character."""
    body = {"prompt": PROMPT, "logprobs": 0}
    spelled = [f"<0x{byte:02X}>" for byte in "😀".encode()]
    logprobs = asked(engine_of(name, "▁a", *spelled, "."), **body)["logprobs"]
    assert logprobs["tokens"] == [
        " a",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x98",
        "bytes:\\x80",
        ".",
        "</s>",
    ]
    assert logprobs["text_offset"] == [0, 2, 2, 2, 2, 3, 4]


@spelling
def test_an_echoed_prompt_that_ends_inside_a_character(name: str) -> None:
    """Catches a doubled U+FFFD: the answer's text begins with the character whose first bytes are
    the prompt's."""
    spelled = [f"<0x{byte:02X}>" for byte in "😀".encode()]
    engine = engine_of(name, *spelled[2:], ".")
    prompt = engine.tokenizer.convert_tokens_to_ids(["▁the", "▁a", *spelled[:2]])
    choice = asked(engine, prompt=prompt, echo=True, logprobs=0)
    assert choice["text"].strip() == "the a😀."
    assert [choice["text"][offset:] for offset in choice["logprobs"]["text_offset"][-4:]] == [
        "😀.",
        "😀.",
        ".",
        "",
    ]
    whole = asked(engine_of(name, "."), prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    assert whole["text"].strip() == "the a\ufffd\ufffd"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_held_back_for_a_stop_string_have_their_own_offsets(stream: bool) -> None:
    """Catches offsets that count released text: tokens that wait for a stop string would all stand
    where the first does."""
    with serving(engine_of("llama 2", "a|b|.|a|b|s|,|,")) as client:
        body = {"prompt": PROMPT, "stop": ["abs"], "logprobs": 0, "stream": stream}
        response = client.post(COMPLETIONS, json=body)
    choices = (
        [chunk["choices"][0] for chunk in events(response)]
        if stream
        else response.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "ab."
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 3, 3]


def test_of_equal_names_the_emitted_token_then_the_likeliest_is_reported() -> None:
    """Catches a token hidden behind a less likely one of the same name: at the start of a text '▁a'
    is 'a', too."""
    tokenizer = llama_2()
    spaced, bare, stop = tokenizer.convert_tokens_to_ids(["▁a", "a", "."])
    logprobs = {spaced: -0.1, bare: -2.0, stop: -3.0}
    name = Namer(token_bytes(tokenizer), as_ids=False)
    for emitted, value in ((spaced, -0.1), (bare, -2.0), (stop, -0.1)):
        found = LogprobLists(name, 2, Detokenizer(tokenizer, [])).answer([emitted], [logprobs])
        assert found["top_logprobs"] == [{"a": value, ".": -3.0}]


def test_special_tokens_have_bytes_where_the_text_shows_them() -> None:
    body = {**chat(PROMPT), "logprobs": True, "skip_special_tokens": False}
    choice = asked(engine_of("llama 2", "<s>|▁a"), CHAT, **body)
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "<s> a"
    assert [bytes(entry["bytes"]) for entry in entries] == [b"<s>", b" a", b""]


def test_normalised_prompts_keep_their_offsets() -> None:
    """Catches offsets that run away behind a space that the tokenizer drops."""
    choice = asked(engine_of("bert", "cat"), prompt="the  cat,  The cat", echo=True, logprobs=0)
    text = choice["text"]
    logprobs = choice["logprobs"]
    assert text == "the  cat,  The cat cat"
    assert [text[offset:].split()[0] for offset in logprobs["text_offset"][:-1]] == [
        "the",
        "cat,",
        ",",
        "The",
        "cat",
        "cat",
    ]


def test_tokenize_names_tokens_as_text() -> None:
    with serving(FakeEngine(tokenizer=llama_2(), vocab_size=len(llama_2()))) as client:
        named = client.post(
            "/tokenize", json={"prompt": "the cat é😀", "return_token_strs": True}
        ).json()["token_strs"]
        ids = client.post("/tokenize", json={"prompt": "the cat"}).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": ids[:40]}).json()["prompt"]
    assert named[:2] == [" ", "t"]
    assert named[-4:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert text == "the cat"
