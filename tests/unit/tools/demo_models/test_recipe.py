"""The recipe end to end on a tiny configuration, and that an interrupted run loses nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_models import card, corpus, recipe, train
from tools.demo_models.evaluate import count_steps
from tools.demo_models.optimizer import BatchedMuon, orthogonalise, warmup_stable_decay

PLAN = train.Plan(steps=6, rows=4, length=32, compile=False, longer_every=(3,))
SHAPE = train.Shape(hidden=32, layers=2, heads=2, kv_heads=1, mlp=48, vocabulary=512)


def _data(folder: Path) -> Path:
    """A few documents in the layout of `shared/data`."""
    texts = {
        "gsm8k/train.jsonl": [
            {"question": f"What is {n}+{n}?", "answer": f"{n}+{n} = {2 * n}\n#### {2 * n}"}
            for n in range(200)
        ],
        "gsm8k/test.jsonl": [{"question": "What is 1+2?", "answer": "1+2 = 3\n#### 3"}],
        "math/problems.jsonl": [
            {"problem": f"Find ${n}^2$.", "solution": f"$\\boxed{{{n * n}}}$"} for n in range(200)
        ],
        "code/python.jsonl": [
            {"text": f"def f{n}(x):\n    return x + {n}\n" * 12} for n in range(200)
        ],
    }
    for name, rows in texts.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return folder


def _recipe(tmp_path: Path, out: str, **changes: object) -> recipe.Recipe:
    made = recipe.Recipe(
        data=_data(tmp_path / "data"),
        out=tmp_path / out,
        target_plan=PLAN,
        draft_plan=PLAN,
        target_shape=SHAPE,
        draft_shape=replace(SHAPE, layers=1),
        num_generated=60,
        num_validation=10,
        num_problems=2,
    )
    return replace(made, **changes)


@pytest.mark.slow
def test_recipe_end_to_end_and_resume_gives_the_same_weights(tmp_path: Path) -> None:
    """Catches state missing from the checkpoint: momentum, step, schedule, or the reader's
    position."""
    whole = _recipe(tmp_path, "whole")
    recipe.run(whole)
    cut = replace(PLAN, stop_after=3)
    recipe.run(
        _recipe(tmp_path, "cut", target_plan=cut, draft_plan=cut), ("tokenizer", "corpus", "target")
    )
    assert torch.load(tmp_path / "cut" / "target.pt")["at"]["step"] == 3
    recipe.run(_recipe(tmp_path, "cut"), ("tokenizer", "corpus", "target"))
    recipe.run(_recipe(tmp_path, "cut", draft_plan=cut), ("draft",))
    recipe.run(_recipe(tmp_path, "cut"), ("draft", "evaluate"))
    for name in ("target", "draft"):
        first, second = (
            AutoModelForCausalLM.from_pretrained(tmp_path / out / name).state_dict()
            for out in ("whole", "cut")
        )
        assert all(torch.equal(first[key], second[key]) for key in first), name
        assert len(AutoTokenizer.from_pretrained(tmp_path / "whole" / name)) == SHAPE.vocabulary
    report = json.loads((tmp_path / "cut" / "evaluation.json").read_text())
    assert set(report["target_loss"]) == set(corpus.SOURCES)
    assert report["target_training"]["step"] == 6


def test_rows_and_length_keep_the_tokens_of_a_step() -> None:
    plan = train.Plan(steps=1, rows=24, length=256, longer_every=(8, 32))
    shapes = [plan.rows_and_length(step) for step in range(32)]
    assert {rows * length for rows, length in shapes} == {24 * 256}
    assert {length for _, length in shapes} == {256, 512, 1024}


@pytest.mark.parametrize(
    ("matches", "chain", "steps"),
    [
        ([True] * 6, 5, 1),
        ([True] * 7, 5, 2),
        ([False] * 4, 5, 4),
        ([True, False, True, True], 3, 2),
        ([], 5, 0),
        ([True] * 4, 1, 2),
    ],
)
def test_count_steps_is_the_greedy_chain(matches: list[bool], chain: int, steps: int) -> None:
    """Worked by hand: a pass keeps the run of matches, at most `chain`, and adds the target's own
    token."""
    assert count_steps(matches, chain) == steps


def test_muon_updates_are_nearly_orthogonal_and_batched_equals_single() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 24, 48, generator=generator)
    spectrum = torch.linalg.svdvals(orthogonalise(matrices, 5).float())
    assert spectrum.min() > 0.4
    assert spectrum.max() < 1.4
    together = [torch.nn.Parameter(m.clone()) for m in matrices]
    for parameter, gradient in zip(together, matrices, strict=True):
        parameter.grad = gradient.clone()
    BatchedMuon(together).step()
    for parameter, gradient in zip(together, matrices, strict=True):
        alone = torch.nn.Parameter(gradient.clone())
        alone.grad = gradient.clone()
        BatchedMuon([alone]).step()
        torch.testing.assert_close(parameter, alone, atol=1e-3, rtol=1e-2)


def test_schedule_warms_up_holds_and_decays() -> None:
    assert warmup_stable_decay(0, 0.0, warmup_steps=10) == pytest.approx(0.1)
    assert warmup_stable_decay(50, 0.3, warmup_steps=10) == 1.0
    assert warmup_stable_decay(50, 1.0, warmup_steps=10) == pytest.approx(0.02)


def test_card_states_what_was_measured() -> None:
    """Catches a card whose numbers are typed: every one of these comes from the report."""
    guesses = {"alpha": 0.81, "tau_k3": 2.51, "tau_k5": 3.13, "tau_k8": 3.57}
    at = {"step": 1234, "num_tokens": 5_600_000, "minutes": 77.0, "loss": 1.23}
    report = {
        "num_problems_per_grade": 100,
        "accuracy_by_grade": {"1": 0.91},
        "gsm8k_test_accuracy": 0.02,
        "num_gsm8k_test": 50,
        "target_loss": {"grade1": 0.71},
        "draft_loss": {"grade1": 0.93},
        "draft_parameters": 1_234_567,
        "draft_on_generated": {"grade1": guesses},
        "draft_on_gsm8k_test": guesses,
        "target_training": at,
        "draft_training": at,
    }
    text = card.render(report, corpus.mix(1.0), "Some history.", "- a limit")
    for number in (
        "91%",
        "2%",
        "3.13",
        "0.71",
        "0.93",
        "1.2M",
        "1234",
        "5.6M",
        "77",
        "Some history.",
        "- a limit",
    ):
        assert number in text
    assert not re.search(r"[{}]", text)
