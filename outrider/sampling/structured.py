"""The form that an answer must have, under vLLM's names; `outrider/grammar/specs.py` makes a
grammar of it."""

from __future__ import annotations

import json as _json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.settings import checked

KINDS = ("json", "regex", "choice", "grammar", "json_object")
SPACED = ("disable_any_whitespace", "whitespace_pattern")
SWITCHES = ("json_object", "disable_any_whitespace")  # false: not asked for


@checked("structured_outputs.")
@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of `json`, `regex`, `choice`, `grammar` and `json_object`, and how JSON is spaced. Raises
    ConfigError for others."""

    json: str | dict[str, Any] | bool | None = None  # a JSON schema, or its text
    # the whole answer matches it; syntax of Rust's regex crate, no look-around
    regex: str | None = None
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # llama.cpp's GBNF (`root ::= ...`) or Lark (`start: ...`)
    json_object: bool | None = None  # any JSON object
    # nothing between the parts of JSON; default: at most one blank
    disable_any_whitespace: bool = False
    # what may stand between the parts of JSON, as a regular expression
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in self.as_dict() if name in KINDS]
        if len(kinds) != 1:
            raise ConfigError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got "
                f"{', '.join(kinds) or 'none'}"
            )
        spaced = [name for name in self.as_dict() if name in SPACED]
        if spaced and not kinds[0].startswith("json"):
            raise ConfigError(
                f"structured_outputs.{kinds[0]} has no white space of its own: leave out "
                f"{' and '.join(spaced)}"
            )
        if len(spaced) > 1:
            raise ConfigError(
                "structured_outputs.whitespace_pattern and disable_any_whitespace contradict each "
                "other: give one"
            )
        _check_schema(self.json)

    @property
    def kind(self) -> str:
        """The one of KINDS that is given."""
        return next(name for name in self.as_dict() if name in KINDS)

    def as_dict(self) -> dict[str, Any]:
        """The specification as plain JSON."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: value
            for name, value in given.items()
            if value is not False or name not in SWITCHES
        }


def _check_schema(schema: object) -> None:
    try:
        _json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"structured_outputs.json is no JSON: {error}") from error
