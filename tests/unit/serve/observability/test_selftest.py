"""The start-up self-test finds what is wrong with a draft, and nothing where nothing is. Real
engines on small random models."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outrider.build import Options
from outrider.engine.engine import Engine, make_engine
from outrider.engine.request import EngineSettings, Finish, Listener, Request, Update
from outrider.errors import NumericalError
from outrider.serve.observability import monitoring
from outrider.serve.observability.metrics import ServerMetrics
from outrider.serve.observability.selftest import Finding, SelfTest, self_test
from outrider.stats import DecodeStats
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

CONTEXT = 2048
SHORT = 128
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a target and drafts: a good one, an unrelated one, and one with a short context."""
    folder = tmp_path_factory.mktemp("selftest")
    tokenizer = byte_tokenizer()
    target = tiny_llama(257, sharpness=4.0)
    short = disturbed(target, 0.05)
    short.config.max_position_embeddings = SHORT
    stranger = tiny_llama(257, seed=99, sharpness=4.0)
    for name, model in (
        ("good", disturbed(target, 0.02)),
        ("stranger", stranger),
        ("short", short),
    ):
        save_checkpoint(folder / name, model, tokenizer)
    tokenizer.chat_template = TEMPLATE
    save_checkpoint(folder / "target", target, tokenizer)
    return folder


Start = Callable[..., Engine]


@pytest.fixture
def start(models: Path) -> Iterator[Start]:
    """Engines that are stopped and sound at the end."""
    made: list[Engine] = []

    def begin(draft: str | None, extra: tuple[str, ...] = (), **options: Any) -> Engine:
        options = {"num_draft_tokens": 4, **options}
        chosen = Options(
            target=str(models / "target"), draft=str(models / draft) if draft else None, **options
        )
        made.append(
            make_engine(chosen, EngineSettings(kv_memory=64 << 20), extra_drafters=extra, name="m")
        )
        made[-1].start()
        return made[-1]

    yield begin
    for engine in made:
        engine.stop()
        engine.check_integrity()


def codes(result: SelfTest) -> set[str]:
    """Without speed, because on models of two layers drafting cannot pay, and the clock of a busy
    machine is unreliable."""
    return {finding.code for finding in result.findings} - {"slower-than-plain"}


@pytest.mark.slow
def test_good_pair_is_found_good(start: Start) -> None:
    result = self_test(start("good"), max_tokens=10)
    assert codes(result) == set()
    numbers = result.numbers["draft-model"]
    assert numbers["prompts"] == 5, "one of them through the chat template"
    assert numbers["same_texts"] == 5
    assert numbers["tau"] > 2
    assert result.numbers["plain"]["tau"] == 1
    json.dumps(asdict(result))


@pytest.mark.slow
def test_strangers_draft_is_found_out(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    result = self_test(start("stranger"), max_tokens=10)
    assert codes(result) == {"no-acceptance"}
    finding = next(finding for finding in result.findings if finding.code == "no-acceptance")
    assert (finding.severity, finding.drafter) == ("warning", "draft-model")
    with caplog.at_level(logging.INFO, "outrider.serve"):
        result.write_log("m")
    warned = [
        record.__dict__["finding"] for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert "no-acceptance" in warned
    speeds = r"self-test of m: plain \d+ tokens/s, tau 1\.00; draft-model \d+ tokens/s, tau 1\."
    assert re.search(speeds, caplog.text)


@pytest.mark.slow
def test_draft_with_a_short_context_is_named_by_the_start(start: Start) -> None:
    """Such a draft is good on short prompts: its config reveals the limit, and the start says so."""
    engine = start("short")
    assert codes(self_test(engine, max_tokens=4)) == set()
    assert any(f"--max-model-len {SHORT}" in note for note in engine.notes)
    assert not any("holds" in note for note in start("short", max_model_len=SHORT).notes)


@pytest.mark.slow
def test_every_drafter_of_a_server_is_tried(start: Start) -> None:
    """n-grams have no weights: a probe without repetitions is no reason to warn."""
    result = self_test(start("good", extra=("ngram",)), max_tokens=4)
    assert set(result.numbers) == {"plain", "draft-model", "ngram"}
    assert not [
        finding
        for finding in result.findings
        if finding.drafter == "ngram"
        and finding.severity == "warning"
        and finding.code != "slower-than-plain"
    ]


def test_server_without_speculation_has_nothing_to_compare(start: Start) -> None:
    result = self_test(start(None, drafter="none", num_draft_tokens=None), max_tokens=4)
    assert result.findings == []
    assert set(result.numbers) == {"plain"}


@pytest.mark.slow
def test_demo_pair_is_found_good() -> None:
    engine = make_engine(Options(target="demo"), EngineSettings(kv_memory=1 << 28))
    engine.start()
    try:
        result = self_test(engine)
    finally:
        engine.stop()
    assert codes(result) == set()
    assert result.numbers["draft-model"]["alpha"] > 0.4


# ---------------------------------------------------------------- scripted answers: what no small model does by itself


class Scripted:
    """An engine whose answers have the cost that a test sets: (accepted of drafted, seconds) of
    speculative answers; plain take 1 s.
    """

    drafters = ["draft-model"]  # noqa: RUF012
    context = 500
    lossless = True

    def __init__(
        self, *, drafted: int = 40, accepted: int = 30, seconds: float = 0.4, **config: Any
    ) -> None:
        self.tokenizer = byte_tokenizer()
        self.config = {
            "drafter": "draft-model",
            "draft": "nowhere",
            "num_draft_tokens": 4,
            "exact": True,
            **config,
        }
        self._drafted = drafted
        self._accepted = accepted
        self._seconds = seconds
        self.text = [7]
        self.error: NumericalError | None = None

    def submit(self, request: Request, listener: Listener) -> None:
        is_plain = request.speculation.mode == "off"
        stats = DecodeStats(emitted=32, steps=32, ttft_s=0.1, decode_s=0.9)
        if not is_plain:
            stats = DecodeStats(
                emitted=32,
                steps=10,
                drafted=self._drafted,
                tested=self._drafted,
                accepted=self._accepted,
                ttft_s=0.0,
                decode_s=self._seconds,
            )
        reason = "error" if self.error else "length"
        finish = Finish(
            reason=reason,
            stats=stats,
            seed=0,
            lossless=True,
            drafter="draft-model",
            prompt_tokens=3,
            error=self.error,
        )
        listener(Update(token_ids=[7] if is_plain else self.text, finish=finish))


def only(result: SelfTest) -> Finding:
    (finding,) = result.findings
    return finding


def test_fast_draft_needs_no_words() -> None:
    result = self_test(Scripted())
    assert result.findings == []
    assert result.numbers["draft-model"]["speedup"] == pytest.approx(2.5)


def test_slow_draft_is_a_warning_unless_the_server_adapts() -> None:
    found = only(self_test(Scripted(seconds=1.3)))
    assert (found.code, found.severity) == ("slower-than-plain", "warning")
    assert "0.77 times plain speed, 0.77x to 0.77x" in found.message, "every speed with its spread"
    assert only(self_test(Scripted(seconds=1.3, num_draft_tokens="auto:8"))).severity == "note"


def test_draft_that_drafts_nothing_is_unused() -> None:
    found = only(self_test(Scripted(drafted=0, accepted=0)))
    assert (found.code, found.severity) == ("draft-unused", "warning")


def test_drafter_without_a_model_is_no_waste() -> None:
    """Texts that repeat themselves, or requests that bring a prediction, may come."""
    engine = Scripted(drafted=0, accepted=0, drafter="prediction", draft=None)
    engine.drafters = ["prediction"]
    found = only(self_test(engine))
    assert (found.code, found.severity) == ("draft-unused", "note")


def test_a_draft_service_that_sent_nothing_in_time_is_a_warning() -> None:
    engine = Scripted(drafted=0, accepted=0, drafter="remote", draft=None)
    engine.drafters = ["remote"]
    found = only(self_test(engine))
    assert (found.code, found.severity) == ("draft-unused", "warning")


def test_other_text_than_plain_is_reported_as_bad_as_it_is() -> None:
    engine = Scripted()
    engine.text = [8]
    found = only(self_test(engine))
    assert (found.code, found.severity) == ("texts-differ", "warning")
    engine.config["exact"] = False
    assert only(self_test(engine)).severity == "note"


def test_engine_that_fails_is_a_finding_and_no_crash() -> None:
    engine = Scripted()
    engine.error = NumericalError("NaN in layer 2")
    found = only(self_test(engine))
    assert found.code == "probe-failed"
    assert "NaN in layer 2" in found.message


def test_template_that_fails_is_named_and_the_rest_is_tried() -> None:
    engine = Scripted()
    engine.tokenizer.chat_template = "{{ nothing.at.all }}"
    result = self_test(engine)
    assert only(result).code == "chat-template"
    assert result.numbers["draft-model"]["prompts"] == 4


def test_remembered_numbers_say_when_they_were_measured(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a log that shows last month's speed as today's."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "outrider.serve")
    numbers = {"plain": {"tokens_per_s": 12.3, "tau": 1.0}}
    monkeypatch.setattr(
        monitoring,
        "self_test",
        lambda engine: SelfTest([], numbers, measured_at="2026-01-02 03:04 UTC"),
    )
    watching = monitoring.Monitoring(ServerMetrics())
    watching.observer("m")
    engine = start("good")
    for _ in range(2):
        watching.ready(engine, facts=engine.facts)
    now, later = [
        record.message for record in caplog.records if record.message.startswith("self-test")
    ]
    assert now == "self-test of m: plain 12 tokens/s, tau 1.00"
    assert (
        later
        == "self-test of m: remembered from 2026-01-02 03:04 UTC, not measured now: plain 12 tokens/s, tau 1.00"
    )
    shown = asdict(watching.self_tests["m"])
    assert (shown["measured_at"], shown["remembered"], shown["numbers"]) == (
        "2026-01-02 03:04 UTC",
        True,
        numbers,
    )
    assert SelfTest().remembered is False


@pytest.mark.slow
def test_a_good_test_is_kept_and_one_with_findings_is_made_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a server that tests at every start, one that takes over another server's test, and
    one that never looks again."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    made: list[str] = []

    def counted(engine: Engine) -> SelfTest:
        made.append(engine.name)
        return SelfTest([], {"plain": {"tokens_per_s": 5, "tau": 1.0}})

    monkeypatch.setattr(monitoring, "self_test", counted)
    watching = monitoring.Monitoring(ServerMetrics())
    watching.observer("m")
    engine = start("good")
    for _ in range(2):
        watching.ready(engine, facts=engine.facts)
    assert made == ["m"]
    assert watching.self_tests["m"].numbers == {"plain": {"tokens_per_s": 5, "tau": 1.0}}
    other = start("stranger")
    watching.ready(other, facts=other.facts)
    watching.ready(other, facts=None)
    assert made == ["m"] * 3

    def bad(engine: Engine) -> SelfTest:
        made.append("bad")
        return SelfTest([Finding("no-acceptance", "x")])

    monkeypatch.setattr(monitoring, "self_test", bad)
    third = start("good", num_draft_tokens=3)
    for _ in range(2):
        watching.ready(third, facts=third.facts)
    assert made[3:] == ["bad", "bad"]
