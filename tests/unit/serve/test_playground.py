"""The playground's page as a document: small, whole, closed to everything but its own server."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from outrider.serve.playground import page, policy, router
from outrider.version import __version__

MAX_BYTES = 40_000


def inside(tag: str) -> str:
    """The text of the page's only element of that name."""
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page(), re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_page_is_small_and_complete() -> None:
    """A part that was left out, or a page that grew past what a phone on a bad line should fetch."""
    assert len(page().encode()) < MAX_BYTES
    assert __version__ in page()
    assert "$style" not in page()
    assert "async function* events" in inside("script")
    assert "--accepted" in inside("style")


def test_page_names_no_other_host() -> None:
    """A font, script or picture from another host would reveal requests to it."""
    assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", page())
    assert "@import" not in page()
    assert "url(" not in page()


def test_policy_allows_this_style_and_script_and_nothing_else() -> None:
    """A hash of something else leaves the page bare and dead; a missing directive leaves it open."""
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(inside(tag).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy()
    assert policy().startswith("default-src 'none'")
    assert "connect-src 'self'" in policy()
    assert "unsafe" not in policy()


def test_nothing_in_the_page_is_forbidden_by_its_own_policy() -> None:
    """Style attributes and inline handlers are silently dropped by the policy."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", page(), flags=re.DOTALL)
    assert not re.findall(r"\son[a-z]+=", body)
    assert "style=" not in body
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", inside("script")
    )


def test_colours_of_fates_are_those_of_the_reports() -> None:
    """One fate, one colour, wherever tokens are shown."""
    report = files("outrider.report").joinpath("page.css").read_text(encoding="utf-8")
    for name in ("accepted", "correction", "bonus", "series-1", "series-2", "series-3"):
        pattern = rf"--{name}: (#[0-9a-f]{{6}})"
        assert re.findall(pattern, inside("style")) == re.findall(pattern, report), name


def test_every_control_has_a_label() -> None:
    """A field a screen reader can only call "edit"."""
    wrapped = re.findall(r'<label class="check"><input type="checkbox" id="([a-z-]+)">', page())
    labelled = set(re.findall(r'<label for="([a-z-]+)"', page())) | set(wrapped)
    assert set(re.findall(r'<(?:input|select|textarea)\b[^>]*\bid="([a-z-]+)"', page())) <= labelled


def test_route_answers_with_the_policy() -> None:
    """The page without its header is a page without protection."""
    app = FastAPI()
    app.include_router(router())
    answer = TestClient(app).get("/")
    assert answer.status_code == 200
    assert answer.text == page()
    assert answer.headers["Content-Security-Policy"] == policy()
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "/" not in app.openapi()["paths"]
