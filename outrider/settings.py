"""Settings: frozen dataclasses that pydantic checks, whether Python, the command line, TOML or HTTP
fills them in.

    @checked()
    @dataclass(frozen=True)
    class NgramSettings:
        max_ngram: int = setting(4, "longest n-gram looked up, in tokens", at_least=1)

    NgramSettings(max_ngram=0)
    # ConfigError: max_ngram must be at least 1 (longest n-gram looked up, in tokens), got 0
    parse_settings(NgramSettings, {"max_ngram": "3"}, "drafter 'ngram'")

A field's type and bounds stand at the field and nowhere else. What several values must be together
is the dataclass's own business (`__post_init__`). Types are strict: "3" and True are no numbers.
But 3.0 is the whole number 3, a list is as good as a tuple, and a text as good as a path. pydantic
is imported when the first instance is made.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, TypeVar, cast, get_args, get_type_hints

from outrider.errors import ConfigError, did_you_mean
from outrider.foreign import check_arguments
from outrider.lazy import pydantic, pydantic_core

BOUNDS = {"at_least": "ge", "above": "gt", "at_most": "le", "below": "lt"}  # ours -> pydantic's
STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False, "validate_by_name": True}
NEEDED = {  # type of pydantic's error -> what a value must be
    "int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false", "string": "a text",
    "path": "a path", "list": "a list", "tuple": "a list", "sequence": "a list", "is": "a list", "dict": "a dictionary",
    "model": "an object",
}  # fmt: skip
LIMITS = {  # likewise, with the key of the limit in the error
    "greater_than_equal": ("at least", "ge"), "greater_than": ("above", "gt"), "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}  # fmt: skip
ALTERNATIVES = ("str", "int", "float", "bool")  # pydantic's names for members of a union
Record = TypeVar("Record")


def setting(default: Any, text: str, *, common: bool = False, **more: Any) -> Any:
    """A dataclass field with a default and the line that help and errors print about it.

    `list` as the default is an empty list. `common`: where it is an option of the command line, `--help` shows it. `more`: bounds
    (at_least, above, at_most, below), and other arguments of pydantic's `Field`.
    """
    arguments = {BOUNDS.get(name, name): value for name, value in more.items()}
    metadata = {"description": text, "common": common, **arguments}
    if default is list:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def checked(prefix: str = "") -> Callable[[type[Record]], type[Record]]:
    """Decorator of a dataclass whose values pydantic checks whenever an instance is made.

    It raises ConfigError for a wrong value, TypeError for a name that the class does not have.
    `prefix`: what names begin with in messages.
    """

    def decorate(record: type[Record]) -> type[Record]:
        kind: Any = record
        kind.__pydantic_config__ = STRICT
        kind.__get_pydantic_core_schema__ = classmethod(_schema)

        @wraps(kind.__init__)
        def init(self: Any, *values: Any, **named: Any) -> None:
            _fill(self, kind, values, named, prefix)

        kind.__init__ = init
        return record

    return decorate


def described(record: type[Record]) -> type[Record]:
    """Decorator of a dataclass: its docstring, which `help` shows, ends with its fields, their
    defaults and what `setting` says about them."""
    fields = dataclasses.fields(cast(Any, record))
    width = max(len(field.name) for field in fields)
    lines = [
        f"{field.name:<{width}}  {field.metadata['description']} (default {_default_of(field)!r})"
        for field in fields
    ]
    record.__doc__ = "\n".join([inspect.cleandoc(record.__doc__ or ""), "", *lines])
    return record


def _default_of(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


@dataclass(frozen=True)
class NoSettings:
    """Nothing to set."""


def parse_settings(kind: type, given: Mapping[str, Any], owner: str) -> Any:
    """An instance of `kind`, whose values may be texts. Raises ConfigError naming `owner` for an
    unknown name or an unusable value."""
    known = [field.name for field in dataclasses.fields(kind)]
    annotations = get_type_hints(kind, include_extras=True)
    prefix = f"{owner}: "
    values = {}
    for name, value in given.items():
        field = name.replace("-", "_")
        if field not in known:
            expected = did_you_mean(field, known) if known else " It has none."
            raise ConfigError(f"{owner} has no option '{name}'.{expected}")
        if isinstance(value, str):
            value = _read(kind, field, value, annotations[field], prefix)
        values[field] = value
    settings: Any = object.__new__(kind)
    _fill(settings, kind, (), values, prefix)
    return settings


def describe_settings(kind: type) -> dict[str, str]:
    """name -> 'default: what it is', for `outrider ls`."""
    return {
        field.name: f"{_default_of(field)}: {field.metadata.get('description', '')}"
        for field in dataclasses.fields(kind)
    }


def problem(errors: Sequence[Any]) -> tuple[list[str], str, Any]:
    """(place, what is wrong with its value, the value) of pydantic's errors about one object.

    The first field that is wrong is reported, in all the ways it is wrong: those of all forms that
    its value may have, or what is wrong inside it, where one of the forms is meant.
    """
    about = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    value = _parts(about[0])
    while value and not plain_place(value[-1:]):
        value.pop()
    forms = [error for error in about if _parts(error)[: len(value)] == value]
    inside = [error for error in forms if len(plain_place(_parts(error))) > len(plain_place(value))]
    place = plain_place(value)
    if len({_parts(error)[len(value)] for error in inside}) == 1:
        place = plain_place(_parts(inside[0]))
        forms = [error for error in inside if plain_place(_parts(error)) == place]
    ways = " or ".join(dict.fromkeys(map(wrong, forms)))
    return place, ways.replace(" or must be ", " or "), forms[0].get("input")


def wrong(error: Any) -> str:
    """How a value is wrong, as the end of a sentence about it: 'must be at least 1'."""
    kind = error["type"]
    context = error.get("ctx") or {}
    if kind == "missing":
        return "is required"
    if kind in LIMITS:
        words, key = LIMITS[kind]
        return f"must be {words} {_figure(context[key])}"
    if kind == "string_unicode":
        return "must not have half a surrogate pair"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind.startswith("dataclass"):
        return f"must be {context['class_name']}"
    if kind == "string_too_short" and context["min_length"] == 1:
        return "must not be empty"
    if kind == "too_short":
        return f"must have at least {context['min_length']}"
    needed = NEEDED.get(kind.split("_")[0]) if "_too_" not in kind and "pattern" not in kind else ""
    message = error["msg"].removeprefix("Value error, ")
    return f"must be {needed}" if needed else re.sub(r"^(\w+ )?should", "must", message)


def liberal(schema: Any) -> Any:
    """A schema of pydantic's with the liberties that the module names. Lists and objects end at
    their first mistake: there is room for a million of them."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(liberal, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")  # or a field of that name
    if isinstance(kind, str) and kind in CONVERTED:
        function = CONVERTED[kind]
        return pydantic_core.core_schema.no_info_before_validator_function(function, schema)
    if kind == "function-before" and schema["function"]["function"] in CONVERTED.values():
        return schema  # of an object inside
    changed = {name: liberal(part) for name, part in schema.items()}
    if kind in ("list", "dict"):
        changed["fail_fast"] = True
    if kind in ("tuple", "lax-or-strict"):  # the latter is a path
        changed["strict"] = False
    return changed


def plain_place(place: Sequence[str]) -> list[str]:
    """Without pydantic's own names for the members of a union: types, and classes, whose names
    begin with a capital."""
    return [
        part
        for part in place
        if "[" not in part
        and part not in ALTERNATIVES
        and not part.startswith("constrained-")
        and not part[:1].isupper()
    ]


@cache
def _validator(kind: type) -> Any:
    return pydantic.TypeAdapter(kind).validator


def _schema(kind: type, source: Any, handler: Callable[[Any], Any]) -> Any:
    """pydantic's schema of a checked dataclass."""
    return liberal(handler(source))


def _whole(value: Any) -> Any:
    """16 for 16.0 and for NumPy's 16."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**64
    is_foreign = isinstance(value, Integral) and not isinstance(value, int)
    return int(value) if is_whole or is_foreign else value


def _real(value: Any) -> Any:
    """Python's own number for NumPy's."""
    is_foreign = isinstance(value, Real) and type(value) not in (int, bool, float)
    return float(value) if is_foreign else value


CONVERTED: dict[str, Callable[[Any], Any]] = {"int": _whole, "float": _real}


def _fill(
    instance: Any, kind: type, values: tuple[Any, ...], named: dict[str, Any], prefix: str
) -> None:
    """The class's own `__init__`, with checks."""
    given = pydantic_core.ArgsKwargs(values, named)
    try:
        _validator(kind).validate_python(given, self_instance=instance)
    except pydantic.ValidationError as error:
        raise _told(kind, error.errors(), prefix) from error


def _read(kind: type, name: str, text: str, annotation: Any, prefix: str) -> Any:
    """The value that a text stands for in a field."""
    if text == "none" and types.NoneType in get_args(annotation):
        return None
    try:
        return pydantic.TypeAdapter(annotation).validate_strings(text)
    except pydantic.ValidationError as error:
        errors = [{**detail, "loc": (name, *detail["loc"])} for detail in error.errors()]
        raise _told(kind, errors, prefix) from error


def _told(kind: type, errors: Sequence[Any], prefix: str) -> Exception:
    """pydantic's errors as one of ours: ConfigError of a value, TypeError of an argument."""
    first = errors[0]
    if "argument" in first["type"] or first["type"] == "missing":
        argument = first["loc"][0]
        check_arguments(kind, [argument] if isinstance(argument, str) else [])
        return TypeError(f"{kind.__name__}(): {first['msg'].lower()}: {argument!r}")
    if not first["loc"] and "error" in first.get("ctx", {}):
        return cast(Exception, first["ctx"]["error"])  # of the class's own `__post_init__`
    (name, *inside), way, value = problem(errors)
    fields = dataclasses.fields(kind)
    named = {name: field for field in fields for name in (field.name, field.metadata.get("alias"))}
    field = fields[int(name)] if name.isdigit() else named[name]  # an argument without a name
    text = field.metadata.get("description")
    if text and not inside and first["type"] in LIMITS:
        way = f"{_range(field.metadata)} ({text})"
    called = field.metadata.get("alias", field.name) + "".join(f"[{part}]" for part in inside)
    return ConfigError(f"{prefix}{called} {way}, got {value!r:.80}")


def _range(metadata: Mapping[str, Any]) -> str:
    """Both limits of a number, where it has two."""
    limits = [
        f"{words} {_figure(metadata[key])}" for words, key in LIMITS.values() if key in metadata
    ]
    return f"must be {' and '.join(limits)}"


def _figure(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _parts(error: Any) -> list[str]:
    return [str(part) for part in error["loc"]]
