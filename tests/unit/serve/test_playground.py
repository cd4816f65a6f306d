"""The playground's page as a document: small, whole, closed to everything but its own server."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from outrider.serve.playground import assets, page, policy, router
from outrider.version import __version__

MAX_BYTES = 110_000  # of what is ours
MAX_BYTES_OF_LIBRARIES = 300_000
MAX_LINES = 300  # of a script of ours
OURS = {name: text.decode() for name, text in assets().items() if not name.startswith("vendor/")}
VENDOR = files("outrider.serve.playground").joinpath("vendor")


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(router())
    return TestClient(app)


def test_page_is_small_and_complete() -> None:
    """A part that was left out, or a page that grew past what a phone on a bad line should fetch."""
    document = page("nonce")
    ours = len(document.encode()) + sum(len(assets()[name]) for name in OURS)
    assert ours < MAX_BYTES
    assert sum(map(len, assets().values())) + len(document.encode()) - ours < MAX_BYTES_OF_LIBRARIES
    assert __version__ in document
    assert "$" not in document
    for name, text in OURS.items():
        assert len(text.splitlines()) <= MAX_LINES, name


def test_page_names_no_other_host() -> None:
    """A font, script or picture from another host would reveal requests to it."""
    for text in (page("nonce"), *OURS.values()):
        named = set(re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9.]+", text))
        assert named <= {"http://www.w3.org"}  # the name of SVG, which nothing fetches
        assert "@import" not in text
        assert "url(" not in text


def test_policy_allows_this_pages_scripts_and_nothing_else() -> None:
    directives = policy("n0nce").split("; ")
    assert directives[0] == "default-src 'none'"
    assert "script-src 'nonce-n0nce'" in directives
    assert "style-src 'self'" in directives
    assert "connect-src 'self'" in directives
    assert "require-trusted-types-for 'script'" in directives
    assert "trusted-types dompurify" in directives
    assert "unsafe" not in policy("n0nce")


def test_nothing_in_the_page_is_forbidden_by_its_own_policy() -> None:
    """Style attributes and inline handlers are silently dropped by the policy; markup from strings
    throws."""
    document = page("nonce")
    assert not re.findall(r"\son[a-z]+=", document)
    assert "style=" not in document
    assert re.findall(r"<script\b[^>]*>", document) == [
        f'<script type="module" nonce="nonce" src="playground/{address(document)}/page.js">'
    ]
    scripts = "".join(text for name, text in OURS.items() if name.endswith(".js"))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", scripts)


def address(document: str) -> str:
    """The part of the assets' addresses that changes with them."""
    found = re.search(r'href="playground/([0-9a-f]+)/page\.css"', document)
    assert found
    return found[1]


def test_libraries_are_those_of_the_list() -> None:
    """A library that was changed, or renewed without its line, or whose licence is missing."""
    text = VENDOR.joinpath("README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w.]+)` .*`([\w.]+LICENSE)`.*`([0-9a-f]{64})` \|$", text, re.M)
    hashes = {f"vendor/{name}": digest for name, _, digest in listed}
    there = {name for name in assets() if name.startswith("vendor/")}
    assert {name: hashlib.sha256(assets()[name]).hexdigest() for name in there} == hashes
    for _, licence, _ in listed:
        assert "copyright" in VENDOR.joinpath(licence).read_text(encoding="utf-8").lower()


def test_colours_of_fates_are_those_of_the_reports() -> None:
    """One fate, one colour, wherever tokens are shown."""
    report = files("outrider.report").joinpath("page.css").read_text(encoding="utf-8")
    for name in ("accepted", "correction", "bonus", "series-1", "series-2", "series-3"):
        pattern = rf"--{name}: (#[0-9a-f]{{6}})"
        assert re.findall(pattern, OURS["page.css"]) == re.findall(pattern, report), name


def test_page_is_answered_with_a_policy_of_its_own(client: TestClient) -> None:
    """The page without its header is a page without protection; a nonce that is known is none."""
    answers = [client.get("/") for _ in range(2)]
    nonces = []
    for answer in answers:
        assert answer.status_code == 200
        found = re.search(r'nonce="([\w-]{20,})"', answer.text)
        assert found
        assert answer.headers["Content-Security-Policy"] == policy(found[1])
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        nonces.append(found[1])
    assert nonces[0] != nonces[1]
    assert client.get("/openapi.json").json()["paths"] == {}


def test_assets_are_answered_and_nothing_beside_them(client: TestClient) -> None:
    """A script with a type that browsers refuse; a file of the package that is nobody's business."""
    folder = f"/playground/{address(page('nonce'))}"
    for name, content in assets().items():
        answer = client.get(f"{folder}/{name}")
        assert answer.content == content
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        assert answer.headers["Content-Type"].startswith(kind)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "immutable" in answer.headers["Cache-Control"]
    for path in (
        f"{folder}/page.py",
        f"{folder}/..%2Fapp.py",
        "/playground/0123456789abcdef/page.js",
    ):
        assert client.get(path).status_code == 404


def test_scripts_import_what_is_there() -> None:
    """A module that a browser looks for in vain leaves the whole page dead."""
    for name, text in OURS.items():
        for imported in re.findall(
            r'^import [^;]*?"\./([^"]+)";|^} from "\./([^"]+)";', text, re.M
        ):
            assert "".join(imported) in assets(), name
