"""`outrider bench URL` as a user types it, against our own servers: with and without speculation."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli import app
from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.result import read_result
from tests.live_server import KEY, live_server

SMALL = (
    "--limit",
    "2",
    "--max-tokens",
    "16",
    "--concurrency",
    "2",
    "--server",
    "api_key_env=BENCH_KEY",
)
QUICK = ("--threads", "1", "--no-self-test")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """(Plain, speculative.)"""
    with (
        live_server("demo", "--drafter", "none", *QUICK) as plain,
        live_server(
            "demo", "--drafter", "draft-model", "--num-draft-tokens", "4", *QUICK
        ) as speculative,
    ):
        yield plain, speculative


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, a key in the environment, and nobody at the keyboard."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setenv("BENCH_KEY", KEY)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_bench_compares_two_of_our_servers(
    servers: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Identical texts; the servers' counters, the answers' own counts and the usage agree."""
    plain, speculative = servers
    assert app.run(["bench", speculative, "--baseline-url", plain, *SMALL, "--out", "r.json"]) == 0
    assert "speculative against plain" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"], (
        "the journal of a complete run is gone"
    )
    result = read_result(Path("r.json"))
    assert isinstance(result, BenchResult)
    assert KEY not in Path("r.json").read_text(encoding="utf-8")
    without, with_drafts = result.servers
    assert [one.label for one in result.servers] == ["plain", "speculative"]
    assert all(one.is_complete and one.engine == "outrider" for one in result.servers)
    comparison = with_drafts.comparison
    assert comparison is not None
    assert comparison.num_pairs == len(with_drafts.answers) > 0
    assert comparison.differing == []
    assert comparison.speedup is not None
    counts = with_drafts.speculation
    assert counts is not None
    assert 0 < (counts.num_accepted_tokens or 0) <= (counts.num_draft_tokens or 0)
    assert sum(answer.num_tokens or 0 for answer in with_drafts.answers) == 16 * len(
        with_drafts.answers
    )
    assert without.speculation is None or not without.speculation.num_draft_tokens
