"""`--quantise`: checkpoints whose linear layers are rounded on loading; which model that is, how
large, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.build import Built
from outrider.cli.app import run
from outrider.engine.warmup import facts_of
from outrider.errors import CapabilityError, ConfigError
from outrider.lab.bench.machine import describe_target
from outrider.llm import LLM
from outrider.loader import ModelLoader, ToLoad
from outrider.models.gguf.formats import Q4_ZERO, Q8, Form, values_of
from outrider.models.gguf.linear import BlockLinear, block_layers
from outrider.models.loading.load import build_lm, load_config, load_module, resolve_dtype
from outrider.models.loading.memory import estimate_memory
from outrider.models.quantised.on_loading import quantise_linears, rounded_bytes, rounded_parts
from outrider.models.source import resolve
from outrider.options import Needs, Options
from outrider.parts import choose_parts
from outrider.runtime import checked, library
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from tests.gguf_files import VOCABULARY_SIZE, write_model
from tests.helpers import byte_tokenizer, in_bytes, save_checkpoint, tiny_llama
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FORMS = {4: Q4_ZERO, 8: Q8}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library_path: Path) -> Path:
    """A checkpoint in bf16 with a tied output layer, and a cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find", lambda cache: library_path)
    tokenizer = byte_tokenizer()
    model = tiny_llama(
        len(tokenizer),
        sharpness=4.0,
        hidden_size=128,
        intermediate_size=256,
        tie_word_embeddings=True,
    )
    return save_checkpoint(tmp_path / "model", model.bfloat16(), tokenizer)


def by_definition(weight: Tensor, bits: int) -> Tensor:
    """Weights (out, in) rounded as Q4_1 and Q8_0 are, in fp64 but for the factors, number by number
    in the simplest way."""
    blocks = weight.double().view(len(weight), -1, 32)
    if bits == 4:
        low = blocks.amin(2, keepdim=True)
        scale = ((blocks.amax(2, keepdim=True) - low) / 15).half().double()
        low = low.half().double()
        return (((blocks - low) / scale).round().clamp(0, 15) * scale + low).view(weight.shape)
    scale = (blocks.abs().amax(2, keepdim=True) / 127).half().double()
    return ((blocks / scale).round().clamp(-127, 127) * scale).view(weight.shape)


def rounded(form: Form, weight: Tensor) -> Tensor:
    parts = rounded_parts(weight, form)
    steps = parts.codes.view(len(weight), -1, 32).double() - form.middle
    values = steps * parts.scales.double()[..., None]
    return (values if parts.zeros is None else values + parts.zeros.double()[..., None]).view(
        weight.shape
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_as_the_formats_define_it(bits: int) -> None:
    """Catches a wrong group, middle or factor: equal but where a number lies between two codes."""
    torch.manual_seed(1)
    weight = torch.randn(64, 96) / 16
    found = rounded(FORMS[bits], weight)
    expected = by_definition(weight, bits)
    assert (found - expected).abs().mean() < 1e-5
    step = (weight.amax() - weight.amin()) / (15 if bits == 4 else 127)
    assert 0 < (found - weight).abs().max() <= 0.55 * step


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_blocks_of_one_number_keep_it(bits: int, value: float) -> None:
    """Catches 0 / 0."""
    weight = torch.full((32, 32), value)
    torch.testing.assert_close(rounded(FORMS[bits], weight).float(), weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_dequantised_model(
    bits: int, tied: bool, library_path: Path
) -> None:
    """Where weights are widened for each use; on the native runtime those of the same model with
    activations in 8 bits, too."""
    module: Any = (
        tiny_llama(96, hidden_size=128, intermediate_size=256, tie_word_embeddings=tied)
        .eval()
        .requires_grad_(False)
    )
    plain = copy.deepcopy(module)
    plain.lm_head.weight = nn.Parameter(plain.lm_head.weight.clone())
    done = quantise_linears(module, bits, "it")
    assert (done.layers, done.left) == (7 * len(module.model.layers) + 1, 0)
    assert module.lm_head.form == Q8
    assert {layer.form for layer in block_layers(module.model)} == {FORMS[bits]}
    for name, layer in module.named_modules():
        if isinstance(layer, BlockLinear):
            before = plain.get_submodule(name).weight
            expected = rounded(layer.form, before).float()
            torch.testing.assert_close(layer.weight, expected, rtol=1e-6, atol=1e-7)
            assert not torch.equal(expected, before)
            plain.get_submodule(name).weight.data = values_of(
                layer.panels, layer.form, layer.outputs
            )
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(module(tokens).logits, plain(tokens).logits, rtol=0, atol=1e-5)
    lm = build_lm(module, "it", torch.float32, CPU)
    hooks = [layer.register_forward_pre_hook(_inputs_in_bytes) for layer in block_layers(module)]
    expected_passes = every_pass(lm)
    for hook in hooks:
        hook.remove()
    lm.run = NativeRun(lm, module, lower(module), library_path)
    worst = differences(every_pass(lm), expected_passes)
    assert min(worst.values()) < 1e-6, worst
    # an activation on the edge between two codes is a step of 8 bits
    assert max(worst.values()) < 0.03, worst


def _inputs_in_bytes(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    x = inputs[0]
    return in_bytes(x.reshape(-1, x.shape[-1])).to(x.dtype).view_as(x)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("runtime", ["native", "eager"])
def test_texts_do_not_depend_on_the_drafter(folder: Path, bits: int, runtime: str) -> None:
    """Bits independent of a pass's width, on the model that was rounded; every result says which
    one that is."""
    with LLM(folder, drafter="none", runtime=runtime, threads=1, quantise=bits) as plain:
        assert (plain.config["runtime"], plain.config["quantise"], plain.config["exact"]) == (
            runtime,
            bits,
            True,
        )
        assert plain.config["dtype"] == "bfloat16"
        (note,) = [note for note in plain.notes if "--quantise" in note]
        assert f"rounded to {bits} bits" in note
        assert "another model than the checkpoint" in note
        assert "passes are in bfloat16, and activations rounded to 8 bits" in note
        expected = [out.token_ids for out in plain.generate([[3, 4, 5, 3, 4], [9, 8]], PARAMS)]
    for options in (
        {"drafter": "ngram"},
        {"drafter": "draft-model", "draft": folder},
        {"drafter": "quantised"},
    ):
        with LLM(folder, runtime=runtime, threads=1, quantise=bits, **options) as drafted:  # type: ignore[arg-type]
            assert [
                out.token_ids for out in drafted.generate([[3, 4, 5, 3, 4], [9, 8]], PARAMS)
            ] == expected, options


@pytest.mark.slow
def test_the_draft_stays_as_it_is(folder: Path) -> None:
    """Named by the target's own folder, too."""
    with LLM(
        folder, drafter="draft-model", draft=folder, runtime="eager", threads=1, quantise=4
    ) as llm:
        draft = llm._built.draft
        assert draft is not None
        tokens = torch.arange(3, 20)[None]
        models = (llm._built.target, draft)
        outcomes = []
        for model in models:
            lm = model.lm.twin()
            lm.kv.add_row()
            with torch.inference_mode():
                outcomes.append(lm.forward(tokens).logits.float())
    plain: Any = load_module(
        resolve(str(folder)), load_config(resolve(str(folder))), torch.bfloat16, CPU
    )
    with torch.inference_mode():
        expected = plain(tokens).logits.float()
    errors = [(found - expected).norm() / expected.norm() for found in outcomes]
    assert errors[1] < 0.01 < errors[0]


@pytest.mark.parametrize("bits", [4, 8])
def test_memory_is_that_of_the_blocks(folder: Path, bits: int) -> None:
    """Known beforehand; while loading, both forms are there."""
    config = load_config(resolve(str(folder)))
    assert resolve_dtype("auto", config, CPU, rounded=True) == torch.bfloat16
    module = load_module(resolve(str(folder)), config, torch.bfloat16, CPU)
    before = sum(parameter.nbytes for parameter in module.parameters())
    quantise_linears(module, bits, "it")
    blocks = sum(layer.panels.nbytes for layer in block_layers(module))
    held = blocks + sum(parameter.nbytes for parameter in module.parameters())
    rounding = rounded_bytes(config, torch.bfloat16, bits)
    source = resolve(str(folder))
    memory = estimate_memory(
        [source], [config], dtype=torch.bfloat16, device=CPU, packed=True, rounding=rounding
    ).target
    assert (memory.weights_bytes, memory.quantised_bytes, memory.loading_bytes) == (
        held,
        blocks,
        before + blocks,
    )
    assert memory.held_bytes(1.0) == before + blocks
    plain = estimate_memory(
        [resolve(str(folder))], [config], dtype=torch.bfloat16, device=CPU, packed=True
    ).target
    assert (plain.weights_bytes, plain.quantised_bytes, plain.loading_bytes) == (before, 0, 0)


def test_layers_that_no_block_holds_stay_and_are_counted(tmp_path: Path) -> None:
    """Inputs that are no multiple of 32; the rest is rounded, GPT-2's transposed layers among it."""
    model: Any = tiny_llama(
        96, hidden_size=128, intermediate_size=240, tie_word_embeddings=False
    ).requires_grad_(False)
    done = quantise_linears(model, 4, "it")
    layers = len(model.model.layers)
    assert (done.layers, done.left) == (6 * layers + 1, layers)
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert f"{layers} layers stay as they are" in done.note("it")
    gpt2: Any = (
        GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2))
        .eval()
        .requires_grad_(False)
    )
    tokens = torch.arange(3, 40)[None]
    before = copy.deepcopy(gpt2)
    assert quantise_linears(gpt2, 8, "it").left == 0
    with torch.inference_mode():
        torch.testing.assert_close(gpt2(tokens).logits, before(tokens).logits, rtol=0, atol=0.02)
    with pytest.raises(CapabilityError, match="no linear layer that --quantise could round"):
        quantise_linears(tiny_llama(96, hidden_size=24, intermediate_size=24), 4, "it")


@pytest.mark.slow
def test_it_is_another_model_wherever_models_are_compared(folder: Path) -> None:
    """Replicas that differ in it are not mixed, and what one start found is not taken over by
    another's."""
    found: list[Built] = []
    for bits in (None, 4, 8):
        with LLM(folder, drafter="none", threads=1, quantise=bits) as llm:
            found.append(llm._built)
            assert describe_target(llm._built, "it", None).quantise == bits  # type: ignore[arg-type]
    assert (
        len(
            {
                checked.key_of(resolve(str(folder)), None, torch.bfloat16, bits)
                for bits in (None, 4, 8)
            }
        )
        == 3
    )
    parts = choose_parts("none", {}, "auto", {}, None, lossy=False)
    costs = [json.dumps(facts_of(built.options, built.target, None, parts)) for built in found]
    assert len(set(costs)) == 3


@pytest.mark.parametrize("bits", [3, 16, True, "4"])
def test_other_numbers_of_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match="quantise must be 4 or 8"):
        Options(target="it", quantise=bits)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--quantise", "5"], "quantise must be 4 or 8, got 5"),
        (["--quantise", "4"], "is quantised already (gptq). Leave --quantise out"),
    ],
)
def test_refusals_are_one_line(
    more: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    }
    (folder / "config.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert run(["generate", str(folder), "the cat", *more]) == 2
    errors = capsys.readouterr().err.strip()
    assert message in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float32"},
            "multiplies in bfloat16, and --dtype float32 was asked for. Leave one out",
        ),
        ({"device": "cuda"}, "no CUDA device|rounds weights for the CPU's kernels"),
        (
            {"runtime": "eager"},
            "needs the native kernels, which do not serve here: no library. Leave it out",
        ),
    ],
)
def test_where_no_kernel_serves_it_is_refused(
    options: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "runtime" in options:
        monkeypatch.setattr(library, "why_missing", lambda: "no library")
    with pytest.raises(CapabilityError, match=message):
        LLM(folder, drafter="none", quantise=4, **options)


def test_another_device_is_refused(folder: Path) -> None:
    target = ToLoad(resolve(str(folder)), "it", quantise=4)
    loader = ModelLoader(
        Options(str(folder), quantise=4), Needs(), torch.device("cuda:0"), print, [target]
    )
    with pytest.raises(
        CapabilityError, match=r"the device here is cuda:0\. Leave it out, or use --device cpu"
    ):
        loader.weigh()


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    file = write_model(
        tmp_path / "m.gguf",
        tiny_llama(VOCABULARY_SIZE, hidden_size=64, intermediate_size=96),
        "llama",
    )
    with pytest.raises(CapabilityError, match=r"is quantised already \(GGUF\)"):
        LLM(file, drafter="none", quantise=8)


def test_services_that_have_no_target_refuse_it(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is accepted and ignored is a lie."""
    assert run(["service", "draft", "demo", "--model-options", "quantise=4"]) == 2
    assert "a draft service has none: leave it out" in capsys.readouterr().err


def test_training_refuses_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.jsonl").write_text("{}")
    out = ["--out", str(tmp_path / "head"), "--responses", f"{tmp_path / 'answers.jsonl'}"]
    assert (
        run(["train", "medusa", "--target", str(folder), *out, "--model-options", "quantise=4"])
        == 2
    )
    assert "leave --quantise out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["generate", "chat", "serve", "bench", "tune", "explain", "certify"]
)
def test_every_verb_that_loads_a_target_has_it(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a flag, or in the text of --model-options."""
    assert run([verb, "--help=all"]) == 0
    assert "quantise" in capsys.readouterr().out
