"""Settings of parts: Python values and command-line strings become one frozen dataclass, or an
error that helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from outrider.drafters import DRAFTERS
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams
from outrider.serve.schema.chat import ChatBody
from outrider.settings import (
    NoSettings,
    checked,
    describe_settings,
    parse_settings,
    setting,
    wrong,
)
from outrider.train.config import TrainConfig
from outrider.train.kinds import KINDS
from outrider.verifiers import VERIFIERS

SETTINGS = sorted(
    {
        TrainConfig,
        *(
            registry.load(name).Settings
            for registry in (DRAFTERS, VERIFIERS, KINDS)
            for name in registry.names()
        ),
    },
    key=lambda kind: kind.__name__,
)


@checked()
@dataclass(frozen=True)
class Example:
    """Every type a setting may have."""

    count: int = setting(4, "how many", at_least=0)
    share: float = setting(0.5, "how much", above=0, below=2)
    name: str = setting("x", "what")
    on: bool = setting(False, "whether")
    mode: Literal["one", "two"] = setting("one", "which")
    tree: int | bool = setting(False, "branches, or true")
    layer: int | Literal["auto"] = setting("auto", "a layer")
    file: Path | None = setting(None, "where")


def parse(**given: Any) -> Example:
    return parse_settings(Example, given, "drafter 'example'")


@pytest.mark.parametrize(
    ("field", "given", "value"),
    [
        ("count", "3", 3),
        ("count", 3, 3),
        ("share", "0.25", 0.25),
        ("share", 1, 1.0),
        ("name", "a b", "a b"),
        ("on", "yes", True),
        ("on", "off", False),
        ("on", True, True),
        ("mode", "two", "two"),
        ("tree", "3", 3),
        ("tree", "true", True),
        ("tree", True, True),
        ("layer", "auto", "auto"),
        ("layer", "7", 7),
        ("file", "a/b", Path("a/b")),
        ("file", None, None),
    ],
)
def test_values_of_every_type(field: str, given: Any, value: Any) -> None:
    """The command line gives strings, Python gives values: both must mean the same."""
    found = getattr(parse(**{field: given}), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["nan", float("nan")])
def test_nan_is_no_number(value: Any) -> None:
    """Neither below a bound nor above it: `if share <= 0` takes it."""
    with pytest.raises(ConfigError, match="share must be a finite number, got nan"):
        parse(share=value)


def test_nothing_given_is_the_defaults() -> None:
    assert parse() == Example()


def test_a_hyphen_is_an_underscore() -> None:
    @dataclass(frozen=True)
    class Long:
        max_ngram: int = setting(4, "")

    assert parse_settings(Long, {"max-ngram": "2"}, "x").max_ngram == 2


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("count", "three", "a whole number"),
        ("count", 1.5, "a whole number"),
        ("count", True, "a whole number"),
        ("share", "much", "a number"),
        ("on", "maybe", "true or false"),
        ("mode", "three", "'one' or 'two'"),
        ("layer", "last", "a whole number or 'auto'"),
        ("tree", "bushy", "a whole number or true or false"),
    ],
)
def test_a_wrong_value_says_what_is_expected(field: str, given: Any, expected: str) -> None:
    """The part, the option, what was given and what would do: all in the message."""
    with pytest.raises(ConfigError) as error:
        parse(**{field: given})
    assert str(error.value) == f"drafter 'example': {field} must be {expected}, got {given!r}"


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=r"drafter 'example' has no option 'cuont'. Did you mean 'count'\? Available: count, ",
    ):
        parse(cuont=1)
    with pytest.raises(ConfigError, match=r"has no option 'tree'. It has none."):
        parse_settings(NoSettings, {"tree": 1}, "drafter 'none'")


def test_values_beyond_their_bounds_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"drafter 'example': count must be at least 0 \(how many\), got -1"
    ):
        parse(count="-1")
    with pytest.raises(
        ConfigError, match=r"^share must be above 0 and below 2 \(how much\), got 2"
    ):
        Example(share=2.0)
    assert parse(count="0", share=1.999).count == 0


def test_descriptions_name_default_and_meaning() -> None:
    assert describe_settings(Example)["count"] == "4: how many"
    assert list(describe_settings(Example)) == [
        "count",
        "share",
        "name",
        "on",
        "mode",
        "tree",
        "layer",
        "file",
    ]


def beyond(metadata: Mapping[str, Any]) -> list[float]:
    """A value beyond each bound."""
    steps = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
    return [metadata[bound] + step for bound, step in steps.items() if bound in metadata]


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_every_bound_is_compared(kind: Any) -> None:
    """Catches a class that states bounds and is not `checked`: its help would be
    wrong."""
    for field in dataclasses.fields(kind):
        for value in beyond(field.metadata):
            with pytest.raises(ConfigError, match=f"{field.name} must be"):
                kind(**{field.name: value})


@pytest.mark.parametrize("registry", [DRAFTERS, VERIFIERS])
def test_every_part_describes_its_settings(registry: Any) -> None:
    """`outrider ls` prints these; an option without a word about it is of no use."""
    for name in registry.names():
        for line in describe_settings(registry.load(name).Settings).values():
            assert len(line.partition(": ")[2]) > 5, name


@checked()
@dataclass(frozen=True)
class Server:
    """What files and command lines write otherwise than Python."""

    name: str
    names: tuple[str, ...] = ()
    file: Path | None = None
    limit_s: float = setting(1.0, "seconds", alias="limit", above=0, allow_inf_nan=True)
    port: int = setting(80, "of the address", at_least=0, at_most=65535)

    def __post_init__(self) -> None:
        if self.name == "7":
            raise ValueError("of the class itself")


def test_what_is_as_good() -> None:
    made = Server("a", names=["b"], file="c", port=8.0, limit=float("inf"))  # type: ignore
    assert made == Server("a", names=("b",), file=Path("c"), port=8, limit_s=float("inf"))
    assert type(made.port) is int
    assert type(made.names) is tuple
    assert dataclasses.replace(made, port=9).names == ("b",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 0}, "limit must be above 0 (seconds), got 0"),
        ({"limit_s": float("nan")}, "limit must be above 0 (seconds), got nan"),
        ({"port": 65536}, "port must be at least 0 and at most 65535 (of the address), got 65536"),
        ({"port": 10**400}, "port must be at least 0 and at most 65535 (of the address), got 1000"),
        ({"port": "80"}, "port must be a whole number, got '80'"),
        ({"names": "ab"}, "names must be a list, got 'ab'"),
        ({"names": ["a", 1]}, "names[1] must be a text, got 1"),
        ({"file": 3}, "file must be a path, got 3"),
    ],
)
def test_one_line_says_what_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Server("a", **given)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "named", "message"),
    [
        ((), {}, "Server(): field required: 'name'"),
        (("a",), {"nmes": ()}, "Server() has no argument 'nmes'. Did you mean 'names'?"),
        (("a",), {"name": "b"}, "multiple values for argument: 'name'"),
    ],
)
def test_wrong_arguments_are_pythons_own_error(
    values: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as error:
        Server(*values, **named)
    assert message in str(error.value)


def test_an_argument_without_a_name_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^limit must be above 0 \(seconds\), got -1$"):
        Server("a", (), None, -1)
    with pytest.raises(ConfigError, match=r"^names\[0\] must be a text, got 3$"):
        Server("a", [3])  # type: ignore


def test_an_error_of_the_class_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match=r"^of the class itself$"):
        Server("7")


def test_the_servers_bounds_are_those_of_the_parameters() -> None:
    """Catches a number that one of the two takes and the other refuses."""
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    shown = ChatBody.model_json_schema()["properties"]
    compared = 0
    for field in dataclasses.fields(SamplingParams):
        bounds = {words[key]: field.metadata[key] for key in words if key in field.metadata}
        if bounds and field.name in shown and field.name not in ("n", "max_tokens", "logprobs"):
            [kind] = [kind for kind in shown[field.name]["anyOf"] if kind["type"] != "null"]
            assert {key: kind.get(key) for key in bounds} == bounds, field.name
            compared += 1
    assert compared >= 9


@pytest.mark.parametrize("value", [-1, "hot", True, float("nan")])
def test_a_temperature_is_wrong_for_one_reason_everywhere(value: Any) -> None:
    """In Python and in a body of a request."""
    with pytest.raises(ConfigError) as python:
        SamplingParams(temperature=value)
    with pytest.raises(ValidationError) as http:
        ChatBody.model_validate(
            {"messages": [{"role": "user", "content": "a"}], "temperature": value}
        )
    [error] = http.value.errors()
    assert str(python.value).startswith(f"temperature {wrong(error)}")
