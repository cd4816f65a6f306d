"""`explain URL` and `tune URL`: arithmetic on known counts; servers that say nothing, or something else; before and after."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outrider.lab.result import comparables, read_result
from outrider.lab.server.server_result import LevelAdvice, advise, findings, positions, schedule
from outrider.lab.server.types import Level, LevelMeasurement, MeasuredAnswer, Percentiles, SpeculationCounts
from outrider.report.markdown import to_markdown
from outrider.report.render import render
from tests.unit.cli.conftest import cli  # noqa: F401  # a fixture
from tests.unit.lab.server.fake_server import Fake

Run = Callable[..., Any]
ONE = Level(concurrency=1)


def measured(counts: SpeculationCounts | None, token_ms: float, *, tokens: int = 41, level: Level = ONE) -> LevelMeasurement:
    """One request of so many tokens, each behind the first `token_ms` late."""
    answer = MeasuredAnswer(id="a", chunks_s=[0.1], seconds=1.0, text="x", num_tokens=tokens)
    mean = Percentiles(n=1, mean=token_ms / 1000, p50=1, p90=1, p99=1)
    return LevelMeasurement(
        level=level, num_requests=1, answers=[answer], busy_s=1.0, tokens_per_s=None, requests_per_s=None, tokens_per_chunk=None,
        request_s=None, ttft_s=None, tpot_s=mean, gap_s=None, speculation=counts,
    )  # fmt: skip


def counted(steps: int, drafted: int, *accepted: int) -> SpeculationCounts:
    return SpeculationCounts(
        num_steps=steps, num_draft_tokens=drafted, num_accepted_tokens=sum(accepted), accepted_per_position=list(accepted)
    )


def test_the_forecast_is_the_formula() -> None:
    """10 passes of 4 drafts, 40 tokens; a pass takes 20 ms and a plain one 10, so a draft token costs 2.5 ms."""
    counts = counted(10, 40, 9, 8, 7, 6)
    found = advise(measured(counts, 5.0), measured(None, 10.0))
    assert (found.tokens_per_pass, found.num_draft_tokens, found.measured) == (4.0, 4.0, 2.0)
    assert found.pass_ms == pytest.approx(20.0)
    assert found.forecast == pytest.approx([1.9 / 1.25, 2.7 / 1.5, 3.4 / 1.75, 4.0 / 2.0])
    assert found.best == 4


def test_late_positions_that_cost_more_than_they_bring_are_left_out() -> None:
    counts = counted(20, 80, 16, 2, 1, 1)
    found = advise(measured(counts, 10.0), measured(None, 10.0))
    assert found.best == 1
    assert found.forecast[0] > 1.02 > found.forecast[3]


def test_do_not_speculate_where_no_length_pays() -> None:
    found = advise(measured(counted(20, 80, 10, 5, 3, 2), 20.0), measured(None, 10.0))
    assert found.best == 0
    assert max(found.forecast) < 1.02


def test_passes_without_a_draft_count() -> None:
    """A server that drafts in half of its passes: 10 with a draft that emit 20 tokens, 20 without."""
    found = advise(measured(counted(10, 40, 10), 10.0), measured(None, 10.0))
    assert found.tokens_per_pass == pytest.approx(40 / 30)
    assert found.num_draft_tokens == pytest.approx(40 / 30)


@pytest.mark.parametrize(
    ("counts", "plain", "missing"),
    [
        (counted(10, 40, 9, 8), None, "--baseline-url"), (None, 10.0, "which the server does not say"),
        (SpeculationCounts(num_steps=10, num_step_tokens=30), 10.0, "which the server does not say"),
        (SpeculationCounts(num_steps=10, num_draft_tokens=40, num_accepted_tokens=20), 10.0, "by position"),
        (SpeculationCounts(num_steps=0, num_draft_tokens=0, num_accepted_tokens=0), 10.0, "a pass with a draft"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_reported(counts: SpeculationCounts | None, plain: float | None, missing: str) -> None:
    found = advise(measured(counts, 5.0), None if plain is None else measured(None, plain))
    assert found.best is None
    assert missing in found.why_not
    assert (found.measured is None) == (plain is None)


def test_the_table_never_asks_for_more_at_a_higher_load() -> None:
    bests = {1: 3, 4: 5, 8: 2, 16: 0}
    rows = [LevelAdvice(level=Level(concurrency=number), best=best) for number, best in bests.items()]
    rows += [LevelAdvice(level=Level(concurrency=2))]
    assert schedule(rows) == [(1, 3), (8, 2), (16, 0)]


def test_positions_are_conditional_shares() -> None:
    rows = positions(counted(100, 300, 80, 40, 10))
    assert [row.share for row in rows] == [0.8, 0.4, 0.1]
    assert [row.given.value for row in rows] == [0.8, 0.5, 0.25]
    assert rows[1].given.low < 0.5 < rows[1].given.high


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (counted(200, 1000, 60, 20, 5, 2, 1), "The first draft token is rejected in 70% of the passes"),
        (counted(200, 1000, 160, 90, 15, 5, 2), "drafts of 2 would keep 92% of what is kept now"),
        (counted(200, 600, 190, 180, 170), "longer drafts may pay"), (counted(20, 60, 18, 17, 16), "rests on 20 passes"),
        (counted(0, 0), "does not speculate"), (SpeculationCounts(num_steps=200, num_step_tokens=600), "where drafts break off"),
    ],
)  # fmt: skip
def test_findings(counts: SpeculationCounts, says: str) -> None:
    assert says in " ".join(findings(counts))


# ---------------------------------------------------------------- by the command line


PATIENT = ("--set", "stall_timeout=10")


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"prompt {n}"}) + "\n" for n in range(3)))
    return ("--prompts", str(tmp_path / "prompts.jsonl"), "--concurrency", "1,2", "--max-tokens", "16", *PATIENT)


def test_explain_a_server(cli: Run, prompts: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    with Fake() as one:
        done = cli("explain", one.url, *prompts, "--out", str(tmp_path / "r.json"))
    assert done.code == 0, done.err
    assert "Explain: fake-model on vllm" in done.out
    assert "Acceptance by position" in done.out
    assert "outrider explain FOLDER_OR_HUB_ID" in done.out.replace("\n", " ")
    result = read_result(tmp_path / "r.json")
    assert result.standing.speculation.num_steps == 100, "what it counted before we came"
    assert "1 at once: accepted at position 1, given the one before" in comparables(result)
    assert "All traffic since the server started" in to_markdown(render(result))


def test_before_and_after(cli: Run, prompts: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    with Fake() as one:
        for name in ("before", "after"):
            assert cli("explain", one.url, *prompts, "--out", str(tmp_path / f"{name}.json")).code == 0
    done = cli("report", str(tmp_path / "before.json"), str(tmp_path / "after.json"))
    assert done.code == 0, done.err
    assert "tokens per pass with a draft" in done.out.replace("\n", " ")


def test_tune_against_a_plain_server(cli: Run, prompts: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    with Fake() as one, Fake(speculates=False) as plain:
        done = cli("tune", one.url, "--baseline-url", plain.url, *prompts, "--out", str(tmp_path / "r.json"))
    assert done.code == 0, done.err
    result = read_result(tmp_path / "r.json")
    assert [one.label for one in result.servers] == ["plain", "speculative"]
    assert all(row.best is not None and row.measured is not None for row in result.advice)
    assert "Draft tokens by load" in done.out


def test_tune_alone_says_what_is_missing(cli: Run, prompts: tuple[str, ...]) -> None:  # noqa: F811
    with Fake() as one:
        done = cli("tune", one.url, *prompts)
    assert done.code == 0, done.err
    assert "--baseline-url" in done.out


@pytest.mark.parametrize("verb", ["explain", "tune"])
def test_a_server_that_says_nothing(cli: Run, prompts: tuple[str, ...], verb: str) -> None:  # noqa: F811
    with Fake(metrics=False) as one:
        done = cli(verb, one.url, *prompts)
    assert (done.code, done.out) == (2, "")
    assert f"{verb} has nothing to read" in done.err.splitlines()[-1]


ANSWERS = {
    "html": (200, "text/html", b"<html>hello</html>"), "absent": (404, "text/plain", b"no"),
    "other": (200, "application/json", b'{"hello": 1}'), "list": (200, "application/json", b"[1, 2]"),
}  # fmt: skip


@pytest.fixture
def stranger() -> Iterator[Callable[[str], str]]:
    """A server that is none of ours; gives its URL."""
    servers = []

    def start(kind: str) -> str:
        code, content_type, body = ANSWERS[kind]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("kind", "says"), [("html", "text/html"), ("absent", "HTTP 404"), ("other", "JSON without"), ("list", "json")]
)
@pytest.mark.parametrize("verb", ["bench", "explain", "tune"])
def test_something_else_behind_the_url(  # one line, exit 2
    cli: Run, prompts: tuple[str, ...], stranger: Callable[[str], str], verb: str, kind: str, says: str  # noqa: F811
) -> None:
    done = cli(verb, stranger(kind), *prompts)
    assert (done.code, done.out) == (2, "")
    assert says in done.err.splitlines()[-1]
    assert "is it an OpenAI-compatible server?" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain", "http://127.0.0.1:1", "--drafter", "ngram"), "--drafter means nothing when a server is measured"),
        (("explain", "http://127.0.0.1:1", "a prompt"), "PROMPT means nothing when a server is measured"),
        (("explain", "http://127.0.0.1:1", "--set", "show_tokens=3"), "--set show_tokens means nothing when a server"),
        (("explain", "http://127.0.0.1:1", "--baseline-url", "http://x"), "unknown option '--baseline-url'"),
        (("tune", "http://127.0.0.1:1", "--batch-size", "2"), "--batch-size means nothing when a server is measured"),
        (("tune", "http://127.0.0.1:1", "--settings-out", "x.json"), "--settings-out means nothing when a server is measured"),
        (("tune", "demo", "--baseline-url", "http://x"), "--baseline-url means nothing without a server's URL"),
        (("explain", "demo", "--concurrency", "3"), "--concurrency means nothing without a server's URL"),
    ],
)  # fmt: skip
def test_options_of_the_other_kind_are_refused(cli: Run, arguments: tuple[str, ...], says: str) -> None:  # noqa: F811
    done = cli(*arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
