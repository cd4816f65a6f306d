"""Readers and layouts: the values of the formats' own definitions, to the bit, in every layout that
holds them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.models.gguf.linear import BlockLinear
from outrider.models.quantised.formats import Codes, MalformedError
from outrider.models.quantised.layers import joined, layer_of, panels_of
from outrider.models.quantised.scheme import Scheme, scheme_of
from tests.unit.models.quantised import stored
from tests.unit.models.quantised.stored import FORMATS, Integers, some

CPU = torch.device("cpu")


def config(settings: dict[str, Any], **more: Any) -> Any:
    found = SimpleNamespace(quantization_config=settings, **more)
    found.get_text_config = lambda: found
    return found


def scheme(settings: dict[str, Any]) -> Scheme:
    found = scheme_of(config(settings), CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_what_was_stored(name: str) -> None:
    """Catches the zeros of GPTQ that are stored one smaller, AWQ's order of outputs, and inputs in
    another group's scale."""
    own = FORMATS[name].make(48, 128, 0)
    found = scheme(FORMATS[name].config).read(FORMATS[name].write(own))
    assert torch.equal(found.values(), own.weight())


@pytest.mark.parametrize("outputs", [32, 70])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_in_blocks_has_the_same_values(name: str, outputs: int) -> None:
    own = FORMATS[name].make(outputs, 128, 1)
    codes = Codes(own.bits, own.codes.to(torch.uint8), own.scales, own.zeros.to(torch.int16))
    layer = layer_of(codes, torch.float32, None)
    assert isinstance(layer, BlockLinear)
    assert torch.equal(
        layer.weight,
        replace(own, groups=torch.arange(128) // (128 // own.scales.shape[1])).weight(),
    )


def test_act_order_is_a_layer_that_reorders_its_inputs() -> None:
    own = some(40, 128, 32, act_order=True)
    layer: Any = layer_of(
        scheme(stored.GPTQ | {"bits": 4}).read(stored.gptq(own)), torch.float32, torch.ones(40)
    )
    assert torch.equal(layer.weight, own.weight())
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), x @ own.weight().t() + 1)


def test_experts_in_different_bits_are_not_one() -> None:
    reader = scheme(FORMATS["gptq-dynamic"].config)
    first, second = (
        reader.read(stored.gptq(some(64, 128, 32, bits=bits, symmetric=True))) for bits in (4, 8)
    )
    assert joined([first, first]).codes.shape == (128, 128)
    with pytest.raises(
        MalformedError, match="its bits or groups of inputs are not those of the other experts"
    ):
        joined([first, second])


def test_a_zero_of_nothing_borrows_from_the_next() -> None:
    """GPTQModel takes one from each field of a word at once, so a field of 0 takes one from its
    neighbour."""
    own = some(48, 128, 32)
    own = replace(own, zeros=own.zeros.clamp(max=15) * (torch.arange(48)[:, None] % 3 > 0))
    parts = stored.gptq(own, less=0)
    parts["qzeros"] -= 0x11111111
    assert torch.equal(scheme(stored.GPTQ | {"bits": 4}).read(parts).values(), own.weight())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_that_no_half_holds_stay_bf16(bits: int, symmetric: bool) -> None:
    own = some(32, 64, 32, bits=bits, symmetric=symmetric, dtype=torch.bfloat16)
    tiny = Codes(
        bits,
        own.codes.to(torch.uint8),
        own.scales * 2**-18,
        own.zeros.clamp(max=255).to(torch.int16),
    )
    made = panels_of(tiny)
    assert made is not None
    assert made[1].factors == torch.bfloat16
    assert torch.equal(layer_of(tiny, torch.float32, None).weight, tiny.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda codes: replace(
            codes, scales=codes.scales.float() / 3
        ),  # no type of 16 bits holds them
        lambda codes: replace(
            codes,
            scales=codes.scales.repeat_interleave(4, 1),
            zeros=codes.zeros.repeat_interleave(4, 1),
        ),
    ],
)
def test_what_no_layout_holds_is_widened(change: Any) -> None:
    """Catches a scale that is rounded, and groups of 16 that share one."""
    own = some(32, 128, 64)
    codes = change(Codes(4, own.codes.to(torch.uint8), own.scales, own.zeros.to(torch.int16)))
    assert panels_of(codes) is None
    layer = layer_of(codes, torch.float32, None)
    assert type(layer) is torch.nn.Linear
    assert torch.equal(layer.weight, codes.values())


def malformed(parts: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    found = {**parts, **changes}
    return {name: part for name, part in found.items() if part is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, "scales is missing"),
        ({"qzeros": None}, "qzeros is missing"),
        ({"scales": torch.ones(3, 48)}, "do not fit together"),
        ({"qweight": torch.zeros(16, 48)}, "not in int32"),
        ({"g_idx": torch.zeros(128, dtype=torch.int32)}, "of different sizes"),
    ],
)
def test_malformed_layers_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    own: Integers = some(48, 128, 32)
    with pytest.raises(MalformedError, match=message):
        scheme(stored.GPTQ | {"bits": 4}).read(malformed(stored.gptq(own), **changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (stored.GPTQ | {"bits": 3}, "3 bits"),
        (stored.GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "8 bits"),
        ({"quant_method": "exl2", "bits": 4.0}, "quantised by exl2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quantised by modelopt"),
    ],
)
def test_kinds_that_we_lack_are_named_with_what_works(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CapabilityError, match=rf"{message}.*What can: GPTQ in 4 and 8 bits"):
        scheme_of(config(settings), CPU)


def test_mlx_is_named() -> None:
    """Its config.json has settings under `quantization`, newer ones under both names."""
    for more in ({}, {"quantization_config": {"group_size": 64, "bits": 4}}):
        made = config(more.get("quantization_config"), quantization={"group_size": 64, "bits": 4})
        with pytest.raises(CapabilityError, match="quantised by mlx cannot be read"):
            scheme_of(made, CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "dequantize": True},
        {"quant_method": "bitsandbytes"},
        {"load_in_4bit": True},
        stored.compressed("float-quantized", 8),
        stored.compressed("marlin-24", 4),
        {
            **stored.compressed("pack-quantized", 4),
            "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": []}}},
        },
    ],
)
def test_other_schemes_are_left_to_transformers(settings: dict[str, Any]) -> None:
    assert scheme_of(config(settings), CPU) is None


def test_compressed_tensors_reads_the_same() -> None:
    """The library's own functions, where it is installed, pack what ours unpack."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    own = some(48, 128, 32)
    signed = (own.codes - 8).to(torch.int8)
    assert torch.equal(helpers.pack_to_int32(signed, 4), stored.words(own.codes, 4))
    zeros = helpers.pack_to_int32((own.zeros - 8).to(torch.int8), 4, packed_dim=0)
    assert torch.equal(zeros, stored.packed(own)["weight_zero_point"])
