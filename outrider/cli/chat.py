"""`outrider chat TARGET`: a conversation through the model's own chat template.

Works typed and piped: with a pipe on standard input every line is a message, no prompt is printed,
and an error ends the program; at a terminal an error is shown and the conversation continues without
that message. There a message of several lines is pasted, or typed with a backslash at each line's
end; typed and piped, lines from one that begins with \"\"\" to one that ends with it are one
message. Ctrl-C stops an answer, not the program.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from outrider.cli import session
from outrider.cli.generate import full_context
from outrider.cli.options import GenerationConfig, ModelOptions, SamplingOptions, ShowDrafts, Target
from outrider.cli.stream import MarkedText, PlainStream, run_stream
from outrider.cli.verbs import with_groups
from outrider.errors import ConfigError, OutriderError, did_you_mean
from outrider.report.text import stats_line
from outrider.stats import DecodeStats
from outrider.wellformed import checked_text

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.sampling.params import SamplingParams

COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "counters of all answers so far",
    "/quit": "leave (Ctrl-D too)",
    "/help": "this list",
}
QUOTES = '"""'  # around a message of several lines
System = Annotated[
    str | None, typer.Option(help="A system message in front of everything.", show_default=False)
]


@with_groups
def chat(
    target: Target,
    model: ModelOptions,
    sampling: SamplingOptions,
    system: System = None,
    show_drafts: ShowDrafts = False,
    generation_config: GenerationConfig = "auto",
) -> int:
    """Talk with a model that has a chat template."""
    sampling.params()  # refuses what is out of range before anything is loaded
    if system is not None:
        checked_text("--system", system)
    with session.load_llm(target, model, generation_config) as llm:
        params = sampling.params(defaults=llm.sampling_defaults.values)
        conversation = Conversation(llm, params, system, show_drafts)
        # no template: say so now
        llm.chat_prompt([*conversation.history, {"role": "user", "content": "."}])
        return _talk(conversation)


def _talk(conversation: Conversation) -> int:
    """Messages and commands until the input ends."""
    if sys.stdin.isatty():
        edit_lines()
        session.say(
            '/reset /stats /quit /help · """ around several lines: one message · Ctrl-C stops an '
            "answer"
        )
    while (message := read_message()) is not None:
        if message.is_command and message.text in ("/quit", "/exit"):
            break
        if message.is_command:
            conversation.command(message.text)
        elif message.text:
            _answer(conversation, message.text)
    return 0


def edit_lines() -> None:
    """Line editing and recall, where Python has them, and pasted lines as one text, which Python
    itself turns off."""
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


class Message(NamedTuple):
    """The next message: typed, pasted or piped."""

    text: str
    is_command: bool = False  # of one line, which begins with a slash and is not between quotes


class Conversation:
    """The messages so far and the counters of all answers."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, show_drafts: bool
    ) -> None:
        self._llm = llm
        self._params = params
        self._printer = MarkedText(Console(highlight=False)) if show_drafts else PlainStream()
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self.history: list[dict[str, str]] = list(self._start)
        self.stats = DecodeStats()
        if isinstance(self._printer, MarkedText):
            Console(stderr=True, highlight=False).print(self._printer.legend())

    def answer(self, message: str) -> None:
        """Stream the answer to `message`. One stopped by Ctrl-C stays in the history as far as it
        got."""
        asked = [*self.history, {"role": "user", "content": checked_text("the message", message)}]
        completion = run_stream(
            self._llm, self._llm.chat_prompt(asked), self._params, self._printer
        )
        self.history = [*asked, {"role": "assistant", "content": completion.text}]
        self.stats = self.stats.merge(completion.stats)
        if completion.finish_reason == "abort":
            session.say(stats_line(completion.stats, "abort"))
        elif completion.finish_reason == "length":
            session.say(
                "\n".join(full_context(completion, self._params))
                or _cut_off(len(completion.token_ids))
            )

    def command(self, name: str) -> None:
        """One of COMMANDS, `/quit` excepted."""
        if name == "/reset":
            self.history = list(self._start)
            session.say("conversation forgotten")
        elif name == "/stats":
            session.say(stats_line(self.stats) if self.stats.steps else "no answer yet")
        elif name == "/help":
            for command, meaning in COMMANDS.items():
                session.say(f"{command:8}{meaning}")
        else:
            session.say(f"unknown command '{name}'.{did_you_mean(name, COMMANDS)}")


def _cut_off(num_tokens: int) -> str:
    return f"cut off after {num_tokens} tokens, the most for one answer: --max-tokens sets it (none: the whole context)"


def _answer(conversation: Conversation, message: str) -> None:
    try:
        conversation.answer(message)
    except OutriderError as error:
        if not sys.stdin.isatty():
            raise
        session.say(f"error: {error}")


def read_message() -> Message | None:
    """The next message, None at the end of input. Ctrl-C at the prompt only clears the line.

    Raises ConfigError for text that is not UTF-8, and for a pipe that ends in the middle of a
    message.
    """
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            text = input("> " if typed else "")
            if _opens(text):
                return _quoted(text, typed)
            while typed and text.endswith("\\"):
                text = text[:-1] + "\n" + input(". ")
            text = text.strip()
            return Message(text, is_command=text.startswith("/") and "\n" not in text)
        except EOFError:
            if typed:
                sys.stdout.write("\n")
            return None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"standard input is not UTF-8 text (byte {error.start} of a message)."
            ) from error
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            session.say("\n/quit or Ctrl-D leaves")


def _opens(text: str) -> bool:
    """Whether a message in quotes begins here. Code that begins with a docstring does not open one."""
    text = text.strip()
    return text.startswith(QUOTES) and QUOTES not in text.removeprefix(QUOTES).removesuffix(QUOTES)


def _quoted(first: str, typed: bool) -> Message:
    """The message in quotes that begins with this line."""
    text = first.strip().removeprefix(QUOTES)
    while not text.endswith(QUOTES):
        try:
            text += "\n" + input(". " if typed else "").rstrip()
        except EOFError:
            if typed:
                raise
            raise ConfigError(
                f"standard input ends in a message that {QUOTES} begins: end it with {QUOTES}"
            ) from None
    return Message(text.removesuffix(QUOTES).strip("\n"))
