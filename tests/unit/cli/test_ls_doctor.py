"""`outrider ls` and `outrider doctor`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.cli.ls import describe, overview, registry_table
from outrider.errors import CheckpointError
from outrider.registry import Entry, Registry
from outrider.report.console import print_blocks


def test_ls_lists_both_registries(cli: Callable[..., Any]) -> None:
    result = cli("ls")
    assert result.code == 0
    for name in ("none", "draft-model", "ngram", "block", "token", "gumbel"):
        assert name in result.out


def test_ls_json(cli: Callable[..., Any]) -> None:
    found = json.loads(cli("ls", "verifiers", "--json").out)
    assert list(found) == ["verifiers"]
    assert {row["name"] for row in found["verifiers"] if not row["lossless"]} == {
        "typical",
        "top-k",
    }


def test_ls_of_a_name_shows_its_settings(cli: Callable[..., Any]) -> None:
    """Where a person finds what --drafter takes after a name. Some names stand for a drafter and a
    verifier."""
    out = cli("ls", "block").out
    assert "settings of drafter block" in out
    assert "stop_below" in out
    assert "block verification" in out
    assert "suffix" not in out
    assert "(--draft FOLDER or GGUF file)" in out, "piped, a table is as wide as it must be"
    out = cli("ls", "typical").out
    assert "settings of verifier typical" in out
    assert "epsilon" in out
    assert list(json.loads(cli("ls", "ngram", "--json").out)) == ["drafters"]


def test_ls_of_a_name_imports_no_other_entry() -> None:
    """Code of trained heads takes seconds."""
    entries = {
        "bad": Entry("no.such:Thing", "broken"),
        "good": Entry("outrider.verifiers.token:TokenVerifier", "works"),
    }
    rows = describe(Registry("verifier", entries), ("lossless",), "good")
    assert [(row["name"], row["lossless"]) for row in rows] == [("good", True)]


def test_a_table_in_a_narrow_terminal_loses_no_letters() -> None:
    row = {"name": "remote", "needs": "(--draft-endpoint grpc://HOST:PORT)", "summary": "s"}
    shown = io.StringIO()
    print_blocks([registry_table("drafters", [row])], Console(width=30, file=shown))
    assert "…" not in shown.getvalue()


def test_ls_imports_nothing_heavy() -> None:
    """It took six seconds."""
    script = "import sys; from outrider.cli.app import run; run(['ls']); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode
        == 0
    )


def test_ls_of_an_unknown_name(cli: Callable[..., Any]) -> None:
    result = cli("ls", "sufix")
    assert result.code == 2
    assert "nothing called 'sufix' to list. Did you mean 'suffix'" in result.err


def test_an_entry_that_cannot_be_imported_is_listed() -> None:
    """One broken plug-in must not hide all others."""
    registry = Registry("drafter", {"bad": Entry("no.such:Thing", "broken")})
    assert overview("drafters", registry).rows == [["bad", "broken"]]
    (row,) = describe(registry, ("lossless",))
    assert row["name"] == "bad"
    assert "cannot be imported" in row["error"]


def test_doctor(cli: Callable[..., Any]) -> None:
    result = cli("doctor")
    assert result.code == 0
    assert "torch" in result.out


def test_doctor_says_how_bf16_weights_lie(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the environment, measured faster, slower or not at all."""
    monkeypatch.setattr("outrider.runtime.library.why_missing", lambda: None)
    monkeypatch.setattr("outrider.runtime.library.in_use", lambda: (Path("x.so"), "GCC"))
    monkeypatch.setattr("outrider.runtime.library.has_tiles", lambda: False)
    expected = {
        ("never", 1.3): "in 16 bits a number, since OUTRIDER_BF12 says never",
        ("always", 0.9): "in 12 bits a number, since OUTRIDER_BF12 says always",
        ("auto", None): "in 12 or 16 bits a number, which the first load",
        ("auto", 1.3): "in 12 bits a number: 12 are 1.30 times as fast",
        ("auto", 0.9): "in 16 bits a number: 12 are 0.90 times as fast",
    }
    for (choice, gain), words in expected.items():
        monkeypatch.setenv("OUTRIDER_BF12", choice)
        monkeypatch.setattr(
            "outrider.runtime.coding.kept_gain", lambda library, threads, gain=gain: gain
        )
        assert words in cli("doctor").out
        runtime = json.loads(cli("doctor", "--json").out)["runtime"]
        assert (runtime["bf16_weights"], runtime["bf12_gain"]) == (choice, gain)


def test_doctor_says_why_the_embedded_pair_cannot_be_loaded(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that cannot be unpacked are one more finding, not the end of the doctor."""

    def refused() -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr("outrider.demo.demo_paths", refused)
    found = json.loads(cli("doctor", "--json").out)["unavailable"]
    assert [one["why"] for one in found if "demo" in one["what"]] == ["no room"]


def test_doctor_json_says_why_things_are_unavailable(cli: Callable[..., Any]) -> None:
    found = json.loads(cli("doctor", "--json").out)
    assert {
        "versions",
        "cpu_flags",
        "threads",
        "memory_available_bytes",
        "compiler",
        "cache",
        "runtime",
    } <= set(found)
    assert all(item["what"] and item["why"] and item["remedy"] for item in found["unavailable"])
