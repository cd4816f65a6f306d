"""The table of verbs, and the one place where an error, a mistyped command line too, becomes a line
and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outrider.cli.borrowed import ours
from outrider.cli.verbs import ALL, add_verb, spread_help
from outrider.errors import OutriderError
from outrider.foreign import meant
from outrider.report.text import PLAINER
from outrider.settings import wrong
from outrider.version import __version__


def unknown_option(
    given: str, known: Iterable[str], gathered: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The error about an option that a verb does not have, among the options and arguments `known`
    that it has. `gathered`: how those are written that share a text."""
    forms = {_bare(name): _form(name) for name in known}
    forms |= {_bare(name): form for name, form in gathered.items()}
    asked = _bare(given)
    if asked not in forms and asked.removeprefix("no-") in forms:
        asked = asked.removeprefix("no-")
    if asked in forms:
        return f"'{given}' is written {forms[asked]}"
    why, close = meant(asked, forms)
    hint = f": {why}" if why else f". Did you mean '{forms[close]}'?" if close else ""
    return f"unknown option '{given}'{hint}"


def _form(name: str) -> str:
    """How a name is typed; an argument, which has none on the command line, in capitals."""
    return name if name.startswith("-") else f"{name.upper()} without a name in front"


def _bare(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


VERBS = (  # a module of `outrider.cli` each, and the function of that name in it
    "generate", "chat", "serve", "demo", "pull", "ls", "doctor", "estimate", "report", "bench", "tune", "replay", "certify",
    "explain", "train", "export",
)  # fmt: skip
# other names, as ollama has them: the verb's module, its function there, and its help
ALIASES = {
    "run": ("chat", "chat", "The same as chat."),
    "list": ("ls", "list_models", None),
}
SERVICE = "service"  # the group of verbs for a deployment in parts
LOADING = "loading"  # the name of threads that load models for servers and services
INTERRUPTED = 130  # what shells report for a command ended by Ctrl-C


class Verbs(TyperGroup):
    """The verbs of the command line. Ctrl-C leaves them as `typer.Abort`: typer would make an exit
    code without a word."""

    def make_context(self, *values: Any, **options: Any) -> Any:
        """Reads the arguments."""
        with _interrupts_abort():
            return super().make_context(*values, **options)

    def invoke(self, context: Any) -> Any:
        """Runs the verb."""
        with _interrupts_abort():
            return super().invoke(context)


@contextmanager
def _interrupts_abort() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort from None


def build_app(only: str | None = None) -> typer.Typer:
    """The whole command line as one typer application; `only`: this verb of it alone, which is read
    in a third of the time."""
    app = typer.Typer(
        name="outrider",
        cls=Verbs,
        help="Lossless speculative decoding: the same text, faster.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(top_level)
    for verb in VERBS:
        if only in (None, verb):
            add_verb(app, getattr(importlib.import_module(f"outrider.cli.{verb}"), verb))
    for alias, (module, function, help) in ALIASES.items():
        if only in (None, alias):
            verb = getattr(importlib.import_module(f"outrider.cli.{module}"), function)
            add_verb(app, verb, alias, help)
    if only in (None, SERVICE):
        app.add_typer(importlib.import_module("outrider.cli.service").service_app())
    return app


def top_level(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"outrider {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code. Only a bug of ours leaves here as an exception."""
    try:
        named = arguments[0] if arguments else None
        only = named if named in (*VERBS, *ALIASES, SERVICE) else None
        command: Any = typer.main.get_command(build_app(only))
        words = list(arguments)
        if only not in (None, SERVICE):
            words = _translated(command.commands[only], arguments)
        return command(args=spread_help(words), prog_name="outrider", standalone_mode=False) or 0
    except OutriderError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(usage_message(error), error.exit_code)
    except (
        SystemExit
    ) as left:  # typer's way out when the reader of our output has gone: nobody to tell
        return int(left.code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)


def _translated(verb: Any, arguments: Sequence[str]) -> list[str]:
    """The command line with our names for what other engines call by theirs."""
    options = {
        name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)
    }
    takes = {parameter.name for parameter in verb.params if parameter.param_type_name == "argument"}
    return [arguments[0], *ours(arguments[1:], options, takes)]


def main() -> None:
    """Run the command line of this process, and end it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAINER)  # what a terminal cannot show must not end the run
    code = run(sys.argv[1:])
    if any(thread.name == LOADING for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        # a thread that reads weights cannot be stopped, and Python would abort while it runs
        os._exit(code)
    sys.exit(code)


def _fail(message: str, exit_code: int) -> int:
    line = " ".join(message.split())  # one line, whatever a library put into it
    sys.stderr.write(f"error: {line}\n")
    return exit_code


def usage_message(error: typer.TyperException) -> str:
    """One line about an error of the parser."""
    context: Any = getattr(error, "ctx", None)
    known = (
        _unknown(error, context),
        _wrong_value(error),
        _missing_value(error),
        _too_many(error, context),
    )
    message = next(filter(None, known), error.format_message().rstrip("."))
    where = f"{context.command_path} --help={ALL}" if context else "outrider --help"
    return f"{message}{'' if message.endswith('?') else '.'} See '{where}'."


def _unknown(error: typer.TyperException, context: Any) -> str | None:
    name = getattr(error, "option_name", None)
    if not name or not error.format_message().startswith("No such option"):
        return None
    if not context:
        return unknown_option(name, [])
    known = [known for parameter in context.command.params for known in parameter.opts]
    return unknown_option(name, known, getattr(context.command.callback, "forms", {}))


def _missing_value(error: typer.TyperException) -> str | None:
    name = getattr(error, "option_name", None)
    return (
        f"{name}: a value is needed"
        if name and "requires an argument" in error.format_message()
        else None
    )


def _too_many(error: typer.TyperException, context: Any) -> str | None:
    """Words after the last argument: a prompt without quotes, as a rule."""
    _, usage, words = error.format_message().partition("Got unexpected extra argument(s) (")
    if not usage:
        return None
    takes_prompt = context is not None and any(
        parameter.name == "prompt" for parameter in context.command.params
    )
    hint = ": a prompt of several words needs quotes around it" if takes_prompt else ""
    return f"nothing is expected after the last argument, got '{words.rstrip(')')}'{hint}"


def _wrong_value(error: typer.TyperException) -> str | None:
    """`--limit must be at least 1, got '0'`, where one value was wrong."""
    parameter: Any = getattr(error, "param", None)
    if parameter is None or not hasattr(error, "message") or not error.message:
        return None
    name = (
        parameter.opts[0]
        if parameter.param_type_name == "option"
        else parameter.human_readable_name
    )
    find_errors: Any = getattr(error.__cause__, "errors", None)
    if find_errors is None:
        return f"{name}: {error.message}".rstrip(".")
    first = find_errors()[0]
    choices = parameter.type_descriptor.choices
    way = f"must be one of {', '.join(map(str, choices))}" if choices else wrong(first)
    return f"{name} {way.rstrip('.')}, got {first['input']!r}"
