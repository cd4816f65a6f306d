"""Why a model is refused, or runs on transformers' own cache: the sentence must be true of it, in
one line, with no traceback.

Small random models of transformers' own classes, read as a user's would be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from outrider.cli.app import run
from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.models.loading.load import build_lm, finish, load_module
from outrider.models.loading.memory import kv_bytes_per_token
from outrider.models.signals import decoder_layers
from outrider.models.source import resolve
from tests.contract.own_cache_families import make
from tests.contract.test_architectures import GROUPED, REFUSED, VOCAB, make_module, refused_module
from tests.helpers import save_checkpoint, word_tokenizer

SILENT = "do not call the attention interface of transformers"
KEEPS_MORE = "its layers keep more than keys and values of each token"
REASONS = {
    "xglm": SILENT,
    "mpt": SILENT,
    "rwkv": SILENT,
    "lfm2": f"{KEEPS_MORE} (LinearAttentionLayer)",
    "deepseek_v4": f"{KEEPS_MORE} (",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_for_another_cache_is_true_of_the_model(name: str) -> None:
    reason = build_lm(make(name), name, torch.float32, torch.device("cpu")).why_own_cache
    assert reason is not None
    assert REASONS[name] in reason
    assert len(reason.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t5", "is an encoder-decoder"),
        ("bert", "does not tell what it writes after each token, as with encoders such as BERT"),
    ],
)
def test_what_cannot_continue_a_text_is_refused(name: str, words: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / name, refused_module(*REFUSED[name]), word_tokenizer(VOCAB))
    with pytest.raises(CapabilityError) as caught:
        LLM(folder, drafter="none", dtype="float32", runtime="eager", threads=1)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_decoder_of_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        is_decoder=True,
        is_encoder_decoder=False,
    )
    folder = save_checkpoint(tmp_path, transformers.BartForCausalLM(config), word_tokenizer(VOCAB))
    with pytest.raises(
        CapabilityError, match=r"\(bart\) is an encoder-decoder; a decoder-only model is needed"
    ):
        LLM(folder, drafter="none", dtype="float32", threads=1)


def test_a_model_of_several_decoders_is_refused() -> None:
    """Byte latent transformers, a model of bytes around one of patches."""
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    outer = {**small, "vocab_size": 260, "hidden_size_global": 32, "cross_attn_k": 2}
    config = transformers.BltConfig(
        vocab_size=260,
        encoder_hash_byte_group_vocab=100,
        encoder_hash_byte_group_size=[3],
        encoder_hash_byte_group_nb_functions=1,
        patcher_config={**small, "vocab_size": 260},
        encoder_config=outer,
        decoder_config=outer,
        global_config=small,
    )
    module: Any = transformers.BltForCausalLM(config).eval()
    with pytest.raises(CapabilityError, match="is made of several decoders"):
        build_lm(module, "tiny", torch.float32, torch.device("cpu"))
    with pytest.raises(CapabilityError, match="its decoder layers were not found"):
        decoder_layers(module)


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    """Its embeddings are tied to an output layer that its files do not have, so it would write
    something."""
    module = transformers.Qwen2ForSequenceClassification(
        transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True)
    )
    folder = save_checkpoint(tmp_path, module, word_tokenizer(VOCAB))
    with pytest.raises(
        CapabilityError, match="is a Qwen2ForSequenceClassification, which has no output layer over"
    ):
        LLM(folder, drafter="none", dtype="float32", threads=1)


def test_a_family_without_a_language_model_is_named(tmp_path: Path) -> None:
    """Step 3.5 is text alone, and transformers has its config for the text of Step 3.7 only."""
    config = transformers.AutoConfig.for_model("step3p5", pad_token_id=0)
    with pytest.raises(CapabilityError, match="has no language model of model_type 'step3p5'"):
        load_module(resolve(str(tmp_path)), config, torch.float32, torch.device("cpu"))


def test_kinds_of_layers_that_nobody_knows_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers writes all layers of a model into one line, however many these are."""
    folder = save_checkpoint(tmp_path, make_module("Llama", GROUPED), word_tokenizer(VOCAB))
    settings = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", *["warp_attention"] * (settings["num_hidden_layers"] - 1)]
    (folder / "config.json").write_text(json.dumps({**settings, "layer_types": kinds}))
    capsys.readouterr()
    assert run(["generate", str(folder), "the cat"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert (
        "does not know (layer_types: 'warp_attention'). It knows full_attention, sliding_attention"
        in error
    )


class BrokenLlama(transformers.LlamaForCausalLM):
    """A checkpoint's own code that fails, in a pass with the recording attention or in a plain one."""

    when: tuple[str, ...] = ()

    def forward(self, *args: object, **kwargs: object) -> Any:
        if self.config._attn_implementation in self.when:
            raise KeyError("no such thing")
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("when", ["outrider-shapes", "outrider"])
def test_code_that_fails_with_our_attention_runs_without(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BrokenLlama, "when", (when,))
    module = BrokenLlama(transformers.LlamaConfig(**GROUPED)).eval()
    reason = build_lm(module, "mine", torch.float32, torch.device("cpu")).why_own_cache
    assert reason == "its code fails in a pass on our cache (KeyError: 'no such thing')"


def test_failing_code_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenLlama, "when", ("outrider-shapes", "sdpa"))
    module = BrokenLlama(transformers.LlamaConfig(**GROUPED)).eval()
    lm = build_lm(module, "mine", torch.float32, torch.device("cpu"))
    with pytest.raises(CapabilityError) as caught:
        finish(lm, module)
    assert "there its code fails in a pass over a few tokens: KeyError: 'no such thing'" in str(
        caught.value
    )
    assert len(str(caught.value).splitlines()) == 1


class ShortSighted(BrokenLlama):
    """Code that fails only with longer texts than were tried."""

    when = ("outrider-shapes",)

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> Any:
        if input_ids.shape[1] > 128:
            raise RuntimeError("too long")
        return super().forward(input_ids, **kwargs)


def test_code_that_fails_later_is_one_line() -> None:
    """Catches a traceback in the middle of an answer."""
    lm = build_lm(
        ShortSighted(transformers.LlamaConfig(**GROUPED)).eval(),
        "mine",
        torch.float32,
        torch.device("cpu"),
    )
    lm.kv.add_row()
    with pytest.raises(CapabilityError) as caught, torch.inference_mode():
        lm.forward(torch.ones(1, 129, dtype=torch.int64))
    reason = "the code of ShortSighted in transformers fails in a pass over 129 tokens (RuntimeError: too long)"
    assert str(caught.value) == reason


class Biased(transformers.LlamaForCausalLM):
    """A model whose plain pass adds a term to the logits that our pass lacks."""

    kernels = ("eager", "sdpa")

    def forward(self, *args: object, **kwargs: object) -> Any:
        found = super().forward(*args, **kwargs)
        if self.config._attn_implementation in self.kernels:
            found.logits = found.logits.roll(1, dims=-1)
        return found


def test_other_logits_than_our_attention_gives() -> None:
    """What our attention does not compute, transformers' own does."""
    module = Biased(transformers.LlamaConfig(**GROUPED)).eval()
    reason = build_lm(module, "mine", torch.float32, torch.device("cpu")).why_own_cache
    assert reason is not None
    assert "compute something that Outrider's attention does not: " in reason
    assert "differs from the model's own logits by" in reason


def test_rounding_is_no_missing_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts a model whose router flips by rounding, since transformers' own kernels differ there,
    too."""
    monkeypatch.setattr(Biased, "kernels", ("eager",))
    module = Biased(transformers.LlamaConfig(**GROUPED)).eval()
    with pytest.raises(CapabilityError) as caught:
        build_lm(module, "mine", torch.float32, torch.device("cpu"))
    assert (
        "Two of transformers' own kernels (eager, sdpa) differ as much: rounding in float32"
        in str(caught.value)
    )


# ---------------------------------------------------------------- what used to end in a traceback

GEMMA4 = {
    **GROUPED, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
HUNYUAN = {**GROUPED, "head_dim": 8, "num_experts": 4, "moe_topk": 2}


@pytest.mark.slow
def test_layers_of_several_shapes_are_weighed_one_by_one(tmp_path: Path) -> None:
    """Gemma 4: its config refuses to name one head size for all layers."""
    module: nn.Module = make_module("Gemma4", GEMMA4)
    layers = build_lm(module, "gemma4", torch.float32, torch.device("cpu")).shape.layers
    assert len({layer.key_size for layer in layers}) == 2
    numbers = sum(layer.num_kv_heads * (layer.key_size + layer.value_size) for layer in layers)
    assert kv_bytes_per_token(module.config, torch.bfloat16) == 2 * numbers
    folder = save_checkpoint(tmp_path, make_module("Gemma4", GEMMA4), word_tokenizer(VOCAB))
    assert LLM(folder, drafter="none", runtime="eager").generate([[3, 4]])[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_layers_still_tell_their_weight(dtype: str, tmp_path: Path) -> None:
    """HunYuan's router asks its linear layer for the dtype of its weight, which packing takes away."""
    folder = save_checkpoint(tmp_path, make_module("HunYuanMoEV1", HUNYUAN), word_tokenizer(VOCAB))
    assert LLM(folder, drafter="none", dtype=dtype, runtime="eager").generate([[3, 4]])[0].token_ids
