"""One file, well formed, that loads nothing and says everything, whatever the texts are."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.report.document import Document, MarkedTokens, Token
from outrider.report.html import to_html
from outrider.report.text import clean, one_line
from tests.unit.report import browser
from tests.unit.report.browser import Page
from tests.unit.report.samples import HOSTILE, every_block, everything

needs_browser = pytest.mark.skipif(browser.FOUND is None, reason="no chromium here")
REACHES_OUT = re.compile(r"https?:|^//|^data:", re.IGNORECASE)


def harmless(html: str) -> Page:
    """Well formed; nothing that loads, runs or links outside."""
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    assert not {tag for tag, _ in page.tags} & {
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "foreignobject",
    }
    for name in ("src", "href", "xlink:href", "action", "srcset", "background"):
        assert not [value for value in page.attributes(name) if REACHES_OUT.search(value)]
    assert not [
        name for _, attrs in page.tags for name in attrs if name.startswith("on") or name == "style"
    ]
    assert not re.search(r"@import|url\((?!#)", html)
    return page


def test_the_page_says_everything() -> None:
    page = harmless(to_html(everything()))
    text = page.text()
    for words in (
        "Benchmark of demo on gsm8k",
        "1.74 [1.68, 1.83]",
        "accepted / tested",
        "outrider generate demo",
        "verify 4 %",
    ):
        assert words in text
    assert [tag for tag, _ in page.tags].count("svg") == 7
    assert "p 0.412 (rank 2)\nq 0.731\nentropy 1.93 bits" in page.attributes("title")


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_everywhere(words: str) -> None:
    """Each text is shown as it is, in all blocks, and does nothing."""
    html = to_html(every_block(words))
    page = harmless(html)
    html.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ufffe]", html)
    if one_line(words):
        assert page.text().count(one_line(words)) >= 8
        assert page.attributes("title")[0] == clean(words)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(codec=None), max_size=40))
def test_any_words(words: str) -> None:
    page = harmless(to_html(every_block(words)))
    assert one_line(words) in " ".join(page.text().split())


def test_the_policy_allows_this_style_and_this_script_only() -> None:
    html = to_html(everything())
    policy = next(
        attrs["content"]
        for _, attrs in Page(html).tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_thousands_of_tokens_stay_small() -> None:
    hover = "p 0.412 (rank 2)\nq 0.731\nentropy 1.93 bits\nposition 3 of 5\nregion: digits"
    tokens = [
        Token(f" word{i}", "accepted" if i % 3 else "correction", "" if i % 3 else " other", hover)
        for i in range(4000)
    ]
    assert len(to_html(Document("long", "", [MarkedTokens("text", tokens)])).encode()) < 2_000_000


def test_silent_tokens_of_one_fate_are_one_element() -> None:
    """A prompt of ten thousand tokens is not ten thousand elements; accepted tokens stay apart."""
    tokens = (
        [Token("a", "prompt")] * 500
        + [Token("b", "accepted")] * 3
        + [Token("c", "correction", "d")]
    )
    html = to_html(Document("x", "", [MarkedTokens("text", tokens)]))
    body = html[html.index('class="tokens"') :]
    assert body.count('<span class="prompt">') == 1
    assert body.count('<span class="accepted">') == 3
    assert '<del>d</del><span class="correction">c</span>' in body
    assert "prompt: 500" in Page(html).text()


def test_line_breaks_of_the_text_are_seen() -> None:
    html = to_html(
        Document(
            "x", "", [MarkedTokens("t", [Token("a\n", "accepted"), Token("b", "correction", "\n")])]
        )
    )
    assert '<span class="accepted">a↵\n</span><del>↵</del>' in html


@pytest.mark.slow
def test_equal_documents_give_equal_bytes() -> None:
    assert to_html(everything()) == to_html(everything())


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1000])
def test_no_page_scrolls_sideways(width: int, tmp_path: Path) -> None:
    """On a phone only tables and code scroll, inside themselves."""
    hostile = ("long_" * 40, "--" + "x" * 90 + " 1" + "1" * 90 + "e-16", "many words " * 20)
    for document in (everything(), *map(every_block, hostile)):
        output = browser.run_in_frame(
            to_html(document), width, "page.documentElement.scrollWidth", tmp_path
        )
        assert int(output) == width


@needs_browser
@pytest.mark.slow
def test_a_tapped_token_shows_its_numbers(tmp_path: Path) -> None:
    """The script runs under the policy, takes the tooltips over, and shows the card."""
    expression = """(() => {
        const text = page.querySelector('.tokens'), tokens = text.querySelectorAll('[data-hover]');
        const tap = (token) => token.dispatchEvent(new PointerEvent('click', {bubbles: true, pointerType: 'touch'}));
        const key = (name) => text.dispatchEvent(new KeyboardEvent('keydown', {key: name, bubbles: true}));
        const card = page.querySelector('.card');
        const seen = [tokens.length, page.querySelectorAll('[title]').length, card.hidden];
        tap(tokens[3]); seen.push(card.textContent.split('\\n')[0], card.hidden);
        key('ArrowRight'); seen.push(tokens[4].classList.contains('pointed'));
        key('Escape'); seen.push(card.hidden);
        return seen.join(' | ');
    })()"""
    output = browser.run_in_frame(to_html(everything(2)), 390, expression, tmp_path)
    assert output == "16 | 0 | true | p 0.412 (rank 2) | false | true | true"
