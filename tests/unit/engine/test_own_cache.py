"""A target with running states in the engine: prompts in chunks, preemption, prefixes, a draft of
its own kind.

On the native runtime its states are in our cache, on torch's modules in transformers'.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outrider.build import Options
from outrider.drafters import composite as composite_drafter
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.rows import Rows
from outrider.sampling.params import SamplingParams
from outrider.types import Draft
from tests.contract.own_cache_families import make
from tests.helpers import byte_tokenizer, save_checkpoint
from tests.unit.engine.conftest import MakeEngine, Models, ask, request


def hybrid(noise: float = 0.0) -> Any:
    """A short convolution beside attention; with noise, a draft that is often right."""
    module = make("lfm2", vocab_size=257)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in module.parameters():
            parameter += (
                noise * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0
            )
    nn.init.normal_(
        module.get_input_embeddings().weight, std=1.0, generator=torch.Generator().manual_seed(2)
    )
    return module


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("hybrid")
    return Models(
        save_checkpoint(folder / "target", hybrid(), byte_tokenizer()),
        save_checkpoint(folder / "draft", hybrid(0.05), byte_tokenizer()),
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["native", "eager"])
def plain(models: Models, request: pytest.FixtureRequest) -> LLM:
    return LLM(models.target, drafter="none", threads=1, runtime=request.param)


def alone(plain: LLM, tokens: list[int], count: int) -> list[int]:
    """What plain decoding writes behind a prompt."""
    return plain.generate([tokens], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids


@pytest.mark.slow
def test_a_preempted_row_takes_its_state_along(engine_of: MakeEngine, plain: LLM) -> None:
    """Three rows drafted for by a hybrid, an urgent one that takes a slot."""
    engine = engine_of(max_num_seqs=2, runtime=plain.config["runtime"])
    slow = ask(engine, *(request(prompt(40, seed), max_tokens=60, priority=1) for seed in (1, 2)))
    assert all(answer.begun.wait(60) for answer in slow)
    urgent = ask(engine, request(prompt(12, 3), max_tokens=12, priority=0))[0]
    assert urgent.token_ids == alone(plain, prompt(12, 3), 12)
    assert [answer.token_ids for answer in slow] == [
        alone(plain, prompt(40, seed), 60) for seed in (1, 2)
    ]
    assert sum(answer.finish.preemptions for answer in slow) == 1
    assert max(answer.finish.stats.tau or 0 for answer in slow) > 1.2, "its drafts are kept"


def test_a_prompt_seen_before_is_not_read_again(engine_of: MakeEngine, plain: LLM) -> None:
    """Its state is kept at the boundary of a chunk, and serves whoever begins like it."""
    engine = engine_of(drafter="ngram", draft=False, runtime=plain.config["runtime"])
    first = prompt(300, 4)
    assert ask(engine, request(first))[0].finish.cached_tokens == 0
    for seed in (5, 6):
        tokens = [*first[:280], *prompt(9, seed)]
        again = ask(engine, request(tokens))[0]
        assert again.finish.cached_tokens == 256
        assert again.token_ids == alone(plain, tokens, 24)
    assert engine.snapshot().prefix_pages > 0


@pytest.mark.slow
def test_a_draft_model_and_a_look_up_take_turns_in_one_batch(
    models: Models, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's rows change their drafter as they do in the library: chains only, so states need
    not branch."""
    clock = count()  # with a real one, a busy machine decides which part is worth its time
    monkeypatch.setattr(
        composite_drafter, "time", SimpleNamespace(perf_counter=lambda: 0.001 * next(clock))
    )
    options = Options(
        target=str(models.target),
        draft=str(models.draft),
        drafter="composite",
        threads=1,
        runtime=plain.config["runtime"],
        drafter_options={"parts": "draft-model,ngram", "mode": "best"},
        num_draft_tokens=4,
    )
    engine = make_engine(options, EngineSettings(max_num_seqs=2, kv_memory=64 << 20))
    composite = engine.built.decoder.drafter._drafters["composite"]  # type: ignore[attr-defined]
    drafted = {part.name: 0 for part in composite.parts}
    propose = composite.propose

    def watching(rows: Rows, gamma: list[int]) -> Draft:
        draft = propose(rows, gamma)
        for part in composite.parts:
            drafted[part.name] += sum(part.draft.lists[1])
        return draft

    composite.propose = watching
    engine.start()
    prompts = [prompt(40, 1), [9, 8, 7, 6] * 10]
    answers = ask(engine, *(request(tokens, max_tokens=80) for tokens in prompts))
    assert [answer.token_ids for answer in answers] == [
        alone(plain, tokens, 80) for tokens in prompts
    ]
    assert all(drafted.values()), drafted
    assert engine.drain(60)
    engine.stop()
    engine.check_integrity()


def test_trees_of_a_look_up(models: Models) -> None:
    """Rows in a batch draft trees, are preempted and go on: states that branch are taken along."""
    plain = LLM(models.target, drafter="none", threads=1)
    options = Options(
        target=str(models.target),
        drafter="ngram",
        drafter_options={"tree": 3, "min_ngram": 1},
        num_draft_tokens=6,
        threads=1,
    )
    engine = make_engine(options, EngineSettings(max_num_seqs=2, kv_memory=64 << 20))
    engine.start()
    slow = ask(
        engine, *(request(prompt(9, seed) * 4, max_tokens=60, priority=1) for seed in (1, 2))
    )
    assert all(answer.begun.wait(60) for answer in slow)
    urgent = ask(engine, request(prompt(12, 3), max_tokens=12, priority=0))[0]
    assert urgent.token_ids == alone(plain, prompt(12, 3), 12)
    assert [answer.token_ids for answer in slow] == [
        alone(plain, prompt(9, seed) * 4, 60) for seed in (1, 2)
    ]
    assert sum(answer.finish.preemptions for answer in slow) == 1
    assert sum(answer.finish.stats.accepted for answer in slow) > 0
    assert engine.drain(60)
    engine.stop()
    engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "runtime", "reason"),
    [
        ({"drafter": "early-exit"}, "native", "which some of its layers do not have in our cache"),
        ({"drafter": "early-exit"}, "eager", "which some of its layers do not have in our cache"),
        (
            {"drafter": "ngram", "drafter_options": {"tree": 2}},
            "eager",
            "states cannot branch in transformers' own cache",
        ),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(
    options: dict[str, Any], runtime: str, reason: str, models: Models
) -> None:
    with pytest.raises(CapabilityError) as caught:
        LLM(models.target, threads=1, runtime=runtime, **options)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_hybrid_draft_model_grows_no_trees(models: Models) -> None:
    """A tree of a draft model takes a pass for each level, and states branch within one pass alone."""
    with pytest.raises(CapabilityError, match="running states branch within one pass alone"):
        LLM(
            models.target,
            draft=models.draft,
            drafter="draft-model",
            drafter_options={"tree": "2x2"},
            threads=1,
        )


@pytest.mark.slow
def test_a_runtime_that_does_not_know_its_layers_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "zaya", make("zaya", vocab_size=257), byte_tokenizer())
    with pytest.raises(
        CapabilityError,
        match=r"does not run on runtime 'native' \(torch's 'convolution'\): its layers keep",
    ):
        LLM(folder, threads=1, runtime="native", drafter="none")
    reason = LLM(folder, threads=1, drafter="none").notes[0]
    assert "keep more than keys and values of each token" in reason
    assert "; our runtime does not run it: torch's 'convolution'" in reason


@pytest.mark.slow
def test_it_is_reported_once(models: Models) -> None:
    llm = LLM(Path(models.target), drafter="ngram", threads=1, runtime="eager")
    assert [
        note for note in llm.notes if "runs on transformers' own cache, which is slower" in note
    ] == llm.notes[:1]
    assert llm.config["exact"] is False


def test_it_is_exact_on_the_native_runtime_and_starts_again_as_it_was(models: Models) -> None:
    """The second start takes what the first one found and kept."""
    texts = []
    for drafter in ("none", "ngram"):
        llm = LLM(Path(models.target), drafter=drafter, threads=1)
        assert llm.notes == []
        assert llm.config["exact"] is True
        assert llm.config["runtime"] == "native"
        texts.append(alone(llm, prompt(30), 40))
    assert texts[0] == texts[1]
