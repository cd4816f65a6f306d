"""A document as one HTML file: its Markdown in page.html.j2, with style, script and charts
inside; nothing is fetched.

The content security policy allows this page's own style sheet and script by their hashes and
nothing else, so not even a text that slipped through the escaping could load or run anything.
Without the script everything is still readable: it only adds the card with a token's numbers and
the copy buttons.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markdown_it import MarkdownIt
from markupsafe import Markup

from outrider.report.document import (
    Bar,
    Block,
    Chart,
    Document,
    Heading,
    MarkedTokens,
    Paragraph,
    Table,
    Token,
)
from outrider.report.markdown import block_markdown, meanings, table_markdown
from outrider.report.text import clean, one_line
from outrider.report.tokens import MEANING, fates
from outrider.version import __version__

NEWLINE = "↵\n"


class Stripe(NamedTuple):
    """A bar on the page; lengths are shares of the scale: '43.1%', "" where there is no interval."""

    bar: Bar
    length: str
    low: str
    high: str


class Part(NamedTuple):
    """A block on the page."""

    look: str  # CSS classes
    content: Markup = Markup()
    more: Markup = Markup()  # shown when asked for: what the columns mean
    title: str = ""  # of the bars
    bars: Sequence[Stripe | str] = ()  # of a chart, after the names of their groups
    baseline: str = ""  # a line across the bars
    tokens: Sequence[Token] = ()  # an annotated text
    fates: Mapping[str, int] = {}  # of its tokens


def to_html(document: Document) -> str:
    """The whole page."""
    style = _asset("page.css")
    script = _asset("page.js")
    parts = [_part(block) for block in document.blocks]
    return _template().render(
        title=one_line(document.title),
        subtitle=one_line(document.subtitle),
        parts=parts,
        meaning=MEANING,
        version=__version__,
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
    )


def _part(block: Block) -> Part:
    match block:
        case Paragraph():
            plain = replace(block, tone="plain")  # colour and frame take the place of the sign
            return Part(f"paragraph {block.tone}", _rendered(block_markdown(plain)))
        case Table():
            bare = replace(block, columns=[replace(column, help="") for column in block.columns])
            more = _rendered(meanings(block.columns))
            return Part("table", _rendered(table_markdown(bare)), more=more)
        case Chart():
            return _chart(block)
        case MarkedTokens():
            title = _rendered(block_markdown(Heading(block.title, 3))) if block.title else Markup()
            return Part("text", title, tokens=list(_spans(block.tokens)), fates=fates(block.tokens))
        case _:
            return Part(type(block).__name__.lower(), _rendered(block_markdown(block)))


def _chart(chart: Chart) -> Part:
    stripes: list[Stripe | str] = []

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * chart.share(value):.1f}%"

    for name, bars in chart.groups.items():
        stripes += [one_line(name)] if len(chart.groups) > 1 else []
        for bar in bars:
            clean_bar = replace(bar, label=one_line(bar.label), text=one_line(bar.text))
            stripes.append(Stripe(clean_bar, share(bar.value), share(bar.low), share(bar.high)))
    title = one_line(chart.title)
    return Part("chart", title=title, bars=stripes, baseline=share(chart.baseline))


def _rendered(markdown: str) -> Markup:
    """Markdown as HTML. Raw HTML in it would be escaped; columns are aligned by class, as the
    policy forbids style attributes."""
    parser = _parser()
    tokens = parser.parse(markdown)
    for token in tokens:
        if token.attrs.pop("style", None) == "text-align:right":
            token.attrs["class"] = "right"
    return Markup(parser.renderer.render(tokens, parser.options, {}))


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    parser.add_render_rule(
        "table_open", lambda *_: '<div class="scroll" role="region" tabindex="0"><table>'
    )
    parser.add_render_rule("table_close", lambda *_: "</table></div>")
    return parser


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


def _policy(style: str, script: str) -> str:
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return files("outrider.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html.j2"))
