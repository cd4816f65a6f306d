"""Turns a recorded pass into a program: which numbers of one token each operation computes from
which.

Every tensor of the recording is followed by the axes that count rows and tokens; what is left of
its shape is a token's own block. Views of it move nothing. An operation that `rules.py` has no rule
for makes a tensor that cannot be lowered, which matters only where something that counts depends on
it (masks that transformers builds and ours replace do not).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.errors import CapabilityError
from outrider.models.loading.context import CHANGING_ROPES, configured_context
from outrider.models.signals import AFTER_NORM
from outrider.runtime.blocks import Known, NotLoweredError, Unknown
from outrider.runtime.events import Event
from outrider.runtime.lowering import Lowering
from outrider.runtime.ops import RECURRENT, Code, Op, Program, View
from outrider.runtime.positional import followed
from outrider.runtime.record import Recording, is_rotary, record, signals_of
from outrider.runtime.rules import RULES, Rule, rewritten


def lower(module: Any, signals: tuple[int, ...] | None = None) -> Program:
    """The program of one pass of `module`, whose linear layers are still plain. Raises
    NotLoweredError naming the obstacle.

    `signals`: the hidden states that it gives, what the output head reads among them; None: all
    that the model has as (rows, tokens, width).
    """
    for part in module.modules():
        if is_rotary(part) and _rope_types(part) & set(CHANGING_ROPES):
            raise NotLoweredError("rotary embeddings change with a text's length")
    config = module.config.get_text_config()
    num_layers = config.num_hidden_layers
    recording = _recorded(module, signals_of(num_layers) if signals is None else signals)
    is_named = getattr(config, "max_position_embeddings", None)
    return program_of(module, recording, configured_context(config) if is_named else 0)


def program_of(module: Any, recording: Recording, reach: int = 0) -> Program:
    """The program of a recording. `reach`: positions that texts may have, 0 where nobody says."""
    return _Events(module, recording, reach).program()


def _recorded(module: Any, signals: tuple[int, ...]) -> Recording:
    """A pass with these hidden states; where not all of them can be read, with what the output head
    reads alone."""
    try:
        return record(module, signals)
    except CapabilityError as error:
        if signals == (AFTER_NORM,):
            raise NotLoweredError(str(error)) from error
    return _recorded(module, (AFTER_NORM,))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _rope_types(part: Any) -> set[str]:
    rope_types = getattr(part, "rope_type", "default")
    return {
        str(rope_type)
        for rope_type in (rope_types.values() if isinstance(rope_types, dict) else (rope_types,))
    }


class _Events(Lowering):
    """Calls the rule of each event of a recording, in their order."""

    def program(self) -> Program:
        """All events lowered, divided into body and head."""
        kept_at: dict[int, list[int]] = {}
        for index, tensor in enumerate(self._recording.signals.values()):
            kept_at.setdefault(id(tensor), []).append(index)
        for event in self._recording.events:
            self._event(event)
            for output in event.outputs:
                for index in kept_at.pop(id(output), ()):
                    self._signal(index, output)
        if kept_at:
            raise NotLoweredError("hidden states that no operation makes")
        self._split_head()
        return self._made

    def _signal(self, index: int, tensor: Tensor) -> None:
        block = self.block(tensor)
        if block.axes != ("B", "T", ""):
            raise NotLoweredError("hidden states of an unusual shape")
        self._made.hidden_size = block.own.count
        self._ops.append(Op(Code.SIGNAL, (self.flat(block),), None, layer=index))

    def _split_head(self) -> None:
        """The selection of rows moves before the products that make logits, so that only the asked
        rows are computed."""
        assert self._recording.logits is not None
        entrance = self.flat(self.block(self._recording.signals[AFTER_NORM]))
        logits = self.flat(self.block(self._recording.logits))
        needed = {logits.value}
        for op in reversed(self._ops):
            if (
                op.output is not None
                and op.output.value in needed
                and op.output.value != entrance.value
            ):
                needed |= {view.value for view in op.inputs}
        needed -= {entrance.value}
        head = [op for op in self._ops if op.output is not None and op.output.value in needed]
        if any(op.code in (Code.ATTENTION, Code.CHOICE, Code.EMBED, *RECURRENT) for op in head):
            raise NotLoweredError("an output head that reads more than the last hidden state")
        wanted = {entrance.value}
        body = []
        for op in reversed(self._ops):
            if op.code in (Code.STORE, Code.SIGNAL) or (
                op.output is not None and op.output.value in wanted
            ):
                body.append(op)
                wanted |= {view.value for view in op.inputs}
        rows = self.new(entrance.cols, self._made.values[entrance.value].dtype)

        def moved(view: View) -> View:
            return (
                replace(view, value=rows.value, offset=view.offset - entrance.offset)
                if view.value == entrance.value
                else view
            )

        self._made.body = body[::-1]
        self._made.head = [Op(Code.GATHER, (entrance,), rows)]
        self._made.head += [
            replace(op, inputs=tuple(moved(view) for view in op.inputs)) for op in head
        ]
        self._made.logits = moved(logits)

    def _event(self, event: Event) -> None:
        tensors = [
            item
            for arg in event.args
            for item in (arg if isinstance(arg, list | tuple) else (arg,))
        ]
        tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        if event.name == "t" and id(tensors[0]) not in self._known:
            self._transposed[id(event.outputs[0])] = tensors[0]
        if event.name in ("expand", "view", "reshape") and id(tensors[0]) not in self._known:
            plain = self._spread.get(id(tensors[0]), tensors[0])
            (out,) = event.outputs
            if out.dim() == 3 and out.shape[1:] == plain.shape and out.stride()[0] == 0:
                self._spread[id(out)] = plain
        if event.name != "rotary" and not any(id(tensor) in self._known for tensor in tensors):
            return  # of constants alone, and so is one itself
        if (followed_ := followed(event, self._positional)) is not None:
            self._positional[id(event.outputs[0])] = followed_
        rule = RULES.get(event.name)
        is_in_place = rule is None and event.name.endswith("_")
        rule = RULES.get(event.name.removesuffix("_")) if is_in_place else rule
        try:
            if rule is None:
                raise NotLoweredError(f"torch's '{event.name}'")
            results: Sequence[Known] = self._by_rule(rule, event)
        except NotLoweredError as error:
            if event.name in (
                "attention",
                "choice",
                "store",
                "heads",
                "rotary",
                "short_convolution",
                "delta_rule",
                "scan",
            ):
                raise
            results = [Unknown(str(error))] * len(event.outputs)
        if is_in_place:
            before = self._known.get(id(tensors[0]))
            for other in self._sharing.get(_memory(event.outputs[0]), ()):
                self._known[other] = rewritten(self, self._known[other], before, results[0])
        for output, known in zip(event.outputs, results, strict=True):
            self._known[id(output)] = known
            if isinstance(output, Tensor):
                self._sharing.setdefault(_memory(output), {})[id(output)] = output

    def _by_rule(self, rule: Rule, event: Event) -> Sequence[Known]:
        """Lower a call by its rule. Models call torch in more forms than any rule knows: those a
        rule fails on are not lowered."""
        try:
            return rule(self, event)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotLoweredError(
                f"torch's '{event.name}' in a form that is unknown here ({error})"
            ) from error
