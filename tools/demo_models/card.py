"""The model card, written from the measurements: no number in it is typed by hand.

`python -m tools.demo_models.recipe --stage card` renders `README.md` beside the exported models
from `evaluation.json`.
"""

import json
from pathlib import Path

CARD = """\
# The embedded demo pair

A Llama-type target (14.2M parameters: hidden 384, 8 layers, 6 heads, 2 KV heads, MLP 1024) and draft
({draft_size}: hidden 128, 3 layers), bf16, one 4096-token byte-level BPE tokenizer with every digit a
token (`<s>` = 0, `</s>` = 1), context 1024, chat template included. Both load with
`AutoModelForCausalLM.from_pretrained`; in a checkout the target's weights are `weights.zip` until
`outrider.demo.demo_paths()` is called.

**For:** showing and testing speculative decoding on real trained weights with no download; reasoning
whose answers a program can check (`tools.demo_models.problems.is_correct`), with and without speculation.
**Not for:** answering anybody's questions. It knows the word problems of `problems.py` and the look of
GSM8K, MATH and Python text, nothing else.

Format: `<s>Question: ...\\nAnswer: ...</s>`; solutions are short steps such as `Tom has 12+7=19 pens.`
and end in `#### N`. The chat template maps turns onto exactly that; a system message goes in front of the
first question.

## Made from

| source | share of tokens at the end | licence |
|---|---|---|
| generated problems, grades 1-5, and bare equations | {generated_share:.0%} | ours |
| GSM8K train split | {gsm8k_share:.0%} | MIT |
| MATH, 4000 problems | {math_share:.0%} | MIT |
| TheAlgorithms/Python | {python_share:.0%} | MIT |

Test splits of GSM8K, HumanEval and Spec-Bench were not trained on. Generated questions are held out by a
hash of the question.

    python -m tools.demo_models.recipe --data ../shared/data --out runs/demo --minutes 75

{history}
| | steps | tokens | minutes, pauses included | training loss at the end |
|---|---|---|---|---|
{training}

## Measured

`python -m tools.demo_models.recipe --data ../shared/data --out runs/demo --stage evaluate`, greedy, bf16,
CPU.

| held-out problems, {num_problems} each | target solves | τ, k = 3 | k = 5 | k = 8 | single guesses right |
|---|---|---|---|---|---|
{grades}

GSM8K test, first {num_gsm8k}: {gsm8k_accuracy:.0%} solved; τ there {gsm8k_tau}.

τ = tokens kept per target pass, bonus token included, greedy chain of k drafted tokens; computed exactly
from the target's own greedy text (`evaluate.py`), not timed.

| loss on held-out text, nats a token | {source_names} |
|---|{source_rule}|
| target | {target_losses} |
| draft | {draft_losses} |

## Limits

{limits}
"""


def render(report: dict, shares: dict[str, float], history: str, limits: str) -> str:
    """The card's text; `history` and `limits` are prose of whoever ran the recipe."""
    generated = sum(share for name, share in shares.items() if name.startswith(("grade", "drill")))
    return CARD.format(
        draft_size=f"{report['draft_parameters'] / 1e6:.1f}M",
        generated_share=generated,
        gsm8k_share=shares["gsm8k"],
        math_share=shares["math"],
        python_share=shares["python"],
        history=history,
        training="\n".join(
            _training_row(name, report[f"{name}_training"]) for name in ("target", "draft")
        ),
        num_problems=report["num_problems_per_grade"],
        grades="\n".join(_grade_row(report, grade) for grade in report["accuracy_by_grade"]),
        num_gsm8k=report["num_gsm8k_test"],
        gsm8k_accuracy=report["gsm8k_test_accuracy"],
        gsm8k_tau=_taus(report["draft_on_gsm8k_test"]),
        source_names=" | ".join(report["target_loss"]),
        source_rule="|".join("---" for _ in report["target_loss"]),
        target_losses=" | ".join(f"{loss:.2f}" for loss in report["target_loss"].values()),
        draft_losses=" | ".join(f"{loss:.2f}" for loss in report["draft_loss"].values()),
        limits=limits,
    )


def _training_row(name: str, at: dict[str, float]) -> str:
    return f"| {name} | {at['step']} | {at['num_tokens'] / 1e6:.1f}M | {at['minutes']:.0f} | {at['loss']:.2f} |"


def _grade_row(report: dict, grade: str) -> str:
    guesses = report["draft_on_generated"][f"grade{grade}"]
    taus = " | ".join(f"{guesses[f'tau_k{k}']:.2f}" for k in (3, 5, 8))
    return f"| grade {grade} | {report['accuracy_by_grade'][grade]:.0%} | {taus} | {guesses['alpha']:.0%} |"


def _taus(guesses: dict[str, float]) -> str:
    return ", ".join(f"{guesses[f'tau_k{k}']:.2f} at k = {k}" for k in (3, 5, 8))


def write(
    evaluation: Path, path: Path, shares: dict[str, float], history: str, limits: str
) -> None:
    report = json.loads(evaluation.read_text(encoding="utf-8"))
    path.write_text(render(report, shares, history, limits), encoding="utf-8")
