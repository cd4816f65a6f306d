"""The playground for everybody: by keyboard, by ear, on a phone, by day and by night, offline."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("playwright")

from tests.playground import NEEDS_A_BROWSER, PHONE, WIDE, ask, begin, ended, watch
from tests.scripted_server import STORY_TEXT, Scripted

pytestmark = NEEDS_A_BROWSER

FOCUSED = "(({ id, ariaLabel, className }) => id || ariaLabel || className)(document.activeElement)"
NAMED = {
    "article",
    "button",
    "checkbox",
    "combobox",
    "complementary",
    "link",
    "log",
    "navigation",
    "radio",
    "region",
    "slider",
    "spinbutton",
    "textbox",
}


def tab(page: Any, times: int, key: str = "Tab") -> list[str]:
    """What had the focus after each press."""
    reached = []
    for _ in range(times):
        page.keyboard.press(key)
        reached.append(str(page.evaluate(FOCUSED)))
    return reached


def test_a_whole_conversation_by_keyboard(page: Any, server: Scripted) -> None:
    """A control that only a mouse can reach, or a token whose fate only a mouse can ask for."""
    assert page.evaluate(FOCUSED) == "message"
    page.keyboard.type("tell me")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .actions")
    ended(page)
    assert server.bodies[-1]["messages"][0]["content"] == "tell me\nmore"
    assert page.evaluate(FOCUSED) == "message"
    before = tab(page, 10, "Shift+Tab")
    assert before[:6] == ["Continue", "Regenerate", "Edit", "Copy", "Edit", "Copy"]
    assert before[6:] == ["import", "export", "Delete tell me more", "Export tell me more"]
    rest = tab(page, 4, "Shift+Tab")
    assert rest[0] == "Rename tell me more"
    assert rest[2:] == ["new", "settings-toggle"]
    tab(page, 1, "Shift+Tab")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("body", "data-mode") == "watching"
    page.focus("#message")
    tab(page, 5, "Shift+Tab")
    assert "tokens" in page.evaluate("document.activeElement.className")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    words = '" 37"\nthe model\'s bonus token after a draft kept whole\npass 1, token 3 of it'
    assert page.inner_text(".card") == words
    page.keyboard.press("Escape")
    assert page.locator(".card").is_hidden()
    page.focus("#message")
    assert tab(page, 3) == ["attach", "compare", "send"]


def test_every_setting_is_reached_by_keyboard(page: Any) -> None:
    page.focus("#settings-toggle")
    page.keyboard.press("Enter")
    assert page.get_attribute("#settings-toggle", "aria-expanded") == "true"
    reached = set(tab(page, 22))
    fields = page.eval_on_selector_all(
        "#system, #fields :is(input, select, textarea, button)",
        "fields => fields.map(field => field.id)",
    )
    assert len(fields) >= 17
    assert set(fields) <= reached | {page.evaluate(FOCUSED)}


def nameless(page: Any) -> list[str]:
    """The kinds of parts that a screen reader can call by nothing but their kind."""
    session = page.context.new_cdp_session(page)
    nodes = [
        node for node in session.send("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]
    ]
    kinds = {str(node["role"]["value"]) for node in nodes}
    assert {"button", "combobox", "log", "navigation", "radio", "textbox"} <= kinds
    return [
        str(node["role"]["value"])
        for node in nodes
        if node["role"]["value"] in NAMED and not node.get("name", {}).get("value", "").strip()
    ]


def test_every_control_has_a_name(page: Any) -> None:
    """A button that is read as "button"."""
    assert not nameless(page)
    page.click("#settings-toggle")
    assert not nameless(page)
    page.click("#settings .close")
    ask(page, "markdown")
    page.hover("#list li")
    assert not nameless(page)
    page.click(".answer [data-action=edit]")
    assert not nameless(page)
    page.click(".editor button >> nth=1")
    watch(page)
    assert not nameless(page)


def test_answers_are_told_when_they_end(page: Any) -> None:
    """A screen reader that says nothing, or every token."""
    page.fill("#message", "tell me")
    page.press("#message", "Enter")
    ended(page)
    status = page.locator("#status[role=status]")
    assert STORY_TEXT.strip() in status.text_content()
    assert page.get_attribute("#turns", "aria-live") == "off"
    begin(page, "refuse")
    page.wait_for_selector("#notice[role=alert]")


def test_phone_shows_all_of_it_without_scrolling_sideways(open_page: Any) -> None:
    """A line that does not break, a button outside, a card off the screen, a composer that is
    scrolled away."""
    page = open_page(**PHONE)
    width = PHONE["viewport"]["width"]
    page.check("#compare")
    watch(page)
    ask(page, "x" * 200)
    ask(page, "markdown")
    answer = page.locator(".answer").nth(0)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.documentElement.scrollHeight") == PHONE["viewport"]["height"]
    sides = answer.locator(".tokens")
    assert sides.nth(0).bounding_box()["y"] < sides.nth(1).bounding_box()["y"]
    box = page.locator("#composer").bounding_box()
    assert box["y"] + box["height"] <= PHONE["viewport"]["height"]
    page.locator("#scroller").evaluate("box => { box.scrollTop = 0; }")
    assert page.locator("#composer").bounding_box() == box
    answer.locator(".tokens span").nth(3).tap()
    card = page.locator(".card").bounding_box()
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= width
    assert "drafted and accepted" in page.inner_text(".card")


@pytest.mark.parametrize(
    "size",
    [(390, 740), (320, 480), (740, 360), (1280, 400)],
    ids=lambda size: f"{size[0]}x{size[1]}",
)
def test_settings_are_whole_on_the_screen(open_page: Any, size: tuple[int, int]) -> None:
    """A panel whose last fields no scrolling reaches."""
    width, height = size
    page = open_page(viewport={"width": width, "height": height})
    page.click("#settings-toggle")
    box = page.locator("#settings").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= height
    for control in ("system", "length", "top-p", "schema", "key", "defaults"):
        page.locator(f"#{control}").scroll_into_view_if_needed()
        field = page.locator(f"#{control}").bounding_box()
        assert field["x"] >= box["x"], control
        assert field["x"] + field["width"] <= box["x"] + box["width"], control
        assert field["y"] + field["height"] <= height + 1, control
    page.keyboard.press("Escape")
    assert page.locator("#settings").is_hidden() == (width < 1024)


def test_panels_of_a_phone_close_again(open_page: Any) -> None:
    page = open_page(**PHONE)
    ask(page, "one")
    page.tap("#conversations-toggle")
    assert page.locator("#conversations").is_visible()
    assert page.locator("main").get_attribute("inert") is not None
    page.tap("#new")
    assert page.locator("#conversations").is_hidden()
    page.tap("#conversations-toggle")
    page.tap("#list .name")
    assert page.locator(".message").count() == 2
    page.tap("#conversations-toggle")
    page.touchscreen.tap(380, 400)
    assert page.locator("#conversations").is_hidden()
    assert page.locator("main").get_attribute("inert") is None


def brightness(page: Any, what: str, of: str) -> float:
    colour = page.evaluate(f"getComputedStyle(document.querySelector('{of}')).{what}")
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])

    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4

    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(open_page: Any, scheme: str) -> None:
    """Contrast of at least 4.5 (WCAG 2, AA) for every fate, in code and for small print, by day and
    by night."""
    page = open_page(**WIDE, color_scheme=scheme)
    page.click("#settings-toggle")
    ask(page, "markdown")
    page.check("#compare")
    ask(page, "tortoise")
    assert (brightness(page, "backgroundColor", "body") < 0.1) == (scheme == "dark")
    code = [".hljs-keyword", ".hljs-title", ".hljs-number", ".hljs-comment", ".code-head"]
    pairs = [(part, ".code") for part in code]
    pairs += [
        (".help", ".panel"),
        ("#about", "body"),
        ("#send", "#send"),
        (".bubble", ".bubble"),
        (".verdict", ".verdict"),
        (".numbers", "body"),
    ]
    check(page, pairs)
    watch(page)
    fates = [".tokens .accepted", ".tokens .correction", ".tokens .bonus"]
    check(page, [*((fate, fate) for fate in fates), (".tokens .plain", "body")])


def check(page: Any, pairs: list[tuple[str, str]]) -> None:
    for text, back in pairs:
        light, dark = sorted(
            (brightness(page, "color", text), brightness(page, "backgroundColor", back)),
            reverse=True,
        )
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text


def test_reduced_motion_is_respected(open_page: Any) -> None:
    page = open_page(reduced_motion="reduce")
    watch(page)
    begin(page, "slow")
    page.wait_for_selector(".running .tokens span")
    name = "getComputedStyle(document.querySelector('.running .tokens'), '::after').animationName"
    assert page.evaluate(name) == "none"
    page.keyboard.press("Escape")
    ended(page)


def test_a_loaded_page_needs_no_network_of_its_own(page: Any) -> None:
    """A part that is fetched when it is first used. (That nothing is ever asked of another host,
    the fixture of every page checks.)"""
    page.route(lambda address: "/v1/" not in address, lambda route: route.abort())
    assert ask(page, "markdown").locator(".hljs-keyword").count() == 2
    watch(page)
    page.click("#settings-toggle")
    page.click("#new")
    ask(page, "tell me")
