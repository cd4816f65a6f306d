"""The attributes of a request's span, as plain dictionaries.

Names are OpenTelemetry's for generative AI where it has one (semantic-conventions-genai,
gen-ai-spans.md, status Development in 2026); latencies have vLLM's names (gen_ai.latency.*), which
tracing backends know; what is only ours begins with `outrider.`. No text of prompts, answers or
stop strings is ever among them.
"""

from __future__ import annotations

from typing import Any

from outrider.engine.request import Finish, Request

Attributes = dict[str, Any]
LIMIT = 1 << 63  # of whole numbers as OTLP sends them; a seed may be larger


def operation_of(request: Request) -> str:
    """gen_ai.operation.name, by the kind of id OpenAI's interface gives."""
    return "text_completion" if request.id.startswith("cmpl") else "chat"


def of_request(request: Request, model_name: str) -> Attributes:
    """Attributes of the request. Options that are off are left out."""
    params = request.params
    speculation = request.speculation
    attributes: Attributes = {
        "gen_ai.operation.name": operation_of(request),
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": request.id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "outrider.speculation.mode": speculation.mode,
        "outrider.priority": request.priority,
    }
    optional = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "outrider.speculation.max_draft_tokens": speculation.max_draft_tokens,
    }
    attributes |= {name: value for name, value in optional.items() if value is not None}
    large = {
        name: str(value)
        for name, value in attributes.items()
        if isinstance(value, int) and not -LIMIT <= value < LIMIT
    }
    return attributes | large


def of_finish(finish: Finish) -> Attributes:
    """Attributes of its cost and of how drafting went."""
    stats = finish.stats
    attributes: Attributes = {
        "gen_ai.response.finish_reasons": [finish.reason],
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.emitted,
        "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
        "gen_ai.latency.time_in_queue": finish.queued_s,
        "gen_ai.latency.time_in_model_prefill": finish.prefill_s,
        "outrider.drafter": finish.drafter,
        "outrider.lossless": finish.lossless,
        "outrider.prompt_share": finish.prompt_share,
        "outrider.reproducible": finish.reproducible,
        "outrider.preemptions": finish.preemptions,
        "outrider.spec_decode.steps": stats.steps,
        "outrider.spec_decode.draft_tokens": stats.drafted,
        "outrider.spec_decode.accepted_tokens": stats.accepted,
        "outrider.spec_decode.accepted_per_position": list(stats.accepted_per_position),
    }
    if stats.emitted:
        attributes |= {
            "gen_ai.latency.time_to_first_token": stats.ttft_s,
            "gen_ai.latency.time_in_model_decode": stats.decode_s,
            "gen_ai.latency.e2e": stats.ttft_s + stats.decode_s,
        }
    attributes |= {
        f"outrider.step_time.{phase}": seconds for phase, seconds in stats.time_s.items()
    }
    ratios = {"outrider.spec_decode.tau": stats.tau, "outrider.spec_decode.alpha": stats.alpha}
    return attributes | {name: value for name, value in ratios.items() if value is not None}
