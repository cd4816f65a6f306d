"""Targets in fp8 and mxfp4, and experts of every scheme: the values of the dequantised model, small
in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from outrider.errors import CheckpointError
from outrider.llm import LLM
from outrider.models.gguf.formats import E2M1_LEVELS
from outrider.models.gguf.linear import BlockExperts, block_layers
from outrider.models.lm import PassLimits
from outrider.models.loading.load import build_lm, load_config, load_module
from outrider.models.loading.memory import model_memory
from outrider.models.quantised.floats import fp8
from outrider.models.quantised.formats import MalformedError
from outrider.models.quantised.load import quantised_note
from outrider.models.quantised.scheme import scheme_of
from outrider.models.source import resolve
from outrider.runtime import library
from outrider.runtime.limits import find_native_limits
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from tests.contract.multimodal_families import make_whole
from tests.helpers import save_checkpoint, word_tokenizer
from tests.reference_run import ReferenceRun
from tests.unit.models.quantised import stored
from tests.unit.runtime.families import make
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
BLOCK = 32  # outputs and inputs that share a scale
Parts = tuple[dict[str, Tensor], Tensor]  # as stored, by the end of the name; the weight


def in_blocks(weight: Tensor, number: int) -> Parts:
    """As DeepSeek and Qwen publish them, in smaller blocks. The last ones are not full."""
    high = -weight.shape[0] % BLOCK
    wide = -weight.shape[1] % BLOCK
    padded = torch.nn.functional.pad(weight, (0, wide, 0, high))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).view(padded.shape).to(torch.float8_e4m3fn)
    values = (codes.float().view(blocks.shape) * scale[:, None, :, None]).view(padded.shape)
    cut = slice(weight.shape[0]), slice(weight.shape[1])
    return {"weight": codes[cut].contiguous(), "weight_scale_inv": scale}, values[cut]


def by_output(weight: Tensor, number: int) -> Parts:
    """As compressed-tensors has them."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def as_gptq(weight: Tensor, number: int) -> Parts:
    own = stored.some(*weight.shape, 32, symmetric=True, seed=number)
    own = replace(own, scales=own.scales / 16)
    return stored.gptq(own), own.weight()


def whole(weight: Tensor, number: int) -> Parts:
    """As AutoFP8 and NVIDIA's ModelOpt have them: one scale, and one for the inputs, which is not
    used."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {
        "weight": codes,
        "weight_scale": scale,
        "input_scale": torch.tensor(0.5),
    }, codes.float() * scale


def as_mxfp4(weight: Tensor, number: int) -> Parts:
    """As compressed-tensors has single layers: 32 inputs share an exponent."""
    generator = torch.Generator().manual_seed(number)
    packed = torch.randint(
        0, 256, (len(weight), weight.shape[1] // 2), dtype=torch.uint8, generator=generator
    )
    scales = torch.randint(
        118, 122, (len(weight), weight.shape[1] // 32), dtype=torch.uint8, generator=generator
    )
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(len(weight), -1, 32)
    values = torch.tensor(E2M1_LEVELS)[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
    return {"weight_packed": packed, "weight_scale": scales}, values.view(weight.shape)


def as_compressed(name: str) -> Callable[[Tensor, int], Parts]:
    """A writer of weights as random integers in this format."""

    def write(weight: Tensor, number: int) -> Parts:
        own = stored.FORMATS[name].make(*weight.shape, number)
        own = replace(own, scales=own.scales / (16 if own.bits == 4 else 256))
        return stored.FORMATS[name].write(own), own.weight()

    return write


# of layers: formats, and bits, of their own
GROUPS: list[tuple[Callable[[Tensor, int], Parts], str, dict[str, Any]]] = [
    (
        as_compressed("compressed-4"),
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    ),
    (by_output, "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    (
        as_compressed("compressed-int8"),
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
    ),
    (
        as_mxfp4,
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
    (
        as_compressed("compressed-8-in-32"),
        "pack-quantized",
        {"num_bits": 8, "type": "int", "group_size": 32},
    ),
]


def by_turns(weight: Tensor, number: int) -> Parts:
    return GROUPS[number % len(GROUPS)][0](weight, number)


MIXED = {
    "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"], "config_groups": {
        f"group_{number}": {"targets": [f"re:group {number}"], "format": layout, "weights": weights}
        for number, (_, layout, weights) in enumerate(GROUPS)}}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
COMPRESSED = stored.compressed("float-quantized", 8)
COMPRESSED["config_groups"]["group_0"]["weights"] |= {"type": "float", "strategy": "channel"}
SCHEMES: dict[str, tuple[str, Callable[[Tensor, int], Parts], dict[str, Any]]] = {
    "fp8": ("qwen3", in_blocks, FP8),
    "compressed-fp8": ("llama", by_output, COMPRESSED),
    "compressed-mxfp4": (
        "llama",
        as_mxfp4,
        {**MIXED, "config_groups": {"group_3": MIXED["config_groups"]["group_3"]}},
    ),
    "compressed-mixed": ("llama", by_turns, MIXED),
    "auto-fp8": (
        "llama",
        whole,
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "modelopt-fp8": (
        "llama",
        whole,
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    ),
    "fp8-experts": ("qwen3_moe", in_blocks, FP8),
    "fp8-renamed": ("mixtral", in_blocks, FP8),
    "gptq-experts": ("qwen3_moe", as_gptq, {**stored.GPTQ, "bits": 4}),
}
MADE = re.compile(r".*(proj|\.w[123])\.weight")


def rewritten(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, "dtype": "bfloat16", **settings}))
    return folder


def checkpoint(folder: Path, name: str) -> tuple[Path, Any]:
    """A folder in this scheme, and the same model with its weights dequantised, in fp32."""
    family, quantise, config = SCHEMES[name]
    model = make(family, torch.bfloat16).float()  # of which routers pick all experts
    plain = load_file(
        save_checkpoint(folder / "plain", model, word_tokenizer(97)) / "model.safetensors"
    )
    save_checkpoint(folder / "own", model, word_tokenizer(97))
    tensors: dict[str, Tensor] = {}
    for number, (key, weight) in enumerate(sorted(plain.items())):
        if not MADE.fullmatch(key):
            tensors[key] = plain[key] = weight.bfloat16()
            continue
        parts, plain[key] = quantise(weight, number)
        tensors |= {
            key.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()
        }
    rewritten(
        folder / "plain", {key: tensor.float() for key, tensor in plain.items()}, dtype="float32"
    )
    rewritten(folder / "own", tensors, quantization_config=config)
    return folder / "own", AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32
    ).eval()


def gpt_oss(folder: Path, whole: Any = None) -> tuple[Path, Any]:
    """Experts in mxfp4 as gpt-oss has them, the rest in bf16. `whole`: a model that takes pictures
    around one."""
    save_checkpoint(
        folder / "own", whole or make("gpt_oss", torch.bfloat16).float(), word_tokenizer(97)
    )
    loader = AutoModelForCausalLM if whole is None else AutoModelForImageTextToText
    # its rotary tables in fp32
    model = loader.from_pretrained(folder / "own", dtype=torch.float32).eval()
    tensors = {
        key: tensor.bfloat16()
        for key, tensor in load_file(folder / "own" / "model.safetensors").items()
    }
    torch.manual_seed(0)
    with torch.no_grad():
        for key, there in model.named_parameters():
            there.copy_(there.bfloat16())
            if not key.endswith(("gate_up_proj", "down_proj")):
                continue
            experts, inputs, outputs = there.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
            values = (
                torch.tensor(E2M1_LEVELS)[codes.long()]
                * torch.exp2(scales.float() - 127)[..., None]
            )
            there.copy_(values.flatten(2).transpose(1, 2))
            # as it is saved
            key = next(name for name in tensors if name.endswith(key[key.index("layers.") :]))
            del tensors[key]
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return rewritten(folder / "own", tensors, quantization_config={"quant_method": "mxfp4"}), model


def test_experts_in_mxfp4_of_a_model_that_takes_pictures(tmp_path: Path) -> None:
    """InternVL 3.5 is published around gpt-oss."""
    text = make("gpt_oss", torch.bfloat16).config
    folder, reference = gpt_oss(tmp_path, make_whole("internvl", text_config=text.to_dict()))
    module: Any = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU
    )
    assert sum(isinstance(layer, BlockExperts) for layer in block_layers(module)) == 4
    assert not [path for path, _ in module.named_parameters() if "vision" in path]
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        ours, theirs = (each(input_ids=tokens).logits for each in (module, reference))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert (
        model_memory(
            resolve(str(folder)), load_config(resolve(str(folder))), torch.bfloat16
        ).quantised_bytes
        > 0
    )


def any_checkpoint(folder: Path, name: str) -> tuple[Path, Any]:
    return gpt_oss(folder) if name == "mxfp4" else checkpoint(folder, name)


every_scheme = pytest.mark.parametrize("name", [*SCHEMES, "mxfp4"])


@every_scheme
def test_logits_are_those_of_the_dequantised_model(
    name: str, tmp_path: Path, library_path: Path
) -> None:
    """In fp32 but for the last bits where weights are widened for each use. On the executor, in
    bf16: those that torch makes of the same operations, activations rounded likewise; a row's bits
    do not depend on a pass's width."""
    folder, reference = any_checkpoint(tmp_path, name)
    module: Any = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU
    )
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            module(tokens).logits, reference(tokens).logits, rtol=0, atol=2e-4
        )
    module = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.bfloat16, CPU
    )
    lm = build_lm(module, name, torch.bfloat16, CPU)
    program = lower(module)
    weights = {op.weight for op in program.body if op.code in (Code.LINEAR, Code.EXPERTS)}
    lm.run = ReferenceRun(module, program, rounds=True)
    expected = every_pass(lm)
    lm.run = NativeRun(lm, module, program, library_path)
    worst = differences(every_pass(lm), expected)
    assert max(worst.values()) < 0.06, worst
    assert find_native_limits(lm) == PassLimits(granularity=1)
    assert program.matrices.keys() == {
        each for each in weights if "expert" in each or ("proj" in each and name != "mxfp4")
    }


@every_scheme
def test_memory_is_that_of_the_codes(name: str, tmp_path: Path) -> None:
    """Catches weights that are widened, and an estimate that says they were."""
    folder, _ = any_checkpoint(tmp_path, name)
    config = load_config(resolve(str(folder)))
    module = load_module(resolve(str(folder)), config, torch.bfloat16, CPU)
    layers = list(block_layers(module))
    held = sum(layer.panels.nbytes for layer in layers)
    weights = sum(layer.num_weights for layer in layers)
    # 17 bits for 32 in mxfp4
    assert held < weights * {"mxfp4": 0.54, "gptq-experts": 0.6}.get(name, 1.2)
    assert not any(parameter.dim() > 2 for parameter in module.parameters())
    assert any(isinstance(layer, BlockExperts) for layer in layers) == (
        "experts" in name or name in ("fp8-renamed", "mxfp4")
    )
    memory = model_memory(resolve(str(folder)), config, torch.bfloat16)
    assert memory.quantised_bytes == pytest.approx(held, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8-experts", "mxfp4"])
def test_folders_run_from_their_floats(
    name: str, tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    folder, _ = any_checkpoint(tmp_path, name)
    plain = LLM(folder, drafter="none", runtime="native", threads=1)
    assert any(f"as {name.removesuffix('-experts')} stores them" in note for note in plain.notes), (
        plain.notes
    )
    drafted = LLM(folder, drafter="ngram", runtime="native", threads=1)
    assert drafted.config["exact"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [
        [out.token_ids for out in llm.generate([[3, 4, 5, 3, 4], [9, 8]], params)]
        for llm in (drafted, plain)
    ]
    assert texts[0] == texts[1]


def test_what_is_reported_of_floats(tmp_path: Path) -> None:
    """fp8 rounds no activations."""
    folder, _ = checkpoint(tmp_path, "fp8")
    config = load_config(resolve(str(folder)))
    scheme = scheme_of(config, CPU)
    assert scheme is not None
    module = load_module(resolve(str(folder)), config, torch.bfloat16, CPU)
    note = quantised_note(module, scheme, "m")
    assert note.startswith(
        "'m' keeps its weights in 8 bits, as fp8 stores them; the native kernels do not serve here"
    )
    assert (scheme.rounded, "rounded" in note) == ("passes are in bfloat16", False)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """The MTP layers of DeepSeek, GLM and Qwen are quantised like the rest, and transformers'
    module has no place for them."""
    folder, _ = checkpoint(tmp_path, "fp8")
    tensors = load_file(folder / "model.safetensors")
    without: Any = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.bfloat16, CPU
    )
    more = {
        f"{start}.{end}": tensors[f"model.layers.0.self_attn.q_proj.{end}"].clone()
        for end in ("weight", "weight_scale_inv")
        for start in ("model.layers.2.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj")
    }
    rewritten(folder, {**tensors, **more})
    module: Any = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.bfloat16, CPU
    )
    assert {path for path, _ in module.named_modules()} == {
        path for path, _ in without.named_modules()
    }
    assert len(list(block_layers(module))) == len(list(block_layers(without))) > 0
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(module(tokens).logits, without(tokens).logits)


Q = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.1.up_proj"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "fp8",
            {f"{Q}.weight_scale_inv": None},
            f"layer '{Q}' cannot be read: weight_scale_inv is missing",
        ),
        (
            "fp8",
            {f"{Q}.weight": torch.zeros(64, 64, dtype=torch.float8_e5m2)},
            "stored as F8_E5M2, which cannot be read",
        ),
        ("fp8", {f"{Q}.weight_scale_inv": torch.ones(7, 3)}, "do not fit together"),
        ("fp8", {f"{Q}.weight_scale_inv": torch.full((2, 2), torch.nan)}, "no numbers"),
        (
            "fp8-experts",
            {f"{EXPERT}.weight_scale_inv": None},
            f"'{EXPERT}' cannot be read: weight_scale_inv is missing",
        ),
        (
            "fp8-experts",
            {f"{EXPERT}.{end}": None for end in ("weight", "weight_scale_inv")},
            "gate_up_proj",
        ),
        ("mxfp4", {"model.layers.0.mlp.experts.down_proj_scales": None}, "are missing"),
        (
            "mxfp4",
            {
                "model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(
                    4, 64, 1, 16, dtype=torch.uint8
                )
            },
            "do not fit",
        ),
    ],
)
def test_broken_folders_are_refused(
    name: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    folder, _ = any_checkpoint(tmp_path, name)
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    rewritten(folder, {key: tensor for key, tensor in tensors.items() if tensor is not None})
    with pytest.raises(CheckpointError, match=message):
        load_module(resolve(str(folder)), load_config(resolve(str(folder))), torch.bfloat16, CPU)


def test_codes_that_are_no_numbers_are_refused() -> None:
    codes = torch.full((4, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(MalformedError, match="no numbers"):
        fp8({"weight": codes, "weight_scale": torch.ones(1)}, "weight_scale", None)


def as_nvfp4(weight: Tensor, main: str) -> Parts:
    """As ModelOpt (`weight`) and compressed-tensors (`weight_packed`) have them, number by number."""
    levels = torch.tensor(E2M1_LEVELS)
    whole = weight.abs().max() / (6 * 448)
    groups = weight.view(len(weight), -1, 16)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    wide = (scales.float() * whole)[..., None]
    codes = (
        ((groups / wide)[..., None] - levels).abs().argmin(-1).view(weight.shape).to(torch.uint8)
    )
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    beside = (
        {"weight_scale_2": whole}
        if main == "weight"
        else {"weight_global_scale": 1 / whole.reshape(1)}
    )
    values = (levels[codes.long()].view(groups.shape) * wide).view(weight.shape)
    return {
        main: packed,
        "weight_scale": scales,
        "input_scale": torch.tensor(1.0),
        **beside,
    }, values


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("main", ["weight", "weight_packed"])
def test_nvfp4_is_widened(family: str, main: str, tmp_path: Path) -> None:
    """No kernel has its groups of 16. Values are the dequantised ones, and the estimate of memory
    is that of plain weights."""
    model = make(family, torch.bfloat16).float()
    plain = load_file(
        save_checkpoint(tmp_path / "plain", model, word_tokenizer(97)) / "model.safetensors"
    )
    save_checkpoint(tmp_path / "own", model, word_tokenizer(97))
    tensors: dict[str, Tensor] = {}
    for key, weight in plain.items():
        if not MADE.fullmatch(key) or weight.shape[1] % 16:
            tensors[key] = plain[key] = weight.bfloat16()
            continue
        parts, plain[key] = as_nvfp4(weight.float(), main)
        tensors |= {key.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if main == "weight_packed":
        settings = stored.compressed("nvfp4-pack-quantized", 4)
        settings["config_groups"]["group_0"]["weights"] |= {"type": "float", "group_size": 16}
    folder = rewritten(tmp_path / "own", tensors, quantization_config=settings)
    rewritten(tmp_path / "plain", plain, dtype="float32")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    config = load_config(resolve(str(folder)))
    module: Any = load_module(resolve(str(folder)), config, torch.float32, CPU)
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            module(tokens).logits, reference(tokens).logits, rtol=0, atol=1e-5
        )
    scheme = scheme_of(config, CPU)
    assert scheme is not None
    assert "fit no layout of ours" in quantised_note(module, scheme, "it")
    memory = model_memory(resolve(str(folder)), config, torch.bfloat16)
    held = sum(parameter.numel() for parameter in module.parameters()) * 2
    assert memory.quantised_bytes == 0
    assert memory.weights_bytes == pytest.approx(held, rel=0.05)


def test_malformed_nvfp4_is_named() -> None:
    parts, _ = as_nvfp4(torch.randn(32, 64), "weight")
    scheme = scheme_of(
        SimpleNamespace(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        CPU,
    )
    assert scheme is not None
    with pytest.raises(
        MalformedError, match=r"weight \(32, 32\) and weight_scale \(32, 2\) do not fit together"
    ):
        scheme.read({**parts, "weight_scale": parts["weight_scale"][:, :2]})
    with pytest.raises(MalformedError, match="weight_global_scale is missing"):
        scheme.read({name: part for name, part in parts.items() if name != "weight_scale_2"})
