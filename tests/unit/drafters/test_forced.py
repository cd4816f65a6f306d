"""Tokens that a grammar forces: drafted for whoever drafts, kept from those who do not, and never
the drafter's own business."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.drafters.forced import with_forced
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.recycling import RecyclingDrafter
from outrider.drafters.none import NoDrafter
from outrider.llm import LLM
from outrider.sampling.bans import Bans
from outrider.sampling.params import SamplingParams
from outrider.sampling.structured import StructuredOutputsParams
from outrider.sampling.thinking import BehindThoughts, ThinkingMarks
from outrider.step import StepFacts
from outrider.types import Draft, TargetOutput, Verdict
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {"identifier": {"const": "abcdefgh"}, "number": {"enum": [1, 2]}},
    "required": ["identifier", "number"],
    "additionalProperties": False,
}
PROMPT = "a record: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("forced") / "m", tiny_llama(257), byte_tokenizer()
    )


class Steps:
    """Counts, per step, what was drafted and what of it was kept."""

    def __init__(self, llm: LLM) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        llm._decoder.observers.append(self)

    def observe(self, facts: StepFacts) -> None:
        self.drafted += facts.drafted
        self.accepted += facts.accepted


def answer(llm: LLM, **params: Any) -> str:
    structured = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    given = SamplingParams(max_tokens=120, structured_outputs=structured, **params)
    return llm.generate([PROMPT], given)[0].text


@pytest.fixture(scope="module")
def plain(model: Path) -> str:
    text = answer(LLM(str(model), drafter="none"))
    assert json.loads(text)["identifier"] == "abcdefgh"
    return text


@pytest.mark.parametrize(
    "drafting",
    [
        {"drafter": "ngram", "num_draft_tokens": 6},
        {"drafter": "suffix", "num_draft_tokens": "auto:6"},
        {"drafter": "ngram", "num_draft_tokens": 7, "drafter_options": {"tree": True}},
        {"drafter": "composite", "drafter_options": {"parts": "suffix,ngram"}},
    ],
    ids=lambda drafting: drafting["drafter"],
)
def test_texts_are_plain_ones_in_fewer_steps(
    model: Path, plain: str, drafting: dict[str, Any]
) -> None:
    """With chains, trees and lengths that are free; without forced tokens no look-up knows a text
    that was never seen."""
    steps = []
    for forces in (True, False):
        llm = LLM(str(model), **drafting)
        if not forces:
            llm._decoder.max_forced = 0
        seen = Steps(llm)
        assert answer(llm) == plain
        steps.append(len(seen.drafted))
    assert steps[0] <= 0.6 * steps[1]


@pytest.mark.parametrize("drafter", ["recycling", "lookahead"])
def test_who_learns_from_each_node_keeps_them_all(model: Path, plain: str, drafter: str) -> None:
    """Catches answers to forced tokens that are taken for answers to the drafter's own nodes."""
    with LLM(str(model), drafter=drafter, num_draft_tokens=7) as llm:
        seen: list[tuple[int, int]] = []
        commit = llm._decoder.drafter.commit

        def watch(rows: Any, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
            seen.append((draft.num_nodes + 1, output.logits.shape[1]))
            commit(rows, draft, verdict, output)

        llm._decoder.drafter.commit = watch  # type: ignore[method-assign]
        assert answer(llm) == plain
    assert all(columns == width for width, columns in seen)


def test_stop_strings_end_inside_forced_tokens(model: Path, plain: str) -> None:
    llm = LLM(str(model), drafter="ngram", num_draft_tokens=6)
    assert answer(llm, stop=["cde"]) == plain[: plain.index("cde")]


def test_a_limit_ends_inside_forced_tokens(model: Path, plain: str) -> None:
    llm = LLM(str(model), drafter="ngram", num_draft_tokens=6)
    params = SamplingParams(
        max_tokens=7,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    )
    assert llm.generate([PROMPT], params)[0].text == plain[:7]


def test_sampled_texts_with_a_seed_are_plain_ones(model: Path) -> None:
    """By the verifier whose texts depend on no draft."""
    options = {"temperature": 1.0, "seed": 3}
    texts = {
        answer(LLM(str(model), drafter=drafter, verifier="gumbel"), **options)
        for drafter in ("none", "ngram")
    }
    assert len(texts) == 1


def test_who_drafts_nothing_gets_nothing(model: Path) -> None:
    llm = LLM(str(model), drafter="none")
    llm._decoder.max_forced = 6
    seen = Steps(llm)
    answer(llm)
    assert set(seen.drafted) == {0}


def test_rows_without_room_or_grammar_are_left_alone() -> None:
    """A step of them costs nothing: the draft is the drafter's own object."""
    own = Draft.empty(1)
    assert with_forced(own, NoDrafter(), [], 6).draft is own  # type: ignore[arg-type]


def test_the_control_learns_of_the_drafters_own_tokens_alone(model: Path) -> None:
    """Catches an automatic length that takes forced tokens for the drafter's hits."""
    llm = LLM(str(model), drafter="ngram", num_draft_tokens="auto:6")
    seen: list[StepFacts] = []
    control: Any = llm._decoder.control
    observe = control.observe

    def watch(facts: StepFacts) -> None:
        seen.append(facts)
        observe(facts)

    control.observe = watch
    whole = Steps(llm)
    answer(llm)
    forced = [facts for facts in seen if facts.has_forced]
    assert forced
    assert sum(sum(facts.drafted) for facts in seen) < sum(whole.drafted)
    assert sum(sum(facts.accepted) for facts in seen) < sum(whole.accepted)


@pytest.mark.parametrize(
    ("part", "drafting"),
    [
        ("ngram", {"drafter": "ngram"}),
        ("suffix", {"drafter": "composite", "drafter_options": {"parts": "suffix,ngram"}}),
    ],
    ids=["alone", "composite"],
)
def test_forced_tokens_are_a_part_of_the_drafts(
    model: Path, plain: str, part: str, drafting: dict[str, Any]
) -> None:
    """All parts together are the row's counters. A row without a grammar has no such part."""
    # of the answer's end, which a look-up then finds
    prompt = f"{plain[-12:]} {PROMPT}"
    with LLM(str(model), num_draft_tokens=6, **drafting) as llm:
        structured = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        formed = SamplingParams(max_tokens=120, structured_outputs=structured)
        with_form, free = llm.generate([prompt, prompt], [formed, SamplingParams(max_tokens=60)])
    parts = with_form.stats.parts
    assert {part, "forced"} <= set(parts) <= {"suffix", "ngram", "forced"}
    assert sum(counts.drafted for counts in parts.values()) == with_form.stats.drafted
    assert sum(counts.accepted for counts in parts.values()) == with_form.stats.accepted
    assert parts["forced"].accepted > 20
    assert set(free.stats.parts) <= {"suffix", "ngram"}
    assert bool(free.stats.parts) == (drafting["drafter"] == "composite")


class _Form:
    """A grammar that forces one token, unless the path has it."""

    is_over = False

    def allowed(self, paths: Any) -> Any:
        raise AssertionError("not asked")

    def forced(self, path: Any, most: int) -> list[int]:
        return [] if 7 in path else [7]

    def commit(self, tokens: Any) -> None:
        """Nothing."""


def test_nothing_is_forced_before_thoughts_end() -> None:
    """The grammar begins with the answer; the tokens of thoughts are not its own."""
    marks = ThinkingMarks(
        opening=("<t>",), closing=("</t>",), opening_id=1, closing_ids=(2,), is_open=True
    )
    row = BehindThoughts(10, marks, _Form())
    assert row.forced([], 4) == []
    assert row.forced([5, 7], 4) == []
    assert row.forced([5, 7, 2], 4) == [7]
    assert row.forced([5, 2, 7], 4) == []
    row.commit([5, 2])
    assert row.forced([], 4) == [7]


def test_bans_leave_what_is_forced() -> None:
    """They stand around the grammar, which alone forces; what they forbid is rejected."""
    assert Bans(10, min_tokens=3, ends=[9], inner=_Form()).forced([], 4) == [7]
    assert Bans(10, min_tokens=3, ends=[9]).forced([], 4) == []


class _Closed(_Form):
    """The same, and forbids every other token."""

    def allowed(self, paths: Any) -> Any:
        return torch.arange(10).expand(len(paths), -1) == 7


@pytest.mark.parametrize("keeps_all", [False, True])
def test_a_forbidden_token_goes_unless_its_drafter_learns_from_it(keeps_all: bool) -> None:
    """Catches answers to forced tokens that a drafter takes for answers to its own."""
    drafter: Any = SimpleNamespace(
        drafts_for=lambda _: True, may_lose_nodes=lambda _: not keeps_all, name_for=lambda _: "own"
    )
    row: Any = SimpleNamespace(constraint=_Closed(), clamp_draft=lambda size: size)
    own = Draft(torch.tensor([[3, 4]]), torch.tensor([2]))
    grown = with_forced(own, drafter, [row], 4)  # type: ignore[arg-type]
    assert grown.draft.lists == (([[3, 4]], [2]) if keeps_all else ([[7]], [1]))
    assert grown.draft.parts == ([["own", "own"]] if keeps_all else [["forced"]])


def test_learners_from_each_node_are_known() -> None:
    assert not RecyclingDrafter.__new__(RecyclingDrafter).may_lose_nodes(0)
    assert NgramDrafter.__new__(NgramDrafter).may_lose_nodes(0)
