"""Checkpoints that take pictures or sounds, too: their text part runs, as transformers runs it, and
nothing else stays loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import CapabilityError, CheckpointError
from outrider.llm import LLM
from outrider.models.loading.load import build_lm, load_config, load_module
from outrider.models.loading.multimodal import text_part
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from tests.contract.family_reference import one_thread
from tests.contract.multimodal_families import FAMILIES, PICTURES_FIRST, make_config, make_whole
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer
from tests.unit.runtime.families import SIZES, make

OTHER_SENSES = ("vision", "visual", "projector", "audio", "sound")
SOME = (
    "aya_vision",
    "blip-2",
    "emu3",
    "gemma4",
    "hunyuan_vl",
    "inkling_mm_model",
    "qwen3_5",
    "unlimited_ocr",
    "voxtral",
)
WEIGHTS = "model.safetensors"
EACH = [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in FAMILIES]


def saved(name: str, folder: Path) -> nn.Module:
    """A random checkpoint in `folder`; returns the whole model."""
    model: nn.Module = make_whole(name)
    save_checkpoint(folder, model, word_tokenizer(SIZES["vocab_size"]))
    return model


def speaking(name: str, whole: Any) -> Any:
    """The part of a whole model that writes texts: all of it, or the language model that it shows
    pictures to."""
    if hasattr(whole, "thinker"):
        return whole.thinker
    return text_part(whole) if name in PICTURES_FIRST else whole


@pytest.mark.parametrize("name", EACH)
def test_the_text_part_runs(name: str, tmp_path: Path) -> None:
    """Catches a checkpoint that is refused for its vision tower, one that keeps it, and text
    weights that are left out."""
    whole = speaking(name, saved(name, tmp_path))
    module: Any = load_module(
        resolve(str(tmp_path)),
        load_config(resolve(str(tmp_path))),
        torch.float32,
        torch.device("cpu"),
    )
    assert not [
        key for key, _ in module.named_parameters() if any(word in key for word in OTHER_SENSES)
    ]
    lm = build_lm(module, name, torch.float32, torch.device("cpu"))
    tokens = torch.randint(3, 80, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        theirs: Tensor = whole(input_ids=tokens, use_cache=False).logits[0]
        lm.kv.add_row()
        ours = [lm.forward(tokens[:, :7]).logits[0]]
        lm.kv.advance(0, 7)
        ours.append(lm.forward(tokens[:, 7:]).logits[0])
    assert (torch.cat(ours) - theirs).abs().max() <= 2e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", EACH)
def test_drafts_write_what_the_whole_model_writes(name: str, tmp_path: Path) -> None:
    """From the checkpoint to a text: catches a runtime that counts other positions than the model,
    and states that are stale."""
    whole = speaking(name, saved(name, tmp_path))
    prompts = ([5, 6, 7, 5, 6, 7, 5], [9, 8, 9, 8, 9])
    with one_thread():
        llm = LLM(tmp_path, drafter="ngram", dtype="float32", threads=1)
        count = min(32, llm.config["max_model_len"] - 7)
        written = llm.generate([*prompts], SamplingParams(max_tokens=count, ignore_eos=True))
        for prompt, found in zip(prompts, written, strict=True):
            theirs = whole.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert found.token_ids == theirs[0, len(prompt) :].tolist()


def test_a_vision_tower_of_another_package_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3n's takes timm, without which transformers makes no whole: the text is loaded alone."""
    text: Any = make("gemma3n_text")
    save_checkpoint(tmp_path, text, word_tokenizer(SIZES["vocab_size"]))
    stored = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(tmp_path / WEIGHTS).items()
    }
    save_file(
        {**stored, "model.vision_tower.stem.weight": torch.ones(2)},
        tmp_path / WEIGHTS,
        metadata={"format": "pt"},
    )
    transformers.Gemma3nConfig(text_config=text.config.to_dict()).save_pretrained(tmp_path)

    def lacking(*_: Any, **__: Any) -> None:
        raise ImportError("TimmWrapperModel requires the timm library")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lacking)
    module: Any = load_module(
        resolve(str(tmp_path)),
        load_config(resolve(str(tmp_path))),
        torch.float32,
        torch.device("cpu"),
    )
    tokens = torch.randint(3, 80, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = (each(input_ids=tokens, use_cache=False).logits for each in (module, text))
    assert torch.equal(ours, theirs)


def test_experts_in_one_tensor_of_fp8_are_refused(tmp_path: Path) -> None:
    """Inkling 2 as it is published: catches scales that transformers leaves out."""
    saved("inkling2", tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    for name in [
        name for name in stored if name.endswith((".experts.w13_weight", ".experts.w2_weight"))
    ]:
        groups = stored[name].unflatten(-1, (-1, 32))
        # whole powers of two
        scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / 448)))
        codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
        stored |= {name: codes.flatten(-2), f"{name}_scale": scales.to(torch.float8_e8m0fnu)}
    save_file(stored, tmp_path / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["transformers_version"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"experts.w13_weight. is stored as F8_E4M3, which cannot be read"
    ):
        load_module(
            resolve(str(tmp_path)),
            load_config(resolve(str(tmp_path))),
            torch.float32,
            torch.device("cpu"),
        )


def refused(name: str, words: str, folder: Path) -> None:
    """Asserts that a random checkpoint of this family is refused with these words, in one line."""
    saved(name, folder)
    with pytest.raises(CapabilityError, match=words) as caught:
        LLM(folder, drafter="none", dtype="float32", threads=1)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("diffusion_gemma", "it has a `generate` of its own, which need not write token by token"),
        ("evolla", "has no language model of model_type 'evolla'"),
        (
            "idefics",
            "its code fails in a pass .* Exactly 1 of pixel_values, image_encoder_embeddings or perceiver_embeddings",
        ),
        (
            "pi0",
            "PI0ForConditionalGeneration in transformers has no output layer over a vocabulary",
        ),
        ("pix2struct", "is an encoder-decoder"),
        (
            "voxtral_realtime",
            "its code fails in a pass .* ValueError: You must specify exactly one",
        ),
    ],
)
def test_what_writes_no_text_by_itself_is_refused_by_name(
    name: str, words: str, tmp_path: Path
) -> None:
    refused(name, words, tmp_path)


def test_a_language_model_that_is_an_encoder_decoder_is_refused_by_name() -> None:
    """BLIP-2 is published with OPT, which runs, and with Flan-T5."""
    sizes = {
        "vocab_size": 97,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    }
    config = make_config("blip-2")
    config = transformers.Blip2Config(
        text_config={"model_type": "t5", **sizes},
        vision_config=config.vision_config,
        qformer_config=config.qformer_config,
    )
    with pytest.raises(CapabilityError, match=r"its language model \(t5\) is an encoder-decoder"):
        text_part(transformers.Blip2ForConditionalGeneration(config))


def test_prompts_read_in_both_directions_are_refused_by_name(tmp_path: Path) -> None:
    """Its passes differ with transformers' kernel for attention, so that comparing them with one of
    these shows nothing."""
    refused("paligemma", r"tokens of a prompt also attend to later ones", tmp_path)


def test_one_layer_tells_whether_the_logits_are_the_same() -> None:
    """Catches two passes over a whole model, a layer lost on the way, and a full device taken for
    code that needs a picture."""
    whole = make_whole("gemma3")
    layers = whole.model.language_model.layers
    called = list[int]()
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: called.append(index))
    assert text_part(whole).model.layers is layers
    assert set(called) == {0}
    whole = make_whole("gemma3")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    whole.register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        text_part(whole)
    assert len(whole.model.language_model.layers) == len(layers)


def test_a_language_model_stays_as_it_is() -> None:
    module = tiny_llama(97)
    assert text_part(module) is module
