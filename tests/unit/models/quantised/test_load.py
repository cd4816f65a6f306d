"""Folders of quantised weights as targets: the values of the dequantised model, small in memory,
and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from outrider.cli.app import run
from outrider.errors import CheckpointError
from outrider.llm import LLM
from outrider.models.gguf.linear import block_layers
from outrider.models.loading.load import build_lm, load_config, load_module, resolve_dtype
from outrider.models.loading.memory import model_memory
from outrider.models.source import resolve
from outrider.runtime import library
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.models.quantised.stored import AUTO_ROUND, FORMATS, gptq, some
from tests.unit.models.quantised.test_floats import SCHEMES, Parts
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def checkpoint(folder: Path, name: str) -> tuple[Path, dict[str, Tensor]]:
    """A folder whose projections are stored in this format, and the same weights dequantised."""
    stored = FORMATS[name]
    model = tiny_llama(96, hidden_size=128, intermediate_size=256, tie_word_embeddings=True)
    save_checkpoint(folder, model, word_tokenizer(96))
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for number, (key, weight) in enumerate(model.state_dict().items()):
        if not key.endswith("proj.weight"):
            tensors[key] = plain[key] = weight.bfloat16()
            continue
        own = stored.make(*weight.shape, number)
        # weights of a usual size
        own = replace(own, scales=own.scales / (16 if own.bits == 4 else 256))
        plain[key] = own.weight()
        tensors |= {
            key.removesuffix("weight") + part: tensor for part, tensor in stored.write(own).items()
        }
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config=stored.config, dtype="float16")
    return folder, plain


def integers_of(name: str) -> Callable[[Tensor, int], Parts]:
    """A writer of weights as random integers in this format."""

    def write(weight: Tensor, number: int) -> Parts:
        own = FORMATS[name].make(*weight.shape, number)
        own = replace(own, scales=own.scales / (16 if own.bits == 4 else 256))
        return FORMATS[name].write(own), own.weight()

    return write


WRITERS = {name: (integers_of(name), stored.config) for name, stored in FORMATS.items()}
WRITERS |= {name: SCHEMES[name][1:] for name in ("fp8", "compressed-fp8")}


def change(folder: Path, **settings: Any) -> None:
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, **settings}))


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantised_model(
    name: str, tmp_path: Path, library_path: Path
) -> None:
    """To the bit where weights are widened for each use; on the native runtime up to activations in
    8 bits."""
    folder, plain = checkpoint(tmp_path, name)
    reference = tiny_llama(96, hidden_size=128, intermediate_size=256, tie_word_embeddings=True)
    reference.load_state_dict(plain, strict=False)
    module: Any = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU
    )
    assert len(list(block_layers(module))) == 7 * len(module.model.layers)
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            module(tokens).logits, reference.eval()(tokens).logits, rtol=0, atol=1e-5
        )
    lm = build_lm(module, name, torch.float32, CPU)
    expected = every_pass(lm)
    lm.run = NativeRun(lm, module, lower(module), library_path)
    worst = differences(every_pass(lm), expected)
    assert max(worst.values()) < 0.05, worst


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq-4", "gptq-4-act-order", "compressed-int8"])
def test_folders_run_from_their_integers(
    name: str, tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    folder, _ = checkpoint(tmp_path, name)
    plain = LLM(folder, drafter="none", runtime="native", threads=1)
    assert plain.config["runtime"] == "native"
    rounded = "passes are in bfloat16, and activations rounded to 8 bits"
    assert any("bits, as" in note and rounded in note for note in plain.notes), plain.notes
    drafted = LLM(folder, drafter="ngram", runtime="native", threads=1)
    prompts = [[3, 4, 5, 3, 4], [9, 8]]
    assert drafted.config["exact"]
    texts = [[out.token_ids for out in llm.generate(prompts, PARAMS)] for llm in (drafted, plain)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["gptq-4", "awq", "compressed-4", "compressed-int8"])
def test_memory_is_that_of_the_integers(name: str, tmp_path: Path) -> None:
    """Catches weights that are widened, and an estimate that says they were."""
    folder, _ = checkpoint(tmp_path, name)
    config = load_config(resolve(str(folder)))
    assert resolve_dtype("auto", config, CPU) == torch.bfloat16
    module = load_module(resolve(str(folder)), config, torch.bfloat16, CPU)
    held = sum(layer.panels.nbytes for layer in block_layers(module))
    weights = sum(layer.num_weights for layer in block_layers(module))
    assert held < weights * (1.2 if name == "compressed-int8" else 0.8)
    memory = model_memory(resolve(str(folder)), config, torch.bfloat16)
    assert memory.quantised_bytes == pytest.approx(held, rel=0.3)


def broken(folder: Path, changes: dict[str, Tensor | None]) -> Path:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.scales": None}, f"layer '{Q}' cannot be read: scales is missing"),
        ({f"{Q}.qweight": None}, f"belongs to a layer whose '{Q}.qweight' is missing"),
        (
            {f"{Q}.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")},
            f"lacks 1 weights, first '{Q}.weight'",
        ),
        (
            {f"{Q}.{part}": tensor for part, tensor in gptq(some(128, 256, 32)).items()},
            r"has shape \(128, 256\) in the file",
        ),
        (
            {f"model.other.{part}": tensor for part, tensor in gptq(some(32, 64, 32)).items()},
            "no linear layer 'model.other'",
        ),
        (
            {"model.norm.weight": torch.ones(64)},
            r"'model.norm.weight' has shape \(64,\) in the file",
        ),
    ],
)
def test_broken_folders_are_refused(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = broken(checkpoint(tmp_path, "gptq-4")[0], changes)
    with pytest.raises(CheckpointError, match=message):
        load_module(resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {**FORMATS["gptq-4"].config, "dynamic": {r"-:.*self_attn\.q_proj": {}}},
        {**AUTO_ROUND, "extra_config": {Q: {"bits": 16}}},
    ],
)
def test_layers_may_be_left_plain(settings: dict[str, Any], tmp_path: Path) -> None:
    folder, plain = checkpoint(tmp_path, "gptq-4")
    parts = {f"{Q}.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")}
    change(
        broken(folder, {**parts, f"{Q}.weight": plain[f"{Q}.weight"]}), quantization_config=settings
    )
    module: Any = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU
    )
    assert len(list(block_layers(module))) == 7 * len(module.model.layers) - 1
    assert torch.equal(module.get_submodule(Q).weight, plain[f"{Q}.weight"])


def test_an_output_layer_of_its_own_stays(tmp_path: Path) -> None:
    """A fine-tune whose config.json still ties it to the embeddings: transformers takes what the
    files have."""
    folder, plain = checkpoint(tmp_path, "gptq-4")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    own = -plain["model.embed_tokens.weight"]
    config = load_config(resolve(str(folder)))
    module: Any = load_module(
        resolve(str(broken(folder, {"lm_head.weight": own}))), config, torch.bfloat16, CPU
    )
    assert torch.equal(module.lm_head.weight, own)
    same = broken(folder, {"lm_head.weight": -own})
    module = load_module(resolve(str(same)), load_config(resolve(str(folder))), torch.bfloat16, CPU)
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_a_layer_in_other_bits_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path, "gptq-dynamic")
    few = {f"{Q}.{part}": tensor for part, tensor in gptq(some(128, 128, 32, bits=2)).items()}
    broken(folder, few)
    with pytest.raises(
        CheckpointError,
        match=f"layer '{Q}' cannot be read: its zeros take 2 bits each; 4 and 8 can be read",
    ):
        load_module(resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU)


def test_quantised_weights_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    """ModelOpt's first checkpoints: transformers takes the codes for weights."""
    folder = save_checkpoint(tmp_path, tiny_llama(96), None)
    weight = load_file(folder / "model.safetensors")[f"{Q}.weight"]
    broken(
        folder,
        {f"{Q}.weight": weight.to(torch.float8_e4m3fn), f"{Q}.weight_scale": torch.tensor(0.5)},
    )
    with pytest.raises(
        CheckpointError, match=rf"scales such as '{Q}.weight_scale'.*no quantization_config"
    ):
        load_module(resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "nested"),
    [
        ("awq", False),
        ("gptq-4", False),
        ("auto-round", False),
        ("compressed-4", False),
        ("compressed-4", True),
        ("compressed-int8", False),
        ("fp8", False),
        ("fp8", True),
        ("compressed-fp8", False),
    ],
)
def test_the_text_of_a_quantised_multimodal_model_runs(
    name: str, nested: bool, tmp_path: Path
) -> None:
    """In its own format, though its vision tower has more layers than it. Qwen2.5-VL's AWQ folder
    ended in a traceback of transformers, which has no language model of such a config; fp8 and
    compressed-tensors were widened. `nested`: the config of the text alone says how (Kimi K2.5)."""
    write, settings = WRITERS[name]
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    text = {
        **sizes,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
    }
    config = Qwen2_5_VLConfig(
        text_config={
            **text,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config=vision,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    _store_text(tmp_path, model, write)
    stated: dict[str, Any] = {"quantization_config": settings}
    if nested:
        stated = {
            "text_config": {
                **json.loads((tmp_path / "config.json").read_text())["text_config"],
                **stated,
            }
        }
    change(tmp_path, **stated)
    read = load_config(resolve(str(tmp_path)))
    module: Any = load_module(resolve(str(tmp_path)), read, torch.float32, CPU)
    assert not any("visual" in path for path, _ in module.named_parameters())
    assert len(list(block_layers(module))) == 14
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            module(input_ids=tokens).logits, model(input_ids=tokens).logits, rtol=0, atol=1e-5
        )
    assert resolve_dtype("auto", read, CPU) == torch.bfloat16
    assert model_memory(resolve(str(tmp_path)), read, torch.bfloat16).quantised_bytes > 0


def test_a_vision_tower_may_have_more_layers_than_the_text(tmp_path: Path) -> None:
    """Layers behind the text's last one are those that predict further tokens only where the model
    has none of that name."""
    text = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        num_hidden_layers=1,
        pad_token_id=None,
        eos_token_id=2,
    )
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=95,
        vision_feature_select_strategy="full",
    )
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    write, settings = WRITERS["compressed-4"]
    _store_text(tmp_path, model, write)
    change(tmp_path, quantization_config=settings)
    module: Any = load_module(
        resolve(str(tmp_path)), load_config(resolve(str(tmp_path))), torch.float32, CPU
    )
    assert len(list(block_layers(module))) == 7
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            module(input_ids=tokens).logits, model(input_ids=tokens).logits, rtol=0, atol=1e-5
        )


def _store_text(folder: Path, model: Any, write: Callable[[Tensor, int], Parts]) -> None:
    """Write the projections of the text part so, and give the model their values."""
    changes: dict[str, Tensor | None] = {}
    with torch.no_grad():
        for number, (key, weight) in enumerate(load_file(folder / "model.safetensors").items()):
            if key.endswith("proj.weight") and "vis" not in key:
                stored, values = write(weight.float(), number)
                changes[key] = None
                changes |= {
                    key.removesuffix("weight") + part: tensor for part, tensor in stored.items()
                }
                end = key[key.index("layers.") :]
                next(
                    own
                    for path, own in model.named_parameters()
                    if path.endswith(f"language_model.{end}")
                ).copy_(values)
    broken(folder, changes)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path, "gptq-4")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors files only"):
        load_module(resolve(str(folder)), load_config(resolve(str(folder))), torch.float32, CPU)


@pytest.mark.parametrize(
    ("config", "expected", "num_status_lines"),
    [
        (
            {**FORMATS["gptq-4"].config, "bits": 3},
            "3 bits cannot be read. What can: GPTQ in 4 and 8 bits",
            0,
        ),
        ({**AUTO_ROUND, "bits": 2}, "by auto-round: 2 bits cannot be read", 0),
        (
            {**AUTO_ROUND, "data_type": "mx_fp", "packing_format": "auto_round:mx_fp"},
            "by auto-round: mx_fp in the packing",
            0,
        ),
        (
            {**AUTO_ROUND, "act_bits": 8},
            "activations in 8 bits cannot be read. Export the model as auto_round:auto_gptq",
            0,
        ),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"},
            "the packing 'auto_round:llm_compressor'",
            0,
        ),
        (
            {**FORMATS["awq"].config, "version": "gemv"},
            "by awq: the layout 'gemv' cannot be read",
            0,
        ),
        (
            {"quant_method": "quanto", "weights": "int4"},
            "by quanto (what needs no further library: GPTQ in 4 and 8 bits",
            2,
        ),
    ],
)
def test_a_kind_that_we_lack_is_one_line(
    config: dict[str, Any],
    expected: str,
    num_status_lines: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = checkpoint(tmp_path, "gptq-4")
    change(folder, quantization_config=config)
    capsys.readouterr()
    assert run(["generate", str(folder), "the cat"]) == 2
    *status, error = capsys.readouterr().err.strip().splitlines()
    assert expected in error
    assert len(status) == num_status_lines
