"""What the playground shows of answers, and what it asks the server for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import expect

from tests.live_server import KEY as REAL_KEY
from tests.live_server import live_server
from tests.playground import (
    NEEDS_A_BROWSER,
    WIDE,
    ask,
    begin,
    ended,
    names,
    numbers,
    reload,
    texts,
    watch,
)
from tests.scripted_server import FILE, HOSTILE, KEY, STORY_TEXT, Scripted

pytestmark = NEEDS_A_BROWSER


def test_answer_is_read_as_formatted_text(page: Any) -> None:
    """Stars and bars instead of bold words and a table; code in one colour."""
    prose = ask(page, "markdown").locator(".prose")
    assert prose.locator("strong").inner_text() == "this"
    assert prose.locator("td").all_inner_texts() == ["one", "1"]
    assert prose.locator("ol > li").count() == 2
    assert prose.locator(".code-head span").inner_text() == "python"
    assert prose.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    link = prose.locator("a")
    assert link.get_attribute("href") == "https://example.com/"
    assert "noopener" in link.get_attribute("rel")


def test_thoughts_are_folded_away(page: Any) -> None:
    """Pages of thinking before the first word of the answer."""
    answer = ask(page, "think")
    assert answer.locator(".prose > p").inner_text() == "Yes."
    assert answer.locator(".thoughts em").is_hidden()
    answer.locator("summary").click()
    assert answer.locator(".thoughts em").inner_text() == "Hm"


def test_answer_is_watched_in_the_colours_of_fates(page: Any) -> None:
    """Text lost between chunks, a fate in the wrong colour, or τ and α by another definition."""
    answer = ask(page, "tell me")
    assert page.locator(".legend").is_hidden()
    assert page.locator(".detail:visible").count() == 0
    watch(page)
    assert page.locator(".legend").is_visible()
    assert answer.locator(".tokens").text_content() == STORY_TEXT
    spans = answer.locator(".tokens span")
    assert spans.count() == 13  # the end token has no text
    fates = [spans.nth(index).get_attribute("class") for index in (0, 2, 4, 5, 10)]
    assert fates == ["accepted", "bonus", "correction", "accepted", "plain"]
    shown = numbers(answer)
    assert shown["tokens"] == "14"
    # 14 / 5; 9 / (9 + 2)
    assert (shown["τ"], shown["α"], shown["kept"]) == ("2.80", "0.82", "9 of 11 tested, 15 drafted")
    assert shown["tokens/s"] == "420"  # the server's clock


@pytest.mark.parametrize("mode", ["reading", "watching"])
def test_answer_grows_while_it_comes(page: Any, mode: str) -> None:
    """A page that shows, or counts, only when all is over."""
    page.check(f"input[value={mode}]")
    begin(page, "slow")
    page.wait_for_selector(".answer:has-text('tick tick tick')")
    shown = numbers(page.locator(".answer"))
    assert int(shown["tokens"]) >= 3
    assert shown["τ"] == "1.00"
    assert shown["first token"] != "–"
    assert page.locator("#turns").get_attribute("aria-busy") == "true"
    page.keyboard.press("Escape")
    ended(page)


AWAY = "box => box.scrollHeight - box.scrollTop - box.clientHeight"


def test_the_end_is_followed_until_the_reader_scrolls_up(page: Any) -> None:
    """An answer that grows below the screen; a page that jumps away from what is being read."""
    for _ in range(3):
        ask(page, "markdown")
    scroller = page.locator("#scroller")
    assert scroller.evaluate(AWAY) < 5
    begin(page, "slow")
    page.wait_for_selector(".answer:has-text('tick tick')")
    page.mouse.move(700, 400)
    page.mouse.wheel(0, -500)
    page.wait_for_selector("#to-end")
    before = scroller.evaluate("box => box.scrollTop")
    page.wait_for_timeout(500)
    assert scroller.evaluate("box => box.scrollTop") == before
    watch(page)
    page.click("#to-end")
    page.wait_for_timeout(500)
    assert scroller.evaluate(AWAY) < 5
    page.keyboard.press("Escape")
    ended(page)


def test_comparison_says_how_much_faster_over_three_runs(page: Any, server: Scripted) -> None:
    """Two random answers put side by side prove nothing; one run proves little."""
    page.check("#compare")
    watch(page)
    answer = ask(page, "tell me")
    assert answer.locator(".tokens").all_text_contents() == [STORY_TEXT, STORY_TEXT]
    modes = [body["speculation"]["mode"] for body in server.bodies]
    assert modes == ["auto", "off", "off", "auto", "auto", "off"]
    assert len({body["seed"] for body in server.bodies}) == 1
    verdict = answer.locator(".verdict")
    assert "good" in verdict.get_attribute("class")
    assert verdict.inner_text().startswith(
        "2.1x faster with drafts. 2.0x to 2.2x over three runs. Same text each time, "
        f"character for character ({len(STORY_TEXT)} characters, seed "
    )


def test_comparison_says_slower_where_it_is(page: Any) -> None:
    """ "0.77 times as fast", in green."""
    page.check("#compare")
    verdict = ask(page, "tortoise").locator(".verdict")
    assert "bad" in verdict.get_attribute("class")
    words = "1.3x slower with drafts. 1.2x to 1.4x over three runs."
    assert verdict.inner_text().startswith(words)


def test_texts_that_differ_are_reported_with_where_they_differ(page: Any) -> None:
    """A verdict that cannot be "different" is none."""
    page.check("#compare")
    watch(page)
    answer = ask(page, "differ")
    position = STORY_TEXT.index(".", STORY_TEXT.index("19"))
    verdict = answer.locator(".bad.verdict").inner_text()
    assert verdict.startswith(f"The texts differ. From character {position + 1} on (seed ")
    assert answer.locator(".differs").all_text_contents() == [".", " Thus"]


def test_a_comparison_that_is_stopped_compares_nothing(page: Any) -> None:
    page.check("#compare")
    begin(page, "slow")
    page.wait_for_selector(".answer:has-text('tick')")
    page.keyboard.press("Escape")
    ended(page)
    assert page.locator(".caution.verdict").inner_text().startswith("Nothing to compare.")


def test_a_comparison_that_is_stopped_later_counts_the_whole_runs(page: Any) -> None:
    page.check("#compare")
    begin(page, "tell me")
    page.wait_for_selector(".end:has-text('Run 2 of 3')")
    page.keyboard.press("Escape")
    ended(page)
    verdict = page.locator(".verdict").inner_text()
    assert verdict.startswith(
        (
            "2.1x faster with drafts. Measured over one run.",
            "2.0x faster with drafts. 2.0x to 2.1x over two runs.",
        )
    )
    assert "Stopped by you" not in page.locator(".answer").inner_text()


def test_a_refused_side_is_not_asked_twice(page: Any, server: Scripted) -> None:
    page.check("#compare")
    begin(page, "refuse")
    page.wait_for_selector("#notice[role=alert]")
    assert len(server.bodies) == 1
    assert page.locator(".message").count() == 0


def harmless(page: Any) -> None:
    """Nothing of an answer became markup of its own."""
    page.wait_for_timeout(200)
    assert page.title() == "Outrider playground"
    where = "#turns, #list, #notice"
    tags = "img, script, svg:not(.icon), iframe, style, form:not(.editor), math, input"
    for box in where.split(", "):
        assert page.locator(box).locator(tags).count() == 0
    links = page.eval_on_selector_all("#turns a", "links => links.map(link => link.href)")
    assert all(link.startswith(("https://", "http://", "mailto:")) for link in links), links
    handlers = "elements => elements.some(e => e.getAttributeNames().some(n => n.startsWith('on')))"
    assert not page.eval_on_selector_all("#turns *", handlers)


@pytest.mark.parametrize(
    "message", ["attack", "html", "<img src=x onerror=\"document.title='o'\">"]
)
def test_text_of_a_model_is_never_markup(page: Any, message: str) -> None:
    """An answer, or a message, that runs as a script in the reader's browser."""
    ask(page, message)
    harmless(page)
    watch(page)
    harmless(page)
    page.check("input[value=reading]")
    page.reload()
    page.wait_for_selector(".answer")
    harmless(page)


def test_controls_in_an_answer_are_made_visible(page: Any) -> None:
    """Letters that turn the line around hide what a text says."""
    watch(page)
    shown = HOSTILE.replace("\u202e", "\ufffd").replace("\x1b", "\ufffd") + "end"
    assert ask(page, "html").locator(".tokens").text_content() == shown


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("refuse", "temperature must be at most 2, got <9>"),
        ("busy", "The server is busy. Try again in 3 s. 256 requests wait already"),
        ("long", "Too long for this model. Shorten the message, or start a new conversation."),
    ],
)
def test_a_refused_message_goes_back_into_the_composer(page: Any, message: str, words: str) -> None:
    """An orphan bubble that the next question would be sent after; a text to be typed again."""
    ask(page, "one")
    begin(page, message)
    page.wait_for_selector("#notice[role=alert]")
    assert page.inner_text("#notice-text").startswith(words)
    assert page.input_value("#message") == message
    assert page.locator(".message").count() == 2
    page.reload()
    page.wait_for_selector(".answer")
    assert page.locator(".message").count() == 2
    assert page.input_value("#message") == message


def test_an_answer_that_breaks_off_is_kept_with_the_reason(page: Any) -> None:
    answer = ask(page, "break")
    assert answer.locator(".bad").inner_text() == "the model ran out of memory"
    assert answer.locator(".prose").inner_text() == "Sam has 37 lemons,"


def test_a_server_that_is_gone_is_named(page: Any) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    begin(page, "hello")
    page.wait_for_selector("#notice[role=alert]")
    assert page.inner_text("#notice-text") == "The server does not answer. Is it still running?"
    assert page.input_value("#message") == "hello"


def test_key_is_asked_for_sent_and_kept_in_this_tab_only(open_page: Any, server: Scripted) -> None:
    """A key that lands in a cookie, an address or another tab."""
    server.wants_key = True
    page = open_page(**WIDE)
    assert "wants an API key" in page.locator("#about").inner_text()
    begin(page, "hello")
    page.wait_for_selector("#notice[role=alert]")
    assert "wants an API key" in page.inner_text("#notice-text")
    page.click("#settings-toggle")
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    page.wait_for_selector("#about:has-text('drafters')")
    assert STORY_TEXT.strip().startswith(ask(page, "hello").locator("p").first.inner_text()[:9])
    page.reload()
    page.wait_for_selector("#about:has-text('drafters')")
    assert KEY not in page.url
    assert KEY not in page.evaluate("document.cookie + JSON.stringify(localStorage)")
    page.click("#settings-toggle")
    page.click("#defaults")
    expect(page.locator("#key")).to_have_value(KEY)


def test_page_waits_for_models_that_are_still_loading(open_page: Any, server: Scripted) -> None:
    """A page opened too early that shows an error and no model until somebody reloads it."""
    server.loading = 2
    page = open_page(**WIDE)
    words = "The server is loading its models. This page waits for them."
    assert page.inner_text("#about") == words
    page.wait_for_selector("#about:has-text('drafters')")
    assert ask(page, "hello").locator(".prose").inner_text().startswith("Sam")


def test_a_file_is_called_by_its_name_and_asked_for_by_its_path(
    page: Any, server: Scripted
) -> None:
    page.select_option("#model", label="second.gguf")
    assert page.inner_text("#invitation") == "Ask second.gguf"
    ask(page, "hello")
    assert server.bodies[-1]["model"] == FILE


def test_stop_cuts_the_stream_and_keeps_what_there_is(page: Any, server: Scripted) -> None:
    """A stop that only hides the answer leaves the server working."""
    begin(page, "slow")
    page.wait_for_selector(".answer:has-text('tick')")
    assert page.locator("#send").is_hidden()
    page.focus("#stop")
    page.keyboard.press("Enter")
    ended(page)
    assert "Stopped by you." in page.locator(".answer").inner_text()
    assert page.evaluate("document.activeElement.id") == "message"
    for _ in range(100):
        if server.cut_off:
            break
        page.wait_for_timeout(50)
    assert server.cut_off == 1


def test_settings_arrive_in_the_request(page: Any, server: Scripted) -> None:
    """A field that can be filled in and changes nothing."""
    ask(page, "tell me")
    body = server.bodies[-1]
    assert body["speculation"] == {"mode": "auto"}
    assert body["stream_options"] == {"include_usage": True}
    assert body["return_token_origins"] is True
    assert not {"seed", "top_p", "top_k", "min_p", "stop", "structured_outputs"} & set(body)

    page.click("#settings-toggle")
    lengths = page.locator("#length option").all_inner_texts()
    assert lengths[:4] == ["auto", "none", "1", "2"]
    page.fill("#system", "Be brief.")
    page.select_option("#drafter", "ngram")
    page.select_option("#length", "4")
    page.focus("#temperature")
    page.keyboard.press("Home")
    assert page.inner_text("#temperature-shown") == "0, greedy"
    fields = {
        "seed": "7",
        "max-tokens": "9",
        "top-p": "0.9",
        "top-k": "40",
        "min-p": "0.05",
        "repetition": "1.1",
        "presence": "0.5",
        "frequency": "-0.5",
        "stop-texts": "END\nSTOP\n",
        "schema": '{"type": "object"}',
    }
    for field, value in fields.items():
        page.fill(f"#{field}", value)
    answer = ask(page, "again")
    assert answer.locator(".code-head span").inner_text() == "json"  # shown as what it is
    body = server.bodies[-1]
    assert body["speculation"] == {"mode": "fixed", "max_draft_tokens": 4, "drafter": "ngram"}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {
        "temperature": 0,
        "seed": 7,
        "max_tokens": 9,
        "model": "tale-teller",
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ["END", "STOP"],
        "structured_outputs": {"json": {"type": "object"}},
    }
    assert {name: body[name] for name in wanted} == wanted

    page.select_option("#length", "0")
    ask(page, "again")
    assert server.bodies[-1]["speculation"] == {"mode": "off"}


@pytest.mark.parametrize(("field", "value"), [("max-tokens", "0"), ("schema", "{type}")])
def test_a_setting_that_cannot_be_used_is_refused_here(
    page: Any, server: Scripted, field: str, value: str
) -> None:
    page.click("#settings-toggle")
    page.fill(f"#{field}", value)
    page.click("#settings .close")
    begin(page, "hello")
    page.wait_for_selector("#notice[role=alert]")
    assert "it is marked" in page.inner_text("#notice-text")
    assert page.locator(f"#{field}").is_visible()
    assert not server.bodies
    assert page.input_value("#message") == "hello"


def test_plain_text_goes_to_completions(page: Any, server: Scripted) -> None:
    """A base model has no chat template, and its answers carry the fates elsewhere."""
    page.click("#settings-toggle")
    page.select_option("#format", "text")
    watch(page)
    answer = ask(page, "Once upon a time")
    assert server.bodies[-1]["prompt"] == "Once upon a time"
    assert "messages" not in server.bodies[-1]
    assert answer.locator(".tokens .bonus").count() == 2
    page.click(".answer [data-action=continue]")
    expect(page.locator(".tokens .bonus")).to_have_count(4)
    assert server.bodies[-1]["prompt"] == f"Once upon a time{STORY_TEXT}"


def test_a_server_that_says_no_fates(page: Any) -> None:
    """Against a server without token origins the text is still shown, and nothing is made up."""
    watch(page)
    answer = ask(page, "unknown")
    assert answer.locator(".tokens").text_content() == STORY_TEXT
    assert answer.locator(".accepted").count() == 0
    assert numbers(answer)["tokens"] == "14"


def test_regenerate_and_continue_and_edit(page: Any, server: Scripted) -> None:
    """Buttons that ask for something else than they say, or lose what was there."""
    ask(page, "one")
    ask(page, "two")
    assert texts(server.bodies[-1]) == ["one", STORY_TEXT, "two"]

    page.click(".answer:last-child [data-action=regenerate]")
    ended(page)
    page.wait_for_selector(".message:nth-child(4)")
    assert texts(server.bodies[-1]) == ["one", STORY_TEXT, "two"]
    assert len(server.bodies) == 3

    page.click(".answer:last-child [data-action=continue]")
    ended(page)
    assert texts(server.bodies[-1]) == ["one", STORY_TEXT, "two", STORY_TEXT]
    assert server.bodies[-1]["continue_final_message"] is True
    assert server.bodies[-1]["add_generation_prompt"] is False
    assert page.locator(".message").count() == 4

    page.hover(".question >> nth=0")
    page.click(".question >> nth=0 >> [data-action=edit]")
    assert page.inner_text(".editor .main") == "Send, and put the 3 messages after it aside"
    page.fill(".editor textarea", "three")
    page.press(".editor textarea", "Enter")
    expect(page.locator(".message")).to_have_count(2)
    ended(page)
    assert texts(server.bodies[-1]) == ["three"]

    page.click(".answer [data-action=edit]")
    page.fill(".editor textarea", "*mine*")
    page.click(".editor .main")
    assert page.inner_text(".answer em") == "mine"
    ask(page, "four")
    assert texts(server.bodies[-1]) == ["three", "*mine*", "four"]


def shown(page: Any) -> list[str]:
    """The messages on the screen by their first letters."""
    bodies = page.locator(".message :is(.bubble, .prose)").all_inner_texts()
    return [body.strip()[:5] for body in bodies]


def test_an_earlier_version_is_brought_back(page: Any, server: Scripted) -> None:
    """An answer that was better than the one it was given up for, and is gone; or one that goes when
    the earlier one comes."""
    back = page.locator("#bring-back")
    ask(page, "one")
    ask(page, "html")
    assert back.is_hidden()  # nothing was given up so far
    page.click(".answer:last-child [data-action=regenerate]")
    ended(page)
    page.click(".answer:last-child [data-action=continue]")
    ended(page)
    assert page.inner_text("#earlier-text") == "The version before is kept."
    page.hover(".question >> nth=0")
    page.click(".question >> nth=0 >> [data-action=edit]")
    page.fill(".editor textarea", "markdown")
    page.press(".editor textarea", "Enter")
    expect(page.locator(".message")).to_have_count(2)
    ended(page)
    page.click(".answer:last-child [data-action=edit]")
    page.fill(".editor textarea", "mine")
    page.click(".editor .main")
    assert shown(page) == ["markd", "mine"]
    assert page.inner_text("#earlier-text") == "3 earlier versions are kept."
    reload(page)
    again = []
    for _ in range(4):
        page.click("#bring-back")
        again.append(shown(page))
    before = ["one", "Sam h", "html", "<img "]
    assert again == [["markd", "Use t"], before, before, ["markd", "mine"]]
    page.click("#bring-back")
    page.focus("#bring-back")
    page.keyboard.press("Enter")
    assert shown(page) == before
    reload(page)
    assert shown(page) == before
    ask(page, "three")
    assert texts(server.bodies[-1])[::2] == ["one", "html", "three"]
    page.click("#new")
    assert back.is_hidden()


# what is kept of the open conversation at the moment in which the page goes
LEAVING = """() => {
    dispatchEvent(new Event("pagehide"));
    return JSON.parse(localStorage.getItem(`outrider.conversation.${sessionStorage.getItem("outrider.open")}`));
}"""


def test_versions_are_kept_while_an_answer_is_made_anew(page: Any, server: Scripted) -> None:
    """A reload, or a refusal, in the middle of a second answer that costs the first one."""
    ask(page, "one")
    page.route("**/v1/chat/**", lambda route: route.abort())
    page.click(".answer [data-action=regenerate]")
    page.wait_for_selector("#notice[role=alert]")
    assert page.locator("#earlier").is_hidden()  # it is still there
    page.unroute("**/v1/chat/**")
    page.click(".question [data-action=edit]")
    page.fill(".editor textarea", "slow")
    page.press(".editor textarea", "Enter")
    page.wait_for_selector(".answer:has-text('tick tick')")
    assert page.locator("#earlier").is_hidden()
    assert len(page.evaluate(LEAVING)["earlier"]) == 1
    reload(page)
    page.click("#bring-back")
    assert shown(page) == ["one", "Sam h"]


def test_only_so_many_versions_are_kept(page: Any) -> None:
    ask(page, "one")
    for _ in range(9):
        page.click(".answer [data-action=regenerate]")
        ended(page)
    assert page.inner_text("#earlier-text") == "8 earlier versions are kept."


def test_a_refused_regeneration_leaves_the_answer(page: Any, server: Scripted) -> None:
    ask(page, "one")
    page.route("**/v1/chat/**", lambda route: route.abort())
    page.click(".answer [data-action=regenerate]")
    page.wait_for_selector("#notice[role=alert]")
    assert page.locator(".message").count() == 2
    page.unroute("**/v1/chat/**")
    ask(page, "two")
    assert texts(server.bodies[-1]) == ["one", STORY_TEXT, "two"]


def test_copy_takes_the_text_and_the_code(open_page: Any) -> None:
    page = open_page(**WIDE, permissions=["clipboard-read", "clipboard-write"])
    ask(page, "markdown")
    page.click("[data-action=copy-code]")
    page.wait_for_selector("[data-action=copy-code].done")
    code = "def double(number):\n    return 2 * number  # twice"
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.click(".answer [data-action=copy]")
    page.wait_for_selector(".actions .done")
    assert page.evaluate("navigator.clipboard.readText()").startswith("Use **this**:")


def test_a_new_conversation_forgets_and_stops(page: Any, server: Scripted) -> None:
    """What is cut off must not come into another conversation."""
    begin(page, "slow")
    page.wait_for_selector(".answer:has-text('tick')")
    page.click("#new")
    ended(page)
    assert page.locator(".message").count() == 0
    page.wait_for_selector("#list .name")
    assert names(page) == ["slow"]
    ask(page, "afresh")
    assert texts(server.bodies[-1]) == ["afresh"]


def take(page: Any, number: int = 0) -> None:
    """Choose one of the four examples."""
    assert page.locator(".example").count() == 4
    page.click(f".example >> nth={number}")
    page.wait_for_selector(".answer .actions")
    ended(page)
    assert page.locator("#empty").is_hidden()


def test_examples_are_those_that_the_model_can_answer(page: Any, server: Scripted) -> None:
    take(page)
    assert "Python" in texts(server.bodies[-1])[0]
    assert server.bodies[-1]["temperature"] == 0.7
    page.click("#new")
    page.select_option("#model", FILE)
    assert page.inner_text(".example >> nth=0 >> strong") == "Write a function"

    page.select_option("#model", "called-so")  # the demo, whatever its name
    assert "word problems" in page.inner_text("#can")
    take(page)
    assert "lemons" in texts(server.bodies[-1])[0]

    page.click("#new")
    page.select_option("#model", "little")
    assert "temperature to 0" in page.inner_text("#can")
    take(page)
    assert "spelling" in texts(server.bodies[-1])[0]
    assert server.bodies[-1]["temperature"] == 0
    assert page.inner_text("#temperature-shown") == "0, greedy"


def test_a_model_without_a_chat_template_continues_texts(page: Any, server: Scripted) -> None:
    """A question to a model that knows no questions, which the server refuses."""
    page.select_option("#model", "base")
    assert page.inner_text("#invitation") == "Continue a text with base"
    assert page.get_attribute("#message", "placeholder") == "The beginning of a text"
    take(page)
    body = server.bodies[-1]
    assert body["prompt"].startswith("Once upon a time")
    assert "messages" not in body
    page.click("#settings-toggle")
    assert page.input_value("#format") == "text"
    assert page.is_disabled("#format")
    assert page.is_disabled("#system")
    reload(page)
    assert page.input_value("#model") == "base"
    page.select_option("#model", "tale-teller")  # whose form was never another one
    assert page.input_value("#format") == "chat"
    ask(page, "and now")
    assert texts(server.bodies[-1])[-1] == "and now"
    page.select_option("#model", "base")
    page.click("#settings-toggle")
    page.click("#defaults")  # the first model, too
    page.wait_for_selector("#about:has-text('drafters')")
    assert page.input_value("#format") == "chat"
    assert page.is_enabled("#format")


# ---- a real server


def test_side_by_side_on_a_real_model(browser: Any, tmp_path: Path) -> None:
    """The demo pair, sampled with one seed: the same text on both sides, more than one token per
    pass on one of them."""
    name = ("--served-model-name", "called-so")
    with live_server("demo", "--drafter", "draft-model", *name) as address:
        page = browser.new_context(**WIDE).new_page()
        page.goto(address)
        page.click("#settings-toggle")
        page.fill("#key", REAL_KEY)
        page.press("#key", "Tab")
        page.wait_for_selector("#about:has-text('draft-model')")
        page.select_option("#length", "4")
        page.click("#settings .close")
        page.check("#compare")
        watch(page)
        page.click(".example >> nth=0")
        page.wait_for_selector(".verdict", timeout=60_000)
        ended(page)
        page.screenshot(path=str(tmp_path / "side-by-side.png"))
        with_drafts, without = page.locator(".side").all()
        assert (
            "Same text each time, character for character" in page.locator(".verdict").inner_text()
        )
        assert "####" in with_drafts.locator(".tokens").inner_text()
        assert float(numbers(with_drafts)["τ"]) > 1
        assert numbers(without)["τ"] == "1.00"
        assert numbers(without)["tokens"] == numbers(with_drafts)["tokens"]
        accepted = with_drafts.locator(".accepted").count()
        assert accepted > with_drafts.locator(".tokens span").count() / 2

        page.uncheck("#compare")
        page.click(".answer [data-action=continue]")
        page.wait_for_selector(".message.answer .tokens")
        ended(page)
        assert page.locator("#notice").is_hidden()
        page.click("#settings-toggle")
        page.fill(
            "#schema",
            '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}',
        )
        page.fill("#max-tokens", "40")
        ask(page, "Sam has 3 apples.")
        assert page.locator("#notice").is_hidden()
        assert page.locator(".tokens").last.inner_text().startswith("{")
        page.context.close()
