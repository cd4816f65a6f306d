"""The results of a generation: whole completions, or chunks while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.stats import DecodeStats


@dataclass
class Completion:
    """One finished (or interrupted) answer."""

    prompt_token_ids: list[int]
    # without special tokens and the stop string or stop token that ended it, where they were not
    # asked for
    text: str
    token_ids: list[int]  # everything generated, an end-of-text token included
    # "stop" (end token or stop string), "length" (max_tokens or context), "abort" (interrupted)
    finish_reason: str
    # per token: "accepted", "correction", "bonus", or "plain" when nothing was drafted
    origins: list[str]
    # per token: id -> log-probability under the target, no filters applied
    logprobs: list[dict[int, float]] | None
    stats: DecodeStats
    # False: a lossy verifier was allowed, so the text need not follow the model's own distribution
    lossless: bool
    # the one used, also when none was asked for: with `verifier` it repeats a sampled answer
    seed: int
    # the acceptance rule by its name: for a seeded answer gumbel, unless another one was asked for
    verifier: str = ""
    # the stop string or stop_token_ids entry that ended it; None: anything else did
    stop_reason: int | str | None = None
    prompt: str | None = None  # the text that was given; None where token ids were
    index: int = 0  # which of the `n` answers to its prompt
    others: list[Completion] = field(default_factory=list)  # the further answers that `n` asked for

    @property
    def outputs(self) -> list[Completion]:
        """All answers to the prompt, as in vLLM's RequestOutput: this one, then the others."""
        return [self, *self.others]


@dataclass
class StreamChunk:
    """The output of one step. The last chunk carries the completion."""

    text: str
    token_ids: list[int]
    origins: list[str]
    pieces: list[str]  # text released by each token; "".join(pieces) == text
    completion: Completion | None = field(default=None)
