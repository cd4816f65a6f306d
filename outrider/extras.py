"""Packages that the base installation leaves out, by the extra that brings them, and the error
where one is missing.

Whatever needs an extra asks here before it starts: a command before it loads a model, a package of
Python when it is imported.
"""

from __future__ import annotations

from importlib.util import find_spec

from outrider.errors import ConfigError, install_hint

# packages by the names that are imported, of those extras without which something does not start
EXTRAS = {
    "lab": ("scipy",),
    "services": ("grpc", "grpc_health"),
    "train": ("accelerate",),
    "parquet": ("pyarrow",),
}


class MissingExtraError(ConfigError, ImportError):
    """A package is not installed that an extra brings."""


def check_installed(what: str, extra: str) -> None:
    """Raises MissingExtraError where `what` lacks a package of an extra."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"{what} needs {', '.join(missing)}: {install_hint(extra)}")


def check_lab(what: str) -> None:
    """Raises MissingExtraError where `what` lacks a package of the lab."""
    check_installed(what, "lab")
