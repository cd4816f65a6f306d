"""`outrider chat TARGET`: a conversation through the model's own chat template.

Works typed and piped: with a pipe on standard input every line is a message, no prompt is printed,
and an error ends the program; at a terminal an error is shown and the conversation continues without
that message. There a message of several lines is pasted, or typed with a backslash at each line's
end; typed and piped, lines from one that begins with \"\"\" to one that ends with it are one
message. Ctrl-C stops an answer, not the program.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli import conversations, session
from outrider.cli.generate import full_context
from outrider.cli.messages import QUOTES, messages
from outrider.cli.options import GenerationConfig, ModelOptions, SamplingOptions, ShowDrafts, Target
from outrider.cli.stream import MarkedText, PlainStream, run_stream
from outrider.cli.verbs import with_groups
from outrider.errors import ConfigError, OutriderError, counted, did_you_mean, nearest
from outrider.foreign import meant
from outrider.report.text import amount, stats_line
from outrider.settings import parse_settings
from outrider.stats import DecodeStats
from outrider.wellformed import checked_text

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion
    from outrider.sampling.params import SamplingParams

PARAMETERS = tuple(field.name for field in dataclasses.fields(SamplingOptions))
HELP = {
    "/set parameter NAME VALUE": f"how answers are sampled: {', '.join(PARAMETERS)}",
    "/set system TEXT": "the system message; /system TEXT does the same",
    "/set verbose": "more numbers after each answer; /set quiet: fewer",
    "/show": "model, drafter, parameters, system message, notes",
    "/save NAME": "keep the conversation; /load NAME brings it back, /load lists them",
    "/clear": "forget the conversation; /reset is the same",
    "/stats": "counters of all answers so far",
    "/?": "this list; /help is the same",
    "/bye": "leave; /quit and Ctrl-D are the same",
    QUOTES: "around several lines that are one message; so are pasted lines",
    "Ctrl-C": "stops an answer",
}
ALONE = ("/show", "/clear", "/reset", "/stats", "/?", "/help")  # with nothing after them
LEAVING = ("/bye", "/quit", "/exit")
COMMANDS = ("/set", "/system", "/save", "/load", *ALONE, *LEAVING)
SETTABLE = ("parameter", "system", "verbose", "quiet")
LEAST_GAIN = 1.05  # speedup below which drafts are said not to help
System = Annotated[
    str | None, typer.Option(help="A system message in front of everything.", show_default=False)
]
Verbose = Annotated[
    bool, typer.Option(help="Also notes, memory, and what became of the drafts of each answer.")
]


@with_groups
def chat(
    target: Target,
    model: ModelOptions,
    sampling: SamplingOptions,
    system: System = None,
    show_drafts: ShowDrafts = False,
    generation_config: GenerationConfig = "auto",
    verbose: Verbose = False,
) -> int:
    """Talk with a model that has a chat template."""
    sampling.params()  # refuses what is out of range before anything is loaded
    if system is not None:
        checked_text("--system", system)
    model = model.with_free_length()
    with session.load_llm(target, model, generation_config, notes=verbose) as llm:
        # an answer ends where the model ends it
        defaults = {"max_tokens": None, **llm.sampling_defaults.values}
        params = sampling.params(defaults=defaults)
        conversation = Conversation(
            llm, target, params, system=system, show_drafts=show_drafts, verbose=verbose
        )
        conversation.introduce()
        return _talk(conversation)


def _talk(conversation: Conversation) -> int:
    """Messages and commands until the input ends."""
    source = messages()
    while (message := source.read()) is not None:
        if message.is_command and message.text in LEAVING:
            break
        try:
            if message.is_command:
                conversation.command(message.text)
            elif message.text:
                conversation.answer(message.text)
        except OutriderError as error:
            if not sys.stdin.isatty():
                raise
            session.say(f"error: {error}")
    return 0


class Conversation:
    """The messages so far, the counters of all answers, and what commands change."""

    def __init__(
        self,
        llm: LLM,
        target: str,
        params: SamplingParams,
        *,
        system: str | None = None,
        show_drafts: bool = False,
        verbose: bool = False,
    ) -> None:
        """Raises ConfigError for a model without a chat template."""
        self._llm = llm
        self._target = target
        self._params = params
        self._verbose = verbose
        self._printer = MarkedText(Console(highlight=False)) if show_drafts else PlainStream()
        self.history: list[dict[str, str]] = []
        self.stats = DecodeStats()
        self._begin([] if system is None else [_system(system)])

    def introduce(self) -> None:
        """Say to a person in two lines who answers and who drafts; what marks mean to everybody."""
        if sys.stdin.isatty():
            session.say(_model(self._target, self._llm.config))
            session.say(_drafting(self._llm.config))
        if self._verbose:
            session.say(_memory(self._llm.memory))
        if isinstance(self._printer, MarkedText):
            Console(stderr=True, highlight=False).print(self._printer.legend())

    def answer(self, message: str) -> None:
        """Stream the answer to `message`. One stopped by Ctrl-C stays in the history as far as it
        got."""
        asked = [*self.history, {"role": "user", "content": checked_text("the message", message)}]
        prompt = self._llm.chat_prompt(asked)
        before = self._llm.control
        completion = run_stream(self._llm, prompt, self._params, self._printer)
        self.history = [*asked, {"role": "assistant", "content": completion.text}]
        self.stats = self.stats.merge(completion.stats)
        self._comment(completion, _speedup(completion.stats, before, self._llm.control))

    def _comment(self, completion: Completion, speedup: float | None) -> None:
        """Say why an answer ended early, and to a person how fast it came."""
        if completion.finish_reason == "abort":
            session.say("stopped by you")
        elif completion.finish_reason == "length":
            full = [
                f"{note}; /clear begins anew" for note in full_context(completion, self._params)
            ]
            session.say("\n".join(full) or _cut_off(len(completion.token_ids)))
        if self._verbose:
            line = stats_line(
                completion.stats,
                lossless=completion.lossless,
                prompt_share=completion.prompt_share,
            )
            session.say(line, dim=True)
        elif completion.prompt_share < 1:
            session.say(
                f"LOSSY: {completion.prompt_share:.0%} of the conversation was read", dim=True
            )
        if sys.stdin.isatty() and completion.stats.decode_tokens_per_s is not None:
            session.say(_speed(completion.stats, speedup), dim=True)

    def command(self, line: str) -> None:
        """Obey a line that begins with a slash, LEAVING excepted. Raises ConfigError for one that
        cannot be obeyed."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/set":
                self._set(rest)
            case "/system":
                self._set_system(rest)
            case "/save":
                path = conversations.save(rest, self._target, self.history)
                session.say(f"{counted(len(self.history), 'message')} saved in {path}")
            case "/load":
                self._load(rest)
            case _ if name in ALONE and rest:
                raise ConfigError(f"{name} takes nothing after it, got '{rest}'")
            case "/show":
                self._show()
            case "/clear" | "/reset":
                self._begin(self._system_messages)
                session.say("conversation forgotten")
            case "/stats":
                session.say(stats_line(self.stats) if self.stats.steps else "no answer yet")
            case "/?" | "/help":
                session.say_facts(HELP)
            case _:
                close = nearest(name, COMMANDS)
                hint = f" Did you mean '{close}'?" if close else ""
                session.say(f"unknown command '{name}'.{hint} /? lists all.")

    def _begin(self, history: list[dict[str, str]]) -> None:
        """Continue from these messages. Raises what the template says against them."""
        self._llm.chat_prompt([*history, {"role": "user", "content": "."}])
        self.history = list(history)

    @property
    def _system_messages(self) -> list[dict[str, str]]:
        return [message for message in self.history[:1] if message["role"] == "system"]

    def _set(self, rest: str) -> None:
        what, _, value = rest.partition(" ")
        value = value.strip()
        if what == "parameter":
            self._set_parameter(value)
        elif what == "system":
            self._set_system(value)
        elif what in ("verbose", "quiet") and not value:
            self._verbose = what == "verbose"
            session.say(f"{what} from the next answer on")
        elif what in PARAMETERS:
            raise ConfigError(f"'/set {rest}' is written /set parameter {rest}")
        else:
            raise ConfigError(f"/set has no '{rest}'.{did_you_mean(what, SETTABLE)}")

    def _set_parameter(self, rest: str) -> None:
        given, _, value = rest.partition(" ")
        name = given.replace("-", "_")
        if name not in PARAMETERS:
            _, close = meant(name.replace("_", "-"), [p.replace("_", "-") for p in PARAMETERS])
            hint = f" Did you mean '{close.replace('-', '_')}'?" if close else ""
            raise ConfigError(
                f"/set parameter has no '{given}'.{hint} Available: {', '.join(PARAMETERS)}"
            )
        kind = type(self._params)
        read = parse_settings(kind, {name: value.strip()}, "/set parameter")
        self._params = dataclasses.replace(self._params, **{name: getattr(read, name)})
        session.say(f"{name}: {_shown(getattr(self._params, name))}")

    def _set_system(self, text: str) -> None:
        before = self._system_messages
        if text:
            message = _system(checked_text("the system message", text))
            self._begin([message, *self.history[len(before) :]])
            session.say("system message set")
        else:
            session.say(before[0]["content"] if before else "no system message")

    def _load(self, name: str) -> None:
        if name:
            self._begin(conversations.load(name))
            session.say(f"{counted(len(self.history), 'message')} loaded")
        else:
            session.say(", ".join(conversations.names()) or "no conversation is saved yet")

    def _show(self) -> None:
        config = self._llm.config
        facts = {
            "model": _model(self._target, config),
            "drafter": _drafting(config),
            "memory": _memory(self._llm.memory),
            **{name: _shown(getattr(self._params, name)) for name in PARAMETERS},
            "system": "".join(message["content"] for message in self._system_messages) or "none",
            "messages": str(len(self.history) - len(self._system_messages)),
        }
        session.say_facts(facts)
        for note in self._llm.notes:
            session.say(f"note: {note}")


def _shown(value: Any) -> str:
    """The value of a parameter; of a list its parts."""
    if isinstance(value, list):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else str(value)


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _model(target: str, config: Mapping[str, Any]) -> str:
    read = f", LOSSY: prefill {config['prefill']}" if config.get("prefill") else ""
    return f"{_short(target)}, {config['max_model_len']} tokens of context{read}"


def _drafting(config: Mapping[str, Any]) -> str:
    """One line about the drafter, which says so where drafts change the text."""
    if config["drafter"] == "none":
        return "no drafts"
    draft = f" ({_short(config['draft'])})" if config["draft"] else ""
    count = config["num_draft_tokens"]
    number = "as many tokens as pay" if str(count).startswith("auto") else f"{count} tokens a step"
    lossy = (
        ""
        if config["lossless"] or config.get("prefill")
        else f", LOSSY: verifier {config['verifier']} changes the text"
    )
    return f"drafts by {config['drafter']}{draft}, {number}{lossy}"


def _short(name: str) -> str:
    """A model's name without the folders that it lies in."""
    from outrider.models.loading.hub import called

    path = Path(name)
    return path.absolute().name if path.exists() and called(name) == name else called(name)


def _memory(memory: Mapping[str, Any]) -> str:
    models = [model for model in (memory["target"], memory["draft"], *memory["heads"]) if model]
    per_token = sum(model["kv_bytes_per_token"] for model in models)
    weights = amount(memory["weights_bytes"] + memory["draft_bytes"])
    return f"{weights} of weights, {amount(per_token)} for each token of context"


def _cut_off(num_tokens: int) -> str:
    return f"cut off after {num_tokens} tokens, the most for one answer: --max-tokens sets it (none: the whole context)"


def _speedup(
    stats: DecodeStats, before: Mapping[str, Any], after: Mapping[str, Any]
) -> float | None:
    """How much faster an answer was decoded than without drafts: what its tokens would have cost as
    plain steps over what its steps took. None where steps are not timed. `before`, `after`: what
    was measured until then."""
    plain_step_s = after.get("by_rows", {}).get(1, {}).get("seconds", {}).get(0)
    seconds = after.get("timed_s", 0.0) - before.get("timed_s", 0.0)
    if plain_step_s is None or seconds <= 0:
        return None
    return stats.decode_tokens * plain_step_s / seconds


def _speed(stats: DecodeStats, speedup: float | None) -> str:
    """How fast an answer came, how much faster than without drafts where that is known, and in
    words where they did not help."""
    tokens_per_s = stats.decode_tokens_per_s or 0.0
    speed = f"{tokens_per_s:.{0 if tokens_per_s >= 10 else 1}f} tokens/s"
    if speedup is None:
        helps = stats.accepted > 0 or stats.drafted == 0
    else:
        helps = speedup >= LEAST_GAIN
        speed += f", {speedup:.1f}x"
    return speed if helps else f"{speed}: drafts do not help here"
