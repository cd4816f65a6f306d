"""Reads one answer of a chat as it is emitted: thoughts, content and calls, for every interface."""

from __future__ import annotations

from outrider.engine.request import Update
from outrider.sampling.thinking import ThinkingMarks
from outrider.serve.api.exchange import finish_reason, stop_reason
from outrider.serve.api.harmony import HarmonyReader
from outrider.serve.api.reader import (
    AllContent,
    Delta,
    PlainReader,
    Reader,
    ThoughtsFirst,
    TokenReader,
    whole_message,
)
from outrider.serve.api.reasoning import Reasoning
from outrider.serve.observability.traffic import LoggedAnswer
from outrider.serve.schema.chat import ChatBody
from outrider.serve.served import Served
from outrider.serve.tools.use import ToolUse


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
