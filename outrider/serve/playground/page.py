"""The page and what it loads: its own scripts and style, and the libraries in `vendor/`, all from
this server.

    page.html    the page                         page.css       its looks: the reports' colours of fates
    page.js      puts the parts together          chat.js        the conversation that is open
    stream.js    asking the server                tally.js       an answer as it grows, counted
    answer.js    how a message looks              markdown.js    an answer as formatted text
    compare.js   with drafts and without          card.js        what is known of a token
    settings.js  the settings and the models      sidebar.js     the list of conversations
    storage.js   what the browser keeps           versions.js    earlier versions of a conversation
    files.js     text files beside a message      empty.js       the page before the first message
    dom.js       elements, notices, panels

The content security policy allows the scripts of this very page (a nonce), its style and
connections to this server. Strings become markup nowhere but in DOMPurify (trusted types): not even
a text that slipped past it could load or run anything.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import cache
from pathlib import Path
from string import Template

from fastapi import APIRouter, HTTPException
from fastapi.responses import HTMLResponse, Response

from outrider.version import __version__

FOLDER = Path(__file__).parent
KINDS = {".css": "text/css", ".js": "text/javascript"}
A_YEAR_S = 365 * 24 * 3600


def page(nonce: str) -> str:
    """The whole document, whose script may run because it carries the header's nonce."""
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    return Template(text).substitute(version=__version__, digest=digest(), nonce=nonce)


def policy(nonce: str) -> str:
    """The Content-Security-Policy header that `page` wants."""
    return (
        f"default-src 'none'; style-src 'self'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )


@cache
def assets() -> dict[str, bytes]:
    """The scripts and styles by their paths below the page's folder."""
    files = sorted(file for file in FOLDER.rglob("*") if file.suffix in KINDS)
    return {file.relative_to(FOLDER).as_posix(): file.read_bytes() for file in files}


@cache
def digest() -> str:
    """A part of the assets' addresses that changes with any of them, so that browsers may keep
    them."""
    contents = hashlib.sha256()
    for name, content in assets().items():
        contents.update(f"{name} {len(content)} ".encode() + content)
    return contents.hexdigest()[:16]


def router() -> APIRouter:
    """GET / answers the page. It holds no secret: it needs no API key, its requests do."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    def playground() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        headers = {
            "Content-Security-Policy": policy(nonce),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",  # the nonce is good for one answer
        }
        return HTMLResponse(page(nonce), headers=headers)

    @routes.get("/playground/{version}/{name:path}", include_in_schema=False)
    def asset(version: str, name: str) -> Response:
        if version != digest() or name not in assets():
            raise HTTPException(404)
        headers = {
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": f"public, max-age={A_YEAR_S}, immutable",
        }
        return Response(assets()[name], media_type=KINDS[Path(name).suffix], headers=headers)

    return routes
