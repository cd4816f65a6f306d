"""Settings of one drafter or verifier: a frozen dataclass each, filled from Python values or from
command-line strings.

    @dataclass(frozen=True)
    class NgramSettings:
        max_ngram: int = setting(4, "longest n-gram looked up, in tokens", at_least=1)

        def __post_init__(self) -> None:
            check_bounds(self, "drafter 'ngram'")

    parse_settings(NgramSettings, {"max_ngram": "3"}, "drafter 'ngram'")

A name that the dataclass does not have is an error with the nearest one; so is a value of another
type. What several values must be together is the dataclass's own business (`__post_init__`).
"""

from __future__ import annotations

import dataclasses
import operator
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outrider.errors import ConfigError, did_you_mean

COMPARISONS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")


def setting(default: Any, text: str, *, common: bool = False, **bounds: float) -> Any:
    """A dataclass field with a default and the line that `outrider ls` prints about it.

    `common`: where it is an option of the command line, `--help` shows it. `bounds`: at_least,
    above, at_most, below; `check_bounds` compares.
    """
    return dataclasses.field(
        default=default, metadata={"help": text, "bounds": bounds, "common": common}
    )


def check_bounds(settings: Any, owner: str) -> None:
    """Raises ConfigError naming `owner` for a number beyond the bounds of its setting."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        bounds = field.metadata.get("bounds", {})
        if not all(COMPARISONS[kind](value, bound) for kind, bound in bounds.items()):
            words = " and ".join(
                f"{kind.replace('_', ' ')} {bound}" for kind, bound in bounds.items()
            )
            raise ConfigError(f"{owner}: {field.name} must be {words}, got {value}")


@dataclass(frozen=True)
class NoSettings:
    """Nothing to set."""


def parse_settings(kind: type, given: dict[str, Any], owner: str) -> Any:
    """An instance of `kind`. Raises ConfigError naming `owner` for an unknown name or an unusable
    value."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    types_of = get_type_hints(kind)
    values = {}
    for name, value in given.items():
        field = name.replace("-", "_")
        if field not in known:
            expected = did_you_mean(field, known) if known else " It has none."
            raise ConfigError(f"{owner} has no option '{name}'.{expected}")
        try:
            values[field] = _convert(value, types_of[field])
        except ValueError as error:
            raise ConfigError(f"{owner}: option {name} must be {error}, got '{value}'") from error
    return kind(**values)


def describe_settings(kind: type) -> dict[str, str]:
    """name -> 'default: what it is', for `outrider ls`."""
    return {
        field.name: f"{field.default}: {field.metadata.get('help', '')}"
        for field in dataclasses.fields(kind)
    }


def _convert(value: Any, wanted: Any) -> Any:
    """A value of the setting's type from its text. Raises ValueError with what was expected in
    words."""
    if get_origin(wanted) in (Union, types.UnionType):
        return _first_that_fits(value, get_args(wanted))
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError(f"one of {', '.join(map(str, get_args(wanted)))}")
        return value
    if wanted is types.NoneType:
        if value is not None and value != "none":
            raise ValueError("none")
        return None
    if wanted is bool:
        return to_bool(value)
    return _to_scalar(value, wanted)


def _first_that_fits(value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and types.NoneType in options:
        return None
    expected = []
    for option in options:
        try:
            return _convert(value, option)
        except ValueError as error:
            expected.append(str(error))
    raise ValueError(" or ".join(expected))


def to_bool(value: Any) -> bool:
    """True or false from a word. Raises ValueError for what is no word for true or false."""
    text = str(value).lower()
    if text not in TRUE + FALSE:
        raise ValueError("true or false")
    return text in TRUE


def _to_scalar(value: Any, wanted: Any) -> Any:
    words = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
    if isinstance(value, bool) or (wanted is int and isinstance(value, float)):
        raise ValueError(words[wanted])
    try:
        scalar = wanted(value)
    except (TypeError, ValueError) as error:
        raise ValueError(words[wanted]) from error
    if (
        scalar != scalar
    ):  # NaN, of which every comparison says no: checks of ranges would let it pass
        raise ValueError(words[wanted])
    return scalar
