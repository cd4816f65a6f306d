"""The event loop is everybody's: what one client sends, or one model writes, must not keep it for
long."""

from __future__ import annotations

import asyncio
import difflib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider import messages as messages_module
from outrider.errors import nearest
from outrider.sampling.thinking import ThinkingMarks
from outrider.serve.api.reply import HarmonyReader, PlainReader, ThoughtsFirst
from outrider.serve.api.texts import LONG, SharedTokenizer
from outrider.serve.tools.formats import HERMES
from outrider.serve.tools.reader import ToolReader
from outrider.templates import conversation_text
from tests.helpers import byte_tokenizer
from tests.unit.serve.fake_engine import TEMPLATE

SIZE = 20_000


class HeldTokenizer:
    """Reads a long text only when `go` is set."""

    def __init__(self) -> None:
        self._own = byte_tokenizer()
        self.began = threading.Event()
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, text: str, **options: Any) -> Any:
        if len(text) >= LONG:
            self.began.set()
            assert self.go.wait(10), "the loop stood still"
        return self._own(text, **options)


def test_short_texts_wait_for_a_long_one_outside_the_loop() -> None:
    texts = SharedTokenizer(byte_tokenizer(), "m")
    held = texts.tokenizer = HeldTokenizer()
    letter = asyncio.run(texts.encode("a"))

    async def both() -> tuple[list[int], list[int]]:
        long = asyncio.create_task(texts.encode("x" * LONG))
        await asyncio.to_thread(held.began.wait)
        short = asyncio.create_task(texts.encode("a"))
        await asyncio.sleep(0.01)
        assert texts.decode(letter) == "a", "decoding changes nothing, and waits for nobody"
        held.go.set()
        return await long, await short

    long, short = asyncio.run(both())
    assert (len(long), short) == (LONG, letter)


def test_a_conversation_is_as_long_as_its_tools_and_calls_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = SharedTokenizer(byte_tokenizer(), "m")
    texts.tokenizer.chat_template = TEMPLATE
    seen: list[threading.Thread] = []

    def rendered(*given: Any, **options: Any) -> Any:
        seen.append(threading.current_thread())
        return conversation_text(*given, **options)

    monkeypatch.setattr(messages_module, "conversation_text", rendered)
    message = {"role": "user", "content": "Hi"}
    call = {"type": "function", "function": {"name": "f", "arguments": "x" * LONG}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    for messages, tools in (([message], None), ([message], [call]), ([message, answer], None)):
        asyncio.run(texts.render(messages, tools=tools))
    assert [thread is threading.main_thread() for thread in seen] == [True, False, False]


def call(size: int) -> None:
    reader = ToolReader(HERMES, {"f": {}}, parallel=True)
    reader.push(
        '<tool_call>\n{"name": "f", "arguments": {"a": "' + "x" * size + '"}}\n</tool_call>'
    )
    assert reader.finish_reason == "tool_calls"


def thoughts(size: int) -> None:
    marks = ThinkingMarks(
        opening=("<think>",), closing=("</think>",), opening_id=1, closing_ids=(2,), is_open=True
    )
    [delta] = ThoughtsFirst(marks, PlainReader()).push([5] * size, ["abcdefgh"] * size)
    assert len(delta["reasoning"]) == 8 * size


def harmony(size: int) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|message|>"], special_tokens=True)
    reader = HarmonyReader(tokenizer, None)
    reader.push([tokenizer.convert_tokens_to_ids("<|message|>")], [""])
    assert reader.push([5] * size, ["abcdefgh"] * size) == [{"content": "abcdefgh" * size}]


@pytest.mark.parametrize("read", [call, thoughts, harmony])
def test_four_times_the_text_takes_four_times_the_time(read: Callable[[int], None]) -> None:
    """It took sixteen times as much: minutes, for an answer of a hundred thousand tokens."""
    read(SIZE // 10)
    times = []
    for size in (SIZE, 4 * SIZE):
        began = time.process_time()
        read(size)
        times.append(time.process_time() - began)
    assert times[1] < 8 * times[0], times


def test_a_name_of_megabytes_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nearest("modle", ["model"]) == "model"
    assert nearest("model" + "x" * 6, ["model"]) == "model", "the longest that still counts as near"
    monkeypatch.setattr(difflib, "get_close_matches", None)
    assert nearest("x" * 5_000_000, ["model", "other-model"]) is None
