"""What is measured: baselines, cells, and what makes no sense."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.configuration import Configuration, parse_configurations
from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import CellKey
from outrider.lab.bench.plan import Plan, baseline_of, default_configurations
from outrider.sampling.params import SamplingParams


def plan(text: str = "ngram, suffix", **changes: Any) -> Plan:
    return Plan(tuple(parse_configurations([text])), **changes)


def test_plain_decoding_joins_by_itself_and_comes_first() -> None:
    assert [one.label for one in plan("ngram, none").all_configurations] == ["none", "ngram"]
    assert [one.label for one in plan("none").all_configurations] == ["none"]


def test_texts_drawn_with_shared_noise_have_a_baseline_that_shares_it() -> None:
    """Else the texts of verifier=gumbel could not be compared with anything."""
    mixed = plan("ngram, suffix verifier=gumbel").all_configurations
    assert [one.label for one in mixed] == [
        "none",
        "none verifier=gumbel",
        "ngram",
        "suffix verifier=gumbel",
    ]
    assert baseline_of(mixed[3]) == mixed[1]
    assert [one.label for one in plan("ngram verifier=gumbel").all_configurations] == [
        "none verifier=gumbel",
        "ngram verifier=gumbel",
    ]


def test_cells_are_curves_not_a_grid() -> None:
    found = plan(
        temperatures=(0.0, 1.0), batch_sizes=(2, 8, 2), context_lengths=(64, 128)
    ).cell_keys(["code", "chat"])
    shapes = [(2, None), (8, None), (2, 64), (2, 128)]
    assert found == [
        CellKey(task, t, size, length)
        for task in ("code", "chat")
        for t in (0.0, 1.0)
        for size, length in shapes
    ]


def test_keys_of_cells_tell_them_apart() -> None:
    found = plan(temperatures=(0.0, 1.0), batch_sizes=(1, 8), context_lengths=(64,)).cell_keys(
        ["code", "chat"]
    )
    assert len({cell.key for cell in found}) == len({cell.label for cell in found}) == len(found)


def test_seeds_differ_by_prompt_and_round_and_not_by_configuration() -> None:
    one = plan(seed=3)
    seeds = {one.params(1.0, prompt, turn).seed for prompt in range(4) for turn in range(4)}
    assert len(seeds) == 16
    assert one.params(1.0, 2, 1) == one.params(1.0, 2, 1)
    assert plan(seed=4).params(1.0, 0, 0).seed not in seeds


def test_params_keep_what_was_asked() -> None:
    one = plan(sampling=SamplingParams(max_tokens=50, top_k=7, ignore_eos=True))
    found = one.params(0.5, 0, 0, max_tokens=20)
    assert (found.temperature, found.top_k, found.ignore_eos, found.max_tokens) == (
        0.5,
        7,
        True,
        20,
    )


def test_a_temperature_that_is_nearly_zero_makes_a_greedy_cell() -> None:
    """Its texts are greedy, so its label and what is compared with it must say so."""
    assert plan(temperatures=(0.0, 1e-8)).cell_keys(["code"]) == plan(
        temperatures=(0.0,)
    ).cell_keys(["code"])


def test_more_time_is_no_other_plan() -> None:
    """A resumed run may be given more time; anything else would mix two measurements."""
    first = plan().identity()
    assert plan(budget_s=9.0, rounds=99).identity() == first
    for change in (
        {"prompts": 3},
        {"seed": 1},
        {"batch_sizes": (2,)},
        {"sampling": SamplingParams(max_tokens=9)},
    ):
        assert plan(**change).identity() != first
    assert json.loads(json.dumps(first))["configurations"] == ["none", "ngram", "suffix"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperatures": ()}, "at least one temperature"),
        ({"batch_sizes": (4, 0)}, "batch sizes must be 1 or more, got 0"),
        ({"context_lengths": (1,)}, "context lengths must be 2 or more"),
        ({"prompts": 0}, "prompts must be 1"),
        ({"rounds": 0}, "rounds must be 1 or more, got 0"),
        ({"budget_s": 0.0}, "budget_s must be more than 0"),
        ({"temperatures": (-1.0,)}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**change)


def test_defaults_can_be_built() -> None:
    for has_draft in (True, False):
        found = default_configurations(has_draft)
        assert all(one.parts().requirements.draft <= has_draft for one in found)
        assert any(one.parts().requirements.draft for one in found) == has_draft
        assert Configuration("ngram", "auto") in found
