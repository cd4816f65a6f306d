"""Speculation counts that a server puts into the answer itself, under its own names.

    vLLM       metrics.speculative_decoding  (--per-request-spec-decode-metrics summary; rides on the usage chunk)
    SGLang     sglext.speculative_decoding_stats, or choices[].meta_info.spec_* under the names it has had so far
    llama.cpp  timings.draft_n, timings.draft_n_accepted

A field that is missing stays None. Histograms count steps by how many draft tokens they kept, so position i
was accepted in all steps that kept i or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.lab.server.types import Speculation

SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "spec_accepted_tokens")
SGLANG_DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
SGLANG_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def speculation_of(chunk: dict[str, Any]) -> Speculation | None:
    """What one chunk says; None where it says nothing."""
    for counts in (_vllm(chunk), _sglang_extension(chunk), _sglang_meta(chunk), _llamacpp(chunk)):
        if counts is not None:
            return counts
    return None


def _vllm(chunk: dict[str, Any]) -> Speculation | None:
    stats = _inside(chunk, "metrics", "speculative_decoding")
    if stats is None:
        return None
    return Speculation(
        num_steps=_count(stats, "num_spec_steps"),
        num_draft_tokens=_count(stats, "num_draft_tokens"),
        num_accepted_tokens=_count(stats, "num_accepted_draft_tokens"),
        num_full_steps=_full_steps(stats),
        accepted_per_position=_positions(stats.get("acceptance_histogram")),
    )


def _sglang_extension(chunk: dict[str, Any]) -> Speculation | None:
    records = (_inside(chunk, "sglext") or {}).get("speculative_decoding_stats")
    if not isinstance(records, list) or not records or not isinstance(records[0], dict):
        return None
    return Speculation(
        num_steps=_count(records[0], "num_verification_steps"),
        num_draft_tokens=_count(records[0], "num_verified_draft_tokens"),
        num_accepted_tokens=_count(records[0], "num_accepted_draft_tokens"),
    )


def _sglang_meta(chunk: dict[str, Any]) -> Speculation | None:
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    meta = _inside(choice, "meta_info") or _inside(chunk, "meta_info") or {}
    steps = _count(meta, "spec_verify_ct")
    if steps is None:
        return None
    histogram = next((meta[name] for name in SGLANG_HISTOGRAM if name in meta), None)
    return Speculation(
        num_steps=steps,
        num_draft_tokens=_count(meta, *SGLANG_DRAFTED),
        num_accepted_tokens=_count(meta, *SGLANG_ACCEPTED),
        accepted_per_position=_positions(histogram),
    )


def _llamacpp(chunk: dict[str, Any]) -> Speculation | None:
    timings = _inside(chunk, "timings") or {}
    drafted, accepted = _count(timings, "draft_n"), _count(timings, "draft_n_accepted")
    if drafted is None or accepted is None:
        return None
    return Speculation(num_draft_tokens=drafted, num_accepted_tokens=accepted)


def _positions(histogram: Any) -> list[int]:
    """Steps that kept at least 1, 2, ... draft tokens."""
    if not _counts(histogram):
        return []
    return [sum(histogram[kept:]) for kept in range(1, len(histogram))]


def _full_steps(stats: dict[str, Any]) -> int | None:
    """Steps that kept all of their draft: the last bucket of every length, or of all where every draft had the full length."""
    by_length, histogram = stats.get("acceptance_histogram_by_draft_length"), stats.get("acceptance_histogram")
    if isinstance(by_length, dict) and all(_counts(one) for one in by_length.values()):
        return sum(one[-1] for one in by_length.values() if one)
    steps, drafted = _count(stats, "num_spec_steps"), _count(stats, "num_draft_tokens")
    if steps is None or not _counts(histogram) or not histogram or drafted != steps * (len(histogram) - 1):
        return None
    return int(histogram[-1])


def _inside(tree: dict[str, Any], *names: str) -> dict[str, Any] | None:
    for name in names:
        value = tree.get(name)
        if not isinstance(value, dict):
            return None
        tree = value
    return tree


def _count(record: dict[str, Any], *names: str) -> int | None:
    values = (record.get(name) for name in names)
    return next((value for value in values if type(value) is int and value >= 0), None)


def _counts(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(type(value) is int for value in values)
