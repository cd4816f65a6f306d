"""Models whose code is older than the attention interface: what they compute by themselves stays as
it was."""

from __future__ import annotations

import copy

import pytest
import torch

from outrider.models import attention
from outrider.models.loading.load import build_lm
from outrider.models.loading.older_code import hand_over
from outrider.models.probes.probe import see_layers
from tests.contract.test_architectures import CONFIGS, make_module

OLD = ("bloom", "falcon")
IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("name", OLD)
@torch.inference_mode()
def test_its_own_attention_stays_its_own(name: str) -> None:
    """Catches a model that a user's program goes on with, and that has forgotten how to attend
    without a plan."""
    module = make_module(*CONFIGS[name])
    before = module(IDS, use_cache=False).logits
    own = module.config._attn_implementation
    build_lm(module, name, torch.float32, torch.device("cpu"))
    module.set_attn_implementation(own)
    assert torch.equal(module(IDS, use_cache=False).logits, before)


@torch.inference_mode()
def test_a_copy_asks_with_its_own_layers() -> None:
    """Catches a copy, as drafts of the target's own weights are, whose attention is still that of
    the model it was made from."""
    attention.register()
    module = make_module(*CONFIGS["bloom"])
    hand_over(module)
    twin = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.zero_()
    assert all(seen.kind.has_slopes for seen in see_layers(twin).values())
    assert module.config._attn_implementation == "eager"
    twin.set_attn_implementation("eager")
    assert torch.equal(
        twin(IDS, use_cache=False).logits,
        make_module(*CONFIGS["bloom"])(IDS, use_cache=False).logits,
    )
