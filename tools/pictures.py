"""Every picture in docs/images, made anew: `python -m tools.pictures MODEL.gguf`.

The chart in README (speed.svg) is drawn from a stored result. The reports are those of bench, tune,
explain and certify on the embedded pair; the playground is that of a server with MODEL. Names after
the model make some of them alone: `python -m tools.pictures MODEL.gguf speed bench`. It takes an
installed Chromium (OUTRIDER_CHROMIUM, else the one on the path), and a quiet machine for about five
minutes: the pictures show speeds.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import Browser, sync_playwright

from tools.speed_chart import PICTURE as SPEED
from tools.speed_chart import draw

IMAGES = SPEED.parent
REPORTS = {  # name -> arguments
    "bench": ["bench", "demo", "--drafters", "draft-model k=auto, eagle3 k=7, suffix, ngram"],
    "tune": ["tune", "demo"],
    "explain": ["explain", "demo", "--drafter", "draft-model k=5"],
    "certify": ["certify", "demo"],
}
NAMES = ("speed", *REPORTS, "playground")
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
WIDTH = 900  # of a report's picture
MARGIN = 20
SCALE = 0.85  # a picture takes less than 100 KB


def main() -> None:
    """Makes the pictures that are named, or all."""
    model, *names = sys.argv[1:]
    unknown = set(names) - set(NAMES)
    if unknown:
        raise SystemExit(f"error: no picture '{unknown.pop()}': there are {', '.join(NAMES)}")
    wanted = names or NAMES
    IMAGES.mkdir(exist_ok=True)
    if "speed" in wanted:
        SPEED.write_text(draw(), encoding="utf-8")
    chromium = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=FLAGS)
        for name in REPORTS:
            if name in wanted:
                take_report(browser, name)
        if "playground" in wanted:
            with served(model) as url:
                take_playground(browser, url)
        browser.close()


def take_report(browser: Browser, name: str) -> None:
    """The page of one report, down to the next command."""
    with TemporaryDirectory() as folder:
        page_file = Path(folder) / "report.html"
        command = [sys.executable, "-m", "outrider", *REPORTS[name], "--out", str(page_file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        page = browser.new_page(
            viewport={"width": WIDTH, "height": WIDTH},
            device_scale_factor=SCALE,
            color_scheme="light",
        )
        page.goto(page_file.as_uri())
        box = page.locator(".codeblock").first.bounding_box()
        assert box is not None
        page.screenshot(
            path=str(IMAGES / f"{name}.png"),
            full_page=True,
            clip={"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + MARGIN},
        )
        page.close()


@contextmanager
def served(model: str) -> Iterator[str]:
    """A server of the model, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "outrider", "serve", model, "--drafter", "suffix"]
    server = subprocess.Popen([*command, "--port", str(port)])
    try:
        wait_for(f"{url}/ready")
        yield url
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


def take_playground(browser: Browser, url: str) -> None:
    """One question, with drafts and without, side by side."""
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
    page.screenshot(path=str(IMAGES / "playground.png"))
    page.close()


if __name__ == "__main__":
    main()
