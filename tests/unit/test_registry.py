"""Name tables: what cannot be imported is left out where all names are considered, and an error
where it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.parts import choose_parts
from outrider.registry import Entry, Registry
from outrider.verifiers import VERIFIERS

WORKS = Entry("outrider.verifiers.token:TokenVerifier", "works")
FAILING = "outrider_test_failing"


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that raises what no import should."""
    (tmp_path / f"{FAILING}.py").write_text("raise ValueError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return FAILING


def test_what_cannot_be_imported_is_left_out(failing: str) -> None:
    entries = {
        "absent": Entry("no.such:Thing", "", "services"),
        "failing": Entry(f"{failing}:Thing", ""),
        "renamed": Entry("outrider.verifiers.token:Thing", ""),
        "function": Entry("outrider.parts:choose_parts", ""),
        "works": WORKS,
    }
    registry = Registry("verifier", entries)
    assert list(registry.importable()) == ["works"]
    broken = registry.broken()
    assert list(broken) == ["absent", "failing", "renamed", "function"]
    assert "No module named 'no'; pip install '.[services]' in a checkout" in broken["absent"]
    assert "cannot be imported: ValueError: no licence" in broken["failing"]
    assert "has no attribute 'Thing'" in broken["renamed"]
    assert "must be a class, got function" in broken["function"]
    for name, reason in broken.items():
        with pytest.raises(ConfigError) as caught:
            registry.load(name)
        assert str(caught.value) == reason


def test_a_broken_verifier_does_not_hide_the_message_about_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These messages list what else there is, and look at every verifier for it."""
    monkeypatch.setitem(VERIFIERS._builtin, "absent", Entry("no.such:Thing", ""))
    with pytest.raises(ConfigError, match="lossy are: typical, top-k"):
        choose_parts("ngram", {}, "block", {}, None, lossy=True)


@pytest.mark.slow
def test_drafters_for_vllm_are_listed_without_the_extra_services() -> None:
    """Catches a draft service's client, which cannot be imported there, that replaces every other
    message."""
    script = (
        "import sys; sys.modules['grpc'] = None\n"
        "from outrider.integrations.vllm.lookups import usable\n"
        "print(*usable())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "ngram" in done.stdout.split()
    assert "remote" not in done.stdout.split()
