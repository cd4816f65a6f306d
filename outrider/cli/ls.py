"""`outrider ls [drafters|verifiers|models|NAME]`: what is registered, third-party entries included;
of one name also its settings; and the models on this machine, which `outrider list` shows, too.
`outrider ls drafters-for MODEL` is in `drafters_for.py`."""

from __future__ import annotations

import dataclasses
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import Json
from outrider.cli.verbs import with_groups
from outrider.errors import ConfigError, did_you_mean
from outrider.report.text import amount, to_json
from outrider.settings import NoSettings, describe_settings

if TYPE_CHECKING:
    from outrider.registry import Registry
    from outrider.report.document import Block, Table

What = Annotated[
    str | None,
    typer.Argument(
        help="drafters, verifiers, models, drafters-for, or the name of a drafter or verifier, with "
        "its settings; default: drafters and verifiers.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Argument(help="Of drafters-for: the model that is drafted for.", show_default=False),
]
MODELS = "models"
DRAFTERS_FOR = "drafters-for"
FACTS = {"drafters": ("lossless", "shape", "trained", "needs"), "verifiers": ("lossless", "shape")}


@with_groups
def ls(what: What = None, model: Model = None, json: Json = False) -> int:
    """List drafters and verifiers, the settings of one of them, models (outrider list), or the
    drafters that were published for a model."""
    if (what == DRAFTERS_FOR) != (model is not None):
        raise ConfigError(
            f"ls {DRAFTERS_FOR} takes a model: outrider ls {DRAFTERS_FOR} MODEL"
            if model is None
            else f"ls {what} takes nothing after it, got '{model}'. Did you mean outrider ls "
            f"{DRAFTERS_FOR} {model}?"
        )
    if model is not None:
        from outrider.cli.drafters_for import list_drafters

        return list_drafters(model, json)
    if what == MODELS:
        return _list_models(json)
    from outrider.report.console import print_blocks
    from outrider.report.document import facts_table

    is_name = what is not None and what not in FACTS
    registries = (
        _with_entry(str(what))
        if is_name
        else {kind: _registry(kind) for kind in FACTS if what in (None, kind)}
    )
    if not json and not is_name:
        print_blocks([overview(kind, registry) for kind, registry in registries.items()])
        return 0
    found = {
        kind: describe(registry, FACTS[kind], what if is_name else None)
        for kind, registry in registries.items()
    }
    if json:
        sys.stdout.write(to_json(found) + "\n")
        return 0
    blocks: list[Block] = []
    for kind, rows in found.items():
        blocks.append(registry_table(kind, rows))
        for row in rows:
            # an empty default
            settings = {
                name: text.removeprefix(": ") for name, text in row.get("settings", {}).items()
            }
            if settings:
                blocks.append(facts_table(f"settings of {kind[:-1]} {row['name']}", settings))
    print_blocks(blocks)
    return 0


@with_groups
def list_models(json: Json = False) -> int:
    """List the models that are on this machine."""
    return _list_models(json)


def _list_models(json: bool) -> int:
    from outrider.cli.cached import cache_path, cached_models
    from outrider.report.console import print_blocks
    from outrider.report.document import Column, Table

    models = cached_models()
    if json:
        rows = [dataclasses.asdict(model) for model in models]
        sys.stdout.write(to_json({MODELS: rows}) + "\n")
        return 0
    columns = [
        Column("name", "left"),
        Column("format", "left"),
        Column("size"),
        Column("last used"),
    ]
    cells = [[model.name, model.format, amount(model.num_bytes), model.used()] for model in models]
    print_blocks([Table(columns, cells, f"models in {cache_path()}")])
    return 0


def overview(kind: str, registry: Registry) -> Table:
    """Name and summary of every entry; nothing of them is imported. What lacks a package says which
    extra brings it."""
    from outrider.report.document import Column, Table

    cells = []
    for name, entry in registry.entries().items():
        lacks = entry.package is not None and find_spec(entry.package) is None
        cells.append(
            [
                name,
                f"the package {entry.package} is not installed{entry.remedy}"
                if lacks
                else entry.summary,
            ]
        )
    return Table([Column("name", "left"), Column("summary", "left")], cells, kind)


def registry_table(kind: str, rows: list[dict[str, Any]]) -> Table:
    """Name, facts and summary of every entry; what cannot be imported says so."""
    from outrider.report.document import Column, Table, word

    facts = FACTS[kind]
    columns = [Column(name, "left") for name in ("name", *facts, "summary")]
    cells = [
        [row["name"], *(word(row.get(fact)) for fact in facts), row.get("error") or row["summary"]]
        for row in rows
    ]
    return Table(columns, cells, kind)


def _with_entry(name: str) -> dict[str, Registry]:
    """The registries that have an entry of this name. Raises ConfigError where none has."""
    registries = {kind: _registry(kind) for kind in FACTS}
    having = {kind: registry for kind, registry in registries.items() if name in registry.entries()}
    if not having:
        known = {
            *FACTS,
            MODELS,
            DRAFTERS_FOR,
            *(entry for registry in registries.values() for entry in registry.entries()),
        }
        raise ConfigError(f"nothing called '{name}' to list.{did_you_mean(name, known)}")
    return having


def describe(
    registry: Registry, facts: tuple[str, ...], only: str | None = None
) -> list[dict[str, Any]]:
    """One dict per entry, or that of one entry alone. What cannot be imported is listed with its
    `error`."""
    rows = []
    for name, entry in registry.entries().items():
        if only not in (None, name):
            continue
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
    from outrider.drafters import DRAFTERS
    from outrider.verifiers import VERIFIERS

    if kind == "drafters":
        return DRAFTERS
    return VERIFIERS
