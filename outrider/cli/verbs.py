"""How a verb's options reach the command line: those typed most as flags, all others as settings, `--set NAME=VALUE`.

An option is written the same for every verb: `FLAGS` lists the names that are flags. `--help` shows these, `--help-all` the
settings, too. A setting is an option of the parser named `--set NAME`, so that types, ranges and environment variables are
checked alike; `join_settings` makes one argument of `--set NAME=VALUE`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperOption
from typer.models import OptionInfo

from outrider.errors import ConfigError
from outrider.settings import to_bool

_TYPED = (
    "alpha api_key baseline_url batch_size budget c check concurrency config context_lengths "
    "device draft draft_endpoint drafter drafter_option drafters dtype epochs from_traffic "
    "head host init json kind_option kv_memory limit log_requests max_draft_tokens max_num_seqs max_tokens "
    "memory metrics_port model num_draft_tokens out pass_cost port prediction prompts questions "
    "result resume rounds samples seed served_model_name settings settings_out show_drafts system target "
    "target_endpoint temperature threads timeout tls_ca tls_cert tls_key to tokenizer verifier"
)
FLAGS = frozenset(_TYPED.split())

_GIVEN: ContextVar[frozenset[str]] = ContextVar("given", default=frozenset())  # options on this command line, by their fields


def option(default: Any, panel: str, text: str, **extra: Any) -> Any:
    """A field of a group of options: its default, the panel of the help that lists it, and its line there."""
    return dataclasses.field(default=default, metadata={"option": listed(panel, text, **extra)})


def listed(panel: str, text: str, **extra: Any) -> Any:
    """The annotation of an option that is a parameter of the verb itself."""
    return typer.Option(help=text, rich_help_panel=panel, **extra)


def written(name: str) -> str:
    """How an option is typed: `--batch-size`, or `--set top_k`."""
    return f"--{name.replace('_', '-')}" if name in FLAGS else f"--set {name}"


def with_groups(verb: Callable[..., int | None]) -> Callable[..., int | None]:
    """Replace every dataclass parameter of `verb` by its fields, so that typer sees plain options, each as it is typed."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            parameters += [_parameter(field.name, kind, field.default) for field, kind in _fields(groups[name])]
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))
    parameters.append(inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))
    parameters.append(inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def command(*, help_all: bool, typer_context: typer.Context, **values: Any) -> int | None:
        _GIVEN.set(frozenset(name for name in values if _is_given(typer_context, name)))
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        return verb(**values)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def add_verb(app: typer.Typer, verb: Callable[..., int | None]) -> None:
    """Add a verb to the application. Where it has settings, the last line of its help says how they are given."""
    count = sum(name not in FLAGS and _is_option(p.annotation) for name, p in inspect.signature(verb).parameters.items()) - 1
    more = f"{count} further options are given as --set NAME=VALUE: --help-all lists them." if count > 0 else None
    app.command(epilog=more)(verb)


def _show_all(context: typer.Context, wanted: bool) -> None:
    """The help with everything that only --help-all lists."""
    if wanted:
        for parameter in context.command.params:
            if isinstance(parameter, TyperOption):
                parameter.hidden = parameter.name == "help_all"
        context.command.epilog = None
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", hidden=True, is_eager=True, callback=_show_all)]


def _fields(group: Any) -> Iterable[tuple[dataclasses.Field[Any], Any]]:
    """Each field with its annotation, made of what `option` or `outrider.settings.setting` says about it."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        found = field.metadata.get("option")
        if found is None and (text := field.metadata.get("help")) is not None:
            found = listed("Training", f"{text[:1].upper()}{text[1:]}.")
        yield field, hints[field.name] if found is None else Annotated[hints[field.name], found]


def _is_option(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and isinstance(annotation.__metadata__[0], OptionInfo)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter for typer: an option under the name that it is typed by. A setting that is true or false takes one of both."""
    if _is_option(annotation):
        kind, info = annotation.__origin__, copy.copy(annotation.__metadata__[0])
        info.param_decls, info.hidden = (written(name),), name not in FLAGS
        if info.hidden and bool in (kind, *get_args(kind)):
            kind, info.parser, info.metavar = str, _true_or_false, "true|false"
        annotation = Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _true_or_false(text: str) -> bool:
    try:
        return to_bool(text)
    except ValueError:
        raise typer.BadParameter(f"true or false is needed; got {text!r}") from None


def name_and_value(option: str, text: str) -> tuple[str, str]:
    """'NAME=VALUE' in two. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"{option} takes NAME=VALUE, got '{text}'")
    return name, value


def join_settings(arguments: Sequence[str]) -> list[str]:
    """`--set NAME=VALUE` as one argument each, the form in which the parser knows settings. Raises ConfigError."""
    joined, waiting = list[str](), iter(arguments)
    for argument in waiting:
        if argument == "--set" or argument.startswith("--set="):
            setting = next(waiting, "") if argument == "--set" else argument.removeprefix("--set=")
            argument = "--set {}={}".format(*name_and_value("--set", setting))
        joined.append(argument)
        if argument == "--":
            break
    return [*joined, *waiting]


def refuse_unused(names: Sequence[str], where: str) -> None:
    """Raises ConfigError where options were given that change nothing."""
    if names:
        raise ConfigError(f"{', '.join(names)} {'mean' if len(names) > 1 else 'means'} nothing {where}")


def given(*groups: Any) -> list[str]:
    """Options of these groups that stand on the command line, as they are typed."""
    names = _GIVEN.get()
    return [written(field.name) for group in groups for field in dataclasses.fields(group) if field.name in names]


def typed(group: Any, *left_out: str) -> list[str]:
    """The options of a group that stand on the command line, with their values, word by word; some are left out by name."""
    words = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if field.name in _GIVEN.get() and field.name not in left_out:
            words += typed_words(field.name, str(value).lower() if isinstance(value, bool) else value)
    return words


def typed_words(name: str, value: Any) -> list[str]:
    """An option with its value, word by word."""
    return [written(name), str(value)] if name in FLAGS else ["--set", f"{name}={value}"]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
