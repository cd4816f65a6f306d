"""Work in units that are finished once: with a journal, a unit done before an interruption is read instead of run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.lab.journal import Journal
from outrider.lab.progress import Progress, Quiet


@dataclass
class Units:
    """A store of finished units, and the listeners that are notified of them."""

    journal: Journal | None = None
    progress: Progress = field(default_factory=Quiet)

    def get(self, key: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """The unit's value, plain JSON data: read, or what `run(*arguments)` returns."""
        value = run(*arguments) if self.journal is None else self.journal.unit(key, run, *arguments)
        self.progress.advance()
        return value
