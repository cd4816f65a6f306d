"""What takes seconds to import, and many starts never need: imported when something of it is used.

    from outrider.lazy import transformers          with deferred():
    transformers.AutoConfig                             from outrider.lab.bench.plan import Plan
    transformers.pytorch_utils.Conv1D               Plan(...)
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from outrider import collector


class Package:
    """Stands for a package until it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self._name)
        try:
            return getattr(module, name)
        except AttributeError:
            return importlib.import_module(f"{self._name}.{name}")


class Deferred:
    """Stands for a function, class or module of a package until it is called or something of it is used."""

    def __init__(self, package: str, name: str) -> None:
        self._package, self._name = Package(package), name

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._found()(*values, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def _found(self) -> Any:
        with collector.paused():
            return getattr(self._package, self._name)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, `from PACKAGE import NAME` imports nothing yet, as `lazy from` of Python 3.15 (PEP 810) will.

    For functions, modules, and classes to be called; not for constants, nor for classes of `isinstance` and `except`.
    """

    def parts_of(package: str, _globals: Any, _locals: Any, names: tuple[str, ...], _level: int) -> SimpleNamespace:
        return SimpleNamespace(**{name: Deferred(package, name) for name in names})

    own, builtins.__import__ = builtins.__import__, parts_of  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.__import__ = own


scipy: Any = Package("scipy")
matplotlib: Any = Package("matplotlib")
torch: Any = Package("torch")
transformers: Any = Package("transformers")
huggingface_hub: Any = Package("huggingface_hub")
filelock: Any = Package("filelock")
