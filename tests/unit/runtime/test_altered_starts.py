"""Kept starts that somebody altered, their sums right: the executor must not be given a plan that
leaves its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cache import cache_folder
from outrider.kv import LayerShape
from outrider.runtime import library
from outrider.runtime.blocks import NotLoweredError
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Op, Program
from outrider.runtime.program_check import check_program
from outrider.runtime.run import tensors_of
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.unit.runtime.families import make as family
from tests.unit.runtime.test_kept import TEMPLATE, a_gguf, start

QUICK = 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    "seeds", [(0, QUICK), pytest.param((QUICK, 400), marks=pytest.mark.nightly)]
)
def test_no_altered_start_ends_the_process(
    kind: str,
    seeds: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    library_path: Path,
) -> None:
    """Each one is refused and made anew, or runs."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    if library.find(cache_folder()) != library_path:
        pytest.skip("the library is built by each process here")
    if kind == "gguf":
        model = a_gguf(tmp_path)
    else:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = TEMPLATE
        model = save_checkpoint(
            tmp_path / "model", tiny_llama(len(tokenizer), sharpness=4.0).bfloat16(), tokenizer
        )
    start(model)
    command = [
        sys.executable,
        "-m",
        "tests.unit.runtime.altered_starts",
        str(model),
        *map(str, seeds),
    ]
    repository = Path(__file__).parents[3]
    paths = os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (
        f"ended with {done.returncode} at {lines[-1:]}: {done.stderr[-500:]}"
    )
    assert len(lines) == 2 * (seeds[1] - seeds[0])
    assert not [line for line in lines if "TRACEBACK" in line]
    assert sum("as the first time" in line for line in lines) > len(lines) / 8, (
        "alterations are refused"
    )
    assert sum(" text " in line for line in lines) > len(lines) / 8, (
        "and the kept start is used else"
    )


@pytest.fixture(scope="module")
def plan() -> tuple[Program, dict[str, Any], list[LayerShape]]:
    module = family("qwen3_moe").float()
    program = lower(module)
    layers = [LayerShape(2, 16, 16)] * 2
    return program, {**tensors_of(program, module), **program.constants}, layers


def changed(program: Program, code: Code, change: Any) -> Program:
    """The program with the first operation of this kind replaced."""

    def replaced(ops: list[Op]) -> list[Op]:
        place = next((number for number, op in enumerate(ops) if op.code == code), None)
        return ops if place is None else [*ops[:place], change(ops[place]), *ops[place + 1 :]]

    return replace(program, body=replaced(program.body), head=replaced(program.head))


def with_input(number: int, **fields: Any) -> Any:
    """A change of one operand's view."""

    def change(op: Op) -> Op:
        inputs = list(op.inputs)
        inputs[number] = replace(inputs[number], **fields)
        return replace(op, inputs=tuple(inputs))

    return change


def with_output(**fields: Any) -> Any:
    """A change of the output's view."""
    return lambda op: replace(op, output=replace(op.output, **fields))


CHANGES: list[tuple[Code, Any]] = [
    (Code.MUL, with_input(0, offset=1 << 20)),
    (Code.MUL, with_input(0, offset=-1)),
    (Code.MUL, with_input(0, value=-1)),
    (Code.MUL, with_input(0, value=1 << 20)),
    (Code.EXPERTS, with_output(row_step=1 << 12)),
    (Code.MUL, with_input(1, col_step=-1)),
    (Code.MUL, with_output(cols=1 << 12)),
    (Code.MUL, with_output(value=0, offset=1 << 12)),
    (Code.MUL, lambda op: replace(op, inputs=op.inputs[:1])),
    (Code.MUL, lambda op: replace(op, output=None)),
    (Code.LINEAR, with_input(0, offset=1)),
    (
        Code.LINEAR,
        lambda op: replace(op, transposed=not op.transposed, weight="model.embed_tokens.weight"),
    ),
    (Code.LINEAR, lambda op: replace(op, bias="model.norm.weight")),
    (Code.LINEAR, lambda op: replace(op, weight="no.such.weight")),
    (Code.EMBED, with_output(cols=63)),
    (Code.EMBED, lambda op: replace(op, weight="model.norm.weight")),
    (Code.EXPERTS, with_output(rows=0)),
    (Code.EXPERTS, with_input(1, offset=4)),
    (Code.ATTENTION, lambda op: replace(op, layer=2)),
    (Code.ATTENTION, lambda op: replace(op, layer=-1)),
    (Code.ATTENTION, lambda op: replace(op, heads=5)),
    (Code.ATTENTION, lambda op: replace(op, heads=1 << 12)),
    (Code.ATTENTION, lambda op: replace(op, window=-1)),
    (Code.ATTENTION, lambda op: replace(op, chosen=4, inputs=(*op.inputs, op.inputs[0]))),
    (Code.STORE, lambda op: replace(op, layer=7)),
    (Code.STORE, with_input(0, rows=4)),
    (Code.STORE, with_input(0, offset=64)),
    (Code.SIGNAL, lambda op: replace(op, layer=99)),
    (Code.SIGNAL, with_input(0, cols=128)),
    (Code.GATHER, with_output(cols=128)),
    (Code.TOP, lambda op: replace(op, numbers=(1e9,))),
    (Code.TOP, lambda op: replace(op, numbers=(float("nan"),))),
    (Code.TOP, lambda op: replace(op, numbers=())),
    (Code.TAKE, lambda op: replace(op, numbers=(1e9,))),
]


def test_a_plan_of_our_own_is_inside_its_memory(
    plan: tuple[Program, dict[str, Any], list[LayerShape]],
) -> None:
    program, tensors, layers = plan
    check_program(program, tensors, layers, torch.float32)


@pytest.mark.parametrize(("code", "change"), CHANGES, ids=[code.name for code, _ in CHANGES])
def test_a_plan_that_leaves_its_memory_is_refused(
    code: Code, change: Any, plan: tuple[Program, dict[str, Any], list[LayerShape]]
) -> None:
    program, tensors, layers = plan
    altered = changed(program, code, change)
    assert altered != program
    with pytest.raises(NotLoweredError, match="a program"):
        check_program(altered, tensors, layers, torch.float32)


def test_whole_plans_that_are_refused(
    plan: tuple[Program, dict[str, Any], list[LayerShape]],
) -> None:
    """Operations in another order, body and head exchanged, logits of nobody, another type of
    cache, values of no size."""
    program, tensors, layers = plan
    assert program.logits is not None
    larger = [replace(value, size=1 << 40) for value in program.values]
    for altered in (
        replace(program, body=program.body[::-1]),
        replace(program, body=[*program.body, *program.head], head=[]),
        replace(program, head=[]),
        replace(program, logits=None),
        replace(program, logits=replace(program.logits, cols=1 << 20)),
        replace(program, values=larger),
        replace(program, hidden_size=1 << 40),
        replace(program, signals=()),
    ):
        with pytest.raises(NotLoweredError, match="a program"):
            check_program(altered, tensors, layers, torch.float32)
    with pytest.raises(NotLoweredError, match="a program"):
        check_program(program, tensors, layers, torch.bfloat16)
    with pytest.raises(NotLoweredError, match="a program"):
        check_program(program, tensors, layers[:1], torch.float32)
