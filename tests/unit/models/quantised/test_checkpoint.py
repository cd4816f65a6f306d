"""Checkpoints with quantised weights: the memory line says what loading them takes, and they run in
the dtype asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.models.loading.load import load_config, load_module
from outrider.models.loading.memory import PACKED_COPIES, model_memory
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

CPU = torch.device("cpu")
BLOCK = 128


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Blocks of 128 x 128 with a scale each, as DeepSeek and Qwen publish them."""
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).view(outputs, inputs).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scale}


def channels(weight: Tensor) -> dict[str, Tensor]:
    """A scale for each output, as compressed-tensors has them."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"": (weight.float() / scale).to(torch.float8_e4m3fn), "_scale": scale.bfloat16()}


def compressed(layout: str, bits: int, kind: str, **more: Any) -> dict[str, Any]:
    """What compressed-tensors writes into config.json."""
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel",
        **more,
    }
    inputs = (
        {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
        if bits == 8
        else None
    )
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


WIDE = {"dequantize": True}  # else they stay as they are (`quantised/`)
WIDENED: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", **WIDE}),
    "compressed-fp8": (channels, compressed("float-quantized", 8, "float") | WIDE),
}  # fmt: skip


def quantised(folder: Path, name: str) -> Path:
    """A checkpoint whose projections are quantised, written by hand."""
    if name.startswith("compressed"):
        pytest.importorskip("compressed_tensors")
    quantise, config = WIDENED[name]
    model = tiny_llama(96, hidden_size=256, intermediate_size=512).to(torch.bfloat16)
    save_checkpoint(folder, model, word_tokenizer(96))
    tensors: dict[str, Tensor] = {}
    for key, weight in model.state_dict().items():
        parts = quantise(weight) if key.endswith("proj.weight") else {"": weight}
        tensors |= {key + ending: part for ending, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return folder


def held(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WIDENED)
def test_what_is_widened_on_load_is_weighed_so(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Catches a line that counts 8 bits for a weight that takes 16 or 32, and one dtype in half of
    the layers."""
    folder = str(quantised(tmp_path, name))
    memory = model_memory(resolve(str(folder)), load_config(resolve(str(folder))), dtype)
    module = load_module(resolve(str(folder)), load_config(resolve(str(folder))), dtype, CPU)
    assert memory.weights_bytes == pytest.approx(held(module), rel=0.01)
    assert memory.quantised_bytes == 0
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WIDENED)
def test_widened_checkpoints_run(name: str, dtype: str, tmp_path: Path) -> None:
    """With --dtype float32 half of an fp8 model stayed bf16, and its first product failed;
    compressed-tensors rounded each layer's input, in transformers' passes but not in ours."""
    llm = LLM(quantised(tmp_path, name), drafter="none", dtype=dtype, runtime="eager")
    assert llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4))[0].stats.steps


@pytest.fixture(params=[4, 8])
def bnb(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    pytest.importorskip("bitsandbytes")
    plain = save_checkpoint(
        tmp_path / "plain", tiny_llama(96, hidden_size=256, intermediate_size=512).bfloat16(), None
    )
    bits = BitsAndBytesConfig(load_in_4bit=request.param == 4, load_in_8bit=request.param == 8)
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=bits, dtype=torch.bfloat16
    )
    return save_checkpoint(tmp_path / "quantised", model, word_tokenizer(96))


def test_what_stays_quantised_is_not_packed_a_second_time(bnb: Path) -> None:
    memory = model_memory(resolve(str(bnb)), load_config(resolve(str(bnb))), torch.bfloat16)
    module = load_module(resolve(str(bnb)), load_config(resolve(str(bnb))), torch.bfloat16, CPU)
    codes = sum(
        parameter.nbytes for parameter in module.parameters() if not parameter.is_floating_point()
    )
    assert memory.quantised_bytes == pytest.approx(codes, rel=0.1)  # and, in 4 bits, the scales
    assert memory.held_bytes(PACKED_COPIES) == pytest.approx(
        codes + 2 * (held(module) - codes), rel=0.1
    )


def test_a_dtype_that_quantised_layers_do_not_have(bnb: Path) -> None:
    """It was ignored, or ended in a traceback of the library."""
    with pytest.raises(
        CapabilityError, match=r"is quantised \(bitsandbytes\) and runs in bfloat16, not in float32"
    ):
        LLM(bnb, drafter="none", dtype="float32", runtime="eager")


def header(folder: Path, **tensors: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(
        {key.replace("__", "."): tensor for key, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def config_with(tmp_path: Path, **changes: Any) -> Any:
    model = tiny_llama(
        96, **{key: value for key, value in changes.items() if key != "quantization_config"}
    )
    config = model.config
    if "quantization_config" in changes:
        config.quantization_config = changes["quantization_config"]
    return config


def test_packed_integers_keep_their_size(tmp_path: Path) -> None:
    """GPTQ and AWQ: eight weights in an int32, and no plain copy of them is ever made."""
    codes = torch.zeros(100, dtype=torch.int32)
    scales = torch.zeros(10, dtype=torch.float16)
    folder = header(tmp_path / "m", a__qweight=codes, a__scales=scales)
    for method in ("gptq", "awq"):
        config = config_with(
            tmp_path, quantization_config={"quant_method": method, "bits": 4, "group_size": 128}
        )
        memory = model_memory(resolve(str(folder)), config, torch.bfloat16)
        assert (memory.weights_bytes, memory.quantised_bytes) == (420, 400)


def test_mxfp4_that_is_widened(tmp_path: Path) -> None:
    """gpt-oss: two weights in a byte become 16 bits each where the config wants them plain."""
    blocks = torch.zeros(2, 4, 2, 16, dtype=torch.uint8)
    folder = header(
        tmp_path / "m", up_blocks=blocks, up_scales=torch.zeros(2, 4, 2, dtype=torch.uint8)
    )
    config = config_with(tmp_path, quantization_config={"quant_method": "mxfp4", **WIDE})
    assert (
        model_memory(resolve(str(folder)), config, torch.bfloat16).weights_bytes
        == 2 * blocks.numel() * 2
    )


def test_tied_embeddings_that_are_stored_twice_are_held_once(tmp_path: Path) -> None:
    folder = header(
        tmp_path / "m",
        lm_head__weight=torch.zeros(96, 64),
        model__embed_tokens__weight=torch.zeros(96, 64),
    )
    for tied, copies in ((True, 1), (False, 2)):
        config = config_with(tmp_path, tie_word_embeddings=tied)
        assert (
            model_memory(resolve(str(folder)), config, torch.float32).weights_bytes
            == copies * 96 * 64 * 4
        )


def test_pickled_weights_in_another_dtype(tmp_path: Path) -> None:
    """Their files have no header: the config says in which dtype they are stored."""
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(4000))
    config = config_with(tmp_path)
    config.dtype = torch.float32
    assert model_memory(resolve(str(tmp_path)), config, torch.bfloat16).weights_bytes == 2000
