"""Known facts about a tensor of a recorded pass while it is lowered."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.errors import CapabilityError
from outrider.runtime.record import ROWS, TOKENS
from outrider.runtime.strides import Strided

DTYPES = (torch.float32, torch.bfloat16)
TRUTHS = torch.float32  # what 1 and 0 of a mask are kept as
SIZES = {"B": ROWS, "T": TOKENS, "N": ROWS * TOKENS}


class NotLoweredError(CapabilityError):
    """The model does something that no operation of `ops.py` stands for."""


@dataclass(frozen=True)
class Unknown:
    """A tensor that depends on the pass's inputs in a way that cannot be lowered."""

    why: str


@dataclass(frozen=True)
class Index:
    """Token ids, or positions, with a number added: what embeddings are looked up by. Ids from
    `bound` on count as 0."""

    by_position: bool
    offset: int = 0
    bound: int | None = None


@dataclass(frozen=True)
class IsBelow:
    """Whether token ids are below a bound; None: true of all."""

    bound: int | None


@dataclass(frozen=True)
class Block:
    """A tensor of numbers: `axes` names its dimensions, "B", "T", "N" (rows and tokens in one) or
    "" (a token's own)."""

    axes: tuple[str, ...]
    own: Strided  # the dimensions that are a token's own, in order

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the recording."""
        sizes = iter(self.own.sizes)
        return tuple(SIZES[axis] if axis else next(sizes) for axis in self.axes)

    @property
    def steps(self) -> tuple[int | None, ...]:
        """The step of each dimension that is a token's own, None for the others."""
        own = iter(self.own.steps)
        return tuple(None if axis else next(own) for axis in self.axes)


@dataclass(frozen=True)
class Complex:
    """A tensor of complex numbers; `pairs` has one more dimension, the last: real and imaginary
    part."""

    pairs: Block


@dataclass(frozen=True)
class Folded:
    """A block seen with rows, tokens and heads in one dimension, which only another view may undo."""

    block: Block


Known = Unknown | Index | IsBelow | Block | Complex | Folded
