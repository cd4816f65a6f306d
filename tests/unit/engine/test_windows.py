"""A target most of whose layers have windows in the engine: prefixes, preemption, a draft of its
own kind, and memory.

What it says is compared with plain decoding on a cache that keeps whole texts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.scheduler import KVBudget
from outrider.kv.cache import BLOCK, KVCache, LayerShape
from tests.helpers import byte_tokenizer, save_checkpoint
from tests.unit.engine.conftest import MakeEngine, Models, ask, request
from tests.unit.runtime.families import SIZES
from tests.unit.runtime.test_windows import greedy, native_lm, text_of, whole


def windowed(noise: float = 0.0) -> Any:
    """Two layers with windows before one without; with noise, a draft that is often right."""
    config = AutoConfig.for_model(
        "gemma3_text",
        **{**SIZES, "vocab_size": 257, "num_hidden_layers": 3, "max_position_embeddings": 4096},
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = (
            AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            .eval()
            .requires_grad_(False)
        )
        for parameter in module.parameters():
            parameter += (
                noise * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0
            )
    return module


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("windows")
    return Models(
        save_checkpoint(folder / "target", windowed(), byte_tokenizer()),
        save_checkpoint(folder / "draft", windowed(0.03), byte_tokenizer()),
    )


@cache
def reference() -> Any:
    return whole(native_lm(windowed()))


def alone(tokens: list[int], count: int) -> list[int]:
    """What plain decoding writes behind a prompt."""
    return greedy(reference(), tokens, count)


def prompt(length: int, seed: int) -> list[int]:
    return [3 + token for token in text_of(length, seed)]


@pytest.mark.slow
def test_prefixes(engine_of: MakeEngine) -> None:
    """A prompt's pages serve at every position; an answer's where it ended. Catches zeros of layers
    that have forgotten."""
    engine = engine_of()
    first = prompt(1700, 1)
    answer = ask(engine, request(first, max_tokens=900))[0]
    assert answer.token_ids == alone(first, 900)
    known = engine._scheduler.drafts.copy(first[:700])
    assert [part[0].shape[0] for part in known] == [672], "the draft, too"
    for length, cached in ((1680, 1664), (700, 672), (90, 64)):
        tokens = [*first[:length], *prompt(9, length)]
        again = ask(engine, request(tokens))[0]
        assert again.finish.cached_tokens == cached
        assert again.token_ids == alone(tokens, 24)
    turn = [*first, *answer.token_ids, *prompt(20, 5)]
    again = ask(engine, request(turn))[0]
    assert again.finish.cached_tokens == 2592
    assert again.token_ids == alone(turn, 24)
    middle = [*turn[:2000], *prompt(20, 6)]  # within the answer, where windows have passed on
    again = ask(engine, request(middle))[0]
    assert again.finish.cached_tokens == 1696
    assert again.token_ids == alone(middle, 24)


@pytest.mark.slow
def test_preemption(engine_of: MakeEngine) -> None:
    """A row that comes back holds what its windows reach."""
    engine = engine_of(max_num_seqs=2)
    slow = ask(
        engine, *(request(prompt(1300, seed), max_tokens=300, priority=1) for seed in (11, 12))
    )
    assert all(answer.begun.wait(60) for answer in slow)
    urgent = ask(engine, request(prompt(12, 13), max_tokens=12, priority=0))[0]
    assert urgent.token_ids == alone(prompt(12, 13), 12)
    assert [answer.token_ids for answer in slow] == [
        alone(prompt(1300, seed), 300) for seed in (11, 12)
    ]
    assert sum(answer.finish.preemptions for answer in slow) == 1
    assert max(answer.finish.stats.tau or 0 for answer in slow) > 1.2, "its drafts are kept"


def test_memory_is_counted_as_it_is_used() -> None:
    """Five of six layers have a window: a text may be over three times as long in the same memory."""
    layers = [LayerShape(1, 2, 2, window=16)] * 5 + [LayerShape(1, 2, 2)]
    batch, prompts = (KVCache(layers, torch.float32, "cpu") for _ in range(2))

    def cost(capacity: int) -> int:
        return -(-batch.slot_bytes(capacity) // batch.bytes_per_token)

    budget = KVBudget(8 * BLOCK, batch, prompts, cost, 1 << 20)
    assert budget.longest == 14 * BLOCK
    assert KVBudget(8 * BLOCK, batch, prompts).longest == 4 * BLOCK
    assert budget.has_row(budget.longest, budget.longest)
    assert not budget.has_row(budget.longest + 1, budget.longest)
    for one in (batch, prompts):
        one.add_row()
        one.reserve(1, budget.longest)
    assert (
        batch.allocated_bytes + prompts.allocated_bytes <= budget.positions * batch.bytes_per_token
    )
    batch.lengths[0] = 3000
    assert budget.used == -(-(3000 + 5 * 2 * BLOCK) // 6)


def test_both_models_memory_is_counted(engine_of: MakeEngine) -> None:
    """Catches windows of the draft model, or of the target, that are not subtracted."""
    scheduler = engine_of(start=False)._scheduler
    built = scheduler.batch.built
    assert built.draft is not None
    caches = built.target.lm.kv, built.draft.lm.kv
    for capacity in (BLOCK, 2 * BLOCK, 8 * BLOCK):
        bytes_of_row = sum(cache.slot_bytes(capacity) for cache in caches)
        assert scheduler._cost(capacity) == -(
            -bytes_of_row // sum(cache.bytes_per_token for cache in caches)
        )
    assert scheduler._cost(8 * BLOCK) == 4 * BLOCK, "two of three layers have windows"
