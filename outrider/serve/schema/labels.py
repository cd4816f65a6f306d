"""What clients call their requests: for the log, in OpenAI's bounds, and how much of it a line there has room for."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field, JsonValue

from outrider.serve.schema.base import PRESENT

MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512  # OpenAI's, of `metadata`: pairs, and characters
MAX_LABEL = 64  # characters, OpenAI's too


def _check(metadata: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's values are texts; what other clients send beside them is taken, and cut short in the log."""
    if len(metadata) > MAX_PAIRS:
        raise ValueError(f"should have at most {MAX_PAIRS} pairs, not {len(metadata)}")
    for name, value in metadata.items():
        if len(name) > MAX_NAME:
            raise ValueError(f"should have names of at most {MAX_NAME} characters, not {len(name)}")
        if isinstance(value, str) and len(value) > MAX_VALUE:
            raise ValueError(f"should have values of at most {MAX_VALUE} characters, not {len(value)} ({name!r})")
    return metadata


Metadata = Annotated[dict[str, JsonValue], PRESENT, AfterValidator(_check)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]


def cut_short(value: Any) -> Any:
    """A label as a line of the log has it."""
    if isinstance(value, dict):
        return {name: cut_short(json.dumps(one) if isinstance(one, dict | list) else one) for name, one in value.items()}
    return f"{value[: MAX_VALUE - 1]}…" if isinstance(value, str) and len(value) > MAX_VALUE else value
