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
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperOption
from typer.models import OptionInfo

from outrider.errors import ConfigError, did_you_mean

HELP_OF = "--help-of"  # how the parser gets `--help=GROUP`
ALL = "all"
# the variable by which a shell asks for completions, which are of every option
COMPLETING = "_OUTRIDER_COMPLETE"

# options on this command line, by their fields
_GIVEN: ContextVar[frozenset[str]] = ContextVar("given", default=frozenset())


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
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            parameters += [
                _parameter(field.name, kind, field.default) for field, kind in _fields(groups[name])
            ]
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))
    parameters.append(
        inspect.Parameter(
            "help_of", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HelpOf
        )
    )
    parameters.append(
        inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    )

    def command(*, help_of: str | None, typer_context: typer.Context, **values: Any) -> int | None:
        _GIVEN.set(frozenset(name for name in values if _is_given(typer_context, name)))
        for name, group in groups.items():
            values[name] = group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
        return verb(**values)

    command.__name__ = verb.__name__
    command.__doc__ = verb.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def add_verb(app: typer.Typer, verb: Callable[..., int | None]) -> None:
    """Add a verb to the application. The last line of its help says how to see the options that it
    leaves out."""
    parameters = inspect.signature(verb).parameters
    infos = [
        _info(parameter.annotation) for name, parameter in parameters.items() if name != "help_of"
    ]
    hidden = [info for info in infos if info is not None and info.hidden]
    groups = dict.fromkeys(_group(info.rich_help_panel) for info in hidden)
    more = f"{len(hidden)} further options: --help={ALL}, or of one group --help={'|'.join(groups)}"
    app.command(epilog=more if hidden else None)(verb)


def _group(panel: str | None) -> str:
    """What a panel of the help is called after `--help=`: 'Model and machine' is `model`."""
    return (panel or "options").split()[0].lower()


def _show(context: typer.Context, wanted: str | None) -> None:
    """The help with all options, or with those of one group. Raises ConfigError for a group that is
    none."""
    if wanted is None:
        return
    options = [
        one
        for one in context.command.params
        if isinstance(one, TyperOption) and HELP_OF not in one.opts
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
        found = field.metadata.get("option")
        if found is None and (text := field.metadata.get("description")) is not None:
            found = listed(
                "Training", f"{text[:1].upper()}{text[1:]}.", common=field.metadata["common"]
            )
        yield field, hints[field.name] if found is None else Annotated[hints[field.name], found]


def _info(annotation: Any) -> OptionInfo | None:
    """What typer knows of an option; None for an argument."""
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
    names = _GIVEN.get()
    return [
        written(field.name)
        for group in groups
        for field in dataclasses.fields(group)
        if field.name in names
    ]


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
