"""`speculation` and `prediction` in a body: how this one request is drafted for, and OpenAI's
predicted outputs.

The answer that the client expects is drafted, and the target verifies it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from outrider.engine.request import Mode, Speculation
from outrider.serve.schema.base import Body, like


class SpeculationFields(Body):
    """The fields of speculation, which are ours; `Speculation` explains each and checks that they
    fit together."""

    model_config = ConfigDict(extra="forbid")  # no other server's client has anything to say here

    mode: Mode | None = Field(
        None,
        description="auto: the server decides every step; fixed: max_draft_tokens every step; "
        "off: no drafting.",
    )
    drafter: str | None = Field(
        None, description="One of the model's drafters, see /v1/models; default: its first."
    )
    max_draft_tokens: int | None = like(Speculation, "max_draft_tokens", le=512)
    invariant: bool | None = Field(
        None,
        description="Same seed, same text, whatever drafter, length or load. Default: true when a "
        "seed is given.",
    )
    lossy: str | None = Field(
        None, description="A verifier that may change the text, where the operator allows it."
    )

    def merged(self, defaults: dict[str, Any]) -> Speculation:
        """These wishes with a route's defaults for what the client left out. Raises ConfigError for
        a contradiction."""
        asked = self.model_dump(exclude_none=True)
        if asked.get("mode") == "off":
            defaults = {}
        return Speculation(**{**defaults, **asked})


class PredictedText(Body):
    """One piece of the content."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """The expected answer, for instance the file that is to be edited."""

    type: Literal["content"]
    content: str | list[PredictedText] = Field(description="A text, or pieces of one.")

    @property
    def text(self) -> str:
        """All of it."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(piece.text for piece in self.content)
        )
