"""Reading finished pages: a strict parser for HTML, and a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from html import escape
from html.parser import HTMLParser
from pathlib import Path

VOID = ("meta", "br", "img", "link", "input", "hr")
# written <.../> inside <svg>
SELF_CLOSED = ("path", "use", "rect", "line", "circle", "clipPath", "defs", "g")
FOUND = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=3000",
)  # fmt: skip


class Page(HTMLParser):
    """What is on a page. Fails where tags do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # (innermost tag, text)
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> outside svg"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self) -> str:
        """What a reader sees."""
        return "".join(data for tag, data in self.texts if tag not in ("style", "script"))

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]


def run_in_frame(html: str, width: int, expression: str, folder: Path) -> str:
    """The value of a JavaScript expression over `page`, the document of a frame of `width` pixels:
    a headless window has no width below 500."""
    frame = (
        f'<iframe srcdoc="{escape(html)}" style="width:{width}px;height:844px;border:0"></iframe>'
    )
    script = (
        "addEventListener('load', () => { const page = document.querySelector('iframe').contentDocument; let found;"
        f"try {{ found = String({expression}) }} catch (error) {{ found = 'error: ' + error }}"
        "document.body.innerHTML = ''; document.body.append('<<' + found + '>>') })"
    )
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f"<!doctype html><meta charset='utf-8'><body>{frame}<script>{script}</script>",
        encoding="utf-8",
    )
    with tempfile.TemporaryDirectory() as profile:
        out = subprocess.run(
            [
                str(FOUND),
                *FLAGS,
                f"--user-data-dir={profile}",
                "--window-size=1300,900",
                "--dump-dom",
                wrapper.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
    output = re.search(r"&lt;&lt;(.*)&gt;&gt;", out, re.DOTALL)
    assert output is not None, out[-500:]
    return output[1]
