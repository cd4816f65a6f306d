"""How a verb's options reach the command line. Every option is a flag: `max_model_len` is typed
`--max-model-len`.

`--help` shows the options that are marked `common` at their field, `--help=all` every one,
`--help=sampling` those of one group.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from pydantic import Field, TypeAdapter, ValidationError
from typer.core import TyperOption
from typer.models import OptionInfo

from outrider.errors import ConfigError, did_you_mean

HELP_OF = "--help-of"  # how the parser gets `--help=GROUP`
ALL = "all"
# the variable by which a shell asks for completions, which are of every option
COMPLETING = "_OUTRIDER_COMPLETE"

# options on this command line: field -> as it is typed
_GIVEN: ContextVar[Mapping[str, str]] = ContextVar("given", default=MappingProxyType({}))


def option(default: Any, panel: str, text: str, **extra: Any) -> Any:
    """A field of a group of options: its default, the panel of the help that lists it, and its line
    there. See `listed`."""
    return dataclasses.field(default=default, metadata={"option": listed(panel, text, **extra)})


def listed(panel: str, text: str, *, common: bool = False, **extra: Any) -> Any:
    """The annotation of an option that is a parameter of the verb itself. `common`: `--help` shows
    it."""
    return typer.Option(help=text, rich_help_panel=panel, hidden=not common, **extra)


def written(name: str) -> str:
    """How an option is typed: `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def with_groups(verb: Callable[..., int | None]) -> Callable[..., int | None]:
    """Replace every dataclass parameter of `verb` by its fields, so that typer sees plain options,
    each as it is typed."""
    return gathered()(verb)


def gathered(
    **texts: Sequence[str],
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Like `with_groups`, but fields that a study seldom sets are written in one text:
    `gathered(sampling=("top_k", "top_p"))` takes `--sampling "top_k=40 top_p=0.9"`."""
    return lambda verb: _command(verb, texts)


def _command(
    verb: Callable[..., int | None], texts: Mapping[str, Sequence[str]]
) -> Callable[..., int | None]:
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    text_of = {name: text for text, names in texts.items() for name in names}
    inside: dict[str, dict[str, inspect.Parameter]] = {text: {} for text in texts}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        fields = [(name, hints[name], parameter.default)]
        if name in groups:
            fields = [(one.name, kind, one.default) for one, kind in _fields(groups[name])]
        for field, annotation, default in fields:
            flag = _parameter(field, annotation, default)
            if field in text_of:
                inside[text_of[field]][field] = flag
            else:
                parameters.append(flag)
    parameters += [_text_parameter(text, several) for text, several in inside.items()]
    parameters.append(
        inspect.Parameter(
            "help_of", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HelpOf
        )
    )
    parameters.append(
        inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    )

    def command(*, help_of: str | None, typer_context: typer.Context, **values: Any) -> int | None:
        given = {name: written(name) for name in values if _is_given(typer_context, name)}
        for text, several in inside.items():
            named = _read_text(text, values.pop(text), several)
            given |= {name: f"{written(text)} {name}" for name in named}
            values |= {name: part.default for name, part in several.items()} | named
        _GIVEN.set(given)
        for name, group in groups.items():
            values[name] = group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
        return verb(**values)

    command.__name__ = verb.__name__
    command.__doc__ = verb.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.forms = {  # type: ignore[attr-defined]
        name: f"{written(text)} {name}=VALUE" for text, names in inside.items() for name in names
    }
    return command


def _text_parameter(text: str, several: Mapping[str, inspect.Parameter]) -> inspect.Parameter:
    """The option that holds these; its help has the line of each."""
    infos = {name: _info(part.annotation) for name, part in several.items()}
    lines = [f"{name}: {info.help}" for name, info in infos.items() if info is not None]
    panel = next(info.rich_help_panel for info in infos.values() if info is not None)
    info = listed(
        panel or "Options",
        f"NAME=VALUE with spaces between; may be given again. {' '.join(lines)}",
        metavar="'NAME=VALUE ...'",
        show_default=False,
    )
    return _parameter(text, Annotated[list[str] | None, info], None)


def _read_text(
    text: str, given: Sequence[str] | None, known: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Values by name, each of its option's kind. Raises ConfigError."""
    words: dict[str, list[str]] = {}
    for written_so in given or ():
        try:
            several = shlex.split(written_so)
        except ValueError as error:
            raise ConfigError(f"{written(text)}: {error} in '{written_so}'") from error
        for word in several:
            name, equals, value = word.partition("=")
            name = name.replace("-", "_")
            if not equals:
                raise ConfigError(
                    f"{written(text)} takes NAME=VALUE with spaces between, got '{word}'"
                )
            if name not in known:
                raise ConfigError(f"{written(text)} has no '{name}'.{did_you_mean(name, known)}")
            words.setdefault(name, []).append(value)
    return {name: _value(text, name, values, known[name]) for name, values in words.items()}


def _value(text: str, name: str, values: Sequence[str], option: inspect.Parameter) -> Any:
    kind = get_args(option.annotation)[0]
    info = _info(option.annotation)
    takes_several = any(get_origin(part) is list for part in (kind, *get_args(kind)))
    if len(values) > 1 and not takes_several:
        raise ConfigError(f"{written(text)} has two values for '{name}': leave one out")
    least = None if info is None else info.min
    checked: Any = kind if least is None else Annotated[kind, Field(ge=least)]
    try:
        return TypeAdapter(checked).validate_python(list(values) if takes_several else values[0])
    except ValidationError as error:
        words = error.errors()[0]["msg"]
        raise ConfigError(f"{written(text)}: {name}={values[0]}: {words}") from error


def add_verb(
    app: typer.Typer,
    verb: Callable[..., int | None],
    name: str | None = None,
    help: str | None = None,
) -> None:
    """Add a verb to the application, under another name than its own where one is given. The last
    line of its help says how to see the options that it leaves out."""
    parameters = inspect.signature(verb).parameters
    infos = [
        _info(parameter.annotation) for name, parameter in parameters.items() if name != "help_of"
    ]
    hidden = [info for info in infos if info is not None and info.hidden]
    groups = dict.fromkeys(_group(info.rich_help_panel) for info in hidden)
    more = f"{len(hidden)} further options: --help={ALL}, or of one group --help={'|'.join(groups)}"
    app.command(name, help=help, epilog=more if hidden else None)(verb)


def _group(panel: str | None) -> str:
    """The name of a panel of the help after `--help=`: 'Model and machine' is `model`."""
    return (panel or "options").split()[0].lower()


def _show(context: typer.Context, wanted: str | None) -> None:
    """The help with all options, or with those of one group. Raises ConfigError for a group that is
    none."""
    if wanted is None:
        return
    options = [
        parameter
        for parameter in context.command.params
        if isinstance(parameter, TyperOption) and HELP_OF not in parameter.opts
    ]
    groups = list(dict.fromkeys(_group(option.rich_help_panel) for option in options))
    asked = wanted.lower()
    if asked not in (ALL, *groups):
        nearest = did_you_mean(asked, [ALL, *groups])
        raise ConfigError(
            f"--help={wanted}: no such group of options.{nearest} Groups: {', '.join(groups)}"
        )
    for option in options:
        option.hidden = asked not in (ALL, _group(option.rich_help_panel))
    context.command.epilog = None
    typer.echo(context.get_help())
    raise typer.Exit


HelpOf = Annotated[str | None, typer.Option(HELP_OF, hidden=True, is_eager=True, callback=_show)]


def _fields(group: Any) -> Iterable[tuple[dataclasses.Field[Any], Any]]:
    """Each field with its annotation, made of what `option` or `outrider.settings.setting` says
    about it."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        typer_option = field.metadata.get("option")
        if typer_option is None and (text := field.metadata.get("description")) is not None:
            typer_option = listed(
                "Training", f"{text[:1].upper()}{text[1:]}.", common=field.metadata["common"]
            )
        yield (
            field,
            hints[field.name]
            if typer_option is None
            else Annotated[hints[field.name], typer_option],
        )


def _info(annotation: Any) -> OptionInfo | None:
    """Typer's record of an option; None for an argument."""
    if get_origin(annotation) is not Annotated:
        return None
    info = annotation.__metadata__[0]
    return info if isinstance(info, OptionInfo) else None


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter for typer: an option under the name that it is typed by. One that may be true has
    `--no-NAME`, too."""
    info = copy.copy(_info(annotation))
    if info is not None:
        kind = annotation.__origin__
        flag = written(name)
        is_switch = bool in (kind, *get_args(kind)) and default is not False
        info.hidden = bool(info.hidden) and COMPLETING not in os.environ
        info.param_decls = (f"{flag}/--no-{flag[2:]}" if is_switch else flag,)
        annotation = Annotated[kind, info]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def spread_help(arguments: Sequence[str]) -> list[str]:
    """`--help=GROUP` as the parser reads it, where it takes a value; words after `--` are words."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spread = []
    for argument in arguments[:end]:
        group = argument.removeprefix("--help=")
        spread += [argument] if group == argument else [HELP_OF, group]
    return [*spread, *arguments[end:]]


def refuse_unused(names: Sequence[str], where: str) -> None:
    """Raises ConfigError where options were given that change nothing."""
    if names:
        raise ConfigError(
            f"{', '.join(names)} {'mean' if len(names) > 1 else 'means'} nothing {where}"
        )


def given(*groups: Any) -> list[str]:
    """Options of these groups that stand on the command line, as they are typed."""
    forms = _GIVEN.get()
    return [
        forms[field.name]
        for group in groups
        for field in dataclasses.fields(group)
        if field.name in forms
    ]


def as_typed(name: str) -> str:
    """An option as it stands on the command line, else as most verbs take it."""
    return _GIVEN.get().get(name, written(name))


def typed(group: Any, *left_out: str) -> list[str]:
    """The options of a group that stand on the command line, with their values, word by word; some
    are left out by name."""
    words = []
    for field in dataclasses.fields(group):
        if field.name in _GIVEN.get() and field.name not in left_out:
            words += typed_words(field.name, getattr(group, field.name))
    return words


def typed_words(name: str, value: Any) -> list[str]:
    """An option with its value, word by word."""
    if isinstance(value, bool):
        return [written(name) if value else f"--no-{written(name)[2:]}"]
    return [written(name), str(value)]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
