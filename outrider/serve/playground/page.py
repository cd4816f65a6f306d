"""One HTML file, put together here: style and script inside, nothing fetched but this server's own
API.

    page.html    the page             page.css     its looks: the reports' colours of fates
    stream.js    asking the server, reading the stream, counting       page.js     the controls and the tokens

The content security policy allows exactly this style and this script, by their hashes, and
connections to this server alone, so that not even a text that slipped past the escaping could load
or run anything.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from outrider.version import __version__


@cache
def page() -> str:
    """The whole document."""
    return Template(_asset("page.html")).substitute(
        style=_style(), script=_script(), version=__version__
    )


@cache
def policy() -> str:
    """The Content-Security-Policy header that `page` wants."""
    style, script = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (_style(), _script())
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def router() -> APIRouter:
    """GET / answers the page. It holds no secret: it needs no API key, its requests do."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    def playground() -> HTMLResponse:
        return HTMLResponse(page(), headers=_headers())

    return routes


def _headers() -> dict[str, str]:
    return {
        "Content-Security-Policy": policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # asked for again after an upgrade of the server
    }


def _style() -> str:
    return _asset("page.css")


def _script() -> str:
    """Both scripts as one module: page.js uses what stream.js defines."""
    return _asset("stream.js") + "\n" + _asset("page.js")


def _asset(name: str) -> str:
    return files("outrider.serve.playground").joinpath(name).read_text(encoding="utf-8")
