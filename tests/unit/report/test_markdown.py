"""Markdown is read back by a CommonMark parser: what a reader sees must be what the document says."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from outrider.report.document import (
    Bullets,
    CodeBlock,
    Column,
    Document,
    Heading,
    MarkedTokens,
    Paragraph,
    Table,
    Token,
)
from outrider.report.markdown import to_markdown
from outrider.report.text import clean, one_line
from tests.unit.report.browser import Page
from tests.unit.report.samples import HOSTILE, every_block, everything, text

WORDS = st.text(st.characters(codec=None), max_size=30) | st.text(
    "\\`*_{}[]<>|~$#&!-+=:.)( x1\n", max_size=20
)


def page(markdown: str) -> Page:
    """As GitHub would show it, before its sanitizer."""
    html = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)
    return Page(html.replace(" />", ">"))


def test_everything_is_shown() -> None:
    found = page(to_markdown(everything()))
    shown = found.text()
    for words in (
        "Benchmark of demo on gsm8k",
        "1.74 [1.68, 1.83]",
        "α: accepted / tested",
        "verify 4 %",
        "max_depth=32",
    ):
        assert words in shown
    tags = [tag for tag, _ in found.tags]
    assert (tags.count("table"), tags.count("h2"), tags.count("blockquote")) == (3, 4, 3)


def test_plain_words_stay_readable_unrendered() -> None:
    """Escapes only where something would happen without them."""
    text = to_markdown(
        Document("x", "", [Paragraph("suffix max_depth=32 is 1.2 [1.1, 1.3] (a-b) #1 & co!")])
    )
    assert "suffix max_depth=32 is 1.2 [1.1, 1.3] (a-b) #1 & co!" in text


def elements(words: str) -> str:
    """Every sort of text, once."""
    table = Table(
        [Column(words, "left", help=words), Column("b")],
        [[words, "1"]],
        title=words,
        marked=frozenset({0}),
    )
    blocks = [
        Heading(words),
        Paragraph(words),
        Paragraph(words, "bad"),
        Bullets([words]),
        CodeBlock(words),
        table,
    ]
    return to_markdown(Document(words, words, blocks))


@settings(max_examples=300, deadline=None)
@given(WORDS)
@example(">[0]")
def test_any_words_are_shown_as_they_are(words: str) -> None:
    """Nothing of a text is taken for Markdown or HTML: no tag is there that the blocks do not
    bring."""
    found = page(elements(words))
    allowed = {"h1", "h2", "p", "blockquote", "ul", "li", "pre", "code", "strong", "br"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, _ in found.tags} <= allowed
    assert [tag for tag, _ in found.tags].count("table") == 1
    assert [tag for tag, _ in found.tags].count("td") == 2
    shown = " ".join(found.text().split())
    assert shown.count(one_line(words)) >= (8 if one_line(words) else 0)


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_everywhere(words: str) -> None:
    markdown = to_markdown(every_block(words))
    markdown.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", markdown)
    found = page(markdown)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "img", "a", "iframe"})


@given(WORDS)
def test_code_is_copied_to_the_letter(words: str) -> None:
    found = page(to_markdown(Document("x", "", [CodeBlock(words, "bash")])))
    assert "".join(data for tag, data in found.texts if tag == "code") == clean(words) + "\n"


def test_a_text_keeps_its_marks() -> None:
    markdown = to_markdown(Document("x", "", [text(1)]))
    assert (
        "<pre>\nHow many?↵\n▌‹<ins> James picks 18</ins>›[-<del> apples</del>-]<b> eggs</b>"
        "‹<ins> in the</ins>›<i> morning</i>⁺.↵\n</pre>" in markdown
    )
    assert "drafted and accepted (5)" in markdown


def test_long_lines_of_a_text_are_broken() -> None:
    """GitHub does not wrap them; the text's own line breaks have a mark."""
    tokens = [Token("word " * 50 + "\n", "plain"), Token("x" * 300, "accepted")]
    markdown = to_markdown(Document("x", "", [MarkedTokens("t", tokens)]))
    body = markdown[markdown.index("<pre>") : markdown.index("</pre>")]
    assert max(len(line) for line in body.splitlines()) < 140
    assert body.count("↵") == 1
    assert body.replace("\n", "").count("x" * 300) == 1


def test_rows_that_stand_out_are_bold_and_have_a_mark() -> None:
    assert "| ▸ **draft-model k=5** | **153.4** |" in to_markdown(everything())
