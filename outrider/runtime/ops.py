"""The operations that a pass is lowered to, and the program that they make up.

A pass is a program over tokens: every value is, for each token by itself, a small dense block of
numbers. What transformers writes as (B, T, H * D), (B, T, H, D) or (B, H, T, D) is one block of H *
D numbers here, so its views and transposes are only ways to look at a block (`View`). Attention,
choices and recurrent operations alone see more than one token.

    LINEAR      in[0] x, `weight` and `bias` by name      EMBED    rows of a table, by token id or by position
    ATTENTION   in[0] query, in[1] sinks (constant),      STORE    in[0] key or value, into the cache of `layer`;
                or, with `chosen`, in[1] positions and             without values they are the beginnings of keys
                in[2] sinks; `weight` ALiBi's slopes      CHOICE   of positions the best, by an indexer's keys in `layer`
    GATHER      the rows that the output head reads       EXPERTS  a linear layer of each of the experts that in[1] names
    CONVOLUTION, DELTA_RULE and SCAN read and write a running state of each row
    the rest computes numbers of one token; truths are 1 and 0, and indices are numbers, too

Results are rounded to the dtype of the value that they are written to, as torch rounds them;
arithmetic in between is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from outrider.kv.state_slots import StateShape

if TYPE_CHECKING:
    from outrider.runtime.matrices import Matrix


class Code(IntEnum):
    """The kind of an operation. The native executor numbers them the same way
    (`native/program.h`)."""

    LINEAR = 0
    EMBED = 1
    ATTENTION = 2
    STORE = 3
    GATHER = 4
    # in[0] is hidden state `layer` (an index among the program's signals): copied out where it is
    # wanted
    SIGNAL = 5
    # in[0] x, a row for each expert or one for all; in[1] the experts' numbers; `weight` (experts,
    # out, in)
    EXPERTS = 6
    # of each channel over the last tokens; `weight` (channels, width), numbers[0]: 1 with SiLU
    # after it
    CONVOLUTION = 7
    # in[0..4]: query, key, value, log of decay, beta; numbers[0]: epsilon of keys' and queries'
    # norms, 0: none.
    DELTA_RULE = 8
    # Without beta values are added to the state as they are (Mamba 2, lightning attention)
    # in[0..3]: value, step, key, query of channels whose decays differ. `weight` (channels, numbers
    # of a state): the
    SCAN = 9
    # rates that steps are multiplied by to be logs of decays (Mamba 1); without it, and without key
    # and query, steps are factors of decays and a state is one number (RG-LRU)
    COPY = 10
    ADD = 11
    SUB = 12
    MUL = 13
    DIV = 14
    NEG = 15
    SQUARE = 16
    RSQRT = 17
    SQRT = 18
    TANH = 19
    SIGMOID = 20
    SILU = 21
    GELU = 22
    GELU_TANH = 23
    RELU = 24
    RECIPROCAL = 25
    CLAMP = 26  # numbers[0] .. numbers[1]
    EXP = 27
    LOG = 28
    SOFTPLUS = 29  # numbers[0] factor of x, numbers[1] where the sum of it is the number itself
    WHERE = 30  # in[0] not 0: in[1], else in[2]
    GREATER = 31
    AT_LEAST = 32
    EQUAL = 33
    NOT = 34
    LARGER = 35
    SMALLER = 36
    EXPM1 = 37
    LOG1P = 38
    MEAN = 40
    SUM = 41
    LAYER_NORM = 42  # in[0] x, in[1] weight, in[2] bias; numbers[0] epsilon
    RMS_NORM = 43  # in[0] x, in[1] weight; numbers[0] epsilon
    SOFTMAX = 44
    # indices of the largest of a row's numbers[0] numbers, the largest first; of equals the lowest
    # index
    TOP = 50
    TAKE = 51  # of a row's numbers[0] numbers those at the indices in[1]
    PUT = 52  # in[0] of a row, with in[2] at the numbers[0] indices in[1]
    # in[0] x, a row for each head, which is multiplied with the `part` of the head's rows of
    # `weight`
    HEADS = 60
    # of the positions on a token's path those that an indexer scores best; in[0] query, in[1]
    # heads' weights
    CHOICE = 61


REDUCING = frozenset({Code.MEAN, Code.SUM, Code.LAYER_NORM, Code.RMS_NORM, Code.SOFTMAX})


RECURRENT = frozenset({Code.CONVOLUTION, Code.DELTA_RULE, Code.SCAN})


class Source(IntEnum):
    """Which memory holds a value."""

    MADE = 1  # by an operation, for each token of the pass
    CONSTANT = 2  # a weight or a number of the model, the same for all tokens
    ROTARY = 3  # a row of a table of the model's own, by the token's position
    INPUT = 4  # given with the pass, for each of its tokens


@dataclass(frozen=True)
class Value:
    """A block of `size` numbers for each token. `name`: the constant's, or the number of the rotary
    table or input."""

    size: int
    dtype: torch.dtype
    source: Source = Source.MADE
    name: str = ""


@dataclass(frozen=True)
class View:
    """`rows` x `cols` numbers of a value's block: element (r, c) is number offset + r * row_step +
    c * col_step."""

    value: int
    rows: int
    cols: int
    offset: int = 0
    row_step: int = 0
    col_step: int = 1


@dataclass(frozen=True)
class Op:
    """One operation. Operands are broadcast by steps of 0, so that all views of an elementwise one
    are rows x cols."""

    code: Code
    inputs: tuple[View, ...]
    output: View | None
    numbers: tuple[float, ...] = ()
    weight: str = ""
    bias: str = ""
    transposed: bool = False  # the weight is stored (in, out)
    # of STORE and ATTENTION; SIGNAL: the index of the hidden state; EMBED: what is added to the
    # index;
    layer: int = 0
    # RECURRENT ones: the index of the state
    by_position: bool = False  # EMBED: the index is the position, not the token id
    bound: int = 0  # EMBED: indices from this one on read row 0; 0: none do
    is_value: bool = False  # STORE: of values, not keys
    heads: int = 0  # of ATTENTION, HEADS, CHOICE
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    window: int = 0  # positions looked back, its own counts as one; 0: all
    sees_all: bool = False  # ATTENTION: each token sees the whole pass, what comes after it, too
    # ATTENTION: a token sees these many positions at most, which in[1] names; 0: all
    chosen: int = 0
    # HEADS: the rows of a head's weight that are multiplied with, begin and end
    part: tuple[int, int] = (0, 0)


@dataclass
class Program:
    """One pass: `body` over all tokens, then `head` over the rows whose logits are asked for, which
    ends in `logits`."""

    values: list[Value] = field(default_factory=list)
    body: list[Op] = field(default_factory=list)
    head: list[Op] = field(default_factory=list)
    logits: View | None = None
    signals: tuple[int, ...] = ()  # keys of `models/signals.py`, in the order of SIGNAL operations
    hidden_size: int = 0
    # (module, further arguments, which output)
    rotary: list[tuple[str, tuple[object, ...], int]] = field(default_factory=list)
    # those that are no parameter of the module
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    states: list[StateShape] = field(default_factory=list)  # of recurrent operations
    # weights that layers keep in integers, by the layer's name
    matrices: dict[str, Matrix] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """How many operations of each kind there are."""
        found: dict[str, int] = {}
        for op in (*self.body, *self.head):
            found[op.code.name] = found.get(op.code.name, 0) + 1
        return found
