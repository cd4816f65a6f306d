"""Latent attention from the compressed cache, beside transformers' code, which expands it to keys
and values of each head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.cache import cache_folder
from outrider.models import latent
from outrider.models.attention import NAME, register
from outrider.models.gguf.formats import Q8, pack_parts
from outrider.models.gguf.linear import BlockLinear
from outrider.models.latent import LatentProduct, keep_latents
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.models.loading.memory import kv_bytes_per_token
from outrider.models.probes.pass_limits import WIDTHS
from outrider.models.probes.probe import probe_tokens
from outrider.models.probes.sum_order import linear_samples, same_bits
from outrider.models.quantised.on_loading import quantise_linears, rounded_parts
from outrider.runtime.run import use_native_run
from tests.unit.runtime.families import LATENT, SIZES, make

CPU = torch.device("cpu")
FEW = ("deepseek_v2", "deepseek_v3", "minicpm3")  # complex rotation, experts, plain rotation
KEPT = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]


def plain_model(**changes: Any) -> Any:
    """transformers' own, without anything of ours."""
    config = AutoConfig.for_model("minicpm3", **{**SIZES, **LATENT, **changes})
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )


def products(module: nn.Module) -> list[LatentProduct]:
    return [part for part in module.modules() if isinstance(part, LatentProduct)]


@pytest.mark.parametrize("family", FEW)
def test_a_token_costs_its_latent(family: str) -> None:
    """Catches a cache of expanded keys, and an estimate of another size than the cache's."""
    module = make(family)
    lm = build_lm(module, family, torch.float32, CPU)
    num_layers = len(lm.shape.layers)
    assert (
        lm.kv.bytes_per_token
        == num_layers * KEPT * 4
        == kv_bytes_per_token(module.config, torch.float32)
    )
    assert sum(store.nbytes for store in (*lm.kv.keys, *lm.kv.values)) == lm.kv.allocated_bytes


@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_a_token_beside_an_indexer_costs_its_key_too(family: str) -> None:
    """Catches a key that is not counted, and one that is counted in layers that share another's
    choice."""
    module = make(family)
    lm = build_lm(module, family, torch.float32, CPU)
    assert lm.kv.bytes_per_token == kv_bytes_per_token(module.config, torch.float32)
    assert sum(store.nbytes for store in (*lm.kv.keys, *lm.kv.values)) == lm.kv.allocated_bytes


def test_heads_are_counted_where_they_are_kept() -> None:
    """By a checkpoint's own code, and by layers that stay quantised in transformers' code."""
    config = plain_model().config
    own = type(
        "OwnConfig", (type(config),), {"__module__": "transformers_modules.mine.configuration"}
    )
    heads = SIZES["num_attention_heads"] * (
        LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"] + LATENT["v_head_dim"]
    )
    expected = SIZES["num_hidden_layers"] * heads * 4
    assert kv_bytes_per_token(own(**config.to_dict()), torch.float32) == expected
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert kv_bytes_per_token(config, torch.float32) == expected
    config.quantization_config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    }
    assert kv_bytes_per_token(config, torch.float32) == SIZES["num_hidden_layers"] * KEPT * 4, (
        "read into blocks of ours"
    )


def rows_behind(lm: LM, texts: list[list[int]], drafts: Tensor) -> Tensor:
    """Logits of drafts behind texts of unequal length, in one pass."""
    lm.kv.clear()
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts)
    return lm.forward(drafts).logits


@pytest.mark.parametrize("runtime", ["eager", "native"])
@pytest.mark.parametrize("family", FEW)
@torch.inference_mode()
def test_logits_are_those_of_the_expanded_cache(
    family: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a query that lost its rotated part, values of another width, and a row that reads its
    neighbour's."""
    tokens = probe_tokens(SIZES["vocab_size"], 700, CPU)[0].tolist()
    texts = [tokens[:5], tokens[5:45], tokens[45:645]]
    drafts = torch.tensor([tokens[640:646], tokens[650:656], tokens[660:666]])

    def found(*, is_native: bool) -> Tensor:
        with torch.inference_mode(False):
            module = make(family)
            lm = build_lm(module, family, torch.float32, CPU)
            if is_native:
                use_native_run(lm, module, cache_folder())
        return rows_behind(lm, texts, drafts)

    ours = found(is_native=runtime == "native")
    monkeypatch.setattr(latent, "keep_latents", lambda module: None)
    monkeypatch.setattr("outrider.models.loading.older_code.keep_latents", lambda module: None)
    expanded = found(is_native=False)
    assert (ours - expanded).abs().max() < 1e-4 * expanded.abs().max()
    assert torch.equal(ours.argmax(-1), expanded.argmax(-1))


@torch.inference_mode()
def test_others_attend_over_heads_as_before() -> None:
    """Catches a module that reads latents under attention that is not ours, or whose weights have
    lost their names."""
    register()
    module = plain_model()
    ids = probe_tokens(SIZES["vocab_size"], 9, CPU)
    names = list(module.state_dict())
    before = module(ids).logits
    keep_latents(module)
    keep_latents(module)
    assert len(products(module)) == SIZES["num_hidden_layers"]
    assert list(module.state_dict()) == names
    assert torch.equal(module(ids).logits, before)
    module.set_attn_implementation(NAME)
    twin = copy.deepcopy(module)
    twin.set_attn_implementation("eager")
    assert (twin(ids).logits - before).abs().max() < 1e-4


def test_weights_in_blocks_are_multiplied_from_both_sides() -> None:
    """Catches a quantised checkpoint that keeps heads, or whose latents meet other numbers than its
    blocks hold."""
    module = plain_model(kv_lora_rank=32)
    ids = probe_tokens(SIZES["vocab_size"], 9, CPU)
    for layer in module.model.layers:
        weight = layer.self_attn.kv_b_proj.weight
        panels = pack_parts(rounded_parts(weight, Q8), Q8)
        layer.self_attn.kv_b_proj = BlockLinear(panels, Q8, *weight.shape, torch.float32)
    with torch.inference_mode():
        before = module(ids).logits
    lm = build_lm(module, "tiny", torch.float32, CPU)
    assert len(products(module)) == SIZES["num_hidden_layers"]
    assert lm.shape.layers[0].values_in_keys
    with torch.inference_mode():
        assert (
            rows_behind(lm, [ids[0, :1].tolist()], ids) - before
        ).abs().max() < 1e-4 * before.abs().max()


class Quantised(nn.Linear):
    """A stand-in for the layers of transformers' quantisers: integers, which their own forward
    widens by scales."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        scales = plain.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (plain.weight / scales).round().to(torch.int8), requires_grad=False
        )
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.weight_scale_inv)


def scaled_outside(plain: nn.Linear) -> nn.Linear:
    """A layer of torch's class, whose hooks multiply with scales beside its floats."""
    plain.register_buffer("weight_scale", torch.full((len(plain.weight), 1), 0.5))
    plain.register_forward_hook(lambda layer, _, out: out * layer.weight_scale.T)
    return plain


@pytest.mark.parametrize("quantised", [Quantised, scaled_outside])
def test_a_matrix_that_stays_quantised_expands_heads(
    quantised: Callable[[nn.Linear], nn.Linear],
) -> None:
    """Catches integers that are multiplied without their scales."""
    module = plain_model()
    ids = probe_tokens(SIZES["vocab_size"], 9, CPU)
    for layer in module.model.layers:
        layer.self_attn.kv_b_proj = quantised(layer.self_attn.kv_b_proj)
    with torch.inference_mode():
        before = module(ids).logits
    lm = build_lm(module, "tiny", torch.float32, CPU)
    assert not products(module)
    assert not lm.shape.layers[0].values_in_keys
    with torch.inference_mode():
        assert (
            rows_behind(lm, [ids[0, :1].tolist()], ids) - before
        ).abs().max() < 1e-4 * before.abs().max()


def test_rounding_on_loading_leaves_the_matrix() -> None:
    """Catches numbers that are rounded and then kept as wide as before."""
    module = plain_model(kv_lora_rank=32)
    quantise_linears(module, 8, "tiny")
    kept = [type(layer.self_attn.kv_b_proj) for layer in module.model.layers]
    assert kept == [nn.Linear] * len(kept)
    assert isinstance(module.model.layers[0].self_attn.o_proj, BlockLinear)


def test_a_product_that_sums_otherwise_at_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches limits of passes that are found without the halves of the matrix."""
    module = make("deepseek_v3")
    lm = build_lm(module, "tiny", torch.float32, CPU)
    plain = latent._by_head

    def halved(x: Tensor, weights: Tensor) -> Tensor:
        if x.shape[1] != 3:
            return plain(x, weights)
        half = weights.shape[1] // 2
        return plain(x[..., :half], weights[:, :half]) + plain(x[..., half:], weights[:, half:])

    monkeypatch.setattr(latent, "_by_head", halved)
    samples = list(linear_samples(nn.ModuleList(products(module)), lm, WIDTHS))
    assert len(samples) == 2, "one of each half, of layers of one shape"
    assert not any(same_bits(sample, [3, 8]) for sample in samples)
