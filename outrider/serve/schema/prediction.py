"""`prediction` in a body: OpenAI's predicted outputs. The answer that the client expects is drafted, and the target verifies
it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outrider.serve.schema.base import Body


class PredictedText(Body):
    """One piece of the content."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """What the answer is expected to be, for instance the file that is to be edited."""

    type: Literal["content"]
    content: str | list[PredictedText] = Field(description="A text, or pieces of one.")

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(piece.text for piece in self.content)
