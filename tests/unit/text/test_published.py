"""Streamed text with the tokenizers of published models: cut at any token, it is the tokenizer's
own text."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.tokens.bytes_text import UNFINISHED
from outrider.stops import StopStrings
from outrider.text import Detokenizer, decode
from tests.published_tokenizers import ALL, JOINED, WITH_BYTE_FALLBACK, gpt_2, llama_2

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
every_tokenizer = pytest.mark.parametrize("name", ALL)


@cache
def tokenizer_of(name: str) -> Any:
    return ALL[name]()


def spelled(tokenizer: Any, text: str | bytes) -> list[int]:
    """The byte tokens of a text."""
    data = text.encode() if isinstance(text, str) else text
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


@st.composite
def token_lists(draw: st.DrawFn, name: str) -> list[int]:
    """Tokens of all kinds, whole characters in bytes often enough among them."""
    tokenizer = tokenizer_of(name)
    unknown = 0 if name == "python" else 2
    one = st.lists(st.integers(0, len(tokenizer) - 1 + unknown), min_size=1, max_size=3)
    special = st.sampled_from([[tokenizer.bos_token_id], [tokenizer.eos_token_id]])
    text = st.sampled_from(["😀", "é", "日本", "a\u0301", "👩\u200d🔬", " ", "€x"])
    atoms = [one, special, text.map(lambda t: tokenizer(t, add_special_tokens=False)["input_ids"])]
    if name in WITH_BYTE_FALLBACK:
        atoms.append(text.map(lambda t: spelled(tokenizer, t)))
        atoms.append(st.binary(min_size=1, max_size=5).map(lambda b: spelled(tokenizer, b)))
    return [token for atom in draw(st.lists(st.one_of(atoms), max_size=12)) for token in atom]


def expected(name: str, ids: list[int], *, special: bool) -> str:
    """The tokenizer's own text; with byte fallback, of tokens in which every broken byte was
    replaced by U+FFFD."""
    tokenizer = tokenizer_of(name)
    hidden = () if special else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    if name in WITH_BYTE_FALLBACK:
        ids = repaired(tokenizer, [token for token in ids if token not in hidden])
    return tokenizer.decode(ids, skip_special_tokens=not special)


def repaired(tokenizer: Any, ids: list[int]) -> list[int]:
    broken = tokenizer.convert_tokens_to_ids(UNFINISHED)
    found = []
    run = b""
    for token in [*ids, None]:
        written = None if token is None else tokenizer.convert_ids_to_tokens(token)
        if token is not None and written is None:
            continue
        if written is not None and (match := BYTE_TOKEN.fullmatch(written)):
            run += bytes([int(match[1], 16)])
            continue
        for character in run.decode(errors="surrogateescape"):
            found += (
                [broken] if "\udc80" <= character <= "\udcff" else spelled(tokenizer, character)
            )
        run = b""
        if token is not None:
            found.append(token)
    return found


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prompt_and_answer_joined_are_the_tokenizers_text(name: str, data: st.DataObject) -> None:
    """Catches U+FFFD where the prompt ends inside a character, lost and doubled spaces, and
    characters taken back."""
    ids = data.draw(token_lists(name))
    special = data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(ids)))
    tokenizer = tokenizer_of(name)
    detokenizer = Detokenizer(tokenizer, ids[:cut], special=special)
    answer = "".join([*(detokenizer.push(token) for token in ids[cut:]), detokenizer.flush()])
    prompt = decode(tokenizer, ids[:cut], special=special, flush=False)
    assert prompt + answer == expected(name, ids, special=special)
    assert decode(tokenizer, ids, special=special) == expected(name, ids, special=special)
    assert detokenizer.num_characters == len(answer)


@pytest.mark.parametrize("name", JOINED)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_of_tokens_joined_are_the_answers_bytes(name: str, data: st.DataObject) -> None:
    """Catches a token that is named by something else than what it adds to the text where it
    stands."""
    ids = data.draw(token_lists(name))
    special = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer_of(name), [], special=special)
    parts = []
    text = ""
    for token in ids:
        parts.append(detokenizer.bytes_of(token))
        text += detokenizer.push(token)
    text += detokenizer.flush()
    joined = b"".join(parts)
    if UNFINISHED not in text:
        assert joined.decode() == text
    assert joined.decode(errors="replace").replace(UNFINISHED, "") == text.replace(UNFINISHED, "")


def test_emoji_behind_a_prompt_that_ends_in_emoji() -> None:
    """Catches a window that begins inside a character: its whole run of bytes then reads as U+FFFD."""
    tokenizer = llama_2()
    prompt = [*tokenizer("there")["input_ids"], *spelled(tokenizer, "🎈🎈")]
    for cut in range(len(prompt) - 4, len(prompt) + 1):
        detokenizer = Detokenizer(tokenizer, prompt[:cut])
        answer = [
            *prompt[cut:],
            *spelled(tokenizer, "🎊🎊🎊"),
            tokenizer.convert_tokens_to_ids("."),
        ]
        pieces = [detokenizer.push(token) for token in answer]
        assert "".join(pieces) == ("🎈" if cut < len(prompt) else "") + "🎊🎊🎊."
        assert pieces[-1] == "."


@pytest.mark.parametrize("name", [*WITH_BYTE_FALLBACK, "gpt 2", "python"])
def test_bytes_that_are_no_character_are_released_at_once(name: str) -> None:
    """Catches text held back to the end, and a window that grows with every broken byte."""
    tokenizer = tokenizer_of(name)
    bad = {"gpt 2": "ÿ", "python": "b255"}.get(name, "<0xFF>")
    smile = spelled(tokenizer, "😀") if name in WITH_BYTE_FALLBACK else tokenizer("😀")["input_ids"]
    detokenizer = Detokenizer(tokenizer, [smile[0]])
    longest = 0
    own = tokenizer.decode

    def watched(ids: list[int], **options: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return own(ids, **options)

    tokenizer.decode = watched
    try:
        released = ""
        for count in range(1, 301):
            released += detokenizer.push(tokenizer.convert_tokens_to_ids(bad))
            assert count + 1 - len(released) <= (3 if name == "python" else 0)
        released += "".join(detokenizer.push(token) for token in smile)
    finally:
        del tokenizer.decode
    assert released == UNFINISHED * 301 + "😀"
    assert longest <= 16


@pytest.mark.parametrize(
    "data",
    [b"\xed\xa0\x80", b"\xf0\x80\x80", b"\xc0\xaf", b"\xe2\x82", b"\xf4\x90", b"\x80\xe2\x28"],
)
def test_the_byte_that_breaks_a_character_releases_it(data: bytes) -> None:
    """Catches a surrogate or an overlong form that is held although no byte could finish it."""
    tokenizer = llama_2()
    detokenizer = Detokenizer(tokenizer, [])
    text = ""
    for end, token in enumerate(spelled(tokenizer, data), start=1):
        text += detokenizer.push(token)
        alive = any(_can_end(data[at:end]) for at in range(end))
        held = len(data[:end].decode(errors="surrogateescape")) - len(text)
        assert alive or not held
    characters = data.decode(errors="surrogateescape")
    assert text + detokenizer.flush() == "".join(
        UNFINISHED if c >= "\udc80" else c for c in characters
    )


def _can_end(begun: bytes) -> bool:
    """Whether some bytes behind these make one character."""
    others = ("\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff")
    spelled = [character.encode() for character in (*others, *map(chr, range(0x80, 0xD800, 16)))]
    return any(data.startswith(begun) and data != begun for data in spelled)


@every_tokenizer
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stop_strings_are_found_wherever_tokens_cut_them(name: str, data: st.DataObject) -> None:
    """Catches a stop string missed in a character of several tokens, or found late."""
    tokenizer = tokenizer_of(name)
    ids = data.draw(token_lists(name))
    prompt = data.draw(token_lists(name))
    whole = Detokenizer(tokenizer, prompt)
    text = "".join([*(whole.push(token) for token in ids), whole.flush()])
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[begin : begin + data.draw(st.integers(1, 3))]
    if not stop:
        return
    detokenizer = Detokenizer(tokenizer, prompt)
    stops = StopStrings([stop])
    shown = ""
    needed = ""
    for token in ids:
        piece = detokenizer.push(token)
        needed += piece
        shown += stops.push(piece)
        assert stops.found == (stop in needed)
        if stops.found:
            break
    else:
        shown += stops.push(detokenizer.flush()) + stops.flush()
    assert shown == text[: text.index(stop)]


def test_a_stop_string_that_ends_inside_a_token_of_a_character() -> None:
    """Catches 'a' held back with the bytes of a character that the same token begins."""
    tokenizer = gpt_2()
    detokenizer = Detokenizer(tokenizer, [])
    stops = StopStrings(["sa"])
    ids = [*tokenizer("s")["input_ids"], tokenizer.convert_tokens_to_ids("aâ")]
    assert [stops.push(detokenizer.push(token)) for token in ids] == ["", ""]
    assert stops.found
