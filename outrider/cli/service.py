"""`outrider service`: the processes of a deployment in parts, one sub-command each (docs/services.md)."""

from __future__ import annotations

from collections.abc import Callable

import typer

from outrider.cli.service_coordinator import coordinator
from outrider.cli.service_draft import draft
from outrider.cli.service_health import health
from outrider.cli.service_target import target
from outrider.cli.verbs import add_verb

COMMANDS: tuple[Callable[..., int | None], ...] = (draft, target, coordinator, health)


def service_app() -> typer.Typer:
    """The group of sub-commands, for the table of verbs."""
    app = typer.Typer(
        name="service",
        help="Run one part of a deployment in parts: draft, target or coordinator.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_without_command)
    for command in COMMANDS:
        add_verb(app, command)
    return app


def _without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
