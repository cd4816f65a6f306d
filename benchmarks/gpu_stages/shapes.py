"""Models of well-known shapes with random weights, made on the device and run as the package runs a
checkpoint: what is timed is our own pass, and no checkpoint has to be there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from gpu_stages.context import Context
from outrider.errors import CapabilityError
from outrider.models.card import unknown_card
from outrider.models.draft_loop import DraftLoop, DraftLoopProgram
from outrider.models.graph_use import use_graphs
from outrider.models.lm import LM
from outrider.models.loaded import LoadedModel, Tables
from outrider.models.loading.load import build_lm, finish
from outrider.runtime.gpu.run import use_device_run

SMOL = "SmolLM2-135M"
LLAMA = "Llama-3.1-8B"
QWEN = "Qwen3-30B-A3B"
MAX_TOKENS = 64  # of a pass for which bits are promised
# device memory that libraries, recordings and activations need beside weights
SPARE_BYTES = 2 << 30


def config_of(name: str, tiny: bool, vocab_size: int | None = None) -> Any:
    """The published shape, or one of two layers with the same parts."""
    common = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
    if name == SMOL:
        shape = dict(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        )
    elif name == LLAMA:
        shape = dict(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            tie_word_embeddings=False,
        )
    else:
        shape = dict(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            vocab_size=151936,
            max_position_embeddings=40960,
            tie_word_embeddings=False,
        )
    if tiny:
        shape |= dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            vocab_size=320,
            max_position_embeddings=512,
        )
        shape |= dict(num_attention_heads=4, num_key_value_heads=2)
        if name == QWEN:
            shape |= dict(
                moe_intermediate_size=32, head_dim=16, num_experts=8, num_experts_per_tok=2
            )
    if vocab_size is not None:
        shape["vocab_size"] = vocab_size
    return (Qwen3MoeConfig if name == QWEN else LlamaConfig)(**shape, **common)


@dataclass
class Shaped:
    """A model that is ready to run, and what was seen while it was made."""

    name: str
    loaded: LoadedModel
    bytes: WeightBytes
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def lm(self) -> LM:
        return self.loaded.lm

    def facts(self) -> dict[str, Any]:
        """For the JSON file."""
        limits = self.lm.limits
        return {
            "parameters": self.lm.shape.num_parameters,
            "weight_bytes": self.bytes.total,
            "ready_s": round(self.seconds, 2),
            "graphs": not any("CUDA graphs" in note for note in self.notes)
            and self.lm.device.type == "cuda",
            "exact_rows": limits.exact_rows,
            "exact_trees": limits.exact_trees,
            "granularity": limits.granularity,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class WeightBytes:
    """What a pass reads of the weights."""

    dense: int  # read by every pass
    experts: int  # all of them, of all layers
    # the embedding where the output layer has weights of its own: rows are looked up, not read
    table: int
    num_experts: int = 1
    per_token: int = 1

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.table

    def read(self, tokens: int) -> float:
        """Expected bytes read by a pass over so many tokens, whose experts are chosen at random."""
        missed = (1 - self.per_token / self.num_experts) ** tokens
        return self.dense + self.experts * (1 - missed)

    @classmethod
    def of(cls, module: Any) -> WeightBytes:
        config = module.config
        sizes = {"dense": 0, "experts": 0, "table": 0}
        embedding = module.get_input_embeddings().weight
        is_tied = module.get_output_embeddings().weight is embedding
        for name, weight in module.named_parameters():
            kind = (
                "experts"
                if ".experts." in name
                else "table"
                if weight is embedding and not is_tied
                else "dense"
            )
            sizes[kind] += weight.numel() * weight.element_size()
        if not sizes["experts"]:
            return cls(**sizes)
        return cls(**sizes, num_experts=config.num_experts, per_token=config.num_experts_per_tok)


def bytes_needed(name: str, tiny: bool) -> int:
    """Bytes that the weights of a shape will take, computed before any is made."""
    with torch.device("meta"):
        return WeightBytes.of(
            AutoModelForCausalLM.from_config(config_of(name, tiny), dtype=dtype_of(tiny))
        ).total


def dtype_of(tiny: bool) -> torch.dtype:
    """bf16; fp32 in the small form, which must not build kernels on a CPU first."""
    return torch.float32 if tiny else torch.bfloat16


def make(
    context: Context, name: str, loop_lengths: Sequence[int] = (), vocab_size: int | None = None
) -> Shaped:
    """A model of this shape. Raises CapabilityError where the device has no room for it.

    `loop_lengths`: also a drafting loop whose calls make so many tokens.
    """
    config = config_of(name, context.tiny, vocab_size)
    dtype = dtype_of(context.tiny)
    needed = bytes_needed(name, context.tiny)
    free = context.free_bytes()
    if free is not None and needed + SPARE_BYTES > free:
        room = f"{needed / 1e9:.1f} GB and {SPARE_BYTES / 1e9:.0f} to run in; {free / 1e9:.1f} are free"
        raise CapabilityError(f"{name} needs {room}")
    start = time.monotonic()
    notes = []
    own = None
    torch.manual_seed(0)
    with torch.device(context.device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    soften_experts(module)
    lm = build_lm(module, name, dtype, context.device)
    card = unknown_card(lm.shape.vocab_size)
    loaded = LoadedModel(name, lm, card, None, frozenset(), tables=Tables.of(module))
    if context.on_cuda:
        try:
            own = use_device_run(lm, module)
        except CapabilityError as error:
            notes.append(f"by the model's own code: {error}")
        try:
            use_graphs(loaded, module, loop_lengths, lm.shape.vocab_size if loop_lengths else None)
        except CapabilityError as error:
            notes.append(f"without CUDA graphs: {error}")
    if loop_lengths and loaded.draft_loop is None:
        programs = {
            length: DraftLoopProgram(lm, module, length, lm.shape.vocab_size)
            for length in loop_lengths
        }
        loaded.draft_loop = DraftLoop(lm, programs)
    weights = WeightBytes.of(module)  # before linears are packed
    if own is None:
        finish(lm, module)
    else:
        lm.limits = own.find_limits(lm, MAX_TOKENS)
    context.synchronize()
    return Shaped(name, loaded, weights, time.monotonic() - start, notes)


@torch.no_grad()
def soften_experts(module: nn.Module) -> None:
    """Make what experts add small. A random router has near ties; one that rounding decides
    otherwise would change the logits, and the package would rightly refuse the model."""
    for name, weight in module.named_parameters():
        if ".experts." in name and "down_proj" in name:
            weight.mul_(1e-3)


def filled(lm: LM, batch: int, length: int, room: int) -> LM:
    """A twin of the model whose cache holds `batch` rows of `length` random keys and values, with
    room behind them."""
    twin = lm.twin()
    twin.kv.reserve(batch, length + room)
    for store in (*twin.kv.keys, *twin.kv.values):
        store.normal_()
    for row in range(batch):
        twin.kv.add_row()
        twin.kv.advance(row, length)
    return twin


def cache_bytes(lm: LM, batch: int, length: int, room: int) -> int:
    """What `filled` would take."""
    slots, capacity = lm.twin().kv.size_for(batch, length + room)
    return slots * capacity * lm.kv.bytes_per_token
