"""The base of all request bodies: nothing converted, refusals that name the field, and unknown
fields kept apart.

An unknown field is collected by `take_unknown`, so that it can be named or, by a strict server,
refused. `null` is the same as leaving a field out, at every depth, and 16.0 the same as 16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from outrider.errors import RequestError, did_you_mean, nearest
from outrider.settings import BOUNDS, liberal, plain_place, problem
from outrider.wellformed import is_text

PATH = 120  # characters of the place of a wrong value
SHOWN = 60  # characters of a wrong value or name in a message
# unknown names that are compared with what is missing: a body may hold a hundred thousand
LOOKED_AT = 16


def refusal(param: str, message: str) -> PydanticCustomError:
    """To be raised by validators: `message` about field `param`. Half a surrogate pair in them is
    written as JSON escapes it."""
    return PydanticCustomError(
        "refused", "{message}", {"message": _encodable(message), "param": _encodable(param)}
    )


def _encodable(text: str) -> str:
    # pydantic encodes its errors
    return text if is_text(text) else text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class UnknownField:
    """A field that was sent and has no effect."""

    name: str
    path: str  # "messages[].cache_control"
    param: str  # "messages.0.cache_control"
    known: tuple[str, ...]  # names that it may be a misspelling of
    why: str | None = None  # it has no effect; None: it is unknown

    @property
    def message(self) -> str:
        """For a strict server's refusal."""
        if self.why is not None:
            return f"'{self.name[:SHOWN]}' has no effect here: {self.why}"
        return f"unknown field '{self.name[:SHOWN]}'.{did_you_mean(self.name[:SHOWN], self.known)}"


class Body(BaseModel):
    """Base of all request bodies and of the objects inside them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's schema with the liberties of our settings: 16.0 is 16."""
        return cast(CoreSchema, liberal(handler(source)))

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.names()
        names = {}
        unknown = []
        for name, value in data.items():
            if not is_text(name):
                raise refusal(
                    name[:SHOWN],
                    f"the field's name '{name[:SHOWN]}' is no valid text: it has half a surrogate "
                    "pair",
                )
            if value is None:
                continue
            if name not in known:
                unknown.append(name)
            elif _broken_text(value) is not None:
                raise refusal(name, f"'{name}' is no valid text: it has half a surrogate pair")
            names[name] = value
        cls._check_unknown(unknown, names)
        return names

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields' names, as they are sent."""
        return tuple(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _check_unknown(cls, unknown: Sequence[str], known_names: dict[str, Any]) -> None:
        """Refuse what cannot be an extra of some client: any field where none may be added, and a
        misspelt required one."""
        required = [
            field.alias or own for own, field in cls.model_fields.items() if field.is_required()
        ]
        missing = [name for name in required if name not in known_names]
        for name in unknown[:LOOKED_AT]:
            if cls.model_config["extra"] == "forbid" or nearest(name[:SHOWN], missing):
                raise refusal(
                    name[:SHOWN],
                    f"unknown field '{name[:SHOWN]}'.{did_you_mean(name[:SHOWN], cls.names())}",
                )

    def take_unknown(self, path: str = "", param: str = "") -> Iterator[UnknownField]:
        """Fields without effect here and in all objects inside, removed: what reads the body
        afterwards never sees them."""
        known = type(self).names()
        extra = self.__pydantic_extra__ or {}
        names = list(extra)
        extra.clear()
        for name in names:
            yield UnknownField(name, path + name, param + name, known)
        for own, field in type(self).model_fields.items():
            name = field.alias or own
            value = getattr(self, own)
            if isinstance(value, Body):
                yield from value.take_unknown(f"{path}{name}.", f"{param}{name}.")
            elif isinstance(value, list):
                for number, item in enumerate(value):
                    if isinstance(item, Body):
                        yield from item.take_unknown(f"{path}{name}[].", f"{param}{name}.{number}.")


def _present(value: Any) -> Any:
    """An object with names that are the client's own, without those that are null."""
    return (
        {name: item for name, item in value.items() if item is not None}
        if isinstance(value, dict)
        else value
    )


PRESENT = BeforeValidator(_present)


def _readable(schema: Any) -> Any:
    """A JSON schema, all of whose texts and names are text. Raises `refusal` for another."""
    if (broken := _broken_text(schema, inside_objects=True)) is not None:
        raise refusal(
            broken[:SHOWN], f"'{broken[:SHOWN]}' is no valid text: it has half a surrogate pair"
        )
    return schema


JsonSchemaFields = Annotated[dict[str, JsonValue], AfterValidator(_readable)]


def _broken_text(value: Any, *, inside_objects: bool = False) -> str | None:
    """A text in a value that is none: JSON can escape one half of a pair, which is no character and
    which no tokenizer takes. Objects mostly check themselves, and are looked into where asked."""
    left = [value]
    while left:  # no recursion: a client may send lists in lists, a thousand deep
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict) and inside_objects:
            left += [*item, *item.values()]
        elif isinstance(item, str) and not is_text(item):
            return item
    return None


def _json(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


Made = TypeVar("Made", bound=Body)


def made(kind: type[Made], fields: dict[str, Any]) -> Made:
    """A body that another one comes to. Raises RequestError, in the words of a refused body."""
    try:
        return kind.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        message, _ = describe(
            [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        )
        raise RequestError(message) from error


def describe(errors: Sequence[Any]) -> tuple[str, str | None]:
    """(message, field) of pydantic's errors about one body. The first field that is wrong is
    reported: in our own words where it was refused, else in all the ways it is wrong."""
    about = [error for error in errors if error["loc"][1:2] == errors[0]["loc"][1:2]]
    first = next((error for error in about if error["type"] == "refused"), errors[0])
    context = first.get("ctx") or {}
    if first["type"] == "refused":
        inside = [str(part) for part in first["loc"][1:]]
        return context["message"], ".".join([*plain_place(inside), context["param"]])
    if first["type"] == "json_invalid":
        why = str(context.get("error", first["msg"])).removesuffix(" at")
        return f"the body is not JSON: {why} at character {first['loc'][-1]}", None
    place, way, value = problem([{**error, "loc": error["loc"][1:]} for error in errors])
    if not place:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    param = ".".join(place)
    param = param if len(param) <= PATH else f"{param[: PATH - 1]}…"
    way = way.replace("a dictionary", "an object")  # JSON's word for it
    got = "" if way == "is required" else f", got {_json(value)}"
    return f"'{param}' {way}{got}", param


# OpenAI's, of `metadata`: pairs, and characters
MAX_PAIRS = 16
MAX_NAME = 64
MAX_VALUE = 512
MAX_LABEL = 64  # characters, OpenAI's too


def _check(metadata: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's values are texts; what other clients send alongside them is taken, and cut short in the
    log."""
    if len(metadata) > MAX_PAIRS:
        raise ValueError(f"must have at most {MAX_PAIRS} pairs, not {len(metadata)}")
    for name, value in metadata.items():
        if len(name) > MAX_NAME:
            raise ValueError(f"must have names of at most {MAX_NAME} characters, not {len(name)}")
        if isinstance(value, str) and len(value) > MAX_VALUE:
            raise ValueError(
                f"must have values of at most {MAX_VALUE} characters, not {len(value)} ({name!r})"
            )
    return metadata


def like(kind: Any, name: str, text: str = "", **limits: Any) -> Any:
    """A body's field that may be left out and is one of our record's: bounds and description are
    that one's, unless others are given."""
    metadata = kind.__dataclass_fields__[name].metadata
    bounds = {key: metadata[key] for key in BOUNDS.values() if key in metadata}
    description = text or f"{metadata['description'][:1].upper()}{metadata['description'][1:]}."
    return Field(None, description=description, **{**bounds, **limits})


Metadata = Annotated[dict[str, JsonValue], PRESENT, AfterValidator(_check)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]


def cut_short(value: Any) -> Any:
    """A label as a line of the log has it."""
    if isinstance(value, dict):
        return {
            name: cut_short(json.dumps(item) if isinstance(item, dict | list) else item)
            for name, item in value.items()
        }
    return (
        f"{value[: MAX_VALUE - 1]}…" if isinstance(value, str) and len(value) > MAX_VALUE else value
    )
