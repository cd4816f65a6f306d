"""Models without some of their layers, on every architecture, against the same model with those
layers' weights zeroed.

A decoder layer adds to its input, so one whose weights are all zero hands its input on: a second
way to leave it out that shares nothing with ours.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.models import attention
from outrider.models.derived.truncate import DecoderLayers, SkippedLayer
from outrider.models.loading.load import build_lm
from tests.contract.test_architectures import CONFIGS, make_module
from tests.helpers import tiny_llama

TOKENS = torch.tensor([[5, 17, 3, 60, 41, 8, 22, 9, 77, 12, 30, 2]])
SKIPPED = ([1, 2], [0], [1], [0, 2])  # of three layers; the first is an exit after one layer


def layers_of(module: nn.Module) -> DecoderLayers:
    return DecoderLayers(module, build_lm(module, "it", torch.float32, torch.device("cpu")), "it")


def without_by_zeros(module: nn.Module, skipped: list[int]) -> nn.Module:
    plain = copy.deepcopy(module)
    found = next(part for part in plain.modules() if isinstance(part, nn.ModuleList))
    with torch.no_grad():
        for index in skipped:
            for parameter in found[index].parameters():
                parameter.zero_()
    plain.set_attn_implementation("eager")
    return plain


@torch.inference_mode()
def logits_on_cache(layers: DecoderLayers, skipped: list[int]) -> Tensor:
    lm = layers.run(layers.without(skipped))
    lm.kv.add_row()
    lm.forward(TOKENS[:, :7])
    lm.kv.advance(0, 7)
    return lm.forward(TOKENS[:, 7:]).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_left_out_layers_pass_their_input_on(name: str) -> None:
    """Catches a layer that finds another's keys, rotary table or window, a hidden state lost on the
    way to the norm."""
    attention.register()
    module = make_module(*CONFIGS[name])
    plain = copy.deepcopy(module)
    layers = layers_of(module)
    for skipped in SKIPPED:
        with torch.inference_mode():
            expected = without_by_zeros(plain, skipped)(input_ids=TOKENS, use_cache=False).logits[
                :, 7:
            ]
        torch.testing.assert_close(
            logits_on_cache(layers, skipped), expected, rtol=2e-4, atol=2e-4 * expected.abs().max()
        )


def test_the_model_itself_is_left_alone() -> None:
    """Catches layers taken out of the target: its text must stay the same."""
    module = tiny_llama(96, num_hidden_layers=3)
    layers = layers_of(module)
    before = logits_on_cache(layers, [])
    copy_ = layers.without([0, 2])
    assert torch.equal(logits_on_cache(layers, []), before)
    assert layers.without([]) is module
    assert copy_.model.layers[1] is module.model.layers[1]
    assert copy_.lm_head is module.lm_head
    assert not torch.equal(logits_on_cache(layers, [0, 2]), before)


def test_cost_is_the_share_of_weights_read() -> None:
    """Catches embeddings or left-out layers being counted: the search for an exit rests on it."""
    layers = layers_of(tiny_llama(96, num_hidden_layers=4))
    one = sum(parameter.numel() for parameter in layers.layers[0].parameters())
    rest = 96 * 64 + 64  # output layer and final norm
    assert layers.cost([]) == 1
    assert layers.cost([2, 3]) == pytest.approx((2 * one + rest) / (4 * one + rest))
    assert layers.cost([0, 1, 2]) == pytest.approx((one + rest) / (4 * one + rest))


class InTuple(nn.Module):
    """A decoder layer of older model code."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.attention_type = "full"

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor]:
        return (self.layer(*args, **kwargs),)


def test_layers_that_return_tuples() -> None:
    """Catches a bare tensor where model code takes element 0: it would go on with the first row
    only."""
    skipped = SkippedLayer(InTuple(nn.Identity()), in_tuple=True)
    hidden = torch.randn(2, 3, 4)
    assert skipped(hidden, attention_mask=None) == (hidden,)
    assert SkippedLayer(nn.Identity(), in_tuple=False)(hidden_states=hidden) is hidden
    assert skipped.attention_type == "full"
    assert list(skipped.parameters()) == []
    with pytest.raises(AttributeError):
        _ = skipped.no_such_thing


def test_layers_that_cannot_be_found_are_refused() -> None:
    """Catches drafting with the wrong list of modules."""
    module = tiny_llama(96)
    lm = build_lm(module, "it", torch.float32, torch.device("cpu"))
    module.others = nn.ModuleList([nn.Identity(), nn.Identity()])
    with pytest.raises(
        CapabilityError, match=r"it \(llama\): its 2 decoder layers were not found: 2 lists"
    ):
        DecoderLayers(module, lm, "it")
    del module.others
    module.config.num_hidden_layers = 7
    with pytest.raises(CapabilityError, match="no list of that many modules"):
        DecoderLayers(module, lm, "it")
