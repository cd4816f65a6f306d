"""The recipe of the hybrid with an MTP head: what it writes loads as published checkpoints do, and
its head drafts."""

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from tools.demo_models import hybrid, train

PLAN = train.Plan(steps=1, rows=1, length=32, compile=False, longer_every=())
PROMPT = "Question: Sam has 3 apples and buys 4 more. How many apples does Sam have?"


@pytest.mark.slow
def test_what_it_writes_drafts_with_its_own_head(tmp_path: Path) -> None:
    """Catches a head that is not put into the checkpoint, and one whose layout the loader does not
    know."""
    recipe = hybrid.HybridRecipe(tmp_path, PLAN, PLAN)
    hybrid.make(recipe)
    written = (tmp_path / "training.json").stat().st_mtime_ns
    hybrid.make(recipe)
    assert (tmp_path / "training.json").stat().st_mtime_ns == written, (
        "what is finished is not made again"
    )

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (plain,) = LLM(recipe.folder, drafter="none", threads=1).generate([PROMPT], params)
    (drafted,) = LLM(recipe.folder, drafter="mtp", num_draft_tokens=2, threads=1).generate(
        [PROMPT], params
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0
