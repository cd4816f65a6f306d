"""Which layer a draft should exit after: measured on the target's own text, weighed by what each
exit costs.

The target continues three built-in prompts greedily. Each exit is then asked for every token of
these continuations, given what stands before it: the share it gets right is its acceptance rate for
greedy decoding, because its first layers see just what the target's do. With its cost, the share of
weights it reads, the closed form of Leviathan et al. (`sampling/theory.py`) gives the speed-up that
is compared. Counting weights instead of seconds makes the choice the same on every run; overheads
per token are left out.

A few hundred tokens of passes per layer, once, on caches of their own: nothing of the user's is
touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.derived.truncate import DecoderLayers
from outrider.models.lm import LM, module_run
from outrider.models.loaded import LoadedModel
from outrider.models.probes.probe import probe_tokens
from outrider.sampling.theory import speedup, tau

PROMPTS = (
    "Once upon a time there was a little dog who lived by the sea. One day",
    "def add_all(numbers):\n    total = 0\n    for number in numbers:\n",
    "Question: Tom has 3 boxes with 12 apples each. He eats 4 apples. How many are left?\nAnswer:",
)
NUM_NEW_TOKENS = 40  # per prompt


@dataclass(frozen=True)
class Exit:
    """One candidate. `acceptance`: of greedy tokens; `cost`: of a draft token, the target's pass
    being 1."""

    layer: int  # layers the draft runs
    acceptance: float
    cost: float
    speedup: float  # predicted over plain decoding


@torch.inference_mode()
def find_exit(layers: DecoderLayers, target: LoadedModel, num_draft_tokens: int) -> Exit:
    """The exit with the largest predicted speed-up for this draft length; among equals the
    cheapest."""
    texts = _own_texts(target)
    lm = layers.run(layers.module)
    lm.kv.add_row()  # nothing is ever committed to it: every pass starts an empty text
    exits = []
    for layer in range(1, len(layers)):
        skipped = range(layer, len(layers))
        lm.run = module_run(layers.without(skipped))
        acceptance = _acceptance(lm, texts)
        cost = layers.cost(skipped)
        exits.append(
            Exit(
                layer,
                acceptance,
                cost,
                speedup(tau(acceptance, num_draft_tokens), num_draft_tokens, cost),
            )
        )
    return max(exits, key=lambda exit_: (exit_.speedup, -exit_.layer))


def _own_texts(target: LoadedModel) -> list[tuple[list[int], int]]:
    """The target's greedy answer to each prompt: (tokens, number of prompt tokens)."""
    # the same program, another cache
    lm = LM(target.lm.run, target.lm.shape, target.lm.dtype, target.lm.device)
    lm.limits = target.lm.limits
    prompts = _prompts(target)
    texts = [list(prompt) for prompt in prompts]
    for _ in texts:
        lm.kv.add_row()
    lm.catch_up(texts)
    for _ in range(min(NUM_NEW_TOKENS, lm.shape.context_length - max(map(len, texts)))):
        chosen = _greedy(
            lm.forward(torch.tensor([text[-1:] for text in texts], device=lm.device)).logits
        )
        for row, (text, token) in enumerate(zip(texts, chosen[:, 0].tolist(), strict=True)):
            text.append(token)
            lm.kv.advance(row, 1)
    return [
        (_up_to_the_end(text, len(prompt), target.eos_token_ids), len(prompt))
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def _prompts(target: LoadedModel) -> list[list[int]]:
    """Token ids of the built-in prompts; without a tokenizer one prompt of arbitrary tokens."""
    if target.tokenizer is None:
        prompts = probe_tokens(target.lm.shape.vocab_size, 16, target.lm.device).tolist()
    else:
        prompts = [target.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    longest = max(1, target.lm.shape.context_length // 2)
    return [prompt[:longest] for prompt in prompts]


def _up_to_the_end(text: list[int], start: int, ends: frozenset[int]) -> list[int]:
    """The text cut after its first end token."""
    for index in range(start, len(text)):
        if text[index] in ends:
            return text[: index + 1]
    return text


def _acceptance(lm: LM, texts: Sequence[tuple[list[int], int]]) -> float:
    """Share of the texts' own tokens, prompts aside, that are this model's first choice."""
    right = total = 0
    for text, start in texts:
        columns = torch.arange(start - 1, len(text) - 1, device=lm.device)
        logits = lm.forward(torch.tensor([text[:-1]], device=lm.device), columns=columns).logits
        right += int((_greedy(logits)[0] == torch.tensor(text[start:], device=lm.device)).sum())
        total += len(text) - start
    return right / total


def _greedy(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)
