"""One drafter in two engines: vLLM drafts with the exported folder, Outrider with the source, on
the same prompts.

    vLLM       x_0 ... x_{n-1}          its pass over the prompt gives y_0 without a draft; the first draft stands behind y_0
    Outrider   x_0 ... x_{n-1} y_0      so ours begins behind vLLM's y_0, which makes both draft at the same positions

The two must differ by their drafts alone, so three things are kept equal. Every draft counts in
full, the last one too, which may reach beyond the answer's end: an answer cut to length would lower
acceptance by a few percent, in one engine more than in the other. Ours follows vLLM's text: where
rounding turns a tie of the target around, our text departs, and ours goes on along vLLM's; two
texts have two acceptances, whatever drafts. vLLM runs first: when ours runs, its memory is free
again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from in_vllm.methods import Method, method_of
from in_vllm.process import Interpreter
from outrider.lab.workload.prompts import prepare
from outrider.lab.workload.types import Workload
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.train.export import Target, load_head

# by which tau may differ between two engines that run one head: rounding turns a few ties around
WITHIN = 0.03
ROOM = 64  # positions behind the longest answer, for its last draft


@dataclass(frozen=True)
class Acceptance:
    """What one engine counted over all prompts; every draft in full, also where it reaches beyond
    the answer's end."""

    drafts: int  # target passes that had a draft
    drafted: int  # draft tokens
    accepted: int
    accepted_per_position: list[int]  # [j]: drafts whose token j + 1 was accepted

    @property
    def tau(self) -> float:
        """1 + accepted / drafts."""
        return 1 + self.accepted / max(self.drafts, 1)

    @property
    def per_position(self) -> list[float]:
        """[j]: share of the drafts whose token j + 1 was accepted."""
        return [count / max(self.drafts, 1) for count in self.accepted_per_position]


@dataclass(frozen=True)
class Compared:
    """One drafter in two engines, on the same prompts and texts, greedily."""

    method: Method
    versions: dict[str, str]  # vllm and its torch
    outrider: Acceptance
    vllm: Acceptance
    # how often our target chose another token than vLLM's; ours then went on along vLLM's text
    departures: int
    same_texts: int  # answers without a departure

    @property
    def tau_ratio(self) -> float:
        """vLLM's tau / ours."""
        return self.vllm.tau / self.outrider.tau

    @property
    def is_within(self) -> bool:
        """Whether tau differs by at most WITHIN."""
        return abs(self.tau_ratio - 1) <= WITHIN


@dataclass(frozen=True)
class Comparing:
    """How to compare."""

    prompts: Sequence[Sequence[int]]  # token ids
    method: Method
    max_new_tokens: int = 64
    threads: int | None = None
    timeout_s: float = 900.0

    @property
    def max_model_len(self) -> int:
        """Tokens of context that an engine needs at most."""
        return max(map(len, self.prompts)) + self.max_new_tokens + ROOM


def prompt_tokens(workload: Workload, target: Target, max_new_tokens: int) -> list[list[int]]:
    """Token ids of all prompts; conversations in the chat template, where the target has one.
    Raises ConfigError naming those that do not fit."""
    template = bool(getattr(target.tokenizer, "chat_template", None))
    prepared = prepare(
        workload,
        target.tokenizer,
        context=target.context - ROOM,
        max_tokens=max_new_tokens,
        chat_template=template,
    )
    return [prompt.tokens for prompt in prepared.prompts]


def method_for(kind: str, source: Path, target: Target) -> Method:
    """How vLLM drafts with what is in `source`."""
    return method_of(kind, None if kind == "draft-model" else load_head(kind, source, target))


def compare(
    interpreter: Interpreter,
    kind: str,
    source: Path,
    out: Path,
    target: Target,
    how: Comparing,
    log: Path,
    status: Callable[[str], None] = lambda line: None,
) -> Compared:
    """Raises VllmError when vLLM does not run it."""
    method = how.method
    status(f"vLLM drafts with {out} (method {method.name})")
    with tempfile.TemporaryDirectory() as folder:
        answer = interpreter.ask(_task(out, target, how), Path(folder), log, how.timeout_s)
    status(f"Outrider drafts with {source}")
    following = Following(_outrider(kind, source, target, how), method.num_draft_tokens)
    departed = [
        following.along(prompt, text)
        for prompt, text in zip(how.prompts, answer["tokens"], strict=True)
    ]
    return Compared(
        method,
        answer["versions"],
        following.counted(),
        Acceptance(**answer["counters"]),
        sum(departed),
        departed.count(0),
    )


def _task(out: Path, target: Target, how: Comparing) -> dict[str, Any]:
    return {
        "target": target.name,
        "dtype": target.dtype,
        "max_model_len": how.max_model_len,
        "max_tokens": how.max_new_tokens,
        "threads": how.threads,
        "prompts": [list(prompt) for prompt in how.prompts],
        "speculative": how.method.config(out),
    }


def _outrider(kind: str, source: Path, target: Target, how: Comparing) -> LLM:
    return LLM(
        target.name,
        drafter=kind,
        draft=source,
        num_draft_tokens=how.method.num_draft_tokens,
        dtype=target.dtype,
        threads=how.threads,
        runtime="eager",
        max_num_seqs=1,
    )


class Following:
    """Outrider, drafting along answers that another engine gave."""

    def __init__(self, llm: LLM, num_draft_tokens: int) -> None:
        self._llm = llm
        self._length = num_draft_tokens
        self._total = DecodeStats()

    def along(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Draft from behind the answer's first token to its end; returns how often our text
        departed from it."""
        position = 1
        departures = 0
        while position < len(answer):
            params = SamplingParams(
                temperature=0, max_tokens=len(answer) - position + self._length, ignore_eos=True
            )
            # with room for a whole last draft
            stream = self._llm.stream([*prompt, *answer[:position]], params)
            assert isinstance(stream, Generator), "what can be closed before its end"
            for chunk in stream:
                ahead = answer[position : position + len(chunk.token_ids)]
                agreed = sum(
                    1
                    for _ in takewhile(
                        lambda pair: pair[0] == pair[1], zip(ahead, chunk.token_ids, strict=False)
                    )
                )
                if agreed < len(ahead):
                    position = position + agreed + 1
                    departures = departures + 1
                    break
                position += agreed
                if position >= len(answer):
                    break
            stream.close()
            assert self._llm.last_completion is not None, "a closed stream leaves its completion"
            self._total = self._total.merge(self._llm.last_completion.stats)
        return departures

    def counted(self) -> Acceptance:
        """Over all answers so far."""
        total = self._total
        counts = self._total.accepted_per_position
        return Acceptance(
            drafts=total.steps,
            drafted=total.drafted,
            accepted=total.accepted,
            accepted_per_position=counts + [0] * (self._length - len(counts)),
        )
