"""Lazy name tables: a name maps to `"module:attribute"`, imported only when asked for.

Third parties add a name through an entry point group (`outrider.drafters`, `outrider.verifiers`); a
clash with a built-in name is an error, never a silent override.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from outrider.errors import ConfigError, did_you_mean, install_hint


@cache
def _installed(group: str, search_path: tuple[str, ...]) -> tuple[metadata.EntryPoint, ...]:
    """Entry points of the packages on `search_path`. Reading them takes milliseconds, and names are
    looked up often."""
    return tuple(metadata.entry_points(group=group))


@dataclass(frozen=True)
class Entry:
    """One registered thing: where it lives and the line that `outrider ls` prints about it."""

    path: str  # "package.module:Class"
    summary: str
    extra: str | None = None  # of the package, without which it cannot be imported
    package: str | None = None  # that the extra brings, as it is imported

    @property
    def remedy(self) -> str:
        """How to get what it needs, to append to a message."""
        return "" if self.extra is None else f"; {install_hint(self.extra)} brings what it needs"


class Registry:
    """Names of one kind ("drafter", "verifier") and how to import them. `called`: the kind in
    messages."""

    def __init__(self, kind: str, builtin: dict[str, Entry], called: str | None = None) -> None:
        self.kind = kind
        self._called = called or kind
        self._builtin = builtin

    @property
    def group(self) -> str:
        """Entry point group third parties register in."""
        return f"outrider.{self.kind}s"

    def entries(self) -> dict[str, Entry]:
        """Built-in names first, then entry points. Raises ConfigError when a plug-in reuses a
        built-in name."""
        entries_ = dict(self._builtin)
        for point in _installed(self.group, tuple(sys.path)):
            if point.name in self._builtin:
                raise ConfigError(
                    f"{self._called} '{point.name}' from {point.value} clashes with the built-in "
                    "of that name; rename it"
                )
            package = point.dist.name if point.dist else "an installed package"
            entries_[point.name] = Entry(point.value, f"third party, from {package}")
        return entries_

    def names(self) -> list[str]:
        return list(self.entries())

    def load(self, name: str) -> Any:
        """The registered object. Raises ConfigError with the nearest name when there is none."""
        entries = self.entries()
        if name not in entries:
            raise ConfigError(f"unknown {self._called} '{name}'.{did_you_mean(name, entries)}")
        module, _, attribute = entries[name].path.partition(":")
        try:
            loaded = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a third party's module may raise anything
            entry = entries[name]
            why = (
                str(error)
                if isinstance(error, ImportError | AttributeError)
                else f"{type(error).__name__}: {error}"
            )
            raise ConfigError(
                f"{self._called} '{name}' ({entry.path}) cannot be imported: {why}{entry.remedy}"
            ) from error
        if not isinstance(loaded, type):
            raise ConfigError(
                f"{self._called} '{name}' ({entries[name].path}) must be a class, got "
                f"{type(loaded).__name__}"
            )
        return loaded

    def importable(self) -> dict[str, Any]:
        """Everything registered that can be imported, by name; `broken` says why the rest cannot
        be."""
        broken = self.broken()
        return {name: self.load(name) for name in self.names() if name not in broken}

    def broken(self) -> dict[str, str]:
        """The names of what cannot be imported here, each with the reason."""
        reasons = {}
        for name in self.names():
            try:
                self.load(name)
            except ConfigError as error:
                reasons[name] = str(error)
        return reasons
