"""What `benchmarks/services.py` is asked to measure: pairs, and models of one's own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("services")


def test_a_pair_has_a_draft_model_on_both_sides(services: Any) -> None:
    setup = services.setup_of(None, None, "draft-model", "demo", 4, "off")
    assert setup.service[:3] == ["service", "draft", str(setup.draft)]
    assert setup.beside == {
        "drafter": "draft-model",
        "num_draft_tokens": 4,
        "draft": str(setup.draft),
    }


def test_a_look_up_is_hosted_for_the_target_s_tokens(services: Any) -> None:
    setup = services.setup_of(Path("t.gguf"), None, "ngram", "demo", 3, "off")
    assert setup.service[:6] == ["service", "draft", "--drafter", "ngram", "--model", "t.gguf"]
    assert setup.beside == {"drafter": "ngram", "num_draft_tokens": 3}


@pytest.mark.parametrize(
    ("target", "draft", "drafter"),
    [
        (None, Path("d"), "draft-model"),
        (None, None, "ngram"),
        (Path("t"), None, "draft-model"),
        (Path("t"), Path("d"), "ngram"),
    ],
)
def test_what_does_not_go_together_is_refused(
    services: Any, target: Path | None, draft: Path | None, drafter: str
) -> None:
    with pytest.raises(typer.BadParameter, match="--draft"):
        services.setup_of(target, draft, drafter, "demo", 4, "off")


def test_prompts_of_a_workload_are_tokens_of_the_model(services: Any) -> None:
    from outrider.demo import demo_paths

    found = services.prompts_of("embedded:rag", demo_paths().target, 2, 16)
    assert len(found) == 2
    assert all(len(prompt) > 20 for prompt in found)
