"""`outrider service health ADDRESS`: whether a service takes calls, as an exit status."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.service_options import CallOptions
from outrider.cli.verbs import with_groups

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
