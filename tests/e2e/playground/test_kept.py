"""What the playground keeps in the browser: conversations, settings, files in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import expect

from tests.playground import NEEDS_A_BROWSER, PHONE, ask, begin, ended, names, reload, texts, watch
from tests.scripted_server import STORY_TEXT, Scripted

pytestmark = NEEDS_A_BROWSER


def test_conversations_and_settings_survive_a_reload(page: Any, server: Scripted) -> None:
    page.click("#settings-toggle")
    page.fill("#system", "Be brief.")
    page.select_option("#drafter", "ngram")
    page.select_option("#length", "3")
    page.fill("#top-k", "5")
    watch(page)
    ask(page, "one")
    page.click("#new")
    ask(page, "two")
    assert names(page) == ["two", "one"]
    page.fill("#message", "half a thou")
    reload(page)
    assert names(page) == ["two", "one"]
    assert page.locator("[aria-current]").inner_text() == "two"
    assert page.input_value("#message") == "half a thou"
    assert page.locator(".tokens").text_content() == STORY_TEXT
    assert page.locator(".tokens .accepted").count() == 9
    assert page.locator(".tokens .correction").count() == 1
    page.click("#list .name:has-text('one')")
    ask(page, "more")
    body = server.bodies[-1]
    assert texts(body) == ["Be brief.", "one", STORY_TEXT, "more"]
    assert body["speculation"] == {"mode": "fixed", "max_draft_tokens": 3, "drafter": "ngram"}
    assert body["top_k"] == 5
    page.click("#settings-toggle")
    page.click("#defaults")
    expect(page.locator("#top-k")).to_have_value("")
    page.wait_for_selector("[data-mode=reading]")
    reload(page)
    assert page.input_value("#top-k") == ""
    assert page.input_value("#length") == "auto"
    assert page.locator("body").get_attribute("data-mode") == "reading"


def test_a_system_prompt_belongs_to_its_conversation(
    page: Any, open_page: Any, server: Scripted, tmp_path: Path
) -> None:
    """One for all conversations, which changes what the others were about."""
    page.click("#settings-toggle")
    page.fill("#system", "Be brief.")
    ask(page, "one")
    page.click("#new")
    assert page.input_value("#system") == ""
    page.fill("#system", "Be kind.")
    reload(page)
    assert page.input_value("#system") == "Be kind."  # before its first message, too
    ask(page, "two")
    assert texts(server.bodies[-1]) == ["Be kind.", "two"]
    page.click("#list .name:has-text('one')")
    assert page.input_value("#system") == "Be brief."
    page.click("#settings-toggle")
    page.fill("#system", "Be loud.")
    page.click("#settings .close")
    page.click("#new")
    reload(page)
    page.click("#list .name:has-text('one')")
    ask(page, "more")
    assert texts(server.bodies[-1])[0] == "Be loud."

    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "all.json")
    other = open_page(viewport={"width": 1280, "height": 850})
    other.set_input_files("#import-file", tmp_path / "all.json")
    other.click("#list .name:has-text('two')")
    ask(other, "again")
    assert texts(server.bodies[-1])[0] == "Be kind."


def test_a_reload_in_the_middle_keeps_what_there_was(page: Any) -> None:
    """A question and half an answer that are gone."""
    begin(page, "slow")
    page.wait_for_selector(".answer:has-text('tick tick')")
    reload(page)
    assert page.locator(".message").count() == 2
    assert "tick tick" in page.inner_text(".answer")
    ends = page.inner_text(".answer .ends")
    assert ends in ("Stopped by you.", "The connection ended in the middle of the answer.")


def test_rename_delete_and_undo(page: Any) -> None:
    ask(page, "one")
    page.click("#new")
    ask(page, "two")
    page.hover("#list li >> nth=1")
    page.click("[aria-label='Rename one']")
    page.keyboard.type("<b>first</b>")
    page.keyboard.press("Enter")
    assert names(page) == ["two", "<b>first</b>"]
    page.hover("#list li >> nth=0")
    page.click("[aria-label='Delete two']")
    assert names(page) == ["<b>first</b>"]
    assert page.locator(".message").count() == 0
    page.click("#notice-action")
    assert names(page) == ["two", "<b>first</b>"]
    assert page.locator(".message").count() == 2
    page.hover("#list li >> nth=0")
    page.click("[aria-label='Delete two']")
    reload(page)
    assert names(page) == ["<b>first</b>"]


def test_a_deleted_conversation_does_not_come_back_with_its_answer(page: Any) -> None:
    ask(page, "one")
    begin(page, "slow")
    page.wait_for_selector(".answer:has-text('tick')")
    page.hover("#list li >> nth=0")
    page.click("[aria-label='Delete one']")
    ended(page)
    assert names(page) == []
    reload(page)
    assert names(page) == []


def test_export_and_import_bring_back_the_same(page: Any, open_page: Any, tmp_path: Path) -> None:
    ask(page, "one")
    page.click("#new")
    ask(page, "markdown")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert len(json.loads(file.read_text())["conversations"]) == 2

    other = open_page(viewport={"width": 1280, "height": 850})
    other.set_input_files("#import-file", file)
    other.wait_for_selector("#list .name")
    assert names(other) == ["markdown", "one"]
    assert other.inner_text("#notice-text") == f"{file.name}: 2 conversations imported."
    other.click("#list .name >> nth=1")
    watch(other)
    assert other.locator(".tokens .accepted").count() == 9
    other.set_input_files("#import-file", file)  # once more: under ids of their own
    expect(other.locator("#list .name")).to_have_count(4)

    page.hover("#list li >> nth=1")
    with page.expect_download() as download:
        page.click("[aria-label='Export one']")
    download.value.save_as(file)
    assert [entry["name"] for entry in json.loads(file.read_text())["conversations"]] == ["one"]


QUESTION = {"role": "user", "content": "one"}


def exported(message: dict[str, Any], **more: Any) -> str:
    conversation = {"id": "ab", "name": "n", "changed": 1, "messages": [message], **more}
    return json.dumps({"outrider_conversations": 1, "conversations": [conversation]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "notes.json is not JSON."),
        ('{"chats": []}', "notes.json was not exported by this page"),
        ('{"outrider_conversations": 2}', "notes.json has version 2 of the format"),
        (exported({"role": "tool", "content": "x"}), 'message 1 of "n" has the role "tool"'),
        (exported({"role": "user", "content": 3}), 'message 1 of "n" has no text'),
        (
            exported({"role": "assistant", "content": "xy", "fates": "a", "lengths": [1]}),
            'the tokens of message 1 of "n" do not add up to its text',
        ),
        (exported(QUESTION, system=3), 'the system prompt of "n" is no text'),
        (exported(QUESTION, earlier=[[]] * 9), 'earlier versions of "n" are no list of at most 8'),
        (
            exported(QUESTION, earlier=[{"shared": 2, "messages": []}]),
            'an earlier version of "n" are no list that begins as the conversation does',
        ),
        (
            exported(QUESTION, earlier=[{"shared": 1, "messages": [{"role": "tool"}]}]),
            'message 1 of an earlier version of "n" has no text',
        ),
        ("\x00\x01", "notes.json is no text file (UTF-8)."),
    ],
)
def test_a_strangers_file_is_refused_by_name(
    page: Any, tmp_path: Path, text: str, words: str
) -> None:
    """A file of something else that half replaces what is kept, or is refused without a word."""
    ask(page, "one")
    file = tmp_path / "notes.json"
    file.write_text(text)
    page.set_input_files("#import-file", file)
    page.wait_for_selector("#notice[role=alert]")
    assert words in page.inner_text("#notice-text")
    assert "notes.json" in page.inner_text("#notice-text")
    assert names(page) == ["one"]


def test_broken_storage_loses_nothing_else(page: Any) -> None:
    """A page that stays blank for ever because of one broken value."""
    ask(page, "one")
    page.evaluate("""() => {
        localStorage.setItem("outrider.conversation.ab", "{broken");
        localStorage.setItem("outrider.conversation.cd", '{"id": "cd", "name": 3}');
        localStorage.setItem("outrider.settings", "[[[");
    }""")
    reload(page)
    words = "2 conversations in this browser's storage could not be read and are left out."
    assert page.inner_text("#notice-text") == words
    assert names(page) == ["one"]
    assert page.evaluate('localStorage.getItem("outrider.unreadable.ab")') == "{broken"
    page.evaluate("localStorage.setItem('outrider.settings', '{\"length\": 3, \"system\": {}}')")
    reload(page)
    assert page.locator("#notice").is_hidden()  # told once
    assert page.input_value("#length") == "auto"
    ask(page, "two")


def test_a_full_storage_is_told_and_stops_nothing(page: Any) -> None:
    page.evaluate("""() => {
        let size = 4_000_000, number = 0;
        while (size) {
            try { localStorage.setItem("x" + (number += 1), "x".repeat(size)); } catch { size = Math.floor(size / 2); }
        }
    }""")
    answer = ask(page, "one")
    assert "Sam has" in answer.inner_text()
    assert "storage for the page is full" in page.inner_text("#notice-text")
    ask(page, "two")
    assert page.locator(".message").count() == 4
    page.evaluate("localStorage.clear()")
    ask(page, "three")
    reload(page)
    assert page.locator(".message").count() == 6


def test_a_browser_that_keeps_nothing(page: Any, server: Scripted) -> None:
    """Where a reader forbids storage, even the question for it throws."""
    other = page.context.new_page()
    other.add_init_script("""for (const name of ["localStorage", "sessionStorage"]) {
        Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
    }""")
    other.goto(server.url)
    other.wait_for_selector("#about:has-text('drafters')")
    ask(other, "one")
    assert "This browser keeps nothing for this page" in other.inner_text("#notice-text")
    ask(other, "two")
    assert texts(server.bodies[-1]) == ["one", STORY_TEXT, "two"]


def test_two_tabs_do_not_lose_each_others_conversations(page: Any, server: Scripted) -> None:
    other = page.context.new_page()
    other.goto(server.url)
    ask(page, "one")
    other.wait_for_selector("#list .name:has-text('one')")
    ask(other, "two")
    page.wait_for_selector("#list .name:has-text('two')")
    ask(page, "three")
    reload(other)
    assert names(other) == ["one", "two"]
    other.click("#list .name:has-text('one')")
    assert other.locator(".message").count() == 4


def drop(page: Any, name: str, content: bytes) -> None:
    """As a file manager does."""
    transfer = page.evaluate_handle(
        """([name, content]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(content)], name));
            return transfer;
        }""",
        [name, list(content)],
    )
    page.dispatch_event("#turns", "dragover", {"dataTransfer": transfer})
    assert "dropping" in page.get_attribute("body", "class")
    page.dispatch_event("#turns", "drop", {"dataTransfer": transfer})


def test_text_files_are_sent_with_the_message(page: Any, server: Scripted) -> None:
    drop(page, "notes.md", "one ```` two\nänd".encode())
    page.wait_for_selector("#files li")
    drop(page, "gone.txt", b"gone")
    page.click("[aria-label='Remove gone.txt']")
    ask(page, "read it")
    told = "File notes.md:\n`````\none ```` two\nänd\n`````\n\nread it"
    assert texts(server.bodies[-1]) == [told]
    assert page.locator("#files li").count() == 0
    assert page.inner_text(".question .file") == "notes.md, 16 characters"
    reload(page)
    ask(page, "again")
    assert texts(server.bodies[-1])[0] == told


def test_files_that_are_no_text_or_too_large_are_refused(page: Any) -> None:
    drop(page, "photo.png", b"\x89PNG\x00\xff")
    page.wait_for_selector("#notice[role=alert]")
    assert page.inner_text("#notice-text").startswith("photo.png is no text file (UTF-8).")
    page.click("#notice-close")
    drop(page, "big.log", b"x" * (257 * 1024))
    page.wait_for_selector("#notice[role=alert]")
    assert page.inner_text("#notice-text") == "big.log has 257 KB; a text file may have 256."
    assert page.locator("#files li").count() == 0


MANY = """(count) => {
    const code = "```python\\nfor number in range(10):\\n    print(number)  # one\\n```\\n";
    const text = "Some **bold** words in a paragraph that is not short.\\n\\n" + code + "| a | b |\\n|---|---|\\n| 1 | 2 |\\n";
    const messages = Array.from({ length: count }, (_, index) => index % 2
        ? { role: "assistant", content: text, fates: "ab".repeat(text.length / 2) + "p".repeat(text.length % 2),
            lengths: Array(text.length).fill(1), numbers: null, ended: "stop", isJson: false }
        : { role: "user", content: `Question ${index}` });
    localStorage.setItem("outrider.conversation.ab", JSON.stringify({ id: "ab", name: "many", changed: 1, messages }));
    sessionStorage.setItem("outrider.open", "ab");
}"""
TYPING = """async () => {
    const field = document.getElementById("message");
    const times = [];
    for (let number = 0; number < 20; number += 1) {
        const begun = performance.now();
        field.value += "x";
        field.dispatchEvent(new InputEvent("input", { bubbles: true }));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        times.push(performance.now() - begun);
    }
    field.value = "";
    return times.sort((one, other) => one - other)[10];
}"""


@pytest.mark.parametrize("mode", ["reading", "watching"])
def test_500_messages_stay_quick(open_page: Any, mode: str) -> None:
    """Work that grows with the conversation at every key or token. Measured on two busy cores: see
    the limits."""
    page = open_page(**PHONE)
    page.check(f"input[value={mode}]")
    page.evaluate(MANY, 500)
    reload(page)
    assert page.locator(".message").count() == 500
    opening = page.evaluate("performance.now()")
    typing = page.evaluate(TYPING)
    begun = page.evaluate("performance.now()")
    begin(page, "tell me")
    expect(page.locator(".message")).to_have_count(502)
    ended(page)
    answering = page.evaluate("performance.now()") - begun
    print(f"{mode}: opened {opening:.0f} ms, a key {typing:.0f} ms, an answer {answering:.0f} ms")
    assert opening < 6000
    assert typing < 100
    assert answering < 3000
    box = page.locator("#scroller")
    assert box.evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight") < 5
