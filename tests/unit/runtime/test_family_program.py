"""Programs that ship: they are those that transformers' code gives when it is recorded anew."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outrider.runtime.family_program import FOLDER, Sizes, families, family, made, program_of
from outrider.runtime.program_text import read, written
from tools.family_programs import FAMILIES, LAYERS, SIZES, FamilyData, _start, as_text


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_ships_is_what_transformers_code_does(model_type: str) -> None:
    """Catches a transformers or a lowering that has changed since: `python -m tools.family_programs`
    writes the data anew."""
    short, long = (_start(FAMILIES[model_type], count) for count in LAYERS)
    data = FamilyData(short, long).data(model_type)
    stored = json.loads((FOLDER / f"{model_type}.json").read_text(encoding="utf-8"))
    for part in data.keys() - {"transformers", "config"}:
        assert stored[part] == json.loads(json.dumps(data[part])), part
    for start, layers in ((short, LAYERS[0]), (long, LAYERS[1])):
        program = program_of(stored, replace(SIZES, layers=layers))
        for part, entry in program.items():
            assert json.loads(json.dumps(entry)) == start["program"][part], part


def test_every_family_has_its_data() -> None:
    assert families() == FAMILIES.keys()
    for name in families():
        text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert as_text(json.loads(text)) == text, "written by the tool, not by hand"
        assert family(name)["model_type"] == name


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_program_of_any_size_is_a_whole_one(name: str) -> None:
    """Every value has the index that operations call it by, in order; it is read and written."""
    sizes = Sizes(7, 96, 160, 6, 2, 16, 100, 1e-6)
    text = json.loads(json.dumps(program_of(family(name), sizes)))
    program = read(text)
    made_at = [op.output.value for op in program.body if op.output is not None]
    assert sorted(set(made_at)) == list(dict.fromkeys(made_at)), "one after the other"
    views = [view for op in (*program.body, *program.head) for view in op.inputs]
    assert max(view.value for view in views) < len(program.values)
    layers = {op.layer for op in program.body if op.code.name == "STORE"}
    assert layers == set(range(7))
    assert program.logits is not None
    assert program.logits.cols == 100
    assert json.loads(json.dumps(written(program))) == text


def test_names_and_steps_by_hand() -> None:
    """The step counts from the second layer, which has the number 1."""
    entry = ["hidden", {"+": [44, 40]}, "a.{layer}.b", [0, "half"], False]
    sizes = {"hidden": 8, "half": 2}
    assert made(entry, sizes, 1) == [8, 44, "a.1.b", [0, 2], False]
    assert made(entry, sizes, 3) == [8, 124, "a.3.b", [0, 2], False]


@pytest.mark.parametrize(
    ("change", "is_covered"),
    [({}, True), ({"layers": 1}, False), ({"kv_heads": 1}, False), ({"head": 15}, False)],
)
def test_models_that_the_data_does_not_describe(change: dict[str, int], is_covered: bool) -> None:
    """Of one head, views have no steps; of one layer, there is none to repeat."""
    assert replace(SIZES, **change).is_covered == is_covered
