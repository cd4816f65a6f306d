"""Calls that a model makes in a pass: seen by a dispatch mode of torch, or reported by a part that
is not entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Event:
    """One call: a torch operation's name, or that of a part that is not entered.

    Those are "attention", "choice", "store", "experts", "heads", "short_convolution", "delta_rule",
    "scan", "rotary", and "matrix" and "rows" of a layer in integers.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]


class Recorder(TorchDispatchMode):
    """Writes down torch's operations as they are called."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.is_paused:
            outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
            self.events.append(
                Event(func._schema.name.removeprefix("aten::"), args, kwargs or {}, outputs)
            )
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is recorded."""
        before = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module, of torch or of Python, is another inside; one of its class shows
    again afterwards."""
    is_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
