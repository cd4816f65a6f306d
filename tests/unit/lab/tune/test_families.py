"""What is tried: everything that there is, each once, and nothing that does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.lab.tune.families import default_space, exit_layers, up_to
from outrider.lab.tune.space import Family, TrainedHead, TuneRequest
from outrider.sampling.params import SamplingParams

HEADS = (
    TrainedHead(kind="eagle", folder="runs/eagle"), TrainedHead(kind="eagle3", folder="runs/eagle3"),
    TrainedHead(kind="medusa", folder="runs/medusa", max_chain=3),
    TrainedHead(kind="block", folder="runs/block", max_chain=7, confidence=True, markov=True),
)  # fmt: skip


def space_of(*, temperature: float = 0.0, **wishes: Any) -> list[Family]:
    return default_space(TuneRequest(SamplingParams(temperature=temperature), **wishes))


def labels(**options: Any) -> list[str]:
    return [family.label for family in space_of(**{"has_draft": True, **options})]


@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("heads", [(), HEADS])
def test_every_family_is_a_configuration_that_exists(
    has_draft: bool, temperature: float, heads: tuple[TrainedHead, ...], tmp_path: Path
) -> None:
    """Guards against options that drafters do not have, and against one configuration that is tried
    twice."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text to copy from")
    space = space_of(
        has_draft=has_draft, heads=heads, temperature=temperature, corpus=str(corpus), num_layers=8
    )
    for family in space:
        parts = family.largest.parts()
        assert parts.requirements.draft <= has_draft
        assert family.nested is not parts.requirements.trees
        assert list(family.sizes) == sorted(set(family.sizes))
    assert len({family.label for family in space}) == len(space)
    assert any("verifier=gumbel" in family.label for family in space) == (
        temperature > 0 and bool(has_draft or heads)
    )


def test_trained_heads_compete() -> None:
    found = labels(heads=HEADS)
    assert {
        "eagle head=runs/eagle",
        "eagle3 head=runs/eagle3",
        "medusa head=runs/medusa",
        "block head=runs/block",
    } <= set(found)
    assert "eagle3 tree=best-first head=runs/eagle3" in found, "EAGLE-2's trees"
    assert "medusa tree=medusa head=runs/medusa" in found
    assert "block stop=confidence head=runs/block" in found
    assert (
        labels(heads=(TrainedHead(kind="block", folder="b", max_chain=7),)).count(
            "block stop=confidence head=b"
        )
        == 0
    )


def test_a_head_bounds_its_chains() -> None:
    sizes = {f.label: f.sizes for f in space_of(has_draft=False, heads=HEADS)}
    assert sizes["medusa head=runs/medusa"] == (1, 2, 3)
    assert sizes["block head=runs/block"][-1] == 7
    assert sizes["eagle3 head=runs/eagle3"][-1] == 8
    assert [up_to(max_chain) for max_chain in (1, 8, 10, 16)] == [
        [1],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 7, 8, 10],
        [1, 2, 3, 4, 5, 6, 7, 8, 12, 16],
    ]


def test_heads_that_come_with_the_target_need_no_folder() -> None:
    assert "eagle3" in labels(heads=(TrainedHead(kind="eagle3", folder=""),))


def test_rules_and_exits_that_were_trained() -> None:
    trained = (
        TrainedHead(kind="acceptance", folder="runs/stop"),
        TrainedHead(kind="early-exit", folder="runs/exit"),
    )
    found = labels(heads=trained, own_weights=False)
    assert "draft-model stop=acceptance acceptance_head=runs/stop" in found
    assert [one for one in found if one.startswith("early-exit")] == [
        "early-exit head=runs/exit"
    ], "not one of the own weights"


def test_several_exits_are_tried() -> None:
    assert [one for one in labels(num_layers=32) if one.startswith("early-exit")] == [
        "early-exit exit_layer=8",
        "early-exit exit_layer=16",
        "early-exit exit_layer=24",
    ]
    assert [exit_layers(count) for count in (0, 1, 2, 3, 4)] == [[], [], [1], [1, 2], [1, 2, 3]]
    assert not any(
        one.startswith(("early-exit", "quantised"))
        for one in labels(num_layers=32, own_weights=False)
    )


@pytest.mark.parametrize(
    ("temperature", "trees"),
    [
        (0.0, {"tree=best-first", "tree=sequoia"}),
        (
            0.3,
            {
                "tree=best-first",
                "tree=sequoia",
                "tree=sequoia sample_from=0.0",
                "tree=best-first verifier=gumbel",
            },
        ),
        (
            1.0,
            {
                "tree=best-first sample_from=99.0",
                "tree=sequoia sample_from=99.0",
                "tree=sequoia",
                "tree=best-first verifier=gumbel",
            },
        ),
    ],
)
def test_nodes_are_placed_and_drawn(temperature: float, trees: set[str]) -> None:
    """Where rows are sampled both modes take part. A best-first tree of drawn nodes is none: it
    would be sequoia's."""
    found = {
        one.removeprefix("draft-model ")
        for one in labels(temperature=temperature)
        if one.startswith("draft-model tree")
    }
    assert found == trees


def test_trees_are_larger_where_wide_passes_are_cheap() -> None:
    def trees(**options: bool) -> set[tuple[int, ...]]:
        space = space_of(has_draft=True, heads=HEADS, temperature=1.0, **options)
        return {
            family.sizes for family in space if not family.nested and family.label != "lookahead"
        }

    assert trees() == {(7, 15)}
    assert trees(on_accelerator=True) == {(15, 31, 63)}


def test_without_trees_everything_is_a_chain() -> None:
    space = space_of(has_draft=True, heads=HEADS, temperature=1.0, trees=False, num_layers=8)
    assert all(family.nested and not family.largest.parts().requirements.trees for family in space)


def test_look_up_joins_the_first_head_where_there_is_no_draft_model() -> None:
    whole = "composite parts=eagle+suffix options=eagle.head=runs/eagle"

    def found(temperature: float) -> list[str]:
        every = labels(has_draft=False, heads=HEADS, temperature=temperature)
        return [one for one in every if one.startswith("composite")]

    assert found(1.0) == [whole]
    assert found(0.0) == [
        whole,
        "composite parts=eagle+suffix options='eagle.head=runs/eagle;eagle.tree=best-first'",
    ]


def test_only_what_is_named() -> None:
    assert set(labels(heads=HEADS, drafters=frozenset({"block", "ngram"}))) == {
        "block head=runs/block",
        "block stop=confidence head=runs/block",
        "block tree=best-first head=runs/block",
        "ngram",
    }


def test_naming_one_does_not_undo_another_wish() -> None:
    """--no-trees and --no-own-weights would be ignored; what is left out is then refused by name."""
    assert labels(drafters=frozenset({"recycling", "ngram"}), trees=False) == ["ngram"]
    assert labels(
        drafters=frozenset({"early-exit", "quantised", "ngram"}), own_weights=False, num_layers=8
    ) == ["ngram"]


def test_some_take_part_only_when_they_are_named() -> None:
    assert not any(one.startswith("universal") for one in labels())
    assert labels(drafters=frozenset({"universal"})) == ["universal"]
    assert labels(drafters=frozenset({"universal"}), has_draft=False) == []
    assert labels(drafters=frozenset({"eagle3", "none"})) == []
    with pytest.raises(ConfigError, match="Did you mean 'medusa'"):
        labels(drafters=frozenset({"medussa"}))
