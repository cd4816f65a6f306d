"""Families with attention sinks on the native runtime: transformers' logits and texts, whatever drafts are rejected."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.none import NoDrafter
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.rows import Rows
from outrider.runtime.limits import find_native_limits
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code, Op
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests.helpers import OracleThatErrs, make_row, run_to_end
from tests.reference_run import ReferenceRun
from tests.unit.runtime.families import SIZES, make
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
ALWAYS = ("gpt_oss", "mimo_v2_flash")
EACH = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.nightly) for name in ("flint", "granite_swa", "granitemoe_swa"))]
TOLERANCE, GAMMA, LENGTH = 1e-4, 4, 200


def text_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def untouched(name: str) -> Any:
    """The model as transformers runs it."""
    return make(name)


def native(name: str, path: Path) -> LM:
    """The same model on the native runtime."""
    module = make(name)
    plain = build_lm(module, name, torch.float32, CPU)
    lm = LM(NativeRun(plain, module, lower(module), path), plain.shape, torch.float32, CPU)
    lm.limits = find_native_limits(lm)
    assert lm.limits.exact_rows
    assert lm.limits.exact_trees
    return lm


@torch.inference_mode()
def compare(name: str, ours: Tensor, text: list[int]) -> None:
    """Our logits of the last tokens of `text`, with transformers'."""
    theirs = untouched(name)(input_ids=torch.tensor([text]), use_cache=False).logits[0, -len(ours) :]
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    assert worst <= TOLERANCE, f"off by {worst:.1e} of the logits' range"


@pytest.mark.parametrize("name", EACH)
@torch.inference_mode()
def test_rejections_at_every_depth(name: str, library_path: Path) -> None:
    """Catches what was rejected and still weighs, in rows of unequal length within and beyond the window."""
    lm, texts = native(name, library_path), [text_of(length, seed=length) for length in (3, 11, 26)]
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts)
    for depth in (*range(GAMMA + 1), 0):
        drafts = [text_of(GAMMA, seed=100 * depth + row) for row in range(len(texts))]
        logits = lm.forward(torch.tensor([[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)]))
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            compare(name, logits[row], text + draft)
            kept = (depth + row) % (GAMMA + 1)
            lm.kv.keep(row, range(kept + 1))
            text += [*draft[:kept], 7 + row]


class TreesThatErr(OracleThatErrs):
    """Its chains, with another token beside each of theirs."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        chain = super().propose(rows, [GAMMA] * len(rows)).tokens
        others = (chain + 1) % rows.vocab_size
        parents = torch.tensor([-1, -1, 1, 1, 3, 3, 5, 5]).expand(len(rows), -1)
        return Draft(torch.stack([others, chain], dim=2).flatten(1), torch.full((len(rows),), 2 * GAMMA), parents)


@pytest.mark.parametrize("name", EACH)
def test_greedy_texts(name: str, library_path: Path) -> None:
    """Catches what a few passes do not show. Drafts err at every depth, in rows of one batch, as chains and as trees."""
    lm, prompts = native(name, library_path), [text_of(9, seed=70), text_of(24, seed=71), text_of(1, seed=72)]

    def written(drafter: Drafter, gamma: int, verifier: str) -> list[list[int]]:
        decoder = Decoder(lm, drafter, VERIFIERS.load(verifier)(), FixedLength(gamma))
        lm.kv.lengths.clear()
        for number, prompt in enumerate(prompts):
            decoder.add(make_row(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True), number=number))
        return [row.output for row in run_to_end(decoder)]

    said = written(NoDrafter(), 0, "block")
    assert written(OracleThatErrs(said), GAMMA, "block") == said
    assert written(TreesThatErr(said), 2 * GAMMA, "traversal") == said
    alone = untouched(name).generate(
        torch.tensor(prompts[1:2]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert said[1] == alone[0, len(prompts[1]) :].tolist()


def lost(op: Op) -> Op:
    """BUG: without its sinks."""
    return replace(op, inputs=op.inputs[:1])


def of_one_head(op: Op) -> Op:
    """BUG: with the first head's for all."""
    return replace(op, inputs=(op.inputs[0], *(replace(view, col_step=0) for view in op.inputs[1:])))


@pytest.mark.parametrize("bug", [lost, of_one_head])
@pytest.mark.parametrize("name", ALWAYS)
def test_wrong_sinks_are_found(name: str, bug: Any) -> None:
    """Fails for sinks so small, or passes so long, that the families' tests would not see them."""
    module = make(name)
    lm, program = build_lm(module, name, torch.float32, CPU), lower(module)
    expected = every_pass(lm)
    program.body = [bug(op) if op.code == Code.ATTENTION else op for op in program.body]
    lm.run = ReferenceRun(module, program)
    assert min(differences(every_pass(lm), expected).values()) > 10 * TOLERANCE
