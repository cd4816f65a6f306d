"""`outrider bench|explain|tune URL` as a user types it, against our own servers: with and without speculation."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli import app
from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.result import read_result
from outrider.lab.server.server_result import ServerResult
from tests.live_server import KEY, live_server

SMALL = ("--limit", "2", "--max-tokens", "16", "--concurrency", "1,2", "--set", "api_key_env=BENCH_KEY")
QUICK = ("--set", "runtime=eager", "--threads", "1", "--set", "self_test=false")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """(Plain, speculative.)"""
    with (
        live_server("demo", "--drafter", "none", *QUICK) as plain,
        live_server("demo", "--drafter", "draft-model", "--num-draft-tokens", "4", *QUICK) as speculative,
    ):
        yield plain, speculative


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, a key in the environment, and nobody at the keyboard."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setenv("BENCH_KEY", KEY)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_tune_compares_two_of_our_servers(
    servers: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To its end: a length for each load from counters and clocks, the words for serve, a file that is read again."""
    plain, speculative = servers
    assert app.run(["tune", speculative, "--baseline-url", plain, *SMALL, "--out", "t.json", "--out", "t.html"]) == 0
    output = capsys.readouterr().out
    assert "Draft tokens by load" in output
    assert "draft tokens" in output or "do not speculate" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.html", "t.json"], "the journal of a complete run is gone"
    result = read_result(Path("t.json"))
    assert isinstance(result, ServerResult)
    assert [one.level.label for one in result.advice] == ["1 at once", "2 at once"]
    assert all(one.measured is not None and one.measured > 0 for one in result.advice)
    assert all(0 <= nodes <= 4 for _, nodes in result.table)
    words = ",".join(f"{rows}:{nodes}" for rows, nodes in result.table) if len(result.table) > 1 else str(result.table[0][1])
    assert f"outrider serve ... --num-draft-tokens {words}" in output
    assert app.run(["report", "t.json"]) == 0


@pytest.mark.slow
def test_explain_tells_of_one_of_our_servers(
    servers: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its counters; the baseline belongs to bench and tune, and is refused by name."""
    plain, speculative = servers
    assert app.run(["explain", speculative, *SMALL, "--out", "e.json"]) == 0
    assert "Acceptance by position" in capsys.readouterr().out
    assert isinstance(read_result(Path("e.json")), ServerResult)
    assert app.run(["explain", speculative, "--baseline-url", plain, *SMALL]) == 2
    assert "unknown option '--baseline-url'" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_compares_two_of_our_servers(
    servers: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Identical texts at every level; the servers' counters, the answers' own counts and the usage agree."""
    plain, speculative = servers
    assert app.run(["bench", speculative, "--baseline-url", plain, *SMALL, "--out", "r.json"]) == 0
    assert "speculative against plain" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"], "the journal of a complete run is gone"
    result = read_result(Path("r.json"))
    assert isinstance(result, BenchResult)
    assert KEY not in Path("r.json").read_text(encoding="utf-8")
    without, with_drafts = result.servers
    assert [one.label for one in result.servers] == ["plain", "speculative"]
    assert all(one.complete and one.server.engine == "outrider" and one.server.metrics for one in result.servers)
    for comparison in with_drafts.comparisons:
        assert comparison.num_pairs == comparison.num_identical == len(with_drafts.levels[0].answers) > 0
        assert comparison.speedup is not None
    for level in with_drafts.levels:
        assert not level.failures
        assert level.speculation is not None
        assert (level.speculation.num_accepted_tokens or 0) > 0
        tokens = sum(answer.num_tokens or 0 for answer in level.answers)
        assert tokens == 16 * len(level.answers)
        assert (level.speculation.num_accepted_tokens or 0) <= (level.speculation.num_draft_tokens or 0)
    for level in without.levels:
        assert level.speculation is None or not level.speculation.num_draft_tokens
