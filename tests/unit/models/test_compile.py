"""Compiled programs against the eager module they were made from. Slow: each program takes a C++ compiler's time."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.models import draft_loop
from outrider.models.compile import MODEL_SOURCES, cannot_compile, compile_program, drop_old
from outrider.models.draft_loop import WIDTH, DraftLoop, DraftLoopProgram
from outrider.models.load import build_lm
from outrider.models.picking import Draws
from outrider.models.program import load_program
from tests.helpers import disturbed, drawn, greedy_draws, tiny_llama, word_tokenizer

VOCAB = 40
slow_compile = [
    pytest.mark.slow,
    pytest.mark.skipif(cannot_compile() is not None, reason=str(cannot_compile())),
]


def _pair(folder: Path) -> tuple[Path, Path]:
    target = tiny_llama(VOCAB, sharpness=3.0)
    paths = folder / "target", folder / "draft"
    for model, path in zip((target, disturbed(target, 0.3)), paths, strict=True):
        model.save_pretrained(path)
        word_tokenizer(VOCAB).save_pretrained(path)
    return paths


PROMPTS = [[3, 4, 5], [7] * 20, [9, 8]]


@pytest.mark.parametrize("later_width", [1, WIDTH])
def test_draft_loop_equals_token_by_token_drafting(tmp_path: Path, later_width: int) -> None:
    """The loop's own arithmetic, uncompiled: catches wrong positions, places or masks after the first token, a law that is
    not the one drawn from, a row that catches up two tokens."""
    draft = _pair(tmp_path)[1]
    module = tiny_llama(VOCAB, sharpness=3.0)
    lm = build_lm(module, str(draft), torch.float32, torch.device("cpu"))
    program = DraftLoopProgram(lm, module, 4, VOCAB)
    program.later_width = later_width
    loop = DraftLoop(lm, {4: program})
    texts = [[3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4]]
    uniforms = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for _ in texts:
            lm.kv.add_row()
        lm.catch_up([texts[0], texts[1][:-1]])  # row 1 lacks two tokens, row 0 one
        pending = [texts[0][-1:], texts[1][-2:]]
        tokens, laws = loop(pending, drawn([1], [0.7], uniforms[1:], VOCAB), 4)
        assert laws.shape == (1, 5, VOCAB), "greedy rows have none"
        assert lm.kv.lengths == [len(text) + 3 for text in texts]
        module.set_attn_implementation("eager")
        for row, text in enumerate(texts):
            full = torch.tensor([text + tokens[row].tolist()])
            scores = module(input_ids=full, use_cache=False).logits[0, len(text) - 1 : -1].float()
            if row == 0:
                assert tokens[row].tolist() == scores.argmax(-1).tolist()
            else:
                law = torch.softmax(scores / 0.7, -1)
                torch.testing.assert_close(laws[0, :4], law, rtol=1e-3, atol=1e-4)
                cumulative = laws[0, :4].double().cumsum(-1)
                chosen = torch.searchsorted(cumulative, uniforms[row][:, None] * cumulative[:, -1:], right=True)[:, 0]
                assert tokens[row].tolist() == chosen.tolist()


def test_one_token_programs_get_their_numbers_side_by_side(tmp_path: Path) -> None:
    """A compiled program reads its inputs by the strides of the example: a column cut out of (B, n) would give row 1 the numbers
    of row 0."""
    draft = _pair(tmp_path)[1]
    lm = build_lm(tiny_llama(VOCAB), str(draft), torch.float32, torch.device("cpu"))
    seen: list[torch.Tensor] = []

    def program(*inputs: Any) -> tuple[torch.Tensor, ...]:
        seen.append(Draws(*inputs[-1]).uniforms)
        return torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 2, VOCAB), inputs[0]

    for _ in range(2):
        lm.kv.add_row()
    uniforms = torch.arange(6, dtype=torch.float64).view(2, 3)
    with torch.inference_mode():
        DraftLoop(lm, {1: program})([[3], [4]], drawn([0, 1], [1.0, 1.0], uniforms, VOCAB), 3)
    assert [numbers.as_strided((2, 1), (1, 1)).flatten().tolist() for numbers in seen] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("lengths", "wanted", "calls"),
    [((5,), 3, [5]), ((5,), 5, [5]), ((5, 1), 3, [1, 1, 1]), ((1, 5), 6, [5, 1]), ((5, 1), 7, [5, 1, 1]), ((5, 3, 1), 6, [3, 3])],
)
def test_programs_make_up_a_length(tmp_path: Path, lengths: tuple[int, ...], wanted: int, calls: list[int]) -> None:
    """Calls go on from each other's state, and the caller is told of every token made."""
    lm = build_lm(tiny_llama(VOCAB), "tiny", torch.float32, torch.device("cpu"))
    asked: list[int] = []

    def program_of(length: int) -> Any:
        def program(state: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
            asked.append(length)
            made = state[:, :1] + torch.arange(1, length + 1)
            return made, torch.zeros(0, length + 1, VOCAB), made[:, -1:].repeat(1, 4)

        return program

    loop = DraftLoop(lm, {length: program_of(length) for length in lengths})
    lm.kv.add_row()
    num_tokens = loop.length(wanted)
    with torch.inference_mode():
        tokens, laws = loop([[3]], greedy_draws(num_tokens, VOCAB), num_tokens)
    assert asked == calls
    assert tokens.tolist() == [list(range(4, 4 + sum(calls)))]
    assert laws.shape == (0, sum(calls) + 1, VOCAB)


def test_example_inputs_fit_the_program(tmp_path: Path) -> None:
    """The example is what torch.export traces: it must run, and leave no row behind."""
    module = tiny_llama(VOCAB)
    lm = build_lm(module, "tiny", torch.float32, torch.device("cpu"))
    inputs, dynamic = draft_loop.example(lm, 2, VOCAB)
    with torch.inference_mode():
        tokens, laws, state = DraftLoopProgram(lm, module, 2, VOCAB)(*inputs)
    assert tokens.shape == (4, 2)
    assert laws.shape == (2, 3, VOCAB)
    assert state.shape == inputs[0].shape
    assert len(inputs) == len(dynamic)
    assert lm.kv.num_rows == 0


def test_cache_folder_is_bounded_and_drops_the_least_recently_used(tmp_path: Path) -> None:
    """Catches a cache that grows for ever, or that drops the program just made."""
    for age, name in enumerate(("old", "middle", "new")):
        file = tmp_path / f"{name}.pt2"
        file.write_bytes(b"x" * 100)
        os.utime(file, (1000 + age, 1000 + age))
    drop_old(tmp_path, limit_bytes=250)
    assert sorted(f.stem for f in tmp_path.glob("*.pt2")) == ["middle", "new"]
    drop_old(tmp_path, limit_bytes=10)
    assert [f.stem for f in tmp_path.glob("*.pt2")] == ["new"], "the newest stays even when it alone is too large"


class _Double(nn.Module):
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.relu(numbers) * 2


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile() is not None, reason=str(cannot_compile()))
def test_compiling_leaves_nothing_but_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model's left 300 MB in the temporary folder, which in a container is memory; and a program in use, as much as its
    weights, for good if the process was killed."""
    rest, path = tmp_path / "rest", tmp_path / "programs" / "double.pt2"
    rest.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(rest))
    monkeypatch.setenv("TMPDIR", str(rest))
    compile_program(_Double(), (torch.ones(4),), (None,), path)
    assert [file.name for file in path.parent.iterdir()] == ["double.pt2"]
    assert sum(file.stat().st_size for file in rest.rglob("*")) < 1 << 20, "what torch tried the compiler with"
    program = load_program(path)
    assert not [file for file in rest.rglob("*") if "Double" in file.name or "wrapper" in file.name]
    assert program(torch.ones(4))[0].tolist() == [2.0] * 4


def test_whatever_runs_in_a_program_is_in_its_name(tmp_path: Path) -> None:
    """Catches code that programs are made of and that changes without them: they would be found in the cache as before."""
    module = tiny_llama(VOCAB)
    lm = build_lm(module, "tiny", torch.float32, torch.device("cpu"))
    program, inputs = DraftLoopProgram(lm, module, 2, VOCAB), draft_loop.example(lm, 2, VOCAB)[0]
    ours, met = Path(outrider.__file__).parent, set[Path]()
    sys.setprofile(lambda frame, event, argument: met.add(Path(frame.f_code.co_filename)))
    try:
        with torch.inference_mode():
            program(*inputs)
    finally:
        sys.setprofile(None)
    named = {(ours / "models" / name).resolve() for name in MODEL_SOURCES}
    assert ours / "sampling" / "draft_filters.py" in met
    assert {path for path in met if path.is_relative_to(ours)} <= named
