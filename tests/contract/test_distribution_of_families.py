"""Every family's sampled text has the target's joint distribution: all outcomes of several real
steps are enumerated.

Passes, rejections and commits are the served model's own; two allowed tokens keep the outcomes few.
The expected distribution is that of transformers' passes over whole texts. A state that still holds
a rejected token, or lacks a kept one, gives the next token another distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.cache import cache_folder
from outrider.errors import CapabilityError
from outrider.models.loading.load import build_lm, finish
from outrider.models.stateful.lm import StateLM
from outrider.runtime.run import use_native_run
from outrider.types import Draft
from outrider.verifiers import VERIFIERS
from tests.contract import own_cache_families
from tests.contract.family_reference import ASKED_BY_GENERATING, next_logits
from tests.enumeration.intervals import IntervalRandomness, keyed_by_step, next_script
from tests.oracle import Joint, Path, total_variation
from tests.unit.runtime import families

PROMPT = (5, 9, 17, 4)
ALLOWED = (11, 40)
GAMMA = 2
HORIZON = 4
TOLERANCE = 1e-4  # of fp32 logits whose sums have another order
ALWAYS = {
    *own_cache_families.ONE_OF_EACH_KIND,
    "llama",
    "gemma3n_text",
    "gpt_oss",
    "deepseek_v2",
    "mixtral",
}
OURS = (*families.FAMILIES, *families.NOT_LOWERED)
EACH = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly)
    for name in (*OURS, *own_cache_families.ON_TRANSFORMERS_CACHE)
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(family: str) -> Any:
    return families.make(family) if family in OURS else own_cache_families.make(family)


def served(family: str) -> Any:
    """The model as loading serves it."""
    module = made(family)
    lm = build_lm(module, family, torch.float32, torch.device("cpu"))
    if isinstance(lm, StateLM):
        finish(lm, module)
        return lm
    try:
        use_native_run(lm, module, cache_folder())
    except CapabilityError:
        finish(lm, module)
    return lm


def distributions(logits: Tensor) -> Tensor:
    """(..., V) -> (..., 2), at temperature 1."""
    return logits[..., list(ALLOWED)].double().softmax(dim=-1)


@torch.inference_mode()
def expected(family: str) -> Joint:
    """The joint distribution of the next tokens, from transformers' passes over whole texts."""
    module = made(family)
    joint = {(): 1.0}

    def behind(texts: Tensor) -> Tensor:
        if family in ASKED_BY_GENERATING:
            return next_logits(module, texts)
        return module(input_ids=texts, use_cache=False).logits[:, -1]

    for _ in range(HORIZON):
        paths = list(joint)
        texts = torch.tensor([[*PROMPT, *(ALLOWED[index] for index in path)] for path in paths])
        found = distributions(behind(texts))
        joint = {
            (*path, index): joint[path] * float(found[row, index])
            for row, path in enumerate(paths)
            for index in range(len(ALLOWED))
        }
    return joint


def drafted(path: Path) -> list[int]:
    """A draft that depends on the text and is often wrong."""
    return [(len(path) + sum(path) + index) % len(ALLOWED) for index in range(GAMMA)]


@torch.inference_mode()
def walk(lm: Any, rng: IntervalRandomness) -> Path:
    """Steps until the horizon, with the outcomes that `rng` names."""
    while lm.kv.num_rows:
        lm.kv.swap_remove(0)
    lm.kv.add_row()
    lm.catch_up([list(PROMPT)])
    verifier = VERIFIERS.load("block")()
    path = ()
    pending = PROMPT[-1]
    while len(path) < HORIZON:
        draft = drafted(path)
        logits = lm.forward(torch.tensor([[pending, *(ALLOWED[index] for index in draft)]])).logits
        start = torch.tensor([len(path)])
        chain = Draft(torch.tensor([draft]), torch.tensor([GAMMA]))
        verdict = verifier.verify(chain, distributions(logits), rng, start)
        kept = int(verdict.num_accepted)
        lm.kv.keep(0, range(kept + 1))
        path = (*path, *draft[:kept], int(verdict.next_token))
        pending = ALLOWED[path[-1]]
    return path[:HORIZON]


def speculated(lm: Any) -> Joint:
    """The joint distribution of what speculative steps emit."""
    joint: Joint = {}
    script: list[int] | None = []
    while script is not None:
        rng = IntervalRandomness(keyed_by_step, script)
        path = walk(lm, rng)
        joint[path] = joint.get(path, 0.0) + rng.weight
        script = next_script(script, rng.branches)
    return joint


@pytest.mark.parametrize("family", EACH)
def test_sampled_text_has_the_targets_distribution(family: str) -> None:
    joint = speculated(served(family))
    assert sum(joint.values()) == pytest.approx(1.0)
    assert total_variation(joint, expected(family)) < TOLERANCE


@pytest.mark.slow
def test_a_state_that_keeps_rejected_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite sees a cache that commits the whole draft."""
    lm = served("qwen3_5_text")
    keep = lm.kv.keep

    def keeps_all(row: int, path: Any) -> None:
        keep(row, range(GAMMA + 1))

    monkeypatch.setattr(lm.kv, "keep", keeps_all)
    assert total_variation(speculated(lm), expected("qwen3_5_text")) > 10 * TOLERANCE
