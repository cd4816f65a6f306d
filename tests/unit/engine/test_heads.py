"""Drafters that read the target's hidden states, in the engine: prompts in chunks, preemption, other drafters beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from outrider import LLM
from outrider.build import Options
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.engine.settings import EngineSettings
from outrider.engine.start import make_engine
from outrider.models.heads.eagle_files import save_eagle
from outrider.sampling.params import SamplingParams
from tests.heads import random_eagle
from tests.unit.engine.conftest import WAIT, Models, ask, prompt, request


@pytest.fixture(scope="module")
def head(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head for the target."""
    folder = tmp_path_factory.mktemp("head") / "eagle3"
    save_eagle(random_eagle("eagle3", AutoConfig.from_pretrained(models.target)), folder)
    return folder


@pytest.fixture
def engine(models: Models, head: Path) -> Iterator[Engine]:
    """One row at a time, with a look-up drafter beside the head."""
    options = Options(target=str(models.target), drafter="eagle3", draft=str(head), num_draft_tokens=3, compile="off")
    engine = make_engine(options, EngineSettings(max_num_seqs=2, kv_memory=64 << 20), extra_drafters=("ngram",))
    engine.start()
    yield engine
    assert engine.drain(WAIT)
    engine.stop()
    engine.check_integrity()


def test_texts_and_drafts_are_those_of_one_request_alone(engine: Engine, models: Models, head: Path) -> None:
    """Long prompts in chunks, a preemption, a row of another drafter: same text, and the head drafts as it does alone."""
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 40, 300, 33))]
    llm = LLM(models.target, drafter="eagle3", draft=head, num_draft_tokens=3, compile="off", max_num_seqs=1)
    alone = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    answers = ask(engine, *(request(tokens, priority=1) for tokens in prompts))
    other = ask(engine, request(prompts[2], speculation=Speculation(drafter="ngram"), priority=0))[0]
    assert [answer.token_ids for answer in answers] == [done.token_ids for done in alone]
    assert other.token_ids == alone[2].token_ids
    for answer, done in zip(answers, alone, strict=True):
        if not answer.finish.preemptions:  # a row that came back drafts anew from where it was
            assert answer.finish.stats.accepted == done.stats.accepted
    assert engine.snapshot().prefix_hits == 0, "its hidden states are in no page, so a prompt is always read"


def test_a_preempted_row_of_a_head_is_read_again(engine: Engine, models: Models) -> None:
    """And its text does not show it."""
    slow = ask(engine, *(request(prompt(30, seed), max_tokens=200, priority=1) for seed in (1, 2)))
    assert all(answer.begun.wait(30) for answer in slow)
    ask(engine, request(prompt(9, 3), priority=0))[0].wait()
    plain = LLM(models.target, drafter="none", compile="off")
    expected = plain.generate([prompt(30, seed) for seed in (1, 2)], SamplingParams(max_tokens=200, ignore_eos=True))
    assert [answer.token_ids for answer in slow] == [done.token_ids for done in expected]
    assert sum(answer.finish.preemptions for answer in slow) == 1
