"""The playground in a browser, as tests drive it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE = {"viewport": {"width": 1280, "height": 850}}
PHONE = {"viewport": {"width": 390, "height": 740}, "has_touch": True, "is_mobile": True}
NEEDS_A_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no Chromium (set OUTRIDER_CHROMIUM)"),
]


def begin(page: Any, message: str) -> None:
    """Type and press Enter."""
    page.fill("#message", message)
    page.press("#message", "Enter")


def ended(page: Any) -> None:
    """Wait for the answer's end."""
    page.wait_for_selector("#send:not([disabled])")


def ask(page: Any, message: str) -> Any:
    """A whole turn; the newest message on the screen."""
    begin(page, message)
    ended(page)
    return page.locator(".message").last


def watch(page: Any) -> None:
    """Show tokens in their colours."""
    page.check("input[value=watching]")


def numbers(answer: Any) -> dict[str, str]:
    """What is shown below an answer."""
    return dict(
        zip(
            answer.locator("dt").all_text_contents(),
            answer.locator("dd").all_text_contents(),
            strict=True,
        )
    )


def texts(body: dict[str, Any]) -> list[str]:
    """What a request tells the model of the conversation."""
    return [message["content"] for message in body["messages"]]


def names(page: Any) -> list[str]:
    """The conversations of the list."""
    return list(page.locator("#list .name").all_inner_texts())


def reload(page: Any) -> None:
    page.reload()
    page.wait_for_selector("#about:has-text('drafter')")
