"""`resume` in a body: a stream that another server can continue, and one that continues what
another server began."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from outrider.engine.request import Finish, Update
from outrider.serve.schema.base import Body
from outrider.stats import DecodeStats

Origin = Literal["accepted", "correction", "bonus", "plain"]
_STATS = TypeAdapter(DecodeStats)


class Ending(Body):
    """The end of one answer, as `usage` and `metrics` need it."""

    model_config = ConfigDict(extra="forbid")

    reason: Literal["stop", "length", "timeout"]
    # a dataclass, sent as an object
    stats: Annotated[DecodeStats, BeforeValidator(_STATS.validate_python)]
    seed: int
    lossless: bool
    drafter: str
    stop_reason: int | str | None = None
    reproducible: bool
    queued_s: float
    prefill_s: float
    prompt_tokens: int
    cached_tokens: int
    prompt_share: float = Field(1.0, gt=0, le=1)
    preemptions: int

    @classmethod
    def of(cls, finish: Finish) -> Ending:
        fields = asdict(finish)
        del fields["error"]
        return cls(**{**fields, "stats": finish.stats})

    def finish(self) -> Finish:
        return Finish(**{name: getattr(self, name) for name in type(self).model_fields})


class Mark(Body):
    """One update of one answer: what the stream's events before the mark have shown."""

    model_config = ConfigDict(extra="forbid")

    choice: int = Field(ge=0)
    token_ids: list[int] = Field(default_factory=list)
    origins: list[Origin] = Field(default_factory=list)
    pieces: list[str] = Field(
        default_factory=list, description="The text that each token released."
    )
    rest: str = Field("", description="Text that the end released.")
    drafted: int = Field(0, ge=0)
    ending: Ending | None = None

    @classmethod
    def of(cls, choice: int, update: Update) -> Mark:
        ending = None if update.finish is None else Ending.of(update.finish)
        return cls(
            choice=choice,
            token_ids=update.token_ids,
            origins=cast(list[Origin], update.origins),
            pieces=update.pieces,
            rest=update.text[len("".join(update.pieces)) :],
            drafted=update.drafted,
            ending=ending,
        )

    def update(self) -> Update:
        """The meaning of the mark, without log-probabilities."""
        return Update(
            text="".join(self.pieces) + self.rest,
            token_ids=self.token_ids,
            origins=list(self.origins),
            pieces=self.pieces,
            drafted=self.drafted,
            finish=None if self.ending is None else self.ending.finish(),
        )


class Resumption(Body):
    """An empty object asks for marks; with the marks of a stream that broke off, its answers are
    continued."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.:/-]{1,200}$",
        description="The answers' id, from the first mark.",
    )
    created: int | None = Field(None, ge=0, description="Likewise.")
    marks: list[Mark] = Field(
        default_factory=list, description="All marks after the first, in their order."
    )
