"""A browser, a server that answers from a script, and pages of it that are held to ask nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import sync_playwright

from tests.playground import CHROMIUM, FLAGS, WIDE
from tests.scripted_server import Scripted, scripted_server


@pytest.fixture(scope="module")  # while it is open, this thread has an event loop that runs
def browser() -> Iterator[Any]:
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted_server() as scripted:
        yield scripted


@pytest.fixture
def open_page(browser: Any, server: Scripted) -> Iterator[Callable[..., Any]]:
    """Opens the page; afterwards it must have asked nobody else and tripped over nothing."""
    contexts: list[Any] = []
    faults: list[str] = []

    def note(address: str) -> None:
        if not address.startswith((server.url, "data:", "blob:")):
            faults.append(address)

    def opened(**looks: Any) -> Any:
        context = browser.new_context(**looks)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda line: faults.append(line.text) if "Content Security" in line.text else None,
        )
        page.on("request", lambda request: note(request.url))
        page.goto(server.url)
        page.wait_for_selector("#about:not(:text('Asking the server'))")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    return open_page(**WIDE)
