"""The picture of the playground in docs/serve.md: `python -m tools.playground_picture MODEL.gguf`
serves the model and takes it.

It takes an installed Chromium (OUTRIDER_CHROMIUM, else the one on the path), and a quiet machine:
the picture shows speeds.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "playground.png"
QUESTION = (
    "Copy this text without changes: The harbour was quiet in the morning. Two boats lay at the pier, and a man mended nets. "
    "The harbour was loud in the evening. Six boats lay at the pier, and many people were buying fish."
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]
READY_S = 120


def main() -> None:
    model = sys.argv[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        model,
        "--drafter",
        "suffix",
        "--port",
        url.rpartition(":")[2],
    ]
    server = subprocess.Popen(command)
    try:
        wait_for(f"{url}/ready")
        take(url)
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str) -> None:
    """Returns once the address answers. Raises TimeoutError."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            urlopen(url).close()
            return
        except URLError:
            time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer after {READY_S} s")


def take(url: str) -> None:
    """One question, with drafts and without, side by side."""
    chromium = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 720})
        page.goto(url)
        page.wait_for_selector("#about:has-text('drafters')")
        page.check("#compare")
        page.check("input[value=watching]")
        page.click("#settings-toggle")
        page.focus("#temperature")
        page.keyboard.press("Home")  # 0: greedy
        page.click("#settings .close")
        page.mouse.move(5, 5)  # away from the tokens, which say more about themselves below it
        page.fill("#message", QUESTION)
        page.press("#message", "Enter")
        page.wait_for_selector("#send:not([disabled])", timeout=120_000)
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=str(PICTURE))
        browser.close()


if __name__ == "__main__":
    main()
