"""The bytes that decoding reads and holds: the roof that memory bandwidth sets, and the memory that
a configuration adds.

    bytes of a plain pass = weights without a separate input embedding + KV bytes per token x rows x mean context
    roof in tokens/s      = rows x bandwidth / bytes of a plain pass

A plain decoder cannot be faster than the roof (unless caches hold the weights); speculation can,
for it reads once for several tokens.
"""

from __future__ import annotations

import time

import torch

from outrider.build import Models
from outrider.drafters.model.early_exit import EarlyExitDrafter
from outrider.drafters.model.quantised import QuantisedDrafter
from outrider.lab.bench.bench_result import TargetInfo
from outrider.lab.runner import Contender
from outrider.machine import memory_bandwidth
from outrider.models.card import ModelCard
from outrider.options import NATIVE

COPY_BYTES = 1 << 30
COPIES = 10


def describe_target(models: Models, name: str, draft: str | None) -> TargetInfo:
    """The facts known without running anything; the bandwidth is measured, which takes a second."""
    memory = models.memory.target
    lm = models.target.lm
    quantise = models.options.quantise
    read = pass_bytes(memory.weights_bytes, models.target.card, lm.dtype, quantise)
    return TargetInfo(
        name=name,
        draft=draft,
        dtype=str(lm.dtype).removeprefix("torch."),
        quantise=quantise,
        device=str(lm.device),
        runtime=models.options.runtime,
        threads=torch.get_num_threads(),
        context=models.context,
        weights_bytes=memory.weights_bytes or None,
        pass_bytes=read,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        bandwidth_bytes_per_s=bandwidth(lm.device),
    )


def pass_bytes(
    weights_bytes: int, card: ModelCard, dtype: torch.dtype, quantise: int | None = None
) -> int | None:
    """Bytes of weights that each pass reads; None for mixtures of experts and for unknown weights.

    The input embedding counts only where the output layer shares it; next to an output layer that
    loading has rounded it does not. Passes of a mixture read the experts that their tokens choose.
    """
    if not weights_bytes or card.has_experts:
        return None
    tied = quantise is None and card.ties_embeddings
    return weights_bytes - (0 if tied else card.vocab_size * card.hidden_size * dtype.itemsize)


def bandwidth(device: torch.device) -> float | None:
    """Bytes per second that the device's memory can be read with; None where we cannot tell."""
    if device.type == "cpu":
        return memory_bandwidth(torch.get_num_threads())
    return _cuda_bandwidth(device) if device.type == "cuda" else None


def roof_tokens_per_s(target: TargetInfo, rows: int, mean_context: float) -> float | None:
    """The highest possible speed of plain decoding, in tokens per second and row."""
    if target.pass_bytes is None or target.bandwidth_bytes_per_s is None:
        return None
    return target.bandwidth_bytes_per_s / (
        target.pass_bytes + target.kv_bytes_per_token * rows * mean_context
    )


def added_memory(contender: Contender) -> tuple[int | None, int | None]:
    """(weights, KV per token) in bytes alongside the target's. None: the drafter does not say. Tables
    of model-free drafters are not counted: a few bytes for each token they have seen.

    Early exit drafts with the target's own weights and writes into the target's own cache, so it
    adds nothing, but where the target runs natively: the runtime has weights of its own, and those
    as they were loaded are kept for the draft alone."""
    drafter = contender.built.decoder.drafter
    draft = contender.built.memory.draft
    parts = contender.configuration.parts(lossy=not contender.built.decoder.verifier.lossless)
    built = contender.built
    if isinstance(drafter, QuantisedDrafter):
        return drafter.added_bytes, 0
    dtype = built.target.lm.dtype
    heads = [
        kind.weigh_head(head, built.target.config, dtype) for kind, head in parts.requirements.heads
    ]
    weights = sum(head.weights_bytes for head in heads)
    kv = sum(head.kv_bytes_per_token for head in heads)
    if isinstance(drafter, EarlyExitDrafter):
        loaded = built.memory.target.weights_bytes if built.options.runtime == NATIVE else 0
        return weights + loaded, kv
    if parts.requirements.draft and draft is not None:
        return (weights + draft.weights_bytes) or None, kv + draft.kv_bytes_per_token
    return (None, None) if parts.requirements.module else (weights, kv)


def _cuda_bandwidth(device: torch.device) -> float:
    """Bandwidth of copies inside the device's memory, which read and write: the best of a few."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(COPIES):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        best = max(best, 2 * COPY_BYTES / (time.perf_counter() - start))
    return best
