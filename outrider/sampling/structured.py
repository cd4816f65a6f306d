"""The form that an answer must have, under vLLM's names; `outrider/grammar/specs.py` makes a
grammar of it."""

from __future__ import annotations

import json as _json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.settings import checked, described, setting

KINDS = ("json", "regex", "choice", "grammar", "json_object")
SPACED = ("disable_any_whitespace", "whitespace_pattern")
SWITCHES = ("json_object", "disable_any_whitespace")  # false: not asked for


@described
@checked("structured_outputs.")
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an answer must have: one of `json`, `regex`, `choice`, `grammar` and
    `json_object`, and how JSON is spaced.

        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

    Others raise ConfigError.
    """

    json: str | dict[str, Any] | bool | None = setting(None, "a JSON schema, or its text")
    regex: str | None = setting(
        None, "the whole answer matches it; syntax of Rust's regex crate, no look-around"
    )
    choice: Sequence[str] | None = setting(None, "the answer is one of these")
    grammar: str | None = setting(None, "llama.cpp's GBNF (`root ::= ...`) or Lark (`start: ...`)")
    json_object: bool | None = setting(None, "True: any JSON object")
    disable_any_whitespace: bool = setting(
        False, "True: nothing between the parts of JSON; False: at most one blank"
    )
    whitespace_pattern: str | None = setting(
        None, "what may stand between the parts of JSON, as a regular expression"
    )

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
