"""What all request bodies share: nothing unknown, nothing converted, and refusals that name the field.

A body says which fields of other servers it refuses, and why (`refused`): a field is honoured or refused by name, never
accepted and ignored. `null` is the same as leaving a field out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from outrider.errors import did_you_mean
from outrider.wellformed import is_text

SHOWN = 60  # characters of a wrong value in a message


def refusal(param: str, message: str) -> PydanticCustomError:
    """To be raised by validators: `message` about field `param`."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


class Body(BaseModel):
    """Base of all request bodies and of the objects inside them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    refused: ClassVar[dict[str, str]] = {}  # fields of OpenAI's or vLLM's schema -> why not here
    only: ClassVar[dict[str, tuple[Any, ...]]] = {}  # fields with but some of their values -> those

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.refused:
                if value is not None:
                    raise refusal(name, f"'{name}' is not supported: {cls.refused[name]}")
            elif name in cls.only:
                if value is not None and not _is_one_of(value, cls.only[name]):
                    allowed = " or ".join(map(_json, cls.only[name]))
                    raise refusal(name, f"'{name}' can only be {allowed} here, got {_json(value)}")
            elif name not in (known := [field.alias or own for own, field in cls.model_fields.items()]):
                raise refusal(name, f"unknown field '{name}'.{did_you_mean(name, known)}")
            elif not _is_text(value):
                raise refusal(name, f"'{name}' is no valid text: it has half a surrogate pair")
            else:
                kept[name] = value
        return kept


def _is_text(value: Any) -> bool:
    """JSON can escape one half of a pair, which is no character and which no tokenizer takes. Objects check themselves."""
    if isinstance(value, list):
        return all(map(_is_text, value))
    return not isinstance(value, str) or is_text(value)


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed)


def _json(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def describe(errors: Sequence[Any]) -> tuple[str, str | None]:
    """(message, field) of pydantic's errors about one body. The first field that is wrong is reported, in all the ways it is."""
    first = errors[0]
    context = first.get("ctx") or {}
    if first["type"] == "refused":
        inside = [str(part) for part in first["loc"][1:]]
        return context["message"], ".".join([*_plain(inside), context["param"]])
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {context.get('error', first['msg'])} at character {first['loc'][-1]}", None
    location = [str(part) for part in first["loc"][1:]]
    if not location:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    same = [error for error in errors if error["loc"][1:2] == first["loc"][1:2]]
    ways = list(dict.fromkeys(_expected(error) for error in same))
    param = ".".join(_plain(location)) if len(same) == 1 else location[0]
    got = "" if first["type"] == "missing" else f", got {_json(first.get('input'))}"
    return f"'{param}' {' or '.join(ways)}{got if len(same) == 1 else ''}", param


def _expected(error: Any) -> str:
    if error["type"] == "missing":
        return "is required"
    return error["msg"].replace("Input should", "should").replace("Value error, ", "")


def _plain(location: list[str]) -> list[str]:
    """Without pydantic's own names for the members of a union."""
    return [part for part in location if "[" not in part and part not in ("str", "int", "float", "bool")]
