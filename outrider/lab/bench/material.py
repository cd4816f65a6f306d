"""From a workload to what is decoded: token ids, filled up or cut to a context length, in groups of a batch size.

*Filling up* to L tokens: before the prompt comes text of the same task, the other prompts one after the other (again and again
where they are too short), of which the end is kept: L tokens in all, the begin token once. So the model reads what looks like
earlier requests, and answers the same question as without. A prompt longer than L keeps its last L tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ConfigError
from outrider.lab.bench.bench_result import CellKey
from outrider.lab.bench.plan import Plan
from outrider.lab.workload.prompts import prepare
from outrider.lab.workload.types import OnBad, Workload, WorkloadRequest


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt of a task, ready to be fed."""

    number: int  # within its task, from 0
    request: WorkloadRequest
    tokens: list[int]
    max_tokens: int  # of the answer


@dataclass(frozen=True)
class Material:
    """Prompts by task, as they are, and what had to be left out."""

    by_task: dict[str, list[TaskPrompt]]
    first_token: int | None  # that begins every text
    notes: tuple[str, ...] = ()

    def prompts(self, key: CellKey) -> list[TaskPrompt]:
        """The prompts of a cell."""
        own, length = self.by_task[key.task], key.context
        return own if length is None else [filled(own, number, length, self.first_token) for number in range(len(own))]


def gather(
    workload: Workload, tokenizer: Any, plan: Plan, context: int, *, on_bad: OnBad = "refuse", chat_template: bool = True
) -> Material:
    """The first `plan.prompts` requests of every task, as token ids.

    Raises ConfigError where one of them does not fit into `context` together with its answer (with `on_bad="skip"`: where none
    does; later ones then take its place), and for context lengths that the model does not hold.
    """
    max_tokens = plan.sampling.required_max_tokens
    if plan.context_lengths and max(plan.context_lengths) + max_tokens > context:
        raise ConfigError(
            f"context length {max(plan.context_lengths)} and {max_tokens} new tokens are more than the {context} tokens that the "
            f"model holds: --context-lengths up to {context - max_tokens}, or fewer --max-tokens"
        )
    wanted = workload if on_bad == "skip" else replace(workload, requests=tuple(firsts(workload.requests, plan.prompts)))
    prepared = prepare(wanted, tokenizer, context=context, max_tokens=max_tokens, on_bad=on_bad, chat_template=chat_template)
    by_request = {one.request.id: one for one in prepared.prompts}
    by_task: dict[str, list[TaskPrompt]] = {}
    for request in firsts([one.request for one in prepared.prompts], plan.prompts):
        of_task, found = by_task.setdefault(request.task, []), by_request[request.id]
        of_task.append(TaskPrompt(len(of_task), request, found.tokens, found.max_tokens))
    return Material(by_task, getattr(tokenizer, "bos_token_id", None), tuple(prepared.notes))


def filled(prompts: Sequence[TaskPrompt], number: int, length: int, first_token: int | None) -> TaskPrompt:
    """Prompt `number` with exactly `length` tokens; see the module docstring."""
    own = prompts[number]
    head = own.tokens[:1] if own.tokens[0] == first_token else []
    bodies = [one.tokens[1:] if one.tokens[0] == first_token else one.tokens for one in prompts]
    body, room = bodies[number], length - len(head)
    others = [token for step in range(len(bodies), 1, -1) for token in bodies[(number - step + 1) % len(bodies)]] or body
    missing = max(room - len(body), 0)
    filler = (others * (missing // len(others) + 1))[-missing:] if missing else []
    return replace(own, tokens=[*head, *filler, *body[-room:]])


def runnable_cells(plan: Plan, material: Material) -> tuple[list[CellKey], list[str]]:
    """Cells with enough prompts for their batch size, and a note for each task that has too few. Raises ConfigError where none
    has enough."""
    keys = plan.cell_keys(list(material.by_task))
    able = [key for key in keys if key.batch_size <= len(material.by_task[key.task])]
    notes = [
        f"{key.task}: {len(material.by_task[key.task])} prompts are no batch of {key.batch_size}; left out"
        for key in keys
        if key not in able
    ]
    if not able:
        raise ConfigError(f"{notes[0].removesuffix('; left out')}: raise --prompts, or take a smaller batch size")
    return able, list(dict.fromkeys(notes))


def groups(prompts: Sequence[TaskPrompt], batch_size: int, turn: int, seed: int) -> list[list[TaskPrompt]]:
    """What is decoded together in round `turn`: whole batches only. Batches of several are drawn by lot anew in every round, so
    that no prompt always has the same neighbours; what is left over takes part in another round."""
    order = list(prompts)
    if batch_size > 1:
        random.Random(f"{seed} {turn}").shuffle(order)
    return [order[start : start + batch_size] for start in range(0, len(order) - batch_size + 1, batch_size)]


def firsts(requests: Sequence[WorkloadRequest], count: int) -> Iterator[WorkloadRequest]:
    """The first `count` of every task."""
    taken: Counter[str] = Counter()
    for request in requests:
        taken[request.task] += 1
        if taken[request.task] <= count:
            yield request


def digest(workload: Workload) -> str:
    """Name and prompts, for knowing a workload again."""
    asked = "\n".join(f"{one.id} {one.prompt} {one.messages}" for one in workload.requests)
    return f"{workload.name} {hashlib.sha256(asked.encode()).hexdigest()[:12]}"
