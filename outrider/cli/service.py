"""`outrider service`: the processes of a deployment in parts, one sub-command each (docs/services.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from outrider.cli.service_coordinator import coordinator
from outrider.cli.service_draft import draft
from outrider.cli.service_options import CallOptions
from outrider.cli.service_target import target
from outrider.cli.verbs import add_verb, with_groups

Address = Annotated[str, typer.Argument(help="grpc://HOST:PORT, grpcs://HOST:PORT or unix:/PATH.", show_default=False)]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)]


@with_groups
def health(address: Address, call: CallOptions, timeout: Timeout = 5.0) -> int:
    """Ask a draft or target service whether it takes calls: exit status 0, or 1 with the reason. Needs no token."""
    import asyncio

    from outrider.remote.endpoint import Endpoint
    from outrider.remote.probe import check_health

    round_trip_s = asyncio.run(check_health(Endpoint.parse(address, "address"), call.security(), timeout))
    typer.echo(f"{address} takes calls, {1e3 * round_trip_s:.3g} ms there and back")
    return 0


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
