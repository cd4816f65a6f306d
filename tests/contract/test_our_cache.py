"""One suite for every family on our cache: rejected drafts leave nothing behind, and greedy text is
transformers' own.

On the native runtime where the family's passes are lowered, else on torch's modules. Compared are
the logits behind rejections at every depth, in ragged rows of one batch; and texts of 200 tokens,
drafted for with chains and trees that err, with those of plain decoding and of transformers'
`generate`. A few families run always, all of them at night. Families with states:
`test_own_states.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import pytest
import torch

from outrider.cache import cache_folder
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.drafters.base import Drafter
from outrider.drafters.none import NoDrafter
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm, finish
from outrider.rows import Rows
from outrider.runtime.limits import find_native_limits
from outrider.runtime.run import use_native_run
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests.contract.family_reference import Reference, one_thread, random_text
from tests.helpers import OracleThatErrs, make_row, run_to_end
from tests.unit.runtime.families import FAMILIES, NOT_LOWERED, SIZES, make

CPU = torch.device("cpu")
ALWAYS = ("gpt_oss", "mimo_v2_flash", "glm_moe_dsa")  # with attention sinks; with indexers
EACH = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly)
    for name in (*FAMILIES, *NOT_LOWERED)
]
GAMMA = 4
LENGTH = 200
REFERENCE = Reference(make, tolerance=1e-4)
text_of = partial(random_text, SIZES["vocab_size"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


@cache
@torch.inference_mode(False)
def served(name: str) -> LM:
    """A family's model on our cache."""
    module = make(name)
    lm = build_lm(module, name, torch.float32, CPU)
    if name in NOT_LOWERED:
        finish(lm, module)
        return lm
    use_native_run(lm, module, cache_folder())
    lm.limits = find_native_limits(lm)
    assert lm.limits.exact_rows
    assert lm.limits.exact_trees
    return lm


@pytest.mark.parametrize("name", EACH)
def test_rejections_at_every_depth(name: str) -> None:
    """Catches what was rejected and still weighs, in rows of unequal length within and beyond the
    window."""
    lm = served(name)
    texts = [text_of(length, seed=length) for length in (3, 11, 26)]
    lm.kv.clear()
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts)
    for depth in (*range(GAMMA + 1), 0):
        drafts = [text_of(GAMMA, seed=100 * depth + row) for row in range(len(texts))]
        logits = lm.forward(
            torch.tensor([[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)])
        ).logits
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            REFERENCE.compare(name, logits[row], text + draft)
            kept = (depth + row) % (GAMMA + 1)
            lm.kv.keep(row, range(kept + 1))
            text += [*draft[:kept], 7 + row]


class TreesThatErr(OracleThatErrs):
    """Its chains, with another token beside each of theirs."""

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        chain = super().propose(rows, [GAMMA] * len(rows)).tokens
        others = (chain + 1) % rows.vocab_size
        parents = torch.tensor([-1, -1, 1, 1, 3, 3, 5, 5]).expand(len(rows), -1)
        lengths = torch.tensor(gamma).clamp(max=2 * GAMMA)  # a row near its end is asked for less
        return Draft(torch.stack([others, chain], dim=2).flatten(1), lengths, parents)


PROMPTS = [text_of(9, seed=70), text_of(24, seed=71), text_of(1, seed=72)]


@pytest.mark.parametrize("name", EACH)
def test_greedy_texts(name: str) -> None:
    """Catches what a few passes do not show. Drafts err at every depth, in rows of one batch, as
    chains and as trees."""
    lm = served(name)

    def written(drafter: Drafter, gamma: int, verifier: str) -> list[list[int]]:
        decoder = Decoder(lm, drafter, VERIFIERS.load(verifier)(), FixedLength(gamma))
        lm.kv.clear()
        for number, prompt in enumerate(PROMPTS):
            decoder.add(
                make_row(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True), number=number)
            )
        return [row.output for row in run_to_end(decoder)]

    expected = written(NoDrafter(), 0, "block")
    if lm.limits.exact_rows:
        assert written(OracleThatErrs(expected), GAMMA, "block") == expected
    if lm.limits.exact_trees:
        assert written(TreesThatErr(expected), 2 * GAMMA, "traversal") == expected
    alone = REFERENCE.module(name).generate(
        torch.tensor(PROMPTS[1:2]),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    REFERENCE.same_text(name, PROMPTS[1], expected[1], alone[0, len(PROMPTS[1]) :].tolist())
