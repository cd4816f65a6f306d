"""One suite for every architecture: our passes over our cache must give transformers' own logits.

Small random models, so that agreement is a statement about code, not about weights. Compared are a
whole prefill, a prefill in chunks, ragged batches, chains, trees (each path against that path run
alone), and a row that goes on after keeping a path that was scattered over the tree. fp32 for all;
fp64 for the kinds of attention there are, where agreement to 1e-9 leaves no room for a mask that is
wrong at one position. Sliding windows are shorter than the texts.

The second half is what must be refused, by name, before the first token. What runs on transformers'
own cache: `test_transformers_cache.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from outrider.errors import CapabilityError
from outrider.llm import LLM
from outrider.models import attention
from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from tests.helpers import save_checkpoint, word_tokenizer

VOCAB = 96
WINDOW = 6
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.3,
}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2-window": ("Qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**GROUPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma4": ("Gemma4", {
        **GROUPED, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "hunyuan-moe": ("HunYuanMoEV1", {**GROUPED, "head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "gpt2": ("GPT2", GPT2),
    "gpt-neox": ("GPTNeoX", SMALL),
    "phi": ("Phi", GROUPED),
    "phi3": ("Phi3", {**GROUPED, "sliding_window": WINDOW}),
    "starcoder2": ("Starcoder2", {**GROUPED, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2", GROUPED),
    "granite": ("Granite", {**GROUPED, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "cohere": ("Cohere", {**GROUPED, "logit_scale": 1.0}),
    "smollm3": ("SmolLM3", {**GROUPED, "no_rope_layers": [1, 1, 0]}),
    "stablelm": ("StableLm", GROUPED),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.3}),
    "falcon": ("Falcon", {**SMALL, "multi_query": True}),
    "falcon-grouped": ("Falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-separate": ("Falcon", {**SMALL, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt-oss": ("GptOss", {**GROUPED, **FEW_EXPERTS, "head_dim": 8, "sliding_window": WINDOW}),
    "mimo-v2": ("MiMoV2Flash", {
        **GROUPED, "head_dim": 8, "v_head_dim": 4, "sliding_window": WINDOW, "mlp_layer_types": ["dense"] * 3, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"]}),
    "granite-swa": ("GraniteSWA", {**GROUPED, "attention_multiplier": 0.2, "sliding_window": WINDOW}),
}  # fmt: skip
IN_FP64 = ("llama", "mistral", "gpt2", "gemma3", "gpt-neox", "mimo-v2")
CASES = [(name, torch.float32, 2e-4) for name in CONFIGS] + [
    (name, torch.float64, 1e-9) for name in IN_FP64
]
TEXTS = (3, 11, 26)  # committed tokens of the ragged rows
PARENTS = [-1, -1, 0, 1, 0, 3, 4]  # paths 0-2, 0-4-6, 1-3-5, their nodes interleaved
PATHS = ([0, 2], [0, 4, 6], [1, 3, 5])


def make_module(
    family: str, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A random model of transformers' class for this family; its norms and biases are random too,
    not all ones and zeros."""
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(
        transformers, f"{family}Config"
    )
    head = getattr(transformers, f"{family}ForCausalLM", None) or getattr(
        transformers, f"{family}LMHeadModel"
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = head(config_class(**copy.deepcopy(options)))
        for parameter in module.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    return module.to(dtype).eval().requires_grad_(False)


class Subject:
    """One architecture twice: on our cache, and untouched."""

    def __init__(self, name: str, dtype: torch.dtype, tolerance: float) -> None:
        attention.register()
        family, options = CONFIGS[name]
        self.plain_module = make_module(family, options, dtype)
        has_sdpa = type(self.plain_module)._supports_sdpa and "gemma2" not in name
        self.plain_module.set_attn_implementation("sdpa" if has_sdpa else "eager")
        self.lm: LM = build_lm(
            make_module(family, options, dtype), name, dtype, torch.device("cpu")
        )
        self.tolerance = tolerance

    def plain(self, tokens: list[int]) -> Tensor:
        """Transformers' logits (T, V) of one text."""
        with torch.inference_mode():
            return self.plain_module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def compare(self, ours: Tensor, text: list[int], last: int) -> None:
        """Our logits of the last `last` tokens of `text`."""
        theirs = self.plain(text)[-last:]
        worst = (ours - theirs).abs().max() / theirs.abs().max()
        assert worst <= self.tolerance, f"off by {worst:.1e} of the logits' range"

    def begin(self, *texts: list[int]) -> None:
        """Rows whose caches hold all of each text but its last token."""
        while self.lm.kv.num_rows:
            self.lm.kv.swap_remove(0)
        for _ in texts:
            self.lm.kv.add_row()
        with torch.inference_mode():
            self.lm.catch_up(texts)


@pytest.fixture(
    scope="module", params=CASES, ids=[f"{name}-{str(dtype)[6:]}" for name, dtype, _ in CASES]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(*request.param)


def text_of(length: int, seed: int = 0) -> list[int]:
    """A random text, without the special ids."""
    return torch.randint(
        3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def score(subject: Subject, rows: list[list[int]], parents: list[int] | None = None) -> Tensor:
    """Logits (B, T, V) of one pass; `rows` begin with the pending token."""
    tree = None if parents is None else torch.tensor([parents] * len(rows))
    with torch.inference_mode():
        return subject.lm.forward(torch.tensor(rows), tree).logits


def test_prefill(subject: Subject) -> None:
    """Catches wrong positions, scaling, head grouping, or a window that is off by one."""
    text = text_of(40)
    subject.begin(text[:1])
    subject.compare(score(subject, [text])[0], text, 40)


def test_chunked_prefill(subject: Subject) -> None:
    """Catches a chunk that does not see its predecessors, or is written over them."""
    text = text_of(41, seed=1)
    subject.begin(text[:1])
    for start, end in ((0, 16), (16, 17), (17, 41)):
        logits = score(subject, [text[start:end]])[0]
        subject.lm.kv.advance(0, end - start)
        subject.compare(logits, text[:end], end - start)


def test_ragged_chain(subject: Subject) -> None:
    """Catches rows of different lengths that share positions or see one another's keys."""
    chain = text_of(5, seed=2)
    texts = [text_of(length, seed=length) for length in TEXTS]
    subject.begin(*texts)
    logits = score(subject, [[text[-1], *chain] for text in texts])
    for text, ours in zip(texts, logits, strict=True):
        subject.compare(ours, text + chain, 6)


def test_tree_paths_equal_the_path_alone(subject: Subject) -> None:
    """Catches a node that sees a sibling, storage order used as position, and a window measured
    along storage order."""
    nodes = text_of(len(PARENTS), seed=3)
    texts = [text_of(length, seed=10 + length) for length in TEXTS]
    subject.begin(*texts)
    logits = score(subject, [[text[-1], *nodes] for text in texts], PARENTS)
    for text, ours in zip(texts, logits, strict=True):
        for path in PATHS:
            columns = [0, *(node + 1 for node in path)]
            subject.compare(ours[columns], text + [nodes[node] for node in path], len(path) + 1)


def test_going_on_after_a_scattered_path(subject: Subject) -> None:
    """Catches kept keys that stay where they were scored, carry the position of their storage
    order, or are overwritten."""
    nodes = text_of(len(PARENTS), seed=4)
    texts = [text_of(length, seed=20 + length) for length in TEXTS]
    subject.begin(*texts)
    score(subject, [[text[-1], *nodes] for text in texts], PARENTS)
    for row, path in enumerate(PATHS):
        subject.lm.kv.keep(row, [0, *(node + 1 for node in path)])
        texts[row] += [nodes[node] for node in path] + [7 + row]
    subject.lm.kv.check_integrity()
    for step in range(4):
        logits = score(subject, [[text[-1]] for text in texts])
        for row, text in enumerate(texts):
            subject.compare(logits[row], text, 1)
            subject.lm.kv.keep(row, [0])
            text.append(30 + step)


# ---------------------------------------------------------------- held to what is exact

REACH = 16
HELD: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": ("Qwen2Moe", {
        **GROUPED, "use_sliding_window": True, "sliding_window": REACH, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    "phimoe": ("Phimoe", {**GROUPED, **FEW_EXPERTS, "sliding_window": REACH}),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_is_in_the_mask_alone_bounds_the_context(name: str) -> None:
    """Catches a model whose window, chunk or scale our attention ignores: right for a while, then
    another model."""
    family, options = HELD[name]
    attention.register()
    plain = make_module(family, options)
    lm = build_lm(make_module(family, options), name, torch.float32, torch.device("cpu"))
    assert lm.shape.context_length == REACH
    tokens = torch.tensor([text_of(REACH - 1)])
    with torch.inference_mode():
        theirs = plain(input_ids=tokens, use_cache=False).logits[0]
        lm.kv.add_row()
        first = lm.forward(tokens[:, :7]).logits[0]
        lm.kv.advance(0, 7)
        ours = torch.cat([first, lm.forward(tokens[:, 7:]).logits[0]])
    assert (ours - theirs).abs().max() < 2e-4 * theirs.abs().max()


# ---------------------------------------------------------------- refused by name

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "bert": ("Bert", SMALL),
}  # fmt: skip


def refused_module(family: str, options: dict[str, Any]) -> nn.Module:
    """Whatever class transformers has for this family."""
    for ending in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        if hasattr(transformers, family + ending):
            config = getattr(transformers, f"{family}Config")(**copy.deepcopy(options))
            return getattr(transformers, family + ending)(config)
    pytest.skip(f"transformers has no {family}")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    """Catches a model that would decode wrongly, or die with a traceback, instead of being refused
    before the first token."""
    module = refused_module(*REFUSED[name])
    folder = save_checkpoint(tmp_path / name, module, word_tokenizer(VOCAB))
    with pytest.raises(CapabilityError) as caught:
        LLM(folder, drafter="none", dtype="float32", runtime="eager", threads=1)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
