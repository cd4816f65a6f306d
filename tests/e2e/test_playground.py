"""The playground in a real browser, against a server that answers from a script
(tests/scripted_server.py)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from playwright.sync_api import sync_playwright

from tests.live_server import KEY as REAL_KEY
from tests.live_server import live_server
from tests.scripted_server import FILE, HOSTILE, KEY, STORY_TEXT, Scripted, scripted_server

CHROMIUM = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no Chromium (set OUTRIDER_CHROMIUM)"),
]


@pytest.fixture(scope="module")
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
def open_page(browser: Any, server: Scripted) -> Iterator[Any]:
    """Opens the page; afterwards it must have asked nobody else and tripped over nothing."""
    contexts = []
    faults = []

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
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(server.url) else faults.append(request.url)
            ),
        )
        page.goto(server.url)
        page.wait_for_selector("#about:not(:text('Asking the server'))")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not [fault for fault in faults if not fault.startswith("data:")]


@pytest.fixture
def page(open_page: Any) -> Any:
    return open_page(viewport={"width": 1280, "height": 850})


def ask(page: Any, message: str) -> Any:
    """Type, press Enter, wait for the end; the turn."""
    page.fill("#message", message)
    page.press("#message", "Enter")
    page.wait_for_selector("#send:not([disabled])")
    return page.locator(".turn").last


def numbers(answer: Any) -> dict[str, str]:
    return dict(
        zip(
            answer.locator("dt").all_inner_texts(),
            answer.locator("dd").all_inner_texts(),
            strict=True,
        )
    )


def slide(page: Any, field: str, key: str, times: int) -> None:
    page.focus(field)
    for _ in range(times):
        page.keyboard.press(key)


def test_answer_streams_in_coloured_by_fate_and_counted(page: Any) -> None:
    """Text lost between chunks, a fate in the wrong colour, or τ and α by another definition."""
    turn = ask(page, "tell me")
    assert turn.locator(".tokens").text_content() == STORY_TEXT
    spans = turn.locator(".tokens span")
    assert spans.count() == 13  # the end token has no text
    assert [spans.nth(index).get_attribute("class") for index in (0, 2, 4, 5, 10)] == [
        "accepted",
        "bonus",
        "correction",
        "accepted",
        "plain",
    ]
    shown = numbers(turn)
    assert shown["tokens"] == "14"
    # 14 / 5; 9 / (9 + 2)
    assert (shown["τ"], shown["α"], shown["kept"]) == ("2.80", "0.82", "9 of 11 tested, 15 drafted")
    assert float(shown["tokens/s"]) > 0
    assert page.locator("#status").text_content() == "Answer ended: 14 tokens. "


def test_live_numbers_do_not_wait_for_the_end(page: Any) -> None:
    """A page that only counts when all is over."""
    page.fill("#message", "slow")
    page.press("#message", "Enter")
    page.wait_for_selector(".tokens span:nth-child(4)")
    shown = numbers(page.locator(".turn"))
    assert int(shown["tokens"]) >= 4
    assert shown["τ"] == "1.00"
    assert shown["first token"] != "–"
    assert page.locator("#turns").get_attribute("aria-busy") == "true"
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:not([disabled])")


def test_both_sides_get_the_same_seed_and_are_compared(page: Any, server: Scripted) -> None:
    """Two random answers put side by side prove nothing."""
    page.check("#compare")
    turn = ask(page, "tell me")
    assert turn.locator(".tokens").all_text_contents() == [STORY_TEXT, STORY_TEXT]
    assert [body["speculation"]["mode"] for body in server.bodies] == ["auto", "off"]
    assert server.bodies[0]["seed"] == server.bodies[1]["seed"]
    same = f"Same text, character for character ({len(STORY_TEXT)} characters, seed "
    assert turn.locator(".good").inner_text().startswith(same)
    assert "times as many tokens per second with speculation" in turn.locator(".good").inner_text()

    page.check("#at-once")
    assert "speeds do not tell" in ask(page, "tell me").locator(".good").inner_text()


def test_texts_that_differ_are_reported_with_where_they_differ(page: Any) -> None:
    """A verdict that cannot be "different" is none."""
    page.check("#compare")
    turn = ask(page, "differ")
    position = STORY_TEXT.index(".", STORY_TEXT.index("19"))
    assert f"differ from character {position + 1} on" in turn.locator(".bad").inner_text()
    assert turn.locator(".differs").all_text_contents() == [".", " Thus"]


def test_text_of_a_model_is_never_html(page: Any) -> None:
    """An answer, or a message, that runs as a script in the reader's browser."""
    turn = ask(page, "html")
    harmless = HOSTILE.replace("\u202e", "\ufffd").replace("\x1b", "\ufffd") + "end"
    assert turn.locator(".tokens").text_content() == harmless
    assert page.locator("#turns img, #turns script").count() == 0
    ask(page, "<img src=x onerror=\"document.title='owned'\">")
    assert page.title() == "Outrider playground"


def test_refusals_are_shown_in_the_servers_words(page: Any) -> None:
    """ "Failed to fetch", or nothing at all."""
    assert (
        ask(page, "refuse").locator("[role=alert]").inner_text()
        == "temperature must be at most 2, got <9>"
    )
    assert page.input_value("#message") == "refuse"  # to be mended and sent again
    busy = ask(page, "busy").locator("[role=alert]").inner_text()
    assert busy == "The server is busy. Try again in 3 s. 256 requests wait already"
    broken = ask(page, "break")
    assert broken.locator("[role=alert]").inner_text() == "the model ran out of memory"
    assert broken.locator(".tokens").text_content() == " Sam has 37 lemons,"


def test_a_refused_side_is_not_asked_twice(page: Any, server: Scripted) -> None:
    """The second side of a refused comparison is refused as well."""
    page.check("#compare")
    turn = ask(page, "refuse")
    assert len(server.bodies) == 1
    assert turn.locator(".caution").inner_text().startswith("Nothing to compare")


def test_a_server_that_is_gone_is_named(page: Any) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    assert (
        ask(page, "hello").locator("[role=alert]").inner_text()
        == "The server does not answer. Is it still running?"
    )


def test_key_is_asked_for_sent_and_kept_in_this_tab_only(open_page: Any, server: Scripted) -> None:
    """A key that lands in a cookie, an address or another tab."""
    server.wants_key = True
    page = open_page(viewport={"width": 1280, "height": 850})
    assert "wants an API key" in page.locator("#about").inner_text()
    assert "wants an API key" in ask(page, "hello").locator("[role=alert]").inner_text()
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    page.wait_for_selector("#about:has-text('tale-teller')")
    assert ask(page, "hello").locator(".tokens").text_content() == STORY_TEXT
    page.reload()
    page.wait_for_selector("#about:has-text('tale-teller')")
    assert KEY not in page.url
    assert page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"


def test_page_waits_for_models_that_are_still_loading(open_page: Any, server: Scripted) -> None:
    """A page opened too early that shows an error and no model until somebody reloads it."""
    server.loading = 2
    page = open_page(viewport={"width": 1280, "height": 850})
    assert (
        page.inner_text("#about") == "The server is loading its models. This page waits for them."
    )
    page.wait_for_selector("#about:has-text('tale-teller')")
    assert ask(page, "hello").locator(".tokens").text_content() == STORY_TEXT


def test_a_file_is_called_by_its_name_and_asked_for_by_its_path(
    page: Any, server: Scripted
) -> None:
    page.select_option("#model", label="second.gguf")
    assert page.inner_text("#about").startswith("second.gguf")
    ask(page, "hello")
    assert server.bodies[-1]["model"] == FILE


def test_stop_cuts_the_stream_and_keeps_what_there_is(page: Any, server: Scripted) -> None:
    """A stop that only hides the answer leaves the server working."""
    page.fill("#message", "slow")
    page.press("#message", "Enter")
    page.wait_for_selector(".tokens span")
    page.focus("#stop")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:not([disabled])")
    assert "stopped by you" in page.locator(".turn").inner_text()
    assert page.locator(".tokens span").count() >= 1
    assert page.evaluate("document.activeElement.id") == "message"
    for _ in range(100):
        if server.cut_off:
            break
        page.wait_for_timeout(50)
    assert server.cut_off == 1


def test_settings_arrive_in_the_request(page: Any, server: Scripted) -> None:
    """A slider that moves and changes nothing."""
    ask(page, "tell me")
    assert server.bodies[-1]["speculation"] == {"mode": "auto"}
    assert "seed" not in server.bodies[-1]
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}
    assert server.bodies[-1]["return_token_origins"] is True

    page.select_option("#drafter", "ngram")
    slide(page, "#length", "ArrowRight", 5)
    slide(page, "#temperature", "ArrowLeft", 7)
    page.fill("#seed", "7")
    page.fill("#max-tokens", "9")
    assert page.inner_text("#length-shown") == "4"
    assert page.inner_text("#temperature-shown") == "0, greedy"
    ask(page, "again")
    body = server.bodies[-1]
    assert body["speculation"] == {"mode": "fixed", "max_draft_tokens": 4, "drafter": "ngram"}
    assert (body["temperature"], body["seed"], body["max_tokens"], body["model"]) == (
        0,
        7,
        9,
        "tale-teller",
    )

    slide(page, "#length", "ArrowLeft", 4)
    assert page.inner_text("#length-shown") == "0, off"
    ask(page, "again")
    assert server.bodies[-1]["speculation"] == {"mode": "off"}


def test_plain_text_goes_to_completions(page: Any, server: Scripted) -> None:
    """A base model has no chat template, and its answers carry the fates elsewhere."""
    page.select_option("#format", "text")
    turn = ask(page, "Once upon a time")
    assert server.bodies[-1]["prompt"] == "Once upon a time"
    assert "messages" not in server.bodies[-1]
    assert turn.locator(".tokens .bonus").count() == 2


def test_conversation_goes_on_and_reset_forgets_it(page: Any, server: Scripted) -> None:
    """A chat that forgets, or one that cannot."""
    ask(page, "one")
    ask(page, "two")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == [
        "one",
        STORY_TEXT,
        "two",
    ]
    page.click("#reset")
    assert page.locator(".turn").count() == 0
    ask(page, "three")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["three"]


def test_reset_while_an_answer_runs(page: Any, server: Scripted) -> None:
    """What is cut off by a reset must not come back into the conversation."""
    page.fill("#message", "slow")
    page.press("#message", "Enter")
    page.wait_for_selector(".tokens span")
    page.click("#reset")
    page.wait_for_selector("#send:not([disabled])")
    ask(page, "afresh")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["afresh"]


def test_a_setting_that_cannot_be_used_is_refused_here(page: Any, server: Scripted) -> None:
    page.fill("#max-tokens", "0")
    assert "it is marked" in ask(page, "hello").locator("[role=alert]").inner_text()
    assert not server.bodies
    assert page.input_value("#message") == "hello"


def test_a_server_that_says_no_fates(page: Any) -> None:
    """Against a server without token origins the text is still shown, and nothing is made up."""
    turn = ask(page, "unknown")
    assert turn.locator(".tokens").text_content() == STORY_TEXT
    assert turn.locator(".accepted").count() == 0
    assert numbers(turn)["tokens"] == "14"


def test_everything_by_keyboard(page: Any) -> None:
    """A control that only a mouse can reach, or a token whose fate only a mouse can ask for."""
    ask(page, "tell me")
    page.keyboard.press("Shift+Tab")
    assert "tokens" in page.evaluate("document.activeElement.className")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert (
        page.inner_text(".card")
        == '" 37"\nthe target\'s bonus token after a draft kept whole\npass 1, token 3 of it'
    )
    page.keyboard.press("Escape")
    assert page.locator(".card").is_hidden()
    reached = []
    for _ in range(18):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:5] == ["message", "send", "reset", "example", "compare"]
    assert {
        "model",
        "format",
        "drafter",
        "length",
        "temperature",
        "seed",
        "max-tokens",
        "at-once",
        "key",
    } <= set(reached)


def test_phone_shows_all_of_it_without_scrolling_sideways(open_page: Any) -> None:
    """A line that does not break, a button outside, a card off the screen."""
    page = open_page(**PHONE)
    page.check("#compare")
    turn = ask(page, "x" * 200)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    tokens = turn.locator(".tokens")
    assert tokens.nth(0).bounding_box()["y"] < tokens.nth(1).bounding_box()["y"]
    turn.locator(".tokens span").nth(3).tap()
    card = page.locator(".card").bounding_box()
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= 360
    assert "drafted and accepted" in page.inner_text(".card")
    page.tap("summary:has-text('Settings')")
    for control in ("send", "reset", "compare", "model", "length", "key"):
        box = page.locator(f"#{control}").bounding_box()
        assert box["x"] >= 0, control
        assert box["x"] + box["width"] <= 360, control
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def brightness(page: Any, what: str, of: str) -> float:
    colour = page.evaluate(f"getComputedStyle(document.querySelector('{of}')).{what}")
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])

    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4

    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(open_page: Any, scheme: str) -> None:
    """Contrast of at least 4.5 (WCAG 2, AA) for every fate and for small print, by day and by
    night."""
    page = open_page(color_scheme=scheme)
    ask(page, "tell me")
    assert (brightness(page, "backgroundColor", "body") < 0.1) == (scheme == "dark")
    pairs = [
        (".tokens .accepted", ".tokens .accepted"),
        (".tokens .correction", ".tokens .correction"),
    ]
    pairs += [
        (".tokens .bonus", ".tokens .bonus"),
        (".tokens .plain", ".tokens"),
        (".help", "body"),
        ("#send", "#send"),
    ]
    for text, back in pairs:
        light, dark = sorted(
            (brightness(page, "color", text), brightness(page, "backgroundColor", back)),
            reverse=True,
        )
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text


def test_reduced_motion_is_respected(open_page: Any) -> None:
    page = open_page(reduced_motion="reduce")
    page.fill("#message", "slow")
    page.press("#message", "Enter")
    page.wait_for_selector(".running span")
    assert (
        page.evaluate(
            "getComputedStyle(document.querySelector('.running'), '::after').animationName"
        )
        == "none"
    )
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:not([disabled])")


# ---- a real server


def test_side_by_side_on_a_real_model(browser: Any, tmp_path: Path) -> None:
    """The demo pair, sampled with one seed: the same text on both sides, more than one token per
    pass on one of them."""
    with live_server("demo", "--drafter", "draft-model") as address:
        page = browser.new_context(viewport={"width": 1280, "height": 850}).new_page()
        page.goto(address)
        page.fill("#key", REAL_KEY)
        page.press("#key", "Tab")
        page.wait_for_selector("#about:has-text('draft-model')")
        slide(page, "#length", "ArrowRight", 5)
        page.check("#compare")
        page.click("#example")
        page.press("#message", "Enter")
        page.wait_for_selector("#send:not([disabled])", timeout=60_000)
        page.screenshot(path=str(tmp_path / "side-by-side.png"))
        with_drafts, without = page.locator(".answer").all()
        assert page.locator(".good").inner_text().startswith("Same text, character for character")
        assert "####" in with_drafts.locator(".tokens").inner_text()
        assert float(numbers(with_drafts)["τ"]) > 1
        assert numbers(without)["τ"] == "1.00"
        assert numbers(without)["tokens"] == numbers(with_drafts)["tokens"]
        assert (
            with_drafts.locator(".accepted").count()
            > with_drafts.locator(".tokens span").count() / 2
        )
        page.context.close()
