"""Drafters that read the target's hidden states, in the engine: prompts in chunks, preemption,
prefixes, other drafters beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from outrider import LLM
from outrider.build import Options
from outrider.engine.engine import Engine, make_engine
from outrider.engine.request import EngineSettings, Speculation
from outrider.models.heads.eagle_files import save_eagle
from outrider.sampling.params import SamplingParams
from tests.contract.own_cache_families import make
from tests.heads import block_head, medusa_heads, mtp_head, random_eagle
from tests.helpers import byte_tokenizer, tiny_llama
from tests.mtp_heads import save_with_mtp
from tests.unit.engine.conftest import WAIT, Models, ask, prompt, request

KINDS = ("eagle3", "medusa", "block", "mtp")
MakeHeadEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def heads(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random heads for the target, by drafter."""
    folder = tmp_path_factory.mktemp("heads")
    target = AutoModelForCausalLM.from_pretrained(models.target)
    save_eagle(random_eagle("eagle3", AutoConfig.from_pretrained(models.target)), folder / "eagle3")
    medusa_heads(target, folder / "medusa")
    block_head(target, folder / "block")
    mtp_head(target, folder / "mtp", num_layers=2)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture
def engine_of(models: Models, heads: dict[str, Path]) -> Iterator[MakeHeadEngine]:
    """Two rows at a time, with a look-up drafter beside the head."""
    made: list[Engine] = []

    def make(kind: str, **settings: Any) -> Engine:
        options = Options(
            target=str(models.target), drafter=kind, draft=str(heads[kind]), num_draft_tokens=3
        )
        given = EngineSettings(**{"max_num_seqs": 2, "kv_memory": 64 << 20, **settings})
        made.append(make_engine(options, given, extra_drafters=("ngram",)))
        made[-1].start()
        return made[-1]

    yield make
    for engine in made:
        assert engine.drain(WAIT)
        engine.stop()
        engine.check_integrity()


def alone(
    models: Models, heads: dict[str, Path], kind: str, prompts: list[list[int]], count: int = 24
) -> list[Any]:
    """Completions of one request at a time, which share nothing."""
    llm = LLM(models.target, drafter=kind, draft=heads[kind], num_draft_tokens=3, max_num_seqs=1)
    return llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_drafts_are_those_of_one_request_alone(
    engine_of: MakeHeadEngine, models: Models, heads: dict[str, Path], kind: str
) -> None:
    """Long prompts in chunks, a preemption, a row of another drafter: same text, and the head
    drafts as it does alone, for it comes back with what it knew."""
    engine = engine_of(kind, prefix_share=0.0)
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 40, 300, 33))]
    expected = alone(models, heads, kind, prompts)
    answers = ask(engine, *(request(tokens, priority=1) for tokens in prompts))
    other = ask(engine, request(prompts[2], speculation=Speculation(drafter="ngram"), priority=0))[
        0
    ]
    assert [answer.token_ids for answer in answers] == [done.token_ids for done in expected]
    assert other.token_ids == expected[2].token_ids
    assert [answer.finish.stats.accepted for answer in answers] == [
        done.stats.accepted for done in expected
    ]
    assert [answer.finish.stats.drafted for answer in answers] == [
        done.stats.drafted for done in expected
    ]


MAKERS: dict[str, tuple[Callable[[int], Any], str]] = {
    "on our cache": (lambda seed: tiny_llama(257, seed=seed), "deepseek"),
    "beside states": (lambda seed: make("qwen3_5_text", vocab_size=257), "qwen"),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", MAKERS)
def test_a_request_may_name_the_mtp_head_of_the_checkpoint(tmp_path: Path, where: str) -> None:
    """Catches an extra drafter that does not get its head's path, or that the target's tables are
    needed for it."""
    save_with_mtp(tmp_path, *MAKERS[where])
    byte_tokenizer().save_pretrained(tmp_path)
    options = Options(target=str(tmp_path), drafter="ngram", dtype="float32", num_draft_tokens=3)
    engine = make_engine(options, EngineSettings(kv_memory=16 << 20), extra_drafters=("mtp",))
    engine.start()
    plain, drafted = ask(
        engine, request(prompt(9)), request(prompt(9), speculation=Speculation(drafter="mtp"))
    )
    assert plain.token_ids == drafted.token_ids
    assert drafted.finish.stats.drafted > plain.finish.stats.drafted
    assert engine.drain(WAIT)
    engine.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_s_own_keys_count(engine_of: MakeHeadEngine, models: Models, kind: str) -> None:
    """Catches a server that takes more memory than --kv-memory says, by what its head keeps of
    every text."""
    engine = engine_of(kind, prefix_share=0.0)
    head = engine._batch.decoder.drafter._drafters[kind]
    per_token = engine._batch.kv.bytes_per_token + sum(
        cache.bytes_per_token for cache in head.caches
    )
    assert bool(head.caches) == (kind != "medusa"), "which keeps one state for each row"
    assert engine._scheduler.kv_budget.positions == (64 << 20) // per_token


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_forgets_a_row_that_another_drafter_cannot_take(
    engine_of: MakeHeadEngine,
    models: Models,
    heads: dict[str, Path],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a head that has a row more than the batch, and drafts for each row with its
    neighbour's state from then on."""
    engine = engine_of(kind, prefix_share=0.0)
    prompts = [prompt(40, 1), prompt(9, 2), prompt(30, 3)]
    expected = alone(models, heads, kind, [prompts[0], prompts[2]], 60)
    beside = engine._batch.decoder.drafter._drafters["ngram"]
    start = beside.start

    def fails(row: Any) -> None:
        if row.tokens[:9] == prompts[1]:
            raise RuntimeError("a bug of a plug-in's")
        start(row)

    monkeypatch.setattr(beside, "start", fails)
    first, bad, last = ask(engine, *(request(tokens, max_tokens=60) for tokens in prompts))
    assert bad.finish.reason == "error"
    for answer, done in zip((first, last), expected, strict=True):
        assert answer.token_ids == done.token_ids
        assert answer.finish.stats.accepted == done.stats.accepted


def test_a_draft_on_the_target_s_keys_takes_nothing(models: Models) -> None:
    options = Options(target=str(models.target), drafter="early-exit", num_draft_tokens=3)
    engine = make_engine(options, EngineSettings(kv_memory=64 << 20, prefix_share=0.0))
    assert engine._scheduler.kv_budget.positions == (64 << 20) // engine._batch.kv.bytes_per_token


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_row_of_a_head_comes_back_as_it_was(
    engine_of: MakeHeadEngine, models: Models, heads: dict[str, Path], kind: str
) -> None:
    """Its prompt is not read again, and neither text nor drafts show it."""
    engine = engine_of(kind, prefix_share=0.0)
    prompts = [prompt(30, seed) for seed in (1, 2)]
    slow = ask(engine, *(request(tokens, max_tokens=60, priority=1) for tokens in prompts))
    assert all(answer.begun.wait(30) for answer in slow)
    ask(engine, request(prompt(9, 3), priority=0))[0].wait()
    expected = alone(models, heads, kind, prompts, 60)
    assert [answer.token_ids for answer in slow] == [done.token_ids for done in expected]
    assert [answer.finish.stats.drafted for answer in slow] == [
        done.stats.drafted for done in expected
    ]
    assert [answer.finish.stats.accepted for answer in slow] == [
        done.stats.accepted for done in expected
    ]
    assert sum(answer.finish.preemptions for answer in slow) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_shares_prefixes(
    engine_of: MakeHeadEngine, models: Models, heads: dict[str, Path], kind: str
) -> None:
    """The second turn's beginning comes from pages: same text. A block head has its own pages, a
    Medusa head needs none: both draft as if all had been read. An EAGLE head begins behind the
    prefix."""
    engine = engine_of(kind)
    first = prompt(300, 3)
    answer = ask(engine, request(first))[0]
    second = [*first, *answer.token_ids, *prompt(20, 4)]
    again = ask(engine, request(second))[0]
    assert again.finish.cached_tokens >= 256
    assert engine.snapshot().prefix_hits == again.finish.cached_tokens
    [expected] = alone(models, heads, kind, [second])
    assert again.token_ids == expected.token_ids
    if kind == "eagle3":
        assert again.finish.stats.drafted > 0
    else:
        assert (again.finish.stats.drafted, again.finish.stats.accepted) == (
            expected.stats.drafted,
            expected.stats.accepted,
        )
