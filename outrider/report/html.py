"""A document as one HTML file: style, script and pictures inside, nothing fetched, ever.

The content security policy allows this page's own style sheet and script by their hashes and nothing else, so not even a text
that slipped through the escaping could load or run anything. Without the script everything is still readable: the script only
adds the card with a token's numbers and the copy buttons. page.html.j2 is the page, page.css its looks, page.js its script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from outrider.report.document import Block, Document, Plot, Table, Token
from outrider.report.plots import to_image
from outrider.report.plotted import numbers
from outrider.report.text import clean, one_line
from outrider.report.tokens import MEANING, fates
from outrider.version import __version__

MIN_HEADINGS = 4  # from here on a page has a table of contents
LONG_CELL = 20  # letters
NEWLINE = "↵\n"
_OPTION = re.compile(r"(?<![\w&;#-])--[a-z][a-z0-9-]{1,28}(?![\w-])")  # none so long that a phone is too narrow
_EXPONENT = re.compile(r"(?<![\w.&;#])\d[\d.]{0,18}e-\d{1,3}(?!\d)")


def to_html(document: Document) -> str:
    """The whole page. Raises ValueError for a plot whose series do not fit its x."""
    style, script = _asset("page.css"), _asset("page.js")
    return _template().render(
        title=document.title, subtitle=document.subtitle, blocks=list(_beside(document.blocks)), meaning=MEANING,
        version=__version__, min_headings=MIN_HEADINGS,
        style=Markup(style), script=Markup(script), policy=_policy(style, script),
    )  # fmt: skip


def _beside(blocks: Sequence[Block]) -> Iterator[Block | list[Block]]:
    """Plots that follow one another stand side by side where the page is wide."""
    for is_plot, group in groupby(blocks, key=lambda block: isinstance(block, Plot)):
        if is_plot:
            yield list(group)
        else:
            yield from group


def _kind(block: Block | list[Block]) -> str:
    """What the template calls it."""
    return "plots" if isinstance(block, list) else type(block).__name__.lower()


def _spans(tokens: Sequence[Token]) -> Iterator[Token]:
    """Each token, and as one those in a row that share a fate and say nothing more."""

    def alone(numbered: tuple[int, Token]) -> Any:
        index, token = numbered
        return token.fate if token.fate in ("prompt", "plain") and not token.hover else index

    for _, group in groupby(enumerate(tokens), key=alone):
        together = [token for _, token in group]
        first = together[0]
        text = clean("".join(token.text for token in together)).replace("\n", NEWLINE)
        yield Token(text, first.fate, clean(first.rejected).replace("\n", "↵"), clean(first.hover))


def _prose(text: str) -> Markup:
    """Escaped; command line options look like code, and neither they nor numbers like 2e-16 are broken after a dash."""
    escaped = _OPTION.sub(r"<code>\g<0></code>", str(escape(clean(text))))
    return Markup(_EXPONENT.sub(r'<span class="whole">\g<0></span>', escaped))


def _classes(table: Table) -> list[str]:
    """The CSS classes of each column: its alignment, and whether a narrow page must leave it some room."""
    longest = [max((len(row[index]) for row in table.rows), default=0) for index in range(len(table.columns))]
    return [
        f"{column.align} long" if column.align == "left" and length >= LONG_CELL else column.align
        for column, length in zip(table.columns, longest, strict=True)
    ]


def _cell(text: str) -> Markup:
    return _prose(one_line(text))


def _policy(style: str, script: str) -> str:
    style_hash, script_hash = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return files("outrider.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "line": one_line, "clean": clean, "prose": _prose, "cell": _cell, "classes": _classes, "kind": _kind, "image": to_image,
        "numbers": numbers, "fates": fates, "spans": _spans,
    }  # fmt: skip
    return environment.from_string(_asset("page.html.j2"))
