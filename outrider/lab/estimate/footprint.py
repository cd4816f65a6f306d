"""What the draft model takes, and what the machine's roof allows."""

from __future__ import annotations

from outrider.lab.estimate.estimate_result import EstimateInput, MemoryOverhead, Roof
from outrider.lab.estimate.roofline import DecodeLoad, ModelSize, free_rows, free_tokens, pass_seconds


def memory_overhead(asked: EstimateInput, load: DecodeLoad) -> MemoryOverhead | None:
    """None where the draft's size is not known, or nothing."""
    if asked.draft is None or asked.draft.num_params == 0:
        return None
    draft_kv, target_kv = _kv_bytes(asked.draft, load), None
    target_weights = share = None
    if asked.target is not None:
        target_kv, target_weights = _kv_bytes(asked.target, load), round(asked.target.weights_bytes)
        both = (draft_kv, target_kv) if draft_kv is not None and target_kv is not None else (0, 0)
        share = (asked.draft.weights_bytes + both[0]) / (target_weights + both[1])
    return MemoryOverhead(
        draft_weights_bytes=round(asked.draft.weights_bytes),
        draft_kv_bytes=draft_kv,
        target_weights_bytes=target_weights,
        target_kv_bytes=target_kv,
        share=share,
    )


def roof_of(asked: EstimateInput, load: DecodeLoad, gamma: int) -> Roof | None:
    """None without the target's size and a bandwidth."""
    if asked.hardware is None or asked.target is None:
        return None
    return Roof(
        target_pass_s=pass_seconds(asked.target, 1, asked.hardware, load),
        draft_pass_s=pass_seconds(asked.draft, 1, asked.hardware, load) if asked.draft else None,
        free_tokens=free_tokens(asked.target, asked.hardware, load),
        free_rows=free_rows(asked.target, gamma + 1, asked.hardware, load),
    )


def _kv_bytes(model: ModelSize, load: DecodeLoad) -> int | None:
    return None if model.kv_bytes_per_token is None else model.kv_bytes(load.num_rows, load.context)
