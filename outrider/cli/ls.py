"""`outrider ls [drafters|verifiers]`: what is registered, third-party entries included."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import AsJson
from outrider.errors import ConfigError, did_you_mean
from outrider.report.text import to_json
from outrider.settings import NoSettings, describe_settings

if TYPE_CHECKING:
    from outrider.registry import Registry

What = Annotated[str | None, typer.Argument(help="drafters or verifiers; default: both.", show_default=False)]
FACTS = {"drafters": ("lossless", "shape", "trained", "needs"), "verifiers": ("lossless", "shape")}


def ls(what: What = None, as_json: AsJson = False) -> int:
    """List drafters and verifiers."""
    from outrider.report.tables import registry_table, show

    if what is not None and what not in FACTS:
        raise ConfigError(f"nothing called '{what}' to list.{did_you_mean(what, FACTS)}")
    found = {kind: describe(_registry(kind), FACTS[kind]) for kind in FACTS if what in (None, kind)}
    if as_json:
        sys.stdout.write(to_json(found) + "\n")
        return 0
    for kind, rows in found.items():
        show(registry_table(kind, FACTS[kind], rows))
    return 0


def describe(registry: Registry, facts: tuple[str, ...]) -> list[dict[str, Any]]:
    """One dict per entry. What cannot be imported is listed with its `error`."""
    rows = []
    for name, entry in registry.entries().items():
        row: dict[str, Any] = {"name": name, "summary": entry.summary, "path": entry.path}
        try:
            loaded = registry.load(name)
            row |= {fact: getattr(loaded, fact, None) for fact in facts}
            row["settings"] = describe_settings(getattr(loaded, "Settings", NoSettings))
        except ConfigError as error:
            row["error"] = str(error)
        rows.append(row)
    return rows


def _registry(kind: str) -> Registry:
    if kind == "drafters":
        from outrider.drafters import DRAFTERS

        return DRAFTERS
    from outrider.verifiers import VERIFIERS

    return VERIFIERS
