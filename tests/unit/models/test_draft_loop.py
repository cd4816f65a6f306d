"""The drafting loop that CUDA graphs record, run as it is, against the module token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.draft_loop import WIDTH, DraftLoop, DraftLoopProgram
from outrider.models.loading.load import build_lm
from outrider.models.picking import Draws
from tests.helpers import disturbed, drawn, greedy_draws, tiny_llama, word_tokenizer

VOCAB = 40


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
    """The loop's own arithmetic, uncompiled: catches wrong positions, slots or masks after the
    first token, a distribution that is not the one drawn from, a row that catches up two tokens."""
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
        tokens, probs = loop(pending, drawn([1], [0.7], uniforms[1:], VOCAB), 4)
        assert probs.shape == (1, 5, VOCAB), "greedy rows have none"
        assert lm.kv.lengths == [len(text) + 3 for text in texts]
        module.set_attn_implementation("eager")
        for row, text in enumerate(texts):
            full = torch.tensor([text + tokens[row].tolist()])
            scores = module(input_ids=full, use_cache=False).logits[0, len(text) - 1 : -1].float()
            if row == 0:
                assert tokens[row].tolist() == scores.argmax(-1).tolist()
            else:
                expected = torch.softmax(scores / 0.7, -1)
                torch.testing.assert_close(probs[0, :4], expected, rtol=1e-3, atol=1e-4)
                cumulative = probs[0, :4].double().cumsum(-1)
                chosen = torch.searchsorted(
                    cumulative, uniforms[row][:, None] * cumulative[:, -1:], right=True
                )[:, 0]
                assert tokens[row].tolist() == chosen.tolist()


def test_one_token_programs_get_their_numbers_side_by_side(tmp_path: Path) -> None:
    """A compiled program reads its inputs by the strides of the example: a column cut out of (B, n)
    would give row 1 the numbers of row 0."""
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
    assert [numbers.as_strided((2, 1), (1, 1)).flatten().tolist() for numbers in seen] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]


@pytest.mark.parametrize(
    ("lengths", "wanted", "calls"),
    [
        ((5,), 3, [5]),
        ((5,), 5, [5]),
        ((5, 1), 3, [1, 1, 1]),
        ((1, 5), 6, [5, 1]),
        ((5, 1), 7, [5, 1, 1]),
        ((5, 3, 1), 6, [3, 3]),
    ],
)
def test_programs_make_up_a_length(
    tmp_path: Path, lengths: tuple[int, ...], wanted: int, calls: list[int]
) -> None:
    """Calls go on from each other's state, and the caller gets every token made."""
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
        tokens, probs = loop([[3]], greedy_draws(num_tokens, VOCAB), num_tokens)
    assert asked == calls
    assert tokens.tolist() == [list(range(4, 4 + sum(calls)))]
    assert probs.shape == (0, sum(calls) + 1, VOCAB)
