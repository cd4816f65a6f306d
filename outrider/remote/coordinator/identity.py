"""The identity of a target's texts, as its answers to a few fixed requests show it.

Targets continue one another's answers, so they must have one tokenizer, one chat template, the same
weights and arithmetic (the log-probabilities of some tokens, to the last bit) and the same sampling
defaults.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Facts = Mapping[str, str]
# (path, body) -> (status, answer)
Ask = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
TEXT = "The quick brown fox: 0123 äöü\n\tif x: return [1, 2]"
CONVERSATION = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "It jumps."},
    {"role": "user", "content": "Why?"},
]
NUM_TOKENS = 8  # of each answer


async def facts_of(card: Mapping[str, Any], ask: Ask) -> Facts:
    """The facts of the model that `card`, of /v1/models, describes."""
    model = card["id"]
    plain = {
        "model": model,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "speculation": {"mode": "off"},
    }
    text = await ask("/tokenize", {"model": model, "prompt": TEXT})
    conversation = await ask("/tokenize", {"model": model, "messages": CONVERSATION})
    greedy = await ask(
        "/v1/completions",
        {**plain, "prompt": TEXT, "temperature": 0, "logprobs": 5, "prompt_logprobs": 5},
    )
    sampled = await ask("/v1/completions", {**plain, "prompt": TEXT, "seed": 1})
    return {
        "context": str(card.get("max_model_len")),
        "lossless": str(card.get("lossless")),
        "tokenizer": _hash(text[1].get("tokens", text)),
        "chat template": _hash(conversation[1].get("tokens", conversation)),
        "weights or arithmetic": _hash(_answer(greedy)),
        "sampling defaults": _hash(_answer(sampled)),
    }


def difference(theirs: Facts, ours: Facts) -> str | None:
    """The difference in words; None: there is none."""
    names = [name for name in ours if theirs.get(name) != ours[name]]
    return ", ".join(f"{name} {theirs.get(name)} instead of {ours[name]}" for name in names) or None


def _answer(answered: tuple[int, dict[str, Any]]) -> Any:
    """The part of an answer that is the same at every time; of a refusal all of it."""
    status, content = answered
    return content["choices"] if status == 200 and "choices" in content else [status, content]


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
