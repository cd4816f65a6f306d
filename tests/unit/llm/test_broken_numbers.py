"""An answer of broken numbers ends with an error, and nothing of it is left for the answers behind
it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from outrider import LLM, SamplingParams
from outrider.errors import NumericalError
from outrider.models.heads.eagle_files import save_eagle
from tests.heads import block_head, random_eagle
from tests.helpers import byte_tokenizer, disturbed, save_checkpoint, tiny_llama

BROKEN = 200  # a token whose embedding is infinite
TEXT = [65, 66, 67] * 3
OPTIONS = {"eagle3": {}, "block": {}, "draft-model": {}, "composite": {"parts": "ngram,eagle3"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    target = tiny_llama(257, sharpness=3.0)
    save_checkpoint(folder / "draft-model", disturbed(target, 0.1), byte_tokenizer())
    block_head(target, folder / "block")
    with torch.no_grad():
        target.model.embed_tokens.weight[BROKEN] = float("inf")
    save_checkpoint(folder / "target", target, byte_tokenizer())
    save_eagle(
        random_eagle("eagle3", AutoConfig.from_pretrained(folder / "target")), folder / "eagle3"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("drafter", OPTIONS)
def test_broken_numbers_reach_no_later_answer(folder: Path, drafter: str) -> None:
    """Eager attention reads masked positions: catches a drafter's own cache that keeps them."""
    head = folder / ("eagle3" if drafter == "composite" else drafter)
    llm = LLM(
        folder / "target",
        drafter=drafter,
        draft=head,
        drafter_options=OPTIONS[drafter],
        runtime="eager",
    )
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=12)
    before = llm.generate([TEXT], sampling)[0].token_ids
    with pytest.raises(NumericalError):
        llm.generate([TEXT, [*TEXT, BROKEN, *TEXT]], SamplingParams(max_tokens=12))
    assert llm.generate([TEXT], sampling)[0].token_ids == before
