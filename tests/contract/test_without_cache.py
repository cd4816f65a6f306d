"""Models that read the whole text anew for each token: their text is `generate`'s own, to the bit, and a note says what it costs.

The passes themselves: `test_transformers_cache.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.models.loading.load import build_lm
from outrider.models.signals import decoder_layers
from outrider.sampling.params import SamplingParams
from tests.contract.family_reference import random_text
from tests.contract.own_cache_families import FOR_EACH_TOKEN, VOCAB, make
from tests.helpers import byte_tokenizer, save_checkpoint, word_tokenizer

PROMPTS = [random_text(VOCAB, length, seed=length) for length in (1, 24)]
# and the tokens to write
EACH = [
    ("cpmant", 24),
    *(pytest.param(name, 50 if name == "prophetnet" else 200, marks=pytest.mark.nightly) for name in sorted(FOR_EACH_TOKEN)),
]  # prophetnet's passes take ten times as long


def written(folder: Path, drafter: str, length: int) -> tuple[list[list[int]], LLM]:
    llm = LLM(folder, drafter=drafter, dtype="float32", threads=1, num_draft_tokens=2)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=length, ignore_eos=True))
    return [answer.token_ids for answer in answers], llm


@pytest.mark.parametrize(("name", "length"), EACH)
def test_greedy_texts_are_those_of_generate(name: str, length: int, tmp_path: Path) -> None:
    """Catches a token whose pass holds more than the text before it: a rejected draft, another row, a chunk of a prompt."""
    module = make(name)
    folder = save_checkpoint(tmp_path, module, word_tokenizer(VOCAB))
    texts, llm = written(folder, "ngram", length)
    assert texts == written(folder, "none", length)[0]
    options = {"use_mems": False} if name == "xlnet" else {"use_cache": False}
    for prompt, text in zip(PROMPTS, texts, strict=True):
        theirs = module.generate(
            torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        assert text == theirs[0, len(prompt) :].tolist()
    assert llm.config["exact"] is True
    notes = [note for note in llm.notes if "reads its whole text anew for each token" in note]
    assert len(notes) == 1
    assert "Drafts save no passes: use --drafter none" in notes[0]


def test_a_model_of_several_decoders(tmp_path: Path) -> None:
    """Byte latent transformers, a model of bytes around one of patches: transformers' own cache does not serve them, either."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    outer = {**small, "vocab_size": 260, "hidden_size_global": 32, "cross_attn_k": 2}
    config = transformers.BltConfig(
        vocab_size=260, encoder_hash_byte_group_vocab=100, encoder_hash_byte_group_size=[3],
        encoder_hash_byte_group_nb_functions=1, patcher_config={**small, "vocab_size": 260}, encoder_config=outer,
        decoder_config=outer, global_config=small,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module: Any = transformers.BltForCausalLM(config).eval()
    folder, prompt = save_checkpoint(tmp_path, module, byte_tokenizer()), [5, 6, 7, 8, 5, 6, 7]
    llm = LLM(folder, drafter="ngram", dtype="float32", threads=1, num_draft_tokens=2)
    text = llm.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))[0].token_ids
    expected = module.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0
    )
    assert text == expected[0, len(prompt) :].tolist()
    assert "reads its whole text anew in each pass, which is slower: it is made of several decoders" in llm.notes[0]
    with pytest.raises(CapabilityError, match="its decoder layers were not found"):
        decoder_layers(module)


@pytest.mark.parametrize(
    ("name", "changes", "words"), [
        ("reformer", {"hash_seed": None}, "two passes over one text give different logits, so it has no greedy text"),
        ("megatron-bert", {"is_decoder": False}, "megatron-bert): Its tokens also attend to later ones (an encoder"),
        ("xlm", {"causal": False}, "xlm): Its tokens also attend to later ones"),
    ],
)  # fmt: skip
def test_what_no_pass_serves_is_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    """Catches an encoder that fills in a mask for each token, and a text that is drawn anew in every pass."""
    with pytest.raises(CapabilityError) as caught:
        build_lm(make(name, **changes), "tiny", torch.float32, torch.device("cpu"))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_generate_of_its_own_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not write token by token, so what a pass says of one token is not what it writes."""
    module = make("cpmant")
    monkeypatch.setattr(type(module), "generate", lambda self: None)
    with pytest.raises(CapabilityError, match="it has a `generate` of its own"):
        build_lm(module, "tiny", torch.float32, torch.device("cpu"))
