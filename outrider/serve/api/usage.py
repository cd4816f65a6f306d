"""The cost of an answer: tokens in OpenAI's `usage`; speculation, under vLLM's names, and time in
`metrics`; the numbers that llama.cpp's server gives in `timings`.

vLLM's mean acceptance length is our tau over the steps that drafted; its draft acceptance rate is
our draft utilisation. Several answers of one request are counted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from outrider.engine.request import Finish
from outrider.stats import DecodeStats


@dataclass(frozen=True)
class Cost:
    """One finished answer."""

    finish: Finish
    num_tokens: int  # that the client gets
    num_plain: int  # of its tokens, emitted by steps that drafted nothing
    prompt: int  # number of its prompt: a prompt that is answered n times is counted once


def usage(
    costs: Sequence[Cost], predicted: Sequence[Cost] | None = None, num_thought: int | None = None
) -> dict[str, Any]:
    """`usage` of one HTTP request. A prompt's answers find what the first of them read: the least
    that one found was cached.

    `predicted`: of the answers that were drafted for from a prediction; None: the request had none.
    `num_thought`: tokens of thoughts; None: they are not counted."""
    first = {
        cost.prompt: cost.finish
        for cost in sorted(costs, key=lambda cost: -cost.finish.cached_tokens)
    }
    prompt = sum(finish.prompt_tokens for finish in first.values())
    completion = sum(cost.num_tokens for cost in costs)
    details = {
        **({} if num_thought is None else {"reasoning_tokens": num_thought}),
        **({} if predicted is None else _prediction(_sum(predicted))),
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(finish.cached_tokens for finish in first.values())
        },
        **({"completion_tokens_details": details} if details else {}),
    }


def so_far(num_prompt: int, num_completion: int) -> dict[str, Any]:
    """`usage` of one answer in the middle of its stream; what is cached is known at the end."""
    return {
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
    }


def no_usage(number: int) -> dict[str, Any]:
    """The fields of a chunk of answer `number` where only the last chunk, or none, has the usage."""
    return {}


def _prediction(stats: DecodeStats) -> dict[str, int]:
    """Counts of predicted tokens; all drafts were read from the prediction. A token that was
    rejected twice counts twice. These are not among the answer's tokens; OpenAI charges them as if
    they were.
    """
    return {
        "accepted_prediction_tokens": stats.accepted,
        "rejected_prediction_tokens": stats.drafted - stats.accepted,
    }


def metrics(costs: Sequence[Cost], num_spec_tokens: int | None) -> dict[str, Any]:
    """`metrics` of one HTTP request. `num_spec_tokens`: draft tokens per step where that is a fixed
    number."""
    stats = _sum(costs)
    num_plain = sum(cost.num_plain for cost in costs)
    finishes = [cost.finish for cost in costs]
    return {
        "speculative_decoding": _speculation(stats, stats.steps - num_plain, num_spec_tokens),
        "timing": _timing(finishes),
        "lossless": all(finish.lossless for finish in finishes),
        "prompt_share": min(finish.prompt_share for finish in finishes),
        "reproducible": all(finish.reproducible for finish in finishes),
        "drafter": finishes[0].drafter,
        "seed": finishes[0].seed if len(finishes) == 1 else None,
        "preemptions": sum(finish.preemptions for finish in finishes),
    }


def timings(costs: Sequence[Cost]) -> dict[str, Any]:
    """`timings` of one HTTP request, as llama.cpp's server gives them: of tokens that were read and
    written here, cached ones apart, and drafted ones where there were any. Answers of one request run
    side by side, so their times are the longest of any."""
    counts = usage(costs)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    finishes = [cost.finish for cost in costs]
    stats = _sum(costs)
    prompt_s = max(finish.prefill_s for finish in finishes)
    ended_s = max(finish.stats.ttft_s + finish.stats.decode_s for finish in finishes)
    written_s = ended_s - max(finish.queued_s for finish in finishes) - prompt_s
    drafts = {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted} if stats.drafted else {}
    return {
        "cache_n": cached,
        **_pace("prompt", counts["prompt_tokens"] - cached, prompt_s),
        **_pace("predicted", stats.emitted, max(written_s, 0.0)),
        **drafts,
    }


def _pace(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / count if count else None,
        f"{name}_per_second": count / seconds if seconds else None,
    }


def _sum(costs: Sequence[Cost]) -> DecodeStats:
    return reduce(DecodeStats.merge, (cost.finish.stats for cost in costs), DecodeStats())


def _speculation(
    stats: DecodeStats, num_steps: int, num_spec_tokens: int | None
) -> dict[str, Any] | None:
    """The speculation numbers of an answer; None where nothing was drafted."""
    if num_steps <= 0:
        return None
    # [k]: steps that kept k draft tokens or more
    reached = [num_steps, *stats.accepted_per_position]
    reached += [0] * ((num_spec_tokens or 0) + 1 - len(reached))
    return {
        "mean_acceptance_length": 1 + stats.accepted / num_steps,
        "draft_acceptance_rate": stats.draft_utilisation,
        "acceptance_histogram": [
            more - less for more, less in zip(reached, [*reached[1:], 0], strict=True)
        ],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": num_spec_tokens,
    }


def _timing(finishes: Sequence[Finish]) -> dict[str, Any]:
    """Seconds. Answers of one request run side by side: first token of any, longest decoding, all
    tokens over all time.

    `tpot_s` is a single answer's pace, averaged over the answers' tokens; `decode_tokens_per_s`
    counts all answers together.
    """
    stats = reduce(DecodeStats.merge, (finish.stats for finish in finishes), DecodeStats())
    first = min(finish.stats.ttft_s for finish in finishes)
    last = max(finish.stats.ttft_s + finish.stats.decode_s for finish in finishes)
    return {
        "queued_s": max(finish.queued_s for finish in finishes),
        "prefill_s": max(finish.prefill_s for finish in finishes),
        "ttft_s": first,
        "decode_s": last - first,
        "tpot_s": stats.tpot_s,
        "decode_tokens_per_s": stats.decode_tokens / (last - first)
        if stats.decode_tokens and last > first
        else None,
        "tokens_per_s": stats.emitted / last if last > 0 else None,
    }
