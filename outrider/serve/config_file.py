"""`--config FILE`: several models in one server, and routes between them, as TOML.

    [server]                          # all optional; the same options on the command line win
    port = 8000
    api_keys = ["..."]

    [[models]]                        # at least one
    name = "small"
    target = "demo"
    drafter = "ngram"                 # any option of `outrider generate` about drafting and machine
    max_num_seqs = 16                 # any option of the engine
    extra_drafters = ["suffix"]

    [[routes]]                        # see rules.py
    model = "auto"
    max_prompt_tokens = 2000
    to = "small"

Unknown keys and wrong types are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from outrider.build import Options
from outrider.engine.request import EngineSettings
from outrider.errors import ConfigError, did_you_mean
from outrider.serve.rules import Rule
from outrider.serve.settings import ServedModel, ServerSettings
from outrider.settings_file import read_settings
from outrider.wellformed import read_toml

TABLES = ("server", "models", "routes")
OF_TABLES = ("models", "rules")  # of `ServerSettings`: they have tables of their own
Kind = TypeVar("Kind")
ReadModel = Callable[[dict[str, Any], str], ServedModel]  # (table, what to call it in a message)


def read_config(
    path: Path, given: dict[str, Any], read_model: ReadModel | None = None
) -> ServerSettings:
    """`given`: fields of `ServerSettings` from the command line, which win; `read_model`: what a
    table of [[models]] means, if no engine here. Raises ConfigError naming file and key."""
    read_model = read_model or _model
    content = read_toml(path, f"configuration {path}")
    check_keys(content, TABLES, str(path))
    server = content.get("server", {})
    if not isinstance(server, dict):
        raise ConfigError(f"{path}: 'server' must be a table: [server]")
    check_keys(
        server,
        [name for name in _names(ServerSettings) if name not in OF_TABLES],
        f"{path} [server]",
    )
    models = [read_model(table, where) for table, where in _tables(content, "models", path)]
    rules = [_made(Rule, table, where) for table, where in _tables(content, "routes", path)]
    return _made(
        ServerSettings,
        {**server, **given, "models": tuple(models), "rules": tuple(rules)},
        f"{path} [server]",
    )


def _tables(content: dict[str, Any], name: str, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """(table, what to call it in a message)."""
    tables = content.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: '{name}' must be a list of tables: [[{name}]]")
    for number, table in enumerate(tables, 1):
        yield table, f"{path} [[{name}]] number {number}"


def _model(table: dict[str, Any], where: str) -> ServedModel:
    served, engine, options = (
        {name: table[name] for name in _names(kind) if name in table}
        for kind in (ServedModel, EngineSettings, Options)
    )
    known = [*_names(ServedModel), *_names(EngineSettings), *_names(Options), "settings"]
    check_keys(table, [name for name in known if name not in ("options", "engine")], where)
    if "settings" in table:
        options = {**read_settings(Path(str(table["settings"]))).options, **options}
    if "target" not in options:
        raise ConfigError(f"{where}: 'target' is missing: 'demo', a folder or a hub id")
    options.pop("max_num_seqs", None)  # the engine's
    records = {
        "options": _made(Options, options, where).with_free_length(),
        "engine": _made(EngineSettings, engine, where),
    }
    return _made(ServedModel, {"name": options["target"], **served, **records}, where)


def _names(kind: type) -> list[str]:
    """Field names in a configuration file: limits in seconds lack the `_s` of Python."""
    return [field.metadata.get("alias", field.name) for field in fields(kind)]


def check_keys(table: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raises ConfigError for a key that is not among `known`."""
    for name in table:
        if name not in known:
            raise ConfigError(f"{where}: unknown key '{name}'.{did_you_mean(name, known)}")


def _made(kind: type[Kind], values: dict[str, Any], where: str) -> Kind:
    """An instance of a table. Raises ConfigError that says where the table stands."""
    check_keys(values, _names(kind), where)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
