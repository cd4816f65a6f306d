"""The results of a generation: whole completions, or chunks while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.stats import DecodeStats


@dataclass
class Completion:
    """One finished (or interrupted) answer: the first one to its prompt, and with `n` above 1 those
    in `others`.

    prompt_token_ids  the prompt as it was fed
    text              the answer, without special tokens and without the stop string or stop token that ended
                      it, unless they were asked for
    token_ids         everything that was generated, an end-of-text token included
    finish_reason     "stop" (end token or stop string), "length" (max_tokens or context), "abort" (interrupted)
    origins           for each token "accepted", "correction", "bonus", or "plain" when nothing was drafted
    logprobs          for each token: id -> natural log-probability under the target, no filters applied;
                      None: not asked for
    stats             counters, and times in seconds
    lossless          False: a lossy verifier or `prefill` was allowed, so the text need not follow the model's distribution
    seed              the one that was used, also when none was asked for: with `verifier` it repeats the answer
    verifier          name of the acceptance rule: for a seeded answer gumbel, unless another one was asked for
    prompt_share      share of the prompt that the target read; below 1 only with `prefill`
    stop_reason       the stop string or stop_token_ids entry that ended it; None: anything else did
    prompt            the text that was given; None: token ids or messages were
    index             which of the `n` answers to its prompt
    others            the further answers that `n` asked for
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    origins: list[str]
    logprobs: list[dict[int, float]] | None
    stats: DecodeStats
    lossless: bool
    seed: int
    verifier: str = ""
    prompt_share: float = 1.0
    stop_reason: int | str | None = None
    prompt: str | None = None
    index: int = 0
    others: list[Completion] = field(default_factory=list)

    @property
    def outputs(self) -> list[Completion]:
        """All answers to the prompt, as in vLLM's RequestOutput: this one, then the others."""
        return [self, *self.others]


@dataclass
class StreamChunk:
    """The output of one step, or of several where the reader was slow.

    text        what the step added to the text; "" while a stop string may have begun
    token_ids   the tokens of the step
    origins     for each token "accepted", "correction", "bonus", or "plain" when nothing was drafted
    pieces      the text that each token released
    completion  the whole answer, in the last chunk; None before
    """

    text: str
    token_ids: list[int]
    origins: list[str]
    pieces: list[str]
    completion: Completion | None = field(default=None)
