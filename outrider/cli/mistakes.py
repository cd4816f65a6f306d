"""The parser's errors about a mistyped command line in our own words, with the nearest option and where to look."""

from __future__ import annotations

from typing import Any

import typer

from outrider.cli.verbs import misspelt

NEEDED = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false"}


def usage_message(error: typer.TyperException) -> str:
    """One line about an error of the parser."""
    context: Any = getattr(error, "ctx", None)
    known = (_misspelt(error, context), _wrong_value(error), _missing_value(error), _too_many(error, context))
    message = next(filter(None, known), error.format_message().rstrip("."))
    help_option = "--help-all" if "--set " in message else "--help"
    where = f"{context.command_path} {help_option}" if context else "outrider --help"
    return f"{message}{'' if message.endswith('?') else '.'} See '{where}'."


def _misspelt(error: typer.TyperException, context: Any) -> str | None:
    name = getattr(error, "option_name", None)
    if not name or not error.format_message().startswith("No such option"):
        return None
    return misspelt(name, [known for parameter in context.command.params for known in parameter.opts] if context else [])


def _missing_value(error: typer.TyperException) -> str | None:
    name = getattr(error, "option_name", None)
    return f"{name}: a value is needed" if name and "requires an argument" in error.format_message() else None


def _too_many(error: typer.TyperException, context: Any) -> str | None:
    """Words behind the last argument: a prompt without quotes, as a rule."""
    _, found, words = error.format_message().partition("Got unexpected extra argument(s) (")
    if not found:
        return None
    takes_prompt = context is not None and any(parameter.name == "prompt" for parameter in context.command.params)
    hint = ": a prompt of several words needs quotes around it" if takes_prompt else ""
    return f"nothing is expected behind the last argument, got '{words.rstrip(')')}'{hint}"


def _wrong_value(error: typer.TyperException) -> str | None:
    """`--limit: a whole number of at least 1 is needed; got '0'`, where one value was wrong."""
    parameter: Any = getattr(error, "param", None)
    if parameter is None or not hasattr(error, "message") or not error.message:
        return None
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.human_readable_name
    find_errors: Any = getattr(error.__cause__, "errors", None)
    if find_errors is None:
        return f"{name}: {error.message}".rstrip(".")
    first = find_errors()[0]
    needed = _needed(first["type"], parameter.type_descriptor)
    words = first["msg"].removeprefix("Value error, ") if needed is None else f"{needed} is needed"
    return f"{name}: {words.rstrip('.')}; got {first['input']!r}"


def _needed(kind: str, descriptor: Any) -> str | None:
    """What the value of an option must be, in words; None: pydantic's will do. `kind`: its name of the error."""
    if descriptor.choices:
        return f"one of {', '.join(map(str, descriptor.choices))}"
    kind = kind.partition("_")[0]
    if kind in ("greater", "less"):
        kind = "int" if "int" in str(descriptor.annotation) else "float"
    what = NEEDED.get(kind)
    low, high = descriptor.parameter_info.min, descriptor.parameter_info.max
    if what is None or kind == "bool" or (low is None and high is None):
        return what
    if low is None or high is None:
        return f"{what} of at {'most' if low is None else 'least'} {high if low is None else low}"
    return f"{what} from {low} to {high}"
