"""Why a model is refused: the sentence must be true of it. What runs instead is named; one line, no traceback.

Small random checkpoints of transformers' own classes, read as a user's would be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.models.load import build_lm
from outrider.models.memory import kv_bytes_per_token
from tests.contract.test_architectures import GPT2, GROUPED, REFUSED, SMALL, SSM, VOCAB, make_module, refused_module
from tests.helpers import save_checkpoint, word_tokenizer

OWN_CODE = "in transformers computes attention itself"
STATE = "keep one running state"
BIASES = "with ALiBi position biases"
SPARSE = {
    **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **REFUSED,
    "stablelm": ("StableLm", GROUPED),
    "codegen": ("CodeGen", {**GPT2, "n_layer": 2, "rotary_dim": 4}),
    "mamba2": ("Mamba2", {**SSM, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "rwkv": ("Rwkv", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    "lfm2": ("Lfm2", {**GROUPED, "full_attn_idxs": [1]}),
    "deepseek-v32": ("DeepseekV32", SPARSE),
}  # fmt: skip
SAID: dict[str, tuple[str, ...]] = {  # of each, words that must be there
    "bloom": ("BloomForCausalLM", OWN_CODE, BIASES),
    "gptj": ("GPTJForCausalLM", OWN_CODE),
    "falcon": ("FalconForCausalLM", OWN_CODE),
    "falcon-alibi": ("FalconForCausalLM", OWN_CODE, BIASES),
    "mpt": ("MptForCausalLM", OWN_CODE, BIASES),
    "codegen": ("CodeGenForCausalLM", OWN_CODE),
    "stablelm": ("StableLmForCausalLM", "does not pass keyword arguments on to its attention", "3 of 3 layers"),
    "mamba": (STATE, "2 of 2 layers (first: layer 0, linear_attention)"),
    "mamba2": (STATE, "2 of 2 layers"),
    "rwkv": (STATE, "2 of 2 layers (first: layer 0)"),
    "lfm2": (STATE, "2 of 3 layers (first: layer 0, conv)"),
    "qwen3-next": (STATE, "3 of 4 layers (first: layer 0, linear_attention)"),
    "gpt-oss": ("its attention has sinks",),
    "deepseek-v32": ("its attention is sparse: an indexer picks the keys",),
    "t5": ("is an encoder-decoder",),
    "bert": ("also attend to later ones (an encoder such as BERT)",),
}


@pytest.mark.parametrize("name", SAID)
def test_the_reason_is_true_of_the_model(name: str, tmp_path: Path) -> None:
    """Catches "keeps no keys and values" of a model that keeps them, ALiBi where there is none, and a bare traceback."""
    folder = save_checkpoint(tmp_path / name, refused_module(*FAMILIES[name]), word_tokenizer(VOCAB))
    with pytest.raises(CapabilityError) as caught:
        LLM(folder, drafter="none", dtype="float32", runtime="eager", threads=1)
    said = str(caught.value)
    assert all(words in said for words in SAID[name]), said
    for other in (OWN_CODE, STATE, BIASES):
        assert (other in said) == (other in SAID[name]), said
    assert name == "t5" or "Outrider runs decoders that attend over the keys and values" in said
    assert len(said.splitlines()) == 1


class BrokenLlama(transformers.LlamaForCausalLM):
    """A checkpoint's own code that fails, in a pass with the recording attention or in a plain one."""

    when = "outrider-shapes"

    def forward(self, *args: object, **kwargs: object) -> Any:
        if self.config._attn_implementation == self.when:
            raise KeyError("no such thing")
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("when", ["outrider-shapes", "eager", "outrider"])
def test_failing_code_is_one_line(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenLlama, "when", when)
    module = BrokenLlama(transformers.LlamaConfig(**GROUPED)).eval()
    with pytest.raises(CapabilityError) as caught:
        build_lm(module, "mine", torch.float32, torch.device("cpu"))
    assert "the code of BrokenLlama fails in a pass over a few tokens (KeyError: 'no such thing')" in str(caught.value)


class Biased(transformers.LlamaForCausalLM):
    """Its plain pass adds something to the logits that ours does not know of."""

    kernels = ("eager", "sdpa")

    def forward(self, *args: object, **kwargs: object) -> Any:
        found = super().forward(*args, **kwargs)
        if self.config._attn_implementation in self.kernels:
            found.logits = found.logits.roll(1, dims=-1)
        return found


@pytest.mark.parametrize(
    ("kernels", "said"), [
        (("eager", "sdpa"), "compute something that Outrider's attention does not (position biases such as ALiBi"),
        (("eager",), "Two of transformers' own kernels (eager, sdpa) differ as much: rounding in float32"),
    ],
)  # fmt: skip
def test_other_logits(kernels: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding that flips what a router picks is no missing feature: transformers' own kernels then differ, too."""
    monkeypatch.setattr(Biased, "kernels", kernels)
    module = Biased(transformers.LlamaConfig(**GROUPED)).eval()
    with pytest.raises(CapabilityError) as caught:
        build_lm(module, "mine", torch.float32, torch.device("cpu"))
    assert said in str(caught.value)


# ---------------------------------------------------------------- what used to end in a traceback

GEMMA4 = {
    **GROUPED, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
HUNYUAN = {**GROUPED, "head_dim": 8, "num_experts": 4, "moe_topk": 2}


def test_layers_of_several_shapes_are_weighed_one_by_one(tmp_path: Path) -> None:
    """Gemma 4: its config refuses to name one head size for all layers."""
    module: nn.Module = make_module("Gemma4", GEMMA4)
    layers = build_lm(module, "gemma4", torch.float32, torch.device("cpu")).shape.layers
    assert len({layer.key_size for layer in layers}) == 2
    numbers = sum(layer.num_kv_heads * (layer.key_size + layer.value_size) for layer in layers)
    assert kv_bytes_per_token(module.config, torch.bfloat16) == 2 * numbers
    folder = save_checkpoint(tmp_path, make_module("Gemma4", GEMMA4), word_tokenizer(VOCAB))
    assert LLM(folder, drafter="none", runtime="eager").generate([[3, 4]])[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_layers_still_tell_their_weight(dtype: str, tmp_path: Path) -> None:
    """HunYuan's router asks its linear layer for the dtype of its weight, which packing takes away."""
    folder = save_checkpoint(tmp_path, make_module("HunYuanMoEV1", HUNYUAN), word_tokenizer(VOCAB))
    assert LLM(folder, drafter="none", dtype=dtype, runtime="eager").generate([[3, 4]])[0].token_ids
