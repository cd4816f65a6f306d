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
    setup = services.setup_of(None, None, "demo", 4, "off")
    assert setup.service[:3] == ["service", "draft", str(setup.draft)]
    assert setup.beside == {
        "drafter": "draft-model",
        "num_draft_tokens": 4,
        "draft": str(setup.draft),
    }


@pytest.mark.parametrize(("target", "draft"), [(None, Path("d")), (Path("t"), None)])
def test_what_does_not_go_together_is_refused(
    services: Any, target: Path | None, draft: Path | None
) -> None:
    with pytest.raises(typer.BadParameter, match="--draft"):
        services.setup_of(target, draft, "demo", 4, "off")


def test_prompts_of_a_workload_are_tokens_of_the_model(services: Any) -> None:
    from outrider.demo import demo_paths

    prompts = services.prompts_of("embedded:rag", demo_paths().target, 2, 16)
    assert len(prompts) == 2
    assert all(len(prompt) > 20 for prompt in prompts)
