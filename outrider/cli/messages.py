"""The messages of a conversation as they come in: typed at a terminal, or from a pipe.

At a terminal prompt_toolkit edits them, one of several lines as a whole, and keeps them between
runs in a file that only its owner reads. In a pipe every line is a message, and nothing is
prompted.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.cache import keeping, make_folder, refuse_unsafe, state_folder
from outrider.cli import session
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

QUOTES = '"""'  # around a message of several lines
PROMPT = "> "
CONTINUED = ". "
HINT = "Send a message (/? for help)"
HISTORY = "chat-history"  # of the state folder


class Message(NamedTuple):
    """The next message: typed, pasted or piped."""

    text: str
    is_command: bool = False  # of one line, which begins with a slash and is not between quotes

    @classmethod
    def of(cls, text: str) -> Message:
        """The message that a whole text is, with its quotes or without."""
        text = text.strip()
        if _opens(text):
            return cls(text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"))
        return cls(text, is_command=text.startswith("/") and "\n" not in text)


class Messages(Protocol):
    """The source of a conversation's messages."""

    def read(self) -> Message | None:
        """The next one, None at the end of the input."""
        ...


def messages() -> Messages:
    """The messages of standard input: typed ones where it and the output are a terminal."""
    return Typed() if sys.stdin.isatty() and sys.stdout.isatty() else Piped()


class Typed:
    """Messages of a person at a terminal. Enter ends one, but not after a backslash, and not
    between quotes."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app

        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            history=_history(),
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=CONTINUED,
            placeholder=lambda: [] if get_app().is_done else [("fg:ansibrightblack", HINT)],
            enable_suspend=True,
        )

    def read(self) -> Message | None:
        """The next message. Ctrl-C only clears the line."""
        while True:
            try:
                return Message.of(self._session.prompt())
            except EOFError:
                return None
            except KeyboardInterrupt:
                session.say("/bye or Ctrl-D leaves")


class Piped:
    """Messages of a pipe or a file, and of a terminal whose answers go elsewhere."""

    def read(self) -> Message | None:
        """The next message.

        Raises ConfigError for text that is not UTF-8, and for input that ends in the middle of a
        message.
        """
        while True:
            try:
                text = input()
                while _is_unfinished(text):
                    text += "\n" + _next_line().rstrip()
                return Message.of(text)
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"standard input is not UTF-8 text (byte {error.start} of a message)."
                ) from error
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                session.say("/bye or Ctrl-D leaves")


def _next_line() -> str:
    try:
        return input()
    except EOFError:
        raise ConfigError(
            f"standard input ends in a message that {QUOTES} begins: end it with {QUOTES}"
        ) from None


def _opens(text: str) -> bool:
    """Whether a message in quotes begins here. Code that begins with a docstring does not open
    one."""
    text = text.strip()
    return text.startswith(QUOTES) and QUOTES not in text.removeprefix(QUOTES).removesuffix(QUOTES)


def _is_unfinished(text: str) -> bool:
    """Whether quotes were opened and not closed."""
    return _opens(text) and not text.strip().removeprefix(QUOTES).endswith(QUOTES)


def _keys() -> KeyBindings:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif _is_unfinished(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    return keys


def _history() -> History:
    """The inputs of this run and earlier ones; of this run alone where no file can be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class KeptHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with keeping("the history of inputs"):
                super().store_string(string)

    path = state_folder() / HISTORY
    history: History = InMemoryHistory()
    with keeping("the history of inputs"):
        make_folder(path.parent)
        refuse_unsafe(path)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if hasattr(os, "fchmod"):  # not on Windows
            os.fchmod(handle, 0o600)
        os.close(handle)
        history = KeptHistory(path)
    return history
