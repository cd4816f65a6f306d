"""The answer format of gpt-oss: messages in channels, separated by special tokens that text does
not show.

    <|channel|>analysis<|message|>what it thinks<|end|> <|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

"analysis" is thought, "final" is content, and so is "commentary" without a recipient: text before a
call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from outrider.serve.api.reader import Delta, joined
from outrider.serve.tools.use import ToolUse

MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Reads one answer. A `TokenReader`."""

    def __init__(self, tokenizer: Any, use: ToolUse | None) -> None:
        """`use`: the tools whose calls are reported as calls."""
        added = {entry.content: token for token, entry in tokenizer.added_tokens_decoder.items()}
        self._marks = {added[mark]: mark for mark in MARKS if mark in added}
        self._use = use
        self._tools = frozenset([] if use is None else use.readable)
        self._header: str | None = ""  # of the message that begins; None: its text is being read
        self._kind = "content"
        # messages
        self._num_calls = 0
        self._num_thoughts = 0
        self.num_thought = 0

    @property
    def finish_reason(self) -> str | None:
        """Instead of the engine's, once the answer has ended: a call that broke off is none."""
        return (
            self._use.called
            if self._use is not None and self._num_calls and self._kind != "call"
            else None
        )

    def push(self, tokens: Sequence[int | None], texts: Sequence[str]) -> list[Delta]:
        """See `TokenReader`."""
        found: list[Delta] = []
        for token, text in zip(tokens, texts, strict=True):
            mark = None if token is None else self._marks.get(token)
            # the mark itself is there where special tokens are shown
            before = text.removesuffix(mark or "")
            if before:
                self._say(before, found)
            if mark is not None:
                self._pass(mark, found)
            elif self._header is None and self._kind == "reasoning" and token is not None:
                self.num_thought += 1
        return joined(found)

    def end(self) -> list[Delta]:
        """See `TokenReader`: nothing is held back."""
        return []

    def _pass(self, mark: str, found: list[Delta]) -> None:
        if mark == "<|message|>" and self._header is not None:
            self._begin(self._header, found)
            self._header = None
        elif mark in ENDS or mark == "<|start|>":
            self._header = ""
            self._kind = "content"
        elif self._header is not None:
            self._header += mark

    def _begin(self, header: str, found: list[Delta]) -> None:
        """Begin a message according to its header."""
        named = RECIPIENT.search(header)
        channel = CHANNEL.search(header)
        if self._use is not None and named and named[1] in self._tools:
            self._kind = "call"
            self._num_calls = self._num_calls + 1
            call = {
                "id": self._use.format.new_id(),
                "type": "function",
                "function": {"name": named[1], "arguments": ""},
            }
            self._tell_call(call, found)
        elif (channel and channel[1] == "analysis") or "to=" in header:
            self._kind = "reasoning"
            self._num_thoughts = self._num_thoughts + 1
            if self._num_thoughts > 1:
                found.append({"reasoning": "\n"})
        else:
            self._kind = "content"

    def _say(self, text: str, found: list[Delta]) -> None:
        if self._header is not None:
            self._header += text
        elif self._kind == "call":
            self._tell_call({"function": {"arguments": text}}, found)
        else:
            found.append({self._kind: text})

    def _tell_call(self, call: dict[str, Any], found: list[Delta]) -> None:
        if self._use is None or self._use.parallel or self._num_calls == 1:
            found.append({"tool_calls": [{"index": self._num_calls - 1, **call}]})
