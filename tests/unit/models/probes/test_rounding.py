"""Rounding that moves a model's logits by more than the tolerance does not keep the model from our
cache and runtime."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from outrider.errors import CapabilityError
from outrider.models import attention
from outrider.models.loading.load import build_lm
from outrider.models.probes import probe
from outrider.models.probes.probe import (
    check_same_logits,
    is_rounding,
    probe_logits,
    rounding_noise,
)
from outrider.models.stateful import check
from outrider.models.stateful.lm import StateLM
from outrider.models.stateful.run import OwnCacheRun
from outrider.runtime.run import use_native_run
from tests.contract.test_architectures import GROUPED

BF16 = torch.bfloat16
CPU = torch.device("cpu")
NOISY = {**GROUPED, "num_hidden_layers": 16, "initializer_range": 0.3}


def _llama(**options: object) -> transformers.LlamaForCausalLM:
    attention.register()
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).to(BF16).eval()


@cache
def _noisy() -> transformers.LlamaForCausalLM:
    return _llama(**NOISY)


def test_what_explains_a_difference() -> None:
    noise = rounding_noise(_noisy(), BF16)
    assert 0.04 < noise < probe.MAX_ROUNDING / 2
    assert is_rounding(1.9 * noise, _noisy(), BF16)
    assert not is_rounding(2.1 * noise, _noisy(), BF16)
    calm = _llama(**GROUPED)
    assert is_rounding(0.079, calm, BF16)
    assert not is_rounding(0.081, calm, BF16)


def test_rounding_hides_nothing_large() -> None:
    chaotic = _llama(**{**NOISY, "num_hidden_layers": 32, "initializer_range": 0.6})
    assert rounding_noise(chaotic, BF16) > probe.MAX_ROUNDING
    assert not is_rounding(probe.MAX_ROUNDING + 0.01, chaotic, BF16)


def test_the_way_that_moves_most_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    several = rounding_noise(_noisy(), BF16)
    monkeypatch.setattr(probe, "NUM_ROUNDINGS", 1)
    assert rounding_noise(_noisy(), BF16) < several


def test_a_model_that_rounding_moves_runs_on_transformers_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is fed whole texts there, and not read anew for each token."""
    shape = build_lm(_noisy(), "noisy", BF16, CPU).shape
    monkeypatch.setattr(check, "_why_no_pass_tells", lambda *args: None)
    monkeypatch.setattr(
        check, "difference", lambda *args, **options: 1.5 * rounding_noise(_noisy(), BF16)
    )
    assert 1.5 * rounding_noise(_noisy(), BF16) > probe.tolerance(BF16)
    module = _llama(**NOISY)
    module.set_attn_implementation("eager")
    check.check_own_cache(
        StateLM(OwnCacheRun(module), shape, BF16, CPU, name="noisy", why="it is tried")
    )
    monkeypatch.setattr(
        check, "difference", lambda *args, **options: 2.5 * rounding_noise(_noisy(), BF16)
    )
    with pytest.raises(CapabilityError, match=r"there its logits are .* off"):
        check.check_own_cache(
            StateLM(OwnCacheRun(module), shape, BF16, CPU, name="noisy", why="it is tried")
        )


def test_a_module_is_left_as_it_was() -> None:
    module = _llama(**GROUPED)
    lm = build_lm(module, "calm", BF16, CPU)
    before = probe_logits(lm)
    rounding_noise(module, BF16)
    assert torch.equal(probe_logits(lm), before)


def test_a_model_that_rounding_moves_runs_on_our_cache_and_runtime(
    monkeypatch: pytest.MonkeyPatch, library_path: Path, tmp_path: Path
) -> None:
    """With a tolerance that its differences exceed, as those of deep models in 4 bits do."""
    monkeypatch.setattr(probe, "tolerance", lambda dtype: 1e-3)
    lm = build_lm(_noisy(), "noisy", BF16, CPU)
    assert lm.why_own_cache is None
    use_native_run(lm, _noisy(), cache=tmp_path)


def test_other_logits_are_not_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A noisy model that computes something else is found out, too."""
    lm = build_lm(_noisy(), "noisy", BF16, CPU)
    expected = probe_logits(lm)
    with pytest.raises(CapabilityError, match="differ from the plain ones by"):
        check_same_logits(lm, expected.roll(1, dims=-1), _noisy())
