"""The command after a report can be pasted: the model and the settings of the run, nothing else."""

from __future__ import annotations

import shlex

import pytest

from outrider.lab.result import Result
from outrider.report.document import CodeBlock
from outrider.report.next_step import DRAFTING, PROMPTS, command
from outrider.report.render import render
from tests.unit.report import results

TYPED = (
    "outrider certify t --draft 'my draft' --drafter 'draft-model k=5' --device=cpu --prompts p "
    "--model-options 'dtype=float32 lossy=false' --out c.json --limit 3"
)


def codes(result: Result) -> list[str]:
    return [block.text for block in render(result).blocks if isinstance(block, CodeBlock)]


def test_options_are_taken_over_by_name() -> None:
    result = results.certificate(command=TYPED)
    assert command(result, "serve", "t", also=DRAFTING) == (
        "outrider serve t --draft 'my draft' --drafter 'draft-model k=5' --device cpu --dtype "
        "float32 --no-lossy"
    )
    assert command(result, "tune", "a b", ["--limit", "9"], PROMPTS) == (
        "outrider tune 'a b' --draft 'my draft' --device cpu --prompts p --model-options "
        "dtype=float32 --limit 9"
    )


@pytest.mark.parametrize("typed", ["", "outrider bench it's", "outrider bench t --draft"])
def test_a_command_that_says_nothing_gives_the_target_alone(typed: str) -> None:
    result = results.certificate(command=typed)
    assert shlex.split(command(result, "serve", "t"))[:3] == ["outrider", "serve", "t"]


def test_a_certificate_leads_on_by_its_verdict() -> None:
    assert codes(results.certificate(command=TYPED)) == [
        "outrider serve demo --draft 'my draft' --drafter 'draft-model k=5' --device cpu --dtype "
        "float32 --no-lossy"
    ]
    assert codes(results.failed_certificate()) == [
        "outrider certify demo --model-options runtime=eager"
    ]
    doubtful = results.certificate(verdict="inconclusive", command="outrider certify demo")
    assert codes(doubtful) == ["outrider certify demo --limit 32 --samples 20000"]


def test_an_explanation_leads_to_a_measurement() -> None:
    asked = results.explanation(command="outrider explain demo --prompts p --drafter x")
    assert codes(asked) == ["outrider tune demo --prompts p"]
    lost = asked.advice[0].model_copy(update={"tone": "bad"})
    assert codes(asked.model_copy(update={"advice": [lost]})) == [
        "outrider bench demo --prompts p --drafters 'draft-model k=3'"
    ]
