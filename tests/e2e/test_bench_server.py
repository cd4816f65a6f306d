"""`outrider bench URL` as a user types it, against our own servers: with and without speculation, counted and compared."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from outrider.cli import app
from outrider.lab.bench.result import BenchResult
from outrider.lab.result import read_result
from tests.live_server import KEY, live_server

SMALL = ("--prompts", "2", "--max-new-tokens", "16", "--concurrency", "1,2", "--api-key-env", "BENCH_KEY")
QUICK = ("--compile", "off", "--threads", "1", "--no-self-test")


@pytest.mark.slow
def test_bench_compares_two_of_our_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Identical texts at every level; the servers' counters, the answers' own counts and the usage agree."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setenv("BENCH_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    with (
        live_server("demo", "--drafter", "none", *QUICK) as plain,
        live_server("demo", "--drafter", "draft-model", "--num-draft-tokens", "4", *QUICK) as speculative,
    ):
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
        assert level.counted is not None
        assert level.reported is not None
        assert level.num_reported == len(level.answers)
        assert level.counted == level.reported, "nobody else asked this server meanwhile"
        assert (level.counted.num_accepted_tokens or 0) > 0
        tokens = sum(answer.num_tokens or 0 for answer in level.answers)
        assert tokens == 16 * len(level.answers)
        assert (level.counted.num_accepted_tokens or 0) <= (level.counted.num_draft_tokens or 0)
    for level in without.levels:
        assert level.speculation is None or not level.speculation.num_draft_tokens
