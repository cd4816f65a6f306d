"""Token ids to text as they arrive, and stop strings.

A token is not always text: bytes of one character may be spread over several tokens, and a leading space may depend on
the token before. So text is decoded in a small window and only released when it can no longer change. A stop string may
end inside a token and start several tokens earlier: text that could still become one is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 6  # prompt tokens decoded along, so that the first token's leading space comes out right
UNFINISHED = "\ufffd"  # what a decoder prints for an incomplete character


class Detokenizer:
    """Text of one row, token by token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], *, special: bool = False) -> None:
        """`special`: the text shows special tokens."""
        self._tokenizer = tokenizer
        self._special = special
        self._ids = list(prompt[-CONTEXT:])
        self._window = 0  # start of the decoded window
        self._done = len(self._ids)  # ids before this have been released
        self._done_text = self._decode(0, self._done)

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._window, len(self._ids))
        if text.endswith(UNFINISHED):
            return ""
        return self._release(text)

    def flush(self) -> str:
        """What is left at the end, unfinished characters included."""
        return self._release(self._decode(self._window, len(self._ids)))

    def _release(self, text: str) -> str:
        new = text[len(self._done_text) :]
        shown = self._decode(self._done, len(self._ids))
        if shown:
            self._window, self._done_text = self._done, shown
        else:  # special tokens only: a window without text would make the next word the first, and strip its space
            self._done_text = text
        self._done = len(self._ids)
        return new

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=not self._special)


class StopStrings:
    """Finds the first stop string in a growing text and holds back what could still become one."""

    def __init__(self, stops: Sequence[str], *, after: int = 0, include: bool = False) -> None:
        """Those that begin in the first `after` pieces of the text do not count. `include`: the one that is found is shown."""
        self._stops = [stop for stop in stops if stop]
        self._ignored, self._include = after, include
        self._held = ""
        self.match: str | None = None  # the stop string that was found

    @property
    def found(self) -> bool:
        """Whether a stop string was found."""
        return self.match is not None

    def push(self, text: str) -> str:
        """Text that is safe to show. After a stop string is found, `match` names it and nothing more comes out."""
        if self.found:
            return ""
        if self._ignored > 0:
            self._ignored -= 1
            return text
        self._held += text
        hits = [(at, at + len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            begin, end = min(hits)
            self.match = self._held[begin:end]
            safe, self._held = self._held[: end if self._include else begin], ""
            return safe
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """The held-back text, once it is certain that no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
