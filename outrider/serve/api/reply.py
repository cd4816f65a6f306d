"""Reads one answer of a chat as it is emitted: thoughts, content and calls, for every interface.

`Reply` reads the updates of a request. Thoughts come first (`ThoughtsFirst`); a `Reader` finds
calls in the rest (`tools/reader.py`). gpt-oss writes messages in channels, separated by special
tokens that text does not show (`HarmonyReader`):

    <|channel|>analysis<|message|>what it thinks<|end|> <|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

"analysis" is thought, "final" is content, and so is "commentary" without a recipient: text before a
call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from outrider.engine.request import Update
from outrider.sampling.thinking import ThinkingMarks
from outrider.serve.api.exchange import finish_reason, stop_reason
from outrider.serve.api.reasoning import Reasoning
from outrider.serve.observability.traffic import LoggedAnswer
from outrider.serve.schema.chat import ChatBody
from outrider.serve.served import Served
from outrider.serve.tools.use import ToolUse, merged_calls
from outrider.thoughts import Part, Thoughts

Delta = dict[str, Any]  # {"reasoning": text}, {"content": text}, {"tool_calls": [...]}


class Reply:
    """Feed it the updates of one request. `thinking`: where thoughts stand in the answer; None:
    there are none."""

    def __init__(
        self, served: Served, body: ChatBody, use: ToolUse | None, thinking: ThinkingMarks | None
    ) -> None:
        self._body = body
        self._use = use
        self._reader = _reader(served, served.reasoning, use, thinking)
        self._ended: Update | None = None
        self._deltas: list[Delta] = []

    @property
    def num_thought(self) -> int:
        """Tokens of thoughts so far."""
        return self._reader.num_thought

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's, once the answer has ended."""
        finish = None if self._ended is None else self._ended.finish
        return None if finish is None else self._reader.finish_reason or finish_reason(finish)

    @property
    def stop_reason(self) -> int | str | None:
        """vLLM's, once the answer has ended."""
        return None if self._ended is None else stop_reason(self._ended.finish)

    def push(self, update: Update) -> list[Delta]:
        """The parts of an update; with the last one, also what was held back."""
        texts = self._texts(update)
        tokens: list[int | None] = list(update.token_ids)
        # a time limit lets go of text that waited for its next token
        rest = update.text[len("".join(update.pieces)) :]
        deltas = self._reader.push([*tokens, None], [*texts, rest])
        if update.finish is not None:
            deltas += self._reader.end()
            self._ended = update
        if self._body.include_reasoning is False:
            deltas = [delta for delta in deltas if "reasoning" not in delta]
        self._deltas += deltas
        return deltas

    def logged(self) -> LoggedAnswer:
        """The whole answer, for the log of requests."""
        message = whole_message(self._deltas)
        return LoggedAnswer(message["content"], message.get("reasoning"), self.finish_reason)

    def _texts(self, update: Update) -> list[str]:
        """By token, with the special tokens that begin calls, where there are tools and the text
        does not show them anyway."""
        if self._use is None or not update.token_ids:
            return update.pieces
        stopped = (
            isinstance(stop_reason(update.finish), int)
            and not self._body.include_stop_str_in_output
        )
        shown = self._body.skip_special_tokens is False
        return self._use.texts_of(update.token_ids, update.pieces, shown=shown, stopped=stopped)


def _reader(
    served: Served, reasoning: Reasoning | None, use: ToolUse | None, thinking: ThinkingMarks | None
) -> TokenReader:
    form = None if reasoning is None else reasoning.format
    if (use is not None and use.format.is_harmony) or (
        thinking is not None and form is not None and form.is_harmony
    ):
        return HarmonyReader(served.texts.tokenizer, use)
    reader: Reader = PlainReader() if use is None else use.reader()
    if thinking is None:
        return AllContent(reader)
    return ThoughtsFirst(thinking, reader, "" if form is None else form.label)


class Reader(Protocol):
    """Reads the content of one answer as it is emitted."""

    @property
    def finish_reason(self) -> str | None:
        """Instead of the engine's, once the answer has ended."""

    def push(self, text: str) -> list[Delta]:
        """Deltas for newly emitted text."""

    def end(self) -> list[Delta]:
        """Deltas for what was held back."""


class PlainReader:
    """Everything is content."""

    finish_reason: str | None = None

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def end(self) -> list[Delta]:
        return []


class TokenReader(Protocol):
    """Reads one answer by its tokens."""

    @property
    def num_thought(self) -> int:
        """Tokens of thoughts so far."""

    @property
    def finish_reason(self) -> str | None:
        """Instead of the engine's, once the answer has ended."""

    def push(self, tokens: Sequence[int | None], texts: Sequence[str]) -> list[Delta]:
        """Deltas for tokens and the texts that they added."""

    def end(self) -> list[Delta]:
        """Deltas for what was held back."""


class AllContent:
    """Everything is content, which `reader` reads."""

    num_thought = 0

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def finish_reason(self) -> str | None:
        return self._reader.finish_reason

    def push(self, tokens: Sequence[int | None], texts: Sequence[str]) -> list[Delta]:
        return self._reader.push("".join(texts))

    def end(self) -> list[Delta]:
        return self._reader.end()


class ThoughtsFirst:
    """Thoughts, and after them content, which `reader` reads. White space around the marks belongs
    to them: templates that show earlier thoughts write it."""

    def __init__(self, thinking: ThinkingMarks, reader: Reader, label: str = "") -> None:
        """`label`: a word at the beginning of thoughts that is none of them."""
        self._thoughts = Thoughts(thinking)
        self._reader = reader
        self._label = label
        self._has_begun = False  # a thought was emitted
        self._blank = ""  # white space that is emitted only if more of the same comes
        self._trims = thinking.is_open  # content begins after a mark

    @property
    def finish_reason(self) -> str | None:
        return self._reader.finish_reason

    @property
    def num_thought(self) -> int:
        return self._thoughts.num_tokens

    def push(self, tokens: Sequence[int | None], texts: Sequence[str]) -> list[Delta]:
        parts = [
            part
            for token, text in zip(tokens, texts, strict=True)
            for part in self._thoughts.push(token, text)
        ]
        return self._deltas(parts)

    def end(self) -> list[Delta]:
        return [*self._deltas(self._thoughts.end()), *self._reader.end()]

    def _deltas(self, parts: Sequence[Part]) -> list[Delta]:
        deltas: list[Delta] = []
        for kind, group in groupby(parts, itemgetter(0)):
            text = "".join(text for _, text in group)
            if kind == "thought":
                if trimmed := self._trimmed(text):
                    deltas.append({"reasoning": trimmed})
            elif kind == "answer":
                content = text.lstrip() if self._trims else text
                self._trims = self._trims and not content
                deltas += self._reader.push(content) if content else []
            else:
                # between two thoughts
                self._trims = True
                self._blank = "\n" if self._has_begun else ""
        return joined(deltas)

    def _trimmed(self, text: str) -> str:
        text = self._blank + text
        self._blank = ""
        if not self._has_begun:
            text = text.lstrip()
            if len(text) <= len(self._label) and self._label.startswith(text):
                self._blank = text  # the label, or what may become it
                return ""
            text = text.removeprefix(self._label).lstrip()
            self._label = ""
        trimmed = text.rstrip()
        self._has_begun = self._has_begun or bool(trimmed)
        self._blank = text[len(trimmed) :]
        return trimmed


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Deltas with successive texts of one kind as one."""
    found: list[Delta] = []
    for name, group in groupby(deltas, lambda delta: next(iter(delta))):
        if name == "tool_calls":
            found += group
        else:
            found.append({name: "".join(delta[name] for delta in group)})
    return found


def whole_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """A message from the pieces that a stream would have sent. An answer that is all calls, or all
    thoughts, has no content."""
    calls = merged_calls(deltas)
    content, thought = (
        "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")
    )
    empty = None if calls or thought else ""
    message: dict[str, Any] = {"role": "assistant", "content": content or empty, "refusal": None}
    if thought:
        message["reasoning"] = thought
    return {**message, "tool_calls": calls} if calls else message


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
        deltas: list[Delta] = []
        for token, text in zip(tokens, texts, strict=True):
            mark = None if token is None else self._marks.get(token)
            # the mark itself is there where special tokens are shown
            before = text.removesuffix(mark or "")
            if before:
                self._say(before, deltas)
            if mark is not None:
                self._pass(mark, deltas)
            elif self._header is None and self._kind == "reasoning" and token is not None:
                self.num_thought += 1
        return joined(deltas)

    def end(self) -> list[Delta]:
        """See `TokenReader`: nothing is held back."""
        return []

    def _pass(self, mark: str, deltas: list[Delta]) -> None:
        if mark == "<|message|>" and self._header is not None:
            self._begin(self._header, deltas)
            self._header = None
        elif mark in ENDS or mark == "<|start|>":
            self._header = ""
            self._kind = "content"
        elif self._header is not None:
            self._header += mark

    def _begin(self, header: str, deltas: list[Delta]) -> None:
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
            self._tell_call(call, deltas)
        elif (channel and channel[1] == "analysis") or "to=" in header:
            self._kind = "reasoning"
            self._num_thoughts = self._num_thoughts + 1
            if self._num_thoughts > 1:
                deltas.append({"reasoning": "\n"})
        else:
            self._kind = "content"

    def _say(self, text: str, deltas: list[Delta]) -> None:
        if self._header is not None:
            self._header += text
        elif self._kind == "call":
            self._tell_call({"function": {"arguments": text}}, deltas)
        else:
            deltas.append({self._kind: text})

    def _tell_call(self, call: dict[str, Any], deltas: list[Delta]) -> None:
        if self._use is None or self._use.parallel or self._num_calls == 1:
            deltas.append({"tool_calls": [{"index": self._num_calls - 1, **call}]})
