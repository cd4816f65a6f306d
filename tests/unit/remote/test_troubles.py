"""Messages about a connection that cannot be opened: certificates that do not fit, ports with
another protocol."""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from outrider.errors import ConfigError, ServerError
from outrider.remote.access import Access
from outrider.remote.endpoint import Endpoint
from outrider.remote.probe import check_health
from outrider.remote.security import ServerSecurity, check_access
from outrider.remote.serving import GrpcServer, ServiceSettings
from tests.certificates import Authority

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def web_port() -> Iterator[int]:
    """An HTTP server's."""
    server: socketserver.BaseServer = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def trouble_of(server: ServerSecurity, client: Access, scheme: str = "grpcs") -> str:
    """By the client, which cannot get through; "" where it can."""

    async def ask() -> str:
        listening = GrpcServer(ServiceSettings(security=server))
        await listening.listen()
        await listening.set_serving(True)
        try:
            await check_health(Endpoint.parse(f"{scheme}://{listening.address}"), client, TIMEOUT_S)
        except ServerError as error:
            return str(error)
        finally:
            await listening.stop()
        return ""

    return asyncio.run(ask())


@pytest.mark.slow
def test_each_misfit_has_words_of_its_own(ours: Authority, others: Authority) -> None:
    certificate, key = ours.signed("service", "IP:127.0.0.1")
    plain = ServerSecurity()
    tls = ServerSecurity(certificate=certificate, key=key)
    mutual = ServerSecurity(certificate=certificate, key=key, client_ca=ours.certificate)
    mine = ours.signed("caller", "DNS:caller")
    theirs = others.signed("stranger", "DNS:stranger")
    assert trouble_of(mutual, Access(ca=ours.certificate, certificate=mine[0], key=mine[1])) == ""
    closes = "it closes the line at once: it wants TLS (grpcs://), or a certificate of an authority that it trusts"
    assert closes in trouble_of(mutual, Access(ca=ours.certificate))
    assert closes in trouble_of(
        mutual, Access(ca=ours.certificate, certificate=theirs[0], key=theirs[1])
    )
    assert closes in trouble_of(tls, Access(), "grpc")
    assert "of no authority that is trusted here" in trouble_of(tls, Access(ca=others.certificate))
    assert "no TLS is spoken there: write grpc://" in trouble_of(plain, Access(ca=ours.certificate))
    named = ours.signed("elsewhere", "DNS:elsewhere")
    elsewhere = ServerSecurity(certificate=named[0], key=named[1])
    assert "for another name than the address" in trouble_of(elsewhere, Access(ca=ours.certificate))
    assert trouble_of(elsewhere, Access(ca=ours.certificate, server_name="elsewhere")) == ""


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("grpc://127.0.0.1:{web}", "what listens there speaks no gRPC"),
        ("grpc://127.0.0.1:9", "nobody listens there"),
        ("unix:/nowhere/socket", "no such socket"),
        ("grpc://no-such-host.invalid:1", "no host of that name is known"),
    ],
)
def test_addresses_where_no_service_is(address: str, words: str, web_port: int) -> None:
    with pytest.raises(ServerError, match=words):
        asyncio.run(check_health(Endpoint.parse(address.format(web=web_port)), Access(), TIMEOUT_S))


def test_files_that_do_not_fit_are_refused_before_anything_is_asked(
    ours: Authority, tmp_path: Path
) -> None:
    certificate, key = ours.signed("one", "DNS:one")
    other_key = ours.signed("two", "DNS:two")[1]
    with pytest.raises(ConfigError, match="are not of one pair"):
        Access(certificate=certificate, key=other_key).context()
    with pytest.raises(ConfigError, match="are no PEM certificate and private key"):
        ServerSecurity(certificate=key, key=key).credentials()
    with pytest.raises(ConfigError, match="holds no PEM certificate of an authority"):
        Access(ca=key).context()
    with pytest.raises(ConfigError, match="cannot read"):
        Access(ca=tmp_path / "none.pem").context()
    with pytest.raises(ConfigError, match="write grpcs://"):
        check_access(Access(ca=ours.certificate), Endpoint.parse("grpc://127.0.0.1:9"))


def test_a_port_that_is_taken_is_reported() -> None:
    async def twice() -> None:
        first = GrpcServer(ServiceSettings())
        await first.listen()
        try:
            with pytest.raises(ConfigError, match="the port is taken"):
                await GrpcServer(
                    ServiceSettings(port=int(first.address.rpartition(":")[2]))
                ).listen()
        finally:
            await first.stop()

    asyncio.run(twice())
