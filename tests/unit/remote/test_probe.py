"""`outrider service health` against services that load, serve, want certificates, or are not there."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from outrider.cli.app import run
from outrider.errors import ServerError
from outrider.remote.access import Access
from outrider.remote.endpoint import Endpoint
from outrider.remote.probe import check_health
from outrider.remote.security import ServerSecurity
from outrider.remote.serving import GrpcServer, ServiceSettings

TIMEOUT_S = 10.0


async def probed(security: ServerSecurity, client: Access, *, is_serving: bool = True) -> None:
    server = GrpcServer(ServiceSettings(security=security))
    await server.listen()
    await server.set_serving(is_serving)
    scheme = "grpc" if security.certificate is None else "grpcs"
    try:
        await check_health(Endpoint.parse(f"{scheme}://{server.address}"), client, TIMEOUT_S)
    finally:
        await server.stop()


def test_a_service_that_serves_needs_no_token_to_say_so() -> None:
    asyncio.run(probed(ServerSecurity(token="secret"), Access()))


def test_a_service_that_loads_or_drains_is_not_healthy() -> None:
    with pytest.raises(ServerError, match="takes no calls now"):
        asyncio.run(probed(ServerSecurity(), Access(), is_serving=False))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_certificates_are_asked_for_and_shown(tmp_path: Path) -> None:
    certificate = tmp_path / "tls.crt"
    key = tmp_path / "tls.key"
    names = "-subj /CN=part -addext subjectAltName=IP:127.0.0.1"
    command = f"req -x509 -newkey rsa:2048 -nodes -days 2 {names} -keyout {key} -out {certificate}"
    subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    mutual = ServerSecurity(certificate=certificate, key=key, client_ca=certificate)
    asyncio.run(probed(mutual, Access(ca=certificate, certificate=certificate, key=key)))
    for stranger in (Access(ca=certificate), Access()):
        with pytest.raises(ServerError, match="does not answer"):
            asyncio.run(probed(mutual, stranger))


def test_nobody_there_is_exit_status_1_and_a_wrong_address_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        assert run(["service", "health", f"grpc://127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert "does not answer: UNAVAILABLE" in capsys.readouterr().err
    assert run(["service", "health", "ftp://127.0.0.1:8000"]) == 2
    assert "grpc://HOST:PORT" in capsys.readouterr().err
