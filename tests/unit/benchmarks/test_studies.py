"""The studies' own arithmetic, their recipe of hard labels, and the page that is written from their
results."""

from __future__ import annotations

import json
import os
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outrider.train.draft_model import DraftModelRecipe
from outrider.train.kinds import KINDS
from tests.unit.train.head_material import build_recipe, features, own_texts, target_module

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def row(configuration: str, steps: int, emitted: int, drafted: int, **more: Any) -> dict[str, Any]:
    counts = {
        "steps": steps,
        "emitted": emitted,
        "drafted": drafted,
        "tested": drafted,
        "accepted": emitted - steps,
    }
    return {
        "configuration": configuration,
        "temperature": 0.0,
        "task": "gsm8k",
        **counts,
        "behind_end": 0,
        **more,
    }


def test_saved_is_against_the_fixed_length_of_the_same_tau() -> None:
    """Catches a comparison with the nearest length, a line without plain decoding, and guesses
    beyond its end."""
    study = import_module("study.acceptance")
    fixed = [row("k=2", 100, 200, 200), row("k=4", 100, 300, 400)]
    rows = [*fixed, row("acceptance 0.3", 100, 250, 240), row("product 0.3", 100, 150, 80)]
    assert study.line_of(rows) == [(1.0, 0.0), (2.0, 2.0), (3.0, 4.0)]
    found = {
        one["configuration"]: one
        for one in study.savings([*rows, row("entropy 0.1", 100, 310, 400)])
    }
    # half way between the lengths 2 and 4
    assert found["acceptance 0.3"]["fixed"] == pytest.approx(3.0)
    assert found["acceptance 0.3"]["saved"] == pytest.approx(1 - 2.4 / 3)
    assert found["product 0.3"]["saved"] == pytest.approx(1 - 0.8 / 1)
    assert found["entropy 0.1"]["saved"] is None
    # 150 of its 240 tokens were kept
    assert found["acceptance 0.3"]["most"] == pytest.approx(1 - 1.5 / 3)


def test_what_is_drafted_behind_the_end_counts_apart() -> None:
    """Catches a comparison that takes it from the rule, too, and an end that is counted as behind
    itself."""
    study = import_module("study.acceptance")
    rows = [
        row("k=2", 100, 200, 200),
        row("k=4", 100, 300, 400, behind_end=80),
        row("acceptance 0.3", 100, 300, 280),
    ]
    found = study.savings(rows)[0]
    assert (found["saved"], found["alike"]) == pytest.approx((1 - 2.8 / 4, 1 - 2.8 / 3.2))
    steps = [
        SimpleNamespace(tokens=tokens) for tokens in ([5, 6, 7], [5, 1, 6, 1, 7], [1], [], [6, 1])
    ]
    assert study.drafted_behind(SimpleNamespace(steps=steps), frozenset({1, 2})) == 3


def test_hard_labels_are_the_next_tokens() -> None:
    """Catches labels of the same position instead of the next, and a validation that lacks the
    target's distribution."""
    hard = import_module("study.hard_labels").HardLabelRecipe
    module = target_module()
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
    recipe, plain = (build_recipe(kind, module, **sizes) for kind in (hard, DraftModelRecipe))
    batch = features(module, (), own_texts(module, 3, 10))
    with torch.no_grad():
        logits = recipe.module.eval()(input_ids=batch.tokens).logits
        assert torch.equal(recipe.loss(batch).loss, plain.loss(batch).loss)
        learnt = recipe.module.train() and recipe.loss(batch).loss
    labels = torch.cat([batch.tokens[b, t + 1][None] for b, t in batch.mask.nonzero().tolist()])
    torch.testing.assert_close(learnt, F.cross_entropy(logits[batch.mask], labels))


def test_the_recipe_joins_by_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an entry point that names nothing."""
    study = import_module("study.hard_labels")
    monkeypatch.syspath_prepend(str(study.installed(tmp_path)))
    assert study.KIND in {point.name for point in metadata.entry_points(group="outrider.recipes")}
    assert KINDS.load(study.KIND) is study.HardLabelRecipe


def test_a_run_of_the_command_line_finds_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a PYTHONPATH that holds the metadata but not the module that they name."""
    common = import_module("study.common")
    hard = import_module("study.hard_labels")
    seen: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        seen.update(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(common.subprocess, "run", run)
    common.outrider("train", hard.KIND, plugin=hard.installed(tmp_path))
    folders = seen["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path) in folders
    found = PathFinder.find_spec("study", folders)
    assert found is not None
    assert found.origin == str(BENCHMARKS / "study" / "__init__.py")


def test_the_page_says_what_was_reached_and_what_was_not(tmp_path: Path) -> None:
    """Catches verdicts that do not follow from the numbers, and a study that is silently left out."""
    report = import_module("study.report")
    point = {"step": 3, "tau": 2.0, "parts": {"saved_greedy": 0.2}}
    run = {
        "num_train": 2,
        "num_train_tokens": 9,
        "num_trained_parameters": 10,
        "curve": [{**point, "step": 0}, point],
    }
    head = {"versions": {"outrider": "0", "torch": "2"}, "hardware": {"cpu": "x"}, "command": "c"}
    stops = [row("k=2", 100, 200, 200), row("k=4", 100, 300, 400)]
    stops += [row("acceptance 0.3", 100, 250, 200), row("entropy 0.3", 100, 250, 300)]
    result = {
        **head,
        "settings": {},
        "workloads": {"pair": {"tasks": {"gsm8k": 4}, "most": 12, "rows": stops, "curve": run}},
    }
    (tmp_path / "studies-acceptance-2026-01-01.json").write_text(json.dumps(result))
    lifts = [
        {**row("", 10, 20, 40), "label": "before", "accepted_per_position": [5, 5]},
        {**row("", 10, 21, 40), "label": "after", "accepted_per_position": [6, 5]},
    ]
    lifts += [{**one, "temperature": 1.0} for one in lifts]
    part = {"tasks": {"gsm8k": 4}, "measured": lifts, "curves": {"after": run}}
    distil = {**head, "settings": {"drafter": "draft-model k=5"}, "beginnings": {"pair": part}}
    (tmp_path / "studies-distil-2026-01-01.json").write_text(json.dumps(distil))
    report.render(tmp_path / "page.md", tmp_path)
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "acceptance +33%" in page
    assert "Floor of 15 % for the trained head: met" in page
    assert "+10.00% at T = 0" in page
    assert "10 % relative: met" in page
    for name in ("before-after", "domain", "from-traffic"):
        assert f"'{name}' has no result yet" in page
