"""`outrider certify URL` as a user types it, against our own server: drafts on against drafts off by
request, and an inexact one."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from outrider.cli import app
from outrider.lab.certify.server_result import ServerCertifyResult
from outrider.lab.result import read_result
from tests.live_server import KEY, live_server

SMALL = ("--limit", "2", "--max-tokens", "16", "--samples", "80")
QUICK = ("--threads", "1", "--no-self-test")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, a key in the environment, and nobody at the keyboard."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setenv("SERVER_KEY", KEY)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_our_server_with_drafts_on_and_off_by_request() -> None:
    with live_server("demo", "--num-draft-tokens", "4", *QUICK) as server:
        arguments = ("--server", "api_key_env=SERVER_KEY", "--temperature", "0.3")
        code = app.run(["certify", server, *SMALL, *arguments, "--out", "r.json", "--out", "r.md"])
    result = read_result(Path("r.json"))
    assert isinstance(result, ServerCertifyResult)
    assert result.greedy.status == result.determinism.status == "passed", result.reasons
    assert not any(test.rejected for test in result.sampled.tests)
    assert code == (0 if result.verdict == "lossless" else 1)
    assert result.plain.fields == {"speculation": {"mode": "off"}}
    assert result.plain.drafted == {"greedy": 0, "sampled": 0}
    assert (result.speculative.drafted["greedy"] or 0) > 0
    assert KEY not in Path("r.json").read_text() + Path("r.md").read_text()


@pytest.mark.slow
def test_a_server_of_other_weights_is_found_out() -> None:
    """The draft model alone in the place of the pair: another text, and not by rounding."""
    draft = Path(__file__).parents[2] / "outrider/demo/models/draft"
    with (
        live_server("demo", "--drafter", "none", *QUICK) as plain,
        live_server(str(draft), "--served-model-name", "demo", "--drafter", "ngram", *QUICK) as bad,
    ):
        arguments = ("--baseline-url", plain, "--server", "api_key_env=SERVER_KEY")
        assert app.run(["certify", bad, *SMALL, *arguments, "--out", "r.json"]) == 1
    result = read_result(Path("r.json"))
    assert isinstance(result, ServerCertifyResult)
    assert result.verdict == "not lossless"
    assert {difference.cause for difference in result.greedy.differences} & {"error"}
    assert all(difference.gap is not None for difference in result.greedy.differences)
