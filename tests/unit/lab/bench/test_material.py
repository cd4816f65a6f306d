"""From a workload to token ids: filling up, cutting, grouping."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.configuration import Configuration
from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import CellKey
from outrider.lab.bench.plan import Plan, filled, gather, groups, runnable_cells
from outrider.lab.workload.prompts import PreparedPrompt
from outrider.lab.workload.types import Workload, WorkloadRequest
from outrider.sampling.params import SamplingParams
from tests.unit.lab.bench.fakes import fake_tokenizer


def prompt(number: int, *tokens: int) -> PreparedPrompt:
    return PreparedPrompt(WorkloadRequest(str(number), prompt="-"), list(tokens), 8, number)


def workload(*tasks: str, words: str = "5 6 7", **changes: Any) -> Workload:
    return Workload(
        "w",
        tuple(
            WorkloadRequest(f"r{n}", prompt=words, task=task, **changes)
            for n, task in enumerate(tasks)
        ),
    )


def plan(**changes: Any) -> Plan:
    return Plan((Configuration(),), **{"sampling": SamplingParams(max_tokens=8), **changes})


def test_the_filler_is_what_stands_before_in_the_ring_of_prompts() -> None:
    """Prompt 1 of three: the begin token, the end of ... 2, 0, 2, 0, then its own."""
    three = [prompt(0, 99, 1, 2), prompt(1, 99, 3), prompt(2, 99, 4, 5, 6)]
    assert filled(three, 1, 7, first_token=99).tokens == [99, 4, 5, 6, 1, 2, 3]
    assert filled(three, 1, 9, first_token=99).tokens == [99, 1, 2, 4, 5, 6, 1, 2, 3]


def test_a_long_prompt_keeps_its_end_and_its_beginning_token() -> None:
    assert filled([prompt(0, 99, 1, 2, 3, 4)], 0, 3, first_token=99).tokens == [99, 3, 4]
    assert filled([prompt(0, 1, 2, 3, 4)], 0, 3, first_token=None).tokens == [2, 3, 4]


def test_a_lonely_prompt_is_filled_with_itself() -> None:
    assert filled([prompt(0, 99, 1, 2)], 0, 6, first_token=99).tokens == [99, 2, 1, 2, 1, 2]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(2, 40),
    st.booleans(),
)
def test_filled_prompts_have_the_length_and_end_with_their_own_text(
    bodies: list[list[int]], length: int, begins: bool
) -> None:
    prompts = [
        prompt(number, *([99] if begins else []), *body) for number, body in enumerate(bodies)
    ]
    for number, body in enumerate(bodies):
        found = filled(prompts, number, length, first_token=99 if begins else None).tokens
        assert len(found) == length
        assert found.count(99) == begins
        assert found[-1:] == body[-1:]
        assert found[-len(body) :] == body or length <= len(body) + begins


def test_the_first_of_every_task_are_taken() -> None:
    found = gather(workload("a", "b", "a", "a", "b"), fake_tokenizer(), plan(prompts=2), context=64)
    assert {task: [one.request.id for one in mine] for task, mine in found.by_task.items()} == {
        "a": ["r0", "r2"],
        "b": ["r1", "r4"],
    }
    assert [one.number for one in found.by_task["a"]] == [0, 1]
    assert found.by_task["a"][0].tokens == [0, 5, 6, 7]


def test_a_log_that_asked_for_fewer_tokens_gets_fewer() -> None:
    found = gather(workload("a", max_tokens=3), fake_tokenizer(), plan(), context=64)
    assert found.by_task["a"][0].max_tokens == 3


def test_what_does_not_fit_is_refused_or_replaced() -> None:
    many = Workload(
        "w",
        (WorkloadRequest("long", prompt="5 " * 60, task="a"), *workload("a", "a", "a").requests),
    )
    with pytest.raises(ConfigError, match="long"):
        gather(many, fake_tokenizer(), plan(prompts=2), context=64)
    found = gather(many, fake_tokenizer(), plan(prompts=2), context=64, on_bad="skip")
    assert [one.request.id for one in found.by_task["a"]] == ["r0", "r1"]
    assert "1 prompt left out" in found.notes[0]


def test_a_bad_prompt_that_is_not_asked_for_is_nobodys_business() -> None:
    many = Workload(
        "w", (*workload("a", "a").requests, WorkloadRequest("long", prompt="5 " * 60, task="a"))
    )
    assert len(gather(many, fake_tokenizer(), plan(prompts=2), context=64).by_task["a"]) == 2


def test_context_lengths_must_leave_room_for_the_answer() -> None:
    with pytest.raises(ConfigError, match="--context-lengths up to 56"):
        gather(workload("a"), fake_tokenizer(), plan(context_lengths=(32, 57)), context=64)
    found = gather(workload("a", "a"), fake_tokenizer(), plan(context_lengths=(56,)), context=64)
    cells = [CellKey("a", 0.0, 1, None), CellKey("a", 0.0, 1, 56)]
    assert [[len(one.tokens) for one in found.prompts(cell)] for cell in cells] == [
        [4, 4],
        [56, 56],
    ]


def test_tasks_with_too_few_prompts_for_a_batch_are_left_out_by_name() -> None:
    found = gather(workload("a", "a", "b"), fake_tokenizer(), plan(), context=64)
    keys, notes = runnable_cells(plan(batch_sizes=(1, 2)), found)
    assert [(key.task, key.batch_size) for key in keys] == [("a", 1), ("a", 2), ("b", 1)]
    assert notes == ["b: 1 prompts are no batch of 2; left out"]
    with pytest.raises(ConfigError, match="raise --limit"):
        runnable_cells(plan(batch_sizes=(4,)), found)


def test_groups_of_one_keep_the_order() -> None:
    prompts = [prompt(number, 1) for number in range(5)]
    assert groups(prompts, 1, turn=3, seed=0) == [[one] for one in prompts]


def test_batches_are_whole_drawn_anew_and_the_same_for_everybody() -> None:
    prompts = [prompt(number, 1) for number in range(7)]
    rounds = [groups(prompts, 3, turn, seed=0) for turn in range(20)]
    assert all([len(group) for group in found] == [3, 3] for found in rounds)
    assert all(len({one.number for group in found for one in group}) == 6 for found in rounds)
    assert groups(prompts, 3, 4, seed=0) == rounds[4]
    assert len({tuple(one.number for group in found for one in group) for found in rounds}) > 10
    missing = Counter(
        ({*range(7)} - {one.number for group in found for one in group}).pop() for found in rounds
    )
    assert len(missing) > 3, "always the same prompt is left over"
